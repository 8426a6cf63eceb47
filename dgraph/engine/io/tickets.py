"""The requests that an engine has taken, each with the tokens it was told so far, and counts of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dgraph.engine.io.detokenizer import Writer
from dgraph.engine.io.events import Event
from dgraph.engine.io.timings import Served
from dgraph.runtime.requests import Request

Sink = Callable[[Event], None]


@dataclass(eq=False)
class EngineRequest:
    """A request that the engine has taken.

    Attributes:
        id, number: its id for callers, and for the scheduler.
        request: as it was asked for.
        sink: gets its events, in the thread that drives the device.
        draft: True: they bring the block that is being decoded, and `drafted`: the last step that they told of.
        writer: its text.
        going_on: as it is decoded; another than `request` after it gave way.
        said: committed tokens so far; `steps` the step of each, and `confidence`; `told`: how many of them its sink has
            got.
        cached: tokens of its prompt that were in the prefix cache.
        rows: that went through the last layers for it since it got its slot; `rows_before`: in slots that it gave up.
        slot: where it is; -1 while it waits.
        times: when it came, was admitted, and so on, on the engine's clock.
    """

    id: str
    number: int
    request: Request
    sink: Sink
    writer: Writer
    draft: bool
    priority: int
    going_on: Request
    times: Served
    said: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    told: int = 0
    drafted: int = 0
    cached: int = 0
    rows: int = 0
    rows_before: int = 0
    slot: int = -1


@dataclass
class Totals:
    """Counts since the engine began.

    Attributes:
        finished: requests by finish reason.
        prompt_tokens, completion_tokens: of requests that ended.
        preempted: times that a request gave way because pages ran out.
        mixed_rows: rows of prompts that steps encoded.
    """

    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    preempted: int = 0
    mixed_rows: int = 0
