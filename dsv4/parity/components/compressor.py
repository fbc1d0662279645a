"""Contract of the compressor.

Plan and state are integers and copies: E0, whatever the numbers are. Pooled entries and latents are E1 on lattices, where a softmax is
exact: equal scores, bias included, make an entry the mean of 2^k integers, and a score that is ahead of all others by a gap of 1024 makes
it one token's value. On arbitrary numbers they are E3 (`compressor_bounds`). Pages are E1 on lattices whose entries have one magnitude, so
that the norm is exact, and E4 otherwise: a record decodes to within the bound of the exact row, and no other byte is touched.

The rings of the inputs hold NaN wherever no token of the last window is (`compressor_batches`): a candidate that reads there, or that lets
the missing first overlap take part with a weight of 0, shows NaN. Tokens past the last request and the values of tokens that nobody reads
are NaN, too. Updated states and pages are compared whole, so a row that should not be written shows as well.

That a request cut in any way gives the same bits is a property of two calls: what the second one reads is the first one's state, which
is E0, so it follows where pooled entries are E1. For arbitrary numbers it is tested beside the reference (tests/test_compressor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import KV_LAYOUTS
from dsv4.parity import cancelling, compressor_batches, compressor_bounds, invariants, lattices, routing_rows, strategies
from dsv4.parity.compressor_batches import LATTICES, MODERATE, Form
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.levels import Level
from dsv4.reference import compressor
from dsv4.rope_tables import rope_frequencies, rope_table

PAGE = 4  # slots
POSITIONS = 160  # rows of a table; some entries lie past it
STATE = 2  # argument that is updated in place
PAGES = 7
Strategy = st.SearchStrategy[Any]

POOLED = (
    Form("overlap", 4, 24, overlap=True, drafts=5),
    Form("fresh", 4, 16, overlap=True, rows=False),
    Form("heavy", 128, 8, rows=False, tokens=400),
    Form("eight", 8, 16, drafts=1),
    Form("pair", 2, 40, ape=False, drafts=3),
    Form("single", 1, 16, ape=False),
)
STORED = (
    Form("overlap", 4, 512, overlap=True, drafts=3, layout="v4"),
    Form("heavy", 128, 512, rows=False, layout="v41", tokens=300),
    Form("pair", 2, 512, ape=False, drafts=2, layout="v41_fp4"),
    Form("single", 1, 512, ape=False, rows=False, layout="v41_fp4_inline", tokens=20),
)
PLANNED = (Form("overlap", 4, 1, overlap=True), Form("heavy", 128, 1, tokens=400), Form("pair", 2, 1, rows=False), Form("single", 1, 1))


def _kept(*updated: int) -> tuple[str, ...]:
    """Invariants that every function is held to; one that updates arguments gets `but` as well."""
    plain = () if updated else ("inputs_unchanged",)
    return ("run_to_run", *plain, "poisoned_output", "fullgraph", "opcheck", "graph_replay")


def _draws(form: Form, classes: Sequence[str], **more: Strategy) -> Strategy:
    return strategies.specs(
        tokens=st.one_of(st.integers(1, form.tokens), st.just(form.tokens)),
        requests=st.integers(1, 5),
        classes=strategies.some_of(classes),
        padding=st.sampled_from([0, 0, 3]),
        spare=st.integers(0, 2),
        **more,
        seed=strategies.seeds(),
    )


def _pooled_domain(form: Form, label: str, classes: Sequence[str], why: str, **more: Strategy) -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        batch = compressor_batches.batch(form, spec)
        return Call(batch.arguments(device), batch.options(form, device))

    return Domain(f"{label}_{form.name}", build, _draws(form, classes, **more), why=why)


def _compress() -> Contract:
    exact = [_pooled_domain(form, "exact", LATTICES, "one token ahead, or equal scores of 2^k tokens") for form in POOLED]
    drawn = [_pooled_domain(form, "drawn", (*MODERATE, "tiny"), "arbitrary values and scores") for form in POOLED]
    hostile = {"hostile": st.booleans()}
    special = [
        _pooled_domain(form, "special", ("special",), "any bits; offsets and starts out of range", **hostile)
        for form in POOLED
        if form.rows
    ]
    names = [tuple(domain.name for domain in domains) for domains in (exact, drawn)]
    return Contract(
        "compressor",
        "compress",
        (*exact, *drawn, *special),
        (
            Output("pooled", Level.E1, "a softmax of equal numbers, or of one alone", names[0]),
            Output("pooled", Level.E3, "a softmax and a weighted sum", names[1], bound=compressor_bounds.pooled),
            Output("requests", Level.E0, "integers"),
            Output("entries", Level.E0, "integers"),
            Output("state", Level.E0, "copies"),
        ),
        (
            *invariants.on("drawn_overlap", *_kept(STATE)),
            *invariants.but("special_overlap", STATE),
            *invariants.on("exact_heavy", "run_to_run", "poisoned_output"),
        ),
        exact=unrounded(compressor.compress),
        not_claimed=("two requests with one state row", "pooled numbers of infinite and NaN inputs, and beside offsets out of order"),
    )


def _compression_plan() -> Contract:
    def domain(form: Form) -> Domain:
        def build(spec: Spec, device: torch.device) -> Call:
            of = compressor_batches.requests(form, spec)
            rows = {} if of.state_rows is None else {"state_rows": of.state_rows.clamp(max=of.states - 1).to(device)}
            return Call((of.starts.to(device), of.cu_seqlens.to(device)), {"ratio": form.ratio, "tokens": spec["tokens"], **rows})

        drawn = _draws(form, ("special",), hostile=st.booleans())
        return Domain(form.name, build, drawn, why=f"ratio {form.ratio}: idle requests, offsets out of order, starts out of range")

    return Contract(
        "compressor",
        "compression_plan",
        tuple(domain(form) for form in PLANNED),
        (Output("requests", Level.E0, "integers"), Output("entries", Level.E0, "integers")),
        invariants.on("overlap", *_kept(), "strides"),
    )


def _projections(dtypes: Sequence[str], hidden: Strategy | None = None) -> Strategy:
    return strategies.specs(
        rows=strategies.rows(70),
        width=st.sampled_from([8, 24, 256]),
        hidden=st.one_of(st.integers(1, 70), st.sampled_from([128, 1500])) if hidden is None else hidden,
        dtype=st.sampled_from(list(dtypes)),
        seed=strategies.seeds(),
    )


def _project() -> Contract:
    def lattice(spec: Spec, device: torch.device) -> Call:
        dtype = getattr(torch, spec["dtype"])
        widest = min(127 if dtype is torch.bfloat16 else 8191, (lattices.FP32_QUANTA - 1) // (7 * spec["hidden"]))
        made = [lattices.integers((spec["rows"], spec["hidden"]), spec["seed"], 7).bfloat16()]
        for number in (1, 2):
            made.append((lattices.integers((spec["width"], spec["hidden"]), spec["seed"] ^ number, widest) * 0.125).to(dtype))
        return Call(tuple(tensor.to(device) for tensor in made))

    def arbitrary(spec: Spec, device: torch.device) -> Call:
        x = routing_rows.rows(("normal", "near", "falling"), spec["rows"], spec["hidden"], spec["seed"]).bfloat16()
        weights = [
            (torch.randn(spec["width"], spec["hidden"], generator=strategies.generator(spec["seed"] ^ number)) * spec["hidden"] ** -0.5)
            for number in (1, 2)
        ]
        return Call((x.to(device), *(weight.to(getattr(torch, spec["dtype"])).to(device) for weight in weights)))

    def cancels(spec: Spec, device: torch.device) -> Call:
        width, hidden, dtype = spec["width"], spec["hidden"], getattr(torch, spec["dtype"])
        x, both = cancelling.pair((spec["rows"], hidden), (2 * width, hidden), spec["seed"])
        return Call((x.to(device), *(weight.to(dtype).to(device) for weight in both.split(width))))

    def bound(weight: int) -> Callable[[Call, Tensor], Tensor]:
        return lambda call, exact: compressor_bounds.projected(call, weight)

    both = ("bfloat16", "float32")
    return Contract(
        "compressor",
        "project",
        (
            Domain("lattice", lattice, _projections(both), why="integers times 1/8, up to 13 bits in fp32, sums below 2^24 quanta"),
            Domain("bf16", arbitrary, _projections(("bfloat16",)), why="arbitrary finite bf16"),
            Domain("cancelling", cancels, _projections(("bfloat16",), st.sampled_from([128, 1500])), why=cancelling.WHY),
        ),
        (
            Output("values", Level.E1, "fp32 sums are exact", ("lattice",)),
            Output("values", Level.E3, "fp32 accumulation of exact products", ("bf16", "cancelling"), bound=bound(1)),
            Output("scores", Level.E1, "fp32 sums are exact", ("lattice",)),
            Output("scores", Level.E3, "fp32 accumulation of exact products", ("bf16", "cancelling"), bound=bound(2)),
        ),
        (
            *invariants.on("bf16", *_kept(), "padding", "empty"),
            *invariants.on("lattice", "batch", "strides"),
            *invariants.on("cancelling", "batch", "padding"),
        ),
        Rows(),
        exact=unrounded(compressor.project),
    )


def _quarter_turns(seed: int) -> Tensor:
    """A table whose angles are multiples of 90 degrees."""
    turns = torch.randint(0, 4, (POSITIONS, 32), generator=strategies.generator(seed))
    return torch.cat([torch.tensor([1.0, 0.0, -1.0, 0.0])[turns], torch.tensor([0.0, 1.0, 0.0, -1.0])[turns]], 1)


def _slots(rows: int, pages: int, seed: int) -> Tensor:
    """Different slots, about one in six absent."""
    source = strategies.generator(seed)
    slots = torch.randperm(pages * PAGE, generator=source)[:rows]
    absent = torch.tensor([-1, -PAGE, pages * PAGE, 2**40])[torch.randint(0, 4, (rows,), generator=source)]
    return torch.where(torch.rand(rows, generator=source) < 1 / 6, absent, slots)


def _stored_domain(form: Form, label: str, classes: Sequence[str], why: str) -> Domain:
    layout = KV_LAYOUTS[form.layout]
    steady = label == "exact"

    def build(spec: Spec, device: torch.device) -> Call:
        batch = compressor_batches.batch(form, {**spec, "positions": POSITIONS}, steady=steady)
        rows = min(spec["tokens"], spec["tokens"] // form.ratio + spec["requests"])
        source = strategies.generator(spec["seed"] ^ 4)
        weight = torch.rand(form.dim, generator=source) + 0.5
        pages = -(-rows // PAGE) + 1
        stride = layout.page_bytes(PAGE) + 16 * spec["spare"]
        fixed = (
            weight.bfloat16() if form.layout == "v4" else weight,
            _quarter_turns(spec["seed"] ^ 5) if steady else rope_table(rope_frequencies(160000.0), POSITIONS),
            strategies.random_bits((pages, stride), spec["seed"] ^ 6, torch.uint8),
            _slots(rows, pages, spec["seed"] ^ 7),
        )
        options = {**batch.options(form, device), "eps": 1e-20 if steady else 1e-6, "layout": form.layout, "page_size": PAGE}
        return Call((*batch.arguments(device), *(tensor.to(device) for tensor in fixed)), options)

    return Domain(f"{label}_{form.name}", build, _draws(form, classes), why=why)


def _compress_and_store() -> Contract:
    exact = [_stored_domain(form, "exact", LATTICES, "entries of one magnitude, turned by multiples of 90 degrees") for form in STORED]
    drawn = [_stored_domain(form, "drawn", MODERATE, "arbitrary values and scores") for form in STORED]
    names = [tuple(domain.name for domain in domains) for domains in (exact, drawn)]
    return Contract(
        "compressor",
        "compress_and_store",
        (*exact, *drawn),
        (
            Output("latents", Level.E1, "every step is exact but the weight's rounding", names[0]),
            Output("latents", Level.E3, "a pooled entry and its norm", names[1], bound=compressor_bounds.latents),
            Output("requests", Level.E0, "integers"),
            Output("entries", Level.E0, "integers"),
            Output("state", Level.E0, "copies"),
            Output("pages", Level.E1, "bytes of rows that are exact", names[0]),
            Output("pages", Level.E4, "records decode within the bound", names[1], permits=compressor_bounds.page_bytes),
        ),
        (*invariants.on("drawn_overlap", *_kept(STATE, PAGES)), *invariants.but("drawn_pair", STATE, PAGES)),
        exact=unrounded(compressor.compress_and_store),
        not_claimed=("two requests with one state row", "two entries with one slot"),
    )


CONTRACTS = (_project(), _compression_plan(), _compress(), _compress_and_store())
