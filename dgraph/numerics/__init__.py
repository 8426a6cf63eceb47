"""What graphs compute on small inputs, op by op: whether a pass keeps to its `Effect`, and where two graphs part.

`check_effects` holds every pass of a recipe to what it declares. `run` gives the value of each node, `first_parting`
the first node at which two runs differ, and `TOLERANCES` how far results may when sums are taken in another order.
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
