"""What is to do around a library's logits: NaN codes made known to it before, minus infinity wherever a token does not see after."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.index_select import row_range


@triton.jit(do_not_specialize=["stride", "table_stride", "requests_there", "columns", "pages_there", "entries"])
def clean_kernel(
    logits, stride, starts, ends, table, table_stride, requests, requests_there, columns, pages_there, entries, PAGE: tl.constexpr,
    WIDE: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Minus infinity wherever a row does not see; PAGE > 0: also where a page is not there."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1).to(tl.int64) * WIDE
    first, length = row_range(starts, ends, row, entries, HAS_STARTS, True)
    if PAGE > 0 or begin < first or begin + WIDE > first + length:
        at = begin + tl.arange(0, WIDE)
        seen = (at >= first) & (at < first + length)
        if PAGE > 0:
            request = tl.load(requests + row).to(tl.int64)
            known = (request >= 0) & (request < requests_there)
            looked_at = seen & known & (at // PAGE < columns)
            page = tl.load(table + tl.where(known, request, 0) * table_stride + at // PAGE, mask=looked_at, other=-1).to(tl.int64)
            seen = looked_at & (page >= 0) & (page < pages_there)
        none = tl.full([WIDE], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * stride + at, none, mask=(at < entries) & (seen == 0))


@triton.jit(do_not_specialize=["rows"])
def mark_kernel(codes, factors, result, rows, BYTES: tl.constexpr, ROWS: tl.constexpr):
    """Factors of rows of E4M3 codes, NaN where a code is."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    code = tl.load(codes + row[:, None] * BYTES + tl.arange(0, BYTES)[None, :], mask=live[:, None], other=0).to(tl.int32) & 0x7F
    factor = tl.load(factors + row, mask=live, other=0.0)
    tl.store(result + row, tl.where(tl.max(code, axis=1) == 0x7F, float("nan"), factor), mask=live)


def mark_nan(codes: Tensor, factors: Tensor) -> Tensor:
    """fp32 factors [...] of contiguous rows of codes [..., bytes], bytes a power of two, not empty: NaN where a row has a NaN code."""
    result, rows, size = torch.empty_like(factors), factors.numel(), codes.shape[-1]
    high = max(8192 // size, 1)
    with torch.cuda.device_of(codes):
        mark_kernel[(triton.cdiv(rows, high),)](codes, factors, result, rows, BYTES=size, ROWS=high, num_warps=4)
    return result


def clean(
    logits: Tensor, starts: Tensor | None, ends: Tensor, block_table: Tensor | None = None, requests: Tensor | None = None,
    page_size: int = 0, pages: int = 0,
) -> None:  # fmt: skip
    """Write minus infinity into fp32 or bf16 logits [tokens, entries] wherever a token sees nothing."""
    table = ends[None] if block_table is None else block_table if block_table.stride(1) == 1 else block_table.contiguous()
    wide = 1024 if page_size else 4096
    with torch.cuda.device_of(logits):
        clean_kernel[(len(logits), triton.cdiv(logits.shape[1], wide))](
            logits, logits.stride(0), ends if starts is None else starts.contiguous(), ends.contiguous(), table, table.stride(0),
            ends if requests is None else requests.contiguous(), *table.shape, pages, logits.shape[1], PAGE=page_size, WIDE=wide,
            HAS_STARTS=starts is not None, num_warps=8,
        )  # fmt: skip
