"""Traces: step-by-step records of how blocks were decoded, as a file.

    {"format": "dgraph-trace", "version": 1, "block": 32, "source": "where it is from",
     "histories": [[{"commit": [0, 1], "keep": [0, 1, 2]}, ...], ...]}

A history is one block from all masked to all decoded. `commit` lists the columns whose tokens a step commits. `keep`
lists the masked columns that were kept after the eviction, by the rows that predict them; all steps have it, or none.
Decoded columns that are forwarded once more follow from these (see `Trace.redundancy`).

In some models the forward of a block predicts the first token of the next one. That token is in the first step of the
next block. A model of that kind leaves it out, and every other one commits it there. So both take the same number of
steps per block.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dgraph.errors import InputError
from dgraph.runtime.loop.scripted_policy import (
    SPREAD,
    BlockStep,
    History,
    Script,
    check_history,
    closure,
    selections,
)

FORMAT, VERSION = "dgraph-trace", 1


@dataclass(frozen=True)
class Redundancy:
    """Rows per committed token in the layers after the eviction, of blocks that are followed by another block.

    The counts are for a model whose rows predict their own positions. If rows predict the next position, one row may
    stand both for a kept column and for a decoded one that is not cached.

    Attributes:
        dense: every row of the block in every step, and once more to commit the block.
        kept: rows that are not evicted, with decoded rows cached as "dc+" does. A block is committed by the rows that
            are not cached yet (recommit=False, as in the engine whose speed the paper reports). None without kept
            columns.
        recommitted: the same, but all rows of a block are forwarded once more to commit it (recommit=True).
    """

    dense: float
    kept: float | None
    recommitted: float | None


@dataclass(frozen=True)
class Trace:
    """Block histories, and their source."""

    block: int
    histories: tuple[History, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block < 1:
            raise InputError(f"a trace's block is a number of columns of at least 1, got {self.block!r}.")
        if not self.histories:
            raise InputError("a trace needs at least one block history, got none.")
        for number, history in enumerate(self.histories):
            check_history(history, self.block, f"history {number}")
        if len({step.kept is None for history in self.histories for step in history}) > 1:
            raise InputError("either every step of a trace says which columns are kept, or none does; got both.")

    @property
    def keeps(self) -> bool:
        """True if its steps list the kept columns."""
        return self.histories[0][0].kept is not None

    @property
    def steps(self) -> float:
        """Steps per block."""
        return sum(map(len, self.histories)) / len(self.histories)

    def script(self) -> Script:
        """The policy that commits the columns of the trace."""
        return Script(self.block, self.histories)

    def counts(self, prompt: int, start: int, masks: int) -> list[int]:
        """Tokens that each step of a block commits, as the `Script` of the trace commits them.

        Args:
            prompt: place of the prompt in its batch or load.
            start: first position of the block.
            masks: columns that are masked when it begins, the first ones of the block.
        """
        history = self.histories[(prompt * SPREAD + start // self.block) % len(self.histories)]
        found = [sum(column < masks for column in step.committed) for step in history]
        return [count for count in found if count]

    def redundancy(self) -> Redundancy:
        """Rows per token, computed from the columns alone."""
        tokens = self.block * len(self.histories)
        steps = sum(map(len, self.histories))
        dense = Fraction(steps * self.block, tokens) + 1
        if not self.keeps:
            return Redundancy(float(dense), None, None)
        counts = [kept_rows(history, self.block) for history in self.histories]
        early, late = (sum(part) for part in zip(*counts, strict=True))
        return Redundancy(float(dense), float(Fraction(early + late, tokens)), float(Fraction(early, tokens) + 1))

    def to_json(self) -> dict[str, Any]:
        """The trace as plain values, in the form of a file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "block": self.block,
            "source": self.source,
            "histories": [[_step_to_json(step) for step in history] for history in self.histories],
        }

    def write(self, path: str | Path) -> None:
        """Write a file with a history per line.

        Raises:
            InputError: the file cannot be written.
        """
        value = self.to_json()
        histories = value.pop("histories")
        head = json.dumps(value, indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = ",\n".join("  " + json.dumps(h, separators=(",", ":")) for h in histories)
        try:
            Path(path).write_text(f'{head},\n "histories": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        except OSError as error:
            raise InputError(f"the trace cannot be written to {path}: {error}.") from None


def read_trace(path: str | Path) -> Trace:
    """Read a file that `Trace.write` wrote, or one like it.

    Raises:
        InputError: the file cannot be read, is no trace, is of another version, or has histories that decode no block.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the trace {path} cannot be read: {error}.") from None
    except ValueError as error:
        raise InputError(f"the trace {path} cannot be read as JSON: {error}.") from None
    try:
        return trace_from_json(value)
    except InputError as error:
        raise InputError(f"the trace {path}: {error}") from None


def trace_from_json(value: Any) -> Trace:
    """The trace that `Trace.to_json` described.

    Raises:
        InputError: not a trace, another version, or histories that decode no block.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise InputError(f'not a trace: it has no "format": "{FORMAT}"; `dgraph bench record` writes one.')
    if value.get("version") != VERSION:
        raise InputError(f"version {value.get('version')!r}, but this dgraph reads version {VERSION}; record it again.")
    histories = value.get("histories")
    if not isinstance(histories, list) or not all(isinstance(h, list) for h in histories):
        raise InputError('no "histories": a list of lists of steps, one list per block.')
    found = tuple(
        tuple(_step_from_json(step, f"history {h}, step {s}") for s, step in enumerate(history))
        for h, history in enumerate(histories)
    )
    return Trace(value.get("block"), found, str(value.get("source", "")))  # type: ignore[arg-type]


def _step_to_json(step: BlockStep) -> dict[str, list[int]]:
    kept = {} if step.kept is None else {"keep": list(step.kept)}
    return {"commit": list(step.committed), **kept}


def _step_from_json(value: Any, where: str) -> BlockStep:
    if not isinstance(value, Mapping) or "commit" not in value:
        raise InputError(f'{where}: no "commit"; a step is {{"commit": [columns], "keep": [columns]}}.')
    for name in ("commit", "keep"):
        columns = value.get(name, [])
        if not isinstance(columns, list) or not all(type(c) is int for c in columns):
            raise InputError(f'{where}: "{name}" must be a list of columns, got {columns!r}.')
    return BlockStep(tuple(value["commit"]), tuple(value["keep"]) if "keep" in value else None)


def kept_rows(history: History, block: int) -> tuple[int, int]:
    """Rows of a block in the layers after the eviction: those of its steps, and those that then commit the block.

    A step has the masked columns that are kept, and the decoded ones that are not cached. A decoded column is cached by
    the first step in which its right neighbour is decoded, too ("dc+"). The last column has no neighbour to wait for.
    """
    decoded: set[int] = set()
    pending, rows = set(range(block)), 0
    for step, (_, kept) in zip(history, selections(history, block), strict=True):
        rows += len(kept) + len(pending & decoded)
        pending -= {c for c in decoded if c + 1 == block or c + 1 in decoded}
        decoded |= set(step.committed)
    return rows, len(pending)


# -- synthesis ---------------------------------------------------------------------------------------------------


def synthesise(
    block: int = 32, dense: float = 15.0, kept: float = 3.1, histories: int = 50, jump: float = 0.2, seed: int = 0
) -> Trace:
    """Make a trace that has exactly the given redundancies, `Redundancy.dense` and `Redundancy.kept`.

    A step commits the leftmost masked columns, each time skipping one or two of them with probability `jump`; the
    number per step varies around its mean. A step keeps the columns that it commits, and those that the selection rules
    add. Masked columns to the right of them are kept, too, one at a time at random places, until the rows add up.

    Args:
        block: columns of a block.
        dense, kept: rows per token; each times the tokens of the trace must be a whole number.
        histories: number of blocks.
        jump: probability that a committed column is not the leftmost masked one.
        seed: seed of the draws; equal arguments give equal traces.

    Raises:
        InputError: redundancies that cannot be met.
    """
    draw = random.Random(f"{block} {dense} {kept} {histories} {jump} {seed}")
    tokens = block * histories
    steps, rows = (Fraction(str(dense)) - 1) * histories, Fraction(str(kept)) * tokens
    if steps.denominator > 1 or rows.denominator > 1 or not histories <= steps <= tokens:
        raise InputError(
            f"dense={dense} and kept={kept} rows per token cannot be met by {histories} blocks of {block}. "
            f"{float(steps):g} steps and {float(rows):g} rows must be whole, and a step commits at least one column."
        )
    found = [_left_to_right(block, count, jump, draw) for count in _shares(int(steps), histories, block, draw)]
    missing = int(rows) - sum(sum(kept_rows(h, block)) for h in found)
    if missing < 0:
        raise InputError(f"kept={kept} rows per token is less than commits of this kind take; raise it by {-missing}"
                         f" / {tokens}, or lower jump={jump}.")  # fmt: skip
    failures = 0
    while missing and failures < 50 * histories:
        at = draw.randrange(histories)
        grown = _keep_one_more(found[at], block, draw)
        cost = sum(kept_rows(grown, block)) - sum(kept_rows(found[at], block))
        failures += 1
        if 0 < cost <= missing:
            found[at], missing, failures = grown, missing - cost, 0
    if missing:
        raise InputError(f"kept={kept} rows per token is more than blocks of {block} can keep; lower it.")
    source = (
        f"synthesised: dense {dense:g} and kept {kept:g} rows per token by construction, left to right, "
        f"{jump:.0%} jumps, seed {seed}"
    )
    return Trace(block, tuple(found), source)


def _shares(total: int, count: int, most: int, draw: random.Random) -> list[int]:
    """`count` numbers in 1..most that vary around their mean and sum to `total`."""
    mean = total / count
    shares = [min(most, max(1, round(draw.gauss(mean, mean / 5)))) for _ in range(count)]
    while (off := total - sum(shares)) != 0:
        at, way = draw.randrange(count), 1 if off > 0 else -1
        if 1 <= shares[at] + way <= most:
            shares[at] += way
    return shares


def _left_to_right(block: int, steps: int, jump: float, draw: random.Random) -> History:
    """A history of `steps` steps that keeps no more columns than the selection rules require."""
    cuts = sorted(draw.sample(range(1, block), steps - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, block], strict=True)]
    masked, commits = list(range(block)), []
    for count in counts:
        taken = []
        for _ in range(count):
            skip = draw.choice((1, 2)) if draw.random() < jump else 0
            taken.append(masked.pop(min(skip, len(masked) - 1)))
        commits.append(tuple(sorted(taken)))
    return _closed([BlockStep(c, c) for c in commits], block)


def _keep_one_more(history: History, block: int, draw: random.Random) -> History:
    """Keep one more column in a random step: the first masked one to the right of all kept ones."""
    at = draw.randrange(len(history))
    masked = set(range(block)).difference(*(step.committed for step in history[:at]))
    kept = set(history[at].kept or ())
    beyond = [c for c in masked if c > max(kept)]
    if not beyond:
        return history
    step = BlockStep(history[at].committed, tuple(sorted({*kept, min(beyond)})))
    return _closed([*history[:at], step, *history[at + 1 :]], block)


def _closed(history: Sequence[BlockStep], block: int) -> History:
    """The history, with every column kept that the selection rules add."""
    masked, reached, found = set(range(block)), -1, []
    for step in history:
        kept = set(step.kept or ())
        while (more := closure(kept, masked, reached)) != kept:
            kept = more
        found.append(BlockStep(step.committed, tuple(sorted(kept))))
        reached = max(reached, *kept)
        masked -= set(step.committed)
    return tuple(found)
