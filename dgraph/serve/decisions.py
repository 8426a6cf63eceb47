"""Decisions: probabilities of given answers, read in one forward without generating text (OpenAI's Decisions API).

A mask model predicts masked positions. So a question is a conversation whose next turn is masked, and its answers are
the labels that may fill it (`Engine.decide`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import Receive

from dgraph.engine.engine import EngineClosed
from dgraph.engine.io.label_questions import Answer
from dgraph.errors import EngineBusy, InputError
from dgraph.serve.fields import Fields, Listed, Name, Text, one_of
from dgraph.serve.neutral import DECISION, TURN
from dgraph.serve.protocol import CONTENT, Part
from dgraph.serve.refusal import Refusal, bad_field, not_now, shut_down
from dgraph.serve.served_model import ServedModel, size_of
from dgraph.serve.settings import ServerConfig
from dgraph.serve.translate import check_prompt, text_of

TEXTS = ("input_text", "output_text", "text")
"""Parts of a message that can be read."""
GONE = Refusal(499, "the client has left.")
"""Refusal whose status goes to the log; the client does not read it."""


Content = Annotated[Text | Listed[Part], one_of(CONTENT)]


class Turn(Fields):
    """A message of the input."""

    neutral = TURN

    role: Annotated[Name, Field(min_length=1)]
    content: Content


class Predicate(Fields):
    """A statement about the input, whose probability is asked for."""

    type: Literal["predicate"]
    instructions: Content
    name: Name | None = None


class Option(Fields):
    """One of the answers of a choice; the boolean true and the text "true" are different answers."""

    value: Annotated[Annotated[Text, Field(min_length=1)] | bool, one_of("a text that is not empty, true or false")]
    description: Text | None = None


class Choice(Fields):
    """A question with some answers to choose from."""

    type: Literal["choice"]
    instructions: Content
    choices: Annotated[Listed[Option], Field(min_length=2, max_length=255)]
    name: Name | None = None


class Level(Fields):
    """A level of a score."""

    label: Annotated[Text, Field(min_length=1)]
    description: Text | None = None


class Score(Fields):
    """A question with some ordered levels to choose from."""

    type: Literal["score"]
    instructions: Content
    levels: Annotated[Listed[Level], Field(min_length=2, max_length=10)]
    name: Name | None = None


Question = Annotated[Predicate | Choice | Score, Field(discriminator="type")]


class DecisionRequest(Fields):
    """POST /v1/decisions."""

    neutral = DECISION

    model: Text | None = None
    input: Annotated[
        Text | Annotated[Listed[Turn], Field(min_length=1)],
        one_of("a text, or a list of messages with a role and a content"),
    ]
    questions: Annotated[Listed[Question], Field(min_length=1, max_length=200)]


@dataclass(frozen=True)
class Asked:
    """A question as an engine takes it: the ids of its conversation, and the ids of each answer's label."""

    question: Predicate | Choice | Score
    prompt: list[int]
    labels: list[list[int]]


class Deciding:
    """One client's questions while the engine works on them.

    Args:
        body: the request.
        model: the model that answers.
        settings: limits of a prompt's length and of a body's bytes.
    """

    def __init__(self, body: DecisionRequest, model: ServedModel, settings: ServerConfig):
        self._body, self._model, self._settings = body, model, settings
        self._asked: list[Asked] = []
        self._answers: list[Answer] = []
        self._gone = self._cancelled = False

    async def begin(self) -> None:
        """Read the questions, and give all of them to the engine, or none.

        Raises:
            Refusal: a question cannot be asked, or the engine is busy or closed.
        """
        try:
            await asyncio.to_thread(self._ask)
        except (EngineBusy, EngineClosed) as error:
            raise not_now(error) from None
        except InputError as error:
            raise bad_field("questions", str(error)) from None
        if self._cancelled:  # while the questions were read
            self.cancel()

    def _ask(self) -> None:
        model, most = self._model, self._settings.max_body_bytes
        size = len(self._body.questions) * size_of(self._body.model_dump(include={"input"}))
        if size > most:
            said = f"the input is read for each question, {size} bytes in all, and at most {most} are read at once here"
            raise bad_field("questions", f"{said}; ask fewer questions at a time.")
        asked = [_asked(self._body, question, model) for question in self._body.questions]
        for one in asked:
            check_prompt(one.prompt, "input", self._settings)
        after = model.engine.spec.eos_ids[:1]  # so that an answer ends where its label does
        self._asked, labelled = asked, [(one.prompt, one.labels) for one in asked]
        self._answers = model.engine.decide_all(labelled, after=after)

    async def answer(self, receive: Receive) -> dict[str, Any]:
        """The answers to all questions. receive: the connection's; its end cancels the unanswered questions.

        Raises:
            Refusal: the engine has closed, the client has left, or the server shuts down.
        """
        watch = asyncio.create_task(self._watch(receive))
        try:
            found = [await answer for answer in self._answers]
        except EngineClosed as error:
            raise not_now(error) from None
        except asyncio.CancelledError:
            if self._gone:
                raise GONE from None
            if self._cancelled:
                raise shut_down() from None
            raise
        finally:
            watch.cancel()
            self.cancel()
        asked, tokens = self._asked, sum(len(one.prompt) for one in self._asked)
        return {
            "object": "decision",
            "model": self._model.id,
            "answers": [_told(one.question, probabilities) for one, probabilities in zip(asked, found, strict=True)],
            "usage": {
                "input_tokens": tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens,
            },
        }

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.cancel()

    def cancel(self) -> None:
        """Cancel the unanswered questions."""
        self._cancelled = True
        for answer in self._answers:
            answer.cancel()


def _asked(body: DecisionRequest, question: Predicate | Choice | Score, model: ServedModel) -> Asked:
    """A question as ids."""
    turns = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _turns(body.input)
    text = f"{text_of(question.instructions, 'questions', TEXTS)}\n{_form(question)}"
    if turns[-1]["role"] == "user":
        turns[-1] = {"role": "user", "content": f"{turns[-1]['content']}\n\n{text}"}
    else:
        turns.append({"role": "user", "content": text})
    labels = [model.encode_part(label, "questions") for label in _labels(question)]
    if len(set(map(tuple, labels))) < len(labels):
        raise bad_field("questions", "the answers of a question differ from each other; some are the same.")
    try:
        return Asked(question, model.encode_chat(turns, "input"), labels)
    except InputError as error:
        raise bad_field("input", str(error)) from None


def _turns(given: Sequence[Turn]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": text_of(turn.content, "input", TEXTS)} for turn in given]


def _form(question: Predicate | Choice | Score) -> str:
    """The text after the instructions, which asks for one of the labels."""
    if isinstance(question, Predicate):
        return "Is this true? Answer yes or no."
    described: Sequence[Option | Level] = question.choices if isinstance(question, Choice) else question.levels
    lines = [
        f"- {label}: {one.description}" if one.description else f"- {label}"
        for label, one in zip(_labels(question), described, strict=True)
    ]
    return "\n".join(["Answer with one of these:", *lines])


def _labels(question: Predicate | Choice | Score) -> list[str]:
    """The answers as texts."""
    if isinstance(question, Predicate):
        return ["yes", "no"]
    if isinstance(question, Score):
        return [level.label for level in question.levels]
    return [str(one.value).lower() if isinstance(one.value, bool) else one.value for one in question.choices]


def _told(question: Predicate | Choice | Score, probabilities: Sequence[float]) -> dict[str, Any]:
    """An answer in the form of the API."""
    said: dict[str, Any] = {"type": question.type, "name": question.name}
    if isinstance(question, Predicate):
        return {**said, "probability": probabilities[0]}
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    said["confidence"] = probabilities[best]
    if isinstance(question, Choice):
        each = [{"value": o.value, "probability": p} for o, p in zip(question.choices, probabilities, strict=True)]
        return {**said, "choice": question.choices[best].value, "probabilities": each}
    levels = [
        {"value": place, "label": level.label, "probability": probability}
        for place, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
    ]
    return {**said, "score": sum(place * p for place, p in enumerate(probabilities)), "probabilities": levels}
