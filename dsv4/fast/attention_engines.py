"""What runs attention once sizes are known: an engine for each backend, made for calls up to a size and run for each of them.

Functions make an engine for the call at hand; `plan_attention` makes one that stays. What an engine holds it makes when it is made. Here
are those of our own kernels and bodies; `attention_libraries` has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.fast import attention_bodies as bodies
from dsv4.fast import dispatch
from dsv4.fast.adapters import flashinfer_mla
from dsv4.fast.attention_bodies import PagedPicks, Picks
from dsv4.formats import KV_LAYOUTS

HEADS = 64  # of one program of our kernels
KEYS = 64  # of one block of those for SM90; splits are counted in such blocks everywhere
MOST_SPLITS = 32
LARGEST_BUFFER = 2**18  # rows of a library's buffer that no plan has bounded: 256 MiB of bf16

Pair = tuple[Tensor, Tensor]


class Sizes(NamedTuple):
    """What an engine is made for."""

    tokens: int
    heads: int
    dim: int
    picks: tuple[int, ...]  # of each list
    layouts: tuple[str, ...]  # of each list, "" for bf16 rows
    device: torch.device
    scale: float
    split: bool = False  # whether a token's picks may be split among programs
    rows: int | None = None  # how many rows a list reads at most, each counted once; a promise


class Given(NamedTuple):
    """One call: lists of picks, the extra one second."""

    q: Tensor
    lists: tuple[Picks | PagedPicks, ...]
    sink: Tensor | None
    scale: float


class Engine(Protocol):
    """A way to run calls of some sizes."""

    splits: int

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse, in `out` if it is given."""
        ...


class Holder:
    """What an engine holds in parts: its tensors count as the engine's."""


def held(engine: Engine) -> int:
    """Bytes of the tensors that an engine holds, in lists and objects too."""
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in _tensors(vars(engine))}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
    elif isinstance(value, Holder | flashinfer_mla.RowAttention):
        yield from _tensors(vars(value))


def sizes_of(call: Given, *, split: bool = False) -> Sizes:
    """The sizes of one call. Rows are all that there are, if those fit a buffer."""
    tokens, heads, dim = call.q.shape
    picks = tuple(picks_of(one).shape[1] for one in call.lists)
    layouts = tuple(one.layout if isinstance(one, PagedPicks) else "" for one in call.lists)
    rows = [rows_there(one) for one in call.lists]
    return Sizes(tokens, heads, dim, picks, layouts, call.q.device, call.scale, split, max(rows) if sum(rows) <= LARGEST_BUFFER else None)


def picks_of(one: Picks | PagedPicks) -> Tensor:
    """The numbers of a list."""
    return one.slots if isinstance(one, PagedPicks) else one.indices


def rows_there(one: Picks | PagedPicks) -> int:
    """How many rows a list may pick from."""
    return one.pages.shape[0] * one.page_size if isinstance(one, PagedPicks) else one.rows.shape[0]


def empty_pair(q: Tensor) -> Pair:
    """Memory for results."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


class Blocks:
    """inductor and eager. They hold nothing but whether batch invariance was demanded; a run has scratch of its own."""

    splits = 1

    def __init__(self, run: Callable[..., Any], _: Sizes) -> None:
        self._run = run
        self._fixed = dispatch.batch_invariant()

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse."""
        result = bodies.attend(self._run, call.q, list(call.lists), call.sink, call.scale, fixed=self._fixed)
        return result if out is None else (out[0].copy_(result[0]), out[1].copy_(result[1]))


def kernel(name: str) -> Callable[..., Any]:
    """A launch of our kernels, imported at the first call, for Triton is not everywhere."""
    run: Callable[..., Any] = getattr(import_module("dsv4.fast.kernels.attention"), name)
    return run


def splits_of(sizes: Sizes, programs: int) -> int:
    """Into how many parts a token's picks are split: a power of two, so that kernels are few; the largest up to MOST_SPLITS that is below
    twice the number of blocks (so some parts may be empty) and that runs at once with the parts of the other tokens. 1 for more tokens
    than half the programs.

    Scratch is `splits * tokens * heads` rows, so no more than HEADS rows of each program: some 20 MB on the largest devices.
    """
    blocks = sum(-(-picks // KEYS) for picks in sizes.picks)
    whole = sizes.tokens * -(-sizes.heads // HEADS)
    most = min(programs // max(whole, 1), blocks, MOST_SPLITS)
    if not sizes.split or most < 2:
        return 1
    up = 1 << (most - 1).bit_length()
    return up if up * whole <= programs else up // 2


def tokens_of_splits(sizes: Sizes) -> tuple[int, ...]:
    """Numbers of tokens that together have every number of splits there is: each of them has kernels of its own."""
    programs = programs_at_once(sizes.device)
    found: dict[int, int] = {}
    for tokens in range(1, programs + 2):
        found.setdefault(splits_of(sizes._replace(tokens=tokens, split=True), programs), tokens)
    return tuple(found.values())


def programs_at_once(device: torch.device) -> int:
    """Programs of our kernels that run at the same time: one a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Triton:
    """Our kernels, from pages or rows as they are."""

    def __init__(self, sizes: Sizes) -> None:
        self.splits = splits_of(sizes, programs_at_once(sizes.device))
        parts = self.splits * sizes.tokens * sizes.heads if self.splits > 1 else 0
        self._parts = torch.empty(parts * sizes.dim, dtype=torch.float32, device=sizes.device)
        self._lses = torch.empty(parts, dtype=torch.float32, device=sizes.device)

    def run(self, call: Given, out: Pair | None) -> Pair:
        """Output and lse."""
        shape = self.splits, *call.q.shape
        output, lse = out or empty_pair(call.q)
        parts = None if self.splits == 1 else self._parts[: self.splits * call.q.numel()].view(shape)
        lses = None if self.splits == 1 else self._lses[: self.splits * lse.numel()].view(shape[:-1])
        lists = [_for_kernel(one) for one in call.lists if picks_of(one).shape[1]]
        extra = lists[1] if len(lists) > 1 else (None,) * len(lists[0])
        name = "attend_paged" if isinstance(call.lists[0], PagedPicks) else "attend_rows"
        kernel(name)(call.q, *lists[0], *extra, call.sink, call.scale, output, lse, splits=self.splits, parts=parts, part_lses=lses)
        return output, lse


def _for_kernel(one: Picks | PagedPicks) -> tuple[Any, ...]:
    if isinstance(one, PagedPicks):
        return one.pages, KV_LAYOUTS[one.layout], one.page_size, one.slots, one.lengths
    return one.rows, one.indices, one.lengths
