"""Tiny models as transformers runs them, and decoding in its simplest form."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.runtime.requests import Canvas
from dgraph.testing import TinyModel, models

PLAIN = [tiny for tiny in models() if str(tiny) != "llada2"]
"""Families whose modules are classes of transformers."""


@functools.cache
def _module(tiny: TinyModel) -> Any:
    plain: Any = copy.deepcopy(next(iter(tiny.model.module.children())))
    plain.set_attn_implementation("eager")
    return plain


def logits(tiny: TinyModel, canvas: Sequence[int], known: int = 0) -> Tensor:
    """f64[T, vocabulary]: one forward of the whole canvas by transformers.

    known: of a model whose rows are encoded causally, how many are; its blocks come after them.
    """
    spec, at = tiny.model.spec, torch.arange(len(canvas))
    block = at // (spec.block_length if spec.attention == "block_causal" else len(canvas))
    if spec.encoding == "causal":
        block = torch.where(at < known, at, known + (at - known) // spec.block_length)
    mask = torch.where(block[None, :] <= block[:, None], 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        found = _module(tiny)(torch.tensor([canvas]), attention_mask=mask[None, None]).logits[0].double()
    found[:, spec.mask_id] = -torch.inf
    return found


def infilled(tiny: TinyModel, prompt: Sequence[int], canvas: Canvas, new: int, threshold: float) -> list[int]:
    """A response of so many tokens, some of them fixed: every step forwards the whole canvas."""
    spec, end = tiny.model.spec, len(prompt) + new
    size, causal, first = spec.block_length, spec.attention == "block_causal", len(prompt)
    tokens = [*prompt, *(spec.mask_id if token is None else token for token in canvas)]
    known = [*tokens, spec.mask_id].index(spec.mask_id)
    tokens += [spec.mask_id] * (-(-end // size) * size + size - len(tokens) if causal else end - len(tokens))
    if causal:
        first = known if spec.encoding == "causal" else first // size * size
    for start in range(first, end, size):
        block = range(start, min(start + size, len(tokens)))
        if spec.next_token and tokens[start] == spec.mask_id:
            tokens[start] = int(logits(tiny, tokens[:start], start)[-1].argmax())
        while masks := [at for at in block if tokens[at] == spec.mask_id]:
            every = logits(tiny, tokens[: start + size], start) if causal else logits(tiny, tokens)
            found = every.softmax(dim=1)[[at - spec.logit_shift for at in masks]].max(dim=1)
            best = int(found.values.argmax())
            for n, at in enumerate(masks):
                if found.values[n] > threshold or n == best:
                    tokens[at] = int(found.indices[n])
    return tokens[len(prompt) : end]
