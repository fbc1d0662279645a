"""Argument checks of `indexer`, shared by both implementations: dtypes, shapes, strides and host values, never what a tensor holds.

Functions have the names of the public ones that they check and return what was chosen. Two host rules that both sides follow stand here
as well: how an FP8 scale is divided (`FP8_DIVISION`), and how many queries are scored at a time (`queries_at_a_time`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from dsv4 import checks, norm_checks
from dsv4.formats import INDEX_LAYOUTS, IndexLayout
from dsv4.quantization_checks import FP4_FLOORS, FP8_FLOORS_ABOVE_ZERO, fp4_rounding
from dsv4.types import (
    ArgumentError,
    IndexFormat,
    IndexKeys,
    IndexOrder,
    IndexQueries,
    LogitPrecision,
    ScaleDivision,
    Ties,
    ZeroSign,
)

INTEGERS = ("int32", "int64")
FP8_DIVISION = ScaleDivision.DIVIDE  # scale = fl32(max(1e-4, amax) / 448), as DeepGEMM's casts and SGLang's kernels form it
LEAST_DIM = {IndexFormat.FP8: 2, IndexFormat.FP4: 32}
MOST_DIM = {IndexFormat.FP8: 512, IndexFormat.FP4: 128}  # FP4: four scale bytes of 32 numbers each
FLOORS = {IndexFormat.FP8: FP8_FLOORS_ABOVE_ZERO, IndexFormat.FP4: FP4_FLOORS}
OFFICIAL_FLOORS = {IndexFormat.FP8: "official", IndexFormat.FP4: "official_fp4"}
BUDGET_BYTES = 256 * 2**20  # of logits at a time
CHUNK = 1024  # queries at a time
LARGEST_PAGE = 2**31 - 1  # slots of a page, where picks become int32 slots: the product with a page must fit 64 bits

Floats = str | Sequence[str]  # "bf16"; the reference also takes fp64 where its roundings are off


class IndexQuantizer(NamedTuple):
    """How index queries or keys are quantised."""

    format: IndexFormat
    floor: str
    ties: Ties  # of FP4
    zero_sign: ZeroSign  # of FP4


def visible_entries(positions: Tensor, ratio: int) -> int:
    """Arguments of `visible_entries`; tokens of an entry, 1 where there is no compression."""
    checks.tensor("positions", positions, INTEGERS, ("tokens",))
    checks.at_least("ratio", ratio, 0)
    return max(ratio, 1)


def index_queries(
    q: Tensor,
    weights: Tensor,
    table: Tensor,
    positions: Tensor,
    format: str,
    hadamard: bool,
    amax_floor: str | None,
    ties: str,
    zero_sign: str,
    weight_dtype: str,
    floats: Floats = "bf16",
) -> IndexQuantizer:
    """Arguments of `index_queries`, and how to quantise."""
    checks.tensor("q", q, floats, ("tokens", "heads", "dim"))
    if q.shape[1] < 1:
        raise ArgumentError("q", f"shape {list(q.shape)}", "must have a head or more")
    chosen = _quantizer("q", q, format, hadamard, amax_floor, ties, zero_sign)
    checks.tensor("weights", weights, floats, (q.shape[0], q.shape[1]))
    checks.one_of("weight_dtype", weight_dtype, ("fp32", "bf16"))
    if chosen.format is IndexFormat.FP8 and weight_dtype != "fp32":
        raise ArgumentError("weight_dtype", repr(weight_dtype), "must be fp32 with fp8: the query's scale is multiplied into the weight")
    _rotated("q", q, table, positions)
    checks.same_device("weights", weights, "q", q)
    return chosen


def index_keys(
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    weight: Tensor | None,
    eps: float | None,
    hadamard: bool,
    format: str,
    amax_floor: str | None,
    ties: str,
    zero_sign: str,
    floats: Floats = "bf16",
) -> IndexQuantizer:
    """Arguments of `index_keys`, and how to quantise."""
    checks.tensor("x", x, floats, ("entries", "dim"))
    chosen = _quantizer("x", x, format, hadamard, amax_floor, ties, zero_sign)
    _rotated("x", x, table, positions)
    if (weight is None) != (eps is None):
        missing = "weight" if weight is None else "eps"
        raise ArgumentError(missing, "None", "a norm wants both weight and eps", "Leave out both where keys have no norm")
    if weight is not None and eps is not None:
        norm_checks.weights(x, weight)
        norm_checks.epsilon(eps)
    return chosen


def store_index_keys(keys: IndexKeys, pages: Tensor, slots: Tensor, format: str, page_size: int) -> tuple[IndexLayout, int]:
    """Arguments of `store_index_keys`: the layout, and numbers of a key."""
    layout = index_layout(format)
    dim = _keys(keys, checks.choice("format", format, IndexFormat))
    index_pages(pages, layout, dim, page_size, written=True)
    checks.tensor("slots", slots, INTEGERS, (keys.codes.shape[0],))
    checks.same_device("slots", slots, "pages", pages)
    checks.same_device("keys.codes", keys.codes, "pages", pages)
    return layout, dim


def load_index_keys(pages: Tensor, slots: Tensor, format: str, page_size: int, dim: int) -> IndexLayout:
    """Arguments of `load_index_keys`, and the layout."""
    layout = index_layout(format)
    chosen = checks.choice("format", format, IndexFormat)
    checks.power_of_two("dim", dim, LEAST_DIM[chosen], MOST_DIM[chosen])
    index_pages(pages, layout, dim, page_size)
    checks.tensor("slots", slots, INTEGERS, ("entries",))
    checks.same_device("slots", slots, "pages", pages)
    return layout


def index_logits(
    queries: IndexQueries, keys: IndexKeys, starts: Tensor | None, ends: Tensor, precision: str, *, rows: bool = False
) -> LogitPrecision:
    """Arguments of `index_logits`, and the precision. `rows`: numbers in the place of codes are allowed, as numerics without codes make."""
    chosen = checks.choice("precision", precision, LogitPrecision)
    format, dim = _queries(queries, rows)
    _is_keys(keys)
    checks.tensor("ends", ends, INTEGERS)
    if rows and keys.codes.dtype == checks.DTYPES["fp64"]:
        checks.tensor("keys.codes", keys.codes, "fp64", ("entries", dim))
    elif _keys(keys, format) != dim:
        raise ArgumentError("keys.codes", f"keys of {_keys(keys, format)} numbers", f"queries have {dim}")
    _ranges(queries.codes.shape[0], starts, ends, "queries.codes", queries.codes)
    checks.same_device("keys.codes", keys.codes, "queries.codes", queries.codes)
    return chosen


def paged_index_logits(
    queries: IndexQueries,
    pages: Tensor,
    block_table: Tensor,
    requests: Tensor,
    ends: Tensor,
    format: str,
    page_size: int,
    width: int,
    precision: str,
    *,
    rows: bool = False,
) -> tuple[LogitPrecision, IndexLayout, int]:
    """Arguments of `paged_index_logits`: the precision, the layout, and numbers of a key. `rows`: as in `index_logits`."""
    chosen = checks.choice("precision", precision, LogitPrecision)
    layout = index_layout(format)
    have, dim = _queries(queries, rows)
    if have is not checks.choice("format", format, IndexFormat):
        raise ArgumentError("format", repr(str(format)), f"the queries are {have}")
    index_pages(pages, layout, dim, page_size)
    checks.at_least("width", width, 0)
    checks.tensor("ends", ends, INTEGERS)
    _table(block_table, requests, queries.codes.shape[0])
    _ranges(queries.codes.shape[0], None, ends, "queries.codes", queries.codes)
    for name, tensor in (("pages", pages), ("block_table", block_table), ("requests", requests)):
        checks.same_device(name, tensor, "queries.codes", queries.codes)
    return chosen, layout, dim


def select_topk(
    logits: Tensor,
    k: int,
    ends: Tensor | None,
    starts: Tensor | None,
    order: str,
    block_table: Tensor | None,
    requests: Tensor | None,
    page_size: int | None,
    floats: Floats = ("fp32", "bf16"),
) -> IndexOrder:
    """Arguments of `select_topk`, and the order."""
    checks.tensor("logits", logits, floats, ("tokens", "entries"))
    checks.at_least("k", k, 1)
    chosen = checks.choice("order", order, IndexOrder)
    _ranges(logits.shape[0], starts, ends, "logits", logits)
    given = {"block_table": block_table, "requests": requests, "page_size": page_size}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ArgumentError(missing[0], "None", "slots want block_table, requests and page_size together")
    if block_table is not None and requests is not None and page_size is not None:
        checks.at_least("page_size", page_size, 1)
        checks.at_most("page_size", page_size, LARGEST_PAGE)
        _table(block_table, requests, logits.shape[0])
        checks.same_device("block_table", block_table, "logits", logits)
        checks.same_device("requests", requests, "logits", logits)
    return chosen


def candidate_blocks(logits: Tensor, ends: Tensor, block: int, count: int, floats: Floats = ("fp32", "bf16")) -> None:
    """Arguments of `candidate_blocks`."""
    checks.tensor("logits", logits, floats, ("tokens", "entries"))
    checks.tensor("ends", ends, INTEGERS)
    _ranges(logits.shape[0], None, ends, "logits", logits)
    checks.at_least("block", block, 1)
    checks.at_least("count", count, 1)


def restrict_to_blocks(logits: Tensor, blocks: Tensor, block: int, floats: Floats = ("fp32", "bf16")) -> None:
    """Arguments of `restrict_to_blocks`."""
    checks.tensor("logits", logits, floats, ("tokens", "entries"))
    checks.tensor("blocks", blocks, INTEGERS, (logits.shape[0], "count"))
    checks.same_device("blocks", blocks, "logits", logits)
    checks.at_least("block", block, 1)


def select_entries(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    k: int,
    precision: str,
    order: str,
    candidates: Tensor | None,
    block: int,
    chunk: int,
    budget_bytes: int,
    *,
    rows: bool = False,
) -> IndexOrder:
    """Arguments of `select_entries`, and the order."""
    index_logits(queries, keys, None, ends, precision, rows=rows)
    checks.at_least("k", k, 1)
    checks.at_least("block", block, 1)
    _chunks(chunk, budget_bytes)
    if candidates is not None:
        checks.tensor("candidates", candidates, INTEGERS, (queries.codes.shape[0], "count"))
        checks.same_device("candidates", candidates, "queries.codes", queries.codes)
    return checks.choice("order", order, IndexOrder)


def select_candidates(
    queries: IndexQueries,
    keys: IndexKeys,
    ends: Tensor,
    precision: str,
    block: int,
    count: int,
    chunk: int,
    budget_bytes: int,
    *,
    rows: bool = False,
) -> None:
    """Arguments of `select_candidates`."""
    index_logits(queries, keys, None, ends, precision, rows=rows)
    checks.at_least("block", block, 1)
    checks.at_least("count", count, 1)
    _chunks(chunk, budget_bytes)


def queries_at_a_time(entries: int, chunk: int, budget_bytes: int) -> int:
    """How many queries are scored together: at most `chunk`, at most `budget_bytes` of fp32 logits, at least one."""
    return max(1, min(chunk, budget_bytes // (4 * max(entries, 1))))


def index_layout(format: str) -> IndexLayout:
    """The layout of this format."""
    return INDEX_LAYOUTS[checks.choice("format", format, IndexFormat)]


def index_pages(value: Tensor, layout: IndexLayout, dim: int, page_size: int, *, written: bool = False) -> int:
    """Pages that hold `page_size` keys each; how many slots there are. `written`: no byte may belong to two pages."""
    checks.tensor("pages", value, "uint8", ("pages", "bytes"))
    checks.at_least("page_size", page_size, 1)
    least = page_size * layout.token_bytes(dim)
    if value.shape[1] < least:
        limit = f"a page of {page_size} {layout.name} keys of {dim} numbers needs {least} bytes"
        raise ArgumentError("pages", f"shape {list(value.shape)}", limit)
    if value.stride(1) != 1:
        raise ArgumentError("pages", f"strides {value.stride()}", "the bytes of a page must lie next to each other", "Use contiguous()")
    if written:
        checks.writable("pages", value)
        if value.shape[0] > 1 and value.stride(0) < value.shape[1]:
            raise ArgumentError("pages", f"strides {value.stride()}", "pages overlap in memory", "Use contiguous()")
    return value.shape[0] * page_size


def _quantizer(name: str, rows: Tensor, format: str, hadamard: bool, amax_floor: str | None, ties: str, zero_sign: str) -> IndexQuantizer:
    chosen = checks.choice("format", format, IndexFormat)
    _dim(name, rows, rows.shape[-1], chosen)
    checks.one_of("hadamard", hadamard, (False, True))
    floor = OFFICIAL_FLOORS[chosen] if amax_floor is None else amax_floor
    checks.one_of("amax_floor", floor, FLOORS[chosen])
    return IndexQuantizer(chosen, floor, *fp4_rounding(ties, zero_sign))


def _dim(name: str, tensor: Tensor, dim: int, format: IndexFormat) -> None:
    least, most = LEAST_DIM[format], MOST_DIM[format]
    if not least <= dim <= most or dim & (dim - 1):
        limit = f"{format} wants a power of two from {least} to {most} numbers in a head"
        raise ArgumentError(name, f"shape {list(tensor.shape)}", limit)


def _rotated(name: str, x: Tensor, table: Tensor, positions: Tensor) -> None:
    checks.tensor("table", table, "fp32", ("positions", "rotated"))
    places, rotated = table.shape
    if places < 1 or rotated < 2 or rotated % 2 or rotated > x.shape[-1]:
        limit = f"must have a position or more, and an even number of columns from 2 to {x.shape[-1]}"
        raise ArgumentError("table", f"shape {list(table.shape)}", limit, "rope_table builds it")
    checks.tensor("positions", positions, INTEGERS, (x.shape[0],))
    checks.same_device("table", table, name, x)
    checks.same_device("positions", positions, name, x)


def _queries(queries: IndexQueries, rows: bool) -> tuple[IndexFormat, int]:
    """Queries as `index_queries` makes them: their format and dim."""
    if not isinstance(queries, IndexQueries):
        raise ArgumentError("queries", type(queries).__name__, "must be IndexQueries(codes, scales, weights)", "index_queries makes them")
    allowed = ("e4m3", "uint8", "fp64") if rows else ("e4m3", "uint8")
    codes = checks.tensor("queries.codes", queries.codes, allowed, ("tokens", "heads", "dim"))
    tokens, heads, width = codes.shape
    weights = ("fp32", "bf16", "fp64") if codes.dtype == checks.DTYPES["fp64"] or rows else ("fp32", "bf16")
    checks.tensor("queries.weights", queries.weights, weights, (tokens, heads))
    checks.same_device("queries.weights", queries.weights, "queries.codes", codes)
    if codes.dtype == checks.DTYPES["uint8"]:
        checks.tensor("queries.scales", queries.scales, "int32", (tokens, heads))
        _dim("queries.codes", codes, 2 * width, IndexFormat.FP4)
        return IndexFormat.FP4, 2 * width
    if queries.scales is not None:
        raise ArgumentError("queries.scales", "a tensor", "must be None with e4m3 codes: their scale is part of the weight")
    _dim("queries.codes", codes, width, IndexFormat.FP8)
    return IndexFormat.FP8, width


def _keys(keys: IndexKeys, format: IndexFormat) -> int:
    """Keys of this format, as `index_keys` makes them; numbers of a key."""
    _is_keys(keys)
    fp4 = format is IndexFormat.FP4
    codes = checks.tensor("keys.codes", keys.codes, "uint8" if fp4 else "e4m3", ("entries", "dim"))
    checks.tensor("keys.scales", keys.scales, "int32" if fp4 else "fp32", (codes.shape[0],))
    checks.same_device("keys.scales", keys.scales, "keys.codes", codes)
    dim = codes.shape[1] * (2 if fp4 else 1)
    _dim("keys.codes", codes, dim, format)
    return dim


def _is_keys(keys: object) -> None:
    if not isinstance(keys, IndexKeys):
        raise ArgumentError("keys", type(keys).__name__, "must be IndexKeys(codes, scales)", "index_keys makes them")


def _ranges(tokens: int, starts: Tensor | None, ends: Tensor | None, name: str, other: Tensor) -> None:
    for word, value in (("starts", starts), ("ends", ends)):
        if value is not None:
            checks.tensor(word, value, INTEGERS, (tokens,))
            checks.same_device(word, value, name, other)


def _table(block_table: Tensor, requests: Tensor, tokens: int) -> None:
    checks.tensor("block_table", block_table, "int32", ("requests", "pages"))
    checks.tensor("requests", requests, INTEGERS, (tokens,))


def _chunks(chunk: int, budget_bytes: int) -> None:
    checks.at_least("chunk", chunk, 1)
    checks.at_least("budget_bytes", budget_bytes, 1)
