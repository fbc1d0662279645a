"""FlashInfer 0.7: the 128x4 interleave, the MXFP8 quantiser of SM100 and newer, the router by token id, RMS norms, the best
entries of an index, and what it has of hyper-connections.

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
RMSNORM = "rmsnorm"
MHC_POST = "mhc.mhc_post"
MHC_PRE = "mhc.mhc_pre_big_fuse"
TOP_K = "top_k_ragged_transform"
MOST_PICKS = 2048  # of `top_k`, by the kernel that may be captured


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


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of bf16 rows [rows, n] with a bf16 weight [n]; fp32 inside, one rounding."""
    result: Tensor = LIBRARY.function(RMSNORM)(x.contiguous(), weight.contiguous(), eps)
    return result


def mhc_post(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`expand` of four streams in fp32, the sublayer's output before the old streams: a row of the benchmark, and no backend.

    `expand` promises the bits of a sum in fp64 whose last term is that output.

    Args:
        y: [tokens, D], bf16.
        streams: [tokens, 4, D], bf16.
        post: [tokens, 4], fp32.
        comb: [tokens, 4, 4], fp32, indexed [old, new].

    Returns:
        bf16 [tokens, 4, D].
    """
    result: Tensor = LIBRARY.function(MHC_POST)(y, streams, post, comb)
    return result


def mhc_pre(
    parts: Tensor, squares: Tensor, streams: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix and collapse of four streams from their statistics in splits: a row of the benchmark, and no backend, for it gives no `pre`.

    Args:
        parts: [splits, tokens, 24], fp32, 2, 4, 8 or 16 splits. squares: [splits, tokens], fp32.
        streams: [tokens, 4, D], bf16.
        scale: [3], fp32. base: [24], fp32.
        norm_eps, eps: above 0.

    Returns:
        post fp32 [tokens, 4, 1], comb fp32 [tokens, 4, 4], collapse bf16 [tokens, D]. The post multiplier is the model's, not its default.
    """
    width = streams.shape[1] * streams.shape[2]
    epsilons = {"rms_eps": norm_eps, "mhc_pre_eps": eps, "mhc_sinkhorn_eps": eps}
    post, comb, y = LIBRARY.function(MHC_PRE)(
        parts, squares, streams, scale, base, width, **epsilons, mhc_post_mult_value=2.0, sinkhorn_repeat=20, num_splits=parts.shape[0]
    )
    return post, comb, y


def top_k(scores: Tensor, lengths: Tensor, starts: Tensor | None, k: int) -> Tensor:
    """The k largest of each row's window, ties to the smaller column, in an order of its own that does not change from run to run.

    It takes NaN for the largest number, -0 for less than 0, and minus infinity for a number.

    Args:
        scores: [rows, n], fp32, last stride 1.
        lengths, starts: int32 [rows], windows within a row; starts None for 0.
        k: at most MOST_PICKS.

    Returns:
        int32 [rows, k]: columns counted from the window's first, -1 for those that a short window lacks.
    """
    options = {"deterministic": True, "tie_break": 1, "dsa_graph_safe": scores.is_cuda and torch.cuda.is_current_stream_capturing()}
    call = LIBRARY.function(TOP_K)
    result: Tensor = call(scores, torch.zeros_like(lengths), lengths, k, **options, row_starts=starts)
    return result


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


def _probe_rmsnorm(device: torch.device) -> str | None:
    # mean squares of 1, 1 and 0, and an eps of 3: the factor is 1/2 where there is anything
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    x[0], x[0, 1::2], x[1, 63] = 1.0, -1.0, 8.0
    weight = torch.tensor([1.0, 2.0, -4.0, 0.5] * 16, dtype=torch.bfloat16, device=device)
    expected = [0.5, -1.0, -2.0, -0.25] * 16 + [0.0] * 63 + [2.0]

    def numbers() -> tuple[Tensor]:
        return (rmsnorm(x.to(device), weight, 3.0).float() + 0.0,)  # the zeros may have signs

    return known_answer(numbers, (as_bytes(expected + [0.0] * 64, torch.float32),), device)


def _probe_mhc_post(device: torch.device) -> str | None:
    # stream i of the second row is i + 1, of the first one 1, -1, 1, ... of it; comb moves each stream on by one and doubles the last
    signs = torch.tensor([1.0, -1.0]).repeat(128)
    streams = torch.arange(1.0, 5.0)[None, :, None] * torch.stack([signs, torch.ones(256)])[:, None]
    comb = torch.zeros(2, 4, 4)
    comb[:, 0, 1] = comb[:, 1, 2] = comb[:, 2, 3] = 1.0
    comb[:, 3, 0] = 2.0
    post = torch.tensor([[0.0, 1.0, 2.0, -1.0], [0.5, 0.0, 0.0, 0.0]])
    y = torch.tensor([[8.0], [16.0]]).expand(2, 256)
    rows = [(8.0, -8.0), (9.0, 7.0), (18.0, 14.0), (-5.0, -11.0), (16.0, 16.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    want = as_bytes([number for row in rows for number in row * 128], torch.bfloat16)
    given = y.to(device, torch.bfloat16), streams.to(device, torch.bfloat16), post.to(device), comb.to(device)
    return known_answer(lambda: (mhc_post(*given),), (want,), device)


def _probe_mhc_pre(device: torch.device) -> str | None:
    # Two splits, whose squares add up to 4 a number: the factor is 1/2. pre is 1, 0, 1 and, where 8 / 2 * 2 meets -8, a half; post is 2, 0,
    # 1, 0; comb is a permutation. Its exponentials and quotients are approximate.
    streams = torch.arange(1.0, 5.0)[None, :, None].expand(1, 4, 256).to(device, torch.bfloat16)
    parts, base = torch.zeros(2, 1, 24), torch.zeros(24)
    parts[0, 0, :8] = torch.tensor([200.0, -200.0, 200.0, 3.0, 300.0, -300.0, 0.0, -300.0])
    parts[1, 0, 3], base[3] = 5.0, -8.0
    parts[1, 0, [9, 14, 19, 20]] = 400.0
    scale, squares = torch.tensor([2.0, 1.0, 1.0], device=device), torch.tensor([[1024.0], [3072.0]], device=device)
    given = parts.to(device), squares, streams, scale, base.to(device)

    def thousandths() -> tuple[Tensor, ...]:
        return tuple((1000 * part.float()).round().to(torch.int32) for part in mhc_pre(*given, 1e-12, 1e-12))

    comb = [1000 if entry in (1, 6, 11, 12) else 0 for entry in range(16)]
    numbers = ([2000, 0, 1000, 0], comb, [6000] * 256)
    return known_answer(thousandths, [as_bytes(part, torch.int32) for part in numbers], device)


def _probe_top_k(device: torch.device) -> str | None:
    # Row r has 4096 distinct scores, and in it window and answer: the 8 largest; 4 of 8 equal ones, the first; all 3 that there are.
    scores = -torch.arange(4096.0).repeat(3, 1)
    scores[0, 100:4000:500] = torch.arange(1.0, 9.0)
    scores[1, 7:4096:512] = 5.0
    scores[1, 4000:4004] = 6.0
    lengths = torch.tensor([4000, 4096, 3], dtype=torch.int32, device=device)
    starts = torch.tensor([96, 0, 1000], dtype=torch.int32, device=device)
    expected = [*range(4, 3904, 500), 7, 519, 1031, 1543, 4000, 4001, 4002, 4003, -1, -1, -1, -1, -1, 0, 1, 2]
    want = as_bytes(expected, torch.int32)
    return known_answer(lambda: (top_k(scores.to(device), lengths, starts, 8).sort(1).values,), (want,), device)


LIBRARY = Library(
    name="flashinfer",
    module="flashinfer",
    distributions=("flashinfer-python",),
    install="pip install flashinfer-python==0.7.4",
    fits=_unfit,
    probes={
        INTERLEAVE: _probe_interleave,
        MXFP8_QUANTIZE: _probe_mxfp8,
        HASH_TOPK: _probe_hash_topk,
        RMSNORM: _probe_rmsnorm,
        MHC_POST: _probe_mhc_post,
        MHC_PRE: _probe_mhc_pre,
        TOP_K: _probe_top_k,
    },
    devices=cuda_from(9, 0),
)
