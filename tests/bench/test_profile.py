"""A profile from device events: groups, stages, idle time."""

from __future__ import annotations

import pytest

from dgraph.bench.profile import Kernel, groups_of, idle, stages_of, summarise

STEP = [
    "void at::native::elementwise_kernel<128>",
    "triton_poi_fused_embedding_0",
    "nvjet_tst_128x64_TNT",
    "_write",
    "_attend",
    "sm90_xmma_gemm_bf16",
    "_receive",
    "_select",
    "_list_kept",
    "Memcpy DtoH (Device -> Pageable)",
    "_gather",
    "_attend",
    "nvjet_tst_128x64_TNT",
    "triton_red_fused_1",
    "nvjet_tst_64x8_TNT",
    "_reduce",
    "_combine",
    "nvjet_tst_64x8_TNT",
    "_reduce",
    "_combine",
]


def test_kernels_have_groups() -> None:
    groups = groups_of(STEP)
    assert groups[:5] == ["state", "regions", "GEMM", "kv write", "attention"]
    assert groups[5:11] == ["GEMM", "focus", "focus", "focus", "copies", "focus"]
    assert groups[12:14] == ["GEMM", "regions"], "a layer's product is none of the head"
    assert groups[14:] == ["LM head"] * 6
    assert groups_of(["_attend", "_add_up", "_multiply", "_add_up"]) == ["attention", "attention", "GEMM", "GEMM"]


def test_kernels_have_stages() -> None:
    stages = stages_of(STEP * 2, groups_of(STEP * 2), ("prefix", "suffix"))
    assert stages[: len(STEP)] == stages[len(STEP) :] == ["state", *["prefix"] * 8, *["suffix"] * 11]
    bare = [name for name in STEP if name not in ("_reduce", "_combine")]
    assert stages_of(bare, groups_of(bare), ("prefix", "suffix")) == []


def test_a_profile_adds_up() -> None:
    kernels = [Kernel(name, 10.0 * i, 10.0 * i + 8) for i, name in enumerate(STEP * 2)]
    found = summarise(kernels[::-1], 2, ("prefix", "suffix"), reads=2, waits=4)
    assert sum(found.groups.values()) == pytest.approx(1e-3 * (10.0 * len(kernels) - 2) / 2)
    assert found.groups["idle"] == pytest.approx(1e-3 * 2 * (len(kernels) - 1) / 2)
    assert found.stages == pytest.approx({"state": 8e-3, "prefix": 64e-3, "suffix": 88e-3})
    assert (found.host_reads, found.waits, found.launches) == (1, 2, len(STEP))
    assert summarise([], 1, ("step",), 0, 0).groups == {"idle": 0.0}


def test_kernels_that_overlap_leave_less_idle() -> None:
    assert idle([Kernel("a", 0, 10), Kernel("b", 2, 5), Kernel("c", 12, 13)]) == 2
