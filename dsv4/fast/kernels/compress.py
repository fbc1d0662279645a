"""Entries of a compressor in one launch, from the window to the cache, and the state in a second.

A program makes one entry, all of its channels. It finds its request by adding up what the requests before it complete, takes the window's
tokens from the call or from the request's ring, and pools them in one pass, fp64 all the way: sums are rescaled when a larger score turns
up. Numbers come and go as int64 words of two neighbours, and are held as even and odd channels: so a pair is ready to be turned. Norm,
rotation and quantisation follow where they are asked for. An entry's bits depend on its window alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.compressor_checks import LARGEST_START
from dsv4.fast.kernels.codec_bits import has_native_e4m3
from dsv4.fast.kernels.kv_rows import MOST_SEARCHED, floor_options, is_last, last_rows, layout_options, slot_places, store_rows
from dsv4.fast.kernels.rows import (
    normalise_pairs,
    pack_pairs,
    rotate_pairs,
    to_bf16,
    unpack_wide_pairs,
    weight_pairs,
    weight_words,
    wide_words,
    words,
)
from dsv4.formats import KVLayout

LARGEST: tl.constexpr = tl.constexpr(LARGEST_START)
REQUESTS: tl.constexpr = tl.constexpr(128)  # looked at together
TILE = 2048  # words of a tile of the window
ANY_STATE = 2**62  # how many states there are, where it does not matter

NO_LAYOUT = {
    "PAGE": 1, "DIMS": 1, "QUANTISED": 1, "GROUP": 1, "KIND": "", "DATA_BYTES": 1, "SCALE_BYTES": 1, "INLINE": False, "ZEROES": False
}  # fmt: skip


@triton.jit
def _span(b, starts, cu_seqlens, state_rows, requests, tokens, states, HAS_ROWS: tl.constexpr):
    """First position, first row, number of tokens and state of requests; 0 tokens where a request is idle or makes no sense."""
    here = b < requests
    start = tl.load(starts + b, mask=here, other=-1).to(tl.int64)
    begin = tl.load(cu_seqlens + b, mask=here, other=0).to(tl.int64)
    end = tl.load(cu_seqlens + b + 1, mask=here, other=0).to(tl.int64)
    state = tl.load(state_rows + b, mask=here, other=-1).to(tl.int64) if HAS_ROWS else b.to(tl.int64)
    live = here & (start >= 0) & (start <= LARGEST) & (begin >= 0) & (begin <= end) & (end <= tokens) & (state >= 0) & (state < states)
    return tl.where(live, start, 0), begin, tl.where(live, end - begin, 0), state


@triton.jit
def _locate(i, starts, cu_seqlens, state_rows, requests, tokens, states, ratio, ring, OF_STATE: tl.constexpr, HAS_ROWS: tl.constexpr):
    """The request that thing number i is of, its number among the request's, and how many things there are.

    Things are entries that requests complete, or with OF_STATE tokens that go into their rings.
    """
    request = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    base = tl.zeros([], tl.int32)
    while base < requests:
        b = base + tl.arange(0, REQUESTS)
        start, _, count, _ = _span(b, starts, cu_seqlens, state_rows, requests, tokens, states, HAS_ROWS)
        things = tl.minimum(count, ring) if OF_STATE else (start + count) // ratio - start // ratio
        passed = (total + tl.cumsum(things, 0) <= i) & (b < requests)
        request += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, things, 0), 0)
        total += tl.sum(things, 0)
        base += REQUESTS
    return request, i - before, total


@triton.jit(do_not_specialize=["requests", "tokens", "states", "ratio"])
def plan_rows(
    starts, cu_seqlens, state_rows, slots, out_requests, out_entries, out_slots, requests, tokens, states, ratio,
    HAS_ROWS: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    """Request and entry of a row of the plan, -1 where it is left over; its slot, -1 likewise."""
    i = tl.program_id(0).to(tl.int64)
    request, number, total = _locate(i, starts, cu_seqlens, state_rows, requests, tokens, states, ratio, 0, False, HAS_ROWS)
    live = i < total
    start = tl.load(starts + request, mask=live, other=0)
    tl.store(out_requests + i, tl.where(live, request, -1))
    tl.store(out_entries + i, tl.where(live, start // ratio + number, -1))
    if HAS_SLOTS:
        tl.store(out_slots + i, tl.load(slots + i, mask=live, other=-1).to(tl.int64))


@triton.jit
def _more(value, score, top, total, whole):
    """Running maximum, sum of weights and weighted sum [1, PAIRS] with a tile of terms [STEP, PAIRS] added, all fp64."""
    larger = tl.maximum(top, tl.max(score, axis=0, keep_dims=True))
    base = tl.where(larger == float("-inf"), 0.0, larger)  # nothing but minus infinity so far: weights of 0
    weight = tl.exp(score - base)
    shrunk = tl.exp(top - base)
    total = total * shrunk + tl.sum(weight, axis=0, keep_dims=True)
    return larger, total, whole * shrunk + tl.sum(weight * value, axis=0, keep_dims=True)


@triton.jit
def _pool(
    values, scores, state, ape, begin, start, row_of_state, position, ring,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr, HAS_APE: tl.constexpr,
):  # fmt: skip
    """Even and odd channels [1, PAIRS] of the entry whose own tokens begin at `position`: fp64, not rounded, 0 behind the last channel."""
    BACK: tl.constexpr = RATIO if OVERLAP else 0
    WORDS: tl.constexpr = DIM if OVERLAP else DIM // 2  # of a token's values
    pair = tl.arange(0, PAIRS)[None, :]
    channel = pair < DIM // 2
    top_even = tl.full([1, PAIRS], float("-inf"), tl.float64)
    top_odd = top_even
    total_even = tl.zeros([1, PAIRS], tl.float64)
    total_odd, whole_even, whole_odd = total_even, total_even, total_even
    for base in range(0, BACK + RATIO, STEP):
        j = base + tl.arange(0, STEP)[:, None]
        at = position - BACK + j
        there = (j < BACK + RATIO) & (at >= 0)
        fresh = there & (at >= start)
        kept = there & (at < start)
        column = tl.where(j < BACK, 0, BACK // RATIO * (DIM // 2)) + pair
        new = (begin + at - start) * WORDS + column
        old = (row_of_state * ring + at % tl.maximum(ring, 1)) * (2 * WORDS) + column
        value = tl.load(values + new, mask=fresh & channel, other=0) | tl.load(state + old, mask=kept & channel, other=0)
        value_even, value_odd = unpack_wide_pairs(value)
        if BACK + RATIO == 1:
            whole_even, whole_odd = value_even.to(tl.float64), value_odd.to(tl.float64)
        else:
            score = tl.load(scores + new, mask=fresh & channel, other=0) | tl.load(state + old + WORDS, mask=kept & channel, other=0)
            score_even, score_odd = unpack_wide_pairs(score)
            if HAS_APE:
                bias_even, bias_odd = unpack_wide_pairs(tl.load(ape + (j % RATIO) * WORDS + column, mask=there & channel, other=0))
                score_even += bias_even
                score_odd += bias_odd
            score_even = tl.where(there, score_even, float("-inf")).to(tl.float64)
            score_odd = tl.where(there, score_odd, float("-inf")).to(tl.float64)
            top_even, total_even, whole_even = _more(value_even.to(tl.float64), score_even, top_even, total_even, whole_even)
            top_odd, total_odd, whole_odd = _more(value_odd.to(tl.float64), score_odd, top_odd, total_odd, whole_odd)
    if BACK + RATIO > 1:
        whole_even, whole_odd = whole_even / total_even, whole_odd / total_odd
    return tl.where(channel, whole_even, 0.0), tl.where(channel, whole_odd, 0.0)


@triton.jit(do_not_specialize=["requests", "tokens", "states", "ring", "rows", "places", "slots_there", "least"])
def entry_rows(
    values, scores, state, ape, starts, cu_seqlens, state_rows, out_requests, out_entries, result, weight, table, pages, slots, last,
    requests, tokens, states, ring, rows, eps, places, slots_there, stride, least,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr, STEP: tl.constexpr,
    HAS_APE: tl.constexpr, HAS_ROWS: tl.constexpr, STORED: tl.constexpr, R: tl.constexpr, SEARCH: tl.constexpr, NATIVE: tl.constexpr,
    PAGE: tl.constexpr, DIMS: tl.constexpr, QUANTISED: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr, INLINE: tl.constexpr, ZEROES: tl.constexpr,
):  # fmt: skip
    """A row of the plan: its request and entry, and its pooled channels; or, STORED, its latent, and its record in the pages."""
    first = tl.program_id(0)
    i = first.to(tl.int64)
    request, number, total = _locate(i, starts, cu_seqlens, state_rows, requests, tokens, states, RATIO, ring, False, HAS_ROWS)
    pair = tl.arange(0, PAIRS)[None, :]
    channel = pair < DIM // 2
    if i >= total:
        tl.store(out_requests + i, -1)
        tl.store(out_entries + i, -1)
        tl.store(result + i * (DIM // 2) + pair, tl.zeros([1, PAIRS], tl.int32), mask=channel)
        return
    start, begin, _, row_of_state = _span(request, starts, cu_seqlens, state_rows, requests, tokens, states, HAS_ROWS)
    entry = start // RATIO + number
    tl.store(out_requests + i, request)
    tl.store(out_entries + i, entry)
    position = entry * RATIO
    even, odd = _pool(values, scores, state, ape, begin, start, row_of_state, position, ring, RATIO, OVERLAP, DIM, PAIRS, STEP, HAS_APE)
    even, odd = to_bf16(even), to_bf16(odd)
    if STORED:
        weight_even, weight_odd = weight_pairs(weight, pair, channel)
        even, odd = normalise_pairs(even, odd, weight_even, weight_odd, DIM, eps, True)
    tl.store(result + i * (DIM // 2) + pair, pack_pairs(even, odd), mask=channel)
    if STORED:
        present = position < places
        turned = pair >= (DIM - R) // 2
        angle = table + tl.where(present, position, 0) * R + (pair - (DIM - R) // 2)
        cosines = tl.load(angle, mask=present & turned & channel, other=1.0)
        sines = tl.load(angle + R // 2, mask=present & turned & channel, other=0.0)
        turned_even, turned_odd = rotate_pairs(even, odd, cosines, sines, False)
        even = tl.where(present, tl.where(turned, turned_even, even), 0.0)
        odd = tl.where(present, tl.where(turned, turned_odd, odd), 0.0)
        row = first + tl.arange(0, 1)
        slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
        slot = tl.where((slot >= 0) & (slot < slots_there), slot, -1)
        ends = tl.minimum(total, rows).to(tl.int32)
        keep = (slot >= 0) & is_last(first, row, slot, slots, last, ends, SEARCH)
        data, scales = slot_places(tl.maximum(slot, 0), stride, PAGE, DATA_BYTES, SCALE_BYTES, INLINE)
        store_rows(pages, data, scales, keep, even, odd, least, 1, DIMS, QUANTISED, GROUP, KIND, SCALE_BYTES, ZEROES, NATIVE)


@triton.jit(do_not_specialize=["requests", "tokens", "states", "ring", "programs"])
def state_tokens(
    values, scores, state, starts, cu_seqlens, state_rows, requests, tokens, states, ring, programs,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """The last tokens of each request into its ring; one a program, but for offsets that overlap."""
    first = tl.program_id(0).to(tl.int64)
    _, _, total = _locate(first, starts, cu_seqlens, state_rows, requests, tokens, states, 1, ring, True, HAS_ROWS)
    word = tl.arange(0, BLOCK)
    i = first
    while i < total:
        request, number, _ = _locate(i, starts, cu_seqlens, state_rows, requests, tokens, states, 1, ring, True, HAS_ROWS)
        start, begin, count, row_of_state = _span(request, starts, cu_seqlens, state_rows, requests, tokens, states, HAS_ROWS)
        nth = number + count - tl.minimum(count, ring)
        source = (begin + nth) * WORDS + word
        target = state + (row_of_state * ring + (start + nth) % ring) * (2 * WORDS) + word
        tl.store(target, tl.load(values + source, mask=word < WORDS), mask=word < WORDS)
        tl.store(target + WORDS, tl.load(scores + source, mask=word < WORDS), mask=word < WORDS)
        i += programs


def plan(
    starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, rows: int, state_rows: Tensor | None, states: int = ANY_STATE,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Requests and entries of `rows` rows, more than none, and their slots: -1 in rows left over."""
    requests = torch.empty(rows, dtype=torch.int32, device=starts.device)
    entries, kept = (torch.empty(rows, dtype=torch.int64, device=starts.device) for _ in range(2))
    with torch.cuda.device_of(starts):
        plan_rows[(rows,)](
            starts, cu_seqlens, starts if state_rows is None else state_rows, starts if slots is None else slots, requests, entries, kept,
            len(starts), tokens, states, ratio, HAS_ROWS=state_rows is not None, HAS_SLOTS=slots is not None, num_warps=1,
        )  # fmt: skip
    return requests, entries, kept


def compress(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor, rows: int,
    *, ratio: int, overlap: bool, ape: Tensor | None, state_rows: Tensor | None, **store: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """bf16 [rows, dim], requests and entries of `rows` rows, more than none; writes the state, which is contiguous.

    With `store` (weight, table, pages, slots, eps, layout, page_size, amax_floor) rows are latents, and their records go into the pages.
    """
    width = values.shape[1]
    dim = width // 2 if overlap else width
    pairs = triton.next_power_of_2(dim // 2)
    span = 2 * ratio if overlap else ratio
    step = min(triton.next_power_of_2(span), max(TILE // pairs, 1))
    requests = torch.empty(rows, dtype=torch.int32, device=values.device)
    entries = torch.empty(rows, dtype=torch.int64, device=values.device)
    result = torch.empty(rows, dim, dtype=torch.bfloat16, device=values.device)
    of_values, of_scores = wide_words(values), wide_words(scores)
    of_state = state.view(-1).view(torch.int64)  # written to, so never a copy
    batch = (starts, cu_seqlens, starts if state_rows is None else state_rows)
    sizes = (len(starts), len(values), state.shape[0], state.shape[1])
    has_rows = state_rows is not None
    with torch.cuda.device_of(values):
        tensors, numbers, options = _stored(values, batch, rows, sizes, ratio, has_rows, **store) if store else _plain(values)
        entry_rows[(rows,)](
            of_values, of_scores, of_state, of_values if ape is None else wide_words(ape), *batch, requests, entries, words(result),
            *tensors, *sizes, rows, *numbers, RATIO=ratio, OVERLAP=overlap, DIM=dim, PAIRS=pairs, STEP=step, HAS_APE=ape is not None,
            HAS_ROWS=has_rows, NATIVE=has_native_e4m3(entry_rows, values.device), **options,
            num_warps=min(max(step * pairs // 256, 1), 8), enable_fp_fusion=False,
        )  # fmt: skip
        programs = min(len(values), len(starts) * state.shape[1])
        if programs:
            state_tokens[(programs,)](
                of_values, of_scores, of_state, *batch, *sizes, programs, WORDS=width // 2,
                BLOCK=triton.next_power_of_2(width // 2), HAS_ROWS=has_rows, num_warps=4,
            )  # fmt: skip
    return result, requests, entries


def _plain(values: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    return (values,) * 5, (0.0, 0, 0, 0, 0), {"STORED": False, "R": 2, "SEARCH": True, **NO_LAYOUT}


def _stored(
    values: Tensor, batch: tuple[Tensor, ...], rows: int, sizes: tuple[int, ...], ratio: int, has_rows: bool, *,
    weight: Tensor, table: Tensor, pages: Tensor, slots: Tensor, eps: float, layout: KVLayout, page_size: int, amax_floor: str,
) -> tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """Tensors, numbers and options of the second half of `entry_rows`."""
    there = pages.shape[0] * page_size
    last = None
    if rows > MOST_SEARCHED and there:
        slots = plan(batch[0], batch[1], ratio, sizes[1], rows, batch[2] if has_rows else None, sizes[2], slots)[2]
        last = last_rows(slots, there)
    floor = floor_options(layout, amax_floor)
    tensors = (weight_words(weight), table.contiguous(), pages, slots, slots if last is None else last)
    options = {"STORED": True, "R": table.shape[1], "SEARCH": last is None, **layout_options(layout, page_size), "ZEROES": floor["ZEROES"]}
    return tensors, (eps, table.shape[0], there, pages.stride(0), floor["least"]), options
