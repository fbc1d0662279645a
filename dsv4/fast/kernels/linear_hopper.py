"""Launches the products of E4M3 codes with scales that `linear_hopper_roles` describes: SM90 alone, made for many tokens, right for any.

    y[t, n] = bf16(sum over groups g of (sum over k in g of a[t, k] w[n, k]) * (sa[t, g] * sw[n, g]))

The product of the two scales is fp32. Powers of two or not: fp32 scales are used as they are. `linear_hopper_scales` notes scales whose
products may not be exact, and `linear` then makes the result anew.

`CONFIGS` are tiles of the result to choose from. All give the same bits; `choose` takes the one of the least estimated time. Two launches:
the scales as the roles read them, then the product.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor

from dsv4.fast.kernels.linear_hopper_scales import GROUPS, ROWS, STEPS, lines_kernel

HOPPER: Final = (9, 0)
ALIGNED: Final = 16  # bytes, of what the memory system copies by itself
STEP: Final = 128
LINE: Final = 32
BLOCKS: Final = (32, 128)


class Config(NamedTuple):
    """A tile of `warpgroups` * `rows` * 64 tokens and 128 columns."""

    warpgroups: int
    rows: int
    stages: int
    band: int  # tiles of rows that go together over all columns
    ahead: bool  # see `linear_hopper_roles.Form`
    cost: int  # estimated cycles of a step of 128 of k, in groups of 32

    @property
    def height(self) -> int:
        """Tokens of a tile."""
        return 64 * self.warpgroups * self.rows


CONFIGS: Final[dict[str, Config]] = {
    "256x128": Config(2, 2, 3, 8, False, 1420),
    "192x128": Config(3, 1, 4, 8, False, 1110),
    "128x128": Config(2, 1, 5, 16, True, 780),
    "128x128-serial": Config(2, 1, 5, 16, False, 800),
}


def supported(x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int = 32) -> str | None:
    """Why `run` does not take these arguments, None where it does."""
    k = x.shape[1]
    reason = None
    if x.device.type != "cuda" or _properties(x.device.index)[0] != HOPPER:
        reason = "needs a device of capability 9.0"
    elif _roles() is None:
        reason = "needs triton with triton.experimental.gluon"
    elif block not in BLOCKS:
        reason = f"block must be 32 or 128, got {block}"
    elif block != 32 and torch.int32 in (x_scales.dtype, weight_scales.dtype):
        reason = f"words of scales belong to groups of 32, got block {block}"
    elif k % 32 != 0:
        reason = f"k must be a multiple of 32, got {k}"
    elif any(each.stride(1) != 1 or each.stride(0) % ALIGNED != 0 or each.data_ptr() % ALIGNED != 0 for each in (x, weight)):
        reason = "rows of codes must be contiguous and begin at multiples of 16 bytes"
    return reason


def choose(tokens: int, n: int, processors: int) -> str:
    """The config of the least estimated time: rounds of tiles over all multiprocessors times a tile's cost."""

    def time(name: str) -> int:
        config = CONFIGS[name]
        tiles = -(-tokens // config.height) * -(-n // 128)
        return -(-tiles // processors) * config.cost

    return min(CONFIGS, key=time)


def run(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, block: int = 32, config: str | None = None,
    odd: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bf16 [tokens, n] of codes uint8 [tokens, k] and [n, k], what `supported` has let pass; its rows may lie apart.

    x_scales: uint8 or fp32 [tokens, groups], or words, packed [tokens, words] or 128x4 [row tiles, words, 32, 4]. weight_scales: words of
    its rows, or uint8 or fp32 [ceil(n/block), groups]. odd: int32 [1], set where the result is not to be used for its scales; tokens' fp32
    scales that need no laying out are not looked at.
    """
    (tokens, k), n = x.shape, weight.shape[0]
    words = weight_scales.dtype == torch.int32
    sizes = Sizes(tokens, n, triton.cdiv(k, block), triton.cdiv(k, STEP), block)
    with torch.cuda.device_of(x):
        lines, w_lines, w_columns = lay_scales(x_scales, weight_scales, sizes, odd)
        processors = _properties(x.device.index)[1]
        picked = CONFIGS[choose(tokens, n, processors) if config is None else config]
        width = triton.cdiv(n, 8) * 8  # rows of the result begin at multiples of 16 bytes
        result = torch.empty((tokens, width), dtype=torch.bfloat16, device=x.device)[:, :n]
        _launch(x, weight, lines, w_lines, w_columns, result, sizes, picked, words, processors)
    return result


class Sizes(NamedTuple):
    """Of a product: tokens, columns, groups and steps of k, and what shares a scale."""

    tokens: int
    n: int
    groups: int
    steps: int
    block: int


def kind_of(scales: Tensor) -> str:
    """Kinds of `linear_hopper_scales`."""
    if scales.dtype == torch.int32:
        return "packed" if scales.dim() == 2 else "swizzled"
    return "numbers" if scales.dtype == torch.float32 else "bytes"


def lay_scales(x_scales: Tensor, weight_scales: Tensor, sizes: Sizes, odd: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Lines of the tokens fp32 [groups, tokens], of the weight fp32 [tiles * steps, LINE], and scales of its columns where they differ."""
    device = x_scales.device
    tokens, n, groups, steps, block = sizes
    tiles = triton.cdiv(n, 128)
    ready = kind_of(x_scales) == "numbers" and _are_lines(x_scales)
    if ready:
        lines, programs = x_scales.t(), 0
    else:
        lines = torch.empty((groups, triton.cdiv(tokens, 4) * 4), dtype=torch.float32, device=device)[:, :tokens]
        programs = triton.cdiv(tokens, ROWS) * triton.cdiv(groups, GROUPS)
    w_lines = torch.empty((tiles * steps, LINE), dtype=torch.float32, device=device)
    odd = torch.zeros(1, dtype=torch.int32, device=device) if odd is None else odd
    words = weight_scales.dtype == torch.int32
    w_columns = torch.empty((tiles * steps, 4, 128) if words else (1, 4, 128), dtype=torch.float32, device=device)
    lines_kernel[(programs + tiles * triton.cdiv(steps, STEPS),)](
        x_scales, *x_scales.stride()[:2], lines, lines.stride(0), tokens, programs, weight_scales, *weight_scales.stride()[:2], w_lines,
        w_columns, n, groups, steps, odd, GROUP=block, X_KIND=kind_of(x_scales), W_KIND=kind_of(weight_scales), ROWS=ROWS, GROUPS=GROUPS,
        STEPS=STEPS, num_warps=4,
    )  # fmt: skip
    return lines, w_lines, w_columns


def _are_lines(scales: Tensor) -> bool:
    """Whether fp32 scales [tokens, groups] lie as the roles read them."""
    along = scales.stride(1)
    return scales.stride(0) == 1 and along % 4 == 0 and along >= scales.shape[0] and scales.data_ptr() % ALIGNED == 0


def _launch(
    x: Tensor, weight: Tensor, lines: Tensor, w_lines: Tensor, w_columns: Tensor, result: Tensor, sizes: Sizes, config: Config, words: bool,
    processors: int,
) -> None:  # fmt: skip
    roles, descriptor = _roles(), _descriptor()
    form = roles.Form(sizes.block, words, *config[:5])
    codes, numbers, results = roles.CODES.value, roles.NUMBERS.value, roles.RESULTS.value
    tiles, columns = triton.cdiv(sizes.tokens, config.height), triton.cdiv(sizes.n, 128)
    roles.product_kernel[(min(tiles * columns, processors),)](
        descriptor(x.view(torch.float8_e4m3fn), list(x.shape), list(x.stride()), [form.height, STEP], codes),
        descriptor(weight.view(torch.float8_e4m3fn), list(weight.shape), list(weight.stride()), [128, STEP], codes),
        descriptor(lines, list(lines.shape), list(lines.stride()), [form.groups, form.height], numbers),
        descriptor(w_lines, list(w_lines.shape), list(w_lines.stride()), [1, LINE], numbers),
        descriptor(result, list(result.shape), list(result.stride()), [64, 128], results),
        w_columns, tiles, columns, sizes.steps, FORM=form, num_warps=roles.WARPS,
    )  # fmt: skip


@cache
def _properties(device: int) -> tuple[tuple[int, int], int]:
    return torch.cuda.get_device_capability(device), torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _roles() -> Any:
    """The module of kernels, None where this Triton has no Gluon."""
    try:
        return import_module("dsv4.fast.kernels.linear_hopper_roles")
    except ImportError:
        return None


@cache
def _descriptor() -> Any:
    return import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
