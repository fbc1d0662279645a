"""Sums of scaled products of codes inside Triton kernels: what a program of `linear` does.

    result[t, n] = sum over groups of s_tg s_ng (sum over k in the group of a_tk w_nk)

Promotion. The product of a group starts at zero in the tensor core and is added to fp32 registers with its scales: Hopper's tensor cores
keep 14 bits of a sum of FP8 products (Triton's `max_num_imprecise_acc` is about such sums, but knows no scales).

Scales. The fast sum multiplies two scales, and the product of a group with that, in one fused operation. It takes one scale for the rows
of the weight that share it, so that few products of scales are needed. That is right unless a scale of the weight is below 2^-22 or, where
either side has fp32 scales, one of x below 2^-104 (the product of the two could lose bits), or the product overflows, or rows do not share
a scale that should.
All of it shows in a flag or in a result that is not finite. Then the careful sum starts again, for the whole tile: it splits each scale
into two factors, p of half its exponent and r = scale / p, and adds (dot p p') (r r'), where nothing overflows that should not, and nothing
is lost that counts: powers are exact, and where dot p p' is below 2^-126 the result is below 2^-200. Where the fast sum is right, both
have the same bits, for both round a product of scales and then once more. So the neighbours of a row change none of its bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import INFINITY, MAGNITUDE, decode_e4m3, decode_e8m0

SPAN: tl.constexpr = tl.constexpr(128)  # of k, in one turn of the fast loop: a word of four scales of groups of 32, or one group
LEAST_WEIGHT_SCALE: tl.constexpr = tl.constexpr(2.0**-22)
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-104)
LOW_BYTES: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # 0x80808080: where `below` says what it finds


@triton.jit
def appended(items, item):
    """A tuple with one item more, which is no tuple: Triton takes (a, b) + c and a + (b, c) for the same call."""
    return items + (item,)  # noqa: RUF005


@triton.jit
def operand(codes, column, k, EVEN: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr):
    """Codes as a product takes them: E4M3; below SM89 fp16 numbers 2^-8 of theirs, which has them all; in the interpreter fp32."""
    if NATIVE:
        numbers = codes.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        tile = tl.load(numbers) if EVEN else tl.load(numbers, mask=column < k, other=0.0)
    else:
        byte = tl.load(codes, mask=column < k, other=0)
        if COMPILED:
            wide = byte.to(tl.int16)
            magnitude = wide & 0x7F
            bits = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((wide & 0x80) << 8)
            tile = bits.to(tl.float16, bitcast=True)
        else:
            tile = decode_e4m3(byte, False)
    return tile


@triton.jit
def multiply(x, w, SWAPPED: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr):
    """fp32 [tokens, rows] of operands [tokens, k] and [rows, k]; SWAPPED: [rows, tokens]."""
    dot = tl.dot(w, x.T, input_precision="ieee") if SWAPPED else tl.dot(x, w.T, input_precision="ieee")
    if COMPILED and not NATIVE:
        dot *= 65536.0
    return dot


@triton.jit
def below(words):
    """Words whose LOW_BYTES say which E8M0 bytes are below 105, 2^-22."""
    return ~(((words & 0x7F7F7F7F) + 0x17171717) | words)


@triton.jit
def read_scales(scales, step, group, groups, FORM: tl.constexpr, EVEN: tl.constexpr):
    """fp32 scales of a group, 0 past the last, from bytes or numbers `step` apart, or from bytes of words `step` apart."""
    if FORM == "words":
        word = tl.load(scales + (group // 4).to(tl.int64) * step)
        value = decode_e8m0((word >> (group % 4 * 8)) & 255)
    else:
        value = tl.load(scales + (group if EVEN else tl.minimum(group, groups - 1)).to(tl.int64) * step)
        if FORM == "bytes":
            value = decode_e8m0(value.to(tl.int32))
    return value if EVEN else tl.where(group < groups, value, 0.0)


@triton.jit
def scales_of_word(words, PLACE: tl.constexpr, group, groups, EVEN: tl.constexpr, ZERO: tl.constexpr):
    """fp32 scales of the bytes at PLACE of words; byte 255 is infinite, and byte 0 is 0 if not ZERO."""
    bits = (words << (23 - 8 * PLACE) if PLACE < 3 else words >> 1) & INFINITY
    if ZERO:
        bits = tl.maximum(bits, 0x400000)
    value = bits.to(tl.float32, bitcast=True)
    return value if EVEN else tl.where(group < groups, value, 0.0)


@triton.jit
def fast_step(dot, x_scale, w_scale, sums, SWAPPED: tl.constexpr):
    """sums + dot scales; each scale of the weight counts for as many neighbouring rows as there are more rows than scales."""
    ROWS: tl.constexpr = dot.shape[0] if SWAPPED else dot.shape[1]
    TOKENS: tl.constexpr = dot.shape[1] if SWAPPED else dot.shape[0]
    SCALES: tl.constexpr = w_scale.shape[0]
    if SWAPPED:
        scale = w_scale[:, None, None] * x_scale[None, None, :]
        scale = tl.broadcast_to(scale, (SCALES, ROWS // SCALES, TOKENS)).reshape(ROWS, TOKENS)
    else:
        scale = x_scale[:, None, None] * w_scale[None, :, None]
        scale = tl.broadcast_to(scale, (TOKENS, SCALES, ROWS // SCALES)).reshape(TOKENS, ROWS)
    return tl.fma(dot, scale, sums)


@triton.jit
def halves(scale, UP: tl.constexpr):
    """A power of two with half the exponent of a scale, rounded up or down, and the rest of the scale."""
    exponent = (((scale.to(tl.int32, bitcast=True) >> 23) & 255) - (126 if UP else 127)) >> 1
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return power, scale * ((127 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def careful_step(dot, x_scale, w_scale, sums, SWAPPED: tl.constexpr):
    """sums + dot scales, a scale for each row."""
    x_power, x_rest = halves(x_scale, False)
    w_power, w_rest = halves(w_scale, True)
    if SWAPPED:
        power, rest = w_power[:, None] * x_power[None, :], w_rest[:, None] * x_rest[None, :]
    else:
        power, rest = x_power[:, None] * w_power[None, :], x_rest[:, None] * w_rest[None, :]
    return tl.fma(dot * power, rest, sums)


@triton.jit
def zeros(PIECES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, SWAPPED: tl.constexpr):
    """A tuple of fp32 sums."""
    sums = ()
    for _ in tl.static_range(PIECES):
        sums = appended(sums, tl.zeros([ROWS, TOKENS] if SWAPPED else [TOKENS, ROWS], tl.float32))
    return sums


@triton.jit
def no_flags(w_scales, ROWS: tl.constexpr, CHECKED: tl.constexpr):
    """Flags of each piece, down: of each row if CHECKED, else of each scale."""
    flags = ()
    for piece in tl.static_range(len(w_scales)):
        flags = appended(flags, tl.zeros([ROWS if CHECKED else w_scales[piece].shape[0]], tl.int32))
    return flags


@triton.jit
def carried(totals, sums):
    """Totals with sums added, and zeros."""
    added = ()
    cleared = ()
    for piece in tl.static_range(len(sums)):
        added = appended(added, totals[piece] + sums[piece])
        cleared = appended(cleared, tl.zeros_like(sums[piece]))
    return added, cleared


@triton.jit
def word_of(words, step, turn, groups, EVEN: tl.constexpr):
    """Words of a turn; the bytes of groups past the last are ones."""
    word = tl.load(words + turn * step)
    if not EVEN:
        there = groups - turn * 4
        word = tl.where(there < 4, word | (-1 << (there * 8)), word)
    return word


@triton.jit
def read_words(w_scales, own, others, flags, step, turn, groups, FORM: tl.constexpr, CHECKED: tl.constexpr, EVEN: tl.constexpr):
    """The words of a turn of each piece, and `flags` of those that are not for fast sums.

    own, others: pointers to the word of each row, and of the row whose scale stands for it; read if CHECKED.
    """
    words = ()
    raised = ()
    for piece in tl.static_range(len(w_scales)):
        word = word_of(w_scales[piece], step, turn, groups, EVEN) if FORM == "words" else 0
        flag = flags[piece]
        if CHECKED:
            other = word_of(others[piece], step, turn, groups, EVEN)
            flag = flag | below(other) | tl.where(word_of(own[piece], step, turn, groups, EVEN) == other, 0, LOW_BYTES)
        elif FORM == "words":
            flag = flag | below(word)
        words = appended(words, word)
        raised = appended(raised, flag)
    return words, raised


@triton.jit
def fast_turn(
    sums, totals, flags, x_flag, turn, x, x_scales, x_step, w, w_scales, w_step, own, others, between, k,
    GROUP: tl.constexpr, X_FORM: tl.constexpr, W_FORM: tl.constexpr, SWAPPED: tl.constexpr, CHECKED: tl.constexpr, EVEN: tl.constexpr,
    PARTED: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """SPAN of k added to `sums` and `flags` of each piece and to `x_flag`; at the end of a part `sums` go to `totals`."""
    PER: tl.constexpr = SPAN // GROUP
    groups = tl.cdiv(k, GROUP)
    x_words = tl.load(x_scales + turn * x_step) if X_FORM == "words" else 0
    words, flags = read_words(w_scales, own, others, flags, w_step, turn, groups, W_FORM, CHECKED, EVEN)
    for place in tl.static_range(PER):
        group = turn * PER + place
        column = group * GROUP + tl.arange(0, GROUP)[None, :]
        a = operand(x + group * GROUP, column, k, EVEN, NATIVE, COMPILED)
        if X_FORM == "words":
            x_scale = scales_of_word(x_words, place, group, groups, EVEN, True)
        else:
            x_scale = read_scales(x_scales, x_step, group, groups, X_FORM, EVEN)
        if X_FORM == "fp32" or W_FORM == "fp32":
            x_flag = x_flag | tl.where((tl.abs(x_scale) < LEAST_SCALE) & (x_scale != 0.0), LOW_BYTES, 0)
        added = ()
        raised = ()
        for piece in tl.static_range(len(w)):
            b = operand(w[piece] + group * GROUP, column, k, EVEN, NATIVE, COMPILED)
            flag = flags[piece]
            if W_FORM == "words":
                w_scale = scales_of_word(words[piece], place, group, groups, EVEN, False)
            else:
                w_scale = read_scales(w_scales[piece], w_step, group, groups, W_FORM, EVEN)
                flag = flag | tl.where((tl.abs(w_scale) < LEAST_WEIGHT_SCALE) & (w_scale != 0.0), LOW_BYTES, 0)
            dot = multiply(a, b, SWAPPED, NATIVE, COMPILED)
            added = appended(added, fast_step(dot, x_scale, w_scale, sums[piece], SWAPPED))
            raised = appended(raised, flag)
        sums = added
        flags = raised
    if PARTED:  # noqa: SIM102
        if (turn + 1) % between == 0:
            if COMPILED:  # what must not be skipped keeps a branch, where selects would run in each turn
                tl.inline_asm_elementwise("// $0 $1", "=r,r", [turn], dtype=tl.int32, is_pure=False, pack=1)
            totals, sums = carried(totals, sums)
    return sums, totals, flags, x_flag


@triton.jit
def fast_sums(
    x, x_scales, x_step, w, w_scales, w_step, own, others, first, last, between, k,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, X_FORM: tl.constexpr, W_FORM: tl.constexpr, SWAPPED: tl.constexpr,
    CHECKED: tl.constexpr, EVEN: tl.constexpr, PARTED: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of each piece over turns `first` to `last` - 1, and above 0 if one may be wrong.

    x: pointers [TOKENS, GROUP] to codes; w: of each piece [ROWS, GROUP]. x_scales, w_scales: pointers to the first scales or words, of a
    piece as many as rows that do not share one. PARTED: each `between` turns are a sum of their own, added to those before it.
    """
    sums = zeros(len(w), TOKENS, ROWS, SWAPPED)
    totals = zeros(len(w) if PARTED else 0, TOKENS, ROWS, SWAPPED)
    flags = no_flags(w_scales, ROWS, CHECKED)
    x_flag = tl.zeros([TOKENS], tl.int32)
    if COMPILED:
        for turn in tl.range(first, last, num_stages=STAGES):
            sums, totals, flags, x_flag = fast_turn(
                sums, totals, flags, x_flag, turn, x, x_scales, x_step, w, w_scales, w_step, own, others, between, k,
                GROUP, X_FORM, W_FORM, SWAPPED, CHECKED, EVEN, PARTED, NATIVE, COMPILED,
            )  # fmt: skip
    else:  # the interpreter's range takes no tensors
        while first < last:
            sums, totals, flags, x_flag = fast_turn(
                sums, totals, flags, x_flag, first, x, x_scales, x_step, w, w_scales, w_step, own, others, between, k,
                GROUP, X_FORM, W_FORM, SWAPPED, CHECKED, EVEN, PARTED, NATIVE, COMPILED,
            )  # fmt: skip
            first += 1
    if PARTED:
        sums, _ = carried(totals, sums)
    return sums, suspicious(sums, flags, x_flag)


@triton.jit
def suspicious(sums, flags, x_flag):
    """Above 0 if a sum is not finite or a flag is up."""
    found = tl.max(((x_flag & LOW_BYTES) != 0).to(tl.int32), 0)
    for piece in tl.static_range(len(sums)):
        largest = tl.max(tl.max(sums[piece].to(tl.int32, bitcast=True) & MAGNITUDE, 1), 0)
        raised = tl.max(((flags[piece] & LOW_BYTES) != 0).to(tl.int32), 0)
        found = tl.maximum(found, tl.maximum(raised, (largest >= INFINITY).to(tl.int32)))
    return found


@triton.jit
def careful_turn(
    sums, totals, group, x, x_scales, x_step, w, w_scales, w_step, between, k,
    GROUP: tl.constexpr, X_FORM: tl.constexpr, W_FORM: tl.constexpr, SWAPPED: tl.constexpr, EVEN: tl.constexpr, PARTED: tl.constexpr,
    NATIVE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A group added to `sums`; at the end of a part they go to `totals`."""
    groups = tl.cdiv(k, GROUP)
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    a = operand(x + group * GROUP, column, k, EVEN, NATIVE, COMPILED)
    x_scale = read_scales(x_scales, x_step, group, groups, X_FORM, EVEN)
    added = ()
    for piece in tl.static_range(len(w)):
        dot = multiply(a, operand(w[piece] + group * GROUP, column, k, EVEN, NATIVE, COMPILED), SWAPPED, NATIVE, COMPILED)
        w_scale = read_scales(w_scales[piece], w_step, group, groups, W_FORM, EVEN)
        added = appended(added, careful_step(dot, x_scale, w_scale, sums[piece], SWAPPED))
    sums = added
    if PARTED:  # noqa: SIM102
        if (group + 1) % (between * (SPAN // GROUP)) == 0:
            totals, sums = carried(totals, sums)
    return sums, totals


@triton.jit
def careful_sums(
    x, x_scales, x_step, w, w_scales, w_step, first, last, between, k,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, X_FORM: tl.constexpr, W_FORM: tl.constexpr, SWAPPED: tl.constexpr,
    EVEN: tl.constexpr, PARTED: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`fast_sums` for any scales; w_scales: pointers of each row."""
    sums = zeros(len(w), TOKENS, ROWS, SWAPPED)
    totals = zeros(len(w) if PARTED else 0, TOKENS, ROWS, SWAPPED)
    group, past = first * (SPAN // GROUP), last * (SPAN // GROUP)
    if COMPILED:
        for one in tl.range(group, past, num_stages=STAGES):
            sums, totals = careful_turn(
                sums, totals, one, x, x_scales, x_step, w, w_scales, w_step, between, k,
                GROUP, X_FORM, W_FORM, SWAPPED, EVEN, PARTED, NATIVE, COMPILED,
            )  # fmt: skip
    else:
        while group < past:
            sums, totals = careful_turn(
                sums, totals, group, x, x_scales, x_step, w, w_scales, w_step, between, k,
                GROUP, X_FORM, W_FORM, SWAPPED, EVEN, PARTED, NATIVE, COMPILED,
            )  # fmt: skip
            group += 1
    if PARTED:
        sums, _ = carried(totals, sums)
    return sums
