"""What `dsv4 bench COMPONENT` runs: every implementation of a function beside the raw library call, the reference and a copy.

All lines of a case are measured in one run. On CUDA a call is timed inside a graph whose first input rotates beyond the L2 cache, and the
host's time to issue it has a column of its own; the reference, which no graph can hold, is timed with the host waiting for it. The limit
of the memory is a copy that reads and writes as many bytes; where arithmetic is the limit, a product by cuBLAS stands beside it. An
implementation is compared with the reference on the very inputs that it would be timed on, as its contract says, and not timed if it
fails.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import device_microseconds, host_microseconds, nbytes
from dsv4 import fast
from dsv4.parity import contracts
from dsv4.parity.compare import Comparison, compare_bound, compare_bytes, compare_choice
from dsv4.parity.contracts import Call, Contract, Output
from dsv4.parity.levels import Level
from dsv4.parity.trial import compare_output_bytes
from dsv4.types import ArgumentError

CALLS = 20  # of a graph, at least
COPIES = 1024  # of an input, at most


@dataclass(frozen=True)
class Case:
    """One call of one function: its first argument rotates, the others stay. `read` is in bytes, where not all of each tensor is."""

    function: str  # component.function
    label: str
    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)  # what a library or torch offers, by name
    read: int | None = None

    def call(self, function: Callable[..., Any], first: Tensor, **more: Any) -> Any:
        """Call a twin."""
        return function(first, *self.args[1:], **self.options, **more)


@dataclass(frozen=True)
class Line:
    """One measurement; microseconds."""

    function: str
    case: str
    what: str
    device_us: float | None = None
    host_us: float | None = None
    gb_s: float | None = None
    of_limit: float | None = None  # the limit's time as a share of this one's
    note: str = ""


def lines(cases: Iterator[Case], device: torch.device, functions: Collection[str] = (), backends: Collection[str] = ()) -> Iterator[Line]:
    """Every line of every case; of these functions and backends alone, where any are named."""
    for case in cases:
        if not functions or case.function.partition(".")[2] in functions:
            yield from _of_case(case, device, backends)


def _of_case(case: Case, device: torch.device, backends: Collection[str]) -> Iterator[Line]:
    component, _, name = case.function.partition(".")
    twin, reference = (getattr(import_module(f"dsv4.{side}.{component}"), name) for side in ("fast", "reference"))
    expected = case.call(reference, case.args[0])
    given = (*case.args, *case.options.values())
    moved = nbytes(*_tensors(expected)) + (nbytes(*(v for v in given if isinstance(v, Tensor))) if case.read is None else case.read)
    limit = _copy(moved, device)
    line = partial(_line, case, moved, limit)
    yield line("limit: a copy", *((limit, None) if device.type == "cuda" else (None, limit)))
    for status in fast.backends(device, prove=True):
        if status.function != case.function or not status.usable or (backends and status.backend not in backends):
            continue
        run = partial(case.call, twin, impl=status.backend)
        what = f"{status.backend} ({status.version})" if status.backend in ("deepgemm", "flashinfer", "flashmla") else status.backend
        if (wrong := _unfit(case, run, reference, expected)) is not None:
            yield Line(case.function, case.label, what, note=f"not timed: {wrong}")
        else:
            yield _timed(line, what, run, case.args[0])
    for what, raw in case.raw.items():
        yield _timed(line, f"raw: {what}", raw, case.args[0])
    yield line("reference", None, _wall(partial(case.call, reference, case.args[0]), device), note="with its end" * (device.type == "cuda"))


def _line(case: Case, moved: int, limit: float, what: str, device_us: float | None, host_us: float | None, note: str = "") -> Line:
    taken = host_us if device_us is None else device_us
    share = {} if taken is None else {"gb_s": moved / taken / 1000, "of_limit": limit / taken}
    return Line(case.function, case.label, what, device_us, host_us, note=note, **share)


def _timed(line: Callable[..., Line], what: str, run: Callable[[Tensor], Any], first: Tensor) -> Line:
    try:
        if not first.is_cuda:
            return line(what, None, _wall(partial(run, first), first.device))
        inputs = _rotating(first)
        taken = device_microseconds(run, inputs, calls=max(CALLS, len(inputs)))
        return line(what, taken, host_microseconds(partial(run, first), seconds=0.1))
    except Exception as error:  # a library may refuse a size, or a capture, in any way; the other lines are still worth having
        return line(what, None, None, note=f"not timed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def _wall(run: Callable[[], Any], device: torch.device) -> float:
    def whole() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return host_microseconds(whole, seconds=0.1)


def _rotating(first: Tensor) -> list[Tensor]:
    """As many copies of a tensor, with its strides, as three times the L2 cache holds."""
    cache = torch.cuda.get_device_properties(first.device).L2_cache_size
    return [first, *(first.clone() for _ in range(min(3 * cache // max(first.nbytes, 1), COPIES)))]


def _copy(moved: int, device: torch.device) -> float:
    source = torch.zeros(max(moved // 2, 1), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return _wall(partial(torch.empty_like(source).copy_, source), device)
    inputs = _rotating(source)
    return device_microseconds(torch.empty_like(source).copy_, inputs, calls=max(CALLS, len(inputs)))


def _tensors(result: Any) -> tuple[Tensor, ...]:
    parts = (result,) if isinstance(result, Tensor) else tuple(result)
    return tuple(part for part in parts if isinstance(part, Tensor))


def _unfit(case: Case, run: Callable[[Tensor], Any], reference: Callable[..., Any], expected: Any) -> str | None:
    """Why an implementation is not timed on a case; None if it is."""
    try:
        actual = run(case.args[0])
    except ArgumentError as error:
        return f"refuses: {error.limit}"
    except Exception as error:
        return f"raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    try:
        contract = contracts.find(case.function)
    except LookupError:
        pairs = zip(_tensors(expected), _tensors(actual), strict=True)
        found = next((c for c in (compare_bytes(want, have) for want, have in pairs) if not c.ok), None)
        return found and f"differs from the reference: {found.reason}"
    wanted, got = contract.split(tuple(_tensors(expected))), contract.split(tuple(_tensors(actual)))
    for name in contract.fields:
        comparison = _compare(contract, _row(contract, name, wanted[name]), Call(case.args, case.options), wanted, got)
        if not comparison.ok:
            return f"fails parity: {name}: {comparison.reason}"
    return None


def _row(contract: Contract, name: str, expected: Tensor) -> Output:
    """The row that speaks for any inputs, an exact lattice's does not, and that can show a result of this layout."""
    rows = [row for row in contract.outputs if row.name == name]
    return min([row for row in rows if _shows(row, expected)] or rows, key=lambda row: (row.level is Level.E1, bool(row.domains)))


def _shows(row: Output, expected: Tensor) -> bool:
    try:
        return row.view is None or row.view(expected) is not None
    except RuntimeError:  # of torch: the strides do not allow this view
        return False


def _compare(contract: Contract, row: Output, call: Call, expected: dict[str, Tensor], actual: dict[str, Tensor]) -> Comparison:
    if row.bound is not None and contract.exact is not None:
        exact = contract.split(contract.exact(*call.args, **call.kwargs))[row.name]
        return compare_bound(exact, actual[row.name], row.bound(call, exact), independent=row.independent)
    if row.permits is not None:
        permitted = row.permits(call, expected[row.name], actual[row.name])
        return compare_choice(expected[row.name], actual[row.name], permitted)
    return compare_output_bytes(row, expected[row.name], actual[row.name])


def components() -> Sequence[str]:
    """Components that have cases."""
    from benchmarks.cases import CASES

    return sorted(CASES)


def cases_of(component: str, tokens: Sequence[int], device: torch.device) -> Iterator[Case]:
    """The cases of a component at the shapes of the presets."""
    from benchmarks.cases import CASES

    for count in tokens:
        yield from CASES[component](count, device)
