"""E4M3, E2M1 and UE8M0 inside Triton kernels; the integer forms are those of `dsv4.fast.bits`.

NATIVE takes the device's own conversions. Below SM89 Triton refuses E4M3 altogether, even as the type of an argument, so buffers are
uint8 everywhere; the interpreter converts wrongly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NATIVE_FROM = (8, 9)
MAGNITUDE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)
NAN: tl.constexpr = tl.constexpr(0x7FC00000)
RECIPROCAL_448: tl.constexpr = tl.constexpr(0.002232142956927419)  # fl32(1/448)
RECIPROCAL_6: tl.constexpr = tl.constexpr(0.1666666716337204)  # fl32(1/6)


def has_native_e4m3(kernel: object, device: torch.device) -> bool:
    """Whether a kernel on this device may convert to and from E4M3 by the hardware."""
    compiled = isinstance(kernel, triton.JITFunction)
    return compiled and device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE_FROM


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """uint8 codes of fp32, ties to even, saturating; NaN is 0x7F."""
    if NATIVE:
        code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & MAGNITUDE
        bounded = tl.minimum(magnitude, 0x43E00000)  # 448
        normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - 960
        # An ulp of 2^14 is 2^-9: the addition rounds, ties to even.
        subnormal = (bounded.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
        code = tl.where(bounded < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2^-6
        code = tl.where(magnitude > INFINITY, 0x7F, code).to(tl.uint8)
    return code


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """fp32 of uint8 codes."""
    if NATIVE:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        magnitude = wide & 0x7F
        subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
        bits = tl.where(magnitude < 8, subnormal, (magnitude << 20) + 0x3C000000)  # 120 << 23
        bits = tl.where(magnitude == 0x7F, NAN, bits) | ((wide & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def encode_e2m1(x, TIES: tl.constexpr, ZERO_SIGN: tl.constexpr):
    """int32 codes of fp32, saturating; NaN is 0."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    bounded = tl.minimum(magnitude, 0x40C00000)  # 6
    above = (bounded > 0x3E800000).to(tl.int32)  # 0.25
    if TIES == "even":
        normal = (bounded + 0x1FFFFF + ((bounded >> 22) & 1)) >> 22
        subnormal = above + (bounded >= 0x3F400000).to(tl.int32)  # 0.75
    else:
        normal = (bounded + 0x1FFFFF) >> 22
        subnormal = above + (bounded > 0x3F400000).to(tl.int32)
    code = tl.where(bounded < 0x3F800000, subnormal, normal - 252)  # 1
    signed = code | ((bits >> 28) & 8)
    if ZERO_SIGN == "cleared":
        signed = tl.where(code == 0, 0, signed)
    return tl.where(magnitude > INFINITY, 0, signed)


@triton.jit
def pairs_e2m1(scaled, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TIES: tl.constexpr):
    """uint8 [ROWS, GROUPS, GROUP/2]: two codes a byte, the even one low, of bf16 numbers over their scale times 2^-14, at most 7 * 2^-14.

    2^-14 makes 1, the least normal E2M1, the least normal fp16, so that a code is the top of an fp16 rounded to one mantissa bit, and one
    integer addition rounds the two numbers of a register. fp16 keeps 11 bits, and steps of 2^-10 below 1. A bf16 has 8 bits and a midpoint
    times a scale (a power of two, or an E4M3) at most 7, so a quotient is a midpoint or at least 2^-8 of it away: the conversion moves none
    across, and takes back the error of an approximate quotient that is meant to be one.
    """
    low, high = tl.split(scaled.reshape(ROWS, GROUPS, GROUP // 2, 2))
    words = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)
    rounded = words + 0x00FF00FF  # no magnitude is large enough to carry into its sign
    if TIES == "even":
        rounded += (words >> 9) & 0x00010001
    codes = ((rounded >> 9) & 0x00070007) | ((words >> 12) & 0x00080008)
    return codes | (codes >> 12)


@triton.jit
def decode_e2m1(code):
    """fp32 of int32 codes, whose upper bits do not count."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + 0x3F000000)  # 0 and 0.5; 126 << 23
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_amax(numbers, NATIVE: tl.constexpr):
    """Bits of the largest magnitude along axis 2, kept; a NaN counts as larger than infinity."""
    if NATIVE:
        amax = tl.reduce(tl.abs(numbers), 2, _larger, keep_dims=True).to(tl.int32, bitcast=True) & MAGNITUDE
    else:
        amax = tl.max(numbers.to(tl.int32, bitcast=True) & MAGNITUDE, axis=2, keep_dims=True)
    return amax


@triton.jit
def decode_e8m0(byte):
    """fp32 of int32 bytes: 2^(b - 127), subnormal for 0, NaN for 255."""
    bits = tl.where(byte == 0, 0x400000, byte << 23)
    return tl.where(byte == 255, NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def widened(x, NATIVE: tl.constexpr):
    """bf16 or fp32 as fp32. The interpreter's own cast gets subnormal bf16 wrong."""
    if NATIVE or x.dtype != tl.bfloat16:
        value = x.to(tl.float32)
    else:
        value = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def rounded(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 as bf16, to nearest with ties to even, or as it is. The interpreter's own cast drops bits."""
    if NATIVE or dtype != tl.bfloat16:
        value = x.to(dtype)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where((bits & MAGNITUDE) > INFINITY, NAN, bits + 0x7FFF + ((bits >> 16) & 1))
        value = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def scales_and_quotients(
    numbers,
    amax,
    least,
    floor,
    KIND: tl.constexpr,
    DIVIDE: tl.constexpr,
    ON_SCALE: tl.constexpr,
    ZEROES: tl.constexpr,
    NARROW: tl.constexpr,  # the numbers were bf16
    NATIVE: tl.constexpr,
):
    """Scales as stored (int32 bytes, or fp32) and as numbers, and numbers / scale. `amax` holds bits; kinds as in `dsv4.fast.groups`."""
    if KIND == "fp8" or KIND == "mxfp4":
        exponent: tl.constexpr = 8 if KIND == "fp8" else 2
        mantissa: tl.constexpr = 0x600000 if KIND == "fp8" else 0x400000
        byte = tl.maximum((amax >> 23) - exponent + ((amax & 0x7FFFFF) > mantissa).to(tl.int32), least)
        stored = tl.where(amax >= INFINITY, 255, byte)
        inverse = tl.where(stored == 255, NAN, (254 - stored) << 23).to(tl.float32, bitcast=True)
        if ZEROES:
            inverse = tl.where(stored == 0, 0.0, inverse)
        scale = decode_e8m0(stored)
        quotients = numbers * inverse
    else:
        bounded = amax.to(tl.float32, bitcast=True)
        if not ON_SCALE:
            bounded = tl.maximum(bounded, floor)
        # Of a bf16 amax, product and quotient are the same E4M3 (all of them were compared).
        if DIVIDE and not (KIND == "fp4_e4m3" and NARROW):
            scale = tl.div_rn(bounded, tl.full(bounded.shape, 448.0 if KIND == "fp8_fp32" else 6.0, tl.float32))
        else:
            scale = bounded * (RECIPROCAL_448 if KIND == "fp8_fp32" else RECIPROCAL_6)
        if ON_SCALE:
            scale = tl.maximum(scale, floor)
        scale = tl.where(amax >= INFINITY, tl.full(scale.shape, NAN, tl.int32).to(tl.float32, bitcast=True), scale)
        if KIND == "fp4_e4m3":
            stored = encode_e4m3(scale, NATIVE).to(tl.int32)
            scale = decode_e4m3(stored.to(tl.uint8), NATIVE)
        else:
            stored = scale
        quotients = tl.div_rn(numbers, tl.broadcast_to(scale, numbers.shape))
    return stored, scale, quotients


@triton.jit
def scale_place(row, group, pitch, LAYOUT: tl.constexpr):
    """Where the scale of (row, group) lies: an fp32 number's index, or a byte's. `pitch` is the distance of rows, of columns (in numbers or
    words), or of row tiles (in bytes)."""
    row, group = row.to(tl.int64), group.to(tl.int64)
    if LAYOUT == "packed":
        place = ((group // 4) * pitch + row) * 4 + group % 4
    elif LAYOUT == "mn_major":
        place = group * pitch + row
    elif LAYOUT == "128x4":
        place = (row // 128) * pitch + (group // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4
    else:
        place = row * pitch + group
    return place
