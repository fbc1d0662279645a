"""Inputs of products with quantised weights, each made in one launch: norm, SwiGLU or rotation, rounded to bf16, then E4M3 codes with
power-of-two scales in the layout that the product reads, its pads written too.

A row's bytes are the same in any batch, and a new number of rows compiles nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from dsv4.fast import groups
from dsv4.fast.kernels.codec_bits import has_native_e4m3
from dsv4.fast.kernels.linear_inputs_rows import heads_kernel, norm_kernel
from dsv4.fast.kernels.linear_inputs_tiles import quantize_kernel, swiglu_kernel
from dsv4.fast.kernels.rows import row_words, weight_words, words
from dsv4.formats import AMAX_FLOORS, WORD_GROUPS, align

TILE = (16, 512, 8)  # of `quantize`: rows and columns of a tile, and its warps
SWIGLU_TILE = (8, 64, 4)  # rows, words of a chunk, chunks: whole words of scales
HEADS_TILE = (8, 64)  # heads, words of a chunk


def norm_quantize(
    x: Tensor, weight: Tensor, eps: float, codes: Tensor, scales: Tensor, group: int, scale_layout: str, amax_floor: str
) -> None:
    """RMS norm of bf16 rows x [tokens, n], n at most 32768, into codes (uint8 [tokens, n]) and scales. A program holds a row."""
    source = row_words(x)
    tokens, pairs = source.shape
    (rows, scale_groups), pitch = groups.padded_scales(tokens, x.shape[1] // group, scale_layout)
    warps = 4 * triton.next_power_of_2(triton.cdiv(pairs, 4096))
    with torch.cuda.device_of(x):
        norm_kernel[(rows,)](
            source, weight_words(weight), codes.view(torch.int16), _memory(scales, scale_layout), tokens, _stride(source), scale_groups,
            pitch, eps=eps, PAIRS=pairs, WIDTH=128 * warps, num_warps=warps, enable_fp_fusion=False,
            **_options(norm_kernel, x, group, scale_layout, amax_floor),
        )  # fmt: skip


def swiglu_quantize(
    gate: Tensor, up: Tensor, limit: float | None, codes: Tensor, scales: Tensor, group: int, scale_layout: str, amax_floor: str
) -> None:
    """SwiGLU of bf16 gate and up [tokens, n] into codes (uint8 [tokens, n]) and scales; `limit` an fp32 number."""
    first, second = row_words(gate), row_words(up)
    tokens, pairs = first.shape
    (rows, scale_groups), pitch = groups.padded_scales(tokens, gate.shape[1] // group, scale_layout)
    height, width, chunks = SWIGLU_TILE
    with torch.cuda.device_of(gate):
        swiglu_kernel[(triton.cdiv(rows, height) * triton.cdiv(pairs, width * chunks),)](
            first, second, codes.view(torch.int16), _memory(scales, scale_layout), tokens, _stride(first), _stride(second), rows,
            scale_groups, pitch, limit=0.0 if limit is None else limit, LIMITED=limit is not None, PAIRS=pairs, HEIGHT=height, WIDTH=width,
            CHUNKS=chunks, num_warps=4, enable_fp_fusion=False, **_options(swiglu_kernel, gate, group, scale_layout, amax_floor),
        )  # fmt: skip


def quantize(x: Tensor, codes: Tensor, scales: Tensor, group: int, scale_layout: str, amax_floor: str) -> None:
    """bf16 x [rows, k] into codes (uint8 [rows, k]) and scales of ceil(k / group) groups, the last of which may be partial."""
    matrix = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    (live, n), (height, columns, warps) = x.shape, TILE
    (rows, scale_groups), pitch = groups.padded_scales(live, triton.cdiv(n, group), scale_layout)
    width = columns // group
    with torch.cuda.device_of(x):
        quantize_kernel[(triton.cdiv(rows, height) * triton.cdiv(scale_groups, width),)](
            matrix, codes, _memory(scales, scale_layout), live, n, _stride(matrix), rows, scale_groups, pitch, ROWS=height, GROUPS=width,
            num_warps=warps, enable_fp_fusion=False, **_options(quantize_kernel, x, group, scale_layout, amax_floor),
        )  # fmt: skip


def rotate_quantize(
    o: Tensor, table: Tensor, positions: Tensor, groups: int, codes: Tensor, scales: Tensor, group: int, scale_layout: str, amax_floor: str
) -> None:
    """Heads o [tokens, heads, dim] rotated back, into codes (uint8, contiguous) and scales of `groups` groups of heads.

    Scales are uint8 [tokens, groups, w], or in memory int32 [groups, ceil(w/4), align(tokens, 4)] (packed) or fp32 [groups, w,
    align(tokens, 4)] (mn_major).
    """
    tokens, heads, dim = o.shape
    source, unit = words(o), math.lcm(dim, group)
    units, of_group, scales_of_group = heads * dim // unit, heads // groups * dim // unit, heads // groups * dim // group
    padded = align(scales_of_group, WORD_GROUPS) if scale_layout == "packed" else scales_of_group
    height, width = HEADS_TILE
    all_tokens = tokens if scale_layout == "rows" else align(tokens, 4)
    with torch.cuda.device_of(o):
        heads_kernel[(triton.cdiv(all_tokens * units, height),)](
            source, table.contiguous(), positions.contiguous(), codes.view(torch.int16), _memory(scales, scale_layout), tokens,
            all_tokens, table.shape[0], padded, groups * padded if scale_layout == "rows" else all_tokens, UNITS=units, OF_GROUP=of_group,
            PAIRS=unit // 2, DIM=dim // 2, TURNED=table.shape[1] // 2, WIDTH=width, HEIGHT=height, SPARE=padded - scales_of_group,
            num_warps=4, enable_fp_fusion=True, **_options(heads_kernel, o, group, scale_layout, amax_floor),
        )  # fmt: skip


def _stride(x: Tensor) -> int:
    """From row to row; of one row it does not matter, and must not compile a kernel."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _options(kernel: object, x: Tensor, group: int, scale_layout: str, amax_floor: str) -> dict[str, Any]:
    """What every kernel is told of its codes and scales."""
    floor = AMAX_FLOORS[amax_floor]
    return {
        "least": floor.least_byte_fp8 or 0,
        "GROUP": group,
        "LAYOUT": scale_layout,
        "ZEROES": floor.zero_byte_zeroes_codes,
        "NATIVE": has_native_e4m3(kernel, x.device),
    }


def _memory(scales: Tensor, scale_layout: str) -> Tensor:
    """The bytes of scales, or fp32 numbers, from the first on; kernels know where the others are."""
    if scale_layout == "rows":
        return scales
    flat = scales.as_strided((1,), (1,))
    return flat if scale_layout == "mn_major" else flat.view(torch.uint8)
