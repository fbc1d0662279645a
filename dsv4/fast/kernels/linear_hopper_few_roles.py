"""Products of E4M3 codes with a scale for every GROUP of k, for few tokens, on SM90 (Gluon): what counts is how fast the weight is read.

A program has `warps` times 16 rows of the weight, `tokens` tokens and the turns of one part. Its warps copy turns of 128 of k
(`cp.async`, 16 bytes a thread) into a ring of `stages`, all but one of them on their way at any time, so that many bytes are asked for
and each row is read in whole lines. A turn is PER products that run together, each from zero (rows of the weight are rows of the tensor
core's product), then PER fused additions of products and scales, in the order of k. Scales come through the same ring, as words of four
bytes.

The arithmetic is that of `linear_products`, bit by bit: fast sums of dot (s_t s_n), and where a flag or a result that is not finite says
that they may be wrong, the program starts again with careful ones, which split the scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

__all__ = ["Form", "product_kernel"]

DEPTH = gl.constexpr(128)  # of a turn
INFINITY = gl.constexpr(0x7F800000)
MAGNITUDE = gl.constexpr(0x7FFFFFFF)
NAN = gl.constexpr(0x7FC00000)
LEAST_WEIGHT_SCALE = gl.constexpr(2.0**-22)
LEAST_SCALE = gl.constexpr(2.0**-104)
LOW_BYTES = gl.constexpr(-0x7F7F7F80)  # 0x80808080: where `_below` says what it finds
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ENTER = gl.constexpr("griddepcontrol.launch_dependents; // $0")


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for."""

    group: int  # of k: 32 or 128
    block: int  # rows of the weight with one scale
    x_words: bool  # the tokens' scales are words of bytes, else fp32
    w_words: bool
    x_tiled: bool  # words lie in 128x4 tiles
    w_tiled: bool
    tokens: int
    warps: int
    stages: int
    early: bool  # a kernel that adds parts may begin

    @property
    def rows(self) -> int:
        """Of the weight, of a program."""
        return 16 * self.warps

    @property
    def per(self) -> int:
        """Groups of a turn."""
        return 128 // self.group

    @property
    def lead(self) -> int:
        """Rows of a program that share a scale."""
        return min(self.block, self.rows)

    @property
    def leaders(self) -> int:
        """Scales of a program's rows."""
        return self.rows // self.lead

    @property
    def x_steps(self) -> int:
        """Words or numbers of a token and turn."""
        return 1 if self.x_words else self.per

    @property
    def w_steps(self) -> int:
        """Words or numbers of a row and turn."""
        return 1 if self.w_words else self.per

    @property
    def products(self) -> gl.NVMMADistributedLayout:
        """Layout of products."""
        return gl.NVMMADistributedLayout([3, 0], [self.warps, 1], [16, self.tokens, 32])

    @property
    def codes(self) -> gl.BlockedLayout:
        """Layout of copies of codes: 16 bytes a thread, a row of 128 by eight."""
        return gl.BlockedLayout([1, 16], [4, 8], [self.warps, 1], [1, 0])

    @property
    def line(self) -> gl.BlockedLayout:
        """Layout of copies of scales."""
        return gl.BlockedLayout([1], [32], [self.warps], [0])

    @property
    def stored(self) -> gl.BlockedLayout:
        """Layout of stores of results [rows, tokens], rows side by side."""
        return gl.BlockedLayout([4, 1], [16, 2], [self.warps // 4, 4], [0, 1])


class Places(NamedTuple):
    """Pointers to what is read, at the first turn, and how far scales are apart."""

    x: Any
    w: Any
    x_scales: Any
    w_scales: Any
    x_step: Any
    w_step: Any


class Memory(NamedTuple):
    """The ring."""

    x: Any
    w: Any
    x_scales: Any
    w_scales: Any


@gluon.jit
def _request(memory, places, turn, turns, FORM: gl.constexpr):
    """A turn's codes and scales on their way; none past the last. One group of copies."""
    stage = turn % FORM.stages
    there = turn < turns
    async_copy.async_copy_global_to_shared(memory.w.index(stage), places.w + turn * DEPTH, mask=there)
    async_copy.async_copy_global_to_shared(memory.x.index(stage), places.x + turn * DEPTH, mask=there)
    X_STEPS: gl.constexpr = FORM.x_steps
    W_STEPS: gl.constexpr = FORM.w_steps
    for step in gl.static_range(X_STEPS):
        pointer = places.x_scales + (turn * X_STEPS + step) * places.x_step
        async_copy.async_copy_global_to_shared(memory.x_scales.index(stage * X_STEPS + step), pointer, mask=there)
    for step in gl.static_range(W_STEPS):
        pointer = places.w_scales + (turn * W_STEPS + step) * places.w_step
        async_copy.async_copy_global_to_shared(memory.w_scales.index(stage * W_STEPS + step), pointer, mask=there)
    async_copy.commit_group()


@gluon.jit
def _with(tensors, more):
    """A tuple of tensors, and one more."""
    return tensors + (more,)  # noqa: RUF005


@gluon.jit
def _products(memory, stage, over, never, FORM: gl.constexpr):
    """The products of a turn, on their way, in place of `over`."""
    GROUP: gl.constexpr = FORM.group
    PER: gl.constexpr = FORM.per
    running = ()
    for place in gl.static_range(PER):
        w = memory.w.index(stage).slice(place * GROUP, GROUP, 1)
        x = memory.x.index(stage).slice(place * GROUP, GROUP, 1).permute((1, 0))
        running = _with(running, warpgroup_mma(w, x, over[place], use_acc=never, is_async=True))
    return running


@gluon.jit
def _waited(running, FORM: gl.constexpr):
    """What the products of a turn came to."""
    if FORM.per == 1:
        done = _with((), warpgroup_mma_wait(0, deps=[running[0]]))
    else:
        done = warpgroup_mma_wait(0, deps=[running[0], running[1], running[2], running[3]])
    return done


@gluon.jit
def _words(scales, stage, STEPS: gl.constexpr, LAYOUT: gl.constexpr):
    """The words or numbers of a turn."""
    words = ()
    for step in gl.static_range(STEPS):
        words = _with(words, scales.index(stage * STEPS + step).load(LAYOUT))
    return words


@gluon.jit
def _scale(words, PLACE: gl.constexpr, WORDS: gl.constexpr, ZERO: gl.constexpr, CAREFUL: gl.constexpr):
    """fp32 scales of a group. Of bytes in fast sums 255 is infinite, and 0 is 0 if not ZERO."""
    if not WORDS:
        bits = words[PLACE]
    elif CAREFUL:
        byte = (words[0] >> (8 * PLACE)) & 255
        bits = gl.where(byte == 255, NAN, gl.where(byte == 0, 0x400000, byte << 23))
    else:
        bits = (words[0] << (23 - 8 * PLACE) if PLACE < 3 else words[0] >> 1) & INFINITY
        if ZERO:
            bits = gl.maximum(bits, 0x400000)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _flagged(flags, words, WORDS: gl.constexpr, STEPS: gl.constexpr, LEAST: gl.constexpr):
    """`flags` raised where a scale is too small for fast sums; of words those of the weight alone are."""
    if WORDS:
        flags = flags | ~(((words[0] & 0x7F7F7F7F) + 0x17171717) | words[0])
    else:
        for step in gl.static_range(STEPS):
            value = words[step].to(gl.float32, bitcast=True)
            flags = flags | gl.where((gl.abs(value) < LEAST) & (value != 0.0), LOW_BYTES, 0)
    return flags


@gluon.jit
def _halves(scale, UP: gl.constexpr):
    """A power of two with half the exponent of a scale, rounded up or down, and the rest of the scale."""
    exponent = (((scale.to(gl.int32, bitcast=True) >> 23) & 255) - (126 if UP else 127)) >> 1
    power = ((exponent + 127) << 23).to(gl.float32, bitcast=True)
    return power, scale * ((127 - exponent) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _spread(w, x, sums):
    """Products of the scales of rows and of tokens, for each element."""
    scales = w[:, None, None] * x[None, None, :]
    scales, _ = gl.broadcast(scales, sums)
    return scales


@gluon.jit
def _added(sums, product, x, w, CAREFUL: gl.constexpr):
    """sums + product scales, [leaders, lead, tokens]."""
    product = product.reshape(sums.type.shape)
    if CAREFUL:
        x_power, x_rest = _halves(x, False)
        w_power, w_rest = _halves(w, True)
        sums = gl.fma(product * _spread(w_power, x_power, sums), _spread(w_rest, x_rest, sums), sums)
    else:
        sums = gl.fma(product, _spread(w, x, sums), sums)
    return sums


@gluon.jit
def _sums(memory, places, turns, FORM: gl.constexpr, CAREFUL: gl.constexpr):
    """fp32 sums [leaders, lead, tokens] of a part; bits of infinity and above where fast ones may be wrong."""
    STAGES: gl.constexpr = FORM.stages
    PER: gl.constexpr = FORM.per
    PRODUCTS: gl.constexpr = FORM.products
    X_STEPS: gl.constexpr = FORM.x_steps
    W_STEPS: gl.constexpr = FORM.w_steps
    for turn in range(STAGES - 1):
        _request(memory, places, turn, turns, FORM)
    over = ()
    for _ in gl.static_range(PER):
        over = _with(over, gl.full([FORM.rows, FORM.tokens], 0, gl.float32, PRODUCTS))
    sums = gl.full([FORM.rows, FORM.tokens], 0, gl.float32, PRODUCTS).reshape([FORM.leaders, FORM.lead, FORM.tokens])
    LAYOUT: gl.constexpr = sums.type.layout
    ACROSS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    DOWN: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    x_flags = gl.full([FORM.tokens], 0, gl.int32, ACROSS)
    w_flags = gl.full([FORM.leaders], 0, gl.int32, DOWN)
    never = turns < 0
    for turn in range(turns):
        stage = turn % STAGES
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()
        _request(memory, places, turn + (STAGES - 1), turns, FORM)
        fence_async_shared()
        running = _products(memory, stage, over, never, FORM)
        x_words = _words(memory.x_scales, stage, X_STEPS, ACROSS)
        w_words = _words(memory.w_scales, stage, W_STEPS, DOWN)
        if not CAREFUL:
            w_flags = _flagged(w_flags, w_words, FORM.w_words, W_STEPS, LEAST_WEIGHT_SCALE)
            if not FORM.x_words:
                x_flags = _flagged(x_flags, x_words, False, X_STEPS, LEAST_SCALE)
        over = _waited(running, FORM)
        for place in gl.static_range(PER):
            x = _scale(x_words, place, FORM.x_words, True, CAREFUL)
            w = _scale(w_words, place, FORM.w_words, False, CAREFUL)
            sums = _added(sums, over[place], x, w, CAREFUL)
    flags, _ = gl.broadcast(x_flags[None, None, :] | w_flags[:, None, None], sums)
    bits = gl.where((flags & LOW_BYTES) != 0, INFINITY, sums.to(gl.int32, bitcast=True) & MAGNITUDE)
    return sums, bits


@gluon.jit
def _scale_rows(row, stride, TILED: gl.constexpr):
    """Where the first scale or word of a row lies."""
    if TILED:  # noqa: SIM108
        place = (row // 128).to(gl.int64) * stride + (row % 32) * 4 + (row % 128) // 32
    else:
        place = row.to(gl.int64) * stride
    return place


@gluon.jit
def _places(x, x_row, x_scales, xs_row, xs_step, w, w_row, w_scales, ws_row, ws_step, token, row, tokens, n, first, FORM: gl.constexpr):
    """Pointers of a program. Rows past the last read the last one's."""
    CODES_AT: gl.constexpr = FORM.codes
    LINE: gl.constexpr = FORM.line
    column = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, CODES_AT))[None, :]
    x_at = gl.minimum(token + gl.arange(0, FORM.tokens, layout=gl.SliceLayout(1, CODES_AT)), tokens - 1).to(gl.int64)[:, None] * x_row
    w_at = gl.minimum(row + gl.arange(0, FORM.rows, layout=gl.SliceLayout(1, CODES_AT)), n - 1).to(gl.int64)[:, None] * w_row
    x_line = gl.minimum(token + gl.arange(0, FORM.tokens, layout=LINE), tokens - 1)
    leader = gl.minimum(row + gl.arange(0, FORM.leaders, layout=LINE) * FORM.lead, n - 1) // FORM.block
    x_scales = x_scales.to(gl.pointer_type(gl.int32), bitcast=True) + first.to(gl.int64) * (FORM.x_steps * xs_step)
    w_scales = w_scales.to(gl.pointer_type(gl.int32), bitcast=True) + first.to(gl.int64) * (FORM.w_steps * ws_step)
    return Places(
        x.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + first * DEPTH + (x_at + column),
        w.to(gl.pointer_type(gl.float8e4nv), bitcast=True) + first * DEPTH + (w_at + column),
        x_scales + _scale_rows(x_line, xs_row, FORM.x_tiled),
        w_scales + _scale_rows(leader, ws_row, FORM.w_tiled),
        xs_step,
        ws_step,
    )


@gluon.jit(do_not_specialize=["tokens", "turns", "between"])
def product_kernel(
    x, x_row, x_scales, xs_row, xs_step, w, w_row, w_scales, ws_row, ws_step, y, tokens, n, turns, between, FORM: gl.constexpr
):  # fmt: skip
    """A tile of tokens and rows of the weight, of the part that is the second axis of the grid; y [parts, tokens, n]."""
    if FORM.early:
        gl.inline_asm_elementwise(ENTER, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    tiles = gl.cdiv(tokens, FORM.tokens)
    token = gl.program_id(0) % tiles * FORM.tokens
    row = gl.program_id(0) // tiles * FORM.rows
    part = gl.program_id(1)
    first = part * between
    places = _places(x, x_row, x_scales, xs_row, xs_step, w, w_row, w_scales, ws_row, ws_step, token, row, tokens, n, first, FORM)
    memory = Memory(
        gl.allocate_shared_memory(gl.float8e4nv, [FORM.stages, FORM.tokens, DEPTH], CODES),
        gl.allocate_shared_memory(gl.float8e4nv, [FORM.stages, FORM.rows, DEPTH], CODES),
        gl.allocate_shared_memory(gl.int32, [FORM.stages * FORM.x_steps, FORM.tokens], FLAT),
        gl.allocate_shared_memory(gl.int32, [FORM.stages * FORM.w_steps, FORM.leaders], FLAT),
    )
    mine = gl.minimum(between, turns - first)
    sums, bits = _sums(memory, places, mine, FORM, False)
    if gl.max(gl.max(gl.max(bits, 2), 1), 0) >= INFINITY:
        async_copy.wait_group(0)
        gl.thread_barrier()
        sums, _ = _sums(memory, places, mine, FORM, True)
    PRODUCTS: gl.constexpr = FORM.products
    STORED: gl.constexpr = FORM.stored
    result = gl.convert_layout(sums.reshape([FORM.rows, FORM.tokens]), PRODUCTS, assert_trivial=True)
    result = gl.convert_layout(result.to(y.dtype.element_ty), STORED)
    rows = (row + gl.arange(0, FORM.rows, layout=gl.SliceLayout(1, STORED)))[:, None]
    column = (token + gl.arange(0, FORM.tokens, layout=gl.SliceLayout(0, STORED)))[None, :]
    start = y + part * (tokens.to(gl.int64) * n)
    gl.store(start + (column.to(gl.int64) * n + rows), result, mask=(rows < n) & (column < tokens))
