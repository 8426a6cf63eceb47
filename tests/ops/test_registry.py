"""What holds of every op: schema, fake, reference, padding and contract, on all of its samples."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dgraph.ops import KERNELS, OPS, Op, Sample, launcher, op_of, references, register

NAMES = (
    "attention",
    "compact",
    "drift",
    "experts",
    "feature_merge",
    "feature_read",
    "feature_take",
    "feature_write",
    "importance",
    "keep_index",
    "kv_scores",
    "kv_update",
    "kv_votes",
    "kv_write",
    "least_similar",
    "list_kept",
    "lm_head",
    "packed_attention",
    "paged_attention",
    "partial_attention",
    "rms_norm",
    "rope",
    "route",
    "row_slots",
    "rows_glu",
    "rows_linear",
    "rows_norm",
    "rows_rope",
    "select_tokens",
    "sparse_attention",
)
# What an op gives for padding rows, by result; None: any value, because nobody reads it.
PADDING: dict[str, tuple[float | None, ...]] = {
    "compact": (None, None, 0, 0),
    "drift": (0,),
    "experts": (0,),
    "feature_merge": (0,),
    "feature_read": (0,),
    "feature_take": (0,),
    "importance": (0,),
    "kv_scores": (0,),
    "kv_update": (0,),
    "kv_votes": (0,),
    "least_similar": (0,),
    "list_kept": (-1,),
    "lm_head": (-1, -torch.inf, -torch.inf, torch.inf),
    "packed_attention": (0,),
    "paged_attention": (0,),
    "partial_attention": (0, 0),
    "rms_norm": (None,),
    "rope": (None,),
    "rows_glu": (None,),
    "rows_linear": (None,),
    "rows_norm": (None,),
    "rows_rope": (None,),
    "route": (None, None),
    "row_slots": (-1,),
    "select_tokens": (0, 0),
    "sparse_attention": (0,),
}


def samples_of(op: Op) -> list[Sample]:
    return list(op.samples(torch.Generator().manual_seed(7)))


CALLS = [pytest.param(op, sample, id=f"{op.name}: {sample.name}") for op in OPS.values() for sample in samples_of(op)]


def size_depends_on_data(op: Op, sample: Sample) -> bool:
    return op.cut and sample.args[-1] < 0


def argument_names(op: Op) -> list[str]:
    return [argument.name for argument in op.overload._schema.arguments]


def on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    return type(value)(on_meta(part) for part in value) if isinstance(value, (list, tuple)) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, (list, tuple)) else []


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating tensors in `dtype`, all copied."""
    if isinstance(value, Tensor):
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()
    return type(value)(cast(part, dtype) for part in value) if isinstance(value, (list, tuple)) else value


def outcome(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """Results and mutated arguments of a reference, in order."""
    result = op.reference(*args)
    names = argument_names(op)
    return tensors(result) + [args[names.index(name)] for name in op.mutates]


def test_all_ops_are_registered() -> None:
    assert set(NAMES) <= set(OPS)
    assert {op.name for op in OPS.values() if op.inline} == {"feature_take", "rms_norm", "rope", "row_slots"}
    assert {op.name for op in OPS.values() if op.ahead} == {"row_slots"}
    assert {op.name for op in OPS.values() if op.cut} == {"keep_index"}
    assert {name: op.reference for name, op in OPS.items()} == references


def test_op_of_finds_an_op_by_its_target() -> None:
    for name, op in OPS.items():
        assert op is op_of(getattr(torch.ops.dgraph, name).default) is op_of(getattr(torch.ops.dgraph, name))
    assert op_of(torch.ops.aten.add.Tensor) is None
    assert op_of("attention") is None


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_launcher_is_what_the_dispatcher_would_call(op: Op) -> None:
    assert launcher(op, torch.device("cpu")) is op.overload
    on_cuda = launcher(op, torch.device("cuda", 0))
    assert (on_cuda is op.overload) == (op.name not in KERNELS)
    args = cast(samples_of(op)[0].args, torch.float64)  # which goes to the reference, wherever it lies
    if any(t.is_floating_point() for t in tensors(args)):
        mine = cast(args, torch.float64)
        names, found = argument_names(op), tensors(on_cuda(*mine))
        assert_close(found + [mine[names.index(name)] for name in op.mutates], outcome(op, args), equal_nan=True)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'rope' is registered twice"):
        register(OPS["rope"])


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_contract_names_every_argument(op: Op) -> None:
    assert len(op.contract.splitlines()) >= 3
    names = argument_names(op)
    assert [name for name in names if not re.search(rf"\b{name}\b", op.contract)] == []


@pytest.mark.parametrize(("op", "sample"), CALLS)
def test_opcheck(op: Op, sample: Sample) -> None:
    torch.library.opcheck(op.overload, copy.deepcopy(sample.args))


@pytest.mark.parametrize(("op", "sample"), CALLS)
def test_op_is_its_reference_and_mutates_what_it_declares(op: Op, sample: Sample) -> None:
    declared = [a.name for a in op.overload._schema.arguments if a.alias_info is not None]
    assert declared == list(op.mutates)
    called, referred = copy.deepcopy(sample.args), copy.deepcopy(sample.args)
    result = op.overload(*called)
    assert_close(tensors(result), tensors(op.reference(*referred)), rtol=0, atol=0, equal_nan=True)
    names = argument_names(op)[: len(sample.args)]  # the last ones may be left out
    for name, before, after, twin in zip(names, sample.args, called, referred, strict=True):
        if name in op.mutates:
            assert_close(after, twin, rtol=0, atol=0, equal_nan=True)
        else:
            assert_close(tensors(after), tensors(before), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("op", "sample"), CALLS)
def test_float64_is_the_oracle(op: Op, sample: Sample, dtype: torch.dtype) -> None:
    if op.name == "lm_head" and dtype == torch.bfloat16:
        return  # the largest of rounded logits is another token
    inputs = cast(sample.args, dtype)
    expected = outcome(op, cast(inputs, torch.float64))
    for got, want in zip(outcome(op, cast(inputs, dtype)), expected, strict=True):
        tolerance = 2e-2 if got.dtype == torch.bfloat16 else 2e-5
        assert_close(got.to(want.dtype), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(("op", "sample"), [p for p in CALLS if p.values[1].padded is not None])
def test_padding_rows_change_nothing(op: Op, sample: Sample) -> None:
    assert sample.padded is not None
    plain = outcome(op, copy.deepcopy(sample.args))
    padded = outcome(op, copy.deepcopy(sample.padded))
    fillers = PADDING.get(op.name, ())
    for i, (few, many) in enumerate(zip(plain, padded, strict=True)):
        assert_close(many[: len(few)], few, rtol=0, atol=0, equal_nan=True)
        rest = many[len(few) :]
        if i >= len(fillers):
            assert not len(rest)
        elif fillers[i] is not None:
            assert len(rest)
            assert (rest == fillers[i]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("op", "sample"), [p for p in CALLS if not size_depends_on_data(*p.values)])
def test_fake_agrees_with_the_op(op: Op, sample: Sample, dtype: torch.dtype) -> None:
    args = cast(sample.args, dtype)
    fakes = tensors(op.overload(*on_meta(args)))
    for fake, real in zip(fakes, tensors(op.reference(*args)), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


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
