"""DyLLM's gate together with evicted rows and few keys, in plain PyTorch: forward passes of the other oracles' loops.

A pass forwards the rows that the other method names. In each layer

- keys and values are projected of the rows that were salient in the layer before (in the first: those with another
  token than in their last pass), or of all rows where their importance is asked for; other rows keep theirs;
- the hook, if there is one, evicts rows after that (FOCUS);
- the rows that go on attend to the keys that the pass sees: all of them, or a window and what each head keeps;
- a row is salient if the cosine between its context and that of its last pass is below tau, and runs through the
  feed-forward network; any other row takes what the network gave it last.

A full pass computes everything. On a canvas it is one of the first of a response, whatever forwards the whole canvas;
in blocks it is one of the first over a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle import dyllm
from tests.oracle.canvas import Method as Rows
from tests.oracle.canvas import Moment
from tests.oracle.dyllm import Memory, Turn, cosines
from tests.oracle.qwen3 import Cache, Config, FeedForward, Weights, gated, project, rms_norm, rope
from tests.oracle.scoring import Eviction, EvictRows
from tests.oracle.sparse import Head, Method, attend, choose_keys
from tests.oracle.sparse_blocks import Pass, SparseBlocks


@dataclass(frozen=True)
class Seen:
    """Keys that a pass sees: its phase ("dense", "select", "repack" or "reuse") and the window [low, high)."""

    phase: str = "dense"
    low: int = 0
    high: int = 0


@dataclass
class Gate:
    """DyLLM's gate with its memory of a sequence.

    Attributes:
        eviction: the program asks for the importance of its layers in each pass, also of one that evicts nothing.
        whole_canvas: rows that are not forwarded have keys, so rows that go on see as far as before.
        last_masked: the last layer, after its keys and values, is of rows whose prediction is wanted, and ungated.
        kept: by layer, what each head keeps.
        salient: by pass and layer, how many rows were salient; a last layer that is not gated is left out.
    """

    method: dyllm.Method
    keys: Method | None = None
    feed_forward: FeedForward = gated
    turn: Turn = rope
    eviction: Eviction | None = None
    whole_canvas: bool = False
    last_masked: bool = False
    kept: list[list[Head]] = field(default_factory=list)
    salient: list[list[int]] = field(default_factory=list)
    forwarded: dict[int, int] = field(default_factory=dict)

    def begin(self, config: Config, cache: Cache) -> None:
        """Keys and values are those of the cache, for the loops that look at it."""
        self.memory = Memory(config, len(cache.k[0]), cache.k[0].dtype)
        self.memory.k, self.memory.v = cache.k, cache.v
        self.kept = [[] for _ in range(config.layers)]

    def run(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
        full: bool,
        seen: Seen,
        hook: EvictRows | None,
    ) -> Tensor:
        """States [m, hidden] after the last norm of the rows that go on."""
        at, limit, memory = torch.tensor(positions), torch.tensor(limits), self.memory
        changed = {p for p, token in zip(positions, tokens, strict=True) if self.forwarded.get(p) != token}
        self.forwarded.update(zip(positions, tokens, strict=True))
        salient = [full or p in changed for p in positions]
        if hook is not None and full:  # what it computes is kept, of every row
            hook.average = math.inf
        e = self.eviction
        asked = set() if e is None else {e.after, e.after - (e.signal == "delta")}
        h, counts = weights["model.embed_tokens.weight"][torch.tensor(tokens)], list[int]()
        for layer in range(config.layers):

            def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
                return weights[f"{prefix}{name}.weight"]

            def heads(x: Tensor, which: Tensor, name: str, prefix: str = f"model.layers.{layer}.self_attn.") -> Tensor:
                path = f"{prefix}{name}"
                y = linear(x, weights[f"{path}_proj.weight"], weights.get(f"{path}_proj.bias"))
                y = y.view(len(x), y.shape[1] // config.head_dim, config.head_dim)
                if f"{path}_norm.weight" in weights:
                    y = rms_norm(y, weights[f"{path}_norm.weight"], config.eps)
                return y if name == "v" else self.turn(y, which, config.rope_theta)

            x = rms_norm(h, weight("input_layernorm"), config.eps)
            new = [i for i in range(len(at)) if salient[i] or layer in asked or not self.method.partial]
            q, k, v = heads(x, at, "q"), heads(x[new], at[new], "k"), heads(x[new], at[new], "v")
            cache.write(layer, at[new].tolist(), k, v)
            chosen = hook(layer, q, k) if hook is not None and layer in asked else None
            if chosen is not None:
                rows = chosen[0]
                h, q, at = h[rows], q[rows], at[rows]
                limit = limit[rows] if self.whole_canvas else chosen[1]
            if seen.phase in ("select", "repack"):
                self._keep(layer, q, at, max(limits), seen)
            context = self._attend(layer, q, limit, seen)
            h = h + linear(context.flatten(1), weight("self_attn.o_proj"))
            x = rms_norm(h, weight("post_attention_layernorm"), config.eps)

            def network(x: Tensor, weight: Callable[[str], Tensor] = weight) -> Tensor:
                return self.feed_forward(x, lambda name: weight(f"mlp.{name}"))

            if self.last_masked and layer == config.layers - 1:
                h = h + network(x)  # what rows give whose prediction is not wanted, is not read
                continue
            similar = cosines(context, memory.c[layer][at])
            salient = [full or not s >= self.method.of(layer) for s in similar]  # NaN: there was no context
            memory.c[layer][at] = context
            counts.append(sum(salient))
            run = [i for i in range(len(at)) if salient[i] or not self.method.gate]
            memory.f[layer][at[run]] = network(x[run])
            h = h + memory.f[layer][at]
        self.salient.append(counts)
        return rms_norm(h, weights["model.norm.weight"], config.eps)

    def _keep(self, layer: int, q: Tensor, at: Tensor, end: int, seen: Seen) -> None:
        """Choose the keys to keep among those that there are, or give those that are kept their new values."""
        k, v = self.memory.k[layer][:end], self.memory.v[layer][:end]
        chosen = [head.positions for head in self.kept[layer]]
        if seen.phase == "select":
            assert self.keys is not None
            score = votes(self.keys, q[(at >= seen.low) & (at < seen.high)], k)
            chosen = choose_keys(self.keys, layer, score, (seen.low, min(seen.high, end)))
        self.kept[layer] = [Head(p, k[p, i].clone(), v[p, i].clone()) for i, p in enumerate(chosen)]

    def _attend(self, layer: int, q: Tensor, limit: Tensor, seen: Seen) -> Tensor:
        k, v = self.memory.k[layer], self.memory.v[layer]
        few = seen.phase in ("reuse", "repack")
        kept, low = (self.kept[layer], seen.low) if few else ([], 0)
        parts = []
        for end, rows in groupby(enumerate(limit.tolist()), key=lambda row: row[1]):
            high = min(end, seen.high) if few else end
            parts.append(attend(q[[i for i, _ in rows]], k[low:high], v[low:high], kept))
        return torch.cat(parts)


def votes(method: Method, q: Tensor, k: Tensor) -> Tensor:
    """[Hkv, L]: how well the positions' keys [L, Hkv, D] fit the rows q [n, Hq, D] that ask."""
    group = q.shape[1] // k.shape[1]
    products = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, dim=1)) * q.shape[2] ** -0.5
    if method.selector == "mask_voting":
        return products.softmax(dim=-1).sum(dim=1).view(k.shape[1], group, -1).mean(dim=1)
    mean = products.mean(dim=1)
    if method.selector == "shared":
        return mean.mean(dim=0).expand(k.shape[1], -1)
    return mean.view(k.shape[1], group, -1).amax(dim=1)


class GatedCanvas:
    """Rows and forward pass for `tests.oracle.canvas.generate`.

    Args:
        gate: the gate, of one sequence.
        rows: the rows of a step; None: all of the canvas.
        prompt: tokens of the prompt.
    """

    def __init__(self, gate: Gate, rows: Rows, prompt: int) -> None:
        self.gate, self.of, self.prompt = gate, rows, prompt
        self.phases: list[str] = []

    def rows(self, moment: Moment) -> set[int] | None:
        self.moment = moment
        chosen = self.of(moment)
        self.whole = chosen is None
        return chosen

    def forward(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        end: int,
        cache: Cache,
        hook: EvictRows | None = None,
    ) -> Tensor:
        gate, moment = self.gate, self.moment
        if not self.phases:
            gate.begin(config, cache)
        full = moment.number < gate.method.full_steps
        seen = self._seen()
        self.phases.append(seen.phase)
        limits = [end] * len(positions)
        return project(weights, gate.run(weights, config, tokens, positions, limits, cache, full, seen, hook))

    def _seen(self) -> Seen:
        keys, moment = self.gate.keys, self.moment
        if keys is None:
            return Seen()
        if keys.window == "response":
            phase = ("repack" if moment.number else "select") if self.whole else "reuse"
            return Seen(phase, self.prompt - moment.shift, moment.end)
        phase = ("dense" if moment.step < keys.delay else "select") if self.whole else "reuse"
        return Seen(phase, moment.start - moment.shift, moment.stop)


class GatedBlocks(SparseBlocks):
    """A forward pass for `tests.oracle.focus.generate`: the phases of `SparseBlocks`, and rows gated and evicted.

    Args:
        gate: the gate, of one sequence.
        prompt: tokens of the prompt.
        size: columns of a block.
    """

    def __init__(self, gate: Gate, prompt: int, size: int) -> None:
        super().__init__(gate.keys or Method("block", "block", 1.0), prompt, size, gate.feed_forward, gate.turn)
        self.gate, self.passed = gate, dict[int, int]()

    def __call__(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
        hook: EvictRows | None = None,
    ) -> Tensor:
        gate, start = self.gate, positions[-1] // self.size * self.size
        if not hasattr(gate, "memory"):
            gate.begin(config, cache)
        decodes, block = self.prefilled, start if self.method.window == "block" else self.first
        phase = self._phase(start) if decodes and gate.keys is not None else "dense"
        count = self.passed.get(start, 0)
        self.passed[start] = count + 1
        full = (
            not decodes or count < gate.method.full_steps or (gate.method.every > 0 and count % gate.method.every == 0)
        )
        seen = Seen(phase, block, max(limits))
        h = gate.run(weights, config, tokens, positions, limits, cache, full, seen, hook)
        if decodes:
            kept = [[head.positions for head in layer] for layer in gate.kept]
            self.passes.append(Pass(phase, list(positions), kept))
        else:
            gate.salient.clear()
        self._drop(phase, cache)
        self.prefilled = True
        return h


class GatedTwoModes:
    """A forward pass for `tests.oracle.focus_two_modes.generate`: rows gated and evicted.

    Forwards that encode are full, and so is the first one that denoises a block, which therefore evicts nothing.

    Args:
        gate: the gate, of one sequence; no keys are dropped.
    """

    def __init__(self, gate: Gate) -> None:
        self.gate, self.begins = gate, True

    def __call__(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
        hook: EvictRows | None = None,
    ) -> Tensor:
        if not hasattr(self.gate, "memory"):
            self.gate.begin(config, cache)
        full, self.begins = self.begins or hook is None, hook is None
        return self.gate.run(weights, config, tokens, positions, limits, cache, full, Seen(), hook)
