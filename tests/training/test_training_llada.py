"""Training a full bidirectional model: the noise it meets, the loop, the decoder and the checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dgraph.models
from dgraph.models.checkpoint import read_tensors
from training import checkpoint, tokenizer
from training.data import (
    EOS_PADDING,
    RESPONSE,
    Batch,
    draw_region,
    pack,
    region_document,
    tail,
)
from training.decode import decode
from training.evaluate import decode_all
from training.masked_diffusion import mask_chance, masked_diffusion
from training.model import TinyConfig, TinyModel
from training.objective import Inputs, Noise, dense_mask, next_token
from training.tokenizer import ASSISTANT_ID, EOS_ID, MASK_ID, USER_ID
from training.trainer import Stage, Trainer, run_phase

CPU = torch.device("cpu")
TOKENIZER = tokenizer.load(Path(dgraph.models.__path__[0]) / "tiny_sdar")
PASSAGES = ["def f(x):\n    return x + 1\n" * 60, "Some words\nof a text.\nAnd more of them.\n" * 5]
SMALL = TinyConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    family="llada",
)


def batch_of(arrays: dict[str, object]) -> Batch:
    return Batch(**{name: torch.as_tensor(array) for name, array in arrays.items()}).to(CPU)


def small_batch(copies: int = 1) -> Batch:
    """Documents of 40 + 64, 7 + 32 and 5 + 32 tokens, whose answers have 41, 20 and 32 (open text without an end)."""
    ids = torch.randint(5, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = [
        region_document(ids[:40], ids[40:80], "math", 64),
        region_document(ids[:7], ids[80:99], "sort", 32),
        region_document(ids[:5], ids[100:150], "text", 32),
    ]
    return batch_of(pack(documents * copies, 2 * copies, 112))


def rows_of(batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Row and column indices of document `number`'s response region."""
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    row, column = ((batch.docs == number) & response).nonzero(as_tuple=True)
    return row, column


def test_a_region_has_the_length_asked_for() -> None:
    short, cut = region_document([3, 9, 4], [7] * 5, "sort", 32), region_document([3, 9, 4], [7] * 50, "text", 32)
    assert len(short.ids) == len(cut.ids) == 35
    assert short.ids[8:] == [EOS_ID] * 27
    assert short.kinds.count(RESPONSE) == 6  # the answer's own end counts as response
    assert EOS_ID not in cut.ids
    rng = random.Random(0)
    drawn = [draw_region(20, "math", rng) for _ in range(300)]
    assert {32, 64} <= set(drawn)
    assert min(drawn) >= 20
    assert any(size % 32 for size in drawn)
    assert tail([USER_ID, 10, 11, 12, ASSISTANT_ID], 3) == [USER_ID, 12, ASSISTANT_ID]


def test_a_document_sees_itself_in_both_directions_and_nothing_else() -> None:
    batch = small_batch()
    inputs = masked_diffusion(batch, torch.Generator().manual_seed(0))
    seen = dense_mask(inputs.visible, *inputs.input_ids.shape, CPU)[:, 0]
    assert torch.equal(seen, batch.docs[:, :, None] == batch.docs[:, None])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_only_responses_are_masked_and_weighed(share: float) -> None:
    batch = small_batch(8)
    inputs = masked_diffusion(batch, torch.Generator().manual_seed(1), Noise(blockwise=share))
    masked = inputs.input_ids == MASK_ID
    assert torch.equal(inputs.targets, batch.tokens)
    assert torch.equal(inputs.input_ids[~masked], batch.tokens[~masked])
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    assert masked.any()
    assert not (masked & ~response).any()
    assert torch.equal(inputs.weights > 0, masked)


def test_joint_noise_has_one_rate_per_document() -> None:
    batch = small_batch(20)
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    chance, later = mask_chance(batch, response, torch.Generator().manual_seed(0), blockwise=0.0)
    assert not later.any()
    rates = [chance[rows_of(batch, number)] for number in range(60)]
    assert all(bool((rate == rate[0]).all()) for rate in rates)
    first = torch.stack([rate[0] for rate in rates])
    assert first.mean() == pytest.approx(0.5, abs=0.05)  # spread evenly, so closer than chance would give
    assert float(first.min()) < 0.05
    assert float(first.max()) > 0.95


def test_blockwise_noise_is_what_block_by_block_decoding_meets() -> None:
    batch = small_batch(40)
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    chance, after = mask_chance(batch, response, torch.Generator().manual_seed(0), blockwise=1.0)
    starts = set()
    for number in range(120):
        row, column = rows_of(batch, number)
        rate = chance[row, column]
        clean, later = int((rate == 0).sum()), int((rate == 1).sum())
        middle = rate[clean : len(rate) - later]
        assert bool((rate[:clean] == 0).all())
        assert bool((rate[len(rate) - later :] == 1).all())
        assert bool((middle == middle[:1]).all())
        behind = int(after[row, column].sum())
        assert behind == later if len(middle) else later - behind in (0, 8, 16, 32)
        assert bool(after[row, column][len(rate) - behind :].all())
        assert len(middle) in (0, 8, 16, 32)  # none: the current block is all masked, as at its first step
        assert clean % 8 == 0
        assert clean <= int((batch.kinds[row, column] == RESPONSE).sum())
        starts.add(clean)
    assert starts >= {0, 8, 16, 32}


def test_blocks_after_the_current_one_count_as_much_as_is_said() -> None:
    batch = small_batch(40)
    response = (batch.kinds == RESPONSE) | (batch.kinds == EOS_PADDING)
    _, later = mask_chance(batch, response, torch.Generator().manual_seed(0), blockwise=1.0)
    later = later & response
    assert later.any()

    def inputs(weight: float, complementary: bool = False) -> Inputs:
        noise = Noise(by_rate=False, blockwise=1.0, later_weight=weight, complementary=complementary)
        return masked_diffusion(batch, torch.Generator().manual_seed(0), noise)

    plain, half, none = inputs(1.0), inputs(0.5), inputs(0.0)
    assert torch.equal(plain.input_ids, none.input_ids), "they are masked all the same"
    assert bool((plain.weights[later] > 0).all())
    assert torch.equal(half.weights, torch.where(later, 0.5 * plain.weights, plain.weights))
    assert torch.equal(none.weights, plain.weights.masked_fill(later, 0.0))
    assert float(none.scale) == float(none.weights.sum()) > 0
    first, second = inputs(0.0, complementary=True).weights.chunk(2)
    assert not first[later].any()
    assert not second[later].any()
    assert second.any()


def test_the_loss_is_weighed_by_the_chance_to_be_masked() -> None:
    """Over many draws each response token's weight averages to its kind's: 1, or 0.2 of end padding."""
    batch = small_batch(200)
    inputs = masked_diffusion(batch, torch.Generator().manual_seed(0), Noise(blockwise=0.0))
    assert inputs.weights[batch.kinds == RESPONSE].mean() == pytest.approx(1.0, abs=0.1)
    assert inputs.weights[batch.kinds == EOS_PADDING].mean() == pytest.approx(0.2, abs=0.03)
    assert float(inputs.scale) == pytest.approx(float((batch.kinds == RESPONSE).sum()) + 200 * 35 * 0.2, rel=0.05)


def test_a_few_steps_reduce_the_loss() -> None:
    torch.manual_seed(0)
    trainer = Trainer(TinyModel(SMALL), steps=12, peak=1e-2, final=0.1, dense=True, compiled=False)
    batch = small_batch()
    losses = [float(trainer.step(masked_diffusion(batch, torch.Generator().manual_seed(0)))[0]) for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.release
def test_what_is_learnt_is_what_is_decoded() -> None:
    """A model that knows three documents by heart decodes them: block by block, whole, one token a step or many."""
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    trainer = Trainer(model, steps=250, peak=1e-2, final=0.1, dense=True, compiled=False, warmup=20)
    batch, generator = small_batch(4), torch.Generator().manual_seed(0)
    for _ in range(250):
        trainer.step(masked_diffusion(batch, generator))
    prompts, answers = [], []
    for number in (0, 4, 8):  # longest documents first, four of each
        at = batch.docs == number
        prompts.append(batch.tokens[at & (batch.kinds != RESPONSE) & (batch.kinds != EOS_PADDING)].tolist())
        answers.append([t for t in batch.tokens[at & (batch.kinds == RESPONSE)].tolist() if t != EOS_ID])
    model.eval()
    for threshold, block in ((None, 32), (0.9, 32), (0.9, 16), (0.9, 64)):
        results = decode(model, prompts[:1], 64, threshold, block)
        results += decode(model, prompts[1:], 32, threshold, min(block, 32))
        assert [result.ids for result in results] == answers
    assert results[0].steps < 41


def test_decoding_in_a_batch_equals_decoding_alone() -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL).double().eval()
    prompts = [list(range(5, 45)), list(range(100, 107)), list(range(60, 124))]
    together = decode_all(model, prompts, 40, None)
    for prompt, result in zip(prompts, together, strict=True):
        tokens = [*prompt, *[MASK_ID] * 64]
        for start in (len(prompt), len(prompt) + 32):
            while MASK_ID in tokens[start : start + 32]:
                everything = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool)
                with torch.no_grad():
                    logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], everything)[0]
                chance, choice = logits.float().softmax(-1).max(-1)
                masks = [i for i in range(start, start + 32) if tokens[i] == MASK_ID]
                best = max(masks, key=lambda i: (float(chance[i]), -i))
                tokens[best] = int(choice[best])
            if EOS_ID in tokens[start : start + 32]:
                break
        response = tokens[len(prompt) : len(prompt) + 40]
        assert result.ids == (response[: response.index(EOS_ID)] if EOS_ID in response else response)


class Clock:
    """A phase of stages over one batch, with what it logged, and how often it was saved."""

    def __init__(self, stages: tuple[Stage, ...], steps: int, **options: float) -> None:
        torch.manual_seed(0)
        self.trainer = Trainer(TinyModel(SMALL), steps, 1e-2, 0.1, True, False, **options)  # type: ignore[arg-type]
        self.lines: list[dict[str, object]] = []
        self.saved = 0
        batch = small_batch()
        generator = torch.Generator().manual_seed(0)

        def inputs_of(batch: Batch) -> Inputs:
            return masked_diffusion(batch, generator)

        def save() -> None:
            self.saved += 1

        self.run = lambda: run_phase(
            self.trainer, stages, lambda *_: [batch] * steps, inputs_of, self.lines.append, dict, 0, save
        )


def test_a_phase_walks_through_its_stages_and_ends_with_its_steps() -> None:
    phase = Clock((Stage(2, 0.5), Stage(4)), 20)
    phase.run()
    assert phase.trainer.done == 20
    assert [line["pairs"] for line in phase.lines if line.get("step") in (10, 20)] == [2, 4]
    assert phase.trainer.rate() == pytest.approx(1e-3)
    assert phase.saved >= 1


def test_a_phase_out_of_time_ends_at_once_and_is_saved() -> None:
    phase = Clock((Stage(2),), 10_000, minutes=1e-6)
    phase.run()
    assert phase.trainer.done == 1
    assert phase.saved >= 1


def test_an_interrupted_phase_is_saved() -> None:
    phase = Clock((Stage(2),), 10)

    def interrupt(inputs: Inputs) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    phase.trainer.step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        phase.run()
    assert phase.saved == 1


def test_a_checkpoint_is_a_llada_and_survives_reading(tmp_path: Path) -> None:
    model = TinyModel(SMALL).bfloat16()
    checkpoint.write(model, tmp_path, shard_bytes=20_000)
    stored = read_tensors(tmp_path)
    block = ("attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
    names = [f"blocks.{layer}.{part}" for layer in range(2) for part in block]
    assert set(stored) == {f"model.transformer.{name}.weight" for name in ["wte", *names, "ln_f", "ff_out"]}
    assert stored["model.transformer.blocks.0.ff_out.weight"].shape == (32, 48)
    again = checkpoint.read(tmp_path, torch.bfloat16)
    assert again.config == SMALL
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_the_mathematics_is_llamas_without_the_causal_mask(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ours = TinyModel(SMALL).eval()
    values = {key: getattr(SMALL, key) for key in TinyConfig.__dataclass_fields__ if key != "family"}
    theirs = LlamaForCausalLM(LlamaConfig(**values, tie_word_embeddings=False)).eval()
    report = theirs.load_state_dict(ours.state_dict(), strict=True)
    assert not report.missing_keys
    ids, positions = torch.randint(5, 300, (1, 40)), torch.arange(40)[None]
    everything = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=torch.zeros(1, 1, 40, 40)).logits
        torch.testing.assert_close(ours(ids, positions, everything), expected, rtol=1e-4, atol=1e-4)


def test_next_token_and_diffusion_read_the_same_batch() -> None:
    batch = small_batch()
    causal = dense_mask(next_token(batch).visible, *batch.tokens.shape, CPU)[:, 0]
    full = dense_mask(masked_diffusion(batch, torch.Generator()).visible, *batch.tokens.shape, CPU)[:, 0]
    assert torch.equal(causal, full.tril())
