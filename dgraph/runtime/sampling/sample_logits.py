"""Tokens of a step, for programs that leave their logits to the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dgraph.errors import LoweringError
from dgraph.ops.kv.row_slots import reference as row_slots
from dgraph.ops.lm_head.lm_head_adjusted import adjusted
from dgraph.ops.statistics import kept_rows, measure_rows
from dgraph.runtime.constraints.guide import Offer, guide_of
from dgraph.runtime.constraints.vocabulary import Vocabulary
from dgraph.runtime.loop.step_inputs import StepContext, computed, standing_tokens
from dgraph.runtime.loop.transition import FILLERS, StepTransition
from dgraph.runtime.policies import statistics_of
from dgraph.runtime.requests import SlotState
from dgraph.runtime.sampling.sampler import LogitsDecoder, RowContext, Sampler
from dgraph.runtime.state.packed_rows import StepRows
from dgraph.spec import ModelSpec


class Decide:
    """Take tokens from logits, as the sampler of each request says.

    Reads values on the host: a program that leaves its logits to the runtime is a baseline, or serves a sampler that
    needs all of them. A program with `lm_head` needs no read.

    Args:
        spec: the model.

    Attributes:
        failed: exceptions of samplers in the last step, by slot.
    """

    def __init__(self, spec: ModelSpec):
        self._spec = spec
        self._decoders: dict[Sampler, LogitsDecoder] = {}
        self.failed: dict[int, Exception] = {}

    def __call__(
        self,
        transition: StepTransition,
        samplers: Mapping[int, Sampler],
        outputs: Mapping[str, Tensor],
        unconditional: Tensor | None,
        caches: Mapping[str, Tensor],
        lenient: bool = False,
    ) -> Mapping[str, Tensor]:
        """Add a token and its confidence per row to the outputs.

        Args:
            transition: rows, state and inputs of the step.
            samplers: the sampler of each slot.
            outputs: outputs of the step program, which has no tokens.
            unconditional: its logits without the prompts, for guidance.
            caches: by name, tensors that the runtime keeps per position.
            lenient: note the exception of a sampler in `failed`, for its slots, whose rows then have no token.

        Raises:
            LoweringError: the outputs have no logits.
        """
        self.failed = {}
        if "logits" not in outputs:
            raise LoweringError(
                f"program 'step' must output token and confidence, or logits; got: "
                f"{', '.join(sorted(outputs)) or 'nothing'}."
            )
        rows, logits = transition.rows, outputs["logits"]
        row, at, candidate = _entries(rows, outputs)
        decided: dict[str, Tensor] = {}
        self._forget(samplers)
        for sampler, slots in _by_sampler(samplers).items():
            mine = candidate
            if len(slots) < len(samplers):
                chosen = torch.zeros(len(transition.state.start), dtype=torch.bool)
                chosen[slots] = True
                mine = candidate & chosen.to(row.device)[rows.sequence[at]]
            try:
                self._decode(transition, sampler, mine.nonzero()[:, 0], row, logits, unconditional, caches, decided)
            except Exception as error:
                if not lenient:
                    raise
                self.failed |= dict.fromkeys(slots, error)
        for name in ("token", "confidence"):
            if name not in decided:  # all of them failed
                dtype = torch.int64 if name == "token" else torch.float32
                decided[name] = torch.full(row.shape, FILLERS[name], dtype=dtype, device=row.device)
        return {**outputs, **decided}

    def guided(
        self,
        transition: StepTransition,
        held: Mapping[int, SlotState],
        vocabulary: Callable[[], Vocabulary] | None,
        outputs: Mapping[str, Tensor],
        lenient: bool,
    ) -> Mapping[str, Tensor]:
        """The outputs with the tokens that guides propose in the place of those taken from logits.

        Args:
            transition: rows and state of the step.
            held: by slot, the request with a constraint. Its guide is made with its first step, where an error is its
                own.
            vocabulary: tokens of the model.
            outputs: logits, token and confidence of the step.
            lenient: as in `__call__`.
        """
        rows, state, logits = transition.rows, transition.state, outputs["logits"]
        _, at, live = _entries(rows, outputs)
        if rows.added is not None:
            live = live & ~rows.added[at]
        sequence = torch.where(live, rows.sequence[at], -1).tolist()
        position = (state.start[rows.sequence[at]] + rows.column[at] - state.width).tolist()
        starts, canvas = state.start.tolist(), state.canvas.cpu()
        masked = state.block_masked.cpu()
        token, confidence = outputs["token"].clone(), outputs["confidence"].clone()
        for slot, one in held.items():
            entries = [entry for entry, owner in enumerate(sequence) if owner == slot]
            if not entries or slot in self.failed:
                continue
            begin, stop = len(one.request.ids) - one.request.decoded, starts[slot] + state.width
            known: list[int | None] = list(canvas[slot, begin:stop].tolist())
            for column in masked[slot].nonzero()[:, 0].tolist():
                if starts[slot] + column >= begin:
                    known[starts[slot] + column - begin] = None
            try:
                own = logits[entries].float()
                if (adjust := self._adjust(transition, rows.sequence[at[entries]])) is not None:
                    own = adjust(own)
                for never in {self._spec.mask_id, *one.request.decoding.sampling.suppress} - {-1}:
                    own[:, never] = -torch.inf
                own = own.cpu()
                offers = {
                    position[entry] - begin: Offer(own[n].numpy(), int(token[entry]), float(confidence[entry]))
                    for n, entry in enumerate(entries)
                }
                one.guide = one.guide or guide_of(one.request, vocabulary)
                found = one.guide.propose(known, offers)
            except Exception as error:
                if not lenient:
                    raise
                self.failed[slot] = error
                continue
            for entry in entries:
                if (said := found.get(position[entry] - begin)) is not None:
                    token[entry], confidence[entry] = said
        return {**outputs, "token": token, "confidence": confidence}

    def _decode(
        self,
        transition: StepTransition,
        sampler: Sampler,
        entry: Tensor,
        row: Tensor,
        logits: Tensor,
        unconditional: Tensor | None,
        caches: Mapping[str, Tensor],
        decided: dict[str, Tensor],
    ) -> None:
        """Write one sampler's decisions on its entries of the logits into `decided`."""
        rows, state, at = transition.rows, transition.state, row[entry]
        sequence, column = rows.sequence[at], rows.column[at] - state.width
        inside = column.clamp(max=state.width - 1)  # a row may predict the position after the blocks
        heat = state.temperature[sequence]
        context = RowContext(
            sequence=sequence,
            position=state.start[sequence] + column,
            column=inside,
            masked=state.block_masked[sequence, inside] | (column > inside),
            forwards=state.forwards[sequence],
            seed=transition.inputs["seed"][at],
            tokens=state.canvas,
            block=state.width,
            temperature=heat,
            unconditional=None if unconditional is None else unconditional[entry],
            adjust=self._adjust(transition, sequence),
        )
        if sampler not in self._decoders:
            self._decoders[sampler] = sampler.begin(self._spec.mask_id)
        found = self._decoders[sampler].decode(logits[entry], context)._asdict()
        if asked := statistics_of(transition.config.policy):
            memory = caches[kept_rows(asked, self._spec.vocab).name]
            slot = row_slots(rows.positions, caches["page_table"], rows.cu_rows, memory)[at]
            slot = slot if rows.added is None else slot.masked_fill(rows.added[at], -1)
            live = torch.ones_like(at, dtype=torch.bool)
            standing = standing_tokens(rows, state)[at]
            given = heat, self._spec.mask_id, slot, standing, memory, live
            values = measure_rows(asked, logits[entry], found["token"], *given)
            found["measured"] = values.float()
        for name, values in found.items():
            if name not in decided:
                shape = (*row.shape, *values.shape[1:])
                decided[name] = torch.full(shape, FILLERS[name], dtype=values.dtype, device=row.device)
            decided[name][entry] = values

    @staticmethod
    def _adjust(transition: StepTransition, sequence: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The adjustments of the logits of these rows; None in a batch without any."""
        if not transition.config.adjusts:
            return None
        at = StepContext(transition.rows, transition.state, transition.config)
        tables = computed(("logit_scale", "logit_addend"), at)
        scale, addend = tables["logit_scale"], tables["logit_addend"]
        return lambda logits: adjusted(logits, scale[sequence], addend[sequence])

    def _forget(self, samplers: Mapping[int, Sampler]) -> None:
        """Drop the state of samplers that are no longer in use."""
        used = set(samplers.values())
        self._decoders = {sampler: decoder for sampler, decoder in self._decoders.items() if sampler in used}


def _entries(rows: StepRows, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Row i64[R] of each row of logits, the same within the rows of the step, and which are candidates bool[R].

    Only candidates can be committed.
    """
    logits, kept = outputs["logits"], outputs.get("kept")
    row = torch.arange(len(logits), device=logits.device) if kept is None else kept
    at = row.clamp(min=0, max=len(rows.masked) - 1)
    return row, at, (row >= 0) & (row < len(rows.masked)) & rows.candidate[at]


def _by_sampler(samplers: Mapping[int, Sampler]) -> dict[Sampler, list[int]]:
    found: dict[Sampler, list[int]] = {}
    for slot, sampler in samplers.items():
        found.setdefault(sampler, []).append(slot)
    return found
