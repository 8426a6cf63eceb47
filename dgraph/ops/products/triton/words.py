"""Conversion of quantised numbers in words of 32 bits to bf16 by few instructions, and products by them.

A word has four numbers of 8 bits, or eight of 4. Instructions take two values of 16 bits at a time, in the halves of a
register. So a number is paired with the one half a word after it, and a shift of the word brings up the next pair. The
i-th pairs of all words are a factor of their own, which meets the columns of x at the same places.

Triton's own conversions, element by element, take 5 to 7 instructions of each number; these 2 to 3.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8, INT8, INT4 = 1, 2, 3
"""Kinds of numbers that words hold; 0 stands for an unknown kind."""
_KINDS = {torch.float8_e4m3fn: FP8, torch.int8: INT8, torch.uint8: INT4}


def kind_of(values: Tensor, dtype: torch.dtype) -> int:
    """Kind of numbers in words of stored values, if these can be read as words and are multiplied in bf16; else 0."""
    whole = not (values.shape[-1] | values.data_ptr()) % 4 and not any(n % 4 for n in values.stride()[:-1])
    return _KINDS[values.dtype] if whole and dtype == torch.bfloat16 and values.device.type == "cuda" else 0


@triton.jit
def multiply_words(
    word, x, acc, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Add to acc f32 [COLUMNS, ROWS] the product of the numbers in words [COLUMNS, ...] by x bf16 [ROWS, DEPTH]."""
    if KIND == 3:
        a, b, c, d, e, f, g, h = _from_int4(word)
        even, odd = tl.split(x.reshape(ROWS, DEPTH // 8, 2, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        acc = _multiply_pairs(a, b, first, acc, ROWS, COLUMNS, DEPTH // 4)
        acc = _multiply_pairs(c, d, second, acc, ROWS, COLUMNS, DEPTH // 4)
        acc = _multiply_pairs(e, f, third, acc, ROWS, COLUMNS, DEPTH // 4)
        acc = _multiply_pairs(g, h, fourth, acc, ROWS, COLUMNS, DEPTH // 4)
    else:
        if KIND == 1:
            a, b, c, d = _from_fp8(word)
        else:
            a, b, c, d = _from_int8(word)
        first, second = tl.split(x.reshape(ROWS, DEPTH // 4, 2, 2))
        acc = _multiply_pairs(a, b, first, acc, ROWS, COLUMNS, DEPTH // 2)
        acc = _multiply_pairs(c, d, second, acc, ROWS, COLUMNS, DEPTH // 2)
    return acc


@triton.jit
def _multiply_pairs(one, other, x, acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    return tl.dot(tl.join(one, other).reshape(COLUMNS, DEPTH), x.reshape(ROWS, DEPTH).T, acc)


@triton.jit
def _from_int4(word):
    """Numbers i and i + 4 for i = 0, 1, 2, 3, less 8. The last bits of 128 + n in bf16 are n."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, zero;
        mov.b32 zero, 0x43084308;
        lop3.b32 t, $8, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 t, t, zero;
        mov.b32 {$0, $1}, t;
        shr.u32 t, $8, 4;
        lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 t, t, zero;
        mov.b32 {$2, $3}, t;
        shr.u32 t, $8, 8;
        lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 t, t, zero;
        mov.b32 {$4, $5}, t;
        shr.u32 t, $8, 12;
        lop3.b32 t, t, 0x000F000F, 0x43004300, 0xEA;
        sub.bf16x2 t, t, zero;
        mov.b32 {$6, $7}, t;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r", [word], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _from_fp8(word):
    """Numbers i and i + 2 for i = 0, 1.

    Exponents of e4m3 count from 7 and those of bf16 from 127. So the bits of a number, put where bf16 has them, are
    those of its 2**120th part. This also holds for a number without a leading one.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, high;
        mov.b32 high, 0x7B807B80;
        shl.b32 u, $4, 8;
        shl.b32 t, $4, 4;
        and.b32 u, u, 0x80008000;
        lop3.b32 t, t, 0x07F007F0, u, 0xEA;
        mul.bf16x2 t, t, high;
        mov.b32 {$0, $1}, t;
        shr.u32 t, $4, 4;
        and.b32 u, $4, 0x80008000;
        lop3.b32 t, t, 0x07F007F0, u, 0xEA;
        mul.bf16x2 t, t, high;
        mov.b32 {$2, $3}, t;
        }""",
        "=h,=h,=h,=h,r", [word], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _from_int8(word):
    """Numbers i and i + 2 for i = 0, 1, by way of fp32: there the bits of 2**23 + n end with n."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, u, one;
        .reg .f32 p, q;
        mov.b32 one, 0x4B000000;
        xor.b32 t, $4, 0x80808080;
        prmt.b32 u, t, one, 0x7440;
        mov.b32 p, u;
        prmt.b32 u, t, one, 0x7442;
        mov.b32 q, u;
        sub.f32 p, p, 0f4B000080;
        sub.f32 q, q, 0f4B000080;
        cvt.rn.bf16x2.f32 u, q, p;
        mov.b32 {$0, $1}, u;
        prmt.b32 u, t, one, 0x7441;
        mov.b32 p, u;
        prmt.b32 u, t, one, 0x7443;
        mov.b32 q, u;
        sub.f32 p, p, 0f4B000080;
        sub.f32 q, q, 0f4B000080;
        cvt.rn.bf16x2.f32 u, q, p;
        mov.b32 {$2, $3}, u;
        }""",
        "=h,=h,=h,=h,r", [word], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1,
    )  # fmt: skip
