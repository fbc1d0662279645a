"""The operators of `linear`, their fakes, and what implements them: libraries and Triton on CUDA, bodies of `linear_bodies` elsewhere.

Triton rows quantise bf16 inputs by a kernel of their own, and DeepGEMM's row by the same one, which writes scales as that library's kernels
of the device read them. Every row takes empty operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, ops
from dsv4.fast import linear_bodies as bodies
from dsv4.fast.adapters import deepgemm_linear, flashinfer_linear
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Adaptive, Implementation, any_arguments, any_device, cuda_from
from dsv4.fast.scales_ops import empty_packed
from dsv4.formats import TILE_ROWS, WORD_GROUPS, fp32

Run = Callable[..., Any]
Prepared = Callable[..., Tensor] | None
Codes = tuple[Tensor, Tensor]

MOST_NORMED = 32768  # numbers of a row, which a program holds


@cache
def kernel(stem: str, name: str) -> Callable[..., Any]:
    """A function of dsv4.fast.kernels, imported at the first call: Triton is not everywhere."""
    found: Callable[..., Any] = getattr(import_module(f"dsv4.fast.kernels.{stem}"), name)
    return found


def empty_codes(x: Tensor, group: int, scale_layout: str) -> Codes:
    """Memory for codes of x [tokens, n] and their scales, which are powers of two: fp32 numbers where they are mn_major."""
    (tokens, n), codes = x.shape, x.new_empty(x.shape, dtype=torch.uint8)
    count = -(-n // group)
    match scale_layout:
        case "packed":
            return codes, empty_packed(x, tokens, -(-count // WORD_GROUPS))
        case "mn_major":
            return codes, empty_packed(x, tokens, count, dtype=torch.float32)
        case "128x4":
            return codes, x.new_empty((-(-tokens // TILE_ROWS), -(-count // WORD_GROUPS), 32, 4), dtype=torch.int32)
    return codes, x.new_empty((tokens, count), dtype=torch.uint8)


def as_bytes(scales: Tensor) -> Tensor:
    """Scales as operators take them: bytes, words, or fp32 numbers."""
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def operands(x: Tensor, weight: Tensor, weight_scales: Tensor | None = None, x_scales: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Of a product, as operators take them: numbers, or bytes with their scales."""
    if weight_scales is None:
        return x, None, weight, None
    left = (x, None) if x_scales is None else (x.view(torch.uint8), as_bytes(x_scales))
    return *left, weight.view(torch.uint8), as_bytes(weight_scales)


def straight(call: Callable[..., Tensor], *options: Any) -> Prepared:
    """A row's call, for tensors as they come to a product's public function: x, weight, scales of the weight, scales of x."""

    def run(x: Tensor, weight: Tensor, weight_scales: Tensor | None = None, x_scales: Tensor | None = None) -> Tensor:
        return call(*operands(x, weight, weight_scales, x_scales), *options)

    return run


def _fake_product(x: Tensor, _: Tensor | None, weight: Tensor, *__: Any, **___: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.bfloat16)


def _fake_norm(x: Tensor, weight: Tensor, eps: float, group: int, scale_layout: str, *_: Any, **__: Any) -> Codes:
    return empty_codes(x, group, scale_layout)


def _fake_swiglu(gate: Tensor, up: Tensor, limit: float | None, group: int, scale_layout: str, *_: Any, **__: Any) -> Codes:
    return empty_codes(gate, group, scale_layout)


def _quantized(x: Tensor, group: int, scale_layout: str) -> Codes:
    """Codes of bf16 [tokens, k] by the official rule, the last group partial or not."""
    codes, scales = empty_codes(x, group, scale_layout)
    kernel("linear_inputs", "quantize")(x, codes, scales, group, scale_layout, "official")
    return codes, scales


def _deepgemm_fp8(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, block: int) -> Tensor:
    if x_scales is None and x.shape[0]:
        x, x_scales = _quantized(x, block, deepgemm_linear.scale_layout(x.device))
    if x_scales is None:
        return _fake_product(x, x_scales, weight)
    return deepgemm_linear.linear_fp8(x, x_scales, weight, weight_scales, block)


def _triton_fp8(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, block: int) -> Tensor:
    if not x.shape[0] or not weight.shape[0]:
        return _fake_product(x, x_scales, weight)
    if x_scales is None:
        x, x_scales = _quantized(x, block, "rows")
    result: Tensor = kernel("linear_choice", "run_fp8")(x, x_scales, weight, weight_scales, block, invariant=dispatch.batch_invariant())
    return result


def _prepare_deepgemm(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, block: int) -> Prepared:
    if x_scales is None or not x.shape[0] or not weight.shape[0] or deepgemm_linear.packs(x.device):
        return straight(_deepgemm_fp8, block)
    return deepgemm_linear.prepare_gemm(x, x_scales, weight, weight_scales)


def _prepare_triton(x: Tensor, x_scales: Tensor | None, weight: Tensor, weight_scales: Tensor, block: int) -> Prepared:
    if x_scales is None or block != 32 or not x.shape[0] or not weight.shape[0]:
        return straight(_triton_fp8, block)
    return _prepare_chosen(x, x_scales, weight, weight_scales)


def _prepare_triton_pairs(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Prepared:
    given = codes, scales, weight, weight_scales
    return _prepare_chosen(*given) if codes.shape[0] and weight.shape[0] else straight(_triton_mxfp8)


def _prepare_chosen(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Prepared:
    return straight(kernel("linear_choice", "prepare")(x, x_scales, weight, weight_scales, invariant=dispatch.batch_invariant()))


def _triton_mxfp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    if not codes.shape[0] or not weight.shape[0]:
        return _fake_product(codes, scales, weight)
    result: Tensor = kernel("linear_choice", "run_mxfp8")(codes, scales, weight, weight_scales, invariant=dispatch.batch_invariant())
    return result


def _norm(run: Run, x: Tensor, weight: Tensor, eps: float, group: int, scale_layout: str, amax_floor: str) -> Codes:
    return bodies.norm_quantize(run, x, weight, eps, group, scale_layout, amax_floor) if x.shape[0] else empty_codes(x, group, scale_layout)


def _triton_norm(x: Tensor, weight: Tensor, eps: float, group: int, scale_layout: str, amax_floor: str) -> Codes:
    codes, scales = empty_codes(x, group, scale_layout)
    if x.shape[0]:
        kernel("linear_inputs", "norm_quantize")(x, weight, fp32(eps), codes, scales, group, scale_layout, amax_floor)
    return codes, scales


def _swiglu(run: Run, gate: Tensor, up: Tensor, limit: float | None, group: int, scale_layout: str, amax_floor: str) -> Codes:
    if not gate.shape[0]:
        return empty_codes(gate, group, scale_layout)
    return bodies.swiglu_quantize(run, gate, up, limit, group, scale_layout, amax_floor)


def _triton_swiglu(gate: Tensor, up: Tensor, limit: float | None, group: int, scale_layout: str, amax_floor: str) -> Codes:
    codes, scales = empty_codes(gate, group, scale_layout)
    if gate.shape[0]:
        bound = None if limit is None else fp32(limit)
        kernel("linear_inputs", "swiglu_quantize")(gate, up, bound, codes, scales, group, scale_layout, amax_floor)
    return codes, scales


def _norm_fits(arguments: Mapping[str, Any]) -> str | None:
    n = arguments["x"].shape[1]
    return None if n <= MOST_NORMED else f"takes rows of at most {MOST_NORMED} numbers; got {n}"


def of_cuda(call: Callable[..., Any], arguments: dispatch.ArgumentRule = any_arguments) -> Implementation:
    """Our own kernels."""
    return Implementation("triton", cuda_from(8, 0), arguments, call, verified=("SM90",))


def of_any(call: Callable[..., Any], kind: type[Implementation] = Implementation) -> tuple[Implementation, ...]:
    """A body, compiled and not."""
    row = partial(kind, device=any_device, arguments=any_arguments, verified=("cpu",))
    return row("inductor", call=partial(call, run_compiled)), row("eager", call=partial(call, run_eagerly))


def of_blas(call: Callable[..., Any]) -> tuple[Implementation, ...]:
    """The same of a product: BLAS adds in an order that depends on its shape, which is one where batch invariance is demanded."""
    return of_any(call, Adaptive)


ops.define("linear_fp8", "(Tensor x, Tensor? x_scales, Tensor weight, Tensor weight_scales, int block) -> Tensor", _fake_product)
ops.define("linear_mxfp8", "(Tensor codes, Tensor scales, Tensor weight, Tensor weight_scales) -> Tensor", _fake_product)
ops.define(
    "norm_quantize", "(Tensor x, Tensor weight, float eps, int group, str scale_layout, str amax_floor) -> (Tensor, Tensor)", _fake_norm
)
ops.define(
    "swiglu_quantize",
    "(Tensor gate, Tensor up, float? limit, int group, str scale_layout, str amax_floor) -> (Tensor, Tensor)",
    _fake_swiglu,
)

dispatch.register(
    "linear.linear_fp8",
    Implementation(
        "deepgemm",
        deepgemm_linear.DEVICES,
        deepgemm_linear.takes_linear,
        _deepgemm_fp8,
        prepare=_prepare_deepgemm,
        library=deepgemm_linear.LIBRARY,
        symbol=deepgemm_linear.GEMM,
        verified=("SM90",),
    ),
    Adaptive("triton", cuda_from(8, 0), any_arguments, _triton_fp8, prepare=_prepare_triton, verified=("SM90",)),
    *of_blas(bodies.linear_fp8),
)
dispatch.register(
    "linear.linear_mxfp8",
    Implementation(
        "flashinfer",
        flashinfer_linear.DEVICES,
        flashinfer_linear.takes_pairs,
        flashinfer_linear.mm_mxfp8,
        deterministic=False,
        batch_invariant=False,
        prepare=lambda *_: straight(flashinfer_linear.mm_mxfp8),
        library=flashinfer_linear.LIBRARY,
        symbol=flashinfer_linear.MM_MXFP8,
        verified=(),
    ),
    Implementation(
        "deepgemm",
        deepgemm_linear.MXFP8_DEVICES,
        deepgemm_linear.takes_pairs,
        deepgemm_linear.mxfp8,
        prepare=lambda *_: straight(deepgemm_linear.mxfp8),
        library=deepgemm_linear.LIBRARY,
        symbol=deepgemm_linear.MXFP8,
        verified=(),
    ),
    Adaptive("triton", cuda_from(8, 0), any_arguments, _triton_mxfp8, prepare=_prepare_triton_pairs, verified=("SM90",)),
    *of_blas(bodies.linear_mxfp8),
)
dispatch.register("linear.norm_quantize", of_cuda(_triton_norm, _norm_fits), *of_any(_norm))
dispatch.register("linear.swiglu_quantize", of_cuda(_triton_swiglu), *of_any(_swiglu))
