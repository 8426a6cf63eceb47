"""Arms: a recipe and a decoding rule, and sweeps that make several arms of one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgraph.errors import InputError, UnknownName
from dgraph.recipes import RECIPES, Recipe, build, builder_of
from dgraph.recipes import options_of as recipe_options
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.policies import DecodeRule, policy_of
from dgraph.runtime.policies import options_of as rule_options
from dgraph.runtime.sampling.sampler import SETTINGS
from dgraph.spec import ModelSpec

SHORT = ("threshold", "steps")
"""Options of a rule without a name: one of them (see `policy_of`)."""


@dataclass(frozen=True)
class Choice:
    """A recipe or a rule by name, with options; a rule's name may be "" (see `policy_of`)."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.name, *(f"{key}={_text(value)}" for key, value in self.options.items())]))

    def without(self, key: str | None) -> Choice:
        """The same choice without an option."""
        return Choice(self.name, {k: v for k, v in self.options.items() if k != key})


@dataclass(frozen=True)
class Arm:
    """A recipe under a decoding rule, and one line of a table.

    Attributes:
        recipe, rule: recipe and rule by name and options, as they were asked for.
        built, policy: the recipe and the rule as values; equal ones make equal arms.
        swept: the swept options that this arm has, and their values.
        weights: the format in which weights are stored, or the folder that has them; None for weights as they are.
        open_blocks: see `Decoding`.
    """

    recipe: Choice = field(compare=False)
    rule: Choice = field(compare=False)
    built: Recipe
    policy: DecodeRule
    swept: Mapping[str, Any] = field(default_factory=dict, compare=False)
    weights: str | None = None
    open_blocks: int = 1

    @property
    def label(self) -> str:
        """Recipe, format of the weights, rule and open blocks in words."""
        return f"{self._recipe_label(None)}; {self.rule_label}"

    def _recipe_label(self, key: str | None) -> str:
        recipe = str(self.recipe.without(key))
        return recipe if self.weights is None else f"{recipe}, weights {self.weights}"

    @property
    def rule_label(self) -> str:
        """The rule in words."""
        return self._with_open(str(self.rule) or str(Choice("", {"threshold": self.rule_json()["threshold"]})))

    def _with_open(self, rule: str) -> str:
        several = "" if self.open_blocks == 1 else f"open_blocks={self.open_blocks}"
        return ", ".join(filter(None, [rule, several]))

    def rule_json(self) -> dict[str, Any]:
        """The rule as plain values, every option included."""
        return self.policy.to_json()

    def line(self, key: str | None) -> str:
        """The label without a swept option: what it has in common with the other arms of that sweep."""
        rule = self.rule.without(key)
        own = rule.options or rule.name or key in self.rule.options
        shown = self._with_open(str(rule)) if own else self.rule_label
        return "; ".join(filter(None, [self._recipe_label(key), shown]))


def expand(
    spec: ModelSpec,
    recipes: Sequence[Choice],
    rules: Sequence[Choice],
    sweeps: Mapping[str, Sequence[Any]],
    against: Choice | None = None,
    weights: Sequence[str | None] = (None,),
    open_blocks: Sequence[int] = (1,),
) -> tuple[list[Arm], dict[Arm, Arm]]:
    """Every recipe under every rule, at every combination of swept options that they have.

    Args:
        spec: the model's spec.
        recipes, rules: recipes and rules to combine.
        sweeps: values by option of a recipe or of a rule. A recipe or rule without the option is left as it is.
        against: the recipe that others are compared with, each under its own rule, with weights as they are and one
            open block; None for no comparison.
        weights: formats in which weights are stored, or folders, each with every recipe; None for weights as they are.
        open_blocks: numbers of blocks that are open together, each with every recipe and rule.

    Returns:
        The arms, equal ones once, each after the one that it is compared with; and what each is compared with.

    Raises:
        UnknownName: a recipe, rule or option that does not exist, or a sweep that concerns none of them.
        InputError: a value out of range.
    """
    for key in sweeps:
        known = {name for choice in recipes for name in _known(choice, of_rule=False)}
        known |= {name for choice in rules for name in _known(choice, of_rule=True)}
        if key not in known:
            raise UnknownName("option to sweep", key, known)
    arms: dict[Arm, Arm] = {}
    references: dict[Arm, Arm] = {}
    for recipe, stored, rule, several in itertools.product(recipes, weights, rules, open_blocks):
        mine = [key for key in sweeps if key in {*_known(recipe, of_rule=False), *_known(rule, of_rule=True)}]
        for values in itertools.product(*(sweeps[key] for key in mine)):
            swept = dict(zip(mine, values, strict=True))
            own = {k: v for k, v in swept.items() if k in _known(recipe, of_rule=False)}
            others = {k: v for k, v in swept.items() if k not in own}
            chosen = Choice(rule.name, {**_yielding(rule, others), **others})
            arm = _arm(spec, Choice(recipe.name, {**recipe.options, **own}), chosen, swept)
            arm = replace(arm, weights=stored, open_blocks=several)
            if against is not None:
                reference = _arm(spec, against, chosen, others)
                arms.setdefault(reference, reference)
                references[arm] = reference
            arms[arm] = arm  # in the place, but not in the words, of an equal one that came as a reference
    return list(arms.values()), references


def _arm(spec: ModelSpec, recipe: Choice, rule: Choice, swept: Mapping[str, Any]) -> Arm:
    if rule.name:
        policy = policy_of(rule.name, **rule.options)
    else:
        chosen = Decoding(threshold=_one(rule), steps=rule.options.get("steps")).for_model(spec)
        policy, rule = chosen.rule, Choice(chosen.policy) if isinstance(chosen.policy, str) else rule
    if not isinstance(policy, DecodeRule):
        raise InputError(f"{policy!r} cannot be told from others; give a rule by name.")
    return Arm(recipe, rule, build(RECIPES, recipe.name, spec, dict(recipe.options)), policy, swept)


def _one(rule: Choice) -> float | None:
    for option in rule.options:
        if option not in SHORT:
            raise UnknownName("option of a rule without a name", option, SHORT)
    return rule.options.get("threshold")


def _yielding(rule: Choice, swept: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a rule that a sweep leaves; without a name, threshold and steps exclude each other."""
    return {} if not rule.name and set(swept) & set(SHORT) else rule.options


def _known(choice: Choice, of_rule: bool) -> Sequence[str]:
    """Names of the options that a choice can have."""
    if of_rule:
        return (*rule_options(choice.name), *SETTINGS) if choice.name else SHORT
    return tuple(recipe_options(builder_of(RECIPES, choice.name)))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
