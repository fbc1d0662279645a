"""Wrong ways of a key into the cache: norms, rotations and what lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants.kv_records import Quantiser
from dsv4.reference import kv_cache as right
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.rotary import apply_rope


def chain(
    through: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor], quantize: Quantiser = right.quantize_kv
) -> Callable[..., Tensor]:
    """norm_rope_store_kv with another way to the rows, or another quantiser."""

    def call(
        kv: Tensor,
        weight: Tensor,
        table: Tensor,
        positions: Tensor,
        pages: Tensor,
        slots: Tensor,
        *,
        eps: float,
        layout: str,
        page_size: int,
        amax_floor: str = "official",
    ) -> Tensor:
        records = quantize(through(kv, weight, table, positions, eps), layout=layout, amax_floor=amax_floor)
        return right.store_kv(records, pages, slots, layout=layout, page_size=page_size)

    return call


def usual(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return apply_rope(rms_norm(kv, weight, eps=eps), table, positions)


def norm_after_rope(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return rms_norm(apply_rope(kv, table, positions), weight, eps=eps)


def no_rounding_between(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    """SGLang's V4 window store: fp32 from the norm to the quantiser."""
    with numerics("unrounded"):
        return apply_rope(rms_norm(kv, weight, eps=eps), table, positions).bfloat16()


def no_rope(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    present = (positions >= 0) & (positions < table.shape[0])
    return rms_norm(kv, weight, eps=eps) * present[:, None]


def halves(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    """Pairs (i, i + R/2) instead of (2i, 2i + 1)."""
    rotated, normed = table.shape[1], rms_norm(kv, weight, eps=eps)
    order = torch.arange(rotated).view(2, -1).T.flatten()
    turned = apply_rope(torch.cat([normed[:, :-rotated], normed[:, -rotated:][:, order]], 1), table, positions)
    return torch.cat([turned[:, :-rotated], turned[:, -rotated:][:, order.argsort()]], 1)


def inverse_rope(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return apply_rope(rms_norm(kv, weight, eps=eps), table, positions, inverse=True)


def first_dims(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    rotated = table.shape[1]
    turned = apply_rope(rms_norm(kv, weight, eps=eps).roll(-rotated, 1), table, positions)
    return turned.roll(rotated, 1)


def next_position(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return usual(kv, weight, table, torch.where(positions == 0, 1, positions), eps)


def absent_as_zero_position(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return usual(kv, weight, table, torch.where(positions < 0, 0, positions), eps)


def weight_plus_one(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return usual(kv, (weight.float() + 1).to(weight.dtype), table, positions, eps)


def eps_dropped(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    return usual(kv, weight, table, positions, min(eps, 1e-20))


def nope_norm(kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, eps: float) -> Tensor:
    """The mean square over the dims that are not rotated."""
    plain = kv.shape[1] - table.shape[1]
    factor = (kv[:, :plain].double().square().mean(1, keepdim=True) + eps).rsqrt()
    return apply_rope((kv.double() * factor * weight.double()).bfloat16(), table, positions)


def skips_absent_positions(
    kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, **options: Any
) -> Tensor:
    present = (positions >= 0) & (positions < table.shape[0])
    return right.norm_rope_store_kv(kv, weight, table, positions, pages, torch.where(present, slots, -1), **options)


def rows_at_their_positions(
    kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, **options: Any
) -> Tensor:
    return right.norm_rope_store_kv(kv, weight, table, positions, pages, torch.where(slots >= 0, positions, -1), **options)
