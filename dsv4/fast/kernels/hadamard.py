"""The Walsh-Hadamard transform of rows: a butterfly whose steps are all alike.

A step adds and subtracts neighbours, and sends the sums to the first half and the differences to the second. The lowest bit of the column
becomes the highest; after as many steps as there are bits each of them has had its turn and all are in their places again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.rows import to_bf16

TILE = 2048  # numbers of a program, at least one row


@triton.jit(do_not_specialize=["rows"])
def hadamard_tile(x, result, rows, ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, NARROW: tl.constexpr):
    """Contiguous rows [rows, N], N = 2^BITS, fp32 or (NARROW) the bits of bf16 as int16; fp64 inside."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = row * N + tl.arange(0, N)[None, :]
    numbers = tl.load(x + at, mask=row < rows, other=0)
    if NARROW:
        numbers = (numbers.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    sums = numbers.to(tl.float64)
    for _ in tl.static_range(BITS):
        even, odd = tl.split(sums.reshape(ROWS, N // 2, 2))
        sums = tl.join(even + odd, even - odd).permute(0, 2, 1).reshape(ROWS, N)
    scaled = (sums + 0.0) * (1.0 / tl.sqrt(tl.full([1, 1], N, tl.float64)))
    if NARROW:
        tl.store(result + at, (to_bf16(scaled).to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=row < rows)
    else:
        tl.store(result + at, scaled.to(tl.float32), mask=row < rows)


def run(x: Tensor) -> Tensor:
    """bf16 or fp32 [..., n], n a power of two, not empty."""
    source, result, n = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows, height, narrow = x.numel() // n, max(TILE // n, 1), x.dtype == torch.bfloat16
    given, into = (tensor.view(torch.int16) if narrow else tensor for tensor in (source, result))
    with torch.cuda.device_of(x):
        hadamard_tile[(triton.cdiv(rows, height),)](
            given, into, rows, ROWS=height, N=n, BITS=n.bit_length() - 1, NARROW=narrow, num_warps=8 if n > TILE else 4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return result
