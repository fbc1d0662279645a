"""Plans of attention, and what each kernel takes.

A plan chooses a backend and makes its engine, which may allocate and wait for the device. With our own kernels `run` does neither, but for
results that have no buffer; with a library's it does not wait, so either can be captured in a CUDA graph. A plan of our kernels holds the
parts of a split, which the number of programs that run at once bounds whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4 import attention_checks, checks
from dsv4.attention_checks import AttentionSupport, Planned
from dsv4.fast import attention_ops, dispatch
from dsv4.fast.adapters import flashinfer_mla, flashmla
from dsv4.fast.attention_engines import Engine, Sizes, held
from dsv4.fast.dispatch import Implementation, describe
from dsv4.fast.status import backends
from dsv4.formats import KV_LAYOUTS, fp32
from dsv4.types import ArgumentError, AttentionPlan, AttentionResult, PagedRows, Unsupported


@dataclass(frozen=True)
class Plan:
    """`decode_attention` or `prefill_attention` for calls up to a size."""

    planned: Planned
    workspace_bytes: int  # what it holds
    backend: str
    splits: int  # of each token's picks; 0 where the library decides by the number of tokens
    reason: str  # why this backend: what keeps the better ones from it
    _engine: Engine
    _row: Implementation
    _device: torch.device

    def run(
        self,
        q: Tensor,
        main: PagedRows,
        slots: Tensor,
        sink: Tensor | None = None,
        *,
        lengths: Tensor | None = None,
        extra: PagedRows | None = None,
        extra_slots: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        scale: float | None = None,
        out: AttentionResult | None = None,
    ) -> AttentionResult:
        """As `paged_attention`, into `out` where it is given: fewer tokens or picks than planned are fine.

        Args:
            q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale: as `paged_attention`.
            out: contiguous buffers of the results' shapes and dtypes.

        Returns:
            AttentionResult, `out` if it was given.

        Raises:
            ArgumentError: as `paged_attention`; more tokens or picks, other heads, layouts or devices than were planned; buffers that do
                not fit.
            Unsupported: pages that the planned backend does not take, or another scale where the plan has it in it.
        """
        factor = fp32(attention_checks.paged(q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, scale))
        checks.no_grad(q=q, sink=sink)
        self.planned.check_run(q, main, slots, extra, extra_slots)
        if q.device.type != self._device.type or self._device.index not in (None, q.device.index):
            raise ArgumentError("q", f"a tensor on {q.device}", f"the plan is for {self._device}", "Make a plan for each device")
        arguments = _arguments(q, main, slots, sink, lengths, extra, extra_slots, extra_lengths, factor)
        if (reason := self._row.arguments(arguments)) is not None:
            raise Unsupported("main", f"pages for the planned backend {self.backend!r}", reason, "Make a plan of another backend")
        if out is not None:
            attention_checks.results(out, q)
        call = attention_ops.given(**arguments)
        with _current(q.device):
            result = attention_ops.answer(lambda _: self._engine, call, out=None if out is None else (out.output, out.lse))
        return AttentionResult(*result) if out is None else out


def plan_attention(
    mode: str,
    *,
    tokens: int,
    heads: int,
    picks: int,
    layout: str,
    page_size: int,
    extra_picks: int = 0,
    extra_layout: str | None = None,
    extra_page_size: int | None = None,
    dim: int = 512,
    device: torch.device | str | None = None,
    batch_invariant: bool | None = None,
    max_rows: int | None = None,
    impl: str | None = None,
) -> AttentionPlan:
    """Choose how calls of `decode_attention` or `prefill_attention` run, up to a size, and hold what they need.

    Args:
        mode: "decode" may split each token's picks among programs, by the number of tokens; "prefill" never does.
        tokens, heads, picks, extra_picks: the largest call; heads exactly.
        layout, page_size, extra_layout, extra_page_size: of the pages.
        dim: of the layout.
        device: None for the current CUDA device if there is one, else the CPU.
        batch_invariant: whether a token's result must not depend on the others: no splits, and backends that promise it. None for what
            `use()` demands.
        max_rows: how many different rows of each list all tokens of a call read at most, for libraries that decode rows first: their buffer
            has so many, and rows beyond count as absent. None for a buffer that holds those of some tokens at a time.
        impl: a backend by name, else the device's default.

    Returns:
        AttentionPlan with `run`, `workspace_bytes`, `backend`, `splits`, `reason`.

    Raises:
        ArgumentError: a size below its least, an unknown mode or layout, layouts that do not go together.
        BackendUnavailable, Unsupported: as a call of a backend by name.
    """
    planned = Planned(mode, tokens, heads, picks, layout, page_size, extra_picks, extra_layout, extra_page_size, dim)
    planned.check()
    if max_rows is not None:
        checks.at_least("max_rows", max_rows, 1)
    where = dispatch.default_device(device)
    with nullcontext() if batch_invariant is None else dispatch.use(batch_invariant=batch_invariant):
        function = f"attention.{mode}_attention"
        arguments = _sketch(planned, where)
        row = dispatch.resolve(function, where, arguments, impl)
        lists = ((picks, layout), (extra_picks, extra_layout)) if extra_layout is not None else ((picks, layout),)
        split = mode == "decode" and attention_ops.may_split()
        widths, layouts = tuple(width for width, _ in lists), tuple(name or "" for _, name in lists)
        sizes = Sizes(max(tokens, 1), heads, dim, widths, layouts, where, fp32(dim**-0.5), split, max_rows)
        with _current(where):
            engine = attention_ops.ENGINES[f"{mode}_attention"][row.backend](sizes)
        return Plan(planned, held(engine), row.backend, engine.splits, _why(function, row, where, arguments, impl), engine, row, where)


def _why(function: str, chosen: Implementation, device: torch.device, arguments: Mapping[str, Any], impl: str | None) -> str:
    here = describe(device)
    if impl is not None:
        return f"{chosen.backend} on {here}: asked for"
    passed = [f"{row.backend}: {row.arguments(arguments) or dispatch.unusable(row, device)}" for row in _before(function, chosen)]
    return f"{chosen.backend} on {here}" + (f"; not {'; '.join(passed)}" if passed else ": the first choice")


def _before(function: str, chosen: Implementation) -> Iterator[Implementation]:
    for row in dispatch.TABLES[function]:
        if row is chosen:
            return
        yield row


def _sketch(planned: Planned, device: torch.device) -> dict[str, Any]:
    """Arguments of the sizes of a plan, for rules: they hold nothing."""
    q = torch.empty(planned.tokens, planned.heads, planned.dim, dtype=torch.bfloat16, device="meta")
    main, extra = _pages(planned.layout, planned.page_size), None
    slots, more = torch.empty(planned.tokens, planned.picks, dtype=torch.int32, device="meta"), None
    if planned.extra_layout is not None and planned.extra_page_size is not None:
        extra = _pages(planned.extra_layout, planned.extra_page_size)
        more = torch.empty(planned.tokens, planned.extra_picks, dtype=torch.int32, device="meta")
    return {**_arguments(q, main, slots, None, None, extra, more, None, 1.0), "device": describe(device)}


def _pages(layout: str, page_size: int) -> PagedRows:
    return PagedRows(torch.empty(1, KV_LAYOUTS[layout].page_bytes(page_size), dtype=torch.uint8, device="meta"), layout, page_size)


def _arguments(
    q: Tensor, main: PagedRows, slots: Tensor, sink: Tensor | None, lengths: Tensor | None,
    extra: PagedRows | None, extra_slots: Tensor | None, extra_lengths: Tensor | None, scale: float,
) -> dict[str, Any]:  # fmt: skip
    """The operators' arguments by name."""
    pages, layout, page_size = main
    others = (None, "", 0) if extra is None else extra
    names = ("q", "pages", "layout", "page_size", "slots", "sink", "lengths", "extra_pages", "extra_layout", "extra_page_size")
    values = (q, pages, layout, page_size, slots, sink, lengths, *others)
    return {**dict(zip(names, values, strict=True)), "extra_slots": extra_slots, "extra_lengths": extra_lengths, "scale": scale}


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Kernels launch on the current card."""
    with torch.cuda.device(device) if device.type == "cuda" and device.index is not None else nullcontext():
        yield


ANY_HEADS: tuple[int, ...] = ()


def attention_support(device: torch.device | str | None = None) -> tuple[AttentionSupport, ...]:
    """Every kernel of attention over pages, what it takes, and whether it runs on a device.

    Args:
        device: None for the current CUDA device if there is one, else the CPU.

    Returns:
        AttentionSupport of each backend and mode, in the order in which they are chosen. Layouts ("bf16" is `sparse_attention`) and heads
        are the kernel's on this device, or, where it does not run, on those that it runs on. Fewer heads are padded; 128 are the most.
    """
    where = dispatch.default_device(device)
    capability = describe(where).capability
    found = {(status.function, status.backend): status for status in backends(where)}
    support = []
    for mode in attention_checks.MODES:
        for row in dispatch.TABLES[f"attention.{mode}_attention"]:
            status = found[f"attention.{mode}_attention", row.backend]
            layouts, heads, needs = _takes(row.backend, mode, capability)
            support.append(AttentionSupport(row.backend, mode, layouts, heads, needs, status.usable, status.reason))
    return tuple(support)


def _takes(backend: str, mode: str, capability: tuple[int, int]) -> tuple[tuple[str, ...], tuple[int, ...], str]:
    every = tuple(KV_LAYOUTS) if mode == "decode" else ("bf16", *KV_LAYOUTS)
    if backend == "flashmla":
        pairs = flashmla.PAGED.get(capability) or {pair: legacy for known in flashmla.PAGED.values() for pair, legacy in known.items()}
        layouts = every if mode == "prefill" else tuple(dict.fromkeys(name for pair in pairs for name in pair))
        return layouts, flashmla.HEADS, "a CUDA device of capability 9.0, 10.0 or 10.3"
    if backend == "flashinfer":
        v41 = tuple(dict.fromkeys(name for pair in flashinfer_mla.SCALES for name in pair))
        return v41 if capability[0] == 12 else every, ANY_HEADS, "a CUDA device of capability 9.0, 12.0 or 12.1"
    return every, ANY_HEADS, "a CUDA device of capability 8.0 or newer" if backend == "triton" else "any device"
