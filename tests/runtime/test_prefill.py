"""Prefill in chunks: what they cover, in which order, and that chunking changes nothing."""

from __future__ import annotations

import random

import pytest

from dgraph.runtime.loop import session as sessions
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import ConfidenceThreshold
from dgraph.runtime.state.packed_rows import prefill_chunk
from tests.runtime.fake import FakeProgram, fake_spec


@pytest.mark.parametrize("seed", range(20))
def test_chunks_cover_each_sequence_once_in_order_and_at_blocks(seed: int) -> None:
    draw = random.Random(seed)
    block = draw.choice([1, 4, 32])
    lengths = [block * draw.randrange(6) for _ in range(draw.randrange(1, 9))]
    most = draw.randrange(block, 8 * block)
    reached = [0] * len(lengths)
    while reached != lengths:
        begin, end = zip(*prefill_chunk(list(zip(reached, lengths, strict=True)), block, most), strict=True)
        assert list(begin) == reached
        assert all(b <= e <= n and e % block == 0 for b, e, n in zip(begin, end, lengths, strict=True))
        assert 0 < sum(end) - sum(begin) <= most
        reached = list(end)


def test_chunking_changes_neither_tokens_nor_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[i % 20 + 1 for i in range(39)], list(range(2, 7)), list(range(1, 26)), [9] * 8]

    def run() -> tuple[list[list[int]], object]:
        session = BlockSession(fake_spec(4), {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")})
        result = session.generate(prompts, max_new_tokens=12, policy=ConfidenceThreshold(0.6), keep_kv=True)
        assert result.kv is not None
        values = [k[: kv.committed].tolist() for kv in result.kv for k, _ in kv.layers]
        return result.token_ids, values

    whole = run()
    monkeypatch.setattr(sessions, "PREFILL_ROWS", 12)
    assert run() == whole
