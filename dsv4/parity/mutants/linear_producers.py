"""Wrong producers of quantised inputs, of `linear` and of `output_projection`: what they quantise, how, and where scales go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import E4M3
from dsv4.parity.components.scales import in_columns
from dsv4.parity.linear_inputs import in_tiles, words_of
from dsv4.parity.mutants import Mutant
from dsv4.reference import norms, scales
from dsv4.reference.codecs import decode_e8m0, encode_e4m3, encode_e8m0
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Quantized

Quantiser = Callable[[Tensor, int, str], Quantized]
Placer = Callable[[Tensor, str], Tensor]


def rightly(x: Tensor, group: int, amax_floor: str) -> Quantized:
    """The quantiser."""
    return quantize_fp8(x, group, amax_floor=amax_floor)


def placed(found: Tensor, layout: str) -> Tensor:
    """e8m0 scales in rows, in their layout."""
    if layout == "rows":
        return found
    if layout == "mn_major":
        return scales.align_mn_major(decode_e8m0(found))
    return scales.pack_ue8m0(found) if layout == "packed" else scales.swizzle_128x4(found)


def with_pads(found: Tensor, layout: str) -> Tensor:
    """Pads of ones."""
    if layout == "rows":
        return found
    if layout == "mn_major":
        return in_columns(decode_e8m0(found))
    words = words_of(found.view(torch.uint8).cpu()).to(found.device)
    return in_tiles(words) if layout == "128x4" else in_columns(words)


def single_tile(found: Tensor, layout: str) -> Tensor:
    """Rows past 128 overwrite those of the first tile, and the other tiles stay zero."""
    if layout != "128x4" or len(found) <= 128:
        return placed(found, layout)
    tiles = scales.swizzle_128x4(found)
    wrong = torch.zeros_like(tiles)
    wrong[0] = tiles[-1]
    return wrong


def floored(x: Tensor, group: int, amax_floor: str = "official") -> Quantized:
    """Quantised with scales rounded down, codes saturating."""
    amax = pad(x.float(), (0, -x.shape[-1] % group)).unflatten(-1, (-1, group)).abs().amax(-1)
    byte = encode_e8m0(amax.clamp(min=1e-4 if amax_floor == "official" else 1e-10) / E4M3.max, rounding="floor")
    byte = torch.where(amax.isfinite(), byte.view(torch.uint8), 255).to(torch.uint8).view(byte.dtype)
    factor = decode_e8m0(byte).repeat_interleave(group, -1)[..., : x.shape[-1]]
    return Quantized(encode_e4m3(x.float() / factor), byte)


def group_of_128(x: Tensor, group: int, amax_floor: str) -> Quantized:
    """Groups of 32 share the scale of 128."""
    if group == 128 or x.shape[-1] < 64:
        return rightly(x, group, amax_floor)
    n = x.shape[-1]
    codes, found = quantize_fp8(pad(x, (0, -n % 128)), 128, amax_floor=amax_floor)
    return Quantized(codes[..., :n], found.view(torch.uint8).repeat_interleave(4, -1)[..., : n // group].view(found.dtype))


def nearest_scale(x: Tensor, group: int, amax_floor: str) -> Quantized:
    """Scales rounded to nearest."""
    amax = x.float().unflatten(-1, (-1, group)).abs().amax(-1)
    byte = encode_e8m0(amax.clamp(min=1e-4) / E4M3.max, rounding="nearest").view(torch.uint8)
    byte = torch.where(amax.isfinite(), byte, 255).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantized(encode_e4m3(x.float() / decode_e8m0(byte).repeat_interleave(group, -1)), byte)


def another_floor(x: Tensor, group: int, amax_floor: str) -> Quantized:
    """The floor on the scale, whatever was asked for."""
    return rightly(x, group, "flashmla")


def finite_group(x: Tensor, group: int, amax_floor: str) -> Quantized:
    """NaN and infinities of a group left out."""
    return rightly(x.nan_to_num(0.0, 0.0, 0.0), group, amax_floor)


def _norm(before: Callable[[Tensor, Tensor, float], Tensor], quantiser: Quantiser = rightly, place: Placer = placed) -> Any:
    def norm_quantize(
        x: Tensor, weight: Tensor, *, eps: float, group: int, scale_layout: str = "rows", amax_floor: str = "official"
    ) -> Quantized:
        codes, found = quantiser(before(x, weight, eps), group, amax_floor)
        return Quantized(codes, place(found, scale_layout))

    return norm_quantize


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norms.rms_norm(x, weight, eps=eps)


def _unrounded_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.double() * (x.double().square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()).float()


def _rounded_between(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = norms.rms_norm(x, torch.ones_like(weight), eps=eps)
    return (normed.double() * weight.double()).float().bfloat16()


def _eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (x.double() / (x.double().square().mean(1, keepdim=True).sqrt() + eps) * weight.double()).float().bfloat16()


def _mean_of_tile(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    tile = float(1 << (x.shape[1] - 1).bit_length())
    return (x.double() * (x.double().square().sum(1, keepdim=True) / tile + eps).rsqrt() * weight.double()).float().bfloat16()


def _swiglu(
    before: Callable[[Tensor, Tensor, float | None], Tensor],
    quantiser: Quantiser = rightly,
    place: Placer = placed,
    *,
    rounded: bool = True,
) -> Any:
    """`before(gate, up, limit)`: h in fp64."""

    def swiglu_quantize(
        gate: Tensor, up: Tensor, *, limit: float | None = None, group: int, scale_layout: str = "rows", amax_floor: str = "official"
    ) -> Quantized:
        h = before(gate.double(), up.double(), limit).float()
        codes, found = quantiser(h.bfloat16() if rounded else h, group, amax_floor)
        return Quantized(codes, place(found, scale_layout))

    return swiglu_quantize


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    bound = torch.inf if limit is None else float(torch.tensor(limit, dtype=torch.float32))
    return gate.clamp(max=bound), up.clamp(-bound, bound)


def _silu(gate: Tensor) -> Tensor:
    return gate * gate.sigmoid()


def _activated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return _silu(gate) * up


def _gate_clamped_below(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _activated(gate if limit is None else gate.clamp(min=-limit), up, limit)


def _up_unclamped(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _silu(_clamped(gate, up, limit)[0]) * up


def _gate_unclamped(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _silu(gate) * _clamped(gate, up, limit)[1]


def _clamped_after(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    silu, up = _clamped(_silu(gate), up, limit)
    return silu * up


def _silu_on_up(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return gate * _silu(up)


def _swapped(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _activated(up, gate, limit)


def _limit_in_bf16(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _activated(gate, up, None if limit is None else float(torch.tensor(limit).bfloat16()))


def _limit_lost(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    return _activated(gate, up, None)


def _silu_in_bf16(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return _silu(gate).bfloat16().double() * up


def _without_gate(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return gate.sigmoid() * up


def _nan_lost(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """As fmin and fmax have it: of a NaN and the limit, the limit."""
    return _activated(gate if limit is None else gate.nan_to_num(limit, torch.inf, -torch.inf), up, limit)


def _mutant(number: int, function: str, call: Any, fault: str, source: str = "") -> Mutant:
    return Mutant(f"linear-{number:02}", "linear", function, call, fault, source)


PRODUCERS = (
    _mutant(51, "norm_quantize", _norm(_unrounded_norm), "quantised before it is rounded to bf16"),
    _mutant(52, "norm_quantize", _norm(_rounded_between), "rounded to bf16 before the weight"),
    _mutant(53, "norm_quantize", _norm(_eps_outside), "eps added to the root"),
    _mutant(54, "norm_quantize", _norm(_mean_of_tile), "the mean over the next power of two"),
    _mutant(55, "norm_quantize", _norm(_normed, floored), "scales rounded down", "QT-07"),
    _mutant(56, "norm_quantize", _norm(_normed, nearest_scale), "scales rounded to nearest", "QT-07"),
    _mutant(57, "norm_quantize", _norm(_normed, group_of_128), "groups of 128 for 32"),
    _mutant(58, "norm_quantize", _norm(_normed, another_floor), "the floor on the scale for another"),
    _mutant(59, "norm_quantize", _norm(_normed, finite_group), "a group with a NaN gets a finite scale"),
    _mutant(60, "norm_quantize", _norm(_normed, place=with_pads), "pads not zero", "LN-06"),
    _mutant(61, "norm_quantize", _norm(_normed, place=single_tile), "rows past 128 in the first tile", "LN-06"),
    _mutant(71, "swiglu_quantize", _swiglu(_activated, rounded=False), "quantised before it is rounded to bf16", "spec M 3.7"),
    _mutant(72, "swiglu_quantize", _swiglu(_gate_clamped_below), "the gate clamped from below, too"),
    _mutant(73, "swiglu_quantize", _swiglu(_up_unclamped), "up not clamped"),
    _mutant(74, "swiglu_quantize", _swiglu(_gate_unclamped), "the gate not clamped"),
    _mutant(75, "swiglu_quantize", _swiglu(_clamped_after), "silu clamped for the gate"),
    _mutant(76, "swiglu_quantize", _swiglu(_silu_on_up), "silu of up"),
    _mutant(77, "swiglu_quantize", _swiglu(_swapped), "gate and up swapped", "spec M 3.2"),
    _mutant(78, "swiglu_quantize", _swiglu(_limit_in_bf16), "the limit rounded to bf16", "spec M 3.7"),
    _mutant(79, "swiglu_quantize", _swiglu(_limit_lost), "the limit ignored"),
    _mutant(80, "swiglu_quantize", _swiglu(_silu_in_bf16), "silu rounded to bf16 before the product", "spec M 3.7"),
    _mutant(81, "swiglu_quantize", _swiglu(_without_gate), "the sigmoid without its gate"),
    _mutant(82, "swiglu_quantize", _swiglu(_nan_lost), "a NaN gate becomes the limit", "spec M 3.1"),
    _mutant(83, "swiglu_quantize", _swiglu(_activated, floored), "scales rounded down", "QT-07"),
    _mutant(84, "swiglu_quantize", _swiglu(_activated, group_of_128), "groups of 128 for 32"),
    _mutant(85, "swiglu_quantize", _swiglu(_activated, place=with_pads), "pads not zero", "LN-06"),
    _mutant(86, "swiglu_quantize", _swiglu(_activated, place=single_tile), "rows past 128 in the first tile", "LN-06"),
)
