"""DeepGEMM's logits of an index: which function a version has, what a device's kernels take, and proofs.

`fp8_mqa_logits` of 0.1.x gives a column for each key, `fp8_fp4_mqa_logits` of 0.2.x the keys of a query's own range from column 0 on.
Neither promises anything outside of a range. A NaN code counts as 0, for a maximum with 0 drops it, but a NaN weight or scale shows: rows
that hold one get one. In pages NaN codes stand beside NaN scales, as keys are stored. Rows of logits are whole kilobytes apart.
FP4 is of SM100 and newer, weights and logits of bf16 are of SM10x alone. Source: spec A 5.7; kernels A.2, A.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from math import nan
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn.functional import pad

from dsv4.fast.adapters.deepgemm import DEVICES, LIBRARY
from dsv4.fast.adapters.library import as_bytes, known_answer
from dsv4.fast.dispatch import describe

__all__ = ["DEVICES", "LIBRARY", "MQA", "PAGED_MQA", "mqa_fits", "mqa_logits", "paged_mqa_fits", "paged_mqa_logits", "pitch"]

MQA = "fp8_fp4_mqa_logits"
MQA_FP4 = "fp8_fp4_mqa_logits fp4"
MQA_FULL = "fp8_mqa_logits"
PAGED_MQA = "fp8_fp4_paged_mqa_logits"
PAGED_MQA_FULL = "fp8_paged_mqa_logits"
PAGED_METADATA = "get_paged_mqa_logits_metadata"
MQA_HEADS = {9: (32, 64), 10: (8, 16, 32, 64), 12: (8, 16, 32, 64)}  # by the major number of the capability
MQA_DIMS = {9: (32, 64, 128), 10: (32, 64, 128), 12: (128,)}
PAGE = 64
PITCH = 256  # logits: a kilobyte of fp32, half of one of bf16; and the keys of a block


def pitch(entries: Any) -> Any:
    """Distance of two rows of logits, in numbers of either dtype: what 0.1.x allocates for so many keys, and fp32, on SM90 and SM10x."""
    return (entries + 2 * PITCH - 1) // PITCH * PITCH


def generation(device: torch.device) -> int:
    """The major number of a device's capability; 0 if it has none."""
    return describe(device).capability[0]


def keeps_columns() -> bool:
    """Whether logits come with a column for each key, as in 0.1.x."""
    return _takes(MQA, "clean_logits")


def _takes(symbol: str, argument: str) -> bool:
    return argument in signature(LIBRARY.function(symbol)).parameters


def mqa_fits(arguments: Mapping[str, Any]) -> str | None:
    """Heads (fewer are filled up with weights of zero), dims and dtypes that a device has, from the arguments of `index_logits`."""
    q, fp4, narrow = arguments["q"], arguments["q_scales"] is not None, arguments["precision"] == "bf16"
    heads, dim, major = q.shape[1], q.shape[2] * (2 if fp4 else 1), generation(q.device)
    if major not in MQA_HEADS or heads > MQA_HEADS[major][-1] or dim not in MQA_DIMS[major]:
        return f"takes at most 64 heads of 32, 64 or 128 numbers (128 on SM12x); got {heads} of {dim}"
    if fp4 and major == 9:
        return "has no FP4 logits on SM90"
    if fp4 and LIBRARY.missing() is None and (wrong := LIBRARY.disproved(MQA_FP4, q.device)) is not None:
        return wrong
    if major == 10 and LIBRARY.missing() is None and not keeps_columns():
        return None if narrow else "has logits of bf16 alone on SM10x from 0.2 on: precision must be bf16"
    return None if major == 10 or not narrow else "has logits of bf16 on SM10x alone"


def mqa_logits(
    q: Tensor, q_scales: Tensor | None, weights: Tensor, k: Tensor, k_scales: Tensor, starts: Tensor | None, ends: Tensor, *, narrow: bool
) -> Tensor:
    """Logits [tokens, keys], fp32 or, `narrow`, bf16, anything where a token does not see, in rows `pitch` apart.

    Args:
        q: uint8 codes [tokens, heads, bytes]. k: uint8 codes [keys, bytes]. Neither is empty.
        q_scales: int32 [tokens, heads] of FP4; None for E4M3.
        weights: fp32 or bf16 [tokens, heads]; the kernel takes bf16 for bf16 logits and fp32 otherwise.
        k_scales: int32 [keys] of FP4, fp32 [keys] of E4M3.
        starts, ends: int32 or int64 [tokens]; anything.
    """
    n = len(k)
    past = ends.clamp(0, n).int()
    first = torch.zeros_like(past) if starts is None else starts.clamp(0, n).int()
    past = torch.maximum(first, past)  # a range that ends before it begins makes the kernel's count of blocks wrap
    q, q_scales, weights = _whole_heads(q, q_scales, weights)
    weights = _aligned(weights.bfloat16() if narrow else weights.float())
    codes, keys = _codes(q, q_scales is not None), (_codes(k, q_scales is not None), _aligned(k_scales))
    if q_scales is None:
        weights, keys = _marked(codes, weights), (keys[0], _marked(*keys))
    if keeps_columns():
        options: dict[str, Any] = {"clean_logits": False, "max_seqlen_k": 0}
        if q_scales is None and not narrow:
            return _pitched(LIBRARY.function(MQA_FULL)(codes, keys, weights, first, past, **options), n)
        options["logits_dtype"] = torch.bfloat16 if narrow else torch.float32
        return _pitched(LIBRARY.function(MQA)((codes, q_scales), keys, weights, first, past, **options), n)
    rows = LIBRARY.function(MQA)((codes, q_scales), keys, weights, first, past, max_seqlen_k=pitch(n))
    if starts is None:
        return _pitched(rows[:, :n], n)
    columns = (torch.arange(n, device=q.device) - first[:, None]).clamp_(min=0)
    return _pitched(rows.gather(1, columns), n)


def paged_mqa_fits(arguments: Mapping[str, Any]) -> str | None:
    """E4M3 in pages of 64 that begin at multiples of 16 bytes, on SM90, from the arguments of `paged_index_logits`."""
    q, pages = arguments["q"], arguments["pages"]
    if arguments["q_scales"] is not None or arguments["precision"] == "bf16" or arguments["page_size"] != PAGE:
        return f"takes FP8 keys in pages of {PAGE}, and gives fp32 logits"
    if q.shape[1] > MQA_HEADS[9][-1] or q.shape[2] not in MQA_DIMS[9]:
        return f"takes at most 64 heads of 32, 64 or 128 numbers; got {q.shape[1]} of {q.shape[2]}"
    if not pages.shape[0] or not arguments["block_table"].numel() or pages.stride(0) % 16 or pages.data_ptr() % 16:
        return "takes pages, one or more, that begin at multiples of 16 bytes, and a block table that is not empty"
    return None


def paged_mqa_logits(
    q: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, requests: Tensor, ends: Tensor, page_size: int, width: int
) -> Tensor:
    """Logits [tokens, width], fp32, of each token's own request, anything where it does not see, in rows `pitch` apart.

    The kernel believes its block table: pages that are not there become page 0. A token that sees nothing sees one entry here, since a
    batch of nothing at all has let the kernel's schedule read beyond its end.
    """
    rows = requests.clamp(0, len(block_table) - 1).long()
    table = block_table.index_select(0, rows).int()
    table = torch.where((table >= 0) & (table < len(pages)), table, 0)
    seen = ends.clamp(1, max(min(width, table.shape[1] * page_size), 1)).int()[:, None].contiguous()
    q, _, weights = _whole_heads(q, None, weights)
    weights = _aligned(weights.float())
    cache = pages.as_strided((len(pages), page_size, 1, q.shape[2] + 4), (pages.stride(0), q.shape[2] + 4, q.shape[2] + 4, 1))
    plan = LIBRARY.function(PAGED_METADATA)(seen, page_size, LIBRARY.function("get_num_sms")())
    codes = _codes(q, False)[:, None]
    if _takes(PAGED_MQA, "clean_logits"):
        call, options = LIBRARY.function(PAGED_MQA_FULL), {"clean_logits": False}
        rows_of = call(codes, cache, weights, seen, table, plan, pitch(width), **options)
    else:
        rows_of = LIBRARY.function(PAGED_MQA)((codes, None), cache, weights, seen, table, plan, pitch(width))
    return _pitched(rows_of[:, :width], width)


def _whole_heads(q: Tensor, q_scales: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """As many heads as the kernel takes: codes, scales and weights of zero behind those there are."""
    allowed = MQA_HEADS.get(generation(q.device), MQA_HEADS[9])
    missing = next(count for count in allowed if count >= q.shape[1]) - q.shape[1]
    if not missing:
        return q, q_scales, weights
    return pad(q, (0, 0, 0, missing)), None if q_scales is None else pad(q_scales, (0, missing)), pad(weights, (0, missing))


def _marked(codes: Tensor, factors: Tensor) -> Tensor:
    """Factors of rows of E4M3 codes, NaN where a row has a NaN."""
    bytes_of = codes.view(torch.uint8)
    if factors.is_cuda and factors.dtype == torch.float32:
        marked: Tensor = import_module("dsv4.fast.kernels.index_clean").mark_nan(bytes_of, factors)
        return marked
    return factors.masked_fill(((bytes_of & 0x7F) == 0x7F).any(-1), nan)


def _codes(codes: Tensor, fp4: bool) -> Tensor:
    return _aligned(codes).view(torch.int8 if fp4 else torch.float8_e4m3fn)


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on."""
    plain = tensor.contiguous()
    return plain.clone() if plain.data_ptr() % 16 else plain


def _pitched(result: Any, n: int) -> Tensor:
    """The library's logits as a torch tensor with the strides that are promised: a copy where it lays them out in another way."""
    logits: Tensor = result if isinstance(result, Tensor) else torch.utils.dlpack.from_dlpack(result)
    wanted = (pitch(n), 1) if logits.is_cuda else (n, 1)
    if logits.stride() == wanted:
        return logits
    return logits.new_empty_strided(logits.shape, wanted).copy_(logits)


# Query (t, h) is 2^t at dim h, key j is j mod 4 - 1 at dims 0 and 1 and its scale 2^(j mod 2), weights are 1, 2 and then 0: all is exact.
def _mqa_case(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, bytes]:
    tokens, heads, keys, dim = 3, 64, 260, 128
    q, k = torch.zeros(tokens, heads, dim), torch.zeros(keys, dim)
    for head in range(heads):
        q[:, head, head] = torch.tensor([1.0, 2.0, 4.0])
    numbers = torch.arange(keys) % 4 - 1.0
    k[:, 0], k[:, 1] = numbers, -numbers
    scales = torch.tensor([1.0, 2.0]).repeat(keys // 2)
    weights = torch.zeros(tokens, heads)
    weights[:, 0], weights[:, 1] = 1.0, 2.0
    expected = torch.tensor([[1.0], [2.0], [4.0]]) * (scales * torch.where(numbers < 0, -2 * numbers, numbers))
    want = as_bytes(expected.flatten().tolist(), torch.float32)
    of_queries, of_keys = (part.to(torch.float8_e4m3fn).view(torch.uint8).to(device) for part in (q, k))
    return of_queries, of_keys, scales.to(device), weights.to(device), want


def _probe_mqa(device: torch.device) -> str | None:
    q, k, scales, weights, want = _mqa_case(device)
    ends = torch.full((3,), len(k), dtype=torch.int32, device=device)
    narrow = generation(device) == 10 and not keeps_columns()
    return known_answer(lambda: (mqa_logits(q, None, weights, k, scales, None, ends, narrow=narrow).float(),), (want,), device)


def _probe_mqa_fp4(device: torch.device) -> str | None:
    # the same numbers in E2M1: 2^t is code 2 with scale 2^t, -1 to 2 are codes 10, 0, 2 and 4
    tokens, heads, keys = 3, 64, 260
    q, k = torch.zeros(tokens, heads, 64, dtype=torch.uint8), torch.zeros(keys, 64, dtype=torch.uint8)
    for head in range(heads):
        q[:, head, head // 2] = 2 << (4 * (head % 2))
    positive, negative = torch.tensor([10, 0, 2, 4]), torch.tensor([2, 0, 10, 12])
    k[:, 0] = (positive | (negative << 4)).repeat(keys // 4).to(torch.uint8)
    powers = torch.tensor([127, 128, 129])[:, None].expand(tokens, heads)
    of_keys = torch.tensor([127, 128]).repeat(keys // 2)
    words = [(byte * 0x01010101).to(torch.int32).contiguous().to(device) for byte in (powers, of_keys)]
    _, _, _, weights, want = _mqa_case(device)
    ends = torch.full((tokens,), keys, dtype=torch.int32, device=device)
    narrow = generation(device) == 10 and not keeps_columns()
    given = q.to(device), words[0], weights, k.to(device), words[1], None, ends
    return known_answer(lambda: (mqa_logits(*given, narrow=narrow).float(),), (want,), device)


def _probe_paged_mqa(device: torch.device) -> str | None:
    # the 260 keys lie in pages 4, 2, 0, 3 and 1, of requests 1 and 0, of which the second has none; behind them are NaN
    q, k, scales, weights, want = _mqa_case(device)
    pages = torch.full((6, PAGE * 132), 0x7F, dtype=torch.uint8, device=device)
    order = (4, 2, 0, 3, 1)
    for place, page in enumerate(order):
        part = slice(place * PAGE, (place + 1) * PAGE)
        codes, words = k[part], scales[part].contiguous().view(torch.uint8)
        pages[page, : codes.numel()] = codes.flatten()
        pages[page, PAGE * 128 : PAGE * 128 + len(words)] = words
    table = torch.tensor([[-1] * 5, order], dtype=torch.int32, device=device)
    requests = torch.ones(3, dtype=torch.int32, device=device)
    ends = torch.full((3,), len(k), dtype=torch.int32, device=device)
    return known_answer(lambda: (paged_mqa_logits(q, weights, pages, table, requests, ends, PAGE, len(k)),), (want,), device)


LIBRARY.probes |= {MQA: _probe_mqa, MQA_FP4: _probe_mqa_fp4, PAGED_MQA: _probe_paged_mqa}
