"""Keywords that a public function does not have: mistyped, of another function, or of another library."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import dgraph
from dgraph.compiler.arguments import arguments_of, unknown_keyword
from dgraph.errors import UnknownName
from dgraph.errors.foreign import HINTS
from dgraph.recipes import RECIPES, options_of
from dgraph.runtime.decoding import Decoding
from dgraph.spec import FACTS
from tests.compiled import compiled

OURS = (
    arguments_of(dgraph.optimize, dgraph.Compilation)
    | arguments_of(dgraph.load)
    | arguments_of(dgraph.CompiledModel.generate, Decoding)
    | set(FACTS)
    | {option for name in RECIPES for option in options_of(RECIPES[name])}
)


@pytest.fixture(scope="module")
def dense(model: dgraph.Model) -> dgraph.CompiledModel:
    return compiled(model, "dense")


def refused(function: Callable[..., object], **keywords: Any) -> str:
    with pytest.raises(UnknownName) as caught:
        function(**keywords)
    return str(caught.value)


def test_no_foreign_name_is_one_of_ours() -> None:
    assert HINTS.keys().isdisjoint(OURS)


@pytest.mark.parametrize("name", HINTS)
def test_a_foreign_name_is_answered_with_its_hint_everywhere(dense: dgraph.CompiledModel, name: str) -> None:
    calls: list[Callable[..., object]] = [
        lambda **given: dgraph.optimize("tiny_sdar", **given),
        lambda **given: dgraph.optimize("tiny_sdar", dense.recipe, **given),
        lambda **given: dgraph.load("tiny_sdar", **given),
        lambda **given: dgraph.adopt(dense.model, **given),
        lambda **given: dgraph.capture(dense.model, **given),
        lambda **given: dense.generate("a", **given),
        lambda **given: dense.warm_up(1, **given),
        lambda **given: dgraph.recipe("focus", dense.spec, **given),
        lambda **given: dgraph.explain(dense.model, **given),
    ]
    if name not in {f.name for f in fields(dgraph.EngineConfig)}:
        calls.append(dense.engine)
    if name not in arguments_of(dgraph.dump):
        calls.append(lambda **given: dgraph.dump(dense.model, "focus", **given))
        calls.append(lambda **given: dgraph.diff(dense.model, **given))
    for call in calls:
        assert f" {name!r}. {HINTS[name]} Known: " in refused(call, **{name: 1})


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_names_arguments_that_exist(name: str) -> None:
    samplers = {f.name for f in fields(dgraph.Sampler)}
    engine = {f.name for f in fields(dgraph.EngineConfig)}
    named = set(re.findall(r"\b([a-z_]+)=", HINTS[name])) | set(re.findall(r"^Use ([a-z_]+)\b", HINTS[name]))
    assert named <= OURS | samplers | engine


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torch_dtype", "Use dtype"),
        ("device_map", "Use device="),
        ("max_tokens", "Use max_new_tokens"),
        ("max_length", "Use max_new_tokens"),
        ("do_sample", "Use temperature"),
        ("num_beams", "There is no beam search"),
        ("trust_remote_code", "no code of a checkpoint is run"),
        ("quantization", "weights="),
        ("load_in_8bit", "weights="),
        ("tensor_parallel_size", "mesh="),
        ("attn_implementation", "its own attention"),
        ("eos_token_id", "eos_ids"),
        ("messages", "Use prompts"),
        ("streamer", "engine.stream"),
    ],
)
def test_well_known_names(name: str, said: str) -> None:
    assert said in HINTS[name]


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        ("optimize", "max_new_tokens", "It is a setting of CompiledModel.generate."),
        ("optimize", "mask_id", r"It is a fact of the model: facts={'mask_id': ...} of dgraph.optimize"),
        ("optimize", "bakend", "Did you mean 'backend'?"),
        ("optimize", "devcie", "Did you mean 'device'"),
        ("optimize", "alhpa", "Did you mean 'alpha'"),
        ("optimize", "thresold", "Did you mean 'threshold'? It is a setting of CompiledModel.generate."),
        ("dense", "alpha", "It is an option of recipe 'focus'."),
        ("load", "backend", "It is an argument of dgraph.optimize."),
        ("load", "blocklength", "Did you mean 'block_length'"),
        ("load", "devise", "Did you mean 'device'"),
        ("generate", "max_batc", "Did you mean 'max_batch'"),
        ("generate", "temprature", "Did you mean 'temperature'"),
        ("generate", "backend", "It is an argument of dgraph.optimize."),
        ("engine", "max_seqences", "Did you mean 'max_sequences'"),
        ("engine", "max_new_tokens", "It is a setting of CompiledModel.generate."),
    ],
)
def test_a_keyword_is_compared_with_all_arguments(
    dense: dgraph.CompiledModel, function: str, name: str, said: str
) -> None:
    calls: dict[str, Callable[..., object]] = {
        "optimize": lambda **given: dgraph.optimize("tiny_sdar", **given),
        "dense": lambda **given: dgraph.optimize("tiny_sdar", "dense", **given),
        "load": lambda **given: dgraph.load("tiny_sdar", **given),
        "generate": lambda **given: dense.generate("a", **given),
        "engine": dense.engine,
    }
    assert said in refused(calls[function], **{name: 1})


def test_settings_as_a_value_know_foreign_names_too() -> None:
    message = refused(lambda **given: Decoding.of(None, given), max_tokens=3)
    assert message.startswith(
        f"unknown setting of Decoding 'max_tokens'. {HINTS['max_tokens']} Known: allowed_token_ids, "
    )


def test_facts_given_to_optimize_are_compared_as_those_of_load(model: dgraph.Model) -> None:
    assert "Did you mean 'mask_id'" in refused(lambda **facts: dgraph.optimize(model, facts=facts), maskid=3)


def test_a_name_that_is_like_no_other() -> None:
    error = unknown_keyword("option", "zzzzqq", ["alpha"], ["dtype"])
    assert str(error) == "unknown option 'zzzzqq'. Known: alpha."
