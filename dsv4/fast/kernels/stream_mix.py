"""The mix of residual streams, and what is made with it: pieces of kernels, and the launches that consist of them.

`finish_tile` has programs of two kinds. The first ones make the mix of ROWS tokens each: they add the splits of the statistics, and do
Sinkhorn for all of their tokens at once, a latency of its own. Each of the others takes one row of the collapse, norm and quantisation;
where the collapse wants the new weights it works them out by itself, which is little, and so waits for nobody. Rows behind the last token
are pads of the scales.

Sums over splits, sigmoids and the first comb are evaluated in fp64 and rounded to fp32 once, as are collapse and norm. Sinkhorn's further
steps are fp32: sums in ascending order, correctly rounded quotients.

`finish_tile` is left to contract products and sums. Every product that is added to something is exact in fp64: of two fp32 numbers (48
bits: a mix and its scale), of an fp32 and a bf16 number (32: the terms of a collapse), of two bf16 numbers (squares). So nothing changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import encode_e4m3, group_amax, scale_place, scales_and_quotients
from dsv4.fast.kernels.rows import normalise_pairs, pack_pairs, to_bf16, unpack_pairs


@triton.jit
def split_total(parts, place, live, distance, SPLITS: tl.constexpr):
    """fp64 sums over splits that lie `distance` apart, first split first."""
    total = tl.load(parts + place, mask=live, other=0.0).to(tl.float64)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * distance.to(tl.int64) + place, mask=live, other=0.0).to(tl.float64)
    return total


@triton.jit
def inverse_root(total, K: tl.constexpr, eps):
    """1 / sqrt(total / K + eps), rounded to fp32: in fp64."""
    return (1.0 / tl.sqrt(total / K + tl.full([], eps, tl.float64))).to(tl.float32).to(tl.float64)


@triton.jit
def _mixes(parts, factor, row, index, live, tokens, M: tl.constexpr, SPLITS: tl.constexpr):
    """fp64 of fp32 mixes `index` of rows, from splits or, with none, as they are given."""
    place = row * M + index
    if SPLITS == 0:
        mix = tl.load(parts + place, mask=live, other=0.0).to(tl.float64)
    else:
        mix = (split_total(parts, place, live, tokens.to(tl.int64) * M, SPLITS) * factor).to(tl.float32).to(tl.float64)
    return mix


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _ascending(x, index, AXIS: tl.constexpr, C: tl.constexpr):
    """The sum over an axis of C, first term first; `index` numbers the terms. Adding zeros to one term takes it out."""
    total = tl.sum(tl.where(index == 0, x, 0.0), axis=AXIS, keep_dims=True)
    for term in tl.static_range(1, C):
        total += tl.sum(tl.where(index == term, x, 0.0), axis=AXIS, keep_dims=True)
    return total


@triton.jit
def _normalised(comb, index, eps, AXIS: tl.constexpr, C: tl.constexpr):
    total = _ascending(comb, index, AXIS, C) + eps
    return tl.div_rn(comb, tl.broadcast_to(total, comb.shape))


@triton.jit
def _sinkhorn(logits, eps, ITERATIONS: tl.constexpr, C: tl.constexpr):
    """fp32 [ROWS, C, C] of fp32 logits."""
    old, new = tl.arange(0, C)[None, :, None], tl.arange(0, C)[None, None, :]
    wide = logits.to(tl.float64)
    powers = tl.exp(wide - tl.max(wide, axis=2, keep_dims=True))
    comb = (powers / _ascending(powers, new, 2, C) + tl.full([], eps, tl.float64)).to(tl.float32)
    comb = _normalised(comb, old, eps, 1, C)
    for _ in range(ITERATIONS - 1):
        comb = _normalised(comb, new, eps, 2, C)
        comb = _normalised(comb, old, eps, 1, C)
    return comb


@triton.jit
def _write_mix(
    parts,
    squares,
    scale,
    base,
    pre,
    post,
    comb,
    program,
    tokens,
    norm_eps,
    eps,
    post_multiplier,
    K: tl.constexpr,
    C: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
    WITH_PRE: tl.constexpr,
):
    """pre (if asked), post and comb of ROWS tokens."""
    M: tl.constexpr = C * (2 + C)
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    factor = tl.zeros([ROWS], tl.float64)
    if SPLITS > 0:
        factor = inverse_root(split_total(squares, row, row < tokens, tokens, SPLITS), K, norm_eps)
    flat, live = row[:, None], (row < tokens)[:, None]
    stream = tl.arange(0, C)[None, :]
    if WITH_PRE:
        weight = _pre(parts, factor[:, None], scale, base, flat, stream, live, tokens, eps, M, SPLITS)
        tl.store(pre + flat * C + stream, weight, mask=live)
    logit = _mixes(parts, factor[:, None], flat, C + stream, live, tokens, M, SPLITS) * tl.load(scale + 1).to(tl.float64)
    back = tl.full([], post_multiplier, tl.float64) * _sigmoid(logit + tl.load(base + C + stream).to(tl.float64))
    tl.store(post + flat * C + stream, back.to(tl.float32), mask=live)
    entry = tl.arange(0, C * C)[None, :]
    logit = _mixes(parts, factor[:, None], flat, 2 * C + entry, live, tokens, M, SPLITS) * tl.load(scale + 2).to(tl.float64)
    logits = (logit + tl.load(base + 2 * C + entry).to(tl.float64)).to(tl.float32)
    # The entries of a token lie in one warp, and stay there.
    mixed = _sinkhorn(tl.reshape(logits, (ROWS, C, C)), eps, ITERATIONS, C)
    tl.store(comb + flat * (C * C) + entry, tl.reshape(mixed, (ROWS, C * C)), mask=live)


@triton.jit
def _pre(parts, factor, scale, base, row, stream, live, tokens, eps, M: tl.constexpr, SPLITS: tl.constexpr):
    """fp32 collapse weights of rows."""
    logit = _mixes(parts, factor, row, stream, live, tokens, M, SPLITS) * tl.load(scale).to(tl.float64)
    return (_sigmoid(logit + tl.load(base + stream).to(tl.float64)) + tl.full([], eps, tl.float64)).to(tl.float32)


@triton.jit
def _collapsed(streams, weights, stream, row, pair, here, C: tl.constexpr, PAIRS: tl.constexpr):
    """A row of the collapse, even and odd: bf16 numbers as fp32, 0 behind its end. `weights` fp32 [1, C]."""
    for k in tl.static_range(C):
        weight = tl.sum(tl.sum(tl.where(stream == k, weights, 0.0), axis=1), axis=0).to(tl.float64)
        even, odd = unpack_pairs(tl.load(streams + (row * C + k) * PAIRS + pair, mask=here, other=0))
        if k == 0:
            first, second = weight * even.to(tl.float64), weight * odd.to(tl.float64)
        else:
            first += weight * even.to(tl.float64)
            second += weight * odd.to(tl.float64)
    return to_bf16(tl.where(here, first, 0.0)), to_bf16(tl.where(here, second, 0.0))


@triton.jit
def _write_codes(
    even, odd, codes, scales, row, scale_groups, pitch, least,
    PAIRS: tl.constexpr, TILE: tl.constexpr, LAYOUT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """E4M3 codes of a row, two a 16-bit word, and its scales; zero scales in groups that are pads."""
    GROUPS: tl.constexpr = TILE // 16
    low, high = tl.reshape(even, (1, GROUPS, 16)), tl.reshape(odd, (1, GROUPS, 16))
    amax = tl.maximum(group_amax(low, NATIVE), group_amax(high, NATIVE))
    stored, _, first = scales_and_quotients(low, amax, least, 0.0, "fp8", False, False, False, True, NATIVE)
    _, _, second = scales_and_quotients(high, amax, least, 0.0, "fp8", False, False, False, True, NATIVE)
    word = encode_e4m3(first, NATIVE).to(tl.int32) | (encode_e4m3(second, NATIVE).to(tl.int32) << 8)
    group = tl.arange(0, GROUPS)[None, :, None]
    pair = group * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(codes + row * PAIRS + pair, word.to(tl.int16), mask=pair < PAIRS)
    kept = tl.where(group * 16 < PAIRS, stored, 0).to(tl.uint8)
    tl.store(scales + scale_place(row, group, pitch, LAYOUT), kept, mask=group < scale_groups)


@triton.jit(do_not_specialize=["tokens"])
def mix_tile(
    parts, squares, scale, base, pre, post, comb, tokens, norm_eps, eps, post_multiplier,
    K: tl.constexpr, C: tl.constexpr, SPLITS: tl.constexpr, ITERATIONS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The mix of ROWS tokens."""
    _write_mix(
        parts, squares, scale, base, pre, post, comb, tl.program_id(0), tokens, norm_eps, eps, post_multiplier, K, C, SPLITS, ITERATIONS,
        ROWS, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "mixing", "pitch"])
def finish_tile(
    streams,  # words of two bf16
    parts,
    squares,
    scale,
    base,
    given,  # fp32 [tokens, C]: collapse weights
    pre,
    post,
    comb,
    weight,  # words
    result,  # words, or two codes each
    scales,
    tokens,
    mixing,  # programs of the first kind
    scale_groups,
    pitch,
    least,
    norm_eps,
    rms_eps,
    eps,
    C: tl.constexpr,
    PAIRS: tl.constexpr,  # of a row
    TILE: tl.constexpr,  # the next power of two
    SPLITS: tl.constexpr,
    MIXING: tl.constexpr,
    GIVEN: tl.constexpr,
    NORM: tl.constexpr,
    LAYOUT: tl.constexpr,  # "" for bf16
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Everything after the statistics."""
    K: tl.constexpr = C * PAIRS * 2
    M: tl.constexpr = C * (2 + C) if MIXING else C
    program = tl.program_id(0)
    if program < mixing:
        if MIXING:
            _write_mix(
                parts, squares, scale, base, pre, post, comb, program, tokens, norm_eps, eps, 2.0, K, C, SPLITS, ITERATIONS, ROWS, GIVEN
            )
    elif program - mixing >= tokens:
        if LAYOUT != "":
            group = tl.arange(0, TILE // 16)
            place = scale_place((program - mixing).to(tl.int64), group, pitch, LAYOUT)
            tl.store(scales + place, tl.zeros([TILE // 16], tl.uint8), mask=group < scale_groups)
    else:
        row = (program - mixing).to(tl.int64)
        stream = tl.arange(0, C)[None, :]
        if GIVEN:
            weights = tl.load(given + row * C + stream)
        else:
            factor = inverse_root(split_total(squares, row, row < tokens, tokens, SPLITS), K, norm_eps)
            weights = _pre(parts, factor, scale, base, row, stream, stream < C, tokens, eps, M, SPLITS)
            if MIXING:
                tl.store(pre + row * C + stream, weights)
        pair = tl.arange(0, TILE)[None, :]
        here = pair < PAIRS
        even, odd = _collapsed(streams, weights, stream, row, pair, here, C, PAIRS)
        if NORM:
            gain_even, gain_odd = unpack_pairs(tl.load(weight + pair, mask=here, other=0))
            even, odd = normalise_pairs(even, odd, gain_even, gain_odd, PAIRS * 2, rms_eps, True)
        if LAYOUT == "":
            tl.store(result + row * PAIRS + pair, pack_pairs(even, odd), mask=here)
        else:
            _write_codes(even, odd, result, scales, row, scale_groups, pitch, least, PAIRS, TILE, LAYOUT, NATIVE)
