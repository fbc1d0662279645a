"""The indexer: codes, pages, logits of a prefill and of a decode, selection, at the widths of the presets, beside the libraries' own calls.

The limit of a product is what a copy of its operands and logits takes, which no product reaches: its share says how far from memory it is.
A first argument of several tensors rotates as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw, activations, library_call
from benchmarks.harness import nbytes
from dsv4.configs import ModelConfig
from dsv4.fast import indexer
from dsv4.fast.adapters import deepgemm_mqa, flashinfer
from dsv4.formats import INDEX_LAYOUTS
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import IndexKeys, IndexQueries

POSITIONS = 65536
PAGE = 64
ENTRIES = 8192  # that a token sees, where a shape says nothing
BLOCK, COUNT = 8, 2048  # of candidates


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The indexers of the presets, in both formats."""
    for preset, config in PRESETS.items():
        for format in INDEX_LAYOUTS:
            yield from _of_model(f"{preset}, {tokens} tokens, {format}", config, format, tokens, ENTRIES, device)
        yield from _selection(f"{tokens} x {ENTRIES}", tokens, ENTRIES, config.index_topk, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Everything with so many tokens and so many entries."""
    config = PRESETS["V4-Flash"]
    for format in INDEX_LAYOUTS:
        yield from _of_model(f"{rows} tokens, {format}", config, format, rows, columns, device)
    yield from _selection(f"{rows} x {columns}", rows, columns, config.index_topk, device)


def _of_model(label: str, config: ModelConfig, format: str, tokens: int, entries: int, device: torch.device) -> Iterator[Case]:
    heads, dim = config.index_n_heads, config.index_head_dim
    table = rope_table(rope_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, device=device), POSITIONS)
    at = torch.randint(0, POSITIONS, (max(tokens, entries),), device=device)
    q, w = activations(tokens * heads, dim, device).view(tokens, heads, dim), activations(tokens, heads, device)
    options = {"format": format, "hadamard": config.index_hadamard}
    turned = 4 * table.shape[1]  # bytes of a position
    read = nbytes(q, w, at[:tokens]) + turned * tokens
    yield Case("indexer.index_queries", label, (q, w, table, at[:tokens]), options, read=read)
    x, weight = activations(entries, dim, device), torch.ones(dim, device=device).to(torch.bfloat16)
    norm = {"weight": weight, "eps": config.rms_norm_eps}
    read = nbytes(x, at[:entries]) + turned * entries
    yield Case("indexer.index_keys", f"{label}, {entries} entries", (x, table, at[:entries]), {**norm, **options}, read=read)
    queries = indexer.index_queries(q, w, table, at[:tokens], **options)
    keys = indexer.index_keys(x, table, at[:entries], **norm, **options)
    yield from _logits(f"{label} x {entries}", queries, keys, config.index_topk, device)
    yield from _pages(label, queries, keys, format, dim, device)


def _logits(label: str, queries: IndexQueries, keys: IndexKeys, k: int, device: torch.device) -> Iterator[Case]:
    tokens, entries = len(queries.codes), len(keys.codes)
    ends = torch.full((tokens,), entries, dtype=torch.int32, device=device)
    read = _bytes(queries) + _bytes(keys) + ends.nbytes
    raw: Raw = {}
    if queries.scales is None:
        raw = library_call(
            deepgemm_mqa.LIBRARY, deepgemm_mqa.MQA, device, _raw_logits(queries.weights, keys, ends), "DeepGEMM's own logits"
        )
    yield Case("indexer.index_logits", label, (queries, keys), {"ends": ends}, raw=raw, read=read)
    yield Case("indexer.select_entries", label, (queries, keys, ends, k), read=read)
    yield Case("indexer.select_candidates", label, (queries, keys, ends), {"block": BLOCK, "count": COUNT}, read=read)


def _raw_logits(weights: Tensor, keys: IndexKeys, ends: Tensor) -> Callable[[Any, Any], Any]:
    """A call of the function that the library has, without anything around it."""
    starts = torch.zeros_like(ends)

    def run(function: Any, queries: IndexQueries) -> Any:
        codes = queries.codes.view(torch.float8_e4m3fn)
        if not deepgemm_mqa.keeps_columns():
            return function((codes, None), tuple(keys), weights, starts, ends, len(keys.codes))
        return deepgemm_mqa.LIBRARY.function(deepgemm_mqa.MQA_FULL)(codes, tuple(keys), weights, starts, ends)

    return run


def _pages(label: str, queries: IndexQueries, keys: IndexKeys, format: str, dim: int, device: torch.device) -> Iterator[Case]:
    """Keys into pages and out of them in any order, and a decode whose tokens are of different requests of the same pages."""
    tokens, entries = len(queries.codes), len(keys.codes)
    pages = torch.zeros(-(-entries // PAGE), PAGE * INDEX_LAYOUTS[format].token_bytes(dim), dtype=torch.uint8, device=device)
    order = torch.randperm(len(pages), device=device)
    slots = (order[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()[:entries]
    at = {"format": format, "page_size": PAGE}
    indexer.store_index_keys(keys, pages, slots, **at)
    many = f"{label}, {entries} entries"
    yield Case("indexer.store_index_keys", many, (keys, pages, slots), at, read=2 * _bytes(keys) + slots.nbytes - pages.nbytes)
    yield Case("indexer.load_index_keys", many, (pages, slots), {**at, "dim": dim}, read=_bytes(keys) + slots.nbytes)
    table = order.to(torch.int32).repeat(tokens, 1)
    requests = torch.arange(tokens, dtype=torch.int32, device=device)
    ends = torch.full_like(requests, entries)
    read = _bytes(queries) + tokens * (_bytes(keys) + 4 * table.shape[1])
    yield Case(
        "indexer.paged_index_logits", f"{label} x {entries}", (queries, pages, table, requests, ends), {**at, "width": entries}, read=read
    )


def _selection(label: str, tokens: int, entries: int, k: int, device: torch.device) -> Iterator[Case]:
    logits = torch.randn(tokens, entries, device=device)
    ends = torch.full((tokens,), entries, dtype=torch.int32, device=device)
    raw = library_call(flashinfer.LIBRARY, flashinfer.TOP_K, device, lambda call, first: flashinfer.top_k(first, ends, None, k))
    raw = {**raw, "torch.topk": lambda first: first.topk(min(k, entries), 1)}
    for order in ("index", "score"):
        yield Case("indexer.select_topk", f"{label}, {k} by {order}", (logits, k), {"ends": ends, "order": order}, raw=raw)
    options = {"block": BLOCK, "count": COUNT}
    yield Case("indexer.candidate_blocks", f"{label}, blocks of {BLOCK}", (logits, ends), options)
    blocks = indexer.candidate_blocks(logits, ends, **options)
    yield Case("indexer.restrict_to_blocks", f"{label}, blocks of {BLOCK}", (logits, blocks), {"block": BLOCK})
    positions = torch.randint(0, POSITIONS, (tokens,), device=device)
    yield Case("indexer.visible_entries", f"{tokens} tokens", (positions,), {"ratio": 4})


def _bytes(parts: IndexQueries | IndexKeys) -> int:
    return nbytes(*(part for part in parts if part is not None))
