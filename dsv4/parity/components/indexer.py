"""Contract of the indexer: scores, and what is chosen by them. `index_code_contract` has what comes before.

Scores are E1 on lattices in both precisions and formats, dense and paged, and E3 elsewhere. Everything that is chosen from given scores is
E0, whatever they are; a set alone (order "any") is E4 with one set that is permitted. Chosen from queries and keys it is E1 on lattices,
where ties are frequent, and otherwise any choice that the bound of the scores permits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import cancelling, index_bounds, index_code_contract, index_inputs, index_scores, invariants, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.exact import unrounded
from dsv4.parity.index_inputs import RANGES, IndexCall, Strategy, logit_specs, paged_specs
from dsv4.parity.index_scores import LONG_SCORES, block_specs, topk_specs
from dsv4.parity.levels import Level
from dsv4.reference import indexer

KEEPS = index_code_contract.KEEPS
QUERIES = ("queries.codes", "queries.scales", "queries.weights")
CANCEL: dict[str, Strategy] = {"heads": st.sampled_from([8, 64]), "ends": st.just("full")}
PRECISIONS = st.sampled_from(["fp32", "bf16"])
DOTS = "a sum of weighted dot products"
ORDERED = st.sampled_from(["index", "score"])


def _logits() -> Contract:
    def domain(name: str, kind: str, why: str, **fixed: Strategy) -> Domain:
        return Domain(name, index_inputs.logit_call, logit_specs(kind, **fixed), why=why)

    plain: dict[str, Strategy] = {"heads": st.just(8), "dim": st.just(128), "starts": st.just("drawn"), "integers": st.just("int32")}
    return Contract(
        "indexer",
        "index_logits",
        (
            domain("lattice_fp8", "lattice", "sums are exact", format=st.just("fp8")),
            domain("lattice_fp4", "lattice", "sums are exact", format=st.just("fp4")),
            domain("lattice_bf16", "lattice", "what is rounded is exact before it", precision=st.just("bf16")),
            domain("plain", "lattice", "one size of head", **plain),
            domain("finite", "finite", "arbitrary finite codes, scales and weights"),
            domain("finite_bf16", "finite", "the same, rounded to bf16 on the way", precision=st.just("bf16")),
            domain("cancelling", "cancelling", cancelling.WHY, starts=st.just("drawn"), **CANCEL),
            domain("special", "special", "NaN codes and scales, infinite weights: outside of the range they show nowhere"),
        ),
        (
            Output("result", Level.E1, "exact sums", ("lattice_fp8", "lattice_fp4", "lattice_bf16", "plain")),
            Output("result", Level.E3, DOTS, ("finite", "finite_bf16", "special", "cancelling"), bound=index_bounds.logits),
        ),
        (
            *invariants.on("plain", *KEEPS, "inputs_unchanged"),
            *invariants.on("finite", "batch", "run_to_run"),
            *invariants.on("cancelling", "batch", "padding"),
        ),
        Rows((*QUERIES, "starts", "ends")),
        exact=unrounded(indexer.index_logits),
    )


def _paged() -> Contract:
    def domain(name: str, kind: str, why: str, **fixed: Strategy) -> Domain:
        return Domain(name, index_inputs.paged_call, paged_specs(kind, **fixed), why=why)

    far: dict[str, Strategy] = {"far": st.just(True), "pages": st.just(2), "gap": st.just(0), "spare": st.just(0), "columns": st.just(2)}
    return Contract(
        "indexer",
        "paged_index_logits",
        (
            domain("lattice", "lattice", "pages in any order, some missing, lengths past the table (IX-09, IX-12)"),
            domain("lattice_bf16", "lattice", "rounded to bf16 on the way", precision=st.just("bf16")),
            domain("plain", "lattice", "one size", heads=st.just(8), dim=st.just(128), page_size=st.just(4), format=st.just("fp8")),
            domain("far", "lattice", "a page beyond byte 2^31 (IX-10)", page_size=st.sampled_from([2, 64]), **far),
            domain("finite", "finite", "arbitrary finite numbers"),
            domain("cancelling", "cancelling", cancelling.WHY, **CANCEL),
        ),
        (
            Output("result", Level.E1, "exact sums", ("lattice", "lattice_bf16", "plain", "far")),
            Output("result", Level.E3, DOTS, ("finite", "cancelling"), bound=index_bounds.paged),
        ),
        (
            *invariants.on("plain", *KEEPS, "inputs_unchanged"),
            *invariants.on("finite", "batch"),
            *invariants.on("cancelling", "batch"),
        ),
        Rows((*QUERIES, 3, 4)),
        exact=unrounded(indexer.paged_index_logits),
    )


def _same_set(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """The picks of each row are those of the reference in some order, -1 behind them."""
    same = (expected.sort(1).values == actual.sort(1).values).all(1, keepdim=True)
    trailing = (actual[:, :-1] >= 0) | (actual[:, 1:] < 0)
    return (same & trailing.all(1, keepdim=True)).expand(expected.shape)


def _topk() -> Contract:
    def domain(name: str, why: str, **fixed: Strategy) -> Domain:
        return Domain(name, index_scores.topk_call, topk_specs(**fixed), why=why)

    long: dict[str, Strategy] = {
        "tokens": st.integers(1, 2),
        "length": st.sampled_from(["4096", "8320", "16384", "16448", "65536"]),
        "k": st.sampled_from([512, 2048]),
        "classes": strategies.some_of(LONG_SCORES),
        "ends": st.sampled_from(["", "full", "drawn"]),
        "starts": st.just(""),
    }
    paged: dict[str, Strategy] = {"page_size": st.sampled_from([1, 4, 64, 2**24]), "short": st.sampled_from([0, 1])}
    whole: dict[str, Strategy] = {"ends": st.sampled_from(RANGES), "starts": st.sampled_from(["drawn", "nothing"])}
    far: dict[str, Strategy] = {"far": st.just(True), "tokens": st.just(2), "k": st.just(8), "dtype": st.just("bf16")}
    return Contract(
        "indexer",
        "select_topk",
        (
            domain("index", "k - 1 to 20 k entries, ties, NaN, infinities, ranges of all kinds (IX-01, IX-06, IX-19)"),
            domain("score", "the same in descending score", order=st.just("score")),
            domain("any", "the same as sets", order=st.just("any")),
            domain("long", "more equal and nearly equal scores than a buffer holds (IX-01, IX-03, IX-05)", order=ORDERED, **long),
            domain("paged", "picks become slots; pages and requests that are not there", order=ORDERED, **paged),
            domain("plain", "every argument given", order=st.just("index"), **paged, **whole),
            domain("far", "a row of scores beyond element 2^31 (IX-25)", length=st.sampled_from(["20k", "2k"]), **far),
        ),
        (
            Output("result", Level.E0, "compares numbers; ties to the smaller entry", ("index", "score", "long", "paged", "plain", "far")),
            Output("result", Level.E4, "one set", ("any",), permits=_same_set),
        ),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("index", "strides", "run_to_run", "poisoned_output")),
        Rows((0, "starts", "ends", "requests")),
    )


def _blocks() -> Contract:
    build, why = index_scores.block_call, "ties, NaN, infinities, lengths of all kinds, more and fewer blocks than are kept"
    plain: dict[str, Strategy] = {"block": st.just(8), "count": st.just(4)}
    return Contract(
        "indexer",
        "candidate_blocks",
        (Domain("drawn", build, block_specs(), why=why), Domain("plain", build, block_specs(**plain), why="one size")),
        (Output("result", Level.E0, "compares numbers; ties to the smaller block"),),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("drawn", "batch", "strides")),
        Rows((0, 1)),
    )


def _restrict() -> Contract:
    build = index_scores.kept_call
    return Contract(
        "indexer",
        "restrict_to_blocks",
        (
            Domain("drawn", build, block_specs(), why="any scores, blocks in any order, twice or not there"),
            Domain("plain", build, block_specs(block=st.just(8), kept=st.just(3)), why="one size"),
        ),
        (Output("result", Level.E0, "copies scores"),),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("drawn", "batch", "strides")),
        Rows((0, 1)),
    )


def _chosen(build: Callable[[Spec, torch.device], IndexCall]) -> Callable[[Spec, torch.device], IndexCall]:
    """Queries, keys and ends of a call of `index_logits`, for a selection."""

    def made(spec: Spec, device: torch.device) -> IndexCall:
        scored = index_inputs.logit_call({**spec, "starts": ""}, device)
        own = build(spec, device)
        options = {name: spec[name] for name in ("precision", "block", "chunk", "budget_bytes")}
        return IndexCall((*scored.args, scored.kwargs["ends"], *own.args), {**options, **own.kwargs})

    return made


def _entry_options(spec: Spec, device: torch.device) -> IndexCall:
    options: dict[str, Any] = {"order": spec["order"]}
    if spec["kept"]:
        total, source = -(-spec["entries"] // spec["block"]), strategies.generator(spec["seed"] ^ 61)
        blocks = torch.randint(-1, total + 1, (spec["tokens"], spec["kept"]), generator=source)
        options["candidates"] = blocks.to(torch.int32).to(device)
    return IndexCall((spec["k"],), options)


def _block_options(spec: Spec, device: torch.device) -> IndexCall:
    return IndexCall((), {"count": spec["count"]})


def _chosen_specs(kind: str, **fixed: Strategy) -> Strategy:
    parts: dict[str, Strategy] = {
        "heads": st.sampled_from([8, 1]),
        "block": st.sampled_from([8, 1, 3]),
        "chunk": st.sampled_from([1024, 1, 3]),
        "budget_bytes": st.sampled_from([2**28, 1, 2000]),
        "precision": PRECISIONS,
        **fixed,
    }
    return logit_specs(kind, **parts)


def _select(function: str, build: Callable[[Spec, torch.device], IndexCall], permits: Any, **fixed: Strategy) -> Contract:
    made = _chosen(build)
    plain: dict[str, Strategy] = {
        "heads": st.just(8),
        "dim": st.just(128),
        "block": st.just(8),
        "kept": st.just(3),
        "order": st.just("index"),
        "integers": st.just("int32"),
        "chunk": st.sampled_from([1024, 3]),
        "budget_bytes": st.just(2**28),
    }
    near: dict[str, Strategy] = {
        "entries": st.just(200),
        "tokens": st.sampled_from([5, 17]),
        "heads": st.just(8),
        "dim": st.just(128),
        "density": st.just(1.0),
        "ends": st.sampled_from(["full", "drawn"]),
        "kept": st.just(0),
        "k": st.just(8),
        "count": st.just(5),
    }
    foreign = {"k", "kept", "order", "count"} - set(fixed)  # options of the other function
    plain, near = ({name: part for name, part in parts.items() if name not in foreign} for parts in (plain, near))
    finite = {**fixed, "order": st.just("index")} if "order" in fixed else fixed
    return Contract(
        "indexer",
        function,
        (
            Domain("lattice", made, _chosen_specs("lattice", **fixed), why="exact scores, many of them equal"),
            *(
                Domain(name, made, _chosen_specs("lattice", **{**fixed, **near, "precision": st.just(word)}), why="scores that bf16 joins")
                for name, word in (("near_fp32", "fp32"), ("near_bf16", "bf16"))
            ),
            Domain("plain", made, _chosen_specs("lattice", **{**fixed, **plain}), why="one size"),
            Domain("finite", made, _chosen_specs("finite", **finite), why="arbitrary finite numbers"),
        ),
        (
            Output("result", Level.E1, "chosen by exact scores", ("lattice", "near_fp32", "near_bf16", "plain")),
            Output("result", Level.E4, "chosen by scores within their bound", ("finite",), permits=permits),
        ),
        (*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("finite", "run_to_run")),
        Rows((*QUERIES, 2, "candidates")),
    )


def _select_entries() -> Contract:
    fixed: dict[str, Strategy] = {
        "k": st.sampled_from([8, 1, 64, 512]),
        "kept": st.sampled_from([0, 0, 1, 5]),
        "order": ORDERED,
    }
    return _select("select_entries", _entry_options, index_bounds.entries, **fixed)


def _select_candidates() -> Contract:
    return _select("select_candidates", _block_options, index_bounds.blocks, count=st.sampled_from([2, 1, 5, 2048]))


CONTRACTS = (
    index_code_contract.visible_entries(),
    index_code_contract.index_queries(),
    index_code_contract.index_keys(),
    index_code_contract.store_index_keys(),
    index_code_contract.load_index_keys(),
    _logits(),
    _paged(),
    _topk(),
    _blocks(),
    _restrict(),
    _select_entries(),
    _select_candidates(),
)
