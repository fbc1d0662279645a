"""One pass over a matrix: codes and scales of groups along the rows, the scales in any layout with its pads, or the fake-quantised matrix.

A program covers ROWS rows by GROUPS groups, at least 512 neighbouring numbers of each row, so that accesses are coalesced and whole words
of four scales belong to one program. Programs of neighbouring columns follow each other, and the scales of a row meet in the cache. Nothing
depends on the number of rows: no specialisation, no other order of operations.

FP4 of bf16 has a kernel of its own on devices whose instructions it is made of, in words of eight codes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import (
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    group_amax,
    has_native_e4m3,
    rounded,
    scale_place,
    scales_and_quotients,
    widened,
)
from dsv4.fast.kernels.codec_pairs import (
    INFINITY_BF16,
    amax_of_pairs,
    encode_pairs,
    four_pairs,
    nearest_pairs,
    scale_of_pairs,
    takes_pairs,
)

# Numbers of a program and its warps, as measured on an H200.
TILES = {"fp8": (8192, 8), "fp8_fp32": (4096, 4), "mxfp4": (8192, 4), "fp4_e4m3": (4096, 4)}
# Of the kernel with words: numbers of a program and its warps, by whether it is fake.
WORD_TILES = {False: (8192, 8), True: (2048, 4)}
RUN: tl.constexpr = tl.constexpr(8)  # neighbours of a thread
LEAST_WORD_GROUP = 16
FP4 = ("mxfp4", "fp4_e4m3")


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
    codes = encode_e2m1(quotients, TIES, ZERO_SIGN) if four else encode_e4m3(quotients, NATIVE)
    if FAKE:
        decoded = decode_e2m1(codes) if four else decode_e4m3(codes, NATIVE)
        tl.store(result + (wide * groups * GROUP + column), rounded(decoded * scale, result.dtype.element_ty, NATIVE), mask=live)
    else:
        if four:
            low, high = tl.split(codes.reshape(ROWS, GROUPS, GROUP // 2, 2))
            pairs = low | (high << 4)
            byte = group * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
            tl.store(result + (wide * groups * (GROUP // 2) + byte), pairs.to(tl.uint8), mask=live)
        else:
            tl.store(result + (wide * groups * GROUP + column), codes, mask=live)
        kept = tl.where(live, stored, 0).to(scales.dtype.element_ty)
        tl.store(scales + scale_place(row, group, pitch, LAYOUT), kept, mask=(row < scale_rows) & (group < scale_groups))


@triton.jit
def _place(index, pitch, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Where the units of a tile of HEIGHT rows of WIDTH lie, in rows `pitch` apart."""
    return index if HEIGHT == 1 else (index // WIDTH).to(tl.int64) * pitch + index % WIDTH


@triton.jit
def _live(index, down, right, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Whether a unit of a tile lies in the matrix, `down` rows and `right` units of which are left."""
    return index < right if HEIGHT == 1 else (index // WIDTH < down) & (index % WIDTH < right)


@triton.jit
def _store_words(words, pairs, groups, down, right, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Numbers as pairs [..., 2, 2]."""
    COUNT: tl.constexpr = HEIGHT * WIDTH // 2
    index = tl.arange(0, COUNT)
    inside = _live(index, down, right * (GROUP // 2), WIDTH // 2, HEIGHT)
    tl.store(words + _place(index, groups * (GROUP // 2), WIDTH // 2, HEIGHT), pairs.reshape(COUNT), mask=inside)


@triton.jit
def _store_codes(words, codes, groups, down, right, GROUP: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Words of codes, one of each thread: the hint keeps Triton from exchanging them among threads."""
    COUNT: tl.constexpr = HEIGHT * WIDTH // 8
    index = tl.multiple_of(tl.arange(0, COUNT), 1)
    inside = _live(index, down, right * (GROUP // 8), WIDTH // 8, HEIGHT)
    tl.store(words + _place(index, groups * (GROUP // 8), WIDTH // 8, HEIGHT), codes.reshape(COUNT), mask=inside)


@triton.jit
def _store_scales(scales, stored, groups, down, right, LANES: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """A byte of each group, by the first of the LANES threads that have it; WIDTH in groups. The hint as above."""
    COUNT: tl.constexpr = HEIGHT * WIDTH * LANES
    lane = tl.multiple_of(tl.arange(0, COUNT), 1)
    index = tl.multiple_of(lane // LANES, 1)
    bytes = tl.broadcast_to(stored, (HEIGHT * WIDTH, LANES)).reshape(COUNT).to(tl.uint8)
    inside = (lane % LANES == 0) & _live(index, down, right, WIDTH, HEIGHT)
    tl.store(scales + _place(index, groups, WIDTH, HEIGHT), bytes, mask=inside)


@triton.jit(do_not_specialize=["rows", "groups", "least", "floor"])
def quantize_words(
    x,
    result,
    scales,
    rows,
    groups,  # of a row; of the whole matrix if FLAT
    stride,
    least,
    floor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    FLAT: tl.constexpr,
    KIND: tl.constexpr,
    TIES: tl.constexpr,
    ZERO_SIGN: tl.constexpr,
    FAKE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """FP4 of bf16, scales in rows. A tile is HEIGHT rows of WIDTH numbers; a thread has runs of RUN neighbours."""
    LANES: tl.constexpr = GROUP // RUN
    NUMBERS: tl.constexpr = HEIGHT * WIDTH
    row = tl.cast(0, tl.int32) if FLAT else tl.program_id(0) * HEIGHT
    group = tl.program_id(0 if FLAT else 1) * (WIDTH // GROUP)
    down = rows - row
    right = tl.minimum(groups - group, WIDTH // GROUP)
    first = row.to(tl.int64) * groups + group  # group of the result
    number = tl.arange(0, NUMBERS)
    inside = _live(number, down, right * GROUP, WIDTH, HEIGHT)
    source = x + (row.to(tl.int64) * stride + group.to(tl.int64) * GROUP)
    a, b, c, d = four_pairs(tl.load(source + _place(number, stride, WIDTH, HEIGHT), mask=inside, other=0.0), NUMBERS, LANES)
    largest = amax_of_pairs(a, b, c, d)
    amax = tl.max(tl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF), axis=1, keep_dims=True)
    stored, inverse, rest, scale = scale_of_pairs(amax, least, floor, KIND, NATIVE)
    if FAKE:
        words = (result + first * GROUP).to(tl.pointer_type(tl.int32), bitcast=True)
        pairs = nearest_pairs(a, b, c, d, inverse, rest, scale, KIND, TIES, ZERO_SIGN)
        _store_words(words, pairs, groups, down, right, GROUP, WIDTH, HEIGHT)
    else:
        words = (result + first * (GROUP // 2)).to(tl.pointer_type(tl.int32), bitcast=True)
        finite = amax < INFINITY_BF16
        codes = tl.where(finite, encode_pairs(a, b, c, d, inverse, rest, KIND, TIES, ZERO_SIGN), 0)
        _store_codes(words, codes, groups, down, right, GROUP, WIDTH, HEIGHT)
        _store_scales(scales + first, stored, groups, down, right, LANES, WIDTH // GROUP, HEIGHT)


def run(
    x: Tensor, result: Tensor, scales: Tensor, group: int, *, padded: tuple[int, int], pitch: int, floor: float, **options: Any
) -> None:
    """Quantise x [rows, n], last stride 1, into contiguous `result`, and into `padded` rows and groups of `scales` (bytes or fp32)."""
    native = has_native_e4m3(quantize_tile, x.device)
    if takes_pairs(quantize_tile, x.device) and x.dtype == torch.bfloat16 and options["KIND"] in FP4 and group >= LEAST_WORD_GROUP:
        run_words(x, result, scales, group, floor=floor, native=native, **options)
        return
    rows, groups = x.shape[0], x.shape[1] // group
    tile, warps = TILES[options["KIND"]]
    width = max(tile // 16 // group, 4)  # groups of a program
    height = max(tile // (width * group), 1)
    grid = (triton.cdiv(padded[0], height) * triton.cdiv(padded[1], width),)
    power = isinstance(floor, int)
    with torch.cuda.device_of(x):
        quantize_tile[grid](
            x, result, scales, rows, groups, x.stride(0), *padded, pitch, floor if power else 0, 0.0 if power else floor,
            ROWS=height, GROUPS=width, GROUP=group, NATIVE=native, num_warps=warps, enable_fp_fusion=False, **options,
        )  # fmt: skip


def run_words(
    x: Tensor, result: Tensor, scales: Tensor, group: int, *, floor: float, native: bool, tile: tuple[int, int] | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """As `run`, of bf16 with scales in rows. `tile` has numbers of a program and its warps."""
    kind, fake = options["KIND"], options["FAKE"]
    numbers, warps = tile or WORD_TILES[fake]
    rows, groups = x.shape[0], x.shape[1] // group
    flat = x.stride(0) == x.shape[1]
    width = numbers if flat else min(triton.next_power_of_2(x.shape[1]), numbers)
    height = numbers // width
    grid = (triton.cdiv(rows * groups * group, width),) if flat else (triton.cdiv(rows, height), triton.cdiv(x.shape[1], width))
    power = isinstance(floor, int)
    with torch.cuda.device_of(x):
        quantize_words[grid](
            x, result, scales, rows, rows * groups if flat else groups, 0 if flat else x.stride(0),
            floor if power else 0, 0.0 if power else floor,
            HEIGHT=height, WIDTH=width, GROUP=group, FLAT=flat, KIND=kind, TIES=options["TIES"],
            ZERO_SIGN=options["ZERO_SIGN"], FAKE=fake, NATIVE=native, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
