"""Around the KV cache: confusions named by their bytes, `dsv4 layout explain`, and what the contract's bounds let through."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from dsv4 import cli
from dsv4.formats import KV_LAYOUTS
from dsv4.parity import contracts, debug, engine
from dsv4.parity.candidates import Candidate
from dsv4.parity.debug import detect_layout_mismatch
from dsv4.parity.mutants import kv_cache as mutants
from dsv4.parity.mutants import kv_records
from dsv4.reference import kv_cache
from dsv4.reference.quantization import quantize_fp4_e4m3
from dsv4.types import ArgumentError

LAYOUTS = list(KV_LAYOUTS)
SIZE = 4
SLOTS = torch.tensor([9, 0, -1, 6, 3, 13, 16])


def rows(seed=0):
    kv = torch.randn(7, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
    kv[3, :256] *= 2.0**-14  # below FlashMLA's floor
    return kv


def pool(name):
    return torch.zeros(4, KV_LAYOUTS[name].page_bytes(SIZE), dtype=torch.uint8)


def found(pages, kv, name):
    return {confusion.name: confusion.share for confusion in detect_layout_mismatch(pages, SLOTS, kv, layout=name, page_size=SIZE)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_clean_pages_have_no_confusion(name):
    kv = rows()
    pages = kv_cache.store_kv(kv, pool(name), SLOTS, layout=name, page_size=SIZE)
    assert detect_layout_mismatch(pages, SLOTS, kv, layout=name, page_size=SIZE) == ()
    pages[:, SIZE * KV_LAYOUTS[name].token_bytes :] = 0xFF  # padding is nobody's promise
    if name == "v4":
        pages[:, SIZE * 576 + 7 : SIZE * 584 : 8] = 0xFF
    assert detect_layout_mismatch(pages, SLOTS, kv, layout=name, page_size=SIZE) == ()
    twice = torch.tensor([5, 5, 1, 2, 3, 4, 0])
    pages = kv_cache.store_kv(kv, pool(name), twice, layout=name, page_size=SIZE)
    assert detect_layout_mismatch(pages, twice, kv, layout=name, page_size=SIZE) == ()


@pytest.mark.parametrize(
    ("name", "writer", "confusion"),
    [
        ("v4", mutants._store_by(mutants._other_arrangement), "inline"),
        ("v41", mutants._store_by(mutants._other_arrangement), "layout v41_inline"),
        ("v41_fp4", mutants._store_by(mutants._other_arrangement), "layout v41_fp4_inline"),
        ("v41_inline", mutants._store_by(mutants._other_arrangement), "layout v41"),
        ("v41_fp4_inline", mutants._store_by(mutants._other_arrangement), "layout v41_fp4"),
        ("v4", mutants._store_by(mutants._dense_pages), "pages without padding"),
        ("v41", mutants._store_by(mutants._dense_pages), "pages without padding"),
        ("v41_fp4", mutants._store_by(mutants._dense_pages), "pages without padding"),
        *((name, mutants._store_by(mutants.byte_places, kv_records.floor_scales), "floor scales") for name in ("v4", "v41", "v41_inline")),
        *((name, mutants._store_by(mutants.byte_places, kv_records.nibbles), "nibble order") for name in ("v41_fp4", "v41_fp4_inline")),
        *(
            (name, mutants._store_by(mutants.byte_places, kv_records.flashmla_floor), "flashmla floor")
            for name in ("v4", "v41", "v41_inline")
        ),
    ],
)
def test_confusions_are_named(name, writer, confusion):
    kv = rows()
    if confusion == "pages without padding":
        assert KV_LAYOUTS[name].page_bytes(SIZE) > SIZE * KV_LAYOUTS[name].token_bytes
    shares = found(writer(kv, pool(name), SLOTS, layout=name, page_size=SIZE), kv, name)
    assert shares == {confusion: 1.0}


@pytest.mark.parametrize(("step", "confusion"), [(1, "scales one slot late"), (-1, "scales one slot early")])
@pytest.mark.parametrize("name", ["v4", "v41", "v41_fp4"])
def test_scales_of_another_slot(name, step, confusion):
    kv, layout = rows(), KV_LAYOUTS[name]
    pages = kv_cache.store_kv(kv, pool(name), SLOTS, layout=name, page_size=SIZE)
    first, last = SIZE * layout.data_bytes, SIZE * layout.token_bytes
    pages[:, first:last] = pages[:, first:last].roll(step * layout.scale_bytes, 1)
    shares = found(pages, kv, name)
    assert shares[confusion] >= 0.5  # at an end of the page the roll goes round
    assert shares[confusion] + shares.get("unexplained", 0) == 1


def test_dialects_and_layouts():
    kv = rows()
    fnuz = pool("v41")
    scale = torch.ldexp(torch.ones(7, 16), torch.ceil(torch.log2(kv.float().view(7, 16, 32).abs().amax(2).clamp(min=1e-4) / 224)).int())
    codes = (kv.float().view(7, 16, 32) / scale[..., None]).to(torch.float8_e4m3fnuz).view(torch.uint8).flatten(1)
    records = torch.cat([codes, (scale.log2() + 127).to(torch.uint8)], 1)
    assert found(kv_cache.store_kv(records, fnuz, SLOTS, layout="v41", page_size=SIZE), kv, "v41") == {"fnuz": 1.0}
    v4 = kv_cache.store_kv(kv, pool("v4"), SLOTS, layout="v41", page_size=SIZE)
    assert found(v4, kv, "v4") == {"layout v41": 1.0}
    inverse = kv_cache.quantize_kv(kv, layout="v41")
    inverse[:, 512:] = 254 - inverse[:, 512:]
    assert found(kv_cache.store_kv(inverse, pool("v41"), SLOTS, layout="v41", page_size=SIZE), kv, "v41") == {"inverse scales": 1.0}


def test_what_nothing_explains():
    kv = rows()
    pages = kv_cache.store_kv(kv, pool("v41"), SLOTS, layout="v41", page_size=SIZE)
    pages[0, 3] ^= 1
    (confusion,) = detect_layout_mismatch(pages, SLOTS, kv, layout="v41", page_size=SIZE)
    assert (confusion.name, confusion.share) == ("unexplained", 1.0)
    mixed = kv_cache.store_kv(kv_records.floor_scales(kv, layout="v41")[:2], pages, SLOTS[:2], layout="v41", page_size=SIZE)
    mixed[1, 0] ^= 0x11
    shares = found(mixed, kv, "v41")
    assert shares == {"floor scales": 1.0}  # byte 0 of page 1 is slot 4, which nobody asked for
    with pytest.raises(ArgumentError, match="slots: got shape"):
        detect_layout_mismatch(pages, SLOTS[None], kv, layout="v41", page_size=SIZE)
    with pytest.raises(ArgumentError, match="kv: got shape"):
        detect_layout_mismatch(pages, SLOTS, kv[:3], layout="v41", page_size=SIZE)


def run(*arguments, capsys):
    status = cli.main(["layout", "explain", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize("name", LAYOUTS)
def test_explain_prints_every_group(name, capsys, tmp_path):
    status, printed, _ = run(name, "--token", "70", "--page-size", "64", capsys=capsys)
    explained = kv_cache.explain_layout(name, page_size=64, token=70)
    assert status == 0
    assert f"token 70: slot 6 of page 1, which begins at byte {explained.page_bytes}" in printed
    for row in explained.rows:
        if row.stop - row.start > 1:
            assert f"{row.start}-{row.stop - 1}" in printed
        else:
            assert f" {row.start}" in printed
    assert "padding" in printed
    target = tmp_path / "layout.json"
    assert run(name, "--token", "70", "--json", str(target), capsys=capsys)[:2] == (0, "")
    data = json.loads(target.read_text())
    assert [tuple(row.values()) for row in data["rows"]] == [
        (row.part, row.start, row.stop, list(row.dims) if row.dims else None, row.group) for row in explained.rows
    ]
    assert (data["layout"], data["page"], data["slot"], data["page_bytes"]) == (name, 1, 6, explained.page_bytes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_explain_draws(name, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "page.png"
    assert run(name, "--token", "3", "--page-size", "16", "--picture", str(target), capsys=capsys)[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")


def test_the_picture_marks_the_token():
    pytest.importorskip("matplotlib")
    from dsv4.cli.layout_picture import STRONG, picture

    explained = kv_cache.explain_layout("v4", page_size=4, token=6)
    data, page, scales = picture(explained).axes
    marked = {(bar.get_x(), bar.get_width()) for bar in page.patches if bar.get_facecolor()[:3] == rgb(STRONG["codes"])}
    assert marked == {(2 * 576 + 64 * g, 64) for g in range(7)}
    assert [text.get_text() for text in data.texts] == [*(f"group {g}" for g in range(7)), "dims 448 to 511, bf16"]
    assert [text.get_text() for text in scales.texts] == [*(f"group {g}" for g in range(7)), "padding"]
    assert scales.get_xlim() == (4 * 576 + 2 * 8, 4 * 576 + 3 * 8)
    assert page.get_xlim() == (0, 2880)


def rgb(color):
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_explain_refuses(capsys, monkeypatch, tmp_path):
    assert run("v5", capsys=capsys)[::2] == (
        2,
        "dsv4: error: layout: got 'v5'; must be one of v4, v41, v41_fp4, v41_inline, v41_fp4_inline, uniform_fp8\n",
    )
    assert "token: got -1" in run("v4", "--token", "-1", capsys=capsys)[2]
    assert "page_size: got 0" in run("v4", "--page-size", "0", capsys=capsys)[2]
    pytest.importorskip("matplotlib")
    status, _, error = run("v4", "--picture", str(tmp_path / "nowhere" / "page.png"), capsys=capsys)
    assert (status, "No such file or directory" in error) == (2, True)
    status, _, error = run("v4", "--picture", str(tmp_path / "page.xyz"), capsys=capsys)
    assert (status, "xyz" in error) == (2, True)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("v4", "--picture", str(tmp_path / "page.png"), capsys=capsys)[::2] == (
        2,
        "dsv4: error: --picture wants matplotlib: pip install 'dsv4[notebooks]'\n",
    )


def in_fp32(kv, weight, table, positions, pages, slots, *, eps, layout, page_size, amax_floor="official"):
    """An honest kernel: fp32 inside, sums in another order, bf16 where it is stated."""
    x, rotated = kv.float(), table.shape[1]
    mean = x.square().unflatten(1, (4, 128)).sum(2).sum(1, keepdim=True) / x.shape[1]
    normed = (x * (mean + eps).rsqrt() * weight.float()).bfloat16().float()
    present = (positions >= 0) & (positions < len(table))
    cosines, sines = table[torch.where(present, positions, 0)].chunk(2, 1)
    a, b = normed[:, -rotated::2], normed[:, -rotated + 1 :: 2]
    turned = torch.stack([a * cosines - b * sines, a * sines + b * cosines], 2).flatten(1)
    row = torch.cat([normed[:, :-rotated], turned], 1).where(present[:, None], 0).bfloat16()
    return kv_cache.store_kv(row, pages, slots, layout=layout, page_size=page_size, amax_floor=amax_floor)


def off_by(factor):
    def call(kv, weight, *arguments, **options):
        return in_fp32(kv, (weight.float() * factor).to(weight.dtype), *arguments, **options)

    return call


@pytest.mark.parametrize("check", ["lattice", "bf16", "plain"])
def test_an_fp32_kernel_keeps_the_contract(check):
    contract = contracts.find("kv_cache.norm_rope_store_kv")
    outcome = engine.check(contract, contract.domain(check), Candidate("fp32", in_fp32), torch.device("cpu"))
    assert outcome.result == "passed", outcome.message
    assert outcome.rows[0].cases == 8


@pytest.mark.parametrize("factor", [1.02, 0.98])
def test_a_kernel_that_is_two_in_a_hundred_off_does_not(factor):
    contract = contracts.find("kv_cache.norm_rope_store_kv")
    wrong = engine.check(contract, contract.domain("bf16"), Candidate("off", off_by(factor)), torch.device("cpu"), shrink=False)
    assert wrong.result == "failed"


def test_a_result_of_another_shape_is_a_failure_not_a_crash():
    contract = contracts.find("kv_cache.norm_rope_store_kv")
    outcome = engine.check(
        contract, contract.domain("bf16"), Candidate("input", lambda kv, *_, **__: kv), torch.device("cpu"), shrink=False
    )
    assert outcome.result == "failed"


PAGE = (Path(__file__).resolve().parent.parent / "docs" / "components" / "kv_cache.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_code():
    found = re.findall(
        r"^\| `(\w+)` \| (\d+) (\w+)(?: in groups of (\d+))? \|.*\| (\d+) \| (\d+), (\d+) \| (\w+) \| (\d+) \|$", PAGE, re.MULTILINE
    )
    expected = [
        (
            layout.name, str(layout.quantised), layout.numbers, "" if layout.scale == "unit" else str(layout.group),
            str(layout.token_bytes), str(layout.data_bytes), str(layout.scale_bytes), "inline" if layout.inline else "planar",
            str(layout.page_bytes(64)),
        )
        for layout in KV_LAYOUTS.values()
    ]  # fmt: skip
    assert found == expected


def test_the_page_shows_what_the_command_prints(capsys):
    shown = PAGE.partition("```console\n")[2].partition("```")[0].splitlines()
    command, lines = shown[0].removeprefix("$ dsv4 layout explain ").split(), shown[1:]
    printed = run(*command, capsys=capsys)[1].splitlines()
    assert [line.rstrip() for line in printed] == lines


def test_the_page_names_every_confusion():
    named = set(re.findall(r"`([a-z0-9 ]+)`", PAGE.partition("| confusion |")[2].partition("##")[0]))
    assert {name for name, _, _ in debug.CHANGES} | {"inline", "pages without padding", "unexplained"} <= named
    assert {"scales one slot late", "scales one slot early"} <= named


def test_fp4_scales_by_a_product_round_alike():
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    kv = torch.zeros(len(every), 16, dtype=torch.bfloat16)
    kv[:, 3] = every
    divided, multiplied = (quantize_fp4_e4m3(kv, 16, division=division) for division in ("divide", "reciprocal"))
    assert torch.equal(divided.scales.view(torch.uint8), multiplied.scales.view(torch.uint8))
