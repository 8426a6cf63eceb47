"""Commands over ranks: who prints, what is refused, and how ranks end, whatever ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.compiled import compiled
from tests.parallel.processes import ROOT, started

PROMPT = "Sort these words: river stone"
SHORT = ("--backend", "eager", "--max-new-tokens", "16")
WAIT = 150.0


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A dgraph command in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dgraph", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str) -> tuple[int, str, str]:
    with command(*arguments) as process:
        out, err = process.communicate(timeout=WAIT)
        return process.returncode, out, err


def others(process: subprocess.Popen[str]) -> list[int]:
    """Processes that this one has started."""
    return list(map(int, open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()))


def gone(pid: int) -> bool:
    try:
        return open(f"/proc/{pid}/stat").read().split()[2] == "Z"
    except FileNotFoundError:
        return True


def until(true: object, within: float) -> None:
    assert callable(true)
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "too long"
        time.sleep(0.05)


def test_two_ranks_say_what_one_process_says_and_say_it_once() -> None:
    (text,) = compiled("tiny_sdar").generate(PROMPT, max_new_tokens=16).texts or ()
    code, out, err = run("generate", "tiny_sdar", "-p", PROMPT, *SHORT, "--tp", "2")
    assert (code, out, err) == (0, f"{text}\n", "")


@pytest.mark.release
def test_ranks_answer_a_file_together_and_end_when_nothing_is_left(tmp_path: Path) -> None:
    prompts = [PROMPT, "What is 2 + 3?"]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps({"id": i, "prompt": prompt}) + "\n" for i, prompt in enumerate(prompts)))
    files = ("--data", str(asked), "--out", str(answers))
    code, out, err = run("generate", "tiny_sdar", *files, *SHORT, "--tp", "2")
    assert (code, err) == (0, ""), err
    assert out.startswith("2 of 2 questions answered")
    texts = {line["id"]: line["text"] for line in map(json.loads, answers.read_text().splitlines())}
    alone = compiled("tiny_sdar").generate(prompts, max_new_tokens=16)
    assert texts == dict(enumerate(alone.texts or ()))
    code, out, err = run("generate", "tiny_sdar", *files, *SHORT, "--tp", "2")
    assert (code, err) == (0, ""), err
    assert out.startswith("0 of 2 questions answered")
    asked.write_text("no JSON\n")
    code, out, err = run("generate", "tiny_sdar", *files, *SHORT, "--tp", "2")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: --data .* has 1 line that cannot be used:\nline 1: not JSON.*\n", err), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "3"), "8 heads of weight .* cannot be divided over 3 ranks"),
        (("--tp", "2", "--device", "cuda:1"), "--device cuda:1 is one GPU, and 2 ranks have one each"),
        (("--tp", "0"), "--tp is the number of ranks, at least 1, got 0"),
    ],
)
@pytest.mark.release
def test_what_cannot_be_divided_is_refused_once(arguments: Sequence[str], message: str) -> None:
    code, out, err = run("generate", "tiny_sdar", "-p", PROMPT, *SHORT, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{message}.*\n", err), err


def test_gpus_that_are_not_there_and_other_numbers_than_torchruns_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.cli.ranks import ranks
    from dgraph.errors import InputError

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(InputError, match="--tp 4 needs as many GPUs, and this machine has 2"), ranks(4, "cuda"):
        pass
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--tp 4 does not fit the 2 ranks that torchrun has started"), ranks(4, "cpu"):
        pass


TORCHRUN = """
import sys
sys.argv = ["dgraph", "generate", "tiny_sdar", "-p", {prompt!r}, "--backend", "eager", "--max-new-tokens", "16"]
from dgraph.cli import main
main()
"""


@pytest.mark.release
def test_ranks_that_torchrun_started() -> None:
    with started(2, TORCHRUN.format(prompt=PROMPT)) as ranks:
        (first, out, err), (second, other, said) = ranks.ends(0), ranks.ends(1)
    assert (first, second) == (0, 0), err + said
    assert out.startswith("Sorted:")
    assert (other, said) == ("", "")


@pytest.mark.release
def test_ranks_that_are_asked_for_different_things_say_so() -> None:
    prompt = "' + __import__('os').environ['RANK'] + '"
    with started(
        2, TORCHRUN.format(prompt=PROMPT).replace("'-p', '", "'-p', '").replace("stone'", f"stone{prompt}'")
    ) as ranks:
        (first, _, err), (second, _, said) = ranks.ends(0), ranks.ends(1)
    assert (first, second) == (2, 2)
    assert "ranks differ in generate: prompts is" in err
    assert said == "", "rank 0 has said it"


@contextmanager
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`dgraph serve --tp 2`, and its address."""
    with command("serve", "tiny_sdar", "--backend", "eager", "--tp", "2", "--port", "0", "--no-access-log") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, process.communicate()
        yield process, line.split()[-1]


def ask(address: str, tokens: int = 16) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens}).encode()
    request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
        return text


def health(address: str) -> int:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.release
def test_a_server_over_two_ranks_answers_and_ends_at_sigterm() -> None:
    with server() as (process, address):
        (other,) = others(process)
        text = ask(address)
        assert text.startswith("Sorted:")
        assert ask(address) == text
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) == 0
        until(lambda: gone(other), 5)


@pytest.mark.release
def test_a_server_whose_other_rank_dies_says_so_and_ends() -> None:
    with server() as (process, address):
        (other,) = others(process)
        assert health(address) == 200
        os.kill(other, signal.SIGKILL)
        until(lambda: health(address) == 503, 8)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            ask(address)
        assert process.wait(30) != 0
        assert process.stderr is not None
        assert "rank 1 of 2 has died" in process.stderr.read()


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_other_rank_ends_with_the_first(number: signal.Signals) -> None:
    prompts = ["-p", PROMPT] * 2000  # more than are answered before the signal comes
    with command("generate", "tiny_sdar", *prompts, "--backend", "eager", "--tp", "2") as process:
        until(lambda: others(process), 60)
        (other,) = others(process)
        time.sleep(3)
        process.send_signal(number)
        assert process.wait(30) != 0
        until(lambda: gone(other), 30)
