"""Fast routing and load balancing: literals, then the reference bit for bit; batches, operators, graphs, errors."""

import inspect
from functools import partial
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from dsv4.fast import compiled, dispatch, use
from dsv4.fast import eplb as fast_eplb
from dsv4.fast import routing as fast
from dsv4.reference import eplb, routing
from dsv4.types import ArgumentError, BackendUnavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("triton", "inductor", "eager") if DEVICE == "cuda" else ("inductor", "eager")
INF, NAN = float("inf"), float("nan")
LENGTHS = (1, 2, 17, 128, 129, 4096)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0, scale=2.0):
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(DEVICE)


def ints(most, *shape, seed=0, dtype=torch.int32):
    return torch.randint(0, most, shape, generator=generator(seed), dtype=dtype).to(DEVICE)


def tensor(*values, dtype=None):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def same(got, expected):
    """Equal bits, NaN equal to NaN."""
    got, expected = (value if isinstance(value, tuple) else (value,) for value in (got, expected))
    for left, right in zip(got, expected, strict=True):
        if left is None or right is None:
            assert left is right
            continue
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        if left.is_floating_point():
            assert torch.equal(left.isnan(), right.isnan())
            left, right = (torch.where(value.isnan(), 0.0, value).view(torch.int32) for value in (left, right))
        assert torch.equal(left, right)


def placement(experts, redundant):
    logical = torch.cat([torch.arange(experts), torch.randint(0, experts, (redundant,), generator=generator(3))])
    logical = logical[torch.randperm(len(logical), generator=generator(4))].to(DEVICE)
    return eplb.make_placement(logical, experts, rank_map=eplb.make_placement(logical, experts).replicas[:, 0])


# Literals


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([1.0, 3.0, 2.0, 3.0, 0.0], [1, 3, 2]),
        ([0.5] * 5, [0, 1, 2]),
        ([-0.0, 0.0, -0.0, 0.0, -1.0], [0, 1, 2]),
        ([NAN, -INF, NAN, 1.0, NAN], [3, 1, -1]),
        ([NAN] * 5, [-1, -1, -1]),
        ([INF, 1.0, INF, -INF, NAN], [0, 2, 1]),
        ([-1.0, -2.0, -1e-45, 1e-45, -3.0], [3, 2, 0]),
    ],
)
@pytest.mark.parametrize("impl", WAYS)
def test_ties_and_specials(keys, expected, impl):
    assert fast.route_topk(tensor(keys), 3, impl=impl).tolist() == [expected]


@pytest.mark.parametrize("impl", WAYS)
def test_image_rows_by_literals(impl):
    """RT-05: logits 0; the text bias is for expert 3, the vision bias for expert 0."""
    bias, image_bias = tensor(0.0, 0.0, 0.0, 10.0), tensor(10.0, 0.0, 0.0, 0.0)
    result = fast.route(
        torch.zeros(4, 4, device=DEVICE), 1, scale=1.5, bias=bias, image_bias=image_bias, token_ids=tensor(5, 9, 6, 9), image_token_id=9,
        impl=impl,
    )  # fmt: skip
    assert result.ids.tolist() == [[3], [0], [3], [0]]
    assert result.weights.tolist() == [[1.5]] * 4


@pytest.mark.parametrize("impl", WAYS)
def test_scores_and_constant_rows(impl):
    """RT-01."""
    result = fast.route(tensor([-17.0] * 8, [89.0] * 8), 6, scale=1.5, impl=impl)
    assert result.weights.tolist() == [[0.25] * 6] * 2
    squares = fast.gate_scores(tensor([25.0, 64.0, 144.0, -INF, INF]), impl=None if impl == "triton" else impl)
    assert squares.tolist() == [[5.0, 8.0, 12.0, 0.0, INF]]


@pytest.mark.parametrize("impl", WAYS)
def test_home_rank_slots_by_literals(impl):
    """Spec M 1.8's example as a table row: L 4, S 1, rank 1, ids 0 5 7 and one that is absent; a second row is padding."""
    table = tensor([0, 5, 7, -1], [1, 2, 3, 4])
    result = fast.route(
        torch.full((2, 8), 25.0, device=DEVICE), 4, scale=2.0, table=table, token_ids=tensor(0, 1), ranks=2, rank=1, shared=1,
        shared_slots="home_rank", scale_placement="output", live_rows=tensor(1), counts=(counts := ints(1, 8)), impl=impl,
    )  # fmt: skip
    third = (torch.ones(()) / 3).item()
    assert result.ids.tolist() == [[0, 6, 8, -1, 9], [-1] * 5]
    assert result.weights.tolist() == [[third, third, third, 0.0, 0.5], [0.0] * 5]
    assert result.counts is counts
    assert counts.tolist() == [1, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("expert", "weight", "word"),
    [(3, 1.0, 0x33F80), (0, -0.0, 0x8000), (32767, 1.00390625, 0x7FFF3F80), (1, 1.01171875, 0x13F82), (2, NAN, 0x27FC0), (-1, 1.0, -65536),
     (32768, 1.0, -65536), (5, 3.4e38, 0x57F80)],
)  # fmt: skip
def test_packed_words(expert, weight, word):
    for impl in ("inductor", "eager"):
        assert fast.pack_topk(tensor([expert]), tensor([weight]), impl=impl).tolist() == [[word]]


def test_counters_are_added_to_in_place():
    counts = tensor(5, 0, 7, dtype=torch.int32)
    assert fast.count_experts(tensor([0, 2], [2, 3], [-1, 2]), counts) is counts
    assert counts.tolist() == [6, 0, 10]


def test_published_placements():
    """Spec M 2.7."""
    loads = tensor([90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27])
    result = fast_eplb.rebalance(loads, physical=16, ranks=8, groups=4, nodes=2)
    assert result.physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert result.counts.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    result = fast_eplb.rebalance(loads, physical=16, ranks=8)
    assert result.physical_to_logical.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    equal = fast_eplb.rebalance(torch.ones(1, 8), physical=12, ranks=4)
    assert equal.physical_to_logical.tolist() == [[4, 0, 0, 5, 1, 1, 6, 2, 2, 7, 3, 3]]


# The reference, bit for bit

SLOTS = {
    "none": {},
    "global": {"shared": 1, "shared_slots": "global", "shared_copies": 2},
    "home_rank": {"shared": 1, "shared_slots": "home_rank", "ranks": 8, "rank": 5},
}


def route_options(experts, tokens, *, images, replicated, slots, where, padded):
    options = {"bias": random(experts, seed=1, scale=0.1), "scale": 1.5, **SLOTS[slots], "scale_placement": where}
    if images:
        options |= {"image_bias": random(experts, seed=2, scale=0.3), "image_mask": ints(2, tokens, seed=3).bool()}
    if replicated:
        options |= {"placement": placement(experts, 16), "algorithm": "dynamic", "words": ints(2**31 - 1, tokens, 6)}
    if padded:
        options |= {"live_rows": tensor(2 * tokens // 3)}
    return options, ints(99, experts + 16 * replicated, seed=5)


@pytest.mark.parametrize("experts", [256, 384])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_every_combination(experts, slots, impl):
    logits = random(33, experts)
    for images, replicated, where, padded in product((False, True), (False, True), ("router", "output"), (False, True)):
        options, counts = route_options(experts, 33, images=images, replicated=replicated, slots=slots, where=where, padded=padded)
        got = fast.route(logits, 6, **options, counts=counts.clone(), impl=impl)
        same(tuple(got), tuple(routing.route(logits, 6, **options, counts=counts)))


def test_compiled_combinations():
    for images, slots in ((False, "none"), (True, "home_rank")):
        options, counts = route_options(384, 33, images=images, replicated=images, slots=slots, where="router", padded=images)
        got = fast.route(random(33, 384), 6, **options, counts=counts.clone(), impl="inductor")
        same(tuple(got), tuple(routing.route(random(33, 384), 6, **options, counts=counts)))


@pytest.mark.parametrize("impl", ["inductor", "eager"])
def test_single_steps(impl):
    at = {"impl": impl}
    logits = torch.cat([random(40, 384), random(40, 384, seed=6, scale=40.0)])
    logits[3, ::7], logits[5] = NAN, 0.0
    scores, bias, mask = routing.gate_scores(logits), random(384, scale=0.1), ints(2, 80).bool()
    same(fast.gate_scores(logits, **at), scores)
    ids = routing.route_topk(scores, 6, bias=bias.bfloat16(), image_mask=mask, image_bias=-bias)
    same(fast.route_topk(scores, 6, bias=bias.bfloat16(), image_mask=mask, image_bias=-bias, **at), ids)
    given = torch.where(ints(9, 80, 6) == 0, ints(500, 80, 6, seed=8) - 50, ids)
    for number, scale, epsilon in ((ids, 1.5, 1e-20), (given.long(), 0.1, 0.0)):
        same(
            fast.route_weights(scores, number, scale=scale, epsilon=epsilon, **at),
            routing.route_weights(scores, number, scale=scale, epsilon=epsilon),
        )
    tokens, table = ints(60, 80) - 5, ints(400, 50, 6, dtype=torch.int64) - 8
    options = {"image_mask": mask, "image_bias": bias}
    same(fast.route_hash(scores, tokens, table, **options, **at), routing.route_hash(scores, tokens, table, **options))
    same(fast.route_hash(scores, tokens, table[:0], **at), torch.full((80, 6), -1, dtype=torch.int32, device=DEVICE))
    weights = random(80, 6)
    weights[7] = NAN
    same(tuple(fast.mask_padding(given, weights, 30, **at)), tuple(routing.mask_padding(given, weights, 30)))
    same(tuple(fast.mask_padding(given, weights, tensor(90), **at)), tuple(routing.mask_padding(given, weights, 80)))
    same(fast.pack_topk(given * 99, weights, **at), routing.pack_topk(given * 99, weights))
    options = {"experts": 384, "scale": 2.5, "scale_placement": "dispatch"}
    same(tuple(fast.append_shared_slots(given, weights, 2, **options, copies=3, **at)),
         tuple(routing.append_shared_slots(given, weights, 2, **options, copies=3)))  # fmt: skip
    same(tuple(fast.remap_home_rank_slots(given, weights, 2, **options, ranks=8, rank=7, **at)),
         tuple(routing.remap_home_rank_slots(given, weights, 2, **options, ranks=8, rank=7)))  # fmt: skip


@pytest.mark.parametrize("impl", ["inductor", "eager"])
@pytest.mark.parametrize("algorithm", ["none", "static", "dynamic", "row_modulo", "row_index", "probability"])
def test_maps(algorithm, impl):
    table = placement(24, 24)
    table.replicas[3], table.counts[0], table.counts[1] = 99, 0, 50
    probabilities = random(*table.replicas.shape).abs()
    probabilities[5] = 0
    drawn = {"words": ints(2**31 - 1, 50, 4) - 2**30, "uniforms": random(50, 4).abs() % 1, "probabilities": probabilities, "rank": 3}
    for ids in (ints(28, 50, 4) - 2, ints(2**40, 50, 4, dtype=torch.int64) % 26):
        same(fast_eplb.map_to_physical(ids, table, algorithm, **drawn, impl=impl), eplb.map_to_physical(ids, table, algorithm, **drawn))


@pytest.mark.parametrize("kind", ["random", "ties", "zero", "hot"])
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize(
    ("experts", "physical", "ranks", "groups", "nodes"), [(64, 80, 16, 1, 1), (48, 64, 8, 8, 2), (24, 24, 6, 3, 2), (16, 16, 16, 4, 4)]
)
def test_placements(experts, physical, ranks, groups, nodes, distinct, kind):
    loads = (random(3, experts).abs() * 100).round() / 7
    if kind == "ties":
        loads = (loads / 9).round()
    elif kind == "zero":
        loads = loads * 0
    elif kind == "hot":
        loads[:, 5] *= 60
    options = {"physical": physical, "ranks": ranks, "groups": groups, "nodes": nodes, "distinct_per_rank": distinct}
    for given in (loads, loads.long(), loads[:0]):
        same(tuple(fast_eplb.rebalance(given, **options)), tuple(eplb.rebalance(given, **options)))


# Batches


@pytest.mark.parametrize("impl", WAYS)
def test_rows_do_not_depend_on_their_batch(impl):
    logits, bias = random(4096, 384), random(384, scale=0.1)
    logits[::5] = 1 + logits[::5] * 1e-5
    route = partial(fast.route, k=6, scale=1.5, bias=bias, impl=impl)
    whole = route(logits)
    for length in LENGTHS:
        part = route(logits[:length])
        same((part.ids, part.weights), (whole.ids[:length], whole.weights[:length]))
    for order in (torch.arange(4095, -1, -1), torch.randperm(4096, generator=generator(1)), torch.arange(4096).roll(7)):
        moved = route(logits[order.to(DEVICE)])
        same((moved.ids, moved.weights), (whole.ids[order.to(DEVICE)], whole.weights[order.to(DEVICE)]))


@pytest.mark.parametrize("impl", [way for way in WAYS if way != "inductor"])
def test_logits_do_not_depend_on_their_batch(impl):
    spread = random(4096, 512, seed=2, scale=6.0).exp()
    x, weight = (random(4096, 512) * spread).bfloat16(), (random(256, 512, seed=1) * spread[:256]).bfloat16()
    whole = fast.gate_logits(x, weight, impl=impl)
    for length in LENGTHS:
        same(fast.gate_logits(x[:length], weight, impl=impl), whole[:length])
    for order in (torch.arange(4095, -1, -1), torch.randperm(4096, generator=generator(1)), torch.arange(4096).roll(7)):
        same(fast.gate_logits(x[order.to(DEVICE)], weight, impl=impl), whole[order.to(DEVICE)])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_logits_of_whole_numbers_are_exact(dtypes):
    for tokens in (0, 1, 65, 130):
        x, weight = ints(15, tokens, 300).to(dtypes[0]) - 7, ints(15, 40, 300, seed=1).to(dtypes[1]) - 7
        same(fast.gate_logits(x, weight), (x.long() @ weight.long().T if DEVICE == "cpu" else (x.double() @ weight.double().T)).float())


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("slots", SLOTS)
def test_idle_ranks(impl, slots):
    counts = ints(9, 16)
    options = SLOTS[slots] | {"table": ints(16, 5, 3), "token_ids": ints(5, 0), "live_rows": 0, "counts": counts.clone()}
    result = fast.route(torch.empty(0, 16, device=DEVICE), 3, scale=1.5, **options, impl=impl)
    same(tuple(result), tuple(routing.route(torch.empty(0, 16, device=DEVICE), 3, scale=1.5, **{**options, "counts": counts})))


# Operators and graphs


def samples():
    scores, ids, weights = random(5, 16).abs(), ints(16, 5, 3), random(5, 3)
    table = placement(16, 8)
    tables = (table.replicas, table.counts, table.rank_map)
    step = (1.5, 1e-20)
    routed = (24, 4, 1, 2, True, 1, 0, tensor(3))  # physical, ranks, rank, shared, home rank, copies, live rows: host and device
    return {
        "gate_logits": (random(5, 32), random(16, 32)),
        "gate_scores": (scores,),
        "route_topk": (scores, 3, random(16), ints(2, 5).bool(), random(16)),
        "route_weights": (scores, ids, *step),
        "route_hash": (scores, ints(9, 5), ints(16, 9, 3), None, None),
        "append_shared_slots": (ids, weights, 2, 16, 1.5, 2),
        "remap_home_rank_slots": (ids, weights, 2, 16, 4, 1, 1.5),
        "mask_padding": (ids, weights, 3, None),
        "pack_topk": (ids, weights),
        "count_experts": (ids, ints(9, 16)),
        "map_to_physical": (ids, 24, *tables, "row_modulo", 1, None, None, None),
        "route": (
            scores,
            3,
            1.5,
            1.0,
            1e-20,
            random(16),
            None,
            None,
            None,
            None,
            None,
            *tables,
            "static",
            None,
            None,
            None,
            *routed,
            ints(9, 24),
        ),
    }


@pytest.mark.parametrize("name", samples())
def test_operators_keep_their_promises(name):
    torch.library.opcheck(getattr(torch.ops.dsv4, name).default, (*samples()[name], "eager"))


def test_chain_is_one_graph():
    """One graph holds the whole step, counters and all."""

    def step(logits, bias, table, counts, live):
        result = fast.route(
            logits, 6, scale=1.5, bias=bias, placement=table, algorithm="static", shared=1, shared_slots="global", live_rows=live,
            counts=counts, impl="eager",
        )  # fmt: skip
        return fast.pack_topk(result.ids, result.weights, impl="eager"), result.counts

    logits, bias, table, counts = random(9, 64), random(64), placement(64, 8), ints(5, 72)
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = step(logits, bias, table, counts.clone(), tensor(7))
    got = traced(logits, bias, table, kept := counts.clone(), tensor(7))
    same(got, expected)
    assert torch.equal(kept, expected[1])


def test_graphs_per_function():
    compiled._graph.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    for tokens in (0, 1, 127, 128, 129, 384):
        for logits in (random(tokens, 384), random(2 * tokens, 384)[::2], random(tokens, 768)[:, ::2]):
            fast.gate_scores(logits, impl="inductor")
            with torch.inference_mode():
                fast.gate_scores(logits.clone(), impl="inductor")
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    counters.clear()
    for tokens in (0, 1, 127, 128, 129, 384):
        fast.route(random(tokens, 384), 6, scale=1.5, bias=random(384), impl="inductor", live_rows=tokens)
        with torch.inference_mode():
            fast.route(random(tokens, 384), 6, scale=1.5, bias=random(384), impl="inductor", live_rows=tokens)
    assert 1 <= counters["stats"]["unique_graphs"] <= 4  # the choice, the mask


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs")
def test_replays_follow_their_inputs():
    """Text and image tokens, live rows and logits switched in place (spec M 10 row 4)."""
    logits, tokens, live, counts = random(64, 384), ints(2, 64, dtype=torch.int64), tensor(64), ints(1, 384)
    options = {
        "scale": 1.5,
        "bias": random(384),
        "image_bias": random(384, seed=1),
        "token_ids": tokens,
        "image_token_id": 1,
        "live_rows": live,
    }
    fast.route(logits, 6, **options, counts=counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fast.route(logits, 6, **options, counts=counts)
    for seed in range(6):
        logits.copy_(random(64, 384, seed=seed))
        tokens.copy_(ints(2, 64, seed=seed, dtype=torch.int64))
        live.fill_(64 - 9 * seed)
        expected = routing.route(logits, 6, **options, counts=counts)
        graph.replay()
        same(tuple(got), tuple(expected))


# Errors


def test_gradients_are_refused():
    for call in (
        lambda x: fast.route(x, 2, scale=1.0),
        lambda x: fast.gate_scores(x),
        lambda x: fast.route_weights(x, ints(8, 3, 2)),
        lambda x: fast.gate_logits(x, random(4, 8)),
        lambda x: fast.mask_padding(ints(8, 3, 8), x, 1),
    ):
        x = random(3, 8).requires_grad_()
        with pytest.raises(ArgumentError, match="no backward"):
            call(x)
        with torch.no_grad():
            call(x)


def test_wrong_numbers_raise_before_counters_are_touched():
    counts = ints(1, 8)
    with pytest.raises(ArgumentError) as caught:
        fast.route(random(3, 8), 9, scale=1.0, counts=counts)
    assert caught.value.argument == "k"
    assert not counts.any()


@pytest.mark.skipif(DEVICE == "cuda", reason="triton runs here")
def test_a_backend_that_cannot_run_is_named():
    with pytest.raises(BackendUnavailable, match="wants a CUDA device"):
        fast.route(random(3, 8), 2, scale=1.0, impl="triton")


def test_every_way_keeps_what_may_be_demanded():
    with use(batch_invariant=True, deterministic=True):
        for function, rows in dispatch.TABLES.items():
            if function.startswith(("routing.", "eplb.")):
                assert all(row.deterministic and row.batch_invariant and row.graph_safe for row in rows)
        fast.gate_logits(random(3, 8), random(4, 8))


@pytest.mark.parametrize("name", [*fast.__all__, "map_to_physical", "rebalance"])
def test_signatures_equal_the_reference(name):
    ours, theirs = (
        inspect.signature(getattr(first if hasattr(first, name) else second, name)).parameters
        for first, second in ((fast, fast_eplb), (routing, eplb))
    )
    assert [p for key, p in ours.items() if key != "impl"] == list(theirs.values())
