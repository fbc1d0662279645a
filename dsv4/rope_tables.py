"""Rotary frequencies and tables: host logic that exists once, re-exported by `dsv4.reference.rotary` and `dsv4.fast.rotary`.

Pair i of R rotated dims, i = 0 .. R/2 - 1, at position p turns by the angle p f_i:

    f_i     = base^(-2i/R)                                                              plain
    c(n)    = R ln(L / (2 pi n)) / (2 ln base)             the pair that turns n times in L positions
    low     = max(floor(c(beta_fast)), 0),   high = min(ceil(c(beta_slow)), R - 1)
    ramp_i  = clamp((i - low) / max(high - low, 0.001), 0, 1)
    f_i    <- f_i / factor * ramp_i + f_i * (1 - ramp_i)                                YaRN
    table[p] = cos(fl32(p f_0)) .. cos(fl32(p f_R/2-1)), sin(fl32(p f_0)) .. sin(fl32(p f_R/2-1))

Roundings to fp32: R/2 exponents, f_i, each operation of the ramp and of the mixture, the angle, its cosine and its sine; each of them is
evaluated in fp64 and rounded once, so the table is the same on every machine. No factor multiplies the attention. Layers of ratio 0 use
the plain frequencies with base 10000, all others YaRN's with base 160000. Source: spec A 2.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.configs import YarnScaling
from dsv4.types import ArgumentError

__all__ = ["rope_frequencies", "rope_table"]


def rope_frequencies(base: float, dims: int = 64, *, yarn: YarnScaling | None = None, device: torch.device | str | None = None) -> Tensor:
    """Radians a position by which each pair turns.

    Args:
        base: rope_theta, > 1: 10000 for layers of ratio 0, 160000 (compress_rope_theta) for the others.
        dims: rotated dims R, even: the last ones of a head.
        yarn: how the slow pairs are stretched (`ModelConfig.rope_scaling`); None leaves them, as layers of ratio 0 want it.
        device: of the result.

    Returns:
        fp32 [dims / 2].

    Raises:
        ArgumentError: base not above 1, dims odd or below 2.
    """
    checks.at_least("base", base, 1.0)
    checks.at_least("dims", dims, 2)
    checks.multiple("dims", dims, 2)
    if base == 1:
        raise ArgumentError("base", repr(base), "must be above 1")
    exponents = (torch.arange(0, dims, 2, dtype=torch.float64, device="cpu") / dims).to(torch.float32)
    frequencies = (1 / (base ** exponents.to(torch.float64)).to(torch.float32).to(torch.float64)).to(torch.float32)
    if yarn is not None:
        ramp = _ramp(base, dims, yarn)
        stretched = (frequencies / yarn.factor) * ramp  # each an fp32 operation, correctly rounded
        frequencies = stretched + frequencies * (1 - ramp)
    return frequencies.to(device)


def _ramp(base: float, dims: int, yarn: YarnScaling) -> Tensor:
    """0 for pairs that keep their frequency, 1 for those that turn `factor` times slower."""

    def pair(turns: float) -> float:
        return dims * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dims - 1)
    return ((torch.arange(dims // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)


def rope_table(frequencies: Tensor, positions: int) -> Tensor:
    """Cosines and sines of the first positions.

    Args:
        frequencies: fp32 [dims / 2], of `rope_frequencies`.
        positions: how many, from 0 on; at least 1.

    Returns:
        fp32 [positions, dims] on the device of the frequencies: a row's cosines, then its sines.

    Raises:
        ArgumentError: frequencies that are not fp32 [pairs], positions below 1.
    """
    checks.tensor("frequencies", frequencies, "fp32", ("pairs",))
    checks.at_least("positions", positions, 1)
    places = torch.arange(positions, dtype=torch.float64, device="cpu")[:, None]
    angles = (places * frequencies.detach().to("cpu", torch.float64)).to(torch.float32).to(torch.float64)  # [positions, pairs]
    return torch.cat([angles.cos(), angles.sin()], 1).to(torch.float32).to(frequencies.device)
