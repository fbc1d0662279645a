"""Attention on the inductor and eager paths: a running softmax over blocks of picks, in fp64.

A block of up to 320 picks of some tokens is gathered, widened and multiplied; the largest score so far, the sum of weights and the weighted
sum of values are carried from block to block and rescaled when a larger score comes (fp64 throughout: one rounding to fp32, and one to
bf16, at the end). Products stand outside of what is compiled, and have one shape whatever the number of tokens where that is demanded
(`product_bodies`; slow with few heads and numbers). Tokens go through in chunks, so that what is held beside inputs and results
stays below SCRATCH_BYTES for any number of tokens; smaller chunks stay in the cache. Rows of pages are decoded before: on the CPU each slot
that a group of tokens reads once, elsewhere each pick, for nothing there may wait for the device. Source: spec A 6.1, 6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4 import attention_checks
from dsv4.fast import kv_bodies
from dsv4.fast.compiled import run_eagerly
from dsv4.fast.product_bodies import fixed_products
from dsv4.formats import KV_LAYOUTS, align

Run = Callable[..., Any]
State = tuple[Tensor, Tensor, Tensor, Tensor]

SCRATCH_BYTES = 64 * 2**20  # of a call, at most, whatever the number of tokens
CHUNK_BYTES = 16 * 2**20  # of tokens at a time: what a CPU keeps in its caches
WIDEST, GRAIN = 320, 32  # picks of a block at most, and what its width is a multiple of
ROWS = 8192  # decoded for a group of tokens, at least a token's picks: 8 MiB of bf16; of rows that are not packed, 64 picks for each
DECODED = 2048  # rows of one pass of the decoder: its temporaries are integers


class Picks(NamedTuple):
    """One list of picks: where its rows are, and which of them each token takes."""

    rows: Tensor  # bf16 [n, D]
    indices: Tensor  # int [tokens, K], absent outside 0 to n - 1
    lengths: Tensor | None  # int32 [tokens]: columns that count


class PagedPicks(NamedTuple):
    """One list of picks whose rows are packed in pages."""

    pages: Tensor  # uint8 [pages, stride]
    layout: str
    page_size: int
    slots: Tensor  # int [tokens, K]
    lengths: Tensor | None


def gather_body(rows: Tensor, picks: Tensor) -> Tensor:
    """fp64 [tokens, width, D] of rows bf16 [n, D] and picks int64 [tokens, width]: zeros where there is none, for 0 times NaN is NaN."""
    present = (picks >= 0) & (picks < rows.shape[0])
    return torch.where(present[..., None], rows[torch.where(present, picks, 0)], 0.0).to(torch.float64)


def weigh_body(dots: Tensor, picks: Tensor, peak: Tensor, total: Tensor, scale: Tensor) -> State:
    """One block of picks in a running softmax: what is carried, the factor [tokens, H] of what was summed before, the block's weights.

    dots fp64 [tokens, H, width], picks -1 where there is none, scale fp64 []. Carried, fp64 [tokens, H]: the largest score `peak`, -inf at
    first, and the sum of weights `total`, 0 at first.
    """
    if torch.compiler.is_compiling():
        tokens = dots.shape[0]
        for other in (picks, peak, total):
            torch._check(other.shape[0] == tokens)
    scores = torch.where((picks >= 0)[:, None], dots * scale, -torch.inf)
    highest = torch.maximum(peak, scores.amax(-1))
    shift = torch.where(highest == -torch.inf, 0.0, highest)
    weights, kept = torch.exp(scores - shift[..., None]), torch.exp(peak - shift)
    return highest, total * kept + weights.sum(-1), kept, weights


def finish_body(peak: Tensor, total: Tensor, mixed: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Output bf16 [tokens, H, D] and lse fp32 [tokens, H] of a running softmax; sink fp32 [1, H], -inf for none."""
    if torch.compiler.is_compiling():
        for other in (total, mixed):
            torch._check(other.shape[0] == peak.shape[0])
    seen = peak != -torch.inf
    mass = total + torch.exp(sink[0].to(torch.float64) - torch.where(seen, peak, 0.0))
    output = mixed / torch.where(seen, mass, 1.0)[..., None]  # of nothing seen 0, or NaN of infinite rows
    return output.to(torch.float32).to(torch.bfloat16), (peak + torch.log(total)).to(torch.float32)


def attend(
    run: Run, q: Tensor, lists: list[Picks | PagedPicks], sink: Tensor | None, scale: float, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and lse of one softmax over every list, by products of one shape if `fixed`. Results are written chunk by chunk."""
    tokens, heads, _ = q.shape
    output, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    lists = [one for one in lists if _picks(one).shape[1] and _length(one)]
    if not tokens or not lists:
        return output, lse
    sinks = q.new_full((1, heads), -torch.inf, dtype=torch.float32) if sink is None else sink[None]
    factor = torch.full((), scale, dtype=torch.float64, device=q.device)
    paged = sum(_picks(one).shape[1] for one in lists if isinstance(one, PagedPicks))
    for first, past in _groups(tokens, paged or -(-sum(_picks(one).shape[1] for one in lists) // 64), ROWS):
        near = [_near(run, one, first, past) for one in lists]
        for start, end in _groups(past - first, _token_bytes(q, max(_width(one.indices.shape[1]) for one in near)), CHUNK_BYTES):
            here = slice(first + start, first + end)
            state = _attend_chunk(run, q[here], [one._replace(indices=one.indices[start:end]) for one in near], factor, fixed)
            output[here], lse[here] = run(finish_body, *state, sinks)
    return output, lse


def _attend_chunk(run: Run, q: Tensor, lists: list[Picks], factor: Tensor, fixed: bool) -> tuple[Tensor, Tensor, Tensor]:
    peak = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float64)
    total, mixed = torch.zeros_like(peak), q.new_zeros(q.shape, dtype=torch.float64)
    wide, first = q.to(torch.float64), True
    for one in lists:
        width = _width(one.indices.shape[1])
        for column in range(0, one.indices.shape[1], width):
            picks = one.indices[:, column : column + width]
            if q.device.type != "cpu" or bool((picks >= 0).any()):
                values = _gathered(run, one.rows, picks)
                dots = (fixed_products if fixed else torch.bmm)(wide, values.transpose(1, 2))
                peak, total, kept, weights = run(weigh_body, dots, picks, peak, total, factor)
                if not first:
                    mixed *= kept[..., None]
                if fixed:
                    mixed += fixed_products(weights, values)
                else:
                    mixed.baddbmm_(weights, values)
                first = False
    return peak, total, mixed


def _gathered(run: Run, rows: Tensor, picks: Tensor) -> Tensor:
    """As `gather_body`, which takes three passes uncompiled: on a CPU nothing keeps from asking which rows are absent."""
    if run is not run_eagerly or rows.device.type != "cpu":
        return run(gather_body, rows, picks)  # type: ignore[no-any-return]
    present = (picks >= 0) & (picks < rows.shape[0])
    values = rows.index_select(0, torch.where(present, picks, 0).view(-1))
    if len(absent := (~present).view(-1).nonzero()):
        values.index_fill_(0, absent[:, 0], 0.0)
    return values.double().view(*picks.shape, -1)


def _near(run: Run, one: Picks | PagedPicks, first: int, past: int) -> Picks:
    """A list's part for a group of tokens: rows in bf16, absent columns -1, as many columns as whole blocks have."""
    given = _picks(one)[first:past]
    indices = torch.full((len(given), align(given.shape[1], _width(given.shape[1]))), -1, device=given.device)
    indices[:, : given.shape[1]] = within(given, None if one.lengths is None else one.lengths[first:past], _length(one))
    if isinstance(one, Picks):
        return Picks(one.rows, indices, None)
    slots, places = _distinct(indices)
    return Picks(decoded(run, one, slots), places, None)


def _distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Slots to decode, and where in them each pick is, -1 where absent."""
    flat = slots.reshape(-1)
    if slots.device.type != "cpu":
        return flat, torch.where(slots >= 0, torch.arange(flat.shape[0], device=slots.device).view(slots.shape), -1)
    found, places = torch.unique(flat, return_inverse=True)
    missing = int(found[0] < 0)  # all absent picks are -1, the least of all
    return found[missing:], places.view(slots.shape) - missing


def decoded(run: Run, one: PagedPicks, slots: Tensor) -> Tensor:
    """bf16 [slots, D] of packed rows; zeros where there are none."""
    chosen = KV_LAYOUTS[one.layout]
    rows = one.pages.new_empty((max(len(slots), 1), chosen.dims), dtype=torch.bfloat16)
    run = run_eagerly if chosen.scale == "unit" else run
    for start in range(0, len(slots), DECODED):
        records, present = kv_bodies.get(one.pages, slots[start : start + DECODED], chosen, one.page_size)
        rows[start : start + DECODED] = run(kv_bodies.decode_body, records, present, layout=one.layout)
    return rows


def within(indices: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """Indices with -1 for all that do not count: outside 0 to rows - 1, or in a column from the length on."""
    present = (indices >= 0) & (indices < rows)
    if lengths is not None:
        present &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    return torch.where(present, indices, -1)


def merge_body(outputs: Tensor, lses: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Splits into one: outputs [tokens, splits, H, D], lses fp32 [tokens, splits, H], sink fp32 [1, H]."""
    if torch.compiler.is_compiling():
        torch._check(outputs.shape[0] == lses.shape[0])
    logs = lses.to(torch.float64)
    peak = logs.amax(1)
    weights = torch.exp(logs - torch.where(peak == -torch.inf, 0.0, peak)[:, None])
    parts = torch.where((logs == -torch.inf)[..., None], 0.0, outputs.to(torch.float64))
    mixed = (weights[..., None] * parts).sum(1)
    return finish_body(peak, weights.sum(1), torch.where(mixed == 0, 0.0, mixed), sink)  # a sum of zeros is +0


def merge(run: Run, outputs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and lse of parts [splits, tokens, H, D] with their lses, in chunks of tokens."""
    splits, tokens, heads, dim = outputs.shape
    output = outputs.new_zeros((tokens, heads, dim), dtype=torch.bfloat16)
    lse = lses.new_full((tokens, heads), -torch.inf)
    if not splits or not output.numel():
        return output, lse
    sinks = lses.new_full((1, heads), -torch.inf) if sink is None else sink[None]
    for start, end in _groups(tokens, heads * dim * (3 * splits + 4) * 8, SCRATCH_BYTES):
        here = slice(start, end)
        output[here], lse[here] = run(merge_body, outputs[:, here].transpose(0, 1), lses[:, here].transpose(0, 1), sinks)
    return output, lse


def window_body(positions: Tensor, *, window: int) -> Tensor:
    """int32 [tokens, window]: the positions that each one sees, -1 behind them. positions int64."""
    known = (positions >= 0) & (positions <= attention_checks.LARGEST_POSITION)
    place = torch.where(known, positions, -1)[:, None]  # before the subtraction, in which others may wrap
    seen = (place - (window - 1)).clamp(min=0) + torch.arange(window, device=positions.device)
    return torch.where(seen <= place, seen, -1).to(torch.int32)


def block_indices(tokens: int, block: int, device: torch.device) -> Tensor:
    """int32 [tokens, block]: rows of a draft's block, the same for each of its queries."""
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    return (rows - rows % block)[:, None] + torch.arange(block, dtype=torch.int32, device=device)


def _picks(one: Picks | PagedPicks) -> Tensor:
    return one.indices if isinstance(one, Picks) else one.slots


def _length(one: Picks | PagedPicks) -> int:
    return one.rows.shape[0] if isinstance(one, Picks) else one.pages.shape[0] * one.page_size


def _groups(count: int, each: int, limit: int) -> Iterator[tuple[int, int]]:
    """Spans of so many things that each take so much, at least one, and together no more than the limit."""
    step = max(limit // each, 1)
    for first in range(0, count, step):
        yield first, min(first + step, count)


def _width(picks: int) -> int:
    """How wide the blocks are that a list is cut into: as few as may be, and all alike."""
    blocks = -(-picks // WIDEST)
    return align(-(-picks // blocks), GRAIN)


def _token_bytes(q: Tensor, width: int) -> int:
    """What a token holds in a block, in fp64: queries, old sums, new ones, a product; rows, in bf16 before; scores, twice, and weights."""
    heads, dim = q.shape[1:]
    return 8 * (4 * heads * dim + 3 * heads * width) + 12 * width * dim
