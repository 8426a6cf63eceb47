"""Symbolic sizes, fake values and their text: the types of a graph.

A size is a static integer or an expression over symbols. The symbols have one meaning everywhere:

    b, t    sequences and tokens of a captured (padded) batch
    N       rows of a step (all tokens of all sequences, packed)
    K       rows left after an eviction (K1, K2, ... after further ones)
    pages   pages of a KV cache;  P  pages addressed by one sequence; pages_1024, P_1024  the same of layers that see a
            window of so many positions
    M       key rows that are read from a cache
    entries, sequences   entries of the packed caches, and sequences that have some
"""

from __future__ import annotations

import functools
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import InputError, VerifyError
from dgraph.private.torch import fake_mode, new_symbol, typing
from dgraph.types.nodes import args_of, op_name, where

Dim = int | str
"""A size in a declaration: an integer, a symbol ("N") or a symbol plus an integer ("b+1")."""

DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}

OFFSETS = "b+1"
"""The size of offsets per sequence."""

OWN = 1
"""The window of a cache of which each row reads its own position alone."""

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
_UNKNOWN = object()
_HINTS, _LARGE_HINTS = 5, 304
"""Places among the primes of the first hints, 11 and 2003. No two symbols ever compare equal by accident of theirs."""


_PER = {
    "N": "row",
    "b": "sequence",
    "b+1": "offsets",
    "M": "key",
    "pages": "position",
    "entries": "packed",
    "sequences": "packed",
}
_RESETS = {
    "sequence": ("step", "block", "response"),
    "position": ("never", "response"),
    "window": ("never", "block"),
    "packed": ("never",),
}


def of_window(name: str, window: int) -> str:
    """Name of pages, or of their table, for layers that see a window of positions; 0 for layers that see all."""
    return f"{name}_{window}" if window else name


def without_window(name: str) -> str:
    """A symbol of all pages ("pages", "P") for one of the pages of a window; any other symbol as it is."""
    return name.partition("_")[0]


@dataclass(frozen=True)
class InputSpec:
    """A run-time input of a graph, as the pass that adds it declares it. The runtime allocates, fills, carries and
    resets it by this declaration alone.

    An input that the decode loop computes for each step is declared by name, dtype and shape; the names are those of
    `dgraph.runtime.loop.step_inputs.STEP_INPUTS`. A pass that needs memory of its own declares

    - per position, a paged cache of any shape that its ops write in place, in each layer another one if it likes:
      `InputSpec("x_cache_3", torch.float32, ("pages", "page", 4, 64))`. Position p of sequence s lies at
      `cache[page_table[s, p // page], p % page]`. With `reset="response"` the pages of a sequence hold `initial` before
      its first step, so that a step may read what the one before it wrote; with "never" anything finite.
      A cache whose rows see only a window of W positions may say so: `("pages_W", "page", ...)`. It has pages of its
      own, and the table `InputSpec("page_table_W", torch.int32, ("b", "P_W"))` (see `of_window`). A position is gone
      once it is behind the windows of all rows to come. A cache of which each row reads its own position alone has a
      window of 1, `("pages_1", "page", ...)`. It holds as many positions of a sequence as a step forwards. With
      `reset="block"` such pages hold `initial` before the first step of each block.
    - per sequence, a state that goes from step to step: `InputSpec("level", torch.float32, ("b",), reset="block",
      initial=1.0)`, and an output of the graph of the same name and type. What a step returns, the next step of the
      sequence is given; it holds `initial` in the first step of a block or of a response, as `reset` says. In a prefill
      a state of a response is carried from one part of the prompt to the next.

    Attributes:
        name: name of the input, the same in every program of a recipe that reads it.
        dtype: dtype of its elements.
        shape: declared sizes; the first one says what the input is `per`.
        reset: when it holds `initial` again: "step" (it is computed for each), "block", "response" or "never". Default
            "never" for what is written in place, else "step".
        initial: every element after a reset.
        layer: for packed entries, the layer whose number of entries they have.
        budgets: of the numbers of packed entries by head, how many heads' budgets these heads may use, where others
            (on other ranks) share theirs with them; 0: their own.
        by_head: for a paged cache of one number per head: True if a page stores the numbers of all positions head after
            head. A reader of one head then finds neighbours side by side. The shape says nothing of it.

    Raises:
        InputError: a reset that such an input cannot have, or `by_head` of what is no such cache.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[Dim, ...]
    reset: str = ""
    initial: float = 0
    layer: int | None = None
    budgets: int = 0
    by_head: bool = False

    def __post_init__(self) -> None:
        allowed = _RESETS.get("window" if self.window and self.in_place else self.per, ("step",))
        if not self.reset:
            object.__setattr__(self, "reset", allowed[0])
        if self.reset not in allowed:
            raise InputError(
                f"input {self.name!r}: an input per {self.per} (shape {self.shape}) resets with "
                f"{' or '.join(map(repr, allowed))}, got {self.reset!r}."
            )
        if self.by_head and (self.per != "position" or len(self.shape) != 3):
            raise InputError(
                f"input {self.name!r}: by_head is for a paged cache of one number for each head, "
                f"('pages', 'page', heads), got the shape {self.shape}. Leave it out."
            )

    @property
    def per(self) -> str:
        """Unit that the first size counts, one of these:

        - "row", "sequence", or "offsets" (one more than sequences)
        - "key": rows of keys that are read from a cache
        - "position": a paged cache
        - "packed": entries of a packed cache, or their number per sequence
        - "constant"
        """
        return _PER.get(without_window(str(self.shape[0])), "constant") if self.shape else "constant"

    def empty(self, sizes: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
        """A value of those sizes, laid out as declared; what it holds is arbitrary."""
        if not self.by_head:
            return torch.empty(tuple(sizes), dtype=self.dtype, device=device)
        pages, page, heads = sizes
        return torch.empty(pages, heads, page, dtype=self.dtype, device=device).transpose(1, 2)

    @property
    def window(self) -> int:
        """Window of the layers that read a cache or page table; 0 if they see all positions."""
        found = (re.fullmatch(r"(?:pages|P)_(\d+)", str(dim)) for dim in self.shape[:2])
        return next((int(match[1]) for match in found if match), 0)

    @property
    def in_place(self) -> bool:
        """True if ops write it in place, or read it where other programs write."""
        return self.per in ("position", "packed")

    @property
    def carried(self) -> bool:
        """True for a state per sequence that a step is given and returns."""
        return self.per == "sequence" and self.reset != "step"

    @property
    def element(self) -> tuple[int, ...]:
        """The static sizes of one sequence's state, of one position of a cache, or of one packed entry.

        Raises:
            InputError: a size that is not a number.
        """
        sizes = self.shape[2:] if self.per == "position" else self.shape[1:]
        numbers = tuple(size for size in sizes if isinstance(size, int))
        if len(numbers) != len(sizes) or (self.per == "position" and self.shape[1:2] != ("page",)):
            wanted = '("pages", "page", ...)' if self.per == "position" else f'("{self.shape[0]}", ...)'
            raise InputError(
                f"input {self.name!r} has the shape {self.shape}, which the runtime cannot allocate: expected {wanted} "
                f"with numbers in the place of the dots."
            )
        return numbers


PAGE_TABLE = InputSpec("page_table", torch.int32, ("b", "P"))
"""The page table of caches whose rows see all positions."""


def page_table(window: int) -> InputSpec:
    """Declaration of the page table of layers with a window; 0: of layers that see all positions."""
    return InputSpec(of_window(PAGE_TABLE.name, window), PAGE_TABLE.dtype, ("b", of_window("P", window)))


class Symbols:
    """Symbolic sizes, and the types of all calls over them; threads may share them. See `common_symbols`.

    Args:
        large: numbers of rows are about 2000 rather than about 30, for a compiler that lays its loops out by such a
            guess. All other sizes stay small: one that compares layouts does it on tensors of these sizes.
    """

    def __init__(self, large: bool = False) -> None:
        self.mode = fake_mode()
        self._large = large
        self._lock = threading.RLock()  # a fake mode is entered by one thread at a time
        # Types of calls by op and argument types; see `Evaluator`.
        self.results: dict[Any, Any] = {}
        # Faults of calls against the row rule, by the same key; see `dgraph.ir.row_rule`.
        self.rows: dict[Any, str | None] = {}
        self._sizes: dict[str, torch.SymInt] = {}
        self._texts: dict[Any, str] = {}
        self._keys: dict[int, tuple[Tensor, object]] = {}
        self._types: dict[tuple[Any, ...], object] = {}
        self._row_sets: dict[int, tuple[Tensor, str | None]] = {}
        self._names: dict[tuple[Any, int], frozenset[str]] = {}
        self._shared: dict[tuple[Any, ...], Tensor] = {}

    def size(self, name: str) -> torch.SymInt:
        """The symbol of that name, made on first use."""
        with self._lock:
            if name not in self._sizes:
                import sympy

                first = _LARGE_HINTS if self._large and (is_row_set(name) or name == "M") else _HINTS
                made = new_symbol(self.mode, name, int(sympy.prime(first + len(self._sizes))))
                self._sizes = {**self._sizes, name: made}  # others may be walking over the old one
            return self._sizes[name]

    def dim(self, dim: Dim) -> int | torch.SymInt:
        """The size that a declaration means."""
        if isinstance(dim, int):
            return dim
        name, _, offset = dim.partition("+")
        return self.size(name) + int(offset) if offset else self.size(name)

    def empty(self, shape: Iterable[Dim], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A fake tensor of the declared shape."""
        sizes = [self.dim(d) for d in shape]  # a new symbol must be made outside of the fake mode
        with self._lock, self.mode:
            return torch.empty(sizes, dtype=dtype, device=device)

    def run(self, target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The type of a call's result; of its arguments, tensors are fake values over these symbols."""
        with self._lock, typing(self.mode):
            return target(*args, **kwargs)

    def shared(self, shape: Iterable[Dim], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """As `empty`, one tensor for all values of a type: making one takes long, and a graph has hundreds."""
        sizes = tuple(shape)
        key = (sizes, dtype, str(device))
        if key not in self._shared:
            self._shared[key] = self.empty(sizes, dtype, device)
        return self._shared[key]

    def of(self, tensor: Tensor) -> Tensor:
        """A fake tensor with the static shape, dtype and device of a real one, shared by all of that type."""
        return self.shared(tensor.shape, tensor.dtype, tensor.device)

    def names_in(self, size: int | torch.SymInt) -> frozenset[str]:
        """Names of the symbols that a size depends on."""
        if isinstance(size, int):
            return frozenset()
        sizes, expression = self._sizes, size.node.expr
        key = expression, len(sizes)
        if key not in self._names:
            free = expression.free_symbols
            self._names[key] = frozenset(name for name, symbol in sizes.items() if symbol.node.expr in free)
        return self._names[key]

    def text(self, size: int | torch.SymInt) -> str:
        """A size as it reads in a dump: `256`, `N`, `b+1`."""
        if isinstance(size, int):
            return str(size)
        expression = size.node.expr
        if expression not in self._texts:
            import sympy

            names = {s.node.expr: sympy.Symbol(name) for name, s in self._sizes.items()}
            self._texts[expression] = str(expression.subs(names)).replace(" ", "").replace("1+b", "b+1")
        return self._texts[expression]

    def type_text(self, value: Any) -> str:
        """A value's type as it reads in a dump: `f32[N, 256]`, `(i64[K], i32[b+1])`, `()`."""
        if isinstance(value, Tensor):
            return f"{DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(self.text(s) for s in value.shape)}]"
        if isinstance(value, (tuple, list)):
            return f"({', '.join(self.type_text(v) for v in value)})"
        if isinstance(value, (int, torch.SymInt)):
            return self.text(value)
        return "()" if value is None else type(value).__name__

    def key(self, value: Any) -> Any:
        """A hashable stand-in for arguments: types of tensors (a real one has none), values of everything else."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, (list, tuple)):
            return (kind, *map(self.key, value))
        if isinstance(value, Tensor):
            # Fake tensors are shared by all graphs of a model, and their sizes take long to read. One object stands for
            # a type: keys are hashed for each call of each graph.
            known = self._keys.get(id(value))
            if known is None or known[0] is not value:
                sizes = (*value.shape, *value.stride())
                facts = (kind, value.dtype, value.device, value.dim(), *map(self.key, sizes))
                known = self._keys[id(value)] = value, self._types.setdefault(facts, object())
            return known[1]
        if isinstance(value, torch.SymInt):
            return value.node.expr
        if isinstance(value, dict):
            return tuple((k, self.key(v)) for k, v in value.items())
        return kind, value

    def row_set(self, value: Any) -> str | None:
        """The symbol of a value's leading dimension, if that is a set of rows (N, K, K1, ...)."""
        known = self._row_sets.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        if not isinstance(value, Tensor) or value.dim() == 0 or isinstance(value.shape[0], int):
            return None
        name = self.text(value.shape[0])
        found = name if is_row_set(name) else None
        self._row_sets[id(value)] = value, found
        return found


def is_row_set(name: str) -> bool:
    """True if a symbol names a row set."""
    return name == "N" or (name[:1] == "K" and name[1:].isdigit()) or name == "K"


def leads(names: Iterable[str]) -> bool:
    """True if a size of these symbols counts rows, sequences, keys, pages or entries of packed caches, which belong to
    several requests. The positions of a page, and the pages of a table, belong to one request.
    """
    return any(is_row_set(name) or without_window(name) in _SHARED for name in names)


_SHARED = {"b", "M", "pages", "entries", "sequences"}


@functools.cache
def common_symbols() -> Symbols:
    """The symbols of every graph of this process that is given no others, so that models alike are typed once.

    Hints do not depend on which graph came first.
    """
    symbols = Symbols()
    for name in ("b", "t", "N", "K", "M", "pages", "page", "P", "entries", "sequences"):
        symbols.size(name)
    return symbols


class Evaluator:
    """Computes the type of one node from the types of its arguments."""

    def __init__(self, symbols: Symbols):
        self.symbols = symbols

    def call(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any] | None = None) -> Any:
        """The fake value of a `call_function` node.

        values: of the nodes that it reads; None for what their meta says.

        Raises:
            VerifyError: the arguments do not fit the op; the message names the node, its layer and the argument types.
        """
        value_of = (lambda n: n.meta["val"]) if values is None else values.__getitem__
        args: Any = torch.fx.map_arg(args_of(node), value_of)
        kwargs: Any = torch.fx.map_arg(node.kwargs, value_of) if node.kwargs else {}
        if node.target is operator.getitem:
            try:
                return args[0][args[1]]
            except Exception as error:
                raise self._not_accepted(node, value_of, error) from None
        if rows := node.meta.get("rows"):  # a cut op makes a new row set; its fake would give an unbacked size
            device = args[0].device
            return (
                self.symbols.shared((rows,), torch.int64, device),
                self.symbols.shared((OFFSETS,), torch.int32, device),
            )
        # Layers are alike, so most calls have been typed before; a type is a function of op and argument types.
        key = (node.target, self.symbols.key(args), self.symbols.key(kwargs))
        known = self.symbols.results.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            known = self.symbols.results[key] = self._compute(node, args, kwargs, value_of)
        return known

    def _compute(self, node: torch.fx.Node, args: Any, kwargs: Any, value_of: Callable[[torch.fx.Node], Any]) -> Any:
        target: Any = node.target
        try:
            return self.symbols.run(target, args, kwargs)
        except Exception as error:
            raise self._not_accepted(node, value_of, error) from None

    def _not_accepted(
        self, node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any], error: Exception
    ) -> VerifyError:
        """Reason why a call has no type: its schema, its arguments, and the first line of torch's message."""

        def text(arg: Any) -> str:
            if isinstance(arg, (list, tuple)):
                return f"[{', '.join(map(text, arg))}]"
            if isinstance(arg, torch.fx.Node):
                return f"{arg.name}: {self.symbols.type_text(value_of(arg))}"
            return type(arg).__name__ if isinstance(arg, Tensor) else repr(arg)

        given = [*map(text, args_of(node)), *(f"{name}={text(value)}" for name, value in node.kwargs.items())]
        schema = getattr(node.target, "_schema", "getitem(values, number)")
        said = str(error).strip().partition("\n")[0].partition(" Declaration: ")[0].rstrip(".") or type(error).__name__
        line = f" at {source}" if (source := node.meta.get("source")) else ""
        return VerifyError(
            f"{where(node)}{line}: {op_name(node.target)} does not accept its arguments ({', '.join(given)}): {said}. "
            f"It takes {schema}."
        )
