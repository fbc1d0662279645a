"""Norms and the Hadamard transform at the widths of the presets, beside torch's and FlashInfer's; the limit is a copy of the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations, library_call
from dsv4.configs import ModelConfig
from dsv4.fast.adapters import flashinfer


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Every row that a model normalises: hidden states, low-rank queries, keys; V4's query heads and index heads."""
    for preset, config in PRESETS.items():
        for width in sorted({config.hidden_size, config.q_lora_rank, config.head_dim, config.index_head_dim}):
            yield _norm(f"{preset}, {tokens} tokens, {width} wide", tokens, width, config.rms_norm_eps, device)
        if not config.is_v41:
            yield from _of_heads(f"{preset}, {tokens} tokens", tokens, config, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Rows of so many numbers; the transform takes the largest power of two that fits."""
    label = f"{rows} rows of {columns}"
    yield _norm(label, rows, columns, 1e-6, device)
    yield _norm(label, rows, columns, 1e-6, device, torch.float32)
    x = activations(rows, columns, device)
    for precision in ("fp32", "bf16_chain"):
        yield Case("norms.head_rms_norm", f"{label}, {precision}", (x,), {"eps": 1e-6, "precision": precision})
    power = min(1 << (columns.bit_length() - 1), 4096)
    for dtype in (torch.bfloat16, torch.float32):
        numbers = activations(rows, power, device).to(dtype)
        yield Case("norms.hadamard", f"{rows} rows of {power}, {str(dtype).removeprefix('torch.')}", (numbers,))


def _norm(label: str, rows: int, width: int, eps: float, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Case:
    weight = (1 + torch.randn(width, device=device) / 4).to(dtype)
    raw = {"torch's rms_norm": lambda given: torch.nn.functional.rms_norm(given, (width,), weight.to(given.dtype), eps)}
    if dtype == torch.bfloat16:
        run = lambda function, given: function(given, weight, eps)  # noqa: E731
        raw |= library_call(flashinfer.LIBRARY, flashinfer.RMSNORM, device, run)
    name = str(dtype).removeprefix("torch.")
    return Case("norms.rms_norm", f"{label}, weight {name}", (activations(rows, width, device), weight), {"eps": eps}, raw)


def _of_heads(label: str, tokens: int, config: ModelConfig, device: torch.device) -> Iterator[Case]:
    heads = config.num_attention_heads
    q = _heads(tokens, heads, config.head_dim, device)
    for precision in ("fp32", "bf16_chain"):
        options = {"eps": config.rms_norm_eps, "precision": precision}
        yield Case("norms.head_rms_norm", f"{label}, {heads} heads of {config.head_dim}, {precision}", (q,), options)
    index = config.index_n_heads, config.index_head_dim
    yield Case("norms.hadamard", f"{label}, {index[0]} index heads of {index[1]}", (_heads(tokens, *index, device),))


def _heads(tokens: int, heads: int, dim: int, device: torch.device) -> Tensor:
    return activations(tokens, heads * dim, device).view(tokens, heads, dim)
