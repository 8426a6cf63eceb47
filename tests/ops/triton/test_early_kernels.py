"""Our kernels that start early: that they wait first, as compiled here, and on a GPU that results are the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dgraph.ops
from dgraph.families.quantised import ROW_KINDS, Format, QuantisedRows, quantise, quantised_rows
from dgraph.private.early_start import starts_early
from tests.ops.triton.compiled import found_by
from tests.ops.triton.problems import attention, moved

pytest.importorskip("dgraph.ops.triton.rows", reason="needs Triton")


@pytest.fixture
def fresh() -> Iterator[None]:
    starts_early.cache_clear()
    yield
    starts_early.cache_clear()


@pytest.mark.release
def test_they_wait_before_anything_else_and_are_restored(tmp_path: Path) -> None:
    found = found_by("compiled_early", TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert found.pop("restored") == {"same": True, "early": True, "compiled": []}
    assert set(found) == {"_attend", "_add_up", "_add_up_rows", "_quantise_live_rows", "_write"}
    for name, (early, late) in found.items():
        (wait,), (launch,) = early["wait"], early["launch"]
        assert wait < launch < min(early["access"], early["branch"]), name
        assert (early["early"], late["early"]) == (True, False), name
        assert (late["wait"], late["launch"]) == ([], []), name
        assert early["hash"] != late["hash"], name


def test_every_kernel_of_ours_that_may_start_early_waits_first() -> None:
    """As written; warps with roles are told apart behind their wait, in front of which barriers are made."""
    found = {}
    for path in Path(dgraph.ops.__path__[0]).rglob("*.py"):
        for function in ast.parse(path.read_text()).body:
            if not isinstance(function, ast.FunctionDef) or function.name == "wait":
                continue
            if "EARLY" not in [each.arg for each in function.args.args]:
                continue
            body = [ast.unparse(line) for line in function.body[ast.get_docstring(function) is not None :]]
            before = body[: body.index("wait(EARLY)")]
            found[function.name] = before
            assert function.name.endswith("in_roles") or not before, f"{path.name}: {function.name}"
            assert not re.search(r"load|store|atomic|async_copy", "".join(before)), f"{path.name}: {function.name}"
    assert {"_attend", "_add_up", "_add_up_rows", "_write", "_multiply_in_roles", "_multiply_stored_in_roles"} <= set(
        found
    )


@pytest.mark.parametrize("early", [True, False])
def test_a_launch_says_so_where_kernels_start_early(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from dgraph.ops.triton import rows

    monkeypatch.setattr(rows, "starts_early", lambda device: early)
    expected = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    assert rows.start_of(torch.device("cuda", 0)) == expected


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("device", "capability", "environment", "expected"),
    [
        ("cuda", (9, 0), {}, True),
        ("cuda", (12, 0), {}, True),
        ("cuda", (9, 0), {"TORCHINDUCTOR_ENABLE_PDL": "1"}, True),
        ("cuda", (9, 0), {"TORCHINDUCTOR_ENABLE_PDL": "0"}, False),
        ("cuda", (9, 0), {"TRITON_INTERPRET": "1"}, False),
        ("cuda", (8, 9), {"TORCHINDUCTOR_ENABLE_PDL": "1"}, False),
        ("cpu", (9, 0), {}, False),
    ],
)
def test_where_kernels_start_early(
    device: str,
    capability: tuple[int, int],
    environment: dict[str, str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TORCHINDUCTOR_ENABLE_PDL", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert starts_early(torch.device(device, 0)) is expected


@pytest.mark.usefixtures("fresh")
def test_another_maker_of_gpus_has_no_such_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not starts_early(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_a_captured_chain_of_kernels_gives_equal_bits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer writes what the one before it made into the same pages, and attends to it."""
    from dgraph.ops.attention.triton import paged_attention
    from dgraph.ops.attention.triton.attention_tiling import Tiling
    from dgraph.ops.kv.triton.kv_write import kernel as write
    from dgraph.ops.triton import rows

    if not starts_early(torch.device("cuda", 0)):
        pytest.skip("needs a device whose kernels start early")
    counts, heads, d, page = (40, 0, 17, 64), 4, 64, 64
    lengths = (300, 0, 100, 64)
    args = moved(attention(counts, lengths, page=page, heads=(heads, heads), d=d), "cuda", torch.bfloat16)
    q, k_cache, v_cache, table, cu_rows, limit, scale = args
    ends = zip(counts, lengths, strict=True)
    positions = torch.tensor([length - n + i for n, length in ends for i in range(n)], device="cuda")
    positions = torch.cat([positions, positions.new_zeros(len(q) - len(positions))])
    tiling = Tiling(64, 64, splits, 4, 3)

    def layers(x: Tensor) -> Tensor:
        for _ in range(16):
            write(x, x.flip(2), k_cache, v_cache, positions, table, cu_rows)
            x = paged_attention.kernel(x, k_cache, v_cache, table, cu_rows, limit, scale, tiling=tiling)
        return x

    def captured() -> list[Tensor]:
        start, before = q.clone(), (k_cache.clone(), v_cache.clone())
        layers(start)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layers(start)
        found = []
        for _ in range(10):
            k_cache.copy_(before[0])
            v_cache.copy_(before[1])
            graph.replay()
            found.append(result.clone())
        k_cache.copy_(before[0])
        v_cache.copy_(before[1])
        return found

    early = captured()
    monkeypatch.setattr(rows, "starts_early", lambda device: False)
    late = captured()
    assert late[0].isfinite().all()
    assert late[0].any()
    for one in (*early, *late):
        assert torch.equal(one, late[0])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*ROW_KINDS, "int4", "bf16"])
def test_a_captured_chain_of_products_gives_equal_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is placed while what makes its rows still runs, of which some are live, or none."""
    from dgraph.ops.products.triton.rows_linear import kernel as linear
    from dgraph.ops.triton import rows as starting
    from dgraph.ops.triton.hopper import understood

    device = torch.device("cuda", 0)
    if not understood(device):
        pytest.skip("needs a GPU of compute capability 9.0")
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(1024, 4096), (4096, 1024), (1024, 1024)] * 8
    drawn = [torch.randn(out, n, generator=generator, device=device).bfloat16() * n**-0.5 for n, out in sizes]
    weights = drawn if kind == "bf16" else [quantise(weight, Format(kind)) for weight in drawn]

    def layers(x: Tensor, cu_rows: Tensor) -> Tensor:
        for weight in weights:
            rows = QuantisedRows(*quantised_rows(x, kind), x.dtype) if kind in ROW_KINDS else x
            x = linear(rows, weight, None, cu_rows)
        return x

    def captured(rows: int, live: int) -> list[Tensor]:
        start = torch.randn(rows, 1024, generator=generator.manual_seed(rows), device=device).bfloat16()
        cu_rows = torch.tensor([0, live], dtype=torch.int32, device=device)
        plain = layers(start, cu_rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layers(start, cu_rows)
        found = [plain[:live]]
        for _ in range(10):
            graph.replay()
            found.append(result[:live].clone())
        return found

    for rows, live in ((1, 1), (16, 16), (17, 3), (32, 32), (64, 50), (64, 0), (65, 65)):
        early = captured(rows, live)
        with monkeypatch.context() as patch:
            patch.setattr(starting, "starts_early", lambda device: False)
            late = captured(rows, live)
        assert late[0].isfinite().all()
        assert late[0].any() or not live
        for one in (*early, *late):
            assert torch.equal(one, late[0])
