"""Which bytes of a page a norm, a rotation and a quantiser may leave, given that the first two round: level E4 of `norm_rope_store_kv`.

Of a row with exact numbers y (roundings off), the row that is quantised is off by at most E in each dim:

    y1 = w x rsqrt(m + eps) in fp32, to bf16        |y1 - exact| <= e1 |exact|,   e1 = (1 + 2^-8) (1 + d) - 1
    d: the sum of n squares and the mean            gamma(n + 2), which the root halves: that is left as slack
       rsqrt, and two products                      primitive("rsqrt"), gamma(2)
    y2 = a c - b s in fp32, to bf16                 e1 (|a c| + |b s|) on the way in, gamma(3) of the same, and 2^-8 of the result

A scale is one that some amax within E of the exact one gives; under the scale that was chosen, each number that a byte decodes to lies
within E and half a step of codes of the exact one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.formats import AMAX_FLOORS, E2M1, E4M3, E8M0, FP4_E4M3_AMAX_FLOOR, KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import code_bytes
from dsv4.parity import bounds
from dsv4.parity.contracts import Call
from dsv4.reference.codecs import decode_e2m1, decode_e4m3, decode_e8m0, encode_e4m3, unpack_fp4
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.rotary import apply_rope

U_BF16 = 2.0**-8
LEAST_BF16 = 2.0**-134  # half a step of subnormal bf16


def byte_places(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    """Where the bytes of records lie in contiguous pages of `stride` bytes: int64 [slots, token_bytes]."""
    page, slot = slots.long()[:, None] // page_size, slots.long()[:, None] % page_size
    step = layout.scale_offset(1, page_size) - layout.scale_offset(0, page_size)
    data = layout.data_offset(1, page_size) * slot + torch.arange(layout.data_bytes, device=slots.device)
    scales = layout.scale_offset(0, page_size) + step * slot + torch.arange(layout.scale_bytes, device=slots.device)
    return page * stride + torch.cat([data, scales], 1)


def stored_records(pages: Tensor, slots: Tensor, layout: KVLayout, page_size: int) -> Tensor:
    """The record in each slot, uint8 [slots, token_bytes]; zeros where there is none."""
    there = (slots >= 0) & (slots < pages.shape[0] * page_size)
    places = byte_places(torch.where(there, slots, 0), layout, page_size, pages.shape[1])
    return pages.reshape(-1)[places * there[:, None]] * there[:, None]


def permits_row_bytes(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Bytes of pages after `norm_rope_store_kv` that are allowed; those of no row must be as they were. Slots must differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return torch.zeros(expected.shape, dtype=torch.bool, device=expected.device)
    layout, size = KV_LAYOUTS[call["layout"]], call["page_size"]
    slots, floor = call[5], call.kwargs.get("amax_floor", "official")
    there = (slots >= 0) & (slots < expected.shape[0] * size)
    exact, error = _rows(call)
    places = byte_places(slots[there], layout, size, expected.shape[1])
    allowed = (expected == actual).reshape(-1)
    records = actual.reshape(-1)[places]
    return allowed.index_put((places,), _allowed(records, exact[there], error[there], layout, floor, allowed[places])).view(expected.shape)


def _rows(call: Call) -> tuple[Tensor, Tensor]:
    """y and E, fp64 [rows, dims]."""
    kv, weight, table, positions = call.args[:4]
    eps, dims, rotated = call["eps"], kv.shape[1], table.shape[1]
    with numerics("unrounded"):
        normed = rms_norm(kv, weight, eps=eps)
        exact = apply_rope(normed, table, positions)
    relative = bounds.gamma(dims + 2) + bounds.primitive("rsqrt", kv.device.type) + bounds.gamma(2)
    e1 = (1 + U_BF16) * (1 + relative) - 1
    error = e1 * normed.abs() + LEAST_BF16
    present = (positions >= 0) & (positions < table.shape[0])
    cosines, sines = table[torch.where(present, positions, 0)].double().abs().chunk(2, 1)
    a, b = normed[:, -rotated::2].abs(), normed[:, -rotated + 1 :: 2].abs()
    terms = torch.stack([a * cosines + b * sines, a * sines + b * cosines], 2).flatten(1)  # [rows, rotated]
    turned = (e1 + bounds.gamma(3) * (1 + e1)) * terms + 2 * LEAST_BF16
    turned = turned + U_BF16 * (exact[:, -rotated:].abs() + turned) + LEAST_BF16
    return exact, torch.cat([error[:, :-rotated], turned], 1) * present[:, None]


def _allowed(records: Tensor, exact: Tensor, error: Tensor, layout: KVLayout, floor: str, same: Tensor) -> Tensor:
    """For each byte of each record."""
    width, data, groups = code_bytes(layout), layout.data_bytes, layout.groups
    codes, rest, scales = records[:, :width], records[:, width:data], records[:, data : data + groups]
    quantised = layout.quantised
    y, e = exact[:, :quantised].unflatten(1, (-1, layout.group)), error[:, :quantised].unflatten(1, (-1, layout.group))
    factors, allowed_scales = _scales(scales, y, e, layout, AMAX_FLOORS[floor].least_byte_fp8 or 0)
    numbers = (decode_e2m1(unpack_fp4(codes)) if layout.numbers == "e2m1" else decode_e4m3(codes)).double().view(y.shape)
    steps = _half_step((y.abs() + e) / factors, layout) * factors
    near = ((numbers * factors - y).abs() <= e + steps).flatten(1)
    if layout.numbers == "e2m1":
        near = near.unflatten(1, (-1, 2)).all(2)
    bf16 = rest.contiguous().view(torch.bfloat16).double()
    bf16_near = (bf16 - exact[:, quantised:]).abs() <= error[:, quantised:]
    return torch.cat([near, bf16_near.repeat_interleave(2, 1), allowed_scales, same[:, data + groups :]], 1)


def _scales(scales: Tensor, y: Tensor, e: Tensor, layout: KVLayout, least: int) -> tuple[Tensor, Tensor]:
    """The factor of each group, fp64 [rows, groups, 1], and whether its byte is allowed."""
    low, high = (y.abs() - e).amax(-1).clamp(min=0), (y.abs() + e).amax(-1)
    if layout.scale == "unit":
        return torch.ones_like(low)[..., None], scales == scales
    if layout.scale == "ue8m0":
        factors = decode_e8m0(scales).double()
        return factors[..., None], (_least_byte(low, least) <= scales) & (scales <= _least_byte(high, least))
    factors = decode_e4m3(scales).double()
    smallest, largest = (decode_e4m3(encode_e4m3((a.clamp(min=FP4_E4M3_AMAX_FLOOR) / E2M1.max).float())).double() for a in (low, high))
    return factors[..., None], (smallest <= factors) & (factors <= largest)


def _least_byte(amax: Tensor, least: int) -> Tensor:
    """The least power of two times 448 that reaches amax, as a byte of at least the floor's."""
    mantissa, exponent = torch.frexp(amax.clamp(min=E8M0.min_normal) / E4M3.max)
    return (exponent - (mantissa == 0.5).int() + E8M0.bias).clamp(min=least)


def _half_step(quotients: Tensor, layout: KVLayout) -> Tensor:
    """Half the distance of two codes at a quotient, or what it has beyond the largest code: a scale rounded to E4M3 may be too small."""
    target = E2M1 if layout.numbers == "e2m1" else E4M3
    exponents = torch.frexp(quotients.clamp(min=target.min_normal)).exponent - 1
    return torch.maximum(torch.ldexp(torch.ones_like(quotients), exponents - target.mantissa_bits - 1), quotients - target.max)
