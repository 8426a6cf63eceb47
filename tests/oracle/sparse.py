"""Decoding a bidirectional model with few keys, in plain PyTorch: one sequence, explicit lists of what each head keeps.

A window of positions is always seen: the current block (Sparse-dLLM, dLLM-Serve) or the response (MaskKV). All other
positions are candidates, of which every layer keeps some for each KV head.

- A step that selects forwards everything and sees everything; each head ranks the candidates and keeps the best.
- Sparse-dLLM, dLLM-Serve: the first `delay` steps of a block forward and see everything, the next one selects, the
  others forward the block, and a row sees what its head has kept, and the block.
- MaskKV: the response's first step selects among the prompt. The prompt is forwarded again every `prompt_interval`
  steps: then what was kept takes the new keys and values, and all rows see these and the response. The response is
  refreshed every `response_interval` steps; else, unless the prompt is refreshed in the step, only the int(rho * G) of
  its G rows with the least similar values are, as in `tests.oracle.dllm_cache`.

If logits are shifted (Dream), the row before a window belongs to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle import qwen3
from tests.oracle.dyllm import cosines
from tests.oracle.focus import choose, stopped
from tests.oracle.qwen3 import Config, Weights, gated, project, rms_norm, rope


@dataclass(frozen=True)
class Method:
    """Which keys are kept, and which rows are forwarded.

    selector: "block", "shared", or rows that vote, a name in `voters`. pairs: per layer, or `ratio`. recent: last
    candidates before the window that are kept in any case. interval: full steps of a block, 0 for none but the first.
    first: a block's first step decodes its first position. prompt_interval, response_interval, rho: MaskKV's.
    """

    window: str
    selector: str
    ratio: float = 0.0
    pairs: tuple[int, ...] = ()
    heads: str = "uniform"
    floor: float = 0.0
    pool: int = 1
    recent: int = 0
    delay: int = 0
    interval: int = 0
    first: bool = False
    prompt_interval: int = 0
    response_interval: int = 0
    rho: float = 0.0


@dataclass
class Head:
    """What one KV head keeps of the candidates: positions, and their keys and values [n, D]."""

    positions: list[int]
    k: Tensor
    v: Tensor


class Memory:
    """Keys (after RoPE), values, and outputs of attention and FFN by position, NaN at first; and what heads keep."""

    def __init__(self, config: Config, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        def empty(*shape: int) -> list[Tensor]:
            return [torch.full((capacity, *shape), torch.nan, dtype=dtype) for _ in range(config.layers)]

        self.k, self.v = (empty(config.kv_heads, config.head_dim) for _ in range(2))
        self.a, self.f = (empty(config.hidden) for _ in range(2))
        self.kept: list[list[Head]] = [[] for _ in range(config.layers)]


def voters(selector: str, low: int, count: int) -> range:
    """Positions whose rows vote, of `count`; the window begins at `low`. Its quarters are rounded down."""
    quarter = [low + (count - low) * i // 4 for i in range(5)]
    return {
        "mask_voting": range(low, count),
        "front_voting": range(quarter[0], quarter[1]),
        "middle_voting": range(quarter[1], quarter[3]),
        "back_voting": range(quarter[3], quarter[4]),
        "prompt_voting": range(low),
        "all_voting": range(count),
        "snapkv": range(max(0, low - 32), low),
    }[selector]


def scores(method: Method, q: Tensor, k: Tensor, window: tuple[int, int]) -> Tensor:
    """[Hkv, L]: rank of every position of a sequence whose rows are all forwarded; q [L, Hq, D], k [L, Hkv, D]."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    low, high = window
    products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * scale
    if method.selector in ("block", "shared"):
        mean = products[:, low:high].mean(dim=1)
        if method.selector == "shared":
            return mean.mean(dim=0).expand(k.shape[1], -1)
        return mean.view(k.shape[1], group, -1).amax(dim=1)
    rows = voters(method.selector, low, len(q))
    votes = products.softmax(dim=-1)[:, rows.start : rows.stop].sum(dim=1)
    return votes.view(k.shape[1], group, -1).mean(dim=1)


def budget(method: Method, layer: int, count: int) -> int:
    """Positions that a head keeps on average."""
    if method.ratio:
        return int(method.ratio * count)
    return min(method.pairs[layer if len(method.pairs) > 1 else 0], count)


def choose_keys(method: Method, layer: int, score: Tensor, window: tuple[int, int]) -> list[list[int]]:
    """The positions that each head keeps, ascending; score [Hkv, L]."""
    low, high = window
    candidates = [p for p in range(score.shape[1]) if not low <= p < high]
    average, heads = budget(method, layer, len(candidates)), len(score)
    ranks: list[dict[int, float]] = []
    for row in score:
        pooled = {}
        for i, p in enumerate(candidates):
            near = candidates[max(0, i - method.pool // 2) : i + method.pool // 2 + 1]
            pooled[p] = max(float(row[n]) for n in near)
            if low - method.recent <= p < low:
                pooled[p] = math.inf
        ranks.append(pooled)
    if average >= len(candidates):
        counts = [len(candidates)] * heads
    elif method.heads == "uniform":
        counts = [average] * heads
    elif method.heads == "mass":
        mass = [float(row[candidates].sum()) for row in score]
        base = int(method.floor * average)
        counts = [base + int((average - base) * heads * m / sum(mass)) for m in mass]
        over = 0
        for h in sorted(range(heads), key=lambda h: (-mass[h], h)):
            wanted = counts[h] + over
            counts[h] = min(wanted, len(candidates))
            over = wanted - counts[h]
    else:
        best = sorted((-ranks[h][p], h, p) for h in range(heads) for p in candidates)[: average * heads]
        counts = [
            min(int(method.floor * average + (1 - method.floor) * sum(h == mine for _, h, _ in best)), len(candidates))
            for mine in range(heads)
        ]
    return [
        sorted(sorted(candidates, key=lambda p, h=h: (-ranks[h][p], p))[: counts[h]])  # type: ignore[misc]
        for h in range(heads)
    ]


def attend(q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Head]) -> Tensor:
    """q [n, Hq, D] over k, v [L, Hkv, D] and, per KV head, what it has kept -> [n, Hq, D]."""
    group, out = q.shape[1] // k.shape[1], torch.empty_like(q)
    for head in range(q.shape[1]):
        mine = head // group
        keys, values = k[:, mine], v[:, mine]
        if kept:
            keys, values = torch.cat([kept[mine].k, keys]), torch.cat([kept[mine].v, values])
        assert keys.isfinite().all(), "keys that were never written"
        weights = (q[:, head] @ keys.T * q.shape[2] ** -0.5).softmax(dim=-1)
        out[:, head] = weights @ values
    return out


@dataclass(frozen=True)
class Plan:
    """What a step does: its rows by position, whether each is recomputed, and what becomes of the candidates."""

    positions: list[int]
    full: list[bool]
    window: tuple[int, int]
    phase: str  # "dense", "select", "repack", "reuse"


def forward(
    weights: Weights, config: Config, tokens: Sequence[int], plan: Plan, memory: Memory, method: Method
) -> Tensor:
    """Logits [n, vocab] of the plan's rows; rows that are not recomputed are updated as MaskKV does."""
    at, rows, (low, high) = torch.tensor(plan.positions), range(len(plan.positions)), plan.window
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    for layer in range(config.layers):

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        def heads(x: Tensor, name: str, prefix: str = f"model.layers.{layer}.self_attn.") -> Tensor:
            y = linear(x, weights[f"{prefix}{name}_proj.weight"], weights.get(f"{prefix}{name}_proj.bias"))
            return y.view(len(x), -1, config.head_dim)

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        v = heads(x, "v")
        chosen = list(rows)
        if not all(plan.full) and layer:
            others = [i for i in rows if not plan.full[i]]
            least: list[int] = []
            if plan.phase == "reuse":
                similar = dict(zip(others, cosines(v[others], memory.v[layer][at[others]]), strict=True))
                least = sorted(others, key=lambda i: (similar[i], i))[: int(method.rho * len(others))]
            chosen = [i for i in rows if plan.full[i] or i in least]
        where = at[chosen]
        written = where if plan.phase == "repack" and layer else at
        memory.v[layer][written] = qwen3.stored(v if written is at else v[chosen])
        fresh = rope(heads(x[chosen], "k"), where, config.rope_theta)
        memory.k[layer][where] = qwen3.stored(fresh)
        q = rope(heads(x[chosen], "q"), where, config.rope_theta)
        k, values = memory.k[layer], memory.v[layer]
        if plan.phase == "select":
            picked = choose_keys(method, layer, scores(method, q, fresh, plan.window), plan.window)
            memory.kept[layer] = [Head(p, k[p, i].clone(), values[p, i].clone()) for i, p in enumerate(picked)]
        elif plan.phase == "repack":
            memory.kept[layer] = [
                Head(o.positions, k[o.positions, i].clone(), values[o.positions, i].clone())
                for i, o in enumerate(memory.kept[layer])
            ]
        if plan.phase in ("dense", "select"):
            context = attend(q, fresh, v, [])  # all rows, as they were computed
        else:
            context = attend(q, k[low:high], values[low:high], memory.kept[layer])
        mixed = linear(context.flatten(1), weight("self_attn.o_proj"))
        memory.a[layer][where] = mixed
        h = h + memory.a[layer][at]
        memory.f[layer][where] = gated(
            rms_norm(h[chosen], weight("post_attention_layernorm"), config.eps),
            lambda name, weight=weight: weight(f"mlp.{name}"),
        )
        h = h + memory.f[layer][at]
        if plan.phase != "reuse":  # nothing is stored of candidates
            gone = [p for p in range(len(k)) if not low <= p < high]
            for cache in (memory.k, memory.v, memory.a, memory.f):
                cache[layer][gone] = torch.nan
    return project(weights, rms_norm(h, weights["model.norm.weight"], config.eps))


@dataclass(frozen=True)
class Step:
    """One forward pass: its plan, what each layer keeps after it, and (position, token) of what it committed."""

    plan: Plan
    kept: list[list[list[int]]]
    committed: list[tuple[int, int]]


@dataclass
class Trace:
    """What `generate` did."""

    memory: Memory
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@torch.no_grad()
def generate(
    weights: Weights,
    config: Config,
    prompt: Sequence[int],
    method: Method,
    *,
    max_new_tokens: int,
    block_length: int,
    mask_id: int,
    eos_ids: Sequence[int] = (),
    shift: int = 0,
    threshold: float | None = None,
    steps: int | None = None,
) -> Trace:
    """Decode greedily, block by block; rules of committing as in `tests.oracle.canvas.generate`."""
    end = len(prompt) + max_new_tokens
    canvas = [*prompt, *[mask_id] * max_new_tokens]
    trace = Trace(Memory(config, end, weights["model.norm.weight"].dtype))
    start, finished = len(prompt), False
    while start < end and not finished:
        stop, yields = min(start + block_length, end), list[int]()
        while mask_id in canvas[start:stop] and not finished:
            plan = _plan(method, len(trace.steps), len(yields), (start, stop), (len(prompt), end), shift)
            logits = forward(weights, config, [canvas[p] for p in plan.positions], plan, trace.memory, method)
            logits[:, mask_id] = -math.inf
            found = {}
            for p, row in zip(plan.positions, logits, strict=True):
                if start <= p + shift < stop and canvas[p + shift] == mask_id:
                    found[p + shift] = (int(row.argmax()), float(row.softmax(-1).max()))
            done = sum(n > 0 for n in yields)
            count = 0 if steps is None else max(1, block_length // steps + (done < block_length % steps))
            committed = [(start, found[start][0])] if method.first and not yields else choose(found, threshold, count)
            kept = [[list(head.positions) for head in layer] for layer in trace.memory.kept]
            trace.steps.append(Step(plan, kept, committed))
            for position, token in committed:
                canvas[position] = token
            yields.append(len(committed))
            finished = stopped(canvas, start, stop, mask_id, eos_ids)
        start = stop
    output = canvas[len(prompt) :]
    trace.tokens = output[: next((i for i, token in enumerate(output) if token in eos_ids), len(output))]
    return trace


def _plan(
    method: Method, step: int, of_block: int, block: tuple[int, int], response: tuple[int, int], shift: int
) -> Plan:
    begin, end = response
    everything = list(range(end))
    if method.window == "block":
        window = block[0] - shift, block[1]
        again = method.interval and of_block % method.interval == 0
        if of_block <= method.delay or again:
            return Plan(everything, [True] * end, window, "dense" if of_block < method.delay else "select")
        positions = list(range(*window))
        return Plan(positions, [True] * len(positions), window, "reuse")
    window = begin - shift, end
    refreshed = step % method.response_interval == 0
    if step % method.prompt_interval == 0:
        full = [p < window[0] or refreshed for p in everything]
        return Plan(everything, full, window, "repack" if step else "select")
    positions = list(range(*window))
    return Plan(positions, [refreshed] * len(positions), window, "reuse")
