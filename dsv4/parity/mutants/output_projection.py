"""Wrong output projections, several out of public bug reports. Faults of products and quantisers are those of `linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.components.scales import whole_columns
from dsv4.parity.linear_inputs import in_tiles
from dsv4.parity.mutants import Mutant
from dsv4.parity.mutants import linear as of_linear
from dsv4.parity.mutants.linear_producers import Quantiser, another_floor, floored, group_of_128, nearest_scale, rightly
from dsv4.reference import output_projection as right
from dsv4.reference import rotary, scales
from dsv4.reference.codecs import decode_e8m0
from dsv4.reference.linear import quantize_partial
from dsv4.types import Mxfp8Pair, Quantized

BLOCK = 128
Project = Callable[..., Tensor]


def _fp8_form(product: Callable[[Quantized, Tensor, Tensor], Tensor]) -> Project:
    """Another product in the FP8 form; numbers are quantised first."""

    def project(o: Any, weight: Tensor, weight_scales: Tensor | None = None, *, scale: str = "ue8m0", amax_floor: str = "sglang") -> Tensor:
        if weight_scales is None:
            return right.project_groups(o, weight)
        coded = quantize_partial(o, BLOCK, scale=scale, amax_floor=amax_floor) if isinstance(o, Tensor) else o
        return product(coded, weight, weight_scales)

    return project


def _scales_of_o(change: Callable[[Tensor], Tensor]) -> Project:
    return _fp8_form(lambda o, weight, found: right.project_groups(Quantized(o.codes, change(o.scales)), weight, found))


def _scales_of_weight(change: Callable[[Tensor], Tensor]) -> Project:
    return _fp8_form(lambda o, weight, found: right.project_groups(o, weight, change(found)))


def _group_by_group(product: Callable[..., Tensor]) -> Project:
    """The FP8 form by a wrong product of `linear`."""

    def groups(o: Quantized, weight: Tensor, found: Tensor) -> Tensor:
        mine = [Quantized(o.codes[:, g], o.scales[:, g]) for g in range(len(weight))]
        return torch.stack([product(*one) for one in zip(mine, weight, found, strict=True)], 1)

    return _fp8_form(groups)


def _rank_and_group(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    """Rows of the weight ordered by rank, then by group."""
    groups, rank, width = weight.shape
    of_bytes = weight.view(torch.uint8) if weight.element_size() == 1 else weight
    swapped = of_bytes.reshape(rank, groups, width).transpose(0, 1).contiguous().view(weight.dtype)
    return right.project_groups(o, swapped, *scales_, **options)


def _first_group_s_matrix(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    return right.project_groups(o, weight[:1].expand(weight.shape), *scales_, **options)


def _other_scale(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    """A power of two where amax / 448 was asked for."""
    return right.project_groups(o, weight, *scales_, **{**options, "scale": "ue8m0"})


def _official_floor(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    return right.project_groups(o, weight, *scales_, **{**options, "amax_floor": "official"})


def _bf16_sum(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    """The bf16 form in two halves of the width, each rounded."""
    half = weight.shape[2] // 2
    if scales_ or not half:
        return right.project_groups(o, weight, *scales_, **options)
    return right.project_groups(o[..., :half], weight[..., :half]) + right.project_groups(o[..., half:], weight[..., half:])


def _bf16_tail_dropped(o: Any, weight: Tensor, *scales_: Tensor, **options: Any) -> Tensor:
    whole = weight.shape[2] // 8 * 8
    if scales_ or not whole:
        return right.project_groups(o, weight, *scales_, **options)
    return right.project_groups(o[..., :whole], weight[..., :whole])


def _rotated(
    turn: Callable[[Tensor, Tensor, Tensor], Tensor], quantiser: Quantiser = rightly, *, pads: int = 0, heads_last: bool = False
) -> Any:
    """`turn` rotates back."""

    def rotate_quantize(
        o: Tensor,
        table: Tensor,
        positions: Tensor,
        *,
        groups: int,
        group: int = BLOCK,
        scale_layout: str = "rows",
        amax_floor: str = "sglang",
    ) -> Quantized:
        turned = turn(o, table, positions)
        if heads_last:
            turned = turned.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
        codes, found = quantiser(turned.reshape(len(o), groups, -1), group, amax_floor)
        by_group = found.transpose(0, 1)
        if scale_layout == "rows":
            return Quantized(codes, found)
        placed = scales.pack_ue8m0(by_group) if scale_layout == "packed" else scales.align_mn_major(decode_e8m0(by_group))
        if pads:
            whole_columns(placed.view(torch.int32))[..., len(o) :] = pads
        return Quantized(codes, placed.transpose(0, 1))

    return rotate_quantize


def _back(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return rotary.apply_rope(o, table, positions, inverse=True)


def _forward(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return rotary.apply_rope(o, table, positions)


def _first_dims(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    dims = table.shape[1]
    return _back(o.roll(-dims, -1), table, positions).roll(dims, -1)


def _halves(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + R/2)."""
    dims = table.shape[1]
    paired = torch.cat([o[..., :-dims], o[..., -dims:].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)], -1)
    turned = _back(paired, table, positions)
    return torch.cat([turned[..., :-dims], turned[..., -dims:].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)], -1)


def _absent_kept(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    absent = ((positions < 0) | (positions >= len(table))).view(-1, 1, 1)
    return torch.where(absent, o, _back(o, table, positions))


def _unrounded(o: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """fp32, not rounded to bf16."""
    dims, present = table.shape[1], ((positions >= 0) & (positions < len(table))).view(-1, 1, 1)
    cosines, sines = table[positions.clamp(0, len(table) - 1).long()][:, None].double().chunk(2, -1)
    a, b = o[..., -dims::2].double(), o[..., -dims + 1 :: 2].double()
    turned = torch.stack([a * cosines + b * sines, b * cosines - a * sines], -1).flatten(-2)
    return torch.where(present, torch.cat([o[..., :-dims].double(), turned], -1), 0.0).float()


def _pair_of(quantiser: Quantiser = rightly, project: Project = right.project_groups, *, transposed: bool = False) -> Any:
    """`quantiser` of z, which `project` makes."""

    def project_groups_pair(
        o: Any,
        weight: Tensor,
        *weight_scales: Tensor,
        scale_layout: str = "packed",
        rows: int | None = None,
        pair_floor: str = "flashinfer",
        **options: Any,
    ) -> Mxfp8Pair:
        z = project(o, weight, *weight_scales, **options)
        codes, found = quantiser((z.transpose(1, 2) if transposed else z).flatten(1), 32, pair_floor)
        return _in_rows(codes, found, len(z) if rows is None else rows, scale_layout)

    return project_groups_pair


def _in_rows(codes: Tensor, found: Tensor, rows: int, layout: str) -> Mxfp8Pair:
    parts = [torch.nn.functional.pad(part.view(torch.uint8), (0, 0, 0, rows - len(part))) for part in (codes, found)]
    return Mxfp8Pair(parts[0].view(codes.dtype), scales.pack_ue8m0(parts[1]) if layout == "packed" else scales.swizzle_128x4(parts[1]))


def _unrounded_z(o: Any, weight: Tensor, *weight_scales: Tensor, **options: Any) -> Tensor:
    """z of bf16 numbers in fp32."""
    if weight_scales:
        return right.project_groups(o, weight, *weight_scales, **options)
    return (torch.einsum("tge,gre->tgr", o.double(), weight.double()) + 0.0).float()


def _tokens_of(o: Any) -> int:
    return len(o if isinstance(o, Tensor) else o.codes)


def _dead_rows(what: str) -> Any:
    """Codes, or scales, of rows past the tokens as those of the last token; or strides of as many rows as tokens."""

    def project_groups_pair(o: Any, *args: Any, **options: Any) -> Mxfp8Pair:
        codes, words = right.project_groups_pair(o, *args, **options)
        tokens, bits = _tokens_of(o), codes.view(torch.uint8)
        if what == "codes":
            bits[tokens:] = bits[tokens - 1]
        elif words.dim() == 2 and what == "scales":
            words[tokens:] = words[tokens - 1]
        elif words.dim() == 2 and what == "strides":
            narrow = right.project_groups_pair(o, *args, **{**options, "rows": None}).scales
            words = torch.nn.functional.pad(whole_columns(narrow), (0, words.shape[0] - tokens)).t()[: words.shape[0]]
        elif words.dim() == 4 and what == "tile":
            live = in_tiles(torch.zeros(tokens, words.shape[1], dtype=torch.int32, device=words.device))
            words[: len(live)] = torch.where(live == -1, 0x7F7F7F7F, words[: len(live)])
        return Mxfp8Pair(codes, words)

    return project_groups_pair


def _single_tile(o: Any, *args: Any, **options: Any) -> Mxfp8Pair:
    codes, words = right.project_groups_pair(o, *args, **options)
    if words.dim() == 4 and len(words) > 1:
        words = torch.where(torch.arange(len(words), device=words.device).view(-1, 1, 1, 1) == 0, words, 0)
    return Mxfp8Pair(codes, words)


def _out_with(product: Callable[..., Tensor]) -> Any:
    """wo_b by a wrong product of `linear`."""

    def project_out(z: Any, weight: Any, weight_scales: Tensor | None = None, *, block: int = BLOCK) -> Tensor:
        if weight_scales is None:
            return right.project_out(z, weight)
        flat = z.flatten(1) if isinstance(z, Tensor) else Quantized(z.codes.flatten(1), z.scales.flatten(1))
        return product(flat, weight, weight_scales, block=block)

    return project_out


def _pairs_with(product: Callable[..., Tensor]) -> Any:
    def project_out(z: Any, weight: Any, *args: Any, **options: Any) -> Tensor:
        return product(z, weight) if isinstance(z, Mxfp8Pair) else right.project_out(z, weight, *args, **options)

    return project_out


def _rank_first(z: Any, weight: Any, *args: Any, **options: Any) -> Tensor:
    """z flattened with the groups innermost."""
    if isinstance(z, Tensor) and z.dim() == 3:
        z = z.transpose(1, 2).flatten(1)
    return right.project_out(z, weight, *args, **options)


def _groups_reversed(z: Any, weight: Any, *args: Any, **options: Any) -> Tensor:
    if isinstance(z, Tensor) and z.dim() == 3:
        z = z.flip(1)
    elif isinstance(z, Quantized) and z.codes.dim() == 3:
        z = Quantized(*(of_linear.rolled(part, 1, 1) for part in z))
    return right.project_out(z, weight, *args, **options)


def _two_ranks(z: Tensor | Quantized, weight: Tensor, weight_scales: Tensor, *, block: int = BLOCK) -> Tensor:
    """Parts of two ranks, each rounded to bf16 before they are added."""
    blocks = weight_scales.shape[1] // 2
    if not blocks:
        return right.project_out(z, weight, weight_scales, block=block)
    coded, k = quantize_partial(z, block) if isinstance(z, Tensor) else z, blocks * block
    parts = []
    for codes, groups in ((slice(None, k), slice(None, blocks)), (slice(k, None), slice(blocks, None))):
        mine = Quantized(coded.codes[:, codes], coded.scales[:, groups])
        parts.append(right.project_out(mine, weight[:, codes], weight_scales[:, groups], block=block))
    return parts[0] + parts[1]


def _mutant(number: int, function: str, call: Any, fault: str, source: str = "") -> Mutant:
    return Mutant(f"output-{number:02}", "output_projection", function, call, fault, source)


def _borrowed(number: int, function: str, wrap: Callable[[Callable[..., Tensor]], Any], which: int) -> Mutant:
    """A fault of `linear`."""
    found = next(mutant for mutant in of_linear.MUTANTS if mutant.id == f"linear-{which:02}")
    return _mutant(number, function, wrap(found.call), found.fault, found.source)


MUTANTS = (
    _mutant(1, "project_groups", _rank_and_group, "rank and group of the weight transposed"),
    _mutant(2, "project_groups", _first_group_s_matrix, "the first group's matrix for all"),
    _mutant(3, "project_groups", _scales_of_o(lambda found: of_linear.rolled(found, -1, 2)), "each scale that of the next 128"),
    _mutant(4, "project_groups", _scales_of_o(lambda found: of_linear.rolled(found, 1, 1)), "scales of the next group of heads"),
    _mutant(5, "project_groups", _scales_of_weight(lambda found: of_linear.rolled(found, 1, 1)), "weight scales off by one row of blocks"),
    _mutant(6, "project_groups", _scales_of_o(of_linear.truncated), "fp32 scale of o cut to a power of two", "LN-01"),
    _mutant(7, "project_groups", _scales_of_weight(of_linear.truncated), "fp32 weight scale cut to a power of two", "LN-01"),
    _mutant(8, "project_groups", _other_scale, "a power of two for amax / 448"),
    _mutant(9, "project_groups", _official_floor, "floor 1e-4 for 1e-10", "spec A 10 #8"),
    _borrowed(10, "project_groups", _group_by_group, 3),
    _borrowed(11, "project_groups", _group_by_group, 8),
    _mutant(12, "project_groups", of_linear.zero_for_some(right.project_groups), "zeros for some numbers of tokens", "LN-05"),
    _mutant(13, "project_groups", _bf16_sum, "the bf16 form in two parts, each rounded"),
    _mutant(14, "project_groups", _bf16_tail_dropped, "the bf16 form without what is left of eight"),
    _mutant(21, "rotate_quantize", _rotated(_forward), "rotated forward"),
    _mutant(22, "rotate_quantize", _rotated(_first_dims), "the first dims rotated for the last"),
    _mutant(23, "rotate_quantize", _rotated(_halves), "pairs (i, i + R/2) for (2i, 2i + 1)"),
    _mutant(24, "rotate_quantize", _rotated(_unrounded), "quantised before it is rounded to bf16"),
    _mutant(25, "rotate_quantize", _rotated(_absent_kept), "rows of absent positions as they were"),
    _mutant(26, "rotate_quantize", _rotated(_back, group_of_128), "groups of 128 for 32"),
    _mutant(27, "rotate_quantize", _rotated(_back, floored), "scales rounded down", "QT-07"),
    _mutant(28, "rotate_quantize", _rotated(_back, another_floor), "the floor on the scale for another", "spec A 10 #8"),
    _mutant(29, "rotate_quantize", _rotated(_back, pads=-1), "pads not zero", "LN-06"),
    _mutant(30, "rotate_quantize", _rotated(_back, heads_last=True), "heads dealt to the groups one by one"),
    _mutant(41, "project_groups_pair", _pair_of(project=_unrounded_z), "quantised before it is rounded to bf16", "spec A 7.3"),
    _mutant(42, "project_groups_pair", _pair_of(floored), "scales rounded down", "QT-07"),
    _mutant(43, "project_groups_pair", _pair_of(nearest_scale), "scales rounded to nearest", "QT-07"),
    _mutant(44, "project_groups_pair", _pair_of(group_of_128), "groups of 128 for 32"),
    _mutant(45, "project_groups_pair", _pair_of(another_floor), "the floor on the scale for none", "spec A 10 #8"),
    _mutant(46, "project_groups_pair", _pair_of(transposed=True), "rank and group of z transposed"),
    _mutant(47, "project_groups_pair", _dead_rows("codes"), "codes of rows past the tokens not zero", "LN-06"),
    _mutant(48, "project_groups_pair", _dead_rows("scales"), "words of rows past the tokens not zero", "LN-06"),
    _mutant(49, "project_groups_pair", _dead_rows("strides"), "columns aligned for the tokens, not for the rows", "spec A 7.3"),
    _mutant(50, "project_groups_pair", _dead_rows("tile"), "rows of a tile past the tokens not zero", "LN-06"),
    _mutant(51, "project_groups_pair", _single_tile, "the first tile alone is written", "LN-06"),
    _mutant(61, "project_out", _rank_first, "z flattened with its groups innermost"),
    _mutant(62, "project_out", _groups_reversed, "groups of z in another order"),
    _mutant(63, "project_out", _out_with(_two_ranks), "parts of two ranks rounded before they are added", "spec A 7.1"),
    *(_borrowed(number, "project_out", _out_with, which) for number, which in ((64, 1), (65, 2), (66, 3), (67, 4), (68, 7), (69, 9))),
    *(_borrowed(number, "project_out", _pairs_with, which) for number, which in ((70, 19), (71, 21), (72, 25))),
)
