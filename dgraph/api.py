"""The pipeline: capture -> canonicalise -> passes, verified after each -> stages -> lower -> session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.cache.store import open_store
from dgraph.errors import InputError, UnknownName
from dgraph.families import Model, resolve
from dgraph.frontend.frozen import captured
from dgraph.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.chunks import CHUNK_ROWS
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.kernels import Kernels
from dgraph.lowering.plan import run_steps
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.traced import TraceCompiler
from dgraph.lowering.tuning import Tuning
from dgraph.passes.base import Report
from dgraph.phases import graph_of_phase, rewrite
from dgraph.private.triton import target_of
from dgraph.recipes import RECIPES, Recipe, build, check_recipe
from dgraph.runtime.cudagraph import GraphPool
from dgraph.runtime.policies import Policy, chosen_policy
from dgraph.runtime.sampling import Sampler, sampler_of
from dgraph.runtime.session import BlockSession, Progress, SequenceKV
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.runtime.stops import check_stops, trim
from dgraph.spec import ModelSpec


def load(
    name: str | Path, dtype: torch.dtype | None = None, device: str | torch.device | None = None, **facts: Any
) -> Model:
    """Load an embedded model by name or a checkpoint folder by path.

    Args:
        name: of an embedded model, or the path of a folder.
        dtype, device: of the weights, and where they go; see `dgraph.families.resolve`.
        facts: fields of `ModelSpec` that hold instead of what the folder says, e.g. `block_length=`.

    Raises:
        UnknownName, CheckpointError: no such model, or a damaged folder.
        InputError: a fact is missing, which can be given, or out of range.
    """
    return resolve(name, dtype, device, **facts)


def adopt(model: Any, **facts: Any) -> Model:
    """Adopt a model object of a known family without copying its tensors.

    Args:
        model: a native transformers Llama, Qwen2, Qwen3 or Qwen3-MoE, or a remote-code LLaDA, Dream, SDAR, SDAR-MoE or
            LLaDA2.
        facts: fields of `ModelSpec` that the object's config does not know, e.g. `mask_id=`.

    Raises:
        CaptureError: no family adopts it.
        InputError: a fact is missing (a model without a mask token) or out of range.
    """
    return resolve(model, **facts)


def capture(model: Any, **facts: Any) -> Graph:
    """Capture a model's forward in canonical form; it comes from the user's artifact cache where that has it.

    Args:
        model: the name of an embedded model, a checkpoint folder, a model object, or a `Model`.
        facts: as for `adopt`.

    Returns:
        A verified graph over a padded batch [b, t].

    Raises:
        CaptureError: the model cannot be captured; the message names the op, the module and the line.
    """
    found = resolve(model, **facts)
    return captured(found.module, found.spec, found.prefix, open_store())[0]


def recipe(name: str, spec: ModelSpec, **options: Any) -> Recipe:
    """A recipe as a value.

    Raises:
        UnknownName: an unknown recipe or option; the message has the closest matches.
        InputError: an option out of range.
    """
    return build(RECIPES, name, spec, options)


@dataclass(frozen=True)
class Result:
    """What `generate` returns.

    Attributes:
        texts: per prompt the response text; None without a tokenizer.
        token_ids: per prompt the response ids, the stop token left out.
        stats: counts and times; see `GenerationStats`.
        kv: per prompt its keys and values, if `keep_kv` was set.
    """

    texts: list[str] | None
    token_ids: list[list[int]]
    stats: GenerationStats
    kv: list[SequenceKV] | None = None


WARMUPS = ("lazy", "full")
"""When CUDA graphs are captured."""


class Optimized:
    """A model under a recipe, ready to generate.

    Attributes:
        model: what was captured.
        spec: its facts.
        recipe: the recipe as a value.
        phases: per phase its graphs and reports.
        compiler: what made the regions; its `compiled`, `loaded` and `reused` say how many.
        graph_pool: the CUDA graphs of the stages, captured as their buckets are met; None where there are none.
        tuning: plans of kernels that were chosen by timing them; None where kernels take their own.
        kernels: the compiled kernels of our ops; its `compiled` names those that Triton compiled for this program.
        transitions: compiles what lies between two steps where it is captured; None where it runs op by op.
        programs: the lowered program of each phase.
    """

    def __init__(
        self,
        model: Model,
        captured: Graph,
        recipe: Recipe,
        compiler: RegionCompiler,
        buckets: Buckets,
        graphs: bool = True,
        tuning: Tuning | None = None,
        kernels: Kernels | None = None,
        transitions: TraceCompiler | None = None,
    ):
        self.model, self.spec, self.recipe, self.captured = model, model.spec, recipe, captured
        self.phases = rewrite(captured, recipe)
        self.compiler, self._buckets, self.tuning, self.transitions = compiler, buckets, tuning, transitions
        self.kernels = kernels or Kernels(target_of(captured.device), None)
        self.graph_pool = GraphPool() if graphs and captured.device.type == "cuda" else None
        self.programs = {name: self._lower(phase.graph, name == "step") for name, phase in self.phases.items()}
        self._session = BlockSession(
            self.spec,
            self.programs,
            block_cache=recipe.block_cache,  # type: ignore[arg-type]
            recommit=recipe.recommit,
            plan=recipe.plan,
            kv=recipe.kv,
            device=captured.device,
            page_size=_page_size(self.spec.block_length, captured.device),
            pool=self.graph_pool,
            compiler=transitions,
        )

    def _lower(self, graph: Graph, captured: bool = True) -> LoweredProgram:
        if not captured or self.graph_pool is None:
            return LoweredProgram(graph, self.compiler, self._buckets, run_steps, self.tuning)
        # The steps of a block-causal model forward blocks, of whatever number of sequences: all of them are captured.
        chunk_rows = None if self.spec.attention == "block_causal" else CHUNK_ROWS
        return LoweredProgram(graph, self.compiler, self._buckets, self.graph_pool.runner, self.tuning, chunk_rows)

    @property
    def report(self) -> dict[str, tuple[Report, ...]]:
        """Per phase what each pass did."""
        return {name: phase.reports for name, phase in self.phases.items()}

    def graph(self, phase: str = "step", after: str | None = None) -> Graph:
        """The graph of a phase, at its end or behind one of its passes.

        Raises:
            UnknownName: no such phase or pass.
        """
        return graph_of_phase(self.phases, phase, after)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[Sequence[int]] | Tensor | None = None,
        max_new_tokens: int = 128,
        threshold: float | None = None,
        steps: int | None = None,
        policy: str | Policy | None = None,
        block_length: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        sampler: Sampler | str | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
        max_batch: int | None = None,
        keep_kv: bool = False,
        observer: Callable[[StepRecord], None] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Result:
        """Continue prompts; each result is what the prompt alone would give.

        Args:
            prompts: one text or several, framed by the model's chat template.
            input_ids: instead of texts, ids per prompt, used as they are (i64[b, t] or a list of lists).
            max_new_tokens: length limit of a response.
            threshold: commit tokens whose confidence is above it, in (0, 1]; the default is 0.9.
            steps: instead of a threshold, the number of steps per block.
            policy: a decoding rule by name ("dream_entropy", "llada2.0", see `dgraph.policies`), which threshold and
                steps then set options of, or one that you made.
            block_length: rows denoised together; default and trained value: the model's.
            temperature: 0 takes the most likely token; above, tokens are drawn.
            top_p, top_k: draw from the most likely tokens only (1 and 0: from all).
            sampler: instead of the three above, everything about how tokens are taken from logits: a published setting
                by name ("dream": top_k 50, as its own generation has it), or a `Sampler` with suppressed ids,
                penalties, your own logits processors.
            stop: texts that end a response where they first occur; they are left out.
            seed: of the draws.
            max_batch: prompts per batch; None for all at once.
            keep_kv: return each sequence's keys and values.
            observer: called with a record of every step; slows decoding.
            progress: called after every step.

        Raises:
            UnknownName: an unknown policy, or an option that it has not.
            InputError: a prompt or setting that cannot be used; nothing has run then.
        """
        if (prompts is None) == (input_ids is None):
            raise InputError("give either prompts (texts) or input_ids, not both and not neither.")
        check_stops(stop)
        if stop and self.model.tokenizer is None:
            raise InputError(
                f"{self.model.name} came without a tokenizer, so texts in stop mean nothing; leave it out."
            )
        chosen = chosen_policy(policy, threshold, steps)
        taking = _sampler(sampler, temperature, top_p, top_k)
        ids = self._encode(prompts) if prompts is not None else _as_lists(input_ids)
        if taking.needs_logits:
            self._keep_logits()
        with self.kernels.kept():
            generation = self._session.generate(
                ids,
                max_new_tokens=max_new_tokens,
                policy=chosen,
                block_length=block_length,
                sampler=taking,
                seed=seed,
                max_batch=max_batch,
                keep_kv=keep_kv,
                observer=observer,
                progress=progress,
            )
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return Result(None, generation.token_ids, generation.stats, generation.kv)
        cut = [trim(tokenizer, ids, stop) for ids in generation.token_ids]
        return Result([c.text for c in cut], [c.token_ids for c in cut], generation.stats, generation.kv)

    def _keep_logits(self) -> None:
        """Lower the step once more, for samplers that need its logits, unless it keeps them anyway."""
        if "logits" in self._session.programs or "logits" in self.programs["step"].output_names:
            return
        phases = rewrite(self.captured, self.recipe.keeping_logits())
        self._session.programs["logits"] = self._lower(phases["step"].graph)
        if "select" in phases:
            self._session.programs["select_logits"] = self._lower(phases["select"].graph, captured=False)

    def warm_up(
        self,
        batch: int,
        tokens: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        threshold: float | None = None,
        steps: int | None = None,
        policy: str | Policy | None = None,
        temperature: float = 0.0,
    ) -> int:
        """Capture ahead every CUDA graph of a step that batches of up to `batch` sequences can need.

        Plans of kernels are timed first for shapes that have no choice in the artifact cache (see `optimize`, tune).
        The transition between steps is compiled for one decoding rule.

        Args:
            batch: sequences at a time.
            tokens: positions per sequence to make KV pages for, prompt and response together; None for the model's
                longest.
            progress: called with (buckets done, buckets in all).
            threshold, steps, policy, temperature: how later calls of `generate` decode; other rules work as well, and
                their transitions are compiled once they have run often.

        Returns:
            The number of buckets that were run; see `graph_pool` for what was captured and what did not fit.

        Raises:
            InputError: a size out of range, no CUDA graphs, or buckets of kind "exact".
        """
        with self.kernels.kept(), self.tuning.opened() if self.tuning is not None else nullcontext():
            chosen = chosen_policy(policy, threshold, steps)
            positions = self.spec.max_positions if tokens is None else tokens
            return self._session.warm_up(batch, positions, progress, chosen, temperature)

    def _encode(self, prompts: str | Sequence[str]) -> list[list[int]]:
        if self.model.tokenizer is None:
            raise InputError(f"{self.model.name} came without a tokenizer; pass input_ids instead of texts.")
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for text in texts:
            if not isinstance(text, str):
                raise InputError(f"prompts must be texts, got {text!r}; pass ids as input_ids.")
        return [self.model.tokenizer.encode(text) for text in texts]


def _sampler(sampler: Sampler | str | None, temperature: float, top_p: float, top_k: int) -> Sampler:
    if sampler is None:
        return Sampler(temperature=temperature, top_p=top_p, top_k=top_k)
    if (temperature, top_p, top_k) != (0.0, 1.0, 0):
        raise InputError("give either a sampler or temperature, top_p and top_k, not both; set them in the sampler.")
    return sampler_of(sampler) if isinstance(sampler, str) else sampler


def _page_size(block: int, device: torch.device) -> int:
    """Positions per KV page: attention on a GPU reads pages of about 128 fastest, a block does elsewhere."""
    return block * max(1, 128 // block) if device.type == "cuda" else block


def _as_lists(input_ids: Sequence[Sequence[int]] | Tensor | None) -> list[list[int]]:
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"input_ids must be int64 [b, t], got {input_ids.dtype} {list(input_ids.shape)}.")
        return input_ids.tolist()
    try:
        return [list(ids) for ids in input_ids or ()]
    except TypeError:
        raise InputError(f"input_ids must be a list of ids per prompt, got {input_ids!r}; wrap a single one.") from None


def optimize(
    model: Any,
    recipe: str | Recipe = "focus",
    *,
    backend: str = "inductor",
    buckets: str | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
    graphs: bool = True,
    warmup: str = "lazy",
    max_batch: int | None = None,
    max_tokens: int | None = None,
    cache: bool | str | Path = True,
    tune: bool = True,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Optimized:
    """Capture a model, rewrite it by a recipe, and compile it.

    Args:
        model: the name of an embedded model ("tiny_sdar"), a checkpoint folder, a transformers model object, or a
        `Model`.
        recipe: a recipe's name, or a `Recipe`.
        backend: "inductor", or "eager" to run op by op.
        buckets: row counts to pad to: "exact", "hybrid", "fine" or a list (see `Buckets`); None for "exact" on a CPU
        and "hybrid" on a GPU.
        dtype, device: where and how to load a name or folder; see `load`.
        facts: fields of the spec that hold instead of what the model says, e.g. {"mask_id": 5}.
        graphs: on a GPU, replay the stages of a step as CUDA graphs, one per bucket; False launches op by op.
        warmup: "lazy" captures a CUDA graph when its bucket is first met; "full" captures all of them now, for batches
            of up to `max_batch` sequences of up to `max_tokens` positions (see `Optimized.warm_up`).
        max_batch, max_tokens: sizes of a full warm-up; max_tokens None for the model's longest sequence.
        cache: where captured graphs and compiled code are kept for later processes: True for the user's artifact cache
            (`dgraph cache path`), False for nowhere, or a folder.
        tune: on a GPU, let kernels take the plans (sizes of launches) that were the fastest on this kind of device: a
            full warm-up times them for the shapes that it meets, once, and keeps the choices in the cache; without a
            cache none is timed. A plan changes the order of sums, so results may differ in the last bits from those of
            another plan. False for the plans that kernels derive from shapes.
        progress: called with what is being done, for display.
        options: the recipe's options, e.g. `alpha=1.8`.

    Raises:
        UnknownName: an unknown model, recipe or option; the message has the closest matches.
        InputError: an option out of range.
        CacheError: the folder given as cache cannot be used.
        CheckpointError, CaptureError: the model cannot be loaded or captured.
    """
    tell = progress or (lambda what: None)
    _check_warmup(warmup, max_batch, max_tokens, graphs)
    check_recipe(RECIPES, recipe, options)
    rounding = None if buckets is None else Buckets.of(buckets)
    kept = open_store(cache)
    store = kept if backend == "inductor" else None
    compiler = RegionCompiler(backend, tell, store)
    tell("loading")
    found = resolve(model, dtype, device, **dict(facts or {}))
    chosen = build(RECIPES, recipe, found.spec, options)
    tell("capturing")
    graph, _ = captured(found.module, found.spec, found.prefix, kept)
    tell(f"rewriting for {chosen.name}")
    tuning = Tuning(graph.device, store, tell) if tune and store is not None and graph.device.type == "cuda" else None
    kernels = Kernels(target_of(graph.device), store, tell)
    kernels.prepare()
    rounding = rounding or Buckets.default(graph.device)
    transitions = TraceCompiler(store, tell) if backend == "inductor" and graph.device.type == "cuda" else None
    made = Optimized(found, graph, chosen, compiler, rounding, graphs, tuning, kernels, transitions)
    kernels.restore()
    if warmup == "full" and max_batch is not None:
        made.warm_up(max_batch, max_tokens, lambda done, count: tell(f"capturing bucket {done} of {count}"))
    return made


def _check_warmup(warmup: str, max_batch: int | None, max_tokens: int | None, graphs: bool) -> None:
    if warmup not in WARMUPS:
        raise UnknownName("warmup", warmup, WARMUPS)
    if warmup == "lazy" and (max_batch, max_tokens) != (None, None):
        raise InputError("max_batch and max_tokens are sizes of a full warm-up; set warmup='full' or leave them out.")
    if warmup == "full" and max_batch is None:
        raise InputError("warmup='full' captures every bucket up to a batch size; give max_batch=.")
    if warmup == "full" and not graphs:
        raise InputError("warmup='full' captures CUDA graphs, but graphs=False; leave one of them out.")
