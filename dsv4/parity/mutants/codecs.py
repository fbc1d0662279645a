"""Wrong codecs, most of them out of public bug reports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.formats import E2M1_MAGNITUDES, E2M1_MIDPOINTS
from dsv4.parity.mutants import Mutant
from dsv4.reference import codecs as right


def _powers_compared_with_128(codes: Tensor) -> Tensor:
    shifted = (codes.view(torch.uint8).int() << 23).view(torch.float32)
    return torch.where(shifted == 128.0, torch.nan, shifted)


def _powers_by_shift(codes: Tensor) -> Tensor:
    return (codes.view(torch.uint8).int() << 23).view(torch.float32)


def _powers_bias_125(codes: Tensor) -> Tensor:
    return 4 * right.decode_e8m0(codes)


def _bytes_as_numbers(codes: Tensor) -> Tensor:
    return codes.float() if codes.dtype is torch.uint8 else right.decode_e8m0(codes)


def _fnuz(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fnuz).float()


def _two_magnitude_bits(codes: Tensor) -> Tensor:
    return right.decode_e2m1(codes & 0b1110)


def _through_bf16(x: Tensor) -> Tensor:
    return right.encode_e4m3(x.bfloat16())


def _nan_with_sign(x: Tensor) -> Tensor:
    codes = right.encode_e4m3(x).view(torch.uint8)
    negative = x.view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32) < 0
    return torch.where(x.isnan() & negative, 0xFF, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def _nan_above_464(x: Tensor) -> Tensor:
    codes = right.encode_e4m3(x).view(torch.uint8)
    return torch.where(x.float().abs() > 464, 0x7F, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def _flushes_denormals(x: Tensor) -> Tensor:
    return right.encode_e4m3(torch.where(x.abs() < 2.0**-6, torch.zeros_like(x), x))


def _floor_for_ceil(x: Tensor, *, rounding: str = "ceil") -> Tensor:
    return right.encode_e8m0(x, rounding="floor" if rounding == "ceil" else rounding)


def _never_byte_zero(x: Tensor, **options: Any) -> Tensor:
    return right.encode_e8m0(x, **options).view(torch.uint8).clamp(min=1).view(torch.float8_e8m0fnu)


def _infinity_wraps(x: Tensor, **options: Any) -> Tensor:
    codes = right.encode_e8m0(x, **options).view(torch.uint8)
    return torch.where(x.isnan(), 0, codes).to(torch.uint8).view(torch.float8_e8m0fnu)


def _midpoints(x: Tensor, up: bool) -> Tensor:
    boundaries = torch.tensor(E2M1_MIDPOINTS, device=x.device)
    magnitude = torch.bucketize(x.float().abs().nan_to_num(0.0, E2M1_MAGNITUDES[-1]), boundaries, right=up)
    sign = torch.where(torch.signbit(x) & ~x.isnan(), 8, 0)
    return (magnitude + sign).to(torch.uint8)


def _ties_down(x: Tensor, *, ties: str = "even", zero_sign: str = "kept") -> Tensor:
    return right.encode_e2m1(x, ties="toward_zero", zero_sign=zero_sign)


def _ties_up(x: Tensor, *, ties: str = "even", zero_sign: str = "kept") -> Tensor:
    return _midpoints(x, up=True) if (ties, zero_sign) == ("even", "kept") else right.encode_e2m1(x, ties=ties, zero_sign=zero_sign)


def _nan_to_largest(x: Tensor, **options: Any) -> Tensor:
    return torch.where(x.isnan(), 7, right.encode_e2m1(x, **options)).to(torch.uint8)


def _sign_of_zero_lost(x: Tensor, *, ties: str = "even", zero_sign: str = "kept") -> Tensor:
    return right.encode_e2m1(x, ties=ties, zero_sign="cleared")


def _high_nibble_first(codes: Tensor, *, order: str = "low_first") -> Tensor:
    return right.pack_fp4(codes, order="high_first")


def _upper_bits_leak(codes: Tensor, *, order: str = "low_first") -> Tensor:
    first, second = (codes[..., ::2], codes[..., 1::2]) if order == "low_first" else (codes[..., 1::2], codes[..., ::2])
    return first | (second << 4)


def _sign_extended(packed: Tensor, *, order: str = "low_first") -> Tensor:
    low, high = (packed & 15).view(torch.uint8), (packed >> 4).view(torch.uint8)
    return torch.stack((low, high) if order == "low_first" else (high, low), -1).flatten(-2)


def _halves_for_pairs(packed: Tensor, *, order: str = "low_first") -> Tensor:
    bits = packed.view(torch.uint8)
    low, high = bits & 15, bits >> 4
    return torch.cat((low, high) if order == "low_first" else (high, low), -1)


def _mutant(number: int, function: str, call: Any, fault: str, source: str = "") -> Mutant:
    return Mutant(f"codecs-{number:02}", "codecs", function, call, fault, source)


MUTANTS = (
    _mutant(1, "decode_e8m0", _powers_compared_with_128, "128.0 taken for the NaN code, and 255 for infinity", "QT-03"),
    _mutant(2, "decode_e8m0", _powers_by_shift, "code << 23: zero at 0, infinity at 255", "QT-03"),
    _mutant(3, "decode_e8m0", _powers_bias_125, "exponent bias 125", "QT-12"),
    _mutant(4, "decode_e8m0", _bytes_as_numbers, "uint8 scales taken as numbers", "QT-13"),
    _mutant(5, "decode_e4m3", _fnuz, "the FNUZ dialect", "KV-03"),
    _mutant(6, "decode_e2m1", _two_magnitude_bits, "bits & 7 written as bits & 6"),
    _mutant(7, "encode_e4m3", _through_bf16, "rounded twice, through bf16", "KV-05"),
    _mutant(8, "encode_e4m3", _nan_with_sign, "NaN keeps its sign"),
    _mutant(9, "encode_e4m3", _nan_above_464, "NaN where it should saturate, as older casts do"),
    _mutant(10, "encode_e4m3", _flushes_denormals, "denormal codes flushed to zero"),
    _mutant(11, "encode_e8m0", _floor_for_ceil, "floor instead of ceil", "QT-07"),
    _mutant(12, "encode_e8m0", _never_byte_zero, "exponent clamped to 1, not 0"),
    _mutant(13, "encode_e8m0", _infinity_wraps, "255 + 1 wraps to 0 for NaN"),
    _mutant(14, "encode_e2m1", _ties_down, "midpoints toward zero", "QT-05"),
    _mutant(15, "encode_e2m1", _ties_up, "midpoints away from zero", "QT-05"),
    _mutant(16, "encode_e2m1", _nan_to_largest, "NaN becomes 6"),
    _mutant(17, "encode_e2m1", _sign_of_zero_lost, "minus zero becomes zero"),
    _mutant(18, "pack_fp4", _high_nibble_first, "the odd element in the low nibble"),
    _mutant(19, "pack_fp4", _upper_bits_leak, "upper bits of a code reach its neighbour"),
    _mutant(20, "unpack_fp4", _sign_extended, "int8 bytes shifted with their sign"),
    _mutant(21, "unpack_fp4", _halves_for_pairs, "all low nibbles, then all high ones: planar for interleaved"),
)
