"""What is wrong with these bytes: confusions about the KV cache, tried one after another on pages whose rows are known.

A confusion is a writer: the records that it makes, and where it puts them. It explains a row if the pages hold just these bytes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4 import checks, kv_checks
from dsv4.formats import E8M0_NAN, KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import code_bytes
from dsv4.reference.codecs import decode_e8m0, encode_e4m3, encode_e8m0
from dsv4.reference.kv_cache import load_kv, quantize_kv

__all__ = ["Confusion", "detect_layout_mismatch"]

FNUZ_MAX = 240.0  # of the dialect that old ROCm cards have; its writers divide the largest magnitude by 224
FNUZ_LIMIT = 224.0


class Confusion(NamedTuple):
    """What a writer may have taken for something else, and how many of the wrong rows that explains."""

    name: str
    words: str
    share: float


class _Writer(NamedTuple):
    name: str
    words: str
    records: Tensor  # [rows, bytes]
    places: Tensor  # [rows, bytes], counted from the first page on


def detect_layout_mismatch(pages: Tensor, slots: Tensor, kv: Tensor, *, layout: str, page_size: int) -> tuple[Confusion, ...]:
    """Why pages do not decode to the rows that were stored in them.

    Args:
        pages: uint8 [pages, stride], as somebody's kernel wrote them.
        slots: [rows], int64 or int32: where the rows were meant to go. Absent ones are left out; of equal ones the last one counts.
        kv: bf16 [rows, dims], what was stored.
        layout: a name of `dsv4.formats.KV_LAYOUTS`, what the pages are meant to be.
        page_size: slots of a page.

    Returns:
        Nothing if every row decodes to what the official quantiser makes of it. Else the confusions that explain some of the rows that do
        not, best first; and at the end, if there are any, the rows that none explains, as `unexplained`.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, an unknown layout.
    """
    checks.tensor("slots", slots, ("int64", "int32"), ("rows",))
    chosen = kv_checks.load(pages, slots, layout, page_size)
    checks.tensor("kv", kv, "bf16", (slots.numel(), chosen.dims))
    capacity = pages.shape[0] * page_size
    last = {slot: row for row, slot in enumerate(slots.tolist()) if 0 <= slot < capacity}
    rows, numbers = kv[list(last.values())], torch.tensor(list(last), dtype=torch.int64)
    stored = quantize_kv(rows, layout=layout)
    got = load_kv(pages.cpu(), numbers, layout=layout, page_size=page_size)
    wanted = load_kv(stored.cpu(), torch.arange(len(stored)), layout=layout, page_size=1)
    wrong = ((got != wanted) & ~(got.isnan() & wanted.isnan())).any(1)
    if not bool(wrong.any()):
        return ()
    return _explained(pages.cpu(), rows[wrong.to(rows.device)].cpu(), numbers[wrong], chosen, page_size)


def _explained(pages: Tensor, kv: Tensor, slots: Tensor, layout: KVLayout, page_size: int) -> tuple[Confusion, ...]:
    pool = pages.reshape(-1)
    found, left = [], torch.ones(len(kv), dtype=torch.bool)
    for writer in _writers(kv, slots, layout, page_size, pages.shape[1]):
        inside = (writer.places >= 0) & (writer.places < pool.numel())
        hit = ((pool[writer.places.clamp(0, pool.numel() - 1)] == writer.records) & inside).all(1)
        left &= ~hit
        if bool(hit.any()):
            found.append(Confusion(writer.name, writer.words, float(hit.double().mean())))
    found.sort(key=lambda confusion: -confusion.share)
    if bool(left.any()):
        found.append(Confusion("unexplained", "none of the confusions that are tried", float(left.double().mean())))
    return tuple(found)


def _writers(kv: Tensor, slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Iterator[_Writer]:
    """Every confusion that this layout admits."""
    right, here = quantize_kv(kv, layout=layout.name), _places(slots, layout, page_size, stride)
    for other in KV_LAYOUTS.values():
        if other.name != layout.name:
            records, places = quantize_kv(kv, layout=other.name), _places(slots, other, page_size, stride)
            yield _writer(f"layout {other.name}", f"written as {other.name}", records, places, other)
    if layout.name == "v4":
        inline = _places(slots, replace(layout, inline=True), page_size, stride)
        words = f"records of {layout.token_bytes} bytes one after another, where data and scales lie apart"
        yield _writer("inline", words, right, inline, layout)
    if layout.page_bytes(page_size) != page_size * layout.token_bytes:
        dense = _places(slots, layout, page_size, page_size * layout.token_bytes)
        yield _writer("pages without padding", f"a page every {page_size * layout.token_bytes} bytes", right, dense, layout)
    for name, words, change in CHANGES:
        changed = change(kv, right, layout)
        if changed is not None:
            yield _writer(name, words, changed, here, layout)
    if layout.groups:
        step = layout.scale_offset(1, page_size) - layout.scale_offset(0, page_size)
        for name, words, bytes_off in (("scales one slot late", "next", step), ("scales one slot early", "previous", -step)):
            moved = torch.cat([here[:, : layout.data_bytes], here[:, layout.data_bytes :] + bytes_off], 1)
            yield _writer(name, f"each slot's scales lie where the {words} slot's belong", right, moved, layout)


def _writer(name: str, words: str, records: Tensor, places: Tensor, layout: KVLayout) -> _Writer:
    """Without the padding behind the scales, which is nobody's promise."""
    live = layout.data_bytes + layout.groups
    return _Writer(name, words, records[:, :live], places[:, :live])


def _places(slots: Tensor, layout: KVLayout, page_size: int, stride: int) -> Tensor:
    page, slot = slots[:, None] // page_size, slots[:, None] % page_size
    step = layout.scale_offset(1, page_size) - layout.scale_offset(0, page_size)
    data = layout.data_offset(1, page_size) * slot + torch.arange(layout.data_bytes)
    scales = layout.scale_offset(0, page_size) + step * slot + torch.arange(layout.scale_bytes)
    return page * stride + torch.cat([data, scales], 1)


def _rescaled(kv: Tensor, right: Tensor, layout: KVLayout, limit: float, rounding: str) -> tuple[Tensor, Tensor]:
    """Quotients [rows, groups, group] by another power of two, and its bytes [rows, groups]."""
    groups = kv[:, : layout.quantised].float().unflatten(1, (layout.groups, layout.group))
    amax = groups.abs().amax(-1).clamp(min=1e-4)
    scales = encode_e8m0((amax.double() / limit).float(), rounding=rounding)
    return groups / decode_e8m0(scales)[..., None], scales.view(torch.uint8)


def _with(right: Tensor, layout: KVLayout, codes: Tensor, scales: Tensor) -> Tensor:
    width, data = code_bytes(layout), layout.data_bytes
    return torch.cat([codes, right[:, width:data], scales, right[:, data + layout.groups :]], 1)


def _floor_scales(kv: Tensor, right: Tensor, layout: KVLayout) -> Tensor | None:
    if layout.scale != "ue8m0":
        return None
    quotients, scales = _rescaled(kv, right, layout, 448.0, "floor")
    return _with(right, layout, encode_e4m3(quotients).view(torch.uint8).flatten(1), scales)


def _fnuz(kv: Tensor, right: Tensor, layout: KVLayout) -> Tensor | None:
    if layout.scale != "ue8m0":
        return None
    quotients, scales = _rescaled(kv, right, layout, FNUZ_LIMIT, "ceil")
    codes = quotients.clamp(-FNUZ_MAX, FNUZ_MAX).to(torch.float8_e4m3fnuz)
    return _with(right, layout, codes.view(torch.uint8).flatten(1), scales)


def _flashmla_floor(kv: Tensor, right: Tensor, layout: KVLayout) -> Tensor | None:
    return quantize_kv(kv, layout=layout.name, amax_floor="flashmla") if layout.scale == "ue8m0" else None


def _nibbles(kv: Tensor, right: Tensor, layout: KVLayout) -> Tensor | None:
    if layout.numbers != "e2m1":
        return None
    codes = right[:, : code_bytes(layout)]
    return _with(right, layout, codes // 16 + codes % 16 * 16, right[:, layout.data_bytes : layout.data_bytes + layout.groups])


def _inverse_scales(kv: Tensor, right: Tensor, layout: KVLayout) -> Tensor | None:
    """The byte of 1 / scale."""
    if layout.scale != "ue8m0":
        return None
    scales = right[:, layout.data_bytes : layout.data_bytes + layout.groups].int()
    return _with(right, layout, right[:, : code_bytes(layout)], (E8M0_NAN - 1 - scales).clamp(0, E8M0_NAN).to(torch.uint8))


Change = Callable[[Tensor, Tensor, KVLayout], Tensor | None]
CHANGES: tuple[tuple[str, str, Change], ...] = (
    ("floor scales", "scales rounded down to a power of two, so that the largest values saturate", _floor_scales),
    ("flashmla floor", "the floor lies on the scale (bytes from 114 on) in the place of the amax (from 105)", _flashmla_floor),
    ("nibble order", "the odd dim of each pair in the low four bits", _nibbles),
    ("fnuz", "codes of the E4M3 dialect without a minus zero, whose numbers are half as large", _fnuz),
    ("inverse scales", "the byte of 1 / scale in the place of the scale's", _inverse_scales),
)
