"""Compressors: products, plan, entries, and entries into the cache, of one long request and of many that decode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations
from dsv4.fast import compressor
from dsv4.formats import KV_LAYOUTS
from dsv4.rope_tables import rope_frequencies, rope_table

POSITIONS, START = 65536, 8191  # of the table, and where requests that decode stand
DRAFTS = 5
KEY = 128  # channels of an index key
OVERLAPPING = 4  # the ratio whose entries see the tokens of the entry before


class Kind(NamedTuple):
    """A compressor of a model, and where its entries go; no layout for index keys."""

    name: str
    ratio: int
    dim: int
    layout: str = ""
    page_size: int = 0

    @property
    def overlap(self) -> bool:
        return self.ratio == OVERLAPPING

    @property
    def width(self) -> int:
        return 2 * self.dim if self.overlap else self.dim


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The compressors of each preset: so many tokens of one request, and as many requests with a token each."""
    for preset, config in PRESETS.items():
        layout = "v41_fp4" if config.is_v41 else "v4"
        kinds = [
            Kind(f"ratio {ratio}", ratio, config.head_dim, layout, 256 // ratio) for ratio in sorted(set(config.compress_ratios) - {0})
        ]
        if not config.is_v41:
            kinds.append(Kind("index keys", OVERLAPPING, config.index_head_dim))
        for kind in kinds:
            yield from _of_kind(f"{preset}, {tokens} tokens, {kind.name}", kind, tokens, config.hidden_size, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Every ratio with so many tokens of a hidden state so wide."""
    for kind in (
        Kind("ratio 4", 4, 512, "v4", 64),
        Kind("ratio 128", 128, 512, "v4", 2),
        Kind("ratio 2", 2, 512, "v41_fp4", 128),
        Kind("ratio 1", 1, 512, "v41_fp4_inline", 64),
        Kind("index keys", OVERLAPPING, KEY),
    ):
        yield from _of_kind(f"{rows} tokens, {kind.name}", kind, rows, columns, device)


def _of_kind(label: str, kind: Kind, tokens: int, hidden: int, device: torch.device) -> Iterator[Case]:
    x = activations(tokens, hidden, device)
    wkv, wgate = (activations(kind.width, hidden, device) for _ in range(2))
    product = {"torch's bf16 products (arithmetic limit)": lambda given: (given @ wkv.T, given @ wgate.T)}
    yield Case("compressor.project", f"{label}, {hidden} wide", (x, wkv, wgate), raw=product)
    for name, requests in (("one request", 1), ("a token each", tokens)):
        yield from _of_requests(f"{label}, {name}", kind, tokens, requests, device)


def _of_requests(label: str, kind: Kind, tokens: int, requests: int, device: torch.device) -> Iterator[Case]:
    """What is moved: the tokens, those that go into rings once more, and the entries; neither all of the state nor all pages."""
    starts = torch.full((requests,), 0 if requests == 1 else START, device=device) + torch.arange(requests, device=device)
    cu_seqlens = torch.arange(requests + 1, dtype=torch.int32, device=device) * (tokens // requests)
    state = compressor.compressor_state(requests, kind.dim, ratio=kind.ratio, overlap=kind.overlap, drafts=DRAFTS, device=device)
    values, scores = (torch.randn(tokens, kind.width, device=device) for _ in range(2))
    ape = torch.randn(kind.ratio, kind.width, device=device) if kind.ratio > 2 else None
    batch = (values, scores, state, starts, cu_seqlens)
    options: dict[str, Any] = {"ratio": kind.ratio, "overlap": kind.overlap, "ape": ape}
    kept = min(tokens, requests * state.shape[1]) * 2 * kind.width * 4
    read = values.nbytes + scores.nbytes + kept - state.nbytes
    yield Case("compressor.compression_plan", label, (starts, cu_seqlens), {"ratio": kind.ratio, "tokens": tokens})
    yield Case("compressor.compress", label, batch, options, read=read)
    if kind.layout:
        rows = min(tokens, tokens // kind.ratio + requests)
        yield Case("compressor.compress_and_store", label, *_into_the_cache(batch, options, kind, rows, read))


def _into_the_cache(
    batch: tuple[Tensor, ...], options: dict[str, Any], kind: Kind, rows: int, read: int
) -> tuple[tuple[Tensor, ...], dict[str, Any], dict[str, Any], None, int]:
    layout, device = KV_LAYOUTS[kind.layout], batch[0].device
    page_size = max(kind.page_size, 1)
    pages = torch.zeros(2 * rows // page_size + 1, layout.page_bytes(page_size), dtype=torch.uint8, device=device)
    slots = torch.randperm(len(pages) * page_size, device=device)[:rows]
    table = rope_table(rope_frequencies(1.6e5, device=device), POSITIONS)
    weight = torch.rand(kind.dim, device=device).to(torch.bfloat16)
    more = {**options, "eps": 1e-6, "layout": kind.layout, "page_size": page_size}
    moved = read + rows * (layout.token_bytes + 4 * table.shape[1]) - pages.nbytes
    return (*batch, weight, table, pages, slots), more, {}, None, moved
