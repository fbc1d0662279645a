"""Comparisons as kernel repositories write them, to see which mutants they let through. The only place in the package where a tolerance
stands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4.parity.compare import Comparison
from dsv4.parity.contracts import Output

TOLERANCE = 1e-2
COSINE = 0.99
MATCHING = 0.95


def _allclose(expected: Tensor, actual: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _cosine(expected: Tensor, actual: Tensor) -> bool:
    finite = expected.isfinite() & actual.isfinite()
    first, second = expected[finite], actual[finite]
    if not first.numel():
        return True
    # Scaled to 1 before squaring, so that the largest numbers do not overflow.
    first, second = first / first.abs().amax().clamp(min=1e-300), second / second.abs().amax().clamp(min=1e-300)
    norms = first.norm() * second.norm()
    return bool(norms == 0 or (first * second).sum() / norms > COSINE)


def _matching(expected: Tensor, actual: Tensor) -> bool:
    close = torch.isclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    return bool(close.double().mean() >= MATCHING) if close.numel() else True


def _comparer(accepts: Callable[[Tensor, Tensor], bool]) -> Callable[[Output, Tensor, Tensor], Comparison]:
    def compare(row: Output, expected: Tensor, actual: Tensor) -> Comparison:
        if expected.shape != actual.shape:
            return Comparison(False, "shape")
        return Comparison(accepts(expected.double(), actual.double()), "loose comparison")

    return compare


COMPARERS = {
    "allclose 1e-2": _comparer(_allclose),
    "cosine > 0.99": _comparer(_cosine),
    "95 % match": _comparer(_matching),
}
