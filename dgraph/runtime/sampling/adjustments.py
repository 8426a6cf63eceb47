"""Adjustments of logits that a request asks for: biases, allowed and bad ids, penalties, and min-p.

Every adjustment is a row of three tables: z' = z / scale for z > 0, z * scale for z < 0; z'' = z' + addend; then ids
below a share of the likeliest are left out. A step program adds the rows of its sequences within the reduction of the
LM head (`dgraph::lm_head_adjusted`). So they change token, confidence, margin and entropy alike.

Penalties count the tokens that stand committed when a step begins, whatever their order, before the position and after
it. Tokens that one step commits together do not count for each other. The response counts for `presence_penalty` and
`frequency_penalty`, fixed tokens of a canvas included; the prompt counts too for `repetition_penalty` (CTRL, Keskar et
al., arXiv 1909.05858, section 4.1).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.policies.traits import traits_of
from dgraph.spec import ModelSpec

if TYPE_CHECKING:
    from dgraph.runtime.decoding import Decoding

PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties by name, with the value at which they ask for nothing."""
NEUTRAL: Mapping[str, float] = {**PENALTIES, "min_p": 0.0}
"""Adjustments with a number per sequence, and the value at which they ask for nothing."""
ADJUSTMENTS = (*NEUTRAL, "logit_bias", "allowed_token_ids", "bad_words")


def adjustments(decodings: Sequence[Decoding], count: int, vocab: int, device: torch.device) -> dict[str, Tensor]:
    """State of the adjustments of requests, by name: bias f32[b, V], and each of `NEUTRAL` f32[b].

    count: b; sequences without a request adjust nothing.
    """
    found = {"bias": torch.zeros(count, vocab)}
    for row, chosen in zip(found["bias"], decodings, strict=False):
        if chosen.allowed_token_ids is not None:
            left = row[list(chosen.allowed_token_ids)].clone()
            row.fill_(-torch.inf)[list(chosen.allowed_token_ids)] = left
        for token, bias in chosen.biases.items():
            row[token] += bias
        row[[token for token in chosen.bad_words if isinstance(token, int)]] = -torch.inf
    for name, neutral in NEUTRAL.items():
        values = [_number(chosen, name) for chosen in decodings] or [neutral] * count
        found[name] = torch.tensor(values, dtype=torch.float32)
    return {name: value.to(device) for name, value in found.items()}


def _number(chosen: Decoding, name: str) -> float:
    return float(chosen.sampling.min_p if name == "min_p" else getattr(chosen, name))


def logit_scale(adjust: Mapping[str, Tensor], canvas: Tensor, penalises: bool) -> Tensor:
    """f32[b, V]: the repetition penalty at tokens of the canvas i64[b, T], prompt and response; 1 elsewhere.

    penalises: False if no sequence has a penalty.
    """
    bias = adjust["bias"]
    ones = torch.ones_like(bias)
    if not penalises:
        return ones
    penalty = adjust["repetition_penalty"][:, None].expand_as(canvas)
    return ones.scatter(1, canvas.clamp(0, bias.shape[1] - 1), penalty)  # all writes of a row have one value


def logit_addend(adjust: Mapping[str, Tensor], canvas: Tensor, prompt_end: Tensor, penalises: bool) -> Tensor:
    """f32[b, V]: biases, less presence and frequency penalties of the response's tokens on the canvas i64[b, T].

    prompt_end i64[b]: where responses begin; penalises: False if no sequence has a penalty.
    """
    bias = adjust["bias"]
    if not penalises:
        return bias.clone()
    positions = torch.arange(canvas.shape[1], device=canvas.device)
    counts = (positions >= prompt_end[:, None]).to(bias.dtype)
    found = torch.zeros_like(bias).scatter_add(1, canvas.clamp(0, bias.shape[1] - 1), counts)
    presence, frequency = (adjust[name][:, None] for name in ("presence_penalty", "frequency_penalty"))
    return bias - presence * (found > 0) - frequency * found


def check_adjustments(spec: ModelSpec, chosen: Decoding, program: Collection[str]) -> None:
    """Check the adjustments of a request against a model, and the inputs and outputs of its step program.

    Raises:
        InputError: an id outside of the vocabulary, nothing that may be produced, or a model, a rule or
            a program that cannot adjust.
    """
    given: dict[str, Any] = {
        "logit_bias": list(chosen.biases),
        "allowed_token_ids": chosen.allowed_token_ids or (),
        "bad_words": chosen.bad_words,
        "stop_token_ids": chosen.stop_token_ids,
    }
    for name, tokens in given.items():
        for token in tokens:
            if isinstance(token, str):
                raise InputError(
                    f"{name} has the text {token!r}, and there is no tokenizer that reads it; give its id.", field=name
                )
            if token >= spec.vocab:
                raise InputError(f"{name} has the id {token}, but {spec.family} has {spec.vocab} ids.", field=name)
    if not chosen.adjusts:
        return
    field = next(name for name in ADJUSTMENTS if chosen.asks(name))
    if spec.noise == "uniform":
        raise InputError(
            f"{field} is not served with {spec.family}, whose canvas is predicted as a whole and fed back; leave it "
            f"out.",
            field=field,
        )
    if chosen.penalises and traits_of(chosen.rule).edits:
        raise InputError(
            f"{field} would count each token against itself under {type(chosen.rule).__name__}, which decodes "
            f"committed tokens again; use a rule that does not edit, or leave it out.",
            field=field,
        )
    if "logits" not in program and "logit_addend" not in program:
        raise InputError(f"{field} needs a step program that adjusts logits (the pass AdjustLogits); leave it out.")
    banned = {token for token in chosen.bad_words if isinstance(token, int)} | {spec.mask_id}
    if chosen.allowed_token_ids is not None and banned.issuperset(chosen.allowed_token_ids):
        said = "allowed_token_ids leaves no id that may be produced; allow one more."
        raise InputError(said, field="allowed_token_ids")
    if len(banned) >= spec.vocab:
        raise InputError("bad_words leaves no id that may be produced; allow one more.", field="bad_words")


def with_ids(chosen: Decoding, tokenizer: Any) -> Decoding:
    """The settings with the ids of `bad_words` in the place of its texts.

    A text stands for itself and for the same after a space, as far as each is one token.

    Raises:
        InputError: a text that is one token in neither form.
    """
    if tokenizer is None or not any(isinstance(word, str) for word in chosen.bad_words):
        return chosen
    encode = getattr(tokenizer, "encode_part", None) or tokenizer.encode_text
    found: list[int] = []
    for word in chosen.bad_words:
        if isinstance(word, int):
            found.append(word)
            continue
        forms = [list(encode(form)) for form in (word, f" {word}")]
        if all(len(ids) != 1 for ids in forms):
            raise InputError(
                f"bad_words takes texts of one token each, but {word!r} has {len(forms[0])}; give a shorter one.",
                field="bad_words",
            )
        found += [ids[0] for ids in forms if len(ids) == 1]
    return replace(chosen, bad_words=tuple(dict.fromkeys(found)))
