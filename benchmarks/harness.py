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
CALLS = 20  # of a graph, at least
COPIES = 1024  # of an input, at most: inputs below 60 kB stay in the cache of an H200


def microseconds(run: Callable[[Tensor], Any], first: Tensor) -> tuple[float | None, float]:
    """Device time of one `run`, None on the CPU, and the host's time to issue it."""
    if not first.is_cuda:
        return None, host_microseconds(partial(run, first))
    inputs = rotating(first)
    return device_microseconds(run, inputs, calls=max(CALLS, len(inputs))), host_microseconds(partial(run, first))


def rotating(tensor: Tensor) -> list[Tensor]:
    """A tensor and as many copies of it as make reading them in turn miss the L2 cache."""
    cache = torch.cuda.get_device_properties(tensor.device).L2_cache_size
    return [tensor, *(duplicate(tensor) for _ in range(min(3 * cache // max(tensor.nbytes, 1), COPIES)))]


def duplicate(tensor: Tensor) -> Tensor:
    """A copy with the same strides, padded ones too."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def device_microseconds(run: Callable[[Tensor], Any], inputs: Sequence[Tensor], *, calls: int) -> float:
    """Median device time of one `run`, from replays of a CUDA graph of `calls` of them that takes the inputs in turn."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for tensor in inputs:
            run(tensor)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            run(inputs[call % len(inputs)])
    graph.replay()
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
