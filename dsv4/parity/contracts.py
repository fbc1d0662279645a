"""Contracts as data: for each output of a function its level, domain, bound and reason; for each function its invariants.

A *spec* is a small JSON-able dict that says all about one case: sizes, the classes of values, a 64-bit seed. Hypothesis draws and
shrinks specs, `Domain.build` turns one into the arguments of a call, and printing a spec is enough to see the case again. No tensor is
ever drawn.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.parity.levels import Level

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Spec = dict[str, Any]


@dataclass
class Call:
    """The arguments of one call. An argument is named by its position or its keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, argument: int | str) -> Any:
        return self.args[argument] if isinstance(argument, int) else self.kwargs[argument]

    def replace(self, argument: int | str, value: Any) -> Call:
        """The same call with one argument changed."""
        if isinstance(argument, int):
            return Call((*self.args[:argument], value, *self.args[argument + 1 :]), self.kwargs)
        return Call(self.args, {**self.kwargs, argument: value})

    def tensors(self) -> dict[int | str, Tensor]:
        """Every argument that is a tensor."""
        named: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {name: value for name, value in named if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Domain:
    """A named set of inputs: drawn (`strategy`), or run through whole (`exhaustive`: that many values, specs {"first", "count"})."""

    name: str
    build: Callable[[Spec, torch.device], Call]
    strategy: SearchStrategy[Spec] | None = None
    exhaustive: int = 0
    why: str = ""

    def __post_init__(self) -> None:
        if (self.strategy is None) == (self.exhaustive == 0) or "." in self.name:
            raise ValueError(f"domain {self.name!r}: exactly one of strategy and exhaustive, and no dot in the name")

    @property
    def label(self) -> str:
        """How reports and `--replay` call the check of this domain."""
        return self.name


@dataclass(frozen=True)
class Output:
    """One row of the table: what of a function's result must agree, and how far.

    `name` is the field of the result, or "result" where a function returns one tensor. `domains` empty means all of them. `bound(call,
    exact)` is the E3 bound of each element (fp64); `permits(call, expected, actual)` says of each element of an E4 output whether the
    choice is allowed. `view` shows more of the result than its elements (such as pad words); `strides` compares strides as well.
    `any_nan` takes a NaN for a NaN whatever its bits: the sign and payload of an arithmetic result that is NaN is nobody's promise.
    `independent` claims that the errors of the elements are independent roundings, which the bias and rms tests of E3 need.
    """

    name: str
    level: Level
    why: str
    domains: tuple[str, ...] = ()
    bound: Callable[[Call, Tensor], Tensor] | None = None
    permits: Callable[[Call, Tensor, Tensor], Tensor] | None = None
    view: Callable[[Tensor], Tensor] | None = None
    strides: bool = False
    any_nan: bool = False
    independent: bool = False

    def __post_init__(self) -> None:
        if (self.level is Level.E3) != (self.bound is not None) or (self.level is Level.E4) != (self.permits is not None):
            raise ValueError(f"output {self.name!r}: E3 wants a bound, E4 wants permits, and no other level takes them")

    def covers(self, domain: str) -> bool:
        """Whether this row speaks for a domain."""
        return not self.domains or domain in self.domains


@dataclass(frozen=True)
class Rows:
    """Which arguments have one entry a row along their first dimension, and how to read an output the same way (None: it already is)."""

    arguments: tuple[int | str, ...] = (0,)
    read: Callable[[Call, str, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Invariant:
    """A property of a candidate alone (`dsv4.parity.invariants.CHECKS`), on the inputs of one domain."""

    name: str
    domain: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """How reports and `--replay` call this check."""
        return f"{self.name}.{self.domain}"


@dataclass(frozen=True)
class Contract:
    """Everything that is promised of one function.

    `reference` defaults to dsv4.reference.COMPONENT.FUNCTION. `exact` is the reference with roundings off, which E3 rows are measured
    against. `optional` names outputs that are None for some arguments.
    """

    component: str
    function: str
    domains: tuple[Domain, ...]
    outputs: tuple[Output, ...]
    invariants: tuple[Invariant, ...] = ()
    rows: Rows | None = None
    reference: Callable[..., Any] | None = None
    exact: Callable[..., Any] | None = None
    not_claimed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [domain.name for domain in self.domains]
        unknown = {name for row in self.outputs for name in row.domains} | {row.domain for row in self.invariants}
        if len(set(names)) < len(names) or not unknown <= set(names):
            raise ValueError(f"{self.name}: domains {names} must differ, and rows may name only these (got {sorted(unknown)})")
        if not any(row.level.bitwise for row in self.outputs):
            raise ValueError(f"{self.name}: every pair of twins has a non-empty bitwise domain; declare an E0, E1 or E2 row")
        if any(row.level is Level.E3 for row in self.outputs) and self.exact is None:
            raise ValueError(f"{self.name}: an E3 row is measured against `exact`, the reference with roundings off")

    @property
    def name(self) -> str:
        """component.function."""
        return f"{self.component}.{self.function}"

    @property
    def checks(self) -> tuple[Domain | Invariant, ...]:
        """What the engine can run: each domain against the reference, each invariant on the candidate alone."""
        return (*self.domains, *self.invariants)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the outputs, in the order of the function's result."""
        return tuple(dict.fromkeys(row.name for row in self.outputs))

    def domain(self, name: str) -> Domain:
        """The domain of this name."""
        return next(domain for domain in self.domains if domain.name == name)

    def refer(self) -> Callable[..., Any]:
        """The reference implementation."""
        if self.reference is not None:
            return self.reference
        function: Callable[..., Any] = getattr(importlib.import_module(f"dsv4.reference.{self.component}"), self.function)
        return function

    def split(self, result: Any) -> dict[str, Tensor]:
        """A result as named tensors. A field that the contract calls `optional` may be None, and is left out then.

        Raises:
            TypeError: it is not the number of tensors that the contract names.
        """
        parts = (result,) if isinstance(result, Tensor) else tuple(result) if isinstance(result, tuple | list) else ()
        named = dict(zip(self.fields, parts, strict=False))
        here = {name: part for name, part in named.items() if part is not None or name not in self.optional}
        if len(parts) != len(self.fields) or not all(isinstance(part, Tensor) for part in here.values()):
            raise TypeError(f"{self.name} must return {', '.join(self.fields)}: got {_described(result)}")
        return here


def _described(result: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in result)})" if isinstance(result, tuple | list) else type(result).__name__


def components() -> tuple[str, ...]:
    """Components that have a contract."""
    from dsv4.parity import components as package

    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def for_component(component: str) -> tuple[Contract, ...]:
    """The contracts of a component.

    Raises:
        LookupError: there is none.
    """
    if component not in components():
        raise LookupError(f"no contract for component {component!r}; there are {', '.join(components())}")
    contracts: tuple[Contract, ...] = importlib.import_module(f"dsv4.parity.components.{component}").CONTRACTS
    return contracts


def find(name: str) -> Contract:
    """The contract of "component.function".

    Raises:
        LookupError: there is none.
    """
    for contract in for_component(name.partition(".")[0]):
        if contract.name == name:
            return contract
    raise LookupError(f"no contract for {name!r}")
