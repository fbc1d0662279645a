"""Expert placement against the published algorithm (spec M 2.7 and golden/eplb), SGLang's rules, literals, and reported bugs."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.reference import eplb, routing
from dsv4.types import ArgumentError

GOLDEN = Path(__file__).parent / "golden"
README = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def loads_of(seed, *shape):
    """Counts with many ties and a few hot experts."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 6, shape, generator=generator)
    return counts * torch.where(torch.rand(shape, generator=generator) < 0.1, 40, 1)


def test_vector_of_the_published_readme():
    result = eplb.rebalance(torch.tensor(README), physical=16, ranks=8, groups=4, nodes=2)
    assert result.physical_to_logical.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert result.counts.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert all(tensor.dtype == torch.int32 for tensor in result)


def test_vector_of_the_global_policy():
    result = eplb.rebalance(torch.tensor(README), physical=16, ranks=8)
    assert result.physical_to_logical.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]
    assert result.duplicates.tolist() == [[0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 0]]
    for groups, nodes in ((3, 2), (1, 4)):  # groups that nodes do not divide
        other = eplb.rebalance(torch.tensor(README), physical=16, ranks=8, groups=groups, nodes=nodes)
        assert torch.equal(other.physical_to_logical, result.physical_to_logical)


def test_equal_loads_show_the_stable_sort():
    result = eplb.rebalance(torch.ones(1, 8), physical=12, ranks=4)
    assert result.physical_to_logical.tolist() == [[4, 0, 0, 5, 1, 1, 6, 2, 2, 7, 3, 3]]


def test_packs_of_one_group_keep_their_order():
    loads = torch.tensor([[1, 2, 9, 8]])  # the heavier group would come first
    assert eplb.rebalance(loads, physical=4, ranks=4, groups=2, nodes=2).physical_to_logical.tolist() == [[0, 1, 2, 3]]


CASES = sorted({name.rpartition(".")[0] for name in load_file(GOLDEN / "eplb.safetensors")})


@pytest.mark.parametrize("case", CASES)
def test_published_code(case):
    golden = load_file(GOLDEN / "eplb.safetensors")
    physical, groups, nodes, ranks, _ = map(int, case.split("."))
    result = eplb.rebalance(golden[f"{case}.loads"], physical=physical, ranks=ranks, groups=groups, nodes=nodes)
    assert torch.equal(result.physical_to_logical, golden[f"{case}.phy2log"])
    assert torch.equal(result.replicas, golden[f"{case}.log2phy"])
    assert torch.equal(result.counts, golden[f"{case}.logcnt"])


@pytest.mark.parametrize(
    ("experts", "physical", "ranks", "groups", "nodes"),
    [
        (4, 6, 2, 1, 1),
        (4, 9, 3, 1, 1),
        (4, 12, 4, 1, 1),
        (5, 9, 3, 1, 1),
        (12, 16, 8, 4, 2),
        (16, 32, 4, 4, 2),
        (5, 20, 4, 1, 1),
        (24, 24, 4, 1, 1),
    ],
)
def test_distinct_placements_are_whole(experts, physical, ranks, groups, nodes):
    for seed in range(20):
        result = eplb.rebalance(
            loads_of(seed, 3, experts), physical=physical, ranks=ranks, groups=groups, nodes=nodes, distinct_per_rank=True
        )
        assert (result.counts.sum(1) == physical).all()
        assert (result.counts >= 1).all()
        assert (result.duplicates == 0).all()
        for layer in range(3):
            logical = result.physical_to_logical[layer].tolist()
            assert all(
                len(set(logical[first : first + physical // ranks])) == physical // ranks for first in range(0, physical, physical // ranks)
            )
            for expert in range(experts):
                held = sorted(slot for slot in result.replicas[layer, expert].tolist() if slot >= 0)
                assert held == [slot for slot, holder in enumerate(logical) if holder == expert]


def test_distinct_rule_changes_nothing_without_duplicates():
    loads = torch.tensor(README)
    plain = eplb.rebalance(loads, physical=16, ranks=8, groups=4, nodes=2)
    distinct = eplb.rebalance(loads, physical=16, ranks=8, groups=4, nodes=2, distinct_per_rank=True)
    assert (plain.duplicates == 0).all()
    assert torch.equal(plain.physical_to_logical, distinct.physical_to_logical)


def test_distinct_repair_by_hand():
    # replicas a a b b c c of loads 3 3 2 2 1 1 on two ranks of three: a|a, then b to each, then c to each
    assert eplb.rebalance(ints([6, 4, 2]), physical=6, ranks=2, distinct_per_rank=True).physical_to_logical.tolist() == [[0, 1, 2, 0, 1, 2]]
    # Loads 9 1 1 1 on two ranks of three: a may have only two replicas, b gets the other, each is 0.5 heavy. Visiting a0 a1 c d b0 b1:
    # rank 0 has a0 c b0 and is full at 6, rank 1 has a1 d and takes b1.
    assert eplb.rebalance(ints([9, 1, 1, 1]), physical=6, ranks=2, distinct_per_rank=True).physical_to_logical.tolist() == [
        [0, 2, 1, 0, 3, 1]
    ]
    # Loads 4 4 4 2 on two ranks of three: visiting c (4), then a0 b0 d a1 b1 (2 each) gives rank 0 c d a1 and rank 1 a0 b0. b1 finds
    # room only beside b0. The last of rank 0 that rank 1 lacks is d, not a1: d moves over, b1 takes its place.
    assert eplb.rebalance(ints([4, 4, 4, 2]), physical=6, ranks=2, distinct_per_rank=True).physical_to_logical.tolist() == [
        [2, 1, 0, 0, 1, 3]
    ]


def placement(**options):
    """4 logical experts on 6 slots: 0 in 0 and 4, 1 in 1, 2 in 2 and 5, 3 in 3."""
    return eplb.make_placement(torch.tensor([0, 1, 2, 3, 0, 2]), 4, **options)


def test_placement_tables():
    tables = placement()
    assert tables.replicas.tolist() == [[0, 4], [1, -1], [2, 5], [3, -1]]
    assert tables.counts.tolist() == [2, 1, 2, 1]
    assert tables.rank_map is None


IDS = ints([0, 2], [3, 1], [2, -1], [4, 0])


@pytest.mark.parametrize(
    ("algorithm", "options", "expected"),
    [
        ("none", {}, [[0, 2], [3, 1], [2, -1], [-1, 0]]),
        ("static", {}, [[4, 5], [3, 1], [5, -1], [-1, 4]]),
        # words 1 and 65536 = 0 (mod 2^16); -1 is 65535
        ("dynamic", {"words": ints([1, 65536], [7, 7], [-1, 3], [1, 65535])}, [[4, 2], [3, 1], [5, -1], [-1, 4]]),
        ("row_modulo", {"rank": 1}, [[4, 5], [3, 1], [5, -1], [-1, 0]]),  # 1, 23334, 46667, 70000
        ("row_modulo", {}, [[0, 2], [3, 1], [2, -1], [-1, 4]]),
        ("row_index", {"rank": 3}, [[0, 2], [3, 1], [2, -1], [-1, 4]]),
    ],
)
def test_algorithms(algorithm, options, expected):
    tables = placement(rank_map=torch.tensor([4, 1, 5, 3]))
    got = eplb.map_to_physical(IDS, tables, algorithm, **options)
    assert got.tolist() == expected
    assert got.dtype == torch.int32
    assert eplb.map_to_physical(IDS.long(), tables, algorithm, **options).tolist() == expected


def test_words_count_modulo_65536_first():
    tables = eplb.make_placement(torch.zeros(3, dtype=torch.int32), 1)
    words = torch.tensor([[65535, 65536, -1, 65540, 5]])
    assert eplb.map_to_physical(torch.zeros(1, 5, dtype=torch.int32), tables, "dynamic", words=words).tolist() == [[0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("probabilities", "uniform", "slot"),
    [
        ([0.25, 0.75], 0.0, 2),
        ([0.25, 0.75], 0.24999, 2),
        ([0.25, 0.75], 0.25, 5),
        ([1.0, 3.0], 0.2499, 2),  # need not add up to 1
        ([0.0, 1.0], 0.0, 5),
        ([1.0, 0.0], 1 - 2.0**-24, 2),
        ([0.5, 0.0], 1 - 2.0**-24, 2),
        ([0.0, 0.0], 0.5, 5),
        ([1.0, 0.0], float("nan"), 2),
        ([1.0, 1.0], 7.0, 5),
    ],
)
def test_probability_table(probabilities, uniform, slot):
    table = torch.zeros(4, 2)
    table[2] = torch.tensor(probabilities)
    table[3] = torch.tensor([0.0, 1.0])  # expert 3 has one replica: the pad's probability does not count
    got = eplb.map_to_physical(ints([2, 3]), placement(), "probability", probabilities=table, uniforms=torch.full((1, 2), uniform))
    assert got.tolist() == [[slot, 3]]


def test_row_modulo_is_exact_for_many_rows():
    rows = 2**31 // 23333 + 5
    tables = eplb.make_placement(torch.zeros(7, dtype=torch.int32), 1)
    got = eplb.map_to_physical(torch.zeros(rows, 1, dtype=torch.int32), tables, "row_modulo", rank=2)
    assert got[[0, 1, rows - 1], 0].tolist() == [2, (2 + 23333) % 7, (2 + 23333 * (rows - 1)) % 7]


def test_wrong_tables_never_reach_beyond_the_slots():
    tables = placement()._replace(counts=ints(9, 0, -1, 1)[0:4].flatten(), replicas=ints([7, -2], [1, -1], [2, 5], [3, -1]))
    assert eplb.map_to_physical(ints([0, 1, 2, 3], [0, 1, 2, 3]), tables, "row_index").tolist() == [[-1, -1, -1, 3]] * 2


def test_rank_map_rules():
    # 4 ranks on 2 nodes, 2 slots each. expert 0: one replica; 1: on ranks 0 and 3; 2: on both ranks of node 0; 3: on rank 1 twice
    logical = torch.tensor([1, 2, 3, 2, 0, 4, 5, 1])
    table = eplb.make_placement(logical, 6)
    maps = eplb.rank_dispatch_map(table.replicas[None], physical=8, ranks=4, nodes=2)
    assert maps.shape == (4, 1, 6)
    assert maps[:, 0, 0].tolist() == [4, 4, 4, 4]
    assert maps[:, 0, 1].tolist() == [0, 0, 7, 7]  # own rank or own node
    assert maps[:, 0, 2].tolist() == [1, 3, 1, 3]  # ranks 2 and 3 in turn
    assert maps[:, 0, 3].tolist() == [2, 2, 2, 2]


def test_rank_map_order():
    table = eplb.make_placement(torch.tensor([0, 1, 0, 2, 3, 4, 5, 6]), 7)  # expert 0 on ranks 0 and 1 of 4; ranks 2 and 3 are left
    order = torch.full((1, 7, 4), 99)
    order[0, 0] = torch.tensor([1, 0, 99, 99])
    maps = eplb.rank_dispatch_map(table.replicas[None], physical=8, ranks=4, order=order)
    assert maps[:, 0, 0].tolist() == [0, 2, 2, 0]
    order[0, 0] = torch.tensor([1, 1, 99, 99])
    with pytest.raises(ArgumentError, match="each replica to as many ranks"):
        eplb.rank_dispatch_map(table.replicas[None], physical=8, ranks=4, order=order)


def test_sglang_order_draws_from_one_generator():
    # 2 layers of 2 experts on 8 ranks of one slot: expert 0 in five slots, expert 1 in three
    replicas = torch.stack(
        [eplb.make_placement(torch.tensor(row), 2).replicas for row in ([0, 0, 0, 0, 0, 1, 1, 1], [1, 0, 0, 1, 0, 0, 1, 0])]
    )
    generator = random.Random(42)
    expected = []
    for layer in replicas.tolist():
        for held in ([slot for slot in row if slot >= 0] for row in layer):
            left = [rank for rank in range(8) if rank not in held]  # slot = rank here
            copies, rest = divmod(len(left), len(held))
            drawn = held * copies + generator.sample(held, rest)
            generator.shuffle(drawn)
            expected.append([drawn[left.index(rank)] if rank in left else rank for rank in range(8)])
    order = eplb.sglang_dispatch_order(replicas, physical=8, ranks=8)
    maps = eplb.rank_dispatch_map(replicas, physical=8, ranks=8, order=order)
    assert maps.movedim(0, -1).flatten(0, 1).tolist() == expected
    other = eplb.sglang_dispatch_order(replicas, physical=8, ranks=8, seed=43)
    assert not torch.equal(order, other)


def test_ep_01_ids_are_mapped_once():
    tables = placement(rank_map=torch.tensor([4, 1, 5, 3]))
    ids = torch.tensor([[0, 2], [3, 1]])
    assert eplb.map_to_physical(ids, tables).tolist() == [[4, 5], [3, 1]]
    logits = torch.tensor([[9.0, 0, 8, 0], [0, 8, 0, 9]])
    result = routing.route(logits, 2, scale=1.0, placement=tables, algorithm="static", counts=torch.zeros(6, dtype=torch.int32))
    assert result.ids.tolist() == [[4, 5], [3, 1]]
    assert result.counts.tolist() == [0, 1, 0, 1, 1, 1]
    for rank, shared in ((0, 3), (1, 7)):
        slots = routing.remap_home_rank_slots(torch.arange(6)[None], torch.ones(1, 6), 1, experts=6, ranks=2, rank=rank)
        assert slots.ids.tolist() == [[0, 1, 2, 4, 5, 6, shared]]


@pytest.mark.parametrize(("redundant", "local"), [(16, 17), (0, 16)])
def test_ep_03_every_slot_and_expert_is_reachable(redundant, local):
    physical = 256 + redundant
    tables = eplb.make_placement(torch.arange(physical) % 256, 256)
    slots = tables.replicas[tables.replicas >= 0]
    assert sorted(slots.tolist()) == list(range(physical))
    assert (tables.counts >= 1).all()
    words = torch.arange(256).remainder(2)[:, None]
    ids = eplb.map_to_physical(torch.arange(256)[:, None], tables, "dynamic", words=words)
    assert ((ids >= 0) & (ids // local < 16)).all()
    if not redundant:
        assert torch.equal(ids[:, 0], torch.arange(256, dtype=torch.int32))
    last = eplb.map_to_physical(torch.arange(256)[:, None], tables, "row_index")
    assert torch.equal(tables.physical_to_logical[last[:, 0].long()], torch.arange(256, dtype=torch.int32))


def test_ep_04_duplicates_are_reported_or_avoided():
    loads = torch.full((1, 256), 100)
    loads[0, 236] = 3000
    for distinct in (False, True):
        result = eplb.rebalance(loads, physical=288, ranks=32, distinct_per_rank=distinct)
        assert result.counts.sum() == 288
        assert (result.counts >= 1).all()
        found = [9 - len(set(rank)) for rank in result.physical_to_logical.reshape(32, 9).tolist()]
        assert result.duplicates.tolist() == [found]
        assert (sum(found) == 0) == distinct


def test_ep_05_an_expert_without_a_slot_goes_nowhere():
    with pytest.raises(ArgumentError, match="no slot for expert 2"):
        eplb.make_placement(torch.tensor([0, 1, 3, -1]), 4)
    tables = eplb.make_placement(torch.tensor([0, 1, 3, -1]), 4, rank_map=torch.tensor([0, 1, -1, 2]), allow_unheld=True)
    assert tables.replicas.tolist() == [[0], [1], [-1], [2]]
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    for algorithm in ("static", "row_index"):
        result = routing.route(logits, 2, scale=1.0, placement=tables, algorithm=algorithm, counts=torch.zeros(4, dtype=torch.int32))
        assert result.ids.tolist() == [[-1, 2]]
        assert result.weights[0, 0] == 0
        assert 0 < result.weights[0, 1] < 0.5  # the lost weight is not handed on
        assert result.counts.tolist() == [0, 0, 1, 0]
    assert eplb.rank_dispatch_map(tables.replicas[None], physical=4, ranks=2)[:, 0, 2].tolist() == [-1, -1]


LOADS = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("loads", lambda: eplb.rebalance(torch.ones(8), physical=8, ranks=2)),
        ("loads", lambda: eplb.rebalance(-LOADS, physical=8, ranks=2)),
        ("loads", lambda: eplb.rebalance(LOADS * float("nan"), physical=8, ranks=2)),
        ("loads", lambda: eplb.rebalance(LOADS * float("inf"), physical=8, ranks=2)),
        ("loads", lambda: eplb.rebalance(LOADS, physical=12, ranks=4, groups=3, nodes=3)),
        ("physical", lambda: eplb.rebalance(LOADS, physical=7, ranks=7)),
        ("physical", lambda: eplb.rebalance(LOADS, physical=10, ranks=4)),
        ("ranks", lambda: eplb.rebalance(LOADS, physical=9, ranks=3, groups=2, nodes=2)),
        ("distinct_per_rank", lambda: eplb.rebalance(LOADS, physical=18, ranks=2, distinct_per_rank=True)),
        ("algorithm", lambda: eplb.map_to_physical(IDS, placement(), "nearest")),
        ("placement.rank_map", lambda: eplb.map_to_physical(IDS, placement(), "static")),
        ("words", lambda: eplb.map_to_physical(IDS, placement(), "dynamic")),
        ("words", lambda: eplb.map_to_physical(IDS, placement(), "dynamic", words=IDS[:1])),
        ("probabilities", lambda: eplb.map_to_physical(IDS, placement(), "probability", uniforms=torch.zeros(4, 2))),
        ("rank", lambda: eplb.map_to_physical(IDS, placement(), "row_modulo", rank=-1)),
        ("ids", lambda: eplb.map_to_physical(IDS.float(), placement(), "none")),
        ("physical_to_logical", lambda: eplb.make_placement(torch.tensor([0, 4]), 2)),
        ("rank_map", lambda: placement(rank_map=torch.tensor([4, 1, 3, 3]))),
        ("replicas", lambda: eplb.rank_dispatch_map(ints([[4]]), physical=4, ranks=2)),
        ("physical", lambda: eplb.rank_dispatch_map(ints([[3]]), physical=5, ranks=2)),
    ],
)
def test_wrong_arguments_are_named(argument, call):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
