"""FlashInfer 0.7: the 128x4 interleave, the MXFP8 quantiser of SM100 and newer, and the router by token id.

FlashInfer is tied to no torch. Its `mxfp8_quantize` runs below SM100 without a word and writes nothing: the probe sees the poison that it
leaves. Source: spec A 8.3, M 1, 9.3; kernels B.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsv4.fast.adapters.library import Library, as_bytes, known_answer
from dsv4.fast.dispatch import cuda_from

INTERLEAVE = "block_scale_interleave"
MXFP8_QUANTIZE = "mxfp8_quantize"
HASH_TOPK = "fused_moe.hash_topk"


def one_batch(arguments: Mapping[str, Any]) -> str | None:
    """[rows, groups] or [batch, rows, groups], not empty."""
    scales = arguments["scales"]
    fits = scales.dim() <= 3 and scales.numel() > 0
    return None if fits else f"takes [rows, groups] or [batch, rows, groups], not empty; got {list(scales.shape)}"


def swizzle_128x4(scales: Tensor) -> Tensor:
    """uint8 [..., rows, groups] to int32 [..., ceil(rows/128), ceil(groups/4), 32, 4]."""
    *batch, rows, groups = scales.shape
    flat: Tensor = LIBRARY.function(INTERLEAVE)(scales.contiguous())
    return flat.view(torch.int32).view(*batch, -(-rows // 128), -(-groups // 4), 32, 4)


def mxfp8_quantize(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """MXFP8 codes and scales of groups of 32, by the floor "flashinfer".

    Args:
        x: [m, k], bf16, k a multiple of 32.
        swizzled: whether the scales come as 128x4 tiles instead of row-major.

    Returns:
        codes uint8 [m, k]; scales uint8, flat: m * k/32, or ceil(m/128) * 512 * ceil(k/128).
    """
    codes, scales = LIBRARY.function(MXFP8_QUANTIZE)(x.contiguous(), swizzled)
    return codes.view(torch.uint8), scales.view(torch.uint8).reshape(-1)


def hash_topk(logits: Tensor, token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights of a layer that is routed by token id: a row of the benchmark, and no backend.

    It bounds no id, divides 0 by 0 where all scores are 0 (there is no epsilon), and leaves the weights without the routed scale.

    Args:
        logits: [tokens, experts], fp32.
        token_ids: [tokens], int64, each below `vocabulary`.
        table: [vocabulary, k], int32, each entry below `experts`.

    Returns:
        ids int32 and weights fp32, [tokens, k].
    """
    weights, ids = LIBRARY.function(HASH_TOPK)(logits.contiguous(), token_ids.contiguous(), table.contiguous())
    return ids, weights


def _unfit(version: str) -> str | None:
    return None if version.split(".")[:2] == ["0", "7"] else "is not 0.7.x, whose signatures this adapter knows"


def _probe_interleave(device: torch.device) -> str | None:
    # byte (r, g) goes to (g div 4) 512 + (r mod 32) 16 + (r div 32) 4 + g mod 4; the rest of the tile is zero
    scales = torch.zeros(34, 5, dtype=torch.uint8)
    expected = bytearray(2 * 512)
    for row, group, byte, at in (
        (0, 0, 1, 0),
        (0, 3, 2, 3),
        (0, 4, 255, 512),
        (1, 1, 4, 17),
        (31, 2, 5, 498),
        (32, 0, 6, 4),
        (33, 4, 7, 532),
    ):
        scales[row, group] = byte
        expected[at] = byte
    scales = scales.to(device)
    return known_answer(lambda: (swizzle_128x4(scales),), (bytes(expected),), device)


def _probe_mxfp8(device: torch.device) -> str | None:
    # Groups of 1, 3, -1/2 and 0 get 2^-8, 2^-7, 2^-9 and byte 0, so the codes of 256, 384, -256 and 0.
    x = torch.tensor([[1.0] * 32 + [3.0] * 32, [-0.5] * 32 + [0.0] * 32], dtype=torch.bfloat16, device=device)
    codes = bytes([0x78] * 32 + [0x7C] * 32 + [0xF8] * 32 + [0x00] * 32)
    tile = bytearray(512)
    tile[0], tile[1], tile[16] = 119, 120, 118
    wrong = known_answer(lambda: mxfp8_quantize(x, False), (codes, bytes([119, 120, 118, 0])), device)
    return wrong or known_answer(lambda: mxfp8_quantize(x, True), (codes, bytes(tile)), device)


def _probe_hash_topk(device: torch.device) -> str | None:
    # softplus(x) is x at these sizes, so the scores are 5, 10, 15 and 20, and the weights tenths; its division is approximate
    logits = torch.tensor([[100.0, 400.0, 25.0, 225.0, 1e4], [225.0, 25.0, 100.0, 1e4, 400.0]], device=device)
    table = torch.tensor([[0, 1, 2, 3], [3, 3, 3, 3], [4, 2, 0, 1]], dtype=torch.int32, device=device)
    token_ids = torch.tensor([0, 2], device=device)

    def thousandths() -> tuple[Tensor, Tensor]:
        ids, weights = hash_topk(logits, token_ids, table)
        return ids, (1000 * weights).round().to(torch.int32)

    ids, weights = as_bytes([0, 1, 2, 3, 4, 2, 0, 1], torch.int32), as_bytes([200, 400, 100, 300, 400, 200, 300, 100], torch.int32)
    return known_answer(thousandths, (ids, weights), device)


LIBRARY = Library(
    name="flashinfer",
    module="flashinfer",
    distributions=("flashinfer-python",),
    install="pip install flashinfer-python==0.7.4",
    fits=_unfit,
    probes={INTERLEAVE: _probe_interleave, MXFP8_QUANTIZE: _probe_mxfp8, HASH_TOPK: _probe_hash_topk},
    devices=cuda_from(9, 0),
)
