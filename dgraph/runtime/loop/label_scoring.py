"""Probabilities of labels in a slot after a prompt, in one forward of the model itself: no cache, no recipe, no step.

A mask model predicts a distribution of tokens for every masked position, given all that it sees. So a slot of masks
between fixed tokens asks it to decide, and one forward answers. That is one denoising step at temperature 1 over a
canvas that is fixed except for the slot; vLLM's `/v1/decisions` works in the same way. The result is not the likelihood
of a text, for which no single forward of such a model suffices (see `dgraph.evaluate.harness`). Tokens of one label are
taken as independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError
from dgraph.lowering.program import Program
from dgraph.runtime.request_checks import check_token
from dgraph.runtime.state.packed_rows import first_limits
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class Question:
    """A decision between labels for a slot.

    Attributes:
        prompt, before, after: ids; prompt and before precede the slot, in this order, and after follows it.
        labels: ids of each label.
    """

    prompt: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        prompt: Sequence[int],
        labels: Sequence[Sequence[int]],
        before: Sequence[int],
        after: Sequence[int],
        most: int,
    ) -> Question:
        """Check and make a question. most: positions that it may take.

        Raises:
            InputError: no prompt, no label or an empty one, an invalid token or a mask, or too many positions.
        """

        def ids(what: str, tokens: Sequence[int]) -> tuple[int, ...]:
            if not isinstance(tokens, Iterable):
                raise InputError(f"{what} is {tokens!r}, expected a list of ids, as [{tokens!r}].")
            return tuple(check_token(spec, what, place, token) for place, token in enumerate(tokens))

        for what, value in (("prompt 0", prompt), ("labels", labels)):
            if not isinstance(value, Iterable):
                raise InputError(f"{what}: expected a list, got {value!r}.")
        prompt, labels = list(prompt), list(labels)
        if not prompt or not labels:
            raise InputError(
                f"a decision needs a prompt and at least one label, got {len(prompt)} tokens of prompt "
                f"and {len(labels)} labels."
            )
        each = tuple(ids(f"label {number}", label) for number, label in enumerate(labels))
        for number, label in enumerate(each):
            if not label:
                raise InputError(f"label {number} is empty; give at least one token.")
        found = cls(ids("prompt 0", prompt), each, ids("before", before), ids("after", after))
        taken = len(found.prompt) + len(found.before) + max(map(len, each)) + len(found.after)
        if taken > most:
            raise InputError(
                f"this decision takes {taken} positions, more than {most}; shorten the prompt or the labels."
            )
        return found


class Scorer:
    """Answers questions with one forward each.

    Labels of one length share a sequence, whose slot has as many masks as they have tokens. Labels of another length
    have a sequence of their own in the same forward, so that the tokens after the slot follow each label directly.

    A block-causal model sees the slot in its block, the rest of which is masks, as in the first step of decoding. It
    does not see later blocks. If a slot reaches over the end of a block, its later part sees the earlier one as masks.

    Args:
        spec: the model.
        program: makes the program of one forward of packed sequences. Its outputs are hidden [N, d] (the input of the
            LM head), the head's weight, and its bias if it has one; or logits. See `dgraph.compiler.phases.scoring`.
            It is not called for a model that cannot be asked.
        block: tokens that are denoised together.
        device: device of the program.
    """

    def __init__(self, spec: ModelSpec, program: Callable[[], Program], block: int, device: torch.device):
        spec.check_masks("a decision between labels")
        self._spec, self._program, self._block, self._device = spec, program(), block, device

    @torch.no_grad()
    def __call__(self, question: Question) -> list[float]:
        """Probability of each label: the softmax over the sums of their tokens' log-probabilities.

        The probabilities add up to 1. The mask token itself has probability 0 in every position.
        """
        lengths = sorted({len(label) for label in question.labels})
        begin = len(question.prompt) + len(question.before)
        canvases = [self._canvas(question, begin, length) for length in lengths]
        first, rows = 0, []
        for length, canvas in zip(lengths, canvases, strict=True):
            at = first + begin + torch.arange(length) - self._spec.logit_shift
            if self._spec.next_token:
                at[0] = first + begin - 1  # the last known row predicts the token after it
            rows.append(at)
            first += len(canvas)
        outputs = self._program(dict(self._inputs(canvases, begin)), first).outputs
        slots = torch.cat(rows).to(self._device)
        if "logits" in outputs:
            logits = outputs["logits"][slots].double()
        else:
            logits = F.linear(outputs["hidden"][slots], outputs["weight"], outputs.get("bias")).double()
        logits[:, self._spec.mask_id] = -math.inf
        found = dict(zip(lengths, logits.log_softmax(dim=1).cpu().split(lengths), strict=True))
        sums = [found[len(label)][range(len(label)), label].sum() for label in question.labels]
        probabilities: list[float] = torch.stack(sums).softmax(dim=0).tolist()
        return probabilities

    def _canvas(self, question: Question, begin: int, length: int) -> list[int]:
        """Token at each position of a canvas whose slot has `length` masks and begins at `begin`."""
        mask = self._spec.mask_id
        canvas = [*question.prompt, *question.before, *[mask] * length, *question.after]
        if self._spec.attention != "block_causal":
            return canvas
        before = 0 if self._spec.aligned else begin
        end = before - (before - begin - length) // self._block * self._block
        return canvas[:end] + [mask] * (end - len(canvas))

    def _inputs(self, canvases: Sequence[Sequence[int]], begin: int) -> Iterator[tuple[str, Tensor]]:
        """Inputs of the program, by name. begin: first position of the slot."""
        lengths = torch.tensor([len(canvas) for canvas in canvases])
        each = [torch.arange(int(n)) for n in lengths]
        positions = torch.cat(each)
        limit = torch.cat([first_limits(self._spec, own, begin, self._block) for own in each])
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        yield "input_ids", torch.tensor([token for canvas in canvases for token in canvas]).to(self._device)
        yield "positions", positions.to(self._device)
        yield "limit", limit.int().to(self._device)
        yield "cu_rows", bounds.int().to(self._device)
