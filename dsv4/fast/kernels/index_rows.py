"""Index queries and keys in one launch: norm, rotation, Hadamard transform, codes, scales and weights.

A program takes ROWS rows, each a head of a token or an entry; rows of a token share a position. Numbers between the steps are bf16, held
as fp32. The transform adds and subtracts along one bit of the column at a time: the partner of a number is the sum of the pair less the
number, so that nothing moves between threads but the sums. Nothing depends on the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast import groups
from dsv4.fast.kernels.codec_bits import (
    INFINITY,
    encode_e2m1,
    encode_e4m3,
    group_amax,
    has_native_e4m3,
    pairs_e2m1,
    scales_and_quotients,
    widened,
)
from dsv4.fast.kernels.rows import normalise_pairs, rotate_pairs, to_bf16, unpack_pairs, weight_pairs, weight_words, words
from dsv4.formats import INDEX_LAYOUTS

TILE = 2048  # numbers of a program, at least one row
KINDS = {"fp8": "fp8_fp32", "fp4": "mxfp4"}


@triton.jit
def transform(numbers, ROWS: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """The orthonormal Walsh-Hadamard transform of rows [ROWS, N], N = 2^BITS: fp64."""
    sums = numbers.to(tl.float64)
    for bit in tl.static_range(BITS):
        pairs = sums.reshape(ROWS * (N >> (bit + 1)), 2, 1 << bit)
        total = tl.sum(pairs, axis=1, keep_dims=True)
        upper = tl.arange(0, 2)[None, :, None] == 1
        sums = tl.where(upper, total - 2.0 * pairs, total).reshape(ROWS, N)
    return (sums + 0.0) * (1.0 / tl.sqrt(tl.full([1, 1], N, tl.float64)))


@triton.jit(do_not_specialize=["rows", "heads", "places", "least"])
def rows_kernel(
    x,  # words of two bf16
    weight,  # of the norm, of `weight_words`
    table,
    positions,
    factors,  # bf16 weights of heads, one a row
    codes,
    scales,
    scaled_factors,  # fp32, or the bits of bf16
    rows,
    heads,
    places,
    eps,
    constant,
    least,
    floor,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    TURNED: tl.constexpr,  # pairs
    NORM: tl.constexpr,
    HADAMARD: tl.constexpr,
    KIND: tl.constexpr,
    ON_SCALE: tl.constexpr,
    ZEROES: tl.constexpr,
    TIES: tl.constexpr,
    ZERO_SIGN: tl.constexpr,
    FACTORS: tl.constexpr,  # "", "fp32" or "bf16"
    NATIVE: tl.constexpr,
):
    """Codes and a word of scales for each row, and its weight."""
    PAIRS: tl.constexpr = DIM // 2
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    pair = tl.arange(0, PAIRS)[None, :]
    even, odd = unpack_pairs(tl.load(x + row[:, None] * PAIRS + pair, mask=live[:, None], other=0))
    if NORM:
        weight_even, weight_odd = weight_pairs(weight, pair, pair < PAIRS)
        even, odd = normalise_pairs(even, odd, weight_even, weight_odd, DIM, eps, True)
    position = tl.load(positions + row // heads, mask=live, other=-1).to(tl.int64)
    there = ((position >= 0) & (position < places))[:, None]
    turns = pair >= PAIRS - TURNED
    entry = table + tl.where(there, position[:, None], 0) * (2 * TURNED) + (pair - (PAIRS - TURNED))
    cosines = tl.load(entry, mask=there & turns, other=1.0)
    sines = tl.load(entry + TURNED, mask=there & turns, other=0.0)
    turned_even, turned_odd = rotate_pairs(even, odd, cosines, sines, False)
    even = tl.where(there, tl.where(turns, turned_even, even), 0.0)
    odd = tl.where(there, tl.where(turns, turned_odd, odd), 0.0)
    numbers = tl.interleave(even, odd)  # [ROWS, DIM]
    if HADAMARD:
        numbers = to_bf16(transform(numbers, ROWS, DIM, BITS))
    GROUPS: tl.constexpr = DIM // GROUP
    grouped = numbers.reshape(ROWS, GROUPS, GROUP)
    amax = group_amax(grouped, NATIVE)
    stored, _, quotients = scales_and_quotients(grouped, amax, least, floor, KIND, True, ON_SCALE, ZEROES, True, NATIVE)
    if KIND == "mxfp4":
        if NATIVE and ZERO_SIGN == "kept":
            small = grouped * ((254 - stored) << 23).to(tl.float32, bitcast=True) * 0.00006103515625  # 2^-14
            packed = pairs_e2m1(small, ROWS, GROUPS, GROUP, TIES) & tl.where(amax >= INFINITY, 0, 0xFF)
        else:
            low, high = tl.split(encode_e2m1(quotients, TIES, ZERO_SIGN).reshape(ROWS, GROUPS, GROUP // 2, 2))
            packed = low | (high << 4)
        tl.store(codes + row[:, None] * PAIRS + pair, packed.reshape(ROWS, PAIRS).to(tl.uint8), mask=live[:, None])
        shifts = 8 * tl.arange(0, GROUPS)[None, :]
        word = tl.sum(stored.reshape(ROWS, GROUPS) << shifts, axis=1)
    else:
        dim = tl.arange(0, DIM)[None, :]
        tl.store(codes + row[:, None] * DIM + dim, encode_e4m3(quotients, NATIVE).reshape(ROWS, DIM), mask=live[:, None])
        word = stored.reshape(ROWS)
    if FACTORS == "" or KIND == "mxfp4":
        tl.store(scales + row, word, mask=live)
    if FACTORS != "":
        factor = widened(tl.load(factors + row, mask=live, other=0.0), NATIVE) * constant
        if KIND != "mxfp4":
            factor *= word
        if FACTORS == "bf16":
            tl.store(scaled_factors + row, (to_bf16(factor).to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=live)
        else:
            tl.store(scaled_factors + row, factor, mask=live)


def run(
    x: Tensor, table: Tensor, positions: Tensor, codes: Tensor, scales: Tensor, *, format: str, hadamard: bool, amax_floor: str, ties: str,
    zero_sign: str, weight: Tensor | None = None, eps: float = 0.0, factors: Tensor | None = None, scaled_factors: Tensor | None = None,
    constant: float = 0.0,
) -> None:  # fmt: skip
    """bf16 rows x [tokens, heads, d] or [entries, d], not empty, into codes and scales; weights `factors` into `scaled_factors`."""
    kind, dim = KINDS[format], x.shape[-1]
    source, rule, floor = words(x), groups.rule(kind, amax_floor, "divide"), groups.floor_of(kind, amax_floor)
    rows, height, power = x.numel() // dim, max(TILE // dim, 1), isinstance(floor, int)
    options: dict[str, Any] = {"ON_SCALE": rule["on_scale"], "ZEROES": rule["zeroes"], "TIES": ties, "ZERO_SIGN": zero_sign}
    narrow = scaled_factors is not None and scaled_factors.dtype == torch.bfloat16
    into = scales if scaled_factors is None else scaled_factors.view(torch.int16) if narrow else scaled_factors
    with torch.cuda.device_of(x):
        rows_kernel[(triton.cdiv(rows, height),)](
            source, source if weight is None else weight_words(weight), table.contiguous(), positions.contiguous(),
            x if factors is None else factors.contiguous(), codes, scales, into, rows, rows // len(x), table.shape[0], eps, constant,
            floor if power else 0, 0.0 if power else floor, ROWS=height, DIM=dim, BITS=dim.bit_length() - 1,
            GROUP=INDEX_LAYOUTS[format].group or dim, TURNED=table.shape[1] // 2, NORM=weight is not None, HADAMARD=hadamard, KIND=kind,
            FACTORS="" if factors is None else "bf16" if narrow else "fp32", NATIVE=has_native_e4m3(rows_kernel, x.device), num_warps=4,
            enable_fp_fusion=False, **options,
        )  # fmt: skip
