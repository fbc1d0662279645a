"""Scales of both sides of a product as its roles on SM90 read them (`linear_hopper_roles`): fp32, NaN for byte 255, 2^-127 for byte 0.

The tokens' scales become lines [groups, tokens]; those of the weight, for each tile of 128 columns and each step of 128 of k, a line of 32
numbers: entry g * blocks + b is group g's scale of the b-th block of columns, entry 16 is 1 where the scales of a block's columns differ,
the others are 0. Where they differ, each column's are written too. Both in one launch, an element a thread.

A product of two scales is exact and finite where those of the weight lie within 2^-22 and 2^22 and those of the tokens within 2^-104 and
2^100, or are 0 or NaN. Others are noted: the caller's product is not to be used then.

Kinds of scales: `bytes` and `numbers` have a row and a group along each axis (of tokens, or of blocks of columns); `packed` and `swizzled`
are words of four groups, a row each (spec A 8.1, 8.3).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.fast.kernels.codec_bits import NAN

ROWS = 128  # of a program that makes lines of tokens; columns of a tile
GROUPS = 32  # groups of such a program
STEPS = 4  # steps of a program that makes lines of the weight
LINE: tl.constexpr = tl.constexpr(32)
UNEVEN: tl.constexpr = tl.constexpr(16)
LEAST_OF_WEIGHT: tl.constexpr = tl.constexpr(2.0**-22)
MOST_OF_WEIGHT: tl.constexpr = tl.constexpr(2.0**22)
LEAST_OF_TOKEN: tl.constexpr = tl.constexpr(2.0**-104)
MOST_OF_TOKEN: tl.constexpr = tl.constexpr(2.0**100)


@triton.jit
def _power(byte):
    """fp32 of UE8M0 bytes (int32)."""
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, NAN, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _word(scales, row, word, s_row, s_group, mask, KIND: tl.constexpr):
    """Words of rows."""
    inside = row * s_row if KIND == "packed" else row // 128 * s_row + (row % 32 * 4 + row % 128 // 32)
    return tl.load(scales + (word * s_group + inside), mask=mask, other=0)


@triton.jit
def _scale(scales, row, group, s_row, s_group, mask, KIND: tl.constexpr):
    """fp32 scales of rows and groups, 0 outside the mask. Row and group are int64."""
    if KIND == "numbers":
        value = tl.load(scales + (row * s_row + group * s_group), mask=mask, other=0.0)
    elif KIND == "bytes":
        value = _power(tl.load(scales + (row * s_row + group * s_group), mask=mask, other=0).to(tl.int32))
    else:
        word = _word(scales, row, group // 4, s_row, s_group, mask, KIND)
        value = _power((word >> (group % 4 * 8).to(tl.int32)) & 255)
    return tl.where(mask, value, 0.0)


@triton.jit
def _note(odd, scales, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Set `odd` if a scale is outside; NaN and 0 are not."""
    size = tl.abs(scales)
    wild = (size > MOST) | ((size < LEAST) & (size != 0.0))
    if tl.max(tl.max(wild.to(tl.int32), 1), 0) > 0:
        tl.atomic_or(odd, 1)


@triton.jit
def _token_lines(
    program, x, x_row, x_group, lines, lines_group, tokens, groups, odd, KIND: tl.constexpr, R: tl.constexpr, G: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(groups, G)
    group = (program % across * G + tl.arange(0, G)).to(tl.int64)[:, None]
    row = (program // across * R + tl.arange(0, R)).to(tl.int64)[None, :]
    inside = (group < groups) & (row < tokens)
    value = _scale(x, row, group, x_row, x_group, inside, KIND)
    _note(odd, value, LEAST_OF_TOKEN, MOST_OF_TOKEN)
    tl.store(lines + (group * lines_group + row), value, mask=inside)


@triton.jit
def _uneven(w, w_row, w_group, tile, step, n, groups, KIND: tl.constexpr, R: tl.constexpr):
    """1 for steps where the scales of 32 neighbouring columns differ, else 0: int32 [steps]."""
    row = tile * R + tl.arange(0, R).to(tl.int64)[None, :]
    inside = (row < n) & (step * 4 < groups)[:, None]
    word = _word(w, row, step[:, None], w_row, w_group, inside, KIND)
    first = _word(w, row // 32 * 32, step[:, None], w_row, w_group, inside, KIND)
    left = tl.maximum(tl.minimum(groups - step * 4, 4), 0).to(tl.int32)
    kept = tl.where(left == 4, -1, (1 << (left % 4 * 8)) - 1)  # bytes that belong to groups
    return tl.max((((word ^ first) & kept[:, None]) != 0).to(tl.int32), 1)


@triton.jit
def _weight_lines(
    program, w, w_row, w_group, lines, columns, n, groups, steps, odd, GROUP: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = R // GROUP
    across = tl.cdiv(steps, S)
    tile = (program // across).to(tl.int64)
    step = (program % across * S + tl.arange(0, S)).to(tl.int64)
    entry = tl.arange(0, LINE)[None, :]
    group = step[:, None] * BLOCKS + entry // BLOCKS
    block = tile * BLOCKS + entry % BLOCKS
    row = block if KIND == "bytes" or KIND == "numbers" else block * 32
    inside = (entry < BLOCKS * BLOCKS) & (group < groups) & (block * GROUP < n)
    value = _scale(w, row, group, w_row, w_group, inside, KIND)
    _note(odd, value, LEAST_OF_WEIGHT, MOST_OF_WEIGHT)
    if KIND == "packed" or KIND == "swizzled":
        uneven = _uneven(w, w_row, w_group, tile, step, n, groups, KIND, R)
        value = tl.where(entry == UNEVEN, uneven[:, None].to(tl.float32), value)
        column = tl.arange(0, R)[None, :]
        wanted = ((uneven != 0) & (step < steps))[:, None]
        known = wanted & (tile * R + column < n)
        for inner in tl.static_range(4):
            group = step[:, None] * 4 + inner
            scales = _scale(w, tile * R + column, group, w_row, w_group, known & (group < groups), KIND)
            _note(odd, scales, LEAST_OF_WEIGHT, MOST_OF_WEIGHT)
            tl.store(columns + (((tile * steps + step[:, None]) * 4 + inner) * R + column), scales, mask=wanted)
    tl.store(lines + ((tile * steps + step[:, None]) * LINE + entry), value, mask=(step < steps)[:, None])


@triton.jit(
    do_not_specialize=["x_row", "x_group", "x_lines_group", "tokens", "x_programs", "w_row", "w_group", "n", "groups", "steps"]
)  # fmt: skip
def lines_kernel(
    x, x_row, x_group, x_lines, x_lines_group, tokens, x_programs, w, w_row, w_group, w_lines, w_columns, n, groups, steps,
    odd, GROUP: tl.constexpr, X_KIND: tl.constexpr, W_KIND: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Lines of the tokens by the first `x_programs` programs, lines of the weight by the others. Strides and sizes: see the modules."""
    program = tl.program_id(0)
    if program < x_programs:
        _token_lines(program, x, x_row, x_group, x_lines, x_lines_group, tokens, groups, odd, X_KIND, ROWS, GROUPS)
    else:
        _weight_lines(program - x_programs, w, w_row, w_group, w_lines, w_columns, n, groups, steps, odd, GROUP, W_KIND, ROWS, STEPS)
