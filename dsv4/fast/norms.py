"""Norms of rows and the Hadamard transform: the twin of `dsv4.reference.norms`, which has the formulas and roundings.

On CUDA one Triton kernel holds a row as words of two numbers, sums their squares in fp64 and writes the row once; on a CPU torch's
own operations work in place (`eager_rows`). The transform is a butterfly of additions, which inductor compiles there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, norm_checks
from dsv4.fast import norms_ops  # noqa: F401
from dsv4.fast.recall import Memory
from dsv4.types import HeadNormPrecision

__all__ = ["hadamard", "head_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, impl: str | None = None) -> Tensor:
    """weight * x / sqrt(mean of x^2 + eps), along rows.

    Args:
        x: [..., n], bf16.
        weight: [n], bf16 or fp32: multiplies as it is, without an added 1.
        eps: added to the mean square, >= 0, an fp32 number: 1e-6 in V4, 1e-20 in V4.1.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [..., n], contiguous.

    Raises:
        ArgumentError: wrong dtypes or shapes, eps negative, NaN or beyond fp32, tensors that require grad.
    """
    options = eps, type(eps), impl  # the type: True is no eps
    result: Tensor | None = _rms.recall(options, (x, weight))
    if result is not None:
        return result
    norm_checks.rms(x, weight, eps, "bf16")
    checks.no_grad(x=x, weight=weight)
    result = _operator(*options, x, weight)
    _rms.keep(options, (x, weight), (x, weight, eps), options)
    return result


def head_rms_norm(x: Tensor, *, eps: float, precision: HeadNormPrecision | str = HeadNormPrecision.FP32, impl: str | None = None) -> Tensor:
    """x / sqrt(mean of x^2 + eps), along rows: V4's query heads.

    Args:
        x: [..., n], bf16: each row is a head of a token.
        eps: added to the mean square, >= 0, an fp32 number.
        precision: fp32 for one rounding; bf16_chain rounds each of five operations, as DeepSeek's published program does.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [..., n], contiguous.

    Raises:
        ArgumentError: a wrong dtype, shape or word, eps negative, NaN or beyond fp32, x that requires grad.
    """
    chosen = norm_checks.head(x, eps, precision, "bf16")
    checks.no_grad(x=x)
    result: Tensor = torch.ops.dsv4.head_rms_norm.default(x, eps, str(chosen), impl)
    return result


def hadamard(x: Tensor, *, impl: str | None = None) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of rows, in natural order; V4's index queries and keys.

    Args:
        x: [..., n], bf16 or fp32, n a power of two up to 4096.
        impl: a backend by name, else the device's default.

    Returns:
        [..., n] in the dtype of x, contiguous.

    Raises:
        ArgumentError: a wrong dtype, n no power of two or too large, x that requires grad.
    """
    norm_checks.hadamard(x, ("bf16", "fp32"))
    checks.no_grad(x=x)
    result: Tensor = torch.ops.dsv4.hadamard.default(x, impl)
    return result


def _operator(eps: float, _: type, impl: str | None, x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.dsv4.rms_norm.default(x, weight, eps, impl)
    return result


_rms = Memory("norms.rms_norm", _operator)
