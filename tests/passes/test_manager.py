"""The pass manager: order, near misses, verification after each pass, history, what a pass must declare."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from dgraph.errors import InputError, PassError, UnknownName, VerifyError
from dgraph.ir.graph import Graph
from dgraph.passes import PASSES, CacheKV, ChunkLMHead, EvictTokens, FuseProjections, OnlyKV, PackRows
from dgraph.passes.base import Effect, Pass, Report, check_pass
from dgraph.passes.manager import run_passes
from dgraph.recipes import Phase
from dgraph.types.shapes import InputSpec
from tests.tiny import Hand, ops_of, report_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Do(Pass):
    """A pass that does what it is given."""

    what: Callable[[Graph, Report], Any] = lambda graph, report: None
    label: str = "Do"

    effect: ClassVar[Effect] = Effect.EXACT
    summary: ClassVar[str] = "does what it is given"

    @property
    def name(self) -> str:
        return self.label

    def run(self, graph: Graph, report: Report) -> None:
        self.what(graph, report)


class DoMore(Do):
    signature = frozenset({"extra", "z"})
    changes_weights = True


def small() -> Graph:
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("layers.1.w", 4)
    hand.layer = 1
    return hand.returns(y=hand.call(aten.add.Tensor, hand.call(aten.relu.default, x), w))


def fires(graph: Graph, report: Report) -> None:
    report.did("fired", 1)


def negate(graph: Graph, report: Report) -> None:
    graph.set_outputs({"y": graph.call(aten.neg.default, (graph.result("y"),), before=graph.output, by=report.name)})
    report.did("negated")


def test_passes_run_in_the_order_given_and_are_reported() -> None:
    graph, seen = small(), []

    def watch(step: Pass, graph: Graph) -> None:
        seen.append((step.name, ops_of(graph)))

    first, second = Do(negate, "First"), Do(fires, "Second")
    reports = run_passes(graph, [first, second, first], observer=watch)
    assert [r.name for r in reports] == ["First", "Second", "First"]
    assert seen == [
        ("First", ["relu", "add", "neg"]),
        ("Second", ["relu", "add", "neg"]),
        ("First", ["relu", "add", "neg", "neg"]),
    ]
    assert [r.nodes for r in reports] == [(2, 3), (3, 3), (3, 4)]
    assert all(s >= 0 for r in reports for s in r.seconds)
    assert reports[1].applied[0].layer == 1
    assert graph.history == (repr(first), repr(second), repr(first))


def test_a_pass_that_applied_nowhere_is_an_error_that_lists_the_near_misses() -> None:
    def misses(graph: Graph, report: Report) -> None:
        report.skip("it is too round", graph.calls[0])
        report.skip("it is too square", graph.calls[1])

    graph = small()
    with pytest.raises(PassError) as caught:
        run_passes(graph, [Do(misses, "Picky"), Do(negate)])
    message = str(caught.value)
    assert "applied nowhere." in message
    assert "near miss at layer 1 (block), node relu_default: it is too round" in message
    assert "near miss at layer 1 (block), node add_tensor: it is too square" in message
    assert "mark it optional" in message
    assert ops_of(graph) == ["relu", "add"], "what follows did not run"

    with pytest.raises(PassError, match="Nothing in the graph came close"):
        run_passes(small(), [Do(label="Blind")])


def test_a_pass_that_rewrites_and_reports_nothing_is_an_error() -> None:
    def silent(graph: Graph, report: Report) -> None:
        negate(graph, Report("Silent", "", Effect.EXACT))

    def retargets(graph: Graph, report: Report) -> None:
        graph.calls[0].target = aten.neg.default

    for what in (silent, retargets):
        for optional in (frozenset[str](), frozenset({"Silent"})):
            with pytest.raises(
                PassError, match=r"changed the graph, but reported nothing\. Call report\.did"
            ) as caught:
                run_passes(small(), [Do(what, "Silent")], optional)
            assert "applied nowhere" not in str(caught.value)


def test_calls_that_nothing_reads_may_go_without_a_report() -> None:
    graph = small()
    graph.call(aten.neg.default, (graph.calls[0],), before=graph.output, by="")
    run_passes(graph, [Do(lambda graph, report: graph.sweep(), "Sweep")], frozenset({"Sweep"}))
    assert ops_of(graph) == ["relu", "add"]


def test_what_a_pass_raises_names_it() -> None:
    def stumbles(graph: Graph, report: Report) -> None:
        raise KeyError("layer")

    with pytest.raises(KeyError, match="layer") as caught:
        run_passes(small(), [Do(stumbles, "Clumsy")])
    assert any("while the pass Do(" in note and "Clumsy" in note for note in caught.value.__notes__)


def test_an_optional_pass_may_apply_nowhere() -> None:
    graph = small()
    (report,) = run_passes(graph, [Do(label="Blind")], optional=frozenset({"Blind"}))
    assert report.applied == []
    assert graph.history == (repr(Do(label="Blind")),)
    with pytest.raises(PassError):
        run_passes(graph, [Do(label="Blind")], optional=frozenset({"Other"}))


def test_the_graph_is_verified_after_each_pass() -> None:
    def breaks(graph: Graph, report: Report) -> None:
        graph.calls[0].meta["val"] = graph.symbols.empty(("N", 5), torch.float32)
        report.did("broke it")

    ran = []
    with pytest.raises(VerifyError, match=r"after Breaks: rule 'types'.*\n.*layer 1 \(block\), node relu"):
        run_passes(small(), [Do(breaks, "Breaks"), Do(lambda g, r: ran.append(1))])
    assert ran == []


def add_input(graph: Graph, report: Report) -> None:
    extra = graph.add_input(InputSpec("extra", torch.float32, ("N", 4)))
    both = graph.call(aten.add.Tensor, (graph.result("y"), extra), before=graph.output, by=report.name)
    graph.set_outputs({"y": both})
    report.did("added")


def add_output(graph: Graph, report: Report) -> None:
    graph.set_outputs({**graph.results(), "z": graph.calls[0]})
    report.did("added")


def halve_weight(graph: Graph, report: Report) -> None:
    w = graph.weight("layers.1.w")
    graph.replace(w, graph.add_weight("half", torch.ones(4)))
    del graph.tensors["layers.1.w"]
    report.did("replaced")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (add_input, r"input extra was added; the pass declares no changes; add the name to `signature`"),
        (add_output, r"output z was added"),
        (halve_weight, r"weights changed \(half, layers\.1\.w\)"),
    ],
)
def test_a_pass_changes_only_what_it_declares(what: Callable[[Graph, Report], None], message: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        run_passes(small(), [Do(what, "Sly")])
    assert str(caught.value).startswith("after Sly: rule 'signature'")
    run_passes(small(), [DoMore(what)])


@pytest.mark.parametrize("kind", [InputError, PassError, VerifyError])
def test_errors_of_a_pass_say_which_pass(kind: type[Exception]) -> None:
    def fails(graph: Graph, report: Report) -> None:
        raise kind("no such thing")

    with pytest.raises(kind, match=r"^Fails: no such thing$") as caught:
        run_passes(small(), [Do(fails, "Fails")])
    assert caught.value.__cause__ is not None

    def says_so_itself(graph: Graph, report: Report) -> None:
        raise kind("Fails: no such thing")

    with pytest.raises(kind, match=r"^Fails: no such thing$"):
        run_passes(small(), [Do(says_so_itself, "Fails")])


def test_an_unknown_name_in_a_pass_says_which_pass() -> None:
    def fails(graph: Graph, report: Report) -> None:
        raise UnknownName("signal", "delt", ["delta"])

    with pytest.raises(PassError, match=r"Fails: unknown signal 'delt'\. Did you mean 'delta'"):
        run_passes(small(), [Do(fails, "Fails")])


def test_other_errors_are_not_hidden() -> None:
    def fails(graph: Graph, report: Report) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        run_passes(small(), [Do(fails)])


# -- passes as values --------------------------------------------------------------------------------------------


def test_a_pass_is_a_value() -> None:
    assert EvictTokens(alpha=1.5) == EvictTokens()
    assert EvictTokens(alpha=1.2) != EvictTokens()
    assert PackRows() != CacheKV()
    assert hash(ChunkLMHead(7)) == hash(ChunkLMHead(7))
    assert eval(repr(EvictTokens(alpha=2.0)), {"EvictTokens": EvictTokens}) == EvictTokens(alpha=2.0)
    with pytest.raises(FrozenInstanceError):
        ChunkLMHead().max_num_logits = 3  # type: ignore[misc]
    assert replace(ChunkLMHead(), max_num_logits=3).max_num_logits == 3


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"effect": "exact"}, r"^pass Odd: effect must be Effect\.EXACT, .*, got 'exact'"),
        ({"summary": None}, "^pass Odd: summary must be a text, got None"),
        ({"signature": "kept"}, r'signature must be a frozenset of names, as frozenset\(\{"kept"\}\), got'),
        ({"changes_weights": "no"}, "changes_weights must be True or False"),
        ({"effect": Effect.EXACT, "__annotations__": {"effect": "Effect"}}, "effect is no field"),
        ({"__init__": lambda self, share: None}, "write @dataclass.frozen=True. above the class .* and no __init__"),
    ],
)
def test_what_the_class_of_a_pass_declares_wrongly_is_refused(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        type("Odd", (Pass,), declared)


class NoDataclass(Pass):
    effect = Effect.EXACT
    summary = "no dataclass"

    def run(self, graph: Graph, report: Report) -> None: ...


def test_a_pass_that_is_no_value_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^phase 'step': pass NoDataclass must be a dataclass of its own.*frozen=True"
    ):
        Phase("step", (NoDataclass(),))
    check_pass(dataclass(frozen=True)(NoDataclass)())
    with pytest.raises(
        InputError, match=r"passes are objects of subclasses of dgraph\.passes\.Pass, as CacheKV\(\), got"
    ):
        check_pass(CacheKV)


def test_a_pass_as_json() -> None:
    plain = EvictTokens(alpha=float("inf")).to_json()
    assert plain == {
        "pass": "EvictTokens",
        "alpha": "inf",
        "after": 1,
        "signal": "delta",
        "select": "top",
        "keep": 0,
        "pool": 3,
        "full_steps": 0,
        "average_over": "block",
        "among": "candidates",
    }
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert PackRows().to_json() == {"pass": "PackRows"}


def test_every_pass_says_what_it_does_to_the_numbers() -> None:
    effects = {name: cls.effect for name, cls in PASSES.items()}
    assert effects == {
        "QuantizeWeights": Effect.APPROXIMATE,
        "ShardTensorParallel": Effect.REASSOCIATES,
        "PackRows": Effect.EXACT,
        "AdaptDrafts": Effect.APPROXIMATE,
        "FuseProjections": Effect.REASSOCIATES,
        "CacheKV": Effect.REASSOCIATES,
        "SlotKV": Effect.EXACT,
        "AddRows": Effect.REASSOCIATES,
        "EvictTokens": Effect.APPROXIMATE,
        "GateFFN": Effect.APPROXIMATE,
        "PartialAttention": Effect.APPROXIMATE,
        "CountRows": Effect.REASSOCIATES,
        "FuseGLU": Effect.REASSOCIATES,
        "BoundRows": Effect.REASSOCIATES,
        "ReuseRows": Effect.APPROXIMATE,
        "SparseKV": Effect.APPROXIMATE,
        "ChunkLMHead": Effect.REASSOCIATES,
        "OnlyMasked": Effect.REASSOCIATES,
        "SelfCondition": Effect.REASSOCIATES,
        "EncodeRows": Effect.EXACT,
        "OnlyKV": Effect.EXACT,
        "QuantisedOperands": Effect.REASSOCIATES,
    }
    for cls in PASSES.values():
        assert cls.summary
        assert "before" in (cls.__doc__ or "")
        assert "after" in (cls.__doc__ or "")
        assert cls().name == cls.__name__


def test_a_report_as_json(packed: Graph) -> None:
    report = report_of(packed, CacheKV())
    plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert plain["pass"] == "CacheKV"
    assert plain["config"] == "CacheKV()"
    assert plain["effect"] == "reassociates"
    assert [a["layer"] for a in plain["applied"]] == [0, 1, 2, 3]
    assert plain["skipped"] == []
    assert plain["nodes_after"] - plain["nodes_before"] == 4
    assert set(plain["seconds"]) == {"rewrite", "verify"}
    missed = report_of(packed, OnlyKV()).to_json()["skipped"]
    assert [(m["layer"], m["reason"]) for m in missed] == [(None, "no kv_write in the graph; run CacheKV first")]


def test_running_a_pass_leaves_a_copy_alone(packed: Graph) -> None:
    before = ops_of(packed)
    report_of(packed, FuseProjections())
    assert ops_of(packed) == before
    assert packed.history == ("PackRows()",)
