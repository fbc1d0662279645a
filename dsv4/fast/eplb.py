"""Expert-parallel load balancing: the twin of `dsv4.reference.eplb`, which has the algorithm and its ties.

`rebalance` treats all layers and nodes at once: a step of the greedy algorithms is a few tensor operations over [layers * nodes, ...],
where the reference goes through one layer after the other. It is host work and runs on the CPU. `map_to_physical` is an operator; inside
`routing.route` it is part of the launch. Placements and rank maps are built by `dsv4.placement`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4 import checks, routing_checks
from dsv4.fast import routing_ops as routing_ops  # defines the operator
from dsv4.placement import make_placement, rank_dispatch_map, sglang_dispatch_order
from dsv4.types import DispatchAlgorithm, Placement, Rebalanced

__all__ = ["Placement", "make_placement", "map_to_physical", "rank_dispatch_map", "rebalance", "sglang_dispatch_order"]


def map_to_physical(
    ids: Tensor,
    placement: Placement,
    algorithm: DispatchAlgorithm | str = DispatchAlgorithm.STATIC,
    *,
    rank: int = 0,
    words: Tensor | None = None,
    uniforms: Tensor | None = None,
    probabilities: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The physical slot of each expert of each row (spec M 2.3).

    Args:
        ids: [tokens, k], int32 or int64: logical ids.
        placement: tables on the device of the ids.
        algorithm: none, static (rank_map), dynamic (words), row_modulo (rank + 23333 row), row_index (row), probability.
        rank: the rank that these rows live on.
        words: [tokens, k], int32 or int64: random words of the dynamic algorithm.
        uniforms: [tokens, k], fp32 in [0, 1), of the probability algorithm.
        probabilities: [experts, most replicas], fp32, of each replica, at least 0.
        impl: a backend by name, else the device's default.

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
    checks.no_grad(uniforms=uniforms, probabilities=probabilities)
    physical = placement.physical_to_logical.shape[0]
    tables = (placement.replicas, placement.counts, placement.rank_map)
    mapped: Tensor = torch.ops.dsv4.map_to_physical.default(ids, physical, *tables, str(chosen), rank, words, uniforms, probabilities, impl)
    return mapped


def rebalance(loads: Tensor, *, physical: int, ranks: int, groups: int = 1, nodes: int = 1, distinct_per_rank: bool = False) -> Rebalanced:
    """Place the experts of all layers by their loads (spec M 2.6).

    Args:
        loads: [layers, experts], fp32, fp64, int32 or int64: tokens that each expert got, finite and at least 0.
        physical: physical experts P >= experts, a multiple of `ranks`.
        ranks: ranks, a multiple of `nodes` where groups are spread over nodes.
        groups: groups of neighbouring experts that stay on one node. If `nodes` does not divide it, groups and nodes count as 1.
        nodes: nodes of equally many ranks.
        distinct_per_rank: never two replicas of an expert on one rank.

    Returns:
        Rebalanced, on the device of the loads.

    Raises:
        ArgumentError: sizes that do not divide, negative or infinite loads, ranks too large to hold different experts.
    """
    routing_checks.rebalancing(loads, physical, ranks, groups, nodes, distinct_per_rank)
    routing_checks.load_values(loads)
    checks.no_grad(loads=loads)
    if groups % nodes:
        groups = nodes = 1
    with torch.device("cpu"):
        placed = _placed(loads.detach().to("cpu", torch.float32) + 0.0, physical, ranks, groups, nodes, distinct_per_rank)
    return Rebalanced(*(result.to(loads.device, torch.int32) for result in placed))


def _placed(load: Tensor, physical: int, ranks: int, groups: int, nodes: int, distinct_per_rank: bool) -> tuple[Tensor, ...]:
    """The parts of a Rebalanced."""
    layers, experts = load.shape
    size = experts // groups
    group_loads = load.to(torch.float64).view(layers, groups, size).sum(-1).to(torch.float32)
    members = _pack(group_loads, nodes)  # [layers, groups], node by node
    local = (members[..., None] * size + torch.arange(size)).view(layers * nodes, experts // nodes)  # experts of each node

    layer = torch.arange(layers).repeat_interleave(nodes)[:, None]
    made = _replicate(load[layer, local], physical // nodes, ranks // nodes if distinct_per_rank else physical)
    slots = _pack(made.loads, ranks // nodes, made.experts if distinct_per_rank else None)  # item in each slot
    logical = local.gather(1, made.experts.gather(1, slots)).view(layers, physical)
    numbers = made.numbers.gather(1, slots).view(layers, physical)

    counts = torch.zeros(layers, experts, dtype=torch.int64).scatter_add_(1, logical, torch.ones_like(logical))
    replicas = torch.full((layers, experts, int(counts.max()) if layers else 1), -1, dtype=torch.int32)
    replicas[torch.arange(layers)[:, None], logical, numbers] = torch.arange(physical, dtype=torch.int32).expand(layers, -1)
    by_rank = logical.view(layers, ranks, physical // ranks).sort(-1).values
    duplicates = (by_rank[..., 1:] == by_rank[..., :-1]).sum(-1)
    return logical, replicas, counts, duplicates


class _Replicas(NamedTuple):
    """Items [rows, slots]: their expert, which of its replicas they are, and their load."""

    experts: Tensor
    numbers: Tensor
    loads: Tensor


def _replicate(load: Tensor, slots: int, most: int) -> _Replicas:
    """One replica an expert, then each slot to the expert with the largest load a replica, of those with fewer than `most`."""
    rows, experts = load.shape
    chosen = torch.arange(experts).repeat(rows, 1).new_zeros(rows, slots)
    chosen[:, :experts] = torch.arange(experts)
    numbers = torch.zeros_like(chosen)
    counts = torch.ones_like(load)
    share = load.clone() if most > 1 else torch.full_like(load, -1.0)
    every = torch.arange(rows)
    for slot in range(experts, slots):
        expert = share.argmax(1)
        chosen[:, slot] = expert
        held = counts[every, expert]
        numbers[:, slot] = held.long()
        counts[every, expert] = held + 1
        share[every, expert] = torch.where(held + 1 < most, load[every, expert] / (held + 1), -1.0)
    return _Replicas(chosen, numbers, (load / counts).gather(1, chosen))


def _pack(loads: Tensor, packs: int, experts: Tensor | None = None) -> Tensor:
    """Items [rows, items] into packs of equal size: the item in each place, pack by pack. With `experts`, no pack holds one twice."""
    rows, items = loads.shape
    size = items // packs
    if size == 1 or not rows:
        return torch.arange(items).repeat(rows, 1)
    packing = _Packing(
        torch.full((rows, packs, size), -1),
        torch.zeros(rows, packs, dtype=loads.dtype),
        torch.zeros(rows, packs, dtype=torch.int64),
        torch.zeros(rows, packs, 1 if experts is None else int(experts.max()) + 1, dtype=torch.bool),
    )
    every = torch.arange(rows)
    for item in loads.sort(stable=True, dim=1, descending=True).indices.unbind(1):
        room = packing.held < size
        into = every
        if experts is not None:
            room = room & ~packing.owned[every, :, experts[every, item]]
            fits = room.any(1)
            for row in (~fits).nonzero().flatten().tolist():
                packing.exchange(row, int(item[row]), loads[row], experts[row])
            into = fits.nonzero().flatten()
        pack = torch.where(room, packing.totals, torch.inf).argmin(1)[into]
        packing.places[into, pack, packing.held[into, pack]] = item[into]
        packing.totals[into, pack] += loads[into, item[into]]
        packing.held[into, pack] += 1
        if experts is not None:
            packing.owned[into, pack, experts[into, item[into]]] = True
    return packing.places.view(rows, items)


class _Packing(NamedTuple):
    """Packs being filled, in every row."""

    places: Tensor  # [rows, packs, size], items, -1 where there is none yet
    totals: Tensor  # [rows, packs], fp32
    held: Tensor  # [rows, packs], items so far
    owned: Tensor  # [rows, packs, experts]: whether the pack holds the expert

    def exchange(self, row: int, item: int, loads: Tensor, experts: Tensor) -> None:
        """Give `item` the place of one that moves to the lightest pack with room."""
        places, totals, held, owned = (field[row] for field in self)
        expert = experts[item]
        q = torch.where(held < places.shape[1], totals, torch.inf).argmin()
        p = torch.where(owned[:, expert], torch.inf, totals).argmin()
        place = (~owned[q, experts[places[p]]]).nonzero().max()
        moved = places[p, place].clone()
        places[p, place], places[q, held[q]] = item, moved
        held[q] += 1
        totals[q] = totals[q] + loads[moved]
        totals[p] = totals[p] - loads[moved] + loads[item]
        owned[q, experts[moved]] = True
        owned[p, experts[moved]] = False
        owned[p, expert] = True
