"""E2M1 codes of bf16 by the device's own arithmetic on pairs: from SM89 on, and not in the interpreter.

A *pair* is an int32 with two bf16, the even number low. An instruction on pairs rounds each result once, and subnormal numbers count.
Eight neighbours are four pairs on their way in, and a word of eight codes, the first lowest, on their way out.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import RECIPROCAL_6, decode_e4m3, encode_e4m3, has_native_e4m3


def _both(number: float) -> tl.constexpr:
    """The pair that holds a number of bf16 twice."""
    half = struct.pack(">f", number)[:2]
    return tl.constexpr(int.from_bytes(half * 2, signed=True))


SIGNS: tl.constexpr = _both(-0.0)
ONE: tl.constexpr = _both(1.0)
SIX: tl.constexpr = _both(6.0)
NANS: tl.constexpr = tl.constexpr(0x7FFF7FFF)
INFINITY_BF16: tl.constexpr = tl.constexpr(0x7F80)
BYTE_SIGNS: tl.constexpr = tl.constexpr(-0x7F7F7F80)
# The three lines of `code_pairs`: slopes for ties to even and toward zero, and what is added; the line of the largest code.
LESS: tl.constexpr = _both(255 / 256)
LOW: tl.constexpr = _both(1 / 2)
MIDDLE: tl.constexpr = _both(1 / 4)
HIGH: tl.constexpr = _both(1 / 8)
LOW_LESS: tl.constexpr = _both(255 / 512)
MIDDLE_LESS: tl.constexpr = _both(255 / 1024)
HIGH_LESS: tl.constexpr = _both(255 / 2048)
LOW_BASE: tl.constexpr = _both(32.0)
MIDDLE_BASE: tl.constexpr = _both(32.5)
HIGH_BASE: tl.constexpr = _both(33.0)
LAST: tl.constexpr = _both(33.75)
SHIFT: tl.constexpr = _both(96.0)
BACK: tl.constexpr = _both(-96.0)
# Upper and lower bytes of the bf16 0, 0.5, 1, 1.5 and of 2, 3, 4, 6.
UPPER_SMALL: tl.constexpr = tl.constexpr(0x3F3F3F00)
UPPER_LARGE: tl.constexpr = tl.constexpr(0x40404040)
LOWER_SMALL: tl.constexpr = tl.constexpr(-0x3F800000)
LOWER_LARGE: tl.constexpr = tl.constexpr(-0x3F7FC000)


def takes_pairs(kernel: object, device: torch.device) -> bool:
    """Whether a kernel on this device may be made of these functions. Capability 8.6 would do; conversions of E4M3 want 8.9."""
    return has_native_e4m3(kernel, device)


@triton.jit
def fma_pairs(a, b, c):
    return tl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def times_pairs(a, b):
    return fma_pairs(a, b, SIGNS)


@triton.jit
def abs_pairs(a):
    return tl.inline_asm_elementwise("abs.bf16x2 $0, $1;", "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def min_pairs(a, b):
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def max_pairs(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def nearer_pairs(a, b):
    """The lesser magnitude; its sign is that of the product."""
    return tl.inline_asm_elementwise("min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def farther_pairs(a, b):
    """The greater magnitude, with either sign; NaN (0x7FFF) if one is."""
    return tl.inline_asm_elementwise("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pairs_of(x):
    """fp32 rounded to bf16, twice."""
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def near_reciprocal(x):
    """1 / x of normal fp32, within 2^-22 of it."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bytes_of(a, b, select):
    """Bytes of a (0 to 3) and b (4 to 7), as the nibbles of `select` say, the low one first; with 8 added, eight times its sign."""
    return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, select], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def four_pairs(x, NUMBERS: tl.constexpr, LANES: tl.constexpr):
    """bf16 [NUMBERS] as four tensors of pairs [NUMBERS / 8 / LANES, LANES]: the first, second, third and fourth of eight neighbours."""
    low, high = tl.split(x.reshape(NUMBERS // 2, 2))
    pairs = tl.inline_asm_elementwise("mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    even, odd = tl.split(pairs.reshape(NUMBERS // 8 // LANES, LANES, 2, 2))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def amax_of_pairs(a, b, c, d):
    """Pairs whose magnitudes are the largest of four pairs; 0x7FFF where there is a NaN."""
    return farther_pairs(farther_pairs(a, b), farther_pairs(c, d))


@triton.jit
def scale_of_pairs(amax, least, floor, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Of the bits of a bf16 amax: the byte of the scale (int32), pairs whose sum is its reciprocal, and the scale as a pair.

    For `mxfp4` the reciprocal is a power of two, and the second pair is not to be used. What they are where amax is no number does not
    matter, except for the byte and the scale.
    """
    number = amax < INFINITY_BF16
    if KIND == "mxfp4":
        byte = tl.maximum(((amax + 0x3F) >> 7) - 2, least)
        inverse = (254 - byte) * 0x00800080
        rest = inverse
        stored = tl.where(number, byte, 255)
        scale = tl.where(number, tl.maximum(byte << 7, 0x40) * 0x00010001, NANS)
    else:
        bounded = tl.maximum((amax << 16).to(tl.float32, bitcast=True), floor)
        # Of a bf16 amax, product and quotient are the same E4M3 (all of them were compared).
        stored = tl.where(number, encode_e4m3(bounded * RECIPROCAL_6, NATIVE).to(tl.int32), 0x7F)
        value = decode_e4m3(stored.to(tl.uint8), NATIVE)
        reciprocal = near_reciprocal(value)
        inverse = pairs_of(reciprocal)
        rest = pairs_of(reciprocal - (inverse << 16).to(tl.float32, bitcast=True))
        scale = pairs_of(value)
    return stored, inverse, rest, scale


@triton.jit
def quotient_pairs(a, inverse, rest, KIND: tl.constexpr):
    """a / scale in bf16, as near to a midpoint of E2M1, and on the same side of it, as a bf16 can be.

    By a power of two it is exact where it counts. An E4M3 times a midpoint has 7 bits and a 8, so that the quotient is a midpoint or
    further from it than half a step of bf16; the two pairs leave an error of 2^-16, which a midpoint is rounded free of.
    """
    return times_pairs(a, inverse) if KIND == "mxfp4" else fma_pairs(a, inverse, times_pairs(a, rest))


@triton.jit
def code_pairs(quotient, TIES: tl.constexpr, SATURATE: tl.constexpr):
    """E2M1 codes of bf16 magnitudes, in the low byte of each half.

    A code is the integer nearest to min(2q, q + 2, q/2 + 4), ties to even: the lines meet at 2 and 4, where the step of E2M1 changes, and
    what is added to them is even. 32 has an ulp of 1/4 and a byte of zeros, so that q/2, q/4 + 1/2 and q/8 + 1, added to it, are rounded
    to codes. For ties toward zero q loses one part in 256: too little for any bf16 above a midpoint to reach it.
    """
    even: tl.constexpr = TIES == "even"
    low = fma_pairs(quotient, LOW if even else LOW_LESS, LOW_BASE)
    middle = fma_pairs(quotient, MIDDLE if even else MIDDLE_LESS, MIDDLE_BASE)
    high = fma_pairs(quotient, HIGH if even else HIGH_LESS, HIGH_BASE)
    if SATURATE:
        high = min_pairs(high, LAST)
    return min_pairs(min_pairs(low, middle), high)


@triton.jit
def signed_codes(codes, signs, ZERO_SIGN: tl.constexpr):
    """Codes with bit 3 set where a byte of `signs` is 0xFF, four a word; not of zeros that are cleared."""
    if ZERO_SIGN == "cleared":
        signs = signs & (codes + 0x07070707)
    return codes | (signs & 0x08080808)


@triton.jit
def encode_pairs(a, b, c, d, inverse, rest, KIND: tl.constexpr, TIES: tl.constexpr, ZERO_SIGN: tl.constexpr):
    """int32 words of eight E2M1 codes, the first number lowest, of four pairs over their scale; for finite numbers only."""
    full: tl.constexpr = KIND != "mxfp4"  # an E4M3 scale may have been rounded down
    first = code_pairs(quotient_pairs(abs_pairs(a), inverse, rest, KIND), TIES, full)
    second = code_pairs(quotient_pairs(abs_pairs(b), inverse, rest, KIND), TIES, full)
    third = code_pairs(quotient_pairs(abs_pairs(c), inverse, rest, KIND), TIES, full)
    fourth = code_pairs(quotient_pairs(abs_pairs(d), inverse, rest, KIND), TIES, full)
    # Numbers 0, 2, 1, 3 and 4, 6, 5, 7, one a byte.
    left = signed_codes(bytes_of(first, second, 0x6240), bytes_of(a, b, 0xFBD9), ZERO_SIGN)
    right = signed_codes(bytes_of(third, fourth, 0x6240), bytes_of(c, d, 0xFBD9), ZERO_SIGN)
    return bytes_of(left, right, 0x5410) | (bytes_of(left, right, 0x7632) << 4)


@triton.jit
def nearest_pair(a, inverse, rest, scale, KIND: tl.constexpr, TIES: tl.constexpr, ZERO_SIGN: tl.constexpr):
    """The number of the E2M1 code of each number of a pair times its scale: NaN where the scale is.

    A quotient q between p = 2^e and 2p, or below p = 1, has steps of p/2, which is the ulp of 96p + q, whatever the sign of q.
    """
    quotient = quotient_pairs(a, inverse, rest, KIND)
    if KIND != "mxfp4":
        quotient = nearer_pairs(quotient, SIX)
    power = max_pairs(quotient & 0x7F807F80, ONE)
    # Ties as in `code_pairs`.
    moved = fma_pairs(power, SHIFT, quotient) if TIES == "even" else fma_pairs(quotient, LESS, times_pairs(power, SHIFT))
    value = times_pairs(fma_pairs(power, BACK, moved), scale)
    return value | (a & SIGNS) if ZERO_SIGN == "kept" else value  # else zeros come out positive


@triton.jit
def nearest_pairs(a, b, c, d, inverse, rest, scale, KIND: tl.constexpr, TIES: tl.constexpr, ZERO_SIGN: tl.constexpr):
    """[..., 2, 2]: `nearest_pair` of four pairs, in their order."""
    first = nearest_pair(a, inverse, rest, scale, KIND, TIES, ZERO_SIGN)
    second = nearest_pair(b, inverse, rest, scale, KIND, TIES, ZERO_SIGN)
    third = nearest_pair(c, inverse, rest, scale, KIND, TIES, ZERO_SIGN)
    fourth = nearest_pair(d, inverse, rest, scale, KIND, TIES, ZERO_SIGN)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def scale_pairs(byte, SCALE: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 scales as pairs."""
    if SCALE == "e4m3":
        pair = pairs_of(decode_e4m3(byte, NATIVE))
    else:
        wide = byte.to(tl.int32)
        pair = tl.where(wide == 255, NANS, tl.maximum(wide << 7, 0x40) * 0x00010001)
    return pair


@triton.jit
def decode_pairs(words, scale):
    """[..., 2, 2] of int32 words of eight E2M1 codes: their numbers times `scale`, as pairs. Bytes of bf16 are looked up four at a time."""
    magnitudes = words & 0x77777777
    shifted = words << 4
    first = bytes_of(UPPER_SMALL, UPPER_LARGE, magnitudes) | (bytes_of(shifted, words, 0x5140) & BYTE_SIGNS)
    second = bytes_of(UPPER_SMALL, UPPER_LARGE, magnitudes >> 16) | (bytes_of(shifted, words, 0x7362) & BYTE_SIGNS)
    low = bytes_of(LOWER_SMALL, LOWER_LARGE, magnitudes)
    high = bytes_of(LOWER_SMALL, LOWER_LARGE, magnitudes >> 16)
    a = times_pairs(bytes_of(low, first, 0x5140), scale)
    b = times_pairs(bytes_of(low, first, 0x7362), scale)
    c = times_pairs(bytes_of(high, second, 0x5140), scale)
    d = times_pairs(bytes_of(high, second, 0x7362), scale)
    return tl.join(tl.join(a, c), tl.join(b, d))
