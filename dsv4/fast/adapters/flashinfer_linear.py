"""FlashInfer's product of two pairs of MXFP8 with 128x4 scales, on SM10x and SM12x, and its proof.

Of its backends CUTLASS is the one that all these devices have, and the one that is asked for: what has proved itself is what runs. Its
tactic may come from a tuning run, and with it the order of additions. FlashInfer checks nothing here that `takes_pairs` has not.
Source: spec A 7.3, 8.3; kernels B.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import torch
from torch import Tensor

from dsv4.fast.adapters.flashinfer import LIBRARY
from dsv4.fast.adapters.library import known_answer
from dsv4.fast.adapters.products import SIZES, Product
from dsv4.fast.dispatch import cuda_exactly
from dsv4.host import FLASHINFER_MXFP8

__all__ = ["DEVICES", "LIBRARY", "MM_MXFP8", "mm_mxfp8", "takes_pairs"]

MM_MXFP8 = "mm_mxfp8"
BACKEND = "cutlass"
DEVICES = cuda_exactly(*FLASHINFER_MXFP8)
LEAST = 128  # of n and of k: below, results may hold NaN


def mm_mxfp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of two pairs of MXFP8: bf16 [tokens, n]; `takes_pairs` has passed.

    Args:
        codes, weight: uint8 [tokens, k] and [n, k].
        scales, weight_scales: int32 [ceil(tokens/128), ceil(k/128), 32, 4] and [ceil(n/128), ceil(k/128), 32, 4].
        out: where to write it.
    """
    if out is None:
        out = torch.empty(codes.shape[0], weight.shape[0], dtype=torch.bfloat16, device=codes.device)
    if out.numel():
        numbers = codes.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn).t()
        given = *numbers, _flat(scales), _flat(weight_scales), out, torch.bfloat16, False, BACKEND
        LIBRARY.function(MM_MXFP8)(*given, skip_check=True)
    return out


def takes_pairs(arguments: Mapping[str, Any]) -> str | None:
    """What keeps `mm_mxfp8` from the arguments of the operator `linear_mxfp8`: both sides 128x4, whole groups."""
    n, k = arguments["weight"].shape
    if not n or not arguments["codes"].shape[0]:
        return None
    for name in ("scales", "weight_scales"):
        if arguments[name].dim() != 4 or not arguments[name].is_contiguous():
            return f"takes 128x4 scales on both sides; got {name} {list(arguments[name].shape)}"
    if k % 32 or n % 32 or k < LEAST or n < LEAST:
        return f"takes k and n in multiples of 32 from {LEAST} on; got k {k} and n {n}"
    for name in ("codes", "weight", "scales", "weight_scales"):
        if not arguments[name].is_contiguous() or arguments[name].data_ptr() % 16:
            return f"takes contiguous tensors that begin at multiples of 16 bytes; {name} is not"
    return None


def _flat(scales: Tensor) -> Tensor:
    return scales.view(torch.uint8).view(-1)


def _probe(device: torch.device) -> str | None:
    product = Product.of(256, 32, 1)
    (x, weight), (scales, by_row) = product.codes(device), product.scale_bytes(device)
    of_weight = torch.ops.dsv4.swizzle_128x4(by_row[0])

    def call() -> list[Tensor]:
        outs = [torch.full((m, len(weight[0])), nan, dtype=torch.bfloat16, device=device) for m in SIZES]
        return [mm_mxfp8(x[0, : len(out)], torch.ops.dsv4.swizzle_128x4(scales[0, : len(out)]), weight[0], of_weight, out) for out in outs]

    return known_answer(call, product.answers(), device)


LIBRARY.probes[MM_MXFP8] = _probe
