"""What happens between two forwards: commit, state transition, packing the next rows.

All of it is one function over tensors that stay where they are. On a GPU it is two hundred launches of a microsecond
each, which the host takes longer to issue than the device to run; so it is captured once as a CUDA graph and replayed.
Compiled, it is about twenty launches: the graph has those where somebody compiled the transition before (a warm-up in
this process, or an earlier process that shares the artifact cache). Otherwise it is captured op by op at first, since
no generation should wait seconds for a compiler in its third step, and compiled once it has run often
(`TraceCompiler.often`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.lowering.traced import TraceCompiler
from dgraph.ops.statistics import GIVEN
from dgraph.private.torch import copy_all
from dgraph.runtime.cudagraph import GraphPool, Held, Replay
from dgraph.runtime.decode_state import DecodeState
from dgraph.runtime.offers import Moment, computed, initial_states
from dgraph.runtime.policies import edits, needs_of, statistics_of
from dgraph.runtime.rows import RowResults, row_results
from dgraph.runtime.rule import Rule
from dgraph.runtime.seeds import policy_noise, sequence_keys

FILLERS = {"token": -1, "confidence": -math.inf, "kept": -1, **{s.name: s.filler for s in GIVEN}, "measured": 0.0}
"""Outputs of a step that have one entry per row of its last stage, and what padding entries hold."""


TWIN = "unconditional "
"""Goes before the name of a state where it is that of a sequence without its prompt (guidance)."""
NEEDED = ("seed",)
"""What the loop itself reads of its inputs, to draw from logits."""

Assignment = tuple[Tensor, Tensor]
"""A tensor that stays where it is, and what it becomes."""


@dataclass(frozen=True)
class Decision:
    """What a step led to, for an observer: results per row, and the committed columns bool[b, B]."""

    results: RowResults
    committed: Tensor


class Advance:
    """State, rows and program inputs of one batch, and the transition from step to step.

    Args:
        rule: how to decode.
        state: before the first step; its tensors become this object's.
        capacity: rows that a step may have; more than a state ever packs are padding.
        pool: where to capture the transition; None to run it op by op.
        compiler: finds the compiled transition for a capture; None to capture it op by op.

    Attributes:
        state: as the next step finds it.
        rows: of the next step, padded to `capacity`.
        inputs: of the step programs, by name, computed and carried; row inputs are padded to `capacity`.
        summary: i64[5], see `DecodeState.summary`; what the host reads before a step.
    """

    def __init__(
        self,
        rule: Rule,
        state: DecodeState,
        capacity: int,
        pool: GraphPool | None = None,
        compiler: TraceCompiler | None = None,
    ):
        self.rule, self.state, self.capacity, self._pool, self._compiler = rule, state, capacity, pool, compiler
        state.keys = sequence_keys(rule.seed, state.prompt)
        state.carry(rule.policy)
        self._editing = edits(rule.policy)
        self.rows = state.rows(capacity, self._editing)
        self.summary = state.summary()
        self._names = (*(spec.name for spec in rule.inputs), *NEEDED)
        self.carried = {spec.name: spec for spec in rule.inputs if spec.carried}
        if rule.guided:
            self.carried |= {TWIN + name: replace(spec, name=TWIN + name) for name, spec in self.carried.items()}
        self.inputs = computed(self._names, Moment(self.rows, state, rule), late=False) | self._initial()
        self._given: dict[str, Tensor] = {}
        self._graph: tuple[Replay, Held] | None = None
        self._plain = False  # whether it was captured op by op, and might be compiled
        self._fits = True  # whether memory sufficed for capturing it
        self._steps = 0

    def load(self, state: DecodeState, seed: int) -> None:
        """Start over with another batch of the same shape, in the tensors that are there."""
        state.keys = sequence_keys(seed, state.prompt)
        state.carry(self.rule.policy)
        _write(self._packed(state, self._initial(), fixed=True))

    def prefilled(self, outputs: Mapping[str, Tensor], took_part: Tensor) -> None:
        """Carry the states of responses on from a prefill, of sequences bool[b] that took part in it."""
        for name, spec in self.carried.items():
            if name in outputs and spec.reset == "response":
                self.inputs[name].copy_(_where(took_part, outputs[name], self.inputs[name]))

    def late(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Of the named inputs those that the loop computes only before the programs that read them."""
        return computed(names, Moment(self.rows, self.state, self.rule), late=True)

    def _initial(self) -> dict[str, Tensor]:
        return initial_states(self.carried.values(), len(self.state.start), self.state.start.device)

    def __call__(self, outputs: Mapping[str, Tensor], observed: bool = False) -> Decision | None:
        """Take the results of a step to the next one.

        Args:
            outputs: of the step program, with token and confidence; kept if it evicts, and its states.
            observed: run op by op and return the decision.
        """
        self._take(outputs)
        self._steps += 1
        if observed:
            return self._transition()
        if self._pool is not None:
            # The first step runs op by op: a short generation is over before a capture would have paid.
            often = self._compiler is not None and self._steps >= self._compiler.often
            if self._fits and self._steps > 1 and (self._graph is None or (self._plain and often)):
                self._capture(self._pool)
            if self._graph is not None:
                graph, held = self._graph
                self._pool.use(held)
                graph.replay()
                return None
        self._transition()
        return None

    def let_go(self) -> None:
        """Drop the captured transition; the next step captures another."""
        if self._pool is not None and self._graph is not None:
            self._pool.let_go(self._graph[1])

    def compile(self, outputs: Mapping[str, Tensor]) -> None:
        """Compile the transition for outputs of these types, unless that has been done before."""
        self._take(outputs)
        self._compiled(ahead=True)

    def _take(self, outputs: Mapping[str, Tensor]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for name in (*FILLERS, *self.carried):
            if name not in outputs:
                continue
            value = outputs[name][: self.capacity] if name in FILLERS else outputs[name]
            if name not in self._given:
                self._given[name] = value.new_empty(
                    (self.capacity, *value.shape[1:]) if name in FILLERS else value.shape
                )
            buffer = self._given[name]
            targets.append(buffer[: len(value)])
            sources.append(value)
            if name in FILLERS and len(value) < len(buffer):
                buffer[len(value) :].fill_(FILLERS[name])
        copy_all(targets, sources)

    def _transition(self) -> Decision:
        updates, decision = self._next()
        _write(updates)
        return decision

    def _next(self) -> tuple[list[Assignment], Decision]:
        """What every tensor here becomes, and why; nothing is written."""
        rule, given = self.rule, self._given
        measured = {s: given[s.name] for s in GIVEN if s.name in given}
        if "measured" in given:
            measured |= zip(statistics_of(rule.policy), given["measured"].unbind(1), strict=True)
        results = row_results(self.rows, given["token"], given["confidence"], given.get("kept"), measured)
        after = copy.copy(self.state)  # transitions replace tensors and never write into them
        committed = after.apply(self.rows, results, rule.policy, rule.block_cache, rule.recommit, self._noise())
        return self._packed(after, self._carried(after)), Decision(results, committed)

    def _carried(self, after: DecodeState) -> dict[str, Tensor]:
        """The states that passes declared, as the next step is given them."""
        found, moved = {}, after.start != self.state.start
        for name, spec in self.carried.items():
            value = self.inputs[name]
            if name in self._given:
                value = _where(self.state.active, self._given[name], value)
            if spec.reset == "block":
                value = _where(moved, torch.full_like(value, spec.initial), value)
            found[name] = value
        return found

    def _noise(self) -> Tensor | None:
        if "noise" not in needs_of(self.rule.policy):
            return None
        columns = torch.arange(self.state.block, device=self.state.start.device)
        return policy_noise(self.state.keys, self.state.start[:, None] + columns, self.state.counter)

    def _packed(self, state: DecodeState, carried: Mapping[str, Tensor], fixed: bool = False) -> list[Assignment]:
        """What every tensor here becomes where the next step finds that state, and these declared ones."""
        rows = state.rows(self.capacity, self._editing)
        inputs = computed(self._names, Moment(rows, state, self.rule), late=False, fixed=fixed) | dict(carried)
        pairs = [
            *_pairs(self.state, state),
            *_pairs(self.rows, rows),
            *((self.inputs[name], value) for name, value in inputs.items()),
            (self.summary, state.summary()),
        ]
        held = {id(old) for old, _ in pairs}
        updates = {id(old): (old, new) for old, new in pairs if old is not new}
        # A tensor that moves to another place (a policy may return what it was given) must be read before it changes.
        return [(old, new.clone() if id(new) in held else new) for old, new in updates.values()]

    def _compiled(self, ahead: bool = False) -> Callable[[], object] | None:
        """The compiled transition of this batch's tensors; None if it runs op by op. ahead: compile it if need be."""
        if self._compiler is None:
            return None
        held = self._held()
        given = tuple((name, value.dtype) for name, value in self._given.items())
        values = (getattr(self.state, field.name) for field in fields(self.state))
        fixed = tuple(value for value in values if not isinstance(value, Tensor | dict))
        rule = replace(self.rule, temperature=float(self.rule.temperature > 0)).key
        shapes = tuple(value.shape for value in held)
        key = (rule, type(self.state), self.state.block, fixed, given, shapes)
        name = f"the transition between steps under policy {type(self.rule.policy).__name__}"
        return self._compiler.function(name, self._traceable(held), held, key, ahead)

    def _held(self) -> list[Tensor]:
        """Every tensor that a transition reads or writes, once."""
        everything = [*_tensors(self.state), *_tensors(self.rows), *self.inputs.values(), self.summary]
        return list({id(tensor): tensor for tensor in (*everything, *self._given.values())}.values())

    def _traceable(self, held: Sequence[Tensor]) -> Callable[..., list[tuple[int, Tensor]]]:
        """The transition as a function of those tensors: which of them it updates, and what they become."""
        numbers = {id(tensor): number for number, tensor in enumerate(held)}

        def function(*tensors: Tensor) -> list[tuple[int, Tensor]]:
            def other(value: Any) -> Any:
                return tensors[numbers[id(value)]] if isinstance(value, Tensor) else value

            twin = copy.copy(self)
            twin.state = _each(self.state, other)
            twin.rows = _each(self.rows, other)
            twin.inputs = {name: other(value) for name, value in self.inputs.items()}
            twin._given = {name: other(value) for name, value in self._given.items()}
            twin.summary = other(self.summary)
            own = {id(tensor): number for number, tensor in enumerate(tensors)}
            updates, _ = twin._next()
            return [(own[id(old)], new) for old, new in updates]

        return function

    def _capture(self, pool: GraphPool) -> None:
        if self._graph is None and not pool.has_room("transition", self.capacity):
            return
        before = [(tensor, tensor.clone()) for tensor in self._held()]
        often = self._compiler is not None and self._steps >= self._compiler.often
        function = self._compiled(ahead=often)
        self._plain = function is None and not often
        try:
            graph = pool.record(function or self._transition, warm=False)
        except torch.OutOfMemoryError as error:
            pool.refuse("transition", self.capacity, str(error).partition("\n")[0])
            self._fits = False
            return
        except RuntimeError as error:
            raise LoweringError(
                f"the transition between steps cannot be captured as a CUDA graph: {str(error).splitlines()[0]} "
                f"Policy {type(self.rule.policy).__name__} may read values on the host; decode with graphs=False."
            ) from error
        finally:  # a capture runs the transition to warm up
            for tensor, value in before:
                tensor.copy_(value)
        self.let_go()
        self._graph = graph, pool.hold("transition", self.capacity, (), self._forget)

    def _forget(self) -> None:
        self._graph = None


def _where(sequences: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """`value` [b, ...] for the sequences bool[b], `other` for the rest."""
    return torch.where(sequences.view(-1, *(1,) * (value.dim() - 1)), value, other)


def _each(holder: Any, change: Callable[[Any], Any]) -> Any:
    """The same dataclass with every field changed, and every entry of one that is a dict."""

    def changed(value: Any) -> Any:
        return {name: change(one) for name, one in value.items()} if isinstance(value, dict) else change(value)

    return type(holder)(**{field.name: changed(getattr(holder, field.name)) for field in fields(holder)})


def _tensors(holder: Any) -> list[Tensor]:
    values = (getattr(holder, field.name) for field in fields(holder))
    flat = (one for value in values for one in (value.values() if isinstance(value, dict) else (value,)))
    return [value for value in flat if isinstance(value, Tensor)]


def _pairs(target: Any, source: Any) -> list[Assignment]:
    """Every tensor of a dataclass with the same field of another."""
    return list(zip(_tensors(target), _tensors(source), strict=True))


def _write(updates: Sequence[Assignment]) -> None:
    copy_all([old for old, _ in updates], [new for _, new in updates])
