"""What both implementations of `attention` share: argument checks, which look at dtypes, shapes and host values, never at what a tensor
holds; what a plan was made for; and the row of a table of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4 import checks, kv_checks
from dsv4.formats import KV_LAYOUT_PAIRS, KVLayout
from dsv4.norm_checks import LARGEST_FP32
from dsv4.types import ArgumentError, AttentionResult, PagedRows

MODES = ("decode", "prefill")
LARGEST_POSITION = 2**31 - 1  # window indices are int32

Floats = str | Sequence[str]  # "bf16"; the reference also takes fp64 where its roundings are off


class AttentionSupport(NamedTuple):
    """A kernel, and what it takes: from its own rules, never from the name of a family of devices."""

    backend: str
    mode: str  # of MODES
    layouts: tuple[str, ...]  # names of KV_LAYOUTS, and "bf16" for rows that are not packed
    heads: tuple[int, ...]  # head counts that it takes without padding; empty: any
    needs: str  # capabilities, in words
    usable: bool  # on the device asked about
    reason: str


def scaled(scale: float | None, dim: int) -> float:
    """The factor of the scores: the caller's, or dim^-1/2."""
    if scale is None:
        return float(dim**-0.5)
    checks.at_least("scale", scale, 0.0)
    checks.at_most("scale", scale, LARGEST_FP32)
    return float(scale)


def queries(q: Tensor, sink: Tensor | None, floats: Floats) -> None:
    """q [tokens, heads, dim] and the sink of each head."""
    checks.tensor("q", q, floats, ("tokens", "heads", "dim"))
    if q.shape[1] < 1 or q.shape[2] < 1:
        raise ArgumentError("q", f"shape {list(q.shape)}", "must have at least one head and one number a head")
    if sink is not None:
        checks.tensor("sink", sink, "fp32", (q.shape[1],))
        checks.same_device("sink", sink, "q", q)


def picks(name: str, value: Tensor, lengths_name: str, lengths: Tensor | None, q: Tensor, dtypes: str | Sequence[str]) -> None:
    """A list of picks for each token, and how many of them count."""
    checks.tensor(name, value, dtypes, (q.shape[0], "picks"))
    checks.same_device(name, value, "q", q)
    if lengths is not None:
        checks.tensor(lengths_name, lengths, "int32", (q.shape[0],))
        checks.same_device(lengths_name, lengths, "q", q)


def paged_rows(name: str, value: PagedRows, q: Tensor) -> KVLayout:
    """Pages of rows as wide as the queries; their layout."""
    if not isinstance(value, PagedRows):
        raise ArgumentError(name, type(value).__name__, "must be PagedRows(pages, layout, page_size)")
    try:
        chosen = kv_checks.layout(value.layout)
        kv_checks.pages(value.pages, chosen, value.page_size)
    except ArgumentError as error:
        raise ArgumentError(f"{name}.{error.argument}", error.got, error.limit, error.remedy) from None
    checks.same_device(f"{name}.pages", value.pages, "q", q)
    if q.shape[2] != chosen.dims:
        raise ArgumentError("q", f"shape {list(q.shape)}", f"rows of the layout {chosen.name} have {chosen.dims} numbers")
    return chosen


def pair(main: str, extra: str) -> None:
    """Two layouts that one softmax may read together."""
    if main != extra and (main, extra) not in KV_LAYOUT_PAIRS:
        allowed = ", ".join((main, *(other for first, other in KV_LAYOUT_PAIRS if first == main)))
        raise ArgumentError("extra", f"rows of the layout {extra}", f"beside {main} must be of one of: {allowed}", "See KV_LAYOUT_PAIRS")


def together(lead: str, given: bool, **others: object) -> None:
    """Arguments that come with another one (`needed`) or only with it (`may_...`)."""
    for name, value in others.items():
        needed = not name.startswith("may_")
        name = name.removeprefix("may_")
        if value is not None and not given:
            raise ArgumentError(name, type(value).__name__, f"must be None without {lead}")
        if value is None and given and needed:
            raise ArgumentError(name, "None", f"must be given with {lead}")


def sparse(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sink: Tensor | None,
    lengths: Tensor | None,
    extra_kv: Tensor | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    scale: float | None,
    floats: Floats = "bf16",
) -> float:
    """Arguments of `sparse_attention`; the scale."""
    queries(q, sink, floats)
    checks.tensor("kv", kv, floats, ("rows", q.shape[2]))
    checks.same_device("kv", kv, "q", q)
    picks("indices", indices, "lengths", lengths, q, "int32")
    together("extra_kv", extra_kv is not None, extra_indices=extra_indices, may_extra_lengths=extra_lengths)
    if extra_kv is not None and extra_indices is not None:
        checks.tensor("extra_kv", extra_kv, floats, ("rows", q.shape[2]))
        checks.same_device("extra_kv", extra_kv, "q", q)
        picks("extra_indices", extra_indices, "extra_lengths", extra_lengths, q, "int32")
    return scaled(scale, q.shape[2])


def paged(
    q: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None,
    lengths: Tensor | None,
    extra: PagedRows | None,
    extra_slots: Tensor | None,
    extra_lengths: Tensor | None,
    scale: float | None,
    floats: Floats = "bf16",
) -> float:
    """Arguments of `paged_attention`, `decode_attention` and `prefill_attention`; the scale."""
    queries(q, sink, floats)
    layout = paged_rows("main", main, q)
    picks("slots", slots, "lengths", lengths, q, kv_checks.INDEX)
    together("extra", extra is not None, extra_slots=extra_slots, may_extra_lengths=extra_lengths)
    if extra is not None and extra_slots is not None:
        pair(layout.name, paged_rows("extra", extra, q).name)
        picks("extra_slots", extra_slots, "extra_lengths", extra_lengths, q, kv_checks.INDEX)
    return scaled(scale, q.shape[2])


def draft(
    q: Tensor,
    block_kv: Tensor,
    main: PagedRows,
    slots: Tensor,
    sink: Tensor | None,
    block: int,
    lengths: Tensor | None,
    scale: float | None,
    floats: Floats = "bf16",
) -> float:
    """Arguments of `draft_attention`; the scale."""
    queries(q, sink, floats)
    checks.at_least("block", block, 1)
    checks.multiple("q", q.shape[0], block, "It counts queries, which come in whole blocks")
    checks.tensor("block_kv", block_kv, floats, (q.shape[0], q.shape[2]))
    checks.same_device("block_kv", block_kv, "q", q)
    paged_rows("main", main, q)
    picks("slots", slots, "lengths", lengths, q, kv_checks.INDEX)
    return scaled(scale, q.shape[2])


def merge(outputs: Tensor, lses: Tensor, sink: Tensor | None, floats: Floats = ("bf16", "fp32"), lse_floats: Floats = "fp32") -> None:
    """Arguments of `merge_splits`."""
    checks.tensor("outputs", outputs, floats, ("splits", "tokens", "heads", "dim"))
    if min(outputs.shape[0], outputs.shape[2], outputs.shape[3]) < 1:
        raise ArgumentError("outputs", f"shape {list(outputs.shape)}", "must have at least one split, one head and one number a head")
    checks.tensor("lses", lses, lse_floats, tuple(outputs.shape[:3]))
    checks.same_device("lses", lses, "outputs", outputs)
    if sink is not None:
        checks.tensor("sink", sink, "fp32", (outputs.shape[2],))
        checks.same_device("sink", sink, "outputs", outputs)


def lse(value: Tensor, sink: Tensor | None = None, floats: Floats = "fp32") -> None:
    """Arguments of the conversions of `lse`."""
    checks.tensor("lse", value, floats, ("tokens", "heads"))
    if sink is not None:
        checks.tensor("sink", sink, "fp32", (value.shape[1],))
        checks.same_device("sink", sink, "lse", value)


def window(positions: Tensor, size: int) -> None:
    """Arguments of `window_indices`."""
    checks.tensor("positions", positions, kv_checks.INDEX, ("tokens",))
    checks.at_least("window", size, 1)


def results(out: AttentionResult, q: Tensor, floats: str = "bf16", lse_floats: str = "fp32") -> None:
    """Buffers of results, both before either is written."""
    if not isinstance(out, AttentionResult):
        raise ArgumentError("out", type(out).__name__, "must be AttentionResult(output, lse)")
    for name, buffer, dtype, shape in (("out.output", out.output, floats, q.shape), ("out.lse", out.lse, lse_floats, q.shape[:2])):
        checks.tensor(name, buffer, dtype, tuple(shape))
        checks.same_device(name, buffer, "q", q)
        checks.writable(name, buffer)
        if not buffer.is_contiguous():
            raise ArgumentError(name, f"strides {buffer.stride()}", "must be contiguous")
        if torch.is_grad_enabled() and buffer.requires_grad and buffer.is_leaf:
            raise ArgumentError(name, "a tensor that requires grad", "cannot be updated in place", "Use detach(), or torch.no_grad()")
    if not torch.compiler.is_compiling():  # where no tensor has an address
        for name, buffer, owner, other in (
            ("lse", out.lse, "out.output", out.output),
            ("output", out.output, "q", q),
            ("lse", out.lse, "q", q),
        ):
            if other.is_contiguous() and _meet(buffer, other):
                raise ArgumentError(f"out.{name}", f"memory of {owner}", "must have memory of its own")


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


@dataclass(frozen=True)
class Planned:
    """What a plan was made for: `run` takes no more than this."""

    mode: str
    tokens: int
    heads: int
    picks: int
    layout: str
    page_size: int
    extra_picks: int
    extra_layout: str | None
    extra_page_size: int | None
    dim: int

    def check(self) -> None:
        """Arguments of `plan_attention`."""
        checks.one_of("mode", self.mode, MODES)
        for name, value, least in (("tokens", self.tokens, 0), ("heads", self.heads, 1), ("picks", self.picks, 0)):
            checks.at_least(name, value, least)
        chosen = kv_checks.layout(self.layout)
        checks.at_least("page_size", self.page_size, 1)
        checks.at_least("extra_picks", self.extra_picks, 0)
        together("extra_layout", self.extra_layout is not None, extra_page_size=self.extra_page_size)
        if self.extra_layout is not None and self.extra_page_size is not None:
            kv_checks.layout(self.extra_layout, "extra_layout")
            checks.at_least("extra_page_size", self.extra_page_size, 1)
            pair(self.layout, self.extra_layout)
        elif self.extra_picks:
            raise ArgumentError("extra_picks", str(self.extra_picks), "must be 0 without extra_layout")
        if self.dim != chosen.dims:
            raise ArgumentError("dim", str(self.dim), f"rows of the layout {chosen.name} have {chosen.dims} numbers")

    def check_run(self, q: Tensor, main: PagedRows, slots: Tensor, extra: PagedRows | None, extra_slots: Tensor | None) -> None:
        """That a call, whose arguments `paged` has checked, is no more than was planned."""
        more = "Make a plan for the largest call"
        for name, got, most in (("q", q.shape[0], self.tokens), ("slots", slots.shape[1], self.picks)):
            if got > most:
                raise ArgumentError(name, f"{got} {'tokens' if name == 'q' else 'picks'}", f"the plan is for at most {most}", more)
        if q.shape[1] != self.heads:
            raise ArgumentError("q", f"{q.shape[1]} heads", f"the plan is for {self.heads}", more)
        _same_rows("main", main, self.layout, self.page_size)
        if extra is not None and extra_slots is not None:
            _same_rows("extra", extra, self.extra_layout, self.extra_page_size)
            if extra_slots.shape[1] > self.extra_picks:
                raise ArgumentError("extra_slots", f"{extra_slots.shape[1]} picks", f"the plan is for at most {self.extra_picks}", more)


def _same_rows(name: str, rows: PagedRows, layout: str | None, page_size: int | None) -> None:
    if (rows.layout, rows.page_size) != (layout, page_size):
        planned = "none" if layout is None else f"{layout} in pages of {page_size} slots"
        raise ArgumentError(name, f"{rows.layout} in pages of {rows.page_size} slots", f"the plan is for {planned}")
