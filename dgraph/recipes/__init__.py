"""Recipes: published systems, each as a list of passes per phase."""

from __future__ import annotations

from dgraph.recipes.base import Builder, Phase, Recipe, options_of
from dgraph.recipes.bidirectional import dkv_cache, fast_dllm, vicinity
from dgraph.recipes.build import build, builder_of, check_recipe
from dgraph.recipes.compose import COMBINATIONS
from dgraph.recipes.dense import dense
from dgraph.recipes.dllm_cache import dllm_cache
from dgraph.recipes.dyllm import dyllm
from dgraph.recipes.focus import focus
from dgraph.recipes.sparse import dllm_serve, maskkv, sparse_dllm

RECIPES: dict[str, Builder] = {
    "dense": dense,
    "focus": focus,
    "fast_dllm": fast_dllm,
    "dkv_cache": dkv_cache,
    "vicinity": vicinity,
    "dyllm": dyllm,
    "dllm_cache": dllm_cache,
    "maskkv": maskkv,
    "dllm_serve": dllm_serve,
    "sparse_dllm": sparse_dllm,
    **COMBINATIONS,
}
"""Every recipe's builder by name."""

__all__ = ["RECIPES", "Builder", "Phase", "Recipe", "build", "builder_of", "check_recipe", "options_of"]
