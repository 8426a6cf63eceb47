"""The report of a state to the host: a few numbers of each sequence, and the block that its last step was about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dgraph.ops.attention.sparse import REUSE
from dgraph.runtime.policies import Candidates
from dgraph.runtime.state.growth import moved_columns

if TYPE_CHECKING:
    from dgraph.runtime.state.base import DecodeState

REPORT = (
    *("rows", "wanted", "action", "active", "broken", "closes", "shown_start", "start", "counter"),
    *("total", "kept_rows", "commit_rows", "all_rows", "end"),
)
"""The numbers of a sequence that the host reads after a step; see `report_of`."""
SHOWN = ("shown", "shown_confidence", "shown_kept")
"""The values of each position of the step's block that follow these numbers in the report."""


def report_of(state: DecodeState) -> Tensor:
    """i64[b, len(REPORT) + 3 W]: values that the host reads of each sequence, in the order of `REPORT` and `SHOWN`.

    rows: those of its next step, 0 if it waits; wanted: the same if it does not wait; all_rows: those of all sequences,
    which the host must know first; action: as in `action`, REUSE if all keys are kept; the others as in the attributes
    and properties of `DecodeState`. A confidence is given as its bits.
    """
    wanted, action = state.wanted().sum(dim=1), state.action
    rows = wanted * state.granted
    found = {"rows": rows, "wanted": wanted, "all_rows": rows.sum().expand(len(rows))}
    found["action"] = torch.full_like(wanted, REUSE) if action is None else action
    numbers = [found[name] if name in found else getattr(state, name) for name in REPORT]
    shown = (state.shown, state.shown_confidence.view(torch.int32), state.shown_kept)
    return torch.cat([torch.stack([n.long() for n in numbers], dim=1), *(s.long() for s in shown)], dim=1)


def note_shown(
    state: DecodeState, candidates: Candidates, changed: Tensor, left: Tensor, kept: Tensor, source: Tensor | None
) -> None:
    """Note the probabilities with which a step commits tokens, before it is written.

    bool[b, W] each: changed tokens; masks that are left; positions whose rows are kept. source: `DecodeRule.move`.
    """
    # A position without a mask in the first step that shows it was given.
    column = state.columns - state.shown_start[:, None]
    there = (column >= 0) & (column < state.width)
    seen = state.shown_confidence.gather(1, column.clamp(min=0, max=state.width - 1))
    before = torch.where(there, seen, 1.0)
    found = torch.where(changed, candidates.confidence, before)
    if source is not None:
        found = moved_columns(source, found, before, 0.0)
    state.shown_confidence, state.shown_kept = torch.where(left, 0.0, found), kept
    state.shown_start = state.start
