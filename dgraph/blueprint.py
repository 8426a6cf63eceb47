"""Engines as a value, from which this process or another one can build them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgraph.cache.store import open_store
from dgraph.cache.upkeep import import_
from dgraph.compiler.base_graph import Weights, quantising
from dgraph.compiler.compilation import Compilation
from dgraph.engine.build import EngineConfig
from dgraph.engine.warm_up import warm_up
from dgraph.errors import CacheError, InputError, UnknownName, warn
from dgraph.recipes import RECIPES, builder_of, options_of
from dgraph.settings import DtypeLike, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from dgraph.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model under one or several recipes, how it is compiled, and how large its engines are.

        engine = Blueprint(model="tiny_sdar").engines()["tiny_sdar"]

    Attributes:
        model: the name of an embedded model, or a checkpoint folder.
        recipes: names; an engine for each, over one set of weights.
        options: of the recipes; each takes those that it has.
        name: the model's name for clients; default its own name. With several recipes, an engine's is NAME:RECIPE.
        dtype, device: of the weights, and where they go; see `dgraph.load`.
        weights: the format in which they are stored, see `dgraph.optimize`.
        adapter: the folder of a low-rank adapter, see `dgraph.optimize`.
        facts: facts that override the model's own.
        compilation: see `Compilation`.
        engine: see `EngineConfig`.
        shipped: a file that `dgraph cache export` wrote, whose artifacts are added to the cache before anything is
            compiled. Artifacts are code: name only a file whose author you trust. A file that cannot be used gives a
            warning, and the engines are then compiled where they are.

    Raises:
        InputError: no recipe, or a value that means nothing.
        UnknownName: a recipe, or an option that no recipe has.
    """

    model: str
    recipes: tuple[str, ...] = ("focus",)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    dtype: DtypeLike = None
    device: str | torch.device | None = None
    weights: Weights = None
    adapter: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    compilation: Compilation = field(default_factory=Compilation)
    engine: EngineConfig = field(default_factory=EngineConfig)
    shipped: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Path)):
            raise InputError(
                f"a blueprint names its model, since another process may load it; give a name or a folder, got "
                f"{type(self.model).__name__}."
            )
        if isinstance(self.recipes, str) or not self.recipes or not all(isinstance(one, str) for one in self.recipes):
            raise InputError(f"recipes are names, at least one of them, got {self.recipes!r}.")
        quantising(self.weights)
        torch_dtype(self.dtype)
        known: dict[str, Any] = {}
        for recipe in self.recipes:
            known |= options_of(builder_of(RECIPES, recipe))
        for option in self.options:
            if option not in known:
                raise UnknownName(f"option of {' or '.join(map(repr, self.recipes))}", option, known)

    @property
    def on(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return str(self.device or "cpu").partition(":")[0]

    def engines(
        self, tell: Callable[[str], None] = lambda what: None, mesh: DeviceMesh | None = None
    ) -> dict[str, Engine]:
        """Build them, each of which has recorded its CUDA graphs and served a request then; by the names that clients
        call them.

        Args:
            tell: called with what is being done.
            mesh: ranks over which the model is divided, each of which calls this; then only for one recipe.

        Raises what `dgraph.load`, `dgraph.optimize` and `CompiledModel.engine` do.
        """
        from dgraph.api import load, optimize

        if mesh is not None and len(self.recipes) > 1:
            raise InputError(
                f"ranks that share a model serve it under one recipe, got {', '.join(self.recipes)}; serve each in "
                f"processes of its own."
            )
        self.unpack()
        tell("loading")
        stored = quantising(self.weights)
        opened = mesh is not None or stored is not None
        found = load(self.model, self.dtype, self.device, opened, adapter=self.adapter, **self.facts)
        title = self.name or found.name
        engines = {}
        for recipe in self.recipes:
            tell(f"{recipe}: compiling")
            known = options_of(builder_of(RECIPES, recipe))
            own = {key: value for key, value in self.options.items() if key in known}
            optimized = optimize(found, recipe, self.compilation, progress=tell, mesh=mesh, weights=stored, **own)
            tell(f"{recipe}: making room for keys and values")
            engine = optimized.engine(replace(self.engine, record=self.compilation.buckets != "exact"))
            tell(f"{recipe}: warming up")
            warm_up(engine)
            engines[title if len(self.recipes) == 1 else f"{title}:{recipe}"] = engine
        return engines

    def unpack(self) -> None:
        """Add what was shipped to the artifact cache; `engines` does it first."""
        if self.shipped is None:
            return
        store = open_store(self.compilation.artifacts)
        if store is None:
            warn(f"{self.shipped} is left out: there is no artifact cache to add it to.")
            return
        try:
            import_(store, Path(self.shipped), trust=True)
        except CacheError as error:
            warn(f"{error} Going on without it.")
