"""Products of E4M3 codes with a scale for every GROUP of k, on SM90, written with layouts, shared memory and warp roles in hand (Gluon).

Roles. A program works on one tile of the result at a time: `warpgroups` times 64 `rows` tokens, 128 columns. One warp asks for steps of 128
of k (TMA: codes of both sides, scales of the tokens, scales of the weight), `stages` of them ahead. Each warpgroup computes its own rows:
for each GROUP of k a product of its own, whose sum no earlier one enters, comes from the tensor cores into registers, is multiplied by its
scale and added to the result, all in fp32. While one warpgroup adds, the others' products run; with `ahead`, its own next one does too.

Why so. A product of 64 x 128 x 32 keeps the tensor cores busy for 64 cycles, and its 64 additions per thread, with one multiplication for
each row and 32 columns, the other units for about 80; so what counts is that both go on all the time. Tiles are as large as registers
permit, for every step is read from L2 by each program by itself.

Who announces what:

    full[s]    the memory system: everything of stage s is there. Warpgroups wait for it
    empty[s]   each warpgroup: its products of stage s are through, its scales are in registers. The copying warp waits for all

A product is written over the one before it (`use_acc` is false, but the compiler does not know): so the compiler cannot begin one before
the last has been added, and needs no more registers than for one. Additions are instructions that it may not move, for the same reason.

The weight's scales come as lines of 32 fp32 for each tile of columns and step (`linear_hopper_scales`): a scale for each group and 32 (or
128) columns, then whether scales differ inside them. Where they do (pairs of a weight with a scale for each row) a step takes the slower
way: it reads those of its columns from memory, as fp32 too.

The order of k is fixed and all tiles use one instruction, so a row's bits depend neither on the batch nor on the form. The tensor cores
align the products of a group to the largest and keep about 14 bits; sums of groups are fp32. Source of the arithmetic: spec A 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["CODES", "COLUMNS", "DEPTH", "LINE", "NUMBERS", "RESULTS", "ROWS", "WARPS", "Form", "product_kernel"]

WARPS = 4  # of the first role; those of the others follow
ROWS = gl.constexpr(64)  # of one product
COLUMNS = gl.constexpr(128)
DEPTH = gl.constexpr(128)  # of a step
LINE = gl.constexpr(32)  # numbers for each tile of columns and step
UNEVEN = gl.constexpr(16)  # the number of a line that says whether scales differ
COMPUTE_REGISTERS = gl.constexpr({2: 240, 3: 160})
COPY_REGISTERS = gl.constexpr(24)
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8))
NUMBERS = gl.constexpr(gl.NVMMASharedLayout(0, 32))
RESULTS = gl.constexpr(gl.NVMMASharedLayout(128, 16))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
ADD_SCALED = gl.constexpr("{ .reg .f32 scale; mul.rn.f32 scale, $2, $3; fma.rn.f32 $0, $1, scale, $4; }")
ADD = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")


@dataclass(frozen=True)
class Form:
    """What kernels are compiled for."""

    group: int  # of k: 32 or 128
    words: bool  # the weight's scales are words, one for each row
    warpgroups: int
    rows: int  # of a warpgroup, in units of ROWS
    stages: int
    band: int  # tiles of rows that go together over all columns
    ahead: bool  # a warpgroup's next product runs while it adds; rows is 1, words False

    @property
    def groups(self) -> int:
        """Groups of a step."""
        return 128 // self.group

    @property
    def height(self) -> int:
        """Rows of a warpgroup."""
        return 64 * self.rows

    @property
    def blocks(self) -> int:
        """Columns of a tile, in units of those that share a scale."""
        return 128 // self.group


class Places(NamedTuple):
    """Descriptors of what is read and written."""

    x: Any
    w: Any
    x_scales: Any
    w_scales: Any
    result: Any
    columns: Any  # scales of each column, fp32 [tiles of columns * steps, groups, COLUMNS]


class Sizes(NamedTuple):
    """Tiles of rows, tiles of columns, steps."""

    rows: Any
    columns: Any
    steps: Any


class Memory(NamedTuple):
    """Shared memory. All but results are by stages, and what belongs to rows, by warpgroups inside them."""

    x: Any
    w: Any
    x_scales: Any
    w_scales: Any
    results: Any
    full: Any
    empty: Any


@gluon.jit
def _allocate(FORM: gl.constexpr):
    """Memory, with its barriers."""
    full = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [FORM.stages, 1], mbarrier.MBarrierLayout())
    STAGES: gl.constexpr = FORM.stages
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=FORM.warpgroups)
    fence_async_shared()
    return Memory(
        gl.allocate_shared_memory(gl.float8e4nv, [FORM.stages * FORM.warpgroups, FORM.height, DEPTH], CODES),
        gl.allocate_shared_memory(gl.float8e4nv, [FORM.stages, COLUMNS, DEPTH], CODES),
        gl.allocate_shared_memory(gl.float32, [FORM.stages * FORM.warpgroups, FORM.groups, FORM.height], NUMBERS),
        gl.allocate_shared_memory(gl.float32, [FORM.stages, 1, LINE], NUMBERS),
        gl.allocate_shared_memory(gl.bfloat16, [FORM.warpgroups * FORM.rows, ROWS, COLUMNS], RESULTS),
        full,
        empty,
    )


@gluon.jit
def _tile(number, sizes, FORM: gl.constexpr):
    """Tile of rows and of columns. Bands of tiles of rows go over all columns, so that what programs read at a time is little."""
    band = number // (FORM.band * sizes.columns)
    first = band * FORM.band
    height = gl.minimum(sizes.rows - first, FORM.band)
    inside = number - first * sizes.columns
    return first + inside % height, inside // height


@gluon.jit
def copy(memory, places, sizes, FORM: gl.constexpr):
    """Steps of all tiles, one after another, into the stages."""
    ROLES: gl.constexpr = FORM.warpgroups
    BYTES: gl.constexpr = FORM.warpgroups * FORM.height * (DEPTH + 4 * FORM.groups) + COLUMNS * DEPTH + 4 * LINE
    count = 0
    for number in range(gl.program_id(0), sizes.rows * sizes.columns, gl.num_programs(0)):
        tile, column = _tile(number, sizes, FORM)
        for step in range(sizes.steps):
            stage = count % FORM.stages
            full = memory.full.index(stage)
            mbarrier.wait(memory.empty.index(stage), ((count // FORM.stages) & 1) ^ 1)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(places.w, [column * COLUMNS, step * DEPTH], full, memory.w.index(stage))
            tma.async_copy_global_to_shared(places.w_scales, [column * sizes.steps + step, 0], full, memory.w_scales.index(stage))
            for role in gl.static_range(ROLES):
                row = (tile * FORM.warpgroups + role) * FORM.height
                place = stage * FORM.warpgroups + role
                tma.async_copy_global_to_shared(places.x, [row, step * DEPTH], full, memory.x.index(place))
                tma.async_copy_global_to_shared(places.x_scales, [step * FORM.groups, row], full, memory.x_scales.index(place))
            count += 1


@gluon.jit
def _multiply(memory, stage, group, part, over, never, FORM: gl.constexpr, ROLE: gl.constexpr):
    """A product of ROWS rows and a group of k, on its way, in place of `over`."""
    x = memory.x.index(stage * FORM.warpgroups + ROLE).slice(part * ROWS, ROWS, 0).slice(group * FORM.group, FORM.group, 1)
    w = memory.w.index(stage).slice(group * FORM.group, FORM.group, 1).permute((1, 0))
    return warpgroup_mma(x, w, over, use_acc=never, is_async=True)


@gluon.jit
def _row_scales(memory, stage, group, part, LAYOUT: gl.constexpr, FORM: gl.constexpr, ROLE: gl.constexpr):
    """Scales of ROWS rows: [ROWS, 1]."""
    lines = memory.x_scales.index(stage * FORM.warpgroups + ROLE)._reinterpret(gl.float32, [FORM.groups * FORM.rows, ROWS], FLAT)
    return lines.index(group * FORM.rows + part).load(gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None]


@gluon.jit
def _scales(memory, stage, group, part, LAYOUT: gl.constexpr, FORM: gl.constexpr, ROLE: gl.constexpr):
    """Scales of ROWS rows and the blocks of a tile's columns: [ROWS, blocks, 1]."""
    rows = _row_scales(memory, stage, group, part, LAYOUT, FORM, ROLE)
    line = memory.w_scales.index(stage)._reinterpret(gl.float32, [LINE // FORM.blocks, FORM.blocks], FLAT)
    return (rows * line.index(group).load(gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :])[:, :, None]


@gluon.jit
def _column_scales(places, line, group, LAYOUT: gl.constexpr, FORM: gl.constexpr):
    """Scales of a tile's columns: [1, blocks, group]."""
    BLOCKS: gl.constexpr = FORM.blocks
    GROUP: gl.constexpr = FORM.group
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, gl.SliceLayout(0, LAYOUT)))[:, None]
    row = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))[None, :]
    start = places.columns + (line.to(gl.int64) * FORM.groups + group) * COLUMNS
    return gl.load(start + (block * GROUP + row))[None, :, :]


@gluon.jit
def _add(result, product, scales):
    """result + product * scales, rounded once."""
    product, scales = gl.broadcast(product.reshape(result.type.shape), scales)
    return gl.inline_asm_elementwise(ADD, "=f,f,f,f", [product, scales, result], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _add_scaled(result, product, rows, columns):
    """result + product * (rows * columns)."""
    product, rows = gl.broadcast(product.reshape(result.type.shape), rows)
    product, columns = gl.broadcast(product, columns)
    return gl.inline_asm_elementwise(ADD_SCALED, "=f,f,f,f,f", [product, rows, columns, result], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _with(tensors, more):
    """A tuple of tensors, and one more."""
    return tensors + (more,)  # noqa: RUF005


@gluon.jit
def _release(memory, stage):
    """A stage of which this warpgroup needs nothing more: it arrives, by announcing no bytes. The compiler would put a barrier of all its
    threads between `arrive` and the next wait; this one it lets be."""
    gl.thread_barrier()
    mbarrier.expect(memory.empty.index(stage), 0)


@gluon.jit
def _step(result, spare, never, memory, stage, FORM: gl.constexpr, ROLE: gl.constexpr):
    """A step whose blocks of columns have one scale each: results, and the last product."""
    LAYOUT: gl.constexpr = result[0].type.layout
    GROUPS: gl.constexpr = FORM.groups
    PARTS: gl.constexpr = FORM.rows
    over = spare[0]
    for group in gl.static_range(GROUPS):
        added = ()
        for part in gl.static_range(PARTS):
            product = _multiply(memory, stage, group, part, over, never, FORM, ROLE)
            scales = _scales(memory, stage, group, part, LAYOUT, FORM, ROLE)
            over = warpgroup_mma_wait(0, deps=[product])
            if group == GROUPS - 1 and part == PARTS - 1:
                _release(memory, stage)
            added = _with(added, _add(result[part], over, scales))
        result = added
    return result, (over,)


@gluon.jit
def _step_ahead(result, spare, never, memory, stage, FORM: gl.constexpr, ROLE: gl.constexpr):
    """`_step` where the product of the next group runs while this one's is added. None runs beyond the step."""
    LAYOUT: gl.constexpr = result[0].type.layout
    GROUPS: gl.constexpr = FORM.groups
    total = result[0]
    over, free = spare[0], spare[1]
    running = _multiply(memory, stage, 0, 0, over, never, FORM, ROLE)
    for group in gl.static_range(GROUPS):
        if group < GROUPS - 1:
            begun = _multiply(memory, stage, group + 1, 0, free, never, FORM, ROLE)
            scales = _scales(memory, stage, group, 0, LAYOUT, FORM, ROLE)
            over = warpgroup_mma_wait(1, deps=[running])
            running = begun
        else:
            scales = _scales(memory, stage, group, 0, LAYOUT, FORM, ROLE)
            over = warpgroup_mma_wait(0, deps=[running])
            _release(memory, stage)
        total = _add(total, over, scales)
        over, free = free, over
    return (total,), (over, free)


@gluon.jit
def _uneven_step(result, spare, never, memory, stage, places, line, FORM: gl.constexpr, ROLE: gl.constexpr):
    """`_step` of columns with a scale each."""
    LAYOUT: gl.constexpr = result[0].type.layout
    GROUPS: gl.constexpr = FORM.groups
    PARTS: gl.constexpr = FORM.rows
    over = spare[0]
    for group in gl.static_range(GROUPS):
        added = ()
        for part in gl.static_range(PARTS):
            product = _multiply(memory, stage, group, part, over, never, FORM, ROLE)
            rows = _row_scales(memory, stage, group, part, LAYOUT, FORM, ROLE)
            over = warpgroup_mma_wait(0, deps=[product])
            if group == GROUPS - 1 and part == PARTS - 1:
                _release(memory, stage)
            columns = _column_scales(places, line, group, LAYOUT, FORM)
            added = _with(added, _add_scaled(result[part], over, rows[:, :, None], columns))
        result = added
    return result, (over,) + spare[1:]  # noqa: RUF005


@gluon.jit
def _even_step(result, spare, never, memory, stage, FORM: gl.constexpr, ROLE: gl.constexpr):
    if FORM.ahead:
        result, spare = _step_ahead(result, spare, never, memory, stage, FORM, ROLE)
    else:
        result, spare = _step(result, spare, never, memory, stage, FORM, ROLE)
    return result, spare


@gluon.jit
def _steps(result, count, never, memory, places, column, steps, FORM: gl.constexpr, ROLE: gl.constexpr):
    """All steps of a tile, of which the first is number `count`."""
    LAYOUT: gl.constexpr = result[0].type.layout
    spare = _with((), gl.zeros([ROWS, COLUMNS], gl.float32, PRODUCTS))
    if FORM.ahead:
        spare = _with(spare, gl.zeros([ROWS, COLUMNS], gl.float32, PRODUCTS))
    for step in range(steps):
        stage = (count + step) % FORM.stages
        mbarrier.wait(memory.full.index(stage), ((count + step) // FORM.stages) & 1)
        if FORM.words:
            line = memory.w_scales.index(stage)._reinterpret(gl.float32, [LINE, 1], FLAT)
            uneven = gl.max(line.index(UNEVEN).load(gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))), 0)
            if uneven != 0.0:
                result, spare = _uneven_step(result, spare, never, memory, stage, places, column * steps + step, FORM, ROLE)
            else:
                result, spare = _even_step(result, spare, never, memory, stage, FORM, ROLE)
        else:
            result, spare = _even_step(result, spare, never, memory, stage, FORM, ROLE)
    return result


@gluon.jit
def compute(memory, places, sizes, FORM: gl.constexpr, ROLE: gl.constexpr):
    """Rows of all tiles."""
    PARTS: gl.constexpr = FORM.rows
    never = sizes.steps < 0
    count = 0
    gl.thread_barrier()
    for number in range(gl.program_id(0), sizes.rows * sizes.columns, gl.num_programs(0)):
        tile, column = _tile(number, sizes, FORM)
        result = ()
        for _ in gl.static_range(PARTS):
            result = _with(result, gl.zeros([ROWS, COLUMNS], gl.float32, PRODUCTS).reshape([ROWS, FORM.blocks, FORM.group]))
        result = _steps(result, count, never, memory, places, column, sizes.steps, FORM, ROLE)
        count += sizes.steps
        tma.store_wait(0)
        gl.thread_barrier()
        for part in gl.static_range(PARTS):
            rounded = gl.convert_layout(result[part].reshape([ROWS, COLUMNS]), PRODUCTS, assert_trivial=True).to(gl.bfloat16)
            memory.results.index(ROLE * FORM.rows + part).store(rounded)
        fence_async_shared()
        gl.thread_barrier()
        for part in gl.static_range(PARTS):
            row = (tile * FORM.warpgroups + ROLE) * FORM.height + part * ROWS
            tma.async_copy_shared_to_global(places.result, [row, column * COLUMNS], memory.results.index(ROLE * FORM.rows + part))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "column_tiles", "steps"])
def product_kernel(
    x, w, x_scales, w_scales, result, columns, tiles, column_tiles, steps, FORM: gl.constexpr
):  # fmt: skip
    """Descriptors: x and w e4m3, x_scales fp32 [groups, tokens], w_scales fp32 [tiles of columns * steps, LINE], result bf16. `tiles` are
    those of rows."""
    memory = _allocate(FORM)
    places = Places(x, w, x_scales, w_scales, result, columns)
    sizes = Sizes(tiles, column_tiles, steps)
    REGISTERS: gl.constexpr = COMPUTE_REGISTERS[FORM.warpgroups]
    if FORM.warpgroups == 2:
        gl.warp_specialize(
            [
                (compute, (memory, places, sizes, FORM, 0)),
                (compute, (memory, places, sizes, FORM, 1)),
                (copy, (memory, places, sizes, FORM)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (memory, places, sizes, FORM, 0)),
                (compute, (memory, places, sizes, FORM, 1)),
                (compute, (memory, places, sizes, FORM, 2)),
                (copy, (memory, places, sizes, FORM)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, COPY_REGISTERS],
        )
