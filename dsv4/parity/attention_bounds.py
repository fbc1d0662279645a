"""How far attention may be off on arbitrary numbers: fp32 arithmetic in any order, probabilities in bf16, derived from formats and counts.

Of one token and head, with exact scores s_j, m their maximum, L = log(sum e^s_j + e^sink), w_j = e^(s_j - L) and w_sink = e^(sink - L),
which add up to 1. An implementation has in the place of e^(s_j - m) some number times e^(t_j), |t_j| <= E_j, which collects

    the dot product     fp32 sums of exact products of bf16, each addition off by an ulp (tensor cores cut): gamma(2 (n + n/16 + 16)) c
                        sum |q_d k_jd|
    the scale           a constant in fp32, with log2 e in it or not, a product, its difference to a maximum: 4 u (|s_j| + |m|) + 2 u r_j,
                        r_j = m - s_j, which counts up to 104: e^-104 is below half the smallest fp32 number
    the exponential     fast: 2 u (2 + 1.173 r_j), and whatever base
    running maxima      one rescaling for each 16 picks at most, each an exponential and a product: 2 u (2 B + 1.173 r_j) + 2 B u; the
                        exponents of all of them add up to r_j
    parts of a list     each part has its own maximum, sum, quotient and logarithm, and weighs e^(lse_i - lse): two logarithms, 2^-21 each
                        near 1 (lg2.approx), 8 u of what they are of, an exponential, quotients: 4 u

Probabilities round to bf16 for the product with the values and to nothing for the sum, so with g = gamma(2 (K + K/16 + 16)) for either sum

    N   = sum w_j |v_jd| (e^(E_j) (1 + 2^-8) (1 + g) - 1)      off the numerator, which is o in units of the denominator
    D   = sum w_j (e^(E_j) (1 + g) - 1) + w_sink (e^(E_sink) (1 + g) - 1)
    |o' - o| <= (N + |o| D) / (1 - D)

and never more than twice the largest |v_jd|: whatever the weights are, they are not negative. A weight below 2^-126 may vanish, and so may
a result. Then the division, and a rounding to bf16; two where there is a sink, which some libraries leave to a second step. For lse the
error of the sum without the sink, -log(1 - D), the roundings of a logarithm, of its product with log 2 and of the sum with m.

Scores that differ by more than their errors can tell make D reach 1, and then there is only the second bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4.formats import fp32
from dsv4.parity import bounds
from dsv4.parity.compressor_bounds import BF16_U, VANISHED, stored_as_bf16
from dsv4.parity.contracts import Call
from dsv4.reference import attention
from dsv4.reference.attention_merging import sinks_of
from dsv4.types import PagedRows

LOGARITHM = 2.0**-21
LEAST_NORMAL = 2.0**-126
LARGEST_FP32 = torch.finfo(torch.float32).max
BLOCK = 16  # picks that share a running maximum, at least


class Case(NamedTuple):
    """Of every token: exact scores fp64 [tokens, heads, picks], the sums of magnitudes they are of, rows fp64 [tokens, picks, dim]."""

    scores: Tensor  # -inf where absent
    sizes: Tensor
    rows: Tensor
    sink: Tensor  # [heads, 1]


def case(call: Call) -> Case:
    """What `sparse_attention`, `paged_attention` or `draft_attention` works on."""
    q, options = call[0].double(), call.kwargs
    if isinstance(call[2], PagedRows):
        _, block_kv, main, slots, sink = call.args
        tokens, block = torch.arange(len(q), device=q.device), options["block"]
        own = tokens[:, None] // block * block + torch.arange(block, device=q.device)
        lists = [attention._paged_list(main, slots, options.get("lengths")), attention._rows_list(block_kv, own, None)]
    else:
        _, main, picks, sink = call.args
        made = attention._paged_list if isinstance(main, PagedRows) else attention._rows_list
        lists = [made(main, picks, options.get("lengths"))]
        extra = options.get("extra", options.get("extra_kv"))
        if extra is not None:
            second: Tensor = options["extra_slots"] if "extra_slots" in options else options["extra_indices"]
            lists.append(made(extra, second, options.get("extra_lengths")))
    rows = torch.cat([part.load(part.picks) for part in lists], 1).double()
    there = torch.cat([part.picks for part in lists], 1) >= 0
    scale = _scale(options, q)
    scores = (q @ rows.mT * scale).masked_fill(~there[:, None], -torch.inf)
    return Case(scores, q.abs() @ rows.abs().mT * scale, rows, sinks_of(sink, q.shape[1], q.device).double()[:, None])


def _scale(options: Mapping[str, Any], q: Tensor) -> float:
    given = options.get("scale")
    return fp32(q.shape[2] ** -0.5 if given is None else given)


def outputs(call: Call, exact: Tensor) -> Tensor:
    """Of `output`, whose exact numbers are given."""
    return _outputs(case(call), exact, 1 if call.args[-1] is None else 2)


def lses(call: Call, exact: Tensor) -> Tensor:
    """Of `lse`."""
    of = case(call)
    return _lses(of.scores, _exponents(of), exact, of.scores.shape[2])


def unbounded(call: Call) -> Tensor:
    """Tokens and heads a score of which may leave fp32, with the sums that lead to it."""
    of = case(call)
    scale = _scale(call.kwargs, call[0])
    return (of.sizes >= min(scale, 1.0) * LARGEST_FP32 / 2).any(2)


def _outputs(of: Case, exact: Tensor, stored: int) -> Tensor:
    picks = of.scores.shape[2]
    errors = _exponents(of)
    lse = torch.logaddexp(of.scores.logsumexp(2, keepdim=True), of.sink)
    weights, sums = (of.scores - lse).exp().nan_to_num(0.0), bounds.gamma(_additions(picks))
    top = of.scores.amax(2, keepdim=True)
    of_sink = _shifts(of.sink, top, lse, picks)
    weight_of_sink = torch.where(of.sink == torch.inf, 1.0, (of.sink - lse).exp().nan_to_num(0.0))
    numerators = _grown(weights, errors, (1 + BF16_U) * (1 + sums)) @ of.rows.abs()
    total = _grown(weights, errors, 1 + sums).sum(2, keepdim=True) + _grown(weight_of_sink, of_sink, 1 + sums)
    return _quotient(exact, numerators, total, of.rows.abs(), weights, stored)


def _quotient(exact: Tensor, numerators: Tensor, total: Tensor, values: Tensor, weights: Tensor, stored: int) -> Tensor:
    """(N + |o| D) / (1 - D), divided and stored."""
    picks = weights.shape[2]
    largest = values.amax(1)[:, None] if values.dim() == 3 else values.amax(2)
    found = (numerators + exact.abs() * total) / (1 - total)
    found = torch.where((total < 1) & ~found.isnan(), found, torch.inf)
    found = torch.minimum(found, (2 + 8 * BF16_U) * largest)  # e^E and the sums are in numerator and denominator alike
    found = found + bounds.gamma(4) * (exact.abs() + found) + 4 * (picks + 1) * LEAST_NORMAL * (1 + largest)
    for _ in range(stored):
        found = stored_as_bf16(exact, found)
    return found


def _lses(scores: Tensor, errors: Tensor, exact: Tensor, picks: int) -> Tensor:
    weights = (scores - exact[..., None].double()).exp().nan_to_num(0.0)
    total = _grown(weights, errors, 1 + bounds.gamma(_additions(picks))).sum(2)
    off = torch.where(total < 1, -torch.log1p(-torch.where(total < 1, total, 0.0)), torch.inf)
    top = scores.amax(2).nan_to_num(0.0, 0.0, 0.0).abs()
    return off + 2 * LOGARITHM + 16 * bounds.U * (top + exact.abs().nan_to_num(0.0, 0.0, 0.0) + math.log(picks + 1)) + bounds.LEAST


def _exponents(of: Case) -> Tensor:
    """E_j, [tokens, heads, picks]."""
    dim = of.rows.shape[2]
    top, lse = of.scores.amax(2, keepdim=True), of.scores.logsumexp(2, keepdim=True)
    return bounds.gamma(_additions(dim)) * of.sizes + _shifts(of.scores, top, lse, of.scores.shape[2])


def _shifts(scores: Tensor, top: Tensor, lse: Tensor, picks: int) -> Tensor:
    """All of E_j but the dot product; 0 where a score is -inf, which is no weight at all."""
    there = scores > -torch.inf
    scores, top, lse = (part.clamp(-LARGEST_FP32, LARGEST_FP32) for part in (scores, top, lse))
    reach = (top - scores).abs().clamp(max=VANISHED)
    blocks = -(-picks // BLOCK)
    scaled = 4 * (scores.abs() + top.abs()) + 2 * reach
    exponentials = 2 * (2 + 1.173 * reach) + 2 * (2 * blocks + 1.173 * reach) + 2 * blocks
    parts = 2 * 8 * (scores.abs() + top.abs() + lse.abs() + math.log(picks + 1)) + 2 * (2 + 1.173 * reach) + 4
    return torch.where(there, bounds.U * (scaled + exponentials + parts) + 2 * LOGARITHM, 0.0)


def _grown(weights: Tensor, errors: Tensor, factor: float) -> Tensor:
    """w (e^E factor - 1); a weight of 0 whose exponent may be anything is not bounded."""
    grown: Tensor = weights * (torch.expm1(errors) * factor + (factor - 1))
    return grown.nan_to_num(torch.inf)


def _additions(terms: int) -> int:
    """Roundings of a sum in fp32 whose every addition may be off by an ulp, that is by two roundings; blocks of 16 or more are added."""
    return 2 * (terms + terms // 16 + 16)


def merged_outputs(call: Call, exact: Tensor) -> Tensor:
    """Of `output` of `merge_splits`: parts are given, so only the way their weights are taken is off."""
    parts, scores, sink = _parts(call)
    splits = scores.shape[2]
    top = scores.amax(2, keepdim=True)
    lse = torch.logaddexp(scores.logsumexp(2, keepdim=True), sink)
    weights, sums = (scores - lse).exp().nan_to_num(0.0), bounds.gamma(_additions(splits))
    weight_of_sink = torch.where(sink == torch.inf, 1.0, (sink - lse).exp().nan_to_num(0.0))
    errors = _shifts(scores, top, lse, splits)
    numerators = (_grown(weights, errors, 1 + sums)[..., None] * parts.abs()).sum(2)
    of_sink = _grown(weight_of_sink, _shifts(sink, top, lse, splits), 1 + sums)
    total = _grown(weights, errors, 1 + sums).sum(2, keepdim=True) + of_sink
    return _quotient(exact, numerators, total, parts.abs(), weights, 1)


def merged_lses(call: Call, exact: Tensor) -> Tensor:
    """Of `lse` of `merge_splits`."""
    _, scores, _ = _parts(call)
    top, lse = scores.amax(2, keepdim=True), scores.logsumexp(2, keepdim=True)
    return _lses(scores, _shifts(scores, top, lse, scores.shape[2]), exact, scores.shape[2])


def _parts(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [tokens, heads, splits, dim], 0 in empty parts, lses [tokens, heads, splits], the sink [heads, 1]; all fp64."""
    given, lses, sink = call.args
    scores = lses.double().movedim(0, 2)
    parts = given.double().movedim(0, 2).masked_fill((scores == -torch.inf)[..., None], 0.0)
    return parts, scores, sinks_of(sink, given.shape[2], given.device).double()[:, None]


def with_sink(call: Call, exact: Tensor) -> Tensor:
    """Of `lse_with_sink`: the larger one, plus a logarithm of what the smaller one adds."""
    return LOGARITHM + 16 * bounds.U * (exact.abs() + 1)
