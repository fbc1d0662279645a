"""Roles of attention on SM90 that compute: scores, softmax, and sums of rows, by two warpgroups (Gluon). The design: `attention_hopper`.

`largest` is the maximum of all blocks so far, to base 2, and what the result is relative to; `mine` is what this warpgroup's own sum of
weights is relative to, for it adds up the blocks it owns alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from dsv4.fast.kernels.attention_items import BLOCK, NUMBERS, QUARTERS, TILE, announce, item_of

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HEAD = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


class Queries(NamedTuple):
    """Where queries are, and what softmax takes beside them."""

    q: Any
    token: Any
    head: Any
    sink: Any
    scale: Any


class Results(NamedTuple):
    """Where results go: output and lse, or, of splits, parts and their lses. Strides of output count 16 bytes, of all others numbers."""

    output: Any
    token: Any
    head: Any
    lse: Any
    lse_token: Any
    parts: Any
    part_split: Any
    part_token: Any
    part_head: Any
    lses: Any
    lses_split: Any
    lses_token: Any


@gluon.jit
def _zero(count):
    """0, of a count of blocks. The compiler does not know, and computes what depends on it where it stands: descriptors of shared memory
    for all steps of a product, ahead of the loop, would take more registers than there are."""
    return count >> 30


@gluon.jit
def _base(largest):
    """What a row of heads is relative to: its largest score, or 0 where it has none."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def _scores(memory, barriers, phase, zero, BUFFER: gl.constexpr):
    """Scores of a block, on their way. The product begins when the first half of the dims is there."""
    scores = gl.zeros([TILE, BLOCK], gl.float32, SCORES)
    for quarter in gl.static_range(QUARTERS):
        if quarter % 2 == 0:
            mbarrier.wait(barriers.full.index(2 * BUFFER + quarter // 2), phase)
        part = memory.keys[quarter].index(zero + BUFFER).permute((1, 0))
        scores = warpgroup_mma(memory.queries.index(zero + quarter), part, scores, use_acc=quarter > 0, is_async=True)
    return scores


@gluon.jit
def _weigh(scores, largest, mine, sums, factor, memory, barriers, BUFFER: gl.constexpr):
    """The owner's part of a block: publishes its weights and the largest scores so far (base 2)."""
    valid = memory.there.index(BUFFER).load(gl.SliceLayout(0, SCORES)) >= 0
    scores = gl.where(valid[None, :], scores * factor, float("-inf"))
    larger = gl.maximum(largest, gl.max(scores, 1))
    base = _base(larger)
    weight = gl.exp2(scores - base[:, None])
    memory.weights.index(BUFFER).store(weight.to(gl.bfloat16))
    memory.maxima.index(BUFFER).store(larger)
    sums = sums * gl.exp2(mine - base) + gl.sum(weight, 1)
    fence_async_shared()
    announce(barriers.ready.index(BUFFER))
    return larger, sums


@gluon.jit
def _add(result, memory, buffer, largest, larger, ROLE: gl.constexpr):
    """The product of a block's weights with half of its dims, on its way, onto what there was."""
    fade = gl.exp2(largest - _base(larger))
    fade = gl.convert_layout(fade, gl.SliceLayout(1, result[0].type.layout), assert_trivial=True)[:, None]
    first, second = result[0] * fade, result[1] * fade
    weights = memory.weights.index(buffer)
    first = warpgroup_mma(weights, memory.keys[2 * ROLE].index(buffer), first, is_async=True)
    second = warpgroup_mma(weights, memory.keys[2 * ROLE + 1].index(buffer), second, is_async=True)
    return first, second


@gluon.jit
def _add_other(result, memory, barriers, zero, phase, largest, BUFFER: gl.constexpr, ROLE: gl.constexpr):
    """A block of the other warpgroup, from its weights to its freed half."""
    mbarrier.wait(barriers.ready.index(BUFFER), phase)
    larger = memory.maxima.index(BUFFER).load(HEAD)
    result = warpgroup_mma_wait(0, deps=_add(result, memory, zero + BUFFER, largest, larger, ROLE))
    announce(barriers.empty.index(2 * BUFFER + ROLE))
    return result, larger


@gluon.jit
def _first_role(memory, barriers, blocks, even, odd, result, factor):
    """Blocks by pairs, of the owner of the even ones. Its own block: scores, softmax, sums; then the other's."""
    largest = gl.full([TILE], float("-inf"), gl.float32, HEAD)
    mine = largest
    sums = gl.zeros([TILE], gl.float32, HEAD)
    for pair in range((blocks + 1) // 2):
        none = _zero(even + pair)
        scores = warpgroup_mma_wait(0, deps=[_scores(memory, barriers, (even + pair) & 1, none, 0)])
        larger, sums = _weigh(scores, largest, mine, sums, factor, memory, barriers, 0)
        result = warpgroup_mma_wait(0, deps=_add(result, memory, none, largest, larger, 0))
        announce(barriers.empty.index(0))
        largest, mine = larger, larger
        if 2 * pair + 1 < blocks:
            result, largest = _add_other(result, memory, barriers, none, (odd + pair) & 1, largest, 1, 0)
    return largest, mine, sums, result


@gluon.jit
def _second_role(memory, barriers, blocks, even, odd, result, factor):
    """The owner of the odd blocks: while its softmax runs, the product of the even one does."""
    largest = gl.full([TILE], float("-inf"), gl.float32, HEAD)
    mine = largest
    sums = gl.zeros([TILE], gl.float32, HEAD)
    for pair in range(blocks // 2):
        none = _zero(even + pair)
        scores = _scores(memory, barriers, (odd + pair) & 1, none, 1)
        mbarrier.wait(barriers.ready.index(0), (even + pair) & 1)
        larger = memory.maxima.index(0).load(HEAD)
        result = _add(result, memory, none, largest, larger, 1)
        scores = warpgroup_mma_wait(2, deps=[scores])
        largest = larger
        larger, sums = _weigh(scores, largest, mine, sums, factor, memory, barriers, 1)
        result = warpgroup_mma_wait(0, deps=result)
        announce(barriers.empty.index(1))
        result = warpgroup_mma_wait(0, deps=_add(result, memory, none + 1, largest, larger, 1))
        announce(barriers.empty.index(3))
        largest, mine = larger, larger
    if blocks % 2 == 1:
        result, largest = _add_other(result, memory, barriers, _zero(even), (even + blocks // 2) & 1, largest, 0, 1)
    return largest, mine, sums, result


@gluon.jit
def _place(item, token, head, HEADS: gl.constexpr, DIMS: gl.constexpr, ROLE: gl.constexpr):
    """Where a half of the dims of an item's heads begins in a tensor with strides of 16 bytes, [TILE, DIMS], and which of it there is."""
    heads = item.head + gl.arange(0, TILE, layout=gl.SliceLayout(1, NUMBERS))
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, NUMBERS))
    inside = (heads < HEADS)[:, None] & (dim < DIMS)[None, :]
    return item.token * token * 8 + heads.to(gl.int64)[:, None] * (head * 8) + (dim[None, :] + 2 * ROLE * DIMS), inside


@gluon.jit
def _whole_sums(sums, turn, memory, barriers, ROLE: gl.constexpr):
    """Of both warpgroups' blocks."""
    memory.shares.index(ROLE).store(sums)
    announce(barriers.summed.index(ROLE))
    mbarrier.wait(barriers.summed.index(1 - ROLE), turn & 1)
    return memory.shares.index(0).load(HEAD) + memory.shares.index(1).load(HEAD)


@gluon.jit
def _store(result, inverse, item, memory, to, HEADS: gl.constexpr, ROLE: gl.constexpr):
    """A half of the dims as bf16, by way of the memory of its queries, which nobody needs any more."""
    DIMS: gl.constexpr = memory.queries.shape[2]
    for part in gl.static_range(2):
        memory.queries.index(2 * ROLE + part).store((result[part] * inverse).to(gl.bfloat16))
    gl.thread_barrier()
    place, inside = _place(item, to.token, to.head, HEADS, DIMS, ROLE)
    for part in gl.static_range(2):
        gl.store(to.output + (place + part * DIMS), memory.queries.index(2 * ROLE + part).load(NUMBERS), mask=inside)
    gl.thread_barrier()


@gluon.jit
def _store_part(result, inverse, item, to, HEADS: gl.constexpr, DIMS: gl.constexpr, ROLE: gl.constexpr):
    """A half of the dims of a split, as fp32."""
    layout: gl.constexpr = result[0].type.layout
    rows = (item.head + gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
    columns = gl.arange(0, DIMS, layout=gl.SliceLayout(0, layout))[None, :]
    start = to.parts + (item.split.to(gl.int64) * to.part_split + item.token * to.part_token + 2 * ROLE * DIMS)
    inside = (rows < HEADS) & (columns < DIMS)
    for part in gl.static_range(2):
        gl.store(start + (rows * to.part_head + (part * DIMS + columns)), result[part] * inverse, mask=inside)


@gluon.jit
def _finish(result, largest, sums, item, memory, queries, to, FORM: gl.constexpr, ROLE: gl.constexpr):
    """Logarithms, by the first warpgroup alone, and this one's half of the output."""
    heads = item.head + gl.arange(0, TILE, layout=HEAD)
    inside = heads < FORM.heads
    logarithm = gl.where(sums == 0.0, float("-inf"), (largest + gl.log2(sums)) * LN2)
    if FORM.splits > 1:
        if ROLE == 0:
            gl.store(to.lses + (item.split * to.lses_split + item.token * to.lses_token + heads), logarithm, mask=inside)
    else:
        if ROLE == 0:
            gl.store(to.lse + (item.token * to.lse_token + heads), logarithm, mask=inside)
        if FORM.sink:
            sums = sums + gl.exp2(gl.load(queries.sink + heads, mask=inside, other=0.0) * LOG2E - _base(largest))
    inverse = gl.where(logarithm == float("-inf"), 0.0, 1.0 / sums)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, result[0].type.layout), assert_trivial=True)[:, None]
    if FORM.splits > 1:
        _store_part(result, inverse, item, to, FORM.heads, memory.queries.shape[2], ROLE)
    else:
        _store(result, inverse, item, memory, to, FORM.heads, ROLE)


@gluon.jit
def compute(memory, barriers, items, main, extra, queries, results, FORM: gl.constexpr, ROLE: gl.constexpr):
    """All items: half ROLE of the dims, and the blocks of buffer ROLE."""
    DIMS: gl.constexpr = memory.queries.shape[2]
    OUTPUTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIMS, 16])
    even, odd, turn = 0, 0, 0
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(number, main, extra, FORM)
        blocks = gl.maximum(item.last - item.first, 0)
        place, inside = _place(item, queries.token, queries.head, FORM.heads, DIMS, ROLE)
        for part in gl.static_range(2):
            async_copy.async_copy_global_to_shared(memory.queries.index(2 * ROLE + part), queries.q + (place + part * DIMS), mask=inside)
        async_copy.commit_group()
        result = (gl.zeros([TILE, DIMS], gl.float32, OUTPUTS), gl.zeros([TILE, DIMS], gl.float32, OUTPUTS))
        async_copy.wait_group(0)
        fence_async_shared()
        announce(barriers.loaded)
        mbarrier.wait(barriers.loaded, turn & 1)
        factor = queries.scale * LOG2E
        if ROLE == 0:
            largest, mine, sums, result = _first_role(memory, barriers, blocks, even, odd, result, factor)
        else:
            largest, mine, sums, result = _second_role(memory, barriers, blocks, even, odd, result, factor)
        even, odd = even + (blocks + 1) // 2, odd + blocks // 2
        sums = _whole_sums(sums * gl.exp2(mine - _base(largest)), turn, memory, barriers, ROLE)
        turn += 1  # noqa: SIM113
        _finish(result, largest, sums, item, memory, queries, results, FORM, ROLE)
