"""The table of aten ops: one entry per op, from which every part of dgraph learns what the op does to dimensions.

The verifier reads from it whether rows and sequences stay apart. `PackRows` makes a call on [N, ...] of one on
[b, t, ...] by it, `ShardTensorParallel` follows a division. An op that is `torch.Tag.pointwise` needs no entry.
A package adds an entry for an op of its own, or of torch, in a module of the entry-point group "dgraph.ops":

    from dgraph import aten_rules, kinds

    aten_rules.register("renorm_rows", aten_rules.Rule(kinds.along("dim"), dims=("dim",)))  # "package.op" of others

An op of `dgraph.ops.define` says on `Op` whether it acts row by row, and needs no entry, either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from dgraph.errors import InputError
from dgraph.ir import aten_kinds as kinds
from dgraph.ir.axes import Axes, Call
from dgraph.ops import op_of
from dgraph.plugins import load_ops
from dgraph.types.nodes import op_name


@dataclass(frozen=True, eq=False)
class Rule:
    """The facts about an op.

    Attributes:
        axes: gives for a call the correspondence of its results' dimensions to those of its arguments.
        dims: arguments that number dimensions.
        of_result: True if these are dimensions of the result; else they are of the first tensor.
        sizes: arguments that are sizes of the result. No other argument may be a number of rows.
        linear: the arguments in which the op is linear together, if these and no others are tensors. A call on sums
            over ranks is then the sum over ranks of its calls on the shares.
    """

    axes: Callable[[Call], Axes]
    dims: tuple[str, ...] = ()
    of_result: bool = False
    sizes: tuple[str, ...] = ()
    linear: tuple[str, ...] = ()


def register(name: str, rule: Rule) -> None:
    """Add an entry.

    Args:
        name: as it reads in a dump, "roll" of an aten op, "package.op" of another.
        rule: rule of all overloads of the op.

    Raises:
        InputError: the op has an entry.
    """
    if name in RULES:
        raise InputError(f"op {name!r} has an entry in dgraph.ir.aten_rules; remove the second one.")
    RULES[name] = rule


def rule_of(target: Any) -> Rule | None:
    """The entry of a call's target, or None.

    Modules of the entry-point group "dgraph.ops" are imported for an op that is in no table.

    Raises:
        PluginError: one of these modules cannot be imported.
    """
    name = op_name(target)
    if (found := RULES.get(name) or _pointwise(target)) is None and op_of(target) is None:
        load_ops()
        found = RULES.get(name)
    return found


def axes_of(node: Node, type_of: Callable[[Node], Any] = lambda node: node.meta["val"]) -> Axes | None:
    """The correspondence of dimensions in a call; None if the table does not know the op.

    Args:
        node: the call.
        type_of: the type of a node; default what its meta says.
    """
    rule = rule_of(node.target)
    return None if rule is None else rule.axes(Call(node, type_of))


def is_linear(node: Node) -> bool:
    """True if a call on sums over ranks is the sum over ranks of its calls on the shares."""
    rule, call = rule_of(node.target), Call(node)
    rounded = call.get("rounding_mode") is not None  # a quotient that is rounded
    return rule is not None and not rounded and {name for name, _ in call.tensors} == {*rule.linear}


def _pointwise(target: Any) -> Rule | None:
    tags = getattr(target, "tags", ())
    apart = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    return POINTWISE if apart and op_of(target) is None else None


SELF = ("self",)
POINTWISE = Rule(kinds.pointwise)
"""The rule of ops without an entry that torch tags as pointwise."""

_ALONG = Rule(kinds.along(), ("dim",))
_REDUCED = Rule(kinds.reduced, ("dim",))
_SUMMED = Rule(kinds.reduced, ("dim",), linear=("self",))
_NORMED = Rule(kinds.normed)
_RESHAPED = Rule(kinds.rearranged, sizes=("size", "shape", "sizes"), linear=SELF)
_PERMUTED = Rule(kinds.permuted, linear=SELF)
_SPLIT = Rule(kinds.split, ("dim",), linear=SELF)
_SAME = Rule(kinds.identity)
_COPIED = Rule(kinds.identity, linear=SELF)
_FILLED = Rule(kinds.filled, sizes=("size",))
_CONVOLVED = Rule(kinds.convolved)
_MULTIPLIED = Rule(kinds.multiplied)
_SCALED = Rule(kinds.pointwise, linear=SELF)
_ADDED = Rule(kinds.pointwise, linear=("self", "other"))

RULES: dict[str, Rule] = {
    "getitem": Rule(kinds.parts, linear=SELF),
    "sym_size": Rule(kinds.unread),
    # Entry by entry: linear ones, and those that torch does not call pointwise.
    **dict.fromkeys(("add", "sub", "subtract"), _ADDED),
    **dict.fromkeys(("mul", "multiply", "div", "divide", "true_divide", "neg", "negative"), _SCALED),
    **dict.fromkeys(("absolute", "fix", "floor_divide", "hardswish", "log_sigmoid", "isclose"), POINTWISE),
    **dict.fromkeys(("__and__", "__or__", "__xor__", "complex", "polar"), POINTWISE),
    **dict.fromkeys(("greater", "greater_equal", "less", "less_equal", "not_equal"), POINTWISE),
    **dict.fromkeys(("arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh"), POINTWISE),
    **dict.fromkeys(("rsub", "real", "special_ndtr"), POINTWISE),
    "where": Rule(kinds.chosen),
    **dict.fromkeys(("clone", "contiguous", "detach", "alias"), _COPIED),
    **dict.fromkeys(("to", "_to_copy", "type_as", "one_hot"), _SAME),
    "dropout": Rule(kinds.dropped),
    "bucketize": Rule(kinds.compared("self")),
    "searchsorted": Rule(kinds.compared("self")),
    "isin": Rule(kinds.compared("elements")),
    "prelu": Rule(kinds.compared("self")),
    # One value everywhere.
    **dict.fromkeys(("zeros_like", "ones_like", "full_like"), Rule(kinds.filled_like)),
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"), _FILLED),
    # Products.
    "linear": Rule(kinds.linear),
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "addmm", "addmv", "baddbmm"), _MULTIPLIED),
    "outer": Rule(kinds.outer),
    "einsum": Rule(kinds.summed_by_letters),
    "scaled_dot_product_attention": Rule(kinds.attended),
    **dict.fromkeys(("conv1d", "conv2d", "convolution"), _CONVOLVED),
    # Works along some dimensions of a shape that stays.
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _ALONG),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), _ALONG),
    **dict.fromkeys(("sort", "argsort", "topk", "glu"), _ALONG),
    "flip": Rule(kinds.along("dims"), ("dims",), linear=SELF),
    "roll": Rule(kinds.along("dims"), ("dims",), linear=SELF),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), _NORMED),
    **dict.fromkeys(("group_norm", "native_group_norm"), Rule(kinds.by_group)),
    **dict.fromkeys(("tril", "triu"), Rule(kinds.triangular, linear=SELF)),
    # Reduces some dimensions.
    **dict.fromkeys(("sum", "mean"), _SUMMED),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "prod"), _REDUCED),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean", "logsumexp", "median", "kthvalue", "mode"), _REDUCED),
    **dict.fromkeys(("norm", "linalg_vector_norm", "count_nonzero"), _REDUCED),
    "cosine_similarity": Rule(kinds.likened, ("dim",)),
    # Moves entries.
    **dict.fromkeys(("reshape", "view", "_unsafe_view", "flatten", "unflatten"), _RESHAPED),
    "squeeze": _RESHAPED,
    "unsqueeze": Rule(kinds.rearranged, ("dim",), True, linear=SELF),
    **dict.fromkeys(("view_as_complex", "view_as_real"), Rule(kinds.behind, linear=SELF)),
    **dict.fromkeys(("transpose", "permute", "t", "swapaxes", "movedim", "numpy_T", "mT"), _PERMUTED),
    **dict.fromkeys(("expand", "broadcast_to"), Rule(kinds.expanded, sizes=("size",), linear=SELF)),
    "expand_as": Rule(kinds.expanded, linear=SELF),
    "repeat": Rule(kinds.tiled, sizes=("repeats",), linear=SELF),
    "tile": Rule(kinds.tiled, sizes=("dims",), linear=SELF),
    "repeat_interleave": Rule(kinds.along(), ("dim",), linear=SELF),
    **dict.fromkeys(("cat", "concat", "concatenate"), Rule(kinds.joined, ("dim",), True, linear=("tensors",))),
    "stack": Rule(kinds.stacked, ("dim",), True, linear=("tensors",)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"), _SPLIT),
    **dict.fromkeys(("slice", "narrow"), Rule(kinds.sliced, ("dim",), linear=SELF)),
    **dict.fromkeys(("select", "unbind"), Rule(kinds.selected, ("dim",), linear=SELF)),
    "unfold": Rule(kinds.windowed, ("dimension",), linear=SELF),
    **dict.fromkeys(("constant_pad_nd", "pad"), Rule(kinds.padded)),
    # Looks up and writes by numbers.
    "embedding": Rule(kinds.looked_up),
    "index_select": Rule(kinds.picked, ("dim",)),
    "gather": Rule(kinds.gathered, ("dim",)),
    "index": Rule(kinds.indexed),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), Rule(kinds.scattered, ("dim",))),
}
"""Rules by the name of an op as it reads in a dump."""
