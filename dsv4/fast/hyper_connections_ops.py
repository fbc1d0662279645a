"""The operators of `hyper_connections`, and what implements them.

A boundary is three launches of Triton: the new streams, their statistics in splits of K, and everything after; for many tokens on SM90 it
is two, of Gluon and Triton, unless use(batch_invariant=True) is in force. Elsewhere inductor compiles `expand`, and what a boundary does
last; statistics, Sinkhorn and, on a CPU, single collapses are made of torch's own operations. Sums of fp64 statistics are BLAS's, whose
order goes by the number of tokens unless use(batch_invariant=True) is in force. Everything else gives a token the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, eager_rows, groups, ops
from dsv4.fast import hyper_connection_bodies as bodies
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Adaptive, Implementation, any_arguments, any_device, cuda_from, on_cpu, remembered
from dsv4.formats import fp32

Run = Callable[..., Any]
Mix = tuple[Tensor, Tensor, Tensor]
Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

GROUP = 32  # of MXFP8
TRITON_STREAMS = (1, 2, 4, 8)
TRITON_HIDDEN = 8192  # at most: a program holds a row


def supported(streams: int, hidden: int) -> str | None:
    """Why the Triton kernels do not take so many streams of this size; None if they do. Every rule and every call asks here."""
    if streams not in TRITON_STREAMS:
        return f"takes {', '.join(map(str, TRITON_STREAMS))} streams, these are {streams}"
    if hidden % 8 or hidden > TRITON_HIDDEN:
        return f"takes a hidden size that is a multiple of 8, at most {TRITON_HIDDEN}; this is {hidden}"
    return None


def _triton_fits(arguments: Mapping[str, Any]) -> str | None:
    return supported(*arguments["streams"].shape[1:])


def _triton_splits(arguments: Mapping[str, Any]) -> str | None:
    return supported(_streams(arguments["mixes"]), TRITON_HIDDEN)


def _streams(mixes: Tensor) -> int:
    """C of C (C + 2) mixes."""
    streams = 1
    while streams * (streams + 2) < mixes.shape[1]:
        streams += 1
    return streams


def _kernels() -> Any:
    """Imported at the first call, for Triton is not everywhere."""
    return import_module("dsv4.fast.kernels.hyper_connections")


def _statistics(streams: Tensor, fn: Tensor, eps: float, precision: str) -> Tensor:
    if not streams.shape[0] or not fn.shape[0]:
        return _fake_mixes(streams, fn)
    return bodies.statistics(streams, fn, fp32(eps), precision)


def _triton_statistics(streams: Tensor, fn: Tensor, eps: float, precision: str) -> Tensor:
    if not streams.shape[0] or not fn.shape[0]:
        return _fake_mixes(streams, fn)
    result: Tensor = _kernels().mix_statistics(streams, fn, fp32(eps), precision)
    return result


def _split(mixes: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, post_multiplier: float) -> Mix:
    return bodies.split(mixes, scale, base, _streams(mixes), iterations, fp32(eps), fp32(post_multiplier))


def _triton_split(mixes: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, post_multiplier: float) -> Mix:
    if not mixes.shape[0]:
        return _fake_mix(mixes)
    result: Mix = _kernels().split_mix(mixes, scale, base, _streams(mixes), iterations, fp32(eps), fp32(post_multiplier))
    return result


def _collapse(run: Run, body: Callable[..., Tensor], streams: Tensor, pre: Tensor) -> Tensor:
    result: Tensor = run(body, streams, pre) if streams.shape[0] else _fake_row(streams)
    return result


def _triton_collapse(streams: Tensor, pre: Tensor) -> Tensor:
    result: Tensor = _kernels().collapse(streams, pre) if streams.shape[0] else _fake_row(streams)
    return result


def _expand(run: Run, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result: Tensor = run(bodies.expand_body, y, streams, post, comb) if y.shape[0] else streams.new_empty(streams.shape)
    return result


def _triton_expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result: Tensor = _kernels().expand(y, streams, post, comb) if y.shape[0] else streams.new_empty(streams.shape)
    return result


def _head(
    run: Run, body: Callable[..., Tensor], streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float
) -> Tensor:
    pre = bodies.gates(_statistics(streams, fn, norm_eps, "exact"), scale, base).add_(fp32(eps)).float()
    return _collapse(run, body, streams, pre)


def _triton_head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float) -> Tensor:
    if not streams.shape[0]:
        return _fake_row(streams)
    result: Tensor = _kernels().head_collapse(streams, fn, scale, base, fp32(norm_eps), fp32(eps))
    return result


def _boundary(
    run: Run,
    y: Tensor,
    streams: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    carried_pre: Tensor | None,
    norm_eps: float,
    rms_eps: float,
    iterations: int,
    eps: float,
    precision: str,
    output: str,
    scale_layout: str,
) -> Parts:
    new = _expand(run, y, streams, post, comb)
    mix = _split(_statistics(new, fn, norm_eps, precision), scale, base, iterations, eps, 2.0)
    if not y.shape[0]:
        return new, *mix, *_empty_normed(y, output, scale_layout)
    normed = run(bodies.collapse_norm_body, new, mix[0] if carried_pre is None else carried_pre, weight, eps=fp32(rms_eps))
    if output == "bf16":
        return new, *mix, normed, _no_scales(y)
    return new, *mix, *groups.quantize_fp8(run, normed, GROUP, "ue8m0", scale_layout, "official", "reciprocal")


def _triton_boundary(y: Tensor, *arguments: Any) -> Parts:
    if not y.shape[0]:
        return _boundary(run_eagerly, y, *arguments)
    *tensors, norm_eps, rms_eps, iterations, eps, precision, output, scale_layout = arguments
    given, small = (y, *tensors), (fp32(norm_eps), fp32(rms_eps), iterations, fp32(eps))
    normed, scales = _empty_normed(y, output, scale_layout)
    more, invariant = (precision, normed, scales, scale_layout if output == "mxfp8" else ""), dispatch.batch_invariant()
    new, *mix = _kernels().boundary(*given, *small, *more, invariant=invariant)
    return new, *mix, normed, scales


def _no_scales(y: Tensor) -> Tensor:
    return y.new_empty(0, dtype=torch.int32)


def _empty_normed(y: Tensor, output: str, scale_layout: str) -> tuple[Tensor, Tensor]:
    """Memory for the next sublayer's input: bf16, or codes as uint8 with their scales in a layout."""
    if output == "bf16":
        return y.new_empty(y.shape), _no_scales(y)
    return y.new_empty(y.shape, dtype=torch.uint8), groups.empty_scales(y, GROUP, "ue8m0", scale_layout)


def _fake_mixes(streams: Tensor, fn: Tensor, *_: Any, **__: Any) -> Tensor:
    return streams.new_empty((streams.shape[0], fn.shape[0]), dtype=torch.float32)


def _fake_mix(mixes: Tensor, *_: Any, **__: Any) -> Mix:
    streams = _streams(mixes)
    return _mix_of(mixes, streams)


def _mix_of(like: Tensor, streams: int) -> Mix:
    pre, post, comb = (
        like.new_empty((like.shape[0], *shape), dtype=torch.float32) for shape in ((streams,), (streams,), (streams, streams))
    )
    return pre, post, comb


def _fake_row(streams: Tensor, *_: Any, **__: Any) -> Tensor:
    return streams.new_empty((streams.shape[0], streams.shape[2]))


def _fake_boundary(y: Tensor, streams: Tensor, *arguments: Any, **_: Any) -> Parts:
    output, scale_layout = arguments[ops.argument_names("boundary").index("output") - 2 :][:2]
    return streams.new_empty(streams.shape), *_mix_of(y, streams.shape[1]), *_empty_normed(y, output, scale_layout)


_OF_CUDA = partial(Implementation, "triton", cuda_from(8, 0), verified=("SM90",))


def _eager(call: Callable[..., Any], kind: type[Implementation] = Implementation) -> Implementation:
    return kind("eager", any_device, any_arguments, call, verified=("cpu", "SM90"))


def _inductor(call: Callable[..., Any], kind: type[Implementation] = Implementation) -> Implementation:
    return kind("inductor", any_device, any_arguments, call, verified=("cpu", "SM90"))


def _compiled(call: Callable[..., Any], kind: type[Implementation] = Implementation) -> tuple[Implementation, ...]:
    return _inductor(partial(call, run_compiled), kind), _eager(partial(call, run_eagerly), kind)


def _collapsing(call: Callable[..., Any], kind: type[Implementation] = Implementation) -> tuple[Implementation, ...]:
    """Rows of what ends with a collapse, which a CPU does faster uncompiled."""
    eager = replace(_eager(partial(call, run_eagerly, eager_rows.collapse), kind), preferred=on_cpu)
    return _inductor(partial(call, run_compiled, bodies.collapse_body), kind), eager


ops.define("mix_statistics", "(Tensor streams, Tensor fn, float eps, str precision) -> Tensor", _fake_mixes)
ops.define(
    "split_mix",
    "(Tensor mixes, Tensor scale, Tensor base, int iterations, float eps, float post_multiplier) -> (Tensor, Tensor, Tensor)",
    _fake_mix,
)
ops.define("collapse", "(Tensor streams, Tensor pre) -> Tensor", _fake_row)
ops.define(
    "expand",
    "(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    lambda y, streams, *_, **__: streams.new_empty(streams.shape),
)
ops.define("head_collapse", "(Tensor streams, Tensor fn, Tensor scale, Tensor base, float norm_eps, float eps) -> Tensor", _fake_row)
ops.define(
    "boundary",
    "(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor fn, Tensor scale, Tensor base, Tensor weight, Tensor? carried_pre, "
    "float norm_eps, float rms_eps, int iterations, float eps, str precision, str output, str scale_layout) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_boundary,
)

dispatch.register("hyper_connections.mix_statistics", _OF_CUDA(_triton_fits, _triton_statistics), _eager(_statistics, Adaptive))
dispatch.register("hyper_connections.split_mix", _OF_CUDA(_triton_splits, _triton_split), _eager(_split))
dispatch.register(
    "hyper_connections.collapse",
    *(remembered(row, 2) for row in (_OF_CUDA(_triton_fits, _triton_collapse), *_collapsing(_collapse))),
)
dispatch.register("hyper_connections.expand", _OF_CUDA(_triton_fits, _triton_expand), *_compiled(_expand))
dispatch.register(
    "hyper_connections.head_collapse",
    *(remembered(row, 4) for row in (_OF_CUDA(_triton_fits, _triton_head), *_collapsing(_head, Adaptive))),
)
dispatch.register(
    "hyper_connections.boundary",
    Adaptive("triton", cuda_from(8, 0), _triton_fits, _triton_boundary, verified=("SM90",)),
    *_compiled(_boundary, Adaptive),
)
