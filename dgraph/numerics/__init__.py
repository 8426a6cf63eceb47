"""The numbers of graphs on small inputs, op by op.

`check_effects` holds every pass of a recipe to its `Effect`. `run` gives the value of each node, and `first_parting`
the first node at which two runs differ. `TOLERANCES` says by how much sums in another order may differ.
"""

from __future__ import annotations

from dgraph.numerics.effects import check_effects
from dgraph.numerics.parting import TOLERANCES, Parting, first_parting
from dgraph.numerics.run import Run, run
from dgraph.numerics.steps import SmallStep, State, small_steps

__all__ = [
    "TOLERANCES",
    "Parting",
    "Run",
    "SmallStep",
    "State",
    "check_effects",
    "first_parting",
    "run",
    "small_steps",
]
