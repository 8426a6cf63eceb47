"""Small steps of decoding, as inputs of any graph of a model, made by the declarations of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.ops import op_of
from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of
from dgraph.types.shapes import InputSpec, without_window

SEQUENCES = 2
BLOCKS = 2
"""Blocks of each sequence: one that is decoded, and one that is being decoded."""
PAGE = 4
"""Positions of a page: several pages for each sequence, in no order."""


@dataclass(frozen=True)
class SmallStep:
    """A step of a few sequences of one length.

    Attributes:
        values: by name, inputs that the decode loop computes for a step (see `dgraph.types.shapes.InputSpec`).
        whole: True if it has all rows of all sequences, as a graph without caches needs them; such a step chooses the
            keys that stay.
        open: True if each row sees all rows of its sequence.
        begins: True for the first step.
    """

    values: Mapping[str, Tensor]
    whole: bool
    open: bool
    begins: bool


def small_steps(spec: ModelSpec, device: torch.device | str = "cpu", prompts: bool = False) -> list[SmallStep]:
    """Three steps: all rows, all rows with some more tokens decoded, and the rows of the last block alone.

    Choices are those of methods at their lossless setting: no row is a draft, and no row is idle. The first two steps
    choose the keys that stay, and the last one reads them.

    Args:
        spec: the model.
        device: device of the values.
        prompts: True if all rows are those of prompts, which a model that works in two modes encodes.
    """
    length = BLOCKS * spec.block_length
    ids = _tokens(spec, length)
    later = ids.clone()
    decoded = torch.zeros_like(ids, dtype=torch.bool)
    decoded[:, -spec.block_length :: 3] = True
    fresh = _tokens(spec, length, masks=False)
    later[decoded] = fresh[decoded]
    everything, block = slice(0, length), slice(length - spec.block_length, length)
    steps = [
        _step(spec, ids, torch.ones_like(decoded), 0, everything, SELECT),
        _step(spec, later, decoded, 1, everything, SELECT),
        _step(spec, later, decoded, 2, block, REUSE),
    ]
    if prompts:
        steps = [{**values, "encoded": torch.ones_like(values["encoded"])} for values in steps]
    seen = [bool((values["limit"] == length).all()) for values in steps]
    on_device = [{name: value.to(device) for name, value in values.items()} for values in steps]
    return [SmallStep(values, n < 2, seen[n], n == 0) for n, values in enumerate(on_device)]


def _tokens(spec: ModelSpec, length: int, masks: bool = True) -> Tensor:
    """i64[sequences, length]: any tokens but the mask; in the last block, masks at most of the places."""
    draw = torch.Generator().manual_seed(int(masks))
    ids = torch.randint(spec.vocab, (SEQUENCES, length), generator=draw)
    if spec.noise == "uniform":
        return ids
    ids[ids == spec.mask_id] = (spec.mask_id + 1) % spec.vocab
    if masks:
        hidden = torch.rand(SEQUENCES, spec.block_length, generator=draw) < 0.75
        ids[:, -spec.block_length :][hidden] = spec.mask_id
    return ids


def _step(spec: ModelSpec, ids: Tensor, changed: Tensor, number: int, rows: slice, action: int) -> dict[str, Tensor]:
    """The values of a step that forwards some columns of all sequences; full, if all rows have changed."""
    length, block = ids.shape[1], spec.block_length
    positions = torch.arange(length).expand(SEQUENCES, -1)
    masked = ids == spec.mask_id if spec.noise != "uniform" else positions >= length - block
    candidate = masked.roll(-spec.logit_shift, 1)
    candidate[:, length - spec.logit_shift :] = False
    predicted = positions + spec.logit_shift
    in_block = (predicted >= length - block) & (predicted < length)
    width = len(range(length)[rows])
    pages = -(-length // PAGE)
    order = torch.randperm(SEQUENCES * pages, generator=torch.Generator().manual_seed(1)).int()
    causal = spec.attention == "block_causal" and number > 0
    limit = (positions // block + 1) * block if causal else torch.full_like(positions, length)

    def by_row(value: Tensor) -> Tensor:
        return value[:, rows].reshape(-1)

    def by_sequence(value: float, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((SEQUENCES,), value, dtype=dtype)

    count = SEQUENCES * width
    return {
        "input_ids": by_row(ids),
        "positions": by_row(positions),
        "slots": by_row(positions),
        "limit": by_row(limit).int(),
        "origin": torch.zeros(count, dtype=torch.int32),
        "masked": by_row(masked),
        "candidate": by_row(candidate),
        "in_block": by_row(in_block),
        "encoded": by_row(positions < length - block),
        "changed": by_row(changed),
        "full": torch.full((count,), bool(changed.all())),
        "added": torch.zeros(count, dtype=torch.bool),
        "gap": torch.zeros(count, 2, dtype=torch.int32),
        "drafted": torch.zeros(count, dtype=torch.bool),
        "adapt": torch.ones(count, dtype=torch.bool),
        "temperature": torch.zeros(count),
        "seed": torch.arange(count),
        "noise": torch.rand(count, generator=torch.Generator().manual_seed(2)),
        "script": torch.zeros(count),
        "cu_rows": torch.arange(0, count + 1, width, dtype=torch.int32),
        "prompt_end": by_sequence(length - block),
        "response_end": by_sequence(length),
        "block_start": by_sequence(length - block),
        "block_end": by_sequence(length),
        "step": by_sequence(number),
        "block_step": by_sequence(number),
        "average": by_sequence(1.0, torch.float32),
        "sequence_average": by_sequence(1.0, torch.float32),
        "page_table": order.view(SEQUENCES, pages),
        "window": torch.tensor([[length - block, length]] * SEQUENCES, dtype=torch.int32),
        "action": by_sequence(action),
        "pack_start": _pack_starts(spec, length),
        "key_positions": positions.reshape(-1),
        "cu_keys": torch.arange(0, SEQUENCES * length + 1, length, dtype=torch.int32),
    }


def _pack_starts(spec: ModelSpec, length: int) -> Tensor:
    """i32[layers, b]: where the packed entries of a sequence begin; there is room for all positions of all heads."""
    begins = torch.arange(SEQUENCES, dtype=torch.int32) * spec.kv_heads * length
    return begins.expand(spec.layers, -1).contiguous()


@dataclass
class State:
    """The memory of a graph from step to step: caches, and values per sequence.

    Attributes:
        kept: by the name of the input.
    """

    kept: dict[str, Tensor] = field(default_factory=dict)

    def inputs(self, graph: Graph, step: SmallStep) -> dict[str, Tensor] | None:
        """The inputs of a graph in a step; None where it cannot run that step.

        Without caches it needs all rows, and on a padded batch each row sees all. An input that no decode loop gives is
        0 in a first step, and unknown later.
        """
        found = {}
        padded = any(spec.shape[:2] == ("b", "t") for spec in graph.inputs.values())
        cached = any(spec.in_place for spec in graph.inputs.values())
        if not (step.whole or cached) or (padded and not step.open):
            return None
        for name, spec in graph.inputs.items():
            if spec.in_place or spec.carried:
                found[name] = self.kept.setdefault(name, self._initial(graph, spec, step))
            elif (value := step.values.get(name.removesuffix(f"_{spec.window}"))) is not None:
                found[name] = value.view(SEQUENCES, -1) if spec.shape[:2] == ("b", "t") else value
            elif not step.begins:
                return None
            else:
                found[name] = self._initial(graph, spec, step)
        return found

    def take(self, graph: Graph, outputs: Mapping[str, Tensor]) -> None:
        """Keep what goes to the next step: caches are written in place, other states are outputs."""
        self.kept |= {name: outputs[name] for name, spec in graph.inputs.items() if spec.carried and name in outputs}

    def _initial(self, graph: Graph, spec: InputSpec, step: SmallStep) -> Tensor:
        rows, pages = len(step.values["positions"]), step.values["page_table"].numel()
        sizes = {
            "N": rows,
            "b": SEQUENCES,
            "t": rows // SEQUENCES,
            "pages": pages,
            "page": PAGE,
            "entries": pages * PAGE * graph.spec.kv_heads,
            "sequences": SEQUENCES,
        }
        shape = [size if isinstance(size, int) else sizes[without_window(size)] for size in spec.shape]
        return spec.empty(shape, graph.device).fill_(spec.initial)


def reads_choice(graph: Graph) -> bool:
    """Say whether a graph reads packed keys that another program chooses and writes."""
    packed = {graph.input(name) for name, spec in graph.inputs.items() if spec.per == "packed"}
    written = {node for call in graph.calls if (op := op_of(call.target)) for node in op.written(args_of(call))}
    return bool(packed) and not packed & written
