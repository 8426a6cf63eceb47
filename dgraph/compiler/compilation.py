"""Settings by which a program is compiled, as one value: `Compilation`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dgraph.errors import InputError, UnknownName
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.runtime.decoding import Decoding

CHECKS = ("numerics",)
"""Names that `Compilation.check` takes."""


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """Sizes for which graphs are captured and kernels timed before the first call; see `CompiledModel.warm_up`.

    Attributes:
        batch: sequences at a time, at least 1.
        tokens: positions per sequence, prompt and response together; None for the model's longest.
        decoding: settings by which later calls of `generate` decode.
    """

    batch: int
    tokens: int | None = None
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Everything that a caller says about how a program is compiled.

    Attributes:
        backend: "inductor", "eager" to run op by op, or "auto", so that a first answer waits for no compiler. On a CPU
            "auto" is "inductor" if all code of the program is in the artifact cache, and "eager" otherwise. A program
            runs by one of them throughout; `CompiledModel.compiler.backend` says which, since results may differ in
            the last bits. On a GPU and over ranks it is "inductor".
        buckets: row counts to pad to: "exact", "hybrid", "fine" or a list (see `Buckets`); None for "exact" on a CPU
            and "hybrid" on a GPU.
        graphs: on a GPU, replay the stages of a step, and forwards of prompts of few rows, as CUDA graphs, one per
            bucket; False launches op by op.
        warmup: None records a CUDA graph when its bucket is first met; a `WarmUp` records all of them now.
        artifacts: store of compiled code and captured graphs for later processes. True for the user's artifact cache
            (see `dgraph cache path`), False for no store, or a folder.
        tune: on a GPU, let kernels take the tilings (sizes of launches) that were the fastest on this kind of device. A
            warm-up times them once for the shapes that it meets, and stores the choices in the cache. Without a cache
            no tiling is timed. A tiling changes the order of sums, so results may differ in the last bits from those of
            another tiling. False for the tilings that kernels derive from shapes.
        check: "numerics" runs every pass of the recipe on small inputs first, and refuses one that is not what it
            declares (see `dgraph.numerics.check_effects`); it takes seconds, and more for a large model on a CPU. ""
            for no check. Default: what the environment variable DGRAPH_CHECK says.

    Raises:
        InputError: a value out of range, or two that exclude each other.
        UnknownName: another check.
    """

    backend: str = "inductor"
    buckets: str | Sequence[int] | None = None
    graphs: bool = True
    warmup: WarmUp | None = None
    artifacts: bool | str | Path = True
    tune: bool = True
    check: str = field(default_factory=lambda: os.environ.get("DGRAPH_CHECK", ""))

    def __post_init__(self) -> None:
        if self.check and self.check not in CHECKS:
            raise UnknownName("check (DGRAPH_CHECK)", self.check, CHECKS)
        RegionCompiler(self.backend)
        if self.buckets is not None:
            Buckets.of(self.buckets)
        if self.warmup is not None and not isinstance(self.warmup, WarmUp):
            raise InputError(f"warmup must be a WarmUp(batch=...), or None, got {self.warmup!r}.")
        if self.warmup is not None and not self.graphs:
            raise InputError("warmup captures CUDA graphs, but graphs=False; leave one of them out.")
