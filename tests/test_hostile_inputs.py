"""Global settings that must not leak in, and input that must come out as an ArgumentError that names the argument."""

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dsv4.fast.eplb as fast_eplb
import dsv4.reference.eplb as reference_eplb
import dsv4.reference.routing as reference_routing
from dsv4.configs import from_checkpoint
from dsv4.types import ArgumentError

GOLDEN = Path(__file__).parent / "golden" / "v4" / "config.json"
LOADS = [[449, 639, 160, 961]]
PLACED = [[3, 3, 0, 0, 3, 1, 1, 2]]


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)  # "cpu" would leave a mode on, which every later call would meet


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("rebalance", [reference_eplb.rebalance, fast_eplb.rebalance])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_placement(rebalance: Callable[..., tuple[torch.Tensor, ...]], dtype: torch.dtype) -> None:
    loads = torch.tensor(LOADS)
    torch.set_default_dtype(dtype)
    assert rebalance(loads, physical=8, ranks=2)[0].tolist() == PLACED


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("rebalance", [reference_eplb.rebalance, fast_eplb.rebalance])
def test_the_default_device_is_not_asked(rebalance: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    loads, scores, ids = torch.tensor(LOADS), torch.tensor([[1.0, 3.0]]), torch.tensor([[1]])
    torch.set_default_device("meta")
    assert rebalance(loads, physical=8, ranks=2)[0].tolist() == PLACED
    assert reference_routing.route_weights(scores, ids).tolist() == [[1.0]]


def test_a_placement_is_a_copy() -> None:
    logical = torch.arange(4, dtype=torch.int32)
    placement = reference_eplb.make_placement(logical, 4, rank_map=logical)
    placement.physical_to_logical[0] = 3
    assert placement.rank_map is not None
    placement.rank_map[1] = 3
    assert logical.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ["[" * 200_000, '{"model_type":' + "9" * 5000 + "}", "{", "[]", "\xff"])
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ArgumentError, match=r"^checkpoint: got "):
        from_checkpoint(file)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, None, 5, b"/x", []])
def test_paths_that_are_none(path: object) -> None:
    with pytest.raises(ArgumentError, match=r"^checkpoint: got "):
        from_checkpoint(path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("rope_theta", 10**400), ("num_hidden_layers", [1] * 100_000), ("rms_norm_eps", float("nan"))]
)
def test_fields_are_named_and_values_cut(field: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{field}: got ") as caught:
        from_checkpoint({**json.loads(GOLDEN.read_text()), field: value})
    assert len(str(caught.value)) < 300


WRONG_NUMBERS = (None, "8", 8.0, True, 2**70)
X, IDS, WEIGHTS, SCORES = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), torch.ones(2, 4)


@pytest.mark.parametrize("twin", ["reference", "fast"])
@pytest.mark.parametrize("value", WRONG_NUMBERS)
def test_host_numbers_are_whole(twin: str, value: object) -> None:
    routing = slots = import_module(f"dsv4.{twin}.routing")
    quantization, scales = import_module(f"dsv4.{twin}.quantization"), import_module(f"dsv4.{twin}.scales")
    packed = torch.zeros(1, 1, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "group": lambda: quantization.quantize_fp8(X, value),
        "block": lambda: quantization.quantize_fp8_blocks(X, (8, value)),
        "k": lambda: routing.route_topk(SCORES, value),
        "rows": lambda: scales.restride_rows(packed, value),
        "groups": lambda: scales.unpack_ue8m0(packed, value),
        "live_rows": lambda: slots.mask_padding(IDS, WEIGHTS, value),
        "copies": lambda: slots.append_shared_slots(IDS, WEIGHTS, 1, experts=4, copies=value),
        "ranks": lambda: slots.remap_home_rank_slots(IDS, WEIGHTS, 1, experts=4, ranks=value, rank=0),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            call()


@pytest.mark.parametrize("twin", ["reference", "fast"])
def test_ids_stay_within_int32(twin: str) -> None:
    routing = import_module(f"dsv4.{twin}.routing")
    with pytest.raises(ArgumentError, match=r"^experts: got 2147483647; must be at most 2147483645"):
        routing.append_shared_slots(IDS, WEIGHTS, 2, experts=2**31 - 1)
    with pytest.raises(ArgumentError, match=r"^experts: got 2147483646; must be at most 2147483645"):
        routing.remap_home_rank_slots(IDS, WEIGHTS, 1, experts=2**31 - 2, ranks=2, rank=0)


@pytest.mark.parametrize("twin", ["reference", "fast"])
@pytest.mark.parametrize("placement", [None, "x", (1, 2)])
def test_placements_are_placements(twin: str, placement: object) -> None:
    with pytest.raises(ArgumentError, match=r"^placement: got "):
        import_module(f"dsv4.{twin}.eplb").map_to_physical(IDS, placement, "none")


def test_fast_refuses_what_it_cannot_derive_or_update() -> None:
    routing = import_module("dsv4.fast.routing")
    weight = torch.randn(8, 8)
    with pytest.raises(ArgumentError, match=r"^x: got a tensor with a tangent"):
        torch.func.jvp(lambda x: routing.gate_logits(x, weight), (X,), (torch.ones_like(X),))
    with pytest.raises(ArgumentError, match=r"^counts: got strides"):
        routing.count_experts(IDS, torch.zeros(1, dtype=torch.int32).expand(8))
    with torch.inference_mode():
        counts = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^counts: got an inference tensor"):
        routing.count_experts(IDS, counts)


def test_out_may_overlap() -> None:
    scales = import_module("dsv4.fast.scales")
    words = torch.arange(1, 65, dtype=torch.int32)
    packed, out = words.as_strided((5, 2), (1, 8)), words.as_strided((5, 2), (1, 8), 2)
    expected = import_module("dsv4.reference.scales").zero_pad_rows(packed.clone(), 4, scale_layout="packed")
    assert torch.equal(scales.zero_pad_rows(packed, 4, scale_layout="packed", out=out), expected)
