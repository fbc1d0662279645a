"""The router: the twin of `dsv4.reference.routing`, which has the formulas, roundings and ties.

`route` does a whole step. On CUDA it is one launch that allocates its two results and nothing else, waits for nothing and can be captured;
masks, token ids, words and a `live_rows` on the device may change between replays. The single steps are operators, too. All
but `gate_logits` have the reference's bits. Slots, padding and counters are in `routing_slots`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, routing_checks
from dsv4.fast.routing_slots import (
    append_shared_slots,
    count_experts,
    mask_padding,
    pack_topk,
    remap_home_rank_slots,
)
from dsv4.types import DispatchAlgorithm, Placement, RouteResult, ScalePlacement, SharedSlots

__all__ = [
    "append_shared_slots",
    "count_experts",
    "gate_logits",
    "gate_scores",
    "mask_padding",
    "pack_topk",
    "remap_home_rank_slots",
    "route",
    "route_hash",
    "route_topk",
    "route_weights",
]


def gate_logits(x: Tensor, weight: Tensor, *, impl: str | None = None) -> Tensor:
    """Router logits x W^T.

    Args:
        x: [tokens, hidden], bf16 or fp32: the normalised input of the experts.
        weight: [experts, hidden], bf16 or fp32.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, experts].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    routing_checks.gate(x, weight)
    checks.no_grad(x=x, weight=weight)
    logits: Tensor = torch.ops.dsv4.gate_logits.default(x, weight, impl)
    return logits


def gate_scores(logits: Tensor, *, impl: str | None = None) -> Tensor:
    """Scores sqrt(softplus(logits)): one rounding, after the root.

    Args:
        logits: [tokens, experts], fp32.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, experts], at least 0; NaN where the logit is.

    Raises:
        ArgumentError: a wrong dtype or shape.
    """
    routing_checks.scores("logits", logits, "fp32")
    checks.no_grad(logits=logits)
    scores: Tensor = torch.ops.dsv4.gate_scores.default(logits, impl)
    return scores


def route_topk(
    scores: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    image_mask: Tensor | None = None,
    image_bias: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The experts with the k largest keys scores + bias.

    Args:
        scores: [tokens, experts], fp32.
        k: experts of a token, 1 to min(experts, 32).
        bias: [experts], fp32 or bf16: the correction bias; None is 0.
        image_mask: [tokens], bool: rows that take `image_bias` in the place of `bias`.
        image_bias: [experts], fp32 or bf16. Without a mask every row is text.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, k], in descending key; ties to the lowest id, NaN keys never, -1 where keys are missing.

    Raises:
        ArgumentError: wrong dtypes or shapes, k out of range, a mask without a vision bias.
    """
    routing_checks.scores("scores", scores, "fp32")
    routing_checks.selection(("scores", scores), k, bias, image_mask, image_bias)
    checks.no_grad(scores=scores, bias=bias, image_bias=image_bias)
    ids: Tensor = torch.ops.dsv4.route_topk.default(scores, k, bias, image_mask, image_bias, impl)
    return ids


def route_weights(scores: Tensor, ids: Tensor, *, scale: float = 1.0, epsilon: float = 1e-20, impl: str | None = None) -> Tensor:
    """Weights of the chosen experts: scale * score / (epsilon + sum of the scores).

    Args:
        scores: [tokens, experts], fp32, without the bias.
        ids: [tokens, k], int32 or int64; an id outside 0 to experts - 1 takes no part.
        scale: > 0; 1.0 where another place applies it.
        epsilon: >= 0. V4.1 adds 1e-20; 0.0 is V4's official form.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, k], in the order of the ids; 0 for absent ids and where the sum is 0. NaN or infinite scores follow IEEE arithmetic.

    Raises:
        ArgumentError: wrong dtypes or shapes, scale or epsilon out of range.
    """
    routing_checks.chosen(scores, ids, "fp32")
    routing_checks.scaling(scale, epsilon)
    checks.no_grad(scores=scores)
    weights: Tensor = torch.ops.dsv4.route_weights.default(scores, ids, scale, epsilon, impl)
    return weights


def route_hash(
    scores: Tensor,
    token_ids: Tensor,
    table: Tensor,
    *,
    image_mask: Tensor | None = None,
    image_bias: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The experts that the table gives a token id.

    Args:
        scores: [tokens, experts], fp32: image rows are routed by them.
        token_ids: [tokens], int32 or int64.
        table: [vocabulary, k], int32 or int64: expert ids of each token id.
        image_mask: [tokens], bool: rows that take the k largest keys scores + image_bias.
        image_bias: [experts], fp32 or bf16.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, k], in the table's order. A token id outside the vocabulary gives -1 in all slots, an entry outside 0 to
        experts - 1 in its own.

    Raises:
        ArgumentError: wrong dtypes or shapes, k out of range, a mask without a vision bias.
    """
    routing_checks.scores("scores", scores, "fp32")
    routing_checks.hashing(("scores", scores), token_ids, table)
    routing_checks.selection(("scores", scores), table.shape[1], None, image_mask, image_bias)
    checks.no_grad(scores=scores, image_bias=image_bias)
    ids: Tensor = torch.ops.dsv4.route_hash.default(scores, token_ids, table, image_mask, image_bias, impl)
    return ids


def route(
    logits: Tensor,
    k: int,
    *,
    scale: float,
    epsilon: float = 1e-20,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_mask: Tensor | None = None,
    token_ids: Tensor | None = None,
    image_token_id: int | None = None,
    table: Tensor | None = None,
    placement: Placement | None = None,
    algorithm: DispatchAlgorithm | str = DispatchAlgorithm.NONE,
    words: Tensor | None = None,
    uniforms: Tensor | None = None,
    probabilities: Tensor | None = None,
    ranks: int = 1,
    rank: int = 0,
    shared: int = 0,
    shared_slots: SharedSlots | str = SharedSlots.NONE,
    shared_copies: int = 1,
    scale_placement: ScalePlacement | str = ScalePlacement.ROUTER,
    live_rows: int | Tensor | None = None,
    counts: Tensor | None = None,
    impl: str | None = None,
) -> RouteResult:
    """From logits to the slots that the experts' kernel takes.

    Args:
        logits: [tokens, experts], fp32.
        k: routed experts of a token.
        scale, epsilon: as `route_weights`; `scale_placement` says who multiplies by scale.
        bias, image_bias: as `route_topk`.
        image_mask: [tokens], bool; or instead `image_token_id`: rows of `token_ids` that equal it are image rows. Without token ids: none.
        token_ids: [tokens], int32 or int64.
        table: [vocabulary, k] of a layer that is routed by token id; such a layer has no bias.
        placement, algorithm, words, uniforms, probabilities: as `map_to_physical`.
        ranks, rank: the expert-parallel group, and the rank that these rows live on.
        shared, shared_slots: shared experts as slots, and where their ids lie.
        shared_copies: ranks that each add the shared experts, with global ids.
        live_rows: rows before the padding; None is all of them.
        counts: [physical], int32: load counters, added to in place.
        impl: a backend by name, else the device's default.

    Returns:
        RouteResult(ids int32 and weights fp32, [tokens, k + shared]; counts, or None).

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers; arguments that do not go together.
    """
    layout = routing_checks.shared(shared, shared_slots, shared_copies)
    where = routing_checks.scale_placement(scale_placement)
    routing_checks.scaling(scale, epsilon)
    physical = routing_checks.route(
        logits, k, floats="fp32", bias=bias, image_bias=image_bias, image_mask=image_mask, token_ids=token_ids,
        image_token_id=image_token_id, table=table, placement=placement, layout=layout, ranks=ranks, rank=rank, live=live_rows,
        counts=counts,
    )  # fmt: skip
    chosen = routing_checks.dispatch(
        ("logits", logits), k, placement, algorithm, rank=rank, words=words, uniforms=uniforms, probabilities=probabilities
    )
    checks.no_grad(logits=logits, bias=bias, image_bias=image_bias)
    if counts is not None:
        checks.writable("counts", counts)
    if token_ids is None:
        image_token_id = None
    if image_mask is None and image_token_id is None:
        image_bias = None
    tables = (None, None, None) if placement is None else (placement.replicas, placement.counts, placement.rank_map)
    factors = (scale, 1.0) if where is ScalePlacement.ROUTER else (1.0, scale)  # the router's, and what comes after it
    live, live_device = (0, live_rows) if isinstance(live_rows, Tensor) else (logits.shape[0] if live_rows is None else live_rows, None)
    ids, weights = torch.ops.dsv4.route.default(
        logits, k, *factors, epsilon, bias, image_bias, image_mask, token_ids, image_token_id, table, *tables, str(chosen),
        words, uniforms, probabilities, physical, ranks, rank, shared, layout is SharedSlots.HOME_RANK, shared_copies, live, live_device,
        counts, impl,
    )  # fmt: skip
    return RouteResult(ids, weights, counts)
