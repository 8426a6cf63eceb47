"""The pipeline: capture -> canonicalise -> passes, verified after each -> stages -> lower -> session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dgraph.cache.store import open_store
from dgraph.compiler.arguments import arguments_of, check_keywords, check_options
from dgraph.compiler.base_graph import Weights, graph_of_model, quantising
from dgraph.compiler.compilation import Compilation
from dgraph.compiler.compiled_model import CompiledModel as CompiledModel
from dgraph.compiler.compiled_model import Result as Result
from dgraph.compiler.phases import rewrite
from dgraph.compiler.program_folder import Origin
from dgraph.errors import InputError, warn
from dgraph.errors.former import former_names
from dgraph.families import Model, embedded, resolve, tokenizer_of
from dgraph.ir.graph import Graph
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.kernels import Kernels
from dgraph.lowering.regions import NotStored, RegionCompiler
from dgraph.lowering.traced import TraceCompiler
from dgraph.lowering.tuning import Tuning
from dgraph.numerics import check_effects
from dgraph.private.triton import target_of
from dgraph.ranks.groups import ranks_of
from dgraph.recipes import RECIPES, Recipe, RecipeLike, build, options_of
from dgraph.settings import DtypeLike, dtype_name, settings_of
from dgraph.spec import FACTS, ModelSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__getattr__ = former_names(__name__, {"Optimized": "CompiledModel"})


def load(
    name: str | Path,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    opened: bool = False,
    *,
    tokenizer: Any = None,
    adapter: str | Path | None = None,
    **facts: Any,
) -> Model:
    """Load an embedded model by name or a checkpoint folder by path.

        dgraph.load("./SDAR-8B-Chat-b32", dtype="auto", device="cuda")

    Args:
        name: name of an embedded model, the path of a folder, or an id "ORG/NAME" in the local cache of Hugging Face.
        dtype: of the weights: a torch.dtype, its name ("bfloat16", "bf16"), or "auto" for that of the checkpoint. None
            is float32 on a CPU and that of the checkpoint on a GPU.
        device: device of the weights; None for the CPU.
        opened: leave the weights where they are stored, for `optimize(mesh=)` and `optimize(weights=)` to read.
        tokenizer: instead of the folder's own; see `optimize`.
        adapter: the folder of a low-rank adapter in PEFT's format; see `optimize`.
        facts: fields of `ModelSpec` that hold instead of what the folder says, e.g. `block_length=`.

    Warns of weights that a CPU gets as float32, and the folder has in another dtype, if `dtype` does not say so.

    Raises:
        UnknownName: no such model, dtype or fact.
        CheckpointError: a damaged folder.
        InputError: a fact is missing, which can be given, or out of range; a device that is not there.
    """
    check_keywords("fact", facts, FACTS, arguments_of(load))
    return _with_tokenizer(_resolved(name, dtype, device, opened, adapter, facts), tokenizer)


def adopt(model: Any, *, tokenizer: Any = None, adapter: str | Path | None = None, **facts: Any) -> Model:
    """Adopt a model object of a known family without copying its tensors.

    Args:
        model: a native transformers Llama, Qwen2, Qwen3 or Qwen3-MoE, or a remote-code LLaDA, Dream, SDAR, SDAR-MoE or
            LLaDA2.
        tokenizer: its tokenizer, without which it reads and writes ids alone; see `optimize`.
        adapter: the folder of a low-rank adapter; see `optimize`. Tensors that it is added to are copied.
        facts: fields of `ModelSpec` that the object's config does not know, e.g. `mask_id=`.

    Raises:
        CaptureError: no family adopts it.
        UnknownName: no such fact.
        InputError: a fact is missing (a model without a mask token) or out of range.
    """
    check_keywords("fact", facts, FACTS, arguments_of(adopt))
    return _with_tokenizer(resolve(model, low_rank=adapter, **facts), tokenizer)


def capture(model: Any, **facts: Any) -> Graph:
    """Capture a model's forward in canonical form; it comes from the user's artifact cache where that has it.

    Args:
        model: the name of an embedded model, a checkpoint folder, a model object, or a `Model`.
        facts: as for `adopt`.

    Returns:
        A verified graph over a padded batch [b, t].

    Raises:
        CaptureError: the model cannot be captured; the message names the op, the module and the line.
        UnknownName: no such fact.
    """
    check_keywords("fact", facts, FACTS, arguments_of(capture))
    return graph_of_model(resolve(model, **facts), open_store())


def recipe(name: str, spec: ModelSpec, **options: Any) -> Recipe:
    """A recipe as a value.

    Raises:
        UnknownName: an unknown recipe or option; the message has the closest matches.
        InputError: an option out of range.
    """
    check_options(name, options, arguments_of(recipe))
    return build(RECIPES, name, spec, options)


def optimize(
    model: Any,
    recipe: RecipeLike = "focus",
    compilation: Compilation | None = None,
    *,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    tokenizer: Any = None,
    adapter: str | Path | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    mesh: DeviceMesh | None = None,
    weights: Weights = None,
    **options: Any,
) -> CompiledModel:
    """Capture a model, rewrite it by a recipe, and compile it.

        dgraph.optimize("tiny_sdar", "focus", alpha=1.8, backend="eager")
        dgraph.optimize(folder, "focus", device="cuda", warmup=dgraph.WarmUp(batch=64, tokens=1536))

    Args:
        model: the name of an embedded model ("tiny_sdar"), a checkpoint folder, a transformers model object, or a
            `Model`.
        recipe: a recipe's name, its options as a value (`dgraph.recipes.Focus(alpha=1.8)`), or a `Recipe`.
        compilation: settings of the compilation; see `Compilation`.
        dtype, device: of the weights of a name or folder; see `load`. An object keeps its own.
        tokenizer: reads and writes texts instead of the folder's own. A folder with tokenizer files, or a tokenizer
            object of transformers, whose chat template is applied. Or an object with `encode` and `decode`
            (`dgraph.families.Tokenizer`); with `encode_chat` it reads conversations.
        adapter: the folder of a low-rank adapter in PEFT's format, in the model's folder or anywhere. It is added to
            the weights before they are divided or quantised. A model that verifies its drafts drafts by it instead.
        facts: fields of the spec that hold instead of what the model says, e.g. {"mask_id": 5}.
        progress: called with what is being done, for display.
        mesh: ranks over which the model is divided, see `dgraph.parallel`; each calls this alike, and then `generate`.
        weights: "fp8", "int8", "int4", "fp8:lm_head=true,embeddings=true" and the like
            (`dgraph.compiler.base_graph.quantising`), or a `dgraph.passes.QuantizeWeights`: the format in which weights
            are stored. Weights of a name or folder are read and quantised one by one. A model object keeps its own
            tensors besides.
        options: the recipe's options, e.g. `alpha=1.8`; and, instead of a `Compilation`, its fields by keyword:
            backend, buckets, graphs, warmup, artifacts, tune, check.

    Raises:
        PassError: a pass cannot be applied, or, with check="numerics", is not what it declares.
        VerifyError: a pass broke a rule of the verifier.
        UnknownName: an unknown model, recipe or keyword. The message has the closest matches, or says what the keyword
            of another library is here.
        InputError: an option out of range, a device that is not there, or something that is no tokenizer. Also a
            recipe with an option that has the name of an argument.
        CacheError: the folder given as artifacts cannot be used.
        CheckpointError, CaptureError: the model cannot be loaded or captured.
    """
    tell = progress or (lambda what: None)
    keywords = {f.name: options.pop(f.name) for f in fields(Compilation) if f.name in options}
    how = settings_of(Compilation, compilation, keywords)
    check_options(recipe, options, arguments())
    if isinstance(recipe, str) and (taken := sorted(arguments() & options_of(RECIPES[recipe]).keys())):
        raise InputError(
            f"recipe {recipe!r} has the option {taken[0]!r}, which is an argument of dgraph.optimize; rename the "
            f"option."
        )
    store = open_store(how.artifacts)
    compiled = how.backend != "eager"
    code_store = store if compiled else None  # run op by op, nothing but the captured graph is worth storing
    compiler = RegionCompiler(how.backend, tell, code_store)
    tell("loading")
    stored = quantising(weights)
    check_keywords("fact", facts or {}, FACTS, arguments_of(load))
    found = _resolved(model, dtype, device, mesh is not None or stored is not None, adapter, facts or {})
    found = _with_tokenizer(found, tokenizer)
    chosen = build(RECIPES, recipe, found.spec, options)
    tell("capturing")
    same = {"model": found.spec, "recipe": chosen.to_json(), "compilation": how}
    graph = graph_of_model(found, store, stored, mesh, same)
    if how.check:
        tell(f"checking the passes of {chosen.name}")
        check_effects(graph, chosen)
    tell(f"rewriting for {chosen.name}")
    on_gpu = graph.device.type == "cuda"
    if on_gpu or mesh is not None:
        compiler.stored_only = False
    tuning = None
    if how.tune and compiled and on_gpu:  # on every rank, whether its store can be used or not
        tuning = Tuning(graph.device, code_store, tell, ranks=ranks_of(graph.sharding))
    kernels = Kernels(target_of(graph.device), code_store, tell)
    kernels.prepare()
    buckets = Buckets.default(graph.device) if how.buckets is None else Buckets.of(how.buckets)
    transitions = TraceCompiler(code_store, tell) if compiled and on_gpu else None

    phases = rewrite(graph, chosen)

    def made_by(compiler: RegionCompiler) -> CompiledModel:
        settings = replace(how, backend=compiler.backend, buckets=buckets.to_json(), check="")
        origin = Origin(settings, stored, store, tokenizer is not None)
        further = buckets, how.graphs, tuning, kernels, transitions
        return CompiledModel(found, graph, chosen, compiler, *further, origin, phases=phases)

    try:
        made = made_by(compiler)
        compiler.stored_only = False  # further programs, as some samplers need them, are compiled
    except NotStored:
        made = made_by(RegionCompiler("eager", tell))
    kernels.restore()
    if tuning is not None:
        tuning.agree()
    if how.warmup is not None:
        first = how.warmup
        made.warm_up(
            first.batch,
            first.tokens,
            lambda done, count: tell(f"capturing bucket {done} of {count}"),
            first.decoding,
        )
    return made


def arguments() -> frozenset[str]:
    """Names that `optimize` takes for itself, fields of `Compilation` among them: no option of a recipe has one."""
    return arguments_of(optimize, Compilation)


def _resolved(
    model: Any,
    dtype: DtypeLike,
    device: str | torch.device | None,
    opened: bool,
    adapter: str | Path | None,
    facts: Mapping[str, Any],
) -> Model:
    """`resolve`, which warns where weights of a folder get another dtype than they have, and the caller named none."""
    found = resolve(model, dtype, device, opened=opened, low_rank=adapter, **facts)
    named = isinstance(model, (str, Path)) and str(model) not in embedded()
    if named and dtype is None and found.stored_dtype not in (None, found.spec.dtype):
        warn(
            f"{found.name} stores its weights as {dtype_name(found.stored_dtype)}; on a CPU they are loaded as "
            f"{dtype_name(found.spec.dtype)}. Give dtype='auto' (--dtype auto) to keep them as they are stored, or "
            f"dtype='{dtype_name(found.spec.dtype)}' if this is meant."
        )
    return found


def _with_tokenizer(model: Model, tokenizer: Any) -> Model:
    """The model with another tokenizer; None keeps its own."""
    return model if tokenizer is None else replace(model, tokenizer=tokenizer_of(tokenizer))
