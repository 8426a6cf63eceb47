"""`dgraph bench`: a table, a file and a plot; what it refuses; what is left after Ctrl-C."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.bench.measure import Bench
from dgraph.bench.traces import Trace, read_trace, synthesise
from dgraph.cli import workload
from dgraph.compiler import base_graph as captured
from dgraph.families import families
from dgraph.frontend.frozen import capture_or_load
from dgraph.models import shapes
from dgraph.runtime.decoding import Decoding
from tests.amounts import first_cases
from tests.cli.conftest import Run
from tests.cli.refusals import refused

EAGER = ("--backend", "eager", "--repeat", 1, "--batch", 2, "--tokens", 16, "--prompt", 9)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(autouse=True)
def arms_share_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is most of their time here, and passes leave it as it is."""
    once = functools.cache(lambda module, spec, prefix: capture_or_load(module, spec, prefix, None))
    monkeypatch.setattr(captured, "capture_or_load", lambda module, spec, prefix, *_: once(module, spec, prefix))


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    family, keys = shapes.SHAPES["sdar-8b"]
    monkeypatch.setitem(shapes.SHAPES, "tiny", (family, {**keys, **SMALL}))
    return "tiny"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    synthesise(8, 5.0, 3.0, histories=4).write(file)
    return file


@pytest.mark.parametrize(
    ("family", "given", "chosen", "written"),
    [
        ("sdar", {}, {"steps": 15}, {"steps": 15}),
        ("sdar", {"threshold": 0.7}, {"threshold": 0.7}, {"threshold": 0.7}),
        ("diffusion_gemma", {}, {"policy": "diffusion_gemma"}, {"policy": "diffusion_gemma"}),
        ("diffusion_gemma", {"steps": 4}, {"steps": 4}, {"steps": 4}),
    ],
)
def test_how_tokens_are_committed_where_nobody_said(
    family: str, given: dict[str, Any], chosen: dict[str, Any], written: dict[str, Any]
) -> None:
    asked, trace = workload.commits_of(None, given.get("steps"), given.get("threshold"), 8, None)
    assert trace is None
    decoding = workload.decided(asked, families()[family].random(0).spec)
    assert decoding == Decoding(max_new_tokens=8, **chosen)
    assert workload.written_commits(decoding) == written


def test_a_random_shape_writes_json_and_a_plot(run: Run, tiny_shape: str, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = ("--json", "out.json", "--plot", "out.png")
    result = run(
        "bench", "--shape", tiny_shape, "--layers", 2, "--against", "dense", "--commits", trace, *EAGER, *files
    )
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert "rows per token of its blocks: 5.00 dense, 3.00 kept" in result.stdout
    header = next(line for line in result.stdout.splitlines() if line.startswith("arm"))
    assert header.split("  ")[0] == "arm"
    assert "ratio" in header
    found = json.loads((tmp_path / "out.json").read_text())
    dense, focus = found["arms"]
    assert [dense["label"], focus["label"]] == ["dense", "focus, ablation=select=scripted"]
    assert dense["committed"] == focus["committed"]
    assert found["setting"]["model"]["layers"] == 2
    assert min(arm["floor_ms"]["total"] for arm in (dense, focus)) > 0
    assert (dense["profile"] is None) == (not torch.cuda.is_available())
    assert found["failed"] == {}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.release
def test_an_ablation_has_a_row_per_part(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("bench", "--model", folder, "--random-weights", "--ablation", *EAGER, "--steps", 4, "--json", "a.json")
    assert result.exit_code == 0, result.stderr
    labels = [arm["label"] for arm in json.loads((tmp_path / "a.json").read_text())["arms"]]
    assert labels[0] == "focus"
    assert {"without FuseProjections", "without EvictTokens", "block_cache=off", "recommit=false"} <= set(labels)
    for label in labels:
        assert any(line.startswith(f"{label}  ") for line in result.stdout.splitlines()), label


def test_what_was_measured_before_ctrl_c_is_printed(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Bench.__call__

    def interrupted(self: Bench, arm: Any, tell: Any = None) -> Any:
        if arm.label != "dense":
            raise KeyboardInterrupt
        return measure(self, arm, tell)

    monkeypatch.setattr(Bench, "__call__", interrupted)
    result = run("bench", "--model", folder, "--against", "dense", *EAGER, "--steps", 4, "--json", "out.json")
    assert result.exit_code == 130
    assert "\ndense  " in result.stdout
    assert [arm["label"] for arm in json.loads((tmp_path / "out.json").read_text())["arms"]] == ["dense"]


def test_an_arm_that_runs_out_of_memory_is_told(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = Bench.__call__

    def small(self: Bench, arm: Any, tell: Any = None) -> Any:
        if arm.label == "dense":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
        return measure(self, arm, tell)

    monkeypatch.setattr(Bench, "__call__", small)
    result = run("bench", "--model", folder, "--against", "dense", *EAGER, "--steps", 4)
    assert result.exit_code == 0
    assert "dense was not measured: CUDA out of memory. Tried to allocate 20 GiB." in result.stderr
    assert "\nfocus  " in result.stdout


@first_cases(1, "shift", [1, 0])
def test_record(run: Run, folder: Path, tmp_path: Path, shift: int) -> None:
    """Of a model whose blocks begin with a known token, too, which takes a step less for them."""
    (tmp_path / "prompts.txt").write_text("w3 w4 w5\nw6 w7\n")
    given = ("--prompt-file", "prompts.txt", "--tokens", 24, "--backend", "eager", "--threshold", 1.0)
    given += ("--weights", "int8", *(("--fact", "logit_shift=1", "--fact", "next_token=true") if shift else ()))
    result = run("bench", "record", "--model", folder, *given, "--out", "trace.json", "--json")
    assert result.exit_code == 0, result.stderr
    found: Trace = read_trace(tmp_path / "trace.json")
    facts = json.loads(result.stdout)
    assert (facts["block"], facts["blocks"]) == (8, len(found.histories))
    dense = facts["dense_rows_per_token"]
    assert dense == found.redundancy().dense == 9.0 - shift, "a token per step, and the commit"
    assert facts["kept_rows_per_token"] == found.redundancy().kept
    assert "weights=int8" in found.source


BAD = [
    ((), ("give either --model or --shape",)),
    (("--model", "x", "--shape", "y"), ("not both and not neither",)),
    (("--model", "tiny_sdra"), ("unknown model 'tiny_sdra'. Did you mean 'tiny_sdar'",)),
    (("--shape", "sdar-8"), ("unknown shape 'sdar-8'. Did you mean 'sdar-8b'",)),
    (("-r", "focsu"), ("unknown recipe 'focsu'. Did you mean 'focus'",)),
    (("--against", "dens"), ("unknown recipe 'dens'. Did you mean 'dense'",)),
    (("-o", "alpha=0.5"), ("alpha must be at least 1",)),
    (("-o", "ablation=select=scripted"), ("give --commits with a trace that has kept columns",)),
    (("--layers", 2), ("--layers is for --shape",)),
    (("--batch", 0), ("--batch must be at least 1, got 0",)),
    (("--tokens", 0), ("--tokens must be at least 1, got 0",)),
    (("--repeat", 0), ("--repeat must be at least 1, got 0",)),
    (("--block", 0), ("--block must be at least 1, got 0",)),
    (("--steps", 0), ("at least 1, got 0",)),
    (("--threshold", 2), ("threshold is a probability in (0, 1], got 2",)),
    (("--steps", 3, "--threshold", 0.5), ("give one of --commits, --steps and --threshold",)),
    (("--prompt", "long"), ("--prompt takes a number of tokens, uniform:LOW-HIGH", "got 'long'")),
    (("--prompt", "uniform:9-5"), ("needs LOW <= HIGH",)),
    (("--prompt", 5000), ("more than the 256 of sdar", "shorten the prompt")),
    (("--commits", "missing.json"), ("the trace missing.json cannot be read",)),
    (("--buckets", "some"), ("buckets must be 'exact'", "got 'some'")),
    (("--backend", "indcutor"), ("backend must be one of 'inductor', 'eager', 'auto', got 'indcutor'",)),
    (("--dtype", "int8"), ("unknown dtype 'int8'",)),
    (("--device", "cuda:99"), ("device 'cuda:99' cannot be used",)),
    (("--json", "no/such/out.json"), ("--json no/such/out.json cannot be written",)),
    (("--plot", "no/such/out.png"), ("--plot no/such/out.png cannot be written",)),
    (("--plot", "out.pnq"), ("--plot out.pnq cannot be written: 'pnq' is not one of the formats", "png")),
]


@pytest.mark.parametrize(("args", "parts"), BAD, ids=[" ".join(map(str, a)) or "nothing" for a, _ in BAD])
def test_bench_refuses(run: Run, folder: Path, args: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    model = () if not args or "--model" in args or "--shape" in args else ("--model", folder)
    refused(run("bench", *model, *args), *parts)


def test_bench_refuses_a_trace_of_another_block(run: Run, folder: Path, trace: Path) -> None:
    refused(run("bench", "--model", folder, "--commits", trace, "--block", 16), "a trace of blocks of 8; leave it out")


RECORD = [
    ((), ("--out is missing",)),
    (("--out", "no/such/trace.json"), ("--out no/such/trace.json cannot be written",)),
    (("--out", "."), ("--out . cannot be written: it is a folder",)),
    (("--out", "t.json", "--threshold", 0), ("threshold is a probability in (0, 1], got 0",)),
    (("--out", "t.json", "--prompts", 0), ("--prompts must be at least 1",)),
    (("--out", "t.json"), ("comes with no held-out prompts",)),
    (("--out", "t.json", "-o", "alpha=0"), ("alpha must be at least 1",)),
]


@pytest.mark.parametrize(("args", "parts"), RECORD, ids=[" ".join(map(str, a)) or "nothing" for a, _ in RECORD])
def test_record_refuses(run: Run, folder: Path, args: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    refused(run("bench", "record", "--model", folder, *args), *parts)


@pytest.mark.parametrize("command", [("bench",), ("bench", "record")])
def test_help_has_an_example(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"dgraph {' '.join(command)} --model" in " ".join(result.stdout.split())
