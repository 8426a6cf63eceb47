"""Arithmetic of the statistics."""

from __future__ import annotations

import json

from dgraph.runtime import BlockSession, FixedSteps, GenerationStats
from tests.runtime.fake import FakeProgram, fake_spec


def test_derived_figures() -> None:
    stats = GenerationStats(sequence_rows=[10, 6], decoded=8, tokens=6, sequence_steps=[3, 2])
    stats.count_stage("prefill", 10, 16, 1.0)
    stats.count_stage("prefix", 20, 32, 0.5)
    stats.count_stage("suffix", 12, 16, 0.25)
    stats.count_stage("suffix", 4, 16, 0.25)
    stats.finish(3.0)
    assert stats.rows == {"prefill": 10, "prefix": 20, "suffix": 16}
    assert stats.padded == {"prefill": 16, "prefix": 32, "suffix": 32}
    assert stats.seconds == {"prefill": 1.0, "prefix": 0.5, "suffix": 0.5, "decode loop": 1.0}
    assert stats.step_rows == [20], "of the first stage of a step"
    assert stats.stage_rows["suffix"] == [12, 4]
    assert stats.rows_per_token == 2.0
    assert stats.tokens_per_step == 1.6
    assert stats.tokens_per_second == 2.0
    assert json.loads(json.dumps(stats.to_json())) == stats.to_json()
    assert stats.to_json()["rows_per_token"] == 2.0


def test_nothing_decoded() -> None:
    stats = GenerationStats()
    stats.finish(0.0)
    assert (stats.rows_per_token, stats.tokens_per_step, stats.tokens_per_second) == (0.0, 0.0, 0.0)
    assert stats.step_rows == []


def test_a_run_counts_stages() -> None:
    spec = fake_spec(4, eos_ids=())
    session = BlockSession(spec, {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")})
    stats = session.generate([[1, 2, 3, 4, 5], [6]], max_new_tokens=6, policy=FixedSteps(2)).stats
    # prompt 0: positions 4..11, block 4..7 has 3 masks (2 steps), then 4 (2 steps); prompt 1: 0..7 likewise.
    assert stats.sequence_steps == [4, 4]
    assert (stats.steps, stats.decoded, stats.tokens) == (4, 14, 12)
    assert stats.sequence_decoded == [7, 7]
    assert sum(stats.sequence_rows) == stats.kept_rows == stats.rows["step"]
    assert stats.commit_rows == 8
    assert stats.rows == {"prefill": 4, "step": 4 * 8 + 8}
    assert stats.step_rows == [8, 8, 16, 8], "the third commits both first blocks"
    assert stats.padded == {"prefill": 6, "step": 4 * 8 + 8 + 4 * 3}
    assert stats.seconds["prefill"] == 0.25
    assert stats.seconds["step"] == 4 * 0.5
    assert stats.seconds["decode loop"] == 0.0  # the fake claims more time than has passed
    assert stats.rows_per_token == 40 / 14
    assert stats.tokens_per_step == 14 / 8
