"""Random schedules on tiny random models of every family, by every recipe: each request gets what it gets alone."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from dgraph import optimize
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.families import families
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Canvas
from dgraph.testing import TinyModel, models, prompts
from tests.amounts import drawn
from tests.engine.alone import bytes_of
from tests.engine.driven import Asked, Turns, alone, filled
from tests.engine.plain import PLAIN, infilled

Named = tuple[str, dict[str, Any]]
BOTH: list[Named] = [("focus", {}), ("dyllm", {}), ("maskkv", {"pairs": 6}), ("dllm_serve", {})]
METHODS: dict[str, list[Named]] = {
    "sdar": [*BOTH, ("dllm_serve+dyllm+focus", {"tau": 0.8})],
    "llada": [*BOTH, ("fast_dllm", {}), ("maskkv+dyllm+focus", {"pairs": 6, "tau": 0.8})],
    "dream": [("focus", {}), ("dllm_serve", {})],
    "fast_dllm_v2": [("focus", {}), ("dyllm+focus", {"tau": 0.8}), ("maskkv", {"pairs": 6}), ("dllm_serve", {})],
    "nemotron": [("maskkv", {"pairs": 6}), ("sparse_dllm", {})],
}
"""What other families than these are tested with is `dense`."""

FAST: Named = ("fast_dllm", {"first": "policy"})
DENSE: Named = ("dense", {})
ALL = 999
LIMITS: dict[str, list[tuple[Named, Named]]] = {
    "sdar": [
        (("focus", {"alpha": math.inf, "block_cache": "off"}), DENSE),
        (("dyllm", {"tau": 1.01}), DENSE),
        (("maskkv", {"pairs": ALL}), DENSE),
        (("dllm_serve", {"ratio": 1.0}), DENSE),
    ],
    "llada": [
        (("fast_dllm", {"every": 1, "first": "policy"}), DENSE),
        (("focus", {"alpha": math.inf, "block_cache": "off"}), FAST),
        (("dllm_serve", {"ratio": 1.0, "delay": 0}), FAST),
    ],
    "fast_dllm_v2": [
        (("focus", {"alpha": math.inf, "block_cache": "off"}), DENSE),
        (("dllm_serve", {"ratio": 1.0}), DENSE),
    ],
    "nemotron": [(("maskkv", {"pairs": ALL}), DENSE)],
}
"""Settings at which a method changes nothing, and what it is then."""

RULES: list[dict[str, Any]] = [
    {"threshold": 0.3},
    {"threshold": 0.05},
    {"steps": 3},
    {"policy": "sequential"},
    {"steps": 4, "temperature": 1.0},
    {"threshold": 0.2, "temperature": 0.7, "top_k": 7},
]


def served(
    tiny: TinyModel, made: CompiledModel, against: CompiledModel, asked: list[Asked], engine: dict[str, Any]
) -> None:
    """Serve a schedule, and compare every request with what it gets alone from another program."""
    turns = Turns(made._session, asked, prepare=made._prepare, **engine)
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        if told.finish != "cancelled":
            told.check_as(
                alone(
                    (str(tiny), str(against.recipe)),
                    against._session,
                    one,
                    prepare=against._prepare,
                    max_tokens=engine["max_tokens"],
                )
            )


@functools.cache
def texts(tiny: TinyModel) -> list[tuple[int, ...]]:
    """Prompts; some begin like others."""
    found = [tuple(prompt) for prompt in prompts(tiny)]
    return [*found, (*found[2][: tiny.model.spec.block_length], *found[0])]


@pytest.mark.parametrize(
    ("family", "canvas", "pages", "temperature"),
    [
        ("nemotron", [*[None] * 7, 20, 21, 22, *[None] * 5, 30, 31, 32], 8, 0.0),
        ("fast_dllm_v2", [*[None] * 4, 20, 21, *[None] * 6, 30, 31, *[None] * 6, 40], 7, 1.0),
    ],
)
def test_who_gives_way_with_tokens_fixed_ahead_says_the_same_later(
    family: str, canvas: list[int | None], pages: int, temperature: float
) -> None:
    """A model of two modes begins a block after tokens that are fixed behind a prompt, and with them behind a block."""
    model = families()[family].random(0)
    made = optimize(replace(model, spec=replace(model.spec, eos_ids=())), "dense", backend="eager")
    decoding = Decoding(max_new_tokens=40, threshold=0.6, temperature=temperature)
    asked = [Asked((n, n + 1, n + 2, n + 3), decoding, canvas=tuple(canvas)) for n in (5, 9)]
    kv, engine = made._session.kv, {"max_tokens": 128, "max_mixed_rows": 0, "prepare": made._prepare}
    size = pages * kv.page_size * kv.position_bytes
    turns = Turns(made._session, asked, max_sequences=2, pages="block", kv_bytes=size, **engine)
    told = turns.run()
    assert turns.core.totals.preempted > 0
    for one, each in zip(told, asked, strict=True):
        one.check_as(alone(family, made._session, each, **engine))


@pytest.mark.parametrize(
    ("family", "recipe", "pages"),
    [("sdar", "dllm_serve", 9), ("sdar", "dllm_serve+dyllm", 13), ("fast_dllm_v2", "sparse_dllm", 9)],
)
def test_keys_that_are_chosen_in_pages_share_these_and_grow(family: str, recipe: str, pages: int) -> None:
    """Prompts that begin alike share pages, and who gives way for want of pages says the same later."""
    model = families()[family].random(0)
    made = optimize(replace(model, spec=replace(model.spec, eos_ids=())), recipe, backend="eager")
    block, decoding = made.spec.block_length, Decoding(max_new_tokens=40, threshold=0.6)
    begin = tuple(range(4, 4 + 2 * block + 1))
    asked = [Asked((*begin, 40 + n), decoding, turn=2 * n) for n in range(3)]
    engine = {"max_tokens": 128, "max_mixed_rows": 0, "prepare": made._prepare, "usual_prompt": len(begin)}
    size = bytes_of(made._session, pages, 3, 128)
    turns = Turns(made._session, asked, max_sequences=3, pages="block", prefix_cache=True, kv_bytes=size, **engine)
    told = turns.run()
    assert turns.core.totals.preempted > 0
    assert turns.core.prefix is not None
    assert turns.core.prefix.found > 0
    for one, each in zip(told, asked, strict=True):
        one.check_as(alone(f"{family} {recipe}", made._session, each, **engine))


@pytest.mark.parametrize("family", ["sdar", "llada"])
def test_who_goes_under_a_gate_leaves_others_what_they_get(family: str) -> None:
    """What a gate keeps of rows is not found by who takes the pages; requests wait for pages or for a ring."""
    model = families()[family].random(0)
    model = replace(model, spec=replace(model.spec, eos_ids=()))
    made = optimize(model, "dllm_serve+dyllm+focus", backend="eager", tau=0.8)
    decoding = Decoding(max_new_tokens=40, threshold=0.6)
    asked = [Asked(tuple(range(n, n + 9)), decoding, cancel=6 if n == 10 else None) for n in (4, 10, 30, 50)]
    engine = {"max_tokens": 128, "max_mixed_rows": 0, "prepare": made._prepare}
    size = bytes_of(made._session, 11 if family == "sdar" else 7, 3, 128)
    turns = Turns(made._session, asked, max_sequences=3, pages="block", kv_bytes=size, **engine)
    told = turns.run()
    assert turns.core.totals.preempted == 0
    assert [one.finish for one in told] == ["length", "cancelled", "length", "length"]
    for one, each in zip(told, asked, strict=True):
        if one.finish != "cancelled":
            one.check_as(alone(f"{family} under a gate", made._session, each, **engine))


@st.composite
def schedules(draw: st.DrawFn, tiny: TinyModel, hot: bool = True) -> list[Asked]:
    rules = RULES if hot else [rule for rule in RULES if "temperature" not in rule]
    block = tiny.model.spec.block_length
    decoding = st.builds(
        lambda new, rule, seed, ignore: Decoding(max_new_tokens=new, seed=seed, ignore_eos=ignore, **rule),
        st.sampled_from([2, block, block + 3]),
        st.sampled_from(rules),
        st.integers(0, 1),
        st.booleans(),
    )
    one = st.builds(
        Asked,
        ids=st.sampled_from(texts(tiny)),
        decoding=decoding,
        turn=st.integers(0, 9),
        priority=st.integers(0, 1),
        cancel=st.none() | st.none() | st.integers(0, 9),
        draft=st.booleans(),
    )
    vocab = min(tiny.model.spec.vocab, tiny.model.spec.mask_id)
    return [filled(draw, each, block, vocab) for each in draw(st.lists(one, min_size=3, max_size=5))]


@st.composite
def engines(draw: st.DrawFn, tiny: TinyModel, made: CompiledModel) -> dict[str, Any]:
    spec = tiny.model.spec
    block = spec.block_length
    longest = 4 * block + 3
    rows = [2 * block, 3 * block] if spec.attention == "block_causal" else [longest, longest + block]
    pages, slots = draw(st.sampled_from([5, 7, 40])), draw(st.integers(2, 4))
    return {
        "max_sequences": slots,
        "max_tokens": longest,
        "max_batched_rows": draw(st.sampled_from([*rows, 400])),
        "max_mixed_rows": draw(st.sampled_from([None, 0, block])),
        "kv_bytes": bytes_of(made._session, pages, slots, longest),
        "scheduler": draw(st.sampled_from(["look_ahead", "fcfs", "prefill_first", "static"])),
        "pages": draw(st.sampled_from(["block", "life"])),
        "prefix_cache": draw(st.booleans()),
    }


ROUNDED: dict[str, list[Named]] = {
    "sdar": [("focus", {"kv_dtype": "fp8"}), ("dllm_serve", {"kv_dtype": "fp8"})],
    "llada": [("maskkv", {"pairs": 6, "kv_dtype": "fp8"})],
    "dream": [("dyllm", {"kv_dtype": "fp8"}), ("dllm_serve+dyllm", {"tau": 0.8, "kv_dtype": "fp8"})],
}
"""The same with keys and values in float8."""

CASES = [(t, *case) for t in models() for case in [DENSE, *METHODS.get(str(t), []), *ROUNDED.get(str(t), [])]]
SAME = [(tiny, mine, other) for tiny in models() for mine, other in LIMITS.get(str(tiny), [])]


@pytest.mark.parametrize(
    ("tiny", "recipe", "options"), CASES, ids=[f"{t}-{r}-{o.get('kv_dtype', '')}" for t, r, o in CASES]
)
@drawn(2, 4, data=st.data())
def test_every_request_gets_what_it_gets_alone(
    tiny: TinyModel, recipe: str, options: dict[str, Any], data: st.DataObject
) -> None:
    made = tiny.optimized(recipe, **options)
    served(tiny, made, made, data.draw(schedules(tiny)), data.draw(engines(tiny, made)))


@pytest.mark.parametrize(("tiny", "mine", "other"), SAME, ids=[f"{t}-{m[0]}" for t, m, _ in SAME])
@drawn(2, 4, data=st.data())
def test_what_changes_nothing_alone_changes_nothing_in_an_engine(
    tiny: TinyModel, mine: Named, other: Named, data: st.DataObject
) -> None:
    (recipe, options), (dense, settings) = mine, other
    made = tiny.optimized(recipe, **options)
    served(
        tiny, made, tiny.optimized(dense, **settings), data.draw(schedules(tiny, False)), data.draw(engines(tiny, made))
    )


@pytest.mark.parametrize("tiny", PLAIN, ids=str)
def test_infilling_is_what_a_plain_loop_does(tiny: TinyModel) -> None:
    block, new = tiny.model.spec.block_length, 3 * tiny.model.spec.block_length
    some: Canvas = (None, 5, None, None, 7, 8)
    whole: Canvas = (*[None] * (block - 2), *range(4, 4 + 2 * block - 1))
    made = tiny.optimized("dense")
    for prompt, canvas in zip(prompts(tiny), (some, whole, (4, 5, *whole)), strict=True):
        canvas = canvas[:new]
        decoding = Decoding(max_new_tokens=new, threshold=0.3, ignore_eos=True)
        found = made.generate(input_ids=[prompt], decoding=decoding, canvas=[canvas])
        assert found.token_ids == [infilled(tiny, prompt, canvas, new, 0.3)]
