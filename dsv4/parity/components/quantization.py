"""Contract of the quantisers: codes, scales and numbers are E0, in every layout and with its pads.

Three sorts of inputs. Exhaustive: every bf16 as the amax of a group (`alone`, beside a zero) and as any element of one (`beside` the
format's largest number, so that the scale is 1 up to there), every pair of a code and a scale byte, a spike at each index of a group, the
fp32 around every threshold of the scale, and the groups of public bug reports. Drawn: rows, groups and leading dimensions, with all
classes of values. A *form* is a dtype, a group and options: each is a graph to a compiler, so the lists below are short.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import AMAX_FLOORS, E2M1, E4M3
from dsv4.parity import invariants, strategies
from dsv4.parity.components.scales import flat, rows_of_tiles, tall, whole_columns
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows
from dsv4.parity.levels import Level
from dsv4.parity.quantiser_inputs import (
    Form,
    Options,
    at_thresholds,
    bf16_domains,
    block_form,
    coded,
    coded_blocks,
    coded_in_columns,
    coded_in_tiles,
    drawn,
    every_bf16,
    form,
    group_specs,
    groups_of,
    matrix_sizes,
    pairs,
    reported,
    small,
    spikes,
    weight_of,
)
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
        *bf16_domains(E4M3, [*({"amax_floor": name} for name in FP8_FLOORS), *FP32_SCALES], [{}, {"scale": "fp32"}, DIVIDED]),
        at_thresholds(E4M3, {"amax_floor": "none"}),
        at_thresholds(E4M3, {"scale": "fp32"}),
        spikes(128),
        reported({"amax_floor": "none"}),
        drawn(E4M3, FP8_FORMS),
    )
    columns = (small(E4M3, packed, "packed"), small(E4M3, mn_major, "mn_major"))
    return Contract(
        "quantization",
        "quantize_fp8",
        domains=(*in_rows, *columns, small(E4M3, swizzled, "swizzled")),
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


def _quantize_fp8_blocks() -> Contract:
    forms = (
        block_form("bf16", 128, 128, scale="fp32"),
        block_form("bf16", 32, 32, amax_floor="none"),
        block_form("bf16", 4, 32, amax_floor="flashmla"),
        block_form("fp32", 8, 4, amax_floor="sglang"),
        block_form("bf16", 2, 16, scale="fp32"),
    )
    matrices = strategies.specs(
        size=matrix_sizes(),
        form=st.sampled_from(forms),
        classes=strategies.some_of(tuple(strategies.VALUE_CLASSES)),
        seed=strategies.seeds(),
    )
    return Contract(
        "quantization",
        "quantize_fp8_blocks",
        domains=(
            Domain("alone", every_bf16(0.0, (1, 2), {}), exhaustive=2**16, why="every bf16 as amax"),
            Domain("beside", every_bf16(E4M3.max, (1, 2), {}), exhaustive=2**16, why="every bf16 beside the largest"),
            Domain("drawn", weight_of, matrices, why="whole and partial blocks, all classes of values"),
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
        domains=(*bf16_domains(E2M1, alone, beside), *more, drawn(E2M1, forms), small(E2M1, forms[0])),
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
            pairs("e4m3", torch.float8_e8m0fnu, torch.bfloat16),
            pairs("e4m3", torch.uint8, torch.float32),
            pairs("e2m1", torch.float8_e8m0fnu, torch.bfloat16),
            pairs("e2m1", torch.float8_e4m3fn, torch.bfloat16),
            Domain(
                "drawn",
                coded,
                strategies.specs(**shape, form=st.sampled_from(forms), lead=st.sampled_from([[], [2]]), seed=strategies.seeds()),
                why="every dtype of codes and scales",
            ),
            Domain(
                "blocks",
                coded_blocks,
                strategies.specs(size=matrix_sizes(), form=st.sampled_from(blocks), seed=strategies.seeds()),
                why="whole and partial blocks",
            ),
            Domain(
                "columns",
                coded_in_columns,
                strategies.specs(**shape, layout=st.sampled_from(["packed", "mn_major"]), seed=strategies.seeds()),
                why="packed and MN-major scales",
            ),
            Domain("swizzled", coded_in_tiles, strategies.specs(**shape, seed=strategies.seeds()), why="128x4 scales"),
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
        *bf16_domains(E4M3, variants, variants[:1]),
        *bf16_domains(E2M1, [], [*variants[1:], {"format": "mxfp4", "ties": "toward_zero", "zero_sign": "cleared"}]),
        drawn(E4M3, FAKE_FORMS),
        small(E4M3, FAKE_FORMS[0]),
        Domain("half_step", groups_of(E4M3), group_specs(powers, rounded), why="finite, power-of-two scales, nothing that rounds to 2^128"),
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
    _fp4("quantize_mxfp4", [{"amax_floor": name} for name in FP4_FLOORS], CODES_OF_FP4, MXFP4_FORMS, at_thresholds(E2M1, {}), reported({})),
    _fp4(
        "quantize_fp4_e4m3",
        [{"division": str(division)} for division in ScaleDivision],
        [CODES_OF_FP4[0], CODES_OF_FP4[-1]],
        FP4_E4M3_FORMS,
        at_thresholds(E2M1, {}),
    ),
    _dequantize(),
    _fake_quantize(),
)
