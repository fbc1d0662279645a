"""Argument checks of `routing` and `eplb`, shared by both implementations: dtypes, shapes and host values, never what a tensor holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dsv4 import checks
from dsv4.types import ArgumentError, DispatchAlgorithm, Placement, ScalePlacement, SharedSlots

MOST_SLOTS = 32  # of a row: what the kernels' selection holds
INDEX = ("int32", "int64")
SMALLEST_NORMAL = 2.0**-126
LARGEST_ID = 2**31 - 1
LARGEST_FP32 = 3.4028234663852886e38

Floats = str | Sequence[str]  # "fp32"; the reference also takes fp64 where its roundings are off


def gate(x: Tensor, weight: Tensor) -> None:
    """Arguments of `gate_logits`."""
    checks.tensor("x", x, ("bf16", "fp32"), ("tokens", "hidden"))
    checks.tensor("weight", weight, ("bf16", "fp32"), ("experts", x.shape[1]))
    checks.same_device("weight", weight, "x", x)


def scores(name: str, value: Tensor, floats: Floats) -> None:
    """A [tokens, experts] tensor of at least one expert."""
    checks.tensor(name, value, floats, ("tokens", "experts"))
    if value.shape[1] < 1:
        raise ArgumentError(name, f"shape {list(value.shape)}", "must have at least one expert")


def selection(scored: tuple[str, Tensor], k: int, bias: Tensor | None, image_mask: Tensor | None, image_bias: Tensor | None) -> None:
    """Arguments of a top-k over `scored`, a name and its [tokens, experts] tensor."""
    name, value = scored
    tokens, experts = value.shape
    checks.at_least("k", k, 1)
    if k > experts:
        raise ArgumentError("k", str(k), f"must be at most the number of experts, {experts}")
    checks.at_most("k", k, MOST_SLOTS)
    for label, vector in (("bias", bias), ("image_bias", image_bias)):
        if vector is not None:
            checks.tensor(label, vector, ("fp32", "bf16"), (experts,))
            checks.same_device(label, vector, name, value)
    if image_mask is not None:
        checks.tensor("image_mask", image_mask, "bool", (tokens,))
        checks.same_device("image_mask", image_mask, name, value)
        if image_bias is None:
            raise ArgumentError("image_bias", "None", "must be given with image_mask", "Without a vision bias leave image_mask out")


def hashing(scored: tuple[str, Tensor], token_ids: Tensor | None, table: Tensor) -> None:
    """Arguments of a routing by table."""
    name, value = scored
    if token_ids is None:
        raise ArgumentError("token_ids", "None", "must be given with table")
    checks.tensor("token_ids", token_ids, INDEX, (value.shape[0],))
    checks.same_device("token_ids", token_ids, name, value)
    checks.tensor("table", table, INDEX, ("vocabulary", "k"))
    checks.same_device("table", table, name, value)


def chosen(scored: Tensor, ids: Tensor, floats: Floats) -> None:
    """Scores and the ids to take from them, at least one a row."""
    scores("scores", scored, floats)
    checks.tensor("ids", ids, INDEX, (scored.shape[0], "k"))
    if ids.shape[1] < 1:
        raise ArgumentError("ids", f"shape {list(ids.shape)}", "must have at least one slot")
    checks.same_device("ids", ids, "scores", scored)


def scaling(scale: float, epsilon: float = 0.0) -> None:
    """The routed scaling factor and the epsilon of the sum."""
    checks.at_least("scale", scale, SMALLEST_NORMAL)
    if not scale <= LARGEST_FP32:
        raise ArgumentError("scale", repr(scale), "must be a positive, normal fp32 number")
    checks.at_least("epsilon", epsilon, 0.0)
    if not epsilon <= LARGEST_FP32:
        raise ArgumentError("epsilon", repr(epsilon), "must be a finite fp32 number, at least 0")


def slots(ids: Tensor, weights: Tensor, floats: Floats) -> None:
    """Ids and their weights, [tokens, slots] both."""
    checks.tensor("ids", ids, INDEX, ("tokens", "slots"))
    checks.tensor("weights", weights, floats, tuple(ids.shape))
    checks.same_device("weights", weights, "ids", ids)


def rank_layout(experts: int, ranks: int, rank: int, name: str = "experts") -> None:
    """`experts` (or whatever `name` says) in equal parts on `ranks`, and one rank of them."""
    checks.at_least(name, experts, 1)
    checks.at_least("ranks", ranks, 1)
    checks.multiple(name, experts, ranks, "Every rank holds as many physical experts")
    checks.at_least("rank", rank, 0)
    checks.at_most("rank", rank, ranks - 1)


def home_rank(experts: int, shared: int, ranks: int, rank: int) -> None:
    """Ids of `experts` in equal parts on `ranks`, each part with its shared slots behind it, as int32."""
    checks.at_least("shared", shared, 0)
    rank_layout(experts, ranks, rank)
    checks.at_most("experts", experts, LARGEST_ID - ranks * shared)


def id_space(name: str, experts: int, shared: int) -> None:
    """Ids of `experts` and of the shared slots behind them, as int32."""
    checks.at_least(name, experts, 1)
    checks.at_least("shared", shared, 0)
    checks.at_most(name, experts, LARGEST_ID - shared)


def shared(count: int, layout: str, copies: int) -> SharedSlots:
    """Shared experts as slots: how many, where, and added by how many ranks."""
    where = checks.choice("shared_slots", layout, SharedSlots)
    checks.at_least("shared", count, 0)
    checks.at_least("shared_copies", copies, 1)
    if (count > 0) != (where is not SharedSlots.NONE):
        raise ArgumentError("shared", str(count), f"does not go with shared_slots {str(where)!r}", "Give both or neither")
    if copies > 1 and where is not SharedSlots.GLOBAL:
        raise ArgumentError("shared_copies", str(copies), "is for shared_slots 'global', where several ranks add the shared expert")
    return where


def dispatch(
    rows: tuple[str, Tensor],
    k: int,
    placement: Placement | None,
    algorithm: str,
    *,
    rank: int,
    words: Tensor | None,
    uniforms: Tensor | None,
    probabilities: Tensor | None,
) -> DispatchAlgorithm:
    """Arguments of a map from logical to physical ids; `rows` is the name of a tensor and the tensor, whose first dimension is tokens."""
    name, value = rows
    chosen = checks.choice("algorithm", algorithm, DispatchAlgorithm)
    checks.at_least("rank", rank, 0)
    if placement is None:
        if chosen is not DispatchAlgorithm.NONE:
            raise ArgumentError("placement", "None", f"algorithm {str(chosen)!r} needs one", "make_placement builds it")
        return chosen
    placed(placement, name, value)
    needs = {
        DispatchAlgorithm.STATIC: ("placement.rank_map", placement.rank_map, "int32", placement.counts.shape),
        DispatchAlgorithm.DYNAMIC: ("words", words, INDEX, (value.shape[0], k)),
        DispatchAlgorithm.PROBABILITY: ("uniforms", uniforms, "fp32", (value.shape[0], k)),
    }
    required = [needs[chosen]] if chosen in needs else []
    if chosen is DispatchAlgorithm.PROBABILITY:
        required.append(("probabilities", probabilities, "fp32", placement.replicas.shape))
    for label, tensor, dtypes, shape in required:
        if tensor is None:
            raise ArgumentError(label, "None", f"algorithm {str(chosen)!r} needs it")
        checks.tensor(label, tensor, dtypes, tuple(shape))
        checks.same_device(label, tensor, name, value)
    return chosen


def placed(placement: Placement | None, name: str, value: Tensor) -> None:
    """A placement on the device of a tensor, which has a name."""
    if not isinstance(placement, Placement):
        raise ArgumentError("placement", f"a {type(placement).__name__}", "must be a Placement", "make_placement builds it")
    checks.tensor("placement.physical_to_logical", placement.physical_to_logical, "int32", ("physical",))
    checks.tensor("placement.counts", placement.counts, "int32", ("experts",))
    checks.tensor("placement.replicas", placement.replicas, "int32", (placement.counts.shape[0], "most replicas"))
    for label in ("physical_to_logical", "replicas", "counts"):
        checks.same_device(f"placement.{label}", getattr(placement, label), name, value)
    if placement.replicas.shape[1] < 1 or placement.counts.shape[0] < 1:
        raise ArgumentError(
            "placement.replicas", f"shape {list(placement.replicas.shape)}", "must have at least one expert and one replica"
        )


def image_rows(image_mask: Tensor | None, image_token_id: int | None, image_bias: Tensor | None) -> None:
    """How a routing step learns which rows are image rows."""
    if image_token_id is None:
        return
    checks.at_least("image_token_id", image_token_id, 0)
    if image_mask is not None:
        raise ArgumentError(
            "image_token_id", str(image_token_id), "must be None where image_mask is given", "Both say which rows are image rows"
        )
    if image_bias is None:
        raise ArgumentError("image_bias", "None", "must be given with image_token_id", "Without a vision bias leave image_token_id out")


def route(
    logits: Tensor,
    k: int,
    *,
    floats: Floats,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image_mask: Tensor | None,
    token_ids: Tensor | None,
    image_token_id: int | None,
    table: Tensor | None,
    placement: Placement | None,
    layout: SharedSlots,
    ranks: int,
    rank: int,
    live: int | Tensor | None,
    counts: Tensor | None,
) -> int:
    """Arguments of `route` that the steps do not check themselves, and the number of physical experts."""
    scores("logits", logits, floats)
    selection(("logits", logits), k, bias, image_mask, image_bias)
    image_rows(image_mask, image_token_id, image_bias)
    if token_ids is not None:
        checks.tensor("token_ids", token_ids, INDEX, (logits.shape[0],))
        checks.same_device("token_ids", token_ids, "logits", logits)
    if table is not None:
        hashing(("logits", logits), token_ids, table)
        checks.tensor("table", table, INDEX, ("vocabulary", k))
        if bias is not None:
            raise ArgumentError("bias", "a tensor", "must be None where table is given", "Hash layers select by token, not by score")
    if placement is not None:
        placed(placement, "logits", logits)
        if placement.counts.shape[0] != logits.shape[1]:
            raise ArgumentError("placement", f"{placement.counts.shape[0]} logical experts", f"logits have {logits.shape[1]}")
    physical = logits.shape[1] if placement is None else placement.physical_to_logical.shape[0]
    rank_layout(physical, ranks if layout is SharedSlots.HOME_RANK else 1, rank if layout is SharedSlots.HOME_RANK else 0)
    if live is not None:
        checks.live_rows(live, logits.shape[0], "logits", logits)
    if counts is not None:
        checks.tensor("counts", counts, "int32", (physical,))
        checks.same_device("counts", counts, "logits", logits)
    return physical


def rebalancing(loads: Tensor, physical: int, ranks: int, groups: int, nodes: int, distinct: bool) -> None:
    """Arguments of `rebalance`, sizes first."""
    checks.tensor("loads", loads, ("fp32", "fp64", "int32", "int64"), ("layers", "experts"))
    experts = loads.shape[1]
    checks.at_least("loads", experts, 1)
    checks.at_least("physical", physical, experts)
    for name, value in (("ranks", ranks), ("groups", groups), ("nodes", nodes)):
        checks.at_least(name, value, 1)
    checks.multiple("physical", physical, ranks, "Every rank holds as many physical experts")
    if groups % nodes:
        nodes = 1
    else:
        checks.multiple("loads", experts, groups, "It counts experts: every group has as many")
        checks.multiple("ranks", ranks, nodes, "Every node has as many ranks")
    if distinct and physical // ranks > experts // nodes:
        limit = f"a rank of {physical // ranks} slots cannot hold as many different experts of the {experts // nodes} on its node"
        raise ArgumentError("distinct_per_rank", "True", limit, "Use more ranks or fewer physical experts")


def load_values(loads: Tensor) -> None:
    """Loads are counts: finite and not negative. Looks at the values: rebalancing is host work."""
    if loads.numel() and not (bool((loads >= 0).all()) and math.isfinite(float(loads.max())) and float(loads.sum()) <= LARGEST_FP32):
        raise ArgumentError("loads", "a negative, infinite or NaN load", "must be finite fp32 numbers, at least 0")


def scale_placement(value: str) -> ScalePlacement:
    """The member that a word names."""
    return checks.choice("scale_placement", value, ScalePlacement)
