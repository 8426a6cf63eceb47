"""Events of a request while an engine runs it, and the response that they add up to."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dgraph.engine.io.timings import Served


@dataclass(frozen=True)
class Usage:
    """Tokens of one request.

    Attributes:
        prompt_tokens: of its prompt.
        completion_tokens: of its response so far, as far as they are final.
        cached_tokens: of its prompt that came from the prefix cache.
        steps: the step of the request that committed the last of these tokens, from 1; 0 before.
        rows: that went through the last layers for it, those of a time before it gave way to others included.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    steps: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Draft:
    """The block that is being decoded, as it stands; nothing of it is promised.

    Attributes:
        offset: position in the response of its first token.
        token_ids: -1 where there is a mask.
        confidence: the probability with which each of these was committed; 0 where there is a mask.
        kept: False where the step evicted the row that predicts the position; all True under recipes that evict none.
        step: the step of the request that it shows, from 1.
    """

    offset: int
    token_ids: tuple[int, ...]
    confidence: tuple[float, ...]
    kept: tuple[bool, ...]
    step: int


@dataclass(frozen=True)
class Event:
    """A piece of a response. The texts of a request's events, joined, are its response, and so are its ids.

    Attributes:
        request_id: of the request.
        text: that has become final: nothing of it is ever taken back. "" without a tokenizer.
        token_ids: that have become final.
        step_map: of each of these, the step of the request that committed it, from 1.
        confidence: of each of these, the probability with which it was committed, as the decoding rule saw it; 1 where
            it was given.
        draft: the block that is being decoded, as a step left it, if the request asked for drafts: one event per step.
            A step that is repeated, since the request gave way to others, is told of once.
        finish_reason: "stop" (a stop token or text), "length", "cancelled" or "error" in the last event, else None.
        usage: counts so far.
        served: its times on the engine's clock, in the last event.
        error: the exception, where the finish reason is "error".
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    step_map: tuple[int, ...]
    confidence: tuple[float, ...]
    usage: Usage
    draft: Draft | None = None
    finish_reason: str | None = None
    served: Served | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class Response:
    """A finished request.

    Attributes:
        text: None without a tokenizer.
        token_ids, step_map, confidence, finish_reason, usage: see `Event`.
    """

    text: str | None
    token_ids: list[int]
    step_map: list[int]
    confidence: list[float]
    finish_reason: str
    usage: Usage

    @classmethod
    def of(cls, events: Sequence[Event], has_text: bool) -> Response:
        """The response that a request's events tell, up to the last."""
        text = "".join(event.text for event in events) if has_text else None
        ids = [token for event in events for token in event.token_ids]
        steps = [step for event in events for step in event.step_map]
        sure = [each for event in events for each in event.confidence]
        return cls(text, ids, steps, sure, str(events[-1].finish_reason), events[-1].usage)


def into(arrived: queue.SimpleQueue[tuple[int, Event]], index: int) -> Callable[[Event], None]:
    """A sink that queues the events of one request among several, with its index."""
    return lambda event: arrived.put((index, event))


def next_end(arrived: queue.SimpleQueue[tuple[int, Event]], pieces: list[list[Event]]) -> tuple[int, Event]:
    """Collect the events of several requests, by index, until one ends: its index and last event."""
    while True:
        index, event = arrived.get()
        pieces[index].append(event)
        if event.finish_reason is not None:
            return index, event
