"""Patterns: calls to look for in a graph, written as a small function over ops.

A function is run once with stand-ins for values, and what it calls is written down. `dgraph.ir.matching` looks for it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from dgraph.errors import InputError
from dgraph.ops import OPS, targets_of
from dgraph.private.torch import OpOverload, OpPacket
from dgraph.types.nodes import op_name

if TYPE_CHECKING:
    from dgraph.ir.matching import Match

CASTS = frozenset(targets_of("to") + targets_of("_to_copy"))
"""Targets of calls that give a value in another dtype."""

_SWAPS = ("add", "mul")
"""Ops of torch whose two operands may stand in either order."""

_ALSO = {"truediv": "div", "floordiv": "floor_divide", "view": "reshape"}
"""Names of Python and of torch for an op that has another name in a canonical graph."""


@dataclass(frozen=True, eq=False)
class Parameter:
    """A value that a pattern binds: a node, a number, a list, or None."""

    name: str


@dataclass(frozen=True, eq=False)
class Step:
    """A value that a pattern computes.

    Attributes:
        name: its name; of a call, the short name of its op. Numbered from the second one on.
        args, kwargs: parameters, steps, constants, and lists of these; `...` stands for anything.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def reads(self) -> set[Parameter | Step]:
        """The parts of the pattern that it reads."""
        return {part for part in _inside([*self.args, *self.kwargs.values()]) if isinstance(part, (Parameter, Step))}


class Cast(Step):
    """A value that may be cast to another dtype: the cast, or the value without one."""


@dataclass(frozen=True, eq=False)
class Call(Step):
    """A call.

    Attributes:
        target: what the function called.
        targets: targets of nodes that it stands for.
    """

    target: Any
    targets: tuple[Any, ...]

    @property
    def op(self) -> str:
        """The op as it reads in a dump."""
        return op_name(self.targets[0])

    @property
    def overload(self) -> Any | None:
        """The target of a node that is this call; None if it can be one of several."""
        overloads = self.target.overloads() if isinstance(self.target, OpPacket) else []
        return self.targets[0] if len(overloads) == 1 or self.target is self.targets[0] else None

    @property
    def orders(self) -> Iterator[tuple[Any, ...]]:
        """Its arguments, in each order that computes the same."""
        yield self.args
        if self.op in _SWAPS and len(self.args) == 2 and not self.kwargs:
            yield self.args[::-1]


@dataclass(frozen=True)
class Traced:
    """A function over ops, as data: its parameters by name, what it computes in order, and the value that it gives."""

    name: str
    parameters: Mapping[str, Parameter]
    steps: tuple[Step, ...]
    result: Any

    @property
    def parts(self) -> tuple[Parameter | Step, ...]:
        """The parameters, and what is computed."""
        return (*self.parameters.values(), *self.steps)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls, in order."""
        return tuple(step for step in self.steps if isinstance(step, Call))


@dataclass(frozen=True, eq=False)
class Pattern:
    """Calls to look for in a graph, written as a function of the values that they read; see `Graph.match`.

        @dgraph.Pattern
        def gated_unit(x, gate, up):
            return F.silu(F.linear(x, gate)) * F.linear(x, up)

    Each parameter binds what stands in its place: a value, a number, a list, or None for an argument that is not
    given. Twice the same parameter is twice the same. Constants of the function must stand in the graph. `...` is
    anything, and as the last argument any further ones.

    An operator, a function of torch and `torch.ops.aten.add` stand for every overload of the op. They also stand for
    its form that counts rows on the device (`Op.live_form_of`). An overload, `torch.ops.aten.add.Tensor`, stands for
    itself. Sums and
    products match in both orders. Parts of several results are `a, b = f(x)` or `f(x)[1]`. Views and casts are calls
    like others, and none is passed over, but those by `Pattern.cast`.

    A pattern can be called in another one.

    Attributes:
        function: returns the last call, which gives the only value that others may read.
        check: takes a `Match`, and returns the reason to refuse it, or None.
        shared: calls before the last that others may read, too, by name: "silu", "linear_1". True: all of them.

    Raises:
        InputError: the function fails with stand-ins for values, calls what is no op, or returns no call of its own.
    """

    function: Callable[..., Any]
    check: Callable[[Match], str | None] | None = None
    shared: Collection[str] | bool = ()

    def __post_init__(self) -> None:
        if not self.ends:
            raise InputError(f"pattern {self.name} returns {self.traced.result!r}; expected the result of one call.")
        read = {self.traced.result, *(part for step in self.traced.steps for part in step.reads)}
        unread = [part.name for part in self.traced.parts if part not in read]
        if unread:
            raise InputError(f"pattern {self.name} never reads {', '.join(unread)}; leave that out.")
        names = [step.name for step in self.traced.steps]
        for name in self.shared if not isinstance(self.shared, bool) else ():
            if name not in names:
                raise InputError(f"pattern {self.name}: shared names {name!r}; its calls are {', '.join(names)}.")

    def __call__(self, *args: Any) -> Any:
        """Make its calls within another pattern."""
        return self.function(*args)

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.traced.name

    @cached_property
    def traced(self) -> Traced:
        """The function as data."""
        return traced(self.function)

    @property
    def calls(self) -> tuple[Call, ...]:
        """Its calls, in order."""
        return self.traced.calls

    @property
    def ends(self) -> tuple[Any, ...]:
        """Targets of the calls that a match can end in."""
        end, found = self.traced.result, ()
        while isinstance(end, Cast):
            found, (end,) = (*CASTS,), end.args
        return (*found, *end.targets) if isinstance(end, Call) else ()

    def may_share(self, step: Step) -> bool:
        """True if calls outside may read what comes before the last call."""
        return self.shared if isinstance(self.shared, bool) else step.name in self.shared

    @staticmethod
    def cast(value: Any) -> Any:
        """Stand, in a pattern, for a value that may be cast to another dtype; "cast" is the name of the cast value."""
        return value.tracer.create_proxy("call_function", Pattern.cast, (value,), {})


@lru_cache(maxsize=256)
def traced(function: Callable[..., Any]) -> Traced:
    """Run a function over ops with stand-ins for its parameters.

    Raises:
        InputError: it fails, or calls what is no op.
    """
    if isinstance(function, Pattern):
        return function.traced
    name = getattr(function, "__name__", type(function).__name__)
    names = list(inspect.signature(function).parameters.values())
    for each in names:
        if each.kind is not each.POSITIONAL_OR_KEYWORD or each.default is not each.empty:
            raise InputError(
                f"pattern {name}: {each} must be a plain parameter, as {each.name}, which binds one value."
            )
    graph = fx.Graph()
    tracer = GraphAppendingTracer(graph)
    try:
        result = function(*(fx.Proxy(graph.placeholder(each.name), tracer) for each in names))
        end = tracer.create_arg(result)
    except Exception as error:
        said = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"pattern {name} cannot be run with stand-ins for values: {said}") from error
    values: dict[fx.Node, Any] = {}
    taken: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = Parameter(str(node.target))
            taken[str(node.target)] = 0  # a call of that name is numbered
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        short = "cast" if node.target is Pattern.cast else _short(name, node)
        number = taken[short] = taken.get(short, -1) + 1
        own = f"{short}_{number}" if number else short
        if node.target is Pattern.cast:
            values[node] = Cast(own, args, {})
        else:
            values[node] = _call(own, node, args, kwargs)
    parameters = {value.name: value for value in values.values() if isinstance(value, Parameter)}
    steps = tuple(value for value in values.values() if isinstance(value, Step))
    return Traced(name, parameters, steps, fx.map_arg(end, values.__getitem__))


def _short(pattern: str, node: fx.Node) -> str:
    """The name of a call: that of its op, without namespace and overload."""
    if node.target is operator.getitem and not isinstance(node.args[1], int):
        raise InputError(
            f"pattern {pattern} takes [{node.args[1]}] of a value; take a part by its number, or call "
            f"torch.ops.aten.slice.Tensor."
        )
    if (found := _targets(node.target)) is None:
        called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
        raise InputError(
            f"pattern {pattern} calls {called}, which is no op of torch or of a package; call ops alone, as "
            f"torch.nn.functional.silu, torch.ops.aten.neg.default or torch.ops.dgraph.rms_norm."
        )
    return op_name(found[0]).rpartition(".")[2]


def _call(name: str, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    targets = _targets(node.target) or ()
    if node.op == "call_method":  # x.reshape(2, 3) is reshape(x, [2, 3])
        types = [str(argument.type) for argument in targets[0]._schema.arguments[1:2]]
        lists = types and types[0].startswith("List") and not isinstance((*args, None)[1], (list, tuple, Parameter))
        args = (args[0], list(args[1:])) if lists and len(args) > 1 else args
    elif inspect.isfunction(node.target):  # torch.nn.functional passes on what a schema leaves to its defaults
        usual = inspect.signature(node.target).parameters
        kwargs = {key: value for key, value in kwargs.items() if value != usual[key].default and key != "_stacklevel"}
    return Call(name, args, kwargs, node.target, targets)


def _targets(target: Any) -> tuple[Any, ...] | None:
    """Targets of nodes that a call in a pattern stands for; None if it is no op."""
    if isinstance(target, OpOverload) or target is operator.getitem:
        return (target,)
    if not isinstance(target, OpPacket):
        short = str(target) if isinstance(target, str) else getattr(target, "__name__", "")
        target = getattr(torch.ops.aten, _ALSO.get(short, short), None) if short else None
        if not isinstance(target, OpPacket):
            return None
    overloads = [getattr(target, each) for each in target.overloads()]
    name = op_name(overloads[0])
    return (*overloads, *(op.overload for op in OPS.values() if op.live_form_of == name))


def _inside(values: Any) -> Iterator[Any]:
    """The entries of nested lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _inside(value)
        else:
            yield value
