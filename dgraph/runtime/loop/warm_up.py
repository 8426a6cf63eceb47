"""Dummy forwards that record CUDA graphs before the first request, so that no request waits for a recording."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgraph.lowering.program import Program
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.loop.step_inputs import StepContext, computed, initial_states
from dgraph.runtime.requests import step_rows
from dgraph.runtime.state.packed_rows import idle_rows, key_sizes

KEY_SIZES = 3
"""Sizes of key rows that are recorded ahead at most, the smallest ones.

With 8 KV heads of 128, a step gathers 1 GiB of keys and values for the third size. The fourth would take 4 GiB, which
graphs would hold permanently.
"""


@dataclass(frozen=True)
class Rehearsal:
    """A dummy forward of a program on `rows` rows.

    keys: rows of keys of a step in which sequences see everything; None for other steps.
    """

    program: Program
    rows: int
    keys: int | None = None

    def run(self, batch: Batch) -> Mapping[str, Tensor]:
        """Run it on idle rows of a batch in which no step runs, and return its outputs."""
        shape, state, device = batch.shape, batch.transition.state, batch.kv.device
        idle = replace(state, active=torch.zeros_like(state.active))
        rows = idle_rows(self.rows, shape.slots, shape.block, device)
        given = computed(self.program.inputs, StepContext(rows, idle, batch.config, self.keys))
        states = initial_states(batch.config.inputs, shape.slots, device)
        return self.program({**batch.caches(), **states, **given}, self.rows).outputs


def rehearsals(batch: Batch, sequences: int, tokens: int, graphs: int) -> list[Rehearsal]:
    """Forwards that record the graphs of at most `sequences` sequences of `tokens` positions each.

    They are steps, then prompts, and then steps in which sequences choose the keys that they keep. The last kind is
    recorded for each size of key rows that such a step may have, see `KEY_SIZES`.

    Args:
        batch: an idle batch of the shape to record.
        sequences: sequences at most.
        tokens: positions of each, at most.
        graphs: number of graphs in all, at most; steps in which sequences choose are left out beyond it.
    """
    programs, most = batch.programs, (sequences, tokens)
    found = [*_steps_of(batch, programs.step, *most), *_prompts_of(batch, *most)]
    select, left = programs.select, graphs - sum(len(one.program.stage_names) for one in found)
    if select is None:
        return found
    keys = {one.rows: _key_sizes(batch, one.rows, tokens) for one in _steps_of(batch, select, *most)}
    choices = [
        Rehearsal(select, rows, sizes[nth])
        for nth in range(KEY_SIZES)
        for rows, sizes in keys.items()
        if nth < len(sizes)
    ]
    return [*found, *choices[: max(0, left) // len(select.stage_names)]]


def _steps_of(batch: Batch, program: Program, sequences: int, tokens: int) -> list[Rehearsal]:
    shape = batch.shape
    adds = batch.plan is not None and batch.plan.added is not None
    most, whole = sequences * step_rows(shape.width, batch.spec), sequences * (tokens + adds * shape.block)
    if shape.most_rows is not None:  # a step of a bidirectional model forwards whole sequences
        most = min(most + shape.mixed if batch.causal else whole, whole, shape.most_rows)
    return [Rehearsal(program, rows) for rows in _recorded(program, 1, most)]


def _prompts_of(batch: Batch, sequences: int, tokens: int) -> list[Rehearsal]:
    shape, prefill = batch.shape, batch.programs.prefill
    if prefill is None:
        return []
    least, most = shape.block if batch.spec.aligned else 1, sequences * tokens
    return [Rehearsal(prefill, rows) for rows in _recorded(prefill, least, min(most, shape.most_rows or most))]


def _recorded(program: Program, least: int, most: int) -> list[int]:
    """A row count for each recorded bucket into which the counts from `least` to `most` fall.

    The largest comes first: its buffers serve the others.
    """
    limit = program.graph_rows
    sizes = [size for size in program.bucket_sizes(most) if size >= least and (limit is None or size <= limit)]
    return [min(size, most) for size in reversed(sizes)]


def _key_sizes(batch: Batch, rows: int, tokens: int) -> list[int]:
    """Sizes of key rows that a step of `rows` rows may have, ascending.

    The step has as many sequences as `rows` has blocks, at most one per slot. A sequence of a block-causal model sees
    all of its positions and a block more. Sequences of a bidirectional model forward all that they see: together these
    rows, and a block each.
    """
    slots, block = batch.shape.slots, batch.shape.block
    count = min(slots, -(-rows // block))
    sizes = key_sizes((count * tokens if batch.causal else rows) + count * block)
    return sorted({min(size, slots * batch.shape.columns) for size in sizes})
