"""The router: which experts a token goes to, and with which weights.

For a token x and the gate's weight W, with E experts, k of them chosen,

    z = x W^T                                             logits                       (1)
    s = sqrt(softplus(z)),  softplus(z) = z if z > 20 else log(1 + e^z)    scores       (2)
    c = s + b                                             keys                         (3)
    ids = the k largest keys, or table[token]                                          (4)
    u_j = s[ids_j] / (epsilon + sum over i of s[ids_i])   without the bias             (5)
    w_j = f u_j                                           f the routed scaling factor  (6)

x, W bf16; the rest fp32. b is the correction bias, on image rows the vision bias (V4.1). The first layers of V4 are routed by a table over
token ids and have no bias; image rows, whose ids are placeholders, use the largest keys there, too.

Roundings: (1), (2), (3), the sum of (5), its quotient and (6) are one step each: evaluated in fp64, rounded once to fp32. The sum is
added in fp64 from left to right, beginning with epsilon. f and epsilon are fp32 constants. A sum of 0 (V4's official epsilon is 0.0)
gives weights of 0.

Ties: (4) takes slots in descending key; equal keys, as -0 and 0 are, go to the lowest id; a NaN key is never chosen, and slots without a
key are -1 with weight 0. Any id or token id out of range counts as -1 and nothing is read for it.

`route` is the chain: (2) to (6), then the map to physical experts (`eplb`), padding, counters, shared slots (`routing_slots`), and padding
again. Source: spec M 1.3 to 1.10.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4 import routing_checks
from dsv4.formats import fp32
from dsv4.reference.eplb import map_to_physical
from dsv4.reference.numerics import float_dtypes, fp32_step
from dsv4.reference.routing_slots import (
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


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits, by (1).

    Args:
        x: [tokens, hidden], bf16 or fp32: the normalised input of the experts.
        weight: [experts, hidden], bf16 or fp32.

    Returns:
        fp32 [tokens, experts].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    routing_checks.gate(x, weight)
    return fp32_step(lambda x, weight: x @ weight.T + 0.0, x, weight)  # a sum of 0 is +0: BLAS may begin with a product of -0


def gate_scores(logits: Tensor) -> Tensor:
    """Scores of the logits, by (2): one rounding, after the root.

    Args:
        logits: [tokens, experts], fp32.

    Returns:
        fp32 [tokens, experts], at least 0; NaN where the logit is.

    Raises:
        ArgumentError: a wrong dtype or shape.
    """
    routing_checks.scores("logits", logits, float_dtypes())
    return fp32_step(lambda z: softplus(z, beta=1.0, threshold=20.0).sqrt(), logits)


def route_topk(
    scores: Tensor, k: int, *, bias: Tensor | None = None, image_mask: Tensor | None = None, image_bias: Tensor | None = None
) -> Tensor:
    """The experts with the k largest keys, by (3) and (4).

    Args:
        scores: [tokens, experts], fp32.
        k: experts of a token, 1 to min(experts, 32).
        bias: [experts], fp32 or bf16: the correction bias b; None is 0.
        image_mask: [tokens], bool: rows that take `image_bias` in the place of `bias`.
        image_bias: [experts], fp32 or bf16. Without a mask every row is text.

    Returns:
        int32 [tokens, k], in descending key; ties to the lowest id, NaN keys never, -1 where keys are missing.

    Raises:
        ArgumentError: wrong dtypes or shapes, k out of range, a mask without a vision bias.
    """
    routing_checks.scores("scores", scores, float_dtypes())
    routing_checks.selection(("scores", scores), k, bias, image_mask, image_bias)
    row_bias = torch.zeros_like(scores[:1]) if bias is None else bias[None]  # [1 or tokens, experts]
    if image_mask is not None and image_bias is not None:
        row_bias = torch.where(image_mask[:, None], image_bias.float(), row_bias.float())
    keys = fp32_step(lambda s, b: s + b, scores, row_bias)  # [tokens, experts]
    return _largest(keys, k)


def route_weights(scores: Tensor, ids: Tensor, *, scale: float = 1.0, epsilon: float = 1e-20) -> Tensor:
    """Weights of the chosen experts, by (5) and (6).

    Args:
        scores: [tokens, experts], fp32, without the bias.
        ids: [tokens, k], int32 or int64; an id outside 0 to experts - 1 takes no part.
        scale: f, > 0; 1.0 where another place applies it.
        epsilon: >= 0. V4.1 adds 1e-20; 0.0 is V4's official form.

    Returns:
        fp32 [tokens, k], in the order of the ids; 0 for absent ids and where the sum is 0. NaN or infinite scores follow IEEE arithmetic.

    Raises:
        ArgumentError: wrong dtypes or shapes, scale or epsilon out of range.

    Notes:
        Always normalised. The official V4.1 code leaves k = 1 as it is; no released model has it.
    """
    routing_checks.chosen(scores, ids, float_dtypes())
    routing_checks.scaling(scale, epsilon)
    experts = scores.shape[1]
    present = (ids >= 0) & (ids < experts)
    chosen = torch.where(present, scores.gather(1, ids.clamp(0, experts - 1).long()), 0.0)  # [tokens, k]
    start = torch.full_like(chosen[:, 0], fp32(epsilon), dtype=torch.float64)
    total = fp32_step(lambda s: reduce(torch.add, s.unbind(1), start)[:, None], chosen)  # [tokens, 1]
    quotient = fp32_step(lambda s, t: torch.where(t == 0, 0.0, s / t), chosen, total)
    factor = fp32(scale)
    return torch.where(present, fp32_step(lambda u: factor * u, quotient), 0.0)


def route_hash(
    scores: Tensor, token_ids: Tensor, table: Tensor, *, image_mask: Tensor | None = None, image_bias: Tensor | None = None
) -> Tensor:
    """The experts that the table gives a token id, by the second form of (4).

    Args:
        scores: [tokens, experts], fp32: image rows are routed by them.
        token_ids: [tokens], int32 or int64.
        table: [vocabulary, k], int32 or int64: expert ids of each token id.
        image_mask: [tokens], bool: rows that take the k largest keys scores + image_bias.
        image_bias: [experts], fp32 or bf16.

    Returns:
        int32 [tokens, k], in the table's order. A token id outside the vocabulary gives -1 in all slots, an entry outside 0 to
        experts - 1 in its own.

    Raises:
        ArgumentError: wrong dtypes or shapes, k out of range, a mask without a vision bias.
    """
    routing_checks.scores("scores", scores, float_dtypes())
    routing_checks.hashing(("scores", scores), token_ids, table)
    vocabulary, k = table.shape
    routing_checks.selection(("scores", scores), k, None, image_mask, image_bias)
    known = (token_ids >= 0) & (token_ids < vocabulary)
    ids = torch.full((scores.shape[0], k), -1, device=scores.device)
    ids[known] = table[token_ids[known].long()].long()
    if image_mask is not None:
        ids = torch.where(image_mask[:, None], route_topk(scores, k, bias=image_bias), ids)
    return torch.where((ids >= 0) & (ids < scores.shape[1]), ids, -1).to(torch.int32)


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
        counts: [physical], int32: load counters.

    Returns:
        RouteResult(ids int32 and weights fp32, [tokens, k + shared]; counts with the live rows' physical routed experts added, or None).

    Raises:
        ArgumentError: wrong dtypes, shapes or numbers; arguments that do not go together.
    """
    layout = routing_checks.shared(shared, shared_slots, shared_copies)
    where = routing_checks.scale_placement(scale_placement)
    routing_checks.scaling(scale, epsilon)
    physical = routing_checks.route(
        logits, k, floats=float_dtypes(), bias=bias, image_bias=image_bias, image_mask=image_mask, token_ids=token_ids,
        image_token_id=image_token_id, table=table, placement=placement, layout=layout, ranks=ranks, rank=rank, live=live_rows,
        counts=counts,
    )  # fmt: skip
    routing_checks.dispatch(
        ("logits", logits), k, placement, algorithm, rank=rank, words=words, uniforms=uniforms, probabilities=probabilities
    )

    scores = gate_scores(logits)
    if image_token_id is not None and token_ids is not None:
        image_mask = token_ids == image_token_id
    if table is not None and token_ids is not None:
        ids = route_hash(scores, token_ids, table, image_mask=image_mask, image_bias=image_bias)
    else:
        ids = route_topk(scores, k, bias=bias, image_mask=image_mask, image_bias=image_bias)
    weights = route_weights(scores, ids, scale=scale if where is ScalePlacement.ROUTER else 1.0, epsilon=epsilon)
    if placement is not None:
        ids = map_to_physical(ids, placement, algorithm, rank=rank, words=words, uniforms=uniforms, probabilities=probabilities)
    live = logits.shape[0] if live_rows is None else live_rows
    routed = mask_padding(ids, weights, live)
    if counts is not None:
        counts = count_experts(routed.ids, counts)
    if layout is SharedSlots.GLOBAL:
        routed = append_shared_slots(*routed, shared, experts=physical, scale=scale, scale_placement=where, copies=shared_copies)
    elif layout is SharedSlots.HOME_RANK:
        routed = remap_home_rank_slots(*routed, shared, experts=physical, ranks=ranks, rank=rank, scale=scale, scale_placement=where)
    return RouteResult(*mask_padding(*routed, live), counts)


def _largest(keys: Tensor, k: int) -> Tensor:
    """(4): a stable descending sort in which NaN comes after minus infinity."""
    absent = keys.isnan()
    # adding 0 turns -0 into 0: a radix sort would tell them apart
    order = torch.sort(torch.where(absent, -torch.inf, keys + 0.0), dim=1, descending=True, stable=True).indices
    last = torch.sort(absent.gather(1, order).byte(), dim=1, stable=True).indices
    picks = order.gather(1, last)[:, :k]  # [tokens, k]
    return torch.where(absent.gather(1, picks), -1, picks).to(torch.int32)
