"""`dgraph quantize`: the folder, what is said of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.amounts import first_cases
from tests.cli.conftest import Run
from tests.cli.refusals import refused


def test_a_folder_that_the_commands_take(run: Run, folder: Path) -> None:
    result = run("quantize", folder, "--out", "small-int4", "--weights", "int4:block=1x16,zeros=true")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert result.stdout.startswith(f"14 weights of {folder} as int4:block=1x16,zeros=true: ")
    assert result.stdout.endswith("written to small-int4\n")
    again = run("generate", "small-int4", "--backend", "eager", "-p", "w3 w4", "--max-new-tokens", 8)
    assert again.exit_code == 0, again.stderr


def test_json(run: Run, folder: Path) -> None:
    how = "fp8:lm_head=true"
    result = run("quantize", folder, "--out", "q", "--weights", how, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["model"], found["folder"], found["weights"], found["tensors"]) == (str(folder), "q", how, 15)
    assert 0 < found["bytes_after"] < found["bytes_before"]


@first_cases(1, "method, field, most", [("gptq", "rounded", 14), ("awq", "folds", 6)])
def test_calibrated(run: Run, folder: Path, tmp_path: Path, method: str, field: str, most: int) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "w3 w4 w5"}\n{"prompt": "w6 w7"}\n')
    how = "--calibrated", method, "--prompts", "p.jsonl", "--weights", "int4:block=1x16"
    result = run("quantize", folder, "--out", "q", *how, "--json")
    assert result.exit_code == 0, result.stderr
    assert 0 < json.loads(result.stdout)[field] <= most


def test_refusals(run: Run, folder: Path) -> None:
    refused(run("quantize", folder, "--out", folder), f"{folder} exists already")
    refused(run("quantize", folder, "--out", "q", "--prompts", "p"), "--prompts is what --calibrated measures on")
    refused(run("quantize", folder, "--out", "q", "--count", 5), "--count is what --calibrated measures on")
    refused(run("quantize", folder, "--out", "q", "--dtype", "float32"), "--dtype is what --calibrated measures in")
    refused(run("quantize", folder, "--out", "q", "--dtype", "banana"), "banana")
    refused(run("quantize", folder, "--out", "q", "--calibrated", "gptc"), "unknown method of --calibrated 'gptc'")
    refused(run("quantize", folder, "--out", "q", "--weights", "int3"), "unknown format of weights 'int3'")
    refused(run("quantize", folder, "--out", "q", "--weights", "fp8:zeros=true"), "zero of their own")
    refused(run("quantize", folder, "--out", "q", "--weights", "w8a8-fp8"), "'w8a8-fp8' cannot be written")
