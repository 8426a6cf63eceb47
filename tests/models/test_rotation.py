"""Kinds of rotations (RoPE): those that are computed equal transformers' beyond the original window; others are
refused by their key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import CheckpointError
from tests.amounts import every_value
from tests.models.test_dream import CONFIG as DREAM
from tests.models.test_dream import WEIGHTS as DREAM_WEIGHTS
from tests.remote import write
from tests.tiny import MASK, VOCAB, draw, interpret

ORIGINAL = 16
THETA = {"rope_theta": 1000.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.5},
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
BY_LENGTH = {
    "dynamic": {"factor": 2.0},
    "longrope": {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


@every_value(("name", ["Llama", "Qwen2", "Qwen3"]), ("kind", KINDS))
def test_kinds_that_are_computed(name: str, kind: str, tmp_path: Path) -> None:
    """Far beyond the original window, by the module and by the captured graph."""
    import transformers

    rope = {"rope_type": kind, **THETA, **KINDS[kind]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, rope_parameters=rope, initializer_range=0.3)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    theirs.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "mask_token_id": MASK, "block_size": 8}))
    ids, positions = torch.tensor([draw(24, 1)]), torch.arange(150, 174)[None]
    positions[:, :8] = torch.arange(8)
    everything = torch.zeros(1, 1, 24, 24)  # added to the scores: every row sees every row
    with torch.no_grad():
        want = theirs(input_ids=ids, position_ids=positions, attention_mask=everything, use_cache=False).logits
        near = theirs(input_ids=ids, attention_mask=everything, use_cache=False).logits
        model = dgraph.load(tmp_path)
        torch.testing.assert_close(model.module(ids, positions), want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(near, want, atol=1e-2)  # positions matter
    if name == "Llama":  # the others' rotation is the same
        captured = interpret(dgraph.capture(model), {"input_ids": ids, "positions": positions})["logits"]
        torch.testing.assert_close(captured, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", [*BY_LENGTH, "su", "mrope", "other", 3])
def test_other_kinds_are_refused_by_their_key(kind: Any, name: str, key: str, tmp_path: Path) -> None:
    rope = {name: kind, **THETA, **BY_LENGTH.get(kind, {"factor": 2.0})}
    folder = write(tmp_path / "m", {**DREAM, "rope_theta": None, key: rope}, DREAM_WEIGHTS)
    why = "depend on the length of a sequence" if kind in BY_LENGTH else "computes no other rotation"
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}\.{name} is {kind!r}, expected one of .*{why}"):
        dgraph.load(folder)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("linear", r"rope_scaling is 'linear', expected an object of keys"),
        ({"rope_type": "linear"}, r"does not describe a Qwen2ForCausalLM: .*factor"),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, r"partial_rotary_factor .* 4 of 8 dim"),
        ({"full_attention": {"rope_type": "dynamic"}}, r"rope_scaling\.full_attention\.rope_type is 'dynamic'"),
    ],
)
def test_what_else_is_refused(rope: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(write(tmp_path / "m", {**DREAM, "rope_scaling": rope}, DREAM_WEIGHTS))


def test_objects_are_refused_as_folders_are() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "dynamic", **THETA, "factor": 2.0}
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, rope_parameters=rope))
    with pytest.raises(CheckpointError, match=r"Qwen3ForCausalLM's config: rope_parameters\.rope_type is 'dynamic'"):
        dgraph.adopt(model, mask_id=MASK, block_length=8)
