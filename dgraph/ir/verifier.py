"""The verifier: a table of rules, run at the entry of the pipeline and after every pass.

It recomputes instead of trusting. A message names the pass, the layer, the node, what was got and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import getitem
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import VerifyError
from dgraph.ir.graph import ADDED, Graph
from dgraph.ir.layers import ATTENTIONS
from dgraph.ir.partial_sums import broken_sums
from dgraph.ir.row_order import Orders, broken_decision
from dgraph.ir.row_rule import broken_rows
from dgraph.ops import op_of
from dgraph.ops.kv.scales import FLOAT8
from dgraph.private.torch import OpOverload
from dgraph.types.nodes import args_of, op_name, where
from dgraph.types.shapes import Evaluator, InputSpec

_HOST_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs and weights of a graph, which a pass may not change without declaring it."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[str, ...]
    weights: frozenset[tuple[str, tuple[int, ...], torch.dtype, int]]
    """Each weight as (name, shape, dtype, identity of the tensor)."""
    tensors: tuple[tuple[str, ReferenceType[Tensor]], ...] = field(compare=False, repr=False)
    """These, not held, since a pass may free them: of one that is gone another may have the number."""

    @classmethod
    def of(cls, graph: Graph) -> Signature:
        """The signature of a graph as it stands."""
        weights = frozenset((name, tuple(t.shape), t.dtype, id(t)) for name, t in graph.tensors.items())
        tensors = tuple((name, ref(t)) for name, t in graph.tensors.items())
        return cls(tuple(graph.inputs.values()), graph.outputs, weights, tensors)


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: name of the rule.
        demands: the demand, for the message.
        check: yields one message per violation.
        reads: gives the view of a graph that the check reads; one view serves all rules that read it.
    """

    name: str
    demands: str
    check: Callable[[Any], Iterable[str]]
    reads: Callable[[Graph], Any] = lambda graph: graph


def reads_host(target: Any) -> bool:
    """True if an op reads a tensor's values on the host, or gives a result whose size depends on them."""
    if not isinstance(target, OpOverload):
        return False
    name = op_name(target)
    if name == "index":  # of a mask only, and that has no type
        return False
    return name == "is_nonzero" or not _HOST_TAGS.isdisjoint(target.tags)


def verify(
    graph: Graph,
    by: str = "capture",
    before: Signature | None = None,
    may_change: frozenset[str] = frozenset(),
    may_change_weights: bool = False,
) -> None:
    """Check every rule.

    Args:
        graph: the graph; left as it is.
        by: the pass that ran last, for the message.
        before: the signature before that pass; None skips the comparison.
        may_change: names of inputs and outputs that the pass declared it adds or removes.
        may_change_weights: True if the pass declared that it replaces weights.

    Raises:
        VerifyError: with every violation of the first rule that is broken.
    """
    views: dict[Callable[[Graph], Any], Any] = {}
    for rule in RULES:
        if rule.reads not in views:
            views[rule.reads] = rule.reads(graph)
        broken = list(rule.check(views[rule.reads]))
        if broken:
            raise VerifyError(
                f"after {by}: rule '{rule.name}' ({rule.demands}) is broken:\n  " + "\n  ".join(broken[:5])
            )
    if before is not None:
        broken = list(_signature_changes(before, Signature.of(graph), may_change, may_change_weights))
        if broken:
            raise VerifyError(
                f"after {by}: rule 'signature' (only declared changes) is broken:\n  " + "\n  ".join(broken)
            )


def _order(graph: Graph) -> Iterable[str]:
    seen: set[Node] = set()
    for node in graph.fx.nodes:
        for arg in node.all_input_nodes:
            if arg not in seen:
                yield f"{where(node)} reads {arg.name}, defined after it or not in this graph; expected it before"
        seen.add(node)


def _tags(graph: Graph) -> Iterable[str]:
    for node in graph.fx.nodes:
        missing = [key for key in ("val", "layer", "role", "by") if key not in node.meta]
        if missing:
            yield f"node {node.name} has no meta {missing}; make nodes with Graph.call"


def _straight(graph: Graph) -> Iterable[str]:
    for node in graph.fx.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            yield f"{where(node)} is a {node.op}; expected placeholders, calls and one output"
        elif node.op == "placeholder" and ("weight" in node.meta) == ("input" in node.meta):
            yield f"placeholder {node.name} is neither weight nor input; make it with add_weight or add_input"
        elif node.op == "call_function" and not (isinstance(node.target, OpOverload) or node.target is getitem):
            got = getattr(node.target, "__name__", node.target)
            yield f"{where(node)} calls {got}; expected an overload of an op, as torch.ops.aten.neg.default, or getitem"
    outputs = [node for node in graph.fx.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield f"the graph has {len(outputs)} output nodes; make the one with set_outputs"
    elif len(args_of(outputs[0])[0]) != len(graph.outputs):
        got = f"{len(args_of(outputs[0])[0])} values under the names {graph.outputs}"
        yield f"the output returns {got}; make it with set_outputs"


def _host(graph: Graph) -> Iterable[str]:
    for node in graph.calls:
        if reads_host(node.target):
            yield f"{where(node)} calls {op_name(node.target)}; expected no op that reads values on the host"


def _types(graph: Graph) -> Iterable[str]:
    """Recompute each type from the recomputed types of its arguments."""
    evaluator = Evaluator(graph.symbols)
    values: dict[Node, Any] = {}
    for node in graph.fx.nodes:
        there = values[node] = node.meta["val"]
        if node.op != "call_function":
            continue
        try:
            values[node] = evaluator.call(node, values)
        except VerifyError as error:
            yield str(error)
            return
        if values[node] is there:
            continue
        got, expected = graph.symbols.type_text(there), graph.symbols.type_text(values[node])
        if got != expected:
            yield f"{where(node)}: got type {got}, expected {expected}; call Graph.propagate() at the end of the pass"
            return


def _rows(orders: Orders) -> Iterable[str]:
    """No op but a gather, and one that has rows of its own, may read values over two row sets, or in two orders."""
    return orders.broken


def _writes(graph: Graph) -> Iterable[str]:
    """Ops write only declared arguments, which are inputs, and read a cache after its write.

    No op of torch reads such an input, since its result may lie in the same memory. A cache may be read before its
    write if its declaration says what it holds before the first one.
    """
    mutable = {value for n in graph.calls if (o := op_of(n.target)) is not None for value in o.written(args_of(n))}
    written: set[Node] = set()
    for node in graph.calls:
        op = op_of(node.target)
        if op is None:
            if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
                yield f"{where(node)} ({op_name(node.target)}) writes in place; expected only declared ops to write"
            for cache in (a for a in node.all_input_nodes if a in mutable):
                got = f"{where(node)} ({op_name(node.target)}) reads {cache.name}, which is written in place"
                yield f"{got}; expected only ops of dgraph to read it, of which none gives a view of it"
            continue
        for value in op.written(args_of(node)):
            if not isinstance(value, Node) or "input" not in value.meta:
                yield f"{where(node)} writes {value}; expected a run-time input"
                continue
            written.add(value)
        for cache in (value for value in op.read(args_of(node)) if isinstance(value, Node)):
            remembers = "input" in cache.meta and graph.inputs[cache.meta["input"]].reset != "never"
            if cache in mutable and cache not in written and not remembers:
                got = f"{where(node)} ({op_name(node.target)}) reads {cache.name} before its write"
                yield f"{got}; expected the write first"


def _added(graph: Graph) -> Iterable[str]:
    """Ops of the layers that attend or write are told which rows are added: the place of each is another row's."""
    for node in graph.calls if ADDED.name in graph.inputs else ():
        op = op_of(node.target)
        if op is None or node.meta["layer"] is None or not (op.mutates or op.name in ATTENTIONS):
            continue
        if op.added is None or op.values(op.added, args_of(node)) in ([], [None]):
            yield (
                f"{where(node)} ({op_name(node.target)}) takes an added row for one of the sequence; expected an op "
                f"that is told which rows are added (`Op.added`). Leave AddRows out, or the pass that made this call"
            )


def _scales(graph: Graph) -> Iterable[str]:
    """Float8 in caches is read, copied and written only by ops that take its scales and are given them."""
    stored = {node for node in graph.fx.nodes if _in_place(graph, node) and node.meta["val"].dtype == FLOAT8}
    for node in graph.calls if stored else ():
        op, args = op_of(node.target), args_of(node)
        read = [] if op is None else list(zip(op.arguments, args, strict=False))
        if op is None or not any(arg in stored for _, arg in read):
            read = [("an argument", arg) for arg in node.all_input_nodes]
        given = {name for name, arg in read if arg is not None}
        for name, arg in read:
            if arg not in stored or (op is not None and op.scales.get(name) in given):
                continue
            if op is not None and name in op.copies:
                stored.add(node)
                continue
            got = f"{where(node)} ({op_name(node.target)}) reads {arg.name} as {name}, which is stored in float8"
            yield f"{got}; expected an op that takes its scales (`Op.scales`), with them. Leave out kv_dtype for it"


def _in_place(graph: Graph, node: Node) -> bool:
    spec = graph.inputs.get(node.meta.get("input", ""))
    return spec is not None and spec.in_place


def _weights(graph: Graph) -> Iterable[str]:
    for name, node in graph.weight_nodes().items():
        tensor = graph.tensors.get(name)
        if tensor is None:
            yield f"weight {name} has a placeholder but no tensor"
        elif list(tensor.shape) != list(node.meta["val"].shape) or tensor.dtype != node.meta["val"].dtype:
            yield f"weight {name}: got {tuple(tensor.shape)} {tensor.dtype}, expected {graph.type_text(node)}"


def _inputs(graph: Graph) -> Iterable[str]:
    placed = {n.meta["input"]: n for n in graph.fx.nodes if n.op == "placeholder" and "input" in n.meta}
    for name in sorted(set(placed) ^ set(graph.inputs)):
        has, lacks = ("placeholder", "declaration") if name in placed else ("declaration", "placeholder")
        yield f"input {name} has a {has} but no {lacks}; add it with add_input, remove it with drop_input"
    for name in sorted(set(placed) & set(graph.inputs)):
        spec, got = graph.inputs[name], graph.type_text(placed[name])
        expected = graph.symbols.type_text(graph.symbols.shared(spec.shape, spec.dtype))
        if got != expected:
            yield f"input {name}: got type {got}, expected {expected} as it is declared"


def _undeclared(may: frozenset[str]) -> str:
    declared = f"changes of {', '.join(sorted(may))} alone" if may else "no changes"
    return f"the pass declares {declared}; add the name to `signature`"


def _signature_changes(before: Signature, after: Signature, may: frozenset[str], may_weights: bool) -> Iterable[str]:
    changed_inputs = set(before.inputs) ^ set(after.inputs)
    for spec in sorted(changed_inputs, key=lambda s: s.name):
        if not _declared(spec.name, may):
            verb = "removed" if spec in before.inputs else "added"
            yield f"input {spec.name} was {verb}; {_undeclared(may)}"
    for name in sorted(set(before.outputs) ^ set(after.outputs)):
        if not _declared(name, may):
            verb = "removed" if name in before.outputs else "added"
            yield f"output {name} was {verb}; {_undeclared(may)}"
    changed = {name for name, *_ in before.weights ^ after.weights}
    changed |= {name for name, tensor in before.tensors if tensor() is None}
    if changed and not may_weights:
        names = sorted(changed)
        more = ", ..." if len(names) > 4 else ""
        yield f"weights changed ({', '.join(names[:4])}{more}); the pass does not declare it"


def _declared(name: str, may: frozenset[str]) -> bool:
    """A declared name, or one of a declared numbered family ("k_cache_*")."""
    return name in may or any(m.endswith("*") and name.startswith(m[:-1]) for m in may)


RULES = (
    Rule("straight", "placeholders, calls, one output", _straight),
    Rule("order", "values are defined before they are read", _order),
    Rule("tags", "every node has a type, a layer, a role and a maker", _tags),
    Rule("weights", "weight placeholders fit their tensors", _weights),
    Rule("inputs", "input placeholders fit their declarations", _inputs),
    Rule("host", "no host reads inside a stage", _host),
    Rule("rows", "one row set per op, with its own offsets", _rows, Orders),
    Rule("decision", "token, confidence, logits of all rows, or of those that kept numbers", broken_decision, Orders),
    Rule("partial sums", "what each rank has a share of is summed before anything but a sum reads it", broken_sums),
    Rule("types", "recorded types equal recomputed types", _types),
    Rule("requests", "no request depends on the rows, the state or the number of others", broken_rows),
    Rule("writes", "only declared writes, before their reads", _writes),
    Rule("added", "rows that a step adds are seen by themselves alone", _added),
    Rule("scales", "what is stored in float8 is read with its scales", _scales),
)
"""Every rule, in the order in which they are checked."""
