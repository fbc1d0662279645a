"""Wrong routers, half of them out of public bug reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4.parity.mutants import Mutant
from dsv4.reference import eplb
from dsv4.reference import routing as right
from dsv4.types import Routed, RouteResult, ScalePlacement


def _bf16_sums(x: Tensor, weight: Tensor) -> Tensor:
    """Partial sums of 128 in bf16."""
    parts = [(a.double() @ b.double().T).bfloat16() for a, b in zip(x.split(128, 1), weight.split(128, 1), strict=True)]
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.float()


def _short(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.bfloat16 else (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _tf32(x: Tensor, weight: Tensor) -> Tensor:
    return right.gate_logits(_short(x), _short(weight))


def _tail_of_k_dropped(x: Tensor, weight: Tensor) -> Tensor:
    whole = max(x.shape[1] // 64 * 64, 1)
    return right.gate_logits(x[:, :whole], weight[:, :whole])


def _sigmoid(logits: Tensor) -> Tensor:
    return logits.double().sigmoid().float()


def _log_of_one_plus(logits: Tensor) -> Tensor:
    return torch.where(logits > 20, logits, (1 + logits.exp()).log()).sqrt()


def _no_threshold(logits: Tensor) -> Tensor:
    return torch.log1p(logits.double().exp()).float().sqrt()


def _rounded_between(logits: Tensor) -> Tensor:
    """softplus rounded to fp32 before the root."""
    return softplus(logits.double()).float().double().sqrt().float()


def _text_bias_alone(scores: Tensor, k: int, *, bias: Tensor | None = None, **_: Any) -> Tensor:
    return right.route_topk(scores, k, bias=bias)


def _ties_to_the_larger(scores: Tensor, k: int, **options: Any) -> Tensor:
    last = scores.shape[1] - 1
    turned = {name: value if name == "image_mask" or value is None else value.flip(0) for name, value in options.items()}
    ids = right.route_topk(scores.flip(1), k, **turned)
    return torch.where(ids >= 0, last - ids, ids).to(torch.int32)


def _zero_bias(scores: Tensor, k: int, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    return right.route_topk(scores, k, bias=None if bias is None else torch.zeros_like(bias), **options)


def _nan_first(scores: Tensor, k: int, **options: Any) -> Tensor:
    return right.route_topk(scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf), k, **options)


def _signed_zeros(scores: Tensor, k: int, **options: Any) -> Tensor:
    return right.route_topk(torch.where((scores == 0) & scores.signbit(), -(2.0**-149), scores), k, **options)


def _bias_in_bf16(scores: Tensor, k: int, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    return right.route_topk(scores, k, bias=None if bias is None else bias.bfloat16(), **options)


def _stale() -> Callable[..., Tensor]:
    slots: list[Tensor] = []

    def topk(scores: Tensor, k: int, **options: Any) -> Tensor:
        """Slots without a key keep what the last launch left there."""
        ids = right.route_topk(scores, k, **options)
        old = slots[-1] if slots and slots[-1].shape == ids.shape else ids
        slots.append(ids)
        return torch.where(ids >= 0, ids, old)

    return topk


def _no_epsilon(scores: Tensor, ids: Tensor, *, scale: float = 1.0, epsilon: float = 1e-20) -> Tensor:
    return right.route_weights(scores, ids, scale=scale, epsilon=0.0)


def _reciprocal(scores: Tensor, ids: Tensor, *, scale: float = 1.0, epsilon: float = 1e-20) -> Tensor:
    present = (ids >= 0) & (ids < scores.shape[1])
    chosen = torch.where(present, scores.gather(1, ids.clamp(0, scores.shape[1] - 1).long()), 0.0)
    total = (chosen.double().sum(1, keepdim=True) + epsilon).float()
    return torch.where(present & (total != 0), chosen * (scale / total), 0.0)


def _minus_one_is_the_last(scores: Tensor, ids: Tensor, **options: Any) -> Tensor:
    return right.route_weights(scores, torch.where(ids == -1, scores.shape[1] - 1, ids), **options)


def _one_expert_as_it_is(scores: Tensor, ids: Tensor, **options: Any) -> Tensor:
    weights = right.route_weights(scores, ids, **options)
    return weights if ids.shape[1] > 1 else scores.gather(1, ids.clamp(0, scores.shape[1] - 1).long()) * options["scale"]


def _token_unbounded(scores: Tensor, token_ids: Tensor, table: Tensor, **options: Any) -> Tensor:
    return right.route_hash(scores, token_ids % table.shape[0], table, **options)


def _entry_unbounded(scores: Tensor, token_ids: Tensor, table: Tensor, **options: Any) -> Tensor:
    return right.route_hash(scores, token_ids, table % scores.shape[1], **options)


def _images_by_token(scores: Tensor, token_ids: Tensor, table: Tensor, **_: Any) -> Tensor:
    return right.route_hash(scores, token_ids, table)


def _shared_weight_not_undone(ids: Tensor, weights: Tensor, shared: int, *, scale: float = 1.0, **options: Any) -> Routed:
    return right.append_shared_slots(ids, weights, shared, **options)


def _shared_weight_scaled(ids: Tensor, weights: Tensor, shared: int, **options: Any) -> Routed:
    return right.append_shared_slots(ids, weights, shared, **{**options, "scale": 1 / options["scale"]})


def _copies_ignored(ids: Tensor, weights: Tensor, shared: int, *, copies: int = 1, **options: Any) -> Routed:
    return right.append_shared_slots(ids, weights, shared, **options)


def _logical_count(ids: Tensor, weights: Tensor, shared: int, *, experts: int, **options: Any) -> Routed:
    """The ranks' share taken of two thirds of the experts, as if the others were redundant."""
    placed = right.remap_home_rank_slots(ids, weights, shared, experts=experts, **options)
    local = max(experts * 2 // 3 // options["ranks"], 1)
    moved = torch.where(placed.ids[:, : ids.shape[1]] >= 0, ids + ids // local * shared, -1).to(torch.int32)
    return Routed(torch.cat([moved, placed.ids[:, ids.shape[1] :]], 1), placed.weights)


def _minus_one_moves(ids: Tensor, weights: Tensor, shared: int, *, experts: int, ranks: int, **options: Any) -> Routed:
    placed = right.remap_home_rank_slots(ids, weights, shared, experts=experts, ranks=ranks, **options)
    moved = torch.where(ids == -1, ids + ids // (experts // ranks) * shared, placed.ids[:, : ids.shape[1]])
    return Routed(torch.cat([moved.to(torch.int32), placed.ids[:, ids.shape[1] :]], 1), placed.weights)


def _nan_times_zero(ids: Tensor, weights: Tensor, live_rows: int | Tensor) -> Routed:
    kept = right.mask_padding(ids, weights, live_rows)
    return Routed(kept.ids, weights * (kept.ids >= 0))


def _one_row_more(ids: Tensor, weights: Tensor, live_rows: int | Tensor) -> Routed:
    more = live_rows + 1 if isinstance(live_rows, Tensor) else min(live_rows + 1, ids.shape[0])
    return right.mask_padding(ids, weights, more)


def _weights_cut(ids: Tensor, weights: Tensor) -> Tensor:
    """Toward zero instead of to nearest."""
    cut = (weights.view(torch.int32) & -(2**16)).view(torch.float32)
    return right.pack_topk(ids, torch.where(weights.isnan(), weights, cut))


def _sign_of_the_weight_leaks(ids: Tensor, weights: Tensor) -> Tensor:
    packed = right.pack_topk(ids, weights)
    return torch.where((packed & 0x8000) != 0, packed | -(2**16), packed)


def _zeroed_first(ids: Tensor, counts: Tensor) -> Tensor:
    return right.count_experts(ids, torch.zeros_like(counts))


def _once_a_row(ids: Tensor, counts: Tensor) -> Tensor:
    repeated = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    return right.count_experts(torch.where(repeated, -1, ids), counts)


def _counts_the_last_for_minus_one(ids: Tensor, counts: Tensor) -> Tensor:
    return right.count_experts(torch.where(ids == -1, counts.shape[0] - 1, ids), counts)


def _images_ignored(
    logits: Tensor, k: int, *, image_mask: Tensor | None = None, image_token_id: int | None = None, **rest: Any
) -> RouteResult:
    return right.route(logits, k, **rest)


def _first_call_k() -> Callable[..., RouteResult]:
    seen: list[int] = []

    def route(logits: Tensor, k: int, **options: Any) -> RouteResult:
        """Weights are normalised over the k of the first call."""
        seen.append(k)
        result = right.route(logits, k, **options)
        return RouteResult(result.ids, result.weights * (seen[0] / k), result.counts)

    return route


def _mapped_twice(logits: Tensor, k: int, **options: Any) -> RouteResult:
    result = right.route(logits, k, **options)
    placement = options.get("placement")
    if placement is None or options.get("shared"):
        return result
    again = {name: options[name] for name in ("rank", "words", "uniforms", "probabilities") if name in options}
    ids = eplb.map_to_physical(result.ids, placement, options["algorithm"], **again)
    return RouteResult(torch.where(result.ids < placement.counts.shape[0], ids, result.ids), result.weights, result.counts)


def _no_shared_slot_by_token(logits: Tensor, k: int, **options: Any) -> RouteResult:
    result = right.route(logits, k, **options)
    if options.get("table") is None or not options.get("shared"):
        return result
    ids, weights = result.ids.clone(), result.weights.clone()
    ids[:, k:], weights[:, k:] = -1, 0
    return RouteResult(ids, weights, result.counts)


def _shared_slot_on_padding(logits: Tensor, k: int, *, live_rows: int | Tensor | None = None, **options: Any) -> RouteResult:
    masked = right.route(logits, k, live_rows=live_rows, **options)
    whole = right.route(logits, k, **options)
    ids, weights = (torch.cat([first[:, :k], second[:, k:]], 1) for first, second in zip(masked[:2], whole[:2], strict=True))
    return RouteResult(ids, weights, masked.counts)


def _padding_counted(logits: Tensor, k: int, *, live_rows: int | Tensor | None = None, **options: Any) -> RouteResult:
    return RouteResult(*right.route(logits, k, live_rows=live_rows, **options)[:2], right.route(logits, k, **options).counts)


def _biased_weights(logits: Tensor, k: int, **options: Any) -> RouteResult:
    result = right.route(logits, k, **options)
    bias = options.get("bias")
    if bias is None or options.get("placement") is not None or options.get("table") is not None:
        return result
    ids = result.ids[:, :k]
    keys = right.gate_scores(logits) + bias.float()
    weights = right.route_weights(keys, ids, scale=options["scale"], epsilon=options.get("epsilon", 1e-20))
    return RouteResult(result.ids, torch.cat([weights, result.weights[:, k:]], 1), result.counts)


def _scaled_twice(logits: Tensor, k: int, **options: Any) -> RouteResult:
    """The factor in the router although a later place applies it."""
    result = right.route(logits, k, **options)
    if options.get("scale_placement", ScalePlacement.ROUTER) == ScalePlacement.ROUTER:
        return result
    weights = torch.cat([result.weights[:, :k] * options["scale"], result.weights[:, k:]], 1)
    return RouteResult(result.ids, weights, result.counts)


def _logical_counters(logits: Tensor, k: int, **options: Any) -> RouteResult:
    result = right.route(logits, k, **options)
    logical = right.route(logits, k, **{**options, "algorithm": "none"})
    return RouteResult(result.ids, result.weights, logical.counts)


def _mutant(number: int, function: str, call: Callable[..., Any], fault: str, source: str = "") -> Mutant:
    return Mutant(f"routing-{number:02}", "routing", function, call, fault, source)


MUTANTS = (
    _mutant(1, "gate_logits", _bf16_sums, "partial sums in bf16"),
    _mutant(2, "gate_logits", _tf32, "fp32 inputs cut to TF32"),
    _mutant(3, "gate_logits", _tail_of_k_dropped, "the last part of the hidden size dropped"),
    _mutant(4, "gate_scores", _sigmoid, "sigmoid for sqrt(softplus)", "RT-03"),
    _mutant(5, "gate_scores", _log_of_one_plus, "log(1 + exp) underflows", "RT-01"),
    _mutant(6, "gate_scores", _no_threshold, "exp overflows", "RT-01"),
    _mutant(7, "gate_scores", _rounded_between, "rounded before the root as well as after"),
    _mutant(8, "route_topk", _text_bias_alone, "the vision bias is never read", "RT-05"),
    _mutant(9, "route_topk", _ties_to_the_larger, "ties to the larger id"),
    _mutant(10, "route_topk", _zero_bias, "the bias is zero", "RT-08"),
    _mutant(11, "route_topk", _nan_first, "NaN is the largest key"),
    _mutant(12, "route_topk", _signed_zeros, "minus zero below zero"),
    _mutant(13, "route_topk", _bias_in_bf16, "the bias rounded to bf16"),
    _mutant(14, "route_topk", _stale(), "empty slots keep an earlier call's ids", "RT-07"),
    _mutant(15, "route_weights", _no_epsilon, "epsilon left out"),
    _mutant(16, "route_weights", _reciprocal, "times scale / sum: one rounding elsewhere"),
    _mutant(17, "route_weights", _minus_one_is_the_last, "-1 read as the last expert", "EP-05"),
    _mutant(18, "route_weights", _one_expert_as_it_is, "not normalised at k = 1"),
    _mutant(19, "route_hash", _token_unbounded, "a token id past the table reads some row", "RT-04"),
    _mutant(20, "route_hash", _entry_unbounded, "a table entry past the last expert becomes one", "RT-04"),
    _mutant(21, "route_hash", _images_by_token, "image rows by the row of their placeholder", "RT-05"),
    _mutant(22, "append_shared_slots", _shared_weight_not_undone, "a later factor is not undone"),
    _mutant(23, "append_shared_slots", _shared_weight_scaled, "a later factor is applied, not undone"),
    _mutant(24, "append_shared_slots", _copies_ignored, "every rank adds the whole shared expert"),
    _mutant(25, "remap_home_rank_slots", _logical_count, "renumbered by the logical count", "EP-01"),
    _mutant(26, "remap_home_rank_slots", _minus_one_moves, "-1 renumbered, too", "EP-05"),
    _mutant(27, "mask_padding", _nan_times_zero, "weights times 0: NaN stays"),
    _mutant(28, "mask_padding", _one_row_more, "one padding row lives"),
    _mutant(29, "pack_topk", _weights_cut, "weights cut, not rounded"),
    _mutant(30, "pack_topk", _sign_of_the_weight_leaks, "the weight's sign bit reaches the id"),
    _mutant(31, "count_experts", _zeroed_first, "counters zeroed first"),
    _mutant(32, "count_experts", _once_a_row, "an expert twice in a row counts once", "EP-08"),
    _mutant(33, "count_experts", _counts_the_last_for_minus_one, "-1 counted for the last expert", "EP-05"),
    _mutant(34, "route", _images_ignored, "the vision bias is never read", "RT-05"),
    _mutant(35, "route", _first_call_k(), "k of an earlier call", "RT-07"),
    _mutant(36, "route", _mapped_twice, "logical ids mapped twice", "EP-01"),
    _mutant(37, "route", _no_shared_slot_by_token, "no shared slot in layers routed by token", "EP-06"),
    _mutant(38, "route", _shared_slot_on_padding, "padding rows reach the shared expert"),
    _mutant(39, "route", _padding_counted, "padding rows counted"),
    _mutant(40, "route", _biased_weights, "weights from the biased keys"),
    _mutant(41, "route", _scaled_twice, "the factor applied in two places"),
    _mutant(42, "route", _logical_counters, "counters of logical experts", "EP-01"),
)
