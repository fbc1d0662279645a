"""Tiles quantised, as they are or through SwiGLU. Nothing depends on the number of rows.

silu(g) = g / (1 + e^-g) in fp32. With log2 e = h + r, h of 16 bits, the product g h of a bf16 g is exact, and

    e^-g = 2^(-g h) (1 - g r ln 2)          r = 7.1e-6; what is left out is at most (g r ln 2)^2 / 2 = 2^-23 of it for |g| <= 104

Below -64 numerator and denominator are taken 2^-64 times, so that e^-g overflows below -133 alone, where silu has long been zero. One step
of Newton makes the reciprocal 1 where the denominator is, for g from 17 on.

Error: with ex2.approx within 2 ulp (2^-22) and rcp.approx within 1 ulp, as PTX has them, silu is off by at most 2^-21 of itself and
2^-149, which was compared for every bf16 with both approximations at their worst; a gate bounded by a limit that is no bf16 adds 2^-24.
silu times up is rounded once to fp32, 2^-24 or 2^-150 more, and from there to bf16. silu is g from 17 on, a zero of the sign of g for
zeros and below -104. Of an infinity it is NaN, which no code tells from an infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import encode_e4m3, group_amax, scale_place, scales_and_quotients, widened
from dsv4.fast.kernels.codec_pairs import near_reciprocal
from dsv4.fast.kernels.linear_inputs_words import NUMBERS, lanes_of, quantised_words, zero_scales
from dsv4.fast.kernels.rows import round_pairs, unpack_pairs

LOG2_E: tl.constexpr = tl.constexpr(47274 / 32768)
LOG2_E_REST: tl.constexpr = tl.constexpr(4.8884954e-06)  # log2 e less that, times ln 2
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
# A choice that LLVM does not gather with others into words of bits.
FAR: tl.constexpr = tl.constexpr("{ .reg .pred far; setp.lt.f32 far, $1, 0fC2800000; selp.f32 $0, 0f1F800000, 0f3F800000, far; }")
ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def _silu(g, NATIVE: tl.constexpr):
    """fp32 of fp32."""
    if NATIVE:
        scale = tl.inline_asm_elementwise(FAR, "=f,f", [g], dtype=tl.float32, is_pure=True, pack=1)
    else:
        scale = tl.where(g < -64.0, 2.0**-64, 1.0)
    shift = tl.fma(scale, tl.full([], 64.0, tl.float32), tl.full([], -64.0, tl.float32))  # its logarithm
    power = tl.fma(g, tl.full([], -LOG2_E, tl.float32), shift)
    if NATIVE:
        raised = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)
    else:
        raised = tl.exp2(power)
    total = scale + tl.fma(raised, g * -LOG2_E_REST, raised)
    inverse = near_reciprocal(total) if NATIVE else 1.0 / total
    # Bounded, so that the inverse of infinity stays zero.
    bounded = tl.minimum(total, LARGEST) * -1.0
    inverse = tl.fma(inverse, tl.fma(bounded, inverse, tl.full([], 1.0, tl.float32)), inverse)
    return g * scale * inverse


@triton.jit
def _activated(gate, up, limit, LIMITED: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate) up of fp32, before it is rounded to bf16."""
    if LIMITED:
        gate = tl.minimum(gate, limit, propagate_nan=ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=ALL), limit, propagate_nan=ALL)
    return _silu(gate, NATIVE) * up


@triton.jit(do_not_specialize=["rows", "all_rows", "scale_groups", "pitch", "least"])
def swiglu_kernel(
    gate,  # words of two bf16
    up,
    codes,  # words of two
    scales,
    rows,
    gate_stride,
    up_stride,
    all_rows,  # with the layout's pads
    scale_groups,
    pitch,
    least,
    limit,
    LIMITED: tl.constexpr,
    PAIRS: tl.constexpr,  # of a row
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,  # pairs of a chunk, four a thread
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A tile of HEIGHT rows by CHUNKS of WIDTH pairs, which are whole words of scales."""
    LANES: tl.constexpr = GROUP // NUMBERS
    ACROSS: tl.constexpr = WIDTH // 4
    COLUMNS: tl.constexpr = (PAIRS + WIDTH * CHUNKS - 1) // (WIDTH * CHUNKS)
    first = tl.program_id(0) // COLUMNS * HEIGHT
    begin = tl.program_id(0) % COLUMNS * (WIDTH * CHUNKS)
    lane = lanes_of(HEIGHT * ACROSS)
    own = tl.multiple_of(first + lane // ACROSS, 1)
    group = tl.multiple_of((begin * 2 // GROUP) + lane % ACROSS // LANES, 1)
    stores = (lane % LANES == 0) & (own < all_rows)
    if first >= rows:
        zero_scales(scales, own, group, stores, scale_groups, pitch, CHUNKS, ACROSS // LANES, LAYOUT)
    else:
        row = (first + tl.arange(0, HEIGHT))[:, None]
        wide = row.to(tl.int64)
        pair = begin + tl.arange(0, WIDTH)[None, :]
        gates = ()
        ups = ()
        for chunk in tl.static_range(CHUNKS):
            at = pair + chunk * WIDTH
            live = (row < rows) & (at < PAIRS)
            gates += (tl.load(gate + (wide * gate_stride + at), mask=live, other=0),)  # type: ignore[assignment]
            ups += (tl.load(up + (wide * up_stride + at), mask=live, other=0),)  # type: ignore[assignment]
        for chunk in tl.static_range(CHUNKS):
            at = pair + chunk * WIDTH
            gate_even, gate_odd = unpack_pairs(gates[chunk])
            up_even, up_odd = unpack_pairs(ups[chunk])
            even = _activated(gate_even, up_even, limit, LIMITED, NATIVE)
            odd = _activated(gate_odd, up_odd, limit, LIMITED, NATIVE)
            found, scale = quantised_words(round_pairs(even, odd, NATIVE), least, GROUP, LAYOUT, ZEROES, NATIVE)
            tl.store(codes + (wide * PAIRS + at), found, mask=(row < rows) & (at < PAIRS))
            number = group + chunk * (ACROSS // LANES)
            kept = tl.where((own < rows) & (number * GROUP < PAIRS * 2), scale, 0).to(scales.dtype.element_ty)
            tl.store(scales + scale_place(own, number, pitch, LAYOUT), kept, mask=stores & (number < scale_groups))


@triton.jit(do_not_specialize=["rows", "all_rows", "scale_groups", "pitch", "least"])
def quantize_kernel(
    x,  # bf16
    codes,
    scales,
    rows,
    n,
    stride,
    all_rows,  # with the layout's pads
    scale_groups,
    pitch,
    least,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Axes of a tile: row, group, number in the group. The last group may be partial."""
    program = tl.program_id(0)
    across = tl.cdiv(scale_groups, GROUPS)
    row = (program // across * ROWS + tl.arange(0, ROWS))[:, None, None]
    group = (program % across * GROUPS + tl.arange(0, GROUPS))[None, :, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, None, :]
    live = (row < rows) & (column < n)
    wide = row.to(tl.int64)
    numbers = widened(tl.load(x + (wide * stride + column), mask=live, other=0.0), NATIVE)
    amax = group_amax(numbers, NATIVE)
    stored, scale, quotients = scales_and_quotients(numbers, amax, least, 0.0, "fp8", False, False, ZEROES, True, NATIVE)
    tl.store(codes + (wide * n + column), encode_e4m3(quotients, NATIVE), mask=live)
    kept = scale if LAYOUT == "mn_major" else stored
    kept = tl.where((row < rows) & (group * GROUP < n), kept, 0).to(scales.dtype.element_ty)
    tl.store(scales + scale_place(row, group, pitch, LAYOUT), kept, mask=(row < all_rows) & (group < scale_groups))
