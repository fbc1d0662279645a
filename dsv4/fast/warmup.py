"""Everything that a model's functions compile, and every proof of a third-party function, before the first token.

`warmup_calls.CALLS` lists, for each component, the calls of a model of a configuration. Each is made once, at any number of tokens, and
afterwards none of them compiles anything. What only another setting of a server asks for (expert placements, padding, shared slots) is
compiled when it first runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch

from dsv4 import checks
from dsv4.configs import ModelConfig
from dsv4.fast import dispatch
from dsv4.fast.adapters import deepgemm, flashinfer, flashmla
from dsv4.fast.warmup_calls import CALLS
from dsv4.types import ArgumentError

LIBRARIES = (deepgemm.LIBRARY, flashinfer.LIBRARY, flashmla.LIBRARY)


class Proof(NamedTuple):
    """What a third-party function came to on a device."""

    library: str
    version: str
    function: str
    device: str
    state: str  # "usable", "not usable" or "not tried"
    reason: str
    seconds: float


class Warmed(NamedTuple):
    """One call: what it compiled, and how long it took."""

    call: str
    graphs: int  # of inductor
    kernels: int  # of Triton, other than inductor's
    seconds: float


class WarmupReport(NamedTuple):
    """What `warmup` did."""

    device: str
    proofs: tuple[Proof, ...]
    calls: tuple[Warmed, ...]
    seconds: float

    def __str__(self) -> str:
        graphs, kernels = (sum(getattr(call, name) for call in self.calls) for name in ("graphs", "kernels"))
        lines = [f"{self.device}: {len(self.calls)} calls, {graphs} graphs and {kernels} kernels compiled, {self.seconds:.1f} s"]
        lines += [f"  {call.call}: {call.graphs} graphs, {call.kernels} kernels, {call.seconds:.1f} s" for call in self.calls]
        lines += [
            f"  {proof.version or proof.library} {proof.function}: {proof.state}: {proof.reason or 'proved'}" for proof in self.proofs
        ]
        return "\n".join(lines)


def warmup(
    config: ModelConfig, shapes: Sequence[int], *, device: torch.device | str | None = None, components: Sequence[str] | None = None
) -> WarmupReport:
    """Prove the libraries' functions and run every function that a model calls, so that afterwards nothing compiles on this device.

    Args:
        config: the model: one of `dsv4.configs`, or `from_checkpoint`.
        shapes: numbers of tokens to run, each at least 1. One is enough for the compilers; more also fill the caches of memory.
        device: None for the current CUDA device if there is one, else the CPU.
        components: None for all that a model calls.

    Returns:
        WarmupReport: proofs and calls in the order in which they were made.

    Raises:
        ArgumentError: no shape or one below 1, or a component that is not warmed.
        BackendUnavailable: a backend that `use()` or DSV4_IMPL demands cannot run.
    """
    if not shapes:
        raise ArgumentError("shapes", "none", "must be at least one number of tokens")
    for tokens in shapes:
        checks.at_least("shapes", tokens, 1)
    for component in components or ():
        checks.one_of("components", component, tuple(CALLS))
    where = dispatch.default_device(device)
    began = time.perf_counter()
    proofs = tuple(prove(where))
    calls = [
        _run(f"{component}: {name}, {tokens} tokens", call)
        for component in components or CALLS
        for tokens in shapes
        for name, call in CALLS[component](config, tokens, where)
    ]
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return WarmupReport(str(dispatch.describe(where)), proofs, tuple(calls), time.perf_counter() - began)


def prove(device: torch.device, *, again: bool = False, try_them: bool = True) -> Iterator[Proof]:
    """Try each function of each library on a device, unless it has been tried before; `again` tries failures anew."""
    described = dispatch.describe(device)
    for library in LIBRARIES:
        absent = library.missing() or library.devices(described)
        for function in library.probes:
            began = time.perf_counter()
            reason = absent or library.lacks(function)
            known = None if reason else library.recalled(function, device)
            if reason is None and (try_them or known is not None):
                reason = library.disproved(function, device, again=again) if try_them else known and known.wrong
                known = library.recalled(function, device)
            state = "not usable" if reason else "usable" if known else "not tried"
            yield Proof(library.name, library.version(), function, str(described), state, reason or "", time.perf_counter() - began)


def _run(name: str, call: Callable[[], Any]) -> Warmed:
    began = time.perf_counter()
    with counted() as count:
        call()
    return Warmed(name, *count(), time.perf_counter() - began)


@contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts the graphs of inductor and the kernels of our own that are compiled inside."""
    from torch._dynamo.utils import counters

    graphs, compiled = counters["stats"]["unique_graphs"], [0]
    with _each_kernel(lambda: compiled.__setitem__(0, compiled[0] + 1)):
        yield lambda: (counters["stats"]["unique_graphs"] - graphs, compiled[0])


@contextmanager
def _each_kernel(tell: Callable[[], None]) -> Iterator[None]:
    """Tells of each kernel that Triton has not had in this process, and compiles or loads now."""
    try:
        runtime = import_module("triton.knobs").runtime
    except ImportError:
        yield
        return
    before = runtime.jit_post_compile_hook

    def hook(**kernel: Any) -> Any:
        tell()
        return before(**kernel) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before
