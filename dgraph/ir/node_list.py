"""The nodes of a graph: reading them, and building new ones.

Every node carries in `meta`:

    val     its type: a fake tensor (or a tuple of them, or None for an op that only writes)
    layer   the index of its transformer layer, or None outside the layers
    role    the module that it came from, relative to its layer ("self_attn.q_proj", "mlp", "norm")
    by      the pass that made it, or "" for the captured model
    source  file and line of the model code, where known
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import UnknownName, VerifyError
from dgraph.families.adapters import Adapter
from dgraph.ops import OPS, Op, op_of, targets_of
from dgraph.private.torch import OpOverload
from dgraph.ranks.sharding import Part, Sharding
from dgraph.spec import ModelSpec
from dgraph.types.card import Card, Described, counted
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import Evaluator, InputSpec, Symbols, common_symbols


class NodeList(Described):
    """A straight line of typed calls over weights and run-time inputs, with one output.

    Attributes:
        spec: the model's facts.
        fx: the nodes.
        symbols: the symbolic sizes; shared by all graphs of the process that are given no others.
        tensors: the weights by name (the model's own tensors, not copies).
        inputs: declarations of the run-time inputs, by name, in order.
        outputs: names of the outputs, in order.
        history: `repr` of each pass that was applied, in order.
        sharding: over whom it is divided; None for a whole one.
        divided: by name, what a rank has of each weight that is divided.
        whole: the facts of the whole model, where `spec` counts the heads that a rank has; None for a whole graph.
        own: numbers that differ between ranks, by name, i64[1] each; see `own_number`.
        adapter: weights by which the model drafts, besides these; whole, on every rank. None: by these alone.
    """

    def __init__(self, spec: ModelSpec, symbols: Symbols | None = None):
        self.spec = spec
        self.fx = torch.fx.Graph()
        self.symbols = symbols or common_symbols()
        self.tensors: dict[str, Tensor] = {}
        self.inputs: dict[str, InputSpec] = {}
        self.outputs: tuple[str, ...] = ()
        self.history: tuple[str, ...] = ()
        self.sharding: Sharding | None = None
        self.divided: dict[str, Part] = {}
        self.whole: ModelSpec | None = None
        self.own: dict[str, Tensor] = {}
        self.adapter: Adapter | None = None

    def card(self) -> Card:
        """See `Described`."""
        size = f"{counted(len(self.calls), 'call')}, {counted(self.spec.layers, 'layer')}"
        weights = f"{counted(len(self.tensors), 'tensor')}, {str(self.spec.dtype).removeprefix('torch.')}"
        passes, use = " > ".join(self.history), "print(dgraph.dump(graph)), dgraph.diff(graph), dgraph.explain(graph)"
        facts = [("inputs", ", ".join(self.inputs)), ("outputs", ", ".join(self.outputs)), ("weights", weights)]
        facts += [("passes", passes or "none: as captured"), ("use", use)]
        return Card(f"Graph of {self.spec.family}: {size}", facts)

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> list[Node]:
        """Every node in order, the output included."""
        return list(self.fx.nodes)

    @property
    def calls(self) -> list[Node]:
        """The computing nodes in order."""
        return [n for n in self.fx.nodes if n.op == "call_function"]

    @property
    def output(self) -> Node:
        """The single output node; its argument is a tuple in the order of `outputs`."""
        return next(n for n in reversed(self.fx.nodes) if n.op == "output")

    def find(self, op: str, layer: int | None = None) -> list[Node]:
        """Calls of an op by its short name ("packed_attention", "linear"), in order, of one layer if given.

        Raises:
            UnknownName: no op of dgraph, of torch or of another package ("package::op") has that name.
        """
        # fx keeps its calls by target: passes that ask layer by layer do not read the whole graph each time.
        targets = targets_of(op)
        if not targets:
            raise UnknownName("op", op, {*OPS, *(op_name(n.target) for n in self.calls if op_of(n.target) is None)})
        found = [n for target in targets for n in self.fx.find_nodes(op="call_function", target=target)]
        return sorted(n for n in found if layer is None or n.meta["layer"] == layer)

    def input(self, name: str) -> Node:
        """The placeholder of a run-time input.

        Raises:
            UnknownName: the graph declares no such input; add it with `add_input`.
        """
        if name not in self.inputs:
            raise UnknownName("input of this graph", name, self.inputs)
        return next(n for n in self.fx.nodes if n.op == "placeholder" and n.meta.get("input") == name)

    def weight(self, name: str) -> Node:
        """The placeholder of a weight.

        Raises:
            UnknownName: the graph has no such weight; add it with `add_weight`.
        """
        if name not in (nodes := self.weight_nodes()):
            raise UnknownName("weight of this graph", name, nodes)
        return nodes[name]

    def weight_nodes(self) -> dict[str, Node]:
        """Placeholders of the weights, by name, in order."""
        return {n.meta["weight"]: n for n in self.fx.nodes if n.op == "placeholder" and "weight" in n.meta}

    def result(self, name: str) -> Node:
        """The node that an output returns.

        Raises:
            UnknownName: the graph has no such output; name it with `set_outputs`.
        """
        if name not in self.outputs:
            raise UnknownName("output of this graph", name, self.outputs)
        return args_of(self.output)[0][self.outputs.index(name)]

    def type_text(self, node: Node) -> str:
        """A node's type as it reads in a dump."""
        return self.symbols.type_text(node.meta["val"])

    def row_set(self, node: Node) -> str | None:
        """The row set that a node's value is over (N, K, ...), or None."""
        return self.symbols.row_set(node.meta["val"])

    # -- building ------------------------------------------------------------------------------------------------

    def add_weight(self, name: str, tensor: Tensor, before: Node | None = None) -> Node:
        """A new weight, placed before another one, or after all of them."""
        if name in self.tensors:
            raise VerifyError(f"weight {name!r} is in the graph already.")
        placeholders = [n for n in self.fx.nodes if n.op == "placeholder"]
        first_input = next((n for n in placeholders if "input" in n.meta), None)
        node = self._placeholder(name, before or first_input or self._first_after(placeholders))
        node.meta.update(weight=name, val=self.symbols.of(tensor))
        self.tensors[name] = tensor
        return node

    def add_input(self, spec: InputSpec) -> Node:
        """A new run-time input after the last one, or the present one if it is declared alike."""
        if spec.name in self.inputs:
            if self.inputs[spec.name] != spec:
                got = f"input {spec.name!r} is declared as {self.inputs[spec.name]}; it cannot also be {spec}"
                raise VerifyError(f"{got}. Give the new input another name.")
            return self.input(spec.name)
        placeholders = [n for n in self.fx.nodes if n.op == "placeholder"]
        node = self._placeholder(spec.name, before=self._first_after(placeholders))
        node.meta.update(input=spec.name, val=self.symbols.shared(spec.shape, spec.dtype, self.device))
        self.inputs[spec.name] = spec
        return node

    def drop_input(self, name: str) -> None:
        """Remove an input that nothing reads."""
        self.fx.erase_node(self.input(name))
        del self.inputs[name]

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        before: Node,
        by: str,
        like: Node | None = None,
        **meta: Any,
    ) -> Node:
        """A new call before the node `before`, in the layer and role of `like` (of `before` if None).

        Args:
            target: an op overload, an `Op` or `operator.getitem`.
            args, kwargs: as the op takes them.
            before: the node that the call comes before.
            by: the pass that makes it.
            like: the node that gives layer and role.
            meta: further entries of `meta`; `rows` names the row set that a cut op makes.

        Raises:
            VerifyError: the target is no op, or it does not accept the arguments; the graph is as it was.
        """
        target = target.overload if isinstance(target, Op) else target
        if not isinstance(target, OpOverload) and target is not operator.getitem:
            raise VerifyError(f"{by} calls {target}; expected an overload of an op, as torch.ops.aten.neg.default.")
        with self.fx.inserting_before(before):
            node = self.fx.call_function(target, tuple(args), dict(kwargs or {}))
        source = like if like is not None else before
        node.meta.update(layer=source.meta.get("layer"), role=source.meta.get("role", ""), by=by, **meta)
        try:
            node.meta["val"] = Evaluator(self.symbols).call(node)
        except VerifyError:
            self.fx.erase_node(node)
            raise
        return node

    def calling(self, by: str) -> Callable[..., Node]:
        """A short form of `call` for a pass: `call(before, target, *args)` is a new call before a node."""

        def made(before: Node, target: Any, *args: Any) -> Node:
            return self.call(target, args, before=before, by=by)

        return made

    def parts(self, node: Node, count: int, by: str) -> tuple[Node, ...]:
        """The first `count` results of a call with several results, as nodes right after it, in order."""
        at, found = node, []
        for i in range(count):
            at = self.call(operator.getitem, (node, i), before=at.next, by=by, like=node)
            found.append(at)
        return tuple(found)

    def over_ranks(self, value: Node, by: str) -> Node:
        """Sum over ranks of a value of which each has a share (a score that is a sum over heads), right after it. If
        the graph is not sharded, the value itself.
        """
        if self.sharding is None:
            return value
        return self.call(OPS["all_reduce"], (value, self.sharding.group), before=value.next, by=by, like=value)

    def of_all_ranks(self, value: Node, by: str) -> Node:
        """The values [..., n] of all ranks, side by side in order of rank: [..., world * n], right after it. If the
        graph is not sharded, the value itself.
        """
        if self.sharding is None:
            return value
        args = (value, self.sharding.group, self.sharding.world)
        return self.call(OPS["all_gather"], args, before=value.next, by=by, like=value)

    def own_number(self, name: str) -> Node:
        """A number that differs between ranks, as a weight: as a constant it would make each rank's graph another."""
        return self.weight(name) if name in self.tensors else self.add_weight(name, self.own[name])

    def results(self) -> dict[str, Node]:
        """The outputs by name."""
        return {name: self.result(name) for name in self.outputs}

    def redirect(self, old: Node, new: Node, after: Node, but: Collection[Node] = ()) -> None:
        """Let readers of `old` after a node read `new` instead, except the call `new` itself and `but`."""
        for user in list(old.users):
            if user > after and user is not new and user not in but:
                user.replace_input_with(old, new)

    def set_outputs(self, results: dict[str, Node]) -> None:
        """Replace the outputs."""
        existing = next((n for n in reversed(self.fx.nodes) if n.op == "output"), None)
        if existing is not None:
            self.fx.erase_node(existing)
        node = self.fx.output(tuple(results.values()))
        self.outputs = tuple(results)
        node.meta.update(layer=None, role="", by="", val=tuple(n.meta["val"] for n in results.values()))

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of `old` read `new`, and remove `old`."""
        old.replace_all_uses_with(new, propagate_meta=False)
        self.fx.erase_node(old)

    def sweep(self) -> int:
        """Remove unread calls that write nothing, unread inputs and weights; returns the number of removed calls."""
        removed = self.drop_unread(self.calls)
        for name in list(self.inputs):
            if not self.input(name).users:
                self.drop_input(name)
        for name, node in self.weight_nodes().items():
            if not node.users:
                self.fx.erase_node(node)
                del self.tensors[name]
                self.divided.pop(name, None)
        return removed

    def drop_unread(self, calls: Collection[Node]) -> int:
        """Remove those of some calls that are unread and write nothing, the last one first; returns their number."""
        removed = 0
        for node in sorted(calls, reverse=True):
            op = op_of(node.target)
            if not node.users and not (op is not None and op.mutates):
                self.fx.erase_node(node)
                removed += 1
        return removed

    def propagate(self) -> None:
        """Recompute the type of every call from the inputs on; needed after a change that others inherit."""
        evaluator = Evaluator(self.symbols)
        for node in self.calls:
            node.meta["val"] = evaluator.call(node)
        self.output.meta["val"] = tuple(n.meta["val"] for n in args_of(self.output)[0])

    def live_after(self, node: Node, but: Collection[Node] = ()) -> list[Node]:
        """Values defined up to and including `node` that a later node, none of `but`, reads, in order; weights are left
        out.
        """
        return [
            n for n in self.fx.nodes
            if n <= node and "weight" not in n.meta and any(u > node and u not in but for u in n.users)
        ]  # fmt: skip

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next((t.device for t in self.tensors.values()), torch.device("cpu"))

    def _placeholder(self, name: str, before: Node | None) -> Node:
        with nullcontext() if before is None else self.fx.inserting_before(before):
            node = self.fx.placeholder("".join(c if c.isalnum() else "_" for c in name))
        node.meta.update(layer=None, role="", by="")
        return node

    def _first_after(self, placeholders: Sequence[Node]) -> Node | None:
        """The node after the last placeholder; None in an empty graph (append)."""
        following = placeholders[-1].next if placeholders else next(iter(self.fx.nodes), None)
        return following if following is not None and following.op != "root" else None
