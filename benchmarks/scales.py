"""Laying a grid of scales out again: `python -m benchmarks.scales [--rows 65536] [--groups 4096] [--json FILE]`.

On CUDA: device time of every backend that is usable, under a CUDA graph, beside a device copy of the bytes that the function reads and
writes, measured in the same run. The bar is 80 % of the copy. On the CPU: wall time beside the reference, of a smaller grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Timing, copies_beyond_cache, copy_microseconds, device_microseconds, host_microseconds, nbytes, report
from dsv4.fast import backends, scales
from dsv4.reference import scales as reference

BAR = 0.8


class Case(NamedTuple):
    """One function on one grid."""

    function: str
    given: Tensor
    fast: Callable[[Tensor, str], Tensor | None]
    reference: Callable[[Tensor], Tensor]
    moved: int  # bytes read and written


def cases(rows: int, groups: int, device: torch.device) -> Iterator[Case]:
    """Every layout of a grid of [rows, groups] bytes. Padding keeps all but the last 100 rows, a count that the device alone knows."""
    byte = torch.randint(0, 256, (rows, groups), dtype=torch.uint8, device=device)
    packed, tiles, live = scales.pack_ue8m0(byte), scales.swizzle_128x4(byte), max(0, rows - 100)
    count = torch.tensor(live, device=device)
    more = rows + rows // 8
    both, padded = nbytes(byte, packed), nbytes(byte[:live], packed)
    yield Case("pack_ue8m0", byte, lambda x, impl: scales.pack_ue8m0(x, impl=impl), reference.pack_ue8m0, both)
    yield Case(
        "unpack_ue8m0",
        packed,
        lambda x, impl: scales.unpack_ue8m0(x, groups, impl=impl),
        lambda x: reference.unpack_ue8m0(x, groups),
        both,
    )
    yield Case("swizzle_128x4", byte, lambda x, impl: scales.swizzle_128x4(x, impl=impl), reference.swizzle_128x4, nbytes(byte, tiles))
    yield Case(
        "unswizzle_128x4",
        tiles,
        lambda x, impl: scales.unswizzle_128x4(x, rows, groups, impl=impl),
        lambda x: reference.unswizzle_128x4(x, rows, groups),
        both,
    )
    yield Case(
        "packed_to_128x4", packed, lambda x, impl: scales.packed_to_128x4(x, impl=impl), reference.packed_to_128x4, nbytes(packed, tiles)
    )
    yield Case(
        "packed_from_128x4",
        tiles,
        lambda x, impl: scales.packed_from_128x4(x, rows, impl=impl),
        lambda x: reference.packed_from_128x4(x, rows),
        both,
    )
    yield Case(
        "zero_pad_rows",
        packed,
        lambda x, impl: scales.zero_pad_rows(x, count, scale_layout="packed", impl=impl),
        lambda x: reference.zero_pad_rows(x, count, scale_layout="packed"),
        padded,
    )
    yield Case(
        "zero_pad_rows",
        tiles,
        lambda x, impl: scales.zero_pad_rows(x, count, scale_layout="128x4", impl=impl),
        lambda x: reference.zero_pad_rows(x, count, scale_layout="128x4"),
        padded,
    )
    yield Case(
        "restride_rows",
        packed,
        lambda x, impl: scales.restride_rows(x, more, impl=impl),
        lambda x: reference.restride_rows(x, more),
        nbytes(packed) * (rows + more) // rows,
    )
    if rows % 128 == 0:
        yield Case("utccp_rows", packed, lambda x, impl: scales.utccp_rows(x, impl=impl), reference.utccp_rows, both)
        experts = byte.view(1, rows, groups)
        yield Case(
            "interleave_hopper_fp4",
            experts,
            lambda x, impl: scales.interleave_hopper_fp4(x, impl=impl),
            reference.interleave_hopper_fp4,
            both,
        )
    numbers = byte.view(torch.float32)
    yield Case("align_mn_major", numbers, lambda x, impl: scales.align_mn_major(x, impl=impl), reference.align_mn_major, both)


def usable(function: str, device: torch.device) -> list[str]:
    """Backends of a function that are worth timing on a device."""
    own = ("inductor",) if device.type == "cpu" else ("triton", "deepgemm", "flashinfer")
    rows = backends(device, prove=True)
    return [row.backend for row in rows if row.function == f"scales.{function}" and row.usable and row.backend in own]


def layout_of(given: Tensor) -> str:
    """What a case starts from, in a word."""
    return "128x4" if given.dim() == 4 else "packed" if given.stride(0) == 1 else "rows"


def on_cuda(case: Case, impl: str, copies: dict[int, float], device: torch.device) -> Timing:
    """Device time beside a copy of as many bytes."""
    if case.moved not in copies:
        copies[case.moved] = copy_microseconds(case.moved, device)
    taken = device_microseconds(lambda x: case.fast(x, impl), copies_beyond_cache(case.given))
    return Timing(f"{case.function} from {layout_of(case.given)}, {impl}", taken, case.moved / taken / 1000, copies[case.moved] / taken)


def on_cpu(case: Case, impl: str) -> Timing:
    """Wall time beside the reference."""
    taken = host_microseconds(lambda: case.fast(case.given, impl))
    against = host_microseconds(lambda: case.reference(case.given))
    return Timing(f"{case.function} from {layout_of(case.given)}, {impl}", taken, case.moved / taken / 1000, against=against)


def main() -> None:
    """Print and keep the timings; on CUDA, say which default misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--rows", type=int, default=65536 if cuda else 2048)
    parser.add_argument("--groups", type=int, default=4096 if cuda else 128)
    parser.add_argument("--json", help="file for the timings")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timings: list[Timing] = []
    copies: dict[int, float] = {}
    print(f"{arguments.rows} rows of {arguments.groups} scales on {torch.cuda.get_device_name() if cuda else 'the CPU'}")
    for case in cases(arguments.rows, arguments.groups, device):
        for impl in usable(case.function, device):
            try:
                timing = on_cuda(case, impl, copies, device) if cuda else on_cpu(case, impl)
            except (RuntimeError, ValueError) as error:  # a library that refuses the size
                print(f"{case.function}, {impl}: {str(error).splitlines()[0]}")
                continue
            timings.append(timing)
            below = cuda and impl == "triton" and timing.share_of_copy is not None and timing.share_of_copy < BAR
            print(timing, "  below the bar" if below else "")
    report(timings, arguments.json)


if __name__ == "__main__":
    main()
