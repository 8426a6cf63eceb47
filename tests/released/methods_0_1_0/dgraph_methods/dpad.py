"""DPad (arXiv 2508.14148): of the masks after the block a step sees a few, and the fewer the farther they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dgraph import RECIPES, ModelSpec, Recipe
from dgraph.errors import InputError
from dgraph.passes import SlotKV
from dgraph.plans.regions import Region
from dgraph.plans.view import View
from dgraph.recipes import build
from dgraph.runtime.seeds import mix, uniform


@dataclass(frozen=True)
class NearSuffix(Region):
    """The rows of another region; of those after the block only some near ones exist.

    The row at distance d from the block (1 for the first one after it) exists with the probability
    density * exp(-(decay * d / window)^2 / 2), cut off at 1, up to d = window. It is drawn anew for every block, from
    nothing but the seed, the position and where the block begins.

    Attributes:
        of: which of the rows that exist a step forwards.
        window: distance after which no row exists, at least 1.
        density: the probability next to the block; at least 0, and above 1 for a plateau there.
        decay: how many standard deviations of the bell curve the window is; 0 for no decay.
        seed: of the draws, in [0, 2^32).
    """

    of: Region
    window: int
    density: float = 1.0
    decay: float = 3.0
    seed: int = 0

    hides = True

    def __post_init__(self) -> None:
        for name, valid in (
            ("window", isinstance(self.window, int) and self.window >= 1),
            ("density", self.density >= 0),
            ("decay", self.decay >= 0),
            ("seed", isinstance(self.seed, int) and 0 <= self.seed < 1 << 32),
        ):
            if not valid:
                raise InputError(f"dpad: {name} is out of range, got {getattr(self, name)!r}; see NearSuffix.")

    def rows(self, view: View) -> Tensor:
        return self.of.rows(view)

    def seen(self, view: View) -> Tensor:
        distance = view.positions - (view.start + view.block - 1)[:, None]
        chance = self.density * (-0.5 * (self.decay * distance / self.window) ** 2).exp()
        drawn = uniform(mix(mix(view.start ^ self.seed)[:, None] ^ view.positions))
        return (distance < 1) | ((distance <= self.window) & (drawn < chance))


def dpad(
    spec: ModelSpec, on: str = "dense", window: int = 64, density: float = 1.0, decay: float = 3.0, seed: int = 0
) -> Recipe:
    """DPad: of the masks after the block, only a few near ones are forwarded and seen.

    Args:
        spec: the model; bidirectional.
        on: the recipe whose steps forward what is left: "dense", "fast_dllm", "focus" or another one with a row plan.
        window, density, decay, seed: see `NearSuffix`.
    """
    return near_suffix(build(RECIPES, on, spec, {}), window, density, decay, seed)


def near_suffix(recipe: Recipe, window: int, density: float = 1.0, decay: float = 3.0, seed: int = 0) -> Recipe:
    """Any recipe of a bidirectional model with DPad on top; see `dpad`."""
    if recipe.plan is None or recipe.plan.region.foresees:
        raise InputError(
            f"dpad: recipe {recipe.name!r} must say which rows a step of a bidirectional model forwards, by a region "
            f"that asks for no coming row, got {recipe.plan}. Use 'dense', 'fast_dllm' or 'focus' on LLaDA or Dream."
        )
    plan = replace(recipe.plan, region=NearSuffix(recipe.plan.region, window, density, decay, seed))
    return replace(recipe.inserting(SlotKV(), after="CacheKV"), name="dpad", plan=plan)
