"""Every kernel against its reference: interpreted, in fp32, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from dgraph.errors import InputError
from dgraph.families.quantised import ROW_KINDS, quantised_rows
from dgraph.ops import OPS, Sample
from dgraph.ops.attention.paged_attention import in_float8
from dgraph.ops.draws import pad_rows
from dgraph.ops.lm_head.lm_head import decode_logits
from tests.amounts import every_pair, every_value
from tests.ops.triton.interpreter import Interpreter
from tests.ops.triton.problems import (
    LARGER,
    attention,
    compare,
    expected,
    flat,
    gathering,
    heading,
    importance,
    keeping,
    mutated,
    partial,
    product,
    selection,
    settled,
    two_ranges,
)

SAMPLES = [
    pytest.param(name, sample, id=f"{name}: {sample.name}")
    for name, op in OPS.items()
    if op.kernel is not None
    for sample in op.samples(torch.Generator().manual_seed(7))
]


LONGEST = "more rows than programs"
"""Calls of thousands of programs, which an interpreter runs one by one."""


def _first_two() -> set[tuple[str, str]]:
    """Of the larger calls those that run by default: two of each op."""
    found: dict[str, list[str]] = {}
    for name, what, _ in LARGER:
        if what != LONGEST:
            found.setdefault(name, []).append(what)
    return {(name, what) for name, several in found.items() for what in several[:2]}


BY_DEFAULT = _first_two()


def results(interpreted: Interpreter, name: str, args: tuple[Any, ...], **options: Any) -> list[torch.Tensor]:
    result, after = interpreted(name, args, **options)
    return settled(name, args, flat(result)) + mutated(name, after)


def test_importing_the_ops_does_not_import_triton() -> None:
    code = "import sys, dgraph.ops; sys.exit(any(name.partition('.')[0] == 'triton' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every_value(("block_n", (16, 32)), ("splits", (1, 3)), ("window", (1, 20, 200)))
def test_windows_under_every_tiling(interpreted: Interpreter, block_n: int, splits: int, window: int) -> None:
    """Keys before and after those that all rows of a tile see, shares of what is in the window, none in it at all."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args = attention((9, 0, 5, 2), (150, 0, 12, 33), page=8, d=16)
    limit = args[5]
    for origin in (limit - 1, limit // 3, torch.full_like(limit, 4), limit + 300):
        call = (*args, None, None, origin.int(), window)
        tiling = Tiling(16, block_n, splits, 4, 1)
        compare(results(interpreted, "paged_attention", call, tiling=tiling), expected("paged_attention", call))


@every_value(
    ("block_m, block_n, splits, bulk, parts", [(16, 16, 1, True, 1), (16, 32, 3, False, 1), (64, 8, 8, True, 2)]),
    ("window, scale", [(0, 0.3), (0, -0.3), (40, 0.3)]),
)
def test_two_ranges_and_own_keys_under_every_tiling(
    interpreted: Interpreter,
    block_m: int,
    block_n: int,
    splits: int,
    bulk: bool,
    parts: int,
    window: int,
    scale: float,
) -> None:
    """Gaps before, amid and after the keys that all rows of a tile see; rows that see nothing but themselves."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args = (*attention((9, 0, 5, 2), (150, 0, 12, 33), page=8, d=32)[:6], scale)
    args[5][3] = 0
    tiling = Tiling(block_m, block_n, splits, 4, 1, bulk, parts=parts)
    for call in (two_ranges(args, window=window), two_ranges(in_float8(args), window=window, seed=1)):
        some = (*call[:11], None, *call[12:]), (*call[:12], None, None, None)  # own keys alone, gaps alone
        for each in (call, *some):
            compare(results(interpreted, "paged_attention", each, tiling=tiling), expected("paged_attention", each))


def test_kernels_in_roles_leave_two_ranges_to_the_general_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.attention.triton import attention_float8, attention_roles, paged_attention
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    asked: list[str] = []
    for module in (attention_roles, attention_float8):
        monkeypatch.setattr(module, "fits", lambda *args, name=module.__name__: bool(asked.append(name)))
    monkeypatch.setattr(
        paged_attention, "_attend", defaultdict(lambda: lambda *args, **options: asked.append("general"))
    )
    plain, tiling = attention((9, 5), (70, 33)), Tiling(16, 16, 1, 4, 1, roles=True)
    paged_attention.kernel(*plain, tiling=tiling)
    assert len(asked) == 3
    asked.clear()
    both = two_ranges(plain)
    for call in (both, (*both[:11], None, *both[12:]), (*both[:12], None, None, None)):
        paged_attention.kernel(*call, tiling=tiling)
    assert asked == ["general"] * 3


@pytest.mark.parametrize(("d", "parts"), [(256, 1), (256, 2), (512, 2)])
@pytest.mark.parametrize(("splits", "window"), [(1, 0), (2, 40)])
def test_wide_heads_in_pages_that_are_read_in_bulk(
    interpreted: Interpreter, splits: int, window: int, d: int, parts: int
) -> None:
    """Limits end within a tile, whose other slots hold NaN."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args = attention((9, 0, 5), (75, 0, 33), page=32, d=d, heads=(4, 2))
    tiling = Tiling(16, 32, splits, 8, 2, parts=parts)
    for call in (args, in_float8(args)):
        seen = (None, None) if call is args else ()
        more = (*seen, args[5] - 1, window) if window else ()
        compare(
            results(interpreted, "paged_attention", (*call, *more), tiling=tiling),
            expected("paged_attention", (*call, *more)),
        )


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_samples(interpreted: Interpreter, name: str, sample: Sample) -> None:
    for args in (sample.args, sample.padded):
        if args is not None:
            compare(results(interpreted, name, args), expected(name, args))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        pytest.param(name, args, id=f"{name}: {what}", marks=() if (name, what) in BY_DEFAULT else pytest.mark.release)
        for name, what, args in LARGER
    ],
)
def test_larger_calls(interpreted: Interpreter, name: str, args: tuple[Any, ...]) -> None:
    compare(results(interpreted, name, args), expected(name, args))


@pytest.mark.parametrize(("block_m", "block_n", "splits"), [(16, 16, 1), (16, 32, 3), (64, 16, 8), (32, 16, 5)])
def test_attention_in_any_tiles_and_shares(interpreted: Interpreter, block_m: int, block_n: int, splits: int) -> None:
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args, tiling = attention((9, 0, 5, 2), (70, 0, 12, 33), page=8), Tiling(block_m, block_n, splits, 4, 1)
    for call in (args, in_float8(args)):
        compare(results(interpreted, "paged_attention", call, tiling=tiling), expected("paged_attention", call))


@pytest.mark.parametrize(("queries", "values"), [(1.0, 1.0), (1e5, 1.0), (1e-20, 1.0), (1.0, 1e-12), (1.0, 1e9)])
def test_queries_in_bfloat16_over_keys_in_float8(interpreted: Interpreter, queries: float, values: float) -> None:
    """Products are of float16, which has neither such queries nor such values. Scores are as large as ever."""
    q, k_cache, v_cache, *rest = attention((9, 0, 5, 2), (70, 0, 12, 33))
    q[0], q[1:4] = 0.0, q[1:4] * 2.0**-20  # rows of one tile, each over its own power of two
    args = in_float8(((q * queries).bfloat16(), k_cache / queries, v_cache * values, *rest))
    (got,) = results(interpreted, "paged_attention", args)
    (want,) = expected("paged_attention", (args[0].float(), *args[1:]))
    compare([got.float() / values], [want / values], 1e-2)


@pytest.mark.parametrize(("d", "window"), [(40, 0), (64, 20)])
@pytest.mark.parametrize(("page", "splits"), [(8, 1), (32, 3)])
def test_parts_of_values_that_pointers_read(
    interpreted: Interpreter, page: int, splits: int, d: int, window: int
) -> None:
    """Pages smaller than a block and as large; parts of equal width, of which the last is not full."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args = attention((9, 0, 5, 2), (70, 0, 12, 33), page=page, d=d)
    tiling = Tiling(16, 16, splits, 4, 1, bulk=False, parts=2)
    for call in (args, in_float8(args)):
        seen = (None, None) if call is args else ()
        more = (*seen, args[5] - 1, window) if window else ()
        want = expected("paged_attention", (*call, *more))
        compare(results(interpreted, "paged_attention", (*call, *more), tiling=tiling), want)


@pytest.mark.parametrize(("block_m", "splits"), [(16, 1), (64, 3)])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_attention_rotates_queries_that_it_loads(
    interpreted: Interpreter, block_m: int, splits: int, scale: float
) -> None:
    """Queries lie in rows of something wider, as those of a projection of q, k and v do; padding rows hold NaN."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    q, *rest, _ = attention((9, 0, 5, 2), (70, 0, 12, 33), page=8)
    wide = torch.cat([q, torch.full_like(q, torch.nan)], 1)
    angle = torch.rand(len(q), 1, q.shape[2] // 2).mul(6).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    turned = OPS["rope"].reference(q, cos, sin)
    live = int(rest[3][-1])
    cos[live:] = torch.nan
    args = (wide[:, : q.shape[1]], *rest, scale)
    got, _ = interpreted("paged_attention", args, tiling=Tiling(block_m, 16, splits, 4, 1), rotation=(cos, sin))
    compare([got[:live]], [expected("paged_attention", (turned, *rest, scale))[0][:live]])


@every_value(
    ("kind", ROW_KINDS),
    ("splits, heads, d", [(1, (4, 2), 16), (3, (4, 2), 16), (1, (6, 3), 20), (3, (6, 3), 20), (12, (20, 4), 128)]),
)  # the last ones are more than are read at once
def test_attention_rounds_the_rows_that_it_gives(
    interpreted: Interpreter, splits: int, heads: tuple[int, int], d: int, kind: str
) -> None:
    """The same numbers as of its own results; a row that sees nothing is zeros, one that is not finite has no scale."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    args, tiling = attention((9, 0, 5, 2), (70, 0, 12, 33), page=8, heads=heads, d=d), Tiling(16, 16, splits, 4, 1)
    args[5][3], live = 0, int(args[4][-1])
    args[2][args[3][3, 0], 0, 0, 0] = torch.inf  # a value that the last sequence sees
    plain, _ = interpreted("paged_attention", args, tiling=tiling)
    (values, scales), _ = interpreted("paged_attention", args, tiling=tiling, kind=kind)
    want, by = quantised_rows(flat(plain)[0].flatten(1), kind)
    compare([scales[:live]], [by[:live]], 1e-6)
    assert values.dtype == want.dtype
    assert not values[3].float().any()
    assert scales[:live].isnan().flatten().tolist() == [False] * 14 + [True] * 2
    # A sum in another order may lie on the other side of the middle of two numbers.
    apart = (values[:live].float() != want[:live].float()).float().mean()
    assert apart < 0.01
    exact = values[:live].float() * scales[:live], want[:live].float() * by[:live]
    compare([exact[0].nan_to_num()], [exact[1].nan_to_num()], 0.08)


def test_what_is_not_finite_stays_so_in_a_share_of_no_weight(interpreted: Interpreter) -> None:
    """The last keys score so low that their weight is zero; shares that no key is in leave no trace."""
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    q, k_cache, v_cache, table, *rest = attention((2, 2), (40, 40), page=8, heads=(2, 2), padding=0)
    k_cache[:] = 0
    for s in range(2):
        k_cache[table[s, :2].long()] = 300 * q[2 * s].sign()  # of each sequence the first 16 of 40 keys
    v_cache[table[1, 4], 7, 0, 0] = torch.inf
    args, tiling = (q, k_cache, v_cache, table, *rest), Tiling(16, 16, 5, 4, 1)
    plain, _ = interpreted("paged_attention", args, tiling=tiling)
    (values, scales), _ = interpreted("paged_attention", args, tiling=tiling, kind="int8")
    want = quantised_rows(flat(plain)[0].flatten(1), "int8")
    assert scales.isnan().flatten().tolist() == want[1].isnan().flatten().tolist() == [False] * 2 + [True] * 2
    assert torch.equal(values, want[0])


def test_a_limit_beyond_the_page_table_reads_nothing_outside(interpreted: Interpreter) -> None:
    args = list(attention((4,), (32,), page=16, padding=0))
    want = expected("paged_attention", tuple(args))
    args[5] = torch.where(args[5] == 32, 10_000, args[5])
    compare(results(interpreted, "paged_attention", tuple(args)), want)


@every_value(
    ("block_n, splits, bulk", [(8, 1, True), (16, 3, False), (32, 2, True)]),
    ("block_m, least, few", [(16, 0, 0), (32, 16, 0), (64, 0, 32), (64, 16, 32)]),
)
def test_partial_attention_in_any_tiles_and_shares(
    interpreted: Interpreter, block_m: int, least: int, few: int, block_n: int, splits: int, bulk: bool
) -> None:
    from dgraph.ops.attention.triton import attention_tiling, partial_attention

    exact = attention_tiling.Tiling(block_m, 16, splits, 4, 1, bulk)
    tiling = partial_attention.Tiling(exact, block_n, 1, least, few, changes=16)
    for share, full in ((0.3, ()), (0.6, (3,)), (1.1, (0,)), (-1.0, (0,))):
        args = partial((18, 0, 5, 9), (70, 0, 12, 33), share=share, full=full, page=16, heads=(2, 1))
        args = in_float8(args) if share == 0.6 else args
        got = results(interpreted, "partial_attention", args, tiling=tiling)
        compare(got, expected("partial_attention", args))


def test_rows_of_one_sequence_may_be_full_next_to_others(interpreted: Interpreter) -> None:
    args = list(partial((18, 7), (70, 33), padding=0))
    args[7] = torch.arange(25) % 4 == 0
    compare(results(interpreted, "partial_attention", tuple(args)), expected("partial_attention", tuple(args)))


def test_partial_attention_with_a_negative_scale(interpreted: Interpreter) -> None:
    args = list(partial((9, 7), (30, 33)))
    args[12] = -args[12]
    compare(results(interpreted, "partial_attention", tuple(args)), expected("partial_attention", tuple(args)))


def test_a_cache_without_contiguous_slots_is_refused(interpreted: Interpreter) -> None:
    args = list(partial((3,), (9,)))
    args[6] = args[6].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(InputError, match=r"a slot of c_cache .* must be contiguous"):
        interpreted("partial_attention", tuple(args))


def test_lists_of_any_length_give_the_same_importance(interpreted: Interpreter) -> None:
    args = importance((70, 12), share=0.9, d=8)
    for block in (16, 32, 128):
        compare(results(interpreted, "importance", args, block=block), expected("importance", args))


def test_importance_sums_to_heads_times_rows(interpreted: Interpreter) -> None:
    q, k, masked, cu_rows, *rest = importance((40, 9, 32))
    (score,) = results(interpreted, "importance", (q, k, masked, cu_rows, *rest))
    for start, end in zip(cu_rows.tolist(), cu_rows.tolist()[1:], strict=False):
        assert score[start:end].sum().item() == pytest.approx(q.shape[1] * int(masked[start:end].sum()), rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_selections_in_tiles_of_any_size(interpreted: Interpreter, seed: int) -> None:
    args = selection((33, 20, 1, 12), alpha=1.0 + seed / 2, share=0.95 - seed / 10, seed=seed, shift=seed % 2)
    for block in (16, 64):
        compare(results(interpreted, "select_tokens", args, block=block), expected("select_tokens", args), 0)


def test_kept_rows_beyond_the_capacity_are_dropped(interpreted: Interpreter) -> None:
    keep, cu_rows, _ = keeping((300, 300), -1)
    index, offsets = results(interpreted, "keep_index", (keep, cu_rows, 100))
    everything, same = OPS["keep_index"].reference(keep, cu_rows, -1)
    assert index.equal(everything[:100])
    assert offsets.equal(same)


def test_rows_of_any_alignment_are_copied(interpreted: Interpreter) -> None:
    values, index = gathering(12, 9)
    storage = torch.arange(12 * 9, dtype=torch.int16)
    values = [*values, storage[1:97].view(12, 8), storage.as_strided((12, 2), (9, 1), 3), values[0][:, :0]]
    compare(results(interpreted, "compact", (values, index)), expected("compact", (values, index)), 0)


@pytest.mark.parametrize(("block", "splits"), [(64, 1), (64, 7), (1024, 3)])
def test_a_vocabulary_in_any_shares(interpreted: Interpreter, block: int, splits: int) -> None:
    from dgraph.ops.lm_head.triton.lm_head import Tiling

    h, weight, bias, masked, temperature, seed, _, suppress = heading(13)
    logits = torch.nn.functional.linear(h, weight, bias)
    logits[0] = -torch.inf
    logits[0, 500] = 3.0
    logits[1, :600] = -torch.inf
    logits[2, ::3] = 30.0  # the largest logit many times
    masked[:3] = True
    call = (logits, masked, temperature, seed, suppress, torch.empty(13, dtype=torch.int64), *torch.empty(3, 13))
    _, after = interpreted("lm_head", call, function="reduce_logits", tiling=Tiling(block, splits))
    want = decode_logits(logits, temperature, seed, suppress)
    assert after[5][masked].equal(want.token[masked])
    compare([x[masked] for x in after[6:]], [x[masked] for x in want[1:]])
    for found, filler in zip(after[5:], (-1, -torch.inf, -torch.inf, torch.inf), strict=True):
        assert (found[~masked] == filler).all()


@every_value(("which", ["scattered", "none", "all", "the last", "a whole chunk"]), ("chunk", [1, 7, 16, 100]))
def test_masked_rows_are_projected_whether_listed_or_not(interpreted: Interpreter, which: str, chunk: int) -> None:
    h, weight, bias, masked, temperature, seed, _, suppress = heading(21, vocab=50, d=20, bias=chunk != 7)
    row = torch.arange(21)
    masked = {
        "scattered": masked & (row % 3 > 0),
        "none": row < 0,
        "all": row >= 0,
        "the last": row == 20,
        "a whole chunk": row < chunk,
    }[which]
    h = torch.where(masked[:, None], h, torch.nan)
    views = torch.cat([h, h], 1)[:, :20], weight, bias, masked, temperature, seed
    args = (*(None if x is None else pad_rows(x, 4) if len(x) == 21 else x for x in views), chunk, suppress)
    args[3][21:] = False
    want = expected("lm_head", args)
    for listed in (False, True):
        got = results(interpreted, "lm_head", args, listed=listed)
        compare(got, want)
        assert (got[0] >= 0).equal(args[3])
    for room in (int(args[3].sum()), 25):
        front = torch.full((room, 40), torch.nan)[:, :20]
        front[: int(args[3].sum())] = args[0][args[3]]
        compare(results(interpreted, "lm_head", (front, *args[1:], True)), want)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 600])
def test_masked_rows_are_listed(interpreted: Interpreter, count: int) -> None:
    masked = torch.zeros(600, dtype=torch.bool)
    masked[torch.randperm(600)[:count]] = True
    for chunk in (1, 100, 256, 600):
        filled = torch.full((600,), 7), *torch.full((3, 600), 7.0)
        (index, counts), after = interpreted("lm_head_rows", (masked, chunk, *filled), function="list_candidates")
        assert index[:count].equal(masked.nonzero()[:, 0].int())
        assert counts.tolist() == [min(max(count - first, 0), chunk) for first in range(0, 600, chunk)]
        for found, other in zip(after[2:], (-1, -torch.inf, -torch.inf, torch.inf), strict=True):
            assert found.equal(torch.where(masked, 7, other).to(found.dtype))


def test_chunks_after_the_last_masked_row_read_and_write_nothing(interpreted: Interpreter) -> None:
    from dgraph.ops.lm_head.triton.lm_head_rows import Listed

    index, counts = torch.full((4,), 1 << 30, dtype=torch.int32), torch.tensor([4, 0], dtype=torch.int32)
    none = Listed(index, counts)
    some, _ = interpreted("lm_head_rows", (torch.zeros(9, 5), none, 4), function="gathered")  # far from what there is
    assert some.shape == (4, 5)
    logits, found = torch.zeros(4, 30), (torch.full((9,), 7), *torch.full((3, 9), 7.0))
    rows = torch.ones(9, dtype=torch.bool), torch.zeros(9), torch.arange(9)
    _, after = interpreted("lm_head", (logits, *rows, -1, *found), function="reduce_logits", listed=none)
    assert all((x == 7).all() for x in after[5:])


@pytest.mark.parametrize(("splits", "programs"), [(1, 3), (3, 7), (2, 1)])
def test_listed_rows_in_any_shares_and_programs(interpreted: Interpreter, splits: int, programs: int) -> None:
    from dgraph.ops.lm_head.triton.lm_head import Tiling
    from dgraph.ops.lm_head.triton.lm_head_rows import Listed

    h, weight, bias, masked, temperature, seed, _, suppress = heading(13)
    index = torch.tensor([*range(11, 0, -1), 99, 99], dtype=torch.int32)
    logits = torch.nn.functional.linear(h, weight, bias)[index.clamp(max=12)]
    found = torch.full((13,), 7), *torch.full((3, 13), 7.0)
    call = (logits, masked, temperature, seed, suppress, *found)
    listed, tiling = Listed(index, torch.tensor([13, 11], dtype=torch.int32)), Tiling(128, splits)
    _, after = interpreted("lm_head", call, function="reduce_logits", tiling=tiling, listed=listed, programs=programs)
    rows = index[:11].long()
    compare([x[rows] for x in after[5:]], decode_logits(logits[:11], temperature[rows], seed[rows], suppress))
    assert all((x[[0, 12]] == 7).all() for x in after[5:])


def test_many_rows_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.lm_head.triton import lm_head

    seen: list[tuple[str, int]] = []
    for name in ("_all_rows", "_listed_rows"):
        monkeypatch.setattr(lm_head, name, lambda *args, name=name: seen.append((name, args[6])))
    for rows, listed in ((lm_head.FEW, None), (lm_head.FEW + 1, None), (9, True), (999, False), (0, True)):
        assert [len(x) for x in lm_head.kernel(*heading(rows, vocab=9, chunk=100), listed=listed)] == [rows] * 4
    assert seen == [("_all_rows", 100), ("_listed_rows", 100), ("_listed_rows", 9), ("_all_rows", 100)]


def test_wrong_settings_are_reported_as_by_the_references(interpreted: Interpreter) -> None:
    q, k, *rest, _ = importance((4,))
    for name, args, message in (
        ("importance", (q, k, *rest, 2), "pool must be odd"),
        ("importance", (q[:, :7], k, *rest, 3), "query heads must be a multiple"),
        ("select_tokens", (*selection((4,))[:-2], 0.0, 0), "alpha must be above 0"),
        ("lm_head", (*heading(3)[:-2], 0, -1), "max_num_logits must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            interpreted(name, args)


@every_pair(
    ("name", ["rows_linear", "rows_glu"]),
    ("splits", [1, 3]),
    ("bulk", [False, True]),
    ("rows", [0, 1, 15, 16, 17, 32, 33, 48, 49, 70, 100]),
)
def test_a_product_in_any_tiles_and_shares(
    interpreted: Interpreter, name: str, rows: int, bulk: bool, splits: int
) -> None:
    from dgraph.ops.products.triton.rows_linear import Tiles, Tiling

    args = product(rows, 100, 144, 112, bias=rows == 33)
    few, some = Tiles(32, 32, 16, 1, up_to=32, weight_first=True), Tiles(16, 64, 16, 1, up_to=48)
    for tiles in (
        (few, some, Tiles(64, 64, 32, 1)),
        (Tiles(32, 128, 16, 1, weight_first=True),),
        (Tiles(128, 64, 16, 1),),
    ):
        tiling = Tiling(tiles, warps=4, splits=splits, group=2, bulk=bulk)
        compare(results(interpreted, name, args, tiling=tiling), expected(name, args))


def test_gates_of_any_size_are_finite(interpreted: Interpreter) -> None:
    """silu of a large negative number is 0, of a large positive one that number."""
    x, _, _, cu_rows = product(4, 4, 16, 1)
    bias = torch.tensor([-1e4, -90.0, 90.0, 1e4, *(2.0,) * 4])
    args = x, torch.zeros(8, 16), bias, cu_rows
    (out,) = results(interpreted, "rows_glu", args)
    assert out.equal(torch.tensor([0.0, 0.0, 180.0, 2e4]).expand(4, 4))


@pytest.mark.parametrize("rows", [0, 3, 9])
def test_a_unit_of_few_rows_of_16_bits_is_the_product_of_a_library(interpreted: Interpreter, rows: int) -> None:
    """And an activation of the live rows; other rows may hold anything."""
    x, weight, bias, cu_rows = product(rows, 9, 48, 80, bias=True)
    args = *(t.half() for t in (x, weight, bias)), cu_rows
    compare(results(interpreted, "rows_glu", args), expected("rows_glu", args), 2e-3)


def test_the_cases_of_a_product_follow_each_other() -> None:
    from dgraph.ops.products.triton.product_cases import ANY
    from dgraph.ops.products.triton.rows_linear import Tiles, Tiling

    cases = [(above, up_to, tiles.rows, tiles.columns) for above, up_to, tiles in Tiling().cases()]
    assert cases == [(0, 16, 16, 128), (16, 32, 32, 128), (32, 64, 64, 128), (64, 768, 128, 128), (768, ANY, 128, 256)]
    for tiles in (
        (),
        (Tiles(64, 64, 32, 2, up_to=64),),
        (Tiles(64, 64, 32, 2), Tiles(64, 64, 32, 2)),
        tuple(Tiles(16, 16, 16, 1, up_to=up_to) for up_to in (*range(6), ANY)),
    ):
        with pytest.raises(ValueError, match="rising row counts, the last up to any"):
            Tiling(tiles)


def test_a_product_of_sizes_that_do_not_fit_is_refused(interpreted: Interpreter) -> None:
    x, weight, _, cu_rows = product(3, 4, 16, 8)
    with pytest.raises(InputError, match=r"weight \[d_out, d_in\], got \[4, 15\] and \[8, 16\]"):
        interpreted("rows_linear", (x[:, :15], weight, None, cu_rows))
    with pytest.raises(InputError, match=r"bias must be \[8\], got \[7\]"):
        interpreted("rows_linear", (x, weight, torch.zeros(7), cu_rows))
    with pytest.raises(InputError, match=r"weight \[2F, d_in\] \(gate rows, then up rows\), got .* and \[7, 16\]"):
        interpreted("rows_glu", (x, weight[:7], None, cu_rows))
    with pytest.raises(InputError, match=r"bias must be \[8\], got \[4\]"):
        interpreted("rows_glu", (x, weight, torch.zeros(4), cu_rows))
