"""Input file of questions: all lines are read and checked before any is answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dgraph.errors import DgraphError, InputError, UnknownName
from dgraph.runtime.decoding import Decoding
from dgraph.types.texts import check_text, parse_json, read_text

OWN = ("id", "prompt", "messages")
"""Fields of a line beside those of a `Decoding`."""
SHOWN = 10
"""Bad lines that an error names."""

Id = str | int


@dataclass(frozen=True)
class Question:
    """A line of the input.

    Attributes:
        id: unique in its file.
        index: the number of the line, from 1; draws differ by it.
        prompt: a text, or ids; None where there are messages.
        messages: a conversation; None where there is a prompt.
        decoding: settings of the answer.
        line: the line as it was, from which `read_line` makes the same question anywhere.
    """

    id: Id
    index: int
    prompt: str | Sequence[int] | None
    messages: Sequence[Mapping[str, str]] | None
    decoding: Decoding
    line: str


def read_questions(path: str | Path, usual: Decoding) -> list[Question]:
    """Read all questions of a file; empty lines are skipped.

    Args:
        path: path of the file.
        usual: decoding settings that a line has unless it says otherwise.

    Raises:
        InputError: the file cannot be read, has no line, or has lines that cannot be used; the message names them.
    """
    lines = read_text(path, f"--data {path}").split("\n")  # JSON may hold other ends of lines
    found: dict[Id, Question] = {}
    bad = []
    for index, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = read_line(line, index, usual)
            first = found.setdefault(question.id, question)
            if first is not question:
                raise InputError(f"the id {question.id!r} is that of line {first.index} too")
        except DgraphError as error:
            bad.append(f"line {index}: {str(error).rstrip('.')}")
    if bad:
        more = f"\nand {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        many = "1 line" if len(bad) == 1 else f"{len(bad)} lines"
        raise InputError(f"--data {path} has {many} that cannot be used:\n" + "\n".join(bad[:SHOWN]) + more)
    if not found:
        raise InputError(f'--data {path} has no line; write one JSON object a line, as {{"prompt": "Why?"}}.')
    return list(found.values())


def read_line(line: str, index: int, usual: Decoding) -> Question:
    """Parse one line; see `read_questions`.

    Raises:
        InputError, UnknownName: the line cannot be used.
    """
    said = parse_json(line)
    if not isinstance(said, dict):
        raise InputError(f'a line is a JSON object, as {{"prompt": "Why?"}}, got {type(said).__name__}')
    return question_of(said, index, usual, line)


def question_of(said: Mapping[str, Any], index: int, usual: Decoding, line: str = "") -> Question:
    """Make a question of the fields of a line; see `read_questions`.

    Raises:
        InputError, UnknownName: the fields cannot be used.
    """
    known = (*OWN, *(f.name for f in fields(Decoding)))
    for name in said:
        if name not in known:
            raise UnknownName("field", name, known)
    own = {name: value for name in OWN if (value := said.get(name)) is not None}
    id, prompt, messages = own.get("id", index), own.get("prompt"), own.get("messages")
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise InputError(f"an id is a text or a whole number, got {id!r}")
    for text in _texts([own, said.get("stop")]):  # of a row of a data set as well, which is no line
        check_text(text)
    if (prompt is None) == (messages is None):
        raise InputError("a line has either a prompt or messages" + (", not both" if prompt is not None else ""))
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip()) and not _are_ids(prompt):
        raise InputError(f"a prompt is a text or a list of ids, and not empty, got {prompt!r}")
    if messages is not None and not _are_turns(messages):
        raise InputError('messages are a list of {"role": TEXT, "content": TEXT}, at least one')
    decoding = {name: value for name, value in said.items() if name not in OWN and value is not None}
    return Question(id, index, prompt, messages, usual.changed(decoding), line)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a nested value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _texts(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(id) is int for id in prompt)


def _are_turns(messages: Any) -> bool:
    def is_turn(turn: Any) -> bool:
        return isinstance(turn, dict) and all(isinstance(turn.get(name), str) for name in ("role", "content"))

    return isinstance(messages, list) and bool(messages) and all(map(is_turn, messages))
