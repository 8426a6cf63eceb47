"""Checks of prompts, canvases and tokens. Messages name the thing, what was expected and given, and what to do."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError, warn
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Canvas
from dgraph.spec import ModelSpec


def check_request(
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    max_batch: int | None,
    first: int = 0,
) -> list[list[int]]:
    """Prompts as lists of int. Warns if the block length is not the model's.

    Raises:
        InputError: a prompt or size that cannot be used; the message counts prompts from `first`.
    """
    block_length = decoding.block_length or spec.block_length
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch must be at least 1, got {max_batch}; None runs all prompts together.")
    if block_length != spec.block_length:
        warn(
            f"block_length={block_length}, but {spec.family} was trained with {spec.block_length}: answers may be "
            f"worse."
        )
    return [
        _check_prompt(spec, index, prompt, decoding.max_new_tokens, block_length)
        for index, prompt in enumerate(prompts, first)
    ]


def ids_of(input_ids: Sequence[Sequence[int]] | Tensor | None) -> list[list[int]]:
    """Convert prompts that are given as ids to lists.

    Raises:
        InputError: neither lists of ids nor an integer tensor [b, t].
    """
    if isinstance(input_ids, Tensor):
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            raise InputError(f"input_ids must be int64 [b, t], got {input_ids.dtype} {list(input_ids.shape)}.")
        return input_ids.tolist()
    try:
        return [list(ids) for ids in input_ids or ()]
    except TypeError:
        raise InputError(f"input_ids must be a list of ids per prompt, got {input_ids!r}; wrap a single one.") from None


def either(prompts: object, input_ids: object) -> None:
    """Raise `InputError` unless a call was given texts or ids, and not both."""
    if (prompts is None) == (input_ids is None):
        raise InputError("give either prompts (texts) or input_ids, not both and not neither.")


def listed(prompts: str | Iterable[Any]) -> list[Any]:
    """Prompts as a list; a text is a list of one.

    Raises:
        InputError: neither a text nor several prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InputError(f"prompts are a text or a list of prompts, got {prompts!r}.")
    return list(prompts)


def canvases_of(
    prompts: object, canvas: Sequence[int | None] | Sequence[Sequence[int | None] | None] | None
) -> Sequence[Any] | None:
    """One canvas for each prompt, or None if nothing is fixed. For a single text: its canvas in a list.

    Raises:
        InputError: something else than several canvases.
    """
    if isinstance(prompts, str):
        return [canvas]
    if canvas is not None and not isinstance(canvas, Sequence):
        raise InputError(f"canvas is a list of one canvas for each prompt, got {canvas!r}.", field="canvas")
    return canvas


def check_canvases(
    spec: ModelSpec, canvases: Sequence[Sequence[int | None] | None] | None, prompts: int, decoding: Decoding
) -> list[Canvas]:
    """Fixed positions of the response to each of `prompts` prompts; canvases None: nothing is fixed.

    Raises:
        InputError: another number of canvases, or one that cannot be used.
    """
    if canvases is None:
        return [()] * prompts
    if len(canvases) != prompts:
        raise InputError(
            f"give one canvas for each of {prompts} prompts, None for one of which nothing is fixed; got "
            f"{len(canvases)}.",
            field="canvas",
        )
    return [_check_canvas(spec, index, canvas, decoding) for index, canvas in enumerate(canvases)]


def _check_canvas(spec: ModelSpec, index: int, canvas: Sequence[int | None] | None, decoding: Decoding) -> Canvas:
    what = f"canvas {index}"
    if canvas is not None and (isinstance(canvas, str) or not isinstance(canvas, Sequence)):
        message = f"{what} is {canvas!r}, expected a list with an id or None for each position."
        raise InputError(message, field="canvas")
    if not canvas:
        return ()
    if decoding.constraint is not None:
        raise InputError(
            f"{what} fixes tokens, which cannot be combined with a constraint; leave one of them out.", field="canvas"
        )
    if spec.noise == "uniform":
        raise InputError(
            f"{what}: {spec.family} decodes a canvas as a whole, so nothing of a response can be fixed; leave "
            f"it out, or give its beginning as the end of the prompt.",
            field="canvas",
        )
    if len(canvas) > decoding.max_new_tokens:
        raise InputError(
            f"{what} has {len(canvas)} positions, more than max_new_tokens={decoding.max_new_tokens}; shorten it, or "
            f"ask for more tokens.",
            field="canvas",
        )
    return tuple(
        None if each is None else check_token(spec, what, at, each, field="canvas") for at, each in enumerate(canvas)
    )


def check_token(spec: ModelSpec, what: str, place: int, token: object, *, field: str = "prompt") -> int:
    """Check that a token is an id of the vocabulary, neither the mask nor an image, and return it as an int.

    Raises:
        InputError: it is not; the error has the given field.
    """
    try:
        value = operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{what}: token {place} is {token!r}, expected an integer id.", field=field) from None
    if not 0 <= value < spec.vocab:
        raise InputError(
            f"{what}: token {place} is {value}, outside the vocabulary of {spec.vocab} ids; "
            f"was it encoded with the tokenizer of {spec.family}?",
            field=field,
        )
    if value == spec.mask_id:
        free = "write None where it is free" if field == "canvas" else "remove it from the prompt"
        raise InputError(
            f"{what}: token {place} is the mask token (id {value}), which stands for what is to be decoded; {free}.",
            field=field,
        )
    if value == spec.image_id:
        raise InputError(
            f"{what}: token {place} stands for an image (id {value}), and no image is read here; leave it out, and say "
            f"in words what {spec.family} is to know of it.",
            field=field,
        )
    return value


def room_of(spec: ModelSpec, block_length: int) -> int:
    """Positions that a prompt and its response can have together: whole blocks for models with aligned blocks."""
    step = block_length if spec.aligned else 1
    return spec.max_positions // step * step


def _check_prompt(
    spec: ModelSpec, index: int, prompt: Sequence[int], max_new_tokens: int, block_length: int
) -> list[int]:
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Collection):
        message = f"prompt {index} is {prompt!r}, expected a text or a list of ids, as [5, 6]."
        raise InputError(message, field="prompt")
    if len(prompt) == 0:
        raise InputError(f"prompt {index} is empty; give at least one token.", field="prompt")
    ids = [check_token(spec, f"prompt {index}", place, token) for place, token in enumerate(prompt)]
    step = block_length if spec.aligned else 1
    needed = -(-(len(ids) + max_new_tokens) // step) * step
    if needed > spec.max_positions:
        room = room_of(spec, block_length) - len(ids)
        advice = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise InputError(
            f"prompt {index}: {len(ids)} tokens and max_new_tokens={max_new_tokens} take {needed} positions"
            f"{f' in blocks of {block_length}' if step > 1 else ''}, more than the {spec.max_positions} of "
            f"{spec.family}; {advice}.",
            field="prompt",
        )
    return ids
