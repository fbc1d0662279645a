"""The operators of `attention`, and what implements them.

A call makes the engine of its backend for its own sizes and runs it once. Only `decode_attention` splits a token's picks among programs, by
the number of tokens; under use(batch_invariant=True) it does not, and gives the bits of `paged_attention`. Tokens without anything to pick
are answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import attention_bodies as bodies
from dsv4.fast import dispatch, ops
from dsv4.fast.adapters import flashinfer, flashinfer_mla, flashmla
from dsv4.fast.attention_bodies import PagedPicks, Picks
from dsv4.fast.attention_engines import Blocks, Engine, Given, Pair, Sizes, Triton, empty_pair, kernel, picks_of, rows_there, sizes_of
from dsv4.fast.attention_libraries import FlashMLAPages, FlashMLARows, flashinfer_engine, load
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Adaptive, Implementation, any_arguments, any_device, cuda_exactly, cuda_from
from dsv4.formats import fp32

Run = Callable[..., Any]
Make = Callable[[Sizes], Engine]

LEAST_DIM, MOST_DIM, MOST_HEADS = 64, 512, 128  # of our kernels
DRAFT_ROWS = 2**15  # decoded for some drafts at a time: 32 MiB of bf16


def may_split() -> bool:
    """Whether nobody demands that rows do not depend on the batch."""
    return not dispatch.batch_invariant()


def takes(arguments: Mapping[str, Any]) -> str | None:
    """What keeps our kernels from queries."""
    heads, dim = arguments["q"].shape[1:]
    if heads > MOST_HEADS or not LEAST_DIM <= dim <= MOST_DIM or dim & (dim - 1):
        limit = f"takes at most {MOST_HEADS} heads of a power of two of numbers from {LEAST_DIM} to {MOST_DIM}"
        return f"{limit}; got {heads} heads of {dim}"
    return None


def takes_parts(arguments: Mapping[str, Any]) -> str | None:
    """What keeps our kernel from parts to merge."""
    dim = arguments["outputs"].shape[3]
    return f"takes a power of two of numbers a head; got {dim}" if dim & (dim - 1) else None


def given(
    q: Tensor, pages: Tensor, layout: str, page_size: int, slots: Tensor, sink: Tensor | None, lengths: Tensor | None,
    extra_pages: Tensor | None, extra_layout: str, extra_page_size: int, extra_slots: Tensor | None, extra_lengths: Tensor | None,
    scale: float,
) -> Given:  # fmt: skip
    """A call of the operators over pages."""
    lists = [PagedPicks(pages, layout, page_size, slots, lengths)]
    if extra_pages is not None and extra_slots is not None:
        lists.append(PagedPicks(extra_pages, extra_layout, extra_page_size, extra_slots, extra_lengths))
    return Given(q, tuple(lists), sink, fp32(scale))


def answer(make: Make, call: Given, *, split: bool = False, out: Pair | None = None) -> Pair:
    """Output and lse of one call, in `out` if it is given."""
    if call.q.shape[0] and any(picks_of(one).shape[1] and rows_there(one) for one in call.lists):
        return make(sizes_of(call, split=split)).run(call, out)
    output, lse = out or empty_pair(call.q)
    return output.zero_(), lse.fill_(-torch.inf)


def _paged(make: Make, *arguments: Any) -> Pair:
    return answer(make, given(*arguments))


def _decode(make: Make, *arguments: Any) -> Pair:
    return answer(make, given(*arguments), split=may_split())


def _sparse(
    make: Make, q: Tensor, kv: Tensor, indices: Tensor, sink: Tensor | None, lengths: Tensor | None,
    extra_kv: Tensor | None, extra_indices: Tensor | None, extra_lengths: Tensor | None, scale: float,
) -> Pair:  # fmt: skip
    lists = [Picks(kv, indices, lengths)]
    if extra_kv is not None and extra_indices is not None:
        lists.append(Picks(extra_kv, extra_indices, extra_lengths))
    return answer(make, Given(q, tuple(lists), sink, fp32(scale)))


def _draft(
    make: Make, q: Tensor, block_kv: Tensor, pages: Tensor, layout: str, page_size: int, slots: Tensor, sink: Tensor | None,
    block: int, lengths: Tensor | None, scale: float,
) -> Pair:  # fmt: skip
    own = Picks(block_kv, bodies.block_indices(q.shape[0], block, q.device), None)
    return answer(make, Given(q, (PagedPicks(pages, layout, page_size, slots, lengths), own), sink, fp32(scale)))


def _triton_draft(
    q: Tensor, block_kv: Tensor, pages: Tensor, layout: str, page_size: int, slots: Tensor, sink: Tensor | None,
    block: int, lengths: Tensor | None, scale: float,
) -> Pair:  # fmt: skip
    """The rows of the picks in bf16 beside those of the blocks: whole blocks of some tokens at a time."""
    output, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    step = max(DRAFT_ROWS // max(slots.shape[1], 1) // block, 1) * block
    for first in range(0, q.shape[0], step):
        here = slice(first, first + step)
        within = None if lengths is None else lengths[here]
        picks = bodies.within(slots[here], within, pages.shape[0] * page_size)
        rows = q.new_empty((picks.numel(), q.shape[2]))
        if picks.numel():
            load(PagedPicks(pages, layout, page_size, picks, None), picks.reshape(-1), rows)
        places = torch.where(picks >= 0, torch.arange(picks.numel(), device=q.device).view(picks.shape), -1).to(torch.int32)
        own = Picks(block_kv[here], bodies.block_indices(len(picks), block, q.device), None)
        call = Given(q[here], (Picks(rows, places, None), own), sink, fp32(scale))
        Triton(sizes_of(call)).run(call, (output[here], lse[here]))
    return output, lse


def _merge(run: Run, outputs: Tensor, lses: Tensor, sink: Tensor | None) -> Pair:
    return bodies.merge(run, outputs, lses, sink)


def _triton_merge(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> Pair:
    output, lse = outputs.new_empty(outputs.shape[1:], dtype=torch.bfloat16), lses.new_empty(lses.shape[1:])
    if output.numel():
        kernel("merge")(outputs, lses, sink, output, lse)
    return output, lse


def _window(run: Run, positions: Tensor, window: int) -> Tensor:
    if not positions.shape[0]:
        return positions.new_empty((0, window), dtype=torch.int32)
    result: Tensor = run(bodies.window_body, positions.to(torch.int64), window=window)
    return result


def _fake_pair(q: Tensor, *_: Any, **__: Any) -> Pair:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _fake_merge(outputs: Tensor, lses: Tensor, *_: Any, **__: Any) -> Pair:
    return outputs.new_empty(outputs.shape[1:], dtype=torch.bfloat16), lses.new_empty(lses.shape[1:])


PAGED = (
    "(Tensor q, Tensor pages, str layout, int page_size, Tensor slots, Tensor? sink, Tensor? lengths, Tensor? extra_pages, "
    "str extra_layout, int extra_page_size, Tensor? extra_slots, Tensor? extra_lengths, float scale) -> (Tensor, Tensor)"
)
SPARSE = (
    "(Tensor q, Tensor kv, Tensor indices, Tensor? sink, Tensor? lengths, Tensor? extra_kv, Tensor? extra_indices, "
    "Tensor? extra_lengths, float scale) -> (Tensor, Tensor)"
)
DRAFT = (
    "(Tensor q, Tensor block_kv, Tensor pages, str layout, int page_size, Tensor slots, Tensor? sink, int block, Tensor? lengths, "
    "float scale) -> (Tensor, Tensor)"
)
FROM_80 = cuda_from(8, 0)
SM90 = cuda_exactly((9, 0))

# What makes an engine, by function and backend: a plan keeps what a call makes for itself.
ENGINES: dict[str, dict[str, Make]] = {
    name: {
        "triton": Triton,
        "flashmla": FlashMLARows if name in ("sparse_attention", "prefill_attention") else FlashMLAPages,
        "flashinfer": flashinfer_engine,
        "inductor": partial(Blocks, run_compiled),
        "eager": partial(Blocks, run_eagerly),
    }
    for name in ("sparse_attention", "paged_attention", "decode_attention", "prefill_attention")
}


def _attention(name: str, schema: str, call: Callable[..., Pair], mla: Implementation, rows_alone: bool) -> None:
    engines = ENGINES[name]
    own = Adaptive if name == "decode_attention" else Implementation
    fits, there = (flashinfer_mla.takes_rows, SM90) if rows_alone else (flashinfer_mla.takes_pages, flashinfer_mla.DEVICES)
    ops.define(name, schema, _fake_pair)
    dispatch.register(
        f"attention.{name}",
        own("triton", FROM_80, takes, partial(call, engines["triton"]), verified=("SM90",)),
        mla,
        Implementation(
            "flashinfer",
            there,
            fits,
            partial(call, engines["flashinfer"]),
            batch_invariant=False,
            graph_safe=False,
            library=flashinfer.LIBRARY,
            symbol=flashinfer_mla.MLA,
            verified=("SM90",),
            unclaimed=(("mean", "it keeps the parts of a split in bf16, and a mean of parts is rounded twice"),),
        ),
        *_everywhere(call, engines["inductor"], engines["eager"]),
    )


def _everywhere(
    call: Callable[..., Any], inductor: Any, eager: Any, *, products: bool = True, batch_invariant: bool = False
) -> tuple[Implementation, Implementation]:  # fmt: skip
    """BLAS does nearly all of the work, and adds in an order that depends on a product's shape, which is one where batch invariance is
    demanded. Compiled bodies gain a fifth, and take seconds for each number of heads and width of a block. They have another exponential
    for what a vector does not fill, which the number of tokens decides, and which shows where sums cancel."""
    options: dict[str, Any] = {"device": any_device, "arguments": any_arguments, "verified": ("cpu", "SM90")}
    own = Adaptive if products else Implementation
    return (
        own("eager", call=partial(call, eager), **options),
        Implementation("inductor", call=partial(call, inductor), batch_invariant=batch_invariant, **options),
    )


def _flashmla(call: Callable[..., Pair], name: str) -> Implementation:
    """Over rows a query has one program whatever the batch; over pages the batch decides how many it has."""
    rows = ENGINES[name]["flashmla"] is FlashMLARows
    symbol = flashmla.SPARSE_FORWARD if rows else flashmla.SPARSE_DECODE
    return Implementation(
        "flashmla",
        flashmla.LIBRARY.devices,
        flashmla.takes_heads if rows else flashmla.takes_pages,
        partial(call, ENGINES[name]["flashmla"]),
        batch_invariant=rows,
        preferred=flashmla.takes_as_given if name == "sparse_attention" else None,
        library=flashmla.LIBRARY,
        symbol=symbol,
        verified=("SM90",),
    )


_attention("sparse_attention", SPARSE, _sparse, _flashmla(_sparse, "sparse_attention"), True)
_attention("paged_attention", PAGED, _paged, _flashmla(_paged, "paged_attention"), False)
_attention("decode_attention", PAGED, _decode, _flashmla(_decode, "decode_attention"), False)
_attention("prefill_attention", PAGED, _paged, _flashmla(_paged, "prefill_attention"), False)

ops.define("draft_attention", DRAFT, _fake_pair)
dispatch.register(
    "attention.draft_attention",
    Implementation("triton", FROM_80, takes, _triton_draft, verified=("SM90",)),
    *_everywhere(_draft, partial(Blocks, run_compiled), partial(Blocks, run_eagerly)),
)
ops.define("merge_splits", "(Tensor outputs, Tensor lses, Tensor? sink) -> (Tensor, Tensor)", _fake_merge)
dispatch.register(
    "attention.merge_splits",
    Implementation("triton", FROM_80, takes_parts, _triton_merge, verified=("SM90",)),
    *_everywhere(_merge, run_compiled, run_eagerly, products=False),
)
ops.define(
    "window_indices",
    "(Tensor positions, int window) -> Tensor",
    lambda positions, window, impl=None: positions.new_empty((positions.shape[0], window), dtype=torch.int32),
)
dispatch.register("attention.window_indices", *_everywhere(_window, run_compiled, run_eagerly, products=False, batch_invariant=True)[::-1])
