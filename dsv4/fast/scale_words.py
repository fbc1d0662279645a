"""Scale layouts as permutations of int32 words, and the three ways to carry one out.

A word holds the four bytes of four neighbouring groups, so no layout ever takes one apart. With P rows to a page, the word of batch b, row
r and column c lies at

    b batch + (r div P) page + c column + inner(r mod P),    inner(m) = m row,  or  4 (m mod P/4) + m div (P/4)  if interleaved

Packed, 128x4, MN-major and row-major scales, UTCCP pages and Hopper's FP4 scales differ in the strides, in P and in `interleaved`. The
sum is separable: a target is a dense block of three axes, and the place of its word in the source is a sum of one number from each axis.
`compiled` gathers by those three vectors (one graph for every layout); `triton` moves tiles of one page by up to 32 columns, coalesced on
both sides; `eager`, the best of them on a CPU, views quarters of pages as strided blocks and copies these. Source: spec A 8, M 9.6.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.formats import TILE_ROWS, TMA_BYTES, WORD_GROUPS, align

TMA_WORDS = TMA_BYTES // 4
HOPPER_ROWS = 64  # rows of one page of FlashInfer's mixed-input scales


class Source(NamedTuple):
    """Words to read: `rows` rows of them, at the places that the strides give. Rows from `rows` on count as zero."""

    words: Tensor  # int32; element 0 is word (0, 0, 0)
    rows: int
    batch: int
    page: int
    row: int
    column: int
    interleaved: bool = False

    def place(self, row: Tensor, page_rows: int) -> Tensor:
        """What a row adds to a word's place."""
        page, inner = row // page_rows, row % page_rows
        return page * self.page + (4 * (inner % (page_rows // 4)) + inner // (page_rows // 4) if self.interleaved else inner * self.row)

    def flat(self) -> Tensor:
        """All words that the strides reach, as a vector."""
        words = self.words
        extent = 1 + sum((size - 1) * stride for size, stride in zip(words.shape, words.stride(), strict=True))
        return words.as_strided((extent,), (1,))


class Target(NamedTuple):
    """Words to write, a dense block: axes (batch, row, column), (batch, column, row) or (batch and page, column, row of the page)."""

    batches: int
    rows: int  # pad rows included
    columns: int
    order: Literal["rows", "columns", "pages"]
    interleaved: bool = False  # rows of a page in interleaved order
    page_rows: int = TILE_ROWS

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes of the dense block."""
        if self.order == "rows":
            return self.batches, self.rows, self.columns
        if self.order == "columns":
            return self.batches, self.columns, self.rows
        return self.batches * (self.rows // self.page_rows), self.columns, self.page_rows

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides of batch, page, row and column."""
        batch = self.rows * self.columns if self.batches > 1 else 0
        if self.order == "rows":
            return batch, self.page_rows * self.columns, self.columns, 1
        if self.order == "columns":
            return batch, self.page_rows, 1, self.rows
        return batch, self.page_rows * self.columns, 1, self.page_rows


Move = Callable[[Source, Target, int, Tensor | None], Tensor]


def moved(move: Move, source: Source, target: Target, live_rows: int | None = None, live: Tensor | None = None) -> Tensor:
    """The target's block: the source's words, zero in rows that the source lacks or that are not live.

    Args:
        live_rows: rows to keep; all of the source's if None.
        live: the same in a 0-d tensor on the device, where only the device knows it; the smaller of the two counts.
    """
    if source.words.numel() == 0 or 0 in target.shape:
        return source.words.new_zeros(target.shape)
    return move(source, target, source.rows if live_rows is None else min(live_rows, source.rows), live)


def compiled(source: Source, target: Target, live_rows: int, live: Tensor | None) -> Tensor:
    """`moved` by the compiled gather."""
    result: Tensor = run_compiled(gather_words, source.flat(), _limit(source, live_rows, live), *axes(source, target))
    return result


def eager(source: Source, target: Target, live_rows: int, live: Tensor | None) -> Tensor:
    """`moved` by strided copies, at most three; by the gather, uncompiled, where only a CUDA device knows the live rows."""
    if live is not None and live.device.type != "cpu":
        result: Tensor = run_eagerly(gather_words, source.flat(), _limit(source, live_rows, live), *axes(source, target))
        return result
    kept = live_rows if live is None else min(live_rows, max(int(live), 0))
    block = source.words.new_empty(target.shape) if kept == target.rows else source.words.new_zeros(target.shape)
    quarter = target.page_rows // 4
    pages, rest = divmod(kept, target.page_rows)
    quarters, rows = divmod(rest, quarter)
    for page, first, sizes in ((0, 0, (pages, 4, quarter)), (pages, 0, (1, quarters, quarter)), (pages, quarters, (1, 1, rows))):
        if 0 not in sizes:
            _part(block, (*target.strides, target.interleaved), page, first, sizes, target).copy_(
                _part(source.words, source[2:], page, first, sizes, target)
            )
    return block


def _part(words: Tensor, layout: tuple[int, ...], page: int, first: int, sizes: tuple[int, int, int], target: Target) -> Tensor:
    """Words of pages from `page` on, quarters of a page from `first` on: [batches, pages, quarters, rows, columns]."""
    by_batch, by_page, by_row, by_column, interleaved = layout
    by_quarter, inner = (1, 4) if interleaved else (target.page_rows // 4 * by_row, by_row)
    start = words.storage_offset() + page * by_page + first * by_quarter
    return words.as_strided((target.batches, *sizes, target.columns), (by_batch, by_page, by_quarter, inner, by_column), start)


def triton(source: Source, target: Target, live_rows: int, live: Tensor | None) -> Tensor:
    """`moved` by a Triton kernel."""
    from dsv4.fast.kernels import scale_layouts

    block = torch.empty(target.shape, dtype=torch.int32, device=source.words.device)
    scale_layouts.move(source, target, live_rows, live, block)
    return block


def gather_words(words: Tensor, live: Tensor, outer: Tensor, middle: Tensor, inner: Tensor) -> Tensor:
    """words[place] where row < live, else 0; place and row are sums of the axes' two columns."""
    place = outer[:, 0, None, None] + middle[:, 0, None] + inner[:, 0]
    row = outer[:, 1, None, None] + middle[:, 1, None] + inner[:, 1]
    alive = row < live
    return torch.where(alive, words[torch.where(alive, place, 0)], 0)


def axes(source: Source, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """For each axis of the target's block int64 [size, 2]: what it adds to the place in the source, and to the row."""
    device, page_rows = source.words.device, target.page_rows

    def along(size: int) -> Tensor:
        return torch.arange(size, device=device)

    def row_axis(size: int) -> Tensor:
        row = along(size)
        if target.interleaved:
            row = row // page_rows * page_rows + row % 4 * (page_rows // 4) + row % page_rows // 4
        return torch.stack((source.place(row, page_rows), row), -1)

    column = along(target.columns) * source.column
    by_column = torch.stack((column, torch.zeros_like(column)), -1)
    if target.order == "pages":
        pages = target.rows // page_rows
        outer = along(target.batches * pages)
        by_page = torch.stack((outer // pages * source.batch + outer % pages * source.page, outer % pages * page_rows), -1)
        return by_page, by_column, row_axis(page_rows)
    batch = along(target.batches) * source.batch
    by_batch = torch.stack((batch, torch.zeros_like(batch)), -1)
    by_row = row_axis(target.rows)
    return (by_batch, by_row, by_column) if target.order == "rows" else (by_batch, by_column, by_row)


def _limit(source: Source, live_rows: int, live: Tensor | None) -> Tensor:
    return torch.full((), live_rows, device=source.words.device) if live is None else live.clamp(max=live_rows)


def pack_ue8m0(move: Move, scales: Tensor) -> Tensor:
    """uint8 [..., rows, groups] to packed int32 [..., rows, words]."""
    return _packed(move, whole_words(scales))


def align_mn_major(move: Move, scales: Tensor) -> Tensor:
    """fp32 [..., rows, groups] to the same with MN-major strides."""
    return _packed(move, scales.detach().view(torch.int32)).view(torch.float32)


def restride_rows(move: Move, packed: Tensor, rows: int) -> Tensor:
    """Packed int32 [n, words] to packed int32 [rows, words]."""
    return _packed(move, packed, rows)


def unpack_ue8m0(move: Move, packed: Tensor, groups: int) -> Tensor:
    """Packed int32 [..., rows, words] to uint8 [..., rows, groups]."""
    return _row_major(move, _rows_of(packed), packed.shape[:-2], packed.shape[-1], groups)


def swizzle_128x4(move: Move, scales: Tensor) -> Tensor:
    """uint8 [..., rows, groups] to int32 [..., tiles, words, 32, 4]."""
    return _tiled(move, whole_words(scales))


def unswizzle_128x4(move: Move, swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """int32 [..., tiles, words, 32, 4], or its bytes as a vector, to uint8 [..., rows, groups]."""
    columns = align(groups, WORD_GROUPS) // WORD_GROUPS
    if swizzled.dtype == torch.uint8:
        swizzled = whole_words(swizzled).view(align(rows, TILE_ROWS) // TILE_ROWS, columns, 32, 4)
    return _row_major(move, _tiles_of(swizzled, rows), swizzled.shape[:-4], columns, groups)


def packed_to_128x4(move: Move, packed: Tensor) -> Tensor:
    """Packed int32 [rows, words] to int32 [tiles, words, 32, 4]."""
    return _tiled(move, packed)


def packed_from_128x4(move: Move, swizzled: Tensor, rows: int) -> Tensor:
    """int32 [tiles, words, 32, 4] to packed int32 [rows, words]."""
    target = Target(1, align(rows, TMA_WORDS), swizzled.shape[1], "columns")
    return _view_packed(moved(move, _tiles_of(swizzled, rows), target), (), rows)


def utccp_rows(move: Move, packed: Tensor, inverse: bool) -> Tensor:
    """Packed int32 [rows, words] to the same with each page's rows interleaved, or from that back."""
    rows, columns = packed.shape
    # Interleaved rows lie next to each other, whatever the strides of the tensor that came.
    source = _rows_of(packed.t().contiguous().t())._replace(interleaved=True) if inverse else _rows_of(packed)
    return _view_packed(moved(move, source, Target(1, rows, columns, "columns", interleaved=not inverse)), (), rows)


def interleave_hopper_fp4(move: Move, scales: Tensor) -> Tensor:
    """uint8 [experts, n, k/32] to uint8 [experts, n/64, k/128, 16, 16]."""
    words = whole_words(scales)
    experts, n, columns = words.shape
    target = Target(experts, n, columns, "pages", interleaved=True, page_rows=HOPPER_ROWS)
    return moved(move, _rows_of(words, HOPPER_ROWS), target).view(torch.uint8).view(experts, n // HOPPER_ROWS, columns, 16, 16)


def deinterleave_hopper_fp4(move: Move, interleaved: Tensor) -> Tensor:
    """uint8 [experts, n/64, k/128, 16, 16] to uint8 [experts, n, k/32]."""
    words = whole_words(interleaved)  # [experts, n/64, k/128, 16, 4]
    experts, pages, columns = words.shape[:3]
    source = _tiles_of(words, pages * HOPPER_ROWS, HOPPER_ROWS)
    return _row_major(move, source, (experts,), columns, columns * WORD_GROUPS, HOPPER_ROWS)


def zero_pad_rows(move: Move, scales: Tensor, live_rows: int, live: Tensor | None, scale_layout: str) -> Tensor:
    """Packed or 128x4 scales, zero from `live_rows` and from `live` on."""
    source, target = _same_layout(scales, scale_layout)
    block = moved(move, source, target, live_rows, live)
    return _view_packed(block, (), scales.shape[0]) if scale_layout == "packed" else block.view(scales.shape)


def zero_pad_rows_(move: Move, scales: Tensor, live_rows: int, live: Tensor | None, scale_layout: str) -> None:
    """`zero_pad_rows` written back over the scales."""
    source, target = _same_layout(scales, scale_layout)
    block = moved(move, source, target, live_rows, live)
    reached = min(block.numel(), _held(scales))
    scales.as_strided((reached,), (1,)).copy_(block.view(-1)[:reached])


def zero_pad_rows_by_triton_(scales: Tensor, live_rows: int, live: Tensor | None, scale_layout: str) -> None:
    """`zero_pad_rows_` that touches the dead rows alone."""
    from dsv4.fast.kernels import scale_layouts

    source, target = _same_layout(scales, scale_layout)
    if scales.numel():
        scale_layouts.zero(scales, target, min(live_rows, source.rows), live, _held(scales))


def whole_words(scales: Tensor) -> Tensor:
    """uint8 [..., groups] as int32 [..., ceil(groups/4)]: a view where strides and address allow it, else one copy."""
    extra = -scales.shape[-1] % WORD_GROUPS
    if scales.numel() == 0:
        return scales.new_empty((*scales.shape[:-1], (scales.shape[-1] + extra) // WORD_GROUPS), dtype=torch.int32)
    steps = (*scales.stride()[:-1], scales.data_ptr(), scales.storage_offset(), extra)
    if scales.stride(-1) != 1 or any(step % WORD_GROUPS for step in steps):
        scales = pad(scales, (0, extra)).clone(memory_format=torch.contiguous_format)
    return scales.view(torch.int32)


def _rows_of(words: Tensor, page_rows: int = TILE_ROWS) -> Source:
    """A source of int32 [..., rows, columns] with any strides."""
    batches, rows = prod(words.shape[:-2]), words.shape[-2]
    if batches == 1:  # its strides as they are: those of a view would count the rows, and what a kernel is compiled for must not
        row, column = words.stride()[-2:]
        return Source(words, rows, 0, page_rows * row, row, column)
    words = words.reshape(batches, *words.shape[-2:])
    batch, row, column = words.stride()
    return Source(words, rows, batch, page_rows * row, row, column)


def _tiles_of(tiles: Tensor, rows: int, page_rows: int = TILE_ROWS) -> Source:
    """A source of int32 tiles [..., tiles, columns, page_rows/4, 4]."""
    *_, count, columns, _, _ = tiles.shape
    page = columns * page_rows
    return Source(tiles.contiguous(), rows, count * page, page, 1, page_rows, interleaved=True)


def _same_layout(scales: Tensor, scale_layout: str) -> tuple[Source, Target]:
    if scale_layout == "packed":
        rows, columns = scales.shape
        return _rows_of(scales), Target(1, align(rows, TMA_WORDS), columns, "columns")
    rows, columns = scales.shape[0] * TILE_ROWS, scales.shape[1]
    return _tiles_of(scales, rows), Target(1, rows, columns, "pages", interleaved=True)


def _packed(move: Move, words: Tensor, rows: int | None = None) -> Tensor:
    *batch, own_rows, columns = words.shape
    rows = own_rows if rows is None else rows
    target = Target(prod(batch), align(rows, TMA_WORDS), columns, "columns")
    return _view_packed(moved(move, _rows_of(words), target), tuple(batch), rows)


def _view_packed(block: Tensor, batch: tuple[int, ...], rows: int) -> Tensor:
    return block.view(*batch, *block.shape[1:]).transpose(-1, -2)[..., :rows, :]


def _tiled(move: Move, words: Tensor) -> Tensor:
    *batch, rows, columns = words.shape
    target = Target(prod(batch), align(rows, TILE_ROWS), columns, "pages", interleaved=True)
    return moved(move, _rows_of(words), target).view(*batch, target.rows // TILE_ROWS, columns, 32, 4)


def _row_major(move: Move, source: Source, batch: tuple[int, ...], columns: int, groups: int, page_rows: int = TILE_ROWS) -> Tensor:
    block = moved(move, source, Target(prod(batch), source.rows, columns, "rows", page_rows=page_rows))
    return block.view(torch.uint8)[..., :groups].reshape(*batch, source.rows, groups).contiguous()


def _held(words: Tensor) -> int:
    """int32 words that a tensor's storage holds from its first element on."""
    return int(words.untyped_storage().nbytes()) // 4 - int(words.storage_offset())
