"""Compressors: the twin of `dsv4.reference.compressor`, which has the formulas, windows and roundings.

The state and the pages are updated in place, after everything that is needed of them was read. On CUDA entries are one launch, from the
window to the record in the cache, and the state is a second; neither waits for anything, and both can be captured. Work grows with the
entries that the tokens can complete, not with tokens times window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, compressor_checks
from dsv4.compressor_checks import compressor_state, roll_back
from dsv4.fast import compressor_ops as compressor_ops  # defines the operators
from dsv4.types import Compressed, CompressionPlan, Projected, StoredEntries

__all__ = ["compress", "compress_and_store", "compression_plan", "compressor_state", "project", "roll_back"]


def project(x: Tensor, wkv: Tensor, wgate: Tensor, *, impl: str | None = None) -> Projected:
    """What tokens bring into their windows: a value and a score for each channel.

    Args:
        x: bf16 [tokens, hidden].
        wkv, wgate: bf16 or fp32 [width, hidden]; twice the same where there is no gate.
        impl: a backend by name, else the device's default.

    Returns:
        Projected(values, scores), fp32 [tokens, width]. A token's bits do not depend on the others of the call on CUDA, and on a CPU under
        use(batch_invariant=True).

    Raises:
        ArgumentError: wrong dtypes or shapes, tensors that require grad.
    """
    compressor_checks.project(x, wkv, wgate, "bf16")
    checks.no_grad(x=x, wkv=wkv, wgate=wgate)
    return Projected(*torch.ops.dsv4.project.default(x, wkv, wgate, impl))


def compression_plan(
    starts: Tensor, cu_seqlens: Tensor, *, ratio: int, tokens: int, state_rows: Tensor | None = None, impl: str | None = None
) -> CompressionPlan:
    """Which entries become complete, in the order in which `compress` gives them.

    Args:
        starts: int64 [requests]: the position of each request's first token in this call.
        cu_seqlens: int32 [requests + 1]: its first row; the last is the number of tokens.
        ratio: tokens of an entry.
        tokens: of the call.
        state_rows: int32 [requests], negative where a request is idle, or None.
        impl: a backend by name, else the device's default.

    Returns:
        CompressionPlan(requests int32, entries int64) of min(tokens, tokens // ratio + requests) rows; those left over hold -1. Nothing
        waits for the device, so the number of rows is what there may be, not what there is.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    compressor_checks.plan(starts, cu_seqlens, ratio, tokens, state_rows)
    return CompressionPlan(*torch.ops.dsv4.compression_plan.default(starts, cu_seqlens, ratio, tokens, state_rows, impl))


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
    impl: str | None = None,
) -> Compressed:
    """Pool the windows that become complete, and put the tokens into their rings.

    Args:
        values, scores: fp32 [tokens, width], of `project`; width is dim, or with overlap 2 dim.
        state: fp32 [states, ring, 2 * width], of `compressor_state`; updated.
        starts, cu_seqlens: as `compression_plan`.
        ratio: tokens of an entry.
        overlap: an entry sees the tokens of the entry before, too.
        ape: fp32 [ratio, width]: bias of the scores by place in an entry, or None.
        state_rows: int32 [requests]: the state of each request, no two alike, -1 for an idle one. None: request b has state b.
        impl: a backend by name, else the device's default.

    Returns:
        Compressed(pooled bf16 [rows, dim], zero in rows left over; requests and entries as `compression_plan`; `state`).

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers, a ring too short for the ratio, a state that cannot be written, tensors that
            require grad. Nothing is written then.
    """
    compressor_checks.compress(
        values, scores, state, starts, cu_seqlens, ratio=ratio, overlap=overlap, ape=ape, state_rows=state_rows, floats="fp32"
    )
    checks.no_grad(values=values, scores=scores, state=state, ape=ape)
    checks.writable("state", state)
    pooled, requests, entries = torch.ops.dsv4.compress.default(
        values, scores, state, starts, cu_seqlens, ratio, overlap, ape, state_rows, impl
    )
    return Compressed(pooled, requests, entries, state)


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
    impl: str | None = None,
) -> StoredEntries:
    """`compress`, `rms_norm`, `apply_rope` and `store_kv` of the entries, the bits of these four.

    Args:
        values, scores, state, starts, cu_seqlens, ratio, overlap, ape, state_rows: as `compress`.
        weight: bf16 or fp32 [dim], of the norm.
        table: fp32 [positions, rotated dims], of `rope_table`; an entry turns by the position of its first token.
        pages: uint8 [pages, bytes], updated.
        slots: int64 or int32, one for each row of the plan; those outside the cache are skipped.
        eps: of the norm, >= 0.
        layout, page_size, amax_floor: as `store_kv`.
        impl: a backend by name, else the device's default.

    Returns:
        StoredEntries(latents bf16 [rows, dim], normalised and not rotated; requests, entries; `state`, `pages`). Rows left over are zero
        and stored nowhere.

    Raises:
        ArgumentError: as the four of them. Nothing is written then.
    """
    rows = compressor_checks.compress(
        values, scores, state, starts, cu_seqlens, ratio=ratio, overlap=overlap, ape=ape, state_rows=state_rows, floats="fp32"
    )
    dim = values.shape[1] // 2 if overlap else values.shape[1]
    compressor_checks.store(
        rows, dim, values, weight, table, pages, slots, eps=eps, layout=layout, page_size=page_size, amax_floor=amax_floor
    )
    checks.no_grad(values=values, scores=scores, state=state, ape=ape, weight=weight, table=table)
    checks.writable("state", state)
    latents, requests, entries = torch.ops.dsv4.compress_and_store.default(
        values, scores, state, starts, cu_seqlens, weight, table, pages, slots, ratio, overlap, ape, eps, layout, page_size, amax_floor,
        state_rows, impl,
    )  # fmt: skip
    return StoredEntries(latents, requests, entries, state, pages)
