"""The operators of `norms`, and what implements them.

Every row of a table evaluates in fp64 and has the reference's bits, but where two fp64 evaluations fall on the two sides
of a rounding. Rows of a tensor are one matrix to a compiler, whatever its leading dimensions: one graph for each width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, eager_rows, ops
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from, on_cpu, remembered
from dsv4.fast.row_bodies import chain_body, hadamard_body, rms_body
from dsv4.formats import fp32

Run = Callable[..., Any]
Body = Callable[..., Tensor]
MOST_TRITON = 16384  # numbers of a row


def _by_rows(run: Run, body: Body, x: Tensor, *more: Tensor, **options: Any) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    result: Tensor = run(body, x.reshape(-1, x.shape[-1]), *more, **options)
    return result.view(x.shape)


def _rms(run: Run, body: Body, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _by_rows(run, body, x, weight, eps=fp32(eps))


def _head(run: Run, body: Body, chain: Body, x: Tensor, eps: float, precision: str) -> Tensor:
    return _by_rows(run, body if precision == "fp32" else chain, x, eps=fp32(eps))


def _hadamard(run: Run, x: Tensor) -> Tensor:
    bits = x.shape[-1].bit_length() - 1
    return _by_rows(run, hadamard_body, x, _signs(bits // 2, x.device), _signs(bits - bits // 2, x.device))


@cache
def _signs(bits: int, device: torch.device) -> Tensor:
    """Signs of the transform over some bits of the column: fp64 [1, 2^bits, 2^bits]."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(2**bits)] for i in range(2**bits)]
    with torch.inference_mode(False):  # it outlives the call
        return torch.tensor([signs], dtype=torch.float64, device=device)


def _triton_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _kernel("norm_rope", x, weight=weight, eps=fp32(eps), norm="fp32")


def _triton_head(x: Tensor, eps: float, precision: str) -> Tensor:
    return _kernel("norm_rope", x, eps=fp32(eps), norm=precision)


def _triton_hadamard(x: Tensor) -> Tensor:
    return _kernel("hadamard", x)


def _kernel(name: str, x: Tensor, **options: Any) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    result: Tensor = import_module(f"dsv4.fast.kernels.{name}").run(x, **options)
    return result


def triton_fits(arguments: Mapping[str, Any]) -> str | None:
    """Rows of whole words, short enough to be held by one program."""
    n = arguments["x"].shape[-1]
    return None if n % 2 == 0 and n <= MOST_TRITON else f"takes rows of an even number of numbers, at most {MOST_TRITON}; got {n}"


def _fake(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


ops.define("rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor", _fake)
ops.define("head_rms_norm", "(Tensor x, float eps, str precision) -> Tensor", _fake)
ops.define("hadamard", "(Tensor x) -> Tensor", _fake)

_OF_CUDA = partial(Implementation, "triton", cuda_from(8, 0), verified=("SM90",))
_EAGER = partial(Implementation, "eager", any_device, any_arguments, verified=("cpu", "SM90"))
_COMPILED = partial(Implementation, "inductor", any_device, any_arguments, verified=("cpu", "SM90"))


def _prepare_eager(x: Tensor, weight: Tensor, eps: float) -> Callable[..., Tensor]:
    """Of known tensors nothing requires grad, or grad is off: the body itself, where they are its rows."""
    if x.dim() == 2 and x.numel() and x.is_contiguous():
        return partial(eager_rows.rms, eps=fp32(eps))
    return partial(_rms, run_eagerly, eager_rows.rms, eps=eps)


dispatch.register(
    "norms.rms_norm",
    remembered(_OF_CUDA(triton_fits, _triton_rms), 2),
    remembered(_COMPILED(partial(_rms, run_compiled, rms_body)), 2),
    _EAGER(partial(_rms, run_eagerly, eager_rows.rms), preferred=on_cpu, prepare=_prepare_eager),
)
dispatch.register(
    "norms.head_rms_norm",
    _OF_CUDA(triton_fits, _triton_head),
    _COMPILED(partial(_head, run_compiled, rms_body, chain_body)),
    _EAGER(partial(_head, run_eagerly, eager_rows.rms, eager_rows.chain), preferred=on_cpu),
)
dispatch.register(
    "norms.hadamard",
    _OF_CUDA(any_arguments, _triton_hadamard),
    _COMPILED(partial(_hadamard, run_compiled)),
    _EAGER(partial(_hadamard, run_eagerly)),
)
