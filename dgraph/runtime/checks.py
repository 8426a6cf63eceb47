"""Checks of sessions and rules. Messages name the thing, the expected and the actual value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dgraph.errors import InputError, LoweringError, UnknownName
from dgraph.lowering.program import Program
from dgraph.ops.statistics import GIVEN
from dgraph.plans.block_cache import BLOCK_CACHES
from dgraph.plans.kv import KVPlan
from dgraph.plans.rows import RowPlan
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.scripted_policy import check_script
from dgraph.runtime.loop.step_inputs import STEP_INPUTS, declared
from dgraph.runtime.policies import Policy, check_needs, statistics_of, traits_of, widest_tail
from dgraph.runtime.sampling.adjustments import check_adjustments
from dgraph.runtime.sampling.sampler import Sampler
from dgraph.spec import ModelSpec, given_as


def check_session(
    spec: ModelSpec,
    programs: Mapping[str, Program],
    block_cache: str,
    select_noise: bool,
    plan: RowPlan | None,
    kv: KVPlan | None = None,
    recommit: bool = True,
) -> None:
    """Check that a model and its programs have what a `BlockSession` needs.

    Raises:
        InputError, UnknownName, LoweringError: they do not fit.
    """
    causal = spec.attention == "block_causal"
    if causal and plan is not None and not plan.fits_blocks:
        raise InputError(
            f"{spec.family}: {plan} says which rows of a bidirectional model are forwarded again; the keys of this "
            f"block-causal one are final once a block is committed. Leave the plan out, or say which steps of a block "
            f"are full, its first one among them: RowPlan(Block(), Counted(full_steps=..., every=...))."
        )
    hides = plan is not None and plan.region.hides
    if hides and kv is not None:
        raise InputError(
            f"{spec.family}: {plan} hides rows, so keys change their places in the cache, but {kv} finds the keys that "
            f"it keeps by their positions. Leave one of them out."
        )
    if causal and spec.logit_shift and not spec.next_token:
        raise InputError(
            f"{spec.family}: logit_shift={spec.logit_shift}, expected 0. A row of a block-causal model predicts the "
            f"token at its own position. The exception is a model whose forward of a finished block predicts the next "
            f"token (next_token=True)."
        )
    adds = plan is not None and plan.added is not None
    spec.check_keys(recommit, kv)
    if block_cache not in BLOCK_CACHES:
        raise UnknownName("block_cache", block_cache, BLOCK_CACHES)
    needed = (*(("prefill",) if causal else ()), *(("select",) if kv is not None else ()), "step")
    for name in needed:
        if name not in programs:
            raise InputError(
                f"{spec.family}: BlockSession needs {' and '.join(map(repr, needed))} of a model whose attention is "
                f"{spec.attention}; {name!r} is missing (got: {', '.join(sorted(programs)) or 'none'})."
            )
    if spec.noise == "uniform" and block_cache != "off":
        raise InputError(
            f"{spec.family}: no row of a canvas is decoded before all are, so block_cache={block_cache!r} has nothing "
            f"to keep; use block_cache='off'."
        )
    modes = spec.noise == "uniform"
    has = {"plan": not causal or plan is not None, "kv": kv is not None, "hides": hides, "adds": adds, "modes": modes}
    _check_inputs(programs, select_noise, frozenset(name for name in has if has[name]))


def _check_inputs(programs: Mapping[str, Program], select_noise: bool, has: frozenset[str]) -> None:
    """Check that the loop offers all inputs of the programs, or that they declare them as memory of their own.

    has: the subset of "plan", "kv", "hides" and "adds" (a plan that hides or adds rows) and "modes" that the session
    has; see `StepInput.needs`.

    Raises:
        InputError: noise without select_noise, or a program that knows nothing of the rows that a plan hides or adds.
        LoweringError: an input that is neither offered nor declared, or declared in another way than it is offered.
    """
    offered = {name: offer for name, offer in STEP_INPUTS.items() if not offer.needs or offer.needs in has}
    specs = declared({name: program.inputs for name, program in programs.items()})
    returned = frozenset().union(*(program.output_names for program in programs.values()))
    for name, program in programs.items():
        asked = program.inputs
        if "noise" in asked and not select_noise:
            raise InputError(
                f"program {name!r} reads the input 'noise' (random selection), but select_noise=False; leave it out."
            )
        if "hides" in has and "slots" not in asked:
            raise InputError(
                f"the row plan hides rows, but program {name!r} writes keys where their positions say, so that hidden "
                f"ones would be seen. Put the pass SlotKV after CacheKV."
            )
        if "adds" in has and "added" not in asked:
            raise InputError(
                f"the row plan adds rows, but program {name!r} would take them for rows of the sequence. Put the pass "
                f"AddRows after CacheKV."
            )
        packed = [] if "kv" in has else [spec.name for spec in asked.values() if spec.per == "packed"]
        own = {spec.name for spec in asked.values() if spec.carried or spec.in_place or spec.window} - {*packed}
        unknown = sorted(asked.keys() - offered.keys() - own)
        if unknown:
            raise LoweringError(
                f"program {name!r} reads inputs that the decode loop does not have: {', '.join(unknown)}. "
                f"It offers {', '.join(sorted(offered))}. A pass declares its own inputs as "
                f"caches or states (see dgraph.types.shapes.InputSpec)."
            )
    for name, spec in specs.items():
        if name in STEP_INPUTS and (spec.per, spec.dtype) != (STEP_INPUTS[name].per, STEP_INPUTS[name].dtype):
            raise LoweringError(
                f"the input {name!r} is declared as {spec.dtype} per {spec.per}; the decode loop offers it as "
                f"{STEP_INPUTS[name].dtype} per {STEP_INPUTS[name].per}. Declare it so, or give yours another name."
            )
        if name in STEP_INPUTS and spec.carried:
            raise LoweringError(
                f"the state {name!r} has the name of an input that the decode loop computes; rename it."
            )
        if spec.carried and name not in returned:
            raise LoweringError(
                f"the input {name!r} is a state that resets with a {spec.reset}, but no program returns it; give the "
                f"graph an output of that name."
            )


def check_keep_kv(plan: RowPlan | None, windows: Iterable[int]) -> None:
    """Refuse to return keys by position if some positions have none; windows: see `KVStore`."""
    if plan is not None and plan.region.hides:
        raise InputError(
            f"keep_kv returns keys by position, but {plan} hides rows, whose keys do not exist; leave it out."
        )
    if behind := ", ".join(map(str, sorted(windows))):
        raise InputError(
            f"keep_kv returns keys by position, but layers with a window of {behind} positions "
            f"let those behind it go; leave it out, or build the recipe with rings=False."
        )


def check_plan(policy: Policy, plan: RowPlan | None) -> None:
    """Refuse a policy that decides by predictions if the plan must know the commits of a step before its forward."""
    if plan is not None and plan.region.foresees and not traits_of(policy).foresees:
        raise InputError(
            f"{plan} forwards the rows that a step decodes from, so what it commits must be known before its forward, "
            f"which {policy!r} does not say. Use policy='dkv_greedy' with its steps per block (random remasking in an "
            f"order drawn once per block), policy='sequential', or another recipe.",
            field="policy",
        )


def check_constraint(spec: ModelSpec, policy: Policy) -> None:
    """Check that a model and a rule can keep to a constraint.

    Raises:
        InputError: a model without stop tokens, or a rule that changes or moves what is committed.
    """
    if not spec.eos_ids:
        raise InputError(
            f"a constraint needs a token that ends a response, and {spec.family} has none; give {given_as('eos_ids')}.",
            field="constraint",
        )
    traits = traits_of(policy)
    changes = [name for name in UNGUIDED if getattr(traits, name)]
    if changes:
        raise InputError(
            f"{type(policy).__name__} {UNGUIDED[changes[0]]}, so a constraint cannot be kept under it; choose a rule "
            f"that only commits masks, such as threshold=0.9.",
            field="policy",
        )


UNGUIDED = {
    "edits": "replaces committed tokens",
    "remasks": "takes committed tokens back",
    "moves": "moves committed tokens",
    "extends": "makes the response longer",
    "inserts": "puts masks between committed tokens",
    "renoises": "draws a whole canvas anew in each step",
    "autoregressive": "commits what causal rows predict without a choice",
    "drafts": "verifies drafts of several tokens",
}
"""Traits of rules that no constraint goes with, and what a rule with one does."""


def check_rule(policy: Policy, sampler: Sampler, step: Program, block_cache: str, plan: RowPlan | None = None) -> None:
    """Check that the step program and the plan have what a policy and a sampler need, before anything runs.

    Raises:
        InputError: they have not.
    """
    check_plan(policy, plan)
    outputs = step.output_names
    logits = "logits" in outputs
    if sampler.needs_logits and not logits:
        raise InputError(
            f"{sampler} needs whole logits, but the step program keeps none (it ends in dgraph::lm_head); give the "
            f"session a program 'logits', or leave these settings at their defaults.",
            field=next((name for name in ("top_p", "top_k") if getattr(sampler, name) != getattr(Sampler, name)), None),
        )
    if sampler.cfg_scale > 0 and "kept" in outputs:
        raise InputError(
            f"cfg_scale={sampler.cfg_scale} compares logits with and without the prompt row by row, but this recipe "
            f"evicts rows, in the two not the same; use a recipe that evicts none, or leave cfg_scale at 0."
        )
    statistics = {s.name for s in GIVEN if logits or s.name in outputs}
    if logits or "measured" in outputs:
        statistics |= {s.name for s in statistics_of(policy)}
    adds = {"added"} if plan is not None and plan.added is not None else set()
    given = {"noise", "order", "forwards", "editable", "passes", "room", "tail"} | adds | statistics
    check_needs(policy, given)
    if (size := getattr(policy, "sub_block", None)) is not None:
        others = {f"block_cache={block_cache!r}": block_cache != "off", "evicts rows": "kept" in outputs}
        if found := [what for what, there in {**others, f"has {plan}": plan is not None}.items() if there]:
            raise InputError(
                f"{type(policy).__name__} forwards sub-blocks of {size} positions over keys that a step of the whole "
                f"block has cached. Steps of this recipe forward other rows ({', '.join(found)}). "
                f"Use 'dense' with block_cache='off', or leave out cached=True.",
                field="policy",
            )
    if widest_tail(policy) and "kept" in outputs:
        raise InputError(
            f"{type(policy).__name__} reads predictions for the end of a response, but this recipe evicts rows, by how "
            f"the candidates of the block attend; use a recipe that evicts none.",
            field="policy",
        )
    if not traits_of(policy).edits:
        return
    if block_cache != "off":
        raise InputError(
            f"{type(policy).__name__} replaces decoded tokens, but block_cache={block_cache!r} does not recompute "
            f"their keys; use block_cache='off'.",
            field="policy",
        )
    if "kept" in outputs:
        raise InputError(
            f"{type(policy).__name__} replaces decoded tokens, but this recipe evicts rows by how candidates attend; "
            f"use a recipe that evicts none.",
            field="policy",
        )


def check_modes(spec: ModelSpec, policy: Policy, sampler: Sampler) -> None:
    """Refuse a policy that does not fit the modes of a model.

    An autoregressive policy takes a model that encodes causal rows. A policy that caches keys within a block takes a
    model that predicts the next token where it encodes the block. A model without a mask token takes a policy that
    renoises, and such a policy takes no other model and no temperature above 0.

    Raises:
        InputError: they do not fit.
    """
    if traits_of(policy).renoises != (spec.noise == "uniform"):
        has = "random tokens where nothing is decoded" if spec.noise == "uniform" else "a mask token"
        other = "policy='renoise'" if spec.noise == "uniform" else "a threshold"
        raise InputError(
            f"{type(policy).__name__} does not decode {spec.family}, which has {has} (noise={spec.noise!r}); use "
            f"{other}.",
            field="policy",
        )
    if traits_of(policy).renoises and sampler.temperature > 0:
        raise InputError(
            f"temperature={sampler.temperature}: {type(policy).__name__} draws at temperatures of its own; set its "
            f"t_min and t_max.",
            field="temperature",
        )
    traits, tail = traits_of(policy), widest_tail(policy)
    if (traits.inserts or tail) and spec.attention != "bidirectional":
        does = "inserts masks" if traits.inserts else "reads predictions for the end of a response"
        raise InputError(
            f"{type(policy).__name__} {does}, which takes a bidirectional model; the rows of {spec.family} do not see "
            f"what comes after their block. Use LLaDA or Dream, or a rule without that.",
            field="policy",
        )
    if traits.extends and spec.noise == "uniform":
        raise InputError(
            f"{type(policy).__name__} extends responses, but {spec.family} draws canvases of one length; set "
            f"max_new_tokens.",
            field="policy",
        )
    if traits_of(policy).autoregressive and spec.encoding != "causal":
        raise InputError(
            f"{type(policy).__name__} commits what causal rows predict, but {spec.family} encodes whole blocks "
            f"(encoding={spec.encoding!r}); use it with a model of encoding='causal', such as nemotron, or decode by "
            f"a threshold.",
            field="policy",
        )
    if getattr(policy, "sub_block", None) is not None and not spec.next_token:
        raise InputError(
            f"{type(policy).__name__} forwards sub-blocks over cached keys of their block (cached=True). That needs a "
            f"model that predicts the next token where it encodes a block, such as fast_dllm_v2; {spec.family} does "
            f"not. Leave cached=True out.",
            field="policy",
        )


def check_open_blocks(
    spec: ModelSpec, chosen: Decoding, step: Program, block_cache: str, plan: RowPlan | None, packed: bool
) -> None:
    """Refuse several open blocks where the model, the rule or the step program takes one.

    packed: the session keeps packed keys.

    Raises:
        InputError: they do not go together.
    """
    rule, asked = chosen.rule, f"open_blocks={chosen.open_blocks}"
    if chosen.open_blocks == 1:
        return
    if spec.attention != "block_causal" or spec.two_modes:
        why = (
            "rows see the whole canvas, so that each block has all keys from the start"
            if spec.attention == "bidirectional"
            else "a finished block is encoded in a forward of its own, which the next block begins with"
        )
        raise InputError(
            f"{asked}: several blocks of {spec.family} cannot be open, since {why}. Use a block-causal model that "
            f"encodes and denoises in one forward, such as SDAR or LLaDA2, or open_blocks=1.",
            field="open_blocks",
        )
    if not traits_of(rule).holds_back:
        raise InputError(
            f"{asked}: {type(rule).__name__} commits something in every block, also ahead of one that is far from "
            f"done. Use a threshold, or a rule with the trait holds_back.",
            field="open_blocks",
        )
    if reads := [name for name in ("processors", "credit") if getattr(chosen.sampling, name)]:
        raise InputError(
            f"{asked}: {reads[0]} of the sampler reads the columns and the steps of one block; leave it out, or "
            f"open_blocks=1.",
            field="open_blocks",
        )
    others = {
        "evicts rows by the statistics of one block": "kept" in step.output_names,
        f"leaves rows out (block_cache={block_cache!r})": block_cache != "off",
        f"counts the steps of one block ({plan})": plan is not None,
        "packs the keys around one block": packed,
        "carries states from step to step": any(one.carried for one in step.inputs.values()),
    }
    if found := [what for what, there in others.items() if there]:
        raise InputError(
            f"{asked}: this recipe {' and '.join(found)}; use 'dense', or open_blocks=1.", field="open_blocks"
        )


def check_decoding(
    spec: ModelSpec, chosen: Decoding, step: Program, block: int, block_cache: str, plan: RowPlan | None, packed: bool
) -> None:
    """Check that a program can serve a decoding.

    Args:
        spec: facts of the model.
        chosen: the decoding.
        step: the program that serves it.
        block: rows of a block.
        block_cache: which rows of finished blocks are cached, see `BLOCK_CACHES`.
        plan: of rows that a recipe has, or None.
        packed: the recipe keeps packed keys.

    Raises:
        InputError: it cannot; the message names the setting.
    """
    policy, sampler = chosen.rule, chosen.sampling
    check_adjustments(spec, chosen, {*step.output_names, *step.inputs})
    check_rule(policy, sampler, step, block_cache, plan)
    check_modes(spec, policy, sampler)
    check_open_blocks(spec, chosen, step, block_cache, plan, packed)
    if chosen.constraint is not None:
        check_constraint(spec, policy)
    check_script(policy, block, "script" in step.inputs)
    if sampler.cfg_scale > 0 and packed:
        raise InputError(
            f"cfg_scale={sampler.cfg_scale} runs every step once more without the prompt, for which this recipe "
            f"has no packed keys; use a recipe that keeps all keys, or leave cfg_scale at 0."
        )
