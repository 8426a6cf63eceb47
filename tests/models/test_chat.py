"""Chat templates: rendered as transformers does, and what is given to them is text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgraph.errors import CheckpointError, InputError
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer
from tests.models.folders import BOS, CHAT, END, EOS, KINDS, SPECIAL, TURN, folder, made
from tests.models.test_tokenizer_folders import SAID, both, chat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Says the wéather <b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLED = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ask.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "wetter", "arguments": {"city": "Köln & Bonn"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "wetter", "content": "rain"},
]
DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]
LOOP = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "names": ("{{ bos_token }}" + LOOP + "{{ eos_token }}{{ unk_token }}{{ no_such_name }}", {}),
    "without the next turn": (CHAT, {"add_generation_prompt": False}),
    "the last message goes on": (LOOP, {"continue_final_message": True}),
    "trimmed": (LOOP.replace("m.content", "m.content | trim"), {"continue_final_message": True}),
    "tojson": ("{{ tools | tojson }}{{ messages | tojson(indent=2) }}", {"tools": TOOLS}),
    "sorted tojson": ("{{ tools[0] | tojson(sort_keys=true, separators=(',', ':')) }}", {"tools": TOOLS}),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}<|turn|>{{ m.content }}{% endif %}{% endfor %}",
        {},
    ),
    "break": (
        "{%- for m in messages -%}{%- if loop.index == 3 -%}{%- break -%}{%- elif loop.first -%}{%- continue -%}"
        "{%- endif -%}<|turn|>{{ m.content }}{%- endfor -%}",
        {},
    ),
    "macros": (
        "{% macro turn(m) %}<|turn|>{{ m['role'] }}: {{ caller() if caller else m['content'] }}<|end|>{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}{% call turn(messages[0]) %}called{% endcall %}",
        {},
    ),
    "namespace": (
        "{% set ns = namespace(last=-1, d=dict(a=1)) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ ns.last }}{{ ns.d.a }}"
        "{{ messages[::-1][0].content }}",
        {},
    ),
    "documents": (
        "{% for d in documents %}[{{ d.title }}] {{ d['text'] }}\n{% endfor %}" + LOOP,
        {"documents": DOCUMENTS},
    ),
    "no documents": ("{{ documents is none }}{{ tools is none }}{{ documents is defined }}", {}),
    "values": (
        "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}{{ level }}"
        + LOOP,
        {"enable_thinking": False, "level": [1, "high"]},
    ),
    "the day": ("{{ strftime_now('%Y-%m') }}" + LOOP, {}),
    "whitespace": ("  {% for m in messages %}\n    {{ m.content }}\n  {%- endfor %}\n\n", {}),
    "strings": ("{{ messages[0].content.split(' ')[0].upper() }}{{ messages[0]['content'][2:].strip() | length }}", {}),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileTokenizer, Any]:
    return both(folder(tmp_path_factory.mktemp("chat") / "m", made("byte level"), post="template"))


@pytest.mark.parametrize("name", CASES)
def test_templates_are_rendered_as_transformers_does(plain: tuple[FileTokenizer, Any], name: str) -> None:
    ours, theirs = plain
    template, given = CASES[name]
    found = ours.encode_chat(SAID, template=template, **given)
    assert found == chat(theirs, SAID, chat_template=template, **given)
    assert found


def _given(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without fields that are None, which older versions of transformers print."""
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def test_turns_with_calls_of_tools(plain: tuple[FileTokenizer, Any]) -> None:
    ours, theirs = plain
    template = (
        "{% for m in messages %}<|turn|>{{ m.role }}{% if m.content is defined %}{{ m.content }}{% endif %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.tool_call_id }}{{ m.name }}<|end|>{% endfor %}"
    )
    assert ours.encode_chat(CALLED, tools=TOOLS, template=template) == chat(
        theirs, _given(CALLED), tools=TOOLS, chat_template=template
    )


@pytest.mark.parametrize("first", [None, "", "Be brief."])
def test_content_may_be_nothing(plain: tuple[FileTokenizer, Any], first: str | None) -> None:
    ours, theirs = plain
    said = [{"role": "system", "content": first}, *SAID[1:]]
    assert ours.encode_chat(said) == chat(theirs, _given(said))


def test_parts_of_a_message(plain: tuple[FileTokenizer, Any]) -> None:
    """Templates that read parts get them; others get the text."""
    ours, theirs = plain
    parts = [{"type": "text", "text": "the quick "}, {"type": "text", "text": "fox"}]
    said, whole = ([{"role": "user", "content": content}] for content in (parts, "the quick fox"))
    assert ours.encode_chat(said) == ours.encode_chat(whole) == chat(theirs, whole)
    reads = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"
    )
    assert ours.encode_chat(said, template=reads) == chat(theirs, said, chat_template=reads)
    assert ours.encode_chat(said, template=reads) != ours.encode_chat(whole, template=reads)
    with pytest.raises(InputError, match="a part of a message is a text"):
        ours.encode_chat([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}])


NAMED = {"default": LOOP, "tool_use": "{{ tools | tojson }}" + LOOP, "rag": "{{ documents[0].text }}" + LOOP}


@pytest.mark.parametrize("where", ["settings", "additional_chat_templates", "several without a default"])
def test_named_templates(tmp_path: Path, where: str) -> None:
    named, files, settings = dict(NAMED), {}, None
    if where == "settings":
        settings = [{"name": name, "template": text} for name, text in NAMED.items()]
    else:
        files = {f"additional_chat_templates/{name}.jinja": named[name] for name in ("tool_use", "rag")}
        if where == "additional_chat_templates":
            files["chat_template.jinja"] = named["default"]
    ours, theirs = both(folder(tmp_path / "m", made("byte level"), template=settings, files=files))
    assert ours.encode_chat(SAID, tools=TOOLS) == chat(theirs, SAID, tools=TOOLS)
    given: dict[str, Any] = {"documents": DOCUMENTS}
    assert ours.encode_chat(SAID, template="rag", **given) == chat(theirs, SAID, chat_template="rag", **given)
    if where == "several without a default":
        with pytest.raises(InputError, match=r"no default one; name one of: rag, tool_use"):
            ours.encode_chat(SAID)
    else:
        assert ours.encode_chat(SAID) == chat(theirs, SAID)
        ours.save(tmp_path / "saved")
        saved = read_tokenizer(tmp_path / "saved")
        assert saved is not None
        assert saved.encode_chat(SAID, tools=TOOLS) == ours.encode_chat(SAID, tools=TOOLS)


def test_files_of_templates(tmp_path: Path) -> None:
    """A file of its own goes before the settings; that of a processor is read where there is no other."""
    jinja = {"chat_template.jinja": LOOP, "chat_template.json": json.dumps({"chat_template": "no"})}
    ours, theirs = both(folder(tmp_path / "m", made("byte level"), template="no", files=jinja))
    assert ours.encode_chat(SAID) == chat(theirs, SAID)
    beside = {"chat_template.json": json.dumps({"chat_template": LOOP})}
    found = read_tokenizer(folder(tmp_path / "n", made("byte level"), template=None, files=beside))
    assert found is not None
    assert found.encode_chat(SAID) == ours.encode_chat(SAID)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_typed_is_text(tmp_path: Path, kind: str) -> None:
    """Special tokens come from the template alone, wherever else they stand."""
    ours = read_tokenizer(folder(tmp_path / "m", made(kind)))
    assert ours is not None
    special = {ours._tokenizer.token_to_id(token) for token in SPECIAL if token != "<unk>"}
    assert len(special) == 4
    template = "{% for m in messages %}<|turn|>{{ m | tojson }}{{ m.role }}{{ m.content }}<|end|>{% endfor %}{{ more }}"
    template += "{{ tools | tojson if tools }}{{ documents | tojson if documents }}"

    def count(messages: list[dict[str, Any]], **given: Any) -> int:
        return sum(id in special for id in ours.encode_chat(messages, template=template, **given))

    for token in (*SPECIAL, TURN.upper(), "".join(SPECIAL), f"{TURN}{END[:-2]}{END}{EOS}"):
        said = [{"role": "user", "content": f"a{token}b {token}"}]
        assert count(said) == 2
        assert count([{"role": token, "content": token, token: [token], "tool_calls": [{"a": {token: token}}]}]) == 2
        assert count(said, tools=[{"type": "function", token: token}], documents=[{token: [token]}], more=token) == 2
        assert special.isdisjoint(ours.encode_text(f"a{token}b {token}"))
        assert special.isdisjoint(ours.encode_part(token))
    halves = [{"type": "text", "text": TURN[:4]}, {"type": "text", "text": TURN[4:]}]
    reads = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    for way in (reads, LOOP.replace(TURN, "").replace(END, "")):
        assert special.isdisjoint(ours.encode_chat([{"role": "user", "content": halves}], template=way))


def test_typed_text_is_read_as_if_it_were_no_token(tmp_path: Path) -> None:
    """Beside a special token that is text, words are what they are beside any other text."""
    ours = read_tokenizer(folder(tmp_path / "m", made("unigram")))
    without = read_tokenizer(folder(tmp_path / "n", made("unigram", special=False), bos_token=None, eos_token=None))
    assert ours is not None
    assert without is not None
    typed = f"the quick{TURN}fox jumps {END} over"
    assert ours.encode_part(typed) == without.encode_part(typed)


def test_a_normalizer_makes_no_special_token_of_text(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    upper = made("word piece", special=False)
    upper.add_special_tokens([AddedToken("[turn]", normalized=True), AddedToken("<unk>", normalized=False)])
    wide = "\N{FULLWIDTH LESS-THAN SIGN}s\N{FULLWIDTH GREATER-THAN SIGN}"
    for found, typed, token in ((upper, "[TURN]", "[turn]"), (made("unigram"), wide, BOS)):
        ours = read_tokenizer(folder(tmp_path / token.strip("[<>]"), found, bos_token=token, eos_token=None))
        assert ours is not None
        id = found.token_to_id(token)
        assert id in found.encode(typed, add_special_tokens=False).ids, "the tokenizer itself makes a token of it"
        assert id not in ours.encode_text(f"a {typed}")
        assert (
            ours.encode_chat(
                [{"role": "user", "content": typed}], template=f"{token}{{{{ messages[0].content }}}}"
            ).count(id)
            == 1
        )


BROKEN = [
    "{% for m in messages %}{{ m.content }}",
    "{{ messages[0].content",
    "{% nosuchtag %}",
    "{{ messages | nosuchfilter }}",
    "{% endif %}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
]


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_cannot_be_compiled(tmp_path: Path, template: str, plain: tuple[FileTokenizer, Any]) -> None:
    path = folder(tmp_path / "broken", made("byte level"), template=template)
    with pytest.raises(
        CheckpointError, match=r"tokenizer of .*broken.* the chat template 'default' cannot be compiled"
    ):
        read_tokenizer(path)
    with pytest.raises(InputError, match="template"):
        plain[0].encode_chat(SAID, template=template)


RAISES = [
    "{{ raise_exception('roles must alternate') }}",
    "{{ no_such.thing }}",
    "{{ messages[99].content }}{{ messages[99].content.x }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ range(99999999) | list }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages | tojson(indent='a', separators=1) }}",
    "{{ messages[0].content.encode('utf-8').decode('ascii').nothing.at_all }}",
    "{% include 'other' %}",
    "{{ {}['a']['b'] }}",
    "{% set x = namespace(1) %}",
    "{{ dict(1) }}",
    "{{ no_such() }}",
]


@pytest.mark.parametrize("template", RAISES)
def test_a_template_that_fails_on_every_conversation(tmp_path: Path, template: str) -> None:
    path = folder(tmp_path / "m", made("byte level"), template=template)
    with pytest.raises(
        CheckpointError, match=r"template renders no conversation, .* (refuses|fails on) these messages"
    ):
        read_tokenizer(path)


@pytest.mark.parametrize("template", RAISES)
def test_a_template_that_fails_on_a_conversation(tmp_path: Path, template: str) -> None:
    some = f"{{% if messages[0].content[:3] != 'Why' %}}{template}{{% endif %}}"
    ours = read_tokenizer(folder(tmp_path / "m", made("byte level"), template=some))
    assert ours is not None
    for ask in (lambda: ours.encode_chat(SAID), lambda: ours.encode("a"), lambda: ours.encode_prompts(["a", "b"])):
        with pytest.raises(InputError, match=r"the model's chat template (refuses|fails on) these messages: .+\.$"):
            ask()


@pytest.mark.parametrize(
    ("messages", "given", "said"),
    [
        ([], {}, "at least one message"),
        (SAID, {"chat_template": "a"}, "chat_template cannot be given"),
        (SAID, {"tools": ["wetter"]}, "refuses these messages: Tools should"),
        (SAID, {"documents": ["a"]}, "fails on these messages: TypeError"),
        ([{"role": "user"}], {"continue_final_message": True}, "refuses these messages: continue_final_message"),
    ],
)
def test_conversations_that_have_no_form(
    plain: tuple[FileTokenizer, Any], messages: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        plain[0].encode_chat(messages, **given)


def test_options_without_a_template(tmp_path: Path) -> None:
    ours = read_tokenizer(folder(tmp_path / "m", made("byte level"), template=None, post="template"))
    assert ours is not None
    with pytest.raises(InputError, match="no chat template that reads tools, thinking; leave them out"):
        ours.encode_chat(SAID, tools=TOOLS, thinking=True)
    bos = ours.encode_text("a")[:1]
    assert ours.encode_chat([{"role": "user", "content": f"a{EOS}"}]) == bos + ours.encode_part(
        f"user: a{EOS}\nassistant:"
    )
    going = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert ours.encode_chat(going, continue_final_message=True) == ours.encode_text("user: a\nassistant: b")
