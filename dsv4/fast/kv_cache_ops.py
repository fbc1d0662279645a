"""The operators of `kv_cache`, and what implements them.

The triton row of a store is one launch whatever the duplicates, up to 2048 rows; above, a small one before it finds the last row of each
slot. The inductor row compiles rows to records and back; records move by torch's own strided copies, which nothing compiled beats on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4 import kv_checks
from dsv4.fast import dispatch, ops
from dsv4.fast import kv_bodies as bodies
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from
from dsv4.formats import KV_LAYOUTS, fp32

Run = Callable[..., Any]
CONVERTED = 65536  # slots of a chunk of `_triton_convert`, at most: 64 MiB of bf16


def _empty_records(kv: Tensor, layout: str) -> Tensor:
    return kv.new_empty((kv.shape[0], KV_LAYOUTS[layout].token_bytes), dtype=torch.uint8)


def _quantize(run: Run, kv: Tensor, layout: str, amax_floor: str) -> Tensor:
    if not kv.shape[0]:
        return _empty_records(kv, layout)
    floor, zeroes = bodies.floor_of(KV_LAYOUTS[layout], amax_floor, kv.device)
    result: Tensor = run(bodies.quantize_body, kv, floor, layout=layout, zeroes=zeroes)
    return result


def _store(run: Run, kv: Tensor, pages: Tensor, slots: Tensor, layout: str, page_size: int, amax_floor: str) -> None:
    records = _apart(kv, pages) if kv.dtype == torch.uint8 else _quantize(run, kv, layout, amax_floor)
    bodies.put(records, pages, slots, KV_LAYOUTS[layout], page_size)


def _load(run: Run, pages: Tensor, slots: Tensor, layout: str, page_size: int) -> Tensor:
    chosen = KV_LAYOUTS[layout]
    shape = *slots.shape, chosen.dims
    if not slots.numel() or not pages.shape[0]:
        return pages.new_zeros(shape, dtype=torch.bfloat16)
    records, present = bodies.get(pages, slots.reshape(-1).long(), chosen, page_size)
    run = run_eagerly if chosen.scale == "unit" else run  # a cast, and not worth a graph
    result: Tensor = run(bodies.decode_body, records, present, layout=layout)
    return result.view(shape)


def _convert(run: Run, pages: Tensor, source: str, target: str, page_size: int, target_page_size: int) -> Tensor:
    have, want = KV_LAYOUTS[source], KV_LAYOUTS[target]
    if not pages.shape[0]:
        return pages.new_empty(0, want.page_bytes(target_page_size))
    records = bodies.all_records(pages, have, page_size)
    if not kv_checks.same_numbers(have, want):
        every = torch.ones(records.shape[0], dtype=torch.bool, device=pages.device)
        records = _quantize(run, run(bodies.decode_body, records, every, layout=source), target, "official")
    return bodies.paged(records, want, target_page_size)


def _norm_rope_store(
    run: Run, kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pages: Tensor, slots: Tensor,
    eps: float, layout: str, page_size: int, amax_floor: str,
) -> None:  # fmt: skip
    if not kv.shape[0]:
        return
    chosen = KV_LAYOUTS[layout]
    floor, zeroes = bodies.floor_of(chosen, amax_floor, kv.device)
    body, options = bodies.norm_rope_quantize_body, {"eps": fp32(eps), "layout": layout, "zeroes": zeroes}
    bodies.put(run(body, kv, weight[None], table, positions, floor, **options), pages, slots, chosen, page_size)


def _page_slots(run: Run, block_table: Tensor, requests: Tensor, indices: Tensor, page_size: int) -> Tensor:
    if not indices.shape[0] or not block_table.numel():
        return indices.new_full(indices.shape, -1, dtype=torch.int64)
    if run is run_eagerly:  # whole numbers need none of its precautions, which take as long as half of the work
        return bodies.page_slots_body(block_table, requests, indices, page_size=page_size)
    result: Tensor = run(bodies.page_slots_body, block_table, requests, indices, page_size=page_size)
    return result


def _kernel(name: str) -> Callable[..., Any]:
    """Imported at the first call, for Triton is not everywhere."""
    run: Callable[..., Any] = getattr(import_module("dsv4.fast.kernels.kv_cache"), name)
    return run


def _triton_quantize(kv: Tensor, layout: str, amax_floor: str) -> Tensor:
    records = _empty_records(kv, layout)
    if kv.shape[0]:
        _kernel("quantize")(kv, records, KV_LAYOUTS[layout], amax_floor)
    return records


def _triton_store(kv: Tensor, pages: Tensor, slots: Tensor, layout: str, page_size: int, amax_floor: str) -> None:
    if kv.shape[0] and pages.shape[0]:
        _kernel("store")(_apart(kv, pages), pages, slots, KV_LAYOUTS[layout], page_size, amax_floor)


def _apart(rows: Tensor, pages: Tensor) -> Tensor:
    """Rows that no store into the pages changes: a copy of those that lie in the same memory."""
    return rows.clone() if rows.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr() else rows


def _triton_load(pages: Tensor, slots: Tensor, layout: str, page_size: int) -> Tensor:
    shape = *slots.shape, KV_LAYOUTS[layout].dims
    if not slots.numel() or not pages.shape[0]:
        return pages.new_zeros(shape, dtype=torch.bfloat16)
    rows = pages.new_empty((slots.numel(), shape[-1]), dtype=torch.bfloat16)
    _kernel("load")(pages, slots.reshape(-1), rows, KV_LAYOUTS[layout], page_size)
    return rows.view(shape)


def _triton_convert(pages: Tensor, source: str, target: str, page_size: int, target_page_size: int) -> Tensor:
    """Records of one number format move in one launch. Others go through bf16, in chunks of whole target pages: at most 65536 slots
    (64 MiB), or one page if it is larger."""
    have, want, slots = KV_LAYOUTS[source], KV_LAYOUTS[target], pages.shape[0] * page_size
    size = -(-slots // target_page_size), want.page_bytes(target_page_size)
    if slots and kv_checks.same_numbers(have, want):
        result = pages.new_empty(size)
        _kernel("move")(pages, result, have, want, page_size, target_page_size)  # every byte
        return result
    result = pages.new_zeros(size)
    chunk = max(CONVERTED // target_page_size, 1) * target_page_size
    for first in range(0, slots, chunk):
        some = torch.arange(first, min(first + chunk, slots), device=pages.device)
        rows = _triton_load(pages, some, source, page_size)
        _kernel("fill")(rows, result[first // target_page_size :], want, target_page_size, "official")
    return result


def _triton_norm_rope_store(
    kv: Tensor, weight: Tensor, table: Tensor, positions: Tensor, pages: Tensor, slots: Tensor,
    eps: float, layout: str, page_size: int, amax_floor: str,
) -> None:  # fmt: skip
    if kv.shape[0] and pages.shape[0]:
        norm = {"weight": weight, "table": table, "positions": positions, "eps": fp32(eps)}
        _kernel("store")(kv, pages, slots, KV_LAYOUTS[layout], page_size, amax_floor, **norm)


def _triton_page_slots(block_table: Tensor, requests: Tensor, indices: Tensor, page_size: int) -> Tensor:
    slots = indices.new_empty(indices.shape, dtype=torch.int64)
    if indices.shape[0]:
        _kernel("page_slots")(block_table, requests, indices, slots, page_size)
    return slots


def _fake_convert(pages: Tensor, source: str, target: str, page_size: int, target_page_size: int, impl: str | None = None) -> Tensor:
    count = (pages.shape[0] * page_size + target_page_size - 1) // target_page_size
    return pages.new_empty((count, KV_LAYOUTS[target].page_bytes(target_page_size)))


def _register(
    name: str, schema: str, fake: Callable[..., Any], triton: Callable[..., Any], call: Callable[..., Any], *, compiled_first: bool = True
) -> None:
    rows = (
        Implementation("inductor", any_device, any_arguments, partial(call, run_compiled), verified=("cpu", "SM90")),
        Implementation("eager", any_device, any_arguments, partial(call, run_eagerly), verified=("cpu", "SM90")),
    )
    ops.define(name, schema, fake)
    on_cuda = Implementation("triton", cuda_from(8, 0), any_arguments, triton, verified=("SM90",))
    dispatch.register(f"kv_cache.{name}", on_cuda, *(rows if compiled_first else rows[::-1]))


_register(
    "quantize_kv",
    "(Tensor kv, str layout, str amax_floor) -> Tensor",
    lambda kv, layout, amax_floor, impl=None: _empty_records(kv, layout),
    _triton_quantize,
    _quantize,
)
_register(
    "store_kv",
    "(Tensor kv, Tensor(a!) pages, Tensor slots, str layout, int page_size, str amax_floor) -> ()",
    lambda *_, **__: None,
    _triton_store,
    _store,
)
_register(
    "load_kv",
    "(Tensor pages, Tensor slots, str layout, int page_size) -> Tensor",
    lambda pages, slots, layout, page_size, impl=None: pages.new_empty((*slots.shape, KV_LAYOUTS[layout].dims), dtype=torch.bfloat16),
    _triton_load,
    _load,
)
_register(
    "convert_layout",
    "(Tensor pages, str source, str target, int page_size, int target_page_size) -> Tensor",
    _fake_convert,
    _triton_convert,
    _convert,
)
_register(
    "norm_rope_store_kv",
    "(Tensor kv, Tensor weight, Tensor table, Tensor positions, Tensor(a!) pages, Tensor slots, float eps, str layout, int page_size, "
    "str amax_floor) -> ()",
    lambda *_, **__: None,
    _triton_norm_rope_store,
    _norm_rope_store,
)
_register(
    "page_slots",
    "(Tensor block_table, Tensor requests, Tensor indices, int page_size) -> Tensor",
    lambda block_table, requests, indices, page_size, impl=None: indices.new_empty(indices.shape, dtype=torch.int64),
    _triton_page_slots,
    _page_slots,
    compiled_first=False,  # a dozen small operations take less than the way into a graph
)
