"""Turns of the engine: the work between two steps, in one thread and without waiting for other threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgraph.engine.io.detokenizer import Shown, Writer
from dgraph.engine.io.events import Draft, Event, Usage
from dgraph.engine.io.tickets import EngineRequest, Sink, Totals
from dgraph.engine.io.timings import Served
from dgraph.engine.memory.pools import Holding
from dgraph.engine.memory.prefix_cache import PrefixCache
from dgraph.engine.scheduling.demand import job_of
from dgraph.engine.scheduling.jobs import Facts, Plan, ScheduledRequest
from dgraph.engine.scheduling.scheduler import Scheduler
from dgraph.errors import InputError, PoolFull
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.loop.step_report import Report, broken
from dgraph.runtime.loop.transcript import Transcripts
from dgraph.runtime.policies import PolicyMix, carries_of, kind_of, policy_key, traits_of
from dgraph.runtime.request_checks import room_of
from dgraph.runtime.requests import (
    Request,
    Shape,
    prefilled_positions,
    settled_end,
)
from dgraph.runtime.sampling.stops import Decoder
from dgraph.runtime.stats import StageCounts

PROMPT_SHARE = 4
"""Prompts that have a forward of their own get at least one in `PROMPT_SHARE` of the rows of a step. A forward of few
rows takes as long as reading the weights does.
"""


class EngineCore:
    """Take requests through the slots of a batch, turn by turn.

    While a step runs on the device, a turn plans the next one from what is known. So facts are one step old where the
    host plans; the device grants rows by the exact numbers (see `DecodeState.grant`).

    Args:
        session: the programs and the memory.
        shape: of the batch.
        scheduler: decides which requests run.
        clock: seconds.
        prompt_rows: of a forward that prompts have of their own, at most.
        by_block: see `Batch`.
        prefix: keeps keys of prompts; None not to.
        tokenizer: makes text of ids; None for no text.
        prepare: lowers what requests with these decodings need, unless that was done.
    """

    def __init__(
        self,
        session: BlockSession,
        shape: Shape,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        prompt_rows: int,
        by_block: bool,
        prefix: PrefixCache | None,
        tokenizer: Decoder | None,
        prepare: Callable[[Sequence[Decoding]], None],
    ):
        self.session, self.shape, self.scheduler, self.clock = session, shape, scheduler, clock
        self.by_block, self.prefix, self.tokenizer, self._prepare = by_block, prefix, tokenizer, prepare
        self._prompt_rows = prompt_rows
        self.tickets: dict[int, EngineRequest] = {}
        self.totals, self.stages = Totals(), StageCounts()
        self._batch: Batch | None = None
        self._decodings: list[Decoding] = []
        self._script = Transcripts(shape.slots, shape.columns, shape.width)
        self._orders: list[int] | None = None
        self._told: _Told | None = None
        self._resumes = by_block and session.recommit and not session.lasting

    @property
    def max_tokens(self) -> int:
        """Positions that a request can have, prompt and response together, in the model and in the pool of keys."""
        session, block, open = self.session, self.shape.block, self.shape.open
        spec, budgets = session.spec, self.scheduler.budgets
        found = min(self.shape.columns - (open - spec.aligned) * block, room_of(spec, block))
        if not session.paged:  # it keeps pages of a part of the keys alone
            return found
        held = budgets.pages * session.kv.page_size // block * block
        return min(found, held - (block if spec.encoding == "causal" else 0))

    # -- before a request is taken: in callers' threads, without the engine's lock -------------------------------------

    def check(self, chosen: Decoding) -> None:
        """Raise `InputError` for a decoding that the model cannot be served with."""
        self._prepare([chosen])
        self.session.check(chosen, self.shape.block)

    def fits(self, ticket: EngineRequest) -> None:
        """Raise `InputError` for a request that would never fit."""
        self.scheduler.check(self._job(ticket))

    def ticket(
        self,
        name: str,
        number: int,
        request: Request,
        sink: Sink,
        draft: bool,
        priority: int,
        arrived: float | None = None,
    ) -> EngineRequest:
        """Make a ticket of a request. arrived: seconds on the clock by which it is scheduled; None for now."""
        keep = request.decoding.include_stop_str_in_output
        tokenizer = Shown(self.tokenizer, request.shown) if self.tokenizer and request.shown else self.tokenizer
        writer = Writer(tokenizer, request.decoding.stop, request.decoding.min_tokens, keep)
        times = Served(self.clock() if arrived is None else arrived, math.nan, math.nan, math.nan, 0)
        return EngineRequest(name, number, request, sink, writer, draft, priority, request, times)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def take(self, ticket: EngineRequest) -> None:
        """Queue a request that `fits`."""
        self.scheduler.submit(self._job(ticket), ticket.times.arrived)
        self.tickets[ticket.number] = ticket

    def plan(self, cancelled: Sequence[int], now: float | None = None) -> Plan:
        """Decide what the next step is to do, after ending the requests that were cancelled.

        now: seconds on the clock by which requests are scheduled; None to look at it.
        """
        for number in cancelled:
            ticket = self.tickets.get(number)
            if ticket is not None:
                self._end(ticket, "cancelled")
        return self.scheduler.plan(self.clock() if now is None else now, *self.free)

    def turn(self, plan: Plan) -> Report | None:
        """Carry out a plan; None if no request runs. Admits and prefills requests, finishes the step that runs, and
        launches the next, which may encode prompts as well.
        """
        self._admit([self.tickets[job.id] for job in plan.admit if job.id in self.tickets])
        batch = self._batch
        if batch is None:
            return None
        if self.by_block:
            self._extend(batch)
        members = [self.tickets[number] for number in plan.order if number in self.tickets]
        members = [ticket for ticket in members if ticket.slot >= 0]
        left = {ticket.slot: batch.running[ticket.slot].left for ticket in members}
        self._prefill(batch, members)
        ready = [slot for slot in left if batch.running[slot].ready]
        if ready != self._orders:
            batch.order(ready)
            self._orders = ready
        if not batch.running and not batch.busy:
            return None
        report = batch.turn()
        encoded = {slot: rows - batch.running[slot].left for slot, rows in left.items()}
        self.totals.mixed_rows += sum(rows for slot, rows in encoded.items() if batch.running[slot].mixed)
        self._keep(batch, [ticket for ticket in members if encoded[ticket.slot]])
        self._update_scheduler(plan, members, encoded, report)
        return report

    def apply_report(self, report: Report) -> None:
        """Pass on the contents of a report: tokens that are final, ends, and errors."""
        batch = self._batch
        assert batch is not None
        running = [t for t in self.tickets.values() if t.slot >= 0]
        self._script.write(report, [ticket.slot for ticket in running])
        failed = batch.failed
        for ticket in running:
            slot = ticket.slot
            if slot in failed:
                self._end(ticket, "error", error=failed[slot])
            elif report.broken[slot]:
                if self.prefix is not None:
                    self.prefix.forget(self._prompt(ticket))
                self._end(ticket, "error", error=broken(ticket.request, int(report.start[slot])))
            else:
                self._pass_on(ticket, report)

    def fail(self, error: Exception) -> None:
        """End every request with an error, whatever state the batch is in; then call `close`."""
        for ticket in list(self.tickets.values()):
            self.scheduler.cancel(ticket.number)
            self._last(ticket, "error", "", error)

    def close(self) -> None:
        """Give everything back."""
        if self._batch is not None:
            self._batch.clear()
        if self.prefix is not None:
            self.prefix.clear()

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _admit(self, tickets: list[EngineRequest]) -> None:
        if not tickets:
            return
        self._refuse_unlike(tickets)
        batch = self._ready_for([ticket.request.decoding for ticket in tickets])
        for ticket in list(tickets):
            if (error := batch.refused(ticket.request.decoding.rule)) is not None:
                tickets.remove(ticket)
                self._end(ticket, "error", error=error)
        for ticket in tickets:
            shared = self.prefix.look_up(self._prompt(ticket)) if self.prefix is not None else ()
            ticket.going_on = replace(ticket.going_on, shared=shared)
        slots = [self.scheduler.running[ticket.number].slot for ticket in tickets]
        try:
            batch.admit(slots, [ticket.going_on for ticket in tickets])
        except PoolFull:
            # Pages that were spare when this was planned are shared by now; all of them wait for another turn.
            for ticket in tickets:
                self.scheduler.requeue(ticket.number)
            return
        now = self.clock()
        self._script.begin(slots, [ticket.going_on for ticket in tickets])
        self.session.keep_graphs()
        for slot, ticket in zip(slots, tickets, strict=True):
            ticket.slot = slot
            if math.isnan(ticket.times.admitted):
                ticket.times.admitted = now
            if not ticket.said:
                ticket.cached = batch.running[slot].prefilled

    def _refuse_unlike(self, tickets: list[EngineRequest]) -> None:
        """End requests whose rules cannot share the batch of the others, as with two statistics of one name."""
        if self._batch is not None and not self._batch.running and not self._batch.busy:
            self._decodings = []
        rules = {policy_key(kind_of(chosen.rule)): chosen.rule for chosen in self._decodings}
        for ticket in list(tickets):
            rule = ticket.request.decoding.rule
            if (kind := policy_key(kind_of(rule))) in rules:
                continue
            try:
                PolicyMix.of([*rules.values(), rule])
            except InputError as error:
                tickets.remove(ticket)
                self._end(ticket, "error", error=error)
            else:
                rules[kind] = rule

    def _ready_for(self, decodings: list[Decoding]) -> Batch:
        """The batch, made ready for the decodings of new requests as well as for those that run."""
        known = {self._like(chosen) for chosen in self._decodings}
        new = {self._like(chosen): chosen for chosen in decodings if self._like(chosen) not in known}
        if self._batch is None:
            self._decodings = list(new.values())
            self._prepare(self._decodings)
            self._batch = self.session.batch(
                self._decodings, self.shape, fixed=True, foresee=True, by_block=self.by_block, stats=self.stages
            )
            self._batch.lenient = True
        elif new:
            self._decodings += new.values()
            self._prepare(self._decodings)
            self._batch.decode_as(*self.session.batch_config(self._decodings, self.shape.block))
        return self._batch

    @staticmethod
    def _like(chosen: Decoding) -> Any:
        """A value that is equal for decodings that one batch serves without any change."""
        sampler = chosen.sampling
        adjusts = chosen.adjusts, chosen.penalises
        return policy_key(kind_of(chosen.rule)), sampler.temperature > 0, chosen.needs_logits, adjusts

    def _extend(self, batch: Batch) -> None:
        """Get pages for the blocks that each sequence may forward after the next step.

        The youngest request gives way if there are too few.
        """
        for ticket in sorted((t for t in self.tickets.values() if t.slot >= 0), key=lambda t: t.number):
            while ticket.slot >= 0:
                try:
                    one = batch.running[ticket.slot]
                    batch.extend(ticket.slot, one.request.reach(one.start, self.shape.block))
                    break
                except PoolFull:
                    victim = self.scheduler.victim()
                    assert victim is not None, "a request that runs is known to the scheduler"
                    self._give_way(batch, self.tickets[victim.job.id])

    def _give_way(self, batch: Batch, ticket: EngineRequest) -> None:
        """Take a request's pages; it comes back later and gives the same tokens."""
        self.totals.preempted += 1
        ticket.times.requeued += 1
        slot = ticket.slot
        now = again = ticket.going_on
        if self._resumes:
            # It goes on at the block that it is in: all before that is a prompt now.
            one = batch.running[slot]
            # With tokens that are fixed in later blocks, a model of two modes begins these elsewhere after a prompt.
            lasts = any(each.lasts == "sequence" for each in carries_of(now.decoding.rule))
            begins_elsewhere = self.session.spec.two_modes and any(token is not None for token in now.canvas)
            # With several open blocks, those after it are partly decoded by then.
            alone = now.decoding.open_blocks == 1
            if one.start > len(now.ids) and alone and not begins_elsewhere and not lasts:
                # A block that begins with the token of the forward before it begins with that forward again.
                steps = one.began - 1 if self.session.spec.next_token else one.began
                again = now.after(self._script.tokens(slot, len(now.ids), one.start), steps, one.end)
        batch.retire([slot])
        ticket.going_on, ticket.slot = again, -1
        ticket.rows_before, ticket.rows = ticket.rows_before + ticket.rows, 0
        self.scheduler.requeue(ticket.number, self._job(ticket))

    def _prompt(self, ticket: EngineRequest) -> list[int]:
        """Tokens of a request that are prefilled."""
        request = ticket.going_on
        return request.known[: prefilled_positions(request, self.shape.block, self.session.spec)]

    def _prefill(self, batch: Batch, members: Sequence[EngineRequest]) -> None:
        """Encode the prompts that wait, with their first steps or in a forward of their own. Their first steps encode
        them if these fit into the rows that the other steps of the plan will probably leave. Else a forward runs a part
        of them, in the plan's order. It has those rows, and never too few to be worth a forward.
        """
        waiting = [ticket.slot for ticket in members if not batch.running[ticket.slot].ready]
        if not waiting:
            return
        most = self.shape.most_rows or 1 << 15
        decoding = [self.scheduler.running[t.number] for t in members if t.slot not in waiting]
        left = most - sum(running.needs(running.ahead - 1) for running in decoding)
        first_steps = sum(batch.running[slot].left + self.shape.block for slot in waiting)
        if first_steps > left or not batch.mix(waiting):
            batch.prefill(min(self._prompt_rows, max(most // PROMPT_SHARE, left)), waiting)

    def _keep(self, batch: Batch, tickets: Sequence[EngineRequest]) -> None:
        """Keep the encoded prompts of these requests for others; prompts with rows left to encode are passed over."""
        for ticket in tickets:
            one = batch.running[ticket.slot]
            if self.prefix is not None and not one.left:
                self.prefix.add(self._prompt(ticket), self.session.kv.owned(one.handles[0]))

    # -- reports to the scheduler --------------------------------------------------------------------------------------

    def _update_scheduler(
        self, plan: Plan, members: Sequence[EngineRequest], encoded: dict[int, int], report: Report
    ) -> None:
        """Tell the scheduler of the step before, whose results the report has; keep what is known of this one.
        encoded: rows of prompts, by slot: among those of the step, or of a forward before it.
        """
        told, rows = self._told, report.rows
        if told is not None:
            for number, slot, took, prompt in told.members:
                ticket = self.tickets.get(number)
                if ticket is None or ticket.slot != slot:
                    continue
                self.scheduler.update(told.iteration, number, self._facts(ticket, report, took, prompt))
        counts = [(max(encoded[t.slot], int(rows[t.slot])), encoded[t.slot]) for t in members]
        self._told = _Told(plan.iteration, [(t.number, t.slot, *each) for t, each in zip(members, counts, strict=True)])

    def _facts(self, ticket: EngineRequest, report: Report, took: int, prompt: int) -> Facts:
        slot, block = ticket.slot, self.shape.block
        assert self._batch is not None
        left, end = self._batch.running[slot].left, int(report.end[slot])
        if not report.active[slot]:
            return Facts(took, 0, False, 0, 0, prompt=prompt)
        start, wanted = int(report.start[slot]), int(report.wanted[slot])
        masks = min(block, end - start)
        if start == report.shown_start[slot]:
            masks = int((report.shown[slot, :masks] < 0).sum())
        job = self.scheduler.running[ticket.number].job
        refresh = left > 0 if job.chunk else wanted > job.reuse_rows
        return Facts(took, max(left, wanted), refresh, masks, max(0, -(-(end - start) // block) - 1), left, prompt)

    def _job(self, ticket: EngineRequest) -> ScheduledRequest:
        request = ticket.going_on
        held = Holding.of(request, self.session, self.shape.block, self.by_block)
        return job_of(
            ticket.number,
            request,
            self.session.spec,
            self.shape.block,
            self.session.plan,
            arrived=ticket.times.arrived,
            priority=ticket.priority,
            pages_first=held.first,
            pages_life=held.life,
            rings=held.rings,
            entries=held.entries,
        )

    @property
    def free_pages(self) -> int:
        """Pages that a request could get."""
        kv = self.session.kv
        spare = self.prefix.spare if self.prefix is not None else 0
        return kv.free_pages + spare + ((kv.limit or kv.pages) - kv.pages)

    @property
    def free(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Pages, pages of each ring, and packed entries of each group of layers alike that a request could get."""
        packed = self.session.packed
        return self.free_pages, self.free_rings, (packed.free or ()) if packed is not None else ()

    @property
    def free_rings(self) -> tuple[int, ...]:
        """Pages of each ring that a request could get."""
        return tuple(ring.free_pages for ring in self.session.kv.rings.values())

    # -- reports to callers --------------------------------------------------------------------------------------------

    def _pass_on(self, ticket: EngineRequest, report: Report) -> None:
        """Pass on the tokens of one request that have become final."""
        slot, request = ticket.slot, ticket.request
        ticket.rows = int(report.kept_rows[slot])
        ended = not report.active[slot]
        end = int(report.end[slot])
        reach = end if ended else settled_end(request, int(report.start[slot]), end)
        known = len(request.ids) + len(ticket.said)
        ids, stop = self._script.until_stop(slot, known, reach, request.stops(self.session.spec))
        ticket.said += ids
        ticket.steps += self._script.steps(slot, known, known + len(ids))
        ticket.confidence += self._script.confidence(slot, known, known + len(ids))
        if math.isnan(ticket.times.first) and len(ticket.said) >= self._first_block(ticket.request):
            ticket.times.first = self.clock()
        text, draft = ticket.writer.write(ids) if ids else "", self._draft(ticket, report)
        if ticket.writer.stopped or stop:
            self._end(ticket, "stop", text, draft=draft)
        elif ended:
            self._end(ticket, "length", text, draft=draft)
        elif (final := ticket.writer.final) > ticket.told or text or draft is not None:
            ticket.sink(self._event(ticket, text, final, draft))

    def _draft(self, ticket: EngineRequest, report: Report) -> Draft | None:
        """The open blocks as a step left them; None if the request wants no drafts, or has been told of that step."""
        slot, request, step = ticket.slot, ticket.request, int(report.counter[ticket.slot])
        if not ticket.draft or step <= ticket.drafted:
            return None
        ticket.drafted, start = step, int(report.shown_start[slot])
        first = max(start, len(request.ids))
        at = slice(first - start, min(self.shape.width, int(report.end[slot]) - start))
        shown, sure, kept = (tuple(each[slot, at].tolist()) for each in (report.shown, report.confidence, report.kept))
        return Draft(first - len(request.ids), shown, sure, kept, step)

    def _first_block(self, request: Request) -> int:
        """Tokens of a response that lie in its first block; one under an autoregressive rule."""
        block = 1 if traits_of(request.decoding.rule).autoregressive else self.shape.block
        filled = len(request.ids) % block if self.session.spec.aligned else 0
        return min(block - filled, request.decoding.max_new_tokens)

    def _event(self, ticket: EngineRequest, text: str, final: int, draft: Draft | None = None) -> Event:
        """Event with a text, and the tokens before `final` that were not told yet."""
        new = slice(ticket.told, final)
        ids, steps, sure = tuple(ticket.said[new]), tuple(ticket.steps[new]), tuple(ticket.confidence[new])
        ticket.told = final
        rows = ticket.rows_before + ticket.rows
        usage = Usage(len(ticket.request.ids), final, ticket.cached, max(ticket.steps, default=0), rows)
        return Event(ticket.id, text, ids, steps, sure, usage, draft)

    def _end(
        self,
        ticket: EngineRequest,
        reason: str,
        text: str = "",
        error: Exception | None = None,
        draft: Draft | None = None,
    ) -> None:
        """Take a request out, waiting or running, and tell the rest of its response. Tokens that are not final are left
        out if the request was cancelled or failed.
        """
        if ticket.slot >= 0:
            assert self._batch is not None
            self._batch.retire([ticket.slot], clear=reason == "error")
        if reason in ("cancelled", "error"):
            self.scheduler.cancel(ticket.number)
            self._last(ticket, reason, text, error)
            return
        self.scheduler.finish(ticket.number)
        if math.isnan(ticket.times.first):
            ticket.times.first = self.clock()
        text += ticket.writer.end()
        self._last(ticket, "stop" if ticket.writer.stopped else reason, text, None, draft)

    def _last(
        self, ticket: EngineRequest, reason: str, text: str, error: Exception | None, draft: Draft | None = None
    ) -> None:
        """Tell the end of a request, and count it."""
        del self.tickets[ticket.number]
        event = self._event(ticket, text, ticket.writer.final, draft)
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        self.totals.prompt_tokens += event.usage.prompt_tokens
        self.totals.completion_tokens += event.usage.completion_tokens
        ticket.times.ended, ticket.times.tokens = self.clock(), event.usage.completion_tokens
        ticket.sink(replace(event, finish_reason=reason, served=ticket.times, error=error))


@dataclass(frozen=True)
class _Told:
    """Record of a step that runs. iteration: the number of its plan. members: of each request its number, its slot, the
    rows that it forwards, and how many of these are rows of its prompt.
    """

    iteration: int
    members: list[tuple[int, int, int, int]]
