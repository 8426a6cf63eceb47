"""Small random checkpoints in SDAR's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from tests.oracle.models import random_weights, tiny_config
from tests.tiny import BLOCK, MASK, VOCAB

LAYERS = 2
WINDOW = 256


def write_checkpoint(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A checkpoint of two layers; `changes` to its config (None leaves a key out), other tensors if given."""
    folder.mkdir()
    sizes = tiny_config(layers=LAYERS)
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "vocab_size": VOCAB,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.rope_theta,
        "max_position_embeddings": WINDOW,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": BLOCK,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "mask_token_id": MASK,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(tensors or weights(), folder / "model.safetensors")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def weights() -> dict[str, Tensor]:
    """The tensors of a checkpoint."""
    return random_weights(tiny_config(layers=LAYERS), 0)
