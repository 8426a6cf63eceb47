"""What other packages add through entry points: recipes, decoding rules, ops; and what is refused of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph import plugins
from dgraph.api import arguments
from dgraph.bench.arrivals import Request
from dgraph.bench.simulate import Method, simulate
from dgraph.cli.options import shared_options
from dgraph.compiler.compilation import Compilation
from dgraph.engine.scheduling.jobs import Budgets
from dgraph.engine.scheduling.schedulers import scheduler_of
from dgraph.errors import DgraphWarning, FormatError, InputError, PluginError, UnknownName
from dgraph.families import resolve
from dgraph.ir.stored_graph import _target
from dgraph.ops import OPS
from dgraph.passes import PASSES
from dgraph.plans.regions import Suffix
from dgraph.plans.rows import PARTS, RowPlan
from dgraph.recipes import RECIPES, Recipe, build, options_of
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import POLICIES, PRESETS, policy_of
from dgraph.runtime.sampling.sampler import Sampler
from tests.tiny import tiny_spec

SOURCE = """
from dataclasses import dataclass, replace
from dgraph.recipes import FastDLLM
from dgraph.runtime.policies import ConfidenceThreshold, DecodeRule
from dgraph.runtime.sampling.sampler import Sampler

def patient(spec, *, every: int = 4):
    "Waits."
    return replace(FastDLLM(every=every).recipe(spec), name="patient")

def careless(spec, *, backend: str = "mine"):
    "Has an option that optimize has an argument for."

@dataclass(frozen=True)
class Slow(DecodeRule):
    "The most confident token alone."
    name = "slow"
    count: int = 1

warm = ConfidenceThreshold(0.8, sampler=Sampler(temperature=0.7, top_k=50))
"""

LOOSE = "\ndef Loose(spec, **options): ...\n"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: its module `<name>_methods`, and entry points as {group: {name: value}}."""

    def forget() -> None:
        plugins.entry_points.cache_clear()
        plugins.load.cache_clear()

    def make(distribution: str, groups: dict[str, dict[str, str]], source: str = SOURCE) -> None:
        site = tmp_path / distribution
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (site / f"{distribution}_methods.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        forget()

    yield make
    for name in [n for n in sys.modules if n.endswith("_methods") and "." not in n]:  # not tests.test_methods
        del sys.modules[name]
    forget()


BOTH = tiny_spec(attention="bidirectional")


def test_recipes_of_another_package(install: Install) -> None:
    with pytest.raises(UnknownName, match="unknown recipe 'patient'"):
        build(RECIPES, "patient", BOTH, {})
    install("patience", {"dgraph.recipes": {"patient": "patience_methods:patient"}})
    assert "patience_methods" not in sys.modules, "imported when it is used"
    assert build(RECIPES, "focus", BOTH, {}).name == "focus"
    assert "patience_methods" not in sys.modules
    assert build(RECIPES, "patient", BOTH, {"every": 3}).name == "patient"
    assert list(RECIPES)[-1] == "patient"
    with pytest.raises(UnknownName, match=r"unknown recipe 'pateint'\. Did you mean 'patient'"):
        build(RECIPES, "pateint", BOTH, {})


def test_a_recipe_that_cannot_be_imported_is_in_nobody_else_s_way(install: Install) -> None:
    install("broken", {"dgraph.recipes": {"gone": "broken_methods.nowhere:gone"}})
    assert shared_options(["focus", "captured"], ["alpha=2"]) == {"alpha": 2.0}
    with pytest.raises(UnknownName, match=r"unknown recipe 'focsu'\. Did you mean 'focus'"):
        shared_options(["focsu"], None)
    with pytest.raises(UnknownName, match=r"unknown recipe 'focsu'\. Did you mean 'focus'"):
        dgraph.dump("tiny_sdar", "focsu")
    with pytest.raises(PluginError, match="'gone' of distribution 'broken'"):
        shared_options(["gone"], None)


PARTS_OUTSIDE = """
from dataclasses import dataclass
from dgraph.passes import Effect, Pass
from dgraph.plans.regions import Region

@dataclass(frozen=True)
class Wait(Pass):
    "Does nothing."
    often: int = 1
    effect = Effect.EXACT
    summary = "waits"
    def run(self, graph, report):
        report.did("waited")

@dataclass(frozen=True)
class Nearby(Region):
    "The block."
    width: int = 2
    def rows(self, view):
        return view.around_block(self.width)
"""


def test_a_recipe_of_another_package_comes_back_from_json(install: Install) -> None:
    install(
        "parts",
        {"dgraph.passes": {"Wait": "parts_methods:Wait"}, "dgraph.parts": {"Nearby": "parts_methods:Nearby"}},
        PARTS_OUTSIDE,
    )
    assert build(RECIPES, "fast_dllm", BOTH, {}).plan is not None
    assert Recipe.from_json(build(RECIPES, "fast_dllm", BOTH, {}).to_json())
    assert "parts_methods" not in sys.modules, "imported when it is needed"
    wait, nearby = PASSES["Wait"], PARTS["Nearby"]
    made = build(RECIPES, "fast_dllm", BOTH, {}).inserting(wait(often=3), after="PackRows")  # type: ignore[call-arg]
    made = replace(made, name="waiting", plan=RowPlan(nearby(width=4)))  # type: ignore[call-arg, arg-type]
    assert Recipe.from_json(json.loads(json.dumps(made.to_json()))) == made
    assert list(PASSES)[-1] == "Wait"
    with pytest.raises(UnknownName, match=r"unknown region 'Nearbye'\. Did you mean 'Nearby'"):
        RowPlan.from_json({"region": {"name": "Nearbye"}})


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("dgraph.passes", "Nearby", "Nearby", "is no subclass of Pass"),
        ("dgraph.parts", "Wait", "Wait", "is no subclass of Part"),
        ("dgraph.passes", "Waiter", "Wait", "is the class Wait; both names must be the same"),
        ("dgraph.parts", "Block", "Nearby", "has the name of one of dgraph's own"),
    ],
)
def test_a_part_that_is_none_is_refused(install: Install, group: str, name: str, value: str, message: str) -> None:
    """Asked for by its name it is an error; going through all, a warning. A name of dgraph's own is an error of all."""
    install("broken", {group: {name: f"broken_methods:{value}"}}, PARTS_OUTSIDE)
    table: Any = PASSES if group == "dgraph.passes" else PARTS
    message = f"distribution 'broken'.*{message}"
    if name in table.own:
        with pytest.raises(PluginError, match=message):
            list(table)
        return
    with pytest.raises(PluginError, match=message):
        table[name]
    with pytest.warns(DgraphWarning, match=message):
        assert list(table) == list(table.own)


def test_a_family_that_cannot_be_imported_is_in_nobody_else_s_way(install: Install) -> None:
    install("broken", {"dgraph.models": {"gone": "broken_methods.nowhere:gone"}})
    with pytest.warns(DgraphWarning, match="'gone' of distribution 'broken'.*cannot be imported"):
        assert resolve("tiny_sdar").spec.family == "sdar"
    with (
        pytest.warns(DgraphWarning, match="'gone' of distribution 'broken'"),
        pytest.raises(UnknownName, match="unknown model 'gone'"),
    ):
        resolve("gone")


@pytest.mark.parametrize("value", ["Slow", "patient", "SOMETHING"])
def test_what_is_no_family_is_in_nobody_else_s_way(install: Install, value: str) -> None:
    """A class, whose objects might be families, is none."""
    source = SOURCE + "\nclass SOMETHING:\n    name = summary = ''\n    def adopt(self): ...\n    def open(self): ...\n"
    install("broken", {"dgraph.models": {"afam": f"broken_methods:{value}"}}, source)
    with pytest.warns(DgraphWarning, match="'afam' of distribution 'broken'.*is no Family and no Embedded"):
        assert resolve("tiny_sdar").spec.family == "sdar"


def test_they_combine_with_what_keeps_keys(install: Install) -> None:
    install("patience", {"dgraph.recipes": {"patient": "patience_methods:patient"}})
    both = build(RECIPES, "maskkv+patient", BOTH, {"pairs": 7, "every": 3})
    assert (both.name, both.kv is not None) == ("maskkv+patient", True)
    with pytest.raises(InputError, match=r"one part that selects keys, then .*; write 'maskkv\+patient'"):
        build(RECIPES, "patient+maskkv", BOTH, {})
    with pytest.raises(UnknownName, match=r"unknown part of a recipe 'patent'\. Did you mean 'patient'"):
        build(RECIPES, "maskkv+patent", BOTH, {})


HALVES = """
from dataclasses import dataclass, replace
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Extent
from dgraph.plans.rows import RowPlan
from dgraph.passes import SparseKV
from dgraph.recipes import Dense, KeyOptions, RecipeOptions
from dgraph.recipes.kept import KVSelection

@dataclass(frozen=True, kw_only=True)
class Sliding(RecipeOptions):
    '''Forward the block and rows before it.'''
    before: int = 0
    name = "sliding"
    extent = Extent.BLOCK
    def build(self, spec):
        return replace(Dense().build(spec), name=self.name, plan=RowPlan(Block(self.before)))

@dataclass(frozen=True, kw_only=True)
class Newest(KeyOptions):
    '''Keep half of the keys.'''
    share: float = 0.5
    name = "newest"
    window = "response"
    def selection(self, spec):
        return KVSelection(KVPlan(self.window, ratio=self.share), SparseKV("mask_voting", self.share))
"""


def test_dataclasses_and_halves_of_another_package(install: Install) -> None:
    names = {"sliding": "halves_methods:Sliding", "newest": "halves_methods:Newest", "other": "halves_methods:Sliding"}
    install("halves", {"dgraph.recipes": names}, HALVES)
    assert build(RECIPES, "sliding", BOTH, {"before": 2, "kv_dtype": "fp8"}).name == "sliding"
    assert options_of(RECIPES["newest+sliding"]).keys() >= {"share", "before", "kv_dtype"}
    both = build(RECIPES, "newest+sliding", BOTH, {"share": 0.25})
    assert (both.name, both.kv.ratio) == ("newest+sliding", 0.25)  # type: ignore[union-attr]
    assert build(RECIPES, "maskkv+sliding", BOTH, {"pairs": 3}).name == "maskkv+sliding"
    assert build(RECIPES, "newest+focus", BOTH, {}).name == "newest+focus"
    with pytest.raises(InputError, match="newest\\+sliding: recipe 'sliding' forwards rows before the block"):
        build(RECIPES, "newest+sliding", BOTH, {"before": 2})
    with pytest.raises(InputError, match=r"recipe 'newest' forwards no rows by itself.*'newest\+focus'"):
        build(RECIPES, "newest", BOTH, {})
    with pytest.raises(PluginError, match="is a recipe whose name is 'sliding'; both names must be the same"):
        build(RECIPES, "other", BOTH, {})


def test_rules_and_settings_of_another_package(install: Install) -> None:
    names = {"slow": "patience_methods:Slow", "warm": "patience_methods:warm"}
    install("patience", {"dgraph.policies": names})
    assert "slow" in POLICIES
    assert "slow" not in PRESETS
    assert "warm" in PRESETS
    assert "warm" not in POLICIES
    assert policy_of("slow", count=2).count == 2  # type: ignore[attr-defined]
    assert Decoding(policy="warm").sampling == Sampler(temperature=0.7, top_k=50)
    assert Decoding(policy="warm", temperature=0.0, threshold=0.5).sampling == Sampler(top_k=50)
    with pytest.raises(UnknownName, match="Did you mean 'slow'"):
        policy_of("slwo")


def test_ops_are_imported_when_one_is_looked_up(install: Install) -> None:
    source = (
        "from dgraph.ops import define\n"
        "def wait(x: 'torch.Tensor') -> 'torch.Tensor':\n"
        "    return x.clone()\n"
        "WAIT = define('patience_looked_up::wait', wait, samples=lambda draw: (), contract='Copies.')\n"
    )
    install("patience", {"dgraph.ops": {"patience": "patience_methods"}}, "import torch\n" + source)
    name = "patience_looked_up::wait"
    assert OPS["rope"].name == "rope"
    assert name not in OPS, "imported when it is needed"
    with pytest.raises(UnknownName, match=r"unknown op 'patience_looked_up::wiat'\. Did you mean 'patience_looked_up"):
        OPS["patience_looked_up::wiat"]
    assert OPS[name] is OPS.pop(name), "and stays out of the table that other tests see"


def test_an_op_s_module_that_cannot_be_imported_is_named(install: Install) -> None:
    install("broken", {"dgraph.ops": {"wait": "broken_methods"}}, "import no_such_thing")
    with pytest.raises(PluginError, match=r"distribution 'broken'.*cannot be imported: ModuleNotFoundError"):
        OPS["broken::wait"]


def test_ops_are_imported_when_a_kept_graph_names_one(install: Install) -> None:
    source = (
        "import torch\n"
        "schema = '(Tensor x) -> Tensor'\n"
        "torch.library.custom_op('patience::wait', lambda x: x.clone(), mutates_args=(), schema=schema)\n"
    )
    install("patience", {"dgraph.ops": {"patience": "patience_methods"}}, source)
    schema = "patience::wait(Tensor x) -> Tensor"
    with pytest.raises(FormatError, match=r"there is no op 'patience\.never\.default'"):
        _target("patience.never.default", schema)
    assert str(_target("patience.wait.default", schema)) == "patience.wait.default"
    assert "wait" not in OPS


@pytest.mark.parametrize(
    ("groups", "source", "message"),
    [
        ({"patient": "broken_methods:patient"}, "import no_such_thing", "cannot be imported: ModuleNotFoundError"),
        ({"patient": "broken_methods:missing"}, SOURCE, "cannot be imported: AttributeError"),
        ({"patient": "broken_methods:warm"}, SOURCE, "is no builder"),
        ({"patient": "broken_methods:Loose"}, SOURCE + LOOSE, r"takes \*\*options; it must name each"),
        ({"focus": "broken_methods:patient"}, SOURCE, "has the name of one of dgraph's own"),
    ],
    ids=["import", "attribute", "no builder", "options without names", "clash"],
)
def test_what_cannot_be_used_names_its_distribution(
    install: Install, groups: dict[str, str], source: str, message: str
) -> None:
    install("broken", {"dgraph.recipes": groups}, source)
    assert RECIPES["dense"], "what is dgraph's own goes on"
    with pytest.raises(PluginError, match=f"distribution 'broken'.*{message}"):
        build(RECIPES, "patient", BOTH, {})


def test_a_builder_that_returns_no_recipe_is_named(install: Install) -> None:
    install("careless", {"dgraph.recipes": {"careless": "careless_methods:careless"}})
    with pytest.raises(InputError, match=r"builder of recipe 'careless' must return a dgraph\.Recipe, got None"):
        build(RECIPES, "careless", BOTH, {})


def test_two_distributions_with_one_name_are_both_named(install: Install) -> None:
    install("one", {"dgraph.recipes": {"patient": "one_methods:patient"}})
    install("two", {"dgraph.recipes": {"patient": "two_methods:patient"}})
    with pytest.raises(PluginError, match=r"'(one|two)' and distribution '(one|two)' both declare 'patient'"):
        build(RECIPES, "patient", BOTH, {})


def test_a_rule_that_is_none_is_refused(install: Install) -> None:
    install("broken", {"dgraph.policies": {"late": "broken_methods:Slow", "odd": "broken_methods:patient"}})
    with pytest.raises(PluginError, match="is a rule whose name is 'slow'"):
        policy_of("late")
    with pytest.raises(PluginError, match="is neither a subclass of DecodeRule nor an object of one"):
        policy_of("odd")


def test_no_option_of_a_recipe_has_the_name_of_an_argument() -> None:
    assert {"model", "facts", *(f.name for f in fields(Compilation))} < arguments()
    assert "options" not in arguments()
    for name, builder in RECIPES.items():
        assert arguments().isdisjoint(options_of(builder)), name


def test_an_option_with_the_name_of_an_argument_is_refused(install: Install) -> None:
    install("broken", {"dgraph.recipes": {"careless": "broken_methods:careless"}})
    for name in ("careless", "maskkv+careless"):
        with pytest.raises(InputError, match=f"recipe '{re.escape(name)}' has the option 'backend', which is an arg"):
            dgraph.optimize("tiny_llada", name, backend="eager")


def test_an_option_named_cache_reaches_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = dgraph.optimize("tiny_llada", "fast_dllm", cache="prefix", backend="eager")
    assert made.recipe == dgraph.recipe("fast_dllm", made.spec, cache="prefix")
    assert made.recipe.plan is not None
    assert made.recipe.plan.region == Suffix()
    assert not list(tmp_path.iterdir()), "and is no folder"


SCHEDULER = """
from dataclasses import dataclass
from dgraph.engine.scheduling.schedulers import SchedulingStrategy

@dataclass(frozen=True)
class Last(SchedulingStrategy):
    "One request at a time."
    name = "last"
    def admits(self, job, view):
        return not view.running
"""


def test_a_scheduler_of_another_package(install: Install) -> None:
    install("turns", {"dgraph.schedulers": {"last": "turns_methods:Last", "first": "turns_methods:Last"}}, SCHEDULER)
    requests = [Request(0.0, 64, 32)] * 3
    found = simulate(requests, Budgets(rows=512, sequences=3, pages=99), Method(), "last")
    assert (found.scheduler, found.active) == ("last", 1.0)
    with pytest.raises(PluginError, match="is a scheduler whose name is 'last'; both names must be the same"):
        scheduler_of("first")
