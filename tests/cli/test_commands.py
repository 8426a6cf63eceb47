"""Every command: what it prints as text and as JSON."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph.cli.app import app
from dgraph.cli.options import bucket_list, read_options, read_prompts, recipe_options, shared_options
from dgraph.cli.output import print_text
from dgraph.errors import InputError, UnknownName
from dgraph.recipes import Ablation, types_of
from dgraph.text.writer import dump
from tests.cli.conftest import Run
from tests.cli.folders import LAYERS

EAGER = ("--backend", "eager", "--max-new-tokens", "8")
PROMPT = "w3 w4 w5 w6 w7"


def one_object(result: Any) -> dict[str, Any]:
    """The JSON object that a command printed, and nothing else."""
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, dict)
    return found


# -- generate ----------------------------------------------------------------------------------------------------


def test_generate_prints_texts_alone(run: Run, folder: Path, focus: dgraph.CompiledModel) -> None:
    result = run("generate", folder, "-p", PROMPT, "-p", "w8 w9", *EAGER)
    assert result.exit_code == 0, result.stderr
    expected = focus.generate([PROMPT, "w8 w9"], max_new_tokens=8)
    assert result.stdout == "".join(f"{text}\n" for text in expected.texts or [])
    assert result.stderr == ""


def test_generate_as_json_has_the_stats_under_their_names(run: Run, folder: Path, dense: dgraph.CompiledModel) -> None:
    lossless = ("-o", "alpha=inf", "-o", "block_cache=off")
    found = one_object(run("generate", folder, "-p", PROMPT, *lossless, *EAGER, "--json"))
    expected = dense.generate([PROMPT], max_new_tokens=8)
    assert found["texts"] == expected.texts
    assert found["token_ids"] == expected.token_ids
    assert set(expected.stats.to_json()) <= set(found)
    for name in ("steps", "tokens", "decoded", "rows_per_token", "sequence_steps"):
        assert found[name] == expected.stats.to_json()[name]
    assert found["rows"]["suffix"] == expected.stats.rows["step"]
    (step,) = (p for p in found["recipe"]["phases"] if p["phase"] == "step")
    assert next(p for p in step["passes"] if p["pass"] == "EvictTokens")["alpha"] == "inf"


def test_an_option_of_a_recipe_named_cache_is_not_the_artifact_cache(run: Run) -> None:
    prefix = ("-r", "fast_dllm", "-o", "cache=prefix")
    found = one_object(run("generate", "tiny_llada", "-p", "Sort these words: a b", *prefix, *EAGER, "--json"))
    assert found["recipe"]["plan"]["region"]["name"] == "Suffix"


def test_generate_with_dyllm_on_a_block_causal_model(run: Run, folder: Path, dense: dgraph.CompiledModel) -> None:
    dyllm = ("-r", "dyllm", "-o", "tau=1.01", "-o", "full_steps=2")
    found = one_object(run("generate", folder, "-p", PROMPT, *dyllm, *EAGER, "--json"))
    assert found["token_ids"] == dense.generate([PROMPT], max_new_tokens=8).token_ids
    assert [layers[0] for layers in found["salient"]] == [layers[-1] for layers in found["salient"]]
    assert found["recipe"]["plan"]["schedule"]["full_steps"] == 2
    result = run("generate", folder, "-p", PROMPT, *dyllm, "-o", "response_only_period=2", *EAGER)
    assert result.exit_code != 0
    assert "response_only_period=2 says how often a bidirectional model forwards its prompt again" in result.stderr


def test_generate_with_every_setting(run: Run, folder: Path, dense: dgraph.CompiledModel) -> None:
    settings = ("--steps", 4, "--temperature", 0.7, "--seed", 3, "--max-batch", 1, "--buckets", "8,16", "-r", "dense")
    found = one_object(run("generate", folder, "-p", PROMPT, "-p", "w9", *settings, *EAGER, "--json"))
    expected = dense.generate([PROMPT, "w9"], steps=4, temperature=0.7, seed=3, max_batch=1, max_new_tokens=8)
    assert found["token_ids"] == expected.token_ids
    assert found["steps"] == expected.stats.steps
    assert all(n % 8 == 0 for n in found["padded"].values())


def test_prompts_with_a_byte_order_mark_and_with_half_of_a_character(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(PROMPT, encoding="utf-8-sig")
    assert read_prompts(None, str(file)) == [PROMPT]
    with pytest.raises(InputError, match="no half of a character"):
        read_prompts(["a\udcff"], None)


def test_prompts_from_a_file_and_from_stdin(run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n\nw8 w9\n")
    prompts = [PROMPT, "w8 w9"]
    assert read_prompts(prompts, None) == prompts
    assert read_prompts([PROMPT], str(file)) == [PROMPT, *prompts]
    result = run("generate", folder, "-p", PROMPT, "--prompt-file", "-", *EAGER, input="w8 w9\n")
    assert result.stdout.count("\n") == 2


def test_another_block_length_is_one_line_of_warning(run: Run, folder: Path) -> None:
    result = run("generate", folder, "-p", PROMPT, "--block-length", 4, *EAGER, "--json")
    one_object(result)
    assert result.stderr == "warning: block_length=4, but sdar was trained with 8: answers may be worse.\n"


# -- dump, diff, explain -----------------------------------------------------------------------------------------


def test_dump_is_the_text_of_the_graph(run: Run, folder: Path) -> None:
    graph = dgraph.capture(folder)
    result = run("dump", folder)
    assert (result.exit_code, result.stdout, result.stderr) == (0, dump(graph), "")
    assert max(map(len, result.stdout.splitlines())) > 80  # neither wrapped nor cut
    assert "\x1b" not in result.stdout


@pytest.mark.usefixtures("captured_once")
def test_dump_of_every_layer_or_one(run: Run, folder: Path) -> None:
    graph = dgraph.capture(folder)
    assert run("dump", folder, "--full").stdout == dump(graph, full=True)
    assert run("dump", folder, "--layer", 1).stdout == dump(graph, layer=1)


@pytest.mark.usefixtures("captured_once")
def test_dump_after_passes(run: Run, folder: Path) -> None:
    assert "dgraph.importance" in run("dump", folder, "-r", "focus").stdout
    assert "dgraph.importance" not in run("dump", folder, "-r", "focus", "--after", "CacheKV").stdout
    assert "return nothing" in run("dump", folder, "-r", "focus", "--phase", "prefill").stdout
    earlier = run("dump", folder, "-r", "focus", "-o", "ablation=after=0+signal=importance")
    assert "EvictTokens(alpha=1.5, after=0, signal='importance'" in earlier.stdout
    found = one_object(run("dump", folder, "-r", "focus", "-o", "alpha=inf", "--json"))
    assert found["spec"]["layers"] == LAYERS
    assert found["outputs"][0]["name"] == "token"


@pytest.mark.usefixtures("captured_once")
def test_dump_and_diff_as_pages(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("dump", folder, "--html", "page.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    result = run("diff", folder, "--html", "diff.html")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "focus step</h1>" in (tmp_path / "diff.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("captured_once")
def test_diff(run: Run, folder: Path) -> None:
    text = run("diff", folder, "--from", "dense", "--to", "focus").stdout
    assert text.startswith("dense step -> focus step: calls 8 added, 0 removed")
    found = one_object(run("diff", folder, "-o", "alpha=1.8", "--json"))
    assert found["summary"]["by_pass"]["EvictTokens"]["added"] == 8
    assert "no difference" in run("diff", folder, "--phase", "prefill").stdout
    assert run("diff", folder, "--from", "captured", "--to", "dense").stdout.startswith("captured -> dense step")
    assert run("diff", folder, "--after", "CacheKV").stdout.startswith("dense step after CacheKV and focus step after")
    begun = run("diff", folder, "--from", "captured", "--after", "PackRows").stdout
    assert begun.startswith("captured -> focus step after PackRows: calls ")
    assert "unknown pass of this phase 'EvictTokens'" in run("diff", folder, "--after", "EvictTokens").stderr


@pytest.mark.usefixtures("captured_once")
def test_explain(run: Run, folder: Path) -> None:
    text = run("explain", folder, "-r", "focus", "--buckets", "hybrid", "--weights", "int4").stdout
    assert any(line.startswith("  prefix") and "linear x" in line for line in text.splitlines()), "calls of their own"
    assert "values carried across the cut in layer 1" in text
    assert "row counts are padded, 10 to 16" in text
    assert max(map(len, text.splitlines())) > 80
    narrow = run("explain", folder, "-o", "alpha=inf", env={"COLUMNS": "80"}).stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "EvictTokens" in narrow
    found = one_object(run("explain", folder, "-o", "alpha=inf", "--json"))
    assert [p["phase"] for p in found["phases"]] == ["prefill", "step"]


# -- what there is -----------------------------------------------------------------------------------------------


def test_recipes_passes_and_models(run: Run) -> None:
    found = one_object(run("recipes", "--json"))["recipes"]
    assert [r["recipe"] for r in found] == list(dgraph.RECIPES)
    assert found[1]["options"]["alpha"] == 1.5
    assert all(r["summary"].endswith(".") for r in found)
    assert [cost["page"] for cost in found[1]["costs"]] == ["focus", "hard", "smol"]
    assert found[0]["costs"] == [], "dense is what the others are compared with"
    policies = one_object(run("policies", "--json"))["policies"]
    assert [p["policy"] for p in policies if not p["summary"].endswith((".", " as published"))] == []
    passes = {p["pass"]: p for p in one_object(run("passes", "--json"))["passes"]}
    assert passes["EvictTokens"]["effect"] == "approximate"
    assert passes["EvictTokens"]["options"]["pool"] == 3
    models = {m["model"]: m["kind"] for m in one_object(run("models", "--json"))["models"]}
    assert (models["tiny_sdar"], models["sdar"]) == ("embedded", "family")
    for command, word in (("recipes", "alpha=1.5"), ("passes", "approximate"), ("models", "tiny_sdar")):
        result = run(command)
        assert result.exit_code == 0
        assert word in result.stdout
        assert "\x1b" not in result.stdout


def test_doctor_says_what_is_there_and_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.cli import doctor

    monkeypatch.setattr(doctor, "_compile_something", lambda path: None)
    found = one_object(run("doctor", "--json"))
    names = {c["name"]: c["status"] for c in found["checks"]}
    assert found["ok"]
    assert {"python", "torch", "transformers", "triton", "C++ compiler", "model tiny_sdar", "cache"} <= set(names)
    assert set(names.values()) <= {"ok", "warn"}

    def broken(path: str = "") -> None:
        raise RuntimeError("no such header: omp.h\nand more")

    monkeypatch.setattr(doctor, "_compile_something", broken)
    result = run("doctor")
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("fail"))
    assert line.split()[1:3] == ["C++", "compiler"]
    assert line.endswith("fails: no such header: omp.h")
    assert "--backend eager" in result.stdout
    monkeypatch.setattr(doctor, "_compile_region", broken)
    (check,) = doctor.SLOW["Inductor"]()
    assert (check.status, check.found) == ("fail", "Inductor fails: no such header: omp.h")


def test_doctor_compiles_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.cli import doctor

    (check,) = doctor.CHECKS["the C++ compiler"]()
    assert check.status == "ok"
    assert check.found.endswith("compiles and runs a function")
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    (check,) = doctor.CHECKS["the C++ compiler"]()
    assert (check.status, check.found) == ("fail", f"{broken} fails: no such option")


@pytest.mark.parametrize(("pinned", "status"), [([], "ok"), (["triton==VERSION"], "ok"), (["triton==3.5.9"], "warn")])
def test_doctor_holds_triton_to_what_torch_declares(
    monkeypatch: pytest.MonkeyPatch, pinned: list[str], status: str
) -> None:
    from dgraph.cli import doctor

    version = pytest.importorskip("triton").__version__
    declared = {"torch": [each.replace("VERSION", version) for each in pinned]}
    requires = importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared.get(name, requires(name)))
    (check,) = (check for check in doctor.CHECKS["packages"]() if check.name == "triton")
    assert (check.status, check.found) == (status, version)
    assert check.advice == ("this torch needs triton==3.5.9: pip install 'triton==3.5.9'" if status == "warn" else "")


def test_doctor_finds_an_incomplete_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph import families
    from dgraph.cli import doctor

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    broken = families.Embedded("half", tmp_path, "")
    monkeypatch.setattr(families, "embedded", lambda: {"half": broken})
    (check,) = doctor.CHECKS["embedded models"]()
    assert (check.name, check.status) == ("model half", "fail")
    assert check.found.endswith("no usable tokenizer.json, model.safetensors")


def test_doctor_warns_of_an_artifact_cache_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dgraph.cli import doctor

    folder = tmp_path / "artifacts"
    monkeypatch.setenv("DGRAPH_CACHE", str(folder))
    (check,) = doctor.CHECKS["the artifact cache"]()
    assert (check.name, check.status, check.found) == ("artifact cache", "ok", f"{folder}, made on first use")
    folder.mkdir()
    folder.chmod(0o777)
    (check,) = doctor.CHECKS["the artifact cache"]()
    assert check.status == "warn"
    assert "can be written by others" in check.found


def test_doctor_warns_of_an_artifact_cache_that_is_a_file_or_under_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dgraph.cli import doctor

    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "artifacts"):
        monkeypatch.setenv("DGRAPH_CACHE", str(folder))
        (check,) = doctor.CHECKS["the artifact cache"]()
        assert check.status == "warn"
        assert f"{folder} cannot be used" in check.found
        assert "Set DGRAPH_CACHE" in check.advice


def test_doctor_reports_versions_out_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.cli import doctor

    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: ["torch>=99", "no-such-package>=1"])
    checks = {c.name: c for c in doctor.CHECKS["packages"]()}
    assert checks["torch"].status == "warn"
    assert "pip install 'torch>=99'" in checks["torch"].advice
    assert checks["no-such-package"].status == "fail"


# -- help and options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "dump", "diff", "explain", "recipes", "passes", "models", "doctor"])
def test_help_has_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"dgraph {command}" in result.stdout.replace(f"Usage: dgraph {command}", "").replace("Usage: root", "")


def test_no_command_is_a_request_for_help(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "generate" in result.stdout


def test_options_are_read_as_the_type_of_their_default() -> None:
    defaults = {"alpha": 1.5, "keep": 0, "recommit": True, "signal": "delta", "window": None}
    given = ["alpha=inf", "keep=4", "recommit=false", "signal=importance", "window=3"]
    options = read_options("option", defaults, given)
    assert options == {"alpha": math.inf, "keep": 4, "recommit": False, "signal": "importance", "window": 3}
    assert [type(v) for v in options.values()] == [float, int, bool, str, int]
    for text, message in (
        ("alpha=much", "option alpha is a number .inf allowed., got 'much'"),
        ("keep=1.5", "option keep is a whole number, got '1.5'"),
        ("window=wide", "option window is a whole number, got 'wide'"),
        ("recommit=perhaps", "option recommit is true or false"),
        ("alpha", "--option takes KEY=VALUE, got 'alpha'"),
    ):
        with pytest.raises(InputError, match=message):
            read_options("option", defaults, [text])
    with pytest.raises(UnknownName, match="Did you mean 'keep'"):
        read_options("option", defaults, ["keeep=1"])


def test_an_option_that_is_a_value_of_several_fields_is_read_with_plus_signs() -> None:
    types = types_of(dgraph.RECIPES["focus"])
    found = read_options("option", types, ["ablation=signal=importance+after=2", "alpha=2"])
    assert found == {"ablation": Ablation(signal="importance", after=2), "alpha": 2.0}
    assert str(found["ablation"]) == "signal=importance+after=2"
    with pytest.raises(UnknownName, match=r"unknown field of ablation 'afer'\. Did you mean 'after'"):
        read_options("option", types, ["ablation=afer=2"])
    with pytest.raises(InputError, match="option ablation, after is a whole number, got 'x'"):
        read_options("option", types, ["ablation=after=x"])


def test_an_option_that_is_a_tuple_is_read_with_commas() -> None:
    def builder(spec: Any, *, layers: tuple[int, ...] = (), shares: Any = (0.5,), names: Any = ()) -> None: ...

    types = types_of(builder)  # type: ignore[arg-type]
    found = read_options("option", types, ["layers=3,5", "shares=1", "names=a,b"])
    assert found == {"layers": (3, 5), "shares": (1.0,), "names": ("a", "b")}
    assert read_options("option", types, ["layers="]) == {"layers": ()}
    with pytest.raises(InputError, match="option layers is a whole number, got 'x'"):
        read_options("option", types, ["layers=3,x"])
    with pytest.raises(UnknownName, match="unknown option 'lawyers'"):
        read_options("option", types, ["layers=3", "lawyers=3"])


def test_an_option_that_the_model_decides_is_read_as_it_is_annotated() -> None:
    types = types_of(dgraph.RECIPES["dyllm"])
    found = read_options("option", types, ["tau=0.995", "full_steps=2", "kv_dtype=fp8"])
    assert found == {"tau": 0.995, "full_steps": 2, "kv_dtype": "fp8"}


def test_the_format_of_keys_and_values_is_an_option_of_the_recipe(run: Run) -> None:
    assert recipe_options("dense", ["kv_dtype=fp8"]) == recipe_options("dense", None, "fp8") == {"kv_dtype": "fp8"}
    assert shared_options(["dense", "captured"], ["max_num_logits=5"], "fp8") == {
        "max_num_logits": 5,
        "kv_dtype": "fp8",
    }
    result = run("dump", "tiny_sdar", "--recipe", "dense", "--kv-dtype", "fp4")
    assert result.exit_code != 0
    assert "unknown dtype of keys and values 'fp4'. Did you mean 'fp8'" in result.stderr


def test_buckets_are_a_kind_or_a_list() -> None:
    assert [bucket_list(text) for text in (None, "exact", "8,16, 32", "8")] == [None, "exact", [8, 16, 32], [8]]


def test_version(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, dgraph.__version__)


class Full(io.StringIO):
    """A file that cannot be written."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


def test_an_output_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for a pipe whose reader has had enough, as `head` has."""
    monkeypatch.setattr(sys, "stdout", Full(errno.EPIPE))
    with pytest.raises(BrokenPipeError):
        print_text("a")
    for stream, message in ((Full(errno.ENOSPC), "cannot be written: No space left on device."), (None, "is closed")):
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            app(["passes"])
        assert ended.value.code == 2
        assert f"error: standard output {message}" in capsys.readouterr().err
