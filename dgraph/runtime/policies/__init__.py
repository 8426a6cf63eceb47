"""Decoding rules: they choose which predicted tokens a step commits.

Rules are vectorised over sequences and run on the device without a host read.

A rule is a frozen dataclass in the file of its family. `POLICIES` finds it by name, `PRESETS` are settings that a
publication or a system uses, and `policy_of` makes either with other options. Another package adds a rule (a subclass
of `DecodeRule`) or settings of one (an object) through the entry-point group `dgraph.policies`, see `dgraph.plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any

from dgraph.errors import InputError, UnknownName
from dgraph.errors.former import former_names, tell_former
from dgraph.plugins import Table
from dgraph.runtime.policies.autoregressive import Autoregressive, SelfSpeculation
from dgraph.runtime.policies.base import (
    Candidates,
    Carried,
    DecodeRule,
    Policy,
    best,
    bound,
    carries_of,
    check_needs,
    leftmost,
    needs_of,
    policy_key,
    policy_sampler,
    rank,
    setting,
    statistics_of,
    steps_of,
)
from dgraph.runtime.policies.bounds import EntropyBounded, Factor
from dgraph.runtime.policies.candidates import Tail
from dgraph.runtime.policies.counts import FixedSteps, Sequential
from dgraph.runtime.policies.dream import Dream, DreamThreshold
from dgraph.runtime.policies.editing import JointThreshold
from dgraph.runtime.policies.indel import JointThresholdInDel
from dgraph.runtime.policies.kinds import kind_of, per_request, settings_of, with_settings
from dgraph.runtime.policies.mixture import (
    PolicyMix,
    per_sequence,
    row_of,
    settings_spec,
    sub_blocks,
    tails,
    widest_tail,
)
from dgraph.runtime.policies.renoise import Renoise
from dgraph.runtime.policies.segments import Hierarchical, HierarchicalRemask, SubBlocks
from dgraph.runtime.policies.thresholds import THRESHOLD, ConfidenceThreshold, DynamicThreshold, RelativeThreshold
from dgraph.runtime.policies.traits import TRAITS, Traits, traits_of
from dgraph.runtime.sampling.sampler import SETTINGS, Sampler

GROUP = "dgraph.policies"

RULES: tuple[type[DecodeRule], ...] = (
    ConfidenceThreshold,
    DynamicThreshold,
    RelativeThreshold,
    FixedSteps,
    Sequential,
    Factor,
    EntropyBounded,
    Hierarchical,
    HierarchicalRemask,
    SubBlocks,
    Dream,
    DreamThreshold,
    JointThreshold,
    JointThresholdInDel,
    Autoregressive,
    SelfSpeculation,
    Renoise,
)


def _is_rule(name: str, value: Any) -> bool:
    """True if an entry point is a rule, False if it is settings of one.

    Raises:
        ValueError: it is neither, or a rule whose name is not that of the entry point.
    """
    rule = value if isinstance(value, type) else type(value)
    if not issubclass(rule, DecodeRule) or not is_dataclass(rule):
        raise ValueError(f"is neither a subclass of DecodeRule nor an object of one, got {value!r}")
    if rule is value and rule.name != name:
        raise ValueError(f"is a rule whose name is {rule.name!r}; both names must be the same")
    return rule is value


POLICIES: Mapping[str, type[DecodeRule]] = Table({rule.name: rule for rule in RULES}, GROUP, _is_rule)
"""All rules by name."""

_DREAM = Sampler(top_k=50)
"""Sampler of Dream's own generation: top_k 50 by default, which it inherits from transformers' generation config.

At temperature 0 that changes no prediction, but the confidence, margin and entropy by which Dream's rules choose among
them.
"""

_PUBLISHED: dict[str, DecodeRule] = {
    "fast_dllm": ConfidenceThreshold(0.9, inclusive=True),
    "fast_dllm_factor": Factor(1.0),
    "fast_dllm_v2": SubBlocks(0.95, 8),
    "dkv_greedy": FixedSteps(32, schedule="masks", remasking="random_order"),
    "diffusion_gemma": Renoise(),
    "dinfer": RelativeThreshold(0.9),
    "dinfer_factor": Factor(1.0, variant="dinfer"),
    "hierarchical_fast_v2": Hierarchical(fast_v2=True),
    "llada": FixedSteps(32, schedule="masks"),
    "llada_random": FixedSteps(32, schedule="masks", remasking="random"),
    "llada2.0": DynamicThreshold(0.95),
    "llada2.1": JointThreshold(),
    "llada2.2": JointThresholdInDel(),
    "stable_diffcoder": ConfidenceThreshold(0.95, inclusive=True),
    "reasoner": DynamicThreshold(0.9),
    "sdar_static": FixedSteps(4),
    "sdar_dynamic": DynamicThreshold(0.85),
    "jetengine_dynamic": DynamicThreshold(0.9, fallback="leftmost"),
    "dream_origin": Dream(alg="origin", sampler=_DREAM),
    "dream_maskgit_plus": Dream(alg="maskgit_plus", sampler=_DREAM),
    "dream_topk_margin": Dream(alg="topk_margin", sampler=_DREAM),
    "dream_entropy": Dream(alg="entropy", sampler=_DREAM),
    "dream_readme": Dream(alg="entropy", sampler=replace(_DREAM, temperature=0.2, top_p=0.95)),
}
PRESETS: Mapping[str, DecodeRule] = Table(_PUBLISHED, GROUP, lambda name, value: not _is_rule(name, value))
"""Published settings, samplers included, by the name of their publication or system.

Steps are per block; give your own as an option.
"""


def policy_of(rule: str | float | None = None, steps: int | None = None, **options: Any) -> Policy:
    """Make a policy from a caller's settings.

    rule: the name of a rule or of a preset, and `options` (with steps among them) set its fields. Or the short form:
    a threshold, or else steps per block, or neither for a threshold of 0.9. Options may also be a sampler, or its
    temperature, top_p and top_k, which the rule then brings along.

    Raises:
        UnknownName: a name or option that does not exist.
        InputError: a value out of range, an option that is missing, or both of the short form.
    """
    if isinstance(rule, str):
        return _named(rule, options if steps is None else {"steps": steps, **options})
    for name in options:
        raise InputError(f"option {name!r} belongs to a named rule; give its name, one of {', '.join(POLICIES)}.")
    if rule is not None and steps is not None:
        raise InputError(f"give either threshold ({rule}) or steps ({steps}), not both.", field="threshold")
    if steps is not None:
        return FixedSteps(steps)
    return ConfidenceThreshold(THRESHOLD if rule is None else rule)


def chosen_policy(policy: str | Policy | None, threshold: float | None, steps: int | None) -> Policy:
    """Policy that a caller chose: by name or as an object, or by a threshold or steps alone.

    With a name, threshold and steps are options of that rule.

    Raises:
        UnknownName, InputError: as `policy_of`.
        InputError: options beside an object, or an object that is no policy.
    """
    if policy is None:
        return policy_of(threshold, steps)
    options: dict[str, Any] = {"threshold": threshold, "steps": steps}
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(policy, str):
        return policy_of(policy, **options)
    if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
        raise InputError(
            f"policy must be a name, or an object with choose(candidates) -> bool[b, B] (an object, not its class), "
            f"got {policy!r}; `dgraph policies` lists the names.",
            field="policy",
        )
    if options:
        message = f"{', '.join(options)} cannot be set beside a policy object; set it in {policy!r}."
        raise InputError(message, field=next(iter(options)))
    return policy


def _named(name: str, options: dict[str, Any]) -> DecodeRule:
    if name not in POLICIES and name not in PRESETS:
        raise UnknownName("decode policy", name, {*POLICIES, *PRESETS}, field="policy")
    preset = PRESETS.get(name)
    rule = preset if preset is not None else POLICIES[name]
    known = _settable(rule)
    for option in options:
        if option not in known and option not in SETTINGS and option != "sampler":
            raise UnknownName(f"option of decode policy {name!r}", option, [*known, *SETTINGS], field=option)
    sampler = options.pop("sampler", rule.sampler)
    if isinstance(sampler, Mapping):
        sampler = Sampler.from_json(sampler)
    said = {key: options.pop(key) for key in SETTINGS if key in options and key not in known}
    options["sampler"] = replace(sampler or Sampler(), **said) if said else sampler
    if preset is not None:
        return replace(preset, **options)
    for option, field in known.items():
        if field.default is MISSING and option not in options:
            raise InputError(f"{POLICIES[name].__name__}: {option} must be given, got none.", field=option)
    return POLICIES[name](**options)


def options_of(name: str) -> dict[str, Any]:
    """Options of a named rule or preset with their defaults; None stands for "must be given" too.

    Settings of its sampler are among them if they differ from the defaults.

    Raises:
        UnknownName: neither a rule nor a preset has the name.
    """
    if name in PRESETS:
        preset = PRESETS[name]
        return {key: getattr(preset, key) for key in _settable(preset)} | policy_sampler(preset).to_json()
    if name not in POLICIES:
        raise UnknownName("decode policy", name, {*POLICIES, *PRESETS})
    return {key: None if f.default is MISSING else f.default for key, f in _settable(POLICIES[name]).items()}


def _settable(rule: DecodeRule | type[DecodeRule]) -> dict[str, Field[Any]]:
    """Fields of a rule that options may set, by name, without its sampler."""
    return {f.name: f for f in fields(rule) if f.name != "sampler" and f.init}


_former = former_names(__name__, {"Mixture": "PolicyMix"})


def __getattr__(name: str) -> Any:
    """An object under its former name, or the function that told a trait before there was `traits_of`."""
    if name not in TRAITS:
        return _former(name)
    tell_former(f"{__name__}.{name}", f"traits_of(policy).{name}")
    return lambda policy: getattr(traits_of(policy), name)


__all__ = [
    "POLICIES",
    "PRESETS",
    "THRESHOLD",
    "Autoregressive",
    "Candidates",
    "Carried",
    "ConfidenceThreshold",
    "DecodeRule",
    "Dream",
    "DreamThreshold",
    "DynamicThreshold",
    "EntropyBounded",
    "Factor",
    "FixedSteps",
    "Hierarchical",
    "HierarchicalRemask",
    "JointThreshold",
    "JointThresholdInDel",
    "Policy",
    "PolicyMix",
    "RelativeThreshold",
    "Renoise",
    "SelfSpeculation",
    "Sequential",
    "SubBlocks",
    "Tail",
    "Traits",
    "best",
    "bound",
    "carries_of",
    "check_needs",
    "chosen_policy",
    "kind_of",
    "leftmost",
    "needs_of",
    "options_of",
    "per_request",
    "per_sequence",
    "policy_key",
    "policy_of",
    "policy_sampler",
    "rank",
    "row_of",
    "setting",
    "settings_of",
    "settings_spec",
    "statistics_of",
    "steps_of",
    "sub_blocks",
    "tails",
    "traits_of",
    "widest_tail",
    "with_settings",
]
