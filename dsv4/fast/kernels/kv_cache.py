"""The KV cache's kernels: rows and records into pages, rows out of them, records from pages to pages, slots of entries.

A program of a store takes ROWS rows: it norms and rotates them if it is asked to, quantises them and writes the records whose slot no later
row has. Offsets are int64 bytes; nothing depends on the number of rows or pages.

Launches of a store: one, up to `kv_rows.MOST_SEARCHED` rows. Above, two before it mark the last row of each slot in an int32 for each slot
of the cache, which is not cleared: only slots that are stored are touched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0, has_native_e4m3
from dsv4.fast.kernels.kv_rows import floor_options, is_last, last_rows, layout_options, slot_places, store_rows
from dsv4.fast.kernels.rows import normalise_pairs, rotate_pairs, row_words, to_bf16, unpack_pairs, weight_pairs, weight_words
from dsv4.formats import KVLayout

ROWS = 4  # of a program
WARPS = 4


@triton.jit
def _slots_of(slots, row, rows, total):
    """Slots of rows, int64, -1 where there is none."""
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    return tl.where((slot >= 0) & (slot < total), slot, -1)


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
    SLOTS: tl.constexpr,  # False: row r goes to slot r
    SEARCH: tl.constexpr,
    ROTATED: tl.constexpr,  # dims that the table turns; 0: rows come as they are
    ROWS: tl.constexpr,
):
    """Rows into their slots."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    live = row < rows
    PAIRS: tl.constexpr = DIMS // 2
    pair = tl.arange(0, PAIRS)[None, :]
    even, odd = unpack_pairs(tl.load(kv + row.to(tl.int64)[:, None] * kv_stride + pair, mask=live[:, None], other=0))
    if ROTATED > 0:
        weight_even, weight_odd = weight_pairs(weight, pair, pair < PAIRS)
        even, odd = normalise_pairs(even, odd, weight_even, weight_odd, DIMS, eps, True)
        position = tl.load(positions + row, mask=live, other=-1).to(tl.int64)
        there = ((position >= 0) & (position < positions_there))[:, None]
        turns = pair >= PAIRS - ROTATED // 2
        entry = tl.where(there, position[:, None], 0) * ROTATED + (pair - (PAIRS - ROTATED // 2))
        cosines = tl.load(table + entry, mask=there & turns, other=1.0)
        sines = tl.load(table + entry + ROTATED // 2, mask=there & turns, other=0.0)
        turned_even, turned_odd = rotate_pairs(even, odd, cosines, sines, False)
        even = tl.where(there, tl.where(turns, turned_even, even), 0.0)
        odd = tl.where(there, tl.where(turns, turned_odd, odd), 0.0)
    if SLOTS:
        slot = _slots_of(slots, row, rows, total)
        keep = (slot >= 0) & is_last(first, row, slot, slots, last, rows, SEARCH)
    else:
        slot = row.to(tl.int64)
        keep = live
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    store_rows(pages, data, scales, keep, even, odd, least, ROWS, DIMS, QUANTISED, GROUP, KIND, SCALE_BYTES, ZEROES, NATIVE)


@triton.jit
def _move(source, to_data, to_scales, target, at_data, at_scales, keep, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
          DATA: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Copy records: `to_` offsets in the source, `at_` in the target, int64 [ROWS]. DATA and SCALES are the next powers of two."""
    byte = tl.arange(0, DATA)[None, :]
    moved = keep[:, None] & (byte < DATA_BYTES)
    tl.store(target + (at_data[:, None] + byte), tl.load(source + (to_data[:, None] + byte), mask=moved, other=0), mask=moved)
    if SCALE_BYTES > 0:
        byte = tl.arange(0, SCALES)[None, :]
        moved = keep[:, None] & (byte < SCALE_BYTES)
        tl.store(target + (at_scales[:, None] + byte), tl.load(source + (to_scales[:, None] + byte), mask=moved, other=0), mask=moved)


@triton.jit(do_not_specialize=["rows", "total"])
def records_kernel(
    records, records_stride, pages, stride, slots, last, rows, total, PAGE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr, SEARCH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Records into their slots."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    slot = _slots_of(slots, row, rows, total)
    keep = (slot >= 0) & is_last(first, row, slot, slots, last, rows, SEARCH)
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    start = row.to(tl.int64) * records_stride
    _move(records, start, start + DATA_BYTES, pages, data, scales, keep, DATA_BYTES, SCALE_BYTES, DATA, SCALES)


@triton.jit(do_not_specialize=["count"])
def move_kernel(
    source, source_stride, target, target_stride, count, SOURCE_PAGE: tl.constexpr, TARGET_PAGE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, SOURCE_INLINE: tl.constexpr, TARGET_INLINE: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Records of the first `count` slots, from pages to pages."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    to_data, to_scales = slot_places(slot, source_stride, SOURCE_PAGE, DATA_BYTES, SCALE_BYTES, SOURCE_INLINE)
    at_data, at_scales = slot_places(slot, target_stride, TARGET_PAGE, DATA_BYTES, SCALE_BYTES, TARGET_INLINE)
    _move(source, to_data, to_scales, target, at_data, at_scales, slot < count, DATA_BYTES, SCALE_BYTES, DATA, SCALES)


@triton.jit(do_not_specialize=["rows", "total"])
def load_kernel(
    pages, stride, slots, result, rows, total, PAGE: tl.constexpr, DIMS: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of slots, as the bits of bf16."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = _slots_of(slots, row, rows, total)
    there = (slot >= 0)[:, None]
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    column = tl.arange(0, DIMS)[None, :]
    if KIND == "fp4_e4m3":
        pair = tl.arange(0, DIMS // 2)[None, :]
        byte = tl.load(pages + (data[:, None] + pair), mask=there & (pair < QUANTISED // 2), other=0).to(tl.int32)
        numbers = decode_e2m1(tl.interleave(byte & 15, byte >> 4))
    else:
        numbers = decode_e4m3(tl.load(pages + (data[:, None] + column), mask=there & (column < QUANTISED), other=0), NATIVE)
    if KIND != "unit":
        GROUPS: tl.constexpr = DIMS // GROUP
        group = tl.arange(0, GROUPS)[None, :]
        scale = tl.load(pages + (scales[:, None] + group), mask=there & (group < QUANTISED // GROUP), other=0)
        factor = decode_e4m3(scale, NATIVE) if KIND == "fp4_e4m3" else decode_e8m0(scale.to(tl.int32))
        numbers = (numbers.reshape(ROWS, GROUPS, GROUP) * factor[:, :, None]).reshape(ROWS, DIMS)
    half = to_bf16(numbers).to(tl.int32, bitcast=True) >> 16
    if QUANTISED < DIMS:
        kept = there & (column >= QUANTISED)
        place = data[:, None] + (2 * column - QUANTISED)
        low, high = tl.load(pages + place, mask=kept, other=0).to(tl.int32), tl.load(pages + place + 1, mask=kept, other=0).to(tl.int32)
        half = tl.where(column < QUANTISED, half, low | (high << 8))
    tl.store(result + (row[:, None] * DIMS + column), tl.where(there, half, 0).to(tl.int16), mask=(row < rows)[:, None])


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
    _store_rows(kv, pages, None, None, kv.shape[0], layout_options(layout, page_size) | floor_options(layout, amax_floor))


def store(kv: Tensor, pages: Tensor, slots: Tensor, layout: KVLayout, page_size: int, amax_floor: str, **norm: Any) -> None:
    """Rows or records into pages; with `norm` (weight, table, positions, eps) rows are normed and rotated before."""
    total, slots = pages.shape[0] * page_size, slots.contiguous()
    last = last_rows(slots, total)
    if kv.dtype == torch.uint8:
        options = layout_options(layout, page_size)
        kept = {name: options[name] for name in ("PAGE", "DATA_BYTES", "SCALE_BYTES", "INLINE")}
        records = kv if kv.stride(1) == 1 else kv.contiguous()
        with torch.cuda.device_of(pages):
            records_kernel[(triton.cdiv(kv.shape[0], ROWS),)](
                records, records.stride(0), pages, pages.stride(0), slots, slots if last is None else last, kv.shape[0], total,
                SEARCH=last is None, ROWS=ROWS, num_warps=WARPS, **kept, **_tiles(layout),
            )  # fmt: skip
    else:
        _store_rows(kv, pages, slots, last, total, layout_options(layout, page_size) | floor_options(layout, amax_floor), **norm)


def _store_rows(
    kv: Tensor, pages: Tensor, slots: Tensor | None, last: Tensor | None, total: int, options: dict[str, Any],
    weight: Tensor | None = None, table: Tensor | None = None, positions: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    rows = row_words(kv)
    any_numbers = rows if slots is None else slots  # of arguments that the kernel does not read
    with torch.cuda.device_of(pages):
        store_kernel[(triton.cdiv(kv.shape[0], ROWS),)](
            rows, rows.stride(0), rows if weight is None else weight_words(weight), rows if table is None else table.contiguous(),
            any_numbers if positions is None else positions.contiguous(), pages, pages.stride(0), any_numbers,
            any_numbers if last is None else last, kv.shape[0], total, positions_there=0 if table is None else table.shape[0], eps=eps,
            SLOTS=slots is not None, SEARCH=last is None, ROTATED=0 if table is None else table.shape[1], ROWS=ROWS,
            NATIVE=has_native_e4m3(store_kernel, pages.device), num_warps=WARPS, enable_fp_fusion=False, **options,
        )  # fmt: skip


def load(pages: Tensor, slots: Tensor, rows: Tensor, layout: KVLayout, page_size: int) -> None:
    """Rows of slots into `rows`, bf16 and contiguous."""
    count = slots.shape[0]
    with torch.cuda.device_of(pages):
        load_kernel[(triton.cdiv(count, ROWS),)](
            pages, pages.stride(0), slots.contiguous(), rows.view(torch.int16), count, pages.shape[0] * page_size, ROWS=ROWS,
            NATIVE=has_native_e4m3(load_kernel, pages.device), num_warps=WARPS, enable_fp_fusion=False,
            **layout_options(layout, page_size),
        )  # fmt: skip


def move(source: Tensor, target: Tensor, have: KVLayout, want: KVLayout, page_size: int, target_page_size: int) -> None:
    """Records of all slots of `source`, in order, into `target`, whose layout has the same numbers."""
    count = source.shape[0] * page_size
    with torch.cuda.device_of(source):
        move_kernel[(triton.cdiv(count, ROWS),)](
            source, source.stride(0), target, target.stride(0), count, SOURCE_PAGE=page_size, TARGET_PAGE=target_page_size,
            DATA_BYTES=have.data_bytes, SCALE_BYTES=have.scale_bytes, SOURCE_INLINE=have.inline, TARGET_INLINE=want.inline, ROWS=ROWS,
            num_warps=WARPS, **_tiles(have),
        )  # fmt: skip


def page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, slots: Tensor, page_size: int) -> None:
    """Slots of entries into `slots`."""
    plain = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    rows = indices.shape[0]
    with torch.cuda.device_of(slots):
        page_slots_kernel[(triton.cdiv(rows, 256),)](
            plain, plain.stride(0), requests.contiguous(), indices.contiguous(), slots, *block_table.shape, rows, PAGE=page_size, ROWS=256,
        )  # fmt: skip


def _tiles(layout: KVLayout) -> dict[str, int]:
    return {"DATA": triton.next_power_of_2(layout.data_bytes), "SCALES": triton.next_power_of_2(max(layout.scale_bytes, 1))}
