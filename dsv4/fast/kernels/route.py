"""The router in one launch: scores, selection, weights, physical ids, padding, load counts, shared slots.

A program is one warp and takes one row; nothing crosses a warp. Selecting k of E experts has two stages:

1. Every score is computed in fp32, a little too large: never below the exact score, at most 2^-15 above it. The keys become integers that
   compare alike, lose their low bits and carry the expert there instead, so that one integer maximum finds a key and its expert, lowest
   expert first. k + 2 maxima give the candidates.
2. Candidates alone get exact keys (fp64, rounded to fp32 once) and are ordered by them. If the k-th exact key is above all that the
   truncated key of the last candidate may stand for, no other expert can belong to the k. If it is not, or for any tie there, the row is
   selected again by exact keys of all experts.

So the ids and weights are those of exact scores, and the fp64 work is that of k + 2 experts a row.

A lane holds a candidate and its place among them; together the places are 0, 1, 2, ..., each once, so the lanes after the first k write
the shared slots. Where the replica does not depend on the place, its two dependent loads are under way before the candidates are ordered.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.route_select import (
    MISSING,
    SLOTS,
    candidates,
    exact_score,
    load_bias,
    or_,
    rank_candidates,
    score_above,
    select_exactly,
)

SPARE = 2  # candidates beyond k: near ties at the k-th place settle among them


@triton.jit
def _drawn(expert, n, uniform, probabilities_ptr, X):
    """The first of n replicas whose cumulative probability exceeds the uniform part of the whole."""
    start = probabilities_ptr + expert.to(tl.int64) * X
    whole = tl.zeros_like(uniform)
    i = 0
    while i < X:
        whole += tl.load(start + i, mask=i < n, other=0.0).to(tl.float64)
        i += 1
    part = tl.zeros_like(uniform)
    pick = tl.zeros_like(n)
    i = 0
    while i < X:
        part += tl.load(start + i, mask=i < n, other=0.0).to(tl.float64)
        pick += ((i < n) & (part <= uniform * whole)).to(tl.int32)
        i += 1
    return tl.minimum(pick, n - 1)


@triton.jit
def _physical(
    expert,
    place,
    row,
    rank,
    replicas_ptr,
    replica_counts_ptr,
    words_ptr,
    probabilities_ptr,
    X,
    K: tl.constexpr,
    ALGORITHM: tl.constexpr,
):
    """The physical slot of each expert, -1 for none. Only the algorithms that draw look at `place`."""
    if ALGORITHM == "none":
        slot = expert
    elif ALGORITHM == "static":
        slot = tl.load(replicas_ptr + expert, mask=expert >= 0, other=-1)
    else:
        n = tl.minimum(tl.load(replica_counts_ptr + expert, mask=expert >= 0, other=0), X)
        if ALGORITHM == "dynamic":
            word = tl.load(words_ptr + row * K + place, mask=place < K, other=0)
            pick = (word & 0xFFFF).to(tl.int32) % tl.maximum(n, 1)
        elif ALGORITHM == "row_modulo":
            pick = ((rank + row * 23333) % tl.maximum(n, 1)).to(tl.int32)
        elif ALGORITHM == "row_index":
            pick = (row % tl.maximum(n, 1)).to(tl.int32)
        else:
            uniform = tl.load(words_ptr + row * K + place, mask=place < K, other=0.0).to(tl.float64)
            pick = _drawn(expert, n, uniform, probabilities_ptr, X)
        slot = tl.load(replicas_ptr + expert.to(tl.int64) * X + pick, mask=n > 0, other=-1)
    return slot


@triton.jit(do_not_specialize=["live", "rank", "image_token", "vocabulary"])
def route_kernel(
    logits_ptr,
    bias_ptr,
    image_bias_ptr,
    image_ptr,  # bool [T] (IMAGE "mask") or the token ids
    token_ids_ptr,
    table_ptr,
    replicas_ptr,  # [E, X], or rank_map [E] for the static algorithm
    replica_counts_ptr,
    words_ptr,  # words, or uniforms for the probability algorithm
    probabilities_ptr,
    live_ptr,
    counts_ptr,
    ids_ptr,
    weights_ptr,
    live,
    rank,
    image_token,
    vocabulary,
    logits_stride,
    X,
    P,
    local,
    shared_base,
    scale,
    epsilon,
    shared_weight,
    E: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    SLOTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IMAGE: tl.constexpr,
    HASH: tl.constexpr,
    ALGORITHM: tl.constexpr,
    HOME_RANK: tl.constexpr,
    LIVE: tl.constexpr,
    COUNT: tl.constexpr,
):
    HAS_IMAGE: tl.constexpr = IMAGE != "none"
    PLACELESS: tl.constexpr = ALGORITHM == "static" or ALGORITHM == "row_modulo" or ALGORITHM == "row_index"
    slot = tl.arange(0, SLOTS)
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * logits_stride
    if LIVE:
        live = tl.load(live_ptr).to(tl.int64)  # any number: past the rows it is clamped by them
    alive = tl.program_id(0) < live
    image = False
    if IMAGE == "mask":
        image = tl.load(image_ptr + row) != 0
    elif IMAGE == "token":
        image = tl.load(image_ptr + row) == image_token

    if not HASH or HAS_IMAGE:
        columns = tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < E, other=float("nan"))
        bias = load_bias(bias_ptr, image_bias_ptr, image, columns, columns < E, HAS_BIAS, HAS_IMAGE)
        expert, bound = candidates(score_above(z) + bias, columns, CANDIDATES, BLOCK, BITS, SLOTS)
        if PLACELESS and not HASH:
            held = _physical(expert, slot, row, rank, replicas_ptr, replica_counts_ptr, words_ptr, probabilities_ptr, X, K, ALGORITHM)
        score, ordered, place = rank_candidates(logits, bias_ptr, image_bias_ptr, image, expert, CANDIDATES, SLOTS, HAS_BIAS, HAS_IMAGE)
        least = tl.max(tl.where(place == K - 1, ordered, MISSING), axis=0)
        if (bound != MISSING) & (least <= bound) & alive:
            expert = select_exactly(logits, bias_ptr, image_bias_ptr, image, E, K, BLOCK, SLOTS, HAS_BIAS, HAS_IMAGE)
            score, ordered, place = rank_candidates(logits, bias_ptr, image_bias_ptr, image, expert, K, SLOTS, HAS_BIAS, HAS_IMAGE)
            if PLACELESS and not HASH:
                held = _physical(expert, slot, row, rank, replicas_ptr, replica_counts_ptr, words_ptr, probabilities_ptr, X, K, ALGORITHM)
        expert = tl.where(ordered != MISSING, expert, -1)
    if HASH:
        token = tl.load(token_ids_ptr + row).to(tl.int64)
        listed = (slot < K) & (token >= 0) & (token < vocabulary)
        entry = tl.load(table_ptr + token * K + slot, mask=listed, other=-1)
        entry = tl.where((entry >= 0) & (entry < E), entry, -1).to(tl.int32)
        entry_score = exact_score(tl.load(logits + entry, mask=entry >= 0, other=0.0))
        if HAS_IMAGE:
            expert = tl.where(image, expert, entry)
            score = tl.where(image, score, entry_score)
            place = tl.where(image, place, slot)
        else:
            expert = entry
            score = entry_score
            place = slot
    if not PLACELESS or HASH:
        held = _physical(expert, place, row, rank, replicas_ptr, replica_counts_ptr, words_ptr, probabilities_ptr, X, K, ALGORITHM)

    chosen = (place < K) & (expert >= 0)
    total = tl.full([], epsilon, tl.float64)
    for j in tl.static_range(K):  # slot by slot: the order of the sum is stated
        bits = tl.sum(tl.where(chosen & (place == j), score.to(tl.int32, bitcast=True), 0), axis=0)
        total += bits.to(tl.float32, bitcast=True).to(tl.float64)
    divisor = total.to(tl.float32)
    quotient = tl.div_rn(score, tl.zeros_like(score) + tl.where(divisor == 0, 1.0, divisor))
    weight = tl.where(divisor == 0, 0.0, quotient) * scale

    taken = chosen & (held >= 0) & alive
    if ALGORITHM != "none" or S > 0:  # else ids stay logical, though fewer may be placed
        taken = taken & (held < P)
    if COUNT:
        tl.atomic_add(counts_ptr + held, tl.zeros_like(held) + 1, mask=taken & (held < P), sem="relaxed")
    if HOME_RANK:
        held = held + (held // local) * S
    held = tl.where(taken, held, -1)
    weight = tl.where(taken, weight, 0.0)
    if S > 0:
        extra = (place >= K) & alive
        held = tl.where(extra, shared_base + place - K, held)
        weight = tl.where(extra, shared_weight, weight)
    at = row * (K + S) + place
    tl.store(ids_ptr + at, held, mask=place < K + S)
    tl.store(weights_ptr + at, weight, mask=place < K + S)


def route(
    logits: Tensor,
    k: int,
    scale: float,
    epsilon: float,
    *,
    bias: Tensor | None,
    image_bias: Tensor | None,
    image_mask: Tensor | None,
    token_ids: Tensor | None,
    image_token_id: int | None,
    table: Tensor | None,
    replicas: Tensor | None,
    replica_counts: Tensor | None,
    algorithm: str,
    drawn: Tensor | None,
    probabilities: Tensor | None,
    physical: int,
    ranks: int,
    rank: int,
    shared: int,
    home_rank: bool,
    shared_weight: float,
    live_rows: int | Tensor,
    counts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Launch the router over logits [T, E], T > 0; `drawn` are the words or uniforms, `replicas` the rank map of the static algorithm.
    With an `image_bias`, image rows are those of `image_mask`, or those whose token is `image_token_id`.
    """
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k + shared, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k + shared, dtype=torch.float32, device=logits.device)
    image_rows = "none" if image_bias is None else "token" if image_mask is None else "mask"
    slots = max(SLOTS, 1 << (k + shared - 1).bit_length())
    block = max(1 << (experts - 1).bit_length(), slots)
    live_device = live_rows if isinstance(live_rows, Tensor) else None
    local = physical // ranks
    route_kernel[(tokens,)](
        logits,
        or_(bias, logits),
        or_(image_bias, logits),
        or_(image_mask.view(torch.uint8) if image_mask is not None else token_ids, logits),
        or_(token_ids, logits),
        or_(table, logits),
        or_(replicas, logits),
        or_(replica_counts, logits),
        or_(drawn, logits),
        or_(probabilities, logits),
        or_(live_device, logits),
        or_(counts, logits),
        ids,
        weights,
        live_rows if live_device is None else 0,
        rank,
        -1 if image_token_id is None else image_token_id,
        0 if table is None else table.shape[0],
        logits.stride(0),
        1 if replicas is None or replicas.dim() == 1 else replicas.shape[1],
        physical,
        local,
        rank * (local + shared) + local if home_rank else physical,
        scale,
        epsilon,
        shared_weight,
        E=experts,
        K=k,
        S=shared,
        BLOCK=block,
        BITS=block.bit_length() - 1,
        SLOTS=slots,
        CANDIDATES=min(k + SPARE, slots),
        HAS_BIAS=bias is not None,
        IMAGE=image_rows,
        HASH=table is not None,
        ALGORITHM=algorithm,
        HOME_RANK=home_rank,
        LIVE=live_device is not None,
        COUNT=counts is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return ids, weights
