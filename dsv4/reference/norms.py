"""Norms, and the Hadamard transform of the index heads.

For a row x of n numbers, with weight w and a small eps,

    m = (x_1^2 + .. + x_n^2) / n                                              mean square
    y = w (x (m + eps)^-1/2)                                                  RMS norm             (1)
    y = x (m + eps)^-1/2                                                      head norm, fp32      (2)
    s = x^2,  m = mean(s),  v = m + eps,  r = v^-1/2,  y = x r                head norm, chain     (3)
    y_j = n^-1/2 sum over i of (-1)^(ones of i & j) x_i                       Hadamard             (4)

x [..., n] bf16, for (4) also fp32; w [n] bf16 or fp32, taken as it is; eps is an fp32 number. (4) wants n a power of two; i and j count
from 0, "ones" are the bits set in both, which is the natural order.

Roundings: (1), (2) and (4) are one step each: evaluated in fp64, rounded to fp32 and, where the result is bf16, from there to bf16. (3) is
DeepSeek's published chain of bf16 operations, V4's query heads only: each of its five results is rounded so.

Specials follow IEEE arithmetic: a row of zeros with an eps of 0 gives NaN (0 times infinity), a row with an infinity gives NaN there and
zeros elsewhere. A sum of 0 in (4) is +0. Source: spec A 2.1, 2.2, 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import norm_checks
from dsv4.formats import fp32
from dsv4.reference.numerics import bf16_dtypes, bf16_step, current_numerics, fp32_step
from dsv4.types import HeadNormPrecision, Numerics

__all__ = ["hadamard", "head_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Rows divided by their root mean square and weighted, by (1).

    Args:
        x: [..., n], bf16.
        weight: [n], bf16 or fp32: multiplies as it is, without an added 1.
        eps: added to the mean square, >= 0, an fp32 number: 1e-6 in V4, 1e-20 in V4.1.

    Returns:
        bf16 [..., n].

    Raises:
        ArgumentError: wrong dtypes or shapes, eps negative, NaN or beyond fp32.
    """
    norm_checks.rms(x, weight, eps, bf16_dtypes())
    return bf16_step(lambda x, w: w * (x * _factor(x, eps)), x, weight)


def head_rms_norm(x: Tensor, *, eps: float, precision: HeadNormPrecision | str = HeadNormPrecision.FP32) -> Tensor:
    """Query heads divided by their root mean square, by (2) or (3).

    Args:
        x: [..., n], bf16: each row is a head of a token.
        eps: added to the mean square, >= 0, an fp32 number.
        precision: fp32 for one rounding; bf16_chain for the bits of DeepSeek's published program.

    Returns:
        bf16 [..., n].

    Raises:
        ArgumentError: a wrong dtype, shape or word, eps negative, NaN or beyond fp32.

    Notes:
        The two differ by one bf16 step in a quarter of the numbers, more or less.
    """
    if norm_checks.head(x, eps, precision, bf16_dtypes()) is HeadNormPrecision.FP32:
        return bf16_step(lambda x: x * _factor(x, eps), x)
    squares = bf16_step(torch.square, x)
    mean = bf16_step(lambda s: s.mean(-1, keepdim=True), squares)  # [..., 1]
    bounded = bf16_step(lambda m: m + fp32(eps), mean)
    factor = bf16_step(torch.rsqrt, bounded)
    return bf16_step(torch.mul, x, factor)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of each row, orthonormal, by (4). It is its own inverse but for the rounding.

    Args:
        x: [..., n], bf16 or fp32, n a power of two up to 4096.

    Returns:
        [..., n] in the dtype of x.

    Raises:
        ArgumentError: a wrong dtype, n no power of two or too large.
    """
    stated = current_numerics() is Numerics.STATED
    norm_checks.hadamard(x, ("bf16", "fp32") if stated else ("bf16", "fp32", "fp64"))
    signs = _signs(x.shape[-1], x.device)
    step = bf16_step if x.dtype == torch.bfloat16 else fp32_step
    return step(lambda x: (x @ signs + 0.0) * x.shape[-1] ** -0.5, x)


def _factor(x: Tensor, eps: float) -> Tensor:
    """(m + eps)^-1/2: [..., 1] in fp64."""
    return (x.square().mean(-1, keepdim=True) + fp32(eps)).rsqrt()


def _signs(n: int, device: torch.device) -> Tensor:
    """(-1)^(ones of i & j): fp64 [n, n]. That of 2n is four of that of n, the last one negated."""
    signs = torch.ones(1, 1, dtype=torch.float64, device=device)
    while signs.shape[0] < n:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs
