"""What the warps of attention on SM90 share: pieces of work, lists of picks, buffers and barriers (Gluon). The design: `attention_hopper`.

An item is a token, up to TILE of its heads, and a split of its blocks. Blocks are BLOCK columns of the token's lists, first those of the
main one, then those of the other. Strides of rows, pages, queries and results count 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

TILE = gl.constexpr(64)  # heads
BLOCK = gl.constexpr(64)  # keys
QUARTERS = gl.constexpr(4)  # parts of the dims, each a tile of shared memory
NUMBERS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(128, 16))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Picks(NamedTuple):
    """A list of picks for each token: what they pick from, the slots, their columns, and how many of them count."""

    rows: Any
    stride: Any
    page: Any  # slots of a page; 1 for rows
    total: Any
    slots: Any
    token: Any  # numbers from one token's slots to the next's
    width: Any
    lengths: Any


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for, beside layouts: heads, splits, whether lists have lengths, and heads a sink."""

    heads: int
    splits: int
    lengths: bool
    extra_lengths: bool
    sink: bool

    @property
    def groups(self) -> int:
        """Groups of heads that a token has items for."""
        return -(-self.heads // int(TILE.value))


class Item(NamedTuple):
    """Blocks `first` to `last` - 1 of a token's, of which `main_blocks` are the main list's; the columns of either list that count."""

    token: Any
    head: Any
    split: Any
    first: Any
    last: Any
    main_blocks: Any
    slots: Any
    length: Any
    extra_slots: Any
    extra_length: Any


class Memory(NamedTuple):
    """Shared memory: queries, two buffers of keys by quarters of the dims, and for each buffer's block weights, maxima and slots."""

    queries: Any
    keys: Any
    weights: Any
    maxima: Any
    shares: Any  # of the sums, one of each warpgroup that computes
    there: Any


class Barriers(NamedTuple):
    """Who announces what: see `attention_hopper`."""

    full: Any
    empty: Any
    ready: Any
    loaded: Any
    summed: Any


@gluon.constexpr_function
def form_of(heads, splits, lengths, extra_lengths, sink):
    return Form(heads, splits, lengths, extra_lengths, sink)


@gluon.constexpr_function
def keys_layout(dims):
    """How a quarter of the dims of bf16 rows lies in shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * dims), 16)


@gluon.jit
def allocate(DIMS: gl.constexpr):
    """Memory, where quarters of the keys are allocations of their own: see `attention_hopper`."""
    PART: gl.constexpr = DIMS // QUARTERS
    KEYS: gl.constexpr = keys_layout(PART)
    queries = gl.allocate_shared_memory(gl.bfloat16, [QUARTERS, TILE, PART], KEYS)
    keys0 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, PART], KEYS)
    keys1 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, PART], KEYS)
    keys2 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, PART], KEYS)
    keys3 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, PART], KEYS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, BLOCK], WEIGHTS)
    maxima = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    shares = gl.allocate_shared_memory(gl.float32, [2, TILE], FLAT)
    there = gl.allocate_shared_memory(gl.int32, [2, BLOCK], FLAT)
    return Memory(queries, (keys0, keys1, keys2, keys3), weights, maxima, shares, there)


@gluon.jit
def make_barriers():
    """Barriers that take one arrival of a whole warpgroup, but `loaded`, which takes both."""
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        for half in gl.static_range(2):
            mbarrier.init(full.index(2 * buffer + half), count=1)
            mbarrier.init(empty.index(2 * buffer + half), count=1)
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(summed.index(buffer), count=1)
    mbarrier.init(loaded, count=2)
    return Barriers(full, empty, ready, loaded, summed)


@gluon.jit
def announce(barrier):
    """What all threads of a role have done before."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _blocks(token, picks, HAS_LENGTHS: gl.constexpr):
    """How many columns of a token's list count, and their blocks."""
    length = picks.width
    if HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(picks.lengths + token), 0), picks.width)
    return length, (length + (BLOCK - 1)) // BLOCK


@gluon.jit
def item_of(number, main, extra, FORM: gl.constexpr):
    """The item of a number, whose blocks may be none."""
    token = (number // (FORM.groups * FORM.splits)).to(gl.int64)
    length, main_blocks = _blocks(token, main, FORM.lengths)
    extra_length, extra_blocks = _blocks(token, extra, FORM.extra_lengths)
    blocks = main_blocks + extra_blocks
    first, last = 0, blocks
    split = number % FORM.splits
    if FORM.splits > 1:
        each = (blocks + (FORM.splits - 1)) // FORM.splits
        first = gl.minimum(split * each, blocks)
        last = gl.minimum(first + each, blocks)
    head = (number // FORM.splits) % FORM.groups * TILE
    mine, theirs = main.slots + token * main.token, extra.slots + token * extra.token
    return Item(token, head, split, first, last, main_blocks, mine, length, theirs, extra_length)


@gluon.jit
def pick(block, item, column):
    """A block's columns of the lists, -1 past their ends; `block` counts from the first of the main list."""
    here = block < item.main_blocks
    begin = gl.where(here, block, block - item.main_blocks) * BLOCK
    slots = gl.where(here, item.slots, item.extra_slots)
    return gl.load(slots + (begin + column), mask=begin + column < gl.where(here, item.length, item.extra_length), other=-1)


@gluon.jit
def known(slot, here, main, extra):
    """int32 slots of the main list where `here`, else of the other, -1 where absent."""
    return gl.where((slot >= 0) & (slot < gl.where(here, main.total, extra.total)), slot, -1).to(gl.int32)
