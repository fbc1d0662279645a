"""Exact lattices: inputs on which floating-point addition is associative, so that every tiling, split, order and accumulator must agree
bit for bit.

Values are integer * 2^q. If the absolute products of a sum come to less than 2^24 quanta, every partial sum is an integer that fp32
holds exactly. Hopper's FP8 tensor cores keep about 14 bits inside one 128-wide promotion window, so there each window must stay below
2^14 quanta as well. Seen on an H200: with integers in -3..3 and scales 2^-2..2^2, DeepGEMM's fp8_gemm_nt equals the exact product bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.parity.strategies import generator

FP32_QUANTA = 2**24
HOPPER_FP8_QUANTA = 2**14
HOPPER_FP8_WINDOW = 128


def peak(terms: int, *, limit: int = FP32_QUANTA, most: int = 8) -> int:
    """The largest integer p <= most with terms * p^2 < limit: factors up to p keep any sum of `terms` products exact.

    Raises:
        ValueError: not even p = 1 does.
    """
    found = min(most, math.isqrt((limit - 1) // terms))
    if found < 1:
        raise ValueError(f"{terms} terms of a quantum each reach {limit} quanta: no lattice is exact")
    return found


def integers(shape: Sequence[int], seed: int, largest: int, *, density: float = 1.0) -> Tensor:
    """Integers in -largest..largest as fp32 on the CPU; a share 1 - density of them zero."""
    source = generator(seed)
    drawn = torch.randint(-largest, largest + 1, tuple(shape), generator=source).float()
    return drawn * (torch.rand(tuple(shape), generator=source) < density)


def powers(shape: Sequence[int], seed: int, least: int, most: int) -> Tensor:
    """Powers of two 2^least..2^most as fp32 on the CPU: scales that keep a lattice a lattice."""
    return torch.ldexp(torch.ones(tuple(shape)), torch.randint(least, most + 1, tuple(shape), generator=generator(seed)))


def quanta(a: Tensor, b: Tensor, quantum: float, *, window: int | None = None) -> int:
    """The largest sum of |a_i b_i| / quantum over the last dimension, or over any aligned window of it: what must stay below the
    accumulator's limit.

    Raises:
        ValueError: a product is no whole number of quanta.
    """
    products = (a.double() * b.double()).abs() / quantum
    if not bool((products == products.round()).all()):
        raise ValueError(f"some product is no multiple of the quantum {quantum}")
    if window is not None:
        products = torch.nn.functional.pad(products, (0, -products.shape[-1] % window)).unflatten(-1, (-1, window))
    return int(products.sum(-1).max())


def exact(a: Tensor, b: Tensor, quantum: float, *, hopper_fp8: bool = False) -> bool:
    """Whether any order of summing a_i b_i in fp32 (and through Hopper's FP8 tensor cores) is exact."""
    if quanta(a, b, quantum) >= FP32_QUANTA:
        return False
    return not hopper_fp8 or quanta(a, b, quantum, window=HOPPER_FP8_WINDOW) < HOPPER_FP8_QUANTA
