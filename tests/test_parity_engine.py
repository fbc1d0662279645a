"""The parity engine on a made-up component: it finds each kind of fault, shrinks it, reports it, and lets the right implementation pass."""

import ast
import fnmatch
import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st

import dsv4
import dsv4.fast  # before what pytester runs in this process: that drops what it imports, and cannot register operators again
from dsv4.formats import E2M1, E4M3
from dsv4.parity import __main__ as command
from dsv4.parity import bounds, collect, compare, contracts, engine, invariants, lattices, mutants, plugin, receipts, report, strategies
from dsv4.parity.candidates import Candidate
from dsv4.parity.contracts import Call, Contract, Domain, Invariant, Output, Rows
from dsv4.parity.levels import Level
from dsv4.types import ArgumentError, Placement, Unsupported

pytest_plugins = "pytester"
CPU = torch.device("cpu")
PACKAGE = Path(dsv4.__file__).parent
PLUGIN = [] if entry_points(group="pytest11", name="dsv4_parity") else ["-p", "dsv4.parity.plugin"]


class Best(NamedTuple):
    values: torch.Tensor
    picks: torch.Tensor


def best(logits, k, *, out=None):
    """The k largest logits of each row, ties to the smaller entry; a row of NaN is never asked for."""
    values, picks = logits.float().sort(dim=-1, descending=True, stable=True)
    result = Best(values[:, :k].contiguous(), picks[:, :k].int())
    if out is None:
        return result
    for buffer, tensor in zip(out, result, strict=True):
        buffer.copy_(tensor)
    return Best(*out)


def build_best(spec, device):
    logits = strategies.values(spec["classes"], (spec["rows"], spec["entries"]), spec["entries"], spec["seed"], torch.bfloat16, E4M3)
    return Call((logits.to(device), 1 + spec["k"] % spec["entries"]))


DRAWN = strategies.specs(
    rows=strategies.rows(40),
    entries=st.integers(1, 20),
    k=st.integers(0, 19),
    classes=strategies.some_of(strategies.FINITE_CLASSES),
    seed=strategies.seeds(),
)
BEST = Contract(
    "toy",
    "best",
    domains=(Domain("drawn", build_best, DRAWN),),
    outputs=(Output("values", Level.E0, "moves numbers"), Output("picks", Level.E0, "ties to the smaller entry")),
    invariants=invariants.on(
        "drawn", "run_to_run", "inputs_unchanged", "poisoned_output", "batch", "padding", "strides", "empty", "fullgraph", "guards"
    ),
    rows=Rows(),
    reference=best,
)


def cap(logits, limit):
    return (limit * (logits.double() / limit).tanh()).float()


def cap_exact(logits, limit):
    return limit * (logits.double() / limit).tanh()


def build_cap(spec, device):
    x = torch.randn(spec["rows"], 64, generator=strategies.generator(spec["seed"]))
    return Call((x.to(device), 2.0))


def build_saturated(spec, device):
    return Call(((1000 * lattices.integers((spec["rows"], 64), spec["seed"], 1)).to(device), 2.0))


CAP_SPECS = strategies.specs(rows=strategies.rows(60), seed=strategies.seeds())
# x / limit and the product with limit round once, tanh is off by its primitive, and the condition number of tanh is at most 1.
CAP_BOUND = bounds.primitive("tanh", "cpu") + bounds.gamma(3)
CAP = Contract(
    "toy",
    "cap",
    domains=(Domain("finite", build_cap, CAP_SPECS), Domain("saturated", build_saturated, CAP_SPECS)),
    outputs=(
        Output("result", Level.E3, "tanh", ("finite",), bound=lambda call, exact: exact.abs() * CAP_BOUND + bounds.LEAST, independent=True),
        Output("result", Level.E1, "tanh is 0 or 1 exactly", ("saturated",)),
    ),
    reference=cap,
    exact=cap_exact,
)


def checked(contract, call, name, **options):
    candidate = Candidate("toy", call, **options)
    item = next(item for item in contract.checks if item.label == name)
    return engine.check(contract, item, candidate, CPU)


def test_the_right_implementation_passes_everything():
    for contract in (BEST, CAP):
        for item in contract.checks:
            outcome = checked(contract, contract.reference, item.label)
            assert (outcome.result, outcome.message) == ("passed", "")
            assert all(row.cases == min(8, invariants.EXAMPLES.get(row.output, 8)) for row in outcome.rows)


def one_wrong_byte(logits, k):
    values, picks = best(logits, k)
    picks[-1, -1] ^= 1
    return values, picks


def wrong_dtype(logits, k):
    values, picks = best(logits, k)
    return values, picks.long()


def wrong_shape(logits, k):
    values, picks = best(logits, k)
    return values.T, picks


def one_tensor_only(logits, k):
    return best(logits, k).values


def raises(logits, k):
    raise ZeroDivisionError("no rows")


def stale(logits, k, kept=[]):  # noqa: B006
    kept.append(best(logits, k))
    return kept[max(len(kept) - 2, 0)]


def unwritten(logits, k):
    values, picks = best(logits, k)
    lazy = torch.empty(picks.shape, dtype=torch.int32)
    lazy[1:] = picks[1:]
    return values, lazy


def writes_its_input(logits, k):
    result = best(logits, k)
    logits.view(torch.int16)[-1, -1] ^= 1
    return result


def batch_dependent(logits, k):
    values, picks = best(logits, k)
    return values, picks + (len(logits) > 3)


def pad_leaks(logits, k):
    values, picks = best(logits, k)
    return values + logits.float().isnan().any(), picks


def ignores_strides(logits, k):
    return best(logits.as_strided(logits.shape, (logits.shape[-1], 1)), k)


def different_each_time(logits, k, turn=itertools.count()):  # noqa: B008
    values, picks = best(logits, k)
    return values, picks + next(turn)


def no_empty_batch(logits, k):
    return best(logits, k) if len(logits) else best(logits.new_zeros(1, logits.shape[1]), k)


def leaves_the_graph(logits, k):
    print("", end="")
    return best(logits[: logits.float().isfinite().all(-1).sum().item()], k)


def overruns_its_buffer(logits, k, *, out=None):
    if out is not None:
        out[1].as_strided((out[1].numel() + 1,), (1,))[-1] = 7
    return best(logits, k, out=out)


FAULTS = (
    (one_wrong_byte, "drawn", "bytes differ"),
    (wrong_dtype, "drawn", "dtype torch.int64, expected torch.int32"),
    (wrong_shape, "drawn", "shape"),
    (one_tensor_only, "drawn", "toy.best must return values, picks: got Tensor"),
    (raises, "drawn", "raised ZeroDivisionError: no rows"),
    (stale, "drawn", "expected"),
    (unwritten, "poisoned_output.drawn", "memory filled with 0x"),
    (writes_its_input, "inputs_unchanged.drawn", "argument 0"),
    (batch_dependent, "batch.drawn", "rows ["),
    (pad_leaks, "padding.drawn", "3 rows of NaN after the last"),
    (ignores_strides, "strides.drawn", "in memory"),
    (different_each_time, "run_to_run.drawn", "another run of the same call"),
    (no_empty_batch, "empty.drawn", "an empty batch"),
    (leaves_the_graph, "fullgraph.drawn", "fullgraph=True"),
    (overruns_its_buffer, "guards.drawn", "the guard bytes around 'out'"),
)


@pytest.mark.parametrize(("call", "check", "words"), FAULTS, ids=[call.__name__ for call, _, _ in FAULTS])
def test_each_fault_is_found_and_shrunk(call, check, words):
    outcome = checked(BEST, call, check)
    assert outcome.result == "failed"
    assert words in outcome.message
    if call not in (stale, batch_dependent):  # a stale result has no smallest case; a batch-dependent one wants its batch
        assert outcome.spec["rows"] <= 2
        assert outcome.spec["entries"] <= 2
    if call is not stale:
        assert (outcome.spec["seed"], len(outcome.spec["classes"])) == (0, 1)


def test_every_invariant_has_a_fault_here_or_wants_an_operator_or_a_gpu():
    assert set(invariants.CHECKS) == {check.partition(".")[0] for _, check, _ in FAULTS} - {"drawn"} | {"opcheck", "graph_replay"}


def test_another_kernel_for_another_layout_keeps_its_bound_where_that_is_said():
    def capping(off):
        def call(logits, limit):
            result = cap(logits, limit)
            return result if logits.is_contiguous() and logits.storage_offset() == 0 else result * (1 + off)

        return call

    def stride_check(bounded):
        return Contract(**{**CAP.__dict__, "invariants": (Invariant("strides", "finite", {"bounded": bounded}),)})

    last_bit, wrong = capping(2.0**-23), capping(2.0**-15)
    assert checked(stride_check((0,)), last_bit, "strides.finite").result == "passed"
    assert "argument 0" in checked(stride_check(()), last_bit, "strides.finite").message
    assert "argument 0" in checked(stride_check((0,)), wrong, "strides.finite").message


def test_opcheck_wants_an_operator():
    contract = Contract(**{**BEST.__dict__, "invariants": (Invariant("opcheck", "drawn"),)})
    assert "no operator of dsv4 was called" in checked(contract, best, "opcheck.drawn").message


def test_a_failure_says_what_one_needs():
    message = checked(BEST, one_wrong_byte, "drawn", version="1.2", option="--dsv4-impl toy.best=mine:best").message
    lines = dict(line.strip().split(maxsplit=1) for line in message.splitlines()[1:])
    assert message.startswith("parity failure: toy.best, output 'picks', check 'drawn'")
    assert lines["contract"].startswith("E0 on 'drawn': identical bytes")
    assert lines["candidate"] == "toy (1.2) on cpu"
    assert lines["first"] == "[0, 0]: expected 0x00000000 (0), got 0x00000001 (1)"
    assert lines["ULP"] == "1 of 1 elements differ, by 1: 1"
    assert lines["replay"].startswith('python -m dsv4.parity --replay toy.best.drawn \'{"rows": 1,')
    assert lines["replay"].endswith("--dsv4-impl toy.best=mine:best --dsv4-device cpu")


def test_refusing():
    def refuses_odd(logits, k):
        if len(logits) % 2:
            raise Unsupported("logits", len(logits), "must be even")
        return best(logits, k)

    def refuses_all(logits, k):
        raise Unsupported("logits", 0, "no")

    def refuses_wrongly(logits, k):
        raise ArgumentError("logits", 0, "no")

    some = checked(BEST, refuses_odd, "drawn")
    assert (some.result, some.refused + some.rows[0].cases) == ("passed", 8)
    assert some.refused
    assert checked(BEST, refuses_all, "drawn").result == "refused"
    assert checked(BEST, refuses_all, "drawn", may_refuse=False).result == "failed"
    assert checked(BEST, refuses_wrongly, "drawn").result == "failed"


def test_bound_bias_and_rms():
    def fp32(logits, limit):
        return limit * (logits / limit).tanh()

    def towards_zero(logits, limit):
        return (fp32(logits, limit).view(torch.int32) - 1).view(torch.float32)

    def downwards(logits, limit):
        return torch.nextafter(fp32(logits, limit), torch.tensor(-torch.inf))

    def noisy(logits, limit):
        sign = torch.where(torch.arange(logits.numel()).view(logits.shape) % 2 == 0, 1, -1)
        return (cap_exact(logits, limit) * (1 + 0.8 * CAP_BOUND * sign)).float()

    def wrong_once(logits, limit):
        return torch.where(logits == logits.max(), logits, fp32(logits, limit))

    right = checked(CAP, fp32, "finite")
    assert right.result == "passed"
    assert 0 < right.rows[0].share < 1
    assert right.rows[0].max_ulp >= 1
    assert "bias away from zero: mean error -0." in checked(CAP, towards_zero, "finite").message
    assert "signed bias: mean error -0." in checked(CAP, downwards, "finite").message
    assert "rms" in checked(CAP, noisy, "finite").message
    assert "outside the bound" in checked(CAP, wrong_once, "finite").message


def test_decisions():
    picked, other = torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3])
    assert compare.compare_choice(picked, other, torch.tensor([True, True, True])).ok
    found = compare.compare_choice(picked, other, torch.tensor([True, False, True]))
    assert (found.ok, found.coordinate, found.differing) == (False, (1,), 1)


def test_storage_around_the_elements_is_compared():
    row = Output("result", Level.E0, "", view=lambda tensor: tensor.as_strided((2, 4), (4, 1)), strides=True)

    def packed(pad):
        return torch.tensor([[1, 2, 3, pad], [4, 5, 6, pad]]).as_strided((3, 2), (1, 4))

    compare_rows = engine.compare_output_bytes
    assert compare_rows(row, packed(0), packed(0)).ok
    assert compare_rows(row, packed(0), packed(9)).coordinate == (0, 3)
    assert "strides (2, 1), expected (1, 4)" in compare_rows(row, packed(0), packed(0).contiguous()).reason
    assert "storage" in compare_rows(row, packed(0), torch.tensor([1, 2, 3, 0, 4, 5, 6]).as_strided((3, 2), (1, 4))).reason


@pytest.mark.parametrize(
    ("dtype", "first", "second", "distance"),
    [
        (torch.float32, 0x3F800000, 0x3F800001, 1),
        (torch.float32, 0x00000001, -0x7FFFFFFF, 2),  # the two least denormals
        (torch.float32, 0x00000000, -0x80000000, 0),  # the two zeros
        (torch.float32, 0x7F7FFFFF, 0x7F800000, 1),
        (torch.float32, 0x7FC00000, 0x00000000, 2**62),
        (torch.float64, 2**63 - 2**52, -(2**52), 2**62 - 1),  # the infinities: further than an int64 counts
        (torch.bfloat16, 0x3F80, 0x3F90, 16),
        (torch.float8_e4m3fn, 0x7E, 0xFE, 252),
        (torch.float8_e8m0fnu, 0x00, 0xFE, 254),
        (torch.uint8, 3, 250, 247),
        (torch.int32, -5, 5, 10),
    ],
)
def test_ulps(dtype, first, second, distance):
    storage = compare._INTEGERS[torch.empty((), dtype=dtype).element_size()]
    pair = [torch.tensor([bits], dtype=storage).view(dtype) for bits in (first, second)]
    assert int(compare.ulps(*pair)) == int(compare.ulps(*pair[::-1])) == distance


def test_comparison_describes_the_difference():
    found = compare.compare_bytes(torch.tensor([[1.0, 2.0], [3.0, -0.0]]), torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]))
    assert (found.coordinate, found.differing, found.elements) == ((1, 0), 2, 4)
    assert (found.expected, found.actual) == ("0x40400000 (3.0)", "0x7FC00000 (nan)")
    assert found.histogram == {"0, same value": 1, "NaN against a number": 1}


def test_magnitudes_of_the_formats():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(strategies.magnitudes(E4M3), codes)
    assert strategies.magnitudes(E2M1).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", strategies.VALUE_CLASSES)
def test_value_classes_hold_what_they_are_for(name, dtype):
    x = strategies.values([name], (64, 32), 32, 5, dtype, E4M3)
    again = strategies.values([name], (64, 32), 32, 5, dtype, E4M3)
    assert torch.equal(compare.as_integers(x), compare.as_integers(again))
    amax, bits = x.float().abs().amax(-1), compare.as_integers(x)
    holds = {
        "nan": lambda: bool((x.isnan().sum(-1) == 1).all()),
        "inf": lambda: bool((x.isinf().sum(-1) == 1).all()),
        "zeros": lambda: bool((x == 0).all()) and len(bits.unique()) == 2,
        "spike": lambda: bool(((x != 0).sum(-1) == 1).all()),
        "equal": lambda: bool((x == x[:, :1]).all()),
        "positive": lambda: bool((x > 0).all()),
        "tiny": lambda: bool((amax < 2.0**-50).all()) and bool((amax < 2.0**-126).any()),
        "huge": lambda: bool((amax > 2.0**108).all()),
        "limits": lambda: {int(step) for step in (bits & (0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF)).amax(-1) % 4} >= {0, 1, 3},
        "midpoints": lambda: bool((torch.frexp(amax).mantissa == 448 / 512).all()),
        "integers": lambda: bool((x == x.round()).all()) and float(amax.max()) == 8,
    }.get(name, lambda: len(bits.unique()) > 100)
    assert holds()


@pytest.mark.parametrize("layout", strategies.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu, torch.int32])
def test_relaid_tensors_hold_the_same_values(layout, dtype):
    x = strategies.random_bits((5, 7), 3, dtype)
    again = strategies.relaid(x, layout)
    assert torch.equal(compare.as_integers(again), compare.as_integers(x))
    assert layout == "contiguous" or (again.stride(), again.storage_offset()) != (x.stride(), 0)


def test_lattices_are_exact_in_any_order():
    terms = 2048
    largest = lattices.peak(terms)
    a, b = lattices.integers((16, terms), 1, largest), lattices.integers((16, terms), 2, largest, density=0.7)
    scaled = a * lattices.powers((16, 1), 3, -2, 2)
    assert lattices.exact(a, b, 1.0)
    assert lattices.exact(scaled, b, 0.25, hopper_fp8=False)
    exact = (a.double() * b.double()).sum(-1).float()
    for seed in range(20):
        order = torch.randperm(terms, generator=strategies.generator(seed))
        products = (a * b)[:, order]
        for tile in (1, 7, 128):
            total = torch.zeros(16)
            for part in products.split(tile, dim=-1) if tile > 1 else [products]:
                total = total + part.sum(-1)
            assert torch.equal(total, exact)


def test_lattice_limits():
    ones = torch.ones(1, 2**14)
    assert lattices.exact(ones, 31 * ones, 1.0)
    assert not lattices.exact(32 * ones, 32 * ones, 1.0)
    eights = torch.full((1, 256), 8.0)
    assert lattices.exact(eights, eights, 1.0, hopper_fp8=True)
    assert not lattices.exact(12 * ones[:, :128], 12 * ones[:, :128], 1.0, hopper_fp8=True)
    assert (lattices.peak(128, limit=lattices.HOPPER_FP8_QUANTA), lattices.peak(2**22), lattices.peak(2**20, most=99)) == (8, 1, 3)
    with pytest.raises(ValueError, match="no lattice is exact"):
        lattices.peak(2**24)
    with pytest.raises(ValueError, match="no multiple of the quantum"):
        lattices.quanta(ones / 3, ones, 1.0)


@pytest.mark.parametrize("name", bounds.PRIMITIVE_ULP["cpu"])
def test_primitive_errors_hold_on_this_cpu(name):
    x = torch.exp2(torch.linspace(-8, 6, 100_001)) * (
        1 if name in ("log", "rsqrt", "sqrt") else torch.tensor([1.0, -1.0]).repeat(50_001)[:-1]
    )
    call = (lambda t: t / 3) if name == "divide" else getattr(torch, name)
    exact = call(x.double())
    assert bool(((call(x).double() - exact).abs() <= bounds.primitive(name, "cpu") * exact.abs()).all())


def test_bounds():
    assert [bounds.sum_height(*case) for case in ((1,), (8,), (9,))] == [0, 7, 8]
    assert [bounds.sum_height(64, lanes=lanes) for lanes in (8, 64)] == [7 + 3, 6]
    assert bounds.fast_math_exp(10.0) == 2 * 13 * 2.0**-24
    assert 3 * bounds.U < bounds.gamma(3) < 3.000001 * bounds.U


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outputs": (Output("result", Level.E3, "", bound=lambda call, exact: exact),)}, "non-empty bitwise domain"),
        ({"exact": None}, "measured against `exact`"),
        ({"invariants": invariants.on("elsewhere", "batch")}, "rows may name only these"),
    ],
)
def test_contracts_that_promise_nothing_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Contract(**{**CAP.__dict__, **change})


def test_no_tolerance_outside_the_loose_comparisons():
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.arg] if isinstance(node, ast.keyword | ast.arg) else [node.attr] if isinstance(node, ast.Attribute) else []
            if {"atol", "rtol", "allclose", "isclose", "assert_close"} & set(names):
                found.append(path.relative_to(PACKAGE).as_posix())
    assert set(found) == {"parity/mutants/loose.py"}


def test_generic_mutants_and_loose_comparisons():
    scores = [mutants.score_one(BEST, mutant, CPU) for mutant in mutants.for_contract(BEST)]
    assert [score.mutant.fault for score in scores] == ["returns zeros", "returns the previous output", "returns its input"]
    assert all(score.killed_by for score in scores)

    def garbage_in_one_row_of_many(logits, limit):
        return torch.where(torch.arange(len(logits))[:, None] == 40, 0.0, cap(logits, limit))

    score = mutants.score_one(CAP, mutants.Mutant("garbage", "toy", "cap", garbage_in_one_row_of_many, "one row in 41"), CPU)
    assert score.killed_by == "finite"
    assert score.loosely == {"allclose 1e-2": True, "cosine > 0.99": True, "95 % match": False}
    assert mutants.score_one(CAP, mutants.Mutant("right", "toy", "cap", cap, "none"), CPU).killed_by == ""
    assert "SURVIVED" in mutants.table([mutants.Score(scores[0].mutant)])


def run_suite(pytester, *options):
    return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:cacheprovider", "--pyargs", "dsv4.parity", "--dsv4-device", "cpu", *options)


def test_a_check_that_crashes_is_in_the_receipt(pytester, monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr("dsv4.parity.engine.check", lost)
    run_suite(pytester, "--dsv4-component", "codecs", "-k", "decode_e2m1.bytes", "--dsv4-receipt", "receipt.json").assert_outcomes(failed=1)
    (row,) = receipts.read(pytester.path / "receipt.json")["components"]["codecs"]["rows"]
    assert (row["output"], row["domain"], row["result"]) == ("not finished", "bytes", "failed")


WRONG = "from dsv4.reference import codecs\ndef decode(codes):\n    return codecs.decode_e2m1(codes & 0b1110)\n"
RIGHT = "from dsv4.reference.codecs import decode_e2m1 as decode\n"


def test_a_kernel_from_outside_in_five_lines(tmp_path):
    tmp_path.joinpath("outside.py").write_text(WRONG)
    command_line = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "--pyargs", "dsv4.parity", "--dsv4-device", "cpu"]
    ran = subprocess.run(
        [*command_line, "--dsv4-impl", "codecs.decode_e2m1=outside:decode"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**_environment(), "COLUMNS": "200"},
    )
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "parity failure: codecs.decode_e2m1, output 'result', check 'bytes'" in ran.stdout
    assert 'case       {"first": 1, "count": 1}' in ran.stdout
    assert "[0]: expected 0x3F000000 (0.5), got 0x00000000 (0.0)" in ran.stdout
    line = next(line for line in ran.stdout.splitlines() if "replay" in line).split("replay", 1)[1].strip()
    again = subprocess.run(
        line.replace("python", sys.executable, 1), shell=True, cwd=tmp_path, capture_output=True, text=True, env=_environment()
    )
    assert (again.returncode, "expected 0x3F000000 (0.5)" in again.stdout) == (1, True), again.stdout + again.stderr


def _environment():
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def test_replay_of_a_case_that_passes(monkeypatch, tmp_path, capsys):
    tmp_path.joinpath("replayed_right.py").write_text(RIGHT)
    monkeypatch.chdir(tmp_path)
    where = ["--dsv4-device", "cpu"]
    impl = ["--dsv4-impl", "codecs.decode_e2m1=replayed_right:decode"]
    assert command.main(["--replay", "codecs.decode_e2m1.bytes", '{"first": 1, "count": 1}', *impl, *where]) == 0
    assert command.main(["--replay", "codecs.decode_e2m1.nothing", "{}", *impl, *where]) == 2
    assert "has no check 'nothing'; it has bytes, drawn" in capsys.readouterr().err


def test_known_failures(pytester):
    pytester.makepyfile(known_wrong=WRONG, known_right=RIGHT)
    pytester.path.joinpath("known.txt").write_text(
        "# known\ncodecs.decode_e2m1.bytes  ISSUE-7\ntest_codecs.py::test_parity[decode_e2m1.drawn-known_wrong:decode] ISSUE-8\n"
    )
    wrong = run_suite(pytester, "--dsv4-xfail", "known.txt", "--dsv4-impl", "codecs.decode_e2m1=known_wrong:decode")
    wrong.assert_outcomes(xfailed=2, passed=7)
    right = run_suite(pytester, "--dsv4-xfail", "known.txt", "--dsv4-impl", "codecs.decode_e2m1=known_right:decode")
    right.assert_outcomes(failed=1, passed=8)
    right.stdout.fnmatch_lines(["*XPASS(strict)*ISSUE-7*"])
    pytester.path.joinpath("known.txt").write_text("codecs.decode_e2m1.bytes\n")
    assert run_suite(pytester, "--dsv4-xfail", "known.txt").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dsv4-impl", "codecs.nothing=os:getcwd"], "*no function with a contract; codecs has decode_e4m3,*"),
        (["--dsv4-impl", "codecs.decode_e2m1=no_such_module:f"], "*cannot import 'no_such_module'*"),
        (["--dsv4-impl", "codecs.decode_e2m1=os:sep"], "*is not a callable*"),
        (["--dsv4-impl", "nothing.decode=os:sep"], "*--dsv4-impl nothing: no contract; components: attention, codecs,*"),
        (["--dsv4-report", "report.txt"], "*must end in .json, .md or .html*"),
    ],
)
def test_wrong_options_say_so(pytester, options, words):
    ran = run_suite(pytester, "--dsv4-component", "codecs", *options)
    assert ran.ret not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    assert any(fnmatch.fnmatch(line, words) for line in ran.outlines + ran.errlines)


def test_a_run_that_is_stopped_leaves_a_receipt_that_says_so(pytester, monkeypatch):
    monkeypatch.setattr(plugin, "WRITTEN_EVERY", 0.0)
    monkeypatch.setattr(plugin._Session, "pytest_sessionfinish", lambda self: None)  # as of a process that has ended
    run_suite(pytester, "--dsv4-component", "codecs", "-k", "decode_e2m1", "--dsv4-receipt", "receipt.json")
    receipt = receipts.read(pytester.path / "receipt.json")
    rows = receipt["components"]["codecs"]["rows"]
    assert rows
    assert any("it is not at its end" in words for words in receipt["not_claimed"])
    assert not list(pytester.path.glob("*.part"))


def test_reports_and_receipts_are_the_same_twice(pytester):
    pytester.makepyfile(twice=RIGHT)
    impl = ["--dsv4-impl", "codecs.decode_e2m1=twice:decode"]
    for number in (1, 2):
        files = ["--dsv4-report", f"{number}.json", "--dsv4-receipt", f"receipt{number}.json"]
        run_suite(pytester, *impl, *files).assert_outcomes(passed=9)
    first, second = (receipts.read(pytester.path / f"receipt{number}.json") for number in (1, 2))
    assert list(first) == sorted(receipts.KEYS)
    assert not any("it is not at its end" in words for words in first["not_claimed"])
    assert first.pop("times").keys() == second.pop("times").keys() == {"written", "seconds"}
    assert json.dumps(first) == json.dumps(second)
    row = next(row for row in first["components"]["codecs"]["rows"] if row["domain"] == "bytes")
    assert row == {
        "function": "decode_e2m1",
        "output": "result",
        "level": "E0",
        "domain": "bytes",
        "cases": 256,
        "max_ulp": 0,
        "share": None,
        "candidate": "twice:decode",
        "backend": "foreign",
        "version": "twice",
        "result": "passed",
    }
    assert "codecs.decode_e2m1.opcheck.drawn (twice:decode): only claimed for dsv4.fast" in first["not_claimed"]
    assert first["environment"]["torch"] == torch.__version__
    outcomes = json.loads((pytester.path / "1.json").read_text())["outcomes"]
    assert len(outcomes) == 9
    for ending in ("md", "html"):
        report.write(pytester.path / f"r.{ending}", [{**outcomes[0], "result": "failed", "message": "x < y"}], {"torch": "2"})
    assert "| codecs | decode_e2m1 |" in (pytester.path / "r.md").read_text()
    assert "<pre>x &lt; y</pre>" in (pytester.path / "r.html").read_text()


def test_outcomes_come_back_from_xdist_workers(pytester, monkeypatch):
    pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONPATH", _environment()["PYTHONPATH"])
    pytester.makepyfile(spread=RIGHT)
    impl = ["--dsv4-impl", "codecs.decode_e2m1=spread:decode"]
    ran = pytester.runpytest_subprocess(
        *PLUGIN, "-p", "no:cacheprovider", "-n", "2", "--pyargs", "dsv4.parity", "--dsv4-device", "cpu", *impl, "--dsv4-receipt", "r.json"
    )
    ran.assert_outcomes(passed=9)
    receipt = receipts.read(pytester.path / "r.json")
    assert len(receipt["components"]["codecs"]["rows"]) == 9
    assert receipt["not_claimed"]


def test_the_plugin_leaves_other_projects_alone(tmp_path):
    tmp_path.joinpath("test_other.py").write_text("import sys\ndef test_it():\n    assert not {'torch', 'numpy'} & set(sys.modules)\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert (ran.returncode, "dsv4" in ran.stdout) == (0, False), ran.stdout


def test_every_contract_is_well_formed():
    for component in contracts.components():
        for contract in contracts.for_component(component):
            assert callable(contract.refer())
            labels = [item.label for item in contract.checks]
            assert len(set(labels)) == len(labels)
            assert {row.name for row in contract.invariants} <= set(invariants.CHECKS)
            for label in labels:
                assert collect.find(f"{contract.name}.{label}")[0] is contract


@pytest.mark.parametrize("component", contracts.components())
def test_every_usable_backend_is_held(component):
    """Rows that are not batch-invariant too: these are held to everything but that, those that can be so to that as well."""
    cases, _ = collect.Selection(device="cpu", profile="ci").cases(component)
    held = {(case.contract.name, case.candidate.backend) for case in cases if isinstance(case.candidate, Candidate)}
    contracted = {contract.name for contract in contracts.for_component(component)}
    statuses = [status for status in dsv4.fast.backends("cpu") if status.function in contracted]
    assert {(status.function, status.backend) for status in statuses if status.usable} <= held
    batched = {(case.contract.name, case.candidate.backend) for case in cases if case.item.label.startswith("batch")}
    claimed = {(status.function, status.backend) for status in statuses if status.usable and status.batch_invariant}
    asked = {contract.name for contract in contracts.for_component(component) for row in contract.invariants if row.name == "batch"}
    assert {pair for pair in claimed if pair[0] in asked} <= batched


@pytest.mark.parametrize("component", contracts.components())
def test_the_suite_kills_every_mutant(component):
    scores = mutants.score([component], loosely=False)
    assert [score.mutant.id for score in scores if not score.killed_by] == []
    functions = len(contracts.for_component(component))
    assert len(scores) >= 3 * functions + 4
    assert len({score.mutant.id for score in scores}) == len(scores)


@pytest.mark.parametrize("component", contracts.components())
def test_what_kills_a_mutant_does_not_kill_the_reference(component):
    for contract in contracts.for_component(component):
        itself = mutants.Mutant("itself", component, contract.function, contract.refer(), "none")
        assert mutants.score_one(contract, itself, CPU, loosely=False).killed_by == "", contract.name


@pytest.mark.parametrize("table", ["physical_to_logical", "replicas", "counts"])
@pytest.mark.parametrize("name", ["eplb.map_to_physical", "routing.route"])
def test_tables_of_a_placement_are_inputs(name, table):
    contract = contracts.find(name)

    def writes(*args, **kwargs):
        result = contract.refer()(*args, **kwargs)
        next(value for value in (*args, *kwargs.values()) if isinstance(value, Placement))._asdict()[table].neg_()
        return result

    item = next(item for item in contract.invariants if item.name == "inputs_unchanged")
    found = engine.check(contract, item, Candidate("writes", writes), CPU, shrink=False)
    assert found.result == "failed"
    assert f"placement.{table}" in found.message


def test_an_output_without_a_row_is_a_tensor_like_the_references():
    def reference(x):
        return x + 1, x + 2

    drawn, other = (
        Domain(name, lambda spec, device: Call((torch.arange(3, device=device),)), strategies.specs(seed=strategies.seeds()))
        for name in ("drawn", "other")
    )
    rows = Output("first", Level.E0, ""), Output("second", Level.E0, "", ("other",))
    contract = Contract("made", "up", (drawn, other), rows, reference=reference)
    assert checked(contract, reference, "drawn").result == "passed"
    assert checked(contract, lambda x: (x + 1, x + 3), "drawn").result == "passed"
    assert "second" in checked(contract, lambda x: (x + 1, x.float()), "drawn").message
    assert "second" in checked(contract, lambda x: (x + 1, x[:2]), "drawn").message


def test_an_optional_output_may_be_none_and_only_where_the_reference_says_so():
    def reference(x, *, two):
        return x + 1, x + 2 if two else None

    def build(spec, device):
        return Call((torch.arange(3, device=device),), {"two": spec["two"]})

    domain = Domain("drawn", build, strategies.specs(two=st.booleans(), seed=strategies.seeds()))
    outputs = (Output("first", Level.E0, ""), Output("second", Level.E0, ""))
    contract = Contract("made", "up", (domain,), outputs, reference=reference, optional=("second",))
    always, never = lambda x, *, two: (x + 1, x + 2), lambda x, *, two: (x + 1, None)
    assert checked(contract, reference, "drawn").result == "passed"
    assert "a tensor where None is expected" in checked(contract, always, "drawn").message
    assert "None where a tensor is expected" in checked(contract, never, "drawn").message
