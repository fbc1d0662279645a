"""Residual streams and their mixes: rows at which implementations differ, and lattices on which none may.

As in `strategies`, Hypothesis draws names and a seed and these functions make the tensors; row t is of the class number t modulo the
number of classes drawn. C streams of D elements.

The lattice of streams: each stream holds +-2^(b + j) in D / 4^j places and 0 elsewhere, j differing from stream to stream. Then the mean
square of a stream, and of all of them, is 4^b, its inverse root 2^-b, and products with small integers sum exactly in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.contracts import Call
from dsv4.parity.strategies import generator, random_bits

STREAMS, HIDDEN = 4, 64  # the form of most domains; 256 numbers are a power of four, as `lattice` wants for a single element
MIXES = STREAMS * (2 + STREAMS)
V4, V41 = 1e-6, 1e-20  # norm_eps
SPARSEST = 2  # j of the lattice goes up to this: D is a multiple of 4^2
SATURATED = 256.0  # a logit whose sigmoid is 1 in fp32, and 0 with the other sign
TIE = 1 + 2.0**-8  # halfway between 1 and the next bf16: a power of two times it rounds back to the power

Maker = Callable[[int, int, int, torch.Generator], Tensor]


def _normal(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return torch.randn(rows, streams, hidden, generator=source)


def _uneven(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """Streams of different size: a statistic of one of them is not that of all."""
    exponents = torch.randint(-6, 7, (rows, streams, 1), generator=source)
    return torch.ldexp(_normal(rows, streams, hidden, source), exponents)


def _small(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """Mean squares near V4's norm_eps, and near V4.1's."""
    return _normal(rows, streams, hidden, source) * torch.tensor([1e-3, 1e-10])[torch.arange(rows) % 2, None, None]


def _positive(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return torch.rand(rows, streams, hidden, generator=source) + 0.5


def _repeated(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """As after the embedding."""
    return _normal(rows, 1, hidden, source).expand(rows, streams, hidden)


def _powers(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """Powers of two, which a mix of `TIE` inflates by what bf16 drops."""
    exponents = torch.randint(-2, 3, (rows, streams, hidden), generator=source)
    return torch.ldexp(torch.randint(0, 2, exponents.shape, generator=source) * 2.0 - 1, exponents)


def _outliers(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return _normal(rows, streams, hidden, source) * torch.exp(2 * _normal(rows, streams, hidden, source))


def _zeros(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return torch.where(torch.rand(rows, streams, hidden, generator=source) < 0.5, 0.0, -0.0)


def _cancelling(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """The second stream takes back the first, which is so large that adding the others before would lose them."""
    values = _normal(rows, streams, hidden, source)
    values[:, :1] *= 2.0**70
    values[:, 1:2] = -values[:, :1].bfloat16().float()[:, : values[:, 1:2].shape[1]]
    return values


def _tiny(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return torch.ldexp(_normal(rows, streams, hidden, source), torch.randint(-140, -100, (rows, streams, 1), generator=source))


def _huge(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return torch.ldexp(
        torch.rand(rows, streams, hidden, generator=source) + 0.5, torch.randint(110, 128, (rows, streams, 1), generator=source)
    )


def _special(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    """A NaN or an infinity here and there."""
    kind = torch.randint(0, 40, (rows, streams, hidden), generator=source)
    found = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])[kind.clamp(max=3)]
    return torch.where(kind < 3, found, _normal(rows, streams, hidden, source))


def _bits(rows: int, streams: int, hidden: int, source: torch.Generator) -> Tensor:
    return random_bits((rows, streams, hidden), int(torch.randint(0, 2**62, (), generator=source)), torch.bfloat16).float()


STREAM_CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "uneven": _uneven,
    "small": _small,
    "positive": _positive,
    "powers": _powers,
    "repeated": _repeated,
    "outliers": _outliers,
    "zeros": _zeros,
    "cancelling": _cancelling,
    "tiny": _tiny,
    "huge": _huge,
    "special": _special,
    "bits": _bits,
}
MODERATE = ("normal", "uneven", "small", "positive", "powers", "repeated", "outliers", "zeros")  # squares neither overflow nor vanish


def call_on(device: torch.device, *tensors: Tensor, **options: Any) -> Call:
    """A call with its tensors on the device."""
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return Call(tuple(tensor.to(device) for tensor in tensors), moved)


def normal(shape: tuple[int, ...], seed: int) -> Tensor:
    """Normal numbers, fp32 on the CPU."""
    return torch.randn(shape, generator=generator(seed))


def integers(shape: tuple[int, ...], seed: int, largest: int) -> Tensor:
    """Integers from -largest to largest, fp32 on the CPU."""
    return torch.randint(-largest, largest + 1, shape, generator=generator(seed)).float()


def saturated(shape: tuple[int, ...], seed: int) -> Tensor:
    """Logits at which a sigmoid is 0, 1/2 or 1."""
    return SATURATED * integers(shape, seed, 1)


def scale_and_base(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three scales that differ, and a base [count (2 + count)]."""
    scale = torch.tensor([0.6, 1.1, 1.7]) * (1 + 0.2 * torch.rand(3, generator=generator(seed ^ 0x5CA1E)))
    return scale, normal((count * (2 + count),), seed ^ 0xBA5E)


def spread(scale: Tensor, count: int) -> Tensor:
    """The scale of each mix: [count (2 + count)]."""
    return scale.repeat_interleave(torch.tensor([count, count, count * count]))


def projection(count: int, hidden: int, mixes: int, seed: int) -> Tensor:
    """fn [mixes, count hidden] with all its bits, about as large as trained ones. Of two rows the halves cancel but for bits that TF32
    lacks, where streams are constant: the first row, and the first of post.
    """
    terms = count * hidden
    size = 2.0 ** -round(math.log2(terms) / 2)
    fn = size * normal((mixes, terms), seed)
    for row in {0, count % mixes}:
        fn[row, : terms // 2] = size * (1 + 2.0**-12)
        fn[row, terms // 2 : 2 * (terms // 2)] = -size
    return fn


def streams(classes: Sequence[str], rows: int, count: int, hidden: int, seed: int) -> Tensor:
    """bf16 [rows, count, hidden] on the CPU, of the classes drawn."""
    source = generator(seed)
    out = torch.empty(rows, count, hidden)
    for number, name in enumerate(classes):
        mine = out[number :: len(classes)]
        if len(mine):
            mine.copy_(STREAM_CLASSES[name](len(mine), count, hidden, source))
    return out.bfloat16()


def weights(classes: Sequence[str], rows: int, count: int, seed: int) -> Tensor:
    """fp32 [rows, count] on the CPU, collapse or write-back weights beside streams of these classes.

    Rows of "cancelling" have all weights equal, or the second one ulp above: what is left then is of the size of fp32's rounding errors.
    """
    source = generator(seed ^ 0x5EED)
    out = 2 * torch.rand(rows, count, generator=source)
    out[2::3] = torch.eye(count)[torch.randint(0, count, (len(out[2::3]),), generator=source)]
    for number in [number for number, name in enumerate(classes) if name == "cancelling"]:
        mine = out[number :: len(classes)]
        mine.copy_((torch.rand(len(mine), 1, generator=source) + 0.5).expand_as(mine))
        mine[1::2, 1:2] = torch.nextafter(mine[1::2, 1:2], torch.tensor(9.0))
    return out


def combs(classes: Sequence[str], rows: int, count: int, seed: int) -> Tensor:
    """fp32 [rows, count, count] on the CPU, [old, new]: `weights` for each new stream; every third row a permutation, one entry `TIE`."""
    out = torch.stack([weights(classes, rows, count, seed ^ (number + 1)) for number in range(count)], 2)
    cancelling = [classes[number % len(classes)] == "cancelling" for number in range(rows)]
    for row in range(0, rows, 3):
        if not cancelling[row]:
            out[row] = permutation(count, seed ^ row)
            out[row, :, 0] *= TIE
    return out


def permutation(count: int, seed: int) -> Tensor:
    """fp32 [count, count]: a cyclic permutation matrix of randomly renamed elements: from three on it is not its own transpose."""
    names = torch.randperm(count, generator=generator(seed))
    matrix = torch.zeros(count, count)
    matrix[names, names.roll(1)] = 1.0
    return matrix


def lattice(rows: int, count: int, hidden: int, seed: int, power: int, *, single: bool = False) -> Tensor:
    """fp32 [rows, count, hidden] on the CPU, with a mean square of 4^power; see the opening. With `single` one element is not zero."""
    source = generator(seed)
    signs = torch.randint(0, 2, (rows, count, hidden), generator=source) * 2.0 - 1
    if single:
        place = torch.randint(0, count * hidden, (rows, 1), generator=source)
        one = torch.zeros(rows, count * hidden).scatter(1, place, float(count * hidden) ** 0.5)
        return one.view(rows, count, hidden) * signs * 2.0**power
    sparsity = (
        torch.randint(0, SPARSEST + 1, (rows, count, 1), generator=source) if hidden % 4**SPARSEST == 0 else torch.zeros(rows, count, 1)
    )
    order = torch.rand(rows, count, hidden, generator=source).argsort(2)  # a random place for each element
    return torch.where(order < hidden / 4.0**sparsity, signs * 2.0 ** (sparsity + power), 0.0)


def logits(classes: Sequence[str], rows: int, count: int, seed: int) -> Tensor:
    """fp32 [rows, count (2 + count)] on the CPU: logits of pre, post and comb, of the classes drawn."""
    source = generator(seed)
    out = torch.empty(rows, count * (2 + count))
    for number, name in enumerate(classes):
        mine = out[number :: len(classes)]
        mine.copy_(2 * torch.randn(mine.shape, generator=source) if name != "wide" else 30 * torch.randn(mine.shape, generator=source))
        if name in _COMBS and len(mine):
            mine[:, 2 * count :] = _COMBS[name](count, seed).flatten()
    return out


_COMBS: dict[str, Callable[[int, int], Tensor]] = {
    "equal": lambda count, seed: torch.full((count, count), 0.75),
    "permuted": lambda count, seed: 30 * permutation(count, seed),
    "diagonal": lambda count, seed: -100 * (1 - torch.eye(count)),  # HC-03
    "one_column": lambda count, seed: -100 * (torch.arange(count) != 0).float().expand(count, count),  # HC-03
    "slow": lambda count, seed: -30 * torch.ones(count, count).tril(-1),  # no total support: iterates differ by 1 / k^2
}
LOGIT_CLASSES = ("normal", *_COMBS, "wide")
