"""Wrong selections: the best entries. `index_blocks` has candidate blocks, and what runs in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant, index_blocks
from dsv4.reference import indexer as right

INT32 = 2**31


def _visible(logits: Tensor, ends: Tensor | None, starts: Tensor | None) -> Tensor:
    entries = torch.arange(logits.shape[1])
    seen = entries < (logits.shape[1] if ends is None else ends.long()[:, None])
    return seen & (entries >= (0 if starts is None else starts.long()[:, None]))


def scored(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """The best by other scores: `change` of scores and visible entries."""

    def select(logits: Tensor, k: int, *, ends: Tensor | None = None, starts: Tensor | None = None, **options: Any) -> Tensor:
        seen = _visible(logits, ends, starts).expand(logits.shape)
        return right.select_topk(change(logits, seen), k, ends=ends, starts=starts, **options)

    return select


def nan_first(logits: Tensor, seen: Tensor) -> Tensor:
    """As torch.topk takes it."""
    return torch.where(logits.isnan(), torch.inf, logits)


def minus_infinity_counts(logits: Tensor, seen: Tensor) -> Tensor:
    lowest = torch.finfo(logits.dtype).min
    return torch.where((logits == -torch.inf) & seen, lowest, logits)


def infinity_lost(logits: Tensor, seen: Tensor) -> Tensor:
    return torch.where(logits == torch.inf, torch.nan, logits)


def fp16_bins(logits: Tensor, seen: Tensor) -> Tensor:
    """Coarse scores of fp16: everything below -65504 is one bin."""
    return logits.half().float()


def signed_zeros(logits: Tensor, seen: Tensor) -> Tensor:
    """Compared by their bits: -0 is below 0, and above every negative number."""
    return torch.where((logits == 0) & logits.signbit(), -(2.0**-126), logits)


def magnitudes(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.abs()


def bf16_scores(logits: Tensor, seen: Tensor) -> Tensor:
    return logits.bfloat16().float()


def first_of_a_buffer(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Of scores within 2^-7 of each other, which share a bin, the first `size` are kept."""

    def kept(logits: Tensor, seen: Tensor) -> Tensor:
        bins = torch.where(seen, (logits.float() * 64).floor(), torch.nan)
        found = logits.clone()
        for row, numbers in enumerate(bins):
            common = numbers[numbers.isfinite()].mode().values if bool(numbers.isfinite().any()) else torch.tensor(0.0)
            mine = (numbers == common).nonzero()[size:, 0]
            found[row, mine] = torch.nan
        return found

    return kept


def ties_to_the_larger(logits: Tensor, k: int, *, ends: Tensor | None = None, starts: Tensor | None = None, **options: Any) -> Tensor:
    """Selection in the mirrored row."""
    n = logits.shape[1]
    begins = torch.zeros(len(logits), dtype=torch.int64) if starts is None else starts.long().clamp(0, n)
    stops = torch.full_like(begins, n) if ends is None else ends.long().clamp(0, n)
    options.pop("order", None)
    for name in ("block_table", "requests", "page_size"):
        options.pop(name, None)
    picks = right.select_topk(logits.flip(1), k, ends=n - begins, starts=None, order="score")
    mirrored = torch.where(picks >= 0, n - 1 - picks - begins[:, None], -1)
    mirrored = torch.where((mirrored + begins[:, None] < stops[:, None]) & (picks >= 0), mirrored, INT32 - 1).sort(1).values
    return torch.where(mirrored == INT32 - 1, -1, mirrored).to(torch.int32)


def with_options(**changed: Any) -> Callable[..., Tensor]:
    """Arguments ignored, or others."""

    def select(logits: Tensor, k: int, **options: Any) -> Tensor:
        return right.select_topk(logits, k, **{name: changed.get(name, value) for name, value in options.items()})

    return select


def absolute(logits: Tensor, k: int, *, starts: Tensor | None = None, **options: Any) -> Tensor:
    """Counted from the first column, whatever the start is."""
    picks = right.select_topk(logits, k, starts=starts, **options)
    if starts is None or "block_table" in options:
        return picks
    return torch.where(picks >= 0, picks + starts.long().clamp(0, logits.shape[1])[:, None], -1).to(torch.int32)


def one_more_visible(logits: Tensor, k: int, *, ends: Tensor | None = None, **options: Any) -> Tensor:
    """j <= ends."""
    return right.select_topk(logits, k, ends=None if ends is None else ends.long().clamp(-2, 2**31) + 1, **options)


def holes(logits: Tensor, k: int, *, order: str = "any", **options: Any) -> Tensor:
    """-1 before the picks, not behind them."""
    picks = right.select_topk(logits, k, order=order, **options)
    return picks.flip(1) if order != "score" else picks.gather(1, (picks >= 0).sort(dim=1, stable=True).indices)


def uninitialised(logits: Tensor, k: int, **options: Any) -> Tensor:
    """Missing picks are whatever lay there: the bits of a NaN."""
    picks = right.select_topk(logits, k, **options)
    return torch.where(picks < 0, 0x7FC00000, picks)


def tied_1024(logits: Tensor, k: int, **options: Any) -> Tensor:
    """At most 1024 picks equal to the last one."""
    picks = right.select_topk(logits, k, **options)
    return torch.where(torch.arange(k) < 1024, picks, -1)


def rows_beyond_int32(logits: Tensor, k: int, **options: Any) -> Tensor:
    """Rows whose element offset does not fit 32 bits are left out."""
    picks = right.select_topk(logits, k, **options)
    ends = torch.arange(len(logits)) * logits.stride(0) + logits.shape[1]
    return torch.where((ends < INT32)[:, None], picks, -1)


def translated(change: Callable[[Tensor, Tensor, Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """Slots by another rule: `change` of table, requests, picks and page size."""

    def select(logits: Tensor, k: int, **options: Any) -> Tensor:
        table, requests, size = (options.pop(name, None) for name in ("block_table", "requests", "page_size"))
        picks = right.select_topk(logits, k, **options)
        if table is None:
            return picks
        slots = torch.where(picks >= 0, change(table, requests, picks.long(), size), -1).to(torch.int32)
        return slots.gather(1, (slots < 0).sort(dim=1, stable=True).indices)

    return select


def _pages(table: Tensor, requests: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    known = (requests >= 0)[:, None] & (requests < len(table))[:, None] & (columns >= 0) & (columns < table.shape[1])
    rows = requests.clamp(0, len(table) - 1).long()[:, None].expand_as(columns)
    return table[rows, columns.clamp(0, table.shape[1] - 1)].long(), known


def by_position(table: Tensor, requests: Tensor, picks: Tensor, size: int) -> Tensor:
    """The column is the entry, not its page."""
    page, known = _pages(table, requests, picks)
    return torch.where(known & (page >= 0), page * size + picks % size, -1)


def first_slot(table: Tensor, requests: Tensor, picks: Tensor, size: int) -> Tensor:
    page, known = _pages(table, requests, picks // size)
    return torch.where(known & (page >= 0), page * size, -1)


def wrapped(table: Tensor, requests: Tensor, picks: Tensor, size: int) -> Tensor:
    page, known = _pages(table, requests, picks // size)
    return torch.where(known & (page >= 0), (page * size + picks % size) % INT32, -1)


def missing_pages_kept(table: Tensor, requests: Tensor, picks: Tensor, size: int) -> Tensor:
    page, known = _pages(table, requests, picks // size)
    slots = page.clamp(min=0) * size + picks % size
    return torch.where(known & (slots < INT32), slots, -1)


def requests_clamped(table: Tensor, requests: Tensor, picks: Tensor, size: int) -> Tensor:
    page, _ = _pages(table, requests.clamp(0, len(table) - 1), picks // size)
    slots = page * size + picks % size
    return torch.where((page >= 0) & (picks // size < table.shape[1]) & (slots < INT32), slots, -1)


def _numbered(*rows: tuple[str, Callable[..., Any], str, str]) -> tuple[Mutant, ...]:
    return tuple(
        Mutant(f"topk-{number:02}", "indexer", function, call, fault, source)
        for number, (function, call, fault, source) in enumerate(rows, 1)
    )


ENTRIES, CANDIDATES = right.select_entries, right.select_candidates
MUTANTS = _numbered(
    ("select_topk", ties_to_the_larger, "ties to the larger entry", "IX-19"),
    ("select_topk", scored(nan_first), "NaN is the largest", "IX-06"),
    ("select_topk", scored(minus_infinity_counts), "-inf is picked", ""),
    ("select_topk", scored(infinity_lost), "+inf is never picked", "IX-01"),
    ("select_topk", scored(fp16_bins), "compared in fp16", "IX-05"),
    ("select_topk", scored(bf16_scores), "compared in bf16", ""),
    ("select_topk", scored(signed_zeros), "-0 is below 0", ""),
    ("select_topk", scored(magnitudes), "compared by magnitude", ""),
    ("select_topk", scored(first_of_a_buffer(4096)), "4096 entries of a bin, the others lost", "IX-03"),
    ("select_topk", scored(first_of_a_buffer(1024)), "1024 entries of a bin, the others lost", "IX-03"),
    ("select_topk", tied_1024, "at most 1024 picks", "IX-01"),
    ("select_topk", absolute, "absolute columns where starts are given", "IX-19"),
    ("select_topk", with_options(starts=None), "starts ignored", ""),
    ("select_topk", with_options(ends=None), "fill lanes behind the end counted", "IX-05"),
    ("select_topk", one_more_visible, "visible is j <= ends", "IX-17"),
    ("select_topk", with_options(order="index"), "ascending, whatever is asked for", ""),
    ("select_topk", with_options(order="score"), "descending, whatever is asked for", ""),
    ("select_topk", holes, "-1 before the picks", "IX-01"),
    ("select_topk", uninitialised, "the bits of a NaN for a missing pick", "IX-06"),
    ("select_topk", rows_beyond_int32, "element offsets of 32 bits", "IX-25"),
    ("select_topk", translated(by_position), "the entry taken for a column of the table", "IX-12"),
    ("select_topk", translated(first_slot), "the first slot of each page", "IX-12"),
    ("select_topk", translated(wrapped), "slots of 32 bits wrap", "IX-10"),
    ("select_topk", translated(missing_pages_kept), "-1 in the table read as page 0", ""),
    ("select_topk", translated(requests_clamped), "absent requests read another's table", ""),
    ("select_topk", with_options(block_table=None, requests=None, page_size=None), "picks not translated", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.newest_missed), "the newest block not forced in", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.newest_as_equal), "the newest block preferred among equals alone", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.usual, forced=1), "the block of the next entry forced in", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.nan_wins), "NaN wins", "IX-06"),
    ("candidate_blocks", index_blocks.maxima(index_blocks.nan_loses_the_block), "one NaN loses its block", "IX-06"),
    ("candidate_blocks", index_blocks.maxima(index_blocks.means), "means in the place of maxima", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.first_of_block), "the first entry for its block", ""),
    ("candidate_blocks", index_blocks.maxima(index_blocks.empty_blocks_kept), "blocks of -inf kept", ""),
    ("candidate_blocks", index_blocks.larger_block, "ties to the larger block", ""),
    ("candidate_blocks", index_blocks.not_ascending, "blocks in descending order, -1 last", ""),
    ("candidate_blocks", index_blocks.partial_block_dropped, "the last, partial block lost", ""),
    ("candidate_blocks", index_blocks.ends_ignored, "ends ignored", ""),
    ("restrict_to_blocks", index_blocks.restricted(index_blocks.without_the_first), "a candidate block missed", ""),
    ("restrict_to_blocks", index_blocks.restricted(index_blocks.of_eight), "blocks of 8, whatever is asked for", ""),
    ("restrict_to_blocks", index_blocks.restricted(index_blocks.next_block), "blocks off by one", ""),
    ("restrict_to_blocks", index_blocks.restricted(index_blocks.minus_one_is_block_0), "-1 taken for the first block", ""),
    ("restrict_to_blocks", index_blocks.zeros_outside, "zeros outside of the blocks", ""),
    ("restrict_to_blocks", index_blocks.added_mask, "NaN shows outside of the blocks", "IX-06"),
    ("restrict_to_blocks", index_blocks.last_entry_lost, "the last entry of each block lost", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.without("candidates", None)), "candidates ignored", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.without("order", "score")), "descending, whatever is asked for", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.without("precision", "fp32")), "fp32 scores where bf16 is asked for", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.without("precision", "bf16")), "bf16 scores where fp32 is asked for", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.without("block", 8)), "blocks of 8, whatever is asked for", ""),
    ("select_entries", index_blocks.chosen(ENTRIES, index_blocks.ends_of_the_first_chunk), "every chunk has the lengths of the first", ""),
    (
        "select_entries",
        index_blocks.chosen(ENTRIES, index_blocks.candidates_of_the_first_chunk),
        "every chunk has the candidates of the first",
        "",
    ),
    ("select_entries", index_blocks.last_chunk_lost(ENTRIES), "the last, partial chunk lost", "IX-25"),
    (
        "select_candidates",
        index_blocks.chosen(CANDIDATES, index_blocks.without("precision", "fp32")),
        "fp32 scores where bf16 is asked for",
        "",
    ),
    ("select_candidates", index_blocks.chosen(CANDIDATES, index_blocks.without("block", 8)), "blocks of 8, whatever is asked for", ""),
    ("select_candidates", index_blocks.chosen(CANDIDATES, index_blocks.without("count", 2048)), "every block kept", ""),
    (
        "select_candidates",
        index_blocks.chosen(CANDIDATES, index_blocks.ends_of_the_first_chunk),
        "every chunk has the lengths of the first",
        "",
    ),
    ("select_candidates", index_blocks.last_chunk_lost(CANDIDATES), "the last, partial chunk lost", "IX-25"),
)
