"""Settings of decoding as one value: `Decoding`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from dgraph.errors import InputError
from dgraph.runtime.constraints.constraint import Constraint
from dgraph.runtime.policies import DecodeRule, Policy, bound, chosen_policy, policy_of, policy_sampler
from dgraph.runtime.sampling.adjustments import ADJUSTMENTS, NEUTRAL, PENALTIES
from dgraph.runtime.sampling.sampler import SETTINGS, Sampler
from dgraph.runtime.sampling.stops import check_stops
from dgraph.settings import settings_of
from dgraph.spec import ModelSpec

RULE = ("threshold", "steps", "policy")
"""Fields that choose the rule by which a step commits tokens."""


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """All settings by which a caller says how a prompt is continued.

    A setting is the caller's, else that of the policy or preset that was chosen, else the default here. A checkpoint's
    generation_config.json gives ids only (ends of a turn, padding, mask), as in official code. The scripts of SDAR and
    the functions of LLaDA and LLaDA2 have defaults of their own. Dream's `diffusion_generate` begins with the defaults
    of its config's class, which the presets "dream_*" have.

    Attributes:
        max_new_tokens: length limit of a response, at least 1.
        threshold: commit tokens whose confidence is above it, in (0, 1]; the default is 0.9, or the rule
            "diffusion_gemma" for a model without a mask token.
        steps: instead of a threshold, the number of steps per block.
        policy: a decoding rule by name ("dream_entropy", "llada2.0"; `dgraph policies` lists them), which threshold and
            steps then set options of, or one that you made. It may bring a sampler along: those of Dream do (top_k 50).
        block_length: rows denoised together; None for the model's, the value that it was trained with.
        open_blocks: blocks of a response that are decoded together, at most (MultiBD, arXiv 2606.29215; D2F, arXiv
            2508.09192), by a block-causal model. 1: each block begins when the one before it is done. See open_at.
        open_at: share of a block's positions, in [0, 1], that are decided when the next block opens.
        sure_at: share of a block's positions, in [0, 1], that are decided when the next block must commit a token in
            each step. Before that it commits only tokens of which the rule is sure.
        temperature: 0 takes the most likely token; above, tokens are drawn. None for the policy's, or 0.
        top_p, top_k: draw from the most likely tokens only (1 and 0: from all). None for the policy's, or all.
        sampler: instead of the three above and of the policy's, everything about how tokens are taken from logits:
            suppressed ids, penalties, your own logits processors.
        min_p: leave out ids that are less likely than this share of the likeliest, at the temperature; 0 for none.
        logit_bias: by id, what is added to its logit in every row. A mapping, or pairs.
        allowed_token_ids: the only ids that are produced; None for all. Without a stop token among them, a response
            ends by its length.
        bad_words: texts of one token each, or ids, that are never produced; a text counts with a space before it, too.
        repetition_penalty: above 1, makes tokens of the prompt and of the response less likely; above 0.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens that stand in the response, once, and
            for each time that they do. Tokens count that stand when a step begins, before a position and after it
            (`dgraph.runtime.sampling.adjustments`).
        stop_token_ids: further ids that end a response, also under `ignore_eos`.
        include_stop_str_in_output: True to keep the text of `stop`, or the token of `stop_token_ids`, that ended a
            response.
        ignore_eos: go on after a stop token, up to max_new_tokens.
        min_tokens: no stop token and no text of stop ends a response that has fewer tokens before it. A stop token that
            comes earlier is one of the response's tokens; it has no text, like other special tokens.
        stop: texts that end a response where they first occur; they are left out.
        seed: of the draws.
        constraint: the texts that a response may be, see `Constraint`. Not with ignore_eos,
            min_tokens or stop, which end a response elsewhere.

    Raises:
        UnknownName: an unknown policy, or an option that the policy does not have.
        InputError: a value out of range, or two that exclude each other.
    """

    max_new_tokens: int = 128
    threshold: float | None = None
    steps: int | None = None
    policy: str | Policy | None = None
    block_length: int | None = None
    open_blocks: int = 1
    open_at: float = 0.1
    sure_at: float = 0.9
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    sampler: Sampler | None = None
    min_p: float | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | int] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    stop: Sequence[str] = ()
    seed: int = 0
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        check_stops(self.stop)
        object.__setattr__(self, "stop", tuple(self.stop))
        for name in ("max_new_tokens", "block_length", "open_blocks"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and value >= 1):
                raise InputError(f"{name} must be at least 1, got {value!r}.", field=name)
        for name in ("open_at", "sure_at"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1:
                raise InputError(f"{name} is a share of a block's positions in [0, 1], got {value!r}.", field=name)
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_new_tokens):
            raise InputError(
                f"min_tokens must be from 0 to max_new_tokens ({self.max_new_tokens}), got {self.min_tokens!r}; lower "
                f"it, or ask for more tokens.",
                field="min_tokens",
            )
        if not _is_int(self.seed):
            raise InputError(f"seed must be a whole number, got {self.seed!r}.", field="seed")
        self._check_adjustments()
        self._check_constraint()
        _ = self.rule, self.sampling  # so that wrong values are refused here

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            raise InputError(
                f"constraint must be a dgraph.Constraint, got {self.constraint!r:.80}; make one with "
                f"Constraint.json_schema(...), .regex, .choice or .lark.",
                field="constraint",
            )
        for name in ("ignore_eos", "min_tokens", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise InputError(
                    f"{name}={getattr(self, name)!r} cannot be used with a constraint, which says which tokens "
                    f"a response has and where it ends; leave one of them out.",
                    field=name,
                )

    @cached_property
    def rule(self) -> Policy:
        """The policy as an object."""
        return chosen_policy(self.policy, self.threshold, self.steps)

    @cached_property
    def sampling(self) -> Sampler:
        """Sampler of the caller, else of the policy, else the one that takes the most likely token."""
        said = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        if self.sampler is None:
            return replace(policy_sampler(self.rule), **said)
        if said:
            raise InputError(
                "give either a sampler or temperature, top_p and top_k, not both; set them in the sampler.",
                field=next(iter(said)),
            )
        if not isinstance(self.sampler, Sampler):
            raise InputError(f"sampler must be a dgraph.Sampler, got {self.sampler!r}.", field="sampler")
        return self.sampler

    def _check_adjustments(self) -> None:
        """Check how logits are adjusted, and make hashable values of it."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                kind = "the string " if isinstance(value, str) else ""
                raise InputError(f"{name} is a list, got {kind}{value!r}; wrap it.", field=name)
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        try:
            pairs = tuple((_id_of(token, "logit_bias"), number) for token, number in bias)
        except TypeError:
            said = f"logit_bias has a number for each id, as a mapping or in pairs, got {self.logit_bias!r}."
            raise InputError(said, field="logit_bias") from None
        for token, value in pairs:
            if not _is_number(value) or not math.isfinite(value):
                raise InputError(f"logit_bias: id {token} has {value!r}, expected a finite number.", field="logit_bias")
        if len({token for token, _ in pairs}) < len(pairs):
            raise InputError("logit_bias has an id twice; give one number for each.", field="logit_bias")
        object.__setattr__(self, "logit_bias", tuple((token, float(value)) for token, value in pairs))
        for name in ("allowed_token_ids", "stop_token_ids"):
            if (ids := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(_id_of(token, name) for token in ids))
        if self.allowed_token_ids == ():
            raise InputError(
                "allowed_token_ids allows no id; name one, or give None for all.", field="allowed_token_ids"
            )
        words = tuple(word if isinstance(word, str) and word else _id_of(word, "bad_words") for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        for name in PENALTIES:
            low = math.ulp(0.0) if name == "repetition_penalty" else -100
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= 100:
                bounds = "above 0, at most 100" if low > 0 else "from -100 to 100"
                raise InputError(f"{name} must be a number {bounds}, got {value!r}.", field=name)

    @property
    def biases(self) -> Mapping[int, float]:
        """`logit_bias` as a mapping."""
        return dict(self.logit_bias)

    def asks(self, name: str) -> bool:
        """True if an adjustment of logits, given by its field's name, asks for something."""
        if name == "min_p":
            return self.sampling.min_p > 0
        value = getattr(self, name)
        return value != NEUTRAL[name] if name in NEUTRAL else value not in (None, ())

    @property
    def adjusts(self) -> bool:
        """True if logits are adjusted before they decide (`dgraph.runtime.sampling.adjustments`)."""
        return any(map(self.asks, ADJUSTMENTS))

    @property
    def penalises(self) -> bool:
        """True if that depends on the tokens that are committed."""
        return any(map(self.asks, PENALTIES))

    @classmethod
    def of(cls, given: Decoding | None, keywords: Mapping[str, Any]) -> Decoding:
        """The `Decoding` that a function was given, or one made from its keywords; see `settings_of`."""
        return settings_of(cls, given, keywords)

    @property
    def needs_logits(self) -> bool:
        """True if the runtime must take tokens from logits, since a program that decides by itself cannot."""
        return self.sampling.needs_logits or self.constraint is not None

    @property
    def says_rule(self) -> bool:
        """True if one of `RULE` is set."""
        return any(getattr(self, name) is not None for name in RULE)

    def for_model(self, spec: ModelSpec, block_length: int | None = None) -> Decoding:
        """The settings as a decode of a model starts with them: its rule, bound to the model (`DecodeRule.bind`).

        Unless a rule was chosen, the one that came with the checkpoint holds (`spec.rule`); else canvases of random
        tokens (`spec.noise`) are decoded by `diffusion_gemma`.

        Args:
            spec: the model.
            block_length: of the decode; None for the setting, or that of the model.
        """
        chosen = self
        if not self.says_rule and (spec.rule or spec.noise == "uniform"):
            chosen = replace(self, policy=policy_of(**dict(spec.rule)) if spec.rule else "diffusion_gemma")
        block = block_length or self.block_length or spec.block_length
        rule = bound(chosen.rule, replace(spec, block_length=block))
        if rule is chosen.rule or rule == chosen.rule:
            return chosen
        return replace(chosen, policy=rule, threshold=None, steps=None)

    def changed(self, said: Mapping[str, Any]) -> Decoding:
        """Copy with other values, as `from_json` takes them. If one of `RULE` is given, the other two are reset.

        Raises:
            UnknownName, InputError: as `from_json`.
        """
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        if said.keys() & set(RULE):
            own |= dict.fromkeys(RULE)
        return Decoding.from_json({**own, **said}) if said else self

    def to_json(self) -> dict[str, Any]:
        """Plain values of the fields that differ from their defaults.

        Raises:
            InputError: a policy or a sampler that has no such form.
        """
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        if "policy" in found and not isinstance(self.policy, str):
            if not isinstance(self.policy, DecodeRule):
                raise InputError(f"{self.policy!r} has no form in JSON; give a rule by name.")
            found["policy"] = self.policy.to_json()
        if isinstance(self.sampler, Sampler):
            found["sampler"] = self.sampler.to_json()
        if self.constraint is not None:
            found["constraint"] = self.constraint.to_json()
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return {**plain, "logit_bias": self.biases} if self.logit_bias else plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Decoding:
        """The value that `to_json` described; equal to the one that wrote it.

        Raises:
            UnknownName, InputError: a setting that does not exist or is out of range.
        """
        found = dict(value)
        if isinstance(found.get("policy"), Mapping):
            found["policy"] = policy_of(**found["policy"])
        if isinstance(found.get("sampler"), Mapping):
            found["sampler"] = Sampler.from_json(found["sampler"])
        if isinstance(found.get("constraint"), Mapping):
            found["constraint"] = Constraint.from_json(found["constraint"])
        return cls.of(None, found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _id_of(value: object, field: str) -> int:
    """A token id, which is a text of digits as a key in JSON."""
    if isinstance(value, str) and field == "logit_bias" and value.isascii() and value.isdigit():
        return int(value)
    if not _is_int(value) or value < 0:  # type: ignore[operator]
        raise InputError(f"{field} has {value!r}, expected a token id, at least 0.", field=field)
    return value  # type: ignore[return-value]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
