"""`dgraph recommend`: its choice, the evidence beside it, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dgraph
from dgraph.cli import recommend
from dgraph.recipes import evidence
from tests.cli.conftest import Run
from tests.cli.refusals import refused


def test_a_recipe_with_its_evidence(run: Run, folder: Path) -> None:
    result = run("recommend", folder, "--batch", 2, "--prompt", 64, "--max-new-tokens", 32)
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["recipe", "focus"] in lines
    assert ["rows", "per", "token", "3.68"] in lines
    assert "benchmarks/results/hard.md" in result.stdout
    assert "no time was measured" in result.stdout
    assert result.stdout.endswith(f"dgraph serve {folder} --recipe focus --max-sequences 2\n")


def test_less_memory_takes_smaller_formats(run: Run, folder: Path) -> None:
    sizes = {}
    for memory in ("64M", "900K"):
        made = run("recommend", folder, "--batch", 8, "--memory", memory, "--json")
        assert made.exit_code == 0, made.stderr
        sizes[memory] = json.loads(made.stdout)
    assert (sizes["64M"]["weights"], sizes["64M"]["kv_dtype"]) == (None, None)
    assert sizes["64M"]["fits"] >= 8
    small = sizes["900K"]
    assert small["kv_dtype"] == "fp8" or small["weights"] is not None
    assert small["memory"]["memory"] == 900 << 10
    assert small["command"].count(f"--kv-dtype {small['kv_dtype']}") == 1


def test_nothing_measured_is_said(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "speeds", tuple)
    result = run("recommend", folder)
    assert ["recipe", "dense"] in [line.split() for line in result.stdout.splitlines()]
    assert "nothing was measured of block_causal models on cpu" in result.stdout


def test_a_recipe_that_loses_answers_is_left_out(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [arm for arm in evidence.speeds() if arm.record == "serving/sdar_recipes" and arm.sequences == 16]
    monkeypatch.setattr(evidence, "nearest", lambda *_: sorted(found, key=lambda arm: arm.recipe != "dllm_serve+focus"))
    recipe, _, why = recommend._recipe(dgraph.load(folder).spec, "cuda", 16, 288)
    assert recipe != "dllm_serve+focus"
    assert any(text.startswith("dllm_serve+focus is left out, which loses right answers: -0.8 points") for text in why)


def test_what_cannot_be_is_refused(run: Run, folder: Path) -> None:
    refused(run("recommend", folder, "--prompt", 400), "--prompt 400", "256")
    refused(run("recommend", folder, "--memory", "much"), "--memory takes")
