"""DeepGEMM (the wheels of sgl-deep-gemm): which wheel fits which torch, its layout transforms, and statistics of residual streams.

Both transforms take one tensor in 0.1.5 and in 0.2.x alike. They leave the words behind the last row of a column undefined, so they are
used where there are none, and they may return an input that already lies right, which an operator must not. Source: spec A 8.1, 8.2;
kernels 0b, A.2.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    probes={PACK: _probe_pack, ALIGN: _probe_align, PRENORM: _probe_prenorm},
    devices=DEVICES,
)
