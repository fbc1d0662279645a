"""Norms and rotations of rows in one launch.

A program takes ROWS rows, each in two tiles: the pairs that stay, and the pairs that turn. The norm needs both for its sum; without a
rotation the first tile is the whole row. A row is one head of a token, and `heads` of them share a position. Nothing depends on the number
of rows.

Every product that is added to something is exact in fp64 (two bf16 numbers, or one and an fp32 cosine: at most 32 bits), so the compiler
may make one instruction of the two: it halves the fp64 work and changes no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.rows import (
    norm_factor,
    pack_pairs,
    rotate_pairs,
    scale_pairs,
    sum_squares,
    to_bf16,
    unpack_pairs,
    weight_pairs,
    weight_words,
    words,
)

TILE = 1024  # pairs of a program, at least one row


@triton.jit
def _total(even, odd, NORM: tl.constexpr):
    """Sum of squares; of the chain, of squares rounded to bf16."""
    if NORM == "bf16_chain":
        first, second = to_bf16(even.to(tl.float64) * even), to_bf16(odd.to(tl.float64) * odd)
        total = tl.sum(first.to(tl.float64) + second, axis=1)
    else:
        total = sum_squares(even, odd)
    return total


@triton.jit
def _factor(total, n: tl.constexpr, eps, NORM: tl.constexpr):
    """What multiplies a row; of the chain, with each of its steps rounded to bf16."""
    if NORM == "bf16_chain":
        bounded = to_bf16(to_bf16(total / n).to(tl.float64) + tl.full([], eps, tl.float64))
        factor = to_bf16(1.0 / tl.sqrt(bounded.to(tl.float64))).to(tl.float64)
    else:
        factor = norm_factor(total, n, eps)
    return factor


@triton.jit
def _scaled(even, odd, factor, weight, pair, ends: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """A tile times the factors of its rows and the weights of its pairs, which are numbered from the beginning of a row."""
    first, second = even, odd
    if HAS_WEIGHT:
        first, second = weight_pairs(weight, pair, pair < ends)
    return scale_pairs(even, odd, factor, first, second, HAS_WEIGHT)


@triton.jit(do_not_specialize=["rows", "heads", "places"])
def norm_rope_tile(
    x,  # words of two bf16
    weight,  # of `weight_words`
    table,
    positions,
    result,
    rows,
    heads,
    places,
    eps,
    ROWS: tl.constexpr,
    STILL: tl.constexpr,  # pairs of a row that stay, and the next power of two
    STILL_TILE: tl.constexpr,
    TURNED: tl.constexpr,  # pairs that turn, 0 without a rotation
    TURNED_TILE: tl.constexpr,
    NORM: tl.constexpr,  # "", "fp32" or "bf16_chain"
    HAS_WEIGHT: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """Words of rows to words of rows."""
    PAIRS: tl.constexpr = STILL + TURNED
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    present = live
    still, turned = tl.arange(0, STILL_TILE)[None, :], STILL + tl.arange(0, TURNED_TILE)[None, :]
    still_here, turned_here = live[:, None] & (still < STILL), live[:, None] & (turned < PAIRS)
    total = tl.zeros([ROWS], tl.float64)
    if TURNED > 0:
        position = tl.load(positions + row // heads, mask=live, other=-1).to(tl.int64)
        present = (position >= 0) & (position < places)
        even, odd = unpack_pairs(tl.load(x + row[:, None] * PAIRS + turned, mask=turned_here, other=0))
        if NORM != "":
            total += _total(even, odd, NORM)
    if STILL > 0:
        words = tl.load(x + row[:, None] * PAIRS + still, mask=still_here, other=0)
        if NORM != "":
            still_even, still_odd = unpack_pairs(words)
            total += _total(still_even, still_odd, NORM)
    if NORM != "":
        factor = _factor(total, PAIRS * 2, eps, NORM)[:, None]
    if STILL > 0:
        if NORM != "":
            still_even, still_odd = _scaled(still_even, still_odd, factor, weight, still, STILL, HAS_WEIGHT)
            words = pack_pairs(still_even, still_odd)
        tl.store(result + row[:, None] * PAIRS + still, tl.where(present[:, None], words, 0), mask=still_here)
    if TURNED > 0:
        if NORM != "":
            even, odd = _scaled(even, odd, factor, weight, turned, PAIRS, HAS_WEIGHT)
        entry = table + tl.where(present, position, 0)[:, None] * (TURNED * 2) + (turned - STILL)
        here = turned_here & present[:, None]
        even, odd = rotate_pairs(even, odd, tl.load(entry, mask=here, other=0.0), tl.load(entry + TURNED, mask=here, other=0.0), INVERSE)
        tl.store(result + row[:, None] * PAIRS + turned, tl.where(present[:, None], pack_pairs(even, odd), 0), mask=turned_here)


def run(
    x: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    norm: str = "",
    table: Tensor | None = None,
    positions: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """bf16 rows x [tokens, ..., n], n even, not empty: normalised if there is a norm ("fp32" or "bf16_chain"), then turned by a table."""
    source = words(x)
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pairs = source.shape[-1]
    rows = source.numel() // pairs
    turned = 0 if table is None else table.shape[1] // 2
    tiles = tuple(triton.next_power_of_2(max(count, 1)) for count in (pairs - turned, turned))
    height = max(TILE // max(tiles), 1)
    heads = 1 if positions is None else max(rows // positions.shape[0], 1)
    with torch.cuda.device_of(x):
        norm_rope_tile[(triton.cdiv(rows, height),)](
            source, source if weight is None else weight_words(weight), source if table is None else table.contiguous(),
            source if positions is None else positions.contiguous(), words(result), rows, heads,
            0 if table is None else table.shape[0], eps, ROWS=height, STILL=pairs - turned, STILL_TILE=tiles[0], TURNED=turned,
            TURNED_TILE=tiles[1], NORM=norm, HAS_WEIGHT=weight is not None, INVERSE=inverse,
            num_warps=min(max(max(tiles) * height // 512, 4), 16), enable_fp_fusion=True,
        )  # fmt: skip
    return result
