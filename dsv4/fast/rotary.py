"""Rotary positions: the twin of `dsv4.reference.rotary`, which has the formulas and roundings.

A rotation reads a token's row of the table and writes a new tensor; with the norm before it, it is still one pass over the rows.
Frequencies and tables exist once, in `dsv4.rope_tables`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, norm_checks
from dsv4.fast import rotary_ops  # noqa: F401
from dsv4.rope_tables import rope_frequencies, rope_table

__all__ = ["apply_rope", "norm_rope", "rope_frequencies", "rope_table"]


def apply_rope(x: Tensor, table: Tensor, positions: Tensor, *, inverse: bool = False, impl: str | None = None) -> Tensor:
    """The last dims of each row, turned in interleaved pairs by the position of its token.

    Args:
        x: [tokens, ..., n], bf16, n even. It is not changed.
        table: fp32 [positions, R], of `rope_table`; R even, at most n.
        positions: [tokens], int64 or int32. One outside the table is absent.
        inverse: turn back.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, ..., n], contiguous; zero rows where the position is absent.

    Raises:
        ArgumentError: wrong dtypes or shapes, a table that is empty or wider than a row, tensors that require grad.
    """
    norm_checks.rotation(x, table, positions, "bf16")
    checks.no_grad(x=x, table=table)
    result: Tensor = torch.ops.dsv4.apply_rope.default(x, table, positions, inverse, impl)
    return result


def norm_rope(x: Tensor, table: Tensor, positions: Tensor, *, eps: float, weight: Tensor | None = None, impl: str | None = None) -> Tensor:
    """The norm of each row, rounded to bf16, then turned: what queries and keys go through, in one launch.

    Args:
        x: [tokens, ..., n], bf16, n even.
        table, positions: as `apply_rope`.
        eps: of the norm, >= 0, an fp32 number.
        weight: [n], bf16 or fp32, for `rms_norm`; None for `head_rms_norm` in fp32.
        impl: a backend by name, else the device's default.

    Returns:
        bf16 [tokens, ..., n], contiguous; zero rows where the position is absent.

    Raises:
        ArgumentError: as the two steps.
    """
    norm_checks.norm_rope(x, table, positions, eps, weight, "bf16")
    checks.no_grad(x=x, table=table, weight=weight)
    result: Tensor = torch.ops.dsv4.norm_rope.default(x, table, positions, eps, weight, impl)
    return result
