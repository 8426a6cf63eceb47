"""dgraph::vocabulary_attention in Triton: against its reference, interpreted; and as it compiles for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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


@every_value(
    ("rows, ids", [(16, 32), (64, 64), (32, 128)]),
    ("columns, depth", [(16, 16), (64, 32)]),
    ("chunk", [1, 3, 100]),
    ("splits", [1, 2, 5]),
)
def test_any_tiles_chunks_and_shares(
    interpreted: Interpreter, rows: int, ids: int, columns: int, depth: int, chunk: int, splits: int
) -> None:
    from dgraph.ops.triton.vocabulary_attention import Tiling

    tiling = Tiling(rows, ids, columns, depth, chunk * ids, splits, warps=4)
    check(interpreted, "vocabulary_attention", embedding(45, 37, vocab=333, suppress=300), tiling=tiling)


@pytest.mark.parametrize(("first", "ids"), [(4000, 9000), (4000, 4444), (5000, 4000), (0, 700)])
def test_a_share_of_the_ids(interpreted: Interpreter, first: int, ids: int) -> None:
    """Whole, with ids that are none, and without any."""
    check(interpreted, "vocabulary_part", embedding_part(30, 23, first, ids))


def test_the_largest_rises_and_falls_over_chunks(interpreted: Interpreter) -> None:
    """Sums that were brought to one maximum are brought to the next, by factors that may be as small as none."""
    from dgraph.ops.triton.vocabulary_attention import Tiling

    args = list(embedding(8, 8, vocab=320, softcap=None, heat=0.0))
    args[0] = args[0].abs()
    steps = torch.tensor([-3.0, 1.0, 40.0, -200.0, 40.0]).repeat_interleave(64)
    args[1] = torch.rand(320, 40, generator=torch.Generator().manual_seed(1)) * 0.01 + steps[:, None]
    tiling = Tiling(16, 32, 32, 16, 64, 2, warps=4)
    check(interpreted, "vocabulary_attention", tuple(args), 1e-4, tiling=tiling)


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
def test_it_compiles_to_products_of_a_hopper_gpu() -> None:
    """Each inner step of 64 is four instructions of 16; loads run ahead of them, within the shared memory there is."""
    found = found_by("compiled_vocabulary")
    assert len(found) == 6
    for name, kernel in found.items():
        assert kernel["products"] == (0 if name.startswith("finish") else 4), name
        assert (kernel["loads"] > 0) == (not name.startswith("finish")), name
        assert kernel["shared"] < 227 << 10


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
