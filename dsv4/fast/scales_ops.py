"""Operators of the scale layouts, their fakes, and their tables of implementations.

Each is one move of words (`dsv4.fast.scale_words`), by Triton on CUDA and by strided copies on the CPU, where torch's own copy is faster
than a compiled gather; libraries have two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsv4.fast import dispatch, ops, scale_words
from dsv4.fast.adapters import deepgemm, flashinfer
from dsv4.fast.dispatch import Implementation, any_arguments, any_device, cuda_from
from dsv4.fast.scale_words import HOPPER_ROWS, TMA_WORDS
from dsv4.formats import TILE_ROWS, WORD_GROUPS, align


def empty_packed(like: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[..., rows, words] with the strides of packed and MN-major scales."""
    *batch, rows, words = shape
    return like.new_empty((*batch, words, align(rows, TMA_WORDS)), dtype=dtype).transpose(-1, -2)[..., :rows, :]


def _words_in(groups: int) -> int:
    return align(groups, WORD_GROUPS) // WORD_GROUPS


def _tiles_in(rows: int) -> int:
    return align(rows, TILE_ROWS) // TILE_ROWS


def _operator(name: str, schema: str, fake: Callable[..., Any], *libraries: Implementation) -> None:
    """Define dsv4::name; its implementations are `scale_words.name` by each way to move words, and what libraries have."""
    body = getattr(scale_words, name)
    by_triton = scale_words.zero_pad_rows_by_triton_ if name == "zero_pad_rows_" else partial(body, scale_words.triton)
    ops.define(name, schema, fake)
    dispatch.register(
        f"scales.{name}",
        Implementation("triton", cuda_from(8, 0), any_arguments, by_triton),
        *libraries,
        Implementation("eager", any_device, any_arguments, partial(body, scale_words.eager)),
        Implementation("inductor", any_device, any_arguments, partial(body, scale_words.compiled)),
    )


_operator(
    "pack_ue8m0",
    "(Tensor scales) -> Tensor",
    lambda scales, impl=None: empty_packed(scales, *scales.shape[:-1], _words_in(scales.shape[-1])),
    Implementation(
        "deepgemm",
        deepgemm.DEVICES,
        deepgemm.whole_columns,
        deepgemm.pack_ue8m0,
        library=deepgemm.LIBRARY,
        symbol=deepgemm.PACK,
        verified=("SM90",),
    ),
)
_operator(
    "unpack_ue8m0",
    "(Tensor packed, SymInt groups) -> Tensor",
    lambda packed, groups, impl=None: packed.new_empty((*packed.shape[:-1], groups), dtype=torch.uint8),
)
_operator(
    "align_mn_major",
    "(Tensor scales) -> Tensor",
    lambda scales, impl=None: empty_packed(scales, *scales.shape, dtype=torch.float32),
    Implementation(
        "deepgemm",
        deepgemm.DEVICES,
        deepgemm.whole_columns,
        deepgemm.align_mn_major,
        library=deepgemm.LIBRARY,
        symbol=deepgemm.ALIGN,
        verified=("SM90",),
    ),
)
_operator(
    "swizzle_128x4",
    "(Tensor scales) -> Tensor",
    lambda scales, impl=None: scales.new_empty(
        (*scales.shape[:-2], _tiles_in(scales.shape[-2]), _words_in(scales.shape[-1]), 32, 4), dtype=torch.int32
    ),
    Implementation(
        "flashinfer",
        cuda_from(9, 0),
        flashinfer.one_batch,
        flashinfer.swizzle_128x4,
        library=flashinfer.LIBRARY,
        symbol=flashinfer.INTERLEAVE,
    ),
)
_operator(
    "unswizzle_128x4",
    "(Tensor swizzled, SymInt rows, SymInt groups) -> Tensor",
    lambda swizzled, rows, groups, impl=None: swizzled.new_empty((*swizzled.shape[:-4], rows, groups), dtype=torch.uint8),
)
_operator(
    "packed_to_128x4",
    "(Tensor packed) -> Tensor",
    lambda packed, impl=None: packed.new_empty((_tiles_in(packed.shape[0]), packed.shape[1], 32, 4)),
)
_operator(
    "packed_from_128x4",
    "(Tensor swizzled, SymInt rows) -> Tensor",
    lambda swizzled, rows, impl=None: empty_packed(swizzled, rows, swizzled.shape[1]),
)
_operator(
    "zero_pad_rows",
    "(Tensor scales, SymInt live_rows, Tensor? live, str scale_layout) -> Tensor",
    lambda scales, live_rows, live, scale_layout, impl=None: (
        empty_packed(scales, *scales.shape) if scale_layout == "packed" else scales.new_empty(scales.shape)
    ),
)
_operator(
    "zero_pad_rows_",
    "(Tensor(a!) scales, SymInt live_rows, Tensor? live, str scale_layout) -> ()",
    lambda scales, live_rows, live, scale_layout, impl=None: None,
)
_operator(
    "restride_rows", "(Tensor packed, SymInt rows) -> Tensor", lambda packed, rows, impl=None: empty_packed(packed, rows, packed.shape[1])
)
_operator("utccp_rows", "(Tensor packed, bool inverse) -> Tensor", lambda packed, inverse, impl=None: empty_packed(packed, *packed.shape))
_operator(
    "interleave_hopper_fp4",
    "(Tensor scales) -> Tensor",
    lambda scales, impl=None: scales.new_empty((scales.shape[0], scales.shape[1] // HOPPER_ROWS, scales.shape[2] // WORD_GROUPS, 16, 16)),
)
_operator(
    "deinterleave_hopper_fp4",
    "(Tensor interleaved) -> Tensor",
    lambda interleaved, impl=None: interleaved.new_empty(
        (interleaved.shape[0], interleaved.shape[1] * HOPPER_ROWS, interleaved.shape[2] * WORD_GROUPS)
    ),
)
