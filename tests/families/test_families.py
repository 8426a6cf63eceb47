"""Finding, loading and adopting models; damaged checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dgraph
from dgraph.errors import CaptureError, CheckpointError, InputError, UnknownName
from dgraph.families import family as families
from dgraph.families import resolve
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.tiny import MASK, VOCAB, draw, tiny_spec

CONFIG = tiny_config(layers=2)
WEIGHTS = random_weights(CONFIG, 1)
SDAR: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "vocab_size": VOCAB,
    "hidden_size": CONFIG.hidden,
    "intermediate_size": CONFIG.intermediate,
    "num_hidden_layers": CONFIG.layers,
    "num_attention_heads": CONFIG.heads,
    "num_key_value_heads": CONFIG.kv_heads,
    "head_dim": CONFIG.head_dim,
    "rms_norm_eps": CONFIG.eps,
    "rope_theta": CONFIG.rope_theta,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "mask_token_id": MASK,
    "eos_token_id": [5, 6],
    "pad_token_id": 0,
    "block_size": 16,
    "auto_map": {"AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
}


def write(folder: Path, weights: dict[str, Tensor] | None = None, shards: int = 2, **config: Any) -> Path:
    """A checkpoint folder in SDAR's layout; a config value of None leaves its key out."""
    folder.mkdir(exist_ok=True)
    values = {k: v for k, v in {**SDAR, **config}.items() if v is not None or k == "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(values))
    names = sorted(weights if weights is not None else WEIGHTS)
    for i in range(shards):
        part = {n: (weights or WEIGHTS)[n].contiguous() for n in names[i::shards]}
        save_file(part, folder / f"model-{i + 1:05}-of-{shards:05}.safetensors")
    return folder


def logits_of(model: dgraph.Model) -> Tensor:
    ids = torch.tensor([draw(9, 4), draw(9, 5)])
    with torch.no_grad():
        return model.module(ids, torch.arange(9).expand(2, 9))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return logits_of(dgraph.adopt(to_transformers(CONFIG, WEIGHTS), mask_id=MASK))


# -- loading -----------------------------------------------------------------------------------------------------


def test_a_folder_in_sdars_layout_is_its_qwen3_weights(tmp_path: Path, expected: Tensor) -> None:
    model = dgraph.load(write(tmp_path / "sdar"))
    assert torch.equal(logits_of(model), expected)
    assert expected.std() > 0.1
    spec = model.spec
    assert (spec.family, spec.mask_id, spec.eos_ids, spec.pad_id, spec.block_length) == ("sdar", MASK, (5, 6), 0, 16)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.hidden) == (2, 4, 2, 16, 64)
    assert (spec.attention, spec.logit_shift, spec.max_positions) == ("block_causal", 0, 128)
    assert (spec.dtype, model.tokenizer, model.name) == (torch.float32, None, "sdar")
    assert not any(m.training for m in model.module.children())


def test_the_rotary_base_is_read_from_the_old_key(tmp_path: Path, expected: Tensor) -> None:
    model = dgraph.load(write(tmp_path / "sdar", rope_theta=500.0))
    assert not torch.allclose(logits_of(model), expected, atol=1e-3)
    inverse = model.module.model.model.rotary_emb.inv_freq  # type: ignore[union-attr]
    assert torch.allclose(inverse, 500.0 ** (-torch.arange(0, 16, 2) / 16))


def test_tied_embeddings_need_no_head(tmp_path: Path) -> None:
    tied = {n: w for n, w in WEIGHTS.items() if n != "lm_head.weight"}
    model = dgraph.load(write(tmp_path / "tied", tied, tie_word_embeddings=True))
    assert torch.equal(logits_of(model), logits_of(dgraph.adopt(to_transformers(CONFIG, tied), mask_id=MASK)))
    names = dict(model.module.named_parameters(remove_duplicate=False))
    assert names["model.lm_head.weight"] is names["model.model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("stored", "asked", "got"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
)
def test_weights_are_of_the_dtype_asked_for(
    tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None, got: torch.dtype
) -> None:
    folder = write(tmp_path / "m", {n: w.to(stored) for n, w in WEIGHTS.items()}, shards=1)
    model = dgraph.load(folder, dtype=asked)
    assert {p.dtype for p in model.module.parameters()} == {got}
    assert model.spec.dtype == got


def test_the_block_length_may_be_in_the_checkpoints_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = write(tmp_path / "SDAR-x-b64", block_size=None)
    assert dgraph.load(named).spec.block_length == 64
    monkeypatch.chdir(named)
    here = dgraph.load(".")
    assert (here.spec.block_length, here.name) == (64, "SDAR-x-b64")
    assert dgraph.load(write(tmp_path / "SDAR-y-b64")).spec.block_length == 16
    hub = tmp_path / "run-b12" / "models--JetLM--SDAR-8B-Chat-b32" / "snapshots" / "0a1b2c"
    hub.parent.mkdir(parents=True)
    assert dgraph.load(write(hub, block_size=None)).spec.block_length == 32
    whence = {"block_size": None, "_name_or_path": "JetLM/SDAR-8B-Chat-b16"}
    assert dgraph.load(write(tmp_path / "copy", **whence)).spec.block_length == 16
    assert dgraph.adopt(SDARForCausalLM(WEIGHTS, **whence)).spec.block_length == 16


@pytest.mark.parametrize("name", ["SDAR-8B-Chat", "plain", "other-b32"])
def test_a_block_length_that_nothing_says_is_asked_for(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / name, block_size=None)
    with pytest.raises(InputError, match=r"sdar: the block length is said neither by .*block_length="):
        dgraph.load(folder)
    assert dgraph.load(folder, block_length=4).spec.block_length == 4


def test_ends_are_those_of_all_files(tmp_path: Path) -> None:
    """SDAR's config.json knows the end of a text alone."""
    folder = write(tmp_path / "sdar", eos_token_id=6)
    assert dgraph.load(folder).spec.eos_ids == (6,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "pad_token_id": null}')
    spec = dgraph.load(folder).spec
    assert (spec.eos_ids, spec.pad_id) == ((5, 6), 0)
    native = write(tmp_path / "native", eos_token_id=6, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    (native / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert dgraph.load(native).spec.eos_ids == (7, 6)
    remote = SDARForCausalLM(WEIGHTS, eos_token_id=6)
    remote.generation_config = _Config(eos_token_id=[5, 6])  # type: ignore[assignment]
    assert dgraph.adopt(remote).spec.eos_ids == (5, 6)
    own = to_transformers(CONFIG, WEIGHTS)
    own.generation_config.eos_token_id = 8
    assert dgraph.adopt(own, mask_id=MASK, block_length=8).spec.eos_ids == (8,)
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read as JSON"):
        dgraph.load(folder)


def test_the_tokenizer_may_name_an_end(tmp_path: Path) -> None:
    """Of the turn of a chat, beside the end of a text; ids that no row can predict are none."""
    from tokenizers import Tokenizer, models

    folder = write(tmp_path / "m", eos_token_id=[6, VOCAB, -1])
    words = {f"w{i}": i for i in range(VOCAB)} | {"<|end|>": 4, "w4": VOCAB + 1}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [5, {VOCAB + 7}]}}')
    assert dgraph.load(folder).spec.eos_ids == (5, 6, 4)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w4"}')
    assert dgraph.load(folder).spec.eos_ids == (5, 6)


def test_settings_of_a_generation_are_no_facts_of_a_checkpoint(tmp_path: Path) -> None:
    """Official code takes ends of a turn from generation_config.json, and no setting of how tokens are drawn."""
    folder = write(tmp_path / "sdar", eos_token_id=6)
    spec = dgraph.load(folder).spec
    drawn = '"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "steps": 512'
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": 6, {drawn}}}')
    assert dgraph.load(folder).spec == spec


def test_the_tokenizer_may_name_the_mask(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    folder = write(tmp_path / "m", mask_token_id=None)
    words = {f"w{i}": i for i in range(VOCAB - 1)} | {"<|MASK|>": VOCAB - 1}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<|MASK|>"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dgraph.load(folder).spec.mask_id == VOCAB - 1


def test_what_is_assumed_is_said(tmp_path: Path) -> None:
    model = to_transformers(CONFIG, WEIGHTS)
    with pytest.warns(UserWarning, match=r"assuming block_length=32 .*\(--fact block_length= on the command"):
        dgraph.adopt(model, mask_id=MASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dgraph.adopt(model, mask_id=MASK, block_length=8)
        dgraph.adopt(model, mask_id=MASK, attention="bidirectional")  # there the length of a block is a setting
        dgraph.load(write(tmp_path / "whole"))


def test_a_sliding_window_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    with pytest.raises(CheckpointError, match=r"config\.json asks for a sliding window in 1 layers"):
        dgraph.load(write(tmp_path / "sdar", **window))
    assert dgraph.load(write(tmp_path / "unused", **{**window, "max_window_layers": 2})).spec.layers == 2


def test_a_native_folder_needs_a_mask_token(tmp_path: Path, expected: Tensor) -> None:
    native = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model = dgraph.load(write(tmp_path / "native", **native))
    assert model.spec.family == "native"
    assert torch.equal(logits_of(model), expected)
    with pytest.raises(InputError, match=r"needs a mask token; got mask_id=None .*97.*mask_token_id"):
        dgraph.load(write(tmp_path / "causal", mask_token_id=None, **native))


# -- names -------------------------------------------------------------------------------------------------------


def test_families_come_by_entry_point() -> None:
    assert {"dream", "llada", "llada2", "llada_moe", "native", "sdar", "sdar_moe"} <= set(families.families())
    assert "tiny_sdar" in families.embedded()
    assert all(f.summary for f in families.families().values())
    assert all(e.summary and e.folder.is_absolute() for e in families.embedded().values())


def test_an_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(UnknownName, match=r"unknown model 'tiny_sdr'\. Did you mean 'tiny_sdar'"):
        dgraph.load("tiny_sdr")


def test_an_embedded_model_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = families.Embedded("small", write(tmp_path / "folder"), "a small one")
    known = {"small": entry, **families.families()}
    monkeypatch.setattr(families, "_entries", lambda: known)
    assert dgraph.load("small").spec.family == "sdar"


def test_a_model_is_what_it_is() -> None:
    model = dgraph.Model("m", nn.Identity(), tiny_spec())
    assert resolve(model) is model


@pytest.mark.parametrize("what", [nn.Linear(2, 2), object(), 3, None])
def test_an_object_of_no_family(what: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"no family adopts .*known: .*dream, .*llada,.* native, .*sdar.*dgraph\.Model"
    ):
        dgraph.adopt(what)


def test_facts_are_fields_of_the_spec(tmp_path: Path) -> None:
    model = to_transformers(CONFIG, WEIGHTS)
    spec = dgraph.adopt(model, mask_id=3, block_length=4, eos_ids=(1, 2), attention="bidirectional").spec
    assert (spec.mask_id, spec.block_length, spec.eos_ids, spec.attention) == (3, 4, (1, 2), "bidirectional")
    with pytest.raises(UnknownName, match=r"unknown fact 'mask'\. Did you mean 'mask_id'"):
        dgraph.adopt(model, mask=3)
    with pytest.raises(InputError, match=r"needs a mask token"):
        dgraph.adopt(model)
    with pytest.raises(UnknownName, match=r"unknown fact 'hidden'"):
        dgraph.adopt(model, hidden=3)
    assert resolve(dgraph.Model("m", nn.Identity(), tiny_spec()), mask_id=3).spec.mask_id == 3
    folder = write(tmp_path / "sdar")
    given = dgraph.load(folder, mask_id=3, block_length=4, layer_importance=(0.5, 0.25)).spec
    assert (given.mask_id, given.block_length, given.layer_importance) == (3, 4, (0.5, 0.25))
    assert dgraph.capture(str(folder), mask_id=3).spec.mask_id == 3
    causal = write(tmp_path / "causal", architectures=["Qwen3ForCausalLM"], model_type="qwen3", mask_token_id=None)
    made = dgraph.optimize(str(causal), "dense", backend="eager", facts={"mask_id": MASK})
    assert made.spec.mask_id == MASK


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"mask_id": VOCAB}, r"needs a mask token; got mask_id=97 with a vocabulary of 97"),
        ({"mask_id": -1}, r"needs a mask token; got mask_id=-1"),
        ({"attention": "causal"}, r"attention must be one of \('block_causal', 'bidirectional'\), got 'causal'"),
        ({"kv_heads": 3}, r"4 heads are not a multiple of 3 KV heads"),
        ({"block_length": 0}, r"block_length must be at least 1, got 0"),
        ({"block_length": "8"}, r"block_length must be at least 1, got '8'"),
        ({"block_length": True}, r"block_length must be at least 1, got True"),
        ({"eos_ids": (1.5,)}, r"eos_ids must be token ids, got \(1.5,\)"),
        ({"dtype": torch.int8}, r"floating dtype, got torch\.int8"),
    ],
)
def test_a_spec_that_cannot_be(facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"hand: .*{message}"):
        tiny_spec(**facts)


def test_a_spec_as_json() -> None:
    plain = tiny_spec(eos_ids=(1, 2), dtype=torch.bfloat16).to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["eos_ids"], plain["dtype"], plain["layers"]) == ([1, 2], "bfloat16", 2)


# -- damaged folders ---------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda tensors: tensors.pop(name, None))


def with_extra(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"model.layers.9.x": torch.ones(1)}), "00001")


def with_integers(folder: Path) -> None:
    name = "model.norm.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: tensors[name].int()}) if name in tensors else None)


def with_a_wrong_shape(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(folder, lambda t: t.update({name: t[name][:7].clone()}) if name in t else None)


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any], only: str = "") -> None:
    for shard in sorted(folder.glob(f"model-{only}*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)


def _write_text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def cut_short(folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def remove_all(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (without("model.norm.weight"), r"missing: model\.norm\.weight\. Its config\.json and its shards"),
    (remove_shard, r"has 1 of the 2 shards model-\*-of-00002\.safetensors, and no index of them; fetch the rest"),
    (with_extra, r"unexpected: model\.layers\.9\.x\."),
    (with_a_wrong_shape, r"wrong shape: model\.layers\.1\.mlp\.up_proj\.weight is \(7, 64\), expected \(128, 64\)"),
    (with_integers, r"not floating-point: model\.norm\.weight is torch\.int32"),
    (cut_short, r"model-00002-of-00002\.safetensors is damaged or not a safetensors file"),
    (_write_text("model-00001-of-00002.safetensors", "no"), r"model-00001.*damaged"),
    (remove_all, r"has no \*\.safetensors file"),
    (lambda folder: (folder / "config.json").unlink(), r"has no config\.json; a checkpoint folder holds"),
    (_write_text("config.json", "{"), r"config\.json cannot be read as JSON"),
    (_write_text("config.json", "[]"), r"config\.json holds a list, expected an object"),
    (_write_text("config.json", "{}"), r"no family loads .*names no architectures.*one of .*DreamModel.*LLaDAModelLM"),
    (
        _write_text("config.json", json.dumps({**SDAR, "hidden_size": "wide"})),
        r"config\.json does not describe a Qwen3ForCausalLM: hidden_size is 'wide', expected a whole number",
    ),
    (
        _write_text("config.json", json.dumps({**SDAR, "num_hidden_layers": 3})),
        r"missing: model\.layers\.2\..* and 8 more",
    ),
    (_write_text("tokenizer.json", "{}"), r"the tokenizer of .* cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[str(i) for i in range(len(DAMAGES))])
def test_a_damaged_folder_says_what_is_wrong(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder = write(tmp_path / "damaged")
    damage(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError, match=message) as caught:
        dgraph.load(folder)
    assert "damaged" in str(caught.value), "the message names the folder"
    assert sorted(folder.iterdir()) == before


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint folder\. Give a folder with config\.json"):
            dgraph.load(path)


def test_a_dtype_that_weights_cannot_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"as torch\.int8; weights must be float32, bfloat16 or float16"):
        dgraph.load(write(tmp_path / "m"), dtype=torch.int8)


# -- adopting ----------------------------------------------------------------------------------------------------


class _Config:
    def __init__(self, **changes: Any):
        self.values = {**SDAR, **changes}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


class SDARForCausalLM(nn.Module):
    """What remote code would give: other classes around tensors of the same names."""

    def __init__(self, weights: dict[str, Tensor], **config: Any):
        super().__init__()
        self.config = _Config(**config)
        for name, tensor in weights.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(tensor.clone()))


def test_a_remote_code_model_is_adopted_without_a_copy(expected: Tensor) -> None:
    remote = SDARForCausalLM(WEIGHTS).train()
    remote.get_parameter("model.norm.weight").requires_grad_(False)
    frozen = {n: p.requires_grad for n, p in remote.named_parameters()}
    adopted = dgraph.adopt(remote)
    assert adopted.spec.family == "sdar"
    assert (adopted.spec.mask_id, adopted.spec.block_length) == (MASK, 16)
    assert torch.equal(logits_of(adopted), expected)
    mine = dict(adopted.module.named_parameters())
    for name, parameter in remote.named_parameters():
        assert mine[f"model.{name}"].data_ptr() == parameter.data_ptr(), name
    assert {n: p.requires_grad for n, p in remote.named_parameters()} == frozen
    assert remote.training
    assert dgraph.adopt(remote, mask_id=7, block_length=8).spec.block_length == 8


def test_a_remote_code_model_that_does_not_fit() -> None:
    odd = {n: w for n, w in WEIGHTS.items() if "k_norm" not in n}
    with pytest.raises(CheckpointError, match=r"does not fit Qwen3: missing: model\.layers\.0\.self_attn\.k_norm"):
        dgraph.adopt(SDARForCausalLM(odd))
    with pytest.raises(CheckpointError, match=r"does not fit Qwen3: wrong shape: model\.embed_tokens\.weight"):
        dgraph.adopt(SDARForCausalLM(WEIGHTS, vocab_size=VOCAB + 1))


def test_the_published_checkpoints_name_no_mask() -> None:
    big = SDARForCausalLM({**WEIGHTS, "model.embed_tokens.weight": torch.zeros(1, 64)}, mask_token_id=None)
    with pytest.raises(CheckpointError, match=r"wrong shape: model\.embed_tokens"):
        dgraph.adopt(big)
    with pytest.raises(InputError, match=r"mask_id=151669 with a vocabulary of 97"):
        dgraph.adopt(SDARForCausalLM(WEIGHTS, mask_token_id=None))


def test_a_native_model_is_adopted_as_it_is() -> None:
    model = to_transformers(CONFIG, WEIGHTS)
    adopted = dgraph.adopt(model, mask_id=MASK)
    assert adopted.module.model is model
    assert adopted.prefix == "model."
    assert adopted.spec.eos_ids == ()
