"""Traces: files there and back, files that are none, redundancy by counting, synthesis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgraph.bench.traces import Trace, kept_rows, read_trace, synthesise, trace_from_json
from dgraph.errors import InputError
from dgraph.runtime.loop.scripted_policy import BlockStep

FOLDER = Path(__file__).parents[2] / "benchmarks" / "traces"
HISTORY = (BlockStep((0, 2), (0, 1, 2)), BlockStep((1,), (1, 3)), BlockStep((3,), (3,)))


def test_a_trace_reads_back_from_its_file(tmp_path: Path) -> None:
    for trace in (
        Trace(4, (HISTORY, HISTORY[::1]), "by hand"),
        Trace(2, ((BlockStep((1,)), BlockStep((0,))),)),
        synthesise(8, 5.0, 3.0, histories=4),
    ):
        trace.write(tmp_path / "trace.json")
        assert read_trace(tmp_path / "trace.json") == trace
        assert trace_from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_rows_are_those_of_a_decode_by_hand() -> None:
    """Kept masked columns, then decoded ones that wait for their right neighbour, then what is left to commit."""
    # step 1: 0 1 2; step 2: 1 3 and 0 2, decoded in step 1; step 3: 3 and 0 1 2, of which 0 and 1 had neighbours
    assert kept_rows(HISTORY, 4) == (3 + 4 + 4, 2)
    rows = Trace(4, (HISTORY,)).redundancy()
    assert (rows.dense, rows.kept, rows.recommitted) == (3 * 4 / 4 + 1, 13 / 4, 11 / 4 + 1)
    bare = Trace(4, (tuple(BlockStep(s.committed) for s in HISTORY),))
    assert bare.redundancy().kept is None
    assert not bare.keeps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, 'not a trace: it has no "format": "dgraph-trace"'),
        ({"version": 2}, "version 2, but this dgraph reads version 1"),
        ({"block": 0}, "block is a number of columns of at least 1, got 0"),
        ({"block": "4"}, "block is a number of columns of at least 1, got '4'"),
        ({"block": 5}, "history 0 never commits column 4"),
        ({"block": 3}, "history 0, step 1 keeps column 3, which is not masked then"),
        ({"histories": []}, "at least one block history, got none"),
        ({"histories": None}, 'no "histories"'),
        ({"histories": [[{"keep": [0]}]]}, 'history 0, step 0: no "commit"'),
        ({"histories": [[{"commit": ["0"]}]]}, "\"commit\" must be a list of columns, got ['0']"),
        ({"histories": [[{"commit": []}]]}, "history 0, step 0 commits nothing"),
        ({"histories": [[{"commit": [0, 0]}]]}, "commits a column twice"),
        (
            {"histories": [[{"commit": [0]}, {"commit": [0]}]]},
            "history 0, step 1 commits column 0, which is not masked",
        ),
        ({"histories": [[{"commit": [0, 1, 2, 3], "keep": [0, 1]}]]}, "commits column 2 without keeping it"),
        (
            {"histories": [[{"commit": [0, 1, 2, 3], "keep": [0, 1, 2, 3]}], [{"commit": [3, 2, 1, 0]}]]},
            "either every step of a trace says which columns are kept, or none does",
        ),
    ],
    ids=str,
)
def test_files_that_are_no_trace(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({**Trace(4, (HISTORY,)).to_json(), **change}))
    with pytest.raises(InputError) as found:
        read_trace(file)
    assert message in str(found.value)
    assert str(file) in str(found.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing.json cannot be read"):
        read_trace(tmp_path / "missing.json")
    (tmp_path / "damaged.json").write_text('{"format"')
    with pytest.raises(InputError, match=r"damaged.json cannot be read as JSON"):
        read_trace(tmp_path / "damaged.json")
    with pytest.raises(InputError, match="cannot be written"):
        Trace(4, (HISTORY,)).write(tmp_path / "no" / "trace.json")


@pytest.mark.parametrize(("block", "dense", "kept"), [(8, 5.0, 3.0), (32, 15.0, 3.1), (16, 9.0, 2.9)])
def test_a_synthesised_trace_has_its_redundancy_exactly(block: int, dense: float, kept: float) -> None:
    trace = synthesise(block, dense, kept, histories=20, seed=3)
    rows = trace.redundancy()
    assert (rows.dense, rows.kept) == (dense, kept)
    assert trace == synthesise(block, dense, kept, histories=20, seed=3)
    assert trace != synthesise(block, dense, kept, histories=20, seed=4)
    assert len({len(h) for h in trace.histories}) > 1, "blocks differ in their number of steps"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense": 15.01}, "cannot be met by 5 blocks of 32. 70.05 steps"),
        ({"dense": 40.0}, "cannot be met"),
        ({"kept": 1.0}, "less than commits of this kind take"),
        ({"kept": 30.0}, "more than blocks of 32 can keep"),
    ],
)
def test_redundancies_that_cannot_be_met(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        synthesise(histories=5, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "block", "dense", "kept"),
    [("text", 32, 15.0, 3.56), ("paper-sharegpt", 32, 15.0, 3.1), ("paper-sharegpt-b64", 64, 29.0, 3.1)],
)
def test_the_traces_that_come_along(name: str, block: int, dense: float, kept: float) -> None:
    trace = read_trace(FOLDER / f"{name}.json")
    rows = trace.redundancy()
    assert trace.block == block
    assert rows.dense == pytest.approx(dense, abs=0.05 if name == "text" else 1e-12)
    assert rows.kept == pytest.approx(kept, abs=0.01 if name == "text" else 1e-12)
    if name != "text":
        assert trace == synthesise(block, dense, kept), "made by `synthesise`"
