"""Distributions of a decode: tokens per step, importance by layer, its rise, and how far contexts move.

They are the figures by which papers motivate their methods. FOCUS (arXiv 2601.23278) has tokens per step in Figures 2
and 9 to 11, and importance by layer in Figure 3. Figure 14 is of its delta. DyLLM (arXiv 2603.08026) has the cosine of
attention contexts between adjacent steps in Figure 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from dgraph.lowering.executor import LoweredProgram
from dgraph.ops import Op
from dgraph.runtime.stats import StepRecord

KINDS = ("decoded", "decodable", "other")
"""Rows of a block by the position that they predict: decoded before, decoded in this step, or still masked after it."""
SIGMAS = tuple(n / 4 for n in range(-16, 17))
"""Edges of the bins of the importance delta, in standard deviations of its step; two more bins lie beyond them."""
COSINES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""Edges of the bins of a cosine."""
ATTENTIONS = ("paged_attention", "packed_attention")
"""Ops of attention that are watched; the first reads its keys from a cache that a call before it has written."""
POOL = 3
"""Width of the max-pooling of scores (FOCUS, appendix F.1)."""


@dataclass
class LayerCalls:
    """Values of a layer in one step: queries, keys and contexts of its rows, and the factor of its scores."""

    q: Tensor
    k: Tensor
    context: Tensor
    scale: float


@dataclass
class Distributions:
    """Counts over all steps of the prompts that were watched.

    Tokens per step are counted for any program. The others are counted in the first layers, up to one that attends from
    some rows of the step only, or over chosen keys. That is a layer after an eviction, or the last one if only masked
    rows go on. A program on a GPU may fuse attention with other calls, and has no such layer then.

    Rows whose prediction is a stop token are left out of importance and delta. Their number is a matter of padding.

    Attributes:
        layers: layers of the model.
        width: columns of a block.
        eos_ids: stop tokens of the model.
        committed: number of steps of a sequence by the tokens that they decoded; steps without a mask are left out.
        block, candidates: f64[layers, 3], sums of importance by `KINDS`, in shares of an equal one. It is measured
            between all rows of the block, and between the rows that predict masks.
        rows: i64[layers, 3], rows of each kind.
        delta: i64[3, bins], rows by kind and by the delta of importance from layer 0 to layer 1, between `SIGMAS`.
        moments: f64[3, 3], number, sum and sum of squares of the delta by kind, in shares of an equal importance.
        sigma: sum of the standard deviations of steps, and number of the latter.
        cosines: i64[layers, bins], rows by the cosine of their context with that of the step before, between `COSINES`.
        cosine: f64[layers], sums of these cosines.
    """

    layers: int
    width: int
    eos_ids: Sequence[int] = ()
    committed: Counter[int] = field(default_factory=Counter)
    block: Tensor = field(init=False)
    candidates: Tensor = field(init=False)
    rows: Tensor = field(init=False)
    delta: Tensor = field(init=False)
    moments: Tensor = field(init=False)
    sigma: tuple[float, int] = (0.0, 0)
    cosines: Tensor = field(init=False)
    cosine: Tensor = field(init=False)
    _calls: list[LayerCalls] = field(default_factory=list, repr=False)
    _written: Tensor | None = field(default=None, repr=False)
    _before: tuple[Tensor, list[Tensor]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        kinds, layers = len(KINDS), self.layers
        self.block, self.candidates = (torch.zeros(layers, kinds, dtype=torch.float64) for _ in range(2))
        self.rows = torch.zeros(layers, kinds, dtype=torch.int64)
        self.delta = torch.zeros(kinds, len(SIGMAS) + 1, dtype=torch.int64)
        self.moments = torch.zeros(kinds, 3, dtype=torch.float64)
        self.cosines = torch.zeros(layers, len(COSINES) + 1, dtype=torch.int64)
        self.cosine = torch.zeros(layers, dtype=torch.float64)

    @contextmanager
    def watching(self, program: LoweredProgram) -> Iterator[None]:
        """Context in which the calls of a step program are watched; `observe` is its generation's observer."""
        self._before = None
        with program.observed(self._see):
            yield

    def _see(self, op: Op, args: Sequence[Any], result: Any) -> None:
        if op.name == "kv_write":
            self._written = args[0].detach().clone()
        elif op.name in ATTENTIONS:
            given = dict(zip(op.arguments, args, strict=False))
            keys = self._written if given.get("k") is None else given["k"]
            if keys is not None:
                live = int(given["cu_rows"][-1])
                q, k, context = (value[:live].detach().clone() for value in (given["q"], keys, result))
                self._calls.append(LayerCalls(q, k, context, float(given["scale"])))

    def observe(self, record: StepRecord) -> None:
        """Count one step, after the calls of its program."""
        calls, self._calls = self._calls, []
        wanted = record.candidate.clone()
        for prompt in record.sequence[wanted].unique():
            mine = record.sequence == prompt
            self.committed[int((record.committed & mine).sum())] += 1
        rows = len(record.positions)
        whole = list(takewhile(lambda call: len(call.q) == len(call.k) == rows, calls))
        self._count_cosines(record, whole)
        self._count_importance(record, whole)

    def _count_cosines(self, record: StepRecord, calls: Sequence[LayerCalls]) -> None:
        place = (record.sequence << 32) + record.positions
        if self._before is not None:
            order = self._before[0].argsort()
            ordered = self._before[0][order]
            at = torch.searchsorted(ordered, place).clamp(max=len(ordered) - 1)
            here = (ordered[at] == place).nonzero()[:, 0]
            there = order[at[here]]
            edges = torch.tensor(COSINES, dtype=torch.float64)
            for layer, (call, old) in enumerate(zip(calls, self._before[1], strict=False)):
                new, before = (x.flatten(1).double() for x in (call.context[here], old[there]))
                cosine = torch.nn.functional.cosine_similarity(new, before, dim=1).cpu()
                bins = torch.bucketize(cosine, edges, right=True)
                self.cosines[layer] += torch.bincount(bins, minlength=len(COSINES) + 1)
                self.cosine[layer] += cosine.sum()
        self._before = place, [call.context for call in calls]

    def _count_importance(self, record: StepRecord, calls: Sequence[LayerCalls]) -> None:
        inside = (record.column >= 0) & (record.column < self.width)
        told = ~torch.isin(record.token, torch.tensor(self.eos_ids, dtype=torch.int64))
        kind = torch.where(~record.candidate, 0, torch.where(record.committed, 1, 2))
        counted = inside & (told | ~record.candidate) & self._of_masked_blocks(record)
        one_hot = torch.nn.functional.one_hot(kind[counted], len(KINDS))
        deltas: list[Tensor] = []
        for layer, call in enumerate(calls):
            heads = call.q.shape[1]
            self.rows[layer] += one_hot.sum(dim=0)
            for sums, member in ((self.block, inside), (self.candidates, record.candidate)):
                score = importance(call, member, record.sequence).double().cpu() / heads
                sums[layer] += one_hot.double().T @ score[counted]
            if layer < 2:
                deltas.append(score)
        if len(deltas) == 2:
            self._count_delta(record, deltas[1] - deltas[0], counted & record.candidate, kind)

    def _count_delta(self, record: StepRecord, delta: Tensor, counted: Tensor, kind: Tensor) -> None:
        edges = torch.tensor(SIGMAS, dtype=torch.float64)
        for prompt in record.sequence[counted].unique():
            rows = record.candidate & (record.sequence == prompt)
            sigma, mean = (float(x) for x in torch.std_mean(delta[rows], correction=0))
            if sigma == 0.0:
                continue
            self.sigma = self.sigma[0] + sigma, self.sigma[1] + 1
            rows = rows & counted
            for one in range(1, len(KINDS)):
                values = delta[rows & (kind == one)]
                bins = torch.bucketize((values - mean) / sigma, edges, right=True)
                self.delta[one] += torch.bincount(bins, minlength=len(SIGMAS) + 1)
                powers = torch.stack([torch.ones_like(values), values, values.square()])
                self.moments[one] += powers.sum(dim=1)

    @staticmethod
    def _of_masked_blocks(record: StepRecord) -> Tensor:
        """bool[N]: rows of sequences that predict a mask in this step."""
        return torch.isin(record.sequence, record.sequence[record.candidate])

    # -- figures ---------------------------------------------------------------------------------------------------

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens of a step; None without steps."""
        steps = sum(self.committed.values())
        return sum(n * count for n, count in self.committed.items()) / steps if steps else None

    @property
    def probed(self) -> bool:
        """True if there were layers that attend from all rows of a step."""
        return bool(self.rows.sum())

    def means(self, sums: Tensor) -> list[list[float | None]]:
        """Mean importance by layer and kind, from `block` or `candidates`; None for a kind without rows."""
        pairs = zip(sums.tolist(), self.rows.tolist(), strict=True)
        return [[s / n if n else None for s, n in zip(row, counts, strict=True)] for row, counts in pairs]

    def signal(self) -> tuple[float, float, float] | None:
        """gamma, P_err and its bound as in FOCUS, appendix D; None without decodable and other rows.

        gamma: mean delta of decodable rows less that of others, in standard deviations of the latter. P_err: share of
        decodable rows below one standard deviation of their step. The bound is exp(-(gamma - 1)^2 / 2), or 1 unless
        gamma is above 1: the paper says nothing then.
        """
        (ones, total, _), (count, sums, squares) = self.moments[1:].tolist()
        if not ones or not count:
            return None
        mean = sums / count
        spread = math.sqrt(max(0.0, squares / count - mean * mean))
        gamma = (total / ones - mean) / spread if spread else math.inf
        missed = float(self.delta[1, : SIGMAS.index(1.0) + 1].sum()) / ones
        return gamma, missed, eviction_bound(gamma)

    def cosine_means(self) -> list[float | None]:
        """Mean cosine by layer; None for a layer without rows that were there in two adjacent steps."""
        counts = self.cosines.sum(dim=1).tolist()
        return [s / n if n else None for s, n in zip(self.cosine.tolist(), counts, strict=True)]

    def below(self, edge: float) -> list[float | None]:
        """Share of rows by layer whose cosine is below one of `COSINES`."""
        place = COSINES.index(edge) + 1
        found = ((float(row[:place].sum()), float(row.sum())) for row in self.cosines)
        return [low / every if every else None for low, every in found]

    def to_json(self) -> dict[str, Any]:
        """Plain values; None for what was not measured."""
        steps = {str(n): self.committed[n] for n in sorted(self.committed)}
        found: dict[str, Any] = {"tokens per step": steps, "mean tokens per step": self.tokens_per_step}
        if not self.probed:
            return found | {"importance": None, "delta": None, "cosine": None}
        signal, (sigmas, count) = self.signal(), self.sigma
        by_kind = dict(zip(KINDS[1:], self.delta[1:].tolist(), strict=True))
        return found | {
            "importance": {
                "kinds": list(KINDS),
                "rows": self.rows.tolist(),
                "block": self.means(self.block),
                "candidates": self.means(self.candidates),
            },
            "delta": {
                "edges in sigma": list(SIGMAS),
                **by_kind,
                "sigma": sigmas / count if count else None,
                **dict(zip(("gamma", "P_err", "bound"), signal or (None,) * 3, strict=True)),
            },
            "cosine": {"edges": list(COSINES), "rows": self.cosines.tolist(), "means": self.cosine_means()},
        }


def importance(call: LayerCalls, member: Tensor, sequence: Tensor) -> Tensor:
    """Importance f32[N] of member rows bool[N] between one another (FOCUS, Eq. 2), by sequence i64[N]; on rows' device.

    Rows of a sequence are neighbours, in the order of their positions.
    """
    counts = torch.unique_consecutive(sequence, return_counts=True)[1]
    cu_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(call.q.device)
    flags = member.to(call.q.device)
    found: Tensor = torch.ops.dgraph.importance(call.q, call.k, flags, cu_rows, call.scale, POOL)
    return found


def eviction_bound(gamma: float) -> float:
    """The bound of FOCUS's Proposition D.1 on the probability that a decodable row is below one sigma.

    It is stated for a signal-to-noise ratio gamma above 1; for others it is 1.
    """
    return math.exp(-((gamma - 1) ** 2) / 2) if gamma > 1 else 1.0


def merged(found: Mapping[str, Distributions]) -> dict[str, Any]:
    """Plain values of the distributions of arms, by label."""
    return {label: one.to_json() for label, one in found.items()}
