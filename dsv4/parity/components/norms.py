"""Contract of the norms and of the Hadamard transform.

On lattices every step is exact but the last: rows of +-2^k, some of them sparse, whose mean square is a power of four, with an eps that is
0, or far below an ulp of it, or three times it (so that an eps outside of the root shows); integers under a transform of 4^j numbers.
On other numbers any fp32 evaluation is held to a bound; the published bf16 chain has a declared order and is E2. Rows that hold a NaN or
an infinity, or nothing but zeros, give NaN and zeros only: E0.

A form is a width with what else a compiler sees, and costs a graph; rows, classes of values and powers are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E4M3
from dsv4.parity import bounds, invariants, lattices, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.reference import norms

Strategy = st.SearchStrategy[Any]

ALONE = ("run_to_run", "inputs_unchanged", "poisoned_output", "batch", "padding", "strides", "empty", "opcheck", "graph_replay")
KEEPS = (*ALONE, "fullgraph")
MODERATE = ("normal", "integers", "zeros", "spike", "equal", "positive", "outliers", "realistic")
SPECIAL = ("zeros", "nan", "inf")
FORMS = ([128, "bfloat16", 1e-6], [512, "bfloat16", 1e-20], [1280, "float32", 1e-6], [7168, "bfloat16", 1e-20])
LATTICES = ([512, "float32", 1e-20], [1024, "bfloat16", 0.0], [1536, "bfloat16", 3.0])
HEADS = ([64, 1e-6], [512, 1e-6])


def matrix(spec: Spec, n: int) -> Tensor:
    """bf16 [rows, n] on the CPU, of the classes drawn; one class a row."""
    return strategies.values(spec["classes"], (spec["rows"], n), n, spec["seed"], torch.bfloat16, E4M3)


def lattice(spec: Spec, n: int, eps: float) -> Tensor:
    """bf16 [rows, n]: +-2^k in all places, or in a quarter of them. The mean square of a row is 1 where eps is 3."""
    source, rows = strategies.generator(spec["seed"]), spec["rows"]
    sparse = torch.rand(rows, 1, generator=source) < 0.5 if n & (n - 1) == 0 else torch.zeros(rows, 1, dtype=torch.bool)
    order = torch.rand(rows, n, generator=source).argsort(1)
    signs = torch.where(torch.rand(rows, n, generator=source) < 0.5, 1.0, -1.0)
    power = 0 if eps == 3 else spec["power"]
    size = torch.where(sparse, 2.0, 1.0) * 2.0**power
    return torch.where(sparse & (order >= n // 4), 0.0, size * signs).bfloat16()


def weights(n: int, dtype: str, seed: int) -> Tensor:
    """A weight around 1, in one number of eight negative or zero."""
    source = strategies.generator(seed ^ 1)
    drawn = 1 + torch.randn(n, generator=source) / 4
    return (drawn * torch.tensor([1.0, 1, 1, 1, 1, 1, -1, 0])[torch.randint(0, 8, (n,), generator=source)]).to(getattr(torch, dtype))


def half_bf16_step(size: Tensor) -> Tensor:
    """Half the distance of two bf16 numbers as large as `size`, fp64."""
    return torch.ldexp(torch.ones_like(size), (torch.frexp(size).exponent - 9).clamp(min=-134))


def normed_bound(x: Tensor, exact: Tensor) -> Tensor:
    """Error of an fp32 norm of the rows of x, with its rounding to bf16.

    Squares of bf16 are exact in fp32, or so small that they vanish beside eps. A sum of n of them in any order, its division and the
    addition of eps are off by gamma(n + 3) relatively, which the root halves; rsqrt is a primitive; the two products round. An ulp of
    margin stands for the terms of second order.
    """
    relative = bounds.gamma(x.shape[-1] + 3) / 2 + bounds.primitive("rsqrt", x.device.type) + bounds.gamma(3)
    size = exact.abs()
    return relative * size + half_bf16_step(size * (1 + relative))


def _bound(call: Call, exact: Tensor) -> Tensor:
    """`normed_bound`; of the chain, bf16 roundings of 2^-8 each: three before the root, which halves them, and the root's own. Half of
    one is margin for the terms of second order.
    """
    if call.kwargs.get("precision") != "bf16_chain":
        return normed_bound(call[0], exact)
    size = exact.abs()
    return 3 * 2.0**-8 * size + half_bf16_step(size * (1 + 3 * 2.0**-8))


def specs(forms: Sequence[Any], classes: Sequence[str] = (), **more: Strategy) -> Strategy:
    """Rows, a form, classes of values where there are any, a seed."""
    drawn: dict[str, Strategy] = {"classes": strategies.some_of(classes)} if classes else {"power": st.integers(-6, 30)}
    return strategies.specs(rows=strategies.rows(40), form=st.sampled_from(list(forms)), **drawn, **more, seed=strategies.seeds())


def _rms(spec: Spec, device: torch.device) -> Call:
    n, dtype, eps = spec["form"]
    x = matrix(spec, n) if "classes" in spec else lattice(spec, n, eps)
    return Call((x.to(device), weights(n, dtype, spec["seed"]).to(device)), {"eps": eps})


def _rms_norm() -> Contract:
    return Contract(
        "norms",
        "rms_norm",
        (
            Domain("lattice", _rms, specs(LATTICES), why="rows of +-2^k"),
            Domain("special", _rms, specs((*FORMS[:1], *LATTICES[1:2]), SPECIAL), why="NaN, infinity, rows of zeros without an eps"),
            Domain("bf16", _rms, specs(FORMS, MODERATE), why="squares within fp32"),
        ),
        (
            Output("result", Level.E1, "the factor is a power of two, one rounding", ("lattice",)),
            Output("result", Level.E0, "IEEE: NaN and zeros only", ("special",), any_nan=True),
            Output("result", Level.E3, "a sum, a root, two products, one rounding to bf16", ("bf16",), bound=_bound),
        ),
        (*invariants.on("bf16", *KEEPS), *invariants.on("lattice", "batch", "strides")),
        Rows(),
        exact=unrounded(norms.rms_norm),
    )


def _heads(precision: str) -> Callable[[Spec, torch.device], Call]:
    """Two heads a row."""

    def build(spec: Spec, device: torch.device) -> Call:
        n, eps = spec["form"]
        one, other = ({**spec, "seed": spec["seed"] ^ number} for number in (0, 2))
        x = torch.stack([matrix(head, n) if "classes" in spec else lattice(head, n, eps) for head in (one, other)], 1)
        return Call((x.to(device),), {"eps": eps, "precision": precision})

    return build


def _head_rms_norm() -> Contract:
    heads = ([256, 3.0], [512, 0.0])
    return Contract(
        "norms",
        "head_rms_norm",
        (
            Domain("lattice", _heads("fp32"), specs(heads), why="rows of +-2^k"),
            Domain("lattice_chain", _heads("bf16_chain"), specs(heads), why="rows of +-2^k"),
            Domain("special", _heads("fp32"), specs((*HEADS[:1], *heads[1:]), SPECIAL), why="NaN, infinity, rows of zeros without an eps"),
            Domain("bf16", _heads("fp32"), specs(HEADS, MODERATE), why="squares within fp32"),
            Domain("chain", _heads("bf16_chain"), specs(HEADS, MODERATE), why="squares within fp32"),
        ),
        (
            Output("result", Level.E1, "every step is exact", ("lattice", "lattice_chain")),
            Output("result", Level.E0, "IEEE: NaN and zeros only", ("special",), any_nan=True),
            Output("result", Level.E3, "a sum, a root, a product, one rounding to bf16", ("bf16",), bound=_bound),
            Output("result", Level.E2, "five operations, each in fp64 and rounded to bf16", ("chain",)),
        ),
        (*invariants.on("bf16", *KEEPS), *invariants.on("chain", *ALONE)),
        Rows(),
        exact=unrounded(norms.head_rms_norm),
    )


def _hadamard() -> Contract:
    def integers(spec: Spec, device: torch.device) -> Call:
        n, dtype = spec["form"]
        x = lattices.integers((spec["rows"], n), spec["seed"], 100, density=spec["density"]) * 2.0 ** spec["power"]
        return Call((x.to(getattr(torch, dtype)).to(device),))

    def arbitrary(spec: Spec, device: torch.device) -> Call:
        n, dtype = spec["form"]
        return Call((matrix(spec, n).to(getattr(torch, dtype)).to(device),))

    def bound(call: Call, exact: Tensor) -> Tensor:
        """A sum of n numbers in any order, the rounding of n^-1/2, the product; then the rounding of the result."""
        x = call[0].double()
        total: Tensor = bounds.gamma(x.shape[-1] + 2) * x.abs().sum(-1, keepdim=True) * math.sqrt(1 / x.shape[-1]) + bounds.LEAST
        rounding = half_bf16_step(exact.abs() + total) if call[0].dtype == torch.bfloat16 else torch.zeros_like(exact)
        return total + rounding

    dtypes = ("bfloat16", "float32")
    return Contract(
        "norms",
        "hadamard",
        (
            Domain(
                "lattice",
                integers,
                specs([[16, "bfloat16"], [64, "float32"]], density=st.sampled_from([1.0, 0.05])),
                why="integers times a power of two, 4^j of them",
            ),
            Domain("numbers", arbitrary, specs([[128, dtype] for dtype in dtypes], MODERATE), why="bf16 numbers, as bf16 and as fp32"),
        ),
        (
            Output("result", Level.E1, "exact sums, a power of two", ("lattice",)),
            Output("result", Level.E3, "a sum, a product, a rounding", ("numbers",), bound=bound),
        ),
        (*invariants.on("numbers", *KEEPS), *invariants.on("lattice", "batch")),
        Rows(),
        exact=unrounded(norms.hadamard),
    )


CONTRACTS = (_rms_norm(), _head_rms_norm(), _hadamard())
