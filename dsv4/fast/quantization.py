"""Groups of numbers that share a scale, FP8 and FP4: the twin of `dsv4.reference.quantization`, which has the formulas.

The largest magnitude of a group is an integer maximum over the bits of fp32; the byte of a power-of-two scale follows from its exponent
and mantissa in closed form, so that no quotient is rounded before the byte is known; codes are rounded in the integer domain or by the
device's own cast. Other scales divide in fp32, correctly rounded. On CUDA one Triton kernel writes codes and scales, in any layout and with
its pads; elsewhere inductor compiles the bodies of `dsv4.fast.groups`, and `dsv4.fast.scales` makes other layouts from rows of scales.
`dsv4.fast.quantization_ops` holds operators and tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks
from dsv4 import quantization_checks as check
from dsv4.fast import quantization_ops  # noqa: F401
from dsv4.types import QuantFormat, Quantized, ScaleDivision, ScaleFormat, ScaleLayout, Ties, ZeroSign

__all__ = ["dequantize", "fake_quantize", "quantize_fp4_e4m3", "quantize_fp8", "quantize_fp8_blocks", "quantize_mxfp4"]

SCALE_DTYPES = {"ue8m0": torch.float8_e8m0fnu, "fp32": torch.float32}


def quantize_fp8(
    x: Tensor,
    group: int,
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
    division: ScaleDivision | str = ScaleDivision.RECIPROCAL,
    impl: str | None = None,
) -> Quantized:
    """E4M3 codes of groups along the last dimension.

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 1 to 512, a power of two.
        scale: ue8m0, or fp32 for the unrounded scale.
        scale_layout: rows; packed or 128x4 for ue8m0, mn_major for fp32, both with x of two dimensions.
        amax_floor: official, sglang, sglang_packer, flashmla, none or flashinfer; the last two with ue8m0 only.
        division: how an fp32 scale divides; without effect on ue8m0.
        impl: a backend by name, else the device's default.

    Returns:
        Quantized(codes e4m3 [..., n], scales e8m0 or fp32 [..., n/group] in the layout's shape, int32 for packed and 128x4).

    Raises:
        ArgumentError: a wrong dtype, rank or size, options that exclude each other, or x that requires grad.
    """
    check.groups(x, group, 1)
    scale, _, division = check.fp8_scale(scale, amax_floor, division)
    layout = check.layout(x, scale, scale_layout)
    checks.no_grad(x=x)
    codes, scales = torch.ops.dsv4.quantize_fp8(x, group, str(scale), str(layout), amax_floor, str(division), impl)
    bytes_of_rows = layout is ScaleLayout.ROWS and scale is ScaleFormat.UE8M0
    return Quantized(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu) if bytes_of_rows else scales)


def quantize_fp8_blocks(
    weight: Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    amax_floor: str = "official",
    division: ScaleDivision | str = ScaleDivision.RECIPROCAL,
    impl: str | None = None,
) -> Quantized:
    """E4M3 codes of a weight in blocks. Blocks at the lower and right edge may be partial.

    Args:
        weight: [n, k], bf16 or fp32.
        block: rows and columns of a block (bn, bk), each a power of two from 1 to 512. V4 has (128, 128), V4.1 (32, 32).
        scale, amax_floor, division, impl: as in `quantize_fp8`.

    Returns:
        Quantized(codes e4m3 [n, k], scales e8m0 or fp32 [ceil(n/bn), ceil(k/bk)]).

    Raises:
        ArgumentError: a wrong dtype, rank or block, options that exclude each other, or a weight that requires grad.
    """
    checks.tensor("weight", weight, ("bf16", "fp32"), ("n", "k"))
    check.block("block", block)
    scale, _, division = check.fp8_scale(scale, amax_floor, division)
    checks.no_grad(weight=weight)
    codes, scales = torch.ops.dsv4.quantize_fp8_blocks(weight, *block, str(scale), amax_floor, str(division), impl)
    return Quantized(codes.view(torch.float8_e4m3fn), scales.view(SCALE_DTYPES[scale]))


def quantize_mxfp4(
    x: Tensor,
    group: int = 32,
    *,
    amax_floor: str = "official_fp4",
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    impl: str | None = None,
) -> Quantized:
    """E2M1 codes with power-of-two scales.

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 2 to 512, a power of two.
        amax_floor: official_fp4, official, flashmla or none.
        ties, zero_sign: as in `encode_e2m1`.
        impl: a backend by name, else the device's default.

    Returns:
        Quantized(codes uint8 [..., n/2], the even element in the low nibble, scales e8m0 [..., n/group]).

    Raises:
        ArgumentError: a wrong dtype, size or option, or x that requires grad.
    """
    check.groups(x, group, 2)
    checks.one_of("amax_floor", amax_floor, check.FP4_FLOORS)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    checks.no_grad(x=x)
    codes, scales = torch.ops.dsv4.quantize_mxfp4(x, group, amax_floor, str(ties), str(zero_sign), impl)
    return Quantized(codes, scales.view(torch.float8_e8m0fnu))


def quantize_fp4_e4m3(
    x: Tensor,
    group: int = 16,
    *,
    division: ScaleDivision | str = ScaleDivision.DIVIDE,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    impl: str | None = None,
) -> Quantized:
    """E2M1 codes with E4M3 scales.

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: 2 to 512, a power of two.
        division: how the scale divides.
        ties, zero_sign: as in `encode_e2m1`.
        impl: a backend by name, else the device's default.

    Returns:
        Quantized(codes uint8 [..., n/2], the even element in the low nibble, scales e4m3 [..., n/group]).
        Scales saturate at 448, so groups with magnitudes above 2688 saturate at it.

    Raises:
        ArgumentError: a wrong dtype, size or option, or x that requires grad.
    """
    check.groups(x, group, 2)
    division = checks.choice("division", division, ScaleDivision)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    checks.no_grad(x=x)
    codes, scales = torch.ops.dsv4.quantize_fp4_e4m3(x, group, str(division), str(ties), str(zero_sign), impl)
    return Quantized(codes, scales.view(torch.float8_e4m3fn))


def dequantize(
    codes: Tensor,
    scales: Tensor,
    group: int | tuple[int, int],
    *,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    dtype: torch.dtype = torch.bfloat16,
    impl: str | None = None,
) -> Tensor:
    """The numbers that codes and scales stand for: code times scale in fp32, rounded once to `dtype`.

    Args:
        codes: e4m3 [..., n], or uint8 or int8 [..., n/2]: two E2M1 codes a byte, the even element low.
        scales: for e4m3 codes e8m0, uint8 (E8M0 bits), fp32, or int32 (packed and 128x4); for E2M1 codes e8m0, uint8 (E8M0 bits) or e4m3.
            [..., n/group], or the shape of the layout; for blocks [ceil(rows/bn), ceil(n/bk)].
        group: numbers that share a scale, a power of two; or a block (bn, bk), with codes of two dimensions.
        scale_layout: where the scales lie. All but rows want e4m3 codes of two dimensions and one group size.
        dtype: bf16 or fp32.
        impl: a backend by name, else the device's default.

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
    check.scales(codes, scales, shape, block, layout, fp4)
    checks.no_grad(codes=codes, scales=scales)
    names = {torch.float32: "fp32", torch.float8_e4m3fn: "e4m3"}
    kind = names.get(scales.dtype, "ue8m0")
    stored = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    rows, columns = block if len(block) == 2 else (1, *block)
    numbers, name = "e2m1" if fp4 else "e4m3", str(dtype).removeprefix("torch.")
    result: Tensor = torch.ops.dsv4.dequantize(codes.view(torch.uint8), stored, rows, columns, numbers, kind, str(layout), name, impl)
    return result


def fake_quantize(
    x: Tensor,
    group: int,
    *,
    format: QuantFormat | str = QuantFormat.FP8,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    division: ScaleDivision | str | None = None,
    impl: str | None = None,
) -> Tensor:
    """`x` as it comes back from its codes, which never reach memory.

    Args:
        x: [..., n], bf16 or fp32, n a multiple of `group`.
        group: a power of two from 1 (FP4: 2) to 512.
        format: fp8 and mxfp4 have ue8m0 scales, fp4_e4m3 has E4M3 scales.
        amax_floor: None for the format's own, which is the only one of fp4_e4m3.
        ties, zero_sign: as in `encode_e2m1`; without effect on fp8.
        division: None for divide, how fp4_e4m3 forms its scale; without effect on the other formats.
        impl: a backend by name, else the device's default.

    Returns:
        The shape and dtype of `x`.

    Raises:
        ArgumentError: as the quantiser of the format.
    """
    format, floor = check.fake(x, group, format, amax_floor)
    division = checks.choice("division", ScaleDivision.DIVIDE if division is None else division, ScaleDivision)
    ties, zero_sign = check.fp4_rounding(ties, zero_sign)
    checks.no_grad(x=x)
    result: Tensor = torch.ops.dsv4.fake_quantize(x, group, str(format), floor, str(ties), str(zero_sign), str(division), impl)
    return result
