"""What a decoding rule may ask of each row's distribution, computed while the logits of its chunk exist.

A statistic is a small frozen dataclass: how its value follows from a chunk of logits in plain torch, and what of the
distribution it keeps for the next step. `dgraph::lm_head` gives `MARGIN` and `ENTROPY` of every candidate by itself;
all others, a user's own among them, are computed by `dgraph::lm_head_measured`.
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
from dgraph.shapes import InputSpec


@dataclass(frozen=True)
class RowLogits:
    """R rows of a chunk, as a statistic sees them; those without a candidate may hold anything.

    logits [R, V]: z / T at the rows' temperature T (1 where it is 0), -inf for an id that is never produced. token
    i64[R]: what was taken. before f32[R, W]: what the statistic kept of the row when it was last projected; seen
    bool[R]: whether that was in this block (else `before` may hold anything).
    """

    logits: Tensor
    token: Tensor
    before: Tensor
    seen: Tensor

    @property
    def logprobs(self) -> Tensor:
        """log p [R, V], -inf where p is 0."""
        return self.logits.log_softmax(-1)


@dataclass(frozen=True)
class Statistic:
    """A number per row that a policy may ask for; subclasses are frozen dataclasses and implement `measure`.

    It is of p = softmax(z / T) of the model's own logits z, before top-p, top-k, penalties and guidance: where a
    sampler has these, tokens are taken from another distribution than the one that is measured. Only what is asked for
    as `MARGIN` and `ENTROPY` follows the sampler.

    `measure` and `keep` run on the device within the step's CUDA graph: plain torch ops of static shapes that read
    nothing on the host.

    name: under which `Candidates` has it. filler: its value for rows without a candidate.
    """

    name: ClassVar[str]
    filler: ClassVar[float]

    def width(self, vocab: int) -> int:
        """W: fp32 numbers that are kept per position of a block from one step to the next; 0 for none."""
        return 0

    def measure(self, rows: RowLogits) -> Tensor:
        """f32[R]."""
        raise NotImplementedError

    def keep(self, rows: RowLogits) -> Tensor:
        """f32[R, W]: what the next step gets as `RowLogits.before`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Margin(Statistic):
    """The difference of the two largest probabilities."""

    name: ClassVar[str] = "margin"
    filler: ClassVar[float] = -torch.inf

    def measure(self, rows: RowLogits) -> Tensor:
        """f32[R]."""
        largest = F.pad(rows.logits.softmax(-1), (0, 1)).topk(2).values  # a vocabulary of one has no second
        return largest[:, 0] - largest[:, 1]


@dataclass(frozen=True)
class Entropy(Statistic):
    """-sum p log p, in nats."""

    name: ClassVar[str] = "entropy"
    filler: ClassVar[float] = torch.inf

    def measure(self, rows: RowLogits) -> Tensor:
        """f32[R]."""
        return torch.special.entr(rows.logits.softmax(-1)).sum(-1)


@dataclass(frozen=True)
class KL(Statistic):
    """D_KL(p now || p when the row was last projected in this block), in nats; inf where it was not (KLASS, section 3).

    Attributes:
        top: of the earlier p, keep this many largest probabilities with their ids, and compare what remains as one
            class: 2 * top numbers per position. It is a lower bound of the divergence, and equal to it where the rest
            of both is in proportion. 0, or at least half of V:
            keep all of them, V numbers per position.
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
        """f32[R]."""
        now, before = rows.logprobs, rows.before.to(rows.logits.dtype)
        if self._compact(now.shape[1]):
            ids, before = before.chunk(2, dim=1)
            # What is not this row's may hold anything: an id must be one all the same.
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
    """[R, 1]: log of the probability that these leave to others, which no rounding makes 0."""
    left = 1 - logprobs.exp().sum(-1, keepdim=True)
    return left.clamp(min=torch.finfo(left.dtype).tiny).log()


@dataclass(frozen=True)
class OtherToken(Statistic):
    """The most likely token that is none of some ids (ties: lowest id), as a number. Ids beyond the vocabulary count
    for nothing.

    Attributes:
        ids: left out.
    """

    ids: tuple[int, ...]

    filler: ClassVar[float] = -1.0

    @property
    def name(self) -> str:  # type: ignore[override]
        """One of its own for each choice of ids: a batch may hold requests that leave out others."""
        return "_".join(("other_token", *map(str, self.ids)))

    def measure(self, rows: RowLogits) -> Tensor:
        """f32[R], exact up to 2^24 ids."""
        vocab = rows.logits.shape[1]
        out = torch.zeros(vocab, dtype=torch.bool, device=rows.logits.device)
        for number in self.ids:
            out = out | (torch.arange(vocab, device=out.device) == number)
        return rows.logits.masked_fill(out, -torch.inf).argmax(-1).to(rows.logits.dtype)


MARGIN, ENTROPY = Margin(), Entropy()
BY_NAME: dict[str, Statistic] = {s.name: s for s in (MARGIN, ENTROPY, KL())}
"""Statistics that a policy may ask for by name alone."""
GIVEN: tuple[Statistic, ...] = (MARGIN, ENTROPY)
"""Those that dgraph::lm_head gives by itself."""

_DECLARED: dict[str, tuple[Statistic, ...]] = {}


def declare(statistics: Iterable[Statistic]) -> str:
    """What stands for statistics in a call of an op, which takes no objects: their reprs; "" for none.

    Raises `InputError` if others have the same reprs, or for two of one name.
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
    """What `declare` was given; `InputError` for a text that it did not give in this process."""
    if text not in _DECLARED:
        raise InputError(f"no statistics were declared as {text!r} in this process; call declare with them first.")
    return _DECLARED[text]


def kept_rows(statistics: Iterable[Statistic], vocab: int) -> InputSpec:
    """The memory of `measure_rows`: per position a flag, 1 where something is kept of it, and what the statistics keep.

    A position belongs to one block of its response, and has a candidate only in that block's steps: so it begins with
    each response what would begin with each block.
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
    state: Tensor,
    live: Tensor,
) -> Tensor:
    """f32[R, S]: each statistic of R rows of logits [R, V]; what they keep is written to `state`.

    live bool[R]: rows with a candidate; all else may hold anything in the others, which keep nothing. slot i64[R]: the
    place of the row's position among the pages * page places of state f32[pages, page, 1 + W], see `kept_rows`; -1 for
    none. No two live rows have one place. The other arguments are those of dgraph::lm_head.
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
        rows = RowLogits(scaled, token, held[:, first : first + width], seen)
        values.append(statistic.measure(rows).to(scaled.dtype))
        if width:
            kept.append(statistic.keep(rows).to(state.dtype))
            first += width
    # Sizes are static in a CUDA graph, so every row writes: one that keeps nothing writes once more what the first row
    # that does so writes, and where there is none, all of them what the first place holds.
    row = torch.where(own, torch.arange(len(own), device=own.device), own.int().argmax())
    written = torch.where(own[row, None], torch.cat(kept, dim=1)[row], held[row])
    places.index_put_((torch.where(own[row], slot[row], 0),), written)
    return torch.stack(values, dim=1)
