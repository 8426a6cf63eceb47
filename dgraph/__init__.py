"""dgraph: a compiler for diffusion language models.

opt = dgraph.optimize("tiny_sdar", recipe="focus")
print(opt.generate("Sort these words: river stone cloud maple").texts[0])
"""

from __future__ import annotations

from dgraph.api import Optimized, Result, adopt, capture, load, optimize, recipe
from dgraph.errors import DgraphError, DgraphWarning
from dgraph.evaluate.calibrate import calibrate
from dgraph.families import Embedded, Family, Model
from dgraph.graph import Graph
from dgraph.phases import rewrite
from dgraph.plans.calibration import Calibration
from dgraph.recipes import RECIPES, Phase, Recipe
from dgraph.spec import ModelSpec
from dgraph.views import diff, dump, explain

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Calibration",
    "DgraphError",
    "DgraphWarning",
    "Embedded",
    "Family",
    "Graph",
    "Model",
    "ModelSpec",
    "Optimized",
    "Phase",
    "Recipe",
    "Result",
    "adopt",
    "calibrate",
    "capture",
    "diff",
    "dump",
    "explain",
    "load",
    "optimize",
    "recipe",
    "rewrite",
]
