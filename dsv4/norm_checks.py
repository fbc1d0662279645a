"""Argument checks of `norms` and `rotary`, shared by both implementations: dtypes, shapes and host values, never what a tensor holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsv4 import checks
from dsv4.types import ArgumentError, HeadNormPrecision

MOST_HADAMARD = 4096  # numbers of a transform
LARGEST_FP32 = 3.4028234663852886e38
LEAST_FP32 = 2.0**-149

Floats = str | Sequence[str]  # "bf16"; the reference also takes fp64 where its roundings are off


def rows(x: Tensor, floats: Floats) -> None:
    """x [..., n] of at least one number a row."""
    checks.tensor("x", x, floats, ("...", "n"))
    if x.shape[-1] < 1:
        raise ArgumentError("x", f"shape {list(x.shape)}", "must have at least one number in a row")


def epsilon(eps: float, name: str = "eps") -> None:
    """What is added to the mean square."""
    checks.at_least(name, eps, 0.0)
    checks.at_most(name, eps, LARGEST_FP32)


def rms(x: Tensor, weight: Tensor, eps: float, floats: Floats) -> None:
    """Arguments of `rms_norm`."""
    rows(x, floats)
    weights(x, weight)
    epsilon(eps)


def weights(x: Tensor, weight: Tensor) -> None:
    """A weight for each number of a row of x."""
    checks.tensor("weight", weight, ("bf16", "fp32"), (x.shape[-1],))
    checks.same_device("weight", weight, "x", x)


def head(x: Tensor, eps: float, precision: str, floats: Floats) -> HeadNormPrecision:
    """Arguments of `head_rms_norm`."""
    rows(x, floats)
    epsilon(eps)
    return checks.choice("precision", precision, HeadNormPrecision)


def hadamard(x: Tensor, floats: Floats) -> None:
    """x [..., n], n a power of two."""
    rows(x, floats)
    n = x.shape[-1]
    if n > MOST_HADAMARD or n & (n - 1):
        raise ArgumentError("x", f"shape {list(x.shape)}", f"n, the last size, must be a power of two up to {MOST_HADAMARD}")


def rotation(x: Tensor, table: Tensor, positions: Tensor, floats: Floats) -> None:
    """Arguments of `apply_rope`: x [tokens, ..., n] of whole pairs, and a table of at most n dims."""
    checks.tensor("x", x, floats, ("...", "n"))
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ArgumentError("x", f"shape {list(x.shape)}", "must have shape [tokens, ..., n], n even")
    checks.tensor("table", table, "fp32", ("positions", "dims"))
    checks.same_device("table", table, "x", x)
    places, dims = table.shape
    if places < 1 or dims < 2 or dims % 2 or dims > x.shape[-1]:
        limit = f"must have a position or more, and 2 dims or more, an even number of at most the {x.shape[-1]} of a row of x"
        raise ArgumentError("table", f"shape {list(table.shape)}", limit, "rope_table builds it")
    checks.tensor("positions", positions, ("int64", "int32"), (x.shape[0],))
    checks.same_device("positions", positions, "x", x)


def norm_rope(x: Tensor, table: Tensor, positions: Tensor, eps: float, weight: Tensor | None, floats: Floats) -> None:
    """Arguments of `norm_rope`."""
    rotation(x, table, positions, floats)
    epsilon(eps)
    if weight is not None:
        weights(x, weight)
