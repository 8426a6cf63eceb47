"""Chat templates, as transformers renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from dgraph.errors import CheckpointError, InputError

Message = Mapping[str, Any]
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of the templates that a conversation gets, without tools and with them."""
_OWN = frozenset({"conversations", "chat_template", "return_assistant_tokens_mask"})
"""Arguments of transformers beside the values for a template."""
_USER = {"role": "user", "content": "Why is the sky blue?"}
PROBES: Sequence[Sequence[Message]] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [{"role": "user", "content": [{"type": "text", "text": _USER["content"]}]}],
    [_USER, {"role": "assistant", "content": "Rayleigh scattering."}, _USER],
)
"""Conversations of which a template that is any good renders at least one."""
_SHOWN = 300
"""Characters of a reason that a message gives."""


class ChatTemplates:
    """The chat templates of a tokenizer.

    Args:
        templates: by name; a checkpoint that has one has it as "default".
        names: special tokens by the names that a template writes them by ("eos_token", ...).

    Raises:
        CheckpointError: a template cannot be compiled, or the default one renders none of `PROBES`.
    """

    def __init__(self, templates: Mapping[str, str], names: Mapping[str, str]):
        self.templates, self._names = dict(templates), names
        for name, text in self.templates.items():
            try:
                _compile(text)
            except Exception as error:
                raise CheckpointError(
                    f"the chat template {name!r} cannot be compiled: {_reason(error)}; repair it, or remove it."
                ) from error
        if DEFAULT in self.templates and (reasons := self._failures()):
            raise CheckpointError(
                f"the chat template renders no conversation, not even one of a single user message: {reasons[0]} "
                f"Repair it, or remove it."
            )

    def _failures(self) -> list[str]:
        """Reasons why the default template cannot render `PROBES`; none if it renders any of them."""
        reasons = []
        for messages in PROBES:
            try:
                self.render(messages)
            except InputError as error:
                reasons.append(str(error))
            else:
                return []
        return reasons

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that a template reads of its arguments."""
        from jinja2 import Environment, meta
        from jinja2.ext import Extension

        class Generation(Extension):
            """The tag of transformers around what an assistant says."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
        read = (meta.find_undeclared_variables(environment.parse(text)) for text in self.templates.values())
        return frozenset().union(*read)

    def __bool__(self) -> bool:
        return bool(self.templates)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        template: str | None = None,
        values: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """A conversation as one text; see `FileTokenizer.encode_chat`. values: more that the template reads.

        Raises:
            InputError: what the template refuses, or fails on.
        """
        import jinja2

        if taken := _OWN & values.keys():
            raise InputError(f"{', '.join(sorted(taken))} cannot be given to a chat template; leave it out.")
        text = self._chosen(template, tools)
        joined = any(_has_parts(message) for message in messages) and not _reads_parts(text)
        try:
            return _render(
                text,
                [_plain(message, joined) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None if documents is None else list(documents),
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **{**self._names, **values},
            )
        except jinja2.TemplateSyntaxError as error:
            raise InputError(f"the chat template cannot be compiled: {_reason(error)}.") from None
        except (jinja2.TemplateError, ValueError) as error:
            raise InputError(f"the model's chat template refuses these messages: {_reason(error)}.") from None
        except Exception as error:
            kind = type(error).__name__
            raise InputError(f"the model's chat template fails on these messages: {kind}: {_reason(error)}.") from None

    def _chosen(self, template: str | None, tools: Sequence[Any] | None) -> str:
        """The template of a call: one that is named, a text of its own, or the one for its tools."""
        if template is not None:
            return self.templates.get(template, template)
        for name in (FOR_TOOLS, DEFAULT) if tools is not None else (DEFAULT,):
            if name in self.templates:
                return self.templates[name]
        names = ", ".join(sorted(self.templates))
        raise InputError(f"the model has several chat templates and no default one; name one of: {names}.")


def text_of(content: str | Sequence[Any] | None) -> str:
    """The content of a message as one text.

    Args:
        content: a text, parts {"type": "text", "text"}, or None.

    Raises:
        InputError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part if isinstance(part, str) else part.get("text") for part in content]
    if any(not isinstance(text, str) for text in texts):
        raise InputError("a part of a message is a text, as {'type': 'text', 'text': 'Why?'}; leave others out.")
    return "".join(texts)


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), (list, tuple))


def _plain(message: Message, joined: bool) -> dict[str, Any]:
    """A message without the fields that are None; joined: its parts as one text."""
    found = {name: value for name, value in message.items() if value is not None}
    return {**found, "content": text_of(found["content"])} if joined and _has_parts(found) else found


def _render(template: str, messages: Sequence[Message], **values: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation: Any = list(messages)
    rendered: Any = render_jinja_template([conversation], chat_template=template, **values)
    return str(rendered[0][0])


def _compile(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template([], chat_template=template)


_PROBE = "a part of a message"


@lru_cache(maxsize=32)
def _reads_parts(template: str) -> bool:
    """Tell whether a template reads content that is a list of parts; others would print the list."""
    said = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
    try:
        found = _render(template, [said], bos_token="", eos_token="")
    except Exception:
        return False
    return _PROBE in found and "'type'" not in found and '"type"' not in found


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
