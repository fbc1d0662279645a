"""Contract of `routing.gate_logits`, which is about sums: exact on a lattice whatever the accumulator, bounded on arbitrary bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import bounds, cancelling, invariants, lattices, routing_rows, strategies
from dsv4.parity.components.eplb import KEEPS
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.reference import routing

Strategy = st.SearchStrategy[Any]


def row_classes(names: Sequence[str] = tuple(routing_rows.ROW_CLASSES)) -> Strategy:
    """Some of the classes of rows."""
    return strategies.some_of(names)


def _factors(dtypes: Sequence[str]) -> Strategy:
    return st.sampled_from([[x, weight] for x in dtypes for weight in dtypes])


def _integers(spec: Spec, device: torch.device) -> Call:
    peak = lattices.peak(spec["hidden"], most=60)
    x, weight = (
        lattices.integers((count, spec["hidden"]), spec["seed"] ^ number, peak, density=spec["density"])
        for number, count in enumerate((spec["rows"], spec["experts"]))
    )
    scale = 2.0 ** spec["power"]
    return Call(tuple((t * scale).to(getattr(torch, name)).to(device) for t, name in zip((x, weight), spec["dtypes"], strict=True)))


def _wide(spec: Spec, device: torch.device) -> Call:
    """Integers of 13 bits, two more than TF32 has, times 2^-3 to 2^3: a sum of 4096 products has at most 26 + 12 + 12 bits."""
    pair = []
    for number, count in enumerate((spec["rows"], spec["experts"])):
        shape = (count, spec["hidden"])
        bits = 8191 if spec["dtypes"][number] == "float32" else 127
        values = lattices.integers(shape, spec["seed"] ^ number, bits) * lattices.powers(shape, spec["seed"] ^ (2 + number), -3, 3)
        pair.append(values.to(getattr(torch, spec["dtypes"][number])).to(device))
    return Call(tuple(pair))


def _arbitrary(spec: Spec, device: torch.device) -> Call:
    x = routing_rows.rows(spec["classes"], spec["rows"], spec["hidden"], spec["seed"])
    weight = torch.randn(spec["experts"], spec["hidden"], generator=strategies.generator(spec["seed"] ^ 1)) * spec["hidden"] ** -0.5
    return Call((x.bfloat16().to(device), weight.bfloat16().to(device)))


def _cancelling(spec: Spec, device: torch.device) -> Call:
    x, weight = cancelling.pair((spec["rows"], spec["hidden"]), (spec["experts"], spec["hidden"]), spec["seed"])
    return Call((x.to(device), weight.bfloat16().to(device)))


def _accumulated(call: Call, exact: Tensor) -> Tensor:
    """fp32 accumulation in any order of products that are exact, each addition off by at most an ulp: tensor cores cut the addends of a
    step of 16 to the largest of them and the accumulator.
    """
    terms = call[0].shape[1]
    size: Tensor = call[0].double().abs() @ call[1].double().abs().T
    return bounds.gamma(2 * (terms + terms // 16 + 16)) * size + bounds.LEAST


def gate_logits() -> Contract:
    """Its domains and rows."""
    shape: dict[str, Strategy] = {"rows": strategies.rows(130), "experts": st.sampled_from([8, 16, 40, 256, 384])}
    hidden = st.one_of(st.integers(1, 70), st.sampled_from([128, 1500, 4096]))
    moderate = [name for name in routing_rows.FINITE_ROWS if name != "large"]
    domains = (
        Domain(
            "lattice",
            _integers,
            strategies.specs(
                **shape,
                hidden=hidden,
                dtypes=_factors(["bfloat16", "float32"]),
                density=st.sampled_from([1.0, 0.1]),
                power=st.integers(-20, 20),
                seed=strategies.seeds(),
            ),
            why="integers times a power of two, sums below 2^24 quanta",
        ),
        Domain(
            "wide",
            _wide,
            strategies.specs(
                **shape,
                hidden=hidden,
                dtypes=st.sampled_from([["float32", "float32"], ["bfloat16", "float32"], ["float32", "bfloat16"]]),
                seed=strategies.seeds(),
            ),
            why="sums that are exact in fp64 and not in fp32",
        ),
        Domain(
            "bf16",
            _arbitrary,
            strategies.specs(**shape, hidden=hidden, classes=row_classes(moderate), seed=strategies.seeds()),
            why="arbitrary finite bf16",
        ),
        Domain(
            "cancelling",
            _cancelling,
            strategies.specs(**shape, hidden=st.sampled_from([70, 128, 1500]), seed=strategies.seeds()),
            why=cancelling.WHY,
        ),
    )
    return Contract(
        "routing",
        "gate_logits",
        domains,
        (
            Output("result", Level.E1, "fp32 sums are exact", ("lattice",)),
            Output("result", Level.E2, "an exact sum, rounded once", ("wide",)),
            Output("result", Level.E3, "fp32 accumulation of exact products", ("bf16", "cancelling"), bound=_accumulated),
        ),
        (*invariants.on("bf16", *KEEPS), *invariants.on("lattice", "batch", "strides"), *invariants.on("cancelling", "batch", "padding")),
        Rows(),
        exact=unrounded(routing.gate_logits),
    )
