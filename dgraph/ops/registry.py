"""What an op of dgraph consists of, and the table of all ops.

An op has four parts: a schema (with a fake, so that it can be traced), a reference in plain torch that
defines what is correct, a contract in words, and samples on which every back end is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "dgraph"


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    Attributes:
        name: what is special about the call.
        args: its arguments, in the order of the schema.
        padded: the same call with padding rows appended (NaN or nonsense); None if it has no rows.
    """

    name: str
    args: tuple[Any, ...]
    padded: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Op:
    """An op of the namespace `dgraph`.

    Attributes:
        name: its name without the namespace.
        overload: what a graph holds as the target of a node, `torch.ops.dgraph.<name>.default`.
        reference: plain torch on any device; the definition of correct, and the back end without a kernel.
            Takes float64 as well, and then computes in float64.
        samples: odd shapes and corner cases, drawn from a seeded CPU generator.
        contract: layout, order, tie rule, padding sentinel and determinism, in words.
        inline: replaced at lowering by a call of its reference, so that the compiler can fuse it.
        ahead: of an inline op, computed in the first region that has what it reads, not in that of its first reader:
            every layer reads it, and would else be another region than the first.
        in_bounds: of an inline op that looks up by numbers: they are in bounds by its contract, which a compiler cannot
            see.
        cut: the host must read its result size; a program is cut into stages here.
        mutates: names of the arguments that it writes.
        own_rows: one of its arguments (keys, or rows that are packed) has rows of its own, which may be another row set
            than that of the others.
    """

    name: str
    overload: Any  # OpOverload, whose type has no public name
    reference: Callable[..., Any]
    samples: Callable[[torch.Generator], Iterable[Sample]]
    contract: str
    inline: bool = False
    ahead: bool = False
    in_bounds: bool = False
    cut: bool = False
    mutates: tuple[str, ...] = ()
    own_rows: bool = False

    def written(self, args: Sequence[Any]) -> list[Any]:
        """Those of a call's arguments that it writes, in order."""
        names = (argument.name for argument in self.overload._schema.arguments)
        return [value for name, value in zip(names, args, strict=False) if name in self.mutates]


OPS: dict[str, Op] = {}
_OF_TARGET: dict[Any, Op] = {}
_ON_CUDA: dict[str, Callable[..., Any]] = {}


def define(
    name: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> Any:
    """Declare `torch.ops.dgraph.<name>` with `reference` as its kernel on every device.

    A kernel for one device type, added with `torch.library.register_kernel`, replaces the reference there.
    Returns the overload.
    """
    custom = torch.library.custom_op(f"{NAMESPACE}::{name}", reference, mutates_args=mutates, schema=schema)
    custom.register_fake(fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register(op: Op) -> Op:
    """Put `op` in the table; a second op of the same name is an error."""
    if op.name in OPS:
        raise ValueError(f"op {op.name!r} is registered twice; give the second one another name.")
    OPS[op.name] = op
    _OF_TARGET[op.overload] = _OF_TARGET[op.overload.overloadpacket] = op
    return op


def use_kernel(op: Op) -> None:
    """Give calls of `op` with CUDA tensors to the function `kernel` of `dgraph/ops/triton/<name>.py`.

    The file, and triton with it, is imported on the first such call. Float64 goes to the reference.
    """

    def on_cuda(*args: Any) -> Any:
        values = args[0] if isinstance(args[0], (list, tuple)) else args
        tensors = [value for value in values if isinstance(value, Tensor)]
        if not tensors or any(t.dtype == torch.float64 for t in tensors):
            return op.reference(*args)
        kernel = import_module(f"dgraph.ops.triton.{op.name}").kernel
        with torch.cuda.device(tensors[0].device):
            return kernel(*args)

    torch.library.register_kernel(op.overload, "cuda", on_cuda)
    _ON_CUDA[op.name] = on_cuda


def launcher(op: Op, device: torch.device) -> Callable[..., Any]:
    """What a call of `op` with tensors of a device ends in, without the way through torch's dispatcher, which takes the
    host longer than the launch. Only for calls that nothing traces or differentiates.
    """
    return _ON_CUDA.get(op.name, op.overload) if device.type == "cuda" else op.overload


def op_of(target: object) -> Op | None:
    """The op that is the target of a graph node, as overload or overload packet; None for other targets."""
    return _OF_TARGET.get(target) if callable(target) else None


def numeric(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes statistics of values of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
