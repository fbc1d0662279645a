"""A call to time, and what the components' cases are made of.

A component's module has `cases(tokens, device)`, its functions at the shapes of the presets, and `sweep(rows, columns, device)`, every
function, format and layout at one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import First, duplicate
from dsv4.configs import V4_FLASH, V4_PRO, V41_FLASH
from dsv4.fast import dispatch
from dsv4.fast.adapters.library import Library

PRESETS = {"V4-Flash": V4_FLASH, "V4-Pro": V4_PRO, "V4.1-Flash": V41_FLASH}

Raw = Mapping[str, Callable[[Any], Any] | str]  # what a library or torch offers, by name; in words why it cannot


@dataclass(frozen=True)
class Case:
    """One call of one function: its first argument, a tensor or several as a NamedTuple, rotates; the others stay.

    The limit is a copy of as many bytes, or the `limit` that is named. `read` is in bytes, where not all of each tensor is read. `table`
    names the function whose backends run this one, where it has no table of its own.
    """

    function: str  # component.function
    label: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    raw: Raw = field(default_factory=dict)
    limit: tuple[str, Callable[[Any], Any]] | None = None
    read: int | None = None
    table: str = ""

    def call(self, function: Callable[..., Any], first: First, **more: Any) -> Any:
        """Call a twin."""
        return function(first, *self.args[1:], **self.options, **more)

    def judged(self) -> tuple[Any, ...]:
        """Arguments whose result is what `part` is compared with: all of them."""
        return self.args

    def part(self, result: Any) -> Any:
        """What of a result is compared: all of it."""
        return result

    def fresh(self) -> Case:
        """The same case with tensors of its own but for the first: a call may add to counters."""
        args = (self.args[0], *map(duplicate, self.args[1:]))
        return replace(self, args=args, options={name: duplicate(value) for name, value in self.options.items()})


@dataclass(frozen=True)
class Together(Case):
    """A case whose first argument is a tuple of all its tensors, so that all rotate: a weight that stays would be read from the cache."""

    def call(self, function: Callable[..., Any], first: Any, **more: Any) -> Any:
        """Call a twin."""
        return function(*first, **self.options, **more)

    def judged(self) -> tuple[Any, ...]:
        """The tensors of the first argument."""
        return tuple(self.args[0])


def activations(rows: int, width: int, device: torch.device) -> Tensor:
    """Normal numbers in bf16."""
    return torch.randn(rows, width, device=device).to(torch.bfloat16)


def library_call(library: Library, symbol: str, device: torch.device, run: Callable[[Any, Any], Any], name: str = "") -> Raw:
    """`run(function, first)` with a library's function as it is; nothing on the CPU, the reason where it cannot run or proved wrong."""
    if device.type == "cpu":
        return {}
    reason = library.devices(dispatch.describe(device)) or library.missing() or library.lacks(symbol) or library.disproved(symbol, device)
    return {name or f"{library.name} {symbol}": reason or (lambda first: run(library.function(symbol), first))}
