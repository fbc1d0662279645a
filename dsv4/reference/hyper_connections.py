"""Manifold-constrained hyper-connections: C residual streams, read and written by each sublayer through small mixes.

For the streams X [C, D] of a token, flattened stream after stream to x [C D],

    r = rsqrt(mean of x_i^2 over all C D + norm_eps)                                    (1)
    m = (fn x) r                                              mixes [C + C + C C]       (2)
    p_j = sigmoid(m_j s_0 + b_j) + eps                        pre                       (3)
    q_j = 2 sigmoid(m_{C+j} s_1 + b_{C+j})                    post                      (4)
    L_ab = m_{2C+Ca+b} s_2 + b_{2C+Ca+b}                                                (5)
    M <- exp(L_ab - max_b L_ab) / (sum over b of exp(...)) + eps                        (6)
    M <- M_ab / (sum over a of M_ab + eps)                    columns                   (7)
    M <- M_ab / (sum over b of M_ab + eps)                    rows                      (8)
    y = sum over k of p_k X_k                                 collapse                  (9)
    X'_i = (sum over j of M_ji X_j) + q_i y                   expand                    (10)

`split_mix` is (3) to (8): (6), (7), then (8) and (7) by turns until there were as many (7) as iterations. It ends on columns; rows sum to 1
where it has converged. comb, the last M, has the old stream first: (10) reads its column i.

V4: a sublayer reads y by (9) with its own p, and its output is written back by (10). The head has C mixes of its own and collapses by (3)
with one scale. V4.1 collapses with the p of the sublayer before, and the first sublayer's is (1, 0, 0, ...), without eps. `boundary` is
what lies between two sublayers: (10), then (1) to (8) of the new streams, (9) and the next sublayer's RMSNorm.

X, y and the norm's weight bf16; fn, s, b and all mixes fp32. Roundings: (1) to (8) are one step each, every repetition of (7) and (8)
counted: evaluated in fp64, rounded once to fp32. (9), (10) and the norm are rounded to bf16, and what follows reads the rounded numbers:
statistics and collapse the bf16 streams, the norm the bf16 collapse. Sums over streams are added in fp64 in ascending order from the first
term; products of a bf16 and an fp32 number are exact there. The epsilons and the 2 are fp32 numbers. `tf32` clears the lowest 13 bits of
fn before (2); `tf32_compensated` adds the difference, its lowest 13 bits cleared in turn. Infinite and NaN inputs follow IEEE arithmetic.

Source: spec A 1.1 to 1.6, and 1.7 for the boundary and TF32.
"""

from __future__ import annotations

from functools import reduce

import torch
from einops import rearrange
from torch import Tensor

from dsv4 import hyper_connection_checks as check
from dsv4.formats import fp32
from dsv4.hyper_connection_checks import identity_pre
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import bf16_step, current_numerics, fp32_step
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Boundary, BoundaryOutput, Numerics, ScaleLayout, StatisticsPrecision, StreamMix

__all__ = ["boundary", "collapse", "expand", "head_collapse", "identity_pre", "mix_statistics", "split_mix"]

TF32_DROPPED = 0x1FFF  # the significand bits that TF32 lacks


def mix_statistics(streams: Tensor, fn: Tensor, *, eps: float, precision: StatisticsPrecision | str = StatisticsPrecision.EXACT) -> Tensor:
    """Mixes of the streams before scale and base, by (1) and (2).

    Args:
        streams: [tokens, C, D], bf16.
        fn: [mixes, C D], fp32; C (2 + C) mixes in a layer, C in V4's head.
        eps: norm_eps of (1), at least 0.
        precision: how much of fn takes part: exact, tf32 or tf32_compensated.

    Returns:
        fp32 [tokens, mixes]. Zero streams with eps 0 give NaN.

    Raises:
        ArgumentError: wrong dtypes or shapes, eps out of range, an unknown precision.
    """
    precision = check.statistics(streams, fn, eps, precision, _floats())
    flat = rearrange(streams, "tokens streams hidden -> tokens (streams hidden)")
    factor = fp32_step(lambda x: (x.square().mean(1, keepdim=True) + fp32(eps)).rsqrt(), flat)  # [tokens, 1]
    weight = _at_precision(fn, precision)
    return fp32_step(lambda x, fn, r: (x @ fn.T + 0.0) * r, flat, weight, factor)  # a sum of 0 is +0, as in gate_logits


def split_mix(
    mixes: Tensor, scale: Tensor, base: Tensor, *, iterations: int = 20, eps: float = 1e-6, post_multiplier: float = 2.0
) -> StreamMix:
    """Collapse weights, write-back weights and the nearly doubly stochastic mix of the streams, by (3) to (8).

    Args:
        mixes: [tokens, C (2 + C)], fp32: those of pre, of post, and of comb in rows.
        scale: [3], fp32: the scales of pre, post and comb.
        base: [C (2 + C)], fp32.
        iterations: how often (7) is done, at least 1.
        eps: of (3) and (6) to (8), at least 0.
        post_multiplier: the 2 of (4), at least 0.

    Returns:
        StreamMix(pre fp32 [tokens, C], post fp32 [tokens, C], comb fp32 [tokens, C, C], indexed [old, new]).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range.
    """
    streams = check.splitting(mixes, scale, base, _floats())
    check.sinkhorn(iterations, eps, post_multiplier)
    sizes = (streams, streams, streams * streams)
    (m_pre, m_post, m_comb), (b_pre, b_post, b_comb) = mixes.split(sizes, 1), base.split(sizes)
    pre = fp32_step(lambda m, s, b: (m * s + b).sigmoid() + fp32(eps), m_pre, scale[0], b_pre)
    post = fp32_step(lambda m, s, b: fp32(post_multiplier) * (m * s + b).sigmoid(), m_post, scale[1], b_post)
    logits = fp32_step(lambda m, s, b: m * s + b, m_comb, scale[2], b_comb)
    comb = _sinkhorn(rearrange(logits, "tokens (old new) -> tokens old new", old=streams), iterations, fp32(eps))
    return StreamMix(pre, post, comb)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """One vector of the streams, by (9).

    Args:
        streams: [tokens, C, D], bf16.
        pre: [tokens, C], fp32.

    Returns:
        bf16 [tokens, D].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    check.collapsing(streams, pre, _floats())
    return bf16_step(lambda x, p: _ascending(x * p[:, :, None], 1), streams, pre)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer, by (10).

    Args:
        y: [tokens, D], bf16: the sublayer's output.
        streams: [tokens, C, D], bf16: what entered the sublayer.
        post: [tokens, C], fp32.
        comb: [tokens, C, C], fp32, indexed [old, new].

    Returns:
        bf16 [tokens, C, D].

    Raises:
        ArgumentError: wrong dtypes or shapes.
    """
    check.expanding(y, streams, post, comb, _floats())

    def expanded(y: Tensor, x: Tensor, q: Tensor, comb: Tensor) -> Tensor:
        terms = (comb[:, j, :, None] * x[:, j, None, :] for j in range(x.shape[1]))  # [tokens, new, hidden] each
        return reduce(torch.add, terms) + q[:, :, None] * y[:, None, :]

    return bf16_step(expanded, y, streams, post, comb)


def head_collapse(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, eps: float = 1e-6) -> Tensor:
    """V4's last collapse, before the norm of the head: (1) and (2) with C mixes, (3) and (9).

    Args:
        streams: [tokens, C, D], bf16.
        fn: [C, C D], fp32.
        scale: [1], fp32.
        base: [C], fp32.
        norm_eps: of (1), at least 0.
        eps: of (3), at least 0.

    Returns:
        bf16 [tokens, D].

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range.

    Notes:
        V4.1 has no weights of a head: it collapses with the pre of the last sublayer.
    """
    check.head(streams, fn, scale, base, norm_eps, eps, _floats())
    mixes = mix_statistics(streams, fn, eps=norm_eps)
    pre = fp32_step(lambda m, s, b: (m * s + b).sigmoid() + fp32(eps), mixes, scale, base)
    return collapse(streams, pre)


def boundary(
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    rms_eps: float,
    iterations: int = 20,
    eps: float = 1e-6,
    carried_pre: Tensor | None = None,
    precision: StatisticsPrecision | str = StatisticsPrecision.EXACT,
    output: BoundaryOutput | str = BoundaryOutput.BF16,
    scale_layout: ScaleLayout | str = ScaleLayout.PACKED,
) -> Boundary:
    """From the output of one sublayer to the input of the next: `expand`, the mix of the new streams, `collapse`, `rms_norm`.

    Args:
        y, streams, post, comb: as `expand`: of the sublayer that has run.
        fn, scale, base: as `mix_statistics` and `split_mix`: of the sublayer that comes.
        weight: [D], bf16: of its norm.
        norm_eps, precision: as `mix_statistics`.
        rms_eps: of the norm.
        iterations, eps: as `split_mix`.
        carried_pre: [tokens, C], fp32: what to collapse with in V4.1, the pre of the sublayer that has run; None collapses with the new
            one, as V4 does.
        output: bf16, or mxfp8 for E4M3 codes in groups of 32 with power-of-two scales; D is then a multiple of 32.
        scale_layout: packed or 128x4, where the scales of the codes lie.

    Returns:
        Boundary(streams bf16 [tokens, C, D], their pre, post and comb as in `split_mix`, normed bf16 or e4m3 [tokens, D], scales int32 in
        the layout, None beside bf16).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range, an unknown option.
    """
    check.expanding(y, streams, post, comb, _floats())
    check.sinkhorn(iterations, eps)
    precision, output, layout = check.boundary(
        streams, fn, scale, base, weight, carried_pre, norm_eps=norm_eps, rms_eps=rms_eps, precision=precision, output=output,
        scale_layout=scale_layout, floats=_floats(),
    )  # fmt: skip
    new = expand(y, streams, post, comb)
    mix = split_mix(mix_statistics(new, fn, eps=norm_eps, precision=precision), scale, base, iterations=iterations, eps=eps)
    normed = rms_norm(collapse(new, mix.pre if carried_pre is None else carried_pre), weight, eps=rms_eps)
    if output is BoundaryOutput.BF16:
        return Boundary(new, *mix, normed, None)
    codes, scales = quantize_fp8(normed, check.MXFP8_GROUP, scale_layout=layout)
    return Boundary(new, *mix, codes, scales)


def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """(6), (7), then (8) and (7) iterations - 1 times: [tokens, old, new]."""

    def shares(x: Tensor) -> Tensor:
        powers = (x - x.amax(2, keepdim=True)).exp()
        return powers / _ascending(powers, 2)[:, :, None] + eps

    def columns(m: Tensor) -> Tensor:
        return m / (_ascending(m, 1)[:, None, :] + eps)

    def rows(m: Tensor) -> Tensor:
        return m / (_ascending(m, 2)[:, :, None] + eps)

    comb = fp32_step(columns, fp32_step(shares, logits))
    for _ in range(iterations - 1):
        comb = fp32_step(columns, fp32_step(rows, comb))
    return comb


def _ascending(terms: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, first term first."""
    return reduce(torch.add, terms.unbind(dim))


def _at_precision(fn: Tensor, precision: StatisticsPrecision) -> Tensor:
    """What of fn takes part in (2)."""
    if precision is StatisticsPrecision.EXACT:
        return fn
    high = _tf32(fn.float())
    return high if precision is StatisticsPrecision.TF32 else high + _tf32(fn.float() - high)  # exact: a part of the bits of fn


def _tf32(weight: Tensor) -> Tensor:
    return (weight.view(torch.int32) & ~TF32_DROPPED).view(torch.float32)


def _floats() -> check.Floats:
    return check.STORED if current_numerics() is Numerics.STATED else check.UNROUNDED
