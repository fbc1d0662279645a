"""Wrong attention, much of it out of public bug reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import KV_LAYOUTS
from dsv4.parity.kv_bounds import byte_places
from dsv4.parity.mutants import Mutant
from dsv4.parity.mutants import attention_parts as parts
from dsv4.parity.mutants import attention_softmax as make
from dsv4.parity.mutants.attention_softmax import Load, Present
from dsv4.reference import attention as right
from dsv4.reference import kv_cache
from dsv4.types import AttentionResult, PagedRows

FP32_LEAST = 2.0**-149


def _picks(change: Callable[[Tensor, int], Tensor]) -> Present:
    """Picks taken for others before those that do not count are dropped."""
    return lambda picks, lengths, rows: right._present(change(picks.long(), rows), lengths, rows)


def _lengths(change: Callable[[Tensor, int], Tensor | None]) -> Present:
    def present(picks: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
        return right._present(picks, None if lengths is None else change(lengths, picks.shape[1]), rows)

    return present


def _once(picks: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """Of equal picks the first."""
    found = right._present(picks, lengths, rows)
    earlier = (found[:, None] == found[:, :, None]).tril(-1).any(2)
    return torch.where(earlier, -1, found)


def _last_partial_block(picks: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """Columns beyond the last whole block of 16 dropped."""
    found = right._present(picks, lengths, rows)
    return torch.where(torch.arange(found.shape[1]) < found.shape[1] // 16 * 16, found, -1)


def _stop_at_first_hole(picks: Tensor, lengths: Tensor | None, rows: int) -> Tensor:
    """A negative pick taken for the end of the list."""
    found = right._present(picks, lengths, rows)
    return torch.where((found < 0).cumsum(1) > 0, -1, found)


def _read_anyway(q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
    """Absent picks read row 0 or the last and weigh 0: NaN times 0 is NaN."""
    result = right.sparse_attention(q, kv, indices, sink, **options)
    read = kv[indices.long().clamp(0, len(kv) - 1)].isnan().any(2).any(1)
    return result._replace(output=result.output.masked_fill(read[:, None, None], torch.nan))


def _counted_sink(weights: Tensor, total: Tensor, of_sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sink's weight given to the first pick."""
    there = weights > 0
    first = there & (there.cumsum(2) == 1)
    return weights + first * of_sink.clamp(max=1e30), total + of_sink, of_sink


def _e4m3(weights: Tensor, total: Tensor, of_sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weights.float().to(torch.float8_e4m3fn).double(), total + of_sink, of_sink


def _no_sink(weights: Tensor, total: Tensor, of_sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return weights, total, of_sink


def _sink_of_all_heads(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, sink[:1].expand(len(sink)), scale


def _next_head_s_sink(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, sink.roll(1), scale


def _negated_sink(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, -sink, scale


def _sink_by_scale(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, sink * scale, scale


def _scaled_twice(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, sink, scale * scale


def _not_scaled(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    return q, rows, there, sink, 1.0


def _of_nope_dims(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    """Scores without the last 64 dims."""
    return torch.cat([q[..., :-64], torch.zeros_like(q[..., -64:])], 2), rows, there, sink, scale


def _first_token_s_rows(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Any, ...]:
    """Pairs of tokens share the rows of the first."""
    tokens = torch.arange(len(q)) // 2 * 2
    return q, rows[tokens], there[tokens], sink, scale


def _values_without_rope(output: Tensor) -> Tensor:
    return torch.cat([output[..., :-64], torch.zeros_like(output[..., -64:])], 2)


def _empty_nan(output: Tensor) -> Tensor:
    return output.masked_fill((output == 0).all(2, keepdim=True), torch.nan)


def _heads_from_8(output: Tensor) -> Tensor:
    return torch.cat([output[:, :8], torch.zeros_like(output[:, 8:])], 1)


def _max_alone(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    output, _ = right._softmax(q, rows, there, sink, scale)
    scores = (q.double() @ rows.double().mT * scale).masked_fill(~there[:, None], -torch.inf)
    return output, scores.amax(2).float()


def _max_from_zero(weights: Tensor, total: Tensor, of_sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The running maximum begins at 0: low scores vanish in fp32."""
    kept = [torch.where(part < FP32_LEAST, 0.0, part) for part in (weights, total, of_sink)]
    return kept[0], kept[1] + kept[2], kept[2]


def _without_extra(lists: list[Any]) -> list[Any]:
    return lists[:1]


def _rows_of_main(lists: list[Any]) -> list[Any]:
    """The second list read from the first one's rows."""
    return [lists[0], *(part._replace(load=lists[0].load) for part in lists[1:])]


def _load_at(places: Callable[..., Tensor]) -> Load:
    """Records read from other bytes of the memory."""

    def load(rows: PagedRows, picks: Tensor) -> Tensor:
        layout, there = KV_LAYOUTS[rows.layout], picks >= 0
        at = places(picks[there], layout, rows.page_size, rows.pages.stride(0))
        flat = rows.pages.as_strided(((len(rows.pages) - 1) * rows.pages.stride(0) + rows.pages.shape[1],), (1,))
        found = kv_cache._decode(flat[at.clamp(0, len(flat) - 1)], layout)
        return torch.zeros(*picks.shape, layout.dims, dtype=torch.bfloat16).masked_scatter(there[..., None], found)

    return load


def _other_arrangement(slots: Tensor, layout: Any, size: int, stride: int) -> Tensor:
    return byte_places(slots, replace(layout, inline=not layout.inline), size, stride)


def _page_stride_ignored(slots: Tensor, layout: Any, size: int, stride: int) -> Tensor:
    return byte_places(slots, layout, size, layout.page_bytes(size))


def _padding_ignored(slots: Tensor, layout: Any, size: int, stride: int) -> Tensor:
    return byte_places(slots, layout, size, size * layout.token_bytes)


def _scales_of_the_next(slots: Tensor, layout: Any, size: int, stride: int) -> Tensor:
    own, beside = (byte_places(slot, layout, size, stride) for slot in (slots, slots // size * size + (slots + 1) % size))
    return torch.cat([own[:, : layout.data_bytes], beside[:, layout.data_bytes :]], 1)


def _pages_of_2_gib(rows: PagedRows, picks: Tensor) -> Tensor:
    """Byte offsets of 32 bits: rows that end beyond are zeros, and weigh as such."""
    ends = (picks // rows.page_size + 1) * rows.pages.stride(0)
    return make.load_paged(rows, torch.where(ends < 2**31, picks, -1))


def _slots_of_64(rows: PagedRows, picks: Tensor) -> Tensor:
    """Every page taken to have 64 slots."""
    other = torch.where(picks >= 0, picks // 64 * rows.page_size + picks % 64, -1)
    return make.load_paged(rows, other)


def _layout_of_v41(rows: PagedRows, picks: Tensor) -> Tensor:
    """A second cache of FP4 read as FP8."""
    other = {"v41_fp4": "v41", "v41_fp4_inline": "v41_inline"}.get(rows.layout, rows.layout)
    short = rows.pages.shape[1] < rows.page_size * KV_LAYOUTS[other].token_bytes
    pages = torch.cat([rows.pages, rows.pages], 1) if short else rows.pages
    return make.load_paged(PagedRows(pages, other, rows.page_size), picks)


def _beyond_64(q: Tensor, main: PagedRows, slots: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
    """From 65 tokens on lengths do not count."""
    if len(q) > 64:
        options = {name: value for name, value in options.items() if "lengths" not in name}
    return right.prefill_attention(q, main, slots, sink, **options)


def _by_token_count(q: Tensor, main: PagedRows, slots: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
    """Scores of more than two tokens in bf16: a row depends on its batch."""
    if len(q) <= 2:
        return right.decode_attention(q, main, slots, sink, **options)
    shorter = (q.float() * 1.002).to(torch.bfloat16)
    return right.decode_attention(shorter, main, slots, sink, **options)


def _numbered(*rows: tuple[str, Callable[..., Any], str, str]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(f"att-{number:02}", "attention", function, call, fault, source)
        for number, (function, call, fault, source) in enumerate(rows, 1)
    )


SPARSE = (
    (make.attention(make.by_weights(_counted_sink)), "the sink's weight given to the first pick", ""),
    (make.attention(make.by_weights(_no_sink)), "no sink", ""),
    (make.attention(make.given(_sink_of_all_heads)), "one sink for all heads", ""),
    (make.attention(make.given(_next_head_s_sink)), "the sinks of other heads", "SA-03"),
    (make.attention(make.given(_negated_sink)), "the sink with its sign turned", ""),
    (make.attention(make.given(_sink_by_scale)), "the sink scaled like a score", ""),
    (make.attention(make.changed(lse=lambda lse, sink: lse / math.log(2))), "lse to base 2", ""),
    (make.attention(make.changed(lse=right.lse_with_sink)), "lse with the sink", "SA-13"),
    (make.attention(make.changed(lse=lambda lse, sink: right.lse_flashmla(lse))), "lse of an empty row plus infinity", ""),
    (make.attention(_max_alone), "lse the largest score alone", ""),
    (make.separately, "a softmax for each list", ""),
    (make.attention(present=_picks(lambda picks, rows: torch.where(picks == -1, rows - 1, picks))), "-1 read as the last row", "SA-06"),
    (make.attention(present=_picks(lambda picks, rows: picks.clamp(min=0))), "-1 read as row 0", ""),
    (make.attention(present=_picks(lambda picks, rows: picks.clamp(max=rows - 1))), "rows past the last read as the last", ""),
    (make.attention(present=_lengths(lambda lengths, columns: None)), "lanes past the length used", "SA-01"),
    (make.attention(present=_lengths(lambda lengths, columns: lengths - 1)), "the last pick dropped", ""),
    (make.attention(present=_lengths(lambda lengths, columns: lengths.clamp(min=1))), "at least one pick", "SA-13"),
    (
        make.attention(present=_lengths(lambda lengths, columns: lengths + columns * (lengths < 0))),
        "lengths below 0 count from the end",
        "",
    ),
    (make.attention(extra_present=_lengths(lambda lengths, columns: None)), "the second list's lengths ignored", "SA-01"),
    (make.attention(lists=_without_extra), "the second list ignored", ""),
    (make.attention(lists=_rows_of_main), "the second list read from the first one's rows", ""),
    (make.attention(present=_once), "repeated picks counted once", ""),
    (make.attention(present=_last_partial_block), "the last partial block dropped", "SA-07"),
    (make.attention(present=_stop_at_first_hole), "the list ends at its first -1", "SA-06"),
    (_read_anyway, "absent picks read, and weighed 0", "SA-06"),
    (make.attention(make.given(_scaled_twice)), "scaled twice", ""),
    (make.attention(make.given(_not_scaled)), "not scaled", ""),
    (make.attention(make.given(_of_nope_dims)), "scores without the rotated dims", ""),
    (make.attention(make.given(_first_token_s_rows)), "pairs of tokens read the first one's rows", ""),
    (make.attention(make.changed(_values_without_rope)), "values without the rotated dims", ""),
    (make.attention(make.changed(_empty_nan)), "0 / 0 in rows without picks", "SA-13"),
    (make.attention(make.changed(_heads_from_8)), "heads from 8 on not computed", "SA-07"),
    (make.attention(make.by_weights(_max_from_zero, stop=0.0)), "the running maximum begins at 0", ""),
    (make.attention(make.by_weights(_e4m3)), "probabilities in E4M3", ""),
)
PAGED = (
    (make.attention(load=_load_at(_page_stride_ignored)), "the stride of pages ignored", "SA-05"),
    (make.attention(load=_load_at(_padding_ignored)), "slots by number times the bytes of a token", "SA-05"),
    (make.attention(load=_load_at(_other_arrangement)), "planar read as inline, and the reverse", ""),
    (make.attention(load=_load_at(_scales_of_the_next)), "the scales of the next slot", ""),
    (make.attention(load=_pages_of_2_gib), "byte offsets of 32 bits", "SA-08"),
    (make.attention(load=_slots_of_64), "pages of 64 slots, always", ""),
    (make.attention(extra_load=_layout_of_v41), "the second cache read in the first one's layout", ""),
    (make.attention(present=_picks(lambda picks, rows: torch.where(picks == -1, rows - 1, picks))), "-1 read as the last slot", "SA-06"),
    (make.attention(present=_lengths(lambda lengths, columns: None)), "lanes past the length used", "SA-01"),
    (make.attention(lists=_without_extra), "the second list ignored", ""),
    (make.attention(make.by_weights(_no_sink)), "no sink", ""),
)
DECODE = (
    (make.split(parts.equal_weights), "parts weigh alike", ""),
    (make.split(parts.base_2), "natural lse of parts taken for base 2", ""),
    (make.split(right.merge_splits, with_sink=True), "the sink in each part, and in their merging", ""),
    (make.split(parts.last_dropped), "the last part dropped", ""),
    (make.split(parts.sink_left), "parts merged without the sink", ""),
    (_by_token_count, "another rounding from three tokens on", "SA-09"),
)
PREFILL = (
    (_beyond_64, "from 65 tokens on lanes past the length used", "SA-01"),
    (make.attention(make.given(_first_token_s_rows)), "pairs of tokens read the first one's rows", ""),
    (make.attention(load=_pages_of_2_gib), "byte offsets of 32 bits", "SA-08"),
)
MUTANTS = _numbered(
    *(("sparse_attention", *row) for row in SPARSE),
    *(("paged_attention", *row) for row in PAGED),
    *(("decode_attention", *row) for row in DECODE),
    *(("prefill_attention", *row) for row in PREFILL),
    *(("draft_attention", *row) for row in parts.DRAFT),
    *(("merge_splits", *row) for row in parts.MERGE),
    *parts.OTHERS,
)
