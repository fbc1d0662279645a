"""Wrong index queries, keys and pages of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.formats import INDEX_LAYOUTS, INDEX_SCALE_BYTES, IndexLayout
from dsv4.reference import index_codes as right
from dsv4.reference.norms import hadamard, rms_norm
from dsv4.reference.numerics import numerics
from dsv4.reference.quantization import quantize_fp8
from dsv4.reference.rotary import apply_rope
from dsv4.types import IndexKeys, IndexQueries

Rows = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # x, table, positions, whether there is a transform


def _plain(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A table that rotates nothing, and a position in it."""
    return torch.tensor([[1.0, 0.0]]), torch.zeros(len(rows), dtype=torch.int64)


def queries_through(rows: Rows) -> Callable[..., IndexQueries]:
    """`index_queries` with another way to the rows."""

    def call(q: Tensor, weights: Tensor, table: Tensor, positions: Tensor, *, hadamard: bool = False, **options: Any) -> IndexQueries:
        return right.index_queries(rows(q, table, positions, hadamard), weights, *_plain(q), **options)

    return call


def keys_through(rows: Rows) -> Callable[..., IndexKeys]:
    """`index_keys` with another way from the normed row."""

    def call(
        x: Tensor, table: Tensor, positions: Tensor, *, weight: Tensor | None = None, eps: float | None = None, **options: Any
    ) -> IndexKeys:
        normed = x if weight is None or eps is None else rms_norm(x, weight, eps=eps)
        made = rows(normed, table, positions, options.pop("hadamard", False))
        return right.index_keys(made, *_plain(x), **options)

    return call


def no_transform(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    return apply_rope(x, table, positions)


def transform_first(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    return apply_rope(hadamard(x) if transform else x, table, positions)


def no_rotation(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    return hadamard(x) if transform else x


def inverse_rotation(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    rotated = apply_rope(x, table, positions, inverse=True)
    return hadamard(rotated) if transform else rotated


def first_dims(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    width = table.shape[1]
    rotated = torch.cat([apply_rope(x[..., :width].contiguous(), table, positions), x[..., width:]], -1)
    return hadamard(rotated) if transform else rotated


def one_rounding(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    """No bf16 between rotation and transform."""
    if not transform:
        return apply_rope(x, table, positions)
    with numerics("unrounded"):
        return hadamard(apply_rope(x, table, positions)).float().bfloat16()


def unnormalised_transform(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    """A plain butterfly, without n^-1/2."""
    rotated = apply_rope(x, table, positions)
    return (hadamard(rotated.float()) * rotated.shape[-1] ** 0.5).bfloat16() if transform else rotated


def absent_at_zero(x: Tensor, table: Tensor, positions: Tensor, transform: bool) -> Tensor:
    rotated = apply_rope(x, table, positions.clamp(0, len(table) - 1))
    return hadamard(rotated) if transform else rotated


def queries_with(**changed: Any) -> Callable[..., IndexQueries]:
    """Options ignored."""

    def call(*args: Any, **options: Any) -> IndexQueries:
        return right.index_queries(*args, **{**options, **{name: value for name, value in changed.items() if name in options}})

    return call


def keys_with(**changed: Any) -> Callable[..., IndexKeys]:
    """Options ignored."""

    def call(*args: Any, **options: Any) -> IndexKeys:
        return right.index_keys(*args, **{**options, **{name: value for name, value in changed.items() if name in options}})

    return call


def queries_changed(change: Callable[[IndexQueries, Tensor, Tensor], IndexQueries]) -> Callable[..., IndexQueries]:
    """Other codes, scales or weights: `change` of the right ones, of the rows, and of the weights that were given."""

    def call(q: Tensor, weights: Tensor, table: Tensor, positions: Tensor, **options: Any) -> IndexQueries:
        rows = right._rotated(q, table, positions, options.get("hadamard", False))
        return change(right.index_queries(q, weights, table, positions, **options), rows, weights)

    return call


def _rescaled(made: IndexQueries, factor: float) -> IndexQueries:
    return made._replace(weights=(made.weights.double() * factor).to(made.weights.dtype))


def no_constant(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    return _rescaled(made, float(rows.shape[1] * rows.shape[2]) ** 0.5)


def no_heads_in_constant(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    return _rescaled(made, float(rows.shape[1]) ** 0.5)


def bf16_constant(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    constant = torch.tensor(float(rows.shape[1] * rows.shape[2]) ** -0.5).bfloat16()
    return made if made.scales is None else made._replace(weights=(weights.float() * constant.float()).to(made.weights.dtype))


def scale_not_folded(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    constant = torch.tensor(float(rows.shape[1] * rows.shape[2]) ** -0.5)
    return made if made.scales is not None else made._replace(weights=weights.float() * constant)


def last_group_lowest(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    """Words of scales with the first group in the highest byte."""
    return made if made.scales is None else made._replace(scales=reversed_words(made.scales))


def odd_first(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    return made if made.scales is None else made._replace(codes=made.codes // 16 + made.codes % 16 * 16)


def power_of_two_scale(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    """UE8M0 scales of FP8 rows."""
    if made.scales is not None:
        return made
    codes, scales = quantize_fp8(rows, rows.shape[-1])
    constant = torch.tensor(float(rows.shape[1] * rows.shape[2]) ** -0.5)
    return made._replace(codes=codes, weights=weights.float() * constant * scales[..., 0].float())


def scale_of_the_token(made: IndexQueries, rows: Tensor, weights: Tensor) -> IndexQueries:
    """One scale for all heads of a token."""
    if made.scales is not None:
        return made
    whole = quantize_fp8(rows.amax(1, keepdim=True).expand_as(rows), rows.shape[-1], scale="fp32", division="divide").scales[..., 0]
    constant = torch.tensor(float(rows.shape[1] * rows.shape[2]) ** -0.5)
    return made._replace(weights=weights.float() * constant * whole)


def reversed_words(words: Tensor) -> Tensor:
    """Bytes of each word in the other order."""
    return words[..., None].view(torch.uint8).flip(-1).contiguous().view(torch.int32)[..., 0]


def key_words_reversed(*args: Any, **options: Any) -> IndexKeys:
    made = right.index_keys(*args, **options)
    return made if made.scales.dtype == torch.float32 else made._replace(scales=reversed_words(made.scales))


def norm_last(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> IndexKeys:
    """The norm after the rotation."""
    if options.get("weight") is None:
        return right.index_keys(x, table, positions, **options)
    rotated = apply_rope(x, table, positions)
    normed = rms_norm(rotated, options.pop("weight"), eps=options.pop("eps"))
    return right.index_keys(normed, *_plain(x), **options)


def no_norm(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> IndexKeys:
    return right.index_keys(x, table, positions, **{**options, "weight": None, "eps": None})


def weight_plus_one(x: Tensor, table: Tensor, positions: Tensor, **options: Any) -> IndexKeys:
    weight = options.pop("weight", None)
    return right.index_keys(x, table, positions, weight=None if weight is None else weight + 1, **options)


Places = Callable[[Tensor, IndexLayout, int, int, int], Tensor]


def planar(slots: Tensor, layout: IndexLayout, dim: int, size: int, stride: int) -> Tensor:
    """Where the bytes of records lie, from the first page on: int64 [slots, D + 4]."""
    page, slot, data = slots[:, None] // size, slots[:, None] % size, layout.data_bytes(dim)
    codes = data * slot + torch.arange(data)
    scales = size * data + INDEX_SCALE_BYTES * slot + torch.arange(INDEX_SCALE_BYTES)
    return page * stride + torch.cat([codes, scales], 1)


def interleaved(slots: Tensor, layout: IndexLayout, dim: int, size: int, stride: int) -> Tensor:
    """Each key's scale right behind its codes."""
    width = layout.token_bytes(dim)
    return (slots[:, None] // size) * stride + (slots[:, None] % size) * width + torch.arange(width)


def dense_pages(slots: Tensor, layout: IndexLayout, dim: int, size: int, stride: int) -> Tensor:
    """Pages without what lies between them."""
    return planar(slots, layout, dim, size, size * layout.token_bytes(dim))


def first_page_scales(slots: Tensor, layout: IndexLayout, dim: int, size: int, stride: int) -> Tensor:
    """The scales of every page in the first one."""
    at, data = planar(slots, layout, dim, size, stride), layout.data_bytes(dim)
    return torch.cat([at[:, :data], planar(slots % size, layout, dim, size, stride)[:, data:]], 1)


def scales_of_the_next(slots: Tensor, layout: IndexLayout, dim: int, size: int, stride: int) -> Tensor:
    at, data = planar(slots, layout, dim, size, stride), layout.data_bytes(dim)
    return torch.cat([at[:, :data], at[:, data:] + INDEX_SCALE_BYTES], 1)


def stored(places: Places = planar, keep: Callable[[Tensor, int], Tensor] = right._last_of_each) -> Callable[..., Tensor]:
    """A store to other bytes, or of other rows."""

    def store(keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: str, page_size: int) -> Tensor:
        layout = INDEX_LAYOUTS[format]
        dim = keys.codes.shape[1] * 8 // layout.bits
        records = torch.cat([keys.codes.contiguous().view(torch.uint8), keys.scales.contiguous()[:, None].view(torch.uint8)], 1)
        rows = keep(slots, pages.shape[0] * page_size)
        at = places(slots[rows].long(), layout, dim, page_size, pages.shape[1])
        inside = (at >= 0) & (at < pages.numel())
        flat = pages.reshape(-1).clone()
        flat[at[inside]] = records[rows][inside]
        return flat.view(pages.shape)

    return store


def first_of_each(slots: Tensor, capacity: int) -> Tensor:
    found: dict[int, int] = {}
    for row, slot in enumerate(slots.tolist()):
        if 0 <= slot < capacity:
            found.setdefault(slot, row)
    return torch.tensor(list(found.values()), dtype=torch.int64)


def store_at(slots_of: Callable[[Tensor, int], Tensor]) -> Callable[..., Tensor]:
    """A store to other slots."""

    def store(keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: str, page_size: int) -> Tensor:
        made = slots_of(slots.long(), pages.shape[0] * page_size)
        return right.store_index_keys(keys, pages, made, format=format, page_size=page_size)

    return store


def minus_one_is_the_last(slots: Tensor, capacity: int) -> Tensor:
    return torch.where(slots == -1, capacity - 1, slots)


def clamped(slots: Tensor, capacity: int) -> Tensor:
    return slots.clamp(max=capacity - 1)


def absolute_offset(keys: IndexKeys, pages: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """as_strided with the offset forgotten: the store goes to another layer."""
    made = right.store_index_keys(keys, pages.as_strided(pages.shape, pages.stride(), 0), slots, **options)
    return made if pages.storage_offset() == 0 else pages.clone()


def _near(pages: Tensor, slots: Tensor, page_size: int) -> Tensor:
    """Slots of pages that end below byte 2^31."""
    ends = (slots.long() // page_size) * pages.stride(0) + pages.stride(0)
    return torch.where(ends < 2**31, slots.long(), -1)


def store_int32(keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: str, page_size: int) -> Tensor:
    return right.store_index_keys(keys, pages, _near(pages, slots, page_size), format=format, page_size=page_size)


def load_int32(pages: Tensor, slots: Tensor, *, page_size: int, **options: Any) -> IndexKeys:
    return right.load_index_keys(pages, _near(pages, slots, page_size), page_size=page_size, **options)


def other_slots_cleared(keys: IndexKeys, pages: Tensor, slots: Tensor, *, format: str, page_size: int) -> Tensor:
    """A page that is written at all is written whole."""
    there = (slots >= 0) & (slots.long() < pages.shape[0] * page_size)
    cleared = pages.clone()
    cleared[(slots[there].long() // page_size).unique()] = 0
    return right.store_index_keys(keys, cleared, slots, format=format, page_size=page_size)


def loaded(places: Places = planar, slots_of: Callable[[Tensor, int], Tensor] | None = None) -> Callable[..., IndexKeys]:
    """A load from other bytes, or of other slots."""

    def load(pages: Tensor, slots: Tensor, *, format: str, page_size: int, dim: int) -> IndexKeys:
        layout, capacity = INDEX_LAYOUTS[format], pages.shape[0] * page_size
        wanted = slots.long() if slots_of is None else slots_of(slots.long(), capacity)
        there = (wanted >= 0) & (wanted < capacity)
        at = places(torch.where(there, wanted, 0), layout, dim, page_size, pages.shape[1]).clamp(0, max(pages.numel() - 1, 0))
        records = pages.reshape(-1)[at] * there[:, None]
        codes, scales = (part.contiguous() for part in records.split([layout.data_bytes(dim), INDEX_SCALE_BYTES], 1))
        if format == "fp8":
            return IndexKeys(codes.view(torch.float8_e4m3fn), scales.view(torch.float32)[:, 0])
        return IndexKeys(codes, scales.view(torch.int32)[:, 0])

    return load
