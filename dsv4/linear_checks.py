"""Argument checks of `linear` and `output_projection`, shared by both implementations: dtypes, shapes, strides and host values, never what
a tensor holds. Some hand back what they have read from the arguments, such as codes apart from scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4 import checks, norm_checks, quantization_checks
from dsv4.formats import AMAX_FLOORS, TILE_ROWS, AmaxFloor
from dsv4.types import ArgumentError, Mxfp8Pair, Quantized, ScaleFormat, ScaleLayout

BLOCKS = (32, 128)  # V4.1 and V4
MXFP8_GROUP = 32
MOST_ROWS = 2**31 - 1  # of a pair
WORD = 128  # numbers whose four scales share a word of a pair
SCALES = ("e8m0", "uint8", "fp32")
LAYOUTS = tuple(ScaleLayout)  # made here: some versions of Dynamo cannot go through an enum
PAIR_LAYOUTS = (ScaleLayout.PACKED, ScaleLayout.SWIZZLED_128X4)
ROTATED_LAYOUTS = (ScaleLayout.ROWS, ScaleLayout.PACKED, ScaleLayout.MN_MAJOR)

Floats = str | Sequence[str]  # "bf16"; the reference also takes fp64 where its roundings are off


def linear_fp8(
    x: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, block: int, floats: Floats = "bf16", name: str = "x"
) -> tuple[Tensor, Tensor | None]:
    """Arguments of `linear_fp8`; the numbers of x and None, or its codes and scales."""
    _size("block", block)
    numbers, scales = _operand(name, x, floats, "linear_mxfp8 takes pairs")
    tokens, k = checks.tensor(_codes(name, scales), numbers, ("e4m3",) if scales is not None else floats, ("tokens", "k")).shape
    _weight("weight", weight, "e4m3", ("n", k))
    if k < 1:
        raise ArgumentError("weight", f"shape {list(weight.shape)}", "must have at least one column")
    checks.same_device("weight", weight, name, numbers)
    if scales is not None:
        checks.beside(f"{name}.scales", scales, SCALES, (tokens, -(-k // block)), f"{name}.codes", numbers)
    checks.beside("weight_scales", weight_scales, SCALES, (-(-weight.shape[0] // block), -(-k // block)), "weight", weight)
    return numbers, scales


def linear_mxfp8(x: Mxfp8Pair, weight: Mxfp8Pair, name: str = "x") -> None:
    """Arguments of `linear_mxfp8`."""
    _pair(name, x)
    _pair("weight", weight)
    _weight("weight.codes", weight.codes, "e4m3", ("n", x.codes.shape[1]))
    checks.same_device("weight.codes", weight.codes, f"{name}.codes", x.codes)


def mxfp8_weight(weight: Tensor, block_scales: Tensor, scale_layout: str) -> ScaleLayout:
    """Arguments of `mxfp8_weight`; the layout."""
    _weight("weight", weight, "e4m3", ("n", "k"))
    n, k = weight.shape
    if k < 1:
        raise ArgumentError("weight", f"shape {list(weight.shape)}", "must have at least one column")
    checks.e8m0_bits("block_scales", block_scales)
    checks.beside("block_scales", block_scales, ("e8m0", "uint8"), (-(-n // MXFP8_GROUP), -(-k // MXFP8_GROUP)), "weight", weight)
    return _layout(scale_layout, PAIR_LAYOUTS)


def norm_quantize(
    x: Tensor, weight: Tensor, eps: float, group: int, scale_layout: str, amax_floor: str, floats: Floats = "bf16"
) -> tuple[ScaleLayout, AmaxFloor]:
    """Arguments of `norm_quantize`; layout and floor."""
    norm_checks.rms(x, weight, eps, floats)
    checks.tensor("x", x, floats, ("tokens", "n"))
    _size("group", group)
    checks.multiple("x", x.shape[1], group, "n, the last size, is counted in groups")
    return _layout(scale_layout, LAYOUTS), _floor("amax_floor", amax_floor)


def swiglu_quantize(
    gate: Tensor, up: Tensor, limit: float | None, group: int, scale_layout: str, amax_floor: str, floats: Floats = "bf16"
) -> tuple[ScaleLayout, AmaxFloor]:
    """Arguments of `swiglu_quantize`; layout and floor."""
    checks.tensor("gate", gate, floats, ("tokens", "n"))
    checks.beside("up", up, floats, tuple(gate.shape), "gate", gate)
    if gate.shape[1] < 1:
        raise ArgumentError("gate", f"shape {list(gate.shape)}", "must have at least one number in a row")
    if limit is not None:
        checks.at_least("limit", limit, 0.0)
        checks.at_most("limit", limit, norm_checks.LARGEST_FP32)
        if limit <= norm_checks.LEAST_FP32 / 2:  # rounds to 0
            raise ArgumentError("limit", repr(limit), "must be above 0, as an fp32 number", "None is for no limit")
    _size("group", group)
    checks.multiple("gate", gate.shape[1], group, "n, the last size, is counted in groups")
    return _layout(scale_layout, LAYOUTS), _floor("amax_floor", amax_floor)


def project_groups(
    o: Tensor | Quantized, weight: Tensor, weight_scales: Tensor | None, scale: str, amax_floor: str, floats: Floats = "bf16"
) -> tuple[Tensor, Tensor | None, ScaleFormat]:
    """Arguments of `project_groups`; the numbers of o and None, or its codes and scales; and how numbers are scaled."""
    chosen, _, _ = quantization_checks.fp8_scale(scale, amax_floor, "reciprocal")
    numbers, scales = _operand("o", o, floats, "project_out takes pairs")
    codes = _codes("o", scales)
    tokens, groups, width = checks.tensor(codes, numbers, ("e4m3",) if scales is not None else floats, ("tokens", "groups", "width")).shape
    if weight_scales is None:
        _unscaled(weight, scales)
    _weight("weight", weight, "bf16" if weight_scales is None else "e4m3", (groups, "rank", width))
    if 0 in weight.shape:
        raise ArgumentError("weight", f"shape {list(weight.shape)}", "must have at least one group, one row and one column")
    checks.same_device("weight", weight, "o", numbers)
    if scales is not None:
        checks.beside("o.scales", scales, SCALES, (tokens, groups, -(-width // WORD)), "o.codes", numbers)
    if weight_scales is not None:
        grid = (groups, -(-weight.shape[1] // WORD), -(-width // WORD))
        checks.beside("weight_scales", weight_scales, SCALES, grid, "weight", weight)
    return numbers, scales, chosen


def rotate_quantize(
    o: Tensor,
    table: Tensor,
    positions: Tensor,
    groups: int,
    group: int,
    scale_layout: str,
    amax_floor: str,
    floats: Floats = "bf16",
) -> tuple[ScaleLayout, AmaxFloor]:
    """Arguments of `rotate_quantize`; layout and floor."""
    tokens, heads, dim = checks.tensor("o", o, floats, ("tokens", "heads", "dim")).shape
    if heads < 1 or dim < 2 or dim % 2:
        raise ArgumentError("o", f"shape {list(o.shape)}", "must have at least one head, of an even number of dims")
    checks.beside("table", table, "fp32", ("positions", "dims"), "o", o)
    places, dims = table.shape
    if places < 1 or dims < 2 or dims % 2 or dims > dim:
        limit = f"must have a position or more, and 2 dims or more, an even number of at most the {dim} of a head"
        raise ArgumentError("table", f"shape {list(table.shape)}", limit, "rope_table builds it")
    checks.beside("positions", positions, ("int64", "int32"), (tokens,), "o", o)
    checks.at_least("groups", groups, 1)
    if heads % groups:
        raise ArgumentError("groups", str(groups), f"must divide the {heads} heads of o")
    _size("group", group)
    checks.multiple("o", heads // groups * dim, group, "It counts the numbers of a group of heads, which are quantised in groups")
    return _layout(scale_layout, ROTATED_LAYOUTS), _floor("amax_floor", amax_floor)


def project_groups_pair(
    o: Tensor | Quantized,
    weight: Tensor,
    weight_scales: Tensor | None,
    scale_layout: str,
    rows: int | None,
    scale: str,
    amax_floor: str,
    pair_floor: str,
    floats: Floats = "bf16",
) -> tuple[Tensor, Tensor | None, ScaleFormat, ScaleLayout, int]:
    """Arguments of `project_groups_pair`; what `project_groups` gives, the layout, and the rows of the pair."""
    numbers, scales, chosen = project_groups(o, weight, weight_scales, scale, amax_floor, floats)
    checks.multiple(
        "weight", weight.shape[0] * weight.shape[1], MXFP8_GROUP, "groups * rank, a row of the pair, is counted in groups of 32"
    )
    tokens = numbers.shape[0]
    if rows is not None:
        checks.at_least("rows", rows, tokens)
        checks.at_most("rows", rows, MOST_ROWS)
    _floor("pair_floor", pair_floor)
    return numbers, scales, chosen, _layout(scale_layout, PAIR_LAYOUTS), tokens if rows is None else rows


def project_out(
    z: Tensor | Quantized | Mxfp8Pair, weight: Tensor, weight_scales: Tensor | None, block: int, floats: Floats = "bf16"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Arguments of `project_out` with a weight that is no pair; the numbers of z, a row a token, and None, or its codes and scales so, and
    the scales of the weight.
    """
    if isinstance(z, Mxfp8Pair):
        raise ArgumentError("weight", type(weight).__name__, "must be an Mxfp8Pair beside a pair", "mxfp8_weight makes one")
    if weight_scales is None:
        raise ArgumentError("weight_scales", "None", "must be given: an FP8 weight is never cast without", "Beside two pairs it is None")
    return *linear_fp8(_flat(z, floats, block), weight, weight_scales, block, floats, "z"), weight_scales


def project_out_pairs(z: Tensor | Quantized | Mxfp8Pair, weight: Mxfp8Pair, weight_scales: Tensor | None) -> Mxfp8Pair:
    """Arguments of `project_out` with a weight that is a pair; z, which is one then."""
    if not isinstance(z, Mxfp8Pair):
        raise ArgumentError("z", type(z).__name__, "must be an Mxfp8Pair beside a pair", "project_groups_pair makes one")
    if weight_scales is not None:
        raise ArgumentError("weight_scales", type(weight_scales).__name__, "must be None beside a pair, which has its own")
    linear_mxfp8(z, weight, "z")
    return z


def _flat(z: Tensor | Quantized, floats: Floats, block: int) -> Tensor | Quantized:
    """z [tokens, groups, rank] as [tokens, groups * rank]; of two dimensions it stays as it is."""
    numbers, scales = _operand("z", z, floats, "project_out takes them beside a pair as weight")
    checks.tensor(_codes("z", scales), numbers, ("e4m3",) if scales is not None else floats)
    if numbers.dim() != 3:
        return z
    if scales is None:
        return numbers.flatten(1)
    tokens, groups, rank = numbers.shape
    _size("block", block)
    checks.multiple("z.codes", rank, block, "rank, the last size, is counted in blocks where z is quantised")
    checks.beside("z.scales", scales, SCALES, (tokens, groups, rank // block), "z.codes", numbers)
    return Quantized(numbers.flatten(1), scales.flatten(1))


def _operand(name: str, value: object, floats: Floats, pairs: str) -> tuple[Tensor, Tensor | None]:
    """Numbers and None, or codes and scales."""
    if isinstance(value, Quantized):
        return value.codes, checks.tensor(f"{name}.scales", value.scales, SCALES)
    if isinstance(value, Mxfp8Pair):
        raise ArgumentError(name, "Mxfp8Pair", "must be a tensor, or Quantized(codes, scales)", pairs)
    if isinstance(value, tuple):
        raise ArgumentError(
            name, type(value).__name__, "must be a tensor, or Quantized(codes, scales)", "A plain tuple does not say what it holds"
        )
    if isinstance(value, Tensor) and value.dtype == torch.float8_e4m3fn:
        raise ArgumentError(name, "float8_e4m3fn", "codes come with their scales", "Use Quantized(codes, scales)")
    return checks.tensor(name, value, floats), None


def _codes(name: str, scales: Tensor | None) -> str:
    return name if scales is None else f"{name}.codes"


def _weight(name: str, value: Tensor, dtypes: str, shape: Sequence[str | int]) -> None:
    """A weight whose rows are contiguous: copying one at each call would cost more than the product."""
    checks.tensor(name, value, dtypes, shape)
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(name, f"strides {value.stride()}", "must have contiguous rows", "Use contiguous() once, when it is loaded")


def _unscaled(weight: object, scales: Tensor | None) -> None:
    """Without scales of the weight both operands are bf16."""
    if isinstance(weight, Tensor) and weight.dtype == torch.float8_e4m3fn:
        raise ArgumentError("weight_scales", "None", "must be given: an FP8 weight is never cast without")
    if scales is not None:
        raise ArgumentError("o", "Quantized", "must be bf16 beside a bf16 weight", "Give an e4m3 weight and its weight_scales")


def _pair(name: str, value: object) -> None:
    if not isinstance(value, Mxfp8Pair):
        limit = "must be an Mxfp8Pair: the type says that groups are of 32"
        raise ArgumentError(name, type(value).__name__, limit, "Mxfp8Pair(*norm_quantize(..., group=32, scale_layout='packed')) is one")
    rows, k = checks.tensor(f"{name}.codes", value.codes, "e4m3", ("rows", "k")).shape
    if k < 1:
        raise ArgumentError(f"{name}.codes", f"shape {list(value.codes.shape)}", "must have at least one column")
    words = -(-k // WORD)
    scales = checks.tensor(f"{name}.scales", value.scales, "int32")
    tiled = scales.dim() == 4
    checks.tensor(f"{name}.scales", scales, "int32", (-(-rows // TILE_ROWS), words, 32, 4) if tiled else (rows, words))
    checks.same_device(f"{name}.scales", scales, f"{name}.codes", value.codes)


def _size(name: str, value: int) -> None:
    if type(value) is not int or value not in BLOCKS:
        raise ArgumentError(name, repr(value), f"must be one of {', '.join(map(str, BLOCKS))}")


def _layout(scale_layout: str, allowed: Sequence[ScaleLayout]) -> ScaleLayout:
    chosen = checks.choice("scale_layout", scale_layout, ScaleLayout)
    checks.one_of("scale_layout", chosen, allowed)
    return chosen


def _floor(name: str, amax_floor: str) -> AmaxFloor:
    checks.one_of(name, amax_floor, quantization_checks.FP8_FLOORS)
    return AMAX_FLOORS[amax_floor]
