"""Checks that all ranks do the same: they compare values by name, and report the first that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dgraph.errors import RanksDiffer
from dgraph.ranks.groups import Group
from dgraph.runtime.loop.step_report import Report

SHOWN = 120
"""Characters of a value that an error shows."""


def agree(ranks: Group, where: str, facts: Mapping[str, object]) -> None:
    """Compare facts by name; every rank calls it alike. Costs nothing where there is one rank.

    Args:
        ranks: the group.
        where: the call or step that is compared, for the message ("generate", "step 12").
        facts: by name, values that their `repr` describes completely.

    Raises:
        RanksDiffer: on every rank, for the first fact that differs.
    """
    if ranks.world == 1:
        return
    every = ranks.exchange({name: _said(value) for name, value in facts.items()})
    for name in every[0]:
        said = [each.get(name, ("", "nothing")) for each in every]
        first = said[0]
        other = next((rank for rank, each in enumerate(said) if each != first), None)
        if other is not None:
            raise RanksDiffer(
                f"ranks differ in {where}: {name} is {first[1]} on rank 0 and {said[other][1]} on rank {other}. Every "
                f"rank must run the same program with the same arguments."
            )


def agree_on_step(ranks: Group, step: int, report: Report, rows: Mapping[str, int], padded: Mapping[str, int]) -> None:
    """Compare the results of a step, if the group asks for checks.

    Args:
        ranks: the group.
        step: its number.
        report: the report that the host read.
        rows, padded: rows by stage so far, and those with the padding of their buckets.

    Raises:
        RanksDiffer: see `agree`.
    """
    if ranks.checks and ranks.world > 1:
        facts: dict[str, Any] = {"rows by stage": dict(rows), "padded rows by stage": dict(padded)}
        agree(ranks, f"step {step}", {**facts, **report.named()})


def _said(value: object) -> tuple[str, str]:
    """A digest of a value, and the beginning of its text."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    short = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return hashlib.sha256(text.encode()).hexdigest(), short
