"""Roles of warps that expand residual streams on SM90 and multiply the new ones with fn (Gluon). The design: `boundary_hopper`.

A step is ROWS tokens by WIDTH dims. Its stage of shared memory has five tiles: the streams and the sublayer's output, in whose places the
new streams and, with a carried pre, their collapse come to lie. `load` fills a stage, `expand` works on it, `multiply` takes it to the
tensor cores and to memory, and gives it back. An item is a tile of tokens and STEPS steps, those of the program's share of the hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from dsv4.fast.kernels.boundary_hopper_rounding import (
    BOTH,
    BOTH_FORM,
    EXPANDED_AT_ONCE,
    NEW,
    NEW_FORM,
    reach_of_collapse,
    reach_of_expand,
)
from dsv4.fast.kernels.stream_statistics import weight_parts

STREAMS = gl.constexpr(4)
TILES = gl.constexpr(5)  # of a stage
MIXES = gl.constexpr(24)
COLUMNS = gl.constexpr(32)  # of a product, a power of two
ROWS = gl.constexpr(64)
WIDTH = gl.constexpr(64)
STEPS = gl.constexpr(2)
STAGES = gl.constexpr(3)
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16))
TILE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32))
EXPANDERS = gl.constexpr(8)  # warps of `expand`
EACH = ROWS.value // EXPANDERS.value  # words of a thread, which are of one token
WORDS = gl.constexpr(gl.BlockedLayout([1, EACH], [EACH, 32 // EACH], [EXPANDERS.value, 1], [1, 0]))
TOKENS = gl.constexpr(gl.SliceLayout(1, WORDS.value))
WEIGHTS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


class Shared(NamedTuple):
    """Tiles by stages, those of each stream and of the output an allocation of their own, for the compiler orders accesses of one by
    barriers; fn of the share, in bf16 parts, [step, stream, part]; and who announces what of a stage: see `boundary_hopper`."""

    streams: Any
    output: Any
    fn: Any
    full: Any
    made: Any
    empty: Any


class Share(NamedTuple):
    """Which tiles of tokens a program has: `first`, then every `distance`-th of `tiles`; and its share of the hidden size."""

    first: Any
    distance: Any
    tiles: Any
    tokens: Any
    number: Any


@gluon.jit
def allocate(PARTS: gl.constexpr):
    """Memory and barriers that take one arrival of a whole role."""
    tiles0 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], TILE)
    tiles1 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], TILE)
    tiles2 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], TILE)
    tiles3 = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], TILE)
    output = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, WIDTH], TILE)
    fn = gl.allocate_shared_memory(gl.bfloat16, [STEPS * STREAMS * PARTS, COLUMNS, WIDTH], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(made.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()  # TMA arrives at them
    return Shared((tiles0, tiles1, tiles2, tiles3), output, fn, full, made, empty)


@gluon.jit
def announce(barrier):
    """What all threads of a role have done before."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def load(shared, share, y, streams, D: gl.constexpr):
    """Tiles of the streams and of the output. Tokens that do not exist are NaN, which no sum takes long for."""
    count = 0
    for tile in range(share.first, share.tiles, share.distance):
        for step in gl.static_range(STEPS):
            stage, phase = count % STAGES, count // STAGES & 1
            row, dim = tile * ROWS, (share.number * STEPS + step) * WIDTH
            full = shared.full.index(stage)
            mbarrier.wait(shared.empty.index(stage), phase ^ 1)
            mbarrier.expect(full, TILES * ROWS * WIDTH * 2)
            for stream in gl.static_range(STREAMS):
                tma.async_copy_global_to_shared(streams, [row, stream * D + dim], full, shared.streams[stream].index(stage))
            tma.async_copy_global_to_shared(y, [row, dim], full, shared.output.index(stage))
            count += 1


@gluon.jit
def _loaded(place, live, COUNT: gl.constexpr):
    """A tuple of COUNT neighbouring numbers of each token."""
    numbers = ()
    for k in gl.static_range(COUNT):
        numbers += (gl.load(place + k, mask=live, other=0.0),)  # type: ignore[assignment]
    return numbers


@gluon.jit
def _weights(tile, share, post, comb, given, CARRIED: gl.constexpr):
    """comb [old, new] and post of a tile's tokens; pre where it is carried."""
    token = tile * ROWS + gl.arange(0, ROWS, layout=TOKENS)
    live = token < share.tokens
    weights = _loaded(comb + token * 16, live, 16) + _loaded(post + token * 4, live, 4)
    if CARRIED:
        weights += _loaded(given + token * 4, live, 4)
    return weights


@gluon.jit
def _columns(weights):
    """[ROWS] as [ROWS, 1]."""
    columns = ()
    for k in gl.static_range(len(weights)):
        columns += (weights[k][:, None],)  # type: ignore[assignment]
    return columns


@gluon.jit
def _words(tiles, stage):
    """A tile as words of two numbers."""
    return tiles.index(stage)._reinterpret(gl.int32, [ROWS, WIDTH // 2], TILE_WORDS)


@gluon.jit
def _expanded(shared, stage, w, reach, pre_reach, CARRIED: gl.constexpr):
    """A stage's tiles in place; words of partial sums of squares."""
    x0, x1 = _words(shared.streams[0], stage).load(WORDS), _words(shared.streams[1], stage).load(WORDS)
    x2, x3 = _words(shared.streams[2], stage).load(WORDS), _words(shared.streams[3], stage).load(WORDS)
    y = _words(shared.output, stage).load(WORDS)
    if CARRIED:
        x0, x1, x2, x3, squares, one = gl.inline_asm_elementwise(
            BOTH, BOTH_FORM,
            [x0, x1, x2, x3, y, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
             w[16], w[17], w[18], w[19], reach, w[20], w[21], w[22], w[23], pre_reach],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.float32, gl.int32), is_pure=True, pack=EXPANDED_AT_ONCE,
        )  # fmt: skip
        _words(shared.output, stage).store(one)
    else:
        x0, x1, x2, x3, squares = gl.inline_asm_elementwise(
            NEW, NEW_FORM,
            [x0, x1, x2, x3, y, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
             w[16], w[17], w[18], w[19], reach],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.float32), is_pure=True, pack=EXPANDED_AT_ONCE,
        )  # fmt: skip
    _words(shared.streams[0], stage).store(x0)
    _words(shared.streams[1], stage).store(x1)
    _words(shared.streams[2], stage).store(x2)
    _words(shared.streams[3], stage).store(x3)
    return squares


@gluon.jit
def expand(shared, share, post, comb, given, squares, CARRIED: gl.constexpr):
    """New streams in the places of the old ones, and their sums of squares over the share. Weights are asked for a tile ahead."""
    count = 0
    coming = _weights(share.first, share, post, comb, given, CARRIED)
    for tile in range(share.first, share.tiles, share.distance):
        weights = coming
        coming = _weights(tile + share.distance, share, post, comb, given, CARRIED)
        reach = reach_of_expand(weights)
        pre_reach = reach
        if CARRIED:
            pre_reach = reach_of_collapse(weights[20:24])
        columns = _columns(weights)
        total = gl.zeros([ROWS, WIDTH // 2], gl.float32, WORDS)
        for _ in range(STEPS):
            stage, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(shared.full.index(stage), phase)
            total += _expanded(shared, stage, columns, reach[:, None], pre_reach[:, None], CARRIED)
            fence_async_shared()
            announce(shared.made.index(stage))
            count += 1
        token = tile * ROWS + gl.arange(0, ROWS, layout=TOKENS)
        gl.store(squares + (share.number.to(gl.int64) * share.tokens + token), gl.sum(total, 1), mask=token < share.tokens)


@gluon.jit
def _put_weights(shared, share, fn, D: gl.constexpr, PARTS: gl.constexpr, PRECISION: gl.constexpr):
    """fn of the share, cut into parts. Columns behind the last mix are 0."""
    mix = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, WEIGHTS))[:, None]
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, WEIGHTS))[None, :]
    for step in gl.static_range(STEPS):
        start = fn + ((share.number * STEPS + step) * WIDTH + dim + mix * (STREAMS * D))
        whole = ()
        for stream in gl.static_range(STREAMS):
            whole += (gl.load(start + stream * D, mask=(mix < MIXES) & (dim < WIDTH), other=0.0),)  # type: ignore[assignment]
        for stream in gl.static_range(STREAMS):
            parts = weight_parts(whole[stream], PRECISION)
            for part in gl.static_range(PARTS):
                shared.fn.index((step * STREAMS + stream) * PARTS + part).store(parts[part].to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _products(shared, stage, zero, sums, STEP: gl.constexpr, PARTS: gl.constexpr):
    """A stage's products, on their way, onto `sums`: the smallest parts first. `zero` the compiler does not know: descriptors of fn for all
    products, ahead of the loop, would take more registers than there are."""
    for part in gl.static_range(PARTS):
        for stream in gl.static_range(STREAMS):
            weight = shared.fn.index(zero + ((STEP * STREAMS + stream) * PARTS + PARTS - 1 - part)).permute((1, 0))
            sums = warpgroup_mma(shared.streams[stream].index(stage), weight, sums, is_async=True)
    return sums


@gluon.jit
def multiply(
    shared, share, fn, new, collapsed, parts, D: gl.constexpr, PARTS: gl.constexpr, PRECISION: gl.constexpr, CARRIED: gl.constexpr
):  # fmt: skip
    """Products of the new streams with fn over the share; new streams, and their collapse, to memory."""
    _put_weights(shared, share, fn, D, PARTS, PRECISION)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))[None, :]
    count = 0
    for tile in range(share.first, share.tiles, share.distance):
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        for step in gl.static_range(STEPS):
            stage, phase = count % STAGES, count // STAGES & 1
            row, dim = tile * ROWS, (share.number * STEPS + step) * WIDTH
            mbarrier.wait(shared.made.index(stage), phase)
            for stream in gl.static_range(STREAMS):
                tma.async_copy_shared_to_global(new, [row, stream * D + dim], shared.streams[stream].index(stage))
            if CARRIED:
                tma.async_copy_shared_to_global(collapsed, [row, dim], shared.output.index(stage))
            sums = warpgroup_mma_wait(0, deps=[_products(shared, stage, count >> 30, sums, step, PARTS)])
            tma.store_wait(0)
            announce(shared.empty.index(stage))
            count += 1
        token = (tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS)))[:, None]
        place = (share.number.to(gl.int64) * share.tokens + token) * MIXES + column
        gl.store(parts + place, sums, mask=(token < share.tokens) & (column < MIXES))
