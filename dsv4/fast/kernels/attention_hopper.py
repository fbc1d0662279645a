"""Sparse attention on SM90, written with layouts, shared memory and warp roles in hand (Gluon).

Roles. A program works on one item at a time (`attention_items`), with roles of warps that meet at the barriers below alone. From packed
pages: two warpgroups compute (`attention_compute`), and eight warps produce, that is, load picked rows, decode them to bf16 and put them
into shared memory as the tensor cores read them (`attention_fill`, `attention_words`). From bf16 rows: two warpgroups compute, and twice
four warps copy. The grid has no more programs than the device has multiprocessors, for shared memory has room for one.

Buffers. Blocks of 64 keys alternate between two buffers. The first warpgroup owns the blocks of the one, the second those of the other:
the owner takes the scores and the softmax of a block, and publishes its weights and the maximum so far. Each warpgroup keeps one half of
the output's dims and adds every block, in order, to them. So the products of one block run beside the softmax of another, no warpgroup
holds more than half of the output, and both products, with keys and with values, read the one bf16 copy.

Halves. A buffer is announced and freed by halves of the dims, as soon as each is done: the scores begin with the first half while the
second is decoded, and a half is written again as soon as the one warpgroup that adds it to its output is through with it.

Four allocations. The quarters of a block's dims are allocations of their own, with both buffers in each. The compiler orders accesses of
one allocation by barriers of its own, also where the parts that are written and read differ; writing one quarter waits for no other.

Who announces what:

    full[2 b + h]    produce or copy: half h of buffer b, and with h = 0 its slots, are there. Both warpgroups' scores and sums wait
                     for it, the one that does not own the block by way of ready[b]
    empty[2 b + h]   warpgroup h: it has added half h of buffer b's block. produce or copy wait for it
    ready[b]         the owner of buffer b: weights and maxima are there. The other warpgroup waits for it
    loaded           both warpgroups: their halves of the queries are there
    summed[r]        warpgroup r: its sum of weights is there. The other waits for it

What tensor cores read they read by another way than threads write, so who writes also fences, before the barrier. Weights and maxima of a
buffer are free again when its halves are: the next block's owner has waited for `full`, and the role that filled it for both `empty`.

A token's result depends on its own inputs alone, whatever the grid. Source of the arithmetic: spec A 6.2, 6.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.fast.kernels.attention_compute import Queries, Results, compute
from dsv4.fast.kernels.attention_fill import copy, produce
from dsv4.fast.kernels.attention_items import TILE, Picks, allocate, form_of, make_barriers

__all__ = ["TILE", "WARPS", "paged_kernel", "rows_kernel"]

WARPS = 4  # of the first role; those of the others follow
COMPUTE_REGISTERS = gl.constexpr(192)  # of a thread of the second warpgroup that computes
PRODUCE_REGISTERS = gl.constexpr(64)
ROWS_COMPUTE_REGISTERS = gl.constexpr(208)
COPY_REGISTERS = gl.constexpr(40)
UNSPECIALISED = [
    "items", "q_token", "q_head", "main_stride", "main_total", "slots_token", "width", "extra_stride", "extra_total", "extra_token",
    "extra_width", "out_token", "out_head", "lse_token", "lses_split", "lses_token",
]  # fmt: skip


@gluon.jit(do_not_specialize=[*UNSPECIALISED, "main_page", "extra_page"])
def paged_kernel(
    items, q, q_token, q_head, main, main_stride, main_page, main_total, slots, slots_token, width, lengths,
    extra, extra_stride, extra_page, extra_total, extra_slots, extra_token, extra_width, extra_lengths, sink, scale,
    output, out_token, out_head, lse, lse_token, parts, part_split, part_token, part_head, part_lses, lses_split, lses_token,
    HEADS: gl.constexpr, DIMS: gl.constexpr, LAYOUT: gl.constexpr, EXTRA_LAYOUT: gl.constexpr, HAS_LENGTHS: gl.constexpr,
    HAS_EXTRA_LENGTHS: gl.constexpr, SINK: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Pages are words (int32). Items are tokens, groups of up to TILE heads of each, and splits of each one's blocks."""
    memory, barriers = allocate(DIMS), make_barriers()
    FORM: gl.constexpr = form_of(HEADS, SPLITS, HAS_LENGTHS, HAS_EXTRA_LENGTHS, SINK)
    first = Picks(main, main_stride, main_page, main_total, slots, slots_token, width, lengths)
    second = Picks(
        extra, extra_stride, extra_page, extra_total, extra_slots, extra_token, extra_width, extra_lengths
    )  # fmt: skip
    queries = Queries(q, q_token, q_head, sink, scale)
    results = Results(
        output, out_token, out_head, lse, lse_token, parts, part_split, part_token, part_head, part_lses, lses_split, lses_token
    )  # fmt: skip
    gl.warp_specialize(
        [
            (compute, (memory, barriers, items, first, second, queries, results, FORM, 0)),
            (compute, (memory, barriers, items, first, second, queries, results, FORM, 1)),
            (produce, (memory, barriers, items, first, second, FORM, LAYOUT, EXTRA_LAYOUT)),
        ],
        [4, 8],
        [COMPUTE_REGISTERS, PRODUCE_REGISTERS],
    )


@gluon.jit(do_not_specialize=UNSPECIALISED)
def rows_kernel(
    items, q, q_token, q_head, main, main_stride, main_total, slots, slots_token, width, lengths,
    extra, extra_stride, extra_total, extra_slots, extra_token, extra_width, extra_lengths, sink, scale,
    output, out_token, out_head, lse, lse_token, parts, part_split, part_token, part_head, part_lses, lses_split, lses_token,
    HEADS: gl.constexpr, DIMS: gl.constexpr, HAS_LENGTHS: gl.constexpr, HAS_EXTRA_LENGTHS: gl.constexpr, SINK: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """`paged_kernel` of bf16 rows. Each buffer has warps that fill it."""
    memory, barriers = allocate(DIMS), make_barriers()
    FORM: gl.constexpr = form_of(HEADS, SPLITS, HAS_LENGTHS, HAS_EXTRA_LENGTHS, SINK)
    first = Picks(main, main_stride, 1, main_total, slots, slots_token, width, lengths)
    second = Picks(extra, extra_stride, 1, extra_total, extra_slots, extra_token, extra_width, extra_lengths)
    queries = Queries(q, q_token, q_head, sink, scale)
    results = Results(
        output, out_token, out_head, lse, lse_token, parts, part_split, part_token, part_head, part_lses, lses_split, lses_token
    )  # fmt: skip
    gl.warp_specialize(
        [
            (compute, (memory, barriers, items, first, second, queries, results, FORM, 0)),
            (compute, (memory, barriers, items, first, second, queries, results, FORM, 1)),
            (copy, (memory, barriers, items, first, second, FORM, 0)),
            (copy, (memory, barriers, items, first, second, FORM, 1)),
        ],
        [4, 4, 4],
        [ROWS_COMPUTE_REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
    )
