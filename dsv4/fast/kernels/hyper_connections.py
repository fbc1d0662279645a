"""Residual streams: expand, and the launches of a boundary.

`expand` is elementwise, in fp64. A factor has 24 significant bits and a number of a stream 8, so each product is exact in fp64 and the
addition that follows rounds once, with and without contraction to a fused multiply-add: the kernel is left to contract, which halves its
fp64 instructions and changes no bit. Statistics are in `stream_statistics`; the mix, the collapse and what follows in `stream_mix`.

On SM90 a boundary of many tokens goes to `boundary_hopper`, whose sums of statistics have another order.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast import groups
from dsv4.fast.kernels.codec_bits import has_native_e4m3, rounded, widened
from dsv4.fast.kernels.rows import words
from dsv4.fast.kernels.stream_mix import finish_tile, mix_tile
from dsv4.fast.kernels.stream_statistics import add_parts, products

HIDDEN, EXPAND_WARPS = 512, 4  # numbers of a row that a program of `expand` takes, at most, and its warps
MIX_ROWS = 32  # tokens whose mix a program makes
MANY = 256  # so many tokens are for `boundary_hopper`
HOPPER = (9, 0)


@triton.jit
def _load_wide(place, mask, NATIVE: tl.constexpr):
    """bf16 numbers as fp64."""
    return widened(tl.load(place, mask=mask, other=0.0), NATIVE).to(tl.float64)


@triton.jit
def expand_tile(
    y,
    streams,
    post,
    comb,
    result,
    C: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """A part of all new streams of one token: of each, the old ones in ascending order, then the sublayer's output."""
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64) // BLOCKS
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    here = at < D
    old = ()
    for stream in tl.static_range(C):
        old += (_load_wide(streams + (row * C + stream) * D + at, here, NATIVE),)  # type: ignore[assignment]
    output = _load_wide(y + row * D + at, here, NATIVE)
    for new in tl.static_range(C):
        total = tl.load(comb + row * (C * C) + new).to(tl.float64) * old[0]  # type: ignore[misc]
        for stream in tl.static_range(1, C):
            total += tl.load(comb + row * (C * C) + stream * C + new).to(tl.float64) * old[stream]
        total += tl.load(post + row * C + new).to(tl.float64) * output
        tl.store(result + (row * C + new) * D + at, rounded(total.to(tl.float32), tl.bfloat16, NATIVE), mask=here)


def mix_statistics(streams: Tensor, fn: Tensor, eps: float, precision: str) -> Tensor:
    """Two launches."""
    return add_parts(*products(streams, fn, precision), fn.shape[1], eps)


def split_mix(
    mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float, post_multiplier: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb of mixes [tokens, C (C + 2)]."""
    given = mixes.contiguous()
    pre, post, comb = _mix(given, streams)
    with torch.cuda.device_of(given):
        mix_tile[(triton.cdiv(given.shape[0], MIX_ROWS),)](
            given, given, scale.contiguous(), base.contiguous(), pre, post, comb, given.shape[0], 0.0, eps, post_multiplier, K=1, C=streams,
            SPLITS=0, ITERATIONS=iterations, ROWS=MIX_ROWS, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return pre, post, comb


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """bf16 [tokens, C, D]."""
    result = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    tokens, count, hidden = streams.shape
    block = min(triton.next_power_of_2(hidden), HIDDEN)
    with torch.cuda.device_of(streams):
        expand_tile[(tokens * triton.cdiv(hidden, block),)](
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), result, C=count, D=hidden, BLOCK=block,
            NATIVE=_native(expand_tile), num_warps=EXPAND_WARPS,
        )  # fmt: skip
    return result


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """bf16 [tokens, D]."""
    result = torch.empty(streams.shape[0], streams.shape[2], dtype=streams.dtype, device=streams.device)
    _finish(streams, result, given=pre)
    return result


def head_collapse(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float) -> Tensor:
    """bf16 [tokens, D], in two launches."""
    result = torch.empty(streams.shape[0], streams.shape[2], dtype=streams.dtype, device=streams.device)
    _finish(streams, result, parts=products(streams, fn, "exact"), scale=scale, base=base, norm_eps=norm_eps, eps=eps)
    return result


def boundary(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor,
    carried_pre: Tensor | None, norm_eps: float, rms_eps: float, iterations: int, eps: float, precision: str, normed: Tensor,
    scales: Tensor, layout: str, *, invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The new streams and their mix, in three launches, or in two; fills `normed`, and with a layout codes and `scales`, pads included.

    `invariant`: a token's bits do not depend on the number of tokens.
    """
    if not invariant and _fits_hopper(streams):
        found: tuple[Tensor, Tensor, Tensor, Tensor] = _hopper().boundary(
            y, streams, post, comb, fn, scale, base, weight, carried_pre, norm_eps, rms_eps, iterations, eps, precision, normed, scales,
            layout,
        )  # fmt: skip
        return found
    new = expand(y, streams, post, comb)
    mix = _mix(new, new.shape[1])
    _finish(
        new, normed, parts=products(new, fn, precision), given=carried_pre, mix=mix, scale=scale, base=base, weight=weight,
        scales=scales, layout=layout, iterations=iterations, norm_eps=norm_eps, rms_eps=rms_eps, eps=eps,
    )  # fmt: skip
    return new, *mix


def _fits_hopper(streams: Tensor) -> bool:
    tokens, count, hidden = streams.shape
    if tokens < MANY or streams.device.type != "cuda" or _capability(streams.device) != HOPPER or _hopper() is None:
        return False
    return _hopper().supported(count, hidden, tokens) is None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _hopper() -> Any:
    """The module of kernels for SM90, None where this Triton has no Gluon."""
    try:
        return import_module("dsv4.fast.kernels.boundary_hopper")
    except ImportError:
        return None


def _finish(
    streams: Tensor,
    result: Tensor,
    *,
    parts: tuple[Tensor, Tensor] | None = None,
    given: Tensor | None = None,
    mix: tuple[Tensor, Tensor, Tensor] | None = None,
    scale: Tensor | None = None,
    base: Tensor | None = None,
    weight: Tensor | None = None,
    scales: Tensor | None = None,
    layout: str = "",
    iterations: int = 1,
    norm_eps: float = 0.0,
    rms_eps: float = 0.0,
    eps: float = 0.0,
) -> None:
    """One launch of `finish_tile`; arguments that a form of it does not read are the streams."""
    source = words(streams)
    tokens, count, hidden = streams.shape
    rows, scale_groups, pitch = tokens, 0, 0
    if layout:
        (rows, scale_groups), pitch = groups.padded_scales(tokens, hidden // 32, layout)
    products_, squares = (source, source) if parts is None else parts
    pre, post, comb = (source, source, source) if mix is None else mix
    mixing = 0 if mix is None else triton.cdiv(tokens, MIX_ROWS)
    pairs = max(triton.next_power_of_2(hidden // 2), 64)
    with torch.cuda.device_of(streams):
        finish_tile[(mixing + rows,)](
            source, products_, squares, _or(scale, source), _or(base, source), _or(given, source), pre, post, comb,
            source if weight is None else words(weight), result.view(torch.int16) if layout else words(result),
            _bytes(scales, layout) if scales is not None and layout else source, tokens, mixing, scale_groups, pitch,
            groups.floor_of("fp8", "official"), norm_eps, rms_eps, eps, C=count, PAIRS=hidden // 2, TILE=pairs,
            SPLITS=0 if parts is None else products_.shape[0], MIXING=mix is not None, GIVEN=given is not None, NORM=weight is not None,
            LAYOUT=layout, ITERATIONS=iterations, ROWS=MIX_ROWS, NATIVE=_native(finish_tile, streams.device),
            num_warps=min(max(pairs // 256, 4), 16), enable_fp_fusion=True,
        )  # fmt: skip


def _bytes(scales: Tensor, layout: str) -> Tensor:
    """The memory of scales as bytes, the pad words of packed columns too."""
    if layout == "packed":
        return scales.as_strided((scales.shape[1] * scales.stride(1),), (1,)).view(torch.uint8)
    return scales.view(torch.uint8)


def _or(value: Tensor | None, other: Tensor) -> Tensor:
    return other if value is None else value.contiguous()


def _mix(like: Tensor, streams: int) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = (
        torch.empty(like.shape[0], *shape, dtype=torch.float32, device=like.device)
        for shape in ((streams,), (streams,), (streams, streams))
    )
    return pre, post, comb


def _native(kernel: Any, device: torch.device | None = None) -> bool:
    """Compiled, not interpreted; with a device, able to convert to E4M3 as well."""
    return isinstance(kernel, triton.JITFunction) if device is None else has_native_e4m3(kernel, device)
