"""Comparing two tensors, and saying exactly how they differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FAR = 1 << 62  # stands for a distance that has no number: one side is NaN
_CHANCE = 1e-12  # probability that a bias or rms test rejects errors that are what they are declared to be


@dataclass(frozen=True)
class Comparison:
    """Whether an output keeps its row of the contract; where and how not."""

    ok: bool
    reason: str = ""
    coordinate: tuple[int, ...] | None = None
    expected: str = ""
    actual: str = ""
    differing: int = 0
    elements: int = 0
    max_ulp: int = 0
    histogram: dict[str, int] = field(default_factory=dict)
    share: float | None = None  # largest |error| / bound, E3 only


def compare_bytes(expected: Tensor, actual: Tensor, *, strides: bool = False, any_nan: bool = False) -> Comparison:
    """Equal dtype, shape and bytes (and strides, if asked): levels E0, E1 and E2. With `any_nan` all NaN count as the same bytes."""
    mismatch = metadata(expected, actual, strides)
    if mismatch:
        return Comparison(False, mismatch, elements=expected.numel())
    wrong = as_integers(expected) != as_integers(actual)
    if any_nan:
        wrong &= ~(is_nan(expected) & is_nan(actual))
    if not bool(wrong.any()):
        return Comparison(True, elements=expected.numel())
    return _described("bytes differ", expected, actual, wrong)


def compare_bound(exact: Tensor, actual: Tensor, bound: Tensor, *, independent: bool = False) -> Comparison:
    """|actual - exact| <= bound in every element, in fp64: level E3.

    Infinities must be equal and NaN must meet NaN. Where `independent` is claimed, errors divided by their bound are taken as
    independent and symmetric about zero, and as no wider than uniform on [-1, 1]; by Hoeffding their mean over n elements exceeds sqrt(2
    ln(2/p)/n), or their mean square exceeds 1/3 + sqrt(ln(1/p)/(2n)), with a chance below p = 1e-12.
    """
    if exact.shape != actual.shape:
        return Comparison(False, f"shape {list(actual.shape)}, expected {list(exact.shape)}", elements=exact.numel())
    want, have = exact.double(), actual.double()
    agree = (want == have) | (want.isnan() & have.isnan())
    finite = want.isfinite() & have.isfinite()
    error = torch.where(finite, have - want, 0.0)
    wrong = torch.where(finite, ~(error.abs() <= bound), ~agree)
    rounded = want.to(actual.dtype)
    distance = int(ulps(rounded, actual)[finite].max()) if bool(finite.any()) else 0
    shares = torch.where(bound > 0, error / bound, 0.0)[finite]
    share = float(shares.abs().max()) if shares.numel() else 0.0
    if bool(wrong.any()):
        found = _described("outside the bound", rounded, actual, wrong)
        return Comparison(**{**found.__dict__, "max_ulp": distance, "share": share})
    reason = _skewed(shares, want.sign()[finite]) if independent and shares.numel() else ""
    return Comparison(not reason, reason, elements=exact.numel(), max_ulp=distance, share=share)


def compare_choice(expected: Tensor, actual: Tensor, permitted: Tensor) -> Comparison:
    """Every element of a decision is permitted: level E4."""
    mismatch = metadata(expected, actual, strides=False)
    if mismatch or bool(permitted.all()):
        return Comparison(not mismatch, mismatch, elements=expected.numel())
    return _described("a choice that the bound does not permit", expected, actual, ~permitted.expand(expected.shape))


def as_integers(tensor: Tensor) -> Tensor:
    """The bits of each element as an integer of the same width, whatever the strides."""
    bits = tensor.detach().resolve_conj().resolve_neg()
    return bits.to(torch.uint8) if bits.dtype is torch.bool else bits.view(_INTEGERS[bits.element_size()])


def ulps(expected: Tensor, actual: Tensor) -> Tensor:
    """Distance in units of the last place: how many numbers of the format lie between. NaN against a number counts as 2^62.

    Floats map to integers in their own order (both zeros to 0); integers and E8M0 count steps.
    """
    first, second = _ordered(expected), _ordered(actual)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    overflows = (low < 0) & (high > torch.iinfo(torch.int64).max + torch.where(low < 0, low, -1))
    distance = torch.where(overflows, _FAR - 1, high - low)
    nan = is_nan(expected), is_nan(actual)
    return torch.where(nan[0] & nan[1], 0, torch.where(nan[0] | nan[1], _FAR, distance))


def is_nan(tensor: Tensor) -> Tensor:
    """Which elements are NaN; none of an integer tensor."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    if tensor.dtype is torch.float8_e8m0fnu:
        return tensor.view(torch.uint8) == 0xFF
    return (tensor.float() if tensor.element_size() < 4 else tensor).isnan()


def _ordered(tensor: Tensor) -> Tensor:
    bits = as_integers(tensor).long()
    if not tensor.is_floating_point():
        return tensor.long()
    width = 8 * tensor.element_size()
    if tensor.dtype is torch.float8_e8m0fnu:
        return bits
    magnitude = bits & ((1 << (width - 1)) - 1)
    negative = bits >= 128 if width == 8 else bits < 0
    return torch.where(negative, -magnitude, magnitude)


def metadata(expected: Tensor, actual: Tensor, strides: bool = False) -> str:
    """What differs beside the elements: dtype, shape, device, and strides if asked; nothing if nothing does."""
    if expected.dtype != actual.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if expected.device != actual.device:
        return f"device {actual.device}, expected {expected.device}"
    if strides and expected.numel() and expected.stride() != actual.stride():
        return f"strides {actual.stride()}, expected {expected.stride()}"
    return ""


def _described(reason: str, expected: Tensor, actual: Tensor, wrong: Tensor) -> Comparison:
    first = int(wrong.reshape(-1).nonzero()[0])
    coordinate = tuple(int(index) for index in torch.unravel_index(torch.tensor(first), wrong.shape)) if wrong.dim() else ()
    distances = ulps(expected, actual)[wrong]
    histogram: dict[str, int] = {}
    for distance, count in zip(*(part.tolist() for part in distances.unique(return_counts=True)), strict=True):
        histogram[_bucket(distance)] = histogram.get(_bucket(distance), 0) + count
    return Comparison(
        False,
        reason,
        coordinate,
        _element(expected[coordinate]),
        _element(actual[coordinate]),
        int(wrong.sum()),
        wrong.numel(),
        int(distances.max()),
        histogram,
    )


def _bucket(distance: int) -> str:
    if distance == _FAR:
        return "NaN against a number"
    if distance <= 2:
        return "0, same value" if distance == 0 else str(distance)
    power = (distance - 1).bit_length()
    return f"{(1 << (power - 1)) + 1} to {1 << power}" if power < 24 else "above 2^23"


def _element(value: Tensor) -> str:
    width = value.element_size()
    bits = int(as_integers(value)) & ((1 << 8 * width) - 1)
    number = value.double() if value.is_floating_point() else value
    return f"0x{bits:0{2 * width}X} ({number.item()!r})"


def _skewed(shares: Tensor, signs: Tensor) -> str:
    """Why these error shares are not what independent symmetric roundings give; empty if they are."""
    count = shares.numel()
    most = math.sqrt(2 * math.log(2 / _CHANCE) / count)
    for name, mean in (("signed bias", float(shares.mean())), ("bias away from zero", float((shares * signs).mean()))):
        if abs(mean) > most:
            return f"{name}: mean error {mean:+.4f} of the bound over {count} elements, at most {most:.4f}"
    square, widest = float(shares.square().mean()), 1 / 3 + math.sqrt(math.log(1 / _CHANCE) / (2 * count))
    return (
        f"rms: mean square error {square:.4f} of the bound's square over {count} elements, at most {widest:.4f}" if square > widest else ""
    )
