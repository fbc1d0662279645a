"""How tensors lie in memory."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNED = 16  # bytes of the widest load


def aligned(tensor: Tensor) -> Tensor:
    """A tensor whose rows begin at multiples of 16 bytes, a copy if it must be: which kernel runs, and with it bits, hang on it."""
    begins = [tensor.data_ptr(), *(step * tensor.element_size() for step in tensor.stride()[:-1])]
    if tensor.stride(-1) == 1 and not any(begin % ALIGNED for begin in begins):
        return tensor
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)
