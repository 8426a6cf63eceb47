"""The pipeline: capture -> canonicalise -> passes, verified after each -> stages -> lower -> session."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dgraph.cache.store import open_store
from dgraph.captured import Weights, graph_of_model, quantising
from dgraph.compilation import Compilation
from dgraph.errors import InputError
from dgraph.families import Model, resolve
from dgraph.graph import Graph
from dgraph.groups import ranks_of
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.kernels import Kernels
from dgraph.lowering.regions import RegionCompiler
from dgraph.lowering.traced import TraceCompiler
from dgraph.lowering.tuning import Tuning
from dgraph.optimized import Optimized as Optimized
from dgraph.optimized import Result as Result
from dgraph.private.triton import target_of
from dgraph.recipes import RECIPES, Recipe, build, check_recipe, options_of
from dgraph.settings import settings_of
from dgraph.spec import ModelSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def load(
    name: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    opened: bool = False,
    **facts: Any,
) -> Model:
    """Load an embedded model by name or a checkpoint folder by path.

    Args:
        name: of an embedded model, or the path of a folder.
        dtype, device: of the weights, and where they go; see `dgraph.families.resolve`.
        opened: leave the weights where they are stored, for `optimize(mesh=)` and `optimize(weights=)` to read.
        facts: fields of `ModelSpec` that hold instead of what the folder says, e.g. `block_length=`.

    Raises:
        UnknownName, CheckpointError: no such model, or a damaged folder.
        InputError: a fact is missing, which can be given, or out of range.
    """
    return resolve(name, dtype, device, opened=opened, **facts)


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
    return graph_of_model(resolve(model, **facts), open_store())


def recipe(name: str, spec: ModelSpec, **options: Any) -> Recipe:
    """A recipe as a value.

    Raises:
        UnknownName: an unknown recipe or option; the message has the closest matches.
        InputError: an option out of range.
    """
    return build(RECIPES, name, spec, options)


def optimize(
    model: Any,
    recipe: str | Recipe = "focus",
    compilation: Compilation | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    mesh: DeviceMesh | None = None,
    weights: Weights = None,
    **options: Any,
) -> Optimized:
    """Capture a model, rewrite it by a recipe, and compile it.

        dgraph.optimize("tiny_sdar", "focus", alpha=1.8, backend="eager")
        dgraph.optimize(folder, "focus", device="cuda", warmup=dgraph.WarmUp(batch=64, tokens=1536))

    Args:
        model: the name of an embedded model ("tiny_sdar"), a checkpoint folder, a transformers model object, or a
            `Model`.
        recipe: a recipe's name, or a `Recipe`.
        compilation: how it is compiled; see `Compilation`.
        dtype, device: where and how to load a name or folder; see `load`.
        facts: fields of the spec that hold instead of what the model says, e.g. {"mask_id": 5}.
        progress: called with what is being done, for display.
        mesh: ranks over which the model is divided, see `dgraph.parallel`; each calls this alike, and then `generate`.
        weights: "fp8", "int8", "int4", "fp8:lm_head=true,embeddings=true" and the like (`dgraph.captured.quantising`),
            or a `dgraph.passes.QuantizeWeights`: weights are stored so. Those of a name or folder are read and
            quantised one by one; a model object keeps its own tensors besides.
        options: the recipe's options, e.g. `alpha=1.8`; and, instead of a `Compilation`, its fields by keyword:
            backend, buckets, graphs, warmup, artifacts, tune.

    Raises:
        UnknownName: an unknown model, recipe or option; the message has the closest matches.
        InputError: an option out of range, or a recipe with an option that has the name of an argument.
        CacheError: the folder given as artifacts cannot be used.
        CheckpointError, CaptureError: the model cannot be loaded or captured.
    """
    tell = progress or (lambda what: None)
    keywords = {f.name: options.pop(f.name) for f in fields(Compilation) if f.name in options}
    how = settings_of(Compilation, compilation, keywords)
    check_recipe(RECIPES, recipe, options)
    if isinstance(recipe, str) and (taken := sorted(arguments() & options_of(RECIPES[recipe]).keys())):
        raise InputError(
            f"recipe {recipe!r} has the option {taken[0]!r}, which is an argument of dgraph.optimize; rename the "
            f"option."
        )
    store = open_store(how.artifacts)
    compiled = how.backend == "inductor"
    code_store = store if compiled else None  # run op by op, nothing but the captured graph is worth storing
    compiler = RegionCompiler(how.backend, tell, code_store)
    tell("loading")
    stored = quantising(weights)
    found = resolve(model, dtype, device, opened=mesh is not None or stored is not None, **dict(facts or {}))
    chosen = build(RECIPES, recipe, found.spec, options)
    tell("capturing")
    same = {"model": found.spec, "recipe": chosen.to_json(), "compilation": how}
    graph = graph_of_model(found, store, stored, mesh, same)
    tell(f"rewriting for {chosen.name}")
    on_gpu = graph.device.type == "cuda"
    tuning = None
    if how.tune and compiled and on_gpu:  # on every rank, whether its store can be used or not
        tuning = Tuning(graph.device, code_store, tell, ranks=ranks_of(graph.sharding))
    kernels = Kernels(target_of(graph.device), code_store, tell)
    kernels.prepare()
    buckets = Buckets.default(graph.device) if how.buckets is None else Buckets.of(how.buckets)
    transitions = TraceCompiler(code_store, tell) if compiled and on_gpu else None
    made = Optimized(found, graph, chosen, compiler, buckets, how.graphs, tuning, kernels, transitions)
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
    own = {name for name, p in inspect.signature(optimize).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return frozenset(own.union(f.name for f in fields(Compilation)))
