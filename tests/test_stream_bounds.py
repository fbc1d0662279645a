"""The bounds of hyper-connections hold for fp32 in the worst order, one term after another, with each exponential, quotient and root off by
a random part of the ulps that fast hardware is allowed; on the lattices such an evaluation is exact all the same."""

from functools import reduce

import pytest
import torch

from dsv4.parity import contracts, engine
from dsv4.parity.candidates import Candidate
from dsv4.parity.levels import Level
from dsv4.parity.profiles import PROFILES
from dsv4.reference import hyper_connections as reference
from dsv4.reference.quantization import quantize_fp8
from dsv4.types import Boundary, StatisticsPrecision, StreamMix

SOURCE = torch.Generator().manual_seed(1)


def off(exact, ulps):
    """Each number moved by up to so many ulps. 0 and powers of two stay: hardware has them right where its inputs are powers of two."""
    mantissa, exponent = torch.frexp(exact.double())
    noise = 2 * torch.rand(exact.shape, generator=SOURCE, dtype=torch.float64) - 1
    moved = exact.double() + noise * ulps * torch.ldexp(torch.ones_like(mantissa), exponent - 24)
    return torch.where((mantissa.abs() == 0.5) | (exact == 0), exact, moved.float())


def exp(x):
    return off(x.exp(), 2 + 1.173 * x.double().abs())


def divide(a, b):
    return off(a / b, 2)


def sigmoid(z):
    return divide(torch.ones_like(z), 1 + exp(-z))


def added(terms, dim):
    return reduce(torch.add, terms.unbind(dim))


def mix_statistics(streams, fn, *, eps, precision="exact"):
    x, weight = streams.flatten(1).float(), reference._at_precision(fn, StatisticsPrecision(precision))
    totals, squares = torch.zeros(len(x), len(fn)), torch.zeros(len(x), 1)
    for index in range(x.shape[1]):
        column = x[:, index : index + 1]
        totals, squares = totals + column * weight[None, :, index], squares + column * column
    return totals * off((squares / x.shape[1] + eps).rsqrt(), 2)


def split_mix(mixes, scale, base, *, iterations=20, eps=1e-6):
    count = int((mixes.shape[1] + 1) ** 0.5) - 1
    z = mixes * scale.repeat_interleave(torch.tensor([count, count, count * count])) + base
    pre, post, logits = z.split([count, count, count * count], 1)
    logits = logits.unflatten(1, (count, count))
    powers = exp(logits - logits.amax(2, keepdim=True))
    comb = divide(powers, added(powers, 2)[:, :, None]) + eps
    comb = divide(comb, (added(comb, 1) + eps)[:, None])
    for _ in range(iterations - 1):
        comb = divide(comb, (added(comb, 2) + eps)[:, :, None])
        comb = divide(comb, (added(comb, 1) + eps)[:, None])
    return StreamMix(sigmoid(pre) + eps, 2 * sigmoid(post), comb)


def collapse(streams, pre):
    return added(streams.float() * pre[:, :, None], 1).bfloat16()


def expand(y, streams, post, comb):
    return (added(comb[:, :, :, None] * streams.float()[:, :, None], 1) + post[:, :, None] * y.float()[:, None]).bfloat16()


def head_collapse(streams, fn, scale, base, *, norm_eps, eps):
    return collapse(streams, sigmoid(mix_statistics(streams, fn, eps=norm_eps) * scale + base) + eps)


def boundary(y, streams, post, comb, fn, scale, base, weight, *, norm_eps, rms_eps, carried_pre=None, **options):
    precision, output, layout = options.pop("precision", "exact"), options.pop("output", "bf16"), options.pop("scale_layout", "packed")
    new = reference.expand(y, streams, post, comb)
    mix = split_mix(mix_statistics(new, fn, eps=norm_eps, precision=precision), scale, base, **options)
    row = collapse(new, mix.pre if carried_pre is None else carried_pre).float()
    mean = added(row.square(), 1)[:, None] / row.shape[1] + rms_eps
    normed = (row * off(mean.rsqrt(), 2) * weight.float()).bfloat16()
    return Boundary(new, *mix, normed, None) if output == "bf16" else Boundary(new, *mix, *quantize_fp8(normed, 32, scale_layout=layout))


CALLS = {call.__name__: call for call in (mix_statistics, split_mix, collapse, expand, head_collapse, boundary)}
DOMAINS = [
    (contract.function, domain.name)
    for contract in contracts.for_component("hyper_connections")
    for domain in contract.domains
    if domain.name != "forms" and all(row.level is not Level.E2 for row in contract.outputs if row.covers(domain.name) and row.domains)
]


def outcome_of(function, domain, call):
    contract = contracts.find(f"hyper_connections.{function}")
    candidate = Candidate("fp32", call)
    return engine.check(contract, contract.domain(domain), candidate, torch.device("cpu"), PROFILES["smoke"])


@pytest.mark.parametrize(("function", "domain"), DOMAINS)
def test_fp32_with_fast_primitives(function, domain):
    outcome = outcome_of(function, domain, CALLS[function])
    assert outcome.result == "passed", outcome.message
    # and the bounds are no larger than that: sums of 256 terms are the loosest, for these may be added by tensor cores
    shares = [row.share for row in outcome.rows if row.share is not None]
    assert all(share > 0.005 for share in shares)


def test_every_exact_domain_was_there():
    assert {function for function, _ in DOMAINS} == set(CALLS)


def test_a_millionth_is_seen():
    """Where logits are clear, errors of single steps die out at once and the bound is a few roundings."""

    def nearly(mixes, scale, base, **options):
        mix = reference.split_mix(mixes, scale, base, **options)
        rows = torch.tensor([1 + 2.0**-20, 1.0, 1.0, 1.0])
        return StreamMix(mix.pre, mix.post, mix.comb * rows[None, :, None])

    assert "outside the bound" in outcome_of("split_mix", "drawn", nearly).message
