"""Ranks as real processes over gloo: collectives, messages, agreement, and what becomes of the others when one dies."""

from __future__ import annotations

import time

import pytest
import torch

from dgraph.private.torch import held
from tests.parallel.processes import started

COLLECTIVES = """
import torch, dgraph.parallel
from dgraph.ranks.groups import group_of
assert dgraph.parallel.init("cpu") is dgraph.parallel.init("cpu")
group = group_of("tp")
for dtype in (torch.float32, torch.bfloat16, torch.int64):
    own = torch.arange(6).reshape(2, 3).to(dtype) * (group.rank + 1)
    assert group.all_reduce(own).tolist() == [[0, 3, 6], [9, 12, 15]]
    assert group.all_gather(own)[1].tolist() == [[0, 2, 4], [6, 8, 10]]
assert group.all_reduce(torch.zeros(0, 3)).shape == (0, 3)
assert group.exchange(group.rank) == [0, 1]
if group.rank == 0:
    group.broadcast({"some": "thing"})
else:
    assert group.receive() == {"some": "thing"}
print("well", flush=True)
"""

OPTIMIZED = """
import dgraph, dgraph.parallel
mesh = dgraph.parallel.init("cpu")
optimized = dgraph.optimize("tiny_sdar", "focus", backend="eager", mesh=mesh)
prompts = ["Sort these words: river stone", "Add 12 and 30.", "Sort these words: b a c"]
"""

SERVE = (
    OPTIMIZED
    + """
engine = optimized.engine(max_sequences=2, max_tokens=256)
print("ready", flush=True)
if not engine.leads:
    engine.join()
else:
    print([response.text for response in engine.generate(prompts[:2], max_new_tokens=8)], flush=True)
    engine.close()
print("steps", engine.stats.steps, flush=True)
"""
)


def test_collectives_and_messages_whoever_comes_first() -> None:
    with started(2, COLLECTIVES, order=[1, 0]) as ranks:
        for rank in range(2):
            code, out, err = ranks.ends(rank)
            assert (code, out) == (0, "well\n"), err


def test_what_only_python_holds_is_not_held() -> None:
    x = torch.ones(2, requires_grad=True)
    square = x * x  # its backward holds x
    tensors = [x, torch.ones(2)]
    del x
    (still,) = held(tensors)
    assert still is tensors[0]
    del square, still
    assert held(tensors) == []


@pytest.mark.release
def test_an_engine_decides_on_rank_0_and_runs_on_all() -> None:
    with started(2, SERVE, environment={"DGRAPH_CHECK_RANKS": "1"}) as ranks:
        (first, out, err), (second, other, said) = ranks.ends(0), ranks.ends(1)
    assert (first, second) == (0, 0), err + said
    assert out.splitlines()[-1] == other.splitlines()[-1], "both took the same steps"
    assert other.splitlines()[0] == "ready"
    assert len(other.splitlines()) == 2


FOREVER = (
    OPTIMIZED
    + """
while True:
    optimized.generate(prompts, max_new_tokens=16)
    print("again", flush=True)
"""
)


@pytest.mark.release
def test_a_rank_that_dies_while_others_decode_ends_them_with_one_error() -> None:
    with started(2, FOREVER, order=[1, 0], apart=2.0) as ranks:
        assert [ranks.line(0), ranks.line(1)] == ["again"] * 2
        ranks.kill(1)
        began = time.monotonic()
        code, _, err = ranks.ends(0, within=20)
    assert code != 0
    assert "RankLost: rank 1 of 2 has died: its connection to rank 0 ended without a goodbye" in err
    assert time.monotonic() - began < 15
