"""Codes times scales, the scales read in any layout.

A program covers ROWS rows by GROUPS groups; groups at the right edge of a grid of blocks may be partial. FP4 in whole groups of a row has a
kernel of its own on devices whose instructions it is made of, in words of eight codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0, has_native_e4m3, rounded, scale_place
from dsv4.fast.kernels.codec_pairs import decode_pairs, scale_pairs, takes_pairs

TILE = 8192
WARPS = 8
WORD_TILE = (2048, 4)  # numbers of a program and its warps, as measured on an H200


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


@triton.jit(do_not_specialize=["groups"])
def dequantize_words(
    codes, scales, result, groups, NUMBERS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """bf16 of E2M1 codes, NUMBERS of the `groups` groups; codes, scales and result lie in one piece. A thread has eight neighbours."""
    COUNT: tl.constexpr = NUMBERS // GROUP
    first = tl.program_id(0).to(tl.int64) * COUNT
    left = tl.minimum(groups - first, COUNT).to(tl.int32)
    # The hints keep Triton from exchanging words and bytes among threads.
    word = tl.multiple_of(tl.arange(0, NUMBERS // 8), 1)
    inside = word < left * (GROUP // 8)
    source = (codes + first * (GROUP // 2)).to(tl.pointer_type(tl.int32), bitcast=True)
    words = tl.load(source + word, mask=inside, other=0)
    bytes = tl.load(scales + first + tl.multiple_of(word // (GROUP // 8), 1), mask=inside, other=0)
    pairs = decode_pairs(words, scale_pairs(bytes, SCALE, NATIVE)).reshape(NUMBERS // 2)
    pair = tl.arange(0, NUMBERS // 2)
    target = (result + first * GROUP).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(target + pair, pairs, mask=pair < left * (GROUP // 2))


def run(
    codes: Tensor, scales: Tensor, result: Tensor, block: tuple[int, int], *, pitch: int, numbers: str, scale: str, layout: str
) -> None:
    """Contiguous codes into contiguous result [rows, n]; scales are bytes or fp32, read by `scale_place`."""
    group_rows, group = block
    rows, columns = result.shape
    native = has_native_e4m3(dequantize_tile, codes.device)
    whole = group_rows == 1 and columns % group == 0 and group >= 8 and codes.data_ptr() % 4 == 0
    plain = numbers == "e2m1" and scale != "fp32" and layout == "rows" and result.dtype == torch.bfloat16
    if plain and whole and takes_pairs(dequantize_tile, codes.device):
        run_words(codes, scales, result, group, scale=scale, native=native)
        return
    groups = triton.cdiv(columns, group)
    width = max(TILE // 16 // group, 1)
    height = TILE // (width * group)
    grid = (triton.cdiv(rows, height) * triton.cdiv(groups, width),)
    with torch.cuda.device_of(codes):
        dequantize_tile[grid](
            codes, scales, result, rows, columns, groups, pitch,
            ROWS=height, GROUPS=width, GROUP=group, GROUP_ROWS=group_rows, NUMBERS=numbers, SCALE=scale, LAYOUT=layout,
            NATIVE=native, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def run_words(
    codes: Tensor, scales: Tensor, result: Tensor, group: int, *, scale: str, native: bool, tile: tuple[int, int] = WORD_TILE
) -> None:
    """As `run`, E2M1 codes at a multiple of four bytes, in whole groups of a row, to bf16. `tile` has numbers of a program and warps."""
    numbers, warps = tile
    groups = result.numel() // group
    with torch.cuda.device_of(codes):
        dequantize_words[(triton.cdiv(groups * group, numbers),)](
            codes, scales, result, groups, NUMBERS=numbers, GROUP=group, SCALE=scale, NATIVE=native, num_warps=warps, enable_fp_fusion=False
        )
