"""`benchmarks/eager_loop.py`: its forward is the model's, and it measures a small one."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.eager_loop import PlainLlama, measured
from dgraph.bench.arrivals import Request
from dgraph.bench.traces import read_trace
from dgraph.families import Model
from dgraph.models.shapes import random_model

TRACE = Path(__file__).parents[2] / "benchmarks" / "traces" / "text.json"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def small() -> Model:
    return random_model("llada-8b", "cpu", torch.float32, num_hidden_layers=2, vocab_size=64, mask_id=63, **SMALL)


@torch.no_grad()
def test_rows_of_a_block_over_kept_keys_have_the_models_logits() -> None:
    model = small()
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model.module(ids, torch.arange(12).expand(2, 12))
    plain = PlainLlama(model.module.model, 2, 12)
    torch.testing.assert_close(plain.logits(plain.forward(ids, 0)), expected, rtol=1e-4, atol=1e-5)
    block = plain.logits(plain.forward(ids[:, 4:8], 4))
    torch.testing.assert_close(block, expected[:, 4:8], rtol=1e-4, atol=1e-5)


def test_a_batch_is_padded_and_takes_the_steps_of_its_slowest_sequence() -> None:
    trace = read_trace(TRACE)
    requests = [Request(0.0, 5, 33), Request(0.0, 9, 20)]
    positions, blocks, seconds, steps, _, speed = measured(small(), trace, requests, 1)
    assert (positions, blocks) == (9 + 64, 2)
    assert steps == max(len(trace.histories[1]), len(trace.histories[8]))
    assert speed == 53 / seconds / 2
