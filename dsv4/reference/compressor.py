"""Compressors: r tokens of a request become one entry of the cache, as soon as the last of them is there.

The token at position p of a request has values v_p and scores s_p [width]. Entry w is of tokens rw .. rw + r - 1 and comes into being with
the last of them. Without overlap (width = dim), for each channel,

    v = x Wkv^T,  s = x Wgate^T                                                                  (1)
    t_q = s_q + a_(q mod r)                           a the positional bias, if there is one     (2)
    e_w = sum over q of softmax_q(t)_q v_q            q = rw .. rw + r - 1                       (3)

With overlap (V4's ratio 4, width = 2 dim) an entry also looks at the tokens of the one before it, through other channels: the first dim
channels of a token are for entry w + 1, the last dim for its own. Entry w then has 2r candidates in (3),

    first half of tokens rw - r .. rw - 1             the overlap series; absent where w = 0
    second half of tokens rw .. rw + r - 1            the own series

    y_w = norm(e_w)                                   latent                                     (4)
    cache[slot_w] = quantise(rope(y_w, position rw))  the window's first token                   (5)

What is left of earlier calls is a ring a request: row p mod ring holds token p, its values and then its raw scores s; (2) is done when an
entry is pooled. A call with tokens start .. start + n - 1

    1. emits entries start div r .. (start + n) div r - 1; a window that is not full emits nothing and shows nowhere;
    2. takes tokens from `start` on from its arguments, earlier ones from the ring, and none before position 0 from anywhere;
    3. writes its last min(n, ring) tokens into the ring, and nothing else.

So a ring of r rows (2r with overlap) is enough: an entry looks back on no more. Any cut of a request into calls gives the same bits. The
ring is addressed by position and read only before `start`, so nothing needs undoing when tokens are dropped: a call with a smaller `start`
just writes over them. What it still reads must not have been overwritten, so a ring has `drafts` rows more than an entry needs. Ratio 1
looks back on nothing and has no ring: its softmax of one term is 1, whatever the score.

Shapes: values, scores fp32 [tokens, width], requests one after another, request b at cu_seqlens[b] .. cu_seqlens[b + 1] - 1; state fp32
[states, ring, 2 width]; weights bf16 or fp32; e and y bf16. A request is idle, that is, nothing is read, written or emitted for it, where
its state row is -1 or does not exist, its offsets are out of order or outside 0 .. tokens, or its start is outside 0 .. 2^62 - 1.

Roundings: (1) and (2) are one step each, evaluated in fp64 and rounded once to fp32. (3) is one step, rounded to fp32 and from there to
bf16. (4) and (5) round as `norms`, `rotary` and `kv_cache` say. NaN and infinities follow IEEE arithmetic: a window whose scores are all
minus infinity gives NaN. Source: spec A 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import compressor_checks
from dsv4.compressor_checks import compressor_state, roll_back
from dsv4.reference.kv_cache import store_kv
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import bf16_dtypes, bf16_step, float_dtypes, fp32_step
from dsv4.reference.rotary import apply_rope
from dsv4.types import Compressed, CompressionPlan, Projected, StoredEntries

__all__ = ["compress", "compress_and_store", "compression_plan", "compressor_state", "project", "roll_back"]


def project(x: Tensor, wkv: Tensor, wgate: Tensor) -> Projected:
    """Values and scores of tokens, by (1).

    Args:
        x: [tokens, hidden], bf16: the normalised input of the attention.
        wkv, wgate: [width, hidden], bf16 or fp32. A compressor without a gate (ratio 1) passes wkv twice.

    Returns:
        Projected(values, scores), fp32 [tokens, width].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    compressor_checks.project(x, wkv, wgate, bf16_dtypes())

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.T + 0.0  # a sum of 0 is +0: BLAS may begin with a product of -0

    return Projected(fp32_step(product, x, wkv), fp32_step(product, x, wgate))


def compression_plan(starts: Tensor, cu_seqlens: Tensor, *, ratio: int, tokens: int, state_rows: Tensor | None = None) -> CompressionPlan:
    """The entries that a batch completes.

    Args:
        starts: int64 [requests]: tokens that each request has had before, the position of its next one.
        cu_seqlens: int32 [requests + 1]: where each request's tokens begin, and at last where they end.
        ratio: r.
        tokens: rows of a call's tokens; those past the last offset are padding and nobody's.
        state_rows: int32 [requests], below 0 for an idle request; None where there is none.

    Returns:
        CompressionPlan(requests int32, entries int64), min(tokens, tokens // ratio + requests) rows each: requests in order, entries
        ascending, -1 in the rows left over.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    rows = compressor_checks.plan(starts, cu_seqlens, ratio, tokens, state_rows)
    batch = _batch(starts, cu_seqlens, tokens, state_rows)
    first, last = batch.starts // ratio, (batch.starts + batch.lengths) // ratio
    requests, number = _spread(last - first)
    planned = CompressionPlan(requests.to(torch.int32), first[requests] + number)
    return CompressionPlan(*(pad(part[:rows], (0, rows - len(part[:rows])), value=-1) for part in planned))


def compress(
    values: Tensor,
    scores: Tensor,
    state: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    *,
    ratio: int,
    overlap: bool = False,
    ape: Tensor | None = None,
    state_rows: Tensor | None = None,
) -> Compressed:
    """Pool every window that these tokens complete, by (2) and (3), and remember the tokens.

    Args:
        values, scores: [tokens, width], fp32, of `project`.
        state: fp32 [states, ring, 2 * width], of `compressor_state`.
        starts, cu_seqlens: as `compression_plan`.
        ratio: r.
        overlap: whether an entry also looks at the tokens of the one before it; then width is 2 dim, otherwise dim.
        ape: [ratio, width], fp32: the positional bias; None is none, as in V4.1.
        state_rows: [requests], int32: which state is whose, -1 for an idle request; no two alike. None: request b has state b.

    Returns:
        Compressed(pooled bf16 [rows, dim], requests int32 and entries int64 as `compression_plan`, state). Rows left over are zero.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers, a ring too short for the ratio.
    """
    rows = compressor_checks.compress(
        values, scores, state, starts, cu_seqlens, ratio=ratio, overlap=overlap, ape=ape, state_rows=state_rows, floats=float_dtypes()
    )
    states, ring, _ = state.shape
    if state_rows is not None:
        state_rows = torch.where(state_rows < states, state_rows, -1)
    batch = _batch(starts, cu_seqlens, values.shape[0], state_rows)
    plan = compression_plan(starts, cu_seqlens, ratio=ratio, tokens=values.shape[0], state_rows=state_rows)
    done = plan.requests >= 0

    tokens = torch.cat([values, scores], 1)  # [tokens, 2 width]
    window = torch.arange(-ratio if overlap else 0, ratio, device=values.device)
    positions = plan.entries[done, None] * ratio + window  # [entries, window]
    places = _places(batch, plan.requests[done], positions, len(tokens), ring)
    of_values, of_scores = torch.cat([tokens, state.flatten(0, 1)])[places].chunk(2, -1)  # [entries, window, width]
    entries = _pool(of_values, of_scores, positions, ratio, overlap, ape)  # [entries, dim]
    pooled = torch.cat([entries, entries.new_zeros(rows - len(entries), entries.shape[1])])
    return Compressed(pooled, *plan, _remember(state, tokens, batch))


def compress_and_store(
    values: Tensor,
    scores: Tensor,
    state: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    weight: Tensor,
    table: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    ratio: int,
    overlap: bool = False,
    ape: Tensor | None = None,
    eps: float,
    layout: str,
    page_size: int,
    amax_floor: str = "official",
    state_rows: Tensor | None = None,
) -> StoredEntries:
    """Pool, normalise, rotate, quantise and store, by (2) to (5).

    Args:
        values, scores, state, starts, cu_seqlens, ratio, overlap, ape, state_rows: as `compress`.
        weight, eps: of the norm, as `rms_norm`.
        table: fp32 [positions, dims], of `rope_table`.
        pages: uint8 [pages, stride].
        slots: [rows], int64 or int32: where each row of the plan goes, as `store_kv`; no two alike, but -1 for nowhere.
        layout, page_size, amax_floor: as `store_kv`.

    Returns:
        StoredEntries(latents bf16 [rows, dim], requests, entries, state, pages). Latents are not rotated; rows left over are zero, and go
        nowhere whatever their slot.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    compressed = compress(values, scores, state, starts, cu_seqlens, ratio=ratio, overlap=overlap, ape=ape, state_rows=state_rows)
    pooled, requests, entries, state = compressed
    rows, dim = pooled.shape
    compressor_checks.store(
        rows, dim, values, weight, table, pages, slots, eps=eps, layout=layout, page_size=page_size, amax_floor=amax_floor
    )
    done = requests >= 0
    normed = rms_norm(pooled, weight, eps=eps)
    latents = torch.where(done[:, None], normed, torch.zeros_like(normed))
    rotated = apply_rope(latents, table, torch.where(done, entries * ratio, -1))
    pages = store_kv(rotated, pages, torch.where(done, slots, -1), layout=layout, page_size=page_size, amax_floor=amax_floor)
    return StoredEntries(latents, requests, entries, state, pages)


class _Batch(NamedTuple):
    """Requests of a call, int64 [requests] all; an idle one has a length of 0."""

    starts: Tensor  # position of the first token
    firsts: Tensor  # and its row among the tokens
    lengths: Tensor
    states: Tensor


def _batch(starts: Tensor, cu_seqlens: Tensor, tokens: int, state_rows: Tensor | None) -> _Batch:
    first, last = cu_seqlens.long()[:-1], cu_seqlens.long()[1:]
    states = torch.arange(len(starts), device=starts.device) if state_rows is None else state_rows.long()
    live = (states >= 0) & (first >= 0) & (first <= last) & (last <= tokens)
    live &= (starts >= 0) & (starts <= compressor_checks.LARGEST_START)
    return _Batch(*(torch.where(live, part, 0) for part in (starts, first, last - first, states)))


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Which request each of `counts` things is of, and its number in it: [2, 0, 3] gives [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]."""
    requests = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return requests, torch.arange(len(requests), device=counts.device) - (counts.cumsum(0) - counts)[requests]


def _places(batch: _Batch, requests: Tensor, positions: Tensor, tokens: int, ring: int) -> Tensor:
    """Where a request's positions [entries, window] lie in the tokens of this call with all rings behind them; 0 for those before 0."""
    starts, firsts, _, states = (part[requests, None] for part in batch)  # [entries, 1]
    remembered = tokens + states * ring + positions % max(ring, 1)
    places = torch.where(positions >= starts, firsts + positions - starts, remembered)
    return torch.where(positions >= 0, places, 0)


def _pool(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Tensor:
    """(2) and (3): values and scores [entries, window, width] of the tokens at positions [entries, window]."""
    if positions.shape[1] == 1:
        return bf16_step(lambda v: v[:, 0], values)
    if ape is not None:
        scores = fp32_step(lambda s, a: s + a, scores, ape[positions % ratio])
    if overlap:
        values, scores = (torch.cat([t[:, :ratio].chunk(2, 2)[0], t[:, ratio:].chunk(2, 2)[1]], 1) for t in (values, scores))
    absent = (positions < 0)[:, :, None]
    values, scores = values.masked_fill(absent, 0.0), scores.masked_fill(absent, -torch.inf)
    return bf16_step(lambda t, v: (t.softmax(1) * v).sum(1), scores, values)


def _remember(state: Tensor, tokens: Tensor, batch: _Batch) -> Tensor:
    """The rings with the last tokens of each request."""
    ring = state.shape[1]
    kept = batch.lengths.clamp(max=ring)
    requests, number = _spread(kept)
    number = number + (batch.lengths - kept)[requests]  # counted from the request's first token
    row = (batch.starts[requests] + number) % max(ring, 1)
    dtype = torch.promote_types(state.dtype, tokens.dtype)  # fp64 where roundings are off
    return state.to(dtype).index_put((batch.states[requests], row), tokens[batch.firsts[requests] + number].to(dtype))
