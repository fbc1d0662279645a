"""Groups of numbers that share a scale: FP8 (E4M3) and FP4 (E2M1).

A group is `group` neighbours of the last dimension, or a block of a weight. With a = max |x| over the group and L = 448 (E4M3) or 6 (E2M1),

    a' = max(a, floor)                                                                    (1)
    s  = 2^(b - 127), b the least byte with L 2^(b - 127) >= a'          ue8m0            (2)
    s  = fl32(a' fl32(1/448)), or fl32(a' / 448)                         fp32, FP8 only   (3)
    s  = e4m3(fl32(a' / 6)), or e4m3(fl32(a' fl32(1/6)))                 FP4 in groups of 16   (4)
    code = nearest code to fl32(x / s), ties to even, saturating                          (5)
    dequantised value = fl32(code s), rounded once to bf16 if that is wanted              (6)

(2) compares real numbers, so nothing is rounded before b is known; a scale rounded up never lets a code saturate. In (5) the quotient by
a power of two loses nothing that the code could see; by any other scale it is the correctly rounded fp32 quotient. Products and quotients
are evaluated in fp64, where both round as IEEE fp32 does. Floors are those of `dsv4.formats.AMAX_FLOORS`: FlashMLA's bounds s before it is
rounded up instead of a, and FlashInfer's has 1/s = 0 where b = 0, so that codes are zeros with the sign of x. (4) has the floor 6 2^-9.

Specials: NaN or Inf anywhere in a group makes s NaN (byte 255, E4M3 0x7F, fp32 NaN) and with it every FP8 code 0x7F and every FP4 code 0.
An all-zero group has codes zero, -0 with its sign, and the scale of its floor. Source: spec A 0.4, M 9.1 to 9.4, 9.8.

    x          [..., n] bf16 or fp32        codes   e4m3 [..., n], or uint8 [..., n/2]: two E2M1 codes, the even element low
    scales     e8m0, fp32 or e4m3 [..., n/group], or another layout of `dsv4.reference.scales`
"""

from __future__ import annotations

from math import inf, nan

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import checks
from dsv4 import quantization_checks as check
from dsv4.formats import AMAX_FLOORS, E2M1, E4M3, E8M0, E8M0_NAN, FP4_E4M3_AMAX_FLOOR, AmaxFloor, align, fp32
from dsv4.reference.codecs import (
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_fp4,
    unpack_fp4,
)
from dsv4.reference.numerics import current_numerics, quantiser_step
from dsv4.reference.scales import align_mn_major, pack_ue8m0, swizzle_128x4, unpack_ue8m0, unswizzle_128x4
from dsv4.types import Numerics, QuantFormat, Quantized, ScaleDivision, ScaleFormat, ScaleLayout, Ties, ZeroSign

__all__ = ["dequantize", "fake_quantize", "quantize_fp4_e4m3", "quantize_fp8", "quantize_fp8_blocks", "quantize_mxfp4"]


def quantize_fp8(
    x: Tensor,
    group: int,
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
    division: ScaleDivision | str = ScaleDivision.RECIPROCAL,
) -> Quantized:
    """E4M3 codes of groups along the last dimension, by (1), (2) or (3), and (5).

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 1 to 512, a power of two.
        scale: ue8m0, or fp32 for the unrounded scale.
        scale_layout: rows; packed or 128x4 for ue8m0, mn_major for fp32, both with x of two dimensions.
        amax_floor: official, sglang, sglang_packer, flashmla, none or flashinfer; the last two with ue8m0 only.
        division: how (3) divides; without effect on ue8m0.

    Returns:
        Quantized(codes e4m3 [..., n], scales e8m0 or fp32 [..., n/group] in the layout's shape, int32 for packed and 128x4).

    Raises:
        ArgumentError: a wrong dtype, rank or size, or options that exclude each other.
    """
    check.groups(x, group, 1, _dtypes())
    scale, floor, division = check.fp8_scale(scale, amax_floor, division)
    layout = check.layout(x, scale, scale_layout)
    x = x.contiguous()
    scales = _fp8_scales(_groups_amax(x, group), scale, floor, division)
    codes = _fp8_codes(x, scales, (group,), floor)
    match layout:
        case ScaleLayout.ROWS:
            return Quantized(codes, scales)
        case ScaleLayout.PACKED:
            return Quantized(codes, pack_ue8m0(scales))
        case ScaleLayout.SWIZZLED_128X4:
            return Quantized(codes, swizzle_128x4(scales))
        case ScaleLayout.MN_MAJOR:
            return Quantized(codes, align_mn_major(scales))


def quantize_fp8_blocks(
    weight: Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    amax_floor: str = "official",
    division: ScaleDivision | str = ScaleDivision.RECIPROCAL,
) -> Quantized:
    """E4M3 codes of a weight in blocks, by (1), (2) or (3), and (5). Blocks at the lower and right edge may be partial.

    Args:
        weight: [n, k], bf16 or fp32.
        block: rows and columns of a block (bn, bk), each a power of two from 1 to 512. V4 has (128, 128), V4.1 (32, 32).
        scale, amax_floor, division: as in `quantize_fp8`.

    Returns:
        Quantized(codes e4m3 [n, k], scales e8m0 or fp32 [ceil(n/bn), ceil(k/bk)]).

    Raises:
        ArgumentError: a wrong dtype, rank or block, or options that exclude each other.
    """
    checks.tensor("weight", weight, ("bf16", "fp32"), ("n", "k"))
    check.block("block", block)
    scale, floor, division = check.fp8_scale(scale, amax_floor, division)
    (n, k), (bn, bk) = weight.shape, block
    padded = pad(weight, (0, align(k, bk) - k, 0, align(n, bn) - n))  # zeros change no maximum
    amax = rearrange(padded.abs(), "(rows bn) (columns bk) -> rows columns (bn bk)", bn=bn, bk=bk).amax(-1)
    scales = _fp8_scales(amax, scale, floor, division)
    return Quantized(_fp8_codes(weight.contiguous(), scales, block, floor), scales)


def quantize_mxfp4(
    x: Tensor,
    group: int = 32,
    *,
    amax_floor: str = "official_fp4",
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
) -> Quantized:
    """E2M1 codes with power-of-two scales, by (1), (2) and (5).

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 2 to 512, a power of two.
        amax_floor: official_fp4, official, flashmla or none.
        ties, zero_sign: as in `encode_e2m1`.

    Returns:
        Quantized(codes uint8 [..., n/2], the even element in the low nibble, scales e8m0 [..., n/group]).

    Raises:
        ArgumentError: a wrong dtype, size or option.
    """
    check.groups(x, group, 2, _dtypes())
    checks.one_of("amax_floor", amax_floor, check.FP4_FLOORS)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    x = x.contiguous()
    scales = _ue8m0(_groups_amax(x, group), E2M1.max, AMAX_FLOORS[amax_floor])
    return Quantized(_fp4_codes(x, decode_e8m0(scales), group, ties, zero_sign), scales)


def quantize_fp4_e4m3(
    x: Tensor,
    group: int = 16,
    *,
    division: ScaleDivision | str = ScaleDivision.DIVIDE,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
) -> Quantized:
    """E2M1 codes with E4M3 scales, by (1), (4) and (5).

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 2 to 512, a power of two.
        division: how (4) divides.
        ties, zero_sign: as in `encode_e2m1`.

    Returns:
        Quantized(codes uint8 [..., n/2], the even element in the low nibble, scales e4m3 [..., n/group]).
        Scales saturate at 448, so groups with magnitudes above 2688 saturate at it.

    Raises:
        ArgumentError: a wrong dtype, size or option.
    """
    check.groups(x, group, 2, _dtypes())
    division = checks.choice("division", division, ScaleDivision)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    x = x.contiguous()
    amax = _groups_amax(x, group)
    scales = encode_e4m3(_nan_unless_finite(_divide(amax.clamp(min=FP4_E4M3_AMAX_FLOOR), E2M1.max, division), amax))
    return Quantized(_fp4_codes(x, decode_e4m3(scales), group, ties, zero_sign), scales)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    group: int | tuple[int, int],
    *,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The numbers that codes and scales stand for, by (6).

    Args:
        codes: e4m3 [..., n], or uint8 or int8 [..., n/2]: two E2M1 codes a byte, the even element low.
        scales: for e4m3 codes e8m0, uint8 (E8M0 bits), fp32, or int32 (packed and 128x4); for E2M1 codes e8m0, uint8 (E8M0 bits) or e4m3.
            [..., n/group], or the shape of the layout; for blocks [ceil(rows/bn), ceil(n/bk)].
        group: numbers that share a scale, a power of two; or a block (bn, bk), with codes of two dimensions.
        scale_layout: where the scales lie. All but rows want e4m3 codes of two dimensions and one group size.
        dtype: bf16 or fp32.

    Returns:
        [..., n] of `dtype`. A NaN scale gives NaN.

    Raises:
        ArgumentError: missing scales (an FP8 tensor is never cast without), wrong dtypes, shapes or layouts.
    """
    fp4 = checks.tensor("codes", codes, ("e4m3", "uint8", "int8"), ("...", "n")).dtype != torch.float8_e4m3fn
    checks.one_of("dtype", dtype, (torch.bfloat16, torch.float32))
    layout = checks.choice("scale_layout", scale_layout, ScaleLayout)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2 if fp4 else codes.shape[-1])
    block = check.group_of_codes(shape, group, layout, fp4)
    factors = _factors(scales, check.scales(codes, scales, shape, block, layout, fp4), layout)
    numbers = decode_e2m1(unpack_fp4(codes)) if fp4 else decode_e4m3(codes)
    return quantiser_step(torch.mul, numbers, _spread(factors, block, shape)).to(dtype).contiguous()


def fake_quantize(
    x: Tensor,
    group: int,
    *,
    format: QuantFormat | str = QuantFormat.FP8,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    division: ScaleDivision | str | None = None,
) -> Tensor:
    """`x` as it comes back from its codes: quantise, then (6), in the dtype of `x`. Under `unquantised` numerics it is `x`.

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`; also fp64 under numerics that round nothing.
        group: a power of two from 1 (FP4: 2) to 512.
        format: fp8 and mxfp4 have ue8m0 scales, fp4_e4m3 has E4M3 scales.
        amax_floor: None for the format's own, which is the only one of fp4_e4m3.
        ties, zero_sign: as in `encode_e2m1`; without effect on fp8.
        division: None for divide, how fp4_e4m3 forms its scale; without effect on the other formats.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ArgumentError: as the quantiser of the format.
    """
    format, floor = check.fake(x, group, format, amax_floor, _dtypes())
    division = checks.choice("division", ScaleDivision.DIVIDE if division is None else division, ScaleDivision)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    if current_numerics() is Numerics.UNQUANTISED:
        return x
    match format:
        case QuantFormat.FP8:
            quantized = quantize_fp8(x, group, amax_floor=floor)
        case QuantFormat.MXFP4:
            quantized = quantize_mxfp4(x, group, amax_floor=floor, ties=ties, zero_sign=zero_sign)
        case QuantFormat.FP4_E4M3:
            quantized = quantize_fp4_e4m3(x, group, division=division, ties=ties, zero_sign=zero_sign)
    return dequantize(quantized.codes, quantized.scales, group, dtype=torch.float32).to(x.dtype)


def _groups_amax(x: Tensor, group: int) -> Tensor:
    """a of (1): [..., n/group] in the dtype of x; NaN where the group has one."""
    return rearrange(x.abs(), "... (groups group) -> ... groups group", group=group).amax(-1)


def _ue8m0(amax: Tensor, limit: float, floor: AmaxFloor) -> Tensor:
    """(1) and (2): e8m0 of the shape of `amax`."""
    bounded = amax.double().clamp(min=floor.value * (limit if floor.bounds == "scale" else 1))
    thresholds = torch.tensor([limit * 2.0 ** (b - E8M0.bias) for b in range(E8M0_NAN)], dtype=torch.float64, device=amax.device)
    byte = torch.bucketize(bounded, thresholds)  # how many are too small, which is the least that is not
    return torch.where(amax.isfinite(), byte, E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def _fp8_scales(amax: Tensor, scale: ScaleFormat, floor: AmaxFloor, division: ScaleDivision) -> Tensor:
    """(1), and (2) or (3): e8m0 or fp32 of the shape of `amax`."""
    if scale is ScaleFormat.UE8M0:
        return _ue8m0(amax, E4M3.max, floor)
    if floor.bounds == "scale":
        return _nan_unless_finite(_divide(amax, E4M3.max, division).clamp(min=floor.value), amax)
    return _nan_unless_finite(_divide(amax.float().clamp(min=floor.value), E4M3.max, division), amax)


def _fp8_codes(x: Tensor, scales: Tensor, block: tuple[int, ...], floor: AmaxFloor) -> Tensor:
    """(5): e4m3 of the shape of x."""
    divisors = scales if scales.dtype == torch.float32 else decode_e8m0(scales)
    if floor.zero_byte_zeroes_codes:
        divisors = torch.where(scales.view(torch.uint8) == 0, inf, divisors)
    return encode_e4m3(quantiser_step(torch.div, x, _spread(divisors, block, tuple(x.shape))))


def _fp4_codes(x: Tensor, divisors: Tensor, group: int, ties: Ties, zero_sign: ZeroSign) -> Tensor:
    """(5), packed: uint8 [..., n/2]."""
    quotients = quantiser_step(torch.div, x, _spread(divisors, (group,), tuple(x.shape)))
    return pack_fp4(encode_e2m1(quotients, ties=ties, zero_sign=zero_sign))


def _divide(amax: Tensor, limit: float, division: ScaleDivision) -> Tensor:
    """(3), and the inner part of (4): fp32."""
    if division is ScaleDivision.DIVIDE:
        return quantiser_step(lambda a: a / torch.full_like(a, limit), amax)  # by a tensor: by a number CUDA multiplies with its reciprocal
    return quantiser_step(lambda a: a * fp32(1 / limit), amax)


def _nan_unless_finite(scales: Tensor, amax: Tensor) -> Tensor:
    return scales.masked_fill(~amax.isfinite(), nan)


def _spread(scales: Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The scale of each element: [..., n/group] or [ceil(n/bn), ceil(k/bk)] to `shape`."""
    if len(block) == 1:
        return repeat(scales, "... groups -> ... (groups group)", group=block[0])
    return repeat(scales, "rows columns -> (rows bn) (columns bk)", bn=block[0], bk=block[1])[: shape[0], : shape[1]]


def _factors(scales: Tensor, grid: tuple[int, ...], layout: ScaleLayout) -> Tensor:
    """Scales of any format and layout as a grid of fp32."""
    match layout:
        case ScaleLayout.PACKED:
            return decode_e8m0(unpack_ue8m0(scales, grid[1]))
        case ScaleLayout.SWIZZLED_128X4:
            return decode_e8m0(unswizzle_128x4(scales, *grid))
    if scales.dtype == torch.float32:
        return scales
    return decode_e4m3(scales) if scales.dtype == torch.float8_e4m3fn else decode_e8m0(scales)


def _dtypes() -> tuple[str, ...]:
    """What x may be: fp64 too where the steps before it do not round."""
    return ("bf16", "fp32") if current_numerics() is Numerics.STATED else ("bf16", "fp32", "fp64")
