"""The lightning indexer: the twin of `dsv4.reference.indexer`, which has the formulas and roundings.

On CUDA queries and keys are one launch from projection to codes. Logits are DeepGEMM's where it has them, else Triton's: FP8 codes in the
tensor core, FP4 as the bf16 numbers that they are. On CUDA their rows lie a multiple of 256 numbers apart. Selection is Triton's: exact
bisection over the bits of the scores, at any length, NaN never picked, ties to the smaller entry. Nothing waits for the device, and all of
it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4 import checks, indexer_checks
from dsv4.fast import index_selection_ops as index_selection_ops  # defines operators
from dsv4.fast import indexer_ops as indexer_ops
from dsv4.indexer_checks import BUDGET_BYTES, CHUNK
from dsv4.types import IndexFormat, IndexKeys, IndexOrder, IndexQueries, LogitPrecision, Ties, ZeroSign

__all__ = [
    "candidate_blocks", "index_keys", "index_logits", "index_queries", "load_index_keys", "paged_index_logits", "restrict_to_blocks",
    "select_candidates", "select_entries", "select_topk", "store_index_keys", "visible_entries",
]  # fmt: skip


def visible_entries(positions: Tensor, *, ratio: int, impl: str | None = None) -> Tensor:
    """How many entries tokens see: those whose last token is not after them.

    Args:
        positions: [tokens], int64 or int32.
        ratio: tokens of an entry, >= 0. Without compression every token is an entry: 0 and 1 both say so.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens], (position + 1) div ratio, at most 2^31 - 1; 0 where the position is negative.

    Raises:
        ArgumentError: a wrong dtype or shape, ratio < 0.
    """
    ratio = indexer_checks.visible_entries(positions, ratio)
    result: Tensor = torch.ops.dsv4.visible_entries.default(positions, ratio, impl)
    return result


def index_queries(
    q: Tensor,
    weights: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    format: IndexFormat | str = IndexFormat.FP4,
    hadamard: bool = False,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    weight_dtype: str = "fp32",
    impl: str | None = None,
) -> IndexQueries:
    """Index queries as codes, and their weights.

    Args:
        q: [tokens, H, d], bf16: the projection wq_b; d a power of two, from 32 to 128 for fp4, from 2 to 512 for fp8.
        weights: [tokens, H], bf16: the projection weights_proj.
        table: fp32 [positions, rotated], of `rope_table`; rotates the last dims.
        positions: [tokens], int64 or int32. A query whose position the table does not have is zeros.
        format: fp4 or fp8.
        hadamard: transform after the rotation, as V4 does. Keys and queries must agree.
        amax_floor: of the quantiser; None for the official one of the format.
        ties, zero_sign: of fp4, as in `encode_e2m1`; without effect on fp8.
        weight_dtype: fp32; or bf16 with fp4, the official code's.
        impl: a backend by name, else the device's default.

    Returns:
        IndexQueries(codes uint8 [tokens, H, d/2], scales int32 [tokens, H], weights): w (d H)^-1/2. With fp8 codes e4m3 [tokens, H, d],
        scales None, and weights fp32 times the query's scale.

    Raises:
        ArgumentError: wrong dtypes, shapes or options, bf16 weights with fp8, tensors that require grad.
    """
    quantizer = indexer_checks.index_queries(q, weights, table, positions, format, hadamard, amax_floor, ties, zero_sign, weight_dtype)
    checks.no_grad(q=q, weights=weights, table=table)
    chosen, floor, *fp4 = quantizer
    codes, scales, scaled = torch.ops.dsv4.index_queries.default(
        q, weights, table, positions, str(chosen), hadamard, floor, *map(str, fp4), weight_dtype, impl
    )
    if chosen is IndexFormat.FP8:
        return IndexQueries(codes.view(torch.float8_e4m3fn), None, scaled)
    return IndexQueries(codes, scales, scaled)


def index_keys(
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float | None = None,
    hadamard: bool = False,
    format: IndexFormat | str = IndexFormat.FP4,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    impl: str | None = None,
) -> IndexKeys:
    """Index keys of entries as codes.

    Args:
        x: [entries, d], bf16. V4: pooled entries of the index compressor; V4.1: wk(latent).
        table: fp32 [positions, rotated], of `rope_table`.
        positions: [entries], int64 or int32: of the entry's first token. A key whose position the table does not have is zeros.
        weight: [d], bf16 or fp32: of the norm, with `eps`; both None for rows that are normalised already.
        eps: of the norm, >= 0, an fp32 number.
        hadamard: transform after the rotation, as V4 does.
        format, amax_floor, ties, zero_sign: as in `index_queries`.
        impl: a backend by name, else the device's default.

    Returns:
        IndexKeys(codes uint8 [entries, d/2], scales int32 [entries]), or (e4m3 [entries, d], fp32 [entries]) with fp8.

    Raises:
        ArgumentError: wrong dtypes, shapes or options, one of weight and eps without the other, tensors that require grad.
    """
    quantizer = indexer_checks.index_keys(x, table, positions, weight, eps, hadamard, format, amax_floor, ties, zero_sign)
    checks.no_grad(x=x, weight=weight, table=table)
    chosen, floor, *fp4 = quantizer
    given = x, table, positions, weight, 0.0 if eps is None else eps, hadamard
    codes, scales = torch.ops.dsv4.index_keys.default(*given, str(chosen), floor, *map(str, fp4), impl)
    return IndexKeys(codes.view(torch.float8_e4m3fn) if chosen is IndexFormat.FP8 else codes, scales)


def store_index_keys(
    keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: IndexFormat | str, page_size: int, impl: str | None = None
) -> Tensor:
    """Write keys into slots of the pages, in place.

    Args:
        keys: of `index_keys`.
        pages: uint8 [pages, stride], updated; stride at least page_size (bytes of codes + 4); pages may begin anywhere.
        slots: int64 or int32 [entries]: page * page_size + place in the page. Those outside the cache are skipped.
        format: of the keys.
        page_size: slots of a page, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        `pages`. Where keys share a slot it holds the last of them.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages that overlap or are too short, keys of the other format.
    """
    layout, _ = indexer_checks.store_index_keys(keys, pages, slots, format, page_size)
    torch.ops.dsv4.store_index_keys.default(keys.codes.view(torch.uint8), keys.scales, pages, slots, layout.name, page_size, impl)
    return pages


def load_index_keys(
    pages: Tensor, slots: Tensor, *, format: IndexFormat | str, page_size: int, dim: int, impl: str | None = None
) -> IndexKeys:
    """The keys in slots of the pages.

    Args:
        pages: uint8 [pages, stride], as `store_index_keys` takes them.
        slots: int64 or int32 [entries].
        format: fp4 or fp8.
        page_size: slots of a page, >= 1.
        dim: numbers of a key.
        impl: a backend by name, else the device's default.

    Returns:
        IndexKeys as `index_keys` gives them; zeros for slots outside the cache, whose bytes are not read.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages that are too short, a dim that the format does not have.
    """
    layout = indexer_checks.load_index_keys(pages, slots, format, page_size, dim)
    codes, scales = torch.ops.dsv4.load_index_keys.default(pages, slots, layout.name, page_size, dim, impl)
    return IndexKeys(codes.view(torch.float8_e4m3fn) if layout.name == IndexFormat.FP8 else codes, scales)


def index_logits(
    queries: IndexQueries,
    keys: IndexKeys,
    *,
    starts: Tensor | None = None,
    ends: Tensor,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    impl: str | None = None,
) -> Tensor:
    """Scores of all entries: the sum over heads of relu(q . k) times the head's weight.

    Args:
        queries: of `index_queries`; weights fp32 or bf16 in either format. bf16 ones give the bits of the same numbers in fp32.
        keys: of `index_keys`, in the same format, scales not below 0.
        starts, ends: [tokens], int32 or int64: a token sees entries starts <= j < ends; starts None is 0. Either may lie outside 0 .. n.
        precision: fp32; or bf16, the official code's.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, entries], or bf16; -inf where an entry is not seen. On CUDA rows lie apart: stride(0) is above `entries`.

    Raises:
        ArgumentError: wrong dtypes or shapes, keys and queries of two formats or sizes, tensors that require grad.
    """
    chosen = indexer_checks.index_logits(queries, keys, starts, ends, precision)
    result: Tensor = torch.ops.dsv4.index_logits.default(*_raw(queries, keys), starts, ends, chosen, impl)
    return result


def paged_index_logits(
    queries: IndexQueries,
    pages: Tensor,
    block_table: Tensor,
    requests: Tensor,
    ends: Tensor,
    *,
    format: IndexFormat | str,
    page_size: int,
    width: int,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    impl: str | None = None,
) -> Tensor:
    """Scores of the entries of each token's own request, whose keys lie in pages.

    Args:
        queries: of `index_queries`.
        pages: uint8 [pages, stride], as `store_index_keys` takes them.
        block_table: [requests, columns], int32: the pages of each request in order, -1 where it has none.
        requests: [tokens], int32: whose token it is.
        ends: [tokens], int32 or int64: the first entry that a token does not see.
        format: of queries and pages.
        page_size: slots of a page, >= 1.
        width: entries of the result.
        precision: as in `index_logits`.
        impl: a backend by name, else the device's default.

    Returns:
        fp32 [tokens, width], or bf16; -inf where the request, the column or the page is not there. Strides as `index_logits`.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, queries of the other format, tensors that require grad.
    """
    chosen, _, _ = indexer_checks.paged_index_logits(queries, pages, block_table, requests, ends, format, page_size, width, precision)
    result: Tensor = torch.ops.dsv4.paged_index_logits.default(
        *_raw(queries), pages, block_table, requests, ends, page_size, width, chosen, impl
    )
    return result


def select_topk(
    logits: Tensor,
    k: int,
    *,
    ends: Tensor | None = None,
    starts: Tensor | None = None,
    order: IndexOrder | str = IndexOrder.ANY,
    block_table: Tensor | None = None,
    requests: Tensor | None = None,
    page_size: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """The k best entries of each query; ties to the smaller entry, NaN and -inf never.

    Args:
        logits: [tokens, n], fp32 or bf16.
        k: picks of a token, >= 1, also beyond n.
        ends: [tokens], int32 or int64: the first entry that a token does not see; None for n.
        starts: [tokens], int32 or int64: the first entry that it sees; None for 0. Picks are counted from here.
        order: score, index, or any: then the set alone is promised.
        block_table: [requests, pages], int32, with `requests` [tokens], int32, and `page_size`: picks become slots.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, k], -1 behind the last pick; with a block table also for picks whose page is not there.

    Raises:
        ArgumentError: wrong dtypes or shapes, k < 1, an unknown order, some of block_table, requests and page_size without the others.
    """
    chosen = indexer_checks.select_topk(logits, k, ends, starts, order, block_table, requests, page_size)
    checks.no_grad(logits=logits)
    result: Tensor = torch.ops.dsv4.select_topk.default(logits, k, ends, starts, chosen, block_table, requests, page_size or 0, impl)
    return result


def candidate_blocks(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048, impl: str | None = None) -> Tensor:
    """The blocks of entries that later layers choose from: the newest visible entry's, and those with the best entries.

    Args:
        logits: [tokens, n], fp32 or bf16.
        ends: [tokens], int32 or int64: the first entry that a token does not see.
        block: entries of a block, >= 1.
        count: blocks of a token, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        int32 [tokens, min(count, ceil(n / block))], ascending, -1 behind the last.

    Raises:
        ArgumentError: wrong dtypes or shapes, block or count < 1.
    """
    indexer_checks.candidate_blocks(logits, ends, block, count)
    checks.no_grad(logits=logits)
    blocks: Tensor = torch.ops.dsv4.candidate_blocks.default(logits, ends, block, count, impl)
    return blocks


def restrict_to_blocks(logits: Tensor, blocks: Tensor, *, block: int = 8, impl: str | None = None) -> Tensor:
    """Scores with -inf outside of the kept blocks.

    Args:
        logits: [tokens, n], fp32 or bf16.
        blocks: [tokens, count], int32 or int64, as `candidate_blocks` gives them; numbers of no block are skipped.
        block: entries of a block, >= 1.
        impl: a backend by name, else the device's default.

    Returns:
        [tokens, n] of the dtype of `logits`, a new contiguous tensor.

    Raises:
        ArgumentError: wrong dtypes or shapes, block < 1.
    """
    indexer_checks.restrict_to_blocks(logits, blocks, block)
    checks.no_grad(logits=logits)
    result: Tensor = torch.ops.dsv4.restrict_to_blocks.default(logits, blocks, block, impl)
    return result


def select_entries(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    k: int,
    *,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    order: IndexOrder | str = IndexOrder.INDEX,
    candidates: Tensor | None = None,
    block: int = 8,
    chunk: int = CHUNK,
    budget_bytes: int = BUDGET_BYTES,
    impl: str | None = None,
) -> Tensor:
    """The k best entries of each token: `index_logits`, `restrict_to_blocks` and `select_topk`, a chunk of tokens at a time.

    Args:
        queries, keys, ends, precision: as in `index_logits`.
        k, order: as in `select_topk`.
        candidates: [tokens, count], int32, of `select_candidates`: entries of other blocks take no part; None for all.
        block: entries of a block of `candidates`.
        chunk: tokens scored at a time, at most.
        budget_bytes: bytes of fp32 logits at a time, at most, where that leaves a token. The result depends on neither.
        impl: a backend by name, else the device's default: of the logits; what DeepGEMM does not have is Triton's.

    Returns:
        int32 [tokens, k], -1 behind the last pick.

    Raises:
        ArgumentError: as the three functions; chunk or budget_bytes < 1.
    """
    chosen = indexer_checks.select_entries(queries, keys, ends, k, precision, order, candidates, block, chunk, budget_bytes)
    limits = block, chunk, budget_bytes
    result: Tensor = torch.ops.dsv4.select_entries.default(*_raw(queries, keys), ends, k, precision, chosen, candidates, *limits, impl)
    return result


def select_candidates(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    *,
    block: int = 8,
    count: int = 2048,
    precision: LogitPrecision | str = LogitPrecision.FP32,
    chunk: int = CHUNK,
    budget_bytes: int = BUDGET_BYTES,
    impl: str | None = None,
) -> Tensor:
    """The candidate blocks of each token: `index_logits` and `candidate_blocks`, a chunk of tokens at a time.

    Args:
        queries, keys, ends, precision: as in `index_logits`.
        block, count: as in `candidate_blocks`.
        chunk, budget_bytes, impl: as in `select_entries`.

    Returns:
        int32 [tokens, min(count, ceil(entries / block))], ascending, -1 behind the last.

    Raises:
        ArgumentError: as the two functions; chunk or budget_bytes < 1.
    """
    indexer_checks.select_candidates(queries, keys, ends, precision, block, count, chunk, budget_bytes)
    limits = block, count, chunk, budget_bytes
    blocks: Tensor = torch.ops.dsv4.select_candidates.default(*_raw(queries, keys), ends, precision, *limits, impl)
    return blocks


def _raw(queries: IndexQueries, keys: IndexKeys | None = None) -> tuple[Tensor | None, ...]:
    """Queries, and keys, as operators take them: without a derivative."""
    checks.no_grad(**{"queries.weights": queries.weights, "keys.scales": None if keys is None else keys.scales})
    given = queries.codes.view(torch.uint8), queries.scales, queries.weights
    return given if keys is None else (*given, keys.codes.view(torch.uint8), keys.scales)
