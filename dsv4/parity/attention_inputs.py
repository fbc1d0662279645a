"""Queries, rows and lists of picks: the domains of `components/attention.py`.

Three kinds of rows and queries:

    mean    all scores of a token and head are equal, and the rows come in pairs mean +- d, so 2^k picks give the mean, which bf16 holds
            exactly; an error of 10^-4 in any weight, as from the merging of parts, is rounded away. With a sink that weighs as much as
            all picks, of which every token then has as many, it is half of that
    ahead   one row of each token and head is ahead of all others by more than 104: the output is that row
    drawn   arbitrary numbers, flat to sharp

Rows are small multiples of 1/2 with a 6 (ahead: a 12) in every group, so that every layout of the cache holds them exactly. Whatever is
not picked is NaN: rows beside the live ones, every other byte of the pages. Lists hold absent picks of all kinds between the live ones,
repeated picks, and, past a token's length, numbers of live rows, of NaN rows and of none. Some tokens pick nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E4M3, KV_LAYOUTS
from dsv4.parity import cancelling, strategies
from dsv4.parity.contracts import Call, Spec
from dsv4.parity.strategies import generator
from dsv4.reference import kv_cache
from dsv4.types import PagedRows

FAR = 2**31  # a page begins below this byte of its memory and ends above it
GROUP = 16  # the smallest group of a quantiser
PAIRS = ((1.0, 0.5), (1.0, 1.0), (2.0, 1.0), (2.0, 2.0), (2.0, 0.0), (3.0, 1.0), (3.0, 3.0), (3.0, 0.0))  # mean and d: E2M1 holds both
AHEAD = 12.0
LARGE = (1e30, 3e38, float("inf"))  # sinks beyond every score
BOUNDED = ("normal", "equal", "positive", "integers", "zeros")
Strategy = st.SearchStrategy[Any]


@dataclass
class PagedCall(Call):
    """A call whose arguments `main` and `extra` are PagedRows: their pages are tensors of the call, too."""

    main: int = 1

    def _holder(self, argument: int | str) -> int | str | None:
        if argument == "main.pages":
            return self.main
        return "extra" if argument == "extra.pages" else None

    def __getitem__(self, argument: int | str) -> Any:
        holder = self._holder(argument)
        return super().__getitem__(argument) if holder is None else super().__getitem__(holder).pages

    def replace(self, argument: int | str, value: Any) -> PagedCall:
        """The same call with one argument, or the pages of one, changed."""
        holder = self._holder(argument)
        if holder is not None:
            argument, value = holder, super().__getitem__(holder)._replace(pages=value)
        changed = super().replace(argument, value)
        return PagedCall(changed.args, changed.kwargs, self.main)

    def tensors(self) -> dict[int | str, Tensor]:
        """Every argument that is a tensor, and the pages."""
        found = super().tensors()
        found["main.pages"] = self["main.pages"]
        if "extra" in self.kwargs:
            found["extra.pages"] = self["extra.pages"]
        return found


class Lists(NamedTuple):
    """What a case is made of, on the CPU: queries, and for each list its live rows and every token's picks among them."""

    q: Tensor  # bf16 [tokens, heads, dim]
    sink: Tensor | None  # fp32 [heads]
    rows: list[Tensor]  # bf16 [live, dim] each
    picks: list[list[Tensor]]  # int64, by list and token


def sizes(forms: Sequence[Spec], kinds: Sequence[str], **fixed: Strategy) -> Strategy:
    """Specs of all three builders."""
    parts: dict[str, Strategy] = {
        "form": st.sampled_from(list(forms)),
        "kind": st.sampled_from(list(kinds)),
        "tokens": st.one_of(st.integers(1, 7), st.sampled_from([33])),
        "heads": st.sampled_from([1, 3, 8, 16]),
        "picks": st.sampled_from([4, 16, 40, 128, 130]),
        "extra_picks": st.sampled_from([1, 9, 64]),
        "power": st.sampled_from([0, -3, 3]),
        "sink": st.sampled_from(["drawn", "none", "equal", "large"]),
        "sharp": st.sampled_from([1.0, 0.0, 6.0, 1000.0]),
        "classes": strategies.some_of(BOUNDED),
        "page_sizes": st.sampled_from([[16, 64], [64, 2], [1, 3]]),
        "gap": st.sampled_from([0, 16, 584, 1]),
        "integers": st.sampled_from(["int64", "int32"]),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def sparse_call(spec: Spec, device: torch.device) -> Call:
    """`sparse_attention`: live rows at random places of a tensor whose other rows are NaN."""
    return _sparse(lists({**spec, **spec["form"]}), spec, device)


def _sparse(made: Lists, spec: Spec, device: torch.device) -> Call:
    spec, source, found = {**spec, **spec["form"]}, generator(spec["seed"] ^ 21), []
    for rows, picks, columns in zip(made.rows, made.picks, _columns(spec), strict=True):
        places = torch.randperm(2 * len(rows) + 2, generator=source)
        kv = torch.full((len(places), rows.shape[1]), torch.nan, dtype=torch.bfloat16)
        kv[places[: len(rows)]] = rows
        indices, lengths = listed([places[some] for some in picks], columns, len(places), spec, source)
        found.append((kv, indices.to(torch.int32), lengths))
    kwargs = _optional(spec, found, ("extra_kv", "extra_indices", "extra_lengths"))
    args = (made.q, found[0][0], found[0][1], made.sink)
    return Call(tuple(_to(value, device) for value in args), {name: _to(value, device) for name, value in kwargs.items()})


def overflow_call(spec: Spec, device: torch.device) -> Call:
    """`sparse_attention` where the scores of every second token, and of no other, leave fp32."""
    spec = {**spec, "power": 0}
    made = lists({**spec, **spec["form"]})
    hot = torch.tensor([8.2e17, 1e19])[torch.arange(spec["heads"]) % 2]
    q, rows = made.q.clone(), [torch.cat([made.rows[0], torch.full_like(made.rows[0][:1], 8.2e17)]), *made.rows[1:]]
    picks = [list(of) for of in made.picks]
    for token in range(0, spec["tokens"], 2):
        q[token] = hot[:, None].to(q.dtype)
        picks[0][token] = torch.cat([picks[0][token][: spec["picks"] - 1], torch.tensor([len(rows[0]) - 1])])
    return _sparse(Lists(q, made.sink, rows, picks), spec, device)


def cancelling_call(spec: Spec, device: torch.device) -> Call:
    """`sparse_attention` whose sums cancel: by turns a token's one score, which is its lse, and the values of all picks, weighted alike."""
    tokens, seed = spec["tokens"], spec["seed"]
    q, kv = (part.bfloat16() for part in cancelling.pair((tokens, spec["heads"], 512), (20, 512), seed))
    q[1::2] = 0.0
    half = cancelling.spread((20, 512), seed ^ 2).bfloat16()
    source, turn = generator(seed ^ 3), torch.arange(tokens) % 2
    extra = torch.stack([torch.randperm(40, generator=source) for _ in range(tokens)]).to(torch.int32)
    args = (q, kv, torch.randint(0, 20, (tokens, 1), generator=source).to(torch.int32), None)
    lengths = {"lengths": (1 - turn).to(torch.int32), "extra_lengths": (40 * turn).to(torch.int32)}
    kwargs = {"extra_kv": torch.cat([half, -half]), "extra_indices": extra, **lengths}
    return Call(tuple(_to(value, device) for value in args), {name: value.to(device) for name, value in kwargs.items()})


def paged_call(spec: Spec, device: torch.device) -> PagedCall:
    """`paged_attention`, `decode_attention` and `prefill_attention`: live rows at random slots of pages whose other bytes are 0xFF."""
    spec = {**spec, **spec["form"]}
    made = lists(spec)
    found = _paged(made, spec, device)
    kwargs = _optional(spec, found, ("extra", "extra_slots", "extra_lengths"))
    args = (made.q, found[0][0], found[0][1], made.sink)
    return PagedCall(tuple(_to(value, device) for value in args), {name: _to(value, device) for name, value in kwargs.items()})


def draft_call(spec: Spec, device: torch.device) -> PagedCall:
    """`draft_attention`: the second list is the block's own rows, all of them."""
    spec = {**spec, **spec["form"]}
    spec["tokens"] = spec["tokens"] % 4 * spec["block"]
    made = lists(spec)
    found = _paged(made, {**spec, "extra": None}, device)
    kwargs = {"block": spec["block"], **_optional({**spec, "extra": None}, found, ())}
    args = (made.q, made.rows[1], found[0][0], found[0][1], made.sink)
    return PagedCall(tuple(_to(value, device) for value in args), {name: _to(value, device) for name, value in kwargs.items()}, main=2)


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _optional(spec: Spec, found: list[tuple[Any, Tensor, Tensor]], names: Sequence[str]) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"lengths": found[0][2]} if spec["lengths"] else {}
    if len(found) > 1:
        kwargs |= dict(zip(names, found[1] if spec["lengths"] else found[1][:2], strict=False))
    if "scale" in spec:
        kwargs["scale"] = spec["scale"]
    return kwargs


def _columns(spec: Spec) -> list[int]:
    """How wide each list is."""
    return [spec["picks"], spec["extra_picks"]] if spec["extra"] else [spec["picks"]]


def _paged(made: Lists, spec: Spec, device: torch.device) -> list[tuple[PagedRows, Tensor, Tensor]]:
    """Pages, slots and lengths of each list."""
    source, found = generator(spec["seed"] ^ 22), []
    names, dtypes = [spec["layout"], spec["extra"]], [getattr(torch, spec["integers"]), (torch.int32, torch.int64)[spec["seed"] % 2]]
    for number, (rows, picks, columns) in enumerate(zip(made.rows, made.picks, _columns(spec), strict=False)):
        paged, slots = _pages(rows, names[number], spec["page_sizes"][number], spec, source, device)
        capacity = len(paged.pages) * paged.page_size
        numbers, lengths = listed([slots[some] for some in picks], columns, capacity, spec, source)
        found.append((paged, numbers.to(dtypes[number]), lengths))
    return found


def _pages(rows: Tensor, name: str, size: int, spec: Spec, source: torch.Generator, device: torch.device) -> tuple[PagedRows, Tensor]:
    """Pages with these rows at random slots; and the slots."""
    layout = KV_LAYOUTS[name]
    count = 2 if spec.get("far") else -(-2 * len(rows) // size) + 1
    size = max(size, len(rows)) if spec.get("far") else size
    slots = torch.randperm(count * size, generator=source)[: len(rows)]
    width = layout.page_bytes(size)
    packed = kv_cache.store_kv(rows, torch.full((count, width), 255, dtype=torch.uint8), slots, layout=name, page_size=size)
    stride = FAR - width // 2 if spec.get("far") else width + spec["gap"]
    memory = torch.empty(stride * (count - 1) + width, dtype=torch.uint8, device=device)
    if not spec.get("far"):
        memory.fill_(255)
    return PagedRows(memory.as_strided((count, width), (stride, 1)).copy_(packed), name, size), slots


def listed(picks: list[Tensor], columns: int, limit: int, spec: Spec, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Lists of `columns` picks, int64 [tokens, columns], and lengths int32 [tokens]: absent picks between those given and after them;
    with lengths, anything after the length, which may be below 0 or above the number of columns.
    """
    absent = torch.tensor([-1, -1, -2, limit, limit + 7, 2**30, -(2**31), 2**31 - 1])
    found = absent[torch.randint(0, len(absent), (len(picks), columns), generator=source)]
    lengths = torch.full((len(picks),), columns, dtype=torch.int32)
    for token, some in enumerate(picks):
        length = int(torch.randint(len(some), columns + 1, (), generator=source)) if spec["lengths"] else columns
        found[token, torch.randperm(length, generator=source)[: len(some)]] = some
        if length < columns:
            found[token, length:] = torch.randint(-1, limit + 1, (columns - length,), generator=source)
        beyond = {0: -5, columns: columns + 3}.get(length, length)
        lengths[token] = beyond if spec["lengths"] else columns
    return found, lengths


def lists(spec: Spec) -> Lists:
    """The live part of a case."""
    return {"mean": _mean, "ahead": _ahead, "drawn": _drawn}[spec["kind"]](spec)


def _dim(spec: Spec) -> int:
    return KV_LAYOUTS[spec["layout"]].dims if "layout" in spec else int(spec["dim"])


def _below(limits: int | Tensor, count: int, source: torch.Generator) -> Tensor:
    """`count` integers from 0 to below a limit, each with its own."""
    return (torch.rand(count, generator=source, dtype=torch.float64) * limits).long()


def _widths(spec: Spec) -> list[int]:
    """How many picks a token may have of each list; of the block's own rows exactly as many as there are."""
    return [spec["picks"], spec["block"]] if "block" in spec else _columns(spec)


def _sink(spec: Spec, source: torch.Generator, equal: Tensor | None) -> Tensor | None:
    """By the spec; `equal` [heads] is what the scores are."""
    if not spec["with_sink"]:
        return None
    heads, kind = spec["heads"], spec["sink"]
    if kind == "large":
        return torch.tensor(LARGE)[torch.arange(heads) % len(LARGE)]
    if kind == "equal" and equal is not None:
        return equal
    if kind in ("drawn", "equal") and equal is None:
        return 3 * torch.randn(heads, generator=source)
    return torch.full((heads,), -torch.inf)


def _mean(spec: Spec) -> Lists:
    """Pairs mean + d, mean - d of rows, 2^k picks; one picks a single row. Every dim keeps its sign, so no sum of rows cancels."""
    source, dim, widths = generator(spec["seed"]), _dim(spec), _widths(spec)
    table = torch.tensor(PAIRS)
    half = [max(width // 2, 1) if "block" not in spec or number == 0 else spec["tokens"] for number, width in enumerate(widths)]
    chosen = table[torch.randint(0, len(table), (dim,), generator=source)]
    chosen[::GROUP] = torch.tensor([6.0, 0.0])
    sign = 1 - 2 * torch.randint(0, 2, (dim,), generator=source) if spec["sink"] != "large" else torch.ones(dim)
    rows = []
    for count in half:
        d = chosen[:, 1] * torch.randint(-1, 2, (count, dim), generator=source)
        both = torch.stack([chosen[:, 0] + d, chosen[:, 0] - d], 1).flatten(0, 1)  # [2 count, dim]
        rows.append((both * sign * 2.0 ** spec["power"]).to(torch.bfloat16))
    equal = bool(spec["with_sink"] and spec["sink"] == "equal" and "block" not in spec)
    q = torch.zeros(spec["tokens"], spec["heads"], dim)
    level = torch.randint(-2, 3, (spec["heads"],), generator=source) * min(spec["sharp"], 6.0 if equal else torch.inf)
    q[:, :, 0] = level
    scores = level * 6.0 * float(sign[0]) * 2.0 ** spec["power"] * torch.tensor(spec.get("scale", dim**-0.5))
    if "block" in spec:
        rows[1] = rows[1][: spec["tokens"]]
        picks = [_beside_block(half[0], widths, token, source) for token in range(spec["tokens"])]
    else:
        power = int(torch.randint(0, widths[0].bit_length(), (), generator=source)) if equal else None
        picks = [_pairs(half, widths, power, source) for _ in range(spec["tokens"])]
        scores = scores + math.log(2) * (power or 0)
    sink = _sink(spec, source, scores if equal else torch.full_like(scores, -torch.inf))
    return Lists(q.to(torch.bfloat16), sink, rows, [[of[n] for of in picks] for n in range(len(widths))])


def _pairs(half: list[int], widths: list[int], power: int | None, source: torch.Generator) -> list[Tensor]:
    """Picks of one token in each list: together 2^k in whole pairs, or one, or none; k is `power` if it is given."""
    count = 1 << (int(torch.randint(0, sum(widths).bit_length(), (), generator=source)) if power is None else power)
    if count < 2 or torch.rand((), generator=source) < 0.15:
        return [_below(2 * half[0], count % 2, source), *(torch.empty(0, dtype=torch.int64) for _ in widths[1:])]
    pairs = [width // 2 for width in widths]
    extra = int(_below(min(pairs[1], count // 2) + 1, 1, source)) if len(widths) > 1 else 0
    first = min(count // 2 - extra, pairs[0])
    while (first + extra) & (first + extra - 1):  # no power of two: one list had no room
        first, extra = (first - 1, extra) if first else (first, extra - 1)
    return [_both(size, many, source) for size, many in zip(half, (first, extra), strict=False)]


def _beside_block(half: int, widths: list[int], token: int, source: torch.Generator) -> list[Tensor]:
    """Picks of one token that are 2^k together with the rows of its block."""
    counts = [(1 << k) - widths[1] for k in range(9) if 0 <= (1 << k) - widths[1] <= widths[0]]
    first = token // widths[1] * widths[1]
    many = counts[int(_below(len(counts), 1, source))] if counts else 0
    return [_both(half, many // 2, source), torch.arange(first, first + widths[1])]


def _both(half: int, many: int, source: torch.Generator) -> Tensor:
    """Both rows of as many pairs."""
    one = _below(half, many, source)
    return torch.stack([2 * one, 2 * one + 1], 1).flatten()


def _ahead(spec: Spec) -> Lists:
    """Row r owns a dim of its own, in which it is 12 and all others are at most 6; each query looks at the dim of one picked row."""
    source, dim, widths = generator(spec["seed"]), _dim(spec), _widths(spec)
    live = [min(width, dim // 2, 20) for width in widths]
    if "block" in spec:
        live[1] = spec["tokens"]
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 6.0])  # no 0, which a vanishing weight of another row could give a sign
    rows, owners = [], torch.randperm(dim, generator=source)
    owned = [owners[: live[0]], owners[live[0] : sum(live)]]
    for number, count in enumerate(live):
        values = table[torch.randint(0, len(table), (count, dim), generator=source)]
        values *= 1 - 2 * torch.randint(0, 2, values.shape, generator=source) if spec["sink"] != "large" else 1
        values[:, ::GROUP] = 6.0
        values[torch.arange(count), owned[number]] = AHEAD
        rows.append((values * 2.0 ** spec["power"]).to(torch.bfloat16))
    q = torch.zeros(spec["tokens"], spec["heads"], dim)
    picks: list[list[Tensor]] = [[] for _ in widths]
    for token in range(spec["tokens"]):
        ids = _some(live, widths, spec, token, source)
        for number, some in enumerate(ids):
            picks[number].append(some)
        dims = torch.cat([owned[number][some] for number, some in enumerate(ids)])
        if len(dims):
            q[token, torch.arange(spec["heads"]), dims[_below(len(dims), spec["heads"], source)]] = 2.0 ** (10 - spec["power"])
    return Lists(q.to(torch.bfloat16), _sink(spec, source, None) if spec["sink"] == "large" else _low_sink(spec), rows, picks)


def _low_sink(spec: Spec) -> Tensor | None:
    """Far below the score that is ahead, which is above 250."""
    return torch.tensor([0.0, -torch.inf, 100.0, -3.0])[torch.arange(spec["heads"]) % 4] if spec["with_sink"] else None


def _some(live: list[int], widths: list[int], spec: Spec, token: int, source: torch.Generator) -> list[Tensor]:
    """Picks of one token: of each list different rows, sometimes none at all; of a block's own rows all."""
    found = []
    empty = bool(torch.rand((), generator=source) < 0.15)
    for number, (count, width) in enumerate(zip(live, widths, strict=True)):
        if "block" in spec and number == 1:
            first = token // spec["block"] * spec["block"]
            found.append(torch.arange(first, first + spec["block"]))
            continue
        many = 0 if empty else int(torch.randint(0, min(count, width) + 1, (), generator=source))
        found.append(torch.randperm(count, generator=source)[:many])
    return found


def _drawn(spec: Spec) -> Lists:
    """Arbitrary rows and queries; some picks repeated; the block's own rows all picked."""
    source, dim, widths = generator(spec["seed"]), _dim(spec), _widths(spec)
    live = [min(width, 48) for width in widths]
    if "block" in spec:
        live[1] = spec["tokens"]
    rows = []
    for number, count in enumerate(live):
        seed = spec["seed"] ^ (31 + number)
        rows.append(strategies.values(spec["classes"], (count, dim), GROUP, seed, torch.bfloat16, E4M3))
    picks: list[list[Tensor]] = [[] for _ in widths]
    for token in range(spec["tokens"]):
        ids = _some(live, widths, spec, token, source)
        for number, some in enumerate(ids):
            if number == 0 and 0 < len(some) < widths[0]:
                some = torch.cat([some, some[: int(_below(min(widths[0] - len(some), len(some)) + 1, 1, source))]])
            picks[number].append(some)
    q = torch.randn(spec["tokens"], spec["heads"], dim, generator=source) * min(spec["sharp"], 6.0)
    return Lists(q.to(torch.bfloat16), _sink(spec, source, None), rows, picks)
