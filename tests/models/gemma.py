"""A tiny random DiffusionGemma of transformers, which is the oracle, and programs of dgraph on its tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.families.weights import weights_of
from dgraph.frontend.capture import capture_module
from dgraph.frontend.frozen import from_data, to_data
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.models.diffusion_gemma import EOS, FULL, SLIDING
from dgraph.ops.lm_head.lm_head import gumbel
from dgraph.recipes import RECIPES, build
from dgraph.runtime.sampling.random_numbers import random_ids, row_seeds, sequence_keys
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
def published(sharp: float = 1.0, mixing: float = 1.0, seed: int = 0) -> Any:
    """A model of transformers in fp32; sharp: how far apart its logits are; mixing: how much its layers add to what
    they are given. Below 1 it does not make more of rounding from step to step.
    """
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
        for name, weight in model.model.decoder.named_parameters():
            ends = ("post_attention_layernorm", "post_feedforward_layernorm", "self_conditioning.down_proj")
            if name.removesuffix(".weight").endswith(ends):
                weight.mul_(mixing)
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
    tables = {name: table for name in graph.inputs if name.startswith("page_table")}
    return {**tables, **caches}


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


@functools.cache
def _captured() -> dict[str, Any]:
    """The captured graph of every model of these sizes, whatever its weights, as plain data."""
    model = adopted(published())
    return to_data(capture_module(model.module, model.spec, model.prefix))


@functools.cache
def optimized(
    sharp: float = 6.0, mixing: float = 1.0, stops: tuple[int, ...] = (), rings: bool = True
) -> CompiledModel:
    """The dense recipe on it, op by op; stops: tokens that end a response; rings: see `CacheKV`."""
    model = adopted(published(sharp, mixing))
    model = replace(model, spec=replace(model.spec, eos_ids=stops))
    graph = from_data(_captured(), weights_of(model.module, model.prefix), model.spec)
    recipe = build(RECIPES, "dense", model.spec, {"rings": rings})
    return CompiledModel(model, graph, recipe, RegionCompiler("eager"), Buckets.of("exact"))


@dataclass
class Drawn:
    """What transformers draws while it generates for one prompt, made to be what dgraph draws.

    Attributes:
        canvases: what each of its decoder forwards was given.
        steps: forwards of each canvas.
    """

    seed: int
    start: int
    counter: int = 0
    renoises: bool = False
    canvases: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    @property
    def where(self) -> tuple[Tensor, Tensor]:
        keys = sequence_keys(self.seed, torch.tensor([0]))
        return keys, torch.arange(self.start, self.start + CANVAS)[None]

    def randint(self, *, size: tuple[int, int], **_: Any) -> Tensor:
        """New random tokens after a step, or, where none was made before, a whole canvas."""
        keys, positions = self.where
        if self.renoises:
            self.renoises = False
            found = random_ids(keys, positions, torch.tensor([self.counter]), VOCAB)
            self.counter += 1
            return found
        if self.steps:  # a canvas was encoded in a step of its own
            self.counter, self.start = self.counter + 1, self.start + CANVAS
            positions = positions + CANVAS
        self.steps.append(0)
        return random_ids(keys, positions, torch.tensor([0xFFFFFFFF]), VOCAB)

    def multinomial(self, probabilities: Tensor, num_samples: int) -> Tensor:
        keys, positions = self.where
        seeds = row_seeds(keys.expand(2, CANVAS), positions[0], torch.full((CANVAS,), self.counter))
        self.renoises = True
        self.steps[-1] += 1
        return (probabilities.log() + gumbel(seeds, VOCAB)).argmax(-1, keepdim=True)


def generated(prompt: Sequence[int], new: int, seed: int, model: Any, **settings: Any) -> tuple[list[int], Drawn]:
    """What transformers generates after a prompt, stop tokens and all, and what it drew."""
    from unittest.mock import patch

    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    drawn = Drawn(seed, len(prompt))
    options = {
        "sampler_config": EntropyBoundSamplerConfig(settings.pop("bound", 0.1)),
        "pad_token_id": None,
        **settings,
    }

    def note(module: Any, args: Any, given: Any) -> None:
        drawn.canvases.append(given["decoder_input_ids"][0].tolist())

    hook = model.model.decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with patch("torch.multinomial", drawn.multinomial), patch("torch.randint", drawn.randint):
            found = model.generate(input_ids=torch.tensor([list(prompt)]), max_new_tokens=new, **options)
    finally:
        hook.remove()
    return found.sequences[0, len(prompt) :].tolist(), drawn
