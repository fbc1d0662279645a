"""E4M3 codes of a weight in blocks: a program for each, which reads it twice, for the largest magnitude and for the codes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import MAGNITUDE, encode_e4m3, has_native_e4m3, scales_and_quotients, widened

CHUNK = 8192  # numbers of a block that are in registers at once


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
    CHUNK_N: tl.constexpr,
    KIND: tl.constexpr,
    DIVIDE: tl.constexpr,
    ON_SCALE: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One block of BLOCK_N by BLOCK_K, at an edge perhaps a part of it."""
    program = tl.program_id(0)
    across = tl.cdiv(k, BLOCK_K)
    first = program // across * BLOCK_N
    column = (program % across * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    amax = tl.zeros((1, BLOCK_K), tl.int32)
    for chunk in range(BLOCK_N // CHUNK_N):
        row = (first + chunk * CHUNK_N + tl.arange(0, CHUNK_N))[:, None]
        numbers = widened(tl.load(weight + (row.to(tl.int64) * stride + column), mask=(row < n) & (column < k), other=0.0), NATIVE)
        amax = tl.maximum(amax, tl.max(numbers.to(tl.int32, bitcast=True) & MAGNITUDE, axis=0, keep_dims=True))
    amax = tl.max(amax, axis=1, keep_dims=True)
    zero = tl.zeros((1, 1), tl.float32)
    stored, _, _ = scales_and_quotients(zero, amax, least, floor, KIND, DIVIDE, ON_SCALE, ZEROES, NATIVE)
    tl.store(scales + program + tl.zeros((1, 1), tl.int32), stored.to(scales.dtype.element_ty))
    for chunk in range(BLOCK_N // CHUNK_N):
        row = (first + chunk * CHUNK_N + tl.arange(0, CHUNK_N))[:, None]
        inside = (row < n) & (column < k)
        numbers = widened(tl.load(weight + (row.to(tl.int64) * stride + column), mask=inside, other=0.0), NATIVE)
        _, _, quotients = scales_and_quotients(numbers, amax, least, floor, KIND, DIVIDE, ON_SCALE, ZEROES, NATIVE)
        tl.store(codes + (row.to(tl.int64) * k + column), encode_e4m3(quotients, NATIVE), mask=inside)


def run(weight: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], *, floor: float, **options: Any) -> None:
    """Quantise weight [n, k], last stride 1, into contiguous `codes` and `scales`."""
    rows, columns = block
    power = isinstance(floor, int)
    with torch.cuda.device_of(weight):
        quantize_block[(scales.numel(),)](
            weight, codes, scales, *weight.shape, weight.stride(0), floor if power else 0, 0.0 if power else floor,
            BLOCK_N=rows, BLOCK_K=columns, CHUNK_N=min(rows, CHUNK // columns),
            NATIVE=has_native_e4m3(quantize_block, weight.device), num_warps=8, enable_fp_fusion=False, **options,
        )  # fmt: skip
