"""Contract of what happens before scores: visibility, queries, keys, and keys in pages.

A rotation is exact but for one rounding, and quantisers are E0: without norm and transform, codes, scales and weights are E2 for every bit
pattern. Norm and transform round sums: E1 on lattices, and E4 within the intervals of `index_code_bounds` elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.configs import V4_FLASH
from dsv4.formats import E2M1, E4M3, INDEX_LAYOUTS
from dsv4.parity import index_code_bounds, index_inputs, invariants, lattices, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.index_inputs import Strategy, page_specs
from dsv4.parity.levels import Level
from dsv4.reference import index_codes
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import IndexKeys

KEEPS = ("run_to_run", "poisoned_output", "batch", "padding", "strides", "empty", "fullgraph", "opcheck", "graph_replay")
POSITIONS = 40
MODERATE = ("normal", "integers", "zeros", "spike", "equal", "positive", "outliers", "realistic")  # squares neither vanish nor overflow
RATIOS = (0, 1, 2, 4, 128, 3)

# Ways to call: each is a graph to a compiler.
QUERY_FORMS: tuple[Spec, ...] = (
    {"format": "fp4", "heads": 8, "dim": 128, "rotated": 64, "hadamard": True, "weight_dtype": "bf16"},
    {"format": "fp4", "heads": 8, "dim": 128, "rotated": 64, "hadamard": False, "weight_dtype": "fp32"},
    {"format": "fp8", "heads": 4, "dim": 128, "rotated": 64, "hadamard": True},
    {"format": "fp8", "heads": 3, "dim": 64, "rotated": 64, "hadamard": False, "amax_floor": "flashmla"},
    {"format": "fp4", "heads": 2, "dim": 32, "rotated": 8, "hadamard": True, "amax_floor": "official", "ties": "toward_zero"},
    {"format": "fp4", "heads": 3, "dim": 64, "rotated": 32, "hadamard": False, "amax_floor": "flashmla", "zero_sign": "cleared"},
    {"format": "fp4", "heads": 2, "dim": 64, "rotated": 16, "hadamard": True, "ties": "toward_zero", "zero_sign": "cleared"},
)
KEY_FORMS: tuple[Spec, ...] = (
    {"format": "fp4", "dim": 128, "rotated": 64, "hadamard": False, "weight": "bf16", "eps": 1e-20},
    {"format": "fp4", "dim": 128, "rotated": 64, "hadamard": True, "weight": "bf16", "eps": 1e-6},
    {"format": "fp4", "dim": 128, "rotated": 64, "hadamard": True, "weight": ""},
    {"format": "fp4", "dim": 128, "rotated": 64, "hadamard": False, "weight": "", "ties": "toward_zero"},
    {"format": "fp8", "dim": 128, "rotated": 64, "hadamard": True, "weight": "fp32", "eps": 3.0},
    {"format": "fp8", "dim": 128, "rotated": 64, "hadamard": False, "weight": ""},
    {"format": "fp8", "dim": 64, "rotated": 24, "hadamard": False, "weight": "bf16", "eps": 1e-6, "amax_floor": "sglang"},
    {"format": "fp4", "dim": 32, "rotated": 32, "hadamard": True, "weight": "fp32", "eps": 1e-20, "amax_floor": "flashmla"},
)
Build = Callable[[Spec, torch.device], Call]


def _turned(form: Spec) -> bool:
    """Whether a form is a rotation and a quantiser alone."""
    return not form["hadamard"] and not form.get("weight")


def _specs(forms: Sequence[Spec], classes: Sequence[str] = ()) -> Strategy:
    drawn: dict[str, Strategy] = {"classes": strategies.some_of(tuple(classes))} if classes else {"density": st.sampled_from([1.0, 0.2])}
    return strategies.specs(
        rows=st.one_of(st.integers(1, 9), st.sampled_from([33, 0])),
        form=st.sampled_from(list(forms)),
        integers=st.sampled_from(["int64", "int32"]),
        **drawn,
        seed=strategies.seeds(),
    )


def _positions(spec: Spec) -> Tensor:
    """One in six outside the table."""
    dtype, source = index_inputs.integers(spec), strategies.generator(spec["seed"] ^ 5)
    limits = torch.iinfo(dtype)
    odd = torch.tensor([-1, POSITIONS, limits.min, limits.max])[torch.randint(0, 4, (spec["rows"],), generator=source)]
    at = torch.randint(0, POSITIONS, (spec["rows"],), generator=source)
    return torch.where(torch.rand(spec["rows"], generator=source) < 1 / 6, odd, at).to(dtype)


def _table(spec: Spec) -> Tensor:
    """Multiples of 1/4 on lattices, else V4's stretched frequencies."""
    if "classes" in spec:
        return rope_table(rope_frequencies(160000.0, spec["form"]["rotated"], yarn=V4_FLASH.rope_scaling), POSITIONS)
    return lattices.integers((POSITIONS, spec["form"]["rotated"]), spec["seed"] ^ 6, 4) / 4


def _rows(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """bf16 [*shape]: integers, or the classes drawn, in groups as they are quantised."""
    form = spec["form"]
    if "classes" not in spec:
        return lattices.integers(shape, spec["seed"], 15, density=spec["density"]).bfloat16()
    fp4 = form["format"] == "fp4"
    group = INDEX_LAYOUTS["fp4"].group if fp4 else form["dim"]
    return strategies.values(spec["classes"], shape, group, spec["seed"], torch.bfloat16, E2M1 if fp4 else E4M3)


def _options(form: Spec) -> dict[str, Any]:
    names = ("format", "hadamard", "amax_floor", "ties", "zero_sign", "weight_dtype")
    return {name: form[name] for name in names if name in form}


def _query_call(spec: Spec, device: torch.device) -> Call:
    form, rows = spec["form"], spec["rows"]
    q = _rows(spec, (rows, form["heads"], form["dim"]))
    weights = torch.randn(rows, form["heads"], generator=strategies.generator(spec["seed"] ^ 7)).bfloat16()
    args = (q, weights, _table(spec), _positions(spec))
    return Call(tuple(tensor.to(device) for tensor in args), _options(form))


def _key_call(spec: Spec, device: torch.device) -> Call:
    form, rows = spec["form"], spec["rows"]
    x, options, source = _rows(spec, (rows, form["dim"])), _options(form), strategies.generator(spec["seed"] ^ 8)
    if form["weight"]:
        dtype = index_inputs.DTYPES[form["weight"]]
        if "classes" in spec:
            weight = 1 + torch.randn(form["dim"], generator=source) / 4
        else:  # rows of +-2^k, whose root mean square is 2^k; with an eps of 3 all k are 0, so that the norm halves
            signs = 1 - 2 * torch.randint(0, 2, x.shape, generator=source)
            x = torch.ldexp(signs.float(), torch.randint(-8, 9, (rows, 1), generator=source) * (form["eps"] < 1)).bfloat16()
            weight = torch.randint(-3, 4, (form["dim"],), generator=source).float()
        options |= {"weight": weight.to(dtype).to(device), "eps": form["eps"]}
    args = (x, _table(spec), _positions(spec))
    return Call(tuple(tensor.to(device) for tensor in args), options)


def _domains(build: Build, forms: tuple[Spec, ...]) -> tuple[Domain, ...]:
    turned, others = [form for form in forms if _turned(form)], [form for form in forms if not _turned(form)]
    return (
        Domain("lattice", build, _specs(forms), why="exact norms, rotations and transforms"),
        Domain("turned", build, _specs(turned, tuple(strategies.VALUE_CLASSES)), why="a rotation alone: every bit pattern"),
        Domain("rounded", build, _specs(others, MODERATE), why="arbitrary finite rows through norm and transform"),
        Domain("plain", build, _specs(forms[:1], MODERATE), why="one form"),
    )


BITWISE, ROUNDED = ("lattice", "turned"), ("rounded", "plain")


def index_queries() -> Contract:
    """Its domains and rows."""
    outputs = []
    for name, permits in (
        ("codes", index_code_bounds.query_codes),
        ("scales", index_code_bounds.query_scales),
        ("weights", index_code_bounds.query_weights),
    ):
        outputs += [
            Output(name, Level.E1, "every step is exact or rounded once", BITWISE, any_nan=name == "weights"),
            Output(name, Level.E4, "codes of rows within their roundings", ROUNDED, permits=permits),
        ]
    return Contract(
        "indexer",
        "index_queries",
        _domains(_query_call, QUERY_FORMS),
        tuple(outputs),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("turned", "batch", "strides", "run_to_run")),
        Rows((0, 1, 3)),
        optional=("scales",),
    )


def index_keys() -> Contract:
    """Its domains and rows."""
    outputs = []
    for name, permits in (("codes", index_code_bounds.key_codes), ("scales", index_code_bounds.key_scales)):
        outputs += [
            Output(name, Level.E1, "every step is exact or rounded once", BITWISE, any_nan=name == "scales"),
            Output(name, Level.E4, "codes of rows within their roundings", ROUNDED, permits=permits),
        ]
    return Contract(
        "indexer",
        "index_keys",
        _domains(_key_call, KEY_FORMS),
        tuple(outputs),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("turned", "batch", "strides", "run_to_run")),
        Rows((0, 2)),
    )


def visible_entries() -> Contract:
    """Its domains and rows."""

    def few(spec: Spec, device: torch.device) -> Call:
        numbers = torch.arange(spec["first"], spec["first"] + spec["count"]) - 3
        return Call((numbers.to(device),), {"ratio": 4})

    def drawn(spec: Spec, device: torch.device) -> Call:
        dtype, source = index_inputs.integers(spec), strategies.generator(spec["seed"])
        limits = torch.iinfo(dtype)
        odd = torch.tensor([-1, limits.min, limits.max, limits.max - 1, 2**31 - 1, 2**31 - 2])
        at = torch.randint(0, 600, (spec["rows"],), generator=source)
        at = torch.where(at < 60, odd[torch.randint(0, len(odd), at.shape, generator=source)], at)
        return Call((at.to(dtype).to(device),), {"ratio": spec["ratio"]})

    specs = strategies.specs(
        rows=st.sampled_from([9, 1, 70]),
        ratio=st.sampled_from(RATIOS),
        integers=st.sampled_from(["int64", "int32"]),
        seed=strategies.seeds(),
    )
    return Contract(
        "indexer",
        "visible_entries",
        (
            Domain("few", few, exhaustive=1000, why="all positions from -3 on, ratio 4 (IX-17)"),
            Domain("drawn", drawn, specs, why="ratios 0 and 1 among them (IX-23), the ends of the integers"),
        ),
        (Output("result", Level.E0, "integers"),),
        invariants.on("drawn", *KEEPS, "inputs_unchanged"),
        Rows(),
    )


def _stored(call: Call, name: str, tensor: Tensor) -> Tensor:
    """The record in each slot, zeros where there is none."""
    keys: IndexKeys = call.args[0]
    dim = keys.codes.shape[1] * (2 if keys.codes.dtype == torch.uint8 else 1)
    loaded = index_codes.load_index_keys(tensor, call[2], format=call["format"], page_size=call["page_size"], dim=dim)
    return torch.cat([part.contiguous().view(torch.uint8) for part in (loaded.codes, loaded.scales[:, None])], 1)


FAR = {"far": st.just(True), "page_size": st.sampled_from([16, 64]), "pages": st.just(2), "gap": st.just(0)}
ONCE = {"slots": st.just(["fresh", "absent"])}


def _page_domains(build: Build) -> tuple[Domain, ...]:
    return (
        Domain("fp8", build, page_specs(format=st.just("fp8")), why="any bytes, slots of all kinds, gaps between pages (KV-01, IX-13)"),
        Domain("fp4", build, page_specs(format=st.just("fp4")), why="any bytes, slots of all kinds, gaps between pages"),
        Domain("plain", build, page_specs(**ONCE), why="every slot once"),
        Domain("far", build, page_specs(**FAR), why="pages beyond byte 2^31 (IX-10)"),
    )


def store_index_keys() -> Contract:
    """Its domains and rows."""
    return Contract(
        "indexer",
        "store_index_keys",
        _page_domains(index_inputs.store_call),
        (Output("result", Level.E0, "moves bytes; of equal slots the last key; all else is left alone"),),
        (*invariants.on("plain", *KEEPS), *invariants.but("plain", 1)),
        Rows(("keys.codes", "keys.scales", 2), _stored),
    )


def load_index_keys() -> Contract:
    """Its domains and rows."""
    return Contract(
        "indexer",
        "load_index_keys",
        _page_domains(index_inputs.load_call),
        (Output("codes", Level.E0, "moves bytes"), Output("scales", Level.E0, "moves bytes")),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("fp8", "strides")),
        Rows((1,)),
    )
