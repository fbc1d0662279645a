"""Contract of the quantisers: codes, scales and numbers are E0, in every layout and with its pads.

Three sorts of inputs. Exhaustive: every bf16 as the amax of a group (`alone`, beside a zero) and as any element of one (`beside` the
format's largest number, so that the scale is 1 up to there), every pair of a code and a scale byte, a spike at each index of a group, the
fp32 around every threshold of the scale, and the groups of public bug reports. Drawn: rows, groups and leading dimensions, with all
classes of values. A *form* is a dtype, a group and options: each is a graph to a compiler, so the lists below are short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import AMAX_FLOORS, E2M1, E4M3, WORD_GROUPS, NumberFormat, align
from dsv4.parity import invariants, strategies
from dsv4.parity.components.scales import flat, in_columns, rows_of_tiles, tall, whole_columns
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.levels import Level
from dsv4.reference import quantization
from dsv4.types import ScaleDivision, Ties, ZeroSign

KEEPS = (
    "run_to_run",
    "inputs_unchanged",
    "poisoned_output",
    "batch",
    "padding",
    "strides",
    "empty",
    "fullgraph",
    "opcheck",
    "graph_replay",
)
LAID_OUT = ("batch", "padding", "poisoned_output", "empty")
CODES = "one rounding of a stated quotient"
SCALES = "a comparison of real numbers, or one stated rounding"
PLACED = "as above, in the places and strides of the layout, pad words zero"

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


def _every_bf16(partner: float, group: int | tuple[int, int], options: Options) -> Build:
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


def _at_thresholds(target: NumberFormat, options: Options) -> Domain:
    table = _thresholds(target)

    def build(spec: Spec, device: torch.device) -> Call:
        x = table[spec["first"] : spec["first"] + spec["count"], None]
        return Call((torch.cat([x, -x / 3], -1).to(device), 2), options)

    return Domain(f"thresholds{_suffix(options)}", build, exhaustive=len(table), why="fp32 amax around each power of two and floor")


def _spikes(group: int) -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        x = 100 * torch.eye(group, dtype=torch.bfloat16)[spec["first"] : spec["first"] + spec["count"]]
        return Call((x.to(device), group))

    return Domain("spikes", build, exhaustive=group, why="zeros but for 100 at each index")


def _reported(options: Options) -> Domain:
    table = torch.tensor([[*values, *[0.0] * (32 - len(values))] for values in REPORTED])

    def build(spec: Spec, device: torch.device) -> Call:
        return Call((table[spec["first"] : spec["first"] + spec["count"]].to(device), 32), options)

    return Domain("reported", build, exhaustive=len(REPORTED), why="groups of public bug reports")


def _suffix(options: Options) -> str:
    return "".join(f"_{value}" for value in options.values())


def _bf16_domains(target: NumberFormat, alone: Sequence[Options], beside: Sequence[Options]) -> list[Domain]:
    domains = [Domain(f"alone{_suffix(o)}", _every_bf16(0.0, 2, o), exhaustive=2**16, why="every bf16 as amax") for o in alone]
    domains += [
        Domain(f"beside{_suffix(o)}", _every_bf16(target.max, 2, o), exhaustive=2**16, why="every bf16 beside the largest") for o in beside
    ]
    return domains


def _groups(target: NumberFormat) -> Build:
    """x [*lead, rows, groups * group] of the classes drawn."""

    def build(spec: Spec, device: torch.device) -> Call:
        group = spec["form"]["group"]
        shape = (*spec.get("lead", ()), spec["rows"], spec["groups"] * group)
        x = strategies.values(spec["classes"], shape, group, spec["seed"], _dtype(spec["form"]["dtype"]), target)
        return Call((x.to(device), group), dict(spec["form"]["options"]))

    return build


def _specs(
    forms: Sequence[Form], classes: Sequence[str] = tuple(strategies.VALUE_CLASSES), **more: st.SearchStrategy[Any]
) -> st.SearchStrategy[Spec]:
    return strategies.specs(
        rows=tall(300),
        groups=st.integers(1, 4),
        form=st.sampled_from(list(forms)),
        classes=strategies.some_of(classes),
        **more,
        seed=strategies.seeds(),
    )


def _drawn(target: NumberFormat, forms: Sequence[Form]) -> Domain:
    leads = st.sampled_from([[], [1], [2], [2, 1]])
    return Domain("drawn", _groups(target), _specs(forms, lead=leads), why="all classes of values")


def _small(target: NumberFormat, one: Form, name: str = "plain") -> Domain:
    return Domain(name, _groups(target), _specs([one]), why="one form, two dimensions")


def _scales_by_row(call: Call, name: str, tensor: Tensor) -> Tensor:
    tiled = name == "scales" and call.kwargs.get("scale_layout") == "128x4"
    return rows_of_tiles(tensor, call[0].shape[0]) if tiled else tensor


FP8_FLOORS = [floor.name for floor in AMAX_FLOORS.values() if floor.least_byte_fp8 is not None]
FP4_FLOORS = [floor.name for floor in AMAX_FLOORS.values() if floor.least_byte_fp4 is not None]
FP32_SCALES: list[Options] = [
    *({"scale": "fp32", "amax_floor": name} for name in FP8_FLOORS if AMAX_FLOORS[name].value > 0),
    {"scale": "fp32", "amax_floor": "official", "division": str(ScaleDivision.DIVIDE)},
]
DIVIDED: Options = {"scale": "fp32", "division": "divide"}
CODES_OF_FP4: list[Options] = [{"ties": str(ties), "zero_sign": str(zero)} for ties in Ties for zero in ZeroSign]
FP8_FORMS = (
    form("bf16", 128),
    form("fp32", 32, amax_floor="none"),
    form("bf16", 1, amax_floor="sglang"),
    form("bf16", 2, amax_floor="flashinfer"),
    form("bf16", 32, scale="fp32"),
    form("bf16", 2, scale="fp32", amax_floor="flashmla"),
)


def _quantize_fp8() -> Contract:
    packed = form("bf16", 32, amax_floor="none", scale_layout="packed")
    swizzled = form("bf16", 32, amax_floor="none", scale_layout="128x4")
    mn_major = form("bf16", 32, scale="fp32", scale_layout="mn_major")
    in_rows = (
        *_bf16_domains(E4M3, [*({"amax_floor": name} for name in FP8_FLOORS), *FP32_SCALES], [{}, {"scale": "fp32"}, DIVIDED]),
        _at_thresholds(E4M3, {"amax_floor": "none"}),
        _at_thresholds(E4M3, {"scale": "fp32"}),
        _spikes(128),
        _reported({"amax_floor": "none"}),
        _drawn(E4M3, FP8_FORMS),
    )
    columns = (_small(E4M3, packed, "packed"), _small(E4M3, mn_major, "mn_major"))
    return Contract(
        "quantization",
        "quantize_fp8",
        domains=(*in_rows, *columns, _small(E4M3, swizzled, "swizzled")),
        outputs=(
            Output("codes", Level.E0, CODES, view=flat),
            Output("scales", Level.E0, SCALES, (*(domain.name for domain in in_rows), "swizzled"), view=flat),
            Output("scales", Level.E0, PLACED, ("packed", "mn_major"), view=whole_columns, strides=True),
        ),
        invariants=(
            *invariants.on("packed", *KEEPS),
            *invariants.on("swizzled", *LAID_OUT),
            *invariants.on("mn_major", *LAID_OUT),
        ),
        rows=Rows(read=_scales_by_row),
    )


def _weight(spec: Spec, device: torch.device) -> Call:
    """A matrix whose blocks hold the classes drawn: rows of blocks, cut at the right and lower edge."""
    group, (n, k) = spec["form"]["group"], spec["size"]
    bn, bk = group
    tall_blocks, wide_blocks = -(-n // bn), -(-k // bk)
    blocks = strategies.values(
        spec["classes"], (tall_blocks, wide_blocks, bn * bk), bn * bk, spec["seed"], _dtype(spec["form"]["dtype"]), E4M3
    )
    weight = blocks.unflatten(2, (bn, bk)).transpose(1, 2).flatten(2).flatten(0, 1)[:n, :k].contiguous()
    return Call((weight.to(device), (bn, bk)), dict(spec["form"]["options"]))


def _block_form(dtype: str, rows: int, columns: int, **options: Any) -> Form:
    return {"dtype": dtype, "group": [rows, columns], "options": options}


def _sizes() -> st.SearchStrategy[list[int]]:
    size = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 160]))
    return st.tuples(size, size).map(list)


def _quantize_fp8_blocks() -> Contract:
    forms = (
        _block_form("bf16", 128, 128, scale="fp32"),
        _block_form("bf16", 32, 32, amax_floor="none"),
        _block_form("bf16", 4, 32, amax_floor="flashmla"),
        _block_form("fp32", 8, 4, amax_floor="sglang"),
        _block_form("bf16", 2, 16, scale="fp32"),
    )
    drawn = strategies.specs(
        size=_sizes(), form=st.sampled_from(forms), classes=strategies.some_of(tuple(strategies.VALUE_CLASSES)), seed=strategies.seeds()
    )
    return Contract(
        "quantization",
        "quantize_fp8_blocks",
        domains=(
            Domain("alone", _every_bf16(0.0, (1, 2), {}), exhaustive=2**16, why="every bf16 as amax"),
            Domain("beside", _every_bf16(E4M3.max, (1, 2), {}), exhaustive=2**16, why="every bf16 beside the largest"),
            Domain("drawn", _weight, drawn, why="whole and partial blocks, all classes of values"),
        ),
        outputs=(Output("codes", Level.E0, CODES, view=flat), Output("scales", Level.E0, SCALES, view=flat)),
        invariants=invariants.on(
            "drawn", "run_to_run", "inputs_unchanged", "poisoned_output", "strides", "fullgraph", "opcheck", "graph_replay"
        ),
        not_claimed=("independence of rows: a block spans several",),
    )


def _fp4(function: str, alone: Sequence[Options], beside: Sequence[Options], forms: Sequence[Form], *more: Domain) -> Contract:
    return Contract(
        "quantization",
        function,
        domains=(*_bf16_domains(E2M1, alone, beside), *more, _drawn(E2M1, forms), _small(E2M1, forms[0])),
        outputs=(Output("codes", Level.E0, CODES, view=flat), Output("scales", Level.E0, SCALES, view=flat)),
        invariants=invariants.on("plain", *KEEPS),
        rows=Rows(),
    )


MXFP4_FORMS = (
    form("bf16", 32),
    form("fp32", 32, amax_floor="none"),
    form("bf16", 2, amax_floor="flashmla", ties="toward_zero"),
    form("bf16", 2, amax_floor="official", zero_sign="cleared"),
)
FP4_E4M3_FORMS = (
    form("bf16", 16),
    form("fp32", 2),
    form("bf16", 2, division="reciprocal"),
    form("bf16", 2, ties="toward_zero", zero_sign="cleared"),
)


def _pairs(numbers: str, scale: torch.dtype, dtype: torch.dtype) -> Domain:
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


def _coded(spec: Spec, device: torch.device) -> Call:
    form_, rows, groups = spec["form"], spec["rows"], spec["groups"]
    fp4 = form_["codes"] != "e4m3"
    width = groups * form_["group"] // (2 if fp4 else 1)
    codes = strategies.random_bits((*spec["lead"], rows, width), spec["seed"], STORED[form_["codes"]])
    factors = _factors(spec, (*spec["lead"], rows, groups))
    return Call((codes.to(device), factors.to(device), form_["group"]), {"dtype": _dtype(form_["dtype"])})


def _coded_blocks(spec: Spec, device: torch.device) -> Call:
    (n, k), (bn, bk) = spec["size"], spec["form"]["block"]
    codes = strategies.random_bits((n, k), spec["seed"], torch.float8_e4m3fn)
    factors = _factors(spec, (-(-n // bn), -(-k // bk)))
    return Call((codes.to(device), factors.to(device), (bn, bk)), {"dtype": torch.bfloat16})


def _coded_in_columns(spec: Spec, device: torch.device) -> Call:
    """Packed or MN-major scales, with ones in every pad bit."""
    rows, groups, layout = spec["rows"], spec["groups"], spec["layout"]
    codes = strategies.random_bits((rows, groups * 32), spec["seed"], torch.float8_e4m3fn)
    if layout == "packed":
        factors = strategies.random_bits((rows, align(groups, WORD_GROUPS) // WORD_GROUPS), spec["seed"] ^ 1, torch.int32)
    else:
        factors = _factors({"form": {"scales": "fp32"}, "seed": spec["seed"]}, (rows, groups))
    return Call((codes.to(device), in_columns(factors).to(device), 32), {"scale_layout": layout})


def _coded_in_tiles(spec: Spec, device: torch.device) -> Call:
    rows, groups = spec["rows"], spec["groups"]
    codes = strategies.random_bits((rows, groups * 32), spec["seed"], torch.float8_e4m3fn)
    tiles = strategies.random_bits((align(rows, 128) // 128, align(groups, 4) // 4, 32, 4), spec["seed"] ^ 1, torch.int32)
    return Call((codes.to(device), tiles.to(device), 32), {"scale_layout": "128x4"})


def _dequantize() -> Contract:
    forms = [
        {"codes": codes, "scales": stored, "group": group, "dtype": dtype}
        for codes, stored, group, dtype in (
            ("e4m3", "e8m0", 32, "bf16"),
            ("e4m3", "uint8", 128, "fp32"),
            ("e4m3", "fp32", 32, "bf16"),
            ("uint8", "e8m0", 32, "bf16"),
            ("int8", "uint8", 32, "bf16"),
            ("uint8", "e4m3", 16, "fp32"),
        )
    ]
    blocks = [{"block": block, "scales": stored} for block, stored in (([32, 32], "e8m0"), ([128, 128], "fp32"), ([1, 32], "fp32"))]
    shape = {"rows": tall(200), "groups": st.integers(1, 5)}
    return Contract(
        "quantization",
        "dequantize",
        domains=(
            _pairs("e4m3", torch.float8_e8m0fnu, torch.bfloat16),
            _pairs("e4m3", torch.uint8, torch.float32),
            _pairs("e2m1", torch.float8_e8m0fnu, torch.bfloat16),
            _pairs("e2m1", torch.float8_e4m3fn, torch.bfloat16),
            Domain(
                "drawn",
                _coded,
                strategies.specs(**shape, form=st.sampled_from(forms), lead=st.sampled_from([[], [2]]), seed=strategies.seeds()),
                why="every dtype of codes and scales",
            ),
            Domain(
                "blocks",
                _coded_blocks,
                strategies.specs(size=_sizes(), form=st.sampled_from(blocks), seed=strategies.seeds()),
                why="whole and partial blocks",
            ),
            Domain(
                "columns",
                _coded_in_columns,
                strategies.specs(**shape, layout=st.sampled_from(["packed", "mn_major"]), seed=strategies.seeds()),
                why="packed and MN-major scales",
            ),
            Domain("swizzled", _coded_in_tiles, strategies.specs(**shape, seed=strategies.seeds()), why="128x4 scales"),
        ),
        outputs=(Output("result", Level.E0, "one fp32 product, then at most one rounding", view=flat, any_nan=True),),
        invariants=(
            *invariants.on("columns", *KEEPS),
            *invariants.on("drawn", "batch", "strides"),
            *invariants.on("swizzled", "strides"),
            *invariants.on("blocks", "strides"),
        ),
        rows=Rows((0, 1)),
    )


FAKE_FORMS = (
    form("bf16", 32),
    form("fp32", 64, amax_floor="flashmla"),
    form("bf16", 32, format="mxfp4"),
    form("bf16", 2, format="mxfp4", ties="toward_zero", zero_sign="cleared"),
    form("bf16", 16, format="fp4_e4m3"),
)


def _half_a_step(call: Call, exact: Tensor) -> Tensor:
    """Half the distance of two codes at |x| / s, times s; and, where bf16 is denormal, half of its step."""
    x, group, mxfp4 = call[0], call[1], call.kwargs.get("format") == "mxfp4"
    target = E2M1 if mxfp4 else E4M3
    if mxfp4:
        exponents = quantization.quantize_mxfp4(x, group).scales
    else:
        exponents = quantization.quantize_fp8(x, group, amax_floor=call.kwargs.get("amax_floor", "official")).scales
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64, device=x.device), exponents.view(torch.uint8).int() - 127)
    scale = powers.repeat_interleave(group, -1)
    quotient = (exact.abs() / scale).clamp(min=target.min_normal)
    step = torch.ldexp(scale, torch.frexp(quotient).exponent - 1 - target.mantissa_bits)
    return step / 2 + (2.0**-134 if x.dtype is torch.bfloat16 else 0)


def _fake_quantize() -> Contract:
    rounded = [name for name in strategies.FINITE_CLASSES if name != "huge"]
    powers = [one for one in FAKE_FORMS if one["options"].get("format") != "fp4_e4m3"]
    variants: list[Options] = [{}, {"format": "mxfp4"}, {"format": "fp4_e4m3"}]
    domains = (
        *_bf16_domains(E4M3, variants, variants[:1]),
        *_bf16_domains(E2M1, [], [*variants[1:], {"format": "mxfp4", "ties": "toward_zero", "zero_sign": "cleared"}]),
        _drawn(E4M3, FAKE_FORMS),
        _small(E4M3, FAKE_FORMS[0]),
        Domain("half_step", _groups(E4M3), _specs(powers, rounded), why="finite, power-of-two scales, no number that rounds to 2^128"),
    )
    return Contract(
        "quantization",
        "fake_quantize",
        domains=domains,
        outputs=(
            Output("result", Level.E0, "the quantiser's codes times its scales: products of few bits", view=flat, any_nan=True),
            Output("result", Level.E3, "no code saturates, and codes are nearest", ("half_step",), bound=_half_a_step),
        ),
        invariants=invariants.on("plain", *KEEPS),
        rows=Rows(),
        exact=lambda x, group, **options: x.double(),
    )


CONTRACTS = (
    _quantize_fp8(),
    _quantize_fp8_blocks(),
    _fp4(
        "quantize_mxfp4", [{"amax_floor": name} for name in FP4_FLOORS], CODES_OF_FP4, MXFP4_FORMS, _at_thresholds(E2M1, {}), _reported({})
    ),
    _fp4(
        "quantize_fp4_e4m3",
        [{"division": str(division)} for division in ScaleDivision],
        [CODES_OF_FP4[0], CODES_OF_FP4[-1]],
        FP4_E4M3_FORMS,
        _at_thresholds(E2M1, {}),
    ),
    _dequantize(),
    _fake_quantize(),
)
