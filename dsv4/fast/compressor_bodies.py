"""What inductor compiles of `compressor`: which entries there are, where their tokens lie, the entries, what goes into the rings.

Numbers of entries and of tokens to keep are cumulative sums over the requests, and a row finds its request in them by bisection. How many
rows there are is the caller's: as many as there may be, or as there are where counting them waits for nothing.

A window is int64 [rows, tokens of the window]: the row of the chunk that a token is in, or -1 less its row of the state (its request's
ring, flattened), or ABSENT before the first token. A request that is idle, or whose numbers make no sense, counts as one of no tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.compressor_checks import LARGEST_START
from dsv4.fast.kv_bodies import quantize_body
from dsv4.fast.row_bodies import rms_body, rope_body, rounded

ABSENT = -(2**62)


class Spans(NamedTuple):
    """The tokens of each request, int64 [requests]."""

    starts: Tensor  # position of the first
    begins: Tensor  # its row
    counts: Tensor
    states: Tensor  # row of its state


def spans(starts: Tensor, cu_seqlens: Tensor, tokens: int, state_rows: Tensor | None, states: Tensor | None) -> Spans:
    """Requests by their tokens. `states` is the number of states there are, where it matters."""
    torch._check(cu_seqlens.shape[0] == starts.shape[0] + 1)
    request = torch.arange(starts.shape[0], device=starts.device)
    begins, ends = cu_seqlens[request], cu_seqlens[request + 1]  # torch 2.11 cannot compile slices of a tensor whose size varies
    counts = ends - begins
    signs = starts | (LARGEST_START - starts) | begins | ends | counts | (tokens - ends)  # negative if any of these is
    if state_rows is None:
        rows = request
    else:
        torch._check(state_rows.shape[0] == starts.shape[0])
        rows = state_rows.long()
        signs = signs | rows
    if states is not None:
        signs = signs | (states - 1 - rows)
    return Spans(starts, begins, torch.where(signs >= 0, counts, 0), rows)


def plan(of: Spans, ratio: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Request and number of the entry of each row, as many as `like` has; -1 in rows left over."""
    first, past = of.starts // ratio, (of.starts + of.counts) // ratio
    last = (past - first).cumsum(0)
    row = torch.arange(like.shape[0], device=last.device)
    request = torch.searchsorted(last, row, right=True)
    there = request < of.starts.shape[0]
    requests = torch.where(there, request, -1)
    return requests, torch.where(there, row + (past - last)[requests], -1)


def window(of: Spans, requests: Tensor, entries: Tensor, ratio: int, overlap: bool, ring: Tensor | None) -> Tensor:
    """Where the tokens of entries lie."""
    request = requests.clamp(min=0)
    start = of.starts[request][:, None]
    position = (entries * ratio)[:, None] + torch.arange(-ratio if overlap else 0, ratio, device=entries.device)
    fresh = position + (of.begins[request][:, None] - start)
    if ring is None:
        return torch.where(position >= 0, fresh, ABSENT)
    kept = -1 - of.states[request][:, None] * ring - position % ring
    return torch.where(position >= 0, torch.where(position >= start, fresh, kept), ABSENT)


def state_writes(
    of: Spans, state: Tensor, values: Tensor, scores: Tensor, states: Tensor, ring: Tensor, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What goes into the rings and where, in as many rows as `like` has: states, places in their rings, values beside scores.

    Rows that are not needed repeat the first, and if nothing is written a state as it is. `state` is flattened.
    """
    last = torch.minimum(of.counts, ring).cumsum(0)
    row = torch.arange(like.shape[0], device=last.device)
    row = torch.where(row < last[-1], row, 0)
    request = torch.searchsorted(last, row, right=True).clamp(max=of.starts.shape[0] - 1)
    nth = (of.counts - last)[request] + row
    kept, place = of.states[request].clamp(min=0).minimum(states - 1), ((of.starts[request] + nth) % ring).clamp(min=0)
    token = (of.begins[request] + nth).clamp(0, values.shape[0] - 1)
    return kept, place, torch.where(last[-1] > 0, torch.cat([values[token], scores[token]], 1), state[kept * ring + place])


def step_body(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    like: Tensor, kept: Tensor, states: Tensor, ring: Tensor, *more: Tensor,
    names: tuple[str, ...], ratio: int, overlap: bool, remembers: bool, eps: float = 0.0, layout: str = "", zeroes: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A whole step: requests and numbers of entries, the entries (with a layout, their latents and records), and the state's writes.

    `like` and `kept` have as many rows as there may be entries and writes; `states` and `ring` are the sizes of the state; `more` are the
    tensors of `names`: ape, state_rows, and those of `store_body`. Without `remembers` there is no ring.
    """
    given = dict(zip(names, more, strict=True))
    of = spans(starts, cu_seqlens, values.shape[0], given.pop("state_rows"), states)
    requests, entries = plan(of, ratio, like)
    places = window(of, requests, entries, ratio, overlap, ring if remembers else None)
    pooled = pool_body(values, scores, state, places, given.pop("ape", None), ratio=ratio, overlap=overlap)
    pooled = torch.where((requests >= 0)[:, None], pooled, 0.0)
    rows = store_body(pooled, requests, entries * ratio, **given, eps=eps, layout=layout, zeroes=zeroes) if layout else (pooled,)
    writes = state_writes(of, state, values, scores, states, ring, kept) if remembers else ()
    return requests.int(), entries, *rows, *writes


def pool_body(values: Tensor, scores: Tensor, state: Tensor, places: Tensor, ape: Tensor | None, *, ratio: int, overlap: bool) -> Tensor:
    """Entries, bf16 [rows, dim]. state [places, 2 width] is flattened; each half of a window has columns of its own."""
    torch._check(values.shape[0] == scores.shape[0])
    if ape is not None:
        torch._check(ape.shape[0] == ratio)
    dim = values.shape[1] // 2 if overlap else values.shape[1]
    halves = [(places[:, half * ratio : (half + 1) * ratio], half * dim) for half in range(2 if overlap else 1)]
    terms = [_terms(values, scores, state, half, column, dim, ape) for half, column in halves]
    if ratio == 1 and not overlap:
        return rounded(terms[0][0][:, 0])
    largest = terms[0][1].amax(1, keepdim=True)
    for _, score in terms[1:]:
        largest = torch.maximum(largest, score.amax(1, keepdim=True))
    weights = [torch.exp(score - largest) for _, score in terms]
    total, whole = weights[0].sum(1), (weights[0] * terms[0][0]).sum(1)
    for weight, (value, _) in zip(weights[1:], terms[1:], strict=True):
        total, whole = total + weight.sum(1), whole + (weight * value).sum(1)
    return rounded(whole / total)


def store_body(
    pooled: Tensor,
    requests: Tensor,
    positions: Tensor,
    *,
    weight: Tensor,
    table: Tensor,
    floor: Tensor,
    eps: float,
    layout: str,
    zeroes: bool,
) -> tuple[Tensor, Tensor]:
    """Latents of entries, and their records in the cache. weight [1, dim]; eps an fp32 number; floor and zeroes as `quantize_body`."""
    latents = torch.where((requests >= 0)[:, None], rms_body(pooled, weight[0], eps=eps), 0.0)
    return latents, quantize_body(rope_body(latents, table, positions), floor, layout=layout, zeroes=zeroes)


def _terms(
    values: Tensor, scores: Tensor, state: Tensor, places: Tensor, column: int, dim: int, ape: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values and scores with their bias of one half of the windows, fp64 [rows, ratio, dim]."""
    width = values.shape[1]
    there, fresh = (places != ABSENT)[:, :, None], (places >= 0)[:, :, None]
    chunk, ring = places.clamp(min=0), (-1 - places).clamp(0, state.shape[0] - 1)
    value = torch.where(fresh, values[chunk][..., column : column + dim], state[ring][..., column : column + dim])
    score = torch.where(fresh, scores[chunk][..., column : column + dim], state[ring][..., width + column : width + column + dim])
    if ape is not None:
        score = score + ape[:, column : column + dim]
    return torch.where(there, value, 0.0).double(), torch.where(there, score, -torch.inf).double()
