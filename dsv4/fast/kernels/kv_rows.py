"""Rows of the KV cache inside Triton kernels: where a slot lies, which of several rows keeps it, and a tile of rows quantised and stored.

Everything is bytes at int64 offsets from the first byte of the pages, so pages may begin anywhere and lie any distance apart. A layout
comes as the constexprs of `layout_options`; pages of one size share a kernel, whatever their number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import encode_e2m1, encode_e4m3, group_amax, scales_and_quotients
from dsv4.formats import AMAX_FLOORS, FP4_E4M3_AMAX_FLOOR, KVLayout

KINDS = {("e4m3", "ue8m0"): "fp8", ("e2m1", "e4m3"): "fp4_e4m3", ("e4m3", "unit"): "unit"}
FP4_FLOOR: tl.constexpr = tl.constexpr(FP4_E4M3_AMAX_FLOOR)
MOST_SEARCHED = 2048  # rows of a call that look for later rows of their slot themselves
SEARCH_BLOCK: tl.constexpr = tl.constexpr(128)


def layout_options(layout: KVLayout, page_size: int) -> dict[str, Any]:
    """What a kernel is made for."""
    return {
        "PAGE": page_size,
        "DIMS": layout.dims,
        "QUANTISED": layout.quantised,
        "GROUP": layout.group,
        "KIND": KINDS[layout.numbers, layout.scale],
        "DATA_BYTES": layout.data_bytes,
        "SCALE_BYTES": layout.scale_bytes,
        "INLINE": layout.inline,
    }


def floor_options(layout: KVLayout, amax_floor: str) -> dict[str, Any]:
    """The least byte of a power-of-two scale, a number that varies, and whether byte 0 zeroes its codes, which a kernel is made for."""
    if layout.scale != "ue8m0":
        return {"least": 0, "ZEROES": False}
    floor = AMAX_FLOORS[amax_floor]
    return {"least": floor.least_byte_fp8 or 0, "ZEROES": floor.zero_byte_zeroes_codes}


@triton.jit
def slot_places(slot, stride, PAGE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr):
    """int64 offsets of a slot's data and of its scales; slot >= 0, `stride` bytes from page to page."""
    wide = slot.to(tl.int64)
    page = wide // PAGE
    inner = wide % PAGE
    if INLINE:
        data = page * stride + inner * (DATA_BYTES + SCALE_BYTES)
        scales = data + DATA_BYTES
    else:
        data = page * stride + inner * DATA_BYTES
        scales = page * stride + (PAGE * DATA_BYTES + inner * SCALE_BYTES)
    return data, scales


@triton.jit
def is_last(first, row, slot, slots, last, rows, SEARCH: tl.constexpr):
    """Whether no later row of the call has the slot of `row`: [ROWS], the program's first row being `first`.

    With SEARCH the later ones of `rows` rows are looked at; else `last`, of `last_rows`, knows. Rows without a slot (slot < 0) may give
    either answer.
    """
    if SEARCH:
        later = tl.zeros_like(row)
        begin = first
        while begin < rows:
            other = begin + tl.arange(0, SEARCH_BLOCK)
            theirs = tl.load(slots + other, mask=other < rows, other=-1).to(tl.int64)
            same = (theirs[None, :] == slot.to(tl.int64)[:, None]) & (other[None, :] > row[:, None])
            later = tl.maximum(later, tl.max(same.to(tl.int32), axis=1))
            begin += SEARCH_BLOCK
        answer = later == 0
    else:
        answer = tl.load(last + slot, mask=slot >= 0, other=-1) == row
    return answer


@triton.jit
def store_rows(
    pages,
    data,
    scales,
    keep,
    even,
    odd,
    least,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    QUANTISED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise ROWS rows and store those that `keep` [ROWS] marks: codes and bf16 dims at `data`, scale bytes at `scales`, int64 [ROWS].

    `even` and `odd` [ROWS, DIMS/2] are the dims of even and of odd number: fp32 that hold bf16 numbers. ROWS, DIMS and GROUP are powers of
    two, and a row has at least SCALE_BYTES whole groups of DIMS numbers.
    """
    numbers = tl.interleave(even, odd)  # [ROWS, DIMS]
    column = tl.arange(0, DIMS)[None, :]
    kept = keep[:, None]
    if KIND == "unit":
        tl.store(pages + (data[:, None] + column), encode_e4m3(numbers, NATIVE), mask=kept)
    else:
        GROUPS: tl.constexpr = DIMS // GROUP
        grouped = numbers.reshape(ROWS, GROUPS, GROUP)
        amax = group_amax(grouped, NATIVE)
        stored, _, quotients = scales_and_quotients(grouped, amax, least, FP4_FLOOR, KIND, True, False, ZEROES, True, NATIVE)
        if KIND == "fp8":
            codes = encode_e4m3(quotients, NATIVE).reshape(ROWS, DIMS)
            tl.store(pages + (data[:, None] + column), codes, mask=kept & (column < QUANTISED))
        else:
            low, high = tl.split(encode_e2m1(quotients, "even", "kept").reshape(ROWS, DIMS // 2, 2))
            pair = tl.arange(0, DIMS // 2)[None, :]
            tl.store(pages + (data[:, None] + pair), (low | (high << 4)).to(tl.uint8), mask=kept & (pair < QUANTISED // 2))
        group = tl.arange(0, GROUPS)[None, :]
        bytes = tl.where(group < QUANTISED // GROUP, stored.reshape(ROWS, GROUPS), 0).to(tl.uint8)
        tl.store(pages + (scales[:, None] + group), bytes, mask=kept & (group < SCALE_BYTES))
    if QUANTISED < DIMS:
        half = numbers.to(tl.int32, bitcast=True) >> 16
        halves = tl.interleave(half & 0xFF, (half >> 8) & 0xFF).to(tl.uint8)  # [ROWS, 2 * DIMS]
        byte = tl.arange(0, 2 * DIMS)[None, :]
        tl.store(pages + (data[:, None] + (byte - QUANTISED)), halves, mask=kept & (byte >= 2 * QUANTISED))


@triton.jit(do_not_specialize=["rows", "total"])
def _claim_kernel(slots, last, rows, total, CLAIM: tl.constexpr, ROWS: tl.constexpr):
    """Mark the slots of all rows with -1, or claim each for the last of its rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    present = (slot >= 0) & (slot < total)
    if CLAIM:
        tl.atomic_max(last + slot, row, mask=present)
    else:
        tl.store(last + slot, tl.zeros_like(row) - 1, mask=present)


def last_rows(slots: Tensor, total: int) -> Tensor | None:
    """int32 [total]: the last row of each slot that `slots` [rows] names, anything elsewhere; None where rows are few enough to search.

    Two launches and 4 bytes for each slot of the cache, of which those of named slots alone are touched.
    """
    rows = slots.shape[0]
    if rows <= MOST_SEARCHED:
        return None
    last = torch.empty(total, dtype=torch.int32, device=slots.device)
    for claim in (False, True):
        _claim_kernel[(triton.cdiv(rows, 256),)](slots, last, rows, total, CLAIM=claim, ROWS=256)
    return last
