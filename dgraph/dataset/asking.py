"""Concurrent questions to an engine, enough at a time to keep it full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice

from dgraph.dataset.answers import Answer
from dgraph.dataset.lines import Question
from dgraph.engine.engine import Engine, EngineClosed
from dgraph.errors import EngineBusy, InputError

AHEAD = 2
"""Concurrent questions per slot of the engine: one that runs, and one that waits."""
PATIENCE = 0.1
"""Longest wait in seconds before a question is asked again of an engine whose queue is full."""


async def ask(engine: Engine, question: Question) -> Answer:
    """Ask one question; an error of this question alone becomes its answer.

    Raises:
        EngineClosed: the engine has stopped: no question will be answered.
    """
    while True:
        try:
            return await _ask(engine, question)
        except EngineBusy as busy:
            await asyncio.sleep(min(busy.retry_after, PATIENCE))
        except EngineClosed:
            raise
        except Exception as error:
            if not engine.alive:  # not this question's fault: a later run asks it again
                raise EngineClosed(f"the engine has stopped: {error}") from error
            return Answer(question.id, None, 0, "error", str(error) or type(error).__name__)


async def _ask(engine: Engine, question: Question) -> Answer:
    prompt = question.prompt
    if prompt is None:
        reader = getattr(engine.tokenizer, "encode_chat", None)
        if reader is None:
            raise InputError(f"the model {engine.model!r} has no tokenizer that reads conversations; give prompts.")
        prompt = reader(question.messages)
    pieces = []
    async for event in engine.stream(prompt, question.decoding, index=question.index):
        pieces.append(event.text)
    if event.finish_reason == "cancelled":
        raise EngineClosed("the engine was closed before the question was answered.")
    text = None if engine.tokenizer is None else "".join(pieces)
    return Answer(question.id, text, event.usage.completion_tokens, str(event.finish_reason))


async def ask_all(engine: Engine, questions: Iterable[Question]) -> AsyncIterator[Answer]:
    """Ask all questions, `AHEAD` times the engine's slots at a time; yield answers as they come.

    Raises:
        EngineClosed: the engine has stopped.
    """
    left = iter(questions)
    asked = {asyncio.create_task(ask(engine, each)) for each in islice(left, AHEAD * engine.max_sequences)}
    done: set[asyncio.Task[Answer]] = set()
    try:
        while asked:
            done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            asked |= {asyncio.create_task(ask(engine, each)) for each in islice(left, len(done))}
            for one in done:
                yield one.result()
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*done, *asked, return_exceptions=True)  # what became of them is of no interest any more
