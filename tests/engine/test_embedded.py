"""The engine on trained models: on a GPU steps are CUDA graphs, transitions are recorded, and reports come late."""

from __future__ import annotations

import random

import pytest

import dgraph
from dgraph.runtime.decoding import Decoding

CASES = [
    ("tiny_sdar", "focus", {}),
    ("tiny_sdar", "maskkv", {"max_batched_rows": 128}),  # who waits for rows must not choose keys meanwhile
    ("tiny_llada", "dense", {"max_batched_rows": 300}),
    ("tiny_llada", "fast_dllm", {}),
    ("tiny_llada", "dllm_serve", {"max_batched_rows": 300}),
]
DEVICES = [pytest.param("cpu", marks=pytest.mark.release), pytest.param("cuda", marks=pytest.mark.gpu)]
"""On a CPU `test_models.py` says the same by default, of tiny random models and under more recipes."""
WORDS = ["river", "stone", "apple", "dog", "cat", "zoo", "ant", "bee", "sun", "moon"]
CHOICES = (
    {"threshold": 0.9},
    {"threshold": 0.6, "max_new_tokens": 17},
    {"steps": 8},
    {"policy": "llada2.0", "ignore_eos": True},
    {"temperature": 0.8, "seed": 3},
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("model", "recipe", "settings"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_requests_get_what_they_get_alone(model: str, recipe: str, settings: dict[str, int], device: str) -> None:
    draw = random.Random(1)
    on_gpu = device == "cuda"
    optimized = dgraph.optimize(model, recipe, device=device, backend="inductor" if on_gpu else "eager")
    prompts = [
        "Sort these words: " + " ".join(draw.sample(WORDS, draw.randint(1, 5))) for _ in range(20 if on_gpu else 10)
    ]
    decodings = [Decoding(**{"max_new_tokens": 33, **draw.choice(CHOICES)}) for _ in prompts]
    with optimized.engine(max_sequences=1, max_tokens=256, prefix_cache=False) as engine:
        alone = [response.token_ids for response in engine.generate(prompts, decodings)]
    with optimized.engine(max_sequences=6, max_tokens=256, **settings) as engine:
        for _ in range(2 if on_gpu else 1):  # the second time by what was recorded in the first
            assert [response.token_ids for response in engine.generate(prompts, decodings)] == alone
        assert engine.stats.finished.keys() <= {"stop", "length"}
    for prompt, decoding, ids in zip(prompts, decodings, alone, strict=True):
        if decoding.temperature is None:  # draws also depend on the prompt's place among others
            assert optimized.generate(prompt, decoding).token_ids == [ids]
