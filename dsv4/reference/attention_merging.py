"""Parts of a list, merged; lse in the forms that kernels give it: (5) and (6) of `dsv4.reference.attention`, which exports them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4 import attention_checks
from dsv4.reference.numerics import bf16_dtypes, bf16_step, float_dtypes, fp32_step
from dsv4.types import AttentionResult

__all__ = ["log_sum", "lse_base2", "lse_flashmla", "lse_with_sink", "merge_splits", "sinks_of", "softmax_weights"]


def merge_splits(outputs: Tensor, lses: Tensor, sink: Tensor | None = None) -> AttentionResult:
    """Results over parts of a list as the result over all of it, by (5) and (6).

    Args:
        outputs: [splits, tokens, heads, dim], bf16 or fp32: each part's own, without the sink. Those of empty parts are not looked at.
        lses: [splits, tokens, heads], fp32: natural, -inf for an empty part.
        sink: [heads], fp32; None is none.

    Returns:
        AttentionResult(output bf16 [tokens, heads, dim], lse fp32 [tokens, heads]), lse without the sink.

    Raises:
        ArgumentError: wrong dtypes, shapes or devices, no part at all.
    """
    floats = ("fp32", *bf16_dtypes())
    attention_checks.merge(outputs, lses, sink, floats, float_dtypes())

    def output(outputs: Tensor, lses: Tensor, sink: Tensor) -> Tensor:
        parts = outputs.masked_fill((lses == -torch.inf)[..., None], 0.0)
        weights, total = softmax_weights(lses, sink, 0)
        return ((weights[..., None] * parts).sum(0) + 0.0) / total[0, ..., None]

    merged = bf16_step(output, outputs, lses, sinks_of(sink, outputs.shape[2], outputs.device))
    return AttentionResult(merged, fp32_step(lambda lses: log_sum(lses, 0), lses))


def lse_flashmla(lse: Tensor) -> Tensor:
    """lse as FlashMLA's kernels give it: +inf in the place of -inf, for tokens without picks.

    Args:
        lse: [tokens, heads], fp32, of this module.

    Returns:
        fp32 [tokens, heads].

    Raises:
        ArgumentError: a wrong dtype or rank.
    """
    attention_checks.lse(lse, floats=float_dtypes())
    return torch.where(lse == -torch.inf, torch.inf, lse)


def lse_base2(lse: Tensor) -> Tensor:
    """lse as a logarithm to base 2: the product with log2 e, in fp64 and rounded once to fp32.

    Args:
        lse: [tokens, heads], fp32, natural.

    Returns:
        fp32 [tokens, heads].

    Raises:
        ArgumentError: a wrong dtype or rank.
    """
    attention_checks.lse(lse, floats=float_dtypes())
    return fp32_step(lambda lse: lse * math.log2(math.e), lse)


def lse_with_sink(lse: Tensor, sink: Tensor) -> Tensor:
    """lse with the sink among the scores: log(e^lse + e^sink), in fp64 and rounded once to fp32.

    Args:
        lse: [tokens, heads], fp32, natural, without the sink.
        sink: [heads], fp32.

    Returns:
        fp32 [tokens, heads], the sink where there are no picks.

    Raises:
        ArgumentError: wrong dtypes, shapes or devices.
    """
    attention_checks.lse(lse, sink, float_dtypes())
    return fp32_step(torch.logaddexp, lse, sink)


def log_sum(scores: Tensor, dim: int) -> Tensor:
    """m + log(sum e^(scores - m)), -inf where all scores are; NaN for m = +inf, where scores - m is."""
    return scores.logsumexp(dim).masked_fill((scores == torch.inf).any(dim), torch.nan)


def softmax_weights(scores: Tensor, sink: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """e^(scores - m), and their sum with e^(sink - m): weights of 0 and a sum of 1 where all scores are -inf."""
    top = scores.detach().amax(dim, keepdim=True)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0)
    weights = (scores - top).exp()
    total = weights.sum(dim, keepdim=True) + (sink - top).exp()
    return weights, total.masked_fill(empty, 1.0)


def sinks_of(sink: Tensor | None, heads: int, device: torch.device) -> Tensor:
    """The sink of each head; -inf where there is none."""
    return torch.full((heads,), -torch.inf, device=device) if sink is None else sink
