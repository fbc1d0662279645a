"""Wrong compressors: most of them are the reference with one part of its state machine exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant
from dsv4.reference import compressor as right
from dsv4.reference.numerics import bf16_step
from dsv4.reference.rotary import apply_rope
from dsv4.types import Compressed, CompressionPlan, Projected, StoredEntries

Parts = dict[str, Callable[..., Any]]
REAL = {
    name: getattr(right, name)
    for name in ("_places", "_pool", "_remember", "_batch", "compression_plan", "rms_norm", "apply_rope", "store_kv")
}


def _with(**parts: Any) -> Callable[..., Compressed]:
    """`compress` with some of its parts exchanged."""

    def call(*args: Any, **kwargs: Any) -> Compressed:
        with mock.patch.multiple(right, **parts):
            return right.compress(*args, **kwargs)

    return call


def _stored_with(**parts: Any) -> Callable[..., StoredEntries]:
    """`compress_and_store` with some of its parts exchanged."""

    def call(*args: Any, **kwargs: Any) -> StoredEntries:
        with mock.patch.multiple(right, **parts):
            return right.compress_and_store(*args, **kwargs)

    return call


def _bf16_results(x: Tensor, wkv: Tensor, wgate: Tensor) -> Projected:
    return Projected(*(part.bfloat16().float() for part in right.project(x, wkv, wgate)))


def _bf16_weights(x: Tensor, wkv: Tensor, wgate: Tensor) -> Projected:
    return right.project(x, wkv.bfloat16(), wgate.bfloat16())


def _swapped(x: Tensor, wkv: Tensor, wgate: Tensor) -> Projected:
    return right.project(x, wgate, wkv)


def _planned(entries: Callable[[int, int, int], range], *, by_entry: bool = False) -> Callable[..., CompressionPlan]:
    """A plan of the entries that `entries(start, length, ratio)` lists for each live request."""

    def plan(starts: Tensor, cu_seqlens: Tensor, *, ratio: int, tokens: int, state_rows: Tensor | None = None) -> CompressionPlan:
        batch = REAL["_batch"](starts, cu_seqlens, tokens, state_rows)
        pairs = [
            (number, entry)
            for number, (start, length) in enumerate(zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True))
            for entry in (entries(start, length, ratio) if length else ())
        ]
        rows = min(tokens, tokens // ratio + len(starts))
        pairs = sorted(pairs, key=lambda pair: pair[::-1]) if by_entry else pairs
        table = torch.tensor([*pairs, *[(-1, -1)] * rows][:rows], device=starts.device).reshape(rows, 2)
        return CompressionPlan(table[:, 0].to(torch.int32), table[:, 1])

    return plan


_incomplete = _planned(lambda start, length, ratio: range(start // ratio, -(-(start + length) // ratio)))
_from_zero = _planned(lambda start, length, ratio: range((start + length) // ratio - start // ratio))
_late = _planned(lambda start, length, ratio: range(start // ratio, (start + length - 1) // ratio))
_whole_windows_of_the_call = _planned(lambda start, length, ratio: range(-(-start // ratio), (start + length) // ratio))
_entries_first = _planned(lambda start, length, ratio: range(start // ratio, (start + length) // ratio), by_entry=True)


def _idle_planned(starts: Tensor, cu_seqlens: Tensor, *, state_rows: Tensor | None = None, **options: Any) -> CompressionPlan:
    return right.compression_plan(starts, cu_seqlens, **options)


def _zeros_left_over(*args: Any, **kwargs: Any) -> CompressionPlan:
    return CompressionPlan(*(part.clamp(min=0) for part in right.compression_plan(*args, **kwargs)))


def _any_start(starts: Tensor, cu_seqlens: Tensor, **options: Any) -> CompressionPlan:
    return right.compression_plan(starts.abs().clamp(0, 2**61), cu_seqlens, **options)


def _ape_shifted(*args: Any, ape: Tensor | None = None, **options: Any) -> Compressed:
    return right.compress(*args, ape=None if ape is None else ape.roll(1, 0), **options)


def _ape_missing(*args: Any, ape: Tensor | None = None, **options: Any) -> Compressed:
    return right.compress(*args, **options)


def _ape_by_place_in_the_call(values: Tensor, scores: Tensor, positions: Tensor, *options: Any) -> Any:
    return REAL["_pool"](values, scores, torch.where(positions < 0, positions, positions - positions[:1, :1]), *options)


def _halves_swapped(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    if overlap:
        values, scores = (part.roll(part.shape[2] // 2, 2) for part in (values, scores))
        ape = None if ape is None else ape.roll(ape.shape[1] // 2, 1)
    return REAL["_pool"](values, scores, positions, ratio, overlap, ape)


def _own_window_twice(*args: Any, overlap: bool = False, **options: Any) -> Compressed:
    def places(batch: Any, requests: Tensor, positions: Tensor, *sizes: int) -> Any:
        own = positions.chunk(2, 1)[1]
        return REAL["_places"](batch, requests, torch.where(positions < 0, positions, torch.cat([own, own], 1)), *sizes)

    return _with(_places=places if overlap else REAL["_places"])(*args, overlap=overlap, **options)


def _first_overlap_scores_zero(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    absent = (positions < 0)[:, :, None]
    if ape is not None:
        scores = scores + ape[positions % ratio]
    values, scores = values.masked_fill(absent, 0.0), scores.masked_fill(absent, 0.0)
    return REAL["_pool"](values, scores, positions.clamp(min=0), ratio, overlap, None)


def _first_overlap_taken(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    return REAL["_pool"](values, scores, torch.where(positions < 0, positions + 2 * ratio, positions), ratio, overlap, ape)


def _absent_places(batch: Any, requests: Tensor, positions: Tensor, tokens: int, ring: int) -> Any:
    """Rows of the ring for positions before 0."""
    held = tokens + batch.states[requests, None] * ring + positions % max(ring, 1)
    return torch.where(positions < 0, held, REAL["_places"](batch, requests, positions, tokens, ring))


def _weight_zero_times_whatever(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    if not overlap:
        return REAL["_pool"](values, scores, positions, ratio, overlap, ape)
    scores = scores if ape is None else scores + ape[positions % ratio]
    values, scores = (torch.cat([t[:, :ratio].chunk(2, 2)[0], t[:, ratio:].chunk(2, 2)[1]], 1) for t in (values, scores))
    scores = scores.masked_fill((positions < 0)[:, :, None], -torch.inf)
    return bf16_step(lambda t, v: (t.softmax(1) * v).sum(1), scores, values)


def _state_not_updated(*args: Any, **options: Any) -> Compressed:
    return right.compress(*args, **options)._replace(state=args[2].clone())


def _ring_places(batch: Any, requests: Tensor, positions: Tensor, tokens: int, ring: int) -> Any:
    """Every token from the ring."""
    if not ring:
        return REAL["_places"](batch, requests, positions, tokens, ring)
    return torch.where(positions < 0, 0, tokens + batch.states[requests, None] * ring + positions % ring)


def _written_first(values: Tensor, scores: Tensor, state: Tensor, *args: Any, **options: Any) -> Compressed:
    """The ring is written, then every window is read from it: it has lost what a long call overwrote."""
    after = right.compress(values, scores, state, *args, **options).state
    return _with(_places=_ring_places)(values, scores, after, *args, **options)


def _ring_behind(*args: Any, **options: Any) -> Compressed:
    """Tokens of this call read from the ring as it was before."""
    return _with(_places=_ring_places)(*args, **options)


def _call_places(batch: Any, requests: Tensor, positions: Tensor, tokens: int, ring: int) -> Any:
    """Earlier tokens from the rows before this request's own."""
    return (batch.firsts[requests, None] + positions - batch.starts[requests, None]).clamp(0, max(tokens - 1, 0))


def _read_modulo_ratio(values: Tensor, scores: Tensor, state: Tensor, *args: Any, ratio: int, **options: Any) -> Compressed:
    def places(batch: Any, requests: Tensor, positions: Tensor, tokens: int, ring: int) -> Any:
        held = tokens + batch.states[requests, None] * ring + positions % ratio
        earlier = (positions >= 0) & (positions < batch.starts[requests, None])
        return torch.where(earlier & (ring > 0), held, REAL["_places"](batch, requests, positions, tokens, ring))

    return _with(_places=places)(values, scores, state, *args, ratio=ratio, **options)


def _write_modulo_ratio(values: Tensor, scores: Tensor, state: Tensor, *args: Any, ratio: int, **options: Any) -> Compressed:
    def remember(state: Tensor, tokens: Tensor, batch: Any) -> Any:
        held = state[:, :ratio].contiguous() if state.shape[1] else state
        return torch.cat([REAL["_remember"](held, tokens, batch), state[:, ratio:]], 1)

    return _with(_remember=remember)(values, scores, state, *args, ratio=ratio, **options)


def _first_tokens_kept(state: Tensor, tokens: Tensor, batch: Any) -> Any:
    """A call longer than the ring leaves its first tokens there."""
    return REAL["_remember"](state, tokens, batch._replace(lengths=batch.lengths.clamp(max=state.shape[1])))


def _four_kept(state: Tensor, tokens: Tensor, batch: Any) -> Any:
    """No more than the last 4 tokens of a call are written."""
    skipped = (batch.lengths - 4).clamp(min=0)
    late = batch._replace(starts=batch.starts + skipped, firsts=batch.firsts + skipped, lengths=batch.lengths - skipped)
    return REAL["_remember"](state, tokens, late)


def _biased_scores_kept(values: Tensor, scores: Tensor, *args: Any, **options: Any) -> Compressed:
    result = right.compress(values, scores, *args, **options)
    if options.get("ape") is None:
        return result
    state, ape = args[0], options["ape"]
    written = (result.state.view(torch.int32) != state.view(torch.int32)).any(2)
    rows = torch.arange(state.shape[1], device=state.device) % len(ape)
    added = torch.cat([torch.zeros_like(ape), ape], 1)[rows]
    return result._replace(state=torch.where(written[:, :, None], result.state + added, result.state))


def _idle_is_the_last(values: Tensor, scores: Tensor, state: Tensor, *args: Any, **options: Any) -> Compressed:
    rows = options.get("state_rows")
    if rows is not None:
        options["state_rows"] = torch.where(rows < 0, len(state) - 1, rows).to(torch.int32)
    return right.compress(values, scores, state, *args, **options)


def _rows_ignored(values: Tensor, scores: Tensor, state: Tensor, *args: Any, **options: Any) -> Compressed:
    rows = options.get("state_rows")
    if rows is not None:
        own = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        options["state_rows"] = torch.where((rows >= 0) & (rows < len(state)), own, -1).to(torch.int32)
    return right.compress(values, scores, state, *args, **options)


def _summed(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, *options: Any) -> Any:
    mean = REAL["_pool"](values, torch.zeros_like(scores), positions, ratio, *options)
    return (mean.float() * (positions >= 0).sum(1, keepdim=True)).to(mean.dtype)


def _across_channels(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    with mock.patch.object(Tensor, "softmax", lambda t, dim: torch.softmax(t, 2)):
        return REAL["_pool"](values, scores, positions, ratio, overlap, ape)


def _bf16_parts(values: Tensor, scores: Tensor, positions: Tensor, *options: Any) -> Any:
    """Scores in bf16, as a state in bf16 would have them."""
    return REAL["_pool"](values, scores.bfloat16().float(), positions, *options)


def _bf16_softmax(values: Tensor, scores: Tensor, positions: Tensor, ratio: int, overlap: bool, ape: Tensor | None) -> Any:
    """Weights and products in bf16, summed there."""
    softmax = torch.softmax
    with mock.patch.object(Tensor, "softmax", lambda t, dim: softmax(t, dim).bfloat16().double()):
        return REAL["_pool"](values.bfloat16().float(), scores, positions, ratio, overlap, ape)


def _left_over_kept() -> Callable[..., Compressed]:
    """Rows left over hold what an earlier call had there."""
    memory: list[Tensor] = []

    def call(*args: Any, **options: Any) -> Compressed:
        result = right.compress(*args, **options)
        memory.append(result.pooled)
        before = torch.ones_like(result.pooled)
        old = memory.pop(0) if len(memory) > 1 else before
        if old.shape == before.shape and old.device == before.device:
            before = old
        return result._replace(pooled=torch.where(result.requests[:, None] < 0, before, result.pooled))

    return call


def _turned_by(position: Callable[[Tensor, int], Tensor]) -> Callable[..., StoredEntries]:
    def call(*args: Any, ratio: int, **options: Any) -> StoredEntries:
        def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
            moved: Tensor = REAL["apply_rope"](x, table, torch.where(positions < 0, positions, position(positions, ratio)))
            return moved

        return _stored_with(apply_rope=rotate)(*args, ratio=ratio, **options)

    return call


def _unrotated(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return x


def _rotated_latents(*args: Any, **options: Any) -> StoredEntries:
    result = right.compress_and_store(*args, **options)
    positions = torch.where(result.entries < 0, 0, result.entries * options["ratio"])
    return result._replace(latents=apply_rope(result.latents, args[6], positions))


def _left_over_stored(*args: Any, **options: Any) -> StoredEntries:
    slots = args[8]

    def store(rows: Tensor, pages: Tensor, numbers: Tensor, **more: Any) -> Any:
        return REAL["store_kv"](rows, pages, slots, **more)

    return _stored_with(store_kv=store)(*args, **options)


def _minus_one_stored(rows: Tensor, pages: Tensor, slots: Tensor, **options: Any) -> Any:
    return REAL["store_kv"](rows, pages, torch.where(slots < 0, slots + len(pages) * options["page_size"], slots), **options)


def _slots_by_entry(*args: Any, **options: Any) -> StoredEntries:
    rows, slots = options.get("state_rows"), args[8]
    entries = right.compression_plan(args[3], args[4], ratio=options["ratio"], tokens=len(args[0]), state_rows=rows).entries
    moved = torch.where(entries < 0, -1, slots[entries.clamp(min=0) % max(len(slots), 1)])
    call: Callable[..., StoredEntries] = right.compress_and_store
    return call(*args[:8], moved, **options)


def _norm_without_weight(x: Tensor, weight: Tensor, *, eps: float) -> Any:
    return REAL["rms_norm"](x, torch.ones_like(weight), eps=eps)


def _halves_turned(x: Tensor, table: Tensor, positions: Tensor) -> Any:
    """Pairs (i, i + R/2) for pairs (2i, 2i + 1)."""
    dims = table.shape[1]
    rolled = torch.cat([x[..., :-dims], x[..., -dims:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)], -1)
    turned = REAL["apply_rope"](rolled, table, positions)
    back = turned[..., -dims:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([turned[..., :-dims], back], -1)


def _mutant(number: int, function: str, call: Callable[..., Any], fault: str, source: str = "") -> Mutant:
    return Mutant(f"compressor-{number:02}", "compressor", function, call, fault, source)


_absent_read = _with(_places=_absent_places, _pool=_weight_zero_times_whatever)

MUTANTS = (
    _mutant(1, "project", _bf16_results, "results rounded to bf16"),
    _mutant(2, "project", _bf16_weights, "fp32 weights rounded to bf16"),
    _mutant(3, "project", _swapped, "values and scores exchanged"),
    _mutant(4, "compression_plan", _incomplete, "incomplete windows emitted", "CP-03"),
    _mutant(5, "compression_plan", _from_zero, "entries counted from 0 in each call"),
    _mutant(6, "compression_plan", _late, "an entry waits for the token after its last"),
    _mutant(7, "compression_plan", _whole_windows_of_the_call, "only windows that begin in the call", "CP-05"),
    _mutant(8, "compression_plan", _entries_first, "rows by entry, then by request"),
    _mutant(9, "compression_plan", _idle_planned, "idle requests emit", "CP-07"),
    _mutant(10, "compression_plan", _zeros_left_over, "rows left over point at entry 0", "CP-07"),
    _mutant(11, "compression_plan", _any_start, "starts that do not exist are used"),
    _mutant(12, "compress", _ape_shifted, "the positional bias of the token before"),
    _mutant(13, "compress", _ape_missing, "no positional bias"),
    _mutant(14, "compress", _with(_pool=_ape_by_place_in_the_call), "the bias by the place in the call"),
    _mutant(15, "compress", _with(_pool=_halves_swapped), "overlap and own channels exchanged"),
    _mutant(16, "compress", _own_window_twice, "the overlap series of the own window"),
    _mutant(17, "compress", _with(_pool=_first_overlap_scores_zero), "the first window's missing overlap has a score of 0", "CP-03"),
    _mutant(18, "compress", _with(_pool=_first_overlap_taken), "the first window's missing overlap takes part", "CP-03"),
    _mutant(19, "compress", _absent_read, "a weight of 0 times what the ring held before", "CP-03"),
    _mutant(20, "compress", _state_not_updated, "the ring is not written"),
    _mutant(21, "compress", _written_first, "the ring is written before it is read"),
    _mutant(22, "compress", _ring_behind, "tokens of this call read from the ring", "CP-08"),
    _mutant(23, "compress", _with(_places=_call_places), "earlier tokens from another request's rows", "CP-08"),
    _mutant(24, "compress", _read_modulo_ratio, "the ring read by position modulo the ratio"),
    _mutant(25, "compress", _write_modulo_ratio, "the ring written by position modulo the ratio"),
    _mutant(26, "compress", _with(_remember=_first_tokens_kept), "the first tokens of a long call kept"),
    _mutant(27, "compress", _with(_remember=_four_kept), "no more than 4 tokens written", "CP-01"),
    _mutant(28, "compress", _biased_scores_kept, "the bias kept in the ring, and added again"),
    _mutant(29, "compress", _idle_is_the_last, "-1 read as the last state"),
    _mutant(30, "compress", _rows_ignored, "request b takes state b"),
    _mutant(31, "compress", _with(compression_plan=_incomplete), "incomplete windows emitted", "CP-03"),
    _mutant(32, "compress", _with(compression_plan=_from_zero), "entries counted from 0 in each call"),
    _mutant(33, "compress", _with(_pool=_summed), "a sum, not a mean"),
    _mutant(34, "compress", _with(_pool=_across_channels), "a softmax over channels"),
    _mutant(35, "compress", _with(_pool=_bf16_parts), "scores in bf16", "CP-09"),
    _mutant(36, "compress", _with(_pool=_bf16_softmax), "weights in bf16"),
    _mutant(37, "compress", _left_over_kept(), "rows left over keep an earlier call's entries", "CP-07"),
    _mutant(38, "compress_and_store", _turned_by(lambda position, ratio: position + ratio - 1), "rotated by the window's last position"),
    _mutant(39, "compress_and_store", _turned_by(lambda position, ratio: position // ratio), "rotated by the entry's number", "RP-03"),
    _mutant(40, "compress_and_store", _stored_with(apply_rope=_unrotated), "never rotated", "RP-03"),
    _mutant(41, "compress_and_store", _stored_with(compression_plan=_from_zero), "entries counted from 0 in each call"),
    _mutant(42, "compress_and_store", _rotated_latents, "latents after the rotation"),
    _mutant(43, "compress_and_store", _left_over_stored, "rows left over are stored", "CP-07"),
    _mutant(44, "compress_and_store", _stored_with(store_kv=_minus_one_stored), "-1 read as the last slot"),
    _mutant(45, "compress_and_store", _slots_by_entry, "slots by entry, not by row"),
    _mutant(46, "compress_and_store", _stored_with(rms_norm=_norm_without_weight), "the norm's weight left out"),
    _mutant(47, "compress_and_store", _stored_with(apply_rope=_halves_turned), "halves turned against each other, not neighbours"),
    _mutant(48, "compress_and_store", _stored_with(_remember=_four_kept), "no more than 4 tokens written", "CP-01"),
)
