"""Models that work in two modes, in plain PyTorch: one forward over a whole sequence with a mask of who sees whom, no
cache, and the loops of Fast-dLLM v2 and Nemotron-Labs-Diffusion written down from their descriptions.

Weights are a dict with the names of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

Choose = Callable[[list[int], Tensor], list[int]]
"""(masked columns, confidence of every column [B]) -> columns that are committed."""
Pairs = list[tuple[int, int]]
"""(position of the row that predicts, the token that is committed by what it predicts)."""


@dataclass(frozen=True)
class Yarn:
    """Frequencies for a longer window, and how queries grow at positions after the original one."""

    factor: float
    window: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    beta: float = 0.1

    def frequencies(self, theta: float, size: int) -> Tensor:
        def place(turns: float) -> float:
            return size * math.log(self.window / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(place(self.beta_fast)), 0), min(math.ceil(place(self.beta_slow)), size - 1)
        found = []
        for i in range(size // 2):
            plain = theta ** (-2 * i / size)
            share = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            found.append(plain / self.factor * share + plain * (1 - share))
        return torch.tensor(found, dtype=torch.float64)

    def scale(self, position: int) -> float:
        return 1 + self.beta * math.log(1 + position // self.window)


@dataclass(frozen=True)
class Config:
    """The shape of a model, and what its checkpoint calls its parts."""

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    intermediate: int = 48
    vocab: int = 97
    theta: float = 500.0
    eps: float = 1e-5
    bias: bool = False
    yarn: Yarn | None = None
    body: str = "model"
    head: str = "lm_head"


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every parameter of a checkpoint."""
    d, f = config.hidden, config.intermediate
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {
        f"{config.body}.embed_tokens.weight": (config.vocab, d),
        f"{config.body}.norm.weight": (d,),
        f"{config.head}.weight": (config.vocab, d),
    }
    for layer in range(config.layers):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (query, d),
            "self_attn.k_proj.weight": (key, d),
            "self_attn.v_proj.weight": (key, d),
            "self_attn.o_proj.weight": (d, query),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if config.bias:
            inside |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", query), ("k", key), ("v", key))}
        found |= {f"{config.body}.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return found


Adapter = Mapping[str, tuple[Tensor, Tensor, float]]
"""By the name of a weight: (down [r, inputs], up [outputs, r], scale) of what is added to it."""


def forward(
    weights: Mapping[str, Tensor],
    config: Config,
    tokens: Sequence[int],
    sees: Tensor | None = None,
    adapter: Adapter | None = None,
    adapted: Tensor | None = None,
    rows: Sequence[int] | None = None,
    known: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits [t, vocab] of a sequence of t tokens, and per layer its keys, after RoPE, and values [t, Hkv, D].

    sees bool[t, t]: which positions each row sees; all by default. adapted bool[t]: the rows whose weights are those
    of the adapter, too. rows: only these are forwarded, and have logits; the others' keys and values are the known.
    """
    count, size = len(tokens), config.head_dim
    at = list(range(count) if rows is None else rows)
    sees = torch.ones(count, count, dtype=torch.bool) if sees is None else sees
    blind = torch.where(sees, 0.0, -torch.inf)[at]
    plain = torch.tensor([config.theta ** (-2 * i / size) for i in range(size // 2)], dtype=torch.float64)
    frequencies = plain if config.yarn is None else config.yarn.frequencies(config.theta, size)
    angles = torch.tensor(at).double()[:, None] * frequencies
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    grow = torch.tensor([1.0 if config.yarn is None else config.yarn.scale(p) for p in at])

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    h, caches = weights[f"{config.body}.embed_tokens.weight"][torch.tensor(tokens)[at]], []
    for layer in range(config.layers):
        name = f"{config.body}.layers.{layer}."

        def part(x: Tensor, which: str, name: str = name) -> Tensor:
            y = linear(x, weights[f"{name}{which}.weight"], weights.get(f"{name}{which}.bias"))
            if adapter is None or adapted is None or f"{name}{which}.weight" not in adapter:
                return y
            down, up, scale = adapter[f"{name}{which}.weight"]
            return y + adapted[at, None] * (x @ (scale * up @ down).T)

        x = rms_norm(h, (config.hidden,), weights[f"{name}input_layernorm.weight"], config.eps)
        q, k, v = (part(x, f"self_attn.{n}_proj").view(len(at), -1, size) for n in "qkv")
        q, k = rotate(q) * grow[:, None, None], rotate(k)
        if known is not None:
            k, v = (old.index_copy(0, torch.tensor(at), new) for old, new in zip(known[layer], (k, v), strict=True))
        caches.append((k, v))
        mixed = []
        for head in range(config.heads):
            group = head * config.kv_heads // config.heads
            scores = q[:, head] @ k[:, group].T / size**0.5 + blind
            mixed.append(scores.softmax(-1) @ v[:, group])
        h = h + part(torch.cat(mixed, dim=1), "self_attn.o_proj")
        x = rms_norm(h, (config.hidden,), weights[f"{name}post_attention_layernorm.weight"], config.eps)
        h = h + part(silu(part(x, "mlp.gate_proj")) * part(x, "mlp.up_proj"), "mlp.down_proj")
    h = rms_norm(h, (config.hidden,), weights[f"{config.body}.norm.weight"], config.eps)
    return linear(h, weights[f"{config.head}.weight"]), caches


@dataclass
class Trace:
    """What a loop did: the tokens up to a stop token, what each step committed, and how many positions are final."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Pairs] = field(default_factory=list)
    final: int = 0
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Model:
    """Weights with what their loops must know; causal: final rows see only what comes before them; shift: 1 if a row
    of a block that is denoised predicts the next position; adapter: of drafts.
    """

    weights: Mapping[str, Tensor]
    config: Config
    block: int
    mask: int
    stop: int
    causal: bool
    shift: int
    adapter: Adapter | None = None

    def settled(self, count: int) -> Tensor:
        """bool[count, count]: who sees whom once all is final."""
        at = torch.arange(count)
        own = at if self.causal else at // self.block
        return own[None] <= own[:, None]

    def run(
        self,
        final: Sequence[int],
        open_block: Sequence[int] = (),
        drafted: bool = False,
        rows: Sequence[int] | None = None,
        known: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Probabilities of every row without the mask's, and keys and values: of final tokens, and after them of a
        block whose rows all see it, and are drafted or not; rows, known: see `forward`.
        """
        count = len(final) + len(open_block)
        sees = self.settled(count)
        sees[len(final) :] = True
        adapted = (torch.arange(count) >= len(final)) & drafted
        tokens = [*final, *open_block]
        logits, caches = forward(self.weights, self.config, tokens, sees, self.adapter, adapted, rows, known)
        logits[:, self.mask] = -torch.inf
        return logits.softmax(-1), caches

    def next(self, final: Sequence[int]) -> int:
        return int(self.run(final)[0][-1].argmax())

    def ended(self, canvas: Sequence[int], prompt: int) -> bool:
        """Whether a stop token of the response has no mask before it."""
        said = list(canvas[prompt:])
        said = said[: said.index(self.mask)] if self.mask in said else said
        return self.stop in said

    def finish(self, trace: Trace, canvas: Sequence[int], prompt: int, new: int, final: int) -> Trace:
        said = list(canvas[prompt : prompt + new])
        trace.tokens = said[: said.index(self.stop)] if self.stop in said else said
        if self.mask in trace.tokens:
            trace.tokens = trace.tokens[: trace.tokens.index(self.mask)]
        trace.final = final
        trace.layers = [(k[:final], v[:final]) for k, v in self.run(canvas[:final])[1]] if final else []
        return trace


def diffuse(model: Model, prompt: Sequence[int], new: int, choose: Choose, cached: int = 0) -> Trace:
    """Block by block: denoise all masks, then one forward that makes the block final and gives the next token.

    cached: the length of sub-blocks. While the first position of the first one with masks is a mask, the block is
    forwarded; then that sub-block alone, over the keys and values that the others had when the block last was.
    """
    trace, block = Trace(), model.block
    start = len(prompt) if model.causal else len(prompt) // block * block
    canvas = list(prompt)
    if start == len(prompt):
        canvas.append(model.next(prompt))
        trace.steps.append([(start - 1, canvas[-1])])
    while True:
        canvas += [model.mask] * (start + block - len(canvas))
        known = None
        while model.mask in canvas[start : len(prompt) + new]:  # masks beyond the response need no step
            if model.ended(canvas, len(prompt)):
                return model.finish(trace, canvas, len(prompt), new, start)
            first = canvas.index(model.mask, start) - start
            begin = first // cached * cached if cached else 0
            if cached and known is not None and begin < first:
                part = range(start + begin, min(start + begin + cached, start + block))
                some, known = model.run(canvas[:start], canvas[start:], rows=part, known=known)
                own = torch.zeros(block, some.shape[1])
                own[begin : begin + len(part)] = some
            else:
                probabilities, known = model.run(canvas[:start], canvas[start:])
                own = probabilities[start:]
            # Logits are shifted by one within the block, and those of row 0 stand twice.
            sure, token = (torch.cat([own[:1], own[:-1]]) if model.shift else own).max(dim=-1)
            masked = [c for c in range(block) if canvas[start + c] == model.mask]
            pairs = []
            for column in sorted(choose(masked, sure)):
                canvas[start + column] = int(token[column])
                pairs.append((start + column - model.shift, int(token[column])))
            trace.steps.append(pairs)
        if model.ended(canvas, len(prompt)) or start + block >= len(prompt) + new:
            return model.finish(trace, canvas, len(prompt), new, start)
        start += block
        canvas.append(model.next(canvas))
        trace.steps.append([(start - 1, canvas[-1])])


def autoregressive(model: Model, prompt: Sequence[int], new: int) -> Trace:
    """One causal row, one token."""
    trace, canvas = Trace(), list(prompt)
    while len(canvas) < len(prompt) + new and model.stop not in canvas[len(prompt) :]:
        canvas.append(model.next(canvas))
        trace.steps.append([(len(canvas) - 2, canvas[-1])])
    return model.finish(trace, canvas, len(prompt), new, len(canvas) - 1)


def self_speculation(model: Model, prompt: Sequence[int], new: int) -> Trace:
    """Draft a block from its first token, verify it with causal rows, keep the longest prefix and one token more."""
    trace, end = Trace(), len(prompt) + new
    canvas = [*prompt, model.next(prompt)]
    trace.steps.append([(len(prompt) - 1, canvas[-1])])
    while len(canvas) < end and model.stop not in canvas[len(prompt) :]:
        start = len(canvas) - 1
        masks = [model.mask] * (model.block - 1)
        drafted = model.run(canvas[:start], [canvas[-1], *masks], drafted=True)[0][start + 1 :]
        draft = [canvas[-1], *drafted.argmax(-1).tolist()]
        trace.steps.append([])
        ar = model.run([*canvas[:start], *draft])[0][start:].argmax(-1).tolist()
        kept = 0
        while kept < model.block - 1 and ar[kept] == draft[kept + 1]:
            kept += 1
        canvas += ar[: kept + 1]
        trace.steps.append([(start + i, ar[i]) for i in range(kept + 1)])
    return model.finish(trace, canvas, len(prompt), new, len(canvas) - 1)


def threshold(bar: float) -> Choose:
    """All above a threshold, at least the most confident."""

    def choose(masked: list[int], sure: Tensor) -> list[int]:
        best = max(masked, key=lambda c: (float(sure[c]), -c))
        return sorted({best, *(c for c in masked if sure[c] > bar)})

    return choose


def sub_blocks(bar: float, size: int) -> Choose:
    """The same within the first sub-block that has masks."""

    def choose(masked: list[int], sure: Tensor) -> list[int]:
        first = masked[0] // size
        return threshold(bar)([c for c in masked if c // size == first], sure)

    return choose


def top(count: int) -> Choose:
    """The most confident ones."""
    return lambda masked, sure: sorted(masked, key=lambda c: (-float(sure[c]), c))[:count]
