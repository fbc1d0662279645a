"""Launches the products of E4M3 codes with scales that `linear_hopper_few_roles` describes: SM90 alone, for 1 to 64 tokens.

Results have the bits of `linear`: the same parts of k (`linear_tiles.parts_of`), each a program of its own, the same order inside them,
and the same addition of parts. `CONFIGS` are tiles to choose from, which change nothing but speed. No descriptor is made: copies go by
pointers.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4.fast.kernels.linear import Scales, scales_of, sum_parts
from dsv4.fast.kernels.linear_tiles import TURN, device_of, parts_of

HOPPER: Final = (9, 0)
ALIGNED: Final = 16  # bytes of a copy
MOST: Final = 64  # tokens
BLOCKS: Final = (32, 128)


class Config(NamedTuple):
    """A tile of `tokens` and 16 * `warps` rows of the weight."""

    tokens: int
    warps: int
    stages: int  # turns of 128 of k that have a place


# Rings of 10 or 20 turns, and tiles of 128 rows, were slower on an H200 for every projection of V4.1.
CONFIGS: Final[dict[str, Config]] = {"16x64": Config(16, 4, 6), "32x64": Config(32, 4, 5), "64x64": Config(64, 4, 6)}


def supported(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int = 32) -> str | None:
    """Why `run` does not take these arguments, None where it does."""
    tokens, k = x.shape
    reason = None
    if x.device.type != "cuda" or device_of(x.device)[1] != HOPPER:
        reason = "needs a device of capability 9.0"
    elif _roles() is None:
        reason = "needs triton with triton.experimental.gluon"
    elif not 1 <= tokens <= MOST:
        reason = f"takes 1 to {MOST} tokens, got {tokens}"
    elif block not in BLOCKS:
        reason = f"block must be 32 or 128, got {block}"
    elif block != 32 and torch.int32 in (x_scales.dtype, weight_scales.dtype):
        reason = f"words of scales belong to groups of 32, got block {block}"
    elif k % TURN != 0:
        reason = f"k must be a multiple of {TURN}, got {k}"
    elif any(each.stride(1) != 1 or each.stride(0) % ALIGNED != 0 or each.data_ptr() % ALIGNED != 0 for each in (x, weight)):
        reason = "rows of codes must be contiguous and begin at multiples of 16 bytes"
    elif any(_given(each, block).form == "bytes" for each in (x_scales, weight_scales)):
        reason = "bytes of scales must lie four to a word, at multiples of 4 bytes"
    elif weight_scales.dtype == torch.float32 and x_scales.dtype != torch.float32:
        reason = "fp32 scales of the weight go with fp32 scales of x: a small byte times a mantissa loses bits"
    return reason


def choose(tokens: int, n: int, parts: int, *, words: bool) -> str:
    """A config by the number of tokens. Two tiles of 32 tokens beat one of 64 where programs are few; fp32 scales take registers."""
    programs = parts * -(-n // 64)
    if tokens <= 16:
        name = "16x64"
    elif tokens <= 32 or not words or programs <= 264:
        name = "32x64"
    else:
        name = "64x64"
    return name


def run(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    block: int = 32,
    *,
    config: str | None = None,
    parts: int | None = None,
) -> Tensor:
    """bf16 [tokens, n] of codes uint8 [tokens, k] and [n, k], what `supported` has let pass.

    x_scales, weight_scales: as `linear.run_fp8` has them, or both words, as `linear.run_mxfp8`. `parts`: other than `parts_of` says, for a
    search; the bits are then others.
    """
    (tokens, k), n = x.shape, weight.shape[0]
    pair = weight_scales.dtype == torch.int32
    given, own = _given(x_scales, block), _given(weight_scales, block)
    turns = k // TURN
    parts = parts_of(n, k, 1) if parts is None else parts
    between = -(-turns // parts)
    words = given.form == own.form == "words"
    picked = CONFIGS[choose(tokens, n, parts, words=words) if config is None else config]
    y = torch.empty(tokens, n, dtype=torch.bfloat16, device=x.device)
    sums = y if parts == 1 else torch.empty(parts, tokens, n, dtype=torch.float32, device=x.device)
    roles = _roles()
    form = roles.Form(block, 1 if pair else block, given.form == "words", own.form == "words", given.tiled, own.tiled, *picked, parts > 1)
    grid = (triton.cdiv(tokens, picked.tokens) * triton.cdiv(n, form.rows), parts)
    with torch.cuda.device_of(x):
        roles.product_kernel[grid](
            x, x.stride(0), given.tensor, given.row, given.step, weight, weight.stride(0), own.tensor, own.row, own.step, sums, tokens, n,
            turns, between, FORM=form, num_warps=picked.warps,
        )  # fmt: skip
    if parts > 1:
        sum_parts(sums, y, early=True)
    return y


def _given(scales: Tensor, block: int) -> Scales:
    """Scales of rows or blocks along one axis, groups along the other, or words."""
    return scales_of(scales if scales.dtype == torch.int32 else scales[None], block)


@cache
def _roles() -> Any:
    """The module of kernels, None where this Triton has no Gluon."""
    try:
        return import_module("dsv4.fast.kernels.linear_hopper_few_roles")
    except ImportError:
        return None
