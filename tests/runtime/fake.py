"""A model without weights: two layers whose keys are hashes, so that one stale key changes everything.

Layer 0 writes a hash of (token, position); layer 1 writes a hash of all that the row sees in layer 0; the
answer is a hash of all that it sees in layer 1. Values are below 2**16, hence exact in the caches.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from dgraph.lowering.program import ProgramResult
from dgraph.ops.attention.sparse import REUSE
from dgraph.runtime import BlockSession
from dgraph.runtime.loop.step_inputs import STEP_INPUTS
from dgraph.runtime.loop.step_report import Report
from dgraph.runtime.state.base import DecodeState
from dgraph.spec import ModelSpec
from dgraph.types.shapes import InputSpec

MASK = 28
VOCAB = 29
ALPHA = 1.5
REACHED = InputSpec("reached", torch.int32, ("b",), reset="block", initial=-1)
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def fake_spec(block: int, **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "family": "fake",
        "layers": 2,
        "hidden": 8,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 2,
        "vocab": VOCAB,
        "mask_id": MASK,
        "eos_ids": (3,),
        "pad_id": 0,
        "block_length": block,
        "attention": "block_causal",
        "logit_shift": 0,
        "max_positions": 512,
        "dtype": torch.float32,
    }
    return ModelSpec(**(fields | changes))  # type: ignore[arg-type]


def digest(x: IntOrTensor) -> IntOrTensor:
    """Below 2**16."""
    x = x & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
    x = ((x ^ (x >> 12)) * 0x297A2D39) & 0x7FFFFFFF
    return (x ^ (x >> 15)) & 0xFFFF


def first_key(token: IntOrTensor, position: IntOrTensor) -> IntOrTensor:
    return digest(token * 7919 + position * 104729 + 1) | 1  # 0 is what was never written


def second_key(seen: IntOrTensor, token: IntOrTensor, position: IntOrTensor) -> IntOrTensor:
    return digest(seen + token * 31 + position * 1009 + 2) | 1


def answer(seen: IntOrTensor, position: IntOrTensor) -> tuple[IntOrTensor, IntOrTensor]:
    """(token, confidence in 32nds: ties and values that equal a threshold are frequent)."""
    return digest(seen + position * 613 + 3) % VOCAB, digest(seen + position * 811 + 4) % 32 + 1


def importance(seen: IntOrTensor, position: IntOrTensor) -> IntOrTensor:
    return digest(seen + position * 211 + 5) % 50


def offered(name: str) -> InputSpec:
    """An input of the decode loop, as a pass would declare it."""
    shapes: dict[str, tuple[int | str, ...]] = {"row": ("N",), "sequence": ("b",), "offsets": ("b+1",), "key": ("M",)}
    wide: dict[str, tuple[int | str, ...]] = {"page_table": ("b", "P"), "window": ("b", 2)}
    return InputSpec(name, STEP_INPUTS[name].dtype, wide.get(name) or shapes[STEP_INPUTS[name].per])


def caches(*layers: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[InputSpec]:
    """Keys and values of layers, of those sizes each."""
    sizes = enumerate(layers)
    return [InputSpec(f"{n}_cache_{i}", dtype, ("pages", "page", *size)) for i, size in sizes for n in "kv"]


def summary(state: DecodeState) -> list[int]:
    """Over all sequences: rows of the next step, active ones, tokens decoded so far, broken ones, ones that choose."""
    report = Report(state.report().numpy())
    counts = [int(getattr(report, name).sum()) for name in ("rows", "active", "total", "broken")]
    return [*counts, int((report.action != REUSE).sum())]


class FakeProgram:
    """A program of the fake model.

    kind: "prefill", "step", "evict" (drops masked rows before layer 1 writes its keys, as FOCUS drops them
    before layer 2; stages "prefix" and "suffix"), "logits" (ends in logits), or "sample" (draws from the
    row's seed). average: the input that its budgets read.
    """

    def __init__(
        self, kind: str, noise: bool = False, dtype: torch.dtype = torch.float32, average: str = "average"
    ) -> None:
        self.kind, self.noise, self.average = kind, noise, average
        self.calls: list[dict[str, Tensor]] = []
        self.stage_names = ("prefix", "suffix") if kind == "evict" else (kind,)
        names = ["input_ids", "positions", "limit", "cu_rows", "candidate", "temperature", "seed", "page_table"]
        specs = [*map(offered, [*names, average, *["noise"] * noise]), *caches((1, 2), (3, 2), dtype=dtype)]
        if kind == "evict":
            specs.append(REACHED)
        self.inputs = {spec.name: spec for spec in specs}

    graph_rows = None

    @property
    def output_names(self) -> frozenset[str]:
        if self.kind == "prefill":
            return frozenset()
        evicts = {"kept", "reached", "score"} if self.kind == "evict" else set()
        return frozenset(evicts | ({"logits"} if self.kind == "logits" else {"token", "confidence"}))

    def bucket_sizes(self, rows: int) -> tuple[int, ...]:
        return (rows,)

    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        return partial(self, inputs)

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        # What comes after the rows is padding.
        inputs = {k: v[:rows] if k in STEP_INPUTS and STEP_INPUTS[k].per == "row" else v for k, v in inputs.items()}
        self.calls.append({k: v.clone() for k, v in inputs.items() if "cache" not in k})
        ids, positions, masked = inputs["input_ids"], inputs["positions"], inputs["candidate"]
        cu_rows, limit = inputs["cu_rows"], inputs["limit"]
        if ids.device.type == "cpu":
            check_inputs(inputs, rows)
            assert inputs[self.average].dtype == torch.float32
        index = torch.arange(rows, device=ids.device)
        sequence = torch.searchsorted(cu_rows[1:].contiguous(), index.int(), right=True)
        write(inputs, 0, sequence, positions, first_key(ids, positions))
        seen = read(inputs, 0, sequence, limit)
        outputs: dict[str, Tensor] = {}
        kept = index
        if self.kind == "evict":
            score = inputs["noise"] if self.noise else importance(seen, positions).float()
            survived, limit, reached = evict(inputs, sequence, score, inputs[self.average])
            kept = survived.nonzero()[:, 0]
            outputs = {"score": torch.where(masked, score, 0.0), "reached": reached}
        second = second_key(seen, ids, positions)
        write(inputs, 1, sequence[kept], positions[kept], second[kept])
        if self.kind == "prefill":
            return ProgramResult({}, (rows,), (rows + 2,), (0.25,))

        token, confidence = answer(read(inputs, 1, sequence, limit), positions)
        if self.kind == "sample":
            token = torch.where(inputs["temperature"] > 0, inputs["seed"] % VOCAB, token)
        if self.kind == "logits":
            peak = torch.nn.functional.one_hot(token, VOCAB) * (confidence[:, None] / 4)
            outputs["logits"] = torch.cat([peak, peak.new_zeros(3, VOCAB)])
        else:
            given = masked[kept]
            outputs["token"] = padded(torch.where(given, token[kept], -1), -1)
            outputs["confidence"] = padded(torch.where(given, confidence[kept] / 32, -torch.inf), -torch.inf)
        if self.kind == "evict":
            outputs["kept"] = padded(kept, -1)
            return ProgramResult(outputs, (rows, len(kept)), (rows + 2, len(kept) + 3), (0.5, 0.125))
        return ProgramResult(outputs, (rows,), (rows + 3,), (0.5,))


def padded(values: Tensor, filler: float) -> Tensor:
    return torch.cat([values, values.new_full((3,), filler)])


def check_inputs(inputs: Mapping[str, Tensor], rows: int) -> None:
    """Dtypes, and what the contract says about rows."""
    for name in ("input_ids", "positions", "seed", "limit", "candidate", "temperature"):
        assert inputs[name].shape == (rows,), name
    for name in ("limit", "cu_rows", "page_table"):
        assert inputs[name].dtype == torch.int32, name
    assert inputs["temperature"].dtype == torch.float32
    assert inputs["input_ids"].dtype == inputs["positions"].dtype == inputs["seed"].dtype == torch.int64
    assert inputs["candidate"].dtype == torch.bool
    bounds = inputs["cu_rows"].tolist()
    assert bounds[0] == 0
    assert bounds[-1] == rows
    for begin, end in itertools.pairwise(bounds):
        assert (inputs["positions"][begin:end].diff() > 0).all()
        assert (inputs["positions"][begin:end] < inputs["limit"][begin:end]).all()


def write(inputs: Mapping[str, Tensor], layer: int, sequence: Tensor, positions: Tensor, key: Tensor) -> None:
    keys, values = inputs[f"k_cache_{layer}"], inputs[f"v_cache_{layer}"]
    size = keys.shape[1]
    slot = inputs["page_table"].long()[sequence, positions // size] * size + positions % size
    if key.device.type == "cpu":
        assert (slot >= 0).all()
    pair = torch.stack([key, digest(key)], dim=1)[:, None]  # [N, Hkv, D]
    keys.view(-1, *keys.shape[2:])[slot] = pair.to(keys.dtype)
    values.view(-1, *values.shape[2:])[slot] = (pair ^ 0x55).to(values.dtype)


def read(inputs: Mapping[str, Tensor], layer: int, sequence: Tensor, limit: Tensor) -> Tensor:
    """i64[N]: all that a row sees of its sequence, weighted by position."""
    table = inputs["page_table"].long().clamp(min=0)
    keys, values = (inputs[f"{n}_cache_{layer}"][table].long().flatten(1, 2)[:, :, 0] for n in "kv")
    weight = torch.arange(1, keys.shape[1] + 1, device=keys.device)
    sums = (keys[:, :, 0] * weight + values[:, :, 1]).cumsum(1)
    sums = torch.cat([torch.zeros_like(sums[:, :1]), sums], dim=1)
    return sums[sequence, limit.long()]


def evict(
    inputs: Mapping[str, Tensor], sequence: Tensor, score: Tensor, averages: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """FOCUS's budget and placeholder rule, without its other rules: (kept, limit, reached)."""
    masked, positions = inputs["candidate"], inputs["positions"]
    kept, limit, reached = ~masked, inputs["limit"].clone(), inputs["reached"].clone()
    for s, average in enumerate(averages.tolist()):
        rows = (sequence == s).nonzero()[:, 0]
        if not len(rows):
            continue
        candidates = rows[masked[rows]]
        if len(candidates):
            budget = int(min(len(candidates), torch.ceil(torch.tensor(ALPHA * average)).item()))
            best = candidates[score[candidates].argsort(descending=True, stable=True)[:budget]]
            kept[best] = True
            span = (positions > reached[s]) & (positions < positions[best].max()) & (sequence == s)
            kept |= masked & span
        rightmost = positions[rows[kept[rows]]].max()
        limit[rows] = limit[rows].clamp(max=rightmost.item() + 1)
        reached[s] = max(reached[s].item(), rightmost.item())
    return kept, limit, reached


def make_session(block: int, kind: str = "step", **options) -> BlockSession:
    spec = fake_spec(block, **options.pop("spec", {}))
    noise, dtype = options.pop("noise", False), options.pop("dtype", torch.float32)
    average = options.pop("average", "average")
    programs = {"prefill": FakeProgram("prefill", dtype=dtype), "step": FakeProgram(kind, noise, dtype, average)}
    return BlockSession(spec, programs, **options)


def random_prompts(rng: random.Random, count: int, longest: int) -> list[list[int]]:
    return [[rng.randrange(MASK) for _ in range(rng.randint(1, longest))] for _ in range(count)]
