"""Captured graphs as plain data: what comes back is what was captured; what does not load is captured anew."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dgraph
from dgraph.cache.store import Store
from dgraph.families.weights import weights_of
from dgraph.frontend import frozen
from dgraph.frontend.frozen import FILE, capture_or_load, key_of
from dgraph.ir.stored_graph import from_data, to_data
from tests.amounts import first_cases
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers


def model(layers: int = 2, seed: int = 3) -> dgraph.Model:
    config = tiny_config(layers=layers)
    return dgraph.adopt(to_transformers(config, random_weights(config, seed)), mask_id=mask_id(config), block_length=16)


def capture(found: dgraph.Model, store: Store | None) -> tuple[dgraph.Graph, bool]:
    return capture_or_load(found.module, found.spec, found.prefix, store)


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """The captured graph of a model of one layer as it is kept."""
    return json.loads(json.dumps(to_data(capture(model(1), None)[0])))


def test_a_graph_comes_back_over_another_models_tensors(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first, other = model(seed=3), model(seed=4)
    graph, new = capture(first, store)
    again, captured_again = capture(other, store)
    assert (new, captured_again) == (True, False)
    assert dgraph.dump(again) == dgraph.dump(graph)
    assert [n.meta["role"] for n in again.calls] == [n.meta["role"] for n in graph.calls]
    assert [n.meta["source"] for n in again.calls] == [n.meta["source"] for n in graph.calls]
    weight = "model.layers.1.mlp.up_proj.weight"
    assert again.tensors[weight] is weights_of(other.module, other.prefix)[weight]
    assert to_data(again) == to_data(graph)


def test_a_program_of_a_stored_graph_answers_alike(tmp_path: Path) -> None:
    """Op by op: what is stored is the graph, whoever compiles it."""
    prompt = [list(range(6, 30))]
    programs = [dgraph.optimize(model(), "focus", backend="eager", artifacts=tmp_path / "store") for _ in range(2)]
    answers = [program.generate(input_ids=prompt, max_new_tokens=20) for program in programs]
    assert answers[0].token_ids == answers[1].token_ids


def test_every_way_to_a_graph_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op by op as well as compiled, and for a view: one capture serves them all."""
    times: list[str] = []
    capture_module = frozen.capture_module

    def counted(*args: Any) -> dgraph.Graph:
        times.append("captured")
        return capture_module(*args)

    monkeypatch.setattr(frozen, "capture_module", counted)
    graph = dgraph.optimize(model(), "dense", backend="eager").captured
    assert dgraph.dump(dgraph.capture(model())) == dgraph.dump(graph)
    assert dgraph.optimize(model(), "focus", backend="eager", artifacts=False).captured is not graph
    assert times == ["captured", "captured"]


def test_another_config_is_another_key() -> None:
    def key(found: dgraph.Model, **changes: Any) -> str:
        return key_of(found.module, found.module.identity, replace(found.spec, **changes)).digest  # type: ignore[arg-type]

    a, b = model(2), model(3)
    assert len({key(a), key(b), key(model(2, seed=9))}) == 2
    assert key(a, block_length=8, eos_ids=(3,)) == key(a)
    assert key(a, max_positions=8) != key(a)


def test_without_an_identity_nothing_is_kept(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids, position_ids)

    store, found = Store(tmp_path / "store"), model(1)
    plain = dgraph.Model("plain", Plain(found.module), found.spec, None, "inner.model.")
    assert [capture(plain, store)[1] for _ in range(2)] == [True, True]
    assert not list(store.entries.iterdir())


@first_cases(
    2,
    "change, reason",
    [
        (lambda data: data["nodes"][0].update(weight="model.nothing"), "have no 'model.nothing'"),
        (lambda data: data["ops"].update({"aten.nothing.default": ""}), "no op 'aten.nothing.default'"),
        (lambda data: data["ops"].update({"os.system": ""}), "no op 'os.system'"),
        (lambda data: data.pop("outputs"), "outputs"),
    ],
)
def test_a_graph_that_does_not_load_is_captured_anew(
    tmp_path: Path, kept: dict[str, Any], change: Any, reason: str
) -> None:
    store, found = Store(tmp_path / "store"), model(1)
    key = key_of(found.module, found.module.identity, found.spec)  # type: ignore[arg-type]
    data = copy.deepcopy(kept)
    change(data)
    store.put(key, {FILE: json.dumps(data).encode()})
    with pytest.warns(UserWarning, match="is set aside and rebuilt: it does not load") as warned:
        graph, new = capture(found, store)
    assert reason in str(warned[0].message)
    assert new
    assert to_data(graph) == kept
    assert capture(found, store)[1] is False


def test_a_tensor_of_another_shape_is_refused() -> None:
    found = model(1)
    graph, _ = capture(found, None)
    tensors = weights_of(found.module, found.prefix)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 5)
    with pytest.raises(dgraph.DgraphError, match=r"up_proj.weight' of the graph is .*, got float32\[3, 5\]"):
        from_data(to_data(graph), tensors)
