"""Kernels over keys and values in float8: as Triton compiles them for an H200, and what they write on a GPU."""

from __future__ import annotations

import pytest
import torch

from dgraph.errors import InputError
from dgraph.ops import OPS
from dgraph.ops.kv.kv_write import in_float8, placed_samples
from dgraph.ops.kv.scales import FLOAT8, LEAST, scaled
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import compare, expected, moved, mutated


@pytest.mark.release
def test_they_compile_for_a_gpu_that_need_not_be_there() -> None:
    pytest.importorskip("triton")
    found = found_by("compiled_float8")
    assert len(found) == 20
    assert all(lines > 100 for lines in found.values())


@pytest.mark.parametrize(
    ("n", "b", "heads", "page", "tile"),
    [
        pytest.param(32, 1, (32, 32), 128, (32, 64), id="few rows of one sequence"),
        pytest.param(2, 1, (32, 32), 128, (16, 32), id="hardly a row"),
        pytest.param(33, 1, (32, 32), 128, (64, 64), id="more rows of one sequence"),
        pytest.param(576, 64, (32, 8), 128, (64, 64), id="many sequences"),
        pytest.param(256, 64, (32, 8), 128, (64, 64), id="many sequences of few rows"),
        pytest.param(2560, 2, (32, 8), 128, (64, 64), id="a thousand rows"),
        pytest.param(2560, 2, (32, 8), 16, (64, 64), id="small pages"),
    ],
)
def test_tiles_of_attention(n: int, b: int, heads: tuple[int, int], page: int, tile: tuple[int, int]) -> None:
    pytest.importorskip("triton")
    from dgraph.ops.attention.triton.attention_tiling import tiling_for

    found = tiling_for(n, b, heads, 128, page, 1280, 2, 132, stored=1)
    assert (found.block_m, found.block_n, found.warps) == (*tile, 4)


def test_every_number_is_rounded_to_the_nearest_ties_to_even(interpreted: Interpreter) -> None:
    """Between any two numbers of the format: their middle, and what is next to it on either side."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    middle = (numbers[1:] + numbers[:-1]) / 2
    between = torch.cat([numbers, middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9))])
    x = torch.cat([between, -between, torch.zeros(-2 * len(between) % 15)]).view(-1, 1, 15)
    x = torch.cat([x, torch.full_like(x[:, :, :1], 448.0)], 2)  # the largest: the scale is 1
    cache, scale = torch.zeros(1, len(x), 1, 16).to(FLOAT8), torch.zeros(1, len(x), 1)
    where = torch.arange(len(x)), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, len(x)]).int()
    args = (x, x, cache, cache.clone(), *where, scale, scale.clone())
    _, (*_, k_scale, v_scale) = interpreted("kv_write", args)
    _, after = interpreted("kv_write", args)
    assert after[2][0].float().equal(x.to(FLOAT8).float())
    assert k_scale.eq(1).all()
    assert v_scale.eq(1).all()


def test_vectors_of_zeros_and_of_tiny_numbers_have_a_scale() -> None:
    x = torch.zeros(3, 8)
    x[1], x[2] = 1e-42, 3e38
    stored, scale = scaled(x)
    assert scale.tolist() == pytest.approx([LEAST, LEAST, 3e38 / 448])
    assert stored.float().isfinite().all()
    assert (stored.float() * scale[:, None])[2].tolist() == pytest.approx([3e38] * 8)


def test_float8_without_scales_is_named(interpreted: Interpreter) -> None:
    sample = next(iter(in_float8(placed_samples(torch.Generator().manual_seed(0)))))
    for call in (OPS["kv_write"].reference, lambda *args: interpreted("kv_write", args)):
        with pytest.raises(
            InputError, match=r"dgraph::kv_write: keys and values in torch\.float8_e4m3fn have scales f32"
        ):
            call(*sample.args[:7])


def test_scales_that_do_not_lie_by_head_are_named(interpreted: Interpreter) -> None:
    sample = next(iter(in_float8(placed_samples(torch.Generator().manual_seed(0)))))
    *args, k_scale, v_scale = sample.args
    told = r"dgraph::kv_write: the scales of a paged cache \[.*\] must be \[.*\] and lie by head, got"
    for wrong in (k_scale.contiguous(), k_scale[:, :, :1]):
        for call in (OPS["kv_write"].reference, lambda *given: interpreted("kv_write", given)):
            with pytest.raises(InputError, match=told):
                call(*args, wrong, v_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kv_write", "kv_update", "kv_pack", "compare_rows", "least_similar"])
def test_what_is_written_on_a_gpu_is_what_the_reference_writes(name: str) -> None:
    for sample in OPS[name].samples(torch.Generator().manual_seed(7)):
        if "float8" in sample.name:
            there = moved(sample.args, "cuda")
            OPS[name].overload(*there)
            want = expected(name, sample.args)
            got = mutated(name, there)
            compare(got, want[len(want) - len(got) :])
