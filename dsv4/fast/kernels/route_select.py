"""Selecting k of E experts in one warp: exact keys, and a filter that needs few of them. `route.py` has the whole picture."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MISSING = tl.constexpr(-(2**31))  # orders below every number: NaN keys, columns beyond the last expert
SLOTS = 32  # of a row, a lane each, unless there are more


@triton.jit
def exact_score(z):
    """fl32(sqrt(softplus(z))), evaluated in fp64."""
    x = z.to(tl.float64)
    u = tl.exp(x)
    w = u + 1.0
    # log(w) u / (w - 1): the error of rounding 1 + u cancels.
    soft = tl.where(w == 1.0, u, tl.log(w) * (u / (w - 1.0)))
    return tl.sqrt(tl.where(x > 20.0, x, soft)).to(tl.float32)


@triton.jit
def score_above(z):
    """At least the exact score, and at most 2^-15 of it (or 2^-126) more.

    softplus(z) = max(z, 0) + log1p(u), u = exp(-|z|); for negative z the square root of u is taken out, so that it does not underflow.
    """
    root = tl.exp2(tl.abs(z) * -0.7213475204444817)  # log2(e) / 2
    u = root * root
    # log1p(u) / u on [0, 1], relative error 1.5e-6; the exponential's is below 1.2e-5.
    p = tl.fma(u, 0.013874484226107597, -0.06559030711650848)
    p = tl.fma(u, p, 0.148294135928154)
    p = tl.fma(u, p, -0.23454520106315613)
    p = tl.fma(u, p, 0.3309752643108368)
    p = tl.fma(u, p, -0.4998590052127838)
    p = tl.fma(u, p, 0.9999985694885254)
    score = tl.sqrt(tl.where(z > 0, tl.fma(u, p, z), p)) * tl.where(z > 0, 1.0, root)
    return tl.fma(score, 1 + 2.0**-15, 2.0**-126)


@triton.jit
def ordered_bits(key):
    """int32 that compare as the keys do, none of which is -0; NaN is MISSING."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(key == key, bits ^ ((bits >> 31) & 0x7FFFFFFF), MISSING)


@triton.jit
def candidates(above, columns, N: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SLOTS: tl.constexpr):
    """N experts with the largest keys [SLOTS], -1 beyond the last, and the largest key that any other expert can have."""
    slot = tl.arange(0, SLOTS)
    packed = ((ordered_bits(above) >> (BITS + 1)) << BITS) | (BLOCK - 1 - columns)
    best = tl.max(packed, axis=0)
    found = tl.where(slot == 0, best, MISSING)
    for j in tl.static_range(1, N):
        # All differ, by less than 2^31: less the last one and unsigned, smaller keys lie above the taken ones, still in order.
        step = tl.max((packed - best).to(tl.uint32, bitcast=True), axis=0)
        best = best + step.to(tl.int32, bitcast=True)
        found = tl.where(slot == j, best, found)
    none = MISSING >> (BITS + 1)
    expert = tl.where((found >> BITS) > none, BLOCK - 1 - (found & (BLOCK - 1)), -1)
    last = best >> BITS
    return tl.where(slot < N, expert, -1), tl.where(last > none, (last << (BITS + 1)) | ((2 << BITS) - 1), MISSING)


@triton.jit
def select_largest(ordered, K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """The K experts with the largest keys [SLOTS] in order, lowest expert first among equals, -1 where keys are MISSING."""
    slot = tl.arange(0, SLOTS)
    columns = tl.arange(0, BLOCK)
    expert = tl.full([SLOTS], -1, tl.int32)
    for j in range(K):
        best = tl.max(ordered, axis=0)
        first = tl.min(tl.where(ordered == best, columns, BLOCK), axis=0)
        first = tl.where(best == MISSING, -1, first)
        expert = tl.where(slot == j, first, expert)
        ordered = tl.where(columns == first, MISSING, ordered)
    return expert


@triton.jit
def load_bias(bias_ptr, image_bias_ptr, image, expert, mask, HAS_BIAS: tl.constexpr, HAS_IMAGE: tl.constexpr):
    """The bias of each expert: of images on an image row, else of text, which may be none. A row reads one of the two."""
    if HAS_IMAGE:
        value = tl.zeros_like(expert).to(tl.float32)
        if image:
            value = tl.load(image_bias_ptr + expert, mask=mask, other=0.0).to(tl.float32)
        elif HAS_BIAS:
            value = tl.load(bias_ptr + expert, mask=mask, other=0.0).to(tl.float32)
    elif HAS_BIAS:
        value = tl.load(bias_ptr + expert, mask=mask, other=0.0).to(tl.float32)
    else:
        value = tl.zeros_like(expert).to(tl.float32)
    return value


@triton.jit
def select_exactly(
    logits,
    bias_ptr,
    image_bias_ptr,
    image,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
):
    """The K experts with the largest exact keys, a CHUNK of fp64 scores at a time: the whole row would fill the registers."""
    CHUNK: tl.constexpr = 64 if BLOCK > 64 else BLOCK
    part = tl.arange(0, BLOCK // CHUNK)[:, None]
    ordered = tl.full([BLOCK // CHUNK, CHUNK], MISSING, tl.int32)
    for chunk in range(BLOCK // CHUNK):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = columns < E
        score = exact_score(tl.load(logits + columns, mask=inside, other=float("nan")))
        key = score + load_bias(bias_ptr, image_bias_ptr, image, columns, inside, HAS_BIAS, HAS_IMAGE)
        ordered = tl.where(part == chunk, ordered_bits(key + 0.0)[None, :], ordered)
    return select_largest(tl.reshape(ordered, [BLOCK]), K, BLOCK, SLOTS)


@triton.jit
def rank_candidates(
    logits, bias_ptr, image_bias_ptr, image, expert, N: tl.constexpr, SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_IMAGE: tl.constexpr
):
    """Exact scores and ordered keys of the first N slots, and the place of each among them."""
    slot = tl.arange(0, SLOTS)
    known = expert >= 0
    score = exact_score(tl.load(logits + expert, mask=known, other=float("nan")))
    ordered = ordered_bits(score + load_bias(bias_ptr, image_bias_ptr, image, expert, known, HAS_BIAS, HAS_IMAGE) + 0.0)
    tie = tl.where(known, expert, slot + (1 << 30))
    place = tl.where(slot < N, 0, slot)
    for j in tl.static_range(N):  # integer reductions over a warp: one instruction each
        other = tl.max(tl.where(slot == j, ordered, MISSING), axis=0)
        other_tie = tl.max(tl.where(slot == j, tie, 0), axis=0)
        ahead = (other > ordered) | ((other == ordered) & (other_tie < tie))
        place += (ahead & (slot < N)).to(tl.int32)
    return score, ordered, place


@triton.jit
def topk_kernel(
    scores_ptr,
    bias_ptr,
    image_bias_ptr,
    image_ptr,
    ids_ptr,
    scores_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    key = tl.load(scores_ptr + row * scores_stride + columns, mask=columns < E, other=float("nan"))
    image = False
    if HAS_IMAGE:
        image = tl.load(image_ptr + row) != 0
    key = key + load_bias(bias_ptr, image_bias_ptr, image, columns, columns < E, HAS_BIAS, HAS_IMAGE)
    tl.store(ids_ptr + row * K + slot, select_largest(ordered_bits(key + 0.0), K, BLOCK, SLOTS), mask=slot < K)


def route_topk(scores: Tensor, k: int, bias: Tensor | None, image_mask: Tensor | None, image_bias: Tensor | None) -> Tensor:
    """Launch the selection alone over scores [T, E], T > 0."""
    tokens, experts = scores.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=scores.device)
    topk_kernel[(tokens,)](
        scores,
        or_(bias, scores),
        or_(image_bias, scores),
        or_(None if image_mask is None else image_mask.view(torch.uint8), scores),
        ids,
        scores.stride(0),
        E=experts,
        K=k,
        BLOCK=max(triton.next_power_of_2(experts), SLOTS),
        SLOTS=SLOTS,
        HAS_BIAS=bias is not None,
        HAS_IMAGE=image_mask is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return ids


def or_(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel gets for an argument that it will not read."""
    return other if tensor is None else tensor
