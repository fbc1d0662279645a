"""DeepGEMM (the wheels of sgl-deep-gemm): which wheel fits which torch, its layout transforms, statistics of residual streams, and proofs
of its FP8 product.

Both transforms take one tensor in 0.1.5 and in 0.2.x alike. They leave the words behind the last row of a column undefined, so they are
used where there are none, and they may return an input that already lies right, which an operator must not. Of the product's arguments the
first five are the same in both series, and no other is passed. Source: spec A 8.1, 8.2; kernels 0b, A.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from dsv4.fast.adapters.library import Library, as_bytes, known_answer
from dsv4.fast.dispatch import cuda_exactly

PACK = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
ALIGN = "get_mn_major_tma_aligned_tensor"
GEMM = "fp8_gemm_nt"
GEMM_1D1D = "fp8_gemm_nt 1d1d"
PRENORM = "tf32_hc_prenorm_gemm"
DEVICES = cuda_exactly((9, 0), (10, 0), (10, 3), (10, 7), (12, 0))  # it faults on 12.1 although it says otherwise

# A wheel is tied to the torch that it was built with and does not say so: a wrong pair lacks a symbol, or loads and misreads every tensor.
WHEELS = {
    "2.11": ("0.1.5", "0.1.5.post1"),
    "2.13": ("0.1.5.post2", "0.1.5.post3", "0.1.6", "0.1.7", "0.2.0"),
    "2.14": ("0.2.3.post2", "0.2.5"),
}


def install_command(torch_version: str) -> str:
    """The pip command that brings the newest wheel for a torch; for a torch that has none, with a torch that has one."""
    minor = _minor(torch_version)
    if minor in WHEELS:
        return f"pip install sgl-deep-gemm=={WHEELS[minor][-1]}"
    return f"pip install 'torch==2.11.*' sgl-deep-gemm=={WHEELS['2.11'][-1]}  (no wheel is known to fit torch {torch_version})"


def unfit(version: str, torch_version: str) -> str | None:
    """Why a wheel does not go with a torch; None if it does."""
    fitting = WHEELS.get(_minor(torch_version), ())
    if version in fitting:
        return None
    built = next((minor for minor, versions in WHEELS.items() if version in versions), None)
    known = f"is built for torch {built}" if built else "is not known to fit any torch"
    wanted = f"takes {' or '.join(fitting)}" if fitting else "has no wheel"
    return f"{known}; this torch, {torch_version}, {wanted}"


def _minor(torch_version: str) -> str:
    return ".".join(torch_version.split(".")[:2])


def whole_columns(arguments: Mapping[str, Any]) -> str | None:
    """Columns without pad words, in one batch at most."""
    scales = arguments["scales"]
    if scales.dim() > 3 or scales.numel() == 0:
        return f"takes [rows, groups] or [batch, rows, groups], not empty; got {list(scales.shape)}"
    if scales.shape[-2] % 4:
        return f"leaves pad words undefined, so rows must be a multiple of 4; got {scales.shape[-2]}"
    return None


def pack_ue8m0(scales: Tensor) -> Tensor:
    """uint8 [..., rows, groups], rows a multiple of 4, to packed int32."""
    numbers = _as_powers(scales)
    return _laid_out(LIBRARY.function(PACK)(numbers), numbers)


def align_mn_major(scales: Tensor) -> Tensor:
    """fp32 [..., rows, groups], rows a multiple of 4, to MN-major strides."""
    numbers = scales.contiguous()
    numbers = numbers.clone() if numbers.data_ptr() % 16 else numbers  # its kernel reads 16 bytes at a time, wherever the tensor begins
    return _laid_out(LIBRARY.function(ALIGN)(numbers), numbers)


def _as_powers(scales: Tensor) -> Tensor:
    """E8M0 bytes as the fp32 whose exponent field they are: the library keeps that field, 0 and 255 too."""
    return (scales.to(torch.int32, memory_format=torch.contiguous_format) << 23).view(torch.float32)


def _laid_out(result: Any, given: Tensor) -> Tensor:
    """The library's result as a torch tensor of its own, with the exact strides also where a size of 1 leaves them open."""
    tensor: Tensor = result if isinstance(result, Tensor) else torch.utils.dlpack.from_dlpack(result)
    *_, rows, columns = tensor.shape
    if tensor.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
        tensor = tensor.clone()
    return tensor.as_strided(tensor.shape, (rows * columns, 1, rows)[3 - tensor.dim() :])


def _probe_pack(device: torch.device) -> str | None:
    # word(r, c) = the bytes of the groups 4c to 4c + 3, the first lowest; bytes are compared in the order (row, word)
    rows = [[0, 1, 2, 3, 127], [255, 254, 5, 6, 128], [7, 8, 9, 10, 0], [11, 12, 13, 14, 255]]
    words = bytes([0, 1, 2, 3, 127, 0, 0, 0, 255, 254, 5, 6, 128, 0, 0, 0, 7, 8, 9, 10, 0, 0, 0, 0, 11, 12, 13, 14, 255, 0, 0, 0])
    scales = torch.tensor(rows, dtype=torch.uint8, device=device)
    return _wrong_strides(PACK, _as_powers(scales)) or known_answer(lambda: (pack_ue8m0(scales),), (words,), device)


def _probe_align(device: torch.device) -> str | None:
    rows = [[1.0, -2.0, 0.5], [3.0, 4.0, 448.0], [0.0, 2.0**-126, 7.0], [9.0, 10.0, 11.0]]
    words = bytes.fromhex("0000803f 000000c0 0000003f 00004040 00008040 0000e043 00000000 00008000 0000e040 00001041 00002041 00003041")
    scales = torch.tensor(rows, dtype=torch.float32, device=device)
    return _wrong_strides(ALIGN, scales) or known_answer(lambda: (align_mn_major(scales),), (words,), device)


def _wrong_strides(symbol: str, four_rows: Tensor) -> str | None:
    strides = tuple(LIBRARY.function(symbol)(four_rows).stride())
    return None if strides == (1, 4) else f"strides {strides}, not (1, 4)"


def fp8_gemm_nt(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, dtype: torch.dtype, recipe: tuple[int, int, int] | None = None
) -> Tensor:
    """a [m, k] times b [n, k] transposed, both e4m3 with fp32 scales of 128 numbers.

    Args:
        a, a_scales: [m, k] and [m, ceil(k/128)].
        b, b_scales: [n, k] and [ceil(n/128), ceil(k/128)]; for the recipe (1, 1, 128) [n, ceil(k/128)].
        dtype: bf16; for the recipe (1, 1, 128) fp32.
        recipe: None for the library's own.
    """
    out = torch.full((a.shape[0], b.shape[0]), nan, dtype=dtype, device=a.device)
    LIBRARY.function(GEMM)((a, a_scales), (b, b_scales), out, None, recipe)
    return out


# b[n, k] = LATTICE[(n + k) mod 8], so that every product and sum is exact, in bf16 too. Over 128 k they add up to 48.
LATTICE = (1.0, 2.0, -1.0, 0.5, 0.0, -2.0, 3.0, -0.5)
# A row of a is one number in each group of 128 k, or ones. Rows of the product repeat after eight columns, in each half of its 256.
PICKS = ((0, 1.0, 129, 2.0), (1, -2.0, 131, 1.0), (2, 0.5, 133, -1.0), (3, 4.0, 135, 0.5))
A_SCALES = ((1.0, 2.0), (0.5, 1.0), (2.0, 0.25), (1.0, 4.0), (0.25, 0.5))
B_SCALES = ((1.0, 0.5), (2.0, 4.0))
PRODUCT = (
    ((5.0, 0.0, 0.0, 0.5, -4.0, 4.0, 2.0, 1.5), (34.0, -12.0, 6.0, 1.0, -32.0, 44.0, -2.0, 15.0)),
    ((-1.75, 1.0, -1.5, 1.5, 1.75, -2.5, 1.5, -1.5), (-2.0, 2.0, -9.0, 12.0, 2.0, -2.0, 9.0, -6.0)),
    ((-0.75, 0.125, 0.0625, -2.125, 2.75, -0.375, 0.9375, 2.0), (0.0, -2.0, 0.5, -5.0, 4.0, 0.0, 1.5, 4.0)),
    ((1.5, 1.0, -6.0, 11.0, -1.5, 4.0, 6.0, -1.0), (0.0, 8.0, 0.0, 16.0, 0.0, 8.0, 0.0, 16.0)),
    ((24.0, 24.0, 24.0, 24.0, 24.0, 24.0, 24.0, 24.0), (120.0, 120.0, 120.0, 120.0, 120.0, 120.0, 120.0, 120.0)),
)
# Rows m mod 4 and columns n mod 2 of the large one: 48 in each of 32 groups, times 2^(m mod 4), halved in every odd group and odd column.
LARGE_PRODUCT = ((1152.0, 576.0), (2304.0, 1152.0), (4608.0, 2304.0), (9216.0, 4608.0))


def _lattice(n: int, k: int, device: torch.device) -> Tensor:
    places = (torch.arange(n)[:, None] + torch.arange(k)) % len(LATTICE)
    return torch.tensor(LATTICE)[places].to(torch.float8_e4m3fn).to(device)


def _probe_gemm(device: torch.device) -> str | None:
    a = torch.zeros(5, 256)
    for row, (first, one, second, other) in enumerate(PICKS):
        a[row, first], a[row, second] = one, other
    a[4] = 1.0
    codes, b = a.to(torch.float8_e4m3fn).to(device), _lattice(256, 256, device)
    scales = torch.tensor(A_SCALES, device=device), torch.tensor(B_SCALES, device=device)
    want = as_bytes([number for row in PRODUCT for half in row for number in half * 16], torch.bfloat16)
    return known_answer(lambda: (fp8_gemm_nt(codes, scales[0], b, scales[1], torch.bfloat16),), (want,), device)


def _probe_gemm_1d1d(device: torch.device) -> str | None:
    # The size whose kernel does not compile in 0.1.5.post1: smaller ones get other tiles, and prove nothing.
    m, n, k = 512, 2048, 4096
    a, b = torch.ones(m, k).to(torch.float8_e4m3fn).to(device), _lattice(n, k, device)
    a_scales = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(m // 4)[:, None] * torch.tensor([1.0, 0.5]).repeat(k // 256)
    b_scales = torch.tensor([1.0, 0.5]).repeat(n // 2)[:, None].expand(n, k // 128).contiguous()
    want = as_bytes([number for row in LARGE_PRODUCT for number in row * (n // 2)], torch.float32) * (m // 4)
    scales = a_scales.to(device), b_scales.to(device)
    return known_answer(lambda: (fp8_gemm_nt(a, scales[0], b, scales[1], torch.float32, (1, 1, 128)),), (want,), device)


PRENORM_SPLITS = 16  # of K, for any number of rows: they decide the order of its additions
PRENORM_TILE = 64  # of K


def prenorm_gemm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [m, k] times weight [n, k] transposed in TF32, the weight cut to it, and the sums of squares of x, both in splits of k.

    Args:
        x: bf16. weight: fp32.

    Returns:
        fp32 [PRENORM_SPLITS, m, n] and [PRENORM_SPLITS, m].
    """
    parts = torch.empty(PRENORM_SPLITS, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    squares = torch.empty(PRENORM_SPLITS, x.shape[0], dtype=torch.float32, device=x.device)
    LIBRARY.function(PRENORM)(x.contiguous(), weight.contiguous(), parts, squares, PRENORM_SPLITS)
    return parts, squares


def _probe_prenorm(device: torch.device) -> str | None:
    # In split s, row 0 is 1 and 2 at two places and row 1 is s + 1 at a third; all sums are exact. 1 + 2^-12 is 1 in TF32, 2^-12 stays.
    width, mixes = PRENORM_SPLITS * PRENORM_TILE, 24
    x, weight = torch.zeros(2, width), torch.zeros(mixes, width)
    numbers = torch.arange(float(mixes))
    parts = torch.zeros(PRENORM_SPLITS, 2, mixes)
    for split in range(PRENORM_SPLITS):
        at = split * PRENORM_TILE + split
        x[0, at], x[0, at + 7], x[1, at + 13] = 1.0, 2.0, split + 1.0
        weight[:, at], weight[:, at + 7], weight[:, at + 13] = 1 + 2.0**-12, numbers - 12, numbers * 2.0**-12
        parts[split, 0], parts[split, 1] = 1 + 2 * (numbers - 12), (split + 1) * numbers * 2.0**-12
    squares = torch.stack([torch.full((PRENORM_SPLITS,), 5.0), (torch.arange(PRENORM_SPLITS) + 1.0) ** 2], 1)
    want = as_bytes(parts.flatten().tolist(), torch.float32), as_bytes(squares.flatten().tolist(), torch.float32)
    given = x.to(torch.bfloat16).to(device), weight.to(device)
    return known_answer(lambda: prenorm_gemm(*given), want, device)


LIBRARY = Library(
    name="sgl-deep-gemm",
    module="deep_gemm",
    distributions=("sgl-deep-gemm",),
    install=install_command(torch.__version__),
    fits=lambda version: unfit(version, torch.__version__),
    probes={PACK: _probe_pack, ALIGN: _probe_align, GEMM: _probe_gemm, GEMM_1D1D: _probe_gemm_1d1d, PRENORM: _probe_prenorm},
    devices=DEVICES,
)
