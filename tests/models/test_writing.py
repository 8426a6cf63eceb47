"""Rows continued by a loop of our own: as `generate` continues them, whatever lies beside them, and drawn by a seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dgraph.errors import InputError
from tests.models.test_convert import causal_folder
from training import sampling
from training.conversion import Base, load_base
from training.sampling import Writer, draw

BEGAN = [[3, 9, 8, 7, 21], [3], [3, 9, 40], [5, 6], [3, 9, 8, 100, 7, 30, 31, 32, 33]]
COLD = 1e-6
FAMILIES = {
    "Llama": {"tie_word_embeddings": True, "initializer_range": 0.2},
    "Qwen2": {"tie_word_embeddings": False, "initializer_range": 0.2},
    "Qwen3": {"tie_word_embeddings": False, "initializer_range": 0.2, "head_dim": 16},
}


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Random, biases and norms too."""
    folder = causal_folder(tmp_path_factory.mktemp("base"), request.param, **FAMILIES[request.param])
    base = load_base(str(folder))
    randomize(base)
    return base


def randomize(base: Base) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, value in base.model.named_parameters():
        if value.dim() == 1:
            drawn = torch.randn(value.shape, generator=generator) / 4
            value.data.copy_(drawn + (0 if name.endswith("bias") else 1))


def generated(base: Base, most: int, stop: int) -> list[list[int]]:
    """What transformers makes of the rows, each by itself, greedily: `stop` from its first one on."""
    rows = []
    for row in BEGAN:
        ids = torch.tensor([row], device=base.model.device)
        made = base.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=stop,
        )
        new = made[0, len(row) :].tolist()
        rows.append(new + [stop] * (most - len(new)))
    return rows


def written(writer: Writer, most: int, stop: int, temperature: float = COLD, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator(writer.device).manual_seed(seed)
    return writer.write(BEGAN, stop, most, temperature, generator)


@pytest.mark.parametrize("multiple", [1, 8])
def test_the_likeliest_tokens_are_those_of_transformers(
    base: Base, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding to the left and rows that fill up the batch change nothing, nor do forwards of two rows of prompts and
    steps that read ever more positions.
    """
    monkeypatch.setattr(sampling, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(sampling, "KEYS_OF_A_GRAPH", 16)
    writer = Writer(base, multiple=multiple)
    expected = generated(base, 40, 2047)
    assert written(writer, 40, 2047) == expected
    assert len({tuple(row) for row in expected}) == len(BEGAN)
    stop = expected[0][5]
    assert written(writer, 20, stop) == generated(base, 20, stop)


def test_a_row_that_ended_stays_ended_and_the_loop_ends_with_the_last(
    base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, steps = Writer(base, multiple=4), []
    step = Writer._step
    monkeypatch.setattr(Writer, "_step", lambda self, *given: (steps.append(given), step(self, *given)))
    monkeypatch.setattr(sampling, "draw", lambda logits, *_: torch.full((len(logits),), 11))
    assert written(writer, 100, 11) == [[11] * sampling.LOOK_EVERY] * len(BEGAN)
    assert len(steps) == sampling.LOOK_EVERY
    at = iter(range(100))

    def one_ends(logits: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        drawn = torch.full((len(logits),), 12)
        drawn[1] = 11 if next(at) == 2 else 12
        return drawn

    monkeypatch.setattr(sampling, "draw", one_ends)
    rows = written(writer, 20, 11)
    assert rows[1] == [12, 12] + [11] * 18
    assert rows[:1] + rows[2:] == [[12] * 20] * (len(BEGAN) - 1)


def test_a_seed_draws_the_same_whatever_was_written_before_and_fills_up_the_batch(base: Base) -> None:
    writer = Writer(base)
    first = written(writer, 12, 11, 1.0)
    assert written(writer, 12, 11, 1.0, seed=1) != first
    long = written(writer, 150, 11, 1.0)
    assert [row[:12] for row in long] == first
    assert written(writer, 12, 11, 1.0) == first == written(Writer(base, multiple=16), 12, 11, 1.0)


def test_half_precision_writes_what_is_likely(base: Base) -> None:
    (row, *_), (exact, *_) = written(Writer(base, torch.bfloat16), 1, 11), written(Writer(base), 1, 11)
    logits = base.model(input_ids=torch.tensor(BEGAN[:1])).logits[0, -1]
    assert logits[exact[0]] - logits[row[0]] < 0.05 * logits.std()


def test_draws_have_the_probabilities_of_the_nucleus() -> None:
    """Of the four likeliest here: of 0.5, 0.3, 0.16 and 0.03 the first three, which have 0.95 of it together."""
    logits = torch.tensor([0.03, 0.5, 0.01, 0.16, 0.3]).log()
    generator, rows = torch.Generator().manual_seed(0), 20_000

    def shares(k: int, temperature: float = 1.0) -> list[float]:
        noise = torch.empty(rows, k).exponential_(generator=generator)
        drawn = draw(logits.expand(rows, -1), torch.tensor([1 / temperature]), noise)
        return (torch.bincount(drawn, minlength=5) / rows).tolist()

    assert shares(4) == pytest.approx([0, 0.5 / 0.96, 0, 0.16 / 0.96, 0.3 / 0.96], abs=0.02)
    assert shares(2) == pytest.approx([0, 0.5 / 0.8, 0, 0, 0.3 / 0.8], abs=0.02)
    hot = torch.tensor([0.03, 0.5, 0, 0.16, 0.3]).sqrt()
    assert shares(4, 2.0) == pytest.approx((hot / hot.sum()).tolist(), abs=0.02)
    assert shares(4, 0.01) == [0, 1, 0, 0, 0]


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path, "Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(InputError, match="set use_sliding_window to false"):
        Writer(load_base(str(folder)))


@pytest.mark.gpu
def test_on_a_gpu_graphs_write_what_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32; in bf16 a second writer draws the same by a seed, and so does the first after a larger batch."""
    monkeypatch.setattr(sampling, "KEYS_OF_A_GRAPH", 16)
    base = load_base(str(causal_folder(tmp_path, "Qwen3", **FAMILIES["Qwen3"])), device="cuda")
    writer = Writer(base, torch.float32)
    for most in (20, 40, 20):
        assert written(writer, most, 2047) == generated(base, most, 2047)
    half = Writer(base)
    first = written(half, 30, 11, 1.0)
    written(half, 60, 11, 1.0, seed=1)
    assert written(half, 30, 11, 1.0) == first == written(Writer(base), 30, 11, 1.0)
