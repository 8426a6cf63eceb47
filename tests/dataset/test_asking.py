"""Questions to an engine: it stays full, and one that cannot be answered stops no other."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest

from dgraph.dataset.answers import Answer
from dgraph.dataset.asking import AHEAD, ask, ask_all
from dgraph.dataset.lines import Question, question_of
from dgraph.engine.engine import EngineClosed
from dgraph.runtime.decoding import Decoding
from tests.engine.test_engine import Served
from tests.serve.live import Alphabet, taken

USUAL = Decoding(max_new_tokens=4, ignore_eos=True)


def question(index: int, **said: Any) -> Question:
    return question_of({"prompt": [1, 2, 3], **said}, index, USUAL)


def answers(served: Served, *questions: Question) -> list[Answer]:
    async def run() -> list[Answer]:
        return [each async for each in ask_all(served.engine, questions)]

    return asyncio.run(run())


def test_every_question_is_answered_and_what_is_wrong_with_one_is_its_answer() -> None:
    served = Served(tokenizer=Alphabet())
    with served.engine:
        found = answers(
            served,
            question(1),
            question(2, max_new_tokens=999),
            question(3, prompt=None, messages=[{"role": "user", "content": "abc"}]),
            question(4, prompt=[99999]),
            *map(question, range(5, 20)),
        )
    by_id = {answer.id: answer for answer in found}
    assert set(by_id) == set(range(1, 20))
    assert by_id[1] == replace(by_id[7], id=1)
    assert (by_id[1].tokens, by_id[1].finish_reason, by_id[1].error) == (4, "length", None)
    assert by_id[3].text
    assert by_id[2].finish_reason == by_id[4].finish_reason == "error"
    assert "3 tokens and max_new_tokens=999 take" in str(by_id[2].error)
    assert "99999" in str(by_id[4].error)


def test_without_a_tokenizer_ids_are_counted_and_conversations_refused() -> None:
    served = Served(tokenizer=False)
    with served.engine:
        ids, turns = answers(served, question(1), question(2, prompt=None, messages=[{"role": "user", "content": "a"}]))
    by_id = {answer.id: answer for answer in (ids, turns)}
    assert (by_id[1].text, by_id[1].tokens) == (None, 4)
    assert "has no tokenizer that reads conversations" in str(by_id[2].error)


def test_a_queue_that_is_full_is_asked_again() -> None:
    served = Served(tokenizer=Alphabet(), queue=1)
    with served.engine:
        found = answers(served, *map(question, range(1, 12)))
    assert sorted(str(answer.id) for answer in found) == sorted(map(str, range(1, 12)))
    assert all(answer.error is None for answer in found)


def test_the_engine_has_as_many_waiting_as_it_runs() -> None:
    served = Served(tokenizer=Alphabet())
    served.gate.open.clear()

    async def run() -> tuple[int, int]:
        found = ask_all(served.engine, map(question, range(1, 20)))
        task = asyncio.ensure_future(anext(found))
        async with asyncio.timeout(20):
            while taken(served.engine) < AHEAD * served.engine.max_sequences:
                await asyncio.sleep(0.001)
        most = taken(served.engine)
        served.gate.open.set()
        await task
        return most, len([each async for each in found])

    with served.engine:
        assert asyncio.run(run()) == (AHEAD * 2, 18)


def test_an_engine_that_has_stopped_ends_it() -> None:
    served = Served(tokenizer=Alphabet())
    served.engine.close()
    with pytest.raises(EngineClosed):
        asyncio.run(ask(served.engine, question(1)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "is closed"])
def test_an_engine_that_stops_in_the_middle_answers_nothing_more(dies: bool) -> None:
    served, found, unread = Served(tokenizer=Alphabet()), list[Answer](), list[Any]()
    served.hold()

    def fail() -> None:
        if dies:
            raise RuntimeError("no device")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))

        async def collect() -> None:
            async for each in ask_all(served.engine, map(question, range(1, 20))):
                found.append(each)

        task = asyncio.ensure_future(collect())
        async with asyncio.timeout(20):
            while taken(served.engine) < AHEAD * served.engine.max_sequences:
                await asyncio.sleep(0.001)
        served.gate.act = fail
        closing = asyncio.to_thread(served.engine.close) if not dies else asyncio.sleep(0)
        closed = asyncio.ensure_future(closing)
        while not dies and served.engine.alive:
            await asyncio.sleep(0.001)
        served.gate.open.set()
        with pytest.raises(EngineClosed, match="no device" if dies else "closed"):
            await task
        await closed

    asyncio.run(run())
    gc.collect()
    assert not found, "an answer that says so would never be asked for again"
    assert not unread, "no task's error is left for the log of asyncio"
    served.engine.close()
