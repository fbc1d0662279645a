"""The k largest of rows of scores, exactly, at any length.

A score becomes an int32 that compares as it does; NaN and minus infinity become MISSING, below all others. A program holds a piece of a row
in registers and finds the k-th largest key by bisection: a count for each step, from the least key to the largest, until exactly k are not
below. Equal keys go to the smaller index. Picks leave in the order of their indices by a sum over those before them. Nothing is rounded
into bins and nothing is added atomically, so results are the same bits in every run.

A longer row is cut into pieces. Each gives its k best with their indices, in order, and the same selection runs over these, in pieces again
where they are too many: the k best of a row are among the k best of its pieces, ties included. A level leaves a quarter and k at most.
The k-th largest key of a sample of the row is no larger than that of the row, so pieces drop what lies below it, and most of them have
nothing left to search.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import widened

MISSING: tl.constexpr = tl.constexpr(-(2**31))
LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)
MOST_PICKS = 8192
PIECE = 8192  # keys of a program, where k is at most a quarter of them
WHOLE = 16384  # keys of a row that one program takes
LANE_KEYS = 1024  # keys of a warp
RUN = 8  # neighbours in a sample: a sector of memory
FILL = 256  # places without a pick that are filled at a time
RANKED = 128  # picks of a program that ranks them


@triton.jit
def ordered_keys(numbers):
    """int32 keys of fp32 scores: -0 and 0 are one key, NaN and minus infinity are MISSING."""
    bits = (numbers + 0.0).to(tl.int32, bitcast=True)
    return tl.where(numbers > float("-inf"), bits ^ ((bits >> 31) & LARGEST), MISSING)


@triton.jit
def _keys(source, at, limit, KEYS: tl.constexpr, NATIVE: tl.constexpr):
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


@triton.jit(do_not_specialize=["stride", "columns", "k"])
def floor_kernel(
    source, stride, starts, ends, floors, columns, k,
    SAMPLE: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A key that the k-th largest of a row is not below: that of runs of neighbours which lie evenly in it, SAMPLE keys."""
    row = tl.program_id(0).to(tl.int64)
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    step = tl.maximum(length // SAMPLE, 1) * RUN
    number = tl.arange(0, SAMPLE)
    at = (number // RUN).to(tl.int64) * step + number % RUN
    floor, _ = threshold(_keys(source + row * stride + first, at, length, KEYS, NATIVE), k)
    tl.store(floors + row, floor)


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


@triton.jit(do_not_specialize=["stride", "columns", "k", "pieces", "table_stride", "requests_there", "table_columns"])
def select_kernel(
    source,  # scores, or int32 keys
    stride,
    names,  # of keys that an earlier level left; their stride is that of the keys
    floors,  # keys below them are not picked, one a row
    starts,
    ends,
    table,
    table_stride,
    requests,
    requests_there,
    table_columns,
    picked,  # int32 [rows, pieces, k]
    picked_keys,
    columns,
    k,
    pieces,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,  # keys that are looked at again at a time
    FILL: tl.constexpr,
    KEYS: tl.constexpr,
    NAMED: tl.constexpr,
    FLOORED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    PAGE: tl.constexpr,  # 0: picks stay indices
    KEEP_KEYS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The k best of a piece of a row, by ascending index."""
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    begin = (program % pieces).to(tl.int64) * PIECE
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    limit = tl.minimum(tl.maximum(length - begin, 0), PIECE).to(tl.int32)
    base = row * stride + first + begin
    here = source + base
    candidates = _keys(here, tl.arange(0, PIECE), limit, KEYS, NATIVE)
    floor = tl.load(floors + row) if FLOORED else MISSING
    bound, ties = threshold(tl.where(candidates < floor, MISSING, candidates), k)
    out = program.to(tl.int64) * k
    earlier = limit * 0  # keys above and, from bit 16 on, equal to the bound: a piece has fewer than 2^16 keys
    placed = limit * 0
    offset = limit * 0
    while offset < limit:
        at = offset + tl.arange(0, TILE)
        keys = _keys(here, at, limit, KEYS, NATIVE)
        keys = tl.where(keys < floor, MISSING, keys)
        above, equal = keys > bound, (keys == bound) & (keys > MISSING)
        counts = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = earlier + tl.cumsum(counts, axis=0) - counts
        equal_before = (before >> 16) & 0xFFFF
        chosen = above | (equal & (equal_before < ties))
        name = tl.load(names + base + at, mask=chosen, other=-1) if NAMED else begin.to(tl.int32) + at
        if PAGE > 0:
            request = tl.load(requests + row).to(tl.int64)
            slot = slots_of(table, table_stride, request, requests_there, table_columns, name, chosen, PAGE)
            chosen = chosen & (slot >= 0)
            place = placed + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
            name = slot.to(tl.int32)
        else:
            place = (before & 0xFFFF) + tl.minimum(equal_before, ties)
        tl.store(picked + out + place, name, mask=chosen)
        if KEEP_KEYS:
            tl.store(picked_keys + out + place, keys, mask=chosen)
        earlier += tl.sum(counts, axis=0)
        placed += tl.sum(chosen.to(tl.int32), axis=0)
        offset += TILE
    rest = placed
    while rest < k:
        at = rest + tl.arange(0, FILL)
        tl.store(picked + out + at, tl.full([FILL], -1, tl.int32), mask=at < k)
        if KEEP_KEYS:
            tl.store(picked_keys + out + at, tl.full([FILL], MISSING, tl.int32), mask=at < k)
        rest += FILL


@triton.jit(do_not_specialize=["k"])
def rank_kernel(
    values, keys, names, result, k, RANKED: tl.constexpr, STEP: tl.constexpr, BY_NAME: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Picks of a row in descending key and ascending name, or by name alone; those without a key last, in their order.

    PLACES: names ascend already, and the places of picks stand for them.
    """
    row = tl.program_id(0).to(tl.int64) * k
    slot = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    live = slot < k
    key = tl.load(keys + row + slot, mask=live, other=MISSING)
    name = slot if PLACES else tl.where(key == MISSING, slot, tl.load(names + row + slot, mask=live, other=0))
    if BY_NAME:
        key = tl.where(key == MISSING, MISSING, 0)
    rank = tl.zeros([RANKED], tl.int32)
    begin = 0
    while begin < k:
        other = begin + tl.arange(0, STEP)
        other_key = tl.load(keys + row + other, mask=other < k, other=MISSING)
        other_name = other
        if not PLACES:
            other_name = tl.where(other_key == MISSING, other, tl.load(names + row + other, mask=other < k, other=0))
        if BY_NAME:
            other_key = tl.where(other_key == MISSING, MISSING, 0)
        ahead = (other_key[None, :] > key[:, None]) | ((other_key[None, :] == key[:, None]) & (other_name[None, :] < name[:, None]))
        rank += tl.sum((ahead & (other < k)[None, :]).to(tl.int32), axis=1)
        begin += STEP
    value = tl.where(key == MISSING, -1, tl.load(values + row + slot, mask=live, other=-1))
    tl.store(result + row + rank, value, mask=live)


@triton.jit(do_not_specialize=["stride", "columns", "k", "table_stride", "requests_there", "table_columns"])
def known_picks_kernel(
    picks, logits, stride, starts, ends, table, table_stride, requests, requests_there, table_columns, values, keys, columns, k,
    RANKED: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_ENDS: tl.constexpr, PAGE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Picks that were made elsewhere, with their keys: MISSING where there is none or its score does not count; and their slots."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * RANKED + tl.arange(0, RANKED)
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    name = tl.load(picks + row * k + slot, mask=slot < k, other=-1)
    there = (name >= 0) & (name < length)
    score = widened(tl.load(logits + (row * stride + first) + name, mask=there, other=float("-inf")), NATIVE)
    key = ordered_keys(score)
    if PAGE > 0:
        request = tl.load(requests + row).to(tl.int64)
        value = slots_of(table, table_stride, request, requests_there, table_columns, name, there, PAGE).to(tl.int32)
        key = tl.where(value >= 0, key, MISSING)
    else:
        value = name
    tl.store(values + row * k + slot, value, mask=slot < k)
    tl.store(keys + row * k + slot, key, mask=slot < k)


@triton.jit(do_not_specialize=["stride", "columns", "into_stride"])
def plain_scores_kernel(logits, stride, result, into_stride, columns, WIDE: tl.constexpr):
    """fp32 scores without NaN and without -0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    score = tl.load(logits + row * stride + column, mask=column < columns, other=0.0)
    tl.store(result + row * into_stride + column, tl.where(score == score, score + 0.0, float("-inf")), mask=column < columns)


def select(
    logits: Tensor, k: int, ends: Tensor | None, starts: Tensor | None, order: str,
    block_table: Tensor | None = None, requests: Tensor | None = None, page_size: int = 0,
) -> Tensor:  # fmt: skip
    """int32 [rows, k], k at most MOST_PICKS, of scores fp32 or bf16, or of int32 keys; neither dimension empty."""
    rows, ranked = len(logits), order == "score"
    picks = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    keys = torch.empty_like(picks) if ranked else picks
    source = logits if logits.stride(1) == 1 else logits.contiguous()
    window = _window(starts, ends, source)
    table = _table(block_table, requests, page_size, source)
    with torch.cuda.device_of(logits):
        source, names, window = _shortened(source, k, window)
        _launch(source, names, None, window, table, picks, keys, k, 1, keep_keys=ranked)
    return _ranked(picks, keys, picks, by_name=False, places=True) if ranked else picks


def _shortened(source: Tensor, k: int, window: dict[str, Any]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Rows that one program can hold: the best of the pieces of longer ones, with their names."""
    names, rows, piece = None, len(source), max(PIECE, triton.next_power_of_2(4 * k))
    floors = _floors(source, k, window) if source.shape[1] > max(WHOLE, piece) else None
    while source.shape[1] > max(WHOLE, piece):
        pieces = triton.cdiv(source.shape[1], piece)
        best = torch.empty(rows, pieces * k, dtype=torch.int32, device=source.device)
        keys = torch.empty_like(best)
        _launch(source, names, floors, window, _table(None, None, 0, source), best, keys, k, pieces, keep_keys=True, piece=piece)
        source, names, window = keys, best, _window(None, None, source)
    return source, names, window


def _floors(source: Tensor, k: int, window: dict[str, Any]) -> Tensor:
    floors = torch.empty(len(source), dtype=torch.int32, device=source.device)
    floor_kernel[(len(source),)](
        source, source.stride(0), floors=floors, columns=source.shape[1], k=k, SAMPLE=WHOLE, RUN=RUN, KEYS=source.dtype == torch.int32,
        NATIVE=compiled(floor_kernel), num_warps=WHOLE // LANE_KEYS, **window,
    )  # fmt: skip
    return floors


def _launch(
    source: Tensor, names: Tensor | None, floors: Tensor | None, window: dict[str, Any], table: dict[str, Any], picks: Tensor, keys: Tensor,
    k: int, pieces: int, *, keep_keys: bool, piece: int = 0,
) -> None:  # fmt: skip
    piece = piece or max(triton.next_power_of_2(source.shape[1]), 256)
    select_kernel[(len(source) * pieces,)](
        source, source.stride(0), source if names is None else names, source if floors is None else floors, picked=picks, picked_keys=keys,
        columns=source.shape[1], k=k, pieces=pieces, PIECE=piece, TILE=max(piece // 4, 256), FILL=FILL, KEYS=source.dtype == torch.int32,
        NAMED=names is not None, FLOORED=floors is not None, KEEP_KEYS=keep_keys, NATIVE=compiled(select_kernel),
        num_warps=min(max(piece // LANE_KEYS, 1), 32), **window, **table,
    )  # fmt: skip


def finish(
    picks: Tensor, logits: Tensor, ends: Tensor | None, starts: Tensor | None, order: str,
    block_table: Tensor | None, requests: Tensor | None, page_size: int,
) -> Tensor:  # fmt: skip
    """Picks int32 [rows, k] in any order, some of which may be of scores that do not count, as `select` gives them."""
    rows, k = picks.shape
    values, keys = torch.empty_like(picks), torch.empty_like(picks)
    with torch.cuda.device_of(logits):
        known_picks_kernel[(rows, triton.cdiv(k, RANKED))](
            picks, logits, logits.stride(0), values=values, keys=keys, columns=logits.shape[1], k=k, RANKED=RANKED,
            NATIVE=compiled(known_picks_kernel), **_window(starts, ends, logits), **_table(block_table, requests, page_size, logits),
        )  # fmt: skip
    return _ranked(values, keys, picks, by_name=order != "score", places=False)


def _ranked(values: Tensor, keys: Tensor, names: Tensor, *, by_name: bool, places: bool) -> Tensor:
    """Picks in their final order. `places`: their names ascend already."""
    rows, k = values.shape
    result = torch.empty_like(values)
    with torch.cuda.device_of(values):
        rank_kernel[(rows, triton.cdiv(k, RANKED))](values, keys, names, result, k, RANKED=RANKED, STEP=32, BY_NAME=by_name, PLACES=places)
    return result


def plain_scores(logits: Tensor) -> Tensor:
    """fp32 scores [rows, n] for kernels that know neither NaN nor that -0 equals 0."""
    result, wide = torch.empty(logits.shape, dtype=torch.float32, device=logits.device), 4096
    with torch.cuda.device_of(logits):
        plain_scores_kernel[(len(logits), triton.cdiv(logits.shape[1], wide))](
            logits, logits.stride(0), result, result.stride(0), logits.shape[1], WIDE=wide, num_warps=8
        )
    return result


def compiled(kernel: object) -> bool:
    """Whether a kernel runs on a device, and not in Triton's interpreter."""
    return isinstance(kernel, triton.JITFunction)


def _window(starts: Tensor | None, ends: Tensor | None, anything: Tensor) -> dict[str, Any]:
    return {
        "starts": anything if starts is None else starts.contiguous(),
        "ends": anything if ends is None else ends.contiguous(),
        "HAS_STARTS": starts is not None,
        "HAS_ENDS": ends is not None,
    }


def _table(block_table: Tensor | None, requests: Tensor | None, page_size: int, anything: Tensor) -> dict[str, Any]:
    if block_table is None or requests is None:
        none = {"table": anything, "table_stride": 0, "requests": anything, "requests_there": 0, "table_columns": 0}
        return {**none, "PAGE": 0}
    plain = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    there, columns = plain.shape
    known = {"table": plain, "table_stride": plain.stride(0), "requests_there": there, "table_columns": columns}
    return {**known, "requests": requests.contiguous(), "PAGE": page_size}
