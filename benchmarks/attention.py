"""Attention over a cache too large for anybody's memory: decode, prefill, drafts and rows, beside FlashMLA and FlashInfer as they are.

Pages take 5 GiB on CUDA, 1 of windows and 4 of compressed entries, and bf16 rows 4. A token's window lies in consecutive slots and its
entries anywhere, and inside of a graph every call takes other lists, in turn. What is moved: queries, lists and results, and a record for
each pick, though windows of neighbours share some. FlashMLA reads V4's pages for the first line of it and bf16 rows for the other,
FlashInfer bf16 rows; rows that lie there already are theirs to begin with, so these lines leave out what decoding takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw
from dsv4.fast import dispatch, kv_cache
from dsv4.fast.adapters import flashinfer_mla, flashmla
from dsv4.fast.adapters.flashinfer import LIBRARY as FLASHINFER
from dsv4.fast.adapters.library import Library
from dsv4.formats import KV_LAYOUT_PAIRS, KV_LAYOUTS
from dsv4.types import PagedRows

WINDOW, PAGE = 128, 64
GIB = {"main": 1, "extra": 4}
TILE = 64  # pages that are made of numbers, and repeated
ROWS = 2**22  # bf16 rows on CUDA: 4 GiB
LISTS = 6  # that calls take in turn
DECODE = 1024  # tokens, up to which a case is one of decode
DRAFTS = 5
Lists = tuple[Tensor, ...]


@dataclass(frozen=True)
class InTurn(Case):
    """A case whose lists of picks are others in each call of a graph; outside of one always the first."""

    lists: tuple[Lists, ...] = ()
    turn: Any = field(default_factory=lambda: iter(()))

    def call(self, function: Callable[..., Any], first: Tensor, **more: Any) -> Any:
        """Call a twin."""
        slots, others = next(self.turn) if first.is_cuda and torch.cuda.is_current_stream_capturing() else self.lists[0]
        options = {**self.options, **({"extra_slots": others} if "extra_slots" in self.options else {})}
        return function(first, self.args[1], slots, *self.args[3:], **options, **more)


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The layers of each preset: so many tokens that decode, or that are one chunk of a prompt, and blocks of drafts."""
    for preset, config in PRESETS.items():
        label = f"{preset}, {tokens} tokens"
        main, extra = ("v41", "v41_fp4") if config.is_v41 else ("v4", "v4")
        yield from _over_pages(label, tokens, config.num_attention_heads, (main, extra), config.index_topk, device)
        yield from _rest(label, tokens, config.num_attention_heads, main, config.index_topk, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens with so many picks beside their window, from every pair of layouts."""
    label = f"{rows} tokens"
    for pair in (*((name, name) for name in KV_LAYOUTS), *KV_LAYOUT_PAIRS):
        yield from _over_pages(label, rows, 64, pair, columns, device, every=True)
    yield from _rest(label, rows, 64, "v41", columns, device)


def _over_pages(
    label: str, tokens: int, heads: int, pair: tuple[str, str], picks: int, device: torch.device, *, every: bool = False
) -> Iterator[Case]:
    q, sink = _queries(tokens, heads, device), torch.randn(heads, device=device)
    main, extra = (_pool(layout, kind, device) for layout, kind in zip(pair, GIB, strict=True))
    lists = tuple(_lists(tokens, picks, main, extra, number, device) for number in range(LISTS))
    words = f"{label}, {heads} heads, {WINDOW} picks of {pair[0]}, {picks} of {pair[1]}"
    records = tokens * (WINDOW * KV_LAYOUTS[pair[0]].token_bytes + picks * KV_LAYOUTS[pair[1]].token_bytes)
    read = q.nbytes + sink.nbytes + sum(one.nbytes for one in lists[0]) + records
    options = {"extra": extra, "extra_slots": lists[0][1]}
    for function, applies in (("decode", tokens <= DECODE), ("prefill", tokens > DECODE), ("paged", False)):
        if applies or every:
            raw = _libraries(q, main, extra, lists, sink, function == "decode", device)
            case = (q, main, lists[0][0], sink), options, raw, None, read, "", lists, cycle(lists)
            yield InTurn(f"attention.{function}_attention", words, *case)


def _rest(label: str, tokens: int, heads: int, layout: str, picks: int, device: torch.device) -> Iterator[Case]:
    """Over bf16 rows, of blocks of drafts, of parts, and windows."""
    q, sink = _queries(tokens, heads, device), torch.randn(heads, device=device)
    kv, lists = _some_rows(WINDOW + picks, tokens, device)
    words = f"{label}, {heads} heads, {WINDOW + picks} picks of bf16 rows"
    read = q.nbytes + sink.nbytes + lists[0][0].nbytes + lists[0][0].numel() * 2 * q.shape[2]
    raw = _libraries_of_rows(q, WINDOW + picks, sink, device) if device.type == "cuda" else {}
    pairs = tuple((one, one) for (one,) in lists)
    yield InTurn("attention.sparse_attention", words, (q, kv, lists[0][0], sink), {}, raw, None, read, "", pairs, cycle(pairs))
    blocks = -(-tokens // DRAFTS)
    q = _queries(blocks * DRAFTS, heads, device)
    main, own = _pool(layout, "main", device), torch.randn(len(q), q.shape[2], device=device).to(torch.bfloat16)
    slots = _lists(len(q), 1, main, main, 0, device)[0]
    read = q.nbytes + own.nbytes + slots.nbytes + slots.numel() * KV_LAYOUTS[layout].token_bytes
    words = f"{label}, {heads} heads, blocks of {DRAFTS}, {WINDOW} picks of {layout}"
    yield Case("attention.draft_attention", words, (q, own, main, slots, sink), {"block": DRAFTS}, read=read)
    for splits in (2, 8):
        outputs, lses = torch.randn(splits, tokens, heads, q.shape[2], device=device), torch.randn(splits, tokens, heads, device=device)
        yield Case("attention.merge_splits", f"{label}, {heads} heads, {splits} splits", (outputs, lses, sink))
    yield Case("attention.window_indices", label, (torch.randint(0, 2**20, (tokens,), device=device),), {"window": WINDOW})


def _queries(tokens: int, heads: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, heads, KV_LAYOUTS["v4"].dims, device=device).to(torch.bfloat16)


@cache
def _pool(layout: str, kind: str, device: torch.device) -> PagedRows:
    """Pages of a layout, of ordinary numbers. They stay for the cases after."""
    chosen, slots = KV_LAYOUTS[layout], torch.arange(TILE * PAGE, device=device)
    tile = torch.zeros(TILE, chosen.page_bytes(PAGE), dtype=torch.uint8, device=device)
    rows = torch.randn(len(slots), chosen.dims, device=device).to(torch.bfloat16)
    kv_cache.store_kv(rows, tile, slots, layout=layout, page_size=PAGE, impl=None if device.type == "cuda" else "eager")
    repeats = GIB[kind] * 2**30 // tile.nbytes + 1 if device.type == "cuda" else 1
    return PagedRows(tile.repeat(repeats, 1), layout, PAGE)


def _lists(tokens: int, picks: int, main: PagedRows, extra: PagedRows, seed: int, device: torch.device) -> Lists:
    """Windows of consecutive slots, and entries anywhere."""
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = [len(one.pages) * one.page_size for one in (main, extra)]
    starts = torch.randint(0, counts[0] - WINDOW, (tokens, 1), generator=generator, device=device)
    window = (starts + torch.arange(WINDOW, device=device)).to(torch.int32)
    return window, torch.randint(0, counts[1], (tokens, picks), generator=generator, dtype=torch.int32, device=device)


def _libraries(
    q: Tensor, main: PagedRows, extra: PagedRows, lists: tuple[Lists, ...], sink: Tensor, pages: bool, device: torch.device
) -> Raw:
    """The libraries' own calls on what they take without more ado."""
    if device.type != "cuda":
        return {}
    width = sum(one.shape[1] for one in lists[0])
    found = dict(_libraries_of_rows(q, width, sink, device))
    if pages and (main.layout, extra.layout) in flashmla.PAGED.get(dispatch.describe(device).capability, {}):
        known = _known(flashmla.LIBRARY, flashmla.SPARSE_DECODE, device)
        found["sgl-flash-mla, pages"] = known or _flashmla_pages(q, main, extra, lists, sink)
    return found


def _libraries_of_rows(q: Tensor, width: int, sink: Tensor, device: torch.device) -> Raw:
    found: dict[str, Any] = {}
    known = _known(flashmla.LIBRARY, flashmla.SPARSE_FORWARD, device)
    found["sgl-flash-mla, bf16 rows"] = known or _flashmla_rows(width, len(q), sink, device)
    known = _known(FLASHINFER, flashinfer_mla.MLA, device) or flashinfer_mla.takes_rows({"q": q})
    found["flashinfer, bf16 rows"] = known or _flashinfer_rows(width, q, device)
    return found


def _known(library: Library, symbol: str, device: torch.device) -> str | None:
    return library.devices(dispatch.describe(device)) or library.missing() or library.lacks(symbol) or library.disproved(symbol, device)


def _flashmla_pages(q: Tensor, main: PagedRows, extra: PagedRows, lists: tuple[Lists, ...], sink: Tensor) -> Callable[[Tensor], Any]:
    turn, schedule = cycle([tuple(one[:, None].contiguous() for one in pair) for pair in lists]), flashmla.schedule()

    def run(first: Tensor) -> Any:
        slots, others = next(turn)
        return flashmla.sparse_decode(first[:, None], main, slots, extra, others, q.shape[2] ** -0.5, sink, schedule)

    return run


@cache
def _rows(device: torch.device) -> Tensor:
    """bf16 rows of ordinary numbers, the first of zeros. They stay for the cases after."""
    tile = torch.randn(4096, KV_LAYOUTS["v4"].dims, device=device).to(torch.bfloat16)
    kv = tile.repeat(ROWS // len(tile) if device.type == "cuda" else 1, 1)
    kv[0] = 0
    return kv


def _some_rows(width: int, tokens: int, device: torch.device) -> tuple[Tensor, tuple[Lists, ...]]:
    kv = _rows(device)
    drawn = [torch.randint(1, len(kv), (tokens, width), dtype=torch.int32, device=device) for _ in range(LISTS)]
    return kv, tuple((one,) for one in drawn)


def _flashmla_rows(width: int, tokens: int, sink: Tensor, device: torch.device) -> Callable[[Tensor], Any]:
    kv, lists = _some_rows(-(-width // flashmla.ROW_PICKS) * flashmla.ROW_PICKS, tokens, device)
    turn = cycle(lists)
    return lambda first: flashmla.sparse_forward(first, kv[:, None], next(turn)[0][:, None], first.shape[2] ** -0.5, sink)


def _flashinfer_rows(width: int, q: Tensor, device: torch.device) -> Callable[[Tensor], Any] | str:
    if len(q) > flashinfer_mla.TOKENS:
        return f"one plan takes {flashinfer_mla.TOKENS} tokens"
    kv, lists = _some_rows(width, len(q), device)
    turn = cycle(lists)
    attention = flashinfer_mla.RowAttention(len(q), q.shape[1], width, q.shape[2] ** -0.5, device)
    rope, output, lse = flashinfer_mla.rope_of(len(kv), device), torch.empty_like(q), torch.empty(q.shape[:2], device=device)

    def run(first: Tensor) -> None:
        attention.indices.copy_(next(turn)[0].view(-1))
        attention.run(first, kv, rope, output, lse)

    return run
