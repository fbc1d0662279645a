"""Engines of FlashMLA and FlashInfer: what their kernels want of queries, picks and rows, and what is left to do with their results.

Where a library does not read the pages itself, rows are decoded to a buffer in bf16 that is bounded, for some tokens after another if it
must be, and picks become places in it, without a look at what the device holds. Libraries allocate what they return, and picks in
between come from torch's allocator: runs can be captured, but do allocate. Source: spec A 6.4, 6.5, 6.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import Tensor

from dsv4.fast import attention_bodies as bodies
from dsv4.fast.adapters import flashinfer_mla, flashmla
from dsv4.fast.attention_bodies import PagedPicks, Picks
from dsv4.fast.attention_engines import LARGEST_BUFFER, Engine, Given, Holder, Pair, Sizes, empty_pair, picks_of, rows_there
from dsv4.fast.compiled import run_eagerly
from dsv4.fast.dispatch import describe
from dsv4.fast.memory import aligned
from dsv4.formats import KV_LAYOUTS, align
from dsv4.types import Unsupported


class Padded(Holder):
    """Queries and sinks with as many heads as a library takes: those added are of zeros, with a sink of 0."""

    def __init__(self, sizes: Sizes, heads: Sequence[int]) -> None:
        self.heads = next(count for count in heads if count >= sizes.heads)
        added = self.heads != sizes.heads
        self.q = torch.zeros(sizes.tokens if added else 0, self.heads, sizes.dim, dtype=torch.bfloat16, device=sizes.device)
        self.sink = torch.zeros(self.heads if added else 0, dtype=torch.float32, device=sizes.device)

    def fill(self, q: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Queries and sinks, as they are if their heads are enough."""
        tokens, heads, _ = q.shape
        if heads == self.heads:
            return aligned(q), None if sink is None else sink.contiguous()
        self.q[:tokens, :heads].copy_(q)
        if sink is not None:
            self.sink[:heads].copy_(sink)
        return self.q[:tokens], None if sink is None else self.sink


def narrowed(output: Tensor, lse: Tensor, heads: int, out: Pair | None) -> Pair:
    """A library's results without the heads that were added, -inf for empty rows, in `out` if it is given."""
    output, lse = output[:, :heads], lse[:, :heads]
    if out is None:
        return output.contiguous(), torch.nan_to_num(lse, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf).contiguous()
    out[0].copy_(output)
    torch.nan_to_num(lse, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=out[1])
    return out


class PickBuffer(Holder):
    """int32 [tokens, width] picks of one list: -1 for all that do not count, and in the columns up to a multiple."""

    def __init__(self, sizes: Sizes, number: int, multiple: int) -> None:
        width = align(max(sizes.picks[number], 1), multiple)
        self.filled = torch.full((sizes.tokens, width), -1, dtype=torch.int32, device=sizes.device)

    def fill(self, one: Picks | PagedPicks) -> Tensor:
        """A list's picks."""
        filled = self.filled[: len(picks_of(one))]
        put_picks(one, filled)
        return filled


def put_picks(one: Picks | PagedPicks, target: Tensor) -> None:
    """A list's picks into int32 target [tokens, as many columns or more]: -1 for all that do not count, and in the columns left over."""
    numbers = picks_of(one)
    if target.is_cuda and target.numel():
        import_module("dsv4.fast.kernels.attention_lists").put(numbers, one.lengths, rows_there(one), target, -1)
        return
    target[:, numbers.shape[1] :] = -1
    target[:, : numbers.shape[1]].copy_(bodies.within(numbers, one.lengths, rows_there(one)))


class FlashMLAPages:
    """FlashMLA's decode kernels, from the pages themselves."""

    splits = 0  # the library's own, by the number of tokens

    def __init__(self, sizes: Sizes) -> None:
        self._padded = Padded(sizes, flashmla.HEADS)
        self._picks = [PickBuffer(sizes, number, flashmla.PAGE_PICKS) for number in range(len(sizes.picks))]
        self._tokens, self._schedule = sizes.tokens, flashmla.schedule()

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse. The schedule is kept for calls of the planned number of tokens, of which the first makes it."""
        q, sink = self._padded.fill(call.q, call.sink)
        slots = [buffer.fill(one)[:, None] for buffer, one in zip(self._picks, call.lists, strict=False)]
        main, extra = call.lists if len(call.lists) > 1 else (call.lists[0], None)
        schedule = self._schedule if self._keeps(q, len(call.lists)) else flashmla.schedule()
        assert isinstance(main, PagedPicks)
        assert extra is None or isinstance(extra, PagedPicks)
        more = slots[1] if extra is not None else None
        output, lse = flashmla.sparse_decode(q[:, None], main, slots[0], extra, more, call.scale, sink, schedule)
        return narrowed(output[:, 0], lse[..., 0], call.q.shape[1], out)

    def _keeps(self, q: Tensor, lists: int) -> bool:
        """A schedule made while a graph is captured is none for other runs, for the graph alone writes it."""
        fresh = self._schedule.tile_scheduler_metadata is None
        captured = fresh and q.is_cuda and torch.cuda.is_current_stream_capturing()
        return len(q) == self._tokens and lists == len(self._picks) and not captured


class RowBuffer(Holder):
    """bf16 rows of the lists of some tokens at a time, behind `reserved` rows of zeros, and where in it each pick is.

    A list whose rows all fit has every one of them; otherwise a row for each pick, or, if there are more picks than rows have been
    promised, for each row that is picked at all: those are counted in int32 marks over all there are.
    """

    def __init__(self, sizes: Sizes, reserved: int, most_tokens: int = 2**30) -> None:
        every = sum(sizes.picks)
        step = sizes.tokens if sizes.rows is not None else LARGEST_BUFFER // max(every, 1)
        self.step = max(min(step, sizes.tokens, most_tokens), 1)
        self._room = [self.step * picks if sizes.rows is None else min(self.step * picks, sizes.rows) for picks in sizes.picks]
        self._starts = [reserved + sum(self._room[:number]) for number in range(len(self._room))]
        shape = reserved + sum(self._room), sizes.dim
        self.rows = torch.empty(shape, dtype=torch.bfloat16, device=sizes.device)
        self.rows[:reserved] = 0

    def fill(self, lists: Sequence[Picks | PagedPicks]) -> list[Tensor]:
        """Put rows there; places [tokens, picks] of each list, -1 for picks that do not count."""
        return [self._fill(one, room, start) for one, room, start in zip(lists, self._room, self._starts, strict=False)]

    def _fill(self, one: Picks | PagedPicks, room: int, start: int) -> Tensor:
        there = rows_there(one)
        picks = bodies.within(picks_of(one), one.lengths, there).long()
        if not there or not picks.numel():
            return picks
        if there <= room:
            slots, places = torch.arange(there, device=picks.device), picks
        elif picks.numel() <= room:
            slots = picks.reshape(-1)
            places = torch.where(picks >= 0, torch.arange(picks.numel(), device=picks.device).view(picks.shape), -1)
        else:
            slots, places = distinct(picks, there, room)
        load(one, slots, self.rows[start : start + len(slots)])
        return torch.where(places >= 0, places + start, -1)


def distinct(picks: Tensor, there: int, room: int) -> tuple[Tensor, Tensor]:
    """Which rows are picked, int64 [room], -1 behind them, and the place among them of every pick, -1 where absent or past the room."""
    marks = torch.zeros(there + 1, dtype=torch.int32, device=picks.device)
    marks[picks.reshape(-1) + 1] = 1
    marks[0] = 0  # what absent picks have marked
    ranks = torch.cumsum(marks, 0, dtype=torch.int32)
    places = ranks[picks + 1].long() - 1
    at = torch.where((marks == 1) & (ranks <= room), ranks.long() - 1, room)
    slots = torch.full((room + 1,), -1, device=picks.device)
    slots[at] = torch.arange(-1, there, device=picks.device)
    return slots[:room], torch.where((picks >= 0) & (places < room), places, -1)


def load(one: Picks | PagedPicks, slots: Tensor, rows: Tensor) -> None:
    """bf16 rows of slots, into `rows`; of -1 anything."""
    if isinstance(one, Picks):
        torch.index_select(one.rows, 0, slots.clamp(min=0), out=rows)
    elif slots.device.type == "cpu":
        rows.copy_(bodies.decoded(run_eagerly, one, slots))
    else:
        run = import_module("dsv4.fast.kernels.kv_cache").load
        run(one.pages, slots, rows, KV_LAYOUTS[one.layout], one.page_size)


def chunk_of(call: Given, first: int, past: int) -> Given:
    """A part of a call's tokens."""
    return call._replace(q=call.q[first:past], lists=tuple(_chunk(one, first, past) for one in call.lists))


def _chunk(one: Picks | PagedPicks, first: int, past: int) -> Picks | PagedPicks:
    lengths = None if one.lengths is None else one.lengths[first:past]
    if isinstance(one, PagedPicks):
        return one._replace(slots=one.slots[first:past], lengths=lengths)
    return one._replace(indices=one.indices[first:past], lengths=lengths)


class FlashMLARows:
    """FlashMLA's prefill kernel, over rows as they are if one list has them all, else over a buffer of rows."""

    splits = 1

    def __init__(self, sizes: Sizes) -> None:
        plain = sizes.layouts == ("",)
        self._buffer = None if plain else RowBuffer(sizes, 1)
        self._step = sizes.tokens if self._buffer is None else self._buffer.step
        self._padded = Padded(sizes._replace(tokens=self._step), flashmla.HEADS)
        self._width = align(max(sum(sizes.picks), 1), flashmla.ROW_PICKS)
        self._picks = torch.full((0 if plain else self._step, self._width), -1, dtype=torch.int32, device=sizes.device)

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse."""
        tokens = len(call.q)
        if tokens <= self._step:
            return self._run(call, out)
        out = out or empty_pair(call.q)
        for first in range(0, tokens, self._step):
            past = min(first + self._step, tokens)
            self._run(chunk_of(call, first, past), (out[0][first:past], out[1][first:past]))
        return out

    def _run(self, call: Given, out: Pair | None) -> Pair:
        q, sink = self._padded.fill(call.q, call.sink)
        one = call.lists[0]
        if self._buffer is None and isinstance(one, Picks):
            rows, picks = aligned(one.rows), one.indices
            if not flashmla.reads_picks(picks, one.lengths):
                picks = picks.new_empty((len(q), self._width), dtype=torch.int32)
                put_picks(one, picks)
        else:
            assert self._buffer is not None
            rows, picks = self._buffer.rows, self._picks[: len(q)]
            put_side_by_side(self._buffer.fill(call.lists), picks, -1)
        output, lse = flashmla.sparse_forward(q, rows[:, None], picks[:, None], call.scale, sink)
        return narrowed(output, lse, call.q.shape[1], out)


def put_side_by_side(places: Sequence[Tensor], target: Tensor, rest: int) -> None:
    """Places of all lists in columns of one table, `rest` in those left over."""
    column = 0
    for part in places:
        target[:, column : column + part.shape[1]].copy_(part)
        column += part.shape[1]
    target[:, column:] = rest


class FlashInferRows:
    """FlashInfer's MLA wrapper over a buffer of rows; made for one scale, and run for the planned number of tokens or padded to it."""

    splits = 0  # the library's own, by the number of tokens

    def __init__(self, sizes: Sizes) -> None:
        self._buffer = RowBuffer(sizes, 1, flashinfer_mla.TOKENS)
        self._scale, self._step, shape = sizes.scale, self._buffer.step, (sizes.heads, sizes.dim)
        self._attention = flashinfer_mla.RowAttention(self._step, sizes.heads, max(sum(sizes.picks), 1), sizes.scale, sizes.device)
        self._rope = flashinfer_mla.rope_of(len(self._buffer.rows), sizes.device)
        rest = bool(sizes.tokens % self._step) or self._step == sizes.tokens
        self._q, self._output = (
            torch.zeros(self._step if rest else 0, *shape, dtype=torch.bfloat16, device=sizes.device) for _ in range(2)
        )
        self._lse = torch.zeros(self._step if rest else 0, sizes.heads, dtype=torch.float32, device=sizes.device)

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse."""
        if call.scale != self._scale:
            raise Unsupported(
                "scale", repr(call.scale), f"the plan of this backend has {self._scale!r} in it", "Make a plan of another backend"
            )
        out = out or empty_pair(call.q)
        for first in range(0, len(call.q), self._step):
            past = min(first + self._step, len(call.q))
            self._run(chunk_of(call, first, past), out[0][first:past], out[1][first:past])
        return out

    def _run(self, call: Given, output: Tensor, lse: Tensor) -> None:
        tokens, given = len(call.q), (aligned(call.q), output, lse)
        if tokens < self._step:
            self._q[:tokens].copy_(call.q)
            given = self._q, self._output, self._lse
        picks = self._attention.indices.view(self._step, -1)
        places = [part.clamp(min=0) for part in self._buffer.fill(call.lists)]
        put_side_by_side(places, picks[:tokens], 0)
        self._attention.run(given[0], self._buffer.rows, self._rope, *given[1:])
        if tokens < self._step:
            output.copy_(self._output[:tokens])
            lse.copy_(self._lse[:tokens])
        flashinfer_mla.scale_to_sink(output, lse, call.sink)


class FlashInferPages:
    """FlashInfer's sparse MLA of SM120, from V4.1's pages themselves."""

    splits = 0  # the library's own, by the number of tokens

    def __init__(self, sizes: Sizes) -> None:
        extra = sizes.layouts[1] if len(sizes.layouts) > 1 else None
        self._attention = flashinfer_mla.PageAttention(sizes.layouts[0], extra, sizes.device)
        self._picks = [PickBuffer(sizes, number, flashmla.PAGE_PICKS) for number in range(len(sizes.picks))]

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse."""
        output, lse = out or empty_pair(call.q)
        slots = [buffer.fill(one) for buffer, one in zip(self._picks, call.lists, strict=False)]
        main, extra = call.lists if len(call.lists) > 1 else (call.lists[0], None)
        assert isinstance(main, PagedPicks)
        assert extra is None or isinstance(extra, PagedPicks)
        more = None if extra is None else slots[1]
        self._attention.run(aligned(call.q), main, slots[0], extra, more, call.scale, output, lse)
        flashinfer_mla.scale_to_sink(output, lse, call.sink)
        return output, lse


def flashinfer_engine(sizes: Sizes) -> Engine:
    """The one for the device: SM120 has kernels for pages, SM90 for rows."""
    return FlashInferPages(sizes) if describe(sizes.device).capability[0] == 12 else FlashInferRows(sizes)
