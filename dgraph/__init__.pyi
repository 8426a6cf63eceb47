"""The public names of dgraph, each with the module that it comes from; `dgraph/__init__.py` reads them here.

A name that is imported under another one is a former name: it works with a warning for one release.
"""

from dgraph import parallel as parallel
from dgraph import ray as ray
from dgraph.api import CompiledModel as CompiledModel
from dgraph.api import CompiledModel as Optimized
from dgraph.api import Result as Result
from dgraph.api import adopt as adopt
from dgraph.api import capture as capture
from dgraph.api import load as load
from dgraph.api import optimize as optimize
from dgraph.api import recipe as recipe
from dgraph.bundles import Bundle as Bundle
from dgraph.bundling import Replay as Replay
from dgraph.bundling import bundle as bundle
from dgraph.bundling import replay as replay
from dgraph.comparison.bisect import bisect as bisect
from dgraph.comparison.compare import compare as compare
from dgraph.comparison.fault import Bisection as Bisection
from dgraph.comparison.report import Comparison as Comparison
from dgraph.compiler.compilation import Compilation as Compilation
from dgraph.compiler.compilation import WarmUp as WarmUp
from dgraph.compiler.exporting import Exported as Exported
from dgraph.compiler.phases import rewrite as rewrite
from dgraph.compiler.program_folder import SavedProgram as SavedProgram
from dgraph.compiler.saving import Saved as Saved
from dgraph.compiler.saving import save_quantised as save_quantised
from dgraph.engine.build import EngineConfig as EngineConfig
from dgraph.engine.build import EngineConfig as EngineSettings
from dgraph.engine.engine import Engine as Engine
from dgraph.engine.io.events import Event as Event
from dgraph.errors import DgraphError as DgraphError
from dgraph.errors import DgraphWarning as DgraphWarning
from dgraph.evaluate.calibrate import calibrate as calibrate
from dgraph.families import Embedded as Embedded
from dgraph.families import Family as Family
from dgraph.families import Model as Model
from dgraph.ir.graph import Graph as Graph
from dgraph.ir.pattern import Pattern as Pattern
from dgraph.opening import open as open
from dgraph.plans.calibration import Calibration as Calibration
from dgraph.recipes import RECIPES as RECIPES
from dgraph.recipes import Phase as Phase
from dgraph.recipes import Recipe as Recipe
from dgraph.runtime.constraints.constraint import Constraint as Constraint
from dgraph.runtime.decoding import Decoding as Decoding
from dgraph.runtime.sampling.sampler import Sampler as Sampler
from dgraph.spec import ModelSpec as ModelSpec
from dgraph.text.views import diff as diff
from dgraph.text.views import dump as dump
from dgraph.text.views import explain as explain

__all__: list[str]
__version__: str
API_VERSION: int
