"""The cache of keys and values in pages: the twin of `dsv4.reference.kv_cache`, which has the layouts and formulas.

Stores update the caller's pages in place. On CUDA a store is one launch, the norm and the rotation before it included; up to 2048 rows look
for later rows of their slot by themselves. Beyond that a launch before the store marks the last row of each slot in an int32 scratch: 4
bytes a slot of the whole cache while the call runs, which are not cleared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, kv_checks
from dsv4.fast import kv_cache_ops as kv_cache_ops  # defines the operators
from dsv4.kv_layouts import explain_layout

__all__ = [
    "convert_layout",
    "explain_layout",
    "load_kv",
    "norm_rope_store_kv",
    "page_slots",
    "quantize_kv",
    "store_kv",
]


def quantize_kv(kv: Tensor, *, layout: str, amax_floor: str = "official", impl: str | None = None) -> Tensor:
    """The bytes of tokens, data before scales: what a slot of the cache holds.

    Args:
        kv: bf16 [tokens, 512], normed and rotated.
        layout: v4, v41, v41_fp4, v41_inline, v41_fp4_inline or uniform_fp8; inline or not makes no difference here.
        amax_floor: official, sglang, sglang_packer, flashmla, none or flashinfer where scales are UE8M0, else official.
        impl: a backend by name, else the device's default.

    Returns:
        uint8 [tokens, token_bytes]; bytes of scales that the layout does not use are 0.

    Raises:
        ArgumentError: a wrong dtype or width, an unknown layout or floor, kv that requires grad.
    """
    kv_checks.quantize(kv, layout, amax_floor)
    checks.no_grad(kv=kv)
    records: Tensor = torch.ops.dsv4.quantize_kv.default(kv, layout, amax_floor, impl)
    return records


def store_kv(
    kv: Tensor, pages: Tensor, slots: Tensor, *, layout: str, page_size: int, amax_floor: str = "official", impl: str | None = None
) -> Tensor:
    """Write rows, or records of them, into slots of the pages, in place.

    Args:
        kv: bf16 [tokens, 512], quantised on the way, or uint8 [tokens, token_bytes] from `quantize_kv`.
        pages: uint8 [pages, bytes], updated; pages may lie any distance apart and begin anywhere.
        slots: int64 or int32 [tokens]: page * page_size + place in the page. Those outside the cache, -1 among them, are skipped.
        layout, amax_floor: as `quantize_kv`.
        page_size: slots of a page, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        `pages`. Where rows share a slot it holds the last of them, in whatever order they ran.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages that overlap or are too short, an unknown layout or floor, kv that requires
            grad. Nothing is written then.
    """
    kv_checks.store(kv, pages, slots, layout, page_size, amax_floor)
    checks.no_grad(kv=kv)
    torch.ops.dsv4.store_kv.default(kv, pages, slots, layout, page_size, amax_floor, impl)
    return pages


def load_kv(pages: Tensor, slots: Tensor, *, layout: str, page_size: int, impl: str | None = None) -> Tensor:
    """Rows as they come back from the cache: code times scale, and the bf16 dims as they are.

    Args:
        pages: uint8 [pages, bytes].
        slots: int64 or int32, any shape.
        layout: as `quantize_kv`.
        page_size: slots of a page, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [..., 512], exact; zeros for slots outside the cache, whose bytes are not read. NaN codes and scale bytes give NaN.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages that are too short, an unknown layout.
    """
    kv_checks.load(pages, slots, layout, page_size)
    rows: Tensor = torch.ops.dsv4.load_kv.default(pages, slots, layout, page_size, impl)
    return rows


def convert_layout(
    pages: Tensor, *, source: str, target: str, page_size: int, target_page_size: int | None = None, impl: str | None = None
) -> Tensor:
    """All slots in another layout, in pages of another size, or both.

    Args:
        pages: uint8 [pages, bytes] of the source layout.
        source, target: layouts.
        page_size: slots of a source page, >= 1.
        target_page_size: slots of a target page, >= 1; page_size if None.
        impl: a backend by name, else the device's default.

    Returns:
        uint8 [ceil(slots / target_page_size), page bytes of the target]; padding and slots beyond the source's are 0.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages that are too short, an unknown layout.

    Notes:
        Layouts of one number format (inline and not) exchange records byte for byte. All others decode to bf16 and quantise again, with the
        official floor, and lose what the target's numbers cannot hold.
    """
    size = kv_checks.convert(pages, source, target, page_size, target_page_size)[2]
    result: Tensor = torch.ops.dsv4.convert_layout.default(pages, source, target, page_size, size, impl)
    return result


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
    impl: str | None = None,
) -> Tensor:
    """`rms_norm`, `apply_rope` and `store_kv` of rows as they come from the projection, in one launch.

    Args:
        kv: bf16 [tokens, 512]; rows may lie apart, as columns of a wider projection do.
        weight: bf16 or fp32 [512].
        table: fp32 [positions, rotated dims], of `rope_table`.
        positions: int64 or int32 [tokens]. One outside the table makes a row of zeros, which is stored.
        pages, slots, layout, page_size, amax_floor: as `store_kv`.
        eps: of the norm, >= 0.
        impl: a backend by name, else the device's default.

    Returns:
        `pages`, updated.

    Raises:
        ArgumentError: as the three of them. Nothing is written then.
    """
    kv_checks.norm_rope_store(kv, weight, table, positions, pages, slots, eps, layout, page_size, amax_floor)
    checks.no_grad(kv=kv, weight=weight, table=table)
    torch.ops.dsv4.norm_rope_store_kv.default(kv, weight, table, positions, pages, slots, eps, layout, page_size, amax_floor, impl)
    return pages


def page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, *, page_size: int, impl: str | None = None) -> Tensor:
    """Where entries of requests lie: the page that the block table names, and the place in it.

    Args:
        block_table: int32 or int64 [requests, width]: pages of a request in order; negative where there is none.
        requests: int32 or int64 [rows].
        indices: int64 or int32 [rows]: the entry of its request.
        page_size: slots of a page, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        int64 [rows]: page * page_size + index % page_size, or -1 where request, index, column or page is out of range.

    Raises:
        ArgumentError: wrong dtypes or shapes, page_size below 1.
    """
    kv_checks.page_slots(block_table, requests, indices, page_size)
    slots: Tensor = torch.ops.dsv4.page_slots.default(block_table, requests, indices, page_size, impl)
    return slots
