"""Operands of products and inputs of their producers: the domains of `components/linear.py` and `components/output_projection.py`.

Lattice: codes are integers up to 3 and scales powers of two, or 3/2 of them where they are fp32 numbers. A window of 128 stays below
2^11 quanta and a sum below 2^23, so that every order, Hopper's 14 bits included, gives the same bits; one rounding to bf16 follows. A bf16
input whose scale is to be amax / 448 holds 7 2^p or 35 2^p in each block, and multiples of 2^p or 5 2^p. Finite: any finite codes, scales
of any mantissa. Positive: everything above zero, so that errors of one sign add up. Cancelling: sums of 0 (`cancelling`). Special: the
lattice, with NaN among codes and scales, and blocks in which 2^-127 meets 2^127 (one product of -1, 0 or 1 in each: no step overflows).

Where a layout has pads these are ones, which is NaN to whoever reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E4M3, TILE_ROWS, WORD_GROUPS, align
from dsv4.parity import cancelling, lattices, strategies
from dsv4.parity.components.scales import in_columns, rows_of_tiles
from dsv4.parity.contracts import Call, Spec
from dsv4.parity.strategies import generator
from dsv4.types import Mxfp8Pair, Quantized, ScaleLayout

Strategy = st.SearchStrategy[Any]
TOKENS = (1, 2, 7, 8, 17, 63, 64, 65, 127, 128, 129)
WIDTHS = (31, 32, 33, 100, 127, 128, 129, 160, 256, 300)
NUMBERS, E8M0, FP32, COLUMNS = "bf16", "e8m0", "fp32", "mn_major"  # how an input comes: as numbers, or as codes with such scales
CANCELLING = "cancelling"
BIAS = 127


@dataclass
class CodedCall(Call):
    """A call whose codes and scales count as tensors: "0.codes" and "0.scales" are those of the first argument.

    "rows" is the first argument, numbers or codes; "row_scales" is its scales with a row a token, [tokens, 0] where it has none. Put back,
    they are laid out as they were: `columns` says that scales which are no words lie in columns.
    """

    columns: bool = False

    def __getitem__(self, argument: int | str) -> Any:
        first = self.args[0]
        if argument == "rows":
            return first if isinstance(first, Tensor) else first.codes
        if argument == "row_scales":
            if isinstance(first, Tensor):
                return torch.empty(first.shape[0], 0, dtype=torch.uint8, device=first.device)
            return rows_of_tiles(first.scales, first.codes.shape[0]) if _tiled(first) else first.scales
        place, dot, field = str(argument).partition(".")
        return getattr(self.args[int(place)], field) if dot else super().__getitem__(argument)

    def replace(self, argument: int | str, value: Any) -> CodedCall:
        """The same call with one argument, or a tensor of one, changed."""
        first = self.args[0]
        if argument == "rows":
            argument = 0 if isinstance(first, Tensor) else "0.codes"
        elif argument == "row_scales":
            if isinstance(first, Tensor):
                return self
            argument = "0.scales"
            if _tiled(first):
                value = in_tiles(value)
            elif self.columns or isinstance(first, Mxfp8Pair):
                value = columns_of(value)
        place, dot, field = str(argument).partition(".")
        if dot:
            argument, value = int(place), self.args[int(place)]._replace(**{field: value})
        plain = super().replace(argument, value)
        return CodedCall(plain.args, plain.kwargs, self.columns)

    def tensors(self) -> dict[int | str, Tensor]:
        """Every argument that is a tensor, and those of codes with scales."""
        named = super().tensors()
        for place, whole in enumerate(self.args):
            if isinstance(whole, Quantized | Mxfp8Pair):
                named |= {f"{place}.codes": whole.codes, f"{place}.scales": whole.scales}
        return named


def _tiled(whole: Any) -> bool:
    return isinstance(whole, Mxfp8Pair) and whole.layout is ScaleLayout.SWIZZLED_128X4


def columns_of(scales: Tensor) -> Tensor:
    """[tokens, n] or [tokens, groups, n] with the strides of packed and MN-major scales, pads of ones."""
    return in_columns(scales) if scales.dim() == 2 else in_columns(scales.transpose(0, 1)).transpose(0, 1)


def in_tiles(words: Tensor) -> Tensor:
    """int32 [rows, words] as 128x4 tiles, pads of ones."""
    rows, count = words.shape
    tall = torch.full((align(rows, TILE_ROWS), count), -1, dtype=torch.int32, device=words.device)
    tall[:rows] = words
    return tall.view(-1, 4, 32, count).permute(0, 3, 2, 1).contiguous()


def words_of(scales: Tensor) -> Tensor:
    """uint8 [rows, groups] as int32 [rows, words], missing groups ones."""
    rows, groups = scales.shape
    whole = torch.full((rows, align(groups, WORD_GROUPS)), 255, dtype=torch.uint8)
    whole[:, :groups] = scales
    return whole.view(torch.int32)


def pair(codes: Tensor, scales: Tensor, layout: str, device: torch.device) -> Mxfp8Pair:
    """Codes and bytes [rows, groups] as a pair on a device."""
    words = words_of(scales).to(device)  # moved first: a move would lose the pads
    return Mxfp8Pair(codes.to(device), in_tiles(words) if layout == "128x4" else in_columns(words))


class Factors(NamedTuple):
    """Numbers that E4M3 has, and exponents of their scales: fp32 [..., k], int32 [..., ceil(k/block)]; fp32 factors in [1, 2) beside."""

    numbers: Tensor
    exponents: Tensor
    mantissas: Tensor


def factors(kind: str, shape: tuple[int, ...], grid: tuple[int, ...], seed: int, density: float, sign: int = 1) -> Factors:
    """Codes of this shape, and as many scales as the grid has; `sign` is -1 for one of two sides."""
    source = generator(seed)
    if kind == "finite":
        numbers = torch.randn(shape, generator=source).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        bits = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
        odd = torch.where((bits & 0x7F) == 0x7F, bits & 0xF0, bits).view(torch.float8_e4m3fn).float()
        some = torch.rand(*shape[:-1], 1, generator=source) < 0.25  # a quarter of the rows: any codes
        exponents = torch.randint(-9, 5, grid, generator=source)
        return Factors(torch.where(some, odd, numbers), exponents, 1 + torch.rand(grid, generator=source))
    if kind == CANCELLING:
        return Factors(*cancelling.coded(shape, grid, sign, seed))
    if kind == "positive":
        numbers = (torch.rand(shape, generator=source) * 256 + 128).to(torch.float8_e4m3fn).float()
        return Factors(numbers, torch.randint(-1, 1, grid, generator=source), 1 + torch.rand(grid, generator=source))
    numbers = lattices.integers(shape, seed ^ 1, 3, density=density)
    halves = torch.randint(0, 2, grid, generator=source) / 2
    return Factors(numbers, torch.randint(-1, 2, grid, generator=source), 1 + halves)


def extremes(a: Factors, w: Factors, block: int, seed: int) -> tuple[Factors, Factors]:
    """In two blocks of three along k: 2^-127 against 2^127, and one place whose numbers are -1, 0 or 1."""
    source, k, count = generator(seed), a.numbers.shape[-1], a.exponents.shape[-1]
    low = torch.randint(0, 3, (count,), generator=source)
    place = torch.minimum(torch.arange(count) * block + torch.randint(0, block, (count,), generator=source), torch.tensor(k - 1))
    alone = torch.zeros(k, dtype=torch.bool).index_fill(0, place, True)
    odd = (low < 2).repeat_interleave(block)[:k]
    changed = []
    for number, part in enumerate((a, w)):
        numbers = torch.where(odd, part.numbers.clamp(-1, 1) * alone, part.numbers)
        exponents = torch.where(low == 2, part.exponents, torch.where(low == number, -BIAS, BIAS))
        changed.append(Factors(numbers, exponents, torch.where(low == 2, part.mantissas, 1.0)))
    return changed[0], changed[1]


def as_codes(numbers: Tensor, seed: int, nan: float = 0.0) -> Tensor:
    """e4m3; NaN of either sign in this share of the rows."""
    source = generator(seed)
    bits = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    rows = torch.rand(*bits.shape[:-1], 1, generator=source) < nan
    place = torch.randint(0, bits.shape[-1], rows.shape, generator=source)
    at = rows & (torch.arange(bits.shape[-1]) == place)
    return torch.where(at, torch.where(place % 2 == 0, 0x7F, 0xFF), bits.int()).to(torch.uint8).view(torch.float8_e4m3fn)


def as_scales(part: Factors, stored: str, seed: int, nan: float = 0.0) -> Tensor:
    """e8m0, uint8 or fp32, NaN in this share of the rows."""
    source = generator(seed)
    rows = torch.rand(*part.exponents.shape[:-1], 1, generator=source) < nan
    at = rows & (torch.arange(part.exponents.shape[-1]) == torch.randint(0, part.exponents.shape[-1], rows.shape, generator=source))
    if stored == FP32:
        return torch.where(at, torch.nan, torch.ldexp(part.mantissas, part.exponents))
    found = torch.where(at, 255, part.exponents + BIAS).to(torch.uint8)
    return found.view(torch.float8_e8m0fnu) if stored == E8M0 else found


class Operands(NamedTuple):
    """Of a product: x as bf16 numbers, or as codes with scales; a weight with scales of its blocks."""

    x: Tensor | Quantized
    weight: Tensor
    scales: Tensor


def operands(spec: Spec, x_rows: tuple[int, ...], w_rows: tuple[int, ...], k: int, block: int) -> Operands:
    """x [*x_rows, k] and weight [*w_rows, k] on the CPU, of the kind and in the form drawn."""
    kind, form, seed = spec["kind"], spec["form"], spec["seed"]
    nan = 0.1 if kind == "special" else 0.0
    count, blocks = -(-k // block), (*w_rows[:-1], -(-w_rows[-1] // block))
    w = factors(kind, (*w_rows, k), (*blocks, count), seed ^ 2, spec["density"])
    if form == NUMBERS:
        x: Tensor | Quantized = numbers(spec, (*x_rows, k), block)
    else:
        a = factors(kind, (*x_rows, k), (*x_rows, count), seed ^ 4, spec["density"], -1)
        if kind == "special":
            a, w = extremes(a, w, block, seed ^ 6)
        stored = FP32 if form == COLUMNS else form
        x = Quantized(as_codes(a.numbers, seed ^ 7, nan), as_scales(a, stored, seed ^ 8, nan))
    return Operands(x, as_codes(w.numbers, seed ^ 9, nan), as_scales(w, spec["stored"], seed ^ 10, nan))


def numbers(spec: Spec, shape: tuple[int, ...], block: int) -> Tensor:
    """bf16, of the kind drawn, to be quantised in blocks."""
    kind, source, k = spec["kind"], generator(spec["seed"] ^ 12), shape[-1]
    count = -(-k // block)
    low, high = (-13, 20) if kind == CANCELLING else (-3, 3)
    exponents = torch.randint(low, high, (*shape[:-1], count), generator=source)
    tiny = torch.rand(*shape[:-1], 1, generator=source) < 0.15  # rows below the official floor, where codes have few bits
    size = torch.exp2(torch.where(tiny, -32, exponents).float()).repeat_interleave(block, -1)[..., :k]
    if kind == "positive":
        return (torch.rand(shape, generator=source) + 0.5).bfloat16()
    if kind == CANCELLING:
        return cancelling.opposed(torch.randn(shape, generator=source) * size, -1, block).bfloat16()
    if kind == "finite":
        return (torch.randn(shape, generator=source) * size * (torch.rand(shape, generator=source) < 0.9)).bfloat16()
    found = lattices.integers(shape, spec["seed"] ^ 13, 3, density=spec["density"])
    if spec.get("scale") == FP32:  # amax / 448 is a power of two, or five times one
        at = torch.arange(k) % block == torch.randint(0, k - (count - 1) * block, (*shape[:-1], 1), generator=source)
        times = 1 + 4 * torch.randint(0, 2, (*shape[:-1], count), generator=source)
        found = torch.where(at, 7.0, found) * times.repeat_interleave(block, -1)[..., :k]
    if kind == "special":
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(0, 3, shape, generator=source)]
        rows = torch.rand(*shape[:-1], 1, generator=source) < 0.2
        found = torch.where(rows & (torch.arange(k) == torch.randint(0, k, rows.shape, generator=source)), odd, found)
    return (found * size).bfloat16()


def moved(x: Tensor | Quantized, form: str, device: torch.device) -> Tensor | Quantized:
    """On a device, scales in columns where the form has them so."""
    if isinstance(x, Tensor):
        return x.to(device)
    scales = x.scales.to(device)
    return Quantized(x.codes.to(device), columns_of(scales) if form == COLUMNS else scales)


def fp8_call(spec: Spec, device: torch.device) -> CodedCall:
    """Arguments of `linear_fp8`."""
    (tokens, n, k), block, form = spec["size"], spec["block"], spec["form"]
    x, weight, scales = operands(spec, (tokens,), (n,), k, block)
    return CodedCall((moved(x, form, device), weight.to(device), scales.to(device)), {"block": block}, form == COLUMNS)


def pair_call(spec: Spec, device: torch.device) -> CodedCall:
    """Arguments of `linear_mxfp8`."""
    (tokens, n, k), kind, seed = spec["size"], spec["kind"], spec["seed"]
    count, nan = -(-k // 32), 0.1 if kind == "special" else 0.0
    sides = ((14, tokens, -1), (15, n, 1))
    a, w = (factors(kind, (rows, k), (rows, count), seed ^ number, spec["density"], sign) for number, rows, sign in sides)
    if kind == "special":
        a, w = extremes(a, w, 32, seed ^ 16)
    parts = []
    for number, part in enumerate((a, w)):
        codes, scales = as_codes(part.numbers, seed ^ (17 + number), nan), as_scales(part, "uint8", seed ^ (19 + number), nan)
        parts.append(pair(codes, scales, spec["layouts"][number], device))
    return CodedCall((*parts,))


def tokens(most: int = TOKENS[-1]) -> Strategy:
    """A number of tokens: on either side of a tile's edge, or any."""
    edges = st.sampled_from([size for size in TOKENS if size <= most])
    return often([edges, edges, edges, st.integers(1, most)])


def rows_of(layout: str) -> Strategy:
    """`tokens`; few where scales lie in columns; with tiles of 128 rows often more than one tile."""
    if layout == "128x4":
        return often([tokens(17), st.sampled_from([127, 128, 129, 200])])
    return tokens() if layout == "rows" else tokens(65)


def sizes() -> Strategy:
    """[tokens, n, k]: tokens on either side of a tile's edge, a weight of several blocks of 128 rows, or many tokens."""
    columns, k = st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 79])), st.sampled_from(WIDTHS)
    plain = st.tuples(tokens(), columns, st.one_of(st.integers(1, 40), k, k))
    wide = st.tuples(tokens(17), st.sampled_from([129, 160, 257]), k)
    tall = st.tuples(st.sampled_from([129, 257, 1000]), st.integers(1, 8), k)
    return often([plain, plain, wide, tall]).map(list)


def often(choices: Sequence[Strategy]) -> Strategy:
    """One of these, each as often as it is there. Shrinks to the first."""
    return st.sampled_from(range(len(choices))).flatmap(lambda number: choices[number])


def plain_sizes() -> Strategy:
    """[tokens, n, k], small."""
    return st.tuples(st.sampled_from([2, 1, 7, 17, 65, 129, 200]), st.integers(1, 40), st.sampled_from([32, 100, 160, 256])).map(list)


def long_sizes() -> Strategy:
    """[tokens, n, k]: sums so long that an accumulator of 14 bits shows."""
    return st.tuples(st.sampled_from([1, 2, 8, 17]), st.sampled_from([1, 3, 8]), st.sampled_from([2048, 4096, 2100])).map(list)


def sizes_of(kind: str) -> Strategy:
    """[tokens, n, k] for a kind; of sums that cancel, several blocks of either size."""
    if kind == CANCELLING:
        return st.tuples(st.sampled_from([8, 1, 2, 17, 33]), st.sampled_from([1, 8, 40, 160]), st.sampled_from([512, 1024])).map(list)
    return long_sizes() if kind == "positive" else sizes()


def many(build: Callable[[Spec, torch.device], Call]) -> Callable[[Spec, torch.device], Call]:
    """A build whose calls have so many more tokens and columns on CUDA that kernels for many tokens take them."""

    def grown(spec: Spec, device: torch.device) -> Call:
        tokens, n, k = spec["size"]
        if device.type == "cuda":
            tokens, n = max(tokens, min(tokens + 384, 4096)), n + 1152
        call: Call = build({**spec, "size": [tokens, n, k]}, device)
        return call

    return grown


def many_sizes(kind: str) -> dict[str, Strategy]:
    """For `many`: [tokens, n, k] with whole groups of 32, and what makes scales bytes in blocks of 32."""
    tokens = st.sampled_from([1, 17, 65, 129, 300] if kind == "positive" else [1, 17, 65, 129, 300, 4096])
    k = st.sampled_from([2048, 4096] if kind == "positive" else [32, 96, 160, 416])
    return {"size": st.tuples(tokens, st.integers(1, 40), k).map(list)}


def product_specs(kind: str, **fixed: Strategy) -> Strategy:
    """Specs for `fp8_call`; other calls replace what they do not have."""
    parts: dict[str, Strategy] = {
        "size": sizes_of(kind),
        "block": st.sampled_from([128, 32]),
        "form": st.sampled_from([NUMBERS, E8M0, FP32, COLUMNS, "uint8"]),
        "stored": st.sampled_from([E8M0, FP32, "uint8"]),
        "kind": st.just(kind),
        "density": st.sampled_from([1.0, 0.3]),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def pair_specs(kind: str, **fixed: Strategy) -> Strategy:
    """Specs for `pair_call`."""
    layouts = st.tuples(*[st.sampled_from(["packed", "128x4"])] * 2).map(list)
    parts: dict[str, Strategy] = {
        "size": sizes_of(kind),
        "layouts": layouts,
        "kind": st.just(kind),
        "density": st.sampled_from([1.0, 0.3]),
        **fixed,
        "seed": strategies.seeds(),
    }
    return strategies.specs(**parts)


def plain_products(block: int, *forms: str) -> dict[str, Strategy]:
    """One block and few forms, for `product_specs`."""
    return {"size": plain_sizes(), "block": st.just(block), "form": st.sampled_from(forms), "stored": st.just(E8M0)}


def plain_pairs() -> dict[str, Strategy]:
    """Few layouts, for `pair_specs`."""
    return {"size": plain_sizes(), "layouts": st.sampled_from([["packed", "packed"], ["128x4", "packed"]])}


def squares(rows: int, n: int, seed: int, power: int) -> Tensor:
    """bf16 [rows, n], n a multiple of 8: rows whose root mean square is a power of two, most of them of several magnitudes."""
    source = generator(seed)
    eights = torch.tensor([[1.0] * 8, [5.0] + [1.0] * 7, [3.0] * 3 + [1.0] * 5, [11.0] + [1.0] * 7])
    found = eights[torch.randint(0, 4, (rows,), generator=source)].repeat(1, n // 8)
    order = torch.rand(rows, n, generator=source).argsort(1)
    signs = torch.randint(0, 2, (rows, n), generator=source) * 2 - 1
    return (found.gather(1, order) * signs * 2.0**power).bfloat16()


def saturated(rows: int, n: int, group: int, seed: int) -> Tensor:
    """bf16 [rows, n]: gates at which silu is their value or 0, in every fourth group the latter alone."""
    source = generator(seed)
    large = torch.randint(32, 256, (rows, n), generator=source).float()
    zeros = torch.randint(0, 4, (rows, n // group), generator=source).repeat_interleave(group, 1) == 0
    kind = torch.where(zeros, 6, 0) + torch.randint(0, 8, (rows, n), generator=source)
    return torch.where(kind < 6, large, torch.where(kind % 2 == 0, 0.0, -200 - large)).bfloat16()


def sprinkled(x: Tensor, seed: int) -> Tensor:
    """A NaN or an infinity in some of the rows."""
    source = generator(seed)
    rows, place = (torch.rand(len(x), 1, generator=source) < 0.3), torch.randint(0, x.shape[1], (len(x), 1), generator=source)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(0, 3, (len(x), 1), generator=source)]
    return torch.where(rows & (torch.arange(x.shape[1]) == place), odd, x).bfloat16()


def gates(classes: Sequence[str], rows: int, n: int, group: int, seed: int) -> Tensor:
    """bf16 [rows, n] of the classes drawn, group by group; "below" is far under a limit of 10."""
    found = strategies.values([name for name in classes if name != "below"] or ["zeros"], (rows, n), group, seed, torch.bfloat16, E4M3)
    if "below" not in classes:
        return found
    source = generator(seed ^ 21)
    some = (torch.rand(rows, n // group, generator=source) < 0.5).repeat_interleave(group, 1)
    return torch.where(some, (-12 - 20 * torch.rand(rows, n, generator=source)).bfloat16(), found)
