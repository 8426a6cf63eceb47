"""Times of the Triton kernels at the shapes of SDAR-8B, next to library kernels and to the bytes they must move.

    python -m benchmarks.kernels [--only attention kept focus head] [--tilings] [--json FILE]

Every time is a call inside a CUDA graph: the median over replays of a graph that holds many calls on different
data, so that nothing is found in the L2 cache that a model would not find there. A floor is the bytes that the
call must move over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tables import Cell, Report
from dgraph.bench.floor import COLD
from dgraph.lowering.timing import graph_seconds
from dgraph.ops import OPS

HEADS, KV_HEADS, D, HIDDEN, VOCAB, MASK = 32, 8, 128, 4096, 151_936, 151_669
ATTENTION = ((64, 32, 1024), (64, 8, 1024), (64, 4, 1024), (16, 32, 4096), (256, 8, 512), (1, 32, 1024))
# Positions per page: the block length, and what lets the bulk copy engine take more keys at once.
PAGES = (32, 128)
KEPT = tuple((b, keys) for b in (32, 8) for keys in (1024, 2048, 4096, 8192))
"""Sequences, and keys in front of the block, of which each KV head keeps half."""


def milliseconds(calls: Sequence[Callable[[], Any]], replays: int = 15) -> float:
    """Milliseconds of one call, from a CUDA graph of all `calls` in a row: the median over replays."""
    return 1e3 * graph_seconds(calls, replays)


def copy_bandwidth() -> float:
    """Bytes per millisecond, read plus written, of a large copy on the device."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    # A kernel: inside a graph, a plain copy goes to a copy engine, which is slower.
    return 2 * 4 * source.numel() / milliseconds([partial(torch.neg, source, out=target)] * 2)


def offsets(b: int, rows: int) -> Tensor:
    return torch.arange(0, (b + 1) * rows, rows, dtype=torch.int32, device="cuda")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


class Attention:
    """One set of inputs: b sequences of `rows` rows over `keys` keys, in pages of random order and dense."""

    def __init__(self, b: int, rows: int, keys: int, page: int):
        self.k, self.v = (random(b, KV_HEADS, keys, D) for _ in range(2))
        self.q, self.rows, self.page = random(b * rows, HEADS, D), rows, page
        pages = b * keys // page
        self.table = torch.randperm(pages, device="cuda").int().view(b, -1)
        self.caches = [self._paged(x) for x in (self.k, self.v)]
        self.cu_rows = offsets(b, rows)
        self.limit = torch.full((b * rows,), keys, dtype=torch.int32, device="cuda")

    def _paged(self, x: Tensor) -> Tensor:
        cache = random(self.table.numel(), self.page, KV_HEADS, D)
        cache[self.table.flatten().long()] = x.transpose(1, 2).reshape(-1, self.page, KV_HEADS, D)
        return cache

    def paged(self, tiling: Any = None) -> Tensor:
        args = (self.q, *self.caches, self.table, self.cu_rows, self.limit, D**-0.5)
        if tiling is None:
            return OPS["paged_attention"].overload(*args)
        from dgraph.ops.attention.triton.paged_attention import kernel

        return kernel(*args, tiling=tiling)

    def dense(self) -> Tensor:
        q = self.q.unflatten(0, (-1, self.rows)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, self.k, self.v, scale=D**-0.5, enable_gqa=True)

    def error(self) -> float:
        q = self.q.unflatten(0, (-1, self.rows)).transpose(1, 2)[:4].double()
        k, v = (x[:4].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.k, self.v))
        want = F.scaled_dot_product_attention(q, k, v, scale=D**-0.5).transpose(1, 2).flatten(0, 1)
        return float((self.paged()[: len(want)].double() - want).norm() / want.norm())


def attention(report: Report, bandwidth: float, tilings: bool) -> None:
    """paged_attention against SDPA and the floor."""
    lines: list[list[Cell]] = []
    for b, rows, keys in ATTENTION:
        size = 2 * 2 * b * D * (KV_HEADS * keys + HEADS * rows)  # keys and values, queries and results
        floor, library = size / bandwidth, 0.0
        for page in PAGES:
            sets = [Attention(b, rows, keys, page) for _ in range(max(2, min(64, int(COLD / size) + 1)))]
            error, ours = sets[0].error(), milliseconds([s.paged for s in sets])
            library = library or milliseconds([s.dense for s in sets])
            ratios = [ours / floor, library / floor]
            lines.append([f"{b}, {rows}, {keys}", page, ours, library, floor, *ratios, f"{error:.1e}"])
            if tilings:
                _tilings(report, sets, floor, f"{b}, {rows}, {keys}; page {page}", rows)
    columns = ["b, rows, keys", "page", "ours ms", "SDPA ms", "floor ms", "ours / floor", "SDPA / floor", "error"]
    report.table("paged_attention", columns, lines, "SDPA: enable_gqa on dense K and V. Error: relative, to float64.")


def _tilings(report: Report, sets: Sequence[Attention], floor: float, title: str, rows: int) -> None:
    from dgraph.ops.attention.triton.attention_tiling import Tiling

    m = min(128, max(16, 1 << (rows * HEADS // KV_HEADS - 1).bit_length()))
    sizes = [(m, n, warps, stages) for n in (32, 64, 128) for warps, stages in ((4, 3), (4, 5), (8, 5))]
    sizes += [(64, 64, 4, 5)] if m == 128 else []
    first = max(1, 256 // (KV_HEADS * len(sets[0].cu_rows)))
    lines: list[list[Cell]] = []
    for block_m, block_n, warps, stages in sizes:
        for splits in (1, 2) if first == 1 else (first // 2, first, 2 * first):
            tiling = Tiling(block_m, block_n, splits, warps, stages)
            try:
                took = milliseconds([partial(s.paged, tiling) for s in sets], 7)
            except Exception as error:  # too much shared memory, say: not a tiling for this device
                print(tiling, str(error).partition("\n")[0])
                continue
            lines.append([str(tiling), took, took / floor])
    lines.sort(key=lambda line: line[1])
    report.table(f"tilings for {title}", ["tiling", "ms", "/ floor"], lines[:10])


class Kept:
    """One set of inputs: b sequences of 32 rows over half of `keys` keys, another half for each head, and their block.

    The kept keys are packed copies, or are read in their pages by their positions.
    """

    ROWS = 32

    def __init__(self, b: int, keys: int, page: int):
        self.b, self.dense = b, Attention(b, self.ROWS, -(-(keys + self.ROWS) // page) * page, page)
        self.dense.limit.fill_(keys + self.ROWS)
        chosen = torch.rand(b, KV_HEADS, keys, device="cuda").topk(keys // 2).indices.sort().values
        self.index, at = chosen.int().flatten(), chosen.flatten(1)
        slots = self.dense.table.gather(1, at // page).long() * page + at % page
        head = torch.arange(KV_HEADS, device="cuda").repeat_interleave(keys // 2)
        self.packs = [cache.flatten(0, 1)[slots, head].flatten(0, 1) for cache in self.dense.caches]
        start = torch.arange(0, len(self.index), KV_HEADS * keys // 2, device="cuda")
        self.where = torch.full((b, KV_HEADS), keys // 2, device="cuda").int(), start.int()[None]
        self.window = torch.tensor([[keys, keys + self.ROWS]] * b, dtype=torch.int32, device="cuda")

    def attend(self, in_pages: bool, tiling: Any = None) -> Tensor:
        own, none = self.dense, random(0, KV_HEADS, D)
        entries = (None, None) if in_pages else self.packs
        rows = torch.empty(0, dtype=torch.int64, device="cuda"), own.cu_rows, own.cu_rows, own.limit, self.window
        caches = (own.q, none, none, *own.caches, own.table, *entries, *self.where)
        index = self.index if in_pages else None
        args = (*caches, *rows, torch.zeros_like(self.window[:, 0]), D**-0.5, 0, False, *[None] * 6, index)
        if tiling is None:
            return OPS["sparse_attention"].overload(*args)
        from dgraph.ops.attention.triton.sparse_attention import kernel

        return kernel(*args, tiling=tiling)

    def error(self) -> float:
        return float((self.attend(True).double() - self.attend(False).double()).abs().max())


def kept(report: Report, bandwidth: float, tilings: bool) -> None:
    """sparse_attention over keys that are kept packed and in their pages, in turns, and over all keys."""
    lines: list[list[Cell]] = []
    for b, keys in KEPT:
        size = 2 * 2 * D * b * (KV_HEADS * (keys // 2 + Kept.ROWS) + HEADS * Kept.ROWS)
        for page in PAGES:
            sets = [Kept(b, keys, page) for _ in range(max(2, min(16, int(COLD / size) + 1)))]
            calls = {
                "packed": [partial(s.attend, False) for s in sets],
                "pages": [partial(s.attend, True) for s in sets],
                "all": [s.dense.paged for s in sets],
            }
            turns = [{name: milliseconds(each, 7) for name, each in calls.items()} for _ in range(5)]
            took = {name: sorted(turn[name] for turn in turns)[2] for name in calls}
            ratios = [took["pages"] / took["packed"], took["all"] / took["pages"], took["pages"] * bandwidth / size]
            lines.append([f"{b}, {keys}", page, *(1e3 * t for t in took.values()), *ratios, f"{sets[0].error():.1e}"])
            if tilings and (keys, page) == (4096, 128):
                _stages(report, sets, f"{b}, {keys}; page {page}")
    columns = ["b, keys", "page", "packed us", "in pages us", "all keys us", "in pages / packed", "all / in pages"]
    note = "Blocks of 32 rows, half of the keys for each head, bf16; medians of five turns. Error: largest difference."
    report.table("sparse_attention", [*columns, "in pages / floor", "error"], lines, note)


def _stages(report: Report, sets: Sequence[Kept], title: str) -> None:
    from dgraph.ops.attention.triton.attention_tiling import multiprocessors
    from dgraph.ops.attention.triton.sparse_attention import tiling_for

    own, cores = sets[0], multiprocessors(torch.device("cuda"))
    sizes = len(own.dense.q), own.b, (HEADS, KV_HEADS), D, len(own.index), 2, cores
    lines: list[list[Cell]] = []
    for in_pages in (False, True):
        found = tiling_for(*sizes, dense=False, in_pages=in_pages)
        for stages in (2, 3, 4, 5, 7):
            tiling = replace(found, kept_stages=stages)
            try:
                took = milliseconds([partial(s.attend, in_pages, tiling) for s in sets], 7)
            except Exception as error:  # too much shared memory, say: not a tiling for this device
                print(tiling, str(error).partition("\n")[0])
                continue
            lines.append(["in pages" if in_pages else "packed", stages, str(found.kept), 1e3 * took])
    report.table(f"stages for {title}", ["kept", "stages", "tiling", "us"], lines)


def focus(report: Report, bandwidth: float) -> None:
    """What eviction adds to a step: importance twice, selection, the kept list and the compaction."""
    for b in (64, 256):
        times = {name: (milliseconds(calls), size / bandwidth) for name, (calls, size) in _focus_calls(b).items()}
        lines: list[list[Cell]] = [[name, 1e3 * took, 1e3 * floor] for name, (took, floor) in times.items()]
        total = [sum((2 if name == "importance" else 1) * t[i] for name, t in times.items()) for i in (0, 1)]
        lines.append(["a step (importance twice)", 1e3 * total[0], 1e3 * total[1]])
        report.table(f"FOCUS, {b} sequences of 32 rows, 8 kept of each", ["op", "us", "floor us"], lines)


def _focus_calls(b: int) -> dict[str, tuple[list[Callable[[], Any]], float]]:
    """Calls of each op on different data, and the bytes that one call must move."""
    n, kept = 32 * b, 8 * b
    run = {name: OPS[name].overload for name in ("importance", "select_tokens", "keep_index", "compact")}
    cu_rows, positions = offsets(b, 32), torch.arange(n, device="cuda") % 32
    masked, score = torch.rand(n, device="cuda") < 0.9, torch.randn(n, device="cuda")
    limit = torch.full((n,), 32, dtype=torch.int32, device="cuda")
    average, progress = torch.full((b,), 3.0, device="cuda"), torch.full((b,), -1, device="cuda").int()
    keep = torch.zeros(n, dtype=torch.bool, device="cuda")
    keep[torch.randperm(n, device="cuda")[:kept]] = True
    index, _ = run["keep_index"](keep, cu_rows, kept)
    sets = [(random(n, HEADS, D), random(n, KV_HEADS, D)) for _ in range(max(2, int(COLD / n / 10_240)))]
    small = [positions, limit, masked, score, positions.clone(), torch.rand(n, device="cuda")]
    values = [[q, random(n, HIDDEN), random(n, D), random(n, D), *small] for q, _ in sets]
    row = sum(x[0].numel() * x.element_size() for x in values[0])
    select = (score, masked, positions, cu_rows, limit, average, progress, 1.5, 0)
    return {
        "importance": (
            [partial(run["importance"], q, k, masked, cu_rows, D**-0.5, 3) for q, k in sets],
            2 * int(masked.sum()) * D * (HEADS + KV_HEADS),
        ),
        "select_tokens": ([partial(run["select_tokens"], *select)] * 20, 22 * n),
        "keep_index": ([partial(run["keep_index"], keep, cu_rows, kept)] * 20, n + 8 * kept),
        "compact": ([partial(run["compact"], v, index) for v in values], 2 * kept * row),
    }


def head(report: Report, bandwidth: float) -> None:
    """The LM head: the product alone, with our reduction, and the same through torch; then by share of masked rows."""
    weights = [random(VOCAB, HIDDEN) * 0.05 for _ in range(2)]
    lines = [_head_line(rows, weights, bandwidth) for rows in (8, 32, 256, 1024, 2048)]
    columns = ["rows", "product ms", "lm_head ms", "reduction ms", "drawn ms", "torch ms", "floor ms"]
    note = "Chunks of 1024 rows. Reduction, drawn (temperature 1), torch and floor: of logits that exist."
    report.table("lm_head", columns, lines, note)
    columns = ["rows", "masked", "product of these ms", "all rows ms", "listed ms", "all / listed"]
    lines = [_masked_line(rows, share, weights) for rows in (512, 2048, 20_480) for share in (0.0, 0.025, 0.5, 1.0)]
    note = "Chunks of 2048 rows. Product: of exactly the masked rows, by torch. All rows: each is multiplied. Greedy."
    report.table("lm_head by share of masked rows", columns, lines, note)


def _masked_line(rows: int, share: float, weights: Sequence[Tensor]) -> list[Cell]:
    from dgraph.ops.lm_head.triton.lm_head import kernel

    chunk, count = 2048, round(share * rows)
    h, masked = random(rows, HIDDEN), torch.zeros(rows, dtype=torch.bool, device="cuda")
    masked[torch.randperm(rows, device="cuda")[:count]] = True
    rest = (None, masked, torch.zeros(rows, device="cuda"), torch.arange(rows, device="cuda"), chunk, MASK)
    logits = random(min(count, chunk), VOCAB)

    def product(weight: Tensor) -> None:
        for part in h[:count].split(chunk):
            torch.mm(part, weight.t(), out=logits[: len(part)])

    alone = milliseconds([partial(product, w) for w in weights]) if count else 0.0
    every, listed = (milliseconds([partial(kernel, h, w, *rest, listed=x) for w in weights], 7) for x in (False, True))
    return [rows, f"{share:.1%}", alone, every, listed, every / listed]


def _head_line(rows: int, weights: Sequence[Tensor], bandwidth: float) -> list[Cell]:
    from dgraph.ops.lm_head.triton.lm_head import reduce_logits

    h, logits = random(rows, HIDDEN), [random(rows, VOCAB) for _ in range(max(2, int(COLD / rows / VOCAB / 2)))]
    masked, seed = torch.ones(rows, device="cuda").bool(), torch.arange(rows, device="cuda")
    cold, warm = torch.zeros(rows, device="cuda"), torch.ones(rows, device="cuda")
    out = torch.empty_like(seed), *torch.empty((3, rows), device="cuda")
    rest = (None, masked, cold, seed, 1024, MASK)

    def through_torch(x: Tensor) -> tuple[Tensor, Tensor]:
        best = x.argmax(-1)
        return best, x.softmax(-1, dtype=torch.float32).gather(1, best[:, None])

    product = milliseconds([partial(F.linear, h, w) for w in weights])
    whole = milliseconds([partial(OPS["lm_head"].overload, h, w, *rest) for w in weights])
    reduced, drawn = (
        milliseconds([partial(reduce_logits, x, masked, t, seed, MASK, *out) for x in logits]) for t in (cold, warm)
    )
    library = milliseconds([partial(through_torch, x) for x in logits])
    return [rows, product, whole, reduced, drawn, library, 2 * rows * VOCAB / bandwidth]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("attention", "kept", "focus", "head")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--tilings", action="store_true", help="time other sizes of the attention kernels as well")
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device.")
    torch.manual_seed(0)
    report = Report("Triton kernels at the shapes of SDAR-8B")
    bandwidth = copy_bandwidth()
    report.data["copy_bytes_per_ms"] = bandwidth
    report.table("device", ["measure", "value"], [["copy, read + written, TB/s", bandwidth / 1e9]])
    if "attention" in options.only:
        attention(report, bandwidth, options.tilings)
    if "kept" in options.only:
        kept(report, bandwidth, options.tilings)
    if "focus" in options.only:
        focus(report, bandwidth)
    if "head" in options.only:
        head(report, bandwidth)
    report.write(options.markdown, options.json)


if __name__ == "__main__":
    main()
