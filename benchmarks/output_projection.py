"""The output projection of each preset: the rotated input, wo_a in bf16 and in FP8, its result as a pair, and wo_b.

Operands rotate together, as those of `benchmarks.linear`, whose products and torch's stand beside. DeepGEMM's batched products are timed on
the operands as they are. `project_out` has no backends of its own: it runs those of `linear_fp8` or `linear_mxfp8`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw, Together, activations, library_call
from benchmarks.harness import nbytes
from benchmarks.linear import (
    BLOCK,
    GROUP,
    Product,
    beside_pairs,
    blocks,
    codes,
    factors,
    in_rows,
    pair,
    pair_weight,
    picked,
    some_columns,
    some_rows,
    stored,
    uncompiled,
)
from dsv4.fast import quantization, rotary
from dsv4.fast.adapters import deepgemm_linear
from dsv4.rope_tables import rope_frequencies, rope_table
from dsv4.types import Mxfp8Pair, Quantized

PLACES = 4096  # of a table
TURNED = 64  # dims of a head
LAYOUTS = ("rows", "packed", "mn_major")


@dataclass(frozen=True)
class Groups(Together):
    """o [tokens, groups, width] times a weight [groups, rank, width]."""

    def judged(self) -> tuple[Any, ...]:
        """Some tokens, and some blocks of the rank."""
        o, weight, *found = self.args[0]
        columns, of_blocks = some_columns(weight), blocks(weight.shape[1], BLOCK, weight.device)
        return picked(o, self.rows()), picked(weight, columns, 1), *(picked(one, of_blocks, 1) for one in found)

    def part(self, result: Any) -> Any:
        """The same of z; of a pair with its scales in rows."""
        columns = some_columns(self.args[0][1])
        if not isinstance(result, Mxfp8Pair):
            return result[self.rows()][:, :, columns]
        (groups, rank, _), (rows, width) = self.args[0][1].shape, result.codes.shape
        z = result.codes.view(rows, groups, rank)
        scales = in_rows(result.scales, rows, width, GROUP).view(torch.uint8).view(rows, groups, rank // GROUP)
        found = picked(picked(z, self.rows()), columns, 2), picked(picked(scales, self.rows()), columns[::GROUP] // GROUP, 2)
        return Quantized(found[0].flatten(1), found[1].flatten(1).view(torch.float8_e8m0fnu))

    def rows(self) -> Tensor:
        """Tokens that are compared."""
        o = self.args[0][0]
        return some_rows(o if isinstance(o, Tensor) else o.codes)


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """What follows attention in each preset: V4 with wo_a in both forms, V4.1 with bf16 and pairs."""
    for preset, config in PRESETS.items():
        groups, rank, label = config.o_groups, config.o_lora_rank, f"{preset}, {tokens} tokens"
        heads = activations(tokens, config.num_attention_heads * config.head_dim, device).view(tokens, -1, config.head_dim)
        group = config.activation_group
        yield from _rotations(label, heads, groups, group, ("packed",) if config.is_v41 else LAYOUTS, config.compress_rope_theta)
        o = heads.view(tokens, groups, -1)
        yield from _in_bf16(label, o, rank)
        if config.is_v41:
            yield from _as_pairs(label, o, rank)
            yield from _out_pairs(label, tokens, config.hidden_size, groups * rank, device)
        else:
            yield from _in_fp8(label, o, rank)
        yield _out(label, activations(tokens, groups * rank, device).view(tokens, groups, rank), config.hidden_size, group)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens of eight groups as wide, and as many outputs, of a rank of 256."""
    groups, rank, label = 8, 256, f"{rows} tokens, {columns}"
    o = activations(rows, groups * columns, device).view(rows, groups, columns)
    if columns % BLOCK == 0:
        for group in (BLOCK, GROUP):
            yield from _rotations(label, o, groups, group, LAYOUTS, 1e4)
    yield from _in_bf16(label, o, rank)
    yield from _in_fp8(label, o, rank)
    yield from _as_pairs(label, o, rank)
    yield from _out_pairs(label, rows, columns, groups * rank, device)
    for block in (BLOCK, GROUP):
        yield _out(label, activations(rows, groups * rank, device).view(rows, groups, rank), columns, block)


def _rotations(label: str, heads: Tensor, groups: int, group: int, layouts: tuple[str, ...], theta: float) -> Iterator[Case]:
    tokens, count, dim = heads.shape
    table = rope_table(rope_frequencies(theta, TURNED), PLACES).to(heads.device)
    at = torch.arange(tokens, device=heads.device) % PLACES
    read = nbytes(heads, at) + min(tokens, PLACES) * table[0].nbytes

    def apart(first: Tensor) -> Quantized:
        back = rotary.apply_rope(first, table, at, inverse=True)
        return quantization.quantize_fp8(back.view(tokens, groups, -1), group, amax_floor="sglang")

    for layout in layouts:
        options = {"groups": groups, "group": group, "scale_layout": layout}
        words = f"{label}, {count} heads of {dim} in {groups} groups, {group} {layout}"
        raw: Raw = {"apply_rope, then quantize_fp8": apart} if layout == "rows" and heads.is_cuda else {}
        yield Case("output_projection.rotate_quantize", words, (heads, table, at), options, raw, read=read)


def _in_bf16(label: str, o: Tensor, rank: int) -> Iterator[Case]:
    given = o, codes((o.shape[1], rank, o.shape[2]), o.device, torch.bfloat16)
    yield Groups("output_projection.project_groups", f"{_sizes(label, o, rank)}, bf16", (given,), raw=_batched(o, given[1]))


def _in_fp8(label: str, o: Tensor, rank: int) -> Iterator[Case]:
    words, weight = _sizes(label, o, rank), codes((o.shape[1], rank, o.shape[2]), o.device)
    grid = o.shape[1], -(-rank // BLOCK), -(-o.shape[2] // BLOCK)
    if o.shape[2] % BLOCK == 0:
        for form in ("fp32 mn_major", "e8m0"):
            given = quantised(o, form), weight, factors(grid, form, o.device)
            yield Groups("output_projection.project_groups", f"{words}, {form}", (given,), raw=_einsum(given))
    given = o, weight, factors(grid, stored(BLOCK, o.device), o.device)
    yield Groups("output_projection.project_groups", f"{words}, FP8, o in bf16", (given,))


def _as_pairs(label: str, o: Tensor, rank: int) -> Iterator[Case]:
    given = o, codes((o.shape[1], rank, o.shape[2]), o.device, torch.bfloat16)
    for layout in ("packed", "128x4"):
        words = f"{_sizes(label, o, rank)}, bf16, {layout}"
        yield Groups("output_projection.project_groups_pair", words, (given,), {"scale_layout": layout}, _batched(o, given[1]))


def _out(label: str, z: Tensor, hidden: int, block: int) -> Case:
    k = z.shape[1] * z.shape[2]
    given = z, codes((hidden, k), z.device), factors((-(-hidden // block), -(-k // block)), stored(block, z.device), z.device)
    words = f"{label}, {hidden} x {k}, blocks of {block}"
    return Product("output_projection.project_out", words, (given,), {"block": block}, table="linear.linear_fp8")


def _out_pairs(label: str, tokens: int, hidden: int, k: int, device: torch.device) -> Iterator[Case]:
    for layout in ("packed", "128x4"):
        given = pair(activations(tokens, k, device), layout), pair_weight(codes((hidden, k), device), layout)
        words, raw = f"{label}, {hidden} x {k}, {layout}", beside_pairs(given, layout)
        yield Product("output_projection.project_out", words, (given,), raw=raw, table="linear.linear_mxfp8")


def _sizes(label: str, o: Tensor, rank: int) -> str:
    return f"{label}, {o.shape[1]} x {rank} x {o.shape[2]}"


def quantised(o: Tensor, form: str) -> Quantized:
    """o in groups of 128, with e8m0 scales, or with fp32 ones as SM90's products read them."""
    if form == "e8m0":
        return quantization.quantize_fp8(o, BLOCK, amax_floor="sglang", impl=uncompiled(o.device))
    found = quantization.quantize_fp8(o, BLOCK, scale="fp32", amax_floor="sglang", impl=uncompiled(o.device))
    tokens, groups, wide = found.scales.shape
    pitch = -(-tokens // 4) * 4
    memory = torch.zeros(groups, wide, pitch, device=o.device)
    memory[:, :, :tokens] = found.scales.permute(1, 2, 0)
    return Quantized(found.codes, memory.permute(2, 0, 1)[:tokens])


def _einsum(given: tuple[Quantized, Tensor, Tensor]) -> Raw:
    """DeepGEMM's FP8 einsum in the form of SM90, where nothing has to be converted."""
    (o, of_o), weight, _ = given
    if not o.is_cuda or of_o.dtype != torch.float32 or deepgemm_linear.packs(o.device):
        return {}
    out = torch.empty(*o.shape[:2], weight.shape[1], dtype=torch.bfloat16, device=o.device)

    def run(function: Any, first: Any) -> None:
        function(deepgemm_linear.EQUATION, tuple(first[0]), (first[1], first[2]), out, None, (1, BLOCK, BLOCK))

    return library_call(deepgemm_linear.LIBRARY, deepgemm_linear.EINSUM_FP8, o.device, run)


def _batched(o: Tensor, weight: Tensor) -> Raw:
    """The bf16 product of DeepGEMM and of cuBLAS, whose result has the groups outermost."""
    if not o.is_cuda:
        return {}
    out = torch.empty(*o.shape[:2], weight.shape[1], dtype=torch.bfloat16, device=o.device)

    def run(function: Any, first: Any) -> None:
        function(deepgemm_linear.EQUATION, *first, out, None, False)

    raw = library_call(deepgemm_linear.LIBRARY, deepgemm_linear.EINSUM, o.device, run)
    return {**raw, "torch.bmm": lambda first: torch.bmm(first[0].transpose(0, 1), first[1].mT)}


def _indexable(found: Tensor) -> Tensor:
    return found if found.dtype == torch.float32 else found.view(torch.uint8)
