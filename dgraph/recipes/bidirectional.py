"""Caches of bidirectional models: the rows that a step forwards, and how often it forwards all of them."""

from __future__ import annotations

from dgraph.errors import InputError, UnknownName
from dgraph.plans.regions import All, Block, Next, Suffix
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Counted
from dgraph.recipes.base import Cost, Recipe, caching, costing
from dgraph.recipes.dense import ENDING, ending, phases_of
from dgraph.spec import ModelSpec

CACHES: dict[str, type[Suffix] | type[Block]] = {"prefix": Suffix, "dual": Block}
"""Fast-dLLM's caches, and the region that a step forwards under each."""


DKV_VARIANTS = ("decode", "greedy")


@costing(
    Cost("tiny_llada", "hard tasks", 100, +1.0, (-3.0, 5.1), 1.02, "hard"),
    Cost("smol_llada", "GSM8K", 330, -0.3, (-2.8, 2.1), 1.02, "smol"),
)
@caching
def fast_dllm(
    spec: ModelSpec,
    cache: str = "dual",
    first: str = "published",
    every: int = 0,
    block_cache: str = "off",
    max_num_logits: int = 2048,
) -> Recipe:
    """Fast-dLLM: the whole canvas where a block starts, then the block alone (dual) or with all after it (prefix).

    Paper: *Fast-dLLM: Training-free Acceleration of Diffusion LLM by Enabling KV Cache and Parallel Decoding*, arXiv
    2505.22618. It is as published, for LLaDA and for Dream, with one difference that changes no token. A block that its
    first step completes takes no second one.

    Args:
        spec: the model; bidirectional.
        cache: "prefix" or "dual".
        first: tokens that a block's first step commits. "policy": the policy's choice, published for LLaDA. "position":
            the block's first position alone, whatever its confidence, published for Dream; later steps then leave out
            the row before the block. "published": "position" on a model with shifted logits, "policy" on others.
        every: interval of steps of a block at which the whole canvas is forwarded; 0 for its first step only.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        max_num_logits: rows whose logits exist at a time.
    """
    _bidirectional("fast_dllm", spec)
    if cache not in CACHES:
        raise UnknownName("cache of fast_dllm", cache, CACHES)
    first = published_first(spec) if first == "published" else first
    plan = RowPlan(CACHES[cache](lead=first != "position"), Counted(every=every), first)
    phases = phases_of(spec, *ending(spec, max_num_logits), optional=ENDING)
    return Recipe("fast_dllm", 2, phases, block_cache, plan=plan)


def published_first(spec: ModelSpec) -> str:
    """`RowPlan.first` of published block-wise code: on Dream a block's first step commits the first position."""
    return "position" if spec.logit_shift else "policy"


@costing(
    Cost("tiny_llada", "its tasks", 200, 0.0, None, 1, "rules"),
    Cost("smol_llada", "GSM8K", 330, +0.6, (-1.9, 3.2), 1.01, "smol"),
)
@caching
def dkv_cache(
    spec: ModelSpec,
    variant: str = "decode",
    every: int | None = None,
    around: int | None = None,
    max_num_logits: int = 2048,
) -> Recipe:
    """dKV-Cache: rows not yet decoded and rows decoded in the step before, or few more rows than are decoded next.

    Paper: *dKV-Cache: The Cache for Diffusion Language Models*, arXiv 2505.15781.

    Variant "decode": a token's keys are cached one step after it was decoded; all rows that are not decoded are
    forwarded in every step. The first two steps of a block, and every `every`-th, forward the whole canvas.

    Variant "greedy": a step forwards the rows that it decodes from, with `around` masked rows around each (see `Next`).
    It also forwards the rows that were decoded in the step before. A block's first step, and every `every`-th, forward
    the whole canvas. It takes a policy that knows the step's commits before the step. Such policies are "dkv_greedy"
    (LLaDA's random remasking in an order drawn once per block, as published) and "sequential". Nothing is published for
    a model with shifted logits (Dream). There a token is decoded from the row before it, and its own row is the one
    that was decoded.

    Args:
        spec: the model; bidirectional.
        variant: "decode" or "greedy".
        every: steps between full ones, 0 for none but a block's first; default 8, for "greedy" 2, both as in the
            published examples.
        around: masked rows around each row that "greedy" decodes from; default 4, as there.
        max_num_logits: rows whose logits exist at a time.
    """
    _bidirectional("dkv_cache", spec)
    if variant not in DKV_VARIANTS:
        raise UnknownName("variant of dkv_cache", variant, DKV_VARIANTS)
    if variant == "decode":
        if around is not None:
            raise InputError(f"around={around} belongs to the variant 'greedy' of dkv_cache; leave it out.")
        plan, cache = RowPlan(All(), Counted(2, 8 if every is None else every)), "dc"
    else:
        plan = RowPlan(Next(4 if around is None else around), Counted(every=2 if every is None else every))
        cache = "off"
    phases = phases_of(spec, *ending(spec, max_num_logits), optional=ENDING)
    return Recipe("dkv_cache", 2, phases, cache, plan=plan)


@costing(
    Cost("tiny_llada", "its tasks", 200, -0.5, None, 1, "rules"),
    Cost("smol_llada", "GSM8K", 330, -0.3, (-2.5, 1.8), 1.02, "smol"),
)
@caching
def vicinity(
    spec: ModelSpec,
    before: int = 16,
    after: int = 16,
    warm_up: int = 4,
    every: int = 0,
    max_num_logits: int = 2048,
) -> Recipe:
    """dInfer's vicinity cache: the block and rows around it; the whole canvas where a block starts.

    Args:
        spec: the model; bidirectional.
        before: rows before the block that go with it.
        after: rows after it that do.
        warm_up: full steps at the beginning of a response.
        every: interval of steps of a block at which the whole canvas is forwarded; 0 for its first step only.
        max_num_logits: rows whose logits exist at a time.
    """
    _bidirectional("vicinity", spec)
    plan = RowPlan(Block(before, after), Counted(every=every, warm_up=warm_up))
    phases = phases_of(spec, *ending(spec, max_num_logits), optional=ENDING)
    return Recipe("vicinity", 2, phases, plan=plan)


def _bidirectional(recipe: str, spec: ModelSpec) -> None:
    if spec.attention != "bidirectional":
        raise InputError(
            f"recipe {recipe!r} approximates the keys of a bidirectional model; those of {spec.family} are exact once "
            f"a block is committed (its attention is {spec.attention}). Use 'dense' or 'focus'."
        )
