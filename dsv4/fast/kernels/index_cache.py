"""Index keys into pages and out of them: codes in words where every address allows it, and four bytes of scale.

Offsets are int64 bytes from the first byte of the pages, which may begin anywhere and lie any distance apart. Where rows share a slot the
last one is stored, as `kv_rows` finds it.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.kv_rows import is_last, last_rows, slot_places

TILE = 4096  # bytes of a program, at least four rows
SCALE_BYTES: tl.constexpr = tl.constexpr(4)


@triton.jit
def _present(slots, row, rows, total):
    slot = tl.load(slots + row, mask=row < rows, other=-1).to(tl.int64)
    return tl.where((slot >= 0) & (slot < total), slot, -1)


@triton.jit(do_not_specialize=["rows", "total", "stride"])
def store_kernel(
    codes, scales, pages, stride, slots, last, rows, total, PAGE: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr,
    SEARCH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes [rows, BYTES] and scales (bytes of words) into their slots."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    slot = _present(slots, row, rows, total)
    keep = ((slot >= 0) & is_last(first, row, slot, slots, last, rows, SEARCH))[:, None]
    data, place = slot_places(tl.maximum(slot, 0), stride, PAGE, BYTES, SCALE_BYTES, False)
    byte, four = tl.arange(0, BYTES)[None, :], tl.arange(0, SCALE_BYTES)[None, :]
    wide = row.to(tl.int64)[:, None]
    target = tl.multiple_of(pages + (data[:, None] + byte), [1, ALIGN])
    tl.store(target, tl.load(codes + wide * BYTES + byte, mask=keep, other=0), mask=keep)
    tl.store(pages + (place[:, None] + four), tl.load(scales + wide * SCALE_BYTES + four, mask=keep, other=0), mask=keep)


@triton.jit(do_not_specialize=["rows", "total", "stride"])
def load_kernel(
    pages, stride, slots, codes, scales, rows, total, PAGE: tl.constexpr, BYTES: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of slots, zeros where there is none."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = _present(slots, row, rows, total)
    there, live = (slot >= 0)[:, None], (row < rows)[:, None]
    data, place = slot_places(tl.maximum(slot, 0), stride, PAGE, BYTES, SCALE_BYTES, False)
    byte, four = tl.arange(0, BYTES)[None, :], tl.arange(0, SCALE_BYTES)[None, :]
    wide = row.to(tl.int64)[:, None]
    source = tl.multiple_of(pages + (data[:, None] + byte), [1, ALIGN])
    tl.store(codes + wide * BYTES + byte, tl.load(source, mask=there, other=0), mask=live)
    tl.store(scales + wide * SCALE_BYTES + four, tl.load(pages + (place[:, None] + four), mask=there, other=0), mask=live)


def store(codes: Tensor, scales: Tensor, pages: Tensor, slots: Tensor, page_size: int) -> None:
    """Keys, codes as uint8, into pages; none of the tensors empty."""
    total, slots, scales = pages.shape[0] * page_size, slots.contiguous(), scales.contiguous()
    scales = scales.as_strided(scales.shape, (1,))  # a single one may have any stride and count as contiguous
    with torch.cuda.device_of(pages):
        last = last_rows(slots, total)
        options = _options(pages, codes.shape[1], page_size)
        store_kernel[(triton.cdiv(len(slots), options["ROWS"]),)](
            codes.contiguous(), scales.view(torch.uint8), pages, pages.stride(0), slots, slots if last is None else last,
            len(slots), total, SEARCH=last is None, **options,
        )  # fmt: skip


def load(pages: Tensor, slots: Tensor, codes: Tensor, scales: Tensor, page_size: int) -> None:
    """Keys of slots into contiguous codes and scales."""
    options = _options(pages, codes.shape[1], page_size)
    with torch.cuda.device_of(pages):
        load_kernel[(triton.cdiv(len(slots), options["ROWS"]),)](
            pages, pages.stride(0), slots.contiguous(), codes, scales.view(torch.uint8), len(slots), pages.shape[0] * page_size, **options
        )


def _options(pages: Tensor, data_bytes: int, page_size: int) -> dict[str, Any]:
    rows = max(TILE // data_bytes, 4)
    return {"PAGE": page_size, "BYTES": data_bytes, "ALIGN": gcd(16, pages.data_ptr(), pages.stride(0), data_bytes), "ROWS": rows}
