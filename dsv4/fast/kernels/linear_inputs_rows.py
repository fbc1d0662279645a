"""Rows normalised and quantised, and heads rotated back and quantised, each in one launch.

A norm has a program for each row, in chunks of WIDTH words, all of which are read at first and stay in registers; more programs write the
scales of pads. Heads have no sum: a program takes HEIGHT of them, in chunks of which only those turn that a turned dim lies in. Nothing
depends on the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import scale_place
from dsv4.fast.kernels.linear_inputs_words import NUMBERS, lanes_of, quantised_words, scaled_words, zero_scales
from dsv4.fast.kernels.rows import inverse_root, pack_pairs, rotate_pairs, unpack_pairs, weight_pairs

ONES: tl.constexpr = tl.constexpr(0x3F803F80)  # two of bf16


@triton.jit
def _mean(total, N: tl.constexpr, NATIVE: tl.constexpr):
    """fp64 total / N, correctly rounded. NATIVE: the remainder of the first quotient is exact."""
    if NATIVE:
        near = total * (1.0 / N)
        rest = tl.fma(-near, tl.full([], N, tl.float64), total)
        mean = tl.where(total < float("inf"), tl.fma(rest, tl.full([], 1.0 / N, tl.float64), near), total)
    else:
        mean = total / N
    return mean


@triton.jit
def _weights(weight, at, PAIRS: tl.constexpr, LAST: tl.constexpr):
    """Weights of a chunk, even and odd; 1 behind the end of the row."""
    even, odd = weight_pairs(weight, at, at < PAIRS)
    if LAST:
        even, odd = tl.where(at < PAIRS, even, 1.0), tl.where(at < PAIRS, odd, 1.0)
    return even, odd


@triton.jit(do_not_specialize=["rows", "scale_groups", "pitch", "least"])
def norm_kernel(
    x,  # words of two bf16
    weight,  # of `weight_words`
    codes,  # words of two
    scales,
    rows,
    stride,
    scale_groups,  # with the layout's pads
    pitch,
    least,
    eps,
    PAIRS: tl.constexpr,  # of a row
    WIDTH: tl.constexpr,  # pairs of a chunk, four a thread
    GROUP: tl.constexpr,
    LAYOUT: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and scales of a row, or zero scales of a pad."""
    CHUNKS: tl.constexpr = (PAIRS + WIDTH - 1) // WIDTH
    LANES: tl.constexpr = GROUP // NUMBERS
    GROUPS: tl.constexpr = WIDTH // 4 // LANES
    row = tl.program_id(0)
    lane = lanes_of(WIDTH // 4)
    group = tl.multiple_of(lane // LANES, 1)
    stores = lane % LANES == 0
    if row >= rows:
        zero_scales(scales, row, group, stores, scale_groups, pitch, CHUNKS, GROUPS, LAYOUT)
    else:
        into = scales + scale_place(row, group, pitch, LAYOUT)
        step = scale_place(tl.cast(0, tl.int32), tl.cast(GROUPS, tl.int32), pitch, LAYOUT)  # GROUPS is a multiple of 4
        pair = tl.arange(0, WIDTH)[None, :]
        begin = x + row.to(tl.int64) * stride
        words = ()
        for chunk in tl.static_range(CHUNKS):
            words += (tl.load(begin + chunk * WIDTH + pair, mask=chunk * WIDTH + pair < PAIRS, other=0),)  # type: ignore[assignment]
        even, odd = _weights(weight, pair, PAIRS, CHUNKS == 1)
        squares = tl.zeros([1, WIDTH], tl.float64)
        for chunk in tl.static_range(CHUNKS):
            first, second = unpack_pairs(words[chunk])
            first, second = first.to(tl.float64), second.to(tl.float64)
            squares = tl.fma(first, first, tl.fma(second, second, squares))
        total = tl.sum(squares, axis=1, keep_dims=True)
        factor = inverse_root(_mean(total, PAIRS * 2, NATIVE) + tl.full([], eps, tl.float64), NATIVE)
        target = codes + row.to(tl.int64) * PAIRS
        for chunk in tl.static_range(CHUNKS):
            at = chunk * WIDTH + pair
            word = words[chunk]  # type: ignore[var-annotated]
            if (chunk + 1) * WIDTH > PAIRS:
                word = tl.where(at < PAIRS, word, ONES)
            scaled = scaled_words(word, even, odd, factor, NATIVE)
            if (chunk + 1) * WIDTH > PAIRS:
                scaled = tl.where(at < PAIRS, scaled, 0)
            if chunk + 1 < CHUNKS:
                even, odd = _weights(weight, at + WIDTH, PAIRS, (chunk + 2) * WIDTH > PAIRS)
            found, scale = quantised_words(scaled, least, GROUP, LAYOUT, ZEROES, NATIVE)
            tl.store(target + at, found, mask=at < PAIRS)
            number = chunk * GROUPS + group
            kept = tl.where(number * GROUP < PAIRS * 2, scale, 0).to(scales.dtype.element_ty)
            tl.store(into + chunk * step, kept, mask=stores & (number < scale_groups))


@triton.jit(do_not_specialize=["tokens", "all_tokens", "places", "groups", "pitch", "least"])
def heads_kernel(
    o,  # words of two bf16
    table,
    positions,
    codes,  # words of two
    scales,
    tokens,
    all_tokens,  # with the layout's pads
    places,
    groups,  # scales of a group of heads, with the layout's pads
    pitch,
    least,
    UNITS: tl.constexpr,  # of a token: a head each, or as many heads as make whole groups of scales
    OF_GROUP: tl.constexpr,  # units of a group of heads
    PAIRS: tl.constexpr,  # of a unit
    DIM: tl.constexpr,  # pairs of a head
    TURNED: tl.constexpr,  # pairs of a head, its last ones
    WIDTH: tl.constexpr,  # pairs of a chunk
    HEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SPARE: tl.constexpr,  # scales missing in the last word of a group of heads
    LAYOUT: tl.constexpr,
    ZEROES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and scales of HEIGHT units, zero scales of pads."""
    CHUNKS: tl.constexpr = (PAIRS + WIDTH - 1) // WIDTH
    LANES: tl.constexpr = GROUP // NUMBERS
    ACROSS: tl.constexpr = WIDTH // 4
    GROUPS: tl.constexpr = ACROSS // LANES
    first = tl.program_id(0) * HEIGHT
    unit = (first + tl.arange(0, HEIGHT))[:, None]
    live = unit < tokens * UNITS
    position = tl.load(positions + unit // UNITS, mask=live, other=-1)
    present = (position >= 0) & (position < places)
    entry = table + tl.where(present, position, 0).to(tl.int64) * (TURNED * 2) - (DIM - TURNED)
    pair = tl.arange(0, WIDTH)[None, :]
    begin = unit.to(tl.int64) * PAIRS
    words = ()
    for chunk in tl.static_range(CHUNKS):
        at = chunk * WIDTH + pair
        words += (tl.load(o + begin + at, mask=live & (at < PAIRS), other=0),)  # type: ignore[assignment]
    lane = lanes_of(HEIGHT * ACROSS)
    row = tl.multiple_of(first + lane // ACROSS, 1)
    group = tl.multiple_of(lane % ACROSS // LANES, 1)
    token = row // UNITS
    column = row % UNITS // OF_GROUP * groups + row % UNITS % OF_GROUP * (PAIRS * 2 // GROUP)
    stores = (lane % LANES == 0) & (token < all_tokens)
    for chunk in tl.static_range(CHUNKS):
        at = chunk * WIDTH + pair
        word = words[chunk]  # type: ignore[var-annotated]
        if PAIRS > DIM or (chunk + 1) * WIDTH > DIM - TURNED:
            turns = present & (at % DIM >= DIM - TURNED) & (at < PAIRS)
            even, odd = unpack_pairs(word)
            cosines = tl.load(entry + at % DIM, mask=turns, other=1.0)
            sines = tl.load(entry + TURNED + at % DIM, mask=turns, other=0.0)
            even, odd = rotate_pairs(even, odd, cosines, sines, True)
            word = tl.where(turns, pack_pairs(even, odd), word)
        found, scale = quantised_words(tl.where(present, word, 0), least, GROUP, LAYOUT, ZEROES, NATIVE)
        tl.store(codes + begin + at, found, mask=live & (at < PAIRS))
        number = chunk * GROUPS + group
        kept = tl.where(token < tokens, scale, 0).to(scales.dtype.element_ty)
        tl.store(scales + scale_place(token, column + number, pitch, LAYOUT), kept, mask=stores & (number * GROUP < PAIRS * 2))
    for spare in tl.static_range(SPARE):
        last = (lane % ACROSS == 0) & (token < all_tokens) & (row % UNITS % OF_GROUP == OF_GROUP - 1)
        place = scale_place(token, column + PAIRS * 2 // GROUP + spare, pitch, LAYOUT)
        tl.store(scales + place, tl.zeros([HEIGHT * ACROSS], scales.dtype.element_ty), mask=last)
