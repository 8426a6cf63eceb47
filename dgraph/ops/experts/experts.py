"""dgraph::experts: the feed-forward of a mixture of experts, over the experts that each row was routed to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.families.quantised import KINDS, ROW_KINDS, QuantisedRows, QuantisedWeight, quantised_rows
from dgraph.ops.draws import pad_rows
from dgraph.ops.products.stored import multiply
from dgraph.ops.registry import Sample, define, numeric

CONTRACT = """\
x [N, d]; choice i64[N, k]; weight [N, k]; gate_up [E, 2f, d], the gate's f rows before those of up;
down [E, d, f]; activation "silu" or "gelu_tanh"; inner None, "fp8" or "int8" -> [N, d], contiguous, in the dtype of x.
Row i gives the sum over its k slots of weight[i, s] * down[e] @ (act(gate[e] @ x[i]) * (up[e] @ x[i])), where
e = choice[i, s]. The products are in the dtype of x, but a kernel may keep gate and up in fp32; the activation, its
product with up and the sum are in fp32 (float64 for float64); the sum runs over the slots in ascending order, whatever
the order of experts.
With `inner`, what down multiplies, one row for each slot, is rounded as dgraph::round_rows rounds rows to that kind.
A choice outside of [0, E) adds nothing, and its weight may be anything: a row of such choices gives zeros,
and may hold anything itself. An expert may have no row, all rows, or a row more than once.
Row by row: a padding row influences no other row. Deterministic; the number of rows of an expert may change
the last bits of its products, as it does for any matrix product."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


def reference(
    x: Tensor,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str = "silu",
    inner: str | None = None,
) -> Tensor:
    check(x, choice, weight, gate_up, down, activation, inner)
    each = torch.zeros((*choice.shape, x.shape[1]), dtype=x.dtype, device=x.device)
    live = chosen(choice, gate_up.shape[0])
    for expert in choice[live].unique().tolist():
        rows, slots = (choice == expert).nonzero(as_tuple=True)
        each[rows, slots] = feed_forward(x[rows], gate_up[expert], down[expert], activation, inner)
    return combine(each, weight, live)


def chosen(choice: Tensor, experts: int) -> Tensor:
    """Flag the slots that name an expert, bool[N, k]."""
    return (choice >= 0) & (choice < experts)


def feed_forward(
    x: Tensor | QuantisedRows,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    activation: str,
    inner: str | None,
) -> Tensor:
    """Pass rows [n, d] through one expert -> [n, d]."""
    rows = gated(multiply(x, gate_up), activation)
    if inner is None:
        return multiply(rows, down)
    rounded = QuantisedRows(*quantised_rows(rows, inner), rows.dtype)
    return multiply(rounded if meets(inner, down) else rounded.dequantised(), down)


def meets(kind: str | None, weight: Tensor | QuantisedWeight) -> bool:
    """True if the stored numbers of a weight multiply rows of a kind without being dequantised.

    They have the format of the kind, one scale along each row, and no zeros.
    """
    if kind is None or not isinstance(weight, QuantisedWeight):
        return False
    by_row = weight.scales.shape[-1] == 1 and weight.zeros is None
    return by_row and weight.values.dtype == KINDS[kind].dtype


def gated(both: Tensor, activation: str) -> Tensor:
    """Compute act(gate) * up of [n, 2f] -> [n, f]."""
    gate, up = both.to(numeric(both.dtype)).chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(both.dtype)


def combine(each: Tensor, weight: Tensor, live: Tensor) -> Tensor:
    """Sum the weighted slots of each row, in order; slots that are not live must be zero in `each` [N, k, d]."""
    weight = weight.to(numeric(each.dtype)).masked_fill(~live, 0.0)
    total = each.new_zeros((each.shape[0], each.shape[2]), dtype=weight.dtype)
    for slot in range(each.shape[1]):
        total = total + weight[:, slot, None] * each[:, slot]
    return total.to(each.dtype)


def can_group(x: Tensor | QuantisedRows, gate_up: Tensor | QuantisedWeight) -> bool:
    """True if `torch.nn.functional.grouped_mm` takes these operands without reading the bounds on the host.

    On a GPU it does so for bf16 with rows of a multiple of 16 bytes, from compute capability 8.0 on.
    """
    if isinstance(x, QuantisedRows) or isinstance(gate_up, QuantisedWeight):
        return False
    if not x.is_cuda:
        return x.dtype in (torch.float32, torch.bfloat16)
    aligned = x.shape[1] % 8 == 0 and gate_up.shape[1] % 16 == 0
    return x.dtype == torch.bfloat16 and aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def multiply_groups(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight, in torch's own product -> [N, d_out].

    Args:
        rows: [N, d_in], as `can_group` says; those from ends[e - 1] on and up to ends[e] are multiplied by weight e.
        weight: [E, d_out, d_in], as `can_group` says.
        ends: i32[E].
    """
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def check(
    x: Tensor | QuantisedRows,
    choice: Tensor,
    weight: Tensor,
    gate_up: Tensor | QuantisedWeight,
    down: Tensor | QuantisedWeight,
    activation: str,
    inner: str | None = None,
) -> None:
    """Raise InputError if the shapes do not fit each other, UnknownName for an unknown activation or kind."""
    if activation not in ACTIVATIONS:
        raise UnknownName("activation of dgraph::experts", activation, ACTIVATIONS)
    if inner is not None and inner not in ROW_KINDS:
        raise UnknownName("format of rows", inner, ROW_KINDS)
    experts, both, width = gate_up.shape
    fits = x.dim() == 2 and choice.dim() == 2 and choice.shape == weight.shape and choice.shape[0] == x.shape[0]
    if not fits or x.shape[1] != width or both % 2 or tuple(down.shape) != (experts, width, both // 2):
        shapes = ", ".join(str(list(t.shape)) for t in (x, choice, weight, gate_up, down))
        raise InputError(
            f"dgraph::experts: x [N, d], choice [N, k], weight [N, k], gate_up [E, 2f, d] and down [E, d, f] do not "
            f"fit each other: {shapes}."
        )


def fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def workspace(
    device: torch.device, x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, *rest: Any
) -> int:
    """Bytes that a call allocates beside its result.

    On a GPU: each slot's row before and after the products, and the values between them. On a CPU, where one expert
    follows the other: each slot's row, and the larger of two amounts. One is the values between the products of one of
    evenly loaded experts, the other is two sums at the end.
    """
    slots, width, inner = choice.numel(), x.shape[1], down.shape[2]
    if device.type == "cuda":
        return x.element_size() * slots * (2 * width + 3 * inner)
    wide = numeric(x.dtype).itemsize
    return x.element_size() * slots * width + wide * max(4 * inner * -(-slots // len(down)), 2 * x.numel())


def samples(generator: torch.Generator) -> Iterator[Sample]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for name, n, k, experts, d, f in (
        ("some experts", 9, 2, 5, 16, 8),
        ("more experts than rows", 3, 2, 16, 8, 24),
        ("one slot", 6, 1, 3, 24, 8),
        ("one row", 1, 4, 4, 8, 8),
        ("no rows", 0, 2, 4, 8, 8),
    ):
        choice = torch.rand((n, experts), generator=generator).argsort(-1)[:, :k]
        yield _sample(name, draw(n, d), choice, torch.rand((n, k), generator=generator), experts, f, generator)
    choice = torch.rand((5, 4), generator=generator).argsort(-1)[:, :2]
    sample = _sample("four experts", draw(5, 16), choice, torch.rand((5, 2), generator=generator), 4, 8, generator)
    assert sample.padded is not None
    for more in (("gelu_tanh",), ("silu", "int8")):
        yield Sample(f"{sample.name}, {' '.join(more)}", (*sample.args, *more), (*sample.padded, *more))
    for name, rows in (
        ("all rows to one expert", [[2]] * 7),
        ("choices that name no expert", [[0, -1], [4, 1], [-1, 4], [3, 3]]),
        ("no expert at all", [[-1, 9]] * 3),
    ):
        choice = torch.tensor(rows)
        weight = torch.rand(choice.shape, generator=generator)
        weight[(choice < 0) | (choice > 3)] = torch.nan
        yield _sample(name, draw(len(rows), 16), choice, weight, 4, 8, generator)


def _sample(
    name: str, x: Tensor, choice: Tensor, weight: Tensor, experts: int, f: int, generator: torch.Generator
) -> Sample:
    d = x.shape[1]
    weights = (
        torch.randn((experts, 2 * f, d), generator=generator) * d**-0.5,
        torch.randn((experts, d, f), generator=generator) * f**-0.5,
    )
    padded = tuple(pad_rows(value, 3) for value in (x, choice, weight))
    return Sample(name, (x, choice, weight, *weights), (*padded, *weights))


OP = define(
    "experts",
    reference,
    samples=samples,
    contract=CONTRACT,
    fake=fake,
    by_row=("x", "choice", "weight"),
    padding=(0,),
    kernel="dgraph.ops.experts.triton.experts:kernel",
    stored=("gate_up", "down"),
    rounded=("x",),
    workspace=workspace,
)
