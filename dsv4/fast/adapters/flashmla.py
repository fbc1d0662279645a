"""FlashMLA 1.0 (the wheels of sgl-flash-mla): sparse attention over bf16 rows, and over packed pages.

Its kernels of SM90 lie behind `use_legacy=True`, and take V4's pages; on SM100 those behind it take the planar layouts, and the current
ones the inline ones of V4.1. All take 64 or 128 heads; natural logarithms come without the sink, and +inf stands for a row without picks.
Of pages only -1 is an absent pick: every other number is an address. Source: spec A 6.4, 6.5; kernels 0b, A.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dsv4.fast.adapters.library import Library, as_bytes, known_answer
from dsv4.fast.dispatch import Device, cuda_exactly, describe
from dsv4.formats import KV_LAYOUTS, KVLayout

SPARSE_FORWARD = "flash_mla_sparse_fwd"
SPARSE_DECODE = "flash_mla_with_kvcache"
METADATA = "get_mla_metadata"

HEADS = (64, 128)
DIM = 512
ROW_PICKS, PAGE_PICKS = 128, 64  # what a number of picks is a multiple of, over rows and over pages
ANY_PICK = ((9, 0),)  # capabilities whose kernels over rows are seen to pass over every number that is none of a row
PAGED = {  # layouts that a token's picks come from, main and extra, and whether their kernel is a legacy one, by capability
    (9, 0): {("v4", "v4"): True},
    (10, 0): {
        ("v4", "v4"): True,
        ("v41", "v41"): True,
        ("v41", "v41_fp4"): True,
        ("v41_inline", "v41_inline"): False,
        ("v41_inline", "v41_fp4_inline"): False,
    },
}
PAGED[10, 3] = PAGED[10, 0]


class Paged(Protocol):
    """Rows in pages, as `dsv4.types.PagedRows` has them."""

    @property
    def pages(self) -> Tensor:
        """uint8 [pages, stride]."""

    @property
    def layout(self) -> str:
        """A name of `dsv4.formats.KV_LAYOUTS`."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""


def sparse_forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of each query over its own rows of `kv`, which are keys and values.

    Args:
        q: [queries, heads, 512], bf16, 64 or 128 heads.
        kv: [entries, 1, 512], bf16.
        indices: [queries, 1, picks], int32, -1 for none; picks a multiple of 128. Other numbers that are of no row: see ANY_PICK.
        scale: of the logits.
        sink: [heads], fp32: a logit without a value; None for none.

    Returns:
        bf16 [queries, heads, 512]; fp32 [queries, heads], natural, without the sink.
    """
    out, _, lse = LIBRARY.function(SPARSE_FORWARD)(q, kv, indices, scale, DIM, sink, use_legacy=_device(q).capability[0] < 10)
    return out, lse


def schedule() -> Any:
    """What `sparse_decode` keeps from its first call with it; for calls of equal shapes."""
    return LIBRARY.function(METADATA)()[0]


def sparse_decode(
    q: Tensor, main: Paged, slots: Tensor, extra: Paged | None, extra_slots: Tensor | None, scale: float, sink: Tensor | None, kept: Any
) -> tuple[Tensor, Tensor]:
    """Attention of each query over its own rows of pages.

    No lengths are passed: a column that does not count is -1. So `kept` does not depend on what lists hold, and no row behind a length is
    read.

    Args:
        q: [queries, 1, heads, 512], bf16, 64 or 128 heads.
        main, extra: pages of layouts that PAGED has for the device.
        slots, extra_slots: [queries, 1, picks], int32, -1 for none, every other one in the pages; picks a multiple of 64.
        scale: of the logits.
        sink: [heads], fp32; None for none.
        kept: of `schedule`.

    Returns:
        bf16 [queries, 1, heads, 512]; fp32 [queries, heads, 1], natural, without the sink, +inf where nothing was picked.
    """
    legacy = PAGED[_device(q).capability][main.layout, main.layout if extra is None else extra.layout]
    more = {} if extra is None else {"extra_k_cache": view_of(extra), "extra_indices_in_kvcache": extra_slots}
    options = {"softmax_scale": scale, "is_fp8_kvcache": True, "indices": slots, "attn_sink": sink, "use_legacy": legacy}
    out, lse = LIBRARY.function(SPARSE_DECODE)(q, view_of(main), None, None, DIM, kept, **options, **more)
    return out, lse


def view_of(rows: Paged) -> Tensor:
    """uint8 [pages, slots, 1, bytes of a token] of pages: in planar layouts its last axis is no record, and only its sizes count."""
    size = KV_LAYOUTS[rows.layout].token_bytes
    return rows.pages.as_strided((rows.pages.shape[0], rows.page_size, 1, size), (rows.pages.stride(0), size, size, 1))


def takes_heads(arguments: Mapping[str, Any]) -> str | None:
    """What keeps the kernels from queries."""
    heads, dim = arguments["q"].shape[1:]
    return None if heads <= HEADS[-1] and dim == DIM else f"takes at most {HEADS[-1]} heads of {DIM}; got {heads} heads of {dim}"


def takes_as_given(arguments: Mapping[str, Any]) -> str | None:
    """What `sparse_forward` does not take as it is, and others take better: other numbers of heads, a second list."""
    heads = arguments["q"].shape[1]
    if heads not in HEADS:
        return f"its kernels have {' or '.join(map(str, HEADS))} heads; got {heads}"
    return None if arguments["extra_indices"] is None else "its kernels have one list"


def reads_picks(indices: Tensor, lengths: Tensor | None) -> bool:
    """Whether a list [queries, picks] goes to `sparse_forward` as it is, whatever numbers it holds."""
    lies = indices.dtype == torch.int32 and indices.is_contiguous() and indices.shape[1] > 0 and indices.shape[1] % ROW_PICKS == 0
    return lies and lengths is None and indices.data_ptr() % 16 == 0 and _device(indices).capability in ANY_PICK


def takes_pages(arguments: Mapping[str, Any]) -> str | None:
    """What keeps `sparse_decode` from an operator's arguments: heads, layouts, pages."""
    if (reason := takes_heads(arguments)) is not None:
        return reason
    main, extra = arguments["layout"], arguments["extra_layout"] or arguments["layout"]
    device = arguments.get("device") or _device(arguments["q"])
    known = PAGED.get(device.capability, {})
    if (main, extra) not in known:
        pairs = ", ".join(" with ".join(dict.fromkeys(pair)) for pair in known) or "no layout"
        return f"its kernels of {device} take {pairs}; got {' with '.join(dict.fromkeys((main, extra)))}"
    for name, layout in (("pages", main), ("extra_pages", extra)):
        if arguments[name] is not None and (reason := _fits(name, arguments[name], layout)) is not None:
            return reason
    return None


def _fits(name: str, pages: Tensor, layout: str) -> str | None:
    multiple = KV_LAYOUTS[layout].stride_multiple
    if not pages.shape[0]:
        return f"takes no empty cache; {name} has no page"
    if pages.stride(0) % multiple or pages.data_ptr() % 16:
        return f"takes pages that lie a multiple of {multiple} bytes apart and begin at one of 16; got {name} {pages.stride(0)} bytes apart"
    return None


def _device(tensor: Tensor) -> Device:
    return describe(tensor.device)


def _unfit(version: str) -> str | None:
    return None if version.split(".")[:2] == ["1", "0"] else "is not 1.0.x, whose signatures this adapter knows"


# Entry j is (j + 1) (1, -1, 1/2, 2, 1, ...).
PATTERN = (1.0, -1.0, 0.5, 2.0)
# The first query is zero: its logits and the sink's are, so three entries weigh 1/4 each, and its lse is log 3. The second one has 64 in
# its first dim in even heads: its logits are 64 (j + 1), and the largest takes everything, in fp32 exactly; odd heads are as the first's.
UNIFORM, LARGEST, OTHER = ([weight * number for number in PATTERN] * 128 for weight in (2.75, 6.0, 2.5))
LSES = [1099] * 64 + [384000, 1099] * 32  # thousandths


def _queries(device: torch.device) -> Tensor:
    q = torch.zeros(2, 64, DIM)
    q[1, ::2, 0] = 64.0
    return q.to(torch.bfloat16).to(device)


def _thousandths(lse: Tensor) -> Tensor:
    return (1000 * lse).round().to(torch.int32)


def _probe_sparse_forward(device: torch.device) -> str | None:
    rows = torch.arange(1.0, 9.0)[:, None] * torch.tensor(PATTERN).repeat(128)
    memory = torch.full((16, 1, DIM), torch.nan, dtype=torch.bfloat16)
    memory[4:12] = rows[:, None].to(torch.bfloat16)
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, :3], indices[1, 0, :3] = torch.tensor([1, 3, 4]), torch.tensor([2, 5, 0])
    if describe(device).capability in ANY_PICK:
        indices[0, 0, 3:7], indices[1, 0, 120:124] = torch.tensor([-2, -4, 8, 11]), torch.tensor([11, -3, 8, -4])
    given = _queries(device), memory.to(device)[4:12], indices.to(device)
    sink = torch.zeros(64, device=device)
    want = as_bytes(UNIFORM * 64 + (LARGEST + OTHER) * 32, torch.bfloat16), as_bytes(LSES, torch.int32)

    def answer() -> tuple[Tensor, Tensor]:
        out, lse = sparse_forward(*given, 1.0, sink)
        return out, _thousandths(lse)

    return known_answer(answer, want, device)


def _probe_sparse_decode(device: torch.device) -> str | None:
    """Every pair of layouts of the device: entries 1, 3, 4 of two queries, the last two of them in the extra cache, and a third query with
    nothing, whose lse is +inf."""
    for (main, extra), _ in PAGED[describe(device).capability].items():
        if (wrong := _probe_pair(main, extra, device)) is not None:
            return f"{main} with {extra}: {wrong}"
    return None


def _probe_pair(main: str, extra: str, device: torch.device) -> str | None:
    class Rows:
        def __init__(self, layout: str) -> None:
            self.pages, self.layout, self.page_size = packed_pattern(layout).to(device), layout, 64

    q = torch.cat([_queries(device), _queries(device)[:1]])
    slots = torch.full((2, 3, 1, 64), -1, dtype=torch.int32)
    slots[0, 0, 0, 7], slots[0, 1, 0, 0], slots[1, 0, 0, :2], slots[1, 1, 0, 3] = 65, 66, torch.tensor([67, 68]), 69
    slots[1, 1, 0, 63] = 64
    mine, others = slots.to(device)
    sink, rows, more = torch.zeros(64, device=device), Rows(main), Rows(extra)
    want = as_bytes(UNIFORM * 64 + (LARGEST + OTHER) * 32 + [0.0] * (64 * DIM), torch.bfloat16)

    def answer() -> tuple[Tensor, Tensor, Tensor]:
        out, lse = sparse_decode(q[:, None], rows, mine, more, others, 1.0, sink, schedule())
        return out.float().add(0.0).to(torch.bfloat16), _thousandths(lse[:2]), (lse[2] == torch.inf).to(torch.uint8)

    return known_answer(answer, (want, as_bytes(LSES, torch.int32), bytes([1] * 64)), device)


def packed_pattern(layout: str) -> Tensor:
    """Two pages of 64 slots of a layout: the first eight slots of the second one hold the entries, all other bytes are 0xFF, or NaN."""
    chosen = KV_LAYOUTS[layout]
    pages = torch.full((2, chosen.page_bytes(64)), 0xFF, dtype=torch.uint8)
    for entry in range(8):
        record = _record(chosen, entry + 1)
        for at, part in (
            (chosen.data_offset(entry, 64), record[: chosen.data_bytes]),
            (chosen.scale_offset(entry, 64), record[chosen.data_bytes :]),
        ):
            pages[1, at : at + len(part)] = part
    return pages


def _record(chosen: KVLayout, factor: int) -> Tensor:
    """Data and scales of PATTERN times a factor up to 8: in FP4 the codes are the pattern's and the scales the factor."""
    numbers = factor * torch.tensor(PATTERN).repeat(chosen.dims // len(PATTERN))
    if chosen.numbers == "e2m1":
        data = torch.tensor([0xA2, 0x41], dtype=torch.uint8).repeat(chosen.data_bytes // 2)  # 1, -1, 1/2, 2, the first one lowest
        scale = int(torch.tensor(float(factor)).to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        codes = numbers[: chosen.quantised].to(torch.float8_e4m3fn).view(torch.uint8)
        data = torch.cat([codes, numbers[chosen.quantised :].to(torch.bfloat16).view(torch.uint8)])
        scale = 127
    return torch.cat([data, torch.full((chosen.scale_bytes,), scale, dtype=torch.uint8)])


LIBRARY = Library(
    name="sgl-flash-mla",
    module="flash_mla",
    distributions=("sgl-flash-mla",),
    install="pip install sgl-flash-mla==1.0.0",
    fits=_unfit,
    probes={SPARSE_FORWARD: _probe_sparse_forward, SPARSE_DECODE: _probe_sparse_decode},
    devices=cuda_exactly((9, 0), (10, 0), (10, 3)),
)
