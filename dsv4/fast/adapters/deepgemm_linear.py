"""DeepGEMM's products of linear layers: which form a device has, what it takes, and proofs.

SM90 has one form of `fp8_gemm_nt` and `fp8_einsum`: fp32 scales of any value, one for a row and 128 numbers of x and one for a 128x128
block of the weight. SM10x and SM120 read the exponents of scales alone, as packed words, so they get E8M0 bytes and never fp32 numbers,
whose mantissas they would drop; a block's word is repeated to its rows. Every form reads 16 bytes at a time. Of each function's arguments
only those are passed that 0.1.x and 0.2.x share. Source: spec A 0.5, 7.2, 7.3, 8.1, 8.2; kernels 0b, A.2, A.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import nan
from typing import Any

import torch
from torch import Tensor

from dsv4.fast.adapters.deepgemm import DEVICES, GEMM, GEMM_1D1D, LIBRARY
from dsv4.fast.adapters.library import as_bytes, known_answer
from dsv4.fast.adapters.products import SIZES, Product
from dsv4.fast.dispatch import cuda_exactly, describe
from dsv4.formats import TMA_BYTES, align
from dsv4.host import DEEPGEMM_MXFP8
from dsv4.types import Unsupported

__all__ = [
    "DEVICES", "EINSUM", "EINSUM_FP8", "GEMM", "LIBRARY", "MXFP8", "MXFP8_DEVICES", "einsum_bf16", "einsum_fp8", "gemm", "linear_fp8",
    "mxfp8", "prepare_einsum", "prepare_gemm", "scale_layout", "takes_groups", "takes_linear", "takes_pairs",
]  # fmt: skip

GEMM_BLOCK32 = "fp8_gemm_nt block32"
MXFP8 = "fp8_gemm_nt mxfp8"
EINSUM_FP8 = "fp8_einsum"
EINSUM = "einsum"
EQUATION = "bhr,hdr->bhd"
MXFP8_DEVICES = cuda_exactly(*DEEPGEMM_MXFP8)
PACKED_ON = (10, 12)  # major numbers of the capabilities whose kernels read scales as packed words
BLOCK = 128


def packs(device: torch.device) -> bool:
    """Whether a device's kernels read packed powers of two; others read fp32 scales."""
    return describe(device).capability[0] in PACKED_ON


def scale_layout(device: torch.device) -> str:
    """The layout of a left operand's scales that goes to the kernels of a device as it is."""
    return "packed" if packs(device) else "mn_major"


def linear_fp8(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int, out: Tensor | None = None) -> Tensor:
    """x times the weight transposed, bf16 [tokens, n], in the form of its device; `takes_linear` has passed.

    Args:
        x: uint8 codes [tokens, k]. weight: uint8 codes [n, k].
        x_scales: [tokens, ceil(k/block)] uint8, or fp32 with any strides on SM90; or in the device's `scale_layout`.
        weight_scales: [ceil(n/block), ceil(k/block)], uint8, or fp32 on SM90.
        block: 128, or 32 on SM10x and SM120.
        out: where to write it.
    """
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)
    if not out.numel():
        return out
    if packs(x.device):
        gemm_packed(x, x_scales, weight, weight_scales, block, out)
    else:
        gemm(x, x_scales, weight, weight_scales, out)
    return out


def gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor) -> None:
    """The form of SM90, blocks of 128. MN-major x_scales and contiguous weight_scales in fp32 go as they are, others through one launch."""
    given = (_e4m3(x), _mn_major(x_scales)), (_e4m3(weight), _blocks(weight_scales))
    LIBRARY.function(GEMM)(*given, out, None, None)


def prepare_gemm(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Callable[..., Tensor]:
    """`linear_fp8` on SM90 for operands of this kind: it takes x, weight, weight_scales and x_scales of their own dtypes."""
    function, sizes, device = LIBRARY.function(GEMM), (x.shape[0], weight.shape[0]), x.device
    ready = _lies_mn_major(x_scales) and _lies_in_blocks(weight_scales)

    def run(x: Tensor, weight: Tensor, weight_scales: Tensor, x_scales: Tensor) -> Tensor:
        out = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        if ready:
            function((x, x_scales), (weight, weight_scales), out, None, None)
        else:
            function((x, _mn_major(x_scales)), (weight, _blocks(weight_scales)), out, None, None)
        return out

    return run


def prepare_einsum(o: Tensor, o_scales: Tensor | None, weight: Tensor, weight_scales: Tensor | None) -> Callable[..., Tensor]:
    """`einsum_fp8` on SM90, or `einsum_bf16`, likewise."""
    fp8, sizes, device = weight_scales is not None, (*o.shape[:2], weight.shape[1]), o.device
    function, recipe = LIBRARY.function(EINSUM_FP8 if fp8 else EINSUM), (1, BLOCK, BLOCK)

    def run(o: Tensor, weight: Tensor, weight_scales: Tensor | None = None, o_scales: Tensor | None = None) -> Tensor:
        out = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        if weight_scales is None or o_scales is None:
            function(EQUATION, o, weight, out, None, False)
        else:
            function(EQUATION, (o, _mn_major(o_scales)), (weight, _blocks(weight_scales)), out, None, recipe)
        return out

    return run


def gemm_packed(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int, out: Tensor) -> None:
    """The form of SM10x and SM120. Packed x_scales (int32) go as they are, uint8 ones are packed."""
    words = _words(x_scales), _words_of_rows(weight_scales, weight.shape[0], block)
    LIBRARY.function(GEMM)((_e4m3(x), words[0]), (_e4m3(weight), words[1]), out, None, (1, 1, block))


def mxfp8(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of two pairs of MXFP8, both packed: bf16 [tokens, n]; `takes_pairs` has passed.

    Args:
        codes, weight: uint8 [tokens, k] and [n, k].
        scales, weight_scales: int32 [tokens, k/128] and [n, k/128].
        out: where to write it.
    """
    if out is None:
        out = torch.empty(codes.shape[0], weight.shape[0], dtype=torch.bfloat16, device=codes.device)
    if out.numel():
        LIBRARY.function(GEMM)((_e4m3(codes), scales), (_e4m3(weight), weight_scales), out, None, (1, 1, 32))
    return out


def einsum_fp8(o: Tensor, o_scales: Tensor, weight: Tensor, weight_scales: Tensor, out: Tensor | None = None) -> Tensor:
    """Each group's rows times its weight transposed, in the form of the device: bf16 [tokens, groups, rank]; `takes_groups` has passed.

    Args:
        o: uint8 codes [tokens, groups, width]. weight: uint8 codes [groups, rank, width].
        o_scales: [tokens, groups, ceil(width/128)] uint8, or fp32 with any strides on SM90; or in the device's `scale_layout`.
        weight_scales: [groups, ceil(rank/128), ceil(width/128)], uint8, or fp32 on SM90.
        out: where to write it.
    """
    if out is None:
        out = torch.empty(*o.shape[:2], weight.shape[1], dtype=torch.bfloat16, device=o.device)
    if not out.numel():
        return out
    if packs(o.device):
        scales, recipe = (_words(o_scales), _words_of_rows(weight_scales, weight.shape[1], BLOCK)), (1, 1, BLOCK)
    else:
        scales, recipe = (_mn_major(o_scales), _blocks(weight_scales)), (1, BLOCK, BLOCK)
    LIBRARY.function(EINSUM_FP8)(EQUATION, (_e4m3(o), scales[0]), (_e4m3(weight), scales[1]), out, None, recipe)
    return out


def einsum_bf16(o: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The same of bf16 [tokens, groups, width] and [groups, rank, width], added up in fp32; cuBLASLt, which splits K by M, is kept out."""
    if out is None:
        out = torch.empty(*o.shape[:2], weight.shape[1], dtype=torch.bfloat16, device=o.device)
    if out.numel():
        LIBRARY.function(EINSUM)(EQUATION, o, weight, out, None, False)
    return out


def takes_linear(arguments: Mapping[str, Any]) -> str | None:
    """What keeps `linear_fp8` from the arguments of the operator: x bf16, or codes with x_scales."""
    x, x_scales, weight, block = arguments["x"], arguments["x_scales"], arguments["weight"], arguments["block"]
    n, k = weight.shape
    if not n or not x.shape[0]:
        return None
    if packs(x.device):
        if block not in (32, BLOCK):
            return f"takes blocks of 32 or 128; got {block}"
        if (reason := _whole_words(n, k) or _mantissas(x.device, x_scales, arguments["weight_scales"])) is not None:
            return reason
        if block == 32 and (wrong := _disproved(GEMM_BLOCK32, x.device)) is not None:
            return wrong
    elif block != BLOCK:
        return f"takes blocks of 128 on SM90; got {block}"
    elif k % 16 or n % 8:
        return f"takes k in multiples of 16 and n of 8; got k {k} and n {n}"
    return (None if x_scales is None else _misplaced("x", x)) or _misplaced("weight", weight)


def takes_pairs(arguments: Mapping[str, Any]) -> str | None:
    """What keeps `mxfp8` from the arguments of the operator `linear_mxfp8`: both packed, whole words."""
    n, k = arguments["weight"].shape
    if not n or not arguments["codes"].shape[0]:
        return None
    for name, of in (("scales", "codes"), ("weight_scales", "weight")):
        scales, wanted = arguments[name], (1, align(arguments[of].shape[0], 4))
        if scales.dim() != 2:
            return f"takes packed scales on both sides; got {name} in 128x4"
        if scales.stride() != wanted or scales.data_ptr() % TMA_BYTES:
            return f"takes packed scales with strides {wanted} from a multiple of 16 bytes on; got {name} with {tuple(scales.stride())}"
    return _whole_words(n, k) or _misplaced("codes", arguments["codes"]) or _misplaced("weight", arguments["weight"])


def takes_groups(arguments: Mapping[str, Any]) -> str | None:
    """What keeps `einsum_fp8` or, without weight_scales, `einsum_bf16` from the arguments of the operator `project_groups`."""
    o, o_scales, weight, weight_scales = (arguments[name] for name in ("o", "o_scales", "weight", "weight_scales"))
    groups, rank, width = weight.shape
    if not groups or not rank or not o.shape[0]:
        return None
    if weight_scales is None:
        if width % 64 or rank % 8:
            return f"takes width in multiples of 64 and rank of 8; got width {width} and rank {rank}"
        return _misplaced("o", o) or _misplaced("weight", weight) or _disproved(EINSUM, o.device)
    if packs(o.device):
        if arguments["scale"] == "fp32" and o_scales is None:
            return _drops_mantissas(o.device)
        reason = _whole_words(rank, width) or _mantissas(o.device, o_scales, weight_scales)
    else:
        whole = not width % 16 and not rank % 8
        reason = None if whole else f"takes width in multiples of 16 and rank of 8; got width {width} and rank {rank}"
    return reason or (None if o_scales is None else _misplaced("o", o)) or _misplaced("weight", weight)


def _whole_words(n: int, k: int) -> str | None:
    return f"takes k in multiples of 128 and n of 64 with packed scales; got k {k} and n {n}" if k % 128 or n % 64 else None


def _mantissas(device: torch.device, *scales: Tensor | None) -> str | None:
    fp32 = any(one is not None and one.dtype == torch.float32 for one in scales)
    return _drops_mantissas(device) if fp32 else None


def _drops_mantissas(device: torch.device) -> str:
    return f"takes E8M0 scales on {describe(device)}: of fp32 ones it reads the exponents, and drops the mantissas"


def _misplaced(name: str, tensor: Tensor) -> str | None:
    """Numbers that do not lie as TMA reads them: rows without gaps inside, which begin at multiples of 16 bytes."""
    *steps, last = tensor.stride()
    per_step = TMA_BYTES // tensor.element_size()
    if last == 1 and not any(step % per_step for step in steps) and not tensor.data_ptr() % TMA_BYTES:
        return None
    at = tensor.data_ptr() % TMA_BYTES
    return f"takes {name} whose rows begin at multiples of 16 bytes; got strides {tuple(tensor.stride())}, the first row at {at} mod 16"


def _disproved(symbol: str, device: torch.device) -> str | None:
    """What a proof came to; one that went well costs a look into the library's memory and nothing else."""
    if LIBRARY._proofs.get((symbol, str(describe(device))), "") is None or LIBRARY.missing() is not None:
        return None
    return LIBRARY.disproved(symbol, device)


def _e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn)


def _mn_major(scales: Tensor) -> Tensor:
    """fp32 [rows, groups] or [rows, batch, groups], columns of rows that begin at multiples of 16 bytes: as it is, or by one launch."""
    if _lies_mn_major(scales):
        return scales
    return torch.empty_strided(scales.shape, _columns(scales), dtype=torch.float32, device=scales.device).copy_(_powers(scales))


def _lies_mn_major(scales: Tensor) -> bool:
    return scales.dtype == torch.float32 and scales.stride() == _columns(scales) and not scales.data_ptr() % TMA_BYTES


def _columns(scales: Tensor) -> tuple[int, ...]:
    """Strides of MN-major scales."""
    pitch = align(scales.shape[0], 4)
    return (1, pitch) if scales.dim() == 2 else (1, pitch * scales.shape[2], pitch)


def _powers(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales


def _blocks(scales: Tensor) -> Tensor:
    """fp32, contiguous down to the strides of sizes of 1: as it is, or by one launch."""
    return (
        scales if _lies_in_blocks(scales) else torch.empty(scales.shape, dtype=torch.float32, device=scales.device).copy_(_powers(scales))
    )


def _lies_in_blocks(scales: Tensor) -> bool:
    *_, rows, columns = scales.shape
    return scales.dtype == torch.float32 and scales.stride() == ((columns, 1) if scales.dim() == 2 else (rows * columns, columns, 1))


def _words(scales: Tensor) -> Tensor:
    """Packed words of a left operand: int32 as it is, uint8 [rows, groups] or [rows, batch, groups] packed."""
    if scales.dtype == torch.int32:
        return scales
    _only_bytes(scales)
    packed: Tensor = torch.ops.dsv4.pack_ue8m0(scales if scales.dim() == 2 else scales.transpose(0, 1))
    return packed if scales.dim() == 2 else packed.transpose(0, 1)


def _words_of_rows(scales: Tensor, rows: int, block: int) -> Tensor:
    """Packed words [.., rows, words] of a weight's uint8 scales [.., ceil(rows/block), groups], each block's for all its rows."""
    _only_bytes(scales)
    words: Tensor = torch.ops.dsv4.pack_ue8m0(scales)
    *batch, _, columns = words.shape
    laid = torch.empty((*batch, columns, align(rows, 4)), dtype=torch.int32, device=scales.device).transpose(-1, -2)[..., :rows, :]
    whole = rows // block
    if whole:
        laid[..., : whole * block, :].unflatten(-2, (whole, block)).copy_(words[..., :whole, None, :])
    if rows % block:
        laid[..., whole * block :, :].copy_(words[..., whole:, :])
    return laid


def _only_bytes(scales: Tensor) -> None:
    if scales.dtype != torch.uint8:
        raise Unsupported("scales", str(scales.dtype).removeprefix("torch."), _drops_mantissas(scales.device))


def _prove(product: Product, device: torch.device, call: Callable[[int, Tensor], Tensor], *, scaled: bool = True) -> str | None:
    """`call` for so many rows, into memory that holds NaN."""
    batches, columns = product.weight.shape[:2]

    def results() -> list[Tensor]:
        return [call(m, torch.full((m, batches, columns), nan, dtype=torch.bfloat16, device=device)) for m in SIZES]

    return known_answer(results, product.answers(scaled=scaled), device)


def _scales_of(product: Product, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes where they are packed, else numbers with mantissas."""
    return product.scale_bytes(device) if packs(device) else (product.x_scales.to(device), product.weight_scales.to(device))


def _probe_gemm(device: torch.device, block: int = BLOCK) -> str | None:
    packed = packs(device)
    if block != BLOCK and not packed:
        return "is of SM10x and SM120"
    product = Product.of(8 * block if packed else 256, block, block, mantissas=not packed)
    (x, weight), (scales, by_block) = product.codes(device), _scales_of(product, device)

    def call(m: int, out: Tensor) -> Tensor:
        return linear_fp8(x[0, :m], scales[0, :m], weight[0], by_block[0], block, out[:, 0])

    return _prove(product, device, call)


def _probe_block32(device: torch.device) -> str | None:
    return _probe_gemm(device, 32)


def _probe_mxfp8(device: torch.device) -> str | None:
    if not packs(device):
        return "is of SM10x and SM120"
    product = Product.of(256, 32, 1)
    (x, weight), (scales, by_row) = product.codes(device), product.scale_bytes(device)

    def call(m: int, out: Tensor) -> Tensor:
        return mxfp8(x[0, :m], _words(scales[0, :m]), weight[0], _words(by_row[0]), out[:, 0])

    return _prove(product, device, call)


def _probe_einsum_fp8(device: torch.device) -> str | None:
    packed = packs(device)
    product = Product.of(8 * BLOCK if packed else 256, BLOCK, BLOCK, batches=3, mantissas=not packed)
    (x, weight), (scales, by_block) = product.codes(device), _scales_of(product, device)
    o, o_scales = (part.transpose(0, 1).contiguous() for part in (x, scales))
    return _prove(product, device, lambda m, out: einsum_fp8(o[:m], o_scales[:m], weight, by_block, out))


def _probe_einsum(device: torch.device) -> str | None:
    product = Product.of(256, BLOCK, BLOCK, batches=3)
    o, weight = (part.to(device, torch.bfloat16) for part in (product.x.transpose(0, 1).contiguous(), product.weight))
    return _prove(product, device, lambda m, out: einsum_bf16(o[:m], weight, out), scaled=False)


LATTICE = (1.0, 2.0, -1.0, 0.5, 0.0, -2.0, 3.0, -0.5)  # 128 of it in a row add up to 48
# Rows m mod 4 and columns n mod 2: 48 in each of 32 groups, times 2^(m mod 4), halved in every odd group and odd column.
LARGE_PRODUCT = ((1152.0, 576.0), (2304.0, 1152.0), (4608.0, 2304.0), (9216.0, 4608.0))


def _probe_gemm_1d1d(device: torch.device) -> str | None:
    """A scale for each row on both sides, and fp32 results: no row has it. Smaller sizes than this one get other tiles in 0.1.5.post1."""
    m, n, k = 512, 2048, 4096
    places = (torch.arange(n)[:, None] + torch.arange(k)) % len(LATTICE)
    a, b = torch.ones(m, k), torch.tensor(LATTICE)[places]
    a_scales = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(m // 4)[:, None] * torch.tensor([1.0, 0.5]).repeat(k // 256)
    b_scales = torch.tensor([1.0, 0.5]).repeat(n // 2)[:, None].expand(n, k // 128)
    given = [(part.to(torch.float8_e4m3fn).to(device), scales.to(device)) for part, scales in ((a, a_scales), (b, b_scales.contiguous()))]

    def call() -> tuple[Tensor]:
        out = torch.full((m, n), nan, device=device)
        LIBRARY.function(GEMM_1D1D)(*given, out, None, (1, 1, BLOCK))
        return (out,)

    return known_answer(call, (as_bytes([number for row in LARGE_PRODUCT for number in row * (n // 2)], torch.float32) * (m // 4),), device)


LIBRARY.probes |= {
    GEMM: _probe_gemm,
    GEMM_1D1D: _probe_gemm_1d1d,
    GEMM_BLOCK32: _probe_block32,
    MXFP8: _probe_mxfp8,
    EINSUM_FP8: _probe_einsum_fp8,
    EINSUM: _probe_einsum,
}
