"""Quantisers and their inverses, each beside a copy of the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations, library_call
from dsv4.configs import ModelConfig
from dsv4.fast import quantization
from dsv4.fast.adapters import flashinfer

LAYOUTS = (("ue8m0", "rows"), ("ue8m0", "packed"), ("ue8m0", "128x4"), ("fp32", "rows"), ("fp32", "mn_major"))


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Activations in each layout that a product takes and back, KV rows and index keys, and a dense weight's blocks."""
    for preset, config in PRESETS.items():
        x = activations(tokens, config.hidden_size, device)
        label = f"{preset}, {tokens} tokens x {config.hidden_size}"
        yield from _fp8(label, x, config.activation_group)
        yield from _back(label, *quantization.quantize_fp8(x, config.activation_group), config.activation_group)
        yield from _cached_rows(preset, config, tokens, device)
        yield from _fp4(label, x)
        yield _blocks(preset, activations(config.q_lora_rank, config.hidden_size, device), config.weight_block_size)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Every format and layout of one matrix."""
    x, label = activations(rows, columns, device), f"{rows} x {columns}"
    for group in (128, 32):
        yield from _fp8(label, x, group)
    for block in ((128, 128), (32, 32)):
        yield _blocks(label, x, block)
    yield from _fp4(label, x)
    for group, form in ((64, "fp8"), (32, "fp8"), (32, "mxfp4"), (16, "fp4_e4m3")):
        yield Case("quantization.fake_quantize", f"{label}, {group} {form}", (x, group), {"format": form})
    for scale, layout in LAYOUTS:
        yield from _back(label, *quantization.quantize_fp8(x, 128, scale=scale, scale_layout=layout), 128, scale, layout)
    yield from _back(label, *quantization.quantize_mxfp4(x), 32, "mxfp4")
    yield from _back(label, *quantization.quantize_fp4_e4m3(x), 16, "fp4_e4m3")


def _fp8(label: str, x: Tensor, group: int) -> Iterator[Case]:
    for scale, layout in LAYOUTS:
        options = {"scale": scale, "scale_layout": layout}
        yield Case("quantization.quantize_fp8", f"{label}, {group} {scale} {layout}", (x, group), options)
    if group == 32:
        raw = library_call(flashinfer.LIBRARY, flashinfer.MXFP8_QUANTIZE, x.device, lambda function, given: function(given, True))
        options = {"scale_layout": "128x4", "amax_floor": "flashinfer"}
        yield Case("quantization.quantize_fp8", f"{label}, 32 ue8m0 128x4, FlashInfer's floor", (x, group), options, raw)


def _fp4(label: str, x: Tensor) -> Iterator[Case]:
    yield Case("quantization.quantize_mxfp4", f"{label}, 32", (x, 32))
    yield Case("quantization.quantize_fp4_e4m3", f"{label}, 16", (x, 16))


def _blocks(label: str, weight: Tensor, block: tuple[int, int]) -> Case:
    shape = f"{weight.shape[0]} x {weight.shape[1]}"
    named = label if shape in label else f"{label}, {shape}"
    return Case("quantization.quantize_fp8_blocks", f"{named}, blocks of {block[0]} x {block[1]}", (weight, block))


def _back(label: str, codes: Tensor, grid: Tensor, group: int, form: str = "ue8m0", layout: str = "rows") -> Iterator[Case]:
    yield Case("quantization.dequantize", f"{label}, {group} {form} {layout}", (codes, grid, group), {"scale_layout": layout})


def _cached_rows(preset: str, config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Case]:
    window = config.head_dim if config.is_v41 else config.head_dim - config.qk_rope_head_dim
    forms = [("KV", window, 32 if config.is_v41 else 64, "fp8"), ("index keys", config.index_head_dim, 32, "mxfp4")]
    if config.is_v41:
        forms.append(("compressed KV", config.head_dim, 16, "fp4_e4m3"))
    for name, width, group, form in forms:
        label = f"{preset}, {tokens} {name} x {width}, {group} {form}"
        yield Case("quantization.fake_quantize", label, (activations(tokens, width, device), group), {"format": form})
