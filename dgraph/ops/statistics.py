"""Statistics of each row's distribution that a decoding rule asks for, computed while the logits of a chunk exist.

A statistic is a small frozen dataclass. It computes its value from a chunk of logits in plain torch. It also chooses
the numbers that it keeps of the distribution for the next step. `dgraph::lm_head` gives `MARGIN` and `ENTROPY` of every
candidate by itself; all others, a user's own among them, are computed by `dgraph::lm_head_measured`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.registry import numeric
from dgraph.types.shapes import InputSpec


@dataclass(frozen=True)
class RowLogits:
    """R rows of a chunk, as a statistic sees them; those without a candidate may hold anything.

    Attributes:
        logits: [R, V], z / T at the rows' temperature T (1 where it is 0), -inf for an id that is never produced.
        token: i64[R], the token that was chosen.
        standing: i64[R], the token that stands at the position that the row predicts. It is the mask token where
            nothing is decoded, and -1 where the row predicts no position of the block.
        before: f32[R, W], the values that the statistic kept of the row when it was last projected.
        seen: bool[R], True if that was in this block; else `before` may hold anything.
    """

    logits: Tensor
    token: Tensor
    standing: Tensor
    before: Tensor
    seen: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Logarithm of p, [R, V]; -inf where p is 0."""
        return self.logits.log_softmax(-1)

    @property
    def current(self) -> Tensor:
        """p of the token that stands, f32[R] (float64 of float64 logits); 0 of the mask token, and without one."""
        there = (self.standing >= 0) & (self.standing < self.logits.shape[1])
        found = self.logits.softmax(-1).gather(1, torch.where(there, self.standing, 0)[:, None])[:, 0]
        return torch.where(there, found, 0.0)


@dataclass(frozen=True)
class Statistic:
    """A number per row that a policy may ask for; subclasses are frozen dataclasses and implement `measure`.

    It is a statistic of p = softmax(z / T) of the model's own logits z, before top-p, top-k, penalties and guidance. A
    sampler that has these takes tokens from another distribution than the one that is measured. Only `MARGIN` and
    `ENTROPY` follow the sampler.

    `measure` and `keep` run on the device within the step's CUDA graph: plain torch ops of static shapes that read
    nothing on the host.

    Attributes:
        name: the name under which `Candidates` has it.
        filler: its value for rows without a candidate.
    """

    name: ClassVar[str]
    filler: ClassVar[float]

    def width(self, vocab: int) -> int:
        """Number W of fp32 values that are kept per position of a block from one step to the next; 0 for none."""
        return 0

    def measure(self, rows: RowLogits) -> Tensor:
        """Value of the statistic for each row, f32[R]."""
        raise NotImplementedError

    def keep(self, rows: RowLogits) -> Tensor:
        """Values f32[R, W] that the next step gets as `RowLogits.before`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Margin(Statistic):
    """The difference of the two largest probabilities."""

    name: ClassVar[str] = "margin"
    filler: ClassVar[float] = -torch.inf

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`."""
        largest = F.pad(rows.logits.softmax(-1), (0, 1)).topk(2).values  # a vocabulary of one has no second
        return largest[:, 0] - largest[:, 1]


@dataclass(frozen=True)
class Entropy(Statistic):
    """-sum p log p, in nats."""

    name: ClassVar[str] = "entropy"
    filler: ClassVar[float] = torch.inf

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`."""
        return torch.special.entr(rows.logits.softmax(-1)).sum(-1)


@dataclass(frozen=True)
class KL(Statistic):
    """D_KL(p now || p when the row was last projected in this block), in nats; inf if it was not (KLASS, section 3).

    Attributes:
        top: number of largest probabilities of the earlier p that are kept with their ids, 2 * top numbers per
            position. The remaining ids are compared as one class. The result is a lower bound of the divergence, and
            equal to it if the rest of both is in proportion. 0, or at least half of V: all are kept, V numbers per
            position.
    """

    top: int = 64

    name: ClassVar[str] = "kl"
    filler: ClassVar[float] = torch.inf

    def __post_init__(self) -> None:
        if type(self.top) is not int or self.top < 0:
            raise InputError(f"KL: top is a number of ids, at least 1, or 0 for all of them, got {self.top!r}.")

    def width(self, vocab: int) -> int:
        """See `Statistic.width`."""
        return 2 * self.top if self._compact(vocab) else vocab

    def _compact(self, vocab: int) -> bool:
        return 0 < 2 * self.top < vocab

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`."""
        now, before = rows.logprobs, rows.before.to(rows.logits.dtype)
        if self._compact(now.shape[1]):
            ids, before = before.chunk(2, dim=1)
            # Values that are not this row's may hold anything, but gather needs valid ids.
            now = now.gather(1, ids.nan_to_num().clamp(0, now.shape[1] - 1).long())
            now, before = (torch.cat([x, _rest(x)], dim=1) for x in (now, before))
        terms = torch.where(now > -torch.inf, now.exp() * (now - before), 0.0)
        return torch.where(rows.seen, terms.sum(-1).clamp(min=0), torch.inf)

    def keep(self, rows: RowLogits) -> Tensor:
        """See `Statistic.keep`."""
        now = rows.logprobs
        if not self._compact(now.shape[1]):
            return now
        largest = now.topk(self.top)
        return torch.cat([largest.indices.to(now.dtype), largest.values], dim=1)


def _rest(logprobs: Tensor) -> Tensor:
    """Logarithm [R, 1] of the probability that is left to other ids, which no rounding makes 0."""
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return left.clamp(min=torch.finfo(left.dtype).tiny).log()


@dataclass(frozen=True)
class Current(Statistic):
    """The probability of the token that stands in a row, by which a rule that edits verifies it (WINO, 2507.18578).

    Rules read it at decoded positions, as `candidates.need("current", self)`. It is 0 where a mask stands. Ranks that
    hold a model together give it too.
    """

    name: ClassVar[str] = "current"
    filler: ClassVar[float] = 0.0

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`."""
        return rows.current


@dataclass(frozen=True)
class OtherToken(Statistic):
    """The most likely token apart from some ids (ties: lowest id), as a number.

    Attributes:
        ids: the ids that are left out; those beyond the vocabulary count for nothing.
    """

    ids: tuple[int, ...]

    filler: ClassVar[float] = -1.0

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of its own for each choice of ids, because requests of a batch may leave out different ones."""
        return "_".join(("other_token", *map(str, self.ids)))

    def measure(self, rows: RowLogits) -> Tensor:
        """See `Statistic.measure`; exact up to 2^24 ids."""
        vocab = rows.logits.shape[1]
        out = torch.zeros(vocab, dtype=torch.bool, device=rows.logits.device)
        for number in self.ids:
            out = out | (torch.arange(vocab, device=out.device) == number)
        return rows.logits.masked_fill(out, -torch.inf).argmax(-1).to(rows.logits.dtype)


MARGIN, ENTROPY, CURRENT = Margin(), Entropy(), Current()
BY_NAME: dict[str, Statistic] = {s.name: s for s in (MARGIN, ENTROPY, KL(), CURRENT)}
"""Statistics that a policy may ask for by name alone."""
GIVEN: tuple[Statistic, ...] = (MARGIN, ENTROPY)
"""Statistics that dgraph::lm_head gives by itself."""

_DECLARED: dict[str, tuple[Statistic, ...]] = {}


def declare(statistics: Iterable[Statistic]) -> str:
    """Text that stands for statistics in a call of an op, which takes no objects: their reprs; "" for none.

    Raises:
        InputError: two statistics have one name, or others with the same reprs were declared before.
    """
    chosen = tuple(statistics)
    names = [s.name for s in chosen]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two statistics are named {name!r}: {list(chosen)}; give each its own name.")
    text = ", ".join(map(repr, chosen))
    if _DECLARED.setdefault(text, chosen) != chosen:
        raise InputError(f"other statistics that read {text} were declared before; give their classes other names.")
    return text


def declared(text: str) -> tuple[Statistic, ...]:
    """Statistics that `declare` was given for a text.

    Raises:
        InputError: `declare` did not give the text in this process.
    """
    if text not in _DECLARED:
        raise InputError(f"no statistics were declared as {text!r} in this process; call declare with them first.")
    return _DECLARED[text]


def kept_rows(statistics: Iterable[Statistic], vocab: int) -> InputSpec:
    """Memory of `measure_rows`: per position a flag, 1 if values are kept of it, and the values that statistics keep.

    A position belongs to one block of its response, and has a candidate only in that block's steps. So the memory is
    reset with each response, and a block finds none of an earlier block.
    """
    width = 1 + sum(s.width(vocab) for s in statistics)
    return InputSpec(f"statistics_{width}", torch.float32, ("pages", "page", width), reset="response")


def measure_rows(
    statistics: Sequence[Statistic],
    logits: Tensor,
    token: Tensor,
    temperature: Tensor,
    suppress: int,
    slot: Tensor,
    standing: Tensor,
    state: Tensor,
    live: Tensor,
) -> Tensor:
    """Compute each statistic of R rows, f32[R, S], and write the values that they keep to `state`.

    Args:
        statistics: S of them.
        logits: [R, V].
        token: i64[R], as dgraph::lm_head gives it.
        temperature, suppress: f32[R] and an id, as dgraph::lm_head takes them.
        slot: i64[R], the place of the row's position among the pages * page places of `state`; -1 for none. No two live
            rows have one place.
        standing: i64[R], see `RowLogits`.
        state: f32[pages, page, 1 + W], see `kept_rows`.
        live: bool[R], rows with a candidate. The other rows may hold anything in all other arguments, and keep nothing.
    """
    scaled = logits.to(numeric(logits.dtype), copy=True)
    if not len(scaled):
        return scaled.new_empty(0, len(statistics))
    if suppress >= 0:
        scaled[:, suppress] = -torch.inf
    scaled /= torch.where(temperature > 0, temperature, 1.0).to(scaled.dtype)[:, None]
    own = live & (slot >= 0)
    places = state.view(-1, state.shape[2])
    held = places[torch.where(own, slot, 0)]
    seen = own & (held[:, 0] > 0)
    values, kept, first = [], [torch.ones_like(held[:, :1])], 1
    for statistic in statistics:
        width = statistic.width(logits.shape[1])
        rows = RowLogits(scaled, token, standing, held[:, first : first + width], seen)
        values.append(statistic.measure(rows).to(scaled.dtype))
        if width:
            kept.append(statistic.keep(rows).to(state.dtype))
            first += width
    # Sizes are static in a CUDA graph, so every row writes. A row that keeps nothing repeats the write of the first row
    # that keeps something. If no row does, all of them write the first place's own values to it.
    row = torch.where(own, torch.arange(len(own), device=own.device), own.int().argmax())
    written = torch.where(own[row, None], torch.cat(kept, dim=1)[row], held[row])
    places.index_put_((torch.where(own[row], slot[row], 0),), written)
    return torch.stack(values, dim=1)
