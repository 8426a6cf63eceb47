"""Engines as a value: built from it anywhere, after what was shipped is in the cache."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from dgraph.blueprint import Blueprint
from dgraph.cache.key import Key
from dgraph.cache.store import Store
from dgraph.cache.upkeep import entries, export
from dgraph.compiler.compilation import Compilation
from dgraph.engine.build import EngineConfig
from dgraph.errors import DgraphWarning, InputError, UnknownName
from dgraph.runtime.decoding import Decoding

SMALL = EngineConfig(max_sequences=2, max_tokens=64)


def test_each_recipe_has_an_engine_over_the_same_weights_and_its_own_options() -> None:
    blueprint = Blueprint(
        model="tiny_sdar",
        recipes=("focus", "dense"),
        options={"alpha": 1.8},
        name="mine",
        compilation=Compilation(backend="eager"),
        engine=SMALL,
    )
    told: list[str] = []
    engines = pickle.loads(pickle.dumps(blueprint)).engines(told.append)
    try:
        assert list(engines) == ["mine:focus", "mine:dense"]
        assert [engine.recipe for engine in engines.values()] == ["focus", "dense"]
        assert all(engine.max_sequences == 2 and sum(engine.stats.finished.values()) for engine in engines.values())
        answers = [engine.generate("Sort: b a", Decoding(max_new_tokens=8)) for engine in engines.values()]
        assert all(len(each) == 1 for each in answers)
    finally:
        for engine in engines.values():
            engine.close()
    assert told[0] == "loading"
    assert "dense: warming up" in told


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"recipes": "focus"}, InputError, "recipes are names, at least one of them, got 'focus'"),
        ({"recipes": ("focus", "denes")}, UnknownName, "unknown recipe 'denes'"),
        ({"recipes": ("focus", "dense"), "options": {"alhpa": 1}}, UnknownName, "option of 'focus' or 'dense' 'alhpa'"),
    ],
)
def test_what_names_nothing_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Blueprint(model="tiny_sdar", **settings)


def test_what_was_shipped_is_added_to_the_cache_and_a_bad_file_only_warns(tmp_path: Path) -> None:
    store = Store(tmp_path / "here")
    store.put(Key({"kind": "region"}), {"code": b"x"})
    export(entries(store), tmp_path / "shipped.zip")

    def unpack(artifacts: bool | str, shipped: Path) -> None:
        compilation = Compilation(artifacts=artifacts)
        Blueprint(model="tiny_sdar", compilation=compilation, shipped=str(shipped)).unpack()

    for _ in range(2):
        unpack(str(tmp_path / "there"), tmp_path / "shipped.zip")
    assert [entry.digest for entry in entries(Store(tmp_path / "there"))] == [entry.digest for entry in entries(store)]
    with pytest.warns(DgraphWarning, match=r"cannot be imported: .* Going on without it"):
        unpack(str(tmp_path / "there"), tmp_path / "no such file")
    with pytest.warns(DgraphWarning, match="is left out: there is no artifact cache"):
        unpack(False, tmp_path / "shipped.zip")
