"""Rows of scores: domains of the selection in `components/indexer.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.parity import strategies
from dsv4.parity.contracts import Spec
from dsv4.parity.index_inputs import DTYPES, FAR, RANGES, IndexCall, Strategy, integers, moved, ranges
from dsv4.parity.strategies import generator


def _dense(rows: int, n: int, source: torch.Generator) -> Tensor:
    """IX-03: all within 2^-8 of 1, in any order."""
    return torch.linspace(1, 1 + 2.0**-8, max(n, 1))[torch.rand(rows, n, generator=source).argsort(1)]


def _winners(rows: int, n: int, source: torch.Generator) -> Tensor:
    """IX-01: few above many that are equal."""
    return (torch.rand(rows, n, generator=source).argsort(1) < max(n // 80, 1)).float() * (1 + torch.rand(rows, 1, generator=source))


def _infinite(rows: int, n: int, source: torch.Generator) -> Tensor:
    """IX-01: infinities of both signs above and below zeros."""
    return torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])[torch.randint(0, 4, (rows, n), generator=source)]


def _below_fp16(rows: int, n: int, source: torch.Generator) -> Tensor:
    """IX-05: a few zeros, all else between -2e5 and -1e5."""
    low = -1e5 * (1 + torch.rand(rows, n, generator=source))
    return torch.where(torch.rand(rows, n, generator=source) < 0.02, 0.0, low)


def _nan(rows: int, n: int, source: torch.Generator) -> Tensor:
    """IX-06: a third of them NaN, of either sign."""
    bits = torch.where(torch.rand(rows, n, generator=source) < 0.5, 0x7FC00000, -0x400000).to(torch.int32).view(torch.float32)
    return torch.where(torch.rand(rows, n, generator=source) < 0.3, bits, torch.randn(rows, n, generator=source))


SCORES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal": lambda rows, n, source: torch.randn(rows, n, generator=source),
    "few": lambda rows, n, source: torch.randint(-2, 3, (rows, n), generator=source).float(),
    "equal": lambda rows, n, source: torch.randn(rows, 1, generator=source).expand(rows, n),
    "zeros": lambda rows, n, source: torch.where(torch.rand(rows, n, generator=source) < 0.5, 0.0, -0.0),
    "dense": _dense,
    "winners": _winners,
    "infinite": _infinite,
    "below_fp16": _below_fp16,
    "nan": _nan,
    "never": lambda rows, n, source: torch.where(torch.rand(rows, n, generator=source) < 0.5, torch.nan, -torch.inf),
    "bits": lambda rows, n, source: strategies.random_bits((rows, n), int(torch.randint(0, 2**62, (), generator=source)), torch.float32),
}
LONG_SCORES = ("dense", "equal", "winners", "few", "below_fp16")


def scores(spec: Spec, tokens: int, entries: int) -> Tensor:
    """[tokens, entries]; row t of class t mod the number of classes drawn."""
    made = torch.empty(tokens, entries)
    for number, name in enumerate(spec["classes"]):
        mine = made[number :: len(spec["classes"])]
        if len(mine):
            mine.copy_(SCORES[name](len(mine), entries, generator(spec["seed"] ^ (50 + number))))
    return made.to(DTYPES[spec["dtype"]])


def far_scores(near: Tensor, device: torch.device) -> Tensor:
    """Two rows, the second of which crosses element 2^31 of its memory."""
    width = near.shape[1]
    rows = torch.empty(FAR + width, dtype=near.dtype, device=device).as_strided((2, width), (FAR - width // 2, 1))
    return rows.copy_(near)


LENGTHS = {"k-1": (1, -1), "k": (1, 0), "k+1": (1, 1), "2k": (2, 0), "20k": (20, 0), "0": (0, 0)}


def topk_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `select_topk`."""
    factor, more = LENGTHS.get(spec["length"], (0, 0))
    tokens = spec["tokens"]
    entries = factor * spec["k"] + more if spec["length"] in LENGTHS else int(spec["length"])
    logits = scores(spec, tokens, entries)
    logits = far_scores(logits, device) if spec.get("far") else logits.to(device)
    options: dict[str, Any] = {"order": spec["order"]}
    for number, name in enumerate(("ends", "starts")):
        if spec[name]:
            options[name] = ranges(spec[name], tokens, entries, spec["seed"] ^ (60 + number), integers(spec))
    if spec.get("page_size"):
        source, size = generator(spec["seed"] ^ 62), spec["page_size"]
        columns = max(-(-entries // size) - spec["short"], 1)
        table = torch.randint(0, 2 * columns + 9, (3, columns), generator=source)
        odd = torch.tensor([-1, -7, 2**31 - 1])[torch.randint(0, 3, table.shape, generator=source)]
        options["block_table"] = torch.where(torch.rand(table.shape, generator=source) < 0.3, odd, table).to(torch.int32)
        options["requests"] = torch.randint(-1, 4, (tokens,), generator=source).to(torch.int32)
        options["page_size"] = size
    return IndexCall((logits, spec["k"]), {name: moved(value, device) for name, value in options.items()})


def topk_specs(**fixed: Strategy) -> Strategy:
    """Specs for `topk_call`."""
    parts: dict[str, Strategy] = {
        "tokens": st.one_of(st.integers(1, 4), st.just(13)),
        "k": st.sampled_from([1, 2, 8, 64, 512]),
        "length": st.sampled_from(list(LENGTHS)),
        "dtype": st.sampled_from(["fp32", "bf16"]),
        "ends": st.sampled_from(["", *RANGES]),
        "starts": st.sampled_from(["", "nothing", "drawn", "hostile"]),
        "order": st.just("index"),
        "integers": st.sampled_from(["int32", "int64"]),
        "classes": strategies.some_of(tuple(SCORES)),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def block_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `candidate_blocks`."""
    tokens, entries = spec["tokens"], spec["entries"]
    ends = ranges(spec["ends"], tokens, entries, spec["seed"] ^ 60, integers(spec))
    options = {"block": spec["block"], "count": spec["count"]}
    return IndexCall((scores(spec, tokens, entries).to(device), ends.to(device)), options)


def kept_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `restrict_to_blocks`: blocks in any order, some twice, some of them not there."""
    tokens, entries, block = spec["tokens"], spec["entries"], spec["block"]
    total, source = -(-entries // block), generator(spec["seed"] ^ 61)
    blocks = torch.randint(-2, total + 2, (tokens, spec["kept"]), generator=source)
    blocks = torch.where(torch.rand(blocks.shape, generator=source) < 0.05, torch.iinfo(torch.int32).max, blocks).to(integers(spec))
    return IndexCall((scores(spec, tokens, entries).to(device), blocks.to(device)), {"block": block})


def block_specs(**fixed: Strategy) -> Strategy:
    """Specs for `block_call` and `kept_call`."""
    parts: dict[str, Strategy] = {
        "tokens": st.one_of(st.integers(1, 4), st.just(11)),
        "entries": st.one_of(st.integers(1, 20), st.sampled_from([0, 64, 65, 127, 300])),
        "block": st.sampled_from([8, 1, 3]),
        "count": st.sampled_from([1, 2, 4, 2048]),
        "kept": st.sampled_from([0, 1, 3, 9]),
        "dtype": st.sampled_from(["fp32", "bf16"]),
        "ends": st.sampled_from(RANGES),
        "integers": st.sampled_from(["int32", "int64"]),
        "classes": strategies.some_of(tuple(SCORES)),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)
