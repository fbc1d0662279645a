"""Sparse attention: one softmax over picked rows of packed pages or of a tensor of bf16, keys and values alike, for up to two lists.

    s_i = (q k_i) scale,  p_i = e^(s_i - m),  o = sum p_i k_i / (sum p_i + e^(sink - m)),  lse = m + ln sum p_i      m = max s_i

A program has one token and up to 64 heads and takes its picks in blocks: first those of the main list, then those of the other. m is that
of the blocks so far, to base 2, and what was summed fades by 2^(m - m') as it grows; p is rounded to bf16 for the product with the rows,
not for its own sum. With splits a program has a run of consecutive blocks, and `merge_kernel` puts the parts together; without, a token's
bits depend on its own inputs alone. Offsets are int64.

On SM90 aligned pages and rows go to `attention_hopper`. Source: spec A 6.1, 6.2, 6.6.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.fast.kernels.attention_rows import as_operand, bf16_rows, packed_rows, pick_slots, word_operand
from dsv4.fast.kernels.codec_bits import has_native_e4m3, rounded
from dsv4.fast.memory import ALIGNED, aligned
from dsv4.formats import KVLayout

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
HOPPER = (9, 0)


@triton.jit
def _blocks_of(token, lengths, width, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr):
    """How many columns of a token's list count, and their blocks."""
    length = width
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(lengths + token), 0), width)
    return length, (length + (BLOCK - 1)) // BLOCK


@triton.jit
def _block(
    q, result, largest, sums, rows, stride, total, slots, column, length, factor,
    PAGE: tl.constexpr, LAYOUT: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The picks of BLOCK columns."""
    slot = pick_slots(slots, column + tl.arange(0, BLOCK), length, total)
    if LAYOUT is None:
        keys = bf16_rows(rows, stride, slot, DIMS, COMPILED)
    else:
        keys = packed_rows(rows, stride, slot, PAGE, LAYOUT, BLOCK, EVEN, NATIVE, COMPILED)
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * factor
    scores = tl.where((slot >= 0)[None, :], scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weight = tl.exp2(scores - base[:, None])
    fade = tl.exp2(largest - base)
    result = tl.dot(as_operand(weight, COMPILED), keys, result * fade[:, None], input_precision="ieee")
    return result, larger, sums * fade + tl.sum(weight, 1)


@triton.jit
def _scan(
    q, result, largest, sums, rows, stride, total, slots, length, first, last, factor,
    PAGE: tl.constexpr, LAYOUT: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks `first` to `last` - 1 of a list. The interpreter's range takes no bounds that are loaded."""
    if COMPILED:
        for block in tl.range(first, last, num_stages=STAGES):
            result, largest, sums = _block(
                q, result, largest, sums, rows, stride, total, slots, block * BLOCK, length, factor,
                PAGE, LAYOUT, DIMS, BLOCK, EVEN, NATIVE, COMPILED,
            )  # fmt: skip
    else:
        while first < last:
            result, largest, sums = _block(
                q, result, largest, sums, rows, stride, total, slots, first * BLOCK, length, factor,
                PAGE, LAYOUT, DIMS, BLOCK, EVEN, NATIVE, COMPILED,
            )  # fmt: skip
            first += 1
    return result, largest, sums


@triton.jit
def _with_sink(sums, largest, sink, head, known):
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return sums + tl.exp2(tl.load(sink + head, mask=known, other=0.0) * LOG2E - base)


@triton.jit(do_not_specialize=["width", "extra_width", "total", "extra_total"])
def attend_kernel(
    q, q_token, q_head, rows, stride, total, slots, slots_token, width, lengths,
    extra_rows, extra_stride, extra_total, extra_slots, extra_token, extra_width, extra_lengths, sink, scale,
    output, out_token, out_head, lse, lse_token, parts, part_split, part_token, part_head, part_lses, lses_split, lses_token,
    HEADS: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr, LAYOUT: tl.constexpr, EXTRA_PAGE: tl.constexpr,
    EXTRA_LAYOUT: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_EXTRA_LENGTHS: tl.constexpr, SINK: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, COMPILED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A token, TILE heads, and all of its picks or a split of them. LAYOUT None: the rows are words of bf16 (int16)."""
    GROUPS: tl.constexpr = (HEADS + TILE - 1) // TILE
    item = tl.program_id(0)
    split = item % SPLITS
    token = (item // (GROUPS * SPLITS)).to(tl.int64)
    head = (item // SPLITS) % GROUPS * TILE + tl.arange(0, TILE)
    known = head < HEADS
    dim = tl.arange(0, DIMS)[None, :]
    bits = tl.load(q + (token * q_token + head[:, None].to(tl.int64) * q_head + dim), mask=known[:, None], other=0)
    queries = word_operand(bits, COMPILED)
    length, blocks = _blocks_of(token, lengths, width, HAS_LENGTHS, BLOCK)
    extra_length, extra_blocks = _blocks_of(token, extra_lengths, extra_width, HAS_EXTRA_LENGTHS, BLOCK)
    each = (blocks + extra_blocks + (SPLITS - 1)) // SPLITS
    first = split * each
    last = tl.minimum(first + each, blocks + extra_blocks)
    result = tl.zeros([TILE, DIMS], tl.float32)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    sums = tl.zeros([TILE], tl.float32)
    result, largest, sums = _scan(
        queries, result, largest, sums, rows, stride, total, slots + token * slots_token, length, first, tl.minimum(last, blocks),
        scale * LOG2E, PAGE, LAYOUT, DIMS, BLOCK, EVEN, NATIVE, COMPILED, STAGES,
    )  # fmt: skip
    result, largest, sums = _scan(
        queries, result, largest, sums, extra_rows, extra_stride, extra_total, extra_slots + token * extra_token, extra_length,
        tl.maximum(first - blocks, 0), last - blocks, scale * LOG2E, EXTRA_PAGE, EXTRA_LAYOUT, DIMS, BLOCK, EVEN, NATIVE, COMPILED, STAGES,
    )  # fmt: skip
    logarithm = tl.where(sums == 0.0, float("-inf"), (largest + tl.log2(sums)) * LN2)
    if SPLITS > 1:
        tl.store(part_lses + (split * lses_split + token * lses_token + head), logarithm, mask=known)
        place = split.to(tl.int64) * part_split + token * part_token + head[:, None].to(tl.int64) * part_head + dim
        tl.store(parts + place, result * tl.where(sums == 0.0, 0.0, 1.0 / sums)[:, None], mask=known[:, None])
    else:
        tl.store(lse + (token * lse_token + head), logarithm, mask=known)
        if SINK:
            sums = _with_sink(sums, largest, sink, head, known)
        inverse = tl.where(logarithm == float("-inf"), 0.0, 1.0 / sums)
        place = token * out_token + head[:, None].to(tl.int64) * out_head + dim
        tl.store(output + place, rounded(result * inverse[:, None], tl.bfloat16, COMPILED), mask=known[:, None])


@triton.jit
def merge_kernel(
    parts, part_split, part_token, part_head, part_lses, lses_split, lses_token, sink, output, out_token, out_head, lse, lse_token,
    HEADS: tl.constexpr, DIMS: tl.constexpr, SINK: tl.constexpr, SPLITS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """A token and a head: its parts, weighted by their shares of the whole sum. An empty part is not read."""
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    dim = tl.arange(0, DIMS)
    largest = tl.full([], float("-inf"), tl.float32)
    for split in range(SPLITS):
        largest = tl.maximum(largest, tl.load(part_lses + (split * lses_split + token * lses_token + head)))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    result = tl.zeros([DIMS], tl.float32)
    sums = tl.zeros([], tl.float32)
    for split in range(SPLITS):
        logarithm = tl.load(part_lses + (split * lses_split + token * lses_token + head))
        weight = tl.exp2((logarithm - base) * LOG2E)
        place = parts + (split * part_split + token * part_token + head * part_head + dim)
        result += weight * tl.load(place, mask=dim < tl.where(logarithm == float("-inf"), 0, DIMS), other=0.0).to(tl.float32)
        sums += weight
    logarithm = tl.where(sums == 0.0, float("-inf"), base + tl.log2(sums) * LN2)
    tl.store(lse + (token * lse_token + head), logarithm)
    if SINK:
        sums += tl.exp2((tl.load(sink + head) - base) * LOG2E)
    result = tl.where(logarithm == float("-inf"), 0.0, result / sums)
    tl.store(output + (token * out_token + head * out_head + dim), rounded(result, tl.bfloat16, COMPILED))


def attend_paged(
    q: Tensor, main_pages: Tensor, main_layout: KVLayout, main_page_size: int, slots: Tensor, lengths: Tensor | None,
    extra_pages: Tensor | None, extra_layout: KVLayout | None, extra_page_size: int | None, extra_slots: Tensor | None,
    extra_lengths: Tensor | None, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor, *, splits: int = 1,
    parts: Tensor | None = None, part_lses: Tensor | None = None,
) -> None:  # fmt: skip
    """Attention over slots of pages into `output` bf16 [tokens, heads, dims] and `lse` fp32 [tokens, heads].

    q bf16 [tokens, heads, dims]; pages uint8 [pages, stride]; slots int [tokens, picks]; lengths int32 [tokens]; sink fp32 [heads]. With
    splits > 1: parts fp32 [splits, tokens, heads, dims] and part_lses fp32 [splits, tokens, heads], to be written.
    """
    main = _paged_list(main_pages, main_layout, main_page_size, slots, lengths)
    extra = None
    if extra_pages is not None and extra_layout is not None and extra_page_size is not None and extra_slots is not None:
        extra = _paged_list(extra_pages, extra_layout, extra_page_size, extra_slots, extra_lengths)
    _attend(q, main, extra, sink, scale, output, lse, splits, parts, part_lses)


def attend_rows(
    q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None, extra_kv: Tensor | None, extra_indices: Tensor | None,
    extra_lengths: Tensor | None, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor, *, splits: int = 1,
    parts: Tensor | None = None, part_lses: Tensor | None = None,
) -> None:  # fmt: skip
    """`attend_paged` of rows: kv bf16 [rows, dims]."""
    extra = None if extra_kv is None or extra_indices is None else _row_list(extra_kv, extra_indices, extra_lengths)
    _attend(q, _row_list(kv, indices, lengths), extra, sink, scale, output, lse, splits, parts, part_lses)


def merge(parts: Tensor, part_lses: Tensor, sink: Tensor | None, output: Tensor, lse: Tensor) -> None:
    """Parts bf16 or fp32 [splits, tokens, heads, dims], of lses fp32 [splits, tokens, heads], as one attention."""
    splits, tokens, heads, dims = parts.shape
    parts, part_lses = (each if each.stride(-1) == 1 else each.contiguous() for each in (parts, part_lses))
    compiled = isinstance(merge_kernel, triton.JITFunction)
    with torch.cuda.device_of(parts):
        merge_kernel[(tokens * heads,)](
            parts, *parts.stride()[:3], part_lses, *part_lses.stride()[:2], part_lses if sink is None else sink.contiguous(), output,
            *output.stride()[:2], lse, lse.stride(0), HEADS=heads, DIMS=dims, SINK=sink is not None, SPLITS=splits, COMPILED=compiled,
            num_warps=4,
        )  # fmt: skip


def _paged_list(pages: Tensor, layout: KVLayout, page_size: int, slots: Tensor, lengths: Tensor | None) -> dict[str, Any]:
    return {"rows": pages, "layout": layout, "page": page_size, "total": pages.shape[0] * page_size, "slots": slots, "lengths": lengths}


def _row_list(rows: Tensor, indices: Tensor, lengths: Tensor | None) -> dict[str, Any]:
    rows = aligned(rows)
    return {"rows": rows, "layout": None, "page": 1, "total": rows.shape[0], "slots": indices, "lengths": lengths}


def _attend(
    q: Tensor, main: dict[str, Any], extra: dict[str, Any] | None, sink: Tensor | None, scale: float, output: Tensor, lse: Tensor,
    splits: int, parts: Tensor | None, part_lses: Tensor | None,
) -> None:  # fmt: skip
    q = aligned(q)
    other = main if extra is None else extra
    integers = torch.promote_types(main["slots"].dtype, other["slots"].dtype)
    arguments: dict[str, Any] = {"q": q, "q_token": q.stride(0), "q_head": q.stride(1), "scale": scale}
    arguments["sink"] = lse if sink is None else sink.contiguous()
    for prefix, one in (("", main), ("extra_", other)):
        slots = one["slots"] if one["slots"].stride(1) == 1 else one["slots"].contiguous()
        arguments |= {
            f"{prefix}slots": slots.to(integers), f"{'extra' if prefix else 'slots'}_token": slots.stride(0),
            f"{prefix}width": 0 if prefix and extra is None else slots.shape[1], f"{prefix}total": one["total"],
            f"{prefix}lengths": slots if one["lengths"] is None else one["lengths"].contiguous(),
        }  # fmt: skip
    split = (output[None], lse[None]) if parts is None or part_lses is None else (parts, part_lses)
    arguments |= {
        "output": output, "out_token": output.stride(0), "out_head": output.stride(1), "lse": lse, "lse_token": lse.stride(0),
        "parts": split[0], "part_split": split[0].stride(0), "part_token": split[0].stride(1), "part_head": split[0].stride(2),
        "part_lses": split[1], "lses_split": split[1].stride(0), "lses_token": split[1].stride(1),
        "HEADS": q.shape[1], "DIMS": q.shape[2], "SINK": sink is not None, "SPLITS": splits,
        "HAS_LENGTHS": main["lengths"] is not None, "HAS_EXTRA_LENGTHS": other["lengths"] is not None,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        (_launch_hopper if _fits_hopper(q, main, other, output) else _launch)(arguments, main, other)
    if splits > 1:
        merge(*split, sink, output, lse)


def _launch(arguments: dict[str, Any], main: dict[str, Any], other: dict[str, Any]) -> None:
    q, heads = arguments["q"], arguments["HEADS"]
    compiled = isinstance(attend_kernel, triton.JITFunction)
    shape = tile_of(q.device, heads)
    groups = triton.cdiv(heads, shape["TILE"])
    rows, others = (one["rows"] if one["layout"] is not None else one["rows"].view(torch.int16) for one in (main, other))
    even = all(one["rows"].data_ptr() % 2 == 0 and one["rows"].stride(0) % 2 == 0 for one in (main, other))
    attend_kernel[(q.shape[0] * groups * arguments["SPLITS"],)](
        **(arguments | {"q": q.view(torch.int16)}), rows=rows, stride=rows.stride(0), extra_rows=others, extra_stride=others.stride(0),
        PAGE=main["page"], LAYOUT=main["layout"], EXTRA_PAGE=other["page"], EXTRA_LAYOUT=other["layout"], EVEN=even,
        NATIVE=has_native_e4m3(attend_kernel, q.device), COMPILED=compiled, **shape,
    )  # fmt: skip


def tile_of(device: torch.device, heads: int) -> dict[str, int]:
    """Heads and keys of a program, for the shared memory of a device: the queries, one block of keys, and a tile of scores."""
    tile = max(16, min(64, triton.next_power_of_2(heads)))
    return {"TILE": min(tile, 32) if _has_little_memory(device) else tile, "BLOCK": 32, "STAGES": 1, "num_warps": 8}


def _has_little_memory(device: torch.device) -> bool:
    """Whether a program has 99 KB of shared memory, not 163 or more."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 6), (8, 9), (12, 0), (12, 1))


@cache
def _hopper() -> Any:
    """The module of kernels for SM90, None where this Triton has no Gluon."""
    try:
        return import_module("dsv4.fast.kernels.attention_hopper")
    except ImportError:
        return None


@cache
def _capability(device: int) -> tuple[tuple[int, int], int]:
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


def _fits_hopper(q: Tensor, main: dict[str, Any], other: dict[str, Any], output: Tensor) -> bool:
    if q.device.type != "cuda" or _capability(q.device.index)[0] != HOPPER or _hopper() is None:
        return False
    if not 64 <= q.shape[2] <= 512 or any(one["layout"] is not None and not hopper_layout(one["layout"]) for one in (main, other)):
        return False
    strides = [each.data_ptr() for each in (q, output)]
    strides += [each.stride(axis) * each.element_size() for each in (q, output) for axis in (0, 1)]
    for one in (main, other):
        strides += [one["rows"].data_ptr(), one["rows"].stride(0) * one["rows"].element_size()]
    return all(stride % ALIGNED == 0 for stride in strides)


def hopper_layout(layout: KVLayout) -> bool:
    """Whether `attention_words` knows a layout: four tiles of 128 dims, of which the last 64 may be bf16."""
    return layout.dims == 512 and layout.dims - layout.quantised in ((0, 64) if layout.numbers == "e4m3" else (0,))


def _words(pages: Tensor) -> Tensor:
    return pages[:, : pages.shape[1] // 4 * 4].view(torch.int32)


def _launch_hopper(arguments: dict[str, Any], main: dict[str, Any], other: dict[str, Any]) -> None:
    hopper, q = _hopper(), arguments["q"]
    items = q.shape[0] * triton.cdiv(arguments["HEADS"], hopper.TILE.value) * arguments["SPLITS"]
    grid = (min(items, _capability(q.device.index)[1]),)
    lists = {"main": main["rows"], "extra": other["rows"]}
    strides = {f"{name}_stride": rows.stride(0) * rows.element_size() // ALIGNED for name, rows in lists.items()}
    units = {name: arguments[name] * q.element_size() // ALIGNED for name in ("q_token", "q_head", "out_token", "out_head")}
    given = {**arguments, "items": items, "main_total": arguments["total"], **strides, **units}
    del given["total"]
    if main["layout"] is None:
        hopper.rows_kernel[grid](**given, main=main["rows"], extra=other["rows"], num_warps=hopper.WARPS)
    else:
        hopper.paged_kernel[grid](
            **given, main=_words(main["rows"]), extra=_words(other["rows"]), main_page=main["page"],
            extra_page=other["page"], LAYOUT=main["layout"], EXTRA_LAYOUT=other["layout"], num_warps=hopper.WARPS,
        )  # fmt: skip
