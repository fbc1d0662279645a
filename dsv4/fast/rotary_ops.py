"""The operators of `rotary`, and what implements them.

A rotation is E2: products of bf16 and fp32 are exact in fp64, one subtraction or addition rounds, and every row of a table has its bits.
The heads of a token are one dimension to a compiler: one graph for each number of heads and width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, ops
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from
from dsv4.fast.norms_ops import triton_fits
from dsv4.fast.row_bodies import norm_rope_body, rope_body
from dsv4.formats import fp32

Run = Callable[..., Any]


def _rope(run: Run, x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    return _by_tokens(run, rope_body, x, table, positions, inverse=inverse)


def _norm_rope(run: Run, x: Tensor, table: Tensor, positions: Tensor, eps: float, weight: Tensor | None) -> Tensor:
    weights = () if weight is None else (weight,)
    return _by_tokens(run, norm_rope_body, x, table, positions, *weights, eps=fp32(eps))


def _by_tokens(run: Run, body: Callable[..., Tensor], x: Tensor, *more: Tensor, **options: Any) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    heads = x.numel() // (x.shape[0] * x.shape[-1])
    result: Tensor = run(body, x.reshape(-1, heads, x.shape[-1]), *more, **options)
    return result.view(x.shape)


def _triton_rope(x: Tensor, table: Tensor, positions: Tensor, inverse: bool) -> Tensor:
    return _kernel(x, table=table, positions=positions, inverse=inverse)


def _triton_norm_rope(x: Tensor, table: Tensor, positions: Tensor, eps: float, weight: Tensor | None) -> Tensor:
    return _kernel(x, table=table, positions=positions, eps=fp32(eps), weight=weight, norm="fp32")


def _kernel(x: Tensor, **options: Any) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    result: Tensor = import_module("dsv4.fast.kernels.norm_rope").run(x, **options)
    return result


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


ops.define("apply_rope", "(Tensor x, Tensor table, Tensor positions, bool inverse) -> Tensor", _fake)
ops.define("norm_rope", "(Tensor x, Tensor table, Tensor positions, float eps, Tensor? weight) -> Tensor", _fake)


def _rows(triton: Callable[..., Tensor], call: Callable[..., Tensor]) -> tuple[Implementation, ...]:
    return (
        Implementation("triton", cuda_from(8, 0), triton_fits, triton, verified=("SM90",)),
        Implementation("inductor", any_device, any_arguments, partial(call, run_compiled), verified=("cpu", "SM90")),
        Implementation("eager", any_device, any_arguments, partial(call, run_eagerly), verified=("cpu", "SM90")),
    )


dispatch.register("rotary.apply_rope", *_rows(_triton_rope, _rope))
dispatch.register("rotary.norm_rope", *_rows(_triton_norm_rope, _norm_rope))
