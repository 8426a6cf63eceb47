"""SparseKV: with a budget of everything it is the dense program of the same rows, whatever chose these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.ir.graph import Graph
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.passes import EvictTokens, FuseProjections, ReuseRows, SparseKV
from dgraph.passes.base import Pass
from tests.passes.sparse_step import FAMILIES, LENGTHS, TOKENS, family_of, memory_of, step_of
from tests.tiny import PAGE, interpret, rewritten

WINDOWS = ((4, 9), (2, 5), (5, 11))
"""The first two reach the ends of their sequences, the last has candidates on both sides."""
TO_THE_END = ((4, 9), (2, 5), (5, 13))


def packs_of(graph: Graph) -> dict[str, Tensor]:
    """Packed caches (NaN) with room for all positions of each sequence, out of order."""
    spec, b = graph.spec, len(LENGTHS)
    room = max(LENGTHS) * spec.kv_heads
    start = torch.tensor([2, 0, 1]) * room
    caches: dict[str, Tensor] = {"pack_start": start.int().expand(spec.layers, b)}
    for layer in range(spec.layers):
        caches |= {f"{kind}_pack_{layer}": torch.full((b * room, spec.head_dim), torch.nan) for kind in "kv"}
        caches[f"pack_count_{layer}"] = torch.zeros(b, spec.kv_heads, dtype=torch.int32)
        caches[f"pack_index_{layer}"] = torch.full((b * room,), -1, dtype=torch.int32)
    return caches


def caches_of(graph: Graph) -> dict[str, Tensor]:
    """Empty caches of all kinds."""
    memory = memory_of(graph.spec, LENGTHS)
    features = {f"a{name[1:]}": cache.clone() for name, cache in memory.items() if name.startswith("f_cache")}
    return {**memory, **features, **packs_of(graph)}


def step(
    whole: bool,
    action: int | Sequence[int],
    decoded: int = 0,
    padding: int = 0,
    windows: Sequence[tuple[int, int]] = WINDOWS,
) -> dict[str, Tensor]:
    """Rows of whole sequences, or of their windows; `decoded` tokens of each window differ from the first step's."""
    tokens = [list(t) for t in TOKENS]
    for sequence, (low, _) in zip(tokens, windows, strict=True):
        for i in range(decoded):
            sequence[low + i] = 40 + i
    spans = [(0, n) for n in LENGTHS] if whole else windows
    rows = [t[low:high] for t, (low, high) in zip(tokens, spans, strict=True)]
    inputs = step_of(rows, [low for low, _ in spans], LENGTHS, [[]] * 3, [whole] * 3, padding)
    inputs["window"] = torch.tensor(windows, dtype=torch.int32)
    inputs["action"] = torch.tensor([action] * 3 if isinstance(action, int) else action, dtype=torch.int32)
    inputs["adapt"] = torch.ones_like(inputs["full"])
    inputs["key_positions"] = torch.cat([torch.arange(n) for n in LENGTHS] + [torch.zeros(4, dtype=torch.int64)])
    inputs["cu_keys"] = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    inputs["average"] = torch.full((3,), torch.inf if whole else 0.6)
    return inputs


def live(out: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    return out["logits"][: int(inputs["cu_rows"][-1]) if "kept" not in out else int((out["kept"] >= 0).sum())]


def near(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


EVERYTHING: list[dict[str, Any]] = [
    {"selector": "mask_voting", "ratio": 1.0, "heads": "mass"},
    {"selector": "block", "ratio": 0.0, "pairs": (99,), "pool": 3},
    {"selector": "shared", "ratio": 1.0},
    {"selector": "snapkv", "ratio": 0.0, "pairs": (99,), "heads": "adaptive", "recent": 2},
]


@pytest.mark.parametrize(
    ("name", "settings", "padding"),
    [
        *((name, EVERYTHING[i % 4], 5 * (i % 2)) for i, name in enumerate(FAMILIES)),
        *(("dream", settings, padding) for settings in EVERYTHING for padding in (0, 5)),
    ],
    ids=str,
)
def test_a_budget_of_everything_is_the_dense_program(name: str, settings: dict[str, Any], padding: int) -> None:
    """A whole step that selects, two of the windows that reuse, and one that repacks; candidates have no pages."""
    dense = family_of(name).cached
    select, reuse = (rewritten(dense, SparseKV(**settings, reuse=r)) for r in (False, True))
    half = {**settings, "ratio": 0.5, "pairs": (), "heads": "uniform"}
    fewer = [rewritten(dense, SparseKV(**half, reuse=r)) for r in (False, True)]
    memory, wanted, few = caches_of(dense), caches_of(dense), caches_of(dense)
    for caches in (memory, few):
        caches["page_table"] = caches["page_table"].clone()
        caches["page_table"][0, 0] = caches["page_table"][2, 0] = caches["page_table"][2, 3] = -1
        assert WINDOWS[0][0] == PAGE
    for whole, action, decoded in ((True, SELECT, 0), (False, REUSE, 1), (False, REUSE, 2), (True, REPACK, 3)):
        inputs = step(whole, action, decoded, padding)
        got, sparse = (
            live(interpret(reuse_graph if action == REUSE else select_graph, {**inputs, **caches}), inputs)
            for select_graph, reuse_graph, caches in ((select, reuse, memory), (*fewer, few))
        )
        want = live(interpret(dense, {**inputs, **wanted}), inputs)
        assert near(got, want)
        assert near(sparse, want) == (action == SELECT), "a step that selects sees all keys, others what is kept"


@pytest.mark.parametrize(
    ("name", "kept"), [("sdar", "pages"), ("sdar", "packed"), ("sdar_moe", "packed"), ("llada2", "pages")]
)
def test_keys_to_select_from_may_be_cached(name: str, kept: str) -> None:
    """Whole sequences are cached by the dense program; then steps forward the windows alone."""
    dense = family_of(name).cached
    everything = {"selector": "block", "ratio": 1.0, "cached": True, "kept": kept}
    select, reuse = (rewritten(dense, SparseKV(**everything, reuse=r)) for r in (False, True))
    few = rewritten(dense, SparseKV("block", 0.4, cached=True, kept=kept))
    memory = caches_of(dense)
    interpret(dense, {**step(True, DENSE), **memory})
    for action, decoded in ((DENSE, 1), (SELECT, 2), (REUSE, 3)):
        inputs = step(False, action, decoded)
        want = live(interpret(dense, {**inputs, **memory}), inputs)
        graph = reuse if action == REUSE else select
        assert near(live(interpret(graph, {**inputs, **memory}), inputs), want)
    assert [int(c) for c in memory["pack_count_0"][:, 0]] == [
        n - high + low for n, (low, high) in zip(LENGTHS, WINDOWS, strict=True)
    ]
    interpret(few, {**step(False, SELECT, 2), **memory})
    assert not near(live(interpret(reuse, {**inputs, **memory}), inputs), want)


def test_sequences_are_in_phases_of_their_own() -> None:
    """One reuses while another selects; each is as if all did what it does."""
    dense = family_of("dream").cached
    select = rewritten(dense, SparseKV("block", 0.5))
    first, mixed = step(True, SELECT), step(True, (REUSE, SELECT, REPACK), 2)
    memory = caches_of(dense)
    interpret(select, {**first, **memory})
    alone = []
    for action in (REUSE, SELECT, REPACK):
        copy = {key: value.clone() for key, value in memory.items()}
        alone.append(interpret(select, {**step(True, action, 2), **copy})["logits"])
    got = interpret(select, {**mixed, **memory})["logits"].split(LENGTHS)
    for s, want in enumerate(alone):
        assert near(got[s], want.split(LENGTHS)[s])
    assert not any(near(a, b) for a, b in ((alone[0], alone[1]), (alone[1], alone[2]), (alone[0], alone[2])))


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("sdar", [EvictTokens(after=2)]),
        ("sdar_moe", [EvictTokens(after=1)]),
        ("llada", [EvictTokens(after=1)]),
        ("dream", [ReuseRows(0.4, idle=True)]),
        ("llada", [FuseProjections(), ReuseRows(0.4)]),
    ],
    ids=str,
)
def test_after_passes_that_choose_rows(name: str, passes: list[Pass]) -> None:
    """Nothing is evicted where all is selected; then rows go, and what is left sees every key."""
    before = rewritten(family_of(name).cached, *passes)
    select, reuse = (rewritten(before, SparseKV(ratio=1.0, reuse=r)) for r in (False, True))
    assert len(select.find("kv_pack")) == len(reuse.find("sparse_attention")) == before.spec.layers
    memory, wanted = caches_of(before), caches_of(before)
    rows = set()
    for whole, action, decoded in ((True, SELECT, 0), (False, REUSE, 1), (False, REUSE, 2)):
        # A row of a block-causal model that is evicted takes what is after it out of sight: there is nothing there.
        windows = WINDOWS if name in ("llada", "dream") else TO_THE_END
        inputs = step(whole, action, decoded, windows=windows)
        inputs["candidate"] = torch.ones_like(inputs["full"])
        got = interpret(reuse if action == REUSE else select, {**inputs, **memory})
        want = interpret(before, {**inputs, **wanted})
        assert all(torch.equal(got[key], want[key]) for key in got.keys() & {"kept", "salient", "reached"})
        assert near(live(got, inputs), live(want, inputs))
        rows.add(len(live(got, inputs)))
    assert min(rows) < sum(high - low for low, high in windows) or isinstance(passes[-1], ReuseRows)
