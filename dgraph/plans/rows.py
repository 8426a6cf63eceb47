"""Plans of the rows that the steps of a bidirectional model forward.

In a bidirectional model every row sees the whole canvas, so every decoded token changes every key. A method that does
not forward all rows in all steps reads keys and values as they were last written. Published caches of this kind differ
only in the rows that they forward, and in how often they forward all of them.

In a block-causal model the keys of earlier blocks are final, and a step forwards the current block. There a plan only
says which steps of a block are full: its region is `Block()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.plans.parts import Part, part_from_json
from dgraph.plans.regions import REGIONS, All, Block, Region, rows_of, seen_of
from dgraph.plans.schedules import SCHEDULES, Counted, Schedule
from dgraph.plans.view import FIRST, LATER_BLOCK, View, ahead
from dgraph.plugins import Table, check_class

GROUP = "dgraph.parts"
PARTS: Mapping[str, type[Part]] = Table({**REGIONS, **SCHEDULES}, GROUP, check_class(Part))
"""Every region and schedule by name, those of other packages included."""
EVERY_ROW, ONE_FULL_STEP = All(), Counted()
"""Defaults of a plan: every row in each step, and one full step per block."""
FIRSTS = ("policy", "position")
MANY_STEPS = 4096
"""More than a block takes."""


@dataclass(frozen=True)
class RowPlan:
    """Rows of a step: all of the canvas in a whole step, a region of it in the others.

    In a full step a program recomputes everything it has; in the others it may skip rows that have hardly changed
    (DyLLM).

    The block cache decides if decoded rows of the region are forwarded again (see `Recipe.block_cache`).

    A plan may add rows to those of a sequence, one for a position. Such a row stands for the row that predicts the
    position, in a canvas that holds a mask there. It sees itself and all rows of the sequence, but not the one at the
    position and not the one that it stands for. No other row sees it, and no cache keeps its key. Its prediction
    reaches a decoding rule as `Candidates.added`. The programs must know of such rows (the pass `AddRows`).

    Attributes:
        region: the rows of a step that is not whole.
        schedule: the steps that are full, and those that are whole.
        first: tokens that the first step of a block commits: "policy" (the policy's choice) or "position" (the block's
            first position alone, whatever its confidence).
        added: the positions of the current block for which a step also has an added row; others that it names count
            for nothing. None: no row is added.
    """

    region: Region = EVERY_ROW
    schedule: Schedule = ONE_FULL_STEP
    first: str = "policy"
    added: Region | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (("region", self.region, Region), ("schedule", self.schedule, Schedule)):
            if not isinstance(value, kind):
                raise InputError(
                    f"{name} must be a dgraph.plans.{name}s.{kind.__name__}, such as "
                    f"{'Block()' if kind is Region else 'Counted(every=4)'}, got {value!r}."
                )
        if self.added is not None and (not isinstance(self.added, Region) or self.added.foresees or self.added.hides):
            raise InputError(
                f"added must be a dgraph.plans.regions.Region that hides no row and asks for no coming one, such as "
                f"Decoded(), or None, got {self.added!r}."
            )
        if self.first not in FIRSTS:
            raise UnknownName("first commit of a block", str(self.first), FIRSTS)
        if self.region.foresees and self.first != "policy":
            raise InputError(
                f"{self.region} is the rows that the policy decodes from, but first={self.first!r} commits another one "
                f"in the first step of a block; leave it at 'policy'."
            )
        for what, found in (("full", ahead(self.schedule.full, FIRST)), ("whole", ahead(self.schedule.whole, FIRST))):
            if found is not None and not bool(found):
                raise InputError(f"the first step of a response must be a {what} one; under {self} it is not.")

    def __repr__(self) -> str:
        names = [f.name for f in fields(self) if f.name != "added" or self.added is not None]
        return f"RowPlan({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def fits_blocks(self) -> bool:
        """True if a block-causal model can follow it.

        Such a plan forwards the current block, and declares the full steps, the first of every block among them.
        """
        schedule, full = self.schedule, ahead(self.schedule.full, LATER_BLOCK)
        if (
            (self.region, self.first, self.added) != (Block(), "policy", None)
            or full is None
            or not bool(full)
            or schedule.always(FIRST) is not None
        ):
            return False
        # No step forwards every row without being a full one.
        count = torch.arange(MANY_STEPS)
        steps = View(**{**vars(FIRST), "step": count, "block_step": torch.ones_like(count), "decoded": count})
        whole, full = ahead(schedule.whole, steps), ahead(schedule.full, steps)
        return whole is None or full is None or not bool((whole & ~full).any())

    @property
    def notes(self) -> bool:
        """True if the decode loop keeps which step decoded each position, and with which entropy; see `View`."""
        return self.region.notes or self.schedule.notes

    @classmethod
    def from_json(cls, value: Mapping[str, Any], known: Mapping[str, type[Part]] = PARTS) -> RowPlan:
        """The plan that `to_json` described.

        Args:
            value: plain values as `to_json` gives them.
            known: regions and schedules by name; add those that no installed package brings.

        Raises:
            UnknownName: a region or a schedule that is not known, or a field that it does not have.
            InputError: a value out of range, or of another version.
        """
        names = [f.name for f in fields(cls)]
        for name in value:
            if name not in names:
                raise UnknownName("field of a row plan", name, names)
        names = [name for name in ("region", "schedule", "added") if name in value]
        parts = {name: part_from_json(value[name], name, known) for name in names}
        return cls(**{**value, **parts})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        added = {} if self.added is None else {"added": self.added.to_json()}
        return {"region": self.region.to_json(), "schedule": self.schedule.to_json(), "first": self.first, **added}


class RowCounts:
    """Row counts of sequences that the host knows before their steps, without reading anything.

    Args:
        plan: the rows that a step forwards.
        slots: the most sequences.
        shift: the model's logit shift.
    """

    def __init__(self, plan: RowPlan, slots: int, shift: int):
        self._plan, self._shift = plan, shift
        self._step = torch.zeros(slots, dtype=torch.int64)
        self._bounds = torch.zeros(slots, 2, dtype=torch.int64)
        self._everything = torch.zeros(slots, dtype=torch.int64)
        self._region = torch.zeros(slots, dtype=torch.int64)
        self._known = True

    def set(self, slots: Sequence[int], prompts: Sequence[int], new: Sequence[int]) -> None:
        """Sequences that begin: tokens of each prompt, and how many are to be decoded."""
        prompt_end = torch.tensor(prompts, dtype=torch.int64)
        end = prompt_end + torch.tensor(new, dtype=torch.int64)
        positions = torch.arange(int(end.max()))
        view = View(positions=positions, prompt_end=prompt_end, end=end, shift=self._shift)
        region, at = self._plan.region, list(slots)
        seen = ahead(partial(seen_of, region), view) if region.hides else view.inside
        rows = ahead(partial(rows_of, region), view)
        self._known = seen is not None and rows is not None and self._plan.added is None
        self._bounds[at] = torch.stack([prompt_end, end], dim=1)
        self._step[at] = 0
        if seen is not None and rows is not None:
            self._everything[at] = seen.sum(dim=1)
            self._region[at] = (seen & rows).sum(dim=1)

    def advance(self, slots: Sequence[int]) -> None:
        """Note that these took a step."""
        self._step[list(slots)] += 1

    def of(self, slots: Sequence[int]) -> Tensor | None:
        """i64[n]: rows that each of these forwards in its next step, if it goes on till then; None if only the device
        knows. Rows that a block cache skips are counted, too.
        """
        at = list(slots)
        everything, region = self._everything[at], self._region[at]
        if not self._known:
            return None
        if torch.equal(everything, region):
            return everything
        whole = self.whole(at)
        return None if whole is None else torch.where(whole, everything, region)

    def whole(self, slots: Sequence[int]) -> Tensor | None:
        """bool[n]: True for sequences that forward every row in their next step; None if only the device knows."""
        prompt_end, end = self._bounds[list(slots)].unbind(1)
        view = View(prompt_end=prompt_end, end=end, shift=self._shift, step=self._step[list(slots)])
        return ahead(self._plan.schedule.whole, view)
