"""Residual streams: statistics in splits of K, expand, and the launches that finish a boundary.

`products` multiplies streams [tokens, K] by fn [mixes, K] and squares the streams in the same pass. K is cut into splits whose number does
not depend on the tokens, and tiles have one size, so a row's terms are added in one order in any batch. fn is fp32: the tensor cores get it
as three bf16 parts of eight significant bits each, which together are all of it; products with bf16 streams are exact, and each part has
an fp32 sum of its own. (TF32 products would cut fn to eleven bits, and fp32 ones do not run on the tensor cores.) The sums of all splits
are added in fp64, in order. `expand` is elementwise, in fp64. The mix, the collapse and what follows are in `stream_mix`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast import groups
from dsv4.fast.kernels.codec_bits import INFINITY, MAGNITUDE, has_native_e4m3, widened
from dsv4.fast.kernels.rows import HIGH, pack_pairs, to_bf16, unpack_pairs, words
from dsv4.fast.kernels.stream_mix import finish_tile, inverse_root, mix_tile, split_total

ROWS, DEPTH = 64, 64  # of a tile
STEPS, SPLITS = 8, 16  # tiles of K in a split, at least; splits, at most
PAIRS = 512  # of a row that a program of `expand` takes, at most
MIX_ROWS = 32  # tokens whose mix a program makes


@triton.jit
def _at_precision(fn, PRECISION: tl.constexpr):
    """fp32: what of the weight takes part. TF32 lacks the lowest 13 bits."""
    if PRECISION == "exact":
        weight = fn
    else:
        weight = (fn.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        if PRECISION == "tf32_compensated":
            weight += ((fn - weight).to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return weight


@triton.jit
def _top(x):
    """x without its lower 16 bits: a bf16 number, as fp32. What is left has 16 significant bits, and then 8."""
    return (x.to(tl.int32, bitcast=True) & HIGH).to(tl.float32, bitcast=True)


@triton.jit
def _dot(x, part, total, NATIVE: tl.constexpr):
    """x [rows, depth] bf16 times a part of the weight that is bf16 in fp32. The interpreter multiplies bf16 wrongly."""
    if NATIVE:  # noqa: SIM108
        total = tl.dot(x, part.to(tl.bfloat16), total)
    else:
        total = tl.dot(widened(x, False), part, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def products_tile(
    streams,
    fn,
    parts,  # fp32 [splits, tokens, M]
    squares,  # fp32 [splits, tokens]
    tokens,
    K: tl.constexpr,
    M: tl.constexpr,
    MIXES: tl.constexpr,  # the next power of two that tl.dot takes
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One split of K for ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mix = tl.arange(0, MIXES)
    split = tl.program_id(1).to(tl.int64)
    live = (row < tokens)[:, None]
    high = tl.zeros([ROWS, MIXES], tl.float32)
    middle = tl.zeros([ROWS, MIXES], tl.float32)
    low = tl.zeros([ROWS, MIXES], tl.float32)
    square = tl.zeros([ROWS, DEPTH], tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * DEPTH + tl.arange(0, DEPTH)
        x = tl.load(streams + row[:, None] * K + k[None, :], mask=live & (k < K)[None, :], other=0.0)
        weight = tl.load(fn + mix[None, :].to(tl.int64) * K + k[:, None], mask=(mix < M)[None, :] & (k < K)[:, None], other=0.0)
        weight = _at_precision(weight, PRECISION)
        first = _top(weight)
        # Infinity has no rest.
        rest = tl.where((weight.to(tl.int32, bitcast=True) & MAGNITUDE) == INFINITY, 0.0, weight - first)
        second = _top(rest)
        high = _dot(x, first, high, NATIVE)
        middle = _dot(x, second, middle, NATIVE)
        if PRECISION != "tf32":
            low = _dot(x, rest - second, low, NATIVE)
        wide = widened(x, NATIVE)
        square += wide * wide
    place = (split * tokens + row)[:, None] * M + mix[None, :]
    tl.store(parts + place, (low + middle) + high, mask=live & (mix < M)[None, :])
    tl.store(squares + split * tokens + row, tl.sum(square, axis=1), mask=row < tokens)


@triton.jit(do_not_specialize=["tokens"])
def add_tile(
    parts,
    squares,
    mixes,
    tokens,
    eps,
    K: tl.constexpr,
    M: tl.constexpr,
    SPLITS: tl.constexpr,  # of the products, and of the squares
    SQUARE_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mixes of the sums of all splits, element by element."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // M
    live = row < tokens
    factor = inverse_root(split_total(squares, row, live, tokens, SQUARE_SPLITS), K, eps)
    total = split_total(parts, at, live, tokens.to(tl.int64) * M, SPLITS)
    tl.store(mixes + at, (total * factor).to(tl.float32), mask=live)


@triton.jit
def expand_tile(y, streams, post, comb, result, C: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """All new streams of a part of one token's row: the old ones in ascending order, then the sublayer's output."""
    blocks: tl.constexpr = (PAIRS + BLOCK - 1) // BLOCK
    row = tl.program_id(0).to(tl.int64) // blocks
    pair = (tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK))[None, :]
    here = pair < PAIRS
    new = tl.arange(0, C)[:, None]
    for old in tl.static_range(C):
        factor = tl.load(comb + row * (C * C) + old * C + new).to(tl.float64)
        even, odd = unpack_pairs(tl.load(streams + (row * C + old) * PAIRS + pair, mask=here, other=0))
        if old == 0:
            first, second = factor * even.to(tl.float64), factor * odd.to(tl.float64)
        else:
            first += factor * even.to(tl.float64)
            second += factor * odd.to(tl.float64)
    factor = tl.load(post + row * C + new).to(tl.float64)
    even, odd = unpack_pairs(tl.load(y + row * PAIRS + pair, mask=here, other=0))
    first += factor * even.to(tl.float64)
    second += factor * odd.to(tl.float64)
    tl.store(result + (row * C + new) * PAIRS + pair, pack_pairs(to_bf16(first), to_bf16(second)), mask=here)


def products(streams: Tensor, fn: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """fp32 [splits, tokens, mixes] and [splits, tokens] of streams [tokens, C, D] and fn [mixes, C D]; neither is empty."""
    flat, weight = _aligned(streams), _aligned(fn)
    tokens, (mixes, width) = flat.shape[0], weight.shape
    tiles = triton.cdiv(width, DEPTH)
    steps = max(STEPS, triton.cdiv(tiles, SPLITS))
    splits = triton.cdiv(tiles, steps)
    parts = torch.empty(splits, tokens, mixes, dtype=torch.float32, device=flat.device)
    squares = torch.empty(splits, tokens, dtype=torch.float32, device=flat.device)
    with torch.cuda.device_of(flat):
        products_tile[(triton.cdiv(tokens, ROWS), splits)](
            flat, weight, parts, squares, tokens, K=width, M=mixes, MIXES=max(triton.next_power_of_2(mixes), 16), STEPS=steps, ROWS=ROWS,
            DEPTH=DEPTH, PRECISION=precision, NATIVE=_native(products_tile), num_warps=4 if mixes <= 32 else 8, num_stages=3,
            enable_fp_fusion=False,
        )  # fmt: skip
    return parts, squares


def add_parts(parts: Tensor, squares: Tensor, width: int, eps: float) -> Tensor:
    """fp32 [tokens, mixes] of products [splits, tokens, mixes] and squares, which may be in fewer splits, of rows of `width` numbers."""
    splits, tokens, mixes = parts.shape
    result = torch.empty(tokens, mixes, dtype=torch.float32, device=parts.device)
    with torch.cuda.device_of(parts):
        add_tile[(triton.cdiv(result.numel(), 256),)](
            parts, squares, result, tokens, eps, K=width, M=mixes, SPLITS=splits, SQUARE_SPLITS=squares.shape[0], BLOCK=256, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return result


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
    pairs = hidden // 2
    block = min(triton.next_power_of_2(pairs), PAIRS)
    with torch.cuda.device_of(streams):
        expand_tile[(tokens * triton.cdiv(pairs, block),)](
            words(y), words(streams), post.contiguous(), comb.contiguous(), words(result), C=count, PAIRS=pairs, BLOCK=block, num_warps=4,
            enable_fp_fusion=False,
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
    scales: Tensor, layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The new streams and their mix, in three launches; fills `normed`, and with a layout codes and `scales`, pads included."""
    new = expand(y, streams, post, comb)
    mix = _mix(new, new.shape[1])
    _finish(
        new, normed, parts=products(new, fn, precision), given=carried_pre, mix=mix, scale=scale, base=base, weight=weight, scales=scales,
        layout=layout, iterations=iterations, norm_eps=norm_eps, rms_eps=rms_eps, eps=eps,
    )  # fmt: skip
    return new, *mix


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
            num_warps=min(max(pairs // 256, 4), 16), enable_fp_fusion=False,
        )  # fmt: skip


def _bytes(scales: Tensor, layout: str) -> Tensor:
    """The memory of scales as bytes, the pad words of packed columns too."""
    if layout == "packed":
        return scales.as_strided((scales.shape[1] * scales.stride(1),), (1,)).view(torch.uint8)
    return scales.view(torch.uint8)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from an address that Triton reads in words of 16 bytes: how squares are spread over threads, and so the order of their
    sum, follows from that."""
    plain = tensor.contiguous()
    return plain.clone() if plain.data_ptr() % 16 else plain


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
