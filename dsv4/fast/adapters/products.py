"""Small products whose answers are known, for proofs of libraries: small codes and scales, and every sum exact in fp32.

Each row of x has one number in 32, so that a kernel that adds up with few bits is exact as well. Numbers and scales repeat after 7 and 5
rows, which no tile does, and differ from matrix to matrix of a batch: scales of another row, block, operand or matrix give another answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dsv4.fast.adapters.library import as_bytes

SIZES = (133, 5)  # rows of x: more than a tile, and fewer than any, where kernels swap the operands
COLUMNS = 256
NUMBERS = (1.0, 2.0, -1.0, 0.5, -2.0, 3.0, -0.5)


@dataclass(frozen=True)
class Product:
    """Matrices x [batch, 133, k] and weight [batch, 256, k] of E4M3 numbers, scales of groups of k, and of rows or blocks of rows."""

    x: Tensor
    x_scales: Tensor
    weight: Tensor
    weight_scales: Tensor

    @classmethod
    def of(cls, k: int, group: int, block: int, *, batches: int = 1, mantissas: bool = False) -> Self:
        """Scales of `group` numbers, on the weight's side for `block` rows; powers of two, or every other one times 3/2 or 5/4."""
        batch, at = torch.arange(batches)[:, None, None], torch.arange(k)
        row = torch.arange(SIZES[0])[:, None]
        there = at % 32 == (7 * row + 5 * (at // 32) + 3 * batch) % 32
        numbers = torch.tensor(NUMBERS)
        x = torch.where(there, numbers[(row + at // 32 + batch) % 7], 0.0)
        weight = numbers[(3 * torch.arange(COLUMNS)[:, None] + at + batch) % 7]
        groups, rows = torch.arange(k // group), torch.arange(COLUMNS // block)[:, None]
        scales = _scales(3 * row + 2 * groups + batch, row + groups, 1.5 if mantissas else 1.0)
        of_weight = _scales(2 * rows + 3 * groups + 2 * batch, rows + groups, 1.25 if mantissas else 1.0)
        return cls(x, scales, weight, of_weight)

    def codes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """x and weight as uint8 codes."""
        x, weight = (part.to(torch.float8_e4m3fn).view(torch.uint8).to(device) for part in (self.x, self.weight))
        return x, weight

    def scale_bytes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Scales that are powers of two as uint8 E8M0 codes."""
        x, weight = ((part.log2() + 127).to(torch.uint8).to(device) for part in (self.x_scales, self.weight_scales))
        return x, weight

    def answers(self, *, scaled: bool = True) -> tuple[bytes, ...]:
        """The products in bf16 [m, batch, 256], of all rows and of five; without scales if not `scaled`."""
        x, weight = self.x.double(), self.weight.double()
        if scaled:
            x = x * self.x_scales.double().repeat_interleave(x.shape[2] // self.x_scales.shape[2], 2)
            by_row = self.weight_scales.double().repeat_interleave(COLUMNS // self.weight_scales.shape[1], 1)
            weight = weight * by_row.repeat_interleave(weight.shape[2] // by_row.shape[2], 2)
        y = (x @ weight.mT).transpose(0, 1)
        return tuple(as_bytes(y[:m].flatten().tolist(), torch.bfloat16) for m in SIZES)


def _scales(steps: Tensor, odd: Tensor, factor: float) -> Tensor:
    return torch.exp2(steps % 5 - 2.0) * torch.where(odd % 2 == 1, factor, 1.0)
