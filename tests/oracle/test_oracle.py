"""The oracle against transformers, against a decode without a cache, and against the paper's guarantees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.amounts import every_value
from tests.oracle.focus import Trace, generate, ready_columns
from tests.oracle.models import mask_id, random_weights, tiny_config, to_transformers
from tests.oracle.qwen3 import Cache, forward, project

CONFIG = tiny_config()
MASK = mask_id(CONFIG)
WEIGHTS = [random_weights(CONFIG, seed) for seed in range(3)]
DENSE: dict[str, Any] = {"evict": False, "block_cache": "off", "recommit": True}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, MASK, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(prompt: list[int], block_length: int, seed: int = 0, **options: Any) -> Trace:
    options.setdefault("max_new_tokens", 2 * block_length)
    if "steps" not in options:
        options.setdefault("threshold", 0.7)
    return generate(WEIGHTS[seed], CONFIG, prompt, block_length=block_length, mask_id=MASK, **options)


def block_causal(canvas: list[int], size: int, seed: int = 0) -> tuple[Tensor, Cache]:
    """Logits of a whole sequence in one call, without anything kept from before."""
    n = len(canvas)
    cache = Cache(CONFIG, n, WEIGHTS[seed]["model.norm.weight"])
    limits = [min(n, (p // size + 1) * size) for p in range(n)]
    with torch.no_grad():
        h = forward(WEIGHTS[seed], CONFIG, canvas, range(n), limits, cache)
        return project(WEIGHTS[seed], h), cache


def recompute(prompt: list[int], size: int, end: int, threshold: float | None, steps: int | None) -> list[int]:
    """Block diffusion in its simplest form: every step runs the whole sequence."""
    canvas = list(prompt)
    while len(canvas) < end or MASK in canvas:
        canvas += [MASK] * (size - len(canvas) % size)
        step = 0
        while MASK in canvas:
            probability = block_causal(canvas, size)[0].softmax(-1)
            masks = [p for p, token in enumerate(canvas) if token == MASK]
            masks.sort(key=lambda p: (-probability[p].max().item(), p))
            if threshold is not None:
                chosen = [p for p in masks if probability[p].max() > threshold] or masks[:1]
            else:
                assert steps is not None
                chosen = masks[: max(1, size // steps + (1 if step < size % steps else 0))]
            for p in chosen:
                canvas[p] = int(probability[p].argmax())
            step += 1
    return canvas[len(prompt) : end]


def hf_logits(canvas: list[int], size: int, seed: int = 0) -> Tensor:
    block = torch.arange(len(canvas)) // size
    mask = torch.where(block[None, :] <= block[:, None], 0.0, torch.finfo(torch.float32).min)[None, None]
    model = to_transformers(CONFIG, WEIGHTS[seed])
    with torch.no_grad():
        return model(torch.tensor([canvas]), attention_mask={"full_attention": mask}).logits[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_one_bidirectional_block_equals_transformers(seed: int) -> None:
    canvas = [*prompt_of(10, seed), *[MASK] * 6]
    torch.testing.assert_close(block_causal(canvas, 16, seed)[0], hf_logits(canvas, 16, seed), atol=1e-5, rtol=1e-5)


def test_several_blocks_equal_transformers_at_once_and_one_by_one() -> None:
    canvas = [*prompt_of(37), *[MASK] * 3]
    expected = hf_logits(canvas, 8)
    torch.testing.assert_close(block_causal(canvas, 8)[0], expected, atol=1e-5, rtol=1e-5)
    cache = Cache(CONFIG, 40, WEIGHTS[0]["model.norm.weight"])
    for start in range(0, 40, 8):
        span = range(start, start + 8)
        h = forward(WEIGHTS[0], CONFIG, canvas[start : start + 8], span, [start + 8] * 8, cache)
        # The cache changes the shapes of the products, and with them the rounding.
        torch.testing.assert_close(project(WEIGHTS[0], h), expected[start : start + 8], atol=1e-4, rtol=1e-4)


def test_a_read_of_something_never_written_is_an_error() -> None:
    cache = Cache(CONFIG, 8, WEIGHTS[0]["model.norm.weight"])
    with pytest.raises(AssertionError, match=r"layer 0 reads positions \[0, 1\]"):
        forward(WEIGHTS[0], CONFIG, [1, 2], [2, 3], [4, 4], cache)


@every_value(
    ("policy", [{"threshold": 0.5}, {"threshold": 0.8}, {"steps": 5}, {"steps": 100}]),
    ("size, length", [(8, 0), (8, 5), (8, 16), (8, 21), (16, 19), (32, 37), (64, 70)]),
)
def test_dense_equals_full_recompute(size: int, length: int, policy: dict[str, Any]) -> None:
    new = 19 if size < 32 else 30
    prompt = prompt_of(length)
    trace = run(prompt, size, max_new_tokens=new, **policy, **DENSE)
    expected = recompute(prompt, size, length + new, policy.get("threshold"), policy.get("steps"))
    assert trace.tokens == expected
    assert len(trace.tokens) == new


@pytest.mark.parametrize("threshold", [0.5, 0.9])
def test_the_random_models_decode_in_steps_of_one_and_of_many(threshold: float) -> None:
    yields: Counter[int] = Counter()
    confidence: list[float] = []
    for seed in range(3):
        trace = run(prompt_of(37, seed), 32, seed, threshold=threshold, **DENSE)
        yields.update(len(step.committed) for step in trace.steps)
        confidence += [c for step in trace.steps for _, c in step.confidence.values()]
        assert len(set(trace.tokens)) >= 10
    assert yields[1] >= 3
    assert sum(n for size, n in yields.items() if size > 1) >= 3
    assert len(yields) >= 4
    assert min(confidence) < 0.3
    assert max(confidence) > 0.95


def check_invariants(trace: Trace, evict: bool, signal: str, select: str, hides: bool = True) -> None:
    """What holds in every step, whatever the options. hides: no row after the last kept one is seen."""
    known: set[int] = set()
    for step in trace.steps:
        p, m, s = set(step.positions), set(step.masked), set(step.kept)
        assert m <= p
        assert step.positions == sorted(p)
        assert p - m <= s <= p
        assert step.limit == max(s if hides else p) + 1
        assert step.committed
        assert {position for position, _ in step.committed} <= s & m
        assert set(step.confidence) == s & m
        assert step.reached >= max(s)
        assert not known & m
        known |= {position for position, _ in step.committed}
        if evict and select != "random":
            total = sum(step.score)
            expected = CONFIG.heads * len(m) * (1 if select == "top" else -1)
            assert total == pytest.approx(expected if signal == "importance" else 0.0, abs=1e-3)
            assert all(x == 0 for x, q in zip(step.score, step.positions, strict=True) if q not in m)


@every_value(
    ("size", [8, 16, 32, 64]),
    (
        "options",
        [
            {},
            {"alpha": 1.0, "block_cache": "dc"},
            {"alpha": 1.2, "block_cache": "off", "signal": "importance"},
            {"alpha": 2.5, "recommit": False, "after": 2},
            {"signal": "importance", "after": 0},
            {"keep": 2, "select": "bottom", "signal": "importance"},
            {"keep": 4, "select": "random"},
            {"steps": 7, "block_cache": "dc", "recommit": False},
            {"threshold": 0.5, "after": 3},
            {"full_steps": 1, "keep": 2},
        ],
    ),
)
def test_focus_invariants(size: int, options: dict[str, Any]) -> None:
    options = {"full_steps": 0, **options}
    if options.get("select") == "random":
        options["noise"] = lambda step, positions: torch.rand(
            len(positions), generator=torch.Generator().manual_seed(step)
        )
    trace = run(prompt_of(size + 5), size, seed=1, **options)
    hides = options["full_steps"] == 0
    check_invariants(trace, True, options.get("signal", "delta"), options.get("select", "top"), hides)
    assert len(trace.tokens) == 2 * size
    assert size == 8 or any(len(step.kept) < len(step.positions) for step in trace.steps)


def test_committed_keys_and_values_are_exact_with_refresh_only() -> None:
    """The commit forward makes up for everything that eviction and delayed caching left behind."""
    errors = {}
    for recommit in (True, False):
        trace = run(prompt_of(21), 16, max_new_tokens=40, recommit=recommit)
        assert trace.committed_end == 48
        _, exact = block_causal(trace.canvas, 16)
        pairs = [
            (mine, theirs[: trace.committed_end])
            for layer in range(CONFIG.layers)
            for mine, theirs in zip(trace.kv(layer), exact.read(layer, 64), strict=True)
        ]
        errors[recommit] = max((a - b).abs().max().item() for a, b in pairs)
    assert errors[True] < 1e-4
    assert errors[False] > 1e-2


@pytest.mark.parametrize("size", [8, 32])
def test_infinite_alpha_is_dense(size: int) -> None:
    prompt = prompt_of(size + 3)
    dense = run(prompt, size, **DENSE)
    focus = run(prompt, size, alpha=float("inf"), block_cache="off")
    assert focus.tokens == dense.tokens
    for a, b in zip(focus.steps, dense.steps, strict=True):
        assert (a.kept, a.committed, a.confidence, a.limit) == (b.kept, b.committed, b.confidence, b.limit)


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_focus_runs_fewer_rows_than_dense(size: int) -> None:
    rows = {"dense": 0, "cached": 0, "P": 0, "S": 0}
    for seed in range(3):
        prompt = prompt_of(size + 3, seed)
        focus, dense = run(prompt, size, seed), run(prompt, size, seed, **DENSE)
        rows["dense"] += sum(len(step.kept) for step in dense.steps)
        cached = run(prompt, size, seed, evict=False)
        rows["cached"] += sum(len(step.kept) for step in cached.steps)
        rows["P"] += sum(len(step.positions) for step in focus.steps)
        rows["S"] += sum(len(step.kept) for step in focus.steps)
        check_invariants(dense, False, "", "")
        check_invariants(cached, False, "", "")
    assert rows["cached"] < rows["dense"]
    assert rows["S"] < rows["P"]
    assert rows["S"] < rows["dense"]


def test_the_average_is_the_mean_yield_of_the_block_so_far() -> None:
    yields: list[int] = []
    for before, step in zip([None, *(t := run(prompt_of(5), 32)).steps], t.steps, strict=False):
        if before is None or before.start != step.start:
            yields = []
        expected = sum(yields) / len(yields) if yields else 1.0
        assert step.average == pytest.approx(expected)
        yields.append(len(step.committed))


def test_cached_rows_leave_the_processing_set_one_step_after_they_decode() -> None:
    for rule in ("dc", "dc+"):
        trace = run(prompt_of(19), 16, block_cache=rule)
        for before, step in zip(trace.steps, trace.steps[1:], strict=False):
            if before.start == step.start:
                size = range(step.start, step.start + 16)
                decoded = [p not in before.masked for p in size]
                gone = {step.start + i for i in ready_columns(decoded, rule)}  # type: ignore[arg-type]
                assert set(step.positions) == {p for p in before.positions if p >= step.start} - gone


def test_commit_rows_ride_in_the_next_blocks_first_step() -> None:
    trace = run(prompt_of(19), 16, max_new_tokens=40)
    firsts = [s for i, s in enumerate(trace.steps) if i and s.start != trace.steps[i - 1].start]
    assert [s.start for s in firsts] == [32, 48]
    assert all([p for p in s.positions if p < s.start] == list(range(s.start - 16, s.start)) for s in firsts)
    others = [s for s in trace.steps if s not in firsts]
    assert all(min(s.positions) >= s.start for s in others)


@pytest.mark.parametrize("options", [DENSE, {}], ids=["dense", "focus"])
def test_a_stop_token_cuts_the_output_and_ends_the_decode_early(options: dict[str, Any]) -> None:
    free = run(prompt_of(19), 16, max_new_tokens=64, threshold=0.5, **options)
    cut_short = 0
    for eos in set(free.tokens):
        trace = run(prompt_of(19), 16, max_new_tokens=64, threshold=0.5, eos_ids=[eos], **options)
        first = free.tokens.index(eos)
        assert trace.tokens == free.tokens[:first]
        assert len(trace.steps) <= len(free.steps)
        assert len(trace.canvas) == (19 + first) // 16 * 16 + 16  # no block after the one with the stop token
        cut_short += MASK in trace.canvas
    assert cut_short > 0


def test_a_stop_token_in_the_prompt_stops_nothing() -> None:
    prompt = prompt_of(19)  # the last three are in the first decoded block
    free = run(prompt, 16)
    eos = prompt[17]
    expected = free.tokens[: free.tokens.index(eos)] if eos in free.tokens else free.tokens
    assert len(expected) > 0
    assert run(prompt, 16, eos_ids=[eos]).tokens == expected


def test_bad_arguments_are_refused() -> None:
    for options in ({"steps": 3, "threshold": 0.5}, {"after": 0}, {"after": 4}, {"select": "random"}):
        with pytest.raises(ValueError, match=r"steps|after|noise"):
            run(prompt_of(5), 8, **options)
    with pytest.raises(ValueError, match="mask id"):
        run([1, MASK], 8)
    assert run(prompt_of(5), 8, max_new_tokens=0).tokens == []
