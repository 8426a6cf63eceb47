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
from dgraph.runtime.sampling.adjustments import logit_addend, logit_scale
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
        meaning: of one of its elements, for the reference; "[...]: ..." where the shape is not [N], [b], [b + 1] or
            that of what it is `per`.
        needs: requirement on the session; "" for none. "plan": a row plan; "hides" and "adds": one that hides or adds
            rows; "kv": a plan of keys; "modes": a model whose rows have a mode (encoded or denoised); "adjusts": a
            batch in which a request adjusts its logits.
        fixed: True of a config under which it stays as it is before the first step.
        late: True if it is computed right before the programs that read it, and not with every step.
    """

    dtype: torch.dtype
    per: str
    value: Callable[[StepContext], Tensor] | None
    meaning: str
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
    predicted = rows.column - state.width
    # The last row of a response may predict the position after it, which is in no block.
    within = state.start[rows.sequence] + predicted < state.visible[rows.sequence]
    return (predicted >= 0) & (predicted < state.width) & within & rows.live


def _adapt(at: StepContext) -> Tensor:
    # If a prompt is recomputed, the response's other rows keep their entries (MaskKV A.9, algorithm 5).
    return _given(at.state.action)[at.rows.sequence] == REUSE


def standing_tokens(rows: StepRows, state: DecodeState) -> Tensor:
    """i64[N]: the token that stands at the position of the block that a row predicts, -1 where it predicts none."""
    column = rows.column - state.width
    inside = (column >= 0) & (column < state.width)
    return torch.where(inside, state.block_tokens[rows.sequence, column.clamp(0, state.width - 1)], -1)


def _drafted(at: StepContext) -> Tensor:
    return at.state.drafted(at.config.policy)[at.rows.sequence] & (at.rows.column >= 0) & at.rows.live


def _key_positions(at: StepContext) -> Tensor:
    seen = at.state.seen_keys()
    size = seen.numel() if at.keys is None else min(at.keys, seen.numel())
    index = torch.nonzero_static(seen.flatten(), size=size, fill_value=0)[:, 0]
    return index % seen.shape[1]


STEP_INPUTS: dict[str, StepInput] = {
    "input_ids": StepInput(torch.int64, "row", lambda at: at.rows.input_ids, "its token"),
    "positions": StepInput(torch.int64, "row", lambda at: at.rows.positions, "its position in the sequence, from 0"),
    "limit": StepInput(
        torch.int32, "row", lambda at: at.rows.limit, "end of the positions that it sees: all before it, its own too"
    ),
    "masked": StepInput(
        torch.bool, "row", lambda at: at.rows.masked, "its own position is in the current block and holds a mask"
    ),
    "candidate": StepInput(
        torch.bool,
        "row",
        lambda at: at.rows.candidate,
        "the LM head predicts for it. The step may commit the token of the position that it predicts: a mask of the "
        "block, or a decoded one of a rule that edits; with `DecodeRule.tail` also the end of the response",
    ),
    "in_block": StepInput(torch.bool, "row", _in_block, "it predicts a position of the current block, decoded or not"),
    "current": StepInput(
        torch.int64,
        "row",
        lambda at: standing_tokens(at.rows, at.state),
        "the token that stands at the position of the block that it predicts, the mask token of a mask; -1 without one",
    ),
    "cu_rows": StepInput(
        torch.int32, "offsets", lambda at: at.rows.cu_rows, "where the rows of each sequence begin; last, how many live"
    ),
    "drafted": StepInput(torch.bool, "row", _drafted, "its prediction is a draft, which a later step verifies"),
    "full": StepInput(
        torch.bool,
        "row",
        lambda at: _given(at.rows.full),
        "everything is computed anew for it: its sequence takes a full step, or it commits a block",
        needs="plan",
    ),
    "changed": StepInput(
        torch.bool,
        "row",
        lambda at: _given(at.rows.changed),
        "its own token was decoded or replaced in the step before, or it is `full`",
        needs="plan",
    ),
    "encoded": StepInput(
        torch.bool, "row", lambda at: _given(at.rows.encoded), "it is encoded, else denoised", needs="modes"
    ),
    "origin": StepInput(
        torch.int32,
        "row",
        lambda at: _given(at.rows.origin),
        "the position from which windows count back: its own if it is encoded, else the start of its block",
        needs="modes",
    ),
    "slots": StepInput(
        torch.int64,
        "row",
        lambda at: _given(at.rows.slots),
        "place of its keys in the pages of its sequence, counted over the rows that exist; `limit` counts these too",
        needs="hides",
    ),
    "added": StepInput(
        torch.bool, "row", lambda at: _given(at.rows.added), "the plan adds it (`RowPlan.added`)", needs="adds"
    ),
    "gap": StepInput(
        torch.int32,
        "row",
        lambda at: _given(at.rows.gap),
        "[N, 2]: begin and end of the places of keys that it does not see; equal for a row that is not added",
        needs="adds",
    ),
    "temperature": StepInput(
        torch.float32, "row", _temperature, "of its draw; 0 takes the likeliest", fixed=lambda config: not config.draws
    ),
    "seed": StepInput(
        torch.int64,
        "row",
        _seed,
        "of its draw: a hash of the request's seed, prompt, position and step; 0 where nothing is drawn",
        fixed=lambda config: not config.draws,
    ),
    "sequence": StepInput(torch.int64, "row", lambda at: at.rows.sequence, "the number of its sequence in the batch"),
    "noise": StepInput(
        torch.float32,
        "row",
        lambda at: uniform(_seed(at)),
        "uniform in [0, 1), from its seed",
        fixed=lambda config: not config.select_noise,
    ),
    "script": StepInput(torch.float32, "row", _script, "score by which a scripted run selects rows; else 0"),
    "prompt_end": StepInput(
        torch.int32, "sequence", lambda at: at.state.prompt_end.int(), "end of its prompt", fixed=lambda config: True
    ),
    "response_end": StepInput(
        torch.int32,
        "sequence",
        lambda at: at.state.end.int(),
        "end of its response; a rule that extends moves it",
        fixed=lambda config: not config.policy.traits.extends,
    ),
    "block_start": StepInput(
        torch.int32, "sequence", lambda at: at.state.start.int(), "position where its current block begins"
    ),
    "block_end": StepInput(
        torch.int32,
        "sequence",
        lambda at: (at.state.start + at.state.block).int(),
        "end of that block, also where the response ends before it",
    ),
    "step": StepInput(
        torch.int32, "sequence", lambda at: at.state.counter.int(), "steps that it has had before this one"
    ),
    "block_step": StepInput(
        torch.int32, "sequence", lambda at: at.state.forwards.int(), "steps of its current block before this one"
    ),
    "average": StepInput(
        torch.float32,
        "sequence",
        _average,
        "tokens per step of its block so far, 1 before the first; inf where nothing may be evicted",
    ),
    "sequence_average": StepInput(
        torch.float32, "sequence", lambda at: at.state.sequence_average, "the same over all of its steps"
    ),
    "logit_scale": StepInput(
        torch.float32,
        "sequence",
        lambda at: logit_scale(at.state.adjust, at.state.canvas, at.config.penalises),
        "[b, V]: divides its positive logits, and multiplies its negative ones",
        needs="adjusts",
        fixed=lambda config: not config.penalises,
    ),
    "logit_addend": StepInput(
        torch.float32,
        "sequence",
        lambda at: logit_addend(at.state.adjust, at.state.canvas, at.state.prompt_end, at.config.penalises),
        "[b, V]: then added to its logits; -inf for an id that is never produced",
        needs="adjusts",
        fixed=lambda config: not config.penalises,
    ),
    "least_share": StepInput(
        torch.float32,
        "sequence",
        lambda at: at.state.adjust["min_p"].clone(),
        "ids that are less likely than this share of the likeliest one are left out; 0 for none",
        needs="adjusts",
        fixed=lambda config: True,
    ),
    "page_table": StepInput(torch.int32, "sequence", None, "[b, P]: pages of its positions in order; -1 for none"),
    "pack_start": StepInput(
        torch.int32, "constant", None, "[layers, b]: where its kept keys begin in the packed caches", needs="kv"
    ),
    "window": StepInput(
        torch.int32,
        "sequence",
        lambda at: _given(at.state.window),
        "[b, 2]: begin and end of the positions whose keys it always sees",
        needs="kv",
    ),
    "action": StepInput(
        torch.int32,
        "sequence",
        lambda at: _given(at.state.action),
        "use of other keys (`dgraph.ops.attention.sparse`): DENSE all, SELECT all and choose, REUSE the kept ones, "
        "REPACK the kept ones once they are renewed",
        needs="kv",
    ),
    "adapt": StepInput(
        torch.bool,
        "row",
        _adapt,
        "its sequence reuses kept keys in this step; what a pass keeps of the row may be adapted, not computed anew",
        needs="kv",
    ),
    "key_positions": StepInput(
        torch.int64,
        "key",
        _key_positions,
        "positions that sequences see that do not reuse kept keys, one sequence after the other, then 0",
        needs="kv",
        late=True,
    ),
    "cu_keys": StepInput(
        torch.int32,
        "offsets",
        lambda at: offsets_of(at.state.seen_keys().sum(dim=1)),
        "where the `key_positions` of each sequence begin; last, how many there are",
        needs="kv",
        late=True,
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
