"""Guide of one response: it proposes tokens that can all be committed, in any order.

A step offers tokens for masked positions, and its rule commits some of them. So the guide fills all masked positions at
once, by a path through the grammar that also passes through what is committed. The path goes on beyond the block, to a
whole text that fits in the response. Whatever the rule then commits lies on this path, so it can be completed by the
rest of it. LAVE (arXiv 2602.00612) asks for such a filling for each token by itself, DINGO (arXiv 2505.23061) finds the
best one for regular languages. Here the path is greedy, from left to right under the mask of the grammar. Where it
leads nowhere, the path of the step before still holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dgraph.errors import DgraphError, InputError
from dgraph.runtime.constraints.completion import Completion
from dgraph.runtime.constraints.constraint import Constraint
from dgraph.runtime.constraints.vocabulary import Vocabulary

if TYPE_CHECKING:
    from dgraph.runtime.requests import Request

LEAST = 1e-30
"""Confidence of a token that the model gives no probability: it can still be committed."""


@dataclass(frozen=True)
class Offer:
    """Decision of a sampler for one position.

    Attributes:
        logits: f32[V], -inf for tokens that are never produced.
        token: the token that it took.
        confidence: its confidence.
    """

    logits: NDArray[np.float32]
    token: int
    confidence: float


@dataclass
class _Path:
    """Tokens of a response up to some position, and how sure those that the mask chose are."""

    tokens: list[int]
    sure: dict[int, float]


class Guide:
    """Guide of one response.

    Args:
        constraint: valid responses.
        vocabulary: tokens of the model.
        limit: tokens of the response, at most.
        begun: its tokens that are decoded already.

    Raises:
        InputError: no tokens of the model make a valid text.
    """

    def __init__(self, constraint: Constraint, vocabulary: Vocabulary, limit: int, begun: Sequence[int] = ()):
        self._vocabulary, self._limit = vocabulary, limit
        self._ends = frozenset(vocabulary.spec.eos_ids)
        self._end = vocabulary.spec.eos_ids[0]
        self._matcher = vocabulary.matcher(constraint.grammar)
        self._completion = Completion(constraint.grammar)
        self._done: list[int] = []
        if not self._settle(begun):
            raise DgraphError("a response that was interrupted is no longer valid under its constraint.")
        whole = self._whole(self._done, fits=True) or self._whole(self._done, fits=False)
        if whole is None:
            reason = self._matcher.error or "none was found"
            raise InputError(f"no tokens of the model make a valid {constraint.kind} ({reason}).", field="constraint")
        self._path = whole

    @property
    def fits(self) -> bool:
        """True if the response can be valid within its length."""
        return len(self._path) <= self._limit

    def propose(self, known: Sequence[int | None], offers: Mapping[int, Offer]) -> dict[int, tuple[int, float]]:
        """Token and confidence for each position of the response that is offered.

        Args:
            known: tokens of the response from its begin to the end of the block, None for masks.
            offers: by position of the response.

        Raises:
            DgraphError: known tokens that were not proposed.
        """
        known = known[: self._limit]
        first = next((at for at, token in enumerate(known) if token is None), len(known))
        if not self._settle(known[len(self._done) : first]):
            raise DgraphError(f"the response holds tokens that its constraint does not allow: {list(known)}.")
        pins = {at: token for at, token in enumerate(known) if at >= first and token is not None}
        last = min(self._limit, max([len(known), *(at + 1 for at in offers)]))
        sure = self._renew(last, pins, offers)
        return {at: self._decided(at, offer, sure) for at, offer in offers.items() if at < self._limit}

    def _settle(self, tokens: Sequence[int | None]) -> bool:
        """Take committed tokens; False if they are not valid."""
        for token in tokens:
            if token in self._ends:
                return self._matcher.accepting
            if token is None or not self._matcher.take([token]):
                return False
            self._done.append(token)
        return True

    def _token(self, at: int) -> int:
        """Token of the path at a position: one that ends the response after its text."""
        return self._path[at] if at < len(self._path) else self._end

    def _decided(self, at: int, offer: Offer, sure: Mapping[int, float]) -> tuple[int, float]:
        token = self._token(at)
        if token in self._ends and offer.token in self._ends:
            token = offer.token
        if token == offer.token or math.isnan(offer.confidence):
            return token, offer.confidence
        return token, max(_probability(offer.logits, token), sure.get(at, 0.0), LEAST)

    def _renew(self, last: int, pins: Mapping[int, int], offers: Mapping[int, Offer]) -> dict[int, float]:
        """Replace the path by one that the offers prefer, if one is found; return how sure its tokens are."""
        found = self._greedy(last, pins, offers, self._done_count)
        if found is None and pins:
            found = self._greedy(last, pins, offers, max(pins) + 1)
        if found is None:
            return {}
        length = len(found.tokens)
        while length >= self._done_count:
            whole = self._whole(found.tokens[:length], fits=self.fits)
            if whole is not None and self._passes(whole, pins):
                self._path = whole
                return {at: value for at, value in found.sure.items() if at < length}
            if length == self._done_count:
                break
            length = (length + self._done_count) // 2
        return {}

    @property
    def _done_count(self) -> int:
        return len(self._done)

    def _passes(self, whole: Sequence[int], pins: Mapping[int, int]) -> bool:
        """True if a text passes through the committed tokens."""
        return all(
            token == whole[at] if at < len(whole) else token in self._ends or len(whole) < at
            for at, token in pins.items()
        )

    def _greedy(self, last: int, pins: Mapping[int, int], offers: Mapping[int, Offer], held: int) -> _Path | None:
        """Path up to position `last` by the offers; along the path so far up to `held`. None if it leads nowhere."""
        path, running, matcher = _Path(list(self._done), {}), 1.0, self._matcher
        try:
            while len(path.tokens) < last:
                at = len(path.tokens)
                token = pins.get(at)
                if token is None and at < held:
                    token = self._token(at)
                if token is None:
                    token, chance = self._chosen(offers.get(at), at)
                    running = min(running, chance)
                    path.sure[at] = running
                if token in self._ends:
                    return path if matcher.accepting else None
                if token < 0 or not matcher.take([token]):
                    return None
                path.tokens.append(token)
            return path
        finally:
            matcher.back(len(path.tokens) - self._done_count)

    def _chosen(self, offer: Offer | None, at: int) -> tuple[int, float]:
        """Token that may follow and the probability of it among all that may; -1 if none may."""
        accepting = self._matcher.accepting
        allowed = self._matcher.allowed()
        if accepting:
            allowed[list(self._ends)] = True
        if offer is None:  # its row was evicted
            token = self._token(at)
            return (token, 0.0) if allowed[token] else (int(allowed.argmax()) if allowed.any() else -1, 0.0)
        masked = np.where(allowed, offer.logits[: len(allowed)], -np.inf)
        best = int(masked.argmax())
        if not np.isfinite(masked[best]):
            return -1, 0.0
        token = offer.token if allowed[offer.token] else best
        return token, float(np.exp(masked[token] - masked[best]) / np.exp(masked - masked[best]).sum())

    def _whole(self, tokens: Sequence[int], fits: bool) -> list[int] | None:
        """A valid response that begins with these tokens, which begin with those taken; None if none was found."""
        begun = self._vocabulary.bytes_of(tokens)
        for short in (False, True) if fits else (False,):
            more = self._completion.of(begun, short)
            for way in () if more is None else self._vocabulary.tokens_of(more):
                whole = [*tokens, *way]
                if (not fits or len(whole) <= self._limit) and self._accepts(whole):
                    return whole
        return None

    def _accepts(self, whole: Sequence[int]) -> bool:
        rest = whole[self._done_count :]
        taken = self._matcher.take(rest)
        accepted = taken == len(rest) and self._matcher.accepting
        self._matcher.back(taken)
        return accepted


def guide_of(request: Request, vocabulary: Callable[[], Vocabulary] | None) -> Guide:
    """Guide of a request with a constraint; `vocabulary` gives the tokens of the model.

    Raises:
        InputError: no tokens of the model satisfy the constraint.
    """
    chosen, begun = request.decoding, request.decoded
    assert chosen.constraint is not None, "asked for such requests alone"
    assert vocabulary is not None, "checked with the decoding"
    given = request.ids[len(request.ids) - begun :]
    return Guide(chosen.constraint, vocabulary(), begun + chosen.max_new_tokens, given)


def _probability(logits: NDArray[np.float32], token: int) -> float:
    """Probability of a token in softmax(logits)."""
    top = logits.max()
    return float(np.exp(logits[token] - top) / np.exp(logits - top).sum())
