"""Interface of a lowered phase, as the runtime sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dgraph.types.shapes import InputSpec


@dataclass(frozen=True)
class ProgramResult:
    """Result of one call of a program.

    Attributes:
        outputs: tensors by name. Outputs with a row dimension may carry padding rows at their end (token -1, confidence
            -inf, kept -1). They last until a program of the model is called again.
        rows: live rows of each stage, in order.
        padded: rows that each stage ran on, live rows and padding of its bucket.
        seconds: host-observed seconds of each stage.
    """

    outputs: dict[str, Tensor]
    rows: tuple[int, ...]
    padded: tuple[int, ...]
    seconds: tuple[float, ...]


class Program(Protocol):
    """A compiled phase."""

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """The inputs that it reads, as its passes declared them, by name; a caller may pass more."""
        ...

    @property
    def output_names(self) -> frozenset[str]:
        """Names of the outputs that it gives."""
        ...

    @property
    def stage_names(self) -> tuple[str, ...]:
        """One name per stage: ("step",), or ("prefix", "suffix") when rows are evicted on the way."""
        ...

    @property
    def graph_rows(self) -> int | None:
        """Rows up to which its first stage may be recorded as a CUDA graph; None for any number."""
        ...

    def bucket_sizes(self, rows: int) -> tuple[int, ...]:
        """Every row count that a stage is padded to for 1 to `rows` rows, ascending."""
        ...

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        """Run on `rows` live rows.

        Inputs with a row dimension hold these first; after them may be any number of padding rows (of no sequence, no
        candidates). Rows that the bucket needs beyond these are added here.
        """
        ...

    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        """Run in two calls, for callers that learn the row count later: work that does not depend on it is done now.

        Call the result with the number of live rows, once, under `torch.no_grad`. Inputs are read from now on until
        then, and must not be written to between.
        """
        ...
