"""Compilation of a model: the base graph, the phases of a recipe, and the compiled model."""
