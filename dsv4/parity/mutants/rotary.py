"""Wrong rotations, three of them out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant
from dsv4.reference import norms
from dsv4.reference import rotary as right
from dsv4.rope_tables import rope_table


def _halves(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Pairs (i, i + R/2), as GPT-NeoX has them."""
    dims = table.shape[1]
    paired = torch.cat([x[..., :-dims], x[..., -dims:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)], -1)
    turned = right.apply_rope(paired, table, positions, **options)
    return torch.cat([turned[..., :-dims], turned[..., -dims:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)], -1)


def _first_dims(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    dims = table.shape[1]
    return right.apply_rope(x.roll(-dims, -1), table, positions, **options).roll(dims, -1)


def _forward_always(x: Tensor, table: Tensor, positions: Tensor, **_: Any) -> Tensor:
    return right.apply_rope(x, table, positions)


def _one_later(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    inside = (positions >= 0) & (positions < table.shape[0] - 1)
    return right.apply_rope(x, table, torch.where(inside, positions + 1, positions), **options)


def _inverted(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Angles p / f for p f."""
    cosines, sines = table[1].chunk(2)
    return right.apply_rope(x, rope_table(1 / torch.atan2(sines, cosines), table.shape[0]), positions, **options)


def _stretched(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """The slow third of the pairs sixteen times slower, whatever the table says."""
    cosines, sines = table[1].chunk(2)
    angles = torch.atan2(sines, cosines)
    last = torch.arange(len(angles), device=angles.device) >= len(angles) * 2 // 3
    return right.apply_rope(x, rope_table(torch.where(last, angles / 16, angles), table.shape[0]), positions, **options)


def _in_place(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return x.copy_(right.apply_rope(x, table, positions, **options))


def _swapped(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return right.apply_rope(x, table.roll(table.shape[1] // 2, 1), positions, **options)


def _interleaved_table(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """The table read as cos, sin, cos, sin."""
    return right.apply_rope(x, torch.cat([table[:, 0::2], table[:, 1::2]], 1), positions, **options)


def _table_in_bf16(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    return right.apply_rope(x, table.bfloat16().float(), positions, **options)


def _wrapped(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Positions outside of the table wrap around: -1 is its last row."""
    return right.apply_rope(x, table, positions % table.shape[0], **options)


def _absent_kept(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    absent = ((positions < 0) | (positions >= table.shape[0])).view(-1, *(1,) * (x.dim() - 1))
    return torch.where(absent, x, right.apply_rope(x, table, positions, **options))


def _bf16_products(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> Tensor:
    """Products in fp32, rounded before they are added."""
    turned = right.apply_rope(x, table, positions, **options)
    dims, places = table.shape[1], table.shape[0]
    row = table[positions.clamp(0, places - 1).long()].view(-1, *(1,) * (x.dim() - 2), dims)
    cosines, sines = row.chunk(2, -1)
    sines = -sines if options.get("inverse") else sines
    a, b = x[..., -dims::2].float(), x[..., -dims + 1 :: 2].float()
    products = [((a * cosines).bfloat16(), (b * sines).bfloat16()), ((a * sines).bfloat16(), (b * cosines).bfloat16())]
    tail = torch.stack([products[0][0] - products[0][1], products[1][0] + products[1][1]], -1).flatten(-2)
    present = ((positions >= 0) & (positions < places)).view(-1, *(1,) * (x.dim() - 1))
    return torch.cat([turned[..., :-dims], torch.where(present, tail, 0)], -1)


def _normed(norm: Callable[..., Tensor], rope: Callable[..., Tensor] = right.apply_rope) -> Callable[..., Tensor]:
    def norm_rope(x: Tensor, table: Tensor, positions: Tensor, *, eps: float, weight: Tensor | None = None) -> Tensor:
        return rope(norm(x, weight, eps), table, positions)

    return norm_rope


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return norms.head_rms_norm(x, eps=eps) if weight is None else norms.rms_norm(x, weight, eps=eps)


def _norm_without_tail(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The statistic of the dims that are not rotated."""
    factor = (x[..., :-64].double().square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = x.double() * factor
    return (normed if weight is None else normed * weight.double()).float().bfloat16()


def _weight_dropped(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return norms.head_rms_norm(x, eps=eps)


def _rope_first(x: Tensor, table: Tensor, positions: Tensor, *, eps: float, weight: Tensor | None = None) -> Tensor:
    return _norm(right.apply_rope(x, table, positions), weight, eps)


MUTANTS = (
    Mutant("rope-halves", "rotary", "apply_rope", _halves, "pairs (i, i + R/2) for (2i, 2i + 1)"),
    Mutant("rope-first-dims", "rotary", "apply_rope", _first_dims, "the first dims rotated for the last"),
    Mutant("rope-inverse-ignored", "rotary", "apply_rope", _forward_always, "inverse ignored"),
    Mutant("rope-one-later", "rotary", "apply_rope", _one_later, "position off by one"),
    Mutant("rope-inverted-frequencies", "rotary", "apply_rope", _inverted, "angles p / f", "RP-03"),
    Mutant("rope-always-stretched", "rotary", "apply_rope", _stretched, "YaRN on every layer", "RP-01"),
    Mutant("rope-in-place", "rotary", "apply_rope", _in_place, "destroys its input", "RP-05"),
    Mutant("rope-swapped", "rotary", "apply_rope", _swapped, "cosines and sines swapped"),
    Mutant("rope-interleaved-table", "rotary", "apply_rope", _interleaved_table, "the table read as cos, sin, cos, sin", "spec A 2.3"),
    Mutant("rope-bf16-table", "rotary", "apply_rope", _table_in_bf16, "cosines and sines in bf16", "spec A 10 #5"),
    Mutant("rope-wrapped", "rotary", "apply_rope", _wrapped, "position -1 is the last row of the table"),
    Mutant("rope-absent-kept", "rotary", "apply_rope", _absent_kept, "rows of absent positions as they were"),
    Mutant("rope-bf16-products", "rotary", "apply_rope", _bf16_products, "products rounded to bf16"),
    Mutant("norm-rope-partial", "rotary", "norm_rope", _normed(_norm_without_tail), "the rotated dims left out of the mean"),
    Mutant("norm-rope-weight", "rotary", "norm_rope", _normed(_weight_dropped), "the weight left out"),
    Mutant("norm-rope-order", "rotary", "norm_rope", _rope_first, "the weight after the rotation"),
    Mutant("norm-rope-one-later", "rotary", "norm_rope", _normed(_norm, _one_later), "position off by one"),
    Mutant("norm-rope-wrapped", "rotary", "norm_rope", _normed(_norm, _wrapped), "position -1 is the last row of the table"),
)
