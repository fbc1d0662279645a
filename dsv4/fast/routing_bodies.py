"""What inductor compiles for `routing` and `eplb`: selection by integer keys, weights, replicas, slots.

A key c and its expert e make one int64: the bits of c, flipped where negative so that integers compare as the numbers do, above E - 1 - e.
All differ, so any top-k of them has one result: descending keys, ties to the lowest expert. Numbers that vary from call to call (rank,
live rows, sizes) are 0-d tensors; a body's options are what a model fixes.
"""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = -(2**31)  # above the expert of a NaN key: below the bits of minus infinity
ROW_STRIDE = 23333


def scores_body(logits: Tensor) -> Tensor:
    """sqrt(softplus) in fp64; below the threshold with the exponential of -|z|, which never overflows."""
    z = logits.to(torch.float64)
    soft = torch.where(z > 20, z, z.clamp(min=0) + torch.log1p(torch.exp(-z.abs())))
    return soft.sqrt().to(torch.float32)


def topk_body(scores: Tensor, *vectors: Tensor, names: tuple[str, ...], k: int) -> Tensor:
    """`vectors` are those of bias, image_mask and image_bias that `names` lists."""
    given = dict(zip(names, vectors, strict=True))
    tokens, experts = scores.shape
    keys = scores
    if given:
        keys = scores + _row_bias(given, tokens, experts)
    bits = (keys + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(keys.isnan(), ABSENT, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    last = torch.arange(experts - 1, -1, -1, device=scores.device)
    picked = ((ordered << 32) | last).topk(k, dim=1).values  # [tokens, k]
    return torch.where(picked >> 32 == ABSENT, -1, experts - 1 - (picked & 0xFFFFFFFF)).to(torch.int32)


def _row_bias(given: dict[str, Tensor], tokens: int, experts: int) -> Tensor:
    for name, vector in given.items():
        torch._check(vector.shape[0] == (tokens if name == "image_mask" else experts))
    text = given["bias"].to(torch.float32)[None] if "bias" in given else None
    if "image_mask" not in given:
        return torch.zeros((), device=next(iter(given.values())).device) if text is None else text
    image = given["image_bias"].to(torch.float32)[None]
    return torch.where(given["image_mask"][:, None], image, 0.0 if text is None else text)


def table_body(scores: Tensor, token_ids: Tensor, table: Tensor, *vectors: Tensor, names: tuple[str, ...]) -> Tensor:
    """Ids by token; rows of the image mask among `vectors` by their largest keys."""
    tokens, experts = scores.shape
    torch._check(token_ids.shape[0] == tokens)
    known = (token_ids >= 0) & (token_ids < table.shape[0])
    entries = table[torch.where(known, token_ids, 0).to(torch.int64)]  # [tokens, k]
    ids = torch.where(known[:, None] & (entries >= 0) & (entries < experts), entries, -1).to(torch.int32)
    if "image_mask" in names:
        picked = topk_body(scores, *vectors, names=names, k=table.shape[1])
        ids = torch.where(vectors[names.index("image_mask")][:, None], picked, ids)
    return ids


def weights_body(scores: Tensor, ids: Tensor, *, scale: float, epsilon: float) -> Tensor:
    """Normalised scores of the ids; scale and epsilon are fp32 numbers."""
    experts = scores.shape[1]
    torch._check(ids.shape[0] == scores.shape[0])
    present = (ids >= 0) & (ids < experts)
    chosen = torch.where(present, scores.gather(1, ids.clamp(0, experts - 1).to(torch.int64)), 0.0)
    wide = chosen.to(torch.float64)
    total = wide[:, 0] + epsilon
    for j in range(1, ids.shape[1]):
        total = total + wide[:, j]
    divisor = total.to(torch.float32)[:, None]
    return torch.where(present & (divisor != 0), chosen / divisor * scale, 0.0)


def choose_body(
    logits: Tensor, *tensors: Tensor, names: tuple[str, ...], k: int, scale: float, epsilon: float, hashed: bool
) -> tuple[Tensor, Tensor]:
    """Scores, ids and weights in one graph. `tensors` are token ids and table, if `hashed`, then `topk_body`'s vectors."""
    scores = scores_body(logits)
    ids = table_body(scores, *tensors, names=names) if hashed else topk_body(scores, *tensors, names=names, k=k)
    return ids, weights_body(scores, ids, scale=scale, epsilon=epsilon)


def map_body(ids: Tensor, physical: Tensor, rank: Tensor, *tensors: Tensor, algorithm: str) -> Tensor:
    """Logical to physical ids. `tensors`: rank_map (static); else replicas, counts, then words, or uniforms and probabilities."""
    experts = tensors[0].shape[0]
    known = (ids >= 0) & (ids < experts)
    expert = torch.where(known, ids, 0).to(torch.int64)
    if algorithm == "static":
        slots = tensors[0][expert]
    else:
        replicas, counts = tensors[:2]
        most = replicas.shape[1]
        torch._check(counts.shape[0] == experts)
        held = counts[expert].clamp(max=most).to(torch.int64)
        known = known & (held > 0)
        held = held.clamp(min=1)
        row = torch.arange(ids.shape[0], device=ids.device)[:, None]
        if algorithm == "dynamic":
            torch._check(tensors[2].shape[0] == ids.shape[0])
            replica = (tensors[2].to(torch.int64) & 0xFFFF) % held
        elif algorithm == "row_modulo":
            replica = (rank + row * ROW_STRIDE) % held
        elif algorithm == "row_index":
            replica = row % held
        else:
            replica = _drawn(expert, held, tensors[2], tensors[3], most)
        slots = replicas[expert, replica]
    return torch.where(known & (slots >= 0) & (slots < physical), slots, -1).to(torch.int32)


def _drawn(expert: Tensor, held: Tensor, uniforms: Tensor, probabilities: Tensor, most: int) -> Tensor:
    """The first replica whose cumulative probability exceeds the uniform part of the whole."""
    torch._check(uniforms.shape[0] == expert.shape[0])
    part = torch.zeros_like(uniforms, dtype=torch.float64)
    parts = []
    for i in range(most):
        part = part + torch.where(i < held, probabilities[expert, i], 0.0).to(torch.float64)
        parts.append(part)
    bound = uniforms.to(torch.float64) * part
    passed = torch.zeros_like(held)
    for i in range(most):
        passed = passed + ((parts[i] <= bound) & (i < held)).to(torch.int64)
    return torch.minimum(passed, held - 1)


def mask_body(ids: Tensor, weights: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    """-1 and 0 from row `live` on, and wherever an id is negative."""
    torch._check(weights.shape[0] == ids.shape[0])
    row = torch.arange(ids.shape[0], device=ids.device)[:, None]
    kept = (row < live) & (ids >= 0)
    return torch.where(kept, ids, -1).to(torch.int32), torch.where(kept, weights, 0.0)


def slots_body(
    ids: Tensor, weights: Tensor, limit: Tensor, local: Tensor, first: Tensor, weight: Tensor, *, shared: int, renumber: bool
) -> tuple[Tensor, Tensor]:
    """Append slots of ids first, first + 1, ... and one weight; `renumber` makes room for them after each `local` routed ids."""
    tokens = ids.shape[0]
    torch._check(weights.shape[0] == tokens)
    kept = (ids >= 0) & (ids < limit)
    moved = ids + torch.div(ids, local, rounding_mode="floor") * shared if renumber else ids
    extra = (first + torch.arange(shared, device=ids.device)).to(torch.int32).expand(tokens, shared)
    routed = torch.where(kept, moved, -1).to(torch.int32)
    return torch.cat([routed, extra], 1), torch.cat([torch.where(kept, weights, 0.0), weight.expand(tokens, shared)], 1)


def finish_body(
    ids: Tensor, weights: Tensor, live: Tensor, limit: Tensor, local: Tensor, first: Tensor, weight: Tensor, *, shared: int, renumber: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`mask_body`, `slots_body` and `mask_body` again; the ids after the first are what counters see."""
    counted, kept = mask_body(ids, weights, live)
    return counted, *mask_body(*slots_body(counted, kept, limit, local, first, weight, shared=shared, renumber=renumber), live)


def pack_body(ids: Tensor, weights: Tensor) -> Tensor:
    """id * 2^16 + bf16 bits, the rounding done on the integers: half an ulp less one, and one more where the kept part is odd."""
    torch._check(weights.shape[0] == ids.shape[0])
    bits = weights.view(torch.int32).to(torch.int64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    rounded = torch.where(weights.isnan(), 0x7FC0, rounded)
    word = (ids.to(torch.int64) << 16) | rounded
    return torch.where((ids >= 0) & (ids < 2**15), word, -(2**16)).to(torch.int32)
