"""Dummy steps: inputs for a full forward without requests, made from what a program declares that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import REUSE, SELECT
from dgraph.plans.kv import KVPlan
from dgraph.types.shapes import InputSpec, without_window


@dataclass(frozen=True)
class DummyStep:
    """Sequences of one length whose last rows are forwarded.

    All of them share one sequence's pages, so that a step of many rows needs the cache of one sequence. The keys and
    values written there are meaningless, but of the right size.

    Attributes:
        rows: of the step.
        width: rows of a sequence, at most `length`; the last sequence has the rest.
        length: positions of a sequence.
        page: positions of a page.
        keeps: True: methods that drop rows drop none. False: each sequence counts as having decoded one token per step.
        kv: the keys and values that sequences keep; None for all.
        vocab: ids, which the rows hold in turn: rows of one id would all go to the same experts.

    Raises:
        InputError: a size out of range.
    """

    rows: int
    width: int
    length: int
    page: int
    keeps: bool = True
    kv: KVPlan | None = None
    vocab: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.width <= self.length or min(self.rows, self.page) < 1:
            raise InputError(
                f"a dummy step needs at least 1 row, 1 position per page and 1 to {self.length} rows per sequence; got "
                f"{self.rows} rows, {self.page} positions per page and {self.width} rows per sequence of {self.length}."
            )

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return -(-self.rows // self.width)

    @property
    def keys(self) -> int:
        """Rows of keys that its sequences see, all together."""
        return self.sequences * self.length

    @property
    def pages(self) -> int:
        """Pages of a sequence."""
        return -(-self.length // self.page)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by symbol of the inputs' shapes; see `InputSpec`."""
        return {
            "N": self.rows,
            "b": self.sequences,
            "sequences": self.sequences,
            "M": self.keys,
            "P": self.pages,
            "pages": self.pages,
            "page": self.page,
            "entries": 1,
        }

    def entries(self, layer: int, heads: int) -> int:
        """Packed entries of a sequence in a layer, all heads together; the same for each."""
        if self.kv is None:
            return 0
        return self.kv.entries(layer, self.length - self.width, heads) // heads * heads

    def inputs(self, specs: Iterable[InputSpec], device: torch.device) -> dict[str, Tensor]:
        """A value for each declared input, caches included."""
        declared = list(specs)
        heads = {spec.layer: spec.element[0] for spec in declared if spec.shape[0] == "sequences"}
        return {spec.name: self._input(spec, heads).to(device) for spec in declared}

    def _input(self, spec: InputSpec, heads: dict[int | None, int]) -> Tensor:
        offered = spec.name.removesuffix(f"_{spec.window}") if spec.window else spec.name
        if offered in _VALUES:
            return _VALUES[offered](self).to(spec.dtype)
        sizes = dict(self.sizes)
        if spec.per == "packed":
            each = self.entries(spec.layer or 0, heads[spec.layer])
            if spec.shape[0] == "sequences":
                return torch.full((self.sequences, heads[spec.layer]), each // heads[spec.layer], dtype=spec.dtype)
            if spec.name == f"pack_index_{spec.layer}":  # as if every head had chosen its first candidates
                return (torch.arange(each) % max(1, each // heads[spec.layer])).to(spec.dtype)
            sizes["entries"] = each
        shape = [size if isinstance(size, int) else sizes[without_window(size)] for size in spec.shape]
        if spec.per == "row" and spec.dtype == torch.bool:
            return torch.ones(shape, dtype=torch.bool)
        return spec.empty(shape).fill_(spec.initial)

    @cached_property
    def _row(self) -> Tensor:
        return torch.arange(self.rows)

    @cached_property
    def _positions(self) -> Tensor:
        return self.length - self.width + self._row % self.width

    def _per_sequence(self, value: float) -> Tensor:
        return torch.full((self.sequences,), value)

    @property
    def _average(self) -> Tensor:
        return self._per_sequence(torch.inf if self.keeps else 1.0)

    @property
    def _action(self) -> Tensor:
        return self._per_sequence(SELECT if self.width == self.length else REUSE)


_VALUES: dict[str, Callable[[DummyStep], Tensor]] = {
    "input_ids": lambda step: step._row % step.vocab,
    "positions": lambda step: step._positions,
    "slots": lambda step: step._positions,
    "limit": lambda step: torch.full((step.rows,), step.length),
    "cu_rows": lambda step: (torch.arange(step.sequences + 1) * step.width).clamp(max=step.rows),
    "page_table": lambda step: torch.arange(step.pages).expand(step.sequences, -1),
    "average": lambda step: step._average,
    "sequence_average": lambda step: step._average,
    "prompt_end": lambda step: step._per_sequence(step.length - step.width),
    "block_start": lambda step: step._per_sequence(step.length - step.width),
    "block_end": lambda step: step._per_sequence(step.length),
    "response_end": lambda step: step._per_sequence(step.length),
    "window": lambda step: torch.tensor([[step.length - step.width, step.length]]).expand(step.sequences, -1),
    "action": lambda step: step._action,
    "key_positions": lambda step: torch.arange(step.length).repeat(step.sequences),
    "cu_keys": lambda step: torch.arange(step.sequences + 1) * step.length,
}
"""Values of inputs of the decode loop (`dgraph.runtime.loop.step_inputs`) that are not the same for every row."""
