"""What happens to a row's expert ids after the selection: shared slots, padding, packing, counting.

A shared expert may run as extra slots of the routed experts' kernel. Its slot weighs

    w_shared = fl32(1 / copies)                   if the routed weights carry the factor f (scale placement: router)
    w_shared = fl32(1 / (f copies))               otherwise: a later factor f makes it 1 again                           (1)

with `copies` the ranks that each add it (1 with all-to-all, the group's size with all-reduce). With P physical experts on R ranks and
L = P / R, slot j of S shared ones has the id

    global       P + j                            routed ids unchanged                                                   (2)
    home rank    r (L + S) + L + j                routed id p becomes p + (p div L) S,  r the token's own rank           (3)

(3) numbers the experts of a rank together. An id of -1 stays -1, though p div L is -1; a padding row gets a valid shared id, so padding is
masked after (2) and (3). Ids are int32 and any id out of range is -1; weights are fp32 and 0 wherever the id is -1. Source: spec M 1.8,
1.10, 1.11, 1.12. In (2) the specification writes E + j; P + j is the same without redundant experts, and with them E + j would be a
routed slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, routing_checks
from dsv4.formats import fp32
from dsv4.reference.numerics import float_dtypes
from dsv4.types import Routed, ScalePlacement

__all__ = ["append_shared_slots", "count_experts", "mask_padding", "pack_topk", "remap_home_rank_slots"]

PACKED_IDS = 2**15  # ids that fit into the upper half of a packed word


def append_shared_slots(
    ids: Tensor,
    weights: Tensor,
    shared: int,
    *,
    experts: int,
    scale: float = 1.0,
    scale_placement: ScalePlacement | str = ScalePlacement.ROUTER,
    copies: int = 1,
) -> Routed:
    """Append the shared experts' slots in the global layout, by (1) and (2).

    Args:
        ids: [tokens, slots], int32 or int64: routed ids, physical where there is a placement.
        weights: [tokens, slots], fp32.
        shared: shared experts S >= 0.
        experts: routed ids that exist: the physical count P, or E without a placement.
        scale: routed scaling factor f, > 0.
        scale_placement: who applies it.
        copies: ranks that each add the shared experts to the same row.

    Returns:
        Routed of [tokens, slots + shared]. Every row gets the shared slots, padding too: `mask_padding` comes after.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    routing_checks.slots(ids, weights, float_dtypes())
    routing_checks.id_space("experts", experts, shared)
    checks.at_least("copies", copies, 1)
    weight = _shared_weight(scale, scale_placement, copies)
    routed = _within(ids, weights, experts)
    return _append(routed, [experts + j for j in range(shared)], weight)


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
) -> Routed:
    """Renumber the routed ids rank by rank and append the home rank's shared slots, by (1) and (3).

    Args:
        ids: [tokens, slots], int32 or int64: physical routed ids.
        weights: [tokens, slots], fp32.
        shared: shared experts S >= 0; every rank has a replica of each.
        experts: physical routed experts P, a multiple of `ranks`.
        ranks: ranks of the expert-parallel group.
        rank: the rank that these rows live on.
        scale: routed scaling factor f, > 0.
        scale_placement: who applies it.

    Returns:
        Routed of [tokens, slots + shared], ids below P + ranks * shared. Every row gets the shared slots, padding too.

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers.
    """
    routing_checks.slots(ids, weights, float_dtypes())
    routing_checks.home_rank(experts, shared, ranks, rank)
    weight = _shared_weight(scale, scale_placement, 1)
    local = experts // ranks
    kept = _within(ids, weights, experts)
    renumbered = torch.where(kept.ids >= 0, kept.ids + kept.ids // local * shared, -1)
    first = rank * (local + shared) + local
    return _append(Routed(renumbered, kept.weights), [first + j for j in range(shared)], weight)


def mask_padding(ids: Tensor, weights: Tensor, live_rows: int | Tensor) -> Routed:
    """Send padding rows nowhere: id -1 and weight 0 in all slots.

    Args:
        ids: [tokens, slots], int32 or int64.
        weights: [tokens, slots], fp32.
        live_rows: rows before the padding, 0 to tokens; an int, or an int32 or int64 tensor of one element on the device of the ids.

    Returns:
        Routed of the same shape. Negative ids elsewhere become -1 with weight 0, too.

    Raises:
        ArgumentError: wrong dtypes or shapes, an int out of range. A tensor is not looked at: out of range it counts as the nearest bound.
    """
    routing_checks.slots(ids, weights, float_dtypes())
    checks.live_rows(live_rows, ids.shape[0], "ids", ids)
    live = torch.arange(ids.shape[0], device=ids.device)[:, None] < live_rows  # [tokens, 1]
    return _kept(ids, weights, live & (ids >= 0))


def pack_topk(ids: Tensor, weights: Tensor) -> Tensor:
    """Id and weight in one word: id * 2^16 + the bits of bf16(weight), to nearest even.

    Args:
        ids: [tokens, slots], int32 or int64; ids outside 0 to 32767 pack as -1 with weight 0.
        weights: [tokens, slots], fp32. NaN packs as 0x7FC0.

    Returns:
        int32 [tokens, slots].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    routing_checks.slots(ids, weights, float_dtypes())
    kept = _within(ids, weights, PACKED_IDS)
    bits = kept.weights.to(torch.bfloat16).view(torch.int16).long() % 2**16
    bits = torch.where(kept.weights.isnan(), 0x7FC0, bits)  # torch's own cast has two NaNs, depending on the element's place
    return (kept.ids.long() * 2**16 + bits).to(torch.int32)


def count_experts(ids: Tensor, counts: Tensor) -> Tensor:
    """Add the rows' experts to load counters.

    Args:
        ids: [tokens, slots], int32 or int64: physical routed ids, without shared slots. Ids outside 0 to physical - 1 are ignored.
        counts: [physical], int32: the counters so far.

    Returns:
        int32 [physical]: new counters; those given are unchanged.

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    checks.tensor("ids", ids, routing_checks.INDEX, ("tokens", "slots"))
    checks.tensor("counts", counts, "int32", ("physical",))
    checks.same_device("counts", counts, "ids", ids)
    physical = counts.shape[0]
    seen = ids[(ids >= 0) & (ids < physical)].long()
    return counts + torch.bincount(seen, minlength=physical).to(torch.int32)


def _shared_weight(scale: float, scale_placement: ScalePlacement | str, copies: int) -> float:
    """(1)."""
    routing_checks.scaling(scale)
    applied = routing_checks.scale_placement(scale_placement) is ScalePlacement.ROUTER
    return fp32(1 / ((1.0 if applied else fp32(scale)) * copies))


def _within(ids: Tensor, weights: Tensor, limit: int) -> Routed:
    return _kept(ids, weights, (ids >= 0) & (ids < limit))


def _kept(ids: Tensor, weights: Tensor, keep: Tensor) -> Routed:
    return Routed(torch.where(keep, ids, -1).to(torch.int32), torch.where(keep, weights, 0.0))


def _append(routed: Routed, shared_ids: list[int], weight: float) -> Routed:
    shape = (routed.ids.shape[0], len(shared_ids))
    ids = torch.tensor(shared_ids, dtype=torch.int32, device=routed.ids.device).expand(shape)
    return Routed(torch.cat([routed.ids, ids], 1), torch.cat([routed.weights, routed.weights.new_full(shape, weight)], 1))
