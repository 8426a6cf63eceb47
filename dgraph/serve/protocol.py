"""Requests as clients send them: OpenAI's fields, those of load clients, and our own."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from dgraph.serve.constraints import Constrained
from dgraph.serve.fields import (
    OWN,
    Count,
    Fields,
    Finite,
    Id,
    Listed,
    Name,
    Positive,
    Prompt,
    Segment,
    Share,
    Stops,
    Text,
    TokenKey,
    one_of,
)
from dgraph.serve.neutral import ASKED, CALL, CHAT, MESSAGE, PART, STREAM


class StreamOptions(Fields):
    """Options of a stream: usage in one more chunk at its end, or in every chunk."""

    neutral = STREAM

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(Constrained):
    """Fields of both endpoints.

    threshold, steps, policy, block_length, open_blocks, and settings of sampling: as in `dgraph.Decoding`; stream_mode:
    "draft" brings the blocks that are being decoded in a field of its own; return_step_map: which step committed each
    token; canvas: the response in segments, a text that is fixed or a number of positions that are free.
    """

    neutral = ASKED

    model: Text | None = None
    max_tokens: Positive | None = None
    n: Positive | None = None
    stop: Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    logit_bias: dict[TokenKey, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    allowed_token_ids: Listed[Id] | None = None
    bad_words: Listed[Annotated[Text, Field(min_length=1, max_length=1000)]] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    stop_token_ids: Listed[Id] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    threshold: Share | None = None
    steps: Positive | None = None
    policy: Name | None = None
    block_length: Positive | None = None
    open_blocks: Positive | None = None
    stream_mode: Literal["committed", "draft"] | None = None
    return_step_map: bool | None = None
    canvas: Annotated[Listed[Segment], Field(min_length=1)] | None = None


class CompletionRequest(Asked):
    """POST /v1/completions. A prompt is a text as it is, without a chat frame, or ids."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None


CHOICE = '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
"""The forms of `tool_choice`."""
CONTENT = "a text, or a list of parts with a type and a text"
"""The forms of a message's content."""


class Part(Fields):
    """A part of a message."""

    neutral = PART

    type: Text
    text: Text | None = None

    def stray(self) -> tuple[str, str] | None:
        """None for a part that is no text, which is refused for what it is."""
        return super().stray() if self.text is not None else None


def _object(arguments: Any) -> Any:
    """Arguments of a call as an object, which chat templates read; clients send them as a text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PydanticCustomError(OWN, "arguments of a call are an object in JSON")
    return found


class Function(Fields):
    """A function that an assistant called."""

    name: Name
    arguments: Annotated[dict[str, Any] | Text | None, AfterValidator(_object)] = None


class ToolCall(Fields):
    """A call of a tool in an assistant's earlier turn."""

    neutral = CALL

    id: Text | None = None
    type: Literal["function"] | None = None
    function: Function

    @property
    def turn(self) -> dict[str, Any]:
        """The call as a chat template reads it."""
        return self.model_dump(exclude_none=True)


class Message(Fields):
    """A turn of a conversation."""

    neutral = MESSAGE

    role: Annotated[Name, Field(min_length=1)]
    content: Annotated[Text | Listed[Part] | None, one_of(CONTENT)] = None
    name: Name | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: Text | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """The message as a chat template reads it, except its content."""
        given = self.model_dump(exclude_none=True, exclude={"content", "tool_calls"})
        calls = [call.turn for call in self.tool_calls or ()]
        return {**given, "tool_calls": calls} if calls else given


class ToolFunction(Fields):
    """A function that the model may call. parameters: a JSON schema of its arguments."""

    name: Annotated[Name, Field(min_length=1)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Fields):
    """The name of a function."""

    name: Name


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Asked):
    """POST /v1/chat/completions. Messages are framed by the model's chat template.

    add_generation_prompt, continue_final_message: how the prompt ends, as in vLLM; documents, chat_template_kwargs: for
    the chat template; tools, tool_choice, parallel_tool_calls: as OpenAI has them; separate_reasoning: false to leave
    reasoning in the content.
    """

    neutral = CHAT

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[Tool] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, one_of(CHOICE)] = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    functions: Listed[dict[str, Any]] | None = None
