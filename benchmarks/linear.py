"""Linear layers: the projections of the presets in each form that a product takes, and what makes their inputs.

Operands are quantised before, but for lines that say bf16, and rotate together: at few tokens a product is as fast as its weight comes from
memory, which a weight that stays in the cache would hide. The limit is a copy of the bytes; for many tokens the tensor cores are the limit,
so `torch._scaled_mm`, which takes one scale for each side and does less, stands beside, and cuBLAS on dequantised operands. Some rows and
columns of a product are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import PRESETS, Case, Raw, Together, activations, library_call
from benchmarks.harness import rotating
from dsv4.configs import ModelConfig
from dsv4.fast import dispatch, linear, norms, quantization, scales
from dsv4.fast.adapters import deepgemm_linear, flashinfer_linear
from dsv4.fast.adapters.library import Library
from dsv4.parity.components.scales import rows_of_tiles
from dsv4.types import Mxfp8Pair, Quantized

BLOCK, GROUP = 128, 32  # of V4, of V4.1 and of pairs
POOL = 2**27  # numbers that weights are pieces of, at least
TILE = 2**20  # of them that differ
COMPARED = 32  # rows of a product, and of three blocks of 128 all columns
LAYOUTS = {BLOCK: ("rows", "mn_major"), GROUP: ("rows", "packed", "128x4")}  # that consumers of a group's codes read


@dataclass(frozen=True)
class Product(Together):
    """x [tokens, k] times a weight [n, k] with its scales: x, weight, scales, or two pairs."""

    def judged(self) -> tuple[Any, ...]:
        """Some rows of x, and some blocks of the weight."""
        x, weight, *factors = self.args[0]
        if isinstance(weight, Mxfp8Pair):
            return tuple(_rows_of_pair(part, at) for part, at in ((x, self.rows()), (weight, self.columns())))
        block = BLOCK // self.options.get("block", BLOCK)
        of_blocks = blocks(len(weight), BLOCK, weight.device)[:, None] * block + torch.arange(block, device=weight.device)
        return picked(x, self.rows()), picked(weight, self.columns()), *(one[of_blocks[of_blocks < len(one)]] for one in factors)

    def part(self, result: Any) -> Any:
        """The same of y."""
        return result[self.rows()][:, self.columns()]

    def rows(self) -> Tensor:
        """Rows of x."""
        first = self.args[0][0]
        return some_rows(first if isinstance(first, Tensor) else first[0])

    def columns(self) -> Tensor:
        """Rows of the weight."""
        weight = self.args[0][1]
        return some_columns(weight[0] if isinstance(weight, Mxfp8Pair) else weight)


@dataclass(frozen=True)
class Producer(Together):
    """Codes and scales, which are compared as bytes in rows."""

    def part(self, result: Any) -> Any:
        """Scales of any layout as e8m0 in rows."""
        codes, found = result
        return Quantized(codes, in_rows(found, *codes.shape, self.options["group"]))


def cases(tokens: int, device: torch.device) -> Iterator[Case]:
    """The dense projections of each preset, attention's and the shared expert's, and the norms and the SwiGLU before them."""
    for preset, config in PRESETS.items():
        block = config.activation_group
        for name, (n, k) in projections(config).items():
            yield from _products(f"{preset}, {tokens} tokens, {name} {n} x {k}", tokens, n, k, block, device)
        inner = config.moe_intermediate_size * config.n_shared_experts
        yield from _norms(f"{preset}, {tokens} tokens", tokens, config.hidden_size, config.rms_norm_eps, block, device)
        yield from _gates(f"{preset}, {tokens} tokens", tokens, inner, config.swiglu_limit, block, device)


def sweep(rows: int, columns: int, device: torch.device) -> Iterator[Case]:
    """So many tokens times a square weight, in both blocks, and producers of rows as wide."""
    label = f"{rows} tokens"
    for block in (BLOCK, GROUP):
        yield from _products(f"{label}, {columns} x {columns}", rows, columns, columns, block, device)
        if columns % block == 0:
            yield from _norms(label, rows, columns, 1e-6, block, device)
            yield from _gates(label, rows, columns, 10.0, block, device)


def projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the dense FP8 weights of a layer, wq_a and wkv as one, w1 and w3 as one."""
    inner = config.moe_intermediate_size * config.n_shared_experts
    return {
        "wq_a + wkv": (config.q_lora_rank + config.head_dim, config.hidden_size),
        "wq_b": (config.num_attention_heads * config.head_dim, config.q_lora_rank),
        "wo_b": (config.hidden_size, config.o_groups * config.o_lora_rank),
        "w1 + w3": (2 * inner, config.hidden_size),
        "w2": (config.hidden_size, inner),
    }


def _products(label: str, tokens: int, n: int, k: int, block: int, device: torch.device) -> Iterator[Case]:
    words, x, weight = f"{label}, blocks of {block}", activations(tokens, k, device), codes((n, k), device)
    options = {"block": block}
    for form in ("fp32 mn_major", "e8m0") if block == BLOCK else ("e8m0",):
        if k % block == 0:
            given = quantised(x, block, form), weight, factors((-(-n // block), -(-k // block)), form, device)
            yield Product("linear.linear_fp8", f"{words}, {form}", (given,), options, _beside(given, block))
    given = x, weight, factors((-(-n // block), -(-k // block)), stored(block, device), device)
    yield Product("linear.linear_fp8", f"{words}, bf16", (given,), options)
    if block == GROUP and k % GROUP == 0:
        for layout in ("packed", "128x4"):
            pairs = pair(x, layout), pair_weight(weight, layout)
            yield Product("linear.linear_mxfp8", f"{label}, {layout}", (pairs,), raw=beside_pairs(pairs, layout))


def _norms(label: str, tokens: int, width: int, eps: float, group: int, device: torch.device) -> Iterator[Case]:
    x, weight = activations(tokens, width, device), (1 + torch.randn(width, device=device) / 4).bfloat16()
    raw: Raw = {}
    if device.type == "cuda":
        raw = {"rms_norm, then quantize_fp8": lambda first: quantization.quantize_fp8(norms.rms_norm(*first, eps=eps), group)}
    for layout in LAYOUTS[group]:
        options = {"eps": eps, "group": group, "scale_layout": layout}
        words = f"{label}, {width} wide, {group} {layout}"
        yield Producer("linear.norm_quantize", words, ((x, weight),), options, raw if layout == "rows" else {})


def _gates(label: str, tokens: int, width: int, limit: float, group: int, device: torch.device) -> Iterator[Case]:
    halves = activations(tokens, 2 * width, device).chunk(2, 1)
    for layout in LAYOUTS[group]:
        options = {"limit": limit, "group": group, "scale_layout": layout}
        yield Producer("linear.swiglu_quantize", f"{label}, {width} wide, {group} {layout}", (tuple(halves),), options)


@cache
def _pool(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers, the largest of E4M3 near its end."""
    tile = torch.randn(TILE, device=device) * (90.0 if dtype == torch.float8_e4m3fn else 0.02)
    return tile.clamp(-448, 448).to(dtype).view(torch.uint8).repeat(-(-count // TILE)).view(dtype)


def codes(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """A weight: a piece of memory that others of this dtype are pieces of too, so as not to make as much for each case."""
    count = prod(shape)
    return _pool(max(POOL // dtype.itemsize, count), dtype, device)[:count].view(*shape)


def factors(shape: Sequence[int], form: str, device: torch.device) -> Tensor:
    """Scales of a weight: powers of two, as bytes or as numbers."""
    byte = torch.randint(110, 116, tuple(shape), dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
    return byte if form == "e8m0" else byte.float()


def stored(block: int, device: torch.device) -> str:
    """How a weight's scales are kept for the products of a device: V4's as numbers, but where DeepGEMM packs bytes."""
    return "fp32 mn_major" if block == BLOCK and not (device.type == "cuda" and deepgemm_linear.packs(device)) else "e8m0"


def quantised(x: Tensor, group: int, form: str) -> Quantized:
    """Codes of bf16 rows with e8m0 scales, or with fp32 ones as SM90's products read them."""
    options = {"impl": uncompiled(x.device)} | ({} if form == "e8m0" else {"scale": "fp32", "scale_layout": "mn_major"})
    return quantization.quantize_fp8(x, group, **options)


def pair(x: Tensor, layout: str) -> Mxfp8Pair:
    """bf16 rows as a pair."""
    return Mxfp8Pair(*quantization.quantize_fp8(x, GROUP, scale_layout=layout, impl=uncompiled(x.device)))


def pair_weight(weight: Tensor, layout: str) -> Mxfp8Pair:
    """A weight as a pair."""
    n, k = weight.shape
    of_blocks = factors((-(-n // GROUP), -(-k // GROUP)), "e8m0", weight.device)
    return linear.mxfp8_weight(weight, of_blocks, scale_layout=layout, impl=uncompiled(weight.device))


def uncompiled(device: torch.device) -> str | None:
    """What makes operands: on the CPU nothing that has to be compiled first."""
    return None if device.type == "cuda" else "eager"


def _beside(given: tuple[Quantized, Tensor, Tensor], block: int) -> Raw:
    """DeepGEMM on these very operands where it takes them, and torch on their numbers."""
    (x, sx), weight, _ = given
    if not x.is_cuda:
        return {}
    raw: dict[str, Any] = {}
    if block == BLOCK and sx.dtype == torch.float32 and not deepgemm_linear.packs(x.device):
        out = torch.empty(len(x), len(weight), dtype=torch.bfloat16, device=x.device)
        raw |= library_call(
            deepgemm_linear.LIBRARY,
            deepgemm_linear.GEMM,
            x.device,
            lambda function, first: function(tuple(first[0]), (first[1], first[2]), out, None, None),
        )

    place = "mn_major" if sx.dtype == torch.float32 else "rows"

    def numbers(first: Any) -> tuple[Tensor, Tensor]:
        left = quantization.dequantize(*first[0], block, scale_layout=place)
        return left, quantization.dequantize(first[1], first[2], (block, block))

    return raw | by_torch(given, numbers)


def beside_pairs(pairs: tuple[Mxfp8Pair, Mxfp8Pair], layout: str) -> Raw:
    """The library that takes this layout, and torch on the numbers of the pairs."""
    device = pairs[0].codes.device
    if device.type != "cuda":
        return {}

    def operands(first: Any) -> tuple[Tensor, ...]:
        return tuple(part for x in first for part in (x.codes.view(torch.uint8), x.scales))

    chosen = (
        (deepgemm_linear.MXFP8_DEVICES, deepgemm_linear.LIBRARY, deepgemm_linear.MXFP8, deepgemm_linear.mxfp8)
        if layout == "packed"
        else (flashinfer_linear.DEVICES, flashinfer_linear.LIBRARY, flashinfer_linear.MM_MXFP8, flashinfer_linear.mm_mxfp8)
    )
    raw = _where_it_runs(*chosen[:3], device, lambda first: chosen[3](*operands(first)))

    def numbers(first: Any) -> tuple[Tensor, Tensor]:
        x, weight = (quantization.dequantize(*part, GROUP, scale_layout=layout) for part in first)
        return x, weight

    return {**raw, **by_torch(pairs, numbers)}


def _where_it_runs(
    devices: Callable[[Any], str | None], library: Library, symbol: str, device: torch.device, run: Callable[[Any], Any]
) -> Raw:
    """A library's call; the reason on devices that it is not of, where nobody should try it."""
    reason = devices(dispatch.describe(device))
    return {f"{library.name} {symbol}": reason} if reason else library_call(library, symbol, device, lambda _, first: run(first))


def by_torch(given: tuple[Any, ...], numbers: Callable[[Any], tuple[Tensor, Tensor]]) -> Raw:
    """cuBLAS after both sides are dequantised, on what that gives, and on the codes with one scale a side."""
    one = torch.ones((), device=given[1].device if isinstance(given[1], Tensor) else given[1].codes.device)

    def dequantised(first: Any) -> Tensor:
        x, weight = numbers(first)
        return torch.mm(x, weight.t())

    def scaled(first: Any) -> Tensor:
        x, weight = first[0].codes, first[1] if isinstance(first[1], Tensor) else first[1].codes
        return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16)

    @cache
    def turn() -> Iterator[Any]:
        return cycle(rotating(numbers(given)))

    def plain(_: Any) -> Tensor:
        x, weight = next(turn())
        return torch.mm(x, weight.t())

    return {"dequantised, then cuBLAS bf16": dequantised, "cuBLAS bf16": plain, "cuBLAS FP8, one scale a side": scaled}


def some_rows(x: Tensor) -> Tensor:
    """Rows that are compared, from the first to the last."""
    return torch.linspace(0, len(x) - 1, min(len(x), COMPARED), dtype=torch.float64, device=x.device).long()


def blocks(n: int, block: int, device: torch.device) -> Tensor:
    """The first, the last and a middle one."""
    last = -(-n // block) - 1
    return torch.tensor(sorted({0, last // 2, last}), device=device)


def some_columns(weight: Tensor) -> Tensor:
    """The rows [n] of a weight in these blocks."""
    n = weight.shape[-2]
    found = (blocks(n, BLOCK, weight.device)[:, None] * BLOCK + torch.arange(BLOCK, device=weight.device)).flatten()
    return found[found < n]


def picked(x: Any, at: Tensor, dim: int = 0) -> Any:
    """Rows of a tensor, or of each of a tuple's."""
    if not isinstance(x, Tensor):
        return type(x)(*(picked(part, at, dim) for part in x))
    return x.view(torch.uint8).index_select(dim, at).view(x.dtype) if x.element_size() == 1 else x.index_select(dim, at)


def _rows_of_pair(given: Mxfp8Pair, at: Tensor) -> Mxfp8Pair:
    words = given.scales if given.scales.dim() == 2 else rows_of_tiles(given.scales, len(given.codes))
    return Mxfp8Pair(picked(given.codes, at), picked(words, at))


def in_rows(found: Tensor, rows: int, width: int, group: int) -> Tensor:
    """Scales that are powers of two, in any layout, as e8m0 [rows, width/group]."""
    if found.dtype == torch.float32:
        return found.to(torch.float8_e8m0fnu).contiguous()
    if found.dtype != torch.int32:
        return found
    if found.dim() == 4:
        return scales.unswizzle_128x4(found, rows, width // group, impl="eager")
    return scales.unpack_ue8m0(found, width // group, impl="eager")
