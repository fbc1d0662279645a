"""How far products of codes may be off, and which codes a producer may write that rounds on the way.

Products. With W = sum of |a w| over a block of k, s = |sa sw| its scales and S = sum of s W, no fp32 sum in any order is off by more than
gamma(2 (K + K/16 + 16) + 4) S: products of E4M3 and of bf16 numbers are exact, a tensor core cuts the addends of a step of 16 to the
largest of them and the accumulator, so that an addition is off by an ulp, and scales, their product and what they multiply round at most
four times.

Hopper's FP8 tensor cores keep 14 bits of the largest addend: the leading one and 13 behind it. A step adds 32 products and the
accumulator, and cuts each of these 33 below 2^-13 of the power of two that the largest is not below; its result may be cut once more. A
kernel that promotes starts at zero in each block of 128 and adds what it got to an fp32 number. So if P is the sum of |a w| in the steps
of a block before one, and m at least the largest product of that step, the error after it is larger by at most

    2^-13 (33 max(P + e, m) + P' + e)                e the error of the steps before, P' = P with this step

and s times the error of its last step is that of the block. Codes below the smallest normal number count as that in m, as exponents do.
This bound is 0.7 % of S where all numbers are positive and alike; without promotion P grows to S itself, and the error with it: 3 % to 5 %
at K = 2048, 15 % at 8192. Blocks of 32 are one step. Devices that are no GPU are held to the first bound alone, but on long sums of
positive numbers, where everybody is held to the second.

Producers. What is rounded to bf16 before it is quantised lies within an error of the exact number, so that its bf16 lies between two
numbers, nearly always equal. Quantisers are monotone in amax and, under one scale, in the number: a code is permitted between those of the
ends, under the least and the largest scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import AMAX_FLOORS, fp32
from dsv4.parity import bounds
from dsv4.parity.components.norms import half_bf16_step
from dsv4.parity.components.scales import rows_of_tiles
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.reference import norms, output_projection
from dsv4.reference.codecs import decode_e4m3, decode_e8m0, encode_e4m3
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Mxfp8Pair

HOPPER_U = 2.0**-13
HOPPER_STEP = 32
WORST_ADDENDS = HOPPER_STEP + 1
LEAST_CODE = 2.0**-6  # the smallest normal number: a code below has its exponent
GROUP, PAIR_GROUP = 128, 32
QUOTIENT = 2 * 2 * bounds.U  # div.full
LOST_EXPONENTIAL = 2.0**-120  # |silu| where e^|g| overflows or is flushed to zero

Bound = Callable[[Call, Tensor], Tensor]
Permits = Callable[[Call, Tensor, Tensor], Tensor]


class Magnitudes(NamedTuple):
    """Absolute numbers of an operand, fp64 [rows, k], and its scales, [rows, blocks]."""

    numbers: Tensor
    scales: Tensor


def product_error(x: Magnitudes, w: Magnitudes, block: int, *, hopper: bool) -> Tensor:
    """Error of a product before it is rounded to bf16, fp64 [rows of x, rows of w]."""
    k = x.numbers.shape[1]
    scales = x.scales[:, None] * w.scales
    first, second = (_steps(part.numbers, block) for part in (x, w))  # [rows, blocks, steps, 32]
    sums = torch.einsum("mbsk,nbsk->mnbs", first, second)
    size, error = (scales * sums.sum(3)).sum(2), torch.zeros_like(sums[..., 0, 0])
    if hopper:
        peaks = [part.amax(3).clamp(min=LEAST_CODE) for part in (first, second)]
        error = (scales * _hopper(sums, torch.einsum("mbs,nbs->mnbs", *peaks))).sum(2)
    return error + sum_error(k) * (size + error) + k * bounds.LEAST


def sum_error(terms: int) -> float:
    """Of an fp32 sum of scaled exact products in any order, relative to the sum of magnitudes."""
    return bounds.gamma(2 * (terms + terms // 16 + 16) + 4)


def _hopper(sums: Tensor, largest: Tensor) -> Tensor:
    """Error of each block, [..., blocks], from the sums of its steps and numbers that no product of a step is above."""
    done = torch.zeros_like(sums[..., 0])
    error = torch.zeros_like(done)
    for total, one in zip(sums.unbind(-1), largest.unbind(-1), strict=True):
        level = torch.maximum(done + error, one)
        done = done + total
        error = error + HOPPER_U * (WORST_ADDENDS * level + done + error)
    return error


def _steps(numbers: Tensor, block: int) -> Tensor:
    found: Tensor = pad(numbers, (0, -numbers.shape[1] % block)).unflatten(1, (-1, block)).unflatten(2, (-1, HOPPER_STEP))
    return found


def of_codes(codes: Tensor, scales: Tensor, rows_a_scale: int = 1) -> Magnitudes:
    """Codes [rows, k] with scales of their blocks, each of so many rows."""
    factors = (scales if scales.dtype == torch.float32 else decode_e8m0(scales)).double().abs()
    return Magnitudes(decode_e4m3(codes).double().abs(), factors.repeat_interleave(rows_a_scale, 0)[: codes.shape[0]])


def of_numbers(x: Tensor, block: int, scale: str, amax_floor: str) -> Magnitudes:
    """bf16 [rows, k] as it is quantised."""
    codes, scales = quantize_fp8(pad(x, (0, -x.shape[1] % block)), block, scale=scale, amax_floor=amax_floor)
    return of_codes(codes[:, : x.shape[1]], scales)


def of_pair(pair: Mxfp8Pair) -> Magnitudes:
    """A pair in either layout."""
    rows, k = pair.codes.shape
    words = pair.scales if pair.scales.dim() == 2 else rows_of_tiles(pair.scales, rows)
    return of_codes(pair.codes, _bytes(words)[:, : -(-k // PAIR_GROUP)])


def _bytes(words: Tensor) -> Tensor:
    """uint8 [rows, 4 words]: the scale of each group, missing ones behind."""
    return words.contiguous()[..., None].view(torch.uint8).flatten(1)


def _rounded_bound(error: Tensor, exact: Tensor) -> Tensor:
    return error + half_bf16_step(exact.abs() + error)


def linear(*, hopper: bool = False) -> Bound:
    """Bound of `linear_fp8`, `linear_mxfp8` and `project_out`; with `hopper`, for 14 bits on every device."""

    def bound(call: Call, exact: Tensor) -> Tensor:
        x, weight = call.args[:2]
        narrow = hopper or exact.device.type == "cuda"
        if isinstance(weight, Mxfp8Pair):
            return _rounded_bound(product_error(of_pair(x), of_pair(weight), PAIR_GROUP, hopper=narrow), exact)
        block: int = call["block"]
        if isinstance(x, Tensor):
            a = of_numbers(x.flatten(1), block, "ue8m0", "official")
        else:
            a = of_codes(x.codes.flatten(1), x.scales.flatten(1))
        return _rounded_bound(product_error(a, of_codes(weight, call.args[2], block), block, hopper=narrow), exact)

    return bound


def groups(*, hopper: bool = False) -> Bound:
    """Bound of `project_groups`; with `hopper`, for 14 bits on every device."""
    return lambda call, exact: _rounded_bound(_z_error(call, hopper=hopper), exact)


def _z_error(call: Call, *, hopper: bool = False) -> Tensor:
    """Error of z [tokens, groups, rank] before it is rounded."""
    o, weight, *scales = call.args
    if not scales:
        size = torch.einsum("tge,gre->tgr", o.double().abs(), weight.double().abs())
        error: Tensor = sum_error(o.shape[2]) * size + o.shape[2] * bounds.LEAST
        return error
    narrow, found = hopper or weight.device.type == "cuda", []
    for g in range(len(weight)):
        if isinstance(o, Tensor):
            a = of_numbers(o[:, g], GROUP, call.kwargs.get("scale", "ue8m0"), call.kwargs.get("amax_floor", "sglang"))
        else:
            a = of_codes(o.codes[:, g], o.scales[:, g])
        found.append(product_error(a, of_codes(weight[g], scales[0][g], GROUP), GROUP, hopper=narrow))
    return torch.stack(found, 1)


class Ends(NamedTuple):
    """Between which bf16 numbers a row to be quantised lies, fp64 [rows, n], and how it is quantised."""

    low: Tensor
    high: Tensor
    group: int
    floor: str

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """The least and the largest byte, [rows, n/group]."""
        size = torch.maximum(self.low.abs(), self.high.abs())
        least = torch.where(self.low * self.high <= 0, 0.0, torch.minimum(self.low.abs(), self.high.abs()))
        first, last = (quantize_fp8(end.bfloat16(), self.group, amax_floor=self.floor).scales.view(torch.uint8) for end in (least, size))
        return first, last

    @property
    def codes(self) -> tuple[Tensor, Tensor]:
        """The least and the largest number that a code may stand for, [rows, n]."""
        found = []
        for byte in self.scales:
            factor = decode_e8m0(byte).double()
            if AMAX_FLOORS[self.floor].zero_byte_zeroes_codes:
                factor = torch.where(byte == 0, torch.inf, factor)
            factor = factor.repeat_interleave(self.group, -1)
            found += [decode_e4m3(encode_e4m3((end / factor).float())).double() for end in (self.low, self.high)]
        ends = torch.stack(found)
        return ends.amin(0), ends.amax(0)


def permits_codes(ends: Callable[[Call], Ends]) -> Permits:
    """Codes that rows within these ends may have."""

    def permits(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
        rows = ends(call)
        least, largest = rows.codes
        numbers = decode_e4m3(actual).double()
        same = expected.view(torch.uint8) == actual.view(torch.uint8)
        return (numbers >= least) & (numbers <= largest) & (same | (least != largest) | (rows.low < 0) & (rows.high > 0))

    return permits


def permits_scales(ends: Callable[[Call], Ends]) -> Permits:
    """Scales that rows within these ends may have, e8m0 or packed words, missing groups zero."""

    def permits(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
        least, largest = ends(call).scales
        if actual.dtype != torch.int32:
            return (actual.view(torch.uint8) >= least) & (actual.view(torch.uint8) <= largest)
        spare = 4 * actual.shape[1] - least.shape[1]
        inside = (_bytes(actual) >= pad(least, (0, spare))) & (_bytes(actual) <= pad(largest, (0, spare)))
        found: Tensor = inside.unflatten(1, (-1, 4))
        return found.all(2)

    return permits


def _ends(exact: Tensor, error: Tensor, group: int, floor: str) -> Ends:
    low, high = ((exact + sign * error).float().bfloat16().double() for sign in (-1, 1))
    return Ends(low, high, group, floor)


def norm_ends(call: Call) -> Ends:
    """Of `norm_quantize`: a sum of n squares, its division and eps, which the root halves; the root; two products; second order."""
    x, weight = call.args
    exact = unrounded(norms.rms_norm)(x, weight, eps=call["eps"]).double()
    relative = bounds.gamma(x.shape[1] + 3) / 2 + bounds.primitive("rsqrt", x.device.type) + bounds.gamma(3)
    return _ends(exact, relative * exact.abs() + bounds.LEAST, call["group"], call.kwargs.get("amax_floor", "official"))


def swiglu_ends(call: Call) -> Ends:
    """Of `swiglu_quantize`: a fast exponential, off by 2 + 1.173 |g| ulp, a sum, a quotient, and two products."""
    gate, up = (part.double() for part in call.args)
    if call["limit"] is not None:
        limit = fp32(call["limit"])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = gate / (1 + torch.exp(-gate)) * up
    relative = 2 * (2 + 1.173 * gate.abs()) * bounds.U + QUOTIENT + bounds.gamma(4)
    error = relative * exact.abs() + LOST_EXPONENTIAL * (1 + up.abs())
    return _ends(exact, error, call["group"], call.kwargs.get("amax_floor", "official"))


def pair_ends(call: Call) -> Ends:
    """Of `project_groups_pair`."""
    options = {name: call.kwargs[name] for name in ("scale", "amax_floor") if name in call.kwargs}
    exact = unrounded(output_projection.project_groups)(*call.args, **options)
    error = _z_error(call)
    return _ends(exact.flatten(1), error.flatten(1), PAIR_GROUP, call.kwargs.get("pair_floor", "flashinfer"))
