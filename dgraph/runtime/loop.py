"""The decode loop of one batch: prefill, then steps until every sequence is finished.

Host reads: four integers per step (`StepState.summary`; the row count is among them, which the next step's
tensors are sized by), and the results once at the end. Everything else stays on the device. A program may
read more, and so does decoding logits here (see `BlockLoop._results`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.errors import DgraphError, LoweringError
from dgraph.lowering.program import Program
from dgraph.ops.lm_head import decode_logits
from dgraph.runtime.policies import Policy
from dgraph.runtime.rows import RowResults, StepRows, prefill_chunks, prefill_rows, row_results
from dgraph.runtime.seeds import row_seeds, sequence_keys, uniform
from dgraph.runtime.state import BlockCache, StepState
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.spec import ModelSpec

PREFILL_ROWS = 32768
"""Rows of one prefill call: enough to fill any device, few enough that activations stay small."""


@dataclass(frozen=True)
class BlockLoop:
    """How to decode; see `BlockSession` and its `generate` for what the fields mean."""

    spec: ModelSpec
    prefill: Program
    step: Program
    block_cache: BlockCache
    refresh: bool
    select_noise: bool
    max_new_tokens: int
    policy: Policy
    block: int
    temperature: float
    seed: int
    observer: Callable[[StepRecord], None] | None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        first: int,
        caches: Mapping[str, Tensor],
        stats: GenerationStats,
        report: Callable[[tuple[int, int]], None] | None,
    ) -> StepState:
        """Decode `prompts` and return their final state; adds to `stats`.

        first: index of the first prompt among all of the call. caches: page_table and the caches by name,
        all on the device that decodes. report: gets (finished sequences, decoded tokens) after every step.
        """
        state = self._begin(prompts, first, caches["page_table"].device)
        keys = sequence_keys(self.seed, state.prompt)
        lengths = [len(p) // self.block * self.block for p in prompts]
        for begin, end in prefill_chunks(lengths, self.block, max(self.block, PREFILL_ROWS)):
            count = sum(end) - sum(begin)
            bounds = torch.tensor([begin, end], device=state.start.device)
            rows = prefill_rows(state.canvas, bounds[0], bounds[1], self.block, count)
            result = self.prefill({**caches, **self._inputs(rows, state, None)}, count)
            stats.count_stage("prefill", result.rows[0], result.padded[0], sum(result.seconds))
        step = 0
        while True:
            # The one host read of a step.
            count, active, decoded, broken = state.summary().tolist()
            if broken:
                raise self._broken(state)
            if report is not None:
                report((len(prompts) - active, decoded))
            if count == 0:  # no active sequence: an active one has masked rows, and these are always pending
                break
            self._step(step, count, state, keys, caches, stats)
            step += 1
        stats.steps += step
        stats.decoded += decoded
        stats.commit_rows += int(state.commit_rows)
        stats.sequence_steps += state.counter.tolist()
        return state

    def _begin(self, prompts: Sequence[Sequence[int]], first: int, device: torch.device) -> StepState:
        longest = max(map(len, prompts)) + self.max_new_tokens
        canvas = torch.full((len(prompts), -(-longest // self.block) * self.block), self.spec.mask_id)
        for row, prompt in zip(canvas, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        return StepState.begin(
            canvas.to(device),
            torch.arange(first, first + len(prompts), device=device),
            torch.tensor([len(p) for p in prompts], device=device),
            max_new_tokens=self.max_new_tokens,
            block=self.block,
            mask_id=self.spec.mask_id,
            stop_ids=torch.tensor(self.spec.eos_ids, dtype=torch.int64, device=device),
        )

    def _step(
        self,
        number: int,
        count: int,
        state: StepState,
        keys: Tensor,
        caches: Mapping[str, Tensor],
        stats: GenerationStats,
    ) -> None:
        rows = state.rows(count)
        inputs = self._inputs(rows, state, keys)
        result = self.step({**caches, **inputs}, count)
        for stage in zip(self.step.stage_names, result.rows, result.padded, result.seconds, strict=True):
            stats.count_stage(*stage)
        results = self._results(rows, inputs, result.outputs)
        before = copy.copy(state)  # transitions replace tensors and never write into them
        progress = result.outputs.get("progress")
        committed = state.apply(rows, results, self.policy, self.block_cache, self.refresh, progress)
        if self.observer is not None:
            self.observer(StepRecord.of(number, state.prompt, before, rows, results, committed, result.outputs))

    def _inputs(self, rows: StepRows, state: StepState, keys: Tensor | None) -> dict[str, Tensor]:
        """All named inputs but the caches. `keys` None: nothing is drawn."""
        n, device = len(rows.masked), rows.masked.device
        seed = torch.zeros(n, dtype=torch.int64, device=device)
        if keys is not None and (self.temperature > 0 or self.select_noise):
            seed = row_seeds(keys[:, rows.sequence], rows.positions, state.counter[rows.sequence])
        inputs = {
            "input_ids": rows.input_ids,
            "positions": rows.positions,
            "limit": rows.limit,
            "cu_rows": rows.cu_rows,
            "masked": rows.masked,
            "temperature": torch.full((n,), self.temperature, dtype=torch.float32, device=device),
            "seed": seed,
            "average": state.average,
            "progress": state.progress,
        }
        if self.select_noise:
            inputs["noise"] = uniform(seed)
        return inputs

    def _results(self, rows: StepRows, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> RowResults:
        kept = outputs.get("kept")
        if "token" in outputs and "confidence" in outputs:
            return row_results(rows, outputs["token"], outputs["confidence"], kept)
        if "logits" not in outputs:
            raise LoweringError(
                f"program 'step' must output token and confidence, or logits; got: "
                f"{', '.join(sorted(outputs)) or 'nothing'}."
            )
        row = torch.arange(len(rows.masked), device=rows.masked.device) if kept is None else kept
        # Only masked rows can be committed. Their count is a host read: a program that leaves its logits to
        # the runtime is a baseline; one with `lm_head` needs none.
        entry = (rows.masked[row.clamp(min=0)] & (row >= 0)).nonzero()[:, 0]
        token = torch.full_like(row, -1)
        confidence = torch.full(row.shape, -math.inf, device=row.device)
        row = row[entry]
        logits, temperature, seed = outputs["logits"][entry], inputs["temperature"][row], inputs["seed"][row]
        token[entry], probability = decode_logits(logits, temperature, seed, self.spec.mask_id)
        confidence[entry] = probability.float()
        return row_results(rows, token, confidence, kept)

    def _broken(self, state: StepState) -> DgraphError:
        at = int(state.broken.nonzero()[0])
        return DgraphError(
            f"program 'step' gave no usable confidence for prompt {int(state.prompt[at])} (block at position "
            f"{int(state.start[at])}): NaN, or no masked row with a token and a confidence. Check the "
            f"weights, and whether their dtype overflows."
        )
