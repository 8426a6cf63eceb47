"""Differences between two arms on the same prompts, with intervals of 95 % and a test.

Arms answer the same prompts, so a difference is taken prompt by prompt: the difficulty of a prompt is in both.
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
"""Seed of the resampling: the same results give the same interval."""
_DRAWS = 2**22
"""Draws that are made at once: 32 MB of them."""


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
        both, mine, other, neither: numbers of prompts that both arms have right, only this one, only the other, and
            neither.
    """

    both: int
    mine: int
    other: int
    neither: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Accuracy:
        """Count pairs (right here, right there)."""
        count = [pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))]
        return cls(*count)

    @property
    def p(self) -> float:
        """P-value of the two-sided exact McNemar test.

        Suppose that each prompt on which the arms differ is as likely to go either way. Then p is the probability that
        they are divided at least this unevenly.
        """
        count = self.mine + self.other
        fewer = sum(math.comb(count, k) for k in range(min(self.mine, self.other) + 1))
        return min(1.0, 2 * fewer / 2**count)

    def difference(self) -> Difference:
        """Share of right answers here less that of the other arm.

        The interval is method 10 of Newcombe (1998), Statistics in Medicine 17, 2635-2650. It combines Wilson's
        intervals of both shares with their correlation.
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
    """A difference of two quotients of sums, with the percentile interval of a bootstrap over prompts.

    Args:
        pairs: for each prompt (numerator, denominator) here, then (numerator, denominator) there: nats and tokens, say.
        resamples: number of resamples; each draws as many prompts as there are, with replacement.
        seed: seed of these draws.

    Returns:
        sum/sum here less sum/sum there; None for fewer than two prompts, or if a denominator is 0.
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
    """The difference of two quotients, from sums f64[4] or f64[4, k]; NaN if a denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = sums[0] / sums[1] - sums[2] / sums[3]
    return np.where(np.isfinite(found), found, np.nan)


@dataclass(frozen=True)
class Paired:
    """An arm against another, over the prompts that both have answered.

    Attributes:
        prompts: number of these prompts.
        accuracy: right answers, over prompts that have an answer; None if no prompt has one.
        nll: difference in nats per token of the judge, over prompts of which both responses were judged.
        repetition: difference in the share of repeated n-grams.
        tokens: difference in the tokens of a response.
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
        """Compare two arms.

        Args:
            found: questions with the results here and there.
            judged: gives the judgement of a response; None for a response that was not judged.

        Returns:
            The comparison; None without questions.
        """
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
