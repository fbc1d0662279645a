"""Reference rotations against DeepSeek's published code (golden/norms_rotary), transformers, complex numbers, literals, reported bugs."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.configs import V4_FLASH
from dsv4.reference import norms, rotary
from dsv4.reference.numerics import numerics
from dsv4.reference.quantization import fake_quantize
from dsv4.types import ArgumentError

STAGES = load_file(Path(__file__).parent / "golden" / "norms_rotary.safetensors")
U = 2.0**-24
YARN = V4_FLASH.rope_scaling


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def table(kind, places=256):
    """Of layers of ratio 0 ("window"), or of the others ("compress")."""
    frequencies = rotary.rope_frequencies(1e4) if kind == "window" else rotary.rope_frequencies(16e4, yarn=YARN)
    return rotary.rope_table(frequencies, places)


def same(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    bits = torch.int16 if got.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(got.view(bits), expected.view(bits))


@pytest.mark.parametrize("kind", ["window", "compress"])
def test_published_tables(kind):
    cosines, sines = table(kind).chunk(2, 1)
    for ours, theirs in ((cosines, STAGES[f"rope.{kind}.cos"]), (sines, STAGES[f"rope.{kind}.sin"])):
        assert ((ours.double() - theirs.double()).abs() <= 2 * U * ours.abs()).all()  # an ulp


def test_published_queries():
    """Head norm as the chain of bf16 operations, then the rotation of a layer of ratio 0; for head 0 of row 11 see test_norms."""
    q = norms.head_rms_norm(STAGES["v4.wq_b_out"], eps=1e-6, precision="bf16_chain")
    got = rotary.apply_rope(q, table("window"), STAGES["v4.rows"]).flatten(0, 1)
    others = torch.arange(len(got)) != 4 * 11
    same(got[others], STAGES["v4.q"].flatten(0, 1)[others])


def test_published_keys():
    """V4 leaves the rotated dims unquantised; V4.1 quantises all of them."""
    turned = rotary.apply_rope(STAGES["v4.kv_normed"], table("window"), STAGES["v4.rows"])
    same(turned[:, 448:], STAGES["v4.window_kv"][:, 448:])
    same(fake_quantize(turned[:, :448], 64), STAGES["v4.window_kv"][:, :448])
    turned = rotary.apply_rope(STAGES["v41.kv_normed"], table("compress"), STAGES["v41.rows"])
    same(fake_quantize(turned, 32), STAGES["v41.window_kv"])


def test_published_index_keys():
    """RP-03, its second half: entry j of ratio 4 is rotated at position 4 j; then Hadamard, then FP4."""
    places = 4 * torch.arange(len(STAGES["v4.index_normed"]))
    turned = norms.hadamard(rotary.apply_rope(STAGES["v4.index_normed"], table("compress"), places))
    same(fake_quantize(turned, 32, format="mxfp4"), STAGES["v4.index_k"])


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_published_outputs_rotated_back(model):
    turned = STAGES[f"{model}.o_rot"]
    got = rotary.apply_rope(turned, table("compress"), STAGES[f"{model}.rows"][: len(turned)], inverse=True)
    same(got, STAGES[f"{model}.o"])


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is an oracle that only some environments have")
@pytest.mark.parametrize(("kind", "name"), [("window", "main"), ("compress", "compress")])
def test_transformers(kind, name):
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding, apply_rotary_pos_emb

    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    places, x = torch.tensor([0, 1, 7, 127, 200]), random(5, 3, 512).float()
    embedding = DeepseekV4RotaryEmbedding(DeepseekV4Config(rope_scaling=scaling))
    cosines, sines = embedding(x, places[None], layer_type=name)
    theirs = apply_rotary_pos_emb(x[None], cosines, sines, unsqueeze_dim=2)[0]
    with numerics("unquantised"):
        ours = rotary.apply_rope(x.double(), table(kind), places)
    frequencies = rotary.rope_frequencies(1e4) if kind == "window" else rotary.rope_frequencies(16e4, yarn=YARN)
    # frequencies within an ulp or two and the angle's rounding; cosine and sine, products and sum
    angle = (6 * U * places[:, None] * frequencies.double()).repeat_interleave(2, 1)[:, None]
    size = x[..., 448:].double().abs().unflatten(-1, (-1, 2)).sum(-1).repeat_interleave(2, -1)
    assert torch.equal(theirs[..., :448], x[..., :448])
    assert ((theirs - ours)[..., 448:].abs() <= (angle + 6 * U) * size).all()


def test_golden_frequencies():
    """Spec A 12."""
    plain, stretched = rotary.rope_frequencies(16e4), rotary.rope_frequencies(16e4, yarn=YARN)
    for pair, before, after in (
        (1, 0.687656045, 0.687656045),
        (15, 3.63553851e-3, 3.63553851e-3),
        (16, 2.49999994e-3, 2.26562493e-3),
        (20, 5.59017004e-4, 2.96977785e-4),
        (24, 1.25000006e-4, 1.95312532e-5),
        (25, 8.59569991e-5, 5.37231244e-6),
        (31, 9.08884704e-6, 5.68052940e-7),
    ):
        assert plain[pair].item() == pytest.approx(before, rel=1e-8)
        assert stretched[pair].item() == pytest.approx(after, rel=1e-8)


def test_rp_01_layers_of_ratio_0_are_not_stretched():
    plain = rotary.rope_frequencies(1e4)
    powers = torch.tensor([1e4 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert ((plain.double() - powers).abs() <= 2 * U * powers).all()
    wrong = rotary.rope_frequencies(1e4, yarn=YARN)
    assert (plain != wrong).nonzero()[:, 0].tolist() == list(range(21, 32))
    degrees = torch.rad2deg(127 * (plain - wrong).double()).max().item()
    assert degrees == pytest.approx(2.10, abs=0.05)


def test_rp_03_frequencies_are_no_periods():
    """A vector of ones at position 1: cosine less sine of the frequency itself, not of its inverse."""
    x = torch.ones(1, 64, dtype=torch.bfloat16)
    got = rotary.apply_rope(x, table("window"), torch.tensor([1]))[0].float()
    frequencies = torch.tensor([1e4 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert got[:2].tolist() == torch.tensor([-0.30116868, 1.38177329]).bfloat16().tolist()  # cos 1 - sin 1, cos 1 + sin 1
    assert got[62:].tolist() == torch.tensor([0.99986668, 1.00013331]).bfloat16().tolist()
    same(got[0::2].bfloat16(), (frequencies.cos() - frequencies.sin()).float().bfloat16())


def test_rp_05_the_input_outlives_the_inverse():
    o = random(3, 4, 512)
    kept, places = o.clone(), torch.tensor([5, 6, 7])
    first = rotary.apply_rope(o, table("compress"), places, inverse=True)
    same(o, kept)
    same(rotary.apply_rope(o, table("compress"), places, inverse=True), first)
    assert first.data_ptr() != o.data_ptr()


@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_a_complex_product(inverse):
    x, places = random(6, 5, 96, seed=2), torch.tensor([0, 1, 100, 255, 3, 3])
    tables = rotary.rope_table(rotary.rope_frequencies(1e4, 32), 256)
    got = rotary.apply_rope(x, tables, places, inverse=inverse)
    same(got[..., :64], x[..., :64])
    cosines, sines = tables[places].double().chunk(2, 1)
    unit = torch.complex(cosines, -sines if inverse else sines)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x[..., 64:].double().unflatten(-1, (-1, 2))) * unit).flatten(-2)
    same(got[..., 64:], expected.float().bfloat16())


def test_position_zero_and_back():
    x = random(4, 128)
    same(rotary.apply_rope(x, table("window"), torch.zeros(4, dtype=torch.int32)), x)
    with numerics("unrounded"):
        there = rotary.apply_rope(x.double(), table("window"), torch.arange(4) * 60)
        back = rotary.apply_rope(there, table("window"), torch.arange(4) * 60, inverse=True)
    assert ((back - x.double()).abs() <= 8 * U * x.double().abs().amax(1, keepdim=True)).all()  # the table's roundings


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_absent_positions_give_zero_rows(dtype):
    x = random(6, 2, 64)
    x[1] = float("nan")
    places = torch.tensor([3, -1, 256, 255, 2**31 - 1, -(2**31)], dtype=dtype)
    got = rotary.apply_rope(x, table("window"), places)
    present = [0, 3]
    assert got[[1, 2, 4, 5]].view(torch.int16).count_nonzero() == 0
    same(got[present], rotary.apply_rope(x[present], table("window"), places[present]))


def test_norm_rope_is_its_steps():
    x, places, weight = random(5, 3, 128), torch.tensor([0, 9, -1, 200, 31]), random(128, seed=1).float()
    same(
        rotary.norm_rope(x, table("window"), places, eps=1e-6, weight=weight),
        rotary.apply_rope(norms.rms_norm(x, weight, eps=1e-6), table("window"), places),
    )
    same(
        rotary.norm_rope(x, table("window"), places, eps=1e-6),
        rotary.apply_rope(norms.head_rms_norm(x, eps=1e-6), table("window"), places),
    )


@pytest.mark.parametrize(
    ("x", "wrong", "places", "message"),
    [
        (random(64), None, [0], "must have shape \\[tokens, ..., n\\]"),
        (random(1, 65), None, [0], "n even"),
        (random(1, 64).float(), None, [0], "x: got float32"),
        (random(1, 32), None, [0], "table: got shape"),
        (random(1, 64), torch.zeros(0, 64), [0], "table: got shape"),
        (random(1, 64), torch.zeros(4, 63), [0], "table: got shape"),
        (random(1, 64), torch.zeros(4, 64).double(), [0], "table: got float64"),
        (random(2, 64), None, [0], "positions: got shape"),
        (random(1, 64), None, [0.0], "positions: got float32"),
    ],
)
def test_errors(x, wrong, places, message):
    tables, places = table("window", 8) if wrong is None else wrong, torch.tensor(places)
    with pytest.raises(ArgumentError, match=message):
        rotary.apply_rope(x, tables, places)
    with pytest.raises(ArgumentError, match=message):
        rotary.norm_rope(x, tables, places, eps=1e-6)


def test_tables_do_not_depend_on_the_default_device():
    plain = rotary.rope_table(rotary.rope_frequencies(160000.0, yarn=V4_FLASH.rope_scaling), 5)
    with torch.device("meta"):
        again = rotary.rope_table(rotary.rope_frequencies(160000.0, yarn=V4_FLASH.rope_scaling, device="cpu"), 5)
    assert torch.equal(plain, again)
