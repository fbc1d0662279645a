"""Wrong records: quantisers of the KV cache, and changes of what a record holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import code_bytes
from dsv4.reference import kv_cache as right
from dsv4.reference.codecs import decode_e4m3, decode_e8m0, encode_e2m1, encode_e4m3, encode_e8m0, pack_fp4
from dsv4.reference.quantization import quantize_fp4_e4m3, quantize_fp8

Quantiser = Callable[..., Tensor]


def changed(records: Tensor, layout: KVLayout, codes: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """Records with other codes, or other scales."""
    width, data = code_bytes(layout), layout.data_bytes
    codes = records[:, :width] if codes is None else codes
    scales = records[:, data : data + layout.groups] if scales is None else scales
    return torch.cat([codes, records[:, width:data], scales, records[:, data + layout.groups :]], 1)


def of_fp8(kv: Tensor, layout: str, amax_floor: str, change: Callable[[Tensor, Tensor, KVLayout], tuple[Tensor, Tensor]]) -> Tensor:
    """Layouts of UE8M0 scales with other codes and scales [rows, groups]; the others as they should be."""
    chosen, records = KV_LAYOUTS[layout], right.quantize_kv(kv, layout=layout, amax_floor=amax_floor)
    if chosen.scale != "ue8m0":
        return records
    scales = records[:, chosen.data_bytes : chosen.data_bytes + chosen.groups]
    codes, scales = change(kv[:, : chosen.quantised].unflatten(1, (chosen.groups, chosen.group)), scales, chosen)
    return changed(records, chosen, codes.flatten(1).view(torch.uint8), scales.view(torch.uint8))


def floor_scales(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    def change(groups: Tensor, scales: Tensor, chosen: KVLayout) -> tuple[Tensor, Tensor]:
        amax = groups.abs().amax(-1).float().clamp(min=1e-4)
        floor = encode_e8m0((amax.double() / 448).float(), rounding="floor")
        return encode_e4m3(groups.float() / decode_e8m0(floor)[..., None]), floor

    return of_fp8(kv, layout, amax_floor, change)


def fnuz(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    def change(groups: Tensor, scales: Tensor, chosen: KVLayout) -> tuple[Tensor, Tensor]:
        quotients = groups.float() / decode_e8m0(scales)[..., None]
        return quotients.clamp(-240, 240).to(torch.float8_e4m3fnuz), scales

    return of_fp8(kv, layout, amax_floor, change)


def groups_of_32(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """V4.1's groups under V4's scales: the first of each pair."""

    def change(groups: Tensor, scales: Tensor, chosen: KVLayout) -> tuple[Tensor, Tensor]:
        codes, halves = quantize_fp8(groups.flatten(1).contiguous(), chosen.group // 2, amax_floor=amax_floor)
        return codes, halves.view(torch.uint8)[:, ::2]

    return of_fp8(kv, layout, amax_floor, change)


def flashmla_floor(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    own = {"amax_floor": "flashmla"} if KV_LAYOUTS[layout].scale == "ue8m0" else {}
    return right.quantize_kv(kv, layout=layout, **own)


def specials_as_numbers(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    return right.quantize_kv(kv.nan_to_num(0.0), layout=layout, amax_floor=amax_floor)


def rope_quantised(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """The rope dims through codes as well, as in V4.1."""
    chosen = KV_LAYOUTS[layout]
    codes, scales = quantize_fp8(kv, 64)
    numbers = (decode_e4m3(codes).unflatten(1, (-1, 64)) * decode_e8m0(scales)[..., None]).flatten(1).bfloat16()
    return right.quantize_kv(
        torch.cat([kv[:, : chosen.quantised], numbers[:, chosen.quantised :]], 1), layout=layout, amax_floor=amax_floor
    )


def big_endian_rope(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    records, chosen = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor), KV_LAYOUTS[layout]
    width = code_bytes(chosen)
    swapped = records[:, width : chosen.data_bytes].unflatten(1, (-1, 2)).flip(2).flatten(1)
    return torch.cat([records[:, :width], swapped, records[:, chosen.data_bytes :]], 1)


def all_of_v4_quantised(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """The eighth scale, of the rope dims, in the padding byte."""
    records = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor)
    if layout == "v4":
        records[:, -1:] = quantize_fp8(kv[:, 448:], 64).scales.view(torch.uint8)
    return records


def nibbles(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    records, chosen = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor), KV_LAYOUTS[layout]
    if chosen.numbers != "e2m1":
        return records
    codes = records[:, : code_bytes(chosen)]
    return changed(records, chosen, codes // 16 + codes % 16 * 16)


def of_fp4(**other: Any) -> Quantiser:
    def quantize(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
        records, chosen = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor), KV_LAYOUTS[layout]
        if chosen.numbers != "e2m1":
            return records
        codes, scales = quantize_fp4_e4m3(kv, chosen.group, **other)
        return changed(records, chosen, codes, scales.view(torch.uint8))

    return quantize


def fp4_multiplied(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """x times the rounded reciprocal of its scale."""
    records, chosen = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor), KV_LAYOUTS[layout]
    if chosen.numbers != "e2m1":
        return records
    scales = records[:, chosen.data_bytes :]
    inverse = (1 / decode_e4m3(scales)).repeat_interleave(chosen.group, 1)
    return changed(records, chosen, pack_fp4(encode_e2m1(kv.float() * inverse)))


def beyond_448_is_nan(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """Torch's cast before it saturated, without the clamp."""
    records = right.quantize_kv(kv, layout=layout, amax_floor=amax_floor)
    return torch.where(kv.float().abs() > 464, 0x7F, records) if layout == "uniform_fp8" else records
