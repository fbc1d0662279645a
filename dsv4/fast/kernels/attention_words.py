"""Rows of packed pages as words in registers, and words decoded to bf16 into shared memory, by eight warps on SM90 (Gluon).

Words are int32. A step takes BLOCK rows, 16 words of a row to four neighbouring threads. A word of four E4M3 codes becomes two words of two
bf16, one of eight E2M1 codes four; a group's scale multiplies both halves of a word at once. All of it is exact: a code times its scale is
a bf16.

Source of the layouts: spec A 3.4.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.fast.kernels.attention_items import BLOCK, QUARTERS

WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0]))
PICKS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [8, 4], [8, 1], [1, 0])))
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [8, 1], [1, 0]))
KEY_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))

# Four E4M3 codes in $2 and a scale, twice, in $3. Conversions to fp16 and fp32 are exact and keep NaN; numbers with three bits of mantissa
# lie in the upper half of an fp32, which is their bf16.
E4M3_WORD = gl.constexpr(
    """{
    .reg .b32 a, b, w, x, y, z;
    .reg .b16 l, h, p, q, r, s;
    .reg .f32 e, f, g, i;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l;
    cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {p, q}, a;
    mov.b32 {r, s}, b;
    cvt.f32.f16 e, p;
    cvt.f32.f16 f, q;
    cvt.f32.f16 g, r;
    cvt.f32.f16 i, s;
    mov.b32 w, e;
    mov.b32 x, f;
    mov.b32 y, g;
    mov.b32 z, i;
    prmt.b32 a, w, x, 0x7632;
    prmt.b32 b, y, z, 0x7632;
    mul.bf16x2 $0, a, $3;
    mul.bf16x2 $1, b, $3;
    }"""
)
# The two E2M1 codes of the low byte of $1 and a scale, twice, in $2: a code in bits 6 to 8 of a bf16 is the number times 2^-126.
E2M1_PAIR = gl.constexpr(
    """{
    .reg .b32 m, n, c, d;
    mov.b32 c, 0x7E807E80;
    mov.b32 d, 0x80008000;
    mul.lo.u32 m, $1, 0x00040040;
    mul.lo.u32 n, $1, 0x01001000;
    and.b32 m, m, 0x01C001C0;
    lop3.b32 m, n, d, m, 0xEA;
    fma.rn.bf16x2 m, m, c, d;
    fma.rn.bf16x2 $0, m, $2, d;
    }"""
)


@gluon.jit
def _places(stride, page_size, slot, LAYOUT: gl.constexpr):
    """Where the data of slots and their scales begin, in words: int64 [BLOCK]. `stride` counts 16 bytes; slot < 0 is as 0."""
    kept = gl.maximum(slot, 0).to(gl.uint32)
    size = page_size.to(gl.uint32)
    page = kept // size
    inner = (kept - page * size).to(gl.int64)
    start = page.to(gl.int64) * stride * 4
    if LAYOUT.inline:
        data = start + inner * (LAYOUT.token_bytes // 4)
        scales = data + LAYOUT.data_bytes // 4
    else:
        data = start + inner * (LAYOUT.data_bytes // 4)
        scales = start + (page_size.to(gl.int64) * (LAYOUT.data_bytes // 4) + inner * (LAYOUT.scale_bytes // 4))
    return data, scales


@gluon.jit
def _with(words, more):
    """A tuple of tensors, and one more."""
    return words + (more,)  # noqa: RUF005


@gluon.jit
def _quarter_of(pages, data, there, QUARTER: gl.constexpr, LAYOUT: gl.constexpr):
    """Words of 128 dims, in one or two tensors: of E2M1 codes [BLOCK, 16], of 64 E4M3 codes [BLOCK, 16], of 64 bf16 numbers [BLOCK, 32]."""
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))[None, :]
    words = _with((), gl.load(pages + (data[:, None] + (codes_before(QUARTER, LAYOUT) + column)), mask=there[:, None], other=0))
    if LAYOUT.numbers == "e4m3":
        if LAYOUT.quantised > 128 * QUARTER + 64:
            words = _with(words, gl.load(pages + (data[:, None] + (32 * QUARTER + 16 + column)), mask=there[:, None], other=0))
        else:
            wide = gl.arange(0, 32, layout=gl.SliceLayout(0, PAIRS))[None, :]
            start = gl.convert_layout(data, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
            kept = gl.convert_layout(there, gl.SliceLayout(1, PAIRS), assert_trivial=True)[:, None]
            words = _with(words, gl.load(pages + (start + (LAYOUT.quantised // 4 + wide)), mask=kept, other=0))
    return words


@gluon.constexpr_function
def codes_before(quarter, layout):
    """Words of a row's codes before a quarter of the dims."""
    return quarter * (32 if layout.numbers == "e4m3" else 16)


@gluon.jit
def _scale_words(pages, scales, there, LAYOUT: gl.constexpr):
    words = ()
    for word in gl.static_range(LAYOUT.scale_bytes // 4):
        words = _with(words, gl.load(pages + (scales + word), mask=there, other=0))
    return words


@gluon.jit
def load_words(pages, stride, page_size, slot, LAYOUT: gl.constexpr):
    """All words of the rows of slots, zeros where slot < 0: a tuple of what `_quarter_of` gives, then words of scales [BLOCK]."""
    data, scales = _places(stride, page_size, slot, LAYOUT)
    words = ()
    for quarter in gl.static_range(QUARTERS):
        words += _quarter_of(pages, data, slot >= 0, quarter, LAYOUT)
    return words + _scale_words(pages, scales, slot >= 0, LAYOUT)


@gluon.constexpr_function
def tensors_of(layout):
    """Tensors of a row's codes and bf16 numbers: where its words of scales begin."""
    return 8 if layout.numbers == "e4m3" else 4


@gluon.jit
def _power_of_two(byte):
    """A bf16, twice, of UE8M0 bytes."""
    bits = gl.where(byte == 0, 0x40, byte << 7)
    return gl.where(byte == 255, 0x7FC0, bits) * 0x10001


@gluon.jit
def _e4m3_scale(byte):
    """A bf16, twice, of E4M3 bytes."""
    magnitude = byte & 0x7F
    subnormal = (magnitude.to(gl.float32) * 0.001953125).to(gl.int32, bitcast=True) >> 16
    bits = gl.where(magnitude < 8, subnormal, (magnitude << 4) + 0x3C00)
    bits = gl.where(magnitude == 0x7F, 0x7FC0, bits) | ((byte & 0x80) << 8)
    return bits * 0x10001


@gluon.jit
def _scale(words, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales of a chunk's words, a bf16 twice: [BLOCK, 16], or of a shape that broadcasts."""
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))[None, :]
    first: gl.constexpr = tensors_of(LAYOUT)
    if LAYOUT.scale == "unit":
        scale = gl.full([BLOCK, 16], 0x3F803F80, gl.int32, WORDS)
    elif LAYOUT.numbers == "e2m1":
        word = gl.where(column < 8, words[first + 2 * CHUNK][:, None], words[first + 2 * CHUNK + 1][:, None])
        scale = _e4m3_scale((word >> ((column & 6) * 4)) & 255)
    elif LAYOUT.group == 64:
        scale = _power_of_two((words[first + CHUNK // 4][:, None] >> (8 * (CHUNK % 4))) & 255)
    else:
        scale = _power_of_two((words[first + CHUNK // 2][:, None] >> (16 * (CHUNK % 2) + (column & 8))) & 255)
    return scale


@gluon.jit
def _e4m3(words, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """A chunk of 64 codes as words of bf16 [BLOCK, 32]."""
    codes, scale = gl.broadcast(words[CHUNK], _scale(words, CHUNK, LAYOUT))
    low, high = gl.inline_asm_elementwise(E4M3_WORD, "=r,=r,r,r", [codes, scale], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.convert_layout(gl.join(low, high).reshape([BLOCK, 32]), PAIRS, assert_trivial=True)


@gluon.jit
def _e2m1(words, CHUNK: gl.constexpr, LAYOUT: gl.constexpr):
    """A chunk of 128 codes as words of bf16 [BLOCK, 64]."""
    codes, scale = gl.broadcast(words[CHUNK], _scale(words, CHUNK, LAYOUT))
    first = gl.inline_asm_elementwise(E2M1_PAIR, "=r,r,r", [codes & 255, scale], dtype=gl.int32, is_pure=True, pack=1)
    second = gl.inline_asm_elementwise(E2M1_PAIR, "=r,r,r", [(codes >> 8) & 255, scale], dtype=gl.int32, is_pure=True, pack=1)
    third = gl.inline_asm_elementwise(E2M1_PAIR, "=r,r,r", [(codes >> 16) & 255, scale], dtype=gl.int32, is_pure=True, pack=1)
    fourth = gl.inline_asm_elementwise(E2M1_PAIR, "=r,r,r", [(codes >> 24) & 255, scale], dtype=gl.int32, is_pure=True, pack=1)
    return gl.join(gl.join(first, third), gl.join(second, fourth)).reshape([BLOCK, 64])


@gluon.jit
def _put(words, target, QUARTER: gl.constexpr, LAYOUT: gl.constexpr):
    """A quarter of the dims, decoded, into its tile [BLOCK, 128]."""
    if LAYOUT.numbers == "e2m1":
        numbers = _e2m1(words, QUARTER, LAYOUT)
    else:
        first = _e4m3(words, 2 * QUARTER, LAYOUT)
        numbered: gl.constexpr = LAYOUT.quantised <= 128 * QUARTER + 64
        second = words[2 * QUARTER + 1] if numbered else _e4m3(words, 2 * QUARTER + 1, LAYOUT)
        numbers = gl.join(first, second).permute((0, 2, 1)).reshape([BLOCK, 64])
    target._reinterpret(gl.int32, [BLOCK, 64], KEY_WORDS).store(numbers)


@gluon.jit
def decode_words(words, keys, buffer, LAYOUT: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr):
    """Words of rows into a buffer: `keys` are the QUARTERS of the dims, [buffers, BLOCK, 128] each; FIRST to LAST - 1 are written."""
    for quarter in gl.static_range(FIRST, LAST):
        _put(words, keys[quarter].index(buffer), quarter, LAYOUT)


@gluon.jit
def turn_words(words, keys, buffer, pages, stride, page_size, slot, LAYOUT: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr):
    """`decode_words`, and `load_words` of other slots, quarter after quarter, so that registers of one hold both.

    Returns the quarters FIRST to LAST - 1 of the other slots' words, with the last quarter their scales too.
    """
    data, scales = _places(stride, page_size, slot, LAYOUT)
    loaded = ()
    for quarter in gl.static_range(FIRST, LAST):
        _put(words, keys[quarter].index(buffer), quarter, LAYOUT)
        loaded += _quarter_of(pages, data, slot >= 0, quarter, LAYOUT)
    if LAST == QUARTERS:
        loaded += _scale_words(pages, scales, slot >= 0, LAYOUT)
    return loaded


@gluon.jit
def load_either(here, main, extra, slot, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr):
    """`load_words` of the main list's pages or of the other's, in tuples of the same types."""
    if here:
        words = _padded(load_words(main.rows, main.stride, main.page, slot, LAYOUT), LAYOUT)
    else:
        words = _padded(load_words(extra.rows, extra.stride, extra.page, slot, EXTRA_LAYOUT), EXTRA_LAYOUT)
    return words


@gluon.jit
def decode_either(
    here, words, keys, buffer, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr
):  # fmt: skip
    """`decode_words` of what `load_either` gave."""
    if here:
        decode_words(_kept(words, LAYOUT), keys, buffer, LAYOUT, FIRST, LAST)
    else:
        decode_words(_kept(words, EXTRA_LAYOUT), keys, buffer, EXTRA_LAYOUT, FIRST, LAST)


@gluon.jit
def _padded(words, LAYOUT: gl.constexpr):
    """Eight tensors of codes and eight of scales. Layouts of pairs quantise all dims."""
    padded = ()
    for chunk in gl.static_range(8):
        padded = _with(padded, words[chunk] if chunk < tensors_of(LAYOUT) else gl.zeros([BLOCK, 16], gl.int32, WORDS))
    for word in gl.static_range(8):
        padded = _with(padded, words[tensors_of(LAYOUT) + word] if word < LAYOUT.scale_bytes // 4 else gl.zeros([BLOCK], gl.int32, PICKS))
    return padded


@gluon.jit
def _kept(words, LAYOUT: gl.constexpr):
    """`_padded`, undone."""
    kept = ()
    for chunk in gl.static_range(tensors_of(LAYOUT)):
        kept = _with(kept, words[chunk])
    for word in gl.static_range(LAYOUT.scale_bytes // 4):
        kept = _with(kept, words[8 + word])
    return kept
