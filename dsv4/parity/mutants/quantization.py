"""Wrong quantisers, most of them out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import E4M3
from dsv4.parity.components.scales import whole_columns
from dsv4.parity.mutants import Mutant
from dsv4.reference import codecs
from dsv4.reference import quantization as right
from dsv4.types import Quantized

Fp8 = Callable[..., Quantized]


def _in_rows(change: Callable[[Tensor, int, Quantized], Quantized], scale: str = "ue8m0") -> Fp8:
    """The right result changed, where the scales are `scale` in rows."""

    def call(x: Tensor, group: int, **options: Any) -> Quantized:
        result = right.quantize_fp8(x, group, **options)
        plain = options.get("scale_layout", "rows") == "rows" and options.get("scale", "ue8m0") == scale
        return change(x, group, result) if plain else result

    return call


def _with_scales(x: Tensor, scales: Tensor) -> Quantized:
    """Codes of x under these E8M0 scales."""
    powers = codecs.decode_e8m0(scales).repeat_interleave(x.shape[-1] // max(scales.shape[-1], 1), -1)
    return Quantized(codecs.encode_e4m3((x.double() / powers).float()), scales)


def _amax(x: Tensor, group: int) -> Tensor:
    return x.float().abs().reshape(*x.shape[:-1], x.shape[-1] // group, group).amax(-1)


def _floor_rule(x: Tensor, group: int, result: Quantized) -> Quantized:
    return _with_scales(x, codecs.encode_e8m0(_amax(x, group).clamp(min=1e-4) / E4M3.max, rounding="floor"))


def _nearest_without_clamp(x: Tensor, group: int, result: Quantized) -> Quantized:
    codes, scales = _with_scales(x, codecs.encode_e8m0(_amax(x, group).clamp(min=1e-4) / E4M3.max, rounding="nearest"))
    powers = codecs.decode_e8m0(scales).repeat_interleave(group, -1)
    above = (x.double() / powers).abs() > 464
    return Quantized(codes.view(torch.uint8).masked_fill(above, 0x7F).view(codes.dtype), scales)


def _even_elements(x: Tensor, group: int, result: Quantized) -> Quantized:
    if group == 1:
        return result
    return _with_scales(x, right.quantize_fp8(x[..., ::2].contiguous(), group // 2).scales)


def _no_floor(x: Tensor, group: int, result: Quantized) -> Quantized:
    scales = _amax(x, group) / E4M3.max
    return Quantized(codecs.encode_e4m3(x.float() / scales.repeat_interleave(group, -1)), scales)


def _small_floor(x: Tensor, group: int, **options: Any) -> Quantized:
    floor = options.pop("amax_floor", "official")
    return right.quantize_fp8(x, group, amax_floor="sglang" if floor == "official" else floor, **options)


def _next_row(x: Tensor, group: int, result: Quantized) -> Quantized:
    return Quantized(result.codes, result.scales.view(torch.uint8).roll(1, 0).view(torch.float8_e8m0fnu))


def _nan_is_254(x: Tensor, group: int, result: Quantized) -> Quantized:
    return Quantized(result.codes, result.scales.view(torch.uint8).clamp(max=254).view(torch.float8_e8m0fnu))


def _byte_zero_is_zero(x: Tensor, group: int, result: Quantized) -> Quantized:
    zero = (result.scales.view(torch.uint8) == 0).repeat_interleave(group, -1)
    return Quantized(result.codes.view(torch.uint8).masked_fill(zero, 0x7F).view(result.codes.dtype), result.scales)


def _other_axis(x: Tensor, group: int, result: Quantized) -> Quantized:
    codes, scales = right.quantize_fp8(x.reshape(group, -1).t().contiguous(), group)
    return Quantized(codes.view(torch.uint8).t().reshape(x.shape).view(codes.dtype), scales.reshape(result.scales.shape))


def _through_bf16(x: Tensor, group: int, **options: Any) -> Quantized:
    return right.quantize_fp8(x.bfloat16(), group, **options)


def _scale_truncated(x: Tensor, group: int, result: Quantized) -> Quantized:
    exponent = (result.scales.view(torch.int32) & 0x7F800000).view(torch.float32)
    return Quantized(result.codes, torch.where(result.scales.isnan(), result.scales, exponent))


def _times_inverse(x: Tensor, group: int, result: Quantized) -> Quantized:
    inverse = (1 / result.scales).repeat_interleave(group, -1)
    return Quantized(codecs.encode_e4m3(x.float() * inverse), result.scales)


def _minus_zero_dropped(x: Tensor, group: int, result: Quantized) -> Quantized:
    codes = result.codes.view(torch.uint8)
    return Quantized(codes.masked_fill(codes == 0x80, 0).view(result.codes.dtype), result.scales)


def _nan_with_sign(x: Tensor, group: int, result: Quantized) -> Quantized:
    codes = result.codes.view(torch.uint8)
    return Quantized(codes.masked_fill((codes == 0x7F) & x.signbit(), 0xFF).view(result.codes.dtype), result.scales)


def _reciprocal_always(x: Tensor, group: int, **options: Any) -> Quantized:
    return right.quantize_fp8(x, group, **{**options, "division": "reciprocal"})


def _pads_left(x: Tensor, group: int, **options: Any) -> Quantized:
    codes, scales = right.quantize_fp8(x, group, **options)
    if options.get("scale_layout") in ("packed", "mn_major"):
        whole_columns(scales.view(torch.int32))[..., scales.shape[0] :] = -1
    return Quantized(codes, scales)


def _dead_rows_of_the_tile(x: Tensor, group: int, **options: Any) -> Quantized:
    codes, scales = right.quantize_fp8(x, group, **options)
    if options.get("scale_layout") == "128x4":
        row = torch.arange(32, device=x.device)[:, None] + 32 * torch.arange(4, device=x.device)
        scales[-1:] = scales[-1:].masked_fill(row >= (x.shape[0] - 1) % 128 + 1, 0x7F7F7F7F)
    return Quantized(codes, scales)


def _block_sides_swapped(weight: Tensor, block: tuple[int, int] = (128, 128), **options: Any) -> Quantized:
    return right.quantize_fp8_blocks(weight, (block[1], block[0]), **options)


def _partial_blocks_without_scale(weight: Tensor, block: tuple[int, int] = (128, 128), **options: Any) -> Quantized:
    codes, scales = right.quantize_fp8_blocks(weight, block, **options)
    bits = scales.view(torch.uint8 if scales.element_size() == 1 else torch.int32)
    if weight.shape[0] % block[0] and scales.shape[0] > 1:
        bits[-1] = bits[-2]
    return Quantized(codes, scales)


def _ties_away(x: Tensor, group: int = 32, **options: Any) -> Quantized:
    codes, scales = right.quantize_mxfp4(x, group, **options)
    if options.get("ties", "even") != "even":
        return Quantized(codes, scales)
    powers = codecs.decode_e8m0(scales).repeat_interleave(group, -1)
    above = (x.double() / powers * (1 + 2.0**-20)).float()
    return Quantized(codecs.pack_fp4(codecs.encode_e2m1(above, zero_sign=options.get("zero_sign", "kept"))), scales)


def _ties_toward_zero(x: Tensor, group: int = 32, **options: Any) -> Quantized:
    return right.quantize_mxfp4(x, group, **{**options, "ties": "toward_zero"})


def _bias_125(x: Tensor, group: int = 32, **options: Any) -> Quantized:
    codes, scales = right.quantize_mxfp4(x, group, **options)
    bits = scales.view(torch.uint8)
    return Quantized(codes, torch.where(bits == 255, 255, (bits.int() - 2).clamp(min=0)).to(torch.uint8).view(scales.dtype))


def _byte_zero_for_zeros(x: Tensor, group: int = 32, **options: Any) -> Quantized:
    floor = options.pop("amax_floor", "official_fp4")
    return right.quantize_mxfp4(x, group, amax_floor="none" if floor == "official_fp4" else floor, **options)


def _high_nibble_first(x: Tensor, group: int = 32, **options: Any) -> Quantized:
    codes, scales = right.quantize_mxfp4(x, group, **options)
    return Quantized((codes << 4) | (codes >> 4), scales)


def _sixth_for_divide(x: Tensor, group: int = 16, **options: Any) -> Quantized:
    return right.quantize_fp4_e4m3(x, group, **{**options, "division": "reciprocal"})


def _scale_is_nan_above_448(x: Tensor, group: int = 16, **options: Any) -> Quantized:
    codes, scales = right.quantize_fp4_e4m3(x, group, **options)
    return Quantized(codes, scales.view(torch.uint8).masked_fill(_amax(x, group) / 6 > 464, 0x7F).view(scales.dtype))


def _scale_before_rounding(x: Tensor, group: int = 16, **options: Any) -> Quantized:
    codes, scales = right.quantize_fp4_e4m3(x, group, **options)
    if not codes.numel():
        return Quantized(codes, scales)
    exact = (_amax(x, group).clamp(min=6 * 2.0**-9) / 6).clamp(max=448).repeat_interleave(group, -1)
    kept = {name: options[name] for name in ("ties", "zero_sign") if name in options}
    return Quantized(codecs.pack_fp4(codecs.encode_e2m1(x.float() / exact, **kept)), scales)


def _bytes_as_numbers(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    if scales.dtype is not torch.uint8 or codes.dtype is not torch.float8_e4m3fn:
        return right.dequantize(codes, scales, group, **options)
    return right.dequantize(codes, scales.float(), group, **options)


def _copied_as_numbers(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    if scales.dtype is torch.float8_e8m0fnu:
        scales = codecs.decode_e8m0(scales).nan_to_num(0).clamp(max=255).to(torch.uint8)
    return right.dequantize(codes, scales, group, **options)


def _rounds_the_scale_first(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    scales = scales.bfloat16().float() if scales.dtype is torch.float32 and scales.is_contiguous() else scales
    return right.dequantize(codes, scales, group, **options)


def _byte_zero_gives_zero(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    result = right.dequantize(codes, scales, group, **options)
    if scales.dtype is not torch.float8_e8m0fnu or isinstance(group, tuple):
        return result
    return result.masked_fill((scales.view(torch.uint8) == 0).repeat_interleave(group, -1), 0.0)


def _words_from_the_top(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    if options.get("scale_layout") == "packed" and scales.numel():
        turned = scales.clone(memory_format=torch.contiguous_format).unsqueeze(-1).view(torch.uint8).flip(-1)
        scales = scales.clone().copy_(turned.contiguous().view(torch.int32).squeeze(-1))
    return right.dequantize(codes, scales, group, **options)


def _blocks_of_the_transpose(codes: Tensor, scales: Tensor, group: Any, **options: Any) -> Tensor:
    if isinstance(group, tuple):
        scales = scales.reshape(scales.shape[::-1]).t()
    return right.dequantize(codes, scales, group, **options)


def _without_scale(x: Tensor, group: int, **options: Any) -> Tensor:
    if options.get("format", "fp8") != "fp8":
        return right.fake_quantize(x, group, **options)
    return codecs.decode_e4m3(codecs.encode_e4m3(x)).to(x.dtype)


def _stepped_twice(x: Tensor, group: int, **options: Any) -> Tensor:
    return right.fake_quantize(right.fake_quantize(x, group), group, **options)


def _mutant(number: int, function: str, call: Any, fault: str, source: str = "") -> Mutant:
    return Mutant(f"quantization-{number:02}", "quantization", function, call, fault, source)


MUTANTS = (
    _mutant(1, "quantize_fp8", _in_rows(_floor_rule), "floor instead of ceil", "QT-07"),
    _mutant(2, "quantize_fp8", _in_rows(_nearest_without_clamp), "saturation without a clamp: NaN codes", "QT-07"),
    _mutant(3, "quantize_fp8", _in_rows(_even_elements), "amax over even elements only", "QT-15"),
    _mutant(4, "quantize_fp8", _in_rows(_no_floor, "fp32"), "no floor: a zero group is NaN", "QT-08"),
    _mutant(5, "quantize_fp8", _small_floor, "floor 1e-10 for 1e-4"),
    _mutant(6, "quantize_fp8", _in_rows(_next_row), "scale byte off by one row"),
    _mutant(7, "quantize_fp8", _in_rows(_nan_is_254), "a NaN group gets byte 254"),
    _mutant(8, "quantize_fp8", _in_rows(_byte_zero_is_zero), "byte 0 taken for 0: zero times infinity", "QT-01"),
    _mutant(9, "quantize_fp8", _in_rows(_other_axis), "quantised along the other axis", "QT-17"),
    _mutant(10, "quantize_fp8", _through_bf16, "rounded twice, through bf16", "KV-05"),
    _mutant(11, "quantize_fp8", _in_rows(_scale_truncated, "fp32"), "fp32 scale cut to a power of two", "LN-01"),
    _mutant(12, "quantize_fp8", _in_rows(_times_inverse, "fp32"), "x times 1/s for x / s"),
    _mutant(13, "quantize_fp8", _reciprocal_always, "reciprocal where divide was asked"),
    _mutant(14, "quantize_fp8", _in_rows(_minus_zero_dropped), "minus zero becomes zero"),
    _mutant(15, "quantize_fp8", _in_rows(_nan_with_sign), "NaN codes keep the sign"),
    _mutant(16, "quantize_fp8", _pads_left, "pad words of columns left as they were", "LN-06"),
    _mutant(17, "quantize_fp8", _dead_rows_of_the_tile, "rows past the last of a tile not zero", "LN-06"),
    _mutant(18, "quantize_fp8_blocks", _block_sides_swapped, "rows and columns of a block swapped"),
    _mutant(19, "quantize_fp8_blocks", _partial_blocks_without_scale, "partial blocks take their neighbour's scale"),
    _mutant(20, "quantize_mxfp4", _ties_away, "midpoints away from zero", "QT-05"),
    _mutant(21, "quantize_mxfp4", _ties_toward_zero, "midpoints toward zero", "QT-05"),
    _mutant(22, "quantize_mxfp4", _bias_125, "exponent bias 125", "QT-12"),
    _mutant(23, "quantize_mxfp4", _byte_zero_for_zeros, "a zero group gets byte 0, not 1"),
    _mutant(24, "quantize_mxfp4", _high_nibble_first, "the odd element in the low nibble"),
    _mutant(25, "quantize_fp4_e4m3", _sixth_for_divide, "amax times 1/6 where divide was asked"),
    _mutant(26, "quantize_fp4_e4m3", _scale_is_nan_above_448, "the scale becomes NaN where it should saturate"),
    _mutant(27, "quantize_fp4_e4m3", _scale_before_rounding, "codes from the scale before it was rounded"),
    _mutant(28, "dequantize", _bytes_as_numbers, "uint8 scales taken as numbers", "QT-13"),
    _mutant(29, "dequantize", _copied_as_numbers, "e8m0 scales copied to uint8 as numbers", "QT-09"),
    _mutant(30, "dequantize", _rounds_the_scale_first, "fp32 scale rounded to bf16 first"),
    _mutant(31, "dequantize", _byte_zero_gives_zero, "byte 0 stands for zero, not 2^-127", "QT-03"),
    _mutant(32, "dequantize", _words_from_the_top, "groups of a packed word from the top byte down"),
    _mutant(33, "dequantize", _blocks_of_the_transpose, "row-major scales of blocks read as column-major", "LN-03"),
    _mutant(34, "fake_quantize", _without_scale, "codes of x itself, without a scale"),
    _mutant(35, "fake_quantize", _stepped_twice, "FP8 before the format that was asked for"),
)
