"""Work between two forwards: commit and state transition, then packing the next rows.

Each of the two is a function over tensors that stay where they are. The first ends with the report, which the host
reads while the device packs. The report gives the number of rows of the next step, so the host launches that step
before its rows are packed.

On a GPU the two functions are two hundred launches of a microsecond each. The host takes longer to issue them than the
device to run them, so they are captured once as one CUDA graph and replayed. Compiled, they are about twenty launches.
The graph holds the compiled functions if they exist, from a warm-up in this process or in an earlier one that shares
the artifact cache. Otherwise they are captured op by op at first, since no generation should wait seconds for a
compiler in its third step. They are compiled once they have run often (`TraceCompiler.often`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.lowering.traced import TraceCompiler
from dgraph.ops.statistics import GIVEN
from dgraph.private.torch import copy_all
from dgraph.runtime.graphs.pinned import Mapped
from dgraph.runtime.graphs.pool import GraphPool, Held, Replay
from dgraph.runtime.graphs.upload import upload
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.loop.step_inputs import STEP_INPUTS, StepContext, computed, initial_states
from dgraph.runtime.policies import needs_of, per_sequence, statistics_of, tails
from dgraph.runtime.policies.mixture import Refusals, noting_none
from dgraph.runtime.sampling.random_numbers import policy_noise
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.block_window import PrefillMixinState
from dgraph.runtime.state.packed_rows import RowResults, StepRows, choose, row_results

FILLERS = {
    "token": -1,
    "draw": -1,
    "confidence": -math.inf,
    "kept": -1,
    **{s.name: s.filler for s in GIVEN},
    "measured": 0.0,
}
"""Outputs of a step that have one entry per row of its last stage, and what padding entries hold."""


TWIN = "unconditional "
"""Prefix of the name of a state that belongs to a sequence without its prompt (guidance)."""
NEEDED = ("seed",)
"""Inputs that the loop itself reads, to draw from logits."""

LEFT_ALONE = ("stop_ids", "place")
"""Tensors of a state that no request sets."""

Assignment = tuple[Tensor, Tensor]
"""A tensor that stays where it is, and its new value."""


@dataclass(frozen=True)
class Decision:
    """Outcome of a step, for an observer: results per row, and the committed columns bool[b, W + 1]."""

    results: RowResults
    committed: Tensor


@dataclass(frozen=True)
class TransitionPart:
    """One of the two functions between forwards.

    Attributes:
        name: its name in messages.
        updates: computes the new values of tensors; nothing is written.
        reads_results: True if it reads the results of a step, and writes the report.
    """

    name: str
    updates: Callable[[StepTransition], list[Assignment]]
    reads_results: bool


class StepTransition:
    """State, rows and program inputs of b slots, and the transition from step to step.

    The order of a step: the program runs on `inputs`; `take` keeps its outputs; slots are written anew (`admit`,
    `retire`, `order`); `move` applies the step to the sequences that took part in it, reports, and packs the rows of
    the next step.

    Args:
        config: how to decode.
        state: before the first step; its tensors become this object's.
        capacity: rows that a step may have; more than a state ever packs are padding.
        pool: where to capture the transition; None to run it op by op.
        compiler: finds the compiled transition for a capture; None to capture it op by op.

    Attributes:
        state: as the next step finds it.
        rows: of the next step, padded to `capacity`.
        inputs: of the step programs, by name, computed and carried; row inputs are padded to `capacity`.
        report: i64[b, ...], see `DecodeState.report`; the host reads it before a step. `move` and `pack` write it.
    """

    def __init__(
        self,
        config: BatchConfig,
        state: DecodeState,
        capacity: int,
        pool: GraphPool | None = None,
        compiler: TraceCompiler | None = None,
    ):
        self.config, self.state, self.capacity, self._pool, self._compiler = config, state, capacity, pool, compiler
        state.carry(config.policy)
        state.grant()
        self.rows = self._rows_of(state)
        report = state.report()
        self.report = Mapped(report.shape, report.dtype, report.device)
        self._names = (*(spec.name for spec in config.inputs), *NEEDED)
        self.carried = {spec.name: spec for spec in config.inputs if spec.carried}
        if config.guided:
            self.carried |= {TWIN + name: replace(spec, name=TWIN + name) for name, spec in self.carried.items()}
        self.inputs = computed(self._names, StepContext(self.rows, state, config), late=False) | self._initial()
        self._given: dict[str, Tensor] = {}
        self._fill: dict[str, Tensor] = {}
        self._graph: tuple[Replay, Held] | None = None
        self._plain = False  # whether it was captured op by op, and might be compiled
        self._fits = True  # whether memory sufficed for capturing it
        self._steps = 0

    def admit(self, slots: Sequence[int], state: DecodeState) -> None:
        """Write the sequences of another state, as they are before their first step, into free slots.

        No other slot changes. They are packed by the next `move` or `pack`. state: on the host.
        """
        state.carry(self.config.policy)
        state.granted = torch.zeros_like(state.granted)  # the slot's last request may be part of the step that runs
        mine, theirs = ({n: one for n, one in _named(s) if n not in LEFT_ALONE} for s in (self.state, state))
        at, *values = upload(self.state.start.device, torch.tensor(slots), *theirs.values())
        for name, value in zip(theirs, values, strict=True):
            mine[name].index_copy_(0, at, value)
        for name, spec in self.carried.items():
            self.inputs[name][at] = spec.initial  # of any dtype, float8 among them
        self._write_fixed()

    def adopt(self, other: StepTransition) -> None:
        """Take over the sequences of another transition of the same shape; they are packed later.

        Its policies must be the first ones of this transition's policies.
        """
        mine, theirs = dict(_named(self.state)), dict(_named(other.state))
        for name in mine.keys() & theirs.keys():
            mine[name].copy_(theirs[name])
        for name in self.carried.keys() & other.carried.keys():
            self.inputs[name].copy_(other.inputs[name])
        self._write_fixed()

    def retire(self, slots: Sequence[int]) -> None:
        """Deactivate the sequences of these slots."""
        (at,) = upload(self.state.start.device, torch.tensor(slots))
        self.state.active.index_fill_(0, at, False)

    def order(self, places: Tensor) -> None:
        """Give every slot its turn i64[b], on the host, when the rows of the steps after this one are granted; see
        `DecodeState`.
        """
        (places,) = upload(self.state.start.device, places)
        self.state.place.copy_(places)

    def mix(self, slots: Sequence[int], rows: Sequence[int]) -> None:
        """Let the first steps of these slots encode `rows` rows of their prompts, in a session that `mixes`."""
        assert isinstance(self.state, PrefillMixinState)
        at, values = upload(self.state.start.device, torch.tensor(slots), torch.tensor(rows))
        self.state.mixed.index_copy_(0, at, values)

    def pack(self) -> None:
        """Report, and pack the rows of the next step, if no step has run since slots were written."""
        state = copy.copy(self.state)
        state.grant()
        _write(_distinct([*_pairs(self.state, state), (self.report.tensor, state.report())]))
        self.report.post()
        _write(self._packed())

    def _write_fixed(self) -> None:
        moment = StepContext(self.rows, self.state, self.config)
        for name, value in computed(self._names, moment, late=False).items():
            if STEP_INPUTS[name].fixed(self.config) and STEP_INPUTS[name].per == "sequence":
                self.inputs[name].copy_(value)

    def _rows_of(self, state: DecodeState) -> StepRows:
        editing = per_sequence(lambda traits: traits.edits, self.config.policy, state.kind)
        return state.rows(self.capacity, editing, tails(self.config.policy, state.kind))

    def prefilled(self, outputs: Mapping[str, Tensor], took_part: Tensor) -> None:
        """Carry the states of responses on from a prefill, of sequences bool[b] that took part in it."""
        for name, spec in self.carried.items():
            if name in outputs and spec.reset == "response":
                self.inputs[name].copy_(choose(took_part, outputs[name], self.inputs[name]))

    def late(self, names: Iterable[str], keys: int | None = None) -> dict[str, Tensor]:
        """Compute the named inputs that the loop computes only before programs that read them; see `StepContext`."""
        return computed(names, StepContext(self.rows, self.state, self.config, keys), late=True)

    def _initial(self) -> dict[str, Tensor]:
        return initial_states(self.carried.values(), len(self.state.start), self.state.start.device)

    def move(self, observed: bool = False) -> Decision | None:
        """Apply the results of the last step (see `take`), and pack the next.

        observed: run op by op and return the decision.
        """
        self._steps += 1
        if observed:
            updates, decision = self._next()
            self._go(lambda: _write(updates), lambda: _write(self._packed()))
            return decision
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
        self._go(*(self._op_by_op(part) for part in TRANSITION_PARTS))
        return None

    def let_go(self) -> None:
        """Drop the captured transition; the next step captures another."""
        if self._pool is not None and self._graph is not None:
            self._pool.let_go(self._graph[1])

    def ask_again(self, refusals: Refusals) -> None:
        """Ask refused policies again.

        The transition that was captured without them is dropped, and the next step runs op by op, as the first one
        does.
        """
        if refusals.errors:
            refusals.errors.clear()
            self.let_go()
            self._steps = 0

    def compile(self, outputs: Mapping[str, Tensor]) -> None:
        """Compile the transition for outputs of these types, unless that has been done before."""
        self.take(outputs)
        self._next()  # what policies make once, such as tables on the device, is no part of the transition
        for part in TRANSITION_PARTS:
            self._compiled(part, ahead=True)

    def without_prompt(
        self, inputs: Mapping[str, Tensor], rows: StepRows, tables: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The same inputs for sequences whose prompts are mask tokens, in pages of their own (LLaDA, guidance)."""
        given = rows.positions < self.state.prompt_end[rows.sequence]
        states = {name.removeprefix(TWIN): value for name, value in inputs.items() if name.startswith(TWIN)}
        masked = torch.where(given, self.state.mask_id, rows.input_ids)
        return {**inputs, **states, "input_ids": masked, **tables}

    def take(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the outputs of a step: token and confidence; draw if it has one, kept if it evicts, and its states."""
        pairs: list[Assignment] = []
        for name in (*FILLERS, *self.carried):
            if name not in outputs:
                continue
            value = outputs[name][: self.capacity] if name in FILLERS else outputs[name]
            if name not in self._given:
                rows = self.capacity if name in FILLERS else len(value)
                self._given[name] = value.new_empty((rows, *value.shape[1:]))
            buffer = self._given[name]
            pairs.append((buffer[: len(value)], value))
            if name in FILLERS and len(value) < len(buffer):
                if name not in self._fill:
                    self._fill[name] = torch.full_like(buffer, FILLERS[name])
                pairs.append((buffer[len(value) :], self._fill[name][len(value) :]))
        _write(pairs)

    def _next(self) -> tuple[list[Assignment], Decision]:
        """Updates of everything but the rows by a step, and its decision; nothing is written."""
        config, given = self.config, self._given
        measured = {s: given[s.name] for s in GIVEN if s.name in given}
        if "measured" in given:
            measured |= zip(statistics_of(config.policy), given["measured"].unbind(1), strict=True)
        results = row_results(
            self.rows, given["token"], given["confidence"], given.get("kept"), measured, given.get("draw")
        )
        after = copy.copy(self.state)  # transitions replace tensors and never write into them
        committed = after.apply(self.rows, results, config.policy, config.block_cache, config.recommit, self._noise())
        carried = self._carried(after)
        pairs = [*_pairs(self.state, after), *((self.inputs[name], value) for name, value in carried.items())]
        return _distinct([*pairs, (self.report.tensor, after.report())]), Decision(results, committed)

    def _carried(self, after: DecodeState) -> dict[str, Tensor]:
        """States that passes declared, as the next step reads them."""
        found, moved, part = {}, after.start != self.state.start, self.state.granted & self.state.active
        for name, spec in self.carried.items():
            value = self.inputs[name]
            if name in self._given:
                value = choose(part, self._given[name], value)
            if spec.reset == "block":
                value = choose(moved, torch.full_like(value, spec.initial), value)
            found[name] = value
        return found

    def _noise(self) -> Tensor | None:
        if "noise" not in needs_of(self.config.policy):
            return None
        return policy_noise(self.state.keys.T, self.state.columns, self.state.counter)

    def _packed(self) -> list[Assignment]:
        """Updates of the rows of the next step, and of the inputs computed from them; nothing is written."""
        rows = self._rows_of(self.state)
        inputs = computed(self._names, StepContext(rows, self.state, self.config), late=False, fixed=False)
        return _distinct([*_pairs(self.rows, rows), *((self.inputs[name], value) for name, value in inputs.items())])

    # -- how it runs ----------------------------------------------------------------------------------------------

    def _go(self, moving: Callable[[], object], packing: Callable[[], object]) -> None:
        moving()
        self.report.post()
        packing()

    def _op_by_op(self, part: TransitionPart) -> Callable[[], object]:
        return lambda: _write(part.updates(self))

    def _compiled(self, part: TransitionPart, ahead: bool = False) -> Callable[[], object] | None:
        """A part compiled for this batch's tensors; None if it runs op by op. ahead: compile it if necessary."""
        with noting_none() as refused:
            return None if self._compiler is None or refused else self._from(self._compiler, part, ahead)

    def _from(self, compiler: TraceCompiler, part: TransitionPart, ahead: bool) -> Callable[[], object] | None:
        held = self._held(part)
        given = tuple((name, value.dtype) for name, value in self._given.items()) if part.reads_results else ()
        values = (getattr(self.state, field.name) for field in fields(self.state))
        fixed = tuple(value for value in values if not isinstance(value, Tensor | dict))
        shapes = tuple(value.shape for value in held)
        key = (part.name, self.config.key, type(self.state), self.state.block, fixed, given, shapes)
        name = f"the {part.name} between steps under policy {self.config.policies}"
        return compiler.function(name, self._traceable(part, held), held, key, ahead)

    def _held(self, part: TransitionPart) -> list[Tensor]:
        """Every tensor that a part may read or write, once."""
        everything = [*_tensors(self.state), *_tensors(self.rows), *self.inputs.values()]
        if part.reads_results:
            everything += [self.report.tensor, *self._given.values()]
        return list({id(tensor): tensor for tensor in everything}.values())

    def _traceable(self, part: TransitionPart, held: Sequence[Tensor]) -> Callable[..., list[tuple[int, Tensor]]]:
        """A part as a function of those tensors, which returns the numbers of those it updates and their new values."""
        numbers = {id(tensor): number for number, tensor in enumerate(held)}

        def function(*tensors: Tensor) -> list[tuple[int, Tensor]]:
            def other(value: Any) -> Any:
                number = numbers.get(id(value)) if isinstance(value, Tensor) else None
                return value if number is None else tensors[number]

            twin = copy.copy(self)
            twin.state = _each(self.state, other)
            twin.rows = _each(self.rows, other)
            twin.inputs = {name: other(value) for name, value in self.inputs.items()}
            twin._given = {name: other(value) for name, value in self._given.items()}
            twin.report = copy.copy(self.report)
            twin.report.tensor = other(self.report.tensor)
            own = {id(tensor): number for number, tensor in enumerate(tensors)}
            return [(own[id(old)], new) for old, new in part.updates(twin)]

        return function

    def _capture(self, pool: GraphPool) -> None:
        if self._graph is None and not pool.has_room("transition", self.capacity):
            return
        before = [
            (tensor, tensor.clone()) for tensor in self._held(TRANSITION_PARTS[0]) if tensor is not self.report.tensor
        ]
        often = self._compiler is not None and self._steps >= self._compiler.often
        compiled = [self._compiled(part, ahead=often) for part in TRANSITION_PARTS]
        self._plain = None in compiled and not often
        moving, packing = (
            found or self._op_by_op(part) for part, found in zip(TRANSITION_PARTS, compiled, strict=True)
        )
        try:
            with noting_none():
                graph = pool.record(lambda: self._go(moving, packing), warm=False)
        except torch.OutOfMemoryError as error:
            pool.refuse("transition", self.capacity, str(error).partition("\n")[0])
            self._fits = False
            return
        except RuntimeError as error:
            raise LoweringError(
                f"the transition between steps cannot be captured as a CUDA graph: {str(error).splitlines()[0]} "
                f"Policy {self.config.policies} may read values on the host; decode with graphs=False."
            ) from error
        finally:  # a capture runs it to warm up
            for tensor, value in before:
                tensor.copy_(value)
        self.let_go()
        self._graph = graph, pool.hold("transition", self.capacity, (), self._forget)

    def _forget(self) -> None:
        self._graph = None


TRANSITION_PARTS = (
    TransitionPart("transition", lambda transition: transition._next()[0], True),
    TransitionPart("packing", StepTransition._packed, False),
)


def _each(holder: Any, change: Callable[[Any], Any]) -> Any:
    """The same dataclass with every field changed, and every entry of one that is a dict."""

    def changed(value: Any) -> Any:
        return {name: change(one) for name, one in value.items()} if isinstance(value, dict) else change(value)

    return type(holder)(**{field.name: changed(getattr(holder, field.name)) for field in fields(holder)})


def _named(holder: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a dataclass: by its field, those of a dict by the field and their name in it."""
    for field in fields(holder):
        value = getattr(holder, field.name)
        several = isinstance(value, dict)
        entries = {f"{field.name} {name}": one for name, one in value.items()} if several else {field.name: value}
        yield from ((name, one) for name, one in entries.items() if isinstance(one, Tensor))


def _tensors(holder: Any) -> list[Tensor]:
    return [value for _, value in _named(holder)]


def _pairs(target: Any, source: Any) -> list[Assignment]:
    """Every tensor of a dataclass with the same field of another."""
    return list(zip(_tensors(target), _tensors(source), strict=True))


def _distinct(pairs: Sequence[Assignment]) -> list[Assignment]:
    """Assignments that change a tensor, each tensor once."""
    held = {id(old) for old, _ in pairs}
    updates = {id(old): (old, new) for old, new in pairs if old is not new}
    # A tensor that is assigned to another (a policy may return one of its inputs) must be read before it changes.
    return [(old, new.clone() if id(new) in held else new) for old, new in updates.values()]


def _write(updates: Sequence[Assignment]) -> None:
    copy_all([old for old, _ in updates], [new for _, new in updates])
