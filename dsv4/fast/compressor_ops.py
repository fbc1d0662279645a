"""The operators of `compressor`, and what implements them.

Where an entry's tokens lie is found by a few operations on the requests, which cost less than a compiled graph's call; the entries
themselves are one graph, over as many rows as there are entries where that number can be had without waiting. The triton row of `compress`
and of `compress_and_store` is one launch for the entries, and one for the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import compressor_bodies as bodies
from dsv4.fast import dispatch, kv_bodies, ops, product_bodies
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Adaptive, Implementation, any_arguments, any_device, cuda_from
from dsv4.formats import KV_LAYOUTS, fp32

Run = Callable[..., Any]

PRODUCT_ROWS, PRODUCT_COLUMNS = 24, 256  # of one product: a fixed shape, so that BLAS adds in one order
MOST_PAIRS = 1024  # of an entry: what one program holds


def _rows(tokens: Any, ratio: int, requests: Any) -> Any:
    return torch.sym_min(tokens, tokens // ratio + requests)


def _project(x: Tensor, wkv: Tensor, wgate: Tensor) -> tuple[Tensor, Tensor]:
    """Products in fp64; where batch invariance is demanded of one shape, filled up with zeros: a row's bits then do not depend on how many
    there are.
    """
    tokens, hidden = x.shape
    if not dispatch.batch_invariant():
        return product_bodies.products(x, wkv), product_bodies.products(x, wgate)
    rows = x.new_zeros(-(-tokens // PRODUCT_ROWS), PRODUCT_ROWS, hidden)
    rows.view(-1, hidden)[:tokens] = x
    blocks = rows.transpose(1, 2).contiguous().to(torch.float64)
    return _product(blocks, wkv, tokens), _product(blocks, wgate, tokens)


def _product(blocks: Tensor, weight: Tensor, tokens: int) -> Tensor:
    """fp32 [tokens, width], no -0. A tile of the weight is widened where it stays in the cache, and takes all blocks before the next."""
    width, hidden = weight.shape
    wide = min(width, PRODUCT_COLUMNS)
    tile = blocks.new_zeros(wide, hidden)
    product = blocks.new_empty(wide, PRODUCT_ROWS)
    result = blocks.new_empty(tokens, width, dtype=torch.float32)
    for column in range(0, width, PRODUCT_COLUMNS):
        columns = min(wide, width - column)
        tile[:columns] = weight[column : column + columns]
        for row, block in zip(range(0, tokens, PRODUCT_ROWS), blocks, strict=True):
            torch.mm(tile, block, out=product)
            part = result[row : row + PRODUCT_ROWS, column : column + columns]
            part.copy_(product[:columns, : len(part)].T)
    return result.add_(0.0)


def _plan(starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, state_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    like = starts.new_empty(_rows(tokens, ratio, len(starts)), dtype=torch.int32)
    if not len(starts) or not len(like):
        return like.fill_(-1), like.long()
    requests, entries = bodies.plan(bodies.spans(starts, cu_seqlens, tokens, state_rows, None), ratio, like)
    return requests.int(), entries


def _compress(
    run: Run, values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    ratio: int, overlap: bool, ape: Tensor | None, state_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    given = {"ape": ape, "state_rows": state_rows}
    requests, entries, pooled = _step(run, values, scores, state, starts, cu_seqlens, given, ratio=ratio, overlap=overlap)
    return pooled, requests, entries


def _store(
    run: Run, values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    weight: Tensor, table: Tensor, pages: Tensor, slots: Tensor,
    ratio: int, overlap: bool, ape: Tensor | None, eps: float, layout: str, page_size: int, amax_floor: str, state_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    floor, zeroes = kv_bodies.floor_of(KV_LAYOUTS[layout], amax_floor, values.device)
    given = {"ape": ape, "state_rows": state_rows, "weight": weight[None], "table": table, "floor": floor}
    options: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "eps": fp32(eps), "layout": layout, "zeroes": zeroes}
    requests, entries, latents, *records = _step(run, values, scores, state, starts, cu_seqlens, given, **options)
    for part in records:
        there = torch.where(requests[: len(part)] >= 0, slots[: len(part)], -1)
        kv_bodies.put(part, pages, there, KV_LAYOUTS[layout], page_size)
    return latents, requests, entries


def _step(
    run: Run, values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor, given: dict[str, Tensor | None],
    *, ratio: int, overlap: bool, **store: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Requests, entries and rows of the plan, records of those that were computed, if any were; and the state with these tokens."""
    (tokens, width), requests, (states, ring, _) = values.shape, len(starts), state.shape
    rows = _rows(tokens, ratio, requests)
    entries, writes = _most(starts, cu_seqlens, ratio, tokens, rows, ring) if tokens and requests and states else (0, 0)
    if given["state_rows"] is None:
        given["state_rows"] = torch.arange(requests, dtype=torch.int32, device=starts.device)
    flat = state.flatten(0, 1) if ring and states else state.new_zeros(1, state.shape[2])
    like = starts.new_empty(entries, dtype=torch.int32)
    sizes = starts.new_full((), states), starts.new_full((), ring)
    result = like, like.long(), values.new_empty(0, width // (2 if overlap else 1), dtype=torch.bfloat16)
    if entries:
        more = {name: tensor for name, tensor in given.items() if tensor is not None}
        options = {"names": tuple(more), "ratio": ratio, "overlap": overlap, "remembers": ring > 0}
        kept = starts.new_empty(writes or 1, dtype=torch.int32)
        result = run(bodies.step_body, values, scores, flat, starts, cu_seqlens, like, kept, *sizes, *more.values(), **options, **store)
        if ring:
            *result, own, place, content = result
    elif writes:
        of = bodies.spans(starts, cu_seqlens, tokens, given["state_rows"], sizes[0])
        own, place, content = bodies.state_writes(of, flat, values, scores, *sizes, starts.new_empty(writes))
    if writes:
        state.index_put_((own, place), content)
    return *(_padded(part, rows, fill) for part, fill in zip(result[:3], (-1, -1, 0), strict=True)), *result[3:]


def _most(starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, rows: int, ring: int) -> tuple[int, int]:
    """Upper bounds of how many entries there are and how many tokens go into rings: close where counting them waits for nothing."""
    kept = len(starts) * ring
    if starts.device.type != "cpu":
        return rows, kept
    lengths = cu_seqlens.diff().clamp_(min=0)
    done = (starts + lengths) // ratio - starts // ratio
    return min(int(done.clamp_(min=0).sum()), rows), min(int(lengths.sum()), kept)  # offsets out of order name a token twice


def _padded(part: Tensor, rows: int, fill: int) -> Tensor:
    missing = rows - len(part)
    return torch.cat([part, part.new_full((missing, *part.shape[1:]), fill)]) if missing else part


def _triton(name: str) -> Callable[..., Any]:
    """Imported at the first call, for Triton is not everywhere."""
    run: Callable[..., Any] = getattr(import_module("dsv4.fast.kernels.compress"), name)
    return run


def _triton_project(x: Tensor, wkv: Tensor, wgate: Tensor) -> tuple[Tensor, Tensor]:
    from dsv4.fast.kernels.gate import gate_logits

    if not x.numel() or not wkv.numel():
        return _fake_project(x, wkv, wgate, new=x.new_zeros)
    rows = x.contiguous()
    return gate_logits(rows, wkv.contiguous()), gate_logits(rows, wgate.contiguous())


def _triton_plan(starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, state_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = _rows(tokens, ratio, len(starts))
    if not rows:
        return _fake_plan(starts, cu_seqlens, ratio, tokens, state_rows)
    requests, entries, _ = _triton("plan")(*_batch(starts, cu_seqlens), ratio, tokens, rows, _flat_rows(state_rows))
    return requests, entries


def _triton_compress(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    ratio: int, overlap: bool, ape: Tensor | None, state_rows: Tensor | None, **store: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = _rows(len(values), ratio, len(starts))
    if not rows:
        return _fake_compress(values, scores, state, starts, cu_seqlens, ratio, overlap)
    options = {"ratio": ratio, "overlap": overlap, "ape": ape, "state_rows": _flat_rows(state_rows)}
    result: tuple[Tensor, Tensor, Tensor] = _triton("compress")(
        values, scores, state, *_batch(starts, cu_seqlens), rows, **options, **store
    )
    return result


def _triton_store(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    weight: Tensor, table: Tensor, pages: Tensor, slots: Tensor,
    ratio: int, overlap: bool, ape: Tensor | None, eps: float, layout: str, page_size: int, amax_floor: str, state_rows: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    store = {
        "weight": weight, "table": table, "pages": pages, "slots": slots.contiguous(), "eps": fp32(eps), "layout": KV_LAYOUTS[layout],
        "page_size": page_size, "amax_floor": amax_floor,
    }  # fmt: skip
    return _triton_compress(values, scores, state, starts, cu_seqlens, ratio, overlap, ape, state_rows, **store)


def _batch(starts: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    return starts.contiguous(), cu_seqlens.contiguous()


def _flat_rows(state_rows: Tensor | None) -> Tensor | None:
    return None if state_rows is None else state_rows.contiguous()


def _both_bf16(arguments: Mapping[str, Any]) -> str | None:
    dtypes = {arguments[name].dtype for name in ("x", "wkv", "wgate")}
    return None if dtypes == {torch.bfloat16} else "takes weights of bf16, whose products with x are exact in fp32"


def _whole_pairs(arguments: Mapping[str, Any]) -> str | None:
    """Channels in pairs, all of an entry in one program, and a state whose words can be written where they are."""
    state, dim = arguments["state"], arguments["values"].shape[1] // (2 if arguments["overlap"] else 1)
    if dim % 2 or dim > 2 * MOST_PAIRS:
        return f"takes entries of an even number of channels, at most {2 * MOST_PAIRS}; got {dim}"
    if not state.is_contiguous() or state.data_ptr() % 8:
        return "takes a contiguous state that begins at a multiple of 8 bytes"
    return None


def _fake_project(
    x: Tensor, wkv: Tensor, wgate: Tensor, impl: str | None = None, new: Callable[..., Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    make = x.new_empty if new is None else new
    return make(x.shape[0], wkv.shape[0], dtype=torch.float32), make(x.shape[0], wkv.shape[0], dtype=torch.float32)


def _fake_plan(
    starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, state_rows: Tensor | None, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    rows = _rows(tokens, ratio, starts.shape[0])
    return starts.new_empty(rows, dtype=torch.int32), starts.new_empty(rows, dtype=torch.int64)


def _fake_compress(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor, ratio: int, overlap: bool, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _fake_plan(starts, cu_seqlens, ratio, values.shape[0], None)
    return values.new_empty(plan[0].shape[0], values.shape[1] // (2 if overlap else 1), dtype=torch.bfloat16), *plan


def _fake_store(
    values: Tensor, scores: Tensor, state: Tensor, starts: Tensor, cu_seqlens: Tensor,
    weight: Tensor, table: Tensor, pages: Tensor, slots: Tensor, ratio: int, overlap: bool, *_: Any, **__: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _fake_compress(values, scores, state, starts, cu_seqlens, ratio, overlap)


_TRITON = partial(Implementation, "triton", cuda_from(8, 0), verified=("SM90",))
_INDUCTOR = partial(Implementation, "inductor", any_device, any_arguments, verified=("cpu", "SM90"))
_EAGER = partial(Implementation, "eager", any_device, any_arguments, verified=("cpu", "SM90"))
_ADAPTIVE = partial(Adaptive, "eager", any_device, any_arguments, verified=("cpu", "SM90"))
_WINDOWS = "Tensor values, Tensor scores, Tensor(a!) state, Tensor starts, Tensor cu_seqlens"

ops.define("project", "(Tensor x, Tensor wkv, Tensor wgate) -> (Tensor, Tensor)", _fake_project)
dispatch.register("compressor.project", _TRITON(_both_bf16, _triton_project), _ADAPTIVE(_project))

ops.define(
    "compression_plan", "(Tensor starts, Tensor cu_seqlens, int ratio, int tokens, Tensor? state_rows) -> (Tensor, Tensor)", _fake_plan
)
dispatch.register("compressor.compression_plan", _TRITON(any_arguments, _triton_plan), _EAGER(_plan))

ops.define(
    "compress", f"({_WINDOWS}, int ratio, bool overlap, Tensor? ape, Tensor? state_rows) -> (Tensor, Tensor, Tensor)", _fake_compress
)
dispatch.register(
    "compressor.compress",
    _TRITON(_whole_pairs, _triton_compress),
    _INDUCTOR(partial(_compress, run_compiled)),
    _EAGER(partial(_compress, run_eagerly)),
)

ops.define(
    "compress_and_store",
    f"({_WINDOWS}, Tensor weight, Tensor table, Tensor(b!) pages, Tensor slots, int ratio, bool overlap, Tensor? ape, float eps, "
    "str layout, int page_size, str amax_floor, Tensor? state_rows) -> (Tensor, Tensor, Tensor)",
    _fake_store,
)
dispatch.register(
    "compressor.compress_and_store",
    _TRITON(_whole_pairs, _triton_store),
    _INDUCTOR(partial(_store, run_compiled)),
    _EAGER(partial(_store, run_eagerly)),
)
