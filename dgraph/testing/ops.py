"""Checks of an op on all of its samples: schema, fake, reference, padding, contract and kernel's signature.

    @pytest.mark.parametrize("op", MY_OPS)
    def test_my_op(op):
        dgraph.testing.ops.check_op(op)

The checks run on a CPU. They compare no kernel with its reference: that takes a GPU, or Triton's interpreter. Each
raises an AssertionError that names the op and the sample.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.ops import Op, Sample, launcher, op_of
from dgraph.ops.kv.scales import FLOAT8

LINES = 3
"""Least number of lines of a contract."""
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
"""Largest difference, relative and absolute, of a result from that in float64, by the dtype of the result."""


def samples_of(op: Op) -> list[Sample]:
    """The samples of an op, the same ones every time."""
    return list(op.samples(torch.Generator().manual_seed(7)))


def check_op(op: Op, dtypes: Sequence[torch.dtype] = tuple(TOLERANCE)) -> None:
    """Run every check on every sample.

    The facts that `define` derives (elementwise=True) pass them without a word from the op.

    Args:
        op: the op.
        dtypes: dtypes of floating arguments, in which the reference must be close to float64. An op that takes the
            largest of some values may take another one when they are rounded; give float32 alone for such an op.
    """
    for check in OP_CHECKS:
        check(op)
    for sample in samples_of(op):
        for check_call in CALL_CHECKS:
            check_call(op, sample)
        for dtype in dtypes:
            check_precision(op, sample, dtype)


def check_contract(op: Op) -> None:
    """Check that the contract has at least `LINES` lines, and names every argument."""
    assert len(op.contract.splitlines()) >= LINES, f"the contract of {op.name} has less than {LINES} lines"
    missing = [name for name in op.arguments if not re.search(rf"\b{name}\b", op.contract)]
    assert not missing, f"the contract of {op.name} does not name {', '.join(missing)}"


def check_target(op: Op) -> None:
    """Check that a call by overload or by packet is recognised as the op, and that the schema says what it writes."""
    assert op is op_of(op.overload) is op_of(op.overload.overloadpacket), f"{op.name} is not in the table"
    declared = tuple(a.name for a in op.overload._schema.arguments if a.alias_info is not None)
    assert declared == op.mutates, f"{op.name} writes {op.mutates}, but its schema says {declared}"


def check_kernel(op: Op) -> None:
    """Check that the kernel takes the schema's arguments in order, and more only with defaults. Imports Triton."""
    if op.kernel is None:
        return
    parameters = list(inspect.signature(op.on_gpu).parameters.values())
    first, more = parameters[: len(op.arguments)], parameters[len(op.arguments) :]
    got = tuple(parameter.name for parameter in first)
    assert got == op.arguments, f"the kernel of {op.name} takes {got}, expected {op.arguments}"
    bare = [p.name for p in more if p.default is p.empty]
    assert not bare, f"the kernel of {op.name} also takes {', '.join(bare)}; give a default"


def check_launcher(op: Op) -> None:
    """Check that calls without the dispatcher go where its calls go, and float64 to the reference on any device."""
    assert launcher(op, torch.device("cpu")) is op.reference
    on_cuda = launcher(op, torch.device("cuda", 0))
    assert (on_cuda is op.reference) == (op.kernel is None), f"{op.name} is launched by {on_cuda}"
    args = cast(samples_of(op)[0].args, torch.float64)
    if any(t.is_floating_point() for t in tensors(args)):
        mine = cast(args, torch.float64)
        found = tensors(on_cuda(*mine)) + op.written(mine)
        assert_close(found, outcome(op, args), equal_nan=True, msg=_of(op))


def check_tracing(op: Op) -> None:
    """Check that the op traced with symbolic sizes gives what it gives untraced, by torch's check of custom ops.

    It runs once per kind of arguments. Samples whose tensors have the same dtypes and numbers of dimensions, and whose
    settings select the same branches, make one trace. `check_fake` compares the fake with each sample's own sizes.
    """
    kinds = {_kind(sample.args): sample for sample in reversed(samples_of(op))}
    for sample in kinds.values():
        torch.library.opcheck(op.overload, copy.deepcopy(sample.args), test_utils="test_aot_dispatch_dynamic")


def check_schema(op: Op, sample: Sample) -> None:
    """Run torch's own checks of a call of a custom op: schema, autograd registration, fake.

    They compare values by arithmetic that 8-bit floats do not have, so those are given as float16, which is exact.
    """
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(op.overload, _widened(copy.deepcopy(sample.args)), test_utils=checks)


def check_reference(op: Op, sample: Sample) -> None:
    """Check that on a CPU the op gives its reference's results, and writes its declared arguments and no others."""
    called, referred = copy.deepcopy(sample.args), copy.deepcopy(sample.args)
    result = op.overload(*called)
    assert_close(tensors(result), tensors(op.reference(*referred)), rtol=0, atol=0, equal_nan=True, msg=_of(op, sample))
    names = op.arguments[: len(sample.args)]  # the last ones may be left out
    for name, before, after, twin in zip(names, sample.args, called, referred, strict=True):
        expected = twin if name in op.mutates else before
        assert_close(tensors(after), tensors(expected), rtol=0, atol=0, equal_nan=True, msg=_of(op, sample, name))


def check_precision(op: Op, sample: Sample, dtype: torch.dtype = torch.float32) -> None:
    """Check that the reference in a dtype is close to the reference in float64."""
    inputs = cast(sample.args, dtype)
    expected = outcome(op, cast(inputs, torch.float64))
    for got, want in zip(outcome(op, cast(inputs, dtype)), expected, strict=True):
        tolerance = TOLERANCE[torch.bfloat16 if got.dtype == torch.bfloat16 else torch.float32]
        tolerance = 0.0 if got.dtype == FLOAT8 else tolerance  # rounded from fp32 in any dtype
        got = got.to(want.dtype)
        assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=_of(op, sample))


def check_padding(op: Op, sample: Sample) -> None:
    """Check that padding rows change no other row, and hold the values of `Op.padding`."""
    if sample.padded is None:
        return
    plain = outcome(op, copy.deepcopy(sample.args))
    padded = outcome(op, copy.deepcopy(sample.padded))
    for i, (few, many) in enumerate(zip(plain, padded, strict=True)):
        assert_close(many[: len(few)], few, rtol=0, atol=0, equal_nan=True, msg=_of(op, sample, f"result {i}"))
        rest = many[len(few) :]
        if i >= len(op.padding):
            assert not len(rest), f"{_where(op, sample)}: result {i} has padding rows; Op.padding says of none"
        elif (filler := op.padding[i]) is not None:
            assert len(rest), f"{_where(op, sample)}: result {i} has no padding rows; Op.padding says {filler}"
            assert (rest == filler).all(), f"{_where(op, sample)}: padding rows of result {i} are not {filler}"


def check_elementwise(op: Op, sample: Sample) -> None:
    """Check that an op that says so computes each element from that element alone: in any order of them, as one row."""
    if not op.elementwise:
        return
    sizes = {t.shape for t in tensors(sample.args)}
    assert len(sizes) == 1, f"{_where(op, sample)}: its tensors have the sizes {sorted(map(list, sizes))}, not the same"
    order = torch.randperm(next(iter(sizes)).numel(), generator=torch.Generator().manual_seed(7))
    shuffled = tuple(a.flatten()[order] if isinstance(a, Tensor) else a for a in sample.args)
    for got, want in zip(tensors(op.reference(*shuffled)), tensors(op.reference(*sample.args)), strict=True):
        assert_close(got, want.flatten()[order], equal_nan=True, msg=_of(op, sample))


def check_fake(op: Op, sample: Sample) -> None:
    """Check that a traced result has the shape, dtype and strides of the computed one.

    An op that cuts rows is left out, as the size of its result depends on data.
    """
    if op.cut:
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        args = cast(sample.args, dtype)
        fakes = tensors(op.overload(*on_meta(args)))
        for fake, real in zip(fakes, tensors(op.reference(*args)), strict=True):
            got, want = ((t.shape, t.dtype, t.stride()) for t in (fake, real))
            assert got == want, f"{_where(op, sample)}: traced as {got}, computed as {want}"


OP_CHECKS: tuple[Callable[[Op], None], ...] = (
    check_contract,
    check_target,
    check_kernel,
    check_launcher,
    check_tracing,
)
"""Checks of an op as a whole."""
CALL_CHECKS: tuple[Callable[[Op, Sample], None], ...] = (
    check_schema,
    check_reference,
    check_padding,
    check_elementwise,
    check_fake,
)
"""Checks of a call on one sample; `check_precision` takes a dtype as well."""


def outcome(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """Results and written arguments of a reference, in order."""
    return tensors(op.reference(*args)) + op.written(args)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, (list, tuple)) else []


def cast(value: Any, dtype: torch.dtype) -> Any:
    """A value with copies of its tensors, floating ones in a dtype.

    A float8 tensor keeps its dtype, as it stands for numbers only together with its scales.
    """
    if isinstance(value, Tensor):
        plain = value.is_floating_point() and value.dtype != FLOAT8
        return value.to(dtype, copy=True) if plain else value.clone()
    return type(value)(cast(part, dtype) for part in value) if isinstance(value, (list, tuple)) else value


def _widened(value: Any) -> Any:
    """A value with its 8-bit floats as float16."""
    if isinstance(value, Tensor):
        return value.half() if value.is_floating_point() and value.dtype.itemsize == 1 else value
    return type(value)(_widened(part) for part in value) if isinstance(value, (list, tuple)) else value


def on_meta(value: Any) -> Any:
    """A value with its tensors on the meta device, as shapes without data."""
    if isinstance(value, Tensor):
        return value.to("meta")
    return type(value)(on_meta(part) for part in value) if isinstance(value, (list, tuple)) else value


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.dim()
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value), value > 0
    return value


def _where(op: Op, sample: Sample | None = None, part: str = "") -> str:
    return ", ".join(filter(None, [f"op {op.name}", f"sample {sample.name!r}" if sample else "", part]))


def _of(op: Op, sample: Sample | None = None, part: str = "") -> Callable[[str], str]:
    """A function that puts the op, sample and part before a message of torch."""
    return lambda text: f"{_where(op, sample, part)}: {text}"
