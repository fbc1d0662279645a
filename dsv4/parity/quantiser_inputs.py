"""Inputs of quantisers, and codes with scales: the domains of `components/quantization.py`.

A *form* is a dtype, a group and options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import AMAX_FLOORS, E4M3, WORD_GROUPS, NumberFormat, align
from dsv4.parity import strategies
from dsv4.parity.components.scales import in_columns, tall
from dsv4.parity.contracts import Call, Domain, Spec

# Groups of public bug reports (their ids are in the mutants), filled up with zeros: small amax, ties, 957 and its like, zeros of both
# signs, an amax whose scale is 1.5, values that bf16 would round first.
REPORTED: tuple[tuple[float, ...], ...] = (
    (2.8094e-36, 1e-36, -9e-37),
    (1e-38, 3e-39),
    (9.1835e-40,),
    (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.5),
    (957.0, 1.0),
    (448.0, 450.0),
    (448.0, 447.0),
    (896.0, -1e-3),
    (0.0,) * 32,
    (-0.0,) * 32,
    (672.0,) * 32,
    (448.0, 1.0625, 1.0625 + 2.0**-12, 17.0, 17.0 + 2.0**-8),
    (6.0, 12.0),
)
Options = dict[str, Any]
Form = dict[str, Any]
Build = Callable[[Spec, torch.device], Call]


def form(dtype: str, group: int, **options: Any) -> Form:
    """One way to call a quantiser."""
    return {"dtype": dtype, "group": group, "options": options}


def _dtype(name: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


def every_bf16(partner: float, group: int | tuple[int, int], options: Options) -> Build:
    """Each bf16 of the range beside one other number, a group a row."""

    def build(spec: Spec, device: torch.device) -> Call:
        x = torch.arange(spec["first"], spec["first"] + spec["count"]).to(torch.int16).view(torch.bfloat16)
        return Call((torch.stack([x, torch.full_like(x, partner)], -1).to(device), group), options)

    return build


def _thresholds(target: NumberFormat) -> Tensor:
    """max * 2^k, the floors of amax, max * a midpoint of E4M3, and the two fp32 neighbours of each."""
    powers = torch.ldexp(torch.full((280,), target.max, dtype=torch.float64), torch.arange(-160, 120))
    floors = [floor.value * scale for floor in AMAX_FLOORS.values() for scale in (1.0, target.max)]
    codes = strategies.magnitudes(E4M3)
    ties = target.max * (codes[1:] + codes[:-1]) / 2  # of a scale that is rounded to E4M3
    centres = torch.cat([powers.float(), torch.tensor(floors), ties])
    bits = centres.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    return bits.clamp(min=0).view(torch.float32).flatten()


def at_thresholds(target: NumberFormat, options: Options) -> Domain:
    """Groups of two in fp32: an amax of `_thresholds`, and minus a third of it."""
    table = _thresholds(target)

    def build(spec: Spec, device: torch.device) -> Call:
        x = table[spec["first"] : spec["first"] + spec["count"], None]
        return Call((torch.cat([x, -x / 3], -1).to(device), 2), options)

    return Domain(f"thresholds{_suffix(options)}", build, exhaustive=len(table), why="fp32 amax around each power of two and floor")


def spikes(group: int) -> Domain:
    """A row for each index of a group, zero elsewhere."""

    def build(spec: Spec, device: torch.device) -> Call:
        x = 100 * torch.eye(group, dtype=torch.bfloat16)[spec["first"] : spec["first"] + spec["count"]]
        return Call((x.to(device), group))

    return Domain("spikes", build, exhaustive=group, why="zeros but for 100 at each index")


def reported(options: Options) -> Domain:
    """REPORTED, in groups of 32."""
    table = torch.tensor([[*values, *[0.0] * (32 - len(values))] for values in REPORTED])

    def build(spec: Spec, device: torch.device) -> Call:
        return Call((table[spec["first"] : spec["first"] + spec["count"]].to(device), 32), options)

    return Domain("reported", build, exhaustive=len(REPORTED), why="groups of public bug reports")


def _suffix(options: Options) -> str:
    return "".join(f"_{value}" for value in options.values())


def bf16_domains(target: NumberFormat, alone: Sequence[Options], beside: Sequence[Options]) -> list[Domain]:
    """Every bf16 beside zero, and beside the largest number of `target`, for each of these options."""
    domains = [Domain(f"alone{_suffix(o)}", every_bf16(0.0, 2, o), exhaustive=2**16, why="every bf16 as amax") for o in alone]
    domains += [
        Domain(f"beside{_suffix(o)}", every_bf16(target.max, 2, o), exhaustive=2**16, why="every bf16 beside the largest") for o in beside
    ]
    return domains


def groups_of(target: NumberFormat) -> Build:
    """x [*lead, rows, groups * group] of the classes drawn."""

    def build(spec: Spec, device: torch.device) -> Call:
        group = spec["form"]["group"]
        shape = (*spec.get("lead", ()), spec["rows"], spec["groups"] * group)
        x = strategies.values(spec["classes"], shape, group, spec["seed"], _dtype(spec["form"]["dtype"]), target)
        return Call((x.to(device), group), dict(spec["form"]["options"]))

    return build


def group_specs(
    forms: Sequence[Form], classes: Sequence[str] = tuple(strategies.VALUE_CLASSES), **more: st.SearchStrategy[Any]
) -> st.SearchStrategy[Spec]:
    """Specs for `groups_of`."""
    return strategies.specs(
        rows=tall(300),
        groups=st.integers(1, 4),
        form=st.sampled_from(list(forms)),
        classes=strategies.some_of(classes),
        **more,
        seed=strategies.seeds(),
    )


def drawn(target: NumberFormat, forms: Sequence[Form]) -> Domain:
    """Two to four dimensions, and any of the forms."""
    leads = st.sampled_from([[], [1], [2], [2, 1]])
    return Domain("drawn", groups_of(target), group_specs(forms, lead=leads), why="all classes of values")


def small(target: NumberFormat, one: Form, name: str = "plain") -> Domain:
    """Two dimensions and one form: cheap enough for invariants."""
    return Domain(name, groups_of(target), group_specs([one]), why="one form, two dimensions")


def weight_of(spec: Spec, device: torch.device) -> Call:
    """A matrix whose blocks hold the classes drawn: rows of blocks, cut at the right and lower edge."""
    group, (n, k) = spec["form"]["group"], spec["size"]
    bn, bk = group
    tall_blocks, wide_blocks = -(-n // bn), -(-k // bk)
    blocks = strategies.values(
        spec["classes"], (tall_blocks, wide_blocks, bn * bk), bn * bk, spec["seed"], _dtype(spec["form"]["dtype"]), E4M3
    )
    weight = blocks.unflatten(2, (bn, bk)).transpose(1, 2).flatten(2).flatten(0, 1)[:n, :k].contiguous()
    return Call((weight.to(device), (bn, bk)), dict(spec["form"]["options"]))


def block_form(dtype: str, rows: int, columns: int, **options: Any) -> Form:
    """A form whose group is a block."""
    return {"dtype": dtype, "group": [rows, columns], "options": options}


def matrix_sizes() -> st.SearchStrategy[list[int]]:
    """Rows and columns of a weight."""
    size = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 160]))
    return st.tuples(size, size).map(list)


def pairs(numbers: str, scale: torch.dtype, dtype: torch.dtype) -> Domain:
    """Every byte of codes with every byte of scales."""

    def build(spec: Spec, device: torch.device) -> Call:
        numbered = torch.arange(spec["first"], spec["first"] + spec["count"], device=device)[:, None]
        codes, factors = (numbered & 255).to(torch.uint8), (numbered >> 8).to(torch.uint8).view(scale)
        e4m3 = numbers == "e4m3"
        return Call((codes.view(torch.float8_e4m3fn) if e4m3 else codes, factors, 1 if e4m3 else 2), {"dtype": dtype})

    kind = {torch.float8_e8m0fnu: "ue8m0", torch.float8_e4m3fn: "e4m3", torch.uint8: "uint8"}[scale]
    name = f"{numbers}_{kind}_{'bf16' if dtype is torch.bfloat16 else 'fp32'}"
    return Domain(name, build, exhaustive=2**16, why="every pair of a code and a scale")


STORED = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "fp32": torch.float32,
}


def _factors(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """Scales of the form's dtype: every byte, or fp32 numbers of all magnitudes, some of them zero, infinite or NaN."""
    kind, seed = spec["form"]["scales"], spec["seed"] ^ 1
    if kind != "fp32":
        return strategies.random_bits(shape, seed, STORED[kind])
    return strategies.values(["outliers", "tiny", "huge", "zeros", "inf", "nan"], shape, 1, seed, torch.float32, E4M3)


def coded(spec: Spec, device: torch.device) -> Call:
    """Random codes with scales in rows."""
    form_, rows, groups = spec["form"], spec["rows"], spec["groups"]
    fp4 = form_["codes"] != "e4m3"
    width = groups * form_["group"] // (2 if fp4 else 1)
    codes = strategies.random_bits((*spec["lead"], rows, width), spec["seed"], STORED[form_["codes"]])
    factors = _factors(spec, (*spec["lead"], rows, groups))
    return Call((codes.to(device), factors.to(device), form_["group"]), {"dtype": _dtype(form_["dtype"])})


def coded_blocks(spec: Spec, device: torch.device) -> Call:
    """Random codes with a scale for each block."""
    (n, k), (bn, bk) = spec["size"], spec["form"]["block"]
    codes = strategies.random_bits((n, k), spec["seed"], torch.float8_e4m3fn)
    factors = _factors(spec, (-(-n // bn), -(-k // bk)))
    return Call((codes.to(device), factors.to(device), (bn, bk)), {"dtype": torch.bfloat16})


def coded_in_columns(spec: Spec, device: torch.device) -> Call:
    """Packed or MN-major scales, with ones in every pad bit."""
    rows, groups, layout = spec["rows"], spec["groups"], spec["layout"]
    codes = strategies.random_bits((rows, groups * 32), spec["seed"], torch.float8_e4m3fn)
    if layout == "packed":
        factors = strategies.random_bits((rows, align(groups, WORD_GROUPS) // WORD_GROUPS), spec["seed"] ^ 1, torch.int32)
    else:
        factors = _factors({"form": {"scales": "fp32"}, "seed": spec["seed"]}, (rows, groups))
    return Call((codes.to(device), in_columns(factors.to(device)), 32), {"scale_layout": layout})


def coded_in_tiles(spec: Spec, device: torch.device) -> Call:
    """Random codes with 128x4 scales, pads random."""
    rows, groups = spec["rows"], spec["groups"]
    codes = strategies.random_bits((rows, groups * 32), spec["seed"], torch.float8_e4m3fn)
    tiles = strategies.random_bits((align(rows, 128) // 128, align(groups, 4) // 4, 32, 4), spec["seed"] ^ 1, torch.int32)
    return Call((codes.to(device), tiles.to(device), 32), {"scale_layout": "128x4"})
