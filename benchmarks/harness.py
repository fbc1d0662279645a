"""The stop-watch: a CUDA graph whose inputs rotate beyond the L2 cache, the host's time to issue a call, wall time on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

MEASUREMENTS = 5
SETTLING = 0.2  # seconds of the same before them: clocks fall under load, and what is timed first would be faster for it
CALLS = 20  # of a graph, at least
COPIES = 1024  # of an input, at most: inputs below 60 kB stay in the cache of an H200

First = Tensor | tuple[Any, ...]  # a call's first argument: a tensor, or a NamedTuple with some


def microseconds(run: Callable[[Any], Any], first: First) -> tuple[float | None, float]:
    """Device time of one `run`, None on the CPU, and the host's time to issue it."""
    if not tensors(first)[0].is_cuda:
        return None, host_microseconds(partial(run, first))
    inputs = rotating(first)
    return device_microseconds(run, inputs, calls=max(CALLS, len(inputs))), host_microseconds(partial(run, first))


def rotating(first: First) -> list[First]:
    """An argument and as many copies of it as make reading them in turn miss the L2 cache."""
    parts = tensors(first)
    cache = torch.cuda.get_device_properties(parts[0].device).L2_cache_size
    return [first, *(duplicate(first) for _ in range(min(3 * cache // max(nbytes(*parts), 1), COPIES)))]


def duplicate(value: Any) -> Any:
    """A value with copies of its tensors, which have the same strides, padded ones too; what is no tensor stays."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    if not isinstance(value, tuple):
        return value
    parts = map(duplicate, value)
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors of a value: itself, or those in a tuple and the tuples in it, where anything else may stand too."""
    if isinstance(value, Tensor):
        return (value,)
    return tuple(tensor for part in value for tensor in tensors(part)) if isinstance(value, tuple) else ()


def device_microseconds(run: Callable[[Any], Any], inputs: Sequence[First], *, calls: int) -> float:
    """Median device time of one `run`, from replays of a CUDA graph of `calls` of them that takes the inputs in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for given in inputs:
            run(given)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(inputs[call % len(inputs)])
    until = time.perf_counter() + SETTLING
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(MEASUREMENTS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    return median(times)


def host_microseconds(run: Callable[[], Any], *, seconds: float = 0.1) -> float:
    """Median wall time of one `run` after a first one, over at least three and about `seconds`. Waits for no device."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 1000):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * median(times)


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
