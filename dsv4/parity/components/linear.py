"""Contract of products with quantised weights, and of what makes their inputs.

Products are E1 on lattices, with NaN and extreme scales beside, and E3 elsewhere by the bounds of `dsv4.parity.linear_bounds`; with sums
of positive numbers, so long that Hopper's FP8 tensor cores lose bits unless each block of 128 is promoted, everybody is held to what a
promoting kernel reaches. Every pair of codes is there. `mxfp8_weight` moves bytes.

Producers write the codes of numbers that are rounded to bf16 before. They are E1 where every step up to there is exact or rounded once:
rows whose root mean square is a power of two, gates at which silu is their value or 0; E0 for groups with a NaN or an infinity; and E4
elsewhere, within what one rounding more permits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import cancelling, invariants, linear_bounds, linear_inputs, strategies
from dsv4.parity.components import norms as of_norms
from dsv4.parity.components.scales import flat, rows_of_tiles, whole_columns
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.parity.linear_inputs import CodedCall, Strategy, pair_specs, product_specs
from dsv4.reference import linear as reference
from dsv4.types import Quantized

ALONE = ("run_to_run", "inputs_unchanged", "poisoned_output", "strides", "graph_replay", "fullgraph")
KEEPS = (*ALONE, "batch", "padding", "empty", "opcheck")
LAID_OUT = ("batch", "padding", "poisoned_output", "empty")
INVARIANTS = (
    *invariants.on("plain", *KEEPS),
    *invariants.on("finite", "batch", "run_to_run"),
    *invariants.on("cancelling", "batch", "padding"),
    *invariants.on("many_finite", "run_to_run"),
)
CODED = Rows(("row_scales", "rows"))  # scales first: how many rows tiles have is read from the codes
EXACT_SUM = "exact sums, one rounding"
ROUNDED_SUM = "sums in fp32, promoted from every block where a tensor core keeps 14 bits; one rounding to bf16"
EVERY_CODE = "every pair of codes: a product has eight bits"
PLACED = "as in rows, in the places and strides of the layout, pads zero"


Build = Callable[[Spec, torch.device], Call]


def product_domains(build: Build, specs: Callable[..., Strategy], plain: dict[str, Strategy]) -> tuple[Domain, ...]:
    """Of a function that multiplies codes; `plain` fixes what costs graphs."""
    return (
        Domain("lattice", build, specs("lattice"), why="sums are exact"),
        Domain("special", build, specs("special"), why="NaN codes and scales, 2^-127 against 2^127"),
        Domain("plain", build, specs("lattice", **plain), why="one form"),
        Domain("finite", build, specs("finite"), why="arbitrary finite codes and scales"),
        Domain("cancelling", build, specs("cancelling"), why=cancelling.WHY),
        Domain("positive", build, specs("positive", density=st.just(1.0)), why="long sums of one sign"),
    )


def many_domains(build: Build, specs: Callable[..., Strategy], **fixed: Strategy) -> tuple[Domain, ...]:
    """Of a function that has kernels for many tokens."""
    kinds = {
        "lattice": "sums are exact",
        "special": "NaN codes and scales, 2^-127 against 2^127",
        "finite": "arbitrary finite codes and scales",
        "positive": "long sums of one sign",
    }
    return tuple(
        Domain(f"many_{kind}", linear_inputs.many(build), specs(kind, **linear_inputs.many_sizes(kind), **fixed), why=why)
        for kind, why in kinds.items()
    )


def _with_many(name: str, many: bool) -> tuple[str, ...]:
    return (name, f"many_{name}") if many else (name,)


def product_rows(bound: Callable[..., linear_bounds.Bound], *exact: str, many: bool = False) -> tuple[Output, ...]:
    """Of `product_domains`, of more in which sums are exact, and of `many_domains`."""
    return (
        Output("result", Level.E1, EXACT_SUM, ("lattice", "plain", *exact)),
        Output("result", Level.E1, "the same, NaN for NaN", _with_many("special", many), any_nan=True),
        Output("result", Level.E3, ROUNDED_SUM, ("cancelling", *_with_many("finite", many)), bound=bound()),
        Output("result", Level.E3, ROUNDED_SUM, _with_many("positive", many), bound=bound(hopper=True)),
    )


def _every_code(spec: Spec, device: torch.device) -> CodedCall:
    """One number a row, of the codes of the range, times every code."""
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)[:, None].to(device)
    mine, one = codes.view(torch.uint8)[spec["first"] : spec["first"] + spec["count"]], torch.ones(1, 1, device=device)
    x = Quantized(mine.view(torch.float8_e4m3fn), one.expand(len(mine), 1).contiguous())
    return CodedCall((x, codes, one.expand(2, 1).contiguous()), {"block": 128})


def _linear_fp8() -> Contract:
    plain = linear_inputs.plain_products(128, "bf16", "mn_major")
    return Contract(
        "linear",
        "linear_fp8",
        (
            Domain("codes", _every_code, exhaustive=256, why=EVERY_CODE),
            *product_domains(linear_inputs.fp8_call, product_specs, plain),
            *many_domains(linear_inputs.fp8_call, product_specs, block=st.just(32), form=st.sampled_from(["e8m0", "bf16", "uint8"])),
        ),
        (Output("result", Level.E0, EVERY_CODE, ("codes",), any_nan=True), *product_rows(linear_bounds.linear, "many_lattice", many=True)),
        INVARIANTS,
        CODED,
        exact=unrounded(reference.linear_fp8),
        not_claimed=("infinite fp32 scales, and sums that overflow on the way",),
    )


def _linear_mxfp8() -> Contract:
    return Contract(
        "linear",
        "linear_mxfp8",
        (
            *product_domains(linear_inputs.pair_call, pair_specs, linear_inputs.plain_pairs()),
            *many_domains(linear_inputs.pair_call, pair_specs),
        ),
        product_rows(linear_bounds.linear, "many_lattice", many=True),
        INVARIANTS,
        CODED,
        exact=unrounded(reference.linear_mxfp8),
        not_claimed=("sums that overflow on the way",),
    )


def _weight_bits(layout: str) -> Build:
    """Any codes, any scales."""

    def build(spec: Spec, device: torch.device) -> Call:
        n, k = spec["size"]
        codes = strategies.random_bits((n, k), spec["seed"], torch.float8_e4m3fn)
        scales = strategies.random_bits((-(-n // 32), -(-k // 32)), spec["seed"] ^ 1, getattr(torch, spec["stored"]))
        return Call((codes.to(device), scales.to(device)), {"scale_layout": layout})

    return build


def _mxfp8_weight() -> Contract:
    side = st.one_of(st.integers(1, 300), st.sampled_from([31, 32, 33, 127, 128, 129, 160, 256, 257]))
    specs = strategies.specs(
        size=st.tuples(side, side).map(list), stored=st.sampled_from(["float8_e8m0fnu", "uint8"]), seed=strategies.seeds()
    )
    return Contract(
        "linear",
        "mxfp8_weight",
        (
            Domain("packed", _weight_bits("packed"), specs, why="any bits; partial blocks on both sides"),
            Domain("swizzled", _weight_bits("128x4"), specs, why="any bits; partial blocks on both sides"),
        ),
        (
            Output("codes", Level.E0, "the codes that were given", view=flat),
            Output("scales", Level.E0, "moves bytes; pads zero", ("packed",), view=whole_columns, strides=True),
            Output("scales", Level.E0, "moves bytes; pads zero", ("swizzled",), view=flat),
        ),
        (*invariants.on("packed", *ALONE), *invariants.on("swizzled", "run_to_run", "poisoned_output", "strides")),
        not_claimed=("independence of rows: a block spans 32",),
    )


def _by_row(call: Call, name: str, tensor: Tensor) -> Tensor:
    tiled = name == "scales" and call.kwargs.get("scale_layout") == "128x4"
    return rows_of_tiles(tensor, call[0].shape[0]) if tiled else tensor


def _producer(
    function: str,
    domain: Callable[..., Domain],
    ends: Callable[[Call], linear_bounds.Ends],
    rows: tuple[int, ...],
    why: str,
) -> Contract:
    """`domain(kind, layout, name)` makes a domain of what the producer reads."""
    exact, moved = ("lattice", "packed", "swizzled", "mn_major"), ("packed", "mn_major")
    domains = (
        *(domain("lattice", layout, name) for layout, name in zip(("rows", "packed", "128x4", "mn_major"), exact, strict=True)),
        domain("special", "rows", "special"),
        domain("drawn", "rows", "drawn"),
    )
    outputs = (
        Output("codes", Level.E1, why, exact, view=flat),
        Output("codes", Level.E0, "NaN, or every step is exact", ("special",), view=flat),
        Output("codes", Level.E4, "codes of rows within their roundings", ("drawn",), permits=linear_bounds.permits_codes(ends)),
        Output("scales", Level.E1, why, ("lattice", "swizzled"), view=flat),
        Output("scales", Level.E1, PLACED, moved, view=whole_columns, strides=True),
        Output("scales", Level.E0, "NaN, or every step is exact", ("special",), view=flat),
        Output("scales", Level.E4, "scales of rows within their roundings", ("drawn",), permits=linear_bounds.permits_scales(ends)),
    )
    kept = (
        *invariants.on("packed", *KEEPS),
        *invariants.on("swizzled", *LAID_OUT),
        *invariants.on("mn_major", "batch", "poisoned_output"),
        *invariants.on("drawn", "batch"),
    )
    return Contract("linear", function, domains, outputs, kept, Rows(rows, read=_by_row))


NORMS = ([512, 128, "bfloat16", 0.0, "official"], [160, 32, "float32", 1e-20, "none"], [256, 32, "bfloat16", 3.0, "flashinfer"])
NORMS_DRAWN = ([512, 128, "bfloat16", 1e-6, "official"], [160, 32, "float32", 1e-20, "none"], [128, 32, "bfloat16", 1e-6, "flashinfer"])
NORMS_LAID_OUT = ([160, 32, "bfloat16", 1e-20, "official"], [256, 128, "bfloat16", 0.0, "official"])


def _norm_domain(kind: str, layout: str, name: str) -> Domain:
    forms = NORMS_DRAWN if kind == "drawn" else NORMS if layout == "rows" else NORMS_LAID_OUT
    classes = {"special": of_norms.SPECIAL, "drawn": of_norms.MODERATE}.get(kind)

    def build(spec: Spec, device: torch.device) -> Call:
        n, group, dtype, eps, floor = spec["form"]
        if classes:
            x = of_norms.matrix(spec, n)
        elif eps == 3:
            x = of_norms.lattice(spec, n, eps)
        else:
            x = linear_inputs.squares(spec["rows"], n, spec["seed"], spec["power"])
        options = {"eps": eps, "group": group, "scale_layout": layout, "amax_floor": floor}
        return Call((x.to(device), of_norms.weights(n, dtype, spec["seed"]).to(device)), options)

    drawn: dict[str, Strategy] = {"classes": strategies.some_of(classes)} if classes else {"power": st.integers(-6, 30)}
    specs = strategies.specs(rows=linear_inputs.rows_of(layout), form=st.sampled_from(list(forms)), **drawn, seed=strategies.seeds())
    whys = {"special": "NaN, infinity, rows of zeros without an eps", "drawn": "squares within fp32"}
    return Domain(name, build, specs, why=whys.get(kind, "a root mean square of 2^k"))


GATES = ([256, 128, "official"], [160, 32, "none"], [64, 32, "flashinfer"])
GATES_LAID_OUT = ([160, 32, "official"], [256, 128, "sglang"])
LIMITS = (None, 64.0, 33.3)
BELOW, UPS = ("below", *of_norms.MODERATE), ("normal", "outliers", "positive", "zeros")


def _swiglu_domain(kind: str, layout: str, name: str) -> Domain:
    forms = GATES if layout == "rows" else GATES_LAID_OUT

    def build(spec: Spec, device: torch.device) -> Call:
        (n, group, floor), rows, seed = spec["form"], spec["rows"], spec["seed"]
        up = linear_inputs.gates(spec["classes"], rows, n, group, seed ^ 1)
        if kind == "drawn":
            gate = linear_inputs.gates(spec["classes"], rows, n, group, seed)
        else:
            gate = linear_inputs.saturated(rows, n, group, seed)
        if kind == "special":
            gate, up = linear_inputs.sprinkled(gate, seed ^ 2), linear_inputs.sprinkled(up, seed ^ 3)
        both = torch.cat([gate, up], 1).to(device)
        parts = both.chunk(2, 1) if spec["halves"] else [part.contiguous() for part in both.chunk(2, 1)]
        return Call((*parts,), {"limit": spec["limit"], "group": group, "scale_layout": layout, "amax_floor": floor})

    specs = strategies.specs(
        rows=linear_inputs.rows_of(layout),
        form=st.sampled_from(list(forms)),
        classes=strategies.some_of(BELOW if kind == "drawn" else UPS),
        limit=st.sampled_from([10.0, None, 0.5] if kind == "drawn" else LIMITS),
        halves=st.booleans(),
        seed=strategies.seeds(),
    )
    whys = {"special": "NaN and infinities beside gates whose silu is their value", "drawn": "finite bf16, some gates far below the limit"}
    return Domain(name, build, specs, why=whys.get(kind, "gates whose silu is their value, or 0"))


CONTRACTS = (
    _linear_fp8(),
    _linear_mxfp8(),
    _mxfp8_weight(),
    _producer("norm_quantize", _norm_domain, linear_bounds.norm_ends, (0,), "the factor is a power of two, one rounding"),
    _producer("swiglu_quantize", _swiglu_domain, linear_bounds.swiglu_ends, (0, 1), "exact products of bf16, or one rounding of a limit"),
)
