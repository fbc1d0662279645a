"""What inductor compiles of norms and rotations, as building blocks: plain functions of bf16 rows, fp64 inside, bf16 results.

Each result is rounded to fp32 and from there to bf16, as the reference rounds it. Nothing branches on data.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor


def rms_body(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """bf16 [..., n], each row over its root mean square, times `weight` [n], bf16 or fp32, if there is one. `eps` is an fp32 number."""
    wide = widened(x)
    factor = 1 / ((wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    normed = wide * factor
    return rounded(normed if weight is None else normed * widened(weight))


def rope_body(x: Tensor, table: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """bf16 [tokens, ..., n] with its last dims rotated by the rows `positions` of `table`; rows of absent positions are zero."""
    torch._check(positions.shape[0] == x.shape[0])
    places, dims = table.shape
    present = (positions >= 0) & (positions < places)
    row = table[torch.where(present, positions, 0).long()].double()  # [tokens, R]
    row = row.reshape(row.shape[0], *(1,) * (x.dim() - 2), dims)
    cosines, sines = row[..., : dims // 2], row[..., dims // 2 :]
    sines = -sines if inverse else sines
    still, tail = x[..., :-dims], widened(x[..., -dims:])
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([even * cosines - odd * sines, odd * cosines + even * sines], -1).flatten(-2)
    whole = torch.cat([still, rounded(turned)], -1)
    return torch.where(present.reshape(-1, *(1,) * (x.dim() - 1)), whole, 0.0)


def norm_rope_body(x: Tensor, table: Tensor, positions: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """`rms_body`, then `rope_body`."""
    return rope_body(rms_body(x, weight, eps=eps), table, positions)


def chain_body(x: Tensor, *, eps: float) -> Tensor:
    """`rms_body` without a weight, every operation rounded to bf16."""
    wide = widened(x)
    mean = rounded(widened(rounded(wide * wide)).sum(-1, keepdim=True) / x.shape[-1])
    root = widened(rounded(widened(mean) + eps)).sqrt()
    return rounded(wide * widened(rounded(1 / root)))


def hadamard_body(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """bf16 or fp32 [rows, a b]: `low` [1, b, b] along the lower bits of the column, then `high` [1, a, a] along the upper ones."""
    rows, n = x.shape
    a, b = high.shape[1], low.shape[1]
    columns = widened(x).view(rows, a, b)
    once = reduce(torch.add, [columns[:, :, i, None] * low[0, i] for i in range(b)])
    twice = reduce(torch.add, [once[:, i, None] * high[0, i, :, None] for i in range(a)])
    result: Tensor = ((twice + 0.0) * n**-0.5).float().to(x.dtype).view(rows, n)
    return result


def widened(x: Tensor) -> Tensor:
    """fp64 of bf16 or fp32. In two steps: inductor has no vectors for one."""
    return x.float().double()


def rounded(exact: Tensor) -> Tensor:
    """fp64 to bf16 by way of fp32."""
    return exact.float().bfloat16()
