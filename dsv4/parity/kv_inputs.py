"""Pages, slots and rows of the KV cache: the domains of `components/kv_cache.py`.

Pages hold random bytes before a call, so that whatever a call should not touch shows. Only V4's eighth scale byte of each slot is zero:
kernels may leave it or clear it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E2M1, E4M3, KV_LAYOUTS, KVLayout
from dsv4.kv_layouts import code_bytes
from dsv4.parity import strategies
from dsv4.parity.contracts import Call, Domain, Spec
from dsv4.parity.strategies import generator
from dsv4.reference import kv_cache

SLOT_KINDS = ("fresh", "absent", "repeated")
FLOORS = ("official", "flashmla", "none", "sglang", "sglang_packer", "flashinfer")
FAR = 2**31  # a page begins below this byte of its memory and ends above it
INTEGERS = {"int32": torch.int32, "int64": torch.int64}
Build = Callable[[Spec, torch.device], Call]


def options(spec: Spec) -> dict[str, Any]:
    """layout, page_size, and a floor where the layout has several."""
    floor = {"amax_floor": spec["floor"]} if "floor" in spec and KV_LAYOUTS[spec["layout"]].scale == "ue8m0" else {}
    return {"layout": spec["layout"], "page_size": spec["page_size"], **floor}


def kv_rows(spec: Spec, layout: KVLayout, rows: int) -> Tensor:
    """bf16 [rows, dims] whose groups hold the classes drawn."""
    target = E2M1 if layout.numbers == "e2m1" else E4M3
    return strategies.values(spec["classes"], (rows, layout.dims), layout.group, spec["seed"] ^ 2, torch.bfloat16, target)


def pool(spec: Spec, device: torch.device) -> Tensor:
    """Pages of random bytes; with a gap behind each page and before the first."""
    layout, size, gap, count = KV_LAYOUTS[spec["layout"]], spec["page_size"], spec.get("gap", 0), spec["pages"]
    width = layout.page_bytes(size)
    memory = strategies.random_bits((gap + count * (width + gap),), spec["seed"] ^ 3, torch.uint8)
    pages = memory.as_strided((count, width), (width + gap, 1), gap)
    if layout.groups < layout.scale_bytes:
        begin = layout.scale_offset(0, size) + layout.groups
        pages[:, begin : begin + size * layout.scale_bytes : layout.scale_bytes] = 0
    return memory.to(device).as_strided(pages.shape, pages.stride(), gap)


def far_pool(spec: Spec, device: torch.device) -> Tensor:
    """Two pages of random bytes, the second of which crosses byte 2^31 of their memory. Nothing else of it is ever touched."""
    width = KV_LAYOUTS[spec["layout"]].page_bytes(spec["page_size"])
    near = pool({**spec, "pages": 2, "gap": 0}, device)
    pages = torch.empty(FAR + width, dtype=torch.uint8, device=device).as_strided((2, width), (FAR - width // 2, 1))
    return pages.copy_(near)


def slot_numbers(spec: Spec, shape: Sequence[int], capacity: int) -> Tensor:
    """Slots in random order, each at most once but for the kinds `absent` (negative, or past the last) and `repeated`."""
    source, dtype = generator(spec["seed"] ^ 4), INTEGERS[spec["integers"]]
    rows = 1
    for size in shape:
        rows *= size
    found = torch.full((rows,), -1)
    order = torch.randperm(capacity, generator=source)[:rows]
    found[: len(order)] = order
    kind = torch.randint(0, 4, (rows,), generator=source)
    beyond = torch.tensor([-1, -2, capacity, capacity + 1, 2 * capacity, torch.iinfo(dtype).max, torch.iinfo(dtype).min])
    outside = beyond[torch.randint(0, len(beyond), (rows,), generator=source)]
    earlier = (torch.rand(rows, generator=source) * torch.arange(rows)).long()
    if "repeated" in spec["slots"]:
        found = torch.where(kind == 1, found[earlier], found)
    if "absent" in spec["slots"]:
        found = torch.where(kind == 2, outside, found)
    return found.to(dtype).reshape(tuple(shape))


def store_call(spec: Spec, device: torch.device) -> Call:
    """Rows, or their records, and where to put them."""
    layout = KV_LAYOUTS[spec["layout"]]
    pages = far_pool(spec, device) if spec.get("far") else pool(spec, device)
    kv = kv_rows(spec, layout, spec["rows"])
    if spec["source"] == "records":
        kv = kv_cache.quantize_kv(kv, layout=layout.name)
    slots = slot_numbers(spec, (spec["rows"],), pages.shape[0] * spec["page_size"])
    kwargs = options(spec) if spec["source"] == "bf16" else options({**spec, "floor": "official"})
    return Call((kv.to(device), pages, slots.to(device)), kwargs)


def load_call(spec: Spec, device: torch.device) -> Call:
    """Pages of random bytes, and slots to read."""
    pages = far_pool(spec, device) if spec.get("far") else pool(spec, device)
    shape = [spec["rows"], *spec.get("more", ())]
    slots = slot_numbers(spec, shape, pages.shape[0] * spec["page_size"])
    return Call((pages, slots.to(device)), {"layout": spec["layout"], "page_size": spec["page_size"]})


def sizes(layouts: Sequence[str], *, most_rows: int = 40) -> dict[str, st.SearchStrategy[Any]]:
    """Rows, pages and slots of a spec."""
    return {
        "layout": st.sampled_from(list(layouts)),
        "rows": st.one_of(st.integers(1, 9), st.sampled_from([most_rows, 0])),
        "pages": st.integers(1, 5),
        "page_size": st.sampled_from([1, 2, 3, 16, 64]),
        "gap": st.sampled_from([0, 1, 16, 584]),
        "slots": strategies.some_of(SLOT_KINDS),
        "integers": st.sampled_from(["int64", "int32"]),
    }


def store_specs(layouts: Sequence[str], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    """Specs for `store_call`."""
    parts = {
        **sizes(layouts),
        "source": st.sampled_from(["bf16", "bf16", "records"]),
        "floor": st.sampled_from(list(FLOORS)),
        "classes": strategies.some_of(tuple(strategies.VALUE_CLASSES)),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def load_specs(layouts: Sequence[str], **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    """Specs for `load_call`."""
    return strategies.specs(**{**sizes(layouts), "more": st.sampled_from([[], [1], [3]]), **fixed, "seed": strategies.seeds()})


def every_bf16(layout: KVLayout, partner: float, name: str) -> Domain:
    """Each bf16 once in a group that holds `partner` at another place and zeros elsewhere; the bf16 dims hold the same numbers again.

    Without scales each number is a group of its own.
    """

    def build(spec: Spec, device: torch.device) -> Call:
        groups = layout.quantised // layout.group
        numbers = torch.arange(spec["first"], spec["first"] + spec["count"])
        if layout.scale == "unit":
            rows = -(-len(numbers) // layout.dims)
            whole = ((torch.arange(rows * layout.dims) + spec["first"]) % 2**16).to(torch.int16).view(torch.bfloat16)
            return Call((whole.view(rows, layout.dims).to(device),), {"layout": layout.name})
        rows = -(-len(numbers) // groups)
        kv = torch.zeros(rows * groups, layout.group, dtype=torch.bfloat16)
        place = numbers % layout.group
        kv[torch.arange(len(numbers)), (place + 1) % layout.group] = partner
        kv[torch.arange(len(numbers)), place] = numbers.to(torch.int16).view(torch.bfloat16)
        rest = (torch.arange(rows * (layout.dims - layout.quantised)) + spec["first"]) % 2**16
        whole = torch.cat([kv.view(rows, -1), rest.to(torch.int16).view(torch.bfloat16).view(rows, -1)], 1)
        return Call((whole.to(device),), {"layout": layout.name})

    return Domain(f"{layout.name}_{name}", build, exhaustive=2**16, why=f"every bf16 beside {partner} in a group of zeros")


def every_pair(layout: KVLayout) -> Domain:
    """Records with each byte of codes under each byte of scales, read back; the bf16 dims hold all numbers in turn."""

    def build(spec: Spec, device: torch.device) -> Call:
        width = code_bytes(layout)
        rows = -(-spec["count"] // width)
        numbers = (torch.arange(rows * width) + spec["first"]).view(rows, width)
        rest = (torch.arange(rows * (layout.dims - layout.quantised)) + spec["first"]).to(torch.int16).view(torch.uint8)
        scales = torch.zeros(rows, layout.scale_bytes, dtype=torch.uint8)
        if layout.groups:
            scales[:, : layout.groups] = (numbers >> 8).view(rows, layout.groups, -1)[..., 0].to(torch.uint8)
        records = torch.cat([(numbers & 255).to(torch.uint8), rest.view(rows, -1), scales], 1)
        empty = torch.zeros(-(-rows // 16), layout.page_bytes(16), dtype=torch.uint8)
        pages = kv_cache.store_kv(records, empty, torch.arange(rows), layout=layout.name, page_size=16)
        return Call((pages.to(device), torch.arange(rows, device=device)), {"layout": layout.name, "page_size": 16})

    count = 2**16 if layout.groups else layout.data_bytes
    return Domain(f"{layout.name}_pairs", build, exhaustive=count, why="every byte of codes under every byte of scales")


def convert_call(spec: Spec, device: torch.device) -> Call:
    """Pages of random bytes; where numbers change, of rows without NaN, whose sign and payload are nobody's promise."""
    source, target = spec["pair"]
    spec = {**spec, "layout": source}
    pages = pool(spec, device)
    if spec["requantised"]:
        rows = pages.shape[0] * spec["page_size"]
        kv = kv_rows(spec, KV_LAYOUTS[source], rows).to(device)
        slots = torch.arange(rows, device=device)
        pages = pages.copy_(kv_cache.store_kv(kv, pages, slots, layout=source, page_size=spec["page_size"]))
    kwargs = {"source": source, "target": target, "page_size": spec["page_size"], "target_page_size": spec["target_page_size"]}
    return Call((pages,), kwargs)


def convert_specs(pairs: Sequence[tuple[str, str]], *, requantised: bool, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    """Specs for `convert_call`."""
    parts = {
        "pair": st.sampled_from([list(pair) for pair in pairs]),
        "pages": st.one_of(st.integers(1, 3), st.just(0)),
        "page_size": st.sampled_from([1, 2, 5, 16]),
        "target_page_size": st.sampled_from([None, 1, 3, 16, 64]),
        "gap": st.sampled_from([0, 1, 16]),
        "requantised": st.just(requantised),
        "classes": strategies.some_of(strategies.FINITE_CLASSES),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def table_call(spec: Spec, device: torch.device) -> Call:
    """A block table of random pages, some of them -1, and entries in range and out of it."""
    source, count, width, size = generator(spec["seed"]), spec["requests"], spec["width"], spec["page_size"]
    pages = torch.randint(-1, 9, (count, width), generator=source, dtype=torch.int32)
    pages = torch.where(torch.rand(count, width, generator=source) < 0.2, spec["largest"], pages)
    requests = torch.randint(-2, count + 2, (spec["rows"],), generator=source)
    indices = torch.randint(-3, (width + 1) * size + 3, (spec["rows"],), generator=source)
    for numbers, limits in ((requests, torch.iinfo(torch.int32)), (indices, torch.iinfo(torch.int64))):
        chance = torch.rand(numbers.shape, generator=source)
        numbers[chance < 0.05] = limits.max
        numbers[chance > 0.95] = limits.min
    return Call((pages.to(device), requests.to(torch.int32).to(device), indices.to(device)), {"page_size": size})


def table_specs() -> st.SearchStrategy[Spec]:
    """Specs for `table_call`."""
    return strategies.specs(
        rows=st.one_of(st.integers(1, 9), st.sampled_from([200, 0])),
        requests=st.integers(1, 5),
        width=st.integers(1, 7),
        page_size=st.sampled_from([1, 2, 64, 256]),
        largest=st.sampled_from([5, 2**31 - 1, -(2**31), 2**25]),
        seed=strategies.seeds(),
    )


def few_entries(spec: Spec, device: torch.device) -> Call:
    """Every request and index around a table of 3 by 3 pages of 2 slots."""
    table = torch.tensor([[4, -1, 0], [2, 2**31 - 1, -7], [-1, 3, 1]], dtype=torch.int32)
    numbers = torch.arange(spec["first"], spec["first"] + spec["count"])
    return Call((table.to(device), (numbers // 12 - 2).to(torch.int32).to(device), (numbers % 12 - 3).to(device)), {"page_size": 2})
