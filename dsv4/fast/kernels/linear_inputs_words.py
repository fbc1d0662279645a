"""Words of two bf16 scaled and quantised: what the kernels of rows that make inputs of products share.

Words come four to a thread, which is a quarter of a group of 32 and a sixteenth of one of 128, and leave as words of two codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import encode_e4m3, scale_place, scales_and_quotients
from dsv4.fast.kernels.codec_pairs import amax_of_pairs
from dsv4.fast.kernels.rows import pack_pairs, scale_pairs, unpack_pairs

NUMBERS: tl.constexpr = tl.constexpr(8)  # of a thread, in four words
LEAST_FACTOR: tl.constexpr = tl.constexpr(2.0**-40)
LARGEST_FACTOR: tl.constexpr = tl.constexpr(2.0**40)
ABOVE: tl.constexpr = tl.constexpr(1 + 2.0**-22)
BELOW: tl.constexpr = tl.constexpr(-10 * 2.0**-24)


def _scaling() -> tl.constexpr:
    """The text of `scaled_words` for four words: operands are their results, words, even and odd weights, factor, ABOVE and BELOW of it."""
    near, exact, results = [], [], []
    for i in range(4):
        word, even, odd, factor, above, below = (f"${4 * operand + i}" for operand in range(1, 7))
        near.append(f"""
            shl.b32 low, {word}, 16;
            and.b32 high, {word}, 0xFFFF0000;
            mov.b32 x, low;
            mov.b32 y, high;
            mul.rn.f32 x, x, {even};
            mul.rn.f32 y, y, {odd};
            mul.rn.f32 p, x, {above};
            mul.rn.f32 q, y, {above};
            fma.rn.f32 x, x, {below}, p;
            fma.rn.f32 y, y, {below}, q;
            cvt.rn.bf16x2.f32 result{i}, q, p;
            cvt.rn.bf16x2.f32 low, y, x;
            xor.b32 high, low, result{i};
            or.b32 doubt, doubt, high;
            min.xorsign.abs.bf16x2 least, least, low;""")
        # prmt, where shl and and would do: ptxas must not keep the fp64 numbers of the sum of squares for this.
        exact.append(f"""
            prmt.b32 low, {word}, 0, 0x1044;
            prmt.b32 high, {word}, 0, 0x3244;
            mov.b32 x, low;
            mov.b32 y, high;
            cvt.f64.f32 d, x;
            cvt.f64.f32 e, y;
            mul.rn.f64 d, d, {factor};
            mul.rn.f64 e, e, {factor};
            cvt.f64.f32 f, {even};
            cvt.f64.f32 g, {odd};
            mul.rn.f64 d, d, f;
            mul.rn.f64 e, e, g;
            cvt.rn.f32.f64 x, d;
            cvt.rn.f32.f64 y, e;
            cvt.rn.bf16x2.f32 result{i}, y, x;""")
        results.append(f"""
            mov.b32 ${i}, result{i};""")
    return tl.constexpr(f"""{{
            .reg .pred sure;
            .reg .b32 low, high, doubt, least, result0, result1, result2, result3;
            .reg .f32 x, y, p, q;
            .reg .f64 d, e, f, g;
            mov.b32 doubt, 0;
            mov.b32 least, 0x7F807F80;{"".join(near)}
            and.b32 least, least, 0x7FFF7FFF;
            sub.u32 least, least, 0x17801780;
            and.b32 least, least, 0x80008000;
            or.b32 doubt, doubt, least;
            setp.eq.b32 sure, doubt, 0;
            @sure bra DONE;{"".join(exact)}
        DONE:{"".join(results)}
        }}""")


SCALING: tl.constexpr = _scaling()
SCALING_OPERANDS: tl.constexpr = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 4 + ["f"] * 8 + ["d"] * 4 + ["f"] * 8))
CODES: tl.constexpr = tl.constexpr("""{
            .reg .b16 first, second;
            cvt.rn.satfinite.e4m3x2.f32 first, $3, $1;
            cvt.rn.satfinite.e4m3x2.f32 second, $4, $2;
            mov.b32 $0, {first, second};
        }""")


@triton.jit
def scaled_words(words, even, odd, factor, NATIVE: tl.constexpr):
    """Words of the numbers times `factor`, times their weights, rounded to bf16 as `scale_pairs` rounds them.

    `words` [1, n], n a multiple of 512 over warps of 4; weights fp32 [1, n]; `factor` fp64 [1, 1].

    NATIVE: fp64 numbers take four times as long to convert as anything else here takes, so the products are first made in fp32. With
    u = 2^-24 and g = x w, which is off by at most u, p = g (1 + 4 u) factor and q = p - 10 u factor g have the exact number between them:
    p is at least (1 + u) of it and q at most (1 - u), if neither is a subnormal number. Rounding is monotone, so where both are the same
    bf16, it is the result. In one of 2^13 numbers they are not; a thread that has one evaluates its eight in fp64. So it does where a q
    is less than 2^-80, zero or infinite (then p - 10 u factor g is NaN), and all threads do where the factor is not within 2^40: between
    them g is no subnormal number.
    """
    if NATIVE:
        ordinary = (factor >= LEAST_FACTOR) & (factor <= LARGEST_FACTOR)
        above = tl.where(ordinary, factor * ABOVE, 1.0).to(tl.float32)
        below = tl.where(ordinary, factor * BELOW, float("nan")).to(tl.float32)
        operands = [words, even, odd, factor, above, below]
        result = tl.inline_asm_elementwise(SCALING, SCALING_OPERANDS, operands, dtype=tl.int32, is_pure=True, pack=4)
    else:
        first, second = unpack_pairs(words)
        first, second = scale_pairs(first, second, factor, even, odd, True)
        result = pack_pairs(first, second)
    return result


@triton.jit
def _amax(words, GROUPS: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """Bits of the largest magnitude of each group as fp32, [1, GROUPS, 1]; a NaN counts as larger than infinity."""
    if NATIVE:
        first, second = tl.split(words.reshape(1, GROUPS, GROUP // NUMBERS, 2, 2))
        a, c = tl.split(first)
        b, d = tl.split(second)
        largest = amax_of_pairs(a, b, c, d)
    else:
        largest = words.reshape(1, GROUPS, GROUP // 2)
    return tl.max(tl.maximum(largest & 0x7FFF, (largest >> 16) & 0x7FFF), axis=2, keep_dims=True) << 16


@triton.jit
def _code_words(even, odd, NATIVE: tl.constexpr):
    """int16 words of two E4M3 codes of fp32, the even one low."""
    if NATIVE:
        words = tl.inline_asm_elementwise(CODES, "=r,f,f,f,f", [even, odd], dtype=tl.int16, is_pure=True, pack=2)
    else:
        words = (encode_e4m3(even, False).to(tl.int32) | (encode_e4m3(odd, False).to(tl.int32) << 8)).to(tl.int16)
    return words


@triton.jit
def _each(x, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """A number of each group for each of its threads: from [1, GROUPS, 1] to a vector."""
    LANES: tl.constexpr = GROUP // NUMBERS
    return tl.broadcast_to(x, (1, GROUPS, LANES)).reshape(GROUPS * LANES)


@triton.jit
def quantised_words(words, least, GROUP: tl.constexpr, LAYOUT: tl.constexpr, ZEROES: tl.constexpr, NATIVE: tl.constexpr):
    """int16 words of the codes of words [ROWS, n], and a vector with the scale of each thread's group as the layout stores it."""
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = ROWS * COLUMNS * 2 // GROUP
    amax = _amax(words, GROUPS, GROUP, NATIVE)
    even, odd = unpack_pairs(words.reshape(1, GROUPS, GROUP // 2))
    stored, scale, first = scales_and_quotients(even, amax, least, 0.0, "fp8", False, False, ZEROES, True, NATIVE)
    _, _, second = scales_and_quotients(odd, amax, least, 0.0, "fp8", False, False, ZEROES, True, NATIVE)
    codes = _code_words(first, second, NATIVE).reshape(ROWS, COLUMNS)
    return codes, _each(scale if LAYOUT == "mn_major" else stored, GROUPS, GROUP)


@triton.jit
def lanes_of(COUNT: tl.constexpr):
    """The numbers of COUNT threads. Triton gives consecutive numbers of a vector to consecutive threads; with the hint, one to each."""
    return tl.multiple_of(tl.arange(0, COUNT), 1)


@triton.jit
def zero_scales(
    scales, row, group, stores, scale_groups, pitch, CHUNKS: tl.constexpr, STEP: tl.constexpr, LAYOUT: tl.constexpr
):  # fmt: skip
    """Zero the scales of pad rows: of groups `group`, and of those STEP, 2 STEP .. behind them."""
    for chunk in tl.static_range(CHUNKS):
        number = group + chunk * STEP
        place = scales + scale_place(row, number, pitch, LAYOUT)
        tl.store(place, tl.zeros(number.shape, scales.dtype.element_ty), mask=stores & (number < scale_groups))
