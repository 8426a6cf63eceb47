"""`CompiledModel.engine`: responses as `generate` gives them, settings of each request, and whose the model is."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import dgraph
from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.engine import EngineClosed
from dgraph.engine.io.events import Event
from dgraph.errors import InputError, UnknownName
from dgraph.lowering.executor import LoweredProgram
from dgraph.runtime.decoding import Decoding
from dgraph.testing import models
from tests.amounts import first_cases
from tests.compiled import compiled

PROMPTS = ["Sort: d b a c", "Sort: b a", "Sort: d b a c"]


@pytest.fixture(
    scope="module",
    params=[("tiny_sdar", "focus"), pytest.param(("tiny_llada", "fast_dllm"), marks=pytest.mark.release)],
    ids=lambda p: p[0],
)
def made(request: pytest.FixtureRequest) -> CompiledModel:
    model, recipe = request.param
    return compiled(model, recipe)


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 0.7, "stop": ("c", "\n"), "ignore_eos": True},
        {"threshold": 0.9, "temperature": 0.6, "top_k": 8, "seed": 1},
    ],
)
def test_an_engine_says_what_generate_says(made: CompiledModel, settings: dict[str, Any]) -> None:
    wanted = made.generate(PROMPTS, max_new_tokens=24, **settings)
    with made.engine(max_sequences=2, max_tokens=160) as engine:
        found = engine.generate(PROMPTS, max_new_tokens=24, **settings)
        stats = engine.stats
    assert [one.text for one in found] == wanted.texts
    assert [one.token_ids for one in found] == wanted.token_ids
    for one in found:
        assert one.usage.completion_tokens == len(one.token_ids) == len(one.step_map)
        assert max(one.step_map, default=0) <= one.usage.steps
    assert sum(stats.finished.values()) == stats.admitted == 3
    assert stats.completion_tokens == sum(map(len, wanted.token_ids))
    assert stats.pages == stats.free_pages


def test_ids_in_the_place_of_texts(made: CompiledModel) -> None:
    ids = [[5, 6, 7, 8], [9, 10, 11, 12]]
    wanted = made.generate(input_ids=ids, max_new_tokens=8).token_ids
    with made.engine(max_sequences=2, max_tokens=160) as engine:
        for given in (ids, torch.tensor(ids)):
            assert [one.token_ids for one in engine.generate(input_ids=given, max_new_tokens=8)] == wanted
        for both in ({}, {"prompts": "Sort: b a", "input_ids": ids}):
            with pytest.raises(
                InputError, match=r"give either prompts \(texts\) or input_ids, not both and not neither"
            ):
                engine.generate(**both)
        with pytest.raises(InputError, match="input_ids must be a list of ids per prompt, got 5; wrap a single one"):
            engine.generate(input_ids=5)


def test_fixed_tokens_come_back_in_their_places(made: CompiledModel) -> None:
    decoding = Decoding(max_new_tokens=24, threshold=0.8, min_tokens=24)
    fixed = dict(zip((0, 1, 9, 17, 20), made.generate(PROMPTS[0], decoding).token_ids[0], strict=False))
    canvas = [fixed.get(place) for place in range(22)]
    wanted = made.generate(PROMPTS[0], decoding, canvas=canvas)
    assert {place: wanted.token_ids[0][place] for place in fixed} == fixed
    both = made.generate(PROMPTS[:2], decoding, canvas=[canvas, None]).token_ids
    assert both == [wanted.token_ids[0], made.generate(PROMPTS[1], decoding).token_ids[0]]

    async def streamed() -> list[int]:
        events = engine.stream(PROMPTS[0], decoding, canvas=canvas)
        return [token async for event in events for token in event.token_ids]

    with made.engine(max_sequences=2, max_tokens=160) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS[:2], decoding, canvas=[canvas, None])] == both
        (one,) = engine.generate(PROMPTS[0], decoding, canvas=canvas)
        assert (one.text, [one.step_map[place] for place in fixed]) == (wanted.texts[0], [0] * len(fixed))
        assert asyncio.run(streamed()) == both[0]


@pytest.mark.parametrize(
    ("canvas", "message"),
    [
        ([None] * 9, "canvas 0 has 9 positions, more than max_new_tokens=8; shorten it"),
        ([None, "a"], "canvas 0: token 1 is 'a', expected an integer id"),
        ([1 << 20], "canvas 0: token 0 is 1048576, outside the vocabulary of"),
        ("ab", "canvas 0 is 'ab', expected a list with an id or None for each position"),
        (3, "canvas 0 is 3, expected a list with an id or None for each position"),
    ],
)
def test_a_canvas_that_cannot_be_used_is_refused(made: CompiledModel, canvas: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        made.generate(PROMPTS[0], max_new_tokens=8, canvas=canvas)
    with pytest.raises(InputError, match=r"canvas 0: token 0 is the mask token .* write None where it is free"):
        made.generate(PROMPTS[0], canvas=[made.spec.mask_id])
    with pytest.raises(InputError, match="one canvas for each of 3 prompts"):
        made.generate(PROMPTS, canvas=[canvas])
    with made.engine(max_sequences=2, max_tokens=160) as engine:
        with pytest.raises(InputError, match=message):
            engine.submit(PROMPTS[0], sink=lambda event: None, max_new_tokens=8, canvas=canvas)
        with pytest.raises(InputError, match="one canvas for each of 3 prompts"):
            engine.generate(PROMPTS, canvas=[canvas])


def test_each_request_has_settings_of_its_own(made: CompiledModel) -> None:
    decodings = [
        Decoding(max_new_tokens=20, steps=4, temperature=1.0),
        Decoding(max_new_tokens=12, policy="sequential", stop=["a"]),
        Decoding(max_new_tokens=16, threshold=0.5, top_k=3, temperature=0.5),
    ]
    seen: list[tuple[int, int]] = []
    with made.engine(max_sequences=3, max_tokens=160) as engine:
        found = engine.generate(PROMPTS, decodings, progress=lambda done, of: seen.append((done, of)))
    with made.engine(max_sequences=1, max_tokens=160, prefix_cache=False) as engine:
        for index, decoding in enumerate(decodings):  # draws differ by the place of a prompt in a call
            before = [Decoding(max_new_tokens=1)] * index
            alone = engine.generate(PROMPTS[: index + 1], [*before, decoding])[index]
            assert (alone.text, alone.token_ids, alone.step_map) == (
                found[index].text,
                found[index].token_ids,
                found[index].step_map,
            )
    assert seen == [(n, 3) for n in range(1, 4)]


def test_while_an_engine_is_open_the_model_is_its_own(made: CompiledModel) -> None:
    engine = made.engine(max_sequences=2, max_tokens=160)
    with pytest.raises(InputError, match=r"the model is in use, by an engine that is open .*: generate must wait"):
        made.generate(PROMPTS[0], max_new_tokens=4)
    with pytest.raises(InputError, match="engine must wait"):
        made.engine()
    engine.close()
    with pytest.raises(EngineClosed, match="the engine is closed; make another one"):
        engine.generate(PROMPTS)

    async def late() -> None:
        async for _ in engine.stream(PROMPTS[0]):
            pass

    with pytest.raises(EngineClosed):
        asyncio.run(late())
    assert len(made.generate(PROMPTS[0], max_new_tokens=4).token_ids[0]) <= 4, "and then it is free again"


def test_an_engine_that_nobody_has_any_more_gives_the_model_back(made: CompiledModel) -> None:
    async def streamed() -> None:
        engine = made.engine(max_sequences=2, max_tokens=160)
        async for _ in engine.stream(PROMPTS[0], max_new_tokens=4):
            pass

    gc.disable()  # it is in no cycle, so it need not be looked for
    try:
        for _ in range(2):
            assert made.engine(max_sequences=2, max_tokens=160).generate(PROMPTS[0], max_new_tokens=4)
        asyncio.run(streamed())
        assert made.generate(PROMPTS[0], max_new_tokens=4).token_ids
        answer = made.engine(max_sequences=2, max_tokens=160).decide(PROMPTS[0], [[5], [6]])
        assert sum(answer.result(20)) == pytest.approx(1), "what was asked is answered"
        ended = threading.Event()
        made.engine(max_sequences=2, max_tokens=160).submit(
            PROMPTS[0], sink=lambda event: event.finish_reason == "length" and ended.set(), ignore_eos=True
        )
        with pytest.raises(InputError, match="the model is in use"):  # by a request that goes on
            made.generate(PROMPTS[0], max_new_tokens=4)
        assert ended.wait(20)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "dgraph engine":
            thread.join(20)
            assert not thread.is_alive()
    assert made.generate(PROMPTS[0], max_new_tokens=4).token_ids


def test_a_request_keeps_its_engine_until_its_end_is_told(made: CompiledModel) -> None:
    kept: SimpleQueue[tuple[bool, bool]] = SimpleQueue()

    def asked() -> None:
        engine = made.engine(max_sequences=2, max_tokens=160)
        held = weakref.ref(engine)
        engine.submit(
            PROMPTS[0],
            sink=lambda event: kept.put((event.finish_reason is None, held() is not None)),
            max_new_tokens=40,
            ignore_eos=True,
        )

    gc.disable()
    try:
        asked()
        while True:
            goes_on, there = kept.get(timeout=20)
            assert there == goes_on
            if not goes_on:
                break
        assert made.generate(PROMPTS[0], max_new_tokens=4).token_ids, "it is about to be given back"
    finally:
        gc.enable()


def test_the_thread_of_an_engine_does_not_wait_for_itself(made: CompiledModel) -> None:
    said: SimpleQueue[str] = SimpleQueue()

    def again(event: Event) -> None:
        if event.finish_reason is not None:
            try:
                made.generate(PROMPTS[0], max_new_tokens=4)
            except InputError as error:
                said.put(str(error))

    made.engine(max_sequences=2, max_tokens=160).submit(PROMPTS[0], sink=again, max_new_tokens=4)
    assert "the model is in use" in said.get(timeout=20)
    assert made.generate(PROMPTS[0], max_new_tokens=4).token_ids, "another thread waits until it is free"


@first_cases(1, "end", ["raise SystemExit(3)", "del engine; raise SystemExit(3)"])
def test_a_process_ends_as_it_wants_to_while_an_engine_runs(end: str) -> None:
    script = f"""
import threading, dgraph
began = threading.Event()
engine = dgraph.optimize("tiny_sdar", "focus", backend="eager").engine(max_tokens=500)
for _ in range(4):
    engine.submit([5, 6, 7], sink=lambda event: began.set(), max_new_tokens=400, threshold=1.0, ignore_eos=True)
assert began.wait(60)
{end}
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stderr) == (3, "")


def test_threads_that_ask_for_the_same_program_at_once_lower_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(None, "sdar")[0].optimized("dense", max_num_logits=7)
    lower, lowered, begun = made._lower, [], threading.Barrier(3)

    def slowly(graph: dgraph.Graph) -> LoweredProgram:
        lowered.append(graph)
        time.sleep(0.05)
        return lower(graph)

    def ask() -> None:
        begun.wait(20)
        made._prepare([Decoding(top_k=3)])

    monkeypatch.setattr(made, "_lower", slowly)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lowered) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sequence": 3}, "unknown setting of EngineConfig 'max_sequence'. Did you mean 'max_sequences'"),
        ({"scheduler": "lookahead"}, "unknown scheduler 'lookahead'. Did you mean 'look_ahead'"),
        ({"kv_bytes": 100}, "kv_bytes=100 does not hold one page"),
        ({"max_tokens": 1 << 20}, "max_tokens=1048576 is more than the"),
        ({"prefix_cache": 1}, "prefix_cache is true or false, got 1"),
    ],
)
def test_settings_that_are_wrong_leave_the_model_free(
    made: CompiledModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((InputError, UnknownName), match=message):
        made.engine(**settings)
    made.engine(max_sequences=1, max_tokens=64).close()
