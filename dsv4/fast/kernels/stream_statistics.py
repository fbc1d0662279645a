"""Statistics of residual streams: their products with fn and their sums of squares, in splits of K.

`products` multiplies streams [tokens, K] by fn [mixes, K] and squares the streams in the same pass. K is cut into splits whose number does
not depend on the tokens, and tiles have one size, so a row's terms are added in one order in any batch. fn is fp32: the tensor cores get it
as three bf16 parts of eight significant bits each, which together are all of it; products with bf16 streams are exact, and each part has
an fp32 sum of its own. (TF32 products would cut fn to eleven bits, and fp32 ones do not run on the tensor cores.) The sums of all splits
are added in fp64, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import INFINITY, MAGNITUDE, widened
from dsv4.fast.kernels.rows import HIGH
from dsv4.fast.kernels.stream_mix import inverse_root, split_total

STEPS, SPLITS = 8, 16  # tiles of K in a split, at least; splits, at most


ROWS, DEPTH = 64, 64  # of a tile


@triton.jit
def at_precision(fn, PRECISION: tl.constexpr):
    """fp32: what of the weight takes part. TF32 lacks the lowest 13 bits."""
    if PRECISION == "exact":
        weight = fn
    else:
        weight = (fn.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        if PRECISION == "tf32_compensated":
            weight += ((fn - weight).to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return weight


@triton.jit
def top(x):
    """x without its lower 16 bits: a bf16 number, as fp32. What is left has 16 significant bits, and then 8."""
    return (x.to(tl.int32, bitcast=True) & HIGH).to(tl.float32, bitcast=True)


@triton.jit
def weight_parts(fn, PRECISION: tl.constexpr):
    """What of fp32 weights takes part, as three bf16 numbers in fp32; at the precision tf32 the third one is 0."""
    weight = at_precision(fn, PRECISION)
    first = top(weight)
    # Infinity has no rest.
    rest = tl.where((weight.to(tl.int32, bitcast=True) & MAGNITUDE) == INFINITY, 0.0, weight - first)
    second = top(rest)
    return first, second, rest - second


@triton.jit
def _dot(x, part, total, NATIVE: tl.constexpr):
    """x [rows, depth] bf16 times a part of the weight, bf16 numbers of any type. The interpreter multiplies bf16 wrongly."""
    if NATIVE:
        total = tl.dot(x, part.to(tl.bfloat16), total)
    else:
        total = tl.dot(widened(x, False), widened(part, False), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def products_tile(
    streams,
    fn,
    parts,  # fp32 [splits, tokens, M]
    squares,  # fp32 [splits, tokens]
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    MIXES: tl.constexpr,  # the next power of two that tl.dot takes
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One split of K for ROWS tokens, the last tokens first: those are what a cache still has of streams just written."""
    tile = tl.num_programs(0) // SPLITS - 1 - tl.program_id(0) // SPLITS
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mix = tl.arange(0, MIXES)
    split = (tl.program_id(0) % SPLITS).to(tl.int64)
    live = (row < tokens)[:, None]
    high = tl.zeros([ROWS, MIXES], tl.float32)
    middle = tl.zeros([ROWS, MIXES], tl.float32)
    low = tl.zeros([ROWS, MIXES], tl.float32)
    square = tl.zeros([ROWS, DEPTH], tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        x = tl.load(streams + row[:, None] * K + k[None, :], mask=live & (k < K)[None, :], other=0.0)
        weight = tl.load(fn + mix[None, :].to(tl.int64) * K + k[:, None], mask=(mix < M)[None, :] & (k < K)[:, None], other=0.0)
        first, second, third = weight_parts(weight, PRECISION)
        high = _dot(x, first, high, NATIVE)
        middle = _dot(x, second, middle, NATIVE)
        if PRECISION != "tf32":
            low = _dot(x, third, low, NATIVE)
        wide = widened(x, NATIVE)
        square += wide * wide
    place = (split * tokens + row)[:, None] * M + mix[None, :]
    tl.store(parts + place, (low + middle) + high, mask=live & (mix < M)[None, :])
    tl.store(squares + split * tokens + row, tl.sum(square, axis=1), mask=row < tokens)


@triton.jit(do_not_specialize=["tokens"])
def add_tile(
    parts,
    squares,
    mixes,
    tokens,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,  # of the products, and of the squares
    SQUARE_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mixes of the sums of all splits, element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // M
    live = row < tokens
    factor = inverse_root(split_total(squares, row, live, tokens, SQUARE_SPLITS), K, eps)
    total = split_total(parts, at, live, tokens.to(tl.int64) * M, SPLITS)
    tl.store(mixes + at, (total * factor).to(tl.float32), mask=live)


def products(streams: Tensor, fn: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """fp32 [splits, tokens, mixes] and [splits, tokens] of streams [tokens, C, D] and fn [mixes, C D]; neither is empty."""
    flat, weight = aligned(streams), aligned(fn)
    tokens, (mixes, width) = flat.shape[0], weight.shape
    tiles = triton.cdiv(width, DEPTH)
    steps = max(STEPS, triton.cdiv(tiles, SPLITS))
    splits = triton.cdiv(tiles, steps)
    parts = torch.empty(splits, tokens, mixes, dtype=torch.float32, device=flat.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=flat.device)
    with torch.cuda.device_of(flat):
        products_tile[(triton.cdiv(tokens, ROWS) * splits,)](
            flat, weight, parts, squares, tokens, K=width, M=mixes, MIXES=max(triton.next_power_of_2(mixes), 16), SPLITS=splits,
            STEPS=steps, ROWS=ROWS, DEPTH=DEPTH, PRECISION=precision, NATIVE=isinstance(products_tile, triton.JITFunction),
            num_warps=4 if mixes <= 32 else 8, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return parts, squares


def add_parts(parts: Tensor, squares: Tensor, width: int, eps: float) -> Tensor:
    """fp32 [tokens, mixes] of products [splits, tokens, mixes] and squares, which may be in fewer splits, of rows of `width` numbers."""
    splits, tokens, mixes = parts.shape
    result = torch.empty(tokens, mixes, dtype=torch.float32, device=parts.device)
    with torch.cuda.device_of(parts):
        add_tile[(triton.cdiv(result.numel(), 256),)](
            parts, squares, result, tokens, eps, K=width, M=mixes, SPLITS=splits, SQUARE_SPLITS=squares.shape[0], BLOCK=256, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return result


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from an address that Triton reads in words of 16 bytes: how squares are spread over threads, and so the order of their
    sum, follows from that."""
    plain = tensor.contiguous()
    return plain.clone() if plain.data_ptr() % 16 else plain
