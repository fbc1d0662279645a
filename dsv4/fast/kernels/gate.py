"""Router logits on tensor cores, the same bits for a row in any batch.

Tiles and the number of splits of K do not depend on the number of tokens: a row's products are always added in one order. Splits fill the
device where tokens are few; their sums are added in order, in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 64, 64, 128  # of a tile
STEPS = 8  # tiles of K in a split, at least
SPLITS = 8  # at most


@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(
    x_ptr, weight_ptr, parts_ptr, tokens, E, H, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    split = tl.program_id(2)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        x = tl.load(x_ptr + row * H + k[None, :], mask=(row < tokens) & (k[None, :] < H), other=0.0)
        weight = tl.load(weight_ptr + column * H + k[:, None], mask=(column < E) & (k[:, None] < H), other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    tl.store(parts_ptr + (split.to(tl.int64) * tokens + row) * E + column, total, mask=(row < tokens) & (column < E))


@triton.jit(do_not_specialize=["elements"])
def _sum_kernel(parts_ptr, logits_ptr, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * elements.to(tl.int64) + at, mask=at < elements, other=0.0).to(tl.float64)
    tl.store(logits_ptr + at, total.to(tl.float32), mask=at < elements)


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H] times weight [E, H], contiguous, of one dtype, T > 0, to fp32 [T, E]."""
    tokens, hidden = x.shape
    experts = weight.shape[0]
    tiles = triton.cdiv(hidden, DEPTH)
    steps = max(STEPS, triton.cdiv(tiles, SPLITS))
    splits = triton.cdiv(tiles, steps)
    parts = torch.empty(splits, tokens, experts, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(tokens, ROWS), triton.cdiv(experts, COLUMNS), splits)
    sizes = {"STEPS": steps, "ROWS": ROWS, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
    _products_kernel[grid](x, weight, parts, tokens, experts, hidden, **sizes, num_warps=4, num_stages=3)
    if splits == 1:
        return parts[0]
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    _sum_kernel[(triton.cdiv(logits.numel(), 1024),)](parts, logits, logits.numel(), SPLITS=splits, BLOCK=1024)
    return logits
