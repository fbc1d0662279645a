"""Index logits: a product of keys and queries whose relu, weights and sum over heads stay in registers.

    result[t, j] = sum over h of relu(q_th . k_j) w_th,    -inf outside of what t sees

A program takes QUERIES tokens, all their heads, and SPAN keys, KEYS at a time: keys are the rows of its product, heads of tokens the
columns, so that a sum over heads stays within a few threads, in an order that depends on neither tokens nor keys. Tiles that no token of a
program sees are written and not computed. All offsets into results, keys and pages are int64.

Operands. E4M3 codes go into the tensor core as they are, where the device has the type; keys are scaled after the sum. Elsewhere, and for
FP4, operands are bf16 numbers, which hold every E4M3 number and every E2M1 number times its scale exactly; `decode` makes them, even
elements before odd ones. Keys in pages are decoded in the program that reads them. Sums are fp32; those of E4M3 have fewer bits on Hopper.
Triton's interpreter cannot multiply bf16, and gets fp32 numbers.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.codec_bits import decode_e2m1, decode_e4m3, decode_e8m0, has_native_e4m3, rounded

SPAN = 2048  # keys of a program
PAGED_SPAN = 512  # of one token
COLUMNS, COLUMN_BYTES = 128, 32768  # heads of tokens in a product, at most, but no less than those of one token
UNALIGNED_KEYS = 32  # of a tile that is read by single bytes
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # devices with 99 KiB of shared memory a program, where tiles are halved


@triton.jit
def _narrowed(x, NATIVE: tl.constexpr):
    """fp32 rounded to bf16, as fp32."""
    return rounded(x, tl.bfloat16, NATIVE).to(tl.float32)


@triton.jit
def weighted_sum(dots, weights, scales, SCALED: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [KEYS, QUERIES] of dot products [KEYS, QUERIES, HEADS], weights [1, QUERIES, HEADS] and scales of keys [KEYS]; never -0.

    NARROW rounds the dot product, the weighted head and the sum to bf16. Otherwise the scale of a key, no less than 0, comes last.
    """
    if NARROW:
        if SCALED:
            dots *= scales[:, None, None]
        dots = _narrowed(dots, NATIVE)
    terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights
    if NARROW:
        total = _narrowed(tl.sum(_narrowed(terms, NATIVE), axis=2), NATIVE)
    else:
        total = tl.sum(terms, axis=2)
        if SCALED:
            total *= scales[:, None]
    return total + 0.0


@triton.jit
def _dense_tile(
    k, k_scales, queries, factors, start, end, live, rows, begin, entries, DIM: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SCALED: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The logits of KEYS keys from `begin` on."""
    dim, key = tl.arange(0, INNER), begin + tl.arange(0, KEYS)
    here = key < entries
    keys = tl.load(k + key.to(tl.int64)[:, None] * DIM + dim[None, :], mask=here[:, None] & (dim < DIM)[None, :], other=0.0)
    scales = tl.load(k_scales + key, mask=here & SCALED, other=0.0).to(tl.float32)
    dots = tl.dot(keys, queries, input_precision="ieee").reshape(KEYS, QUERIES, HEADS)
    total = weighted_sum(dots, factors, scales, SCALED, NARROW, NATIVE)
    seen = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
    total = tl.where(seen, total, float("-inf")).to(rows.dtype.element_ty)
    tl.store(rows[None, :] + key[:, None], total, mask=here[:, None] & live[None, :])


@triton.jit(do_not_specialize=["result_stride", "tokens", "entries", "heads"])
def logits_kernel(
    q,  # numbers or codes [tokens, heads, DIM]
    weights,
    k,  # [entries, DIM]
    k_scales,
    starts,
    ends,
    result,
    result_stride,
    tokens,
    entries,
    heads,
    DIM: tl.constexpr,
    INNER: tl.constexpr,  # DIM, or the least that a product takes
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    NARROW: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """QUERIES tokens and SPAN keys."""
    query_blocks = tl.cdiv(tokens, QUERIES)
    query = tl.program_id(0) % query_blocks * QUERIES + tl.arange(0, QUERIES)
    begin = tl.program_id(0) // query_blocks * SPAN
    live = query < tokens
    start = tl.zeros([QUERIES], tl.int64)
    if HAS_STARTS:
        start = tl.maximum(tl.load(starts + query, mask=live, other=0).to(tl.int64), 0)
    end = tl.minimum(tl.load(ends + query, mask=live, other=0).to(tl.int64), entries)
    sees = live & (start < end)
    past = tl.minimum(entries, begin + SPAN)
    low = tl.min(tl.where(sees, start, past), axis=0)
    high = tl.max(tl.where(sees, end, 0), axis=0)
    low = tl.minimum(tl.maximum(low, begin), past).to(tl.int32) // KEYS * KEYS  # SPAN is a multiple of KEYS
    high = tl.maximum(tl.minimum(high, past).to(tl.int32), low)
    rows = result + query.to(tl.int64) * result_stride
    unseen = begin
    while unseen < low:
        _fill(rows, live, unseen + tl.arange(0, KEYS), entries, QUERIES, KEYS)
        unseen += KEYS
    if low < high:
        dim = tl.arange(0, INNER)
        column = tl.arange(0, QUERIES * HEADS)
        token, head = tl.program_id(0) % query_blocks * QUERIES + column // HEADS, column % HEADS
        there = (token < tokens) & (head < heads)
        place = (token.to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
        queries = tl.trans(tl.load(q + place, mask=there[:, None] & (dim < DIM)[None, :], other=0.0))
        heads_of = tl.arange(0, HEADS)[None, None, :]
        at = query.to(tl.int64)[None, :, None] * heads + heads_of
        factors = tl.load(weights + at, mask=live[None, :, None] & (heads_of < heads), other=0.0).to(tl.float32)
        if NATIVE:
            for key in tl.range(low, high, KEYS, num_stages=STAGES):
                _dense_tile(
                    k, k_scales, queries, factors, start, end, live, rows, key, entries, DIM, INNER, HEADS, QUERIES, KEYS, SCALED, NARROW,
                    NATIVE,
                )  # fmt: skip
        else:  # the interpreter has no such loop
            while low < high:
                _dense_tile(
                    k, k_scales, queries, factors, start, end, live, rows, low, entries, DIM, INNER, HEADS, QUERIES, KEYS, SCALED, NARROW,
                    NATIVE,
                )  # fmt: skip
                low += KEYS
    unseen = low + tl.cdiv(high - low, KEYS) * KEYS
    while unseen < past:
        _fill(rows, live, unseen + tl.arange(0, KEYS), entries, QUERIES, KEYS)
        unseen += KEYS


@triton.jit
def _fill(rows, live, key, entries, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    none = tl.full([QUERIES, KEYS], float("-inf"), tl.float32).to(rows.dtype.element_ty)
    tl.store(rows[:, None] + key[None, :], none, mask=live[:, None] & (key < entries)[None, :])


@triton.jit
def _paged_tile(
    pages, page_stride, table, queries, odd_queries, factors, row, begin, end, columns, pages_there, width, PAGE: tl.constexpr,
    DIM: tl.constexpr, INNER: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, FP4: tl.constexpr, ALIGN: tl.constexpr,
    WORDS: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The logits of KEYS entries from `begin` on; `table` points to the pages of the request."""
    BYTES: tl.constexpr = INNER // 2 if FP4 else INNER
    DATA: tl.constexpr = DIM // 2 if FP4 else DIM
    byte = tl.arange(0, BYTES)
    key = begin + tl.arange(0, KEYS)
    column = key // PAGE
    seen = (key < end) & (column < columns)
    page = tl.load(table + column, mask=seen, other=-1).to(tl.int64)
    seen = seen & (page >= 0) & (page < pages_there)
    base = tl.where(seen, page, 0) * page_stride
    inner = key - column * PAGE
    codes = pages + (base + inner * DATA)[:, None] + byte[None, :]
    codes = tl.multiple_of(codes, [1, ALIGN])
    code = tl.load(codes, mask=seen[:, None] & (byte < DATA)[None, :], other=0)
    word = _scale_words(pages, base + (PAGE * DATA + inner * 4), seen, WORDS)
    if FP4:
        even, odd = _numbers_e2m1(code, word, KEYS, BYTES)
        even, odd = even.to(queries.dtype), odd.to(queries.dtype)
        dots = tl.dot(odd, odd_queries, tl.dot(even, queries, input_precision="ieee"), input_precision="ieee")
        scales = word.to(tl.float32)  # not used
    else:
        numbers = code.to(tl.float8e4nv, bitcast=True) if NATIVE else decode_e4m3(code, False).to(queries.dtype)
        dots = tl.dot(numbers, queries, input_precision="ieee")
        scales = word.to(tl.float32, bitcast=True)
    total = weighted_sum(dots.reshape(KEYS, 1, HEADS), factors, scales, not FP4, NARROW, COMPILED).reshape(KEYS)
    total = tl.where(seen, total, float("-inf")).to(row.dtype.element_ty)
    tl.store(row + key, total, mask=key < width)


@triton.jit(
    do_not_specialize=[
        "page_stride",
        "table_stride",
        "result_stride",
        "tokens",
        "requests_there",
        "columns",
        "pages_there",
        "width",
        "heads",
    ]
)
def paged_kernel(
    q,  # codes, or numbers with the even elements first
    weights,
    pages,  # uint8
    page_stride,
    table,
    table_stride,
    requests,
    ends,
    result,
    result_stride,
    tokens,
    requests_there,
    columns,
    pages_there,
    width,
    heads,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    FP4: tl.constexpr,
    ALIGN: tl.constexpr,  # of every key's first byte
    WORDS: tl.constexpr,  # scales are aligned words
    NARROW: tl.constexpr,
    NATIVE: tl.constexpr,  # compiled, and with E4M3
    COMPILED: tl.constexpr,
):
    """One token and SPAN entries of its request."""
    token = (tl.program_id(0) % tokens).to(tl.int64)
    begin = tl.program_id(0) // tokens * SPAN
    past = tl.minimum(width, begin + SPAN)
    request = tl.load(requests + token).to(tl.int64)
    end = tl.minimum(tl.maximum(tl.load(ends + token).to(tl.int64), 0), past)
    known = (request >= 0) & (request < requests_there)
    high = tl.maximum(tl.where(known, end, 0).to(tl.int32), begin)
    row = result + token * result_stride
    if begin < high:
        BYTES: tl.constexpr = INNER // 2 if FP4 else INNER
        DATA: tl.constexpr = DIM // 2 if FP4 else DIM
        byte = tl.arange(0, BYTES)
        head = tl.arange(0, HEADS)
        place = q + (token * heads + head)[:, None] * DIM + byte[None, :]
        mask = (head < heads)[:, None] & (byte < DATA)[None, :]
        queries = tl.trans(tl.load(place, mask=mask, other=0.0))
        odd_queries = queries
        if FP4:
            odd_queries = tl.trans(tl.load(place + DATA, mask=mask, other=0.0))
        factors = tl.load(weights + token * heads + head, mask=head < heads, other=0.0).to(tl.float32)[None, None, :]
        mine = table + request * table_stride
        if COMPILED:
            for key in tl.range(begin, high, KEYS):
                _paged_tile(
                    pages, page_stride, mine, queries, odd_queries, factors, row, key, end, columns, pages_there, width, PAGE, DIM, INNER,
                    HEADS, KEYS, FP4, ALIGN, WORDS, NARROW, NATIVE, COMPILED,
                )  # fmt: skip
        else:
            key = begin
            while key < high:
                _paged_tile(
                    pages, page_stride, mine, queries, odd_queries, factors, row, key, end, columns, pages_there, width, PAGE, DIM, INNER,
                    HEADS, KEYS, FP4, ALIGN, WORDS, NARROW, NATIVE, COMPILED,
                )  # fmt: skip
                key += KEYS
    unseen = begin + tl.cdiv(high - begin, KEYS) * KEYS
    while unseen < past:
        at = unseen + tl.arange(0, KEYS)
        tl.store(row + at, tl.full([KEYS], float("-inf"), tl.float32).to(result.dtype.element_ty), mask=at < width)
        unseen += KEYS


@triton.jit
def _scale_words(pages, place, seen, WORDS: tl.constexpr):
    """The int32 words at some bytes of the pages."""
    if WORDS:
        word = tl.load(pages.to(tl.pointer_type(tl.int32)) + place // 4, mask=seen, other=0)
    else:
        word = tl.zeros_like(place).to(tl.int32)
        for byte in tl.static_range(4):
            word |= tl.load(pages + place + byte, mask=seen, other=0).to(tl.int32) << (8 * byte)
    return word


@triton.jit
def _numbers_e2m1(codes, words, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """The even and the odd numbers, fp32 [ROWS, BYTES], of bytes of two codes and of words of up to four scales, one for 16 bytes."""
    GROUPS: tl.constexpr = BYTES // 16
    wide = codes.to(tl.int32)
    scales = decode_e8m0((words[:, None] >> (8 * tl.arange(0, GROUPS)[None, :])) & 0xFF)
    each = tl.broadcast_to(scales[:, :, None], (ROWS, GROUPS, 16)).reshape(ROWS, BYTES)
    return decode_e2m1(wide) * each, decode_e2m1(wide >> 4) * each


@triton.jit(do_not_specialize=["rows"])
def decode_kernel(codes, scales, result, rows, DIM: tl.constexpr, FP4: tl.constexpr, ROWS: tl.constexpr, NATIVE: tl.constexpr):
    """Numbers of rows of codes; of FP4 the even ones, then the odd ones."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    if FP4:
        byte = tl.arange(0, DIM // 2)[None, :]
        code = tl.load(codes + row[:, None] * (DIM // 2) + byte, mask=live[:, None], other=0)
        even, odd = _numbers_e2m1(code, tl.load(scales + row, mask=live, other=0), ROWS, DIM // 2)
        place = result + row[:, None] * DIM + byte
        tl.store(place, rounded(even, result.dtype.element_ty, NATIVE), mask=live[:, None])
        tl.store(place + DIM // 2, rounded(odd, result.dtype.element_ty, NATIVE), mask=live[:, None])
    else:
        dim = tl.arange(0, DIM)[None, :]
        number = decode_e4m3(tl.load(codes + row[:, None] * DIM + dim, mask=live[:, None], other=0), False)
        tl.store(result + row[:, None] * DIM + dim, rounded(number, result.dtype.element_ty, NATIVE), mask=live[:, None])


def logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None, ends: Tensor, result: Tensor
) -> None:
    """Logits of `queries` and `keys`, codes as uint8, into `result` [tokens, entries], fp32, or bf16 for the official roundings."""
    fp4, (tokens, heads, _), entries = q_scales is not None, q.shape, len(k)
    native = has_native_e4m3(logits_kernel, q.device)
    dim = q.shape[2] * (2 if fp4 else 1)
    with torch.cuda.device_of(q):
        queries, keys = (_operand(codes, scales, dim, native) for codes, scales in ((q, q_scales), (k, k_scales if fp4 else None)))
        tile = _tile(heads, dim, queries)
        grid = triton.cdiv(tokens, tile["QUERIES"]) * triton.cdiv(entries, SPAN)
        logits_kernel[(grid,)](
            queries, weights.contiguous(), keys, weights if fp4 else k_scales.contiguous(), ends if starts is None else starts.contiguous(),
            ends.contiguous(), result, result.stride(0), tokens, entries, heads, SPAN=SPAN, SCALED=not fp4, HAS_STARTS=starts is not None,
            NARROW=result.dtype == torch.bfloat16, NATIVE=isinstance(logits_kernel, triton.JITFunction), **tile,
        )  # fmt: skip


def paged_logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, page_size: int,
    result: Tensor,
) -> None:  # fmt: skip
    """Logits of each token's own request, whose keys lie in `pages`, into `result` [tokens, width]."""
    fp4, (tokens, heads, _), width = q_scales is not None, q.shape, result.shape[1]
    native, dim = has_native_e4m3(paged_kernel, q.device), q.shape[2] * (2 if fp4 else 1)
    data = dim // 2 if fp4 else dim
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    with torch.cuda.device_of(q):
        queries = _operand(q, q_scales, dim, native)
        tile = {name: value for name, value in _tile(heads, dim, queries).items() if name not in ("QUERIES", "STAGES")}
        align = gcd(16, pages.data_ptr(), pages.stride(0), data)
        tile["KEYS"] = min(tile["KEYS"], UNALIGNED_KEYS) if align < 4 else tile["KEYS"]
        paged_kernel[(tokens * triton.cdiv(width, PAGED_SPAN),)](
            queries, weights.contiguous(), pages, pages.stride(0), table, table.stride(0), requests.contiguous(), ends.contiguous(), result,
            result.stride(0), tokens, *table.shape, len(pages), width, heads, PAGE=page_size, SPAN=PAGED_SPAN, FP4=fp4,
            ALIGN=align, WORDS=gcd(4, pages.data_ptr(), pages.stride(0), page_size * data) == 4,
            NARROW=result.dtype == torch.bfloat16, NATIVE=native, COMPILED=isinstance(paged_kernel, triton.JITFunction), **tile,
        )  # fmt: skip


def _operand(codes: Tensor, scales: Tensor | None, dim: int, native: bool) -> Tensor:
    """What a product takes: E4M3 where the device multiplies it, else numbers."""
    if scales is None and native:
        return codes.contiguous().view(torch.float8_e4m3fn)
    on_device = isinstance(decode_kernel, triton.JITFunction)
    result = torch.empty(*codes.shape[:-1], dim, dtype=torch.bfloat16 if on_device else torch.float32, device=codes.device)
    rows, height = result.numel() // dim, max(4096 // dim, 1)
    decode_kernel[(triton.cdiv(rows, height),)](
        codes.contiguous(), codes if scales is None else scales.contiguous(), result, rows, DIM=dim, FP4=scales is not None, ROWS=height,
        NATIVE=on_device,
    )  # fmt: skip
    return result


def _tile(heads: int, dim: int, operand: Tensor) -> dict[str, Any]:
    """Sizes of a product. They do not depend on how many tokens or keys there are."""
    padded, inner = max(triton.next_power_of_2(heads), 16), max(dim, 32)
    bytes = inner * operand.element_size()
    keys = min(max(16384 // bytes, 16), 128)
    if operand.is_cuda and torch.cuda.get_device_capability(operand.device) in SMALL_MEMORY:
        keys = max(keys // 2, 16)
    return {
        "DIM": dim,
        "INNER": inner,
        "HEADS": padded,
        "QUERIES": max(min(COLUMNS, COLUMN_BYTES // bytes) // padded, 1),
        "KEYS": keys,
        "STAGES": 3,
    }
