"""The OpenAPI document, with the statuses, bodies and keys of the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from dgraph.serve.access_log import PROBES
from dgraph.serve.settings import ServerConfig, takes_key

REFERENCE = "#/components/schemas/{model}"
UNUSED = ("HTTPValidationError", "ValidationError")
"""FastAPI's own schemas of errors, which this server answers in another form."""
REASONS = {
    400: "A field that cannot be served as it is; `param` names it.",
    401: "No key, or a wrong one.",
    403: "The server is not asked by this name (the Host header).",
    404: "No such model.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    431: "The headers are too large.",
    500: "The server failed; its log says why.",
    503: "The server takes no requests now: it loads, is busy, shuts down, or its engine has stopped.",
}
"""Meanings of errors, by status."""


class Shape(BaseModel):
    """A body of an answer; fields without a value are left out where they have a default."""

    model_config = ConfigDict(extra="forbid")


class Error(Shape):
    """The fault of a request, or of the server."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Shape):
    """Every refusal."""

    error: Error


class CachedTokens(Shape):
    """Tokens of a prompt whose keys were kept."""

    cached_tokens: int


class Usage(Shape):
    """Tokens of a request; steps and rows: forwards of its sequences, and positions that these computed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    steps: int
    rows: int


class Draft(Shape):
    """The block that is being decoded, after one step; ids are -1 and tokens null where nothing is committed."""

    offset: int
    step: int
    token_ids: list[int]
    tokens: list[str | None]
    confidence: list[float]
    kept: list[bool]


class Marked(Shape):
    """A choice's end, and the fields that `return_step_map` and `stream_mode` bring."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    step_map: list[int] = []
    token_ids: list[int] = []
    tokens: list[str] = []
    confidence: list[float] = []


class TextLogprobs(Shape):
    """Logarithms of the confidence with which tokens were committed."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class TextChoice(Marked):
    """A response to a prompt."""

    text: str
    logprobs: TextLogprobs | None


class TextPart(TextChoice):
    """The new part of it."""

    draft: Draft | None = None


class Likely(Shape):
    """A token and the logarithm of its confidence; bytes: of its text in UTF-8, null where they are not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class Committed(Likely):
    """A token of a response."""

    top_logprobs: list[Likely]


class ChatLogprobs(Shape):
    """Logarithms of the confidence with which tokens were committed."""

    content: list[Committed]
    refusal: None


class CalledFunction(Shape):
    """A function that the assistant calls, and its arguments as a text in JSON."""

    name: str
    arguments: str


class Called(Shape):
    """A call of a tool. index: its place among the calls of a stream."""

    index: int = 0
    id: str
    type: Literal["function"]
    function: CalledFunction


class Said(Shape):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[Called] = []


class ChatChoice(Marked):
    """A response to a conversation."""

    message: Said
    logprobs: ChatLogprobs | None


class Delta(Shape):
    """The new part of the assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[Called] = []


class ChatPart(Marked):
    """The new part of a response."""

    delta: Delta
    logprobs: ChatLogprobs | None
    draft: Draft | None = None


class Envelope(Shape):
    """Fields of every answer with text."""

    id: str
    created: int
    model: str


class CompletionAnswer(Envelope):
    """A completion in one piece."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class CompletionChunk(Envelope):
    """A piece of a completion."""

    object: Literal["text_completion"]
    choices: list[TextPart]
    usage: Usage | None = None


class ChatAnswer(Envelope):
    """A chat in one piece."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Envelope):
    """A piece of a chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: Usage | None = None


class Weighed(Shape):
    """An answer that was given to choose from."""

    value: str | bool
    probability: float


class WeighedLevel(Shape):
    """A level of a score."""

    value: int
    label: str
    probability: float


class PredicateAnswer(Shape):
    """The probability of a statement."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceAnswer(Shape):
    """The most probable of some answers, and how probable each is."""

    type: Literal["choice"]
    name: str | None
    confidence: float
    choice: str | bool
    probabilities: list[Weighed]


class ScoreAnswer(Shape):
    """The mean of some levels, and how probable each is."""

    type: Literal["score"]
    name: str | None
    confidence: float
    score: float
    probabilities: list[WeighedLevel]


class DecisionUsage(Shape):
    """Tokens of a request for decisions."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class DecisionAnswer(Shape):
    """Decisions."""

    object: Literal["decision"]
    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage


class ModelAnswer(Shape):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    permission: list[Any]
    model: str
    recipe: str | None
    max_model_len: int
    block_length: int
    attention: str


class ModelsAnswer(Shape):
    """Models that are served."""

    object: Literal["list"]
    data: list[ModelAnswer]


class VersionAnswer(Shape):
    """The version of dgraph."""

    version: str


class TokenizeAnswer(Shape):
    """Ids of a text; token_strs: the text of each, if that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Shape):
    """The text of ids."""

    prompt: str


class PolicyAnswer(Shape):
    """A decoding rule. preset_of: the rule whose options these are; null for a rule itself."""

    id: str
    object: Literal["policy"]
    preset_of: str | None
    options: dict[str, Any]


class PoliciesAnswer(Shape):
    """Decoding rules by name."""

    object: Literal["list"]
    data: list[PolicyAnswer]


WHOLE: dict[str, type[Shape]] = {
    "/version": VersionAnswer,
    "/v1/models": ModelsAnswer,
    "/v1/models/{name}": ModelAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/chat/completions": ChatAnswer,
    "/v1/decisions": DecisionAnswer,
    "/v1/policies": PoliciesAnswer,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
}
"""Answers in JSON, by path."""
CHUNKS: dict[str, type[Shape]] = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatChunk}
"""Data of each event of a stream, by path."""


class Documented(FastAPI):
    """An application whose OpenAPI document says what it answers.

    Args:
        settings: what the server allows.
    """

    def __init__(self, settings: ServerConfig, **options: Any):
        super().__init__(**options)
        self._settings = settings

    def openapi(self) -> dict[str, Any]:
        """The document."""
        if self.openapi_schema is None:
            self.openapi_schema = self._document()
        return self.openapi_schema

    def _document(self) -> dict[str, Any]:
        document = get_openapi(title=self.title, version=self.version, routes=self.routes)
        kinds: list[type[BaseModel]] = [ErrorBody, *WHOLE.values(), *CHUNKS.values()]
        _, own = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
        parts = document["components"]
        parts["schemas"] = {name: one for name, one in parts["schemas"].items() if name not in UNUSED} | own["$defs"]
        if self._settings.api_keys:
            parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answers = {200: _answer(path)} | {s: _refusal(path, s) for s in self._errors(path, method)}
                operation["responses"] = {str(status): answers[status] for status in sorted(answers)}
                if self._settings.api_keys and takes_key(path):
                    operation["security"] = [{"key": []}]
        return document

    def _errors(self, path: str, method: str) -> Iterator[int]:
        """Statuses of refusals that an operation can answer."""
        yield from (408, 431, 500, 503)
        if path not in PROBES and self._settings.allowed_hosts:
            yield 403
        if takes_key(path) and self._settings.api_keys:
            yield 401
        if method == "post":
            yield from (400, 404, 413)
        elif "{" in path:
            yield 404


def _answer(path: str) -> dict[str, Any]:
    """The response of a request that is served."""
    content: dict[str, Any] = {}
    if path in WHOLE:
        content["application/json"] = {"schema": _schema(WHOLE[path])}
    if path in CHUNKS:
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _event(path)}
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content["text/event-stream"] = {"itemSchema": event}  # as FastAPI writes what it streams itself
    if path == "/metrics":
        content["text/plain"] = {"schema": {"type": "string"}}
    return {"description": "It was served.", **({"content": content} if content else {})}


def _event(path: str) -> dict[str, Any]:
    """The data of each event of a stream."""
    said = "A chunk, or the error that ends the stream; the last event is `[DONE]`."
    return {"anyOf": [_schema(CHUNKS[path]), _schema(ErrorBody)], "description": said}


def _refusal(path: str, status: int) -> dict[str, Any]:
    """The response of a request that is not served."""
    if path in PROBES and status == 503:
        return {"description": REASONS[status]}
    return {"description": REASONS[status], "content": {"application/json": {"schema": _schema(ErrorBody)}}}


def _schema(kind: type[Shape]) -> dict[str, str]:
    return {"$ref": REFERENCE.format(model=kind.__name__)}
