"""A watch over the programs of a session: which call ran last, on which inputs, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.program import Program, ProgramResult
from dgraph.runtime.loop.session import BlockSession
from dgraph.types.shapes import InputSpec, of_window


class Stopped(Exception):
    """The step that was asked for has run; nothing after it is wanted."""


@dataclass
class RecordedCall:
    """One call of a program.

    Attributes:
        graph: of the program.
        phase, variant: the program's name, and which of its forms it is (see `BlockSession.variants`).
        number: of the step, from 0; for a prefill, the number of the step that comes next.
        rows: live rows.
        inputs: as they were before the call, by name; empty if they were not kept.
        outputs: their live rows, by name; empty if the call did not end, or they were not kept.
        failed: True if the call raised an exception.
    """

    graph: Graph
    phase: str
    variant: str
    number: int
    rows: int
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    failed: bool = False


class Recorder:
    """Watch the programs of a session while one call of `generate` runs.

    Args:
        keep: copy the inputs of every call before it runs; it takes time, and the memory of the caches once more.
        last: number of the step after which `Stopped` is raised; None to watch to the end.

    Attributes:
        call: the last call that began; None before the first.
        steps: steps that began.
    """

    def __init__(self, keep: bool = False, last: int | None = None):
        self.keep, self.last = keep, last
        self.call: RecordedCall | None = None
        self.steps = 0

    @contextmanager
    def watching(self, session: BlockSession) -> Iterator[None]:
        """Context in which the programs of a session are watched."""
        programs, variants = session.programs, session.variants
        session.programs = {**self._watched(programs)}
        session.variants = {name: self._watched(own, name) for name, own in variants.items()}
        try:
            yield
        finally:  # another thread may have lowered a variant meanwhile
            new = {name: own for name, own in session.variants.items() if name not in variants}
            session.programs, session.variants = programs, {**variants, **new}

    def _watched(self, programs: Mapping[str, Program], variant: str = "") -> Mapping[str, Program]:
        lowered = ((name, program) for name, program in programs.items() if isinstance(program, LoweredProgram))
        return {**programs, **{name: _Watched(program, name, variant, self) for name, program in lowered}}


class _Watched:
    """A program whose calls a recorder sees."""

    def __init__(self, program: LoweredProgram, phase: str, variant: str, recorder: Recorder):
        self._program, self._phase, self._variant, self._recorder = program, phase, variant, recorder

    @property
    def inputs(self) -> Mapping[str, InputSpec]:
        """See `Program`."""
        return self._program.inputs

    @property
    def output_names(self) -> frozenset[str]:
        """See `Program`."""
        return self._program.output_names

    @property
    def stage_names(self) -> tuple[str, ...]:
        """See `Program`."""
        return self._program.stage_names

    @property
    def graph_rows(self) -> int | None:
        """See `Program`."""
        return self._program.graph_rows

    def bucket_sizes(self, rows: int) -> tuple[int, ...]:
        """See `Program`."""
        return self._program.bucket_sizes(rows)

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        """See `Program`. A prompt is prefilled so, and the forward without a prompt belongs to the step before it."""
        ran = self._recorder.steps
        number = ran if self._phase == "prefill" else max(ran - 1, 0)
        return self._recorded(number, inputs, rows, lambda: self._program(inputs, rows))

    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        """See `Program`. Steps run so."""
        try:
            launch = self._program.bound(inputs)
        except Exception:
            self._begin(self._recorder.steps, inputs, len(inputs["input_ids"])).failed = True
            raise

        def run(rows: int) -> ProgramResult:
            result = self._recorded(self._recorder.steps, inputs, rows, lambda: launch(rows))
            self._recorder.steps += 1
            if self._recorder.steps - 1 == self._recorder.last:
                raise Stopped
            return result

        return run

    def _begin(self, number: int, inputs: Mapping[str, Tensor], rows: int) -> RecordedCall:
        graph, kept = self._program.graph, dict[str, Tensor]()
        if self._recorder.keep:
            kept = {name: in_use(spec, inputs) for name, spec in graph.inputs.items() if name in inputs}
        self._recorder.call = RecordedCall(graph, self._phase, self._variant, number, rows, kept)
        return self._recorder.call

    def _recorded(
        self, number: int, inputs: Mapping[str, Tensor], rows: int, run: Callable[[], ProgramResult]
    ) -> ProgramResult:
        call = self._begin(number, inputs, rows)
        try:
            result = run()
        except Exception:
            call.failed = True
            raise
        if self._recorder.keep:
            call.outputs = live_outputs(self._program, result)
        return result


def in_use(spec: InputSpec, inputs: Mapping[str, Tensor]) -> Tensor:
    """A copy of an input; of a paged cache, the pages of its table alone, since others hold what earlier requests left
    there, and zeros elsewhere.
    """
    value, table = inputs[spec.name], inputs.get(of_window("page_table", spec.window))
    if spec.per != "position" or table is None:
        return value.detach().clone()
    kept = spec.empty(value.shape, value.device).zero_()
    pages = table[table >= 0].long().unique()
    kept[pages] = value[pages]
    return kept


def live_outputs(program: LoweredProgram, result: ProgramResult) -> dict[str, Tensor]:
    """Copies of the outputs of a call, without the rows that pad a stage."""
    live = {stage.rows: rows for stage, rows in zip(program.stages, result.rows, strict=True)}
    found = {}
    for name, value in result.outputs.items():
        rows = live.get(program.graph.row_set(program.graph.result(name)) or "")
        found[name] = value[:rows].detach().clone()
    return found
