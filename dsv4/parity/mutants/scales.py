"""Wrong scale layouts, most of them out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.components.scales import whole_columns
from dsv4.parity.mutants import Mutant
from dsv4.reference import scales as right

WRITTEN = 128  # rows of a kernel that was only ever called with one tile


def _bits(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8)


def _big_endian(scales: Tensor) -> Tensor:
    bits = _bits(scales)
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 4))
    return right.pack_ue8m0(padded.unflatten(-1, (-1, 4)).flip(-1).flatten(-2))


def _planar(scales: Tensor) -> Tensor:
    bits = _bits(scales)
    padded = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 4))
    return right.pack_ue8m0(padded.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2))


def _numbers(scales: Tensor) -> Tensor:
    if scales.dtype is torch.float8_e8m0fnu:
        scales = scales.float().nan_to_num(0).clamp(max=255).to(torch.uint8)
    return right.pack_ue8m0(scales)


def _columns_not_aligned(scales: Tensor) -> Tensor:
    return right.pack_ue8m0(scales).transpose(-1, -2).contiguous().transpose(-1, -2)


def _pads_left(scales: Tensor) -> Tensor:
    packed = right.pack_ue8m0(scales)
    whole_columns(packed)[..., packed.shape[-2] :] = -1
    return packed


def _missing_groups_left(scales: Tensor) -> Tensor:
    bits = _bits(scales)
    return right.pack_ue8m0(torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 4), value=0xFF))


def _zero_for_some_rows(scales: Tensor) -> Tensor:
    tiles = right.swizzle_128x4(scales)
    return tiles if scales.shape[-2] % 32 else torch.zeros_like(tiles)


def _first_tile_alone(scales: Tensor) -> Tensor:
    tiles = right.swizzle_128x4(scales)
    tiles[..., 1:, :, :, :] = 0
    return tiles


def _div_and_mod_swapped(scales: Tensor) -> Tensor:
    shape = right.swizzle_128x4(scales).shape
    return right.swizzle_128x4(scales).view(*shape[:-2], 4, 32).transpose(-1, -2).contiguous()


def _dead_rows_left(scales: Tensor) -> Tensor:
    bits, rows = _bits(scales), scales.shape[-2]
    return right.swizzle_128x4(torch.nn.functional.pad(bits, (0, 0, 0, -rows % 128), value=0xFF))


def _strides_ignored(packed: Tensor, groups: int) -> Tensor:
    return right.unpack_ue8m0(packed.as_strided(packed.shape, torch.empty(packed.shape, device="meta").stride()), groups)


def _divided_toward_zero(packed: Tensor, groups: int) -> Tensor:
    parts = [torch.div(packed, 256**place, rounding_mode="trunc") % 256 for place in range(4)]
    return torch.stack(parts, -1).flatten(-2)[..., :groups].to(torch.uint8).contiguous().view(torch.float8_e8m0fnu)


def _nan_made_quiet(scales: Tensor) -> Tensor:
    return right.align_mn_major(scales.masked_fill(scales.isnan(), torch.nan))


def _rows_of_scales_kept(scales: Tensor) -> Tensor:
    return scales.contiguous()


def _linear_buffer(swizzled: Tensor, rows: int, groups: int) -> Tensor:
    if swizzled.dtype is not torch.uint8:
        return right.unswizzle_128x4(swizzled, rows, groups)
    return swizzled[: rows * groups].reshape(rows, groups).contiguous().view(torch.float8_e8m0fnu)


def _row_32_next_to_0(packed: Tensor) -> Tensor:
    tiles = right.packed_to_128x4(packed)
    return tiles.transpose(-1, -2).contiguous().view(tiles.shape)


def _tile_order_kept(swizzled: Tensor, rows: int) -> Tensor:
    words = swizzled.transpose(0, 1).flatten(1).t()[:rows]
    return right.restride_rows(words, rows)


def _one_row_more(scales: Tensor, live_rows: int | Tensor, *, scale_layout: str, out: Tensor | None = None) -> Tensor:
    rows = scales.shape[0] if scale_layout == "packed" else 128 * scales.shape[0]
    live = live_rows + 1 if isinstance(live_rows, Tensor) else min(live_rows + 1, rows)
    return _filled(right.zero_pad_rows(scales, live, scale_layout=scale_layout), out)


def _pads_kept(scales: Tensor, live_rows: int | Tensor, *, scale_layout: str, out: Tensor | None = None) -> Tensor:
    result = right.zero_pad_rows(scales, live_rows, scale_layout=scale_layout)
    if scale_layout == "packed" and scales.stride() == result.stride():
        whole_columns(result)[..., scales.shape[0] :] = whole_columns(scales)[..., scales.shape[0] :]
    return _filled(result, out)


def _rows_of_the_layout(scales: Tensor, live_rows: int | Tensor, *, scale_layout: str, out: Tensor | None = None) -> Tensor:
    if scale_layout == "packed":
        return _filled(right.zero_pad_rows(scales, live_rows, scale_layout=scale_layout), out)
    row = torch.arange(scales.shape[0] * 128, device=scales.device).reshape(-1, 1, 32, 4)  # as if rows lay one after another
    return _filled(torch.where(row < live_rows, scales, 0), out)


def _filled(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)


def _old_stride(packed: Tensor, rows: int) -> Tensor:
    grown = right.restride_rows(packed, rows)
    old = whole_columns(right.restride_rows(packed, packed.shape[0])).flatten()
    memory = whole_columns(grown)
    flat = memory.new_zeros(memory.numel())
    flat[: old.numel()] = old
    memory.copy_(flat.view(memory.shape))
    return grown


def _new_rows_stale(packed: Tensor, rows: int) -> Tensor:
    grown = right.restride_rows(packed, rows)
    grown[packed.shape[0] :] = 0x7F7F7F7F
    return grown


def _utccp_inverse(packed: Tensor, *, inverse: bool = False) -> Tensor:
    return right.utccp_rows(packed, inverse=not inverse)


def _first_page(packed: Tensor, *, inverse: bool = False) -> Tensor:
    result = right.restride_rows(packed, packed.shape[0])
    result[:WRITTEN] = right.utccp_rows(packed[:WRITTEN], inverse=inverse)
    return result


def _one_way(packed: Tensor, *, inverse: bool = False) -> Tensor:
    return right.utccp_rows(packed)


def _hopper_transposed(scales: Tensor) -> Tensor:
    return right.interleave_hopper_fp4(scales).transpose(-1, -2).contiguous()


def _hopper_flat(scales: Tensor) -> Tensor:
    experts, n, groups = scales.shape
    pages = _bits(scales).reshape(experts, n // 64, 64, groups // 4, 4)
    return pages.transpose(2, 3).reshape(experts, n // 64, groups // 4, 16, 16)


def _hopper_back_transposed(interleaved: Tensor) -> Tensor:
    return right.deinterleave_hopper_fp4(interleaved.transpose(-1, -2))


def _hopper_back_flat(interleaved: Tensor) -> Tensor:
    experts, n, k = interleaved.shape[:3]
    rows = interleaved.reshape(experts, n, k, 64, 4).transpose(2, 3)
    return rows.reshape(experts, 64 * n, 4 * k).view(torch.float8_e8m0fnu)


def _mutant(number: int, function: str, call: Callable[..., Any], fault: str, source: str = "") -> Mutant:
    return Mutant(f"scales-{number:02}", "scales", function, call, fault, source)


MUTANTS = (
    _mutant(1, "pack_ue8m0", _big_endian, "groups of a word from the top byte down"),
    _mutant(2, "pack_ue8m0", _planar, "planar groups for interleaved ones"),
    _mutant(3, "pack_ue8m0", _numbers, "e8m0 copied to uint8 as numbers", "QT-09"),
    _mutant(4, "pack_ue8m0", _columns_not_aligned, "columns not padded to 4 words"),
    _mutant(5, "pack_ue8m0", _pads_left, "pad words of columns left as they were", "LN-06"),
    _mutant(6, "pack_ue8m0", _missing_groups_left, "missing groups of the last word are NaN"),
    _mutant(7, "unpack_ue8m0", _strides_ignored, "strides of the input ignored", "LN-03"),
    _mutant(8, "unpack_ue8m0", _divided_toward_zero, "words with the top bit set divided toward zero"),
    _mutant(9, "align_mn_major", _nan_made_quiet, "NaN loses its payload"),
    _mutant(10, "align_mn_major", _rows_of_scales_kept, "row-major where column-major is read", "LN-03"),
    _mutant(11, "swizzle_128x4", _zero_for_some_rows, "all zeros for some numbers of rows", "LN-05"),
    _mutant(12, "swizzle_128x4", _first_tile_alone, "only the first 128 rows written"),
    _mutant(13, "swizzle_128x4", _div_and_mod_swapped, "row div 32 and row mod 32 swapped"),
    _mutant(14, "swizzle_128x4", _dead_rows_left, "rows past the last are NaN", "LN-06"),
    _mutant(15, "unswizzle_128x4", _linear_buffer, "a linear buffer where the swizzled one is given", "QT-17"),
    _mutant(16, "packed_to_128x4", _row_32_next_to_0, "rows and quarters of a tile transposed"),
    _mutant(17, "packed_from_128x4", _tile_order_kept, "words taken in the order of the tile"),
    _mutant(18, "zero_pad_rows", _one_row_more, "one dead row lives"),
    _mutant(19, "zero_pad_rows", _pads_kept, "pad words keep what they held", "LN-06"),
    _mutant(20, "zero_pad_rows", _rows_of_the_layout, "rows of a tile counted in memory order", "LN-06"),
    _mutant(21, "restride_rows", _old_stride, "columns keep the stride of fewer rows"),
    _mutant(22, "restride_rows", _new_rows_stale, "new rows are not zero"),
    _mutant(23, "utccp_rows", _utccp_inverse, "the inverse permutation"),
    _mutant(24, "utccp_rows", _first_page, "only the first 128 rows permuted"),
    _mutant(25, "interleave_hopper_fp4", _hopper_transposed, "rows and columns of a 16 x 16 tile transposed"),
    _mutant(26, "interleave_hopper_fp4", _hopper_flat, "64 rows after each other, no interleaving"),
    _mutant(27, "utccp_rows", _one_way, "the same permutation in both directions"),
    _mutant(28, "deinterleave_hopper_fp4", _hopper_back_transposed, "rows and columns of a 16 x 16 tile transposed"),
    _mutant(29, "deinterleave_hopper_fp4", _hopper_back_flat, "64 rows after each other, no interleaving"),
)
