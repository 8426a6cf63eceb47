"""A model under a recipe, compiled: the result of `optimize`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from dgraph.bundles import Asked, Bundle, Recorder, bundle_of, folder, offer
from dgraph.compiler.arguments import arguments_of, check_keywords
from dgraph.compiler.exporting import Exported, export
from dgraph.compiler.phases import Rewritten, graph_of_phase, rewrite, routed_blocks, scoring
from dgraph.compiler.program_folder import Origin, SavedProgram, write_program
from dgraph.compiler.prompts import Prompts, encode_prompts, is_single
from dgraph.compiler.result import Result as Result
from dgraph.engine.build import EngineConfig, build_engine
from dgraph.engine.engine import Engine
from dgraph.engine.memory.profile import profile
from dgraph.errors import CacheError, InputError, UnknownName
from dgraph.errors.former import former_names
from dgraph.families import Model
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.chunks import CHUNK_ROWS
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.kernels import Kernels
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.stage import run_in_order
from dgraph.lowering.traced import TraceCompiler
from dgraph.lowering.tuning import Tuning
from dgraph.ops.statistics import Statistic
from dgraph.passes.adjust_logits import AdjustLogits
from dgraph.passes.base import Report
from dgraph.passes.measure_rows import MeasureRows
from dgraph.private.triton import target_of
from dgraph.ranks.groups import ranks_of
from dgraph.recipes import Recipe
from dgraph.runtime.checks import check_modes
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.pool import GRAPH_ROWS, GraphPool
from dgraph.runtime.kv.store import page_size_for
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.loop.variants import ADJUSTED, LOGITS, variant_of
from dgraph.runtime.policies import PolicyMix, statistics_of
from dgraph.runtime.request_checks import canvases_of, either, ids_of
from dgraph.runtime.results import Generation, Progress
from dgraph.runtime.sampling.adjustments import with_ids
from dgraph.runtime.sampling.stops import says_stop, trim
from dgraph.runtime.stats import StepRecord
from dgraph.settings import settings_of
from dgraph.types.card import Card, Described, counted

_DECODING = arguments_of(Decoding)
__getattr__ = former_names(__name__, {"Optimized": "CompiledModel"})


class CompiledModel(Described):
    """A model under a recipe, ready to generate.

    Attributes:
        model: the captured model.
        spec: its facts.
        recipe: the recipe as a value.
        phases: per phase its graphs and reports.
        compiler: the compiler of the regions; its `compiled`, `loaded` and `reused` count them by origin.
        graph_pool: the CUDA graphs of the stages, recorded as their buckets are met; None where there are none. Prompts
            of many rows have none (see `GRAPH_ROWS`).
        tuning: tilings of kernels that were chosen by timing them; None where kernels take their own.
        kernels: the compiled kernels of our ops; its `compiled` names those that Triton compiled for this program.
        transitions: compiles the transition between two steps if it is captured; None if it runs op by op.
        programs: the lowered program of each phase.
        page_size: positions of a KV page.
        ranks: the group of ranks that holds the model; see `dgraph.ranks.groups`.
        origin: how it was made, for `save`; None for a model that `optimize` did not make.
        decoding: settings that `generate` takes where it is given none, or none of a name.
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
        origin: Origin | None = None,
        decoding: Decoding | None = None,
        phases: dict[str, Rewritten] | None = None,
    ):
        self.origin, self.decoding = origin, decoding or Decoding()
        self.model, self.spec, self.recipe, self.captured = model, model.spec, recipe, captured
        self.phases = rewrite(captured, recipe) if phases is None else phases
        self.compiler, self.buckets, self.tuning, self.transitions = compiler, buckets, tuning, transitions
        self.kernels = kernels or Kernels(target_of(captured.device), None)
        self.page_size = page_size_for(self.spec.block_length, captured.device)
        self.ranks = ranks = ranks_of(captured.sharding)
        self.graph_pool = GraphPool() if graphs and captured.device.type == "cuda" and ranks.recordable else None
        self.programs = {name: self._lower(phase.graph, name == "prefill") for name, phase in self.phases.items()}
        self._in_use, self._preparing = threading.Lock(), threading.Lock()
        self._engine: tuple[weakref.ref[Engine], threading.Thread] | None = None  # the user of the programs
        self._session = BlockSession(
            self.spec,
            self.programs,
            block_cache=recipe.block_cache,  # type: ignore[arg-type]
            recommit=recipe.recommit,
            plan=recipe.plan,
            kv=recipe.kv,
            device=captured.device,
            page_size=self.page_size,
            pool=self.graph_pool,
            compiler=transitions,
            ranks=ranks,
            tokenizer=self.model.tokenizer,
        )

    def with_logit_rows(self, rows: int) -> CompiledModel:
        """Return the same model with the logits of at most `rows` rows at a time.

        Weights and compiled regions are shared; KV pages and CUDA graphs are not.

        Raises:
            InputError: below 1, or a recipe that keeps all logits.
        """
        if self.recipe.logit_rows is None:
            raise InputError(f"recipe {self.recipe.name!r} has no bound on rows of logits; add the pass ChunkLMHead.")
        recipe, graphs = self.recipe.with_logit_rows(rows), self.graph_pool is not None
        programs = self.compiler, self.buckets, graphs, self.tuning, self.kernels, self.transitions
        shared = *programs, self.origin, self.decoding
        return CompiledModel(self.model, self.captured, recipe, *shared)

    def _lower(self, graph: Graph, prompts: bool = False) -> LoweredProgram:
        """prompts: it forwards prompts alone."""
        pool = self.graph_pool
        # The steps of a block-causal model forward blocks, of whatever number of sequences, and short prompts: all run
        # as CUDA graphs.
        whole = pool is not None and not prompts and self.spec.attention == "block_causal"
        return LoweredProgram(
            graph,
            self.compiler,
            self.buckets,
            run_in_order if pool is None else pool.runner,
            self.tuning,
            None if whole else CHUNK_ROWS,
            graph_rows=GRAPH_ROWS if prompts else None,
            name="prefill" if prompts else "step",
        )

    def card(self) -> Card:
        """See `Described`."""
        spec, program = self.spec, next(iter(self.programs.values()))
        phases = (
            (name, f"rows {' -> '.join(s.rows for s in p.stages)}; {counted(len(p.graph.calls), 'call')}")
            for name, p in self.programs.items()
        )
        facts = (
            ("model", f"{spec.family}, {counted(spec.layers, 'layer')}, blocks of {spec.block_length}"),
            ("recipe", f"{self.recipe.name}, block_cache={self.recipe.block_cache!r}, recommit={self.recipe.recommit}"),
            ("weights", self.model.weights_text),
            ("first", " > ".join(self.captured.history)),
            ("device", f"{self.captured.device}, {self.compiler.backend}, buckets {program.buckets.to_json()}"),
            *phases,
            ("use", "generate(TEXT).texts" if self.model.tokenizer is not None else "generate(input_ids=[[5, 6]])"),
            ("", "engine(), report, print(dgraph.explain(optimized))"),
        )
        return Card(f"CompiledModel {self.model.name} under {self.recipe.name}", facts)

    @property
    def report(self) -> dict[str, tuple[Report, ...]]:
        """Per phase what each pass did."""
        return {name: phase.reports for name, phase in self.phases.items()}

    def graph(self, phase: str = "step", after: str | None = None) -> Graph:
        """The graph of a phase, at its end or after one of its passes.

        Raises:
            UnknownName: no such phase or pass.
        """
        return graph_of_phase(self.phases, phase, after)

    def export(self, path: str | Path, phase: str = "step") -> Exported:
        """Write a phase as a torch.export.ExportedProgram, which torch and `dgraph.ops` alone can run.

            opt.export("step.pt2")

        Args:
            path: of the file, which ends in .pt2; `dgraph.compiler.exporting` says how it is called.
            phase: its name.

        Raises:
            UnknownName: no such phase.
            InputError: another name, a file that cannot be written, or a model that is divided over ranks.
            LoweringError: torch.export refuses the program.
        """
        return export(self.graph(phase), path, phase, {"model": self.model.name, "recipe": self.recipe.to_json()})

    def save(self, folder: str | Path, decoding: Decoding | None = None, weights: bool = False) -> SavedProgram:
        """Write the program with all that was compiled for it; `dgraph.open` starts it on a machine of the same kind.

            opt.save("program")

        Args:
            folder: to write, which does not exist.
            decoding: settings that `generate` takes there where it is given none; None: those of this model.
            weights: put the checkpoint into the folder; else it is read again from where it was.

        Raises:
            InputError: the folder exists or cannot be written; a model that was given as an object, is divided over
                ranks, or was compiled without a store of artifacts.
            CacheError: artifacts of the program are in no store.
        """
        if self.origin is None or self.captured.sharding is not None:
            raise InputError("only a whole model that dgraph.optimize compiled can be saved.")
        if self.compiler.unstored:
            raise CacheError(f"{counted(len(self.compiler.unstored), 'region')} of this program cannot be stored.")
        device = self.captured.device
        return write_program(folder, self.model, device, self.recipe, decoding or self.decoding, self.origin, weights)

    def generate(
        self,
        prompts: Prompts | None = None,
        decoding: Decoding | None = None,
        *,
        input_ids: Sequence[Sequence[int]] | Tensor | None = None,
        canvas: Sequence[int | None] | Sequence[Sequence[int | None] | None] | None = None,
        max_batch: int | None = None,
        keep_kv: bool = False,
        observer: Callable[[StepRecord], None] | None = None,
        progress: Callable[[Progress], None] | None = None,
        **settings: Any,
    ) -> Result:
        """Continue prompts; each result is what the prompt alone would give.

            opt.generate("Sort these words: river stone", threshold=0.9, stop=["####"])
            opt.generate(prompts, dgraph.Decoding(policy="dream_entropy", steps=16, max_new_tokens=256))
            opt.generate([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])

        Args:
            prompts: one text or several, framed by the model's chat template. Or a conversation, a list of messages
                {"role": ..., "content": ...}; or a list of conversations.
            decoding: settings of decoding; see `Decoding`. None: those of the model (`self.decoding`).
            input_ids: instead of texts, ids per prompt, used as they are (i64[b, t] or a list of lists).
            canvas: for one text, the beginning of its response as far as it is fixed (infilling): ids, and None for
                free positions. All positions after it are free. For several prompts, or for ids, such a list for each,
                or None. Fixed tokens are there from the first step on and never change; a stop token among them ends
                the response.
            max_batch: prompts at a time; None for all at once.
            keep_kv: return each sequence's keys and values.
            observer: called with a record of every step; slows decoding.
            progress: called after every step.
            settings: instead of a `Decoding`, its fields by keyword: max_new_tokens, threshold, steps, policy,
                block_length, temperature, top_p, top_k, sampler, ignore_eos, min_tokens, stop, seed.

        Raises:
            UnknownName: an unknown setting, policy, or option that the policy has not. The message says what a setting
                of another library is here.
            InputError: a prompt or setting that cannot be used; nothing has run then.
        """
        check_keywords("setting of Decoding", settings, _DECODING, arguments_of(CompiledModel.generate))
        asked = self.asked(prompts, self.decoding_of(decoding, settings), input_ids, canvas, max_batch)
        recorder = Recorder(keep=folder() is not None)
        try:
            generation = self.decode(asked, recorder, keep_kv=keep_kv, observer=observer, progress=progress)
        except Exception as error:
            failed = error
            if self.captured.sharding is None:  # a bundle has the inputs of one rank, which does not run alone
                offer(error, recorder, lambda: self.bundle_of(asked, recorder, failed))
            raise
        tokenizer, chosen = self.model.tokenizer, asked.decoding
        if tokenizer is None:
            return Result(None, generation.token_ids, generation.stats, generation.kv)
        kept = chosen.include_stop_str_in_output
        cut = [trim(tokenizer, ids, chosen.stop, chosen.min_tokens, kept) for ids in generation.token_ids]
        return Result([c.text for c in cut], [c.token_ids for c in cut], generation.stats, generation.kv)

    def decoding_of(self, given: Decoding | None, settings: Mapping[str, Any]) -> Decoding:
        """The decoding that `generate` is asked for: the one given, or the model's own with other settings."""
        return self.decoding.changed(settings) if given is None else Decoding.of(given, settings)

    def asked(
        self,
        prompts: Prompts | None,
        decoding: Decoding,
        input_ids: Sequence[Sequence[int]] | Tensor | None,
        canvas: Sequence[int | None] | Sequence[Sequence[int | None] | None] | None,
        max_batch: int | None,
    ) -> Asked:
        """Arguments of `generate` as ids, for `decode`; raises what it does for them."""
        either(prompts, input_ids)
        chosen = with_ids(decoding.for_model(self.spec), self.model.tokenizer)
        if chosen.stop and self.model.tokenizer is None:
            raise InputError(f"{self.model.name} came without a tokenizer, so texts in stop mean nothing; omit it.")
        ids = ids_of(input_ids)
        if prompts is not None:
            ids = encode_prompts(prompts, self.model.tokenizer, self.model.name)
        return Asked(ids, chosen, canvases_of("" if is_single(prompts) else prompts, canvas), max_batch, prompts)

    def decode(self, asked: Asked, recorder: Recorder, **how: Any) -> Generation:
        """Run `BlockSession.generate` under a recorder, with its other arguments."""
        tokenizer, chosen = self.model.tokenizer, asked.decoding

        def stopped(final: Sequence[int]) -> bool:
            assert tokenizer is not None
            return says_stop(tokenizer, final, chosen.stop, chosen.min_tokens)

        self._prepare([chosen])
        with self._used_by("generate"), self.kernels.remembered(), recorder.watching(self._session):
            return self._session.generate(
                asked.ids,
                chosen,
                canvases=asked.canvases,
                max_batch=asked.max_batch,
                stopped=stopped if tokenizer is not None and chosen.stop else None,
                **how,
            )

    def bundle_of(
        self,
        asked: Asked,
        recorder: Recorder,
        error: Exception | None = None,
        weights: bool = False,
        text: bool = False,
    ) -> Bundle:
        """The bundle of the last call that a recorder saw; see `dgraph.bundles.bundle_of`."""
        assert recorder.call is not None, "a program ran"
        return bundle_of(
            recorder.call,
            asked,
            model=self.model.name,
            recipe=self.recipe,
            captured=self.captured,
            compilation={
                "backend": self.compiler.backend,
                "buckets": self.buckets.to_json(),
                "graphs": self.graph_pool is not None,
            },
            error=error,
            weights=weights,
            text=text,
        )

    def program(self, phase: str, variant: str = "", decoding: Decoding | None = None) -> LoweredProgram:
        """A program as requests with a decoding run it.

        Args:
            phase: its name.
            variant: which of its forms; see `BlockSession.variants`.
            decoding: of requests that need this form; it is lowered for them, unless that was done.

        Raises:
            UnknownName: no such phase or variant.
        """
        if decoding is not None:
            self._prepare([decoding.for_model(self.spec)])
        if variant not in ("", *self._session.variants):
            raise UnknownName("variant of programs", variant, self._session.variants)
        found = {**self.programs, **(self._session.variants[variant] if variant else {})}
        if phase not in found:
            raise UnknownName("phase", phase, found)
        program = found[phase]
        assert isinstance(program, LoweredProgram), "all of them are lowered here"
        return program

    def engine(self, settings: EngineConfig | None = None, **keywords: Any) -> Engine:
        """An engine: requests that come and go, decoded together, each as it would be alone.

            with opt.engine(max_sequences=16) as engine:
                responses = engine.generate(prompts, max_new_tokens=64)

        While it is open, the model belongs to it: `generate` and a second engine are refused. An engine without
        references closes when its requests have ended.

        Args:
            settings: see `EngineConfig`.
            keywords: instead, its fields by keyword.

        Raises:
            InputError: a setting out of range, or a model that is in use.
            UnknownName: an unknown setting or policy.
        """
        check_keywords("setting of EngineConfig", keywords, arguments_of(EngineConfig), ("settings",))
        chosen = settings_of(EngineConfig, settings, keywords)
        if chosen.max_logit_rows not in (None, self.recipe.logit_rows):
            return self.with_logit_rows(chosen.max_logit_rows).engine(chosen)
        block = chosen.block_length or self.spec.block_length
        if any(block % routed for routed in routed_blocks(self.captured)):
            # A prompt may end within a routed block, whose rows would share experts with those of the first step.
            chosen = replace(chosen, max_mixed_rows=0)
        occupied = ExitStack()
        occupied.enter_context(self._used_by("engine"))
        occupied.callback(self._session.give_back)
        try:
            occupied.enter_context(self.kernels.remembered())
            made = build_engine(
                self._session,
                chosen,
                model=self.model.name,
                recipe=self.recipe.name,
                tokenizer=self.model.tokenizer,
                encode=lambda text: encode_prompts(text, self.model.tokenizer, self.model.name)[0],
                prepare=self._prepare,
                occupied=lambda: occupied,
                profiled=lambda rows, sequences: profile(self, rows, sequences=sequences, steps=True),
                scoring=lambda: LoweredProgram(scoring(self.captured), RegionCompiler("eager"), Buckets()),
            )
            self._engine = weakref.ref(made), made.thread
            return made
        except BaseException:
            occupied.close()
            raise

    @contextmanager
    def _used_by(self, what: str) -> Iterator[None]:
        """Hold the programs, which share buffers, for one user at a time.

        An engine without references is waited for, since it is about to give them back; its own thread does not wait.
        """
        engine, thread = self._engine or (None, None)
        left = engine is not None and engine() is None and thread is not threading.current_thread()
        if not self._in_use.acquire(blocking=left):
            raise InputError(
                f"the model is in use, by an engine that is open or by a call in another thread: {what} must wait. "
                f"Close the engine first, or give the requests to it (Engine.generate)."
            )
        try:
            yield
        finally:
            self._engine = None
            self._in_use.release()

    def _prepare(self, decodings: Sequence[Decoding]) -> None:
        """Lower the step once more, unless that was done: for samplers that need its logits, where it keeps none, for
        requests that adjust them, or for statistics of policies. Threads that ask an engine for the same at once wait
        for the first.
        """
        for chosen in decodings:
            check_modes(self.spec, chosen.rule, chosen.sampling)
        asked = statistics_of(PolicyMix.of([chosen.rule for chosen in decodings]))
        variant = variant_of(decodings)
        if variant == ADJUSTED and self.captured.sharding is not None:
            raise InputError(
                "biases, bans, penalties and min_p need whole rows of logits, which no rank of a sharded model has; "
                "leave these settings at their defaults."
            )
        if not variant or "logits" in self.programs["step"].output_names:
            return
        if variant not in self._session.variants:
            with self._preparing:
                if variant not in self._session.variants:
                    self._session.variants[variant] = self._lowered_as(variant, asked)

    def _lowered_as(self, variant: str, asked: tuple[Statistic, ...]) -> dict[str, LoweredProgram]:
        """The programs of a step that leave their logits, adjust them, or compute statistics."""
        steps, recipe = ("step", "select"), self.recipe
        last = AdjustLogits() if variant == ADJUSTED else MeasureRows(asked)
        recipe = recipe.keeping_logits() if variant == LOGITS else recipe.with_last(last, steps)
        phases = rewrite(self.captured, recipe)
        return {name: self._lower(phase.graph) for name, phase in phases.items() if name in steps}

    def warm_up(
        self,
        batch: int,
        tokens: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        decoding: Decoding | None = None,
        **settings: Any,
    ) -> int:
        """Capture ahead every CUDA graph of steps and prompts that batches of up to `batch` sequences can need.

        Tilings of kernels are timed first for shapes that have no choice in the artifact cache (see `optimize`, tune).
        The transition between steps is compiled for one decoding rule.

        Args:
            batch: sequences at a time.
            tokens: positions per sequence, prompt and response, to make room for keys of; None for the model's longest.
            progress: called with (buckets done, buckets in all).
            decoding: how later calls of `generate` decode. Transitions of other rules are compiled once they ran often.
            settings: instead, fields of a `Decoding` by keyword.

        Returns:
            The number of buckets that were run; see `graph_pool` for what was captured and what did not fit.

        Raises:
            InputError: a size out of range, no CUDA graphs, or buckets of kind "exact".
        """
        with self.kernels.remembered(), self.tuning.opened() if self.tuning is not None else nullcontext():
            check_keywords("setting of Decoding", settings, _DECODING, arguments_of(CompiledModel.warm_up))
            chosen = self.decoding_of(decoding, settings).for_model(self.spec)
            self._prepare([chosen])
            positions = self.spec.max_positions if tokens is None else tokens
            return self._session.warm_up(batch, positions, progress, chosen)
