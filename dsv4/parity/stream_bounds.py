"""Error bounds of hyper-connections that are evaluated in fp32, in any order of addition, with fast exponentials, quotients and roots.

Relative errors of the primitives: an exponential of x is off by 2 + 1.173 |x| ulp (CUDA's __expf, and Triton's exp), a quotient and a
root by 2 ulp (div.full, rsqrt.approx); an ulp is at most 2 u. An exponential or a quotient below the smallest normal number may be 0.

Statistics. A sum of n products meets n roundings and one of the product; tensor cores cut addends to the largest of sixteen and the
accumulator, so that each addition is off by an ulp: gamma(2 (n + n/16 + 16) + 1) of the sum of magnitudes. The mean square has a relative
error of that size, its inverse root half of it.

Sigmoid. A logit z = m s + b that is off by d moves the sigmoid by at most the factor e^d; the exponential, the sum and the quotient add
their own relative errors.

Sinkhorn. Let P be the relative errors of all entries before a step, of first order. The step divides each entry of a row by the same
number, the row's sum, whose relative error is the mean of the row's P weighted with the new entries, so

    P' = P - (weighted mean of P over the row) + (errors of the sum and of the quotient)

and likewise for columns: means that lie between the smallest and the largest P, which is why no step expands the errors in Hilbert's
metric and the errors of the steps add up. What an error made at a step amounts to at the end is the product of the linear maps after it;
these are multiplied backwards, and the bound is the sum over all steps of the magnitudes in that product times the step's own error. The
terms of second order are products of two such errors, far below 2^-8 of the first.

Collapse and norm. A bf16 result adds half an ulp, u_b = 2^-8. `boundary` normalises the rounded collapse: its rounding, and that of the
collapse weights if they are new, pass through the norm with the weight of the root mean square, which moves by at most their mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.parity.bounds import LEAST, U, gamma

U_BF16 = 2.0**-8
LEAST_BF16 = 2.0**-133
SMALLEST_NORMAL = 2.0**-126
QUOTIENT = ROOT = 2 * 2 * U
SECOND_ORDER = 1 + 2.0**-8


class MixErrors(NamedTuple):
    """Bounds of what `split_mix` returns."""

    pre: Tensor
    post: Tensor
    comb: Tensor


def _sum(terms: int) -> float:
    return gamma(2 * (terms + terms // 16 + 16) + 1)


def _exponential(argument: Tensor) -> Tensor:
    return 2 * (2 + 1.173 * argument.abs()) * U


def _inverse_root(mean: Tensor, error: Tensor) -> Tensor:
    """Relative error of a computed mean^-1/2 whose mean is off by `error`."""
    share = torch.where(error > 0, error / mean, 0.0)
    return (1 - share).clamp(min=2.0**-40).rsqrt() * (1 + ROOT) - 1


def statistics_error(streams: Tensor, fn: Tensor, eps: float, exact: Tensor) -> Tensor:
    """Of `mix_statistics`, whose exact result is given."""
    x = streams.flatten(1).double()
    terms = x.shape[1]
    mean = x.square().mean(1, keepdim=True) + eps
    factor = mean.rsqrt()
    error = _inverse_root(mean, (_sum(terms) + 4 * U) * mean + LEAST)
    size = x.abs() @ fn.double().abs().T
    largest = (exact.abs() + (_sum(terms) * size + terms * LEAST) * factor) * (1 + error) * (1 + U)
    return largest - exact.abs() + LEAST


def _logit(mixes: Tensor, error: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """m s + b, and its error: that of m, and two roundings."""
    product = mixes.double() * scale.double()
    return product + base.double(), error * scale.double().abs() * (1 + U) + gamma(2) * (product.abs() + base.double().abs())


def _sigmoid(mixes: Tensor, error: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
    """The sigmoid of a logit, and its error."""
    z, off = _logit(mixes, error, scale, base)
    relative = off.exp() * (1 + _exponential(z.abs() + off)) * (1 + U) * (1 + QUOTIENT) - 1
    return z.sigmoid(), relative * z.sigmoid() + SMALLEST_NORMAL


def pre_error(mixes: Tensor, error: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Collapse weights, and their error, where `mixes` are off by `error`."""
    value, off = _sigmoid(mixes, error, scale, base)
    return value + eps, off + U * (value + off + eps)


def mix_errors(mixes: Tensor, error: Tensor | float, scale: Tensor, base: Tensor, iterations: int, eps: float) -> MixErrors:
    """Of `split_mix`, where `mixes` are off by `error`. Twice a sigmoid is exact."""
    off = torch.zeros_like(mixes, dtype=torch.float64) + error
    count = int((mixes.shape[1] + 1) ** 0.5) - 1  # C (C + 2) + 1 is the square of C + 1
    parts = (count, count, count * count)
    values, errors, bases = mixes.split(parts, 1), off.split(parts, 1), base.split(parts)
    pre = pre_error(values[0], errors[0], scale[0], bases[0], eps)[1]
    post = 2 * _sigmoid(values[1], errors[1], scale[1], bases[1])[1]
    z, z_off = _logit(values[2], errors[2], scale[2], bases[2])
    return MixErrors(pre, post, _comb_error(z.unflatten(1, (count, count)), z_off.unflatten(1, (count, count)), iterations, eps))


def _comb_error(z: Tensor, off: Tensor, iterations: int, eps: float) -> Tensor:
    """[tokens, old, new]: see Sinkhorn in the opening. eps > 0: an entry may vanish, but for eps."""
    count = z.shape[1]
    below = z - z.amax(2, keepdim=True)
    moved = off + off.amax(2, keepdim=True) + U * below.abs()
    power = moved.exp() * (1 + _exponential(below.abs() + moved)) - 1  # relative, of each exponential
    share = below.softmax(2)
    total = (share * power).sum(2, keepdim=True)
    relative = (1 + power) * (1 + gamma(count)) * (1 + QUOTIENT) / (1 - total).clamp(min=0.5) - 1
    comb = share + eps
    first = (share * relative + SMALLEST_NORMAL) / comb + U
    steps = []
    for number in range(2 * iterations - 1):
        dim = 1 + number % 2
        comb = comb / (comb.sum(dim, keepdim=True) + eps)
        steps.append((dim, comb))
    carried = torch.eye(count * count, dtype=torch.float64, device=z.device).view(1, count * count, count, count)
    own, found = gamma(count) + QUOTIENT, torch.zeros_like(comb)
    for dim, after in reversed(steps):
        found = found + carried.abs().sum((2, 3)).view(-1, count, count) * own
        carried = carried - carried.sum(dim + 1, keepdim=True) * after[:, None]
    found = found + (carried.abs() * first[:, None]).sum((2, 3)).view(-1, count, count)
    return comb * found * SECOND_ORDER + SMALLEST_NORMAL


def collapse_error(streams: Tensor, pre: Tensor, pre_off: Tensor | float) -> Tensor:
    """Of a collapse rounded to bf16, with weights that are off by `pre_off`."""
    x, p = streams.double(), pre.double()[:, :, None]
    off = (torch.zeros_like(pre, dtype=torch.float64) + pre_off)[:, :, None]
    before = (off * x.abs()).sum(1) + gamma(x.shape[1] + 1) * ((p.abs() + off) * x.abs()).sum(1)
    return before + U_BF16 * ((p * x).sum(1).abs() + before) + LEAST_BF16


def norm_error(collapsed: Tensor, off: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Of an RMS norm, rounded to bf16, of a row that is off by `off`."""
    mean = collapsed.square().mean(1, keepdim=True) + eps
    moved = (2 * collapsed.abs() * off + off.square()).mean(1, keepdim=True)
    error = _inverse_root(mean, moved + (_sum(collapsed.shape[1]) + 4 * U) * (mean + moved) + LEAST)
    size = weight.double().abs() * mean.rsqrt()
    before = size * ((collapsed.abs() + off) * (1 + error) * (1 + gamma(2)) - collapsed.abs())
    return before + U_BF16 * (size * collapsed.abs() + before) + LEAST_BF16
