"""Checkpoints as their publishers lay them out: loaded by name, computed and decoded as plain PyTorch does it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from typer.testing import CliRunner

import dgraph
from dgraph.cli import app
from dgraph.errors import CheckpointError, DgraphWarning, InputError
from dgraph.families import families
from tests.oracle import llada2
from tests.oracle.decoder import Config, decode, forward, shapes
from tests.remote import SEQUENCES, check_against, close, logits_of, random_weights, stand_in, write
from tests.tiny import MASK, VOCAB

EOS = 5
MASK_TEXT = "<|mask|>"


@dataclass(frozen=True)
class Published:
    """A published checkpoint at another size.

    Attributes:
        path: of its folder, in which a name may say what no key does.
        family: that loads it.
        config: keys of its config.json besides the sizes.
        sizes: its shape.
        facts: of the spec that it has then.
        block: rows decoded together.
        silent: whether its config has no mask token, which the tokenizer names.
    """

    path: str
    family: str
    config: Mapping[str, Any]
    sizes: Config
    attention: str
    block: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    silent: bool = False

    def __str__(self) -> str:
        return self.path.partition("/")[0]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Random, with a head that spreads the probabilities."""
        found = random_weights(shapes(self.sizes))
        name = "model.embed_tokens.weight" if self.sizes.tied else "lm_head.weight"
        return {**found, name: found[name] * 4}

    @property
    def keys(self) -> dict[str, Any]:
        """The whole config.json."""
        sizes = self.sizes
        found = {
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "vocab_size": sizes.vocab,
            "rms_norm_eps": sizes.eps,
            "rope_theta": sizes.theta,
            "max_position_embeddings": 64,
            "tie_word_embeddings": sizes.tied,
            "mask_token_id": MASK,
            "eos_token_id": EOS,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            **self.config,
        }
        return {key: value for key, value in found.items() if not (self.silent and key == "mask_token_id")}

    def write(self, folder: Path) -> Path:
        """Write its folder, with a tokenizer of words."""
        place = folder / self.path
        place.parent.mkdir(parents=True, exist_ok=True)
        write(place, self.keys, self.weights, 2)
        write_tokenizer(place)
        return place


def write_tokenizer(folder: Path) -> None:
    """Words w0, w1, ..., of which the last is the mask token, in the files that transformers writes."""
    words = {f"w{i}": i for i in range(VOCAB - 1)}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    made.add_special_tokens([AddedToken(MASK_TEXT, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": MASK_TEXT, "eos_token": f"w{EOS}"}))


QWEN3 = {"head_dim": 8, "attention_bias": False, "use_sliding_window": False, "sliding_window": None}
TINY_A2D: Mapping[str, Any] = {
    "architectures": ["A2DQwen3LMHeadModel"],
    "auto_map": {
        "AutoConfig": "modeling_qwen3.A2DQwen3Config",
        "AutoModelForMaskedLM": "modeling_qwen3.A2DQwen3LMHead",
    },
    "model_type": "a2d-qwen3",
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 28,
    "rope_scaling": None,
    **QWEN3,
}
CHECKPOINTS = [
    Published(
        "Qwen3-0.6B-diffusion-mdlm-v0.1/0000",
        "a2d",
        TINY_A2D,
        Config(qk_norm=True, tied=True),
        "bidirectional",
        32,
        silent=True,
    ),
    Published(
        "models--dllm-hub--Qwen3-0.6B-diffusion-bd3lm-v0.1/snapshots/0000",
        "a2d",
        TINY_A2D,
        Config(qk_norm=True, tied=True),
        "block_causal",
        32,
        silent=True,
    ),
    Published(
        "Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        "a2d",
        {"architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2", "use_sliding_window": False},
        Config(bias=True, tied=True),
        "bidirectional",
        32,
        silent=True,
    ),
    Published(
        "Llama-3.2-1B-diffusion-bd3lm",
        "a2d",
        {"architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama", "mlp_bias": False, "head_dim": 8},
        Config(),
        "block_causal",
        32,
        silent=True,
    ),
    Published(
        "Stable-DiffCoder-8B-Instruct",
        "stable_diffcoder",
        {
            "architectures": ["StableDiffcoderForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_seed_diffcoder.StableDiffcoderForCausalLM"},
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "pad_token_id": 1,
            "rope_scaling": None,
        },
        Config(),
        "block_causal",
        4,
        {"pad_id": 1},
        silent=True,
    ),
    Published(
        "DreamReasoner-8B",
        "dream_reasoner",
        {
            "architectures": ["DreamForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_dream.DreamForCausalLM"},
            "model_type": "Dream",
            "block_size": 8,
            **QWEN3,
        },
        Config(qk_norm=True),
        "block_causal",
        8,
    ),
    Published(
        "iLLaDA-8B-Instruct",
        "illada",
        {
            "architectures": ["ILLaDAForCausalLM"],
            "model_type": "illada",
            "attention_bias": False,
            "mlp_bias": False,
            "layer_norm_eps": None,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
        },
        Config(tied=True),
        "bidirectional",
        32,
    ),
]


@pytest.mark.parametrize("case", CHECKPOINTS, ids=str)
def test_a_folder_is_loaded_and_computes_the_oracle(case: Published, tmp_path: Path) -> None:
    model = dgraph.load(case.write(tmp_path), "float32")
    close(logits_of(model, SEQUENCES[1]), forward(case.weights, case.sizes, SEQUENCES[1]))
    spec, sizes = model.spec, case.sizes
    assert (spec.family, spec.attention, spec.block_length, spec.logit_shift) == (
        *(case.family, case.attention, case.block, 0),
    )
    assert (spec.mask_id, spec.eos_ids, spec.encoding, spec.next_token) == (MASK, (EOS,), "block", False)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim) == (sizes.layers, sizes.heads, sizes.kv_heads, 8)
    assert {name: getattr(spec, name) for name in case.facts} == case.facts


@pytest.mark.parametrize("case", CHECKPOINTS, ids=str)
def test_decoding_is_that_of_the_oracle(case: Published, tmp_path: Path) -> None:
    """The blocks that a response begins and ends in are of the prompt, too."""
    made = dgraph.optimize(case.write(tmp_path), "dense", dtype="float32", backend="eager", facts={"block_length": 4})
    causal = case.attention == "block_causal"
    tokens = forwards = 0
    for prompt in (SEQUENCES[0], SEQUENCES[2][:6], SEQUENCES[2][6:]):
        new = 10 + (-(len(prompt) + 10)) % 4
        wanted, steps = decode(case.weights, case.sizes, prompt, new, 4, MASK, 0.4, causal)
        result = made.generate(input_ids=[prompt], max_new_tokens=new, threshold=0.4, ignore_eos=True)
        assert result.token_ids == [wanted]
        tokens, forwards = tokens + new, forwards + steps
    assert tokens / 4 < forwards < tokens, "some steps commit several tokens, and some one"


@pytest.mark.parametrize("case", CHECKPOINTS[1:6:4], ids=str)
def test_module_graph_and_every_pass_equal_the_oracle(case: Published) -> None:
    remote = stand_in(case.config["architectures"][0], case.keys, case.weights)
    facts = {"mask_id": MASK, "attention": case.attention} if case.silent else {}
    check_against(dgraph.adopt(remote, **facts), lambda tokens: forward(case.weights, case.sizes, tokens))


def test_the_command_line_reads_such_a_folder(tmp_path: Path) -> None:
    """A prompt in words, a response in words."""
    folder = CHECKPOINTS[1].write(tmp_path)
    words = ["generate", str(folder), "-p", "w3 w4 w6", "--backend", "eager", "--max-new-tokens", "5", "--json"]
    result = CliRunner().invoke(app, [*words, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["token_ids"][0]) == 5
    assert found["texts"][0].split() == [f"w{i}" for i in found["token_ids"][0]]


# -- names and facts -------------------------------------------------------------------------------------------------


def test_a_name_that_says_no_objective_is_asked_for(tmp_path: Path) -> None:
    case = CHECKPOINTS[0]
    folder = write(tmp_path / "my-a2d", case.keys, case.weights)
    message = r"a2d: the attention is said neither by attention in config\.json .*--fact attention=bidirectional"
    with pytest.raises(InputError, match=message):
        dgraph.load(folder, mask_id=MASK)
    for said in ("bidirectional", "block_causal"):
        assert dgraph.load(folder, mask_id=MASK, attention=said).spec.attention == said
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**case.keys, "attention": "block_causal"}))
    assert dgraph.load(folder).spec.attention == "block_causal"


def test_the_mask_token_of_the_published_tiny_a2d(tmp_path: Path) -> None:
    """Without a tokenizer: that of Qwen3, and none for the others, whose publishers' tokenizers differ."""
    sizes = Config(layers=1, vocab=151936, qk_norm=True, tied=True)
    case = Published("Qwen3-0.6B-mdlm", "a2d", TINY_A2D, sizes, "bidirectional", 32, silent=True)
    with pytest.warns(DgraphWarning, match="assuming mask_id=151669"):
        spec = dgraph.load(write(tmp_path / "Qwen3-mdlm", {**case.keys, "layer_types": None}, case.weights)).spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (151669, (EOS,), 151643)
    other = CHECKPOINTS[2]
    with pytest.raises(InputError, match="a diffusion model needs a mask token"):
        dgraph.load(write(tmp_path / "Qwen2.5-mdlm", other.keys, other.weights))


LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "block_type": "llama",
    "block_group_size": 1,
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "include_bias": False,
    "include_qkv_bias": False,
    "rope": True,
    "rope_full_precision": True,
    "weight_tying": False,
    "d_model": 32,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "mlp_hidden_size": 48,
    "embedding_size": 97,
    "vocab_size": 97,
    "max_sequence_length": 64,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-5,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
DREAM = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "use_mrope": False,
    "use_sliding_window": False,
    "bos_token_id": 4,
    "pad_token_id": 4,
}
SDAR = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "fuse_cross_entropy": True, **QWEN3}


@pytest.mark.parametrize(
    ("name", "config", "sizes", "family", "facts"),
    [
        ("DiffuCoder-7B-cpGRPO", DREAM, Config(bias=True), "dream", {"logit_shift": 1, "attention": "bidirectional"}),
        ("Dream-Coder-v0-Instruct-7B", DREAM, Config(bias=True), "dream", {"logit_shift": 1, "pad_id": 4}),
        ("TraDo-4B-Instruct", {**SDAR, "block_size": 4}, Config(qk_norm=True, tied=True), "sdar", {"block_length": 4}),
        ("MBD-SDAR-8B-b16", SDAR, Config(qk_norm=True), "sdar", {"block_length": 16, "attention": "block_causal"}),
    ],
)
def test_checkpoints_of_known_layouts_are_loaded_by_name(
    name: str, config: Mapping[str, Any], sizes: Config, family: str, facts: Mapping[str, Any], tmp_path: Path
) -> None:
    case = Published(name, family, config, sizes, "", 0)
    model = dgraph.load(case.write(tmp_path), "float32")
    close(logits_of(model, SEQUENCES[0]), forward(case.weights, sizes, SEQUENCES[0]))
    assert {"family": family, **facts} == {key: getattr(model.spec, key) for key in ("family", *facts)}


def test_llada_1_5_is_loaded_by_name(tmp_path: Path) -> None:
    from tests.oracle.llada import Config as Sizes
    from tests.oracle.llada import shapes as shapes_of

    weights = random_weights(shapes_of(Sizes()))
    spec = dgraph.load(write(tmp_path / "LLaDA-1.5", LLADA, weights), "float32").spec
    assert (spec.family, spec.attention, spec.logit_shift, spec.mask_id) == ("llada", "bidirectional", 0, MASK)


@pytest.mark.parametrize("name", ["DMax-Math-16B", "MBD-LLaDA2-mini"])
def test_what_was_trained_from_llada2_is_loaded_by_name(name: str, tmp_path: Path) -> None:
    sizes = llada2.Config()
    folder = write(tmp_path / name, llada2.keys(sizes), llada2.random_weights(sizes, 0))
    spec = dgraph.load(folder, "float32").spec
    assert (spec.family, spec.block_length, spec.attention, spec.logit_shift) == ("llada2", 32, "block_causal", 0)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (CHECKPOINTS[0], {"use_sliding_window": True}, "use_sliding_window is True, expected False"),
        (CHECKPOINTS[6], {"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05, expected none: LlamaForCausalLM cannot"),
        (CHECKPOINTS[5], {"use_mrope": True}, "use_mrope is True, expected False"),
    ],
    ids=str,
)
def test_what_the_native_class_cannot_represent_is_refused_by_its_key(
    case: Published, change: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "mdlm", {**case.keys, **change}, case.weights), mask_id=MASK)


def test_an_i_dlm_is_not_taken_for_the_sdar_that_it_calls_itself(tmp_path: Path) -> None:
    case = Published("I-DLM-8B", "sdar", {**SDAR, "use_regular_causal": True}, Config(qk_norm=True), "", 0)
    with pytest.raises(CheckpointError, match=r"config\.json: use_regular_causal is true: this is an I-DLM"):
        dgraph.load(case.write(tmp_path), block_length=4)


def test_families_with_the_graphs_of_others_name_one() -> None:
    from dgraph.testing import models as tiny_models

    alike = {name: one for name, family in families().items() if (one := getattr(family, "alike", ""))}
    assert alike.keys() == {"a2d", "dream_reasoner", "illada", "stable_diffcoder"}
    assert set(alike.values()) <= families().keys() - alike.keys()
    assert not alike.keys() & {str(tiny) for tiny in tiny_models()}
    for name in alike:
        assert tiny_models(None, name)[0].model.spec.family == name
