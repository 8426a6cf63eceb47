"""Options of recipes: a frozen dataclass per recipe, whose fields are the options and which builds the recipe."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, ClassVar

from dgraph.errors import InputError
from dgraph.errors.former import tell_going
from dgraph.plans.papers import Paper
from dgraph.plans.regions import Extent
from dgraph.recipes.base import Recipe
from dgraph.recipes.costs import Cost, measured
from dgraph.spec import ModelSpec

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$", flags=re.MULTILINE)
_ENTRY = re.compile(r"^ {4}([a-z_]\w*(?:, [a-z_]\w*)*): (.*(?:\n(?: {5,}.*)?)*)", flags=re.MULTILINE)
_READ = {"int": int, "float": float, "bool": bool, "str": str}
"""Types that are read from text, by the name with which an annotation begins."""
_FORMER = "use"
"""Key of a field's metadata that says what to use in its place."""


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Base of recipes. A recipe is a frozen dataclass: its fields, each with a default, are its options.

        @dataclass(frozen=True, kw_only=True)
        class Sliding(RecipeOptions):
            '''Forward the block and rows before it; the whole canvas where a block starts.'''

            before: int = 16

            name = "sliding"

            def build(self, spec):
                return Recipe(self.name, 1, phases_of(spec, *ending(spec)), plan=RowPlan(Block(self.before)))

    The first sentence of its docstring is the summary. `dgraph.optimize(model, Sliding(before=8))` takes it as it is;
    the entry-point group `dgraph.recipes` finds it by name.

    Class attributes:
        name: the recipe's name.
        papers: publications that it implements; `dgraph.plans.papers.OURS` for none.
        costs: measured costs of its defaults.
        extent: rows that a step forwards if it is not whole. None: read from the row plan that it builds.
        carries: values beside keys and values that steps update by what changes in all keys; "" for none.
        reuses: results of rows that a layer takes from earlier steps; "" for none.

    Attributes:
        max_num_logits: rows whose logits exist at a time; None: as the recipe has it, mostly 2048.
        kv_dtype: storage of keys and values: "fp8", or None for the dtype of the model; see `CacheKV`.
    """

    name: ClassVar[str]
    papers: ClassVar[tuple[Paper, ...]] = ()
    costs: ClassVar[tuple[Cost, ...]] = ()
    extent: ClassVar[Extent | None] = None
    carries: ClassVar[str] = ""
    reuses: ClassVar[str] = ""

    max_num_logits: int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if _FORMER in each.metadata and getattr(self, each.name) is not None:
                tell_going(f"recipe {self.name!r}: the option {each.name!r}", each.metadata[_FORMER])

    def build(self, spec: ModelSpec) -> Recipe:
        """The recipe for a model, without the options of every recipe; each recipe implements it."""
        raise InputError(
            f"recipe {self.name!r} forwards no rows by itself: its class has no method build(spec). Combine it with "
            f"one that does, as {self.name + '+focus'!r}."
        )

    def recipe(self, spec: ModelSpec) -> Recipe:
        """The recipe for a model.

        Raises:
            InputError: an option out of range, or one that does not fit the model.
        """
        made: object = self.build(spec)
        if not isinstance(made, Recipe):
            raise InputError(f"the builder of recipe {self.name!r} must return a dgraph.Recipe, got {made!r}.")
        if self.max_num_logits is not None:
            made = made.with_logit_rows(self.max_num_logits)
        return made if self.kv_dtype is None else made.with_kv_dtype(self.kv_dtype)


def former(use: str) -> Any:
    """Default of an option that goes with version 0.3; `use` says what to write in its place."""
    return field(default=None, repr=False, metadata={_FORMER: use})


@dataclass(frozen=True)
class Builder:
    """Builder of a recipe: `RECIPES["focus"](spec, alpha=1.8)`.

    Attributes:
        options: the dataclass of the recipe's options.
    """

    options: type[RecipeOptions]

    @classmethod
    def of(cls, name: str, given: Any) -> Builder:
        """The builder of a recipe from outside: a subclass of `RecipeOptions`, or a function.

        Raises:
            ValueError: it is neither, or has an option that is not named or has no default.
        """
        if isinstance(given, Builder):
            return given
        if not isinstance(given, type):
            return cls(_from_function(name, given))
        if not issubclass(given, RecipeOptions) or not is_dataclass(given):
            raise ValueError(f"is no builder: (spec, option=default, ...) -> Recipe, got {given!r}")
        if getattr(given, "name", None) != name:
            raise ValueError(f"is a recipe whose name is {getattr(given, 'name', None)!r}; both names must be the same")
        for option in fields(given):
            _check_option(option.name, option.default is MISSING and option.default_factory is MISSING)
        return cls(given)

    def __call__(self, spec: ModelSpec, **options: Any) -> Recipe:
        return self.options(**options).recipe(spec)

    @property
    def summary(self) -> str:
        """First sentence of the recipe's docstring, on one line."""
        first, stop, _ = " ".join((self.options.__doc__ or "").partition("\n\n")[0].split()).partition(". ")
        return first + stop.rstrip()

    @property
    def accepted(self) -> tuple[Option, ...]:
        """The recipe's options, those of every recipe last."""
        every = {f.name for f in fields(RecipeOptions)}
        docs: dict[str, str] = {}
        for kind in reversed(self.options.__mro__):
            docs |= documented(vars(kind).get("__doc__") or "")
        found = sorted(fields(self.options), key=lambda f: f.name in every)
        return tuple(
            Option(f.name, _default(f), str(f.type), docs.get(f.name, ""), _FORMER in f.metadata) for f in found
        )

    @property
    def listed(self) -> tuple[Option, ...]:
        """The recipe's options without former ones."""
        return tuple(option for option in self.accepted if not option.former)


@dataclass(frozen=True)
class Option:
    """An option of a recipe.

    Attributes:
        name, default: its name and default.
        annotation: its type as it is written.
        doc: its entry in the docstring.
        former: True for one that goes with version 0.3.
    """

    name: str
    default: Any
    annotation: str
    doc: str
    former: bool


def options_of(builder: Builder | Callable[..., Recipe]) -> dict[str, Any]:
    """A builder's options and their defaults, in order; former ones are among them, with the default None."""
    return {option.name: option.default for option in Builder.of("", builder).accepted}


def _default(option: Field[Any]) -> Any:
    return option.default_factory() if option.default_factory is not MISSING else option.default


def documented(docstring: str) -> dict[str, str]:
    """Meanings of arguments and attributes by name, from a docstring's sections; a shared entry is that of each."""
    pieces = _SECTION.split(inspect.cleandoc(docstring))
    found: dict[str, str] = {}
    for title, section in zip(pieces[1::2], pieces[2::2], strict=True):
        for names, said in _ENTRY.findall(section) if title in ("Args", "Attributes") else ():
            found |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return found


def types_of(builder: Builder | Callable[..., Recipe]) -> dict[str, Any]:
    """The types in which a builder's options are read from text: the types of their defaults.

    An option with the default None has the type that its annotation begins with ("float | None"), else it is a whole
    number. A tuple's values have the type of its first value. The values of an empty tuple have the type of its
    annotation ("tuple[int, ...]"), else text.
    """

    def kind(option: Option) -> Any:
        default, annotation = option.default, option.annotation
        if isinstance(default, tuple):
            named = re.fullmatch(r"tuple\[(\w+), \.\.\.\]", annotation)
            each = _READ.get(named[1], str) if named else str
            return tuple[type(default[0]) if default else each, ...]  # type: ignore[misc]
        if default is not None:
            return type(default)
        begun = re.match(r"\w+", annotation)
        return _READ.get(begun[0], int) if begun else int

    return {option.name: kind(option) for option in Builder.of("", builder).accepted}


def costs_of(builder: Builder | Callable[..., Recipe]) -> tuple[Cost, ...]:
    """Costs of a builder's defaults, table by table; empty if none was measured."""
    options = Builder.of("", builder).options
    return options.costs or measured(options.name)


def _from_function(name: str, function: Any) -> type[RecipeOptions]:
    """The options of a builder function (spec, option=default, ...) -> Recipe."""
    try:
        _, *parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ValueError(f"is no builder: (spec, option=default, ...) -> Recipe, got {function!r}") from None
    options = []
    for p in parameters:
        if p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ValueError(f"takes {p}; it must name each of its options, with a default")
        _check_option(p.name, p.default is inspect.Parameter.empty)
        default: Any = field(default_factory=functools.partial(getattr, p, "default"))
        options.append((p.name, p.annotation, default))

    def build(self: RecipeOptions, spec: ModelSpec) -> Recipe:
        return function(spec, **{name: getattr(self, name) for name, *_ in options})

    own = {"name": name, "__doc__": function.__doc__, "build": build, "costs": getattr(function, "costs", ())}
    return make_dataclass(name or "Options", options, bases=(RecipeOptions,), namespace=own, frozen=True, kw_only=True)


def _check_option(name: str, needed: bool) -> None:
    if needed:
        raise ValueError(f"has the option {name!r} without a default")
    if hasattr(RecipeOptions, name) and name not in {f.name for f in fields(RecipeOptions)}:
        raise ValueError(f"has the option {name!r}, which is an attribute of every recipe; rename it")
