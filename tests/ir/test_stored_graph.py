"""Graphs in files: what is read back is what was written, in text, under the verifier and in numbers."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.phases import rewrite
from dgraph.errors import FormatError, InputError
from dgraph.families import families
from dgraph.families.adapters import Adapter, LowRank
from dgraph.families.weights import weights_of
from dgraph.ir import graph_file, stored_graph
from dgraph.ir.graph import Graph
from dgraph.ir.stored_graph import from_data, to_data
from dgraph.ir.verifier import verify
from dgraph.numerics import State, run, small_steps
from dgraph.numerics.steps import reads_choice
from dgraph.passes import PackRows, QuantizeWeights, ShardTensorParallel
from dgraph.recipes import RECIPES
from dgraph.testing import models
from dgraph.testing.models import TinyModel
from tests.amounts import first_cases
from tests.tiny import Hand, rewritten


def pairs() -> list[Any]:
    """All models and recipes that fit: by default each model is met, and each recipe once."""
    fits = {tiny: [name for name in RECIPES.names() if _fits(tiny, name)] for tiny in models(None, *families())}
    chosen = {(tiny, "dense") for tiny in fits}
    for name in RECIPES.names():
        able = [tiny for tiny, names in fits.items() if name in names]
        chosen.add((min(able, key=lambda tiny: sum(tiny is one for one, _ in chosen)), name))
    return [
        pytest.param(tiny, name, marks=() if (tiny, name) in chosen else pytest.mark.release, id=f"{tiny}-{name}")
        for tiny, names in fits.items()
        for name in names
    ]


def _fits(tiny: TinyModel, name: str) -> bool:
    with warnings.catch_warnings(action="ignore"):
        try:
            tiny.recipe(name)
        except dgraph.DgraphError:
            return False
    return True


def same(graph: Graph, again: Graph) -> None:
    """Assert that two graphs are equal in all that one can see of them."""
    assert to_data(again) == to_data(graph)
    assert dgraph.dump(again) == dgraph.dump(graph)
    assert [(n.name, graph.type_text(n)) for n in graph.nodes[:-1]] == [
        (n.name, again.type_text(n)) for n in again.nodes[:-1]
    ]
    assert again.inputs == graph.inputs
    assert list(again.inputs) == list(graph.inputs)
    assert (again.outputs, again.history, again.spec, again.whole) == (
        graph.outputs,
        graph.history,
        graph.spec,
        graph.whole,
    )
    assert (again.sharding, again.divided) == (graph.sharding, graph.divided)
    verify(again)


def results(graph: Graph) -> Iterator[dict[str, torch.Tensor]]:
    """The outputs of the small steps that a graph can run."""
    state = State()
    for step in small_steps(graph.spec):
        inputs = state.inputs(graph, step)
        if inputs is not None and not (step.whole and reads_choice(graph)):
            found = run(graph, inputs)
            yield {name: found.values[node].clone() for name, node in graph.results().items()}


@pytest.mark.parametrize(("tiny", "recipe"), pairs())
@pytest.mark.filterwarnings("ignore:.* divides pairs")
def test_every_phase_of_every_recipe_comes_back(tiny: TinyModel, recipe: str, tmp_path: Path) -> None:
    for name, phase in rewrite(tiny.graph, tiny.recipe(recipe)).items():
        file = tmp_path / f"{name}.json"
        phase.graph.save(file)
        again = Graph.load(file, phase.graph)
        same(phase.graph, again)
        assert again.tensors == phase.graph.tensors, "the very tensors"
        for before, after in zip(results(phase.graph), results(again), strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before)


@pytest.fixture(scope="module")
def packed() -> Graph:
    """A small graph after a pass."""
    return rewritten(models(None, "sdar")[0].graph, PackRows())


def test_weights_of_a_model_by_name(tmp_path: Path, packed: Graph) -> None:
    tiny = models(None, "sdar")[0]
    packed.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json", tiny.model)
    assert again.tensors == {
        name: tensor
        for name, tensor in weights_of(tiny.model.module, tiny.model.prefix).items()
        if name in packed.tensors
    }
    same(packed, again)


def test_weights_inside(tmp_path: Path, packed: Graph) -> None:
    packed.save(tmp_path / "graph.json", weights=True)
    assert {path.name for path in tmp_path.iterdir()} == {"graph.json", "graph.safetensors"}
    again = Graph.load(tmp_path / "graph.json")
    same(packed, again)
    assert again.tensors.keys() == packed.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in packed.tensors.items())
    (tmp_path / "graph.safetensors").unlink()
    with pytest.raises(InputError, match=r"graph\.safetensors, which has the weights .*cannot be read: No such file"):
        Graph.load(tmp_path / "graph.json")
    same(packed, Graph.load(tmp_path / "graph.json", packed))


def test_without_weights_a_graph_can_be_read_but_gives_no_number(tmp_path: Path, packed: Graph) -> None:
    packed.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json")
    same(packed, again)
    assert all(tensor.untyped_storage().nbytes() <= 8 for tensor in again.tensors.values())
    (step, *_) = results(again)
    assert step["logits"].isnan().all()


def test_tied_weights_and_views_are_written(tmp_path: Path) -> None:
    hand = Hand()
    table = torch.randn(6, 4)
    x = hand.input("x", "N", 4)
    nodes = [hand.graph.add_weight(n, t) for n, t in (("a", table), ("b", table), ("c", table[2:]), ("d", table[:3]))]
    ys = [hand.call(torch.ops.aten.linear.default, x, node) for node in nodes]
    graph = hand.returns(**{f"y{i}": y for i, y in enumerate(ys)})
    graph.save(tmp_path / "graph.json", weights=True)
    again = Graph.load(tmp_path / "graph.json")
    assert all(torch.equal(again.tensors[name], graph.tensors[name]) for name in "abcd")
    assert again.tensors["a"] is again.tensors["b"]


@pytest.mark.parametrize("move", [copy.copy, copy.deepcopy, lambda graph: pickle.loads(pickle.dumps(graph))])
def test_copies_and_pickles_have_the_same_form(move: Callable[[Graph], Graph], packed: Graph) -> None:
    again = move(packed)
    same(packed, again)
    name = next(iter(packed.tensors))
    assert torch.equal(again.tensors[name], packed.tensors[name])
    assert (again.tensors[name] is packed.tensors[name]) == (move is copy.copy)


def test_a_quantised_and_a_divided_graph_come_back(tmp_path: Path) -> None:
    graph = models(None, "llada2")[0].graph
    for number, step in enumerate((QuantizeWeights("int4"), ShardTensorParallel(2, rank=1))):
        made, file = rewritten(graph, step), tmp_path / f"{number}.json"
        made.save(file)
        again = Graph.load(file, made)
        same(made, again)
        assert {name: int(n) for name, n in again.own.items()} == {name: int(n) for name, n in made.own.items()}
    whole = Graph.load(file, graph)
    same(made, whole)
    divided = [name for name, part in made.divided.items() if part.kind != "replicated"]
    assert divided
    assert all(torch.equal(whole.tensors[name], made.tensors[name]) for name in made.tensors)


def test_an_adapter_comes_back(tmp_path: Path, packed: Graph) -> None:
    graph = packed.copy()
    name = next(name for name in graph.tensors if name.endswith("q_proj.weight"))
    rows, columns = graph.tensors[name].shape
    graph.adapter = Adapter("draft", {name: LowRank(torch.randn(2, columns), torch.randn(rows, 2), 0.5)})
    graph.save(tmp_path / "graph.json", weights=True)
    read = Graph.load(tmp_path / "graph.json").adapter
    assert read is not None
    assert (read.name, read.weights[name].scale) == ("draft", 0.5)
    assert torch.equal(read.weights[name].up, graph.adapter.weights[name].up)
    assert Graph.load(tmp_path / "graph.json", graph).adapter is graph.adapter
    shapes = from_data(to_data(graph)).adapter
    assert shapes is not None
    assert shapes.weights[name].down.shape == (2, columns)


def test_a_file_says_nothing_of_this_machine(tmp_path: Path, packed: Graph) -> None:
    packed.save(tmp_path / "graph.json")
    text = (tmp_path / "graph.json").read_text()
    sources = {n.meta["source"].rpartition(":")[0] for n in packed.calls if n.meta.get("source")}
    assert any(source.startswith("transformers/models/") for source in sources)
    assert not any(Path(source).is_absolute() for source in sources)
    assert str(Path(dgraph.__file__).parent) not in text
    assert str(Path.home()) not in text


@pytest.fixture(scope="module")
def written(packed: Graph) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(to_data(packed)))
    return data


def _call(data: dict[str, Any], number: int = 0) -> dict[str, Any]:
    calls = [node for node in data["nodes"] if "op" in node]
    found: dict[str, Any] = calls[number]
    return found


def _other_schema(data: dict[str, Any]) -> None:
    name = next(name for name in data["ops"] if name.startswith("dgraph."))
    data["ops"][name] = "dgraph::it(Tensor x) -> Tensor"


@first_cases(
    4,
    "change, message",
    [
        (lambda d: d.update({"dgraph graph": 2}), "is of version 2 of its form, and this dgraph reads version 1"),
        (lambda d: d.pop("nodes"), "damaged: it has no entry 'nodes'"),
        (lambda d: d["ops"].update({"aten.nothing.default": ""}), "there is no op 'aten.nothing.default'"),
        (_other_schema, "made for dgraph::it"),
        (lambda d: d["ops"].update({"os.system.x": ""}), "there is no op 'os.system.x'"),
        (lambda d: d["ops"].update({"aten.save.default": ""}), "op 'aten.save.default' is not of tensors"),
        (lambda d: d["ops"].update({"aten._print.default": ""}), "op 'aten._print.default' is not of tensors"),
        (lambda d: d["ops"].update({"aten.from_file.default": ""}), "op 'aten.from_file.default' is not of tensors"),
        (lambda d: _call(d).update(op="aten.relu.default"), "which is not among the graph's ops"),
        (lambda d: _call(d, 3).update(args=[{"node": "nothing"}]), "reads 'nothing', which does not stand before it"),
        (lambda d: _call(d).update(type="f32[N, 3]"), "the graph has f32[N, 3]"),
        (lambda d: d["spec"].update(layers=0), "layers must be a whole number"),
        (lambda d: d["spec"].update(more=1), "unexpected keyword argument 'more'"),
        (lambda d: d["nodes"][0].update(dtype="nn"), "there is no dtype 'nn'"),
        (lambda d: d["nodes"].append(d["nodes"][0]), "twice"),
        (lambda d: d.update(inputs=3), "damaged"),
        (lambda d: d.update(outputs={"logits": "nothing"}), "damaged"),
        (lambda d: d.pop("dgraph graph"), "this is no graph"),
    ],
)
def test_a_file_that_is_no_such_graph(
    change: Callable[[Any], Any], message: str, written: dict[str, Any], tmp_path: Path
) -> None:
    data = copy.deepcopy(written)
    change(data)
    (tmp_path / "graph.json").write_text(json.dumps(data))
    with pytest.raises(dgraph.DgraphError) as caught:
        Graph.load(tmp_path / "graph.json")
    assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path, packed: Graph) -> None:
    file = tmp_path / "graph.json"
    packed.save(file, weights=True)
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="damaged: not JSON"):
        Graph.load(file)
    file.write_text("[1]")
    with pytest.raises(FormatError, match="this is no graph"):
        Graph.load(file)
    file.write_text(whole)
    beside = tmp_path / "graph.safetensors"
    beside.write_bytes(beside.read_bytes()[:-5])
    with pytest.raises(FormatError, match="the weights of this graph are damaged"):
        Graph.load(file)
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read"):
        Graph.load(tmp_path / "nowhere.json")
    with pytest.raises(InputError, match=r"call that of the graph graph\.json"):
        packed.save(tmp_path / "graph.safetensors")
    with pytest.raises(InputError, match="tensors by name, got str"):
        Graph.load(file, "tiny_sdar")  # type: ignore[arg-type]


def test_weights_that_do_not_fit(packed: Graph, written: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(FormatError, match=rf"weight '{name}' of the graph is float32\[.*\], got float32\[3, 5\]"):
        from_data(written, {**packed.tensors, name: torch.zeros(3, 5)})
    with pytest.raises(FormatError, match=rf"have no '{name}'"):
        from_data(written, {n: t for n, t in packed.tensors.items() if n != name})


def test_values_that_json_has_no_word_for() -> None:
    values = [1, 2.5, math.inf, -math.inf, None, True, "x", torch.float32, torch.device("cpu"), [torch.strided, 3]]
    assert stored_graph._value(json.loads(json.dumps(stored_graph._plain(values))), {}) == values
    with pytest.raises(FormatError, match="type complex"):
        stored_graph._plain(1j)
    with pytest.raises(FormatError, match="unknown value dtype: nn"):
        stored_graph._value({"dtype": "nn"}, {})
    with pytest.raises(FormatError, match="neither a registered op"):
        stored_graph._name(print)
    assert stored_graph._name(operator.getitem) == "operator.getitem"


def test_a_text_has_a_line_for_each_node(packed: Graph) -> None:
    lines = graph_file.graph_text(to_data(packed)).splitlines()
    assert sum('"type": ' in line for line in lines) == len(packed.calls)
