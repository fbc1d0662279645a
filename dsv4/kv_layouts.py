"""Where the bytes of a token lie in a page: host data that exists once, re-exported by `dsv4.reference.kv_cache` and `dsv4.fast.kv_cache`.

    page = token div P,  slot = token mod P                            P slots a page
    codes of group g        data(slot) + g w .. + w - 1                w = group bytes of E4M3, group / 2 of E2M1
    bf16 of dim n           data(slot) + w groups + 2 (n - quantised), low byte first
    scale of group g        scale(slot) + g
    padding                 scale(slot) + groups .. scale_bytes - 1, and behind the last slot of the page

data() and scale() are `KVLayout.data_offset` and `scale_offset`. Source: spec A 3.4.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4 import checks, kv_checks
from dsv4.formats import KVLayout

__all__ = ["LayoutBytes", "LayoutExplanation", "code_bytes", "explain_layout"]


class LayoutBytes(NamedTuple):
    """Neighbouring bytes of a page: `start` to `stop` - 1."""

    part: str  # codes, bf16 rope, scales or padding
    start: int
    stop: int
    dims: tuple[int, int] | None = None  # first, last + 1: the dims that these bytes hold or scale
    group: int | None = None


class LayoutExplanation(NamedTuple):
    """Where a token lies: its page and slot, and its bytes in that page."""

    layout: str
    page_size: int
    token: int
    page: int
    slot: int
    page_start: int  # where the page begins, in bytes from the first page, pages without gaps
    page_bytes: int
    token_bytes: int
    rows: tuple[LayoutBytes, ...]
    page_padding: LayoutBytes  # behind the last slot; may be empty


def code_bytes(layout: KVLayout) -> int:
    """Bytes of a token's codes, from the first of its data bytes on."""
    return layout.quantised // 2 if layout.numbers == "e2m1" else layout.quantised


def explain_layout(layout: str, *, page_size: int = 64, token: int = 0) -> LayoutExplanation:
    """Where the bytes of one token lie in its page, and what they are.

    Args:
        layout: a name of `dsv4.formats.KV_LAYOUTS`.
        page_size: slots of a page.
        token: the slot, counted through all pages.

    Returns:
        LayoutExplanation; its rows are in the order of dims: codes of each group, bf16 dims, scales of each group, padding.

    Raises:
        ArgumentError: an unknown layout, page_size < 1, token < 0.
    """
    chosen = kv_checks.layout(layout)
    checks.at_least("page_size", page_size, 1)
    checks.at_least("token", token, 0)
    page, slot = divmod(token, page_size)
    size = chosen.page_bytes(page_size)
    padding = LayoutBytes("padding", page_size * chosen.token_bytes, size)
    rows = (*_data(chosen, chosen.data_offset(slot, page_size)), *_scales(chosen, chosen.scale_offset(slot, page_size)))
    return LayoutExplanation(layout, page_size, token, page, slot, page * size, size, chosen.token_bytes, rows, padding)


def _data(layout: KVLayout, start: int) -> list[LayoutBytes]:
    pieces = layout.quantised // layout.group
    width = code_bytes(layout) // pieces
    rows = [
        LayoutBytes("codes", start + g * width, start + (g + 1) * width, (g * layout.group, (g + 1) * layout.group), g)
        for g in range(pieces)
    ]
    if layout.quantised < layout.dims:
        rows.append(LayoutBytes("bf16 rope", start + code_bytes(layout), start + layout.data_bytes, (layout.quantised, layout.dims)))
    return rows


def _scales(layout: KVLayout, start: int) -> list[LayoutBytes]:
    rows = [LayoutBytes("scales", start + g, start + g + 1, (g * layout.group, (g + 1) * layout.group), g) for g in range(layout.groups)]
    if layout.groups < layout.scale_bytes:
        rows.append(LayoutBytes("padding", start + layout.groups, start + layout.scale_bytes))
    return rows
