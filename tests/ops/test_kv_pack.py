"""dgraph::kv_pack: budgets of heads against an independent selection, what is copied, and what stays as it was."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.attention.sparse import DENSE, REPACK, REUSE, SELECT
from dgraph.ops.draws import cu_rows_of
from dgraph.ops.kv import kv_pack
from tests.ops.triton.interpreter import Interpreter

D = 4
LAYER = 1
BOTH = pytest.mark.parametrize("interpret", [False, True], ids=["reference", "interpreted"])


@dataclass
class Packed:
    """What a call wrote, and the rows it read: positions of each head of each sequence."""

    kept: list[list[list[int]]]
    count: Tensor
    index: Tensor
    k: Tensor
    v: Tensor


def draw(*counts: int, heads: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(sum(counts), heads, generator=torch.Generator().manual_seed(seed))


def packed(
    score: Tensor,
    counts: list[int],
    windows: list[tuple[int, int]],
    *,
    interpreter: Interpreter | None = None,
    actions: list[int] | None = None,
    had: Tensor | None = None,
    index: Tensor | None = None,
    room: int = 64,
    ratio: float = 0.0,
    pairs: int = 0,
    heads: str = "uniform",
    floor: float = 0.0,
    pool: int = 1,
    pooling: str = "max",
    recent: int = 0,
) -> Packed:
    """A call on key rows at positions 0, 1, ... of each sequence; entries that it leaves alone are checked."""
    m, kv_heads = score.shape
    b = len(counts)
    actions = actions or [SELECT] * b
    k, v = torch.randn(2, m, kv_heads, D, generator=torch.Generator().manual_seed(m))
    positions = torch.cat([torch.arange(n) for n in counts])
    cu_keys = cu_rows_of(counts)
    start = torch.arange(b).int() * room
    count = torch.full((b, kv_heads), 2, dtype=torch.int32) if had is None else had.clone()
    k_pack, v_pack = torch.full((2, b * room, D), 7.5)
    index = torch.full((b * room,), -5, dtype=torch.int32) if index is None else index.clone()
    before, index_before = count.clone(), index.clone()
    where = (positions, cu_keys, torch.tensor(windows).int().view(b, 2), torch.tensor(actions).int())
    settings = (LAYER, ratio, pairs, heads, floor, pool, pooling, recent)
    starts = torch.stack([start + 999, start])
    args = (score, k, v, *where, k_pack, v_pack, count, index, starts, *settings)
    if interpreter is None:
        torch.ops.dgraph.kv_pack(*args)
    else:
        _, args = interpreter("kv_pack", args)
        k_pack, v_pack, count, index = args[7:11]
    kept: list[list[list[int]]] = []
    for s in range(b):
        used = int(count[s].sum()) if actions[s] in (SELECT, REPACK) else 0
        runs = index[s * room : s * room + used].split(count[s].tolist()) if used else [index[:0]] * kv_heads
        for head, run in enumerate(runs):
            at = s * room + int(count[s, :head].sum()) + torch.arange(len(run))
            rows = int(cu_keys[s]) + run.long()
            assert torch.equal(k_pack[at], k[rows, head])
            assert torch.equal(v_pack[at], v[rows, head])
        rest = slice(s * room + used, (s + 1) * room)
        assert (k_pack[rest] == 7.5).all()
        assert (v_pack[rest] == 7.5).all()
        assert torch.equal(index[rest], index_before[rest])
        if actions[s] != SELECT:
            assert torch.equal(count[s], before[s])
        kept.append([run.tolist() for run in runs])
    return Packed(kept, count, index, k_pack, v_pack)


def naive(score: Tensor, window: tuple[int, int], sizes: list[int]) -> list[list[int]]:
    """The `sizes` best positions of each head outside of the window, by a sort of (score, position)."""
    outside = [p for p in range(len(score)) if not window[0] <= p < window[1]]
    return [sorted(sorted(outside, key=lambda p: (-float(score[p, h]), p))[:size]) for h, size in enumerate(sizes)]


@pytest.fixture
def runner(request: pytest.FixtureRequest, interpret: bool) -> Interpreter | None:
    if not interpret:
        return None
    pytest.importorskip("triton", minversion="3.7")
    return request.getfixturevalue("interpreted")


@BOTH
def test_the_best_of_each_head(runner: Interpreter | None) -> None:
    score, window = draw(40, 3), (30, 40)
    found = packed(score, [40, 3], [window, (0, 1)], pairs=7, interpreter=runner)
    assert found.kept == [naive(score[:40], window, [7] * 3), naive(score[40:], (0, 1), [2] * 3)]
    assert found.kept[0] == [score[:30, head].topk(7).indices.sort().values.tolist() for head in range(3)], (
        "and so says torch.topk"
    )
    assert found.count.tolist() == [[7] * 3, [2] * 3]


@BOTH
def test_negative_scores_and_zeros_of_both_signs(runner: Interpreter | None) -> None:
    score = torch.tensor([-3.0, -0.0, 0.0, -1.0, 2.0, -0.5, 0.0, -2.0])[:, None]
    for pairs, kept in ((1, [4]), (2, [1, 4]), (3, [1, 2, 4]), (5, [1, 2, 4, 5, 6]), (6, [1, 2, 3, 4, 5, 6])):
        assert packed(score, [8], [(8, 8)], pairs=pairs, interpreter=runner).kept == [[kept]]


@BOTH
def test_ties_go_to_the_lower_position(runner: Interpreter | None) -> None:
    score = torch.tensor([1.0, 2, 1, 2, 1, 1])[:, None].repeat(1, 2)
    found = packed(score, [6], [(6, 6)], pairs=4, interpreter=runner)
    assert found.kept == [[[0, 1, 2, 3]] * 2]
    assert packed(score * 0, [6], [(1, 2)], pairs=3, interpreter=runner).kept == [[[0, 2, 3]] * 2]


@BOTH
@pytest.mark.parametrize("heads", ["uniform", "mass", "adaptive"])
def test_a_budget_of_all_candidates_keeps_everything(runner: Interpreter | None, heads: str) -> None:
    score = draw(9) * torch.tensor([100.0, 1, 0])
    for budget in ({"pairs": 5}, {"pairs": 50}, {"ratio": 1.0}):
        found = packed(score, [9], [(2, 6)], heads=heads, floor=0.3, interpreter=runner, **budget)
        assert found.kept == [[[0, 1, 6, 7, 8]] * 3]


@pytest.mark.parametrize(("ratio", "size"), [(0.05, 0), (0.1, 1), (0.19, 1), (0.29, 2), (0.5, 5), (0.7, 7), (0.99, 9)])
def test_a_share_of_the_candidates_is_rounded_down(ratio: float, size: int) -> None:
    assert packed(draw(14), [14], [(3, 7)], ratio=ratio).count.tolist() == [[size] * 3]


@BOTH
def test_a_ratio_goes_before_pairs_and_is_taken_in_double_precision(runner: Interpreter | None) -> None:
    for ratio, n, size in ((0.7, 90, 62), (0.59, 100, 59)):  # in fp32 the products are 63 and 58.999...
        found = packed(draw(n), [n], [(0, 0)], ratio=ratio, pairs=3, room=200, interpreter=runner)
        assert found.count.tolist() == [[size] * 3]


@BOTH
def test_by_mass_a_head_keeps_its_share(runner: Interpreter | None) -> None:
    score = torch.ones(20, 3) * torch.tensor([4.0, 1, 3])
    score[16:] = 1000  # the window does not count
    found = packed(score, [20], [(16, 20)], pairs=5, heads="mass", floor=0.2, interpreter=runner)
    assert found.count.tolist() == [[1 + 6, 1 + 1, 1 + 4]]  # 12 pairs by 4 : 1 : 3, rounded down
    assert found.kept == [naive(score, (16, 20), [7, 2, 5])]


@BOTH
def test_what_a_dominant_head_cannot_take_goes_to_the_next(runner: Interpreter | None) -> None:
    score = torch.ones(12, 4) * torch.tensor([1.0, 90, 1, 8])
    found = packed(score, [12], [(4, 6)], pairs=6, heads="mass", interpreter=runner)
    # 24 pairs: 21 for the head of 90, which can take 10; 11 more for the head of 8, which can take 10; the rest to the
    # lower head of 1.
    assert found.count.tolist() == [[2, 10, 0, 10]]
    assert int(found.count.sum()) <= 24


@BOTH
@pytest.mark.parametrize("heads", ["mass", "adaptive"])
def test_without_mass_heads_share_alike(runner: Interpreter | None, heads: str) -> None:
    found = packed(torch.zeros(10, 3), [10], [(8, 10)], pairs=5, heads=heads, floor=1.0, interpreter=runner)
    assert found.kept == [[[0, 1, 2, 3, 4]] * 3]
    found = packed(torch.zeros(10, 3), [10], [(8, 10)], pairs=5, heads="mass", floor=0.0, interpreter=runner)
    assert found.count.tolist() == [[5, 5, 5]]


def adaptive(score: Tensor, budget: int, floor: float) -> list[int]:
    """k_h of Ada-KV from the candidates' scores [n, H]."""
    ranked = sorted((-float(score[p, h]), h, p) for p in range(len(score)) for h in range(score.shape[1]))
    of = [h for _, h, _ in ranked[: budget * score.shape[1]]]
    return [int(floor * budget + (1 - floor) * of.count(h)) for h in range(score.shape[1])]


@BOTH
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("levels", [None, 3])
def test_adaptive_heads_compete(runner: Interpreter | None, floor: float, levels: int | None) -> None:
    score = draw(30, 11, heads=4, seed=3) * torch.tensor([1.0, 2, 0.5, 1])
    if levels:
        score = (score * levels).round()
    found = packed(score, [30, 11], [(25, 30), (2, 9)], pairs=6, heads="adaptive", floor=floor, interpreter=runner)
    parts = [(score[:30], (25, 30), score[:25]), (score[30:], (2, 9), torch.cat([score[30:32], score[39:]]))]
    for kept, (own, window, candidates) in zip(found.kept, parts, strict=True):
        sizes = adaptive(candidates, min(6, len(candidates)), floor)
        if len(candidates) <= 6:
            sizes = [len(candidates)] * 4
        assert kept == naive(own, window, sizes)
    assert (len(set(found.count[0].tolist())) == 1) == (floor == 1)
    if not floor:
        assert int(found.count[0].sum()) == 24


@BOTH
def test_recent_candidates_go_first(runner: Interpreter | None) -> None:
    score = torch.arange(12.0, 0, -1)[:, None]
    for recent, kept in ((0, [0, 1, 2]), (2, [0, 6, 7]), (3, [5, 6, 7]), (4, [4, 5, 6]), (99, [0, 1, 2])):
        assert packed(score, [12], [(8, 10)], pairs=3, recent=recent, interpreter=runner).kept == [[kept]]
    # Adaptive heads all give them room.
    found = packed(
        score * torch.tensor([1.0, 50]), [12], [(8, 12)], pairs=3, recent=2, heads="adaptive", interpreter=runner
    )
    assert found.kept == [[[6, 7], [0, 1, 6, 7]]]


@BOTH
def test_scores_are_pooled_across_the_window(runner: Interpreter | None) -> None:
    score = torch.tensor([0.0, 0, 0, 5, 99, 99, 1, 0, 3, 0])[:, None]
    run = {"pool": 3, "interpreter": runner}
    # Candidates 0 1 2 3 6 7 8 9; their maxima 0 0 5 5 5 3 3 3 and means 0 0 5/3 2 2 4/3 1 3/2.
    assert packed(score, [10], [(4, 6)], pairs=3, **run).kept == [[[2, 3, 6]]]
    assert packed(score, [10], [(4, 6)], pairs=4, **run).kept == [[[2, 3, 6, 7]]]
    for pairs, kept in ((1, [3]), (2, [3, 6]), (4, [2, 3, 6, 9]), (6, [2, 3, 6, 7, 8, 9])):
        assert packed(score, [10], [(4, 6)], pairs=pairs, pooling="mean", **run).kept == [[kept]]
    # A window wider than all candidates.
    assert packed(score, [10], [(4, 6)], pairs=2, pool=31, interpreter=runner).kept == [[[0, 1]]]


@BOTH
def test_sequences_without_rows_or_candidates_keep_nothing(runner: Interpreter | None) -> None:
    counts, windows = [6, 0, 4, 5], [(4, 6), (0, 9), (0, 4), (0, 2)]
    for heads in ("uniform", "mass", "adaptive"):
        found = packed(draw(*counts), counts, windows, pairs=2, heads=heads, floor=1.0, interpreter=runner)
        assert found.count.tolist() == [[2] * 3, [0] * 3, [0] * 3, [2] * 3]
    found = packed(draw(*counts), counts, windows, ratio=0.1, heads="adaptive", interpreter=runner)
    assert found.count.tolist() == [[0] * 3] * 4


@BOTH
def test_sequences_that_do_not_select_stay_as_they_are(runner: Interpreter | None) -> None:
    actions, score = [REUSE, SELECT, DENSE], draw(8, 8, 8)
    found = packed(score, [8] * 3, [(6, 8)] * 3, actions=actions, pairs=3, heads="mass", interpreter=runner)
    assert found.count[1].sum() > 0
    assert found.kept[1] == naive(score[8:16], (6, 8), found.count[1].tolist())


@BOTH
def test_repacking_renews_what_was_kept(runner: Interpreter | None) -> None:
    had = torch.tensor([[2, 0, 3], [1, 1, 0]]).int()
    index = torch.full((128,), -5).int()
    index[:5] = torch.tensor([0, 4, 1, 2, 5])
    found = packed(
        draw(8, 5),
        [8, 5],
        [(6, 8), (3, 5)],
        actions=[REPACK, SELECT],
        had=had,
        index=index,
        pairs=1,
        interpreter=runner,
    )
    assert found.kept[0] == [[0, 4], [], [1, 2, 5]]
    assert found.count[1].tolist() == [1] * 3


@BOTH
def test_repacking_finds_positions_among_gaps(runner: Interpreter | None) -> None:
    positions = torch.tensor([0, 2, 3, 7, 8, 20, 21, 30])
    k, v = torch.arange(2 * 8 * D).float().view(2, 8, 1, D)
    index = torch.tensor([2, 7, 20, 30]).int()
    k_pack, v_pack = torch.zeros(2, 4, D)
    count, start = torch.tensor([[4]]).int(), torch.zeros(1, 1).int()
    of = (cu_rows_of([8]), torch.tensor([[8, 9]]).int(), torch.tensor([REPACK]).int())
    rest = (start, 0, 0.0, 1, "uniform", 0.0, 1, "max", 0)
    args = (torch.zeros(8, 1), k, v, positions, *of, k_pack, v_pack, count, index, *rest)
    if runner is None:
        torch.ops.dgraph.kv_pack(*args)
    else:
        _, args = runner("kv_pack", args)
    assert torch.equal(args[7], k[[1, 3, 5, 7], 0])
    assert torch.equal(args[8], v[[1, 3, 5, 7], 0])


@BOTH
def test_positions_need_not_be_kept(runner: Interpreter | None) -> None:
    score, k = draw(9), torch.randn(9, 3, D)
    k_pack, v_pack, count = torch.zeros(9, D), torch.zeros(9, D), torch.zeros(2, 3, dtype=torch.int32)
    where = (torch.arange(9), cu_rows_of([9]), torch.tensor([[6, 9]]).int(), torch.tensor([SELECT]).int())
    into = (k_pack, v_pack, count, torch.zeros(0, dtype=torch.int32), torch.zeros(1, 1).int())
    args = (score, k, -k, *where, *into, 0, 0.5, 0, "uniform", 0.0, 1, "max", 0)
    if runner is None:
        torch.ops.dgraph.kv_pack(*args)
    else:
        _, args = runner("kv_pack", args)
    want = torch.cat([k[rows, head] for head, rows in enumerate(naive(score, (6, 9), [3] * 3))])
    assert torch.equal(args[7], want)
    assert torch.equal(args[8], -want)
    assert args[9].tolist() == [[3] * 3, [0] * 3]


@BOTH
def test_keys_that_stay_where_they_are_are_chosen_as_if_packed(runner: Interpreter | None) -> None:
    """Counts and positions are the same; without anything to renew, REPACK changes nothing."""
    actions, counts, windows = (SELECT, REPACK, DENSE, SELECT), (11, 7, 6, 14), ((4, 8), (2, 5), (2, 5), (0, 4))
    for heads in ("uniform", "mass", "adaptive"):
        settings = (0.4, 0, heads, 0.1, 3, "max", 1)
        call = kv_pack.draw(torch.Generator().manual_seed(3), actions, counts, windows, settings)
        before, wanted = call[9].clone(), call[10].clone()
        torch.ops.dgraph.kv_pack(*call)
        for s in (0, 3):
            entries = slice(int(call[11][1, s]), int(call[11][1, s] + call[9][s].sum()))
            before[s], wanted[entries] = call[9][s], call[10][entries]
        args = kv_pack.in_pages(kv_pack.draw(torch.Generator().manual_seed(3), actions, counts, windows, settings))
        if runner is None:
            torch.ops.dgraph.kv_pack(*args)
        else:
            _, args = runner("kv_pack", args)
        assert torch.equal(args[9], before)
        assert torch.equal(args[10], wanted)


@BOTH
def test_packed_caches_need_something_to_pack(runner: Interpreter | None) -> None:
    settings = (0.5, 0, "uniform", 0.0, 1, "max", 0)
    call = list(kv_pack.draw(torch.Generator().manual_seed(3), (SELECT,), (9,), ((4, 8),), settings))
    run = torch.ops.dgraph.kv_pack if runner is None else lambda *args: runner("kv_pack", args)
    for absent in ((1, 2), (7,), (1, 2, 8)):
        wrong = [None if i in absent else value for i, value in enumerate(call)]
        with pytest.raises(InputError, match="give all four, or neither of the packed caches"):
            run(*wrong)


@pytest.mark.parametrize(("tile", "n"), [(16, 100), (64, 300)], ids=["16", "64"])
@pytest.mark.parametrize("heads", ["uniform", "mass", "adaptive"])
def test_long_sequences_in_many_tiles(request: pytest.FixtureRequest, heads: str, tile: int, n: int) -> None:
    """More candidates than a tile of counts; with 300 rows, than a tile of ranks too."""
    pytest.importorskip("triton", minversion="3.7")
    run: Interpreter = request.getfixturevalue("interpreted")
    counts, windows = [n, 0, n // 2 + 20], [(n // 3 + 20, n // 2), (0, 3), (n // 2 + 10, n // 2 + 20)]
    score = (draw(*counts, heads=2, seed=tile) * 30).round() - 3
    m, b = sum(counts), 3
    k, v = torch.randn(2, m, 2, D)
    positions, start = torch.cat([torch.arange(n) for n in counts]), torch.tensor([[3, 500, 600]]).int()
    where = (positions, cu_rows_of(counts), torch.tensor(windows).int(), torch.tensor([SELECT] * b).int())

    def args() -> tuple[object, ...]:
        into = (*torch.zeros(2, 900, D), torch.zeros(b, 2).int(), torch.zeros(900).int(), start)
        return score, k, v, *where, *into, 0, 0.4, 0, heads, 0.25, 5, "mean", 4

    want = args()
    torch.ops.dgraph.kv_pack(*want)
    _, got = run("kv_pack", args(), tile=tile)
    for one, other in zip(got[7:11], want[7:11], strict=True):
        assert torch.equal(one, other)


def test_too_little_room_is_an_error_that_changes_nothing() -> None:
    with pytest.raises(InputError, match="sequence 1 keeps 12 entries from 10 on, but there are only 20"):
        packed(draw(9, 9), [9, 9], [(6, 9)] * 2, pairs=4, room=10)


def test_a_packed_position_without_a_row_is_an_error() -> None:
    index = torch.full((64,), 9).int()
    with pytest.raises(InputError, match="sequence 0 has packed positions that are unknown"):
        packed(draw(8), [8], [(6, 8)], actions=[REPACK], index=index)
    with pytest.raises(InputError, match="sequence 0 has packed positions that are unknown"):
        packed(draw(8), [8], [(6, 8)], actions=[REPACK], index=index[:0])
    with pytest.raises(InputError, match="sequence 0 has packed positions that are unknown"):
        packed(draw(0), [0], [(6, 8)], actions=[REPACK], index=index)


@BOTH
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": "best"}, "heads must be one of uniform, mass, adaptive, got 'best'"),
        ({"pooling": "sum"}, "pooling must be one of max, mean, got 'sum'"),
        ({"pool": 2}, "pool must be odd and at least 1, got 2"),
        ({"ratio": 1.5}, r"ratio must be in \[0, 1\], got 1.5"),
        ({"floor": -0.1}, r"floor must be in \[0, 1\], got -0.1"),
        ({"pairs": -1}, "pairs must be at least 0, got -1"),
        ({"recent": -1}, "recent must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(runner: Interpreter | None, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"dgraph::kv_pack: {message}"):
        packed(draw(8), [8], [(6, 8)], interpreter=runner, **wrong)
