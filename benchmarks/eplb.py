"""Logical ids to physical slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import PRESETS, Case
from dsv4.fast import eplb
from dsv4.types import Placement

REDUNDANT = 32
K = 6


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The ids of a layer's rows, by each algorithm."""
    for preset, config in PRESETS.items():
        yield from _every(f"{preset}, {tokens} tokens", tokens, config.n_routed_experts, config.num_experts_per_tok, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """The same, of so many tokens and experts."""
    yield from _every(f"{rows} tokens", rows, columns, min(K, columns), device)


def replicated(experts: int, device: torch.device) -> Placement:
    """Every expert once, and the first ones again."""
    return eplb.make_placement((torch.arange(experts + REDUNDANT, device=device) % experts).to(torch.int32), experts)


def _every(label: str, tokens: int, experts: int, k: int, device: torch.device) -> Iterator[Case]:
    placement = replicated(experts, device)
    ids = torch.randint(0, experts, (tokens, k), dtype=torch.int32, device=device)
    most = placement.replicas.shape[1]
    drawn = {
        "static": {},
        "row_modulo": {},
        "row_index": {},
        "dynamic": {"words": torch.randint(0, 2**31 - 1, (tokens, k), dtype=torch.int64, device=device)},
        "probability": {
            "uniforms": torch.rand(tokens, k, device=device),
            "probabilities": torch.full((experts, most), 1 / most, device=device),
        },
    }
    ranked = placement._replace(rank_map=placement.replicas[:, 0].contiguous())
    for algorithm, options in drawn.items():
        named = f"{label} x {k}, {experts} experts and {REDUNDANT} replicas, {algorithm}"
        yield Case("eplb.map_to_physical", named, (ids, ranked, algorithm), options)
