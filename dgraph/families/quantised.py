"""Quantised weights: numbers of 8 or 4 bits, and a scale for each block of them.

    weight[r, c] = (values[r, c] - zeros[i, j]) * scales[i, j],   i = r // block rows, j = c // block columns

One declaration has every granularity: a scale per row (1, WHOLE), groups of 128 along a row (1, 128), blocks of
128 x 128, one scale of all (WHOLE, WHOLE). A last block may be cut off by the end of the weight. A stack of weights
[E, rows, columns] has scales [E, ...]: each is quantised by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType

import torch
from torch import Tensor

from dgraph.errors import InputError, UnknownName

WHOLE = -1
"""Number of rows or columns of a block that stands for all of them."""

PARTS = ("", "_scale", "_zero")
"""Suffixes of values, scales and zeros, after the name of the weight."""


@dataclass(frozen=True)
class Kind:
    """Numbers that a weight is stored as.

    Attributes:
        dtype: dtype of a stored element.
        bits: bits of a number; two numbers of 4 bits lie in an element.
        zero: the number that stands for 0 if no zeros are stored.
        limits: the least and the greatest number.
        reach: the number to which the largest absolute value of a block is scaled, if it has no zeros.
    """

    dtype: torch.dtype
    bits: int
    zero: int
    limits: tuple[float, float]
    reach: float


KINDS = {
    "fp8": Kind(torch.float8_e4m3fn, 8, 0, (-448.0, 448.0), 448.0),
    "int8": Kind(torch.int8, 8, 0, (-128.0, 127.0), 127.0),
    # 16 numbers over [-reach, reach]: none is further from the nearest one than half a step.
    "int4": Kind(torch.uint8, 4, 8, (0.0, 15.0), 7.5),
}


ROW_KINDS = tuple(name for name, kind in KINDS.items() if kind.bits == 8)
"""Kinds to which rows are rounded as well, if the weight that they meet is stored in the same kind."""


@dataclass(frozen=True)
class Format:
    """Format of quantised weights.

    Attributes:
        kind: "fp8" (e4m3), "int8" or "int4".
        block: rows and columns of a weight that share a scale, `WHOLE` for all; None for the kind's own, which is a
            scale per row, of "int4" one per 128 columns of a row.
        zeros: True if each block also stores the number that stands for 0 (asymmetric); of integers only.

    Raises:
        UnknownName: another kind.
        InputError: a block of no rows or columns, or zeros of "fp8".
    """

    kind: str
    block: tuple[int, int] | None = None
    zeros: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise UnknownName("format of weights", str(self.kind), KINDS)
        if not isinstance(self.block, (tuple, list, NoneType)):
            raise InputError(f"block must be two numbers, rows and columns that share a scale, got {self.block!r}.")
        if type(self.zeros) is not bool:
            raise InputError(f"zeros is true or false, got {self.zeros!r}.")
        block = ((1, 128) if self.kind == "int4" else (1, WHOLE)) if self.block is None else tuple(self.block)
        if len(block) != 2 or any(type(n) is not int or (n < 1 and n != WHOLE) for n in block):
            raise InputError(
                f"block must be rows and columns that share a scale, at least 1 each, or {WHOLE} for all, got "
                f"{self.block!r}."
            )
        if self.zeros and self.kind == "fp8":
            raise InputError("numbers of format 'fp8' have a zero of their own; zeros are of 'int8' and 'int4'.")
        object.__setattr__(self, "block", block)


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight as it is stored.

    Attributes:
        values: [..., rows, columns] of float8_e4m3fn or int8; or uint8 [..., rows, columns / 2] of two 4-bit numbers
            each, the one of an even column in the low half.
        scales: f32 [..., blocks of rows, blocks of columns].
        zeros: the number that stands for 0 in each block, as `scales` is; None: 0, or 8 of 4-bit numbers.
        block: rows and columns that share a scale, `WHOLE` for all.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: tuple[int, int]

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [..., rows, columns]."""
        return shape_of(self.values)

    def dim(self) -> int:
        """Number of dimensions."""
        return self.values.dim()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: int) -> QuantisedWeight:
        """One weight of a stack."""
        zeros = None if self.zeros is None else self.zeros[item]
        return QuantisedWeight(self.values[item], self.scales[item], zeros, self.block)

    @property
    def nbytes(self) -> int:
        """Bytes that are stored."""
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros) if part is not None)

    def rows(self, begin: int, end: int) -> QuantisedWeight:
        """Some rows, as views: whole blocks of them, unless they are the last ones."""
        high = self.block[0]
        of = slice(None) if high == WHOLE else slice(begin // high, -(-end // high))
        zeros = None if self.zeros is None else self.zeros[..., of, :]
        return QuantisedWeight(self.values[..., begin:end, :], self.scales[..., of, :], zeros, self.block)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight in a floating dtype."""
        return dequantised(self.values, self.scales, self.zeros, self.block, dtype)


def shape_of(values: Tensor) -> torch.Size:
    """The shape of the weight that is stored as these values."""
    if values.dtype != torch.uint8:
        return values.shape
    return torch.Size((*values.shape[:-1], 2 * values.shape[-1]))


def blocks_of(shape: tuple[int, ...] | torch.Size, block: tuple[int, int] | list[int]) -> tuple[int, ...]:
    """The shape of the scales of a weight [..., rows, columns]."""
    return (*shape[:-2], *(1 if n == WHOLE else -(-size // n) for size, n in zip(shape[-2:], block, strict=True)))


def sizes_of(shape: tuple[int, ...] | torch.Size, format: Format) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what is stored of a weight [..., rows, columns]: values, scales, and zeros if it has some."""
    kind = KINDS[format.kind]
    assert format.block is not None  # filled in by the format
    scales = blocks_of(shape, format.block), torch.float32
    values = (*shape[:-1], shape[-1] * kind.bits // 8), kind.dtype
    return [values, scales, scales] if format.zeros else [values, scales]


@dataclass(frozen=True)
class QuantisedRows:
    """Rows as a product of 8-bit numbers takes them: each has a scale of its own, found where the row is computed.

    Attributes:
        values: [..., columns] of float8_e4m3fn or int8.
        scales: f32 [..., 1].
        dtype: dtype of the values that they stand for, and of results computed from these.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the rows, [..., columns]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.values.device

    def dim(self) -> int:
        """Number of dimensions."""
        return self.values.dim()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, item: slice | Tensor) -> QuantisedRows:
        """Some of the rows."""
        return self.each(lambda part: part[item])

    def each(self, change: Callable[[Tensor], Tensor]) -> QuantisedRows:
        """The rows that a function makes of these, which it takes as values and as scales, and only moves."""
        return QuantisedRows(change(self.values), change(self.scales), self.dtype)

    def flat(self) -> QuantisedRows:
        """The same as [rows, columns]."""
        return self.each(lambda part: part.flatten(0, -2))

    def element_size(self) -> int:
        """Bytes of an element in the dtype that the rows stand for."""
        return self.dtype.itemsize

    def dequantised(self) -> Tensor:
        """The rows that the numbers stand for, in their dtype: values times scales."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return (self.values.to(wide) * self.scales.to(wide)).to(self.dtype)


def quantised_rows(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Rows [..., columns] rounded to the nearest 8-bit numbers, the largest absolute value of each to the kind's reach.

    A row whose scale would lie below the least normal number (1.2e-38 of fp32), as one of zeros, has the scale 1; one
    that is not finite has the scale NaN, and zeros.

    Args:
        x: floating.
        kind: of `KINDS`, of 8 bits.

    Returns:
        Values [..., columns] of the kind's dtype and scales [..., 1] in fp32 (float64 of float64).

    Raises:
        UnknownName: another kind.
    """
    if kind not in ROW_KINDS:
        raise UnknownName("format of rows", kind, ROW_KINDS)
    of, wide = KINDS[kind], x.to(torch.promote_types(x.dtype, torch.float32))
    most = _most(wide) if x.shape[-1] else wide.new_zeros((*x.shape[:-1], 1))
    scales = most / of.reach
    scales = torch.where(scales < torch.finfo(wide.dtype).tiny, 1.0, torch.where(most.isfinite(), scales, torch.nan))
    # At most the reach and a few times 2**-24 of it, which is nearer to the reach than to the next number.
    numbers = torch.where(scales.isnan(), 0.0, wide * scales.reciprocal())
    if not of.dtype.is_floating_point:
        numbers = numbers.round()
    return numbers.to(of.dtype), scales


def _most(wide: Tensor) -> Tensor:
    """The largest absolute value of each row [..., 1]; NaN if there is one.

    Bits of what is not negative are in the order of the values, and those of NaN above all: a maximum of integers is
    one instruction of a GPU, where one of numbers that may be none takes four.
    """
    bits = wide.abs().view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    return bits.amax(-1, keepdim=True).view(wide.dtype)


@torch.no_grad()
def quantise(weight: Tensor, format: Format, name: str = "a weight") -> QuantisedWeight:
    """A weight, rounded to the nearest numbers of a format.

    It takes the memory of the result and, for a while, a few copies in fp32 of some of its rows.

    Args:
        weight: [rows, columns] or [E, rows, columns], floating; of 4-bit numbers with an even number of columns.
        format: to which.
        name: of the weight, for a message.

    Raises:
        InputError: another shape or dtype, or a weight that is not finite.
    """
    kind = KINDS[format.kind]
    if weight.dim() not in (2, 3) or not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise InputError(
            f"a weight to quantise must be floating [rows, columns] or [E, rows, columns], got {weight.dtype} "
            f"{list(weight.shape)}."
        )
    if kind.bits == 4 and weight.shape[-1] % 2:
        raise InputError(f"a weight of 4-bit numbers must have an even number of columns, got {list(weight.shape)}.")
    assert format.block is not None  # filled in by the format
    rows, columns = weight.shape[-2:]
    sizes = blocks_of(weight.shape, format.block)
    values = weight.new_empty((*weight.shape[:-1], columns * kind.bits // 8), dtype=kind.dtype)
    scales = weight.new_empty(sizes, dtype=torch.float32)
    zeros = torch.empty_like(scales) if format.zeros else None
    high = rows if format.block[0] == WHOLE else format.block[0]
    some = max(1, _AT_A_TIME // max(1, high * columns))  # blocks of rows
    for item in [()] if weight.dim() == 2 else [(i,) for i in range(len(weight))]:
        for begin in range(0, sizes[-2], some):
            blocks, at = slice(begin, begin + some), slice(begin * high, (begin + some) * high)
            some_rows = weight[item][at].float()
            scale, zero = scales_of(some_rows, format.block, kind, format.zeros)
            scales[item][blocks] = scale
            if zeros is not None and zero is not None:
                zeros[item][blocks] = zero
            values[item][at] = stored_numbers(numbers_of(some_rows, scale, zero, format.block, kind), kind)
    if weight.device.type != "meta" and not bool(scales.isfinite().all()):
        raise InputError(
            f"{name} {list(weight.shape)} has values that are not finite, or whose range is not in fp32, so it has no "
            f"scales; mend it, or leave it as it is (but=)."
        )
    return QuantisedWeight(values, scales, zeros, format.block)


_AT_A_TIME = 2**22
"""Elements of a weight that are looked at at a time."""


def scales_of(rows: Tensor, block: tuple[int, int], kind: Kind, zeros: bool) -> tuple[Tensor, Tensor | None]:
    """Scales of the blocks of f32 rows of a weight by which their numbers reach what they can, and zeros if wanted."""
    least, most = kind.limits
    low, high = _extremes(rows, block)
    if not zeros:
        return _positive(torch.maximum(-low, high) / kind.reach), None
    scale = _positive((high - low) / (most - least))
    return scale, (least - low / scale).round_().clamp_(least, most)


def numbers_of(rows: Tensor, scale: Tensor, zero: Tensor | None, block: tuple[int, int], kind: Kind) -> Tensor:
    """f32 rows of a weight as the nearest numbers of a kind, by scales and zeros of their blocks; in fp32, which those
    of float8 are still to be converted from.
    """
    numbers = rows / spread(scale, block, rows.shape)
    if not kind.dtype.is_floating_point:
        numbers = numbers.round_().add_(kind.zero if zero is None else spread(zero, block, rows.shape))
    return numbers.clamp_(*kind.limits)


def _extremes(rows: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each block, 0 among them."""
    high, wide = (size if n == WHOLE else n for n, size in zip(block, rows.shape, strict=True))
    up, right = -rows.shape[0] % high, -rows.shape[1] % wide
    padded = torch.nn.functional.pad(rows, (0, right, 0, up)) if up or right else rows
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    low, most = blocks.amin((1, 3)), blocks.amax((1, 3))
    return low.clamp_(max=0), most.clamp_(min=0)


def _positive(scale: Tensor) -> Tensor:
    """Replace the scale of blocks of zeros, which is arbitrary, by 1."""
    return scale.masked_fill(scale == 0, 1.0)


def stored_numbers(numbers: Tensor, kind: Kind) -> Tensor:
    """f32 numbers [..., columns] as they are stored."""
    return packed(numbers) if kind.bits == 4 else numbers.to(kind.dtype)


def packed(numbers: Tensor) -> Tensor:
    """Numbers 0..15 [..., n] as uint8 [..., n / 2]; the first of two in the low half."""
    pairs = numbers.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpacked(values: Tensor) -> Tensor:
    """uint8 [..., n] of two 4-bit numbers each as [..., 2 n]."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def spread(scales: Tensor, block: tuple[int, int] | list[int], shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Scales of blocks as they broadcast over a weight [..., rows, columns]."""
    for dim in (-2, -1):
        n, size = block[dim], shape[dim]
        if scales.shape[dim] > 1 and n > 1:  # else it broadcasts
            scales = scales.repeat_interleave(n, dim).narrow(dim, 0, size)
    return scales


def dequantised(
    values: Tensor, scales: Tensor, zeros: Tensor | None, block: tuple[int, int] | list[int], dtype: torch.dtype
) -> Tensor:
    """The weight that is stored as values, scales and zeros, see `QuantisedWeight`; computed in fp32 (in float64 of
    scales in float64).

    Raises:
        InputError: sizes that do not fit each other.
    """
    expected = blocks_of(shape_of(values), block)
    for name, part in (("scales", scales), ("zeros", zeros)):
        if part is not None and tuple(part.shape) != expected:
            raise InputError(
                f"a quantised weight {list(shape_of(values))} in blocks of {list(block)} has {name} {list(expected)}, "
                f"got {list(part.shape)}."
            )
    wide = torch.promote_types(scales.dtype, torch.float32)
    numbers = (unpacked(values) if values.dtype == torch.uint8 else values).to(wide)
    if zeros is not None:
        numbers = numbers - spread(zeros, block, numbers.shape)
    elif values.dtype == torch.uint8:
        numbers = numbers - KINDS["int4"].zero
    return (numbers * spread(scales, block, numbers.shape)).to(dtype)
