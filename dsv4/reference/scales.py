"""Where the scales of a tensor lie in memory.

A scale belongs to a row r and a group g. Let word(r, c) be the four E8M0 bytes of the groups 4c to 4c + 3, the first in the low bits,

    word(r, c) = sum over j < 4 of 2^(8j) byte(r, 4c + j)          as int32, a missing group is 0          (1)

and A = align(rows, 4), W = ceil(groups/4), T = ceil(rows/128).

    rows       e8m0 or fp32 [rows, groups]         row-major
    packed     int32 [rows, W], strides (1, A)     word(r, c) at element c A + r                            (2)
    128x4      int32 [T, W, 32, 4], contiguous     word(r, c) at [r div 128, c, r mod 32, (r mod 128) div 32]   (3)
    mn_major   fp32 [rows, groups], strides (1, A) scale(r, g) at element g A + r                           (4)

Read as bytes, (3) puts byte(r, g) at (r div 128) 512 W + (g div 4) 512 + (r mod 32) 16 + ((r mod 128) div 32) 4 + g mod 4: the
buffer of FlashInfer and cuBLAS. (2) and (4) are DeepGEMM's. All pads are zero: missing groups in a word, elements `rows` to A - 1 of a
column, missing rows of a tile. Values are moved, never computed with; inputs may have any strides. Source: spec A 8, M 9.6 and 10.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import checks
from dsv4.formats import TILE_ROWS, TMA_BYTES, WORD_GROUPS, align
from dsv4.types import ArgumentError, ScaleLayout

__all__ = [
    "align_mn_major",
    "deinterleave_hopper_fp4",
    "interleave_hopper_fp4",
    "pack_ue8m0",
    "packed_from_128x4",
    "packed_to_128x4",
    "restride_rows",
    "swizzle_128x4",
    "unpack_ue8m0",
    "unswizzle_128x4",
    "utccp_rows",
    "zero_pad_rows",
]

TILE = "... (tile quarter row) word -> ... tile word row quarter"  # (3): r = 128 tile + 32 quarter + row
ROWS_OF_TILE = "... tile word row quarter -> ... (tile quarter row) word"
PAGE, TURNED_PAGE = "(page quarter row) word", "(page row quarter) word"
HOPPER, ROWS_OF_HOPPER = "expert a d c (b e)", "expert (a b c) (d e)"  # row 64 a + 16 b + c, group 4 d + e
INNER = {"row": 32, "quarter": 4}


def pack_ue8m0(scales: Tensor) -> Tensor:
    """Row-major E8M0 scales to DeepGEMM's packed words, by (1) and (2).

    Args:
        scales: [..., rows, groups], e8m0 or uint8 (its bits).

    Returns:
        int32 [..., rows, ceil(groups/4)] with strides (..., 1, align(rows, 4)).

    Raises:
        ArgumentError: another dtype or fewer than two dimensions; `encode_e8m0` turns numbers into codes.
    """
    return _column_major(_words(checks.e8m0_bits("scales", scales, ("...", "rows", "groups"))))


def unpack_ue8m0(packed: Tensor, groups: int) -> Tensor:
    """The inverse of `pack_ue8m0`.

    Args:
        packed: [..., rows, ceil(groups/4)], int32, any strides.
        groups: scales in a row.

    Returns:
        e8m0 [..., rows, groups], contiguous.

    Raises:
        ArgumentError: a number of groups that does not belong to the number of words.
    """
    checks.tensor("packed", packed, "int32", ("...", "rows", "words"))
    _check_groups(groups, packed.shape[-1])
    return _bytes(packed)[..., :groups].contiguous().view(torch.float8_e8m0fnu)


def align_mn_major(scales: Tensor) -> Tensor:
    """fp32 scales with the strides that DeepGEMM reads on SM90, by (4).

    Args:
        scales: [..., rows, groups], fp32.

    Returns:
        fp32, the same shape and values, strides (..., 1, align(rows, 4)).

    Raises:
        ArgumentError: another dtype or fewer than two dimensions.
    """
    checks.tensor("scales", scales, "fp32", ("...", "rows", "groups"))
    return _column_major(scales)


def swizzle_128x4(scales: Tensor) -> Tensor:
    """Row-major E8M0 scales to 128x4 tiles, by (1) and (3).

    Args:
        scales: [..., rows, groups], e8m0 or uint8 (its bits).

    Returns:
        int32 [..., ceil(rows/128), ceil(groups/4), 32, 4], contiguous; its flat uint8 view is FlashInfer's buffer.

    Raises:
        ArgumentError: another dtype or fewer than two dimensions; `encode_e8m0` turns numbers into codes.
    """
    return _tiles(_words(checks.e8m0_bits("scales", scales, ("...", "rows", "groups"))))


def unswizzle_128x4(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    """The inverse of `swizzle_128x4`.

    Args:
        swizzled: [..., ceil(rows/128), ceil(groups/4), 32, 4], int32; or FlashInfer's buffer,
            uint8 [ceil(rows/128) * 512 * ceil(groups/4)].
        rows: rows without pads.
        groups: scales in a row, without pads.

    Returns:
        e8m0 [..., rows, groups], contiguous.

    Raises:
        ArgumentError: sizes that do not belong together.
    """
    checks.tensor("swizzled", swizzled, ("int32", "uint8"))
    checks.at_least("rows", rows, 0)
    checks.at_least("groups", groups, 0)
    tiles, words = align(rows, TILE_ROWS) // TILE_ROWS, align(groups, WORD_GROUPS) // WORD_GROUPS
    if swizzled.dtype == torch.uint8:
        checks.tensor("swizzled", swizzled, "uint8", (tiles * 512 * words,))
        by_byte = swizzled.reshape(tiles, words, 32, 4, 4)
    else:
        checks.tensor("swizzled", swizzled, "int32", ("...", tiles, words, 32, 4))
        by_byte = rearrange(_bytes(swizzled), "... (quarter byte) -> ... quarter byte", byte=4)
    by_row = rearrange(by_byte, "... tile word row quarter byte -> ... (tile quarter row) (word byte)")
    return by_row[..., :rows, :groups].contiguous().view(torch.float8_e8m0fnu)


def packed_to_128x4(packed: Tensor) -> Tensor:
    """Packed words to 128x4 tiles: a permutation of words and zero rows, (2) to (3).

    Args:
        packed: [rows, words], int32, any strides.

    Returns:
        int32 [ceil(rows/128), words, 32, 4], contiguous.

    Raises:
        ArgumentError: another dtype or rank.
    """
    checks.tensor("packed", packed, "int32", ("rows", "words"))
    return _tiles(packed)


def packed_from_128x4(swizzled: Tensor, rows: int) -> Tensor:
    """128x4 tiles to packed words, (3) to (2).

    Args:
        swizzled: [ceil(rows/128), words, 32, 4], int32.
        rows: rows without pads.

    Returns:
        int32 [rows, words] with strides (1, align(rows, 4)).

    Raises:
        ArgumentError: rows that do not belong to the number of tiles.
    """
    checks.at_least("rows", rows, 0)
    checks.tensor("swizzled", swizzled, "int32", (align(rows, TILE_ROWS) // TILE_ROWS, "words", 32, 4))
    return _column_major(rearrange(swizzled, ROWS_OF_TILE)[:rows])


def zero_pad_rows(scales: Tensor, live_rows: int | Tensor, *, scale_layout: ScaleLayout | str) -> Tensor:
    """Scales whose rows from `live_rows` on are zero, with the pads of the layout.

    Args:
        scales: int32, packed [rows, words] of any strides, or 128x4 [tiles, words, 32, 4] (then rows = 128 tiles).
        live_rows: rows to keep, 0 to rows; an int, or an int32 or int64 tensor of one element on the device of the scales.
        scale_layout: packed or 128x4.

    Returns:
        int32, the same shape, in the strides of the layout.

    Raises:
        ArgumentError: another layout, or an int out of range. A tensor is not looked at: out of range it counts as the nearest bound.
    """
    layout = checks.choice("scale_layout", scale_layout, ScaleLayout)
    checks.one_of("scale_layout", str(layout), (ScaleLayout.PACKED, ScaleLayout.SWIZZLED_128X4))
    if layout is ScaleLayout.PACKED:
        words = checks.tensor("scales", scales, "int32", ("rows", "words"))
    else:
        words = rearrange(checks.tensor("scales", scales, "int32", ("tiles", "words", 32, 4)), ROWS_OF_TILE)
    rows = words.shape[0]
    checks.live_rows(live_rows, rows, "scales", scales)
    live = torch.arange(rows, device=scales.device)[:, None] < live_rows  # [rows, 1]
    kept = torch.where(live, words, 0)
    return _column_major(kept) if layout is ScaleLayout.PACKED else _tiles(kept)


def restride_rows(packed: Tensor, rows: int) -> Tensor:
    """Packed scales of n rows as packed scales of more rows, the new ones zero: A of (2) changes with the row count.

    Args:
        packed: [n, words], int32, any strides.
        rows: rows of the result, at least n.

    Returns:
        int32 [rows, words] with strides (1, align(rows, 4)).

    Raises:
        ArgumentError: fewer rows than there are.
    """
    checks.tensor("packed", packed, "int32", ("n", "words"))
    checks.at_least("rows", rows, packed.shape[0])
    return _column_major(pad(packed, (0, 0, 0, rows - packed.shape[0])))


def utccp_rows(packed: Tensor, *, inverse: bool = False) -> Tensor:
    """Packed scales with the rows of each 128-row page transposed: row m of a page goes to row 4 (m mod 32) + m div 32.

    Args:
        packed: [rows, words], int32, any strides, rows a multiple of 128.
        inverse: the way back: row 4 (m mod 32) + m div 32 goes to row m.

    Returns:
        int32 [rows, words] with strides (1, rows).

    Raises:
        ArgumentError: another number of rows.
    """
    checks.tensor("packed", packed, "int32", ("rows", "words"))
    checks.multiple("packed", packed.shape[0], TILE_ROWS, "It counts rows: restride_rows adds zero rows")
    before, after = (TURNED_PAGE, PAGE) if inverse else (PAGE, TURNED_PAGE)
    return _column_major(rearrange(packed, f"{before} -> {after}", **INNER))


def interleave_hopper_fp4(scales: Tensor) -> Tensor:
    """Expert scales in the order that FlashInfer's mixed-input product reads on SM90 (spec M 9.6).

    Args:
        scales: [experts, n, k/32], e8m0 or uint8 (its bits), n a multiple of 64, k of 128.

    Returns:
        uint8 [experts, n/64, k/128, 16, 16]: the scale of row 64 a + 16 b + c and group 4 d + e is at [a, d, c, 4 b + e].

    Raises:
        ArgumentError: other sizes.
    """
    bits = checks.e8m0_bits("scales", scales, ("experts", "n", "k/32"))
    checks.multiple("scales", scales.shape[1], 64, "n counts weight rows")
    checks.multiple("scales", scales.shape[2], WORD_GROUPS, "k/32 counts groups of 32")
    return rearrange(bits, f"{ROWS_OF_HOPPER} -> {HOPPER}", b=4, c=16, e=4).contiguous()


def deinterleave_hopper_fp4(interleaved: Tensor) -> Tensor:
    """The inverse of `interleave_hopper_fp4`.

    Args:
        interleaved: [experts, n/64, k/128, 16, 16], uint8, any strides.

    Returns:
        e8m0 [experts, n, k/32], contiguous.

    Raises:
        ArgumentError: another dtype or shape.
    """
    checks.tensor("interleaved", interleaved, "uint8", ("experts", "n/64", "k/128", 16, 16))
    return rearrange(interleaved, f"{HOPPER} -> {ROWS_OF_HOPPER}", b=4, e=4).contiguous().view(torch.float8_e8m0fnu)


def _words(bits: Tensor) -> Tensor:
    """(1): uint8 [..., rows, groups] to int32 [..., rows, ceil(groups/4)]."""
    groups = bits.shape[-1]
    padded = pad(bits.long(), (0, align(groups, WORD_GROUPS) - groups))
    first, second, third, fourth = (padded[..., j::WORD_GROUPS] for j in range(WORD_GROUPS))
    words = first + 2**8 * second + 2**16 * third + 2**24 * fourth  # 0 to 2^32 - 1
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def _bytes(words: Tensor) -> Tensor:
    """The inverse of (1): int32 [..., words] to uint8 [..., 4 words]."""
    unsigned = words.long() % 2**32
    return torch.stack([unsigned // 256**j % 256 for j in range(WORD_GROUPS)], -1).flatten(-2).to(torch.uint8)


def _column_major(values: Tensor) -> Tensor:
    """[..., rows, columns] with strides (..., 1, align(rows, 4)), pads zero."""
    *batch, rows, columns = values.shape
    aligned = align(rows, TMA_BYTES // values.element_size())
    memory = values.new_zeros(*batch, columns, aligned)
    memory[..., :rows] = values.transpose(-1, -2)
    return memory.transpose(-1, -2)[..., :rows, :]


def _tiles(words: Tensor) -> Tensor:
    """(3): int32 [..., rows, words] to int32 [..., tiles, words, 32, 4]."""
    rows = words.shape[-2]
    return rearrange(pad(words, (0, 0, 0, align(rows, TILE_ROWS) - rows)), TILE, **INNER).contiguous()


def _check_groups(groups: int, words: int) -> None:
    checks.at_least("groups", groups, 0)
    if align(groups, WORD_GROUPS) != words * WORD_GROUPS:
        raise ArgumentError("groups", str(groups), f"{words} words hold {max(0, 4 * words - 3)} to {4 * words} groups")
