"""Kernels that start early: where, and what a generated kernel must look like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dgraph.early import hasty_kernels, regions_start_early, starts_early

WAIT, LAUNCH = "tl.extra.cuda.gdc_wait()", "tl.extra.cuda.gdc_launch_dependents()"
LOAD, STORE = "tmp0 = tl.load(in_ptr0 + (x0), xmask)", "tl.store(out_ptr0 + (x0), tmp0, xmask)"
PLACES = ["xoffset = tl.program_id(0) * XBLOCK", "xindex = xoffset + tl.arange(0, XBLOCK)[:]", "x0 = xindex"]
MASK = "xmask = tl.full([XBLOCK], True, tl.int1)[:]"


def kernel(name: str, *lines: str, meta: str = "'launch_pdl': True") -> str:
    """A call as Inductor writes it."""
    body = "\n    ".join(("xnumel = 64", "R0_BLOCK: tl.constexpr = 64", *lines))
    return f"""
{name} = async_compile.triton('{name}', '''
import triton
import triton.language as tl

@triton_heuristics.pointwise(
    size_hints={{'x': 64}},
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32'}}, 'device': DeviceProperties(type='cuda', cc=90), {meta}}},
    min_elem_per_thread=0
)
@triton.jit
def {name}(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    {body}
''', device_str='cuda')
"""


def module(*kernels: str, front: str = "") -> str:
    return f"{front}\nimport torch\nasync_compile = AsyncCompile()\n{''.join(kernels)}\ndel async_compile"


GOOD = kernel("first", WAIT, LAUNCH, *PLACES, MASK, LOAD, STORE)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    starts_early.cache_clear()
    yield
    starts_early.cache_clear()


def test_kernels_that_wait_first() -> None:
    behind_places = kernel("second", *PLACES, MASK, WAIT, LOAD, LAUNCH, STORE)
    assert hasty_kernels(module(GOOD, behind_places)) == []


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([*PLACES, MASK, LOAD, STORE], id="none"),
        pytest.param([*PLACES, "tl.store(out_ptr0 + (x0), 0.0, xmask)"], id="none in a fill"),
        pytest.param([*PLACES, MASK, LOAD, WAIT, LAUNCH, STORE], id="behind a load"),
        pytest.param([*PLACES, MASK, STORE, WAIT], id="behind a store"),
        pytest.param(["for r in range(0, 4, 2):", f"    {WAIT}", f"    {LOAD}"], id="in a loop"),
        pytest.param(["if xnumel > 4:", f"    {WAIT}", LOAD], id="in a branch"),
        pytest.param(["if xnumel > 4:", "    return", WAIT, LOAD], id="behind a return"),
        pytest.param(["x0 = triton_helpers.bucketize_binary_search(in_ptr0)", WAIT], id="behind a function"),
        pytest.param([LAUNCH, WAIT, LOAD], id="behind the launch of the next"),
    ],
)
def test_kernels_that_do_not(lines: list[str]) -> None:
    bad = kernel("second", *lines)
    assert hasty_kernels(module(GOOD, bad)) == ["second"]
    assert hasty_kernels(module(GOOD, bad.replace("'launch_pdl': True", "'launch_pdl': False"))) == []
    assert hasty_kernels(module(GOOD, bad.replace("'launch_pdl': True", "'native_matmul': False"))) == []


def test_each_of_several_kernels_of_one_name() -> None:
    bad = kernel("first", LOAD, WAIT)
    assert hasty_kernels(module(bad, GOOD)) == hasty_kernels(module(GOOD, bad)) == ["first"]


def test_a_kernel_whose_function_has_another_name() -> None:
    assert hasty_kernels(module(GOOD.replace("def first", "def other"))) == ["first"]


def test_a_cooperative_launch() -> None:
    meta = "'launch_pdl': True, 'launch_cooperative_grid': True"
    assert hasty_kernels(module(kernel("first", WAIT, LOAD, meta=meta))) == ["first"]


def test_a_kernel_that_is_none_of_these() -> None:
    other = "other = launched_otherwise({'launch_pdl': True}, '''tl.load''')\n"
    assert hasty_kernels(module(GOOD, other)) == ["?"]


def test_what_nothing_runs() -> None:
    timed = kernel("second", LOAD, WAIT).replace("'''", "\\'\\'\\'")
    assert hasty_kernels(module(GOOD, front=f"r'''\n{timed}\n'''\n# 'launch_pdl': True")) == []
    assert hasty_kernels("import torch\nasync_compile = AsyncCompile()") == []


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
    asked = environment.get("TORCHINDUCTOR_ENABLE_PDL") == "1"
    assert regions_start_early(torch.device(device, 0)) is (expected and asked)


def test_another_maker_of_gpus_has_no_such_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert not starts_early(torch.device("cuda", 0))
