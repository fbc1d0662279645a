"""FlashMLA 1.0 (the wheels of sgl-flash-mla): whether its sparse prefill computes a softmax on SM90.

Its kernels of SM90 lie behind `use_legacy=True`; the others want SM100. Source: kernels 0b, A.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.fast.adapters.library import Library, as_bytes, known_answer
from dsv4.fast.dispatch import cuda_exactly

SPARSE_FORWARD = "flash_mla_sparse_fwd"


def sparse_forward(q: Tensor, kv: Tensor, indices: Tensor, scale: float, sink: Tensor) -> Tensor:
    """Attention of each query over its own rows of `kv`, which are keys and values.

    Args:
        q: [queries, heads, 512], bf16, 64 or 128 heads.
        kv: [entries, 1, 512], bf16.
        indices: [queries, 1, picks], int32, -1 for none; picks a multiple of 128.
        scale: of the logits.
        sink: [heads], fp32: a logit without a value.

    Returns:
        bf16 [queries, heads, 512].
    """
    out: Tensor = LIBRARY.function(SPARSE_FORWARD)(q, kv, indices, scale, 512, sink, use_legacy=True)[0]
    return out


def _unfit(version: str) -> str | None:
    return None if version.split(".")[:2] == ["1", "0"] else "is not 1.0.x, whose signatures this adapter knows"


def _probe_sparse_forward(device: torch.device) -> str | None:
    # Entry j is (j + 1) (1, -1, 1/2, 2, 1, ...). The first query is zero: its logits and the sink's are, so three entries weigh 1/4 each.
    # The second one has 64 in its first dim in even heads: its logits are 64 (j + 1), and the largest takes everything, in fp32 exactly.
    pattern = (1.0, -1.0, 0.5, 2.0)
    rows = torch.arange(1.0, 9.0)[:, None] * torch.tensor(pattern).repeat(128)
    q = torch.zeros(2, 64, 512)
    q[1, ::2, 0] = 64.0
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, :3], indices[1, 0, :3] = torch.tensor([1, 3, 4]), torch.tensor([2, 5, 0])
    given = q.to(torch.bfloat16).to(device), rows[:, None].to(torch.bfloat16).to(device), indices.to(device)
    sink = torch.zeros(64, device=device)
    uniform, largest, other = ([weight * number for number in pattern] * 128 for weight in (2.75, 6.0, 2.5))
    want = as_bytes(uniform * 64 + (largest + other) * 32, torch.bfloat16)
    return known_answer(lambda: (sparse_forward(*given, 1.0, sink),), (want,), device)


LIBRARY = Library(
    name="sgl-flash-mla",
    module="flash_mla",
    distributions=("sgl-flash-mla",),
    install="pip install sgl-flash-mla==1.0.0",
    fits=_unfit,
    probes={SPARSE_FORWARD: _probe_sparse_forward},
    devices=cuda_exactly((9, 0)),
)
