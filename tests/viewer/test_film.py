"""Counts of a run, by the page's own script."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from dgraph.viewer import FILES

NODE = shutil.which("node")
STEPS = [
    {"step": 1, "offset": 0, "token_ids": [5, 6, -1, 8], "confidence": [1, 1, 0, 1], "kept": [True] * 4},
    {"step": 2, "offset": 0, "token_ids": [5, 6, 7, 8], "confidence": [1] * 4, "kept": [True] * 4},
]


def counted(tokens: list[tuple[int, int]], seconds: float | None) -> list[dict[str, int]]:
    """The counts after each step. tokens: ids, and the steps that committed them."""
    run: dict[str, Any] = {
        "steps": STEPS,
        "tokens": [{"token": id, "text": str(id), "step": step, "confidence": 1} for id, step in tokens],
        "seconds": seconds,
        "length": 4,
    }
    script = f"""
import {{ Film }} from {json.dumps((FILES / "film.js").as_uri())};
const film = new Film({json.dumps(run)});
console.log(JSON.stringify(film.frames.map((_, index) => film.counts(index))));
"""
    assert NODE is not None
    command = [NODE, "--experimental-default-type=module", "--input-type=module"]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_positions_after_the_end_are_no_tokens() -> None:
    """The response ends after two of its four positions; while it runs, that is not known."""
    last = counted([(5, 1), (6, 1)], 1.0)[-1]
    assert (last["tokens"], last["made"], last["decoded"]) == (2, 2, 4)
    assert counted([(5, 1), (6, 1)], None)[1]["made"] == 3


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_given_tokens_are_no_work_of_a_step() -> None:
    last = counted([(5, 0), (6, 1), (7, 2), (8, 1)], 1.0)[-1]
    assert (last["tokens"], last["made"]) == (4, 3)
