"""Recipes: published systems, each as a list of passes per phase."""

from __future__ import annotations

from dgraph.recipes.base import Builder, Phase, Recipe, build, check_recipe, options_of
from dgraph.recipes.bidirectional import dkv_cache, fast_dllm, vicinity
from dgraph.recipes.dense import dense
from dgraph.recipes.dllm_cache import dllm_cache
from dgraph.recipes.dyllm import dyllm
from dgraph.recipes.focus import focus

RECIPES: dict[str, Builder] = {
    "dense": dense,
    "focus": focus,
    "fast_dllm": fast_dllm,
    "dkv_cache": dkv_cache,
    "vicinity": vicinity,
    "dyllm": dyllm,
    "dllm_cache": dllm_cache,
}
"""Every recipe's builder by name."""

__all__ = ["RECIPES", "Builder", "Phase", "Recipe", "build", "check_recipe", "options_of"]
