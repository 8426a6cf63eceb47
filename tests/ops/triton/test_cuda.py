"""Every kernel on a GPU: through the op, in every dtype, and in a CUDA graph that is replayed on other contents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dgraph.cache.store import Store
from dgraph.families.quantised import ROW_KINDS, quantised_rows
from dgraph.lowering.tuning import Tuning
from dgraph.ops import OPS, Sample
from dgraph.ops.attention.paged_attention import in_float8
from dgraph.ops.lm_head.lm_head import decode_logits, gumbel
from dgraph.ops.padded import slots_of
from dgraph.ops.selection.compare_rows import cosine_of, sums_of
from dgraph.ops.tuning import AttentionShape, LinearShape, LogitsShape, Shape, chosen
from tests.ops.triton.keys import SELECTING
from tests.ops.triton.mixtures import MIXING
from tests.ops.triton.problems import (
    LARGER,
    attention,
    compare,
    comparing,
    drifting,
    expected,
    features,
    flat,
    gathering,
    heading,
    importance,
    keeping,
    merging,
    moved,
    mutated,
    norming,
    partial,
    product,
    rotating,
    selection,
    settled,
    summed,
    two_ranges,
    writing,
)
from tests.ops.triton.vocabularies import EMBEDDING

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():  # before hundreds of cases are made, of which each would be skipped by itself
    pytest.skip("needs a CUDA device", allow_module_level=True)

ALL = [
    *(
        pytest.param(name, sample.padded or sample.args, id=f"{name}: {sample.name}")
        for name, op in OPS.items()
        if op.kernel is not None
        for sample in op.samples(torch.Generator().manual_seed(7))
        if isinstance(sample, Sample)
    ),
    *(pytest.param(name, args, id=f"{name}: {what}") for name, what, args in LARGER),
]
# Ops whose arithmetic depends on the dtype of their matrices.
WIDE = ("importance", "paged_attention")


@pytest.mark.parametrize(("name", "args"), ALL)
def test_the_op_on_cuda_in_fp32(name: str, args: tuple[Any, ...]) -> None:
    there = moved(args, "cuda")
    result = OPS[name].overload(*there)
    compare(
        settled(name, args, flat(result)) + mutated(name, there),
        expected(name, args),
        1e-4 if name.startswith(("lm_head", "vocabulary")) else 2e-5,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "args"), [p for p in ALL if p.values[0] in WIDE])
def test_the_op_on_cuda_in_half_precision(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    halved = moved(args, "cpu", dtype)
    want = expected(name, moved(halved, "cpu", torch.float32))
    compare(flat(OPS[name].overload(*moved(halved, "cuda"))), want, 2e-2 if name == "paged_attention" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(("rows", "keys", "d"), [(32, 700, 128), (8, 300, 128), (4, 130, 64), (1, 2000, 256)])
def test_attention_at_the_sizes_of_models(rows: int, keys: int, d: int, page: int, dtype: torch.dtype) -> None:
    counts, lengths = (rows, 2 * rows, 0, 1, rows), (keys, keys // 2, 0, 33, keys + 1)
    args = moved(attention(counts, lengths, page=page, heads=(32, 8), d=d), "cpu", dtype)
    want = expected("paged_attention", moved(args, "cpu", torch.float32))
    got = OPS["paged_attention"].overload(*moved(args, "cuda"))
    compare([got], want, 2e-2 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize("eight", [False, True], ids=["bf16", "float8"])
@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize(("rows", "keys", "d", "window"), [(64, 1500, 128, 0), (8, 300, 128, 70), (300, 900, 256, 0)])
def test_two_ranges_at_the_sizes_of_models(rows: int, keys: int, d: int, window: int, page: int, eight: bool) -> None:
    """Rows with gaps and keys of their own, in shares and in bulk; unwritten slots hold NaN."""
    counts, lengths = (rows, 2 * rows, 0, 1, rows), (keys, keys // 2, 0, 33, keys + 1)
    args = moved(attention(counts, lengths, page=page, heads=(32, 8), d=d), "cpu", torch.bfloat16)
    call = two_ranges(in_float8(args) if eight else args, window=window)
    want = expected("paged_attention", moved(call, "cpu", torch.float32))
    compare([OPS["paged_attention"].overload(*moved(call, "cuda"))], want, 2e-2)


@pytest.mark.parametrize("page", [16, 256])
@pytest.mark.parametrize(("rows", "d", "kv_heads"), [(1, 512, 2), (256, 512, 2), (1024, 512, 2), (256, 256, 8)])
def test_attention_at_the_head_sizes_of_diffusion_gemma(rows: int, d: int, kv_heads: int, page: int) -> None:
    """In tiles of their own, which need most of a multiprocessor's memory; unwritten slots hold NaN."""
    args = attention((rows, 0, rows), (1300, 0, 1024), page=page, heads=(16, kv_heads), d=d)
    args = moved(args, "cpu", torch.bfloat16)
    want = expected("paged_attention", moved(args, "cpu", torch.float32))
    compare([OPS["paged_attention"].overload(*moved(args, "cuda"))], want, 2e-2)


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sequences", "heads", "d"), [(1, (32, 32), 128), (2, (28, 4), 128), (40, (32, 8), 128), (1, (16, 2), 512)]
)
def test_attention_rounds_its_rows_at_the_sizes_of_models(
    sequences: int, heads: tuple[int, int], d: int, dtype: torch.dtype, kind: str
) -> None:
    """Keys divided among programs, and not: the numbers of its own results, but for sums in another order."""
    counts, keys = [32] * sequences, [1056] * sequences
    args = moved(attention(counts, keys, page=32, heads=heads, d=d), "cuda", dtype)
    op, live = OPS["paged_attention"].on_gpu, 32 * sequences
    values, scales = (found[:live] for found in op(*args, kind=kind))
    want, by = quantised_rows(op(*args)[:live].flatten(1), kind)
    compare([scales], [by], 1e-2)
    assert (values.float() != want.float()).float().mean() < 0.02
    compare([values.float() * scales], [want.float() * by], 0.08)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "share", "full"),
    [
        (256, 400, (32, 32), 0.02, ()),
        (150, 320, (32, 8), 0.3, (0,)),
        (130, 256, (28, 4), 0.9, ()),
        (7, 300, (32, 32), 0.3, (0, 1, 3, 4)),
        (200, 310, (12, 12), -1.0, ()),
        (40, 90, (8, 8), 1.1, ()),
    ],
)
def test_partial_attention_at_the_sizes_of_models(
    rows: int, keys: int, heads: tuple[int, int], share: float, full: tuple[int, ...], page: int, dtype: torch.dtype
) -> None:
    counts, lengths = (rows, rows // 2, 0, 1, rows), (keys, keys // 2, 0, 33, keys + 1)
    args = moved(
        partial(counts, lengths, share=share, full=full, page=page, heads=heads, d=128, seed=rows), "cpu", dtype
    )
    want = expected("partial_attention", moved(args, "cpu", torch.float32))
    there = moved(args, "cuda")
    context, salient = OPS["partial_attention"].overload(*there)
    compare([context, *mutated("partial_attention", there)], want[::2], 2e-5 if dtype == torch.float32 else 2e-2)
    # Who is salient follows from the context as it came out, unless the cosine is tau up to rounding.
    before, dense, positions, table, cu_rows = args[6:11]
    live = int(cu_rows[-1])
    found = cosine_of(sums_of(context[:live].cpu(), before[slots_of("test", positions, table, cu_rows, page)]))
    assert ((found - args[-1]).abs() < 1e-4).sum() < 3
    wrong = salient[:live].cpu() != (dense[:live] | (found < args[-1]))
    assert not (wrong & ((found - args[-1]).abs() > 1e-5)).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_caches_of_rows_in_half_precision(dtype: torch.dtype) -> None:
    calls = {
        "kv_update": writing((7, 0, 33, 2), (0, 0, 15, 63)),
        "drift": drifting((40, 0, 9), (3, 0, 60), heads=32, d=128),
        "feature_write": features((7, 0, 33, 2), (0, 0, 15, 63), width=4096),
        "feature_read": features((7, 0, 33, 2), (0, 0, 15, 63), width=4096)[1:],
        "feature_merge": merging((7, 0, 33, 2), (0, 0, 15, 63), width=4096),
    }
    for name, args in calls.items():
        halved = moved(args, "cpu", dtype)
        there = moved(halved, "cuda")
        result = OPS[name].overload(*there)
        compare(flat(result) + mutated(name, there), expected(name, halved), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_importance_at_the_sizes_of_models(dtype: torch.dtype) -> None:
    for counts in ((32, 32, 0, 17), (64, 96, 1)):
        args = moved(importance(counts, heads=(32, 8), d=128), "cpu", dtype)
        want = expected("importance", moved(args, "cpu", torch.float32))
        compare([OPS["importance"].overload(*moved(args, "cuda"))], want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_reduced_as_by_the_reference(dtype: torch.dtype) -> None:
    from dgraph.ops.lm_head.triton.lm_head import reduce_logits

    generator = torch.Generator().manual_seed(0)
    for rows in (3, 40):
        logits = torch.randn(rows, 151_936, generator=generator).mul_(3).to(dtype)
        temperature = (torch.arange(rows) % 3) * 0.7
        seed = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
        want = decode_logits(logits, temperature, seed, suppress=5)
        found = torch.empty_like(seed, device="cuda"), *torch.empty((3, rows), device="cuda")
        there = moved((logits, torch.ones(rows).bool(), temperature, seed), "cuda")
        reduce_logits(*there, 5, *found)
        compare(found, want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("share", [-1.0, 0.03, 0.6, 1.1])
def test_listed_rows_are_projected_as_all_rows_are(share: float, dtype: torch.dtype) -> None:
    from dgraph.ops.lm_head.triton.lm_head import kernel

    args = moved(heading(700, vocab=151_936, d=1024, chunk=300, share=share, heat=0.7), "cuda", dtype)
    args[1].mul_(1024**-0.5)
    args = (*args[:2], args[2].to(dtype), *args[3:])
    got, want = kernel(*args, listed=True), kernel(*args, listed=False)
    packed = torch.full_like(args[0], torch.nan)
    packed[: int(args[3].sum())] = args[0][args[3]]
    compare(kernel(packed, *args[1:], True), got, 0.0)
    same = got[0] == want[0]
    # Where another id is as good up to rounding, it may win.
    assert (~same).sum() <= (0 if dtype == torch.float32 else 0.05 * int(args[3].sum()))
    assert (got[0] == -1).equal(~args[3])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    compare([got[1][same], *got[2:]], [want[1][same], *want[2:]], tolerance)


def test_noise_has_the_integer_part_of_the_reference() -> None:
    """With equal logits the token is the largest noise, over many seeds."""
    from dgraph.ops.lm_head.triton.lm_head import reduce_logits

    rows, vocab = 4000, 3000
    seed = torch.randint(-(2**62), 2**62, (rows,), generator=torch.Generator().manual_seed(1)).cuda()
    token, *rest = torch.empty_like(seed), *torch.empty((3, rows), device="cuda")
    ones = torch.ones(rows, device="cuda")
    reduce_logits(torch.zeros(rows, vocab, device="cuda"), ones.bool(), ones, seed, -1, token, *rest)
    noise = gumbel(seed, vocab)
    apart = noise.amax(1) - noise.gather(1, token[:, None]).squeeze(1)
    assert apart.max() < 1e-5
    assert (apart > 0).sum() < 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 64, 65, 300, 1000])
@pytest.mark.parametrize("name", ["rows_linear", "rows_glu"])
def test_products_at_the_sizes_of_models(name: str, rows: int, dtype: torch.dtype) -> None:
    for d_in, d_out, bias in ((1024, 4096, False), (3072, 1024, True)):
        x, weight, offset, cu_rows = product(rows, 1000, d_in, d_out, bias=bias)
        halved = [None if t is None else t.to(dtype) for t in (x, weight, offset)]
        args = (*(None if t is None else t.cuda() for t in halved), cu_rows.cuda())
        want = expected(name, (*(None if t is None else t.float() for t in halved), cu_rows))
        got = settled(name, args, [OPS[name].overload(*args)])
        compare(got, want, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 300, 3000])
def test_norms_and_rotations_round_where_the_references_do(rows: int, dtype: torch.dtype) -> None:
    """Statistics in another order may round to the neighbour, which the operations after it carry on."""
    calls: list[tuple[str, tuple[Any, ...]]] = [("rows_norm", norming(rows, 3100, 4096))]
    calls += [("rows_rope", rotating(rows, 3100, 32, 128, normed=normed)) for normed in (False, True)]
    for name, args in calls:
        halved = tuple(t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in args)
        got = settled(name, halved, [OPS[name].overload(*moved(halved, "cuda"))])
        compare(got, expected(name, halved), 2e-2 if dtype == torch.bfloat16 else 4e-3)


PAIRS = [
    ("paged_attention", [attention(c, c, page=8, seed=len(c)) for c in ((9, 30, 0, 17), (30, 9, 17, 0))]),
    ("importance", [importance(c, seed=c[0]) for c in ((32, 5, 20), (0, 30, 27))]),
    ("select_tokens", [selection(c, seed=c[0]) for c in ((32, 5, 20), (0, 30, 27))]),
    ("keep_index", [keeping(c, 70, seed=c[0]) for c in ((32, 5, 20), (0, 30, 27))]),
    ("compact", [gathering(40, 25, seed=seed) for seed in (0, 1)]),
    ("kv_write", [writing(c, (5, 5, 5)) for c in ((20, 0, 9), (0, 9, 20))]),
    ("kv_update", [writing(c, (5, 5, 5)) for c in ((20, 0, 9), (0, 9, 20))]),
    ("drift", [drifting(c, (5, 5, 5), seed=c[0]) for c in ((20, 0, 9), (0, 9, 20))]),
    ("least_similar", [(*drifting(c, (5, 5, 5), seed=c[0])[:-1], 0.25) for c in ((20, 0, 9), (0, 9, 20))]),
    ("compare_rows", [comparing(c, (5, 5, 5), some=True) for c in ((20, 0, 9), (0, 9, 20))]),
    ("least_drifted", [summed(c) for c in ((20, 0, 9), (0, 9, 20))]),
    ("feature_write", [features(c, (5, 5, 5), seed=c[0]) for c in ((20, 0, 9), (0, 9, 20))]),
    ("feature_read", [features(c, (5, 5, 5), seed=c[0])[1:] for c in ((20, 0, 9), (0, 9, 20))]),
    ("feature_merge", [merging(c, (5, 5, 5), seed=c[0]) for c in ((20, 0, 9), (0, 9, 20))]),
    *(
        (
            name,
            [
                partial(c, [2 * n for n in c], share=share, full=full, seed=c[0])
                for c, share, full in (((40, 0, 19, 9), 0.2, (3,)), ((9, 40, 0, 19), 0.9, ()))
            ],
        )
        for name in ("partial_attention", "partial_context")
    ),
    *SELECTING,
    *MIXING,
    *EMBEDDING,
    ("list_kept", [keeping(c, 70, seed=c[0])[:2] for c in ((32, 5, 20), (0, 30, 27))]),
    ("rows_linear", [product(rows, 150, 96, 200) for rows in (30, 140)]),
    ("rows_glu", [product(rows, 150, 96, 200) for rows in (30, 140)]),
    ("rows_norm", [norming(rows, 150, 96) for rows in (30, 140)]),
    ("rows_rope", [rotating(rows, 150, 4, 32, normed=True) for rows in (30, 140)]),
    ("lm_head", [heading(21, seed=seed) for seed in (0, 1)]),
    ("lm_head", [heading(400, vocab=90, chunk=150, share=share) for share in (0.9, 0.02)]),
]


@pytest.mark.parametrize(("name", "calls"), PAIRS, ids=[name for name, _ in PAIRS])
def test_a_graph_is_replayed_on_other_contents(name: str, calls: list[tuple[Any, ...]]) -> None:
    op = OPS[name].overload
    static = moved(calls[0], "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*static)
    for args in (calls[1], calls[0]):
        for target, source in zip(flat(static), flat(args), strict=True):
            target.copy_(source)
        for out in flat(result):
            out.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        compare(settled(name, args, flat(result)) + mutated(name, static), expected(name, args), 1e-4)


def test_equal_calls_give_equal_bits() -> None:
    for name, calls in PAIRS:
        results = (OPS[name].overload(*moved(calls[0], "cuda")) for _ in range(2))
        first, second = (settled(name, calls[0], flat(result)) for result in results)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("paged_attention", AttentionShape(300, 8, 32, 8, 128, 128, 4096, "bfloat16", "bfloat16")),
        ("partial_attention", AttentionShape(300, 4, 32, 32, 128, 128, 1024, "bfloat16", "bfloat16")),
        ("rows_linear", LinearShape(512, 1024, 2048, "bfloat16")),
        ("lm_head", LogitsShape(40, 151_936, "bfloat16")),
    ],
)
def test_tilings_are_timed_and_agree(tmp_path: Path, op: str, shape: Shape) -> None:
    tuning = Tuning(torch.device("cuda", 0), Store(tmp_path / "cache"))
    tuning.tune(op, [shape])
    choice = tuning.found[op][shape]
    assert choice.default_seconds is not None
    assert 0 < (choice.seconds or 0) <= choice.default_seconds < 0.1
    assert choice.tried > 1
    assert not [reason for _, reason in choice.failed if "away from" in reason]
    with tuning.choices.in_use():
        assert chosen(op, shape) == choice.tiling
