"""Decoding with block-causal diffusion models around compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.program import Program
from dgraph.lowering.traced import TraceCompiler
from dgraph.ops.statistics import declare, kept_rows
from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.runtime.checks import check_request, check_rule, check_session
from dgraph.runtime.cudagraph import GraphPool
from dgraph.runtime.decode_state import BlockCache, DecodeState
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.kv import KVStore, check_page_size
from dgraph.runtime.loop import BlockLoop
from dgraph.runtime.offers import OFFERS, Moment, computed, declared, initial_states
from dgraph.runtime.pack import PackedKV
from dgraph.runtime.policies import Policy, statistics_of
from dgraph.runtime.rows import idle_rows
from dgraph.runtime.rule import Rule
from dgraph.runtime.sampling import Sampler
from dgraph.runtime.script import Script, check_script
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.runtime.transitions import Transitions
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class SequenceKV:
    """Keys and values of one sequence after its last step.

    committed: positions before it are final; those of the last block (from `committed` on) are as its steps
    left them, since nobody would read a commit. A bidirectional model has no final ones: 0. layers: per layer K and V
    [positions, Hkv, D], after RoPE. first: the position that they begin with, above 0 where only some of the keys in
    front of it are kept.
    """

    committed: int
    layers: list[tuple[Tensor, Tensor]]
    first: int = 0


@dataclass(frozen=True)
class Generation:
    """token_ids: per prompt the new tokens, without the stop token; kv: per prompt, if it was asked for."""

    token_ids: list[list[int]]
    stats: GenerationStats
    kv: list[SequenceKV] | None = None


@dataclass(frozen=True)
class Progress:
    """How far a generation is: prompts finished, prompts in all, tokens decoded so far."""

    finished: int
    prompts: int
    decoded: int


LOGITS = "logits"
"""The variant of programs that end in logits."""


def measuring(policy: Policy) -> str:
    """The variant of programs that compute the statistics which a policy asks for; "" if it asks for none."""
    return declare(statistics_of(policy))


UNREAD_STEPS = 15
"""Where transitions are captured and nobody follows the progress, steps between host reads, if the plan allows it."""


class BlockSession:
    """Decodes block by block.

    Block-causal models: full prompt blocks go through the program "prefill" once; then every step runs the program
    "step" on the rows that are pending (see `BlockCausalState`), decides what to commit and moves finished blocks on.
    Bidirectional models: every step runs "step" on the rows of the canvas that the plan names (see `CanvasState`).
    The caches are kept between calls and grow by need; a call that fails gives its pages back.

    Args:
        spec: the model; a block-causal one has logit_shift 0.
        programs: "step", and "prefill" for a block-causal model. The step outputs token and confidence (margin and
            entropy for policies that read them), or logits; and kept, reached and score if it evicts rows.
        block_cache: which decoded rows of the current block are not recomputed: "off" (none is skipped), "dc"
            or "dc+" (see `ready_columns`).
        recommit: commit a decoded block by recomputing all of its rows (exact); False: only those that are not
            cached yet (as LMDeploy does).
        plan: which rows a step of a bidirectional model forwards, None for all of them; or which steps of a
            block-causal one are full (region "block"), for programs that ask.
        select_noise: give programs the input noise f32[N], uniform in [0, 1) (random selection, an ablation);
            None: if one of them reads it.
        device: where the programs run.
        page_size: positions per page; default the block length.
        kv: which keys and values stay, for programs that read packed ones; None for all. It needs the program
            "select", for steps in which some sequence chooses.
        pool: where the transition between steps is captured as a CUDA graph; None runs it op by op. With one,
            batches are padded to a power of two of sequences, the canvas to few widths and the page table to the
            model's longest sequence, so that what was captured serves later calls.
        compiler: finds the transition compiled where it is captured, and compiles it in a warm-up; None captures it
            op by op.

    Raises `InputError`, `UnknownName` or `LoweringError` for what cannot work.

    Attributes:
        variants: further programs "step" and "select", by what they are for: `LOGITS`, samplers that need logits where
            the others keep none; `measuring` of a policy, statistics that it asks for.
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
    ):
        if select_noise is None:
            select_noise = any("noise" in program.inputs for program in programs.values())
        check_session(spec, programs, block_cache, select_noise, plan, kv)
        self.plan = plan or (RowPlan() if spec.attention == "bidirectional" else None)
        self.spec, self.programs = spec, dict(programs)
        self.variants: dict[str, Mapping[str, Program]] = {}
        self.block_cache: BlockCache = block_cache
        self.recommit, self.select_noise = recommit, select_noise
        self.device = torch.device(device)
        self.pool = pool
        self._transitions = Transitions(pool, compiler)
        self._sequences = 1
        inputs = declared({name: program.inputs for name, program in programs.items()}).values()
        given = (spec for spec in inputs if spec.carried or spec.name in OFFERS)
        self._inputs = tuple(sorted(given, key=lambda spec: spec.name))
        caches = [spec for spec in inputs if spec.per == "position"]
        self.kv = KVStore(caches, page_size=check_page_size(spec, page_size), device=self.device)
        entries = [spec for spec in inputs if spec.per == "packed"]
        self.packed = None if kv is None else PackedKV(entries, spec.layers, kv, self.device)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding | None = None,
        *,
        observer: Callable[[StepRecord], None] | None = None,
        keep_kv: bool = False,
        progress: Callable[[Progress], None] | None = None,
        max_batch: int | None = None,
        **settings: Any,
    ) -> Generation:
        """Continue every prompt.

        A sequence ends with its first stop token (`spec.eos_ids`) or after max_new_tokens. Prompts beyond
        `max_batch` run in successive batches; neither that nor the other prompts of a batch change a
        result, except for what the programs' arithmetic makes of another number of rows. Draws (temperature
        > 0) depend on the seed, the prompt's index, the position and the step. `observer` gets every step at
        the price of copies to the host.

        decoding: how; settings: instead, fields of a `Decoding` by keyword. Texts in its stop are the caller's to cut.

        Raises `InputError` for a prompt or setting that cannot be used, `UnknownName` for one that does not exist.
        """
        chosen = Decoding.of(decoding, settings)
        policy, sampler, seed, max_new_tokens = chosen.rule, chosen.sampling, chosen.seed, chosen.max_new_tokens
        block = chosen.block_length or self.spec.block_length
        ids = check_request(self.spec, prompts, chosen, max_batch)
        step, select = self._programs_for(policy, sampler)
        check_rule(policy, sampler, step, self.block_cache, self.plan)
        scripted = "script" in step.inputs
        check_script(policy, block, scripted)
        temperature = float(sampler.temperature)
        guided = sampler.cfg_scale > 0
        rule = self._rule(policy, temperature, seed, guided)
        fixed = self.pool is not None and observer is None
        if guided and self.packed is not None:
            raise InputError(
                f"cfg_scale={sampler.cfg_scale} runs every step once more without the prompt, for which this recipe "
                f"has no packed keys; use a recipe that keeps all keys, or leave cfg_scale at 0."
            )
        if keep_kv and self.plan is not None and self.plan.region.hides:
            raise InputError(
                f"keep_kv returns keys by position, but {self.plan} hides rows, whose keys do not exist; leave it out."
            )
        loop = self._loop(rule, step, select, max_new_tokens, block, sampler, fixed)
        loop = replace(loop, unread=UNREAD_STEPS if fixed and progress is None else 0, observer=observer)
        began = time.perf_counter()
        stats = GenerationStats()
        token_ids: list[list[int]] = []
        kept: list[SequenceKV] = []
        width = max_batch or max(1, len(ids))
        for first in range(0, len(ids), width):
            batch = ids[first : first + width]
            positions = [-(-(len(p) + max_new_tokens) // block) * block for p in batch]
            first_cached = [self._first_cached(len(p), block) for p in batch]
            # A block-causal model prefills what it gives back after its first step.
            causal = self.spec.attention == "block_causal"
            absent = None if causal else first_cached * (2 if guided else 1)
            both = self.kv.allocate(positions * (2 if guided else 1), absent)
            handles, twins = both[: len(batch)], both[len(batch) :]
            try:
                report = progress and partial(_report, progress, stats.decoded, first, len(ids))
                shape = self._table_shape(len(batch)) if fixed else ()
                caches = {"page_table": self.kv.page_table(handles, *shape), **self.kv.tensors()}
                if self.packed is not None:
                    self.packed.prepare(self._candidates(batch, max_new_tokens, block), len(caches["page_table"]))
                    caches |= self.packed.tensors()
                self._keep_graphs()
                unconditional = self.kv.page_table(twins, *shape) if guided else None
                if causal and any(first_cached):
                    loop = replace(loop, release=partial(self._release, handles, first_cached, caches["page_table"]))
                else:
                    loop = replace(loop, release=None)  # the batch before may have released pages
                state = loop.run(batch, first, caches, stats, report, unconditional)
                token_ids += responses(state, self.spec.eos_ids)[: len(batch)]
                if keep_kv:
                    kept += self._kv_of(handles, state)
            finally:
                for handle in reversed(both):
                    self.kv.free(handle)
        stats.tokens = sum(map(len, token_ids))
        stats.finish(time.perf_counter() - began)
        return Generation(token_ids, stats, kept if keep_kv else None)

    @torch.no_grad()
    def warm_up(
        self,
        batch: int,
        tokens: int,
        progress: Callable[[int, int], None] | None = None,
        decoding: Decoding | None = None,
        **settings: Any,
    ) -> int:
        """Capture every bucket of the step program that batches of up to `batch` sequences can meet.

        Later batches of up to that many sequences are padded to it, so that they find what was captured. The transition
        between steps is compiled for a policy, and for the canvas of so many positions; a block-causal model pads
        shorter canvases to it. Under other policies, and on other canvases, it runs op by op.

        Args:
            batch: sequences at a time, at least 1.
            tokens: positions per sequence, prompt and response together; KV pages for all of them are made now.
            progress: called with (buckets done, buckets in all).
            decoding: how later calls decode; of the temperature it matters only whether it is above 0.
            settings: instead, fields of a `Decoding` by keyword.

        Returns:
            The number of buckets.

        Raises:
            InputError: a size out of range, no pool to capture into, or buckets of kind "exact".
        """
        chosen = Decoding.of(decoding, settings)
        block, (step, _) = self.spec.block_length, self._programs_for(chosen.rule, chosen.sampling)
        if self.pool is None:
            raise InputError("warm-up captures CUDA graphs, and this session runs without; use a GPU and graphs=True.")
        if batch < 1 or not 1 <= tokens <= self.spec.max_positions:
            raise InputError(
                f"warm-up needs a batch of at least 1 and 1 to {self.spec.max_positions} tokens per sequence, got "
                f"{batch} and {tokens}."
            )
        sizes = step.bucket_sizes(batch * 2 * block)
        self._sequences = max(self._sequences, 1 << (batch - 1).bit_length())
        handles = self.kv.allocate([max(tokens, 2 * block)] * batch)
        try:
            caches = {"page_table": self.kv.page_table(handles, *self._table_shape(batch)), **self.kv.tensors()}
            if self.packed is not None:
                self.packed.prepare([tokens] * batch, self._sequences)
                caches |= self.packed.tensors()
            self._keep_graphs()
            self.pool.preparing = True
            rule = self._rule(chosen.rule, float(chosen.sampling.temperature), 0)
            state = self._beginning(rule, batch, tokens, caches["page_table"])
            idle = replace(state, active=torch.zeros_like(state.active))
            states = initial_states(self._inputs, len(state.start), self.device)
            # The largest first: the buffers that it gets serve the others.
            for done, size in enumerate(reversed(sizes)):
                rows = min(size, batch * 2 * block)
                at = Moment(idle_rows(rows, self._sequences, block, self.device), idle, rule)
                result = step({**caches, **states, **computed(step.inputs, at)}, rows)
                if progress is not None:
                    progress(done + 1, len(sizes))
            known = "token" in result.outputs and ("script" not in step.inputs or isinstance(chosen.rule, Script))
            if self._transitions.compiles and known:
                if self.spec.attention == "block_causal":
                    self._transitions.widen(tokens, block)
                # On a canvas of the width that later batches share, if they can.
                state = self._beginning(rule, batch, tokens, caches["page_table"])
                self._transitions.compile(rule, state, result.outputs)
        finally:
            self.pool.preparing = False
            for handle in reversed(handles):
                self.kv.free(handle)
        return len(sizes)

    def reserve(self, sequences: int, tokens: int) -> None:
        """Make KV pages now for so many sequences of so many positions, prompt and response together.

        Caches grow where more are needed, which replaces them: CUDA graphs that read the old ones are captured again.

        Raises `InputError` for a size out of range.
        """
        if sequences < 1 or not 1 <= tokens <= self.spec.max_positions:
            raise InputError(
                f"KV pages are made for at least 1 sequence of 1 to {self.spec.max_positions} tokens, got {sequences} "
                f"of {tokens}."
            )
        for handle in reversed(self.kv.allocate([tokens] * sequences)):
            self.kv.free(handle)

    def _programs_for(self, policy: Policy, sampler: Sampler) -> tuple[Program, Program | None]:
        """The programs "step" and "select" (None without one) that a policy and a sampler need, if there are such; what
        they keep per position has room.
        """
        programs, asked = self.programs, statistics_of(policy)
        if "logits" not in programs["step"].output_names:
            variant = LOGITS if sampler.needs_logits else measuring(policy)
            programs = {**programs, **self.variants.get(variant, {})}
        step, select = programs["step"], programs.get("select")
        inputs = declared({name: program.inputs for name, program in programs.items()}).values()
        self.kv.declare(spec for spec in inputs if spec.per == "position")
        if asked and "logits" in step.output_names:  # the loop keeps what a program would
            self.kv.declare([kept_rows(asked, self.spec.vocab)])
        return step, select

    def _keep_graphs(self) -> None:
        """Let go of CUDA graphs that read caches which have been replaced since."""
        if self.pool is not None:
            self.pool.keep(self.kv.tensors() if self.packed is None else self.kv.tensors() | self.packed.tensors())

    def _first_cached(self, prompt: int, block: int) -> int:
        """The first position whose keys are in the cache once the others that are kept are packed elsewhere."""
        if self.packed is None:
            return 0
        if self.spec.attention == "bidirectional":
            return prompt - self.spec.logit_shift
        return prompt // block * block if self.packed.plan.window == "response" else 0

    def _release(self, handles: list[int], first: list[int], table: Tensor) -> None:
        """Give the pages before each sequence's first cached position back."""
        for handle, position in zip(handles, first, strict=True):
            self.kv.release(handle, position)
        table.copy_(self.kv.page_table(handles, *table.shape))

    def _candidates(self, prompts: Sequence[Sequence[int]], new: int, block: int) -> list[int]:
        """Of each sequence, positions outside of its window, at most."""
        assert self.packed is not None
        behind = new if self.packed.plan.window == "block" else 0
        return [len(prompt) + behind for prompt in prompts]

    def _table_shape(self, batch: int) -> tuple[int, int]:
        """Rows and columns of the page table for a batch."""
        return max(self._sequences, 1 << (batch - 1).bit_length()), self.kv.pages_for(self.spec.max_positions)

    def _loop(
        self,
        rule: Rule,
        step: Program,
        select: Program | None,
        max_new_tokens: int,
        block: int,
        sampler: Sampler,
        fixed: bool,
    ) -> BlockLoop:
        """How to decode a batch. fixed: in shapes that later batches have, too."""
        return BlockLoop(
            spec=self.spec,
            prefill=self.programs["prefill"] if self.spec.attention == "block_causal" else None,
            step=step,
            select=select,
            rule=rule,
            plan=self.plan,
            kv=None if self.packed is None else self.packed.plan,
            release=None,
            max_new_tokens=max_new_tokens,
            block=block,
            advance=partial(self._transitions.lasting if fixed else self._transitions.passing, rule),
            stride=self._transitions.stride(block) if fixed else block,
            unread=0,
            sampler=sampler.begin(self.spec.mask_id),
            observer=None,
        )

    def _rule(self, policy: Policy, temperature: float, seed: int, guided: bool = False) -> Rule:
        given = self.block_cache, self.recommit, self.select_noise
        return Rule(policy, *given, temperature, seed, self._inputs, guided)

    def _beginning(self, rule: Rule, batch: int, tokens: int, table: Tensor) -> DecodeState:
        """The state before the first step of a batch that nobody asked for, with so many positions per sequence."""
        block, sampler = self.spec.block_length, Sampler(rule.temperature)
        loop = self._loop(rule, self.programs["step"], None, tokens - 1, block, sampler, fixed=True)
        return loop.begin([[self.spec.mask_id]] * batch, 0, table)

    def _kv_of(self, handles: list[int], state: DecodeState) -> list[SequenceKV]:
        found, causal = [], self.spec.attention == "block_causal"
        firsts = [self._first_cached(prompt, state.block) for prompt in state.prompt_end.tolist()]
        for handle, first, start, end in zip(handles, firsts, state.start.tolist(), state.end.tolist(), strict=False):
            # Every key of a bidirectional model depends on the whole canvas, so none of them is final.
            committed, written = (start, start + state.block) if causal else (0, end)
            span = handle, written, first
            names = ((f"k_cache_{layer}", f"v_cache_{layer}") for layer in range(self.spec.layers))
            layers = [(self.kv.gather(k, *span), self.kv.gather(v, *span)) for k, v in names]
            found.append(SequenceKV(committed, layers, first))
        return found


def responses(state: DecodeState, eos_ids: Sequence[int]) -> list[list[int]]:
    """What each finished sequence says: after its prompt, up to a stop token (left out) or max_new_tokens."""
    spans = zip(state.canvas.tolist(), state.prompt_end.tolist(), state.end.tolist(), strict=True)
    stops = frozenset(eos_ids)
    return [list(takewhile(lambda t: t not in stops, tokens[begin:end])) for tokens, begin, end in spans]


def _report(
    progress: Callable[[Progress], None], decoded: int, finished: int, prompts: int, batch: tuple[int, int]
) -> None:
    """Add what earlier batches did to what this one has done: (finished, decoded)."""
    progress(Progress(finished + batch[0], prompts, decoded + batch[1]))
