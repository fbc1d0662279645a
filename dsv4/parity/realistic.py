"""Numbers that lie in groups as trained weights do, from the statistics of a real model (`data/weight_statistics.json`).

Three distributions are kept: the largest magnitude over the rms of a group, the group's scale byte against its tensor's median, and how
often the next group of a row has the same byte. `benchmarks.real_weights` makes the file.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor


@cache
def _statistics() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files("dsv4.parity").joinpath("data/weight_statistics.json").read_text(encoding="utf-8"))
    return found


def realistic_groups(source: torch.Generator, rows: int, groups: int, group: int) -> Tensor:
    """fp32 [rows, groups * group] on the CPU. Groups below 64 take the statistics of 32, others those of 128."""
    table = _statistics()
    of = table["32" if group < 64 else "128"]
    offset = _neighbouring(of, rows, groups, source)
    # The amax lies anywhere in the binade of its byte: 448 * 2^(b - 128) < amax <= 448 * 2^(b - 127).
    within = torch.rand(rows, groups, generator=source, dtype=torch.float64)
    amax = 448 * torch.exp2(_drawn(of["median_byte"], (1, 1), source) + offset - 127 - within)
    uniform = torch.rand(rows, groups, generator=source, dtype=torch.float64)
    peak = _interpolated(uniform, _fp64(table["probabilities"]), _fp64(of["peak"])).clamp(max=group**0.5)
    shape = _with_peak(torch.randn(rows, groups, group, generator=source, dtype=torch.float64), peak)
    return (shape * amax[..., None]).flatten(1).float()


def _fp64(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _drawn(counts: dict[str, int], shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    numbers, weights = torch.tensor([int(number) for number in counts]), _fp64(list(counts.values()))
    picks = torch.multinomial(weights, torch.Size(shape).numel(), replacement=True, generator=source)
    return numbers[picks].reshape(shape)


def _neighbouring(of: dict[str, Any], rows: int, groups: int, source: torch.Generator) -> Tensor:
    """Offsets with the counted distribution, each equal to its left neighbour's as often as counted.

    An offset is repeated with probability (e - d) / (1 - d), e the counted share of equal neighbours, d that of independent draws.
    """
    counts, steps = _fp64(list(of["offset"].values())), of["step"]
    by_chance = float((counts / counts.sum()).square().sum())
    repeat = (steps["0"] / sum(steps.values()) - by_chance) / (1 - by_chance)
    fresh = torch.rand(rows, groups, generator=source) >= repeat
    fresh[:, :1] = True
    last_fresh = torch.where(fresh, torch.arange(groups), 0).cummax(1).values
    return _drawn(of["offset"], (rows, groups), source).gather(1, last_fresh)


def _interpolated(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    right = torch.searchsorted(x, at).clamp(1, len(x) - 1)
    return torch.lerp(y[right - 1], y[right], (at - x[right - 1]) / (x[right] - x[right - 1]))


def _with_peak(normal: Tensor, peak: Tensor) -> Tensor:
    """Normal numbers bent to sign(z) |z / max|^p, with p such that 1 / rms is `peak`: the largest magnitude of each group is 1."""
    relative = normal.abs() / normal.abs().amax(-1, keepdim=True)
    low, high = torch.zeros_like(peak), torch.full_like(peak, 64.0)
    for _ in range(40):  # 1 / rms grows with the power
        power = (low + high) / 2
        enough = relative.pow(power[..., None]).square().mean(-1).rsqrt() >= peak
        low, high = torch.where(enough, low, power), torch.where(enough, power, high)
    return normal.sign() * relative.pow(high[..., None])
