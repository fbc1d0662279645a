"""The router: the fused step from logits beside an empty kernel, torch's chain and FlashInfer, and its single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations, library_call
from benchmarks.eplb import K, replicated
from dsv4.configs import V41_FLASH
from dsv4.fast import routing
from dsv4.fast.adapters import flashinfer

IMAGE, TEXT = V41_FLASH.vision.image_token_id, 7  # token ids
WIDTH = 4096  # of the hidden state, where a shape has tokens and experts alone
RANKS, RANK = 8, 3


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """A layer of each preset: the whole step as it is served, and the steps one by one."""
    for preset, config in PRESETS.items():
        experts, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
        label = f"{preset}, {tokens} tokens, {k} of {experts}"
        yield from _whole(label, _logits(tokens, experts, device), k, scale, images=config.vision is not None)
        if config.num_hash_layers:
            yield _by_token(label, _logits(tokens, experts, device), k, scale)
        yield from _steps(label, tokens, config.hidden_size, experts, k, scale, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens and experts, with all that any preset asks."""
    k, scale = min(K, columns), V41_FLASH.routed_scaling_factor
    label = f"{rows} tokens, {k} of {columns}"
    yield from _whole(label, _logits(rows, columns, device), k, scale, images=True)
    yield _by_token(label, _logits(rows, columns, device), k, scale)
    yield from _steps(label, rows, WIDTH, columns, k, scale, device)


def _logits(tokens: int, experts: int, device: torch.device) -> Tensor:
    return torch.randn(tokens, experts, device=device) * 2


def _bias(experts: int, device: torch.device) -> Tensor:
    return torch.randn(experts, device=device) * 0.1


def _whole(label: str, logits: Tensor, k: int, scale: float, *, images: bool) -> Iterator[Case]:
    """Plain, all that serving asks, and all logits equal: no row is then decided by the kernel's filter, which is its worst case."""
    device, limit = logits.device, _least(logits.device)
    bias = _bias(logits.shape[1], device)
    chain = {"torch's chain": partial(_chain, k=k, scale=scale, bias=bias)}
    yield Case("routing.route", f"{label}, plain", (logits, k), {"scale": scale, "bias": bias}, chain, limit)
    serving = {"scale": scale, "bias": bias, **_serving(*logits.shape, device, images=images)}
    yield Case("routing.route", f"{label}, all that serving asks", (logits, k), serving, limit=limit)
    equal = torch.zeros_like(logits)
    yield Case("routing.route", f"{label}, all logits equal", (equal, k), {"scale": scale}, limit=limit)


def _serving(tokens: int, experts: int, device: torch.device, *, images: bool) -> dict[str, Any]:
    """What a rank passes: replicas, a shared slot of its own, padding, counters, and image rows by token id."""
    placement = replicated(experts, device)
    options = {
        "placement": placement,
        "algorithm": "row_modulo",
        "shared": 1,
        "shared_slots": "home_rank",
        "ranks": RANKS,
        "rank": RANK,
        "live_rows": torch.tensor(tokens - tokens // 16, device=device),
        "counts": torch.zeros(len(placement.physical_to_logical), dtype=torch.int32, device=device),
    }
    if images:
        ids = torch.where(torch.rand(tokens, device=device) < 0.3, IMAGE, TEXT)
        options |= {"image_bias": _bias(experts, device), "token_ids": ids, "image_token_id": IMAGE}
    return options


def _by_token(label: str, logits: Tensor, k: int, scale: float) -> Case:
    """Beside FlashInfer's, which gives weights without the scale."""
    (tokens, experts), device, vocabulary = logits.shape, logits.device, V41_FLASH.vocab_size
    table = torch.randint(0, experts, (vocabulary, k), dtype=torch.int32, device=device)
    ids = torch.randint(0, vocabulary, (tokens,), device=device)
    raw = library_call(flashinfer.LIBRARY, flashinfer.HASH_TOPK, device, lambda _, given: flashinfer.hash_topk(given, ids, table))
    options = {"scale": scale, "token_ids": ids, "table": table}
    read = ids.nbytes + tokens * k * (table.element_size() + logits.element_size())
    return Case("routing.route", f"{label}, by token", (logits, k), options, raw, _least(device), read)


def _steps(label: str, tokens: int, width: int, experts: int, k: int, scale: float, device: torch.device) -> Iterator[Case]:
    x, weight, bias = activations(tokens, width, device), activations(experts, width, device), _bias(experts, device)
    product = {"torch's bf16 product (arithmetic limit)": lambda given: given @ weight.T}
    yield Case("routing.gate_logits", f"{label}, {width} wide", (x, weight), raw=product)
    scores = routing.gate_scores(_logits(tokens, experts, device))
    ids = routing.route_topk(scores, k)
    weights = routing.route_weights(scores, ids, scale=scale)
    yield Case("routing.gate_scores", label, (_logits(tokens, experts, device),))
    yield Case("routing.route_topk", label, (scores, k), {"bias": bias}, {"torch.topk": lambda given: given.topk(k, dim=1)})
    yield Case("routing.route_weights", label, (scores, ids), {"scale": scale}, read=2 * ids.nbytes)
    token_ids = torch.randint(0, 64, (tokens,), device=device)
    table = torch.randint(0, experts, (64, k), dtype=torch.int32, device=device)
    yield Case("routing.route_hash", label, (scores, token_ids, table), read=token_ids.nbytes + ids.nbytes)
    yield Case("routing.append_shared_slots", label, (ids, weights, 1), {"experts": experts})
    yield Case("routing.remap_home_rank_slots", label, (ids, weights, 1), {"experts": experts, "ranks": RANKS, "rank": RANK})
    yield Case("routing.mask_padding", label, (ids, weights, torch.tensor(tokens - tokens // 16, device=device)))
    yield Case("routing.pack_topk", label, (ids, weights))
    yield Case("routing.count_experts", label, (ids, torch.zeros(experts, dtype=torch.int32, device=device)))


def _chain(logits: Tensor, k: int, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, choice and weights, operator by operator in fp32."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).topk(k, dim=1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(1, keepdim=True) * scale


def _least(device: torch.device) -> tuple[str, Callable[[Tensor], Any]] | None:
    """A launch that does nothing: what no kernel of one step can be faster than."""
    return ("an empty kernel", _empty_kernel()) if device.type == "cuda" else None


@cache
def _empty_kernel() -> Callable[[Tensor], Any]:
    import triton

    @triton.jit
    def nothing(x_ptr):
        pass

    return lambda given: nothing[(1,)](given, num_warps=1)
