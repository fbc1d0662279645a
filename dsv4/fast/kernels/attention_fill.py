"""Roles of attention on SM90 that fill the buffers: from packed pages through registers, or from bf16 rows by asynchronous copies (Gluon).

The loads of a block are a chain, slots before words, each as long as memory takes; so the slots of a block are asked for two blocks ahead,
and its words, with lists of one layout, while the block before it is decoded: quarter after quarter, words are decoded and those of the
next block take their registers. With lists of two layouts, whose words are different tensors, they are asked for after that. bf16 rows
need no registers: two roles fill a buffer each, so one's copies are on their way while the other waits. The design: `attention_hopper`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4.fast.kernels.attention_items import BLOCK, NUMBERS, announce, item_of, known, pick
from dsv4.fast.kernels.attention_words import PICKS, decode_either, load_either, load_words, turn_words


@gluon.jit
def _pages_of(here, main, extra):
    return gl.where(here, main.rows, extra.rows), gl.where(here, main.stride, extra.stride), gl.where(here, main.page, extra.page)


@gluon.jit
def _words_of(slot, here, main, extra, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr):
    if LAYOUT == EXTRA_LAYOUT:
        pages, stride, page = _pages_of(here, main, extra)
        words = load_words(pages, stride, page, slot, LAYOUT)
    else:
        words = load_either(here, main, extra, slot, LAYOUT, EXTRA_LAYOUT)
    return words


@gluon.jit
def _begin(half, memory, barriers, buffer, phase, slot):
    """Waits until a half of a buffer's block has been used; the first half brings the block's slots."""
    mbarrier.wait(barriers.empty.index(2 * buffer + half), (phase & 1) ^ 1)
    if half == 0:
        memory.there.index(buffer).store(slot)


@gluon.jit
def _end(half, barriers, buffer):
    """Announces a half, to tensor cores too, which read by another way than threads write."""
    fence_async_shared()
    announce(barriers.full.index(2 * buffer + half))


@gluon.jit
def _turn(slot, words, picked, item, block, buffer, phase, column, memory, barriers, main, extra, LAYOUT: gl.constexpr):
    """Puts a block into its buffer, and asks for the words of the next and the slots of the one behind it: their slots, words and picks."""
    here = block + 1 < item.main_blocks
    pages, stride, page = _pages_of(here, main, extra)
    _begin(0, memory, barriers, buffer, phase, slot)
    slot = known(picked, here, main, extra)
    loaded = turn_words(words, memory.keys, buffer, pages, stride, page, slot, LAYOUT, 0, 2)
    _end(0, barriers, buffer)
    _begin(1, memory, barriers, buffer, phase, slot)
    words = loaded + turn_words(words, memory.keys, buffer, pages, stride, page, slot, LAYOUT, 2, 4)
    picked = pick(block + 2, item, column)
    _end(1, barriers, buffer)
    return slot, words, picked


@gluon.jit
def _turn_either(
    slot, words, picked, item, block, buffer, phase, column, memory, barriers, main, extra, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr
):  # fmt: skip
    """`_turn` of lists of two layouts."""
    for half in gl.static_range(2):
        _begin(half, memory, barriers, buffer, phase, slot)
        decode_either(block < item.main_blocks, words, memory.keys, buffer, LAYOUT, EXTRA_LAYOUT, 2 * half, 2 * half + 2)
        _end(half, barriers, buffer)
    here = block + 1 < item.main_blocks
    slot = known(picked, here, main, extra)
    words = load_either(here, main, extra, slot, LAYOUT, EXTRA_LAYOUT)
    return slot, words, pick(block + 2, item, column)


@gluon.jit
def produce(memory, barriers, items, main, extra, FORM: gl.constexpr, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr):
    """Blocks of decoded rows, one after another, into the two buffers."""
    column = gl.arange(0, BLOCK, layout=PICKS)
    even, odd = 0, 0
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(number, main, extra, FORM)
        here = item.first < item.main_blocks
        slot = known(pick(item.first, item, column), here, main, extra)
        words = _words_of(slot, here, main, extra, LAYOUT, EXTRA_LAYOUT)
        picked = pick(item.first + 1, item, column)
        for block in range(item.first, item.last):
            buffer = (block - item.first) & 1
            phase = gl.where(buffer == 0, even, odd)
            even, odd = even + 1 - buffer, odd + buffer
            if LAYOUT == EXTRA_LAYOUT:
                slot, words, picked = _turn(slot, words, picked, item, block, buffer, phase, column, memory, barriers, main, extra, LAYOUT)
            else:
                slot, words, picked = _turn_either(
                    slot, words, picked, item, block, buffer, phase, column, memory, barriers, main, extra, LAYOUT, EXTRA_LAYOUT
                )


@gluon.jit
def copy(memory, barriers, items, main, extra, FORM: gl.constexpr, BUFFER: gl.constexpr):
    """Every second block of bf16 rows, into the one buffer."""
    DIMS: gl.constexpr = memory.keys[0].shape[2]
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, NUMBERS))
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, NUMBERS))[None, :]
    count = 0
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(number, main, extra, FORM)
        slot = pick(item.first + BUFFER, item, column)
        for block in range(item.first + BUFFER, item.last, 2):
            here = block < item.main_blocks
            rows, stride = gl.where(here, main.rows, extra.rows), gl.where(here, main.stride, extra.stride)
            slot = known(slot, here, main, extra)
            place = gl.maximum(slot, 0).to(gl.int64)[:, None] * (stride * 8) + dim
            kept = (slot >= 0)[:, None] & (dim < DIMS)
            for half in gl.static_range(2):
                _begin(half, memory, barriers, BUFFER, count, slot)
                for quarter in gl.static_range(2 * half, 2 * half + 2):
                    async_copy.async_copy_global_to_shared(memory.keys[quarter].index(BUFFER), rows + (place + quarter * DIMS), mask=kept)
                async_copy.commit_group()
            slot = pick(block + 2, item, column)
            for half in gl.static_range(2):
                async_copy.wait_group(1 - half)
                _end(half, barriers, BUFFER)
            count += 1
