"""Rows of the KV cache inside Triton kernels: where a slot lies, which of several rows keeps it, and a tile of rows quantised and stored.

Everything is bytes at int64 offsets from the first byte of the pages, so pages may begin anywhere and lie any distance apart. A layout
comes as the constexprs of `layout_options`; pages of one size share a kernel, whatever their number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import INFINITY, encode_e2m1, encode_e4m3, group_amax, pairs_e2m1, scales_and_quotients
from dsv4.fast.kernels.codec_pairs import INFINITY_BF16, amax_of_pairs, encode_pairs, scale_of_pairs
from dsv4.fast.kernels.rows import pack_pairs
from dsv4.formats import AMAX_FLOORS, FP4_E4M3_AMAX_FLOOR, KVLayout

KINDS = {("e4m3", "ue8m0"): "fp8", ("e2m1", "e4m3"): "fp4_e4m3", ("e4m3", "unit"): "unit"}
FP4_FLOOR: tl.constexpr = tl.constexpr(FP4_E4M3_AMAX_FLOOR)
MOST_SEARCHED = 2048  # rows of a call that look for later rows of their slot themselves
CLAIM_TILE = (64, 2)  # rows of a program of the claims, and its warps
SEARCH_BLOCK: tl.constexpr = tl.constexpr(128)
EARLY_FROM = (9, 0)


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


def alignment(layout: KVLayout, pages: Tensor) -> int:
    """The largest power of two up to 16 that divides the address of every slot's data in `pages`, and of its bf16 dims."""
    between = pages.stride(0) if pages.shape[0] > 1 else 0
    return math.gcd(16, pages.data_ptr(), between, layout.token_bytes if layout.inline else layout.data_bytes, layout.quantised)


def scale_alignment(layout: KVLayout, pages: Tensor, page_size: int) -> int:
    """The same of every slot's scales."""
    between = pages.stride(0) if pages.shape[0] > 1 else 0
    if layout.inline:
        return math.gcd(16, pages.data_ptr(), between, layout.token_bytes, layout.data_bytes)
    return math.gcd(16, pages.data_ptr(), between, page_size * layout.data_bytes, layout.scale_bytes)


@triton.jit
def slot_places(slot, stride, PAGE: tl.constexpr, DATA_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr):
    """int64 offsets of a slot's data and of its scales; slot >= 0, int32 or int64, `stride` bytes from page to page."""
    number = slot.to(tl.uint32) if slot.dtype == tl.int32 else slot.to(tl.uint64)  # their divisions are shorter
    page = number // PAGE
    inner = (number - page * PAGE).to(tl.int64)
    begin = page.to(tl.int64) * stride
    if INLINE:
        data = begin + inner * (DATA_BYTES + SCALE_BYTES)
        scales = data + DATA_BYTES
    else:
        data = begin + inner * DATA_BYTES
        scales = begin + (PAGE * DATA_BYTES + inner * SCALE_BYTES)
    return data, scales


@triton.jit
def within(base, offsets, ALIGN: tl.constexpr, MOST: tl.constexpr):
    """base + offsets [ROWS, halves, n], for accesses of MOST bytes or of ALIGN, which divides the address of each; 0: as Triton finds."""
    pointers = base + offsets
    if ALIGN > 0:
        pointers = tl.multiple_of(pointers, [1, 1, ALIGN if ALIGN < MOST else MOST])
    return pointers


@triton.jit
def flat(x, ROWS: tl.constexpr, HALVES: tl.constexpr, LANES: tl.constexpr):
    """x [ROWS, HALVES, LANES], one number a thread and row and half, as a vector for a load or store of single bytes.

    Triton gives consecutive numbers of a vector to consecutive threads, and with halves outermost these are the threads that have them in
    the tile, so that nothing moves between threads.
    """
    return tl.permute(x, (1, 0, 2)).reshape(HALVES * ROWS * LANES)


@triton.jit
def unflat(x, ROWS: tl.constexpr, HALVES: tl.constexpr, LANES: tl.constexpr):
    """A vector of `flat` as it was."""
    return tl.permute(x.reshape(HALVES, ROWS, LANES), (1, 0, 2))


@triton.jit
def slots_of(slots, row, rows, total):
    """Slots of rows, -1 where there is none; of the type of `total`, which holds them."""
    slot = tl.load(slots + row, mask=row < rows, other=-1)
    return tl.where((slot >= 0) & (slot < total), slot, -1).to(total.dtype)


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
def store_tile(
    pages,
    data,
    scales,
    keep,
    even,
    odd,
    least,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    QUANTISED: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Quantise a tile of rows and store what `keep` [ROWS] marks: codes and bf16 dims at `data`, scale bytes at `scales`, int64 [ROWS].

    `even` and `odd` [ROWS, HALVES, COLUMNS/2] are the dims of even and of odd number, fp32 that hold bf16 numbers, from dim FIRST on, which
    begins a group; those from END on are left out. A thread has LANE neighbouring dims of a row, a divisor of GROUP, and with ALIGN, of
    `alignment`, stores them at once; 0 lets Triton choose. COLUMNS and GROUP are powers of two.
    """
    half = tl.arange(0, HALVES)[None, :, None]
    column = FIRST + half * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    pair = FIRST // 2 + half * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, None, :]
    place, kept = data[:, None, None], keep[:, None, None]
    CODES: tl.constexpr = QUANTISED if QUANTISED < END else END  # the first dim without a code
    if KIND == "unit":
        codes = encode_e4m3(tl.interleave(even, odd), NATIVE)
        tl.store(within(pages, place + column, ALIGN, LANE), codes, mask=kept & (column < CODES))
    elif FIRST < CODES and KIND == "fp4_e4m3" and NATIVE and ALIGN >= 4 and LANE == 8:
        stored = _store_fp4_words(pages, place, kept, even, odd, HALVES, ROWS, COLUMNS, FIRST, CODES, GROUP, ALIGN)
        _store_scales(pages, scales, kept, stored, HALVES, ROWS, COLUMNS, LANE, FIRST, END, QUANTISED, GROUP, SCALE_BYTES)
    elif FIRST < CODES:
        GROUPS: tl.constexpr = COLUMNS // GROUP
        grouped = tl.interleave(even, odd).reshape(ROWS * HALVES, GROUPS, GROUP)
        amax = group_amax(grouped, NATIVE)
        stored, scale, quotients = scales_and_quotients(grouped, amax, least, FP4_FLOOR, KIND, True, False, ZEROES, True, NATIVE)
        if KIND == "fp8":
            codes = encode_e4m3(quotients, NATIVE).reshape(ROWS, HALVES, COLUMNS)
            tl.store(within(pages, place + column, ALIGN, LANE), codes, mask=kept & (column < CODES))
        else:
            if NATIVE:
                scaled = tl.clamp(grouped * (0.00006103515625 / scale), -0.0003662109375, 0.0003662109375)  # 2^-14, 6 * 2^-14
                codes = pairs_e2m1(scaled, ROWS * HALVES, GROUPS, GROUP, "even") & tl.where(amax >= INFINITY, 0, 0xFF)
            else:
                low, high = tl.split(encode_e2m1(quotients, "even", "kept").reshape(ROWS * HALVES, GROUPS, GROUP // 2, 2))
                codes = low | (high << 4)
            codes = codes.reshape(ROWS, HALVES, COLUMNS // 2).to(tl.uint8)
            tl.store(within(pages, place + pair, ALIGN, LANE // 2), codes, mask=kept & (pair < CODES // 2))
        _store_scales(pages, scales, kept, stored, HALVES, ROWS, COLUMNS, LANE, FIRST, END, QUANTISED, GROUP, SCALE_BYTES)
    elif FIRST // GROUP < SCALE_BYTES:
        padding = tl.zeros([ROWS * HALVES, COLUMNS // GROUP, 1], tl.int32)
        _store_scales(pages, scales, kept, padding, HALVES, ROWS, COLUMNS, LANE, FIRST, END, QUANTISED, GROUP, SCALE_BYTES)
    if QUANTISED < END:
        rest = kept & (pair >= QUANTISED // 2) & (pair < END // 2)
        if ALIGN >= 4:
            words = pages.to(tl.pointer_type(tl.int32))
            tl.store(within(words, (place - QUANTISED) // 4 + pair, ALIGN, 2 * LANE), pack_pairs(even, odd), mask=rest)
        else:
            bits = tl.interleave(even, odd).to(tl.int32, bitcast=True)
            bytes = tl.interleave((bits >> 16) & 0xFF, (bits >> 24) & 0xFF).to(tl.uint8)
            byte = 2 * FIRST + half * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)[None, None, :]
            tl.store(pages + (place + (byte - QUANTISED)), bytes, mask=kept & (byte >= 2 * QUANTISED) & (byte < 2 * END))


@triton.jit
def _store_fp4_words(
    pages, place, kept, even, odd, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr,
    CODES: tl.constexpr, GROUP: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Store the E2M1 codes of a tile in words of eight; the bytes of its scales, int32 [ROWS * HALVES, groups, 1]. From SM89 on."""
    EIGHTS: tl.constexpr = COLUMNS // 8
    first, second = tl.split(pack_pairs(even, odd).reshape(ROWS * HALVES * COLUMNS // GROUP, GROUP // 8, 2, 2))
    a, c = tl.split(first)
    b, d = tl.split(second)
    largest = amax_of_pairs(a, b, c, d)
    amax = tl.max(tl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF), axis=1, keep_dims=True)
    stored, inverse, rest, _ = scale_of_pairs(amax, 0, FP4_FLOOR, "fp4_e4m3", True)
    codes = tl.where(amax < INFINITY_BF16, encode_pairs(a, b, c, d, inverse, rest, "fp4_e4m3", "even", "kept"), 0)
    word = FIRST // 8 + tl.arange(0, HALVES)[None, :, None] * EIGHTS + tl.arange(0, EIGHTS)[None, None, :]
    words = within(pages.to(tl.pointer_type(tl.int32)), place // 4 + word, ALIGN, 4)
    tl.store(words, codes.reshape(ROWS, HALVES, EIGHTS), mask=kept & (word < CODES // 8))
    return stored.reshape(ROWS * HALVES, COLUMNS // GROUP, 1)


@triton.jit
def _store_scales(
    pages, scales, kept, stored, HALVES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, FIRST: tl.constexpr,
    END: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr, SCALE_BYTES: tl.constexpr,
):  # fmt: skip
    """The scale bytes of a tile, `stored` int32 [ROWS * HALVES, groups, 1]; 0 behind the last group.

    Of the threads that share one, the first stores it.
    """
    LANES: tl.constexpr = COLUMNS // LANE
    each = tl.broadcast_to(stored, (ROWS * HALVES, COLUMNS // GROUP, GROUP // LANE)).reshape(ROWS, HALVES, LANES)
    column = FIRST + tl.arange(0, HALVES)[None, :, None] * COLUMNS + tl.arange(0, LANES)[None, None, :] * LANE
    group = column // GROUP
    stores = kept & (column % GROUP == 0) & (column < END) & (group < SCALE_BYTES)
    bytes = tl.where(column < QUANTISED, each, 0).to(tl.uint8)
    place = flat(scales[:, None, None] + group, ROWS, HALVES, LANES)
    tl.store(pages + place, flat(bytes, ROWS, HALVES, LANES), mask=flat(stores, ROWS, HALVES, LANES))


@triton.jit
def store_rows(
    pages, data, scales, keep, even, odd, least, ROWS: tl.constexpr, DIMS: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, SCALE_BYTES: tl.constexpr, ZEROES: tl.constexpr, NATIVE: tl.constexpr, ALIGN: tl.constexpr = 0,
):  # fmt: skip
    """`store_tile` of whole rows: `even` and `odd` [ROWS, DIMS/2]; DIMS a power of two, of SCALE_BYTES groups or more."""
    store_tile(
        pages, data, scales, keep, even[:, None, :], odd[:, None, :], least, 1, ROWS, DIMS, 8, 0, DIMS, QUANTISED, GROUP, KIND, SCALE_BYTES,
        ZEROES, NATIVE, ALIGN,
    )  # fmt: skip


@triton.jit
def _stands(seen, row, slot, slots, rows, asks):
    """Whether `seen` is a claim of `slot` by `row` or a later one, of rows that ask."""
    later = asks & (seen >= row) & (seen < rows)
    theirs = tl.load(slots + seen, mask=later, other=-1)
    return later & (theirs == slot)


@triton.jit(do_not_specialize=["rows", "total"])
def claim_kernel(slots, last, rows, total, EARLY: tl.constexpr, ROWS: tl.constexpr):
    """Write the last row of each slot that is named to `last`, whatever it holds.

    A number v in last[s] *counts* if 0 <= v < rows and slots[v] = s. A row r of s replaces what does not count, and any row before r, by
    compare-and-swap, and stops when it has, or sees a row from r on that counts. No number that counts is replaced by a lesser one or by
    one that does not count. So last[s], from when r stops, counts and is r or more, and in the end it is the last row of s: no other
    number that counts is larger. Numbers that were there by chance change nothing of this, nor does the order of rows, and a swap that
    fails means that another one succeeded. A row whose next one has the same slot is not the last, and makes no claim.

    The compare-and-swap has no mask: where there is nothing to claim it replaces a number by itself. Programs and their rows take the last
    rows first, which leaves less to do for the others. EARLY: the next kernel may begin now, and waits before it reads `last`.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = rows - 1 - (tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    slot = tl.load(slots + row, mask=row >= 0, other=-1)
    after = tl.load(slots + row + 1, mask=(row >= 0) & (row < rows - 1), other=-1)
    claims = (slot >= 0) & (slot < total) & (after != slot)
    seen = tl.load(last + slot, mask=claims, other=0, volatile=True)
    unsettled = claims & (_stands(seen, row, slot, slots, rows, claims) == 0)
    place = tl.where(claims, slot, tl.maximum(row, 0) % total)
    while tl.max(unsettled.to(tl.int32), axis=0) > 0:
        found = tl.atomic_cas(last + place, seen, tl.where(unsettled, row, seen), sem="relaxed")
        failed = unsettled & (found != seen)
        seen = found
        unsettled = failed & (_stands(seen, row, slot, slots, rows, failed) == 0)


def begins_early(kernel: object, device: torch.device) -> bool:
    """Whether a kernel may begin before the one ahead of it ends: from SM90 on."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled and device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_FROM


def last_rows(slots: Tensor, total: int) -> Tensor | None:
    """int32 [total]: the last row of each slot that `slots` [rows] names, anything elsewhere; None where rows are few enough to search.

    One launch and 4 bytes for each slot of the cache, which are not cleared. Where kernels begin early, the next one may: it begins as any
    other does, or with `launch_pdl=True`, and then waits by `gdc_wait` before it reads the result.
    """
    rows = slots.shape[0]
    if rows <= MOST_SEARCHED:
        return None
    last = torch.empty(total, dtype=torch.int32, device=slots.device)
    claim(slots, last)
    return last


def claim(slots: Tensor, last: Tensor) -> None:
    """Write the last row of each slot that `slots` names to `last`, int32, which may hold anything."""
    height, warps = CLAIM_TILE
    early = begins_early(claim_kernel, slots.device)
    with torch.cuda.device_of(slots):
        claim_kernel[(triton.cdiv(slots.shape[0], height),)](
            slots, last, slots.shape[0], last.shape[0], EARLY=early, ROWS=height, num_warps=warps
        )


def last_of(slots: Tensor | None, total: int, kernel: object) -> tuple[Tensor | None, dict[str, Any]]:
    """What `last_rows` says, and the options of the kernel that reads it."""
    last = None if slots is None else last_rows(slots, total)
    early = last is not None and begins_early(kernel, last.device)
    return last, {"SEARCH": last is None, "EARLY": early, **({"launch_pdl": True} if early else {})}
