"""The graph: what every pass reads and rewrites.

A `Graph` is a straight line of calls over an `torch.fx.Graph`: weights first, then run-time inputs, then calls, then
one output. `NodeList` has its nodes; this file has the rows that they run on, and the patterns that they make.

Weights are inputs, never constants: a graph is a function of shapes alone, so equal layers are equal text.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.errors import PassError, VerifyError
from dgraph.families import Model
from dgraph.ir import row_counts, row_flags, some_rows
from dgraph.ir.layers import FeedForward
from dgraph.ir.listed import Listed as Listed
from dgraph.ir.matching import Matches, matches_of
from dgraph.ir.node_list import NodeList
from dgraph.ir.pattern import Pattern
from dgraph.ir.some_rows import Place, RowLayer, SomeRows
from dgraph.ops import OPS
from dgraph.types.nodes import args_of, op_name, where
from dgraph.types.shapes import Evaluator, InputSpec

ALL = "N"
"""The row set of all rows of a step."""

ADDED = InputSpec("added", torch.bool, (ALL,))
GAP = InputSpec("gap", torch.int32, (ALL, 2))
"""Rows that a step has beside those of its sequences, and for each row the positions [begin, end) that it does not see.
"""

DECISION = ("logits", "token")
"""Outputs that have one entry for each row that a step decides on."""


class Graph(NodeList):
    """A model's forward as a list of typed nodes, each over a row set or none; see `NodeList` for its attributes."""

    def match(self, pattern: Pattern | Callable[..., Any], layer: int | None = None) -> Matches:
        """The places where a pattern stands, in order, of one layer if given; and where it nearly does.

        A call is in one match only, the first one, unless others may read it (`Pattern.shared`). `Match.replace` puts
        something else in the place of a match.

        Args:
            pattern: the pattern, or a function that is one.

        Raises:
            InputError: the function is no pattern; see `Pattern`.
        """
        return matches_of(self, pattern if isinstance(pattern, Pattern) else Pattern(pattern), layer)

    def new_row_set(self) -> str:
        """A name for the row set that the next cut makes: K, K1, K2, ..."""
        taken = len([n for n in self.calls if "rows" in n.meta])
        return f"K{taken}" if taken else "K"

    def keep_rows(
        self,
        flag: Node,
        *,
        before: Node,
        by: str,
        like: Node | None = None,
        counted: bool = False,
        instead: Mapping[Node, Node] | None = None,
        but: Collection[Node] = (),
    ) -> Listed:
        """Continue with the flagged rows alone from a node on: a new row set (K, K1, ...).

        All values that the node and later ones read are gathered, offsets included. The output `kept` i64[K] numbers
        each row among all rows of the step. A program may keep rows several times, at any places.

        Args:
            flag: bool over a row set, true for rows that go on.
            before: the first node that runs on these.
            by: the pass.
            like: the node that gives layer and role of the new calls; `before` if None.
            counted: their number stays on the device, and the others become padding; else the host reads it, and the
                program is cut into stages here.
            instead: values that are gathered in place of others (rows that go on may see fewer keys, say).
            but: nodes that go on reading all rows. With the output among them, `kept` stays as it is.

        Returns:
            The rows as a list.

        Raises:
            VerifyError: `flag` is not one flag per row, or its rows have no offsets.
        """
        rows = self.row_set(flag)
        if rows is None or flag.meta["val"].dtype != torch.bool or flag.meta["val"].dim() != 1:
            raise VerifyError(f"{flag.name} is {self.type_text(flag)}; rows are kept by a flag for each, bool[{ALL}].")
        cu_rows, before = self.offsets_of(rows), self._parts_made(before)
        layers = row_counts.taken_off(self)
        target, args = (OPS["list_kept"], ()) if counted else (OPS["keep_index"], (-1,))
        cut = self.call(target, (flag, cu_rows, *args), before=before, by=by, like=like, rows=self.new_row_set())
        kept = self.listed(cut, by)
        if self.output not in but:  # numbered anew below
            self.set_outputs({name: node for name, node in self.results().items() if name != "kept"})
        self._gather(rows, kept.index, before, by, instead or {}, but)
        self.redirect(cu_rows, kept.cu_rows, after=cut, but=but)
        self.propagate()
        if self.output not in but:
            decided = [self.row_set(self.result(name)) for name in self.outputs if name in DECISION]
            numbers = self.numbers_of(decided[0] or ALL if decided else cut.meta["rows"], by)
            if numbers is not None:
                self.set_outputs({**self.results(), "kept": numbers})
        if layers:
            row_counts.count_rows(self, layers, by)
        return kept

    def _parts_made(self, before: Node) -> Node:
        """Take the parts of several results where these are made, so that none is left to a node or to those after it:
        rows are gathered of tensors, not of a tuple. Returns the first of these nodes that stays where it is.
        """
        for node in [n for n in self.calls if n < before and isinstance(n.meta["val"], (tuple, list))]:
            later = [user for user in node.users if user >= before and user.target is operator.getitem]
            for part in reversed(later):
                before = before.next if part is before else before
                node.append(part)
        return before

    def listed(self, call: Node, by: str) -> Listed:
        """Parts of the result of a `list_kept` or `keep_index`, as nodes: existing ones, or new ones."""
        parts = {args_of(part)[1]: part for part in call.users}
        for i in sorted({0, 1} - parts.keys()):  # without a reader yet
            previous = parts[0] if i else call
            parts[i] = self.call(operator.getitem, (call, i), before=previous.next, by=by, like=call)
        return Listed(parts[0], parts[1])

    def cut_of(self, rows: str) -> Node:
        """The call that made a row set: a `keep_index`, or a `list_kept` that counts rows on the device."""
        for node in self.calls:
            if node.meta.get("rows") == rows:
                return node
        raise VerifyError(f"no call makes row set {rows}; Graph.keep_rows makes one.")

    def offsets_of(self, rows: str) -> Node:
        """i32[b+1], the offsets per sequence of the rows of a set."""
        if rows != ALL:
            cut = self.cut_of(rows)
            return self.listed(cut, cut.meta["by"]).cu_rows
        if "cu_rows" not in self.inputs:
            raise VerifyError("no input cu_rows says which rows are of which sequence; run PackRows first.")
        return self.input("cu_rows")

    def numbers_of(self, rows: str, by: str) -> Node | None:
        """The number of each row of a set among all rows of the step, -1 for padding; None for the set of all rows."""
        numbers = None if rows == ALL else self._numbers_of(rows, by)
        if numbers is None or "rows" in args_of(numbers)[0].meta:  # a list ends in -1 by itself
            return numbers
        index, at = self.listed(self.cut_of(rows), by).index, numbers.next
        padding = self.call(torch.ops.aten.lt.Scalar, (index, 0), before=at, by=by, like=numbers)
        return self.call(torch.ops.aten.masked_fill.Scalar, (numbers, padding, -1), before=at, by=by, like=numbers)

    def _numbers_of(self, rows: str, by: str) -> Node:
        """As `numbers_of`, with anything for padding."""
        cut = self.cut_of(rows)
        index, of = self.listed(cut, by).index, str(self.row_set(args_of(cut)[0]))
        if of == ALL:
            return index
        compact = next(c for c in self.find("compact") if args_of(c)[1] is index)
        return self._carry(self._numbers_of(of, by), compact, by)

    def _gather(
        self,
        rows: str,
        index: Node,
        before: Node,
        by: str,
        instead: Mapping[Node, Node],
        but: Collection[Node],
    ) -> None:
        """Let a node and those after it read, of every value over a row set, the rows of an index alone."""
        live = [n for n in self.live_after(before.prev, but) if self.row_set(n) == rows and n is not index]
        compact = self.call(OPS["compact"], ([instead.get(n, n) for n in live], index), before=before, by=by)
        for old, new in zip(live, self.parts(compact, len(live), by), strict=True):
            self.redirect(old, new, after=compact, but=but)

    def on_rows_of(self, value: str | Node, like: Node, by: str) -> Node:
        """A value that has one entry per row (an input by its name), carried to the row set of `like`.

        If rows were gathered on the way (an eviction), the value is gathered with them. It is added to the `compact`
        call that made the row set.
        """
        node, wanted = self.input(value) if isinstance(value, str) else value, self.row_set(like)
        while self.row_set(node) != wanted:
            gathers = (c for c in self.find("compact") if self.row_set(args_of(c)[0][0]) == self.row_set(node))
            # Rows that are moved within their row set are not carried on.
            compact = next((c for c in gathers if self.symbols.row_set(c.meta["val"][0]) != self.row_set(node)), None)
            if compact is None:
                raise VerifyError(f"{node.name} has rows {self.row_set(node)}; nothing carries them to {wanted}.")
            node = self._carry(node, compact, by)
        return node

    def _carry(self, node: Node, compact: Node, by: str) -> Node:
        values, index = list(args_of(compact)[0]), args_of(compact)[1]
        if node in values:
            at = values.index(node)
            for user in compact.users:
                if args_of(user)[1] == at:
                    return user
        else:
            at = len(values)
            compact.args = ((*values, node), index)
            compact.meta["val"] = Evaluator(self.symbols).call(compact)
        return self.call(operator.getitem, (compact, at), before=compact.next, by=by, like=compact)

    def add_rows(self, *, by: str) -> list[Node]:
        """Let steps have rows beside those of their sequences, which the row plan adds (`RowPlan.added`).

        New inputs, over all rows: `added` bool[N] flags these rows, and `gap` i32[N, 2] has the positions [begin, end)
        that a row does not see. The key and value of an added row are written nowhere. The row sees them, and no other
        row does. So the values of all other rows stay as they are.

        Args:
            by: the pass.

        Returns:
            The attentions, in order.

        Raises:
            PassError: an attention that is not over all rows of a step, or that knows no such rows.
        """
        added, gap = self.add_input(ADDED), self.add_input(GAP)
        made = []
        for node in [*self.find("packed_attention"), *self.find("paged_attention")]:
            if self.row_set(node) != ALL:
                raise PassError(f"{where(node)}: it runs on rows {self.row_set(node)} alone; add rows before that.")
            op = OPS[op_name(node.target).rpartition(".")[2]]
            given: dict[str, Node] = {"gap": gap, "own": added}
            if op is OPS["paged_attention"]:
                write = next(n for n in self.find("kv_write") if args_of(n)[2] is args_of(node)[1])
                given |= zip("kv", args_of(write)[:2], strict=True)
                skipping = OPS["kv_write"].call_args(args_of(write), skip=added)
                self.call(OPS["kv_write"], skipping, before=write, by=by, like=write)
                self.fx.erase_node(write)
            new = self.call(op, op.call_args(args_of(node), **given), before=node, by=by, like=node)
            self.replace(node, new)
            made.append(new)
        self.sweep()
        return made

    def row_layer(self, attention: Node) -> RowLayer | str:
        """The layer of an attention over a cache, as `run_rows` takes it, or why it cannot run on some of its rows."""
        return some_rows.row_layer(self, attention)

    def row_network(self, attention: Node) -> FeedForward | str:
        """The feed-forward network of an attention's layer, as `run_rows` takes it, or why it cannot run on some rows.

        A norm that it shares with the attention is not part of it.
        """
        return some_rows.row_network(self, attention)

    def run_rows(self, part: RowLayer | FeedForward, flags: Node, *, by: str, given: Sequence[Node] = ()) -> SomeRows:
        """Run a layer, or its feed-forward network alone, on flagged rows; the others reuse what they have.

        The rows are listed on the device and move to the front of a buffer for all rows. Linear layers stop after them.
        The network's addend to the residual stream is kept by position, in the cache `f_cache_l` of layer l. It is
        added for all rows to the current stream. A whole layer also keeps the addend of its attention, in `a_cache_l`.
        Keys and values of the other rows stay in the cache as they are. The pass names these inputs in its `signature`.

            layer = graph.row_layer(attention)
            if isinstance(layer, str):
                report.skip(layer, attention)
            else:
                graph.run_rows(layer, flags, by=report.name)
                graph.count_rows([flags], by=report.name)

        In the first step of a response all rows must run: include the input `full` bool[N] in the flags.

        Args:
            part: what `row_layer` or `row_network` found.
            flags: bool over the row set of the part, computed before it.
            by: the pass.
            given: queries, keys or values of the layer that are computed for all rows already, since the flags depend
                on them.

        Returns:
            The rows; `new` has each value on these rows by the node that it had for all rows, the attention of a layer
            among them.

        Raises:
            VerifyError: `flags` is not one flag for each row of the part.
        """
        node = part.attention if isinstance(part, RowLayer) else part.result
        if self.row_set(flags) != self.row_set(node) or flags.meta["val"].dtype != torch.bool:
            raise VerifyError(
                f"{flags.name} is {self.type_text(flags)}, but the rows of {node.name} are {self.type_text(node)}; "
                f"expected one flag for each row, bool[{self.row_set(node)}]."
            )
        if isinstance(part, RowLayer):
            return some_rows.run_layer(self, part, flags, given, by)
        place = self.place_of(part.result, self.add_input(some_rows.own_table(self)), by)
        return some_rows.run_network(self, part, flags, place, by)

    def count_rows(self, flags: Iterable[Node], *, by: str) -> None:
        """Count, in every step, the rows on which layers run.

        The output `salient` i32[L] has a number for each layer that counts, in order of layers. Statistics and `dgraph
        eval` show them. The pass names the output in its `signature`.

        Args:
            flags: bool over rows, in a call of the layer, one for each layer; false for padding rows. They take the
                place of those that the layer counted before.
            by: the pass.

        Raises:
            VerifyError: something else than such flags, or an output `salient` that was not made here.
        """
        row_counts.count_rows(self, flags, by)

    def drift(self, value: Node, tau: float, *, by: str, name: str = "c") -> Node:
        """Flags of the rows whose value differs from that of the step before, by cosine; of all rows in a full step.

        The value is kept in the cache `<name>_cache_<layer>` (see `cache_of`). Sums are added over ranks.

        Args:
            value: over rows, in a layer; a rank may have a share of its heads.
            tau: the cosine below which a row differs; above 1 every row does.
            by: the pass.
            name: of the cache.

        Returns:
            bool over the rows of the value, right after it.
        """
        return row_flags.drift(self, value, tau, name, by)

    def least_similar(
        self, values: tuple[Node, ...], place: Place, share: float, *, before: Node, by: str, adapt: Node | None = None
    ) -> Node:
        """Flags of the share of each sequence's rows that are least similar to what a cache has of them.

        The cache takes the new values. All rows of a full step are flagged. Sums are added over ranks.

        Args:
            values: the new values, their cache, and the scales of a cache in float8.
            place: of the rows, in that cache.
            share: in [0, 1], of the rows that adapt; rounded down to whole rows.
            before: the node before which the flags are computed.
            by: the pass.
            adapt: bool over rows, those that take part; all of them if None.

        Returns:
            bool over the rows of the values.
        """
        return row_flags.least_similar(self, values, place, share, adapt, before, by)

    def key_mass(self, attention: Node, rows: Node, *, by: str, heads: bool = False, cached: bool = False) -> Node:
        """Attention that flagged rows of each sequence pay to each of its keys, summed over these rows.

        After attention and flags the keys are read from the cache, and their softmax is computed anew for these rows.
        The sum over the keys of a sequence is the number of its flagged rows.

        Args:
            attention: a `paged_attention`, as it stands in the graph or in `SomeRows.new`.
            rows: bool over the rows of its queries. After `run_rows` that is what `SomeRows.on` gives.
            by: the pass.
            heads: True for the mean over the query heads of each KV head apart.
            cached: True if a step forwards some rows alone (block-causal models): keys are those of `key_positions`
                i64[M]. False: they are those of the rows of the step, which must all be there.

        Returns:
            f32[N] (f32[M] if cached), the mean over all heads of all ranks; or [N, KV heads], of this rank's heads.

        Raises:
            VerifyError: an attention over no cache; or `heads` where several ranks have one KV head.
        """
        return row_flags.key_mass(self, attention, rows, heads, cached, by)

    def most_attended(self, mass: Node, among: Node, *, by: str) -> Node:
        """Flag the row of each sequence whose key gets the most attention, right after the mass; ties: the first.

        Args:
            mass: f32[N], as `key_mass` gives it for the rows of the step.
            among: bool[N], the rows to choose from.
            by: the pass.
        """
        args = (mass, among, self.input("cu_rows"))
        return self.call(OPS["top_row"], args, before=mass.next, by=by, like=mass)

    def cache_of(self, name: str, value: Node) -> tuple[Node, Node]:
        """The input `<name>_cache_<layer>` that keeps a value of each row, and the page table by which it is read.

        It is declared from the value's sizes, dtype and layer. Each row reads what an earlier step kept for its own
        position. A bidirectional model may come back to any position. A block-causal one forwards a finished block once
        more, in full, and never again. So its cache has a window of one position, and a sequence has places there for
        as many as a step forwards.
        """
        table = some_rows.own_table(self)
        return some_rows.kept_by(self, name, value, table.window), self.add_input(table)

    def place_of(self, value: Node, page_table: Node, by: str) -> Place:
        """Place of a value's rows in the caches that are read by a page table."""
        rows = self.row_set(value)
        if rows is None:
            raise VerifyError(f"{value.name} is {self.type_text(value)}; expected a value with rows.")
        return Place(self.on_rows_of("positions", value, by), page_table, self.offsets_of(rows))

    def copy(self) -> Graph:
        """An independent graph over the same weights and symbols."""
        other = Graph(self.spec, self.symbols)
        mapping: dict[Node, Node] = {}
        for node in self.fx.nodes:
            # Arguments come after: torch looks for symbolic sizes in those that a node is made with.
            made = mapping[node] = other.fx.create_node(node.op, node.target, name=node.name, type_expr=node.type)
            made.args = torch.fx.map_arg(args_of(node), mapping.__getitem__)
            if node.kwargs:
                made.kwargs = torch.fx.map_arg(node.kwargs, mapping.__getitem__)
            made.meta.update(node.meta)
        other.tensors, other.inputs = dict(self.tensors), dict(self.inputs)
        other.outputs, other.history = self.outputs, self.history
        other.sharding, other.divided = self.sharding, dict(self.divided)
        other.whole, other.own, other.adapter = self.whole, dict(self.own), self.adapter
        return other

    def save(self, path: str | Path, weights: bool = False) -> None:
        """Write the graph to a file of JSON, which `load` reads.

            graph.save("step.json")

        Paths of the model's source are in it from the package on, and nothing of this machine.

        Args:
            path: of the file.
            weights: write the weights, too, beside it: to the file of that name that ends in .safetensors.

        Raises:
            FormatError: an op or an argument has no form in a file.
            InputError: the file cannot be written.
        """
        from dgraph.ir.graph_file import save

        save(self, path, weights)

    @staticmethod
    def load(path: str | Path, weights: Model | Graph | Mapping[str, Tensor] | None = None) -> Graph:
        """Read and verify a graph that `save` wrote; it equals that one. No code is run, but that of registered ops.

            graph = dgraph.Graph.load("step.json", weights=dgraph.load("tiny_sdar"))

        Args:
            path: of the file.
            weights: a model as it was captured, a graph after the same passes, or tensors by name. A rank takes its
                parts of whole ones. None: those that were saved beside it. Without such a file a graph can be read and
                rewritten, and a run gives NaN.

        Raises:
            FormatError: a damaged file, one of another version, an op that is not there, or weights that do not fit.
            InputError: the file cannot be read, or such weights mean nothing.
            VerifyError: the graph breaks a rule.
        """
        from dgraph.ir.graph_file import load

        return load(path, weights)

    def __reduce__(self) -> tuple[Callable[..., Graph], tuple[Any, ...]]:
        """The form of `save`, with the weights: for pickle, and for copies of these by copy.deepcopy."""
        from dgraph.ir.stored_graph import from_data, to_data

        return from_data, (to_data(self), self.tensors, self.spec, self.adapter)
