"""The k largest of rows of scores, exactly, at any length up to 2^28.

A score becomes an int32 that compares as it does; NaN and minus infinity become MISSING, below all others. A program holds a row in
registers and finds the k-th largest key by bisection: a count for each step, from the least key to the largest, until exactly k are not
below. Equal keys go to the smaller index. Picks leave in the order of their indices by a sum over those before them. Nothing is rounded
into bins and nothing is added atomically, so results are the same bits in every run. Longer rows: `index_groups`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import widened
from dsv4.fast.kernels.index_groups import group_of, select_grouped
from dsv4.fast.kernels.index_keys import LARGEST as LARGEST
from dsv4.fast.kernels.index_keys import MISSING, keys_at, slots_of, threshold
from dsv4.fast.kernels.index_keys import compiled as compiled
from dsv4.fast.kernels.index_keys import ordered_keys as ordered_keys
from dsv4.fast.kernels.index_keys import row_range as row_range

MOST_PICKS = 8192
WHOLE = 4096  # keys of a row that is not grouped, unless its groups were no fewer
WARP_KEYS = 1024
REGISTERS, OF_KEYS = 64, 8192  # of a thread, for four programs of so many keys side by side
FILL = 256  # places without a pick that are filled at a time
RANKED = 128  # picks of a program that ranks them


@triton.jit(do_not_specialize=["stride", "columns", "k", "table_stride", "requests_there", "table_columns"])
def select_kernel(
    source,  # scores, or int32 keys
    stride,
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
    MOST: tl.constexpr,  # columns, or more
    TILE: tl.constexpr,  # keys that are looked at again at a time
    FILL: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    PAGE: tl.constexpr,  # 0: picks stay indices
    KEEP_KEYS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The k best of a row, by ascending index."""
    row = tl.program_id(0).to(tl.int64)
    first, length = row_range(starts, ends, row, columns, HAS_STARTS, HAS_ENDS)
    limit = length.to(tl.int32)
    here = source + (row * stride + first)
    bound, ties = threshold(keys_at(here, tl.arange(0, MOST), limit, KEYS, NATIVE), k)
    out = row * k
    earlier = limit * 0  # keys above and, from bit 16 on, equal to the bound: there are fewer than 2^16 keys
    placed = limit * 0
    offset = limit * 0
    while offset < limit:
        at = offset + tl.arange(0, TILE)
        keys = keys_at(here, at, limit, KEYS, NATIVE)
        above, equal = keys > bound, (keys == bound) & (keys > MISSING)
        counts = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = earlier + tl.cumsum(counts, axis=0) - counts
        equal_before = (before >> 16) & 0xFFFF
        chosen = above | (equal & (equal_before < ties))
        name = at
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
    window, table = _window(starts, ends, source), _table(block_table, requests, page_size, source)
    group = group_of(source.shape[1], k) if source.shape[1] > WHOLE else 1
    with torch.cuda.device_of(logits):
        if group > 1:
            select_grouped(source, k, group, window, table, picks, keys, _select_keys, keep_keys=ranked)
        else:
            most = max(triton.next_power_of_2(source.shape[1]), 256)
            select_kernel[(rows,)](
                source, source.stride(0), picked=picks, picked_keys=keys, columns=source.shape[1], k=k, MOST=most, TILE=max(most // 4, 256),
                FILL=FILL, KEYS=source.dtype == torch.int32, KEEP_KEYS=ranked, NATIVE=compiled(select_kernel),
                num_warps=min(max(most // WARP_KEYS, 1), 32), maxnreg=REGISTERS if most <= OF_KEYS else None, **window, **table,
            )  # fmt: skip
    return _ranked(picks, keys, picks, by_name=False, places=True) if ranked else picks


def _select_keys(keys: Tensor, k: int) -> Tensor:
    return select(keys, k, None, None, "index")


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
