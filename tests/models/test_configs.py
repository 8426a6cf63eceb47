"""Values of config.json that cannot be used, refused by key or class; and models that no diffusion trained."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import dgraph
from dgraph.errors import CheckpointError, DgraphWarning
from dgraph.families import families
from tests.models import test_dream, test_folders, test_llada
from tests.oracle import llada2
from tests.remote import write
from tests.tiny import MASK

NATIVE, WEIGHTS = test_folders.CONFIG, test_folders.WEIGHTS
PLAIN = {key: value for key, value in NATIVE.items() if key not in ("mask_token_id", "block_size")}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "num_hidden_layers",
            "12",
            r"config\.json does not describe a Qwen2ForCausalLM: num_hidden_layers is '12', expected a",
        ),
        ("num_attention_heads", 0, r"num_attention_heads is 0, expected a whole number"),
        ("vocab_size", 97.0, r"vocab_size is 97\.0, expected"),
        ("hidden_size", True, r"hidden_size is True, expected"),
        ("rms_norm_eps", "1e-6", r"rms_norm_eps is '1e-6', expected a number above 0"),
        ("rope_theta", [], r"rope_theta is \[\], expected a number above 0"),
        ("rope_scaling", {"type": "linear", "factor": "2"}, r"rope_scaling\.factor is '2', expected a number"),
        ("hidden_act", "slu", r"does not describe a Qwen2ForCausalLM: hidden_act is 'slu', which it does not know"),
        ("mask_token_id", "96", r"dream: mask_token_id in the config is '96', expected a whole number"),
        ("block_size", 8.0, r"block_size in the config is 8\.0, expected a whole number"),
        ("attention", ["causal"], r"attention in the config is \['causal'\], expected a text"),
        ("next_token", 1, r"next_token in the config is 1, expected true or false"),
        ("architectures", "DreamModel", r"config\.json: architectures is 'DreamModel', expected a list of names"),
        ("architectures", [3], r"architectures is \[3\], expected a list of names"),
        ("transformers_weights", 3, r"transformers_weights in config\.json is 3, expected a file's name"),
        ("attention_dropout", float("nan"), r"config\.json: attention_dropout is nan, expected a finite number"),
        ("rope_scaling", {"a": [1, float("inf")]}, r"rope_scaling\.a\[1\] is inf, expected a finite number"),
    ],
)
def test_a_value_that_cannot_be_used(key: str, value: Any, message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {**test_dream.CONFIG, key: value}, test_dream.WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("n_layers", "2"), ("d_model", 32.0), ("n_kv_heads", []), ("embedding_size", True)]
)
def test_keys_of_a_familys_own_are_named(key: str, value: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {**test_llada.CONFIG, key: value}, test_llada.WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} is .*, expected a whole number, at least 1"):
        dgraph.load(folder)


MIXTURE = llada2.Config()
OF_MIXTURES: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": -1}, r"vocab_size is -1, expected a number above 0"),
    ({"partial_rotary_factor": 0.0}, r"partial_rotary_factor is 0\.0, expected a number above 0"),
    ({"num_key_value_heads": []}, r"num_key_value_heads is \[\], expected int"),
    ({"rope_parameters": "default"}, r"rope_parameters is 'default', expected an object of keys"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, r"rope_type is 'dynamic', expected 'default'"),
]


@pytest.mark.parametrize(("change", "message"), OF_MIXTURES)
def test_values_of_a_mixture_of_experts(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    keys = {**llada2.keys(MIXTURE), **change}
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "m", keys, {"model.norm.weight": WEIGHTS["model.norm.weight"]}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\ufeff{}", r"config\.json cannot be read as JSON: Unexpected UTF-8 BOM"),
        ('{"a": ' + "[" * 100_000, r"config\.json (is nested too deeply|cannot be read)"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", r"config\.json is nested too deeply for JSON"),
        ('{"vocab_size": 1e999}', r"config\.json: vocab_size is inf, expected a finite number"),
        ("", r"config\.json cannot be read as JSON"),
    ],
    ids=["mark", "open", "deep", "large", "empty"],
)
def test_a_text_that_is_no_config(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DreamModle", r"Did you mean DreamModel\?"),
        ("Gemma3ForCausalLM", r"Gemma3ForCausalLM is an autoregressive model, which was not trained to fill masks"),
        ("WeDLMForCausalLM", r"WeDLMForCausalLM is a WeDLM \(arXiv 2512\.22737\): its masks see what comes before"),
        ("PanguEmbeddedForCausalLM", r"is an openPangu: no public config says how its diffusion checkpoints"),
        ("IDLMForCausalLM", r"is an I-DLM \(arXiv 2604\.11035\): its masks see only what comes before them"),
        ("GPT2LMHeadModel", r"is an autoregressive model"),
        ("BertForMaskedLM", r"BertForMaskedLM is an encoder that was trained to fill single gaps"),
        ("RobertaForSequenceClassification", r"is a classifier: it writes no text"),
        ("CLIPVisionModel", r"is a model of images: dgraph decodes text"),
        ("Qwen2_5_VLForConditionalGeneration", r"is a model of images and text"),
        ("T5ForConditionalGeneration", r"is a model with an encoder of texts, images or sounds"),
    ],
)
def test_a_class_that_is_not_loaded(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(CheckpointError, match=message) as told:
        dgraph.load(tmp_path)
    for family in families().values():
        assert all(known in str(told.value) for known in family.architectures)  # type: ignore[attr-defined]
    assert f"architectures in its config.json is ['{name}'], not one of A2DQwen3LMHeadModel, " in str(told.value)


def test_a_config_without_classes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CheckpointError, match=r"names no architectures, and says model_type 'qwen3'; expected one of"):
        dgraph.load(tmp_path)


def test_an_autoregressive_model_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "plain", PLAIN, WEIGHTS)
    told = r"plain, a Qwen3ForCausalLM: nothing says that it was trained by diffusion .* autoregressive model\. Filling"
    with pytest.warns(DgraphWarning, match=told):
        dgraph.load(folder, mask_id=MASK)


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"mask_token_id": MASK, "block_size": 8}, {}),
        ({"block_size": 8}, {"mask_id": MASK}),
        ({}, {"mask_id": MASK, "block_length": 8}),
    ],
)
def test_who_says_what_a_model_was_trained_for_is_not_told(
    config: dict[str, Any], facts: dict[str, Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dgraph.load(write(tmp_path / "m", {**PLAIN, **config}, WEIGHTS), **facts)
