"""The operators of `indexer` that select: best entries, blocks, and both from queries and keys, a chunk of queries at a time.

Selection is exact everywhere, so all rows of a table give the same bits, but for the order that nobody promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, ops
from dsv4.fast import indexer_bodies as bodies
from dsv4.fast.adapters import deepgemm_mqa as deepgemm
from dsv4.fast.adapters import flashinfer
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from
from dsv4.fast.indexer_ops import KEYS, QUERIES, triton_fits
from dsv4.indexer_checks import queries_at_a_time

Run = Callable[..., Any]
Impls = tuple[str, str]  # of the logits and of what follows

MOST_PICKS = 8192  # of a token, in Triton's kernel


def _fake_topk(
    logits: Tensor, k: int, ends: Tensor | None, starts: Tensor | None, order: str, block_table: Tensor | None, requests: Tensor | None,
    page_size: int, impl: str | None = None,
) -> Tensor:  # fmt: skip
    return logits.new_empty((logits.shape[0], k), dtype=torch.int32)


def _topk(
    run: Callable[..., Tensor], logits: Tensor, k: int, ends: Tensor | None, starts: Tensor | None, order: str, block_table: Tensor | None,
    requests: Tensor | None, page_size: int,
) -> Tensor:  # fmt: skip
    if not logits.numel() or (block_table is not None and not block_table.numel()):
        return logits.new_full((len(logits), k), -1, dtype=torch.int32)
    return run(logits, k, ends, starts, order, block_table, requests, page_size)


def _flashinfer_topk(
    logits: Tensor, k: int, ends: Tensor | None, starts: Tensor | None, order: str, block_table: Tensor | None, requests: Tensor | None,
    page_size: int,
) -> Tensor:  # fmt: skip
    """FlashInfer takes NaN for the largest score and -0 for less than 0, and counts minus infinity: one pass before it, two after it."""
    tokens, n = logits.shape
    first = None if starts is None else starts.clamp(0, n).int()
    past = ends.clamp(0, n).int() if ends is not None else torch.full((tokens,), n, dtype=torch.int32, device=logits.device)
    lengths = past if first is None else (past - first).clamp(min=0)
    picks = flashinfer.top_k(_kernel("plain_scores")(logits), lengths, first, k)
    result: Tensor = _kernel("finish")(picks, logits, ends, starts, order, block_table, requests, page_size)
    return result


def _flashinfer_fits(arguments: Mapping[str, Any]) -> str | None:
    logits, k = arguments["logits"], arguments["k"]
    if logits.dtype != torch.float32 or logits.stride(-1) != 1 or k > flashinfer.MOST_PICKS:
        dtype = str(logits.dtype).removeprefix("torch.")
        return f"takes fp32 scores next to each other, and at most {flashinfer.MOST_PICKS} picks; got {dtype} and {k}"
    return None


def _fake_blocks(logits: Tensor, ends: Tensor, block: int, count: int, impl: str | None = None) -> Tensor:
    return logits.new_empty((logits.shape[0], torch.sym_min(count, (logits.shape[1] + block - 1) // block)), dtype=torch.int32)


def _blocks(run: Callable[..., Tensor], logits: Tensor, ends: Tensor, block: int, count: int) -> Tensor:
    empty = _fake_blocks(logits, ends, block, count)
    return run(logits, ends, bodies.block_of_row(block, logits.shape[1]), empty.shape[1]) if empty.numel() else empty


def _triton_restrict(logits: Tensor, blocks: Tensor, block: int) -> Tensor:
    result = _like(logits)
    if result.numel():
        source, n = logits if logits.stride(1) == 1 else logits.contiguous(), logits.shape[1]
        _kernel("restrict", "index_blocks")(source, bodies.kept_blocks(blocks, -(-n // block)), result, bodies.block_of_row(block, n))
    return result


def _restrict(logits: Tensor, blocks: Tensor, block: int) -> Tensor:
    return bodies.restrict(logits, blocks, bodies.block_of_row(block, logits.shape[1])) if logits.numel() else _like(logits)


def _like(logits: Tensor, *_: Any, **__: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _entries(
    impls: Impls, q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, ends: Tensor, picks: int,
    precision: str, order: str, candidates: Tensor | None, block: int, chunk: int, budget_bytes: int,
) -> Tensor:  # fmt: skip
    of_logits, of_picks = impls
    restricting = "eager" if of_picks == "inductor" else of_picks
    result = ends.new_empty((len(q), picks), dtype=torch.int32)
    for part in _chunks(q, k, chunk, budget_bytes):
        scores = _scored(q, q_scales, weights, k, k_scales, ends, precision, part, of_logits)
        if candidates is not None:
            scores = torch.ops.dsv4.restrict_to_blocks.default(scores, candidates[part], block, restricting)
        result[part] = torch.ops.dsv4.select_topk.default(scores, picks, ends[part], None, order, None, None, 0, of_picks)
    return result


def _candidates(
    impls: Impls, q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, ends: Tensor, precision: str,
    block: int, count: int, chunk: int, budget_bytes: int,
) -> Tensor:  # fmt: skip
    of_logits, of_blocks = impls
    result = ends.new_empty((len(q), min(count, -(-len(k) // block))), dtype=torch.int32)
    for part in _chunks(q, k, chunk, budget_bytes):
        scores = _scored(q, q_scales, weights, k, k_scales, ends, precision, part, of_logits)
        result[part] = torch.ops.dsv4.candidate_blocks.default(scores, ends[part], block, count, of_blocks)
    return result


def _chunks(q: Tensor, k: Tensor, chunk: int, budget_bytes: int) -> list[slice]:
    step = queries_at_a_time(len(k), chunk, budget_bytes)
    return [slice(first, first + step) for first in range(0, len(q), step)]


def _scored(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, ends: Tensor, precision: str, part: slice, impl: str
) -> Tensor:
    scales = None if q_scales is None else q_scales[part]
    logits: Tensor = torch.ops.dsv4.index_logits.default(q[part], scales, weights[part], k, k_scales, None, ends[part], precision, impl)
    return logits


def _fake_candidates(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, ends: Tensor, precision: str, block: int, count: int,
    *_: Any, **__: Any,
) -> Tensor:  # fmt: skip
    return ends.new_empty((q.shape[0], torch.sym_min(count, (k.shape[0] + block - 1) // block)), dtype=torch.int32)


def _kernel(name: str, module: str = "index_select") -> Callable[..., Any]:
    """Imported at the first call, for Triton is not everywhere."""
    run: Callable[..., Any] = getattr(import_module(f"dsv4.fast.kernels.{module}"), name)
    return run


def _few_picks(arguments: Mapping[str, Any]) -> str | None:
    k = arguments["picks"] if "picks" in arguments else arguments["k"]
    return None if k <= MOST_PICKS else f"takes at most {MOST_PICKS} picks of a token; got {k}"


def _few_blocks(arguments: Mapping[str, Any]) -> str | None:
    entries = arguments["logits"].shape[1] if "logits" in arguments else arguments["k"].shape[0]
    return _few_picks({"picks": min(arguments["count"], -(-entries // arguments["block"]))})


def _both(first: dispatch.ArgumentRule, second: dispatch.ArgumentRule) -> dispatch.ArgumentRule:
    return lambda arguments: first(arguments) or second(arguments)


def _triton_topk(*arguments: Any) -> Tensor:
    result: Tensor = _kernel("select")(*arguments)
    return result


def _triton_blocks(*arguments: Any) -> Tensor:
    result: Tensor = _kernel("candidates", "index_blocks")(*arguments)
    return result


def _triton_visible(positions: Tensor, ratio: int) -> Tensor:
    result = positions.new_empty(positions.shape, dtype=torch.int32)
    if len(positions):
        _kernel("visible", "index_blocks")(positions, result, ratio)
    return result


_TRITON = partial(Implementation, "triton", cuda_from(8, 0), verified=("SM90",))
_INDUCTOR = partial(Implementation, "inductor", any_device, any_arguments, verified=("cpu", "SM90"))
_EAGER = partial(Implementation, "eager", any_device, any_arguments, verified=("cpu", "SM90"))


def _chain(call: Callable[..., Tensor], most: dispatch.ArgumentRule) -> tuple[Implementation, ...]:
    """Rows of a chain of logits and selection."""
    return (
        Implementation(
            "deepgemm", deepgemm.DEVICES, _both(deepgemm.mqa_fits, most), partial(call, ("deepgemm", "triton")),
            library=deepgemm.LIBRARY, symbol=deepgemm.MQA, verified=("SM90",),
        ),
        _TRITON(_both(triton_fits, most), partial(call, ("triton", "triton"))),
        _INDUCTOR(partial(call, ("eager", "inductor"))),
        _EAGER(partial(call, ("eager", "eager"))),
    )  # fmt: skip


ops.define(
    "visible_entries",
    "(Tensor positions, int ratio) -> Tensor",
    lambda positions, ratio, impl=None: positions.new_empty(positions.shape, dtype=torch.int32),
)
dispatch.register("indexer.visible_entries", _TRITON(any_arguments, _triton_visible), _EAGER(bodies.visible_entries))
ops.define(
    "select_topk",
    "(Tensor logits, int k, Tensor? ends, Tensor? starts, str order, Tensor? block_table, Tensor? requests, int page_size) -> Tensor",
    _fake_topk,
)
dispatch.register(
    "indexer.select_topk",
    _TRITON(_few_picks, partial(_topk, _triton_topk)),
    Implementation(
        "flashinfer", cuda_from(9, 0), _flashinfer_fits, partial(_topk, _flashinfer_topk), library=flashinfer.LIBRARY,
        symbol=flashinfer.TOP_K, verified=("SM90",),
    ),
    _INDUCTOR(partial(_topk, partial(bodies.select_topk, run_compiled))),
    _EAGER(partial(_topk, partial(bodies.select_topk, run_eagerly))),
)  # fmt: skip
ops.define("candidate_blocks", "(Tensor logits, Tensor ends, int block, int count) -> Tensor", _fake_blocks)
dispatch.register(
    "indexer.candidate_blocks",
    _TRITON(_few_blocks, partial(_blocks, _triton_blocks)),
    _INDUCTOR(partial(_blocks, partial(bodies.candidate_blocks, run_compiled))),
    _EAGER(partial(_blocks, partial(bodies.candidate_blocks, run_eagerly))),
)
ops.define("restrict_to_blocks", "(Tensor logits, Tensor blocks, int block) -> Tensor", _like)
dispatch.register("indexer.restrict_to_blocks", _TRITON(any_arguments, _triton_restrict), _EAGER(_restrict))
ops.define(
    "select_entries",
    f"({QUERIES}, {KEYS}, Tensor ends, int picks, str precision, str order, Tensor? candidates, int block, int chunk, int budget_bytes) "
    "-> Tensor",
    lambda q, q_scales, weights, k, k_scales, ends, picks, *_, **__: ends.new_empty((q.shape[0], picks), dtype=torch.int32),
)
dispatch.register("indexer.select_entries", *_chain(_entries, _few_picks))
ops.define(
    "select_candidates",
    f"({QUERIES}, {KEYS}, Tensor ends, str precision, int block, int count, int chunk, int budget_bytes) -> Tensor",
    _fake_candidates,
)
dispatch.register("indexer.select_candidates", *_chain(_candidates, _few_blocks))
