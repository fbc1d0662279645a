"""What both compressors share and compute alike: argument checks, which look at dtypes, shapes and host values, never at what a tensor
holds, and the two functions on the host, `compressor_state` and `roll_back`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4 import checks, kv_checks, norm_checks
from dsv4.formats import KVLayout
from dsv4.types import ArgumentError

LARGEST_START = 2**62 - 1  # positions and their sums with a chunk's length stay within int64

Floats = str | Sequence[str]  # "fp32"; the reference also takes fp64 where its roundings are off


def window_span(ratio: int, overlap: bool) -> int:
    """Tokens that an entry may look back on, its own among them: what a ring must hold. 0 where an entry is one token, which nothing
    need remember.
    """
    if overlap:
        return 2 * ratio
    return ratio if ratio > 1 else 0


def compressor_state(
    requests: int,
    dim: int,
    *,
    ratio: int,
    overlap: bool = False,
    drafts: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The rings of requests that have seen no token.

    Args:
        requests: how many.
        dim: numbers of an entry.
        ratio: tokens of an entry, at least 1.
        overlap: whether an entry also looks at the tokens of the one before it (ratio 4 of V4).
        drafts: tokens that may be rolled back.
        device: of the result.

    Returns:
        fp32 zeros [requests, ring, 2 * width], width = dim, or 2 * dim with overlap; ring = ratio (2 * ratio with overlap) + drafts, and 0
        where an entry is one token. Position p of a request lies in row p mod ring: its values, then its raw scores.

    Raises:
        ArgumentError: a size below its least.

    Notes:
        What a ring holds of positions that its request has not reached is never read.
    """
    ratio_alone(ratio)
    for name, value, least in (("requests", requests, 0), ("dim", dim, 1), ("drafts", drafts, 0)):
        checks.at_least(name, value, least)
    span = window_span(ratio, overlap)
    ring, width = span + drafts if span else 0, 2 * dim if overlap else dim
    return torch.zeros(requests, ring, 2 * width, dtype=torch.float32, device=device)


def roll_back(starts: Tensor, accepted: Tensor, *, drafted: int, state: Tensor, ratio: int, overlap: bool = False) -> Tensor:
    """Where requests stand after a call of which they keep only the first tokens.

    The next call takes these as `starts`: it reads of the ring only what lies before them, and overwrites the rest.

    Args:
        starts: int64 [requests]: `starts` of that call.
        accepted: int64 or int32 [requests]: tokens of it that stay.
        drafted: tokens that at most one request drops.
        state: the state after that call.
        ratio, overlap: as of `compress`.

    Returns:
        int64 [requests], starts + accepted.

    Raises:
        ArgumentError: wrong dtypes or shapes; more tokens than the ring keeps beside an entry's own: the last of an entry's tokens would
            be overwritten already.
    """
    ratio_alone(ratio)
    checks.tensor("starts", starts, "int64", ("requests",))
    checks.tensor("accepted", accepted, ("int64", "int32"), tuple(starts.shape))
    checks.same_device("accepted", accepted, "starts", starts)
    checks.tensor("state", state, ("fp32", "fp64"), ("states", "ring", "2 * width"))
    checks.at_least("drafted", drafted, 0)
    span = window_span(ratio, overlap)
    if span and drafted > state.shape[1] - span:
        limit = f"a ring of {state.shape[1]} rows keeps {max(state.shape[1] - span, 0)} tokens beside the {span} that an entry needs"
        raise ArgumentError("drafted", str(drafted), limit, f"compressor_state(drafts={drafted}) makes a wider one")
    return starts + accepted


def ratio_alone(ratio: int) -> None:
    """Tokens of an entry."""
    checks.at_least("ratio", ratio, 1)


def project(x: Tensor, wkv: Tensor, wgate: Tensor, floats: Floats) -> None:
    """Arguments of `project`."""
    checks.tensor("x", x, floats, ("tokens", "hidden"))
    checks.tensor("wkv", wkv, ("bf16", "fp32"), ("width", x.shape[1]))
    checks.tensor("wgate", wgate, ("bf16", "fp32"), tuple(wkv.shape))
    checks.same_device("wkv", wkv, "x", x)
    checks.same_device("wgate", wgate, "x", x)


def plan(starts: Tensor, cu_seqlens: Tensor, ratio: int, tokens: int, state_rows: Tensor | None) -> int:
    """Arguments of `compression_plan`; how many rows it has."""
    ratio_alone(ratio)
    checks.tensor("starts", starts, "int64", ("requests",))
    requests = starts.shape[0]
    checks.tensor("cu_seqlens", cu_seqlens, "int32", (requests + 1,))
    checks.same_device("cu_seqlens", cu_seqlens, "starts", starts)
    checks.at_least("tokens", tokens, 0)
    if state_rows is not None:
        checks.tensor("state_rows", state_rows, "int32", (requests,))
        checks.same_device("state_rows", state_rows, "starts", starts)
    return min(tokens, tokens // ratio + requests)


def compress(
    values: Tensor,
    scores: Tensor,
    state: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    *,
    ratio: int,
    overlap: bool,
    ape: Tensor | None,
    state_rows: Tensor | None,
    floats: Floats,
) -> int:
    """Arguments of `compress`; how many rows it has."""
    checks.tensor("values", values, floats, ("tokens", "width"))
    tokens, width = values.shape
    checks.at_least("values", width, 1)
    if overlap:
        checks.multiple("values", width, 2, "It counts channels: with overlap the first half is of the entry before")
    checks.tensor("scores", scores, floats, (tokens, width))
    checks.same_device("scores", scores, "values", values)
    rows = plan(starts, cu_seqlens, ratio, tokens, state_rows)
    checks.same_device("starts", starts, "values", values)
    checks.tensor("state", state, floats, ("states", "ring", 2 * width))
    checks.same_device("state", state, "values", values)
    span = window_span(ratio, overlap)
    if state.shape[1] < span or (span == 0 and state.shape[1]):
        limit = f"a ring must have {span} rows or more" if span else "an entry of one token has a ring of 0 rows"
        raise ArgumentError("state", f"a ring of {state.shape[1]} rows", limit, "compressor_state makes it")
    if state_rows is None and starts.shape[0] > state.shape[0]:
        limit = f"without state_rows every one of the {starts.shape[0]} requests needs its own"
        raise ArgumentError("state", f"{state.shape[0]} states", limit)
    if ape is not None:
        checks.tensor("ape", ape, "fp32", (ratio, width))
        checks.same_device("ape", ape, "values", values)
    return rows


def store(
    rows: int,
    dim: int,
    values: Tensor,
    weight: Tensor,
    table: Tensor,
    pages: Tensor,
    slots: Tensor,
    *,
    eps: float,
    layout: str,
    page_size: int,
    amax_floor: str,
) -> KVLayout:
    """What `compress_and_store` takes beside the arguments of `compress`, which gave `rows` entries of `dim` numbers; the layout."""
    chosen = kv_checks.layout(layout)
    if dim != chosen.dims:
        raise ArgumentError("values", f"entries of {dim} numbers", f"the layout {chosen.name} holds {chosen.dims}")
    checks.tensor("weight", weight, ("bf16", "fp32"), (dim,))
    norm_checks.epsilon(eps)
    checks.tensor("table", table, "fp32", ("positions", "rotated"))
    places, rotated = table.shape
    if places < 1 or rotated < 2 or rotated % 2 or rotated > dim:
        limit = f"must have a position or more, and an even number of columns from 2 to {dim}"
        raise ArgumentError("table", f"shape {list(table.shape)}", limit, "rope_table builds it")
    kv_checks.pages(pages, chosen, page_size, written=True)
    kv_checks.slots(slots, (rows,), pages)
    kv_checks.floor(chosen, amax_floor)
    for name, value in (("weight", weight), ("table", table), ("pages", pages)):
        checks.same_device(name, value, "values", values)
    return chosen
