"""The operators of `output_projection`, their fakes, and what implements them.

DeepGEMM's batched product takes both forms of wo_a; our own kernels take every size, and write a pair straight from the product where that
is asked for. The second product, wo_b, is `linear_fp8` or `linear_mxfp8`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast import dispatch, groups, ops, quantization_ops
from dsv4.fast import linear_bodies as bodies
from dsv4.fast.adapters import deepgemm_linear
from dsv4.fast.compiled import run_eagerly
from dsv4.fast.dispatch import Implementation
from dsv4.fast.linear_ops import Prepared, empty_codes, kernel, of_any, of_blas, of_cuda, straight
from dsv4.fast.scales_ops import empty_packed
from dsv4.formats import WORD_GROUPS

Run = Callable[..., Any]
Codes = tuple[Tensor, Tensor]


def _fake_groups(o: Tensor, _: Tensor | None, weight: Tensor, *__: Any, **___: Any) -> Tensor:
    return o.new_empty((*o.shape[:2], weight.shape[1]), dtype=torch.bfloat16)


def _fake_rotated(
    o: Tensor, table: Tensor, positions: Tensor, groups: int, group: int, scale_layout: str, *_: Any, **__: Any
) -> Codes:  # fmt: skip
    tokens, heads, dim = o.shape
    width = heads // groups * dim
    codes = o.new_empty((tokens, groups, width), dtype=torch.uint8)
    count = width // group
    if scale_layout == "rows":
        return codes, o.new_empty((tokens, groups, count), dtype=torch.uint8)
    if scale_layout == "packed":
        return codes, empty_packed(o, groups, tokens, -(-count // WORD_GROUPS)).transpose(0, 1)
    return codes, empty_packed(o, groups, tokens, count, dtype=torch.float32).transpose(0, 1)


def _fake_pair(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale_layout: str, rows: int, *_: Any, **__: Any
) -> Codes:  # fmt: skip
    codes = o.new_empty((rows, weight.shape[0] * weight.shape[1]), dtype=torch.uint8)
    return codes, groups.empty_scales(codes, bodies.GROUP, "ue8m0", scale_layout)


def _quantized(o: Tensor, scale: str, amax_floor: str) -> Codes:
    """Codes of bf16 [tokens, groups, width] and scales in rows, the last group partial or not."""
    width = o.shape[2]
    if scale == "ue8m0":
        rows = o.reshape(-1, width)
        codes, scales = empty_codes(rows, bodies.BLOCK, "rows")
        kernel("linear_inputs", "quantize")(rows, codes, scales, bodies.BLOCK, "rows", amax_floor)
        return codes.view(o.shape), scales.view(*o.shape[:2], -1)
    whole = pad(o, (0, -width % bodies.BLOCK)) if width % bodies.BLOCK else o
    codes, scales = quantization_ops._triton_fp8(whole, bodies.BLOCK, scale, "rows", amax_floor, "reciprocal")
    return codes[..., :width].contiguous(), scales


def _quantize_pair(z: Tensor, codes: Tensor, scales: Tensor, scale_layout: str, pair_floor: str) -> None:
    """bf16 [tokens, n] into codes and scales of as many rows or more, the others zero."""
    padded, pitch = groups.padded_scales(codes.shape[0], codes.shape[1] // bodies.GROUP, scale_layout)
    options = quantization_ops._kernel_options(z, "fp8", pair_floor, "reciprocal")
    memory = scales.as_strided((1,), (1,)).view(torch.uint8)
    options |= {"TIES": "even", "ZERO_SIGN": "kept", "LAYOUT": scale_layout, "FAKE": False}
    kernel("quantize_groups", "run")(z, codes, memory, bodies.GROUP, padded=padded, pitch=pitch, **options)
    codes[z.shape[0] :].zero_()


def _deepgemm_groups(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale: str, amax_floor: str
) -> Tensor:  # fmt: skip
    if not o.shape[0]:
        return _fake_groups(o, o_scales, weight)
    if weight_scales is None:
        return deepgemm_linear.einsum_bf16(o, weight)
    codes, scales = (o, o_scales) if o_scales is not None else _quantized(o, scale, amax_floor)
    return deepgemm_linear.einsum_fp8(codes, scales, weight, weight_scales)


def _prepare_deepgemm(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale: str, amax_floor: str
) -> Prepared:  # fmt: skip
    quantises = weight_scales is not None and (o_scales is None or deepgemm_linear.packs(o.device))
    if quantises or not o.shape[0]:
        return straight(_deepgemm_groups, scale, amax_floor)
    return deepgemm_linear.prepare_einsum(o, o_scales, weight, weight_scales)


def _triton_groups(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale: str, amax_floor: str
) -> Tensor:  # fmt: skip
    if not o.shape[0]:
        return _fake_groups(o, o_scales, weight)
    if weight_scales is None:
        result: Tensor = kernel("project_groups", "run")(o, weight)
        return result
    codes, scales = (o, o_scales) if o_scales is not None else _quantized(o, scale, amax_floor)
    of_codes: Tensor = kernel("linear", "run_groups_fp8")(codes, scales, weight, weight_scales)
    return of_codes


def _rotate(
    run: Run, o: Tensor, table: Tensor, positions: Tensor, groups: int, group: int, scale_layout: str, amax_floor: str
) -> Codes:  # fmt: skip
    if not o.shape[0]:
        return _fake_rotated(o, table, positions, groups, group, scale_layout)
    return bodies.rotate_quantize(run, o, table, positions, groups, group, scale_layout, amax_floor)


def _triton_rotate(
    o: Tensor, table: Tensor, positions: Tensor, groups: int, group: int, scale_layout: str, amax_floor: str
) -> Codes:  # fmt: skip
    codes, scales = _fake_rotated(o, table, positions, groups, group, scale_layout)
    if o.shape[0]:
        kernel("linear_inputs", "rotate_quantize")(o, table, positions, groups, codes, scales, group, scale_layout, amax_floor)
    return codes, scales


def _takes_codes(arguments: Mapping[str, Any]) -> str | None:
    """Numbers go to the kernel that writes the pair itself."""
    if arguments["weight_scales"] is None:
        return "takes a weight in FP8 here"
    return deepgemm_linear.takes_groups(arguments)


def _deepgemm_pair(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale_layout: str, rows: int, scale: str,
    amax_floor: str, pair_floor: str,
) -> Codes:  # fmt: skip
    """The product, and its quantiser."""
    if not o.shape[0]:
        return _triton_pair(o, o_scales, weight, weight_scales, scale_layout, rows, scale, amax_floor, pair_floor)
    codes, scales = _fake_pair(o, o_scales, weight, weight_scales, scale_layout, rows)
    z = _deepgemm_groups(o, o_scales, weight, weight_scales, scale, amax_floor)
    _quantize_pair(z.flatten(1), codes, scales, scale_layout, pair_floor)
    return codes, scales


def _triton_pair(
    o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None, scale_layout: str, rows: int, scale: str,
    amax_floor: str, pair_floor: str,
) -> Codes:  # fmt: skip
    """bf16 operands in one launch; codes as a product, and its quantiser."""
    if not o.shape[0]:
        return bodies.project_groups_pair(
            run_eagerly, o, o_scales, weight, weight_scales, scale_layout, rows, scale, amax_floor, pair_floor
        )
    codes, scales = _fake_pair(o, o_scales, weight, weight_scales, scale_layout, rows)
    if weight_scales is None:
        kernel("project_groups", "run_pair")(o, weight, codes, scales, rows, scale_layout, pair_floor)
    else:
        z = _triton_groups(o, o_scales, weight, weight_scales, scale, amax_floor)
        _quantize_pair(z.flatten(1), codes, scales, scale_layout, pair_floor)
    return codes, scales


ops.define(
    "project_groups",
    "(Tensor o, Tensor? o_scales, Tensor weight, Tensor? weight_scales, str scale, str amax_floor) -> Tensor",
    _fake_groups,
)
ops.define(
    "rotate_quantize",
    "(Tensor o, Tensor table, Tensor positions, int groups, int group, str scale_layout, str amax_floor) -> (Tensor, Tensor)",
    _fake_rotated,
)
ops.define(
    "project_groups_pair",
    "(Tensor o, Tensor? o_scales, Tensor weight, Tensor? weight_scales, str scale_layout, SymInt rows, str scale, str amax_floor, "
    "str pair_floor) -> (Tensor, Tensor)",
    _fake_pair,
)

dispatch.register(
    "output_projection.project_groups",
    Implementation(
        "deepgemm",
        deepgemm_linear.DEVICES,
        deepgemm_linear.takes_groups,
        _deepgemm_groups,
        prepare=_prepare_deepgemm,
        library=deepgemm_linear.LIBRARY,
        symbol=deepgemm_linear.EINSUM_FP8,
        verified=("SM90",),
    ),
    replace(of_cuda(_triton_groups), prepare=lambda *given: straight(_triton_groups, *given[4:])),
    *of_blas(bodies.project_groups),
)
dispatch.register("output_projection.rotate_quantize", of_cuda(_triton_rotate), *of_any(_rotate))
dispatch.register(
    "output_projection.project_groups_pair",
    Implementation(
        "deepgemm",
        deepgemm_linear.DEVICES,
        _takes_codes,
        _deepgemm_pair,
        library=deepgemm_linear.LIBRARY,
        symbol=deepgemm_linear.EINSUM_FP8,
        verified=("SM90",),
    ),
    of_cuda(_triton_pair),
    *of_blas(bodies.project_groups_pair),
)
