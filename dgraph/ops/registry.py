"""Parts of an op, and the table of all ops.

An op has four parts: a reference in plain torch that defines what is correct, and whose annotated signature is its
schema; sizes and dtypes of its results (so that it can be traced); a contract in words; and samples on which every back
end is compared with it. `Op` also states everything else that passes, the verifier, lowering and the artifact cache
must know of it. They keep no lists of names, so an op from another package is as good as one of these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName
from dgraph.families.quantised import QuantisedRows
from dgraph.ops.draws import pad_rows
from dgraph.plugins import load_ops
from dgraph.private.torch import OpPacket, let_written_be_left_out

NAMESPACE = "dgraph"
"""Namespace of this package's ops; an op from another package has its own."""


@dataclass(frozen=True)
class Sample:
    """One call of an op.

    Attributes:
        name: feature that makes the call special.
        args: its arguments, in the order of the schema.
        padded: the same call with padding rows appended (NaN or nonsense); None if it has no rows.
    """

    name: str
    args: tuple[Any, ...]
    padded: tuple[Any, ...] | None = None


@dataclass(frozen=True, eq=False)
class Op:
    """An op, and all that is known about it. `define` makes one.

    Arguments are named as in the reference.

    Attributes:
        name: as `define` takes it: "kv_write", or "package::op".
        overload: target of the op's nodes in a graph, `torch.ops.<namespace>.<name>.default`.
        reference: plain torch on any device; the definition of correct, and the back end without a kernel.
            Takes float64 as well, and then computes in float64.
        samples: odd shapes and corner cases, drawn from a seeded CPU generator.
        contract: layout, order, tie rule, padding sentinel and determinism, in words.
        mutates: the arguments that it writes.
        reads: the arguments whose values it looks at, among those that may be caches and that it does not write. In a
            program that writes one of them, the op must stand after the write. None: every one.
        by_row: the arguments that it reads row by row. Row i of each result depends on row i of these, and on no other
            row of anything. Empty: it looks at several rows, of one sequence alone.
        apart_by: the argument by which it tells sequences apart, if it looks at several rows and takes no offsets
            i32[b+1]. It holds numbers of blocks, or flags of the rows that were packed.
        added: the argument that flags rows which a step has beside those of its sequences (see `RowPlan.added`). No
            other row sees them, and the op writes nothing for them. None: it knows no such rows.
        count: the argument whose last entry is the number of live rows, on the device. Padding rows of the other
            arguments are left alone, and may hold anything. If the op acts row by row, only that entry counts.
        live_form_of: the op that it computes for the live rows alone, as it reads in a dump ("linear",
            "dgraph.rms_norm"). Its arguments are those of that op, and `count`.
        own_rows: the arguments with rows of their own (keys, or rows that are packed). Their row set may be another
            than that of the other arguments.
        scales: maps each argument that may be in float8 to the argument with its scales; see `dgraph.ops.kv.scales`.
        copies: the arguments that it copies as they are stored, float8 included; another call copies the scales.
        gathers: True if its results are over another row set than its arguments, or its arguments over several.
        padding: value that the padding rows of each result hold; None for anything. Results beyond the last entry have
            no padding rows.
        elementwise: True if each element of its results is computed from that element of its tensors alone, and from
            numbers. `define` derives what follows from it.
        inline: replaced at lowering by a call of its reference, so that the compiler can fuse it.
        ahead: for an inline op: computed in the first region that has its arguments, not in that of its first reader.
            Every layer reads it. If the first layer computed it, the later layers would need a region of their own.
        in_bounds: for an inline op that looks up by indices: they are in bounds by its contract, which a compiler
            cannot see.
        cut: the host must read the size of its result, so a program is cut into stages here.
        kernel: function for tensors on a GPU, as "module:function"; None: the reference runs there, too.
        tuning: the `dgraph.ops.tuning.Tunable` of a kernel that has tilings to choose from, as "module:name".
        stored: the arguments that are weights, or stacks of them, by which it multiplies. In place of a quantised one a
            program gives reference, kernel and `workspace` a `dgraph.families.quantised.QuantisedWeight`. In a graph,
            and called through torch, the op reads the weight dequantised.
        rounded: the arguments whose rows it multiplies by its weight. dgraph::round_rows may have rounded them to the
            kind of numbers in which the weight is stored. In their place a program then gives reference, kernel and
            `workspace` a `dgraph.families.quantised.QuantisedRows`.
        rounds: True if its kernel takes `kind`. With it the kernel returns the results of dgraph::rows_quantise on the
            live rows [N, d] of its one result [N, ...], in place of that.
        workspace: takes a device and a call's arguments, and looks only at sizes and dtypes. It gives the bytes that
            the call there allocates beside its results and frees again: the peak of those that grow with the rows.
            None: next to nothing.
    """

    name: str
    overload: Any  # OpOverload, whose type has no public name
    reference: Callable[..., Any]
    samples: Callable[[torch.Generator], Iterable[Sample]]
    contract: str
    mutates: tuple[str, ...] = ()
    reads: tuple[str, ...] | None = None
    by_row: tuple[str, ...] = ()
    apart_by: str | None = None
    added: str | None = None
    count: str | None = None
    live_form_of: str | None = None
    own_rows: tuple[str, ...] = ()
    scales: Mapping[str, str] = field(default_factory=dict, hash=False)
    copies: tuple[str, ...] = ()
    gathers: bool = False
    padding: tuple[float | None, ...] = ()
    elementwise: bool = False
    inline: bool = False
    ahead: bool = False
    in_bounds: bool = False
    cut: bool = False
    kernel: str | None = None
    tuning: str | None = None
    stored: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    rounds: bool = False
    workspace: Callable[..., int] | None = None

    def __post_init__(self) -> None:
        """Refuse facts about arguments that do not exist, and `rounds` without a kernel.

        Raises:
            InputError: naming the op, the fact, and the arguments that there are.
        """
        facts = (
            *("mutates", "reads", "by_row", "apart_by", "added", "own_rows"),
            *("stored", "rounded", "count", "copies", "scales"),
        )
        for fact in facts:
            value = getattr(self, fact)
            said = (value,) if isinstance(value, str) else value or ()
            said = (*value, *value.values()) if isinstance(value, Mapping) else said
            unknown = [name for name in said if name not in self.arguments]
            if unknown:
                raise InputError(
                    f"op {self.name}: {fact} names {', '.join(unknown)}, but its arguments are "
                    f"{', '.join(self.arguments)}. Name an argument of the reference."
                )
        if self.rounds and self.kernel is None:
            raise InputError(f"op {self.name}: rounds is said of its kernel, and it has none; name the kernel.")

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments, in order."""
        return tuple(argument.name for argument in self.overload._schema.arguments)

    def call_args(self, args: Sequence[Any], **given: Any) -> tuple[Any, ...]:
        """Arguments of a call with others in the places of some; defaults where nothing is given."""
        known = dict(zip(self.arguments, args, strict=False)) | given
        return tuple(known.get(a.name, a.default_value) for a in self.overload._schema.arguments)

    def values(self, names: str | Sequence[str] | None, args: Sequence[Any]) -> list[Any]:
        """Arguments of a call that have one of the names, in the order of the schema."""
        wanted = (names,) if isinstance(names, str) else names or ()
        return [value for name, value in zip(self.arguments, args, strict=False) if name in wanted]

    def written(self, args: Sequence[Any]) -> list[Any]:
        """Arguments of a call that the op writes, in order; those that are None are left out."""
        return [value for value in self.values(self.mutates, args) if value is not None]

    def read(self, args: Sequence[Any]) -> list[Any]:
        """Arguments of a call that the op reads as they are at the time of the call, in order."""
        names = [n for n in self.arguments if n not in self.mutates] if self.reads is None else self.reads
        return self.values(names, args)

    def counter(self, args: Sequence[Any]) -> Any | None:
        """Argument of a call that counts the live rows on the device; None if the op has no such argument."""
        return next(iter(self.values(self.count, args)), None)

    @cached_property
    def tunable(self) -> Any:
        """Object that `tuning` names; imported on first use, and Triton with it."""
        return self._at(self.tuning)

    @cached_property
    def on_gpu(self) -> Any:
        """Function that `kernel` names; imported on first use, and Triton with it."""
        return self._at(self.kernel)

    def _at(self, place: str | None) -> Any:
        """Import the object at a place "module:name".

        Raises:
            InputError: it does not exist; the message names the op and the place.
        """
        module, _, name = (place or "").partition(":")
        try:
            return getattr(import_module(module), name)
        except (AttributeError, ImportError, ValueError) as error:
            raise InputError(f'op {self.name}: {place!r} does not exist ({error}). Give "module:name".') from error


class Ops(dict[str, Op]):
    """Ops by name.

    A name that is not there yet is looked for in the modules that other packages name in the entry-point group
    "dgraph.ops". All of these modules are imported then.

    Raises:
        UnknownName: no op has that name.
        PluginError: one of these modules cannot be imported.
    """

    def __missing__(self, name: str) -> Op:
        load_ops()
        if name not in self:
            raise UnknownName("op", name, self)
        return self[name]


OPS = Ops()
_OF_TARGET: dict[int, Op] = {}
"""Ops by the identity of overload and packet, which the ops hold: torch computes a hash of an overload in Python."""
_ON_CUDA: dict[str, Callable[..., Any]] = {}


def define(
    name: str,
    reference: Callable[..., Any],
    *,
    samples: Callable[[torch.Generator], Iterable[Sample]],
    contract: str = "",
    fake: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
    elementwise: bool = False,
    **facts: Any,
) -> Op:
    """Declare an op. `reference` runs on every device, but not on a GPU if the op has a kernel.

    An elementwise op needs its reference and samples alone. `define` derives its contract, its rows (`Op.by_row`) and
    the padding of samples and results. Unless it has a kernel, the compiler may fuse it (`Op.inline`).

        def gate(x: Tensor, y: Tensor, slope: float) -> Tensor:
            return x * torch.sigmoid(slope * y)

        OP = define("mine::gate", gate, samples=samples, elementwise=True)

    Args:
        name: "package::op", an op of `torch.ops.package`; without "::" one of this package's own.
        reference: its annotated signature is the schema of the op; `torch.library.infer_schema` lists the types that
            may stand there.
        samples, contract: see `Op`. A contract of an elementwise op is what is to be said besides the derived one.
        fake: takes the same arguments, and returns empty tensors of the sizes and dtypes of the results. None: the
            reference itself is traced, or there are no results.
        mutates: the arguments that it writes.
        elementwise: see `Op`. Its tensors have the rows of the step, and all the same sizes.
        facts: the other fields of `Op`.

    Returns:
        The op, which is in the table now.

    Raises:
        InputError: `facts` name an argument that the op does not have; an elementwise op writes an argument, or takes
            no tensor.
        ValueError: the name is taken, or an op cannot have the signature.
    """
    namespace, _, short = name.rpartition("::")
    if name in OPS:
        raise _taken(name)
    schema = torch.library.infer_schema(reference, mutates_args=mutates)
    full = f"{namespace or NAMESPACE}::{short}"
    custom = torch.library.custom_op(full, reference, mutates_args=mutates, schema=schema)
    custom.register_fake(fake or (_nothing if schema.endswith("-> ()") else reference))
    overload = getattr(getattr(torch.ops, namespace or NAMESPACE), short).default
    if any(argument.name in mutates and argument.has_default_value() for argument in overload._schema.arguments):
        let_written_be_left_out(custom)
    op = Op(name, overload, reference, samples, contract, mutates=mutates, elementwise=elementwise, **facts)
    return register(_derived(op, facts) if elementwise else op)


def _derived(op: Op, facts: Mapping[str, Any]) -> Op:
    """An elementwise op with what follows from that, where the declaration says nothing else."""
    schema = op.overload._schema
    tensors = tuple(a.name for a in schema.arguments if isinstance(a.type, torch.TensorType))
    if op.mutates or not tensors:
        raise InputError(
            f"op {op.name}: an elementwise op reads tensors and writes none of them; it takes the tensors "
            f"{', '.join(tensors) or '(none)'}, and writes {', '.join(op.mutates) or 'none'}. Leave elementwise out."
        )
    numbers = [name for name in op.arguments if name not in tensors]
    alike = f"{', '.join(tensors)} [N, ...], all of the same sizes -> {len(schema.returns)} of these sizes"
    given = f"that element of {', '.join(tensors)}" + (f", and from {', '.join(numbers)}" if numbers else "")
    lines = (op.contract, alike, f"Elementwise: each element is computed from {given}.", _ELEMENTWISE)
    derived: dict[str, Any] = {
        "by_row": tensors,
        "padding": (None,) * len(schema.returns),
        "inline": op.kernel is None,
        "contract": "\n".join(filter(None, lines)),
        "samples": partial(_padded, op.samples),
    }
    return replace(op, **{fact: value for fact, value in derived.items() if fact not in facts})


_ELEMENTWISE = "Row by row. Padding rows may hold anything, and so do theirs of the result. Deterministic."


def _padded(samples: Callable[[torch.Generator], Iterable[Sample]], generator: torch.Generator) -> Iterable[Sample]:
    """Samples of an elementwise op, with three rows of padding where none are given."""
    for sample in samples(generator):
        padded = tuple(pad_rows(arg, 3) if isinstance(arg, Tensor) else arg for arg in sample.args)
        yield sample if sample.padded is not None else replace(sample, padded=padded)


def register(op: Op) -> Op:
    """Put `op` in the table, and register its kernel with torch if it has one.

    The kernel's module, and Triton with it, is imported on the first call with CUDA tensors. Float64 goes to the
    reference.

    Raises:
        ValueError: there is an op of that name.
    """
    if op.name in OPS:
        raise _taken(op.name)
    OPS[op.name] = op
    _OF_TARGET[id(op.overload)] = _OF_TARGET[id(op.overload.overloadpacket)] = op
    if op.kernel is not None:
        _ON_CUDA[op.name] = _cuda_call(op)
        torch.library.register_kernel(op.overload, "cuda", _ON_CUDA[op.name])
    return op


def _cuda_call(op: Op) -> Callable[..., Any]:
    def on_cuda(*args: Any) -> Any:
        values = args[0] if isinstance(args[0], (list, tuple)) else args
        tensors = [value for value in values if isinstance(value, (Tensor, QuantisedRows))]
        if not tensors or any(t.dtype == torch.float64 for t in tensors):
            return op.reference(*args)
        kernel = op.on_gpu
        with torch.cuda.device(tensors[0].device):
            return kernel(*args)

    return on_cuda


def _taken(name: str) -> ValueError:
    return ValueError(f"op {name!r} is registered twice; give the second one another name.")


def _nothing(*args: Any) -> None:
    """Stand in for an op without results when it is traced."""


def launcher(op: Op, device: torch.device) -> Callable[..., Any]:
    """Function in which a call of `op` with tensors of a device ends, to be called without torch's dispatcher.

    The dispatcher takes the host longer than a launch on a GPU, and on a CPU as long as a small op. Only for calls that
    nothing traces or differentiates.
    """
    return _ON_CUDA.get(op.name, op.reference) if device.type == "cuda" else op.reference


def op_of(target: object) -> Op | None:
    """Op that a graph node has as its target, as overload or overload packet; None for other targets."""
    return _OF_TARGET.get(id(target))


def numeric(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which an op computes statistics of values of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def targets_of(name: str) -> list[Any]:
    """Targets of nodes that call an op: every overload, and their packet; empty if no op has the name.

    name: short ("kv_write", "linear"), for an op of dgraph and one of torch alike; or "package::op", which for torch is
    "aten::linear".
    """
    found = list(_of_torch(name.removeprefix("aten::")))
    if not name.startswith("aten::") and (name in OPS or not found):
        with suppress(UnknownName):
            found += [OPS[name].overload, OPS[name].overload.overloadpacket]
    return found


@cache
def _of_torch(name: str) -> tuple[Any, ...]:
    if name == operator.getitem.__name__:
        return (operator.getitem,)
    packet = getattr(torch.ops.aten, name, None) if name else None
    return (packet, *(getattr(packet, each) for each in packet.overloads())) if isinstance(packet, OpPacket) else ()
