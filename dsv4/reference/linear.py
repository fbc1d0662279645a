"""Products with quantised weights, and what makes their inputs.

For inputs x [tokens, k] and a weight [n, k], with codes a of x and w of the weight in blocks of B along k (and along n for w),

    a, sa = quantise(x) in groups of B                                                          (1)
    y_tn = sum over blocks b of sa_tb sw_(n div B)b (sum over k in b of a_tk w_nk)              (2)
    y_tn = sum over groups b of sa_tb sw_nb (sum over k in b of a_tk w_nk)          pairs, B = 32   (3)

V4 has B = 128, V4.1 B = 32. (1) is `quantize_fp8` with power-of-two scales and the official floor; the last group may be partial. (3) is
(2) with a scale of each row of the weight, and both operands are pairs: codes and scales laid out as words, as the libraries' products
of MXFP8 take them. V4.1's checkpoint has a scale for 32 rows, which `mxfp8_weight` repeats.

A product's input often comes straight from another step, which can then write codes instead of numbers:

    h = rms_norm(x)                                                                 norm        (4)
    h = silu(min(gate, limit)) clamp(up, -limit, limit),  silu(g) = g / (1 + e^-g)  SwiGLU      (5)

each followed by (1) of h, with the floor and the layout asked for.

    x, gate, up     bf16                        codes    e4m3
    scales          e8m0, or fp32 with any value; words of pairs int32
    y               bf16 [tokens, n]

Roundings: (2) and (3) are one step: codes and scales are widened, their products summed in fp64, rounded once to fp32 and from there to
bf16. A sum of 0 is +0. (4) and (5) are rounded to bf16 before they are quantised, as they are where nothing is fused. The limit is an
fp32 number. A NaN code or scale (byte 255) makes NaN of every sum that it is part of, whatever it is multiplied with. Where nothing is
quantised (`unquantised`), x is multiplied as it is with the numbers that the weight's codes stand for.

Source: spec A 0.5, 7.3, 8; M 3.1, 3.3, 9.9.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import linear_checks as check
from dsv4.formats import align, fp32
from dsv4.host import choose_mxfp8_route
from dsv4.reference.codecs import decode_e4m3, decode_e8m0
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import bf16_dtypes, bf16_step, current_numerics
from dsv4.reference.quantization import quantize_fp8
from dsv4.reference.scales import align_mn_major, pack_ue8m0, swizzle_128x4, unpack_ue8m0, unswizzle_128x4
from dsv4.types import Mxfp8Pair, Numerics, Quantized, ScaleFormat, ScaleLayout

__all__ = ["Mxfp8Pair", "choose_mxfp8_route", "linear_fp8", "linear_mxfp8", "mxfp8_weight", "norm_quantize", "swiglu_quantize"]


def linear_fp8(x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = 128) -> Tensor:
    """x times an FP8 weight whose scales are of square blocks, by (1) and (2).

    Args:
        x: bf16 [tokens, k]; or Quantized(codes e4m3 [tokens, k], scales e8m0, uint8 (E8M0 bits) or fp32 [tokens, ceil(k/block)]).
        weight: e4m3 [n, k], rows contiguous, k at least 1.
        weight_scales: e8m0, uint8 or fp32 [ceil(n/block), ceil(k/block)].
        block: 128 (V4) or 32 (V4.1).

    Returns:
        bf16 [tokens, n].

    Raises:
        ArgumentError: codes without scales, wrong dtypes, shapes, strides or block.
    """
    numbers, scales = check.linear_fp8(x, weight, weight_scales, block, bf16_dtypes())
    if scales is None and current_numerics() is not Numerics.UNQUANTISED:
        numbers, scales = quantize_partial(numbers, block)
    a = numbers if scales is None else widened(numbers, scales, (1, block))
    return _product(a, widened(weight, weight_scales, (block, block)))


def linear_mxfp8(x: Mxfp8Pair, weight: Mxfp8Pair) -> Tensor:
    """The product of two pairs, by (3), each in either layout of scales.

    Args:
        x: codes e4m3 [tokens, k], scales int32, packed [tokens, ceil(k/128)] or 128x4 [ceil(tokens/128), ceil(k/128), 32, 4].
        weight: codes e4m3 [n, k], rows contiguous, and scales of its rows likewise.

    Returns:
        bf16 [tokens, n]. Scales of rows past the last, and of groups past the last, are not read.

    Raises:
        ArgumentError: no pairs, wrong dtypes, shapes or strides.
    """
    check.linear_mxfp8(x, weight)
    return _product(_pair_numbers(x), _pair_numbers(weight))


def mxfp8_weight(weight: Tensor, block_scales: Tensor, *, scale_layout: ScaleLayout | str = ScaleLayout.PACKED) -> Mxfp8Pair:
    """A weight of V4.1's checkpoint as a pair: each scale of a block repeated for its 32 rows. Once, when it is loaded.

    Args:
        weight: e4m3 [n, k], rows contiguous. It is not copied.
        block_scales: e8m0 or uint8 [ceil(n/32), ceil(k/32)].
        scale_layout: packed or 128x4.

    Returns:
        Mxfp8Pair(weight, scales int32 of n rows in the layout).

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or layout.
    """
    layout = check.mxfp8_weight(weight, block_scales, scale_layout)
    rows = repeat(block_scales.view(torch.uint8), "blocks groups -> (blocks row) groups", row=check.MXFP8_GROUP)[: weight.shape[0]]
    return Mxfp8Pair(weight, swizzle_128x4(rows) if layout is ScaleLayout.SWIZZLED_128X4 else pack_ue8m0(rows))


def norm_quantize(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    group: int,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
) -> Quantized:
    """`rms_norm` and its quantiser in one, by (4) and (1).

    Args:
        x: bf16 [tokens, n], n a multiple of `group`.
        weight, eps: as `rms_norm`.
        group: 32 or 128.
        scale_layout: rows, packed, 128x4, or mn_major: the powers of two as fp32 numbers.
        amax_floor: a floor for FP8, as in `quantize_fp8`.

    Returns:
        Quantized(codes e4m3 [tokens, n], scales e8m0 [tokens, n/group], int32 in the layout with pads zero, or fp32).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number or an option out of range.
    """
    layout, floor = check.norm_quantize(x, weight, eps, group, scale_layout, amax_floor, bf16_dtypes())
    return _laid_out(rms_norm(x, weight, eps=eps), group, layout, floor.name)


def swiglu_quantize(
    gate: Tensor,
    up: Tensor,
    *,
    limit: float | None = None,
    group: int,
    scale_layout: ScaleLayout | str = ScaleLayout.ROWS,
    amax_floor: str = "official",
) -> Quantized:
    """SwiGLU and its quantiser in one, by (5) and (1).

    Args:
        gate, up: bf16 [tokens, n], of any strides (halves of one matrix), n a multiple of `group`.
        limit: above 0, an fp32 number: bounds the gate from above and `up` from both sides; None for no limit.
        group, scale_layout, amax_floor: as `norm_quantize`.

    Returns:
        Quantized(codes e4m3 [tokens, n], scales) as `norm_quantize`.

    Raises:
        ArgumentError: wrong dtypes or shapes, a number or an option out of range.
    """
    layout, floor = check.swiglu_quantize(gate, up, limit, group, scale_layout, amax_floor, bf16_dtypes())

    def activated(g: Tensor, u: Tensor) -> Tensor:
        if limit is not None:
            g, u = g.clamp(max=fp32(limit)), u.clamp(-fp32(limit), fp32(limit))
        return g * g.sigmoid() * u

    return _laid_out(bf16_step(activated, gate, up), group, layout, floor.name)


def quantize_partial(x: Tensor, group: int, *, scale: ScaleFormat | str = ScaleFormat.UE8M0, amax_floor: str = "official") -> Quantized:
    """`quantize_fp8` of [..., n], whose last group may be partial: zeros change no maximum."""
    n = x.shape[-1]
    codes, scales = quantize_fp8(pad(x, (0, align(n, group) - n)), group, scale=scale, amax_floor=amax_floor)
    return Quantized(codes[..., :n], scales)


def widened(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The numbers that codes [rows, k] and scales of blocks stand for, exact: fp64 [rows, k]."""
    rows, k = codes.shape
    factors = scales if scales.dtype == torch.float32 else decode_e8m0(scales)
    spread = repeat(factors, "rows groups -> (rows bn) (groups bk)", bn=block[0], bk=block[1])[:rows, :k]
    return decode_e4m3(codes).double() * spread.double()


def _pair_numbers(pair: Mxfp8Pair) -> Tensor:
    """The numbers of a pair: fp64 [rows, k]."""
    rows, k = pair.codes.shape
    groups = -(-k // check.MXFP8_GROUP)
    packed = pair.layout is ScaleLayout.PACKED
    scales = unpack_ue8m0(pair.scales, groups) if packed else unswizzle_128x4(pair.scales, rows, groups)
    return widened(pair.codes, scales, (1, check.MXFP8_GROUP))


def _product(a: Tensor, w: Tensor) -> Tensor:
    """(2), (3): bf16 [tokens, n]. Of the zeros the sum is +0, whatever a product of matrices begins with."""
    return bf16_step(lambda a, w: a @ w.T + 0.0, a, w)


def _laid_out(x: Tensor, group: int, layout: ScaleLayout, amax_floor: str) -> Quantized:
    """(1), the scales in any layout."""
    if layout is not ScaleLayout.MN_MAJOR:
        return quantize_fp8(x, group, scale_layout=layout, amax_floor=amax_floor)
    codes, scales = quantize_fp8(x, group, amax_floor=amax_floor)
    return Quantized(codes, align_mn_major(decode_e8m0(scales)))
