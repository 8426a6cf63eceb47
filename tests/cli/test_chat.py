"""`dgraph chat` in a pipe and in a terminal, and `dgraph generate --stream`."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import dgraph
from dgraph.cli import chat as module
from dgraph.cli.conversation import Conversation
from dgraph.cli.streaming import EVICTED, MASK, draft_text, view_of
from dgraph.engine.io.events import Draft, Event, Usage
from dgraph.errors import InputError
from dgraph.lowering import inductor
from tests.cli.conftest import Run

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def talker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small checkpoint with a chat template."""
    copied = tmp_path_factory.mktemp("talkers") / "talker"
    shutil.copytree(folder, copied)
    (copied / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return copied


def chat(run: Run, model: Path, text: str, *more: str):  # type: ignore[no-untyped-def]
    return run("chat", model, "--backend", "eager", "--max-new-tokens", 12, *more, input=text)


# -- in a pipe -----------------------------------------------------------------------------------------------------


def test_a_line_is_answered_as_generate_would(run: Run, talker: Path, tmp_path: Path) -> None:
    result = chat(run, talker, "w5 w6\n\nw7\n/save talk.json\n", "-r", "dense", "--system", "w9")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    made = dgraph.optimize(talker, "dense", backend="eager")
    for place in (2, 4):
        (text,) = made.generate(saved["messages"][:place], max_new_tokens=12).texts or []
        assert saved["messages"][place]["content"] == text
    *answers, last = result.stdout.splitlines()
    assert answers == [saved["messages"][2]["content"], saved["messages"][4]["content"]]
    assert last == "4 messages in talk.json"
    assert (saved["model"], saved["recipe"]["recipe"]) == ("talker", "dense")


def test_a_model_without_a_template_continues_the_text(run: Run, folder: Path, tmp_path: Path) -> None:
    result = chat(run, folder, "w5 w6\nw7\n/save talk.json\n", "-r", "dense")
    assert result.stderr.count("no chat template") == 1
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    made = dgraph.optimize(folder, "dense", backend="eager")
    assert made.model.tokenizer is not None
    text = "".join(m["content"] for m in messages[:3])
    (ids,) = made.generate(input_ids=[made.model.tokenizer.encode_text(text)], max_new_tokens=12).token_ids  # type: ignore[attr-defined]
    assert messages[3]["content"] == made.model.tokenizer.decode(ids)


def test_commands(run: Run, talker: Path) -> None:
    lines = ["/recipe", "/recipe dense", "/recipe", "/threshold 0.6", "/threshold", "/clear", "/help", "/exit", "w5"]
    result = chat(run, talker, "\n".join(lines))
    assert result.exit_code == 0
    said = result.stdout.splitlines()
    assert said[:3] == ["talker under focus", "talker under dense", "talker under dense"]
    assert all("threshold=0.6" in line for line in said[3:5])
    assert said[5] == "forgotten"
    assert [line.split()[0] for line in said[6:12]] == [
        "/help", "/recipe", "/threshold", "/save", "/clear", "/exit",
    ]  # fmt: skip
    assert MASK in said[12]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/recipe focsu", "focus"),
        ("/recipe focus alhpa=2", "alpha"),
        ("/threshold 2", "probability"),
        ("/threshold high", "got 'high'"),
        ("/save", "takes a file"),
        ("/save no/such/folder/x.json", "no folder"),
        ("/recipe 'focus", "cannot be read"),
        ("/rceipe", "Did you mean '/recipe'"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_the_chat_as_it_was(run: Run, talker: Path, line: str, part: str) -> None:
    result = chat(run, talker, f"{line}\n/recipe\n")
    assert result.exit_code == 0
    assert result.stdout == "talker under focus\n"
    (said,) = result.stderr.splitlines()
    assert said.startswith("error: ")
    assert part in said


def test_a_message_that_does_not_fit_is_taken_back(run: Run, talker: Path, tmp_path: Path) -> None:
    result = chat(run, talker, f"{'w5 ' * 300}\nw6\n/save talk.json\n")
    assert "more than the" in result.stderr
    first, *_ = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert first == {"role": "user", "content": "w6"}


def test_the_oldest_turns_give_way(talker: Path) -> None:
    said = Conversation(dgraph.load(talker), "w9")
    for turn in range(4):
        said.say(f"w1{turn} w2 w3")
        if turn < 3:
            said.answer("w4 w5")
    whole, dropped = said.ids(1000)
    assert dropped == 0
    some, dropped = said.ids(len(whole) - 1)
    assert dropped == 2
    assert some == said._encoded(said.messages[2:])
    assert said.ids(1)[1] == 6  # the last message stays


def test_the_default_is_the_larger_model_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def load(name: str, *_: object, **__: object) -> str:
        asked.append(name)
        if name == module.PREFERRED:
            raise InputError("it needs gguf")
        return name

    monkeypatch.setattr(dgraph, "load", load)
    assert module._loaded(None, None, None, False, {}) == module.SMALLER  # type: ignore[comparison-overlap]
    assert asked == [module.PREFERRED, module.SMALLER]
    assert "it needs gguf" in capsys.readouterr().err


def test_a_first_answer_runs_op_by_op_and_says_so(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(inductor, "_COMPILED", {})
    words = ("generate", folder, "-p", "w5 w6", "--max-new-tokens", 24, "-o", "alpha=1.7")
    first, eager = run(*words, "--json"), run(*words, "--json", "--backend", "eager")
    told, untold = json.loads(first.stdout), json.loads(eager.stdout)
    assert (told["backend"], told["token_ids"]) == ("eager", untold["token_ids"])
    (note,) = first.stderr.splitlines()
    assert f"`dgraph compile {folder} --option alpha=1.7` compiles it" in note
    assert eager.stderr == ""
    made = dgraph.optimize(folder, "focus", backend="auto", alpha=1.7)
    assert (made.compiler.backend, made.compiler.compiled) == ("eager", [])


def test_stream_writes_the_text_of_generate(run: Run, folder: Path) -> None:
    words = ("generate", folder, "-p", "w5 w6", "-p", "w7", "--backend", "eager", "--max-new-tokens", 24)
    plain, streamed = run(*words), run(*words, "--stream")
    assert streamed.exit_code == 0, streamed.stderr
    assert streamed.stdout == plain.stdout
    assert len(plain.stdout.splitlines()) == 2
    refused = run(*words, "--stream", "--json")
    assert (refused.exit_code, refused.stdout) == (2, "")


# -- the view ------------------------------------------------------------------------------------------------------


def draft(step: int, tokens: tuple[int, ...], kept: tuple[bool, ...] = (), offset: int = 0) -> Draft:
    return Draft(offset, tokens, tuple(float(t >= 0) for t in tokens), kept or (True,) * len(tokens), step)


def word(ids: list[int]) -> str:
    return "".join(f"w{i} " for i in ids)


def test_positions_are_styled_by_what_the_step_did() -> None:
    before = draft(1, (-1, 5, -1, -1))
    shown = draft_text(draft(2, (-1, 5, 6, -1), (True, True, True, False)), before, 0, word)
    assert shown.plain == f"{MASK}w5 w6 {EVICTED}"
    assert [str(span.style) for span in shown.spans] == ["dim", "none", "bold bright_green", "dim magenta"]
    assert (
        draft_text(draft(2, (4, 5, 6, -1)), before, 2, word).plain == f"w6 {MASK}"
    )  # final tokens are not drawn twice
    assert "\x1b" not in draft_text(draft(1, (7,)), None, 0, lambda ids: "\x1b[2J\n").plain


def test_full_lines_stay_and_the_last_is_drawn_anew() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=20, height=5, highlight=False)
    pieces = ["one two three ", "four five six seven\n", "eight"]
    with view_of(word, console) as view:
        for number, text in enumerate(pieces):
            last = number == len(pieces) - 1
            shown = None if last else draft(number + 1, (-1, -1), offset=9)
            view.show(Event("r", text, (), (), (), Usage(1, 1), shown, "stop" if last else None))
    lines = [line.rstrip() for line in _screen(written.getvalue())]
    assert lines[:4] == ["one two three four", "five six seven", "eight", ""]


def _screen(written: str) -> Iterator[str]:
    """The lines that a terminal shows: rich moves up, and erases lines."""
    import re

    lines, at = [""], 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part == "\x1b[1A":
            at -= 1
        elif not part.startswith("\x1b") and part != "\r":
            lines[at] += part
    yield from [*lines, ""]


# -- in a terminal -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_a_person_at_a_terminal(talker: Path, tmp_path: Path) -> None:
    from tests.cli.terminal import typed

    file = tmp_path / "talk.json"
    words = ["chat", str(talker), "--backend", "eager", "--max-new-tokens", "200", "--steps", "4"]
    lines = [
        ("> ", "w5 w6\n"),  # its response is ended while its first block is denoised
        (MASK, "\x03"),
        ("interrupted", ""),
        ("> ", "\x03\n"),  # at the prompt it ends nothing; a signal between prompt and read waits for a key
        ("> ", "/recipe dense\n"),
        ("talker under dense", f"/save {file}\n"),
        ("messages in", "/exit\n"),  # pipes end by the end of their input, which a terminal may swallow between prompts
    ]
    printed, code = typed(words, lines, {"DGRAPH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"})
    assert code == 0
    assert "/help lists commands" in printed
    assert f"\x1b[2m{MASK}\x1b[0m" in printed
    assert "Traceback" not in printed
    assert len(json.loads(file.read_text())["messages"]) in (0, 2)
