"""Small formats by integer arithmetic on the bits of fp32: what the bodies of codecs and quantisers are made of.

No float8 type occurs, so everything here runs on devices that have none. Codes are int32 until they are stored, one a number. Below the
sign an fp32 number has E = bits >> 23 and M = bits & 0x7FFFFF; subnormal numbers (E = 0) are exact in every function.
"""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from dsv4.formats import E4M3_NAN, E8M0_NAN

MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
INFINITY = 0x7F800000  # as a magnitude, everything above it is NaN

# E - 127 and M of the largest number L of a format. The least b with L 2^(b - 127) >= a is E(a) - that, and one more where M(a) is above.
LIMITS = {"e4m3": (8, 0x600000), "e2m1": (2, 0x400000)}


def of(x: Tensor) -> Tensor:
    """The bits of x, widened to fp32."""
    return x.to(torch.float32).view(torch.int32)


def as_fp32(bits: Tensor) -> Tensor:
    """The fp32 numbers with these bits."""
    return bits.view(torch.float32)


def largest(x: Tensor) -> Tensor:
    """Bits of max |x| over the last dimension, kept as size 1. Infinity and NaN compare above every number."""
    return (of(x) & MAGNITUDE).amax(-1, keepdim=True)


def ue8m0(amax: Tensor, limit: str, least: Tensor) -> Tensor:
    """The least byte b with L 2^(b - 127) >= amax over the real numbers, and at least `least`; 255 where amax (bits) is no number."""
    exponent, mantissa = LIMITS[limit]
    byte = (amax >> 23) - exponent + ((amax & 0x7FFFFF) > mantissa).to(torch.int32)
    return torch.where(amax >= INFINITY, E8M0_NAN, torch.maximum(byte, least))


def inverse_power(byte: Tensor) -> Tensor:
    """2^(127 - b) in fp32 for b <= 253, NaN for 255."""
    return torch.where(byte == E8M0_NAN, nan, as_fp32((254 - byte) << 23))


def decode_e8m0(code: Tensor) -> Tensor:
    """2^(b - 127) in fp32, also for b = 0, which is subnormal; NaN for 255."""
    bits = torch.where(code == 0, 0x400000, code << 23)
    return as_fp32(torch.where(code == E8M0_NAN, 0x7FC00000, bits))


def encode_e8m0(x: Tensor, rounding: str) -> Tensor:
    """Codes of powers of two; `dsv4.reference.codecs.encode_e8m0` has the rules."""
    bits = of(x)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if rounding == "floor":
        code = exponent
    else:
        # 2^-127 is subnormal: above it, all that is not normal yet goes up to 2^-126.
        above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > (0 if rounding == "ceil" else 0x3FFFFF))
        code = exponent + above.to(torch.int32)
    code = torch.where(bits < 0, 0, code.clamp(max=E8M0_NAN - 1))
    return torch.where((bits & MAGNITUDE) >= INFINITY, E8M0_NAN, code)


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest codes, ties to even, saturating; every NaN is 0x7F."""
    bits = of(x)
    magnitude = bits & MAGNITUDE
    bounded = magnitude.clamp(max=0x43E00000)  # 448
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - 960
    subnormal = of(as_fp32(bounded) + 16384.0) & 15  # an ulp of 2^14 is 2^-9: the addition rounds, ties to even
    code = torch.where(bounded < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2^-6
    return torch.where(magnitude > INFINITY, E4M3_NAN, code)


def decode_e4m3(code: Tensor) -> Tensor:
    """The numbers of codes in 0 to 255; both NaN codes keep their sign."""
    magnitude = code & 0x7F
    normal = (magnitude << 20) + 0x3C000000  # 120 << 23
    subnormal = (magnitude.to(torch.float32) * 2.0**-9).view(torch.int32)
    bits = torch.where(magnitude < 8, subnormal, torch.where(magnitude == E4M3_NAN, 0x7FC00000, normal))
    return as_fp32(bits | ((code & 0x80) << 24))


def decode_e5m2(code: Tensor) -> Tensor:
    """The numbers of codes in 0 to 255; NaN codes become quiet NaN with their sign."""
    magnitude = code & 0x7F
    normal = (magnitude << 21) + 0x38000000  # 112 << 23
    subnormal = (magnitude.to(torch.float32) * 2.0**-16).view(torch.int32)
    bits = torch.where(
        magnitude < 4, subnormal, torch.where(magnitude == 0x7C, INFINITY, torch.where(magnitude > 0x7C, 0x7FC00000, normal))
    )
    return as_fp32(bits | ((code & 0x80) << 24))


def encode_e2m1(x: Tensor, ties: str, zero_sign: str) -> Tensor:
    """Nearest codes in 0 to 15, saturating; NaN is 0."""
    bits = of(x)
    magnitude = bits & MAGNITUDE
    bounded = magnitude.clamp(max=0x40C00000)  # 6
    if ties == "even":
        normal = (bounded + 0x1FFFFF + ((bounded >> 22) & 1)) >> 22
        subnormal = (bounded > 0x3E800000).to(torch.int32) + (bounded >= 0x3F400000).to(torch.int32)  # 0.25, 0.75
    else:
        normal = (bounded + 0x1FFFFF) >> 22
        subnormal = (bounded > 0x3E800000).to(torch.int32) + (bounded > 0x3F400000).to(torch.int32)
    code = torch.where(bounded < 0x3F800000, subnormal, normal - 252)  # 1
    signed = code | ((bits >> 28) & 8)
    if zero_sign == "cleared":
        signed = torch.where(code == 0, 0, signed)
    return torch.where(magnitude > INFINITY, 0, signed)


def decode_e2m1(code: Tensor) -> Tensor:
    """The numbers of codes, whose upper bits do not count."""
    magnitude = code & 7
    bits = torch.where(magnitude < 2, magnitude * 0x3F000000, (magnitude << 22) + 0x3F000000)  # 0 and 0.5; 126 << 23
    return as_fp32(bits | ((code & 8) << 28))


def pack_pairs(codes: Tensor, order: str) -> Tensor:
    """uint8 [..., n] with one code a byte to uint8 [..., n/2]. Two bytes are one 16-bit word, the even element low."""
    word = codes.view(torch.int16)
    if order == "low_first":
        return ((word & 15) | ((word >> 4) & 0xF0)).to(torch.uint8)
    return (((word & 15) << 4) | ((word >> 8) & 15)).to(torch.uint8)


def unpack_pairs(packed: Tensor, order: str) -> Tensor:
    """uint8 [..., n] to uint8 [..., 2n], one code a byte."""
    byte = packed.to(torch.int16)
    word = (byte & 15) | ((byte & 0xF0) << 4) if order == "low_first" else (byte >> 4) | ((byte & 15) << 8)
    return word.view(torch.uint8)
