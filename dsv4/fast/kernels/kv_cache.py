"""The KV cache's kernels: rows and records into pages, rows out of them, records from pages to pages, slots of entries.

A program of a store takes ROWS rows: it norms and rotates them if it is asked to, quantises them and writes the records whose slot no later
row has. Offsets are int64 bytes; nothing depends on the number of rows or pages.

Launches of a store: one, up to `kv_rows.MOST_SEARCHED` rows. Above, one before it marks the last row of each slot in an int32 for each slot
of the cache, which is not cleared (`kv_rows.last_rows`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0, has_native_e4m3, rounded
from dsv4.fast.kernels.kv_records import move as move
from dsv4.fast.kernels.kv_records import store_records
from dsv4.fast.kernels.kv_rows import (
    alignment,
    flat,
    floor_options,
    is_last,
    last_of,
    layout_options,
    slot_places,
    slots_of,
    store_tile,
    unflat,
    within,
)
from dsv4.fast.kernels.rows import inverse_root, rotate_pairs, round_pairs, row_words, scale_pairs, unpack_pairs, weight_pairs, weight_words
from dsv4.formats import KVLayout

COLUMNS: tl.constexpr = tl.constexpr(256)  # of half a row: eight a thread of a warp

TILE = (4, 4)  # rows of a program, and its warps, as measured on an H200


@triton.jit(do_not_specialize=["rows", "total", "least", "positions_there"])
def store_kernel(
    kv,  # words of two bf16
    kv_stride,
    weight,  # of `weight_words`
    table,
    positions,
    pages,
    stride,
    slots,
    last,
    rows,
    total,
    least,
    positions_there,
    eps,
    PAGE: tl.constexpr,
    DIMS: tl.constexpr,
    QUANTISED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    INLINE: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGN: tl.constexpr,
    SLOTS: tl.constexpr,  # False: row r goes to slot r
    SEARCH: tl.constexpr,
    EARLY: tl.constexpr,  # it began before `last` was complete
    ROTATED: tl.constexpr,  # dims that the table turns; 0: rows come as they are
    TAIL: tl.constexpr,  # dims at the end in a tile of their own: those that turn and those that stay bf16, in whole groups
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Rows into their slots."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    live = row < rows
    HALVES: tl.constexpr = DIMS // COLUMNS
    pair = tl.arange(0, HALVES)[None, :, None] * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, None, :]
    begin = kv + (row.to(tl.int64) * kv_stride)[:, None, None]
    words = tl.load(begin + pair, mask=live[:, None, None], other=0)
    if ROTATED > 0:
        LANE: tl.constexpr = TAIL // 32 if TAIL < COLUMNS else 8
        PARTS: tl.constexpr = TAIL // COLUMNS if TAIL > COLUMNS else 1
        WIDTH: tl.constexpr = TAIL // PARTS
        place = (DIMS - TAIL) // 2 + tl.arange(0, PARTS)[None, :, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, None, :]
        ONE: tl.constexpr = 4 if LANE == 2 else 0  # a word a thread
        tail = tl.load(within(begin, place, ONE, 4), mask=live[:, None, None], other=0)
        position = tl.load(positions + row, mask=live, other=-1)
        there = (position >= 0) & (position < positions_there)
        entry = tl.where(there, position, 0).to(tl.int64)[:, None, None] * ROTATED + (place - (DIMS - ROTATED) // 2)
        turns = there[:, None, None] & (place >= (DIMS - ROTATED) // 2)
        cosines = tl.load(within(table, entry, ONE, 4), mask=turns, other=1.0)
        sines = tl.load(within(table, entry + ROTATED // 2, ONE, 4), mask=turns, other=0.0)
    if SLOTS:
        slot = slots_of(slots, row, rows, total)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        keep = (slot >= 0) & is_last(first, row, slot, slots, last, rows, SEARCH)
    else:
        slot = row
        keep = live
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    even, odd = unpack_pairs(words)
    if ROTATED > 0:
        words, factor = _normed(even, odd, weight, eps, DIMS, ROWS, HALVES, WARPS, NATIVE)
        present, factor = there[:, None, None], factor[:, None, None]
        even, odd = unpack_pairs(tl.where(present, words, 0))
        tail_even, tail_odd = unpack_pairs(tail)
        weight_even, weight_odd = weight_pairs(weight, place, place < DIMS // 2)
        tail_even, tail_odd = scale_pairs(tail_even, tail_odd, factor, weight_even, weight_odd, True)
        turned_even, turned_odd = rotate_pairs(tail_even, tail_odd, cosines, sines, False)
        tail_even = tl.where(present, tl.where(turns, turned_even, tail_even), 0.0)
        tail_odd = tl.where(present, tl.where(turns, turned_odd, tail_odd), 0.0)
        store_tile(
            pages, data, scales, keep, tail_even, tail_odd, least, PARTS, ROWS, WIDTH, LANE, DIMS - TAIL, DIMS, QUANTISED, GROUP, KIND,
            SCALE_BYTES, ZEROES, NATIVE, ALIGN,
        )  # fmt: skip
    if TAIL < DIMS:
        store_tile(
            pages, data, scales, keep, even, odd, least, HALVES, ROWS, COLUMNS, 8, 0, DIMS - TAIL, QUANTISED, GROUP, KIND, SCALE_BYTES,
            ZEROES, NATIVE, ALIGN,
        )  # fmt: skip


@triton.jit
def _normed(even, odd, weight, eps, DIMS: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr, WARPS: tl.constexpr,
            NATIVE: tl.constexpr):  # fmt: skip
    """Rows times their factors and the weights, as words [ROWS, HALVES, pairs], and the factors, fp64 [ROWS]."""
    PAIRS: tl.constexpr = COLUMNS // 2
    pair = tl.arange(0, HALVES)[None, :, None] * PAIRS + tl.arange(0, PAIRS)[None, None, :]
    pair += tl.zeros([WARPS, 1, 1], tl.int32)  # each warp has all weights, which serve all of its rows
    weight_even, weight_odd = weight_pairs(weight, pair, pair >= 0)
    first, second = even.to(tl.float64), odd.to(tl.float64)
    total = tl.sum(tl.sum(tl.fma(first, first, second * second), axis=2), axis=1)
    factor = inverse_root(tl.fma(total, tl.full([], 1.0 / DIMS, tl.float64), tl.full([], eps, tl.float64)), NATIVE)
    first *= factor[:, None, None]
    second *= factor[:, None, None]
    first *= _for_rows(weight_even.to(tl.float64), ROWS, HALVES, WARPS)
    second *= _for_rows(weight_odd.to(tl.float64), ROWS, HALVES, WARPS)
    return round_pairs(first, second, NATIVE), factor


@triton.jit
def _for_rows(x, ROWS: tl.constexpr, HALVES: tl.constexpr, WARPS: tl.constexpr):
    """Numbers [WARPS, HALVES, n] for all rows, of which warps take turns."""
    PAIRS: tl.constexpr = COLUMNS // 2
    return tl.broadcast_to(x[None, :, :, :], (ROWS // WARPS, WARPS, HALVES, PAIRS)).reshape(ROWS, HALVES, PAIRS)


@triton.jit
def _decoded(pages, place, scales, there, HALVES: tl.constexpr, ROWS: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr,
             KIND: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr):  # fmt: skip
    """The bits of bf16 of the quantised dims, int16 [ROWS, HALVES, COLUMNS], 0 in rows that are not there. A thread has eight of a row."""
    half = tl.arange(0, HALVES)[None, :, None] * COLUMNS
    column = half + tl.arange(0, COLUMNS)[None, None, :]
    if KIND == "fp4_e4m3":
        pair = half // 2 + tl.arange(0, COLUMNS // 2)[None, None, :]
        byte = tl.load(within(pages, place + pair, ALIGN, 4), mask=there & (pair < QUANTISED // 2), other=0).to(tl.int32)
        numbers = decode_e2m1(tl.interleave(byte & 15, byte >> 4))
    else:
        codes = tl.load(within(pages, place + column, ALIGN, 8), mask=there & (column < QUANTISED), other=0)
        numbers = decode_e4m3(codes, NATIVE)
    if KIND != "unit":
        LANES: tl.constexpr = COLUMNS // 8
        eight = half + tl.arange(0, LANES)[None, None, :] * 8
        place = flat(scales[:, None, None] + eight // GROUP, ROWS, HALVES, LANES)
        scale = tl.load(pages + place, mask=flat(there & (eight < QUANTISED), ROWS, HALVES, LANES), other=0)
        scale = unflat(scale, ROWS, HALVES, LANES)
        factor = decode_e4m3(scale, NATIVE) if KIND == "fp4_e4m3" else decode_e8m0(scale.to(tl.int32))
        eights = numbers.reshape(ROWS * HALVES, COLUMNS // 8, 8) * factor.reshape(ROWS * HALVES, COLUMNS // 8, 1)
        numbers = eights.reshape(ROWS, HALVES, COLUMNS)
    return rounded(numbers, tl.bfloat16, NATIVE).to(tl.int16, bitcast=True)


@triton.jit(do_not_specialize=["rows", "total"])
def load_kernel(
    pages, stride, slots, result, rows, total, PAGE: tl.constexpr, DIMS: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr, NATIVE: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of slots, as the bits of bf16."""
    row = tl.program_id(0).to(rows.dtype) * ROWS + tl.arange(0, ROWS)
    slot = slots_of(slots, row, rows, total)
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    place, there, live = data[:, None, None], (slot >= 0)[:, None, None], (row < rows)[:, None, None]
    begin = row.to(tl.int64)[:, None, None] * DIMS
    if QUANTISED < DIMS:
        pair = tl.arange(0, (DIMS - QUANTISED) // 2)[None, None, :]
        if ALIGN >= 4:
            words = pages.to(tl.pointer_type(tl.int32))
            tail = tl.load(within(words, (place + QUANTISED) // 4 + pair, 4, 4), mask=there, other=0)
        else:
            tail = tl.zeros([ROWS, 1, (DIMS - QUANTISED) // 2], tl.int32)
            for number in tl.static_range(4):
                byte = pages + (place + (QUANTISED + number + 4 * pair))
                tail |= tl.load(byte, mask=there, other=0).to(tl.int32) << (8 * number)
    bits = _decoded(pages, place, scales, there, DIMS // COLUMNS, ROWS, QUANTISED, GROUP, KIND, NATIVE, ALIGN)
    column = tl.arange(0, DIMS // COLUMNS)[None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    tl.store(result + (begin + column), bits, mask=live & (column < QUANTISED))
    if QUANTISED < DIMS:
        words = result.to(tl.pointer_type(tl.int32))
        tl.store(within(words, (begin + QUANTISED) // 2 + pair, 4, 4), tail, mask=live)


@triton.jit(do_not_specialize=["table_stride", "count", "width", "rows"])
def page_slots_kernel(block_table, table_stride, requests, indices, slots, count, width, rows, PAGE: tl.constexpr, ROWS: tl.constexpr):
    """Slots of entries of requests."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    request = tl.load(requests + row, mask=live, other=-1).to(tl.int64)
    index = tl.load(indices + row, mask=live, other=-1).to(tl.int64)
    column = tl.where(index >= 0, index, 0) // PAGE
    known = (request >= 0) & (request < count) & (index >= 0) & (column < width)
    page = tl.load(block_table + (request * table_stride + column), mask=known, other=-1).to(tl.int64)
    tl.store(slots + row, tl.where(known & (page >= 0), page * PAGE + (index - column * PAGE), -1), mask=live)


def quantize(kv: Tensor, records: Tensor, layout: KVLayout, amax_floor: str) -> None:
    """Rows to records, which are pages of one slot."""
    fill(kv, records, replace(layout, inline=True), 1, amax_floor)


def fill(kv: Tensor, pages: Tensor, layout: KVLayout, page_size: int, amax_floor: str) -> None:
    """Row r into slot r of pages."""
    _store_rows(kv, pages, None, kv.shape[0], layout, page_size, amax_floor)


def store(kv: Tensor, pages: Tensor, slots: Tensor, layout: KVLayout, page_size: int, amax_floor: str, **norm: Any) -> None:
    """Rows or records into pages; with `norm` (weight, table, positions, eps) rows are normed and rotated before."""
    if kv.dtype == torch.uint8:
        store_records(kv if kv.stride(1) == 1 else kv.contiguous(), pages, slots.contiguous(), layout, page_size)
    else:
        total = pages.shape[0] * page_size
        _store_rows(kv, pages, slots.contiguous(), total, layout, page_size, amax_floor, **norm)


def _store_rows(
    kv: Tensor, pages: Tensor, slots: Tensor | None, total: int, layout: KVLayout, page_size: int, amax_floor: str,
    weight: Tensor | None = None, table: Tensor | None = None, positions: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    rows = row_words(kv)
    any_numbers = rows if slots is None else slots  # of arguments that the kernel does not read
    rotated = 0 if table is None else table.shape[1]
    height, warps = TILE
    last, options = last_of(slots, total, store_kernel)
    with torch.cuda.device_of(pages):
        store_kernel[(triton.cdiv(kv.shape[0], height),)](
            rows, rows.stride(0), rows if weight is None else weight_words(weight), rows if table is None else table.contiguous(),
            any_numbers if positions is None else positions.contiguous(), pages, pages.stride(0), any_numbers,
            any_numbers if last is None else last, kv.shape[0], total, positions_there=0 if table is None else table.shape[0], eps=eps,
            SLOTS=slots is not None, ROTATED=rotated, TAIL=tail_of(layout, rotated), ROWS=height, WARPS=warps,
            ALIGN=alignment(layout, pages), NATIVE=has_native_e4m3(store_kernel, pages.device), num_warps=warps, enable_fp_fusion=False,
            **options, **layout_options(layout, page_size), **floor_options(layout, amax_floor),
        )  # fmt: skip


def tail_of(layout: KVLayout, rotated: int) -> int:
    """Dims of the second tile of a row of which so many turn: whole groups, of which there are a power of two; 0 if none turn."""
    if not rotated:
        return 0
    group = 64 if layout.scale == "unit" else max(layout.group, 64)  # 64: two a thread
    tail: int = max(triton.next_power_of_2(rotated), triton.next_power_of_2(layout.dims - layout.quantised), group)
    return tail


def load(pages: Tensor, slots: Tensor, rows: Tensor, layout: KVLayout, page_size: int) -> None:
    """Rows of slots into `rows`, bf16 and contiguous."""
    count = slots.shape[0]
    height, warps = TILE
    with torch.cuda.device_of(pages):
        load_kernel[(triton.cdiv(count, height),)](
            pages, pages.stride(0), slots.contiguous(), rows.view(torch.int16), count, pages.shape[0] * page_size, ROWS=height,
            NATIVE=has_native_e4m3(load_kernel, pages.device), ALIGN=alignment(layout, pages), num_warps=warps, enable_fp_fusion=False,
            **layout_options(layout, page_size),
        )  # fmt: skip


def page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, slots: Tensor, page_size: int) -> None:
    """Slots of entries into `slots`."""
    plain = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    rows = indices.shape[0]
    with torch.cuda.device_of(slots):
        page_slots_kernel[(triton.cdiv(rows, 256),)](
            plain, plain.stride(0), requests.contiguous(), indices.contiguous(), slots, *block_table.shape, rows, PAGE=page_size, ROWS=256,
        )  # fmt: skip
