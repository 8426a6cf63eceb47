"""Attention by warps in roles: when it is planned, that it compiles here, and on a GPU that it is right; and the tiles
of wide heads.
"""

from __future__ import annotations

import pytest
import torch

from dgraph.ops import OPS
from tests.ops.triton.compiled import found_by
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import attention, compare, expected, moved

pytest.importorskip("triton", reason="needs Triton")

HOPPER = 132
"""Multiprocessors of an H200."""


@pytest.mark.parametrize(
    ("n", "b", "heads", "d", "page", "itemsize", "roles"),
    [
        pytest.param(4096, 16, (32, 32), 128, 128, 2, True, id="256 rows a sequence"),
        pytest.param(20480, 16, (28, 4), 128, 128, 2, True, id="packed heads"),
        pytest.param(2048, 64, (32, 8), 128, 256, 2, True, id="blocks of 32 rows"),
        pytest.param(320, 64, (32, 8), 128, 128, 2, False, id="a few rows that were kept"),
        pytest.param(32, 1, (32, 32), 128, 128, 2, False, id="one sequence"),
        pytest.param(256, 1, (32, 32), 128, 128, 2, False, id="too few tiles for the device"),
        pytest.param(4096, 16, (32, 32), 64, 128, 2, False, id="other heads"),
        pytest.param(4096, 16, (32, 32), 128, 64, 2, False, id="small pages"),
        pytest.param(4096, 16, (32, 32), 128, 128, 4, False, id="fp32"),
    ],
)
def test_when_it_is_planned(
    n: int, b: int, heads: tuple[int, int], d: int, page: int, itemsize: int, roles: bool
) -> None:
    from dgraph.ops.attention.triton.attention_tiling import tiling_for

    assert tiling_for(n, b, heads, d, page, 1280, itemsize, HOPPER).roles == roles


def test_elsewhere_the_tiling_is_one_of_tiles(interpreted: Interpreter) -> None:
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args = attention((9, 0, 5, 2), (70, 0, 12, 33), page=16)
    got, _ = interpreted("paged_attention", args, tiling=Tiling(32, 16, 1, 4, 1, roles=True))
    compare([got], expected("paged_attention", args))


@pytest.mark.release
def test_it_compiles_for_the_device_it_is_made_for() -> None:
    found = found_by("compiled_roles")
    # A first block, one with a mask, one without, and the last values: 8 instructions of 16 each, for two groups.
    assert found["products"] == 2 * 8 * (1 + 2 + 2 + 1)
    assert found["loads"] == 2 * 2, "keys and values, each in two halves of a row of 128 bytes"
    assert found["registers moved between roles"]
    assert found["shared"] < 227 << 10


@pytest.mark.release
def test_it_compiles_for_keys_in_float8() -> None:
    found = found_by("compiled_roles", "float8")
    # A first block, one with a mask and one without: 4 instructions for each number of the queries; and values of each
    # block before, and of the last: 4 of 16 keys.
    assert found["scores"] == 3 * 2 * 4
    assert found["products"] == found["scores"] + 3 * 4
    assert found["loads"] == 4, "keys, values and the scales of both"
    assert found["registers moved between roles"]
    assert 2 * found["shared"] < 227 << 10, "two programs on a multiprocessor"
    assert found["stack"] == 0


def test_a_query_in_bf16_is_two_numbers_of_float8() -> None:
    """Exactly, if it is a 2**-9th of the largest of its row or more; else as far as float8 reaches."""
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).float()
    x = every[every < 2**8]  # as scaled: the largest of a row is at least 2**7
    high = x.to(torch.float8_e4m3fn).float()
    low = (x - high).to(torch.float8_e4m3fn).float()
    wide = x >= 2**-2
    assert wide.sum() == 10 * 128
    assert high[wide].add(low[wide]).equal(x[wide])
    assert (high + low - x)[~wide].abs().max() <= 2**-10


@pytest.mark.parametrize(
    ("n", "b", "heads", "d", "page", "roles", "splits"),
    [
        pytest.param(32, 1, (32, 32), 128, 128, True, 3, id="one sequence"),
        pytest.param(144, 16, (32, 8), 128, 64, True, 2, id="a few rows that were kept"),
        pytest.param(576, 64, (32, 8), 128, 128, True, 1, id="many sequences"),
        pytest.param(32, 1, (32, 32), 128, 32, False, 8, id="small pages"),
        pytest.param(32, 1, (32, 32), 64, 128, False, 8, id="other heads"),
        pytest.param(1, 1, (128, 1), 128, 128, False, 8, id="a group larger than a tile"),
    ],
)
def test_when_it_is_planned_for_keys_in_float8(
    n: int, b: int, heads: tuple[int, int], d: int, page: int, roles: bool, splits: int
) -> None:
    from dgraph.ops.attention.triton.attention_tiling import tiling_for

    found = tiling_for(n, b, heads, d, page, 1088, 2, HOPPER, stored=1)
    assert (found.roles, found.splits) == (roles, splits)


@pytest.mark.parametrize(
    ("n", "b", "heads", "d", "page", "itemsize", "sizes"),
    [
        pytest.param(256, 1, (16, 8), 256, 256, 2, (128, 64, 4, 8, 2, 1), id="a window layer"),
        pytest.param(2048, 8, (16, 8), 256, 256, 2, (128, 64, 1, 8, 2, 1), id="a window layer of eight sequences"),
        pytest.param(256, 1, (16, 2), 512, 256, 2, (128, 32, 2, 8, 2, 2), id="a full layer"),
        pytest.param(2048, 8, (16, 2), 512, 256, 2, (128, 64, 1, 8, 1, 2), id="a full layer of eight sequences"),
        pytest.param(8192, 32, (16, 2), 512, 256, 2, (128, 64, 1, 8, 1, 2), id="a full layer of 32 sequences"),
        pytest.param(2048, 8, (16, 2), 512, 32, 2, (128, 32, 1, 8, 2, 2), id="small pages"),
        pytest.param(2048, 8, (16, 2), 512, 16, 2, (64, 32, 1, 8, 2, 1), id="pages that no copy engine reads"),
        pytest.param(8, 1, (16, 2), 512, 256, 2, (64, 32, 16, 8, 2, 1), id="few rows"),
        pytest.param(1, 1, (16, 2), 512, 256, 2, (16, 32, 16, 8, 2, 1), id="one row"),
        pytest.param(1, 1, (128, 1), 512, 256, 2, (128, 32, 16, 8, 2, 2), id="a group as large as a tile"),
        pytest.param(2048, 8, (16, 2), 512, 256, 4, (32, 32, 1, 4, 1, 1), id="fp32"),
    ],
)
def test_tiles_of_wide_heads(
    n: int, b: int, heads: tuple[int, int], d: int, page: int, itemsize: int, sizes: tuple[int, ...]
) -> None:
    """Rows, keys, shares, warps, stages and parts."""
    from dgraph.ops.attention.triton.attention_tiling import tiling_for

    found = tiling_for(n, b, heads, d, page, 2048, itemsize, HOPPER)
    assert (found.block_m, found.block_n, found.splits, found.warps, found.stages, found.parts) == sizes


def test_kernels_whose_tiles_have_no_parts_get_none() -> None:
    from dgraph.ops.attention.triton import partial_attention, sparse_attention

    for n, b in ((256, 1), (2048, 8)):
        exact = partial_attention.tiling_for(n, b, (16, 2), 512, 256, 2048, 2, HOPPER).exact
        kept = sparse_attention.tiling_for(n, b, (16, 2), 512, 4096, 2, HOPPER, dense=False).kept
        for tiling in (exact, kept):
            assert (tiling.block_m, tiling.block_n, tiling.warps, tiling.stages, tiling.parts) == (64, 32, 8, 2, 1)


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("rows", [1, 32, 256, 1024, 32768])
def test_a_tile_of_wide_heads_fits_into_shared_memory(rows: int, sequences: int) -> None:
    """Queries, and keys and values of every iteration in flight, in bf16."""
    from dgraph.ops.attention.triton.attention_tiling import tiling_for

    for d, kv_heads in ((256, 8), (512, 2)):
        tiling = tiling_for(rows, sequences, (16, kv_heads), d, 256, 4096, 2, HOPPER)
        keys = tiling.stages * tiling.block_n
        assert 2 * (d * (tiling.block_m + keys) + d // tiling.parts * keys) < 227 << 10


@pytest.mark.release
def test_wide_heads_compile_with_their_sums_in_registers() -> None:
    """What a thread keeps elsewhere, bytes: at a head of 512 addresses, of which iterations read two numbers."""
    found = found_by("compiled_wide")
    assert len(found) == 12
    for what, one in found.items():
        assert one["shared"] < 227 << 10, what
        if "bf16" in what:
            assert one["stack"] <= (96 if "sliding" in what else 320), what


CASES = {
    "whole tiles": ((256, 256), (640, 640), (32, 32)),
    "heads in a group of 7": ((150, 40), (300, 256), (28, 4)),
    "ragged": ((5, 130, 0, 1, 64), (300, 77, 0, 128, 1000), (32, 8)),
    "one key": ((1,), (1,), (32, 32)),
    "many sequences": ((3,) * 150, (140,) * 150, (32, 8)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_on_a_gpu(case: str, dtype: torch.dtype, rotated: bool) -> None:
    """Rows see all keys or a part of them, unwritten slots and padding rows hold NaN (`problems.attention`)."""
    from dgraph.ops.attention.triton import attention_roles
    from dgraph.ops.attention.triton.attention_tiling import Tiling
    from dgraph.ops.attention.triton.paged_attention import blocks_of, kernel
    from dgraph.ops.triton import hopper

    counts, lengths, heads = CASES[case]
    q, *rest, scale = moved(attention(counts, lengths, page=128, heads=heads, d=128, seed=len(case)), "cpu", dtype)
    live = int(rest[3][-1])
    angle = torch.rand(len(q), 1, q.shape[2] // 2).mul(6).repeat(1, 1, 2)
    rotation = angle.cos().to(dtype), angle.sin().to(dtype)
    turned = OPS["rope"].reference(q, *rotation) if rotated else q
    want = expected("paged_attention", moved((turned, *rest, scale), "cpu", torch.float32))
    there, cos_sin = moved((q, *rest, scale), "cuda"), moved(rotation, "cuda") if rotated else None
    if not hopper.understood(there[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    assert attention_roles.fits(there[0], there[1])
    assert blocks_of(there[1], there[2], attention_roles.KEYS) is not None
    got = kernel(*there, tiling=Tiling(64, 64, 1, 4, 5, roles=True), rotation=cos_sin)
    compare([got[:live]], [want[0][:live]], 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("rotated", [False, True], ids=["as it is", "rotated"])
@pytest.mark.parametrize("case", CASES)
def test_it_on_a_gpu_with_keys_in_float8(case: str, rotated: bool, splits: int) -> None:
    from dgraph.ops.attention.paged_attention import in_float8
    from dgraph.ops.attention.triton import attention_float8
    from dgraph.ops.attention.triton.attention_tiling import Tiling
    from dgraph.ops.attention.triton.paged_attention import blocks_of, kernel
    from dgraph.ops.triton import hopper

    counts, lengths, heads = CASES[case]
    q, *rest = in_float8(attention(counts, lengths, page=128, heads=heads, d=128, seed=len(case)))
    q, live = q.to(torch.bfloat16), int(rest[3][-1])
    angle = torch.rand(len(q), 1, q.shape[2] // 2).mul(6).repeat(1, 1, 2)
    rotation = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
    turned = OPS["rope"].reference(q, *rotation) if rotated else q
    (want,) = expected("paged_attention", (turned.float(), *rest))
    there, cos_sin = moved((q, *rest), "cuda"), moved(rotation, "cuda") if rotated else None
    if not hopper.understood(there[0].device):
        pytest.skip("needs a GPU of compute capability 9.0")
    assert attention_float8.fits(there[0], there[1])
    assert blocks_of(there[1], there[2], attention_float8.KEYS) is not None
    got = kernel(*there, tiling=Tiling(64, 64, splits, 4, 5, roles=True), rotation=cos_sin)
    compare([got[:live]], [want[:live]], 2e-2)
