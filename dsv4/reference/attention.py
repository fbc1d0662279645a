"""Sparse attention: each token attends to the rows that it picked, with one softmax over all of them and a sink.

A token picks rows from one list or two: the last 128 tokens of its request (`window_indices`), and the compressed entries that the indexer
chose. A row is key and value at once, and every head reads it. For one token and head, over all its picks j,

    s_j = c (q . k_j)                     c the scale, dim^-1/2 unless another is given           (1)
    p_j = e^(s_j - m)                     m = max s_j                                             (2)
    lse = m + log(sum p_j)                                                                        (3)
    o   = sum p_j k_j / (sum p_j + e^(sink - m))                                                  (4)

The sink stands in the denominator of (4) alone: it takes weight away and gives nothing back. It is one number a head; -inf is none, +inf
makes the output 0. lse is a natural logarithm and does not know the sink. A pick is absent, and its row never read, where it is negative,
beyond the last row, or in a column at or past the token's length. One that stands twice counts twice; order does not matter. A token
without picks gets o = 0 and lse = -inf, whatever the sink.

Parts of a list, each with its own o_i and lse_i without the sink, are merged by

    lse = m + log(sum e^(lse_i - m)),                                      m = max lse_i          (5)
    o   = sum e^(lse_i - m) o_i / (sum e^(lse_i - m) + e^(sink - m))                              (6)

Shapes: q bf16 [tokens, heads, dim], rows bf16, picks int32 [tokens, picks] (slots of pages int64 too: page P + slot), lengths int32
[tokens], sink fp32 [heads], o bf16 [tokens, heads, dim], lse fp32 [tokens, heads]. The scale is an fp32 number.

Roundings: (1) and (2) are part of (3) and of (4). (3) and (5) are one step each, evaluated in fp64 and rounded once to fp32; (4) and (6)
are one step each, rounded to fp32 and from there to bf16. The published kernel rounds p_j to bf16 for the product with the values,
relative to a maximum that depends on the order of the list; that is no step here, and part of the bound that other implementations are
held to. Scores do not overflow in fp64; NaN and infinities of q or of a picked row follow IEEE arithmetic and stay with their token: a
score of +inf is m, s_j - m is NaN, and so are lse and output.
Source: spec A 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import attention_checks
from dsv4.attention_checks import AttentionSupport, Planned
from dsv4.formats import KV_LAYOUTS, fp32
from dsv4.reference.attention_merging import log_sum, lse_base2, lse_flashmla, lse_with_sink, merge_splits, sinks_of, softmax_weights
from dsv4.reference.kv_cache import load_kv
from dsv4.reference.numerics import bf16_dtypes, bf16_step, current_numerics, fp32_step
from dsv4.types import AttentionPlan, AttentionResult, Numerics, PagedRows

__all__ = [
    "AttentionPlan",
    "attention_support",
    "decode_attention",
    "draft_attention",
    "lse_base2",
    "lse_flashmla",
    "lse_with_sink",
    "merge_splits",
    "paged_attention",
    "plan_attention",
    "prefill_attention",
    "sparse_attention",
    "window_indices",
]

TOKENS_AT_ONCE = 32  # what is gathered at a time; no token knows the others


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    extra_kv: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    scale: float | None = None,
) -> AttentionResult:
    """Attention over rows of one tensor, or of two, by (1) to (4).

    Args:
        q: [tokens, heads, dim], bf16: rotated.
        kv: [rows, dim], bf16: key and value.
        indices: [tokens, picks], int32: rows of kv.
        sink: [heads], fp32; None is none.
        lengths: [tokens], int32: how many columns of `indices` count, clamped to 0 .. picks; None for all.
        extra_kv, extra_indices, extra_lengths: a second list, of other rows; None is none.
        scale: c, >= 0; None for dim^-1/2.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]).

    Raises:
        ArgumentError: wrong dtypes, shapes or devices, half of a second list, a scale below 0.
    """
    scale = attention_checks.sparse(q, kv, indices, sink, lengths, extra_kv, extra_indices, extra_lengths, scale, bf16_dtypes())
    lists = [_rows_list(kv, indices, lengths)]
    if extra_kv is not None and extra_indices is not None:
        lists.append(_rows_list(extra_kv, extra_indices, extra_lengths))
    return _attend(q, lists, sink, scale)


def paged_attention(
    q: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    extra: PagedRows | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    scale: float | None = None,
) -> AttentionResult:
    """Attention over rows of a cache, straight from its pages, by (1) to (4).

    Args:
        q: [tokens, heads, dim], bf16; dim of the layout, 512.
        main: PagedRows(pages, layout, page_size), as `load_kv` takes them: the window in the models.
        slots: [tokens, picks], int32 or int64, counted through all pages.
        sink, lengths, scale: as `sparse_attention`.
        extra, extra_slots, extra_lengths: a second list from other pages, the compressed entries in the models; the layouts are the same
            or a pair of `dsv4.formats.KV_LAYOUT_PAIRS`.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]).

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or devices, an unknown layout, layouts that do not go together.
    """
    scale = attention_checks.paged(q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale, bf16_dtypes())
    lists = [_paged_list(main, slots, lengths)]
    if extra is not None and extra_slots is not None:
        lists.append(_paged_list(extra, extra_slots, extra_lengths))
    return _attend(q, lists, sink, scale)


def decode_attention(
    q: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    extra: PagedRows | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    scale: float | None = None,
) -> AttentionResult:
    """`paged_attention`, for few tokens: a fast implementation may split each token's picks among programs and merge the parts.

    Args, Returns, Raises: as `paged_attention`.
    """
    return paged_attention(
        q,
        main,
        slots,
        sink,
        lengths=lengths,
        extra=extra,
        extra_slots=extra_slots,
        extra_lengths=extra_lengths,
        scale=scale,
    )


def prefill_attention(
    q: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    extra: PagedRows | None = None,
    extra_slots: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    scale: float | None = None,
) -> AttentionResult:
    """`paged_attention`, for many tokens: a fast implementation never splits a token's picks, and may decode rows once for all tokens.

    Args, Returns, Raises: as `paged_attention`.
    """
    return paged_attention(
        q,
        main,
        slots,
        sink,
        lengths=lengths,
        extra=extra,
        extra_slots=extra_slots,
        extra_lengths=extra_lengths,
        scale=scale,
    )


def draft_attention(
    q: Tensor,
    block_kv: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None = None,
    *,
    block: int = 5,
    lengths: Tensor | None = None,
    scale: float | None = None,
) -> AttentionResult:
    """Attention of blocks of drafted tokens: each sees its picks and all rows of its own block, those after it too (spec A 6.8).

    Args:
        q: [blocks * block, heads, dim], bf16, one block after another.
        block_kv: [blocks * block, dim], bf16: the rows of the blocks themselves, which are in no cache.
        main, slots, lengths: as `paged_attention`: of each query; in the models alike for all queries of a block.
        sink, scale: as `sparse_attention`.
        block: queries of a block.

    Returns:
        AttentionResult(output bf16 [blocks * block, heads, dim], lse fp32 [blocks * block, heads]). No blocks, as on an idle rank, give
        empty results.

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or devices, a block that is not whole.
    """
    scale = attention_checks.draft(q, block_kv, main, slots, sink, block, lengths, scale, bf16_dtypes())
    tokens = torch.arange(q.shape[0], device=q.device)
    own = tokens[:, None] // block * block + torch.arange(block, device=q.device)  # [tokens, block]
    return _attend(q, [_paged_list(main, slots, lengths), _rows_list(block_kv, own, None)], sink, scale)


def window_indices(positions: Tensor, *, window: int = 128) -> Tensor:
    """Positions that a token sees through the window: its own and those before it. Images are no exception in V4.1.

    Args:
        positions: [tokens], int64 or int32, of the tokens in their requests. One outside 0 .. 2^31 - 1 is absent.
        window: how many, >= 1.

    Returns:
        int32 [tokens, window]: max(0, p - window + 1) .. p ascending, then -1; all -1 where the position is absent.

    Raises:
        ArgumentError: a wrong dtype or rank, window < 1.
    """
    attention_checks.window(positions, window)
    positions = positions.long()
    known = (positions >= 0) & (positions <= attention_checks.LARGEST_POSITION)
    last = torch.where(known, positions, -1)[:, None]
    seen = (last - window + 1).clamp(min=0) + torch.arange(window, device=positions.device)
    return torch.where(seen <= last, seen, -1).to(torch.int32)


@dataclass(frozen=True)
class ReferencePlan:
    """`paged_attention` for calls up to a size. The reference prepares nothing and holds nothing."""

    planned: Planned
    workspace_bytes: int = 0
    backend: str = "reference"
    splits: int = 1
    reason: str = "the reference has one way"

    def run(
        self,
        q: Tensor,
        main: PagedRows,
        slots: Tensor,
        sink: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        extra: PagedRows | None = None,
        extra_slots: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        scale: float | None = None,
        out: AttentionResult | None = None,
    ) -> AttentionResult:
        """As `paged_attention`, into `out` where it is given: contiguous buffers of the results' shapes and dtypes.

        Raises:
            ArgumentError: as `paged_attention`, and for more tokens or picks, or for other heads or layouts, than were planned; buffers
                that do not fit.
        """
        result = paged_attention(
            q,
            main,
            slots,
            sink,
            lengths=lengths,
            extra=extra,
            extra_slots=extra_slots,
            extra_lengths=extra_lengths,
            scale=scale,
        )
        self.planned.check_run(q, main, slots, extra, extra_slots)
        if out is None:
            return result
        attention_checks.results(out, q, *(("bf16", "fp32") if current_numerics() is Numerics.STATED else ("fp64", "fp64")))
        return AttentionResult(*(buffer.copy_(part) for buffer, part in zip(out, result, strict=True)))


def plan_attention(
    mode: str,
    *,
    tokens: int,
    heads: int,
    picks: int,
    layout: str,
    page_size: int,
    extra_picks: int = 0,
    extra_layout: str | None = None,
    extra_page_size: int | None = None,
    dim: int = 512,
    device: torch.device | str | None = None,
    batch_invariant: bool | None = None,
    max_rows: int | None = None,
) -> AttentionPlan:
    """A plan for calls of `decode_attention` or `prefill_attention` up to a size.

    Args:
        mode: "decode" or "prefill".
        tokens, heads, picks, extra_picks: the largest call; heads exactly.
        layout, page_size, extra_layout, extra_page_size: of the pages.
        dim: of the layout.
        device, batch_invariant, max_rows: for implementations that choose or hold something; the reference does neither.

    Returns:
        AttentionPlan with `run`, `workspace_bytes`, `backend`, `splits`, `reason`.

    Raises:
        ArgumentError: a size below its least, an unknown mode or layout, layouts that do not go together.
    """
    planned = Planned(mode, tokens, heads, picks, layout, page_size, extra_picks, extra_layout, extra_page_size, dim)
    planned.check()
    return ReferencePlan(planned)


def attention_support(device: torch.device | str | None = None) -> tuple[AttentionSupport, ...]:
    """What can run on a device: the reference, everything, everywhere."""
    layouts = ("bf16", *KV_LAYOUTS)
    return tuple(AttentionSupport("reference", mode, layouts, (), "any device", True, "eager PyTorch") for mode in attention_checks.MODES)


class _List(NamedTuple):
    """Picks of every token, which of them are there, and how their rows are read: zeros for -1."""

    picks: Tensor  # int64 [tokens, picks], -1 where absent
    load: Callable[[Tensor], Tensor]


def _rows_list(kv: Tensor, indices: Tensor, lengths: Tensor | None) -> _List:
    rows = pad(kv, (0, 0, 0, 1))  # the last one, which -1 means, is of zeros
    return _List(_present(indices, lengths, len(kv)), lambda picks: rows[picks])


def _paged_list(rows: PagedRows, slots: Tensor, lengths: Tensor | None) -> _List:
    load = partial(load_kv, rows.pages, layout=rows.layout, page_size=rows.page_size)
    return _List(_present(slots, lengths, rows.pages.shape[0] * rows.page_size), load)


def _present(picks: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """-1 in the place of every pick that does not count."""
    picks = picks.long()
    there = (picks >= 0) & (picks < rows)
    if lengths is not None:
        there &= torch.arange(picks.shape[1], device=picks.device) < lengths[:, None]
    return torch.where(there, picks, -1)


def _attend(q: Tensor, lists: Sequence[_List], sink: Tensor | None, scale: float) -> AttentionResult:
    """(3) and (4), some tokens at a time."""
    sinks, results = sinks_of(sink, q.shape[1], q.device), []
    for first in range(0, max(len(q), 1), TOKENS_AT_ONCE):
        some = slice(first, first + TOKENS_AT_ONCE)
        picks = torch.cat([pad(part.picks[some], (0, 1), value=-1) for part in lists], 1)  # a column of -1: no list is empty
        rows = torch.cat([pad(part.load(part.picks[some]), (0, 0, 0, 1)) for part in lists], 1)  # [tokens, picks, dim]
        results.append(_softmax(q[some], rows, picks >= 0, sinks, fp32(scale)))
    return AttentionResult(*(torch.cat(parts) for parts in zip(*results, strict=True)))


def _softmax(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    def scores(q: Tensor, rows: Tensor) -> Tensor:
        """(1): [tokens, heads, picks]."""
        return (q @ rows.mT * scale).masked_fill(~there[:, None], -torch.inf)

    def lse(q: Tensor, rows: Tensor) -> Tensor:
        return log_sum(scores(q, rows), 2)

    def output(q: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
        weights, total = softmax_weights(scores(q, rows), sink[:, None], 2)
        return (weights @ rows + 0.0) / total  # a sum of 0 is +0: BLAS may begin with a product of -0

    return bf16_step(output, q, rows, sink), fp32_step(lse, q, rows)
