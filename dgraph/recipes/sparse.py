"""Recipes that keep few keys: MaskKV, dLLM-Serve's head-centric cache, Sparse-dLLM, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dgraph.errors import InputError, UnknownName
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.reuse_rows import ReuseRows
from dgraph.passes.sparse_kv import SparseKV
from dgraph.plans import budgets
from dgraph.plans.kv import KVPlan
from dgraph.plans.regions import Block, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.recipes.base import Cost, Recipe, caching, costing
from dgraph.recipes.bidirectional import published_first
from dgraph.recipes.dense import GATED, dense, phases_of
from dgraph.recipes.kept import Kept
from dgraph.spec import ModelSpec

DEFAULT_RATIO = 0.5
DEFAULT_PAIRS = 256


def kept_by_maskkv(
    spec: ModelSpec,
    pairs: int = DEFAULT_PAIRS,
    ratio: float = 0.0,
    selector: str = "mask_voting",
    layers: str = "importance",
    heads: str = "",
    head_floor: float = 0.1,
    layer_floor: float = 0.4,
    boundary: int = 1,
) -> Kept:
    """Keys of the prompt that MaskKV, or an autoregressive method, keeps; see `maskkv`."""
    if selector not in METHODS:
        raise UnknownName("selector of maskkv", selector, METHODS)
    if layers not in LAYERS:
        raise UnknownName("layers of maskkv", layers, LAYERS)
    if ratio and pairs != DEFAULT_PAIRS:
        raise InputError(f"give either pairs or ratio, got pairs={pairs} and ratio={ratio!r}.")
    if spec.attention == "block_causal" and selector != "mask_voting":
        raise InputError(
            f"selector {selector!r} ranks the prompt's keys by how its own rows attend to them. {spec.family} is "
            f"block_causal: its selecting step forwards no whole block of the prompt. Use 'mask_voting'."
        )
    method = METHODS[selector]
    if ratio and method.budget is not None:
        raise InputError(f"selector {selector!r} divides a number of pairs among layers; give pairs instead of ratio.")
    per_layer: tuple[int, ...] = ()
    if not ratio:
        per_layer = (pairs,)
        if method.budget is not None:
            per_layer = method.budget(spec, pairs)
        elif selector == "mask_voting" and layers == "importance" and spec.layer_importance:
            per_layer = budgets.maskkv(pairs, spec.layer_importance, boundary=boundary, beta=layer_floor)
    select = replace(method.select, ratio=ratio, pairs=per_layer)
    if heads:
        select = replace(select, heads=heads)
    if selector == "mask_voting":
        select = replace(select, floor=head_floor)
    return Kept(KVPlan("response", ratio=ratio, pairs=per_layer), select)


def kept_by_dllm_serve(
    spec: ModelSpec, ratio: float = DEFAULT_RATIO, pool: int = 3, delay: int = 1, every: int = 0, pairs: int = 0
) -> Kept:
    """Keys that dLLM-Serve keeps, for each head; see `dllm_serve`."""
    return _around_block("block", ratio, pool, delay, every, pairs)


def kept_by_sparse_dllm(
    spec: ModelSpec, ratio: float = DEFAULT_RATIO, pool: int = 3, delay: int = 1, every: int = 0, pairs: int = 0
) -> Kept:
    """Keys that Sparse-dLLM keeps, the same for all heads; see `sparse_dllm`."""
    return _around_block("shared", ratio, pool, delay, every, pairs)


def _around_block(selector: str, ratio: float, pool: int, delay: int, every: int, pairs: int) -> Kept:
    budget = (pairs,) if pairs else ()
    ratio = 0.0 if pairs and ratio == DEFAULT_RATIO else ratio
    plan = KVPlan("block", delay, every, ratio, budget)
    return Kept(plan, SparseKV(selector, ratio, budget, pool=pool))


@dataclass(frozen=True)
class _Method:
    """Method of MaskKV's tables: its choice of keys, and its division of pairs among layers, if not even."""

    select: SparseKV
    budget: Callable[[ModelSpec, int], tuple[int, ...]] | None = None


_SNAPKV = SparseKV("snapkv", pool=7, recent=32)


def _squeezed(spec: ModelSpec, pairs: int) -> tuple[int, ...]:
    if not spec.layer_importance:
        raise InputError(
            f"selector 'squeeze' groups layers by how much they change what they are given, which was not measured for "
            f"{spec.family}; run `dgraph calibrate` for the model, or use 'snapkv'."
        )
    return budgets.squeeze(pairs, [1 - s for s in spec.layer_importance])


def _pyramid(spec: ModelSpec, pairs: int) -> tuple[int, ...]:
    return budgets.pyramid(spec.layers, pairs)


METHODS: dict[str, _Method] = {
    "mask_voting": _Method(SparseKV("mask_voting", heads="mass", floor=0.1)),
    "snapkv": _Method(_SNAPKV),
    "pyramidkv": _Method(_SNAPKV, _pyramid),
    "squeeze": _Method(_SNAPKV, _squeezed),
    "adakv": _Method(replace(_SNAPKV, heads="adaptive", floor=0.2)),
    "h2o": _Method(SparseKV("h2o")),
}
"""Selectors of MaskKV's tables by name."""
LAYERS = ("importance", "uniform")


@costing(Cost("tiny_llada", "retrieval", 30, -3.3, None, None, "few_keys"))
@caching
def maskkv(
    spec: ModelSpec,
    pairs: int = DEFAULT_PAIRS,
    ratio: float = 0.0,
    selector: str = "mask_voting",
    layers: str = "importance",
    heads: str = "",
    head_floor: float = 0.1,
    layer_floor: float = 0.4,
    boundary: int = 1,
    prompt_interval: int = 50,
    response_interval: int = 5,
    rho: float = 0.25,
    max_num_logits: int = 2048,
) -> Recipe:
    """MaskKV: of the prompt's keys, those that the response's masks attend to; the rest is evicted.

    The first step of a response forwards everything. For each head it sums the attention that the prompt's positions
    get from the response's rows, and keeps the best positions. Steps that `prompt_interval` divides forward the prompt
    once more to give the kept positions new values. The response is updated as by dLLM-Cache: all of it every
    `response_interval` steps, else the share `rho` of its rows whose values have changed most. Nothing else of the
    prompt is stored, and only masked rows are projected on the vocabulary.

    Paper: *Mask Tokens as Prophet: Fine-Grained Cache Eviction for Efficient dLLM Inference*, arXiv 2510.09309,
    appendix A.2 and A.9.

    There are two differences. The first layer recomputes all forwarded rows in every step, as dLLM-Cache does. If
    logits are shifted (Dream), the prompt's last row belongs to the response.

    The keys of a block-causal model's prompt are final. They are prefilled, the response's first step chooses among the
    keys of whole blocks, and the pages of the others are given back. If a model encodes a denoised block and predicts
    the next token, the first step that denoises chooses, by the rows of its block. Forwards that encode before that
    step read every key. Later ones read the kept keys, as a commit does, and predict the next token from them.

    Args:
        spec: the model.
        pairs: prompt positions that a head keeps on average; at least the prompt's length keeps all.
        ratio: instead, the share of the prompt that it keeps.
        selector: "mask_voting", or an autoregressive method that MaskKV is compared with: "snapkv", "pyramidkv",
            "squeeze" (SqueezeAttention), "adakv" or "h2o"; these ask rows of the prompt, which only a bidirectional
            model's steps forward.
        layers: division of pairs among layers by "mask_voting": by their "importance" (if it was measured: see `dgraph
            calibrate`), or "uniform".
        heads: division of a layer's pairs among heads: "uniform", "mass" or "adaptive"; "": the method's own.
        head_floor: share of a layer's pairs that its heads get alike (mask_voting; alpha in the paper).
        layer_floor: share of the pairs that layers get alike (importance; beta in the paper).
        boundary: layers at either end that count as boundary layers (importance).
        prompt_interval, response_interval, rho: see `dllm_cache`; 50, 5 and 0.25 are the paper's.
        max_num_logits: rows whose logits exist at a time.
    """
    kept = kept_by_maskkv(spec, pairs, ratio, selector, layers, heads, head_floor, layer_floor, boundary)
    return kept.on(adaptive_rows(spec, prompt_interval, response_interval, rho, max_num_logits), "maskkv")


def adaptive_rows(
    spec: ModelSpec, prompt_interval: int, response_interval: int, rho: float, max_num_logits: int
) -> Recipe:
    """The rows of MaskKV's steps: those of dLLM-Cache, but a step for the prompt leaves the response alone."""
    given = {"prompt_interval": prompt_interval, "response_interval": response_interval}
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise InputError(f"{name} must be an integer of at least 1, got {value!r}.")
    if spec.attention == "block_causal":
        if (prompt_interval, response_interval, rho) != (50, 5, 0.25):
            raise InputError(
                f"prompt_interval, response_interval and rho say when a bidirectional model recomputes what has "
                f"changed; {spec.family} is block_causal: a step forwards a block, and all other keys are final. Leave "
                f"them out."
            )
        return dense(spec, max_num_logits=max_num_logits)
    plan = RowPlan(Response(), Apart(prompt_interval, response_interval))
    passes = ReuseRows(rho, idle=True), ChunkLMHead(max_num_logits), FuseGLU()
    return Recipe("maskkv", 1, phases_of(spec, *passes, optional=GATED), plan=plan)


@costing(
    Cost("tiny_llada", "retrieval", 60, -1.7, None, None, "few_keys"),
    Cost("six conversions to smol_sdar", "GSM8K, SVAMP and MAWPS", 2692, -0.8, (-1.3, -0.3), 1.05, "smol"),
)
@caching
def dllm_serve(
    spec: ModelSpec,
    ratio: float = DEFAULT_RATIO,
    pool: int = 3,
    delay: int = 1,
    every: int = 0,
    pairs: int = 0,
    first: str = "published",
    block_cache: str = "off",
    max_num_logits: int = 2048,
) -> Recipe:
    """dLLM-Serve, per request: a block's steps read the block and, for each head, the best keys around it.

    Paper: *Taming the Memory Footprint Crisis: System Design for Production Diffusion LLM Serving*, arXiv 2512.17077.

    The first `delay` steps of a block see everything, and so does the next, which chooses. For each KV head it chooses
    the positions whose keys fit the block's mean query best, pooled over neighbours (Eq. 6). Prompt, earlier blocks and
    the masks after the block compete in one pool. The steps after it forward the block alone. In a block-causal model
    all steps do. Its steps that see everything read the cache, which keeps all keys for the blocks to come. If a model
    encodes a denoised block and predicts the next token, the forwards that encode see everything, and steps that
    denoise are counted.

    If a step before the one that chooses opens a block, the published code has it commit the block's first position,
    whatever its confidence. The paper does not say so. Other tokens of that step, if it decodes several, follow by
    confidence. Here this holds on Dream, for the first position alone, and for other models with first="position".
    There is one difference on Dream. The row before the block, which predicts its first position, goes with the block
    in all steps; in the published code its keys compete with those of the others.

    Args:
        spec: the model.
        ratio: share of the positions outside of the block that each head keeps.
        pool: width of the max-pooling; odd, 1 for none.
        delay: steps before the one that chooses.
        every: interval of steps of a block at which keys are chosen anew; 0 for once.
        pairs: instead of `ratio`, number of positions that each head keeps.
        first: tokens that a block's first step commits: the policy's choice ("policy"), or the block's first position
            alone, whatever its confidence ("position"). "published": "position" on a model with shifted logits, if
            `delay` is at least 1; else "policy".
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        max_num_logits: rows whose logits exist at a time.
    """
    kept = kept_by_dllm_serve(spec, ratio, pool, delay, every, pairs)
    return kept.on(
        block_rows("dllm_serve", spec, _first(spec, first, delay), block_cache, max_num_logits), "dllm_serve"
    )


@costing(
    Cost("tiny_llada", "retrieval", 60, -5.0, None, None, "few_keys"),
    Cost("six conversions to smol_sdar", "GSM8K, SVAMP and MAWPS", 2692, -2.3, (-2.8, -1.8), 1.04, "smol"),
)
@caching
def sparse_dllm(
    spec: ModelSpec,
    ratio: float = DEFAULT_RATIO,
    pool: int = 3,
    delay: int = 1,
    every: int = 0,
    pairs: int = 0,
    first: str = "published",
    block_cache: str = "off",
    max_num_logits: int = 2048,
) -> Recipe:
    """Sparse-dLLM: a block's steps read the block and the best keys around it, the same positions for all heads.

    Paper: *Sparse-dLLM: Accelerating Diffusion LLMs with Dynamic Cache Eviction*, arXiv 2508.02558.

    It is as `dllm_serve`, with its difference on Dream. But positions are ranked by the mean over all heads, which is
    pooled after it is taken. Pooling makes equal scores, of which the lower positions are kept; `torch.topk` leaves the
    choice of the published code undefined. A block's first step commits the first position alone on Dream, and the
    policy's choice on LLaDA.

    Args:
        spec: the model.
        ratio: share of the positions outside of the block that are kept.
        pool: width of the max-pooling; odd, 1 for none.
        delay: steps before the one that chooses.
        every: interval of steps of a block at which keys are chosen anew; 0 for once.
        pairs: instead of `ratio`, number of positions that are kept.
        first: tokens that a block's first step commits; see `dllm_serve`.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        max_num_logits: rows whose logits exist at a time.
    """
    kept = kept_by_sparse_dllm(spec, ratio, pool, delay, every, pairs)
    return kept.on(
        block_rows("sparse_dllm", spec, _first(spec, first, delay), block_cache, max_num_logits), "sparse_dllm"
    )


def _first(spec: ModelSpec, first: str, delay: int) -> str:
    """`RowPlan.first` of these recipes: tokens that a block's first step commits."""
    if first == "published":
        return published_first(spec) if delay and spec.attention == "bidirectional" else "policy"
    return first


def block_rows(name: str, spec: ModelSpec, first: str, block_cache: str, max_num_logits: int) -> Recipe:
    """The rows of a block; of a bidirectional model, all rows where it starts."""
    if spec.attention == "block_causal":
        if first != "policy":
            raise InputError(
                f"first={first!r} is about the step of a block that forwards the whole canvas, but {spec.family} is "
                f"block_causal; leave it out."
            )
        return dense(spec, block_cache, max_num_logits=max_num_logits)
    plan = RowPlan(Block(), first=first)
    return Recipe(name, 2, phases_of(spec, ChunkLMHead(max_num_logits)), block_cache, plan=plan)
