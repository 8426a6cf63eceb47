"""Translation of a client's request into an engine's, or into a refusal that names the field."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgraph.engine.io.detokenizer import Shown
from dgraph.errors import InputError, UnknownName
from dgraph.runtime.constraints.constraint import Constraint
from dgraph.runtime.decoding import RULE, Decoding
from dgraph.serve.constraints import constraint_of
from dgraph.serve.fields import named
from dgraph.serve.neutral import TEMPLATE
from dgraph.serve.protocol import Asked, ChatRequest, CompletionRequest
from dgraph.serve.reading import Reading
from dgraph.serve.refusal import Refusal, bad_field
from dgraph.serve.served_model import ServedModel
from dgraph.serve.settings import ServerConfig
from dgraph.serve.tools import TAIL, forced_call, reading_of

COMPLETION_TOKENS = 16
"""Default new tokens of a completion, as in OpenAI's API."""
CHAT_TOKENS = 128
"""Default new tokens of a chat, for models whose every step forwards all of them."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids", "bad_words"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "include_stop_str_in_output"),
)
DECODING = (*RULE, *SAMPLING, "block_length", "open_blocks", "min_tokens")
"""Fields of a request that are also fields of a `Decoding`."""
TAKEN = (*CompletionRequest.model_fields, *ChatRequest.model_fields)
"""Fields that a refusal can name."""
RESERVED = frozenset(
    ("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template")
)
"""Names that `encode_chat` uses for other things than variables of a chat template."""


@dataclass(frozen=True)
class ParsedRequest:
    """One request of a client as an engine takes it: every prompt `choices` times.

    Attributes:
        prompts: ids of each prompt.
        where: the request's field that has the prompts.
        decodings: decoding of each prompt.
        canvas: ids of the response's fixed positions, with None at free ones; None for a response without fixed ones.
        texts: texts that `echo` puts before the responses of each prompt; "" without `echo`.
        choices: responses per prompt.
        stream: True for server-sent events.
        usage_at_end, usage_always: True for usage in one more chunk at the end, and in every chunk.
        draft: True if chunks bring the block that is being decoded.
        step_map: True if the answer brings ids, their texts, steps and confidences.
        reading: how its text is split; None to leave it whole. shown: special tokens that are written out for that.
        logprobs: likely tokens beside the logarithm of each token's confidence; None for no logarithms.
    """

    prompts: list[list[int]]
    where: str
    decodings: list[Decoding]
    canvas: list[int | None] | None
    texts: list[str]
    choices: int
    stream: bool
    usage_at_end: bool
    usage_always: bool
    draft: bool
    step_map: bool
    logprobs: int | None
    reading: Reading | None = None
    shown: Mapping[int, str] = field(default_factory=dict)


def parsed_completion(body: CompletionRequest, model: ServedModel, settings: ServerConfig) -> ParsedRequest:
    """The order of a completion; raises `Refusal`."""
    prompts, texts = _prompts(body, model, settings)
    if body.logprobs is not None:
        if body.logprobs > 1:
            raise bad_field("logprobs", f"only the chosen token's is known: logprobs is 0 or 1, got {body.logprobs}.")
        if body.echo:
            raise bad_field("logprobs", "a diffusion model gives no probabilities of a prompt: leave echo or it out.")
    wanted = body.max_tokens or COMPLETION_TOKENS
    return _order(
        body, model, settings, prompts, texts if body.echo else None, wanted, body.logprobs, constraint_of(body)
    )


def parsed_chat(body: ChatRequest, model: ServedModel, settings: ServerConfig) -> ParsedRequest:
    """The order of a chat; raises `Refusal`."""
    if body.top_logprobs and not body.logprobs:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true.")
    if body.top_logprobs and body.top_logprobs > 1:
        said = f"top_logprobs is 0 or 1, got {body.top_logprobs}"
        raise bad_field("top_logprobs", f"only the chosen token's is known: {said}.")
    reading = reading_of(body, model, settings)
    ids = framed(body, model)
    constraint = forced_call(body, reading) or constraint_of(body)
    shown = {} if reading is None else model.shown(reading.marks)
    # A constraint holds from the first token on, so that such a response has no reasoning to end.
    if reading is not None and reading.reasoning is not None and constraint is None:
        assert model.engine.tokenizer is not None, "it framed the conversation"
        tail = Shown(model.engine.tokenizer, shown.items()).decode(ids[-TAIL:]).rstrip()
        reading = replace(reading, begun=tail.endswith(reading.reasoning.begin))
    wanted = body.max_completion_tokens or body.max_tokens or settings.default_max_tokens
    if wanted is None:
        room = model.engine.max_tokens - len(ids)
        wanted = max(1, room if model.engine.spec.attention == "block_causal" else min(room, CHAT_TOKENS))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    order = _order(body, model, settings, [ids], None, wanted, logprobs, constraint)
    return order if reading is None else replace(order, reading=reading, shown=shown)


def framed(body: ChatRequest, model: ServedModel) -> list[int]:
    """Ids of a conversation, framed by the chat template with the client's options."""
    turns = [{**message.turn, "content": text_of(message.content, "messages")} for message in body.messages]
    calls = [place for place, message in enumerate(body.messages) if message.tool_calls]
    try:
        options = _template_options(body, model)
        ids = model.encode_chat(turns, **options)
        if calls and ids == model.encode_chat([_without_calls(turn) for turn in turns], **options):
            said = "is not shown by the model's chat template; leave it out"
            raise bad_field("messages", f"messages.{calls[0]}.tool_calls {said}.")
    except InputError as error:
        raise bad_field("messages", str(error)) from None
    return ids


def _without_calls(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name != "tool_calls"}


def _template_options(body: ChatRequest, model: ServedModel) -> dict[str, Any]:
    """Further arguments of `encode_chat`."""
    given: dict[str, Any] = body.chat_template_kwargs or {}
    options: dict[str, Any] = {}
    if body.continue_final_message:
        if body.add_generation_prompt is not False:
            said = "no new turn begins after a message that goes on"
            advice = "say add_generation_prompt false, or leave continue_final_message out"
            raise bad_field("continue_final_message", f"{said}; {advice}.")
        options["continue_final_message"] = True
    if body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    if body.documents:
        options["documents"] = body.documents
    if body.tools and body.tool_choice != "none":
        options["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    for large in ("documents", TEMPLATE):
        model.check_fits(getattr(body, large) or (), large)
    model.check_fits(options.get("tools", ()), "tools")
    for name in given:
        if name in RESERVED:
            raise bad_field(TEMPLATE, f"{TEMPLATE}.{named(name)} is a field of its own; give it beside the messages.")
    for name in (*options, *given):
        if not model.reads_in_chats(name):
            field, path = (TEMPLATE, f"{TEMPLATE}.{named(name)}") if name in given else (name, name)
            none = ', or send tool_choice: "none"' if name == "tools" else ""
            raise bad_field(field, f"{path} is not read by the chat template of this model; leave it out{none}.")
    return {**given, **options}


def text_of(content: str | list[Any] | None, field: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a message, whose content is a text or parts of these types; raises `Refusal`.

    Args:
        content: a text, or parts that have a `type` and a `text`; None for an empty text.
        field: the request's field that has the message, which a refusal names.
        kinds: types of the parts that are texts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in kinds or part.text is None:
            got = f"a part of a message is a text here, got one of type {part.type[:32]!r}"
            raise bad_field(field, f"{got}; leave it out.")
    return "".join(part.text for part in content)


def _prompts(body: CompletionRequest, model: ServedModel, settings: ServerConfig) -> tuple[list[list[int]], list[str]]:
    """Ids and text of every prompt."""
    given: Any = body.prompt
    several = list(given) if isinstance(given, list) and (not given or not isinstance(given[0], int)) else [given]
    if not 0 < len(several) <= settings.max_prompts:
        raise bad_field("prompt", f"a request has 1 to {settings.max_prompts} prompts, got {len(several)}.")
    try:
        ids = [model.encode_text(one) if isinstance(one, str) else list(one) for one in several]
    except InputError as error:
        raise bad_field("prompt", str(error)) from None
    if not body.echo:
        return ids, []
    return ids, [one if isinstance(one, str) else model.decode(one) for one in several]


def _order(
    body: Asked,
    model: ServedModel,
    settings: ServerConfig,
    prompts: list[list[int]],
    texts: list[str] | None,
    wanted: int,
    logprobs: int | None,
    constraint: Constraint | None,
) -> ParsedRequest:
    choices = body.n or 1
    if choices > settings.max_n:
        raise bad_field("n", f"n is at most {settings.max_n} here, got {choices}.")
    if body.top_k is not None and body.top_k < 0:
        body.top_k = 0
    for large in ("bad_words", "allowed_token_ids", "stop_token_ids"):
        model.check_fits(getattr(body, large) or (), large)
    where = "messages" if isinstance(body, ChatRequest) else "prompt"
    canvas = _canvas(body, model)
    wanted = len(canvas) if canvas is not None else wanted
    for ids in prompts:
        _check_length(ids, wanted, where, model, settings)
    decoding = _decoding(body, settings, wanted, constraint)
    options = body.stream_options
    return ParsedRequest(
        prompts=prompts,
        where=where,
        decodings=[decoding] * len(prompts),
        canvas=canvas,
        texts=texts or [""] * len(prompts),
        choices=choices,
        stream=bool(body.stream),
        usage_at_end=options is not None and bool(options.include_usage),
        usage_always=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        draft=body.stream_mode == "draft",
        step_map=bool(body.return_step_map),
        logprobs=logprobs,
    )


def _canvas(body: Asked, model: ServedModel) -> list[int | None] | None:
    """The positions of a response whose segments a client gives: ids, and None at free ones; None without a canvas."""
    if body.canvas is None:
        return None
    positions: list[int | None] = []
    model.check_fits(body.canvas, "canvas")
    for segment in body.canvas:
        count = segment if isinstance(segment, int) else 0
        try:
            text = [] if isinstance(segment, int) else model.encode_part(segment, "canvas")
        except InputError as error:
            raise bad_field("canvas", str(error)) from None
        if len(positions) + count + len(text) > model.engine.max_tokens:
            raise bad_field("canvas", f"a canvas has at most {model.engine.max_tokens} positions here.")
        positions += text or [None] * count
    said = getattr(body, "max_completion_tokens", None) or body.max_tokens
    if said not in (None, len(positions)):
        raise bad_field("canvas", f"the canvas has {len(positions)} tokens, but max_tokens is {said}; leave that out.")
    if None not in positions:
        raise bad_field("canvas", "a canvas has a number of free positions, got texts alone.")
    return positions


def _check_length(ids: Sequence[int], wanted: int, where: str, model: ServedModel, settings: ServerConfig) -> None:
    room = model.engine.max_tokens
    if not ids:
        raise bad_field(where, "a prompt has at least one token, got an empty one.")
    check_prompt(ids, where, settings)
    if len(ids) + wanted > room:
        raise bad_field(
            where if len(ids) >= room else "max_tokens",
            f"a prompt of {len(ids)} tokens and {wanted} new ones are more than the {room} that this model has room "
            f"for; shorten the prompt, or ask for fewer.",
            "context_length_exceeded",
        )


def check_prompt(ids: Sequence[int], where: str, settings: ServerConfig) -> None:
    """Raise `Refusal` for a prompt that is longer than a server allows. where: the request's field that has it."""
    most = settings.max_prompt_tokens
    if most is not None and len(ids) > most:
        raise bad_field(where, f"a prompt has at most {most} tokens here, got {len(ids)}.", "context_length_exceeded")


def _decoding(body: Asked, settings: ServerConfig, wanted: int, constraint: Constraint | None) -> Decoding:
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > settings.max_stops:
        raise bad_field("stop", f"a request has at most {settings.max_stops} stop texts here, got {len(stops)}.")
    said: dict[str, Any] = {name: value for name in DECODING if (value := getattr(body, name)) is not None}
    usual = settings.decoding or Decoding()
    chosen = RULE if said.keys() & set(RULE) else ()  # a request that sets one takes no defaults of the others
    for name in DECODING:
        value = getattr(usual, name)
        if name not in said and name not in chosen and value != getattr(Decoding, name):
            said[name] = value
    if constraint is not None:
        said["constraint"] = constraint
    if "logit_bias" in said:
        said["logit_bias"] = {int(token): bias for token, bias in said["logit_bias"].items()}
    seed = random.getrandbits(62) if body.seed is None else body.seed
    try:
        return Decoding(max_new_tokens=wanted, stop=tuple(stops), ignore_eos=bool(body.ignore_eos), seed=seed, **said)
    except (InputError, UnknownName) as error:
        raise refused(error) from None


def refused(error: InputError | UnknownName, where: str | None = None, decoding: Decoding | None = None) -> Refusal:
    """The refusal for an error that dgraph raises for a request.

    Args:
        error: the error.
        where: the field that has the prompts, if they have been read.
        decoding: the decoding of the request, if it has been read. If the field at fault has its default there, the
            refusal names the chosen policy, whose own settings are at fault.
    """
    fields = {"prompt": where, "max_new_tokens": "max_tokens"}
    param = None if error.field is None else fields.get(error.field, error.field)
    if decoding is not None and param in DECODING and getattr(decoding, param) == getattr(Decoding, param):
        param = "policy" if decoding.policy is not None else None
    return Refusal(400, str(error), param=param if param in TAKEN else None)
