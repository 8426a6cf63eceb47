"""What a generation may be asked for. Every message names the thing, what was expected, what was got, what
to do.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence

from dgraph.errors import InputError, LoweringError, UnknownName
from dgraph.lowering.program import Program
from dgraph.runtime.policies import Policy, check_needs, edits
from dgraph.runtime.sampling import Sampler
from dgraph.runtime.state import BLOCK_CACHES
from dgraph.spec import ModelSpec

ROW_INPUTS = frozenset({"input_ids", "positions", "limit", "masked", "temperature", "seed"})
SEQUENCE_INPUTS = frozenset({"cu_rows", "page_table", "average", "progress"})


def check_session(spec: ModelSpec, programs: Mapping[str, Program], block_cache: str, select_noise: bool) -> None:
    """What a `BlockSession` needs of its model and programs."""
    if spec.attention != "block_causal":
        raise InputError(
            f"{spec.family}: BlockSession decodes block-causal models; this one's attention is "
            f"{spec.attention!r}, so its committed blocks would change with every later block."
        )
    if spec.logit_shift:
        raise InputError(
            f"{spec.family}: BlockSession commits the token that a row predicts for its own position; "
            f"got logit_shift={spec.logit_shift}, expected 0."
        )
    if block_cache not in BLOCK_CACHES:
        raise UnknownName("block_cache", block_cache, BLOCK_CACHES)
    known = ROW_INPUTS | SEQUENCE_INPUTS
    known |= {f"{kind}_cache_{layer}" for kind in "kv" for layer in range(spec.layers)}
    for name in ("prefill", "step"):
        if name not in programs:
            raise InputError(
                f"BlockSession needs the programs 'prefill' and 'step'; {name!r} is missing "
                f"(got: {', '.join(sorted(programs)) or 'none'})."
            )
        asked = programs[name].input_names
        if "noise" in asked and not select_noise:
            raise InputError(
                f"program {name!r} reads the input 'noise' (random selection), but select_noise=False; leave it out."
            )
        unknown = sorted(asked - known - {"noise", "script"})
        if unknown:
            raise LoweringError(
                f"program {name!r} reads inputs that the decode loop does not have: {', '.join(unknown)}. "
                f"Known: {', '.join(sorted(ROW_INPUTS | SEQUENCE_INPUTS))}, noise, script, and k_cache_l and "
                f"v_cache_l for l < {spec.layers}."
            )


def check_rule(policy: Policy, sampler: Sampler, step: Program, block_cache: str) -> None:
    """What a policy and a sampler need of the step program, before anything runs; `InputError` if it has none."""
    outputs = step.output_names
    logits = "logits" in outputs
    if sampler.needs_logits and not logits:
        raise InputError(
            f"{sampler} needs whole logits, but the step program keeps none (it ends in dgraph::lm_head); give the "
            f"session a program 'logits', or leave these settings at their defaults."
        )
    if sampler.cfg_scale > 0:
        raise InputError(
            f"cfg_scale={sampler.cfg_scale} needs a second forward without the prompt, which block-causal decoding "
            f"does not run; leave it at 0."
        )
    statistics = {"margin", "entropy"} if logits else {"margin", "entropy"} & outputs
    check_needs(policy, {"noise", "forwards", "editable", "passes"} | statistics)
    if not edits(policy):
        return
    if block_cache != "off":
        raise InputError(
            f"{type(policy).__name__} replaces decoded tokens, but block_cache={block_cache!r} does not recompute "
            f"their keys; use block_cache='off'."
        )
    if "kept" in outputs:
        raise InputError(
            f"{type(policy).__name__} replaces decoded tokens, but this recipe evicts rows by how masked ones attend; "
            f"use a recipe that evicts none."
        )


def check_request(
    spec: ModelSpec,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    block_length: int,
    temperature: float,
    max_batch: int | None,
) -> list[list[int]]:
    """The prompts as lists of int, or an `InputError`. Warns if the block length is not the model's."""
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    if not math.isfinite(temperature) or temperature < 0:
        raise InputError(
            f"temperature must be a finite number >= 0, got {temperature}; 0 takes the most probable token."
        )
    if max_batch is not None and max_batch < 1:
        raise InputError(f"max_batch must be at least 1, got {max_batch}; None runs all prompts together.")
    if block_length < 1:
        raise InputError(f"block_length must be at least 1, got {block_length}.")
    if block_length != spec.block_length:
        warnings.warn(
            f"block_length={block_length}, but {spec.family} was trained with {spec.block_length}: "
            f"answers may be worse.",
            stacklevel=4,
        )
    return [_check_prompt(spec, index, prompt, max_new_tokens, block_length) for index, prompt in enumerate(prompts)]


def _check_prompt(
    spec: ModelSpec, index: int, prompt: Sequence[int], max_new_tokens: int, block_length: int
) -> list[int]:
    if len(prompt) == 0:
        raise InputError(f"prompt {index} is empty; give at least one token.")
    ids = []
    for place, token in enumerate(prompt):
        try:
            value = operator.index(token)
        except TypeError:
            raise InputError(f"prompt {index}: token {place} is {token!r}, expected an integer id.") from None
        if not 0 <= value < spec.vocab:
            raise InputError(
                f"prompt {index}: token {place} is {value}, outside the vocabulary of {spec.vocab} ids; "
                f"was it encoded with the tokenizer of {spec.family}?"
            )
        if value == spec.mask_id:
            raise InputError(
                f"prompt {index}: token {place} is the mask token (id {value}), which stands for what is to "
                f"be decoded; remove it from the prompt."
            )
        ids.append(value)
    needed = -(-(len(ids) + max_new_tokens) // block_length) * block_length
    if needed > spec.max_positions:
        room = spec.max_positions // block_length * block_length - len(ids)
        advice = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise InputError(
            f"prompt {index}: {len(ids)} tokens and max_new_tokens={max_new_tokens} take {needed} positions "
            f"in blocks of {block_length}, more than the {spec.max_positions} of {spec.family}; {advice}."
        )
    return ids
