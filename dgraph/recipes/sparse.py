"""Recipes that keep few keys: MaskKV, dLLM-Serve's head-centric cache, Sparse-dLLM, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from dgraph.errors import InputError, UnknownName, warn
from dgraph.passes.chunk_lm_head import ChunkLMHead
from dgraph.passes.fuse_glu import FuseGLU
from dgraph.passes.reuse_rows import ReuseRows
from dgraph.passes.sparse_kv import VOTERS, SparseKV
from dgraph.plans import budgets
from dgraph.plans.kv import KVPlan
from dgraph.plans.papers import DLLM_CACHE, DLLM_SERVE, MASKKV, SPARSE_DLLM, Paper
from dgraph.plans.regions import Block, Extent, Response
from dgraph.plans.rows import RowPlan
from dgraph.plans.schedules import Apart
from dgraph.recipes.base import Recipe
from dgraph.recipes.bidirectional import BY_FAMILY, first_commit
from dgraph.recipes.dense import GATED, Dense, phases_of
from dgraph.recipes.dllm_cache import check_intervals
from dgraph.recipes.former import builders
from dgraph.recipes.kept import KeyOptions, KVSelection
from dgraph.recipes.options import RecipeOptions, former
from dgraph.spec import ModelSpec

DEFAULT_RATIO = 0.5
DEFAULT_PAIRS = 256


def _by_importance(keys: MaskKVKeys, spec: ModelSpec) -> tuple[int, ...]:
    if not spec.layer_importance:
        warn(
            f"maskkv divides pairs among layers by their importance, which was not measured for this {spec.family} "
            f"model, so every layer gets the same; run `dgraph calibrate` for the model, or give layers='uniform'."
        )
        return (keys.pairs,)
    return budgets.maskkv(keys.pairs, spec.layer_importance, boundary=keys.boundary, beta=keys.layer_floor)


def _squeezed(keys: MaskKVKeys, spec: ModelSpec) -> tuple[int, ...]:
    if not spec.attention_similarity:
        raise InputError(
            f"layers='squeeze' groups layers by how little their attention changes hidden states, which was not "
            f"measured for {spec.family}; run `dgraph calibrate` for the model, or use layers='uniform'."
        )
    return budgets.squeeze(keys.pairs, spec.attention_similarity)


LAYERS: dict[str, Callable[[MaskKVKeys, ModelSpec], tuple[int, ...]]] = {
    "importance": _by_importance,
    "uniform": lambda keys, spec: (keys.pairs,),
    "squeeze": _squeezed,
    "pyramid": lambda keys, spec: budgets.pyramid(spec.layers, keys.pairs),
}
"""Divisions of pairs among layers by name: one number for all layers, or one for each."""


@dataclass(frozen=True)
class _Method:
    """Method of MaskKV's tables: its choice of keys, and its division of pairs among layers, a name of `LAYERS`."""

    select: SparseKV
    layers: str = "uniform"


_SNAPKV = SparseKV("snapkv", pool=7, recent=32)

METHODS: dict[str, _Method] = {
    **{
        masks: _Method(SparseKV(masks, heads="mass", floor=0.1), "importance")
        for masks in ("mask_voting", "front_voting", "middle_voting", "back_voting")
    },
    "prompt_voting": _Method(SparseKV("prompt_voting")),
    "all_voting": _Method(SparseKV("all_voting")),
    "snapkv": _Method(_SNAPKV),
    "pyramidkv": _Method(_SNAPKV, "pyramid"),
    "squeeze": _Method(_SNAPKV, "squeeze"),
    "adakv": _Method(replace(_SNAPKV, heads="adaptive", floor=0.2)),
    "h2o": _Method(SparseKV("all_voting", recent_share=0.5)),
}
"""Selectors of MaskKV's tables by name."""


@dataclass(frozen=True, kw_only=True)
class MaskKVKeys(KeyOptions):
    """Keys of the prompt that the response's masks attend to, chosen in the first step of a response.

    The first step of a response forwards everything. For each head it sums the attention that the prompt's positions
    get from the response's rows, and keeps the best positions.

    The keys of a block-causal model's prompt are final. They are prefilled, the response's first step chooses among the
    keys of whole blocks, and the pages of the others are given back. If a model encodes a denoised block and predicts
    the next token, the first step that denoises chooses, by the rows of its block. Forwards that encode before that
    step read every key. Later ones read the kept keys, as a commit does, and predict the next token from them.

    KVZip, the other baseline of the paper's Table 10, is not among the selectors. It scores keys by a second forward in
    which the model repeats the prompt. A program forwards rows of the canvas alone, where such a copy has no place.

    Attributes:
        pairs: prompt positions that a head keeps on average; at least the prompt's length keeps all.
        ratio: instead, the share of the prompt that it keeps, the same in all layers.
        selector: rows that vote, "mask_voting": those of the response; "front_voting", "middle_voting" or
            "back_voting": its first quarter, the middle half or its last quarter; "prompt_voting" or "all_voting": the
            prompt's, or all. Or an autoregressive method that MaskKV is compared with: "snapkv", "pyramidkv", "squeeze"
            (SqueezeAttention), "adakv" or "h2o" (all vote; half of the pairs are the prompt's last positions). Rows of
            the prompt vote in a bidirectional model alone, whose steps forward them.
        layers: division of pairs among layers: by "importance" or "squeeze" (by what `dgraph calibrate` measures),
            "pyramid" or "uniform"; "": the method's own, which is "importance" if masks vote.
        heads: division of a layer's pairs among heads: "uniform", "mass" or "adaptive"; "": the method's own.
        head_floor: share of a layer's pairs that its heads get alike, if masks vote or they divide by mass (alpha in
            the paper).
        layer_floor: share of the pairs that layers get alike (importance; beta in the paper).
        boundary: layers at either end that count as boundary layers (importance).
    """

    pairs: int = DEFAULT_PAIRS
    ratio: float = 0.0
    selector: str = "mask_voting"
    layers: str = ""
    heads: str = ""
    head_floor: float = 0.1
    layer_floor: float = 0.4
    boundary: int = 1

    name = "maskkv"
    papers: ClassVar[tuple[Paper, ...]] = (MASKKV.at("appendix A.2 and A.9"),)
    window = "response"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selector not in METHODS:
            raise UnknownName("selector of maskkv", self.selector, METHODS)
        if self.layers not in ("", *LAYERS):
            raise UnknownName("layers of maskkv", self.layers, LAYERS)
        if self.ratio and self.pairs != DEFAULT_PAIRS:
            raise InputError(f"give either pairs or ratio, got pairs={self.pairs} and ratio={self.ratio!r}.")
        if self.ratio and (reason := self._why_pairs()):
            raise InputError(f"{reason}; give pairs instead of ratio.")
        if self.selector == "h2o":
            warn(
                "selector 'h2o' of maskkv is H2O as it is published since version 0.2: heavy hitters and recent "
                "positions by halves. Its former choice is 'all_voting'; this notice goes with version 0.3."
            )

    def _why_pairs(self) -> str:
        """Reason why a ratio cannot be the budget; "" if it can."""
        method = METHODS[self.selector]
        if self.layers not in ("", "uniform"):
            return f"layers={self.layers!r} divides a number of pairs among layers"
        if not self.layers and method.layers in ("squeeze", "pyramid"):
            return f"selector {self.selector!r} divides a number of pairs among layers"
        if method.select.recent_share:
            return f"selector {self.selector!r} halves a number of pairs"
        return ""

    def selection(self, spec: ModelSpec) -> KVSelection:
        """See `KeyOptions`."""
        method = METHODS[self.selector]
        if spec.attention == "block_causal" and VOTERS[method.select.selector].outside:
            raise InputError(
                f"selector {self.selector!r} ranks the prompt's keys by how its own rows attend to them. "
                f"{spec.family} is block_causal: its selecting step forwards no whole block of the prompt. Use "
                f"'mask_voting'."
            )
        pairs = () if self.ratio else LAYERS[self.layers or method.layers](self, spec)
        select = replace(method.select, ratio=self.ratio, pairs=pairs, heads=self.heads or method.select.heads)
        if "mass" in (method.select.heads, self.heads):
            select = replace(select, floor=self.head_floor)
        return KVSelection(KVPlan(self.window, ratio=self.ratio, pairs=pairs), select)


INTERVALS = (50, 5, 0.25)
"""MaskKV's published intervals and share of rows."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveRows(RecipeOptions):
    """The rows of MaskKV's steps: those of dLLM-Cache, but a step for the prompt leaves the response alone.

    Attributes:
        prompt_interval: steps from one with the prompt to the next, at least 1. MaskKV uses 50.
        response_interval: steps from one that recomputes the response to the next, at least 1. MaskKV uses 5.
        rho: share of the response's rows that the steps between recompute, from 0 to 1. MaskKV uses 0.25.
    """

    prompt_interval: int = INTERVALS[0]
    response_interval: int = INTERVALS[1]
    rho: float = INTERVALS[2]

    name = "maskkv"
    papers: ClassVar[tuple[Paper, ...]] = (DLLM_CACHE,)
    extent = Extent.RESPONSE
    reuses = ReuseRows.reuses

    def __post_init__(self) -> None:
        super().__post_init__()
        check_intervals(self.prompt_interval, self.response_interval)

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        intervals = self.prompt_interval, self.response_interval
        if spec.attention == "block_causal":
            if (*intervals, self.rho) != INTERVALS:
                raise InputError(
                    f"prompt_interval, response_interval and rho say when a bidirectional model recomputes what has "
                    f"changed; {spec.family} is block_causal: a step forwards a block, and all other keys are final. "
                    f"Leave them out."
                )
            return Dense().build(spec)
        passes = ReuseRows(self.rho, idle=True), ChunkLMHead(), FuseGLU()
        phases = phases_of(spec, *passes, optional=GATED)
        return Recipe(self.name, 1, phases, plan=RowPlan(Response(), Apart(*intervals)))


@dataclass(frozen=True, kw_only=True)
class MaskKV(MaskKVKeys, AdaptiveRows):
    """MaskKV: of the prompt's keys, those that the response's masks attend to; the rest is evicted.

    The first step of a response chooses them, see `MaskKVKeys`. Steps that `prompt_interval` divides forward the prompt
    once more to give the kept positions new values. The response is updated as by dLLM-Cache: all of it every
    `response_interval` steps, else the share `rho` of its rows whose values have changed most. Nothing else of the
    prompt is stored, and only masked rows are projected on the vocabulary.

    There are two differences to the paper. The first layer recomputes all forwarded rows in every step, as dLLM-Cache
    does. If logits are shifted (Dream), the prompt's last row belongs to the response.
    """

    papers: ClassVar[tuple[Paper, ...]] = (*MaskKVKeys.papers, *AdaptiveRows.papers)


@dataclass(frozen=True, kw_only=True)
class KeysAroundBlock(KeyOptions):
    """Keys outside of the block that fit its mean query best, chosen anew for each block.

    The first `delay` steps of a block see everything, and so does the next, which chooses. Prompt, earlier blocks and
    the masks after the block compete in one pool. If a model encodes a denoised block and predicts the next token, the
    forwards that encode see everything, and steps that denoise are counted.

    Class attributes:
        selector: how `SparseKV` ranks positions.

    Attributes:
        ratio: share of the positions outside of the block that a head keeps.
        pool: width of the max-pooling; odd, 1 for none.
        delay: steps before the one that chooses; None for 0 in a bidirectional model, where each forwards the canvas,
            and for 1 in a block-causal one, where it takes no more rows.
        every: interval of steps of a block at which keys are chosen anew; 0 for once.
        pairs: instead of `ratio`, number of positions that a head keeps.
    """

    ratio: float = DEFAULT_RATIO
    pool: int = 3
    delay: int | None = 1
    every: int = 0
    pairs: int = 0

    window = "block"
    selector: ClassVar[str]

    def selection(self, spec: ModelSpec) -> KVSelection:
        """See `KeyOptions`."""
        pairs = (self.pairs,) if self.pairs else ()
        ratio = 0.0 if self.pairs and self.ratio == DEFAULT_RATIO else self.ratio
        delay = int(spec.attention == "block_causal") if self.delay is None else self.delay
        plan = KVPlan(self.window, delay, self.every, ratio, pairs)
        return KVSelection(plan, SparseKV(self.selector, ratio, pairs, pool=self.pool))


@dataclass(frozen=True, kw_only=True)
class DLLMServeKeys(KeysAroundBlock):
    """Keys that dLLM-Serve keeps, chosen by each KV head for itself; see `KeysAroundBlock`."""

    delay: int | None = None

    name = "dllm_serve"
    papers = (DLLM_SERVE.at("Eq. 6"),)
    selector = "block"


@dataclass(frozen=True, kw_only=True)
class SparseDLLMKeys(KeysAroundBlock):
    """Keys that Sparse-dLLM keeps, the same positions for all heads; see `KeysAroundBlock`."""

    name = "sparse_dllm"
    papers = (SPARSE_DLLM,)
    selector = "shared"


@dataclass(frozen=True, kw_only=True)
class BlockRows(RecipeOptions):
    """The rows of a block; of a bidirectional model, all rows where it starts.

    Attributes:
        delay: steps before the one that chooses, as in `KeysAroundBlock`.
        block_cache: "off", "dc" or "dc+"; see `Recipe`.
        first: former option: tokens that a block's first step commits, "policy", "position" or "published".
    """

    delay: int | None = 1
    block_cache: str = "off"
    first: str | None = former(BY_FAMILY)

    name = "block"
    extent = Extent.BLOCK

    def build(self, spec: ModelSpec) -> Recipe:
        """See `RecipeOptions`."""
        if spec.attention == "block_causal":
            if self.first not in (None, "published", "policy"):
                raise InputError(
                    f"first={self.first!r} is about the step of a block that forwards the whole canvas, but "
                    f"{spec.family} is block_causal; leave it out."
                )
            return Dense(block_cache=self.block_cache).build(spec)
        first = "policy" if not self.delay and self.first in (None, "published") else first_commit(spec, self.first)
        plan = RowPlan(Block(), first=first)
        return Recipe(self.name, 2, phases_of(spec, ChunkLMHead()), self.block_cache, plan=plan)


@dataclass(frozen=True, kw_only=True)
class DLLMServe(DLLMServeKeys, BlockRows):
    """dLLM-Serve, per request: a block's steps read the block and, for each head, the best keys around it.

    A step that chooses takes, for each KV head, the positions whose keys fit the block's mean query best, pooled over
    neighbours (Eq. 6); see `KeysAroundBlock`. The steps after it forward the block alone. In a block-causal model all
    steps do. All keys stay in the cache for the blocks to come, and a choice is a list of positions in it.

    The paper chooses keys in the refresh that begins a block (section 4.5), and so does this recipe in a bidirectional
    model. The published code refreshes twice and chooses in the second (`delay=1`), at 0.70 times the tokens per second
    under load. Its answers may be better, which 128 questions did not settle: see benchmarks/results/few_keys.md.

    If a step before the one that chooses opens a block, the published code has it commit the block's first position,
    whatever its confidence. The paper does not say so. Other tokens of that step, if it decodes several, follow by
    confidence. Here this holds on Dream, for the first position alone. There is one difference on Dream. The row before
    the block, which predicts its first position, goes with the block in all steps; in the published code its keys
    compete with those of the others.
    """


@dataclass(frozen=True, kw_only=True)
class SparseDLLM(SparseDLLMKeys, BlockRows):
    """Sparse-dLLM: a block's steps read the block and the best keys around it, the same positions for all heads.

    It is as `DLLMServe`, with its difference on Dream. But positions are ranked by the mean over all heads, which is
    pooled after it is taken. Pooling makes equal scores, of which the lower positions are kept; `torch.topk` leaves the
    choice of the published code undefined. A block's first step commits the first position alone on Dream, and the
    policy's choice on LLaDA.
    """


__getattr__ = builders(maskkv=MaskKV, dllm_serve=DLLMServe, sparse_dllm=SparseDLLM)
