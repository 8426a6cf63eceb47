"""Requests whose rules cannot be in one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from dgraph.ops.statistics import RowLogits, Statistic
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import ConfidenceThreshold
from tests.compiled import compiled
from tests.engine.driven import Asked, Turns


@dataclass(frozen=True)
class Above(Statistic):
    """How many logits are above a number; of every number under one name."""

    least: float
    name: ClassVar[str] = "above"
    filler: ClassVar[float] = 0.0

    def measure(self, rows: RowLogits) -> Tensor:
        return (rows.logits > self.least).sum(-1).to(rows.logits.dtype)


@dataclass(frozen=True)
class ByAbove(ConfidenceThreshold):
    least: float = 0.0

    @property
    def needs(self) -> frozenset[str | Statistic]:
        return frozenset({Above(self.least)})


def test_a_rule_that_no_batch_can_have_beside_the_others_fails_alone() -> None:
    long = Decoding(max_new_tokens=64, ignore_eos=True, threshold=1.0)
    short = replace(long, max_new_tokens=4, threshold=None)
    first, other = (replace(short, policy=ByAbove(0.9, least=least)) for least in (0.0, 1.0))
    asked = [Asked((5, 6, 7), long), Asked((5, 6), first, turn=1), Asked((5, 6), other, turn=2)]
    asked.append(Asked((5, 6), other, turn=100))
    made = compiled("tiny_sdar", "dense")
    turns = Turns(made._session, asked, prepare=made._prepare, max_sequences=4, max_tokens=96)
    told = turns.run()
    assert [one.finish for one in told] == ["length", "length", "error", "length"], (
        "the last one comes when all are done"
    )
    assert "two statistics are named 'above'" in str(told[2].events[-1].error)
