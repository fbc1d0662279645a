"""The four files that describe a model, as tables, and how one of them is read. `dsv4.configs` gives the values their meaning.

| schema | told by | layout |
|---|---|---|
| V4 published | `model_type` = deepseek_v4 | flat, with `rope_scaling` and `quantization_config` |
| V4.1 published | `model_type` = deepseek_v41 | `text_config`, `vision_config`, `quantization_config` |
| V4 inference | no `model_type`, `dim` | flat, the names of the inference program |
| V4.1 inference | the same, and a name that only V4.1 has | flat |

A V4 file of either schema that has any `dspark_` field describes the draft of V4-Flash-0731 and must have them all, but for the numbers
of experts, which are then the model's own (spec M 0.2). Its published file keeps the base model's `num_nextn_predict_layers` 1; the draft
stages are the ratios past the last layer.

A field is taken (TAKEN: it becomes a field of ModelConfig), checked (it binds, and one value is supported) or descriptive (ignored, and
only in published files). Anything else in the file is an error, and so is anything missing, with these exceptions:

| schema | may be missing | then |
|---|---|---|
| V4 inference | `norm_eps`, `hc_eps` | 1e-6, 1e-6 |
| both inference | has no name for it | max_position_embeddings 1048576; FP8 weight blocks 128 (V4) or 32 (V4.1) |
| V4.1 inference | `scale_fmt` | ue8m0 |
| V4.1 published | `quantization_config.fmt` | e4m3 |

Sources: spec A 9.1, M 0.2, and the configuration files under `tests/golden`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple

from dsv4.config_checks import short
from dsv4.types import ArgumentError

# What a published file tells other programs: who made it, how it was trained, which ids a tokenizer adds. Ignored at the top, in
# text_config and in vision_config. Its dtype is that of unquantised tensors, which the specification fixes; an inference file's binds.
DESCRIPTIVE: Final = (
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)

Row = tuple[str, str, str]  # ModelConfig's name, the published one, the inference program's ("": it has none)

TAKEN: Final[tuple[Row, ...]] = (
    ("vocab_size", "vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size", "dim"),
    ("num_hidden_layers", "num_hidden_layers", "n_layers"),
    ("num_nextn_predict_layers", "num_nextn_predict_layers", "n_mtp_layers"),
    ("num_attention_heads", "num_attention_heads", "n_heads"),
    ("head_dim", "head_dim", "head_dim"),
    ("qk_rope_head_dim", "qk_rope_head_dim", "rope_head_dim"),
    ("q_lora_rank", "q_lora_rank", "q_lora_rank"),
    ("o_lora_rank", "o_lora_rank", "o_lora_rank"),
    ("o_groups", "o_groups", "o_groups"),
    ("moe_intermediate_size", "moe_intermediate_size", "moe_inter_dim"),
    ("n_routed_experts", "n_routed_experts", "n_routed_experts"),
    ("n_shared_experts", "n_shared_experts", "n_shared_experts"),
    ("num_experts_per_tok", "num_experts_per_tok", "n_activated_experts"),
    ("routed_scaling_factor", "routed_scaling_factor", "route_scale"),
    ("swiglu_limit", "swiglu_limit", "swiglu_limit"),
    ("sliding_window", "sliding_window", "window_size"),
    ("compress_ratios", "compress_ratios", "compress_ratios"),
    ("index_n_heads", "index_n_heads", "index_n_heads"),
    ("index_head_dim", "index_head_dim", "index_head_dim"),
    ("index_topk", "index_topk", "index_topk"),
    ("rope_theta", "rope_theta", "rope_theta"),
    ("compress_rope_theta", "compress_rope_theta", "compress_rope_theta"),
    ("rope_scaling.factor", "rope_scaling.factor", "rope_factor"),
    ("rope_scaling.beta_fast", "rope_scaling.beta_fast", "beta_fast"),
    ("rope_scaling.beta_slow", "rope_scaling.beta_slow", "beta_slow"),
    ("rope_scaling.original_max_position_embeddings", "rope_scaling.original_max_position_embeddings", "original_seq_len"),
    ("max_position_embeddings", "max_position_embeddings", ""),
    ("rms_norm_eps", "rms_norm_eps", "norm_eps"),
    ("hc_mult", "hc_mult", "hc_mult"),
    ("hc_sinkhorn_iters", "hc_sinkhorn_iters", "hc_sinkhorn_iters"),
    ("hc_eps", "hc_eps", "hc_eps"),
)
TAKEN_V4: Final[tuple[Row, ...]] = (("num_hash_layers", "num_hash_layers", "n_hash_layers"),)
TAKEN_DSPARK: Final[tuple[Row, ...]] = (
    ("dspark.block_size", "dspark_block_size", "dspark_block_size"),
    ("dspark.noise_token_id", "dspark_noise_token_id", "dspark_noise_token_id"),
    ("dspark.target_layer_ids", "dspark_target_layer_ids", "dspark_target_layer_ids"),
    ("dspark.markov_rank", "dspark_markov_rank", "dspark_markov_rank"),
    ("dspark.n_routed_experts", "dspark_n_routed_experts", "dspark_n_routed_experts"),
    ("dspark.num_experts_per_tok", "dspark_num_experts_per_tok", "dspark_n_activated_experts"),
)
TAKEN_V41: Final[tuple[Row, ...]] = (
    ("kv_source_layer_ids", "kv_source_layer_ids", "kv_source_layers"),
    ("index_source_layer_ids", "index_source_layer_ids", "index_source_layers"),
    ("candidate_source_layer_id", "candidate_source_layer_id", "candidate_source_layer"),
    ("candidate_topk_blocks", "candidate_topk_blocks", "candidate_topk_blocks"),
    ("candidate_block_size", "candidate_block_size", "candidate_block_size"),
    ("engram.layer_ids", "engram_layer_ids", "engram_layer_ids"),
    ("engram.num_embeddings", "engram_num_embeddings", "engram_num_embeddings"),
    ("engram.max_ngram_size", "engram_max_ngram_size", "engram_max_ngram_size"),
    ("engram.vocab_size", "engram_vocab_size", "engram_vocab_size"),
    ("engram.n_heads", "engram_n_heads", "engram_n_heads"),
    ("engram.head_dim", "engram_head_dim", "engram_head_dim"),
    ("engram.pad_token_id", "engram_pad_token_id", "engram_pad_id"),
    ("engram.compressed_vocab_size", "engram_compressed_vocab_size", "engram_compressed_vocab_size"),
)
TAKEN_VISION: Final[tuple[Row, ...]] = (
    ("vision.num_hidden_layers", "num_hidden_layers", "vision_n_layers"),
    ("vision.hidden_size", "hidden_size", "vision_dim"),
    ("vision.num_attention_heads", "num_attention_heads", "vision_n_heads"),
    ("vision.intermediate_size", "intermediate_size", "vision_inter_dim"),
    ("vision.patch_size", "patch_size", "vision_patch_size"),
    ("vision.rope_theta", "rope_theta", "vision_rope_theta"),
    ("vision.downsample_ratio", "downsample_ratio", "vision_downsample_ratio"),
    ("vision.max_image_tokens", "max_image_tokens", "vision_max_n_token"),
    ("vision.min_pixels", "min_pixels", "vision_min_pixels"),
    ("vision.max_wh_ratio", "max_wh_ratio", "vision_max_wh_ratio"),
)
IMAGE_TOKEN: Final = {"image_token_id": "vision.image_token_id"}

CHECKED: Final[dict[str, object]] = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
CHECKED_QUANTIZATION: Final[dict[str, object]] = {
    "quantization_config.quant_method": "fp8",
    "quantization_config.fmt": "e4m3",
    "quantization_config.activation_scheme": "dynamic",
    "quantization_config.scale_fmt": "ue8m0",
}
CHECKED_INFERENCE: Final[dict[str, object]] = {"score_func": "sqrtsoftplus", "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


class Schema(NamedTuple):
    """One kind of file. Names of nested fields are joined by dots."""

    name: str
    model_type: str
    taken: Mapping[str, str]  # the file's name -> ModelConfig's
    checked: Mapping[str, object]  # the file's name -> the one supported value
    may_miss: frozenset[str] = frozenset()  # by the file's name
    defaults: Mapping[str, object] = {}  # by ModelConfig's name: the released value of what the file does not say
    described_in: tuple[str, ...] = ()  # the sections where DESCRIPTIVE fields may be


def _published(rows: Iterable[Row], section: str = "") -> dict[str, str]:
    return {section + published: ours for ours, published, _ in rows}


def _inference(*groups: Iterable[Row]) -> dict[str, str]:
    return {inference: ours for rows in groups for ours, _, inference in rows if inference}


def _within(section: str, checked: Mapping[str, object]) -> dict[str, object]:
    return {section + name: value for name, value in checked.items()}


V4_PUBLISHED: Final = Schema(
    "the published V4 config.json",
    "deepseek_v4",
    _published(TAKEN + TAKEN_V4),
    {"model_type": "deepseek_v4", **CHECKED, "rope_scaling.type": "yarn", "expert_dtype": "fp4"}
    | CHECKED_QUANTIZATION
    | {"quantization_config.weight_block_size": [128, 128]},
    described_in=("",),
)
V41_PUBLISHED: Final = Schema(
    "the published V4.1 config.json",
    "deepseek_v41",
    _published(TAKEN + TAKEN_DSPARK + TAKEN_V41, "text_config.") | _published(TAKEN_VISION, "vision_config.") | IMAGE_TOKEN,
    {"model_type": "deepseek_v41"}
    | _within("text_config.", {"model_type": "deepseek_v41_text", **CHECKED, "rope_scaling.rope_type": "yarn"})
    | {"vision_config.model_type": "deepseek_v41_vision"}
    | CHECKED_QUANTIZATION
    | {"quantization_config.weight_block_size": [32, 32], "quantization_config.expert_dtype": "fp4"},
    may_miss=frozenset({"quantization_config.fmt"}),
    described_in=("", "text_config.", "vision_config."),
)
V4_INFERENCE: Final = Schema(
    "the V4 inference config",
    "deepseek_v4",
    _inference(TAKEN, TAKEN_V4),
    CHECKED_INFERENCE,
    may_miss=frozenset({"norm_eps", "hc_eps"}),
    defaults={"rms_norm_eps": 1e-6, "hc_eps": 1e-6, "max_position_embeddings": 1048576},
)
V41_INFERENCE: Final = Schema(
    "the V4.1 inference config",
    "deepseek_v41",
    _inference(TAKEN, TAKEN_DSPARK, TAKEN_V41, TAKEN_VISION) | IMAGE_TOKEN,
    CHECKED_INFERENCE,
    may_miss=frozenset({"scale_fmt"}),
    defaults={"max_position_embeddings": 1048576},
)
DSPARK_EXPERTS: Final = frozenset({"dspark_n_routed_experts", "dspark_num_experts_per_tok", "dspark_n_activated_experts"})


def load(path: str | PathLike[str]) -> dict[str, object]:
    """The JSON object in `path`, or in the config.json of the folder `path`. A field that is written twice is an error."""
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
    except (TypeError, ValueError, OSError) as error:
        raise ArgumentError("checkpoint", short(path), "must be a path or what a config.json says") from error

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(name, f"{names.count(name)} values", f"must be written once in {file}")
        return dict(pairs)

    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise ArgumentError("checkpoint", short(path), f"must be a readable config.json or its folder ({error.strerror})") from error
    except ArgumentError:
        raise
    except (ValueError, RecursionError) as error:
        raise ArgumentError("checkpoint", short(path), f"must be JSON ({error})") from error
    if not isinstance(document, dict):
        raise ArgumentError("checkpoint", short(path), f"must hold a JSON object, holds a {type(document).__name__}")
    return document


def choose(document: Mapping[str, object]) -> Schema:
    """The schema that `document` follows (the first table above)."""
    model_type = document.get("model_type")
    if "model_type" not in document and "dim" in document:
        only_v41 = (V41_INFERENCE.taken.keys() - V4_INFERENCE.taken.keys()) - _inference(TAKEN_DSPARK).keys()
        schema = V41_INFERENCE if only_v41 & document.keys() else V4_INFERENCE
    elif model_type in ("deepseek_v4", "deepseek_v41"):
        schema = V4_PUBLISHED if model_type == "deepseek_v4" else V41_PUBLISHED
    else:
        got = short(model_type) if "model_type" in document else "nothing"
        raise ArgumentError("model_type", got, "must be 'deepseek_v4' or 'deepseek_v41'; an inference config has no model_type but dim")
    if schema.model_type == "deepseek_v4" and any(str(name).startswith("dspark_") for name in document):
        draft = _published(TAKEN_DSPARK) if schema is V4_PUBLISHED else _inference(TAKEN_DSPARK)
        return schema._replace(
            name=f"{schema.name} with DSpark", taken={**schema.taken, **draft}, may_miss=schema.may_miss | (DSPARK_EXPERTS & draft.keys())
        )
    return schema


def read(document: Mapping[str, object], schema: Schema) -> dict[str, object]:
    """The taken fields of `document`, by the file's names, once every field is known, none is missing and the checked ones hold."""
    found = dict(_leaves(document, schema, ""))
    known = {*schema.taken, *schema.checked}
    for name, value in found.items():
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known - found.keys()), n=1)
            raise ArgumentError(name, short(value), f"{schema.name} has no such field", f"Did you mean {near[0]}?" if near else "")
    for name in (*schema.taken, *schema.checked):
        if name not in found and name not in schema.may_miss:
            raise ArgumentError(name, "nothing", f"{schema.name} must have it")
    for name, expected in schema.checked.items():
        value = found.pop(name, expected)
        value = list(value) if isinstance(value, tuple) else value
        if type(value) is not type(expected) or value != expected:
            raise ArgumentError(name, short(value), f"must be {expected!r}, the only value that is supported")
    return found


def _leaves(document: Mapping[str, object], schema: Schema, section: str) -> Iterable[tuple[str, object]]:
    sections = {name[: name.rindex(".")] for name in (*schema.taken, *schema.checked) if "." in name}
    sections |= {name[: name.rindex(".")] for name in sections if "." in name}
    for key, value in document.items():
        name = f"{section}{key}"
        if section in schema.described_in and key in DESCRIPTIVE:
            continue
        if name not in sections:
            yield name, value
        elif isinstance(value, Mapping):
            yield from _leaves(value, schema, f"{name}.")
        else:
            raise ArgumentError(name, short(value), f"must be an object with the fields of {schema.name}")
