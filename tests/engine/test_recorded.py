"""An engine that has recorded its CUDA graphs when it opens: which these are, and that serving records no other one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.build import EngineConfig
from dgraph.errors import InputError
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.regions import RegionCompiler
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.state import packed_rows as rows
from dgraph.testing import TinyModel, models
from tests.engine.driven import Asked, Turns, driver_of
from tests.runtime.recorder import Recorder

SETTINGS: dict[str, Any] = {"max_sequences": 3, "max_tokens": 48}
NEW = 16


def session_of(family: str, recipe: str, pool: GraphPool | None, buckets: str = "hybrid") -> BlockSession:
    """As on a GPU, with the pool's recorder in the place of a device."""
    (tiny,) = models(None, family)
    chosen = tiny.recipe(recipe)
    made = CompiledModel(tiny.model, tiny.graph, chosen, RegionCompiler("eager"), Buckets.of(buckets))
    made.graph_pool = pool
    return BlockSession(
        made.spec,
        {name: made._lower(phase.graph, name == "prefill") for name, phase in made.phases.items()},
        block_cache=chosen.block_cache,  # type: ignore[arg-type]
        recommit=chosen.recommit,
        plan=chosen.plan,
        kv=chosen.kv,
        pool=pool,
    )


def asked_of(tiny: TinyModel) -> list[Asked]:
    """Prompts of several lengths, which come while others are decoded."""
    ids = [token for token in range(tiny.model.spec.vocab) if token not in (tiny.model.spec.mask_id, 0)]
    decoding = Decoding(max_new_tokens=NEW, threshold=0.9, ignore_eos=True)
    lengths = enumerate((30, 3, 17, 9, 24))
    return [Asked(tuple(ids[n : n + length]), decoding, index=n, turn=2 * n) for n, length in lengths]


@pytest.mark.parametrize(
    ("family", "recipe", "mixed"),
    [
        ("sdar", "focus", 0),
        ("sdar", "focus", None),
        ("sdar", "dllm_serve", None),
        ("sdar", "dyllm", 16),
        ("fast_dllm_v2", "dense", 0),
        ("fast_dllm_v2", "dense", None),
        ("fast_dllm_v2", "maskkv", None),
        ("llada", "fast_dllm", None),
        ("llada", "dllm_serve", None),
    ],
)
def test_serving_records_no_further_stage(
    monkeypatch: pytest.MonkeyPatch, family: str, recipe: str, mixed: int | None
) -> None:
    monkeypatch.setattr(rows, "KEY_ROWS", 40)  # few tokens: several numbers of rows of keys all the same
    (tiny,) = models(None, family)
    asked, pool = asked_of(tiny), GraphPool(recorder=Recorder)
    plain = Turns(session_of(family, recipe, None), asked, **SETTINGS).run()
    turns = Turns(session_of(family, recipe, pool), asked, record=True, max_mixed_rows=mixed, **SETTINGS)
    ahead = len(pool.recorded)
    told = turns.run()
    for mine, theirs in zip(told, plain, strict=True):
        mine.check_as(theirs)
    assert {name for name, _ in pool.recorded[ahead:]} == {"transition"}
    assert not pool.refused
    alone, together = turns.core.stages.rows.get("prefill", 0), turns.core.totals.mixed_rows
    rides = recipe in ("focus", "dyllm", "dense") and mixed != 0
    assert (alone > 0) == (family != "llada" and not (rides and mixed is None))
    assert (together > 0) == rides


def test_what_is_recorded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 8: steps of 3 sequences have at most 48 rows, and prompts of 3 canvases of 48 positions 144. Steps
    that encode such prompts have as many as both, and never more than all there are.
    """
    monkeypatch.setattr(rows, "KEY_ROWS", 40)
    steps, prompts = [64, 32, 16, 8, 4, 2, 1], [256, 128, 64, 32, 16, 8]
    for mixed, more in ((0, []), (16, []), (17, [128]), (None, [256, 128])):
        pool = GraphPool(recorder=Recorder)
        driver_of(session_of("sdar", "dense", pool), record=True, max_mixed_rows=mixed, **SETTINGS)
        assert pool.recorded == [*(("step", n) for n in [*more, *steps]), *(("prefill", n) for n in prompts)]
    monkeypatch.setattr("dgraph.compiler.compiled_model.GRAPH_ROWS", 64)
    few = GraphPool(recorder=Recorder)
    driver_of(session_of("sdar", "dense", few), record=True, max_mixed_rows=0, **SETTINGS)
    assert [rows for name, rows in few.recorded if name == "prefill"] == prompts[2:]
    # A block of a sequence sees 48 keys at most, for which there are graphs of 40 and of 144, all that there are.
    chosen = GraphPool(recorder=Recorder)
    driver_of(session_of("sdar", "dllm_serve", chosen), record=True, **SETTINGS)
    found = Counter(rows for name, rows in chosen.recorded if name == "step")
    assert found == dict.fromkeys(steps, 1 + 2)
    # Where they are too many, those of few keys come first, and others find room in the pool.
    some = GraphPool(limit=22, recorder=Recorder)
    driver_of(session_of("sdar", "dllm_serve", some), record=True, **SETTINGS)
    assert some.recorded == [*few.recorded, *(("step", n) for n in steps[:5])]


@pytest.mark.parametrize("recipe", ["focus", "dllm_serve"])
def test_a_warm_up_of_generate_records_as_much(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(rows, "KEY_ROWS", 40)
    pool, prompts = GraphPool(recorder=Recorder), [list(asked.ids) for asked in asked_of(models(None, "sdar")[0])]
    options: dict[str, Any] = {"max_new_tokens": NEW, "threshold": 0.9, "max_batch": 3}
    plain, prepared = session_of("sdar", recipe, None), session_of("sdar", recipe, pool)
    prepared.warm_up(3, 48)
    ahead = len(pool.recorded)
    assert prepared.generate(prompts, **options).token_ids == plain.generate(prompts, **options).token_ids
    assert {name for name, _ in pool.recorded[ahead:]} == {"transition"}
    assert not pool.refused


class Watched(Turns):
    """Turns that note after each where the caches are, and how large."""

    def __init__(self, *given: Any, **settings: Any):
        super().__init__(*given, **settings)
        self.seen: list[tuple[tuple[int, ...], int]] = []

    def places(self) -> tuple[tuple[int, ...], int]:
        session = self.core.session
        packed = {} if session.packed is None else session.packed.tensors()
        caches = (cache for name, cache in (session.kv.tensors() | packed).items() if name != "pack_start")
        return tuple(cache.data_ptr() for cache in caches), session.cache_bytes

    def turn(self, cancelled: Sequence[int] = ()) -> None:
        super().turn(cancelled)
        self.seen.append(self.places())


LOADS = [
    *(
        ("llada", "dllm_serve", 1.0),
        ("llada", "dllm_serve", 0.4),
        ("llada", "maskkv", 0.4),
        ("dream", "dllm_serve", 0.4),
    ),
    *(("llada", "dllm_serve+dyllm", 1.0), ("sdar", "dllm_serve", 0.4), ("sdar", "dyllm", 0.4)),
    ("fast_dllm_v2", "maskkv", 0.4),
]
"""With a share of the memory that requests of every length would take."""


@pytest.mark.parametrize(("family", "recipe", "share"), LOADS)
def test_an_open_load_neither_records_nor_drops_a_graph(
    monkeypatch: pytest.MonkeyPatch, family: str, recipe: str, share: float
) -> None:
    """Requests of many lengths come and go, more of them than memory holds; all caches stay where they are and as
    large as `kv_bytes` says.
    """
    monkeypatch.setattr(rows, "KEY_ROWS", 40)
    (tiny,) = models(None, family)
    ids = [token for token in range(tiny.model.spec.vocab) if token not in (tiny.model.spec.mask_id, 0)]
    random, new = Random(3), (8, 16, 24)
    chosen = [Decoding(max_new_tokens=each, threshold=0.3, ignore_eos=True) for each in new]
    asked = [
        Asked(tuple(random.choices(ids, k=random.randint(3, 40))), random.choice(chosen), index=n, turn=n)
        for n in range(14)
    ]
    settings: dict[str, Any] = {"max_sequences": 5, "max_tokens": 64, "usual_prompt": 24, "decoding": chosen[1]}
    pool = GraphPool(recorder=Recorder)
    session = session_of(family, recipe, pool)
    driver_of(session, **settings)
    settings["kv_bytes"] = int(share * session.cache_bytes)
    session.give_back()
    turns = Watched(session, asked, record=True, **settings)
    ahead, before = len(pool.recorded), turns.places()
    dropped: list[object] = []
    monkeypatch.setattr(pool, "let_go", dropped.append)
    turns.run()
    assert [name for name, _ in pool.recorded[ahead:]] == ["transition"]
    assert not dropped
    assert not pool.refused
    assert set(turns.seen) == {before}
    assert before[1] <= settings["kv_bytes"]


def test_without_graphs_there_is_nothing_to_record() -> None:
    driver_of(session_of("sdar", "dense", None), record=True, **SETTINGS)
    pool = GraphPool(recorder=Recorder)
    driver_of(session_of("sdar", "dense", pool), **SETTINGS)
    assert not pool.recorded
    with pytest.raises(InputError, match="buckets of kind 'exact' cannot be prepared ahead"):
        driver_of(session_of("sdar", "dense", pool, "exact"), record=True, **SETTINGS)
    with pytest.raises(InputError, match="record is true or false, got 1"):
        EngineConfig(record=1)  # type: ignore[arg-type]
