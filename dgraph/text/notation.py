"""Notation of the names, arguments and types of a listing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dgraph.text.listing import Line, Ref
from dgraph.types.shapes import DTYPES, InputSpec

_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.)|(?<=_)\d+$")


def show(value: Any, layer: int | None = None) -> str:
    """An argument as it reads in a call of `layer`: `%3`, `layers[0].%3`, `[8, 128]`, `1e-06`, `f32`."""
    if isinstance(value, Ref):
        foreign = value.kind == "value" and value.layer not in (None, layer)
        return f"layers[{value.layer}].{value.name}" if foreign else value.name
    if isinstance(value, tuple):
        return f"[{', '.join(show(v, layer) for v in value)}]"
    return number(value) if isinstance(value, float) else repr(value)


def number(value: float) -> str:
    """A float, rounded for reading to six significant digits where it has more than fit."""
    return repr(value) if len(repr(value)) <= 9 or not math.isfinite(value) else f"{value:.6g}"


def plain(value: Any, layer: int | None = None) -> Any:
    """An argument as JSON: names as strings, literals exactly, infinities as "inf" and "-inf"."""
    if isinstance(value, Ref):
        return show(value, layer)
    if isinstance(value, tuple):
        return [plain(v, layer) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def call_text(line: Line, layer: int | None) -> str:
    """A call without its results: `linear(%0, q_proj.weight)`."""
    args = [show(a, layer) for a in line.args] + [f"{k}={show(v, layer)}" for k, v in line.kwargs]
    return f"{line.op}({', '.join(args)})"


def line_text(line: Line, layer: int | None) -> str:
    """A call with its results: `%1, _ = split(%0, 2)`."""
    results = ", ".join(r or "_" for r in line.results)
    return f"{results} = {call_text(line, layer)}" if results else call_text(line, layer)


def type_text(line: Line) -> str:
    """The type of a call."""
    return line.types[0] if len(line.types) == 1 else f"({', '.join(line.types)})" if line.types else ""


def layers_text(layers: tuple[int, int]) -> str:
    """`layers[2..35] x34` or `layers[1]`."""
    first, last = layers
    return f"layers[{first}]" if first == last else f"layers[{first}..{last}] x{last - first + 1}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Integers as ranges: `0..3, 7`."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in out)


def fold_names(types: Mapping[str, str]) -> list[str]:
    """Names with their types; those that differ in a layer's number alone as one: `k_cache_0..35 f32[...]`."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for name, kind in types.items():
        found = _INDEX.search(name)
        before, after = (name[: found.start()], name[found.end() :]) if found else (name, "")
        kinds.setdefault((before, after, kind), []).extend([int(found.group())] if found else [])
    return [f"{before}{ranges_text(layers)}{after} {kind}" for (before, after, kind), layers in kinds.items()]


def input_type(spec: InputSpec) -> str:
    """An input's declared type: `i32[b+1]`."""
    return f"{DTYPES.get(spec.dtype, str(spec.dtype))}[{', '.join(map(str, spec.shape))}]"
