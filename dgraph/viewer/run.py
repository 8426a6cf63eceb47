"""A run: one response and how it came about, as plain values that a page replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dgraph.viewer.page import page

if TYPE_CHECKING:
    from dgraph.engine.io.events import Event

VERSION = 1
"""Version of the JSON; a viewer of another version does not know its names."""


@dataclass(frozen=True)
class Step:
    """The current block of W positions, after one step; tuples have W entries.

    Attributes:
        step: step of the request, from 1.
        offset: position of the first of them in the response.
        token_ids: -1 where there is a mask.
        tokens: text of each, None for a mask.
        confidence: with which each was committed, in [0, 1]; 0 for a mask.
        kept: False where the step evicted the position's row.
    """

    step: int
    offset: int
    token_ids: tuple[int, ...]
    tokens: tuple[str | None, ...]
    confidence: tuple[float, ...]
    kept: tuple[bool, ...]


@dataclass(frozen=True)
class Token:
    """A token of the finished response.

    Attributes:
        token: its id.
        text: its text. Joined, texts are the response as far as no character is made of several tokens.
        step: that committed it, from 1; 0 where it was given.
        confidence: with which, in [0, 1].
    """

    token: int
    text: str
    step: int
    confidence: float


@dataclass(frozen=True)
class Run:
    """One response. The viewer's scripts take its `to_json`, and a server's stream adds up to it.

    Attributes:
        model, recipe: by name.
        prompt: its text.
        block_length: positions of a block.
        steps: in order.
        tokens: tokens of the response, by position.
        usage: counts, by the names of `dgraph.engine.io.events.Usage`.
        seconds: from the request to its last token.
    """

    model: str
    recipe: str
    prompt: str
    block_length: int
    steps: tuple[Step, ...]
    tokens: tuple[Token, ...]
    usage: Mapping[str, int]
    seconds: float

    @classmethod
    def of(
        cls,
        events: Sequence[Event],
        decode: Callable[[Sequence[int]], str],
        *,
        model: str,
        recipe: str,
        prompt: str,
        block_length: int,
    ) -> Run:
        """Build a run from the events of a request that asked for drafts.

        Args:
            events: all of them; the last has the request's times.
            decode: text of ids.
        """
        served = events[-1].served
        assert served is not None, "the last event of a request has its times"
        drafts = (event.draft for event in events if event.draft is not None)
        return cls(
            model=model,
            recipe=recipe,
            prompt=prompt,
            block_length=block_length,
            steps=tuple(
                Step(
                    draft.step,
                    draft.offset,
                    draft.token_ids,
                    tuple(None if token < 0 else decode([token]) for token in draft.token_ids),
                    draft.confidence,
                    draft.kept,
                )
                for draft in drafts
            ),
            tokens=tuple(
                Token(token, decode([token]), step, confidence)
                for event in events
                for token, step, confidence in zip(event.token_ids, event.step_map, event.confidence, strict=True)
            ),
            usage=asdict(events[-1].usage),
            seconds=served.ended - served.arrived,
        )

    @property
    def decoded(self) -> int:
        """Positions that were committed, up to the length that was asked for: some may lie after the response's end."""
        return len({s.offset + i for s in self.steps for i, token in enumerate(s.token_ids) if token >= 0})

    def to_json(self) -> dict[str, Any]:
        """Plain values, and the version."""
        return {"version": VERSION, **asdict(self)}


_BODY = """<header class="masthead">
<h1>dgraph</h1>
<p class="quiet">A response comes about step by step: see which token is committed when.</p>
</header>
<main id="viewer"></main>
<noscript>This page needs JavaScript; all of it is in this file.</noscript>
"""


def page_of(runs: Sequence[Run], title: str = "dgraph") -> str:
    """A self-contained page that replays runs, side by side."""
    values = [run.to_json() for run in runs]
    return page(title, _BODY, styles=("look.css", "viewer.css"), script="saved.js", data={"runs": values})
