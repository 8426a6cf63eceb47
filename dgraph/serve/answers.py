"""Conversion of an engine's events into the objects and chunks of OpenAI's API."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgraph.engine.io.detokenizer import BROKEN
from dgraph.engine.io.events import Event, Usage
from dgraph.serve.reading import Reader
from dgraph.serve.served_model import ServedModel
from dgraph.serve.translate import ParsedRequest

LEAST = -9999.0
"""The logarithm that stands for a confidence of 0, since JSON has no infinity."""

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Offsets:
    """Offsets of a response's tokens in its text, in characters, independent of how events group the tokens.

    A token that lies within a character begins where that character begins.
    """

    def __init__(self) -> None:
        self._end = 0  # characters of all tokens but the open ones
        self._open: list[int] = []  # tokens since the last whole character

    def next(self, token: int, decode: Callable[[Sequence[int]], str]) -> int:
        """The offset of the next token. decode: gives the text of ids."""
        text = decode(self._open)
        begin = self._end + len(text.rstrip(BROKEN))
        if not text.endswith(BROKEN):
            self._end, self._open = begin, []
        self._open.append(token)
        return begin


@dataclass
class Choice:
    """One response so far.

    Attributes:
        index: its place among the choices of its request.
        usage: the usage of its last event; None before the first.
        finish: why it ended; None while it goes on.
        offsets: offsets of its tokens in its text.
        reader: splits its text; None to leave it whole. calls: calls of tools so far.
        text, ids, steps, confidence: its events' contents in order; kept only for an answer in one piece.
    """

    index: int
    usage: Usage | None = None
    finish: str | None = None
    offsets: Offsets = field(default_factory=Offsets)
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    reader: Reader | None = None
    calls: int = 0


class Answer:
    """The answer to one request, as a whole or chunk by chunk.

    Args:
        model: the model that answers.
        order: the request, translated.
    """

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, model: ServedModel, order: ParsedRequest):
        self.model, self.order = model, order
        self.id, self.created = f"{self.prefix}-{random.getrandbits(128):032x}", int(time.time())
        self.choices = [Choice(index) for index in range(len(order.prompts) * order.choices)]
        self._head = self._envelope(self.chunk_kind)

    # -- overridden by each endpoint -----------------------------------------------------------------------------------

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The choice of the chunk before the first one with text; None if there is no such chunk."""
        raise NotImplementedError

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        """The field of a chunk's choice that has its text."""
        raise NotImplementedError

    def body(self, choice: Choice, text: str) -> dict[str, Any]:
        """The field of a whole choice that has its text."""
        raise NotImplementedError

    def logprobs(self, choice: Choice, ids: Sequence[int], confidence: Sequence[float]) -> dict[str, Any]:
        """The `logprobs` field for new tokens."""
        raise NotImplementedError

    # -- common to all endpoints ---------------------------------------------------------------------------------------

    def echoed(self, choice: Choice) -> str:
        """The prompt's text that is echoed before a choice's own text."""
        return self.order.texts[choice.index // self.order.choices]

    def chunks(self, choice: Choice, event: Event) -> list[str]:
        """An event as chunks in JSON; an empty list if the event has nothing that the request asked for."""
        text, found = event.text, []
        if choice.usage is None:
            text = self.echoed(choice) + text
            first = self.opening(choice)
            if first is not None:
                found.append(self._chunk(first))
        choice.usage, choice.finish = event.usage, event.finish_reason
        draft = event.draft if self.order.draft else None
        asked = self.order.step_map or self.order.logprobs is not None
        if text or choice.finish is not None or draft is not None or (asked and event.token_ids):
            said = self.part(choice, text)
            said |= self._marks(choice, event.token_ids, event.step_map, event.confidence)
            if draft is not None:
                said["draft"] = self._draft(draft)
            found.append(self._chunk(said))
        return found

    def usage_chunk(self) -> str:
        """The last chunk of a stream: the usage, without choices."""
        return f'{self._head}[],"usage":{to_json(self.usage())}}}'

    def keep(self, choice: Choice, event: Event) -> None:
        """Keep an event's contents for `whole`."""
        choice.usage, choice.finish = event.usage, event.finish_reason
        choice.text.append(event.text)
        choice.ids += event.token_ids
        choice.steps += event.step_map
        choice.confidence += event.confidence

    def whole(self) -> str:
        """The answer in one piece, in JSON."""
        choices = []
        for choice in self.choices:
            text = self.echoed(choice) + "".join(choice.text)
            said = self.body(choice, text)
            said |= self._marks(choice, choice.ids, choice.steps, choice.confidence)
            choices.append(said)
        return f'{self._envelope(self.kind)}{to_json(choices)},"usage":{to_json(self.usage())}}}'

    def usage(self) -> dict[str, Any]:
        """The tokens of all choices; a prompt's tokens count once, whatever its number of choices."""
        known = [choice.usage for choice in self.choices if choice.usage is not None]
        prompts = sum(map(len, self.order.prompts))
        made = sum(usage.completion_tokens for usage in known)
        cached = sum(c.usage.cached_tokens for c in self.choices[:: self.order.choices] if c.usage is not None)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": made,
            "total_tokens": prompts + made,
            "prompt_tokens_details": {"cached_tokens": cached},
            "steps": sum(usage.steps for usage in known),
            "rows": sum(usage.rows for usage in known),
        }

    def _envelope(self, kind: str) -> str:
        """The JSON of an object up to its choices."""
        said = {"id": self.id, "object": kind, "created": self.created, "model": self.model.id}
        return to_json(said)[:-1] + ',"choices":'

    def _chunk(self, choice: dict[str, Any]) -> str:
        usage = f',"usage":{to_json(self.usage())}' if self.order.usage_always else ""
        return f"{self._head}[{to_json(choice)}]{usage}}}"

    def _marks(
        self, choice: Choice, ids: Sequence[int], steps: Sequence[int], confidence: Sequence[float]
    ) -> dict[str, Any]:
        """The fields of a choice beside its text."""
        said: dict[str, Any] = {"logprobs": None, "finish_reason": self.finish(choice)}
        if self.order.logprobs is not None:
            said["logprobs"] = self.logprobs(choice, ids, confidence)
        if self.order.step_map:
            said["step_map"], said["token_ids"] = list(steps), list(ids)
            said["tokens"], said["confidence"] = self.model.pieces(ids), list(confidence)
        return said

    def finish(self, choice: Choice) -> str | None:
        """The reason for which a choice ended."""
        return "tool_calls" if choice.calls and choice.finish == "stop" else choice.finish

    def _draft(self, draft: Any) -> dict[str, Any]:
        return {
            "offset": draft.offset,
            "step": draft.step,
            "token_ids": list(draft.token_ids),
            "tokens": [None if token < 0 else self.model.piece(token) for token in draft.token_ids],
            "confidence": list(draft.confidence),
            "kept": list(draft.kept),
        }


class Completion(Answer):
    """Answers of /v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def opening(self, choice: Choice) -> None:
        return None

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"index": choice.index, "text": text}

    body = part

    def logprobs(self, choice: Choice, ids: Sequence[int], confidence: Sequence[float]) -> dict[str, Any]:
        pieces, logs = self.model.pieces(ids), [logarithm(c) for c in confidence]
        offsets = [choice.offsets.next(token, self.model.decode) for token in ids]
        top = [{piece: log} for piece, log in zip(pieces, logs, strict=True)] if self.order.logprobs else None
        return {"tokens": pieces, "token_logprobs": logs, "top_logprobs": top, "text_offset": offsets}


class Chat(Answer):
    """Answers of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, model: ServedModel, order: ParsedRequest):
        super().__init__(model, order)
        if order.reading is not None:
            for choice in self.choices:
                choice.reader = Reader(order.reading)

    def opening(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, choice: Choice, text: str) -> dict[str, Any]:
        if choice.reader is None:
            return {"index": choice.index, "delta": {"content": text} if text else {}}
        return {"index": choice.index, "delta": self._read(choice, text, choice.finish is not None)}

    def body(self, choice: Choice, text: str) -> dict[str, Any]:
        said: dict[str, Any] = {"content": text} if choice.reader is None else self._read(choice, text, True)
        for call in said.get("tool_calls", ()):
            del call["index"]
        content = None if said.keys() & {"tool_calls"} else ""
        return {"index": choice.index, "message": {"role": "assistant", "content": content, "refusal": None, **said}}

    @staticmethod
    def _read(choice: Choice, text: str, last: bool) -> dict[str, Any]:
        """The fields of a message that new text brings; its last text is the rest of them all."""
        assert choice.reader is not None
        parts, said = choice.reader.feed(text, last), dict[str, Any]()
        if parts.content:
            said["content"] = parts.content
        if parts.reasoning:
            said["reasoning_content"] = parts.reasoning
        if parts.calls:
            said["tool_calls"] = [
                {
                    "index": choice.calls + place,
                    "id": f"call_{random.getrandbits(96):024x}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": to_json(call.arguments)},
                }
                for place, call in enumerate(parts.calls)
            ]
            choice.calls += len(parts.calls)
        return said

    def logprobs(self, choice: Choice, ids: Sequence[int], confidence: Sequence[float]) -> dict[str, Any]:
        found = []
        for token, sure in zip(ids, confidence, strict=True):
            raw = self.model.bytes_of(token)
            one = {
                "token": self.model.piece(token),
                "logprob": logarithm(sure),
                "bytes": None if raw is None else [*raw],
            }
            found.append({**one, "top_logprobs": [one] if self.order.logprobs else []})
        return {"content": found, "refusal": None}


def logarithm(confidence: float) -> float:
    """log(confidence), or `LEAST` for a confidence of 0, as JSON has no infinity."""
    return math.log(confidence) if confidence > 0 else LEAST
