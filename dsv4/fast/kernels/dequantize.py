"""Codes times scales, the scales read in any layout.

A program covers ROWS rows by GROUPS groups; groups at the right edge of a grid of blocks may be partial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0, has_native_e4m3, rounded, scale_place

TILE = 8192
WARPS = 8


@triton.jit(do_not_specialize=["rows", "pitch"])
def dequantize_tile(
    codes,
    scales,
    result,
    rows,
    columns,
    groups,
    pitch,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    NUMBERS: tl.constexpr,
    SCALE: tl.constexpr,
    LAYOUT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Axes of a tile: row, group, number in the group."""
    program = tl.program_id(0)
    across = tl.cdiv(groups, GROUPS)
    row = (program // across * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = (program % across * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    wide = row.to(tl.int64)
    inside = (row < rows) & (column < columns)
    if NUMBERS == "e2m1":
        byte = group * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
        pairs = tl.load(codes + (wide * (columns // 2) + byte), mask=(row < rows) & (byte < columns // 2), other=0).to(tl.int32)
        numbers = decode_e2m1(tl.join(pairs & 15, pairs >> 4).reshape(ROWS, GROUPS, GROUP))
    else:
        numbers = decode_e4m3(tl.load(codes + (wide * columns + column), mask=inside, other=0), NATIVE)
    stored = tl.load(scales + scale_place(row // GROUP_ROWS, group, pitch, LAYOUT), mask=(row < rows) & (group < groups), other=0)
    if SCALE == "fp32":
        factors = stored
    elif SCALE == "e4m3":
        factors = decode_e4m3(stored, NATIVE)
    else:
        factors = decode_e8m0(stored.to(tl.int32))
    tl.store(result + (wide * columns + column), rounded(numbers * factors, result.dtype.element_ty, NATIVE), mask=inside)


def run(
    codes: Tensor, scales: Tensor, result: Tensor, block: tuple[int, int], *, pitch: int, numbers: str, scale: str, layout: str
) -> None:
    """Contiguous codes into contiguous result [rows, n]; scales are bytes or fp32, read by `scale_place`."""
    group_rows, group = block
    rows, columns = result.shape
    groups = triton.cdiv(columns, group)
    width = max(TILE // 16 // group, 1)
    height = TILE // (width * group)
    grid = (triton.cdiv(rows, height) * triton.cdiv(groups, width),)
    with torch.cuda.device_of(codes):
        dequantize_tile[grid](
            codes, scales, result, rows, columns, groups, pitch,
            ROWS=height, GROUPS=width, GROUP=group, GROUP_ROWS=group_rows, NUMBERS=numbers, SCALE=scale, LAYOUT=layout,
            NATIVE=has_native_e4m3(dequantize_tile, codes.device), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
