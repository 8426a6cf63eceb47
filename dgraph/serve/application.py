"""The ASGI application: routes and error handlers."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, JSONResponse, Response

from dgraph.serve.access_log import Record
from dgraph.serve.answers import Answer, Chat, Completion
from dgraph.serve.decisions import Deciding, DecisionRequest
from dgraph.serve.document import Documented
from dgraph.serve.fields import OWN, kind_of
from dgraph.serve.guard import Guard
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.metrics import Metrics, Pace
from dgraph.serve.protocol import ChatRequest, CompletionRequest
from dgraph.serve.refusal import Refusal
from dgraph.serve.running import HttpStream
from dgraph.serve.served_model import ServedModel
from dgraph.serve.settings import ServerConfig
from dgraph.serve.streams import RefusalResponse, StreamResponse, WholeResponse
from dgraph.serve.tokens import DetokenizeRequest, TokenizeRequest, detokenized, rules, tokenized
from dgraph.serve.translate import ParsedRequest, parsed_chat, parsed_completion
from dgraph.serve.turns import Turns
from dgraph.viewer import FILES

NO_JSON = Refusal(400, "the body is not JSON.", code="json_invalid")
TOLD = (OWN, "missing", "too_short", "too_long")
"""Types of validation errors whose own message says what was sent."""
SECURE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers of the page and its files: nothing comes from another host."""


def build(lifetime: Lifetime, settings: ServerConfig) -> FastAPI:
    """Build the application over the models of a lifetime, now and later. Its `state` has `lifetime`."""
    version = importlib.metadata.version("dgraph")
    app = Documented(settings, title="dgraph", version=version, docs_url=None, redoc_url=None)
    app.state.lifetime = lifetime
    metrics, turns = Metrics(lifetime), Turns()
    _add_errors(app)
    _add_status(app, lifetime, metrics)
    _add_answers(app, lifetime, settings, metrics, turns)
    _add_decisions(app, lifetime, settings, metrics, turns)
    _add_tokens(app, lifetime, turns)
    _add_page(app)
    app.add_middleware(Guard, settings=settings, lifetime=lifetime)
    if settings.allowed_origins:  # around the guard, whose refusals such pages read, too
        origins = list(settings.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_status(app: FastAPI, lifetime: Lifetime, metrics: Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 as long as no engine has died."""
        return Response(status_code=200 if lifetime.alive else 503)

    @app.get("/ping", include_in_schema=False)
    async def ping() -> Response:
        return await health()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """200 while the server takes requests: not while it loads, and not while it shuts down."""
        return Response(status_code=200 if lifetime.ready else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of dgraph."""
        return {"version": importlib.metadata.version("dgraph")}

    @app.get("/metrics")
    async def scrape() -> Response:
        """Metrics, as Prometheus reads them."""
        return Response(metrics.text(), media_type=metrics.media_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The models that are served."""
        lifetime.model(None)
        return {"object": "list", "data": [model.describe() for model in lifetime.models.values()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """A model that is served, by its name."""
        return lifetime.model(name).describe()


def _add_answers(app: FastAPI, lifetime: Lifetime, settings: ServerConfig, metrics: Metrics, turns: Turns) -> None:
    async def answer(
        request: Request, name: str | None, translate: Callable[[ServedModel], ParsedRequest], kind: type[Answer]
    ) -> Response:
        model = lifetime.model(name)
        running, record, meter = HttpStream(model), request.scope["record"], metrics.of(model.id)
        lifetime.enter(running)
        try:
            async with turns.of(record.size):
                with meter.taking():
                    await running.begin(translate)
        except BaseException:
            lifetime.leave(running)
            raise
        order = running.order
        meter.began(order)
        _note(record, model, order, settings)
        pace, answer = meter.follow(running.left, record.began), kind(model, order)

        def ended() -> None:
            lifetime.leave(running)
            _note_end(record, answer, pace)

        response = StreamResponse if order.stream else WholeResponse
        return response(running, answer, pace.seen, ended, settings.keep_alive)

    @app.post("/v1/completions", response_class=JSONResponse)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue texts or ids as they are."""
        return await answer(request, body.model, lambda model: parsed_completion(body, model, settings), Completion)

    @app.post("/v1/chat/completions", response_class=JSONResponse)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a conversation."""
        return await answer(request, body.model, lambda model: parsed_chat(body, model, settings), Chat)


def _add_decisions(app: FastAPI, lifetime: Lifetime, settings: ServerConfig, metrics: Metrics, turns: Turns) -> None:
    @app.post("/v1/decisions")
    async def decisions(request: Request, body: DecisionRequest) -> Response:
        """The probabilities of given answers, in one forward for each question."""
        model = lifetime.model(body.model)
        request.scope["record"].facts["model"] = model.id
        deciding = Deciding(body, model, settings)
        lifetime.enter(deciding)
        try:
            async with turns.of(request.scope["record"].size):
                with metrics.of(model.id).taking():
                    await deciding.begin()
            return JSONResponse(await deciding.answer(request.receive))
        finally:
            lifetime.leave(deciding)


def _add_tokens(app: FastAPI, lifetime: Lifetime, turns: Turns) -> None:
    @app.get("/v1/policies")
    async def policies() -> dict[str, Any]:
        """The decoding rules that a request may name."""
        return rules()

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        """The ids of a text or of a conversation."""
        model = lifetime.model(body.model)
        async with turns.of(request.scope["record"].size):
            return await asyncio.to_thread(tokenized, body, model)

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
        """The text of ids, without special tokens."""
        model = lifetime.model(body.model)
        async with turns.of(request.scope["record"].size):
            return await asyncio.to_thread(detokenized, body, model)


def _note(record: Record, model: ServedModel, order: ParsedRequest, settings: ServerConfig) -> None:
    """Add a request's model, stream flag, prompt tokens and, if set, prompts to its line of the log."""
    record.facts |= {"model": model.id, "stream": order.stream, "prompt_tokens": sum(map(len, order.prompts))}
    if settings.log_prompts:
        record.facts["prompts"] = [model.decode(ids) for ids in order.prompts]


def _note_end(record: Record, answer: Answer, pace: Pace) -> None:
    """Add a request's times, completion tokens and finish reasons to its line of the log."""
    times = {"queue_seconds": pace.queued, "first_seconds": pace.first}
    record.facts |= {name: round(took, 6) for name, took in times.items() if took is not None}
    record.facts["completion_tokens"] = sum(c.usage.completion_tokens for c in answer.choices if c.usage is not None)
    record.facts["finish"] = [choice.finish for choice in answer.choices]


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Exception) -> Response:
        assert isinstance(refusal, Refusal)
        return RefusalResponse(refusal)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return RefusalResponse(_described(error.errors()))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 400:  # nested too deeply, or too large, for a reader of JSON
            return RefusalResponse(NO_JSON)
        found = Refusal(error.status_code, str(error.detail), code={404: "not_found"}.get(error.status_code))
        return RefusalResponse(found, error.headers)


def _described(errors: Sequence[Any]) -> Refusal:
    """A refusal for the first error of a request; it never repeats the value that was sent."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return NO_JSON
    if (field := first.get("ctx", {}).get("field")) is not None:  # an undeclared field, with which its message begins
        path = ".".join([*where, first["msg"]])
        return Refusal(400, f"{path}.", param=(*where, field)[0])
    if first["type"] == "string_unicode":  # in the name of a field
        path = ".".join([*where, "a name"])
        return Refusal(400, f"{path} has no half of a character (a lone surrogate).", param=(*where, None)[0])
    if not where:
        return Refusal(400, "the body must be a JSON object, sent as application/json.", code="json_invalid")
    said, value = first["msg"], first["input"]
    if first["type"] == "union_tag_invalid":  # its own message repeats what was sent
        said, value = f"type: expected one of {first['ctx']['expected_tags']}", value["type"]
    got = "" if first["type"] in TOLD else f", got {kind_of(value)}"
    return Refusal(400, f"{'.'.join(where)}: {said}{got}.", param=where[0])


def _add_page(app: FastAPI) -> None:
    files = {path.name for path in FILES.iterdir()}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return await part("index.html")

    @app.get("/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in files:
            raise Refusal(404, "there is nothing of that name.", code="not_found")
        return FileResponse(FILES / name, headers=SECURE)
