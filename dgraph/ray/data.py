"""Responses to the prompts of a Ray dataset, from actors with engines of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from dgraph.blueprint import Blueprint
from dgraph.dataset.answers import Answer
from dgraph.dataset.asking import ask
from dgraph.dataset.lines import Question, question_of, read_line
from dgraph.errors import DgraphError, InputError
from dgraph.ray.cluster import actor_options, check_room, joined, needs
from dgraph.ray.installed import check_installed
from dgraph.runtime.decoding import Decoding

LINE, INDEX = "line", "index"
"""Columns of a dataset of questions: a line of the file, and its number."""
CALLS = 3
"""Tasks that an actor works on at the same time, a batch each: one runs, one waits in the engine, one comes or goes."""
MOST_BLOCKS = 4096
"""Most parts of a dataset; a part is lost with its actor, and asked again as a whole."""


class Generate:
    """Answers the rows of a dataset; for `Dataset.map_batches`.

        rows.map_batches(
            dgraph.ray.Generate,
            fn_constructor_kwargs={"model": "tiny_sdar", "recipe": "focus", "max_new_tokens": 64},
            batch_size=16,
            compute=ray.data.ActorPoolStrategy(
                size=2, max_tasks_in_flight_per_actor=6, max_concurrent_calls_per_actor=3
            ),
        )

    A row has a `prompt` or `messages`, and may have fields of a `Decoding`, as a line of `dgraph.dataset` does. It may
    instead have a column `line` with all of that as JSON. A null counts as absent. Other columns are not read, except
    `index`, by which draws differ. A row comes back with its columns, and `text`, `tokens`, `finish_reason` and
    `error`. A row that cannot be answered says why, and stops no other row.

    Calls of one actor share its engine: with several at a time, as above, it stays full from batch to batch. A batch
    comes back in its order and in one piece, for Ray repeats rows that were lost with an actor by position.

    Args:
        model: a name, or a folder that every machine of the cluster sees; or a whole `Blueprint`.
        recipe: the recipe's name.
        decoding: defaults of the rows' decoding, for fields that a row leaves out.
        settings: fields of a `Decoding`, in place of `decoding`, and of a `Blueprint` (device, engine, options, ...),
            unless `model` is one.

    Raises:
        InputError, UnknownName: as `Blueprint` and `Decoding`.
    """

    def __init__(
        self, model: str | Blueprint, recipe: str = "focus", decoding: Decoding | None = None, **settings: Any
    ):
        own = {name: settings.pop(name) for name in _BLUEPRINT if name in settings}
        if isinstance(model, Blueprint) and own:
            raise InputError(f"{', '.join(own)} cannot be set beside a Blueprint; set it there.")
        blueprint = model if isinstance(model, Blueprint) else Blueprint(model=model, recipes=(recipe,), **own)
        if len(blueprint.recipes) != 1:
            raise InputError(f"a dataset is answered under one recipe, got {len(blueprint.recipes)}.")
        self._usual = Decoding.of(decoding, settings)
        (self._engine,) = blueprint.engines().values()

    async def __call__(self, batch: Mapping[str, Any]) -> AsyncIterator[dict[str, Sequence[Any]]]:
        """Answer a batch, which is given and returned as columns by name."""
        columns = {name: _plain(values) for name, values in batch.items()}
        count = len(next(iter(columns.values()), ()))
        rows = [{name: values[i] for name, values in columns.items()} for i in range(count)]
        answers = await asyncio.gather(*map(self._answer, rows))
        yield {
            **columns,
            "text": [answer.text for answer in answers],
            "tokens": [answer.tokens for answer in answers],
            "finish_reason": [answer.finish_reason for answer in answers],
            "error": [answer.error for answer in answers],
        }

    async def _answer(self, row: Mapping[str, Any]) -> Answer:
        try:
            question = self._question(row)
        except Exception as error:
            return Answer(0, None, 0, "error", str(error))
        return await ask(self._engine, question)

    def _question(self, row: Mapping[str, Any]) -> Question:
        index = row.get(INDEX) or 0
        if row.get(LINE) is not None:
            return read_line(row[LINE], index, self._usual)
        said = {name: row[name] for name in _ASKED if row.get(name) is not None and row[name] == row[name]}  # not NaN
        return question_of(said, index, self._usual)


_BLUEPRINT = ("options", "dtype", "device", "facts", "compilation", "engine", "shipped")
_ASKED = ("prompt", "messages", *(field.name for field in fields(Decoding)))


def _plain(values: Any) -> list[Any]:
    """A column as a list of Python values, without numpy."""
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return [value.tolist() if hasattr(value, "tolist") else value for value in found]


def answered(
    questions: Sequence[Question],
    blueprint: Blueprint,
    usual: Decoding,
    *,
    replicas: int = 1,
    tell: Callable[[str], None] = lambda what: None,
) -> Generator[Answer, None, None]:
    """Yield exactly one answer to each question, from actors on Ray, in the order in which they come.

    An actor that is lost is replaced, and its unanswered questions are asked again.

    Args:
        questions: the questions of one file (see `dgraph.dataset.lines`).
        blueprint: blueprint of each actor's engine.
        usual: defaults of the questions' decoding, for fields that a question leaves out.
        replicas: number of actors, with one device each.
        tell: called with a text for each thing that is done.

    Raises:
        InputError: a number out of range, or the extra `ray` is not installed.
        DgraphError: an engine cannot be built, or actors are lost again and again.
    """
    if type(replicas) is not int or replicas < 1:
        raise InputError(f"replicas of a dataset are a whole number, at least 1, got {replicas!r}.")
    check_installed()
    tell("starting Ray")
    with joined():
        yield from _answered(list(questions), blueprint, usual, replicas, tell)


def _answered(
    questions: list[Question], blueprint: Blueprint, usual: Decoding, replicas: int, tell: Callable[[str], None]
) -> Generator[Answer, None, None]:
    import ray

    actor = actor_options(blueprint, {})
    check_room(replicas, needs(actor))
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # in this process; the caller shows a progress bar itself
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    left = {question.index: question for question in questions}
    while left:
        rows = [{INDEX: index, LINE: question.line} for index, question in left.items()]
        batch = blueprint.engine.slots(blueprint.on)
        blocks = min(-(-len(rows) // batch), MOST_BLOCKS)
        found = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Generate,
            fn_constructor_kwargs={"model": blueprint, "decoding": usual},
            batch_size=batch,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(
                size=min(replicas, blocks),
                max_tasks_in_flight_per_actor=2 * CALLS,
                max_concurrent_calls_per_actor=CALLS,
            ),
            **actor,
        )
        tell("starting actors")
        for row in found.iter_rows():
            question = left.pop(row[INDEX], None)
            if question is not None:
                yield Answer(question.id, row["text"], row["tokens"], row["finish_reason"], row["error"])
        if len(left) == len(rows):
            raise DgraphError(f"{len(rows)} questions came back without an answer; the log of Ray says why.")
