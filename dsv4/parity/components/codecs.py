"""Contract of the codecs: bytes to numbers and back are E0 everywhere, over every code, every bf16, and the fp32 around every rounding
boundary.

A code of 8 bits has 256 values and a bf16 65536: those domains are run through whole. For fp32 input three domains: `edges` (every
midpoint and power of two, and its two fp32 neighbours, of both signs), `drawn` bit patterns, and, under the soak profile, all 2^32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E2M1, E4M3, NumberFormat
from dsv4.parity import invariants, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Output, Rows, Spec
from dsv4.parity.levels import Level
from dsv4.types import NibbleOrder, ScaleRounding, Ties, ZeroSign

KEEPS = (
    "run_to_run",
    "inputs_unchanged",
    "poisoned_output",
    "batch",
    "padding",
    "strides",
    "empty",
    "fullgraph",
    "opcheck",
    "graph_replay",
)
Options = dict[str, Any]


def _numbers(spec: Spec, device: torch.device) -> Tensor:
    return torch.arange(spec["first"], spec["first"] + spec["count"], dtype=torch.int64, device=device)


def _shapes(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    return strategies.specs(rows=strategies.rows(130), columns=st.integers(1, 70), **more, seed=strategies.seeds())


def _drawn(dtype: torch.dtype) -> Callable[[Spec, torch.device], Call]:
    def build(spec: Spec, device: torch.device) -> Call:
        x = strategies.random_bits((spec["rows"], spec["columns"]), spec["seed"], dtype)
        return Call((x.to(device),), spec.get("options", {}))

    return build


def _decoder(function: str, dtype: torch.dtype) -> Contract:
    def codes(view: torch.dtype) -> Callable[[Spec, torch.device], Call]:
        return lambda spec, device: Call((_numbers(spec, device).to(torch.uint8).view(view),))

    typed = () if dtype is torch.uint8 else (Domain("codes", codes(dtype), exhaustive=256, why="every code, in its own dtype"),)
    return Contract(
        "codecs",
        function,
        domains=(
            *typed,
            Domain("bytes", codes(torch.uint8), exhaustive=256, why="every code, as uint8"),
            Domain("drawn", _drawn(dtype), _shapes()),
        ),
        outputs=(Output("result", Level.E0, "a table of at most 256 exact values"),),
        invariants=invariants.on("drawn", *KEEPS),
        rows=Rows(),
    )


def edges(target: NumberFormat | None) -> Tensor:
    """fp32 numbers around every rounding boundary of a signed format (None: of powers of two), of both signs, then the specials."""
    if target is None:
        powers = torch.ldexp(torch.ones(276, dtype=torch.float64), torch.arange(-148, 128))
        centres = torch.cat([powers, 1.5 * powers]).float()
    else:
        table = strategies.magnitudes(target)
        step = table[-1] - table[-2]
        centres = torch.cat([table, (table[1:] + table[:-1]) / 2, target.max + step * torch.tensor([0.25, 0.5, 1.0])])
    bits = centres.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1], dtype=torch.int32)
    near = bits.clamp(0, 0x7F800000).view(torch.float32).flatten()
    specials = torch.tensor([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    half = torch.cat([near, specials])
    return torch.cat([half, -half])


def _encoder(function: str, target: NumberFormat | None, variants: dict[str, Options]) -> Contract:
    table = edges(target)

    def bf16(options: Options) -> Callable[[Spec, torch.device], Call]:
        return lambda spec, device: Call((_numbers(spec, device).to(torch.int16).view(torch.bfloat16),), options)

    def fp32(options: Options) -> Callable[[Spec, torch.device], Call]:
        return lambda spec, device: Call((_numbers(spec, device).to(torch.int32).view(torch.float32),), options)

    def near(options: Options) -> Callable[[Spec, torch.device], Call]:
        return lambda spec, device: Call((table[spec["first"] : spec["first"] + spec["count"]].to(device),), options)

    domains = [Domain(f"bf16{name}", bf16(options), exhaustive=2**16, why="every bf16") for name, options in variants.items()]
    domains += [
        Domain(f"edges{name}", near(options), exhaustive=len(table), why="every boundary and its neighbours")
        for name, options in variants.items()
    ]
    domains += [Domain(f"fp32{name}", fp32(options), exhaustive=2**32, why="every fp32") for name, options in variants.items()]
    drawn = Domain("drawn", _drawn(torch.float32), _shapes(options=st.sampled_from(list(variants.values()))), why="fp32 bit patterns")
    return Contract(
        "codecs",
        function,
        domains=(*domains, drawn),
        outputs=(Output("result", Level.E0, "one rounding, decided by comparing bits; specials are stated"),),
        invariants=invariants.on("drawn", *KEEPS),
        rows=Rows(),
    )


def _nibbles(
    function: str, exhaustive: int, build: Callable[[Spec, torch.device], Tensor], dtypes: Sequence[torch.dtype], width: int
) -> Contract:
    orders = [str(order) for order in NibbleOrder]

    def whole(order: str, dtype: torch.dtype) -> Callable[[Spec, torch.device], Call]:
        return lambda spec, device: Call((build(spec, device).view(dtype),), {"order": order})

    def drawn(spec: Spec, device: torch.device) -> Call:
        x = strategies.random_bits((spec["rows"], width * spec["columns"]), spec["seed"], torch.uint8)
        return Call((x.to(device),), {"order": spec["order"]})

    domains = [
        Domain(f"{str(dtype).removeprefix('torch.')}_{order}", whole(order, dtype), exhaustive=exhaustive)
        for order in orders
        for dtype in dtypes
    ]
    return Contract(
        "codecs",
        function,
        domains=(*domains, Domain("drawn", drawn, _shapes(order=st.sampled_from(orders)))),
        outputs=(Output("result", Level.E0, "moves bits"),),
        invariants=invariants.on("drawn", *KEEPS),
        rows=Rows(),
    )


def _pairs(spec: Spec, device: torch.device) -> Tensor:
    numbers = _numbers(spec, device)
    return torch.stack([numbers & 255, numbers >> 8], -1).to(torch.uint8)


def _bytes(spec: Spec, device: torch.device) -> Tensor:
    return _numbers(spec, device).to(torch.uint8)[:, None]


E2M1_VARIANTS: dict[str, Options] = {
    "" if (ties, zero) == (Ties.EVEN, ZeroSign.KEPT) else f"_{ties}_{zero}": {"ties": str(ties), "zero_sign": str(zero)}
    for ties in Ties
    for zero in ZeroSign
}

CONTRACTS = (
    _decoder("decode_e4m3", torch.float8_e4m3fn),
    _decoder("decode_e5m2", torch.float8_e5m2),
    _decoder("decode_e8m0", torch.float8_e8m0fnu),
    _decoder("decode_e2m1", torch.uint8),
    _encoder("encode_e4m3", E4M3, {"": {}}),
    _encoder("encode_e8m0", None, {f"_{rounding}": {"rounding": str(rounding)} for rounding in ScaleRounding}),
    _encoder("encode_e2m1", E2M1, E2M1_VARIANTS),
    _nibbles("pack_fp4", 2**16, _pairs, (torch.uint8,), 2),
    _nibbles("unpack_fp4", 256, _bytes, (torch.uint8, torch.int8), 1),
)
