"""What follows attention: the heads rotated back, projected group by group, and projected once more to the hidden size.

The outputs o [tokens, heads, dim] of the heads, rotated back by their query's position, are viewed as G groups of E = heads/G * dim
numbers, in order. With wo_a as G matrices [R, E] and wo_b [hidden, G R],

    o <- inverse rotation of o                          `apply_rope(inverse=True)`              (1)
    z_tgr = sum over e of o_tge Wa_gre                                              wo_a        (2)
    y = linear(z flattened to [tokens, G R], Wb)                                    wo_b        (3)

(2) has two forms. The official one multiplies bf16: Wa is dequantised to bf16 once, when it is loaded (`dequantize`). The FP8 one, of
serving code, multiplies codes: o in groups of 128 along E, with scales that are powers of two or amax/448 as they are, and Wa in blocks
of 128 x 128, each group by (2) of `dsv4.reference.linear`. (3) is `linear_fp8`, or `linear_mxfp8` where z comes as a pair.

    o    bf16 [tokens, heads, dim], [tokens, G, E]      z    bf16 [tokens, G, R]        y    bf16 [tokens, hidden]

Roundings: (1), (2) and (3) each to bf16; inside, products are summed in fp64 and rounded once to fp32 before that. A sum of 0 is +0.
Quantisers always see bf16 numbers: of o, the rotated ones. A quantised z for (3) has no floor where it is a pair (`flashinfer`), and the
official floor where `linear_fp8` quantises it; only tiny groups differ. Source: spec A 2.4, 7.1 to 7.3, 8; M 9.9.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import linear_checks as check
from dsv4.reference.codecs import decode_e8m0
from dsv4.reference.linear import linear_fp8, linear_mxfp8, quantize_partial
from dsv4.reference.numerics import bf16_dtypes, bf16_step, current_numerics
from dsv4.reference.quantization import quantize_fp8
from dsv4.reference.rotary import apply_rope
from dsv4.reference.scales import align_mn_major, pack_ue8m0, swizzle_128x4
from dsv4.types import Mxfp8Pair, Numerics, Quantized, ScaleFormat, ScaleLayout

__all__ = ["project_groups", "project_groups_pair", "project_out", "rotate_quantize"]


def project_groups(
    o: Tensor | Quantized,
    weight: Tensor,
    weight_scales: Tensor | None = None,
    *,
    scale: ScaleFormat | str = ScaleFormat.UE8M0,
    amax_floor: str = "sglang",
) -> Tensor:
    """wo_a: each group of heads times its own matrix, by (2).

    Args:
        o: bf16 [tokens, groups, width]; or, with an FP8 weight, Quantized(codes e4m3 [tokens, groups, width], scales e8m0, uint8 (E8M0
            bits) or fp32 [tokens, groups, ceil(width/128)]).
        weight: bf16 [groups, rank, width]; or e4m3 with `weight_scales`. Rows contiguous.
        weight_scales: e8m0, uint8 or fp32 [groups, ceil(rank/128), ceil(width/128)].
        scale: of o where the FP8 form quantises it: ue8m0, or fp32 for amax/448 as it is.
        amax_floor: a floor for FP8, as in `quantize_fp8`.

    Returns:
        bf16 [tokens, groups, rank].

    Raises:
        ArgumentError: codes without scales, a quantised o beside a bf16 weight, wrong dtypes, shapes, strides or options.
    """
    numbers, scales, scale = check.project_groups(o, weight, weight_scales, scale, amax_floor, bf16_dtypes())
    if weight_scales is None:
        return bf16_step(lambda o, w: torch.einsum("tge,gre->tgr", o, w) + 0.0, numbers, weight)
    if scales is None and current_numerics() is not Numerics.UNQUANTISED:
        numbers, scales = quantize_partial(numbers, check.WORD, scale=scale, amax_floor=amax_floor)
    inputs = [numbers[:, g] if scales is None else Quantized(numbers[:, g], scales[:, g]) for g in range(len(weight))]
    return torch.stack([linear_fp8(*of_group) for of_group in zip(inputs, weight, weight_scales, strict=True)], 1)


def rotate_quantize(
    o: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    groups: int,
    group: int = 128,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "sglang",
) -> Quantized:
    """The input of the FP8 form of `project_groups`: heads rotated back by (1), in groups, quantised.

    Args:
        o: bf16 [tokens, heads, dim], dim even.
        table, positions: as `apply_rope`, which gives zeros where the position is absent.
        groups: G; heads is a multiple of it.
        group: numbers that share a scale, 32 or 128; heads/groups * dim is a multiple of it.
        scale_layout: rows, packed, or mn_major for the powers of two as fp32 numbers.
        amax_floor: a floor for FP8, as in `quantize_fp8`.

    Returns:
        Quantized(codes e4m3 [tokens, groups, width], scales). Scales of w a token and group are e8m0 [tokens, groups, w]; or, packed, int32
        [tokens, groups, ceil(w/4)], in memory [groups][ceil(w/4)][align(tokens, 4)]; or, mn_major, fp32 [tokens, groups, w], in memory
        [groups][w][align(tokens, 4)]. Pads are zero.

    Raises:
        ArgumentError: wrong dtypes or shapes, sizes that do not divide, an unknown option.
    """
    layout, floor = check.rotate_quantize(o, table, positions, groups, group, scale_layout, amax_floor, bf16_dtypes())
    rotated = apply_rope(o, table, positions, inverse=True)
    grouped = rearrange(rotated, "tokens (groups heads) dim -> tokens groups (heads dim)", groups=groups)
    codes, scales = quantize_fp8(grouped, group, amax_floor=floor.name)
    by_group = scales.transpose(0, 1)  # [groups, tokens, w]
    if layout is ScaleLayout.PACKED:
        return Quantized(codes, pack_ue8m0(by_group).transpose(0, 1))
    if layout is ScaleLayout.MN_MAJOR:
        return Quantized(codes, align_mn_major(decode_e8m0(by_group)).transpose(0, 1))
    return Quantized(codes, scales)


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
) -> Mxfp8Pair:
    """`project_groups`, and its bf16 result quantised in groups of 32: what `project_out` takes beside a weight that is a pair.

    Args:
        o, weight, weight_scales, scale, amax_floor: as `project_groups`; groups * rank is a multiple of 32.
        scale_layout: packed or 128x4.
        rows: rows of the pair, at least tokens, which is also what None stands for.
        pair_floor: a floor for FP8, as in `quantize_fp8`; flashinfer has none, and a group whose scale is byte 0 has codes zero.

    Returns:
        Mxfp8Pair(codes e4m3 [rows, groups * rank], scales int32 of `rows` rows). Codes and scales of rows past the tokens are zero.

    Raises:
        ArgumentError: as `project_groups`; sizes that do not divide, too few rows, an unknown option.
    """
    *_, layout, rows = check.project_groups_pair(o, weight, weight_scales, scale_layout, rows, scale, amax_floor, pair_floor, bf16_dtypes())
    z = project_groups(o, weight, weight_scales, scale=scale, amax_floor=amax_floor)
    codes, scales = (part.view(torch.uint8) for part in quantize_fp8(z.flatten(1), check.MXFP8_GROUP, amax_floor=pair_floor))
    codes, scales = (pad(part, (0, 0, 0, rows - len(part))) for part in (codes, scales))
    laid_out = pack_ue8m0(scales) if layout is ScaleLayout.PACKED else swizzle_128x4(scales)
    return Mxfp8Pair(codes.view(torch.float8_e4m3fn), laid_out)


def project_out(
    z: Tensor | Quantized | Mxfp8Pair, weight: Tensor | Mxfp8Pair, weight_scales: Tensor | None = None, *, block: int = 128
) -> Tensor:
    """wo_b, by (3).

    Args:
        z: bf16 [tokens, groups, rank] or [tokens, groups * rank]; or Quantized(codes, scales) as `linear_fp8`, also of three dimensions
            where rank is a multiple of `block`; or a pair.
        weight: e4m3 [hidden, groups * rank], rows contiguous; beside a pair another one, as `mxfp8_weight` makes it.
        weight_scales, block: as `linear_fp8`; no scales beside a pair.

    Returns:
        bf16 [tokens, hidden].

    Raises:
        ArgumentError: a pair beside a tensor, and as `linear_fp8` and `linear_mxfp8`.
    """
    if isinstance(weight, Mxfp8Pair):
        return linear_mxfp8(check.project_out_pairs(z, weight, weight_scales), weight)
    numbers, scales, weight_scales = check.project_out(z, weight, weight_scales, block, bf16_dtypes())
    return linear_fp8(numbers if scales is None else Quantized(numbers, scales), weight, weight_scales, block=block)
