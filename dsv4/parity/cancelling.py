"""Operands of sums that are 0, of which fp64 leaves what the order of its additions makes of them.

Half of the terms are the other half's negatives, and their sizes differ by so much that fp64 does not hold their partial sums. So an
order that depends on the number of rows, or on a row's place, shows in every result, where sums of ordinary numbers hide it below their
last bit. Bounds go by the sizes of the terms, and hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.parity.strategies import generator

WHY = "sums of 0, which show the order of their additions"
SPREAD = 60  # binary orders of magnitude: products of bf16 numbers have 16 bits, fp64 has 53


def opposed(numbers: Tensor, sign: int, group: int = 1) -> Tensor:
    """The last dimension's second half, in whole groups, as `sign` times the first, and groups in an order that every call has for so many
    of them: halves that are added apart would cancel to the last bit. What is left over is 0.
    """
    count = numbers.shape[-1] // (2 * group)
    first, rest = numbers[..., : count * group], torch.zeros_like(numbers[..., 2 * count * group :])
    both = torch.cat([first, sign * first], -1).unflatten(-1, (2 * count, group))
    return torch.cat([both[..., torch.randperm(2 * count, generator=generator(count)), :].flatten(-2), rest], -1)


def spread(shape: tuple[int, ...], seed: int) -> Tensor:
    """fp32 of very different sizes."""
    source = generator(seed)
    return torch.randn(shape, generator=source) * torch.exp2(torch.randint(-SPREAD // 2, SPREAD // 2, shape, generator=source).float())


def pair(rows: tuple[int, ...], weight: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Operands [..., n] of a product: bf16 rows, and an fp32 weight that bf16 holds."""
    first, other = spread(rows, seed), torch.randn(weight, generator=generator(seed ^ 1)).bfloat16().float()
    return opposed(first, -1).bfloat16(), opposed(other, 1)


def coded(shape: tuple[int, ...], grid: tuple[int, ...], sign: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """One operand of codes in blocks: fp32 numbers that E4M3 has, exponents of their scales, and factors from 1 to 2."""
    source = generator(seed)
    numbers = torch.randn(shape, generator=source).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    exponents, mantissas = torch.randint(-SPREAD // 2, SPREAD // 2, grid, generator=source), 1 + torch.rand(grid, generator=source)
    return opposed(numbers, sign, shape[-1] // grid[-1]), opposed(exponents, 1), opposed(mantissas, 1)
