"""A small random autoregressive checkpoint, with the vocabulary of the small diffusion checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.cli.folders import write_checkpoint
from tests.tiny import VOCAB


def write_judge(folder: Path, window: int = 256) -> Path:
    import transformers

    write_checkpoint(folder)  # for its tokenizer; the rest is written over
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder
