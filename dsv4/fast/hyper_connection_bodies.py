"""What runs for `hyper_connections` where there is no Triton: two bodies that inductor compiles, statistics by BLAS, and Sinkhorn in place.

Where batch invariance is demanded, statistics come from products of equally many rows, the last one filled up with zeros: BLAS adds a row's
terms in one order then, however many rows there are. Sinkhorn keeps the C * C entries of all tokens side by side and works on two buffers,
for its forty dependent steps are too much for one graph and too small for forty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.fast import dispatch
from dsv4.fast.row_bodies import rms_body, rounded

MOST_ROWS = 64  # of a product: 8 MiB in fp64 of 4 x 4096
ROWS = 8  # of a product of one shape, a single one where fn has FEW mixes or less
FEW = 8
TF32_KEPT = ~0x1FFF  # the bits of an fp32 number that TF32 has


def expand_body(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """bf16 [tokens, C, D]: the terms of the old streams in ascending order, then the sublayer's."""
    for other in (streams, post, comb):
        torch._check(other.shape[0] == y.shape[0])
    wide, mixed = streams.double(), comb.double()
    first, *others = (mixed[:, old, :, None] * wide[:, old, None, :] for old in range(streams.shape[1]))  # [tokens, new, hidden]
    return rounded(sum(others, start=first) + post.double()[:, :, None] * y.double()[:, None, :])


def collapse_body(streams: Tensor, pre: Tensor) -> Tensor:
    """bf16 [tokens, D]: the streams' terms in ascending order."""
    torch._check(pre.shape[0] == streams.shape[0])
    first, *others = (streams.double() * pre[:, :, None]).unbind(1)
    return rounded(sum(others, start=first))


def collapse_norm_body(streams: Tensor, pre: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`collapse_body`, then the next sublayer's norm of the rounded rows."""
    torch._check(weight.shape[0] == streams.shape[2])
    return rms_body(collapse_body(streams, pre), weight, eps=eps)


def at_precision(fn: Tensor, precision: str) -> Tensor:
    """fp64: what of an fp32 weight takes part."""
    if precision == "exact":
        return fn.double()
    high = _tf32(fn)
    return (high if precision == "tf32" else high.add_(_tf32(fn - high))).double()  # exact in fp32: a part of the bits of fn


def _tf32(weight: Tensor) -> Tensor:
    return (weight.contiguous().view(torch.int32) & TF32_KEPT).view(torch.float32)


def statistics(streams: Tensor, fn: Tensor, eps: float, precision: str) -> Tensor:
    """fp32 [tokens, mixes]. `eps` is an fp32 number."""
    x = streams.reshape(streams.shape[0], -1)
    totals, squares = (_fixed_sums if dispatch.batch_invariant() else _sums)(x, at_precision(fn, precision))
    factor = squares.div_(x.shape[1]).add_(eps).sqrt_().reciprocal_().float()
    return totals.add_(0.0).mul_(factor[:, None]).to(torch.float32, memory_format=torch.contiguous_format)


def _sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 products [tokens, mixes] of rows with fn, and sums of squares [tokens]."""
    totals, squares = weight.new_empty(len(x), len(weight)), weight.new_empty(len(x))
    block = weight.new_empty(min(len(x), MOST_ROWS), x.shape[1])
    for start in range(0, len(x), MOST_ROWS):
        part = slice(start, start + MOST_ROWS)
        rows = block[: len(x) - start].copy_(x[part])
        torch.mm(rows, weight.T, out=totals[part])
        torch.linalg.vector_norm(rows, dim=1, out=squares[part])
    return totals, squares.square_()


def _fixed_sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The same by products of one shape."""
    tokens, width = x.shape
    height = ROWS if len(weight) > FEW else 1
    starts = range(0, tokens, height)
    totals = weight.new_empty(len(starts), len(weight), height)
    squares = weight.new_empty(tokens + 1)
    block = weight.new_empty(height, width)
    for total, start in zip(totals.unbind(), starts, strict=True):
        rows = x[start : start + height]
        count = rows.shape[0]
        block[:count] = rows
        if count < height:
            block[count:] = 0.0
        torch.mm(weight, block.T, out=total)
        summed = min(max(count, 2), height)  # one row of several would be added in another order
        torch.sum(block[:summed].square_(), 1, out=squares[start : start + summed])
    return totals.transpose(1, 2).flatten(0, 1)[:tokens], squares[:tokens]


def gates(mixes: Tensor, scale: Tensor, base: Tensor) -> Tensor:
    """fp64 sigmoids of mixes [tokens, n] times one scale plus base [n]."""
    return (mixes.double() * scale + base).sigmoid_()


def split(
    mixes: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float, post_multiplier: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and comb, fp32. The numbers are fp32 numbers."""
    tokens = mixes.shape[0]
    pre = gates(mixes[:, :streams], scale[0], base[:streams]).add_(eps).float()
    post = gates(mixes[:, streams : 2 * streams], scale[1], base[streams : 2 * streams]).mul_(post_multiplier).float()
    logits = (mixes[:, 2 * streams :].double() * scale[2] + base[2 * streams :]).float()
    entries = logits.T.reshape(streams, streams, tokens).double()
    return pre, post, _sinkhorn(entries, iterations, eps).permute(2, 0, 1).clone(memory_format=torch.contiguous_format)


def _sinkhorn(entries: Tensor, iterations: int, eps: float) -> Tensor:
    """fp32 [old, new, tokens] of logits in fp64, which are overwritten."""
    powers = entries.sub_(entries.amax(1, keepdim=True)).exp_()
    single = powers.div_(_ascending(powers.unbind(1), 0.0)[:, None]).add_(eps).float()
    sides = ((powers.unbind(0), slice(None)), (powers.unbind(1), (slice(None), None)))
    for step in range(2 * iterations - 1):
        terms, broadcast = sides[step % 2]
        powers.copy_(single)
        torch.div(powers, _ascending(terms, eps)[broadcast], out=single)
    return single


def _ascending(terms: tuple[Tensor, ...], last: float) -> Tensor:
    """Sum of the terms, first one first, and then of `last`."""
    total = terms[0] + terms[1] if len(terms) > 1 else terms[0].clone()
    for term in terms[2:]:
        total += term
    return total.add_(last) if last else total
