"""Attention put together from parts, each of which a mutant may have wrong: which picks count, how rows are read, the softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import fp32
from dsv4.reference import attention as right
from dsv4.reference.attention import _List
from dsv4.reference.attention_merging import sinks_of
from dsv4.reference.kv_cache import load_kv
from dsv4.reference.numerics import numerics
from dsv4.types import AttentionResult, PagedRows

Softmax = Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # q, rows, which are there, sink, scale
Present = Callable[[Tensor, Tensor | None, int], Tensor]  # picks, lengths, how many rows there are
Load = Callable[[PagedRows, Tensor], Tensor]


def attention(
    softmax: Softmax = right._softmax,
    present: Present = right._present,
    extra_present: Present | None = None,
    lists: Callable[[list[_List]], list[_List]] = lambda made: made,
    load: Load | None = None,
    extra_load: Load | None = None,
) -> Callable[..., AttentionResult]:
    """`sparse_attention` or `paged_attention` with some parts replaced."""

    def one(kv: Tensor | PagedRows, picks: Tensor, lengths: Tensor | None, present: Present, load: Load | None) -> _List:
        if isinstance(kv, Tensor):
            return _List(present(picks, lengths, len(kv)), lambda picks: pad(kv, (0, 0, 0, 1))[picks])
        by = load or load_paged
        return _List(present(picks, lengths, kv.pages.shape[0] * kv.page_size), lambda picks: by(kv, picks))

    def call(q: Tensor, main: Any, picks: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
        made = [one(main, picks, options.get("lengths"), present, load)]
        extra = options.get("extra", options.get("extra_kv"))
        if extra is not None:
            second: Any = options.get("extra_slots", options.get("extra_indices"))
            made.append(one(extra, second, options.get("extra_lengths"), extra_present or present, extra_load or load))
        scale = options.get("scale")
        return attend(q, lists(made), sink, q.shape[2] ** -0.5 if scale is None else scale, softmax)

    return call


def load_paged(rows: PagedRows, picks: Tensor) -> Tensor:
    """As it should be."""
    return load_kv(rows.pages, picks, layout=rows.layout, page_size=rows.page_size)


def attend(q: Tensor, lists: list[_List], sink: Tensor | None, scale: float, softmax: Softmax) -> AttentionResult:
    """All tokens at once."""
    picks = torch.cat([pad(part.picks, (0, 1), value=-1) for part in lists], 1)
    rows = torch.cat([pad(part.load(part.picks), (0, 0, 0, 1)) for part in lists], 1)
    return AttentionResult(*softmax(q, rows, picks >= 0, sinks_of(sink, q.shape[1], q.device), fp32(scale)))


def by_weights(change: Callable[..., tuple[Tensor, Tensor, Tensor]], stop: float | None = None) -> Softmax:
    """A softmax of which `change(weights, total, sink)` makes something else: fp64 [tokens, heads, picks], and [tokens, heads, 1] with
    the sink and of the sink, relative to the largest score, or to `stop` if that is larger.
    """

    def softmax(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores = (q.double() @ rows.double().mT * fp32(scale)).masked_fill(~there[:, None], -torch.inf)
        top = scores.amax(2, keepdim=True)
        empty = top == -torch.inf
        top = top.masked_fill(empty, 0.0) if stop is None else top.clamp(min=stop)
        weights, of_sink = (scores - top).exp(), (sink.double()[:, None] - top).exp()
        changed, total = change(weights, weights.sum(2, keepdim=True), of_sink)[:2]
        output = (changed @ rows.double() + 0.0) / total.masked_fill(empty, 1.0)
        return output.float().to(torch.bfloat16), scores.logsumexp(2).float()

    return softmax


def changed(output: Callable[[Tensor], Tensor] = lambda o: o, lse: Callable[[Tensor, Tensor], Tensor] = lambda lse, sink: lse) -> Softmax:
    """The right softmax, and something done to what it gives; lse is given the sink as well."""

    def softmax(q: Tensor, rows: Tensor, there: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        found, its_lse = right._softmax(q, rows, there, sink, scale)
        return output(found), lse(its_lse, sink)

    return softmax


def given(change: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, float]]) -> Softmax:
    """The right softmax of other arguments."""
    return lambda *arguments: right._softmax(*change(*arguments))


def separately(q: Tensor, main: Any, picks: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
    """A softmax for each list, and the mean of both."""
    whole = attention()
    first = {name: value for name, value in options.items() if not name.startswith("extra")}
    if len(first) == len(options):
        return whole(q, main, picks, sink, **options)
    extra = options.get("extra", options.get("extra_kv"))
    lengths = {"lengths": options["extra_lengths"]} if options.get("extra_lengths") is not None else {}
    scale = {"scale": options["scale"]} if "scale" in options else {}
    one = whole(q, main, picks, sink, **first)
    other = whole(q, extra, options.get("extra_slots", options.get("extra_indices")), sink, **lengths, **scale)
    return AttentionResult(((one.output.float() + other.output.float()) / 2).to(torch.bfloat16), torch.logaddexp(one.lse, other.lse))


def split(merge: Callable[[Tensor, Tensor, Tensor | None], AttentionResult], with_sink: bool = False) -> Callable[..., AttentionResult]:
    """Halves of the first list and the second list apart, then `merge`; each with the sink already, if told so."""

    def call(q: Tensor, main: Any, picks: Tensor, sink: Tensor | None = None, **options: Any) -> AttentionResult:
        middle = picks.shape[1] // 2
        there = right._present(picks, options.get("lengths"), 2**62)
        scale = {"scale": options["scale"]} if "scale" in options else {}
        each = sink if with_sink else None
        with numerics("unrounded"):
            parts = [attention()(q, main, part, each, **scale) for part in (there[:, :middle], there[:, middle:])]
            if "extra" in options:
                second = right._present(options["extra_slots"], options.get("extra_lengths"), 2**62)
                parts.append(attention()(q, options["extra"], second, each, **scale))
        outputs, lses = (torch.stack(many).float() for many in zip(*parts, strict=True))
        return merge(outputs, lses, sink)

    return call
