"""Contract of the output projection.

Products are as those of `linear`: E1 on lattices, with NaN and extreme scales beside, E3 elsewhere, and on long sums of positive numbers
within what promotion reaches. The bf16 form of wo_a sums in fp32 in any order.

A rotation is exact but for one rounding and a quantiser is E0, so `rotate_quantize` is E2 for every bit pattern. `project_groups_pair`
quantises what `project_groups` rounds to bf16: E1 on lattices, and E4 within what its bound leaves elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import cancelling, invariants, lattices, linear_bounds, linear_inputs, strategies
from dsv4.parity.components import norms as of_norms
from dsv4.parity.components import rotary as of_rotary
from dsv4.parity.components.linear import CODED, EXACT_SUM, KEEPS, LAID_OUT, PLACED, product_domains, product_rows
from dsv4.parity.components.scales import flat, rows_of_tiles, whole_columns
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.parity.linear_inputs import CodedCall, Strategy, pair_specs, product_specs
from dsv4.reference import output_projection as reference

BLOCK = 128
LARGEST = 31  # of the integers of the bf16 form: five bits, and sums below 2^20


def _group_sizes(kind: str) -> Strategy:
    """[tokens, groups, rank, width]."""
    if kind == "positive":
        return st.tuples(st.sampled_from([1, 2, 8]), st.integers(1, 2), st.sampled_from([1, 8]), st.sampled_from([2048, 4096])).map(list)
    if kind == "cancelling":
        return st.tuples(st.sampled_from([8, 1, 2, 17, 33]), st.integers(1, 2), st.sampled_from([8, 1, 160]), st.just(1024)).map(list)
    width = st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 160, 256, 300]))
    plain = st.tuples(linear_inputs.tokens(), st.integers(1, 4), st.sampled_from([32, 1, 8, 40, 16]), width)
    wide = st.tuples(st.sampled_from([1, 7, 17]), st.integers(2, 3), st.sampled_from([129, 136]), width)
    return linear_inputs.often([plain, plain, wide]).map(list)


def _group_specs(kind: str, **fixed: Strategy) -> Strategy:
    return product_specs(kind, **{"size": _group_sizes(kind), "scale": st.sampled_from(["ue8m0", "fp32"]), **fixed})


def _fp8(spec: Spec, device: torch.device) -> CodedCall:
    """The FP8 form."""
    (tokens, groups, rank, width), form = spec["size"], spec["form"]
    o, weight, scales = linear_inputs.operands(spec, (tokens, groups), (groups, rank), width, BLOCK)
    args = (linear_inputs.moved(o, form, device), weight.to(device), scales.to(device))
    return CodedCall(args, {"scale": spec["scale"]}, form == linear_inputs.COLUMNS)


def _bf16(spec: Spec, device: torch.device) -> CodedCall:
    """The official form: integers, normal numbers, or integers with NaN and infinities among them."""
    (tokens, groups, rank, width), kind, seed = spec["size"], spec["kind"], spec["seed"]
    shapes = (tokens, groups, width), (groups, rank, width)
    if kind == "cancelling":
        parts = [part.bfloat16() for part in cancelling.pair(*shapes, seed)]
    elif kind == "finite":
        parts = [torch.randn(shape, generator=strategies.generator(seed ^ number)).bfloat16() for number, shape in enumerate(shapes)]
    else:
        parts = [
            lattices.integers(shape, seed ^ number, LARGEST, density=spec["density"]).bfloat16() for number, shape in enumerate(shapes)
        ]
    if kind == "special":
        parts = [linear_inputs.sprinkled(part.flatten(0, 1), seed ^ 2).view(part.shape) for part in parts]
    return CodedCall(tuple(part.to(device) for part in parts))


def _bf16_specs(kind: str, **fixed: Strategy) -> Strategy:
    parts: dict[str, Strategy] = {"size": _group_sizes(kind), "kind": st.just(kind), "density": st.sampled_from([1.0, 0.3]), **fixed}
    return strategies.specs(**parts, seed=strategies.seeds())


PLAIN_GROUPS = st.tuples(st.sampled_from([2, 1, 7, 17, 65]), st.just(2), st.sampled_from([16, 32]), st.sampled_from([32, 160])).map(list)


def _project_groups() -> Contract:
    plain = {**linear_inputs.plain_products(BLOCK, "bf16", "mn_major"), "size": PLAIN_GROUPS, "scale": st.just("ue8m0")}
    return Contract(
        "output_projection",
        "project_groups",
        (
            *product_domains(_fp8, _group_specs, plain),
            Domain("own_scale", _fp8, _group_specs("lattice", form=st.just("bf16"), scale=st.just("fp32")), why="amax / 448 as it is"),
            Domain("lattice_bf16", _bf16, _bf16_specs("lattice"), why="sums are exact"),
            Domain("plain_bf16", _bf16, _bf16_specs("lattice", size=PLAIN_GROUPS), why="two groups"),
            Domain("special_bf16", _bf16, _bf16_specs("special"), why="NaN and infinities"),
            Domain("finite_bf16", _bf16, _bf16_specs("finite"), why="normal numbers"),
            Domain("cancelling_bf16", _bf16, _bf16_specs("cancelling"), why=cancelling.WHY),
        ),
        (
            *product_rows(linear_bounds.groups, "own_scale", "lattice_bf16", "plain_bf16"),
            Output("result", Level.E1, "exact sums, NaN for NaN", ("special_bf16",), any_nan=True),
            Output(
                "result",
                Level.E3,
                "sums in fp32 in any order, one rounding to bf16",
                ("finite_bf16", "cancelling_bf16"),
                bound=linear_bounds.groups(),
            ),
        ),
        (
            *invariants.on("plain", *KEEPS),
            *invariants.on("plain_bf16", *KEEPS),
            *invariants.on("finite", "batch"),
            *invariants.on("finite_bf16", "batch", "run_to_run"),
            *(one for name in ("cancelling", "cancelling_bf16") for one in invariants.on(name, "batch", "padding")),
        ),
        CODED,
        exact=unrounded(reference.project_groups),
        not_claimed=("infinite fp32 scales, and sums that overflow on the way",),
    )


def _whole(scales: Tensor) -> Tensor:
    """Memory of scales [tokens, groups, n] that lie in columns of their group, pads included."""
    return whole_columns(scales.transpose(0, 1))


# heads, dim, rotated dims, groups, group, dtype of positions
ROTATIONS = ([4, 64, 32, 2, 128, "int64"], [4, 96, 64, 2, 32, "int32"], [2, 64, 64, 2, 32, "int64"], [8, 40, 8, 1, 32, "int32"])


def _rotation(layout: str) -> Callable[[Spec, torch.device], Call]:
    def build(spec: Spec, device: torch.device) -> Call:
        heads, dim, rotated, groups, group, dtype = spec["form"]
        rows, seed = spec["rows"], spec["seed"]
        o = of_norms.matrix(spec, dim) if heads == 1 else of_norms.matrix({**spec, "rows": rows * heads}, dim)
        at = of_rotary.positions(rows, seed, dtype)
        args = (o.view(rows, heads, dim).to(device), of_rotary.table(rotated, spec["stretched"]).to(device), at.to(device))
        return Call(args, {"groups": groups, "group": group, "scale_layout": layout, "amax_floor": spec["floor"]})

    return build


def _rotate_quantize() -> Contract:
    specs = strategies.specs(
        rows=linear_inputs.tokens(65),
        form=st.sampled_from(list(ROTATIONS)),
        classes=strategies.some_of(of_rotary.EVERYTHING),
        stretched=st.booleans(),
        floor=st.sampled_from(["sglang", "official", "none"]),
        seed=strategies.seeds(),
    )
    why = "exact products, one fp64 addition, rounded to fp32 and to bf16; a quantiser"
    return Contract(
        "output_projection",
        "rotate_quantize",
        tuple(
            Domain(layout, _rotation(layout), specs, why="every bit pattern; positions outside of the table")
            for layout in ("rows", "packed", "mn_major")
        ),
        (
            Output("codes", Level.E2, why, view=flat),
            Output("scales", Level.E2, why, ("rows",), view=flat),
            Output("scales", Level.E2, PLACED, ("packed", "mn_major"), view=_whole, strides=True, any_nan=True),
        ),
        (*invariants.on("packed", *KEEPS), *invariants.on("mn_major", "batch", "poisoned_output"), *invariants.on("rows", "batch")),
        Rows((0, 2)),
    )


def _paired(build: Callable[[Spec, torch.device], CodedCall], layout: str) -> Callable[[Spec, torch.device], CodedCall]:
    """`rows` beyond the tokens, or as many."""

    def made(spec: Spec, device: torch.device) -> CodedCall:
        call = build(spec, device)
        rows = spec["more"] and spec["size"][0] + spec["more"]
        return CodedCall(call.args, {**call.kwargs, "scale_layout": layout, "rows": rows, "pair_floor": spec["floor"]}, call.columns)

    return made


def _pair_row(call: Call, name: str, tensor: Tensor) -> Tensor:
    rows = call["rows"].shape[0]
    tiled = name == "scales" and call.kwargs["scale_layout"] == "128x4"
    return rows_of_tiles(tensor, rows) if tiled else tensor[:rows]


def _pair_sizes() -> Strategy:
    """[tokens, groups, rank, width], groups times rank a multiple of 32."""
    shape = st.sampled_from([[1, 32], [2, 16], [3, 32], [2, 80], [4, 8]])
    width = st.sampled_from([32, 7, 100, 129, 160, 256])
    return st.tuples(linear_inputs.tokens(), shape, width).map(lambda drawn: [drawn[0], *drawn[1], drawn[2]])


def _project_groups_pair() -> Contract:
    more, floor = st.sampled_from([None, 1, 5, 130]), st.sampled_from(["flashinfer", "flashinfer", "none", "official"])
    loose: dict[str, Strategy] = {"size": _pair_sizes(), "more": more, "floor": floor}
    tight: dict[str, Strategy] = {"size": _pair_sizes(), "more": st.just(None), "floor": st.just("flashinfer")}
    plain: dict[str, Strategy] = {**tight, "size": PLAIN_GROUPS}
    plain_fp8 = {**linear_inputs.plain_products(BLOCK, "e8m0"), **plain, "scale": st.just("ue8m0")}
    exact = "every step is exact, or rounded once"

    def domain(name: str, kind: str, layout: str, fixed: dict[str, Strategy], why: str) -> Domain:
        fp8 = "fp8" in name
        return Domain(name, _paired(_fp8 if fp8 else _bf16, layout), (_group_specs if fp8 else _bf16_specs)(kind, **fixed), why=why)

    domains = (
        domain("packed", "lattice", "packed", loose, "sums are exact; rows past the tokens"),
        domain("swizzled", "lattice", "128x4", loose, "sums are exact; rows past the tokens"),
        domain("packed_fp8", "lattice", "packed", loose, "sums are exact; rows past the tokens"),
        domain("swizzled_fp8", "lattice", "128x4", loose, "sums are exact; rows past the tokens"),
        domain("special", "special", "packed", loose, "NaN and infinities"),
        domain("plain", "lattice", "packed", plain, "as many rows as tokens"),
        domain("plain_swizzled", "lattice", "128x4", plain, "as many rows as tokens"),
        domain("plain_fp8", "lattice", "packed", plain_fp8, "one form"),
        domain("finite", "finite", "packed", tight, "normal numbers"),
        domain("finite_fp8", "finite", "packed", tight, "arbitrary finite codes and scales"),
    )
    bitwise = tuple(one.name for one in domains if not one.name.startswith("finite"))
    swizzled, columns = (tuple(name for name in bitwise if ("swizzled" in name) is tiled) for tiled in (True, False))
    rounded, ends = ("finite", "finite_fp8"), linear_bounds.pair_ends
    return Contract(
        "output_projection",
        "project_groups_pair",
        domains,
        (
            Output("codes", Level.E1, exact, bitwise, view=flat),
            Output("codes", Level.E4, "codes of rows within their roundings", rounded, permits=linear_bounds.permits_codes(ends)),
            Output("scales", Level.E1, PLACED, columns, view=whole_columns, strides=True),
            Output("scales", Level.E1, exact, swizzled, view=flat),
            Output("scales", Level.E4, "scales of rows within their roundings", rounded, permits=linear_bounds.permits_scales(ends)),
        ),
        (
            *invariants.on("plain", *KEEPS),
            *invariants.on("plain_swizzled", *LAID_OUT),
            *invariants.on("plain_fp8", *LAID_OUT, "run_to_run"),
            *invariants.on("packed", "poisoned_output"),
        ),
        Rows(("row_scales", "rows"), read=_pair_row),
    )


def _out(spec: Spec, device: torch.device) -> CodedCall:
    """A product of `linear`, its input split into groups where these are whole blocks."""
    call = linear_inputs.fp8_call(spec, device)
    z, groups, block = call.args[0], spec["groups"], spec["block"]
    if isinstance(z, Tensor):
        split: Any = z.unflatten(1, (groups, -1)) if z.shape[1] % groups == 0 else z
    else:
        whole = z.codes.shape[1] % (groups * block) == 0 and not call.columns
        split = z._replace(codes=z.codes.unflatten(1, (groups, -1)), scales=z.scales.unflatten(1, (groups, -1))) if whole else z
    return CodedCall((split, *call.args[1:]), call.kwargs, call.columns)


def _out_specs(kind: str, **fixed: Strategy) -> Strategy:
    k = st.sampled_from([256, 128, 32, 100, 160, 64])
    plain = st.tuples(linear_inputs.tokens(), st.integers(1, 40), k)
    wide = st.tuples(st.sampled_from([1, 17]), st.sampled_from([129, 160]), k)
    sizes = {} if kind in ("positive", "cancelling") else {"size": linear_inputs.often([plain, plain, wide]).map(list)}
    return product_specs(kind, **{"groups": st.sampled_from([2, 1, 4]), **sizes, **fixed})


def _project_out() -> Contract:
    return Contract(
        "output_projection",
        "project_out",
        (
            *product_domains(_out, _out_specs, linear_inputs.plain_products(32, "bf16", "e8m0")),
            Domain("pairs", linear_inputs.pair_call, pair_specs("lattice"), why=EXACT_SUM),
            Domain("plain_pairs", linear_inputs.pair_call, pair_specs("lattice", **linear_inputs.plain_pairs()), why="few layouts"),
        ),
        product_rows(linear_bounds.linear, "pairs", "plain_pairs"),
        (
            *invariants.on("plain", *KEEPS),
            *invariants.on("plain_pairs", "batch", "empty", "strides", "fullgraph"),
            *invariants.on("cancelling", "batch"),
        ),
        CODED,
        exact=unrounded(reference.project_out),
        not_claimed=("a sum over ranks: each rank's part is a call of its own",),
    )


CONTRACTS = (_project_groups(), _rotate_quantize(), _project_groups_pair(), _project_out())
