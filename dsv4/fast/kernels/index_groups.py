"""The k largest of rows that are too long for a program.

A row is read once, for the largest key of each group of neighbours. Its k best are in the k best of its groups, groups ranked by their
largest key and equal ones by their place: each group before that of an entry holds an entry before it. So a program selects groups, and
then entries among those of its groups, none below the largest key of the least of them. Groups too many for a program are selected as
entries are, from groups of groups. The work does not depend on the scores, but for the steps of two bisections, of at most 32 each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import widened
from dsv4.fast.kernels.index_keys import MISSING, compiled, ordered_keys, row_range, slots_of, threshold

MOST_KEYS = 16384  # of a program
LEAST_GROUP = 4
PIECE = 8192  # keys whose groups a program finds
PIECE_WARPS = 8
WARPS = 8  # of a program, at least, unless a warp had fewer than LEAST_KEYS
LEAST_KEYS, MOST_WARP_KEYS = 256, 1024


@triton.jit
def _keys(source, at, here, KEYS: tl.constexpr, ALL: tl.constexpr, NATIVE: tl.constexpr):
    """Keys at some places, MISSING where not `here`. ALL: everything may be read."""
    if KEYS:
        keys = tl.load(source + at) if ALL else tl.load(source + at, mask=here, other=MISSING)
    else:
        numbers = tl.load(source + at) if ALL else tl.load(source + at, mask=here, other=float("-inf"))
        keys = ordered_keys(widened(numbers, NATIVE))
    return tl.where(here, keys, MISSING)


@triton.jit(do_not_specialize=["stride", "columns", "width"])
def maxima_kernel(
    source, stride, starts, ends, maxima, columns, width, PIECE: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr, ALIGNED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The largest key of each group of a window, and MISSING up to `width` groups. ALIGNED: windows begin at multiples of 16 numbers."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1).to(tl.int64) * PIECE
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    base = row * stride + first + begin
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    group = tl.arange(0, PIECE // GROUP)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    into = maxima + row * width + begin // GROUP + group
    here = at < length - begin
    if begin + PIECE <= length:
        tl.store(into, tl.max(_keys(source + base, at, here, KEYS, True, NATIVE), axis=1))
    elif begin < length:
        tl.store(into, tl.max(_keys(source + base, at, here, KEYS, False, NATIVE), axis=1))
    else:
        tl.store(into, tl.full([PIECE // GROUP], MISSING, tl.int32))


@triton.jit
def _best(keys, k):
    """Which of at most 2^15 keys are the k best, and their places among them; the k-th, MISSING if no more are there; how many are best."""
    bound, ties = threshold(keys, k)
    above, equal = keys > bound, (keys == bound) & (keys > MISSING)
    counts = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(counts, axis=0) - counts
    equal_before = before >> 16
    chosen = above | (equal & (equal_before < ties))
    counted = tl.sum(counts, axis=0)
    place = tl.where(chosen, (before & 0xFFFF) + tl.minimum(equal_before, ties), -1).to(tl.int16).to(tl.int32)
    return place, bound, (counted & 0xFFFF) + ties


@triton.jit
def _translated(
    picked, picked_keys, number, found, table, table_stride, request, requests_there, table_columns, PAGE: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
):  # fmt: skip
    """Slots in the place of a row's picks, but for those that have none; how many have one."""
    name = tl.load(picked + number, mask=number < found, other=-1)
    slot = slots_of(table, table_stride, request, requests_there, table_columns, name, number < found, PAGE)
    kept = slot >= 0
    place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
    if KEEP_KEYS:
        keys = tl.load(picked_keys + number, mask=kept, other=MISSING)
    tl.debug_barrier()
    tl.store(picked + place, slot.to(tl.int32), mask=kept)
    if KEEP_KEYS:
        tl.store(picked_keys + place, keys, mask=kept)
    return tl.sum(kept.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["stride", "columns", "k", "table_stride", "requests_there", "table_columns"])
def grouped_kernel(
    source,  # scores, or int32 keys
    stride,
    maxima,  # int32 [rows, MAXIMA]
    groups,  # int32 [rows, k]: given where MAXIMA is 0, otherwise made
    starts,
    ends,
    table,
    table_stride,
    requests,
    requests_there,
    table_columns,
    picked,  # int32 [rows, k]
    picked_keys,
    columns,
    k,
    PICKS: tl.constexpr,  # k, or more
    GROUP: tl.constexpr,
    MAXIMA: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows begin at multiples of 16 numbers, windows with them, and no group goes beyond the last column
    PAGE: tl.constexpr,  # 0: picks stay indices
    KEEP_KEYS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The k best of a row, by ascending index."""
    row = tl.program_id(0).to(tl.int64)
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    limit = length.to(tl.int32)
    number = tl.arange(0, PICKS)
    floor, found = tl.full([], MISSING, tl.int32), k
    if MAXIMA > 0:
        at = tl.arange(0, MAXIMA)
        place, floor, found = _best(tl.load(maxima + row * MAXIMA + at), k)
        tl.store(groups + row * k + place, at, mask=place >= 0)
        tl.debug_barrier()
    group = tl.load(groups + row * k + number, mask=number < found, other=-1)
    base = tl.multiple_of(row * stride, 16) if ALIGNED else row * stride + first
    wide = tl.maximum(group, 0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tile = _keys(source + base, wide, (group >= 0)[:, None] & (wide < limit), KEYS, ALIGNED, NATIVE)
    keys, at = tl.reshape(tl.where(tile < floor, MISSING, tile), [PICKS * GROUP]), tl.reshape(wide, [PICKS * GROUP])
    place, floor, found = _best(keys, k)
    out, out_keys = picked + row * k, picked_keys + row * k
    tl.store(out + place, at, mask=place >= 0)
    if KEEP_KEYS:
        tl.store(out_keys + place, keys, mask=place >= 0)
    if PAGE > 0:
        request = tl.load(requests + row).to(tl.int64)
        tl.debug_barrier()
        found = _translated(out, out_keys, number, found, table, table_stride, request, requests_there, table_columns, PAGE, KEEP_KEYS)
    rest = (number >= found) & (number < k)
    tl.store(out + number, tl.full([PICKS], -1, tl.int32), mask=rest)
    if KEEP_KEYS:
        tl.store(out_keys + number, tl.full([PICKS], MISSING, tl.int32), mask=rest)


def group_of(columns: int, k: int) -> int:
    """Neighbours of a group: groups are at most twice the entries of k of them, if a program can hold these. 1: nothing would be won."""
    picks = places_of(k)
    most = max(MOST_KEYS // picks, 2)
    group = min(LEAST_GROUP, most)
    while group < most and triton.cdiv(columns, group) > 2 * picks * group:
        group *= 2
    return group if columns > picks * group else 1


def places_of(k: int) -> int:
    """A power of two."""
    return max(1 << (k - 1).bit_length(), 16)


def select_grouped(
    source: Tensor, k: int, group: int, window: dict[str, Any], table: dict[str, Any], picks: Tensor, keys: Tensor,
    select_keys: Callable[[Tensor, int], Tensor], *, keep_keys: bool,
) -> None:  # fmt: skip
    """`picks` and `keys` int32 [rows, k] of scores or int32 keys; `select_keys` selects from rows of int32 keys, by ascending index."""
    maxima = _maxima(source, group, window)
    many = maxima.shape[1] > MOST_KEYS
    groups = select_keys(maxima, k) if many else torch.empty_like(picks)
    tops, at_once = 0 if many else maxima.shape[1], places_of(k) * group
    grouped_kernel[(len(source),)](
        source, source.stride(0), maxima, groups, picked=picks, picked_keys=keys, columns=source.shape[1], k=k, PICKS=places_of(k),
        GROUP=group, MAXIMA=tops, KEYS=source.dtype == torch.int32, ALIGNED=_aligned(source, window) and source.shape[1] % group == 0,
        KEEP_KEYS=keep_keys, NATIVE=compiled(grouped_kernel), num_warps=_warps(max(tops, at_once)), **window, **table,
    )  # fmt: skip


def _maxima(source: Tensor, group: int, window: dict[str, Any]) -> Tensor:
    """int32 [rows, width], a power of two; MISSING where no group is."""
    rows, columns = source.shape
    piece = max(PIECE, group)
    width = max(triton.next_power_of_2(triton.cdiv(columns, group)), piece // group)
    maxima = torch.empty(rows, width, dtype=torch.int32, device=source.device)
    maxima_kernel[(rows, width * group // piece)](
        source, source.stride(0), maxima=maxima, columns=columns, width=width, PIECE=piece, GROUP=group, KEYS=source.dtype == torch.int32,
        ALIGNED=_aligned(source, window), NATIVE=compiled(maxima_kernel), num_warps=PIECE_WARPS, **window,
    )  # fmt: skip
    return maxima


def _warps(keys: int) -> int:
    return max(min(keys // LEAST_KEYS, WARPS), keys // MOST_WARP_KEYS)


def _aligned(source: Tensor, window: dict[str, Any]) -> bool:
    return source.stride(0) % 16 == 0 and not window["HAS_STARTS"]
