"""Expert-parallel load balancing: more physical slots than experts, so that hot experts have replicas.

P physical slots lie on R ranks, P / R on each. `rebalance` turns measured loads l(e) into a placement, layer by layer (spec M 2.6):

    1. Pack groups of experts onto nodes, by the sum of their loads.
    2. On each node start with one replica an expert; each further slot goes to the expert with the largest l(e) / replicas(e).
    3. On each node pack the replicas, of load l(e) / replicas(e), onto the ranks.

Packing n items into m packs of n / m: visit the items in descending load (a stable sort); each goes into the lightest pack with room,
the lowest on ties. Packs of one item take the items as they are. Loads and quotients are fp32. A group's load is summed in fp64 and rounded
once to fp32; a pack's total is rounded to fp32 after each change. Where groups cannot be spread over the nodes evenly, all is one group
on one node (V4 and V4.1 have no groups).

That algorithm may put two replicas of an expert on one rank, and the result says how often. With `distinct_per_rank` it does not: step 2
gives no expert more replicas than the node has ranks, and in step 3 a pack with the expert has no room for it. If no pack is left, the
item takes the place of another: p is the lightest pack without the expert, q the lightest pack that is not full, and the last item of p
whose expert q lacks moves to the end of q. There always is one: q holds the expert and at most n/m - 2 others, p holds n/m others, all
different.

`map_to_physical` sends a row to one replica of each of its experts (spec M 2.3). Building placements and rank maps is in `dsv4.placement`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, routing_checks
from dsv4.formats import fp32
from dsv4.placement import make_placement, rank_dispatch_map, sglang_dispatch_order
from dsv4.types import DispatchAlgorithm, Placement, Rebalanced

__all__ = ["Placement", "make_placement", "map_to_physical", "rank_dispatch_map", "rebalance", "sglang_dispatch_order"]

ROW_STRIDE = 23333  # a prime: neighbouring rows reach different replicas (DeepGEMM, tile_kernels)
WORD_RANGE = 2**16  # of the random words


def map_to_physical(
    ids: Tensor,
    placement: Placement,
    algorithm: DispatchAlgorithm | str = DispatchAlgorithm.STATIC,
    *,
    rank: int = 0,
    words: Tensor | None = None,
    uniforms: Tensor | None = None,
    probabilities: Tensor | None = None,
) -> Tensor:
    """The physical slot of each expert of each row.

    With n = counts[id] replicas of an expert and row t,

        static         rank_map[id]                            row_modulo    replicas[id, (rank + 23333 t) mod n]
        dynamic        replicas[id, word mod 2^16 mod n]       row_index     replicas[id, t mod n]
        probability    replicas[id, first i with c_i > u c_(n-1)],  c_i = p_0 + ... + p_i in fp64 from left to right
        none           id

    Args:
        ids: [tokens, k], int32 or int64: logical ids.
        placement: tables on the device of the ids.
        algorithm: one of the above.
        rank: the rank that these rows live on.
        words: [tokens, k], int32 or int64: random words of the dynamic algorithm.
        uniforms: [tokens, k], fp32, u in [0, 1), of the probability algorithm.
        probabilities: [experts, most replicas], fp32, p of each replica, at least 0; they need not add up to 1. All 0 is the last replica.

    Returns:
        int32 [tokens, k]. An id outside 0 to experts - 1, an expert without a replica and a table entry outside 0 to physical - 1 give -1.

    Raises:
        ArgumentError: wrong dtypes or shapes, or an algorithm without what it needs.
    """
    checks.tensor("ids", ids, routing_checks.INDEX, ("tokens", "k"))
    routing_checks.placed(placement, "ids", ids)
    chosen = routing_checks.dispatch(
        ("ids", ids), ids.shape[1], placement, algorithm, rank=rank, words=words, uniforms=uniforms, probabilities=probabilities
    )
    experts, most = placement.replicas.shape
    known = (ids >= 0) & (ids < experts)
    expert = torch.where(known, ids, 0).long()
    if chosen is DispatchAlgorithm.NONE:
        return torch.where(known, ids, -1).to(torch.int32)
    if chosen is DispatchAlgorithm.STATIC and placement.rank_map is not None:
        slots = placement.rank_map[expert]
    else:
        count = placement.counts[expert].long().clamp(max=most)  # [tokens, k]
        known = known & (count > 0)
        count = count.clamp(min=1)
        row = torch.arange(ids.shape[0], device=ids.device)[:, None]
        if chosen is DispatchAlgorithm.DYNAMIC and words is not None:
            replica = words.long() % WORD_RANGE % count
        elif chosen is DispatchAlgorithm.PROBABILITY and uniforms is not None and probabilities is not None:
            replica = _drawn(probabilities[expert], uniforms, count)
        elif chosen is DispatchAlgorithm.ROW_MODULO:
            replica = (rank + ROW_STRIDE * row) % count
        else:
            replica = row % count
        slots = placement.replicas[expert, replica]
    known = known & (slots >= 0) & (slots < placement.physical_to_logical.shape[0])
    return torch.where(known, slots, -1).to(torch.int32)


def rebalance(loads: Tensor, *, physical: int, ranks: int, groups: int = 1, nodes: int = 1, distinct_per_rank: bool = False) -> Rebalanced:
    """Place the experts of all layers by their loads.

    Args:
        loads: [layers, experts], fp32, fp64, int32 or int64: tokens that each expert got, finite and at least 0.
        physical: physical experts P >= experts, a multiple of `ranks`.
        ranks: ranks, a multiple of `nodes` where groups are spread over nodes.
        groups: groups of neighbouring experts that stay on one node. If `nodes` does not divide it, groups and nodes count as 1.
        nodes: nodes of equally many ranks.
        distinct_per_rank: never two replicas of an expert on one rank.

    Returns:
        Rebalanced, on the device of the loads. Replicas are in the order in which step 2 made them; their list is as long as the
        largest count of any layer.

    Raises:
        ArgumentError: sizes that do not divide, negative or infinite loads, ranks too large to hold different experts.
    """
    routing_checks.rebalancing(loads, physical, ranks, groups, nodes, distinct_per_rank)
    routing_checks.load_values(loads)
    if groups % nodes:
        groups = nodes = 1
    layers = [_place(load, physical, ranks, groups, nodes, distinct_per_rank) for load in loads.detach().to("cpu", torch.float32)]
    most = max((len(held) for layer in layers for held in layer), default=1)
    replicas = torch.full((*loads.shape, most), -1, dtype=torch.int32, device="cpu")
    logical = torch.full((loads.shape[0], physical), -1, dtype=torch.int32, device="cpu")
    for index, layer in enumerate(layers):
        for expert, held in enumerate(layer):
            replicas[index, expert, : len(held)] = torch.tensor(held, dtype=torch.int32, device="cpu")
            logical[index, held] = expert
    counts = (replicas >= 0).sum(-1, dtype=torch.int32)
    repeats = [[len(slots) - len(set(slots)) for slots in row.reshape(ranks, -1).tolist()] for row in logical]
    duplicates = torch.tensor(repeats, dtype=torch.int32, device="cpu").reshape(-1, ranks)
    return Rebalanced(*(result.to(loads.device) for result in (logical, replicas, counts, duplicates)))


def _drawn(weights: Tensor, uniforms: Tensor, count: Tensor) -> Tensor:
    """The first replica whose cumulative weight exceeds the uniform part of the whole: [tokens, k, most], [tokens, k], [tokens, k]."""
    replica = torch.arange(weights.shape[-1], device=weights.device)
    valid = replica < count[..., None]
    cumulative = []
    total = torch.zeros_like(uniforms, dtype=torch.float64)
    for weight in torch.where(valid, weights, 0.0).double().unbind(-1):
        total = total + weight
        cumulative.append(total)
    passed = torch.stack(cumulative, -1) <= (uniforms.double() * total)[..., None]
    return passed.sum(-1).minimum(count - 1)


def _place(load: Tensor, physical: int, ranks: int, groups: int, nodes: int, distinct: bool) -> list[list[int]]:
    """One layer, steps 1 to 3: the slots of each expert, in the order in which its replicas were made."""
    size = len(load) // groups  # experts of a group
    group_loads = load.double().unflatten(0, (groups, size)).sum(1).float()
    slots: list[list[int]] = [[-1] for _ in load]
    for node, members in enumerate(_pack(group_loads.tolist(), nodes)):
        experts = [group * size + offset for group in members for offset in range(size)]
        held, numbers, loads = _replicate(load[experts], physical // nodes, ranks // nodes if distinct else physical)
        packs = _pack(loads, ranks // nodes, held if distinct else None)
        first = node * (physical // nodes)
        for offset, item in enumerate(item for pack in packs for item in pack):
            expert = slots[experts[held[item]]]
            expert.extend([-1] * (numbers[item] + 1 - len(expert)))
            expert[numbers[item]] = first + offset
    return slots


def _replicate(load: Tensor, slots: int, most: int) -> tuple[list[int], list[int], list[float]]:
    """Step 2: the expert of each slot, which of its replicas it is, and the load of a replica. No expert has more than `most`."""
    held = list(range(len(load)))
    numbers = [0] * len(load)
    counts = torch.ones_like(load)
    while len(held) < slots:
        share = torch.where(counts < most, load / counts, -1.0)
        expert = share.tolist().index(share.max().item())  # the first of equals
        held.append(expert)
        numbers.append(int(counts[expert]))
        counts[expert] += 1
    return held, numbers, (load / counts)[held].tolist()


def _pack(loads: list[float], packs: int, experts: list[int] | None = None) -> list[list[int]]:
    """Items into packs of equal size. With `experts`, the expert of each item, no pack holds an expert twice."""
    size = len(loads) // packs
    if size == 1:
        return [[item] for item in range(packs)]
    held: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs

    def has(pack: int, item: int) -> bool:
        return experts is not None and any(experts[other] == experts[item] for other in held[pack])

    for item in sorted(range(len(loads)), key=lambda item: -loads[item]):
        room = [pack for pack in range(packs) if len(held[pack]) < size]
        fitting = [pack for pack in room if not has(pack, item)]
        if fitting:
            pack = min(fitting, key=totals.__getitem__)
            held[pack].append(item)
        else:
            q = min(room, key=totals.__getitem__)
            pack = min((p for p in range(packs) if not has(p, item)), key=totals.__getitem__)
            place = max(place for place, other in enumerate(held[pack]) if not has(q, other))
            moved, held[pack][place] = held[pack][place], item
            held[q].append(moved)
            totals[q] = fp32(totals[q] + loads[moved])
            totals[pack] = fp32(totals[pack] - loads[moved])
        totals[pack] = fp32(totals[pack] + loads[item])
    return held
