"""Rotary positions on the last dims of a row, and their inverse.

A row x of n numbers at position p; R is the number of rotated dims, the last ones, taken as interleaved pairs (2i, 2i + 1), and c, s are
the cosines and sines of p's row in the table:

    (a, b)  <-  (a c_i - b s_i,  a s_i + b c_i)                 i = 0 .. R/2 - 1       (1)
    inverse:  s_i  <-  -s_i                                     undoes it              (2)

x [tokens, ..., n] bf16, with whatever lies between (heads) at the position of its token; table fp32 [positions, R], a row's cosines, then
its sines (`rope_table`); the first n - R dims are copied. A compressed entry j of ratio r is at position j r; the attention's output is
rotated back by the position of its query.

Roundings: (1) is one step, evaluated in fp64, where products of bf16 and fp32 are exact, and rounded to fp32 and from there to bf16. A
position outside the table is absent, as -1 is: the whole row comes out zero and nothing is read for it. Source: spec A 2.3, 2.4.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from dsv4 import norm_checks
from dsv4.reference.norms import head_rms_norm, rms_norm
from dsv4.reference.numerics import bf16_dtypes, bf16_step
from dsv4.rope_tables import rope_frequencies, rope_table

__all__ = ["apply_rope", "norm_rope", "rope_frequencies", "rope_table"]


def apply_rope(x: Tensor, table: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last dims of each row by its token's position, by (1).

    Args:
        x: [tokens, ..., n], bf16, n even. It is not changed.
        table: fp32 [positions, R], of `rope_table`; R even, at most n.
        positions: [tokens], int64 or int32. One outside the table is absent.
        inverse: rotate back, by (2).

    Returns:
        bf16 [tokens, ..., n]; zero rows where the position is absent.

    Raises:
        ArgumentError: wrong dtypes or shapes, a table that is empty or wider than a row.
    """
    norm_checks.rotation(x, table, positions, bf16_dtypes())
    places, dims = table.shape
    present = (positions >= 0) & (positions < places)
    row = table[positions.clamp(0, places - 1).long()].unflatten(0, (-1,) + (1,) * (x.dim() - 2))  # [tokens, 1, .., R]
    cosines, sines = row.chunk(2, -1)
    rotated = bf16_step(_rotate, x[..., -dims:], cosines, -sines if inverse else sines)
    whole = torch.cat([x[..., :-dims].to(rotated.dtype), rotated], -1)
    return whole.where(present.unflatten(0, (-1,) + (1,) * (x.dim() - 1)), torch.zeros_like(whole))


def norm_rope(x: Tensor, table: Tensor, positions: Tensor, *, eps: float, weight: Tensor | None = None) -> Tensor:
    """A norm, rounded to bf16, then the rotation: what queries and keys go through.

    Args:
        x: [tokens, ..., n], bf16, n even.
        table, positions: as `apply_rope`.
        eps: of the norm, >= 0, an fp32 number.
        weight: [n], bf16 or fp32, for `rms_norm`; None for `head_rms_norm` in fp32.

    Returns:
        bf16 [tokens, ..., n]; zero rows where the position is absent.

    Raises:
        ArgumentError: as the two steps.
    """
    norm_checks.norm_rope(x, table, positions, eps, weight, bf16_dtypes())
    normed = head_rms_norm(x, eps=eps) if weight is None else rms_norm(x, weight, eps=eps)
    return apply_rope(normed, table, positions)


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """(1): [tokens, ..., R]."""
    a, b = rearrange(x, "... (pairs two) -> two ... pairs", two=2)
    turned = torch.stack([a * cosines - b * sines, a * sines + b * cosines])
    return rearrange(turned, "two ... pairs -> ... (pairs two)")
