"""Strategies for specs, and the tensors that specs stand for.

Hypothesis draws structure only: sizes, which classes of values appear, a 64-bit seed. `values` materialises a tensor from that on the
CPU, with a generator, and moves it. Group g of a tensor holds the class number g modulo the number of classes, so one case can hold
every class; a failing case shrinks to the one class that matters, one row, one group and seed 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from dsv4.formats import NumberFormat
from dsv4.parity.contracts import Spec
from dsv4.parity.realistic import realistic_groups

SIZES_AROUND_TILES = (1, 2, 3, 5, 31, 32, 33, 127, 128, 129, 200, 257)
LAYOUTS = ("contiguous", "transposed", "sliced", "offset")


def rows(most: int = 300) -> SearchStrategy[int]:
    """A number of tokens: any, or one near the edge of a tile. Shrinks to 1."""
    return st.one_of(st.integers(1, most), st.sampled_from([size for size in SIZES_AROUND_TILES if size <= most]))


def seeds() -> SearchStrategy[int]:
    """A 64-bit seed."""
    return st.integers(0, 2**64 - 1)


def some_of(choices: Sequence[str]) -> SearchStrategy[list[str]]:
    """A non-empty list of different choices, often all of them. Shrinks to the first."""
    return st.one_of(st.lists(st.sampled_from(list(choices)), min_size=1, unique=True), st.just(list(choices)))


def specs(**parts: SearchStrategy[object]) -> SearchStrategy[Spec]:
    """A spec: a dict with one strategy for each key. Keys shrink in the order given."""
    return st.fixed_dictionaries(parts)


def generator(seed: int) -> torch.Generator:
    """A CPU generator from a 64-bit seed."""
    return torch.Generator().manual_seed(seed)


def random_bits(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    """A CPU tensor of any dtype whose elements are uniform bit patterns: every special is among them."""
    width = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, width), generator=generator(seed), dtype=torch.uint8).view(dtype).squeeze(-1)


def values(classes: Sequence[str], shape: Sequence[int], group: int, seed: int, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    """A CPU tensor [..., n] of `dtype` for a quantiser of groups of `group` along the last dimension (which it divides) to codes of
    `target`.
    """
    groups = math.prod(shape) // group
    source = generator(seed)
    out = torch.empty(groups, group, dtype=dtype)
    for number, name in enumerate(classes):
        mine = out[number :: len(classes)]
        if len(mine):
            mine.copy_(VALUE_CLASSES[name](len(mine), group, source, dtype, target))
    return out.reshape(*shape)


Maker = Callable[[int, int, torch.Generator, torch.dtype, NumberFormat], Tensor]


def magnitudes(target: NumberFormat) -> Tensor:
    """Every finite non-negative value of a signed format in order, fp32, from the format's definition."""
    mantissas = 1 << target.mantissa_bits
    found = [target.min_subnormal * m for m in range(mantissas)]
    for exponent in range(1, 1 << target.exponent_bits):
        found += [(1 + m / mantissas) * 2.0 ** (exponent - target.bias) for m in range(mantissas)]
    return torch.tensor([value for value in found if value <= target.max], dtype=torch.float32)


def _normal(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.randn(groups, group, generator=source)


def _outliers(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.randn(groups, group, generator=source) * torch.exp(4 * torch.randn(groups, group, generator=source))


def _tiny(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    exponents = torch.randint(-149, -60, (groups, 1), generator=source)
    return torch.ldexp(torch.randn(groups, group, generator=source, dtype=torch.float64), exponents).float()


def _zeros(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.where(torch.rand(groups, group, generator=source) < 0.5, 0.0, -0.0)


def _equal(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.randn(groups, 1, generator=source).expand(groups, group)


def _spike(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return _placed(torch.zeros(groups, group), _signed(torch.full((groups,), 100.0), source), source)


def _positive(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.rand(groups, group, generator=source) + 0.5


def _integers(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.randint(-8, 9, (groups, group), generator=source).float()


def _limits(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    """The largest magnitude is exactly max * 2^k, or one ulp of the input dtype to either side."""
    power = _powers(groups, source)
    limit = (target.max * power).to(dtype)
    bits = limit.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    limit = (bits + torch.randint(-1, 2, (groups,), generator=source, dtype=bits.dtype)).view(dtype)
    small = torch.rand(groups, group, generator=source) * power[:, None] * (target.max / 2)
    return _placed(small, _signed(limit.float(), source), source)


def _midpoints(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    """Values exactly halfway between two codes of a group whose scale is 2^k, or, in one element of four, the fp32 just above or below."""
    table = magnitudes(target)
    halves = (table[1:] + table[:-1]) / 2
    power = _powers(groups, source)
    picked = halves[torch.randint(0, len(halves), (groups, group), generator=source)] * power[:, None]
    nudge = torch.randint(-1, 2, picked.shape, generator=source, dtype=torch.int32) * (torch.rand(picked.shape, generator=source) < 0.25)
    signed = _signed((picked.view(torch.int32) + nudge).view(torch.float32), source)
    return _placed(signed, target.max * power, source)


def _scaled_midpoints(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    """Values that an unrounded scale s puts on ties, fl32(midpoint * s), and the fp32 to either side; the largest has any mantissa.

    A kernel that multiplies by 1/s, or divides approximately, differs from x / s only here: the scales of `midpoints` are powers of two.
    """
    table = magnitudes(target)
    halves = (table[1:] + table[:-1]) / 2
    largest = (1 + torch.rand(groups, generator=source)) * _powers(groups, source)
    scale = largest * torch.tensor(1 / target.max)
    picked = halves[torch.randint(0, len(halves), (groups, group), generator=source)] * scale[:, None]
    nudge = torch.randint(-1, 2, picked.shape, generator=source, dtype=torch.int32)
    signed = _signed((picked.view(torch.int32) + nudge).view(torch.float32), source)
    return _placed(signed, _signed(largest, source), source)


def _realistic(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return realistic_groups(source, 1, groups, group).view(groups, group)


def _nan(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return _placed(torch.randn(groups, group, generator=source), _signed(torch.full((groups,), torch.nan), source), source)


def _inf(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return _placed(torch.randn(groups, group, generator=source), _signed(torch.full((groups,), torch.inf), source), source)


def _huge(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return torch.ldexp(torch.rand(groups, group, generator=source) + 0.5, torch.randint(110, 128, (groups, 1), generator=source))


def _bits(groups: int, group: int, source: torch.Generator, dtype: torch.dtype, target: NumberFormat) -> Tensor:
    return random_bits((groups, group), int(torch.randint(0, 2**62, (), generator=source)), dtype)


VALUE_CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "integers": _integers,
    "zeros": _zeros,
    "spike": _spike,
    "equal": _equal,
    "positive": _positive,
    "outliers": _outliers,
    "midpoints": _midpoints,
    "scaled_midpoints": _scaled_midpoints,
    "realistic": _realistic,
    "limits": _limits,
    "tiny": _tiny,
    "huge": _huge,
    "nan": _nan,
    "inf": _inf,
    "bits": _bits,
}
FINITE_CLASSES = tuple(name for name in VALUE_CLASSES if name not in ("nan", "inf", "bits"))


def _powers(groups: int, source: torch.Generator) -> Tensor:
    return torch.ldexp(torch.ones(groups), torch.randint(-12, 13, (groups,), generator=source))


def _signed(tensor: Tensor, source: torch.Generator) -> Tensor:
    return torch.where(torch.rand(tensor.shape, generator=source) < 0.5, tensor, -tensor)


def _placed(into: Tensor, one: Tensor, source: torch.Generator) -> Tensor:
    """`into` [groups, group] with one element of each group, at a random place, set to `one` [groups]."""
    place = torch.randint(0, into.shape[1], (into.shape[0], 1), generator=source)
    return into.scatter(1, place, one[:, None].to(into.dtype))


def relaid(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout of `LAYOUTS`: column-major, every second column of a wider tensor, or at an odd offset."""
    if tensor.dim() == 0 or layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    wide = _like(tensor, (*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    view = wide[..., :-1:2] if layout == "sliced" else _like(tensor, (tensor.numel() + 3,))[3:].view(tensor.shape)
    _as_bytes(view).copy_(_as_bytes(tensor))
    return view


def _like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    flat = torch.full((math.prod(shape) * tensor.element_size(),), 0xFF, dtype=torch.uint8, device=tensor.device)
    return flat.view(tensor.dtype).view(tuple(shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype is not torch.bool else tensor
