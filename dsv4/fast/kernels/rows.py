"""Norm and rotation of rows inside a kernel: what every fused kernel of rows calls.

A row of n numbers is held as its even and its odd elements, each [ROWS, pairs]: a pair of these is a rotary pair, two FP4 codes of one
byte, and neighbours in any group. Two bf16 numbers are one int32 word in memory, the even one low. Arithmetic is fp64 and rounded to fp32
and from there to bf16, as the reference rounds; rounded numbers are handed on as fp32. Two fp32 numbers, likewise, are one int64 word.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import INFINITY, MAGNITUDE, NAN

HIGH: tl.constexpr = tl.constexpr(-65536)  # 0xFFFF0000


@triton.jit
def unpack_pairs(words):
    """The even and the odd number of int32 words of two bf16, as fp32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & HIGH).to(tl.float32, bitcast=True)


@triton.jit
def unpack_wide_pairs(words):
    """The even and the odd number of int64 words of two fp32."""
    return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def weight_pairs(weight, pair, mask):
    """The even and the odd weight of pairs, as fp32, 0 where there is none; `weight` points to the words of `weight_words`."""
    words = tl.load(weight + pair, mask=mask, other=0)
    if words.dtype == tl.int64:
        even, odd = unpack_wide_pairs(words)
    else:
        even, odd = unpack_pairs(words)
    return even, odd


@triton.jit
def pack_pairs(even, odd):
    """int32 words of fp32 numbers that are bf16 numbers already."""
    return ((even.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (odd.to(tl.int32, bitcast=True) & HIGH)


@triton.jit
def to_bf16(exact):
    """fp64 or fp32 rounded to fp32 and from there to bf16, ties to even, as fp32. The interpreter's own cast drops bits."""
    bits = exact.to(tl.float32).to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & HIGH
    return tl.where((bits & MAGNITUDE) > INFINITY, NAN, nearest).to(tl.float32, bitcast=True)


@triton.jit
def sum_squares(even, odd):
    """fp64 [ROWS]: sums of the squares of rows. What lies behind the end of a row must be 0."""
    first, second = even.to(tl.float64), odd.to(tl.float64)
    return tl.sum(first * first + second * second, axis=1)


@triton.jit
def norm_factor(total, n: tl.constexpr, eps):
    """1 / sqrt(total / n + eps): fp64. `total` fp64 [ROWS] or a scalar, eps an fp32 number of the launch."""
    return 1.0 / tl.sqrt(total / n + tl.full([], eps, tl.float64))


@triton.jit
def inverse_root(value, NATIVE: tl.constexpr):
    """fp64 1 / sqrt of fp64 numbers that are no subnormal ones, within 0.51 ulp, so that it is exact where the root is a power of two.

    NATIVE: y, the device's approximation without its lower half, has 21 bits, so that 1 - value y^2 = e rounds once. With y = (1 + d) of
    the exact root, 1 / sqrt(1 - e) = 1 + e/2 + 3/8 e^2 + 5/16 e^3 + .., and for |d| < 2^-16 what is left out is less than 2^-60. A
    correctly rounded root and division take ten times as many instructions, in every thread that has a number of the row.
    """
    if NATIVE:
        near = tl.inline_asm_elementwise("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [value], dtype=tl.float64, is_pure=True, pack=1)
        near = (near.to(tl.int64, bitcast=True) & -4294967296).to(tl.float64, bitcast=True)  # -2^32
        error = tl.fma(-value, near * near, tl.full([], 1.0, tl.float64))
        series = tl.fma(error, tl.full([], 0.3125, tl.float64), tl.full([], 0.375, tl.float64))
        series = tl.fma(error, series, tl.full([], 0.5, tl.float64))
        root = tl.fma(near, error * series, near)
        root = tl.where((near > 0.0) & (near < float("inf")), root, near)  # of 0, infinity and NaN
    else:
        root = 1.0 / tl.sqrt(value)
    return root


@triton.jit
def scale_pairs(even, odd, factor, weight_even, weight_odd, HAS_WEIGHT: tl.constexpr):
    """Numbers times the factor of their row (fp64, of a shape that broadcasts), times their weights: bf16 numbers as fp32."""
    first, second = even.to(tl.float64) * factor, odd.to(tl.float64) * factor
    if HAS_WEIGHT:
        first *= weight_even.to(tl.float64)
        second *= weight_odd.to(tl.float64)
    return to_bf16(first), to_bf16(second)


@triton.jit
def round_pairs(even, odd, NATIVE: tl.constexpr):
    """int32 words of two bf16 of fp64 or fp32 numbers, rounded as `to_bf16` does; a NaN has other bits where NATIVE."""
    if NATIVE:
        first, second = even.to(tl.float32), odd.to(tl.float32)
        words = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    else:
        words = pack_pairs(to_bf16(even), to_bf16(odd))
    return words


@triton.jit
def normalise_pairs(even, odd, weight_even, weight_odd, n: tl.constexpr, eps, HAS_WEIGHT: tl.constexpr):
    """RMS norm of whole rows: even and odd, bf16 numbers as fp32.

    even, odd [ROWS, pairs] in any float type, 0 behind the end of a row; weight_even, weight_odd in any float type of a shape that
    broadcasts, not read without HAS_WEIGHT; n the numbers of a row, even and odd together; eps an fp32 number of the launch.
    """
    factor = norm_factor(sum_squares(even, odd), n, eps)
    return scale_pairs(even, odd, factor[:, None], weight_even, weight_odd, HAS_WEIGHT)


@triton.jit
def rotate_pairs(even, odd, cosines, sines, INVERSE: tl.constexpr):
    """Rotary pairs turned: even and odd, bf16 numbers as fp32.

    even, odd [ROWS, pairs] of bf16 numbers in any float type; cosines, sines fp32 of a shape that broadcasts to theirs.
    """
    first, second = even.to(tl.float64), odd.to(tl.float64)
    along, across = cosines.to(tl.float64), sines.to(tl.float64)
    if INVERSE:
        across *= -1.0  # a unary minus is 0 - x to Triton, and loses the sign of a zero
    return to_bf16(first * along - second * across), to_bf16(first * across + second * along)


def words(x: Tensor) -> Tensor:
    """bf16 [..., n], n even, as contiguous int32 words [..., n/2]: a copy where x has gaps or begins within a word."""
    return row_words(x.contiguous())


def wide_words(x: Tensor) -> Tensor:
    """fp32 [..., n], n even, as contiguous int64 words [..., n/2]: a copy where x has gaps or begins within a word."""
    return row_words(x.contiguous(), torch.int64)


def weight_words(weight: Tensor) -> Tensor:
    """bf16 or fp32 weights [n], n even, as the words that `weight_pairs` reads."""
    return wide_words(weight) if weight.dtype == torch.float32 else words(weight)


def row_words(x: Tensor, word: torch.dtype = torch.int32) -> Tensor:
    """Words of two numbers of x [..., n], n even, which may have gaps between its rows: a copy where words would be cut or misaligned."""
    steps = (*x.stride()[:-1], x.storage_offset())
    fits = x.stride(-1) == 1 and not any(step % 2 for step in steps) and x.data_ptr() % word.itemsize == 0
    return (x if fits else x.clone(memory_format=torch.contiguous_format)).view(word)
