"""Stores into the KV cache and loads from it, each beside a copy of the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import Case, activations
from dsv4.fast import kv_cache
from dsv4.formats import KV_LAYOUTS, KVLayout
from dsv4.rope_tables import rope_frequencies, rope_table

# What the caches of the presets are made of (spec A 3.4, 3.5): window and compressed entries of V4, of V4.1, and inline.
CACHES = {
    "V4-Flash, window": ("v4", 256),
    "V4-Flash, ratio 4": ("v4", 64),
    "V4-Flash, ratio 128": ("v4", 2),
    "V4-Pro, window": ("v4", 256),
    "V4.1-Flash, window": ("v41", 256),
    "V4.1-Flash, compressed": ("v41_fp4", 128),
    "V4.1-Flash, window inline": ("v41_inline", 64),
    "V4.1-Flash, compressed inline": ("v41_fp4_inline", 64),
}
POSITIONS = 65536
READ = 512  # entries that a token reads


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Each cache of the presets: rows of so many tokens as they come and after norm and rotation, into slots in any order, and back."""
    for label, (layout, page_size) in CACHES.items():
        yield from _of_rows(f"{label}, {tokens} tokens", tokens, layout, page_size, device)
    yield from _entries(f"{tokens} tokens x {READ} entries", tokens, tokens * READ, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Every layout with so many tokens in pages of 64 and of 256, and conversions of a cache of them. `columns` does not count."""
    for layout in KV_LAYOUTS:
        for page_size in (64, 256):
            label = f"{rows} tokens, {layout}, pages of {page_size}"
            yield from _of_rows(label, rows, layout, page_size, device)
        yield from _conversions(layout, rows, device)
    yield from _entries(f"{rows} entries", 64, rows, device)


def _of_rows(label: str, tokens: int, layout: str, page_size: int, device: torch.device) -> Iterator[Case]:
    """The cache has room for twice as many tokens; what a store moves is its rows, their slots and their records."""
    chosen, kv = KV_LAYOUTS[layout], activations(tokens, KV_LAYOUTS[layout].dims, device)
    at = {"layout": layout, "page_size": page_size}
    pages = _pages(chosen, 2 * tokens, page_size, device)
    slots = torch.randperm(len(pages) * page_size, device=device)[:tokens]
    records = kv_cache.quantize_kv(kv, layout=layout)
    stored = records.nbytes - pages.nbytes  # the pages count as written, and are not
    yield Case("kv_cache.quantize_kv", label, (kv,), {"layout": layout})
    yield Case("kv_cache.store_kv", label, (kv, pages, slots), at, read=kv.nbytes + slots.nbytes + stored)
    yield Case("kv_cache.store_kv", f"{label}, records", (records, pages, slots), at, read=records.nbytes + slots.nbytes + stored)
    table = rope_table(rope_frequencies(1e4, device=device), POSITIONS)
    positions = torch.randint(0, POSITIONS, (tokens,), device=device)
    weight = torch.rand(chosen.dims, device=device).to(torch.bfloat16)
    rows_read = kv.nbytes + 2 * slots.nbytes + 4 * table.shape[1] * tokens
    fused = (kv, weight, table, positions, pages, slots)
    yield Case("kv_cache.norm_rope_store_kv", label, fused, {"eps": 1e-6, **at}, read=rows_read + stored)
    filled = kv_cache.store_kv(kv, pages.clone(), slots, layout=layout, page_size=page_size)
    yield Case("kv_cache.load_kv", label, (filled, slots), at, read=records.nbytes + slots.nbytes)


def _conversions(layout: str, tokens: int, device: torch.device) -> Iterator[Case]:
    """To pages of 64 from pages of 256, and to and from inline."""
    chosen = KV_LAYOUTS[layout]
    pages = _pages(chosen, tokens, 256, device)
    slots = torch.arange(tokens, device=device)
    kv_cache.store_kv(activations(tokens, chosen.dims, device), pages, slots, layout=layout, page_size=256)
    others = [name for name in (f"{layout}_inline", layout.removesuffix("_inline")) if name in KV_LAYOUTS and name != layout]
    for target, size in ((layout, 64), *((other, 256) for other in others)):
        options = {"source": layout, "target": target, "page_size": 256, "target_page_size": size}
        yield Case("kv_cache.convert_layout", f"{tokens} tokens, {layout} of 256 to {target} of {size}", (pages,), options)


def _entries(label: str, requests: int, rows: int, device: torch.device) -> Iterator[Case]:
    table = torch.randint(0, 4096, (requests, 1024), dtype=torch.int32, device=device)
    request = torch.randint(0, requests, (rows,), dtype=torch.int32, device=device)
    indices = torch.randint(0, 1024 * 64, (rows,), device=device)
    read = request.nbytes + indices.nbytes + 4 * rows
    yield Case("kv_cache.page_slots", label, (table, request, indices), {"page_size": 64}, read=read)


def _pages(layout: KVLayout, slots: int, page_size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(-(-slots // page_size), layout.page_bytes(page_size), dtype=torch.uint8, device=device)
