"""Kinds of ops: from a call to the correspondence of its dimensions, one function for each kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch.fx import Node

from dgraph.ir.axes import Axes, Call, Dims, Passage, product, same
from dgraph.types.nodes import op_name


def _of(call: Call, dims: Callable[[str, Node], Sequence[int | None]], repeated: Iterable[int] = ()) -> Axes:
    passages = (Passage(name, node, tuple(dims(name, node))) for name, node in call.tensors)
    return Axes(tuple(passages), frozenset(repeated))


def _all(call: Call, node: Node) -> Dims:
    return tuple(range(call.rank(node)))


def _none(call: Call, node: Node) -> Dims:
    return (None,) * call.rank(node)


def _aligned(rank: int, out: int) -> tuple[int, ...]:
    """Right-aligned broadcasting."""
    return tuple(i + out - rank for i in range(rank))


# -- kinds -------------------------------------------------------------------------------------------------------


def pointwise(call: Call) -> Axes:
    """Entry by entry, with right-aligned broadcasting."""
    return _of(call, lambda name, node: _aligned(call.rank(node), len(call.out)))


def identity(call: Call) -> Axes:
    """As the first argument is; others (an example of a dtype) are read for their type alone."""
    name, node = call.tensors[0]
    return Axes((Passage(name, node, _all(call, node)),))


def filled(call: Call) -> Axes:
    """One value everywhere; arguments are read for their type alone."""
    return Axes((), frozenset(range(len(call.out))))


def filled_like(call: Call) -> Axes:
    """One value everywhere, in the shape of the argument."""
    return Axes(identity(call).passages, frozenset(range(len(call.out))))


def parts(call: Call) -> Axes:
    """One of several results, or a tensor by one number along its first dimension."""
    source = call.values["self"]
    if isinstance(call.type(source), (tuple, list)):
        return Axes((Passage("self", source, tuple(range(len(call.out)))),))
    return Axes((Passage("self", source, _none(call, source)),))


def along(name: str = "dim") -> Callable[[Call], Axes]:
    """Same shape; works along the dimensions that an argument numbers, all of them for None."""

    def rule(call: Call) -> Axes:
        rank = len(call.out)
        worked = call.dims(name, rank)

        def dims(_: str, node: Node) -> list[int | None]:
            flattened = call.rank(node) != rank
            return [None if flattened or i in worked else i for i in range(call.rank(node))]

        return _of(call, dims)

    return rule


def reduced(call: Call) -> Axes:
    """Dimensions are reduced, and dropped unless `keepdim`; `max` and `min` of two tensors are pointwise."""
    if call.nodes("other"):
        return pointwise(call)
    (_, source), *_ = call.tensors
    rank = call.rank(source)
    worked = call.dims("dim", rank) if call.has("dim") else frozenset(range(rank))
    kept = [i for i in range(rank) if call.get("keepdim") or i not in worked]
    return _of(call, lambda _, node: [None if i in worked else kept.index(i) for i in range(rank)])


def likened(call: Call) -> Axes:
    """Two values that broadcast are compared along `dim`, which is dropped."""
    rank = len(call.out) + 1
    worked = call.dim("dim", rank, 1)

    def dims(_: str, node: Node) -> list[int | None]:
        places = _aligned(call.rank(node), rank)
        return [None if at == worked else at - (at > worked) for at in places]

    return _of(call, dims)


def normed(call: Call) -> Axes:
    """Works along the last dimensions, whose sizes it is given."""
    shape = call.get("normalized_shape")

    def dims(name: str, node: Node) -> list[int | None]:
        first = call.rank(node) - len(shape) if name == "input" else 0
        return [i if i < first else None for i in range(call.rank(node))]

    return _of(call, dims)


def by_group(call: Call) -> Axes:
    """Works along all dimensions but the first of `input`."""
    return _of(call, lambda name, node: [0 if name == "input" and i == 0 else None for i in range(call.rank(node))])


def convolved(call: Call) -> Axes:
    """A convolution: entries of a batch are independent; it works along every other dimension."""
    batched = call.rank(call.values["input"]) == call.rank(call.values["weight"])

    def dims(name: str, node: Node) -> list[int | None]:
        return [0 if batched and name == "input" and i == 0 else None for i in range(call.rank(node))]

    return _of(call, dims)


def linear(call: Call) -> Axes:
    """input [..., in] @ weight [out, in].T + bias [out]."""
    last = len(call.out) - 1
    return _of(
        call,
        lambda name, node: {"input": [*range(call.rank(node) - 1), None], "weight": [last, None]}.get(name, [last]),
    )


def multiplied(call: Call) -> Axes:
    """Matrix products, by the ranks of the two factors; the addend is broadcast."""
    left, right = next(pair for pair in _FACTORS if all(map(call.nodes, pair)))
    n, m = (call.rank(call.values[name]) for name in (left, right))
    rank = len(call.out)
    batch = rank - (n > 1) - (m > 1)

    def dims(name: str, node: Node) -> Sequence[int | None]:
        size = call.rank(node)
        if name not in (left, right):
            return _aligned(size, rank)
        last: Dims = (None,) if size == 1 else (batch, None) if name == left else (None, rank - 1)
        return (*_aligned(size - len(last), batch), *last)

    return _of(call, dims)


_FACTORS = (
    ("mat1", "mat2"),
    ("batch1", "batch2"),
    ("mat", "vec"),
    ("self", "mat2"),
    ("self", "other"),
    ("self", "vec"),
    ("self", "tensor"),
)
"""Names of the two factors of a matrix product; an op has the first pair that it has arguments of."""


def outer(call: Call) -> Axes:
    """self [n], vec2 [m] -> [n, m]."""
    return _of(call, lambda name, _: (0,) if name == "self" else (1,))


def letters_of(call: Call) -> tuple[list[str], str]:
    """The letters of an einsum's terms and of its result, one for each dimension; dots stand for letters that are free.

    Without an arrow, which leaves the order of the result to torch, the result has none.
    """
    given, _, result = str(call.get("equation")).replace(" ", "").partition("->")
    terms = given.split(",")
    ranks = (call.rank(node) for _, node in call.tensors)
    dots = [rank - len(term.replace("...", "")) for rank, term in zip(ranks, terms, strict=True)]
    wide = max((n for n, term in zip(dots, terms, strict=True) if "..." in term), default=0)
    free = "".join(letter for letter in ascii_letters if letter not in given)[:wide]
    # Right-aligned, as in broadcasting.
    written = [term.replace("...", free[wide - n :]) for n, term in zip(dots, terms, strict=True)]
    return written, result.replace("...", free)


def summed_by_letters(call: Call) -> Axes:
    """An einsum: a letter that the result has passes there; one that it lacks, or that a term has twice, does not."""
    given, result = letters_of(call)
    terms = iter(given)

    def dims(_: str, node: Node) -> list[int | None]:
        mine = next(terms)
        return [result.find(x) if x in result and mine.count(x) == 1 else None for x in mine]

    return _of(call, dims)


def attended(call: Call) -> Axes:
    """Attention of torch: batch dimensions are apart, and so are queries unless it is causal, which counts them."""
    if call.draws:
        return _of(call, lambda _, node: _none(call, node))
    rank = len(call.out)
    tokens = None if call.get("is_causal") else rank - 2
    ends: dict[str, Dims] = {"query": (tokens, None), "value": (None, rank - 1), "attn_mask": (tokens, None)}

    def dims(name: str, node: Node) -> Dims:
        n = call.rank(node)
        batch: list[int | None] = [*_aligned(n - 2, rank - 2)]
        if call.get("enable_gqa") and name in ("key", "value"):
            batch[-1] = None
        return (*batch, *ends.get(name, (None, None)))

    return _of(call, dims)


def looked_up(call: Call) -> Axes:
    """weight [entries, d] by indices [...] -> [..., d]."""
    last = len(call.out) - 1
    return _of(call, lambda name, node: (None, last) if name == "weight" else _all(call, node))


def rearranged(call: Call) -> Axes:
    """A reshape: a dimension passes if it keeps its size and what lies behind it, and is neither merged nor split."""
    out, taken = call.out, set[int]()
    (_, source), *_ = call.tensors
    shape = call.shape(source)

    def image(i: int) -> int | None:
        for j in range(len(out)):
            if j not in taken and same(shape[i], out[j]) and product(shape[i + 1 :]) == product(out[j + 1 :]):
                taken.add(j)
                return j
        return None

    return Axes((Passage("self", source, tuple(image(i) for i in range(len(shape)))),))


def order_of(call: Call) -> list[int]:
    """By dimension of a transpose's or permute's result, the dimension that it was."""
    (_, source), *_ = call.tensors
    rank = call.rank(source)
    if call.has("dims"):
        return [int(d) % rank for d in call.get("dims")]
    order = list(range(rank))
    if op_name(call.node.target) == "numpy_T":  # which reverses all dimensions
        return order[::-1]
    if call.has("source"):
        to, from_ = (_listed(call.get(name), rank) for name in ("destination", "source"))
        moved = dict(zip(to, from_, strict=True))
        rest = iter(d for d in order if d not in moved.values())
        return [moved[i] if i in moved else next(rest) for i in order]
    names = next((pair for pair in (("dim0", "dim1"), ("axis0", "axis1")) if call.has(pair[0])), None)
    first, second = (call.dim(name, rank) for name in names) if names else (rank - 2, rank - 1)
    if rank > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _listed(value: Any, rank: int) -> list[int]:
    return [int(d) % rank for d in (value if isinstance(value, (list, tuple)) else [value])]


def behind(call: Call) -> Axes:
    """Numbers of two entries each as complex numbers, or back: only a last dimension of parts is worked along."""
    return _of(call, lambda _, node: [i if i < len(call.out) else None for i in range(call.rank(node))])


def permuted(call: Call) -> Axes:
    """Dimensions in another order."""
    order = order_of(call)
    return _of(call, lambda _, node: [order.index(i) for i in range(call.rank(node))])


def expanded(call: Call) -> Axes:
    """Right-aligned; dimensions of one entry, and new ones, are repeated."""
    name, source = call.tensors[0]
    dims, shape = _aligned(call.rank(source), len(call.out)), call.shape(source)
    kept = {j for j, size in zip(dims, shape, strict=True) if same(size, call.out[j])}
    return Axes((Passage(name, source, dims),), frozenset(range(len(call.out))) - kept)


def tiled(call: Call) -> Axes:
    """Right-aligned; a dimension that is repeated, and has more than one entry, is no longer the same."""
    (name, source), *_ = call.tensors
    dims, shape = _aligned(call.rank(source), len(call.out)), call.shape(source)
    kept = {j for j, size in zip(dims, shape, strict=True) if same(size, call.out[j])}
    ones = {j for j, size in zip(dims, shape, strict=True) if same(size, 1)} | (set(range(len(call.out))) - {*dims})
    return Axes((Passage(name, source, tuple(j if j in kept | ones else None for j in dims)),), frozenset(ones))


def joined(call: Call) -> Axes:
    """Tensors one after the other along a dimension."""
    return along()(call)


def stacked(call: Call) -> Axes:
    """Tensors side by side along a new dimension."""
    at = call.dim("dim", len(call.out))
    return _of(call, lambda _, node: [i + (i >= at) for i in range(call.rank(node))])


def split(call: Call) -> Axes:
    """Parts of one dimension."""
    return along()(call)


def sliced(call: Call) -> Axes:
    """A part of one dimension; the whole of it passes."""
    (_, source), *_ = call.tensors
    shape, at = call.shape(source), call.dim("dim", call.rank(source))
    whole = same(shape[at], call.out[at])
    return _of(call, lambda _, node: [i if whole or i != at else None for i in range(len(shape))])


def selected(call: Call) -> Axes:
    """One entry, or each, of a dimension that the results lack."""
    at = call.dim("dim", call.rank(call.tensors[0][1]))
    return _of(call, lambda _, node: [None if i == at else i - (i > at) for i in range(call.rank(node))])


def windowed(call: Call) -> Axes:
    """Windows of one dimension; their entries are a new last dimension."""
    at = call.dim("dimension", len(call.out) - 1)
    return _of(call, lambda _, node: [None if i == at else i for i in range(call.rank(node))])


def padded(call: Call) -> Axes:
    """Entries before and after some dimensions, told from the last one on in pairs."""
    pad, rank = list(call.get("pad")), len(call.out)
    worked = {rank - 1 - i // 2 for i, more in enumerate(pad) if not (isinstance(more, int) and more == 0)}
    return _of(call, lambda _, node: [None if i in worked else i for i in range(rank)])


def triangular(call: Call) -> Axes:
    """Works along the last two dimensions."""
    return _of(call, lambda _, node: [i if i < call.rank(node) - 2 else None for i in range(call.rank(node))])


def picked(call: Call) -> Axes:
    """self by a list of numbers along `dim`."""
    at = call.dim("dim", len(call.out))
    return _of(
        call,
        lambda name, node: [at] * call.rank(node) if name == "index" else [
            None if i == at else i for i in range(call.rank(node))
        ],
    )  # fmt: skip


def gathered(call: Call) -> Axes:
    """self by numbers along `dim`, elsewhere entry by entry: where a size differs, it is worked along."""
    at, out = call.dim("dim", len(call.out)), call.out

    def dims(name: str, node: Node) -> list[int | None]:
        shape = call.shape(node)
        elsewhere = [i if same(size, out[i]) else None for i, size in enumerate(shape)]
        return elsewhere if name == "index" else [None if i == at else d for i, d in enumerate(elsewhere)]

    return _of(call, dims)


def scattered(call: Call) -> Axes:
    """Values to places along `dim`, elsewhere entry by entry: where a size differs, it is worked along.

    So is `self` there, and along `dim`: which of its entries are written depends on where they stand.
    """
    at, out, shape = call.dim("dim", len(call.out)), call.out, call.shape(call.values["index"])
    return _of(
        call,
        lambda _, node: [
            i if i != at and same(shape[i], out[i]) and same(size, out[i]) else None
            for i, size in enumerate(call.shape(node))
        ],
    )


def indexed(call: Call) -> Axes:
    """self[indices]: neighbouring lists of numbers take the place of the dimensions that they look up in."""
    indices, source = list(call.get("indices")), call.values["self"]
    used = [i for i, index in enumerate(indices) if isinstance(index, Node)]
    nodes = [indices[i] for i in used]
    flags = any(call.shape(n) and call.type(n).dtype in (torch.bool, torch.uint8) for n in nodes)
    if flags or not used:
        return _of(call, lambda _, node: _none(call, node))
    wide, rank = max(call.rank(n) for n in nodes), call.rank(source)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    rest = [i for i in range(rank) if i not in used]
    places = [j for j in range(len(call.out)) if not first <= j < first + wide]

    def dims(name: str, node: Node) -> Sequence[int | None]:
        if name == "self":
            return [places[rest.index(i)] if i in rest else None for i in range(rank)]
        return tuple(first + d for d in _aligned(call.rank(node), wide))

    return _of(call, dims)


def compared(first: str) -> Callable[[Call], Axes]:
    """Each entry of one argument with all entries of the others."""
    return lambda call: _of(call, lambda name, node: _all(call, node) if name == first else _none(call, node))


def chosen(call: Call) -> Axes:
    """One of two tensors entry by entry; flags alone give the numbers of those that are set."""
    return pointwise(call) if call.has("self") else _of(call, lambda _, node: _none(call, node))


def dropped(call: Call) -> Axes:
    """Dropout: nothing where it is no training, else draws that depend on the place in the batch."""
    return _of(call, lambda _, node: _none(call, node)) if call.draws else identity(call)


def unread(call: Call) -> Axes:
    """Reads sizes alone, and gives one."""
    return Axes(())
