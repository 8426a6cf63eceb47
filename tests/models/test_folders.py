"""Checkpoint folders as people have them: what transformers loads with nothing missing is loaded, the same weights."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.models.files import INDEX
from tests.oracle.models import random_weights, tiny_config
from tests.tiny import MASK, VOCAB

SIZES = tiny_config(layers=2)
WEIGHTS = random_weights(SIZES, 1)
OTHER = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.intermediate,
    "num_hidden_layers": SIZES.layers,
    "num_attention_heads": SIZES.heads,
    "num_key_value_heads": SIZES.kv_heads,
    "head_dim": SIZES.head_dim,
    "rms_norm_eps": SIZES.eps,
    "rope_parameters": {"rope_type": "default", "rope_theta": SIZES.rope_theta},
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": 5,
    "pad_token_id": 0,
    "block_size": 8,
}
TIED = {"tie_word_embeddings": True}
Weights = dict[str, Tensor]


def save(path: Path, weights: Weights = WEIGHTS) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, path, {"format": "pt"})


def shards(folder: Path, weights: Weights = WEIGHTS, index: str = INDEX, name: str = "model-{}-of-00002") -> None:
    """Two shards and their index."""
    places = {}
    for i, part in enumerate(sorted(weights)[k::2] for k in (0, 1)):
        file = f"{name.format(f'{i + 1:05}')}.safetensors"
        save(folder / file, {key: weights[key] for key in part})
        places |= dict.fromkeys(part, file)
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def pickled(folder: Path, weights: Weights = WEIGHTS, **how: Any) -> None:
    torch.save(weights, folder / "pytorch_model.bin", **how)


def pickled_shards(folder: Path) -> None:
    places = {}
    for i, part in enumerate(sorted(WEIGHTS)[k::2] for k in (0, 1)):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        torch.save({key: WEIGHTS[key] for key in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def beside(*others: str, weights: Weights = OTHER) -> Callable[[Path], None]:
    """model.safetensors, and other files of safetensors."""

    def write(folder: Path) -> None:
        for name in others:
            (folder / name).parent.mkdir(exist_ok=True)
            save(folder / name, weights)
        save(folder / "model.safetensors")

    return write


def whole(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    return lambda folder: save(folder / "model.safetensors", change(dict(WEIGHTS)))


def a_stale_index(folder: Path) -> None:
    beside()(folder)
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}')


def a_stale_whole_file(folder: Path) -> None:
    """transformers takes the whole file, whatever the index has."""
    shards(folder, OTHER)
    beside()(folder)


def in_a_cache(folder: Path) -> None:
    """Files of a hub's cache are links to blobs."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    shards(folder)
    for i, file in enumerate(sorted(p for p in folder.iterdir() if p.name != "config.json")):
        file.rename(blobs / f"{i}")
        file.symlink_to(Path("..") / "blobs" / f"{i}")


def of_training(folder: Path) -> None:
    beside()(folder)
    for name in ("optimizer.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": 1}, folder / name)
    save(folder / "optimizer.safetensors", {"state": torch.ones(2)})
    (folder / "global_step7").mkdir()
    save(folder / "global_step7" / "model.safetensors", OTHER)


def of_another_name(folder: Path) -> None:
    save(folder / "weights.safetensors")
    beside()(folder)


def head(change: Callable[[Weights], Any]) -> Callable[[Path], None]:
    def edit(weights: Weights) -> Weights:
        change(weights)
        return weights

    return whole(edit)


def without_prefix(weights: Weights) -> Weights:
    return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def with_prefix(weights: Weights) -> Weights:
    return {f"model.{name}": tensor for name, tensor in weights.items()}


def old_buffers(weights: Weights) -> Weights:
    layers = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(SIZES.layers)]
    return weights | dict.fromkeys([*layers, "model.rotary_emb.inv_freq"], torch.ones(8))


# How a folder's weights are stored, and what its config says besides.
LOADED: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "one file": (beside(), {}),
    "shards": (shards, {}),
    "other weights beside": (beside("consolidated.safetensors", "model.fp16.safetensors"), {}),
    "an adapter beside": (beside("adapter_model.safetensors", weights={"q.lora_A.weight": torch.ones(2, 2)}), {}),
    "a folder below": (beside("original/consolidated.00.safetensors", "original/model.safetensors"), {}),
    "another file beside": (of_another_name, {}),
    "a stale index": (a_stale_index, {}),
    "a stale whole file": (a_stale_whole_file, {}),
    "a cache": (in_a_cache, {}),
    "training": (of_training, {}),
    "a pickle": (pickled, {}),
    "an old pickle": (lambda folder: pickled(folder, _use_new_zipfile_serialization=False), {}),
    "pickled shards": (pickled_shards, {}),
    "a file that config.json names": (beside("other.safetensors"), {"transformers_weights": "other.safetensors"}),
    "old buffers": (whole(old_buffers), {}),
    "no prefix": (whole(without_prefix), {}),
    "a prefix too many": (whole(with_prefix), {}),
    "tied, both": (head(lambda w: w.update({HEAD: w[EMBED]})), TIED),
    "tied, the embedding": (head(lambda w: w.pop(HEAD)), TIED),
    "tied, the head": (head(lambda w: w.pop(EMBED)), TIED),
    "tied, no prefix": (whole(lambda w: without_prefix({k: v for k, v in w.items() if k != HEAD})), TIED),
    "tied in a pickle": (lambda folder: pickled(folder, WEIGHTS | {HEAD: WEIGHTS[EMBED]}), TIED),
    "not tied, whatever config.json says": (beside(), TIED),
}


@pytest.mark.parametrize("name", LOADED)
def test_what_transformers_loads_is_loaded(name: str, tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    store, config = LOADED[name]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    store(folder)
    loaded: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    theirs, found = loaded
    assert not found["missing_keys"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = dgraph.load(folder).module.model
    wanted = theirs.state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, wanted[key]), key
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (
        theirs.lm_head.weight is theirs.model.embed_tokens.weight
    )
    apart = [str(w.message) for w in caught if "tie_word_embeddings says that lm_head.weight is" in str(w.message)]
    assert len(apart) == (name == "not tied, whatever config.json says")


def test_weights_that_are_not_tied_are_captured_apart(tmp_path: Path) -> None:
    """The artifact cache tells a head of its own from one that is the embedding, whatever config.json says of both."""
    from dgraph.models.native import Forward

    said = []
    for name in ("tied, both", "not tied, whatever config.json says"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **TIED}))
        LOADED[name][0](tmp_path / name)
        module = dgraph.load(tmp_path / name).module
        assert isinstance(module, Forward)
        said.append(module.identity)
    assert said[0] != said[1]


# What transformers does not look for by itself, and is the only thing that can be meant.
ALONE: dict[str, Callable[[Path], None]] = {
    "a variant": lambda folder: save(folder / "model.fp16.safetensors"),
    "shards of a variant": lambda folder: shards(
        folder, index="model.safetensors.index.fp16.json", name="model.fp16-{}-of-00002"
    ),
    "shards without an index": lambda folder: (shards(folder), (folder / INDEX).unlink())[0],
    "shards beside another file": lambda folder: (
        shards(folder),
        (folder / INDEX).unlink(),
        save(folder / "consolidated.safetensors", OTHER),
    )[0],
    "a name of its own": lambda folder: save(folder / "weights.safetensors"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_else_can_be_meant(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    ALONE[name](tmp_path)
    state = dgraph.load(tmp_path).module.state_dict()
    assert all(torch.equal(state[f"model.{key}"], tensor) for key, tensor in WEIGHTS.items())


class Code:
    """What runs code where it is read."""

    def __reduce__(self) -> Any:
        return (print, ("this must not be printed",))


def links_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("../blobs/1")


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")


def lacking(folder: Path) -> None:
    shards(folder)
    (folder / INDEX).unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def twice(folder: Path) -> None:
    shards(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    save(folder / "model-00001-of-00002.safetensors", OTHER)


REFUSED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "too many": (
        whole(lambda w: w | {"model.layers.0.self_attn.sinks": torch.ones(4), "model.rotary_emb.inv_freq": w[EMBED]}),
        {},
        r"m: unexpected: model\.layers\.0\.self_attn\.sinks\. Its config\.json and model\.safetensors do not belong",
    ),
    "both of the tied": (
        whole(lambda w: {k: v for k, v in w.items() if k not in (HEAD, EMBED)}),
        TIED,
        r"missing: model\.embed_tokens\.weight\.",
    ),
    "a head that is not tied": (head(lambda w: w.pop(HEAD)), {}, r"missing: lm_head\.weight\."),
    "an embedding that is not tied": (head(lambda w: w.pop(EMBED)), {}, r"missing: model\.embed_tokens\.weight\."),
    "a whole file that is older": (
        lambda folder: (shards(folder), save(folder / "model.safetensors", {EMBED: WEIGHTS[EMBED]})),
        {},
        r"missing: .* config\.json and model\.safetensors do not belong together",
    ),
    "a name that config.json has": (
        beside(),
        {"transformers_weights": "a.safetensors"},
        r"lacks a\.safetensors, which",
    ),
    "variants": (
        lambda folder: [save(folder / f"model.{kind}.safetensors") for kind in ("fp16", "bf16")],
        {},
        r"has no model\.safetensors and no .*several others: model\.bf16\.safetensors, model\.fp16\.safetensors\. Give",
    ),
    "a link": (links_to_nothing, {}, r"model\.safetensors is a link to \.\./blobs/1, which is gone"),
    "a pointer": (pointer, {}, r"model\.safetensors is damaged.* pointer of Git LFS; run `git lfs pull`"),
    "some of the shards": (lacking, {}, r"has 1 of the 2 shards model-\*-of-00002\.safetensors, and no index"),
    "shards that differ": (twice, {}, r"00002-of-00002\.safetensors holds \S+ and \d+ more .* with other numbers"),
    "nothing": (lambda folder: (folder / "notes.txt").touch(), {}, r"no \*\.safetensors .* config\.json, notes\.txt\."),
    "an empty file": (lambda folder: (folder / "model.safetensors").touch(), {}, r"model\.safetensors is damaged"),
    "no tensor": (lambda folder: save(folder / "model.safetensors", {}), {}, r"missing: \S+, \S+, \S+ and \d+ more"),
    "code": (
        lambda folder: pickled(folder, {EMBED: Code()}),  # type: ignore[dict-item]
        {},
        r"pytorch_model\.bin is damaged, or holds what is no tensor, whose code dgraph does not run",
    ),
    "more than tensors": (
        lambda folder: pickled(folder, {"model": WEIGHTS, "step": 3}),  # type: ignore[dict-item]
        {},
        r"pytorch_model\.bin holds more than tensors by name\. Save these by safetensors",
    ),
    "a damaged pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04"), {}, r"is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, config, message = REFUSED[name]
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    store(folder)
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(folder)
    assert capsys.readouterr().out == ""
