"""Contract of the router.

Ids given scores, slots, padding, packing and counters are integers: E0. Scores, weights and the whole `route` are E2: each numbered step
of the reference is one fp64 evaluation rounded once, and two fp64 evaluations of a step differ by an ulp at most, so their roundings
differ where the exact number lies that close to the middle of two fp32: in one score of some 2^28. Under the soak profile every fp32
logit is held to half an ulp instead (E3). `gate_logits` is E1 on an exact lattice whatever the accumulator, E2 where products of fp32
numbers are exact sums in fp64, and E3 on arbitrary bf16.

A *form* is what a compiler sees of a call: experts, k, which arguments there are. Each is a domain and costs a graph or three, so the
lists are short; rows, classes of values, ranks, padding and places of images are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import invariants, routing_rows, strategies
from dsv4.parity.components.eplb import KEEPS, TABLES, Options, dispatch_options, table_specs
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.gate_contract import gate_logits, row_classes
from dsv4.parity.levels import Level
from dsv4.parity.routing_rows import PlacedCall
from dsv4.reference import routing
from dsv4.types import ScalePlacement

BY_ROW = ("batch", "padding", "empty")
TRACED = "fullgraph"  # a second a function: of those that pass their arguments on as they are, tests of the operators have one chain
STEP = tuple(name for name in KEEPS if name != TRACED)
IMAGE = 3  # a token id
ONE_ROUNDING = "one fp64 evaluation, one rounding; see the opening"
Strategy = st.SearchStrategy[Any]


def _draws(**more: Strategy) -> st.SearchStrategy[Spec]:
    return strategies.specs(rows=strategies.rows(130), classes=row_classes(), **more, seed=strategies.seeds())


def _scored(spec: Spec, experts: int) -> Tensor:
    return routing_rows.rows(spec["classes"], spec["rows"], experts, spec["seed"])


def _half(spec: Spec, device: torch.device) -> Tensor:
    """bool [rows], about half of it."""
    return (strategies.random_bits((spec["rows"],), spec["seed"] ^ 4, torch.uint8) < 128).to(device)


def _half_ulp(call: Call, exact: Tensor) -> Tensor:
    """Half a step of fp32, and a little more for the fp64 evaluation."""
    step = torch.ldexp(torch.ones_like(exact), (torch.frexp(exact).exponent - 24).clamp(min=-149))
    return step * (0.5 + 2.0**-20)


def _gate_scores() -> Contract:
    def numbers(dtype: torch.dtype, width: torch.dtype) -> Callable[[Spec, torch.device], Call]:
        def build(spec: Spec, device: torch.device) -> Call:
            bits = torch.arange(spec["first"], spec["first"] + spec["count"], dtype=torch.int64, device=device)
            return Call((bits.to(width).view(dtype).float()[:, None],))

        return build

    return Contract(
        "routing",
        "gate_scores",
        (
            Domain("bf16", numbers(torch.bfloat16, torch.int16), exhaustive=2**16, why="every bf16"),
            Domain("drawn", lambda spec, device: Call((_scored(spec, 16).to(device),)), _draws(), why="all classes of logits"),
            Domain("fp32", numbers(torch.float32, torch.int32), exhaustive=2**32, why="every fp32"),
        ),
        (
            Output("result", Level.E2, ONE_ROUNDING, ("bf16", "drawn"), any_nan=True),
            Output("result", Level.E3, "half an ulp", ("fp32",), bound=_half_ulp),
        ),
        invariants.on("drawn", *KEEPS),
        Rows(),
        exact=unrounded(routing.gate_scores),
    )


def _vectors(text: str, image: str, experts: int, spec: Spec, device: torch.device) -> Options:
    """`bias` and `image_bias` of these dtypes; "" is none."""
    given = {"bias": (text, 8), "image_bias": (image, 16)}
    return {
        name: routing_rows.bias(spec[name], experts, spec["seed"] ^ salt, getattr(torch, dtype)).to(device)
        for name, (dtype, salt) in given.items()
        if dtype
    }


def _biases(text: str, image: str) -> dict[str, Strategy]:
    return {name: st.sampled_from(routing_rows.BIASES) for name, dtype in (("bias", text), ("image_bias", image)) if dtype}


def _topk(name: str, experts: int, k: int, text: str = "float32", image: str = "") -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        options = _vectors(text, image, experts, spec, device)
        if image:
            options["image_mask"] = _half(spec, device)
        return Call((_scored(spec, experts).to(device), k), options)

    return Domain(name, build, _draws(**_biases(text, image)), why=f"{k} of {experts}: ties, NaN, zeros of both signs")


def _route_topk() -> Contract:
    return Contract(
        "routing",
        "route_topk",
        (
            _topk("plain", 8, 2),
            _topk("all_of_them", 8, 8, ""),
            _topk("images", 16, 1, "bfloat16", "float32"),
            _topk("images_alone", 256, 7, "", "float32"),
            _topk("many", 384, 6),
        ),
        (Output("result", Level.E0, "one fp32 addition, then comparisons of integers"),),
        (*invariants.on("images", *KEEPS), *invariants.on("many", "poisoned_output")),
        Rows((0, "image_mask")),
    )


def _weighted(experts: int, k: int, ids: str, scale: float, epsilon: float) -> Callable[[Spec, torch.device], Call]:
    def build(spec: Spec, device: torch.device) -> Call:
        given = routing_rows.expert_ids(spec["rows"], k, experts, spec["seed"] ^ 1, getattr(torch, ids))
        return Call((_scored(spec, experts).to(device), given.to(device)), {"scale": scale, "epsilon": epsilon})

    return build


def _route_weights() -> Contract:
    return Contract(
        "routing",
        "route_weights",
        (
            Domain("drawn", _weighted(8, 2, "int64", 2.5, 1e-20), _draws(), why="scores of any sign, ids with holes"),
            Domain("no_epsilon", _weighted(384, 6, "int32", 1.5, 0.0), _draws(), why="sums of 0 give 0"),
            Domain("one", _weighted(16, 1, "int32", 1.0, 1e-20), _draws(), why="normalised, too"),
        ),
        (Output("result", Level.E2, "the order of the sum is stated; " + ONE_ROUNDING, any_nan=True),),
        (*invariants.on("drawn", *STEP), *invariants.on("no_epsilon", "batch")),
        Rows((0, 1)),
    )


def _tokens(spec: Spec, device: torch.device, vocabulary: int, dtype: torch.dtype) -> Tensor:
    """Token ids, most of them in the vocabulary, about a third images."""
    source = strategies.generator(spec["seed"] ^ 32)
    known = torch.randint(0, vocabulary, (spec["rows"],), generator=source)
    wrong = torch.tensor([-1, vocabulary, vocabulary + 1, 2**31 - 1, -(2**31)])[torch.randint(0, 5, known.shape, generator=source)]
    ids = torch.where(torch.rand(known.shape, generator=source) < 0.2, wrong, known)
    ids[torch.rand(known.shape, generator=source) < 0.3] = IMAGE
    return ids.to(dtype).to(device)


def _table(experts: int, k: int, spec: Spec, device: torch.device, dtype: torch.dtype) -> Tensor:
    return routing_rows.expert_ids(23, k, experts, spec["seed"] ^ 64, dtype).to(device)


def _hashed(name: str, experts: int, k: int, image: str, ids: str, table: str) -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        listed = _table(experts, k, spec, device, getattr(torch, table))
        options = _vectors("", image, experts, spec, device)
        if image:
            options["image_mask"] = _half(spec, device)
        return Call((_scored(spec, experts).to(device), _tokens(spec, device, 23, getattr(torch, ids)), listed), options)

    return Domain(name, build, _draws(**_biases("", image)), why="token ids and entries out of range")


def _route_hash() -> Contract:
    return Contract(
        "routing",
        "route_hash",
        (_hashed("text", 256, 5, "", "int32", "int64"), _hashed("images", 16, 3, "float32", "int64", "int32")),
        (Output("result", Level.E0, "a table, or comparisons of integers"),),
        (*invariants.on("images", *STEP), *invariants.on("text", "poisoned_output")),
        Rows((0, 1, "image_mask")),
    )


def _pairs(spec: Spec, device: torch.device, experts: int, slots: int = 6, ids: str = "int32") -> tuple[Tensor, Tensor]:
    """Ids that may repeat, and weights of any sort."""
    given = routing_rows.expert_ids(spec["rows"], slots, experts, spec["seed"] ^ 1, getattr(torch, ids), distinct=False)
    return given.to(device), routing_rows.rows(spec["classes"], spec["rows"], slots, spec["seed"]).to(device)


def _slots(function: str, build: Callable[[Spec, torch.device], Call], **more: Strategy) -> Contract:
    placed = st.sampled_from([str(where) for where in ScalePlacement])
    return Contract(
        "routing",
        function,
        (Domain("drawn", build, _draws(placed=placed, scale=st.sampled_from([1.5, 0.1, 2.5]), **more), why="ids past the last expert"),),
        (Output("ids", Level.E0, "integers"), Output("weights", Level.E0, "copied, or one constant", any_nan=True)),
        invariants.on("drawn", *STEP),
        Rows((0, 1)),
    )


def _append(spec: Spec, device: torch.device) -> Call:
    options = {"experts": 16, "scale": spec["scale"], "scale_placement": spec["placed"], "copies": spec["copies"]}
    return Call((*_pairs(spec, device, 16), spec["shared"]), options)


def _remap(spec: Spec, device: torch.device) -> Call:
    ranks = spec["ranks"]
    options = {"experts": 24, "ranks": ranks, "rank": spec["rank"] % ranks, "scale": spec["scale"], "scale_placement": spec["placed"]}
    return Call((*_pairs(spec, device, 24), 1), options)


def _live(spec: Spec, device: torch.device) -> int | Tensor:
    """A number in range on the host; any on the device."""
    if spec["live_as"] == "int":
        return int(min(max(0, spec["live"]), spec["rows"]))
    live = torch.tensor(spec["live"], dtype=torch.int32 if spec["live_as"] == "int32" else torch.int64, device=device)
    return live.reshape(1) if spec["live_as"] == "vector" else live


def _lives(kinds: Sequence[str]) -> dict[str, Strategy]:
    return {"live": st.one_of(st.integers(-2, 20), st.sampled_from([127, 128, 2**31 - 1])), "live_as": st.sampled_from(list(kinds))}


def _mask_padding() -> Contract:
    domain = Domain(
        "drawn",
        lambda spec, device: Call((*_pairs(spec, device, 16), _live(spec, device))),
        _draws(**_lives(["int", "int32", "int64", "vector"])),
        why="rows out of range on the device",
    )
    outputs = (Output("ids", Level.E0, "integers"), Output("weights", Level.E0, "copied or 0", any_nan=True))
    return Contract("routing", "mask_padding", (domain,), outputs, invariants.on("drawn", *(name for name in STEP if name not in BY_ROW)))


def _every_weight(spec: Spec, device: torch.device) -> Call:
    """fp32 weights at, below and above the middle of each bf16 and the next, ids in turn."""
    number = torch.arange(spec["first"], spec["first"] + spec["count"])
    bits = (number[:, None] << 16) + torch.tensor([0, 0x7FFF, 0x8000, 0x8001])
    ids = (number[:, None] + torch.tensor([0, 1, -65000, 32767])).to(torch.int32)
    return Call((ids.to(device), bits.to(torch.int32).view(torch.float32).to(device)))


def _pack_topk() -> Contract:
    return Contract(
        "routing",
        "pack_topk",
        (
            Domain("bf16", _every_weight, exhaustive=2**16, why="every bf16 and its middles"),
            Domain("drawn", lambda spec, device: Call(_pairs(spec, device, 2**15, ids=spec["ids"])), _draws(ids=st.just("int32"))),
        ),
        (Output("result", Level.E0, "bits"),),
        invariants.on("drawn", *STEP),
        Rows((0, 1)),
    )


def _counters(physical: int, spec: Spec, device: torch.device) -> Tensor:
    return torch.randint(0, 1000, (physical,), generator=strategies.generator(spec["seed"] ^ 128), dtype=torch.int32).to(device)


def _count_experts() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        ids = _pairs(spec, device, spec["physical"], ids=spec["ids"])[0]
        return Call((ids, _counters(spec["physical"], spec, device)))

    dtypes = st.sampled_from(["int32", "int64"])
    domain = Domain("drawn", build, _draws(physical=st.sampled_from([1, 16, 272]), ids=dtypes), why="an expert twice in a row")
    kept = (*invariants.on("drawn", *(name for name in KEEPS if name not in (*BY_ROW, "inputs_unchanged"))), *invariants.but("drawn", 1))
    return Contract("routing", "count_experts", (domain,), (Output("result", Level.E0, "integers"),), kept)


def _route(name: str, experts: int, k: int, why: str, **form: Any) -> Domain:
    """One form of `route`. bias, image_bias: dtypes. images: how image rows are named. table: dtype. algorithm. shared: slots, layout,
    copies. placed: scale placement. scale, epsilon. live: how the number of live rows comes.
    """
    text, image = form.get("bias", ""), form.get("image_bias", "")
    algorithm, shared, layout = form.get("algorithm", "none"), form.get("shared", 0), form.get("layout", "none")
    physical = experts + (TABLES[experts] if form.get("placed_experts", algorithm != "none") else 0)

    def build(spec: Spec, device: torch.device) -> Call:
        options: Options = {"scale": form.get("scale", 1.5), "epsilon": form.get("epsilon", 1e-20)}
        options |= {"scale_placement": form.get("placed", "router"), **_vectors(text, image, experts, spec, device)}
        if "table" in form or form.get("images") == "token":
            options["token_ids"] = _tokens(spec, device, 23, torch.int64)
        if "table" in form:
            options["table"] = _table(experts, k, spec, device, getattr(torch, form["table"]))
        if form.get("images") == "token":
            options["image_token_id"] = IMAGE
        elif form.get("images") == "mask":
            options["image_mask"] = _half(spec, device)
        if physical > experts:
            options |= dispatch_options(algorithm, (spec["rows"], k), experts, spec, device, "int64")
        if shared:
            options |= {"shared": shared, "shared_slots": layout}
        if layout == "home_rank":
            options |= {"ranks": 4, "rank": spec["rank"]}
        if layout == "global":
            options["shared_copies"] = spec["copies"]
        if "live" in form:
            options["live_rows"] = _live({**spec, "live_as": form["live"]}, device)
        options["counts"] = _counters(physical, spec, device)
        kind = PlacedCall if "placement" in options else Call
        return kind((_scored(spec, experts).to(device), k), options)

    more = _biases(text, image)
    if physical > experts:
        more |= table_specs()
    elif layout == "home_rank":
        more["rank"] = st.integers(0, 3)
    if layout == "global":
        more["copies"] = st.integers(1, 8)
    if "live" in form:
        more |= {"live": _lives([form["live"]])["live"]}
    return Domain(name, build, _draws(**more), why=f"{k} of {experts}, {why}")


def _by_row(call: Call, name: str, tensor: Tensor) -> Tensor:
    """Counters have no rows: nothing of them is compared row by row."""
    return tensor.new_empty(call[0].shape[0], 0) if name == "counts" else tensor


def _whole_route() -> Contract:
    images: Options = {"image_bias": "float32", "images": "token"}
    copied: Options = {"shared": 1, "layout": "global"}
    home: Options = {"shared": 1, "layout": "home_rank"}
    domains = (
        _route("plain", 8, 2, "a bias", bias="float32"),
        _route("all_of_them", 8, 8, "no bias", **copied, live="int"),
        _route("images", 16, 1, "bias in bf16", bias="bfloat16", image_bias="float32", images="mask", algorithm="static", **copied),
        _route(
            "images_alone", 256, 7, "no text bias", image_bias="float32", images="mask", algorithm="dynamic", **home, placed="output",
            live="int64",
        ),
        _route(
            "serving", 384, 6, "all that a rank asks", bias="float32", **images, algorithm="row_modulo", **{**home, "shared": 2},
            placed="dispatch", live="int64", scale=2.5,
        ),
        _route("official", 384, 6, "V4's epsilon of 0", bias="float32", epsilon=0.0, live="int32"),
        _route("table", 256, 5, "by token", table="int32", algorithm="row_index", **copied, live="vector"),
        _route("table_images", 16, 3, "by token, image rows by score", table="int64", **images, algorithm="dynamic", **home),
        _route("probability", 16, 4, "random replicas", bias="float32", algorithm="probability", placed="output"),
        _route("unmapped", 16, 4, "a placement, logical ids", bias="float32", placed_experts=True, **copied, placed="output"),
    )  # fmt: skip
    return Contract(
        "routing",
        "route",
        domains,
        (
            Output("ids", Level.E2, "E0 given scores; " + ONE_ROUNDING),
            Output("weights", Level.E2, ONE_ROUNDING, any_nan=True),
            Output("counts", Level.E2, "E0 given ids"),
        ),
        (
            *invariants.on("table_images", *(name for name in KEEPS if name != "inputs_unchanged")),
            *invariants.on("serving", "run_to_run", "poisoned_output", "graph_replay"),
            *(one for name in ("table_images", "serving") for one in invariants.but(name, "counts")),
        ),
        Rows((0, "token_ids", "words"), read=_by_row),
        not_claimed=("a result without counters: every domain counts",),
    )


COPIES: dict[str, Strategy] = {"shared": st.just(1), "copies": st.integers(1, 8)}
PLACES: dict[str, Strategy] = {"ranks": st.sampled_from([1, 2, 4]), "rank": st.integers(0, 3)}

CONTRACTS = (
    gate_logits(),
    _gate_scores(),
    _route_topk(),
    _route_weights(),
    _route_hash(),
    _slots("append_shared_slots", _append, **COPIES),
    _slots("remap_home_rank_slots", _remap, **PLACES),
    _mask_padding(),
    _pack_topk(),
    _count_experts(),
    _whole_route(),
)
