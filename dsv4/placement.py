"""Building expert placements: host logic that exists once, re-exported by `dsv4.reference.eplb` and `dsv4.fast.eplb`.

P physical slots lie on R ranks and N nodes, slot p on rank p div (P/R) and node p div (P/N). A `Placement` says which logical expert a slot
holds. The static dispatch algorithm wants one replica of each expert for each rank, by these rules in this order (spec M 2.2):

    1. the only replica;
    2. the first replica on the rank itself;
    3. the first replica on the rank's node, if some replica is on another node;
    4. what a fair order says: the ranks left take the entries of `order` from the first on.

A fair order gives each of n replicas to floor(k/n) or ceil(k/n) of the k ranks left.
"""

from __future__ import annotations

import random
from collections import Counter

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.routing_checks import INDEX
from dsv4.types import ArgumentError, Placement

__all__ = ["make_placement", "rank_dispatch_map", "sglang_dispatch_order"]


def make_placement(physical_to_logical: Tensor, experts: int, *, rank_map: Tensor | None = None, allow_unheld: bool = False) -> Placement:
    """A checked placement of one layer. Looks at the values: on a GPU it waits.

    Args:
        physical_to_logical: [physical], int32 or int64: the logical expert of each slot, -1 for an empty slot.
        experts: logical experts.
        rank_map: [experts], int32 or int64: the replica that this rank uses (a row of `rank_dispatch_map`).
        allow_unheld: whether an expert may be in no slot. Rows routed to it then get id -1.

    Returns:
        Placement on the device of `physical_to_logical`, replicas in ascending order.

    Raises:
        ArgumentError: ids out of range, an expert without a slot, a rank map that names a slot without the expert.
    """
    checks.tensor("physical_to_logical", physical_to_logical, INDEX, ("physical",))
    checks.at_least("experts", experts, 1)
    logical = physical_to_logical.tolist()
    slots: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(logical):
        if not -1 <= expert < experts:
            raise ArgumentError("physical_to_logical", f"expert {expert} in slot {slot}", f"must be from -1 to {experts - 1}")
        if expert >= 0:
            slots[expert].append(slot)
    unheld = [expert for expert, held in enumerate(slots) if not held]
    if unheld and not allow_unheld:
        raise ArgumentError("physical_to_logical", f"no slot for expert {unheld[0]}", "must hold every expert", "Or pass allow_unheld=True")
    if rank_map is not None:
        checks.tensor("rank_map", rank_map, INDEX, (experts,))
        for expert, slot in enumerate(rank_map.tolist()):
            if slot not in (slots[expert] or [-1]):
                raise ArgumentError("rank_map", f"slot {slot} for expert {expert}", f"must be one of its slots, {slots[expert] or [-1]}")
    most = max(1, *(len(held) for held in slots))
    device = physical_to_logical.device
    return Placement(
        physical_to_logical.to(torch.int32, copy=True),
        torch.tensor([held + [-1] * (most - len(held)) for held in slots], dtype=torch.int32, device=device),
        torch.tensor([len(held) for held in slots], dtype=torch.int32, device=device),
        None if rank_map is None else rank_map.to(torch.int32, copy=True),
    )


def rank_dispatch_map(replicas: Tensor, *, physical: int, ranks: int, nodes: int = 1, order: Tensor | None = None) -> Tensor:
    """The replica that each rank uses of each expert, by rules 1 to 4.

    Args:
        replicas: [layers, experts, most replicas], int32 or int64: physical ids, padded with -1.
        physical: physical experts P, a multiple of `ranks` and `nodes`.
        ranks: ranks of the expert-parallel group, a multiple of `nodes`.
        nodes: nodes that the ranks are on, as many ranks each.
        order: [layers, experts, ranks], int32 or int64: rule 4 as indices into an expert's replicas; entries past the ranks left are not
            looked at. None takes the replicas in turn. `sglang_dispatch_order` gives SGLang's.

    Returns:
        int32 [ranks, layers, experts], physical ids on the device of `replicas`; -1 where an expert has no replica.

    Raises:
        ArgumentError: wrong dtypes, shapes or sizes, a replica out of range, an order that is not fair.
    """
    by_expert = _replica_lists(replicas, physical, ranks, nodes)
    layers, experts = replicas.shape[:2]
    orders = None if order is None else checks.tensor("order", order, INDEX, (layers, experts, ranks)).flatten(0, 1).tolist()
    choices = []  # [layers * experts][ranks]
    for index, held in enumerate(by_expert):
        row = [_nearest(held, rank, physical // ranks, physical // nodes, ranks // nodes) for rank in range(ranks)]
        left = [rank for rank in range(ranks) if row[rank] < 0 and held]
        turns = [i % len(held) for i in range(len(left))] if orders is None or not left else orders[index][: len(left)]
        if not _fair(turns, len(held)):
            raise ArgumentError("order", f"{turns} for {len(held)} replicas", "must give each replica to as many ranks, give or take one")
        for rank, turn in zip(left, turns, strict=True):
            row[rank] = held[turn]
        choices.append(row)
    table = torch.tensor(choices, dtype=torch.int32, device=replicas.device).reshape(layers, experts, ranks)
    return table.movedim(-1, 0).contiguous()


def sglang_dispatch_order(replicas: Tensor, *, physical: int, ranks: int, nodes: int = 1, seed: int = 42) -> Tensor:
    """The order that SGLang draws for rule 4: whole copies of the replica list and a sample for the rest, shuffled.

    Args:
        replicas, physical, ranks, nodes: as `rank_dispatch_map`.
        seed: of one `random.Random`, drawn from layer by layer and expert by expert.

    Returns:
        int32 [layers, experts, ranks]; -1 past the ranks that rules 1 to 3 leave.

    Raises:
        ArgumentError: as `rank_dispatch_map`.
    """
    generator = random.Random(seed)
    rows = []
    for held in _replica_lists(replicas, physical, ranks, nodes):
        left = [rank for rank in range(ranks) if _nearest(held, rank, physical // ranks, physical // nodes, ranks // nodes) < 0]
        drawn: list[int] = []
        if held:
            copies, rest = divmod(len(left), len(held))
            drawn = list(range(len(held))) * copies + generator.sample(range(len(held)), rest)
            generator.shuffle(drawn)
        rows.append(drawn + [-1] * (ranks - len(drawn)))
    order = torch.tensor(rows, dtype=torch.int32, device=replicas.device)
    return order.reshape(*replicas.shape[:2], ranks)


def _replica_lists(replicas: Tensor, physical: int, ranks: int, nodes: int) -> list[list[int]]:
    """The valid replicas of each expert of each layer, after checking the sizes."""
    checks.tensor("replicas", replicas, INDEX, ("layers", "experts", "most replicas"))
    for name, value in (("physical", physical), ("ranks", ranks), ("nodes", nodes)):
        checks.at_least(name, value, 1)
    checks.multiple("physical", physical, ranks, "Every rank holds as many physical experts")
    checks.multiple("ranks", ranks, nodes, "Every node has as many ranks")
    if replicas.numel() and int(replicas.max()) >= physical:
        raise ArgumentError("replicas", f"slot {int(replicas.max())}", f"must be below physical, {physical}")
    return [[slot for slot in held if slot >= 0] for held in replicas.flatten(0, 1).tolist()]


def _nearest(held: list[int], rank: int, local: int, node_local: int, node_ranks: int) -> int:
    """Rules 1 to 3, or -1."""
    if len(held) == 1:
        return held[0]
    for slot in held:
        if slot // local == rank:
            return slot
    near = [slot for slot in held if slot // node_local == rank // node_ranks]
    return near[0] if 0 < len(near) < len(held) else -1


def _fair(turns: list[int], replicas: int) -> bool:
    """Whether the turns name replicas that exist, each as often as any other or once more."""
    if not turns:
        return True
    taken = Counter(turns)
    uses = [taken[replica] for replica in range(replicas)]
    return sum(uses) == len(turns) and max(uses) - min(uses) <= 1
