"""Contract of the rotations.

Products of bf16 and fp32 are exact in fp64 and one subtraction or addition follows, so `apply_rope` is E2 for every bit pattern, whatever
the backend; NaN for NaN. Positions come from inside and outside of the table. `norm_rope` is E1 where its norm is exact, and otherwise
within what the norm's bound leaves of a rotation.

A form is the shape of a token with the dtype of its positions and the direction, and costs a graph. Tables hold V4's plain and stretched
frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.configs import V4_FLASH
from dsv4.parity import invariants, strategies
from dsv4.parity.components import norms as of_norms
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.reference import norms, rotary

PLACES = 300  # of a table
FORMS = ([[512], 64, "int64", False], [[4, 128], 64, "int32", True], [[2, 3, 64], 64, "int64", False], [[72], 24, "int32", True])
NORMED = ([[2, 512], "", 1e-6], [[512], "bfloat16", 1e-20], [[256], "float32", 3.0])
EVERYTHING = (*of_norms.MODERATE, "tiny", "huge", "nan", "inf", "bits")
BY_POSITION = Rows((0, 2))


def table(dims: int, stretched: bool) -> Tensor:
    """fp32 [PLACES, dims]."""
    yarn = V4_FLASH.rope_scaling if stretched else None
    return rotary.rope_table(rotary.rope_frequencies(160000.0 if stretched else 10000.0, dims, yarn=yarn), PLACES)


def positions(count: int, seed: int, dtype: str) -> Tensor:
    """Positions of the table; one in six lies outside."""
    source = strategies.generator(seed ^ 3)
    far = -(2**31), 2**31 - 1
    outside = torch.tensor([-1, -2, PLACES, PLACES + 1, *far])[torch.randint(0, 6, (count,), generator=source)]
    inside = torch.randint(0, PLACES, (count,), generator=source)
    return torch.where(torch.rand(count, generator=source) < 1 / 6, outside, inside).to(getattr(torch, dtype))


def _turned(spec: Spec, device: torch.device) -> Call:
    shape, dims, dtype, inverse = spec["form"]
    x = of_norms.matrix(spec, math.prod(shape)).view(-1, *shape)
    at = positions(spec["rows"], spec["seed"], dtype)
    return Call((x.to(device), table(dims, spec["stretched"]).to(device), at.to(device)), {"inverse": inverse})


def _apply_rope() -> Contract:
    return Contract(
        "rotary",
        "apply_rope",
        (
            Domain(
                "drawn",
                _turned,
                of_norms.specs(FORMS, EVERYTHING, stretched=st.booleans()),
                why="every bit pattern; positions outside of the table",
            ),
        ),
        (Output("result", Level.E2, "exact products, one fp64 addition, rounded to fp32 and to bf16", any_nan=True),),
        invariants.on("drawn", *of_norms.KEEPS),
        BY_POSITION,
    )


def _normed_then_turned(spec: Spec, device: torch.device) -> Call:
    shape, dtype, eps = spec["form"]
    n = shape[-1]
    if "classes" in spec:
        x = of_norms.matrix(spec, math.prod(shape))
    else:
        x = torch.stack([of_norms.lattice({**spec, "seed": spec["seed"] ^ head}, n, eps) for head in range(math.prod(shape) // n)], 1)
    options: dict[str, Any] = {"eps": eps, "weight": of_norms.weights(n, dtype, spec["seed"]).to(device) if dtype else None}
    at = positions(spec["rows"], spec["seed"], "int64")
    return Call((x.view(-1, *shape).to(device), table(64, True).to(device), at.to(device)), options)


def _turned_bound(call: Call, exact: Tensor) -> Tensor:
    """The errors of the two normed numbers of a pair, each times a cosine or sine of at most 1, and the rounding to bf16."""
    x, weight, eps = call[0], call.kwargs.get("weight"), call["eps"]
    normed = unrounded(norms.head_rms_norm)(x, eps=eps) if weight is None else unrounded(norms.rms_norm)(x, weight, eps=eps)
    single = of_norms.normed_bound(x, normed)
    pair: Tensor = single.unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    return pair + of_norms.half_bf16_step(exact.abs() + pair)


def _norm_rope() -> Contract:
    lattices = ([[2, 512], "", 0.0], [[256], "float32", 3.0], [[512], "bfloat16", 1e-20])
    return Contract(
        "rotary",
        "norm_rope",
        (
            Domain("lattice", _normed_then_turned, of_norms.specs(lattices), why="rows of +-2^k"),
            Domain("bf16", _normed_then_turned, of_norms.specs(NORMED, of_norms.MODERATE), why="squares within fp32"),
        ),
        (
            Output("result", Level.E1, "the norm's one rounding, then exact products and one addition", ("lattice",)),
            Output("result", Level.E3, "the norm's bound, rotated", ("bf16",), bound=_turned_bound),
        ),
        (*invariants.on("bf16", *of_norms.KEEPS), *invariants.on("lattice", "batch", "strides")),
        BY_POSITION,
        exact=unrounded(rotary.norm_rope),
    )


CONTRACTS = (_apply_rope(), _norm_rope())
