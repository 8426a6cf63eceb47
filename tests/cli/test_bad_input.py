"""Bad input: one clear message on stderr, exit code 2, nothing on stdout, nothing written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.cli.options import read_prompts
from dgraph.errors import InputError
from tests.cli.conftest import Run
from tests.cli.folders import WINDOW, weights, write_checkpoint
from tests.cli.refusals import refused
from tests.tiny import MASK

PROMPT = ("-p", "w3 w4")


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input is to be refused before anything is compiled (the backend of these tests is the default one)."""
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda *_, **__: pytest.fail("compiled"))


GENERATE = [
    (("-p", ""), ("prompt 0 is empty",)),
    (("-p", "w3", "-p", "  "), ("prompt 1 is empty",)),
    ((), ("no prompt; give --prompt TEXT",)),
    (("--prompt-file", "missing.txt"), ("--prompt-file missing.txt cannot be read",)),
    (("-p", "w3 " * (WINDOW + 1)), (f"more than the {WINDOW} of sdar", "shorten the prompt")),
    ((*PROMPT, "--max-new-tokens", 300), ("ask for at most 254 new tokens",)),
    ((*PROMPT, "--max-new-tokens", 0), ("max_new_tokens must be at least 1, got 0",)),
    (("-p", f"w3 w{MASK}"), ("is the mask token",)),
    ((*PROMPT, "-r", "focsu"), ("unknown recipe 'focsu'. Did you mean 'focus'? Known: dense, dkv_cache, ",)),
    ((*PROMPT, "-o", "alhpa=2"), ("unknown option of recipe 'focus' 'alhpa'. Did you mean 'alpha'?",)),
    ((*PROMPT, "-o", "alpha=0.9"), ("alpha must be at least 1", "got 0.9")),
    ((*PROMPT, "-o", "alpha=much"), ("option alpha is a number",)),
    ((*PROMPT, "-o", "block_cache=dc++"), ("block_cache must be one of 'off', 'dc', 'dc+'",)),
    ((*PROMPT, "-o", "ablation=after=9"), ("after=9 is not a layer of this model",)),
    ((*PROMPT, "--threshold", 0), ("threshold is a probability in (0, 1], got 0",)),
    ((*PROMPT, "--threshold", 1.5), ("threshold is a probability in (0, 1], got 1.5",)),
    ((*PROMPT, "--threshold", 0.9, "--steps", 4), ("give either threshold (0.9) or steps (4), not both",)),
    ((*PROMPT, "--steps", 0), ("at least 1, got 0",)),
    ((*PROMPT, "--block-length", 0), ("block_length must be at least 1, got 0",)),
    ((*PROMPT, "--temperature", -1), ("temperature is a finite number, at least 0",)),
    ((*PROMPT, "--backend", "indcutor"), ("backend must be one of 'inductor', 'eager', 'auto', got 'indcutor'",)),
    ((*PROMPT, "--buckets", "some"), ("buckets must be 'exact'", "got 'some'")),
    ((*PROMPT, "--buckets", "0"), ("buckets must be 'exact'", "got [0]")),
    ((*PROMPT, "--dtype", "int8"), ("unknown dtype 'int8'", "float32")),
    ((*PROMPT, "--device", "cuda:99"), ("device 'cuda:99' cannot be used",)),
    ((*PROMPT, "--device", "gpu"), ("device 'gpu' cannot be used",)),
    ((*PROMPT, "-o", "alpha=1", "-o", "alpha=2"), ("option 'alpha' is given twice, the second time as '2'",)),
    ((*PROMPT, "--device", "meta"), ("device 'meta' cannot be used", "Choose cpu or cuda")),
    ((*PROMPT, "--sed", 3), ("No such option: --sed", "--seed")),
    ((*PROMPT, "--steps", "many"), ("Invalid value for '--steps'",)),
]


@pytest.mark.parametrize(
    ("args", "parts"), GENERATE, ids=[" ".join(map(str, a))[:40] or "no prompt" for a, _ in GENERATE]
)
def test_generate_refuses(run: Run, folder: Path, args: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    refused(run("generate", folder, *args), *parts)


def test_an_error_under_json_is_the_same(run: Run, folder: Path) -> None:
    for args, parts in (GENERATE[0], GENERATE[8], GENERATE[-2]):
        refused(run("generate", folder, *args, "--json"), *parts)


VIEWS = [
    (("dump",), ("--recipe", "dens"), ("unknown recipe 'dens'. Did you mean 'dense'",)),
    (("dump",), ("-r", "focus", "--after", "EvictToken"), ("Did you mean 'EvictTokens'",)),
    (("dump",), ("--after", "CacheKV"), ("after='CacheKV' needs a recipe",)),
    (("dump",), ("-o", "alpha=2"), ("--option needs --recipe",)),
    (("dump",), ("--phase", "prefill"), ("--phase needs --recipe",)),
    (("dump",), ("--tp", "3"), ("cannot be divided over 3 ranks",)),
    (("dump",), ("-r", "focus", "--phase", "stpe"), ("unknown phase 'stpe'. Did you mean 'step'",)),
    (("dump",), ("--layer", 3, "--html", "page.html"), ("the graph has no layer 3; its layers are 0..1",)),
    (("dump",), ("--html", "no/such/folder/page.html"), ("--html no/such/folder/page.html cannot be written",)),
    (("diff",), ("--from", "dense", "--to", "focsu"), ("unknown recipe 'focsu'. Did you mean 'focus'",)),
    (("diff",), ("-o", "alpha=0.5"), ("alpha must be at least 1",)),
    (("explain",), ("-r", "focus", "-o", "ablation=signal=dleta"), ("signal must be one of 'delta', 'importance'",)),
]


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(("command", "args", "parts"), VIEWS, ids=[" ".join(map(str, (*c, *a))) for c, a, _ in VIEWS])
def test_views_refuse(
    run: Run, folder: Path, command: tuple[str], args: tuple[Any, ...], parts: tuple[str, ...]
) -> None:
    refused(run(*command, folder, *args), *parts)


@pytest.mark.parametrize("command", ["generate", "dump", "diff", "explain"])
def test_unknown_models(run: Run, command: str) -> None:
    prompt = PROMPT if command == "generate" else ()
    refused(run(command, "tiny_sdra", *prompt), "unknown model 'tiny_sdra'. Did you mean 'tiny_sdar'")
    refused(run(command, "./nowhere/at_all", *prompt), "./nowhere/at_all is not a checkpoint folder")


def test_standard_input_that_is_closed_has_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="--prompt-file - cannot be read: standard input is closed"):
        read_prompts(None, "-")


def test_unknown_commands_and_missing_arguments(run: Run) -> None:
    refused(run("generat"), "No such command 'generat'", "'generate'")
    refused(run("dump"), "Missing argument", "--help")


def broken(kind: str, folder: Path) -> Path:
    """A checkpoint with one thing wrong."""
    tensors = weights()
    if kind == "no mask token":
        return write_checkpoint(folder, mask_token_id=None)
    if kind == "missing key":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif kind == "extra key":
        tensors["model.layers.1.mlp.bonus.weight"] = torch.zeros(2)
    elif kind == "wrong dtype":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int64)
    elif kind == "wrong shape":
        tensors["model.norm.weight"] = torch.zeros(7)
    write_checkpoint(folder, tensors)
    if kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "damaged config":
        (folder / "config.json").write_text("{")
    elif kind == "damaged shard":
        (folder / "model.safetensors").write_bytes(b"not a shard")
    elif kind == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif kind == "another family":
        (folder / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    return folder


BROKEN = {
    "no mask token": "needs a mask token",
    "missing key": "missing: model.layers.1.mlp.up_proj.weight",
    "extra key": "unexpected: model.layers.1.mlp.bonus.weight",
    "wrong dtype": "not floating-point: model.norm.weight is torch.int64",
    "wrong shape": "wrong shape: model.norm.weight is (7,), expected (64,)",
    "no config": "has no config.json",
    "damaged config": "cannot be read as JSON",
    "damaged shard": "is damaged or not a safetensors file",
    "no tokenizer": "no tokenizer",
    "another family": "no family loads",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_checkpoints(run: Run, tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    folder = broken(kind, tmp_path_factory.mktemp("broken") / "checkpoint")
    refused(run("generate", folder, *PROMPT), BROKEN[kind])


def test_an_id_that_is_not_in_the_cache(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGRAPH_DOWNLOAD", "0")
    told = "an-org/no-model is not a checkpoint folder, and none of that id is in the local cache of Hugging Face"
    refused(run("generate", "an-org/no-model", *PROMPT), told)


# -- a process of its own ----------------------------------------------------------------------------------------


def command(folder: Path, *args: Any) -> list[str]:
    return [sys.executable, "-m", "dgraph", "generate", str(folder), *map(str, args)]


def test_streams_and_exit_code_of_a_process(folder: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    args = command(folder, *PROMPT, "--threshold", "2", "--json")
    done = subprocess.run(args, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ConfidenceThreshold: threshold is a probability in (0, 1], got 2.0.")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def open_when_it_reads(fifo: Path, process: subprocess.Popen[str]) -> int:
    """Open a named pipe for writing once the process has opened it to read."""
    while process.poll() is None:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            time.sleep(0.05)
    pytest.fail(f"the command ended early: {process.communicate()[1]}")


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_ctrl_c_is_quiet(folder: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "prompts"
    os.mkfifo(fifo)  # the command waits for its prompts, so it is certain to be running
    args = command(folder, "--prompt-file", fifo)
    process = subprocess.Popen(
        args,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        pipe = open_when_it_reads(fifo, process)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
        os.close(pipe)
    finally:
        process.kill()
    assert (process.returncode, stdout, stderr) == (130, "", "")
