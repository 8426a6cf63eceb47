"""What an arm of `benchmarks.dllm_serve` has for keys and values: a limit, less what else takes memory.

    python -m benchmarks.dllm_serve_memory --shape llada-8b    # predicted, on any machine

An engine's `kv_bytes` bound pages and packed keys together, so every arm is given the same.

As a script it predicts, for a shape on cards of several sizes, what the logit budget leaves, and how many requests fit.
The programs are those of the shape with one layer, which has the peak of all: layers run one after the other. Weights,
keys and values are counted for every layer. Nothing is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

import dgraph
from benchmarks.tables import Cell, Report
from dgraph.bench.arrivals import Request
from dgraph.bench.load import shape_of
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.profile import GUARD, kv_cost_of, profile, weight_bytes
from dgraph.errors import InputError
from dgraph.models.shapes import SHAPES

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
        each: of a request, on average.
        slots: requests at a time at most.
        rows, logit_rows: of a step, and those whose logits exist at a time.
        activations: predicted peak; None where it was not asked for.
    """

    keys: int
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
        cost = kv_cost_of(program)
        whole = [cost.sequence(request.prompt + request.new, request.new) for request in requests]
        fits = max(1, keys // min(whole))
        return cls(keys, sum(whole) / len(whole), min(slots, fits), rows, logit_rows, activations)

    def cells(self) -> list[Cell]:
        """What `COLUMNS` say."""
        activations = "-" if self.activations is None else self.activations / GIB
        fits = int(self.keys / self.each)
        return [self.rows, self.logit_rows, activations, self.keys / GIB, self.each / 2**20, fits]

    def to_json(self) -> dict[str, Any]:
        """Plain values: the attributes by name."""
        return asdict(self)


PREDICTED = ("recipe", "card GB", *Memory.COLUMNS[:-2], "requests that fit")


def predicted(
    shape: str, recipe: str, cards: Sequence[int], bounds: Sequence[int], request: Request
) -> list[list[Cell]]:
    """Rows of `PREDICTED`: for each card the bounds on rows of logits, and none.

    Args:
        shape: a published shape.
        recipe: its name; options are the defaults.
        cards: memory of cards, in GB.
        bounds: rows whose logits exist at a time.
        request: whose tokens all requests have.
    """
    device, dtype = torch.device("cpu"), torch.bfloat16
    layers = SHAPES[shape][1]["num_hidden_layers"]
    one, two = (
        dgraph.optimize(shape_of(shape, device, dtype, count), recipe, artifacts=False, backend="eager")
        for count in (1, 2)
    )
    weights = weight_bytes(one) + (layers - 1) * (weight_bytes(two) - weight_bytes(one))
    rows: list[list[Cell]] = []
    for card in cards:
        step = MemoryLimit.parse(str(card)).rows
        for bound in (*bounds, step):
            found = profile(one, step, bound, card * GIB, measured=False)
            keys = card * GIB - int(GUARD * card * GIB) - weights - found.activations - found.state
            each = layers * found.kv_cost.sequence(request.prompt + request.new, request.new)
            sizes = (found.activations / GIB, keys / GIB)
            rows.append([recipe, card, found.rows, found.logit_rows, *sizes, max(0, keys // each)])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, predict, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llada-8b")
    parser.add_argument("--recipes", nargs="+", default=["fast_dllm", "dllm_serve"])
    parser.add_argument("--cards", type=int, nargs="+", default=[24, 48, 141], help="GB")
    parser.add_argument("--logit-rows", type=int, nargs="+", default=[2048], help="logit budgets")
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    request, report = Request(0.0, args.prompt, args.tokens), Report(f"Memory of {args.shape}, predicted")
    rows = [row for r in args.recipes for row in predicted(args.shape, r, args.cards, args.logit_rows, request)]
    note = f"Predicted by the profiler. Requests have {args.prompt} tokens of prompt and {args.tokens} new ones."
    report.table("What the logit budget leaves", PREDICTED, rows, note)
    report.write(args.markdown, args.json)


if __name__ == "__main__":
    main()
