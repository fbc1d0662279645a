"""Hyper-connections: the twin of `dsv4.reference.hyper_connections`, which has the formulas, roundings and wirings.

On CUDA `boundary` is three launches: `expand`, which writes the new streams; their products with fn and sums of squares, in splits of K
whose number does not depend on the tokens; and one that adds the splits, makes the mix, collapses, normalises and, if asked, quantises,
scales in their layout and pads included. On SM90, from 256 tokens on, the first two are one. The single steps are the same kernels. fn
is multiplied whole: as three bf16 parts, whose products with bf16 streams are exact. `expand` and `collapse` have the reference's bits on
every backend. On a CPU inductor compiles `expand`, and the rest is torch's operations, on buffers that are used again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks
from dsv4 import hyper_connection_checks as check
from dsv4.fast import hyper_connections_ops  # noqa: F401
from dsv4.fast.recall import Memory
from dsv4.hyper_connection_checks import identity_pre
from dsv4.types import Boundary, BoundaryOutput, ScaleLayout, StatisticsPrecision, StreamMix

__all__ = ["boundary", "collapse", "expand", "head_collapse", "identity_pre", "mix_statistics", "split_mix"]


def mix_statistics(
    streams: Tensor,
    fn: Tensor,
    *,
    eps: float,
    precision: StatisticsPrecision | str = StatisticsPrecision.EXACT,
    impl: str | None = None,
) -> Tensor:
    """What the streams say of their own mix: their products with fn, over their root mean square.

    Args:
        streams: [tokens, C, D], bf16.
        fn: [mixes, C D], fp32: C (2 + C) mixes of a layer, C of V4's head.
        eps: added to the mean square, an fp32 number, at least 0.
        precision: exact, or tf32 or tf32_compensated for what a tensor core's TF32 makes of fn in one or in two products.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, mixes]; NaN in a row of zeros with eps 0.

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range, an unknown word, tensors that require grad.
    """
    chosen = check.statistics(streams, fn, eps, precision)
    checks.no_grad(streams=streams, fn=fn)
    result: Tensor = torch.ops.dsv4.mix_statistics.default(streams, fn, eps, str(chosen), impl)
    return result


def split_mix(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    post_multiplier: float = 2.0,
    impl: str | None = None,
) -> StreamMix:
    """The three parts of a mix: sigmoids to collapse with and to write back with, and Sinkhorn's iterate of the rest.

    Args:
        mixes: [tokens, C (2 + C)], fp32, from `mix_statistics`.
        scale: [3], fp32: of pre, post and comb.
        base: [C (2 + C)], fp32.
        iterations: column normalisations, at least 1; the last step is one.
        eps: added to pre, to the first comb and to every sum, an fp32 number, at least 0.
        post_multiplier: of the sigmoids of post, an fp32 number, at least 0.
        impl: a backend by name, else the device's default.

    Returns:
        StreamMix(pre fp32 [tokens, C], post fp32 [tokens, C], comb fp32 [tokens, C, C], old stream before new).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range, tensors that require grad.
    """
    check.splitting(mixes, scale, base)
    check.sinkhorn(iterations, eps, post_multiplier)
    checks.no_grad(mixes=mixes, scale=scale, base=base)
    return StreamMix(*torch.ops.dsv4.split_mix.default(mixes, scale, base, iterations, eps, post_multiplier, impl))


def collapse(streams: Tensor, pre: Tensor, *, impl: str | None = None) -> Tensor:
    """The weighted sum of a token's streams, the reference's bits on every backend.

    Args:
        streams: [tokens, C, D], bf16.
        pre: [tokens, C], fp32.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, D].

    Raises:
        ArgumentError: wrong dtypes or shapes, tensors that require grad.
    """
    options, tensors = (impl,), (streams, pre)
    result: Tensor | None = _collapse.recall(options, tensors)
    if result is not None:
        return result
    check.collapsing(streams, pre)
    checks.no_grad(streams=streams, pre=pre)
    result = _collapse_operator(*options, *tensors)
    _collapse.keep(options, tensors, tensors, options)
    return result


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, impl: str | None = None) -> Tensor:
    """The streams mixed among each other, and a sublayer's output added to each; the reference's bits on every backend.

    Args:
        y: [tokens, D], bf16: what the sublayer gave.
        streams: [tokens, C, D], bf16: what it was given.
        post: [tokens, C], fp32.
        comb: [tokens, C, C], fp32, old stream before new.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, C, D], a new tensor.

    Raises:
        ArgumentError: wrong dtypes or shapes, tensors that require grad.
    """
    check.expanding(y, streams, post, comb)
    checks.no_grad(y=y, streams=streams, post=post, comb=comb)
    result: Tensor = torch.ops.dsv4.expand.default(y, streams, post, comb, impl)
    return result


def head_collapse(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, eps: float = 1e-6, impl: str | None = None
) -> Tensor:
    """What V4's head reads, before its norm: the streams, collapsed with weights of the head's own.

    Args:
        streams: [tokens, C, D], bf16.
        fn: [C, C D], fp32.
        scale: [1], fp32.
        base: [C], fp32.
        norm_eps: of the statistics, an fp32 number, at least 0.
        eps: added to the weights, an fp32 number, at least 0.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, D].

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range, tensors that require grad.
    """
    options, tensors = (norm_eps, type(norm_eps), eps, type(eps), impl), (streams, fn, scale, base)  # the types: True is no eps
    result: Tensor | None = _head.recall(options, tensors)
    if result is not None:
        return result
    check.head(streams, fn, scale, base, norm_eps, eps)
    checks.no_grad(streams=streams, fn=fn, scale=scale, base=base)
    result = _head_operator(*options, *tensors)
    _head.keep(options, tensors, (*tensors, norm_eps, eps), options)
    return result


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
    impl: str | None = None,
) -> Boundary:
    """All that lies between two sublayers: `expand`, the new streams' mix, and their collapse, normalised for the next sublayer.

    Args:
        y, streams, post, comb: as `expand`, of the sublayer before.
        fn, scale, base: as `mix_statistics` and `split_mix`, of the sublayer after.
        weight: [D], bf16: of that sublayer's norm.
        norm_eps: of the statistics.
        rms_eps: of the norm. Both are fp32 numbers, at least 0.
        iterations, eps: as `split_mix`.
        carried_pre: [tokens, C], fp32: V4.1's collapse weights, which the boundary before this one returned; None for V4, which collapses
            with the weights found here.
        precision: as `mix_statistics`.
        output: bf16, or mxfp8: E4M3 codes in groups of 32, D a multiple of that.
        scale_layout: packed or 128x4, of the codes' scales.
        impl: a backend by name, else the device's default.

    Returns:
        Boundary(streams bf16 [tokens, C, D], pre, post and comb as `split_mix`, normed bf16 or e4m3 [tokens, D], scales int32 with the
        layout's pads zero, None beside bf16).

    Raises:
        ArgumentError: wrong dtypes or shapes, a number out of range, an unknown word, tensors that require grad.
    """
    check.expanding(y, streams, post, comb)
    check.sinkhorn(iterations, eps)
    chosen, kind, layout = check.boundary(
        streams, fn, scale, base, weight, carried_pre, norm_eps=norm_eps, rms_eps=rms_eps, precision=precision, output=output,
        scale_layout=scale_layout,
    )  # fmt: skip
    checks.no_grad(
        y=y, streams=streams, post=post, comb=comb, fn=fn, scale=scale, base=base, weight=weight, carried_pre=carried_pre
    )  # fmt: skip
    new, pre, back, mixed, normed, scales = torch.ops.dsv4.boundary.default(
        y, streams, post, comb, fn, scale, base, weight, carried_pre, norm_eps, rms_eps, iterations, eps, str(chosen), str(kind),
        str(layout), impl,
    )  # fmt: skip
    if kind is BoundaryOutput.BF16:
        return Boundary(new, pre, back, mixed, normed, None)
    return Boundary(new, pre, back, mixed, normed.view(torch.float8_e4m3fn), scales)


def _collapse_operator(impl: str | None, *tensors: Tensor) -> Tensor:
    result: Tensor = torch.ops.dsv4.collapse.default(*tensors, impl)
    return result


def _head_operator(norm_eps: float, _: type, eps: float, __: type, impl: str | None, *tensors: Tensor) -> Tensor:
    result: Tensor = torch.ops.dsv4.head_collapse.default(*tensors, norm_eps, eps, impl)
    return result


_collapse = Memory("hyper_connections.collapse", _collapse_operator)
_head = Memory("hyper_connections.head_collapse", _head_operator)
