"""The quantisers' bodies, and how they are called on the inductor and eager paths.

A body sees [groups, group]: the number of groups varies from call to call, all else is fixed for a graph. Floors vary too and come as 0-d
tensors: the least byte (int32) of a power-of-two scale, the bound in fp32 of any other. `run` is `run_compiled` or `run_eagerly`.

    kind        scale of a group              codes
    fp8         power of two                  E4M3
    fp8_fp32    amax / 448 in fp32            E4M3
    mxfp4       power of two                  E2M1, two a byte
    fp4_e4m3    amax / 6 rounded to E4M3      E2M1, two a byte
"""

from __future__ import annotations

from collections.abc import Callable
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast import bits
from dsv4.fast.codecs import unpack_fp4_body
from dsv4.fast.compiled import run_eagerly
from dsv4.formats import AMAX_FLOORS, E2M1, E4M3, FP4_E4M3_AMAX_FLOOR, TILE_ROWS, WORD_GROUPS, align, fp32

Run = Callable[..., Any]

LIMITS = {"fp8_fp32": E4M3.max, "fp4_e4m3": E2M1.max}
RECIPROCALS = {kind: fp32(1 / limit) for kind, limit in LIMITS.items()}


def quantize_fp8(run: Run, x: Tensor, group: int, scale: str, scale_layout: str, amax_floor: str, division: str) -> tuple[Tensor, Tensor]:
    """Codes as uint8 and scales (uint8, int32 or fp32) in their layout."""
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=torch.uint8), empty_scales(x, group, scale, scale_layout)
    codes, rows = _fp8(run, x.reshape(-1, group), scale, amax_floor, division)
    return codes.view(x.shape), _laid_out(run, rows.view(*x.shape[:-1], -1), scale_layout)


def quantize_fp8_blocks(
    run: Run, weight: Tensor, rows: int, columns: int, scale: str, amax_floor: str, division: str
) -> tuple[Tensor, Tensor]:
    """Codes as uint8 and scales (uint8 or fp32) [ceil(n/rows), ceil(k/columns)]."""
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    if weight.numel() == 0:
        return weight.new_empty(weight.shape, dtype=torch.uint8), weight.new_empty(grid, dtype=scale_dtype(scale))
    codes, scales = _fp8(run, _to_blocks(weight, rows, columns), scale, amax_floor, division)
    return _from_blocks(codes, weight.shape, rows, columns), scales.view(grid)


def quantize_mxfp4(run: Run, x: Tensor, group: int, amax_floor: str, ties: str, zero_sign: str) -> tuple[Tensor, Tensor]:
    """Packed codes and scale bytes."""
    return _fp4(run, x, group, "mxfp4", amax_floor, "reciprocal", ties, zero_sign)


def quantize_fp4_e4m3(run: Run, x: Tensor, group: int, division: str, ties: str, zero_sign: str) -> tuple[Tensor, Tensor]:
    """Packed codes and the bytes of E4M3 scales."""
    return _fp4(run, x, group, "fp4_e4m3", "", division, ties, zero_sign)


def dequantize(
    run: Run, codes: Tensor, scales: Tensor, rows: int, columns: int, numbers: str, scale: str, scale_layout: str, dtype: str
) -> Tensor:
    """The numbers of codes (uint8, packed for e2m1) whose scales each hold for `rows` by `columns` of them."""
    shape = numbers_shape(codes, numbers)
    if codes.numel() == 0:
        return codes.new_empty(shape, dtype=getattr(torch, dtype))
    if numbers == "e2m1":
        codes = run(unpack_fp4_body, codes.reshape(-1), order="low_first").view(shape)
    factors = _as_rows(scales, shape[0], shape[-1] // columns, scale_layout).reshape(-1)
    whole = rows == 1 and shape[-1] % columns == 0
    blocks = codes.reshape(-1, columns) if whole else _to_blocks(codes, rows, columns)
    values: Tensor = run(dequantize_body, blocks, factors, numbers=numbers, scale=scale, dtype=dtype)
    return values.view(shape) if whole else _from_blocks(values, shape, rows, columns)


def fake_quantize(run: Run, x: Tensor, group: int, format: str, amax_floor: str, ties: str, zero_sign: str, division: str) -> Tensor:
    """The numbers of the codes of x, in the dtype of x; codes and scales stay inside the body."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    options = rule(format, amax_floor, division)
    fp4 = {} if format == "fp8" else {"ties": ties, "zero_sign": zero_sign}
    result: Tensor = run(fake_body, x.reshape(-1, group), _floor(x, format, amax_floor), **options, **fp4)
    return result.view(x.shape)


def fp8_body(x: Tensor, floor: Tensor, *, kind: str, division: str, on_scale: bool, zeroes: bool) -> tuple[Tensor, Tensor]:
    """Codes [groups, group] and scales [groups]."""
    stored, _, quotients = scaled(x.to(torch.float32), floor, kind, division, on_scale, zeroes)
    codes = bits.encode_e4m3(quotients).to(torch.uint8)
    return codes, (stored if kind == "fp8_fp32" else stored.to(torch.uint8))[:, 0]


def fp4_body(
    x: Tensor, floor: Tensor, *, kind: str, division: str, on_scale: bool, zeroes: bool, ties: str, zero_sign: str
) -> tuple[Tensor, Tensor]:
    """Packed codes [groups, group/2] and scale bytes [groups]."""
    stored, _, quotients = scaled(x.to(torch.float32), floor, kind, division, on_scale, zeroes)
    codes = bits.encode_e2m1(quotients, ties, zero_sign).to(torch.uint8)
    return bits.pack_pairs(codes, "low_first"), stored.to(torch.uint8)[:, 0]


def fake_body(
    x: Tensor, floor: Tensor, *, kind: str, division: str, on_scale: bool, zeroes: bool, ties: str = "", zero_sign: str = ""
) -> Tensor:
    """[groups, group] in the dtype of x."""
    _, scale, quotients = scaled(x.to(torch.float32), floor, kind, division, on_scale, zeroes)
    if kind == "fp8":
        numbers = bits.decode_e4m3(bits.encode_e4m3(quotients))
    else:
        numbers = bits.decode_e2m1(bits.encode_e2m1(quotients, ties, zero_sign))
    return (numbers * scale).to(x.dtype)


def dequantize_body(codes: Tensor, scales: Tensor, *, numbers: str, scale: str, dtype: str) -> Tensor:
    """[groups, group]; codes one a byte, scales [groups]."""
    torch._check(codes.shape[0] == scales.shape[0])
    decode = {"ue8m0": bits.decode_e8m0, "e4m3": bits.decode_e4m3}
    factors = scales if scale == "fp32" else decode[scale](scales.to(torch.int32))
    values = (bits.decode_e4m3 if numbers == "e4m3" else bits.decode_e2m1)(codes.to(torch.int32))
    return (values * factors[:, None]).to(getattr(torch, dtype))


def scaled(numbers: Tensor, floor: Tensor, kind: str, division: str, on_scale: bool, zeroes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Scales [groups, 1] as they are stored (bytes as int32, or fp32) and as fp32 numbers, and x / scale."""
    amax = bits.largest(numbers)
    if kind in ("fp8", "mxfp4"):
        byte = bits.ue8m0(amax, "e4m3" if kind == "fp8" else "e2m1", floor)
        inverse = bits.inverse_power(byte)
        if zeroes:
            inverse = torch.where(byte == 0, 0.0, inverse)
        return byte, bits.decode_e8m0(byte), numbers * inverse
    bounded = bits.as_fp32(amax) if on_scale else torch.maximum(bits.as_fp32(amax), floor)
    # By a tensor: CUDA divides by a number as a product with its reciprocal.
    scale = bounded / torch.full_like(bounded, LIMITS[kind]) if division == "divide" else bounded * RECIPROCALS[kind]
    scale = torch.where(amax >= bits.INFINITY, nan, torch.maximum(scale, floor) if on_scale else scale)
    if kind == "fp8_fp32":
        return scale, scale, numbers / scale
    byte = bits.encode_e4m3(scale)
    scale = bits.decode_e4m3(byte)
    return byte, scale, numbers / scale


def padded_scales(rows: int, groups: int, scale_layout: str) -> tuple[tuple[int, int], int]:
    """Rows and groups of a layout with its pads, and its pitch: the distance of rows, columns (words or numbers) or row tiles (bytes)."""
    words = -(-groups // WORD_GROUPS)
    match scale_layout:
        case "packed":
            return (align(rows, 4), words * WORD_GROUPS), align(rows, 4)
        case "mn_major":
            return (align(rows, 4), groups), align(rows, 4)
        case "128x4":
            return (align(rows, TILE_ROWS), words * WORD_GROUPS), words * WORD_GROUPS * TILE_ROWS
    return (rows, groups), groups


def empty_scales(x: Tensor, group: int, scale: str, scale_layout: str) -> Tensor:
    """Memory for the scales of x, pads included, with their shape and strides."""
    if scale_layout == "rows":
        return x.new_empty((*x.shape[:-1], x.shape[-1] // group), dtype=scale_dtype(scale))
    rows, groups = x.shape[0], x.shape[-1] // group
    (tall, wide), _ = padded_scales(rows, groups, scale_layout)
    if scale_layout == "128x4":
        return x.new_empty((tall // TILE_ROWS, wide // WORD_GROUPS, 32, 4), dtype=torch.int32)
    if scale_layout == "packed":
        return x.new_empty((wide // WORD_GROUPS, tall), dtype=torch.int32).t()[:rows]
    return x.new_empty((wide, tall), dtype=torch.float32).t()[:rows]


def numbers_shape(codes: Tensor, numbers: str) -> tuple[int, ...]:
    """The shape of what codes stand for: E2M1 codes are two a byte."""
    return (*codes.shape[:-1], codes.shape[-1] * 2) if numbers == "e2m1" else tuple(codes.shape)


def _fp8(run: Run, groups: Tensor, scale: str, amax_floor: str, division: str) -> tuple[Tensor, Tensor]:
    kind = "fp8" if scale == "ue8m0" else "fp8_fp32"
    codes, scales = run(fp8_body, groups, _floor(groups, kind, amax_floor), **rule(kind, amax_floor, division))
    return codes, scales


def _fp4(run: Run, x: Tensor, group: int, kind: str, amax_floor: str, division: str, ties: str, zero_sign: str) -> tuple[Tensor, Tensor]:
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8), empty_scales(x, group, "ue8m0", "rows")
    options = rule(kind, amax_floor, division)
    codes, scales = run(fp4_body, x.reshape(-1, group), _floor(x, kind, amax_floor), ties=ties, zero_sign=zero_sign, **options)
    return codes.view(*x.shape[:-1], -1), scales.view(*x.shape[:-1], -1)


def rule(kind: str, amax_floor: str, division: str) -> dict[str, Any]:
    """What a graph is made for; options that do not matter to a kind are the same for all its graphs."""
    floor = AMAX_FLOORS.get(amax_floor)
    power = kind in ("fp8", "mxfp4")
    return {
        "kind": kind,
        "division": "" if power else division,
        "on_scale": not power and floor is not None and floor.bounds == "scale",
        "zeroes": floor is not None and floor.zero_byte_zeroes_codes,
    }


def floor_of(kind: str, amax_floor: str) -> int | float:
    """The bound that keeps scales of a kind away from zero: a byte of power-of-two scales, else a number."""
    if kind == "fp4_e4m3":
        return FP4_E4M3_AMAX_FLOOR
    floor = AMAX_FLOORS[amax_floor]
    if kind == "fp8_fp32":
        return floor.value
    return int((floor.least_byte_fp8 if kind == "fp8" else floor.least_byte_fp4) or 0)


def _floor(x: Tensor, kind: str, amax_floor: str) -> Tensor:
    value = floor_of(kind, amax_floor)
    return torch.full((), value, dtype=torch.int32 if isinstance(value, int) else torch.float32, device=x.device)


def scale_dtype(scale: str) -> torch.dtype:
    """What an operator stores scales in."""
    return torch.float32 if scale == "fp32" else torch.uint8


def _backend(run: Run) -> str:
    return "eager" if run is run_eagerly else "inductor"


def _laid_out(run: Run, rows: Tensor, scale_layout: str) -> Tensor:
    if scale_layout == "rows":
        return rows
    layout = {"packed": "pack_ue8m0", "128x4": "swizzle_128x4", "mn_major": "align_mn_major"}[scale_layout]
    result: Tensor = getattr(torch.ops.dsv4, layout)(rows, _backend(run))
    return result


def _as_rows(scales: Tensor, rows: int, groups: int, scale_layout: str) -> Tensor:
    """Scales of any layout as rows of bytes or of fp32. Copies, not worth a graph."""
    if scale_layout in ("rows", "mn_major"):
        return scales
    words = scales.permute(0, 3, 2, 1).flatten(0, 2) if scale_layout == "128x4" else scales
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:rows, :groups]


def _to_blocks(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """[n, k] to [blocks, rows * columns], zeros where a block at an edge is partial."""
    n, k = matrix.shape
    padded: Tensor = pad(matrix, (0, align(k, columns) - k, 0, align(n, rows) - n))
    return padded.view(-(-n // rows), rows, -(-k // columns), columns).transpose(1, 2).reshape(-1, rows * columns)


def _from_blocks(blocks: Tensor, shape: tuple[int, ...], rows: int, columns: int) -> Tensor:
    """The inverse of `_to_blocks`."""
    n, k = shape
    grid = blocks.view(-(-n // rows), -(-k // columns), rows, columns).transpose(1, 2)
    return grid.reshape(align(n, rows), align(k, columns))[:n, :k].contiguous()
