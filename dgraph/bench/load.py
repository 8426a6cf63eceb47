"""The workload of a measurement: a model, its prompts, and the rule that commits tokens."""

from __future__ import annotations

import importlib
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from dgraph.bench.traces import Trace
from dgraph.errors import InputError
from dgraph.families import Model
from dgraph.families import load as load_model
from dgraph.runtime.decoding import Decoding
from dgraph.settings import DtypeLike


@dataclass(frozen=True)
class Load:
    """One workload, the same for every arm.

    Attributes:
        prompts: ids per prompt.
        decoding: new tokens per prompt, and the rule that commits them (steps per block, a confidence threshold, or the
            policy of a trace).
        trace: the trace of that policy; None without one.
    """

    prompts: list[list[int]]
    decoding: Decoding
    trace: Trace | None = None

    @property
    def tokens(self) -> int:
        """New tokens per prompt."""
        return self.decoding.max_new_tokens

    @property
    def positions(self) -> int:
        """Positions of the KV cache, over all sequences."""
        return sum(len(p) + self.tokens for p in self.prompts)


def prompts_of(model: Model, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Prompts of random ids below 10,000, without the model's special ones. lengths: tokens of each."""
    special = {model.spec.mask_id, model.spec.pad_id, *model.spec.eos_ids}
    draw = random.Random(f"prompts {seed}")
    ids = [i for i in range(min(model.spec.vocab, 10_000)) if i not in special]
    return [draw.choices(ids, k=length) for length in lengths]


def shape_of(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    layers: int | None = None,
    block: int | None = None,
    opened: bool = False,
) -> Model:
    """A published shape with random weights; see `dgraph.load` for `opened`.

    Raises:
        UnknownName: no such shape.
    """
    # Imported by name and not as a family: these shapes are dgraph's own, and serve measurements alone.
    shapes = importlib.import_module("dgraph.models.shapes")
    changes: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    if block is not None:
        changes["block_length"] = block
    return shapes.random_model(name, device, dtype, opened=opened, **changes)


def named(
    name: str,
    device: torch.device,
    dtype: DtypeLike,
    *,
    random_weights: bool,
    block: int | None,
    opened: bool = False,
    **facts: Any,
) -> Model:
    """Load an embedded model or a checkpoint folder, with its own weights or with random ones.

    `opened` and facts are those of `dgraph.load`; random weights are never opened, but made whole.

    Raises:
        InputError: random weights for a model whose weights come quantised.
        UnknownName, CheckpointError: as `dgraph.load`.
    """
    model = load_model(name, dtype, device, opened=opened and not random_weights, **facts)
    if random_weights and model.weights is not None:
        raise InputError(
            f"the weights of {name} come quantised, so none are made at random; leave --random-weights out."
        )
    if random_weights:
        generator = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.02, generator=generator)
                else:
                    parameter.fill_(1.0)
    return model if block is None else replace(model, spec=replace(model.spec, block_length=block))


def endless(model: Model) -> Model:
    """The same model without stop tokens, so that every arm decodes the same number of tokens."""
    return replace(model, spec=replace(model.spec, eos_ids=()))
