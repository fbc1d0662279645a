"""E4M3 codes of a weight in blocks. A program holds neighbouring blocks of up to TILE numbers in registers, so that they are read once; a
larger block is gone through twice, for the largest magnitude and for the codes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import encode_e4m3, group_amax, has_native_e4m3, scales_and_quotients, widened

TILE = 16384
WARPS = 8


@triton.jit(do_not_specialize=["n", "least", "floor"])
def quantize_block(
    weight,
    codes,
    scales,
    n,
    k,
    stride,
    least,
    floor,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK_N: tl.constexpr,
    KIND: tl.constexpr,
    DIVIDE: tl.constexpr,
    ON_SCALE: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """BLOCKS neighbouring blocks of BLOCK_N by BLOCK_K, at an edge perhaps a part of them. Axes of a tile: row, block, column."""
    program = tl.program_id(0)
    across = tl.cdiv(k, BLOCK_K)
    programs = tl.cdiv(across, BLOCKS)
    first = program // programs * BLOCK_N
    block = (program % programs * BLOCKS + tl.arange(0, BLOCKS))[None, :, None]
    column = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    row = (first + tl.arange(0, CHUNK_N))[:, None, None]
    wide = row.to(tl.int64)
    inside = (row < n) & (column < k)
    loaded = tl.load(weight + (wide * stride + column), mask=inside, other=0.0)
    amax = _amax(widened(loaded, NATIVE), NATIVE)
    for chunk in range(1, BLOCK_N // CHUNK_N):
        wide = (row + chunk * CHUNK_N).to(tl.int64)
        more = tl.load(weight + (wide * stride + column), mask=(wide < n) & (column < k), other=0.0)
        amax = tl.maximum(amax, _amax(widened(more, NATIVE), NATIVE))
    stored, _, quotients = scales_and_quotients(widened(loaded, NATIVE), amax, least, floor, KIND, DIVIDE, ON_SCALE, ZEROES, False, NATIVE)
    place = program // programs * across + block
    tl.store(scales + place, stored.to(scales.dtype.element_ty), mask=block < across)
    tl.store(codes + (row.to(tl.int64) * k + column), encode_e4m3(quotients, NATIVE), mask=inside)
    for chunk in range(1, BLOCK_N // CHUNK_N):
        wide = (row + chunk * CHUNK_N).to(tl.int64)
        mask = (wide < n) & (column < k)
        numbers = widened(tl.load(weight + (wide * stride + column), mask=mask, other=0.0), NATIVE)
        _, _, quotients = scales_and_quotients(numbers, amax, least, floor, KIND, DIVIDE, ON_SCALE, ZEROES, False, NATIVE)
        tl.store(codes + (wide * k + column), encode_e4m3(quotients, NATIVE), mask=mask)


@triton.jit
def _amax(numbers, NATIVE: tl.constexpr):
    """Bits of the largest magnitude of each block: [1, BLOCKS, 1]."""
    return tl.max(group_amax(numbers, NATIVE), axis=0, keep_dims=True)


def run(weight: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], *, floor: float, **options: Any) -> None:
    """Quantise weight [n, k], last stride 1, into contiguous `codes` and `scales`."""
    rows, columns = block
    power = isinstance(floor, int)
    chunk = min(rows, max(TILE // columns, 1))
    blocks = min(max(TILE // (rows * columns), 1), triton.next_power_of_2(scales.shape[1]))
    with torch.cuda.device_of(weight):
        quantize_block[(scales.shape[0] * triton.cdiv(scales.shape[1], blocks),)](
            weight, codes, scales, *weight.shape, weight.stride(0), floor if power else 0, 0.0 if power else floor,
            BLOCK_N=rows, BLOCK_K=columns, BLOCKS=blocks, CHUNK_N=chunk,
            NATIVE=has_native_e4m3(quantize_block, weight.device), num_warps=WARPS, enable_fp_fusion=False, **options,
        )  # fmt: skip
