"""Operators of the quantisers, their fakes, and their tables of implementations: Triton on CUDA, inductor's bodies elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, groups, ops
from dsv4.fast.adapters import flashinfer
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from, cuda_of
from dsv4.formats import TILE_ROWS


def _fake_groups(x: Tensor, group: int, scale: str, scale_layout: str, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.uint8), groups.empty_scales(x, group, scale, scale_layout)


def _fake_blocks(weight: Tensor, rows: int, columns: int, scale: str, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    return weight.new_empty(weight.shape, dtype=torch.uint8), weight.new_empty(grid, dtype=groups.scale_dtype(scale))


def _fake_fp4(x: Tensor, group: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8), groups.empty_scales(x, group, "ue8m0", "rows")


def _fake_numbers(
    codes: Tensor, scales: Tensor, rows: int, columns: int, numbers: str, scale: str, scale_layout: str, dtype: str, impl: str | None = None
) -> Tensor:
    return codes.new_empty(groups.numbers_shape(codes, numbers), dtype=getattr(torch, dtype))


def _triton_fp8(x: Tensor, group: int, scale: str, scale_layout: str, amax_floor: str, division: str) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_groups(x, group, scale, scale_layout)
    _launch(x, codes, scales, group, "fp8" if scale == "ue8m0" else "fp8_fp32", amax_floor, division, scale_layout=scale_layout)
    return codes, scales


def _triton_fp8_blocks(weight: Tensor, rows: int, columns: int, scale: str, amax_floor: str, division: str) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_blocks(weight, rows, columns, scale)
    if codes.numel():
        matrix = weight if weight.stride(-1) == 1 else weight.contiguous()
        options = _kernel_options(weight, "fp8" if scale == "ue8m0" else "fp8_fp32", amax_floor, division)
        _kernel("quantize_blocks")(matrix, codes, scales, (rows, columns), **options)
    return codes, scales


def _triton_mxfp4(x: Tensor, group: int, amax_floor: str, ties: str, zero_sign: str) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_fp4(x, group)
    _launch(x, codes, scales, group, "mxfp4", amax_floor, "", ties, zero_sign)
    return codes, scales


def _triton_fp4_e4m3(x: Tensor, group: int, division: str, ties: str, zero_sign: str) -> tuple[Tensor, Tensor]:
    codes, scales = _fake_fp4(x, group)
    _launch(x, codes, scales, group, "fp4_e4m3", "", division, ties, zero_sign)
    return codes, scales


def _triton_fake(x: Tensor, group: int, format: str, amax_floor: str, ties: str, zero_sign: str, division: str) -> Tensor:
    result = x.new_empty(x.shape)
    _launch(x, result, result, group, format, amax_floor, division, ties, zero_sign, fake=True)
    return result


def _triton_dequantize(
    codes: Tensor, scales: Tensor, rows: int, columns: int, numbers: str, scale: str, scale_layout: str, dtype: str
) -> Tensor:
    result = _fake_numbers(codes, scales, rows, columns, numbers, scale, scale_layout, dtype)
    if result.numel():
        matrix = result.view(-1, result.shape[-1])
        if scale_layout in ("packed", "mn_major"):
            scales = scales if scales.stride(0) == 1 else scales.t().clone(memory_format=torch.contiguous_format).t()
            pitch = scales.stride(1)
            stored = scales.t().view(torch.uint8) if scale_layout == "packed" else scales
        else:
            stored = scales.contiguous()
            pitch = stored.shape[1] * 512 if scale_layout == "128x4" else stored.shape[-1]
            stored = stored.view(torch.uint8) if scale_layout == "128x4" else stored
        _kernel("dequantize")(
            codes.contiguous(), stored, matrix, (rows, columns), pitch=pitch, numbers=numbers, scale=scale, layout=scale_layout
        )
    return result


def _flashinfer_fp8(x: Tensor, group: int, scale: str, scale_layout: str, amax_floor: str, division: str) -> tuple[Tensor, Tensor]:
    codes, scales = flashinfer.mxfp8_quantize(x, scale_layout == "128x4")
    return codes, scales.view(torch.int32).view(-(-x.shape[0] // TILE_ROWS), -1, 32, 4) if scale_layout == "128x4" else scales.view(
        x.shape[0], -1
    )


def _flashinfer_fits(arguments: Mapping[str, Any]) -> str | None:
    x, wanted = arguments["x"], ("ue8m0", 32, "flashinfer")
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.numel() == 0:
        return f"takes bf16 [rows, n], not empty; got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    got = arguments["scale"], arguments["group"], arguments["amax_floor"]
    if got != wanted or arguments["scale_layout"] not in ("rows", "128x4"):
        return "has UE8M0 scales of groups of 32 in rows or 128x4 with amax_floor='flashinfer', and no other options"
    return None


def _launch(
    x: Tensor, result: Tensor, scales: Tensor, group: int, kind: str, amax_floor: str, division: str,
    ties: str = "even", zero_sign: str = "kept", *, scale_layout: str = "rows", fake: bool = False,
) -> None:  # fmt: skip
    """The kernel over groups along the rows of x, if there are any."""
    if x.numel() == 0:
        return
    matrix = x.reshape(-1, x.shape[-1])
    matrix = matrix if matrix.stride(-1) == 1 else matrix.contiguous()
    padded, pitch = groups.padded_scales(matrix.shape[0], matrix.shape[1] // group, scale_layout)
    if scale_layout == "packed":
        scales = scales.as_strided((scales.shape[1] * pitch,), (1,)).view(torch.uint8)
    elif scale_layout == "128x4":
        scales = scales.view(torch.uint8)
    options = _kernel_options(x, kind, amax_floor, division)
    _kernel("quantize_groups")(
        matrix, result, scales, group, padded=padded, pitch=pitch, TIES=ties, ZERO_SIGN=zero_sign, LAYOUT=scale_layout, FAKE=fake, **options
    )


def _kernel(stem: str) -> Callable[..., None]:
    """Imported at the first call, for Triton is not everywhere."""
    run: Callable[..., None] = import_module(f"dsv4.fast.kernels.{stem}").run
    return run


def _kernel_options(x: Tensor, kind: str, amax_floor: str, division: str) -> dict[str, Any]:
    rule = groups.rule(kind, amax_floor, division)
    return {
        "floor": groups.floor_of(kind, amax_floor),
        "KIND": kind,
        "DIVIDE": rule["division"] == "divide",
        "ON_SCALE": rule["on_scale"],
        "ZEROES": rule["zeroes"],
    }


def _pairs_in_one_group(arguments: Mapping[str, Any]) -> str | None:
    if arguments["numbers"] == "e2m1" and arguments["columns"] == 1:
        return "a byte of two E2M1 codes must not lie in two blocks"
    return None


def _divides_on_cpu_alone(arguments: Mapping[str, Any]) -> str | None:
    """Where inductor compiles for CUDA, a division by a number becomes a product with its reciprocal, an ulp beside it here and there."""
    power = arguments.get("scale") == "ue8m0" or arguments.get("format") in ("fp8", "mxfp4")
    divides = arguments["division"] == "divide" and not power
    cuda = (arguments["x"] if "x" in arguments else arguments["weight"]).is_cuda
    return "on CUDA inductor divides by a product with the reciprocal: not exact" if divides and cuda else None


def _register(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    triton: Callable[..., Any],
    *others: Implementation,
    arguments: dispatch.ArgumentRule = any_arguments,
    compiled: dispatch.ArgumentRule = any_arguments,
) -> None:
    """Define dsv4::NAME and give it its table; `compiled` is what inductor takes."""
    body = getattr(groups, name)
    ops.define(name, schema, fake)
    dispatch.register(
        f"quantization.{name}",
        Implementation("triton", cuda_from(8, 0), arguments, triton, verified=("SM90",)),
        *others,
        Implementation("inductor", any_device, compiled, partial(body, run_compiled), verified=("cpu", "SM90")),
        Implementation("eager", any_device, any_arguments, partial(body, run_eagerly), verified=("cpu", "SM90")),
    )


_register(
    "quantize_fp8",
    "(Tensor x, int group, str scale, str scale_layout, str amax_floor, str division) -> (Tensor, Tensor)",
    _fake_groups,
    _triton_fp8,
    Implementation(
        "flashinfer",
        cuda_of(10, 11, 12),
        _flashinfer_fits,
        _flashinfer_fp8,
        library=flashinfer.LIBRARY,
        symbol=flashinfer.MXFP8_QUANTIZE,
        verified=(),
    ),
    compiled=_divides_on_cpu_alone,
)
_register(
    "quantize_fp8_blocks",
    "(Tensor weight, int rows, int columns, str scale, str amax_floor, str division) -> (Tensor, Tensor)",
    _fake_blocks,
    _triton_fp8_blocks,
    compiled=_divides_on_cpu_alone,
)
_register("quantize_mxfp4", "(Tensor x, int group, str amax_floor, str ties, str zero_sign) -> (Tensor, Tensor)", _fake_fp4, _triton_mxfp4)
_register(
    "quantize_fp4_e4m3",
    "(Tensor x, int group, str division, str ties, str zero_sign) -> (Tensor, Tensor)",
    _fake_fp4,
    _triton_fp4_e4m3,
    compiled=_divides_on_cpu_alone,
)
_register(
    "dequantize",
    "(Tensor codes, Tensor scales, int rows, int columns, str numbers, str scale, str scale_layout, str dtype) -> Tensor",
    _fake_numbers,
    _triton_dequantize,
    arguments=_pairs_in_one_group,
)
_register(
    "fake_quantize",
    "(Tensor x, int group, str format, str amax_floor, str ties, str zero_sign, str division) -> Tensor",
    lambda x, *_, **__: x.new_empty(x.shape),
    _triton_fake,
    compiled=_divides_on_cpu_alone,
)
