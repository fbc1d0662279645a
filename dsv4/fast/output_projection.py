"""What follows attention: the twin of `dsv4.reference.output_projection`, which has the formulas and roundings.

wo_a is a product for each group of heads, in bf16 or in FP8, by DeepGEMM or by kernels of our own; `rotate_quantize` makes its FP8 input in
one launch, and `project_groups_pair` writes its result as codes for wo_b, which is `linear_fp8` or `linear_mxfp8`.
`dsv4.fast.output_projection_ops` holds operators and tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks
from dsv4 import linear_checks as check
from dsv4.fast import output_projection_ops  # noqa: F401
from dsv4.fast.linear import as_quantized, linear_fp8, linear_mxfp8
from dsv4.fast.linear_ops import operands
from dsv4.fast.recall import Memory
from dsv4.types import Mxfp8Pair, Quantized, ScaleFormat, ScaleLayout

__all__ = ["project_groups", "project_groups_pair", "project_out", "rotate_quantize"]


def project_groups(
    o: Tensor | Quantized,
    weight: Tensor,
    weight_scales: Tensor | None = None,
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    amax_floor: str = "sglang",
    impl: str | None = None,
) -> Tensor:
    """wo_a: each group of heads times its own matrix.

    Args:
        o: bf16 [tokens, groups, width]; or, with an FP8 weight, Quantized(codes e4m3 [tokens, groups, width], scales e8m0, uint8 (E8M0
            bits) or fp32 [tokens, groups, ceil(width/128)]).
        weight: bf16 [groups, rank, width]; or e4m3 with `weight_scales`. Rows contiguous.
        weight_scales: e8m0, uint8 or fp32 [groups, ceil(rank/128), ceil(width/128)].
        scale: of o where the FP8 form quantises it: ue8m0, or fp32 for amax/448 as it is.
        amax_floor: a floor for FP8, as in `quantize_fp8`.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, groups, rank], contiguous.

    Raises:
        ArgumentError: codes without scales, a quantised o beside a bf16 weight, wrong dtypes, shapes, strides or options, tensors that
            require grad.
    """
    tensors: tuple[Tensor, ...] = (weight,) if weight_scales is None else (weight, weight_scales)
    tensors = (o.codes, *tensors, o.scales) if isinstance(o, Quantized) else (o, *tensors)
    options = isinstance(o, Quantized), scale, amax_floor, impl  # codes of a weight with scales, or of o, are as many tensors
    result: Tensor | None = _groups.recall(options, tensors)
    if result is not None:
        return result
    numbers, of_numbers, chosen = check.project_groups(o, weight, weight_scales, scale, amax_floor)
    checks.no_grad(o=numbers, o_scales=of_numbers, weight=weight, weight_scales=weight_scales)
    checked = str(chosen), amax_floor, impl
    result = _operator(*checked, *tensors)
    _groups.keep(options, tensors, (*operands(*tensors), *checked[:-1]), checked)
    return result


def rotate_quantize(
    o: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    groups: int,
    group: int = 128,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "sglang",
    impl: str | None = None,
) -> Quantized:
    """The input of the FP8 form of `project_groups`: heads rotated back, in groups, quantised.

    Args:
        o: bf16 [tokens, heads, dim], dim even.
        table, positions: as `apply_rope`, which gives zeros where the position is absent.
        groups: G; heads is a multiple of it.
        group: numbers that share a scale, 32 or 128; heads/groups * dim is a multiple of it.
        scale_layout: rows, packed, or mn_major for the powers of two as fp32 numbers.
        amax_floor: a floor for FP8, as in `quantize_fp8`.
        impl: a backend by name, else the device's default.

    Returns:
        Quantized(codes e4m3 [tokens, groups, width], scales). Scales of w a token and group are e8m0 [tokens, groups, w]; or, packed, int32
        [tokens, groups, ceil(w/4)], in memory [groups][ceil(w/4)][align(tokens, 4)]; or, mn_major, fp32 [tokens, groups, w], in memory
        [groups][w][align(tokens, 4)]. Pads are zero.

    Raises:
        ArgumentError: wrong dtypes or shapes, sizes that do not divide, an unknown option, tensors that require grad.
    """
    layout, _ = check.rotate_quantize(o, table, positions, groups, group, scale_layout, amax_floor)
    checks.no_grad(o=o, table=table)
    return as_quantized(*torch.ops.dsv4.rotate_quantize.default(o, table, positions, groups, group, str(layout), amax_floor, impl))


def project_groups_pair(
    o: Tensor | Quantized,
    weight: Tensor,
    weight_scales: Tensor | None = None,
    *,
    scale_layout: ScaleLayout | str = ScaleLayout.PACKED,
    rows: int | None = None,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    amax_floor: str = "sglang",
    pair_floor: str = "flashinfer",
    impl: str | None = None,
) -> Mxfp8Pair:
    """`project_groups`, and its bf16 result quantised in groups of 32: what `project_out` takes beside a weight that is a pair.

    Args:
        o, weight, weight_scales, scale, amax_floor, impl: as `project_groups`; groups * rank is a multiple of 32.
        scale_layout: packed or 128x4.
        rows: rows of the pair, at least tokens, which is also what None stands for.
        pair_floor: a floor for FP8, as in `quantize_fp8`; flashinfer has none, and a group whose scale is byte 0 has codes zero.

    Returns:
        Mxfp8Pair(codes e4m3 [rows, groups * rank], scales int32 of `rows` rows). Codes and scales of rows past the tokens are zero.

    Raises:
        ArgumentError: as `project_groups`; sizes that do not divide, too few rows, an unknown option.
    """
    numbers, of_numbers, chosen, layout, tall = check.project_groups_pair(
        o, weight, weight_scales, scale_layout, rows, scale, amax_floor, pair_floor
    )
    checks.no_grad(o=numbers, o_scales=of_numbers, weight=weight, weight_scales=weight_scales)
    given = operands(numbers, weight, weight_scales, of_numbers)
    codes, scales = torch.ops.dsv4.project_groups_pair.default(*given, str(layout), tall, str(chosen), amax_floor, pair_floor, impl)
    return Mxfp8Pair(codes.view(torch.float8_e4m3fn), scales)


def project_out(
    z: Tensor | Quantized | Mxfp8Pair,
    weight: Tensor | Mxfp8Pair,
    weight_scales: Tensor | None = None,
    *,
    block: int = 128,
    impl: str | None = None,
) -> Tensor:
    """wo_b.

    Args:
        z: bf16 [tokens, groups, rank] or [tokens, groups * rank]; or Quantized(codes, scales) as `linear_fp8`, also of three dimensions
            where rank is a multiple of `block`; or a pair.
        weight: e4m3 [hidden, groups * rank], rows contiguous; beside a pair another one, as `mxfp8_weight` makes it.
        weight_scales, block: as `linear_fp8`; no scales beside a pair.
        impl: a backend of `linear_fp8` or `linear_mxfp8` by name, else the device's default.

    Returns:
        bf16 [tokens, hidden], contiguous.

    Raises:
        ArgumentError: a pair beside a tensor, and as `linear_fp8` and `linear_mxfp8`.
    """
    if isinstance(weight, Mxfp8Pair):
        pair = check.project_out_pairs(z, weight, weight_scales)
        checks.no_grad(**{"z.codes": pair.codes, "weight.codes": weight.codes})
        return linear_mxfp8(pair, weight, impl=impl)
    numbers, scales, of_weight = check.project_out(z, weight, weight_scales, block)
    checks.no_grad(**{"z" if scales is None else "z.codes": numbers, "z.scales": scales})
    return linear_fp8(numbers if scales is None else Quantized(numbers, scales), weight, of_weight, block=block, impl=impl)


def _operator(scale: str, amax_floor: str, impl: str | None, *tensors: Tensor) -> Tensor:
    """The operator for o, weight and, where they are codes, scales of the weight and of o."""
    result: Tensor = torch.ops.dsv4.project_groups.default(*operands(*tensors), scale, amax_floor, impl)
    return result


_groups = Memory("output_projection.project_groups", _operator)
