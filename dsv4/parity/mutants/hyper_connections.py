"""Wrong hyper-connections: of public bug reports, and what kernels that stay near the formulas do differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.parity.mutants import Mutant
from dsv4.reference import hyper_connections as right
from dsv4.reference.norms import rms_norm
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Boundary, StatisticsPrecision, StreamMix

Split = Callable[..., StreamMix]


def _factor(mean: Tensor, eps: float) -> Tensor:
    return (mean + eps).rsqrt()


def _projected(x: Tensor, fn: Tensor, precision: str = "exact") -> Tensor:
    weight = right._at_precision(fn, StatisticsPrecision(precision))
    return x.flatten(1) @ weight.double().T


def _statistics(mean: Callable[[Tensor], Tensor], factor: Callable[[Tensor, float], Tensor] = _factor) -> Callable[..., Tensor]:
    """Another mean square, of fp64 [tokens, C, D], or another factor made of it."""

    def statistics(streams: Tensor, fn: Tensor, *, eps: float, precision: str = "exact") -> Tensor:
        x = streams.double()
        return (_projected(x, fn, precision) * factor(mean(x), eps)[:, None]).float()

    return statistics


def _whole_mean(x: Tensor) -> Tensor:
    return x.square().mean((1, 2))


def _normalised_before(streams: Tensor, fn: Tensor, *, eps: float, precision: str = "exact") -> Tensor:
    """The streams are normalised and rounded to bf16, and then projected."""
    x = streams.double()
    rounded = (x * _factor(_whole_mean(x), eps)[:, None, None]).bfloat16().double()
    return _projected(rounded, fn, precision).float()


def _precision(seen: str, used: str) -> Callable[..., Tensor]:
    def statistics(streams: Tensor, fn: Tensor, *, eps: float, precision: str = "exact") -> Tensor:
        return right.mix_statistics(streams, fn, eps=eps, precision=used if precision == seen else precision)

    return statistics


def _tf32_to_nearest(streams: Tensor, fn: Tensor, *, eps: float, precision: str = "exact") -> Tensor:
    if precision == "tf32":
        fn = ((fn.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return right.mix_statistics(streams, fn, eps=eps, precision=precision)


def _hidden_major(streams: Tensor, fn: Tensor, **options: Any) -> Tensor:
    return right.mix_statistics(streams.transpose(1, 2).reshape(streams.shape), fn, **options)


def _tail_dropped(streams: Tensor, fn: Tensor, **options: Any) -> Tensor:
    """The last 32 columns of the projection."""
    kept = fn.clone()
    kept[:, -32:] = 0.0
    return right.mix_statistics(streams, kept, **options)


def _split(
    *,
    post_factor: float = 2.0,
    pre_eps: bool = True,
    post_eps: bool = False,
    share_eps: bool = True,
    row_eps: bool = True,
    column_eps: bool = True,
    inside: bool = False,
    softmax_dim: int = 2,
    rows_first: bool = False,
    fewer: int = 0,
    order: tuple[int, int, int] = (0, 1, 2),
    no_maximum: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Split:
    """`split_mix` with one thing changed: which eps there are, their place, order, how many iterations, which scale is whose."""

    def split(mixes: Tensor, scale: Tensor, base: Tensor, *, iterations: int = 20, eps: float = 1e-6) -> StreamMix:
        count = int((mixes.shape[1] + 1) ** 0.5) - 1
        spread = scale[list(order)].repeat_interleave(torch.tensor([count, count, count * count], device=scale.device))
        z = mixes.double() * spread.double() + base.double()
        pre, post, comb = z.split([count, count, count * count], 1)
        logits = comb.unflatten(1, (count, count))
        powers = logits.float().exp().double() if no_maximum else (logits - logits.amax(softmax_dim, keepdim=True)).exp()
        shares = powers / (powers.sum(softmax_dim, keepdim=True) + eps * inside) + eps * share_eps * (not inside)

        def divided(m: Tensor, rows: bool) -> Tensor:
            return m / (m.sum(2 if rows else 1, keepdim=True) + eps * (row_eps if rows else column_eps))

        m = divided(shares, rows_first)
        for _ in range(iterations - 1 - fewer):
            m = divided(divided(m, not rows_first), rows_first)
        return StreamMix(
            (pre.sigmoid() + eps * pre_eps).float(),
            (post_factor * post.sigmoid() + eps * post_eps).to(dtype).float(),
            m.to(dtype).float(),
        )

    return split


def _transposed_mix(*args: Any, **options: Any) -> StreamMix:
    mix = right.split_mix(*args, **options)
    return mix._replace(comb=mix.comb.transpose(1, 2).contiguous())


def _collapse_in_fp32(streams: Tensor, pre: Tensor) -> Tensor:
    total = streams[:, 0].float() * pre[:, :1]
    for k in range(1, streams.shape[1]):
        total = total + streams[:, k].float() * pre[:, k : k + 1]
    return total.bfloat16()


def _collapse_backwards(streams: Tensor, pre: Tensor) -> Tensor:
    return right.collapse(streams.flip(1), pre.flip(1))


def _collapse_interleaved(streams: Tensor, pre: Tensor) -> Tensor:
    return right.collapse(streams.reshape(len(streams), streams.shape[2], streams.shape[1]).transpose(1, 2), pre)


def _last_stream_dropped(streams: Tensor, pre: Tensor) -> Tensor:
    count = max(streams.shape[1] - 1, 1)
    return right.collapse(streams[:, :count], pre[:, :count])


def _expand_transposed(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return right.expand(y, streams, post, comb.transpose(1, 2))


def _expand_in_bf16(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return right.expand(y, streams, post.bfloat16().float(), comb.bfloat16().float())


def _expand_rounded_twice(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = right.expand(torch.zeros_like(y), streams, post, comb)
    return (mixed.double() + post.double()[:, :, None] * y.double()[:, None]).float().bfloat16()


def _expand_output_first(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    total = post.double()[:, :, None] * y.double()[:, None]
    for j in range(streams.shape[1]):
        total = total + comb.double()[:, j, :, None] * streams.double()[:, j, None]
    return total.float().bfloat16()


def _expand_in_fp32(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    total = comb[:, 0, :, None] * streams[:, 0, None].float()
    for j in range(1, streams.shape[1]):
        total = total + comb[:, j, :, None] * streams[:, j, None].float()
    return (total + post[:, :, None] * y[:, None].float()).bfloat16()


def _output_not_weighted(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return right.expand(y, streams, torch.ones_like(post), comb)


def _head(sigmoid: Callable[[Tensor, float], Tensor], *, based: bool = True) -> Callable[..., Tensor]:
    def head(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, norm_eps: float, eps: float = 1e-6) -> Tensor:
        mixes = right.mix_statistics(streams, fn, eps=norm_eps).double()
        pre = sigmoid(mixes * scale.double() + base.double() * based, eps)
        return right.collapse(streams, pre.float())

    return head


def _boundary(
    *,
    expand: Callable[..., Tensor] = right.expand,
    split: Split = right.split_mix,
    carried: bool = True,
    old_statistics: bool = False,
    old_collapse: bool = False,
    unrounded_statistics: bool = False,
    unrounded_norm: bool = False,
    passes_carried: bool = False,
    swapped_eps: bool = False,
    precise: bool = False,
    layout: str = "",
    floor: str = "official",
) -> Callable[..., Boundary]:
    """`boundary` with one thing changed."""

    def boundary(
        y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, fn: Tensor, scale: Tensor, base: Tensor, weight: Tensor, **options: Any
    ) -> Boundary:
        norm_eps, rms_eps = options["norm_eps"], options["rms_eps"]
        if swapped_eps:
            norm_eps, rms_eps = rms_eps, norm_eps
        new = expand(y, streams, post, comb)
        seen = streams if old_statistics else new
        precision = "exact" if precise else options.get("precision", "exact")
        mixes = right.mix_statistics(seen, fn, eps=norm_eps, precision=precision)
        if unrounded_statistics:
            wide = _wide(y, streams, post, comb)
            mixes = (_projected(wide, fn, precision) * _factor(_whole_mean(wide), norm_eps)[:, None]).float()
        mix = split(mixes, scale, base, **{name: options[name] for name in ("iterations", "eps") if name in options})
        given = options.get("carried_pre") if carried else None
        pre = mix.pre if given is None else given
        read = streams if old_collapse else new
        normed = rms_norm(right.collapse(read, pre), weight, eps=rms_eps)
        if unrounded_norm:
            total = (read.double() * pre.double()[:, :, None]).sum(1)
            factor = _factor(total.square().mean(1, keepdim=True), rms_eps)
            normed = (total.float().bfloat16().double() * factor * weight.double()).float().bfloat16()
        if passes_carried:
            mix = mix._replace(pre=pre)
        if options.get("output", "bf16") == "bf16":
            return Boundary(new, *mix, normed, None)
        where = layout or options.get("scale_layout", "packed")
        return Boundary(new, *mix, *quantize_fp8(normed, 32, scale_layout=where, amax_floor=floor))

    return boundary


def _wide(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams in fp64."""
    return torch.einsum("tji,tjd->tid", comb.double(), streams.double()) + post.double()[:, :, None] * y.double()[:, None]


def _mutant(function: str, name: str, call: Callable[..., Any], fault: str, source: str = "") -> Mutant:
    return Mutant(f"{function}-{name}", "hyper_connections", function, call, fault, source)


SUBCASES = {
    "mix_statistics": (
        ("first_stream", _statistics(lambda x: x[:, 0].square().mean(1)), "statistic over the first stream alone", ""),
        ("sum", _statistics(lambda x: x.square().sum((1, 2))), "sum of squares for their mean", "spec A 1.7: sqr_sum"),
        ("no_eps", _statistics(_whole_mean, lambda mean, eps: _factor(mean, 1e-38)), "norm_eps missing", ""),
        ("eps_outside", _statistics(_whole_mean, lambda mean, eps: 1 / (mean.sqrt() + eps)), "norm_eps outside of the root", ""),
        ("normalised_before", _normalised_before, "normalises and rounds the streams, then projects", ""),
        ("always_tf32", _precision("exact", "tf32"), "TF32 where all of fn is wanted", "spec A 10 row 4"),
        ("never_tf32", _precision("tf32", "exact"), "all of fn where TF32 is wanted", ""),
        ("not_compensated", _precision("tf32_compensated", "tf32"), "the second product missing", ""),
        ("tf32_to_nearest", _tf32_to_nearest, "TF32 rounded instead of cut", ""),
        ("hidden_major", _hidden_major, "flattens hidden before streams", ""),
        ("tail_dropped", _tail_dropped, "the last tile of the sum missing", ""),
    ),
    "split_mix": (
        ("one_sigmoid", _split(post_factor=1.0), "sigmoid for 2 sigmoid", "spec A 10 row 22"),
        ("no_eps_in_pre", _split(pre_eps=False), "pre without eps", ""),
        ("eps_in_post", _split(post_eps=True), "eps added to post, too", ""),
        ("no_eps_in_shares", _split(share_eps=False), "no eps after the softmax", ""),
        ("no_eps_in_rows", _split(row_eps=False), "no eps in the sums of rows", "HC-03"),
        ("no_eps_in_columns", _split(column_eps=False), "no eps in the sums of columns", "HC-03"),
        ("eps_inside", _split(inside=True), "eps inside the division of the softmax", ""),
        ("softmax_of_columns", _split(softmax_dim=1), "softmax over old streams", ""),
        ("rows_last", _split(rows_first=True), "columns and rows exchanged", ""),
        ("one_less", _split(fewer=1), "19 iterations for 20", ""),
        ("scales_swapped", _split(order=(1, 0, 2)), "the scales of pre and post exchanged", ""),
        ("one_scale", _split(order=(0, 0, 0)), "one scale for all", ""),
        ("no_maximum", _split(no_maximum=True), "exponentials of the logits as they are", "HC-03"),
        ("transposed", _transposed_mix, "comb transposed", "HC-01"),
        ("bf16", _split(dtype=torch.bfloat16), "post and comb in bf16", "spec A 10 row 2"),
    ),
    "collapse": (
        ("bf16", lambda streams, pre: right.collapse(streams, pre.bfloat16().float()), "pre in bf16", ""),
        ("fp32", _collapse_in_fp32, "rounds each product to fp32", ""),
        ("backwards", _collapse_backwards, "adds the last stream first", ""),
        ("interleaved", _collapse_interleaved, "reads streams as if interleaved", ""),
        ("last_dropped", _last_stream_dropped, "the last stream missing", ""),
    ),
    "expand": (
        ("transposed", _expand_transposed, "comb transposed", "HC-01"),
        ("bf16", _expand_in_bf16, "post and comb in bf16", "spec A 10 row 2"),
        ("rounded_twice", _expand_rounded_twice, "rounds the mix before it adds the output", ""),
        ("output_first", _expand_output_first, "adds the output first", "spec A 1.4: DeepGEMM's order"),
        ("fp32", _expand_in_fp32, "rounds each product to fp32", ""),
        ("not_weighted", _output_not_weighted, "the output without post", ""),
    ),
    "head_collapse": (
        ("no_eps", _head(lambda z, eps: z.sigmoid()), "pre without eps", ""),
        ("no_base", _head(lambda z, eps: z.sigmoid() + eps, based=False), "base ignored", ""),
        ("twice", _head(lambda z, eps: 2 * z.sigmoid() + eps), "2 sigmoid for sigmoid", ""),
        ("softmax", _head(lambda z, eps: z.softmax(1) + eps), "softmax for sigmoids", ""),
    ),
    "boundary": (
        ("transposed", _boundary(expand=_expand_transposed), "comb transposed", "HC-01"),
        ("bf16", _boundary(expand=_expand_in_bf16), "post and comb in bf16", "spec A 10 row 2"),
        ("carried_ignored", _boundary(carried=False), "collapses with the new pre where one is carried", "spec A 1.6"),
        ("passes_carried", _boundary(passes_carried=True), "hands on the carried pre", "spec A 1.6"),
        ("old_statistics", _boundary(old_statistics=True), "statistics of the old streams", ""),
        ("old_collapse", _boundary(old_collapse=True), "collapses the old streams", ""),
        ("unrounded_statistics", _boundary(unrounded_statistics=True), "statistics of streams before bf16", "spec A 1.7"),
        ("unrounded_norm", _boundary(unrounded_norm=True), "RMS of the unrounded collapse", "spec A 10 row 3"),
        ("swapped_eps", _boundary(swapped_eps=True), "norm_eps and rms_eps exchanged", ""),
        ("precision_ignored", _boundary(precise=True), "all of fn where TF32 is wanted", ""),
        ("one_less", _boundary(split=_split(fewer=1)), "19 iterations for 20", ""),
        ("one_sigmoid", _boundary(split=_split(post_factor=1.0)), "sigmoid for 2 sigmoid", ""),
        ("always_packed", _boundary(layout="packed"), "packed scales where 128x4 is wanted", ""),
        ("no_floor", _boundary(floor="none"), "no floor under the amax", "spec A 10 row 8"),
    ),
}

MUTANTS = tuple(_mutant(function, *row) for function, rows in SUBCASES.items() for row in rows)
