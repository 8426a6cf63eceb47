"""GGUF files, written here from tiny models: tensors put back, dequantised as the package does it, and decoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError
from dgraph.families import families
from dgraph.families.weights import made
from dgraph.models.gguf_file import PARTS, tensors_of

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, WIDE, VOCAB = 256, 2, 4, 2, 64, 256, 64


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them, which rotates neighbours."""
    rows = [weight.reshape(heads, -1, weight.shape[-1])[:, [i, DIM // 2 + i]] for i in range(DIM // 2)]
    return np.concatenate(rows, 1).reshape(weight.shape)


def weights(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by their native names."""
    drawn = np.random.default_rng(seed)
    shapes = {"self_attn.q_proj": (HEADS * DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN)}
    shapes |= {"self_attn.v_proj": (KV_HEADS * DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * DIM)}
    shapes |= {"mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE)}
    found = {f"model.layers.{i}.{n}.weight": drawn.normal(0, 0.06, s) for i in range(LAYERS) for n, s in shapes.items()}
    norms = ["input_layernorm", "post_attention_layernorm"]
    vectors = {f"model.layers.{i}.{n}.weight": (HIDDEN,) for i in range(LAYERS) for n in norms}
    if kind == "qwen3":
        vectors |= {f"model.layers.{i}.self_attn.{n}_norm.weight": (DIM,) for i in range(LAYERS) for n in "qk"}
    if kind == "dream":
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        vectors |= {f"model.layers.{i}.self_attn.{n}_proj.bias": (s,) for i in range(LAYERS) for n, s in sizes.items()}
    found |= {name: drawn.normal(1, 0.1, shape) for name, shape in {**vectors, "model.norm.weight": (HIDDEN,)}.items()}
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    found |= {name: drawn.normal(0, 0.06, (VOCAB, HIDDEN)) for name in tables}
    return {name: value.astype(np.float32) for name, value in found.items()}


def file_name(native: str) -> str:
    """The name that llama.cpp gives a native parameter."""
    path, _, leaf = native.rpartition(".")
    names = {own: part for part, own in PARTS.items()}
    if path in names:
        return f"{names[path]}.{leaf}"
    _, _, block, inside = path.split(".", 3)
    return f"blk.{block}.{names[inside]}.{leaf}"


def write(path: Path, kind: str, found: dict[str, np.ndarray], quantised: Any = None, tokens: bool = False) -> Path:
    """A GGUF file of an architecture; matrices quantised, or random numbers of a type that is not written."""
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_mask_token_id(2)
    if kind in ("dream", "llada"):
        writer.add_causal_attention(False)
        writer.add_diffusion_shift_logits(kind == "dream")
    if tokens:
        words = ["<pad>", "<end>", "<mask>", *(chr(c) for c in range(ord("a"), ord("z") + 1)), "Ġ", "ab"]
        words += [f"<{i}>" for i in range(VOCAB - len(words))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(words)
        writer.add_token_types([3, 3, 3, *[1] * (VOCAB - 3)])
        writer.add_token_merges(["a b"])
    for native, value in found.items():
        part = native.split(".")[-2]
        if kind in ("llama", "llada") and part in ("q_proj", "k_proj"):
            value = in_pairs(value, HEADS if part == "q_proj" else KV_HEADS)
        if quantised is None or value.ndim == 1:
            writer.add_tensor(file_name(native), value)
        else:
            writer.add_tensor(file_name(native), numbers(value, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers(value: np.ndarray, kind: Any) -> np.ndarray:
    """A matrix as the package quantises it; of types that it only reads, random blocks with small scales."""
    try:
        return gguf.quantize(value, kind)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        drawn = np.random.default_rng(len(value)).integers(
            0, 256, (len(value), value.shape[1] // size, nbytes), np.uint8
        )
        scale = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
        for place in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind.name]:
            drawn[:, :, place : place + 2] = scale
        return drawn.reshape(len(value), -1)


OPENED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "llama": ("native", lambda model: model.module.model),
    "qwen3": ("native", lambda model: model.module.model),
    "dream": ("dream", lambda model: model.module.model),
    "llada": ("llada", lambda model: model.module.model),
}


@pytest.mark.parametrize("kind", OPENED)
def test_a_file_is_the_model_that_it_was_made_from(kind: str, tmp_path: Path) -> None:
    family, native = OPENED[kind]
    found = weights(kind)
    model = dgraph.load(write(tmp_path / "m.gguf", kind, found), block_length=8)
    assert model.spec.family == family
    state = native(model).state_dict()
    assert set(state) == set(found)
    for name, value in found.items():
        assert torch.equal(state[name], torch.from_numpy(value)), name
    spec = model.spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id, spec.max_positions) == (2, (1,), 0, 128)
    assert (spec.attention == "bidirectional") == (kind in ("dream", "llada"))
    assert spec.logit_shift == int(kind == "dream")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K", "F16", "BF16"])
def test_numbers_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    kind, found = KINDS[name], weights("qwen3")
    path = write(tmp_path / "m.gguf", "qwen3", found, kind)
    stored = tensors_of(path)
    for native, value in found.items():
        expected = gguf.dequantize(numbers(value, kind), kind) if value.ndim > 1 else value
        assert torch.equal(made(stored[native]).float(), torch.from_numpy(expected)), native
    model = dgraph.load(path, dtype="auto", block_length=8)
    assert model.spec.dtype == (torch.float16 if name == "F16" else torch.bfloat16)


def test_a_folder_with_one_file_is_decoded_with_its_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llada", weights("llada"), KINDS.Q8_0, tokens=True)
    done = dgraph.optimize(str(tmp_path), "dense", backend="eager").generate(["abc ab"], max_new_tokens=8)
    assert done.texts is not None
    assert len(done.token_ids[0]) <= 8
    tokenizer: Any = dgraph.load(tmp_path).tokenizer
    assert tokenizer.decode(tokenizer.encode_text("abc")) == "abc"
    write(tmp_path / "n.gguf", "llada", weights("llada"))
    with pytest.raises(CheckpointError, match=r"has several GGUF files: m\.gguf, n\.gguf\. Give the path of one"):
        dgraph.load(tmp_path)


def test_experts_are_parted(tmp_path: Path) -> None:
    """The stacks of llama.cpp are the experts of the checkpoint, in their order."""
    model = families()["llada_moe"].random()
    state: dict[str, Tensor] = model.module.state_dict()
    down = next(value for name, value in state.items() if name.endswith("experts.down_proj"))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llada-moe")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, down.shape[1]),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 32),
        (writer.add_head_count, 4),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_tensor("blk.0.ffn_down_exps.weight", down.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = tensors_of(tmp_path / "m.gguf")
    for e, expert in enumerate(down):
        assert torch.equal(made(stored[f"model.layers.0.mlp.experts.{e}.down_proj.weight"]), expert)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has the architecture 'gemma4'; dgraph reads GGUF files of llama"):
        dgraph.load(write(tmp_path / "a.gguf", "gemma4", {}))
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"b\.gguf is damaged or not a GGUF file"):
        dgraph.load(tmp_path / "b.gguf")
    lacking = {name: value for name, value in weights("llama").items() if "up_proj" not in name}
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        dgraph.load(write(tmp_path / "c.gguf", "llama", lacking), block_length=8)


@pytest.mark.parametrize("inside", [True, False], ids=["with the file", "beside the file"])
def test_a_program_of_a_file_is_saved_and_opened(inside: bool, tmp_path: Path) -> None:
    file, store = write(tmp_path / "m.gguf", "qwen3", weights("qwen3"), tokens=True), tmp_path / "store"
    made = dgraph.optimize(file, "dense", backend="eager", artifacts=store, facts={"block_length": 8})
    made.save(tmp_path / "program", weights=inside)
    opened = dgraph.open(tmp_path / "program", trust=True, artifacts=store)
    wanted = made.generate(input_ids=[[3, 4, 5]], max_new_tokens=8).token_ids
    assert opened.generate(input_ids=[[3, 4, 5]], max_new_tokens=8).token_ids == wanted
