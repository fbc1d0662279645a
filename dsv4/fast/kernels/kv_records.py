"""Records of the KV cache as they are: into pages, and from pages to pages of another layout with the same numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.kv_rows import alignment, is_last, last_of, scale_alignment, slot_places, slots_of, within
from dsv4.formats import KVLayout

# Records of a program, and its warps.
STORE_TILE = (16, 4)
MOVE_TILE = (16, 4)


@triton.jit
def _words(base, begin, FIRST: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Bytes FIRST to FIRST + BYTES of rows, as words of up to eight: their addresses [ROWS, 1, TILE / word], and which are bytes of a row.

    `begin`, int64 [ROWS], is where rows begin, a multiple of ALIGN; TILE is the next power of two of BYTES.
    """
    WORD: tl.constexpr = 8 if ALIGN > 8 else ALIGN
    kind: tl.constexpr = tl.int64 if WORD == 8 else tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.uint8
    word = FIRST // WORD + tl.arange(0, TILE // WORD)[None, None, :]
    return within(base.to(tl.pointer_type(kind)), (begin // WORD)[:, None, None] + word, ALIGN, 16), word < (FIRST + BYTES) // WORD


@triton.jit
def _taken(base, begin, live, FIRST: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    """Words of `_words`, 0 in rows that are not live."""
    source, inside = _words(base, begin, FIRST, BYTES, TILE, ALIGN)
    return tl.load(source, mask=live[:, None, None] & inside, other=0)


@triton.jit
def _put(base, begin, keep, words, FIRST: tl.constexpr, BYTES: tl.constexpr, TILE: tl.constexpr, ALIGN: tl.constexpr):
    target, inside = _words(base, begin, FIRST, BYTES, TILE, ALIGN)
    tl.store(target, words, mask=keep[:, None, None] & inside)


@triton.jit
def _record(base, data, scales, live, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, LARGE: tl.constexpr, REST: tl.constexpr,
            SCALES: tl.constexpr, ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """Words of records at `data` and `scales`, int64 [ROWS]: in tiles of `_tiles`, those that are empty a copy of the first."""
    MOST: tl.constexpr = LARGE if LARGE < DATA_BYTES else DATA_BYTES
    large = _taken(base, data, live, 0, MOST, LARGE, ALIGN)
    rest = _taken(base, data, live, LARGE, DATA_BYTES - LARGE, REST, ALIGN) if REST > 0 else large
    own = _taken(base, scales, live, 0, SCALE_BYTES, SCALES, SCALE_ALIGN) if SCALE_BYTES > 0 else large
    return large, rest, own


@triton.jit
def _put_record(base, data, scales, keep, large, rest, own, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, LARGE: tl.constexpr,
                REST: tl.constexpr, SCALES: tl.constexpr, ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr):  # fmt: skip
    """What `_record` gave, where `keep` [ROWS] says."""
    MOST: tl.constexpr = LARGE if LARGE < DATA_BYTES else DATA_BYTES
    if SCALE_BYTES > 0:
        _put(base, scales, keep, own, 0, SCALE_BYTES, SCALES, SCALE_ALIGN)
    if REST > 0:
        _put(base, data, keep, rest, LARGE, DATA_BYTES - LARGE, REST, ALIGN)
    _put(base, data, keep, large, 0, MOST, LARGE, ALIGN)


@triton.jit(do_not_specialize=["rows", "total"])
def records_kernel(
    records, records_stride, pages, stride, slots, last, rows, total, PAGE: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr, LARGE: tl.constexpr, REST: tl.constexpr, SCALES: tl.constexpr, ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, SEARCH: tl.constexpr, EARLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Records into their slots. They are on their way before it is known which of them are kept."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    start = row.to(tl.int64) * records_stride
    large, rest, own = _record(
        records, start, start + DATA_BYTES, row < rows, DATA_BYTES, SCALE_BYTES, LARGE, REST, SCALES, ALIGN, SCALE_ALIGN
    )  # fmt: skip
    slot = slots_of(slots, row, rows, total)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    keep = (slot >= 0) & is_last(first, row, slot, slots, last, rows, SEARCH)
    data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
    _put_record(pages, data, scales, keep, large, rest, own, DATA_BYTES, SCALE_BYTES, LARGE, REST, SCALES, ALIGN, SCALE_ALIGN)


@triton.jit(do_not_specialize=["count", "room"])
def move_kernel(
    source, source_stride, target, target_stride, count, room, SOURCE_PAGE: tl.constexpr, TARGET_PAGE: tl.constexpr,
    DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, SOURCE_INLINE: tl.constexpr, TARGET_INLINE: tl.constexpr, LARGE: tl.constexpr,
    REST: tl.constexpr, SCALES: tl.constexpr, ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, PAD: tl.constexpr, PADS: tl.constexpr,
    PAD_ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Records of the first `count` slots, from pages to pages; zeros in the other ones of `room`, and in the last PAD bytes of a page."""
    slot = tl.program_id(0).to(room.dtype) * ROWS + tl.arange(0, ROWS)
    there = slot < room
    to_data, to_scales = slot_places(slot, source_stride, SOURCE_PAGE, DATA_BYTES, SCALE_BYTES, SOURCE_INLINE)
    large, rest, own = _record(
        source, to_data, to_scales, slot < count, DATA_BYTES, SCALE_BYTES, LARGE, REST, SCALES, ALIGN, SCALE_ALIGN
    )  # fmt: skip
    data, scales = slot_places(slot, target_stride, TARGET_PAGE, DATA_BYTES, SCALE_BYTES, TARGET_INLINE)
    _put_record(target, data, scales, there, large, rest, own, DATA_BYTES, SCALE_BYTES, LARGE, REST, SCALES, ALIGN, SCALE_ALIGN)
    if PAD > 0:
        ends = there & (slot % TARGET_PAGE == TARGET_PAGE - 1)
        if tl.max(ends.to(tl.int32), axis=0) > 0:
            pads = (slot // TARGET_PAGE).to(tl.int64) * target_stride + TARGET_PAGE * (DATA_BYTES + SCALE_BYTES)
            _put(target, pads, ends, 0, 0, PAD, PADS, PAD_ALIGN)


def store_records(records: Tensor, pages: Tensor, slots: Tensor, layout: KVLayout, page_size: int) -> None:
    """Records, last stride 1, into pages; slots contiguous."""
    rows, total = records.shape[0], pages.shape[0] * page_size
    height, warps = STORE_TILE
    last, options = last_of(slots, total, records_kernel)
    sides = (records, replace(layout, inline=True), 1), (pages, layout, page_size)
    with torch.cuda.device_of(pages):
        records_kernel[(triton.cdiv(rows, height),)](
            records, records.stride(0), pages, pages.stride(0), slots, slots if last is None else last, rows, total, PAGE=page_size,
            INLINE=layout.inline, ROWS=height, num_warps=warps, **options, **_tiles(*sides),
        )  # fmt: skip


def move(source: Tensor, target: Tensor, have: KVLayout, want: KVLayout, page_size: int, target_page_size: int) -> None:
    """Records of all slots of `source`, in order, into `target`, whose layout has the same numbers and which has room for them.

    Every byte of `target` is written: 0 in slots that `source` does not have, and behind the slots of a page.
    """
    count, room = source.shape[0] * page_size, target.shape[0] * target_page_size
    height, warps = MOVE_TILE
    pad = target.shape[1] - target_page_size * want.token_bytes
    sides = (source, have, page_size), (target, want, target_page_size)
    with torch.cuda.device_of(source):
        move_kernel[(triton.cdiv(room, height),)](
            source, source.stride(0), target, target.stride(0), count, room, SOURCE_PAGE=page_size, TARGET_PAGE=target_page_size,
            SOURCE_INLINE=have.inline, TARGET_INLINE=want.inline, PAD=pad, PADS=triton.next_power_of_2(max(pad, 1)),
            PAD_ALIGN=math.gcd(16, target.data_ptr(), target.stride(0), target.shape[1], pad), ROWS=height, num_warps=warps,
            **_tiles(*sides),
        )  # fmt: skip


def _tiles(*sides: tuple[Tensor, KVLayout, int]) -> dict[str, int]:
    """How records move: tiles of bytes that are powers of two, the data in two where that is less, and what divides all addresses.

    A side is pages, their layout and their size; records are pages of one slot.
    """
    layout = sides[0][1]
    data, scales = layout.data_bytes, layout.scale_bytes
    large = triton.next_power_of_2(data + 1) // 2  # the largest power of two within
    return {
        "DATA_BYTES": data,
        "SCALE_BYTES": scales,
        "LARGE": large,
        "REST": triton.next_power_of_2(data - large) if data > large else 0,
        "SCALES": triton.next_power_of_2(max(scales, 1)),
        "ALIGN": math.gcd(*(alignment(side, pages) for pages, side, _ in sides)),
        "SCALE_ALIGN": math.gcd(*(scale_alignment(side, pages, size) for pages, side, size in sides)),
    }
