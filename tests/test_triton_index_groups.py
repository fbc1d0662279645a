"""Selection from rows that are grouped, against the reference: rows made to mislead it, groups of groups, windows, slots; and both kernels
compiled for SM90, with what ptxas says.

On a GPU the kernels run there. Elsewhere Triton's interpreter runs them, in a process of its own, with programs that hold fewer keys.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from interpreted import INTERPRETED, passes

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dsv4.fast.kernels import index_groups, index_select  # noqa: E402
from dsv4.reference import indexer as reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
kernel = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="runs in its own process, or on a GPU")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
INF, NAN = float("inf"), float("nan")


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter():
    passes(__file__, least=15)


@pytest.fixture(params=["small programs", "as they are"])
def programs(request, monkeypatch):
    """How many entries a row has."""
    if request.param == "as they are":
        return 20000
    monkeypatch.setattr(index_select, "WHOLE", 64)
    monkeypatch.setattr(index_groups, "MOST_KEYS", 256)
    monkeypatch.setattr(index_groups, "PIECE", 512)
    return 2600


def generator(seed):
    return torch.Generator().manual_seed(seed)


def misleading(n, k):
    """Rows by name: what a sample, a bin, a buffer of candidates or a group may take wrong."""
    at, z, u = torch.arange(n), torch.randn(n, generator=generator(n)), torch.rand(n, generator=generator(n + 1))
    order, negative_nan = u.argsort(), torch.tensor(-0x400000, dtype=torch.int32).view(torch.float32)
    return {
        "normal": z,
        "ascending": z.sort().values,
        "descending": z.sort(descending=True).values,
        "equal": torch.ones(n),
        "both zeros": torch.where(u < 0.5, 0.0, -0.0),
        "few values": (z * 2).round(),
        "one binade": torch.linspace(1, 1 + 2.0**-8, n)[order],
        "nan": torch.full((n,), NAN),
        "-inf": torch.full((n,), -INF),
        "+inf": torch.full((n,), INF),
        "nan of both signs": torch.where(u < 0.2, NAN, torch.where(u > 0.8, negative_nan, z)),
        "fewer than k": torch.where(order < k - 1, z, NAN),
        "k - 1 above": torch.where(order < k - 1, 3.0, 1.0),
        "k + 1 above": torch.where(order < k + 1, 3.0, 1.0),
        "at one end": z + 9 * (at >= n - k - 5),
        "one of each group": z + 9 * (at % 16 == 15),
        "tied largest of groups": torch.where(at % 16 == 5, 4.0, z),
        "tied groups": (at % 32 == 3).float(),
        "last only": torch.where(at == n - 1, 1.0, -INF),
        "subnormal": (z * 1000).to(torch.int32).view(torch.float32),
        "negative": -z.abs() - 1e-3,
    }


def selected(logits, k, order="index", **more):
    table = (more.get("block_table"), more.get("requests"), more.get("page_size", 0))
    return index_select.select(logits, k, more.get("ends"), more.get("starts"), order, *table)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [9, 100])
def test_rows_made_to_mislead(k, dtype, programs):
    for n in (programs, programs - 7):  # aligned, and with half a group at the end
        rows = misleading(n, k)
        logits = torch.stack(list(rows.values())).to(DEVICE, dtype)
        wrong = (selected(logits, k) != reference.select_topk(logits, k)).any(1).cpu()
        assert [name for name, bad in zip(rows, wrong.tolist(), strict=True) if bad] == []


@kernel
def test_windows_slots_and_both_orders(programs):
    n, k = programs, 40
    logits = torch.stack(list(misleading(n, k).values())[:6]).to(DEVICE)
    ends = torch.tensor([n, n + 5, n // 2, 3, -4, n - 9], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([3, -2, 9, 0, 0, n - 50], device=DEVICE)
    pages = torch.randint(-2, 50, (3, -(-n // 64) - 1), generator=generator(n)).to(DEVICE, torch.int32)
    pages[0, 1], pages[2] = 2**30, -1
    requests = torch.tensor([0, 1, 2, 3, -1, 1], dtype=torch.int32, device=DEVICE)
    for order in ("score", "index"):
        for window in ({}, {"ends": ends}, {"starts": starts, "ends": ends}):
            for slots in ({}, {"block_table": pages, "requests": requests, "page_size": 64}):
                got = selected(logits, k, order, **window, **slots)
                assert torch.equal(got, reference.select_topk(logits, k, order=order, **window, **slots))


@kernel
def test_a_row_does_not_depend_on_where_it_lies(programs):
    """The same row alone, in a batch, and at an odd address with numbers around it that are no scores."""
    rows, k = torch.stack(list(misleading(programs, 30).values())[:5]).to(DEVICE), 30
    expected = selected(rows, k)
    memory = torch.full((5, programs + 7), NAN, device=DEVICE)
    memory[:, 3 : programs + 3] = rows
    assert torch.equal(selected(memory[:, 3 : programs + 3], k), expected)
    for row in range(5):
        assert torch.equal(selected(rows[row : row + 1], k)[0], expected[row])


@kernel
def test_keys_are_selected_as_scores_are(programs):
    keys = torch.randint(-5, 5, (3, programs), generator=generator(2), dtype=torch.int32).to(DEVICE)
    keys[0, ::3], keys[1, ::2] = -(2**31), 2**31 - 1
    expected = reference.select_topk(torch.where(keys == -(2**31), -INF, keys.float()), 50)
    assert torch.equal(selected(keys, 50), expected)


def test_sizes_of_groups():
    """A program holds the entries of its k groups, fewer than there were, and up to 2^18 entries its groups."""
    for k in (1, 7, 512, 513, 1024, 2048, 8192):
        for columns in (4097, 8193, 16384, 65536, 262144, 2**20, 2**24):
            group = index_groups.group_of(columns, k)
            assert index_groups.places_of(k) * group <= index_groups.MOST_KEYS
            assert group == 1 or index_groups.places_of(k) * group < columns
    for columns, group in ((4097, 4), (16384, 4), (16385, 8), (65536, 8), (65537, 16), (2**18, 16), (2**18 + 1, 32), (2**20, 32)):
        assert index_groups.group_of(columns, 512) == group
    assert index_groups.group_of(8192, 2048) == 1


def compile_for_hopper(function, constants, warps, dtype="*fp32"):
    """PTX, bytes of shared memory, and what ptxas says of registers."""
    names = ("maxima", "groups", "starts", "ends", "table", "requests", "picked", "picked_keys")
    types = {"source": dtype, **dict.fromkeys(names, "*i32")}
    signature = {name: types.get(name, "constexpr" if name in constants else "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(function.arg_names) if name in types}
    source = ASTSource(function, signature, places, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    program = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(made.asm["ptx"])
        command = [program, "-v", "--gpu-name=sm_90a", f"{folder}/kernel.ptx", "-o", f"{folder}/kernel.cubin"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return made.asm["ptx"], made.metadata.shared, ran.stdout + ran.stderr


@compiled
@pytest.mark.parametrize(("dtype", "group"), [("*fp32", 4), ("*fp32", 8), ("*fp32", 16), ("*fp32", 32), ("*bf16", 16), ("*i32", 16)])
def test_maxima_compile(dtype, group):
    """Sixteen bytes at a time, and two programs at least on an SM."""
    constants = {"PIECE": index_groups.PIECE, "GROUP": group, "KEYS": dtype == "*i32", "HAS_STARTS": False, "HAS_ENDS": True}
    constants |= {"ALIGNED": True, "NATIVE": True}
    text, _, said = compile_for_hopper(index_groups.maxima_kernel, constants, index_groups.PIECE_WARPS, dtype)
    loads = index_groups.PIECE * (2 if dtype == "*bf16" else 4) // (512 * index_groups.PIECE_WARPS)
    assert len(re.findall(r"ld\.global\S*\.v4", text)) == loads
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert int(re.search(r"Used (\d+) registers", said).group(1)) * 32 * index_groups.PIECE_WARPS <= 32768


@compiled
@pytest.mark.parametrize(("tops", "group", "page"), [(2048, 4, 0), (2048, 8, 0), (8192, 8, 64), (8192, 16, 0), (16384, 16, 64), (0, 32, 0)])
def test_selection_compiles(tops, group, page):
    """Nothing spilt; and a barrier after the groups are written and before they are read."""
    constants = {"PICKS": 512, "GROUP": group, "MAXIMA": tops, "KEYS": False, "HAS_STARTS": False, "HAS_ENDS": True, "ALIGNED": True}
    warps = index_groups._warps(max(tops, 512 * group))
    constants |= {"PAGE": page, "KEEP_KEYS": page > 0, "NATIVE": True}
    text, shared, said = compile_for_hopper(index_groups.grouped_kernel, constants, warps)
    assert "0 bytes spill stores, 0 bytes spill loads" in said
    assert shared <= 16384
    if tops:
        written = text.index("st.global")
        assert "bar.sync" in text[text.rindex("st.global", written, text.index("ld.global", written)) : text.index("ld.global", written)]
