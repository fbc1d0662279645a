"""Contract of hyper-connections.

`collapse` and `expand` are E2: every product of a bf16 and an fp32 number is exact in fp64, the order of the additions is stated, and one
rounding follows; on their lattice they are exact in fp32, too.

Everything else is evaluated in fp32 by somebody, so it is E1 where that is exact and E3 elsewhere, with the bounds of
`dsv4.parity.stream_bounds`. Exact are: streams whose mean square is a power of four, with small integers as fn (`lattice`); one element
alone, which shows every bit of fn that a precision keeps (`single`); sigmoids at 0 and where they saturate; Sinkhorn without eps of equal
logits, and of a permutation beside which all else vanishes. `boundary` has a module of its own, `dsv4.parity.boundary_contract`.

A *form* is what a compiler sees of a call: streams, hidden size, options. Each costs graphs, so the lists are short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import cancelling, invariants, strategies, stream_bounds, stream_inputs
from dsv4.parity.boundary_contract import boundary, draws
from dsv4.parity.components.quantization import KEEPS
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.parity.stream_inputs import HIDDEN, MIXES, STREAMS, V4, V41, call_on
from dsv4.reference import hyper_connections as reference

SHAPES = [[1, 40], [2, 7], [8, 96], [4, 1100]]
ONE_ORDER = "exact products, a stated order, one rounding"
LATTICE = "every step is exact"
FP32 = "fp32 in any order, fast primitives"
Bound = Callable[[Call, Tensor], Tensor]


def _streams(spec: Spec, count: int, hidden: int) -> Tensor:
    return stream_inputs.streams(spec["classes"], spec["rows"], count, hidden, spec["seed"])


def _exact_specs(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    return strategies.specs(rows=strategies.rows(130), **more, seed=strategies.seeds())


def _powers() -> st.SearchStrategy[int]:
    """b, where 4^b is far above V4.1's norm_eps."""
    return st.integers(-9, 20)


def _statistics_lattice(spec: Spec, device: torch.device) -> Call:
    x = stream_inputs.lattice(spec["rows"], STREAMS, HIDDEN, spec["seed"], spec["power"])
    fn = stream_inputs.integers((MIXES, STREAMS * HIDDEN), spec["seed"] ^ 1, 8)
    return call_on(device, x.bfloat16(), fn, eps=V41, precision=spec["precision"])


def _statistics_single(spec: Spec, device: torch.device) -> Call:
    x = stream_inputs.lattice(spec["rows"], STREAMS, HIDDEN, spec["seed"], spec["power"], single=True)
    fn = stream_inputs.normal((MIXES, STREAMS * HIDDEN), spec["seed"] ^ 1)
    return call_on(device, x.bfloat16(), fn, eps=V41, precision=spec["precision"])


def _statistics_drawn(spec: Spec, device: torch.device) -> Call:
    count, hidden, mixes, eps, precision = spec["form"]
    fn = stream_inputs.projection(count, hidden, mixes, spec["seed"] ^ 1)
    return call_on(device, _streams(spec, count, hidden), fn, eps=eps, precision=precision)


def _statistics_cancelling(spec: Spec, device: torch.device) -> Call:
    count, hidden, mixes, eps, precision = spec["form"]
    x, fn = cancelling.pair((spec["rows"], count * hidden), (mixes, count * hidden), spec["seed"])
    return call_on(device, x.view(-1, count, hidden), fn, eps=eps, precision=precision)


def _statistics_bound(call: Call, exact: Tensor) -> Tensor:
    return stream_bounds.statistics_error(call[0], call[1], call["eps"], exact)


def _mix_statistics() -> Contract:
    exact = _exact_specs(precision=st.sampled_from(["exact", "tf32", "tf32_compensated"]), power=_powers())
    model = [[STREAMS, HIDDEN, MIXES, V4, "exact"]]
    forms: list[list[Any]] = [[1, 40, 3, V4, "exact"], [2, 7, 8, V4, "tf32"], [8, 96, 80, V4, "tf32_compensated"]]
    forms += [[4, 1100, 24, V41, "exact"], [4, HIDDEN, 4, V4, "exact"]]
    forms += [[4, 256, 24, V41, "tf32"], [4, 512, 24, V4, "tf32_compensated"]]  # multiples of 1024, as DeepGEMM takes them
    drawn, others = (draws(stream_inputs.MODERATE, form=st.sampled_from(listed)) for listed in (model, forms))
    both = _exact_specs(form=st.sampled_from([model[0], forms[3], forms[4]]))
    return Contract(
        "hyper_connections",
        "mix_statistics",
        (
            Domain("lattice", _statistics_lattice, exact, why="mean squares 4^b, integers"),
            Domain("single", _statistics_single, exact, why="one element: the bits of fn"),
            Domain("drawn", _statistics_drawn, drawn, why="finite bf16"),
            Domain("forms", _statistics_drawn, others, why="other shapes and precisions"),
            Domain("cancelling", _statistics_cancelling, both, why=cancelling.WHY),
        ),
        (
            Output("result", Level.E1, LATTICE, ("lattice", "single")),
            Output("result", Level.E3, FP32, ("drawn", "forms", "cancelling"), bound=_statistics_bound),
        ),
        (*invariants.on("drawn", *KEEPS), *(one for name in ("lattice", "cancelling") for one in invariants.on(name, "batch", "padding"))),
        Rows(),
        exact=unrounded(reference.mix_statistics),
    )


def _split(spec: Spec, device: torch.device) -> Call:
    count, iterations, eps = spec["form"]
    wanted = stream_inputs.logits(spec["classes"], spec["rows"], count, spec["seed"])
    scale, base = stream_inputs.scale_and_base(count, spec["seed"])
    mixes = (wanted - base) / stream_inputs.spread(scale, count)
    return call_on(device, mixes, scale, base, iterations=iterations, eps=eps)


def _split_lattice(spec: Spec, device: torch.device) -> Call:
    """Sigmoids at 0 and saturated; equal logits of comb, or a permutation of streams, by turns. Scales and base are powers of two."""
    rows, seed = spec["rows"], spec["seed"]
    scale, base = torch.tensor([2.0, 0.5, 4.0]), stream_inputs.integers((MIXES,), seed ^ 1, 8)
    comb = stream_inputs.integers((rows, 1, 1), seed ^ 2, 8).expand(rows, STREAMS, STREAMS).clone()
    comb[1::2] += 2 * stream_inputs.SATURATED * stream_inputs.permutation(STREAMS, seed)
    wanted = torch.cat([stream_inputs.saturated((rows, 2 * STREAMS), seed ^ 3), comb.flatten(1)], 1)
    return call_on(device, (wanted - base) / stream_inputs.spread(scale, STREAMS), scale, base, iterations=2, eps=0.0)


def _split_bound(name: str) -> Bound:
    def bound(call: Call, exact: Tensor) -> Tensor:
        mixes, scale, base = call.args
        found = stream_bounds.mix_errors(mixes, 0.0, scale, base, call["iterations"], call["eps"])
        part: Tensor = getattr(found, name)
        return part

    return bound


def _split_mix() -> Contract:
    model, forms = [[STREAMS, 20, 1e-6]], [[STREAMS, 3, 2.0**-6], [1, 2, 1e-6], [2, 1, 2.0**-6], [8, 2, 1e-6]]
    drawn, others = (draws(stream_inputs.LOGIT_CLASSES, form=st.sampled_from(listed)) for listed in (model, forms))
    names = ("pre", "post", "comb")
    return Contract(
        "hyper_connections",
        "split_mix",
        (
            Domain("lattice", _split_lattice, _exact_specs(), why="saturated sigmoids, equal or permuted logits, no eps"),
            Domain("drawn", _split, drawn, why="20 iterations"),
            Domain("forms", _split, others, why="few iterations, eps 2^-6"),
        ),
        (
            *(Output(name, Level.E1, LATTICE, ("lattice",)) for name in names),
            *(Output(name, Level.E3, FP32, ("drawn", "forms"), bound=_split_bound(name)) for name in names),
        ),
        (*invariants.on("drawn", *KEEPS), *invariants.on("lattice", "batch")),
        Rows(),
        exact=unrounded(reference.split_mix),
        not_claimed=("a post multiplier other than 2",),
    )


def _eighths(shape: tuple[int, ...], seed: int) -> Tensor:
    return stream_inputs.integers(shape, seed, 16) / 8


def _collapse(spec: Spec, device: torch.device) -> Call:
    count, hidden = spec["shape"]
    return call_on(device, _streams(spec, count, hidden), stream_inputs.weights(spec["classes"], spec["rows"], count, spec["seed"]))


def _collapse_lattice(spec: Spec, device: torch.device) -> Call:
    x = stream_inputs.integers((spec["rows"], STREAMS, HIDDEN), spec["seed"], 128)
    return call_on(device, x.bfloat16(), _eighths((spec["rows"], STREAMS), spec["seed"] ^ 1))


def _expand(spec: Spec, device: torch.device) -> Call:
    count, hidden = spec["shape"]
    y = _streams({**spec, "seed": spec["seed"] ^ 1}, 3, hidden)[:, 2]  # not one of the streams that cancel
    post = stream_inputs.weights(["normal"], spec["rows"], count, spec["seed"] ^ 2)
    comb = stream_inputs.combs(spec["classes"], spec["rows"], count, spec["seed"])
    return call_on(device, y, _streams(spec, count, hidden), post, comb)


def _expand_lattice(spec: Spec, device: torch.device) -> Call:
    rows, seed = spec["rows"], spec["seed"]
    y, x = (stream_inputs.integers((rows, *shape), seed ^ number, 128) for number, shape in enumerate([(HIDDEN,), (STREAMS, HIDDEN)]))
    return call_on(device, y.bfloat16(), x.bfloat16(), _eighths((rows, STREAMS), seed ^ 2), _eighths((rows, STREAMS, STREAMS), seed ^ 3))


def _fixed_order(function: str, build: Any, lattice: Any, rows: tuple[int, ...]) -> Contract:
    classes = tuple(stream_inputs.STREAM_CLASSES)
    model, others = (draws(classes, shape=st.sampled_from(shapes)) for shapes in ([[STREAMS, HIDDEN]], SHAPES))
    return Contract(
        "hyper_connections",
        function,
        (
            Domain("lattice", lattice, _exact_specs(), why="exact in fp32"),
            Domain("drawn", build, model, why="all classes of streams"),
            Domain("forms", build, others, why="other shapes"),
        ),
        (
            Output("result", Level.E1, LATTICE, ("lattice",)),
            Output("result", Level.E2, ONE_ORDER, ("drawn", "forms"), any_nan=True),
        ),
        invariants.on("drawn", *KEEPS),
        Rows(rows),
    )


def _head_lattice(spec: Spec, device: torch.device) -> Call:
    """Mixes are integers, so that with a scale of 256 each sigmoid is at 0 or saturated, and a sum of the streams needs few bits."""
    x = stream_inputs.lattice(spec["rows"], STREAMS, HIDDEN, spec["seed"], spec["power"])
    fn = stream_inputs.integers((STREAMS, STREAMS * HIDDEN), spec["seed"] ^ 1, 1)
    scale, base = torch.tensor([stream_inputs.SATURATED]), stream_inputs.saturated((STREAMS,), spec["seed"] ^ 2)
    return call_on(device, x.bfloat16(), fn, scale, base, norm_eps=V41, eps=0.0)


def _head_drawn(spec: Spec, device: torch.device) -> Call:
    count, hidden = spec["shape"]
    scale, base = stream_inputs.scale_and_base(count, spec["seed"])
    fn = stream_inputs.projection(count, hidden, count, spec["seed"] ^ 1)
    return call_on(device, _streams(spec, count, hidden), fn, scale[:1], base[:count], norm_eps=V4, eps=spec["eps"])


def _head_bound(call: Call, exact: Tensor) -> Tensor:
    x, fn, scale, base = call.args
    mixes = unrounded(reference.mix_statistics)(x, fn, eps=call["norm_eps"])
    off = stream_bounds.statistics_error(x, fn, call["norm_eps"], mixes)
    pre, pre_off = stream_bounds.pre_error(mixes, off, scale, base, call["eps"])
    return stream_bounds.collapse_error(x, pre, pre_off)


def _head() -> Contract:
    model = {"shape": st.just([STREAMS, HIDDEN]), "eps": st.just(1e-6)}
    forms = {"shape": st.sampled_from(SHAPES[:3]), "eps": st.just(2.0**-6)}
    return Contract(
        "hyper_connections",
        "head_collapse",
        (
            Domain("lattice", _head_lattice, _exact_specs(power=_powers()), why="saturated sigmoids, no eps"),
            Domain("drawn", _head_drawn, draws(stream_inputs.MODERATE, **model), why="finite bf16"),
            Domain("forms", _head_drawn, draws(stream_inputs.MODERATE, **forms), why="other shapes, eps 2^-6"),
        ),
        (
            Output("result", Level.E1, LATTICE, ("lattice",)),
            Output("result", Level.E3, FP32, ("drawn", "forms"), bound=_head_bound),
        ),
        invariants.on("drawn", *KEEPS),
        Rows(),
        exact=unrounded(reference.head_collapse),
    )


CONTRACTS = (
    _mix_statistics(),
    _split_mix(),
    _fixed_order("collapse", _collapse, _collapse_lattice, (0, 1)),
    _fixed_order("expand", _expand, _expand_lattice, (0, 1, 2, 3)),
    _head(),
    boundary(),
)
