"""Index queries, keys and pages: domains of `components/indexer.py`, which `index_scores` completes.

Lattices: FP8 codes are integers up to 4, FP4 codes halves up to 2; scales are 2^-2 .. 2^2, weights integers up to 3. A dot product of 128
stays below 2^12 quanta of its group, and a sum over 64 heads below 2^24, so that every order gives the same bits; in bf16 precision what
is rounded on the way is exact before it.

`IndexCall` is a call with queries and keys among its arguments: their tensors have names of their own, such as "queries.codes".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import INDEX_LAYOUTS
from dsv4.parity import cancelling, kv_inputs, lattices, strategies
from dsv4.parity.contracts import Call, Spec
from dsv4.parity.strategies import generator
from dsv4.reference import index_codes
from dsv4.types import IndexKeys, IndexQueries

Strategy = st.SearchStrategy[Any]
FORMATS = ("fp8", "fp4")
FAR = 2**31  # the second page begins below this byte of its memory and ends above it
RANGES = ("causal", "full", "drawn", "nothing", "hostile")
INTEGERS = {"int32": torch.int32, "int64": torch.int64}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS: dict[str, type[IndexQueries | IndexKeys]] = {"queries": IndexQueries, "keys": IndexKeys}


@dataclass
class IndexCall(Call):
    """A call whose queries and keys count as tensors. What is absent reads as rows of nothing, and stays absent."""

    def _tuple(self, argument: int | str) -> tuple[int, str] | None:
        group, dot, field = str(argument).partition(".")
        if not dot:
            return None
        return next(place for place, value in enumerate(self.args) if isinstance(value, PARTS[group])), field

    def __getitem__(self, argument: int | str) -> Any:
        found = self._tuple(argument)
        if found is not None:
            value = getattr(self.args[found[0]], found[1])
        else:
            value = self.args[argument] if isinstance(argument, int) else self.kwargs.get(argument)
        return self._nothing() if value is None else value

    def replace(self, argument: int | str, value: Any) -> IndexCall:
        """The same call with one argument, or a tensor of queries or keys, changed."""
        found = self._tuple(argument)
        if found is None:
            if isinstance(argument, str) and self.kwargs.get(argument) is None:
                return self
            plain = super().replace(argument, value)
            return IndexCall(plain.args, plain.kwargs)
        place, field = found
        whole = self.args[place]
        if getattr(whole, field) is None:
            return self
        return IndexCall((*self.args[:place], whole._replace(**{field: value}), *self.args[place + 1 :]), self.kwargs)

    def tensors(self) -> dict[int | str, Tensor]:
        """Every argument that is a tensor, and those of queries and keys."""
        named = super().tensors()
        for group, kind in PARTS.items():
            for whole in self.args:
                if isinstance(whole, kind):
                    parts = {f"{group}.{field}": getattr(whole, field) for field in kind._fields}
                    named |= {name: value for name, value in parts.items() if value is not None}
        return named

    def _nothing(self) -> Tensor:
        first = self.args[0]
        rows = first if isinstance(first, Tensor) else first.codes
        return torch.empty(rows.shape[0], 0, dtype=torch.uint8, device=rows.device)


def integers(spec: Spec) -> torch.dtype:
    """Of positions, ends and slots."""
    return INTEGERS[spec.get("integers", "int32")]


def ranges(kind: str, tokens: int, entries: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[tokens] of `dtype`: where the entries that a token sees begin or end."""
    source, limits = generator(seed), torch.iinfo(dtype)
    match kind:
        case "causal":
            found = (torch.arange(1, tokens + 1) * (entries + 1)).div(tokens + 1, rounding_mode="floor")
        case "full":
            found = torch.full((tokens,), entries)
        case "drawn":
            found = torch.randint(0, entries + 1, (tokens,), generator=source)
        case "nothing":
            found = torch.zeros(tokens, dtype=torch.int64)
        case _:
            odd = torch.tensor([-1, -3, entries + 1, 2 * entries + 9, limits.min, limits.max, entries, entries // 2])
            found = odd[torch.randint(0, len(odd), (tokens,), generator=source)]
    return found.to(dtype)


def code_queries(spec: Spec, tokens: int) -> IndexQueries:
    """Queries of the kind drawn: lattice, finite, cancelling or special."""
    seed, heads, dim = spec["seed"], spec["heads"], spec["dim"]
    codes, scales = _codes(spec, (tokens, heads), dim, seed)
    source = generator(seed ^ 11)
    if spec["kind"] == "lattice":
        weights = lattices.integers((tokens, heads), seed ^ 12, 3) * 2.0 ** spec.get("power", 0)
    elif spec["kind"] == "cancelling":  # heads that are equal in pairs, and weights that take one from the other
        pairs = cancelling.opposed(torch.arange(heads), 1)
        codes, scales = codes[:, pairs], None if scales is None else scales[:, pairs]
        weights = cancelling.opposed(cancelling.spread((tokens, heads), seed ^ 12), -1)
    else:
        weights = torch.randn(tokens, heads, generator=source) * torch.exp2(torch.randint(-6, 2, (tokens, heads), generator=source))
    if spec["kind"] == "special":
        weights = _sprinkled(weights, source)
    return IndexQueries(codes, scales, weights.to(DTYPES[spec["weights"]]))


def code_keys(spec: Spec, entries: int) -> IndexKeys:
    """Keys of the kind drawn."""
    codes, scales = _codes(spec, (entries,), spec["dim"], spec["seed"] ^ 20)
    source = generator(spec["seed"] ^ 21)
    if scales is not None:
        return IndexKeys(codes, scales)
    if spec["kind"] == "lattice":
        return IndexKeys(codes, lattices.powers((entries,), spec["seed"] ^ 22, -2, 2))
    factors = torch.rand(entries, generator=source) * torch.exp2(torch.randint(-8, 3, (entries,), generator=source))
    return IndexKeys(codes, _sprinkled(factors, source) if spec["kind"] == "special" else factors)


def _codes(spec: Spec, rows: tuple[int, ...], dim: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Codes, and words of scales with FP4."""
    source, kind = generator(seed), spec["kind"]
    positive = torch.rand(*rows, 1, generator=source) < 0.5  # half the rows of a lattice, so that dot products are large as well
    if spec["format"] == "fp8":
        if kind == "lattice":
            numbers = lattices.integers((*rows, dim), seed, 4, density=spec["density"])
            return torch.where(positive, numbers.abs(), numbers).to(torch.float8_e4m3fn), None
        bits = torch.randint(0, 256, (*rows, dim), generator=source, dtype=torch.uint8)
        numbers = torch.randn(*rows, dim, generator=source).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        some = torch.rand(*rows, 1, generator=source) < 0.25  # a quarter of the rows: any codes
        codes = torch.where(some, torch.where((bits & 0x7F) == 0x7F, bits & 0xF0, bits), numbers)
        if kind == "special":
            codes = torch.where(torch.rand(*rows, dim, generator=source) < 0.3 / dim, 0x7F | (bits & 0x80), codes)
        return codes.view(torch.float8_e4m3fn), None
    groups = dim // INDEX_LAYOUTS["fp4"].group
    if kind == "lattice":
        nibbles = torch.randint(0, 5, (*rows, dim), generator=source) * (torch.rand(*rows, dim, generator=source) < spec["density"])
        nibbles = nibbles + 8 * torch.randint(0, 2, (*rows, dim), generator=source) * ~positive
        scales = torch.randint(126, 129, (*rows, groups), generator=source)
    else:
        nibbles = torch.randint(0, 16, (*rows, dim), generator=source)
        scales = torch.randint(118, 131, (*rows, groups), generator=source)
    if kind == "special":
        scales = torch.where(torch.rand(*rows, groups, generator=source) < 0.1, 255, scales)
    low, high = nibbles.unflatten(-1, (-1, 2)).unbind(-1)
    words = torch.zeros(*rows, 4, dtype=torch.uint8)
    words[..., :groups] = scales.to(torch.uint8)
    return (low + 16 * high).to(torch.uint8), words.view(torch.int32)[..., 0]


def _sprinkled(numbers: Tensor, source: torch.Generator) -> Tensor:
    """Some of them zero, infinite or NaN."""
    odd = torch.tensor([0.0, torch.inf, torch.nan])[torch.randint(0, 3, numbers.shape, generator=source)]
    return torch.where(torch.rand(numbers.shape, generator=source) < 0.1, odd, numbers)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of them, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, IndexQueries | IndexKeys):
        return value._replace(**{name: part.to(device) for name, part in value._asdict().items() if part is not None})
    return value


def logit_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `index_logits`."""
    tokens, entries, dtype = spec["tokens"], spec["entries"], integers(spec)
    kwargs: dict[str, Any] = {
        "ends": ranges(spec["ends"], tokens, entries, spec["seed"] ^ 30, dtype),
        "precision": spec["precision"],
    }
    if spec["starts"]:
        kwargs["starts"] = ranges(spec["starts"], tokens, entries, spec["seed"] ^ 31, dtype)
    made = (code_queries(spec, tokens), code_keys(spec, entries))
    return IndexCall(moved_all(made, device), {name: moved(value, device) for name, value in kwargs.items()})


def moved_all(values: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """`moved`, each."""
    return tuple(moved(value, device) for value in values)


def code_sizes(kind: str, formats: tuple[str, ...] = FORMATS) -> dict[str, Strategy]:
    """Sizes and kinds of queries and keys."""
    return {
        "format": st.sampled_from(list(formats)),
        "tokens": st.one_of(st.integers(1, 5), st.just(17)),
        "entries": st.one_of(st.integers(1, 9), st.sampled_from([0, 63, 64, 65, 200])),
        "heads": st.sampled_from([8, 1, 2, 32, 64]),
        "dim": st.sampled_from([128, 64, 32]),
        "kind": st.just(kind),
        "density": st.sampled_from([0.3, 1.0, 0.05]),
        "weights": st.sampled_from(["fp32", "bf16"]),
        "integers": st.sampled_from(["int32", "int64"]),
        "power": st.integers(-9, 3),
    }


def logit_specs(kind: str, **fixed: Strategy) -> Strategy:
    """Specs for `logit_call`."""
    parts: dict[str, Strategy] = {
        **code_sizes(kind),
        "ends": st.sampled_from(RANGES),
        "starts": st.sampled_from(["", "drawn", "hostile", "nothing"]),
        "precision": st.just("fp32"),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def pool(pages: int, width: int, gap: int, seed: int, device: torch.device) -> Tensor:
    """Pages of random bytes, uint8 [pages, width], with a gap behind each and before the first."""
    memory = strategies.random_bits((gap + pages * (width + gap),), seed, torch.uint8).to(device)
    return memory.as_strided((pages, width), (width + gap, 1), gap)


def far_pool(near: Tensor) -> Tensor:
    """Two pages, the second of which crosses byte 2^31 of their memory."""
    width = near.shape[1]
    pages = torch.empty(FAR + width, dtype=torch.uint8, device=near.device).as_strided((2, width), (FAR - width // 2, 1))
    return pages.copy_(near)


def _blank(spec: Spec, device: torch.device) -> Tensor:
    width = spec["page_size"] * INDEX_LAYOUTS[spec["format"]].token_bytes(spec["dim"]) + spec["spare"]
    pages = pool(spec["pages"], width, spec["gap"], spec["seed"] ^ 41, device)
    return far_pool(pages) if spec.get("far") else pages


def _any_keys(spec: Spec, entries: int) -> IndexKeys:
    """Any bits."""
    layout, dim, seed = INDEX_LAYOUTS[spec["format"]], spec["dim"], spec["seed"]
    codes = strategies.random_bits((entries, layout.data_bytes(dim)), seed, torch.uint8)
    scales = strategies.random_bits((entries,), seed ^ 1, torch.float32 if layout.scale == "fp32" else torch.int32)
    return IndexKeys(codes.view(torch.float8_e4m3fn) if layout.scale == "fp32" else codes, scales)


def store_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `store_index_keys`."""
    pages = _blank(spec, device)
    slots = kv_inputs.slot_numbers(spec, (spec["rows"],), pages.shape[0] * spec["page_size"])
    keys = moved(_any_keys(spec, spec["rows"]), device)
    return IndexCall((keys, pages, slots.to(device)), {"format": spec["format"], "page_size": spec["page_size"]})


def load_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `load_index_keys`."""
    pages = _blank(spec, device)
    slots = kv_inputs.slot_numbers(spec, (spec["rows"],), pages.shape[0] * spec["page_size"])
    return IndexCall((pages, slots.to(device)), {"format": spec["format"], "page_size": spec["page_size"], "dim": spec["dim"]})


def page_specs(**fixed: Strategy) -> Strategy:
    """Specs for `store_call` and `load_call`."""
    parts: dict[str, Strategy] = {
        "format": st.sampled_from(FORMATS),
        "dim": st.sampled_from([128, 32, 64]),
        "rows": st.one_of(st.integers(1, 9), st.sampled_from([40, 0])),
        "pages": st.integers(1, 5),
        "page_size": st.sampled_from([1, 2, 4, 64]),
        "spare": st.sampled_from([0, 16]),
        "gap": st.sampled_from([0, 1, 16, 132]),
        "slots": strategies.some_of(kv_inputs.SLOT_KINDS),
        "integers": st.sampled_from(["int64", "int32"]),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def paged_call(spec: Spec, device: torch.device) -> IndexCall:
    """Arguments of `paged_index_logits`: every slot of every page holds a key of the kind drawn."""
    size, count = spec["page_size"], spec["pages"]
    tokens, source = spec["tokens"], generator(spec["seed"] ^ 40)
    pages, keys = _blank(spec, device), code_keys(spec, count * size)
    every = torch.arange(count * size)
    pages.copy_(index_codes.store_index_keys(keys, pages.cpu(), every, format=spec["format"], page_size=size))
    columns, requests = spec["columns"], spec["requests"]
    table = torch.stack([torch.randperm(max(count, columns), generator=source)[:columns] for _ in range(requests)])
    odd = torch.tensor([-1, count, -(2**31), 2**31 - 1])[torch.randint(0, 4, table.shape, generator=source)]
    table = torch.where(torch.rand(table.shape, generator=source) < spec["missing"], odd, table).to(torch.int32)
    mine = torch.randint(0, requests, (tokens,), generator=source)
    mine = torch.where(torch.rand(tokens, generator=source) < spec["missing"], mine * 3 - 1, mine).to(torch.int32)
    width = columns * size + spec["past"]
    ends = ranges(spec["ends"], tokens, width, spec["seed"] ^ 30, integers(spec))
    args = (moved(code_queries(spec, tokens), device), pages, table.to(device), mine.to(device), ends.to(device))
    options = {"format": spec["format"], "page_size": size, "width": width, "precision": spec["precision"]}
    return IndexCall(args, options)


def paged_specs(kind: str, **fixed: Strategy) -> Strategy:
    """Specs for `paged_call`."""
    sizes = {name: part for name, part in code_sizes(kind).items() if name != "entries"}
    parts: dict[str, Strategy] = {
        **sizes,
        "heads": st.sampled_from([8, 1]),
        "page_size": st.sampled_from([1, 2, 4, 64]),
        "pages": st.integers(1, 5),
        "requests": st.integers(1, 4),
        "columns": st.integers(1, 5),
        "past": st.sampled_from([0, 3, 70]),
        "missing": st.sampled_from([0.0, 0.25]),
        "spare": st.sampled_from([0, 16]),
        "gap": st.sampled_from([0, 4, 64]),
        "ends": st.sampled_from(RANGES),
        "precision": st.just("fp32"),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)
