"""Prompts of a file, answered by actors on Ray: each one exactly once, and as in one process."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dgraph.cli.app import app
from tests.ray.cluster import processes, wait_for
from tests.ray.conftest import Cluster

pytestmark = [pytest.mark.release, pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
ACTOR = "ray::MapWorker(MapBatches(Generate))"
WORDS = ("river", "stone", "cloud", "maple", "tiger", "lemon", "ocean", "piano")


def generate(data: Path, out: Path, *args: str) -> dict[str, Any]:
    """What the command counts."""
    command = ["generate", "tiny_sdar", "--data", str(data), "--out", str(out), "--backend", "eager", "--json", *args]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return dict(json.loads(result.stdout))


def test_an_actor_that_is_killed_loses_and_repeats_no_answer(cluster: Cluster, tmp_path: Path) -> None:
    draw = random.Random(0)
    data, here, there = (tmp_path / name for name in ("in.jsonl", "here.jsonl", "there.jsonl"))
    lines = [{"prompt": "Sort these words: " + " ".join(draw.sample(WORDS, 3))} for _ in range(500)]
    lines[7] |= {"id": "seven", "max_new_tokens": 4}
    lines[8] |= {"max_new_tokens": 10**9}
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = generate(data, here)
    assert (counts["questions"], counts["answered"], counts["errors"]) == (500, 500, 1)
    answers = here.read_bytes()
    there.write_bytes(answers[: len(answers) // 5])  # as a run leaves it that was killed
    began = there.read_bytes().count(b"\n")

    def kill() -> None:
        wait_for(lambda: there.read_bytes().count(b"\n") > began + 40)
        os.kill(processes(ACTOR)[0], signal.SIGKILL)
        killed.set()

    killed = threading.Event()
    thread = threading.Thread(target=kill)
    thread.start()
    counts = generate(data, there, "--ray", "--replicas", "2", "--max-batch", "8")
    thread.join()
    assert killed.is_set()
    assert (counts["present"], counts["answered"], counts["errors"]) == (
        began,
        500 - began,
        1 - (b"error" in answers[: len(answers) // 5]),
    )
    assert sorted(there.read_text().splitlines()) == sorted(here.read_text().splitlines())
