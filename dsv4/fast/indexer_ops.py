"""The operators of `indexer` that make codes, keep keys and compute logits, and what implements them.

Operators trade codes as uint8. Logits have one layout, whatever computes them: on CUDA their rows are `pitch` numbers apart, as DeepGEMM
lays them out, so that its result is handed on as it is. On a CPU logits are BLAS products and have no compiled form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, kv_bodies, ops
from dsv4.fast import indexer_bodies as bodies
from dsv4.fast.adapters import deepgemm_mqa as deepgemm
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_exactly, cuda_from
from dsv4.formats import INDEX_LAYOUTS, fp32

Run = Callable[..., Any]

MOST_HEADS, MOST_NUMBERS = 128, 32768  # heads and numbers of a token, in one product


def _scale_dtype(format: str) -> torch.dtype:
    return torch.float32 if INDEX_LAYOUTS[format].scale == "fp32" else torch.int32


def _empty_rows(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((*x.shape[:-1], INDEX_LAYOUTS[format].data_bytes(x.shape[-1])), dtype=torch.uint8)
    return codes, x.new_empty(x.shape[:-1], dtype=_scale_dtype(format))


def empty_logits(like: Tensor, tokens: Any, entries: Any, precision: str) -> Tensor:
    """Memory for logits, with the strides that every implementation's result has."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if like.device.type != "cuda":
        return like.new_empty((tokens, entries), dtype=dtype)
    return like.new_empty_strided((tokens, entries), (deepgemm.pitch(entries), 1), dtype=dtype)


def _constant(q: Tensor) -> float:
    return fp32((q.shape[1] * q.shape[2]) ** -0.5)


def _fake_queries(q: Tensor, weights: Tensor, table: Tensor, positions: Tensor, format: str, hadamard: bool, amax_floor: str, ties: str,
                  zero_sign: str, weight_dtype: str, impl: str | None = None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    codes, scales = _empty_rows(q, format)
    dtype = torch.bfloat16 if weight_dtype == "bf16" else torch.float32
    return codes, scales if format == "fp4" else scales.new_empty(0), weights.new_empty(weights.shape, dtype=dtype)


def _queries(
    run: Run, q: Tensor, weights: Tensor, table: Tensor, positions: Tensor, format: str, hadamard: bool, amax_floor: str, ties: str,
    zero_sign: str, weight_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not q.numel():
        return _fake_queries(q, weights, table, positions, format, hadamard, amax_floor, ties, zero_sign, weight_dtype)
    tokens, heads, dim = q.shape
    of_heads = positions[:, None].expand(tokens, heads).reshape(-1)
    rows = q.reshape(-1, dim)
    codes, scales = bodies.rows_of(run, rows, table, of_heads, None, 0.0, format, hadamard, amax_floor, ties, zero_sign)
    factors = weights.float() * _constant(q)
    codes, scales = codes.view(tokens, heads, -1), scales.view(tokens, heads)
    if format == "fp8":
        return codes, scales.new_empty(0), factors * scales
    return codes, scales, factors.bfloat16() if weight_dtype == "bf16" else factors


def _triton_queries(
    q: Tensor, weights: Tensor, table: Tensor, positions: Tensor, format: str, hadamard: bool, amax_floor: str, ties: str, zero_sign: str,
    weight_dtype: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    codes, scales, factors = _fake_queries(q, weights, table, positions, format, hadamard, amax_floor, ties, zero_sign, weight_dtype)
    if q.numel():
        given = {"factors": weights, "scaled_factors": factors, "constant": _constant(q)}
        options = {"format": format, "hadamard": hadamard, "amax_floor": amax_floor, "ties": ties, "zero_sign": zero_sign}
        _kernel("index_rows", "run")(q, table, positions, codes, scales, **options, **given)
    return codes, scales, factors


def _keys(
    run: Run, x: Tensor, table: Tensor, positions: Tensor, weight: Tensor | None, eps: float, hadamard: bool, format: str, amax_floor: str,
    ties: str, zero_sign: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not x.numel():
        return _empty_rows(x, format)
    return bodies.rows_of(run, x, table, positions, weight, fp32(eps), format, hadamard, amax_floor, ties, zero_sign)


def _triton_keys(
    x: Tensor, table: Tensor, positions: Tensor, weight: Tensor | None, eps: float, hadamard: bool, format: str, amax_floor: str, ties: str,
    zero_sign: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    codes, scales = _empty_rows(x, format)
    if x.numel():
        options = {"format": format, "hadamard": hadamard, "amax_floor": amax_floor, "ties": ties, "zero_sign": zero_sign}
        _kernel("index_rows", "run")(x, table, positions, codes, scales, weight=weight, eps=fp32(eps), **options)
    return codes, scales


def _store(codes: Tensor, scales: Tensor, pages: Tensor, slots: Tensor, format: str, page_size: int) -> None:
    records = torch.cat([codes, scales.contiguous()[:, None].view(torch.uint8)], 1)
    kv_bodies.put(records, pages, slots, bodies.key_layout(format, _dim(codes, format)), page_size)


def _triton_store(codes: Tensor, scales: Tensor, pages: Tensor, slots: Tensor, format: str, page_size: int) -> None:
    if codes.numel() and pages.shape[0]:
        mine, theirs = (part.clone() if _shared(part, pages) else part for part in (codes, scales))
        _kernel("index_cache", "store")(mine, theirs, pages, slots, page_size)


def _shared(part: Tensor, pages: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr()


def _empty_keys(pages: Tensor, slots: Tensor, format: str, page_size: int, dim: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    codes = pages.new_empty(slots.shape[0], INDEX_LAYOUTS[format].data_bytes(dim))
    return codes, pages.new_empty(slots.shape[0], dtype=_scale_dtype(format))


def _load(pages: Tensor, slots: Tensor, format: str, page_size: int, dim: int) -> tuple[Tensor, Tensor]:
    if not len(slots) or not len(pages):
        codes, scales = _empty_keys(pages, slots, format, page_size, dim)
        return codes.zero_(), scales.zero_()
    layout = bodies.key_layout(format, dim)
    records, present = kv_bodies.get(pages, slots.long(), layout, page_size)
    parts = records.masked_fill(~present[:, None], 0).split([layout.data_bytes, layout.scale_bytes], 1)
    codes, scales = (part.clone(memory_format=torch.contiguous_format) for part in parts)  # of one record, too, a memory each
    return codes, scales.view(_scale_dtype(format))[:, 0]


def _triton_load(pages: Tensor, slots: Tensor, format: str, page_size: int, dim: int) -> tuple[Tensor, Tensor]:
    codes, scales = _empty_keys(pages, slots, format, page_size, dim)
    if not len(pages):
        return codes.zero_(), scales.zero_()
    if len(slots):
        _kernel("index_cache", "load")(pages, slots, codes, scales, page_size)
    return codes, scales


def _dim(codes: Tensor, format: str) -> int:
    return codes.shape[-1] * 8 // INDEX_LAYOUTS[format].bits


def _fake_logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None, ends: Tensor, precision: str,
    impl: str | None = None,
) -> Tensor:  # fmt: skip
    return empty_logits(q, q.shape[0], k.shape[0], precision)


def _logits(
    run: Callable[..., None], q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None,
    ends: Tensor, precision: str,
) -> Tensor:  # fmt: skip
    result = _fake_logits(q, q_scales, weights, k, k_scales, starts, ends, precision)
    if result.numel():
        run(q, q_scales, weights, k, k_scales, starts, ends, result)
    return result


def _deepgemm_logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None, ends: Tensor, precision: str
) -> Tensor:
    if not q.numel() or not len(k):
        return _fake_logits(q, q_scales, weights, k, k_scales, starts, ends, precision)
    result = deepgemm.mqa_logits(q, q_scales, weights, k, k_scales, starts, ends, narrow=precision == "bf16")
    _clean(result, starts, ends)
    return result


def _clean(logits: Tensor, starts: Tensor | None, ends: Tensor, **table: Any) -> None:
    """Minus infinity where a library leaves what it likes. On the CPU, for libraries that are made up in tests."""
    if logits.is_cuda:
        _kernel("index_clean", "clean")(logits, starts, ends, **table)
        return
    entries = torch.arange(logits.shape[1], device=logits.device)
    unseen = entries >= ends[:, None]
    if starts is not None:
        unseen = unseen | (entries < starts[:, None])
    if table:
        each = table["requests"].repeat_interleave(len(entries))
        slots = kv_bodies.page_slots_body(table["block_table"], each, entries.repeat(len(logits)), page_size=table["page_size"])
        unseen = unseen | ((slots < 0) | (slots >= table["pages"] * table["page_size"])).view(logits.shape)
    logits.masked_fill_(unseen, -torch.inf)


def _fake_paged(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, page_size: int,
    width: int, precision: str, impl: str | None = None,
) -> Tensor:  # fmt: skip
    return empty_logits(q, q.shape[0], width, precision)


def _paged(
    run: Callable[..., None], q: Tensor, q_scales: Tensor | None, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor,
    ends: Tensor, page_size: int, width: int, precision: str,
) -> Tensor:  # fmt: skip
    result = empty_logits(q, len(q), width, precision)
    if result.numel() and (not len(pages) or not block_table.numel()):
        return result.fill_(-torch.inf)
    if result.numel():
        run(q, q_scales, weights, pages, block_table, requests, ends, page_size, result)
    return result


def _deepgemm_paged(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, page_size: int,
    width: int, precision: str,
) -> Tensor:  # fmt: skip
    if not q.numel() or not width:
        return empty_logits(q, len(q), width, precision)
    result = deepgemm.paged_mqa_logits(q, weights, pages, block_table, requests, ends, page_size, width)
    _clean(result, None, ends, block_table=block_table, requests=requests, page_size=page_size, pages=len(pages))
    return result


def _kernel(stem: str, name: str) -> Callable[..., Any]:
    """Imported at the first call, for Triton is not everywhere."""
    run: Callable[..., Any] = getattr(import_module(f"dsv4.fast.kernels.{stem}"), name)
    return run


def triton_fits(arguments: Mapping[str, Any]) -> str | None:
    """What one product of the Triton kernels holds."""
    q = arguments["q"]
    heads, dim = q.shape[1], q.shape[2] * (1 if arguments["q_scales"] is None else 2)
    if heads <= MOST_HEADS and heads * dim <= MOST_NUMBERS:
        return None
    return f"takes at most {MOST_HEADS} heads and {MOST_NUMBERS} numbers of a token; got {heads} heads of {dim}"


def _triton_logits(*arguments: Any) -> None:
    _kernel("index_logits", "logits")(*arguments)


def _triton_paged(*arguments: Any) -> None:
    _kernel("index_logits", "paged_logits")(*arguments)


def _codes_elsewhere(arguments: Mapping[str, Any]) -> str | None:
    """Where inductor compiles for CUDA, a division by 448 becomes a product with its reciprocal, an ulp beside it here and there."""
    if arguments["format"] != "fp8" or not arguments["positions"].is_cuda:
        return None
    return "on CUDA inductor divides by a product with the reciprocal: not exact"


_TRITON = partial(Implementation, "triton", cuda_from(8, 0), verified=("SM90",))
_INDUCTOR = partial(Implementation, "inductor", any_device, _codes_elsewhere, verified=("cpu",))
_EAGER = partial(Implementation, "eager", any_device, any_arguments, verified=("cpu", "SM90"))
_DEEPGEMM = partial(Implementation, "deepgemm", library=deepgemm.LIBRARY, verified=("SM90",))
QUERIES = "Tensor q, Tensor? q_scales, Tensor weights"
KEYS = "Tensor k, Tensor k_scales"
_QUANTISER = "str amax_floor, str ties, str zero_sign"

ops.define(
    "index_queries",
    f"(Tensor q, Tensor weights, Tensor table, Tensor positions, str format, bool hadamard, {_QUANTISER}, str weight_dtype) "
    "-> (Tensor, Tensor, Tensor)",
    _fake_queries,
)
dispatch.register(
    "indexer.index_queries",
    _TRITON(any_arguments, _triton_queries),
    _INDUCTOR(partial(_queries, run_compiled)),
    _EAGER(partial(_queries, run_eagerly)),
)
ops.define(
    "index_keys",
    f"(Tensor x, Tensor table, Tensor positions, Tensor? weight, float eps, bool hadamard, str format, {_QUANTISER}) -> (Tensor, Tensor)",
    lambda x, table, positions, weight, eps, hadamard, format, *_, **__: _empty_rows(x, format),
)
dispatch.register(
    "indexer.index_keys",
    _TRITON(any_arguments, _triton_keys),
    _INDUCTOR(partial(_keys, run_compiled)),
    _EAGER(partial(_keys, run_eagerly)),
)
ops.define(
    "store_index_keys",
    "(Tensor codes, Tensor scales, Tensor(a!) pages, Tensor slots, str format, int page_size) -> ()",
    lambda *_, **__: None,
)
dispatch.register("indexer.store_index_keys", _TRITON(any_arguments, _triton_store), _EAGER(_store))
ops.define("load_index_keys", "(Tensor pages, Tensor slots, str format, int page_size, int dim) -> (Tensor, Tensor)", _empty_keys)
dispatch.register("indexer.load_index_keys", _TRITON(any_arguments, _triton_load), _EAGER(_load))
ops.define("index_logits", f"({QUERIES}, {KEYS}, Tensor? starts, Tensor ends, str precision) -> Tensor", _fake_logits)
dispatch.register(
    "indexer.index_logits",
    _DEEPGEMM(deepgemm.DEVICES, deepgemm.mqa_fits, _deepgemm_logits, symbol=deepgemm.MQA),
    _TRITON(triton_fits, partial(_logits, _triton_logits)),
    _EAGER(partial(_logits, bodies.logits)),
)
ops.define(
    "paged_index_logits",
    f"({QUERIES}, Tensor pages, Tensor block_table, Tensor requests, Tensor ends, int page_size, int width, str precision) -> Tensor",
    _fake_paged,
)
dispatch.register(
    "indexer.paged_index_logits",
    _DEEPGEMM(cuda_exactly((9, 0)), deepgemm.paged_mqa_fits, _deepgemm_paged, symbol=deepgemm.PAGED_MQA),
    _TRITON(triton_fits, partial(_paged, _triton_paged)),
    _EAGER(partial(_paged, bodies.paged_logits)),
)
