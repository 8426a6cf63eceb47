"""A conversation: what was said, and the ids of its next prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgraph.cli.output import check_file, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dgraph.families import Model
    from dgraph.runtime.decoding import Decoding


@dataclass
class Conversation:
    """The messages of a user and a model, oldest first.

    Attributes:
        model: that answers, with a tokenizer.
        system: a message before all others; "" for none.
        messages: {"role", "content"} in turns, the user's first.
    """

    model: Model
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def framed(self) -> bool:
        """True if the model has a chat template; without one it continues the text of the conversation."""
        tokenizer: Any = self.model.tokenizer
        return hasattr(tokenizer, "encode_chat") and bool(getattr(tokenizer, "has_template", True))

    def say(self, text: str) -> None:
        """Add the user's message."""
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the model's answer; an empty one takes the user's message back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.messages.pop()

    def clear(self) -> None:
        """Forget all messages but the system's."""
        self.messages.clear()

    def ids(self, room: int) -> tuple[list[int], int]:
        """Ids of the prompt, and how many of the oldest messages were left out of it.

        Args:
            room: ids that fit. The last message always stays, so that the engine can refuse it by its length.

        Raises:
            InputError: the chat template refuses the conversation.
        """
        dropped = 0
        while len(found := self._encoded(self.messages[dropped:])) > room and dropped + 2 < len(self.messages):
            dropped += 2
        return found, dropped

    def _encoded(self, messages: Sequence[dict[str, str]]) -> list[int]:
        tokenizer: Any = self.model.tokenizer
        if self.framed:
            begin = [{"role": "system", "content": self.system}] if self.system else []
            return list(tokenizer.encode_chat([*begin, *messages]))
        text = self.system + "".join(message["content"] for message in messages)
        return list(getattr(tokenizer, "encode_text", tokenizer.encode)(text))

    def save(self, path: Path, recipe: dict[str, Any], decoding: Decoding) -> None:
        """Write the conversation as JSON, with the model, the recipe and the settings.

        Raises:
            InputError: the file cannot be written.
        """
        check_file("/save", path)
        system = [{"role": "system", "content": self.system}] if self.system else []
        settings = {"max_new_tokens": decoding.max_new_tokens, "threshold": decoding.threshold, "seed": decoding.seed}
        made = {"model": self.model.name, "recipe": recipe, "settings": settings, "messages": system + self.messages}
        write_file("/save", path, json.dumps(made, indent=1, ensure_ascii=False) + "\n")
