"""Choosing an implementation, at the moment of the call, for the device of the tensors at hand.

Each public function has a table of `Implementation` rows, best first. A row is *installed* or not, *usable on this device* or not,
*supports these arguments* or not, and keeps what `use()` demands or not; every answer is a reason in words, and no reason means yes. An
implementation asked for by name (the `impl` argument, `use()`, or DSV4_IMPL) either runs or raises; the default takes the first row that
can run and says once, at INFO, what it passed over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, cast

import torch

from dsv4.fast import ops
from dsv4.fast.adapters.library import Library
from dsv4.types import ArgumentError, BackendUnavailable, Unsupported

log = logging.getLogger("dsv4.fast")

BACKENDS = ("triton", "deepgemm", "flashinfer", "flashmla", "inductor", "eager")


class Device(NamedTuple):
    """What a row may ask of a device: its kind and, on CUDA, the compute capability."""

    kind: str
    capability: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"SM{self.capability[0]}{self.capability[1]}" if self.kind == "cuda" else self.kind


def describe(device: torch.device) -> Device:
    """Kind and capability of one device; asked per call, since two cards of one process may differ."""
    if device.type != "cuda":
        return Device(device.type)
    ask, index = torch.cuda.get_device_capability, cast("int | None", device.index)
    return Device("cuda", ask(device)) if index is None else _card(ask, device)


@cache
def _card(ask: Callable[[torch.device], tuple[int, int]], device: torch.device) -> Device:
    """A card keeps its capability."""
    return Device("cuda", ask(device))


def default_device(device: torch.device | str | None) -> torch.device:
    """The device that is meant; without a word, the current CUDA device if there is one, else the CPU."""
    if device is not None:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError("device", repr(device), "must name a device of torch, such as cpu or cuda:0") from error
        if isinstance(device, str) and found.type == "cuda" and not torch.cuda.is_available():
            raise ArgumentError("device", repr(device), "there is no CUDA device here")
        return found
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


Reason = str | None
DeviceRule = Callable[[Device], Reason]
ArgumentRule = Callable[[Mapping[str, Any]], Reason]
Prepare = Callable[..., Callable[..., Any] | None]


def any_device(_: Device) -> Reason:
    """Runs wherever torch does."""
    return None


def any_arguments(_: Mapping[str, Any]) -> Reason:
    """Takes every argument that the function takes."""
    return None


def on_cpu(arguments: Mapping[str, Any]) -> Reason:
    """For rows that are preferred on a CPU."""
    on = next((str(value.device) for value in arguments.values() if isinstance(value, torch.Tensor)), "no device")
    return None if on == "cpu" else f"is preferred on a CPU; these are on {on}"


def cuda_from(major: int, minor: int = 0) -> DeviceRule:
    """CUDA devices of at least this compute capability."""

    def rule(device: Device) -> Reason:
        fits = device.kind == "cuda" and device.capability >= (major, minor)
        return None if fits else f"wants a CUDA device of capability {major}.{minor} or newer, this is {device}"

    return rule


def cuda_of(*majors: int) -> DeviceRule:
    """CUDA devices whose capability has one of these major numbers."""

    def rule(device: Device) -> Reason:
        wanted = " or ".join(f"{major}.x" for major in majors)
        return (
            None
            if device.kind == "cuda" and device.capability[0] in majors
            else f"wants a CUDA device of capability {wanted}, this is {device}"
        )

    return rule


def cuda_exactly(*capabilities: tuple[int, int]) -> DeviceRule:
    """CUDA devices of one of these capabilities: for a library that faults on a relative of the devices it knows."""

    def rule(device: Device) -> Reason:
        wanted = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
        known = device.kind == "cuda" and device.capability in capabilities
        return None if known else f"wants a CUDA device of capability {wanted}, this is {device}"

    return rule


@dataclass(frozen=True)
class Implementation:
    """One way to run a function. `call` takes the operator's arguments in order, without `impl`."""

    backend: str
    device: DeviceRule
    arguments: ArgumentRule
    call: Callable[..., Any]
    deterministic: bool = True
    batch_invariant: bool = True
    graph_safe: bool = True
    preferred: ArgumentRule | None = None  # no reason: among those that can run, it goes before the rows above it
    prepare: Prepare | None = None  # what `fast.recall` runs for arguments of a kind that is known
    library: Library | None = None  # the third-party library behind it
    symbol: str = ""  # the function of that library that must have proved itself
    verified: tuple[str, ...] = ("cpu", "SM90")  # devices on which the parity suite has passed
    unclaimed: tuple[tuple[str, str], ...] = ()  # domains of its contract that it is not held to, and why


@dataclass(frozen=True)
class Demands:
    """What `use()` has in force: backends by component or function ("" for all), and properties that an implementation must have."""

    impl: Mapping[str, str] = field(default_factory=dict)
    batch_invariant: bool = False
    deterministic: bool = False

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal demands, and nothing for none."""
        return (tuple(sorted(self.impl.items())), self.batch_invariant, self.deterministic) if self != NO_DEMANDS else ()


NO_DEMANDS = Demands()
_demands: ContextVar[Demands] = ContextVar("dsv4_demands", default=NO_DEMANDS)
TABLES: dict[str, tuple[Implementation, ...]] = {}
_said: set[tuple[str, str]] = set()
VARIABLE = os.environ.encodekey("DSV4_IMPL")


@contextmanager
def use(
    impl: str | Mapping[str, str] | None = None, *, batch_invariant: bool | None = None, deterministic: bool | None = None
) -> Iterator[None]:
    """Demand a backend, or properties, of every call inside the `with` block.

    Args:
        impl: one backend ("triton"), or a mapping from component ("routing") or function ("attention.sparse_attention") to backend. One
            backend for everything, or for a component, goes to the functions that have it; the others keep their default.
        batch_invariant: refuse implementations whose rows depend on the batch around them, but for those that can do without.
        deterministic: refuse implementations whose bits may differ from run to run.

    Raises:
        ArgumentError: a backend or component that does not exist.
    """
    outer = _demands.get()
    if impl is not None and not isinstance(impl, str | Mapping):
        raise ArgumentError("impl", repr(impl), "must be a backend, or a mapping from component or function to backend")
    chosen = {"": impl} if isinstance(impl, str) else dict(impl or {})
    _check_choice("impl", chosen)
    token = _demands.set(
        Demands(
            {**outer.impl, **chosen},
            outer.batch_invariant if batch_invariant is None else batch_invariant,
            outer.deterministic if deterministic is None else deterministic,
        )
    )
    try:
        yield
    finally:
        _demands.reset(token)


def demanded() -> Hashable:
    """Equal where `use()` and DSV4_IMPL demand the same; quick, for every call that is known asks."""
    return _demands.get().key, os.environ._data.get(VARIABLE)  # type: ignore[attr-defined]


def batch_invariant() -> bool:
    """Whether use(batch_invariant=True) is in force: a row that can be so, at a price, asks."""
    return _demands.get().batch_invariant


class Adaptive(Implementation):
    """An implementation that fits itself to the number of tokens, unless use(batch_invariant=True) is in force."""

    @property
    def batch_invariant(self) -> bool:
        return batch_invariant()

    @batch_invariant.setter
    def batch_invariant(self, _: bool) -> None:
        """The field of the dataclass, which is not kept."""


def register(function: str, *rows: Implementation) -> None:
    """Give a public function ("component.function", whose operator is dsv4::function) its table, best row first."""
    TABLES[function] = rows
    name = function.partition(".")[2]
    names = ops.argument_names(name)

    count = len(names) - 1  # of the arguments before impl

    def run(*arguments: Any, impl: str | None = None) -> Any:
        if len(arguments) > count:
            arguments, impl = arguments[:count], arguments[count]
        for value in arguments:
            if isinstance(value, torch.Tensor):
                device = value.device
                break
        chosen = resolve(function, device, dict(zip(names, arguments, strict=False)), impl)
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # kernels launch on the current card
                return chosen.call(*arguments)
        return chosen.call(*arguments)

    ops.implement(name, run)


def resolve(function: str, device: torch.device, arguments: Mapping[str, Any], impl: str | None = None) -> Implementation:
    """The implementation that a call gets.

    Raises:
        ArgumentError: `impl` names no backend of this function.
        BackendUnavailable: the backend asked for is not installed, not usable on this device, or lacks a property that `use()` demands.
        Unsupported: the backend asked for does not take these arguments.
    """
    rows = TABLES[function]
    wanted = wanted_backend(function) if impl is None else impl
    if wanted is None:
        return _default(function, rows, device, arguments)
    row = next((row for row in rows if row.backend == wanted), None)
    if row is None:
        raise ArgumentError("impl", repr(wanted), f"{function} has {', '.join(row.backend for row in rows)}")
    here = unusable(row, device)
    if here is not None:
        installable = row.library is not None and row.device(describe(device)) is None
        raise BackendUnavailable(wanted, f"{function}: {here}", row.library.remedy() if row.library and installable else "")
    if (reason := row.arguments(arguments)) is not None:
        raise Unsupported("impl", repr(wanted), f"{function}: {reason}", "Leave impl out to let dsv4 choose")
    return row


def remembered(row: Implementation, tensors: int) -> Implementation:
    """The row with its own call prepared, for arguments of which the first are so many tensors and the others numbers and words."""

    def prepare(*arguments: Any) -> Callable[..., Any]:
        options = arguments[tensors:]  # what stays: no tensor of the first call
        return lambda *given: row.call(*given, *options)

    return replace(row, prepare=prepare)


def prepare(function: str, device: torch.device, arguments: Sequence[Any], impl: str | None) -> Callable[..., Any] | None:
    """What the implementation that a call gets has prepared for calls like it, on the card of their tensors; None if it has nothing."""
    names = ops.argument_names(function.partition(".")[2])
    row = resolve(function, device, dict(zip(names, arguments, strict=False)), impl)
    call = row.prepare(*arguments) if row.prepare else None
    if call is None or device.type != "cuda" or torch.cuda.device_count() == 1:
        return call

    def on_card(*tensors: Any) -> Any:
        if torch.cuda.current_device() == device.index:
            return call(*tensors)
        with torch.cuda.device(device):
            return call(*tensors)

    return on_card


def unusable(row: Implementation, device: torch.device, *, prove: bool = True) -> Reason:
    """Why a row cannot run on a device under the demands in force; None if it can. `prove=False` tries nothing and trusts the untried."""
    described = describe(device)
    return _lacking(row) or _answer(row.device, described) or _unready(row, device, described, prove)


def _lacking(row: Implementation) -> Reason:
    """The property that is demanded and that a row does not have."""
    demands = _demands.get()
    if demands.batch_invariant and not row.batch_invariant:
        return "is not batch-invariant, which use(batch_invariant=True) demands"
    if demands.deterministic and not row.deterministic:
        return "is not deterministic, which use(deterministic=True) demands"
    return None


def _unready(row: Implementation, device: torch.device, described: Device, prove: bool) -> Reason:
    """What a row needs besides a device that its rule allows, and does not find."""
    if row.backend in ("triton", "inductor") and (reason := _toolchain(row.backend, described.kind)) is not None:
        return reason
    if row.library is None:
        return None
    if (reason := row.library.missing()) is not None or row.library.proved(row.symbol, str(described)):
        return reason
    if (reason := row.library.lacks(row.symbol)) is not None:
        return reason
    if not prove:
        known = row.library.recalled(row.symbol, device)
        return None if known is None else known.wrong
    return row.library.disproved(row.symbol, device)


@cache
def _answer(rule: DeviceRule, device: Device) -> Reason:
    """What a rule says of a device, once: its words are not put together again in every call that passes the row over."""
    return rule(device)


def _default(function: str, rows: tuple[Implementation, ...], device: torch.device, arguments: Mapping[str, Any]) -> Implementation:
    described = describe(device)
    here = [row for row in rows if _answer(row.device, described) is None]
    first = [row for row in here if row.preferred is not None and row.preferred(arguments) is None]
    for row in (*first, *here):
        reason = row.arguments(arguments) or _lacking(row) or _unready(row, device, described, True)
        if reason is None:
            return row
        if (function, row.backend) not in _said:
            _said.add((function, row.backend))
            log.info("%s: passing over %s: %s", function, row.backend, reason)
    reasons = "; ".join(f"{row.backend}: {row.arguments(arguments) or unusable(row, device)}" for row in rows)
    raise BackendUnavailable("default", f"nothing can run {function} on {describe(device)} ({reasons})")


def wanted_backend(function: str) -> str | None:
    demanded, environment = _demands.get().impl, os.environ.get("DSV4_IMPL", "")
    if not demanded and not environment:
        return None
    backends_here = {row.backend for row in TABLES[function]}
    for chosen in (demanded, _from_environment(environment)):
        for key in (function, function.rstrip("_")):  # an in-place operator follows the function that it belongs to
            if key in chosen:
                return chosen[key]
        for key in (function.partition(".")[0], ""):  # of a component, and of all, the functions that have the backend
            if chosen.get(key) in backends_here:
                return chosen[key]
    return None


@cache
def _from_environment(text: str) -> Mapping[str, str]:
    pairs = [entry.partition("=") for entry in text.split(",") if entry]
    keys = [key.strip() if equals else "" for key, equals, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ArgumentError("DSV4_IMPL", repr(text), "must name each component or function once")
    chosen = {key.strip() if equals else "": value.strip() if equals else key.strip() for key, equals, value in pairs}
    _check_choice("DSV4_IMPL", chosen)
    return chosen


def _check_choice(argument: str, chosen: Mapping[str, str]) -> None:
    known = {"", *TABLES, *(function.partition(".")[0] for function in TABLES)}
    for key, backend in chosen.items():
        if key not in known:
            raise ArgumentError(argument, repr(key), f"must name a component or function of dsv4.fast: {', '.join(sorted(known - {''}))}")
        if backend not in BACKENDS:
            raise ArgumentError(argument, repr(backend), f"must be one of {', '.join(BACKENDS)}")
        of = {row.backend for function, rows in TABLES.items() if key in ("", function, function.partition(".")[0]) for row in rows}
        if key and backend not in of:
            raise ArgumentError(argument, repr(backend), f"{key} has {', '.join(name for name in BACKENDS if name in of)}")


@cache
def _toolchain(backend: str, kind: str) -> Reason:
    if backend == "inductor" and kind == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except (exc.InvalidCxxCompiler, RuntimeError):
            return "no C++ compiler found; install g++, or use impl='eager'"
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed"
    return None
