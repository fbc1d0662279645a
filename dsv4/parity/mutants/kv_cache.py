"""Wrong caches, many of them out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import KV_LAYOUTS, KVLayout
from dsv4.kv_checks import same_numbers
from dsv4.kv_layouts import code_bytes
from dsv4.parity.kv_bounds import byte_places
from dsv4.parity.mutants import Mutant, kv_chain, kv_records
from dsv4.reference import kv_cache as right
from dsv4.reference.codecs import encode_e4m3


def _store_by(
    places: Callable[[Tensor, KVLayout, int, int], Tensor],
    quantize: kv_records.Quantiser = right.quantize_kv,
    keep: Callable[..., Tensor] | None = None,
) -> Callable[..., Tensor]:
    """A store that puts records elsewhere (bytes from the first page on), makes others, or keeps other rows."""

    def store(kv: Tensor, pages: Tensor, slots: Tensor, *, layout: str, page_size: int, amax_floor: str = "official") -> Tensor:
        chosen, capacity = KV_LAYOUTS[layout], pages.shape[0] * page_size
        records = kv if kv.dtype is torch.uint8 else quantize(kv, layout=layout, amax_floor=amax_floor)
        rows = right._rows_to_store(slots, capacity) if keep is None else keep(slots, capacity)
        at = places(slots[rows].long(), chosen, page_size, pages.shape[1])
        inside = (at >= 0) & (at < pages.numel())
        flat = pages.reshape(-1).clone()
        flat[at[inside]] = records[rows][inside]
        return flat.view(pages.shape)

    return store


def _other_arrangement(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    return byte_places(slots, replace(layout, inline=not layout.inline), page_size, stride)


def _dense_pages(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    return byte_places(slots, layout, page_size, page_size * layout.token_bytes)


def _scales_of_the_next(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    at = byte_places(slots, layout, page_size, stride)
    beside = byte_places(slots + 1, layout, page_size, stride)
    return torch.cat([at[:, : layout.data_bytes], beside[:, layout.data_bytes :]], 1)


def _one_layer_s_scales(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    """The scales of every page in the first one."""
    at = byte_places(slots, layout, page_size, stride)
    first = byte_places(slots % page_size, layout, page_size, stride)
    return torch.cat([at[:, : layout.data_bytes], first[:, layout.data_bytes :]], 1)


def _first_of_equals(slots: Tensor, capacity: int) -> Tensor:
    numbers = slots.tolist()
    found: dict[int, int] = {}
    for row, slot in enumerate(numbers):
        if 0 <= slot < capacity:
            found.setdefault(slot, row)
    return torch.tensor(list(found.values()), dtype=torch.int64)


def _store_of(slots_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A store to other slots."""

    def store(kv: Tensor, pages: Tensor, slots: Tensor, *, page_size: int, **options: Any) -> Tensor:
        capacity = pages.shape[0] * page_size
        return right.store_kv(kv, pages, slots_of(slots.long(), capacity), page_size=page_size, **options)

    return store


def _minus_one_is_the_last(slots: Tensor, capacity: int) -> Tensor:
    return torch.where(slots == -1, capacity - 1, slots)


def _clamped(slots: Tensor, capacity: int) -> Tensor:
    return slots.clamp(max=capacity - 1)


def _first_clamped(slots: Tensor, capacity: int) -> Tensor:
    return slots.clamp(min=0)


def _slot_zero_reserved(slots: Tensor, capacity: int) -> Tensor:
    return torch.where(slots == 0, -1, slots)


def _padding_cleared(kv: Tensor, pages: Tensor, slots: Tensor, *, layout: str, page_size: int, **options: Any) -> Tensor:
    stored = right.store_kv(kv, pages, slots, layout=layout, page_size=page_size, **options)
    stored[:, page_size * KV_LAYOUTS[layout].token_bytes :] = 0
    return stored


def _pages_cleared(kv: Tensor, pages: Tensor, slots: Tensor, *, page_size: int, **options: Any) -> Tensor:
    """A page that is written at all is written whole."""
    there = (slots >= 0) & (slots < pages.shape[0] * page_size)
    cleared = pages.clone()
    cleared[(slots[there].long() // page_size).unique()] = 0
    return right.store_kv(kv, cleared, slots, page_size=page_size, **options)


def _absolute_offset(kv: Tensor, pages: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """as_strided with the offset forgotten: the store goes to another layer."""
    stored = right.store_kv(kv, pages.as_strided(pages.shape, pages.stride(), 0), slots, **options)
    return stored if pages.storage_offset() == 0 else pages.clone()


def _int32_offsets(kv: Tensor, pages: Tensor, slots: Tensor, *, layout: str, page_size: int, **options: Any) -> Tensor:
    """Rows whose bytes end beyond 2^31 go nowhere."""
    ends = (slots.long() // page_size) * pages.stride(0) + pages.stride(0)
    near = torch.where(ends < 2**31, slots.long(), -1)
    return right.store_kv(kv, pages, near, layout=layout, page_size=page_size, **options)


def _load_with(places: Callable[[Tensor, KVLayout, int, int], Tensor]) -> Callable[..., Tensor]:
    """A load from elsewhere."""

    def load(pages: Tensor, slots: Tensor, *, layout: str, page_size: int) -> Tensor:
        chosen, there = KV_LAYOUTS[layout], (slots >= 0) & (slots < pages.shape[0] * page_size)
        at = places(slots[there].long(), chosen, page_size, pages.shape[1]).clamp(0, max(pages.numel() - 1, 0))
        rows = right._decode(pages.reshape(-1)[at], chosen)
        return torch.zeros(*slots.shape, chosen.dims, dtype=torch.bfloat16).masked_scatter(there[..., None], rows)

    return load


def _load_of(slots_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    def load(pages: Tensor, slots: Tensor, *, layout: str, page_size: int) -> Tensor:
        return right.load_kv(pages, slots_of(slots.long(), pages.shape[0] * page_size), layout=layout, page_size=page_size)

    return load


def _load_changed(change: Callable[[Tensor, KVLayout], Tensor]) -> Callable[..., Tensor]:
    """A load that takes records for others."""

    def load(pages: Tensor, slots: Tensor, *, layout: str, page_size: int) -> Tensor:
        chosen, flat = KV_LAYOUTS[layout], slots.reshape(-1)
        there = (flat >= 0) & (flat < pages.shape[0] * page_size)
        rows = pages[right._places(flat[there], chosen, page_size)]
        packed = pages.new_zeros(len(flat), chosen.token_bytes)
        packed[there] = change(rows, chosen)
        numbers = torch.where(there, torch.arange(len(flat)), -1)
        return right.load_kv(packed, numbers, layout=layout, page_size=1).view(*slots.shape, chosen.dims)

    return load


def _nibbles_read(records: Tensor, layout: KVLayout) -> Tensor:
    codes = records[:, : code_bytes(layout)]
    return kv_records.changed(records, layout, codes // 16 + codes % 16 * 16) if layout.numbers == "e2m1" else records


def _byte_0_is_zero(records: Tensor, layout: KVLayout) -> Tensor:
    """The scale built as byte << 23."""
    if layout.scale != "ue8m0":
        return records
    zero = (records[:, layout.data_bytes : layout.data_bytes + layout.groups] == 0).repeat_interleave(layout.group, 1)
    return kv_records.changed(records, layout, torch.where(zero, records[:, : code_bytes(layout)] & 0x80, records[:, : code_bytes(layout)]))


def _no_nan_scale(records: Tensor, layout: KVLayout) -> Tensor:
    if layout.scale != "ue8m0":
        return records
    return kv_records.changed(records, layout, scales=records[:, layout.data_bytes : layout.data_bytes + layout.groups].clamp(max=254))


def _eighth_scale(records: Tensor, layout: KVLayout) -> Tensor:
    """Scales of V4 read as if there were eight, the last first."""
    scales = records[:, layout.data_bytes :]
    return (
        kv_records.changed(records, layout, scales=scales.roll(1, 1)[:, : layout.groups]) if layout.groups < layout.scale_bytes else records
    )


def _fnuz_read(records: Tensor, layout: KVLayout) -> Tensor:
    """Half of each number, and NaN for minus zero."""
    if layout.numbers != "e4m3":
        return records
    numbers = records[:, : code_bytes(layout)].contiguous().view(torch.float8_e4m3fnuz).float()
    return kv_records.changed(records, layout, encode_e4m3(numbers).view(torch.uint8))


def _convert_by_numbers(pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None) -> Tensor:
    """Through bf16, always."""
    size = page_size if target_page_size is None else target_page_size
    slots = torch.arange(pages.shape[0] * page_size)
    empty = pages.new_zeros(-(-len(slots) // size), KV_LAYOUTS[target].page_bytes(size))
    rows = right.load_kv(pages, slots, layout=source, page_size=page_size)
    return right.store_kv(rows, empty, slots, layout=target, page_size=size)


def _page_size_kept(pages: Tensor, *, page_size: int, target_page_size: int | None = None, **options: Any) -> Tensor:
    return right.convert_layout(pages, page_size=page_size, **options)


def _partial_page_dropped(pages: Tensor, *, page_size: int, target_page_size: int | None = None, **options: Any) -> Tensor:
    size = target_page_size or page_size
    return right.convert_layout(pages, page_size=page_size, target_page_size=target_page_size, **options)[
        : pages.shape[0] * page_size // size
    ]


def _scales_left(pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None) -> Tensor:
    """Codes move, scales stay zero."""
    moved = right.convert_layout(pages, source=source, target=target, page_size=page_size, target_page_size=target_page_size)
    chosen, size = KV_LAYOUTS[target], target_page_size or page_size
    for slot in range(size):
        begin = chosen.scale_offset(slot, size)
        moved[:, begin : begin + chosen.scale_bytes] = 0
    return moved


def _tail_left(pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None) -> Tensor:
    """The last page keeps what the allocator left behind its last slot."""
    moved = right.convert_layout(pages, source=source, target=target, page_size=page_size, target_page_size=target_page_size)
    chosen, size, rows = KV_LAYOUTS[target], target_page_size or page_size, pages.shape[0] * page_size
    if rows % size:
        at = chosen.data_offset(rows % size, size)
        moved[-1, at : at + chosen.data_bytes] = 0xAB
    return moved


def _flashmla_conversion(pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None) -> Tensor:
    moved = right.convert_layout(pages, source=source, target=target, page_size=page_size, target_page_size=target_page_size)
    if KV_LAYOUTS[target].scale != "ue8m0" or same_numbers(KV_LAYOUTS[source], KV_LAYOUTS[target]):
        return moved
    slots, size = torch.arange(pages.shape[0] * page_size), target_page_size or page_size
    rows = right.load_kv(pages, slots, layout=source, page_size=page_size)
    return right.store_kv(rows, moved, slots, layout=target, page_size=size, amax_floor="flashmla")


def _last_page_of_minus_one(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    """-1 in the table taken for a page."""
    count, width = block_table.shape
    requests, indices = requests.long(), indices.long()
    known = (requests >= 0) & (requests < count) & (indices >= 0) & (indices // page_size < width)
    pages = block_table[torch.where(known, requests, 0), torch.where(known, indices // page_size, 0)].long()
    return torch.where(known, pages * page_size + indices % page_size, -1)


def _int32_slots(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    return right.page_slots(block_table, requests, indices, page_size=page_size).to(torch.int32).long()


def _columns_clamped(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    last = block_table.shape[1] * page_size - 1
    return right.page_slots(block_table, requests, indices.clamp(max=last), page_size=page_size)


def _requests_clamped(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    return right.page_slots(block_table, requests.clamp(0, block_table.shape[0] - 1), indices, page_size=page_size)


def _negative_wraps(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    wrapped = torch.where((indices < 0) & (indices >= -page_size), indices + block_table.shape[1] * page_size, indices)
    return right.page_slots(block_table, requests, wrapped, page_size=page_size)


def _transposed_table(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    flat = block_table.T.reshape(block_table.shape)
    return right.page_slots(flat, requests, indices, page_size=page_size)


def _numbered(*rows: tuple[str, Callable[..., Any], str, str]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(f"kv-{number:02}", "kv_cache", function, call, fault, source)
        for number, (function, call, fault, source) in enumerate(rows, 1)
    )


MUTANTS = _numbered(
    ("quantize_kv", kv_records.floor_scales, "scales rounded down", "QT-07"),
    ("quantize_kv", kv_records.groups_of_32, "scales of groups of 32 in the place of 64", ""),
    ("quantize_kv", kv_records.flashmla_floor, "the floor on the scale, whatever is asked for", ""),
    ("quantize_kv", kv_records.fnuz, "codes of the FNUZ dialect", "KV-03"),
    ("quantize_kv", kv_records.specials_as_numbers, "NaN and infinities taken for numbers", ""),
    ("quantize_kv", kv_records.rope_quantised, "the rope dims quantised too", ""),
    ("quantize_kv", kv_records.big_endian_rope, "bf16 with its high byte first", ""),
    ("quantize_kv", kv_records.all_of_v4_quantised, "an eighth scale in the padding byte", ""),
    ("quantize_kv", kv_records.nibbles, "the odd dim in the low nibble", ""),
    ("quantize_kv", kv_records.of_fp4(ties="toward_zero"), "FP4 midpoints toward zero", "QT-05"),
    ("quantize_kv", kv_records.of_fp4(zero_sign="cleared"), "minus zero loses its sign", ""),
    ("quantize_kv", kv_records.fp4_multiplied, "FP4 quotients by a product with 1/scale", ""),
    ("quantize_kv", kv_records.beyond_448_is_nan, "the plain cast without saturation", ""),
    ("store_kv", _store_by(_other_arrangement), "inline where planar is read, and the reverse", ""),
    ("store_kv", _store_by(_dense_pages), "pages without their padding: 584 P apart", ""),
    ("store_kv", _store_by(_scales_of_the_next), "scale bytes off by one slot", ""),
    ("store_kv", _store_by(_one_layer_s_scales), "the scales of all pages in the first one", "KV-01"),
    ("store_kv", _store_by(byte_places, keep=_first_of_equals), "of equal slots the first row", ""),
    ("store_kv", _store_by(byte_places, kv_records.floor_scales), "scales rounded down", "QT-07"),
    ("store_kv", _store_by(byte_places, kv_records.flashmla_floor), "the floor on the scale, whatever is asked for", ""),
    ("store_kv", _store_of(_minus_one_is_the_last), "-1 taken for the last slot", "KV-04"),
    ("store_kv", _store_of(_clamped), "slots past the last clamped to it", ""),
    ("store_kv", _store_of(_first_clamped), "negative slots clamped to 0", "KV-04"),
    ("store_kv", _store_of(_slot_zero_reserved), "slot 0 taken for a dummy", ""),
    ("store_kv", _padding_cleared, "the padding of pages overwritten", ""),
    ("store_kv", _pages_cleared, "other slots of a page cleared", ""),
    ("store_kv", _absolute_offset, "the storage offset of the pages dropped", "KV-01"),
    ("store_kv", _int32_offsets, "byte offsets of 32 bits", "KV-04"),
    ("load_kv", _load_with(_other_arrangement), "inline where planar was written, and the reverse", ""),
    ("load_kv", _load_with(_dense_pages), "pages without their padding: 584 P apart", ""),
    ("load_kv", _load_with(_scales_of_the_next), "scale bytes off by one slot", ""),
    ("load_kv", _load_of(_minus_one_is_the_last), "-1 reads the last slot", "KV-04"),
    ("load_kv", _load_of(_first_clamped), "-1 reads slot 0", ""),
    ("load_kv", _load_of(_clamped), "slots past the last read it", ""),
    ("load_kv", _load_changed(_nibbles_read), "the odd dim from the low nibble", ""),
    ("load_kv", _load_changed(_byte_0_is_zero), "scale byte 0 taken for 0", ""),
    ("load_kv", _load_changed(_no_nan_scale), "scale byte 255 taken for a number", "QT-03"),
    ("load_kv", _load_changed(_eighth_scale), "scales of V4 shifted by its padding byte", ""),
    ("load_kv", _load_changed(_fnuz_read), "codes of the FNUZ dialect", "KV-03"),
    ("convert_layout", _convert_by_numbers, "records decoded and quantised where they could move", ""),
    ("convert_layout", _page_size_kept, "the target's page size ignored", ""),
    ("convert_layout", _partial_page_dropped, "the last, partial page dropped", ""),
    ("convert_layout", _scales_left, "scales not moved", ""),
    ("convert_layout", _tail_left, "slots behind the last not cleared", ""),
    ("convert_layout", _flashmla_conversion, "another floor on the way", ""),
    ("page_slots", _last_page_of_minus_one, "-1 in the table taken for a page", "KV-04"),
    ("page_slots", _int32_slots, "slots of 32 bits", "KV-04"),
    ("page_slots", _columns_clamped, "entries past the table read its last column", ""),
    ("page_slots", _requests_clamped, "absent requests read another's pages", "CP-08"),
    ("page_slots", _negative_wraps, "negative entries count from the end", ""),
    ("page_slots", _transposed_table, "the table read column by column", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.norm_after_rope), "norm after the rotation", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.no_rounding_between), "no bf16 between norm and rotation", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.no_rope), "not rotated", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.halves), "pairs of the two halves", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.inverse_rope), "rotated backwards", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.first_dims), "the first dims rotated", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.next_position), "position 0 taken for 1", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.absent_as_zero_position), "absent positions taken for 0", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.weight_plus_one), "1 added to the weight", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.eps_dropped), "eps ignored", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.nope_norm), "the mean square without the rotated dims", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.usual, kv_records.floor_scales), "scales rounded down", "QT-07"),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.usual, kv_records.nibbles), "the odd dim in the low nibble", ""),
    ("norm_rope_store_kv", kv_chain.chain(kv_chain.usual, kv_records.rope_quantised), "the rope dims quantised too", ""),
    ("norm_rope_store_kv", kv_chain.skips_absent_positions, "rows without a position not stored", ""),
    ("norm_rope_store_kv", kv_chain.rows_at_their_positions, "stored by position instead of slot", ""),
)
