"""Few keys on a block-causal model in plain PyTorch, as the forward pass of `tests.oracle.focus.generate`.

The prompt's whole blocks are prefilled, and a finished block is committed by a forward of its rows in the next one's
first step; both are final. A step forwards the block. What is chosen is chosen among keys in the cache:

- MaskKV: the window is the response, from the block in which it begins. Its first step sees all keys, adds up what
  attention the prompt's whole blocks get from the block's rows, and keeps the best; the rest is dropped for good.
- dLLM-Serve, Sparse-dLLM: the window is the block. Its first `delay` steps see all keys, the next one does and chooses
  by the mean query of the block's own rows (not of those that are committed), the others reuse.

What is kept is seen beside the window, by the rows that are committed, too.

`SparseTwoModes` is the same as the forward pass of `tests.oracle.focus_two_modes.generate`. There a pass denoises a
block or encodes one, and those that denoise choose. Around a block, what is encoded sees every key; under MaskKV it
does until the first pass that denoises has chosen, and what is kept after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.oracle.dyllm import Turn
from tests.oracle.qwen3 import Cache, Config, FeedForward, Weights, gated, rms_norm, rope
from tests.oracle.scoring import EvictRows
from tests.oracle.sparse import Head, Method, attend, choose_keys, voters


@dataclass(frozen=True)
class Pass:
    """One forward pass after the prefill: its phase, its rows, and the positions that heads keep, by layer."""

    phase: str  # "dense", "select", "reuse"
    positions: list[int]
    kept: list[list[list[int]]]


class SparseBlocks:
    """A forward pass with what is kept between two of them, of one sequence.

    Args:
        prompt: tokens of the prompt.
        size: columns of a block.

    Attributes:
        kept: by layer, what each head keeps.
        passes: those after the prefill, in order.
    """

    def __init__(
        self, method: Method, prompt: int, size: int, feed_forward: FeedForward = gated, turn: Turn = rope
    ) -> None:
        self.method, self.size, self.feed_forward, self.turn = method, size, feed_forward, turn
        self.first = prompt // size * size
        self.prefilled = self.first == 0
        self.kept: list[list[Head]] = []
        self.passes: list[Pass] = []
        self.counts: dict[int, int] = {}

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
        assert hook is None, "nothing is evicted here"
        start = positions[-1] // self.size * self.size
        phase, low = "dense", start if self.method.window == "block" else self.first
        if self.prefilled:
            phase = self._phase(start)
            self.kept = self.kept or [[] for _ in range(config.layers)]
        h = self._hidden(weights, config, tokens, positions, limits, cache, phase, low)
        if self.prefilled:
            self.passes.append(Pass(phase, list(positions), [[o.positions for o in layer] for layer in self.kept]))
        self._drop(phase, cache)
        self.prefilled = True
        return h

    def _drop(self, phase: str, cache: Cache) -> None:
        """What MaskKV does not keep is gone once it has chosen."""
        if phase == "select" and self.method.window == "response":
            for caches in (cache.k, cache.v):
                for values in caches:
                    values[: self.first] = torch.nan

    def _phase(self, start: int) -> str:
        count, method = self.counts.get(start, 0), self.method
        self.counts[start] = count + 1
        if method.window == "response":
            return "reuse" if any(p.phase == "select" for p in self.passes) else "select"
        if count < method.delay:
            return "dense"
        again = method.interval > 0 and count % method.interval == 0
        return "select" if count == method.delay or again else "reuse"

    def _hidden(
        self,
        weights: Weights,
        config: Config,
        tokens: Sequence[int],
        positions: Sequence[int],
        limits: Sequence[int],
        cache: Cache,
        phase: str,
        low: int,
    ) -> Tensor:
        at = torch.tensor(positions)
        h = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(config.layers):

            def weight(name: str, prefix: str = f"model.layers.{layer}.") -> Tensor:
                return weights[f"{prefix}{name}.weight"]

            x = rms_norm(h, weight("input_layernorm"), config.eps)
            q, k, v = (self._heads(x, weight, name, config, at) for name in "qkv")
            cache.write(layer, positions, k, v)
            if phase == "select":
                self._select(layer, q, cache, positions, limits, low)
            seen = self.kept[layer] if phase == "reuse" else []
            begin = low if phase == "reuse" else 0
            mixed = [
                attend(q[[i for i, _ in rows]], cache.k[layer][begin:limit], cache.v[layer][begin:limit], seen)
                for limit, rows in groupby(enumerate(limits), key=lambda row: row[1])
            ]
            h = h + linear(torch.cat(mixed).flatten(1), weight("self_attn.o_proj"))
            x = rms_norm(h, weight("post_attention_layernorm"), config.eps)
            h = h + self.feed_forward(x, lambda name, weight=weight: weight(f"mlp.{name}"))
        return rms_norm(h, weights["model.norm.weight"], config.eps)

    def _heads(self, x: Tensor, weight: Callable[[str], Tensor], name: str, config: Config, at: Tensor) -> Tensor:
        """Queries, keys or values [n, H, D] of rows, normed and rotated as the model does it."""
        y = linear(x, weight(f"self_attn.{name}_proj")).view(len(x), -1, config.head_dim)
        if name == "v":
            return y
        return self.turn(rms_norm(y, weight(f"self_attn.{name}_norm"), config.eps), at, config.rope_theta)

    def _select(
        self, layer: int, q: Tensor, cache: Cache, positions: Sequence[int], limits: Sequence[int], low: int
    ) -> None:
        """Choose among the positions before the window, by the rows inside it."""
        mine = [i for i, p in enumerate(positions) if p >= low]
        end = max(limits)
        k, v = cache.k[layer][:end], cache.v[layer][:end]
        heads, group = k.shape[1], q.shape[1] // k.shape[1]
        score = torch.zeros(heads, end)
        for head in range(q.shape[1]):
            products = q[mine, head] @ k[:, head // group].T * q.shape[2] ** -0.5
            if self.method.selector not in ("block", "shared"):
                assert {limits[i] for i in mine} == {end}
                votes = [positions[i] in voters(self.method.selector, low, end) for i in mine]
                score[head // group] += products.softmax(dim=-1)[votes].sum(dim=0) / group
            elif self.method.selector == "shared":
                score += products.mean(dim=0) / q.shape[1]
            else:
                fits = products.mean(dim=0)
                score[head // group] = fits if head % group == 0 else torch.maximum(score[head // group], fits)
        chosen = choose_keys(self.method, layer, score, (low, end))
        self.kept[layer] = [Head(p, k[p, i].clone(), v[p, i].clone()) for i, p in enumerate(chosen)]


class SparseTwoModes(SparseBlocks):
    """The same of a model that encodes what it has denoised; every pass counts, those of the prompt, too.

    Args:
        causal: blocks begin anywhere, so that the window of a response begins where the prompt ends.
    """

    def __init__(self, method: Method, prompt: int, size: int, causal: bool) -> None:
        super().__init__(method, prompt, size)
        self.first = prompt if causal else self.first

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
        """hook: of a pass that denoises; it keeps all rows."""
        around, begin = self.method.window == "block", positions[0]
        if hook is None:
            chosen = any(p.phase == "select" for p in self.passes)
            phase = "reuse" if chosen and not around else "dense"
        else:
            phase = self._phase(begin)
            hook.kept = list(range(len(positions)))
        self.kept = self.kept or [[] for _ in range(config.layers)]
        h = self._hidden(weights, config, tokens, positions, limits, cache, phase, begin if around else self.first)
        self.passes.append(Pass(phase, list(positions), [[o.positions for o in layer] for layer in self.kept]))
        self._drop(phase, cache)
        return h
