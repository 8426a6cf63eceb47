"""Ids of texts and conversations, and texts of ids, as vLLM answers them; and the decoding rules by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from dgraph.errors import InputError
from dgraph.runtime.policies import POLICIES, PRESETS, options_of
from dgraph.serve.fields import Fields, Id, Listed, Text
from dgraph.serve.protocol import ChatRequest, Message, Tool
from dgraph.serve.refusal import bad_field
from dgraph.serve.served_model import ServedModel
from dgraph.serve.translate import framed


class TokenizeRequest(Fields):
    """POST /tokenize. Either a prompt, a text as it is, or messages, which the model's chat template frames."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[Listed[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Listed[Tool] | None = None


class DetokenizeRequest(Fields):
    """POST /detokenize."""

    model: Text | None = None
    tokens: Listed[Id]


CHAT = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields that a conversation has here as in a chat."""


def tokenized(body: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The answer of /tokenize; raises `Refusal`."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "give either a prompt or messages, not both and not neither.")
    if body.messages is not None:
        if body.add_special_tokens:
            raise bad_field("add_special_tokens", "a chat template writes its own special tokens; leave it out.")
        ids = framed(ChatRequest.model_validate({name: getattr(body, name) for name in CHAT}), model)
    else:
        for name in CHAT[1:]:
            if getattr(body, name) is not None:
                raise bad_field(name, f"{name} is read with messages, not with a prompt; leave it out.")
        read = model.encode_part if body.add_special_tokens is False else model.encode_text
        try:
            ids = read(str(body.prompt), "prompt")
        except InputError as error:
            raise bad_field("prompt", str(error)) from None
    return {
        "count": len(ids),
        "max_model_len": model.engine.max_tokens,
        "tokens": ids,
        "token_strs": model.pieces(ids) if body.return_token_strs else None,
    }


def detokenized(body: DetokenizeRequest, model: ServedModel) -> dict[str, str]:
    """The answer of /detokenize; raises `Refusal`."""
    model.check_fits(body.tokens, "tokens")
    vocab = model.engine.spec.vocab
    for token in body.tokens:
        if token >= vocab:
            raise bad_field("tokens", f"tokens has the id {token}, but the model has {vocab} ids.")
    return {"prompt": model.decode(body.tokens)}


def rules() -> dict[str, Any]:
    """The answer of /v1/policies: decoding rules with their options, and presets with what they set."""
    of = {name: preset.to_json()["rule"] for name, preset in PRESETS.items()}
    data = [
        {"id": name, "object": "policy", "preset_of": of.get(name), "options": options_of(name)}
        for name in (*POLICIES, *PRESETS)
    ]
    return {"object": "list", "data": data}
