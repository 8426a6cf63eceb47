"""dgraph::vocabulary_attention in Triton: against its reference, interpreted; and as it compiles for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops import OPS
from tests.amounts import every_value
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, flat, moved
from tests.ops.triton.vocabularies import embedding, embedding_part

pytest.importorskip("triton", reason="needs Triton")


def check(interpreted: Interpreter, name: str, args: tuple[Any, ...], tolerance: float = 2e-5, **options: Any) -> None:
    result, _ = interpreted(name, args, **options)
    compare(flat(result), expected(name, args), tolerance)


@every_value(
    ("live", [0, 1, 16, 17, 52, 60]), ("softcap", [None, 5.0]), ("heat", [0.0, 0.9]), ("suppress", [-1, 0, 123])
)
def test_any_rows(interpreted: Interpreter, live: int, softcap: float | None, heat: float, suppress: int) -> None:
    args = embedding(60, live, softcap=softcap, heat=heat, suppress=suppress)
    check(interpreted, "vocabulary_attention", args)


@every_value(("chunk", [16, 64, 256, 1024]), ("vocab", [1, 64, 333, 700]), ("live", [0, 37, 45]))
def test_any_chunks(interpreted: Interpreter, chunk: int, vocab: int, live: int) -> None:
    """Whole ones and a part of one, whatever the width."""
    args = embedding(45, live, vocab=vocab, d=37 + chunk % 5, suppress=vocab - 2)
    check(interpreted, "vocabulary_attention", args, chunk=chunk)


@every_value(("first, ids", [(4000, 9000), (4000, 4444), (5000, 4000), (0, 700)]), ("chunk", [128, 16384]))
def test_a_share_of_the_ids(interpreted: Interpreter, first: int, ids: int, chunk: int) -> None:
    """Whole, with ids that are none, and without any."""
    check(interpreted, "vocabulary_part", embedding_part(30, 23, first, ids), chunk=chunk)


def test_the_largest_rises_and_falls_over_chunks(interpreted: Interpreter) -> None:
    """Sums that were brought to one maximum are brought to the next, by factors that may be as small as none."""
    args = list(embedding(8, 8, vocab=320, softcap=None, heat=0.0))
    args[0] = args[0].abs()
    steps = torch.tensor([-3.0, 1.0, 40.0, -200.0, 40.0]).repeat_interleave(64)
    args[1] = torch.rand(320, 40, generator=torch.Generator().manual_seed(1)) * 0.01 + steps[:, None]
    check(interpreted, "vocabulary_attention", tuple(args), 1e-4, chunk=64)


def test_a_draw_is_between_ids_of_all_chunks(interpreted: Interpreter) -> None:
    """Near the largest in one chunk, and so far below it in others that their odds are none."""
    args = list(embedding(200, 200, vocab=192, softcap=None, d=8))
    args[0] = torch.ones(200, 8)
    args[1] = torch.zeros(192, 8)
    args[1][:, 0] = torch.tensor([-300.0, 0.0, -1.0]).repeat_interleave(64)
    args[2] = torch.ones(200)
    token = expected("vocabulary_attention", tuple(args))[2]
    assert token.min() >= 64
    assert (token >= 128).any()
    check(interpreted, "vocabulary_attention", tuple(args), 1e-4, chunk=64)


def broken() -> tuple[tuple[Any, ...], Tensor]:
    """A call with two rows that are not finite, and which rows are."""
    args = embedding(20, 20)
    args[0][4], args[0][9, 0] = torch.nan, torch.inf
    return (*args[:5], None, -1), args[0].isfinite().all(-1)


def test_a_row_that_is_not_finite_says_so_alone(interpreted: Interpreter) -> None:
    args, sound = broken()
    result, _ = interpreted("vocabulary_attention", args, chunk=128)
    assert result[1].isnan().equal(~sound)
    compare([x[sound] for x in result], [x[sound] for x in expected("vocabulary_attention", args)])


def test_halves_are_rounded_where_the_contract_says(interpreted: Interpreter) -> None:
    args = moved(embedding(20, 17), "cpu", torch.float16)
    result, _ = interpreted("vocabulary_attention", args)
    want = expected("vocabulary_attention", moved(args, "cpu", torch.float32))
    compare(result[:4], want[:4])
    compare(result[4:], want[4:], 2e-3)


def test_wrong_settings_are_reported_as_by_the_reference(interpreted: Interpreter) -> None:
    with pytest.raises(InputError, match=r"softcap must be None or above 0, got -1\.0"):
        interpreted("vocabulary_attention", embedding(9, 9, softcap=-1.0))


@pytest.mark.release
def test_a_row_of_a_chunk_fits_in_the_registers_of_a_hopper_gpu() -> None:
    """Read once and written, shares or the zeros of a padding row, by 16 bytes at a time; nothing in local memory."""
    found = found_by("compiled_vocabulary")
    assert len(found) == 3
    for name, kernel in found.items():
        assert kernel["stack"] == 0, name
        assert name == "finish" or (kernel["loads"], kernel["stores"]) == (8, 8), name


@pytest.mark.parametrize("rows", [1, 256, 2048])
def test_what_a_call_allocates_is_far_below_its_logits(rows: int) -> None:
    """At the sizes of DiffusionGemma: under 3 % of logits in fp32 and bf16 and of the probabilities."""
    device = torch.device("cuda")
    h, weight = torch.empty(rows, 2816, dtype=torch.bfloat16), torch.empty(262_144, 2816, device="meta")
    workspace = OPS["vocabulary_attention"].workspace
    assert workspace is not None
    taken = workspace(device, h, weight.bfloat16())
    assert rows == 1 or taken < 0.03 * rows * len(weight) * (4 + 4 + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 37, 256, 2048])
def test_at_the_sizes_of_models_on_cuda(rows: int) -> None:
    """bf16: integers where no other id is as good up to rounding; the soft embedding to within rounding."""
    args = embedding(rows + 3, rows, vocab=32_000, d=2816, softcap=30.0, heat=0.7)
    halved = moved(args, "cpu", torch.bfloat16)
    got = flat(OPS["vocabulary_attention"].overload(*moved(halved, "cuda")))
    want = expected("vocabulary_attention", moved(halved, "cpu", torch.float32))
    for i in (0, 2):
        assert (got[i].cpu() != want[i]).sum() <= 0.02 * rows
    compare([got[1], got[3]], [want[1], want[3]], 1e-3)
    compare(got[4:], want[4:], 2e-2)


@pytest.mark.gpu
def test_a_row_that_is_not_finite_says_so_on_cuda() -> None:
    args, sound = broken()
    got = flat(OPS["vocabulary_attention"].overload(*moved(args, "cuda")))
    assert got[1].isnan().cpu().equal(~sound)
    compare([x.cpu()[sound] for x in got], [x[sound] for x in expected("vocabulary_attention", args)], 1e-4)


@pytest.mark.gpu
def test_a_graph_of_it_takes_what_its_inputs_hold_on_cuda() -> None:
    """Nothing of a call depends on values that the host saw: a replay reads new rows, and another count of them."""
    args = moved(embedding(300, 300, vocab=40_000, d=64), "cuda", torch.bfloat16)
    other = moved(embedding(300, 211, vocab=40_000, d=64, seed=1), "cuda", torch.bfloat16)
    run = OPS["vocabulary_attention"].overload
    run(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*args)
    for mine, new in zip(args[:5], other[:5], strict=True):
        mine.copy_(new)
    graph.replay()
    assert all(x.equal(y) for x, y in zip(got, run(*other), strict=True))
