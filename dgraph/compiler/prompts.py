"""Prompts of a caller, texts or conversations, as ids of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dgraph.errors import InputError
from dgraph.families import Tokenizer, check_text
from dgraph.runtime.request_checks import listed

Conversation = Sequence[Mapping[str, Any]]
"""Messages with "role" and "content", the user's last, as chat templates read them."""
Prompts = str | Conversation | Iterable[str | Conversation]
"""A text, a conversation, or several of one kind."""


def is_single(prompts: object) -> bool:
    """True for one text or one conversation."""
    return isinstance(prompts, str) or _is_conversation(prompts)


def encode_prompts(prompts: Prompts, tokenizer: Tokenizer | None, name: str) -> list[list[int]]:
    """Ids of each prompt in the model's chat frame.

    Args:
        prompts: texts or conversations.
        tokenizer: of the model; None for none.
        name: of the model, for messages.

    Raises:
        InputError: no tokenizer, one that reads no conversations, texts and conversations in one list, a malformed
            message, or a conversation that the chat template refuses.
    """
    if tokenizer is None:
        raise InputError(
            f"{name} came without a tokenizer; pass input_ids instead of texts, or give dgraph.optimize one: "
            f"tokenizer=, a folder or a tokenizer of transformers."
        )
    several: list[Any] = [prompts] if is_single(prompts) or isinstance(prompts, Mapping) else listed(prompts)
    kinds = {_kind(place, prompt): place for place, prompt in reversed(list(enumerate(several)))}
    if len(kinds) > 1:
        first, second = sorted(kinds, key=lambda kind: kinds[kind])
        raise InputError(
            f"prompts are texts or conversations, not both: prompt {kinds[first]} is a {first}, prompt {kinds[second]} "
            f'a {second}. Write a text as a conversation: [{{"role": "user", "content": TEXT}}].'
        )
    if "conversation" not in kinds:
        return [tokenizer.encode(text) for text in several]
    read = getattr(tokenizer, "encode_chat", None)
    if read is None:
        raise InputError(
            f"the tokenizer of {name} reads no conversations: it has no method encode_chat(messages) -> ids; give a "
            f"text instead."
        )
    return [list(read(messages)) for messages in several]


def _is_conversation(prompt: object) -> bool:
    """True for a list that begins with a message."""
    return isinstance(prompt, (list, tuple)) and isinstance(next(iter(prompt), None), Mapping)


def _kind(place: int, prompt: object) -> str:
    """ "text" or "conversation", checked.

    Raises:
        InputError: neither.
    """
    if isinstance(prompt, str):
        check_text(prompt)
        return "text"
    if not _is_conversation(prompt):
        raise InputError(
            f"prompts must be texts, got {prompt!r}; pass ids as input_ids, and a conversation as a list of messages."
        )
    assert isinstance(prompt, (list, tuple))
    for number, message in enumerate(prompt):
        _check_message(f"prompt {place}, message {number}", message)
    return "conversation"


def _check_message(what: str, message: object) -> None:
    example = '{"role": "user", "content": "Why?"}'
    if not isinstance(message, Mapping):
        raise InputError(f"{what} is {message!r}, expected a dict as {example}.")
    for key in ("role", "content"):
        if key not in message:
            raise InputError(f"{what} has no {key!r}, got {dict(message)!r}; a message is {example}.")
        if not isinstance(message[key], str):
            raise InputError(f"{what}: {key!r} is {message[key]!r}, expected a text.")
        check_text(message[key])
    if not message["role"]:
        raise InputError(f"{what} has an empty role, expected a name as in {example}.")
