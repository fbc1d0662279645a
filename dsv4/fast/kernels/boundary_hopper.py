"""`boundary` on SM90 in two launches: what is written once is read again from shared memory, or from registers.

The first launch is written with layouts, shared memory and warp roles in hand (Gluon; `boundary_hopper_roles`). A program has a share of
the hidden size, keeps its part of fn in shared memory, and takes one tile of tokens after another: old streams and output come by TMA, new
streams replace them, and from there go to memory by TMA and to the tensor cores, as the left operand of the products with fn. Where pre is
carried, the collapse is made in the same place, for which the old output makes room. Sums over a share (products, and squares) go to memory
apart: how many there are follows from the hidden size alone, and so a token's bits depend on no other token.

The second launch (`boundary_hopper_rows`) adds the shares, makes the mix, collapses where that has not been done, normalises and quantises.

Everything that is rounded once in the reference is evaluated in fp32 with a bound, and in fp64 where that leaves two answers
(`boundary_hopper_rounding`). fn is multiplied as three bf16 parts that together are all of it, at the precision tf32 as two.

Who announces what of a stage:

    full     load, by TMA's bytes: the old tiles are there. expand waits
    made     expand: the new tiles are there. multiply waits
    empty    multiply: tensor cores and TMA have read them. load waits
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.fast import groups
from dsv4.fast.kernels.boundary_hopper_roles import (
    EXPANDERS,
    MIXES,
    ROWS,
    STEPS,
    STREAMS,
    TILE,
    WIDTH,
    Share,
    allocate,
    expand,
    load,
    multiply,
)
from dsv4.fast.kernels.boundary_hopper_rows import CHUNK, finish_rows
from dsv4.fast.kernels.rows import words
from dsv4.fast.kernels.stream_statistics import aligned

MULTIPLY_REGISTERS = gl.constexpr(96)
LOAD_REGISTERS = gl.constexpr(24)
SHARE = int(STEPS.value) * int(WIDTH.value)  # dims
UNIT = 2 * int(CHUNK.value)  # numbers of a chunk
MIX_ROWS = {False: 32, True: 8}  # of `finish_rows`, by whether pre is carried
ROW_WARPS = {False: 8, True: 4}  # of four rows, or of one
LARGEST, MOST = 8192, 1 << 20  # hidden size and tokens


@gluon.jit(do_not_specialize=["tokens", "tiles", "distance"])
def expand_kernel(
    y, streams, new, collapsed, post, comb, given, fn, parts, squares, tokens, tiles, distance,
    D: gl.constexpr, PARTS: gl.constexpr, PRECISION: gl.constexpr, CARRIED: gl.constexpr,
):  # fmt: skip
    """New streams, and sums over each share. The first four are TMA descriptors; `distance` is the number of programs of a share."""
    shared = allocate(PARTS)
    SHARES: gl.constexpr = D // (WIDTH * STEPS)
    share = Share(gl.program_id(0) // SHARES, distance, tiles, tokens, gl.program_id(0) % SHARES)
    gl.warp_specialize(
        [
            (expand, (shared, share, post, comb, given, squares, CARRIED)),
            (multiply, (shared, share, fn, new, collapsed, parts, D, PARTS, PRECISION, CARRIED)),
            (load, (shared, share, y, streams, D)),
        ],
        [4, 4],
        [MULTIPLY_REGISTERS, LOAD_REGISTERS],
    )


def supported(streams: int, hidden: int, tokens: int = 1) -> str | None:
    """Why these kernels do not take so many streams and tokens of this size; None if they do. The device is SM90."""
    if streams != int(STREAMS.value):
        return f"takes {STREAMS.value} streams, these are {streams}"
    if hidden % UNIT or hidden > LARGEST:
        return f"takes a hidden size that is a multiple of {UNIT}, at most {LARGEST}; this is {hidden}"
    if tokens > MOST:
        return f"takes at most {MOST} tokens, these are {tokens}"
    return None


def boundary(
    y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor,
    carried_pre: Tensor | None, norm_eps: float, rms_eps: float, iterations: int, eps: float, precision: str, normed: Tensor,
    scales: Tensor, layout: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The new streams and their mix, in two launches; fills `normed`, and with a layout codes and `scales`, pads included."""
    tokens, count, hidden = streams.shape
    carried = carried_pre is not None
    new = torch.empty(tokens, count, hidden, dtype=streams.dtype, device=streams.device)
    collapsed = torch.empty_like(y, memory_format=torch.contiguous_format) if carried and layout else normed
    shares = hidden // SHARE
    parts, squares, pre, post_, comb_ = (
        torch.empty(shape, dtype=torch.float32, device=streams.device)
        for shape in (
            (shares, tokens, int(MIXES.value)), (shares, tokens), (tokens, count), (tokens, count), (tokens, count, count),
        )
    )  # fmt: skip
    tiles = triton.cdiv(tokens, int(ROWS.value))
    each = max(min(_multiprocessors(streams.device) // shares, tiles), 1)
    out, weights = _described(new, "zero"), (aligned(post), aligned(comb))
    with torch.cuda.device_of(streams):
        expand_kernel[(shares * each,)](
            _described(aligned(y)), _described(aligned(streams)), out, _described(collapsed, "zero") if carried else out, *weights,
            aligned(carried_pre) if carried_pre is not None else weights[0], aligned(fn), parts, squares, tokens, tiles, each, D=hidden,
            PARTS=2 if precision == "tf32" else 3, PRECISION=precision, CARRIED=carried, num_warps=EXPANDERS.value, enable_fp_fusion=False,
        )  # fmt: skip
        _finish(
            collapsed if carried else new, parts, squares, scale, base, (pre, post_, comb_), weight, normed, scales, layout, norm_eps,
            rms_eps, eps, iterations, carried=carried,
        )  # fmt: skip
    return new, pre, post_, comb_


def _finish(
    rows: Tensor, parts: Tensor, squares: Tensor, scale: Tensor, base: Tensor, mix: tuple[Tensor, Tensor, Tensor], weight: Tensor,
    normed: Tensor, scales: Tensor, layout: str, norm_eps: float, rms_eps: float, eps: float, iterations: int, *, carried: bool,
) -> None:  # fmt: skip
    """One launch of `finish_rows`; arguments that a form of it does not read are the weight."""
    splits, tokens, _ = parts.shape
    hidden = normed.shape[1]
    mixing, tall, pitch, gain = triton.cdiv(tokens, MIX_ROWS[carried]), tokens, 0, words(weight)
    if layout:
        (tall, _), pitch = groups.padded_scales(tokens, hidden // 32, layout)
    finish_rows[(mixing + tall,)](
        words(rows), parts, squares, scale.contiguous(), base.contiguous(), *mix, gain,
        normed.view(torch.int16) if layout else words(normed), _bytes(scales, layout) if layout else gain, tokens, mixing, pitch,
        groups.floor_of("fp8", "official"), norm_eps, rms_eps, eps, CHUNKS=hidden // UNIT, SPLITS=splits,
        SPLITS_TILE=triton.next_power_of_2(splits), CARRIED=carried, LAYOUT=layout, ITERATIONS=iterations, ROWS=MIX_ROWS[carried],
        num_warps=ROW_WARPS[carried], enable_fp_fusion=True,
    )  # fmt: skip


def _described(rows: Tensor, padding: str = "nan") -> TensorDescriptor:
    """[tokens, ..] for TMA, in tiles of ROWS by WIDTH; rows behind the last one read as NaN."""
    flat = rows.view(rows.shape[0], -1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [int(ROWS.value), int(WIDTH.value)], TILE.value, padding)


def _bytes(scales: Tensor, layout: str) -> Tensor:
    """The memory of scales as bytes, the pad words of packed columns too."""
    if layout == "packed":
        return scales.as_strided((scales.shape[1] * scales.stride(1),), (1,)).view(torch.uint8)
    return scales.view(torch.uint8)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
