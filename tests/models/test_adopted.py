"""A causal class of transformers trained as a diffusion model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dgraph
from tests.training.test_training import small_batch
from training.adopted import Adopted
from training.data import BLOCK
from training.objective import Noise, block_diffusion, dense_mask, next_token
from training.trainer import Trainer

CPU = torch.device("cpu")
MASK = 3
NAMES = ("Llama", "Qwen2", "Qwen3")


def build(name: str, **more: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        **more,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", NAMES)
def test_under_a_causal_mask_it_is_the_class_itself(name: str) -> None:
    model, batch = build(name).double().eval(), small_batch()
    inputs = next_token(batch)
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)
    adopted = Adopted(model)
    logits = adopted.lm_head(adopted.hidden(inputs.input_ids, inputs.positions, mask))
    for row, number in {(r, n) for r in range(2) for n in batch.docs[r].tolist() if n >= 0}:
        at = batch.docs[row] == number
        plain = model(input_ids=batch.tokens[row][at][None]).logits[0]
        torch.testing.assert_close(logits[row][at], plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_noisy_first_block_is_what_dgraph_computes(name: str) -> None:
    """A first block sees itself alone, in both directions: dgraph's forward of the adopted model."""
    model, batch = build(name).eval(), small_batch()
    inputs = block_diffusion(batch, 4, torch.Generator().manual_seed(0), Noise(mask_id=MASK))
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)
    adopted, native = Adopted(model), dgraph.adopt(model, mask_id=MASK, block_length=BLOCK, eos_ids=(1,))
    checked, length = 0, batch.tokens.shape[1]
    with torch.no_grad():
        logits = adopted.lm_head(adopted.hidden(inputs.input_ids, inputs.positions, mask))
        for row in range(2):
            for first in range(length, inputs.input_ids.shape[1], BLOCK):
                at = slice(first, first + BLOCK)
                if int(inputs.positions[row, first]) == 0 and (inputs.input_ids[row, at] == MASK).any():
                    ids, positions = inputs.input_ids[row, at][None], torch.arange(BLOCK)[None]
                    torch.testing.assert_close(logits[row, at], native.module(ids, positions)[0])
                    checked += 1
    assert checked


def test_a_few_steps_reduce_the_loss_of_tied_embeddings() -> None:
    model = Adopted(build("Llama"))
    trainer = Trainer(model, steps=12, peak=1e-2, final=0.1, dense=True, compiled=False)
    noise = Noise(mask_id=MASK, by_rate=False, complementary=True)
    batch = small_batch()
    losses = []
    for _ in range(12):
        losses.append(float(trainer.step(block_diffusion(batch, 3, torch.Generator().manual_seed(0), noise))[0]))
    assert losses[-1] < 0.8 * losses[0]
    assert model.lm_head.weight is model.model.model.embed_tokens.weight
