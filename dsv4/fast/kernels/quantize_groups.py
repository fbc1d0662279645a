"""One pass over a matrix: codes and scales of groups along the rows, the scales in any layout with its pads, or the fake-quantised matrix.

A program covers ROWS rows by GROUPS groups, at least 512 neighbouring numbers of each row, so that accesses are coalesced and whole words
of four scales belong to one program. Programs of neighbouring columns follow each other, and the scales of a row meet in the cache. Nothing
depends on the number of rows: no specialisation, no other order of operations.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import (
    INFINITY,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    group_amax,
    has_native_e4m3,
    pairs_e2m1,
    rounded,
    scale_place,
    scales_and_quotients,
    widened,
)

# Numbers of a program and its warps, as measured on an H200.
TILES = {"fp8": (8192, 8), "fp8_fp32": (4096, 4), "mxfp4": (8192, 4), "fp4_e4m3": (4096, 4)}


@triton.jit(do_not_specialize=["rows", "scale_rows", "pitch", "least", "floor"])
def quantize_tile(
    x,
    result,
    scales,
    rows,
    groups,
    stride,
    scale_rows,  # with the layout's pads
    scale_groups,
    pitch,
    least,
    floor,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    DIVIDE: tl.constexpr,
    ON_SCALE: tl.constexpr,
    ZEROES: tl.constexpr,
    TIES: tl.constexpr,
    ZERO_SIGN: tl.constexpr,
    LAYOUT: tl.constexpr,
    FAKE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Axes of a tile: row, group, number in the group."""
    program = tl.program_id(0)
    across = tl.cdiv(scale_groups, GROUPS)
    row = (program // across * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = (program % across * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    live = (row < rows) & (group < groups)
    column = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    wide = row.to(tl.int64)
    numbers = widened(tl.load(x + (wide * stride + column), mask=live, other=0.0), NATIVE)
    amax = group_amax(numbers, NATIVE)
    NARROW: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    stored, scale, quotients = scales_and_quotients(numbers, amax, least, floor, KIND, DIVIDE, ON_SCALE, ZEROES, NARROW, NATIVE)
    four: tl.constexpr = KIND == "mxfp4" or KIND == "fp4_e4m3"
    PAIRED: tl.constexpr = four and NATIVE and not FAKE and ZERO_SIGN == "kept" and NARROW
    if PAIRED:
        if KIND == "mxfp4":
            scaled = numbers * ((254 - stored) << 23).to(tl.float32, bitcast=True) * 0.00006103515625  # 2^-14
        else:
            scaled = numbers * (0.00006103515625 / scale)  # an approximate quotient is enough
            scaled = tl.clamp(scaled, -0.0003662109375, 0.0003662109375)  # 6 * 2^-14
        pairs = pairs_e2m1(scaled, ROWS, GROUPS, GROUP, TIES) & tl.where(amax >= INFINITY, 0, 0xFF)
    else:
        codes = encode_e2m1(quotients, TIES, ZERO_SIGN) if four else encode_e4m3(quotients, NATIVE)
    if FAKE:
        decoded = decode_e2m1(codes) if four else decode_e4m3(codes, NATIVE)
        tl.store(result + (wide * groups * GROUP + column), rounded(decoded * scale, result.dtype.element_ty, NATIVE), mask=live)
    else:
        if four:
            if not PAIRED:
                low, high = tl.split(codes.reshape(ROWS, GROUPS, GROUP // 2, 2))
                pairs = low | (high << 4)
            byte = group * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
            tl.store(result + (wide * groups * (GROUP // 2) + byte), pairs.to(tl.uint8), mask=live)
        else:
            tl.store(result + (wide * groups * GROUP + column), codes, mask=live)
        kept = tl.where(live, stored, 0).to(scales.dtype.element_ty)
        tl.store(scales + scale_place(row, group, pitch, LAYOUT), kept, mask=(row < scale_rows) & (group < scale_groups))


def run(
    x: Tensor, result: Tensor, scales: Tensor, group: int, *, padded: tuple[int, int], pitch: int, floor: float, **options: Any
) -> None:
    """Quantise x [rows, n], last stride 1, into contiguous `result`, and into `padded` rows and groups of `scales` (bytes or fp32)."""
    rows, groups = x.shape[0], x.shape[1] // group
    tile, warps = TILES[options["KIND"]]
    width = max(tile // 16 // group, 4)  # groups of a program
    height = max(tile // (width * group), 1)
    grid = (triton.cdiv(padded[0], height) * triton.cdiv(padded[1], width),)
    power = isinstance(floor, int)
    with torch.cuda.device_of(x):
        quantize_tile[grid](
            x, result, scales, rows, groups, x.stride(0), *padded, pitch, floor if power else 0, 0.0 if power else floor,
            ROWS=height, GROUPS=width, GROUP=group, NATIVE=has_native_e4m3(quantize_tile, x.device),
            num_warps=warps, enable_fp_fusion=False, **options,
        )  # fmt: skip
