"""Triton kernels that move packed scale words between layouts; `dsv4.fast.scale_words` describes sources and targets.

One program moves the words of one page of rows by up to 32 columns; a page that is all live is read without a mask on its rows. Where
source and target run along different axes, or one interleaves the rows of a page and the other does not, the tile turns in shared
memory, so that both are accessed in pieces of 16 bytes. Strides come divided by their unit, 4 or 1 words, which tells the compiler that an
access of 16 bytes is aligned; row counts are never specialised, so no new batch size compiles anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from dsv4.fast.scale_words import Source, Target

COLUMNS = 32  # words that a program moves from each row: one line of 128 bytes


@triton.jit(
    do_not_specialize=[
        "live_rows",
        "out_rows",
        "columns",
        "pages",
        "s_batch",
        "s_page",
        "s_row",
        "s_column",
        "t_batch",
        "t_page",
        "t_row",
        "t_column",
    ]
)
def move_words(
    source,
    target,
    live,  # one int32 or int64 on the device, or None
    live_rows,
    out_rows,  # pad rows included, in units of ROW_UNIT
    columns,  # in units of COLUMN_UNIT
    pages,
    s_batch,
    s_page,
    s_row,
    s_column,
    t_batch,
    t_page,
    t_row,
    t_column,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    S_UNIT: tl.constexpr,
    T_UNIT: tl.constexpr,
    ROW_UNIT: tl.constexpr,
    COLUMN_UNIT: tl.constexpr,
    S_RUNS: tl.constexpr,  # the axis of stride 1: "row", "column" or "none"
    T_RUNS: tl.constexpr,
    S_INTERLEAVED: tl.constexpr,
    T_INTERLEAVED: tl.constexpr,
):
    """target[b, r, c] = source[b, r, c] where r is live, else 0, for the rows of one page and BLOCK columns."""
    columns = columns.to(tl.int64) * COLUMN_UNIT
    blocks = tl.cdiv(columns, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    page = program // blocks % pages
    batch = program // blocks // pages
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, PAGE)
    interleaved = lane % 4 * (PAGE // 4) + lane // 4  # the row that lies at each lane of an interleaved page
    # Both run along the rows, one of them interleaved: read in the source's order, turn in the tile, write in the target's.
    TURNED: tl.constexpr = S_RUNS == "row" and T_RUNS == "row" and S_INTERLEAVED != T_INTERLEAVED
    s_row_of_lane = interleaved if S_INTERLEAVED or (T_INTERLEAVED and not TURNED) else lane
    t_row_of_lane = interleaved if T_INTERLEAVED or (S_INTERLEAVED and not TURNED) else lane
    if live is not None:
        live_rows = tl.minimum(live_rows.to(tl.int64), tl.load(live).to(tl.int64))

    s_inner = lane if S_INTERLEAVED else (s_row_of_lane if S_RUNS == "row" else s_row_of_lane * s_row.to(tl.int64) * S_UNIT)
    s_along = column if S_RUNS == "column" else column * s_column.to(tl.int64) * S_UNIT
    t_inner = lane if T_INTERLEAVED else (t_row_of_lane if T_RUNS == "row" else t_row_of_lane * t_row.to(tl.int64) * T_UNIT)
    t_along = column if T_RUNS == "column" else column * t_column.to(tl.int64) * T_UNIT
    read = source + (batch * s_batch + page * s_page) * S_UNIT + s_along[:, None] + s_inner[None, :]
    write = target + (batch * t_batch + page * t_page) * T_UNIT + t_along[:, None] + t_inner[None, :]

    wanted = (column < columns)[:, None]
    alive = (page * PAGE + s_row_of_lane < live_rows)[None, :]
    if (page + 1) * PAGE <= live_rows:  # noqa: SIM108
        words = tl.load(read, mask=wanted, other=0)
    else:
        words = tl.load(read, mask=wanted & alive, other=0)
    if TURNED:
        slow: tl.constexpr = PAGE // 4 if S_INTERLEAVED else 4
        words = tl.reshape(tl.trans(tl.reshape(words, (BLOCK, slow, PAGE // slow)), (0, 2, 1)), (BLOCK, PAGE))
    # A page of an interleaved target is always whole.
    held = (page * PAGE + t_row_of_lane < out_rows.to(tl.int64) * ROW_UNIT)[None, :]
    tl.store(write, words, mask=wanted if T_INTERLEAVED else wanted & held)


@triton.jit(do_not_specialize=["live_rows", "out_rows", "columns", "held", "t_page", "t_column"])
def zero_words(
    target,
    live,  # one int32 or int64 on the device, or None
    live_rows,
    out_rows,
    columns,
    held,  # words that the storage holds from `target` on
    t_page,
    t_column,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    T_INTERLEAVED: tl.constexpr,
):
    """target[r, c] = 0 where r is not live, for the rows of one page and BLOCK columns."""
    blocks = tl.cdiv(columns.to(tl.int64), BLOCK)
    program = tl.program_id(0).to(tl.int64)
    page = program // blocks
    if live is not None:
        live_rows = tl.minimum(live_rows.to(tl.int64), tl.load(live).to(tl.int64))
    if (page + 1) * PAGE > live_rows:
        column = program % blocks * BLOCK + tl.arange(0, BLOCK)
        lane = tl.arange(0, PAGE)
        row = page * PAGE + (lane % 4 * (PAGE // 4) + lane // 4 if T_INTERLEAVED else lane)
        place = page * t_page + column[:, None] * t_column.to(tl.int64) + lane[None, :]
        dead = ((row >= live_rows) & (row < out_rows))[None, :] & (column < columns)[:, None] & (place < held)
        tl.store(target + place, tl.zeros([BLOCK, PAGE], tl.int32), mask=dead)


def move(source: Source, target: Target, live_rows: int, live: Tensor | None, block: Tensor) -> None:
    """Fill a target's dense block."""
    s_strides = (source.batch, source.page, source.row, source.column)
    s_runs = "row" if source.row == 1 else "column" if source.column == 1 else "none"
    t_runs = "column" if target.order == "rows" else "row"
    s_unit, t_unit = _unit(s_strides, s_runs), _unit(target.strides, t_runs)
    row_unit = 1 if target.order == "rows" else 4
    column_unit = 4 if target.columns % 4 == 0 else 1
    pages = triton.cdiv(target.rows, target.page_rows)
    width = min(COLUMNS, triton.next_power_of_2(target.columns))
    move_words[(target.batches * pages * triton.cdiv(target.columns, width),)](
        source.words,
        block,
        live,
        live_rows,
        target.rows // row_unit,
        target.columns // column_unit,
        pages,
        *(stride // s_unit for stride in s_strides),
        *(stride // t_unit for stride in target.strides),
        PAGE=target.page_rows,
        BLOCK=width,
        S_UNIT=s_unit,
        T_UNIT=t_unit,
        ROW_UNIT=row_unit,
        COLUMN_UNIT=column_unit,
        S_RUNS=s_runs,
        T_RUNS=t_runs,
        S_INTERLEAVED=source.interleaved,
        T_INTERLEAVED=target.interleaved,
    )


def zero(words: Tensor, target: Target, live_rows: int, live: Tensor | None, held: int) -> None:
    """Zero the rows of a target in place from the live ones on, pads included as far as the storage holds them."""
    _, page, _, column = target.strides
    width = min(COLUMNS, triton.next_power_of_2(target.columns))
    programs = triton.cdiv(target.rows, target.page_rows) * triton.cdiv(target.columns, width)
    zero_words[(programs,)](
        words,
        live,
        live_rows,
        target.rows,
        target.columns,
        held,
        page,
        column,
        PAGE=target.page_rows,
        BLOCK=width,
        T_INTERLEAVED=target.interleaved,
    )


def _unit(strides: tuple[int, int, int, int], runs: str) -> int:
    """4 if every stride that the kernel multiplies by is a multiple of 4 words, else 1."""
    multiplied = (stride for axis, stride in zip(("batch", "page", "row", "column"), strides, strict=True) if axis != runs)
    return 4 if all(stride % 4 == 0 for stride in multiplied) else 1
