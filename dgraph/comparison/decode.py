"""One decode that two models follow step by step, with the values of both.

The first model decodes freely. Then both are decoded side by side, and each step commits the tokens of the free decode
in either. So steps stay the same, however far values are apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.errors import InputError
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.program import ProgramResult
from dgraph.lowering.watch import watch
from dgraph.numerics.run import Run
from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.batch import Batch
from dgraph.runtime.loop.session import PREFILL_ROWS, BlockSession
from dgraph.runtime.requests import Request
from dgraph.runtime.stats import StepRecord
from dgraph.types.shapes import InputSpec

Key = tuple[int, int, int]
"""A row of a step: its sequence, its position, and its place among the rows of that position."""
STRIDE = 4
"""Rows of one position that a step may have, in the numbers of rows that two sides share."""


@dataclass(frozen=True)
class Forward:
    """One forward of a side.

    Attributes:
        program: its phase; "graph" for a graph by itself.
        run: its inputs and values.
        rows: live rows of each stage.
        tokens: the tokens that its own numbers decide, by row; rows that left it have none.
    """

    program: str
    run: Run
    rows: tuple[int, ...]
    tokens: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Moment:
    """One forward of both sides.

    Attributes:
        name: "prompt", or "step 1", "step 2", ...
        sides: both forwards.
        committed: by row, the tokens that the free decode commits in this step.
    """

    name: str
    sides: tuple[Forward, Forward]
    committed: Mapping[Key, int] = field(default_factory=dict)


class Follower:
    """A program that commits given tokens, whatever it computes; see `dgraph.lowering.program.Program`.

    Attributes:
        committed: by row, the tokens that the next call commits.
    """

    def __init__(self, name: str, program: LoweredProgram, mask_id: int, tell: Callable[[Forward], None]):
        self.name, self._program, self._mask_id, self._tell = name, program, mask_id, tell
        self.committed: Mapping[Key, int] = {}

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

    def bound(self, inputs: Mapping[str, Tensor]) -> Callable[[int], ProgramResult]:
        """See `Program`."""
        return partial(self, inputs)

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        """Run, tell of the forward, and put the committed tokens in the place of its own."""
        keys = _keys(inputs["positions"][:rows], inputs["cu_rows"])
        result, values = watch(self._program, inputs, rows)
        graph = self._program.graph
        own = {name: values[node] for name, node in graph.results().items()}
        count = len(inputs["cu_rows"]) - 1
        numbers = [(position * STRIDE + nth) * count + sequence for sequence, position, nth in keys]
        run = Run(graph, inputs, values, torch.tensor(numbers, device=inputs["positions"].device))
        decided = self._decided(own, inputs, rows)
        tokens = {key: token for key, token in zip(keys, decided, strict=True) if token >= 0}
        self._tell(Forward(self.name, run, result.rows, tokens))
        return self._following(result, keys)

    def _decided(self, outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor], rows: int) -> list[int]:
        """The token of each row, -1 where the program decides none."""
        found = torch.full((rows,), -1, dtype=torch.int64)
        if "logits" not in outputs and "token" not in outputs:
            return found.tolist()  # it writes keys and values alone
        candidate = inputs["candidate"][:rows].cpu()
        value = outputs["token"] if "token" in outputs else outputs["logits"]
        index = outputs["kept"].cpu() if "kept" in outputs else torch.arange(len(value))
        live = index >= 0
        if "token" not in outputs:
            logits = value.cpu()
            cold = torch.zeros(len(logits))
            value = decode_logits(logits, cold, cold.long(), self._mask_id).token
        found[index[live]] = value.cpu()[live]
        return torch.where(candidate, found, -1).tolist()

    def _following(self, result: ProgramResult, keys: Sequence[Key]) -> ProgramResult:
        """The result with the committed tokens as the only ones that any rule would commit, and no row left out."""
        missing = self.committed.keys() - set(keys)
        if missing:
            sequence, position, _ = min(missing)
            raise InputError(
                f"the sides forward other rows: {self.name} lacks the row at position {position} of prompt {sequence}, "
                f"whose token is committed here. Compare recipes whose steps forward the same part of a block."
            )
        device = next(iter(result.outputs.values())).device if result.outputs else torch.device("cpu")
        token = torch.tensor([self.committed.get(key, 0) for key in keys], device=device)
        confidence = torch.tensor([1.0 if key in self.committed else -math.inf for key in keys], device=device)
        kept = {"kept": torch.arange(len(keys), device=device)} if "kept" in result.outputs else {}
        return replace(result, outputs={**result.outputs, "token": token, "confidence": confidence, **kept})


def follow(sides: Sequence[CompiledModel], ids: Sequence[Sequence[int]], decoding: Decoding) -> Iterator[Moment]:
    """Decode prompts by the first model, and give every forward of both on the way that it takes.

    Args:
        sides: two models of one vocabulary.
        ids: the prompts.
        decoding: of the free decode.

    Raises:
        InputError: a model without a mask token, or one that is divided over ranks; settings that cannot be used; or
            the second model forwards other rows.
    """
    for side in sides:
        if side.spec.noise != "mask":
            raise InputError(
                f"{side.model.name} draws its canvas again in every step, so no other side can follow it; compare its "
                f"phases instead, as dgraph.compare(a.phases['step'], b.phases['step'])."
            )
        if side.captured.sharding is not None:
            raise InputError("values are compared on one process: leave the ranks out.")
    records: list[StepRecord] = []
    sides[0].generate(input_ids=ids, decoding=decoding, observer=records.append)
    steps = [_committed(record) for record in records]
    forced = replace(decoding, threshold=0.5, steps=None, policy=None)
    told: tuple[list[Forward], list[Forward]] = ([], [])
    decodes = [_Decode(side, ids, forced, each.append) for side, each in zip(sides, told, strict=True)]

    def moments(name: str, committed: Mapping[Key, int]) -> Iterator[Moment]:
        if len(told[0]) != len(told[1]):
            raise InputError(
                f"the sides forward in other steps: in {name} one runs {len(told[0])} programs, the other "
                f"{len(told[1])}. Compare recipes that decode in the same steps."
            )
        for pair in zip(*told, strict=True):
            yield Moment(name, pair, committed)
        for each in told:
            each.clear()

    try:
        for decode in decodes:
            decode.prefill()
        yield from moments("prompt", {})
        for number, committed in enumerate(steps):
            for decode in decodes:
                decode.step(committed)
            yield from moments(f"step {number + 1}", committed)
    finally:
        for decode in decodes:
            decode.batch.clear()


class _Decode:
    """One side of a decode that follows given steps."""

    def __init__(
        self,
        side: CompiledModel,
        ids: Sequence[Sequence[int]],
        decoding: Decoding,
        tell: Callable[[Forward], None],
    ):
        mask, recipe = side.spec.mask_id, side.recipe
        self.programs = {name: Follower(name, each, mask, tell) for name, each in side.programs.items()}
        options: dict[str, Any] = {"block_cache": recipe.block_cache, "plan": recipe.plan, "kv": recipe.kv}
        session = BlockSession(
            side.spec,
            self.programs,
            recommit=recipe.recommit,
            device=side.captured.device,
            page_size=side.page_size,
            **options,
        )
        chosen = decoding.for_model(side.spec)
        block = chosen.block_length or side.spec.block_length
        shape = session.shape(len(ids), max(map(len, ids)) + chosen.max_new_tokens, block, fixed=False)
        self.batch: Batch = session.batch([chosen], shape)
        self.batch.admit(
            range(len(ids)), [Request.of(prompt, chosen, n, (), side.spec) for n, prompt in enumerate(ids)]
        )

    def prefill(self) -> None:
        """Forward the prompts."""
        while self.batch.prefilling:
            self.batch.prefill(PREFILL_ROWS)

    def step(self, committed: Mapping[Key, int]) -> None:
        """Forward the next step, which commits these tokens."""
        for program in self.programs.values():
            program.committed = committed
        self.batch.turn()


def _keys(positions: Tensor, cu_rows: Tensor) -> list[Key]:
    """Each row of a step by its sequence and position."""
    offsets, seen = cu_rows.tolist(), Counter[tuple[int, int]]()
    sequences = [n for n in range(len(offsets) - 1) for _ in range(offsets[n + 1] - offsets[n])]
    found = []
    for sequence, position in zip(sequences, positions.tolist(), strict=True):
        found.append((sequence, position, seen[sequence, position]))
        seen[sequence, position] += 1
    return found


def _committed(record: StepRecord) -> dict[Key, int]:
    """The tokens that a step commits, by row."""
    seen, found = Counter[tuple[int, int]](), dict[Key, int]()
    rows = zip(record.sequence.tolist(), record.positions.tolist(), strict=True)
    for place, (sequence, position) in enumerate(rows):
        if record.committed[place]:
            found[sequence, position, seen[sequence, position]] = int(record.token[place])
        seen[sequence, position] += 1
    return found
