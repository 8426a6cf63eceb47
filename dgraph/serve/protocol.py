"""Requests as clients send them: OpenAI's fields, those of load clients, and our own. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

OWN = "own"
"""The type of errors that need no other words than their own."""


def _whole(text: str) -> str:
    """A text without halves of characters, which JSON can have and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(OWN, "a text has no half of a character (a lone surrogate)") from None
    return text


def one_of(forms: str) -> WrapValidator:
    """Of a field that has several forms: refuses what has none of them by naming the forms, not by what each misses."""

    def check(value: Any, valid: Any) -> Any:
        try:
            return valid(value)
        except ValidationError as error:
            own = [each["msg"] for each in error.errors() if each["type"] == OWN]
            said = own[0] if own else f"expected {forms}, got {kind_of(value)}"
            raise PydanticCustomError(OWN, "{said}", {"said": said}) from None

    return WrapValidator(check)


def kind_of(value: Any) -> str:
    """What a value of JSON is, without the texts in it, which are not for everybody."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (int, float)):
        return str(value) if abs(value) < 10**20 else "a number too large"
    if isinstance(value, str):
        return f"a text of length {len(value)}"
    return f"a list of length {len(value)}" if isinstance(value, list) else "an object"


T = TypeVar("T")
Listed = Annotated[list[T], Field(fail_fast=True)]
"""A list of which the first fault alone is told: to collect a million takes half a minute."""
Text = Annotated[str, AfterValidator(_whole)]
Name = Annotated[Text, Field(max_length=100)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Segment = Annotated[Text | Positive, one_of("a text that is fixed, or a number of free positions, at least 1")]
Prompt = Annotated[
    Text | Listed[Text] | Listed[Id] | Listed[Listed[Id]],
    one_of("a text, a list of texts, a list of ids (whole numbers from 0), or a list of such lists"),
]
Stops = Annotated[Stop | Listed[Stop], one_of("a text of 1 to 1000 characters, or a list of such texts")]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "min_p": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Known fields that this server cannot serve, and the values that ask for nothing."""


class Lenient(BaseModel):
    """Fields that are not declared are kept aside."""

    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(Lenient):
    """Of a stream: usage in one more chunk at its end, or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(Lenient):
    """What both endpoints take.

    threshold, steps, policy, block_length: as in `dgraph.Decoding`; stream_mode: "draft" brings the block that is being
    decoded in a field of its own; return_step_map: which step committed each token; canvas: the response in segments, a
    text that is fixed or a number of positions that are free.
    """

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
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    threshold: Share | None = None
    steps: Positive | None = None
    policy: Name | None = None
    block_length: Positive | None = None
    stream_mode: Literal["committed", "draft"] | None = None
    return_step_map: bool | None = None
    canvas: Annotated[Listed[Segment], Field(min_length=1)] | None = None


class CompletionRequest(Asked):
    """POST /v1/completions. A prompt is a text as it is, without a chat frame, or ids."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None


CONTENT = "a text, or a list of parts with a type and a text"
"""What a message says."""


class Part(Lenient):
    """A part of a message."""

    type: Text
    text: Text | None = None


class Message(Lenient):
    """A turn of a conversation."""

    role: Annotated[Name, Field(min_length=1)]
    content: Annotated[Text | Listed[Part] | None, one_of(CONTENT)] = None


class ChatRequest(Asked):
    """POST /v1/chat/completions. Messages are framed by the model's chat template."""

    messages: Annotated[Listed[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
