"""The embedded model on a GPU: kernels, compiled regions and CUDA graphs give what the CPU gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import dgraph
from dgraph.runtime.graphs.pool import GraphPool

pytestmark = pytest.mark.gpu

PROMPTS = [
    "Sort these words: river stone cloud maple",
    "Ann has 12 apples. Ann buys 5 more apples. Then Ann finds 4 apples. How many apples does Ann have?",
    "def read_lines(path):",
    "Write the word tiger in capitals 3 times separated by dashes.",
]


@cache
def model(device: str, name: str = "tiny_sdar") -> dgraph.Model:
    return dgraph.load(name, torch.float32, device)


def tokens(
    device: str, recipe: str, name: str = "tiny_sdar", **settings: Any
) -> tuple[list[list[int]], dgraph.CompiledModel]:
    program = dgraph.optimize(model(device, name), recipe, **settings)
    return program.generate(PROMPTS, max_new_tokens=64).token_ids, program


@pytest.mark.parametrize("recipe", ["dense", "focus"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_tokens_are_those_of_the_cpu(recipe: str, backend: str) -> None:
    want, _ = tokens("cpu", recipe, backend="eager")
    got, program = tokens("cuda", recipe, backend=backend)
    assert got == want
    assert program.graph_pool is not None
    assert program.graph_pool.recorded
    assert not program.graph_pool.refused


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *(("tiny_sdar", recipe) for recipe in ("dense", "focus", "dllm_serve")),
        *(("tiny_llada", recipe) for recipe in ("fast_dllm", "dllm_serve", "maskkv")),
    ],
)
def test_graphs_give_what_launches_give(name: str, recipe: str) -> None:
    plain, _ = tokens("cuda", recipe, name, graphs=False)
    graphed, program = tokens("cuda", recipe, name)
    assert graphed == plain
    before = list(program.graph_pool.recorded)  # type: ignore[union-attr]
    again = program.generate(PROMPTS, max_new_tokens=64).token_ids
    assert again == graphed
    assert program.graph_pool.recorded == before, "the second run met no new bucket"  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["dense", "dllm_serve"])
def test_prompts_of_few_rows_are_replayed_and_of_many_are_not(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    prompts = [4 * f"{prompt} " for prompt in PROMPTS]  # a prompt of less than a block is forwarded by its first step

    def run(**settings: Any) -> tuple[list[list[int]], dgraph.CompiledModel]:
        program = dgraph.optimize(model("cuda"), recipe, **settings)
        return program.generate(prompts, max_new_tokens=32).token_ids, program

    plain, _ = run(graphs=False)
    graphed, program = run()
    assert graphed == plain
    assert "prefill" in {name for name, _ in program.graph_pool.recorded}  # type: ignore[union-attr]
    monkeypatch.setattr("dgraph.compiler.compiled_model.GRAPH_ROWS", 1)
    launched, program = run()
    assert launched == plain
    assert "prefill" not in {name for name, _ in program.graph_pool.recorded}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "recipe"), [("tiny_sdar", "focus"), ("tiny_sdar", "dllm_serve"), ("tiny_llada", "dllm_serve")]
)
def test_an_engine_that_has_recorded_records_no_other_stage(name: str, recipe: str) -> None:
    wanted, program = tokens("cuda", recipe, name)
    pool = program.graph_pool
    assert pool is not None
    with program.engine(max_sequences=4, max_tokens=256, record=True) as engine:
        ahead = len(pool.recorded)
        assert [one.token_ids for one in engine.generate(PROMPTS, max_new_tokens=64)] == wanted
    assert {stage for stage, _ in pool.recorded[ahead:]} <= {"transition"}
    assert not pool.refused


def test_the_published_dtype_answers_right() -> None:
    program = dgraph.optimize("tiny_sdar", "focus", device="cuda")
    assert program.spec.dtype == torch.bfloat16
    texts = program.generate(PROMPTS[:2], max_new_tokens=64).texts
    assert texts == ["Sorted: cloud maple river stone #### cloud", "12 + 5 = 17. 17 + 4 = 21. #### 21"]


def test_a_pool_outlives_its_graphs() -> None:
    """The allocator refuses to capture into memory whose last graph is gone, or failed."""
    pool, x = GraphPool(), torch.zeros(4, device="cuda")

    def fails() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        pool.record(fails, warm=False)
    graph = pool.record(lambda: x.add_(1), warm=True)
    del graph
    pool.record(lambda: x.add_(1), warm=False).replay()
    assert x.tolist() == [2.0] * 4, "once to warm up, once replayed"
