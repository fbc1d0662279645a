"""What `dsv4 bench COMPONENT` runs: every implementation of a function beside the raw library call, the reference and a limit.

All lines of a case are measured in one run. On CUDA a call is timed inside a graph whose first input rotates beyond the L2 cache, and the
host's time to issue it has a column of its own; the reference, which no graph can hold, is timed with the host waiting for it. The limit
is a copy that reads and writes as many bytes, or an empty kernel where a launch is all there is to it. An implementation is compared with
the reference on the very inputs that it would be timed on, as its contract says, and not timed if it fails; of large products a case may
say which rows and columns are compared, for bounds follow every step of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.harness import First, host_microseconds, microseconds, nbytes, tensors
from dsv4 import fast
from dsv4.parity import contracts
from dsv4.parity.compare import Comparison, compare_bound, compare_choice
from dsv4.parity.contracts import Call, Contract, Output
from dsv4.parity.levels import Level
from dsv4.parity.trial import compare_output_bytes
from dsv4.types import ArgumentError

COMPONENTS = (  # each a module of this package
    "attention", "codecs", "compressor", "eplb", "hyper_connections", "indexer", "kv_cache", "linear", "norms", "output_projection",
    "quantization", "rotary", "routing", "scales",
)  # fmt: skip
LIBRARIES = ("deepgemm", "flashinfer", "flashmla")


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


def cases(component: str, tokens: Sequence[int], shapes: Sequence[tuple[int, int]], device: torch.device) -> Iterator[Case]:
    """A component at the shapes of the presets, of so many tokens; and all of it at each shape (rows, columns). No case comes twice."""
    module = import_module(f"benchmarks.{component}")
    made = (*(partial(module.cases, count) for count in tokens), *(partial(module.sweep, *shape) for shape in shapes))
    seen = set()
    for case in (case for make in made for case in make(device)):
        if (case.function, case.label) not in seen:  # a weight is the same for any number of tokens
            seen.add((case.function, case.label))
            yield case


def lines(chosen: Iterable[Case], device: torch.device, functions: Collection[str] = (), backends: Collection[str] = ()) -> Iterator[Line]:
    """Every line of every case; of these functions and backends alone, where any are named."""
    for case in chosen:
        if not functions or case.function.partition(".")[2] in functions:
            yield from _of_case(case, device, backends)


def _of_case(case: Case, device: torch.device, backends: Collection[str]) -> Iterator[Line]:
    component, _, name = case.function.partition(".")
    twin, reference = (getattr(import_module(f"dsv4.{side}.{component}"), name) for side in ("fast", "reference"))
    first = case.args[0]
    expected = case.call(reference, first)
    moved = nbytes(*tensors(expected)) + (nbytes(*tensors((*case.args, *case.options.values()))) if case.read is None else case.read)
    limits = _copies(moved, device) if case.limit is None else {case.limit[0]: partial(microseconds, case.limit[1], first)}
    limits = {f"limit: {what}": measure() for what, measure in limits.items()}
    line = partial(_line, case, moved, min(host if on_device is None else on_device for on_device, host in limits.values()))
    for what, taken in limits.items():
        limit = line(what, *taken)
        yield limit if case.limit is None else replace(limit, gb_s=None)
    # Not proved here: a library's function proves itself where it is compared, and those of other cases may compile for minutes.
    for status in fast.backends(device):
        if status.function == (case.table or case.function) and status.usable and (not backends or status.backend in backends):
            yield _checked(case, status, twin, reference, expected, line)
    for what, raw in case.raw.items():
        yield line(f"raw: {what}", note=f"not timed: {raw}") if isinstance(raw, str) else _timed(line, f"raw: {what}", raw, first)
    note = "with its end" if device.type == "cuda" else ""
    yield line("reference", None, host_microseconds(partial(_to_its_end, partial(case.call, reference, first), device)), note)


def _line(
    case: Case, moved: int, limit: float, what: str, device_us: float | None = None, host_us: float | None = None, note: str = ""
) -> Line:
    taken = host_us if device_us is None else device_us
    share = {} if taken is None else {"gb_s": moved / taken / 1000, "of_limit": limit / taken}
    return Line(case.function, case.label, what, device_us, host_us, note=note, **share)


def _checked(
    case: Case,
    status: fast.BackendStatus,
    twin: Callable[..., Any],
    reference: Callable[..., Any],
    expected: Any,
    line: Callable[..., Line],
) -> Line:
    what = f"{status.backend} ({status.version})" if status.backend in LIBRARIES else status.backend
    own = case.fresh()
    run = partial(own.call, twin, impl=status.backend)
    wrong = _unfit(case, run, expected)
    return _timed(line, what, run, case.args[0]) if wrong is None else line(what, note=f"not timed: {wrong}")


def _timed(line: Callable[..., Line], what: str, run: Callable[[Any], Any], first: First) -> Line:
    try:
        return line(what, *microseconds(run, first))
    except Exception as error:  # a library may refuse a size, or a capture, in any way; the other lines are still worth having
        return line(what, note=f"not timed: {_in_a_line(error)}")


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _to_its_end(run: Callable[[], Any], device: torch.device) -> None:
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copies(moved: int, device: torch.device) -> dict[str, Callable[[], tuple[float | None, float]]]:
    """A copy that reads and writes so many bytes. By the driver it is slow at some sizes, where a kernel is not: the faster one counts."""
    source = torch.zeros(max(moved // 8, 1), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    by_kernel = {"a copy by a kernel": partial(microseconds, lambda given: torch.bitwise_not(given, out=target), source)}
    return {"a copy": partial(microseconds, target.copy_, source), **(by_kernel if device.type == "cuda" else {})}


def _unfit(case: Case, run: Callable[[Any], Any], expected: Any) -> str | None:
    """Why an implementation is not timed on a case; None if it is."""
    try:
        actual = run(case.args[0])
    except ArgumentError as error:
        return f"refuses: {error.limit}"
    except Exception as error:
        return f"raised {_in_a_line(error)}"
    contract = contracts.find(case.function)
    wanted, got = _named(contract, case.part(expected)), _named(contract, case.part(actual))
    call = Call(case.judged(), {**_defaults(contract), **case.options})
    if wanted.keys() != got.keys():
        return f"fails parity: returns {', '.join(got)}, not {', '.join(wanted)}"
    for name in wanted:
        row = _row(contract, name, wanted[name])
        comparison = _compare(contract, row, call, wanted, got) if _claims(row, wanted[name]) else None
        if comparison is not None and not comparison.ok:
            return f"fails parity: {name}: {comparison.reason}"
    return None


def _defaults(contract: Contract) -> dict[str, Any]:
    """What keywords are that a case does not give: bounds read them."""
    reference = getattr(import_module(f"dsv4.reference.{contract.component}"), contract.function)
    parameters = signature(reference).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is not one.empty}


def _named(contract: Contract, result: Any) -> dict[str, Tensor]:
    """A result by the contract's names; what is optional may be None, and is left out."""
    parts = (result,) if isinstance(result, Tensor) else tuple(result)
    return {name: part for name, part in zip(contract.fields, parts, strict=True) if part is not None}


def _row(contract: Contract, name: str, expected: Tensor) -> Output:
    """The row that speaks for any inputs and can show a result of this layout.

    A bitwise row of some domains beside one with a bound speaks for inputs whose result is exact.
    """
    rows = [row for row in contract.outputs if row.name == name]
    fitting = [row for row in rows if _shows(row, expected)] or rows
    return min(fitting, key=lambda row: (bool(row.domains), row.bound is None and row.permits is None, row.level is Level.E1))


def _claims(row: Output, expected: Tensor) -> bool:
    """Whether a row says anything of arbitrary inputs, and of numbers of this type: the bound of a bf16 output is not one of its codes."""
    return not (row.level is Level.E1 and row.domains) and (row.bound is None or expected.dtype.itemsize > 1)


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
