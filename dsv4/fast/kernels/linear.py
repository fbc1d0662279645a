"""Products of codes with the codes of a weight, scales of both sides applied in fp32.

    y_tn = sum over groups g of s_tg s_ng (sum over k in g of a_tk w_nk)

`linear_products` has the arithmetic, `linear_tiles` the sizes. A program has a tile of tokens and rows of the weight and goes along k.
Where tokens are few, rows of the weight are the rows of its product (SWAPPED), for tensor cores take 64 of them at once. Tiles of many
rows come in pieces, each a product of its own, so that scaling one runs beside the tensor core's work on the next. Each addition of a
product is a fused one that is written out: nothing depends on what a compiler fuses.

Batch invariance. An element's sum is that of `parts`, each a run of consecutive groups added in order, and the parts are added in order.
How many parts there are depends on n, k and the batch alone. Where tiles are too few for the device each part has a program, which writes
what it has, and `add_parts` adds; elsewhere one program goes through all of them. Tiles change nothing else. No token count compiles
anything anew.

Scales come as the caller has them: bytes or fp32 numbers with any strides, words of four bytes in columns (packed) or in 128x4 tiles. Bytes
that lie as words are read as words. Rows past the last read the last one's codes and scales, groups past the last count as 0, and no pad
is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import has_native_e4m3, rounded
from dsv4.fast.kernels.linear_products import SPAN, appended, careful_sums, fast_sums
from dsv4.fast.kernels.linear_tiles import Plan, device_of, plan

UNSPECIALISED = ["tokens", "xs_batch", "xs_step"]
ADDED = 1024  # elements of a program that adds parts
EARLY_FROM = (9, 0)  # devices on which it is launched while the parts are made


@triton.jit
def _scale_rows(row, stride, TILED: tl.constexpr):
    """Where the first scale or word of a row lies."""
    if TILED:  # noqa: SIM108
        place = (row // 128).to(tl.int64) * stride + (row % 32) * 4 + (row % 128) // 32
    else:
        place = row.to(tl.int64) * stride
    return place


@triton.jit(do_not_specialize=UNSPECIALISED)
def product_kernel(
    x, x_batch, x_row, x_scales, xs_batch, xs_row, xs_step, w, w_batch, w_row, w_scales, ws_batch, ws_row, ws_step, y, y_batch,
    y_row, tokens, n, k, between, odd,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, PIECES: tl.constexpr, SWAPPED: tl.constexpr, GROUP: tl.constexpr, LEAD: tl.constexpr,
    X_FORM: tl.constexpr, W_FORM: tl.constexpr, X_TILED: tl.constexpr, W_TILED: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr,
    PARTS: tl.constexpr, ALONE: tl.constexpr, EVEN: tl.constexpr, BAND: tl.constexpr, EARLY: tl.constexpr, AGAIN: tl.constexpr,
    NATIVE: tl.constexpr, COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of tokens by PIECES times ROWS rows of the weight, of a batch and all parts, or one of them (ALONE).

    BLOCK rows of the weight have one scale; LEAD rows of a piece share one in fast sums, which CHECKED says is not known. AGAIN: only if
    `odd` says so.
    """
    if AGAIN:  # noqa: SIM102
        if tl.load(odd) == 0:
            return
    tiles = tl.cdiv(tokens, TOKENS)
    across = tl.cdiv(n, PIECES * ROWS)
    band = tl.program_id(0) // (BAND * across) * BAND
    height = tl.minimum(tiles - band, BAND)
    inside = tl.program_id(0) % (BAND * across)
    token = (band + inside % height) * TOKENS + tl.arange(0, TOKENS)
    begin = inside // height * (PIECES * ROWS)
    batch = (tl.program_id(1) // PARTS if ALONE else tl.program_id(1)).to(tl.int64)
    turns = tl.cdiv(k, SPAN)
    part = tl.program_id(1) % PARTS if ALONE else 0
    first = part * between
    last = tl.minimum(first + between, turns) if ALONE else turns

    column = tl.arange(0, GROUP)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    near = tl.minimum(token, tokens - 1)
    x_tile = x + batch * x_batch + (near.to(tl.int64)[:, None] * x_row + column)
    x_at = x_scales + batch * xs_batch + _scale_rows(near, xs_row, X_TILED)
    scales = w_scales + batch * ws_batch
    w_tiles = ()
    leaders = ()
    own = ()
    others = ()
    for piece in tl.static_range(PIECES):
        row = tl.minimum(begin + piece * ROWS + tl.arange(0, ROWS), n - 1)
        leader = tl.minimum(begin + piece * ROWS + tl.arange(0, ROWS // LEAD) * LEAD, n - 1)
        w_tiles = appended(w_tiles, w + batch * w_batch + (row.to(tl.int64)[:, None] * w_row + column))
        leaders = appended(leaders, scales + _scale_rows(leader // BLOCK, ws_row, W_TILED))
        own = appended(own, scales + _scale_rows(row, ws_row, W_TILED))
        others = appended(others, scales + _scale_rows(row // LEAD * LEAD, ws_row, W_TILED))

    PARTED: tl.constexpr = PARTS > 1 and not ALONE
    sums, wrong = fast_sums(
        x_tile, x_at, xs_step, w_tiles, leaders, ws_step, own, others, first, last, between, k,
        TOKENS, ROWS, GROUP, X_FORM, W_FORM, SWAPPED, CHECKED, EVEN, PARTED, NATIVE, COMPILED, STAGES,
    )  # fmt: skip
    if wrong > 0:
        each = ()
        for piece in tl.static_range(PIECES):
            row = tl.minimum(begin + piece * ROWS + tl.arange(0, ROWS), n - 1)
            each = appended(each, scales + _scale_rows(row // BLOCK, ws_row, W_TILED))
        sums = careful_sums(
            x_tile, x_at, xs_step, w_tiles, each, ws_step, first, last, between, k,
            TOKENS, ROWS, GROUP, X_FORM, W_FORM, SWAPPED, EVEN, PARTED, NATIVE, COMPILED, STAGES,
        )  # fmt: skip
    y_at = y + batch * y_batch + part * (tokens.to(tl.int64) * y_row)
    for piece in tl.static_range(PIECES):
        row = begin + piece * ROWS + tl.arange(0, ROWS)
        place = token.to(tl.int64)[:, None] * y_row + row[None, :]
        inner = (token < tokens)[:, None] & (row < n)[None, :]
        result = sums[piece].T if SWAPPED else sums[piece]
        tl.store(y_at + place, rounded(result, y.dtype.element_ty, COMPILED), mask=inner)


@triton.jit(do_not_specialize=["tokens"])
def add_parts(parts, y, tokens, row, PARTS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr, COMPILED: tl.constexpr):
    """bf16 sums, in order, of `parts` fp32 [PARTS, tokens, row]. EARLY: it may begin before the parts are there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    count = tokens.to(tl.int64) * row
    total = tl.zeros([SIZE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * count + place, mask=place < count, other=0.0)
    tl.store(y + place, rounded(total, tl.bfloat16, COMPILED), mask=place < count)


def sum_parts(parts: Tensor, y: Tensor, *, early: bool) -> None:
    """Add parts [parts, tokens, ...] into y, which is contiguous. `early`: their kernel lets others begin."""
    overlapped = {"launch_pdl": True} if early else {}
    with torch.cuda.device_of(y):
        add_parts[(triton.cdiv(y.numel(), ADDED),)](
            parts, y, len(y), y.numel() // len(y), PARTS=len(parts), SIZE=ADDED, EARLY=early,
            COMPILED=isinstance(add_parts, triton.JITFunction), num_warps=4, **overlapped,
        )  # fmt: skip


class Scales(NamedTuple):
    """Where scales lie: of a batch, from row (or 128 rows, TILED) to row, and from group (or word) to group."""

    tensor: Tensor
    form: str  # words, bytes, fp32
    tiled: bool
    batch: int
    row: int
    step: int


class Operands(NamedTuple):
    """x: codes [tokens, batch, k]; weight: [batch, n, k]; groups of k, and how many rows of the weight, have one scale."""

    x: Tensor
    x_scales: Scales
    weight: Tensor
    weight_scales: Scales
    group: int
    block: int


def scales_of(scales: Tensor, group: int) -> Scales:
    """Scales [batch, rows, groups] of bytes or numbers, packed words [rows, words], or tiles of words [tiles, words, 32, 4]."""
    if scales.dim() == 4:
        return Scales(scales.contiguous(), "words", True, 0, scales.shape[1] * 128, 128)
    if scales.dtype == torch.int32:
        return Scales(scales, "words", False, 0, *scales.stride())
    words = scales.dtype == torch.uint8 and group == 32 and scales.shape[2] % 4 == 0 and scales.stride(2) == 1
    if words and all(each % 4 == 0 for each in (scales.data_ptr(), scales.storage_offset(), *scales.stride()[:2])):
        scales = scales.view(torch.int32)
        return Scales(scales, "words", False, *scales.stride())
    return Scales(scales, "fp32" if scales.dtype == torch.float32 else "bytes", False, *scales.stride())


def run_fp8(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int, *, chosen: Plan | None = None) -> Tensor:
    """bf16 [tokens, n] of codes [tokens, k] and [n, k], scales of blocks along k, and of square blocks of the weight."""
    return run(operands(x, x_scales, weight, weight_scales, block), chosen)[:, 0]


def run_mxfp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, *, chosen: Plan | None = None) -> Tensor:
    """bf16 [tokens, n] of codes with words of scales of groups of 32."""
    return run(operands(codes, scales, weight, weight_scales, 32), chosen)[:, 0]


def operands(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int) -> Operands:
    """Of a product without a batch: scales as words of rows on both sides, or of blocks."""
    if weight_scales.dtype == torch.int32:
        return Operands(x[:, None], scales_of(x_scales, block), weight[None], scales_of(weight_scales, block), block, 1)
    return Operands(x[:, None], scales_of(x_scales[None], block), weight[None], scales_of(weight_scales[None], block), block, block)


def run_groups_fp8(o: Tensor, o_scales: Tensor, weight: Tensor, weight_scales: Tensor, *, chosen: Plan | None = None) -> Tensor:
    """bf16 [tokens, groups, rank] of codes [tokens, groups, width] and [groups, rank, width], blocks of 128."""
    return run(Operands(o, scales_of(o_scales.transpose(0, 1), 128), weight, scales_of(weight_scales, 128), 128, 128), chosen)


def run(given: Operands, chosen: Plan | None = None, made: Tensor | None = None, odd: Tensor | None = None) -> Tensor:
    """bf16 [tokens, batch, n]; `made` stays as it is if `odd` is 0."""
    x, x_scales, weight, w_scales, group, block = given
    x, weight = (codes if codes.stride(2) == 1 else codes.contiguous() for codes in (x, weight))
    (tokens, batch, k), n = x.shape, weight.shape[1]
    words = x_scales.form == w_scales.form == "words"
    tile, parts, alone = chosen or plan(tokens, n, k, batch, group, x.device, words=words)
    alone = alone and made is None
    y = torch.empty(tokens, batch, n, dtype=torch.bfloat16, device=x.device) if made is None else made
    sums = torch.empty(parts, tokens, batch, n, dtype=torch.float32, device=x.device) if alone else y
    compiled = isinstance(product_kernel, triton.JITFunction)
    early = compiled and device_of(x.device)[1] >= EARLY_FROM
    checked = block == 1 and tile.shares and not tile.swapped
    grid = (tile.programs(tokens, n), batch * parts if alone else batch)
    with torch.cuda.device_of(x):
        product_kernel[grid](
            x, x.stride(1) if batch > 1 else 0, x.stride(0), x_scales.tensor, x_scales.batch, x_scales.row, x_scales.step,
            weight, weight.stride(0) if batch > 1 else 0, weight.stride(1), w_scales.tensor, w_scales.batch, w_scales.row, w_scales.step,
            sums, n, batch * n if made is None else y.stride(0), tokens, n, k, triton.cdiv(triton.cdiv(k, SPAN.value), parts),
            x if odd is None else odd,
            TOKENS=tile.tokens, ROWS=tile.rows, PIECES=tile.pieces, SWAPPED=tile.swapped, GROUP=group,
            LEAD=min(group if checked else block, tile.rows), X_FORM=x_scales.form, W_FORM=w_scales.form, X_TILED=x_scales.tiled,
            W_TILED=w_scales.tiled, BLOCK=block, CHECKED=checked, PARTS=parts, ALONE=alone, EVEN=k % SPAN.value == 0, BAND=tile.band,
            EARLY=alone and early, AGAIN=odd is not None, NATIVE=has_native_e4m3(product_kernel, x.device), COMPILED=compiled,
            STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    if alone:
        sum_parts(sums, y, early=early)
    return y
