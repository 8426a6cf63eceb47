"""AddRows: added rows see what is said and are seen by nobody else, over a cache as without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.errors import PassError
from dgraph.ir.graph import Graph
from dgraph.passes import AddRows, BoundRows, CacheKV, ChunkLMHead, FuseGLU, FuseProjections, OnlyMasked
from dgraph.text.writer import dump
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import InputSpec
from tests.golden_files import check_golden
from tests.passes.sparse_step import family_of
from tests.tiny import MASK, caches_of, draw, interpret, report_of, rewritten, rows_of

LAYERS = 4


def inputs_of(added: bool) -> dict[str, Tensor]:
    """Rows of two sequences of 8 and 5 tokens; with three more after the first, and one more after the second."""
    rows = rows_of([draw(8, 8), draw(5, 5)])
    rows["limit"] = torch.tensor([8] * 8 + [5] * 5).int()
    rows["gap"], rows["added"] = torch.zeros(13, 2, dtype=torch.int32), torch.zeros(13, dtype=torch.bool)
    if not added:
        return rows
    order = torch.tensor([*range(8), 2, 3, 7, *range(8, 13), 12])
    rows |= {name: value[order] for name, value in rows.items() if len(value) == 13}
    rows["added"] = torch.tensor([0] * 8 + [1] * 3 + [0] * 5 + [1]).bool()
    rows["cu_rows"] = torch.tensor([0, 11, 17]).int()
    at = rows["positions"].int()
    rows["gap"] = torch.where(rows["added"][:, None], torch.stack([at, at + 1], 1), 0).int()
    rows["input_ids"] = rows["input_ids"].masked_fill(rows["added"], MASK)
    return rows


def test_it_fires_once_per_layer(packed: Graph, cached: Graph) -> None:
    for before, op in ((packed, "packed_attention"), (cached, "paged_attention")):
        report, graph = report_of(before, AddRows()), rewritten(before, AddRows())
        assert [(a.layer, a.what) for a in report.applied] == [(n, "attention of added rows") for n in range(LAYERS)]
        assert report.skipped == []
        new = {name: spec for name, spec in graph.inputs.items() if name not in before.inputs}
        assert {n: (s.dtype, s.shape) for n, s in new.items()} == {
            "added": (torch.bool, ("N",)),
            "gap": (torch.int32, ("N", 2)),
        }
        gap, added = graph.input("gap"), graph.input("added")
        for layer in range(LAYERS):
            (read,) = graph.find(op, layer)
            assert {read.meta["by"], op_name(read.target)} == {"AddRows", f"dgraph.{op}"}
            assert gap in args_of(read)
            assert added in args_of(read)
            for write in graph.find("kv_write", layer):
                assert args_of(write)[-1] is added
                assert args_of(read)[-2:] == args_of(write)[:2]
        assert len(graph.calls) == len(before.calls)


def test_without_added_rows_it_is_what_it_was(packed: Graph, cached: Graph) -> None:
    rows = inputs_of(False)
    plain = {name: value for name, value in rows.items() if name not in ("added", "gap")}
    for before in (packed, cached):
        mine, theirs = ({**r, **caches_of(before.spec, [8, 5])} for r in (rows, plain))
        want = interpret(before, theirs)["logits"]
        torch.testing.assert_close(interpret(rewritten(before, AddRows()), mine)["logits"], want, atol=1e-6, rtol=1e-6)
        for name in caches_of(before.spec, [8, 5]):
            assert torch.equal(mine[name].nan_to_num(), theirs[name].nan_to_num()), name


@pytest.mark.parametrize("dtype", [None, "fp8"])
def test_other_rows_and_the_caches_do_not_notice(packed: Graph, dtype: str | None) -> None:
    cached = rewritten(packed, CacheKV(dtype))
    graph = rewritten(cached, AddRows())
    plain, more = inputs_of(False), inputs_of(True)
    ours = {s.name: s for s in graph.inputs.values() if s.in_place}
    pools = [{n: s.empty((4, 4, *s.element)).zero_() for n, s in ours.items()} for _ in range(2)]
    table = {"page_table": torch.tensor([[2, 0], [1, 3]]).int()}
    without = {n: v for n, v in plain.items() if n not in ("added", "gap")}
    want = interpret(cached, {**without, **table, **pools[0]})["logits"]
    got = interpret(graph, {**more, **table, **pools[1]})["logits"]
    torch.testing.assert_close(got[~more["added"]], want, atol=1e-4, rtol=1e-4)
    for name in pools[0]:
        torch.testing.assert_close(pools[0][name].float(), pools[1][name].float(), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got[8], want[2], atol=1e-2)
    if dtype is None:
        among = interpret(rewritten(packed, AddRows()), more)["logits"]
        torch.testing.assert_close(got, among, atol=1e-4, rtol=1e-4)


def test_it_says_why_it_cannot(captured: Graph, cached: Graph) -> None:
    assert {s.reason for s in report_of(captured, AddRows()).skipped} == {
        "attention over a padded batch; run PackRows first"
    }
    graph = cached.copy()
    flag = graph.add_input(InputSpec("flag", torch.bool, ("N",)))
    graph.keep_rows(flag, before=graph.find("paged_attention", 2)[0], by="Test")
    with pytest.raises(PassError, match=r"layer 2 .*: it runs on rows K alone; add rows before that"):
        graph.add_rows(by="Test")


def test_its_dump() -> None:
    passes = (FuseProjections(), CacheKV(), AddRows(), ChunkLMHead(), OnlyMasked(), FuseGLU(), BoundRows())
    check_golden("llada_added_rows.txt", dump(rewritten(family_of("llada").packed, *passes)))
