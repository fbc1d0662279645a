"""Tiles of picked rows inside Triton kernels: which slots there are, and their numbers, from packed pages or from bf16 rows.

Rows without a slot are zeros and nothing is read for them, so that a NaN elsewhere in the cache reaches no sum. Source of the layouts:
spec A 3.4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0
from dsv4.fast.kernels.kv_rows import slot_places


@triton.jit
def pick_slots(slots, column, length, total):
    """int64 slots of a list's columns, -1 where the column is past `length` or the slot is not one of `total`."""
    slot = tl.load(slots + column, mask=column < length, other=-1).to(tl.int64)
    return tl.where((slot >= 0) & (slot < total), slot, -1)


@triton.jit
def as_operand(numbers, COMPILED: tl.constexpr):
    """fp32 that hold bf16 numbers, as a product takes them. The interpreter's product of bf16 is wrong: it takes fp32."""
    if COMPILED:
        numbers = numbers.to(tl.bfloat16)
    return numbers


@triton.jit
def word_operand(bits, COMPILED: tl.constexpr):
    """`as_operand` of words of bf16 (int16)."""
    return bits.to(tl.bfloat16, bitcast=True) if COMPILED else (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_rows(rows, stride, slot, DIMS: tl.constexpr, COMPILED: tl.constexpr):
    """Rows of a tensor of bf16 words (int16), `stride` numbers from row to row: [slots, DIMS]."""
    column = tl.arange(0, DIMS)[None, :]
    place = tl.maximum(slot, 0)[:, None] * stride + column
    return word_operand(tl.load(rows + place, mask=(slot >= 0)[:, None], other=0), COMPILED)


@triton.jit
def packed_rows(
    pages, stride, slot, PAGE: tl.constexpr, LAYOUT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Rows of packed pages, `stride` bytes from page to page: [ROWS, dims]. EVEN: their bf16 dims begin at even addresses."""
    DIMS: tl.constexpr = LAYOUT.dims
    QUANTISED: tl.constexpr = LAYOUT.quantised
    GROUPS: tl.constexpr = LAYOUT.dims // LAYOUT.group
    there = (slot >= 0)[:, None]
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, LAYOUT.data_bytes, LAYOUT.scale_bytes, LAYOUT.inline)
    column = tl.arange(0, DIMS)[None, :]
    if LAYOUT.numbers == "e2m1":
        pair = tl.arange(0, DIMS // 2)[None, :]
        byte = tl.load(pages + (data[:, None] + pair), mask=there & (pair < QUANTISED // 2), other=0).to(tl.int32)
        numbers = decode_e2m1(tl.interleave(byte & 15, byte >> 4))
    else:
        numbers = decode_e4m3(tl.load(pages + (data[:, None] + column), mask=there & (column < QUANTISED), other=0), NATIVE)
    if LAYOUT.scale != "unit":
        group = tl.arange(0, GROUPS)[None, :]
        scale = tl.load(pages + (scales[:, None] + group), mask=there & (group < QUANTISED // LAYOUT.group), other=0)
        factor = decode_e4m3(scale, NATIVE) if LAYOUT.scale == "e4m3" else decode_e8m0(scale.to(tl.int32))
        numbers = (numbers.reshape(ROWS, GROUPS, LAYOUT.group) * factor[:, :, None]).reshape(ROWS, DIMS)
    if QUANTISED < DIMS:
        kept = there & (column >= QUANTISED)
        place = pages + (data[:, None] + (2 * column - QUANTISED))
        if EVEN:
            half = tl.load(place.to(tl.pointer_type(tl.int16)), mask=kept, other=0).to(tl.int32)
        else:
            half = tl.load(place, mask=kept, other=0).to(tl.int32) | (tl.load(place + 1, mask=kept, other=0).to(tl.int32) << 8)
        numbers = tl.where(column < QUANTISED, numbers, (half << 16).to(tl.float32, bitcast=True))
    return as_operand(numbers, COMPILED)
