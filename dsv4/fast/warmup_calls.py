"""What a model calls, component by component: the widths, dtypes, groups and layouts of its configuration, for `warmup`.

A graph or kernel is made for all of these, and none of them for a number of tokens; so after one call of each nothing compiles, at any
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.configs import ModelConfig
from dsv4.fast import compressor, hyper_connections, kv_cache, norms, quantization, rotary, routing, scales
from dsv4.formats import KV_LAYOUTS
from dsv4.rope_tables import rope_frequencies, rope_table

Call = tuple[str, Callable[[], Any]]


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
    x = torch.zeros(tokens, streams, hidden, dtype=torch.bfloat16, device=device)
    fn, base = torch.zeros(mixes, streams * hidden, device=device), torch.zeros(mixes, device=device)
    scale, pre = torch.ones(3, device=device), hyper_connections.identity_pre(tokens, streams, device=device)
    comb, weight = torch.zeros(tokens, streams, streams, device=device), torch.ones(hidden, dtype=torch.bfloat16, device=device)
    given, shape = torch.zeros(tokens, mixes, device=device), f"[{streams}, {hidden}]"
    yield f"mix_statistics {shape}", partial(hyper_connections.mix_statistics, x, fn, eps=eps)
    yield f"split_mix {streams} streams", partial(hyper_connections.split_mix, given, scale, base, **more)
    yield f"collapse {shape}", partial(hyper_connections.collapse, x, pre)
    yield f"expand {shape}", partial(hyper_connections.expand, x[:, 0], x, pre, comb)
    if not config.hc_pre_from_prev_sublayer:
        head = fn[:streams], scale[:1], base[:streams]
        yield f"head_collapse {shape}", partial(hyper_connections.head_collapse, x, *head, norm_eps=eps, eps=config.hc_eps)
    between = partial(hyper_connections.boundary, x[:, 0], x, pre, comb, fn, scale, base, weight, norm_eps=eps, rms_eps=eps, **more)
    between = partial(between, carried_pre=pre if config.hc_pre_from_prev_sublayer else None)
    yield f"boundary {shape}", between
    if config.activation_group == 32:
        for layout in ("packed", "128x4"):
            yield f"boundary {shape} mxfp8 {layout}", partial(between, output="mxfp8", scale_layout=layout)


def _kv_cache(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Rows into the caches of the window and of each ratio, with and without norm and rotation, and back (spec A 3.2 to 3.5)."""
    kv, weight = (torch.zeros(*shape, config.head_dim, dtype=torch.bfloat16, device=device) for shape in ((tokens,), ()))
    numbers = torch.arange(tokens, device=device)
    table = rope_table(rope_frequencies(config.rope_theta, config.qk_rope_head_dim, device=device), tokens)
    sizes = sorted({256} | {256 // ratio for ratio in config.compress_ratios if ratio})
    for layout in ("v41", "v41_fp4", "v41_inline", "v41_fp4_inline") if config.is_v41 else ("v4",):
        for size in sizes:
            pages = torch.zeros(-(-tokens // size), KV_LAYOUTS[layout].page_bytes(size), dtype=torch.uint8, device=device)
            at: dict[str, Any] = {"layout": layout, "page_size": size}
            yield f"store_kv {layout}, pages of {size}", partial(kv_cache.store_kv, kv, pages, numbers, **at)
            fused = partial(kv_cache.norm_rope_store_kv, kv, weight, table, numbers, pages, numbers)
            yield f"norm_rope_store_kv {layout}, pages of {size}", partial(fused, eps=config.rms_norm_eps, **at)
            yield f"load_kv {layout}, pages of {size}", partial(kv_cache.load_kv, pages, numbers, **at)
    blocks, requests = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.zeros(tokens, dtype=torch.int32, device=device)
    for size in sizes:
        yield f"page_slots, pages of {size}", partial(kv_cache.page_slots, blocks, requests, numbers, page_size=size)


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
}
