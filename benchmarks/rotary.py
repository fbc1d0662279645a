"""Rotations at the shapes of the presets, alone and after the norm; the limit is a copy of the bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations
from dsv4.fast.rotary import rope_frequencies, rope_table

PLACES = 4096  # of a table
DIMS = 64


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Query heads with their norm (V4) or without (V4.1), keys with theirs, index heads, and the output's heads back."""
    for preset, config in PRESETS.items():
        eps, heads, dim = config.rms_norm_eps, config.num_attention_heads, config.head_dim
        label = f"{preset}, {tokens} tokens"
        rest = _rest(tokens, config.qk_rope_head_dim, device)
        q = activations(tokens, heads * dim, device).view(tokens, heads, dim)
        if config.is_v41:
            yield Case("rotary.apply_rope", f"{label}, {heads} heads of {dim}", (q, *rest), read=_read(q, rest))
        else:
            yield Case("rotary.norm_rope", f"{label}, {heads} heads of {dim}", (q, *rest), {"eps": eps}, read=_read(q, rest))
        yield Case("rotary.apply_rope", f"{label}, {heads} heads of {dim}, back", (q, *rest), {"inverse": True}, read=_read(q, rest))
        index = activations(tokens, config.index_n_heads * config.index_head_dim, device)
        index = index.view(tokens, config.index_n_heads, config.index_head_dim)
        shape = f"{config.index_n_heads} index heads of {config.index_head_dim}"
        yield Case("rotary.apply_rope", f"{label}, {shape}", (index, *rest), read=_read(index, rest))
        kv, weight = activations(tokens, dim, device), (1 + torch.randn(dim, device=device) / 4).bfloat16()
        yield Case("rotary.norm_rope", f"{label}, keys of {dim}", (kv, *rest), {"eps": eps, "weight": weight}, read=_read(kv, rest))


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens of one row each."""
    width = max(columns - columns % 2, DIMS)
    x, rest = activations(rows, width, device), _rest(rows, DIMS, device)
    weight = (1 + torch.randn(width, device=device) / 4).bfloat16()
    label = f"{rows} rows of {width}"
    for inverse in (False, True):
        direction = "back" if inverse else "there"
        yield Case("rotary.apply_rope", f"{label}, {direction}", (x, *rest), {"inverse": inverse}, read=_read(x, rest))
    yield Case("rotary.norm_rope", f"{label}, no weight", (x, *rest), {"eps": 1e-6}, read=_read(x, rest))
    yield Case("rotary.norm_rope", f"{label}, weight", (x, *rest), {"eps": 1e-6, "weight": weight}, read=_read(x, rest))


def _rest(tokens: int, dims: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A table and the positions of the tokens in it."""
    table = rope_table(rope_frequencies(160000.0, dims), PLACES).to(device)
    return table, torch.arange(tokens, device=device) % PLACES


def _read(x: Tensor, rest: tuple[Tensor, Tensor]) -> int:
    """Bytes: of the table a row a token."""
    table, positions = rest
    return x.nbytes + positions.nbytes + min(len(positions), len(table)) * table[0].nbytes
