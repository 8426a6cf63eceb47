"""`benchmarks/dllm_serve.py`: arms side by side on a tiny model, a run that goes on, and the tables of its loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import dllm_serve, serving_lengths
from benchmarks.dllm_serve import Arm, main
from benchmarks.dllm_serve_memory import Memory, MemoryLimit
from benchmarks.dllm_serve_tables import _to_baseline
from dgraph.bench.arrivals import Lengths, Request
from dgraph.bench.beside import method_of
from dgraph.bench.serve import LoadTest, prompts_for
from dgraph.bench.traces import synthesise
from dgraph.engine.build import EngineConfig
from dgraph.errors import InputError, UnknownName
from dgraph.models.shapes import random_model
from dgraph.runtime.decoding import Decoding
from tests.compiled import compiled
from tests.recipes.bidirectional import Setup, setup_of

SERVE, FAST, SPARSE = "dllm_serve:delay=0@look_ahead", "fast_dllm@static+all", "sparse_dllm@static+all"


@pytest.fixture(scope="module")
def setup() -> Setup:
    return setup_of("llada")


@pytest.fixture
def run(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dllm_serve, "named", lambda *given, **more: setup.model)

    def measured(*arguments: str) -> tuple[dict[str, list[list[Any]]], dict[str, Any]]:
        small = (
            "--model tiny --device cpu --backend eager --scale 0.05 --tokens 16 --requests 4 --sequences 2 --rows 64"
        )
        case = "--lengths osc --memory keys:0.01 --rates 1.5 --commits one"
        files = ("--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"))
        assert main([*small.split(), *case.split(), *files, *arguments]) == 0
        found = json.loads((tmp_path / "out.json").read_text("utf-8"))
        return {table["title"]: table["rows"] for table in found["tables"]}, found["data"]

    return measured


def test_arms_are_compared_and_a_run_goes_on(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables, data = run("--parts", "loads", "memory", "--arms", SERVE, FAST)
    assert [(one["arm"], one["load"]) for one in data["loads"]] == [(SERVE, "capacity"), (SERVE, 1.5), (FAST, 1.5)]
    capacity, serve, fast = data["loads"]
    assert 0 < capacity["keys"] == fast["keys"]
    assert capacity["each"] != fast["each"], "packed keys count"
    assert serve["offered"] == pytest.approx(fast["offered"], rel=0.2), "the same times, as shares of one capacity"
    case = ["osc", "one", "keys:0.01"]
    assert tables["Figure 3: tok/s by rate"] == [
        [*case, one["arm"], one["tokens_per_second"]] for one in data["loads"][1:]
    ]
    assert tables["Figure 4: mean latency, s"][1] == [*case, FAST, fast["mean"]]
    table_4 = tables["Table 4: at 1.5 of the capacity"]
    assert table_4[0][6:] == [fast["mean"] / serve["mean"], serve["tokens_per_second"] / fast["tokens_per_second"]]
    assert table_4[1][6:] == [1, 1]
    assert [row[:3] for row in tables["Logit budget"]] == [
        [recipe, "keys:0.01", 64] for recipe in ("dllm_serve:delay=0", "fast_dllm") for _ in range(2)
    ]
    served: list[str] = []
    monkeypatch.setattr(LoadTest, "run", lambda self, *given, **more: served.append(self.optimized.recipe.name))
    again, more = run("--parts", "loads", "--arms", SERVE, FAST, "--resume")
    assert not served
    assert more["loads"] == data["loads"]
    assert again["Figure 3: tok/s by rate"] == tables["Figure 3: tok/s by rate"]


def test_nothing_is_begun_when_time_is_over(run: Any) -> None:
    tables, data = run("--parts", "loads", "--arms", SERVE, "--seconds", "0")
    assert list(tables) == ["Start, in seconds", "Notes"]
    late = [f"{SERVE}, osc, one, keys:0.01, {load}: not begun after 0 s" for load in ("capacity", 1.5)]
    assert data["notes"] == late


@pytest.mark.release
def test_every_figure_of_a_small_run(run: Any) -> None:
    steps = [SPARSE, "dllm_serve:delay=0@static+all", SERVE]
    sweep = ("--inputs", "8", "--outputs", "8", "16")
    tables, data = run("--parts", "loads", "lengths", "--arms", *steps, *sweep, "--simulate")
    assert [row[3] for row in tables["Figure 8: what each part adds"]] == [
        "Sparse-dLLM in static batches",
        "keys per head",
        "look_ahead, logit budget",
    ]
    assert [row[:2] for row in tables["Figure 7: throughput by lengths"]] == [[8, 16]] * 3 + [[8, 8]] * 3
    assert all(one["simulated"]["requests"] == one["requests"] for one in data["loads"])


def test_arms_are_read() -> None:
    arm = Arm.parse("dllm_cache:prompt_interval=100,rho=0.5@static+all")
    assert (arm.name, arm.scheduler, arm.bounded) == ("dllm_cache", "static", False)
    assert arm.options == {"prompt_interval": 100, "rho": 0.5}
    assert str(arm) == "dllm_cache:prompt_interval=100,rho=0.5@static+all"
    assert all(Arm.parse(text).options is not None and str(Arm.parse(text)) == text for text in dllm_serve.ARMS)
    for wrong in ("fast_dllm", "@static", "fast_dllm@static+some"):
        with pytest.raises(InputError, match="an arm is RECIPE"):
            Arm.parse(wrong)
    with pytest.raises(UnknownName, match="look_back"):
        Arm.parse("fast_dllm@look_back")


def test_memory_is_read() -> None:
    limits = [MemoryLimit.parse(text) for text in ("24", "48", "card", "keys:8")]
    assert [(limit.gib, limit.keys, limit.rows) for limit in limits] == [
        (24, False, 4096),
        (48, False, 16384),
        (None, False, 16384),
        (8, True, 8192),
    ]
    for wrong in ("", "0", "keys:", "keys:-1", "rows:8", "keys"):
        with pytest.raises(InputError, match="memory is a number of GB"):
            MemoryLimit.parse(wrong)


def test_more_logits_leave_less_for_keys() -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    facts = {"mask_id": 5, "eos_ids": (1,), "pad_id": 0}
    program = compiled(random_model("llada-8b", "cpu", torch.float32, **small, **heads, **facts), "fast_dllm")
    requests = [Request(0.0, 40, 16)]
    bound, every = program.with_logit_rows(16), program.with_logit_rows(256)
    for limit in (MemoryLimit.parse("0.03"), MemoryLimit.parse("keys:0.01")):
        less, more = (Memory.of(one, limit, 256, 16, 4, requests) for one in (every, bound))
        assert less.keys < more.keys
    with pytest.raises(InputError, match="leaves nothing for keys and values"):
        Memory.of(bound, MemoryLimit.parse("0.00001"), 256, 16, 4, requests)


def test_ratios_are_to_the_best_baseline() -> None:
    loads = [
        {"arm": arm, "lengths": "osc", "commits": "one", "memory": "24", "sigma": sigma}
        for arm, sigma in ((SERVE, 1.0), (SERVE, 3.0), (FAST, 4.0), (SPARSE, 6.0))
    ]
    found = _to_baseline(loads, ("sigma",), min, lambda best, own: best / own)
    assert [row[3:] for row in found] == [[SERVE, 2.0, 2.0], [FAST, 4.0, 1.0], [SPARSE, 6.0, 4.0 / 6.0]]


def test_the_method_of_a_load_is_that_of_its_recipe(setup: Setup) -> None:
    trace = synthesise(16, 5.0, 3.0, histories=6)

    def method(recipe: str, decoding: Decoding, followed: Any = None, **options: Any) -> Any:
        program, requests = setup.optimized(recipe, 16, **options), [Request(0.0, 4, 4)]
        test = LoadTest(program, requests, prompts_for(setup.model, requests), decoding, EngineConfig())
        return method_of(test, followed)

    one = Decoding(steps=16)
    fast, late = method("fast_dllm", one), method("dllm_serve", one, delay=1)
    soon = method("dllm_serve", one, delay=0, every=5)
    assert (fast.full_steps, fast.kept, fast.commits, fast.refresh_every) == (1, 1.0, 1, 0)
    assert (late.full_steps, late.kept) == (2, 0.5)
    assert (soon.full_steps, soon.refresh_every) == (1, 5)
    assert method("fast_dllm", Decoding(steps=4)).commits == 4
    assert method("fast_dllm", Decoding(policy=trace.script()), trace).counts == trace.counts
    assert method("fast_dllm", Decoding(threshold=0.9)) is None
    assert method("dllm_cache", one) is None


def test_lengths_are_drawn_from_their_histograms(tmp_path: Path) -> None:
    assert serving_lengths.WORKLOADS.keys() == {"livebench", "burst", "osc"}
    for name, workload in serving_lengths.WORKLOADS.items():
        found = workload.requests(2000, 1)
        assert found == workload.requests(2000, 1) != workload.requests(2000, 2)
        for histogram, drawn in (
            (workload.prompt, [r.prompt for r in found]),
            (workload.tokens, [r.new for r in found]),
        ):
            bins = list(zip(histogram.edges, histogram.edges[1:], histogram.shares, strict=False))
            assert len(bins) == len(histogram.shares) == len(histogram.edges) - 1
            for low, high, share in bins:
                count = sum(low <= length < high for length in drawn)
                assert count / 2000 == pytest.approx(share / sum(histogram.shares), abs=0.04), name
        short = workload.requests(2, 1, tokens="7", scale=1e-4)
        assert [(request.prompt, request.new) for request in short] == [(1, 7), (1, 7)]
    serving_lengths.main(["--out", str(tmp_path / "lengths"), "--count", "5"])
    path = str(tmp_path / "lengths" / "burst.jsonl")
    asked = serving_lengths.WORKLOADS["burst"].requests(5, 0)
    assert Lengths(path).draw(5) == [request.prompt for request in asked]
    assert Lengths(path, "--tokens").draw(5) == [request.new for request in asked]
