"""Wrong candidate blocks, and wrong selections in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.reference import indexer as right


def maxima(change: Callable[..., Tensor], *, forced: int = 0) -> Callable[..., Tensor]:
    """Candidate blocks by other scores of blocks; the forced block is that of the entry `forced` after the newest."""

    def blocks(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
        n = logits.shape[1]
        total, stops = -(-n // block), ends.long().clamp(0, n)
        seen = logits.float().where(torch.arange(n) < stops[:, None], -torch.inf)
        parts = pad(seen, (0, -n % block), value=-torch.inf).unflatten(1, (-1, block))
        best = change(parts, (stops - 1 + forced).div(block, rounding_mode="floor").where(stops > 0, -1))
        picks = right.select_topk(best, max(min(count, total), 1), order="index")
        return picks[:, : min(count, total)]

    return blocks


def usual(parts: Tensor, newest: Tensor) -> Tensor:
    """Its maxima, the newest block in front."""
    best = parts.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(2)
    return torch.where(torch.arange(best.shape[1]) == newest[:, None], torch.inf, best)


def newest_missed(parts: Tensor, newest: Tensor) -> Tensor:
    return usual(parts, torch.full_like(newest, -1))


def newest_as_equal(parts: Tensor, newest: Tensor) -> Tensor:
    """The newest has its own score, and is preferred among equals alone."""
    best = parts.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(2)
    return torch.where(torch.arange(best.shape[1]) == newest[:, None], best.nextafter(torch.tensor(torch.inf)), best)


def nan_wins(parts: Tensor, newest: Tensor) -> Tensor:
    best = parts.amax(2)
    return usual(torch.where(best.isnan(), torch.inf, best)[..., None], newest)


def nan_loses_the_block(parts: Tensor, newest: Tensor) -> Tensor:
    return usual(parts.amax(2)[..., None], newest)


def means(parts: Tensor, newest: Tensor) -> Tensor:
    return usual(parts.mean(2)[..., None], newest)


def first_of_block(parts: Tensor, newest: Tensor) -> Tensor:
    return usual(parts[..., :1], newest)


def empty_blocks_kept(parts: Tensor, newest: Tensor) -> Tensor:
    return usual(parts, newest).clamp(min=torch.finfo(torch.float32).min)


def ends_ignored(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    return right.candidate_blocks(logits, torch.full_like(ends, logits.shape[1]), block=block, count=count)


def larger_block(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    """Equal blocks by the larger number."""

    def change(parts: Tensor, newest: Tensor) -> Tensor:
        order = usual(parts, newest)
        ranks = order.flip(1).argsort(dim=1, stable=True, descending=True).argsort(1).flip(1)
        return torch.where(order == -torch.inf, -torch.inf, -ranks.float())

    return maxima(change)(logits, ends, block=block, count=count)


def not_ascending(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    kept = right.candidate_blocks(logits, ends, block=block, count=count)
    return kept.sort(dim=1, descending=True).values


def partial_block_dropped(logits: Tensor, ends: Tensor, *, block: int = 8, count: int = 2048) -> Tensor:
    n = logits.shape[1]
    kept = right.candidate_blocks(logits[:, : n - n % block], ends, block=block, count=count)
    return pad(kept, (0, min(count, -(-n // block)) - kept.shape[1]), value=-1)


def restricted(change: Callable[[Tensor, int], tuple[Tensor, int]]) -> Callable[..., Tensor]:
    """Other blocks, or blocks of another size."""

    def restrict(logits: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
        total = -(-logits.shape[1] // block)
        made, size = change(torch.where((blocks < 0) | (blocks >= total), torch.where(blocks < 0, -1, total), blocks.long()), block)
        return right.restrict_to_blocks(logits, made, block=size)

    return restrict


def zeros_outside(logits: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    ones = right.restrict_to_blocks(torch.ones_like(logits), blocks, block=block)
    return torch.where(ones == 1, logits, 0.0)


def added_mask(logits: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    """Scores plus 0 or -inf: NaN stays NaN outside."""
    return logits + right.restrict_to_blocks(torch.zeros_like(logits), blocks, block=block)


def last_entry_lost(logits: Tensor, blocks: Tensor, *, block: int = 8) -> Tensor:
    kept = right.restrict_to_blocks(logits, blocks, block=block)
    return kept.index_fill(1, torch.arange(logits.shape[1])[block - 1 :: block], -torch.inf)


def chosen(function: Callable[..., Tensor], change: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[..., Tensor]:
    """A selection with other arguments: `change` of (args, kwargs)."""

    def select(*args: Any, **kwargs: Any) -> Tensor:
        made, options = change(args, dict(kwargs))
        return function(*made, **options)

    return select


def without(name: str, value: Any) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """This option fixed."""
    return lambda args, kwargs: (args, {**kwargs, name: value})


def ends_of_the_first_chunk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A chunk takes its lengths from the beginning of the batch."""
    ends, chunk = args[2], kwargs["chunk"]
    return (*args[:2], ends[torch.arange(len(ends)) % chunk], *args[3:]), kwargs


def last_chunk_lost(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The last, partial chunk is not computed."""

    def select(*args: Any, **kwargs: Any) -> Tensor:
        found = function(*args, **kwargs)
        whole = len(found) - len(found) % kwargs["chunk"] if kwargs["chunk"] < len(found) else len(found)
        return torch.where(torch.arange(len(found))[:, None] < whole, found, -1)

    return select


def candidates_of_the_first_chunk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    blocks = kwargs.get("candidates")
    return args, kwargs if blocks is None else {**kwargs, "candidates": blocks[torch.arange(len(blocks)) % kwargs["chunk"]]}


def without_the_first(blocks: Tensor, block: int) -> tuple[Tensor, int]:
    return blocks[:, 1:], block


def of_eight(blocks: Tensor, block: int) -> tuple[Tensor, int]:
    return blocks, 8


def next_block(blocks: Tensor, block: int) -> tuple[Tensor, int]:
    return torch.where(blocks >= 0, blocks + 1, -1), block


def minus_one_is_block_0(blocks: Tensor, block: int) -> tuple[Tensor, int]:
    return blocks.clamp(min=0), block
