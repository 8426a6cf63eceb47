"""Counts and times of a generation, and a record per step for an observer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.packed_rows import RowResults, StepRows
from dgraph.types.card import Card, Described, counted


@dataclass
class StageCounts:
    """Counts of a batch that never ends, as large after many steps as after one.

    Attributes:
        steps: forward passes of the decode loop.
        rows, padded, seconds: by stage, as in `GenerationStats`.
    """

    steps: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def count_stage(self, name: str, rows: int, padded: int, seconds: float) -> None:
        """Add one run of a stage."""
        self.rows[name] = self.rows.get(name, 0) + rows
        self.padded[name] = self.padded.get(name, 0) + padded
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def count_salient(self, counts: Tensor) -> None:
        """Ignore the salient rows of one step: these counts do not hold them."""


@dataclass(repr=False)
class GenerationStats(Described):
    """Counts and times of one `generate`, prompts beyond max_batch included.

    Attributes:
        steps: forward passes of the decode loop (one serves the whole batch).
        tokens: tokens delivered: up to a stop token and max_new_tokens.
        decoded: tokens committed, delivered or not.
        rows: live rows by stage: "prefill" and the stages of the step program.
        padded: rows that these stages ran on, padding of the buckets included.
        commit_rows: rows of the first step stage that were forwarded to commit a decoded block.
        seconds: by stage as its program observed them on the host, and "decode loop": everything else. On a GPU a
            stage that the host does not wait for counts its launch only, and the wait is in "decode loop".
        total: seconds of the whole call.
        salient: salient rows per step of the decode loop and per layer. The layers are those that have a gate (DyLLM,
            figure 5 and table 4) or run on some of their rows (dLLM-Cache). A full step counts all rows; empty without
            such layers.
        stage_rows: live rows of every run of a stage, in order, by stage.
        sequence_steps: steps of each prompt, in the order of the prompts.
        sequence_decoded: tokens committed of each.
        sequence_rows: rows of each that went through the last layers, counted on the device.
    """

    steps: int = 0
    tokens: int = 0
    decoded: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)
    commit_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    salient: list[list[int]] = field(default_factory=list)
    stage_rows: dict[str, list[int]] = field(default_factory=dict)
    sequence_steps: list[int] = field(default_factory=list)
    sequence_decoded: list[int] = field(default_factory=list)
    sequence_rows: list[int] = field(default_factory=list)
    unread_salient: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def kept_rows(self) -> int:
        """Rows that went through the last layers."""
        return sum(self.sequence_rows)

    @property
    def step_rows(self) -> list[int]:
        """Rows that each step of the decode loop forwarded; an upper bound for steps whose count was not read."""
        return next((list(rows) for name, rows in self.stage_rows.items() if name != "prefill"), [])

    @property
    def rows_per_token(self) -> float:
        """Rows through the last layers per decoded token (FOCUS Table 5: through the layers after eviction)."""
        return self.kept_rows / self.decoded if self.decoded else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence decodes per step, on average over all steps of all sequences."""
        steps = sum(self.sequence_steps)
        return self.decoded / steps if steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Delivered tokens per second of the whole call."""
        return self.tokens / self.total if self.total else 0.0

    def card(self) -> Card:
        """See `Described`."""
        facts = (
            ("tokens", f"{self.tokens:,} ({self.decoded:,} decoded) in {counted(self.steps, 'step')}"),
            ("each step", f"{self.tokens_per_step:.2f} tokens of a sequence"),
            ("each token", f"{self.rows_per_token:.1f} rows through the last layers"),
            ("rows", ", ".join(f"{stage} {rows:,}" for stage, rows in self.rows.items())),
            ("time", f"{self.total:.2f} s, {self.tokens_per_second:.1f} tokens per second"),
        )
        return Card(f"GenerationStats of {counted(len(self.sequence_steps), 'prompt')}", facts)

    def count_stage(self, name: str, rows: int, padded: int, seconds: float) -> None:
        """Add one run of a stage."""
        self.rows[name] = self.rows.get(name, 0) + rows
        self.stage_rows.setdefault(name, []).append(rows)
        self.padded[name] = self.padded.get(name, 0) + padded
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def count_salient(self, counts: Tensor) -> None:
        """Add the salient rows of one step, which stay on the device until the end."""
        self.unread_salient.append(counts.clone())

    def count_sequence(self, steps: int, decoded: int, rows: int, commit_rows: int) -> None:
        """Add a sequence that ended."""
        self.sequence_steps.append(steps)
        self.sequence_decoded.append(decoded)
        self.sequence_rows.append(rows)
        self.decoded += decoded
        self.commit_rows += commit_rows

    def finish(self, total: float) -> None:
        """Set the total, and count the seconds that no stage accounts for as "decode loop"."""
        self.total = total
        if self.unread_salient:
            self.salient += torch.stack(self.unread_salient).tolist()
            self.unread_salient.clear()
        stages = sum(s for name, s in self.seconds.items() if name != "decode loop")
        self.seconds["decode loop"] = max(0.0, total - stages)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived figures included."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "decoded": self.decoded,
            "rows": dict(self.rows),
            "padded": dict(self.padded),
            "commit_rows": self.commit_rows,
            "rows_per_token": self.rows_per_token,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
            "total": self.total,
            "kept_rows": self.kept_rows,
            "salient": [list(counts) for counts in self.salient],
            "step_rows": self.step_rows,
            "sequence_steps": list(self.sequence_steps),
            "sequence_decoded": list(self.sequence_decoded),
            "sequence_rows": list(self.sequence_rows),
        }


@dataclass(frozen=True)
class StepRecord:
    """Record of one step of the decode loop for an observer: copies on the CPU, N rows of b sequences.

    Attributes:
        step: from 0 within its batch.
        prompts: i64[b], indices of the batch's prompts among all prompts of the call.
        sequence: i64[N], index of each row's prompt among all prompts.
        input_ids, positions i64[N]; limit i32[N]; candidate bool[N]: the forwarded rows, see `StepRows`.
        start, column: i64[N], start of the block of each row's sequence, and the column from there that the row
            predicts; below 0: none, W: the position after the open blocks.
        origin: i32[N], start of each row or of its block; None for models whose rows see no window.
        added: bool[N], rows that the plan adds; None unless it does.
        kept: bool[N], rows that reached the last stage.
        score: f32[N], score by which the program selected rows; None without such an output.
        token, confidence: i64[N] (-1: none) and f32[N] (-inf where the row could not be committed).
        committed: bool[N], rows whose token was committed.
        average, sequence_average: f32[b], tokens per step of the block and of the sequence before the step.
        states, states_after: states that passes carry from step to step, by name, as the program got and returned them.
    """

    step: int
    prompts: Tensor
    sequence: Tensor
    input_ids: Tensor
    positions: Tensor
    limit: Tensor
    candidate: Tensor
    start: Tensor
    column: Tensor
    origin: Tensor | None
    added: Tensor | None
    kept: Tensor
    score: Tensor | None
    token: Tensor
    confidence: Tensor
    committed: Tensor
    average: Tensor
    sequence_average: Tensor
    states: dict[str, Tensor]
    states_after: dict[str, Tensor]

    @property
    def committed_positions(self) -> Tensor:
        """i64[C]: positions of the rows whose token was committed."""
        return self.positions[self.committed]

    @property
    def committed_tokens(self) -> Tensor:
        """i64[C]: tokens that were committed."""
        return self.token[self.committed]

    @classmethod
    def of(
        cls,
        step: int,
        state: DecodeState,
        rows: StepRows,
        results: RowResults,
        committed: Tensor,
        outputs: dict[str, Tensor],
        states: dict[str, Tensor],
    ) -> StepRecord:
        """Record state and rows (without padding) as they were before the step, and their results.

        committed: bool[b, W + 1] as `DecodeState.apply` returned it.
        """

        def copy(value: Tensor) -> Tensor:  # a program may overwrite its outputs in the next step
            return value.detach().to("cpu", copy=True)

        n = len(rows.masked)
        window = torch.cat([torch.zeros_like(committed[:, 1:]), committed], dim=1)
        commits = window[rows.sequence, rows.column]
        score = outputs.get("score")
        return cls(
            step=step,
            prompts=copy(state.prompt),
            sequence=copy(state.prompt[rows.sequence]),
            input_ids=copy(rows.input_ids),
            positions=copy(rows.positions),
            limit=copy(rows.limit),
            candidate=copy(rows.candidate),
            start=copy(state.start[rows.sequence]),
            column=copy(rows.column - state.width),
            origin=None if rows.origin is None else copy(rows.origin),
            added=None if rows.added is None else copy(rows.added),
            kept=copy(results.kept[:n]),
            score=None if score is None else copy(score[:n]),
            token=copy(results.token[:n]),
            confidence=copy(results.confidence[:n]),
            committed=copy(commits if rows.added is None else commits & ~rows.added),
            average=copy(state.average),
            sequence_average=copy(state.sequence_average),
            states={name: copy(value) for name, value in states.items()},
            states_after={name: copy(outputs.get(name, value)) for name, value in states.items()},
        )
