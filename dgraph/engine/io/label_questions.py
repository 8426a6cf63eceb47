"""Questions that wait for an engine: each is answered between two steps, or fails alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future

from dgraph.runtime.loop.label_scoring import Question, Scorer

Probabilities = list[float]


class Answer(Future[Probabilities]):
    """Future of the probabilities of labels: `result()` waits for them, and so does `await`."""

    def __await__(self) -> Generator[object, None, Probabilities]:
        return asyncio.wrap_future(self).__await__()


class Questions:
    """Queue of the questions that have no answer yet.

    Args:
        scorer: makes the scorer that answers them, in the thread that asks for the first answer.
    """

    def __init__(self, scorer: Callable[[], Scorer]):
        self._make = scorer
        self._scorer: Scorer | None = None
        self._waiting: deque[tuple[Question, Answer]] = deque()
        self._taken: Answer | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(self, question: Question) -> Answer:
        """Queue a question."""
        answer = Answer()
        self._waiting.append((question, answer))
        return answer

    def take(self) -> Question | None:
        """Take the first question that was not cancelled, to be answered next; None without one."""
        while self._waiting:
            question, answer = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                self._taken = answer
                return question
        return None

    def answer(self, question: Question) -> None:
        """Answer the question that was taken; on a rank other than 0, only take part in the forward."""
        answer, self._taken = self._taken or Answer(), None
        try:
            if self._scorer is None:
                self._scorer = self._make()
            answer.set_result(self._scorer(question))
        except Exception as error:
            answer.set_exception(error)
        except BaseException as error:
            answer.set_exception(error)
            raise

    def fail(self, error: Exception) -> None:
        """Fail every question that waits, the one that was taken included."""
        if self._taken is not None:
            self._taken.set_exception(error)
            self._taken = None
        while self._waiting:
            _, answer = self._waiting.popleft()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
