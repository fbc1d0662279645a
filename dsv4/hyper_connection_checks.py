"""Argument checks of `hyper_connections`, shared by both implementations, and the vector that V4.1 starts with.

The checks look at dtypes, shapes and host values, never at what a tensor holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.types import ArgumentError, BoundaryOutput, ScaleLayout, StatisticsPrecision

MXFP8_GROUP = 32
LARGEST_FP32 = 3.4028234663852886e38
BOUNDARY_LAYOUTS = (ScaleLayout.PACKED, ScaleLayout.SWIZZLED_128X4)


class Floats(NamedTuple):
    """The dtypes allowed where the specification stores bf16, and where it stores fp32."""

    bf16: str | Sequence[str] = "bf16"
    fp32: str | Sequence[str] = "fp32"


STORED = Floats()
UNROUNDED = Floats(("bf16", "fp64"), ("fp32", "fp64"))  # the reference's own, where its roundings are off


def identity_pre(tokens: int, streams: int, *, device: torch.device | str | None = None) -> Tensor:
    """Collapse weights that read the first stream alone: what V4.1's first sublayer is given (spec A 1.6).

    Args:
        tokens: rows, at least 0.
        streams: columns, at least 1.
        device: where; None is torch's default device.

    Returns:
        fp32 [tokens, streams], rows (1, 0, 0, ...).

    Raises:
        ArgumentError: a size out of range.
    """
    checks.at_least("tokens", tokens, 0)
    checks.at_least("streams", streams, 1)
    pre = torch.zeros(tokens, streams, dtype=torch.float32, device=device)
    pre[:, 0] = 1.0
    return pre


def residual(value: Tensor, floats: Floats = STORED) -> None:
    """Residual streams: at least one, of at least one element."""
    checks.tensor("streams", value, floats.bf16, ("tokens", "streams", "hidden"))
    if value.shape[1] < 1 or value.shape[2] < 1:
        raise ArgumentError("streams", f"shape {list(value.shape)}", "must have at least one stream of at least one element")


def small(name: str, value: float) -> None:
    """An epsilon or a factor: an fp32 number, at least 0."""
    checks.at_least(name, value, 0.0)
    checks.at_most(name, value, LARGEST_FP32)


def statistics(streams: Tensor, fn: Tensor, eps: float, precision: str, floats: Floats = STORED) -> StatisticsPrecision:
    """Arguments of `mix_statistics`."""
    residual(streams, floats)
    checks.beside("fn", fn, floats.fp32, ("mixes", streams.shape[1] * streams.shape[2]), "streams", streams)
    small("eps", eps)
    return checks.choice("precision", precision, StatisticsPrecision)


def splitting(mixes: Tensor, scale: Tensor, base: Tensor, floats: Floats = STORED) -> int:
    """Tensors of `split_mix`; how many streams they are of."""
    checks.tensor("mixes", mixes, floats.fp32, ("tokens", "mixes"))
    width = mixes.shape[1]
    streams = 1
    while streams * (streams + 2) < width:
        streams += 1
    if streams * (streams + 2) != width:
        limit = "must have C + C + C * C mixes a token, of C streams: 3, 8, 15, 24, ..."
        raise ArgumentError("mixes", f"shape {list(mixes.shape)}", limit)
    checks.beside("scale", scale, floats.fp32, (3,), "mixes", mixes)
    checks.beside("base", base, floats.fp32, (width,), "mixes", mixes)
    return streams


def sinkhorn(iterations: int, eps: float, post_multiplier: float = 2.0) -> None:
    """Numbers of `split_mix`."""
    checks.at_least("iterations", iterations, 1)
    small("eps", eps)
    small("post_multiplier", post_multiplier)


def collapsing(streams: Tensor, pre: Tensor, floats: Floats = STORED, name: str = "pre") -> None:
    """Arguments of `collapse`."""
    residual(streams, floats)
    checks.beside(name, pre, floats.fp32, (streams.shape[0], streams.shape[1]), "streams", streams)


def expanding(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, floats: Floats = STORED) -> None:
    """Arguments of `expand`."""
    residual(streams, floats)
    tokens, count, hidden = streams.shape
    checks.beside("y", y, floats.bf16, (tokens, hidden), "streams", streams)
    checks.beside("post", post, floats.fp32, (tokens, count), "streams", streams)
    checks.beside("comb", comb, floats.fp32, (tokens, count, count), "streams", streams)


def head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, eps: float, floats: Floats = STORED) -> None:
    """Arguments of `head_collapse`."""
    residual(streams, floats)
    _, count, hidden = streams.shape
    checks.beside("fn", fn, floats.fp32, (count, count * hidden), "streams", streams)
    checks.beside("scale", scale, floats.fp32, (1,), "streams", streams)
    checks.beside("base", base, floats.fp32, (count,), "streams", streams)
    small("norm_eps", norm_eps)
    small("eps", eps)


def boundary(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    weight: Tensor,
    carried_pre: Tensor | None,
    *,
    norm_eps: float,
    rms_eps: float,
    precision: str,
    output: str,
    scale_layout: str,
    floats: Floats = STORED,
) -> tuple[StatisticsPrecision, BoundaryOutput, ScaleLayout]:
    """What `boundary` takes beyond the arguments of `expand` and the numbers of `split_mix`; its options as members of their enums."""
    _, count, hidden = streams.shape
    mixes = count * (2 + count)
    checks.beside("fn", fn, floats.fp32, (mixes, count * hidden), "streams", streams)
    checks.beside("scale", scale, floats.fp32, (3,), "streams", streams)
    checks.beside("base", base, floats.fp32, (mixes,), "streams", streams)
    checks.beside("weight", weight, "bf16", (hidden,), "streams", streams)
    if carried_pre is not None:
        collapsing(streams, carried_pre, floats, "carried_pre")
    small("norm_eps", norm_eps)
    small("rms_eps", rms_eps)
    chosen = checks.choice("output", output, BoundaryOutput)
    layout = checks.choice("scale_layout", scale_layout, ScaleLayout)
    checks.one_of("scale_layout", layout, BOUNDARY_LAYOUTS)
    if chosen is BoundaryOutput.MXFP8:
        checks.multiple("streams", hidden, MXFP8_GROUP, "Each group of 32 of the hidden size has a scale: ask for bf16")
    return checks.choice("precision", precision, StatisticsPrecision), chosen, layout
