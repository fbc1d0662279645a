"""Wrong load balancing, half of it out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant
from dsv4.reference import eplb as right
from dsv4.types import Placement, Rebalanced


def _twice(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    once = right.map_to_physical(ids, placement, algorithm, **options)
    again = right.map_to_physical(once, placement, algorithm, **options)
    return torch.where(once < placement.counts.shape[0], again, once)


def _minus_one_is_the_last(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    return right.map_to_physical(torch.where(ids == -1, placement.counts.shape[0] - 1, ids), placement, algorithm, **options)


def _unheld_is_the_last_slot(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    slots = right.map_to_physical(ids, placement, algorithm, **options)
    known = (ids >= 0) & (ids < placement.counts.shape[0])
    return torch.where(known & (slots == -1), placement.physical_to_logical.shape[0] - 1, slots).to(torch.int32)


def _slots_unbounded(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    """Table entries are taken for slots whatever they are."""
    more = placement.physical_to_logical.new_zeros(2**16)
    return right.map_to_physical(ids, placement._replace(physical_to_logical=more), algorithm, **options)


def _no_prime(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    if algorithm != "row_modulo":
        return right.map_to_physical(ids, placement, algorithm, **options)
    row = torch.arange(ids.shape[0], device=ids.device)[:, None].expand(ids.shape)
    return right.map_to_physical(ids, placement, "dynamic", words=(row + options["rank"]).contiguous())


def _rank_ignored(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    return right.map_to_physical(ids, placement, algorithm, **{**options, "rank": 0})


def _whole_word(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    """The word taken as it is, not its lower half."""
    if algorithm != "dynamic":
        return right.map_to_physical(ids, placement, algorithm, **options)
    count = placement.counts[ids.clamp(0, placement.counts.shape[0] - 1).long()].clamp(1, placement.replicas.shape[1]).long()
    return right.map_to_physical(ids, placement, algorithm, **{**options, "words": options["words"].long() % count})


def _bound_inclusive(ids: Tensor, placement: Placement, algorithm: str, **options: Any) -> Tensor:
    """A replica of weight 0 is drawn where the uniform is 0."""
    if algorithm == "probability":
        options["uniforms"] = (options["uniforms"].double() - 2.0**-40).float()
    return right.map_to_physical(ids, placement, algorithm, **options)


def _balanced(change: Callable[[Tensor], Tensor]) -> Callable[..., Rebalanced]:
    return lambda loads, **options: right.rebalance(change(loads), **options)


def _later_first(loads: Tensor) -> Tensor:
    """Ties to the larger id: an expert further on counts for a little more."""
    return loads.double() * (1 + 2.0**-20 * torch.arange(loads.shape[1], device=loads.device)) + 2.0**-40 * torch.arange(
        loads.shape[1], device=loads.device
    )


def _duplicates_kept(loads: Tensor, *, distinct_per_rank: bool = False, **options: Any) -> Rebalanced:
    return right.rebalance(loads, **options)


def _duplicates_unreported(loads: Tensor, **options: Any) -> Rebalanced:
    result = right.rebalance(loads, **options)
    return result._replace(duplicates=torch.zeros_like(result.duplicates))


def _nodes_ignored(loads: Tensor, **options: Any) -> Rebalanced:
    return right.rebalance(loads, **{**options, "groups": 1, "nodes": 1})


def _logical_slots(loads: Tensor, **options: Any) -> Rebalanced:
    """Replica lists as if every expert had one slot in order, and the redundant ones lay behind."""
    result = right.rebalance(loads, **options)
    order = result.physical_to_logical.argsort(dim=1, stable=True).argsort(dim=1)
    moved = torch.where(
        result.replicas >= 0, order[:, None].expand(-1, loads.shape[1], -1).gather(2, result.replicas.clamp(min=0).long()), -1
    )
    return result._replace(replicas=moved.to(torch.int32))


def _first_layer(loads: Tensor, **options: Any) -> Rebalanced:
    return right.rebalance(loads[:1].expand(loads.shape), **options)


def _mutant(number: int, function: str, call: Callable[..., Any], fault: str, source: str = "") -> Mutant:
    return Mutant(f"eplb-{number:02}", "eplb", function, call, fault, source)


MUTANTS = (
    _mutant(1, "map_to_physical", _twice, "logical ids mapped twice", "EP-01"),
    _mutant(2, "map_to_physical", _minus_one_is_the_last, "-1 read as the last expert", "EP-05"),
    _mutant(3, "map_to_physical", _unheld_is_the_last_slot, "an expert that nobody holds goes to the last slot", "EP-05"),
    _mutant(4, "map_to_physical", _slots_unbounded, "slots that do not exist", "EP-03"),
    _mutant(5, "map_to_physical", _no_prime, "rows counted without the prime stride"),
    _mutant(6, "map_to_physical", _rank_ignored, "every rank starts at the same replica"),
    _mutant(7, "map_to_physical", _whole_word, "the whole random word, not its lower half"),
    _mutant(8, "map_to_physical", _bound_inclusive, "a replica of probability 0 is drawn"),
    _mutant(9, "rebalance", _balanced(_later_first), "ties to the larger id: an unstable sort"),
    _mutant(10, "rebalance", _balanced(lambda loads: loads.to(torch.bfloat16).float()), "loads in bf16"),
    _mutant(11, "rebalance", _duplicates_kept, "an expert twice on a rank", "EP-04"),
    _mutant(12, "rebalance", _duplicates_unreported, "an expert twice on a rank, not reported", "EP-04"),
    _mutant(13, "rebalance", _nodes_ignored, "groups and nodes ignored"),
    _mutant(14, "rebalance", _logical_slots, "replica lists of another numbering", "EP-03"),
    _mutant(15, "rebalance", _first_layer, "every layer gets the first one's placement"),
)
