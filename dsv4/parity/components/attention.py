"""Contract of attention.

On lattices the output is E1, whatever the order of a list, its split into parts, the base of the exponential and the precision of the
probabilities: 2^k equal scores give a mean that bf16 holds, one score that is ahead of all others by more than 104 gives that row, a sink
beyond every score gives zeros (`attention_inputs`). On arbitrary numbers it is E3, probabilities in bf16 included, and so is lse
everywhere (`attention_bounds`).

Lists hold absent and repeated picks, lengths, tokens without any pick. All that nobody picked is NaN: other rows, other slots, what lies
between pages, lanes past a token's length. Any leak of it shows in every check.

`decode_attention` may split a token's picks by the number of tokens, padding included: it is held to `batch` where it claims to be batch
invariant, and to `padding` nowhere.

That splitting a list, or permuting it or the heads, changes nothing on a lattice is a property of two calls, and follows: each of them
equals the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import attention_bounds, attention_inputs, cancelling, invariants, strategies
from dsv4.parity.attention_inputs import draft_call, paged_call, sizes, sparse_call
from dsv4.parity.contracts import Call, Contract, Domain, Invariant, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.reference import attention

Build = Callable[[Spec, torch.device], Call]
ALONE = ("run_to_run", "inputs_unchanged", "poisoned_output", "strides", "fullgraph", "opcheck", "graph_replay")
ROWS = ("batch", "padding", "empty")
PAGES = {"bounded": ("main.pages", "extra.pages")}  # at odd addresses another kernel reads them
TINY = tuple(name for name in ALONE if name not in ("poisoned_output", "opcheck"))  # of functions that need no operator of their own
EXACT = ("mean", "ahead")
WHOLE: Spec = {"with_sink": True, "lengths": True}

# Ways to call: each is a graph to a compiler.
SPARSE: tuple[Spec, ...] = (
    {"dim": 512, "extra": "rows", **WHOLE},
    {"dim": 512, "extra": None, "with_sink": True, "lengths": False},
    {"dim": 64, "extra": "rows", "with_sink": False, "lengths": False, "scale": 1.0},
    {"dim": 128, "extra": None, "with_sink": False, "lengths": True, "scale": 0.0625},
)
PAGED: tuple[Spec, ...] = (
    {"layout": "v4", "extra": "v4", **WHOLE},
    {"layout": "v41", "extra": "v41_fp4", **WHOLE},
    {"layout": "v41_inline", "extra": "v41_fp4_inline", "with_sink": True, "lengths": False},
    {"layout": "v4", "extra": None, "with_sink": True, "lengths": False},
    {"layout": "uniform_fp8", "extra": "uniform_fp8", "with_sink": False, "lengths": True},
    {"layout": "v41_fp4", "extra": None, "with_sink": False, "lengths": False, "scale": 0.0625},
    {"layout": "v41_fp4_inline", "extra": "v41_fp4_inline", **WHOLE},
    {"layout": "v41", "extra": "v41", **WHOLE},
    {"layout": "v41_inline", "extra": None, **WHOLE},
)
DRAFT: tuple[Spec, ...] = (
    {"layout": "v41", "extra": None, "block": 5, **WHOLE},
    {"layout": "v4", "extra": None, "block": 4, **WHOLE},
    {"layout": "v41_inline", "extra": None, "block": 2, "with_sink": False, "lengths": False},
)
SINGLE: Spec = {"layout": "v4", "extra": None, "block": 1, **WHOLE}


def _domain(name: str, build: Build, forms: Sequence[Spec], kinds: Sequence[str], why: str, **fixed: st.SearchStrategy[Any]) -> Domain:
    return Domain(name, build, sizes(forms, kinds, **fixed), why=why)


def _three(build: Build, forms: Sequence[Spec], **fixed: st.SearchStrategy[Any]) -> tuple[Domain, ...]:
    return (
        _domain("mean", build, forms, ("mean",), "2^k equal scores, a sink like them, none, or beyond them", **fixed),
        _domain("ahead", build, forms, ("ahead",), "one score ahead of all others by more than 104", **fixed),
        _domain("drawn", build, forms, ("drawn",), "arbitrary rows and queries, flat to sharp", **fixed),
    )


def _outputs(exact: Sequence[str], drawn: Sequence[str]) -> tuple[Output, ...]:
    everywhere = (*exact, *drawn)
    return (
        Output("output", Level.E1, "an exact softmax", tuple(exact)),
        Output("output", Level.E3, "exponentials, sums, bf16 probabilities", tuple(drawn), bound=attention_bounds.outputs),
        Output("lse", Level.E3, "a logarithm of a sum of exponentials", everywhere, bound=attention_bounds.lses),
    )


def _permits(part: int, bound: Callable[[Call, Tensor], Tensor]) -> Callable[[Call, Tensor, Tensor], Tensor]:
    """Anything where a score may leave fp32; elsewhere what the bound allows."""

    def permits(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
        if actual.shape != expected.shape:
            return torch.zeros(expected.shape, dtype=torch.bool, device=expected.device)
        exact = unrounded(attention.sparse_attention)(*call.args, **call.kwargs)[part]
        free = attention_bounds.unbounded(call)
        near = ((actual.double() - exact).abs() <= bound(call, exact)) | (actual.double() == exact)
        allowed: Tensor = near | (free[..., None] if near.dim() == 3 else free)
        return allowed

    return permits


def _sparse() -> Contract:
    many = {"tokens": st.sampled_from([63, 64, 65, 66, 80, 130]), "picks": st.just(64), "heads": st.sampled_from([1, 2])}
    domains = (
        *_three(sparse_call, SPARSE),
        _domain("many", sparse_call, SPARSE[:1], EXACT, "token counts around 64 (SA-01)", **many),
        _domain("plain", sparse_call, SPARSE[:1], ("drawn",), "one form", tokens=st.integers(1, 7)),
        _domain("cancelling", attention_inputs.cancelling_call, SPARSE[:1], ("drawn",), cancelling.WHY, heads=st.sampled_from([1, 8, 64])),
        _domain("overflow", attention_inputs.overflow_call, SPARSE[:1], ("drawn",), "scores beyond fp32 in some tokens (SA-15)"),
    )
    overflow = (
        Output(
            "output",
            Level.E4,
            "a token whose scores leave fp32 may be anything",
            ("overflow",),
            permits=_permits(0, attention_bounds.outputs),
        ),
        Output(
            "lse", Level.E4, "a token whose scores leave fp32 may be anything", ("overflow",), permits=_permits(1, attention_bounds.lses)
        ),
    )
    return Contract(
        "attention",
        "sparse_attention",
        domains,
        (*_outputs(("mean", "ahead", "many"), ("drawn", "plain", "cancelling")), *overflow),
        (
            *invariants.on("plain", *ALONE, *ROWS),
            *invariants.on("mean", "run_to_run", "poisoned_output"),
            *invariants.on("cancelling", "batch", "padding"),
        ),
        Rows((0, 2, "lengths", "extra_indices", "extra_lengths")),
        exact=unrounded(attention.sparse_attention),
        not_claimed=("tokens with a score, or a sum that leads to one, beyond fp32",),
    )


def _of_pages(domain: str) -> tuple[Invariant, ...]:
    """`ALONE`, of a function that reads pages."""
    return tuple(Invariant(name, domain, PAGES if name == "strides" else {}) for name in ALONE)


def _paged(function: str, forms: Sequence[Spec], **fixed: st.SearchStrategy[Any]) -> Contract:
    far = {"far": st.just(True), "heads": st.just(2), "tokens": st.integers(1, 5), "page_sizes": st.just([16, 64]), "gap": st.just(0)}
    small = {"tokens": st.integers(1, 7), "picks": st.sampled_from([16, 40]), "heads": st.sampled_from([3, 8])}
    domains = (
        *_three(paged_call, forms, **fixed),
        _domain("far", paged_call, forms, EXACT, "pages beyond byte 2^31 (SA-08)", **{**far, "picks": st.sampled_from([4, 16])}),
        _domain("plain", paged_call, forms[:1], ("drawn",), "one form", **small),
    )
    return Contract(
        "attention",
        function,
        domains,
        _outputs(("mean", "ahead", "far"), ("drawn", "plain")),
        (*_of_pages("plain"), *invariants.on("plain", *(name for name in ROWS if name != "padding" or function != "decode_attention"))),
        Rows((0, 2, "lengths", "extra_slots", "extra_lengths")),
        exact=unrounded(getattr(attention, function)),
        not_claimed=("tokens with a score, or a sum that leads to one, beyond fp32",),
    )


def _draft() -> Contract:
    means = (DRAFT[1], DRAFT[2], SINGLE)
    domains = (
        _domain("mean", draft_call, means, ("mean",), "2^k equal scores"),
        _domain("ahead", draft_call, DRAFT, ("ahead",), "one score ahead of all others by more than 104"),
        _domain("drawn", draft_call, DRAFT, ("drawn",), "arbitrary rows and queries; no block at all"),
        _domain("single", draft_call, (SINGLE,), ("drawn",), "blocks of one", tokens=st.integers(1, 3), picks=st.just(16)),
    )
    return Contract(
        "attention",
        "draft_attention",
        domains,
        _outputs(("mean", "ahead"), ("drawn", "single")),
        (*_of_pages("single"), *invariants.on("single", *ROWS)),
        Rows((0, 1, 3, "lengths")),
        exact=unrounded(attention.draft_attention),
    )


def _merge_call(spec: Spec, device: torch.device) -> Call:
    """Parts of which some are empty, and then NaN."""
    source, shape = strategies.generator(spec["seed"]), (spec["splits"], spec["tokens"], spec["heads"])
    outputs = torch.randn(*shape, spec["dim"], generator=source)
    lses = 5 * torch.randn(shape, generator=source)
    sink = 3 * torch.randn(shape[2:], generator=source)
    live = torch.rand(shape, generator=source) < 0.6
    if spec["kind"] == "ahead":
        leader = torch.randint(0, spec["splits"], shape[1:], generator=source)[None]
        live.scatter_(0, leader, torch.rand(leader.shape, generator=source) < 0.85)
        lses.scatter_(0, leader, 300.0 + lses[:1])
        lses[~live] = -torch.inf
        live &= lses.amax(0) > 200  # without its leader a token is empty
        sink = sink.where(torch.arange(spec["heads"]) % 3 > 0, -torch.inf)
    if spec["kind"] == "mean":
        outputs, lses, live = _equal_parts(outputs, spec["splits"], source)
        sink = torch.full_like(sink, -torch.inf)
    if spec["kind"] == "large":
        outputs, sink = outputs.abs(), torch.tensor(attention_inputs.LARGE)[torch.arange(spec["heads"]) % 3]
    outputs = outputs.to(getattr(torch, spec["form"]["dtype"])).masked_fill(~live[..., None], torch.nan)
    lses = lses.masked_fill(~live, -torch.inf)
    return Call((outputs.to(device), lses.to(device), sink.to(device) if spec["form"]["with_sink"] else None))


def _equal_parts(outputs: Tensor, splits: int, source: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """2^k parts mean + d, mean - d with one lse; the others are empty."""
    shape = outputs.shape[:3]
    table = torch.tensor(attention_inputs.PAIRS)[torch.randint(0, len(attention_inputs.PAIRS), outputs.shape[1:], generator=source)]
    turns = torch.tensor([1.0, -1.0]).repeat(splits)[:splits, None, None, None]
    counts = 1 << torch.randint(0, splits.bit_length(), shape[1:], generator=source)
    live = torch.arange(splits)[:, None, None] < counts * (torch.rand(shape[1:], generator=source) < 0.85)
    made = table[..., 0] + table[..., 1] * turns * (counts > 1)[..., None]
    order = torch.randperm(splits, generator=source)
    lses = (40 * torch.randn(shape[1:], generator=source)).expand(shape).clone()
    return made[order], lses, live[order]


def _merge() -> Contract:
    forms = [{"dtype": "float32", "with_sink": True}, {"dtype": "bfloat16", "with_sink": True}, {"dtype": "float32", "with_sink": False}]

    def domain(name: str, why: str, *chosen: Spec) -> Domain:
        parts = {
            "form": st.sampled_from(list(chosen or forms)),
            "kind": st.just(name if name != "plain" else "drawn"),
            "splits": st.one_of(st.integers(1, 9), st.just(33)),
            "tokens": st.one_of(st.integers(1, 5), st.just(0)),
            "heads": st.sampled_from([1, 3, 16]),
            "dim": st.sampled_from([512, 64]),
        }
        return Domain(name, _merge_call, strategies.specs(**parts, seed=strategies.seeds()), why=why)

    domains = (
        domain("mean", "2^k equal parts"),
        domain("ahead", "one part ahead of all others by more than 104"),
        domain("large", "a sink beyond every part", *forms[:2]),
        domain("drawn", "arbitrary parts, empty ones NaN"),
        domain("plain", "one form", forms[0]),
    )
    exact, drawn = ("mean", "ahead", "large"), ("drawn", "plain")
    return Contract(
        "attention",
        "merge_splits",
        domains,
        (
            Output("output", Level.E1, "weights that are equal, 1 or 0", exact),
            Output("output", Level.E3, "exponentials and a weighted sum", drawn, bound=attention_bounds.merged_outputs),
            Output("lse", Level.E3, "a logarithm of a sum of exponentials", (*exact, *drawn), bound=attention_bounds.merged_lses),
        ),
        invariants.on("plain", *ALONE),
        exact=unrounded(attention.merge_splits),
    )


def _lse_specs(*kinds: str) -> st.SearchStrategy[Spec]:
    return strategies.specs(
        tokens=st.integers(1, 9),
        heads=st.sampled_from([1, 8, 64]),
        kinds=strategies.some_of(kinds),
        seed=strategies.seeds(),
    )


def _numbers(spec: Spec, shape: Sequence[int], seed: int) -> Tensor:
    """fp32 of the kinds drawn: normal, far apart, empty (-inf), any bits."""
    source = strategies.generator(seed)
    made = {
        "normal": 10 * torch.randn(tuple(shape), generator=source),
        "far": 1000.0 * torch.randint(-9, 10, tuple(shape), generator=source),
        "empty": torch.full(tuple(shape), -torch.inf),
        "bits": strategies.random_bits(shape, seed ^ 7, torch.float32),
    }
    which = torch.randint(0, len(spec["kinds"]), tuple(shape), generator=source)
    found = made[spec["kinds"][0]]
    for number, kind in enumerate(spec["kinds"]):
        found = torch.where(which == number, made[kind], found)
    return found


def _lse_form(function: str, level: Level, why: str) -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        return Call((_numbers(spec, (spec["tokens"], spec["heads"]), spec["seed"]).to(device),))

    domain = Domain("drawn", build, _lse_specs("normal", "far", "empty", "bits"), why="any fp32")
    row = Output("result", level, why, any_nan=True)
    return Contract("attention", function, (domain,), (row,), invariants.on("drawn", *TINY, *ROWS), Rows())


def _lse_with_sink() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        lse = _numbers(spec, (spec["tokens"], spec["heads"]), spec["seed"])
        sink = _numbers(spec, (spec["heads"],), spec["seed"] ^ 5)
        if spec["kinds"] == ["far"]:
            sink += 500.0  # never as far as lse, and never nearer than 500
        return Call((lse.to(device), sink.to(device)))

    far = Domain("far", build, _lse_specs("far"), why="one ahead of the other by more than 104")
    drawn = Domain("drawn", build, _lse_specs("normal", "far", "empty"), why="near and far, no picks, no sink")
    return Contract(
        "attention",
        "lse_with_sink",
        (far, drawn),
        (
            Output("result", Level.E1, "the larger one", ("far",)),
            Output("result", Level.E3, "a logarithm of a sum", ("drawn",), bound=attention_bounds.with_sink),
        ),
        invariants.on("drawn", *TINY, *ROWS),
        Rows(),
        exact=unrounded(attention.lse_with_sink),
    )


def _window() -> Contract:
    def whole(spec: Spec, device: torch.device) -> Call:
        return Call((torch.arange(spec["first"], spec["first"] + spec["count"], device=device) - 5,), {"window": 128})

    def ends(spec: Spec, device: torch.device) -> Call:
        numbers = torch.arange(spec["first"], spec["first"] + spec["count"])
        near = torch.tensor([-(2**63), 2**63 - 1, -(2**31), 2**31, 2**32])[numbers // 8]
        return Call(((near + (numbers % 8 - 4) * (near.abs() < 2**62)).to(device),), {"window": 5})

    def drawn(spec: Spec, device: torch.device) -> Call:
        source, dtype = strategies.generator(spec["seed"]), getattr(torch, spec["integers"])
        positions = torch.randint(-3, 400, (spec["rows"],), generator=source)
        limits = torch.tensor([torch.iinfo(dtype).min, torch.iinfo(dtype).max, 2**31 - 1, -(2**31), 2**20])
        some = limits[torch.randint(0, len(limits), (spec["rows"],), generator=source)]
        ends = torch.where(torch.rand(spec["rows"], generator=source) < 0.3, some, positions)
        return Call((ends.to(dtype).to(device),), {"window": spec["window"]})

    specs = strategies.specs(
        rows=strategies.rows(40),
        window=st.sampled_from([128, 1, 2, 64, 200]),
        integers=st.sampled_from(["int64", "int32"]),
        seed=strategies.seeds(),
    )
    return Contract(
        "attention",
        "window_indices",
        (
            Domain("first", whole, exhaustive=300, why="every position around the first windows"),
            Domain("ends", ends, exhaustive=40, why="around the ends of int32 and int64"),
            Domain("drawn", drawn, specs, why="all windows, and the ends of the integers"),
        ),
        (Output("result", Level.E0, "integers"),),
        invariants.on("drawn", *TINY, *ROWS),
        Rows(),
    )


SPLIT = {"picks": st.sampled_from([40, 130, 513]), "tokens": st.integers(1, 5), "heads": st.sampled_from([1, 3, 8])}
LONG = {"tokens": st.sampled_from([1, 5, 63, 66, 130]), "picks": st.sampled_from([4, 16, 40]), "heads": st.sampled_from([1, 2])}
CONTRACTS = (
    _sparse(),
    _paged("paged_attention", PAGED),
    _paged("decode_attention", PAGED[:3], **SPLIT),
    _paged("prefill_attention", PAGED[:3], **LONG),
    _draft(),
    _merge(),
    _lse_form("lse_flashmla", Level.E0, "one number for another"),
    _lse_form("lse_base2", Level.E2, "one product in fp64, rounded once"),
    _lse_with_sink(),
    _window(),
)
