"""Numbers of 8 and 4 bits.

A code of a signed format is s | e | m: a sign bit, the exponent field, and M mantissa bits. Its number is

    (-1)^s (m / 2^M) 2^(1 - bias)        e = 0                                            (1)
    (-1)^s (1 + m / 2^M) 2^(e - bias)    otherwise

            bits s e m   bias   largest   least        specials
    E4M3    1 4 3        7      448       2^-9         0x7F and 0xFF NaN; no infinities
    E5M2    1 5 2        15     57344     2^-16        e = 31: m = 0 infinity, else NaN
    E2M1    1 2 1        1      6         0.5          none
    E8M0    0 8 0        127    2^127     2^-127       0xFF NaN; the number is 2^(b - 127), also for b = 0     (2)

Magnitudes ascend with their codes, so encoding is counting: with u_0 < u_1 < ... the magnitudes and h_i = (u_i + u_i+1) / 2,

    code(x) = sign bit | #{i : h_i < |x|}, and one more where |x| is the midpoint h_i of an odd code i     (3)

which is round-to-nearest-even (the code is even where the mantissa is) and saturates: beyond the last midpoint there is nothing
to count. Ties toward zero leave the "one more" out. E8M0 counts powers of two instead of midpoints.

Decoded values are fp32 and exact. `x` is bf16 or fp32; it is rounded once, from the value it has, never through another dtype.
Specials: +-Inf saturates; every NaN encodes as E4M3 0x7F, E2M1 0 or E8M0 255; -0 keeps its sign. Source: spec A 0.3, M 9.4 to 9.7.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from math import inf, nan

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.formats import E2M1, E4M3, E4M3_NAN, E5M2, E8M0, E8M0_NAN, NumberFormat
from dsv4.types import NibbleOrder, ScaleRounding, Ties, ZeroSign

__all__ = [
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "pack_fp4",
    "unpack_fp4",
]


def decode_e4m3(codes: Tensor) -> Tensor:
    """The numbers of E4M3 codes, by (1).

    Args:
        codes: any shape, e4m3 or uint8 (its bits).

    Returns:
        fp32 of the same shape; 0x7F and 0xFF are NaN, 0x80 is -0.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("codes", codes, ("e4m3", "uint8"))
    return _look_up(_numbers(E4M3), codes)


def decode_e5m2(codes: Tensor) -> Tensor:
    """The numbers of E5M2 codes, by (1).

    Args:
        codes: any shape, e5m2 or uint8 (its bits).

    Returns:
        fp32 of the same shape; 0x7C and 0xFC are infinities, the codes above them NaN.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("codes", codes, ("e5m2", "uint8"))
    return _look_up(_numbers(E5M2), codes)


def decode_e8m0(codes: Tensor) -> Tensor:
    """The powers of two of E8M0 codes, by (2).

    Args:
        codes: any shape, e8m0 or uint8 (its bits).

    Returns:
        fp32 of the same shape; 0 is 2^-127 (a subnormal, not zero), 255 is NaN.

    Raises:
        ArgumentError: another dtype; a float becomes a code through `encode_e8m0`.
    """
    return _look_up((*_powers(), nan), checks.e8m0_bits("codes", codes))


def decode_e2m1(codes: Tensor) -> Tensor:
    """The numbers of E2M1 codes, by (1).

    Args:
        codes: any shape, uint8, one code a byte; the upper four bits are ignored.

    Returns:
        fp32 of the same shape.

    Raises:
        ArgumentError: another dtype; bytes with two codes go through `unpack_fp4` first.
    """
    checks.tensor("codes", codes, "uint8")
    return _look_up(_numbers(E2M1), codes % 16)


def encode_e4m3(x: Tensor) -> Tensor:
    """The nearest E4M3 codes, by (3), ties to even.

    Args:
        x: any shape, bf16 or fp32.

    Returns:
        e4m3 of the same shape. Magnitudes above 448 and infinities saturate; NaN of either sign is 0x7F; -0 is 0x80.

    Raises:
        ArgumentError: another dtype.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    codes = _sign(x) * 128 + _nearest(x, E4M3, Ties.EVEN)
    return torch.where(x.isnan(), E4M3_NAN, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def encode_e8m0(x: Tensor, *, rounding: ScaleRounding | str = ScaleRounding.CEIL) -> Tensor:
    """E8M0 codes of numbers that need not be powers of two.

    Args:
        x: any shape, bf16 or fp32.
        rounding: ceil: the least b with 2^(b - 127) >= x. floor: the largest b with 2^(b - 127) <= x. nearest: torch's cast, where a
            mantissa of 1.5 and more goes up, and so does all above 2^-127 that is below 2^-126.

    Returns:
        e8m0 of the same shape. Zero and negative numbers are 0, as is whatever lies below 2^-127; finite numbers saturate at 254; NaN and
        both infinities are 255.

    Raises:
        ArgumentError: another dtype or an unknown rounding.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    match checks.choice("rounding", rounding, ScaleRounding):
        case ScaleRounding.CEIL:
            codes = _count(_powers(), x)
        case ScaleRounding.FLOOR:
            codes = _count(_powers(), x, inclusive=True) - 1
        case ScaleRounding.NEAREST:
            codes = _count((2.0**-127 + 2.0**-149, *(1.5 * power for power in _powers()[1:-1])), x, inclusive=True)
    return torch.where(x.isfinite(), codes.clamp(0, E8M0_NAN - 1), E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def encode_e2m1(x: Tensor, *, ties: Ties | str = Ties.EVEN, zero_sign: ZeroSign | str = ZeroSign.KEPT) -> Tensor:
    """The nearest E2M1 codes, by (3).

    Args:
        x: any shape, bf16 or fp32.
        ties: even: midpoints .25 .75 1.25 1.75 2.5 3.5 5 go to 0 1 1 2 2 4 4. toward_zero: to 0 .5 1 1.5 2 3 4.
        zero_sign: kept: a negative number that rounds to zero, and -0, is code 8. cleared: it is code 0.

    Returns:
        uint8 of the same shape, one code a byte. Magnitudes above 6 and infinities saturate; NaN is 0.

    Raises:
        ArgumentError: another dtype or an unknown option.
    """
    checks.tensor("x", x, ("bf16", "fp32"))
    ties, zero_sign = checks.choice("ties", ties, Ties), checks.choice("zero_sign", zero_sign, ZeroSign)
    magnitude = _nearest(x, E2M1, ties)
    codes = _sign(x) * 8 + magnitude
    if zero_sign is ZeroSign.CLEARED:
        codes = torch.where(magnitude == 0, 0, codes)
    return torch.where(x.isnan(), 0, codes).to(torch.uint8)


def pack_fp4(codes: Tensor, *, order: NibbleOrder | str = NibbleOrder.LOW_FIRST) -> Tensor:
    """Two E2M1 codes to a byte.

    Args:
        codes: [..., n], uint8, one code a byte, n even; the upper four bits are ignored.
        order: which element of a pair lies in the low four bits: low_first the even one, high_first the odd one.

    Returns:
        uint8 [..., n/2].

    Raises:
        ArgumentError: an odd n.
    """
    checks.tensor("codes", codes, "uint8", ("...", "n"))
    order = checks.choice("order", order, NibbleOrder)
    checks.multiple("codes", codes.shape[-1], 2, "n, the last size, is the number of codes: append a zero code")
    even, odd = codes[..., 0::2] % 16, codes[..., 1::2] % 16  # [..., n/2]
    return even + 16 * odd if order is NibbleOrder.LOW_FIRST else odd + 16 * even


def unpack_fp4(packed: Tensor, *, order: NibbleOrder | str = NibbleOrder.LOW_FIRST) -> Tensor:
    """The inverse of `pack_fp4`.

    Args:
        packed: [..., n], uint8, or int8 (its bits) as checkpoints store it.
        order: which element of a pair lies in the low four bits.

    Returns:
        uint8 [..., 2n], one code a byte.

    Raises:
        ArgumentError: another dtype, no dimension or an unknown order.
    """
    checks.tensor("packed", packed, ("uint8", "int8"), ("...", "n"))
    order = checks.choice("order", order, NibbleOrder)
    bits = packed.view(torch.uint8)
    low, high = bits % 16, bits // 16
    return torch.stack((low, high) if order is NibbleOrder.LOW_FIRST else (high, low), -1).flatten(-2)


@cache
def _numbers(form: NumberFormat) -> tuple[float, ...]:
    """(1), for every code of a signed format."""
    steps, half = 1 << form.mantissa_bits, form.codes // 2
    numbers = []
    for code in range(half):
        e, m = divmod(code, steps)
        value = m / steps * 2.0 ** (1 - form.bias) if e == 0 else (1 + m / steps) * 2.0 ** (e - form.bias)
        if value > form.max:
            value = nan if code in form.nan_codes else inf
        numbers.append(value)
    return tuple(numbers) + tuple(-value for value in numbers)


@cache
def _powers() -> tuple[float, ...]:
    """(2), for the codes 0 to 254."""
    return tuple(2.0 ** (code - E8M0.bias) for code in range(E8M0_NAN))


def _look_up(numbers: tuple[float, ...], codes: Tensor) -> Tensor:
    table = torch.tensor(numbers, dtype=torch.float32, device=codes.device)
    return table[codes.view(torch.uint8).long()]


def _count(thresholds: tuple[float, ...], x: Tensor, *, inclusive: bool = False) -> Tensor:
    """How many of the ascending thresholds lie below x, or at x too if inclusive. int64, x's shape."""
    return torch.bucketize(
        x.to(torch.float64).contiguous(), torch.tensor(thresholds, dtype=torch.float64, device=x.device), right=inclusive
    )


def _nearest(x: Tensor, form: NumberFormat, ties: Ties) -> Tensor:
    """The code of |x| without its sign bit, by (3). int64, x's shape."""
    magnitudes = [number for number in _numbers(form)[: form.codes // 2] if number <= form.max]
    midpoints = tuple((low + high) / 2 for low, high in pairwise(magnitudes))
    below = _count(midpoints, x.abs())
    if ties is Ties.TOWARD_ZERO:
        return below
    return torch.where(below % 2 == 0, below, _count(midpoints, x.abs(), inclusive=True))


def _sign(x: Tensor) -> Tensor:
    return x.signbit().long()
