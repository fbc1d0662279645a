"""Wrong ways to merge parts, to attend to a draft's block, to say what lse is, and to list a window."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.reference import attention as right
from dsv4.types import AttentionResult, PagedRows


def equal_weights(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    result = right.merge_splits(outputs, lses, sink)
    there = (lses > -torch.inf)[..., None]
    mean = outputs.double().masked_fill(~there, 0.0).sum(0) / there.sum(0).clamp(min=1)
    return result._replace(output=mean.to(torch.bfloat16))


def base_2(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    natural = right.merge_splits(outputs, lses * math.log(2), None if sink is None else sink * math.log(2))
    return natural._replace(lse=natural.lse / math.log(2))


def _sink_in_each(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    """Once for each part."""
    return right.merge_splits(outputs, lses, None if sink is None else sink + math.log(len(outputs)))


def sink_left(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    return right.merge_splits(outputs, lses)


def _sink_reported(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    result = right.merge_splits(outputs, lses, sink)
    return result if sink is None else result._replace(lse=right.lse_with_sink(result.lse, sink))


def last_dropped(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    count = max(len(outputs) - 1, 1)
    return right.merge_splits(outputs[:count], lses[:count], sink)


def _empty_leaks(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    """NaN of empty parts times a weight of 0."""
    result = right.merge_splits(outputs, lses, sink)
    return result._replace(output=result.output.masked_fill(outputs.isnan().any(0), torch.nan))


def _empty_infinite(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    result = right.merge_splits(outputs, lses, sink)
    return result._replace(lse=right.lse_flashmla(result.lse))


def _bf16_parts(outputs: Tensor, lses: Tensor, sink: Tensor | None) -> AttentionResult:
    return right.merge_splits(outputs.to(torch.bfloat16), lses, sink)


def _block(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., AttentionResult]:
    """`draft_attention` as sparse attention over rows of the cache and rows of the block, which `change(list, block)` chooses."""

    def call(
        q: Tensor, block_kv: Tensor, main: PagedRows, slots: Tensor, sink: Tensor | None = None, *, block: int = 5, **options: Any
    ) -> AttentionResult:
        tokens = torch.arange(len(q))
        own = tokens[:, None] // block * block + torch.arange(block)
        lists = [right._paged_list(main, slots, options.get("lengths")), right._rows_list(block_kv, change(own, tokens[:, None]), None)]
        return right._attend(q, lists, sink, options.get("scale") or q.shape[2] ** -0.5)

    return call


def _first_query_s_slots(
    q: Tensor, block_kv: Tensor, main: PagedRows, slots: Tensor, sink: Tensor | None = None, *, block: int = 5, **options: Any
) -> AttentionResult:
    first = torch.arange(len(q)) // block * block
    return right.draft_attention(q, block_kv, main, slots[first], sink, block=block, **options)


def _window(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    return lambda positions, window=128: change(positions.long(), window).to(torch.int32)


def _shorter(positions: Tensor, window: int) -> Tensor:
    found = right.window_indices(positions, window=max(window - 1, 1)).long()
    return pad(found, (0, window - found.shape[1]), value=-1)


def _longer(positions: Tensor, window: int) -> Tensor:
    return right.window_indices(positions, window=window + 1).long()[:, :window]


def _ahead_of_it(positions: Tensor, window: int) -> Tensor:
    """As if the next token were its own: what an image's span would show."""
    return right.window_indices(torch.where(positions >= 0, positions + 1, positions), window=window).long()


def _holes_first(positions: Tensor, window: int) -> Tensor:
    found = right.window_indices(positions, window=window).long()
    return found.gather(1, (torch.arange(window) + (found >= 0).sum(1, keepdim=True)) % window)


def _newest_first(positions: Tensor, window: int) -> Tensor:
    return right.window_indices(positions, window=window).long().sort(1, descending=True).values


def _negative_as_zero(positions: Tensor, window: int) -> Tensor:
    return right.window_indices(positions.clamp(min=0), window=window).long()


DRAFT = (
    (_block(lambda own, token: torch.where(own <= token, own, -1)), "the block causal", ""),
    (_block(lambda own, token: torch.where(own == token, own, -1)), "only a query's own row of the block", ""),
    (_block(lambda own, token: torch.full_like(own, -1)), "the block's rows forgotten", ""),
    (_block(lambda own, token: own + own.shape[1]), "the rows of the next block", ""),
    (_block(lambda own, token: own % own.shape[1]), "every block sees the first one", ""),
    (_first_query_s_slots, "all queries read the list of the first", ""),
)
MERGE = (
    (equal_weights, "parts weigh alike", ""),
    (base_2, "natural lse taken for base 2", ""),
    (_sink_in_each, "the sink once for each part", ""),
    (sink_left, "no sink", ""),
    (_sink_reported, "lse with the sink", ""),
    (last_dropped, "the last part dropped", ""),
    (_empty_leaks, "what lies in empty parts shows", ""),
    (_empty_infinite, "lse of an empty row plus infinity", ""),
    (_bf16_parts, "parts rounded to bf16", ""),
)
OTHERS = (
    ("lse_flashmla", lambda lse: lse, "empty rows stay minus infinity", ""),
    ("lse_base2", lambda lse: lse * math.log(2), "the reciprocal factor", ""),
    ("lse_base2", lambda lse: lse * torch.tensor(math.log2(math.e)), "the factor rounded to fp32", ""),
    ("lse_with_sink", torch.maximum, "the larger one alone", ""),
    ("lse_with_sink", lambda lse, sink: right.lse_with_sink(lse, sink.roll(1)), "the sinks of other heads", "SA-03"),
    ("lse_with_sink", lambda lse, sink: torch.log(lse.exp() + sink.exp()), "without a maximum", "SA-15"),
    ("window_indices", _window(_shorter), "a window of one less", ""),
    ("window_indices", _window(_ahead_of_it), "the next token seen", "SA-10"),
    ("window_indices", _window(_longer), "a window of one more", ""),
    ("window_indices", _window(_holes_first), "-1 first", ""),
    ("window_indices", _window(_newest_first), "newest first", ""),
    ("window_indices", _window(_negative_as_zero), "absent positions taken for 0", ""),
)
