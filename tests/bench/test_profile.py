"""A profile from device events: groups, stages, idle time."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dgraph
from dgraph.bench import profile
from dgraph.bench.profile import KERNELS, SUMS, Enough, Kernel, groups_of, idle, profiled, stages_of, summarise
from dgraph.bench.report import kernels_table

OPS = Path(dgraph.__file__).parent / "ops"

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


def test_kernels_of_dyllm_and_of_sparse_attention_have_groups() -> None:
    groups = groups_of(["_describe", "_divide", "_mixed", "_exact", "_add_up", "_decide", "_merge", "_add_up"])
    assert groups == ["salience"] * 2 + ["attention"] * 3 + ["salience"] * 2 + ["attention"]
    groups = groups_of(["_find", "_weigh", "_add_up", "_vote", "share", "_attend_kept", "_add_up", "_attend_rows"])
    assert groups == ["selection"] * 5 + ["attention"] * 3


def test_kernels_of_experts_have_groups() -> None:
    """Nothing of a layer is taken for the transition between steps."""
    prepare = "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(cutlass::bfloat16_t*)"
    product = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::Gemm"
    layer = ["_route", "_order_slots", "_spread_rows", prepare, product, "_gate_rows", prepare, product, "_sum_slots"]
    assert groups_of(layer) == ["routing"] * 3 + ["GEMM"] * 2 + ["routing"] + ["GEMM"] * 2 + ["routing"]
    labels = groups_of([*STEP[:4], *layer, *STEP[14:17]])
    assert labels[-4:] == ["routing", *["LM head"] * 3]
    assert labels.count("state") == 1


def test_products_of_listed_rows_are_those_of_the_head() -> None:
    chunk = ["_gather_rows", "_multiply", "_add_up", "_reduce", "_combine"]
    names = ["nvjet_tst_64x8_TNT", "triton_red_fused_1", "_list_rows", *chunk, *chunk, "void at::native::where"]
    labels = groups_of(names)
    assert labels == ["GEMM", "regions", *["LM head"] * 11, "state"]
    assert stages_of(names, labels, ("step",)) == [*["step"] * 13, "state"]


def test_every_kernel_has_a_name_of_its_own_and_one_group() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(OPS.rglob("triton/*.py"))]
    jit = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jit(node)]
    called = {ast.unparse(node.func) for f in jit for node in ast.walk(f) if isinstance(node, ast.Call)}
    called |= {role for f in jit for role in _roles(f)}
    kernels = [function.name for function in jit if function.name not in called]
    assert {name for name in kernels if kernels.count(name) > 1} == {SUMS}
    grouped = sorted(name for names in KERNELS.values() for name in names)
    assert grouped == sorted(set(kernels) - {SUMS})


def _is_jit(function: ast.FunctionDef) -> bool:
    makers = ("triton.jit", "gluon.jit")
    return any(ast.unparse(decorator).startswith(makers) for decorator in function.decorator_list)


def _roles(function: ast.FunctionDef) -> list[str]:
    """What warps of a kernel run, by their roles: functions that stand before their arguments."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    parts = [call.args[0] for call in calls if ast.unparse(call.func) == "gl.warp_specialize"]
    pairs = (pair for part in parts if isinstance(part, ast.List) for pair in part.elts)
    return [ast.unparse(pair.elts[0]) for pair in pairs if isinstance(pair, ast.Tuple)]


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
    assert sum(spent.ms for spent in found.kernels) == pytest.approx(1e-3 * 8 * len(STEP))
    assert sum(spent.calls for spent in found.kernels) == len(STEP)
    assert [spent.name for spent in found.kernels if spent.calls != STEP.count(spent.name)] == []


def test_what_kernels_take_is_told_by_their_names_the_longest_first() -> None:
    took = {"gemm": (50, 70), "_attend": (30,), "_add_up": (4, 6), "noise": (1,)}
    order = ["gemm", "_add_up", "_attend", "_add_up", "gemm", "noise"]
    left, kernels, now = {name: list(times) for name, times in took.items()}, [], 0.0
    for name in order:
        now += left[name][0]
        kernels.append(Kernel(name, now - left[name].pop(0), now))
    found = summarise(kernels, 2, (), 0, 0).kernels
    assert [(s.name, s.group, s.calls, round(1e3 * s.ms, 6)) for s in found] == [
        ("gemm", "GEMM", 1, 60),
        ("_attend", "attention", 0.5, 15),
        ("_add_up", "attention", 1, 5),
        ("noise", "state", 0.5, 0.5),
    ]
    arm: Any = SimpleNamespace(label="arm", profile=SimpleNamespace(kernels=found))
    _, rows = kernels_table([arm])
    assert rows == [
        ("arm", "gemm", "GEMM", "1", "60", "0.06"),
        ("arm", "_attend", "attention", "0.5", "30", "0.015"),
        ("arm", "_add_up", "attention", "1", "5", "0.005"),
    ]


def test_kernels_that_overlap_leave_less_idle() -> None:
    assert idle([Kernel("a", 0, 10), Kernel("b", 2, 5), Kernel("c", 12, 13)]) == 2


@pytest.mark.parametrize(("total", "wanted", "seen"), [(40, 8, (16, 8)), (6, 8, (1, 3)), (1, 8, (0, 1))])
def test_steps_in_the_middle_are_profiled(
    total: int, wanted: int, seen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[tuple[int, int]] = []

    class Fake:
        def __init__(self, skip: int, steps: int) -> None:
            self.asked = skip, steps

        def stop(self) -> None:
            stopped.append(self.asked)

        def result(self, stages: tuple[str, ...]) -> tuple[str, ...]:
            return stages

    def generate(progress: object) -> None:
        raise Enough

    monkeypatch.setattr(profile, "StepProfiler", Fake)
    assert profiled(generate, total, wanted, ("step",)) == ("step",)
    assert stopped == [seen]
