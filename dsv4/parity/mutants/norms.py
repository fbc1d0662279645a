"""Wrong norms and transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant
from dsv4.reference import norms as right

Factor = Callable[[Tensor, float], Tensor]


def _with(factor: Factor, product: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Callable[..., Tensor]:
    """An RMS norm with another factor of the row, or another product of normed row and weight."""

    def rms(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return product(x.double() * factor(x.double(), eps), weight.double()).float().bfloat16()

    return rms


def _heads(factor: Factor) -> Callable[..., Tensor]:
    def head(x: Tensor, *, eps: float, **_: Any) -> Tensor:
        return (x.double() * factor(x.double(), eps)).float().bfloat16()

    return head


def _mean(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _factor(x: Tensor, eps: float) -> Tensor:
    return (_mean(x) + eps).rsqrt()


def _without_eps(x: Tensor, eps: float) -> Tensor:
    return _mean(x).rsqrt()


def _eps_outside(x: Tensor, eps: float) -> Tensor:
    return 1 / (_mean(x).sqrt() + eps)


def _too_many(x: Tensor, eps: float) -> Tensor:
    """The mean over the next power of two, as a padded tile has it."""
    tile = float(1 << x.shape[-1].bit_length())
    return (_mean(x) * x.shape[-1] / tile + eps).rsqrt()


def _bf16_sum(x: Tensor, eps: float) -> Tensor:
    parts = x.square().unflatten(-1, (-1, 8)).sum(-1).bfloat16()
    total: Tensor = parts[..., :1]
    for part in parts[..., 1:].split(1, -1):
        total = total + part
    return (total.double() / x.shape[-1] + eps).rsqrt()


def _tail_dropped(x: Tensor, eps: float) -> Tensor:
    return (x[..., :-8].square().sum(-1, keepdim=True) / x.shape[-1] + eps).rsqrt()


def _one_plus(normed: Tensor, weight: Tensor) -> Tensor:
    return normed * (1 + weight)


def _normed_in_bf16(normed: Tensor, weight: Tensor) -> Tensor:
    return normed.float().bfloat16().double() * weight


def _zeros_for_nan(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return right.rms_norm(x, weight, eps=eps).nan_to_num(nan=0.0)


def _whole_token(x: Tensor, *, eps: float, **options: Any) -> Tensor:
    """The statistic of all heads of a token."""
    return right.head_rms_norm(x.flatten(1), eps=eps, **options).view(x.shape)


def _one_rounding(x: Tensor, *, eps: float, **_: Any) -> Tensor:
    return right.head_rms_norm(x, eps=eps)


def _factor_in_bf16(x: Tensor, *, eps: float, **_: Any) -> Tensor:
    """As transformers rounds: the factor to bf16, the product to bf16."""
    return (x.double() * _factor(x.double(), eps).float().bfloat16().double()).float().bfloat16()


def _unscaled(x: Tensor) -> Tensor:
    return (right.hadamard(x.float()) * math.sqrt(x.shape[-1])).to(x.dtype)


def _sequency(x: Tensor) -> Tensor:
    """Rows in the order of their bits reversed."""
    n = x.shape[-1]
    bits = n.bit_length() - 1
    return right.hadamard(x)[..., [int(f"{j:0{bits}b}"[::-1], 2) if bits else j for j in range(n)]]


def _one_step_short(x: Tensor) -> Tensor:
    n = x.shape[-1]
    if n == 1:
        return x
    halves = right.hadamard(x.float().unflatten(-1, (2, n // 2)))
    return (halves.flatten(-2) * 2**-0.5).to(x.dtype)


def _truncated(x: Tensor) -> Tensor:
    return (right.hadamard(x.float()).view(torch.int32) & -65536).view(torch.float32).to(x.dtype)


MUTANTS = (
    Mutant("rms-without-eps", "norms", "rms_norm", _with(_without_eps), "no eps"),
    Mutant("rms-eps-outside", "norms", "rms_norm", _with(_eps_outside), "eps added to the root"),
    Mutant("rms-padded-mean", "norms", "rms_norm", _with(_too_many), "the mean over a padded tile"),
    Mutant("rms-one-plus-weight", "norms", "rms_norm", _with(_factor, _one_plus), "the weight as 1 + w, as Gemma stores it"),
    Mutant("rms-bf16-sum", "norms", "rms_norm", _with(_bf16_sum), "the sum of squares in bf16"),
    Mutant("rms-tail-dropped", "norms", "rms_norm", _with(_tail_dropped), "the last vector of a row left out of the sum"),
    Mutant(
        "rms-rounded-between", "norms", "rms_norm", _with(_factor, _normed_in_bf16), "rounded to bf16 before the weight", "spec A 10 #1"
    ),
    Mutant("rms-no-nan", "norms", "rms_norm", _zeros_for_nan, "NaN rows come out zero"),
    Mutant("head-without-eps", "norms", "head_rms_norm", _heads(_without_eps), "no eps"),
    Mutant("head-eps-outside", "norms", "head_rms_norm", _heads(_eps_outside), "eps added to the root"),
    Mutant("head-whole-token", "norms", "head_rms_norm", _whole_token, "one statistic for all heads of a token"),
    Mutant("head-chain-ignored", "norms", "head_rms_norm", _one_rounding, "bf16_chain rounds once", "spec A 10 #1"),
    Mutant("head-factor-bf16", "norms", "head_rms_norm", _factor_in_bf16, "the factor rounded to bf16", "spec A 2.2"),
    Mutant("hadamard-unscaled", "norms", "hadamard", _unscaled, "without n^-1/2"),
    Mutant("hadamard-reversed", "norms", "hadamard", _sequency, "results in the order of their bits reversed"),
    Mutant("hadamard-step-short", "norms", "hadamard", _one_step_short, "the last step of the butterfly left out"),
    Mutant("hadamard-truncated", "norms", "hadamard", _truncated, "cut to bf16 instead of rounded"),
)
