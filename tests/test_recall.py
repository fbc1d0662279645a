"""Calls of a kind that is known: what they skip, what is looked at again, and that nothing stays that does not hold any more."""

import enum
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.fast import dispatch, recall, use
from dsv4.fast import linear as fast
from dsv4.fast import output_projection as projection
from dsv4.fast.adapters.library import Library
from dsv4.fast.dispatch import Implementation, any_arguments, any_device
from dsv4.fast.recall import Memory
from dsv4.reference import linear as reference
from dsv4.types import ArgumentError, Mxfp8Pair, Quantized

FUNCTION = "linear.linear_fp8"


def answer(number: float) -> Any:
    """A product of so many, and no arithmetic."""

    def run(x: Tensor, _: Tensor | None, weight: Tensor, *__: Any) -> Tensor:
        return x.new_full((x.shape[0], weight.shape[0]), number, dtype=torch.bfloat16)

    return run


class World:
    """The function with rows that say who answered: 1 and 2 by the operator's calls, 10 and 20 by what they prepare."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.memory = Memory(FUNCTION, fast._operator_fp8)
        self.prepared: list[str] = []
        self.library = Library("made up", "made_up", (), "pip install it")
        self.library._found = None
        monkeypatch.setattr(fast, "_fp8", self.memory)
        monkeypatch.setattr(dispatch, "_toolchain", lambda backend, kind: None)
        monkeypatch.setattr(Library, "lacks", lambda *_: None)
        monkeypatch.delenv("DSV4_IMPL", raising=False)
        self.table(self.row("triton", 1), self.row("eager", 2))

    def table(self, *rows: Implementation) -> None:
        self.monkeypatch.setitem(dispatch.TABLES, FUNCTION, rows)

    def row(self, backend: str, number: float, **options: Any) -> Implementation:
        def prepare(x: Tensor, x_scales: Tensor | None, weight: Tensor, *_: Any) -> Any:
            self.prepared.append(backend)
            sizes = x.shape[0], weight.shape[0]
            return lambda *tensors: torch.full(sizes, 10.0 * number, dtype=torch.bfloat16)

        return Implementation(backend, any_device, any_arguments, answer(number), prepare=prepare, **options)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    assert not recall._is_watched(), "an earlier test left a mode on"
    return World(monkeypatch)


def operands(tokens: int = 3, n: int = 4, k: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(tokens, k, dtype=torch.bfloat16), torch.ones(n, k).to(torch.float8_e4m3fn), torch.ones(-(-n // 128), -(-k // 128))


def says(given: tuple[Any, ...], **options: Any) -> float:
    """Who answered."""
    result = fast.linear_fp8(*given, **options)
    assert (result.dtype, result.shape) == (torch.bfloat16, (len(given[0]) if isinstance(given[0], Tensor) else 3, len(given[1])))
    return result[0, 0].item()


def test_the_second_call_runs_what_the_first_prepared(world: World) -> None:
    given = operands()
    assert [says(given) for _ in range(3)] == [1, 10, 10]
    assert world.prepared == ["triton"]
    assert says(tuple(part.clone() for part in given)) == 10  # a kind, and not these tensors
    codes = Quantized(given[0].to(torch.float8_e4m3fn), torch.ones(3, 1))
    assert [says((codes, *given[1:])) for _ in range(2)] == [1, 10]
    assert [says(given, impl="eager") for _ in range(2)] == [2, 20]
    assert says(given) == 10


def other_kinds() -> dict[str, Any]:
    x, weight, scales = operands()
    wide = torch.ones(3, 256, dtype=torch.bfloat16)
    return {
        "tokens": ((x[:2], weight, scales), {}),
        "columns": ((x, weight[:3], scales), {}),
        "strides of x": ((wide[:, :128], weight, scales), {}),
        "strides of the weight": ((x, torch.ones(4, 256).to(torch.float8_e4m3fn)[:, :128], scales), {}),
        "block": ((x, weight, torch.ones(1, 4)), {"block": 32}),
        "dtype of scales": ((x, weight, torch.ones(1, 1, dtype=torch.uint8)), {}),
        "a parameter": ((x, torch.nn.Parameter(weight, False), scales), {}),
        "impl": ((x, weight, scales), {"impl": "triton"}),
    }


@pytest.mark.parametrize("name", other_kinds())
def test_other_kinds_are_looked_at(world: World, name: str) -> None:
    assert [says(operands()) for _ in range(2)] == [1, 10]
    given, options = other_kinds()[name]
    assert [says(given, **options) for _ in range(2)] == [1, 10]


def test_a_tensor_that_changes_in_place(world: World) -> None:
    x, weight, scales = operands()
    weight = torch.nn.Parameter(weight, False)
    given = x, weight, scales
    assert [says(given) for _ in range(2)] == [1, 10]
    weight.data = torch.ones(4, 128).to(torch.float8_e4m3fn)
    assert says(given) == 10
    weight.data = torch.ones(5, 128).to(torch.float8_e4m3fn)
    assert says(given) == 1
    weight.data = torch.ones(4, 128).to(torch.float8_e4m3fn).t().contiguous().t()
    with pytest.raises(ArgumentError, match="weight: got strides"):
        fast.linear_fp8(*given)
    weight.data = torch.ones(4, 128, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="weight: got uint8"):
        fast.linear_fp8(*given)
    x.resize_(2, 128)
    weight.data = operands()[1]
    assert says(given) == 1
    x.requires_grad_()
    with pytest.raises(ArgumentError, match="x: got a tensor that requires grad"):
        fast.linear_fp8(*given)


def test_a_tensor_that_begins_elsewhere(world: World) -> None:
    """Rules and rows look at multiples of 16 bytes, so that nothing else is of a known kind."""
    x, weight, scales = operands()
    moved = torch.ones(4 * 128 + 1).to(torch.float8_e4m3fn)[1:].view(4, 128)
    assert [says((x, weight, scales)) for _ in range(2)] == [1, 10]
    assert [says((x, moved, scales)) for _ in range(3)] == [1, 1, 1]
    assert says((x, weight, torch.ones(2)[1:].view(1, 1))) == 1
    assert world.memory._count == 1


def test_errors_stay(world: World) -> None:
    x, weight, scales = operands()
    assert [says((x, weight, scales)) for _ in range(2)] == [1, 10]
    for wrong in (None, 3, "x", x.tolist(), (x, scales), x.float(), x[:, :100], x.to_sparse(), torch.ones(()), Mxfp8Pair(x, scales)):
        for given in ((wrong, weight, scales), (x, wrong, scales), (x, weight, wrong)):
            with pytest.raises(ArgumentError) as theirs:
                reference.linear_fp8(*given)
            with pytest.raises(ArgumentError) as ours:
                fast.linear_fp8(*given)
            assert str(ours.value) == str(theirs.value)
    for block in (True, 128.0, "128", None, [128], 64):
        with pytest.raises(ArgumentError, match="block"):
            fast.linear_fp8(x, weight, scales, block=block)
    with pytest.raises(ArgumentError, match="impl"):
        fast.linear_fp8(x, weight, scales, impl="cublas")
    assert says((x, weight, scales)) == 10


def test_demands_and_the_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    world.table(world.row("triton", 1, batch_invariant=False), world.row("eager", 2))
    assert [says(given) for _ in range(2)] == [1, 10]
    for _ in range(2):
        for demand in ({"batch_invariant": True}, {"impl": "eager"}, {"impl": {"linear": "eager"}}, {"impl": {FUNCTION: "eager"}}):
            with use(**demand):
                assert says(given) in (2, 20)
                assert says(given) == 20
                with use(batch_invariant=False, impl={FUNCTION: "triton"}):
                    assert says(given) in (1, 10)
            assert says(given) == 10
        monkeypatch.setenv("DSV4_IMPL", "linear=eager")
        assert says(given) in (2, 20)
        assert says(given) == 20
        monkeypatch.setenv("DSV4_IMPL", "linear=fastest")
        with pytest.raises(ArgumentError, match="DSV4_IMPL"):
            fast.linear_fp8(*given)
        monkeypatch.delenv("DSV4_IMPL")
        assert says(given) == 10
    with use():
        assert says(given) == 10


def test_other_rows_are_chosen_from(world: World) -> None:
    given = operands()
    assert [says(given) for _ in range(2)] == [1, 10]
    world.table(world.row("eager", 3))
    assert [says(given) for _ in range(2)] == [3, 30]
    world.table(world.row("triton", 4), world.row("eager", 2))
    assert [says(given) for _ in range(2)] == [4, 40]


def test_a_library_that_is_refuted(world: World) -> None:
    given, wrong = operands(), [None]
    world.library.probes["f"] = lambda device: wrong[0]
    cpu = torch.device("cpu")
    world.table(world.row("deepgemm", 5, library=world.library, symbol="f"), world.row("eager", 2))
    assert [says(given) for _ in range(2)] == [5, 50]
    wrong[0] = "computes garbage"
    world.library._proofs.clear()
    assert "garbage" in (world.library.disproved("f", cpu) or "")
    assert [says(given) for _ in range(2)] == [2, 20]
    wrong[0] = None
    assert world.library.disproved("f", cpu, again=True) is None
    assert [says(given) for _ in range(2)] == [5, 50]


def test_a_row_that_prepares_nothing_has_its_operator(world: World) -> None:
    """Only the checks are skipped."""
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    world.table(Implementation("eager", any_device, any_arguments, answer(6)))
    given = operands()
    assert [says(given) for _ in range(2)] == [6, 6]
    with Sees():
        fast.linear_fp8(*given)
    assert "dsv4.linear_fp8.default" in seen


class Watches(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_operator(world: World) -> None:
    given = operands()
    assert [says(given) for _ in range(2)] == [1, 10]
    with Watches() as mode:
        assert fast.linear_fp8(*given)[0, 0] == 1
    assert any("linear_fp8" in name for name in mode.seen)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(fast.linear_fp8(*given)) is not Tensor
    with torch.autograd.forward_ad.dual_level():
        assert says(given) == 1
    assert torch.func.vmap(lambda _: fast.linear_fp8(*given))(torch.zeros(2))[0, 0, 0] == 1
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: fast.linear_fp8(x, *given[1:]))(given[0]).graph
    assert "dsv4.linear_fp8" in str(graph)
    assert says(given) == 10


def test_compiled(world: World) -> None:
    given = operands()
    compiled = torch.compile(fast.linear_fp8, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert compiled(*given)[0, 0] == 1
        says(given)
    assert says(given) == 10


def test_inference_mode(world: World) -> None:
    given = operands()
    assert [says(given) for _ in range(2)] == [1, 10]
    with torch.inference_mode():
        inside = operands()
        for each in (given, inside):
            assert [says(each) for _ in range(2)] == [1, 10]
            assert fast.linear_fp8(*each).is_inference()
    assert says(inside) in (1, 10)
    assert says(inside) == 10
    assert not fast.linear_fp8(*given).is_inference()


def test_tensors_that_are_not_what_they_look_like(world: World) -> None:
    x, weight, _ = operands()
    scales = torch.ones(1, 1)
    assert [says((x, weight, scales)) for _ in range(2)] == [1, 10]
    negated = torch.view_as_complex(torch.ones(1, 1, 2)).conj().imag
    plain = torch.view_as_complex(torch.ones(1, 1, 2)).imag
    assert negated.is_neg()
    assert negated.stride() == plain.stride()
    for other in (negated, torch._efficientzerotensor((1, 1)), torch._to_functional_tensor(scales)):
        for _ in range(3):
            try:
                assert says((x, weight, other)) == 1
            except RuntimeError:  # torch does not run an operator of ours on it
                assert other is not negated

    class Own(Tensor):
        pass

    for _ in range(3):
        assert says((x, weight.as_subclass(Own), scales)) == 1
    assert world.memory._count == 1


def test_a_check_that_gradients_decide_is_made_again(world: World) -> None:
    x, weight, scales = operands()
    x.requires_grad_()
    with torch.no_grad():
        assert [says((x, weight, scales)) for _ in range(2)] == [1, 10]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="x: got a tensor that requires grad"):
            fast.linear_fp8(x, weight, scales)
    with torch.no_grad():
        assert says((x, weight, scales)) == 10


def test_transforms_of_an_unknown_kind_get_the_operator(world: World) -> None:
    x, weight, scales = operands()
    assert torch.func.vmap(lambda x: fast.linear_fp8(x, weight, scales))(x[None].expand(2, 3, 128))[0, 0, 0] == 1
    assert world.memory._count == 0


def test_nested_tensors_do_not_reach_the_guards(world: World) -> None:
    x, weight, scales = operands()
    assert [says((x, weight, scales)) for _ in range(2)] == [1, 10]
    nested = torch.nested.nested_tensor([torch.ones(3, 128)]).bfloat16()
    with pytest.raises(Exception, match=r"NestedTensor|bfloat16"):  # that the process goes on is what counts
        fast.linear_fp8(nested, weight, scales)


def test_watched_calls_are_not_kept(world: World) -> None:
    for _ in range(3):
        with torch.device("cpu"):
            assert says(operands()) == 1
        with torch.autograd.forward_ad.dual_level():
            assert says(operands()) == 1
    assert world.memory._count == 0


def test_a_kind_is_kept_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by threads that have not seen each other's."""
    monkeypatch.setattr(Memory, "recall", lambda *_: None)
    assert [says(operands()) for _ in range(3)] == [1, 1, 1]
    assert world.memory._count == 1


def test_what_cannot_be_kept_does_not_fail_a_call_that_went_well(world: World) -> None:
    for _ in range(2):
        with use(deterministic=[1]):  # type: ignore[arg-type] # no key
            assert says(operands()) == 1
    uninitialised = torch.nn.parameter.UninitializedParameter(dtype=torch.float32)
    with pytest.raises(ArgumentError, match="x: got float32"):
        fast.linear_fp8(uninitialised, *operands()[1:])


def test_meta_tensors_with_a_backend_by_name() -> None:
    """The operator's fake answers, and no row is there to prepare anything."""
    for _ in range(2):
        assert fast.linear_fp8(*(part.to("meta") for part in operands()), impl="triton").is_meta


def test_a_row_that_calls_the_function_while_it_prepares(world: World) -> None:
    def prepare(x: Tensor, *_: Any) -> None:
        assert len(x) == 5 or says(operands(5)) == 1

    world.table(Implementation("triton", any_device, any_arguments, answer(1), prepare=prepare))
    assert [says(operands()) for _ in range(2)] == [1, 1]
    assert world.memory._count == 2


def test_options_are_kept_as_they_were_checked() -> None:
    class Scale(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
        ue8m0 = "ue8m0"

    o, weight, scales = torch.randn(3, 2, 128).bfloat16(), torch.randn(2, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    expected = projection.project_groups(o, weight, scales, impl="eager")
    for _ in range(3):
        assert torch.equal(projection.project_groups(o, weight, scales, scale=Scale.ue8m0, impl="eager"), expected)
    assert torch.equal(projection.project_groups(o, weight, scales, impl="eager"), expected)


def test_forms_with_as_many_tensors_are_apart() -> None:
    o, weight, scales = torch.randn(3, 2, 128).bfloat16(), torch.randn(2, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, 1)
    for _ in range(2):
        projection.project_groups(o, weight, scales, impl="eager")
    with pytest.raises(ArgumentError, match=r"o\.codes: got bfloat16"):
        projection.project_groups(Quantized(o, scales), weight, impl="eager")


def test_few_kinds_are_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "MOST", 3)
    for tokens in range(1, 20):
        given = operands(tokens)
        assert fast.linear_fp8(*given)[0, 0] == 1
        assert fast.linear_fp8(*given)[0, 0] == 10
        assert sum(map(len, world.memory._known.values())) == world.memory._count <= 3


def test_kinds_of_one_size_lie_beside_each_other(world: World) -> None:
    x, weight, scales = operands()
    kinds = [(x, weight, scales), (x, weight, scales.to(torch.float8_e8m0fnu)), (x, torch.nn.Parameter(weight, False), scales)]
    assert [says(each) for each in kinds * 2] == [1, 1, 1, 10, 10, 10]
    assert len(world.memory._known) == 1


def test_without_what_compares_tensors_every_call_is_looked_at(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recall._guards() is not None
    monkeypatch.setattr(recall, "_guards", lambda: None)
    assert [says(operands()) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize("memory", [fast._fp8, fast._mxfp8, projection._groups])
def test_every_product_has_a_memory_of_its_own(memory: Memory) -> None:
    assert memory._function in dispatch.TABLES
    assert [each is memory for each in (fast._fp8, fast._mxfp8, projection._groups)].count(True) == 1


def test_another_card_is_made_the_current_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    card, current = torch.device("cuda", 1), [0]

    class On:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            current.append(self.device.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(dispatch, "describe", lambda device: dispatch.Device("cuda", (9, 0)))
    rows = (Implementation("eager", any_device, any_arguments, answer(1), prepare=lambda *_: lambda *__: current[-1]),)
    world.table(*rows)
    call = dispatch.prepare(FUNCTION, card, (*operands(), None, 128), None)
    assert call is not None
    assert call() == 1
    current.append(1)
    assert call() == 1


def test_an_environment_that_is_not_the_process_s_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands()
    assert [says(given) for _ in range(2)] == [1, 10]
    monkeypatch.setattr("os.environ", {"DSV4_IMPL": "linear=eager"})
    assert [says(given) for _ in range(2)] == [2, 2]
