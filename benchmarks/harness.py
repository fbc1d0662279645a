"""How to time: a CUDA graph whose inputs rotate beyond the L2 cache, beside a copy of as many bytes; wall time on the CPU."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

MEASUREMENTS = 5


@dataclass(frozen=True)
class Timing:
    """One line of a benchmark."""

    name: str
    microseconds: float
    gigabytes_per_second: float | None = None
    share_of_copy: float | None = None
    against: float | None = None  # microseconds of what it is compared with

    def __str__(self) -> str:
        parts = [f"{self.name:<44}{self.microseconds:>12.1f} us"]
        if self.gigabytes_per_second is not None:
            parts.append(f"{self.gigabytes_per_second:>9.0f} GB/s")
        if self.share_of_copy is not None:
            parts.append(f"{100 * self.share_of_copy:>7.1f} % of a copy")
        if self.against is not None:
            parts.append(f"{self.against:>12.1f} us reference, {self.against / self.microseconds:.1f} times as long")
        return "".join(parts)


def copies_beyond_cache(tensor: Tensor) -> list[Tensor]:
    """A tensor and as many clones of it as make reading them in turn miss the L2 cache."""
    cache = torch.cuda.get_device_properties(tensor.device).L2_cache_size
    return [tensor, *(tensor.clone() for _ in range(3 * cache // max(tensor.nbytes, 1)))]


def device_microseconds(run: Callable[[Tensor], Any], inputs: Sequence[Tensor], *, calls: int = 20) -> float:
    """Median device time of one `run`, from replays of a CUDA graph of `calls` of them that takes the inputs in turn."""
    stream = torch.cuda.Stream()
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


def copy_microseconds(nbytes: int, device: torch.device) -> float:
    """Device time of a copy that reads and writes `nbytes` in all, from buffers that rotate beyond the cache."""
    sources = copies_beyond_cache(torch.zeros(nbytes // 2, dtype=torch.uint8, device=device))
    target = torch.empty_like(sources[0])
    return device_microseconds(target.copy_, sources)


def host_microseconds(run: Callable[[], Any], *, seconds: float = 0.5) -> float:
    """Median wall time of one `run` after a first one, over at least three and about `seconds`."""
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


def report(timings: Sequence[Timing], path: str | None) -> None:
    """Write the timings, with what they were measured on, to a JSON file if there is one."""
    if path is None:
        return
    cuda = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    lines = {"device": where, "torch": torch.__version__, "timings": [asdict(timing) for timing in timings]}
    Path(path).write_text(json.dumps(lines, indent=1) + "\n")
