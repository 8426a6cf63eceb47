"""Tokens and their confidences from logits of rows, for programs that leave their logits to the runtime.

`Sampler` holds the settings; `Sampler.begin` gives the `LogitsDecoder` of one generation. Its chain, in this order:
guidance, penalty, the request's adjustments, the caller's processors, suppressed ids, credit, temperature, min-p,
top-p, top-k, draw.

Tokens are drawn as `ops.lm_head` draws them: argmax(z / T + G), G standard Gumbel noise that is a hash of (seed of the
row, vocabulary id). LLaDA's argmax(exp(z) / (-log u)^T), with u uniform, is the same in law.
The logarithm of its score is z - T log(-log u) = T (z / T + G). So a draw depends on seed, prompt, position and step
alone (see `runtime.seeds`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.ops.lm_head.lm_head import RowDecisions, decode_logits
from dgraph.ops.lm_head.lm_head_adjusted import cut_below
from dgraph.ops.registry import numeric

CONFIDENCES = ("sampled", "logits")
SETTINGS = ("temperature", "top_p", "top_k", "min_p")
"""Settings of a sampler that callers also give by themselves."""


@dataclass(frozen=True)
class RowContext:
    """Positions and state of R rows of logits. No row twice, no padding.

    Attributes:
        sequence: i64[R], index in the batch, 0 <= sequence < b.
        position: i64[R], position in the sequence.
        column: i64[R], column of those of the open blocks.
        masked: bool[R], not decoded yet.
        forwards: i64[R], steps that the row's block has had before.
        seed: i64[R], see `runtime.seeds.row_seeds`.
        tokens: i64[b, T], prompts and decoded tokens, mask tokens elsewhere.
        block: columns of the open blocks, of which there is one but for `Decoding.open_blocks`.
        temperature: f32[R], in place of the sampler's.
        unconditional: [R, V], logits of the same rows without the prompt, for guidance.
        adjust: what the request asks of its logits, given those [R, V] of all rows; see `adjustments`.
    """

    sequence: Tensor
    position: Tensor
    column: Tensor
    masked: Tensor
    forwards: Tensor
    seed: Tensor
    tokens: Tensor
    block: int
    temperature: Tensor | None = None
    unconditional: Tensor | None = None
    adjust: Callable[[Tensor], Tensor] | None = None


Processor = Callable[[Tensor, RowContext], Tensor]
"""fp32 logits [R, V] and their context -> logits [R, V]."""


@dataclass(frozen=True)
class Credit:
    """dInfer's credit: logits that lead step after step gain on the others, while their row is masked.

    Each block has a matrix C f32[B, V], 0 at first. A step computes C *= beta (from the block's second step on);
    C[row, top1] += p_top1 ** gamma on masked rows; z' = z + alpha * log(1 + C). It takes b * B * V * 4 bytes.
    """

    beta: float = 0.8
    gamma: float = 0.2
    alpha: float = 0.7

    def __post_init__(self) -> None:
        _check("Credit", "beta", self.beta, 0, 1, "a decay in [0, 1]")
        _check("Credit", "gamma", self.gamma, 0, _FINITE, "a finite exponent, at least 0")
        _check("Credit", "alpha", self.alpha, 0, _FINITE, "a finite weight, at least 0")


class CreditState:
    """The matrices of one generation; a sequence's is cleared in the first step of a block."""

    def __init__(self, credit: Credit):
        self.credit = credit
        self.amount: Tensor | None = None

    def __call__(self, logits: Tensor, context: RowContext) -> Tensor:
        """Take one step of the rows' sequences; other sequences keep theirs."""
        credit, row = self.credit, (context.sequence, context.column)
        shape = (len(context.tokens), context.block, logits.shape[1])
        if self.amount is None or self.amount.shape != shape or self.amount.device != logits.device:
            self.amount = logits.new_zeros(shape)
        fade = logits.new_ones(shape[0])
        fade[context.sequence] = torch.where(context.forwards > 0, credit.beta, 0.0).to(fade.dtype)
        self.amount *= fade[:, None, None]
        p, top = logits.softmax(-1).max(-1)
        self.amount[(*row, top)] += p**credit.gamma * context.masked
        return logits + credit.alpha * self.amount[row].log1p()


@dataclass(frozen=True)
class Sampler:
    """Settings by which tokens are taken from logits. The defaults do the same as dgraph::lm_head.

    Attributes:
        temperature: 0 takes the largest logit.
        top_p: keep the most probable ids up to the one that brings their sum above it; 1: all.
        top_k: then keep the k largest (and ties with the k-th); 0: all. top_p and top_k are at the temperature (1 for
            temperature 0), and also change the confidence of greedy tokens (Dream).
        min_p: before that, leave out ids that are less likely than this share of the likeliest (2407.01082); 0: none.
        suppress: ids that are never produced (LLaDA logits_eos_inf: end of sequence), besides the mask token.
        distrust: ids without a share in any confidence. A row whose token is one of them comes last, with confidence 0,
            but can still be committed (LLaDA confidence_eos_eot_inf; there only one of two ids is affected at T > 0,
            here all are).
        confidence_of: "sampled": of the distribution that was drawn from (SDAR, Dream); "logits": of softmax(z),
            whatever temperature, top_p and top_k are (LLaDA, Fast-dLLM). Margin and entropy are of the former.
        penalty_lambda: subtracted from the logit of the token before the row (LLaDA2.1 in SGLang).
        cfg_scale: classifier-free guidance s, z = u + (s + 1)(z - u) with u from `without_prompt` (LLaDA).
        credit: see `Credit`.
        processors: called in order, each with the result of the one before it.

    Raises:
        InputError: a value out of range or of a wrong type.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = field(default=0.0, kw_only=True)
    suppress: tuple[int, ...] = ()
    distrust: tuple[int, ...] = ()
    confidence_of: str = "sampled"
    penalty_lambda: float = 0.0
    cfg_scale: float = 0.0
    credit: Credit | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        _check("Sampler", "temperature", self.temperature, 0, _FINITE, "a finite number, at least 0")
        _check("Sampler", "top_p", self.top_p, math.ulp(0.0), 1, "a probability in (0, 1]")
        _check("Sampler", "min_p", self.min_p, 0, 1, "a share in [0, 1]")
        _check("Sampler", "penalty_lambda", self.penalty_lambda, 0, _FINITE, "a finite number, at least 0")
        _check("Sampler", "cfg_scale", self.cfg_scale, 0, _FINITE, "a finite number, at least 0")
        if type(self.top_k) is not int or self.top_k < 0:
            raise InputError(f"Sampler: top_k is a number of ids, 0 for all, got {self.top_k!r}.", field="top_k")
        if self.confidence_of not in CONFIDENCES:
            raise InputError(f"Sampler: confidence_of is one of {', '.join(CONFIDENCES)}, got {self.confidence_of!r}.")
        for name in ("suppress", "distrust"):
            ids = getattr(self, name)
            if not isinstance(ids, tuple) or not all(type(i) is int and i >= 0 for i in ids):
                raise InputError(f"Sampler: {name} is a tuple of token ids, got {ids!r}.")
        if self.credit is not None and not isinstance(self.credit, Credit):
            raise InputError(f"Sampler: credit is a Credit or None, got {self.credit!r}.")
        if not isinstance(self.processors, tuple) or not all(map(callable, self.processors)):
            raise InputError(f"Sampler: processors is a tuple of callables, got {self.processors!r}.")

    @property
    def needs_logits(self) -> bool:
        """True if a program that ends in dgraph::lm_head cannot apply these settings, because it keeps no logits."""
        return self != Sampler(temperature=self.temperature, min_p=self.min_p)

    def to_json(self) -> dict[str, Any]:
        """Plain values of the fields that differ from their defaults.

        Raises:
            InputError: it has processors, which have no such form.
        """
        if self.processors:
            raise InputError(f"Sampler: processors have no form in JSON, got {self.processors!r}.")
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        return plain if self.credit is None else {**plain, "credit": asdict(self.credit)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Sampler:
        """The sampler that `to_json` described; equal to the one that wrote it.

        Raises:
            UnknownName, InputError: a setting that does not exist or is out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise UnknownName("setting of a sampler", name, known)
        found: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in value.items()}
        if isinstance(found.get("credit"), Mapping):
            found["credit"] = Credit(**found["credit"])
        return cls(**found)

    def begin(self, mask_id: int) -> LogitsDecoder:
        """The decoder of one generation; mask_id is never produced."""
        return LogitsDecoder(self, mask_id)


class LogitsDecoder:
    """The chain of one `Sampler` over one generation; holds the state of its credit."""

    def __init__(self, sampler: Sampler, mask_id: int):
        self.sampler, self.mask_id = sampler, mask_id
        self._credit = None if sampler.credit is None else CreditState(sampler.credit)

    def decode(self, logits: Tensor, context: RowContext) -> RowDecisions:
        """A token, its confidence, margin and entropy for each row of logits [R, V]. Reads values on the host.

        Raises:
            InputError: guidance without unconditional logits, an id outside the vocabulary, or a processor that returns
                another shape.
        """
        sampler = self.sampler
        logits = self._shaped(logits.to(numeric(logits.dtype)), context)
        heat = context.temperature
        if heat is None:
            heat = torch.full((len(logits),), sampler.temperature, dtype=torch.float32, device=logits.device)
        scale = torch.where(heat > 0, heat, 1.0)[:, None].to(logits.dtype)
        least = torch.full_like(heat, sampler.min_p)
        drawn = cut_below(logits, least, heat) if sampler.min_p > 0 else logits
        if sampler.top_p < 1 or 0 < sampler.top_k < logits.shape[1]:
            drawn = drawn.masked_fill(~kept_ids(drawn / scale, sampler.top_p, sampler.top_k), -math.inf)
        found = decode_logits(drawn, heat, context.seed, self.mask_id)
        if sampler.confidence_of == "sampled" and not sampler.distrust:
            return found
        judged = logits if sampler.confidence_of == "logits" else drawn / scale
        confidence = _without(judged, sampler.distrust).softmax(-1).gather(1, found.token[:, None]).squeeze(1)
        distrusted = torch.isin(found.token, torch.tensor(sampler.distrust, device=logits.device, dtype=torch.int64))
        return found._replace(confidence=torch.where(distrusted, 0.0, confidence))

    def _shaped(self, logits: Tensor, context: RowContext) -> Tensor:
        """Apply the part of the chain that comes before the temperature."""
        sampler, shape = self.sampler, logits.shape
        for name, ids in (("suppress", sampler.suppress), ("distrust", sampler.distrust)):
            if wrong := [i for i in ids if i >= shape[1]]:
                raise InputError(f"Sampler: {name} holds id {wrong[0]}, but the vocabulary has {shape[1]} ids.")
        if sampler.cfg_scale > 0:
            if context.unconditional is None:
                raise InputError(f"Sampler: cfg_scale {sampler.cfg_scale} needs logits without the prompt, got none.")
            logits = guided(logits, context.unconditional.to(logits.dtype), sampler.cfg_scale)
        if sampler.penalty_lambda > 0:
            before = context.tokens[context.sequence, (context.position - 1).clamp(min=0)]
            penalty = torch.where(context.position > 0, -sampler.penalty_lambda, 0.0).to(logits.dtype)
            logits = logits.scatter_add(1, before[:, None], penalty[:, None])
        if context.adjust is not None:
            logits = context.adjust(logits)
        for processor in sampler.processors:
            logits = processor(logits, context)
            if not isinstance(logits, Tensor) or logits.shape != shape:
                got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise InputError(f"Sampler: processor {processor!r} must return logits {list(shape)}, got {got}.")
        logits = _without(logits, (*sampler.suppress, *((self.mask_id,) if self.mask_id >= 0 else ())))
        return logits if self._credit is None else self._credit(logits, context)


def guided(logits: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance: u + (scale + 1)(z - u)."""
    return unconditional + (scale + 1) * (logits - unconditional)


def without_prompt(tokens: Tensor, prompt_end: Tensor, mask_id: int) -> Tensor:
    """tokens i64[b, T] with every sequence's prompt, [0, prompt_end), replaced by mask tokens."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(columns < prompt_end[:, None], mask_id, tokens)


def kept_ids(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """bool[R, V]: ids that are left by top-p and then top-k, as in Dream; ties at the border of top-p: lower id."""
    kept = torch.ones_like(logits, dtype=torch.bool)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        sums = ordered.softmax(-1).cumsum(-1)
        kept = torch.ones_like(kept).scatter(1, order[:, 1:], sums[:, :-1] <= top_p)
    if 0 < top_k < logits.shape[1]:
        left = logits.masked_fill(~kept, -math.inf)
        kept &= left >= left.topk(top_k).values[:, -1:]
    return kept


def _without(logits: Tensor, ids: tuple[int, ...]) -> Tensor:
    return logits.index_fill(1, torch.tensor(ids, device=logits.device, dtype=torch.int64), -math.inf)


_FINITE = math.nextafter(math.inf, 0)


def _check(owner: str, field: str, value: object, low: float, high: float, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{owner}: {field} is {expected}, got {value!r}.", field=field)
