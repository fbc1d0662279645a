"""Argument checks of `quantization`, shared by both implementations: dtypes, shapes and host values, never what a tensor holds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dsv4 import checks
from dsv4.formats import AMAX_FLOORS, TILE_ROWS, WORD_GROUPS, AmaxFloor
from dsv4.types import ArgumentError, QuantFormat, ScaleDivision, ScaleFormat, ScaleLayout, Ties, ZeroSign

MAX_GROUP = 512
FP8_FLOORS = [floor.name for floor in AMAX_FLOORS.values() if floor.least_byte_fp8 is not None]
FP8_FLOORS_ABOVE_ZERO = [name for name in FP8_FLOORS if AMAX_FLOORS[name].value > 0]
FP4_FLOORS = [floor.name for floor in AMAX_FLOORS.values() if floor.least_byte_fp4 is not None]
OFFICIAL_FLOORS = {QuantFormat.FP8: "official", QuantFormat.MXFP4: "official_fp4"}


def groups(x: Tensor, group: int, least: int, dtypes: Sequence[str] = ("bf16", "fp32")) -> None:
    """x [..., n] of whole groups."""
    checks.tensor("x", x, dtypes, ("...", "n"))
    checks.power_of_two("group", group, least, MAX_GROUP)
    checks.multiple("x", x.shape[-1], group, "n, the last size, is counted in groups: append zeros, or choose another group")


def block(name: str, value: object) -> None:
    """A pair of block sides."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ArgumentError(name, repr(value), "must be a pair: rows and columns of a block")
    for side in value:
        checks.power_of_two(name, side, 1, MAX_GROUP)


def fp8_scale(scale: str, amax_floor: str, division: str) -> tuple[ScaleFormat, AmaxFloor, ScaleDivision]:
    """How an FP8 quantiser scales."""
    scale = checks.choice("scale", scale, ScaleFormat)
    checks.one_of("amax_floor", amax_floor, FP8_FLOORS)
    if scale is ScaleFormat.FP32 and amax_floor not in FP8_FLOORS_ABOVE_ZERO:
        limit = f"with fp32 scales must be one of {', '.join(FP8_FLOORS_ABOVE_ZERO)}"
        raise ArgumentError("amax_floor", repr(amax_floor), limit, "Without a floor a zero group would divide zero by zero")
    return scale, AMAX_FLOORS[amax_floor], checks.choice("division", division, ScaleDivision)


def layout(x: Tensor, scale: ScaleFormat, scale_layout: str) -> ScaleLayout:
    """A layout that can hold the scales of x."""
    chosen = checks.choice("scale_layout", scale_layout, ScaleLayout)
    if chosen is ScaleLayout.ROWS:
        return chosen
    if (chosen is ScaleLayout.MN_MAJOR) != (scale is ScaleFormat.FP32):
        allowed = "rows or mn_major" if scale is ScaleFormat.FP32 else "rows, packed or 128x4"
        raise ArgumentError("scale_layout", repr(str(chosen)), f"must be {allowed} with {scale} scales")
    if x.dim() != 2:
        raise ArgumentError("x", f"shape {list(x.shape)}", f"must have shape [rows, n] with the layout {chosen}")
    return chosen


def fp4_rounding(ties: str, zero_sign: str) -> tuple[Ties, ZeroSign]:
    """How an FP4 quantiser rounds."""
    return checks.choice("ties", ties, Ties), checks.choice("zero_sign", zero_sign, ZeroSign)


def fake(x: Tensor, group: int, format: str, amax_floor: str | None, dtypes: Sequence[str] = ("bf16", "fp32")) -> tuple[QuantFormat, str]:
    """Arguments of `fake_quantize`: the format, and the name of its floor ("" for fp4_e4m3, which has one)."""
    chosen = checks.choice("format", format, QuantFormat)
    groups(x, group, 1 if chosen is QuantFormat.FP8 else 2, dtypes)
    if chosen is QuantFormat.FP4_E4M3:
        if amax_floor is not None:
            raise ArgumentError("amax_floor", repr(amax_floor), "must be None for fp4_e4m3, which has one floor")
        return chosen, ""
    floor = OFFICIAL_FLOORS[chosen] if amax_floor is None else amax_floor
    checks.one_of("amax_floor", floor, FP8_FLOORS if chosen is QuantFormat.FP8 else FP4_FLOORS)
    return chosen, floor


def group_of_codes(shape: tuple[int, ...], group: int | tuple[int, int], layout: ScaleLayout, fp4: bool) -> tuple[int, ...]:
    """The group of codes that stand for numbers of `shape`, as a tuple: (group,) or (bn, bk)."""
    if isinstance(group, tuple):
        block("group", group)
        if len(shape) != 2:
            raise ArgumentError("codes", f"{len(shape)} dimensions", "must have two with a block as group")
    else:
        checks.power_of_two("group", group, 2 if fp4 else 1, MAX_GROUP)
        checks.multiple("codes", shape[-1], group, "The numbers in the last dimension are counted in groups")
    if layout is not ScaleLayout.ROWS and (fp4 or isinstance(group, tuple) or len(shape) != 2):
        limit = "must be rows for FP4 codes, for blocks, and where codes are not of two dimensions"
        raise ArgumentError("scale_layout", repr(str(layout)), limit)
    return group if isinstance(group, tuple) else (group,)


def scales(codes: Tensor, value: Tensor, shape: tuple[int, ...], block: tuple[int, ...], layout: ScaleLayout, fp4: bool) -> tuple[int, ...]:
    """Scales that belong to codes which stand for numbers of `shape`; the shape of their grid."""
    grid = tuple(-(-size // side) for size, side in zip(shape, (1,) * (len(shape) - len(block)) + block, strict=True))
    match layout:
        case ScaleLayout.PACKED:
            checks.tensor("scales", value, "int32", (grid[0], -(-grid[1] // WORD_GROUPS)))
        case ScaleLayout.SWIZZLED_128X4:
            checks.tensor("scales", value, "int32", (-(-grid[0] // TILE_ROWS), -(-grid[1] // WORD_GROUPS), 32, 4))
        case ScaleLayout.MN_MAJOR:
            checks.tensor("scales", value, "fp32", grid)
        case ScaleLayout.ROWS:
            checks.tensor("scales", value, ("e8m0", "uint8", "e4m3" if fp4 else "fp32"), grid)
    checks.same_device("scales", value, "codes", codes)
    return grid
