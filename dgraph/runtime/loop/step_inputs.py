"""Inputs that the decode loop offers to programs: one table of the inputs that it computes for each step.

A program reads an input by declaring it (`InputSpec`). Inputs that no program reads are not computed. Rows that pad a
step belong to no sequence: their tokens, positions and limits are 0, their flags False.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.ops.attention.sparse import REUSE
from dgraph.runtime.loop.batch_config import BatchConfig
from dgraph.runtime.sampling.random_numbers import row_seeds, uniform
from dgraph.runtime.state.base import DecodeState
from dgraph.runtime.state.packed_rows import StepRows, offsets_of
from dgraph.types.shapes import InputSpec


@dataclass(frozen=True)
class StepContext:
    """A step that is about to run.

    Attributes:
        rows, state, config: its rows, the state of its sequences, and how they are decoded.
        keys: number of rows of `key_positions`; None: one for each position of the canvas.
    """

    rows: StepRows
    state: DecodeState
    config: BatchConfig
    keys: int | None = None


@dataclass(frozen=True)
class StepInput:
    """An input that the decode loop has.

    Attributes:
        dtype, per: as an `InputSpec` declares them.
        value: computes it; None if the caches hold it.
        needs: requirement on the session; "" for none. "plan": a row plan; "hides": a row plan that hides rows;
            "kv": a plan of keys; "modes": a model whose rows have a mode (encoded or denoised).
        fixed: True of a config under which it stays as it is before the first step.
        late: True if it is computed right before the programs that read it, and not with every step.
    """

    dtype: torch.dtype
    per: str
    value: Callable[[StepContext], Tensor] | None
    needs: str = ""
    fixed: Callable[[BatchConfig], bool] = lambda config: False
    late: bool = False


def _given(value: Tensor | None) -> Tensor:
    assert value is not None, "the session has no plan for it"
    return value


def _temperature(at: StepContext) -> Tensor:
    policy, state = at.config.policy, at.state
    heat = policy.heat(state.forwards, state.kind, state.settings) if policy.traits.renoises else state.temperature
    return heat[at.rows.sequence]


def _seed(at: StepContext) -> Tensor:
    rows, state = at.rows, at.state
    if not at.config.draws:
        return torch.zeros(len(rows.masked), dtype=torch.int64, device=rows.masked.device)
    return row_seeds(state.keys[rows.sequence].T, rows.positions, state.counter[rows.sequence])


def _average(at: StepContext) -> Tensor:
    average, script = at.state.average, at.config.script
    if script is None or not any(spec.name == "script" for spec in at.config.inputs):
        return average
    # Where nothing may be evicted (a full step), the script does not change that.
    return torch.where(average.isinf(), average, script.budget(at.state))


def _script(at: StepContext) -> Tensor:
    script = at.config.script
    if script is not None:
        return script.scores(at.rows, at.state)
    return torch.zeros(len(at.rows.masked), device=at.rows.masked.device)


def _in_block(at: StepContext) -> Tensor:
    rows, state = at.rows, at.state
    predicted = rows.column - state.block
    # The last row of a response may predict the position after it, which is in no block.
    within = state.start[rows.sequence] + predicted < state.visible[rows.sequence]
    return (predicted >= 0) & (predicted < state.block) & within & rows.live


def _adapt(at: StepContext) -> Tensor:
    # If a prompt is recomputed, the response's other rows keep their entries (MaskKV A.9, algorithm 5).
    return _given(at.state.action)[at.rows.sequence] == REUSE


def standing_tokens(rows: StepRows, state: DecodeState) -> Tensor:
    """i64[N]: the token that stands at the position of the block that a row predicts, -1 where it predicts none."""
    column = rows.column - state.block
    inside = (column >= 0) & (column < state.block)
    return torch.where(inside, state.block_tokens[rows.sequence, column.clamp(0, state.block - 1)], -1)


def _drafted(at: StepContext) -> Tensor:
    return at.state.drafted(at.config.policy)[at.rows.sequence] & (at.rows.column >= 0) & at.rows.live


def _key_positions(at: StepContext) -> Tensor:
    seen = at.state.seen_keys()
    size = seen.numel() if at.keys is None else min(at.keys, seen.numel())
    index = torch.nonzero_static(seen.flatten(), size=size, fill_value=0)[:, 0]
    return index % seen.shape[1]


STEP_INPUTS: dict[str, StepInput] = {
    # Rows: token, position, positions that it sees (those before `limit`), and its two flags (see `StepRows`).
    "input_ids": StepInput(torch.int64, "row", lambda at: at.rows.input_ids),
    "positions": StepInput(torch.int64, "row", lambda at: at.rows.positions),
    "limit": StepInput(torch.int32, "row", lambda at: at.rows.limit),
    "masked": StepInput(torch.bool, "row", lambda at: at.rows.masked),
    "candidate": StepInput(torch.bool, "row", lambda at: at.rows.candidate),
    # The row predicts a position of the current block.
    "in_block": StepInput(torch.bool, "row", _in_block),
    # The token that stands at the position that the row predicts (the mask token of a mask), -1 without one.
    "current": StepInput(torch.int64, "row", lambda at: standing_tokens(at.rows, at.state)),
    "cu_rows": StepInput(torch.int32, "offsets", lambda at: at.rows.cu_rows),
    # The row's prediction is a draft, which a later step verifies.
    "drafted": StepInput(torch.bool, "row", _drafted),
    # Everything is recomputed for the row; its token was decoded in the step before, or `full`.
    "full": StepInput(torch.bool, "row", lambda at: _given(at.rows.full), needs="plan"),
    "changed": StepInput(torch.bool, "row", lambda at: _given(at.rows.changed), needs="plan"),
    # The row is encoded (else denoised); the position from which windows count back.
    "encoded": StepInput(torch.bool, "row", lambda at: _given(at.rows.encoded), needs="modes"),
    "origin": StepInput(torch.int32, "row", lambda at: _given(at.rows.origin), needs="modes"),
    # Places of the rows' keys in the pages of their sequences.
    "slots": StepInput(torch.int64, "row", lambda at: _given(at.rows.slots), needs="hides"),
    # Draws: see `dgraph.runtime.sampling.random_numbers`.
    "temperature": StepInput(torch.float32, "row", _temperature, fixed=lambda config: not config.draws),
    "seed": StepInput(torch.int64, "row", _seed, fixed=lambda config: not config.draws),
    "noise": StepInput(
        torch.float32, "row", lambda at: uniform(_seed(at)), fixed=lambda config: not config.select_noise
    ),
    "script": StepInput(torch.float32, "row", _script),
    # Sequences: where the prompt, the current block and the response begin and end (positions; ends are exclusive).
    # Steps of the sequence and of its current block before this one. Tokens per step so far, in the block and in the
    # sequence.
    "prompt_end": StepInput(torch.int32, "sequence", lambda at: at.state.prompt_end.int(), fixed=lambda config: True),
    "response_end": StepInput(
        torch.int32, "sequence", lambda at: at.state.end.int(), fixed=lambda config: not config.policy.traits.extends
    ),
    "block_start": StepInput(torch.int32, "sequence", lambda at: at.state.start.int()),
    "block_end": StepInput(torch.int32, "sequence", lambda at: (at.state.start + at.state.block).int()),
    "step": StepInput(torch.int32, "sequence", lambda at: at.state.counter.int()),
    "block_step": StepInput(torch.int32, "sequence", lambda at: at.state.forwards.int()),
    "average": StepInput(torch.float32, "sequence", _average),
    "sequence_average": StepInput(torch.float32, "sequence", lambda at: at.state.sequence_average),
    # Keys: the cache's pages; positions that are always seen, and the action on the others
    # (`dgraph.ops.attention.sparse`).
    "page_table": StepInput(torch.int32, "sequence", None),
    "pack_start": StepInput(torch.int32, "constant", None, needs="kv"),
    "window": StepInput(torch.int32, "sequence", lambda at: _given(at.state.window), needs="kv"),
    "action": StepInput(torch.int32, "sequence", lambda at: _given(at.state.action), needs="kv"),
    "adapt": StepInput(torch.bool, "row", _adapt, needs="kv"),
    # All positions that rows of a sequence may see, if it does not reuse packed keys.
    "key_positions": StepInput(torch.int64, "key", _key_positions, needs="kv", late=True),
    "cu_keys": StepInput(
        torch.int32, "offsets", lambda at: offsets_of(at.state.seen_keys().sum(dim=1)), needs="kv", late=True
    ),
}
"""Inputs by name; a name means the same in every program and on every family."""


def computed(names: Iterable[str], at: StepContext, late: bool | None = None, fixed: bool = True) -> dict[str, Tensor]:
    """Compute the named inputs that the loop offers; other names are left out.

    late: only those that are computed late (True), or the others (False); None for both. fixed: also those that never
    change.
    """
    found = {}
    for name in names:
        offer = STEP_INPUTS.get(name)
        if offer is None or offer.value is None or late not in (None, offer.late):
            continue
        if fixed or not offer.fixed(at.config):
            found[name] = offer.value(at)
    return found


def initial_states(specs: Iterable[InputSpec], sequences: int, device: torch.device) -> dict[str, Tensor]:
    """Initial values of the carried states among the declared inputs: [sequences, ...] each."""
    return {
        spec.name: torch.full((sequences, *spec.element), spec.initial, dtype=spec.dtype, device=device)
        for spec in specs
        if spec.carried
    }


def given_inputs(specs: Iterable[InputSpec]) -> tuple[InputSpec, ...]:
    """The declared inputs that the loop computes or carries, sorted by name."""
    return tuple(sorted((s for s in specs if s.carried or s.name in STEP_INPUTS), key=lambda s: s.name))


def declared(programs: Mapping[str, Mapping[str, InputSpec]]) -> dict[str, InputSpec]:
    """Merge the inputs of a session's programs, by name; `programs` has those of each.

    Raises:
        LoweringError: two programs declare one name differently.
    """
    found: dict[str, tuple[str, InputSpec]] = {}
    for program, inputs in programs.items():
        for name, spec in inputs.items():
            first, known = found.setdefault(name, (program, spec))
            if known != spec:
                raise LoweringError(
                    f"programs {first!r} and {program!r} declare the input {name!r} differently: {known} and {spec}. "
                    f"Declare it once, and add it where it is read."
                )
    return {name: spec for name, (_, spec) in found.items()}
