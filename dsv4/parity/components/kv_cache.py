"""Contract of the KV cache: bytes are E0 in every layout, whatever the rows and the slots are, and so is what is read back.

Rows that come out of a norm and a rotation have rounded first: `norm_rope_store_kv` is E1 where both are exact, and E4 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dsv4.formats import E2M1, E4M3, KV_LAYOUTS
from dsv4.kv_checks import same_numbers
from dsv4.parity import invariants, kv_inputs, strategies
from dsv4.parity.contracts import Call, Contract, Domain, Invariant, Output, Rows, Spec
from dsv4.parity.kv_bounds import permits_row_bytes, stored_records
from dsv4.parity.kv_inputs import Build
from dsv4.parity.levels import Level
from dsv4.rope_tables import rope_frequencies, rope_table

LAYOUTS = tuple(KV_LAYOUTS)
RECORDS = ("v4", "v41", "v41_fp4", "uniform_fp8")  # one of each kind of record
KEEPS = ("run_to_run", "poisoned_output", "batch", "padding", "strides", "empty", "fullgraph", "opcheck", "graph_replay")
SOME = st.just(["fresh", "absent"])
ROUNDED = ("normal", "integers", "zeros", "spike", "equal", "positive", "outliers", "realistic")  # squares neither vanish nor overflow
POSITIONS = 24
# Ways to call norm_rope_store_kv: each is a graph to a compiler.
FORMS: tuple[Spec, ...] = (
    {"layout": "v41", "weight": "bf16", "eps": 1e-20, "rotated": 64, "integers": "int64"},
    {"layout": "v4", "weight": "fp32", "eps": 3.0, "rotated": 64, "integers": "int64"},
    {"layout": "v41_fp4_inline", "weight": "bf16", "eps": 1e-20, "rotated": 64, "integers": "int64"},
    {"layout": "uniform_fp8", "weight": "bf16", "eps": 3.0, "rotated": 32, "integers": "int32"},
    {"layout": "v41_inline", "weight": "bf16", "eps": 1e-20, "rotated": 64, "integers": "int64", "floor": "flashmla"},
    {"layout": "v41_fp4", "weight": "fp32", "eps": 1e-20, "rotated": 64, "integers": "int64"},
)


def _quantize() -> Contract:
    def build(spec: Spec, device: torch.device) -> Call:
        layout = KV_LAYOUTS[spec["layout"]]
        kwargs = {name: value for name, value in kv_inputs.options({**spec, "page_size": 1}).items() if name != "page_size"}
        return Call((kv_inputs.kv_rows(spec, layout, spec["rows"]).to(device),), kwargs)

    def specs(layouts: tuple[str, ...]) -> st.SearchStrategy[Spec]:
        return strategies.specs(
            layout=st.sampled_from(layouts),
            rows=st.one_of(st.integers(1, 9), st.sampled_from([40, 0])),
            floor=st.sampled_from(kv_inputs.FLOORS if len(layouts) > 1 else ("official",)),
            classes=strategies.some_of(tuple(strategies.VALUE_CLASSES)),
            seed=strategies.seeds(),
        )

    exhaustive = [
        kv_inputs.every_bf16(KV_LAYOUTS[name], partner, word)
        for name in RECORDS
        for word, partner in (("alone", 0.0), ("beside", E2M1.max if name == "v41_fp4" else E4M3.max))
        if word == "alone" or name != "uniform_fp8"
    ]
    return Contract(
        "kv_cache",
        "quantize_kv",
        domains=(
            *exhaustive,
            *(Domain(name, build, specs((name,)), why="all classes of values") for name in LAYOUTS),
            Domain("floors", build, specs(("v4", "v41", "v41_inline")), why="every floor of amax"),
        ),
        outputs=(Output("result", Level.E0, "the quantiser's codes and scales, copied bf16, and zero padding"),),
        invariants=(
            *invariants.on("v4", *KEEPS, "inputs_unchanged"),
            *invariants.on("v41_fp4", "batch", "padding", "strides", "poisoned_output", "empty"),
            *invariants.on("uniform_fp8", "batch", "padding", "strides", "empty"),
        ),
        rows=Rows(),
    )


def _read_slots(pages_at: int) -> Rows:
    """Rows of a store: the record in each row's slot."""

    def read(call: Call, name: str, tensor: Tensor) -> Tensor:
        return stored_records(tensor, call[pages_at + 1], KV_LAYOUTS[call["layout"]], call["page_size"])

    return Rows((*range(pages_at), pages_at + 1), read)


def _store() -> Contract:
    def named(name: str, layouts: tuple[str, ...], why: str, **fixed: st.SearchStrategy[object]) -> Domain:
        return Domain(name, kv_inputs.store_call, kv_inputs.store_specs(layouts, **fixed), why=why)

    far = {"far": st.just(True), "page_size": st.sampled_from([16, 64]), "pages": st.just(2), "gap": st.just(0)}
    return Contract(
        "kv_cache",
        "store_kv",
        domains=(
            *(named(name, (name,), "rows and records, slots of all kinds, pages of random bytes") for name in LAYOUTS),
            named("plain", ("v4", "v41_fp4"), "every slot once", slots=SOME, floor=st.just("official")),
            named("far", LAYOUTS, "pages beyond byte 2^31 (KV-04)", **far),
        ),
        outputs=(Output("result", Level.E0, "moves bytes; of equal slots the last row; all else is left alone"),),
        invariants=(*invariants.on("plain", *KEEPS), *invariants.but("plain", 1), *invariants.on("uniform_fp8", "run_to_run")),
        rows=_read_slots(1),
    )


def _load() -> Contract:
    def named(name: str, layouts: tuple[str, ...], why: str, **fixed: st.SearchStrategy[object]) -> Domain:
        return Domain(name, kv_inputs.load_call, kv_inputs.load_specs(layouts, **fixed), why=why)

    far = {"far": st.just(True), "page_size": st.sampled_from([16, 64]), "pages": st.just(2), "gap": st.just(0)}
    return Contract(
        "kv_cache",
        "load_kv",
        domains=(
            *(kv_inputs.every_pair(KV_LAYOUTS[name]) for name in RECORDS),
            *(named(name, (name,), "pages of random bytes, slots of all kinds and shapes") for name in LAYOUTS),
            named("plain", ("v4", "v41_fp4"), "a vector of slots", more=st.just([])),
            named("far", LAYOUTS, "pages beyond byte 2^31 (KV-04)", **far),
        ),
        outputs=(Output("result", Level.E0, "one product and one rounding, or copied bf16", any_nan=True),),
        invariants=(*invariants.on("plain", *KEEPS, "inputs_unchanged"), *invariants.on("v41", "strides")),
        rows=Rows((1,)),
    )


def _convert() -> Contract:
    pairs = [(one, other) for one in LAYOUTS for other in LAYOUTS]
    moved = [(one, other) for one, other in pairs if same_numbers(KV_LAYOUTS[one], KV_LAYOUTS[other])]
    others = [pair for pair in pairs if pair not in moved]
    keeps = ("run_to_run", "inputs_unchanged", "poisoned_output", "strides", "fullgraph", "opcheck", "graph_replay")
    return Contract(
        "kv_cache",
        "convert_layout",
        domains=(
            Domain("moved", kv_inputs.convert_call, kv_inputs.convert_specs(moved, requantised=False), why="random bytes"),
            Domain(
                "planar",
                kv_inputs.convert_call,
                kv_inputs.convert_specs([("v41", "v41_inline"), ("v41_fp4_inline", "v41_fp4")], requantised=False),
                why="between the two arrangements",
            ),
            Domain("resized", kv_inputs.convert_call, kv_inputs.convert_specs([("v4", "v4")], requantised=False), why="another page size"),
            Domain("requantised", kv_inputs.convert_call, kv_inputs.convert_specs(others, requantised=True), why="between numbers"),
        ),
        outputs=(Output("result", Level.E0, "moves records, or decodes and quantises them; all else is zero"),),
        invariants=(*invariants.on("planar", *keeps), *invariants.on("requantised", "poisoned_output", "strides")),
        not_claimed=("requantising gives back what was there: what the target cannot hold is lost",),
    )


def _page_slots() -> Contract:
    return Contract(
        "kv_cache",
        "page_slots",
        domains=(
            Domain("few", kv_inputs.few_entries, exhaustive=72, why="every request and index in and around a small table"),
            Domain("drawn", kv_inputs.table_call, kv_inputs.table_specs(), why="all sizes, and the ends of the integers"),
        ),
        outputs=(Output("result", Level.E0, "integers"),),
        invariants=invariants.on("drawn", *KEEPS, "inputs_unchanged"),
        rows=Rows((1, 2)),
    )


def _norm_rope_specs(forms: Sequence[Spec], **fixed: st.SearchStrategy[object]) -> st.SearchStrategy[Spec]:
    sizes = {name: part for name, part in kv_inputs.sizes(LAYOUTS, most_rows=24).items() if name not in ("layout", "integers")}
    return strategies.specs(form=st.sampled_from(list(forms)), **{**sizes, **fixed}, seed=strategies.seeds())


def _chain(rows_and_table: Build) -> Build:
    """kv, weight and table of `rows_and_table`; positions, some of them absent; pages and slots."""

    def build(spec: Spec, device: torch.device) -> Call:
        spec = {**spec, **spec["form"]}
        made = rows_and_table(spec, device)
        pages = kv_inputs.pool(spec, device)
        source = strategies.generator(spec["seed"] ^ 5)
        positions = torch.randint(-1, POSITIONS + 1, (spec["rows"],), generator=source).to(kv_inputs.INTEGERS[spec["integers"]])
        slots = kv_inputs.slot_numbers(spec, (spec["rows"],), pages.shape[0] * spec["page_size"])
        return Call((*made.args, positions.to(device), pages, slots.to(device)), {**made.kwargs, **kv_inputs.options(spec)})

    return build


def _exact_rows(spec: Spec, device: torch.device) -> Call:
    """Rows of +-2^k, whose root mean square is 2^k, or of zeros; weights of 12 bits; cosines and sines of three.

    With an eps of 3 all k are 0, so that the norm halves.
    """
    source = strategies.generator(spec["seed"])
    dims, rows = KV_LAYOUTS[spec["layout"]].dims, spec["rows"]
    signs = 1 - 2 * torch.randint(0, 2, (rows, dims), generator=source)
    powers = torch.randint(-8, 9, (rows, 1), generator=source) * (spec["eps"] < 1)
    kv = torch.ldexp(signs.double(), powers) * (torch.rand(rows, 1, generator=source) < 0.9)
    weight = torch.randint(-2047, 2048, (dims,), generator=source) / 512
    table = torch.randint(-4, 5, (POSITIONS, spec["rotated"]), generator=source) / 4
    chosen = weight.to(torch.bfloat16 if spec["weight"] == "bf16" else torch.float32)
    return Call((kv.to(torch.bfloat16).to(device), chosen.to(device), table.to(device)), {"eps": spec["eps"]})


def _rounded_rows(spec: Spec, device: torch.device) -> Call:
    source = strategies.generator(spec["seed"])
    layout = KV_LAYOUTS[spec["layout"]]
    weight = torch.randn(layout.dims, generator=source).to(torch.bfloat16 if spec["weight"] == "bf16" else torch.float32)
    table = rope_table(rope_frequencies(10000.0, spec["rotated"]), POSITIONS)
    kv = kv_inputs.kv_rows(spec, layout, spec["rows"])
    return Call((kv.to(device), weight.to(device), table.to(device)), {"eps": spec["eps"]})


def _norm_rope_store() -> Contract:
    rounded = {"classes": strategies.some_of(ROUNDED), "slots": SOME}
    return Contract(
        "kv_cache",
        "norm_rope_store_kv",
        domains=(
            Domain("lattice", _chain(_exact_rows), _norm_rope_specs(FORMS), why="exact norms and rotations, slots of all kinds"),
            Domain("bf16", _chain(_rounded_rows), _norm_rope_specs(FORMS, **rounded), why="any rows, every slot once"),
            Domain("plain", _chain(_rounded_rows), _norm_rope_specs(FORMS[:1], **rounded), why="one form"),
        ),
        outputs=(
            Output("result", Level.E1, "exact in any order; rounded to bf16 where stated", ("lattice",)),
            Output("result", Level.E4, "codes and scales of a row within its roundings", ("bf16", "plain"), permits=permits_row_bytes),
        ),
        invariants=(*invariants.on("plain", *KEEPS), Invariant("inputs_unchanged", "plain", {"but": (4,)})),
        rows=Rows((0, 3, 5), _read_slots(4).read),
    )


CONTRACTS = (_quantize(), _store(), _load(), _convert(), _page_slots(), _norm_rope_store())
