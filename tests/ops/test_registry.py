"""What holds of every op, on all of its samples; ops from outside; what is said of an op is true of its arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import dgraph.ops
from dgraph.errors import InputError
from dgraph.lowering.kernels import kernel_modules
from dgraph.ops import OPS, Op, Sample, define, op_of, register
from dgraph.testing.ops import CALL_CHECKS, OP_CHECKS, check_kernel, check_op, check_precision, samples_of

OURS = tuple(OPS.values())
ROUNDED_APART = (
    "lm_head",
    "lm_head_adjusted",
    "lm_head_combine",
    "lm_head_measured",
    "lm_head_part",
    "partial_context",
)
"""The largest of rounded logits is another token; sums in fp32 of a rounded context are others."""


@contextmanager
def naming(sample: Sample, check: str) -> Iterator[None]:
    """Let a failure say on which sample, and by which check."""
    try:
        yield
    except Exception as error:
        error.add_note(f"sample {sample.name!r}, {check}")
        raise


@pytest.fixture
def table() -> Iterator[dict[str, Op]]:
    """The table of ops, which is afterwards as it was."""
    before = dict(OPS)
    yield OPS
    for name in OPS.keys() - before:
        del OPS[name]


def test_every_module_of_an_op_is_imported() -> None:
    folder = Path(dgraph.ops.__path__[0])
    files = {path.stem for path in folder.rglob("*.py") if "\nOP = define(" in path.read_text()}
    assert files == {op.name for op in OURS}
    inline = {
        "block_numbers",
        "dequantise",
        "dequantise_rows",
        "drifted",
        "embedding_part",
        "embedding_stored",
        "feature_take",
        "lm_head_combine",
        "low_rank",
        "quantise_rows",
        "rms_norm",
        "rope",
        "round_rows",
        "row_slots",
        "vocabulary_combine",
    }
    assert {op.name for op in OURS if op.inline} == inline
    assert {op.name for op in OURS if op.ahead} == {"block_numbers", "row_slots"}
    assert {op.name for op in OURS if op.cut} == {"keep_index"}
    assert op_of(torch.ops.aten.add.Tensor) is None
    assert op_of("attention") is None


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'rope' is registered twice"):
        register(OPS["rope"])
    with pytest.raises(ValueError, match="'rope' is registered twice"):
        define("rope", OPS["rope"].reference, samples=OPS["rope"].samples, contract="")


@pytest.mark.parametrize("check", OP_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_op(op: Op, check: Any) -> None:
    if check is check_kernel:
        pytest.importorskip("triton")
    check(op)


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_calls(op: Op) -> None:
    for sample in samples_of(op):
        for check in CALL_CHECKS:
            with naming(sample, check.__name__):
                check(op, sample)


@pytest.mark.parametrize("op", OURS, ids=lambda op: op.name)
def test_float64_is_the_oracle(op: Op) -> None:
    for sample in samples_of(op):
        for dtype in (torch.float32,) if op.name in ROUNDED_APART else (torch.float32, torch.bfloat16):
            with naming(sample, f"check_precision in {dtype}"):
                check_precision(op, sample, dtype)


def test_a_kept_count_is_symbolic_under_export() -> None:
    class Gather(torch.nn.Module):
        def forward(self, x: Tensor, keep: Tensor, cu_rows: Tensor) -> Tensor:
            index, _ = torch.ops.dgraph.keep_index(keep, cu_rows, -1)
            return torch.ops.dgraph.compact([x], index)[0]

    x, cu_rows = torch.arange(12.0).view(6, 2), torch.tensor([0, 6]).int()
    keep = torch.tensor([True, False, True, True, False, False])
    program = torch.export.export(Gather(), (x, keep, cu_rows), strict=False)
    assert op_of(next(n for n in program.graph.nodes if n.op == "call_function").target) is OPS["keep_index"]
    for flags in (keep, ~keep, torch.zeros_like(keep)):
        assert_close(program.module()(x, flags, cu_rows), x[flags])


# -- ops from outside --------------------------------------------------------------------------------------------

OUTSIDE = '''
import torch
from torch import Tensor
from dgraph.ops import Sample, define

CONTRACT = """Twice x [N, d], added to total [N, d], which is written.
Row by row; padding rows hold twice what they held.
Deterministic."""

def twice(x: Tensor, total: Tensor) -> Tensor:
    total.add_(2 * x)
    return 2 * x

def samples(generator):
    for n in (3, 0):
        x = torch.randn(n, 4, generator=generator)
        more = torch.cat([x, torch.ones(2, 4)])
        yield Sample(f"{n} rows", (x, x.clone()), (more, more.clone()))

def kernel(x, total, tiling=None):
    raise AssertionError("there is no GPU here")

TWICE = define(
    "NAME::twice",
    twice,
    samples=samples,
    contract=CONTRACT,
    fake=lambda x, total: torch.empty_like(x),
    mutates=("total",),
    by_row=("x",),
    padding=(2, 3),
    kernel="NAME:kernel",
)
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, Op], request: Any) -> str:
    """The name of a module outside of dgraph that defines an op, not imported yet."""
    name = f"outside_{request.node.name}"
    (tmp_path / f"{name}.py").write_text(OUTSIDE.replace("NAME", name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_an_op_from_outside_passes_the_checks_of_our_own(outside: str) -> None:
    assert outside not in kernel_modules()
    op = importlib.import_module(outside).TWICE
    assert {outside, "dgraph.ops.attention.triton.attention_shares"} <= set(kernel_modules()), (
        "its compiled kernels are kept like ours"
    )
    assert OPS[f"{outside}::twice"] is op is op_of(getattr(torch.ops, outside).twice.default)
    check_op(op)


def test_what_a_check_finds_is_named(outside: str) -> None:
    text = (Path(sys.path[0]) / f"{outside}.py").read_text()
    for name, old, new, message in (
        ("a", "tiling=None", "tiling", "takes tiling; give a default"),
        ("b", "kernel(x, total", "kernel(total, x", r"takes \('total', 'x'\), expected \('x', 'total'\)"),
        ("c", "torch.empty_like(x)", "x.new_empty(3)", "opcheck|traced as"),
        ("d", "2, 3)", "2, 1)", "sample '3 rows': padding rows of result 1 are not 1"),
        ("e", "Row by row; padding rows hold twice what they held.\n", "", "the contract of .* has less than 3 lines"),
        ("f", "added to total", "added to all", "does not name total"),
    ):
        module = f"{outside}_{name}"
        (Path(sys.path[0]) / f"{module}.py").write_text(text.replace(outside, module).replace(old, new))
        importlib.invalidate_caches()
        with pytest.raises(Exception, match=message):
            check_op(importlib.import_module(module).TWICE)


@pytest.mark.parametrize("fact", ["mutates", "reads", "by_row", "own_rows", "count"])
def test_a_fact_about_an_argument_that_does_not_exist(fact: str) -> None:
    rope = OPS["rope"]
    facts: dict[str, Any] = {fact: "y" if fact == "count" else ("y",)}
    with pytest.raises(InputError, match=f"op test: {fact} names y, but its arguments are x, cos, sin. Name an arg"):
        Op("test", rope.overload, rope.reference, rope.samples, "", **facts)


def test_a_kernel_that_does_not_exist() -> None:
    rope = OPS["rope"]
    for place in ("dgraph.ops.rows.rope:kernel", "no.such.module:kernel", "kernel"):
        op = Op("test", rope.overload, rope.reference, rope.samples, "", kernel=place)
        with pytest.raises(InputError, match=f"op test: '{place}' does not exist .*Give \"module:name\""):
            _ = op.on_gpu


def gated(x: Tensor, y: Tensor, slope: float) -> Tensor:
    return x * torch.sigmoid(slope * y)


def gated_samples(generator: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("rows", (5, 8)), ("heads", (3, 2, 4)), ("no rows", (0, 8))):
        yield Sample(name, (*torch.randn(2, *shape, generator=generator), 0.5))


def test_an_elementwise_op_owes_its_reference_and_samples_alone(table: dict[str, Op]) -> None:
    op = define("dgraph_tests::gated", gated, samples=gated_samples, elementwise=True)
    check_op(op)
    assert (op.by_row, op.padding, op.inline) == (("x", "y"), (None,), True)
    assert op.contract.splitlines()[:2] == [
        "x, y [N, ...], all of the same sizes -> 1 of these sizes",
        "Elementwise: each element is computed from that element of x, y, and from slope.",
    ]
    assert [len(sample.padded[0]) - len(sample.args[0]) for sample in samples_of(op) if sample.padded] == [3, 3, 3]


def test_what_is_said_of_an_elementwise_op_is_held_to(table: dict[str, Op]) -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def samples(generator: torch.Generator) -> Iterator[Sample]:
        yield Sample("rows", (torch.randn(5, 8, generator=generator),))

    op = define("dgraph_tests::centred", centred, samples=samples, contract="Less its mean.", elementwise=True)
    assert op.contract.startswith("Less its mean.\nx [N, ...]")
    with pytest.raises(AssertionError, match="op dgraph_tests::centred, sample 'rows'"):
        check_op(op)

    def doubled(x: Tensor) -> None:
        x.mul_(2)

    with pytest.raises(InputError, match=r"writes none of them; it takes the tensors x, and writes x\. Leave"):
        define("dgraph_tests::doubled", doubled, samples=samples, mutates=("x",), elementwise=True)
