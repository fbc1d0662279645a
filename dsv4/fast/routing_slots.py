"""Shared slots, padding, packing and counters of routed rows: the twin of `dsv4.reference.routing_slots`, which has the formulas.

Results are new tensors, except that `count_experts` adds to the caller's counters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, routing_checks
from dsv4.fast import routing_ops as routing_ops  # defines the operators
from dsv4.types import Routed, ScalePlacement

__all__ = ["append_shared_slots", "count_experts", "mask_padding", "pack_topk", "remap_home_rank_slots"]


def append_shared_slots(
    ids: Tensor,
    weights: Tensor,
    shared: int,
    *,
    experts: int,
    scale: float = 1.0,
    scale_placement: ScalePlacement | str = ScalePlacement.ROUTER,
    copies: int = 1,
    impl: str | None = None,
) -> Routed:
    """Append the shared experts' slots in the global layout: ids experts + j in every row, padding too (spec M 1.8).

    Args:
        ids: [tokens, slots], int32 or int64: routed ids, physical where there is a placement.
        weights: [tokens, slots], fp32.
        shared: shared experts S >= 0.
        experts: routed ids that exist: the physical count P, or E without a placement.
        scale: routed scaling factor f, > 0.
        scale_placement: who applies it.
        copies: ranks that each add the shared experts to the same row.
        impl: a backend by name, else the device's default.

    Returns:
        Routed of [tokens, slots + shared].

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    routing_checks.slots(ids, weights, "fp32")
    routing_checks.id_space("experts", experts, shared)
    checks.at_least("copies", copies, 1)
    factor = _later_factor(scale, scale_placement)
    checks.no_grad(weights=weights)
    return Routed(*torch.ops.dsv4.append_shared_slots.default(ids, weights, shared, experts, factor, copies, impl))


def remap_home_rank_slots(
    ids: Tensor,
    weights: Tensor,
    shared: int,
    *,
    experts: int,
    ranks: int,
    rank: int,
    scale: float = 1.0,
    scale_placement: ScalePlacement | str = ScalePlacement.ROUTER,
    impl: str | None = None,
) -> Routed:
    """Renumber the routed ids rank by rank and append the home rank's shared slots (spec M 1.8).

    Args:
        ids: [tokens, slots], int32 or int64: physical routed ids.
        weights: [tokens, slots], fp32.
        shared: shared experts S >= 0; every rank has a replica of each.
        experts: physical routed experts P, a multiple of `ranks`.
        ranks: ranks of the expert-parallel group.
        rank: the rank that these rows live on.
        scale: routed scaling factor f, > 0.
        scale_placement: who applies it.
        impl: a backend by name, else the device's default.

    Returns:
        Routed of [tokens, slots + shared], ids below P + ranks * shared.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    routing_checks.slots(ids, weights, "fp32")
    routing_checks.home_rank(experts, shared, ranks, rank)
    factor = _later_factor(scale, scale_placement)
    checks.no_grad(weights=weights)
    return Routed(*torch.ops.dsv4.remap_home_rank_slots.default(ids, weights, shared, experts, ranks, rank, factor, impl))


def mask_padding(ids: Tensor, weights: Tensor, live_rows: int | Tensor, *, impl: str | None = None) -> Routed:
    """Send padding rows nowhere: id -1 and weight 0 in all slots (spec M 1.10).

    Args:
        ids: [tokens, slots], int32 or int64.
        weights: [tokens, slots], fp32.
        live_rows: rows before the padding, 0 to tokens; an int, or an int32 or int64 tensor of one element on the device of the ids.
        impl: a backend by name, else the device's default.

    Returns:
        Routed of the same shape. Negative ids elsewhere become -1 with weight 0, too.

    Raises:
        ArgumentError: wrong dtypes or shapes, an int out of range. A tensor is not looked at: out of range it counts as the nearest bound.
    """
    routing_checks.slots(ids, weights, "fp32")
    checks.live_rows(live_rows, ids.shape[0], "ids", ids)
    checks.no_grad(weights=weights)
    live, live_device = (0, live_rows) if isinstance(live_rows, Tensor) else (live_rows, None)
    return Routed(*torch.ops.dsv4.mask_padding.default(ids, weights, live, live_device, impl))


def pack_topk(ids: Tensor, weights: Tensor, *, impl: str | None = None) -> Tensor:
    """Id and weight in one word: id * 2^16 + the bits of bf16(weight), to nearest even (spec M 1.11).

    Args:
        ids: [tokens, slots], int32 or int64; ids outside 0 to 32767 pack as -1 with weight 0.
        weights: [tokens, slots], fp32. NaN packs as 0x7FC0.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, slots].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    routing_checks.slots(ids, weights, "fp32")
    checks.no_grad(weights=weights)
    packed: Tensor = torch.ops.dsv4.pack_topk.default(ids, weights, impl)
    return packed


def count_experts(ids: Tensor, counts: Tensor, *, impl: str | None = None) -> Tensor:
    """Add the rows' experts to load counters, in place (spec M 1.12).

    Args:
        ids: [tokens, slots], int32 or int64: physical routed ids, without shared slots. Ids outside 0 to physical - 1 are ignored.
        counts: [physical], int32: the counters so far; never zeroed.
        impl: a backend by name, else the device's default.

    Returns:
        `counts`.

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    checks.tensor("ids", ids, routing_checks.INDEX, ("tokens", "slots"))
    checks.tensor("counts", counts, "int32", ("physical",))
    checks.same_device("counts", counts, "ids", ids)
    checks.writable("counts", counts)
    torch.ops.dsv4.count_experts.default(ids, counts, impl)
    return counts


def _later_factor(scale: float, scale_placement: ScalePlacement | str) -> float:
    """The factor that somebody applies after the router, which a shared slot's weight has to undo."""
    routing_checks.scaling(scale)
    return 1.0 if routing_checks.scale_placement(scale_placement) is ScalePlacement.ROUTER else scale
