"""The lightning indexer: which compressed entries a token attends to.

    S_tj = sum over h of w_th relu(q_th . k_j),    starts_t <= j < ends_t, else -inf                      (1)
    ends_t = (p_t + 1) div r                                                                              (2)
    picks = the k entries with the largest scores, in a later layer of V4.1 within candidate blocks       (3)

q_th, w_th the index queries and weights of token t, one for each of H heads; k_j the index key of entry j; p_t the token's position, r the
tokens of an entry. Queries and keys are codes with scales: `dsv4.reference.index_codes` makes them, and keeps keys in pages. The selection
(3), given scores, is in `dsv4.reference.index_selection`.

Roundings of (1): in `fp32` precision, products of codes are summed exactly within a group, and what follows is evaluated in fp64, over
groups and then over heads from left to right, beginning with +0, and rounded once to fp32. In `bf16` precision, the official code's, the
dot product, the weighted head and the sum over heads are each rounded to fp32 and from there to bf16. The scales of a query and of a key
are part of the dot product; an FP8 query has its scale in the weight. NaN follows IEEE arithmetic: relu(NaN) is NaN.

Under `unquantised` codes may be numbers, fp64 (`index_codes`). Source: spec A 5.4, 5.5, 5.7; 10, row 15.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor
from torch.nn.functional import relu

from dsv4 import indexer_checks
from dsv4.formats import INDEX_LAYOUTS
from dsv4.indexer_checks import BUDGET_BYTES, CHUNK
from dsv4.reference.codecs import decode_e2m1, decode_e4m3, decode_e8m0, unpack_fp4
from dsv4.reference.index_codes import index_keys, index_queries, load_index_keys, present_slots, store_index_keys
from dsv4.reference.index_selection import candidate_blocks, restrict_to_blocks, select_topk
from dsv4.reference.kv_cache import page_slots
from dsv4.reference.numerics import bf16_step, current_numerics, fp32_step
from dsv4.types import IndexFormat, IndexKeys, IndexOrder, IndexQueries, LogitPrecision, Numerics

__all__ = [
    "candidate_blocks",
    "index_keys",
    "index_logits",
    "index_queries",
    "load_index_keys",
    "paged_index_logits",
    "restrict_to_blocks",
    "select_candidates",
    "select_entries",
    "select_topk",
    "store_index_keys",
    "visible_entries",
]

LARGEST_INT32 = 2**31 - 1


def visible_entries(positions: Tensor, *, ratio: int) -> Tensor:
    """How many entries tokens see, by (2): those whose last token is not after them.

    Args:
        positions: [tokens], int64 or int32.
        ratio: tokens of an entry, >= 0. Without compression every token is an entry: 0 and 1 both say so.

    Returns:
        int32 [tokens], at most 2^31 - 1; 0 where the position is negative.

    Raises:
        ArgumentError: a wrong dtype or shape, ratio < 0.
    """
    ratio = indexer_checks.visible_entries(positions, ratio)
    before = positions.long().bitwise_not()  # -(p + 1), which fits 64 bits where p + 1 may not
    return before.div(ratio, rounding_mode="trunc").clamp(-LARGEST_INT32, 0).neg().to(torch.int32)


def index_logits(
    queries: IndexQueries,
    keys: IndexKeys,
    *,
    starts: Tensor | None = None,
    ends: Tensor,
    precision: LogitPrecision | str = LogitPrecision.FP32,
) -> Tensor:
    """Scores of all entries, by (1).

    Args:
        queries: of `index_queries`; weights fp32 or bf16 in either format.
        keys: of `index_keys`, in the same format.
        starts, ends: [tokens], int32 or int64: a token sees entries starts <= j < ends; starts None is 0. Either may lie outside 0 .. n.
        precision: fp32; or bf16, the official code's.

    Returns:
        fp32 [tokens, entries], or bf16; -inf where an entry is not seen, whatever its numbers are. A sum of 0 is +0.

    Raises:
        ArgumentError: wrong dtypes or shapes, keys and queries of two formats or sizes.
    """
    rows = current_numerics() is not Numerics.STATED
    chosen = indexer_checks.index_logits(queries, keys, starts, ends, precision, rows=rows)
    step = bf16_step if chosen is LogitPrecision.BF16 else fp32_step
    logits = step(torch.clone, _sum_over_heads(queries, keys, chosen))
    entries = torch.arange(logits.shape[1], device=logits.device)
    seen = entries < ends.long()[:, None]
    if starts is not None:
        seen = seen & (entries >= starts.long()[:, None])
    return logits.where(seen, -inf)


def paged_index_logits(
    queries: IndexQueries,
    pages: Tensor,
    block_table: Tensor,
    requests: Tensor,
    ends: Tensor,
    *,
    format: IndexFormat | str,
    page_size: int,
    width: int,
    precision: LogitPrecision | str = LogitPrecision.FP32,
) -> Tensor:
    """Scores of the entries of each token's own request, whose keys lie in pages, by (1).

    Entry j of request b is slot j mod P of page block_table[b, j div P].

    Args:
        queries: of `index_queries`.
        pages: [pages, stride], uint8, as `store_index_keys` takes them.
        block_table: [requests, columns], int32: the pages of each request in order, -1 where it has none.
        requests: [tokens], int32: whose token it is.
        ends: [tokens], int32 or int64: the first entry that a token does not see.
        format: of queries and pages.
        page_size: slots of a page, P.
        width: entries of the result.
        precision: as in `index_logits`.

    Returns:
        fp32 [tokens, width], or bf16: as `index_logits` of the request's keys; -inf where the request, the column or the page is not there.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, queries of the other format.
    """
    rows = current_numerics() is not Numerics.STATED
    chosen, _, dim = indexer_checks.paged_index_logits(
        queries, pages, block_table, requests, ends, format, page_size, width, precision, rows=rows
    )
    dtype = torch.bfloat16 if chosen is LogitPrecision.BF16 else torch.float32
    dtype = dtype if current_numerics() is Numerics.STATED else torch.float64
    logits = torch.full((len(requests), width), -inf, dtype=dtype, device=pages.device)
    for request in requests.unique().tolist():
        mine = (requests == request).nonzero()[:, 0]
        entries = torch.arange(width, device=pages.device)
        slots = page_slots(block_table, torch.full_like(entries, request), entries, page_size=page_size)
        keys = load_index_keys(pages, slots, format=format, page_size=page_size, dim=dim)
        own = index_logits(_of_tokens(queries, mine), keys, ends=ends[mine], precision=precision)
        logits = logits.index_copy(0, mine, own.where(present_slots(slots, pages.shape[0] * page_size), -inf))
    return logits


def select_entries(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    k: int,
    *,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    order: IndexOrder | str = IndexOrder.INDEX,
    candidates: Tensor | None = None,
    block: int = 8,
    chunk: int = CHUNK,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """The k best entries of each token, by (1) and (3), a chunk of tokens at a time.

    The chain of `index_logits`, `restrict_to_blocks` and `select_topk`.

    Args:
        queries, keys, ends, precision: as in `index_logits`.
        k, order: as in `select_topk`.
        candidates: [tokens, count], int32, of `select_candidates`: entries of other blocks take no part; None for all.
        block: entries of a block of `candidates`.
        chunk: tokens scored at a time, at most.
        budget_bytes: bytes of fp32 logits at a time, at most, where that leaves a token. The result depends on neither.

    Returns:
        int32 [tokens, k], -1 behind the last pick.

    Raises:
        ArgumentError: as the three functions; chunk or budget_bytes < 1.
    """
    rows = current_numerics() is not Numerics.STATED
    indexer_checks.select_entries(queries, keys, ends, k, precision, order, candidates, block, chunk, budget_bytes, rows=rows)
    picks = [torch.empty(0, k, dtype=torch.int32, device=ends.device)]
    for part in _chunks(queries, keys, chunk, budget_bytes):
        logits = index_logits(_of_tokens(queries, part), keys, ends=ends[part], precision=precision)
        if candidates is not None:
            logits = restrict_to_blocks(logits, candidates[part], block=block)
        picks.append(select_topk(logits, k, ends=ends[part], order=order))
    return torch.cat(picks)


def select_candidates(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    *,
    block: int = 8,
    count: int = 2048,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    chunk: int = CHUNK,
    budget_bytes: int = BUDGET_BYTES,
) -> Tensor:
    """The candidate blocks of each token: `index_logits` and `candidate_blocks`, a chunk of tokens at a time.

    Args:
        queries, keys, ends, precision: as in `index_logits`.
        block, count: as in `candidate_blocks`.
        chunk, budget_bytes: as in `select_entries`.

    Returns:
        int32 [tokens, min(count, ceil(entries / block))], ascending, -1 behind the last.

    Raises:
        ArgumentError: as the two functions; chunk or budget_bytes < 1.
    """
    rows = current_numerics() is not Numerics.STATED
    indexer_checks.select_candidates(queries, keys, ends, precision, block, count, chunk, budget_bytes, rows=rows)
    columns = min(count, -(-keys.codes.shape[0] // block))
    blocks = [torch.empty(0, columns, dtype=torch.int32, device=ends.device)]
    for part in _chunks(queries, keys, chunk, budget_bytes):
        logits = index_logits(_of_tokens(queries, part), keys, ends=ends[part], precision=precision)
        blocks.append(candidate_blocks(logits, ends[part], block=block, count=count))
    return torch.cat(blocks)


def _groups(codes: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Decoded codes fp64 [..., groups, group], and what multiplies each group, fp64 [..., groups]."""
    if codes.dtype == torch.uint8 and scales is not None:
        numbers = decode_e2m1(unpack_fp4(codes)).double().unflatten(-1, (-1, INDEX_LAYOUTS["fp4"].group))
        factors = decode_e8m0(scales.contiguous()[..., None].view(torch.uint8))[..., : numbers.shape[-2]]
        return numbers, factors.double()
    numbers = codes if codes.dtype == torch.float64 else decode_e4m3(codes).double()
    ones = torch.ones_like(numbers[..., :1])
    return numbers[..., None, :], ones if scales is None else ones * scales.double()[..., None]


def _sum_over_heads(queries: IndexQueries, keys: IndexKeys, precision: LogitPrecision) -> Tensor:
    """The sum of (1): [tokens, entries] in fp64."""
    q, q_factors = _groups(queries.codes, queries.scales)  # [tokens, H, groups, group], [tokens, H, groups]
    k, k_factors = _groups(keys.codes, keys.scales)  # [entries, groups, group], [entries, groups]
    total = torch.zeros(len(q), len(k), dtype=torch.float64, device=q.device)
    for head in range(q.shape[1]):
        dot = torch.zeros_like(total)
        for group in range(q.shape[2]):
            dot = dot + (q[:, head, group] @ k[:, group].T) * (q_factors[:, head, group, None] * k_factors[:, group])
        weight = queries.weights[:, head, None]
        if precision is LogitPrecision.BF16:
            total = total + bf16_step(torch.mul, relu(bf16_step(torch.clone, dot)), weight).double()
        else:
            total = total + relu(dot) * weight.double()
    return total


def _of_tokens(queries: IndexQueries, part: Tensor | slice) -> IndexQueries:
    scales = None if queries.scales is None else queries.scales[part]
    return IndexQueries(queries.codes[part], scales, queries.weights[part])


def _chunks(queries: IndexQueries, keys: IndexKeys, chunk: int, budget_bytes: int) -> list[slice]:
    tokens = len(queries.codes)
    step = indexer_checks.queries_at_a_time(len(keys.codes), chunk, budget_bytes)
    return [slice(first, first + step) for first in range(0, tokens, step)]
