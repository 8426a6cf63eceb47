"""What Ray is asked for, and what is refused before anything starts; most of it without Ray."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dgraph.blueprint import Blueprint
from dgraph.cli.app import app
from dgraph.engine.build import EngineConfig
from dgraph.errors import InputError, UnknownName
from dgraph.ray import build, deployment
from dgraph.ray.application import BESIDE, QUEUE, capacity, serve_options
from dgraph.ray.host import reason_of
from dgraph.ray.ranks import ALL_VISIBLE, placement

ROOT = Path(__file__).parents[2]
TINY = Blueprint(model="tiny_sdar", engine=EngineConfig(max_sequences=4, queue=10))
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray: pip install -e '.[test]'")


def options(blueprint: Blueprint = TINY, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"replicas": 2, "autoscaling": None, "tp": 1, "shutdown_timeout": 5}
    return serve_options(blueprint, **{**usual, "ray_actor_options": None, **changes})


def test_a_replica_is_given_what_its_engine_has_room_for_and_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGRAPH_CACHE")
    assert capacity(TINY) == 4 + 10
    assert capacity(replace(TINY, engine=EngineConfig())) == 16 + QUEUE
    assert capacity(replace(TINY, engine=EngineConfig(), device="cuda")) == 64 + QUEUE
    assert capacity(replace(TINY, recipes=("focus", "dense"))) == 2 * (4 + 10)
    assert options() == {
        "num_replicas": 2,
        "max_ongoing_requests": 14 + BESIDE,
        "graceful_shutdown_timeout_s": 5.0,
        "ray_actor_options": {},
        "logging_config": {"enable_access_log": False},
    }


def test_autoscaling_aims_at_full_slots_unless_it_is_told_otherwise() -> None:
    found = options(replicas="auto")
    assert (found["num_replicas"], found["autoscaling_config"]) == ("auto", {"target_ongoing_requests": 4})
    found = options(replicas="auto", autoscaling={"max_replicas": 3, "target_ongoing_requests": 2})
    assert found["autoscaling_config"] == {"target_ongoing_requests": 2, "max_replicas": 3}


def test_a_replica_has_a_gpu_where_it_needs_one_and_the_cache_of_whoever_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DGRAPH_CACHE", "/shared/cache")
    given = {"num_cpus": 4, "runtime_env": {"pip": ["x"], "env_vars": {"A": "1"}}}
    assert options(replace(TINY, device="cuda"), ray_actor_options=given)["ray_actor_options"] == {
        "num_gpus": 1,
        "num_cpus": 4,
        "runtime_env": {"pip": ["x"], "env_vars": {"DGRAPH_CACHE": "/shared/cache", "A": "1"}},
    }
    assert given["runtime_env"] == {"pip": ["x"], "env_vars": {"A": "1"}}


def test_ranks_have_a_bundle_each_on_one_machine() -> None:
    assert placement(1, {"num_gpus": 1}) == {"ray_actor_options": {"num_gpus": 1}}
    found = placement(2, {"num_gpus": 1, "resources": {"fast": 1}, "runtime_env": {"env_vars": {"A": "1"}}})
    assert found["ray_actor_options"]["runtime_env"] == {"env_vars": {ALL_VISIBLE: "1", "A": "1"}}
    assert found["placement_group_bundles"] == [{"CPU": 1, "GPU": 1, "fast": 1}] * 2
    assert found["placement_group_strategy"] == "STRICT_PACK"
    assert placement(3, {"num_cpus": 2})["placement_group_bundles"] == [{"CPU": 2}] * 3


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"replicas": 0}, InputError, 'replicas are "auto" or a whole number, at least 1, got 0'),
        (
            {"replicas": 2, "autoscaling": {"max_replicas": 3}},
            InputError,
            "autoscaling means nothing beside replicas=2",
        ),
        ({"shutdown_timeout": -1}, InputError, "shutdown_timeout must be at least 0 seconds, got -1"),
        ({"device": "cuda:1"}, InputError, "say 'cuda', not 'cuda:1'"),
        ({"tp": 0}, InputError, "tp must be a whole number of devices, at least 1, got 0"),
        ({"tp": 2, "recipe": ["focus", "dense"]}, InputError, "serve it under one recipe, got focus, dense"),
        ({"recipe": "focsu"}, UnknownName, "unknown recipe 'focsu'. Did you mean 'focus'"),
        ({"alhpa": 1}, UnknownName, "unknown option of 'focus' 'alhpa'. Did you mean 'alpha'"),
        ({"dtype": "int8"}, UnknownName, "unknown dtype 'int8'"),
        ({"engine": {"slots": 3}}, UnknownName, "unknown setting of EngineConfig 'slots'"),
        ({"server": {"max_n": 0}}, InputError, "max_n must be a whole number, at least 1, got 0"),
        ({"recipe": []}, InputError, "recipes are names, at least one of them"),
    ],
)
def test_what_no_replica_can_be_is_refused_where_it_is_asked_for(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        deployment("tiny_sdar", **settings)


def test_a_model_is_named_so_that_another_process_can_load_it() -> None:
    with pytest.raises(InputError, match=r"a blueprint names its model, .* got object"):
        deployment(object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs the argument model"):
        build({"recipe": "focus"})


@needs_ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_s_arguments_make_the_same_application_as_python_s() -> None:
    server = {"max_n": 2, "decoding": {"threshold": 0.8}}
    engine = {"max_sequences": 4}
    made = build({"model": "tiny_sdar", "engine": engine, "server": server, "alpha": 1.8, "replicas": "3"})
    deployed = made._bound_deployment
    assert (deployed.name, deployed.num_replicas) == ("dgraph", 3)
    assert deployed.max_ongoing_requests == 4 + QUEUE + BESIDE
    blueprint, settings, ranks, access_log = deployed.init_args
    assert (blueprint.options, blueprint.engine.queue) == ({"alpha": 1.8}, QUEUE)
    assert (settings.max_n, settings.decoding.threshold) == (2, 0.8)
    assert (ranks, access_log) == (1, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--ray", "--replicas", "many"], "--replicas is auto or a whole number, at least 1, got 'many'"),
        (["serve", "--replicas", "2"], "add --ray, or leave it out"),
        (["generate", "tiny_sdar", "--replicas", "2"], "add --ray, or leave it out"),
        (["generate", "tiny_sdar", "-p", "a", "--ray"], "--ray answers --data"),
        (["generate", "tiny_sdar", "--data", "i", "--out", "o", "--ray", "--tp", "2"], "of one device each: leave it"),
        (["generate", "tiny_sdar", "--data", "in.jsonl"], "--data and --out go together"),
        (["generate", "tiny_sdar", "--out", "o", "--data", "i", "-p", "a"], "and without --prompt"),
        (["generate", "tiny", "--out", "o", "--data", "i"], "unknown model 'tiny'"),
        (["generate", "tiny_sdar", "--out", "o", "--data", "no such file"], "--data no such file cannot be read"),
    ],
)
def test_a_command_that_cannot_be_is_refused_in_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


@needs_ray
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_model"], "unknown model 'no_such_model'"),
        (["--tp", "0"], "tp must be a whole number of devices, at least 1, got 0"),
        (["--port", "65536"], "a port is a number from 0 to 65535"),
    ],
)
def test_replicas_that_cannot_be_are_refused_before_ray_starts(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *args, "--ray", "--replicas", "2"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_start_that_failed_is_told_in_the_words_of_the_replica() -> None:
    def status(message: str) -> Any:
        return SimpleNamespace(
            applications={"dgraph": SimpleNamespace(deployments={"a": SimpleNamespace(message=message)})}
        )

    trace = "failed to start:\n  File x.py\n    raise y\ndgraph.errors.CheckpointError: no folder.\n\nretried"
    assert reason_of(status(trace)) == "no folder."
    assert reason_of(status(" waits for a GPU \n")) == "waits for a GPU"
    assert reason_of(SimpleNamespace(applications={})) == ""


def test_without_ray_everything_else_works_and_replicas_say_what_is_missing(tmp_path: Path) -> None:
    """In a process that cannot import ray."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    code = f"""
import sys
sys.modules["ray"] = None
import dgraph.ray
from dgraph.cli.app import app
from typer.testing import CliRunner
assert "fastapi" not in sys.modules
data = ["--data", r"{tmp_path / "in.jsonl"}", "--out", r"{tmp_path / "out.jsonl"}"]
for args in (["serve", "--ray"], ["generate", "tiny_sdar", *data, "--ray"]):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2, result
    print(result.stderr, end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    line = "error: replicas need ray, which is not installed: pip install 'dgraph[ray]'."
    assert done.stdout.splitlines() == [line, line]
