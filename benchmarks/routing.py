"""The fused router: `python -m benchmarks.routing [--variants] [--json FILE]`.

On CUDA: device time of one call under a CUDA graph whose logits rotate beyond the L2 cache, beside an empty kernel, torch's chain of
operators in fp32 and the reference, and the host's time to issue the call. The bars: an empty kernel and 3 us at 64 tokens, 10 us at 4096
tokens of 384 experts. `--variants` also times the kernel without its fp32 filter and with fewer programs. On the CPU: wall time beside
the reference; the bar is the reference's time from 16 tokens on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.harness import Timing, copies_beyond_cache, device_microseconds, host_microseconds, report
from dsv4.fast import routing
from dsv4.reference import eplb
from dsv4.reference import routing as reference

TOKENS = (1, 64, 512, 4096)
EXPERTS = (256, 384)
K = 6
IMAGE = 129264

Call = Callable[[Tensor], object]


@dataclass(frozen=True)
class RouterTiming(Timing):
    """A line with the host's time to issue the call."""

    tokens: int = 0
    experts: int = 0
    host_microseconds: float | None = None

    def __str__(self) -> str:
        line = f"{self.tokens:>5} x {self.experts:<5}{self.name:<44}{self.microseconds:>12.2f} us"
        return line if self.host_microseconds is None else f"{line}{self.host_microseconds:>12.1f} us host"


def serving(tokens: int, experts: int, device: torch.device) -> dict[str, object]:
    """What a rank of V4.1 passes: both biases, image rows by token id, replicas, a home-rank shared slot, padding, counters."""
    logical = (torch.arange(experts + 32, device=device) % experts).to(torch.int32)
    return {
        "scale": 1.5,
        "bias": torch.randn(experts, device=device) * 0.1,
        "image_bias": torch.randn(experts, device=device) * 0.1,
        "token_ids": torch.where(torch.rand(tokens, device=device) < 0.3, IMAGE, 7),
        "image_token_id": IMAGE,
        "placement": eplb.make_placement(logical, experts),
        "algorithm": "row_modulo",
        "shared": 1,
        "shared_slots": "home_rank",
        "ranks": 8,
        "rank": 3,
        "live_rows": torch.tensor(tokens - tokens // 16, device=device),
        "counts": torch.zeros(experts + 32, dtype=torch.int32, device=device),
    }


def torch_chain(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Scores, choice and weights alone, operator by operator in fp32."""
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).topk(K, dim=1).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(1, keepdim=True) + 1e-20) * 1.5


def calls(tokens: int, experts: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """What is timed on every device."""
    bias = torch.randn(experts, device=device) * 0.1
    options = serving(tokens, experts, device)
    yield "route: scores, top-k, weights", partial(routing.route, k=K, scale=1.5, bias=bias)
    yield "route: with all that serving asks", partial(routing.route, k=K, **options)
    yield "torch's chain", partial(torch_chain, bias=bias)
    yield "reference", partial(reference.route, k=K, scale=1.5, bias=bias)


def cuda_calls(tokens: int, experts: int, device: torch.device, variants: bool) -> Iterator[tuple[str, Call]]:
    """An empty kernel, and the kernel's variants."""
    import triton

    from dsv4.fast.kernels.route import PROGRAMS, route

    @triton.jit  # type: ignore[untyped-decorator]
    def nothing(x_ptr):  # type: ignore[no-untyped-def]
        pass

    yield "empty kernel", lambda logits: nothing[(1,)](logits, num_warps=1)
    if not variants:
        return
    absent = ["image_bias", "image_mask", "token_ids", "image_token_id", "table", "replicas", "replica_counts", "drawn", "probabilities"]
    plain = dict.fromkeys(absent) | {"bias": torch.randn(experts, device=device) * 0.1, "algorithm": "none", "physical": experts}
    plain |= {"counts": None, "ranks": 1, "rank": 0, "shared": 0, "home_rank": False, "shared_weight": 0.0, "live_rows": tokens}
    for filtered, registers, programs in product((True, False), (None, 64, 80), (528, 1056, 2112, 4096)):
        if programs == PROGRAMS or tokens > programs:
            options = {**plain, "filtered": filtered, "registers": registers, "programs": programs}
            name = f"{'filtered' if filtered else 'all exact'}, {programs} programs, {registers or 'free'} registers"
            yield name, partial(route, k=K, scale=1.5, epsilon=1e-20, **options)  # type: ignore[arg-type]


def timed(name: str, call: Call, logits: Tensor) -> RouterTiming:
    """A line. The reference on CUDA has no graph: it allocates and waits as it likes."""
    tokens, experts = logits.shape

    def finished() -> None:
        call(logits)
        if logits.is_cuda:
            torch.cuda.synchronize()

    if not logits.is_cuda or name == "reference":
        return RouterTiming(name, host_microseconds(finished, seconds=0.1), tokens=tokens, experts=experts)
    host = host_microseconds(partial(call, logits), seconds=0.1)
    taken = device_microseconds(call, copies_beyond_cache(logits)[:64])
    return RouterTiming(name, taken, tokens=tokens, experts=experts, host_microseconds=host)


def timings(device: torch.device, variants: bool) -> Iterator[RouterTiming]:
    """All lines, in order. Equal logits in every row are the worst case of the kernel: no row can be decided by its fp32 filter."""
    for experts in EXPERTS:
        for tokens in TOKENS:
            logits = torch.randn(tokens, experts, device=device) * 2
            cases = list(calls(tokens, experts, device))
            if device.type == "cuda":
                cases = [*cuda_calls(tokens, experts, device, variants), *cases]
            for name, call in cases:
                yield timed(name, call, logits)
            if device.type == "cuda":
                ties = torch.zeros_like(logits)
                taken = device_microseconds(partial(routing.route, k=K, scale=1.5), [ties])
                yield RouterTiming("route: all logits equal", taken, tokens=tokens, experts=experts)


def main() -> None:
    """Print and keep the timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="time the kernel's variants, too")
    parser.add_argument("--json", help="file for the timings")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    kept = []
    for timing in timings(device, arguments.variants):
        kept.append(timing)
        print(timing, flush=True)
    report(kept, arguments.json)


if __name__ == "__main__":
    main()
