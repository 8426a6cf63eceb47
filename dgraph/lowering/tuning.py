"""Tilings of kernels, timed once for the shapes that a program will meet, and stored for later processes.

A store holds one entry per op and device (`dgraph.cache.key.tuning_key`), with every shape that was ever tuned there. A
program takes its choices from the entry when it is lowered. Shapes without a choice are timed only while tuning is open
(a warm-up). It happens between steps, never inside of a generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dgraph.cache.key import Key, tuning_key
from dgraph.cache.store import Store
from dgraph.ir.graph import Graph
from dgraph.ir.quantised_operands import is_fused_operand
from dgraph.lowering.timing import tiling_seconds
from dgraph.ops import OPS, op_of
from dgraph.ops.tuning import Choice, Choices, Shape, text_of
from dgraph.ranks.groups import Alone, Group
from dgraph.types.nodes import args_of
from dgraph.types.shapes import without_window

FILE = "choices.json"
MARGIN = 0.98
"""A tiling takes the place of the default if its time is below this share of the default's: less is noise."""

Timer = Callable[[str, Shape, torch.device], Callable[[Any], float]]
"""Makes, for an op and a shape on a device, a function from a tiling to seconds; see `tiling_seconds`."""


class Tuning:
    """The choices of tilings for the programs of one model, extended by timing.

    Args:
        device: of the programs.
        store: where choices are stored; without one nothing is timed, since every process would time anew. Among ranks
            the store of rank 0 counts: another may have none.
        tell: called with the name of each timing, for display.
        timer: replaced in tests, where there is no device.
        ranks: the group that holds the model together. Rank 0 times, and the others take its choices: a product that
            all of them compute must have the same bits.

    Attributes:
        choices: the tilings that kernels take; put them in use around every launch.
        found: every choice by op and shape, with its times.
        timed: shapes that this object timed, in order.
        is_open: True while shapes without a choice are timed.
    """

    def __init__(
        self,
        device: torch.device,
        store: Store | None,
        tell: Callable[[str], None] | None = None,
        timer: Timer = tiling_seconds,
        ranks: Group | None = None,
    ):
        self.device, self.store = device, store
        self._ranks: Group = ranks or Alone()
        self.choices = Choices()
        self.found: dict[str, dict[Shape, Choice]] = {}
        self.timed: list[tuple[str, Shape]] = []
        self._tell = tell or (lambda what: None)
        self._timer = timer
        self.is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Context in which programs time the shapes that they meet and have no choice for. Every rank enters it."""
        self.is_open = self._ranks.exchange(self.store is not None)[0]
        try:
            yield
        finally:
            self.is_open = False

    def load(self, graph: Graph) -> None:
        """Take up the choices that the store has for the ops of a graph."""
        for op in _ops_of(graph):
            if op not in self.found:
                self._load(op, self._key(op))

    def prepare(self, graph: Graph, sizes: Mapping[str, int], rows: int) -> None:
        """Time the tilings for a graph's calls that have no choice yet.

        Args:
            graph: of the program.
            sizes: the symbols of its inputs, by name.
            rows: the bucket; every row set has that many rows.
        """
        for op, shapes in shapes_of(graph, sizes, rows).items():
            self.tune(op, shapes)

    def tune(self, op: str, shapes: Iterable[Shape]) -> None:
        """Time the tilings for some shapes of an op, unless they have a choice; the store has it then.

        A tiling that fails is left out with its reason. Where all fail, the default is taken, for this process alone.
        """
        missing = [shape for shape in shapes if shape not in self.found.get(op, {})]
        if not missing:
            return
        if self.store is not None and not self._ranks.rank:
            self._tune(op, missing, self.store)
        self.agree()

    def _tune(self, op: str, missing: Sequence[Shape], store: Store) -> None:
        key = self._key(op)
        with store.making(key.digest, lambda: self._tell(f"waiting for tilings of {op}")):
            self._load(op, key)  # another process may have made them while this one waited
            missing = [shape for shape in missing if shape not in self.found[op]]
            try:
                for shape in missing:
                    self._tell(f"timing tilings of {op} for {text_of(shape)}")
                    self._take(op, self._choose(op, shape))
                    self.timed.append((op, shape))
            finally:  # choices timed before an interruption are stored
                self._save(op, key, missing)
        if self.device.type == "cuda" and missing:
            torch.cuda.empty_cache()  # the values that tilings were timed on are large, and capturing comes next

    def agree(self) -> None:
        """Take rank 0's choices in place of this rank's own. Every rank calls it, before anything is recorded."""
        found = self._ranks.exchange(self.found)[0]
        if self._ranks.rank:
            self.found = {}
            self.choices.clear()
            for op, known in found.items():
                self.found[op] = {}
                for choice in known.values():
                    self._take(op, choice)

    def _key(self, op: str) -> Key:
        places = (OPS[op].kernel, OPS[op].tuning)
        return tuning_key(op, self.device, [place.partition(":")[0] for place in places if place is not None])

    def _take(self, op: str, choice: Choice) -> None:
        self.found.setdefault(op, {})[choice.shape] = choice
        self.choices.add(op, choice)

    def _load(self, op: str, key: Key) -> None:
        known = self.found.setdefault(op, {})
        stored = self.store.find(key) if self.store is not None else None
        if self.store is None or stored is None:
            return
        kernel = OPS[op].tunable
        try:
            listed = json.loads(stored.files[FILE])["choices"]
            choices = [Choice.from_json(data, kernel.shape, kernel.tiling) for data in listed]
        except (KeyError, TypeError, ValueError) as error:
            self.store.reject(key.digest, f"it does not load ({str(error).partition(chr(10))[0]})")
            return
        for choice in choices:
            if choice.shape not in known:
                self._take(op, choice)

    def _save(self, op: str, key: Key, new: Sequence[Shape]) -> None:
        assert self.store is not None
        known = self.found[op]
        if any(known[shape].seconds is not None for shape in new if shape in known):
            listed = [choice.to_json() for choice in known.values() if choice.seconds is not None]
            data = json.dumps({"op": op, "choices": listed}, indent=1)
            self.store.put(key, {FILE: data.encode()}, replace=True)

    def _choose(self, op: str, shape: Shape) -> Choice:
        from dgraph.ops.attention.triton.attention_tiling import multiprocessors

        tilings = OPS[op].tunable.candidates(shape, multiprocessors(self.device))
        times: dict[Any, float] = {}
        failed: list[tuple[str, str]] = []
        try:
            seconds = self._timer(op, shape, self.device)
        except Exception as error:  # no memory for the values, say
            failed = [(text_of(tiling), _reason(error)) for tiling in tilings]
        else:
            for tiling in tilings:
                try:
                    times[tiling] = seconds(tiling)
                except Exception as error:  # a tiling that does not fit fails with many types
                    failed.append((text_of(tiling), _reason(error)))
        best = min(times, key=lambda tiling: times[tiling], default=tilings[0])
        default = times.get(tilings[0])
        if default is not None and times[best] > MARGIN * default:
            best = tilings[0]
        if not times and self.store is not None:
            self.store.warn(
                f"no tiling of {op} for {text_of(shape)} can be timed, so it takes its own: {failed[0][1]}."
            )
        return Choice(shape, best, times.get(best), default, len(times), tuple(failed))


def shapes_of(graph: Graph, sizes: Mapping[str, int], rows: int) -> dict[str, list[Shape]]:
    """Shapes of the tuned calls of a graph, by op, each once.

    Args:
        sizes: symbols of the graph's inputs, by name ("b+1", "pages"); any other is a row set.
        rows: of every row set.
    """
    found: dict[str, dict[Shape, None]] = {}

    def sized(value: Any) -> Any:
        if not isinstance(value, torch.fx.Node):
            return value
        fake = value.meta["val"]
        if not isinstance(fake, Tensor):
            return fake
        texts = [s if isinstance(s, int) else without_window(graph.symbols.text(s)) for s in fake.shape]
        shape = [text if isinstance(text, int) else sizes.get(text, rows) for text in texts]
        return torch.empty(shape, dtype=fake.dtype, device="meta")

    for node in graph.calls:
        op = op_of(node.target)
        if op is not None and op.tuning is not None and not any(map(is_fused_operand, args_of(node))):
            shapes = op.tunable.shapes(*map(sized, args_of(node)))
            found.setdefault(op.name, {}).update(dict.fromkeys(shapes))
    return {op: list(shapes) for op, shapes in found.items()}


def _ops_of(graph: Graph) -> list[str]:
    ops = (op_of(node.target) for node in graph.calls)
    return sorted({op.name for op in ops if op is not None and op.tuning is not None})


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
