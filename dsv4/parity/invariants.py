"""Properties of a candidate alone: each check takes a trial and raises Violation.

Contracts name them: `on("drawn", "run_to_run", "batch", …)`, or `Invariant(name, domain, {option: value})` where one wants options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.parity.compare import Comparison, as_integers, compare_bytes
from dsv4.parity.contracts import Call, Invariant
from dsv4.parity.strategies import LAYOUTS, relaid
from dsv4.parity.trial import Trial, Violation
from dsv4.types import Unsupported

PAD_ROWS = 3
GUARD_BYTES = 64
GUARD = 0xA7
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def on(domain: str, *names: str) -> tuple[Invariant, ...]:
    """Invariants without options, on the inputs of one domain."""
    return tuple(Invariant(name, domain) for name in names)


def but(domain: str, *arguments: int | str) -> tuple[Invariant, ...]:
    """`inputs_unchanged` for a function that updates these arguments in place."""
    return (Invariant("inputs_unchanged", domain, {"but": arguments}),)


def run_to_run(trial: Trial, **_: Any) -> None:
    """Three runs give the same bytes."""
    first = trial.run(trial.call())
    for _again in range(2):
        trial.same(first, trial.run(trial.call()), "another run of the same call")


def inputs_unchanged(trial: Trial, but: Sequence[int | str] = (), **_: Any) -> None:
    """No input is written to. `but` names arguments that the function updates in place by contract."""
    call, untouched = trial.call(), trial.call().tensors()
    trial.run(call)
    for name, tensor in call.tensors().items():
        comparison = compare_bytes(untouched[name], tensor)
        if name not in but and not comparison.ok:
            raise Violation(f"argument {name}", comparison, "the call changed its input")


def poisoned_output(trial: Trial, **_: Any) -> None:
    """Every byte is written: what the allocator's memory held before makes no difference."""
    plain = trial.run(trial.call())
    sizes = [tensor.untyped_storage().nbytes() for tensor in plain.values()]
    for poison in (0xFF, 0x55):
        call = trial.call()
        blocks = [
            torch.empty(size + extra, dtype=torch.uint8, device=trial.device).fill_(poison) for size in sizes for extra in range(0, 512, 64)
        ]
        del blocks
        trial.same(plain, trial.run(call), f"memory filled with 0x{poison:02X} before the call shows")


def guards(trial: Trial, out: str = "out", **_: Any) -> None:
    """With a caller's output buffers, the result is the same and the bytes around each buffer stay as they were."""
    plain = trial.run(trial.call())
    made = {name: _guarded(tensor) for name, tensor in plain.items()}
    views = [view for _, view in made.values()]
    call = trial.call()
    call.kwargs[out] = views[0] if len(views) == 1 else tuple(views)
    written = trial.run(call)
    for name, (buffer, view) in made.items():
        around = torch.cat([buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:]])
        comparison = compare_bytes(torch.full_like(around, GUARD), around)
        if not comparison.ok:
            raise Violation(name, comparison, f"the guard bytes around {out!r}")
        if written[name].data_ptr() != view.data_ptr():
            raise Violation(name, Comparison(False, f"the result is not the buffer given as {out!r}"))
    trial.same(plain, written, f"the result in a buffer given as {out!r}")


def _demanded(trial: Trial) -> AbstractContextManager[Any]:
    """What asks dsv4.fast for independence of the batch, functions that call others of it too; nothing for anybody else's."""
    if trial.candidate.backend in ("", "foreign") or "batch" in dict(trial.candidate.unclaimed):
        return nullcontext()
    from dsv4 import fast

    return fast.use(batch_invariant=True)


def batch(trial: Trial, **_: Any) -> None:
    """Each row's result is the same in any order, alone, in either part of a split batch, and in a batch of other rows."""
    with _demanded(trial):
        _in_any_batch(trial)


def _in_any_batch(trial: Trial) -> None:
    call = trial.call()
    count = call[_rows(trial)[0]].shape[0]
    whole = _read(trial, call, trial.run(call))
    every = list(range(count))
    for index in (every[::-1], every[:1], every[1:], every[:2], every[2:], every[1::2] + every[::2], every + every[:1] * max(8 - count, 1)):
        if index:
            part = _take_rows(trial, call, index)
            _same_rows(
                trial,
                {name: take(tensor, index) for name, tensor in whole.items()},
                _read(trial, part, trial.run(part)),
                f"rows {index} of {count}",
            )


def padding(trial: Trial, **_: Any) -> None:
    """Rows of NaN (bytes 0xFF) after the last leave the others' results alone; those are what they are beside rows of zeros where a
    candidate is not batch-invariant.
    """
    call = trial.call()
    count = call[_rows(trial)[0]].shape[0]
    padded, plain = call, call
    alone = "batch" not in dict(trial.candidate.unclaimed)
    for argument in _rows(trial):
        padded = padded.replace(argument, _padded(call[argument], -1))
        plain = plain.replace(argument, call[argument] if alone else _padded(call[argument], 0))
    with _demanded(trial):
        live, expected = (
            {name: take(tensor, list(range(count))) for name, tensor in _read(trial, some, trial.run(some)).items()}
            for some in (padded, plain)
        )
    _same_rows(trial, expected, live, f"{PAD_ROWS} rows of NaN after the last")


def strides(trial: Trial, arguments: Sequence[int | str] | None = None, bounded: Sequence[int | str] = (), **_: Any) -> None:
    """An input in another memory layout gives the same result, or is refused. Those that are `bounded` may go to another kernel, whose
    result keeps its bound.
    """
    call = trial.call()
    plain = trial.run(call)
    for argument in call.tensors() if arguments is None else arguments:
        for layout in LAYOUTS[1:]:
            again = trial.call()
            result = trial.attempt(again.replace(argument, relaid(again[argument], layout)))
            if result is not None:
                compare = trial.agree if argument in bounded else trial.same
                compare(plain, result, f"argument {argument} {layout} in memory")


def empty(trial: Trial, **_: Any) -> None:
    """No rows in, no rows out: what the reference gives."""
    call = _take_rows(trial, trial.call(), [])
    trial.same(trial.expect(call), trial.run(call), "an empty batch")


def fullgraph(trial: Trial, **_: Any) -> None:
    """torch.compile(fullgraph=True) of a function that calls it equals calling it."""

    def caller(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return trial.candidate.call(*args, **kwargs)

    # A code object of its own has a compilation cache of its own; resetting Dynamo would throw away the candidate's compiled bodies as
    # well.
    own = FunctionType(caller.__code__.replace(), caller.__globals__, "caller", None, caller.__closure__)
    call = trial.call()
    try:
        result = trial.contract.split(torch.compile(own, fullgraph=True, backend="aot_eager")(call.args, call.kwargs))
    except Unsupported:
        raise
    except Exception as error:
        raise Violation("result", Comparison(False, f"torch.compile(fullgraph=True) raised {type(error).__name__}: {error}")) from error
    trial.same(trial.run(trial.call()), result, "under torch.compile(fullgraph=True)")


class _Operators(TorchDispatchMode):
    """Notes the calls of operators of dsv4."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "dsv4":
            self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def opcheck(trial: Trial, **_: Any) -> None:
    """torch.library.opcheck of every operator of dsv4 that the function calls, on the arguments that it calls it with.

    All of it but the comparison of eager with traced results, which takes NaN for unequal to NaN: `fullgraph` compares them, by bytes.
    """
    with _Operators() as operators:
        trial.run(trial.call())
    if not operators.seen:
        raise Violation("result", Comparison(False, "no operator of dsv4 was called"))
    for operator, args, kwargs in operators.seen:
        if any(isinstance(value, Tensor) and value.numel() == 0 for value in (*args, *kwargs.values())):
            continue  # torch's own schema check cannot copy some empty tensors
        try:
            torch.library.opcheck(operator, args, kwargs, test_utils=OPCHECKS)
        except Exception as error:
            raise Violation("result", Comparison(False, f"torch.library.opcheck({operator}): {type(error).__name__}: {error}")) from error


def graph_replay(trial: Trial, **_: Any) -> None:
    """A captured CUDA graph, replayed after its inputs were changed in place, equals eager on the changed inputs."""
    call, other = trial.call(), trial.domain.build({**trial.spec, "seed": trial.spec["seed"] ^ 1}, trial.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        trial.run(call)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = trial.run(call)
    for name, tensor in call.tensors().items():
        if tensor.dtype is torch.bool:
            tensor.copy_(other[name])
        else:
            as_integers(tensor).copy_(as_integers(other[name]))
    graph.replay()
    trial.same(trial.run(other), captured, "a CUDA graph replayed on changed inputs")


Check = Callable[..., None]
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (run_to_run, inputs_unchanged, poisoned_output, guards, batch, padding, strides, empty, fullgraph, opcheck, graph_replay)
}
EXAMPLES = {"fullgraph": 2, "opcheck": 2, "graph_replay": 4}  # the slow ones take at most so many cases in every profile


def take(tensor: Tensor, index: list[int]) -> Tensor:
    """Rows of a tensor of any dtype."""
    picked = as_integers(tensor)[torch.tensor(index, dtype=torch.int64, device=tensor.device)]
    return picked.bool() if tensor.dtype is torch.bool else picked.view(tensor.dtype)


def _rows(trial: Trial) -> tuple[int | str, ...]:
    if trial.contract.rows is None:
        raise ValueError(f"{trial.contract.name}: this invariant wants the contract's `rows`")
    return trial.contract.rows.arguments


def _take_rows(trial: Trial, call: Call, index: list[int]) -> Call:
    for argument in _rows(trial):
        call = call.replace(argument, take(call[argument], index))
    return call


def _read(trial: Trial, call: Call, result: dict[str, Tensor]) -> dict[str, Tensor]:
    read = trial.contract.rows.read if trial.contract.rows else None
    return result if read is None else {name: read(call, name, tensor) for name, tensor in result.items()}


def _same_rows(trial: Trial, expected: dict[str, Tensor], actual: dict[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        comparison = compare_bytes(tensor, actual[name], any_nan=trial.row(name).any_nan)
        if not comparison.ok:
            raise Violation(name, comparison, what)


def _padded(tensor: Tensor, bits_of_rows: int) -> Tensor:
    bits = as_integers(tensor)
    value = abs(bits_of_rows) if tensor.dtype is torch.bool else bits_of_rows
    pad = torch.full((PAD_ROWS, *bits.shape[1:]), value, dtype=torch.int64, device=tensor.device).to(bits.dtype)
    joined = torch.cat([bits, pad])
    return joined.bool() if tensor.dtype is torch.bool else joined.view(tensor.dtype)


def _guarded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    buffer = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=tensor.device)
    return buffer, buffer[GUARD_BYTES:-GUARD_BYTES].view(tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), GUARD_BYTES // tensor.element_size()
    )
