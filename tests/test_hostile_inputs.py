"""Global settings that must not leak in, and input that must come out as an ArgumentError that names the argument."""

import json
from collections.abc import Callable, Iterator
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
    torch.set_default_device("cpu")


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
