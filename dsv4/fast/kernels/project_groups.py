"""The grouped product of the output projection in bf16, and the same written as a pair of codes and scales.

    z[t, g, r] = sum over c of o[t, g, c] w[g, r, c]

Tiles, and parts and their order, are as in `linear`: the bits of a row depend on no other row, and not on how many there are. Sums stay in
the tensor core's fp32 accumulators through a part.

A pair is quantised from z rounded to bf16, in groups of 32 along [groups * rank]. A program has whole groups and writes their bytes; those
of the last tile of tokens also clear the rows behind, and those of the last columns the missing bytes of the last words. Where parts have
programs of their own, or groups of 32 lie across two groups of heads, `pair_kernel` quantises what a product has written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import encode_e4m3, group_amax, has_native_e4m3, rounded, scale_place, scales_and_quotients, widened
from dsv4.fast.kernels.linear import EARLY_FROM, sum_parts
from dsv4.fast.kernels.linear_tiles import NUMBERS, TURN, Plan, device_of, plan
from dsv4.formats import AMAX_FLOORS, TILE_ROWS, WORD_GROUPS, align

GROUP: tl.constexpr = tl.constexpr(32)
PAIR_TILE = (16, 128)  # rows and columns of a program of `pair_kernel`, whole words


@triton.jit
def _numbers(pointers, column, k, EVEN: tl.constexpr, COMPILED: tl.constexpr):
    """bf16 as a product takes them; the interpreter multiplies fp32."""
    tile = tl.load(pointers) if EVEN else tl.load(pointers, mask=column < k, other=0.0)
    return tile if COMPILED else widened(tile, False)


@triton.jit
def _added(sums, o, w, turn, k, SPAN: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr, COMPILED: tl.constexpr):
    """sums with SPAN of k."""
    column = turn * SPAN + tl.arange(0, SPAN)[None, :]
    a = _numbers(o + turn * SPAN, column, k, EVEN, COMPILED)
    b = _numbers(w + turn * SPAN, column, k, EVEN, COMPILED)
    return tl.dot(b, a.T, sums, input_precision="ieee") if SWAPPED else tl.dot(a, b.T, sums, input_precision="ieee")


@triton.jit
def _sum(
    o, w, first, last, k, TOKENS: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr,
    COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [TOKENS, ROWS] of turns `first` to `last` - 1; [ROWS, TOKENS] if SWAPPED."""
    sums = tl.zeros([ROWS, TOKENS] if SWAPPED else [TOKENS, ROWS], tl.float32)
    if COMPILED:
        for turn in tl.range(first, last, num_stages=STAGES):
            sums = _added(sums, o, w, turn, k, SPAN, SWAPPED, EVEN, COMPILED)
    else:  # the interpreter's range takes no tensors
        while first < last:
            sums = _added(sums, o, w, first, k, SPAN, SWAPPED, EVEN, COMPILED)
            first += 1
    return sums


@triton.jit
def _write_pair(
    z, token, column, live, codes, scales, tokens, rows, all_rows, width, pitch, least,
    LAYOUT: tl.constexpr, ZEROES: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Codes and scales of fp32 z [tokens, columns], from `column` on, a multiple of 32; `live` of them count. Rows from `tokens` on are
    zero: codes up to `rows`, scales up to `all_rows`."""
    GROUPS: tl.constexpr = z.shape[1] // GROUP
    row = token[:, None, None]
    group = tl.arange(0, GROUPS)[None, :, None]
    numbers = widened(rounded(z, tl.bfloat16, COMPILED), COMPILED).reshape(z.shape[0], GROUPS, GROUP)
    stored, _, quotients = scales_and_quotients(numbers, group_amax(numbers, NATIVE), least, 0.0, "fp8", False, False, ZEROES, True, NATIVE)
    byte = tl.where(row < tokens, encode_e4m3(quotients, NATIVE), 0).to(tl.uint8)
    at = row.to(tl.int64) * width + (column + group * GROUP + tl.arange(0, GROUP)[None, None, :])
    tl.store(codes + at, byte, mask=(row < rows) & (group * GROUP < live))
    kept = tl.where(row < tokens, stored, 0).to(tl.uint8)
    tl.store(scales + scale_place(row, column // GROUP + group, pitch, LAYOUT), kept, mask=(row < all_rows) & (group * GROUP < live))


@triton.jit
def _clear_codes(codes, begin, rows, column, live, width, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero codes of `live` columns in rows from `begin` on."""
    place = tl.arange(0, COLUMNS)[None, :]
    while begin < rows:
        row = begin + tl.arange(0, HEIGHT)[:, None]
        at = row.to(tl.int64) * width + (column + place)
        tl.store(codes + at, tl.zeros([HEIGHT, COLUMNS], tl.uint8), mask=(row < rows) & (place < live))
        begin += HEIGHT


@triton.jit
def _clear_scales(scales, begin, end, group, past, pitch, HEIGHT: tl.constexpr, GROUPS: tl.constexpr, LAYOUT: tl.constexpr):
    """Zero bytes of groups `group` to `past` - 1 in rows `begin` to `end` - 1."""
    one = group + tl.arange(0, GROUPS)[None, :]
    while begin < end:
        row = begin + tl.arange(0, HEIGHT)[:, None]
        zero = tl.zeros([HEIGHT, GROUPS], tl.uint8)
        tl.store(scales + scale_place(row, one, pitch, LAYOUT), zero, mask=(row < end) & (one < past))
        begin += HEIGHT


@triton.jit(do_not_specialize=["tokens", "rows", "all_rows", "pitch", "least"])
def groups_kernel(
    o, o_row, o_batch, w, w_batch, w_row, z, codes, scales, tokens, n, k, between, rows, all_rows, pitch, least,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr, SWAPPED: tl.constexpr, BATCH: tl.constexpr, PARTS: tl.constexpr,
    ALONE: tl.constexpr, EVEN: tl.constexpr, BAND: tl.constexpr, PAIR: tl.constexpr, LAYOUT: tl.constexpr, ZEROES: tl.constexpr,
    EARLY: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of tokens by ROWS rows of a group's weight, of all parts or of one (ALONE), as bf16, fp32 or a PAIR."""
    tiles, across = tl.cdiv(tokens, TOKENS), tl.cdiv(n, ROWS)
    band = tl.program_id(0) // (BAND * across) * BAND
    height = tl.minimum(tiles - band, BAND)
    inside = tl.program_id(0) % (BAND * across)
    tile, begin = band + inside % height, inside // height * ROWS
    batch = tl.program_id(1) // PARTS if ALONE else tl.program_id(1)
    part = tl.program_id(1) % PARTS if ALONE else 0
    turns = tl.cdiv(k, SPAN)
    first = part * between
    last = tl.minimum(first + between, turns) if ALONE else turns
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()

    token, row = tile * TOKENS + tl.arange(0, TOKENS), begin + tl.arange(0, ROWS)
    column = tl.arange(0, SPAN)[None, :]
    near = tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * o_row
    o_at = o + batch.to(tl.int64) * o_batch + (near + column)
    w_at = w + batch.to(tl.int64) * w_batch + (tl.minimum(row, n - 1).to(tl.int64)[:, None] * w_row + column)
    if PARTS > 1 and not ALONE:
        sums = tl.zeros([ROWS, TOKENS] if SWAPPED else [TOKENS, ROWS], tl.float32)
        while first < turns:
            past = tl.minimum(first + between, turns)
            sums += _sum(o_at, w_at, first, past, k, TOKENS, ROWS, SPAN, SWAPPED, EVEN, COMPILED, STAGES)
            first += between
    else:
        sums = _sum(o_at, w_at, first, last, k, TOKENS, ROWS, SPAN, SWAPPED, EVEN, COMPILED, STAGES)
    result = sums.T if SWAPPED else sums
    width = BATCH * n
    if PAIR:
        left, live = batch * n + begin, tl.minimum(n - begin, ROWS)
        _write_pair(result, token, left, live, codes, scales, tokens, rows, all_rows, width, pitch, least, LAYOUT, ZEROES, NATIVE, COMPILED)
        behind = tl.where(tile == tiles - 1, (tile + 1) * TOKENS, all_rows)
        _clear_codes(codes, behind, rows, left, live, width, TOKENS, ROWS)
        _clear_scales(scales, behind, all_rows, left // GROUP, (left + live) // GROUP, pitch, TOKENS, ROWS // GROUP, LAYOUT)
        if left + live == width:
            end = tl.where(tile == tiles - 1, all_rows, (tile + 1) * TOKENS)
            _clear_scales(scales, tile * TOKENS, end, width // GROUP, tl.cdiv(width, 4 * GROUP) * 4, pitch, TOKENS, 4, LAYOUT)
    else:
        place = token.to(tl.int64)[:, None] * width + (batch * n + row)[None, :]
        mask = (token < tokens)[:, None] & (row < n)[None, :]
        tl.store(z + part * (tokens.to(tl.int64) * width) + place, rounded(result, z.dtype.element_ty, COMPILED), mask=mask)


@triton.jit(do_not_specialize=["tokens", "rows", "all_rows", "pitch", "least"])
def pair_kernel(
    z, codes, scales, tokens, width, rows, all_rows, pitch, least,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, LAYOUT: tl.constexpr, ZEROES: tl.constexpr, EARLY: tl.constexpr,
    NATIVE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Whole words of a pair, of the sum of z [PARTS, tokens, width], bf16 or fp32."""
    token = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    begin = tl.program_id(1) * COLUMNS
    column = begin + tl.arange(0, COLUMNS)
    mask = (token < tokens)[:, None] & (column < width)[None, :]
    place = token.to(tl.int64)[:, None] * width + column[None, :]
    count = tokens.to(tl.int64) * width
    if EARLY:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([HEIGHT, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        total += widened(tl.load(z + part * count + place, mask=mask, other=0.0), COMPILED)
    live = tl.minimum(width - begin, COLUMNS)
    _write_pair(total, token, begin, live, codes, scales, tokens, rows, all_rows, width, pitch, least, LAYOUT, ZEROES, NATIVE, COMPILED)
    groups = width // GROUP
    _clear_scales(
        scales, tl.program_id(0) * HEIGHT, tl.minimum((tl.program_id(0) + 1) * HEIGHT, all_rows), groups,
        tl.minimum((begin + COLUMNS) // GROUP, tl.cdiv(groups, 4) * 4), pitch, HEIGHT, 4, LAYOUT,
    )  # fmt: skip


def run(o: Tensor, weight: Tensor, *, chosen: Plan | None = None) -> Tensor:
    """bf16 [tokens, groups, rank] of bf16 [tokens, groups, width] and [groups, rank, width]."""
    z, early = _product(o, weight, chosen or _plan(o, weight))
    if z.dtype == torch.bfloat16:
        return z[0]
    result = torch.empty(z.shape[1:], dtype=torch.bfloat16, device=o.device)
    sum_parts(z, result, early=early)
    return result


def run_pair(
    o: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, rows: int, scale_layout: str, pair_floor: str, *, chosen: Plan | None = None
) -> None:
    """`run` as codes uint8 [rows, groups * rank] and words of scales, pads and rows past the tokens zero."""
    plan = chosen or _plan(o, weight)
    floor = AMAX_FLOORS[pair_floor]
    words = align(codes.shape[1] // GROUP.value, WORD_GROUPS) // WORD_GROUPS
    pitch, all_rows = (align(rows, 4), align(rows, 4)) if scale_layout == "packed" else (512 * words, align(rows, TILE_ROWS))
    whole = scales.as_strided((words * align(rows, 4),), (1,)) if scale_layout == "packed" else scales
    given = {
        "codes": codes, "scales": whole.view(torch.uint8), "rows": rows, "all_rows": all_rows, "pitch": pitch,
        "least": floor.least_byte_fp8 or 0, "LAYOUT": scale_layout, "ZEROES": floor.zero_byte_zeroes_codes,
    }  # fmt: skip
    if not plan.alone and weight.shape[1] % GROUP.value == 0:
        _product(o, weight, plan, given)
        return
    z, early = _product(o, weight, plan)
    height, columns = PAIR_TILE
    with torch.cuda.device_of(o):
        pair_kernel[(triton.cdiv(all_rows, height), triton.cdiv(codes.shape[1], columns))](
            z, tokens=len(o), width=codes.shape[1], HEIGHT=height, COLUMNS=columns, PARTS=len(z), EARLY=early,
            NATIVE=has_native_e4m3(pair_kernel, o.device), COMPILED=isinstance(pair_kernel, triton.JITFunction), num_warps=4,
            **given, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip


def _plan(o: Tensor, weight: Tensor) -> Plan:
    return plan(len(o), weight.shape[1], weight.shape[2], len(weight), NUMBERS, o.device)


def _product(o: Tensor, weight: Tensor, plan: Plan, pair: dict[str, Any] | None = None) -> tuple[Tensor, bool]:
    """z [1, tokens, groups, rank] or parts of it in fp32 [parts, tokens, ...], and whether what follows may begin early; or `pair`."""
    o, weight = (each if each.stride(2) == 1 else each.contiguous() for each in (o, weight))
    (tokens, batch, k), n = o.shape, weight.shape[1]
    tile, parts, alone = plan
    compiled = isinstance(groups_kernel, triton.JITFunction)
    early = alone and compiled and device_of(o.device)[1] >= EARLY_FROM
    shape = (0,) if pair else (parts if alone else 1, tokens, batch, n)
    z = torch.empty(shape, dtype=torch.float32 if alone else torch.bfloat16, device=o.device)
    unused = {"codes": z, "scales": z, "rows": 0, "all_rows": 0, "pitch": 0, "least": 0, "LAYOUT": "packed", "ZEROES": False}
    with torch.cuda.device_of(o):
        groups_kernel[(tile.programs(tokens, n), batch * parts if alone else batch)](
            o, o.stride(0), o.stride(1), weight, weight.stride(0), weight.stride(1), z, tokens=tokens, n=n, k=k,
            between=triton.cdiv(triton.cdiv(k, TURN), parts) * (TURN // tile.span), TOKENS=tile.tokens, ROWS=tile.rows, SPAN=tile.span,
            SWAPPED=tile.swapped, BATCH=batch, PARTS=parts, ALONE=alone, EVEN=k % tile.span == 0, BAND=tile.band, PAIR=pair is not None,
            EARLY=early, NATIVE=has_native_e4m3(groups_kernel, o.device), COMPILED=compiled, STAGES=tile.stages, num_warps=tile.warps,
            **(pair or unused),
        )  # fmt: skip
    return z, early
