"""Steps of a ragged batch for programs that GateFFN and PartialAttention made: their inputs, and what they found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import dgraph
from dgraph.ir.graph import Graph
from dgraph.ops import OPS
from dgraph.passes import CacheKV, PackRows
from dgraph.spec import ModelSpec
from tests.models import test_llada2 as llada2
from tests.models import test_sdar_moe as sdar_moe
from tests.oracle import dyllm
from tests.oracle.models import random_weights, tiny_config, to_transformers
from tests.oracle.qwen3 import Config, FeedForward, gated
from tests.recipes.bidirectional import setup_of
from tests.tiny import BLOCK, MASK, PAGE, caches_of, interpret, read_cache, rewritten, rows_of

FAMILIES = ("llada", "dream", "sdar", "sdar_moe", "llada2")


@dataclass(frozen=True)
class Family:
    """A tiny model after PackRows, and after CacheKV; its weights for the oracle (none is written for LLaDA2)."""

    packed: Graph
    cached: Graph
    config: Config
    weights: dict[str, Tensor]
    feed_forward: FeedForward = gated


@functools.cache
def family_of(name: str) -> Family:
    if name in ("llada", "dream"):
        found = setup_of(name)
        packed, config, weights = found.graph, found.config, found.weights
        return _family(packed, config, weights)
    if name == "sdar":
        config = tiny_config()
        weights = random_weights(config, 0)
        model = dgraph.adopt(to_transformers(config, weights), mask_id=MASK, block_length=BLOCK)
        return _family(dgraph.capture(model), config, weights)
    if name == "sdar_moe":
        graph = dgraph.capture(dgraph.adopt(sdar_moe.remote()))
        return _family(graph, sdar_moe.SIZES, sdar_moe.WEIGHTS, sdar_moe.feed_forward)
    return _family(dgraph.capture(dgraph.adopt(llada2.remote())), tiny_config(), {})


def _family(captured: Graph, config: Config, weights: dict[str, Tensor], feed_forward: FeedForward = gated) -> Family:
    packed = rewritten(captured, PackRows())
    return Family(packed, rewritten(packed, CacheKV()), config, weights, feed_forward)


LENGTHS = (9, 5, 13)
TOKENS = [torch.randint(0, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
# Positions that the second step finds decoded, and the third; the second sequence has nothing new in the third.
DECODED = ([(2, 11), (5, 12)], [(4, 13)], [(0, 14), (6, 15), (12, 16)]), ([(3, 21)], [], [(7, 22), (8, 23)])


def own_table(spec: ModelSpec) -> set[str]:
    """Name of the page table of contexts and features, where it is not that of keys."""
    return {"page_table_1"} if spec.attention == "block_causal" else set()


def memory_of(spec: ModelSpec, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Empty caches of keys, values, contexts and features."""
    caches = caches_of(spec, lengths)
    pages = caches["k_cache_0"].shape[0]
    for layer in range(spec.layers):
        caches[f"c_cache_{layer}"] = torch.full((pages, PAGE, spec.heads, spec.head_dim), torch.nan)
        caches[f"f_cache_{layer}"] = torch.full((pages, PAGE, spec.hidden), torch.nan)
    for name in own_table(spec):
        table = caches["page_table"]
        caches[name] = torch.where(table < 0, table, pages - 1 - table)
    return caches


def step_of(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    ends: Sequence[int],
    changed: Sequence[Iterable[int]],
    full: Sequence[bool],
    padding: int = 0,
) -> dict[str, Tensor]:
    """Inputs of a step: rows from each start on, which see [0, end); positions that changed; padding of nonsense."""
    inputs = rows_of(tokens, starts)
    inputs["limit"] = torch.tensor([end for s, end in zip(tokens, ends, strict=True) for _ in s], dtype=torch.int32)
    flags = [
        [full[i] or p in set(changed[i]) for p in range(starts[i], starts[i] + len(tokens[i]))]
        for i in range(len(tokens))
    ]
    inputs["changed"] = torch.tensor([f for each in flags for f in each]).bool()
    inputs["full"] = torch.tensor([f for f, each in zip(full, flags, strict=True) for _ in each]).bool()
    if padding:
        for name, value in inputs.items():
            if name not in ("cu_rows", "average", "reached"):
                filler = True if value.dtype == torch.bool else 3
                inputs[name] = torch.cat([value, value.new_full((padding,), filler)])
    return inputs


def three_steps(
    spec: ModelSpec, padding: int = 0, full: Sequence[bool] = (True, False, False)
) -> list[dict[str, Tensor]]:
    """Inputs (without caches) of a full step over whole sequences and two after it, in which tokens are decoded."""
    tokens, steps = [list(t) for t in TOKENS], []
    starts, changed = [0] * len(tokens), [list[int]() for _ in tokens]
    for i, whole in enumerate(full):
        if i:
            for sequence, decoded in zip(tokens, DECODED[i - 1], strict=True):
                for position, token in decoded:
                    sequence[position] = token
            changed = [[p for p, _ in decoded] for decoded in DECODED[i - 1]]
        steps.append(step_of([list(t) for t in tokens], starts, LENGTHS, changed, [whole] * len(tokens), padding))
    return steps


@dataclass
class Found:
    """Flags bool[N] by layer: rows that are salient, and rows whose keys and values were updated."""

    salient: list[Tensor]
    projected: list[Tensor]


def run(
    graph: Graph, steps: Iterable[Mapping[str, Tensor]], memory: dict[str, Tensor]
) -> list[tuple[dict[str, Tensor], Found]]:
    """Outputs of each step, and which rows it found."""
    results = []
    for inputs in steps:
        found = Found([], [])

        def drift(*args: Any, found: Found = found) -> Tensor:
            found.salient.append(OPS["drift"].reference(*args))
            return found.salient[-1]

        def partial(*args: Any, found: Found = found) -> Any:
            context, salient = OPS["partial_attention"].reference(*args)
            found.salient.append(salient)
            index = args[4]
            found.projected.append(torch.zeros_like(salient).index_fill_(0, index[index >= 0], True))
            return context, salient

        instead: dict[str, Callable[..., Any]] = {"drift": drift, "partial_attention": partial}
        results.append((interpret(graph, {**inputs, **memory}, instead), found))
    return results


def logits_of(graph: Graph, steps: Iterable[Mapping[str, Tensor]], lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
    """Logits of each step from empty caches."""
    return [out["logits"] for out, _ in run(graph, steps, memory_of(graph.spec, lengths))]


def check_against_oracle(family: Family, graph: Graph, method: dyllm.Method, padding: int = 0) -> list[int]:
    """Logits, salient rows, their counts and all caches of three steps are the oracle's; how many rows were salient."""
    memory, layers = memory_of(graph.spec, LENGTHS), family.config.layers
    steps = three_steps(graph.spec, padding)
    found = run(graph, steps, memory)
    counts = torch.zeros(len(steps), layers, dtype=torch.int32)
    first = 0
    for s, n in enumerate(LENGTHS):
        mine, rows = dyllm.Memory(family.config, n), slice(first, first + n)
        for t, (inputs, (out, found_rows)) in enumerate(zip(steps, found, strict=True)):
            tokens, changed = inputs["input_ids"][rows].tolist(), inputs["changed"][rows].nonzero()[:, 0].tolist()
            with torch.no_grad():
                logits, wanted = dyllm.forward(
                    family.weights, family.config, tokens, range(n), n, mine, method, changed, t == 0,
                    family.feed_forward,
                )  # fmt: skip
            assert [f[rows].nonzero()[:, 0].tolist() for f in found_rows.salient] == [w.salient for w in wanted]
            if method.partial and method.update:
                assert [f[rows].nonzero()[:, 0].tolist() for f in found_rows.projected] == [w.projected for w in wanted]
            torch.testing.assert_close(out["logits"][rows], logits, rtol=1e-4, atol=1e-4)
            counts[t] += torch.tensor([len(w.salient) for w in wanted])
        kinds = [("k", mine.k), ("v", mine.v), ("c", mine.c)] + ([("f", mine.f)] if method.gate else [])
        for kind, values in kinds:
            for layer in range(layers):
                got = read_cache(memory, f"{kind}_cache_{layer}", s, n)
                torch.testing.assert_close(got, values[layer], rtol=1e-4, atol=1e-4)
        first += n
    for (out, _), count in zip(found, counts, strict=True):
        assert (out["salient"].dtype, out["salient"].tolist()) == (torch.int32, count.tolist())
    return [int(c) for c in counts.sum(1)]


def check_lossless(dense: Graph, graph: Graph, exactly: bool, first: bool = True) -> None:
    """Every row is salient, and the logits are the dense program's.

    Bit for bit with `exactly`, and with `first` in the full step; else to 1e-5 of the largest logit, because a product
    over another number of rows sums in another order: after padding rows, where projections are taken apart, and where
    the first layer projects keys of changed rows only.
    """
    expected = logits_of(dense, three_steps(graph.spec))
    for padding in (0, 5):
        memory = memory_of(graph.spec, LENGTHS)
        found = run(graph, three_steps(graph.spec, padding), memory)
        for t, ((out, _), wanted) in enumerate(zip(found, expected, strict=True)):
            assert out["salient"].tolist() == [sum(LENGTHS)] * graph.spec.layers
            got = out["logits"][: len(wanted)]
            if not padding and (exactly or (first and t == 0)):
                assert torch.equal(got, wanted)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
