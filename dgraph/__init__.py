"""dgraph: a compiler for diffusion language models.

opt = dgraph.optimize("tiny_sdar", recipe="focus")
print(opt.generate("Sort these words: river stone cloud maple").texts[0])

A public name is imported when it is first used, so that what needs no torch does not wait for it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dgraph import moved

if TYPE_CHECKING:
    from dgraph.api import Optimized as Optimized
    from dgraph.api import Result as Result
    from dgraph.api import adopt as adopt
    from dgraph.api import capture as capture
    from dgraph.api import load as load
    from dgraph.api import optimize as optimize
    from dgraph.api import recipe as recipe
    from dgraph.compiler.compilation import Compilation as Compilation
    from dgraph.compiler.compilation import WarmUp as WarmUp
    from dgraph.compiler.phases import rewrite as rewrite
    from dgraph.compiler.saving import Saved as Saved
    from dgraph.compiler.saving import save_quantised as save_quantised
    from dgraph.engine.build import EngineSettings as EngineSettings
    from dgraph.engine.engine import Engine as Engine
    from dgraph.engine.io.events import Event as Event
    from dgraph.errors import DgraphError as DgraphError
    from dgraph.errors import DgraphWarning as DgraphWarning
    from dgraph.evaluate.calibrate import calibrate as calibrate
    from dgraph.families import Embedded as Embedded
    from dgraph.families import Family as Family
    from dgraph.families import Model as Model
    from dgraph.ir.graph import Graph as Graph
    from dgraph.plans.calibration import Calibration as Calibration
    from dgraph.recipes import RECIPES as RECIPES
    from dgraph.recipes import Phase as Phase
    from dgraph.recipes import Recipe as Recipe
    from dgraph.runtime.decoding import Decoding as Decoding
    from dgraph.runtime.sampling.sampler import Sampler as Sampler
    from dgraph.spec import ModelSpec as ModelSpec
    from dgraph.text.views import diff as diff
    from dgraph.text.views import dump as dump
    from dgraph.text.views import explain as explain

__version__ = "0.1.0"

_HOMES = {
    "RECIPES": "recipes",
    "Calibration": "plans.calibration",
    "Compilation": "compiler.compilation",
    "Decoding": "runtime.decoding",
    "DgraphError": "errors",
    "DgraphWarning": "errors",
    "Embedded": "families",
    "Engine": "engine.engine",
    "EngineSettings": "engine.build",
    "Event": "engine.io.events",
    "Family": "families",
    "Graph": "ir.graph",
    "Model": "families",
    "ModelSpec": "spec",
    "Optimized": "api",
    "Phase": "recipes",
    "Recipe": "recipes",
    "Result": "api",
    "Sampler": "runtime.sampling.sampler",
    "Saved": "compiler.saving",
    "WarmUp": "compiler.compilation",
    "adopt": "api",
    "calibrate": "evaluate.calibrate",
    "capture": "api",
    "diff": "text.views",
    "dump": "text.views",
    "explain": "text.views",
    "load": "api",
    "optimize": "api",
    "recipe": "api",
    "rewrite": "compiler.phases",
    "save_quantised": "compiler.saving",
}
"""The module below dgraph that each public name comes from."""

_MODULES = ("parallel", "ray")
"""Modules that `import dgraph` makes available by name: `dgraph.parallel.init()`."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})


moved.install()
