"""Weights that a pass finds: no way to write them is left, and the model stays as it was."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from dgraph.errors import VerifyError
from dgraph.ir import readonly
from dgraph.ir.graph import Graph
from dgraph.passes import Effect, Pass, run_passes
from dgraph.passes.base import Report
from tests.tiny import Hand

aten = torch.ops.aten
Write = Callable[[Tensor], object]


@dataclass(frozen=True)
class Writes(Pass):
    """Writes a weight in some way."""

    write: Write

    effect = Effect.EXACT
    summary = "writes a weight"

    def run(self, graph: Graph, report: Report) -> None:
        self.write(graph.tensors["w"])
        report.did("wrote")


class Declares(Writes):
    """Says that it changes weights, which means others in their place."""

    changes_weights = True


def no_grad(weight: Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def swallowed(weight: Tensor) -> None:
    try:
        weight.data.mul_(2)
    except Exception:
        return


WAYS: dict[str, Write] = {
    "data": lambda w: w.data.mul_(0.0),
    "itself": lambda w: w.mul_(0.0),
    "detached": lambda w: w.detach().zero_(),
    "copied": lambda w: w.data.copy_(torch.zeros(4)),
    "without gradients": no_grad,
    "an item": lambda w: w.data.__setitem__(0, torch.nan),
    "a view": lambda w: w.data.view(2, 2).t()[1].fill_(9.0),
    "out": lambda w: torch.add(w.data, 1, out=w.data),
    "a list": lambda w: torch._foreach_mul_([w.data], 2.0),
    "init": torch.nn.init.zeros_,
    "caught": swallowed,
    "another place": lambda w: setattr(w, "data", torch.zeros(4)),
    "set": lambda w: w.data.set_(torch.zeros(4)),
    "resized": lambda w: w.data.resize_(3),
    "storage": lambda w: w.untyped_storage().fill_(1),
}
PAST_TORCH: dict[str, Write] = {
    "numpy": lambda w: w.detach().numpy().fill(0),
    "an array": lambda w: np.asarray(w.detach()).__setitem__(0, np.nan),
    "dlpack": lambda w: np.from_dlpack(w.detach()).fill(0),
    "an alias": lambda w: torch.from_numpy(w.detach().numpy()).zero_(),
}


def small() -> Graph:
    hand = Hand()
    x, w = hand.input("x", "N", 4), hand.weight("w", 4)
    graph = hand.returns(y=hand.call(aten.add.Tensor, x, w))
    graph.tensors["w"] = torch.nn.Parameter(graph.tensors["w"])
    return graph


@pytest.mark.parametrize("copied", [0, readonly.COPIED], ids=["a large model", "a small one"])
@pytest.mark.parametrize("kind", [Writes, Declares])
@pytest.mark.parametrize("way", [*WAYS, *PAST_TORCH])
def test_a_write_is_found_and_undone(
    way: str, kind: type[Writes], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readonly, "COPIED", copied)
    graph = small()
    weight = graph.tensors["w"]
    before, place = weight.detach().clone(), weight.data_ptr()
    with pytest.raises(VerifyError, match=rf"{kind.__name__}: weight 'w' is written in place \("):
        run_passes(graph, [kind((WAYS | PAST_TORCH)[way])])
    assert graph.tensors["w"] is weight
    assert torch.equal(weight.detach(), before)
    assert weight.data_ptr() == place
    assert weight.shape == (4,)


def test_memory_that_was_handed_out_before_is_watched_in_small_models() -> None:
    graph = small()
    earlier, before = graph.tensors["w"].detach().numpy(), graph.tensors["w"].detach().clone()
    with pytest.raises(VerifyError, match=r"Writes: weight 'w' is written in place \(through memory"):
        run_passes(graph, [Writes(lambda w: earlier.fill(0))])
    assert torch.equal(graph.tensors["w"].detach(), before)


def test_a_pass_that_fails_by_itself_leaves_the_bits_too() -> None:
    def fails(weight: Tensor) -> None:
        weight.detach().numpy().fill(0)
        raise ZeroDivisionError

    graph = small()
    before = graph.tensors["w"].detach().clone()
    with pytest.raises(ZeroDivisionError):
        run_passes(graph, [Writes(fails)])
    assert torch.equal(graph.tensors["w"].detach(), before)


def test_reading_is_free_and_so_is_what_a_pass_makes_itself() -> None:
    def reads(weight: Tensor) -> None:
        assert weight.detach().numpy().sum() == pytest.approx(float(weight.sum()))
        made = weight.detach().clone()
        made.mul_(2)[0] = 5
        made.numpy().fill(1)

    run_passes(small(), [Writes(reads)])


def test_a_weight_may_get_another_place_with_the_same_bits_which_is_watched_then() -> None:
    """So does FuseProjections: what it stacks is in memory once."""

    def moves(weight: Tensor) -> None:
        weight.data = whole = weight.detach().clone()
        moved.append(whole)

    moved: list[Tensor] = []
    run_passes(small(), [Writes(moves)])

    def moves_and_writes(weight: Tensor) -> None:
        moves(weight)
        moved[-1].zero_()

    with pytest.raises(VerifyError, match="weight 'w' is written in place"):
        run_passes(small(), [Writes(moves_and_writes)])


def test_tensors_are_not_held() -> None:
    weight = torch.ones(4)
    tensors = {"w": weight}
    with readonly.read_only(tensors, "Frees", ahead=False):
        storage = weakref.ref(weight.untyped_storage())
        del tensors["w"], weight
        assert storage() is None
