"""Trace a function over tensors that stay where they are, and compile it as one region.

Regions come from captured graphs of models. This is for plain code between two forwards: many ops on few numbers, of
which Inductor makes few kernels. Sizes are those of the tensors that it was traced with.

The region returns the new values of its inputs, which are written after it. Inductor can write them in its own kernels,
but does not always read them first. Torch 2.11 computes one update from values that another one has written already.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from dgraph.cache.store import Store
from dgraph.errors import LoweringError, warn
from dgraph.lowering.inductor import Compiled, RegionFunction, Source, compiled, known
from dgraph.private.torch import copy_all, tracing
from dgraph.types.shapes import DTYPES, Symbols

Update = tuple[int, Tensor]
"""The number of an input, and the value that is written into it."""

EXACT = {"emulate_precision_casts": True}
"""Settings of Inductor under which a fused kernel rounds as the ops one by one do: products and sums stay apart."""


@dataclass(frozen=True)
class Traced:
    """A traced function.

    Attributes:
        source: the region to compile; a call returns the updates and writes nothing.
        constants: tensors that the function reads beside its inputs, and that the region takes after them.
        updated: numbers of the inputs that are updated, in the order of the returned values.
    """

    source: Source
    constants: tuple[Tensor, ...]
    updated: tuple[int, ...]

    def on(self, inputs: Sequence[Tensor], region: RegionFunction) -> Callable[[], None]:
        """Bind a region that was made of the source to inputs: a function that updates them."""
        targets = [inputs[number] for number in self.updated]
        return lambda: copy_all(targets, region(*inputs, *self.constants))


def trace(function: Callable[..., Sequence[Update]], inputs: Sequence[Tensor]) -> Traced:
    """Trace a function.

    Args:
        function: takes the inputs one by one and writes none of them; returns the new values of those that change.
        inputs: distinct, contiguous, and on one device; the function runs on them.

    Raises:
        LoweringError: it draws random numbers, or needs a tensor of another device.
        Exception: any that the function itself raises, or torch where it reads values on the host.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    updated: list[int] = []

    def values(*tensors: Tensor) -> list[Tensor]:
        updates = function(*tensors)
        updated[:] = [number for number, _ in updates]
        # An input that moves to another place must be read before it is updated.
        return [value.clone() if any(value is tensor for tensor in tensors) else value for _, value in updates]

    with tracing():
        traced = make_fx(values)(*inputs)
    return _region(traced, inputs, updated)


def _region(traced: GraphModule, inputs: Sequence[Tensor], updated: Sequence[int]) -> Traced:
    """Make a region of a traced graph; tensors that the graph holds become further inputs."""
    graph, mapping, device = Graph(), dict[Node, Node](), inputs[0].device
    held = {node.target: getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    everything = [*inputs, *held.values()]
    if len({tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}) < sum(
        tensor.numel() > 0 for tensor in inputs
    ):
        raise LoweringError("two of its inputs lie in the same memory")
    for tensor in everything:
        if tensor.device != device or not tensor.is_contiguous():
            raise LoweringError(
                f"it reads a tensor on {tensor.device} with strides {tensor.stride()}, expected contiguous on {device}"
            )
    sizes, lines = Symbols(), [f"device {device.type}"]
    places = []
    for number, tensor in enumerate(everything):
        places.append(graph.placeholder(f"x{number}"))
        places[-1].meta["val"] = sizes.empty(list(tensor.shape), tensor.dtype, device)
        lines.append(f"%x{number} = input: {DTYPES.get(tensor.dtype, tensor.dtype)}{list(tensor.shape)}")
    own = dict(zip(held, places[len(inputs) :], strict=True))
    free = iter(places)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = next(free)
        elif node.op == "get_attr":
            mapping[node] = own[node.target]
        elif node.op == "output":
            graph.output(tuple(mapping[value] for value in node.args[0]))
        else:
            _check(node)
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta.clear()
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"%{node.name} = {node.target}{node.args!r}{node.kwargs!r}")
        elif node.op == "output":
            lines.append(f"return {node.args!r}")
    fakes = [place.meta["val"] for place in places]
    source = Source("\n".join(lines), lambda: GraphModule({}, graph), fakes, device, settings=EXACT)
    return Traced(source, tuple(held.values()), tuple(updated))


def _check(node: Node) -> None:
    """Refuse an op that compiled code runs differently from the ops one by one."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise LoweringError(f"it draws random numbers ({node.target})")


class TraceCompiler:
    """Compile functions of a session, and remember those that cannot be compiled.

    Compiling takes seconds, so a function that was never compiled before is left alone unless it is asked for ahead.

    Attributes:
        often: calls after which compiling pays for a function that was not asked for ahead.
        store: where compiled functions are stored for later processes; None for nowhere.
        compiled, loaded: names of the functions that were compiled for this object, and of those that need not be.
        refused: names of those that cannot be, with the reason.
    """

    def __init__(self, store: Store | None = None, tell: Callable[[str], None] = lambda what: None):
        self.store, self._tell = store, tell
        self.often = 512
        self.compiled: list[str] = []
        self.loaded: list[str] = []
        self.refused: list[tuple[str, str]] = []
        self._known: dict[Hashable, tuple[Traced, RegionFunction] | None] = {}

    def function(
        self, name: str, function: Callable[..., Sequence[Update]], inputs: Sequence[Tensor], key: Hashable, ahead: bool
    ) -> Callable[[], object] | None:
        """Make a compiled function that updates the inputs, which stay where they are; see `trace`.

        Args:
            name: of the function, for messages.
            function, inputs: see `trace`.
            key: equal keys mean that the function and the types of its inputs are equal; None: no such key.
            ahead: compile it, if that has not been done before.

        Returns:
            None where it must run op by op: it was not compiled before, or cannot be; of that a warning tells once.
        """
        found = self._known.get(key)
        if found is None and (ahead or key not in self._known):
            found = self._make(name, function, inputs, ahead)
            if key is not None:
                self._known[key] = found
        if found is None:
            return None
        traced, region = found
        return traced.on(inputs, region)

    def _make(
        self, name: str, function: Callable[..., Sequence[Update]], inputs: Sequence[Tensor], ahead: bool
    ) -> tuple[Traced, RegionFunction] | None:
        try:
            traced = trace(function, inputs)
            found: Compiled | None
            if ahead:
                found = compiled(traced.source, self.store, lambda doing: self._tell(f"{doing} {name}"))
            else:
                found = known(traced.source, self.store)
        except Exception as error:  # a caller's function may fail in any way when traced
            reason = str(error).partition("\n")[0] or type(error).__name__
            if (name, reason) not in self.refused:
                self.refused.append((name, reason))
                warn(f"{name} is not compiled and runs op by op: {reason}")
            return None
        if found is None:
            return None
        (self.compiled if found.new else self.loaded).append(name)
        return traced, found.function
