"""Products in fp64, also such whose bits do not depend on how many rows there are, nor on where among them a row is.

BLAS chooses how it adds by the shape of a product, and where fp64 sums nearly cancel the order shows: 1 row and 64 are two answers, and so
are 1 matrix and 2. So where batch invariance is demanded no product has a shape that depends on the number of tokens: rows come in blocks
of so many, filled up with zeros, and matrices one by one. Within a product of one shape every row is added alike, in any place and beside
any others: nobody promises that of a BLAS, so it is tested (tests/test_batch_invariance.py), and the parity suite asks it of each function,
with sums that cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

HEIGHT, WIDTH = 512, 256  # of a product where shapes may depend on the number of rows
MATRICES = 16  # of one call on a device that has a launch for each


def fixed_products(a: Tensor, b: Tensor) -> Tensor:
    """a [n, m, k] times b [n, k, p], matrix by matrix; so many at a time where each call is a launch."""
    count, step = a.shape[0], 1 if a.device.type == "cpu" else MATRICES
    if count % step:
        a, b = (pad(side, (0, 0, 0, 0, 0, -count % step)) for side in (a, b))
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    for x, y, into in zip(a.split(step), b.split(step), out.split(step), strict=True):
        torch.bmm(x, y, out=into)
    return out[:count]


def turned(rows: Tensor, height: int) -> Tensor:
    """Rows [n, k] as [blocks, k, height], zeros behind those there are."""
    filled = pad(rows, (0, 0, 0, -rows.shape[0] % height)) if rows.shape[0] % height else rows
    return filled.view(-1, height, rows.shape[1]).transpose(1, 2).contiguous()


def add_products(sums: Tensor, weight: Tensor, blocks: Tensor) -> None:
    """Adds weight [n, k] times each block [k, height] to its sums [n, height]."""
    for total, block in zip(sums, blocks, strict=True):
        total.addmm_(weight, block)


def turned_back(sums: Tensor, count: int) -> Tensor:
    """The first rows [count, n] of [blocks, n, height]."""
    return sums.transpose(1, 2).flatten(0, 1)[:count]


def products(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, k] times weight [p, k], in fp64, as fp32 without -0; in shapes that depend on n. A tile of the weight is widened at a time."""
    result = x.new_empty(len(x), len(weight), dtype=torch.float32)
    for row in range(0, len(x), HEIGHT):
        wide = x[row : row + HEIGHT].double()
        for column in range(0, len(weight), WIDTH):
            result[row : row + HEIGHT, column : column + WIDTH] = wide @ weight[column : column + WIDTH].double().T
    return result.add_(0.0)
