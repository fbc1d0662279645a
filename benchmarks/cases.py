"""The calls that `dsv4 bench` times: each component at the shapes of the presets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.routing import torch_chain
from benchmarks.suite import Case
from dsv4.configs import V4_FLASH, V4_PRO, V41_FLASH, ModelConfig
from dsv4.fast import codecs, eplb, quantization, scales
from dsv4.fast.adapters import deepgemm, flashinfer
from dsv4.fast.adapters.library import Library

PRESETS = {"V4-Flash": V4_FLASH, "V4-Pro": V4_PRO, "V4.1-Flash": V41_FLASH}


def _activations(tokens: int, width: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, width, device=device).to(torch.bfloat16)


def _raw(library: Library, symbol: str, device: torch.device, run: Callable[[Any, Tensor], Any]) -> dict[str, Callable[[Tensor], Any]]:
    """A library's function as it is, without the adapter, if it has proved itself on the device."""
    unusable = library.missing() or library.lacks(symbol) or library.disproved(symbol, device)
    return {} if unusable else {f"{library.name}.{symbol}": partial(run, library.function(symbol))}


def codec_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Every codec over as many numbers as activations have."""
    for preset, config in PRESETS.items():
        x = _activations(tokens, config.hidden_size, device)
        label = f"{preset}, {tokens} tokens x {config.hidden_size}"
        e4m3, e2m1, e8m0 = codecs.encode_e4m3(x), codecs.encode_e2m1(x), codecs.encode_e8m0(x.abs())
        as_torch = {"torch's cast": lambda codes: codes.to(torch.float32)}
        for name, given in (("encode_e4m3", x), ("encode_e2m1", x), ("encode_e8m0", x), ("decode_e2m1", e2m1), ("pack_fp4", e2m1)):
            yield Case(f"codecs.{name}", label, (given,), raw={"torch's cast": _to_e4m3} if name == "encode_e4m3" else {})
        yield Case("codecs.decode_e4m3", label, (e4m3,), raw=as_torch)
        yield Case("codecs.decode_e5m2", label, (x.to(torch.float8_e5m2),), raw=as_torch)
        yield Case("codecs.decode_e8m0", label, (e8m0,), raw=as_torch)
        yield Case("codecs.unpack_fp4", label, (codecs.pack_fp4(e2m1),))


def _to_e4m3(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn)


def quantizer_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Activations in each layout that a product takes and back, KV rows and index keys, and a dense weight's blocks."""
    for preset, config in PRESETS.items():
        group, width = config.activation_group, config.hidden_size
        x = _activations(tokens, width, device)
        label = f"{preset}, {tokens} tokens x {width}, {group}"
        for scale, layout in (("ue8m0", "rows"), ("ue8m0", "packed"), ("ue8m0", "128x4"), ("fp32", "rows"), ("fp32", "mn_major")):
            options = {"scale": scale, "scale_layout": layout}
            yield Case("quantization.quantize_fp8", f"{label} {scale} {layout}", (x, group), options)
        if config.is_v41:
            raw = _raw(flashinfer.LIBRARY, flashinfer.MXFP8_QUANTIZE, device, lambda function, given: function(given, True))
            options = {"scale_layout": "128x4", "amax_floor": "flashinfer"}
            yield Case("quantization.quantize_fp8", f"{label} ue8m0 128x4 floor of FlashInfer", (x, group), options, raw)
        codes, grid = quantization.quantize_fp8(x, group)
        yield Case("quantization.dequantize", f"{label} fp8", (codes, grid, group))
        yield from _cached_rows(preset, config, tokens, device)
        yield Case("quantization.quantize_mxfp4", f"{preset}, {tokens} tokens x {width}, 32", (x, 32))
        yield Case("quantization.quantize_fp4_e4m3", f"{preset}, {tokens} tokens x {width}, 16", (x, 16))
        weight = _activations(config.q_lora_rank, width, device)
        block = config.weight_block_size
        yield Case("quantization.quantize_fp8_blocks", f"{preset}, {list(weight.shape)} by {block[0]} x {block[1]}", (weight, block))


def _cached_rows(preset: str, config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Case]:
    window = config.head_dim if config.is_v41 else config.head_dim - config.qk_rope_head_dim
    forms = [("KV", window, 32 if config.is_v41 else 64, "fp8"), ("index keys", config.index_head_dim, 32, "mxfp4")]
    if config.is_v41:
        forms.append(("compressed KV", config.head_dim, 16, "fp4_e4m3"))
    for name, width, group, form in forms:
        label = f"{preset}, {tokens} {name} x {width}, {group} {form}"
        yield Case("quantization.fake_quantize", label, (_activations(tokens, width, device), group), {"format": form})


def scale_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Scales of activations in each layout, and of an expert's weights."""
    for preset, config in PRESETS.items():
        groups = config.hidden_size // config.activation_group
        grid = torch.randint(0, 255, (tokens, groups), dtype=torch.uint8, device=device)
        label = f"{preset}, {tokens} tokens x {groups} scales"
        packed, tiles, numbers = scales.pack_ue8m0(grid), scales.swizzle_128x4(grid), torch.rand(tokens, groups, device=device)
        swizzle = _raw(flashinfer.LIBRARY, flashinfer.INTERLEAVE, device, lambda function, given: function(given))
        align = _raw(deepgemm.LIBRARY, deepgemm.ALIGN, device, lambda function, given: function(given))
        yield Case("scales.pack_ue8m0", label, (grid,), raw=_raw_pack(device))
        yield Case("scales.swizzle_128x4", label, (grid,), raw=swizzle)
        yield Case("scales.align_mn_major", label, (numbers,), raw=align)
        yield Case("scales.unpack_ue8m0", label, (packed, groups))
        yield Case("scales.unswizzle_128x4", label, (tiles, tokens, groups))
        yield Case("scales.packed_to_128x4", label, (packed,))
        yield Case("scales.packed_from_128x4", label, (tiles, tokens))
        yield Case("scales.restride_rows", label, (packed, tokens + tokens // 8))
        live = torch.tensor(tokens - tokens // 16, device=device)
        yield Case("scales.zero_pad_rows", f"{label}, packed", (packed, live), {"scale_layout": "packed"})
        yield Case("scales.zero_pad_rows", f"{label}, 128x4", (tiles, live), {"scale_layout": "128x4"})
        if tokens % 128 == 0:
            yield Case("scales.utccp_rows", label, (packed,))
        weight = torch.randint(0, 255, (8, config.moe_intermediate_size, config.hidden_size // 32), dtype=torch.uint8, device=device)
        yield Case("scales.interleave_hopper_fp4", f"{preset}, {list(weight.shape)}", (weight,))


def _raw_pack(device: torch.device) -> dict[str, Callable[[Tensor], Any]]:
    """DeepGEMM's packer reads fp32 numbers, four times the bytes: they are made before it, and are part of its time."""
    return _raw(
        deepgemm.LIBRARY, deepgemm.PACK, device, lambda function, given: function((given.to(torch.int32) << 23).view(torch.float32))
    )


def routing_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The router and its steps."""
    for preset, config in PRESETS.items():
        experts, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
        label = f"{preset}, {tokens} tokens, {k} of {experts}"
        logits, bias = torch.randn(tokens, experts, device=device) * 2, torch.randn(experts, device=device) * 0.1
        x, weight = _activations(tokens, config.hidden_size, device), _activations(experts, config.hidden_size, device)
        ids = torch.randint(0, config.vocab_size, (tokens,), device=device)
        product = {"torch's bf16 product (arithmetic limit)": partial(_product, weight=weight)}
        yield Case("routing.gate_logits", label, (x, weight), raw=product)
        yield Case("routing.route", label, (logits, k), {"scale": scale, "bias": bias}, {"torch's chain": partial(torch_chain, bias=bias)})
        if config.num_hash_layers:
            table = torch.randint(0, experts, (config.vocab_size, k), device=device)
            read = logits.nbytes + ids.nbytes + tokens * k * table.element_size()
            yield Case("routing.route", f"{label} by token", (logits, k), {"scale": scale, "token_ids": ids, "table": table}, read=read)
        scores = torch.rand(tokens, experts, device=device)
        chosen = scores.topk(k, dim=1).indices.to(torch.int32)
        yield Case("routing.gate_scores", label, (logits,))
        yield Case("routing.route_topk", label, (scores, k), {"bias": bias}, {"torch.topk": lambda given, k=k: given.topk(k, dim=1)})
        yield Case("routing.route_weights", label, (scores, chosen), {"scale": scale}, read=2 * chosen.nbytes)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def eplb_cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Logical ids to physical slots, by every algorithm that needs no random numbers."""
    for preset, config in PRESETS.items():
        experts, k = config.n_routed_experts, config.num_experts_per_tok
        placement = eplb.make_placement((torch.arange(experts + 32, device=device) % experts).to(torch.int32), experts)
        ids = torch.randint(0, experts, (tokens, k), dtype=torch.int32, device=device)
        label = f"{preset}, {tokens} tokens x {k}, {experts} experts and 32 replicas"
        yield Case("eplb.map_to_physical", f"{label}, row_modulo", (ids, placement, "row_modulo"), read=3 * ids.nbytes)


CASES: dict[str, Callable[[int, torch.device], Iterator[Case]]] = {
    "codecs": codec_cases,
    "eplb": eplb_cases,
    "quantization": quantizer_cases,
    "routing": routing_cases,
    "scales": scale_cases,
}
