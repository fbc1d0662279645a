"""Where the scales of a tensor lie in memory: the compiled twin of `dsv4.reference.scales`.

No layout takes a packed word apart, so all functions here are one: int32 words move from a source to a target (`dsv4.fast.scale_words`).
Row-major E8M0 bytes are read as words where their strides allow it and are copied once into whole words where not. `dsv4.fast.scales_ops`
holds operators and tables. Source: spec A 8, M 9.6 and 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.fast.scale_words import HOPPER_ROWS
from dsv4.fast.scales_ops import empty_packed
from dsv4.formats import TILE_ROWS, WORD_GROUPS, align
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


def pack_ue8m0(scales: Tensor, *, impl: str | None = None) -> Tensor:
    """Row-major E8M0 scales to DeepGEMM's packed words (spec A 8.1).

    Args:
        scales: [..., rows, groups], e8m0 or uint8 (its bits), any strides.
        impl: a backend to insist on.

    Returns:
        int32 [..., rows, ceil(groups/4)] with strides (..., 1, align(rows, 4)); pad words are zero.

    Raises:
        ArgumentError: another dtype.
        BackendUnavailable, Unsupported: `impl` cannot run here, or not on these arguments.
    """
    return _op("pack_ue8m0", checks.e8m0_bits("scales", scales, ("...", "rows", "groups")), impl)


def unpack_ue8m0(packed: Tensor, groups: int, *, impl: str | None = None) -> Tensor:
    """The inverse of `pack_ue8m0`.

    Args:
        packed: [..., rows, ceil(groups/4)], int32, any strides.
        groups: scales in a row.
        impl: a backend to insist on.

    Returns:
        e8m0 [..., rows, groups], contiguous.

    Raises:
        ArgumentError: a number of groups that does not belong to the number of words.
    """
    checks.tensor("packed", packed, "int32", ("...", "rows", "words"))
    checks.at_least("groups", groups, 0)
    words = packed.shape[-1]
    if align(groups, WORD_GROUPS) != words * WORD_GROUPS:
        raise ArgumentError("groups", str(groups), f"{words} words hold {max(0, 4 * words - 3)} to {4 * words} groups")
    return _op("unpack_ue8m0", packed, groups, impl).view(torch.float8_e8m0fnu)


def align_mn_major(scales: Tensor, *, impl: str | None = None) -> Tensor:
    """fp32 scales with the strides that DeepGEMM reads on SM90 (spec A 8.2).

    Args:
        scales: [..., rows, groups], fp32, any strides.
        impl: a backend to insist on.

    Returns:
        fp32, the same shape and bits, strides (..., 1, align(rows, 4)); pad words are zero.

    Raises:
        ArgumentError: another dtype, or a tensor that requires grad.
    """
    checks.tensor("scales", scales, "fp32", ("...", "rows", "groups"))
    checks.no_grad(scales=scales)
    return _op("align_mn_major", scales, impl)


def swizzle_128x4(scales: Tensor, *, impl: str | None = None) -> Tensor:
    """Row-major E8M0 scales to 128x4 tiles (spec A 8.3, 8.4).

    Args:
        scales: [..., rows, groups], e8m0 or uint8 (its bits), any strides.
        impl: a backend to insist on.

    Returns:
        int32 [..., ceil(rows/128), ceil(groups/4), 32, 4], contiguous, pads zero; its flat uint8 view is FlashInfer's buffer.

    Raises:
        ArgumentError: another dtype.
    """
    return _op("swizzle_128x4", checks.e8m0_bits("scales", scales, ("...", "rows", "groups")), impl)


def unswizzle_128x4(swizzled: Tensor, rows: int, groups: int, *, impl: str | None = None) -> Tensor:
    """The inverse of `swizzle_128x4`.

    Args:
        swizzled: [..., ceil(rows/128), ceil(groups/4), 32, 4], int32; or FlashInfer's buffer,
            uint8 [ceil(rows/128) * 512 * ceil(groups/4)].
        rows: rows without pads.
        groups: scales in a row, without pads.
        impl: a backend to insist on.

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
    else:
        checks.tensor("swizzled", swizzled, "int32", ("...", tiles, words, 32, 4))
    return _op("unswizzle_128x4", swizzled, rows, groups, impl).view(torch.float8_e8m0fnu)


def packed_to_128x4(packed: Tensor, *, impl: str | None = None) -> Tensor:
    """Packed words to 128x4 tiles: a permutation of words and zero rows (spec A 8.4).

    Args:
        packed: [rows, words], int32, any strides.
        impl: a backend to insist on.

    Returns:
        int32 [ceil(rows/128), words, 32, 4], contiguous.

    Raises:
        ArgumentError: another dtype or rank.
    """
    checks.tensor("packed", packed, "int32", ("rows", "words"))
    return _op("packed_to_128x4", packed, impl)


def packed_from_128x4(swizzled: Tensor, rows: int, *, impl: str | None = None) -> Tensor:
    """128x4 tiles to packed words.

    Args:
        swizzled: [ceil(rows/128), words, 32, 4], int32.
        rows: rows without pads.
        impl: a backend to insist on.

    Returns:
        int32 [rows, words] with strides (1, align(rows, 4)); pad words are zero.

    Raises:
        ArgumentError: rows that do not belong to the number of tiles.
    """
    checks.at_least("rows", rows, 0)
    checks.tensor("swizzled", swizzled, "int32", (align(rows, TILE_ROWS) // TILE_ROWS, "words", 32, 4))
    return _op("packed_from_128x4", swizzled, rows, impl)


def zero_pad_rows(
    scales: Tensor, live_rows: int | Tensor, *, scale_layout: ScaleLayout | str, out: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Scales whose rows from `live_rows` on are zero, with the pads of the layout.

    Args:
        scales: int32, packed [rows, words] of any strides, or 128x4 [tiles, words, 32, 4] (then rows = 128 tiles).
        live_rows: rows to keep, 0 to rows; an int, or an int32 or int64 tensor of one element on the device of the scales.
        scale_layout: packed or 128x4.
        out: where to put the result, of its shape and strides; `scales` itself to zero in place. Pad words behind its columns are written
            as far as its storage holds them.
        impl: a backend to insist on.

    Returns:
        int32, the same shape, in the strides of the layout; `out` if given.

    Raises:
        ArgumentError: another layout, an int out of range, or an `out` of another shape or strides. A tensor of live rows is not looked
            at: out of range it counts as the nearest bound.
    """
    layout = checks.choice("scale_layout", scale_layout, ScaleLayout)
    checks.one_of("scale_layout", str(layout), (ScaleLayout.PACKED, ScaleLayout.SWIZZLED_128X4))
    packed = layout is ScaleLayout.PACKED
    checks.tensor("scales", scales, "int32", ("rows", "words") if packed else ("tiles", "words", 32, 4))
    rows = scales.shape[0] if packed else scales.shape[0] * TILE_ROWS
    live = checks.live_rows(live_rows, rows, "scales", scales)
    kept = rows if isinstance(live_rows, Tensor) else live_rows
    if out is None:
        return _op("zero_pad_rows", scales, kept, live, str(layout), impl)
    _check_out(out, scales, packed)
    checks.writable("out", out)
    if out is not scales:
        out.copy_(scales.clone() if _may_overlap(out, scales) else scales)
    torch.ops.dsv4.zero_pad_rows_(out, kept, live, str(layout), impl)
    return out


def restride_rows(packed: Tensor, rows: int, *, impl: str | None = None) -> Tensor:
    """Packed scales of n rows as packed scales of more rows, the new ones zero: the column stride depends on the row count.

    Args:
        packed: [n, words], int32, any strides.
        rows: rows of the result, at least n.
        impl: a backend to insist on.

    Returns:
        int32 [rows, words] with strides (1, align(rows, 4)); rows from n on and pad words are zero.

    Raises:
        ArgumentError: fewer rows than there are.
    """
    checks.tensor("packed", packed, "int32", ("n", "words"))
    checks.at_least("rows", rows, packed.shape[0])
    return _op("restride_rows", packed, rows, impl)


def utccp_rows(packed: Tensor, *, inverse: bool = False, impl: str | None = None) -> Tensor:
    """Packed scales with the rows of each 128-row page transposed: row m of a page goes to row 4 (m mod 32) + m div 32.

    Args:
        packed: [rows, words], int32, any strides, rows a multiple of 128.
        inverse: the way back: row 4 (m mod 32) + m div 32 goes to row m.
        impl: a backend to insist on.

    Returns:
        int32 [rows, words] with strides (1, rows).

    Raises:
        ArgumentError: another number of rows.
    """
    checks.tensor("packed", packed, "int32", ("rows", "words"))
    checks.multiple("packed", packed.shape[0], TILE_ROWS, "It counts rows: restride_rows adds zero rows")
    return _op("utccp_rows", packed, inverse, impl)


def interleave_hopper_fp4(scales: Tensor, *, impl: str | None = None) -> Tensor:
    """Expert scales in the order that FlashInfer's mixed-input product reads on SM90 (spec M 9.6).

    Args:
        scales: [experts, n, k/32], e8m0 or uint8 (its bits), n a multiple of 64, k of 128.
        impl: a backend to insist on.

    Returns:
        uint8 [experts, n/64, k/128, 16, 16]: the scale of row 64 a + 16 b + c and group 4 d + e is at [a, d, c, 4 b + e].

    Raises:
        ArgumentError: other sizes.
    """
    bits = checks.e8m0_bits("scales", scales, ("experts", "n", "k/32"))
    checks.multiple("scales", scales.shape[1], HOPPER_ROWS, "n counts weight rows")
    checks.multiple("scales", scales.shape[2], WORD_GROUPS, "k/32 counts groups of 32")
    return _op("interleave_hopper_fp4", bits, impl)


def deinterleave_hopper_fp4(interleaved: Tensor, *, impl: str | None = None) -> Tensor:
    """The inverse of `interleave_hopper_fp4`.

    Args:
        interleaved: [experts, n/64, k/128, 16, 16], uint8, any strides.
        impl: a backend to insist on.

    Returns:
        e8m0 [experts, n, k/32], contiguous.

    Raises:
        ArgumentError: another dtype or shape.
    """
    checks.tensor("interleaved", interleaved, "uint8", ("experts", "n/64", "k/128", 16, 16))
    return _op("deinterleave_hopper_fp4", interleaved, impl).view(torch.float8_e8m0fnu)


def _op(name: str, *arguments: Any) -> Tensor:
    result: Tensor = getattr(torch.ops.dsv4, name)(*arguments)
    return result


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    return torch.compiler.is_compiling() or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _check_out(out: Tensor, scales: Tensor, packed: bool) -> None:
    checks.tensor("out", out, "int32", tuple(scales.shape))
    checks.same_device("out", out, "scales", scales)
    wanted = empty_packed(scales, *scales.shape) if packed else scales.new_empty(scales.shape)
    if any(have != want for size, have, want in zip(out.shape, out.stride(), wanted.stride(), strict=True) if size > 1):
        raise ArgumentError("out", f"strides {out.stride()}", f"must have the strides of the layout, {wanted.stride()}", "Leave out out")
