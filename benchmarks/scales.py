"""Laying scales out again, each function beside a copy of the bytes that it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw, library_call
from benchmarks.harness import nbytes
from dsv4.fast import scales
from dsv4.fast.adapters import deepgemm, flashinfer


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Scales of activations in each layout, and of eight experts' weights."""
    for preset, config in PRESETS.items():
        groups = config.hidden_size // config.activation_group
        numbers = torch.rand(tokens, groups, device=device)
        yield from _grid(f"{preset}, {tokens} tokens x {groups} scales", _bytes((tokens, groups), device), numbers)
        weight = _bytes((8, config.moe_intermediate_size, config.hidden_size // 32), device)
        yield from _hopper(preset, weight)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Every layout of a grid of so many bytes; where it holds fp32 numbers they are a quarter as many."""
    grid, label = _bytes((rows, columns), device), f"{rows} x {columns} bytes"
    yield from _grid(label, grid, torch.rand(rows, max(columns // 4, 1), device=device))
    if rows % 64 == 0 and columns % 4 == 0:
        yield from _hopper(label, grid.view(1, rows, columns))


def _bytes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def _grid(label: str, grid: Tensor, numbers: Tensor) -> Iterator[Case]:
    """Padding keeps fifteen rows of sixteen, a number that the device alone knows."""
    (rows, groups), device = grid.shape, grid.device
    packed, tiles, live = scales.pack_ue8m0(grid), scales.swizzle_128x4(grid), rows - rows // 16
    swizzle = library_call(flashinfer.LIBRARY, flashinfer.INTERLEAVE, device, _as_it_is)
    align = library_call(deepgemm.LIBRARY, deepgemm.ALIGN, device, _as_it_is)
    yield Case("scales.pack_ue8m0", label, (grid,), raw=_deepgemm_pack(device))
    yield Case("scales.unpack_ue8m0", label, (packed, groups))
    yield Case("scales.swizzle_128x4", label, (grid,), raw=swizzle)
    yield Case("scales.unswizzle_128x4", label, (tiles, rows, groups))
    yield Case("scales.packed_to_128x4", label, (packed,))
    yield Case("scales.packed_from_128x4", label, (tiles, rows))
    for layout, given in (("packed", packed), ("128x4", tiles)):
        args, options = (given, torch.tensor(live, device=device)), {"scale_layout": layout}
        yield Case("scales.zero_pad_rows", f"{label}, {layout}", args, options, read=nbytes(grid[:live]))
    yield Case("scales.restride_rows", label, (packed, rows + rows // 8))
    if rows % 128 == 0:
        yield Case("scales.utccp_rows", label, (packed,))
    yield Case("scales.align_mn_major", label, (numbers,), raw=align)


def _hopper(label: str, weight: Tensor) -> Iterator[Case]:
    named = f"{label}, {list(weight.shape)}"
    yield Case("scales.interleave_hopper_fp4", named, (weight,))
    yield Case("scales.deinterleave_hopper_fp4", named, (scales.interleave_hopper_fp4(weight),))


def _as_it_is(function: Any, given: Tensor) -> Any:
    return function(given)


def _deepgemm_pack(device: torch.device) -> Raw:
    """It reads fp32 numbers, four times the bytes: making them is part of its time."""

    def run(function: Any, given: Tensor) -> Any:
        return function((given.to(torch.int32) << 23).view(torch.float32))

    name = f"{deepgemm.LIBRARY.name} {deepgemm.PACK}, bytes made fp32 before it"
    return library_call(deepgemm.LIBRARY, deepgemm.PACK, device, run, name)
