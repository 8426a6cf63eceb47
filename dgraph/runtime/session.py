"""Decoding with block-causal diffusion models around compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor

from dgraph.lowering.program import Program
from dgraph.runtime.checks import check_request, check_session
from dgraph.runtime.kv import KVStore
from dgraph.runtime.loop import BlockLoop
from dgraph.runtime.policies import Policy
from dgraph.runtime.state import BlockCache, StepState
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class SequenceKV:
    """Keys and values of one sequence after its last step.

    committed: positions before it are final; those of the last block (from `committed` on) are as its steps
    left them, since nobody would read a commit. layers: per layer K and V [committed + B, Hkv, D], after
    RoPE.
    """

    committed: int
    layers: list[tuple[Tensor, Tensor]]


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


class BlockSession:
    """Decodes block by block with a model whose rows see their own block and earlier ones.

    Full prompt blocks go through the program "prefill" once; then every step runs the program "step" on the
    rows that are pending (see `StepState`), decides what to commit and moves finished blocks on. The caches
    are kept between calls and grow by need; a call that fails gives its pages back.

    Args:
        spec: the model; attention "block_causal" and logit_shift 0.
        programs: "prefill" and "step". The step outputs token and confidence, or logits; and kept, progress
            and score if it evicts rows.
        block_cache: which decoded rows of the current block are not recomputed: "off" (none is spared), "dc"
            or "dc+" (see `ready_columns`).
        refresh: commit a decoded block by recomputing all of its rows (exact); False: only those that are not
            cached yet (as LMDeploy does).
        select_noise: give programs the input noise f32[N], uniform in [0, 1) (random selection, an ablation);
            None: if one of them reads it.
        device: where the programs run.
        kv_dtype: dtype of the caches; default the model's.
        page_size: positions per page; default the block length.

    Raises `InputError`, `UnknownName` or `LoweringError` for what cannot work.
    """

    def __init__(
        self,
        spec: ModelSpec,
        programs: Mapping[str, Program],
        *,
        block_cache: BlockCache = "off",
        refresh: bool = True,
        select_noise: bool | None = None,
        device: torch.device | str = "cpu",
        kv_dtype: torch.dtype | None = None,
        page_size: int | None = None,
    ):
        if select_noise is None:
            select_noise = any("noise" in program.input_names for program in programs.values())
        check_session(spec, programs, block_cache, select_noise)
        self.spec, self.programs = spec, dict(programs)
        self.block_cache: BlockCache = block_cache
        self.refresh, self.select_noise = refresh, select_noise
        self.device = torch.device(device)
        self.kv = KVStore.for_spec(spec, page_size=page_size, dtype=kv_dtype, device=self.device)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        policy: Policy,
        block_length: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        observer: Callable[[StepRecord], None] | None = None,
        keep_kv: bool = False,
        progress: Callable[[Progress], None] | None = None,
        max_batch: int | None = None,
    ) -> Generation:
        """Continue every prompt.

        A sequence ends with its first stop token (`spec.eos_ids`) or after max_new_tokens. Prompts beyond
        `max_batch` run in successive batches; neither that nor the other prompts of a batch change a
        result, except for what the programs' arithmetic makes of another number of rows. Draws (temperature
        > 0) depend on `seed`, the prompt's index, the position and the step. `observer` gets every step at
        the price of copies to the host.

        Raises `InputError` for a prompt or setting that cannot be used.
        """
        block = self.spec.block_length if block_length is None else block_length
        ids = check_request(
            self.spec,
            prompts,
            max_new_tokens=max_new_tokens,
            block_length=block,
            temperature=temperature,
            max_batch=max_batch,
        )
        step = self.programs["step"]
        loop = BlockLoop(
            spec=self.spec,
            prefill=self.programs["prefill"],
            step=step,
            block_cache=self.block_cache,
            refresh=self.refresh,
            select_noise=self.select_noise,
            max_new_tokens=max_new_tokens,
            policy=policy,
            block=block,
            temperature=float(temperature),
            seed=seed,
            observer=observer,
        )
        began = time.perf_counter()
        stats = GenerationStats(last_stage=step.stage_names[-1])
        token_ids: list[list[int]] = []
        kept: list[SequenceKV] = []
        width = max_batch or max(1, len(ids))
        for first in range(0, len(ids), width):
            batch = ids[first : first + width]
            handles = self.kv.allocate([-(-(len(p) + max_new_tokens) // block) * block for p in batch])
            try:
                report = progress and partial(_report, progress, stats.decoded, first, len(ids))
                caches = {"page_table": self.kv.page_table(handles), **self.kv.tensors()}
                state = loop.run(batch, first, caches, stats, report)
                token_ids += responses(state, self.spec.eos_ids)
                if keep_kv:
                    kept += self._kv_of(handles, state)
            finally:
                for handle in reversed(handles):
                    self.kv.free(handle)
        stats.tokens = sum(map(len, token_ids))
        stats.finish(time.perf_counter() - began)
        return Generation(token_ids, stats, kept if keep_kv else None)

    def _kv_of(self, handles: list[int], state: StepState) -> list[SequenceKV]:
        starts = state.start.tolist()
        return [SequenceKV(s, self.kv.gather(h, s + state.block)) for h, s in zip(handles, starts, strict=True)]


def responses(state: StepState, eos_ids: Sequence[int]) -> list[list[int]]:
    """What each finished sequence says: after its prompt, up to a stop token (left out) or max_new_tokens."""
    spans = zip(state.canvas.tolist(), state.prompt_end.tolist(), state.end.tolist(), strict=True)
    stops = frozenset(eos_ids)
    return [list(takewhile(lambda t: t not in stops, tokens[begin:end])) for tokens, begin, end in spans]


def _report(
    progress: Callable[[Progress], None], decoded: int, finished: int, prompts: int, batch: tuple[int, int]
) -> None:
    """Add what earlier batches did to what this one has done: (finished, decoded)."""
    progress(Progress(finished + batch[0], prompts, decoded + batch[1]))
