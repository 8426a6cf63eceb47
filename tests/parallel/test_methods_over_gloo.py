"""Methods that decide by scores over heads, on a trained model over two processes and gloo."""

from __future__ import annotations

import json

import pytest

import dgraph
from tests.parallel.processes import started

PROMPTS = ["Sort these words: river stone", "Add 12 and 30."]
CASES: list[tuple[str, str, dict[str, object]]] = [
    ("tiny_sdar", "maskkv", {"pairs": 8}),
    ("tiny_llada", "dyllm", {}),
    ("tiny_sdar", "dllm_serve+dyllm+focus", {"tau": 0.97}),
]
SCRIPT = f"""
import json, dgraph, dgraph.parallel
mesh = dgraph.parallel.init("cpu")
for model, recipe, options in json.loads({json.dumps(json.dumps(CASES))}):
    made = dgraph.optimize(model, recipe, mesh=mesh, backend="eager", artifacts=False, **options)
    print(json.dumps(made.generate({PROMPTS}, max_new_tokens=16).texts), flush=True)
"""


@pytest.mark.release
def test_two_processes_answer_as_one_does() -> None:
    with started(2, SCRIPT, environment={"DGRAPH_CHECK_RANKS": "1"}) as processes:
        ended = [processes.ends(rank, within=300) for rank in range(2)]
    for code, _, err in ended:
        assert code == 0, err
    first, second = ([json.loads(line) for line in out.splitlines()] for _, out, _ in ended)
    assert first == second
    for (model, recipe, options), texts in zip(CASES, first, strict=True):
        made = dgraph.optimize(model, recipe, backend="eager", artifacts=False, **options)
        assert made.generate(PROMPTS, max_new_tokens=16).texts == texts, (model, recipe)
