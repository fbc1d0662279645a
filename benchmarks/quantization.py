"""Quantisers: `python -m benchmarks.quantization [--json FILE] [--tokens N ...]`.

On CUDA: device time of each format and scale layout on 65536 x 4096 bf16, and the share of the bandwidth that a copy of as many bytes gets
in the same run. On the CPU: the fast path beside the reference at 16, 256 and 4096 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Timing, copies_beyond_cache, copy_microseconds, device_microseconds, host_microseconds, nbytes, report
from dsv4.fast import quantization as quick
from dsv4.reference import quantization as plain

ROWS, WIDTH = 65536, 4096
TOKENS = (16, 256, 4096)
UE8M0_LAYOUTS = ("rows", "packed", "128x4")


def cases(module: Any) -> Iterator[tuple[str, Callable[[Tensor], Any]]]:
    """Every quantiser of a module, by name."""
    for group in (128, 32):
        for layout in UE8M0_LAYOUTS:
            yield f"quantize_fp8 {group} ue8m0 {layout}", partial(module.quantize_fp8, group=group, scale_layout=layout)
    for layout in ("rows", "mn_major"):
        yield f"quantize_fp8 128 fp32 {layout}", partial(module.quantize_fp8, group=128, scale="fp32", scale_layout=layout)
    yield "quantize_fp8_blocks 128x128", module.quantize_fp8_blocks
    yield "quantize_mxfp4 32", module.quantize_mxfp4
    yield "quantize_fp4_e4m3 16", module.quantize_fp4_e4m3
    for group, form in ((64, "fp8"), (32, "mxfp4"), (16, "fp4_e4m3")):
        yield f"fake_quantize {group} {form}", partial(module.fake_quantize, group=group, format=form)


def dequantizers(module: Any, x: Tensor) -> Iterator[tuple[str, Callable[[Tensor], Any], Tensor, Tensor]]:
    """Every dequantiser, with its codes and scales."""
    for layout in UE8M0_LAYOUTS:
        codes, scales = quick.quantize_fp8(x, 128, scale_layout=layout)
        yield f"dequantize fp8 128 {layout}", partial(module.dequantize, scales=scales, group=128, scale_layout=layout), codes, scales
    codes, scales = quick.quantize_mxfp4(x)
    yield "dequantize mxfp4 32", partial(module.dequantize, scales=scales, group=32), codes, scales


def tensors(result: Any) -> tuple[Tensor, ...]:
    """What a call wrote."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def on_device(device: torch.device) -> Iterator[Timing]:
    """Device times at one shape, each beside a copy of as many bytes."""
    x = torch.randn(ROWS, WIDTH, device=device).to(torch.bfloat16)
    inputs = copies_beyond_cache(x)
    for name, run in cases(quick):
        yield beside_copy(name, run, inputs, nbytes(x, *tensors(run(x))))
    for name, run, codes, scales in dequantizers(quick, x):
        yield beside_copy(name, run, copies_beyond_cache(codes), nbytes(codes, scales, *tensors(run(codes))))


def beside_copy(name: str, run: Callable[[Tensor], Any], inputs: list[Tensor], moved: int) -> Timing:
    """A device time, and the share of a copy's bandwidth."""
    taken, copied = device_microseconds(run, inputs), copy_microseconds(moved, inputs[0].device)
    return Timing(name, taken, moved / taken / 1000, copied / taken)


def on_host(tokens: Sequence[int]) -> Iterator[Timing]:
    """Wall times beside the reference's."""
    for rows in tokens:
        x = torch.randn(rows, WIDTH).to(torch.bfloat16)
        for (name, run), (_, slow) in zip(cases(quick), cases(plain), strict=True):
            yield Timing(f"{name}, {rows} tokens", host_microseconds(partial(run, x)), against=host_microseconds(partial(slow, x)))
        for (name, run, codes, _), (_, slow, _, _) in zip(dequantizers(quick, x), dequantizers(plain, x), strict=True):
            yield Timing(f"{name}, {rows} tokens", host_microseconds(partial(run, codes)), against=host_microseconds(partial(slow, codes)))


def main() -> None:
    """Print the timings, and write them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the timings there")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="on the CPU")
    arguments = parser.parse_args()
    timings = []
    for timing in on_device(torch.device("cuda")) if torch.cuda.is_available() else on_host(arguments.tokens):
        print(timing, flush=True)
        timings.append(timing)
    report(timings, arguments.json)


if __name__ == "__main__":
    main()
