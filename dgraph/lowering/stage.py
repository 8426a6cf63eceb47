"""A stage as steps over slots, and the runners that run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from dgraph.lowering.steps import AnyStep, Slots, Step
from dgraph.ops.per_stage import one_stage
from dgraph.ops.tuning import Choices


@dataclass(frozen=True)
class LoweredStage:
    """A stage as a runner takes it.

    Attributes:
        name: of the stage.
        bridge: steps at its head that gather the rows that live on, from values over the rows of an earlier stage.
        steps: the others. All sizes that they make, and those that the bridge makes, depend on the stage's bucket only.
        inputs: slots that bridge or steps read and neither writes, weights left out, ascending.
        rowed: inputs of the program with a value for each row, all of them, for the first stage; none for the others.
            They are whole when a runner is called, and cut to the rows of the bucket when the stage has run.
        in_place: those of `inputs` that are written in place, or read from where such writes go (KV caches).
        sources: those of `inputs` that are only gathered from. Rows that no index names may hold anything there, and
            there may be any number of them.
        index: the slot, among `inputs`, of the numbers of the rows that lived on at the cut before it; None for the
            first stage. It has room for every row of the stage before.
        ahead: inputs of the program that only later stages read; none but for the first stage. A runner that keeps
            copies of its inputs keeps some of these too, so that nothing is left to copy after a cut.
        outputs: slots that bridge or steps write and that something outside reads, ascending.
        live: the slot, among `outputs`, of the offsets per sequence of the rows that live on after it, of which the
            last is their number; None for the last stage.
        graph_rows: rows up to which a runner may record it as a CUDA graph; None for any number.
        choices: tilings that its launches take; None for the kernels' own.
    """

    name: str
    bridge: tuple[Step, ...]
    steps: tuple[AnyStep, ...]
    inputs: tuple[int, ...]
    rowed: frozenset[int]
    in_place: frozenset[int]
    sources: frozenset[int]
    index: int | None
    ahead: tuple[int, ...]
    outputs: tuple[int, ...]
    live: int | None
    graph_rows: int | None
    choices: Choices | None = None

    @property
    def last(self) -> bool:
        """True if no stage runs after this one."""
        return self.live is None

    def tuned(self) -> AbstractContextManager[None]:
        """Context to enter while the stage's steps run."""
        return nullcontext() if self.choices is None else self.choices.in_use()


Living = Callable[[], int]
"""Wait for the device, and give the number of rows that live on after a stage; not called after the last stage."""
Launch = Callable[[int], Living]
"""Run a stage, given its bucket, to which it cuts the slot `index`."""


class Runner(Protocol):
    """Run one stage, reading and writing slots.

    It is called before the host reads the row count of the stage. So work that does not depend on the count is done
    while the device still runs the stage before.
    """

    def __call__(self, slots: Slots) -> Launch: ...


def cut_rows(slots: Slots, rowed: Iterable[int], rows: int) -> None:
    """Cut each of these slots to its first `rows` rows, or pad it with zeros to `rows` rows."""
    for slot in rowed:
        value = slots[slot]
        if len(value) < rows:
            slots[slot] = torch.cat([value, value.new_zeros(rows - len(value), *value.shape[1:])])
        elif len(value) > rows:
            slots[slot] = value[:rows]


def live_rows(slots: Slots, stage: LoweredStage) -> int:
    """Number of rows that live on after a stage that is not the last; reading it waits for the device."""
    return int(slots[stage.live][-1]) if stage.live is not None else 0


def run_steps(stage: LoweredStage) -> Runner:
    """The plain runner: one step after the other."""

    def ready(slots: Slots) -> Launch:
        def run(rows: int) -> Living:
            cut_rows(slots, stage.rowed if stage.index is None else (stage.index,), rows)
            with one_stage(), stage.tuned():
                for step in (*stage.bridge, *stage.steps):
                    step.run(slots)
            return partial(live_rows, slots, stage)

        return run

    return ready


@dataclass(frozen=True)
class Cut:
    """Point between two stages where the host reads how many rows live on.

    Attributes:
        step: lists them; the last step of the stage before it.
        index: slot of their numbers, with room for every row of that stage.
        offsets: slot of their offsets per sequence, of which the last is their number.
    """

    step: Step
    index: int
    offsets: int
