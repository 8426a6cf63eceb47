"""Tilings of kernels that were chosen by timing them, and the way in which a kernel gets them.

A kernel derives a tiling (sizes of its launches) from the shapes of its arguments; that is its default. If a choice
was made for a shape, the kernel takes that instead:

    tiling = chosen("paged_attention", shape_of(q, ...)) or tiling_for(...)

Choices are in use while a program runs, in the thread that runs it (`Choices.in_use`). They belong to that program and
not to the process, so tuning one model does not change the numbers of another.

A tiling never changes what a kernel computes, only the order of its sums: another number of shares rounds attention, a
product or a softmax in another way, in the last bits. Under one tiling, equal calls give equal bits. Ops that select
rows are not tuned, and the token of lm_head is the same under every tiling. Some values are compared with a threshold:
a confidence, the cosine of partial_attention. They can fall on its other side only if they equal it to within rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch


@dataclass(frozen=True)
class AttentionShape:
    """A call of paged_attention or partial_attention.

    Attributes:
        rows, sequences: N and b; a step's rows are those of its bucket.
        heads, kv_heads, head_dim: sizes of the queries and the caches.
        page: positions per page.
        keys: number that a page table addresses per sequence, rounded up to a power of two.
        dtype, stored: dtype of the queries, and of keys and values, as torch names them.
    """

    rows: int
    sequences: int
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    keys: int
    dtype: str
    stored: str


@dataclass(frozen=True)
class LinearShape:
    """A call of rows_linear: rows that there is room for (the number of live ones is on the device), sizes, dtype."""

    rows: int
    d_in: int
    d_out: int
    dtype: str


@dataclass(frozen=True)
class LogitsShape:
    """One chunk of lm_head: its rows, logits of each row, and dtype of the logits."""

    rows: int
    vocab: int
    dtype: str


Shape = AttentionShape | LinearShape | LogitsShape


@dataclass(frozen=True)
class Tunable:
    """Description of a kernel for tuning; `Op.tuning` names its place.

    Attributes:
        shape, tiling: types of its shapes and tilings, frozen dataclasses of plain values.
        shapes: shapes of the launches that a call with the op's arguments makes, from sizes and dtypes alone.
        candidates: tilings for a shape and a number of multiprocessors, the default first.
        trial: calls on random values of a shape; see `dgraph.ops.triton.trials`.
    """

    shape: type
    tiling: type
    shapes: Callable[..., Sequence[Any]]
    candidates: Callable[[Any, int], list[Any]]
    trial: Callable[[Any, torch.device], Any]


@dataclass(frozen=True)
class Choice:
    """Result of timing for one shape.

    Attributes:
        shape: shape of the call.
        tiling: the tiling to take, a frozen dataclass of the kernel's.
        seconds: time of a call under it; None if no tiling could be timed, and the tiling is the default.
        default_seconds: time of a call under the default; None if that could not be timed.
        tried: number of tilings that were timed.
        failed: tilings that could not be timed, as text, and why.
    """

    shape: Any
    tiling: Any
    seconds: float | None
    default_seconds: float | None
    tried: int
    failed: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], shape: type, tiling: type) -> Choice:
        """The choice that `to_json` described, over the given kinds of shape and tiling.

        Raises:
            ValueError: a field is missing, unknown or of another type.
        """
        kinds = get_type_hints(cls) | {"shape": shape, "tiling": tiling}
        return cls(**_fields(data, kinds, [f.name for f in fields(cls)]))


class Choices:
    """Tilings by op and shape."""

    def __init__(self) -> None:
        self._tilings: dict[tuple[str, Any], Any] = {}

    def __len__(self) -> int:
        return len(self._tilings)

    def add(self, op: str, choice: Choice) -> None:
        """Add a choice, in place of an earlier one for its shape."""
        self._tilings[op, choice.shape] = choice.tiling

    def clear(self) -> None:
        """Drop all tilings."""
        self._tilings.clear()

    def tiling(self, op: str, shape: Shape) -> Any | None:
        """Tiling that was chosen for a shape, or None."""
        return self._tilings.get((op, shape))

    def in_use(self) -> AbstractContextManager[None]:
        """Let kernels that this thread launches inside of the block take these tilings."""
        return _InUse(self)


class _InUse:
    """Choices while they are in use.

    It is no generator, because every step enters one while the device waits, and a generator takes the host 10 us.
    """

    def __init__(self, choices: Choices):
        self._choices = choices

    def __enter__(self) -> None:
        self._token = _IN_USE.set(self._choices)

    def __exit__(self, *error: object) -> None:
        _IN_USE.reset(self._token)


_IN_USE: ContextVar[Choices | None] = ContextVar("choices in use", default=None)


def chosen(op: str, shape: Shape) -> Any | None:
    """Tiling that the choices in use have for a call; None for the default."""
    choices = _IN_USE.get()
    return None if choices is None else choices.tiling(op, shape)


def attention_shape(q: Any, cache: Any, table: Any) -> AttentionShape:
    """Shape of an attention, from sizes and dtypes.

    Args:
        q: [N, Hq, D].
        cache: [pages, page, Hkv, D].
        table: [b, P], its table of pages.
    """
    (rows, heads, d), (_, page, kv_heads, _), (b, pages) = q.shape, cache.shape, table.shape
    keys = 1 << max(0, pages * page - 1).bit_length()
    return AttentionShape(rows, b, heads, kv_heads, d, page, keys, dtype_name(q.dtype), dtype_name(cache.dtype))


def dtype_name(dtype: object) -> str:
    """Name of a dtype as torch gives it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def text_of(value: Any) -> str:
    """Write a shape or tiling, as dataclass or plain values, on one line: `rows=64 vocab=100 dtype=float32`."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_inner(part)}" for name, part in value.items())
    return str(value)


def _inner(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({text_of(value)})"
    return f"[{', '.join(map(_inner, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _value(kind: Any, data: Any) -> Any:
    """Convert plain data to a value of a type: numbers, texts, tuples, optional ones, dataclasses of these."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**_fields(data, get_type_hints(kind), [f.name for f in fields(kind)]))
    if isinstance(kind, UnionType):
        inner = [part for part in get_args(kind) if part is not NoneType]
        return None if data is None else _value(inner[0], data)
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise ValueError(f"expected a list, got {data!r}")
        kinds = get_args(kind)
        each = [kinds[0]] * len(data) if kinds[1:] == (...,) else kinds
        return tuple(_value(part, item) for part, item in zip(each, data, strict=True))
    if type(data) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {data!r}")
    return data


def _fields(data: Any, kinds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) != set(names):
        raise ValueError(f"expected the fields {', '.join(names)}, got {data!r}")
    return {name: _value(kinds[name], data[name]) for name in names}
