"""Rows of products do not depend on the rows beside them: sums that cancel, of which an order of additions is all that is left, with any
number of rows, in any place, with one thread and with two."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from dsv4.fast import attention, compressor, hyper_connections, indexer, linear, output_projection, product_bodies, routing, use
from dsv4.parity import cancelling
from dsv4.parity.strategies import generator
from dsv4.reference import kv_cache
from dsv4.types import IndexKeys, IndexQueries, PagedRows, Quantized

ROWS = 64
BATCHES = [
    *(list(range(count)) for count in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32, 33, 48, 63, 64)),
    *([row] for row in (1, 7, 23, 63)),
    list(range(ROWS))[::-1],
    torch.randperm(ROWS, generator=generator(9)).tolist(),
    [*range(40, 64), *range(3)],
    [5] * 11 + [0],
]


class Case(NamedTuple):
    """A function of some of ROWS rows."""

    impls: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    cancelled: int = 0  # the result that shows what is left of a sum


def gate(seed, k=1000, experts=40):
    x, weight = cancelling.pair((ROWS, k), (experts, k), seed)
    return lambda rows, impl: (routing.gate_logits(x[rows], weight, impl=impl),)


def project(seed):
    x, both = cancelling.pair((ROWS, 512), (600, 512), seed)
    return lambda rows, impl: tuple(compressor.project(x[rows], *both.split(300), impl=impl))


def statistics(streams, hidden, mixes, precision="exact"):
    def made(seed):
        x, fn = cancelling.pair((ROWS, streams * hidden), (mixes, streams * hidden), seed)
        options = {"eps": 1e-6, "precision": precision}
        return lambda rows, impl: (hyper_connections.mix_statistics(x.view(ROWS, streams, hidden)[rows], fn, **options, impl=impl),)

    return made


def codes(shape, seed):
    return torch.randn(shape, generator=generator(seed)).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn)


def exponents(shape, seed):
    return torch.randint(97, 157, shape, generator=generator(seed), dtype=torch.uint8)


def coded(shape, block, sign, seed, tall=1):
    """Codes and scales of rows whose second half is `sign` times the first."""
    *many, rows, k = shape
    numbers = cancelling.opposed(codes(shape, seed).float(), sign, block).to(torch.float8_e4m3fn)
    return Quantized(numbers, cancelling.opposed(exponents((*many, -(-rows // tall), k // block), seed + 7), 1))


def linear_fp8(n, k, block):
    def made(seed):
        x, w = coded((ROWS, k), block, -1, seed), coded((n, k), block, 1, seed + 1, block)
        return lambda rows, impl: (linear.linear_fp8(Quantized(x.codes[rows], x.scales[rows]), *w, block=block, impl=impl),)

    return made


def linear_mxfp8(seed):
    x, w = coded((ROWS, 512), 32, -1, seed), coded((200, 512), 32, 1, seed + 1)
    w = linear.Mxfp8Pair(w.codes, packed(w.scales))
    return lambda rows, impl: (linear.linear_mxfp8(linear.Mxfp8Pair(x.codes[rows], packed(x.scales[rows])), w, impl=impl),)


def packed(scales):
    from dsv4.reference.scales import pack_ue8m0

    return pack_ue8m0(scales)


def groups(seed):
    o, weight = cancelling.pair((ROWS, 3, 256), (3, 40, 256), seed)
    return lambda rows, impl: (output_projection.project_groups(o[rows], weight.bfloat16(), impl=impl),)


def groups_fp8(seed):
    o, w = coded((ROWS, 2, 2048), 128, -1, seed), coded((2, 160, 2048), 128, 1, seed + 1, 128)
    return lambda rows, impl: (output_projection.project_groups(Quantized(o.codes[rows], o.scales[rows]), *w, impl=impl),)


def index(seed, heads=64, entries=200):
    """Heads cancel in pairs."""
    half = codes((ROWS, heads // 2, 128), seed)
    weights = cancelling.opposed(cancelling.spread((ROWS, heads), seed + 1), -1)
    q, k = IndexQueries(torch.cat([half, half], 1), None, weights), IndexKeys(codes((entries, 128), seed + 2), torch.rand(entries) + 0.5)
    ends = torch.full((ROWS,), entries)

    def run(rows, impl):
        some = IndexQueries(q.codes[rows], None, q.weights[rows])
        return (indexer.index_logits(some, k, ends=ends[rows], impl=impl),)

    return run


def sparse(heads, dim, scores):
    """Tokens of so many scores that cancel, which lse shows; of none, whose values do, in an output of equal weights."""

    def made(seed):
        if scores:
            q, kv = (part.bfloat16() for part in cancelling.pair((ROWS, heads, dim), (50, dim), seed))
            picks = torch.randint(0, 50, (ROWS, scores), generator=generator(seed + 2)).int()
        else:
            q, half = torch.zeros(ROWS, heads, dim).bfloat16(), cancelling.spread((40, dim), seed).bfloat16()
            kv = torch.cat([half, -half])
            picks = torch.stack([torch.randperm(80, generator=generator(seed + row)) for row in range(ROWS)]).int()
        return lambda rows, impl: tuple(attention.sparse_attention(q[rows], kv, picks[rows], impl=impl))

    return made


def two_blocks(seed):
    """Three heads and two blocks, whose values cancel once the first block's are scaled by the second one's maximum."""
    values = cancelling.spread((ROWS, 64), seed).bfloat16()
    values[:, :4] = (torch.randn(ROWS, 4, generator=generator(seed + 1)) * torch.tensor([1, 2**-8, 2**-16, 2**-24])).bfloat16()
    others, largest = -values, torch.zeros(1, 64).bfloat16()
    others[:, :4], largest[0, 0] = values[:, :4], 4.75
    kv, q = torch.cat([values, others, largest]), torch.zeros(ROWS, 3, 64).bfloat16()
    q[:, :, :4] = 1
    picks = torch.full((ROWS, 321), -1, dtype=torch.int32)
    picks[:, 0], picks[:, 200], picks[:, 201] = torch.arange(ROWS), ROWS + torch.arange(ROWS), 2 * ROWS
    return lambda rows, impl: tuple(attention.sparse_attention(q[rows], kv, picks[rows], scale=1.0, impl=impl))


def paged(seed):
    """Packed rows, whose groups have sizes of their own."""
    sizes = torch.exp2(torch.randint(-30, 30, (40, 8, 1), generator=generator(seed)).float())
    half, dim = (torch.randn(40, 8, 64, generator=generator(seed + 1)) * sizes).flatten(1).bfloat16(), 512
    pages = torch.zeros(5, 16 * 640, dtype=torch.uint8)
    pages = kv_cache.store_kv(torch.cat([half, -half]), pages, torch.arange(80), layout="v4", page_size=16)
    q = torch.zeros(ROWS, 16, dim).bfloat16()
    slots = torch.stack([torch.randperm(80, generator=generator(seed + row)) for row in range(ROWS)])
    return lambda rows, impl: tuple(attention.paged_attention(q[rows], PagedRows(pages, "v4", 16), slots[rows], impl=impl))


EAGER, BOTH = ("eager",), ("eager", "inductor")
CASES = {
    "gate_logits": Case(EAGER, gate),
    "project": Case(EAGER, project),
    "mix_statistics": Case(EAGER, statistics(4, 256, 24)),
    "mix_statistics_of_one_row": Case(EAGER, statistics(4, 130, 8)),
    "mix_statistics_compensated": Case(EAGER, statistics(4, 256, 24, "tf32_compensated")),
    "linear_fp8": Case(BOTH, linear_fp8(300, 2048, 128)),
    "linear_fp8_narrow": Case(EAGER, linear_fp8(5, 4096, 32)),
    "linear_mxfp8": Case(BOTH, linear_mxfp8),
    "project_groups": Case(EAGER, groups),
    "project_groups_fp8": Case(BOTH, groups_fp8),
    "index_logits": Case(EAGER, index),
    "attention_scores": Case(EAGER, sparse(64, 512, 1), 1),
    "attention_scores_small": Case(EAGER, sparse(3, 64, 1), 1),
    "attention_scores_many": Case(EAGER, sparse(8, 512, 32), 1),
    "attention_values": Case(EAGER, sparse(64, 512, 0)),
    "attention_values_of_one_head": Case(EAGER, sparse(1, 512, 0)),
    "attention_of_two_blocks": Case(EAGER, two_blocks, 1),
    "paged_attention": Case(EAGER, paged),
}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("name", "impl"), [(name, impl) for name, case in CASES.items() for impl in case.impls])
def test_rows_are_the_same_in_any_batch(name, impl, threads):
    case = CASES[name]
    for seed in (0, 100):
        run = case.run(seed)
        with use(batch_invariant=True):
            whole = run(list(range(ROWS)), impl)
            assert (whole[case.cancelled] != 0).double().mean() > 0.1  # something is left of the sums
            for rows in BATCHES:
                for expected, got in zip(whole, run(rows, impl), strict=True):
                    assert torch.equal(expected[rows], got), f"{len(rows)} rows"


def test_sums_that_cancel_show_their_order():
    """What these inputs are for: of one order of additions something else is left than of another."""
    first, other = cancelling.pair((200, 512), (200, 512), 3)
    terms = first.double() * other.double()
    assert (terms.sort(1).values == -terms.sort(1, descending=True).values).all()
    forwards, backwards = terms.cumsum(1)[:, -1], terms.flip(1).cumsum(1)[:, -1]
    assert (forwards != backwards).double().mean() > 0.9
    assert (forwards.bfloat16() != backwards.bfloat16()).double().mean() > 0.9


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 40])
def test_fixed_products_are_products(monkeypatch, count):
    a, b = (torch.randint(-9, 9, shape, generator=generator(1)).double() for shape in ((count, 3, 40), (count, 40, 7)))
    assert torch.equal(product_bodies.fixed_products(a, b), torch.bmm(a, b))
    blocks = product_bodies.turned(a[:, 0], 16)
    sums = torch.zeros(len(blocks), 7, 16).double()
    product_bodies.add_products(sums, b[0].t().contiguous(), blocks)
    assert torch.equal(product_bodies.turned_back(sums, count), a[:, 0] @ b[0])
