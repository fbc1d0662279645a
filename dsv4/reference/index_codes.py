"""Index queries and keys as codes, and keys in pages: the first half of `dsv4.reference.indexer`, which has the public names.

Each token has H index queries of d numbers and as many weights; each entry has one index key of d numbers.

    q^ = Q( hadamard( rotate(q) ) )             k^ = Q( hadamard( rotate( norm(x) ) ) )                   (1)
    w' = w c,   c = (d H)^-1/2                                                                            (2)

V4 has the Hadamard transform, and x out of the index compressor; V4.1 has no transform, and x = wk(latent). Rotations are at the token's
position p, and at an entry's first token j r, r the ratio. Q is a quantiser: FP4, E2M1 in groups of 32 with UE8M0 scales, as the official
code; or FP8, E4M3 with one scale a row, as caches of serving engines:

    s = fl32(max(a, 1e-4) / 448),  a the largest magnitude of the row                                     (3)
    w'' = fl32(fl32(w c) s)        the query's scale goes into its weight                                 (4)

Keys lie in pages of P slots, planar. In page s div P, slot i = s mod P:

    codes from byte i D,  four bytes of scale from byte P D + 4 i,  D the bytes of the codes of a key     (5)

D = 128 with FP8 and 64 with FP4 where d = 128. A slot outside 0 .. pages P - 1 is absent: it is not written, and reads as zeros. Of keys
with the same slot the last one is stored.

Roundings: norm, rotation and transform to bf16, one after the other. (2) once to fp32 and, where weights are bf16, from there to bf16; c
is an fp32 number. Codes are codes under `unrounded`. Under `unquantised` the rows of (1) stand in the place of codes, in fp64, with
scales of 1 for keys and None for queries. Source: spec A 5.2, 5.3, 5.6; 10, rows 9, 10 and 16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4 import indexer_checks
from dsv4.formats import INDEX_LAYOUTS, INDEX_SCALE_BYTES, IndexLayout, fp32
from dsv4.indexer_checks import FP8_DIVISION, IndexQuantizer
from dsv4.reference.norms import hadamard as transform
from dsv4.reference.norms import rms_norm
from dsv4.reference.numerics import bf16_dtypes, bf16_step, current_numerics, fp32_step
from dsv4.reference.quantization import quantize_fp8, quantize_mxfp4
from dsv4.reference.rotary import apply_rope
from dsv4.types import IndexFormat, IndexKeys, IndexQueries, Numerics, Ties, ZeroSign

__all__ = ["index_keys", "index_queries", "load_index_keys", "store_index_keys"]


def index_queries(
    q: Tensor,
    weights: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    format: IndexFormat | str = IndexFormat.FP4,
    hadamard: bool = False,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
    weight_dtype: str = "fp32",
) -> IndexQueries:
    """Index queries and their weights, by (1) and (2).

    Args:
        q: [tokens, H, d], bf16: the projection wq_b; d a power of two, from 32 to 128 for fp4, from 2 to 512 for fp8.
        weights: [tokens, H], bf16: the projection weights_proj.
        table: fp32 [positions, rotated], of `rope_table`; rotates the last dims.
        positions: [tokens], int64 or int32. A query whose position the table does not have is zeros.
        format: fp4 or fp8.
        hadamard: transform after the rotation, as V4 does. Keys and queries must agree.
        amax_floor: of the quantiser; None for the official one of the format. fp4: official_fp4, official, flashmla or none; fp8:
            official, sglang, sglang_packer or flashmla.
        ties, zero_sign: of fp4, as in `encode_e2m1`; without effect on fp8.
        weight_dtype: fp32; or bf16 with fp4, the official code's.

    Returns:
        IndexQueries(codes uint8 [tokens, H, d/2], scales int32 [tokens, H], weights): d/32 bytes of UE8M0, the first group lowest, the
        others 0. With fp8 codes e4m3 [tokens, H, d], scales None, and weights fp32 with the query's scale, by (4).

    Raises:
        ArgumentError: wrong dtypes, shapes or options, bf16 weights with fp8.
    """
    quantizer = indexer_checks.index_queries(
        q, weights, table, positions, format, hadamard, amax_floor, ties, zero_sign, weight_dtype, bf16_dtypes()
    )
    heads, dim = q.shape[1:]
    constant = fp32((dim * heads) ** -0.5)
    step = bf16_step if weight_dtype == "bf16" else fp32_step
    scaled = step(lambda w: w * constant, weights)  # [tokens, H]
    rows = _rotated(q, table, positions, hadamard)
    if current_numerics() is Numerics.UNQUANTISED:
        return IndexQueries(rows.double(), None, scaled)
    codes, scales = _quantised(rows, quantizer)
    if quantizer.format is IndexFormat.FP4:
        return IndexQueries(codes, scales, scaled)
    return IndexQueries(codes, None, fp32_step(torch.mul, scaled, scales))


def index_keys(
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    weight: Tensor | None = None,
    eps: float | None = None,
    hadamard: bool = False,
    format: IndexFormat | str = IndexFormat.FP4,
    amax_floor: str | None = None,
    ties: Ties | str = Ties.EVEN,
    zero_sign: ZeroSign | str = ZeroSign.KEPT,
) -> IndexKeys:
    """Index keys of entries, by (1).

    Args:
        x: [entries, d], bf16. V4: pooled entries of the index compressor; V4.1: wk(latent).
        table: fp32 [positions, rotated], of `rope_table`.
        positions: [entries], int64 or int32: of the entry's first token. A key whose position the table does not have is zeros.
        weight: [d], bf16 or fp32: of the norm, with `eps`; both None for rows that are normalised already.
        eps: of the norm, >= 0, an fp32 number.
        hadamard: transform after the rotation, as V4 does.
        format, amax_floor, ties, zero_sign: as in `index_queries`.

    Returns:
        IndexKeys(codes uint8 [entries, d/2], scales int32 [entries]), or (e4m3 [entries, d], fp32 [entries]) with fp8.

    Raises:
        ArgumentError: wrong dtypes, shapes or options, one of weight and eps without the other.
    """
    quantizer = indexer_checks.index_keys(x, table, positions, weight, eps, hadamard, format, amax_floor, ties, zero_sign, bf16_dtypes())
    normed = x if weight is None or eps is None else rms_norm(x, weight, eps=eps)
    rows = _rotated(normed, table, positions, hadamard)
    if current_numerics() is Numerics.UNQUANTISED:
        return IndexKeys(rows.double(), torch.ones_like(rows[:, 0], dtype=torch.float32))
    return IndexKeys(*_quantised(rows, quantizer))


def store_index_keys(keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: IndexFormat | str, page_size: int) -> Tensor:
    """Pages with these keys in their slots, by (5).

    Args:
        keys: of `index_keys`.
        pages: [pages, stride], uint8; stride at least page_size (D + 4), the bytes of a page next to each other.
        slots: [entries], int64 or int32, counted through all pages; absent ones are skipped.
        format: of the keys.
        page_size: slots of a page, P.

    Returns:
        uint8 [pages, stride], a new tensor. Of keys with the same slot the last one is stored; only the bytes of these slots change.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, keys of the other format.
    """
    layout, dim = indexer_checks.store_index_keys(keys, pages, slots, format, page_size)
    records = torch.cat([keys.codes.contiguous().view(torch.uint8), keys.scales.contiguous()[:, None].view(torch.uint8)], 1)
    rows = _last_of_each(slots, pages.shape[0] * page_size)
    return pages.index_put(_places(slots[rows], layout, dim, page_size), records[rows])


def load_index_keys(pages: Tensor, slots: Tensor, *, format: IndexFormat | str, page_size: int, dim: int) -> IndexKeys:
    """The keys in these slots, by (5).

    Args:
        pages: [pages, stride], uint8, as `store_index_keys` takes them.
        slots: [entries], int64 or int32, counted through all pages.
        format: fp4 or fp8.
        page_size: slots of a page, P.
        dim: numbers of a key, d.

    Returns:
        IndexKeys as `index_keys` gives them; codes and scales of absent slots are zero, and nothing is read for them.

    Raises:
        ArgumentError: wrong dtypes, shapes or strides, pages too short, a dim that the format does not have.
    """
    layout = indexer_checks.load_index_keys(pages, slots, format, page_size, dim)
    present = present_slots(slots, pages.shape[0] * page_size)
    stored = pages[_places(slots[present], layout, dim, page_size)]  # [present, D + 4]
    records = pages.new_zeros(len(slots), layout.token_bytes(dim)).masked_scatter(present[:, None], stored)
    parts = records.split([layout.data_bytes(dim), INDEX_SCALE_BYTES], 1)
    codes, scales = (part.clone(memory_format=torch.contiguous_format) for part in parts)  # aligned, also those of one record
    if layout.scale == "fp32":
        return IndexKeys(codes.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0])
    return IndexKeys(codes, scales.view(torch.int32)[:, 0])


def _rotated(x: Tensor, table: Tensor, positions: Tensor, hadamard: bool) -> Tensor:
    rotated = apply_rope(x, table, positions)
    return transform(rotated) if hadamard else rotated


def _quantised(rows: Tensor, quantizer: IndexQuantizer) -> tuple[Tensor, Tensor]:
    """Codes, and a word of scales for each row: int32, or fp32 by (3)."""
    if quantizer.format is IndexFormat.FP8:
        codes, scales = quantize_fp8(rows, rows.shape[-1], scale="fp32", amax_floor=quantizer.floor, division=FP8_DIVISION)
        return codes, scales[..., 0]
    layout = INDEX_LAYOUTS[quantizer.format]
    codes, scales = quantize_mxfp4(rows, layout.group, amax_floor=quantizer.floor, ties=quantizer.ties, zero_sign=quantizer.zero_sign)
    word = pad(scales.view(torch.uint8), (0, INDEX_SCALE_BYTES - scales.shape[-1]))
    return codes, word.view(torch.int32)[..., 0]


def present_slots(slots: Tensor, capacity: int) -> Tensor:
    return (slots >= 0) & (slots.long() < capacity)


def _last_of_each(slots: Tensor, capacity: int) -> Tensor:
    """Rows with a slot that exists and that no later row has: int64 [at most entries]."""
    rows = torch.arange(len(slots), device=slots.device)[present_slots(slots, capacity)]
    distinct, which = slots[rows].unique(return_inverse=True)
    return torch.zeros_like(distinct, dtype=torch.int64).scatter_reduce(0, which, rows, "amax")


def _places(slots: Tensor, layout: IndexLayout, dim: int, page_size: int) -> tuple[Tensor, Tensor]:
    """(5): the pages of slots, int64 [slots, 1], and the bytes of their records in the page, int64 [slots, D + 4]."""
    page, slot = slots.long() // page_size, slots.long() % page_size
    size = layout.data_bytes(dim)
    codes = size * slot[:, None] + torch.arange(size, device=slots.device)
    scales = page_size * size + INDEX_SCALE_BYTES * slot[:, None] + torch.arange(INDEX_SCALE_BYTES, device=slots.device)
    return page[:, None], torch.cat([codes, scales], 1)
