"""Canonical form: the same text for the same mathematics, whichever way a model's author spelled it.

In order: drop what computes nothing, give SDPA its dgraph name, raise RMSNorm and rotary embedding to single ops, bring
views into one form. Every rewrite keeps layer, role and source of the node that it replaces. The result is bit for bit
the captured forward, because the reference of each raised op performs the same operations in the same order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from dgraph.errors import CaptureError
from dgraph.frontend.layouts import name_views, straighten
from dgraph.ir.graph import Graph
from dgraph.ir.matching import Match, match_at
from dgraph.ir.pattern import Pattern
from dgraph.ops import OPS
from dgraph.ops.registry import numeric
from dgraph.types.nodes import args_of, op_name, role_of, where
from dgraph.types.shapes import Evaluator

aten = torch.ops.aten

_CHECKS = {
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
_MAYBE_SAME_VALUE = {"to", "_to_copy", "expand", "slice"}
_SAME_VALUE = {"alias", "detach", "detach_", "clone", "contiguous", "lift_fresh_copy", "dropout"}


def canonicalise(graph: Graph) -> None:
    """Bring a captured graph into canonical form, in place.

    Raises:
        CaptureError: an attention with a mask, dropout or causality; the message names node, module and line.
    """
    _drop_checks(graph)
    _straighten_rotary_table(graph)
    _type_and_drop_no_ops(graph)
    graph.sweep()
    name_views(graph)
    for node in graph.calls:
        _raise_attention(graph, node)
    graph.sweep()
    for pattern, op in _RAISED:
        for match in graph.match(pattern):
            match.replace(op)
        graph.sweep()
    straighten(graph)
    graph.propagate()
    _number_layers(graph)


def _drop_checks(graph: Graph) -> None:
    for node in reversed(graph.calls):
        if op_name(node.target) in _CHECKS or getattr(node.target, "__module__", "") == "math":
            graph.fx.erase_node(node)
    for node in reversed(graph.calls):  # comparisons of sizes that only fed the checks
        if not node.users and getattr(node.target, "__module__", "") == "_operator":
            graph.fx.erase_node(node)


def _straighten_rotary_table(graph: Graph) -> None:
    """Rewrite the angles of a rotary table as positions[b, t, 1] * frequencies.

    Some versions of transformers compute the transpose of frequencies[b, d, 1] @ positions[b, 1, t]: one product per
    element either way. After the rewrite one model reads the same whichever version captured it.
    """
    for node in graph.calls:
        if op_name(node.target) != "transpose" or list(args_of(node)[1:]) not in ([1, 2], [2, 1], [-1, -2], [-2, -1]):
            continue
        product = args_of(node)[0]
        if op_name(product.target) not in ("matmul", "bmm"):
            continue
        frequencies, positions = (_reshaped(a) for a in args_of(product)[:2])
        if "weight" not in frequencies.meta or "input" not in positions.meta:
            continue
        table = graph.tensors[frequencies.meta["weight"]]
        if table.dim() != 1 or len(graph.inputs[positions.meta["input"]].shape) != 2:
            continue
        dtype = table.dtype
        if not all(_cast_only_to(dtype, a) for a in args_of(product)[:2]):
            continue
        with graph.fx.inserting_before(node):
            column = graph.fx.call_function(aten.unsqueeze.default, (positions, 2))
            column = _like(node, graph.fx.call_function(aten.to.dtype, (_like(node, column), dtype)))
            angles = _like(node, graph.fx.call_function(aten.mul.Tensor, (column, frequencies)))
        graph.replace(node, angles)
    graph.sweep()


def _like(node: Node, new: Node) -> Node:
    new.meta.update({key: node.meta[key] for key in ("layer", "role", "by", "source")})
    return new


def _reshaped(node: Node) -> Node:
    """The value before casts and changes of shape that keep all of it."""
    while op_name(node.target) in ("to", "expand", "unsqueeze", "contiguous") or _keeps_all(node):
        node = args_of(node)[0]
    return node


def _keeps_all(node: Node) -> bool:
    """True if a node is a slice like `x[:]`."""
    if not _is(node, aten.slice.Tensor):
        return False
    given = args_of(node)[2:]
    start, stop, step = given + (None, None, 1)[len(given) :]
    return start in (None, 0) and (stop is None or (isinstance(stop, int) and stop >= 2**62)) and step == 1


def _cast_only_to(dtype: torch.dtype, node: Node) -> bool:
    """True if every cast on the way to `_reshaped(node)` is to one dtype."""
    while node is not _reshaped(node):
        if op_name(node.target) == "to":
            given = [*args_of(node)[1:], *node.kwargs.values()]  # overloads of `to` take the dtype at different places
            if [value for value in given if isinstance(value, torch.dtype)] != [dtype]:
                return False
        node = args_of(node)[0]
    return True


def _type_and_drop_no_ops(graph: Graph) -> None:
    """Compute each type and, with the types at hand, drop nodes that return their input unchanged."""
    evaluator = Evaluator(graph.symbols)
    for node in graph.calls:
        if node.target is aten.view.default:
            # A view of a value that is no longer contiguous once no-ops are gone; reshape means the same.
            node.target = aten.reshape.default
        if _is_no_op(node):
            graph.replace(node, args_of(node)[0])
            continue
        node.meta["val"] = evaluator.call(node)
        source = args_of(node)[0] if args_of(node) else None
        if op_name(node.target) in _MAYBE_SAME_VALUE and isinstance(source, Node):
            before, after = source.meta["val"], node.meta["val"]
            if (
                before.dtype == after.dtype
                and before.device == after.device
                and list(before.shape) == list(after.shape)
            ):
                graph.replace(node, source)


def _is_no_op(node: Node) -> bool:
    name = op_name(node.target)
    if name == "dropout" and args_of(node)[2]:
        raise CaptureError(f"{where(node)}: dropout in training mode; call model.eval() before capture.")
    if name in _SAME_VALUE:
        return True
    if name != "mul" or not isinstance(args_of(node)[1], float) or args_of(node)[1] != 1.0:
        return False
    return args_of(node)[0].meta["val"].dtype.is_floating_point  # an integer times 1.0 is a float


def _raise_attention(graph: Graph, node: Node) -> None:
    if op_name(node.target) in ("softmax", "_softmax"):
        _refuse_over_tokens(graph, node)
    if node.target is not aten.scaled_dot_product_attention.default:
        return
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = {**dict(zip(names, args_of(node), strict=False)), **node.kwargs}
    for name, instead in _NOT_PLAIN.items():
        unwanted = given.get(name)
        if unwanted not in (None, False, 0.0):
            raise _refused(node, f"has {name}={unwanted}; {instead}")
    scale = given.get("scale")
    if scale is None:
        scale = given["query"].meta["val"].shape[-1] ** -0.5
    q, k, v = (_with_heads(graph, node, given[name]) for name in names[:3])
    k, v = (_unrepeated(graph, node, value) for value in (k, v))
    if k.meta["val"].shape[1] != v.meta["val"].shape[1]:  # one of the two is repeated in another way
        k, v = (_with_heads(graph, node, given[name]) for name in names[1:3])
    source = node.meta.get("source", "")
    new = graph.call(OPS["attention"], (q, k, v, scale), before=node, by="", like=node, source=source)
    if new.meta["val"].dim() != node.meta["val"].dim():
        new = graph.call(aten.flatten.using_ints, (new, 0, 1), before=node, by="", like=node, source=source)
    graph.replace(node, new)


_NOT_PLAIN = {
    "attn_mask": (
        "dgraph's attention adds nothing to scores and says itself which keys a row sees: those of its block and "
        "before it, or of the whole canvas. Leave a mask out (attn_mask=None). A bias that depends on positions "
        "(ALiBi, relative positions) cannot be compiled: use a model with rotary or learned positions"
    ),
    "dropout_p": "a forward that is served drops nothing: call it with dropout_p=0.0 where module.training is False",
    "is_causal": (
        "a diffusion model's forward attends in both directions, and dgraph adds block structure itself: build the "
        "model with is_causal=False"
    ),
}
"""Arguments of an attention that must not be given, and what to do instead."""


def _refuse_over_tokens(graph: Graph, node: Node) -> None:
    """Refuse an attention that is written out: dgraph rewrites attention, so it has to recognise it."""
    value, dim = args_of(node)[:2]
    if "t" in graph.symbols.names_in(value.meta["val"].shape[dim]):
        raise CaptureError(
            f"op softmax in module {role_of(node)} ({where(node)}) at {node.meta.get('source') or 'unknown line'} runs "
            f"over tokens; write the attention as F.scaled_dot_product_attention(q, k, v), which nn.MultiheadAttention "
            f"calls with need_weights=False."
        )


def _refused(node: Node, why: str) -> CaptureError:
    return CaptureError(
        f"op scaled_dot_product_attention in module {role_of(node)} ({where(node)}) at "
        f"{node.meta.get('source') or 'unknown line'} {why}."
    )


def _with_heads(graph: Graph, node: Node, value: Node) -> Node:
    """An operand of an attention, [b, heads, t, size]; for [b * heads, t, size] the value before the two were one."""
    if value.meta["val"].dim() == 3 and op_name(value.target) == "reshape":
        source = args_of(value)[0]
        if source.meta["val"].dim() == 4 and source.meta["val"].shape[2:] == value.meta["val"].shape[1:]:
            value = source
    shape = value.meta["val"].shape
    names = [graph.symbols.names_in(size) for size in shape]
    if len(shape) != 4 or names[1] or names[3] or not (names[0] and names[2]):
        raise _refused(
            node,
            f"reads {value.name} of {graph.type_text(value)}, not [sequences, heads, tokens, size of a head]; bring "
            f"queries, keys and values into that shape, as x.view(b, t, heads, size).transpose(1, 2)",
        )
    return value


def _unrepeated(graph: Graph, node: Node, value: Node) -> Node:
    """Keys or values before each head was repeated for the query heads that share it; the value itself if none was."""
    moved = value if op_name(value.target) in ("transpose", "permute") else None
    repeat = value if moved is None else args_of(moved)[0]
    heads = 1 if moved is None else 2
    if op_name(repeat.target) == "repeat_interleave":
        source, times, *dim = args_of(repeat)
        dim = [*dim, repeat.kwargs.get("dim")][:1]
        before = source if isinstance(times, int) and dim[0] in (heads, heads - 4) else None
    else:
        before = _before_expand(graph, repeat, heads)
    if before is None or before.meta["val"].dim() != 4:
        return value
    if moved is None:
        return before
    source = moved.meta.get("source", "")
    return graph.call(moved.target, (before, *args_of(moved)[1:]), before=node, by="", like=moved, source=source)


def _before_expand(graph: Graph, repeat: Node, heads: int) -> Node | None:
    """[.., n, ..] of a value that is reshaped from [.., n, times, ..], n heads repeated by an expand."""
    found = next((match for pattern in _REPEATED if isinstance(match := match_at(graph, pattern, repeat), Match)), None)
    if found is None or found["unsqueeze"].meta["val"].dim() != 5:
        return None
    (source, dim, _), expand = found.values, found["expand"]
    merged = expand.meta["val"].shape[heads] * expand.meta["val"].shape[heads + 1]
    if dim % 5 != heads + 1 or repeat.meta["val"].dim() != 4 or repeat.meta["val"].shape[heads] != merged:
        return None
    return source


_REPEATED = (
    Pattern(lambda x, dim, sizes: aten.reshape.default(aten.expand(aten.unsqueeze(x, dim), sizes), ...), shared=True),
    Pattern(lambda x, dim, sizes: aten.flatten(aten.expand(aten.unsqueeze(x, dim), sizes), ...), shared=True),
)


def _bare_norm(x: Any, eps: Any) -> Any:
    """(x32 * rsqrt(mean(x32 ** 2) + eps)).to(x.dtype), with or without casts."""
    x32 = Pattern.cast(x)
    mean = aten.mean.dim(aten.pow.Tensor_Scalar(x32, 2), [-1], True)
    return Pattern.cast(aten.mul.Tensor(x32, aten.rsqrt(aten.add.Tensor(mean, eps))))


def _norm(x: Any, weight: Any, eps: Any) -> Any:
    return aten.mul.Tensor(weight, _bare_norm(x, eps))


def _rope(x: Any, cos: Any, sin: Any, first: Any, second: Any, dim: Any) -> Any:
    """x * cos + cat(-x[..., d/2:], x[..., :d/2]) * sin."""
    turned = aten.cat.default([aten.neg.default(second), first], dim)
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(turned, sin))


def _other_norm(match: Match) -> str | None:
    """Reason why a norm is not that of the op, or None."""
    x, x32, scaled = (match[name].meta["val"].dtype for name in ("x", "cast", "cast_1"))
    if not isinstance(match["eps"], float) or scaled != x or x32 != numeric(x):
        return "it computes in another dtype than the op, or adds no number"
    return None


def _other_weight(match: Match) -> str | None:
    """Reason why a norm is not that of the op with a weight, or None."""
    weight = match["weight"]
    is_one = isinstance(weight, Node) and "weight" in weight.meta and weight.meta["val"].dim() == 1
    return _other_norm(match) if is_one else "its weight is none of the model, or has more than one dimension"


def _other_halves(match: Match) -> str | None:
    """Reason why a sum is no rotation of halves, or None."""
    x, cos, sin, first, second, dim = match.values
    if not all(isinstance(value, Node) for value in (x, cos, sin)):
        return "it multiplies by a number"
    size, dims = x.meta["val"].shape[-1], x.meta["val"].dim()
    halves = dim in (-1, dims - 1) and _is_slice(first, x, 0, size // 2) and _is_slice(second, x, size // 2, size)
    return None if halves else "what is joined are not the halves of the value"


_RAISED: tuple[tuple[Pattern, Callable[..., Any]], ...] = (
    (Pattern(_norm, _other_weight, shared=True), lambda x, weight, eps: torch.ops.dgraph.rms_norm(x, weight, eps)),
    # No weight follows, or one that is computed: the norms with a weight of their own are raised before.
    (Pattern(_bare_norm, _other_norm, shared=True), lambda x, eps: torch.ops.dgraph.rms_norm(x, None, eps)),
    (Pattern(_rope, _other_halves, shared=True), lambda x, cos, sin: torch.ops.dgraph.rope(x, cos, sin)),
)
"""Patterns that are one op of dgraph, each with its call."""


def _is_slice(node: Any, x: Node, start: int, stop: int) -> bool:
    if _is(node, operator.getitem) and _is(split := args_of(node)[0], aten.split_with_sizes.default):
        source, sizes, dim = (*args_of(split), 0)[:3]
        ends = [*itertools.accumulate(sizes, initial=0)][args_of(node)[1] :]
        return source is x and dim in (-1, x.meta["val"].dim() - 1) and ends[:2] == [start, stop]
    if not _is(node, aten.slice.Tensor) or args_of(node)[0] is not x:
        return False
    last, size = x.meta["val"].dim() - 1, x.meta["val"].shape[-1]
    given = list(args_of(node)[1:])
    dim, begin, end, *step = given + [0, None, None][len(given) :]
    begin, end = begin or 0, size if end is None else min(end, size)
    return dim in (-1, last) and begin == start and end == stop and step in ([], [1])


def _is(node: Any, target: Any) -> bool:
    # Keywords change what an op means: add has alpha, mean has dtype.
    return isinstance(node, Node) and node.target is target and not node.kwargs


def _number_layers(graph: Graph) -> None:
    """Let the layers of the graph be 0..n-1 by their attention, and tag what a layer's module path did not reach.

    A value that only one layer uses but no layer's module computed (a transpose in a helper) belongs to that layer.
    """
    for node in reversed(graph.calls):
        if node.meta["layer"] is None and node.target is not operator.getitem:
            layers = {u.meta["layer"] for u in node.users}
            if len(layers) == 1 and not isinstance(node.meta["val"], (int, torch.SymInt)):
                (layer,) = layers
                inner = {a.meta["layer"] for a in node.all_input_nodes if a.op == "call_function"}
                if layer is not None and layer in inner:
                    node.meta["layer"] = layer
