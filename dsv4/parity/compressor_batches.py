"""Ragged batches of tokens in the middle of their requests: the inputs of `components/compressor.py`.

A spec says how many tokens and requests there are; where the requests are cut, how far each has come and what its tokens hold comes from
the seed. A ring holds what its last `span` tokens left there, and NaN (bytes 0xFF) in every other row: places of positions that are not
reached yet, or that dropped drafts have overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4.compressor_checks import window_span
from dsv4.parity import strategies
from dsv4.parity.contracts import Spec

GAP = 1024.0  # between two scores of which the smaller counts for nothing: e^-1024 is 0 in fp64
ABSENT_ROWS = (-1, -1, -2, 2**31 - 1, -(2**31))


@dataclass(frozen=True)
class Form:
    """What a compiler sees of a call. `rows`: whether `state_rows` is given."""

    name: str
    ratio: int
    dim: int
    overlap: bool = False
    ape: bool = True
    drafts: int = 0
    rows: bool = True
    layout: str = ""
    tokens: int = 40  # at most, in a batch

    @property
    def width(self) -> int:
        """Numbers that a token's values have."""
        return 2 * self.dim if self.overlap else self.dim

    @property
    def span(self) -> int:
        """Tokens that an entry looks back on."""
        return window_span(self.ratio, self.overlap)

    @property
    def ring(self) -> int:
        """Rows of a state."""
        return self.span + self.drafts if self.span else 0

    @property
    def options(self) -> dict[str, Any]:
        """What goes by keyword in every call."""
        return {"ratio": self.ratio, "overlap": self.overlap}


@dataclass(frozen=True)
class Requests:
    """A batch without its tokens' numbers, on the CPU."""

    starts: Tensor  # int64 [requests]
    cu_seqlens: Tensor  # int32 [requests + 1]
    state_rows: Tensor | None  # int32 [requests]
    states: int


def requests(form: Form, spec: Spec) -> Requests:
    """Offsets cut at random, the last of them up to three tokens before the end; starts at 0, around the first windows, anywhere, and far
    on; state rows in random order, about one in five absent.
    """
    source = strategies.generator(spec["seed"] ^ 1)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape or (count,), generator=source)

    count, tokens = spec["requests"], spec["tokens"]
    live = max(tokens - spec["padding"], 0)
    cuts = draw(0, live + 1).sort().values.clamp(max=live)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), cuts[: count - 1], torch.tensor([live] * min(count, 1))])
    near, far = draw(0, 3 * max(form.span, 1) + 1), draw(0, 30) * form.ratio + draw(-1, 2).clamp(min=0)
    most = spec.get("positions", 2**40)
    starts = torch.stack([torch.zeros_like(near), near, near, far, draw(max(most - 4 * form.ratio, 0), most)]).clamp(0, most)
    starts = starts[draw(0, len(starts)), torch.arange(count)]
    if spec.get("hostile"):
        wrong = torch.tensor([-1, -(2**63), 2**62, 2**63 - 1])[draw(0, 4)]
        starts = torch.where(draw(0, 4) == 0, wrong, starts)
        place = draw(0, count + 1, 2)
        cu_seqlens[place] = torch.tensor([-1, tokens + 1, 2**31 - 1, -(2**31), 0, tokens])[draw(0, 6, 2)]
    if not form.rows:
        return Requests(starts, cu_seqlens.to(torch.int32), None, count + spec["spare"])
    states = count + spec["spare"]
    rows = torch.randperm(states, generator=source)[:count]
    absent = torch.tensor([*ABSENT_ROWS, states])[draw(0, len(ABSENT_ROWS) + 1)]
    rows = torch.where(draw(0, 5) == 0, absent, rows)
    return Requests(starts, cu_seqlens.to(torch.int32), rows.to(torch.int32), states)


@dataclass(frozen=True)
class Batch:
    """The tensors of a call, on the CPU."""

    values: Tensor
    scores: Tensor
    state: Tensor
    of: Requests
    ape: Tensor | None

    def arguments(self, device: torch.device) -> tuple[Tensor, ...]:
        """values, scores, state, starts, cu_seqlens."""
        return tuple(tensor.to(device) for tensor in (self.values, self.scores, self.state, self.of.starts, self.of.cu_seqlens))

    def options(self, form: Form, device: torch.device) -> dict[str, Any]:
        """ratio, overlap, and ape and state_rows where the form has them."""
        given = {"ape": self.ape, "state_rows": self.of.state_rows}
        return {**form.options, **{name: value.to(device) for name, value in given.items() if value is not None}}


def batch(form: Form, spec: Spec, *, steady: bool = False) -> Batch:
    """A batch of the kinds of tokens that the spec names, one kind a request after another. `steady`: a pooled row of a lattice kind has
    one magnitude.
    """
    of = requests(form, spec)
    source = strategies.generator(spec["seed"] ^ 2)
    tokens, width = spec["tokens"], form.width
    ape = _ape(form, spec["classes"], source)
    values, scores, state = (
        torch.full(shape, -1, dtype=torch.int32).view(torch.float32)
        for shape in ((tokens, width), (tokens, width), (of.states, form.ring, 2 * width))
    )
    rows = torch.arange(len(of.starts)) if of.state_rows is None else of.state_rows
    for number, (start, first, last, row) in enumerate(
        zip(of.starts.tolist(), of.cu_seqlens[:-1].tolist(), of.cu_seqlens[1:].tolist(), rows.tolist(), strict=True)
    ):
        if not 0 <= start < 2**62:
            start = 0
        first, last = min(max(first, 0), tokens), min(max(last, 0), tokens)
        back = min(start, form.span)
        positions = torch.arange(start - back, start + max(last - first, 0))
        kind = spec["classes"][number % len(spec["classes"])]
        made = torch.cat(KINDS[kind](form, positions, ape, source, steady), 1)  # [positions, 2 width]
        if first <= last:
            values[first:last], scores[first:last] = made[back:].chunk(2, 1)
        if 0 <= row < of.states and back:
            state[row, positions[:back] % form.ring] = made[:back]
    return Batch(values, scores, state, of, ape)


Made = tuple[Tensor, Tensor]


def _ape(form: Form, classes: Sequence[str], source: torch.Generator) -> Tensor | None:
    """Whole numbers of gaps where a lattice is among the kinds, so that score and bias add up exactly."""
    if not form.ape:
        return None
    if set(classes) & set(LATTICES):
        return GAP * torch.randint(-3, 4, (form.ratio, form.width), generator=source).float()
    return torch.randn(form.ratio, form.width, generator=source)


def _scored(form: Form, positions: Tensor, ape: Tensor | None, biased: Tensor) -> Tensor:
    """The scores that the bias turns into `biased`."""
    return biased if ape is None else biased - ape[positions % form.ratio]


def _lattice(form: Form, count: int, source: torch.Generator, steady: bool) -> Tensor:
    """Integers up to 100; or signs times one power of two."""
    if steady:
        power = 2.0 ** int(torch.randint(-3, 4, (), generator=source))
        return power * (2 * torch.randint(0, 2, (count, form.width), generator=source) - 1).float()
    return torch.randint(-100, 101, (count, form.width), generator=source).float()


def _ahead(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """In each window and channel one token is ahead of the others by more than they can count for; some are at minus infinity."""
    cycle = 2 * form.ratio
    order = torch.rand(cycle, form.dim, generator=source).argsort(0).float()  # of the positions modulo cycle
    order = torch.cat([order, order], 1) if form.overlap else order  # a window draws on both halves of a channel
    biased = GAP * order[positions % cycle]
    biased = torch.where(biased == 0, -torch.inf, biased)
    return _lattice(form, len(positions), source, steady), _scored(form, positions, ape, biased)


def _level(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """Equal scores, bias included: an entry is the mean of 2^k integers."""
    values = _lattice(form, len(positions), source, steady)
    if steady:
        values = values[:1].expand_as(values)
    return values, _scored(form, positions, ape, torch.full((len(positions), form.width), GAP))


def _normal(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    shape = (len(positions), form.width)
    return torch.randn(shape, generator=source), torch.randn(shape, generator=source)


def _peaked(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """Scores far apart around 100, values of all sizes."""
    shape = (len(positions), form.width)
    sizes = torch.exp(2 * torch.randn(shape, generator=source))
    return torch.randn(shape, generator=source) * sizes, 100 + 8 * torch.randn(shape, generator=source)


def _positive(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """Nothing cancels: weights that do not add up to 1 show."""
    shape = (len(positions), form.width)
    return torch.rand(shape, generator=source) + 0.5, 0.1 * torch.randn(shape, generator=source)


def _tiny(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """Values at the bottom of the normal numbers and below."""
    values, scores = _normal(form, positions, ape, source, steady)
    return torch.ldexp(values, torch.randint(-140, -110, (len(positions), 1), generator=source)), scores


def _special(form: Form, positions: Tensor, ape: Tensor | None, source: torch.Generator, steady: bool) -> Made:
    """Any bits."""
    drawn = [
        strategies.random_bits((len(positions), form.width), int(torch.randint(0, 2**62, (), generator=source)), torch.float32)
        for _ in range(2)
    ]
    return drawn[0], drawn[1]


LATTICES = ("ahead", "level")
MODERATE = ("normal", "positive", "peaked")
KINDS = {
    "ahead": _ahead,
    "level": _level,
    "normal": _normal,
    "positive": _positive,
    "peaked": _peaked,
    "tiny": _tiny,
    "special": _special,
}
