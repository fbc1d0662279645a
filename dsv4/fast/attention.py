"""Sparse attention with a sink: the twin of `dsv4.reference.attention`, which has the formulas.

On CUDA our kernels read packed pages as they are and hold a running softmax; FlashMLA and FlashInfer take what their kernels take, and say
what they do not. On the CPU a running softmax over blocks of picks sums in fp64. `plan_attention` chooses once and holds what calls need.
Under use(batch_invariant=True) a token's result depends on its own inputs alone. Without it `decode_attention` splits picks by the number
of tokens on CUDA, and fp64 sums have an order that goes by that number, which shows where they nearly cancel. Our own kernels and bodies
take 64 MiB of scratch at most, whatever the number of tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4 import attention_checks, checks
from dsv4.fast import attention_ops as attention_ops  # defines the operators
from dsv4.fast.attention_plans import attention_support, plan_attention
from dsv4.types import AttentionPlan, AttentionResult, PagedRows

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
    impl: str | None = None,
) -> AttentionResult:
    """Attention over rows of one tensor, or of two.

    Args:
        q: [tokens, heads, dim], bf16: rotated. On CUDA at most 128 heads, and dim a power of two from 64 to 512.
        kv: [rows, dim], bf16: key and value.
        indices: [tokens, picks], int32: rows of kv; those outside 0 to rows - 1 are absent, those that stand twice count twice.
        sink: [heads], fp32; None is none.
        lengths: [tokens], int32: how many columns of `indices` count, clamped to 0 .. picks; None for all.
        extra_kv, extra_indices, extra_lengths: a second list, of other rows; None is none.
        scale: of the scores, >= 0; None for dim^-1/2.
        impl: a backend by name, else the device's default.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]).

    Raises:
        ArgumentError: wrong dtypes, shapes or devices, a scale that is negative or not finite, inputs that require grad.
        BackendUnavailable, Unsupported: a backend asked for by name that cannot run, or does not take these arguments.
    """
    factor = attention_checks.sparse(q, kv, indices, sink, lengths, extra_kv, extra_indices, extra_lengths, scale)
    checks.no_grad(q=q, kv=kv, sink=sink, extra_kv=extra_kv)
    operator = torch.ops.dsv4.sparse_attention.default
    return AttentionResult(*operator(q, kv, indices, sink, lengths, extra_kv, extra_indices, extra_lengths, factor, impl))


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
    impl: str | None = None,
) -> AttentionResult:
    """Attention over rows of a cache, straight from its pages.

    Args:
        q: [tokens, heads, dim], bf16; dim of the layout, 512.
        main: PagedRows(pages, layout, page_size), as `load_kv` takes them: the window in the models.
        slots: [tokens, picks], int32 or int64, counted through all pages.
        sink, lengths, scale: as `sparse_attention`.
        extra, extra_slots, extra_lengths: a second list from other pages, the compressed entries in the models; the layouts are the same
            or a pair of `dsv4.formats.KV_LAYOUT_PAIRS`.
        impl: a backend by name, else the device's default.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]).

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or devices, an unknown layout, layouts that do not go together, inputs that require
            grad.
        BackendUnavailable, Unsupported: a backend asked for by name that cannot run, or does not take these arguments.
    """
    operator = torch.ops.dsv4.paged_attention.default
    return _over_pages(operator, q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale, impl)


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
    impl: str | None = None,
) -> AttentionResult:
    """`paged_attention`, for few tokens: on CUDA each token's picks are split among no more programs than the device runs at once.

    Args, Returns, Raises: as `paged_attention`.
    """
    operator = torch.ops.dsv4.decode_attention.default
    return _over_pages(operator, q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale, impl)


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
    impl: str | None = None,
) -> AttentionResult:
    """`paged_attention`, for many tokens: a token's picks are never split, and a library may decode rows once for all tokens.

    Args, Returns, Raises: as `paged_attention`.
    """
    operator = torch.ops.dsv4.prefill_attention.default
    return _over_pages(operator, q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale, impl)


def _over_pages(
    operator: torch._ops.OpOverload,
    q: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None,
    lengths: Tensor | None,
    extra: PagedRows | None,
    extra_slots: Tensor | None,
    extra_lengths: Tensor | None,
    scale: float | None,
    impl: str | None,
) -> AttentionResult:
    factor = attention_checks.paged(q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale)
    checks.no_grad(q=q, sink=sink)
    pages, layout, page_size = (None, "", 0) if extra is None else extra
    more = (pages, layout, page_size, extra_slots, extra_lengths)
    return AttentionResult(*operator(q, *main, slots, sink, lengths, *more, factor, impl))


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
    impl: str | None = None,
) -> AttentionResult:
    """Attention of blocks of drafted tokens: each sees its picks and all rows of its own block, those after it too.

    Args:
        q: [blocks * block, heads, dim], bf16, one block after another.
        block_kv: [blocks * block, dim], bf16: the rows of the blocks themselves, which are in no cache.
        main, slots, lengths: as `paged_attention`: of each query; in the models alike for all queries of a block.
        sink, scale: as `sparse_attention`.
        block: queries of a block.
        impl: a backend by name, else the device's default.

    Returns:
        AttentionResult(output bf16 [blocks * block, heads, dim], lse fp32 [blocks * block, heads]). No blocks, as on an idle rank, give
        empty results, and launch nothing.

    Raises:
        ArgumentError: wrong dtypes, shapes, strides or devices, a block that is not whole, inputs that require grad.
        BackendUnavailable, Unsupported: a backend asked for by name that cannot run, or does not take these arguments.
    """
    factor = attention_checks.draft(q, block_kv, main, slots, sink, block, lengths, scale)
    checks.no_grad(q=q, block_kv=block_kv, sink=sink)
    operator = torch.ops.dsv4.draft_attention.default
    return AttentionResult(*operator(q, block_kv, *main, slots, sink, block, lengths, factor, impl))


def merge_splits(outputs: Tensor, lses: Tensor, sink: Tensor | None = None, *, impl: str | None = None) -> AttentionResult:
    """Results over parts of a list as the result over all of it.

    Args:
        outputs: [splits, tokens, heads, dim], bf16 or fp32: each part's own, without the sink. Those of empty parts are not looked at.
        lses: [splits, tokens, heads], fp32: natural, -inf for an empty part.
        sink: [heads], fp32; None is none.
        impl: a backend by name, else the device's default.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]), lse without the sink.

    Raises:
        ArgumentError: wrong dtypes, shapes or devices, no part at all, inputs that require grad.
    """
    attention_checks.merge(outputs, lses, sink)
    checks.no_grad(outputs=outputs, lses=lses, sink=sink)
    return AttentionResult(*torch.ops.dsv4.merge_splits.default(outputs, lses, sink, impl))


def lse_flashmla(lse: Tensor) -> Tensor:
    """lse as FlashMLA's kernels give it: +inf in the place of -inf, for tokens without picks.

    Args:
        lse: [tokens, heads], fp32, of this module.

    Returns:
        fp32 [tokens, heads].

    Raises:
        ArgumentError: a wrong dtype or rank.
    """
    attention_checks.lse(lse)
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def lse_base2(lse: Tensor) -> Tensor:
    """lse as a logarithm to base 2: the quotient by ln 2, in fp64 and rounded once to fp32.

    Args:
        lse: [tokens, heads], fp32, natural.

    Returns:
        fp32 [tokens, heads].

    Raises:
        ArgumentError: a wrong dtype or rank.
    """
    attention_checks.lse(lse)
    return (lse.to(torch.float64) / math.log(2)).to(torch.float32)


def lse_with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """lse with the sink among the scores: log(e^lse + e^sink), in fp64 and rounded once to fp32.

    Args:
        lse: [tokens, heads], fp32, natural, without the sink.
        sink: [heads], fp32.

    Returns:
        fp32 [tokens, heads], the sink where there are no picks.

    Raises:
        ArgumentError: wrong dtypes, shapes or devices.
    """
    attention_checks.lse(lse, sink)
    one, other = lse.to(torch.float64), sink.to(torch.float64)
    larger, smaller = torch.maximum(one, other), torch.minimum(one, other)
    apart = torch.where(larger == smaller, 0.0, smaller - larger)  # also of two infinities
    return (larger + torch.log1p(torch.exp(apart)).masked_fill(larger.isinf(), 0.0)).to(torch.float32)


def window_indices(positions: Tensor, *, window: int = 128, impl: str | None = None) -> Tensor:
    """Positions that a token sees through the window: its own and those before it. Images are no exception in V4.1.

    Args:
        positions: [tokens], int64 or int32, of the tokens in their requests. One outside 0 .. 2^31 - 1 is absent.
        window: how many, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, window]: max(0, p - window + 1) .. p ascending, then -1; all -1 where the position is absent.

    Raises:
        ArgumentError: a wrong dtype or rank, window < 1.
    """
    attention_checks.window(positions, window)
    seen: Tensor = torch.ops.dsv4.window_indices.default(positions, window, impl)
    return seen
