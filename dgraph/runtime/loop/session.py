"""Decoding with block-causal and bidirectional diffusion models around compiled programs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.program import Program
from dgraph.lowering.traced import TraceCompiler
from dgraph.ops.kv.scales import unscaled
from dgraph.ops.statistics import kept_rows
from dgraph.plans.block_cache import BlockCache
from dgraph.plans.kv import PAGES, KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.ranks.groups import Alone, Group
from dgraph.runtime import checks
from dgraph.runtime.constraints.vocabulary import Vocabulary, vocabulary_of
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.kv.packed import PackedKV
from dgraph.runtime.kv.store import KVStore, check_page_size
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.rank_check import agree, agree_on_step
from dgraph.runtime.loop.step_inputs import declared, given_inputs
from dgraph.runtime.loop.step_report import Report, broken
from dgraph.runtime.loop.transcript import Transcripts
from dgraph.runtime.loop.transition_cache import Transitions
from dgraph.runtime.loop.variants import variant_of
from dgraph.runtime.loop.warm_up import Rehearsal, rehearsals
from dgraph.runtime.policies import Policy, PolicyMix, statistics_of, traits_of
from dgraph.runtime.request_checks import check_canvases, check_request
from dgraph.runtime.requests import Programs, Request, Shape, settled_end, step_rows
from dgraph.runtime.results import Ended, Generation, Progress, SequenceKV
from dgraph.runtime.stats import GenerationStats, StageCounts, StepRecord
from dgraph.spec import ModelSpec
from dgraph.types.shapes import OWN

Stopped = Callable[[Sequence[int]], bool]
PREFILL_ROWS = 32768
"""Rows of one prefill call: enough to fill any device, few enough that activations stay small."""
WARM_SHARE = 0.75
"""Share of the CUDA graph limit that a warm-up captures at most, unless steps and prompts need more."""


class BlockSession:
    """Decode prompts block by block.

    Block-causal models: full prompt blocks go through the program "prefill" once; then every step runs the program
    "step" on the rows that are pending (see `BlockCausalState`), decides what to commit and moves finished blocks on.
    Models that encode a finished block with the next token do so in a step of its own (see `EncodeDenoiseState`).
    Bidirectional models: every step runs "step" on the rows of the canvas that the plan names: `BidirectionalState`.
    The caches are kept between calls and grow as needed; a call that fails gives its pages back.

    Args:
        spec: the model; a block-causal one has logit_shift 0, or encodes blocks with the next token.
        programs: "step", and "prefill" for a block-causal model. The step outputs token and confidence (margin and
            entropy for policies that read them), or logits; and kept, reached and score if it evicts rows.
        block_cache: decoded rows of the block that are not recomputed: "off" (none), "dc" or "dc+" (`ready_columns`).
        recommit: commit a decoded block by recomputing all of its rows (exact); False: only those that are not
            cached yet (as LMDeploy does).
        plan: the rows that a step of a bidirectional model forwards, None for all of them; or which steps of a
            block-causal one are full (region "block"), for programs that ask.
        select_noise: give programs the input noise f32[N], uniform in [0, 1) (an ablation); None: if one reads it.
        device, page_size: of the programs; positions per page, default the block length.
        kv: which keys and values stay, for programs that read packed ones; None for all. It needs the program
            "select", for steps in which some sequence chooses.
        pool: where the transition between steps is captured as a CUDA graph; None runs it op by op. With a pool,
            batches are padded to a power of two of sequences, so that captured graphs serve later calls. The canvas is
            padded to few widths and the page table to the model's longest sequence.
        compiler: provides the compiled transition for a capture, and compiles it in a warm-up; None captures it op by
            op.
        tokenizer: says which texts tokens stand for, to requests with a constraint.
        ranks: group of processes that hold the model; None for this process alone. Each rank makes the same calls, with
            the same arguments.

    Attributes:
        variants: further programs "step" and "select", by purpose. `LOGITS`: for samplers that need logits, if the
            main programs keep none; `ADJUSTED`: for requests that adjust them; `measuring(policy)`: with the statistics
            that the policy asks for.

    Raises:
        InputError, UnknownName, LoweringError: model, programs and settings do not fit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        programs: Mapping[str, Program],
        *,
        block_cache: BlockCache = "off",
        recommit: bool = True,
        plan: RowPlan | None = None,
        kv: KVPlan | None = None,
        select_noise: bool | None = None,
        device: torch.device | str = "cpu",
        page_size: int | None = None,
        pool: GraphPool | None = None,
        compiler: TraceCompiler | None = None,
        ranks: Group | None = None,
        tokenizer: Any = None,
    ):
        self.ranks: Group = ranks or Alone()
        if select_noise is None:
            select_noise = any("noise" in program.inputs for program in programs.values())
        checks.check_session(spec, programs, block_cache, select_noise, plan, kv, recommit)
        self.plan = plan or (RowPlan() if spec.attention == "bidirectional" else None)
        self.spec, self.programs = spec, dict(programs)
        self._tokenizer = tokenizer
        self.variants: dict[str, Mapping[str, Program]] = {}
        self.block_cache: BlockCache = block_cache
        self.recommit, self.select_noise, self.pool = recommit, select_noise, pool
        self.device = torch.device(device)
        self._transitions = Transitions(pool, compiler)
        self._sequences = 1
        inputs = declared({name: program.inputs for name, program in programs.items()}).values()
        self._inputs = given_inputs(inputs)
        caches = [spec for spec in inputs if spec.per == "position"]
        written, size = programs["prefill"].inputs if "prefill" in programs else None, check_page_size(spec, page_size)
        self.kv = KVStore(caches, page_size=size, device=self.device, prefilled=written)
        entries = [spec for spec in inputs if spec.per == "packed"]
        self.packed = None if kv is None else PackedKV(entries, spec.layers, kv, self.device)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Tokens of the model, for constraints; raises `InputError` where they cannot be told."""
        return vocabulary_of(self._tokenizer, self.spec)

    @property
    def paged(self) -> bool:
        """True if the keys of every position stay in the pages, so that sequences may share them or get more."""
        return self.packed is None or self.packed.plan.kept == PAGES

    @property
    def lasting(self) -> bool:
        """True if a state or cache that lasts for a response cannot be rebuilt from the response's tokens."""
        return any(spec.reset == "response" for spec in (*self._inputs, *self.kv.declared))

    @property
    def mixes(self) -> bool:
        """True if steps can encode rows of prompts (see `Batch.mix`), False if a prompt needs a forward of its own.

        A step forwards a prompt as it does a finished block. So the model must encode blocks, or rows, beside others
        that it denoises. The rows must also find the same as in a forward of their own. So all keys are kept, in pages
        that hold every position, and no state is carried from forward to forward. A cache of which each row reads its
        own position alone gets places for these rows, too.
        """
        blocks = self.spec.attention == "block_causal" and self.spec.noise != "uniform"
        return blocks and self.packed is None and self.kv.rings.keys() <= {OWN} and not self.lasting

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        *,
        canvases: Sequence[Sequence[int | None] | None] | None = None,
        observer: Callable[[StepRecord], None] | None = None,
        keep_kv: bool = False,
        progress: Callable[[Progress], None] | None = None,
        stopped: Stopped | None = None,
        max_batch: int | None = None,
        **settings: Any,
    ) -> Generation:
        """Continue every prompt.

        A sequence ends with its first stop token (`spec.eos_ids`) or after max_new_tokens. Prompts beyond `max_batch`
        begin as earlier ones end. Results depend on neither that nor the other prompts, except for rounding in programs
        that run on another number of rows. Draws (temperature > 0) depend on the seed, the prompt's index, the position
        and the step. `observer` gets every step at the price of copies to the host.

        decoding: the settings; settings: instead, fields of a `Decoding` by keyword. canvases: fixed tokens of each
        response, None at free positions; all positions after it are free. The caller cuts texts of `decoding.stop`;
        stopped(tokens) returns True if the final tokens of a response hold one, and the response ends there.

        Raises:
            InputError: a prompt or setting that cannot be used.
            UnknownName: a setting that does not exist.
            RanksDiffer: ranks that hold the model together are called with different arguments.
        """
        chosen = Decoding.of(decoding, settings).for_model(self.spec)
        asked = {"prompts": prompts, "decoding": chosen, "canvas": canvases, "max_batch": max_batch, "keep_kv": keep_kv}
        agree(self.ranks, "generate", asked)
        ids = check_request(self.spec, prompts, chosen, max_batch)
        began, stats = time.perf_counter(), GenerationStats()
        if not ids:
            return Generation([], stats, [] if keep_kv else None)
        if keep_kv:
            checks.check_keep_kv(self.plan, self.kv.windows)
        given = check_canvases(self.spec, canvases, len(ids), chosen)
        requests = [Request.of(ids[n], chosen, n, given[n], self.spec) for n in range(len(ids))]
        fixed = self.pool is not None and observer is None
        block = chosen.block_length or self.spec.block_length
        longest = max(map(len, ids)) + chosen.max_new_tokens
        shape = self.shape(min(max_batch or len(ids), len(ids)), longest, block, fixed, chosen.open_blocks)
        batch = self.batch([chosen], shape, fixed=fixed, foresee=fixed, stats=stats, observer=observer)
        script = Transcripts(shape.slots, shape.columns, shape.width)
        waiting, ended = deque(requests), dict[int, Ended]()
        try:
            while waiting or batch.running:
                slots = batch.free[: len(waiting)]
                if slots:
                    admitted = [waiting.popleft() for _ in slots]
                    batch.admit(slots, admitted)
                    script.begin(slots, admitted)
                    self.keep_graphs()
                while batch.prefilling:
                    batch.prefill(PREFILL_ROWS)
                report = batch.turn()
                self.ranks.check()
                agree_on_step(self.ranks, stats.steps, report, stats.rows, stats.padded)
                script.write(report, list(batch.running))
                done = [slot for slot in batch.running if not report.active[slot]]
                if stopped is not None or chosen.stop_token_ids:
                    others = [slot for slot in batch.running if slot not in done]
                    done += [n for n in others if self._stopped(batch, report, script, n, stopped)]
                for slot, one in batch.running.items():
                    if report.broken[slot]:
                        raise broken(one.request, int(report.start[slot]))
                for slot in done:
                    index = batch.running[slot].request.index
                    ended[index] = self._ended(batch, report, script, slot, keep_kv)
                batch.retire(done)
                if progress is not None:
                    decoded = sum(one.decoded for one in ended.values())
                    decoded += sum(int(report.total[slot]) for slot in batch.running)
                    progress(Progress(len(ended), len(ids), decoded))
        finally:
            batch.clear()
        every = [ended[index] for index in range(len(ids))]
        for each in every:
            stats.count_sequence(each.steps, each.decoded, each.rows, each.commit_rows)
        stats.tokens = sum(len(one.token_ids) for one in every)
        stats.finish(time.perf_counter() - began)
        kept = [one.kv for one in every if one.kv is not None] if keep_kv else None
        return Generation([one.token_ids for one in every], stats, kept)

    @torch.no_grad()
    def warm_up(
        self,
        batch: int,
        tokens: int,
        progress: Callable[[int, int], None] | None = None,
        decoding: Decoding | None = None,
        **settings: Any,
    ) -> int:
        """Capture the graphs of batches of up to `batch` sequences.

        All buckets are captured of the step program, of prompts of few rows, and of steps in which sequences choose
        which keys they keep. See `dgraph.runtime.loop.warm_up`. Later batches of up to that many sequences are padded
        to it, so that they find these graphs. The transition between steps is compiled for a policy, and for the
        canvas of `tokens` positions; a block-causal model pads shorter canvases to it. Under other policies, and on
        other canvases, it runs op by op.

        Args:
            batch: sequences at a time, at least 1.
            tokens: positions per sequence, prompt and response together; KV pages, and room for packed keys, for all of
                them are made now.
            progress: called with (buckets done, buckets in all).
            decoding: how later calls decode; of the temperature it matters only whether it is above 0.
            settings: instead, fields of a `Decoding` by keyword.

        Returns:
            The number of buckets.

        Raises:
            InputError: a size out of range, no pool to capture into, or buckets of kind "exact".
        """
        chosen = Decoding.of(decoding, settings).for_model(self.spec)
        if self.pool is None:
            raise InputError("warm-up captures CUDA graphs, and this session runs without; use a GPU and graphs=True.")
        if batch < 1 or not 1 <= tokens <= self.spec.max_positions:
            raise InputError(
                f"warm-up needs a batch of at least 1 and 1 to {self.spec.max_positions} tokens per sequence, got "
                f"{batch} and {tokens}."
            )
        block, causal = self.spec.block_length, self.spec.attention == "block_causal"
        self._sequences = max(self._sequences, 1 << (batch - 1).bit_length())
        room = max(tokens, 2 * block)
        if self._transitions.compiles and causal:
            self._transitions.widen(tokens, block)
        # On a canvas of the width that later batches share, if they can. To admit requests makes their pages.
        slots = self.batch([chosen], self.shape(batch, room, block, True, chosen.open_blocks), fixed=True)
        slots.admit(range(batch), [Request([self.spec.mask_id], replace(chosen, max_new_tokens=room - 1))] * batch)
        slots.clear()
        if self.packed is not None:
            self.packed.reserve(batch, room)
        return self._record(slots, batch, room, progress=progress)

    @torch.no_grad()
    def record(self, shape: Shape, decoding: Decoding) -> int:
        """Capture the graphs of batches of a shape, whose caches exist; return the number of buckets.

        Raises:
            InputError: buckets of kind "exact".
        """
        return self._record(self.batch([decoding], shape, fixed=True), shape.slots, shape.columns)

    def compile_transition(self, shape: Shape, decoding: Decoding) -> None:
        """Compile the transition between the steps of batches of a shape, if transitions are compiled.

        It takes memory of its own, so it comes before a pool of keys and values that takes all memory.
        """
        if not self._transitions.compiles:
            return
        slots = self.batch([decoding], shape, fixed=True)
        slots.admit([0], [Request([self.spec.mask_id], replace(decoding, max_new_tokens=1))])  # makes a page
        slots.clear()
        step = Rehearsal(slots.programs.step, step_rows(shape.width, self.spec))
        self._compile(slots, step.run(slots))

    def _record(
        self, slots: Batch, sequences: int, tokens: int, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Capture the graphs, compile the transition, and return the number of buckets."""
        assert self.pool is not None
        self.keep_graphs()
        some = WARM_SHARE * (self.pool.limit - self.pool.live)
        every = rehearsals(slots, sequences, tokens, int(some))
        self.pool.preparing = True
        try:
            for done, each in enumerate(every):
                outputs = each.run(slots)
                if not done:
                    self._compile(slots, outputs)
                if progress is not None:
                    progress(done + 1, len(every))
        finally:
            self.pool.preparing = False
        return len(every)

    def _compile(self, slots: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Compile the transition after a step with such outputs, if transitions are compiled."""
        known = "script" not in slots.programs.step.inputs or slots.config.script is not None
        if self._transitions.compiles and known and "token" in outputs:
            slots.transition.compile(outputs)

    def shape(self, sequences: int, tokens: int, block: int, fixed: bool, open: int = 1) -> Shape:
        """Shape of a batch for `sequences` sequences of `tokens` positions each.

        fixed: round it up to a shape that batches share, so that graphs captured for one serve them all.
        """
        stride = self._transitions.stride(block) if fixed else block
        # A last block that is cut short has columns all the same.
        more = (open - self.spec.aligned) * block
        columns = -(-(tokens + more) // stride) * stride
        if not fixed:
            return Shape(sequences, columns, self.kv.pages_for(columns), block, open=open)
        slots = max(self._sequences, 1 << (sequences - 1).bit_length())
        return Shape(slots, columns, self.kv.pages_for(self.spec.max_positions + more), block, open=open)

    def batch(
        self,
        decodings: Sequence[Decoding],
        shape: Shape,
        *,
        fixed: bool = False,
        foresee: bool = False,
        by_block: bool = False,
        stats: GenerationStats | StageCounts | None = None,
        observer: Callable[[StepRecord], None] | None = None,
    ) -> Batch:
        """Make a batch of empty slots for requests with these decodings, or with other per-request settings.

        fixed: the transition is captured, and kept for batches of the same shape; the others as for `Batch`.

        Raises:
            InputError: decodings that the session cannot serve, or not together.
        """
        config, programs = self.batch_config(decodings, shape.block)
        return Batch(
            self.spec,
            config,
            programs,
            shape,
            self._transitions.lasting if fixed else self._transitions.passing,
            kv=self.kv,
            packed=self.packed,
            plan=self.plan,
            by_block=by_block,
            sized=self.pool is not None,
            foresee=foresee,
            stats=stats,
            observer=observer,
            vocabulary=lambda: self.vocabulary,
        )

    def batch_config(self, decodings: Sequence[Decoding], block: int) -> tuple[BatchConfig, Programs]:
        """Config and programs of steps that requests with these decodings share.

        Raises:
            InputError: as `batch`.
        """
        guides = {chosen.sampling.cfg_scale > 0 for chosen in decodings}
        for chosen in decodings:
            self.check(chosen, block)
        if len(guides) > 1:
            raise InputError("requests with and without guidance (cfg_scale) cannot share a batch.")
        sampled = any(chosen.sampling.temperature > 0 or traits_of(chosen.rule).renoises for chosen in decodings)
        policy = PolicyMix.of([chosen.rule for chosen in decodings])
        variant = variant_of(decodings)
        read = {name: program.inputs for name, program in self._variant(variant).items()}
        fixed = self.block_cache, self.recommit, self.select_noise
        config = BatchConfig(
            policy,
            *fixed,
            sampled,
            given_inputs(declared(read).values()),
            guides.pop(),
            adjusts=any(chosen.adjusts for chosen in decodings),
            penalises=any(chosen.penalises for chosen in decodings),
        )
        return config, self._programs_for(policy, variant)

    def check(self, chosen: Decoding, block: int) -> None:
        """Check a decoding. Raises `InputError` if the session's programs cannot serve it."""
        step = self._variant(variant_of([chosen]))["step"]
        checks.check_decoding(self.spec, chosen, step, block, self.block_cache, self.plan, self.packed is not None)
        if chosen.constraint is not None:
            _ = self.vocabulary  # raises, if the model has none that guides can read

    def give_back(self) -> None:
        """Drop the pool of an engine, the room for packed keys, and the CUDA graphs that read either."""
        self.kv.unlimited()
        if self.packed is not None:
            self.packed.give_back()
        self.keep_graphs()

    def keep_graphs(self) -> None:
        """Drop CUDA graphs that read caches which have been replaced since."""
        if self.pool is not None:
            self.pool.keep(self.kv.tensors() if self.packed is None else self.kv.tensors() | self.packed.tensors())

    def declare(self, chosen: Decoding) -> None:
        """Make the caches per position that requests with such a decoding need."""
        self._programs_for(chosen.rule, variant_of([chosen]))

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches that exist: pages, rings, and packed keys with their counts."""
        return self.kv.bytes + (0 if self.packed is None else self.packed.bytes)

    def _programs_for(self, policy: Policy, variant: str) -> Programs:
        """Programs of a variant, for a policy; their caches per position are made."""
        programs, asked = self._variant(variant), statistics_of(policy)
        inputs = declared({name: program.inputs for name, program in programs.items()}).values()
        self.kv.declare(spec for spec in inputs if spec.per == "position")
        if asked and "logits" in programs["step"].output_names:  # the loop measures, so it needs their cache
            self.kv.declare([kept_rows(asked, self.spec.vocab)])
        prefill = programs["prefill"] if self.spec.attention == "block_causal" else None
        return Programs(programs["step"], programs.get("select"), prefill)

    def _variant(self, variant: str) -> Mapping[str, Program]:
        if "logits" in self.programs["step"].output_names:
            return self.programs
        return {**self.programs, **self.variants.get(variant, {})}

    def _ended(self, batch: Batch, report: Report, script: Transcripts, slot: int, keep_kv: bool) -> Ended:
        """Result of a request that ended."""
        request, end = batch.running[slot].request, int(report.end[slot])
        said = script.response(slot, len(request.ids), end, request.stops(self.spec))
        steps, decoded, rows, commits = (
            int(getattr(report, name)[slot]) for name in ("counter", "total", "kept_rows", "commit_rows")
        )
        return Ended(said, steps, decoded, rows, commits, self._kv_of(batch, report, slot) if keep_kv else None)

    def _stopped(self, batch: Batch, report: Report, script: Transcripts, slot: int, texts: Stopped | None) -> bool:
        """True if the final tokens of a response, which later steps do not change, hold a stop token or text."""
        request = batch.running[slot].request
        end = settled_end(request, int(report.start[slot]), int(report.end[slot]))
        ids, found = script.until_stop(slot, len(request.ids), end, request.stops(self.spec))
        return found or (texts is not None and texts(ids))

    def _kv_of(self, batch: Batch, report: Report, slot: int) -> SequenceKV:
        one, causal = batch.running[slot], self.spec.attention == "block_causal"
        start, first = int(report.start[slot]), batch.first_cached(len(one.request.ids))
        # Every key of a bidirectional model depends on the whole canvas, so none of them is final.
        committed, written = (start, start + batch.shape.block) if causal else (0, int(report.end[slot]))
        if self.spec.two_modes:
            written = start  # of the block that begins there, none need have been forwarded
        span = one.handles[0], written, first
        has = {spec.name for spec in self.kv.declared}

        def read(kind: str, layer: int) -> Tensor:
            scale = f"{kind}_scale_{layer}"
            by = self.kv.gather(scale, *span) if scale in has else None
            return unscaled(self.kv.gather(f"{kind}_cache_{layer}", *span), by, self.spec.dtype)

        layers = [(read("k", layer), read("v", layer)) for layer in range(self.spec.layers)]
        return SequenceKV(committed, layers, first)
