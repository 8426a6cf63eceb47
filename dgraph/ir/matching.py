"""Matches of a pattern in a graph, and near misses.

The calls of a graph that may be the last one of a pattern are looked up by op. From each of them the pattern is
followed to the values that it reads. So the time goes with the number of those calls, not with the size of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, overload

from torch.fx import Node, map_arg

from dgraph.errors import InputError, UnknownName
from dgraph.ir.pattern import CASTS, Call, Cast, Parameter, Pattern, Step, traced
from dgraph.ops import op_of
from dgraph.types.nodes import args_of, op_name

if TYPE_CHECKING:
    from dgraph.ir.graph import Graph

Bound = Mapping[Parameter | Step, Any]


@dataclass(frozen=True, eq=False)
class Match:
    """A place where a pattern stands: `match["x"]` is what it bound to a parameter, or the node of a call, by name.

    Attributes:
        graph: the graph.
        pattern: the pattern.
        bound: values by name, parameters first, then calls in order.
        nodes: the nodes of the pattern, in its order.
        root: the node of its last call.
    """

    graph: Graph
    pattern: Pattern
    bound: Mapping[str, Any]
    nodes: tuple[Node, ...]
    root: Node
    _now: dict[Node, Node] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """A bound value; what stands in its place now, if another match has been replaced since.

        Raises:
            UnknownName: the pattern has no parameter and no call of that name.
        """
        if name not in self.bound:
            raise UnknownName(f"name in pattern {self.pattern.name}", name, self.bound)
        return map_arg(self.bound[name], self._current)

    def _current(self, node: Node) -> Node:
        while node in self._now:
            node = self._now[node]
        return node

    @property
    def values(self) -> tuple[Any, ...]:
        """The bound values of the parameters, in their order."""
        return tuple(self[name] for name in self.pattern.traced.parameters)

    @property
    def layer(self) -> int | None:
        """Its layer: that of its last call."""
        layer: int | None = self.root.meta.get("layer")
        return layer

    def replace(self, new: Node | Callable[..., Any], *, by: str = "") -> Node:
        """Put another value in the place of the last call, and remove the calls that nothing reads any more.

        Args:
            new: a node; or a function over ops, whose parameters are names of the pattern. Its ops are overloads, or
                have only one. The new calls have layer, role and source of the last call.
            by: the pass that makes them.

        Returns:
            The node that stands there now.

        Raises:
            InputError: the function cannot be traced, or calls an op of several overloads.
            UnknownName: it has a parameter that the pattern has no name for.
            VerifyError: an op does not accept its arguments; the graph is as it was.
        """
        made = new if isinstance(new, Node) else self._made(new, by)
        self.graph.replace(self.root, made)
        self._now[self.root] = made
        self.graph.drop_unread({*self.nodes} - {self.root})
        return made

    def _made(self, function: Callable[..., Any], by: str) -> Node:
        """The calls of a function, before the last call of the match; the one that gives its value."""
        steps = traced(function)
        values: dict[Any, Any] = {parameter: self[name] for name, parameter in steps.parameters.items()}
        targets = {step: step.overload if isinstance(step, Call) else None for step in steps.steps}
        for step, target in targets.items():
            if target is None:
                said = "which names several overloads; name one, as torch.ops.aten.mul.Tensor"
                raise InputError(f"{steps.name} calls {step.name}, {said}.")
        source = self.root.meta.get("source", "")
        made: list[Node] = []
        try:
            for step, target in targets.items():
                args, kwargs = _filled(step.args, values), _filled(step.kwargs, values)
                call = self.graph.call(target, args, kwargs, before=self.root, by=by, like=self.root, source=source)
                made.append(call)
                values[step] = call
            result = _filled(steps.result, values)
            if not isinstance(result, Node):
                raise InputError(
                    f"{steps.name} gives {result!r} for {self.root.name}; expected one value of the graph."
                )
        except Exception:
            for node in reversed(made):
                self.graph.fx.erase_node(node)
            raise
        return result

    def __str__(self) -> str:
        values = ", ".join(f"{name}={text(self[name])}" for name in self.pattern.traced.parameters)
        return f"{self.root.name}: {values}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        names = self.pattern.traced.parameters
        return {
            "layer": self.layer,
            "root": self.root.name,
            "values": {name: _plain(value) for name, value in self.bound.items() if name in names},
            "nodes": {name: _plain(value) for name, value in self.bound.items() if name not in names},
        }


@dataclass(frozen=True)
class Miss:
    """A call that could be the last one of a pattern, and how far the pattern goes from there.

    Attributes:
        pattern: the pattern.
        root: the call.
        found: calls of the pattern that stand there.
        reason: why it goes no further.
        call: name of the call in the pattern whose node is read by others; "" for another reason.
        reader: the other reader; None for another reason.
    """

    pattern: Pattern
    root: Node
    found: int
    reason: str
    call: str = ""
    reader: Node | None = None

    @property
    def layer(self) -> int | None:
        """The layer of the call."""
        layer: int | None = self.root.meta.get("layer")
        return layer

    def __str__(self) -> str:
        return f"{self.found} of {len(self.pattern.calls)} nodes: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        reader = self.reader.name if self.reader is not None else None
        found = {"found": self.found, "calls": len(self.pattern.calls), "reason": self.reason, "reader": reader}
        return {"layer": self.layer, "root": self.root.name, **found}


class Matches(Sequence[Match]):
    """The matches of a pattern, in order of the graph.

    Attributes:
        pattern: the pattern.
        misses: where it does not stand, the deepest first.
    """

    def __init__(self, pattern: Pattern, found: Sequence[Match], misses: Sequence[Miss]):
        self.pattern, self._found = pattern, found
        self.misses = sorted(misses, key=lambda miss: -miss.found)

    @overload
    def __getitem__(self, at: int) -> Match: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Match]: ...

    def __getitem__(self, at: int | slice) -> Match | Sequence[Match]:
        return self._found[at]

    def __len__(self) -> int:
        return len(self._found)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        found, misses = [match.to_json() for match in self], [miss.to_json() for miss in self.misses]
        return {"pattern": self.pattern.name, "matches": found, "misses": misses}


def matches_of(graph: Graph, pattern: Pattern, layer: int | None = None) -> Matches:
    """See `Graph.match`."""
    targets = (graph.fx.find_nodes(op="call_function", target=target) for target in pattern.ends)
    taken: set[Node] = set()
    now: dict[Node, Node] = {}
    found: list[Match] = []
    misses: list[Miss] = []
    for root in sorted(node for nodes in targets for node in nodes):
        if layer is not None and root.meta.get("layer") != layer:
            continue
        tried = match_at(graph, pattern, root, taken, now)
        if isinstance(tried, Miss):
            misses.append(tried)
            continue
        found.append(tried)
        shared = {tried.bound[step.name] for step in pattern.traced.steps if pattern.may_share(step)}
        taken |= {tried.root, *({*tried.nodes} - shared)}
    return Matches(pattern, found, misses)


def match_at(
    graph: Graph,
    pattern: Pattern,
    root: Node,
    taken: Collection[Node] = (),
    now: dict[Node, Node] | None = None,
) -> Match | Miss:
    """The match whose last call is a node, or the reason against it.

    Args:
        taken: nodes of other matches, which cannot be in this one.
        now: nodes that were replaced, and those in their places; filled by `Match.replace`.
    """
    search = _Search(graph, pattern, root, taken, {} if now is None else now)
    return next(search.matches(), None) or search.deepest


class _Search:
    """The search for a pattern from its last call on.

    Attributes:
        deepest: the miss with the most calls, the first of these.
    """

    def __init__(
        self, graph: Graph, pattern: Pattern, root: Node, taken: Collection[Node], now: dict[Node, Node]
    ) -> None:
        self.graph, self.pattern, self.root, self.taken, self.now = graph, pattern, root, taken, now
        self.deepest = Miss(pattern, root, -1, "")

    def matches(self) -> Iterator[Match]:
        """Every match that the check accepts."""
        traced = self.pattern.traced
        for bound in self._solve([(traced.result, self.root)], {}):
            steps = [s for s in traced.steps if isinstance(s, Call) or bound[s] is not _filled(s.args[0], bound)]
            match = self._match(bound, steps)
            if self._is_own(match, steps):
                reason = self.pattern.check(match) if self.pattern.check is not None else None
                if not reason:
                    yield match
                else:
                    self._miss(len(self.pattern.calls), reason)

    def _solve(self, todo: Sequence[tuple[Any, Any]], bound: Bound) -> Iterator[Bound]:
        """Everything that parts of a pattern can bind, given pairs of a part and what must be it."""
        if not todo:
            yield bound
            return
        (want, got), *rest = todo
        for pairs, more in self._ways(want, got, bound):
            yield from self._solve([*pairs, *rest], {**bound, **more})

    def _ways(self, want: Any, got: Any, bound: Bound) -> Iterator[tuple[Sequence[tuple[Any, Any]], Bound]]:
        """Each way in which a part of a pattern can be something: further pairs, and what is bound by it."""
        if want is ...:
            yield [], {}
        elif isinstance(want, (Parameter, Step)) and want in bound:
            if _is_same(bound[want], got):
                yield [], {}
            else:
                self._stop(bound, f"{want.name} is {text(bound[want])} in one place and {text(got)} in another")
        elif isinstance(want, Parameter):
            yield [], {want: got}
        elif isinstance(want, Cast):
            is_cast = isinstance(got, Node) and got.target in CASTS
            yield [(want.args[0], args_of(got)[0] if is_cast else got)], {want: got}
        elif isinstance(want, Call):
            yield from self._calls(want, got, bound)
        elif isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)) and len(want) == len(got):
            yield list(zip(want, got, strict=True)), {}
        elif _is_same(want, got) or (isinstance(got, (list, tuple)) and _is_same([want], list(got))):
            yield [], {}
        else:
            self._stop(bound, f"{text(got)} stands where {text(want)} is expected")

    def _calls(self, want: Call, got: Any, bound: Bound) -> Iterator[tuple[Sequence[tuple[Any, Any]], Bound]]:
        """As `_ways`, of a call."""
        if not isinstance(got, Node) or got.target not in want.targets:
            self._stop(bound, f"{_kind(got, want)} stands where {want.op} is expected")
        elif got in self.taken:
            self._stop(bound, f"{got.name} is in an earlier match")
        elif any(value is got for part, value in bound.items() if isinstance(part, Call)):
            self._stop(bound, f"{got.name} would stand for two calls")
        else:
            for args in want.orders:
                pairs = _pairs(want, args, got)
                if isinstance(pairs, str):
                    self._stop(bound, pairs)
                else:
                    yield pairs, {want: got}

    def _match(self, bound: Bound, steps: Sequence[Step]) -> Match:
        values = {part.name: bound[part] for part in self.pattern.traced.parts}
        return Match(self.graph, self.pattern, values, tuple(bound[step] for step in steps), self.root, self.now)

    def _is_own(self, match: Match, steps: Sequence[Step]) -> bool:
        """True if nothing else reads what stands before the last call."""
        outside = []
        for step, node in zip(steps, match.nodes, strict=True):
            others = [user for user in node.users if user not in match.nodes]
            if others and node is not self.root and not self.pattern.may_share(step):
                outside.append((step, others[0]))
        if outside:
            step, reader = outside[0]
            reason = f"{step.name} has a second user, {op_name(reader.target)}"
            self._miss(len(self.pattern.calls) - len(outside), reason, step.name, reader)
        return not outside

    def _stop(self, bound: Bound, reason: str) -> None:
        self._miss(sum(isinstance(part, Call) for part in bound), reason)

    def _miss(self, found: int, reason: str, call: str = "", reader: Node | None = None) -> None:
        if found > self.deepest.found:
            self.deepest = Miss(self.pattern, self.root, found, reason, call, reader)


@cache
def _defaults(target: Any) -> dict[str, Any]:
    """The names of an op's arguments, in order, with their defaults; `...` for those without one."""
    if target is operator.getitem:
        return {"values": ..., "number": ...}
    arguments = target._schema.arguments
    return {each.name: each.default_value if each.has_default_value() else ... for each in arguments}


def _pairs(want: Call, args: Sequence[Any], got: Node) -> list[tuple[Any, Any]] | str:
    """The arguments of a call of a pattern, each with that of a node; or why they do not fit."""
    defaults = _defaults(got.target)
    given = {**defaults, **dict(zip(defaults, args_of(got), strict=False)), **got.kwargs}
    is_open = args[-1:] == (...,)
    wanted = {**dict(zip(defaults, args[:-1] if is_open else args, strict=False)), **want.kwargs}
    if len(args) - is_open > len(defaults) or not wanted.keys() <= defaults.keys():
        return f"{op_name(got.target)} takes no such arguments; it takes {', '.join(defaults)}"
    op = op_of(got.target)
    for name, value in given.items():
        if name in wanted or is_open or _is_same(value, defaults[name]):
            continue
        if op is None or op.live_form_of is None or name != op.count:
            return f"{got.name} has {name}={text(value)}, of which the pattern says nothing"
    return [(value, given[name]) for name, value in wanted.items()]


def _is_same(one: Any, other: Any) -> bool:
    """True for one node, or equal constants; 2 and 2.0 are equal, 1 and True are not."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, (Node, bool)) or isinstance(other, (Node, bool)):
        return one is other
    return bool(one == other)


def _kind(value: Any, want: Call) -> str:
    """A value in words, for one who expected a call; its overload where the op is the same."""
    if not isinstance(value, Node) or value.op != "call_function":
        return text(value)
    name = op_name(value.target)
    return str(value.target) if name == want.op else name


def _filled(value: Any, values: Mapping[Any, Any]) -> Any:
    """A value of a function's trace with the parts of a graph in their places."""
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(each, values) for each in value)
    if isinstance(value, Mapping):
        return {key: _filled(each, values) for key, each in value.items()}
    return values[value] if isinstance(value, (Parameter, Step)) else value


def _plain(value: Any) -> Any:
    """A bound value for JSON; numbers and lists stay what they are."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else text(value)


def text(value: Any) -> str:
    """A bound value in a line: a weight or input by its name, another node by its own, anything else as it is."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, (Parameter, Step)):
        return value.name
    if isinstance(value, Node):
        return str(value.meta.get("weight") or value.meta.get("input") or value.name)
    return repr(value)
