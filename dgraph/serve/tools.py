"""Tools and reasoning of a chat: the forms in which its model writes them, chosen by the server or by the template."""

from __future__ import annotations

from collections.abc import Sequence

from dgraph.errors import InputError
from dgraph.runtime.constraints.constraint import Constraint
from dgraph.serve.constraints import call_of, constraint_of
from dgraph.serve.protocol import ChatRequest, NamedTool
from dgraph.serve.reading import REASONING, TOOLS, Reading
from dgraph.serve.refusal import bad_field
from dgraph.serve.served_model import ServedModel
from dgraph.serve.settings import ServerConfig

TAIL = 16
"""Last tokens of a prompt that may begin the reasoning."""


def reading_of(body: ChatRequest, model: ServedModel, settings: ServerConfig) -> Reading | None:
    """The reading of the responses to a chat; None to leave them whole. Raises `Refusal`.

    The forms are those that the server was told, else those that the chat template shows.
    """
    if body.functions and (body.model_extra or {}).get("function_call") != "none":
        raise bad_field("functions", '`functions` is not supported; use tools, omit it, or send function_call: "none".')
    names = [tool.function.name for tool in body.tools or ()]
    choice = body.tool_choice or ("auto" if names else "none")
    if choice not in ("none", "auto"):
        _check_forced(choice, names)
    tools = None
    if names and choice != "none":
        form = settings.tool_parser or model.reading_form(TOOLS)
        if form is None and model.reads_in_chats("tools"):
            form = "hermes"
        tools = TOOLS[form] if form else None
    shown = settings.reasoning_parser or model.reading_form(REASONING)
    reasoning = REASONING[shown] if shown not in (None, "none") and body.separate_reasoning is not False else None
    if tools is None and reasoning is None:
        return None
    return Reading(tools, frozenset(names), body.parallel_tool_calls is not False, reasoning)


def _check_forced(choice: str | NamedTool, names: Sequence[str]) -> None:
    """Refuse a call that must be made of a tool that is not there."""
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if not names:
        raise bad_field("tool_choice", "tool_choice asks for a call, and there are no tools; give tools.")
    if named is not None and named not in names:
        raise bad_field("tool_choice", "tool_choice names a function that is not among the tools; name one of them.")


def forced_call(body: ChatRequest, reading: Reading | None) -> Constraint | None:
    """The constraint to a call that a chat asks for; None if it asks for none. Raises `Refusal`."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    form = None if reading is None else reading.tools
    if form is None or form.arguments is None:
        said = "the form in which this model calls tools has no grammar here"
        raise bad_field("tool_choice", f"{said}; send tool_choice auto or none.")
    if constraint_of(body) is not None:
        raise bad_field("tool_choice", "tool_choice asks for a call, beside another constraint; leave one of them out.")
    tools = {tool.function.name: tool.function.parameters or {} for tool in body.tools or ()}
    if isinstance(choice, NamedTool):
        tools = {choice.function.name: tools[choice.function.name]}
    marks = (form.begin, form.end) if form.end else ("", "")
    try:
        return call_of(tools, form.arguments, *marks)
    except InputError as error:
        raise bad_field("tools", str(error)) from None
