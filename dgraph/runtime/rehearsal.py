"""Forwards of nobody's rows: what records CUDA graphs ahead, so that no request waits for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dgraph.lowering.program import Program
from dgraph.runtime.batch import Batch
from dgraph.runtime.offers import Moment, computed, initial_states
from dgraph.runtime.requests import step_rows
from dgraph.runtime.rows import idle_rows, key_sizes

KEY_SIZES = 3
"""So many numbers of rows of keys are recorded ahead at most, the smallest ones. Of a model with 8 KV heads of 128, a
step gathers 1 GiB of keys and values for the third of them, and 4 GiB for the fourth, which graphs would hold for good.
"""


@dataclass(frozen=True)
class Rehearsal:
    """A forward of a program on so many rows. keys: rows of keys of a step in which sequences see everything."""

    program: Program
    rows: int
    keys: int | None = None

    def run(self, batch: Batch) -> Mapping[str, Tensor]:
        """Run it on idle rows of a batch in which nothing runs; what it gives."""
        shape, state, device = batch.shape, batch.advance.state, batch.kv.device
        idle = replace(state, active=torch.zeros_like(state.active))
        rows = idle_rows(self.rows, shape.slots, shape.block, device)
        given = computed(self.program.inputs, Moment(rows, idle, batch.rule, self.keys))
        states = initial_states(batch.rule.inputs, shape.slots, device)
        return self.program({**batch.caches(), **states, **given}, self.rows).outputs


def rehearsals(batch: Batch, sequences: int, tokens: int, graphs: int, steps: bool = True) -> list[Rehearsal]:
    """What records the graphs of at most so many sequences of so many positions each: of steps, of prompts, and then of
    steps in which sequences choose what they keep, for each number of rows of keys that they may have.

    Args:
        graphs: recorded in all, at most; what is left out are steps in which sequences choose.
        steps: False: of prompts alone.
    """
    programs, most = batch.programs, (sequences, tokens)
    found = [*(_steps_of(batch, programs.step, *most) if steps else ()), *_prompts_of(batch, *most)]
    select, left = programs.select, graphs - sum(len(one.program.stage_names) for one in found)
    if select is None or not steps:
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
    most, whole = sequences * step_rows(shape.block, batch.spec), sequences * tokens
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
    """A number of rows for each bucket that those from `least` to `most` fall into, if it is recorded. The largest is
    the first: the buffers that it gets serve the others.
    """
    limit = program.graph_rows
    sizes = [size for size in program.bucket_sizes(most) if size >= least and (limit is None or size <= limit)]
    return [min(size, most) for size in reversed(sizes)]


def _key_sizes(batch: Batch, rows: int, tokens: int) -> list[int]:
    """How many rows of keys a step of so many rows may have, ascending: those of as many sequences as these are blocks,
    which see all of their positions, or, where they forward all that they see, these rows and a block each.
    """
    slots, block = batch.shape.slots, batch.shape.block
    sizes = key_sizes(min(slots, -(-rows // block)) * ((tokens if batch.causal else block) + block))
    return sorted({min(size, slots * batch.shape.columns) for size in sizes})
