"""The cache of keys and values: one row of 512 numbers a token, quantised, in pages.

A page holds P slots; the slot of number s is slot i = s mod P of page s div P. A token's record is its data, then its scales:

    data    codes of the first n dims, then the other dims in bf16, little-endian             (1)
    scales  one byte a group of g codes, then padding bytes, which are 0                      (2)

    layout                      n     g    codes           scales              bytes of data, scales
    v4                          448   64   E4M3            UE8M0               576   8 (7 and one of padding)
    v41, v41_inline             512   32   E4M3            UE8M0               512   16
    v41_fp4, v41_fp4_inline     512   16   E2M1, two a byte, the even dim low  256   32
                                           E4M3 scale, amax / 6
    uniform_fp8                 512        E4M3            1                   512   0

    planar   the data of slot i begins at byte i D of its page, its scales at P D + i S       (3)
    inline   the data of slot i begins at i (D + S), its scales at i (D + S) + D              (4)

D, S the bytes of data and scales. A page is padded to a multiple of `KVLayout.stride_multiple`; in a planar page the last axis of a view
[pages, P, D + S] is therefore no record. Groups are quantised as in `dsv4.reference.quantization`, ties to even, zeros keep their sign;
uniform_fp8 is the plain saturating cast. Reading gives code times scale as bf16, which is exact for normal results:

    row = bf16( code scale ), or the stored bf16                                              (5)

A slot outside 0 .. pages P - 1 is absent: it is not written, and reads as a row of zeros. Of rows with the same slot the last one is
stored. What no row's record covers keeps its bytes: other slots and the padding of pages.

Keys on their way into the cache: bf16( rms_norm ) -> bf16( rotation ) -> record. Bytes are bytes in every mode of `numerics`; rows that
come in fp64 under `unrounded` are rounded by the quantiser alone, and to bf16 where bf16 is stored. Source: spec A 3.2 to 3.4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import kv_checks
from dsv4.formats import KVLayout
from dsv4.kv_layouts import code_bytes, explain_layout
from dsv4.reference.codecs import decode_e4m3, encode_e4m3
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import bf16_dtypes, quantiser_step
from dsv4.reference.quantization import dequantize, quantize_fp4_e4m3, quantize_fp8
from dsv4.reference.rotary import apply_rope

__all__ = [
    "convert_layout",
    "explain_layout",
    "load_kv",
    "norm_rope_store_kv",
    "page_slots",
    "quantize_kv",
    "store_kv",
]


def quantize_kv(kv: Tensor, *, layout: str, amax_floor: str = "official") -> Tensor:
    """Records of rows, by (1) and (2).

    Args:
        kv: [tokens, dims], bf16; dims of the layout, 512.
        layout: a name of `dsv4.formats.KV_LAYOUTS`.
        amax_floor: of the layouts with UE8M0 scales: official, sglang, sglang_packer, flashmla, none or flashinfer. The others have one.

    Returns:
        uint8 [tokens, token_bytes]. A group with NaN or Inf gets scale byte 255 (E4M3 scale: 0x7F) and codes 0x7F (E2M1: 0).

    Raises:
        ArgumentError: a wrong dtype or shape, an unknown layout, a floor that the layout does not have.
    """
    chosen = kv_checks.quantize(kv, layout, amax_floor, bf16_dtypes())
    numbers, rest = kv[:, : chosen.quantised], kv[:, chosen.quantised :]
    bf16 = rest.detach().to(torch.bfloat16)[..., None].view(torch.uint8).flatten(1)  # [tokens, 2 (dims - n)]
    if chosen.scale == "unit":
        return torch.cat([encode_e4m3(quantiser_step(torch.clone, numbers)).view(torch.uint8), bf16], 1)
    if chosen.numbers == "e4m3":
        codes, scales = quantize_fp8(numbers, chosen.group, amax_floor=amax_floor)
    else:
        codes, scales = quantize_fp4_e4m3(numbers, chosen.group)
    padding = (0, chosen.scale_bytes - chosen.groups)
    return torch.cat([codes.view(torch.uint8), bf16, pad(scales.view(torch.uint8), padding)], 1)


def store_kv(kv: Tensor, pages: Tensor, slots: Tensor, *, layout: str, page_size: int, amax_floor: str = "official") -> Tensor:
    """Pages with these rows in their slots, by (1) to (4).

    Args:
        kv: [tokens, dims] bf16, or records of `quantize_kv`, [tokens, token_bytes] uint8.
        pages: [pages, stride], uint8; stride at least page_size * token_bytes, the bytes of a page next to each other.
        slots: [tokens], int64 or int32, counted through all pages; absent ones are skipped.
        layout, amax_floor: as in `quantize_kv`.
        page_size: slots of a page.

    Returns:
        uint8 [pages, stride], a new tensor.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, an unknown layout, a floor that the layout does not have.

    Notes:
        Of rows with the same slot the last one is stored. Only the bytes of these slots change.
    """
    chosen = kv_checks.store(kv, pages, slots, layout, page_size, amax_floor, bf16_dtypes())
    records = kv if kv.dtype == torch.uint8 else quantize_kv(kv, layout=layout, amax_floor=amax_floor)
    rows = _rows_to_store(slots, pages.shape[0] * page_size)
    return pages.index_put(_places(slots[rows], chosen, page_size), records[rows])


def load_kv(pages: Tensor, slots: Tensor, *, layout: str, page_size: int) -> Tensor:
    """The rows in these slots, by (3) to (5).

    Args:
        pages: [pages, stride], uint8, as `store_kv` takes them.
        slots: any shape, int64 or int32, counted through all pages.
        layout: a name of `dsv4.formats.KV_LAYOUTS`.
        page_size: slots of a page.

    Returns:
        bf16 [*slots.shape, dims]. Absent slots give zeros and are never read. A NaN code or scale gives NaN.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, an unknown layout.
    """
    chosen = kv_checks.load(pages, slots, layout, page_size)
    present = _present(slots, pages.shape[0] * page_size)
    rows = _decode(pages[_places(slots[present], chosen, page_size)], chosen)  # [present, dims]
    zeros = torch.zeros(*slots.shape, chosen.dims, dtype=torch.bfloat16, device=pages.device)
    return zeros.masked_scatter(present[..., None], rows)


def convert_layout(pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None) -> Tensor:
    """The same slots in pages of another layout or size.

    Args:
        pages: [pages, stride], uint8, as `store_kv` takes them.
        source, target: names of `dsv4.formats.KV_LAYOUTS`.
        page_size: slots of a page of `source`.
        target_page_size: slots of a page of `target`; None for as many.

    Returns:
        uint8 [ceil(slots / target_page_size), page_bytes of the target], a new tensor. Its padding, and slots that `pages` do not have,
        are zero.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, an unknown layout, a page size below 1.

    Notes:
        Between layouts of the same numbers records move byte for byte. Between others every slot is decoded to bf16 and quantised again
        with the official floor: what the target cannot hold is lost, and converting back does not restore the bytes.
    """
    have, want, size = kv_checks.convert(pages, source, target, page_size, target_page_size)
    slots = torch.arange(pages.shape[0] * page_size, device=pages.device)
    records = pages[_places(slots, have, page_size)]  # [slots, token_bytes]
    if not kv_checks.same_numbers(have, want):
        records = quantize_kv(_decode(records, have), layout=target)
    empty = pages.new_zeros(-(-len(slots) // size), want.page_bytes(size))
    return store_kv(records, empty, slots, layout=target, page_size=size)


def norm_rope_store_kv(
    kv: Tensor,
    weight: Tensor,
    table: Tensor,
    positions: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    eps: float,
    layout: str,
    page_size: int,
    amax_floor: str = "official",
) -> Tensor:
    """Keys into the cache: `rms_norm`, `apply_rope`, `store_kv`, rounded to bf16 after each of the first two.

    Args:
        kv: [tokens, dims], bf16: the projection wkv(x).
        weight: [dims], bf16 or fp32: of kv_norm.
        table: [positions, rotated], fp32, of `rope_table`.
        positions: [tokens], int64 or int32. A row whose position the table does not have is stored as zeros.
        pages, slots, layout, page_size, amax_floor: as in `store_kv`.
        eps: of the norm, >= 0.

    Returns:
        uint8 [pages, stride], a new tensor.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, eps < 0, and as `store_kv`.
    """
    kv_checks.norm_rope_store(kv, weight, table, positions, pages, slots, eps, layout, page_size, amax_floor, bf16_dtypes())
    rotated = apply_rope(rms_norm(kv, weight, eps=eps), table, positions)  # [tokens, dims]
    return store_kv(rotated, pages, slots, layout=layout, page_size=page_size, amax_floor=amax_floor)


def page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int) -> Tensor:
    """Slots of entries of requests: block_table[request, index div P] P + index mod P.

    Args:
        block_table: [requests, width], int32: the pages of each request in order, -1 where it has none.
        requests: [rows], int32.
        indices: [rows], int64: which entry of its request each row means.
        page_size: slots of a page, P.

    Returns:
        int64 [rows]; -1 where the request, the index, its column or its page does not exist.

    Raises:
        ArgumentError: wrong dtypes or shapes, page_size < 1.
    """
    kv_checks.page_slots(block_table, requests, indices, page_size)
    count, width = block_table.shape
    requests, indices = requests.long(), indices.long()
    known = (requests >= 0) & (requests < count) & (indices >= 0) & (indices // page_size < width)
    pages = torch.full_like(indices, -1).masked_scatter(known, block_table[requests[known], indices[known] // page_size].long())
    return torch.where(pages >= 0, pages * page_size + indices % page_size, -1)


def _present(slots: Tensor, capacity: int) -> Tensor:
    return (slots >= 0) & (slots.long() < capacity)


def _rows_to_store(slots: Tensor, capacity: int) -> Tensor:
    """Rows with a slot that exists and that no later row has. int64 [at most tokens]."""
    rows = torch.arange(len(slots), device=slots.device)[_present(slots, capacity)]
    distinct, which = slots[rows].unique(return_inverse=True)
    return torch.zeros_like(distinct, dtype=torch.int64).scatter_reduce(0, which, rows, "amax")


def _places(slots: Tensor, layout: KVLayout, page_size: int) -> tuple[Tensor, Tensor]:
    """Where records lie, by (3) and (4): their pages int64 [slots, 1], and their bytes in the page int64 [slots, token_bytes]."""
    page, slot = slots.long() // page_size, slots.long() % page_size
    first, second = (torch.arange(size, device=slots.device) for size in (layout.data_bytes, layout.scale_bytes))
    data = layout.data_offset(1, page_size) * slot[:, None] + first
    step = layout.scale_offset(1, page_size) - layout.scale_offset(0, page_size)
    scales = layout.scale_offset(0, page_size) + step * slot[:, None] + second
    return page[:, None], torch.cat([data, scales], 1)


def _decode(records: Tensor, layout: KVLayout) -> Tensor:
    """(5): bf16 [rows, dims]."""
    codes, bf16, scales = records.split([code_bytes(layout), layout.data_bytes - code_bytes(layout), layout.scale_bytes], 1)
    scales = scales[:, : layout.groups]
    match layout.scale:
        case "unit":
            numbers = decode_e4m3(codes).to(torch.bfloat16)
        case "ue8m0":
            numbers = dequantize(codes.view(torch.float8_e4m3fn), scales, layout.group)
        case "e4m3":
            numbers = dequantize(codes, scales.view(torch.float8_e4m3fn), layout.group)
    return torch.cat([numbers, bf16.contiguous().view(torch.bfloat16)], 1)
