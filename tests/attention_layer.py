"""One attention layer of V4 or V4.1, put together from the references: what the golden files and transformers are compared with.

Two forms of one chain: with quantised weights (`NAME.scale` beside `NAME.weight`) rows go through the packed pages of a cache; under
`unquantised` numerics they stay the fp64 rows that they are.
"""

from dataclasses import dataclass, field

import torch

from dsv4.formats import KV_LAYOUTS
from dsv4.reference import attention, compressor, indexer, kv_cache, norms, rotary
from dsv4.reference.numerics import bf16_step, current_numerics
from dsv4.reference.quantization import dequantize, fake_quantize
from dsv4.types import IndexKeys, PagedRows

PAGE = 16


@dataclass(frozen=True)
class Layer:
    """Weights by the published names, and what the configuration says of the layer."""

    weights: dict[str, torch.Tensor]
    table: torch.Tensor  # fp32 [positions, rotated]
    ratio: int
    heads: int
    groups: int  # of the output projection
    window: int
    picks: int = 0  # entries that the indexer chooses; 0: all visible ones
    eps: float = 1e-6
    block: int = 128  # of quantised weights and activations
    version: str = "v4"
    chain: str = "bf16_chain"  # the norm of the query heads (V4)
    layouts: tuple[str, str] = ("v4", "v4")  # of the window and of the entries

    def product(self, name, x):
        """A linear layer: quantised where it has scales."""
        weight, scale = self.weights[f"{name}.weight"], self.weights.get(f"{name}.scale")
        if scale is not None:
            x = fake_quantize(x, self.block)
            weight = dequantize(weight, scale, (self.block, self.block))
        return bf16_step(lambda x, w: x @ w.T + 0.0, x, weight)

    def index_heads(self):
        return self.weights["indexer.weights_proj.weight"].shape[0]


@dataclass
class State:
    """What a request has left behind."""

    layer: Layer
    capacity: int = 512
    seen: int = 0
    rows: dict[str, torch.Tensor] = field(default_factory=dict)  # pages, or fp64 rows
    rings: dict[str, torch.Tensor] = field(default_factory=dict)
    keys: IndexKeys | None = None

    def add(self, name, layout, kv, first):
        """Rows from `first` on; what `attention` takes."""
        if current_numerics() != "stated":
            self.rows[name] = torch.cat([self.rows[name], kv]) if name in self.rows else kv
            return self.rows[name]
        if name not in self.rows:
            pages = -(-self.capacity // PAGE)
            self.rows[name] = torch.full((pages, KV_LAYOUTS[layout].page_bytes(PAGE)), 255, dtype=torch.uint8)
        slots = torch.arange(first, first + len(kv))
        self.rows[name] = kv_cache.store_kv(kv, self.rows[name], slots, layout=layout, page_size=PAGE)
        return PagedRows(self.rows[name], layout, PAGE)

    def pool(self, name, values, scores, dim, ape):
        """Entries that these tokens complete."""
        overlap = self.layer.version == "v4" and self.layer.ratio == 4
        if name not in self.rings:
            self.rings[name] = compressor.compressor_state(1, dim, ratio=self.layer.ratio, overlap=overlap)
        ends = torch.tensor([0, len(values)], dtype=torch.int32)
        result = compressor.compress(
            values, scores, self.rings[name], torch.tensor([self.seen]), ends, ratio=self.layer.ratio, overlap=overlap, ape=ape
        )
        self.rings[name] = result.state
        return result.pooled[result.requests >= 0]


def run(layer, x, state):
    """The layer on the next tokens of a request: x [tokens, hidden], normalised. Every stage by its name."""
    stages = {}
    positions = torch.arange(state.seen, state.seen + len(x))
    low = layer.product("wq_a", x)
    qr = norms.rms_norm(low, layer.weights["q_norm.weight"], eps=layer.eps)
    q = layer.product("wq_b", qr).unflatten(1, (layer.heads, -1))
    normed = norms.head_rms_norm(q, eps=layer.eps, precision=layer.chain) if layer.version == "v4" else q
    stages |= {"qa": low, "qr": qr, "qb": q, "q_normed": normed, "q": rotary.apply_rope(normed, layer.table, positions)}
    kv = layer.product("wkv", x)
    kv_normed = norms.rms_norm(kv, layer.weights["kv_norm.weight"], eps=layer.eps)
    stages |= {"kv": kv, "kv_normed": kv_normed, "window_kv": rotary.apply_rope(kv_normed, layer.table, positions)}
    main = state.add("window", layer.layouts[0], stages["window_kv"], state.seen)
    window = attention.window_indices(positions, window=layer.window)
    extra, picks = _entries(layer, x, qr, positions, state, stages) if layer.ratio else (None, None)
    state.seen += len(x)
    sink = layer.weights["attn_sink"]
    if isinstance(main, PagedRows):
        result = attention.paged_attention(stages["q"], main, window, sink, extra=extra, extra_slots=picks)
    else:
        result = attention.sparse_attention(stages["q"], main, window, sink, extra_kv=extra, extra_indices=picks)
    stages |= {"o_rot": result.output, "lse": result.lse, "rows": main, "entries": extra, "window": window, "picks": picks}
    return stages | output(layer, result.output, positions)


def output(layer, o_rot, positions):
    """From the attention's output to the layer's."""
    o = rotary.apply_rope(o_rot, layer.table, positions, inverse=True)
    grouped = o.flatten(1).unflatten(1, (layer.groups, -1))  # [tokens, groups, E]
    weight, scale = layer.weights["wo_a.weight"], layer.weights.get("wo_a.scale")
    if scale is not None:
        weight = dequantize(weight, scale, (layer.block, layer.block))
    weight = weight.unflatten(0, (layer.groups, -1))
    z = bf16_step(lambda o, w: torch.einsum("tge,gre->tgr", o, w) + 0.0, grouped, weight).flatten(1)
    return {"o": o, "wo_a_out": z, "out": layer.product("wo_b", z)}


def _entries(layer, x, qr, positions, state, stages):
    """Compressed rows of the request so far, and each token's picks among them."""
    weights, before = layer.weights, state.seen // layer.ratio
    gate = weights.get("compressor.wgate.weight", weights["compressor.wkv.weight"])
    values, scores = compressor.project(x, weights["compressor.wkv.weight"], gate)
    stages |= {"values": values, "scores": scores}
    stages["pooled"] = state.pool("main", values, scores, len(weights["compressor.norm.weight"]), weights.get("compressor.ape"))
    latents = norms.rms_norm(stages["pooled"], weights["compressor.norm.weight"], eps=layer.eps)
    first = (torch.arange(len(latents)) + before) * layer.ratio
    stages |= {"latent": latents, "compressed_kv": rotary.apply_rope(latents, layer.table, first)}
    extra = state.add("entries", layer.layouts[1], stages["compressed_kv"], before)
    visible = indexer.visible_entries(positions, ratio=layer.ratio)
    total = (state.seen + len(x)) // layer.ratio
    if not layer.picks:
        every = torch.arange(max(total, 1), dtype=torch.int32)
        return extra, torch.where(every < visible[:, None], every, -1)
    _index(layer, x, qr, latents, first, positions, state, stages)
    precision = "bf16" if current_numerics() == "stated" else "fp32"
    stages["index_logits"] = indexer.index_logits(stages["index_queries"], state.keys, ends=visible, precision=precision)
    return extra, indexer.select_entries(stages["index_queries"], state.keys, visible, layer.picks, precision=precision)


def _index(layer, x, qr, latents, first, positions, state, stages):
    """Index queries of these tokens, and the keys of all entries."""
    weights, old = layer.weights, layer.version == "v4"
    quantised = current_numerics() == "stated"
    if old:
        parts = (weights[f"indexer.compressor.{name}.weight"] for name in ("wkv", "wgate"))
        values, scores = compressor.project(x, *parts)
        norm = weights["indexer.compressor.norm.weight"]
        rows = state.pool("index", values, scores, len(norm), weights["indexer.compressor.ape"])
        stages |= {"index_values": values, "index_scores": scores, "index_pooled": rows}
    else:
        rows, norm = layer.product("indexer.wk", latents), weights["indexer.k_norm.weight"]
    keys = indexer.index_keys(rows, layer.table, first, weight=norm, eps=layer.eps, hadamard=old and quantised)
    state.keys = keys if state.keys is None else IndexKeys(*(torch.cat(parts) for parts in zip(state.keys, keys, strict=True)))
    stages["index_q"] = layer.product("indexer.wq_b", qr).unflatten(1, (layer.index_heads(), -1))
    stages["index_weights"] = layer.product("indexer.weights_proj", x)
    stages["index_queries"] = indexer.index_queries(
        stages["index_q"], stages["index_weights"], layer.table, positions, hadamard=old and quantised,
        weight_dtype="bf16" if quantised else "fp32",
    )  # fmt: skip
