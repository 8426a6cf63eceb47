"""Output file of answers: each id once, however earlier runs ended."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from dgraph.dataset.lines import Id
from dgraph.errors import InputError


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        id: id of the question.
        text: the response; None without a tokenizer, and for an error.
        tokens: number of tokens of the response.
        finish_reason: "stop", "length", or "error".
        error: what went wrong, where the finish reason is "error".
    """

    id: Id
    text: str | None
    tokens: int
    finish_reason: str
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A line of the output."""
        found = {"id": self.id, "text": self.text, "tokens": self.tokens, "finish_reason": self.finish_reason}
        return found if self.error is None else {**found, "error": self.error}


class Answers:
    """A file of answers, open to add more; one process at a time has it.

        with Answers(path, ids) as answers:
            answers.add(answer)

    A last line that was cut off, since a run was killed while it wrote, is removed when the file is opened.

    Args:
        path: path of the file; it need not exist.
        ids: ids of all questions.

    Attributes:
        present: ids that had an answer when the file was opened.
        done: those that have one now.
        errors: answers of this run whose finish reason is "error".

    Raises:
        InputError: the file cannot be written, is in use, or has a line that is no answer to one of these questions.
    """

    def __init__(self, path: str | Path, ids: Collection[Id]):
        self.path, self.errors = Path(path), 0
        if not self.path.parent.is_dir():  # a lock would make the folder
            raise InputError(f"--out {path} cannot be written: there is no folder {self.path.parent}.")
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise InputError(f"--out {path} is being written by another process; wait for it, or end it.") from None
        except OSError as error:
            raise InputError(f"--out {path} cannot be written: {error.strerror}.") from None
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (closed by `close`)
            self.present = self._read(ids)
        except OSError as error:
            self._release()
            raise InputError(f"--out {path} cannot be written: {error.strerror}.") from None
        except BaseException:
            self._file.close()
            self._release()
            raise
        self.done = set(self.present)

    def add(self, answer: Answer) -> bool:
        """Write an answer unless its id has one; return True if it was written."""
        if answer.id in self.done:
            return False
        self._file.write(json.dumps(answer.to_json(), ensure_ascii=False).encode() + b"\n")
        self.done.add(answer.id)
        self.errors += answer.error is not None
        return True

    def close(self) -> None:
        """Sync the file to the disk, close it and release its lock."""
        os.fsync(self._file.fileno())
        self._file.close()
        self._release()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _release(self) -> None:
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    def _read(self, ids: Collection[Id]) -> frozenset[Id]:
        """Read the ids that have an answer; complete or remove a last line that was cut off."""
        self._file.seek(0)
        text = self._file.read()
        whole, newline, rest = text.rpartition(b"\n")
        found: set[Id] = set()
        for number, line in enumerate(whole.split(b"\n") if newline else (), 1):
            if not line.strip():
                continue
            id = _id_of(line)
            if id is None:
                raise InputError(f"--out {self.path}, line {number}, is no answer; give another file, or repair it.")
            if id in found or id not in ids:
                what = "is there twice" if id in found else "is not one of the questions"
                raise InputError(f"--out {self.path}, line {number}: the id {id!r} {what}; give another file.")
            found.add(id)
        if rest:
            id = _id_of(rest)
            if id is not None and id in ids and id not in found:  # only its newline is missing
                self._file.write(b"\n")
                found.add(id)
            else:
                self._file.truncate(len(whole) + len(newline))
        return frozenset(found)


def _id_of(line: bytes) -> Id | None:
    """Parse the id of a line that is an answer; None for anything else."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or "finish_reason" not in said:
        return None
    id = said.get("id")
    return id if isinstance(id, (str, int)) and not isinstance(id, bool) else None
