"""Configurations: the released values as the specification states them, the four file schemas, and every way in which they can be wrong."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest

from dsv4.configs import V4_FLASH, V4_FLASH_0731, V4_PRO, V41_FLASH, ModelConfig, VisionConfig, YarnScaling, from_checkpoint
from dsv4.types import ArgumentError

GOLDEN = Path(__file__).parent / "golden"
MODELS = (V4_FLASH, V4_FLASH_0731, V4_PRO, V41_FLASH)
ABSENT = object()

# Spec A 9.1 and M 0.2, row by row: V4-Flash, V4-Flash-0731, V4-Pro, V4.1-Flash.
VALUES = {
    "model_type": ("deepseek_v4", "deepseek_v4", "deepseek_v4", "deepseek_v41"),
    "vocab_size": (129280, 129280, 129280, 129280),
    "hidden_size": (4096, 4096, 7168, 5120),
    "num_hidden_layers": (43, 43, 61, 40),
    "num_nextn_predict_layers": (1, 3, 1, 3),
    "num_attention_heads": (64, 64, 128, 64),
    "head_dim": (512, 512, 512, 512),
    "qk_rope_head_dim": (64, 64, 64, 64),
    "q_lora_rank": (1024, 1024, 1536, 1280),
    "o_lora_rank": (1024, 1024, 1024, 1024),
    "o_groups": (8, 8, 16, 8),
    "moe_intermediate_size": (2048, 2048, 3072, 2304),
    "n_routed_experts": (256, 256, 384, 384),
    "n_shared_experts": (1, 1, 1, 1),
    "num_experts_per_tok": (6, 6, 6, 6),
    "routed_scaling_factor": (1.5, 1.5, 2.5, 1.5),
    "num_hash_layers": (3, 3, 3, 0),
    "swiglu_limit": (10.0, 10.0, 10.0, 10.0),
    "sliding_window": (128, 128, 128, 128),
    "index_n_heads": (64, 64, 64, 32),
    "index_head_dim": (128, 128, 128, 128),
    "index_topk": (512, 512, 1024, 512),
    "candidate_source_layer_id": (None, None, None, 20),
    "candidate_topk_blocks": (None, None, None, 2048),
    "candidate_block_size": (None, None, None, 8),
    "rope_theta": (1e4, 1e4, 1e4, 1e4),
    "compress_rope_theta": (1.6e5, 1.6e5, 1.6e5, 1.6e5),
    "max_position_embeddings": (1048576, 1048576, 1048576, 1048576),
    "rms_norm_eps": (1e-6, 1e-6, 1e-6, 1e-20),
    "hc_mult": (4, 4, 4, 4),
    "hc_sinkhorn_iters": (20, 20, 20, 20),
    "hc_eps": (1e-6, 1e-6, 1e-6, 1e-6),
    # what the model type decides
    "weight_block_size": ((128, 128), (128, 128), (128, 128), (32, 32)),
    "activation_group": (128, 128, 128, 32),
    "q_head_norm": (True, True, True, False),
    "index_hadamard": (True, True, True, False),
    "hc_pre_from_prev_sublayer": (False, False, False, True),
}
# fmt: off
FLASH_RATIOS = (
    0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128,
    4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
)
PRO_RATIOS = (
    128, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
    128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128, 4,
)
V41_RATIOS = (0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)
FLASH_INDEXED = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42)
# fmt: on
YARN = {"factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 65536}
ENGRAM = {
    "layer_ids": (1, 14),
    "num_embeddings": (384006168, 384016682),
    "max_ngram_size": 4,
    "vocab_size": 16000000,
    "n_heads": 8,
    "head_dim": 256,
    "pad_token_id": 2,
    "compressed_vocab_size": 99092,
}
VISION = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 1e4,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}
DSPARK = {"block_size": 5, "noise_token_id": 128799, "markov_rank": 256}


def values(section: object) -> dict[str, Any]:
    return {field.name: getattr(section, field.name) for field in fields(section)}


def golden(model: str, file: str = "config.json") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((GOLDEN / model / file).read_text())
    return document


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """`document` with the field at the dotted `path` set to `value`, or without it if `value` is ABSENT."""
    document = copy.deepcopy(document)
    inner, (*sections, name) = document, path.split(".")
    for section in sections:
        inner = inner[section]
    if value is ABSENT:
        del inner[name]
    else:
        inner[name] = value
    return document


def varied(model: ModelConfig, change: dict[str, Any]) -> ModelConfig:
    """`model` with other fields; a dotted name is a field of a section."""
    for name, value in change.items():
        section, _, part = name.rpartition(".")
        model = replace(model, **({section: replace(getattr(model, section), **{part: value})} if section else change))
    return model


def published(model: ModelConfig) -> dict[str, Any]:
    """The published file of a released model: the layout of the golden one, the numbers of the tables above."""
    column = MODELS.index(model)
    own = {name: row[column] for name, row in VALUES.items()}
    if model is V41_FLASH:
        document = golden("v41")
        text = document["text_config"]
        document["vision_config"].update(VISION)
        document["image_token_id"] = 129264
        text.update({f"engram_{name}": list(value) if isinstance(value, tuple) else value for name, value in ENGRAM.items()})
        text.update(kv_source_layer_ids=[2, 8, 14, 20], index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36])
        text.update(compress_ratios=[*V41_RATIOS, 0, 0, 0], dspark_n_routed_experts=128, dspark_num_experts_per_tok=3)
    else:
        document = text = golden("v4")
        text["compress_ratios"] = [*(PRO_RATIOS if model is V4_PRO else FLASH_RATIOS), 0]
    text.update({name: own[name] for name in own.keys() & text.keys() if name != "model_type"})
    if model is V4_FLASH_0731:
        text.update(num_nextn_predict_layers=1, compress_ratios=[*FLASH_RATIOS, 0, 0, 0])
    if model in (V4_FLASH_0731, V41_FLASH):
        text.update({f"dspark_{name}": value for name, value in DSPARK.items()})
        text["dspark_target_layer_ids"] = [40, 41, 42] if model is V4_FLASH_0731 else [37, 38, 39]
    return document


@pytest.mark.parametrize("name", VALUES)
def test_released_values(name: str) -> None:
    assert tuple(getattr(model, name) for model in MODELS) == VALUES[name]


def test_released_layers() -> None:
    assert [len(model.compress_ratios) for model in MODELS] == [44, 46, 62, 43]
    assert V4_FLASH.compress_ratios == (*FLASH_RATIOS, 0)
    assert V4_FLASH_0731.compress_ratios == (*FLASH_RATIOS, 0, 0, 0)
    assert V4_PRO.compress_ratios == (*PRO_RATIOS, 0)
    assert V41_FLASH.compress_ratios == (*V41_RATIOS, 0, 0, 0)
    kinds = [tuple(model.compress_ratios[: model.num_hidden_layers].count(ratio) for ratio in (4, 128, 0)) for model in MODELS[:3]]
    assert kinds == [(21, 20, 2), (21, 20, 2), (30, 31, 0)]  # CSA, HCA, window only


def test_released_sources() -> None:
    assert V4_FLASH.kv_source_layer_ids == V4_FLASH_0731.kv_source_layer_ids == tuple(range(2, 43))
    assert V4_FLASH.index_source_layer_ids == V4_FLASH_0731.index_source_layer_ids == FLASH_INDEXED
    assert V4_PRO.kv_source_layer_ids == tuple(range(61))
    assert V4_PRO.index_source_layer_ids == tuple(range(2, 61, 2))
    assert V41_FLASH.kv_source_layer_ids == (2, 8, 14, 20)
    assert V41_FLASH.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)


def test_released_sections() -> None:
    assert all(values(model.rope_scaling) == YARN for model in MODELS)
    assert values(V41_FLASH.engram) == ENGRAM
    assert values(V41_FLASH.vision) == {**VISION, "image_token_id": 129264, "rms_norm_eps": 1e-6}
    assert values(V41_FLASH.dspark) == {**DSPARK, "target_layer_ids": (37, 38, 39), "n_routed_experts": 128, "num_experts_per_tok": 3}
    assert values(V4_FLASH_0731.dspark) == {**DSPARK, "target_layer_ids": (40, 41, 42), "n_routed_experts": 256, "num_experts_per_tok": 6}
    assert [(model.engram, model.vision) for model in MODELS[:3]] == [(None, None)] * 3
    assert V4_FLASH.dspark is V4_PRO.dspark is None


@pytest.mark.parametrize("model", MODELS, ids=("flash", "0731", "pro", "v41"))
def test_a_released_file_gives_its_preset(model: ModelConfig) -> None:
    assert from_checkpoint(published(model)) == model


# Group of activations, query norm, Hadamard transform, streams collapsed by the sublayer before: V4's rules and V4.1's.
RULES = {"deepseek_v4": (128, True, True, False), "deepseek_v41": (32, False, False, True)}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "deepseek_v41x"])
def test_cd_03_model_types_are_whole_names(model_type: str) -> None:
    own = V41_FLASH if model_type.startswith("deepseek_v41") else V4_FLASH
    file = changed(published(own), "model_type", model_type)
    if model_type not in RULES:
        for make in (lambda: from_checkpoint(file), lambda: replace(own, model_type=model_type)):
            with pytest.raises(ArgumentError, match=rf"^model_type: got '{model_type}'; must be "):
                make()
        return
    model = from_checkpoint(file)
    assert (model.model_type, model.is_v41) == (model_type, model_type == "deepseek_v41")
    assert (model.activation_group, model.q_head_norm, model.index_hadamard, model.hc_pre_from_prev_sublayer) == RULES[model_type]
    other = next(name for name in RULES if name != model_type)
    for make in (lambda: from_checkpoint({**file, "model_type": other}), lambda: replace(own, model_type=other)):
        with pytest.raises(ArgumentError):  # neither is the other under another name
            make()


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_both_files_of_a_model_agree(model: str) -> None:
    folder, inference = from_checkpoint(GOLDEN / model), from_checkpoint(str(GOLDEN / model / "inference_config.json"))
    assert folder == inference == from_checkpoint(golden(model))
    assert len({folder, inference}) == 1


def test_golden_models() -> None:
    v4, v41 = from_checkpoint(golden("v4")), from_checkpoint(golden("v41"))
    assert (v4.compress_ratios, v4.kv_source_layer_ids, v4.index_source_layer_ids) == ((0, 4, 128, 4, 8, 0), (1, 2, 3, 4), (1, 3))
    assert (v4.num_hash_layers, v4.num_nextn_predict_layers, v4.dspark, v4.rms_norm_eps) == (2, 1, None, 1e-6)
    assert (v41.candidate_source_layer_id, v41.num_hash_layers, v41.rms_norm_eps) == (6, 0, 1e-20)
    assert v41.engram is not None
    assert v41.vision is not None
    assert (v41.engram.num_embeddings, v41.engram.pad_token_id, v41.vision.image_token_id) == ((434, 606), 2, 510)


def test_inference_defaults_give_way_to_the_file() -> None:
    bare = golden("v4", "inference_config.json")
    assert not {"norm_eps", "hc_eps"} & bare.keys()
    stated = from_checkpoint({**bare, "norm_eps": 1e-5, "hc_eps": 1e-7})
    assert (stated.rms_norm_eps, stated.hc_eps) == (1e-5, 1e-7)
    assert stated == replace(from_checkpoint(bare), rms_norm_eps=1e-5, hc_eps=1e-7)


def test_inference_file_with_dspark_on_v4() -> None:
    document = golden("v4", "inference_config.json")
    document.update(n_mtp_layers=3, compress_ratios=[0, 4, 128, 4, 8, 0, 0, 0])
    document.update(dspark_block_size=5, dspark_noise_token_id=7, dspark_target_layer_ids=[2, 3, 4], dspark_markov_rank=16)
    dspark = from_checkpoint(document).dspark
    assert dspark is not None
    assert (dspark.n_routed_experts, dspark.num_experts_per_tok, dspark.target_layer_ids) == (8, 3, (2, 3, 4))
    own = from_checkpoint({**document, "dspark_n_routed_experts": 6, "dspark_n_activated_experts": 2}).dspark
    assert own == replace(dspark, n_routed_experts=6, num_experts_per_tok=2)
    with pytest.raises(ArgumentError) as error:  # an inference file states the stages it has
        from_checkpoint({**document, "n_mtp_layers": 1})
    assert error.value.argument == "compress_ratios"


@pytest.mark.parametrize("model", ["v4", "v41"])
def test_descriptive_fields_are_ignored(model: str) -> None:
    document = golden(model)
    described = {"transformers_version": "9", "_name_or_path": "x", "auto_map": {"AutoConfig": "y"}, "use_cache": False, "eos_token_id": 3}
    described |= {"torch_dtype": "float32", "initializer_range": 1.0, "attention_dropout": 0.5, "pad_token_id": 7, "bos_token_id": None}
    for section in (document, document.get("text_config", {}), document.get("vision_config", {})):
        section.update(described)
    assert from_checkpoint(document) == from_checkpoint(golden(model))


UNKNOWN = [
    ("v4", "config.json", "n_group", 1),
    ("v4", "config.json", "num_hash_layer", 2),
    ("v4", "config.json", "rope_scaling.mscale", 1.0),
    ("v4", "config.json", "quantization_config.ignored_layers", []),
    ("v4", "config.json", "kv_source_layer_ids", [1]),
    ("v4", "config.json", "text_config", {}),
    ("v4", "inference_config.json", "max_batch_size", 8),
    ("v4", "inference_config.json", "architectures", ["DeepseekV4ForCausalLM"]),
    ("v41", "config.json", "hidden_size", 128),
    ("v41", "config.json", "text_config.num_hash_layers", 0),
    ("v41", "config.json", "text_config.rope_scaling.attention_factor", 1.0),
    ("v41", "config.json", "vision_config.hidden_act", "silu"),
    ("v41", "config.json", "quantization_config.dtype", "bfloat16"),
    ("v41", "inference_config.json", "n_hash_layers", 0),
    ("v41", "inference_config.json", "engram_pad_token_id", 2),
]
UNSUPPORTED = [
    ("v4", "config.json", "num_key_value_heads", 2),
    ("v4", "config.json", "num_key_value_heads", True),
    ("v4", "config.json", "hidden_act", "gelu"),
    ("v4", "config.json", "attention_bias", True),
    ("v4", "config.json", "attention_bias", 0),
    ("v4", "config.json", "tie_word_embeddings", True),
    ("v4", "config.json", "scoring_func", "sigmoid"),
    ("v4", "config.json", "topk_method", "greedy"),
    ("v4", "config.json", "norm_topk_prob", False),
    ("v4", "config.json", "expert_dtype", "fp8"),
    ("v4", "config.json", "model_type", "deepseek_v3"),
    ("v4", "config.json", "n_shared_experts", 2),
    ("v4", "config.json", "rope_scaling.type", "linear"),
    ("v4", "config.json", "quantization_config.fmt", "e5m2"),
    ("v4", "config.json", "quantization_config.scale_fmt", None),
    ("v4", "config.json", "quantization_config.quant_method", "awq"),
    ("v4", "config.json", "quantization_config.activation_scheme", "static"),
    ("v4", "config.json", "quantization_config.weight_block_size", [32, 32]),
    ("v4", "inference_config.json", "dtype", "bf16"),
    ("v4", "inference_config.json", "score_func", "softmax"),
    ("v41", "config.json", "quantization_config.weight_block_size", [128, 128]),
    ("v41", "config.json", "quantization_config.fmt", "e5m2"),
    ("v41", "config.json", "quantization_config.expert_dtype", "fp8"),
    ("v41", "config.json", "text_config.model_type", "deepseek_v4"),
    ("v41", "config.json", "vision_config.model_type", "clip"),
    ("v41", "config.json", "text_config.rope_scaling.rope_type", "default"),
    ("v41", "inference_config.json", "scale_fmt", "fp32"),
    ("v41", "inference_config.json", "expert_dtype", "bf16"),
]
WRONG_TYPE = [
    ("v4", "config.json", "hidden_size", "128"),
    ("v4", "config.json", "hidden_size", 128.0),
    ("v4", "config.json", "hidden_size", True),
    ("v4", "config.json", "hidden_size", 0),
    ("v4", "config.json", "num_nextn_predict_layers", -1),
    ("v4", "config.json", "rms_norm_eps", 0),
    ("v4", "config.json", "rms_norm_eps", float("nan")),
    ("v4", "config.json", "swiglu_limit", None),
    ("v4", "config.json", "compress_ratios", 4),
    ("v4", "config.json", "rope_scaling", None),
    ("v4", "config.json", "rope_scaling.factor", "16"),
    ("v4", "inference_config.json", "dim", -128),
    ("v41", "config.json", "text_config", []),
    ("v41", "config.json", "text_config.engram_layer_ids", "1,4"),
    ("v41", "config.json", "vision_config.max_wh_ratio", -1.0),
    ("v41", "inference_config.json", "vision_rope_theta", float("inf")),
]


@pytest.mark.parametrize(("model", "file", "path", "value"), UNKNOWN + UNSUPPORTED + WRONG_TYPE)
def test_a_wrong_field_is_named_as_the_file_names_it(model: str, file: str, path: str, value: object) -> None:
    with pytest.raises(ArgumentError) as error:
        from_checkpoint(changed(golden(model, file), path, value))
    assert error.value.argument == path
    assert error.value.got == (value if path == "n_shared_experts" else repr(value))


def test_a_wrong_item_of_a_list_is_named() -> None:
    for value in (-1, 4.0, "4", None, True):
        with pytest.raises(ArgumentError, match=r"^compress_ratios\[1\]: "):
            from_checkpoint(changed(golden("v4"), "compress_ratios", [0, value, 128, 4, 8, 0]))


def leaves(document: dict[str, Any], section: str = "") -> list[str]:
    paths = []
    for name, value in document.items():
        paths += leaves(value, f"{section}{name}.") if isinstance(value, dict) else [section + name]
    return paths


# Of the golden files' fields these alone may be missing; model_type decides which schema the file follows, and has errors of its own.
MAY_MISS = {
    ("v4", "config.json"): {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "torch_dtype",
        "use_cache",
    },
    ("v4", "inference_config.json"): set(),
    ("v41", "config.json"): {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"},
    ("v41", "inference_config.json"): set(),
}


@pytest.mark.parametrize(("model", "file"), MAY_MISS)
def test_every_missing_field_is_named(model: str, file: str) -> None:
    document = golden(model, file)
    for path in leaves(document):
        less = changed(document, path, ABSENT)
        if path in MAY_MISS[model, file]:
            assert from_checkpoint(less) == from_checkpoint(document)
            continue
        with pytest.raises(ArgumentError) as error:
            from_checkpoint(less)
        assert error.value.argument == ("model_type" if path == "dim" else path)
        assert error.value.got == "nothing"


def test_a_missing_section_is_an_error() -> None:
    for path in ("text_config", "vision_config", "quantization_config", "text_config.rope_scaling"):
        with pytest.raises(ArgumentError) as error:
            from_checkpoint(changed(golden("v41"), path, ABSENT))
        assert error.value.argument.startswith(f"{path}.")


def test_dspark_on_v4_is_whole_or_absent() -> None:
    with pytest.raises(ArgumentError, match=r"^dspark_noise_token_id: got nothing; the published V4 config.json with DSpark must have it"):
        from_checkpoint(changed(published(V4_FLASH_0731), "dspark_noise_token_id", ABSENT))
    for stages in (0, 2):  # it may state the base model's 1 or the stages that it has, 3
        with pytest.raises(ArgumentError, match=r"^compress_ratios: got 46 ratios"):
            from_checkpoint(changed(published(V4_FLASH_0731), "num_nextn_predict_layers", stages))
    assert from_checkpoint(changed(published(V4_FLASH_0731), "num_nextn_predict_layers", 3)) == V4_FLASH_0731
    with pytest.raises(ArgumentError, match=r"^compress_ratios: got 46 ratios"):  # without DSpark, 1 means 1
        from_checkpoint(changed(published(V4_FLASH), "compress_ratios", [*FLASH_RATIOS, 0, 0, 0]))


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ArgumentError, match=r"^text_config\.hidden_sise: .*Did you mean text_config\.hidden_size\?$"):
        from_checkpoint(changed(changed(golden("v41"), "text_config.hidden_size", ABSENT), "text_config.hidden_sise", 128))


CONTRADICTIONS: list[tuple[ModelConfig, dict[str, Any], str, str]] = [
    (V4_FLASH, {"model_type": "deepseek_v3"}, "model_type", "deepseek_v41"),
    (V4_FLASH, {"compress_ratios": (0,) * 43}, "compress_ratios", "43 num_hidden_layers and 1 num_nextn_predict_layers"),
    (V4_FLASH, {"num_hidden_layers": 44}, "compress_ratios", "44 num_hidden_layers"),
    (V4_FLASH, {"compress_ratios": (*FLASH_RATIOS, 4)}, "compress_ratios", "num_nextn_predict_layers draft layers"),
    (V4_FLASH, {"compress_ratios": (1, *FLASH_RATIOS[1:], 0)}, "compress_ratios", "deepseek_v4"),
    (V4_FLASH, {"num_attention_heads": 68}, "num_attention_heads", "o_groups 8"),
    (V4_FLASH, {"qk_rope_head_dim": 514}, "qk_rope_head_dim", "head_dim 512"),
    (V4_FLASH, {"qk_rope_head_dim": 130}, "qk_rope_head_dim", "index_head_dim 128"),
    (V4_FLASH, {"qk_rope_head_dim": 63}, "qk_rope_head_dim", "even"),
    (V4_FLASH, {"num_experts_per_tok": 257}, "num_experts_per_tok", "n_routed_experts 256"),
    (V4_FLASH, {"num_hash_layers": 44}, "num_hash_layers", "num_hidden_layers 43"),
    (V4_FLASH, {"max_position_embeddings": 1048577}, "max_position_embeddings", "original_max_position_embeddings, 1048576"),
    (V4_FLASH, {"kv_source_layer_ids": (2, 8)}, "kv_source_layer_ids", "compress_ratios"),
    (V4_FLASH, {"index_source_layer_ids": (2, 3)}, "index_source_layer_ids", "compress_ratios"),
    (V4_FLASH, {"engram": V41_FLASH.engram}, "engram", "deepseek_v4"),
    (V4_FLASH, {"vision": V41_FLASH.vision}, "vision", "deepseek_v4"),
    (V4_FLASH, {"candidate_source_layer_id": 2}, "candidate_source_layer_id", "deepseek_v4"),
    (V4_FLASH, {"num_nextn_predict_layers": 2, "compress_ratios": (*FLASH_RATIOS, 0, 0)}, "num_nextn_predict_layers", "without dspark"),
    (V4_FLASH_0731, {"num_nextn_predict_layers": 0, "compress_ratios": FLASH_RATIOS}, "num_nextn_predict_layers", "dspark"),
    (V41_FLASH, {"dspark": None}, "num_nextn_predict_layers", "without dspark"),
    (V41_FLASH, {"num_hash_layers": 3}, "num_hash_layers", "deepseek_v41"),
    (V41_FLASH, {"compress_ratios": (0, 0, 4, *V41_RATIOS[3:], 0, 0, 0)}, "compress_ratios", "deepseek_v41"),
    (V41_FLASH, {"compress_ratios": (*V41_RATIOS[:5], 1, *V41_RATIOS[6:], 0, 0, 0)}, "compress_ratios", "kv_source_layer_ids"),
    (V41_FLASH, {"kv_source_layer_ids": (1, 2, 8, 14, 20)}, "kv_source_layer_ids", "compress_ratios"),
    (V41_FLASH, {"index_source_layer_ids": (1, 2, 8, 14, 20, 24)}, "index_source_layer_ids", "compress_ratios"),
    (V41_FLASH, {"kv_source_layer_ids": (2, 14, 8, 20)}, "kv_source_layer_ids", "ascending"),
    (V41_FLASH, {"kv_source_layer_ids": (2, 2, 8, 14, 20)}, "kv_source_layer_ids", "none twice"),
    (V41_FLASH, {"kv_source_layer_ids": (2, 8, 14, 20, 40)}, "kv_source_layer_ids", "num_hidden_layers 40"),
    (V41_FLASH, {"index_source_layer_ids": (2, 8, 14, 20, 41)}, "index_source_layer_ids", "num_hidden_layers 40"),
    (V41_FLASH, {"kv_source_layer_ids": (8, 14, 20)}, "kv_source_layer_ids", "layer 2"),
    (V41_FLASH, {"kv_source_layer_ids": (2, 8, 14)}, "compress_ratios", "kv_source_layer_ids"),
    (V41_FLASH, {"index_source_layer_ids": (2, 8, 20, 24)}, "index_source_layer_ids", r"lacks \[14\]"),
    (V41_FLASH, {"candidate_source_layer_id": 21}, "candidate_source_layer_id", "index_source_layer_ids"),
    (V41_FLASH, {"candidate_source_layer_id": 14}, "candidate_source_layer_id", r"kv_source_layer_ids \[20\]"),
    (V41_FLASH, {"candidate_topk_blocks": None}, "candidate_topk_blocks", "candidate_source_layer_id"),
    (V41_FLASH, {"vocab_size": 99000}, "engram.compressed_vocab_size", "vocab_size 99000"),
    (V41_FLASH, {"vocab_size": 129264}, "vision.image_token_id", "vocab_size 129264"),
    (V4_FLASH_0731, {"vocab_size": 128799}, "dspark.noise_token_id", "vocab_size 128799"),
    (V41_FLASH, {"engram.pad_token_id": 129280}, "engram.pad_token_id", "vocab_size 129280"),
    (V41_FLASH, {"engram.layer_ids": (1, 40)}, "engram.layer_ids", "num_hidden_layers 40"),
    (V41_FLASH, {"engram.layer_ids": (14, 1)}, "engram.layer_ids", "ascending"),
    (V41_FLASH, {"engram.layer_ids": (1, 2, 3)}, "engram.num_embeddings", "3 engram.layer_ids"),
    (V41_FLASH, {"engram.layer_ids": ()}, "engram.layer_ids", "at least one"),
    (V41_FLASH, {"engram.num_embeddings": (384006168, 383999999)}, "engram.num_embeddings", "384000000"),
    (V41_FLASH, {"engram.max_ngram_size": 1}, "engram.max_ngram_size", "at least 2"),
    (V41_FLASH, {"vision.hidden_size": 1056}, "vision.hidden_size", "num_attention_heads 16"),
    (V41_FLASH, {"vision.max_image_tokens": 3}, "vision.max_image_tokens", "at least 4"),
    (V41_FLASH, {"dspark.num_experts_per_tok": 129}, "dspark.num_experts_per_tok", "dspark.n_routed_experts 128"),
    (V41_FLASH, {"dspark.target_layer_ids": (38, 39, 40)}, "dspark.target_layer_ids", "num_hidden_layers 40"),
    (V41_FLASH, {"dspark.target_layer_ids": (39, 38, 37)}, "dspark.target_layer_ids", "ascending"),
    (V41_FLASH, {"dspark.target_layer_ids": ()}, "dspark.target_layer_ids", "at least one"),
    (V41_FLASH, {"rope_scaling.beta_slow": 32}, "rope_scaling.beta_fast", "beta_slow 32"),
    (V41_FLASH, {"rope_scaling": YARN}, "rope_scaling", "YarnScaling"),
]


@pytest.mark.parametrize(("model", "change", "argument", "reason"), CONTRADICTIONS)
def test_contradictions_name_the_fields(model: ModelConfig, change: dict[str, Any], argument: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason) as error:
        varied(model, change)
    assert error.value.argument == argument


def test_a_contradiction_in_a_file() -> None:
    with pytest.raises(ArgumentError, match=r"^compress_ratios: got 5 ratios; .*5 num_hidden_layers and 1 num_nextn_predict_layers"):
        from_checkpoint(changed(golden("v4"), "compress_ratios", [0, 4, 128, 4, 8]))
    with pytest.raises(ArgumentError, match=r"^engram\.num_embeddings: got 1 tables; .*2 engram\.layer_ids"):
        from_checkpoint(changed(golden("v41", "inference_config.json"), "engram_num_embeddings", [434]))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    with pytest.raises(ArgumentError, match=r"^checkpoint: .*No such file"):
        from_checkpoint(tmp_path)
    for text, reason in (
        ("{", "^checkpoint: .*JSON"),
        ("[]", "^checkpoint: .*holds a list"),
        ('{"dim": 1, "dim": 2}', "^dim: got 2 values"),
    ):
        config.write_text(text)
        with pytest.raises(ArgumentError, match=reason):
            from_checkpoint(config)
    with pytest.raises(ArgumentError, match=r"^model_type: got nothing"):
        from_checkpoint({})


def test_configs_are_frozen_and_hashable() -> None:
    assert len({*MODELS, replace(V4_FLASH), from_checkpoint(published(V4_FLASH))}) == 4
    for section in (V41_FLASH, V41_FLASH.engram, V41_FLASH.vision, V41_FLASH.dspark, V41_FLASH.rope_scaling):
        hash(section)
        with pytest.raises(FrozenInstanceError):
            section.vocab_size = 1


def test_lists_and_whole_numbers_are_converted() -> None:
    loose = replace(V41_FLASH, compress_ratios=[*V41_RATIOS, 0, 0, 0], rope_theta=10000, kv_source_layer_ids=[2, 8, 14, 20])
    assert loose == V41_FLASH
    assert isinstance(loose.rope_theta, float)
    assert isinstance(YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536).factor, float)
    assert VisionConfig(**{**VISION, "image_token_id": 129264, "max_wh_ratio": 3}).max_wh_ratio == 3.0


def test_a_smaller_v4_derives_its_sources() -> None:
    small = replace(V4_FLASH, num_hidden_layers=4, compress_ratios=(0, 4, 128, 4, 0), kv_source_layer_ids=(), index_source_layer_ids=())
    assert (small.kv_source_layer_ids, small.index_source_layer_ids) == ((1, 2, 3), (1, 3))


def test_importing_configs_imports_no_torch() -> None:
    code = "import sys, dsv4.configs; dsv4.configs.from_checkpoint(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(GOLDEN / "v41")], capture_output=True, text=True, check=True, cwd=GOLDEN.parent.parent
    )
    assert done.stdout.strip() == "False"
