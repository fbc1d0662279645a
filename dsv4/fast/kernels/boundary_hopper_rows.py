"""Rows behind the statistics on SM90: collapse, norm and quantisation, and the launch that consists of them and of mixes.

A row is CHUNKS chunks of CHUNK words of two bf16. Its functions take the numbers of a chunk's words, so that Triton and Gluon can both call
them, and take a row a program or a role of warps. `finish_rows` has programs of two kinds, as `finish_tile` of `stream_mix` has, and walks
the tokens from the last one back: those are what a cache still has of streams just written.

Collapse and norm have the reference's bits (`boundary_hopper_rounding`), given the weights; the sum of squares is fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.boundary_hopper_rounding import COLLAPSED_AT_ONCE, ONE, ONE_FORM, SCALED, SCALED_FORM, reach_of_collapse
from dsv4.fast.kernels.codec_bits import INFINITY, NAN, scale_place
from dsv4.fast.kernels.rows import inverse_root as root
from dsv4.fast.kernels.rows import unpack_pairs
from dsv4.fast.kernels.stream_mix import _sigmoid, _sinkhorn, inverse_root

CHUNK: tl.constexpr = tl.constexpr(512)
GROUP: tl.constexpr = tl.constexpr(16)  # words of MXFP8's group
STREAMS: tl.constexpr = tl.constexpr(4)
MIXES: tl.constexpr = tl.constexpr(24)
RUN: tl.constexpr = tl.constexpr(8)  # splits that are asked for at a time


@triton.jit
def _asked(parts, place, split, distance, live, SPLITS: tl.constexpr):
    """fp64 of one split's numbers."""
    return tl.load(parts + (split * distance + place), mask=live & (split < SPLITS), other=0.0).to(tl.float64)


@triton.jit
def write_mix(
    parts, squares, scale, base, pre, post, comb, program, tokens, norm_eps, eps,
    K: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr, WITH_PRE: tl.constexpr,
):  # fmt: skip
    """pre (if asked), post and comb of ROWS tokens: `stream_mix` for four streams and more splits."""
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    wide, here = tokens.to(tl.int64), row < tokens
    flat, live = row[:, None], here[:, None]
    stream, entry = tl.arange(0, STREAMS)[None, :], tl.arange(0, STREAMS * STREAMS)[None, :]
    square = tl.zeros([ROWS], tl.float64)
    first, second = tl.zeros([ROWS, STREAMS], tl.float64), tl.zeros([ROWS, STREAMS], tl.float64)
    third = tl.zeros([ROWS, STREAMS * STREAMS], tl.float64)
    for start in range(0, SPLITS, RUN):
        for k in tl.static_range(RUN):
            square += _asked(squares, row, start + k, wide, here, SPLITS)
            if WITH_PRE:
                first += _asked(parts, flat * MIXES + stream, start + k, wide * MIXES, live, SPLITS)
            second += _asked(parts, flat * MIXES + STREAMS + stream, start + k, wide * MIXES, live, SPLITS)
            third += _asked(parts, flat * MIXES + 2 * STREAMS + entry, start + k, wide * MIXES, live, SPLITS)
    factor = inverse_root(square, K, norm_eps)[:, None]
    if WITH_PRE:
        mix = (first * factor).to(tl.float32).to(tl.float64)
        gate = _sigmoid(mix * tl.load(scale).to(tl.float64) + tl.load(base + stream).to(tl.float64))
        tl.store(pre + flat * STREAMS + stream, (gate + tl.full([], eps, tl.float64)).to(tl.float32), mask=live)
    mix = (second * factor).to(tl.float32).to(tl.float64)
    gate = _sigmoid(mix * tl.load(scale + 1).to(tl.float64) + tl.load(base + STREAMS + stream).to(tl.float64))
    tl.store(post + flat * STREAMS + stream, (2.0 * gate).to(tl.float32), mask=live)
    mix = (third * factor).to(tl.float32).to(tl.float64)
    logits = mix * tl.load(scale + 2).to(tl.float64) + tl.load(base + 2 * STREAMS + entry).to(tl.float64)
    # The entries of a token lie in one warp, and stay there.
    mixed = _sinkhorn(tl.reshape(logits.to(tl.float32), (ROWS, STREAMS, STREAMS)), eps, ITERATIONS, STREAMS)
    tl.store(comb + flat * (STREAMS * STREAMS) + entry, tl.reshape(mixed, (ROWS, STREAMS * STREAMS)), mask=live)


@triton.jit
def pre_of(parts, squares, scale, base, row, split, stream, tokens, norm_eps, eps, K: tl.constexpr, SPLITS: tl.constexpr):
    """fp32 [1, STREAMS]: collapse weights of a token. `split` numbers a column of splits, `stream` a row of streams."""
    inside = split < SPLITS
    found = tl.load(parts + (split * tokens + row) * MIXES + stream, mask=inside & (stream < STREAMS), other=0.0)
    square = tl.load(squares + (split * tokens + row) + stream * 0, mask=inside & (stream < STREAMS), other=0.0)
    total = tl.sum(found.to(tl.float64), axis=0, keep_dims=True)
    factor = inverse_root(tl.sum(square.to(tl.float64), axis=0, keep_dims=True), K, norm_eps)
    mix = (total * factor).to(tl.float32).to(tl.float64)
    logit = mix * tl.load(scale).to(tl.float64) + tl.load(base + stream).to(tl.float64)
    return (1.0 / (1.0 + tl.exp(-logit)) + tl.full([], eps, tl.float64)).to(tl.float32)


@triton.jit
def scalars(weights, stream):
    """A row of four numbers as a tuple of scalars."""
    numbers = ()
    for k in tl.static_range(STREAMS):
        numbers += (tl.sum(tl.sum(tl.where(stream == k, weights, 0.0), axis=1), axis=0),)  # type: ignore[assignment]
    return numbers


@triton.jit
def stream_words(streams, row, lane, CHUNKS: tl.constexpr):
    """Words of a token's streams, chunk after chunk: a tuple of STREAMS CHUNKS tensors. They leave the cache to streams that have not been
    read yet."""
    words = ()
    for chunk in tl.static_range(CHUNKS):
        for stream in tl.static_range(STREAMS):
            place = streams + ((row * STREAMS + stream) * CHUNKS + chunk) * CHUNK + lane
            words += (tl.load(place, eviction_policy="evict_first"),)  # type: ignore[assignment]
    return words


@triton.jit
def collapsed_words(words, pre, CHUNKS: tl.constexpr):
    """Words of the collapse: a tuple of CHUNKS tensors."""
    reach = reach_of_collapse(pre)
    found = ()
    for chunk in tl.static_range(CHUNKS):
        one = tl.inline_asm_elementwise(
            ONE, ONE_FORM,
            [words[4 * chunk], words[4 * chunk + 1], words[4 * chunk + 2], words[4 * chunk + 3], pre[0], pre[1], pre[2], pre[3], reach],
            dtype=tl.int32, is_pure=True, pack=COLLAPSED_AT_ONCE,
        )  # fmt: skip
        found += (one,)  # type: ignore[assignment]
    return found


@triton.jit
def row_words(rows, row, lane, CHUNKS: tl.constexpr):
    """Words of a row: a tuple of CHUNKS tensors."""
    words = ()
    for chunk in tl.static_range(CHUNKS):
        words += (tl.load(rows + (row * CHUNKS + chunk) * CHUNK + lane),)  # type: ignore[assignment]
    return words


@triton.jit
def _codes(words, codes, scales, row, group, place, pitch, least, LAYOUT: tl.constexpr):
    """E4M3 codes of a chunk's words, two a 16-bit word, and the scales of its groups; `place` points to codes."""
    grid = tl.reshape(words, (CHUNK // GROUP, GROUP))
    magnitude = tl.maximum((grid & 0x7FFF) << 16, grid & 0x7FFF0000)
    amax = tl.max(magnitude, axis=1, keep_dims=True)
    byte = tl.maximum((amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32), least)
    stored = tl.where(amax >= INFINITY, 255, byte)
    inverse = tl.where(stored == 255, NAN, (254 - stored) << 23).to(tl.float32, bitcast=True)
    even, odd = unpack_pairs(grid)
    word = tl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [even * inverse, odd * inverse], dtype=tl.int16, is_pure=True, pack=1
    )
    tl.store(codes + place, tl.reshape(word, (CHUNK,)))
    tl.store(scales + scale_place(row, group, pitch, LAYOUT), tl.reshape(stored, (CHUNK // GROUP,)).to(tl.uint8))


@triton.jit
def write_row(
    words, weight, result, scales, row, lane, group, pitch, least, rms_eps,
    CHUNKS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """A collapsed row, normalised: as words, or with a layout as codes and scales. `group` numbers the groups of a chunk."""
    first, second = unpack_pairs(words[0])
    total = first.to(tl.float64) * first.to(tl.float64) + second.to(tl.float64) * second.to(tl.float64)
    for chunk in tl.static_range(1, CHUNKS):
        first, second = unpack_pairs(words[chunk])
        total += first.to(tl.float64) * first.to(tl.float64) + second.to(tl.float64) * second.to(tl.float64)
    mean = tl.sum(total, axis=0) / (CHUNKS * CHUNK * 2) + tl.full([], rms_eps, tl.float64)
    factor = root(mean, True)
    narrow = factor.to(tl.float32)
    error = tl.where(narrow > 7.52316384526264e-37, 7.174648137343064e-43 + narrow * 7.174648137343064e-43, float("inf"))  # 2^-120, 2^-140
    for chunk in tl.static_range(CHUNKS):
        gain = tl.load(weight + (chunk * CHUNK + lane))
        found = tl.inline_asm_elementwise(
            SCALED, SCALED_FORM, [words[chunk], gain, narrow, factor, error], dtype=tl.int32, is_pure=True, pack=1
        )
        place = (row * CHUNKS + chunk) * CHUNK + lane
        if LAYOUT == "":
            tl.store(result + place, found)
        else:
            _codes(found, result, scales, row, chunk * (CHUNK // GROUP) + group, place, pitch, least, LAYOUT)


@triton.jit(do_not_specialize=["tokens", "mixing", "pitch"])
def finish_rows(
    rows,  # words of the new streams, or with a carried pre of their collapse
    parts,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    weight,  # words
    result,  # words, or two codes each
    scales,
    tokens,
    mixing,  # programs that make mixes
    pitch,
    least,
    norm_eps,
    rms_eps,
    eps,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_TILE: tl.constexpr,  # the next power of two
    CARRIED: tl.constexpr,
    LAYOUT: tl.constexpr,  # "" for bf16
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,  # tokens whose mix a program makes
):
    """Everything after the statistics; rows behind the last token are pads of the scales."""
    K: tl.constexpr = STREAMS * CHUNKS * CHUNK * 2
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    group = tl.arange(0, CHUNK // GROUP)
    if program < mixing:
        write_mix(
            parts, squares, scale, base, pre, post, comb, program, tokens, norm_eps, eps, K, SPLITS, ITERATIONS, ROWS, CARRIED
        )  # fmt: skip
    elif program - mixing >= tokens:
        if LAYOUT != "":
            for chunk in tl.static_range(CHUNKS):
                place = scale_place((program - mixing).to(tl.int64), chunk * (CHUNK // GROUP) + group, pitch, LAYOUT)
                tl.store(scales + place, tl.zeros([CHUNK // GROUP], tl.uint8))
    else:
        row = (tokens - 1 - (program - mixing)).to(tl.int64)
        if CARRIED:
            words = row_words(rows, row, lane, CHUNKS)
        else:
            given = stream_words(rows, row, lane, CHUNKS)
            stream = tl.arange(0, STREAMS)[None, :]
            split = tl.arange(0, SPLITS_TILE)[:, None]
            weights = pre_of(parts, squares, scale, base, row, split, stream, tokens, norm_eps, eps, K, SPLITS)
            tl.store(pre + row * STREAMS + stream, weights)
            words = collapsed_words(given, scalars(weights, stream), CHUNKS)
        write_row(words, weight, result, scales, row, lane, group, pitch, least, rms_eps, CHUNKS, LAYOUT)
