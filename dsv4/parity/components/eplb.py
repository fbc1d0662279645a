"""Contract of load balancing: maps and placements are integers, E0, with every tie decided.

`map_to_physical` has a domain for each algorithm, placements with faults in their tables among them. `rebalance` takes loads at which
greedy algorithms tie: equal, zero, few different values, one hot expert. What `dsv4.placement` builds exists once and has no twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import invariants, routing_rows, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.levels import Level
from dsv4.types import DispatchAlgorithm

KEEPS = (
    "run_to_run",
    "inputs_unchanged",
    "poisoned_output",
    "batch",
    "padding",
    "strides",
    "empty",
    "fullgraph",
    "opcheck",
    "graph_replay",
)
TABLES = {16: 16, 256: 32, 384: 16}  # redundant slots beside so many experts
Options = dict[str, Any]


def table_specs() -> dict[str, st.SearchStrategy[Any]]:
    """What a placement is drawn from."""
    return {
        "rank": st.integers(0, 3),
        "faults": st.booleans(),
        "layout": st.sampled_from(strategies.LAYOUTS),
        "tables": st.integers(0, 3),
    }


def dispatch_options(algorithm: str, shape: tuple[int, int], experts: int, spec: Spec, device: torch.device, words: str) -> Options:
    """`placement`, `algorithm` and what the algorithm draws from, of rows of `shape`."""
    table = routing_rows.placement(experts, TABLES[experts], spec["tables"], device, layout=spec["layout"], faults=spec["faults"])
    options: Options = {"placement": table, "algorithm": algorithm, "rank": spec["rank"]}
    if algorithm == DispatchAlgorithm.DYNAMIC:
        options["words"] = strategies.random_bits(shape, spec["seed"] ^ 1, getattr(torch, words)).to(device)
    if algorithm == DispatchAlgorithm.PROBABILITY:
        source = strategies.generator(spec["seed"] ^ 2)
        uniforms = torch.rand(shape, generator=source) * (torch.rand(shape, generator=source) < 0.7)
        parts = torch.randint(0, 4, (experts, routing_rows.MOST_REPLICAS), generator=source) / 7  # zeros, ties and inexact sums
        options |= {"uniforms": uniforms.to(device), "probabilities": parts.to(device)}
    return options


def _map(algorithm: str, experts: int, k: int, ids: str = "int32", words: str = "int32") -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        given = routing_rows.expert_ids(spec["rows"], k, experts, spec["seed"], getattr(torch, ids))
        options = dispatch_options(algorithm, (spec["rows"], k), experts, spec, device, words)
        table = options.pop("placement")
        return routing_rows.PlacedCall((given.to(device), table), options)

    specs = strategies.specs(rows=strategies.rows(130), **table_specs(), seed=strategies.seeds())
    return Domain(algorithm if ids == "int32" else f"{algorithm}_{ids}", build, specs, why=f"{k} of {experts} experts, ids with holes")


def _map_to_physical() -> Contract:
    domains = (
        _map("static", 16, 1),
        _map("dynamic", 16, 3, words="int64"),
        _map("dynamic", 256, 7, "int64", "int32"),
        _map("row_modulo", 384, 6),
        _map("row_index", 256, 5),
        _map("probability", 16, 4),
        _map("none", 16, 3),
    )
    return Contract(
        "eplb",
        "map_to_physical",
        domains,
        (Output("result", Level.E0, "integers; the probability algorithm adds in fp64 in a stated order"),),
        (*invariants.on("dynamic", *KEEPS), *invariants.on("probability", "strides")),
        Rows((0, "words")),
    )


SIZES: dict[str, Sequence[tuple[int, int, int, int, int]]] = {  # experts, physical, ranks, groups, nodes
    "flat": ((8, 12, 4, 1, 1), (24, 32, 4, 1, 1), (24, 24, 6, 3, 2), (8, 8, 8, 1, 1)),
    "nodes": ((16, 24, 8, 4, 2), (16, 16, 16, 4, 4), (48, 64, 8, 8, 2)),
}
LOADS = ("random", "equal", "few", "zeros", "hot", "falling")


def _loads(name: str, layers: int, experts: int, seed: int) -> Tensor:
    source = strategies.generator(seed)
    drawn = torch.randint(0, 1000, (layers, experts), generator=source).double()
    return {
        "random": drawn / 7,
        "equal": torch.full((layers, experts), 3.0, dtype=torch.float64),
        "few": (drawn / 400).floor(),
        "zeros": torch.zeros(layers, experts, dtype=torch.float64),
        "hot": torch.cat([30 * drawn[:, :1] + 1e5, drawn[:, 1:]], 1),
        "falling": 2.0 ** -torch.arange(experts, dtype=torch.float64).expand(layers, experts) * 2**20,
    }[name]


def _balance(kind: str, distinct: bool) -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        experts, physical, ranks, groups, nodes = spec["sizes"]
        loads = torch.cat([_loads(name, 1, experts, spec["seed"] + number) for number, name in enumerate(spec["loads"])])
        options = {"physical": physical, "ranks": ranks, "groups": groups, "nodes": nodes, "distinct_per_rank": distinct}
        return Call((loads.to(getattr(torch, spec["dtype"])).to(device),), options)

    specs = strategies.specs(
        sizes=st.sampled_from(SIZES[kind]).map(list),
        loads=st.one_of(st.lists(st.sampled_from(LOADS), min_size=1, max_size=3), st.just(list(LOADS))),
        dtype=st.sampled_from(["float32", "float64", "int32", "int64"]),
        seed=st.integers(0, 2**32),
    )
    return Domain(f"{kind}_distinct" if distinct else kind, build, specs, why="ties, zeros, a hot expert")


def _whole_lists(call: Call, name: str, tensor: Tensor) -> Tensor:
    """Replica lists as long as any can be: their own length is that of the longest of all layers."""
    return torch.nn.functional.pad(tensor, (0, call["physical"] - tensor.shape[2]), value=-1) if name == "replicas" else tensor


def _rebalance() -> Contract:
    why = "greedy steps over fp32 numbers, each rounding and tie stated"
    return Contract(
        "eplb",
        "rebalance",
        tuple(_balance(kind, distinct) for kind in SIZES for distinct in (False, True)),
        tuple(Output(name, Level.E0, why) for name in ("physical_to_logical", "replicas", "counts", "duplicates")),
        invariants.on("nodes", "run_to_run", "inputs_unchanged", "poisoned_output", "batch", "strides", "empty"),
        Rows(read=_whole_lists),
        not_claimed=("host work: no operator, no graph", "make_placement, rank_dispatch_map and sglang_dispatch_order exist once"),
    )


CONTRACTS = (_map_to_physical(), _rebalance())
