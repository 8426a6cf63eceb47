"""Differences between two arms on the same prompts, with intervals of 95 % and a test.

Arms answer the same prompts, so a difference is taken prompt by prompt: what makes a prompt hard is in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dgraph.evaluate.judge import Judged, repetition
from dgraph.evaluate.questions import Question
from dgraph.evaluate.results import Result
from dgraph.evaluate.scores import wilson

RESAMPLES = 4_000
SEED = 0
"""Of the resampling: the same results give the same interval."""
_DRAWS = 2**22
"""Draws at once: 32 MB of them."""


@dataclass(frozen=True)
class Difference:
    """A difference and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Accuracy:
    """Right answers of two arms on the same prompts.

    Attributes:
        both, mine, other, neither: prompts that both have right, only this arm, only the other, none.
    """

    both: int
    mine: int
    other: int
    neither: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Accuracy:
        """Of (right here, right there)."""
        count = [pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))]
        return cls(*count)

    @property
    def p(self) -> float:
        """Two-sided exact McNemar test: how probable it is that prompts on which the arms differ are divided at least
        this unevenly, if each were as likely to go either way."""
        count = self.mine + self.other
        fewer = sum(math.comb(count, k) for k in range(min(self.mine, self.other) + 1))
        return min(1.0, 2 * fewer / 2**count)

    def difference(self) -> Difference:
        """Share of right answers here less that of the other: Newcombe (1998), Statistics in Medicine 17, 2635-2650,
        method 10. Wilson's interval of either share, combined with how they go together.
        """
        n = self.both + self.mine + self.other + self.neither
        here, there = (self.both + self.mine) / n, (self.both + self.other) / n
        (low, high), (other_low, other_high) = wilson(self.both + self.mine, n), wilson(self.both + self.other, n)
        cross: float = self.both * self.neither - self.mine * self.other
        cross = max(cross - n / 2, 0.0) if cross > 0 else cross  # its continuity correction
        margins = (self.both + self.mine, self.other + self.neither, self.both + self.other, self.mine + self.neither)
        phi = cross / math.sqrt(math.prod(margins)) if all(margins) else 0.0

        def spread(a: float, b: float) -> float:
            return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

        value = here - there
        below, above = spread(here - low, other_high - there), spread(high - here, there - other_low)
        return Difference(value, value - below, value + above)


def bootstrap(
    pairs: Sequence[tuple[float, float, float, float]], resamples: int = RESAMPLES, seed: int = SEED
) -> Difference | None:
    """A difference of two quotients of sums, with the percentile interval of prompts drawn anew.

    Args:
        pairs: of each prompt (numerator, denominator) here and (numerator, denominator) there: nats and tokens, say.
        resamples: how often as many prompts are drawn, with replacement.
        seed: of these draws.

    Returns:
        sum/sum here less sum/sum there; None for fewer than two prompts, or where a denominator is 0.
    """
    values = np.asarray(pairs, dtype=np.float64).reshape(-1, 4)
    n, whole = len(values), _quotients(values.sum(0))
    if n < 2 or math.isnan(whole):
        return None
    generator, found = np.random.default_rng(seed), []
    part = max(1, _DRAWS // n)
    for first in range(0, resamples, part):
        times = generator.multinomial(n, np.full(n, 1 / n), size=min(part, resamples - first))
        found.append(_quotients((times @ values).T))
    low, high = np.nanquantile(np.concatenate(found), (0.025, 0.975))
    return Difference(float(whole), float(low), float(high))


def _quotients(sums: Any) -> Any:
    """Of sums [4] or [4, k]; not a number where a denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = sums[0] / sums[1] - sums[2] / sums[3]
    return np.where(np.isfinite(found), found, np.nan)


@dataclass(frozen=True)
class Paired:
    """An arm against another, over the prompts that both have answered.

    Attributes:
        prompts: these.
        accuracy: right answers, over those that have one; None without any.
        nll: per token of the judge, over the responses of both that were judged.
        repetition: share of repeated n-grams.
        tokens: of a response.
    """

    prompts: int
    accuracy: Accuracy | None
    nll: Difference | None
    repetition: Difference | None
    tokens: Difference | None

    @classmethod
    def of(
        cls,
        found: Sequence[tuple[Question, Result, Result]],
        judged: Callable[[Result], Judged | None] = lambda result: None,
    ) -> Paired | None:
        """Of questions with the results here and there; judged: what a judge made of a response. None without any."""
        if not found:
            return None
        marks = [(bool(q.right(a.text)), bool(q.right(b.text))) for q, a, b in found if q.answer is not None]
        read = [(judged(a), judged(b)) for _, a, b in found]
        nats = [(a.nll, a.judge_tokens, b.nll, b.judge_tokens) for a, b in read if a is not None and b is not None]
        return cls(
            prompts=len(found),
            accuracy=Accuracy.of(marks) if marks else None,
            nll=bootstrap(nats),
            repetition=bootstrap([(*repetition(a.token_ids), *repetition(b.token_ids)) for _, a, b in found]),
            tokens=bootstrap([(len(a.token_ids), 1, len(b.token_ids), 1) for _, a, b in found]),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        value = asdict(self)
        if self.accuracy is not None:
            value["accuracy"] |= {"difference": asdict(self.accuracy.difference()), "p": self.accuracy.p}
        return {**value, "resamples": RESAMPLES, "seed": SEED}
