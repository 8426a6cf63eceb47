"""`dgraph generate --html`: a page of how each response came about."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dgraph

EAGER = ("--backend", "eager", "--max-new-tokens", "8")
PROMPTS = ("w1 w2 w3", "w9")

Run = Callable[..., Any]


def runs_of(page: Path) -> list[dict[str, Any]]:
    (data,) = re.findall(r'id="runs">(.*?)</script>', page.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = json.loads(data)
    return found


def test_a_page_tells_what_generate_says_and_how_it_came_about(
    run: Run, folder: Path, focus: dgraph.CompiledModel, tmp_path: Path
) -> None:
    done = run("generate", folder, "-p", PROMPTS[0], "-p", PROMPTS[1], *EAGER, "--html", "run.html", "--json")
    assert done.exit_code == 0, done.stderr
    said = json.loads(done.stdout)
    expected = focus.generate(list(PROMPTS), max_new_tokens=8)
    assert (said["texts"], said["token_ids"]) == (expected.texts, expected.token_ids)
    stats = expected.stats
    assert said["tokens"] == stats.tokens <= said["decoded"] <= stats.decoded
    assert said["rows_per_token"] == pytest.approx(stats.kept_rows / said["decoded"])
    assert said["tokens_per_step"] == pytest.approx(said["decoded"] / sum(stats.sequence_steps))
    assert [used["rows"] for used in said["usage"]] == stats.sequence_rows
    runs = runs_of(tmp_path / "run.html")
    assert [found["prompt"] for found in runs] == list(PROMPTS)
    for found, ids, steps in zip(runs, expected.token_ids, stats.sequence_steps, strict=True):
        assert (found["recipe"], found["block_length"]) == ("focus", focus.model.spec.block_length)
        assert [token["token"] for token in found["tokens"]] == ids
        assert [step["step"] for step in found["steps"]] == list(range(1, steps + 1))
        assert all(0 < token["confidence"] <= 1 for token in found["tokens"])
        at = {token["step"] for token in found["tokens"]}
        assert at <= set(range(1, steps + 1))
        for step in found["steps"]:
            for i, (token, text) in enumerate(zip(step["token_ids"], step["tokens"], strict=True)):
                assert (token < 0) == (text is None)
                position = step["offset"] + i
                if position < len(ids):
                    assert (token >= 0) == (found["tokens"][position]["step"] <= step["step"])


def test_a_page_that_cannot_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    for place, reason in (("no/run.html", "there is no folder no"), (tmp_path, "it is a folder")):
        done = run("generate", "no_such_model", "-p", "w1", "--html", place)
        assert done.exit_code == 2
        assert f"--html {place} cannot be written: {reason}" in done.stderr
