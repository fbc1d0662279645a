"""Codecs: numbers to bytes and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, activations
from dsv4.fast import codecs


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """Every codec over as many numbers as activations have."""
    for preset, config in PRESETS.items():
        yield from _every(f"{preset}, {tokens} tokens x {config.hidden_size}", activations(tokens, config.hidden_size, device))


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """Every codec over so many numbers."""
    yield from _every(f"{rows} x {columns}", activations(rows, columns, device))


def _every(label: str, x: Tensor) -> Iterator[Case]:
    as_numbers = {"torch's cast": lambda codes: codes.to(torch.float32)}
    to_e4m3 = {"torch's cast": lambda numbers: numbers.to(torch.float8_e4m3fn)}
    e2m1 = codecs.encode_e2m1(x)
    yield Case("codecs.encode_e4m3", label, (x,), raw=to_e4m3)
    yield Case("codecs.encode_e2m1", label, (x,))
    yield Case("codecs.encode_e8m0", label, (x.abs(),))
    yield Case("codecs.decode_e4m3", label, (codecs.encode_e4m3(x),), raw=as_numbers)
    yield Case("codecs.decode_e5m2", label, (x.to(torch.float8_e5m2),), raw=as_numbers)
    yield Case("codecs.decode_e2m1", label, (e2m1,))
    yield Case("codecs.decode_e8m0", label, (codecs.encode_e8m0(x.abs()),), raw=as_numbers)
    yield Case("codecs.pack_fp4", label, (e2m1,))
    yield Case("codecs.unpack_fp4", label, (codecs.pack_fp4(e2m1),))
