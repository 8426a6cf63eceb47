"""The decode loop of one batch: prefill, then steps until every sequence is finished.

Host reads: five integers per step at most (`DecodeState.summary`; the row count is among them, which the next step's
tensors are sized by), and the results once at the end. Everything else stays on the device. A program may
read more, and so does decoding logits here (see `BlockLoop._decide`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import DgraphError, LoweringError
from dgraph.lowering.program import Program
from dgraph.ops.row_slots import reference as row_slots
from dgraph.ops.statistics import kept_rows, measure_rows
from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowCounts, RowPlan
from dgraph.runtime.advance import FILLERS, TWIN, Advance
from dgraph.runtime.block_causal import BlockCausalState
from dgraph.runtime.canvas import CanvasState
from dgraph.runtime.decode_state import DecodeState
from dgraph.runtime.offers import Moment, computed
from dgraph.runtime.policies import statistics_of
from dgraph.runtime.rows import StepRows, prefill_chunks, prefill_rows
from dgraph.runtime.rule import Rule
from dgraph.runtime.sampling import LogitsDecoder, RowContext
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.spec import ModelSpec

UNREAD_SHARE = 8
"""For one step that the host does not read, so many others must come before it."""
PREFILL_ROWS = 32768
"""Rows of one prefill call: enough to fill any device, few enough that activations stay small."""


@dataclass(frozen=True)
class BlockLoop:
    """How to decode one batch; see `BlockSession` and its `generate` for what the fields mean.

    select: instead of `step` where some sequence chooses which keys it keeps; None if all are.
    kv: which keys are kept; None for all.
    release: gives back what no step after the first reads; None if there is nothing.
    advance: makes the transition of a batch from its state before the first step.
    plan: which rows a step of a bidirectional model forwards; which steps of a block-causal one are full, or None.
    stride: the canvas has a multiple of so many columns, itself a multiple of the block.
    unread: steps after each host read that go without one, where the plan says how many rows they have at most. A
        sequence that ends meanwhile, or a step that goes wrong, is noticed that much later.
    sampler: takes tokens from logits, for programs that end in them.
    """

    spec: ModelSpec
    prefill: Program | None
    step: Program
    select: Program | None
    rule: Rule
    plan: RowPlan | None
    kv: KVPlan | None
    release: Callable[[], None] | None
    max_new_tokens: int
    block: int
    advance: Callable[[DecodeState], Advance]
    stride: int
    unread: int
    sampler: LogitsDecoder
    observer: Callable[[StepRecord], None] | None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        first: int,
        caches: Mapping[str, Tensor],
        stats: GenerationStats,
        report: Callable[[tuple[int, int]], None] | None,
        unconditional: Tensor | None = None,
    ) -> DecodeState:
        """Decode `prompts` and return their final state; adds to `stats`.

        first: index of the first prompt among all of the call. caches: page_table and the caches by name,
        all on the device that decodes; a page table with more rows than prompts pads the batch with sequences
        that have no rows. report: gets (finished sequences, decoded tokens) after every step. unconditional: a
        second page table, with which every program runs once more without the prompts' tokens, for guidance.
        """
        state = self.begin(prompts, first, caches["page_table"])
        advance = self.advance(state)
        if self.prefill is not None:
            self._prefill(self.prefill, prompts, advance, caches, stats, unconditional)
        ahead = self._ahead(prompts)
        salient: list[Tensor] = []
        step, unread = 0, 0
        running: list[bool] = []
        while True:
            if unread:
                unread -= 1
                rows = self._most_rows(ahead, step, running)
                # Of the plans that say their rows, whole steps are those in which some sequence does not reuse.
                whole = None if ahead is None or self.select is None else ahead.whole(step)
                program = self.select if whole is not None and bool(whole.any()) else None
                self._step(program or self.step, step, rows, advance, caches, stats, salient, unconditional)
                step += 1
                continue
            # The one host read of a step.
            count, active, decoded, broken, choosing = advance.summary.tolist()
            if broken:
                raise self._broken(advance.state)
            if report is not None:
                report((len(prompts) - active, decoded))
            if count == 0:  # no active sequence: an active one has masked rows, and these are always pending
                break
            program = self.select if choosing else None
            self._step(program or self.step, step, count, advance, caches, stats, salient, unconditional)
            if step == 0 and self.release is not None:
                self.release()
            step += 1
            if self.unread and self._most_rows(ahead, step, [True] * len(prompts)):
                running = advance.state.active.tolist()
                # Steps that may be in vain stay a small share of all; at an even pace, none is in vain.
                left = (len(prompts) * self.max_new_tokens - decoded) * (step - 1) // max(decoded, 1)
                unread = max(0, min(self.unread, step // UNREAD_SHARE, left - 1)) if any(running) else 0
        state = advance.state
        stats.steps += step
        if salient:
            stats.salient += torch.stack(salient).tolist()
        stats.decoded += decoded
        stats.commit_rows += int(state.commit_rows)
        for count, values in (
            (stats.sequence_steps, state.counter),
            (stats.sequence_decoded, state.total),
            (stats.sequence_rows, state.kept_rows),
        ):
            count += values[: len(prompts)].tolist()
        return state

    def _ahead(self, prompts: Sequence[Sequence[int]]) -> RowCounts | None:
        """What the host knows of the rows of later steps; None if nothing."""
        if self.plan is None or self.spec.attention == "block_causal" or self.rule.block_cache != "off":
            return None
        return RowCounts(self.plan, [len(p) for p in prompts], self.max_new_tokens, self.spec.logit_shift)

    @staticmethod
    def _most_rows(ahead: RowCounts | None, step: int, running: Sequence[bool]) -> int:
        """Rows that the running sequences forward in a step; 0 if only the device knows."""
        counts = None if ahead is None else ahead.of(step)
        if counts is None:
            return 0
        return sum(count for count, goes_on in zip(counts.tolist(), running, strict=False) if goes_on)

    def begin(self, prompts: Sequence[Sequence[int]], first: int, page_table: Tensor) -> DecodeState:
        """The state before the first step; see `run`."""
        b, device = len(page_table), page_table.device
        longest = max(map(len, prompts)) + self.max_new_tokens
        causal = self.spec.attention == "block_causal"
        if not causal:
            longest += self.block  # a last block that is cut short has columns all the same
        canvas = torch.full((b, -(-longest // self.stride) * self.stride), self.spec.mask_id)
        for row, prompt in zip(canvas, prompts, strict=False):
            row[: len(prompt)] = torch.tensor(prompt)
        lengths = [len(p) for p in prompts] + [0] * (b - len(prompts))
        tensors = canvas.to(device), torch.arange(first, first + b, device=device), torch.tensor(lengths, device=device)
        settings: dict[str, Any] = {
            "sequences": len(prompts),
            "max_new_tokens": self.max_new_tokens,
            "block": self.block,
            "mask_id": self.spec.mask_id,
            "stop_ids": torch.tensor(self.spec.eos_ids, dtype=torch.int64, device=device),
            "plan": self.plan,
            "kv": self.kv,
        }
        if causal:
            return BlockCausalState.begin(*tensors, **settings)
        return CanvasState.begin(*tensors, **settings, shift=self.spec.logit_shift)

    def _prefill(
        self,
        program: Program,
        prompts: Sequence[Sequence[int]],
        advance: Advance,
        caches: Mapping[str, Tensor],
        stats: GenerationStats,
        unconditional: Tensor | None,
    ) -> None:
        state = advance.state
        lengths = [len(p) // self.block * self.block for p in prompts]
        lengths += [0] * (len(state.start) - len(prompts))
        for begin, end in prefill_chunks(lengths, self.block, max(self.block, PREFILL_ROWS)):
            count = sum(end) - sum(begin)
            bounds = torch.tensor([begin, end], device=state.start.device)
            rows = prefill_rows(state.canvas, bounds[0], bounds[1], self.block, count)
            given = {name: advance.inputs[name] for name in advance.carried}
            inputs = {**caches, **given, **computed(program.inputs, Moment(rows, state, self.rule))}
            result, took_part = program(inputs, count), bounds[1] > bounds[0]
            advance.prefilled(result.outputs, took_part)
            if unconditional is not None:
                other = program(self._without_prompt(inputs, rows, state, unconditional), count).outputs
                advance.prefilled({TWIN + name: value for name, value in other.items()}, took_part)
            stats.count_stage("prefill", result.rows[0], result.padded[0], sum(result.seconds))

    def _without_prompt(
        self, inputs: Mapping[str, Tensor], rows: StepRows, state: DecodeState, page_table: Tensor
    ) -> dict[str, Tensor]:
        """The same inputs for sequences whose prompts are mask tokens, in pages of their own (LLaDA, guidance)."""
        given = rows.positions < state.prompt_end[rows.sequence]
        states = {name.removeprefix(TWIN): value for name, value in inputs.items() if name.startswith(TWIN)}
        return {
            **inputs,
            **states,
            "input_ids": torch.where(given, self.spec.mask_id, rows.input_ids),
            "page_table": page_table,
        }

    def _step(
        self,
        program: Program,
        number: int,
        count: int,
        advance: Advance,
        caches: Mapping[str, Tensor],
        stats: GenerationStats,
        salient: list[Tensor],
        unconditional: Tensor | None,
    ) -> None:
        inputs = {**caches, **advance.inputs, **advance.late(program.inputs)}
        result, other = program(inputs, count), None
        if unconditional is not None:
            # Outputs last until the next call.
            result = replace(result, outputs={name: value.clone() for name, value in result.outputs.items()})
            twin = self._without_prompt(inputs, advance.rows, advance.state, unconditional)
            unguided = program(twin, count).outputs
            other = unguided["logits"]
            carried = {TWIN + name: value for name, value in unguided.items() if TWIN + name in advance.carried}
            result = replace(result, outputs=result.outputs | carried)
        for stage in zip(program.stage_names, result.rows, result.padded, result.seconds, strict=True):
            stats.count_stage(*stage)
        if "salient" in result.outputs:
            salient.append(result.outputs["salient"].clone())  # counts stay on the device until the end
        outputs = self._decide(advance, result.outputs, other, caches)
        if self.observer is None:
            advance(outputs)
            return
        # The transition overwrites what it is given, and a program may return one of its inputs.
        before, rows = advance.state.clone(), advance.rows.head(count).clone()
        states = {name: advance.inputs[name].clone() for name in advance.carried}
        said = {name: value.clone() for name, value in result.outputs.items()}
        decision = advance(outputs, observed=True)
        assert decision is not None
        self.observer(StepRecord.of(number, before, rows, decision.results, decision.committed, said, states))

    def _decide(
        self,
        advance: Advance,
        outputs: Mapping[str, Tensor],
        unconditional: Tensor | None,
        caches: Mapping[str, Tensor],
    ) -> Mapping[str, Tensor]:
        """Outputs with a token per row and how sure it is, which a program may leave to the runtime as logits."""
        if "token" in outputs and "confidence" in outputs:
            return outputs
        if "logits" not in outputs:
            raise LoweringError(
                f"program 'step' must output token and confidence, or logits; got: "
                f"{', '.join(sorted(outputs)) or 'nothing'}."
            )
        rows, state, logits, kept = advance.rows, advance.state, outputs["logits"], outputs.get("kept")
        row = torch.arange(len(logits), device=logits.device) if kept is None else kept
        # Only candidates can be committed. Their count is a host read: a program that leaves its logits to
        # the runtime is a baseline; one with `lm_head` needs none.
        inside = (row >= 0) & (row < len(rows.masked))
        entry = (inside & rows.candidate[row.clamp(min=0, max=len(rows.masked) - 1)]).nonzero()[:, 0]
        at = row[entry]
        sequence, column = rows.sequence[at], rows.column[at] - self.block
        context = RowContext(
            sequence=sequence,
            position=rows.positions[at] + self.spec.logit_shift,
            column=column,
            masked=state.block_masked[sequence, column],
            forwards=state.forwards[sequence],
            seed=advance.inputs["seed"][at],
            tokens=state.canvas,
            block=self.block,
            unconditional=None if unconditional is None else unconditional[entry],
        )
        found = self.sampler.decode(logits[entry], context)._asdict()
        decided = {}
        for name, values in found.items():
            decided[name] = torch.full(row.shape, FILLERS[name], dtype=values.dtype, device=row.device)
            decided[name][entry] = values
        if asked := statistics_of(self.rule.policy):
            memory = caches[kept_rows(asked, self.spec.vocab).name]
            slot = row_slots(rows.positions, caches["page_table"], rows.cu_rows, memory)[at]
            heat = torch.full(at.shape, self.rule.temperature, dtype=torch.float32, device=row.device)
            live = torch.ones_like(at, dtype=torch.bool)
            values = measure_rows(asked, logits[entry], found["token"], heat, self.spec.mask_id, slot, memory, live)
            decided["measured"] = torch.zeros((len(row), len(asked)), dtype=torch.float32, device=row.device)
            decided["measured"][entry] = values.float()
        return {**outputs, **decided}

    def _broken(self, state: DecodeState) -> DgraphError:
        at = int(state.broken.nonzero()[0])
        return DgraphError(
            f"program 'step' gave no usable confidence for prompt {int(state.prompt[at])} (block at position "
            f"{int(state.start[at])}): NaN, or no candidate with a token and a confidence. Check the "
            f"weights, and whether their dtype overflows."
        )
