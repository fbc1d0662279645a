"""The operators of `routing` and `eplb.map_to_physical`, and what implements them.

The triton row of `route` is one launch (`kernels/route.py`). The inductor row is the same chain from compiled bodies: scores, ids and
weights in one graph, then whatever the arguments ask for. Every row gives the same bits, whatever the batch: keys are integers, sums have
a stated order, but for logits by BLAS, which have one under use(batch_invariant=True) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import c_float
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, ops, product_bodies
from dsv4.fast import routing_bodies as bodies
from dsv4.fast.compiled import run_compiled, run_eagerly
from dsv4.fast.dispatch import Adaptive, Implementation, any_arguments, any_device, cuda_from

Run = Callable[..., Any]
Pair = tuple[Tensor, Tensor]

MOST_EXPERTS = 1024  # of one warp: 32 keys a lane
LOGIT_ROWS = 64  # of one product: a fixed shape, so that BLAS adds in one order


def _fp32(value: float) -> float:
    return c_float(value).value


def _shared_weight(factor: float, copies: int) -> float:
    """What a shared slot weighs, so that it counts once after the copies and the later factor."""
    return _fp32(1 / (_fp32(factor) * copies))


def _number(value: int | float, like: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.full((), value, dtype=dtype, device=like.device)


def _live(live: int, live_device: Tensor | None, like: Tensor) -> Tensor:
    return _number(live, like) if live_device is None else live_device.reshape(())


def _given(bias: Tensor | None, image_mask: Tensor | None, image_bias: Tensor | None) -> dict[str, Tensor]:
    if image_mask is None:
        return {} if bias is None else {"bias": bias}
    vectors = {"bias": bias, "image_mask": image_mask, "image_bias": image_bias}
    return {name: vector for name, vector in vectors.items() if vector is not None}


def _readable(table: Tensor) -> Tensor:
    return table if table.shape[0] else table.new_full((1, table.shape[1]), -1)


def _scores(run: Run, logits: Tensor) -> Tensor:
    result: Tensor = run(bodies.scores_body, logits) if logits.numel() else torch.empty_like(logits)
    return result


def _topk(run: Run, scores: Tensor, k: int, bias: Tensor | None, image_mask: Tensor | None, image_bias: Tensor | None) -> Tensor:
    if not scores.numel():
        return scores.new_empty(0, k, dtype=torch.int32)
    vectors = _given(bias, image_mask, image_bias)
    result: Tensor = run(bodies.topk_body, scores, *vectors.values(), names=tuple(vectors), k=k)
    return result


def _hash(run: Run, scores: Tensor, token_ids: Tensor, table: Tensor, image_mask: Tensor | None, image_bias: Tensor | None) -> Tensor:
    if not scores.numel():
        return scores.new_empty(0, table.shape[1], dtype=torch.int32)
    vectors = _given(None, image_mask, image_bias)
    result: Tensor = run(bodies.table_body, scores, token_ids, _readable(table), *vectors.values(), names=tuple(vectors))
    return result


def _weights(run: Run, scores: Tensor, ids: Tensor, scale: float, epsilon: float) -> Tensor:
    if not ids.numel():
        return scores.new_empty(ids.shape)
    result: Tensor = run(bodies.weights_body, scores, ids, scale=_fp32(scale), epsilon=_fp32(epsilon))
    return result


def _map(
    run: Run,
    ids: Tensor,
    physical: int,
    replicas: Tensor,
    counts: Tensor,
    rank_map: Tensor | None,
    algorithm: str,
    rank: int,
    words: Tensor | None,
    uniforms: Tensor | None,
    probabilities: Tensor | None,
) -> Tensor:
    if not ids.numel():
        return ids.new_empty(ids.shape, dtype=torch.int32)
    if algorithm == "none":
        return torch.where((ids >= 0) & (ids < counts.shape[0]), ids, -1).to(torch.int32)
    tables = (rank_map,) if algorithm == "static" else (replicas, counts)
    drawn = {"dynamic": (words,), "probability": (uniforms, probabilities)}.get(algorithm, ())
    result: Tensor = run(bodies.map_body, ids, _number(physical, ids), _number(rank, ids), *tables, *drawn, algorithm=algorithm)
    return result


def _mask(run: Run, ids: Tensor, weights: Tensor, live: int, live_device: Tensor | None) -> Pair:
    if not ids.numel():
        return ids.new_empty(ids.shape, dtype=torch.int32), torch.empty_like(weights)
    result: Pair = run(bodies.mask_body, ids, weights, _live(live, live_device, ids))
    return result


def _slot_numbers(like: Tensor, limit: int, local: int, first: int, weight: float) -> list[Tensor]:
    return [*(_number(value, like) for value in (limit, local, first)), _number(weight, like, torch.float32)]


def _slots(run: Run, ids: Tensor, weights: Tensor, shared: int, renumber: bool, *numbers: Any) -> Pair:
    if not ids.shape[0]:
        shape = (0, ids.shape[1] + shared)
        return ids.new_empty(shape, dtype=torch.int32), weights.new_empty(shape)
    run = run if ids.numel() else run_eagerly
    result: Pair = run(bodies.slots_body, ids, weights, *_slot_numbers(ids, *numbers), shared=shared, renumber=renumber)
    return result


def _append(run: Run, ids: Tensor, weights: Tensor, shared: int, experts: int, factor: float, copies: int) -> Pair:
    return _slots(run, ids, weights, shared, False, experts, 1, experts, _shared_weight(factor, copies))


def _remap(run: Run, ids: Tensor, weights: Tensor, shared: int, experts: int, ranks: int, rank: int, factor: float) -> Pair:
    local = experts // ranks
    return _slots(run, ids, weights, shared, True, experts, local, rank * (local + shared) + local, _shared_weight(factor, 1))


def _pack(run: Run, ids: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = run(bodies.pack_body, ids, weights) if ids.numel() else ids.new_empty(ids.shape, dtype=torch.int32)
    return result


def _count(ids: Tensor, counts: Tensor) -> None:
    if ids.numel() and counts.numel():
        counted = (ids >= 0) & (ids < counts.shape[0])
        counts.scatter_add_(0, torch.where(counted, ids, 0).flatten().long(), counted.flatten().to(torch.int32))


def _route(run: Run, *arguments: Any) -> Pair:
    a = dict(zip(ops.argument_names("route"), arguments, strict=False))
    logits, k, shared, physical = a["logits"], a["k"], a["shared"], a["physical"]
    tokens = logits.shape[0]
    if not tokens:
        return logits.new_empty(0, k + shared, dtype=torch.int32), logits.new_empty(0, k + shared)
    image_mask = a["image_mask"] if a["image_token_id"] is None else a["token_ids"] == a["image_token_id"]
    vectors = _given(a["bias"], image_mask, a["image_bias"])
    hashed = a["table"] is not None
    lists = (a["token_ids"], _readable(a["table"])) if hashed else ()
    options = {"names": tuple(vectors), "k": k, "scale": _fp32(a["scale"]), "epsilon": _fp32(a["epsilon"]), "hashed": hashed}
    ids, weights = run(bodies.choose_body, logits, *lists, *vectors.values(), **options)
    mapped = a["replicas"] is not None and a["algorithm"] != "none"
    if mapped:
        tables = (a["replicas"], a["replica_counts"], a["rank_map"])
        ids = _map(run, ids, physical, *tables, a["algorithm"], a["rank"], a["words"], a["uniforms"], a["probabilities"])
    counted, *results = _finish(run, ids, weights, a, mapped)
    if a["counts"] is not None:
        _count(counted, a["counts"])
    return results[0], results[1]


def _finish(run: Run, ids: Tensor, weights: Tensor, a: Mapping[str, Any], mapped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The ids to count, and a step's results: padding and shared slots."""
    shared, physical = a["shared"], a["physical"]
    padded = a["live_device"] is not None or a["live"] < ids.shape[0]
    if not shared:
        ids, weights = _mask(run, ids, weights, a["live"], a["live_device"]) if padded or mapped else (ids, weights)
        return ids, ids, weights
    local = physical // a["ranks"]
    first = a["rank"] * (local + shared) + local if a["home_rank"] else physical
    numbers = _slot_numbers(ids, physical, local, first, _shared_weight(a["later_factor"], a["shared_copies"]))
    live = _live(a["live"], a["live_device"], ids)
    result: tuple[Tensor, Tensor, Tensor] = run(bodies.finish_body, ids, weights, live, *numbers, shared=shared, renumber=a["home_rank"])
    return result


def _route_triton(
    logits: Tensor,
    k: int,
    scale: float,
    later_factor: float,
    epsilon: float,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image_mask: Tensor | None,
    token_ids: Tensor | None,
    image_token_id: int | None,
    table: Tensor | None,
    replicas: Tensor | None,
    replica_counts: Tensor | None,
    rank_map: Tensor | None,
    algorithm: str,
    words: Tensor | None,
    uniforms: Tensor | None,
    probabilities: Tensor | None,
    physical: int,
    ranks: int,
    rank: int,
    shared: int,
    home_rank: bool,
    shared_copies: int,
    live: int,
    live_device: Tensor | None,
    counts: Tensor | None,
) -> Pair:
    from dsv4.fast.kernels.route import route

    if not logits.shape[0]:
        return logits.new_empty(0, k + shared, dtype=torch.int32), logits.new_empty(0, k + shared)
    return route(
        logits if logits.stride(1) == 1 else logits.contiguous(),
        k,
        _fp32(scale),
        _fp32(epsilon),
        bias=_flat(bias),
        image_bias=_flat(image_bias),
        image_mask=_flat(image_mask),
        token_ids=_flat(token_ids),
        image_token_id=image_token_id,
        table=_flat(table),
        replicas=_flat(rank_map if algorithm == "static" else replicas),
        replica_counts=_flat(replica_counts),
        algorithm=algorithm,
        drawn=_flat(uniforms if algorithm == "probability" else words),
        probabilities=_flat(probabilities),
        physical=physical,
        ranks=ranks,
        rank=rank,
        shared=shared,
        home_rank=home_rank,
        shared_weight=_shared_weight(later_factor, shared_copies),
        live_rows=live if live_device is None else live_device,
        counts=counts,
    )


def _flat(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _topk_triton(scores: Tensor, k: int, bias: Tensor | None, image_mask: Tensor | None, image_bias: Tensor | None) -> Tensor:
    from dsv4.fast.kernels.route_select import route_topk

    if not scores.shape[0]:
        return scores.new_empty(0, k, dtype=torch.int32)
    return route_topk(scores if scores.stride(1) == 1 else scores.contiguous(), k, *map(_flat, (bias, image_mask, image_bias)))


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    """Products in fp64, no -0. Where batch invariance is demanded each has LOGIT_ROWS rows, the last one filled up with zeros: a row's bits
    then do not depend on how many there are.
    """
    tokens, hidden = x.shape
    if not dispatch.batch_invariant():
        return product_bodies.products(x, weight)
    padded = x.new_zeros(-(-tokens // LOGIT_ROWS) * LOGIT_ROWS, hidden, dtype=torch.float64)
    padded[:tokens] = x
    columns = weight.to(torch.float64).T
    products = [rows @ columns for rows in padded.split(LOGIT_ROWS)]
    return torch.cat(products)[:tokens].to(torch.float32).add_(0.0) if products else x.new_empty(0, weight.shape[0], dtype=torch.float32)


def _logits_triton(x: Tensor, weight: Tensor) -> Tensor:
    from dsv4.fast.kernels.gate import gate_logits

    if not x.numel() or not weight.numel():
        return x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    return gate_logits(x.contiguous(), weight.contiguous())


def _both_bf16(arguments: Mapping[str, Any]) -> str | None:
    dtypes = {arguments["x"].dtype, arguments["weight"].dtype}
    return None if dtypes == {torch.bfloat16} else "takes bf16 x and weight, whose products are exact in fp32"


def _one_warp(arguments: Mapping[str, Any]) -> str | None:
    scored = arguments["logits"] if "logits" in arguments else arguments["scores"]
    experts, counts = scored.shape[1], arguments.get("counts")
    if counts is not None and not counts.is_contiguous():
        return "takes contiguous counts alone"
    return None if experts <= MOST_EXPERTS else f"takes at most {MOST_EXPERTS} experts, these are {experts}"


def _register(component: str, name: str, schema: str, fake: Callable[..., Any], call: Run, *first: Implementation) -> None:
    ops.define(name, schema, fake)
    dispatch.register(
        f"{component}.{name}",
        *first,
        Implementation("inductor", any_device, any_arguments, partial(call, run_compiled)),
        Implementation("eager", any_device, any_arguments, partial(call, run_eagerly)),
    )


def _like(value: Tensor, shape: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    return value.new_empty(shape, dtype=dtype)


def _pair(value: Tensor, slots: Any) -> Pair:
    shape = (value.shape[0], slots)
    return _like(value, shape, torch.int32), _like(value, shape, torch.float32)


_register("routing", "gate_scores", "(Tensor logits) -> Tensor", lambda z, *_, **__: _like(z, z.shape, torch.float32), _scores)
_register(
    "routing",
    "route_topk",
    "(Tensor scores, int k, Tensor? bias, Tensor? image_mask, Tensor? image_bias) -> Tensor",
    lambda s, k, *_, **__: _like(s, (s.shape[0], k), torch.int32),
    _topk,
    Implementation("triton", cuda_from(8, 0), _one_warp, _topk_triton),
)
_register(
    "routing",
    "route_weights",
    "(Tensor scores, Tensor ids, float scale, float epsilon) -> Tensor",
    lambda s, ids, *_, **__: _like(s, ids.shape, torch.float32),
    _weights,
)
_register(
    "routing",
    "route_hash",
    "(Tensor scores, Tensor token_ids, Tensor table, Tensor? image_mask, Tensor? image_bias) -> Tensor",
    lambda s, _, table, *__, **___: _like(s, (s.shape[0], table.shape[1]), torch.int32),
    _hash,
)
_register(
    "routing",
    "append_shared_slots",
    "(Tensor ids, Tensor weights, int shared, int experts, float factor, int copies) -> (Tensor, Tensor)",
    lambda ids, _, shared, *__, **___: _pair(ids, ids.shape[1] + shared),
    _append,
)
_register(
    "routing",
    "remap_home_rank_slots",
    "(Tensor ids, Tensor weights, int shared, int experts, int ranks, int rank, float factor) -> (Tensor, Tensor)",
    lambda ids, _, shared, *__, **___: _pair(ids, ids.shape[1] + shared),
    _remap,
)
_register(
    "routing",
    "mask_padding",
    "(Tensor ids, Tensor weights, int live, Tensor? live_device) -> (Tensor, Tensor)",
    lambda ids, *_, **__: _pair(ids, ids.shape[1]),
    _mask,
)
_register("routing", "pack_topk", "(Tensor ids, Tensor weights) -> Tensor", lambda ids, *_, **__: _like(ids, ids.shape, torch.int32), _pack)
_register(
    "routing",
    "route",
    "(Tensor logits, int k, float scale, float later_factor, float epsilon, Tensor? bias, Tensor? image_bias, Tensor? image_mask, "
    "Tensor? token_ids, int? image_token_id, Tensor? table, Tensor? replicas, Tensor? replica_counts, Tensor? rank_map, str algorithm, "
    "Tensor? words, Tensor? uniforms, Tensor? probabilities, int physical, int ranks, int rank, int shared, bool home_rank, "
    "int shared_copies, int live, Tensor? live_device, Tensor(a!)? counts) -> (Tensor, Tensor)",
    lambda logits, k, *rest, **__: _pair(logits, k + rest[ops.argument_names("route").index("shared") - 2]),
    _route,
    Implementation("triton", cuda_from(8, 0), _one_warp, _route_triton),
)
_register(
    "eplb",
    "map_to_physical",
    "(Tensor ids, int physical, Tensor replicas, Tensor counts, Tensor? rank_map, str algorithm, int rank, Tensor? words, "
    "Tensor? uniforms, Tensor? probabilities) -> Tensor",
    lambda ids, *_, **__: _like(ids, ids.shape, torch.int32),
    _map,
)

ops.define("count_experts", "(Tensor ids, Tensor(a!) counts) -> ()", lambda *_, **__: None)
dispatch.register("routing.count_experts", Implementation("eager", any_device, any_arguments, _count))

ops.define("gate_logits", "(Tensor x, Tensor weight) -> Tensor", lambda x, w, *_, **__: _like(x, (x.shape[0], w.shape[0]), torch.float32))
dispatch.register(
    "routing.gate_logits",
    Implementation("triton", cuda_from(8, 0), _both_bf16, _logits_triton),
    Adaptive("eager", any_device, any_arguments, _logits),
)
