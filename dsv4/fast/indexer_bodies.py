"""The indexer on the inductor and eager paths: rows to codes, logits as products of a fixed shape, picks as 64-bit keys.

Codes are decoded by tables, which is faster than casting float8 on a CPU. Logits are fp64 throughout: a block of tokens times a block of
keys, a BLAS product whose shape depends on heads, dim and the number of keys alone, so that a token's bits depend on no other token. Picks
are the largest of int64 keys, the score's bits above the complement of the index: no two are equal, and ties need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast import bits, groups, kv_bodies
from dsv4.fast.row_bodies import hadamard_body, rms_body, rope_body
from dsv4.formats import INDEX_LAYOUTS, INDEX_SCALE_BYTES, KVLayout, align

Run = Callable[..., Any]

KINDS = {"fp8": "fp8_fp32", "fp4": "mxfp4"}
ROWS = 64  # heads of tokens in a product, at least those of one token
WIDE = 1024  # keys of a product
TOKENS = 64  # whose queries are decoded at a time
MISSING = -(2**31)  # the key of what does not count
LARGEST = 2**31 - 1
LOW = 2**32 - 1
PICKED_BYTES = 64 * 2**20  # of keys at a time
LEAST_WHOLE = 64  # entries up to which a block may be longer than a row


def rows_body(
    x: Tensor, table: Tensor, positions: Tensor, floor: Tensor, *more: Tensor, names: tuple[str, ...], eps: float, group: int, kind: str,
    on_scale: bool, zeroes: bool, ties: str, zero_sign: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes uint8 and scales, fp32 or int32 [rows], of bf16 rows [rows, d].

    `more` are the tensors of `names`: weight [1, d] of a norm, low and high of `hadamard_body`, each if it is meant to happen; floor and
    the other options as in `dsv4.fast.groups`.
    """
    torch._check(positions.shape[0] == x.shape[0])
    given = dict(zip(names, more, strict=True))
    rows = rope_body(rms_body(x, given["weight"][0], eps=eps) if "weight" in given else x, table, positions)
    if "low" in given:
        rows = hadamard_body(rows, given["low"], given["high"])
    grouped = rows.unflatten(1, (x.shape[1] // group, group)).to(torch.float32)
    stored, _, quotients = groups.scaled(grouped, floor, kind, "divide", on_scale, zeroes)
    if kind == "fp8_fp32":
        return bits.encode_e4m3(quotients).to(torch.uint8).flatten(1, 2), stored[:, 0, 0]
    codes = bits.pack_pairs(bits.encode_e2m1(quotients, ties, zero_sign).to(torch.uint8).flatten(1, 2), "low_first")
    word = stored[:, 0, 0]
    for g in range(1, x.shape[1] // group):
        word = word | (stored[:, g, 0] << (8 * g))
    return codes, word


def rows_of(
    run: Run, x: Tensor, table: Tensor, positions: Tensor, weight: Tensor | None, eps: float, format: str, hadamard: bool, amax_floor: str,
    ties: str, zero_sign: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rows_body` of rows that are not empty."""
    kind = KINDS[format]
    rule, floor = groups.rule(kind, amax_floor, "divide"), groups.floor_of(kind, amax_floor)
    least = torch.full((), floor, dtype=torch.int32 if isinstance(floor, int) else torch.float32, device=x.device)
    more = {} if weight is None else {"weight": weight[None]}
    if hadamard:
        width = x.shape[1].bit_length() - 1
        more |= {"low": signs(width // 2, x.device), "high": signs(width - width // 2, x.device)}
    options: dict[str, Any] = {"eps": eps, "kind": kind, "on_scale": rule["on_scale"], "zeroes": rule["zeroes"]}
    fp4 = {"ties": ties, "zero_sign": zero_sign} if format == "fp4" else {"ties": "", "zero_sign": ""}
    group = INDEX_LAYOUTS[format].group or x.shape[1]
    codes, scales = run(rows_body, x, table, positions, least, *more.values(), names=tuple(more), group=group, **options, **fp4)
    return codes, scales


@cache
def signs(width: int, device: torch.device) -> Tensor:
    """Signs of the Hadamard transform over some bits of the column: fp64 [1, 2^width, 2^width]."""
    numbers = [[(-1.0) ** (i & j).bit_count() for j in range(2**width)] for i in range(2**width)]
    with torch.inference_mode(False):  # it outlives the call
        return torch.tensor([numbers], dtype=torch.float64, device=device)


def key_layout(format: str, dim: int) -> KVLayout:
    """Keys in pages as `kv_bodies` moves records: data, and four bytes of scale."""
    data = INDEX_LAYOUTS[format].data_bytes(dim)
    return KVLayout(f"index {format}", dim, dim, dim, "e4m3", "unit", data, INDEX_SCALE_BYTES, False, 1, "spec A 5.6")


@cache
def _numbers(format: str, device: torch.device) -> Tensor:
    """The numbers of every byte: fp64 [256, 1] of E4M3, [256, 2] of two E2M1, the low one first."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    with torch.inference_mode(False):
        if format == "fp8":
            return bits.decode_e4m3(byte).double()[:, None]
        return torch.stack([bits.decode_e2m1(byte & 15), bits.decode_e2m1(byte >> 4)], 1).double()


def decoded(codes: Tensor, scales: Tensor | None) -> Tensor:
    """fp64 [..., d] of codes as uint8: times the scale of a key where scales are fp32, of groups where they are int32 words."""
    fp4 = scales is not None and scales.dtype == torch.int32
    table = _numbers("fp4" if fp4 else "fp8", codes.device)
    numbers = table.index_select(0, codes.reshape(-1).int()).view(*codes.shape[:-1], -1)
    if scales is None:
        return numbers
    if not fp4:
        return numbers.mul_(scales[..., None])
    layout = INDEX_LAYOUTS["fp4"]
    words = scales.contiguous()[..., None].view(torch.uint8)[..., : numbers.shape[-1] // layout.group]
    factors = bits.decode_e8m0(words.int()).double()
    scaled: Tensor = numbers.unflatten(-1, (-1, layout.group)).mul_(factors[..., None]).flatten(-2)
    return scaled


def logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None, ends: Tensor, result: Tensor
) -> None:
    """Logits of codes as uint8 into `result` [tokens, n], fp32, or bf16 for the official roundings."""
    (tokens, heads, _), n = q.shape, len(k)
    wide, height = min(WIDE, align(n, 64)), max(ROWS // heads, 1)
    many = align(min(TOKENS, tokens), height)
    first = torch.zeros_like(ends) if starts is None else starts
    result.fill_(-inf)
    for token in range(0, tokens, many):
        part = slice(token, token + many)
        queries = _filled(decoded(q[part], None if q_scales is None else q_scales[part]), many).view(many // height, height * heads, -1)
        factors = _filled(weights[part], many).view(many // height, height, heads)
        low, high = _columns(first[part], ends[part], n)
        for column in range(low // wide * wide, high, wide):
            keys = slice(column, column + wide)
            numbers = _filled(decoded(k[keys], k_scales[keys]), wide)
            total = _products(queries, factors, numbers, narrow=result.dtype == torch.bfloat16)
            into = result[part, keys]
            at = torch.arange(column, column + into.shape[1], device=q.device)
            seen = (at >= first[part, None]) & (at < ends[part, None])
            into.copy_(torch.where(seen, total[: len(into), : into.shape[1]].float() + 0.0, -inf))


def _products(queries: Tensor, factors: Tensor, keys: Tensor, *, narrow: bool) -> Tensor:
    """fp64 [tokens, keys] of queries [blocks, height * heads, d], weights [blocks, height, heads] and keys [keys, d]."""
    blocks, height, heads = factors.shape
    total = keys.new_empty(blocks, height, len(keys))
    dots = keys.new_empty(height * heads, len(keys))
    wide = factors.double()[:, :, None]  # [blocks, height, 1, heads]
    for block in range(blocks):
        torch.mm(queries[block], keys.T, out=dots)
        each = dots.view(height, heads, -1)
        if narrow:
            rounded = each.float().bfloat16().float().relu_() * factors[block, :, :, None].float()
            total[block] = rounded.bfloat16().double().sum(1).float().bfloat16()
        else:
            torch.bmm(wide[block], each.relu_(), out=total[block].unsqueeze(1))
    return total.view(blocks * height, -1)


def _filled(rows: Tensor, count: int) -> Tensor:
    """So many rows, zeros behind those there are."""
    return rows if len(rows) == count else torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


def _columns(starts: Tensor, ends: Tensor, n: int) -> tuple[int, int]:
    """Columns outside of which no row sees anything; all of them where looking would wait for a device."""
    if ends.device.type != "cpu":
        return 0, n
    sees = ends > starts
    if not sees.any():
        return 0, 0
    return max(int(starts[sees].min()), 0), min(int(ends[sees].max()), n)


def paged_logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, page_size: int,
    result: Tensor,
) -> None:  # fmt: skip
    """Logits of each token's own request, whose keys lie in `pages`; on the CPU tokens of one request together."""
    fp4, width = q_scales is not None, result.shape[1]
    layout = key_layout("fp4" if fp4 else "fp8", q.shape[2] * (2 if fp4 else 1))
    entries = torch.arange(width, device=q.device)
    result.fill_(-inf)
    for mine in _by_request(requests):
        request = requests[mine[:1]].expand(width)
        slots = kv_bodies.page_slots_body(block_table, request, entries, page_size=page_size)
        records, present = kv_bodies.get(pages, slots, layout, page_size)
        codes, scales = records.split([layout.data_bytes, layout.scale_bytes], 1)
        aligned = scales.clone(memory_format=torch.contiguous_format)  # of one record, too
        scales = aligned.view(torch.int32 if fp4 else torch.float32)[:, 0]
        own = result.new_empty(len(mine), width)
        of_queries = q[mine], None if q_scales is None else q_scales[mine], weights[mine]
        logits(*of_queries, codes, scales, None, ends[mine], own)
        result[mine] = own.masked_fill_(~present, -inf)


def _by_request(requests: Tensor) -> list[Tensor]:
    """Tokens of each request; each for itself where looking would wait for a device."""
    if requests.device.type != "cpu":
        return list(torch.arange(len(requests), device=requests.device).split(1))
    tokens: dict[int, list[int]] = {}
    for token, request in enumerate(requests.tolist()):
        tokens.setdefault(request, []).append(token)
    return [torch.tensor(mine) for mine in tokens.values()]


def keys_body(x: Tensor) -> Tensor:
    """int64 keys of scores [n], fp32 or bf16: in the upper 32 bits an integer that compares as the score does, MISSING for NaN and -inf."""
    score = x.to(torch.float32) + 0.0  # -0 and 0 are one key
    bits = score.view(torch.int32)
    key = bits ^ ((bits >> 31) & LARGEST)
    return torch.where(score > -inf, key, MISSING).long() << 32


def block_keys_body(x: Tensor) -> Tensor:
    """Upper halves of keys, int64, of the best score of each row of x [blocks, block]."""
    torch._check(x.shape[0] > 0)
    return keys_body(x).amax(1)


def select_topk(
    run: Run, logits: Tensor, k: int, ends: Tensor | None, starts: Tensor | None, order: str, block_table: Tensor | None,
    requests: Tensor | None, page_size: int,
) -> Tensor:  # fmt: skip
    """int32 [tokens, k]; picks by ascending index unless by score."""
    tokens, n = logits.shape
    first = None if starts is None else starts.long().clamp(0, n)
    parts = [logits.new_empty(0, k, dtype=torch.int64)]
    for part in _parts(tokens, n):
        high = n if ends is None else _columns(torch.full_like(ends[part], -1), ends[part], n)[1]
        keys = run(keys_body, logits[part, :high].reshape(-1)).view(-1, high) if high else logits.new_empty(len(logits[part]), 0).long()
        _hide(keys, None if ends is None else ends[part], None if first is None else first[part])
        parts.append(_largest(keys, k, None if first is None else first[part], order))
    picks = torch.cat(parts)
    if block_table is not None and requests is not None:
        picks = _slots(picks, block_table, requests, page_size)
    return picks.int()


def _parts(tokens: int, n: int) -> list[slice]:
    step = max(PICKED_BYTES // (8 * max(n, 1)), 1)
    return [slice(token, token + step) for token in range(0, tokens, step)]


def _hide(keys: Tensor, ends: Tensor | None, first: Tensor | None) -> None:
    """Keys of what is not seen become MISSING."""
    column = torch.arange(keys.shape[1], device=keys.device)
    if ends is not None:
        keys.masked_fill_(column >= ends[:, None], MISSING << 32)
    if first is not None:
        keys.masked_fill_(column < first[:, None], MISSING << 32)


def _largest(keys: Tensor, k: int, first: Tensor | None, order: str) -> Tensor:
    """int64 [rows, k]: columns of the largest upper halves, less `first`."""
    n = keys.shape[1]
    keys |= LOW - torch.arange(n, device=keys.device)
    best = keys.topk(min(k, n), 1, sorted=order == "score").values
    column = LOW - (best & LOW)
    picks = torch.where((best >> 32) > MISSING, column if first is None else column - first[:, None], LOW)
    if order != "score":
        picks = picks.sort(1).values
    return pad(torch.where(picks == LOW, -1, picks), (0, k - min(k, n)), value=-1)


def _slots(picks: Tensor, block_table: Tensor, requests: Tensor, page_size: int) -> Tensor:
    """Picks as slots in their order, those that are not there last."""
    if not block_table.numel() or not picks.numel():
        return torch.full_like(picks, -1)
    tokens, k = picks.shape
    request = requests[:, None].expand(tokens, k).reshape(-1)
    slots = kv_bodies.page_slots_body(block_table, request, picks.reshape(-1), page_size=page_size).view(tokens, k)
    absent = (slots < 0) | (slots > LARGEST)
    return slots.masked_fill(absent, -1).gather(1, absent.sort(dim=1, stable=True).indices)


def block_of_row(block: int, n: int) -> int:
    """Entries of a block, where more than the n >= 1 of a row mean one block whatever their number; few sizes, for each has its kernels."""
    return min(block, max(1 << (n - 1).bit_length(), LEAST_WHOLE))


def candidate_blocks(run: Run, logits: Tensor, ends: Tensor, block: int, count: int) -> Tensor:
    """int32 [tokens, count], ascending; count is at most the number of blocks."""
    tokens, n = logits.shape
    blocks = -(-n // block)
    seen = ends.long().clamp(0, n)
    shown = logits.masked_fill(torch.arange(n, device=logits.device) >= seen[:, None], -inf)
    keys = run(block_keys_body, pad(shown, (0, blocks * block - n), value=-inf).view(-1, block)).view(tokens, blocks)
    newest = torch.where(seen > 0, torch.div(seen - 1, block, rounding_mode="floor"), -1)
    keys = keys.masked_fill(torch.arange(blocks, device=logits.device) == newest[:, None], LARGEST << 32)
    return _largest(keys, count, None, "index").int()


def kept_blocks(blocks: Tensor, total: int) -> Tensor:
    """bool [tokens, total + 1]: whether a block is one of `blocks`; the last column takes numbers of no block."""
    places = torch.where((blocks >= 0) & (blocks < total), blocks, total).long()
    return torch.zeros(len(blocks), total + 1, dtype=torch.bool, device=blocks.device).scatter_(1, places, True)


def restrict(logits: Tensor, blocks: Tensor, block: int) -> Tensor:
    """Scores of the kept blocks, -inf elsewhere."""
    n = logits.shape[1]
    total = -(-n // block)
    kept = kept_blocks(blocks, total)[:, :total]
    if block % 8:
        each = kept.repeat_interleave(block, 1)
    else:  # eight entries are one word
        words = kept.long().mul_(0x0101010101010101)
        words = words if block == 8 else words.repeat_interleave(block // 8, 1)
        each = words.view(torch.bool)
    return torch.where(each[:, :n], logits, -inf)


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """int32 [tokens]: (position + 1) div ratio, within 0 and 2^31 - 1."""
    at = positions.long()
    before, place = torch.div(at, ratio, rounding_mode="floor"), at % ratio  # position + 1 may not fit 64 bits
    return (before.clamp_(-1, LARGEST) + (place == ratio - 1)).clamp_(0, LARGEST).int()
