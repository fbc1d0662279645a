"""Which codes index queries and keys may have, given that norm and transform round: intervals through every step.

Before a rounding to bf16 a number is known to lie within fp32 errors of the exact one, given that its inputs lie in their intervals:

    norm        relatively gamma(n + 2), which the root halves, that is left as slack; rsqrt; two products
    rotation    |c| r_a + |s| r_b, r half the width of an interval: products are exact and one sum is rounded once
    transform   n^-1/2 sum r + gamma(2 (n + n/16 + 16) + 3) n^-1/2 sum |x|: sums in any order, tensor cores' too

Rounding is monotone, so the ends of an interval round to the ends of the next; nearly all have one number left. Quantisers are monotone in
amax and, under a scale, in the number: a code is permitted between those of the ends, under the least and the largest scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4.formats import INDEX_LAYOUTS, fp32
from dsv4.indexer_checks import FP8_DIVISION
from dsv4.parity import bounds
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.reference import norms, rotary
from dsv4.reference.codecs import decode_e2m1, decode_e4m3, decode_e8m0, encode_e2m1, encode_e4m3, unpack_fp4
from dsv4.reference.quantization import quantize_fp8, quantize_mxfp4


@dataclass
class _Rows:
    """Ends of the rows before the quantiser, fp64 [..., dim], the scales that they lead to, and the codes."""

    low: Tensor
    high: Tensor
    scales: tuple[Tensor, Tensor]  # fp32, or bytes of UE8M0, [..., groups]: the least and the largest
    fp4: bool
    ties: str

    @property
    def codes(self) -> tuple[Tensor, Tensor]:
        """The least and the largest number that a code may stand for, fp64 [..., dim]."""
        found = []
        for scale in self.scales:
            factor = (decode_e8m0(scale) if self.fp4 else scale).double()
            factor = factor.repeat_interleave(self.low.shape[-1] // factor.shape[-1], -1)
            found += [self._number(end / factor) for end in (self.low, self.high)]
        ends = torch.stack(found)
        return ends.amin(0), ends.amax(0)

    def _number(self, quotient: Tensor) -> Tensor:
        if self.fp4:
            return decode_e2m1(encode_e2m1(quotient.float(), ties=self.ties)).double()
        return decode_e4m3(encode_e4m3(quotient.float())).double()


def query_codes(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Codes of `index_queries` that are permitted."""
    return _codes_permitted(_query_rows(call), expected, actual)


def query_scales(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Words of scales of `index_queries` that are permitted."""
    return _words_permitted(_query_rows(call), actual)


def query_weights(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Weights of `index_queries` that are permitted: those with a permitted scale, and with FP4 the one."""
    rows = _query_rows(call)
    if rows.fp4:
        return (_bytes(expected) == _bytes(actual)).all(-1)
    constant = fp32(float(call[0].shape[2] * call[0].shape[1]) ** -0.5)
    scaled = (call[1].double() * constant).float().double()
    ends = torch.stack([(scaled * scale[..., 0].double()).float() for scale in rows.scales])
    return (actual >= ends.amin(0)) & (actual <= ends.amax(0))


def key_codes(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Codes of `index_keys` that are permitted."""
    return _codes_permitted(_key_rows(call), expected, actual)


def key_scales(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Scales of `index_keys` that are permitted."""
    rows = _key_rows(call)
    if rows.fp4:
        return _words_permitted(rows, actual)
    return (actual >= rows.scales[0][..., 0]) & (actual <= rows.scales[1][..., 0])


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [..., bytes of an element]."""
    return tensor.contiguous()[..., None].view(torch.uint8)


def _words_permitted(rows: _Rows, actual: Tensor) -> Tensor:
    found = _bytes(actual)  # [..., 4]
    groups = rows.scales[0].shape[-1]
    inside = (found[..., :groups] >= rows.scales[0]) & (found[..., :groups] <= rows.scales[1])
    return inside.all(-1) & (found[..., groups:] == 0).all(-1)


def _codes_permitted(rows: _Rows, expected: Tensor, actual: Tensor) -> Tensor:
    least, largest = rows.codes
    if rows.fp4:
        numbers = decode_e2m1(unpack_fp4(actual)).double()
        same = unpack_fp4(actual) == unpack_fp4(expected)
    else:
        numbers = decode_e4m3(actual).double()
        same = actual.view(torch.uint8) == expected.view(torch.uint8)
    inside = (numbers >= least) & (numbers <= largest)
    permitted = torch.where(rows.low == rows.high, inside & (same | (least != largest)), inside)
    return permitted.unflatten(-1, (-1, 2)).all(-1) if rows.fp4 else permitted


def _query_rows(call: Call) -> _Rows:
    x, _, table, positions = call.args
    return _rows(call, *_turned(x.double(), x.double(), table, positions, call["hadamard"]))


def _key_rows(call: Call) -> _Rows:
    x, table, positions = call.args
    low = high = x.double()
    weight = call.kwargs.get("weight")
    if weight is not None:
        y = unrounded(norms.rms_norm)(x, weight, eps=call["eps"]).double()
        relative = bounds.gamma(x.shape[1] + 2) + bounds.primitive("rsqrt", x.device.type) + bounds.gamma(2)
        low, high = _rounded(y, relative * y.abs() + bounds.LEAST)
    return _rows(call, *_turned(low, high, table, positions, call["hadamard"]))


def _turned(low: Tensor, high: Tensor, table: Tensor, positions: Tensor, hadamard: bool) -> tuple[Tensor, Tensor]:
    """Through rotation and transform."""
    rotated = unrounded(rotary.apply_rope)((low + high) / 2, table, positions).double()
    low, high = _rounded(rotated, _spread((high - low) / 2, table, positions))
    if not hadamard:
        return low, high
    n, centre, radius = low.shape[-1], (low + high) / 2, (high - low) / 2
    sums = bounds.gamma(2 * (n + n // 16 + 16) + 3) * (centre.abs() + radius)
    error = n**-0.5 * (radius + sums).sum(-1, keepdim=True)
    return _rounded(unrounded(norms.hadamard)(centre).double(), error)


def _spread(radius: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """How far off rotated numbers are whose own radius is given."""
    present = (positions >= 0) & (positions < len(table))
    row = table[torch.where(present, positions, 0).long()].double().abs()
    cosines, sines = row.unflatten(0, (-1,) + (1,) * (radius.dim() - 2)).chunk(2, -1)
    first, second = radius[..., -table.shape[1] :].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([cosines * first + sines * second, sines * first + cosines * second], -1).flatten(-2)
    whole: Tensor = torch.cat([radius[..., : -table.shape[1]], turned], -1)
    return torch.where(present.unflatten(0, (-1,) + (1,) * (radius.dim() - 1)), whole, 0.0)


def _rounded(y: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the interval after its rounding."""
    low, high = ((y + sign * error).float().bfloat16().double() for sign in (-1, 1))
    return low, high


def _rows(call: Call, low: Tensor, high: Tensor) -> _Rows:
    options = {"ties": "even", **call.kwargs}
    size = torch.maximum(low.abs(), high.abs())
    least = torch.where(low * high <= 0, 0.0, torch.minimum(low.abs(), high.abs()))
    fp4, floor = options["format"] == "fp4", options.get("amax_floor")
    ends = []
    for magnitudes in (least.bfloat16(), size.bfloat16()):
        if fp4:
            layout = INDEX_LAYOUTS["fp4"]
            ends.append(quantize_mxfp4(magnitudes, layout.group, amax_floor=floor or "official_fp4").scales.view(torch.uint8))
        else:
            made = quantize_fp8(magnitudes, low.shape[-1], scale="fp32", amax_floor=floor or "official", division=FP8_DIVISION)
            ends.append(made.scales)
    return _Rows(low, high, (ends[0], ends[1]), fp4, options["ties"])
