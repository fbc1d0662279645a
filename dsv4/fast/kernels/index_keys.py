"""Scores as keys that compare as they do, the k-th largest of them, and what entries stand for in the pages of a request."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import widened

MISSING: tl.constexpr = tl.constexpr(-(2**31))
LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def ordered_keys(numbers):
    """int32 keys of fp32 scores: -0 and 0 are one key, NaN and minus infinity are MISSING."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    return tl.where(numbers > float("-inf"), bits ^ ((bits >> 31) & LARGEST), MISSING)


@triton.jit
def keys_at(source, at, limit, KEYS: tl.constexpr, NATIVE: tl.constexpr):
    """Keys at some places, MISSING from `limit` on."""
    here = at < limit
    if KEYS:
        keys = tl.load(source + at, mask=here, other=MISSING)
    else:
        keys = ordered_keys(widened(tl.load(source + at, mask=here, other=float("-inf")), NATIVE))
    return keys


@triton.jit
def row_range(starts, ends, row, columns, HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr):
    """First column of a row's window, and how many there are, int64, within the row."""
    first = tl.zeros([], tl.int64)
    past = first + columns
    if HAS_ENDS:
        past = tl.minimum(tl.maximum(tl.load(ends + row).to(tl.int64), 0), past)
    if HAS_STARTS:
        first = tl.minimum(tl.maximum(tl.load(starts + row).to(tl.int64), 0), first + columns)
    return first, tl.maximum(past - first, 0)


@triton.jit
def threshold(keys, k):
    """The k-th largest key, and how many keys equal to it are picked; MISSING and 0 where no more than k are there."""
    there = tl.sum((keys > MISSING).to(tl.int32), axis=0)
    low = tl.min(tl.where(keys > MISSING, keys, LARGEST), axis=0)
    high = tl.max(keys, axis=0)
    if there <= k:
        low = tl.full([], MISSING, tl.int32)
        high = tl.full([], MISSING, tl.int32)
    while low < high:  # at least k keys are not below low, fewer than k are above high
        middle = (low | high) - ((low ^ high) >> 1)
        count = tl.sum((keys >= middle).to(tl.int32), axis=0)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
        low = tl.where(count >= k, middle, low)
    above = tl.sum((keys > low).to(tl.int32), axis=0)
    return low, tl.where(there <= k, 0, k - above)


@triton.jit
def slots_of(table, table_stride, request, requests_there, table_columns, name, chosen, PAGE: tl.constexpr):
    """int64 slots of entries of a request, -1 where there is none or it does not fit int32. `name` int32, `request` int64."""
    column = name // PAGE
    known = chosen & (request >= 0) & (request < requests_there) & (column < table_columns)
    place = tl.where((request >= 0) & (request < requests_there), request, 0) * table_stride
    page = tl.load(table + (place + column), mask=known, other=-1).to(tl.int64)
    page = tl.where(page > LARGEST, -1, page)
    slot = page * PAGE + (name - column * PAGE)
    return tl.where(known & (page >= 0) & (slot <= LARGEST), slot, -1)


def compiled(kernel: object) -> bool:
    """Whether a kernel runs on a device, and not in Triton's interpreter."""
    return isinstance(kernel, triton.JITFunction)
