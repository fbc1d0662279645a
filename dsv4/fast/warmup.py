"""Everything that a model's functions compile, and every proof of a third-party function, before the first token.

`CALLS` lists, for each component, the calls of a model of a configuration: its widths, dtypes, groups, layouts. A graph or kernel is made
for all of these, and none of them for a number of tokens; so after one call of each nothing compiles, at any number of tokens. What only
another setting of a server asks for (expert placements, padding, shared slots) is compiled when it first runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4 import checks
from dsv4.configs import ModelConfig
from dsv4.fast import dispatch, quantization, routing, scales
from dsv4.fast.adapters import deepgemm, flashinfer, flashmla
from dsv4.types import ArgumentError

LIBRARIES = (deepgemm.LIBRARY, flashinfer.LIBRARY, flashmla.LIBRARY)

Call = tuple[str, Callable[[], Any]]


class Proof(NamedTuple):
    """What a third-party function came to on a device."""

    library: str
    version: str
    function: str
    device: str
    state: str  # "usable", "not usable" or "not tried"
    reason: str
    seconds: float


class Warmed(NamedTuple):
    """One call: what it compiled, and how long it took."""

    call: str
    graphs: int  # of inductor
    kernels: int  # of Triton, other than inductor's
    seconds: float


class WarmupReport(NamedTuple):
    """What `warmup` did."""

    device: str
    proofs: tuple[Proof, ...]
    calls: tuple[Warmed, ...]
    seconds: float

    def __str__(self) -> str:
        graphs, kernels = (sum(getattr(call, name) for call in self.calls) for name in ("graphs", "kernels"))
        lines = [f"{self.device}: {len(self.calls)} calls, {graphs} graphs and {kernels} kernels compiled, {self.seconds:.1f} s"]
        lines += [f"  {call.call}: {call.graphs} graphs, {call.kernels} kernels, {call.seconds:.1f} s" for call in self.calls]
        lines += [
            f"  {proof.version or proof.library} {proof.function}: {proof.state}: {proof.reason or 'proved'}" for proof in self.proofs
        ]
        return "\n".join(lines)


def warmup(
    config: ModelConfig, shapes: Sequence[int], *, device: torch.device | str | None = None, components: Sequence[str] | None = None
) -> WarmupReport:
    """Prove the libraries' functions and run every function that a model calls, so that afterwards nothing compiles on this device.

    Args:
        config: the model: one of `dsv4.configs`, or `from_checkpoint`.
        shapes: numbers of tokens to run, each at least 1. One is enough for the compilers; more also fill the caches of memory.
        device: None for the current CUDA device if there is one, else the CPU.
        components: None for all that a model calls.

    Returns:
        WarmupReport: proofs and calls in the order in which they were made.

    Raises:
        ArgumentError: no shape or one below 1, or a component that is not warmed.
        BackendUnavailable: a backend that `use()` or DSV4_IMPL demands cannot run.
    """
    if not shapes:
        raise ArgumentError("shapes", "none", "must be at least one number of tokens")
    for tokens in shapes:
        checks.at_least("shapes", tokens, 1)
    for component in components or ():
        checks.one_of("components", component, tuple(CALLS))
    where = dispatch.default_device(device)
    began = time.perf_counter()
    proofs = tuple(prove(where))
    calls = [
        _run(f"{component}: {name}, {tokens} tokens", call)
        for component in components or CALLS
        for tokens in shapes
        for name, call in CALLS[component](config, tokens, where)
    ]
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return WarmupReport(str(dispatch.describe(where)), proofs, tuple(calls), time.perf_counter() - began)


def prove(device: torch.device, *, again: bool = False, try_them: bool = True) -> Iterator[Proof]:
    """Try each function of each library on a device, unless it has been tried before; `again` tries failures anew."""
    described = dispatch.describe(device)
    for library in LIBRARIES:
        absent = library.missing() or library.devices(described)
        for function in library.probes:
            began = time.perf_counter()
            reason = absent or library.lacks(function)
            known = None if reason else library.recalled(function, device)
            if reason is None and (try_them or known is not None):
                reason = library.disproved(function, device, again=again) if try_them else known and known.wrong
                known = library.recalled(function, device)
            state = "not usable" if reason else "usable" if known else "not tried"
            yield Proof(library.name, library.version(), function, str(described), state, reason or "", time.perf_counter() - began)


def _run(name: str, call: Callable[[], Any]) -> Warmed:
    began = time.perf_counter()
    with counted() as count:
        call()
    return Warmed(name, *count(), time.perf_counter() - began)


@contextmanager
def counted() -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts the graphs of inductor and the kernels of our own that are compiled inside."""
    from torch._dynamo.utils import counters

    graphs, compiled = counters["stats"]["unique_graphs"], [0]
    with _each_kernel(lambda: compiled.__setitem__(0, compiled[0] + 1)):
        yield lambda: (counters["stats"]["unique_graphs"] - graphs, compiled[0])


@contextmanager
def _each_kernel(tell: Callable[[], None]) -> Iterator[None]:
    """Tells of each kernel that Triton has not had in this process, and compiles or loads now."""
    try:
        runtime = import_module("triton.knobs").runtime
    except ImportError:
        yield
        return
    before = runtime.jit_post_compile_hook

    def hook(**kernel: Any) -> Any:
        tell()
        return before(**kernel) if before is not None else None

    runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before


def _widths(config: ModelConfig) -> list[int]:
    """The inputs of a model's quantised products (spec A 0.5, M 3)."""
    of_output = config.o_groups * config.o_lora_rank
    widths = {config.hidden_size, config.q_lora_rank, of_output, config.moe_intermediate_size}
    return sorted(width for width in widths if width % config.activation_group == 0)


def _quantization(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Activations in the layouts that products take, KV rows and index keys as they come back from the cache (spec A 0.5, 3.2, 5.3)."""
    group = config.activation_group
    ours = [("ue8m0", layout) for layout in (("rows", "packed", "128x4") if config.is_v41 else ("rows", "packed"))]
    for width in _widths(config):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
        for scale, layout in (*ours, ("fp32", "mn_major")):
            call = partial(_there_and_back, x, group, scale=scale, scale_layout=layout)
            yield f"quantize_fp8, dequantize [{width}] {group} {scale} {layout}", call
    kv = torch.zeros(tokens, config.head_dim, dtype=torch.bfloat16, device=device)
    keys = torch.zeros(tokens, config.index_head_dim, dtype=torch.bfloat16, device=device)
    fake = quantization.fake_quantize
    if config.is_v41:
        yield "fake_quantize KV of the window", partial(fake, kv, 32)
        yield "fake_quantize compressed KV", partial(fake, kv, 16, format="fp4_e4m3")
    else:
        yield "fake_quantize KV", partial(fake, kv[:, : config.head_dim - config.qk_rope_head_dim], 64)
    yield "fake_quantize index keys", partial(fake, keys, 32, format="mxfp4")


def _scales(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Scales of activations, laid out again between producer and consumer (spec A 8; M 10 rows 10 to 13)."""
    for width in _widths(config):
        groups = width // config.activation_group
        rows = torch.zeros(tokens, groups, dtype=torch.uint8, device=device)
        live = torch.tensor(tokens, device=device)
        yield f"packed [{groups}]", partial(_as_packed, rows, live)
        yield f"align_mn_major [{groups}]", partial(scales.align_mn_major, rows.to(torch.float32))
        if config.is_v41:
            yield f"128x4 [{groups}]", partial(_as_tiles, rows, live)


def _there_and_back(x: Tensor, group: int, **options: str) -> None:
    codes, grid = quantization.quantize_fp8(x, group, **options)
    quantization.dequantize(codes, grid, group, scale_layout=options["scale_layout"])


def _as_packed(rows: Tensor, live: Tensor) -> None:
    packed = scales.pack_ue8m0(rows)
    scales.unpack_ue8m0(packed, rows.shape[1])
    scales.restride_rows(packed, len(rows) + 1)
    _padded(packed, live, "packed")


def _as_tiles(rows: Tensor, live: Tensor) -> None:
    tiles = scales.swizzle_128x4(rows)
    scales.unswizzle_128x4(tiles, *rows.shape)
    scales.packed_to_128x4(scales.packed_from_128x4(tiles, len(rows)))
    _padded(tiles, live, "128x4")


def _padded(grid: Tensor, live: Tensor, layout: str) -> None:
    for count in (live, int(live)):
        scales.zero_pad_rows(grid, count, scale_layout=layout)
        scales.zero_pad_rows(grid, count, scale_layout=layout, out=grid)


def _routing(config: ModelConfig, tokens: int, device: torch.device) -> Iterator[Call]:
    """Router of the layers of each kind: by score, by token id (V4's first), with image rows (V4.1); and of the draft's experts."""
    kinds = {(config.n_routed_experts, config.num_experts_per_tok)}
    if config.dspark is not None:
        kinds.add((config.dspark.n_routed_experts, config.dspark.num_experts_per_tok))
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    x = torch.zeros(tokens, config.hidden_size, dtype=torch.bfloat16, device=device)
    for experts, k in sorted(kinds):
        route = partial(routing.route, torch.zeros(tokens, experts, device=device), k, scale=config.routed_scaling_factor)
        bias = torch.zeros(experts, device=device)
        weight = torch.zeros(experts, config.hidden_size, dtype=torch.bfloat16, device=device)
        yield f"gate_logits {experts} experts", partial(routing.gate_logits, x, weight)
        yield f"route {experts} experts, {k} each", partial(route, bias=bias)
        if config.vision is not None and experts == config.n_routed_experts:
            images = {"image_bias": bias, "token_ids": ids, "image_token_id": config.vision.image_token_id}
            yield f"route {experts} experts with images", partial(route, bias=bias, **images)
        if config.num_hash_layers and experts == config.n_routed_experts:
            table = torch.zeros(config.vocab_size, k, dtype=torch.int64, device=device)
            yield f"route {experts} experts by token", partial(route, token_ids=ids, table=table)


# Codecs are parts of quantisers, and eplb of the router, for placements that a server chooses: a model calls neither by itself.
CALLS: dict[str, Callable[[ModelConfig, int, torch.device], Iterator[Call]]] = {
    "quantization": _quantization,
    "scales": _scales,
    "routing": _routing,
}
