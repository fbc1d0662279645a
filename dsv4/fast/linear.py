"""Products with quantised weights, and what makes their inputs: the twin of `dsv4.reference.linear`, which has the formulas and roundings.

DeepGEMM and FlashInfer multiply where they take the operands, Triton kernels on other CUDA devices and for other sizes, and elsewhere BLAS
in fp64, a tile of the weight at a time. Producers are one launch: a row is read once and leaves as codes, its scales in the layout that
the product wants. `choose_mxfp8_route` says which, once for a layer. `dsv4.fast.linear_ops` holds operators and tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks
from dsv4 import linear_checks as check
from dsv4.fast import scales
from dsv4.fast.linear_ops import operands
from dsv4.fast.recall import Memory
from dsv4.host import choose_mxfp8_route
from dsv4.types import Mxfp8Pair, Quantized, ScaleLayout

__all__ = ["Mxfp8Pair", "choose_mxfp8_route", "linear_fp8", "linear_mxfp8", "mxfp8_weight", "norm_quantize", "swiglu_quantize"]


def linear_fp8(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128, impl: str | None = None) -> Tensor:
    """x times an FP8 weight whose scales are of square blocks.

    Args:
        x: bf16 [tokens, k], quantised by the official rule; or Quantized(codes e4m3 [tokens, k], scales e8m0, uint8 (E8M0 bits) or fp32
            [tokens, ceil(k/block)]).
        weight: e4m3 [n, k], rows contiguous, k at least 1.
        weight_scales: e8m0, uint8 or fp32 [ceil(n/block), ceil(k/block)].
        block: 128 (V4) or 32 (V4.1).
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, n], contiguous.

    Raises:
        ArgumentError: codes without scales, wrong dtypes, shapes, strides or block, tensors that require grad.
    """
    tensors = (x.codes, weight, weight_scales, x.scales) if isinstance(x, Quantized) else (x, weight, weight_scales)
    options = block, type(block), impl  # the type: 32.0 is no block
    result: Tensor | None = _fp8.recall(options, tensors)
    if result is not None:
        return result
    numbers, of_numbers = check.linear_fp8(x, weight, weight_scales, block)
    checks.no_grad(**{"x": numbers, "x.scales": of_numbers}, weight=weight, weight_scales=weight_scales)
    result = _operator_fp8(*options, *tensors)
    _fp8.keep(options, tensors, (*operands(*tensors), block), options)
    return result


def linear_mxfp8(x: Mxfp8Pair, weight: Mxfp8Pair, *, impl: str | None = None) -> Tensor:
    """The product of two pairs, each in either layout of scales.

    Args:
        x: codes e4m3 [tokens, k], scales int32, packed [tokens, ceil(k/128)] or 128x4 [ceil(tokens/128), ceil(k/128), 32, 4].
        weight: codes e4m3 [n, k], rows contiguous, and scales of its rows likewise.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, n], contiguous. Scales of rows past the last, and of groups past the last, are not read.

    Raises:
        ArgumentError: no pairs, wrong dtypes, shapes or strides, codes that require grad.
    """
    options = (impl,)
    if type(x) is type(weight) is Mxfp8Pair:
        result: Tensor | None = _mxfp8.recall(options, (x.codes, weight.codes, weight.scales, x.scales))
        if result is not None:
            return result
    check.linear_mxfp8(x, weight)
    checks.no_grad(x=x.codes, weight=weight.codes)
    tensors = x.codes, weight.codes, weight.scales, x.scales
    result = _operator_mxfp8(*options, *tensors)
    _mxfp8.keep(options, tensors, operands(*tensors), options)
    return result


def mxfp8_weight(
    weight: Tensor, block_scales: Tensor, *, scale_layout: ScaleLayout | str = ScaleLayout.PACKED, impl: str | None = None
) -> Mxfp8Pair:
    """A weight of V4.1's checkpoint as a pair: each scale of a block repeated for its 32 rows. Once, when it is loaded.

    Args:
        weight: e4m3 [n, k], rows contiguous. It is not copied.
        block_scales: e8m0 or uint8 [ceil(n/32), ceil(k/32)].
        scale_layout: packed or 128x4.
        impl: a backend of `scales.pack_ue8m0` or `scales.swizzle_128x4` by name, else the device's default.

    Returns:
        Mxfp8Pair(weight, scales int32 of n rows in the layout).

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or layout, codes that require grad.
    """
    layout = check.mxfp8_weight(weight, block_scales, scale_layout)
    checks.no_grad(weight=weight, block_scales=block_scales)
    rows = block_scales.view(torch.uint8).repeat_interleave(check.MXFP8_GROUP, 0)[: weight.shape[0]]
    move = scales.pack_ue8m0 if layout is ScaleLayout.PACKED else scales.swizzle_128x4
    return Mxfp8Pair(weight, move(rows, impl=impl))


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    group: int,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
    impl: str | None = None,
) -> Quantized:
    """`rms_norm` and its quantiser in one.

    Args:
        x: bf16 [tokens, n], n a multiple of `group`.
        weight, eps: as `rms_norm`.
        group: 32 or 128.
        scale_layout: rows, packed, 128x4, or mn_major: the powers of two as fp32 numbers.
        amax_floor: a floor for FP8, as in `quantize_fp8`.
        impl: a backend by name, else the device's default.

    Returns:
        Quantized(codes e4m3 [tokens, n], scales e8m0 [tokens, n/group], int32 in the layout with pads zero, or fp32).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number or an option out of range, tensors that require grad.
    """
    layout, _ = check.norm_quantize(x, weight, eps, group, scale_layout, amax_floor)
    checks.no_grad(x=x, weight=weight)
    return as_quantized(*torch.ops.dsv4.norm_quantize.default(x, weight, eps, group, str(layout), amax_floor, impl))


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    *,
    limit: float | None = None,
    group: int,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
    impl: str | None = None,
) -> Quantized:
    """SwiGLU and its quantiser in one.

    Args:
        gate, up: bf16 [tokens, n], of any strides (halves of one matrix), n a multiple of `group`.
        limit: above 0, an fp32 number: bounds the gate from above and `up` from both sides; None for no limit.
        group, scale_layout, amax_floor, impl: as `norm_quantize`.

    Returns:
        Quantized(codes e4m3 [tokens, n], scales) as `norm_quantize`.

    Raises:
        ArgumentError: wrong dtypes or shapes, a number or an option out of range, tensors that require grad.
    """
    layout, _ = check.swiglu_quantize(gate, up, limit, group, scale_layout, amax_floor)
    checks.no_grad(gate=gate, up=up)
    return as_quantized(*torch.ops.dsv4.swiglu_quantize.default(gate, up, limit, group, str(layout), amax_floor, impl))


def _operator_fp8(block: int, _: type, impl: str | None, *tensors: Tensor) -> Tensor:
    """The operator for x, weight, weight_scales and, where x is codes, their scales."""
    result: Tensor = torch.ops.dsv4.linear_fp8.default(*operands(*tensors), block, impl)
    return result


def _operator_mxfp8(impl: str | None, *tensors: Tensor) -> Tensor:
    result: Tensor = torch.ops.dsv4.linear_mxfp8.default(*operands(*tensors), impl)
    return result


_fp8 = Memory("linear.linear_fp8", _operator_fp8)
_mxfp8 = Memory("linear.linear_mxfp8", _operator_mxfp8)


def as_quantized(codes: Tensor, scales: Tensor) -> Quantized:
    """What an operator's codes and scales are."""
    return Quantized(codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales)
