"""Norms and collapses of rows by torch's own operations, in place: what a CPU does fastest.

Compiled loops convert between fp64 and fp32 through memory, and work out a row's factor again for every vector. On a CPU so many rows are
taken at a time as an fp64 buffer of MOST numbers holds (2 MiB, unless a row is longer), which the next rows find in the cache; elsewhere
all rows. A row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsv4.fast.row_bodies import rounded

MOST = 1 << 18


def rms(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """`row_bodies.rms_body` of bf16 [rows, n].

    The square of a norm takes less time than a sum of squares, and is off by a few fp64 units where that is exact. What exact factors make
    with bf16 weights is exact in fp32, which restores it; with fp32 weights it may lie between two fp32 numbers, and squares are added.
    """
    result, gain = torch.empty_like(x), None if weight is None else weight.double()
    narrow = weight is None or weight.dtype == torch.bfloat16
    for some, normed, buffers in _chunks(1 if narrow else 2, x, result):
        wide = _widened(some, buffers[0])
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_() if narrow else _sums(torch.square(wide, out=buffers[1]))
        wide.mul_(squares.div_(x.shape[1]).add_(eps).rsqrt_())
        normed.copy_(wide if gain is None else wide.mul_(gain))
    return result


def chain(x: Tensor, *, eps: float) -> Tensor:
    """`row_bodies.chain_body` of bf16 [rows, n]. Torch multiplies bf16 numbers in fp32, where a product is exact, and rounds once."""
    result = torch.empty_like(x)
    for some, normed, (buffer,) in _chunks(1, x, result):
        mean = rounded(_sums(_widened(torch.mul(some, some, out=normed), buffer)).div_(x.shape[1]))
        torch.mul(some, rounded(rounded(mean.double().add_(eps)).double().rsqrt_()), out=normed)
    return result


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`hyper_connection_bodies.collapse_body`: the streams' terms in ascending order."""
    result = streams.new_empty((streams.shape[0], streams.shape[2]))
    for some, collapsed, buffers, weight in _chunks(2, streams, result, pre.double()):
        total = _widened(some[:, 0], buffers[0]).mul_(weight[:, :1])
        for k in range(1, some.shape[1]):
            total.addcmul_(_widened(some[:, k], buffers[1]), weight[:, k : k + 1])
        collapsed.copy_(total)
    return result


def _widened(x: Tensor, buffer: Tensor | None) -> Tensor:
    return x.double() if buffer is None else buffer.copy_(x)


def _sums(rows: Tensor) -> Tensor:
    """[rows, 1]. Threads share a sum that is the only one, which is another order: a single row is added twice."""
    return rows.sum(-1, keepdim=True) if len(rows) > 1 else rows.expand(2, -1).sum(-1, keepdim=True)[:1]


def _chunks(buffers: int, x: Tensor, result: Tensor, *more: Tensor) -> Iterator[tuple[Any, ...]]:
    """Rows of x and of the result, so many fp64 buffers like the latter's (None where all rows go at once), and rows of more."""
    rows, n = result.shape
    count = max(MOST // n, 1)
    if rows <= count or x.device.type != "cpu":
        yield x, result, (None,) * buffers, *more
        return
    room = x.new_empty((buffers, count, n), dtype=torch.float64)
    for start in range(0, rows, count):
        end = min(start + count, rows)
        yield x[start:end], result[start:end], room[:, : end - start].unbind(), *(each[start:end] for each in more)
