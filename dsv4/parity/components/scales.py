"""Contract of the scale layouts: they move bits, so every output is E0, with its strides and with the pad words around it.

Sources are random bits; where a layout has pads these are ones in a source (NaN to whoever reads them) and must be zeros in a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import TILE_ROWS, TMA_BYTES, WORD_GROUPS, align
from dsv4.parity import invariants, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Invariant, Output, Rows, Spec
from dsv4.parity.levels import Level

ALONE = ("run_to_run", "inputs_unchanged", "poisoned_output", "strides", "fullgraph", "opcheck", "graph_replay")
BY_ROW = ("batch", "padding", "empty")
WHY = "moves bits"
Build = Callable[[Spec, torch.device], Call]


def tall(most: int = 1000) -> st.SearchStrategy[int]:
    """Rows: few, or near the edges of columns and tiles, at times none or `most`."""
    edges = st.sampled_from([2, 0, 127, 128, 129, 200, 256, most])
    return st.one_of(st.integers(1, 9), edges, st.integers(1, 260))


def _wide() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(1, 9), st.sampled_from([56, 0]))


def in_columns(values: Tensor) -> Tensor:
    """[..., rows, columns] of four bytes each, with the strides of packed and MN-major scales and ones in every pad bit."""
    *batch, rows, columns = values.shape
    memory = torch.full((*batch, columns, align(rows, TMA_BYTES // 4)), -1, dtype=torch.int32, device=values.device)
    memory[..., :rows] = values.view(torch.int32).transpose(-1, -2)
    return memory.transpose(-1, -2)[..., :rows, :].view(values.dtype)


def whole_columns(scales: Tensor) -> Tensor:
    """What `in_columns` has in memory: [..., columns, align(rows, 4)], pads included."""
    *batch, rows, columns = scales.shape
    return scales.as_strided((*batch, columns, align(rows, TMA_BYTES // 4)), (*scales.stride()[:-2], scales.stride(-1), 1))


def flat(tensor: Tensor) -> Tensor:
    """The elements as a vector; a RuntimeError unless they lie next to each other."""
    return tensor.view(-1)


def rows_of_tiles(tiles: Tensor, rows: int) -> Tensor:
    """128x4 tiles [tiles, words, 32, 4] as [rows, words]."""
    return tiles.permute(0, 3, 2, 1).flatten(0, 2)[:rows]


def _words(spec: Spec) -> int:
    return align(spec["groups"], WORD_GROUPS) // WORD_GROUPS


def _shape(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    return strategies.specs(rows=tall(), groups=_wide(), **more, seed=strategies.seeds())


def _batches() -> st.SearchStrategy[list[int]]:
    return st.sampled_from([[2], [1], [3, 2], [0]])


def _row_major(spec: Spec, device: torch.device) -> Call:
    """Scales in rows, e8m0 or uint8."""
    scales = strategies.random_bits((*spec.get("batch", ()), spec["rows"], spec["groups"]), spec["seed"], torch.uint8)
    return Call(((scales.view(torch.float8_e8m0fnu) if spec["dtype"] == "e8m0" else scales).to(device),))


def _every_byte(spec: Spec, device: torch.device) -> Call:
    """Each byte at each place of a word."""
    byte = torch.arange(spec["first"], spec["first"] + spec["count"])[:, None]
    return Call((((byte + torch.tensor([0, 85, 170, 255])) % 256).to(torch.uint8).to(device),))


def _packed_words(spec: Spec, device: torch.device) -> Tensor:
    words = strategies.random_bits((*spec.get("batch", ()), spec["rows"], _words(spec)), spec["seed"], torch.int32)
    return in_columns(words.to(device))  # moved first: a move would lose the pads


def _packed(*more: str) -> Build:
    """Packed scales, then entries of the spec."""
    return lambda spec, device: Call((_packed_words(spec, device), *(spec[name] for name in more)))


def _tile_words(spec: Spec) -> Tensor:
    tiles = align(spec["rows"], TILE_ROWS) // TILE_ROWS
    return strategies.random_bits((*spec.get("batch", ()), tiles, _words(spec), 32, 4), spec["seed"], torch.int32)


def _tiles(*more: str) -> Build:
    """128x4 scales, every pad random, then entries of the spec."""
    return lambda spec, device: Call((_tile_words(spec).to(device), *(spec[name] for name in more)))


def _buffer(spec: Spec, device: torch.device) -> Call:
    """128x4 scales as FlashInfer's bytes."""
    return Call((_tile_words(spec).view(torch.uint8).flatten().to(device), spec["rows"], spec["groups"]))


def _fp32(spec: Spec, device: torch.device) -> Call:
    bits = strategies.random_bits((*spec.get("batch", ()), spec["rows"], spec["groups"]), spec["seed"], torch.float32)
    return Call((bits.to(device),))


def _contract(
    function: str,
    domains: Sequence[Domain],
    kept: Sequence[Invariant],
    *,
    columns: Sequence[str] | bool = False,
    rows: Rows | None = None,
) -> Contract:
    """`columns` names the domains whose results have pad words behind their columns, or says that all or none have."""
    chosen = [domain.name for domain in domains] if columns is True else list(columns or ())
    others = [domain.name for domain in domains if domain.name not in chosen]
    outputs = []
    if chosen:
        outputs.append(Output("result", Level.E0, WHY, tuple(chosen), view=whole_columns, strides=True))
    if others:
        outputs.append(Output("result", Level.E0, WHY, tuple(others), view=flat))
    return Contract("scales", function, tuple(domains), tuple(outputs), tuple(kept), rows)


def _from_rows(function: str, *, columns: bool, read: Callable[[Call, str, Tensor], Tensor] | None) -> Contract:
    dtypes = st.sampled_from(["e8m0", "uint8"])
    domains = (
        Domain("bytes", _every_byte, exhaustive=256, why="every byte at each place of a word"),
        Domain("drawn", _row_major, _shape(dtype=dtypes)),
        Domain("batched", _row_major, _shape(dtype=dtypes, batch=_batches())),
    )
    kept = (*invariants.on("drawn", *ALONE, *BY_ROW), *invariants.on("batched", "strides"))
    return _contract(function, domains, kept, columns=columns, rows=Rows(read=read))


def _read_tiles(call: Call, name: str, tensor: Tensor) -> Tensor:
    return rows_of_tiles(tensor, call[0].shape[0])


def _unpack() -> Contract:
    domains = (
        Domain("drawn", _packed("groups"), _shape(), why="pads of ones"),
        Domain("batched", _packed("groups"), _shape(batch=_batches())),
    )
    kept = (*invariants.on("drawn", *ALONE, *BY_ROW), *invariants.on("batched", "strides", "batch"))
    return _contract("unpack_ue8m0", domains, kept, rows=Rows())


def _align() -> Contract:
    domains = (
        Domain("drawn", _fp32, _shape(), why="bit patterns: NaN keeps its payload"),
        Domain("batched", _fp32, _shape(batch=_batches())),
    )
    kept = (*invariants.on("drawn", *ALONE, *BY_ROW), *invariants.on("batched", "strides"))
    return _contract("align_mn_major", domains, kept, columns=True, rows=Rows())


def _unswizzle() -> Contract:
    domains = (
        Domain("drawn", _tiles("rows", "groups"), _shape(), why="words, pads random"),
        Domain("bytes", _buffer, _shape(), why="FlashInfer's buffer"),
        Domain("batched", _tiles("rows", "groups"), _shape(batch=_batches())),
    )
    kept = (*invariants.on("drawn", *ALONE), *invariants.on("bytes", "strides"), *invariants.on("batched", *BY_ROW, "strides"))
    return _contract("unswizzle_128x4", domains, kept, rows=Rows())


def _live(spec: Spec, rows: int, device: torch.device) -> int | Tensor:
    """An int in range; or a tensor, in range or not."""
    if spec["live_as"] == "int":
        return max(0, min(rows, int(spec["live"])))
    dtype = torch.int64 if spec["live_as"] == "int64" else torch.int32
    live = torch.tensor(spec["live"], dtype=dtype, device=device)
    return live.reshape(1) if spec["live_as"] == "vector" else live


def _zero_pad(layout: str) -> Domain:
    def build(spec: Spec, device: torch.device) -> Call:
        scales = _packed_words(spec, device) if layout == "packed" else _tile_words(spec).to(device)
        rows = spec["rows"] if layout == "packed" else scales.shape[0] * TILE_ROWS
        return Call((scales, _live(spec, rows, device)), {"scale_layout": layout})

    live = st.one_of(st.integers(-3, 20), st.sampled_from([127, 128, 129, 255, 300, 2000]))
    kinds = st.sampled_from(["int", "int32", "int64", "vector"])
    return Domain("packed" if layout == "packed" else "swizzled", build, _shape(live=live, live_as=kinds), why="pads and dead rows of ones")


def _zero_pad_rows() -> Contract:
    kept = (*invariants.on("packed", *ALONE, "guards"), *invariants.on("swizzled", *ALONE, "guards"))
    return _contract("zero_pad_rows", (_zero_pad("packed"), _zero_pad("128x4")), kept, columns=("packed",))


def _restride() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        return Call((_packed_words(spec, device), spec["rows"] + spec["more"]))

    more = st.one_of(st.integers(0, 5), st.sampled_from([128, 257]))
    return _contract("restride_rows", (Domain("drawn", build, _shape(more=more)),), invariants.on("drawn", *ALONE), columns=True)


def _utccp() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        return _packed()({**spec, "rows": spec["pages"] * TILE_ROWS}, device)

    def back(spec: Spec, device: torch.device) -> Call:
        return Call(build(spec, device).args, {"inverse": True})

    specs = strategies.specs(pages=st.integers(1, 4), groups=_wide(), seed=strategies.seeds())
    domains = Domain("drawn", build, specs), Domain("inverse", back, specs)
    kept = (*invariants.on("drawn", *ALONE), *invariants.on("inverse", *ALONE))
    return _contract("utccp_rows", domains, kept, columns=True)


def _of_experts(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[Spec]:
    sizes = {"experts": st.integers(1, 3), "n": st.integers(1, 4), "k": st.integers(1, 4)}
    return strategies.specs(**sizes, **more, seed=strategies.seeds())


def _hopper() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        return _row_major({**spec, "batch": [spec["experts"]], "rows": 64 * spec["n"], "groups": 4 * spec["k"]}, device)

    domain = Domain("drawn", build, _of_experts(dtype=st.sampled_from(["e8m0", "uint8"])))
    return _contract("interleave_hopper_fp4", (domain,), invariants.on("drawn", *ALONE, *BY_ROW), rows=Rows())


def _hopper_back() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        shape = (spec["experts"], spec["n"], spec["k"], 16, 16)
        return Call((strategies.random_bits(shape, spec["seed"], torch.uint8).to(device),))

    kept = invariants.on("drawn", *ALONE, *BY_ROW)
    return _contract("deinterleave_hopper_fp4", (Domain("drawn", build, _of_experts()),), kept, rows=Rows())


CONTRACTS = (
    _from_rows("pack_ue8m0", columns=True, read=None),
    _unpack(),
    _align(),
    _from_rows("swizzle_128x4", columns=False, read=_read_tiles),
    _unswizzle(),
    _contract(
        "packed_to_128x4",
        (Domain("drawn", _packed(), _shape(), why="pads of ones"),),
        invariants.on("drawn", *ALONE, *BY_ROW),
        rows=Rows(read=_read_tiles),
    ),
    _contract("packed_from_128x4", (Domain("drawn", _tiles("rows"), _shape()),), invariants.on("drawn", *ALONE), columns=True),
    _zero_pad_rows(),
    _restride(),
    _utccp(),
    _hopper(),
    _hopper_back(),
)
