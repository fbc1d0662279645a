"""How far index logits may be off on arbitrary numbers, and which picks that permits.

With S_tj = sum over h of |w_th| (|q_th| . |k_j|), which is the reference itself on magnitudes, and relative errors of

    d1      a dot product of exact products, each addition off by at most an ulp: tensor cores cut the addends of a step of 16 to the
            largest of them and the accumulator. Hopper's FP8 tensor cores keep 13 bits behind the largest of each step of 32
    d2      the scale of a key, the weight, and a sum over H heads in any order
    d3      bf16 precision alone: dot product, weighted head and sum are rounded to bf16

no score is off by more than ((1 + d1) (1 + d2) (1 + d3) - 1) S, relu moving no two numbers apart. A set P of the right size is permitted
if its least possible largest scores are the largest: for each i in P and each visible j outside of it, s_i + b_i >= s_j - b_j. Block
scores are maxima, and so are their bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.parity import bounds
from dsv4.parity.contracts import Call
from dsv4.parity.exact import unrounded
from dsv4.reference import indexer
from dsv4.types import IndexKeys, IndexQueries

U_BF16 = 2.0**-8
LEAST_BF16 = 2.0**-133  # one rounding among bf16's subnormal numbers is off by at most half of this
HOPPER_U = 2.0**-13  # of what an FP8 tensor core of SM90 keeps of an addend, against the largest of its step
HOPPER_STEP = 32


def logits(call: Call, exact: Tensor) -> Tensor:
    """Bound of `index_logits`."""
    queries, keys = call.args
    size = unrounded(indexer.index_logits)(_queries(queries), _keys(keys), **call.kwargs)
    return _bound(call, queries, size)


def paged(call: Call, exact: Tensor) -> Tensor:
    """Bound of `paged_index_logits`."""
    queries, pages, *rest = call.args
    size_of_page, dim = call["page_size"], queries.codes.shape[2] * (2 if queries.scales is not None else 1)
    slots = torch.arange(pages.shape[0] * size_of_page, device=pages.device)
    options = {"format": call["format"], "page_size": size_of_page}
    keys = _keys(indexer.load_index_keys(pages, slots, dim=dim, **options))
    blank = torch.zeros(pages.shape, dtype=torch.uint8, device=pages.device)
    magnitudes = indexer.store_index_keys(keys, blank, slots, **options)
    size = unrounded(indexer.paged_index_logits)(_queries(queries), magnitudes, *rest, **call.kwargs)
    return _bound(call, queries, size)


def entries(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Picks of `select_entries` that are permitted: ascending or in descending score, each once, as many as there are, the best."""
    low, high = _scores(call)
    if call.kwargs.get("candidates") is not None:
        restrict = unrounded(indexer.restrict_to_blocks)
        low, high = (restrict(part, call["candidates"], block=call["block"]) for part in (low, high))
    there = low > -torch.inf
    count = there.sum(1).clamp(max=actual.shape[1])
    permitted = _best(low, high, there, count, actual)
    if call.kwargs.get("order", "index") == "index":
        permitted &= _ascending(actual)
    return permitted


def blocks(call: Call, expected: Tensor, actual: Tensor) -> Tensor:
    """Blocks of `select_candidates` that are permitted: ascending, each once, with the newest, the best."""
    low, high = (_maxima(part, call["block"]) for part in _scores(call))
    visible, size = call[2].long().clamp(0, call[1].codes.shape[0]), call["block"]
    newest = torch.arange(low.shape[1], device=low.device) == ((visible - 1).div(size, rounding_mode="floor"))[:, None]
    low, high = (part.masked_fill(newest, torch.inf) for part in (low, high))
    there = low > -torch.inf
    return _best(low, high, there, there.sum(1).clamp(max=actual.shape[1]), actual) & _ascending(actual)


def _scores(call: Call) -> tuple[Tensor, Tensor]:
    """The least and the largest that each score may be; -inf both where it is not visible."""
    queries, keys, ends = call.args[:3]
    scored = Call((queries, keys), {"ends": ends, "precision": call.kwargs.get("precision", "fp32")})
    exact = unrounded(indexer.index_logits)(*scored.args, **scored.kwargs)
    bound = logits(scored, exact)
    return exact - bound, exact + bound


def _best(low: Tensor, high: Tensor, there: Tensor, count: Tensor, actual: Tensor) -> Tensor:
    """Of each pick: it is there, it stands before the count, and no better one was left out; of each row: none twice."""
    tokens, n = low.shape
    known = (actual >= 0) & (actual < n)
    at = torch.where(known, actual.long(), n)
    picked = torch.zeros(tokens, n + 1, dtype=torch.int64, device=low.device)
    picked = picked.scatter_add(1, at, torch.ones_like(at))[:, :n]
    left = torch.where(there & (picked == 0), low, -torch.inf)
    best_left = pad(left, (0, 1), value=-torch.inf).amax(1, keepdim=True)
    ranked = torch.arange(actual.shape[1], device=low.device) < count[:, None]
    of_pick = pad(torch.where(there, high, torch.nan), (0, 1), value=torch.nan).gather(1, at)
    once = (picked <= 1).all(1, keepdim=True)
    return torch.where(ranked, known & (of_pick >= best_left), actual == -1) & once


def _ascending(actual: Tensor) -> Tensor:
    before = pad(actual[:, :-1], (1, 0), value=-1) if actual.shape[1] else actual
    found: Tensor = (actual == -1) | (actual > before)
    return found


def _maxima(scores: Tensor, block: int) -> Tensor:
    parts: Tensor = pad(scores, (0, -scores.shape[1] % block), value=-torch.inf).unflatten(1, (-1, block))
    return parts.amax(2)


def _bound(call: Call, queries: IndexQueries, size: Tensor) -> Tensor:
    """From S, which is -inf where nothing is visible."""
    heads, fp4 = queries.codes.shape[1], queries.scales is not None
    dim = queries.codes.shape[2] * (2 if fp4 else 1)
    dot = bounds.gamma(2 * (dim + dim // 16 + 16))
    if not fp4 and size.device.type == "cuda":
        dot = max(dot, HOPPER_U * (dim + dim // HOPPER_STEP + 1))
    relative, least = (1 + dot) * (1 + bounds.gamma(2 * heads + 6)), heads * bounds.LEAST
    if call.kwargs.get("precision", "fp32") == "bf16":
        relative, least = relative * (1 + U_BF16 + 2 * bounds.U) ** 3, 2 * heads * LEAST_BF16
    return torch.where(size.isfinite(), (relative - 1) * size + least, 0.0)


def _queries(queries: IndexQueries) -> IndexQueries:
    """Magnitudes."""
    return IndexQueries(_magnitudes(queries.codes), queries.scales, queries.weights.abs())


def _keys(keys: IndexKeys) -> IndexKeys:
    return IndexKeys(_magnitudes(keys.codes), keys.scales if keys.scales.dtype == torch.int32 else keys.scales.abs())


def _magnitudes(codes: Tensor) -> Tensor:
    """Codes without their signs."""
    cleared: Tensor = codes.contiguous().view(torch.uint8) & (0x77 if codes.dtype == torch.uint8 else 0x7F)
    return cleared.view(codes.dtype)
