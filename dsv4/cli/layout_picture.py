"""The picture of `dsv4 layout explain`: the page as a strip of bytes, the token's data above it and its scales below, enlarged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Patch

from dsv4.formats import KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import LayoutBytes, LayoutExplanation

STRONG = {"codes": "#2166ac", "bf16 rope": "#1b7837", "scales": "#d6604d", "padding": "#777777"}
PALE = {"codes": "#d1e5f0", "bf16 rope": "#d9f0d3", "scales": "#fddbc7", "padding": "#e0e0e0"}
SHADES = {"codes": ("#2166ac", "#4393c3"), "scales": ("#d6604d", "#e58368")}  # of neighbouring groups
NAMES = {"codes": "codes", "bf16 rope": "bf16 (rope dims)", "scales": "scales", "padding": "padding"}


def picture(explained: LayoutExplanation) -> Figure:
    """The figure."""
    layout = KV_LAYOUTS[explained.layout]
    data = [row for row in explained.rows if row.part in ("codes", "bf16 rope")]
    scales = [row for row in explained.rows if row.part not in ("codes", "bf16 rope")]
    figure = Figure(figsize=(12, 5.6 if scales else 4.1), layout="constrained")
    figure.suptitle(_title(layout, explained), fontsize=11, fontweight="bold", x=0.01, ha="left")
    axes = figure.subplots(3 if scales else 2, 1, squeeze=False)[:, 0]
    _page(axes[1], layout, explained)
    _enlarged(axes[0], data, f"data of token {explained.token}")
    _connect(figure, (axes[0], 0), (axes[1], 1), data)
    if scales:
        _enlarged(axes[2], scales, f"scales of token {explained.token}, one byte a group")
        _connect(figure, (axes[2], 1), (axes[1], 0), scales)
    parts = dict.fromkeys(row.part for row in (*data, *scales, explained.page_padding) if row.stop > row.start)
    handles = [Patch(color=STRONG[part], label=NAMES[part]) for part in parts]
    handles.append(Patch(color=PALE["codes"], label="other slots (pale)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _page(axis: Any, layout: KVLayout, explained: LayoutExplanation) -> None:
    """Every slot pale, the token strong."""
    size, padding = explained.page_size, explained.page_padding
    if layout.inline:
        for slot in range(size):
            _bar(axis, layout.data_offset(slot, size), layout.data_bytes, PALE["codes"])
            _bar(axis, layout.scale_offset(slot, size), layout.scale_bytes, PALE["scales"])
    else:
        _bar(axis, 0, size * layout.data_bytes, PALE["codes"])
        _bar(axis, size * layout.data_bytes, size * layout.scale_bytes, PALE["scales"])
    _bar(axis, padding.start, padding.stop - padding.start, STRONG["padding"])
    for row in explained.rows:
        _bar(axis, row.start, row.stop - row.start, STRONG[row.part], least=explained.page_bytes / 900)
    _finish(axis, 0, explained.page_bytes, f"the whole page: {explained.page_bytes} bytes")


def _title(layout: KVLayout, explained: LayoutExplanation) -> str:
    inline, planar = "data and scales of each slot together", "data of all slots, then their scales"
    order = "" if not layout.scale_bytes else f", {inline if layout.inline else planar}"
    place = f"token {explained.token} is slot {explained.slot} of page {explained.page}"
    return f"{layout.name}: {explained.page_size} slots a page{order}; {place}"


def _connect(figure: Figure, one: tuple[Any, float], page: tuple[Any, float], rows: Sequence[LayoutBytes]) -> None:
    """Lines from an edge of an enlarged strip to where its bytes lie in the page."""
    for at in (rows[0].start, rows[-1].stop):
        ends = (at, one[1]), (at, page[1])
        line = ConnectionPatch(*ends, "data", "data", axesA=one[0], axesB=page[0], color="#999999", linewidth=0.8, linestyle=":", zorder=-1)
        figure.add_artist(line)


def _enlarged(axis: Any, rows: Sequence[LayoutBytes], title: str) -> None:
    """Some of the token's rows."""
    first, last = rows[0].start, rows[-1].stop
    for number, row in enumerate(rows):
        shades = SHADES.get(row.part, (STRONG[row.part],))
        _bar(axis, row.start, row.stop - row.start, shades[number % len(shades)])
        label, share = _label(row), (row.stop - row.start) / (last - first)
        turned = len(label) * 0.0085 > share
        axis.text((row.start + row.stop) / 2, 0.5, label, ha="center", va="center", color="white", fontsize=8, rotation=90 if turned else 0)
    _finish(axis, first, last, f"{title}: bytes {first} to {last - 1}")


def _label(row: LayoutBytes) -> str:
    if row.dims is None:
        return row.part
    dims = f"dims {row.dims[0]} to {row.dims[1] - 1}"
    return f"{dims}, bf16" if row.group is None else f"group {row.group}"


def _bar(axis: Any, start: float, width: float, color: str, *, least: float = 0.0) -> None:
    if width:
        axis.barh(0.5, max(width, least), left=start, height=1.0, color=color, linewidth=0)


def _finish(axis: Any, first: int, last: int, title: str) -> None:
    axis.set_xlim(first, last)
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.set_title(title, loc="left", fontsize=10, backgroundcolor="white", pad=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
