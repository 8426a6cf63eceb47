"""Tests for packages that add a method: tiny random models of every family, and the checks that a method must pass.

    from dgraph.testing import check_batch_equals_alone, check_lossless, models

    @pytest.mark.parametrize("model", models("bidirectional"), ids=str)
    def test_lossless(model):
        check_lossless(model, "mine", {"share": 1.0})

Each check runs a recipe on a model and raises AssertionError with the difference. Recipes are found by name as
everywhere, those of installed packages included; a `Recipe` value works, too. The checks of an op are in
`dgraph.testing.ops`. `ranks` runs a function on the ranks of a sharded model, as threads.
"""

from __future__ import annotations

from dgraph.testing.checks import (
    check_against,
    check_backends_agree,
    check_batch_equals_alone,
    check_effects,
    check_fires,
    check_lossless,
    check_ranks_agree,
    check_skips,
)
from dgraph.testing.models import TinyModel, models, prompts
from dgraph.testing.ranks import ranks

__all__ = [
    "TinyModel",
    "check_against",
    "check_backends_agree",
    "check_batch_equals_alone",
    "check_effects",
    "check_fires",
    "check_lossless",
    "check_ranks_agree",
    "check_skips",
    "models",
    "prompts",
    "ranks",
]
