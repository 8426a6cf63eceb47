"""Scores of an arm: exact match with an interval, steps, rows, agreement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgraph.evaluate.judge import NGRAM, Judged, repetition
from dgraph.evaluate.questions import Question
from dgraph.evaluate.results import Result

Z95 = 1.959963984540054
"""The normal quantile of a 95 % interval."""


def wilson(hits: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share: (low, high) in [0, 1]; (0, 1) if `count` is 0."""
    if not count:
        return 0.0, 1.0
    share, spread = hits / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # The interval reaches 0 for no hits and 1 for all, which rounding would miss.
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == count else centre + half)


def equal_tokens(ids: Sequence[int], reference: Sequence[int]) -> tuple[int, int]:
    """The number of places at which two responses have the same token, and the length of the longer one."""
    return sum(a == b for a, b in zip(ids, reference, strict=False)), max(len(ids), len(reference))


@dataclass(frozen=True)
class Agreement:
    """Agreement of an arm's responses with those of another arm.

    Attributes:
        prompts: number of prompts that both arms answered.
        identical: number of these prompts with the same ids.
        equal, tokens: number of places with the same token, and of all places, over all these prompts.
    """

    prompts: int
    identical: int
    equal: int
    tokens: int

    @property
    def identical_share(self) -> float:
        """Share of prompts with the same response."""
        return self.identical / self.prompts

    @property
    def equal_share(self) -> float:
        """Share of equal tokens; responses that are all empty agree."""
        return self.equal / self.tokens if self.tokens else 1.0

    @classmethod
    def of(cls, pairs: Iterable[tuple[Result, Result]]) -> Agreement | None:
        """Compare pairs (result, result of the other arm); None without pairs."""
        found = [(a.token_ids, b.token_ids) for a, b in pairs]
        if not found:
            return None
        counts = [equal_tokens(a, b) for a, b in found]
        identical = sum(a == b for a, b in found)
        return cls(len(found), identical, sum(c[0] for c in counts), sum(c[1] for c in counts))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "prompts": self.prompts,
            "identical_prompts": self.identical_share,
            "equal_tokens": self.equal_share,
        }


@dataclass(frozen=True)
class Score:
    """Scores over some prompts.

    Attributes:
        prompts: number of decoded prompts.
        scored, hits: number of prompts that have an answer, and of those that were answered right.
        steps, decoded, rows: sums over the prompts; see `Result`.
        seconds: sum over the prompts; only for information, as prompts share a batch and the machine has other work.
        tokens: tokens of the responses, by the tokenizer of the model that wrote them, without end padding.
        repeated, ngrams: number of n-grams of these tokens that occur earlier in their response, and of all n-grams;
            see `repetition`.
        judged: number of responses that a judge has read.
        nll, judge_tokens, judge_bytes: sums over these responses: nats, tokens of the judge's tokenizer, and bytes of
            UTF-8.
        agreement: agreement with the arm of comparison; None without one.
    """

    prompts: int
    scored: int
    hits: int
    steps: int
    decoded: int
    rows: int
    seconds: float
    tokens: int = 0
    repeated: int = 0
    ngrams: int = 0
    judged: int = 0
    nll: float = 0.0
    judge_tokens: int = 0
    judge_bytes: int = 0
    agreement: Agreement | None = None

    @classmethod
    def of(
        cls,
        found: Sequence[tuple[Question, Result]],
        reference: Mapping[str, Result] | None = None,
        judged: Callable[[Result], Judged | None] = lambda result: None,
    ) -> Score:
        """Score questions and results.

        Args:
            found: questions with their results.
            reference: results of the arm of comparison by prompt; None without one.
            judged: gives the judgement of a result; None for one that was not judged.
        """
        results = [result for _, result in found]
        marks = [mark for q, r in found if (mark := q.right(r.text)) is not None]
        repeats = [repetition(r.token_ids) for r in results]
        read = [(one, len(r.text.encode())) for r in results if (one := judged(r)) is not None]
        pairs = [(r, reference[r.prompt]) for r in results if r.prompt in reference] if reference is not None else []
        return cls(
            prompts=len(results),
            scored=len(marks),
            hits=sum(marks),
            steps=sum(r.steps for r in results),
            decoded=sum(r.decoded for r in results),
            rows=sum(r.rows for r in results),
            seconds=sum(r.seconds for r in results),
            tokens=sum(len(r.token_ids) for r in results),
            repeated=sum(again for again, _ in repeats),
            ngrams=sum(count for _, count in repeats),
            judged=len(read),
            nll=sum(one.nll for one, _ in read),
            judge_tokens=sum(one.judge_tokens for one, _ in read),
            judge_bytes=sum(size for _, size in read),
            agreement=Agreement.of(pairs),
        )

    @property
    def exact_match(self) -> float | None:
        """Share of right answers; None if no prompt has an answer."""
        return self.hits / self.scored if self.scored else None

    @property
    def steps_per_prompt(self) -> float:
        """Forward passes of a prompt, on average."""
        return self.steps / self.prompts if self.prompts else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens committed per sequence and step, as in `GenerationStats`."""
        return self.decoded / self.steps if self.steps else 0.0

    @property
    def rows_per_token(self) -> float:
        """Rows through the last layers per committed token, as in `GenerationStats`."""
        return self.rows / self.decoded if self.decoded else 0.0

    @property
    def tokens_per_response(self) -> float:
        """Length of a response, on average."""
        return self.tokens / self.prompts if self.prompts else 0.0

    @property
    def repetition(self) -> float | None:
        """Share of n-grams that repeat; None if no response is long enough."""
        return self.repeated / self.ngrams if self.ngrams else None

    @property
    def nll_per_token(self) -> float | None:
        """Nats per token of the judge, over all judged responses; None if it has read no token."""
        return self.nll / self.judge_tokens if self.judge_tokens else None

    @property
    def perplexity(self) -> float | None:
        """exp(nll_per_token), with the exponent at most 700; None without a judged token."""
        return None if self.nll_per_token is None else math.exp(min(self.nll_per_token, 700.0))

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived figures included."""
        return {
            "prompts": self.prompts,
            "scored": self.scored,
            "right": self.hits,
            "exact_match": self.exact_match,
            "interval_95": list(wilson(self.hits, self.scored)) if self.scored else None,
            "steps_per_prompt": self.steps_per_prompt,
            "tokens_per_step": self.tokens_per_step,
            "rows_per_token": self.rows_per_token,
            "agreement": self.agreement and self.agreement.to_json(),
            "tokens_per_response": self.tokens_per_response,
            "repetition": {"n": NGRAM, "share": self.repetition},
            "judged": {
                "responses": self.judged,
                "nll_per_token": self.nll_per_token,
                "perplexity": self.perplexity,
                "nll_per_byte": self.nll / self.judge_bytes if self.judge_bytes else None,
                "tokens": self.judge_tokens,
            }
            if self.judged
            else None,
            "seconds": self.seconds,
        }
