"""Reading of a response's text while it arrives: calls of tools and reasoning apart from content.

A block brings many tokens at once, so one piece of text may hold several markers, or the beginning of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

QUOTE = '<|"|>'
"""Mark around texts in Gemma's calls."""
_BARE = re.compile(r"[^,{}\[\]]+")
_KEY = re.compile(r"\s*([^:{}\[\],]+):")


@dataclass(frozen=True)
class Call:
    """A call of a tool: its name, and its arguments as an object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolForm:
    """The form in which a model calls tools.

    Attributes:
        begin, end: marks around a call.
        read: the calls of a text between the marks; raises `ValueError` for any other text.
        arguments: key of a call's arguments, if it is an object in JSON.
        bare: a response may be calls without marks, if it begins with a brace.
        shown: texts of a chat template that show the form; None for its begin alone.
    """

    begin: str
    end: str
    read: Callable[[str], list[Call]]
    arguments: str | None = None
    bare: bool = False
    shown: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ReasoningForm:
    """The marks around a model's reasoning, and texts of a chat template that show it; None for its begin alone."""

    begin: str
    end: str
    shown: tuple[str, ...] | None = None


def read_json(text: str) -> list[Call]:
    """Calls as JSON objects with a name and arguments (or parameters), one after the other, with ";" between them."""
    found, decoder, at = [], json.JSONDecoder(), 0
    text = text.strip()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        found += [_call_of(one) for one in (value if isinstance(value, list) else [value])]
        while at < len(text) and text[at] in "; \n\t\r":
            at += 1
    if not found:
        raise ValueError("no call")
    return found


def _call_of(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return Call(value["name"], arguments)


def read_gemma(text: str) -> list[Call]:
    """A call as Gemma writes it: `call:NAME{key:<|"|>text<|"|>,other:1}`."""
    head, brace, _ = text.partition("{")
    word, colon, name = head.strip().partition(":")
    if (word, colon, brace) != ("call", ":", "{") or not name.strip():
        raise ValueError("no call")
    rest = text.strip()[len(head.lstrip()) :]
    value, at = _gemma_value(rest, 0)
    if rest[at:].strip() or not isinstance(value, dict):
        raise ValueError("no object of arguments")
    return [Call(name.strip(), value)]


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """A value that begins at an index of a text, and the index after it."""
    while text[at : at + 1].isspace():
        at += 1
    if text.startswith(QUOTE, at):
        end = text.index(QUOTE, at + len(QUOTE))
        return text[at + len(QUOTE) : end], end + len(QUOTE)
    opened = text[at : at + 1]
    if opened in ("{", "["):
        return _gemma_many(text, at + 1, "}" if opened == "{" else "]")
    bare = _BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    return json.loads(bare.group().strip()), bare.end()


def _gemma_many(text: str, at: int, closed: str) -> tuple[Any, int]:
    """The values of an object or a list up to its end."""
    named: dict[str, Any] = {}
    listed: list[Any] = []
    while True:
        while text[at : at + 1].isspace() or text[at : at + 1] == ",":
            at += 1
        if text[at : at + 1] == closed:
            return named if closed == "}" else listed, at + 1
        key = None
        if closed == "}":
            found = _KEY.match(text, at)
            if found is None:
                raise ValueError("no key")
            key, at = found.group(1).strip().removeprefix(QUOTE).removesuffix(QUOTE), found.end()
        value, at = _gemma_value(text, at)
        listed.append(value)
        if key is not None:
            named[key] = value


TOOLS = {
    "gemma": ToolForm("<|tool_call>", "<tool_call|>", read_gemma),
    "hermes": ToolForm("<tool_call>", "</tool_call>", read_json, "arguments"),
    "llama3_json": ToolForm(
        "<|python_tag|>", "", read_json, "parameters", bare=True, shown=("<|python_tag|>", '"parameters"')
    ),
}
"""Forms of calls by name; of several that a chat template shows the first is taken."""
REASONING = {
    "gemma": ReasoningForm("<|channel>thought", "<channel|>", shown=("<|channel>",)),
    "think": ReasoningForm("<think>", "</think>"),
}
"""Forms of reasoning by name, in the same order."""


@dataclass(frozen=True)
class Reading:
    """The forms in which the responses to a request are read.

    Attributes:
        tools: the form of calls; None reads none.
        names: the tools that may be called; a call of another stays text.
        parallel: False to keep the first call alone.
        reasoning: the form of reasoning; None leaves it in the text.
        begun: the prompt ends within reasoning.
    """

    tools: ToolForm | None = None
    names: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: ReasoningForm | None = None
    begun: bool = False

    @property
    def marks(self) -> list[str]:
        """Marks that must be seen in the text, also where they are special tokens."""
        forms = [form for form in (self.tools, self.reasoning) if form is not None]
        marks = [mark for form in forms for mark in (form.begin, form.end) if mark]
        return [*marks, *([QUOTE] if self.tools is TOOLS["gemma"] else [])]


@dataclass
class Parts:
    """New parts of a response."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Reader:
    """Split the text of one response into content, reasoning and calls, piece by piece."""

    def __init__(self, reading: Reading):
        self._how, self._held = reading, ""
        self._in = "reasoning" if reading.begun else "text"
        self._started = self._called = self._gap = False  # a gap: white space after a call, which is no content

    def feed(self, text: str, last: bool = False) -> Parts:
        """Add text; return the parts that no later text can change. last: no text follows."""
        self._held += text
        found = Parts()
        states = {"text": self._text, "reasoning": self._reasoning, "call": self._call}
        while states[self._in](found):
            pass
        if last:
            self._rest(found)
        return found

    def _text(self, found: Parts) -> bool:
        how = self._how
        if how.tools is not None and how.tools.bare and not self._started:
            begun = self._held.lstrip()
            if not begun:
                return False
            if begun[0] == "{":
                self._in, self._started = "call", True
                return True
        marks = {form.begin: state for form, state in ((how.tools, "call"), (how.reasoning, "reasoning")) if form}
        first = min(((self._held.find(mark), mark) for mark in marks if mark in self._held), default=None)
        if first is None:
            self._give(found, len(self._held) - held_back(self._held, list(marks)))
            return False
        at, mark = first
        self._give(found, at)
        self._held, self._in = self._held[len(mark) :], marks[mark]
        return True

    def _give(self, found: Parts, count: int) -> None:
        said, self._held = self._held[:count], self._held[count:]
        self._started = self._started or bool(said.strip())
        self._say(found, said)

    def _say(self, found: Parts, text: str) -> None:
        """Add content, without the white space between calls and after them."""
        text = text.lstrip() if self._gap else text
        self._gap = self._gap and not text
        found.content += text

    def _reasoning(self, found: Parts) -> bool:
        assert self._how.reasoning is not None
        end = self._how.reasoning.end
        at = self._held.find(end)
        count = at if at >= 0 else len(self._held) - held_back(self._held, [end])
        found.reasoning += self._held[:count]
        self._held = self._held[count + (len(end) if at >= 0 else 0) :]
        if at >= 0:
            self._in = "text"
        return at >= 0

    def _call(self, found: Parts) -> bool:
        """Read a call up to the first end mark at which it is one: an argument may hold the mark."""
        form = self._how.tools
        assert form is not None
        if not form.end:
            return False  # such a call is the rest of the response
        at = self._held.find(form.end)
        while at >= 0:
            try:
                calls = form.read(self._held[:at])
            except (ValueError, RecursionError):
                at = self._held.find(form.end, at + 1)
                continue
            if any(call.name not in self._how.names for call in calls):
                self._started = True
                self._say(found, form.begin + self._held[: at + len(form.end)])
            else:
                self._take(found, calls)
            self._held, self._in = self._held[at + len(form.end) :], "text"
            return True
        return False

    def _take(self, found: Parts, calls: list[Call]) -> None:
        if not self._how.parallel:
            calls = [] if self._called else calls[:1]
        found.calls += calls
        self._called = self._gap = True

    def _rest(self, found: Parts) -> None:
        """Take what is held when the response has ended: a call without its end mark, or text."""
        form = self._how.tools
        held, self._held = self._held, ""
        if self._in == "reasoning":
            found.reasoning += held
        elif self._in == "call" and form is not None:
            try:
                calls = form.read(held)
            except (ValueError, RecursionError):
                calls = []
            if calls and all(call.name in self._how.names for call in calls):
                self._take(found, calls)
            else:
                self._say(found, ("" if form.bare and held.lstrip().startswith("{") else form.begin) + held)
        else:
            self._say(found, held)


def held_back(text: str, marks: list[str]) -> int:
    """Characters at the end of a text that may begin one of the marks."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    counts = range(min(longest, len(text)), 0, -1)
    return next((count for count in counts if any(mark.startswith(text[-count:]) for mark in marks)), 0)
