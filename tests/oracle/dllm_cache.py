"""dLLM-Cache in plain PyTorch: one sequence, explicit caches, rows by absolute position.

Beside keys and values, a sequence keeps per layer and position what attention (after its output projection) and
feed-forward network added to the residual stream. Steps of the response are counted by t, from 1. The prompt is
refreshed if (t - 1) % prompt_interval is 0, the response if (t - 1) % response_interval is 0, and the first layer
refreshes what is forwarded in any step. A layer that refreshes a part computes all rows of it. The prompt is not
forwarded where it is not refreshed: no later layer reads more of it than its keys and values. A response that is not
refreshed is updated:

- all of its values are computed, compared with the cached ones by cosine, and cached;
- queries and keys of the int(rho * G) least similar of its G rows are computed; their keys are cached;
- these rows attend to all cached keys and values, and go through the feed-forward network; the two outputs are cached;
- every row adds what is cached of the two to its own stream.

If logits are shifted (Dream), the prompt's last row counts as the response's first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle import qwen3
from tests.oracle.canvas import dream_count
from tests.oracle.dyllm import cosines
from tests.oracle.focus import choose, stopped
from tests.oracle.qwen3 import Config, FeedForward, Weights, attention, gated, project, rms_norm, rope


@dataclass(frozen=True)
class Method:
    """dLLM-Cache's settings."""

    prompt_interval: int = 50
    response_interval: int = 7
    rho: float = 0.25


class Memory:
    """Keys (after RoPE), values and the outputs of attention and FFN: per layer [capacity, ...], NaN at first."""

    def __init__(self, config: Config, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        def empty(*shape: int) -> list[Tensor]:
            return [torch.full((capacity, *shape), torch.nan, dtype=dtype) for _ in range(config.layers)]

        self.k, self.v = (empty(config.kv_heads, config.head_dim) for _ in range(2))
        self.a, self.f = (empty(config.hidden) for _ in range(2))


def forward(
    weights: Weights,
    config: Config,
    tokens: Sequence[int],
    positions: Sequence[int],
    end: int,
    memory: Memory,
    rho: float,
    full: Sequence[bool],
    feed_forward: FeedForward = gated,
    adapt: Sequence[bool] | None = None,
) -> tuple[Tensor, list[list[int]]]:
    """Logits [n, vocab] of n rows of a Llama, Qwen2 or Qwen3, each of which sees all positions [0, end); and the
    positions that each layer computed.

    full: by row, whether it is refreshed. adapt: whether it is updated if not; the others only add what is cached.
    """
    at, rows = torch.tensor(positions), range(len(positions))
    h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    computed = []
    for layer in range(config.layers):

        def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        def heads(x: Tensor, name: str, prefix: str = f"model.layers.{layer}.self_attn.") -> Tensor:
            path = f"{prefix}{name}"
            y = linear(x, weights[f"{path}_proj.weight"], weights.get(f"{path}_proj.bias"))
            y = y.view(len(x), y.shape[1] // config.head_dim, config.head_dim)
            return rms_norm(y, weights[f"{path}_norm.weight"], config.eps) if f"{path}_norm.weight" in weights else y

        x = rms_norm(h, weight("input_layernorm"), config.eps)
        v = heads(x, "v")
        if layer == 0:
            chosen = list(rows)
        else:
            adaptive = [i for i in rows if not full[i] and (adapt is None or adapt[i])]
            similar = dict(zip(adaptive, cosines(v[adaptive], memory.v[layer][at[adaptive]]), strict=True))
            least = sorted(adaptive, key=lambda i: (similar[i], i))[: int(rho * len(adaptive))]
            chosen = [i for i in rows if full[i] or i in least]
        where = at[chosen]
        computed.append(where.tolist())
        fresh = [i for i in rows if layer == 0 or full[i] or adapt is None or adapt[i]]
        memory.v[layer][at[fresh]] = qwen3.stored(v[fresh])
        memory.k[layer][where] = qwen3.stored(rope(heads(x[chosen], "k"), where, config.rope_theta))
        q = rope(heads(x[chosen], "q"), where, config.rope_theta)
        keys, values = memory.k[layer][:end], memory.v[layer][:end]
        assert keys.isfinite().all(), f"layer {layer} reads keys that were never written"
        context = attention(q, keys, values, torch.full((len(where),), end))
        memory.a[layer][where] = linear(context.flatten(1), weight("self_attn.o_proj"))
        h = h + memory.a[layer][at]
        x = rms_norm(h[chosen], weight("post_attention_layernorm"), config.eps)
        memory.f[layer][where] = feed_forward(x, lambda name, weight=weight: weight(f"mlp.{name}"))
        h = h + memory.f[layer][at]
    return project(weights, rms_norm(h, weights["model.norm.weight"], config.eps)), computed


@dataclass(frozen=True)
class Step:
    """One forward pass; all positions are absolute and ascending."""

    full: list[bool]
    tokens: list[int]
    positions: list[int]
    computed: list[list[int]]  # by layer
    committed: list[tuple[int, int]]  # (position, token)
    logits: Tensor


@dataclass
class Trace:
    """What `generate` did."""

    memory: Memory
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


Watch = Callable[[Step, Memory], None]


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
    dream_steps: int | None = None,
    watch: Watch | None = None,
) -> Trace:
    """Decode greedily, block by block; rules of committing as in `tests.oracle.canvas.generate`.

    watch: called after each step.
    """
    end, border = len(prompt) + max_new_tokens, len(prompt) - shift
    canvas = [*prompt, *[mask_id] * max_new_tokens]
    trace = Trace(Memory(config, end, weights["model.norm.weight"].dtype))
    start, finished = len(prompt), False
    while start < end and not finished:
        stop, yields = min(start + block_length, end), list[int]()
        while mask_id in canvas[start:stop] and not finished:
            t = len(trace.steps) + 1
            refresh_prompt = (t - 1) % method.prompt_interval == 0
            refresh_response = (t - 1) % method.response_interval == 0
            positions = list(range(0 if refresh_prompt else border, end))
            full = [p < border or refresh_response for p in positions]
            row_tokens = [canvas[p] for p in positions]
            logits, computed = forward(
                weights, config, row_tokens, positions, end, trace.memory, method.rho, full
            )  # fmt: skip
            logits[:, mask_id] = -math.inf
            found = {}
            for p, row in zip(positions, logits, strict=True):
                if start <= p + shift < stop and canvas[p + shift] == mask_id:
                    shares = row.softmax(-1)
                    sure = shares.max() if dream_steps is None else torch.xlogy(shares, shares).sum()
                    found[p + shift] = (int(row.argmax()), float(sure))
            if dream_steps is not None:
                count = dream_count(len(found), len(yields), dream_steps)
            else:
                done = sum(n > 0 for n in yields)
                count = 0 if steps is None else max(1, block_length // steps + (done < block_length % steps))
            committed = choose(found, threshold, count)
            step = Step(full, row_tokens, positions, computed, committed, logits)
            trace.steps.append(step)
            if watch is not None:
                watch(step, trace.memory)
            for position, token in committed:
                canvas[position] = token
            yields.append(len(committed))
            finished = stopped(canvas, start, stop, mask_id, eos_ids)
        start = stop
    output = canvas[len(prompt) :]
    trace.tokens = output[: next((i for i, token in enumerate(output) if token in eos_ids), len(output))]
    return trace
