"""What an arm of `benchmarks.dllm_serve` has for keys and values: a limit, less what else takes memory.

An engine's `kv_bytes` are those of its pages. Recipes that pack the keys that they keep hold these beside the pages, so
here such an arm gets pages for its share of the limit alone: that of pages in the bytes of all requests. Then pages and
packed keys together take the limit, on average over the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from benchmarks.tables import Cell
from dgraph.bench.arrivals import Request
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.kv_cost import KVCost
from dgraph.engine.memory.profile import GUARD, profile
from dgraph.errors import InputError
from dgraph.runtime.loop.step_inputs import declared

GIB = 1 << 30
SMALL, SMALL_ROWS, LARGE_ROWS, KEYS_ROWS = 24, 4096, 16384, 8192
"""A small card in GB, and rows of a step there, on a larger one (dLLM-Serve, Table 3), and where keys are given."""


@dataclass(frozen=True)
class MemoryLimit:
    """Memory of a card, or of keys and values.

    Attributes:
        text: as an option gives it: "24" (GB of a card), "card" (this one), "keys:8" (GB of keys and values).
        gib: as a number; None for this card.
        keys: True if it is of keys and values.
    """

    text: str
    gib: float | None
    keys: bool = False

    @classmethod
    def parse(cls, text: str) -> MemoryLimit:
        """Read an option.

        Raises:
            InputError: another form.
        """
        kind, colon, number = text.rpartition(":")
        if text == "card":
            return cls(text, None)
        try:
            gib = float(number)
        except ValueError:
            gib = 0.0
        if not gib > 0 or (kind, colon) not in (("", ""), ("keys", ":")):
            raise InputError(f"memory is a number of GB, keys:GB or card, got {text!r}.")
        return cls(text, gib, bool(colon))

    def __str__(self) -> str:
        return self.text

    @property
    def rows(self) -> int:
        """Rows of a step, unless the command line says otherwise."""
        if self.keys:
            return KEYS_ROWS
        return SMALL_ROWS if self.gib is not None and self.gib <= SMALL else LARGE_ROWS


@dataclass(frozen=True)
class Memory:
    """Memory of an arm, in bytes.

    Attributes:
        keys: for keys and values.
        pages: of these, for pages; the rest is for packed keys.
        each: of a request, on average.
        slots: requests at a time at most.
        rows, logit_rows: of a step, and those whose logits exist at a time.
        activations: predicted peak; None where it was not asked for.
    """

    keys: int
    pages: int
    each: float
    slots: int
    rows: int
    logit_rows: int
    activations: int | None = None

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "rows a step", "rows with logits", "activations GB", "keys and values GB", "MB a request", "requests that fit",
    )  # fmt: skip
    NOTE: ClassVar[str] = "Activations are predicted by the profiler; on a GPU a dummy step measures them as well."

    @classmethod
    def of(
        cls,
        program: CompiledModel,
        limit: MemoryLimit,
        rows: int,
        bound: int,
        slots: int,
        requests: Sequence[Request],
    ) -> Memory:
        """Memory of a program under a limit.

        Args:
            program: with its bound on rows of logits.
            limit: see `MemoryLimit`; one of keys is what the logit budget leaves, so more logits take from it.
            rows: of a step at most.
            bound: the logit budget.
            slots: requests at a time at most.
            requests: that are to be served.

        Raises:
            InputError: nothing is left for keys and values.
        """
        on_gpu = program.captured.device.type == "cuda"
        logit_rows, activations = program.recipe.logit_rows or rows, None
        if limit.keys and logit_rows <= bound:
            keys = int((limit.gib or 0) * GIB)
        elif limit.keys:
            more, less = (profile(program, rows, each, sequences=slots, measured=False) for each in (None, bound))
            activations = more.activations
            keys = int((limit.gib or 0) * GIB) - (more.activations - less.activations)
        else:
            asked = None if limit.gib is None else int(limit.gib * GIB)
            found = profile(program, rows, None, asked, sequences=slots, measured=on_gpu)
            guard = (
                found.guard if asked is None else min(found.guard, int(GUARD * asked))
            )  # of the card that is stood for
            keys, activations = found.left + found.guard - guard, found.activations
        if keys <= 0:
            raise InputError(f"{program.recipe.name}: {limit} leaves nothing for keys and values, {-keys} bytes lack.")
        inputs = declared({name: one.inputs for name, one in program.programs.items()}).values()
        cost = KVCost.of(inputs, program.spec, program.page_size, program.recipe.kv)
        whole = [cost.sequence(request.prompt + request.new, request.new) for request in requests]
        paged = [replace(cost, packed=()).sequence(request.prompt + request.new, request.new) for request in requests]
        pages = keys * sum(paged) // sum(whole)
        fits = max(1, keys // min(whole))
        return cls(keys, pages, sum(whole) / len(whole), min(slots, fits), rows, logit_rows, activations)

    def cells(self) -> list[Cell]:
        """What `COLUMNS` say."""
        activations = "-" if self.activations is None else self.activations / GIB
        fits = int(self.keys / self.each)
        return [self.rows, self.logit_rows, activations, self.keys / GIB, self.each / 2**20, fits]

    def to_json(self) -> dict[str, Any]:
        """Plain values: the attributes by name."""
        return asdict(self)
