"""What a row may select from: how many entries a token sees, its candidate blocks, scores outside of them taken away."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import widened
from dsv4.fast.kernels.index_select import LARGEST, compiled, ordered_keys, row_range, select


@triton.jit(do_not_specialize=["stride", "columns", "blocks"])
def block_keys_kernel(
    logits, stride, ends, keys, columns, blocks, BLOCK: tl.constexpr, ENTRIES: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The largest key of each block's visible entries; that of the newest visible entry's block is the largest there is."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    _, seen = row_range(ends, ends, row, columns, False, True)
    entry = tl.arange(0, ENTRIES)[None, :]
    column = number[:, None] * BLOCK + entry
    here = (entry < BLOCK) & (column < seen)
    scores = widened(tl.load(logits + row * stride + column, mask=here, other=float("-inf")), NATIVE)
    key = tl.max(ordered_keys(scores), axis=1)
    newest = (seen > 0) & (number == (seen - 1) // BLOCK)
    tl.store(keys + row * blocks + number, tl.where(newest, LARGEST, key), mask=number < blocks)


@triton.jit(do_not_specialize=["stride", "kept_stride", "into_stride", "columns"])
def restrict_kernel(logits, stride, kept, kept_stride, result, into_stride, columns, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Scores of the blocks that `kept` (bytes) marks, minus infinity elsewhere."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    here = column < columns
    keep = tl.load(kept + row * kept_stride + column // BLOCK, mask=here, other=0) != 0
    scores = tl.load(logits + row * stride + column, mask=here & keep, other=float("-inf"))
    tl.store(result + row * into_stride + column, scores, mask=here)


def candidates(logits: Tensor, ends: Tensor, block: int, count: int) -> Tensor:
    """int32 [rows, count]: block numbers, ascending; count at most the number of blocks."""
    source = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, n = source.shape
    blocks, entries = triton.cdiv(n, block), triton.next_power_of_2(block)
    keys = torch.empty(rows, blocks, dtype=torch.int32, device=source.device)
    wide = max(4096 // entries, 1)
    with torch.cuda.device_of(logits):
        block_keys_kernel[(rows, triton.cdiv(blocks, wide))](
            source, source.stride(0), ends.contiguous(), keys, n, blocks, BLOCK=block, ENTRIES=entries, WIDE=wide,
            NATIVE=compiled(block_keys_kernel), num_warps=8,
        )  # fmt: skip
    return select(keys, count, None, None, "index")


def restrict(logits: Tensor, kept: Tensor, result: Tensor, block: int) -> None:
    """`logits` into `result` [rows, n]; `kept` bool [rows, blocks or more]."""
    wide = 2048
    with torch.cuda.device_of(logits):
        restrict_kernel[(len(logits), triton.cdiv(logits.shape[1], wide))](
            logits, logits.stride(0), kept.view(torch.uint8), kept.stride(0), result, result.stride(0), logits.shape[1], BLOCK=block,
            WIDE=wide,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def visible_kernel(positions, result, tokens, RATIO: tl.constexpr, WIDE: tl.constexpr):
    """(position + 1) div RATIO, within 0 and 2^31 - 1."""
    token = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    at = tl.load(positions + token, mask=token < tokens, other=-1).to(tl.int64)
    known = tl.maximum(at, 0)
    complete = known // RATIO
    last = known - complete * RATIO == RATIO - 1  # position + 1 may not fit 64 bits
    seen = tl.minimum(complete, LARGEST - 1) + tl.where(last | (complete >= LARGEST), 1, 0)
    tl.store(result + token, tl.where(at < 0, 0, seen).to(tl.int32), mask=token < tokens)


def visible(positions: Tensor, result: Tensor, ratio: int) -> None:
    """How many entries tokens see, into int32 `result`."""
    wide = 256
    with torch.cuda.device_of(positions):
        visible_kernel[(triton.cdiv(len(positions), wide),)](positions.contiguous(), result, len(positions), RATIO=ratio, WIDE=wide)
