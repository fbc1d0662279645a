"""Records of the KV cache on the inductor and eager paths: what is compiled, and how records get into pages and out of them.

Bodies turn rows into records (uint8 [rows, token_bytes]: data, then scales) and back, bytes by integer arithmetic. Pages are seen as two
strided views, of data and of scales, [pages, P, bytes], in 64-bit words where every address allows it: views keep the offset and strides
that the caller's pages have. Rows of one slot are told apart before anything is written: on the CPU by a dictionary, elsewhere by sorting
slot * rows + row, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import bits, groups
from dsv4.fast.row_bodies import norm_rope_body
from dsv4.formats import AMAX_FLOORS, FP4_E4M3_AMAX_FLOOR, KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import code_bytes

Run = Callable[..., Any]

NO_SLOT = 2**62  # above slot * rows of any cache


def quantize_body(kv: Tensor, floor: Tensor, *, layout: str, zeroes: bool) -> Tensor:
    """Records of bf16 rows. `floor` as in `dsv4.fast.groups`; `zeroes`: scale byte 0 zeroes its codes.

    Rows stay the first dimension throughout: inductor takes [rows, 448] as [7 rows, 64] for a sign that there is one row.
    """
    chosen = KV_LAYOUTS[layout]
    grouped = _grouped(kv[:, : chosen.quantised], chosen).to(torch.float32)  # [rows, groups, group]
    pieces = []
    if chosen.scale == "unit":
        pieces.append(bits.encode_e4m3(grouped).to(torch.uint8).flatten(1, 2))
    else:
        kind = "fp8" if chosen.scale == "ue8m0" else "fp4_e4m3"
        stored, _, quotients = groups.scaled(grouped, floor, kind, "divide", False, zeroes)
        if chosen.numbers == "e4m3":
            pieces.append(bits.encode_e4m3(quotients).to(torch.uint8).flatten(1, 2))
        else:
            pieces.append(bits.pack_pairs(bits.encode_e2m1(quotients, "even", "kept").to(torch.uint8).flatten(1, 2), "low_first"))
    if chosen.quantised < chosen.dims:
        halves = kv[:, chosen.quantised :].view(torch.int16)
        pieces.append(torch.stack([halves & 0xFF, (halves >> 8) & 0xFF], -1).to(torch.uint8).flatten(1, 2))
    if chosen.groups:
        pieces.append(stored.to(torch.uint8).flatten(1, 2))
    if chosen.groups < chosen.scale_bytes:
        pieces.append(kv.new_zeros((kv.shape[0], chosen.scale_bytes - chosen.groups), dtype=torch.uint8))
    return torch.cat(pieces, 1)


def norm_rope_quantize_body(
    kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, floor: Tensor, *, eps: float, layout: str, zeroes: bool
) -> Tensor:
    """Records of rows on their way into the cache. weight [1, dims]; eps an fp32 number."""
    torch._check(positions.shape[0] == kv.shape[0])
    return quantize_body(norm_rope_body(kv, table, positions, weight[0], eps=eps), floor, layout=layout, zeroes=zeroes)


def decode_body(records: Tensor, present: Tensor, *, layout: str) -> Tensor:
    """bf16 [rows, dims] of records, zero where a row is not present."""
    chosen = KV_LAYOUTS[layout]
    torch._check(present.shape[0] == records.shape[0])
    if chosen.scale == "unit":
        return torch.where(present[:, None], records.view(torch.float8_e4m3fn).to(torch.bfloat16), 0.0)
    wide = code_bytes(chosen)
    codes = records[:, :wide].to(torch.int32)
    if chosen.numbers == "e2m1":
        numbers = bits.decode_e2m1(torch.stack([codes & 15, codes >> 4], -1).flatten(1, 2))
    else:
        numbers = bits.decode_e4m3(codes)
    if chosen.groups:
        scales = records[:, chosen.data_bytes : chosen.data_bytes + chosen.groups].to(torch.int32)
        factors = bits.decode_e8m0(scales) if chosen.scale == "ue8m0" else bits.decode_e4m3(scales)
        numbers = (_grouped(numbers, chosen) * factors[:, :, None]).flatten(1, 2)
    rows = numbers.to(torch.bfloat16)
    if chosen.quantised < chosen.dims:
        halves = records[:, wide : chosen.data_bytes].unflatten(1, (chosen.dims - chosen.quantised, 2)).to(torch.int32)
        rows = torch.cat([rows, (halves[..., 0] | (halves[..., 1] << 8)).to(torch.int16).view(torch.bfloat16)], 1)
    return torch.where(present[:, None], rows, 0.0)


def _grouped(numbers: Tensor, chosen: KVLayout) -> Tensor:
    grouped: Tensor = numbers.unflatten(1, (chosen.quantised // chosen.group, chosen.group))
    return grouped


def page_slots_body(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    """int64 [rows], -1 where anything is out of range: where clamping to the range changes it."""
    if torch.compiler.is_compiling():
        torch._check(requests.shape[0] == indices.shape[0])
    count, width = block_table.shape
    request, index = requests.long(), indices.long()
    column = torch.div(index, page_size, rounding_mode="floor")
    row, entry = request.clamp(0, count - 1), column.clamp(0, width - 1)
    page = block_table[row, entry]
    absent = (row != request) | (entry != column) | (page < 0)
    return torch.add(index, page - column, alpha=page_size).masked_fill_(absent, -1)


def floor_of(chosen: KVLayout, amax_floor: str, device: torch.device) -> tuple[Tensor, bool]:
    """What keeps a scale from zero, as the bodies take it, and whether byte 0 zeroes its codes."""
    if chosen.scale != "ue8m0":
        return torch.full((), FP4_E4M3_AMAX_FLOOR, dtype=torch.float32, device=device), False
    floor = AMAX_FLOORS[amax_floor]
    return torch.full((), floor.least_byte_fp8 or 0, dtype=torch.int32, device=device), floor.zero_byte_zeroes_codes


def parts(pages: Tensor, chosen: KVLayout, page_size: int) -> tuple[tuple[Tensor, int, int], ...]:
    """Views [pages, page_size, bytes] of the data and the scales, each with its first byte in a record and the one past its last."""
    data, scales, every = chosen.data_bytes, chosen.scale_bytes, chosen.token_bytes
    if chosen.inline:
        records = pages[:, : page_size * every].unflatten(1, (page_size, every))
        views = records[..., :data], records[..., data:]
    else:
        views = (
            pages[:, : page_size * data].unflatten(1, (page_size, data)),
            pages[:, page_size * data : page_size * every].unflatten(1, (page_size, scales)),
        )
    return ((views[0], 0, data), (views[1], data, every)) if scales else ((views[0], 0, data),)


def put(records: Tensor, pages: Tensor, slots: Tensor, chosen: KVLayout, page_size: int) -> None:
    """Write records into their slots; of rows with the same slot the last one, of absent slots none."""
    if not records.shape[0] or not pages.shape[0]:
        return
    total = pages.shape[0] * page_size
    chosen_rows = _by_dictionary if slots.device.type == "cpu" else _by_sorting
    records, kept = chosen_rows(records, pages, slots, total, chosen, page_size)
    place = torch.div(kept, page_size, rounding_mode="floor"), kept % page_size
    for view, first, past in parts(pages, chosen, page_size):
        target, source = words(view, records[:, first:past])
        target.index_put_(place, source)


def _by_dictionary(records: Tensor, pages: Tensor, slots: Tensor, total: int, *_: Any) -> tuple[Tensor, Tensor]:
    """The records to write and their slots, each once."""
    last = {slot: row for row, slot in enumerate(slots.tolist()) if 0 <= slot < total}
    if len(last) == records.shape[0]:
        return records, slots.long()
    return records[torch.tensor(list(last.values()), dtype=torch.int64)], torch.tensor(list(last), dtype=torch.int64)


def _by_sorting(records: Tensor, pages: Tensor, slots: Tensor, total: int, chosen: KVLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """As many records as there are rows. Every row of a slot writes its last row's record, a row without a slot repeats another row, and if
    no row has one, all write slot 0 as it is."""
    rows = records.shape[0]
    slot = slots.long()
    present, first = (slot >= 0) & (slot < total), slot * rows
    keys = torch.where(present, first + torch.arange(rows, device=slot.device), -1).sort().values
    last = keys[torch.searchsorted(keys, torch.where(present, first + rows, NO_SLOT)) - 1]
    old = torch.cat([view[:1, 0] for view, _, _ in parts(pages, chosen, page_size)], 1)
    source = torch.where(last < 0, rows, last % rows)
    return torch.cat([records, old])[source], torch.div(last, rows, rounding_mode="floor").clamp(min=0)


def get(pages: Tensor, slots: Tensor, chosen: KVLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """Records of slots [rows] int64 and whether they exist; in place of those that do not, the first or last record. There is a page."""
    known = slots.clamp(0, pages.shape[0] * page_size - 1)
    place = torch.div(known, page_size, rounding_mode="floor"), known % page_size
    found = [words(view)[0][place].view(torch.uint8) for view, _, _ in parts(pages, chosen, page_size)]
    return torch.cat(found, 1) if len(found) > 1 else found[0], known == slots


def all_records(pages: Tensor, chosen: KVLayout, page_size: int) -> Tensor:
    """Records of every slot in order."""
    return torch.cat([view.flatten(0, 1) for view, _, _ in parts(pages, chosen, page_size)], 1)


def paged(records: Tensor, chosen: KVLayout, page_size: int) -> Tensor:
    """Pages of records in order, zero elsewhere."""
    count = records.shape[0]
    pages = records.new_zeros(-(-count // page_size), chosen.page_bytes(page_size))
    whole, rest = divmod(count, page_size)
    for view, first, past in parts(pages, chosen, page_size):
        view[:whole].copy_(records[: whole * page_size, first:past].unflatten(0, (whole, page_size)))
        if rest:
            view[whole, :rest] = records[whole * page_size :, first:past]
    return pages


def words(*views: Tensor) -> tuple[Tensor, ...]:
    """Views of bytes as 64-bit words, where all of them can be."""
    fits = all(
        not (view.data_ptr() % 8 or view.storage_offset() % 8 or view.shape[-1] % 8 or any(stride % 8 for stride in view.stride()[:-1]))
        for view in views
    )
    return tuple(view.view(torch.int64) for view in views) if fits else views
