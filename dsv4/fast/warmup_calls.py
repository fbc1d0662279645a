"""What a model calls, component by component: the widths, dtypes, groups and layouts of its configuration, for `warmup`.

A graph or kernel is made for all of these, and none of them for a number of tokens; so after one call of each nothing compiles, at any
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from dsv4.configs import ModelConfig
from dsv4.fast import attention, compressor, hyper_connections, indexer, kv_cache, norms, quantization, rotary, routing, scales
from dsv4.fast.attention_engines import Sizes, tokens_of_splits
from dsv4.fast.warmup_products import linear_calls, output_calls
from dsv4.formats import INDEX_LAYOUTS, KV_LAYOUTS
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import IndexKeys, IndexQueries, PagedRows

Call = tuple[str, Callable[[], Any]]

LEAST_SELECTED = 256  # entries: fewer have no kernels of their own
MANY_ROWS = 256  # tokens that a boundary takes by another kernel, at least
MANY = 4096  # rows of a store that looks for the last of a slot in another way than those of few


def _widths(config: ModelConfig) -> list[int]:
    """The inputs of a model's quantised products (spec A 0.5, M 3)."""
    of_output = config.o_groups * config.o_lora_rank
    widths = {config.hidden_size, config.q_lora_rank, of_output, config.moe_intermediate_size}
    return sorted(width for width in widths if width % config.activation_group == 0)


def _quantization(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Activations in the layouts that products take, KV rows and index keys as they come back from the cache (spec A 0.5, 3.2, 5.3)."""
    group = config.activation_group
    ours = [("ue8m0", layout) for layout in (("rows", "packed", "128x4") if config.is_v41 else ("rows", "packed"))]
    for width in _widths(config):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        for scale, layout in (*ours, ("fp32", "mn_major")):
            call = partial(_there_and_back, x, group, scale=scale, scale_layout=layout)
            yield f"quantize_fp8, dequantize [{width}] {group} {scale} {layout}", call
    kv = torch.zeros(tokens, config.head_dim, dtype=torch.bfloat16, device=device)
    keys = torch.zeros(tokens, config.index_head_dim, dtype=torch.bfloat16, device=device)
    fake = quantization.fake_quantize
    if config.is_v41:
        yield "fake_quantize KV of the window", partial(fake, kv, 32)
        yield "fake_quantize compressed KV", partial(fake, kv, 16, format="fp4_e4m3")
    else:
        yield "fake_quantize KV", partial(fake, kv[:, : config.head_dim - config.qk_rope_head_dim], 64)
    yield "fake_quantize index keys", partial(fake, keys, 32, format="mxfp4")


def _scales(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Scales of activations, laid out again between producer and consumer (spec A 8; M 10 rows 10 to 13)."""
    for width in _widths(config):
        groups = width // config.activation_group
        rows = torch.zeros(tokens, groups, dtype=torch.uint8, device=device)
        live = torch.tensor(tokens, device=device)
        yield f"packed [{groups}]", partial(_as_packed, rows, live)
        yield f"align_mn_major [{groups}]", partial(scales.align_mn_major, rows.to(torch.float32))
        if config.is_v41:
            yield f"128x4 [{groups}]", partial(_as_tiles, rows, live)


def _there_and_back(x: Tensor, group: int, **options: str) -> None:
    codes, grid = quantization.quantize_fp8(x, group, **options)
    quantization.dequantize(codes, grid, group, scale_layout=options["scale_layout"])


def _as_packed(rows: Tensor, live: Tensor) -> None:
    packed = scales.pack_ue8m0(rows)
    scales.unpack_ue8m0(packed, rows.shape[1])
    scales.restride_rows(packed, len(rows) + 1)
    _padded(packed, live, "packed")


def _as_tiles(rows: Tensor, live: Tensor) -> None:
    tiles = scales.swizzle_128x4(rows)
    scales.unswizzle_128x4(tiles, *rows.shape)
    scales.packed_to_128x4(scales.packed_from_128x4(tiles, len(rows)))
    _padded(tiles, live, "128x4")


def _padded(grid: Tensor, live: Tensor, layout: str) -> None:
    for count in (live, int(live)):
        scales.zero_pad_rows(grid, count, scale_layout=layout)
        scales.zero_pad_rows(grid, count, scale_layout=layout, out=grid)


def _routing(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Router of the layers of each kind: by score, by token id (V4's first), with image rows (V4.1); and of the draft's experts."""
    kinds = {(config.n_routed_experts, config.num_experts_per_tok)}
    if config.dspark is not None:
        kinds.add((config.dspark.n_routed_experts, config.dspark.num_experts_per_tok))
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    for experts, k in sorted(kinds):
        route = partial(routing.route, torch.zeros(tokens, experts, device=device), k, scale=config.routed_scaling_factor)
        bias = torch.zeros(experts, device=device)
        weight = torch.zeros(experts, config.hidden_size, dtype=torch.bfloat16, device=device)
        yield f"gate_logits {experts} experts", partial(routing.gate_logits, x, weight)
        yield f"route {experts} experts, {k} each", partial(route, bias=bias)
        if config.vision is not None and experts == config.n_routed_experts:
            images = {"image_bias": bias, "token_ids": ids, "image_token_id": config.vision.image_token_id}
            yield f"route {experts} experts with images", partial(route, bias=bias, **images)
        if config.num_hash_layers and experts == config.n_routed_experts:
            table = torch.zeros(config.vocab_size, k, dtype=torch.int64, device=device)
            yield f"route {experts} experts by token", partial(route, token_ids=ids, table=table)


def _norms(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Norms of hidden states, low-rank queries, keys and index keys; V4's query heads and the transform of its index heads."""
    for width in sorted({config.hidden_size, config.q_lora_rank, config.head_dim, config.index_head_dim}):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        yield f"rms_norm [{width}]", partial(norms.rms_norm, x, x[0], eps=config.rms_norm_eps)
    if config.q_head_norm:
        heads = torch.zeros(tokens, config.num_attention_heads, config.head_dim, dtype=torch.bfloat16, device=device)
        yield f"head_rms_norm [{config.head_dim}]", partial(norms.head_rms_norm, heads, eps=config.rms_norm_eps)
    if config.index_hadamard:
        heads = torch.zeros(tokens, config.index_n_heads, config.index_head_dim, dtype=torch.bfloat16, device=device)
        yield f"hadamard [{config.index_head_dim}]", partial(norms.hadamard, heads)


def _rotary(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Queries with their norm (V4), the output's way back, keys, index queries and keys."""
    table = rope_table(rope_frequencies(config.rope_theta, config.qk_rope_head_dim, device=device), tokens)
    positions = torch.arange(tokens, device=device)
    rope, eps = partial(rotary.apply_rope, table=table, positions=positions), config.rms_norm_eps
    of_queries, of_keys = (config.num_attention_heads, config.head_dim), (config.head_dim,)
    for shape in (of_queries, of_keys, (config.index_n_heads, config.index_head_dim), (config.index_head_dim,)):
        yield f"apply_rope {list(shape)}", partial(rope, torch.zeros(tokens, *shape, dtype=torch.bfloat16, device=device))
    q = torch.zeros(tokens, *of_queries, dtype=torch.bfloat16, device=device)
    yield f"apply_rope back {list(of_queries)}", partial(rope, q, inverse=True)
    if config.q_head_norm:
        yield f"norm_rope {list(of_queries)}", partial(rotary.norm_rope, q, table, positions, eps=eps)
    kv = torch.zeros(tokens, *of_keys, dtype=torch.bfloat16, device=device)
    yield f"norm_rope {list(of_keys)}", partial(rotary.norm_rope, kv, table, positions, eps=eps, weight=kv[0])


def _hyper_connections(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Boundaries as the model wires them, the single steps, and V4's last collapse (spec A 1.5, 1.6)."""
    streams, hidden, eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
    mixes = streams * (2 + streams)
    more: dict[str, Any] = {"iterations": config.hc_sinkhorn_iters, "eps": config.hc_eps}
    most = max(tokens, MANY_ROWS) if device.type == "cuda" else tokens
    x = torch.zeros(most, streams, hidden, dtype=torch.bfloat16, device=device)
    fn, base = torch.zeros(mixes, streams * hidden, device=device), torch.zeros(mixes, device=device)
    scale, pre = torch.ones(3, device=device), hyper_connections.identity_pre(most, streams, device=device)
    comb, weight = torch.zeros(most, streams, streams, device=device), torch.ones(hidden, dtype=torch.bfloat16, device=device)
    given, shape = torch.zeros(most, mixes, device=device), f"[{streams}, {hidden}]"
    yield f"mix_statistics {shape}", partial(hyper_connections.mix_statistics, x, fn, eps=eps)
    yield f"split_mix {streams} streams", partial(hyper_connections.split_mix, given, scale, base, **more)
    yield f"collapse {shape}", partial(hyper_connections.collapse, x, pre)
    yield f"expand {shape}", partial(hyper_connections.expand, x[:, 0], x, pre, comb)
    if not config.hc_pre_from_prev_sublayer:
        head = fn[:streams], scale[:1], base[:streams]
        yield f"head_collapse {shape}", partial(hyper_connections.head_collapse, x, *head, norm_eps=eps, eps=config.hc_eps)
    for count in sorted({tokens, most}):
        some = x[:count, 0], x[:count], pre[:count], comb[:count], fn, scale, base, weight
        between = partial(hyper_connections.boundary, *some, norm_eps=eps, rms_eps=eps, **more)
        between = partial(between, carried_pre=pre[:count] if config.hc_pre_from_prev_sublayer else None)
        yield f"boundary {shape}, {count}", between
        for layout in ("packed", "128x4") if config.activation_group == 32 else ():
            yield f"boundary {shape} mxfp8 {layout}, {count}", partial(between, output="mxfp8", scale_layout=layout)


def _kv_cache(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Rows into the caches of the window and of each ratio, with and without norm and rotation, and back (spec A 3.2 to 3.5)."""
    counts = (tokens, MANY) if device.type == "cuda" else (tokens,)
    kv, weight = (torch.zeros(*shape, config.head_dim, dtype=torch.bfloat16, device=device) for shape in ((max(counts),), ()))
    numbers = torch.arange(max(counts), device=device)  # those behind the last slot and the table are absent
    table = rope_table(rope_frequencies(config.rope_theta, config.qk_rope_head_dim, device=device), tokens)
    sizes = sorted({256} | {256 // ratio for ratio in config.compress_ratios if ratio})
    for layout in ("v41", "v41_fp4", "v41_inline", "v41_fp4_inline") if config.is_v41 else ("v4",):
        for size in sizes:
            pages = torch.zeros(-(-tokens // size), KV_LAYOUTS[layout].page_bytes(size), dtype=torch.uint8, device=device)
            at: dict[str, Any] = {"layout": layout, "page_size": size}
            for count in counts:
                rows, slots = kv[:count], numbers[:count]
                yield f"store_kv {layout}, pages of {size}, {count} rows", partial(kv_cache.store_kv, rows, pages, slots, **at)
                fused = partial(kv_cache.norm_rope_store_kv, rows, weight, table, slots, pages, slots)
                yield f"norm_rope_store_kv {layout}, pages of {size}, {count} rows", partial(fused, eps=config.rms_norm_eps, **at)
            yield f"load_kv {layout}, pages of {size}", partial(kv_cache.load_kv, pages, numbers[:tokens], **at)
    blocks, requests = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
    for size in sizes:
        yield f"page_slots, pages of {size}", partial(kv_cache.page_slots, blocks, requests, numbers[:tokens], page_size=size)


def _compressor(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Projections, entries, and their way into the cache, for each ratio and V4's index compressor (spec A 4).

    At least as many tokens as an entry has: what pools it is compiled at the first one.
    """
    ratios = sorted({ratio for ratio in config.compress_ratios if ratio})
    tokens = max(tokens, *ratios)
    x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    table = rope_table(rope_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, device=device), tokens)
    starts, offsets = torch.zeros(1, dtype=torch.int64, device=device), torch.tensor([0, tokens], dtype=torch.int32, device=device)
    for ratio in ratios:
        overlap = ratio == 4 and not config.is_v41
        slots = torch.arange(min(tokens, tokens // ratio + 1), device=device)
        yield f"compression_plan {ratio}", partial(compressor.compression_plan, starts, offsets, ratio=ratio, tokens=tokens)
        for dim in (config.head_dim, config.index_head_dim) if overlap else (config.head_dim,):
            width = 2 * dim if overlap else dim
            weight = torch.zeros(width, config.hidden_size, dtype=torch.bfloat16, device=device)
            bias = None if config.is_v41 else torch.zeros(ratio, width, device=device)
            state = compressor.compressor_state(1, dim, ratio=ratio, overlap=overlap, device=device)
            rows = torch.zeros(tokens, width, device=device)
            given: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "ape": bias}
            yield f"project [{width}]", partial(compressor.project, x, weight, weight)
            for states in (None, torch.zeros(1, dtype=torch.int32, device=device)):  # whether a server names them
                named: dict[str, Any] = {**given, "state_rows": states}
                label = f"{ratio} [{dim}]" if states is None else f"{ratio} [{dim}], states named"
                yield f"compress {label}", partial(compressor.compress, rows, rows, state, starts, offsets, **named)
                for layout in () if dim != config.head_dim else ("v41_fp4", "v41_fp4_inline") if config.is_v41 else ("v4",):
                    size = 256 // ratio
                    pages = torch.zeros(-(-tokens // size), KV_LAYOUTS[layout].page_bytes(size), dtype=torch.uint8, device=device)
                    at: dict[str, Any] = {**named, "eps": config.rms_norm_eps, "layout": layout, "page_size": size}
                    whole = partial(compressor.compress_and_store, rows, rows, state, starts, offsets, x[0, :dim], table, pages, slots)
                    yield f"compress_and_store {label} {layout}", partial(whole, **at)


def _index_ratios(config: ModelConfig) -> list[int]:
    """Tokens of the entries that have an indexer."""
    return sorted({config.compress_ratios[layer] for layer in config.index_source_layer_ids})


def _index_pages(config: ModelConfig) -> list[int]:
    """Entries in a page of their caches: those of 256 tokens."""
    return [256 // ratio for ratio in _index_ratios(config)]


def _indexer(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """What tokens see of each ratio; codes, pages, logits and picks in both formats; and selections (spec A 5)."""
    positions = torch.arange(tokens, device=device)
    for ratio in sorted(set(config.compress_ratios) - {0}):
        yield f"visible_entries {ratio}", partial(indexer.visible_entries, positions, ratio=ratio)
    table = rope_table(rope_frequencies(config.compress_rope_theta, config.qk_rope_head_dim, device=device), tokens)
    q = torch.zeros(tokens, config.index_n_heads, config.index_head_dim, dtype=torch.bfloat16, device=device)
    x, weights = q[:, 0].contiguous(), q[..., 0].contiguous()
    norm: dict[str, Any] = {"weight": torch.zeros_like(x[0]), "eps": config.rms_norm_eps}
    for format in INDEX_LAYOUTS:
        options: dict[str, Any] = {"format": format, "hadamard": config.index_hadamard}
        codes = partial(indexer.index_queries, q, weights, table, positions, **options)
        yield f"index_keys {format}", partial(indexer.index_keys, x, table, positions, **norm, **options)
        for dtype in (torch.float32, torch.bfloat16) if format == "fp4" else (torch.float32,):
            name = "fp32" if dtype == torch.float32 else "bf16"
            yield f"index_queries {format}, weights {name}", partial(codes, weight_dtype=name)
            yield from _index_scores(config, format, f"{format}, weights {name}", weights.to(dtype), device)
        yield from _index_cache(config, format, tokens, device)
    yield from _selections(config, device)


def _index_codes(config: ModelConfig, format: str, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of queries or keys."""
    kind, fp8 = INDEX_LAYOUTS[format], format == "fp8"
    codes = torch.zeros(*shape, kind.data_bytes(config.index_head_dim), dtype=torch.uint8, device=device)
    scales = torch.zeros(shape, dtype=torch.float32 if fp8 else torch.int32, device=device)
    return codes.view(torch.float8_e4m3fn) if fp8 else codes, scales


def _index_scores(config: ModelConfig, format: str, label: str, weights: Tensor, device: torch.device) -> Iterator[Call]:
    """Logits of rows and of pages, and the chains that select as well."""
    (tokens, heads), entries = weights.shape, config.index_topk
    codes, scales = _index_codes(config, format, (tokens, heads), device)
    queries = IndexQueries(codes, None if format == "fp8" else scales, weights)
    keys = IndexKeys(*_index_codes(config, format, (entries,), device))
    ends = torch.full((tokens,), entries, dtype=torch.int32, device=device)
    requests = torch.zeros_like(ends)
    for starts in (None, requests):
        named = label if starts is None else f"{label}, with starts"
        yield f"index_logits {named}", partial(indexer.index_logits, queries, keys, starts=starts, ends=ends)
    for size in _index_pages(config):
        width = size * INDEX_LAYOUTS[format].token_bytes(config.index_head_dim)
        pages = torch.zeros(-(-entries // size), width, dtype=torch.uint8, device=device)
        blocks = torch.arange(len(pages), dtype=torch.int32, device=device)[None]
        paged = partial(indexer.paged_index_logits, queries, pages, blocks, requests, ends, format=format, page_size=size, width=entries)
        yield f"paged_index_logits {label}, pages of {size}", paged
    yield f"select_entries {label}", partial(indexer.select_entries, queries, keys, ends, config.index_topk)
    if config.candidate_block_size is not None and config.candidate_topk_blocks is not None:
        block, count = config.candidate_block_size, config.candidate_topk_blocks
        found = torch.zeros(tokens, min(count, -(-entries // block)), dtype=torch.int32, device=device)
        yield f"select_candidates {label}", partial(indexer.select_candidates, queries, keys, ends, block=block, count=count)
        among = partial(indexer.select_entries, queries, keys, ends, config.index_topk, candidates=found, block=block)
        yield f"select_entries {label}, of candidates", among


def _index_cache(config: ModelConfig, format: str, tokens: int, device: torch.device) -> Iterator[Call]:
    """Keys into pages, few and, on CUDA, many at a time, and out of them."""
    for size in _index_pages(config):
        at: dict[str, Any] = {"format": format, "page_size": size}
        for count in (tokens, MANY) if device.type == "cuda" else (tokens,):
            slots = torch.arange(count, device=device)
            width = size * INDEX_LAYOUTS[format].token_bytes(config.index_head_dim)
            pages = torch.zeros(-(-count // size), width, dtype=torch.uint8, device=device)
            keys = IndexKeys(*_index_codes(config, format, (count,), device))
            yield f"store_index_keys {format}, pages of {size}, {count} keys", partial(indexer.store_index_keys, keys, pages, slots, **at)
        load = partial(indexer.load_index_keys, pages, slots, dim=config.index_head_dim, **at)
        yield f"load_index_keys {format}, pages of {size}", load


def _selections(config: ModelConfig, device: torch.device) -> Iterator[Call]:
    """Picks of one token. On CUDA a kernel is made for a power of two of entries, and above 16384 for one of what their pieces leave."""
    most = config.max_position_embeddings // min(_index_ratios(config)) if device.type == "cuda" else LEAST_SELECTED
    for entries in (2**power for power in range(LEAST_SELECTED.bit_length() - 1, most.bit_length())):
        logits, ends = torch.zeros(1, entries, device=device), torch.full((1,), entries, dtype=torch.int32, device=device)
        picks, first = partial(indexer.select_topk, logits, config.index_topk, ends=ends), torch.zeros_like(ends)
        yield f"select_topk of {entries}, with starts", partial(picks, starts=first, order="index")
        for order in ("index", "score"):
            yield f"select_topk of {entries} by {order}", partial(picks, order=order)
            for size in _index_pages(config):
                table = torch.zeros(1, -(-entries // size), dtype=torch.int32, device=device)
                at: dict[str, Any] = {"block_table": table, "requests": first, "page_size": size}
                yield f"select_topk of {entries} by {order}, slots in pages of {size}", partial(picks, order=order, **at)
        if config.candidate_block_size is not None and config.candidate_topk_blocks is not None:
            block, count = config.candidate_block_size, config.candidate_topk_blocks
            found = torch.zeros(1, min(count, -(-entries // block)), dtype=torch.int32, device=device)
            yield f"candidate_blocks of {entries}", partial(indexer.candidate_blocks, logits, ends, block=block, count=count)
            yield f"restrict_to_blocks of {entries}", partial(indexer.restrict_to_blocks, logits, found, block=block)


def _attention(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Over the window alone and with entries of each ratio, with lengths and without; decode in every number of splits; parts; drafts."""
    heads, picks = config.num_attention_heads, (config.sliding_window, config.index_topk)
    sizes = Sizes(1, heads, config.head_dim, picks, ("", ""), device, 1.0)
    counts = {*tokens_of_splits(sizes), *tokens_of_splits(sizes._replace(picks=picks[:1]))} if device.type == "cuda" else {tokens}
    most = max(*counts, tokens)
    q = torch.zeros(most, heads, config.head_dim, dtype=torch.bfloat16, device=device)
    sink, lengths = torch.zeros(heads, device=device), torch.ones(most, dtype=torch.int32, device=device)
    window, entries = (torch.full((most, width), -1, dtype=torch.int32, device=device) for width in picks)
    yield "window_indices", partial(attention.window_indices, lengths.long(), window=config.sliding_window)
    parts = torch.zeros(2, tokens, heads, config.head_dim, device=device)
    yield "merge_splits", partial(attention.merge_splits, parts, parts[..., 0].contiguous(), sink)

    def rows(layout: str, page_size: int) -> PagedRows:
        return PagedRows(torch.zeros(1, KV_LAYOUTS[layout].page_bytes(page_size), dtype=torch.uint8, device=device), layout, page_size)

    pairs = (("v41", "v41_fp4"), ("v41_inline", "v41_fp4_inline")) if config.is_v41 else (("v4", "v4"),)
    for main, layout in pairs:
        pages = rows(main, 256)
        others = [None, *(rows(layout, 256 // ratio) for ratio in sorted(set(config.compress_ratios) - {0}))]
        for extra, (name, function), with_lengths in product(
            others, (("decode", attention.decode_attention), ("prefill", attention.prefill_attention)), (False, True)
        ):
            for count in sorted(counts) if name == "decode" else (tokens,):
                more: dict[str, Any] = {} if extra is None else {"extra": extra, "extra_slots": entries[:count]}
                if with_lengths:
                    more |= {"lengths": lengths[:count], **({} if extra is None else {"extra_lengths": lengths[:count]})}
                words = [name, main, *((layout, str(extra.page_size)) if extra else ()), *(("with lengths",) if with_lengths else ())]
                yield f"{' '.join(words)}, {count}", partial(function, q[:count], pages, window[:count], sink, **more)
        for mode in ("decode", "prefill"):
            yield f"plan {mode} {main}", partial(_planned, mode, q[:tokens], pages, window[:tokens], sink, others[-1], entries[:tokens])
        if config.dspark is not None:
            block = config.dspark.block_size
            whole = -(-tokens // block) * block
            given = torch.zeros(whole, heads, config.head_dim, dtype=torch.bfloat16, device=device)
            slots = torch.full((whole, config.sliding_window), -1, dtype=torch.int32, device=device)
            yield f"draft {main}", partial(attention.draft_attention, given, given[:, 0], pages, slots, sink, block=block)


def _planned(mode: str, q: Tensor, main: PagedRows, slots: Tensor, sink: Tensor, extra: PagedRows | None, entries: Tensor) -> None:
    """A plan for one call, and the call."""
    more: dict[str, Any] = {}
    if extra is not None:
        more = {"extra_picks": entries.shape[1], "extra_layout": extra.layout, "extra_page_size": extra.page_size}
    given: dict[str, Any] = {"tokens": len(q), "heads": q.shape[1], "picks": slots.shape[1], "dim": q.shape[2], "device": q.device}
    plan = attention.plan_attention(mode, layout=main.layout, page_size=main.page_size, **given, **more)
    plan.run(q, main, slots, sink, extra=extra, extra_slots=None if extra is None else entries)


# Codecs are parts of quantisers, and eplb of the router, for placements that a server chooses: a model calls neither by itself.
CALLS: dict[str, Callable[[ModelConfig, int, torch.device], Iterator[Call]]] = {
    "quantization": _quantization,
    "scales": _scales,
    "routing": _routing,
    "norms": _norms,
    "rotary": _rotary,
    "hyper_connections": _hyper_connections,
    "kv_cache": _kv_cache,
    "compressor": _compressor,
    "indexer": _indexer,
    "attention": _attention,
    "linear": linear_calls,
    "output_projection": output_calls,
}
