"""Argument checks of `kv_cache`, shared by both implementations: dtypes, shapes, strides and host values, never what a tensor holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsv4 import checks, norm_checks
from dsv4.formats import KV_LAYOUTS, KVLayout
from dsv4.quantization_checks import FP8_FLOORS
from dsv4.types import ArgumentError

INDEX = ("int32", "int64")
LAYOUTS = tuple(KV_LAYOUTS)

Floats = str | Sequence[str]  # "bf16"; the reference also takes fp64 where its roundings are off


def layout(value: str, name: str = "layout") -> KVLayout:
    """The layout of this name."""
    checks.one_of(name, value, LAYOUTS)
    return KV_LAYOUTS[value]


def floor(chosen: KVLayout, amax_floor: str) -> None:
    """A floor that the layout's quantiser knows: those of FP8 with UE8M0 scales, and only the default where scales are others."""
    allowed = FP8_FLOORS if chosen.scale == "ue8m0" else ("official",)
    if amax_floor not in allowed:
        raise ArgumentError("amax_floor", repr(amax_floor), f"with the layout {chosen.name} must be one of {', '.join(allowed)}")


def quantize(kv: Tensor, layout_name: str, amax_floor: str, floats: Floats = "bf16") -> KVLayout:
    """Arguments of `quantize_kv`, and the layout."""
    chosen = layout(layout_name)
    checks.tensor("kv", kv, floats, ("tokens", chosen.dims))
    floor(chosen, amax_floor)
    return chosen


def pages(value: Tensor, chosen: KVLayout, page_size: int, *, written: bool = False) -> int:
    """Pages that hold `page_size` slots each; how many slots there are. `written`: no byte may belong to two pages."""
    checks.tensor("pages", value, "uint8", ("pages", "bytes"))
    checks.at_least("page_size", page_size, 1)
    least = page_size * chosen.token_bytes
    if value.shape[1] < least:
        limit = f"a page of {page_size} slots of {chosen.name} needs {least} bytes"
        raise ArgumentError("pages", f"shape {list(value.shape)}", limit, f"page_bytes({page_size}) of the layout is the stride")
    if value.stride(1) != 1:
        raise ArgumentError("pages", f"strides {value.stride()}", "the bytes of a page must lie next to each other", "Use contiguous()")
    if written:
        checks.writable("pages", value)
        if value.shape[0] > 1 and value.stride(0) < value.shape[1]:
            raise ArgumentError("pages", f"strides {value.stride()}", "pages overlap in memory", "Use contiguous()")
    return value.shape[0] * page_size


def slots(value: Tensor, shape: Sequence[str | int] | None, pages: Tensor) -> None:
    """Slot numbers on the device of the pages."""
    checks.tensor("slots", value, INDEX, shape)
    checks.same_device("slots", value, "pages", pages)


def store(
    kv: Tensor, value: Tensor, numbers: Tensor, layout_name: str, page_size: int, amax_floor: str, floats: Floats = "bf16"
) -> KVLayout:
    """Arguments of `store_kv`, and the layout: rows (bf16) or records (uint8)."""
    chosen = layout(layout_name)
    pages(value, chosen, page_size, written=True)
    allowed = ("uint8", floats) if isinstance(floats, str) else ("uint8", *floats)
    width = chosen.token_bytes if checks.tensor("kv", kv, allowed).dtype == checks.DTYPES["uint8"] else chosen.dims
    checks.tensor("kv", kv, allowed, ("tokens", width))
    checks.same_device("kv", kv, "pages", value)
    slots(numbers, (kv.shape[0],), value)
    floor(chosen, amax_floor)
    return chosen


def load(value: Tensor, numbers: Tensor, layout_name: str, page_size: int) -> KVLayout:
    """Arguments of `load_kv`, and the layout."""
    chosen = layout(layout_name)
    pages(value, chosen, page_size)
    slots(numbers, None, value)
    return chosen


def convert(value: Tensor, source: str, target: str, page_size: int, target_page_size: int | None) -> tuple[KVLayout, KVLayout, int]:
    """Arguments of `convert_layout`: both layouts, and the page size of the target."""
    have, want = layout(source, "source"), layout(target, "target")
    pages(value, have, page_size)
    size = page_size if target_page_size is None else target_page_size
    checks.at_least("target_page_size", size, 1)
    return have, want, size


def same_numbers(one: KVLayout, other: KVLayout) -> bool:
    """Whether records of one layout are records of the other."""
    fields = ("dims", "quantised", "group", "numbers", "scale", "data_bytes", "scale_bytes")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def norm_rope_store(
    kv: Tensor,
    weight: Tensor,
    table: Tensor,
    positions: Tensor,
    value: Tensor,
    numbers: Tensor,
    eps: float,
    layout_name: str,
    page_size: int,
    amax_floor: str,
    floats: Floats = "bf16",
) -> KVLayout:
    """Arguments of `norm_rope_store_kv`, and the layout."""
    chosen = quantize(kv, layout_name, amax_floor, floats)
    checks.tensor("weight", weight, ("bf16", "fp32"), (chosen.dims,))
    checks.tensor("table", table, "fp32", ("positions", "rotated"))
    places, rotated = table.shape
    if places < 1 or rotated < 2 or rotated % 2 or rotated > chosen.dims:
        limit = f"must have a position or more, and an even number of columns from 2 to {chosen.dims}"
        raise ArgumentError("table", f"shape {list(table.shape)}", limit, "rope_table builds it")
    checks.tensor("positions", positions, INDEX, (kv.shape[0],))
    norm_checks.epsilon(eps)
    pages(value, chosen, page_size, written=True)
    slots(numbers, (kv.shape[0],), value)
    for name, tensor in (("kv", kv), ("weight", weight), ("table", table), ("positions", positions)):
        checks.same_device(name, tensor, "pages", value)
    return chosen


def page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, page_size: int) -> None:
    """Arguments of `page_slots`."""
    checks.tensor("block_table", block_table, INDEX, ("requests", "width"))
    checks.tensor("requests", requests, INDEX, ("rows",))
    checks.tensor("indices", indices, INDEX, (requests.shape[0],))
    checks.same_device("requests", requests, "block_table", block_table)
    checks.same_device("indices", indices, "block_table", block_table)
    checks.at_least("page_size", page_size, 1)
