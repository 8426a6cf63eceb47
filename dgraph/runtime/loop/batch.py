"""Sequences that are decoded together: slots, each with a request of its own, and the steps over all of them.

Between any two steps requests may be admitted to free slots and others retired; no shape changes, and nothing is
captured or compiled anew. The host reads one small report per step (see `dgraph.runtime.loop.step_report`), which
gives the number of rows of the next step. The host may know that number from the row plan, or because every step has
the rows of the sequences' blocks; then it launches the step before it reads the report. Everything else stays on the
device. A program may read more, and so does decoding logits (see `dgraph.runtime.sampling.sample_logits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dgraph.lowering.program import ProgramResult
from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.plans.rows import RowCounts, RowPlan
from dgraph.runtime.constraints.vocabulary import Vocabulary
from dgraph.runtime.graphs.upload import upload
from dgraph.runtime.kv.packed import PackedKV
from dgraph.runtime.kv.page_tables import PageTables
from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.launched import Bound, Flight
from dgraph.runtime.loop.step_inputs import StepContext, computed
from dgraph.runtime.loop.step_report import Report, all_rows
from dgraph.runtime.loop.transition import TWIN, StepTransition
from dgraph.runtime.policies import Policy, row_of
from dgraph.runtime.policies.mixture import Refusals, refusing
from dgraph.runtime.requests import (
    Programs,
    Request,
    Shape,
    SlotState,
    first_cached,
    first_positions,
    kept_candidates,
    positions,
    prefilled_positions,
    ring_pages,
)
from dgraph.runtime.sampling.sample_logits import Decide
from dgraph.runtime.state.base import OUT, DecodeState
from dgraph.runtime.state.initial import begin
from dgraph.runtime.state.packed_rows import key_sizes, prefill_chunk, prefill_rows
from dgraph.runtime.stats import GenerationStats, StageCounts, StepRecord
from dgraph.spec import ModelSpec

FEW_STEPS = 4
"""Steps within which a sequence may end: the batch then reads the last report before it launches a step."""


class Batch:
    """Slots, and the steps over them. The caller calls, in turn: `retire`, `admit`, `mix` or `prefill`, and `turn`.

    Args:
        spec: the model.
        config: how to decode.
        programs: programs of the batch.
        shape: its sizes.
        transition: makes the transition for a config and a state before its first step.
        kv, packed: caches of all keys, and of those that are kept packed.
        plan: rows that a step of a bidirectional model forwards, or which steps of a block-causal one are full.
        by_block: pages are allocated as a sequence grows, not for its whole life.
        sized: programs are recorded as CUDA graphs, so the number of rows of keys is rounded up to few sizes.
        foresee: launch a step before the report of the last one is read, if the host knows how many rows it has at
            most. The end of a sequence, or an error in it, is then noticed one step later.
        stats: counters of steps, rows and times.
        observer: called with every step, at the price of copies to the host.
        vocabulary: tokens of the model, for requests with a constraint.

    Attributes:
        running: the request in each slot that has one.
        lenient: a sampler or policy that raises fails its own requests (see `failed`), and not the step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: BatchConfig,
        programs: Programs,
        shape: Shape,
        transition: Callable[[BatchConfig, DecodeState], StepTransition],
        *,
        kv: KVStore,
        packed: PackedKV | None = None,
        plan: RowPlan | None = None,
        by_block: bool = False,
        sized: bool = False,
        foresee: bool = False,
        stats: GenerationStats | StageCounts | None = None,
        observer: Callable[[StepRecord], None] | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ):
        self.spec, self.config, self.programs, self.shape = spec, config, programs, shape
        self.kv, self.packed, self.plan = kv, packed, plan
        self.by_block, self._sized, self._observer, self.lenient = by_block, sized, observer, False
        self._refusals = Refusals()
        self.stats: GenerationStats | StageCounts = GenerationStats() if stats is None else stats
        self._make, self._vocabulary = transition, vocabulary
        self.running: dict[int, SlotState] = {}
        self.causal = spec.attention == "block_causal"
        if packed is not None:
            packed.widen(shape.slots)
        self._tables = PageTables(kv, 2 if config.guided else 1, shape.slots, shape.pages)
        self.transition = transition(config, self._begin([], kv.device))
        self.order(range(shape.slots))
        self._last: Report | None = None
        self._counts: RowCounts | None = None
        self._ahead = foresee and config.block_cache == "off" and observer is None
        if self._ahead and plan is not None and not self.causal:
            self._counts = RowCounts(plan, shape.slots, spec.logit_shift)
        self._decide = Decide(spec)
        self._flying: Flight | None = None
        self._steps = 0

    # -- slots ----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot in range(self.shape.slots) if slot not in self.running]

    @property
    def prefilling(self) -> list[int]:
        """Slots whose prompts are to be prefilled before their first steps."""
        return [slot for slot, one in self.running.items() if not one.ready]

    def admit(self, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """Put requests into free slots; their first step is the next one that is packed, once they are prefilled.

        Raises:
            PoolFull: the pages, or packed entries, that are free do not suffice; nothing has changed.
        """
        if not requests:
            return
        tables = 2 if self.config.guided else 1
        block = self.shape.block
        tokens = [first_positions(request, block, self.by_block, self.spec) for request in requests]
        # A block-causal model needs these pages for the prefill, and gives them back after its first step.
        absent = [0 if self.causal else self.first_cached(len(r.ids)) for r in requests]
        shared = [list(r.shared) for r in requests]
        rings = [ring_pages(request, block, self.spec, self.kv) for request in requests]
        candidates = [] if self.packed is None else [kept_candidates(request, self.packed.plan) for request in requests]
        if self.packed is not None:
            self.packed.check_room(candidates)
        handles = self.kv.allocate(tokens * tables, absent * tables, shared * tables, rings * tables)
        for place, (slot, request) in enumerate(zip(slots, requests, strict=True)):
            prompt = prefilled_positions(request, block, self.spec)
            mine = handles[place :: len(requests)]
            shares = len(request.shared) * self.kv.page_size
            start = prompt if self.causal else len(request.ids)
            self.running[slot] = SlotState(request, mine, prompt, shares, start=start, began=request.steps)
            self.running[slot].end = len(request.ids) + request.first_length
        self._tables.changed(slots)
        if self.packed is not None:  # after `running` is set: if memory runs out, running requests are retired
            self.packed.open(slots, candidates)
        self.transition.admit(slots, self._begin(requests, torch.device("cpu")))
        if self._counts is not None:
            self._counts.set(slots, [len(r.ids) for r in requests], [r.decoding.max_new_tokens for r in requests])

    def retire(self, slots: Sequence[int], clear: bool = False) -> None:
        """Take requests out of their slots, finished or not, and free their pages. clear: reset wrong numbers first."""
        if not slots:
            return
        self.transition.retire(slots)
        self._tables.left(slots)
        for slot in slots:
            one = self.running.pop(slot)
            for handle in reversed(one.handles):
                if clear:
                    self.kv.clear(handle)
                self.kv.free(handle)
            if self.packed is not None:
                if clear:
                    self.packed.clear(slot)
                self.packed.close(slot)

    def extend(self, slot: int, tokens: int) -> None:
        """Give a slot pages for `tokens` positions in all, at most those of its whole life.

        Raises:
            PoolFull: the pages that are free do not suffice.
        """
        one = self.running[slot]
        wanted = min(tokens, positions(one.request, self.shape.block, self.spec))
        grown = [self.kv.extend(handle, wanted) for handle in one.handles]
        if any(grown):
            self._tables.changed([slot])

    def order(self, slots: Sequence[int]) -> None:
        """Grant rows of the next steps to these slots in this order; the others sit out."""
        places = torch.full((self.shape.slots,), OUT)
        places[list(slots)] = torch.arange(len(slots))
        self._ordered = frozenset(slots)
        self.transition.order(places)

    def decode_as(self, config: BatchConfig, programs: Programs) -> None:
        """Change to a config that also serves other requests; the policies of running requests keep their indices."""
        if self._flying is not None:
            with refusing(self._refusals if self.lenient else None):
                self._move(self._flying)
            self._flying = None
        if not self.running:
            self.transition.ask_again(self._refusals)
        before = self.transition
        self.config, self.programs = config, programs
        self.transition = self._make(config, self._begin([], self.kv.device))
        self.transition.adopt(before)

    def clear(self) -> None:
        """Retire all requests, also after an error."""
        self._flying = None
        self.retire(list(self.running))
        self.transition.ask_again(self._refusals)

    # -- steps ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, most: int, slots: Sequence[int] | None = None) -> int:
        """Prefill the next part of the prompts of these slots (default: all), in their order; return the row count.

        most: rows at most, in whole blocks; at least one block.
        """
        program, block = self.programs.prefill, self.shape.block
        slots = self.prefilling if slots is None else slots
        if program is None or not slots:
            return 0
        spans = [(self.running[slot].prefilled, self.running[slot].prompt) for slot in slots]
        begin, end = [0] * self.shape.slots, [0] * self.shape.slots
        parts = prefill_chunk(spans, block, max(most, block), self.kv.part(block))
        for slot, (first, last) in zip(slots, parts, strict=True):
            begin[slot], end[slot] = first, last
        count = sum(end) - sum(begin)
        state = self.transition.state
        (bounds,) = upload(self.kv.device, torch.tensor([begin, end]))
        causal = self.spec.encoding == "causal"
        rows = prefill_rows(state.canvas, bounds[0], bounds[1], block, count, causal)
        given = {name: self.transition.inputs[name] for name in self.transition.carried}
        inputs = {**self.caches(), **given, **computed(program.inputs, StepContext(rows, state, self.config))}
        result, took_part = program(inputs, count), bounds[1] > bounds[0]
        self.transition.prefilled(result.outputs, took_part)
        if self.config.guided:
            other = program(self.transition.without_prompt(inputs, rows, self._tables.of(1)), count).outputs
            self.transition.prefilled({TWIN + name: value for name, value in other.items()}, took_part)
        self.stats.count_stage("prefill", result.rows[0], result.padded[0], sum(result.seconds))
        for slot in slots:
            if end[slot] > begin[slot]:
                self.running[slot].prefilled = end[slot]
        self._settle([slot for slot in slots if end[slot] > begin[slot] and not self.running[slot].left])
        return count

    def mix(self, slots: Sequence[int]) -> bool:
        """Let the first steps of these slots encode the rest of their prompts; False if that exceeds `Shape.mixed`.

        First steps of other slots that encode prompts count too. Also False if a ring lacks pages for these rows.
        """
        rows = [self.running[slot].left for slot in slots]
        if sum(rows) + sum(one.left for one in self.running.values() if one.mixed) > self.shape.mixed:
            return False
        first_rows = {slot: self._step_rows(slot) + self.running[slot].left for slot in slots}
        if not self.kv.widen({h: first_rows[slot] for slot in slots for h in self.running[slot].handles}):
            return False
        self._tables.changed(slots)
        self.transition.mix(slots, rows)
        for slot in slots:
            self.running[slot].mixed = True
        return True

    @torch.no_grad()
    def turn(self) -> Report:
        """Finish the running step, if there is one, and launch the next; return the report of the former.

        Slots that were written since the last turn are part of the next step.
        """
        with refusing(self._refusals if self.lenient else None):
            return self._turn()

    def _turn(self) -> Report:
        if self._flying is not None:
            self._move(self._flying)
        else:
            self.transition.pack()
        self._decide.failed = {}
        foreseen = self._foreseen()
        if foreseen is not None:
            rows, whole = foreseen
            step = self._bound(whole)
            self._launched(step, step.run(rows), rows, list(self.running))
            found = self._last = Report(self.transition.report.read().copy())
            self._hear(found)
            return found
        # The device waits once the report is there, so the inputs of the step are bound before it is read.
        bound = self._bound([]) if self.programs.select is None else None
        numbers = self.transition.report.read()
        self._flying, rows, result = None, all_rows(numbers), None
        if bound is not None and rows and not self.kv.renews:
            result = bound.run(rows)
        found = self._last = Report(numbers.copy())
        if self.kv.renews:
            starts = found.start.tolist()
            moved = (one for slot, one in self.running.items() if one.start != starts[slot])
            self.kv.renew([handle for one in moved for handle in one.handles])
        if rows:
            if bound is None:
                actions = found.action.tolist()
                bound = self._bound([slot for slot in self.running if actions[slot] != REUSE])
            if result is None:
                result = bound.run(rows)
            took_part = [slot for slot, count in enumerate(found.rows.tolist()) if count and slot in self.running]
            self._launched(bound, result, rows, took_part)
        self._hear(found)
        return found

    def _hear(self, report: Report) -> None:
        """Note which sequences have moved on to another block."""
        starts, counters, ends = report.start.tolist(), report.counter.tolist(), report.end.tolist()
        for slot, one in self.running.items():
            if starts[slot] != one.start:
                one.start, one.began, one.end = starts[slot], counters[slot], ends[slot]

    @property
    def failed(self) -> dict[int, Exception]:
        """Exceptions of a lenient batch by slot, from its sampler in the last launched step or from its policy."""
        errors = {slot: self.refused(one.request.decoding.rule) for slot, one in self.running.items()}
        return self._decide.failed | {slot: error for slot, error in errors.items() if error is not None}

    def refused(self, policy: Policy) -> Exception | None:
        """Exception of a policy's kind, which this batch no longer asks; None if it has not raised."""
        errors = self._refusals.errors
        return errors.get(row_of(self.config.policy, policy)[0]) if errors else None

    @property
    def busy(self) -> bool:
        """True if a step is running."""
        return self._flying is not None

    def _bound(self, whole: Sequence[int]) -> Bound:
        """Program of the packed step with its inputs, without the number of its rows.

        whole: slots whose sequences do not reuse packed keys, but see everything, such as those that choose keys.
        """
        select = self.programs.select if whole else None
        program = self.programs.step if select is None else select
        transition = self.transition
        inputs = {**self.caches(), **transition.inputs, **transition.late(program.inputs, self._key_rows(whole))}
        return Bound(program, inputs, program.bound(inputs))

    def _held(self) -> dict[int, SlotState]:
        """Slots whose responses a constraint holds."""
        return {slot: one for slot, one in self.running.items() if one.request.decoding.constraint is not None}

    def _key_rows(self, slots: Sequence[int]) -> int:
        """Rows of keys for all positions that sequences in these slots see; rounded up to a size if `sized`."""
        seen = sum(self.running[slot].request.end + self.shape.block for slot in slots)
        return key_sizes(seen)[-1] if self._sized else seen

    def _launched(self, bound: Bound, result: ProgramResult, count: int, slots: Sequence[int]) -> None:
        """Take the outputs of a launched step on at most `count` rows of these slots."""
        transition, program, inputs, other = self.transition, bound.program, bound.inputs, None
        if self.config.guided:
            # Outputs last until the next call.
            result = replace(result, outputs={name: value.clone() for name, value in result.outputs.items()})
            unguided = program(transition.without_prompt(inputs, transition.rows, self._tables.of(1)), count).outputs
            other = unguided["logits"]
            carried = {TWIN + name: value for name, value in unguided.items() if TWIN + name in transition.carried}
            result = replace(result, outputs=result.outputs | carried)
        for stage in zip(program.stage_names, result.rows, result.padded, result.seconds, strict=True):
            self.stats.count_stage(*stage)
        if "salient" in result.outputs:
            # Counts stay on the device until they are read.
            self.stats.count_salient(result.outputs["salient"])
        outputs: Mapping[str, Tensor] = result.outputs
        if not {"token", "confidence"} <= outputs.keys():
            samplers = {slot: one.request.decoding.sampling for slot, one in self.running.items()}
            outputs = self._decide(transition, samplers, outputs, other, inputs, self.lenient)
            if held := self._held():
                outputs = self._decide.guided(transition, held, self._vocabulary, outputs, self.lenient)
        self._flying = None
        if self._observer is None:
            self._flying = Flight(self._steps)
        else:
            # The transition overwrites its inputs, and a program may return one of them.
            said = {name: value.clone() for name, value in result.outputs.items()}
            states = {name: transition.inputs[name].clone() for name in transition.carried}
            rows = transition.rows.head(count).clone()
            self._flying = Flight(self._steps, transition.state.clone(), rows, said, states)
        transition.take(outputs)
        self.stats.steps += 1
        self._steps += 1
        if self._counts is not None:
            self._counts.advance(slots)
        for slot in slots:
            one = self.running[slot]
            one.steps, one.prefilled = one.steps + 1, one.prompt
        self._settle([slot for slot in slots if self.running[slot].mixed and self.running[slot].steps == 1])
        self._release(slots)

    def _move(self, flight: Flight) -> None:
        decision = self.transition.move(observed=flight.before is not None)
        if self._observer is not None and decision is not None and flight.before is not None:
            assert flight.rows is not None
            results = decision.results, decision.committed, flight.said, flight.states
            self._observer(StepRecord.of(flight.number, flight.before, flight.rows, *results))

    def _foreseen(self) -> tuple[int, list[int]] | None:
        """Rows of the next step at most, and the slots that see everything in it, if the host knows them.

        None if the host must read the report, or should: a step in vain costs more than a wait.
        """
        last, slots = self._last, list(self.running)
        if not self._ahead or last is None or self._flying is None or not slots:
            return None
        if self.config.policy.traits.extends:  # a step that follows a growth forwards every row
            return None
        if self._held():
            return None  # the host decides with the tokens of the step before
        rows = self._rows_of(slots)
        if not rows or rows > (self.shape.most_rows or rows):
            return None
        if not self._ordered.issuperset(slots) or not bool(last.active[slots].all()) or self._ends_soon(last, slots):
            return None
        if self.kv.renews and bool(last.closes[slots].any()):
            return None  # the host renews caches when a block begins, so it must read the report first
        if self.programs.select is None:
            return rows, []
        # Where plans count their rows, a sequence that reuses nothing has a whole step.
        whole = None if self._counts is None else self._counts.whole(slots)
        if whole is None:
            return None
        return rows, [slot for slot, all_rows in zip(slots, whole.tolist(), strict=True) if all_rows]

    def _rows_of(self, slots: Sequence[int]) -> int:
        """Rows that these slots have in the next step at most; 0 if only the device knows."""
        if self._counts is not None:
            found = self._counts.of(slots)
            return 0 if found is None else int(found.sum())
        begun = all(self.running[slot].steps for slot in slots)  # a first step may encode prompts as well
        return len(slots) * self.shape.block if begun and self.transition.state.steady(self.config.policy) else 0

    def _ends_soon(self, last: Report, slots: Sequence[int]) -> bool:
        """True if a sequence may end within `FEW_STEPS` steps, at the pace at which its tokens came so far."""
        free = np.array([self.running[slot].request.free for slot in slots])
        steps, total = last.counter[slots], last.total[slots]
        # Where the tokens of a block are committed all at once, those of the current one have not been counted yet.
        began = np.array([self.running[slot].began for slot in slots])
        counted = began if self.spec.noise == "uniform" else steps
        pace = np.maximum(total / np.maximum(counted, 1), 1.0)
        return bool((free - total - pace * (steps - counted) <= FEW_STEPS * pace).any())

    # -- memory ---------------------------------------------------------------------------------------------------

    def caches(self) -> dict[str, Tensor]:
        """Tensors that programs read in place, by name: caches, and the page tables as they are now."""
        self._tables.write(self.running)
        packed = {} if self.packed is None else self.packed.tensors()
        return {**self._tables.of(0), **self.kv.tensors(), **packed}

    def _settle(self, slots: Sequence[int]) -> None:
        """Give back the pages that only the prompts of these slots needed, where rings have more of them."""
        if not self.kv.rings or not slots:
            return
        for slot in slots:
            for handle in self.running[slot].handles:
                self.kv.settle(handle, self.running[slot].prompt, self._step_rows(slot))
        self._tables.changed(slots)

    def _step_rows(self, slot: int) -> int:
        return self.running[slot].request.step_rows(self.shape.block, self.spec)

    def _release(self, slots: Sequence[int]) -> None:
        """Give back the pages of these slots that no step after the launched one reads, if it packs the kept keys."""
        if self.packed is None or not self.causal:
            return
        assert self._last is not None
        for slot in slots:
            one = self.running[slot]
            first = self.first_cached(len(one.request.ids))
            if first and self._last.action[slot] == SELECT:
                for handle in one.handles:
                    self.kv.release(handle, first)
                self._tables.changed([slot])

    def first_cached(self, prompt: int) -> int:
        """See `first_cached`."""
        return first_cached(prompt, self.shape.block, self.spec, self.packed)

    def _begin(self, requests: Sequence[Request], device: torch.device) -> DecodeState:
        kv = None if self.packed is None else self.packed.plan
        config, plan = self.config, self.plan
        return begin(
            requests, self.spec, config.policy, self.shape, plan=plan, kv=kv, device=device, adjusts=config.adjusts
        )
