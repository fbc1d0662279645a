"""Contract of `hyper_connections.boundary`.

The new streams are E2, as those of `expand`. What follows reads their bf16 bits, so it is measured against the reference without roundings
from these streams on: E3, and E1 on a lattice. There the new streams are the lattice of `stream_inputs`, whatever the old ones were; logits
of pre are saturated so that one stream is read, which makes the norm exact; those of post are at 0 or saturated, those of comb equal or a
permutation; and the weight that V4.1 carries is 1, or a tie that bf16 rounds away and a norm of unrounded sums does not. Codes and scales
are E1 on the lattice alone: elsewhere they are what `quantize_fp8` makes of the bf16 output, bit for bit, which is not this contract's.

A kernel may be there for many tokens alone. Domains named `many` have as many on CUDA, and few on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import invariants, strategies, stream_bounds, stream_inputs
from dsv4.parity.components.quantization import KEEPS
from dsv4.parity.components.scales import flat, rows_of_tiles, whole_columns
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.parity.stream_inputs import HIDDEN, MIXES, STREAMS, V4, V41, call_on
from dsv4.reference import hyper_connections as reference
from dsv4.types import Boundary

Build = Callable[[Spec, torch.device], Call]
WIDE = 1280  # more than one split of the sum, and no power of two
MANY, MOST = 257, 700  # tokens on CUDA
MANY_HIDDEN = 1024  # 4096 numbers are a power of four
FEW = 9  # tokens on a CPU, at most
ONE_OF_THEM = 2 * stream_inputs.SATURATED  # the logit of the stream that is read, minus it that of the others


def draws(classes: Sequence[str], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    """Rows of some of these classes, at most 130 unless `more` says otherwise."""
    more = {"rows": strategies.rows(130), **more}
    return strategies.specs(classes=strategies.some_of(classes), **more, seed=strategies.seeds())


def _one(seed: int) -> Tensor:
    """[streams]: 1 for one of them, else 0."""
    return torch.eye(STREAMS)[int(torch.randint(0, STREAMS, (), generator=strategies.generator(seed)))]


def _lattice(*, carried: bool, hidden: int = HIDDEN, **options: Any) -> Build:
    """The old stream that a permutation makes the new stream i is Z_i - post_i y, Z the lattice."""

    def build(spec: Spec, device: torch.device) -> Call:
        rows, seed, power = spec["rows"], spec["seed"], spec["power"]
        new = stream_inputs.lattice(rows, STREAMS, hidden, seed, power)
        y = 2.0**power * stream_inputs.integers((rows, hidden), seed ^ 1, 1)
        post = stream_inputs.integers((rows, STREAMS), seed ^ 2, 2)
        comb = stream_inputs.permutation(STREAMS, seed)  # [old, new]
        old = comb @ (new - post[:, :, None] * y[:, None])
        fn = stream_inputs.integers((MIXES, STREAMS * hidden), seed ^ 3, 8)
        fn[2 * STREAMS :] = fn[-1]  # the same in all logits of comb
        scale, base = torch.tensor([2.0**-10, 2.0**8, 2.0]), stream_inputs.saturated((MIXES,), seed ^ 4)
        base[:STREAMS] = ONE_OF_THEM * (2 * _one(seed ^ 5) - 1)
        base[2 * STREAMS :] = ONE_OF_THEM * stream_inputs.permutation(STREAMS, seed ^ 6).flatten() * spec["permuted"]
        more: dict[str, Any] = {"norm_eps": V41, "rms_eps": V41, "iterations": 2, "eps": 0.0, **options}
        if carried:
            tied = torch.where(torch.arange(rows) % 2 == 0, 1.0, stream_inputs.TIE)
            more["carried_pre"] = tied[:, None] * _one(seed ^ 7)
        weight = stream_inputs.normal((hidden,), seed ^ 8).bfloat16()
        return call_on(device, y.bfloat16(), old.bfloat16(), post, comb.repeat(rows, 1, 1), fn, scale, base, weight, **more)

    return build


def _drawn(*, carried: bool, hidden: int = HIDDEN, **options: Any) -> Build:
    def build(spec: Spec, device: torch.device) -> Call:
        rows, seed, classes = spec["rows"], spec["seed"], spec["classes"]
        y = stream_inputs.streams(classes, rows, 1, hidden, seed ^ 1)[:, 0]
        x = stream_inputs.streams(classes, rows, STREAMS, hidden, seed)
        post, comb = stream_inputs.weights(classes, rows, STREAMS, seed ^ 2), stream_inputs.combs(classes, rows, STREAMS, seed)
        fn = stream_inputs.projection(STREAMS, hidden, MIXES, seed ^ 3)
        scale, base = stream_inputs.scale_and_base(STREAMS, seed)
        weight = stream_inputs.normal((hidden,), seed ^ 4).bfloat16()
        more = dict(options)
        if carried:
            more["carried_pre"] = stream_inputs.weights(classes, rows, STREAMS, seed ^ 5)
        return call_on(device, y, x, post, comb, fn, scale, base, weight, **more)

    return build


def _many(make: Callable[..., Build], *names: str, **options: Any) -> Build:
    """Calls of sizes that suit the device; options of these names are drawn."""

    def build(spec: Spec, device: torch.device) -> Call:
        rows, hidden = (spec["rows"], MANY_HIDDEN) if device.type == "cuda" else (1 + spec["rows"] % FEW, HIDDEN)
        drawn = {name: spec[name] for name in names}
        return make(carried=spec["carried"], hidden=hidden, **options, **drawn)({**spec, "rows": rows}, device)

    return build


def _exact(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *model: Tensor, **options: Any) -> Boundary:
    """The reference, its roundings off from the new streams on: those of a boundary that changes nothing."""
    new = reference.expand(y, streams, post, comb)
    nothing = torch.zeros_like(y), torch.zeros_like(post), torch.eye(post.shape[1], device=y.device).expand_as(comb)
    found: Boundary = unrounded(reference.boundary)(nothing[0], new, nothing[1], nothing[2], *model, **options)
    return found


def _errors(call: Call) -> stream_bounds.MixErrors:
    """Of pre, post and comb."""
    new, fn, scale, base = reference.expand(*call.args[:4]), *call.args[4:7]
    mixes = unrounded(reference.mix_statistics)(new, fn, eps=call["norm_eps"], precision=call.kwargs.get("precision", "exact"))
    off = stream_bounds.statistics_error(new, fn, call["norm_eps"], mixes)
    return stream_bounds.mix_errors(mixes, off, scale, base, call.kwargs.get("iterations", 20), call.kwargs.get("eps", 1e-6))


def _mix_bound(name: str) -> Callable[[Call, Tensor], Tensor]:
    def bound(call: Call, exact: Tensor) -> Tensor:
        part: Tensor = getattr(_errors(call), name)
        return part

    return bound


def _normed_bound(call: Call, exact: Tensor) -> Tensor:
    new, carried = reference.expand(*call.args[:4]), call.kwargs.get("carried_pre")
    pre, off = (_exact(*call.args, **call.kwargs).pre, _errors(call).pre) if carried is None else (carried, 0.0)
    collapsed = unrounded(reference.collapse)(new, pre)
    return stream_bounds.norm_error(collapsed, stream_bounds.collapse_error(new, pre, off), call.args[7], call["rms_eps"])


def _scales_by_row(call: Call, name: str, tensor: Tensor) -> Tensor:
    tiled = name == "scales" and call.kwargs.get("scale_layout") == "128x4"
    return rows_of_tiles(tensor, call[0].shape[0]) if tiled else tensor


def _memory(scales: Tensor) -> Tensor:
    """Scales of either layout, pads included."""
    return whole_columns(scales) if scales.dim() == 2 else flat(scales)


def _domains() -> tuple[Domain, ...]:
    exact: dict[str, st.SearchStrategy[Any]] = {"power": st.integers(-9, 20), "permuted": st.sampled_from([1, 0])}
    lattice = strategies.specs(rows=strategies.rows(130), **exact, seed=strategies.seeds())
    drawn = draws(stream_inputs.MODERATE)
    v4: dict[str, Any] = {"norm_eps": V4, "rms_eps": V4}
    v41: dict[str, Any] = {"norm_eps": V41, "rms_eps": V41}
    mxfp8: dict[str, Any] = {"output": "mxfp8"}
    mixed: dict[str, Any] = {"norm_eps": V41, "rms_eps": V4}  # so that neither passes for the other
    tiles = _lattice(carried=True, **mxfp8, scale_layout="128x4")
    return (
        Domain("lattice", _lattice(carried=True), lattice, why="V4.1, bf16"),
        Domain("lattice_packed", _lattice(carried=False, **mxfp8, scale_layout="packed"), lattice, why="V4, mxfp8"),
        Domain("lattice_swizzled", tiles, lattice, why="V4.1, mxfp8"),
        Domain("v4", _drawn(carried=False, **v4), drawn, why="finite bf16, the new pre"),
        Domain("v41", _drawn(carried=True, **v41, **mxfp8), drawn, why="finite bf16, the carried pre, mxfp8"),
        Domain(
            "wide",
            _drawn(carried=False, hidden=WIDE, **v4),
            draws(stream_inputs.MODERATE, rows=strategies.rows(9)),
            why="sums in many parts",
        ),
        Domain("tf32", _drawn(carried=True, **mixed, precision="tf32"), drawn, why="the upper bits of fn"),
        *_domains_of_many(exact, mixed),
    )


def _domains_of_many(exact: dict[str, st.SearchStrategy[Any]], epsilons: dict[str, Any]) -> tuple[Domain, ...]:
    many: dict[str, st.SearchStrategy[Any]] = {"rows": st.integers(MANY, MOST), "carried": st.booleans()}
    outputs, layouts = st.sampled_from(["mxfp8", "bf16"]), st.sampled_from(["packed", "128x4"])
    precisions = st.sampled_from(["exact", "tf32", "tf32_compensated"])
    return (
        Domain(
            "many",
            _many(_drawn, "precision", **epsilons),
            draws(stream_inputs.MODERATE, **many, precision=precisions),
            why="many tokens, bf16",
        ),
        Domain(
            "many_lattice",
            _many(_lattice, "precision", "output", "scale_layout"),
            strategies.specs(**many, **exact, precision=precisions, output=outputs, scale_layout=layouts, seed=strategies.seeds()),
            why="many tokens, bf16 and mxfp8",
        ),
    )


def boundary() -> Contract:
    """Its domains and rows."""
    exact, mixed = ("lattice", "lattice_packed", "lattice_swizzled", "many_lattice"), ("pre", "post", "comb")
    drawn = ("v4", "tf32", "wide", "many")  # and v41, whose normed are codes
    fp32, lattice = "fp32 in any order, fast primitives", "every step is exact"
    rows = (
        Output("streams", Level.E2, "as expand"),
        *(Output(name, Level.E1, lattice, exact) for name in mixed),
        *(Output(name, Level.E3, fp32, ("v41", *drawn), bound=_mix_bound(name)) for name in mixed),
        Output("normed", Level.E1, lattice, exact),
        Output("normed", Level.E3, fp32, drawn, bound=_normed_bound),
        Output("scales", Level.E1, lattice, ("lattice_packed",), view=whole_columns, strides=True),
        Output("scales", Level.E1, lattice, ("lattice_swizzled",), view=flat),
        Output("scales", Level.E1, lattice, ("many_lattice",), view=_memory, strides=True),
    )
    kept = (
        *invariants.on("v41", *KEEPS),
        *invariants.on("lattice_swizzled", "batch", "padding", "empty", "poisoned_output"),
        *invariants.on("v4", "run_to_run", "inputs_unchanged", "poisoned_output", "strides", "graph_replay"),
        *invariants.on("many", "run_to_run", "inputs_unchanged", "poisoned_output", "strides", "graph_replay"),
        *invariants.on("many_lattice", "poisoned_output"),
    )
    by_row = Rows((0, 1, 2, 3, "carried_pre"), read=_scales_by_row)
    return Contract(
        "hyper_connections",
        "boundary",
        _domains(),
        rows,
        kept,
        by_row,
        exact=_exact,
        not_claimed=("codes and scales of arbitrary streams: they are those of the bf16 output",),
        optional=("scales",),
    )
