"""Statistics of residual streams: their products with fn and their sums of squares, in splits of K.

`products` multiplies streams [tokens, K] by fn [mixes, K] and squares the streams in the same pass, unless the launch that wrote them did.
K is cut into splits whose number does not depend on the tokens, and tiles have one size, so a row's terms are added in one order in any
batch. fn is fp32: the tensor cores get it as three bf16 parts of eight significant bits each, which together are all of it; products with
bf16 streams are exact, and each part has an fp32 sum of its own. (TF32 products would cut fn to eleven bits, and fp32 ones do not run on
the tensor cores.) The sums of all splits are added in fp64, in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import INFINITY, MAGNITUDE, rounded, widened
from dsv4.fast.kernels.rows import HIGH
from dsv4.fast.kernels.stream_mix import inverse_root, split_total

STEPS, SPLITS = 8, 16  # tiles of K in a split, at least; splits, at most


ROWS, DEPTH = 64, 64  # of a tile
READY = 512  # tokens from which on fn is split beforehand, not by each program
BLOCK = 1024  # weights of a program that splits fn


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


@triton.jit
def write_weights(
    fn, weights, program,
    K: tl.constexpr, M: tl.constexpr, MIXES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """BLOCK weights of the bf16 parts [2 or 3, MIXES, K] of fn [M, K], zeros behind its last mix."""
    at = program * BLOCK + tl.arange(0, BLOCK)
    live = at < MIXES * K
    first, second, third = weight_parts(tl.load(fn + at, mask=at < M * K, other=0.0), PRECISION)
    tl.store(weights + at, rounded(first, tl.bfloat16, NATIVE), mask=live)
    tl.store(weights + MIXES * K + at, rounded(second, tl.bfloat16, NATIVE), mask=live)
    if PRECISION != "tf32":
        tl.store(weights + 2 * MIXES * K + at, rounded(third, tl.bfloat16, NATIVE), mask=live)


@triton.jit
def split_tile(
    fn, weights, K: tl.constexpr, M: tl.constexpr, MIXES: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`write_weights` as a launch of its own."""
    write_weights(fn, weights, tl.program_id(0), K, M, MIXES, PRECISION, BLOCK, NATIVE)


@triton.jit(do_not_specialize=["tokens"])
def products_tile(
    streams,
    fn,  # or its parts, bf16 [2 or 3, MIXES, K]
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
    READY: tl.constexpr,  # fn is in parts
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
        place = fn + mix[None, :].to(tl.int64) * K + k[:, None]
        if READY:
            inside = (k < K)[:, None]
            first = tl.load(place, mask=inside, other=0.0)
            second = tl.load(place + MIXES * K, mask=inside, other=0.0)
            third = first
            if PRECISION != "tf32":
                third = tl.load(place + 2 * MIXES * K, mask=inside, other=0.0)
        else:
            first, second, third = weight_parts(tl.load(place, mask=(mix < M)[None, :] & (k < K)[:, None], other=0.0), PRECISION)
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


def empty_weights(fn: Tensor, precision: str) -> Tensor:
    """Memory for bf16 parts [2 or 3, mixes, K] of fn, mixes filled up to what tl.dot takes."""
    return torch.empty(2 if precision == "tf32" else 3, mixes_of_dot(fn.shape[0]), fn.shape[1], dtype=torch.bfloat16, device=fn.device)


def split_programs(fn: Tensor) -> int:
    """How many programs split fn."""
    programs: int = triton.cdiv(mixes_of_dot(fn.shape[0]) * fn.shape[1], BLOCK)
    return programs


def split_weights(fn: Tensor, precision: str) -> Tensor:
    """The parts of fn, contiguous, in one launch."""
    weights = empty_weights(fn, precision)
    with torch.cuda.device_of(fn):
        split_tile[(split_programs(fn),)](
            fn, weights, K=fn.shape[1], M=fn.shape[0], MIXES=weights.shape[1], PRECISION=precision, BLOCK=BLOCK,
            NATIVE=isinstance(split_tile, triton.JITFunction), num_warps=4,
        )  # fmt: skip
    return weights


def mixes_of_dot(mixes: int) -> int:
    """The width of a product of so many mixes."""
    return max(1 << (mixes - 1).bit_length(), 16)


def products(streams: Tensor, fn: Tensor, precision: str, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """fp32 [splits, tokens, mixes] and [splits, tokens] of streams [tokens, C, D] and fn [mixes, C D]; neither is empty.

    weights: parts of fn, where another launch has made them.
    """
    flat, tokens, (mixes, width) = aligned(streams), streams.shape[0], fn.shape
    tiles = triton.cdiv(width, DEPTH)
    steps = max(STEPS, triton.cdiv(tiles, SPLITS))
    splits = triton.cdiv(tiles, steps)
    parts = torch.empty(splits, tokens, mixes, dtype=torch.float32, device=flat.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=flat.device)
    if weights is None:
        weights = split_weights(aligned(fn), precision) if tokens >= READY else aligned(fn)
    with torch.cuda.device_of(flat):
        products_tile[(triton.cdiv(tokens, ROWS) * splits,)](
            flat, weights, parts, squares, tokens, K=width, M=mixes, MIXES=mixes_of_dot(mixes), SPLITS=splits, STEPS=steps, ROWS=ROWS,
            DEPTH=DEPTH, PRECISION=precision, READY=weights.dtype == torch.bfloat16, NATIVE=isinstance(products_tile, triton.JITFunction),
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
