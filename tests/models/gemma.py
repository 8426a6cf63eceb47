"""A tiny random DiffusionGemma of transformers, which is the oracle, and programs of dgraph on its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dgraph
from dgraph.graph import Graph
from dgraph.models.diffusion_gemma import EOS, FULL, SLIDING
from tests.tiny import PAGE, interpret

CANVAS, WINDOW, VOCAB, HIDDEN = 8, 6, 97, 32
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "pad_token_id": 0,
    "eos_token_id": EOS,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 4,
}


@functools.cache
def published(sharp: float = 1.0, seed: int = 0) -> Any:
    """A model of transformers in fp32; sharp: how far apart its logits are."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(text_config=dict(TEXT), vision_config=dict(VISION), canvas_length=CANVAS)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            drawn = torch.randn(value.shape, generator=generator)
            if name.endswith("layer_scalar"):
                value.copy_((0.9 if "encoder" in name else 1.2) + 0.1 * drawn)
            elif value.dim() == 1 and "inv_freq" not in name:
                value.copy_(1 + 0.1 * drawn)
            elif value.dim() > 1:
                value.copy_(drawn * value.shape[-1] ** -0.5)
        model.model.decoder.norm.weight.mul_(sharp)
    return model


def caches_of(graph: Graph, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Empty paged caches (NaN) of a program for sequences of those lengths, and their table."""
    needed = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).int()
    table = torch.full((len(lengths), max(needed)), -1, dtype=torch.int32)
    for s, part in enumerate(order.split(needed)):
        table[s, : len(part)] = part
    caches = {
        name: torch.full((len(order), PAGE, *map(int, spec.shape[2:])), torch.nan, dtype=spec.dtype)
        for name, spec in graph.inputs.items()
        if spec.per == "position"
    }
    return {"page_table": table, **caches}


def rows_of(sequences: Sequence[Sequence[int]], starts: Sequence[int], encoded: Sequence[bool]) -> dict[str, Tensor]:
    """Inputs of a packed step: of each sequence tokens from a start on, all encoded, or all denoised."""
    counts = [len(tokens) for tokens in sequences]
    spans = list(zip(starts, counts, encoded, strict=True))
    positions = [p for start, n, _ in spans for p in range(start, start + n)]
    mode = torch.tensor([one for _, n, one in spans for _ in range(n)])
    at, begin, end = (
        torch.tensor(values)
        for values in (
            positions,
            [start for start, n, _ in spans for _ in range(n)],
            [start + n for start, n, _ in spans for _ in range(n)],
        )
    )
    return {
        "input_ids": torch.tensor([token for tokens in sequences for token in tokens]),
        "positions": at,
        "limit": torch.where(mode, at + 1, end).int(),
        "origin": torch.where(mode, at, begin).int(),
        "encoded": mode,
        "cu_rows": torch.tensor([0, *counts]).cumsum(0).int(),
    }


def draw(count: int, seed: int) -> list[int]:
    """Token ids without the stop token."""
    return torch.randint(0, EOS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(graph: Graph, rows: dict[str, Tensor], caches: dict[str, Tensor], soft: Tensor | None = None) -> Tensor:
    """Logits of a program; soft: zeros by default."""
    count = len(rows["input_ids"])
    given = torch.zeros(count, HIDDEN) if soft is None else soft
    return interpret(graph, {**rows, **caches, "soft": given})["logits"]


def adopted(model: Any) -> dgraph.Model:
    """The model of transformers as one of dgraph."""
    from dgraph.models.diffusion_gemma import family

    found = family.adopt(model)
    assert found is not None
    return found
