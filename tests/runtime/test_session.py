"""The session against the plain simulation, over random cases; batching, observer, progress."""

from __future__ import annotations

import random
import warnings
from typing import ClassVar

import pytest
import torch

from dgraph.runtime import BlockSession, ConfidenceThreshold, FixedSteps, Progress, StepRecord
from dgraph.runtime.decoding import Decoding
from tests.amounts import every_pair
from tests.runtime.fake import MASK, FakeProgram, fake_spec, make_session, random_prompts
from tests.runtime.simulate import Simulation, simulate


def check_steps(records: list[StepRecord], prompt: int, expected: Simulation) -> None:
    """What the observer saw of one prompt, step by step."""
    mine = [r for r in records if (r.sequence == prompt).any()]
    assert len(mine) == len(expected.steps)
    for record, step in zip(mine, expected.steps, strict=True):
        row = record.sequence == prompt
        assert record.positions[row].tolist() == step.positions
        assert record.limit[row].tolist() == step.limit
        assert record.positions[row & record.candidate].tolist() == step.masked
        assert record.positions[row & record.kept].tolist() == step.kept
        taken = row & record.committed
        pairs = zip(record.positions[taken].tolist(), record.token[taken].tolist(), strict=True)
        assert list(pairs) == step.committed
        at = record.prompts.tolist().index(prompt)
        assert record.average[at].item() == step.average
        if record.states:
            assert record.states["reached"][at].item() == step.reached


@every_pair(
    ("evict", [False, True]), ("recommit", [True, False]), ("block_cache", ["off", "dc", "dc+"]), ("block", [4, 8, 32])
)
def test_session_does_what_the_simulation_does(block: int, block_cache: str, recommit: bool, evict: bool) -> None:
    rng = random.Random(f"{block} {block_cache} {recommit} {evict}")
    page_size = rng.choice([block // 2, block, 2 * block])
    stops = rng.choice([(3,), (3, 5), ()])
    session = make_session(
        block,
        "evict" if evict else "step",
        block_cache=block_cache,
        recommit=recommit,
        page_size=page_size,
        spec={"eos_ids": stops},
    )
    for _ in range(4 if block < 32 else 2):
        policy = rng.choice([ConfidenceThreshold(rng.choice([0.5, 0.75, 1.0])), FixedSteps(rng.randint(1, block + 2))])
        prompts = random_prompts(rng, rng.randint(1, 5), 3 * block)
        new = rng.randint(1, 3 * block)
        records: list[StepRecord] = []
        out = session.generate(prompts, max_new_tokens=new, policy=policy, observer=records.append, keep_kv=True)
        expected = [
            simulate(
                p,
                max_new_tokens=new,
                block=block,
                policy=policy,
                block_cache=block_cache,
                recommit=recommit,
                evict=evict,
                stops=stops,
            )
            for p in prompts
        ]
        assert out.token_ids == [e.tokens for e in expected]
        assert out.kv is not None
        for prompt, (kv, want) in enumerate(zip(out.kv, expected, strict=True)):
            check_steps(records, prompt, want)
            assert kv.committed == want.committed_end
            assert [k.shape[1] for k, _ in kv.layers] == [1, 3]
            for (keys, values), numbers in zip(kv.layers, want.keys, strict=True):
                written = torch.tensor(numbers) != 0
                assert keys[written, 0, 0].tolist() == [n for n in numbers if n]
                width = keys.shape[1]
                assert keys.shape == values.shape == (want.committed_end + block, width, 2)
                assert written[: want.committed_end].all()
        stats = out.stats
        assert stats.sequence_steps == [len(e.steps) for e in expected]
        assert stats.steps == max(stats.sequence_steps) == len(records)
        assert stats.decoded == sum(e.decoded for e in expected)
        assert stats.tokens == sum(len(e.tokens) for e in expected)
        assert stats.commit_rows == sum(e.commit_rows for e in expected)
        forwarded = sum(len(s.positions) for e in expected for s in e.steps)
        kept = sum(len(s.kept) for e in expected for s in e.steps)
        assert stats.rows[session.programs["step"].stage_names[0]] == forwarded
        assert stats.rows_per_token == kept / stats.decoded
        assert stats.rows.get("prefill", 0) == sum(len(p) // block * block for p in prompts)
        assert session.kv.free_pages == session.kv.pages


@pytest.mark.parametrize("kind", ["step", "evict"])
def test_masks_beyond_the_response_need_no_step(kind: str) -> None:
    """Of a last block that reaches beyond it; what is said is the beginning of a longer response."""
    session = make_session(8, kind)
    prompt, policy = random_prompts(random.Random(3), 1, 5), FixedSteps(8)
    longer = session.generate(prompt, max_new_tokens=24, policy=policy)
    steps = []
    for new in range(1, 17):
        short = session.generate(prompt, max_new_tokens=new, policy=policy)
        assert short.token_ids[0] == longer.token_ids[0][:new]
        steps.append(short.stats.steps)
    assert steps == sorted(steps)
    assert steps[0] < steps[-1] <= longer.stats.steps


@pytest.mark.parametrize("kind", ["step", "evict"])
def test_a_batch_gives_what_its_prompts_give_one_by_one(kind: str) -> None:
    rng = random.Random(7)
    prompts = random_prompts(rng, 7, 20)
    policy = ConfidenceThreshold(0.8)
    session = make_session(8, kind, block_cache="dc+")
    together = session.generate(prompts, max_new_tokens=21, policy=policy)
    alone = [session.generate([p], max_new_tokens=21, policy=policy) for p in prompts]
    assert together.token_ids == [g.token_ids[0] for g in alone]
    assert together.stats.sequence_steps == [g.stats.steps for g in alone]
    assert together.stats.sequence_decoded == [g.stats.decoded for g in alone]
    assert together.stats.sequence_rows == [g.stats.kept_rows for g in alone]
    batches = session.generate(prompts, max_new_tokens=21, policy=policy, max_batch=3)
    assert batches.token_ids == together.token_ids
    for name in ("decoded", "tokens", "rows", "commit_rows", "sequence_steps", "rows_per_token"):
        assert getattr(batches.stats, name) == getattr(together.stats, name), name
    steps = together.stats.sequence_steps
    assert max(steps) <= batches.stats.steps <= max(steps[:3]) + max(steps[3:6]) + steps[6] + 2, "no slot waits"


def test_progress_counts_the_prompts_of_all_batches() -> None:
    seen: list[Progress] = []
    prompts = random_prompts(random.Random(1), 5, 9)
    session = make_session(4)
    out = session.generate(prompts, max_new_tokens=9, policy=FixedSteps(2), progress=seen.append, max_batch=2)
    assert seen[0] == Progress(0, 5, 0)
    assert seen[-1] == Progress(5, 5, out.stats.decoded)
    assert [p.decoded for p in seen] == sorted(p.decoded for p in seen)
    assert [p.finished for p in seen] == sorted(p.finished for p in seen)


def test_observer_gets_copies_and_prompt_indices_of_every_batch() -> None:
    records: list[StepRecord] = []
    prompts = random_prompts(random.Random(2), 3, 9)
    session = make_session(8, "evict", block_cache="dc+")
    policy = ConfidenceThreshold(0.5)
    out = session.generate(prompts, max_new_tokens=16, policy=policy, observer=records.append, max_batch=2)
    assert [r.step for r in records] == list(range(len(records)))
    assert records[0].prompts.tolist() == [0, 1]
    assert {p for r in records for p in r.sequence.tolist()} == {0, 1, 2}
    assert len(records) == out.stats.steps
    assert sum(len(r.committed_positions) for r in records) == out.stats.decoded
    for record in records:
        n = len(record.positions)
        assert record.score is not None
        assert record.score.shape == record.kept.shape == record.confidence.shape == (n,)
        assert torch.isfinite(record.confidence).equal(record.candidate & record.kept)
        assert (record.token[record.committed] == record.committed_tokens).all()
        assert not (record.committed & ~record.kept).any()
        assert (record.states_after["reached"] >= record.states["reached"]).all()
    plain: list[StepRecord] = []
    make_session(8).generate(prompts, max_new_tokens=3, policy=policy, observer=plain.append)
    assert plain[0].score is None
    assert plain[0].kept.all()


def test_a_program_may_overwrite_its_outputs_in_its_next_call() -> None:
    class Replayed(FakeProgram):
        """Like a captured graph, whose outputs live in buffers of its own."""

        outputs: ClassVar[list[torch.Tensor]] = []

        def __call__(self, inputs, rows):
            for tensor in self.outputs:
                tensor.fill_(-7)
            result = super().__call__(inputs, rows)
            self.outputs[:] = result.outputs.values()
            return result

    prompts = random_prompts(random.Random(9), 3, 12)
    runs = []
    for step in (FakeProgram("evict"), Replayed("evict")):
        session = BlockSession(fake_spec(8), {"prefill": FakeProgram("prefill"), "step": step})
        records: list[StepRecord] = []
        out = session.generate(prompts, max_new_tokens=20, policy=ConfidenceThreshold(0.7), observer=records.append)
        runs.append((out.token_ids, [{k: str(v) for k, v in vars(r).items()} for r in records]))
    assert runs[0] == runs[1]


def test_stop_tokens_of_the_prompt_do_not_end_the_answer() -> None:
    session = make_session(8, spec={"eos_ids": (3,)})
    out = session.generate([[3, 3, 3]], max_new_tokens=5, policy=ConfidenceThreshold(1.0))
    assert out.stats.steps > 1


def test_a_program_that_only_answers_the_mask_token_comes_to_an_end() -> None:
    class Stuck(FakeProgram):
        def __call__(self, inputs, rows):
            result = super().__call__(inputs, rows)
            result.outputs["token"][inputs["candidate"].nonzero()[:, 0]] = MASK
            return result

    session = BlockSession(fake_spec(4), {"prefill": FakeProgram("prefill"), "step": Stuck("step")})
    out = session.generate([[1, 2]], max_new_tokens=6, policy=ConfidenceThreshold(1.0))
    assert out.token_ids == [[MASK] * 6]
    assert out.stats.steps == 6


def test_no_prompts_give_nothing() -> None:
    out = make_session(4).generate([], max_new_tokens=3, policy=FixedSteps(1), keep_kv=True)
    assert (out.token_ids, out.kv, out.stats.steps, out.stats.rows_per_token) == ([], [], 0, 0.0)
    assert out.stats.to_json()["tokens_per_step"] == 0.0


def test_cache_dtype_and_another_block_length() -> None:
    session = make_session(8, dtype=torch.float64)
    prompts = random_prompts(random.Random(6), 2, 20)
    with pytest.warns(UserWarning, match="block_length=4, but fake was trained with 8") as caught:
        out = session.generate(prompts, max_new_tokens=9, policy=FixedSteps(2), block_length=4)
    assert caught[0].filename == __file__
    expected = make_session(4).generate(prompts, max_new_tokens=9, policy=FixedSteps(2))
    assert out.token_ids == expected.token_ids
    assert session.kv.tensors()["k_cache_1"].dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("block_cache", ["off", "dc+"])
def test_on_a_gpu_the_host_waits_for_reports_alone(block_cache: str) -> None:
    prompts = random_prompts(random.Random(8), 6, 40)
    chosen = Decoding(max_new_tokens=400, policy=ConfidenceThreshold(0.9), ignore_eos=True)
    cpu = make_session(8, block_cache=block_cache).generate(prompts, chosen)
    session = make_session(8, block_cache=block_cache, device="cuda")
    session.generate(prompts, chosen)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # or equal warnings count once
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            out = session.generate(prompts, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_warn_always(always)
    assert out.token_ids == cpu.token_ids
    reads = sum("synchroniz" in str(w.message) for w in recorded)
    # A report is copied and waited for by an event, which does not count: what does is before and after the loop.
    assert out.stats.steps > 200
    assert reads <= 100
