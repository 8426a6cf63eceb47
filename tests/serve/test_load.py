"""benchmarks.server_load on a trained model: both arms ask for the same, and are answered."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

import dgraph
from benchmarks.runs import Run
from benchmarks.server_load import measure
from dgraph.bench.arrivals import Request
from dgraph.bench.serve import LoadTest, prompts_for


@pytest.mark.release
def test_both_arms_are_served_the_same(sdar: dgraph.CompiledModel, tmp_path: Path) -> None:
    requests = [Request(0.0, 8, 8) for _ in range(4)]
    decoding = dgraph.Decoding(steps=2, ignore_eos=True)
    settings = dgraph.EngineConfig(max_sequences=2, max_tokens=64)
    test = LoadTest(sdar, requests, prompts_for(sdar.model, requests), decoding, settings)
    run = Run(Namespace(seconds=None, json=tmp_path / "out.json", markdown=None), "A trial")
    arms = measure(run, test, clients=2, rounds=1, think=0.001)
    assert [(arm.label, arm.tokens) for arm in arms] == [("Engine.stream", 32), ("over HTTP", 32)]
    assert all(0 < arm.first_p50 <= arm.first_p99 <= arm.seconds for arm in arms)
    assert all(0 < arm.loop < arm.seconds for arm in arms)
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert [row[0] for row in table["rows"]] == [
        "Engine.stream",
        "over HTTP",
        "Engine.stream, mean",
        "over HTTP, mean",
    ]
    assert f"median {1e3 * (arms[1].first_p50 - arms[0].first_p50):.1f}." in table["note"]
