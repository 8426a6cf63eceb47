"""Tokens that the runtime decodes from logits, draws and noise: what they depend on."""

from __future__ import annotations

import random

import torch

from dgraph.ops.lm_head.lm_head import decode_logits
from dgraph.runtime import ConfidenceThreshold, FixedSteps, StepRecord
from tests.runtime.fake import MASK, VOCAB, FakeProgram, make_session, random_prompts


def test_logits_are_decoded_by_the_runtime() -> None:
    prompts = random_prompts(random.Random(3), 3, 12)
    policy = ConfidenceThreshold(0.6)
    records: list[StepRecord] = []
    session = make_session(8, "logits")
    session.generate(prompts, max_new_tokens=17, policy=policy, observer=records.append, seed=5)
    for record in records:
        masked = record.candidate
        assert (record.token[~masked] == -1).all()
        assert (record.token[masked] >= 0).all()
        assert (record.token != MASK).all()
        # The fake's logits are one peak of height c/4, c in 1..32, over zeros; the mask's is left out.
        peaks = torch.arange(33) / 4
        known = torch.exp(peaks) / (torch.exp(peaks) + VOCAB - 2)
        off = (record.confidence[masked][:, None] - known).abs().amin(dim=1)
        assert (off < 1e-6).all()


def test_logits_are_sampled_with_the_row_seeds() -> None:
    prompts = random_prompts(random.Random(4), 4, 12)
    session = make_session(8, "logits")
    program = session.programs["step"]
    assert isinstance(program, FakeProgram)
    policy = FixedSteps(4)

    def run(**options) -> list[list[int]]:
        return session.generate(prompts, max_new_tokens=20, policy=policy, **options).token_ids

    greedy = run()
    warm = run(temperature=3.0, seed=1)
    assert warm == run(temperature=3.0, seed=1, max_batch=1)
    assert len({str(x) for x in (greedy, warm, run(temperature=3.0, seed=2))}) == 3
    assert greedy == run(seed=9)
    token, *_ = decode_logits(torch.zeros(1, VOCAB), torch.ones(1), program.calls[-1]["seed"][:1])
    assert 0 <= token.item() < VOCAB


def test_draws_belong_to_seed_prompt_position_and_step() -> None:
    prompt = [1, 2, 3]
    session = make_session(4, "sample")
    program = session.programs["step"]
    assert isinstance(program, FakeProgram)

    def run(seed: int, prompts: list[list[int]], batch: int | None = None) -> list[list[int]]:
        program.calls.clear()
        return session.generate(
            prompts, max_new_tokens=12, policy=FixedSteps(4), temperature=1.0, seed=seed, max_batch=batch
        ).token_ids

    first = run(0, [prompt, prompt])
    assert first[0] != first[1]
    seeds = torch.cat([call["seed"] for call in program.calls])
    assert seeds.unique().numel() == seeds.numel()
    assert (seeds >= 0).all()
    assert run(0, [prompt, prompt], batch=1) == first
    assert run(1, [prompt, prompt]) != first
    assert run(-1, [prompt, prompt]) != run(2**64 + 5, [prompt, prompt])
    assert run(5, [prompt, prompt]) == run(2**64 + 5, [prompt, prompt])


def test_noise_is_given_where_it_is_selected_by() -> None:
    prompts = random_prompts(random.Random(5), 3, 12)
    session = make_session(8, "evict", noise=True)
    program = session.programs["step"]
    assert isinstance(program, FakeProgram)
    policy = ConfidenceThreshold(0.9)
    first = session.generate(prompts, max_new_tokens=16, policy=policy, seed=1)
    noise = torch.cat([call["noise"] for call in program.calls])
    assert ((noise >= 0) & (noise < 1)).all()
    assert noise.unique().numel() > 0.99 * noise.numel()
    assert abs(noise.mean().item() - 0.5) < 0.05
    again = session.generate(prompts, max_new_tokens=16, policy=policy, seed=1, max_batch=1)
    assert again.token_ids == first.token_ids
    assert again.stats.rows == first.stats.rows
