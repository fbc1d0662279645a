"""How far a compressor may be off on arbitrary numbers: fp32 evaluation in any order, derived from formats and counts.

With weights w_q and values v_q of a window, S = sum of w_q |v_q| (the reference itself, on |v|). An error of at most d in every exponent
moves each weight by a factor within exp(+-2 d), normalisation included, and so their sum by at most (exp(2 d) - 1) S. d collects the
rounding of score + bias, u |t|; of its difference to the maximum, u |t - m|; the exponential; and, as relative errors of numerator and
denominator, their sums, products and quotient. Exponents below -104 give 0, which is off by less than the smallest number.

A norm divides by N = sqrt(mean x^2 + eps), which is the length of a vector: an error e of x moves it by at most E = sqrt(mean e^2), so

    | y' - y | <= |w| ( e / (N - E) + |x| E / (N (N - E)) )

A rotation mixes the errors of a pair. Quantised bytes are held to what they decode to: half a step of the code on top of the bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.compressor_checks import window_span
from dsv4.formats import KV_LAYOUTS, KVLayout, fp32
from dsv4.parity import bounds
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.reference import compressor, kv_cache, rotary
from dsv4.types import Compressed

BF16_U = 2.0**-8
BF16_LEAST = 2.0**-133  # one rounding among bf16's subnormal numbers is off by at most half of this
VANISHED = 104.0  # e^-104 is below half the smallest fp32 number
COMPRESS = ("ratio", "overlap", "ape", "state_rows")


def stored_as_bf16(exact: Tensor, error: Tensor) -> Tensor:
    """A bound of the error of bf16(fp32(x')), |x' - exact| <= error."""
    return error + (BF16_U + 2 * bounds.U) * (exact.abs() + error) + BF16_LEAST


def projected(call: Call, weight: int) -> Tensor:
    """fp32 accumulation in any order of exact products, each addition off by at most an ulp, tensor cores' too."""
    terms = call[0].shape[1]
    size: Tensor = call[0].double().abs() @ call[weight].double().abs().T
    return bounds.gamma(2 * (terms + terms // 16 + 16)) * size + bounds.LEAST


def pooled(call: Call, exact: Tensor) -> Tensor:
    """Of `pooled`, whose exact numbers are given."""
    scores, state, options = call[1], call[2], call.kwargs
    window = max(window_span(options["ratio"], options["overlap"]), 1)
    addends = (torch.maximum(_largest(scores), _largest(state)), _largest(options.get("ape")))
    largest = float(addends[0] + addends[1])
    reach = min(2 * largest, VANISHED)
    exponent = bounds.U * (largest + reach) + bounds.fast_math_exp(reach)
    relative = 2 * (exponent + bounds.gamma(bounds.sum_height(window) + 3))
    return stored_as_bf16(exact, math.expm1(relative) * _sizes(call) + window * bounds.LEAST)


def _largest(numbers: Tensor | None) -> Tensor:
    """Magnitude; 0 where there are none. NaN is in tokens and ring rows that nobody reads."""
    if numbers is None or not numbers.numel():
        return torch.zeros(())
    return numbers.nan_to_num(0.0, 0.0, 0.0).abs().max()


def _compressed(call: Call, values: Tensor, state: Tensor) -> Compressed:
    """With the roundings off."""
    options = {name: value for name, value in call.kwargs.items() if name in COMPRESS}
    result: Compressed = unrounded(compressor.compress)(values, call[1], state, *call.args[3:5], **options)
    return result


def _sizes(call: Call) -> Tensor:
    """S of each entry and channel."""
    held, scores = call[2].chunk(2, -1)
    return _compressed(call, call[0].abs(), torch.cat([held.abs(), scores], -1)).pooled.double()


def latents(call: Call, exact: Tensor) -> Tensor:
    """Of `latents`, whose exact numbers are given."""
    result = _compressed(call, call[0], call[2])
    x = result.pooled.double()  # [rows, dim]
    error = pooled(call, x)
    dim, weight, eps = x.shape[1], call[5].double().abs(), fp32(call["eps"])
    length = (x.square().mean(1, keepdim=True) + eps).sqrt()
    shift = error.square().mean(1, keepdim=True).sqrt()
    shorter = (length - shift).clamp(min=0.0)
    moved = weight * (error / shorter + x.abs() * shift / (length * shorter))
    relative = bounds.gamma(dim + 2) + bounds.primitive("rsqrt", "cuda") + bounds.gamma(4)
    found = stored_as_bf16(exact, moved + relative * (exact.abs() + moved))
    zero: Tensor = torch.zeros_like(found)
    return torch.where(result.requests[:, None] >= 0, found, zero)


def page_bytes(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Which bytes of `pages` may be what they are: records that decode within the bound, and everything else untouched."""
    before, slots, options = call[7], call[8], call.kwargs
    layout, page_size = KV_LAYOUTS[options["layout"]], options["page_size"]
    result = unrounded(compressor.compress_and_store)(*call.args, **call.kwargs)
    allowed: Tensor = actual == before
    live = (result.requests >= 0) & (slots >= 0) & (slots < len(before) * page_size)
    if not bool(live.any()):
        return allowed
    exact, bound = _rotated(call, result.latents.double(), torch.where(live, result.entries * options["ratio"], -1))
    decoded = kv_cache.load_kv(actual, slots, layout=layout.name, page_size=page_size).double()
    near = ((decoded - exact).abs() <= bound + half_steps(exact, bound, layout)).all(1)
    for row in live.nonzero()[:, 0].tolist():
        page, slot = divmod(int(slots[row]), page_size)
        record = (
            (layout.data_offset(slot, page_size), layout.data_bytes),
            (layout.scale_offset(slot, page_size), layout.scale_bytes),
        )
        for begin, size in record:
            allowed[page, begin : begin + size] = near[row]
    return allowed


def _rotated(call: Call, exact: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as they are quantised, and the bound of each number."""
    table = call[6]
    error, dims = latents(call, exact), table.shape[1]
    rows = unrounded(rotary.apply_rope)(exact, table, positions).double()
    present = (positions >= 0) & (positions < len(table))
    cosines, sines = table[positions.clamp(0, len(table) - 1)].double().abs().chunk(2, 1)
    first, second = error[:, -dims::2], error[:, error.shape[1] - dims + 1 :: 2]
    turned = torch.stack([cosines * first + sines * second, sines * first + cosines * second], 2).flatten(1)
    turned = stored_as_bf16(rows[:, -dims:], turned)
    return rows, torch.where(present[:, None], torch.cat([error[:, :-dims], turned], 1), 0.0)


def half_steps(exact: Tensor, error: Tensor, layout: KVLayout) -> Tensor:
    """Half a step of the code that a number may get, whose group may be off by `error` as well."""
    size = exact.abs() + error
    steps = torch.zeros_like(size)
    groups = size[:, : layout.quantised].unflatten(1, (-1, layout.group))
    top = groups.amax(2, keepdim=True)
    if layout.numbers == "e4m3":
        scale = 2 * top.clamp(min=1e-4) / 448  # rounded up to a power of two; the official floor
        half = torch.maximum(groups * 2.0**-4, scale * 2.0**-10)
    else:
        off = torch.maximum(top * 2.0**-4 / 6, torch.full_like(top, 2.0**-10))  # of an E4M3 scale: half a step, subnormal ones too
        scale = (top / 6 + off).clamp(min=2.0**-9)
        half = torch.maximum(torch.maximum(groups, scale) / 4, 6 * off)  # past 6 scales the code stays at 6
    steps[:, : layout.quantised] = half.flatten(1)
    return steps
