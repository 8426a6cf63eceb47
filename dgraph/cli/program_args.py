"""Saved programs on the command line: the trust that they need, and the options that were settled with them."""

from __future__ import annotations

from typing import Annotated

import typer

from dgraph.cli.decoding_args import said
from dgraph.errors import InputError

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Open a saved program, which contains compiled code, from a source that you trust."),
]

_COMPILED = (
    *("recipe", "option", "kv_dtype", "backend", "buckets", "check"),
    *("dtype", "weights", "adapter", "device", "fact", "calibration"),
)
"""Parameters that say how a program is compiled."""
_OF_MODELS = ("data", "out", "ray", "replicas", "tp")
"""Parameters of ways to run that load a model."""


def check(context: typer.Context, program: bool) -> None:
    """Refuse options that do not go with a saved program, or only with one.

    Args:
        context: of the command.
        program: True if its model is one.

    Raises:
        InputError: such an option was given.
    """
    from dgraph import parallel

    there = said(context)
    if not program and "trust" in there:
        raise InputError("--trust is for the folder of a saved program, which this model is not; leave it out.")
    for names, reason in (
        (_COMPILED, "was settled when this program was saved; leave it out, or save another program"),
        (_OF_MODELS, "needs a model, and got a saved program; give the model that this one was made of"),
    ):
        for name in names if program else ():
            if name in there:
                raise InputError(f"--{name.replace('_', '-')} {reason}.")
    if program and parallel.started():
        raise InputError("a saved program runs on one device: start it without torchrun.")
