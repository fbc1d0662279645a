"""Which entries a query attends to, given its scores: the best k, the best blocks, and scores restricted to blocks.

Of the scores S of a query, entries starts <= j < ends with a score that is neither NaN nor -inf are there, +inf among them:

    picks = the k of them with the largest scores                                                    (1)
    b_i   = the largest score of entries i B .. i B + B - 1 that are visible, j < ends               (2)
    kept  = the block of the newest visible entry, (ends - 1) div B, and the blocks with the
            largest b_i, until there are `count`                                                     (3)
    S_j   = -inf where block j div B is not kept                                                     (4)

Scores are compared as numbers: -0 and 0 are equal. Equal scores go to the smaller entry, equal blocks to the smaller block. In (2) a NaN
counts as -inf; a block of -inf alone is not kept, unless it is the newest. starts and ends are taken within 0 .. n, so that starts = -3 is
0. Whatever is missing is -1 and stands behind everything else. Source: spec A 5.4, 5.5.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import indexer_checks
from dsv4.reference.kv_cache import page_slots
from dsv4.reference.numerics import float_dtypes
from dsv4.types import IndexOrder

__all__ = ["candidate_blocks", "restrict_to_blocks", "select_topk"]

LARGEST_INT32 = 2**31 - 1


def select_topk(
    logits: Tensor,
    k: int,
    *,
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    order: IndexOrder | str = IndexOrder.ANY,
    block_table: Tensor | None = None,
    requests: Tensor | None = None,
    page_size: int | None = None,
) -> Tensor:
    """The k best entries of each query, by (1).

    Args:
        logits: [tokens, n], fp32 or bf16.
        k: picks of a token, >= 1, also beyond n.
        ends: [tokens], int32 or int64: the first entry that a token does not see; None for n.
        starts: [tokens], int32 or int64: the first entry that it sees; None for 0. Picks are counted from here.
        order: score, index, or any: then the set alone is promised.
        block_table: [requests, pages], int32, with `requests` [tokens], int32, and `page_size`: picks become slots,
            block_table[request, pick div page_size] page_size + pick mod page_size.

    Returns:
        int32 [tokens, k], -1 behind the last pick. With a block table a pick whose request or page is not there, or whose slot is beyond
        2^31 - 1, is -1 as well, behind the others; no other entry takes its place. The order is then still that of the picks.

    Raises:
        ArgumentError: wrong dtypes or shapes, k < 1, an unknown order, some of block_table, requests and page_size without the others.
    """
    chosen = indexer_checks.select_topk(logits, k, ends, starts, order, block_table, requests, page_size, (*float_dtypes(), "bf16"))
    n = logits.shape[1]
    first = torch.zeros_like(logits[:, 0:1], dtype=torch.int64) if starts is None or not n else starts.long().clamp(0, n)[:, None]
    there = _visible(logits, ends) & (torch.arange(n, device=logits.device) >= first) & (logits > -inf)
    best = _ranked(logits, there)[:, :k]  # [tokens, min(k, n)]
    known = torch.arange(best.shape[1], device=logits.device) < there.sum(1, keepdim=True)
    picks = torch.where(known, best - first, -1)
    if chosen is not IndexOrder.SCORE:
        picks = _ascending(picks)
    if block_table is not None and requests is not None and page_size is not None:
        slots = page_slots(block_table, requests.repeat_interleave(picks.shape[1]), picks.flatten(), page_size=page_size)
        picks = _trailing(torch.where(slots <= LARGEST_INT32, slots, -1).view_as(picks))
    return pad(picks, (0, k - picks.shape[1]), value=-1).to(torch.int32)


def candidate_blocks(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    """The blocks of entries that later layers choose from, by (2) and (3).

    Args:
        logits: [tokens, n], fp32 or bf16.
        ends: [tokens], int32 or int64: the first entry that a token does not see.
        block: entries of a block, B >= 1.
        count: blocks of a token, >= 1.

    Returns:
        int32 [tokens, min(count, ceil(n / block))], ascending, -1 behind the last. The block of the newest visible entry is among them
        whatever the scores are; a token that sees nothing has none.

    Raises:
        ArgumentError: wrong dtypes or shapes, block or count < 1.
    """
    indexer_checks.candidate_blocks(logits, ends, block, count, (*float_dtypes(), "bf16"))
    n = logits.shape[1]
    block = min(block, max(n, 1))  # a longer one is one block too
    seen = logits.where(_visible(logits, ends) & ~logits.isnan(), -inf)
    scores = pad(seen, (0, -n % block), value=-inf).unflatten(1, (-1, block)).amax(2)  # [tokens, blocks]
    numbers = torch.arange(scores.shape[1], device=logits.device)
    newest = numbers == ((ends.long().clamp(0, n) - 1).div(block, rounding_mode="floor"))[:, None]
    there = (scores > -inf) | newest
    ranked = _ranked(scores, there)
    ranked = ranked.gather(1, newest.gather(1, ranked).sort(dim=1, descending=True, stable=True).indices)[:, :count]
    known = torch.arange(ranked.shape[1], device=logits.device) < there.sum(1, keepdim=True)
    return _ascending(torch.where(known, ranked, -1)).to(torch.int32)


def restrict_to_blocks(logits: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    """Scores with -inf outside of the kept blocks, by (4).

    Args:
        logits: [tokens, n], fp32 or bf16.
        blocks: [tokens, count], int32 or int64, as `candidate_blocks` gives them; numbers of no block are skipped.
        block: entries of a block, >= 1.

    Returns:
        [tokens, n] of the dtype of `logits`, a new tensor.

    Raises:
        ArgumentError: wrong dtypes or shapes, block < 1.
    """
    indexer_checks.restrict_to_blocks(logits, blocks, block, (*float_dtypes(), "bf16"))
    tokens, n = logits.shape
    block = min(block, max(n, 1))  # a longer one is one block too
    total = -(-n // block)
    places = torch.where((blocks >= 0) & (blocks < total), blocks.long(), total)  # one column more takes what is skipped
    kept = torch.zeros(tokens, total + 1, dtype=torch.bool, device=logits.device).scatter(1, places, True)
    return logits.where(kept[:, :total].repeat_interleave(block, 1)[:, :n], -inf)


def _visible(logits: Tensor, ends: Tensor | None) -> Tensor:
    """bool [tokens or 1, n]."""
    entries = torch.arange(logits.shape[1], device=logits.device)
    return entries[None] < (logits.shape[1] if ends is None else ends.long()[:, None])


def _ranked(scores: Tensor, there: Tensor) -> Tensor:
    """Columns in descending score, ties to the smaller one, those that are not there last: int64 [tokens, n]."""
    numbers = torch.where(there, scores.double() + 0.0, -inf)  # -0 + 0 is 0: a sort by bits would put -0 behind
    order = numbers.sort(dim=1, descending=True, stable=True).indices
    return order.gather(1, there.gather(1, order).sort(dim=1, descending=True, stable=True).indices)


def _ascending(numbers: Tensor) -> Tensor:
    """Each row in ascending order, -1 last."""
    return _trailing(numbers.sort(dim=1).values)


def _trailing(numbers: Tensor) -> Tensor:
    """Each row in its order, -1 last."""
    return numbers.gather(1, (numbers < 0).sort(dim=1, stable=True).indices)
