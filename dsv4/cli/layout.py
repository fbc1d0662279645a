"""`dsv4 layout explain`: where the bytes of one token of the KV cache lie, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4.cli.output import CommandError, print_table, write_json

if TYPE_CHECKING:
    from dsv4.kv_layouts import LayoutExplanation

COLUMNS = ("group", "dims", "codes", "bytes in the page", "scale", "byte in the page")


def run(options: argparse.Namespace) -> int:
    """Explain a layout; the exit status is 0."""
    from dsv4.kv_layouts import explain_layout

    explained = explain_layout(options.layout, page_size=options.page_size, token=options.token)
    if options.picture:
        draw(explained, options.picture)
    if options.json:
        write_json(options.json, as_data(explained))
    else:
        print(in_words(explained))
        print_table(table(explained), COLUMNS)
    return 0


def as_data(explained: LayoutExplanation) -> dict[str, Any]:
    """An explanation as JSON: every row with its bytes, first and one past the last."""
    data = explained._asdict()
    return {**data, "rows": [row._asdict() for row in explained.rows], "page_padding": explained.page_padding._asdict()}


def in_words(explained: LayoutExplanation) -> str:
    """What the table does not say."""
    from dsv4.formats import KV_LAYOUTS

    layout, padding = KV_LAYOUTS[explained.layout], explained.page_padding
    lines = [
        f"{layout.name}: {layout.data_bytes} bytes of data and {layout.scale_bytes} of scales a token, "
        + ("scales behind each token's data" if layout.inline else "scales behind the data of the page"),
        f"token {explained.token}: slot {explained.slot} of page {explained.page}, which begins at byte {explained.page_start}",
        f"a page: {explained.page_size} slots, {explained.page_bytes} bytes, "
        + (f"of which {padding.start} to {padding.stop - 1} are padding" if padding.stop > padding.start else "no padding"),
    ]
    return "\n".join(lines)


def table(explained: LayoutExplanation) -> list[dict[str, Any]]:
    """A line for each group, for the bf16 dims, and for padding; by `COLUMNS`."""
    from dsv4.formats import KV_LAYOUTS

    layout = KV_LAYOUTS[explained.layout]
    scales = {row.group: row.start for row in explained.rows if row.part == "scales"}
    lines = []
    for row in explained.rows:
        if row.part == "scales":
            continue
        dims = "" if row.dims is None else f"{row.dims[0]}-{row.dims[1] - 1}"
        kind = layout.numbers if row.part == "codes" else "bf16" if row.part == "bf16 rope" else row.part
        place = f"{row.start}-{row.stop - 1}" if row.stop - row.start > 1 else str(row.start)
        cells: tuple[Any, ...] = (row.group, dims, kind, place, layout.scale if row.part == "codes" else None, scales.get(row.group))
        lines.append(dict(zip(COLUMNS, cells, strict=True)))
    return lines


def draw(explained: LayoutExplanation, target: str) -> None:
    """Write the picture.

    Raises:
        CommandError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandError("--picture wants matplotlib: pip install 'dsv4[notebooks]'") from None
    from dsv4.cli.layout_picture import picture

    try:
        picture(explained).savefig(target, dpi=110, format=Path(target).suffix.lstrip(".") or "png")
    except (OSError, ValueError) as error:
        raise CommandError(f"--picture {target}: {getattr(error, 'strerror', None) or error}") from error
