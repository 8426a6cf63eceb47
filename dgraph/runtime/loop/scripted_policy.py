"""A decode policy that follows a script: the columns of a block that each step commits, and those that it keeps.

It separates the cost of a method from the answers of a model. Two programs under one script decode the same number of
tokens in every step, whatever their weights are. So their times can be compared on random weights, with the commits
(and the rows kept after an eviction) of a trained model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.policies import Candidates, Traits
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.packed_rows import StepRows

Columns = tuple[int, ...]

NO_KEPT = "this script does not say which columns are kept; record it under a recipe that evicts."

SPREAD = 2654435761
"""Distance between the histories of neighbouring prompts: 2^32 over the golden ratio, prime."""


@dataclass(frozen=True)
class BlockStep:
    """One step of a block.

    Attributes:
        committed: columns whose tokens it commits.
        kept: masked columns kept after the eviction, the committed ones among them; None without an eviction.
    """

    committed: Columns
    kept: Columns | None = None


History = tuple[BlockStep, ...]
"""The steps of one block, from all masked to none."""


@dataclass(frozen=True)
class Script:
    """Policy that commits columns by a list of block histories.

    A block follows history (prompt * SPREAD + start // B) modulo the number of histories. So consecutive blocks of a
    prompt follow consecutive histories, and prompts start far apart. It depends on nothing that a program computes.

    A step follows the first of the history's steps whose tokens are not all decoded yet, known from how many the block
    has decoded. Columns that a block begins with are left out, and so are steps that commit nothing else. They are the
    prompt's remainder, or the token that the forward of the block before predicts. So every step commits as many tokens
    as the script says, in every program. Columns that cannot be committed (evicted) are replaced by the most confident
    that can. If fewer can be committed than the script says, a step commits all of them (at least one), and the next
    goes on from there.

    Tensors stay on the device and nothing is read back. They are made on a device's first use: a CUDA graph must be
    captured after a first call.

    Attributes:
        block: columns of a block, B.
        histories: at least one; each commits every column once.
    """

    block: int
    histories: tuple[History, ...]
    traits: ClassVar[Traits] = Traits(overrules=True)
    _tables: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.histories:
            raise InputError("a script needs at least one block history, got none.")
        for number, history in enumerate(self.histories):
            check_history(history, self.block, f"history {number}")

    @property
    def keeps(self) -> bool:
        """True if every step says which columns are kept."""
        return all(step.kept is not None for history in self.histories for step in history)

    def choose(self, candidates: Candidates) -> Tensor:
        """bool[b, B]; see `Policy`."""
        due, count = self._due(candidates.masked, candidates.decoded, candidates.start, candidates.prompt)
        committable = candidates.committable
        key = torch.where(committable, candidates.confidence + 2 * due, -math.inf)  # a confidence is at most 1
        order = key.argsort(dim=1, descending=True, stable=True)
        columns = torch.arange(self.block, device=key.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, columns)
        return (rank < count[:, None]) & committable

    def scores(self, rows: StepRows, state: DecodeState) -> Tensor:
        """f32[N]: score by which rows are selected: 1.0 for rows to keep, 0.0 for other candidates, else -1.0 (no say).

        Together with `budget`, and `select_tokens` at alpha = 1, exactly the kept columns are kept. The columns that
        score 1 are the kept ones without those that the selection adds by itself (left neighbours, placeholders). If
        rows predict the next position, those that hold a token are kept beside them.
        """
        base = self._base(state)
        column = rows.column - self.block
        kept = base[rows.sequence, column.clamp(min=0, max=self.block - 1)].float()
        return torch.where(rows.candidate, kept, -1.0)

    def budget(self, state: DecodeState) -> Tensor:
        """f32[b]: number of rows that score 1, in the place of the average number of tokens per step."""
        return self._base(state).sum(dim=1).float()

    def _base(self, state: DecodeState) -> Tensor:
        """bool[b, B]: rows that score 1 in the coming step."""
        if not self.keeps:
            raise InputError(NO_KEPT)
        when, base = self._on(state.block_masked.device)
        history = self._history(state.start, state.prompt, len(when))
        due, _ = self._due(state.block_masked, state.decoded, state.start, state.prompt)
        step = torch.where(due, when[history], -1).amax(dim=1).clamp(min=0)
        chosen = base[history, step] & state.block_masked
        # A program that went another way than the script may have nothing left of it in this step.
        return torch.where(chosen.any(dim=1, keepdim=True), chosen, due)

    def _due(self, masked: Tensor, decoded: Tensor, start: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """bool[b, B] masked columns that the script has committed by the end of this step; i64[b] how many tokens the
        step commits.
        """
        table, _ = self._on(masked.device)
        when = table[self._history(start, prompt, len(table))]
        # The block began with its known columns, before all that are masked now or were decoded since.
        first = self.block - masked.sum(dim=1) - decoded
        columns = torch.arange(self.block, device=masked.device)
        scheduled = columns >= first[:, None]
        earlier = (when[:, None, :] <= when[:, :, None]) & scheduled[:, None, :]
        reach = earlier.sum(dim=2)  # tokens decoded when the step that commits this column is over
        ahead = scheduled & (reach > decoded[:, None])
        target = torch.where(ahead, reach, self.block).amin(dim=1)
        return masked & (reach <= target[:, None]), (target - decoded).clamp(min=1)

    def _history(self, start: Tensor, prompt: Tensor, count: int) -> Tensor:
        return (prompt * SPREAD + start // self.block) % count

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """i64[H, B] the step of each column; bool[H, S, B] the columns that score 1 (all False without kept ones)."""
        if device not in self._tables:
            longest = max(map(len, self.histories))
            when = torch.zeros(len(self.histories), self.block, dtype=torch.int64)
            base = torch.zeros(len(self.histories), longest, self.block, dtype=torch.bool)
            for h, history in enumerate(self.histories):
                for s, step in enumerate(history):
                    when[h, list(step.committed)] = s
                if self.keeps:
                    for s, (scored, _) in enumerate(selections(history, self.block)):
                        base[h, s, sorted(scored)] = True
            self._tables[device] = when.to(device), base.to(device)
        return self._tables[device]


def check_script(policy: object, block: int, scripted: bool) -> None:
    """Check that a policy gives a program the script that it reads, and fits blocks of that length.

    scripted: the step program reads the input `script` (select="scripted").

    Raises:
        InputError: a program without its script, a script that does not say what is kept, or one of another block.
    """
    if isinstance(policy, Script):
        if policy.block != block:
            raise InputError(f"the script is for blocks of {policy.block} columns, but block_length={block}.")
        if scripted and not policy.keeps:
            raise InputError(NO_KEPT)
    elif scripted:
        raise InputError(
            f"this program keeps the rows that a script names (select='scripted'); decode it with a `Script` as "
            f"policy, got {type(policy).__name__}."
        )


def check_history(history: Sequence[BlockStep], block: int, name: str) -> None:
    """Check that a history decodes a block.

    Raises:
        InputError: a column outside the block, committed twice or never, or kept though it is not masked.
    """
    masked = set(range(block))
    for number, step in enumerate(history):
        where = f"{name}, step {number}"
        if not step.committed:
            raise InputError(f"{where} commits nothing; every step commits at least one column.")
        for what, columns in (("commits", step.committed), ("keeps", step.kept or ())):
            if len(set(columns)) < len(columns):
                raise InputError(f"{where} {what} a column twice: {list(columns)}.")
            if wrong := [c for c in columns if c not in masked]:
                raise InputError(
                    f"{where} {what} column {wrong[0]}, which is not masked then; a block has the columns "
                    f"0..{block - 1}, and each is committed once."
                )
        if step.kept is not None and (missing := sorted(set(step.committed) - set(step.kept))):
            raise InputError(f"{where} commits column {missing[0]} without keeping it.")
        masked -= set(step.committed)
    if masked:
        raise InputError(f"{name} never commits column {min(masked)}; a history decodes its whole block of {block}.")


def selections(history: Sequence[BlockStep], block: int) -> list[tuple[set[int], set[int]]]:
    """Per step, the columns that must be selected, and the masked columns that are kept then.

    The kept columns are the closure of `step.kept` under the rules of `select_tokens`. Columns kept by FOCUS are closed
    already, so for them it is `step.kept` itself.
    """
    masked, reached, found = set(range(block)), -1, []
    for step in history:
        wanted = set(step.kept if step.kept is not None else masked)
        # A kept column whose masked left neighbour is not kept was added as a neighbour: a selected one brings its own.
        scored = {c for c in wanted if c - 1 not in masked or c - 1 in wanted}
        if closure(scored, masked, reached) != wanted:
            scored = wanted
        kept = closure(scored, masked, reached)
        found.append((scored, kept))
        reached = max(reached, *kept)
        masked -= set(step.committed)
    return found


def closure(scored: Iterable[int], masked: set[int], reached: int) -> set[int]:
    """Masked columns that `select_tokens` keeps if its base selection is `scored`.

    reached: the rightmost column kept so far in the block, -1 before its first step.
    """
    base = set(scored)
    kept = base | {c - 1 for c in base if c - 1 in masked}
    right = max(kept, default=-1)
    return kept | {c for c in masked if reached < c < right}
