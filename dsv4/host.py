"""Choices made on the host, which exist once and which both implementations hand on: no tensor is looked at."""

from __future__ import annotations

import torch

from dsv4 import checks
from dsv4.types import ArgumentError, Mxfp8Route, ProductMode, ScaleLayout

__all__ = ["choose_mxfp8_route"]

DEEPGEMM_MXFP8 = ((10, 0), (10, 3), (10, 7), (12, 0))  # capabilities that DeepGEMM's product of pairs runs on
CONSUMERS = ("flashinfer", "deepgemm", "triton", "inductor", "eager")
FLASHINFER_MXFP8 = ((10, 0), (10, 3), (10, 7), (12, 0), (12, 1))  # and FlashInfer's
TRITON_FROM = (8, 0)


def choose_mxfp8_route(consumer: str, mode: ProductMode | str, device: torch.device | str) -> Mxfp8Route:
    """How a producer should lay out an `Mxfp8Pair`, and who multiplies it.

    A pair for FlashInfer has 128x4 scales. Its product promises neither the same bits in another run nor in another batch, so a mode that
    asks for that takes the packed pair instead, as every other consumer does.

    Args:
        consumer: the backend of the layer that reads the pair: flashinfer, deepgemm, triton, inductor or eager.
        mode: default, deterministic or batch_invariant.
        device: where the layer runs; its capability is asked for at each call.

    Returns:
        Mxfp8Route(layout, backend): 128x4 and flashinfer; or packed, and the backend that multiplies packed pairs on this device:
        deepgemm (10.0, 10.3, 10.7, 12.0), triton (other CUDA devices from 8.0), inductor.

    Raises:
        ArgumentError: an unknown consumer, mode or device.
    """
    checks.one_of("consumer", consumer, CONSUMERS)
    mode = checks.choice("mode", mode, ProductMode)
    capability = cuda_capability(_device(device))
    if consumer == "flashinfer" and mode is ProductMode.DEFAULT and capability in FLASHINFER_MXFP8:
        return Mxfp8Route(ScaleLayout.SWIZZLED_128X4, "flashinfer")
    if capability is None or capability < TRITON_FROM:
        return Mxfp8Route(ScaleLayout.PACKED, "inductor")
    return Mxfp8Route(ScaleLayout.PACKED, "deepgemm" if capability in DEEPGEMM_MXFP8 else "triton")


def cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for any other."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:
        raise ArgumentError("device", str(device), f"there are {torch.cuda.device_count()} CUDA devices here") from error


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError("device", repr(device), "must be a torch.device, or a name of one such as cpu or cuda:1") from None
