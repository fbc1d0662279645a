"""Wrong indexers, many of them out of public bug reports: visibility and scores; `index_codes` and `index_selection` have the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import INDEX_LAYOUTS
from dsv4.parity.mutants import Mutant, index_codes, index_selection
from dsv4.reference import indexer as right
from dsv4.types import IndexKeys, IndexQueries


def _past_position(positions: Tensor, *, ratio: int) -> Tensor:
    """p div r."""
    return right.visible_entries(positions.long().clamp(-1, 2**40) - 1, ratio=ratio)


def _one_more(positions: Tensor, *, ratio: int) -> Tensor:
    """j <= (p + 1) div r."""
    seen = right.visible_entries(positions, ratio=ratio)
    return torch.where(positions >= 0, seen + 1, seen)


def _tokens(positions: Tensor, *, ratio: int) -> Tensor:
    return right.visible_entries(positions, ratio=1)


def _ratio_0_sees_nothing(positions: Tensor, *, ratio: int) -> Tensor:
    seen = right.visible_entries(positions, ratio=ratio)
    return seen if ratio else torch.zeros_like(seen)


def _rounded_up(positions: Tensor, *, ratio: int) -> Tensor:
    return right.visible_entries(positions.long().clamp(-1, 2**40) + max(ratio, 1) - 1, ratio=ratio)


def _wraps(positions: Tensor, *, ratio: int) -> Tensor:
    """p + 1 in the positions' own integers."""
    return ((positions + 1).div(max(ratio, 1), rounding_mode="floor")).to(torch.int32)


def _summed(
    heads: Callable[[Tensor, Tensor], Tensor] = lambda dot, weight: dot.relu() * weight,
    join: Callable[[Tensor], Tensor] = lambda weighted: weighted.sum(1),
    change: Callable[[IndexQueries, IndexKeys], tuple[IndexQueries, IndexKeys]] = lambda queries, keys: (queries, keys),
) -> Callable[..., Tensor]:
    """`index_logits` from weighted heads fp64 [tokens, H, entries] of dot products and weights, joined; of other queries and keys."""

    def logits(queries: IndexQueries, keys: IndexKeys, *, starts: Tensor | None = None, ends: Tensor, precision: str = "fp32") -> Tensor:
        whole = right.index_logits(queries, keys, starts=starts, ends=ends, precision=precision)
        made, others = change(queries, keys)
        (q, q_factors), (k, k_factors) = right._groups(made.codes, made.scales), right._groups(others.codes, others.scales)
        dot = torch.einsum("thgd,ngd,thg,ng->thn", q, k, q_factors, k_factors)
        found = join(heads(dot, made.weights.double()[..., None])).to(whole.dtype)
        return torch.where(_seen(whole, starts, ends), found, -torch.inf)

    return logits


def _seen(logits: Tensor, starts: Tensor | None, ends: Tensor) -> Tensor:
    entries = torch.arange(logits.shape[1])
    seen = entries < ends.long()[:, None]
    return seen if starts is None else seen & (entries >= starts.long()[:, None])


def _fmax(dot: Tensor, weight: Tensor) -> Tensor:
    """A maximum that drops NaN."""
    return dot.nan_to_num(0.0, torch.inf, -torch.inf).relu() * weight


def _bf16_chain(dot: Tensor, weight: Tensor) -> Tensor:
    return (dot.bfloat16().relu() * weight.bfloat16()).double()


def _bf16_sum(weighted: Tensor) -> Tensor:
    """Added in bf16, head by head."""
    total = torch.zeros_like(weighted[:, 0], dtype=torch.bfloat16)
    for head in range(weighted.shape[1]):
        total = total + weighted[:, head].bfloat16()
    return total.double()


def _no_key_scale(queries: IndexQueries, keys: IndexKeys) -> tuple[IndexQueries, IndexKeys]:
    return queries, keys if keys.scales.dtype == torch.int32 else keys._replace(scales=torch.ones_like(keys.scales))


def _next_key_scale(queries: IndexQueries, keys: IndexKeys) -> tuple[IndexQueries, IndexKeys]:
    return queries, keys._replace(scales=keys.scales.roll(-1, 0))


def _words_reversed(queries: IndexQueries, keys: IndexKeys) -> tuple[IndexQueries, IndexKeys]:
    """Of queries and keys alike."""
    if queries.scales is None or queries.codes.shape[2] < 64:
        return queries, keys
    return queries._replace(scales=index_codes.reversed_words(queries.scales)), keys


def _odd_first(queries: IndexQueries, keys: IndexKeys) -> tuple[IndexQueries, IndexKeys]:
    """Nibbles of the keys alone."""
    if queries.scales is None:
        return queries, keys
    return queries, keys._replace(codes=keys.codes // 16 + keys.codes % 16 * 16)


def _first_group_scale(queries: IndexQueries, keys: IndexKeys) -> tuple[IndexQueries, IndexKeys]:
    """One scale for all groups of a key."""
    if queries.scales is None:
        return queries, keys
    return queries, keys._replace(scales=(keys.scales & 255) * 0x01010101)


def _head_lost(weighted: Tensor) -> Tensor:
    return weighted[:, :-1].sum(1) if weighted.shape[1] > 1 else weighted.sum(1)


def _ranged(change: Callable[[Tensor, Tensor | None, int], tuple[Tensor, Tensor | None]]) -> Callable[..., Tensor]:
    """Other ranges: `change` of ends, starts and the number of entries."""

    def logits(queries: IndexQueries, keys: IndexKeys, *, starts: Tensor | None = None, ends: Tensor, precision: str = "fp32") -> Tensor:
        stops, begins = change(ends, starts, len(keys.codes))
        return right.index_logits(queries, keys, starts=begins, ends=stops, precision=precision)

    return logits


def _end_seen(ends: Tensor, starts: Tensor | None, entries: int) -> tuple[Tensor, Tensor | None]:
    return ends.long().clamp(-2, 2**31) + 1, starts


def _from_the_first(ends: Tensor, starts: Tensor | None, entries: int) -> tuple[Tensor, Tensor | None]:
    return ends, None


def _everything(ends: Tensor, starts: Tensor | None, entries: int) -> tuple[Tensor, Tensor | None]:
    return torch.full_like(ends, entries), starts


def _filled(value: float) -> Callable[..., Tensor]:
    """Another number where nothing is seen."""

    def logits(queries: IndexQueries, keys: IndexKeys, *, starts: Tensor | None = None, ends: Tensor, precision: str = "fp32") -> Tensor:
        found = right.index_logits(queries, keys, starts=starts, ends=ends, precision=precision)
        return torch.where(_seen(found, starts, ends), found, value)

    return logits


def _multiplied_mask(queries: IndexQueries, keys: IndexKeys, *, starts: Tensor | None = None, ends: Tensor, **options: Any) -> Tensor:
    """Scores plus 0 or -inf: NaN of entries that are not seen shows."""
    whole = right.index_logits(queries, keys, ends=torch.full_like(ends, len(keys.codes)), **options)
    return whole + torch.where(_seen(whole, starts, ends), 0.0, -torch.inf).to(whole.dtype)


def _partial_tile(queries: IndexQueries, keys: IndexKeys, *, ends: Tensor, **options: Any) -> Tensor:
    """Entries of the last, partial tile of 64 are not computed."""
    found = right.index_logits(queries, keys, ends=ends, **options)
    whole = found.shape[1] - found.shape[1] % 64 if found.shape[1] > 64 else found.shape[1]
    return torch.where(torch.arange(found.shape[1]) < whole, found, -torch.inf)


def _rounded_at_the_end(queries: IndexQueries, keys: IndexKeys, *, precision: str = "fp32", **options: Any) -> Tensor:
    """bf16 scores as fp32 ones that are rounded once."""
    found = right.index_logits(queries, keys, precision="fp32", **options)
    return found.bfloat16() if precision == "bf16" else found


def _fp32_scores(*args: Any, **options: Any) -> Tensor:
    """fp32 scores through bf16."""
    found = right.index_logits(*args, **options)
    return found.bfloat16().to(found.dtype)


Slots = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]


def _paged(slots_of: Slots, places: index_codes.Places = index_codes.planar) -> Callable[..., Tensor]:
    """`paged_index_logits` of other slots, or of pages read otherwise; a slot below 0 is not there."""

    def logits(
        queries: IndexQueries,
        pages: Tensor,
        block_table: Tensor,
        requests: Tensor,
        ends: Tensor,
        *,
        format: str,
        page_size: int,
        width: int,
        precision: str = "fp32",
    ) -> Tensor:
        dim, rows = queries.codes.shape[2] * 8 // INDEX_LAYOUTS[format].bits, []
        load = index_codes.loaded(places)
        for token in range(len(requests)):
            entries = torch.arange(width)
            slots = slots_of(block_table, requests[token], entries, page_size, pages.shape[0])
            keys = load(pages, slots, format=format, page_size=page_size, dim=dim)
            mine = right.index_logits(
                right._of_tokens(queries, slice(token, token + 1)), keys, ends=ends[token : token + 1], precision=precision
            )
            there = (slots >= 0) & (slots < pages.shape[0] * page_size)
            rows.append(mine.where(there, -torch.inf))
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        return torch.cat([torch.empty(0, width, dtype=dtype), *rows])

    return logits


def _slots(table: Tensor, request: Tensor, columns: Tensor, inside: Tensor, size: int) -> Tensor:
    """Slots of columns of a request's table and places in their pages."""
    known = (columns >= 0) & (columns < table.shape[1]) & bool(0 <= int(request) < len(table))
    page = table[int(request.clamp(0, len(table) - 1)), columns.clamp(0, table.shape[1] - 1)].long()
    return torch.where(known & (page >= 0), page * size + inside, -1)


def _usual(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, request, entries // size, entries % size, size)


def _by_position(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    """The column is the entry, not its page."""
    return _slots(table, request, entries, entries % size, size)


def _first_slot(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, request, entries // size, torch.zeros_like(entries), size)


def _first_request(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, torch.zeros_like(request), entries // size, entries % size, size)


def _request_clamped(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, request.clamp(0, len(table) - 1), entries // size, entries % size, size)


def _no_table(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    """Pages in the order of the memory."""
    return entries


def _column_clamped(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, request, (entries // size).clamp(max=table.shape[1] - 1), entries % size, size)


def _absent_page_0(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    """-1, and pages past the last, read another page."""
    return _slots(table.clamp(0, count - 1), request, entries // size, entries % size, size)


def _pages_of_64(table: Tensor, request: Tensor, entries: Tensor, size: int, count: int) -> Tensor:
    return _slots(table, request, entries // 64, entries % 64, size)


def _paged_int32(queries: IndexQueries, pages: Tensor, block_table: Tensor, *args: Any, **options: Any) -> Tensor:
    """Pages that end beyond byte 2^31 are not there."""
    near = torch.where((block_table.long() + 1) * pages.stride(0) < 2**31, block_table, -1)
    return right.paged_index_logits(queries, pages, near, *args, **options)


def _paged_of(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Other ends: `change` of ends and the width."""

    def logits(
        queries: IndexQueries, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, *, width: int, **options: Any
    ) -> Tensor:
        return right.paged_index_logits(queries, pages, block_table, requests, change(ends, width), width=width, **options)

    return logits


def _numbered(*rows: tuple[str, Callable[..., Any], str, str]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(f"index-{number:03}", "indexer", function, call, fault, source)
        for number, (function, call, fault, source) in enumerate(rows, 1)
    )


MUTANTS = (
    *_numbered(
        ("visible_entries", _past_position, "p div r in the place of (p + 1) div r", "IX-17"),
        ("visible_entries", _one_more, "visible is j <= (p + 1) div r", "IX-17"),
        ("visible_entries", _tokens, "lengths in tokens", "IX-23"),
        ("visible_entries", _ratio_0_sees_nothing, "ratio 0 sees nothing", "IX-23"),
        ("visible_entries", _rounded_up, "incomplete entries are visible", "IX-17"),
        ("visible_entries", _wraps, "p + 1 wraps, and negative positions count", ""),
        ("index_logits", _summed(lambda dot, weight: dot * weight), "no ReLU", "IX-13"),
        ("index_logits", _summed(lambda dot, weight: (dot * weight).relu()), "ReLU after the weight", ""),
        ("index_logits", _summed(lambda dot, weight: dot.abs() * weight), "magnitudes in the place of ReLU", ""),
        ("index_logits", _summed(join=lambda weighted: weighted.mean(1)), "the mean over heads", ""),
        ("index_logits", _summed(join=_head_lost), "the last head lost", ""),
        ("index_logits", _summed(join=_bf16_sum), "heads added in bf16", ""),
        ("index_logits", _summed(_bf16_chain), "products in bf16 where fp32 is asked for", ""),
        ("index_logits", _summed(_fmax), "NaN scores become 0", "IX-06"),
        ("index_logits", _summed(change=_no_key_scale), "the key's scale ignored", ""),
        ("index_logits", _summed(change=_next_key_scale), "scales off by one key", ""),
        ("index_logits", _summed(change=_words_reversed), "scale bytes of a word in the other order", "IX-25"),
        ("index_logits", _summed(change=_first_group_scale), "one scale for all groups of a key", "IX-25"),
        ("index_logits", _summed(change=_odd_first), "the odd number in the low nibble", ""),
        ("index_logits", _ranged(_end_seen), "visible is j <= ends", "IX-17"),
        ("index_logits", _ranged(_from_the_first), "starts ignored", ""),
        ("index_logits", _ranged(_everything), "ends ignored", "IX-05"),
        ("index_logits", _filled(0.0), "zeros where nothing is seen", ""),
        ("index_logits", _filled(torch.finfo(torch.float32).min), "a large number where nothing is seen", ""),
        ("index_logits", _multiplied_mask, "NaN shows where nothing is seen", "IX-06"),
        ("index_logits", _partial_tile, "the last, partial tile of keys lost", ""),
        ("index_logits", _rounded_at_the_end, "bf16 precision as one rounding", ""),
        ("index_logits", _fp32_scores, "fp32 scores through bf16", ""),
        ("paged_index_logits", _paged(_by_position), "the entry taken for a column of the table", "IX-12"),
        ("paged_index_logits", _paged(_first_slot), "the first slot of each page for all of it", "IX-12"),
        ("paged_index_logits", _paged(_usual, index_codes.interleaved), "a scale behind each key's codes", "IX-13"),
        ("paged_index_logits", _paged(_usual, index_codes.first_page_scales), "scales of the first page for all", "KV-01"),
        ("paged_index_logits", _paged(_usual, index_codes.dense_pages), "the stride of pages ignored", ""),
        ("paged_index_logits", _paged(_first_request), "the table of the first request for all", ""),
        ("paged_index_logits", _paged(_request_clamped), "absent requests read another's pages", "IX-09"),
        ("paged_index_logits", _paged(_no_table), "the table ignored", "IX-12"),
        ("paged_index_logits", _paged(_column_clamped), "entries past the table read its last page", "IX-09"),
        ("paged_index_logits", _paged(_absent_page_0), "-1 in the table reads a page", ""),
        ("paged_index_logits", _paged(_pages_of_64), "pages of 64, whatever is asked for", ""),
        ("paged_index_logits", _paged_int32, "byte offsets of 32 bits", "IX-10"),
        ("paged_index_logits", _paged_of(torch.full_like), "ends ignored", ""),
        ("paged_index_logits", _paged_of(lambda ends, width: ends.roll(-1)), "the length of another token", "IX-09"),
        ("index_queries", index_codes.queries_through(index_codes.no_transform), "no Hadamard transform of queries", "IX-15"),
        ("index_queries", index_codes.queries_through(index_codes.transform_first), "the transform before the rotation", ""),
        ("index_queries", index_codes.queries_through(index_codes.unnormalised_transform), "the transform without d^-1/2", ""),
        ("index_queries", index_codes.queries_through(index_codes.one_rounding), "no bf16 between rotation and transform", ""),
        ("index_queries", index_codes.queries_through(index_codes.no_rotation), "not rotated", ""),
        ("index_queries", index_codes.queries_through(index_codes.inverse_rotation), "rotated backwards", ""),
        ("index_queries", index_codes.queries_through(index_codes.first_dims), "the first dims rotated", ""),
        ("index_queries", index_codes.queries_through(index_codes.absent_at_zero), "absent positions taken for the ends of the table", ""),
        ("index_queries", index_codes.queries_changed(index_codes.no_constant), "weights without (d H)^-1/2", ""),
        ("index_queries", index_codes.queries_changed(index_codes.no_heads_in_constant), "weights without H^-1/2", ""),
        ("index_queries", index_codes.queries_changed(index_codes.bf16_constant), "the constant in bf16", ""),
        ("index_queries", index_codes.queries_changed(index_codes.scale_not_folded), "the scale of an FP8 query lost", ""),
        ("index_queries", index_codes.queries_changed(index_codes.power_of_two_scale), "scales of FP8 queries as powers of two", ""),
        ("index_queries", index_codes.queries_changed(index_codes.scale_of_the_token), "one FP8 scale for all heads", ""),
        ("index_queries", index_codes.queries_changed(index_codes.last_group_lowest), "scale bytes in the other order", "IX-25"),
        ("index_queries", index_codes.queries_changed(index_codes.odd_first), "the odd number in the low nibble", ""),
        ("index_queries", index_codes.queries_with(amax_floor=None), "the floor ignored", ""),
        ("index_queries", index_codes.queries_with(ties="even"), "FP4 midpoints to even, whatever is asked for", "QT-05"),
        ("index_queries", index_codes.queries_with(zero_sign="kept"), "minus zero kept, whatever is asked for", ""),
        ("index_queries", index_codes.queries_with(weight_dtype="fp32"), "weights in fp32, whatever is asked for", ""),
        ("index_keys", index_codes.keys_through(index_codes.no_transform), "no Hadamard transform of keys", "IX-15"),
        ("index_keys", index_codes.keys_through(index_codes.transform_first), "the transform before the rotation", ""),
        ("index_keys", index_codes.keys_through(index_codes.no_rotation), "not rotated", ""),
        ("index_keys", index_codes.keys_through(index_codes.one_rounding), "no bf16 between rotation and transform", ""),
        ("index_keys", index_codes.norm_last, "the norm after the rotation", ""),
        ("index_keys", index_codes.no_norm, "no norm", ""),
        ("index_keys", index_codes.weight_plus_one, "1 added to the weight", ""),
        ("index_keys", index_codes.key_words_reversed, "scale bytes in the other order", "IX-25"),
        ("index_keys", index_codes.keys_with(amax_floor=None), "the floor ignored", ""),
        ("index_keys", index_codes.keys_with(ties="even"), "FP4 midpoints to even, whatever is asked for", "QT-05"),
        ("index_keys", index_codes.keys_with(eps=1e-6), "an eps of V4's, whatever is asked for", ""),
        ("store_index_keys", index_codes.stored(index_codes.interleaved), "a scale behind each key's codes", "IX-13"),
        ("store_index_keys", index_codes.stored(index_codes.first_page_scales), "the scales of all pages in the first", "KV-01"),
        ("store_index_keys", index_codes.stored(index_codes.scales_of_the_next), "scales off by one slot", ""),
        ("store_index_keys", index_codes.stored(index_codes.dense_pages), "the stride of pages ignored", ""),
        ("store_index_keys", index_codes.stored(keep=index_codes.first_of_each), "of equal slots the first key", ""),
        ("store_index_keys", index_codes.store_at(index_codes.minus_one_is_the_last), "-1 written to the last slot", ""),
        ("store_index_keys", index_codes.store_at(index_codes.clamped), "slots past the last written to it", ""),
        ("store_index_keys", index_codes.absolute_offset, "the storage offset of a layer lost", "KV-01"),
        ("store_index_keys", index_codes.store_int32, "byte offsets of 32 bits", "IX-10"),
        ("store_index_keys", index_codes.other_slots_cleared, "other slots of a page cleared", ""),
        ("load_index_keys", index_codes.loaded(index_codes.interleaved), "a scale behind each key's codes", "IX-13"),
        ("load_index_keys", index_codes.loaded(index_codes.scales_of_the_next), "scales off by one slot", ""),
        ("load_index_keys", index_codes.loaded(index_codes.first_page_scales), "scales of the first page for all", "KV-01"),
        ("load_index_keys", index_codes.loaded(index_codes.dense_pages), "the stride of pages ignored", ""),
        ("load_index_keys", index_codes.loaded(slots_of=index_codes.minus_one_is_the_last), "-1 reads the last slot", ""),
        ("load_index_keys", index_codes.loaded(slots_of=index_codes.clamped), "slots past the last read it", ""),
        ("load_index_keys", index_codes.load_int32, "byte offsets of 32 bits", "IX-10"),
    ),
    *index_selection.MUTANTS,
)
