"""Rows for routers: logits and biases at which implementations differ, expert ids with holes, placements with replicas.

As in `strategies`, Hypothesis draws names and a seed and these functions make the tensors; row r is of the class number r modulo the
number of classes drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.contracts import Call
from dsv4.parity.strategies import generator, random_bits, relaid
from dsv4.placement import make_placement
from dsv4.types import Placement

MOST_REPLICAS = 4  # columns of every placement's table, so that compilers see one shape
Maker = Callable[[int, int, torch.Generator], Tensor]


class PlacedCall(Call):
    """A call whose placement's tables count as tensors: "placement.counts" and the others, wherever the placement stands."""

    def _place(self) -> int | str:
        named: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return next(name for name, value in named if isinstance(value, Placement))

    def __getitem__(self, argument: int | str) -> Any:
        _, dot, table = str(argument).partition(".")
        return getattr(super().__getitem__(self._place()), table) if dot else super().__getitem__(argument)

    def replace(self, argument: int | str, value: Any) -> PlacedCall:
        """The same call with one argument, or a table, changed."""
        _, dot, table = str(argument).partition(".")
        if dot:
            argument = self._place()
            value = super().__getitem__(argument)._replace(**{table: value})
        plain = super().replace(argument, value)
        return PlacedCall(plain.args, plain.kwargs)

    def tensors(self) -> dict[int | str, Tensor]:
        """Every argument that is a tensor, and the tables."""
        tables = super().__getitem__(self._place())._asdict()
        return super().tensors() | {f"placement.{name}": table for name, table in tables.items() if table is not None}


def _normal(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return 2 * torch.randn(rows, experts, generator=source)


def _equal(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return (4 * torch.randn(rows, 1, generator=source)).expand(rows, experts)


def _ties(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, (rows, experts), generator=source).float()


def _near(rows: int, experts: int, source: torch.Generator) -> Tensor:
    """Neighbours of 1: their scores differ in the last bits, or not at all."""
    bits = torch.ones(1).view(torch.int32) + torch.randint(-9, 9, (rows, experts), generator=source, dtype=torch.int32)
    return bits.view(torch.float32)


def _squares(rows: int, experts: int, source: torch.Generator) -> Tensor:
    """Above 20, where the score is the exact square root, an integer."""
    return torch.randint(5, 60, (rows, experts), generator=source).square().float()


def _threshold(rows: int, experts: int, source: torch.Generator) -> Tensor:
    bits = torch.tensor([20.0]).view(torch.int32) + torch.randint(-5, 6, (rows, experts), generator=source, dtype=torch.int32)
    return bits.view(torch.float32)


def _underflow(rows: int, experts: int, source: torch.Generator) -> Tensor:
    """From -16, where 1 + e^z rounds to 1 in fp32, past -104, where e^z is 0 in fp32, to -220, where the score is."""
    return -16 - torch.rand(rows, experts, generator=source) * torch.tensor([2.0, 90.0, 204.0])[torch.arange(rows) % 3, None]


def _large(rows: int, experts: int, source: torch.Generator) -> Tensor:
    """Where e^z is infinite."""
    return torch.ldexp(1 + torch.rand(rows, experts, generator=source), torch.randint(6, 127, (rows, 1), generator=source))


def _zeros(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return torch.where(torch.rand(rows, experts, generator=source) < 0.5, 0.0, -0.0)


def _falling(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return torch.linspace(3, -3, experts).expand(rows, experts)


def _nan(rows: int, experts: int, source: torch.Generator) -> Tensor:
    """A third of a row NaN, or all of it but for one number, or all of it."""
    share = torch.tensor([0.33, 1.0, 1.0])[torch.arange(rows) % 3, None]
    values = torch.randn(rows, experts, generator=source).masked_fill(torch.rand(rows, experts, generator=source) < share, torch.nan)
    values[1::3, -1] = 0.5
    return values


def _inf(rows: int, experts: int, source: torch.Generator) -> Tensor:
    kind = torch.randint(0, 4, (rows, experts), generator=source)
    return torch.tensor([0.0, torch.inf, -torch.inf, 1.0])[kind]


def _bits(rows: int, experts: int, source: torch.Generator) -> Tensor:
    return random_bits((rows, experts), int(torch.randint(0, 2**62, (), generator=source)), torch.float32)


ROW_CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "equal": _equal,
    "ties": _ties,
    "zeros": _zeros,
    "falling": _falling,
    "near": _near,
    "squares": _squares,
    "threshold": _threshold,
    "underflow": _underflow,
    "large": _large,
    "nan": _nan,
    "inf": _inf,
    "bits": _bits,
}
FINITE_ROWS = tuple(name for name in ROW_CLASSES if name not in ("nan", "inf", "bits"))


def rows(classes: Sequence[str], count: int, experts: int, seed: int) -> Tensor:
    """fp32 [count, experts] on the CPU, of the classes drawn."""
    source = generator(seed)
    out = torch.empty(count, experts)
    for number, name in enumerate(classes):
        mine = out[number :: len(classes)]
        if len(mine):
            mine.copy_(ROW_CLASSES[name](len(mine), experts, source))
    return out


BIASES = ("small", "zeros", "reversing", "last_bits", "special")


def bias(name: str, experts: int, seed: int, dtype: torch.dtype) -> Tensor:
    """A correction bias [experts] on the CPU: small, none in effect, one that reverses any order, one of a few ulp, NaN and infinities."""
    source = generator(seed)
    values = {
        "small": 0.1 * torch.randn(experts, generator=source),
        "zeros": torch.zeros(experts),
        "reversing": 4.0 * torch.arange(experts),
        "last_bits": 2.0**-23 * torch.randint(-3, 4, (experts,), generator=source),
        "special": torch.tensor([0.25, -torch.inf, torch.inf, torch.nan])[torch.randint(0, 4, (experts,), generator=source)],
    }
    return values[name].to(dtype)


def expert_ids(count: int, slots: int, experts: int, seed: int, dtype: torch.dtype, *, distinct: bool = True) -> Tensor:
    """[count, slots] on the CPU: experts, different within a row unless said otherwise, about one in eight replaced by -1 or an id that
    does not exist.
    """
    source = generator(seed)
    if distinct:
        drawn = torch.rand(count, experts, generator=source).argsort(1)[:, :slots]
    else:
        drawn = torch.randint(0, experts, (count, slots), generator=source)
    wrong = torch.tensor([-1, -1, experts, experts + 1, -2, 2**31 - 1, -(2**31)])[torch.randint(0, 7, (count, slots), generator=source)]
    return torch.where(torch.rand(count, slots, generator=source) < 0.125, wrong, drawn).to(dtype)


def placement(
    experts: int, redundant: int, seed: int, device: torch.device, *, layout: str = "contiguous", faults: bool = False
) -> Placement:
    """A placement of experts + redundant slots in random order: some experts have 4, 3 and 2 replicas, the others one.

    With `faults` its tables hold what no placement should: an expert without a slot, a count beyond the table, slots that do not exist.
    """
    source = generator(seed)
    more = torch.arange(MOST_REPLICAS - 1, 0, -1).repeat(experts)[:experts]  # 3, 2, 1, 3, 2, 1, ...
    more = torch.randperm(experts, generator=source).repeat_interleave(more)[:redundant]
    logical = torch.cat([torch.arange(experts), more])
    logical = logical[torch.randperm(len(logical), generator=source)].to(torch.int32)
    made = make_placement(logical, experts)
    replicas = torch.nn.functional.pad(made.replicas, (0, MOST_REPLICAS - made.replicas.shape[1]), value=-1)
    turn = torch.randint(0, MOST_REPLICAS, (experts,), generator=source) % made.counts
    rank_map = replicas.gather(1, turn[:, None])[:, 0]
    counts = made.counts.clone()
    if faults:
        replicas[0], counts[0], rank_map[0] = -1, 0, -1
        counts[1] = 99
        replicas[2] = rank_map[2] = len(logical)
        rank_map[3] = 2**31 - 1
    tables = (logical, replicas, counts, rank_map)
    return Placement(*(relaid(table.to(device), layout) for table in tables))
