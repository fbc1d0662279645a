"""What a ModelConfig checks when it is made: the type of each field, then everything that two fields can contradict each other about.

Ratios and sources: spec A 4.1 to 4.5; candidates: A 5.5; draft layers: M 8.1, 8.3. No arithmetic of the model, and no torch.
"""

from __future__ import annotations

import reprlib
import sys
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

from dsv4.types import ArgumentError

if TYPE_CHECKING:
    from dsv4.configs import ModelConfig

MODEL_TYPES: Final = ("deepseek_v4", "deepseek_v41")

# Counts that may be 0, and ids. Every other whole number is at least 1, every real number above 0; numbers in a list are at least 0.
FROM_ZERO: Final = (
    "num_nextn_predict_layers",
    "num_hash_layers",
    "candidate_source_layer_id",
    "noise_token_id",
    "pad_token_id",
    "image_token_id",
)


def short(value: object) -> str:
    """A value for an error message, cut where it is long."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"a {type(value).__name__} too long to print"


def least(field: str) -> int:
    """The smallest whole number that ModelConfig's `field` may be."""
    return 0 if field.rpartition(".")[2] in FROM_ZERO else 1


def typed(name: str, kind: object, value: object, least: int) -> object:
    """`value` as the annotation `kind` wants it: a list becomes a tuple, a whole number a float; nothing else is converted."""
    if NoneType in get_args(kind):
        return None if value is None else typed(name, get_args(kind)[0], value, least)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        return tuple(typed(f"{name}[{place}]", int, item, 0) for place, item in enumerate(value))
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
        return float(value)
    if isinstance(kind, type) and kind not in (int, float) and isinstance(value, kind):
        return value
    limits: dict[object, str] = {
        int: f"must be a whole number of at least {least}",
        float: "must be a finite number above 0",
        str: "must be a string",
        tuple: "must be a list of whole numbers",
    }
    raise ArgumentError(name, short(value), limits.get(get_origin(kind) or kind, f"must be a {getattr(kind, '__name__', kind)}"))


def settle(config: Any, section: str) -> None:
    """Check and convert every field of the dataclass `config`, in place; `section` comes before their names in errors."""
    for name, kind in get_type_hints(type(config)).items():
        object.__setattr__(config, name, typed(section + name, kind, getattr(config, name), least(name)))


def require(holds: bool, argument: str, got: object, limit: str, remedy: str = "") -> None:
    """Raise ArgumentError unless `holds`."""
    if not holds:
        raise ArgumentError(argument, got, limit, remedy)


def at_most(argument: str, got: int, other: str, bound: int) -> None:
    """Raise ArgumentError if `got` exceeds the field `other`."""
    require(got <= bound, argument, got, f"must be at most {other} {bound}")


def check(config: ModelConfig) -> None:
    """Raise ArgumentError for the first contradiction; fill in V4's sources."""
    require(config.model_type in MODEL_TYPES, "model_type", repr(config.model_type), f"must be one of {MODEL_TYPES}")
    _check_sizes(config)
    _check_layers(config)
    if config.is_v41:
        _check_sharing(config)
    else:
        _check_v4(config)
    _check_candidates(config)
    _check_draft(config)
    _check_vocabulary(config)


def _check_sizes(config: ModelConfig) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    require(heads % groups == 0, "num_attention_heads", heads, f"must be a multiple of o_groups {groups}")
    rope = config.qk_rope_head_dim
    require(rope % 2 == 0, "qk_rope_head_dim", rope, "must be even: dims turn in pairs")
    at_most("qk_rope_head_dim", rope, "head_dim", config.head_dim)
    at_most("qk_rope_head_dim", rope, "index_head_dim", config.index_head_dim)
    at_most("num_experts_per_tok", config.num_experts_per_tok, "n_routed_experts", config.n_routed_experts)
    require(config.n_shared_experts == 1, "n_shared_experts", config.n_shared_experts, "must be 1, the only value that is supported")
    yarn, positions = config.rope_scaling, config.max_position_embeddings
    reach = yarn.factor * yarn.original_max_position_embeddings
    limit = f"must be at most rope_scaling.factor times rope_scaling.original_max_position_embeddings, {reach:.0f}"
    require(positions <= reach, "max_position_embeddings", positions, limit)


def _check_layers(config: ModelConfig) -> None:
    layers, drafts, ratios = config.num_hidden_layers, config.num_nextn_predict_layers, config.compress_ratios
    require(
        len(ratios) == layers + drafts,
        "compress_ratios",
        f"{len(ratios)} ratios",
        f"must be one for each of {layers} num_hidden_layers and {drafts} num_nextn_predict_layers",
    )
    require(not any(ratios[layers:]), "compress_ratios", ratios[layers:], "must be 0 on the num_nextn_predict_layers draft layers")
    at_most("num_hash_layers", config.num_hash_layers, "num_hidden_layers", layers)
    named = {"kv_source_layer_ids": config.kv_source_layer_ids, "index_source_layer_ids": config.index_source_layer_ids}
    if config.dspark:
        named["dspark.target_layer_ids"] = config.dspark.target_layer_ids
    if config.engram:
        named["engram.layer_ids"] = config.engram.layer_ids
    for name, ids in named.items():
        require(all(a < b for a, b in pairwise(ids)), name, ids, "must be in ascending order, none twice")
        require(not ids or ids[-1] < layers, name, ids, f"must be layers below num_hidden_layers {layers}")


def _check_v4(config: ModelConfig) -> None:
    ratios = config.compress_ratios
    require(1 not in ratios, "compress_ratios", 1, "must be 0, 4 (overlapping, indexed) or another number from 2 up, on deepseek_v4")
    sources = {
        "kv_source_layer_ids": tuple(layer for layer, ratio in enumerate(ratios) if ratio),
        "index_source_layer_ids": tuple(layer for layer, ratio in enumerate(ratios) if ratio == 4),
    }
    for name, ids in sources.items():
        got = getattr(config, name)
        require(got in ((), ids), name, got, f"must be {ids} on deepseek_v4, which follows from compress_ratios", "Leave it ()")
        object.__setattr__(config, name, ids)
    for name in ("engram", "vision", "candidate_source_layer_id"):
        require(getattr(config, name) is None, name, getattr(config, name), "must be None with model_type deepseek_v4")


def _check_sharing(config: ModelConfig) -> None:
    """V4.1: whatever a layer reads was made before it, from its own compressed KV."""
    ratios, kv, index = config.compress_ratios, config.kv_source_layer_ids, config.index_source_layer_ids
    require(set(ratios) <= {0, 1, 2}, "compress_ratios", sorted(set(ratios)), "must be 0, 1 or 2 on deepseek_v41")
    require(config.num_hash_layers == 0, "num_hash_layers", config.num_hash_layers, "must be 0 on deepseek_v41")
    for name, ids in (("kv_source_layer_ids", kv), ("index_source_layer_ids", index)):
        plain = [layer for layer in ids if ratios[layer] == 0]
        require(not plain, name, plain, "must have a ratio above 0 in compress_ratios")
    unindexed = sorted(set(kv) - set(index))
    require(not unindexed, "index_source_layer_ids", index, f"must hold every one of kv_source_layer_ids, lacks {unindexed}")
    for layer, ratio in enumerate(ratios):
        source = max((source for source in kv if source <= layer), default=None)
        if ratio and source is None:
            raise ArgumentError("kv_source_layer_ids", kv, f"must hold a source up to layer {layer}, of compress_ratios {ratio}")
        if ratio and source is not None and ratios[source] != ratio:
            got = f"{ratio} at layer {layer}"
            raise ArgumentError("compress_ratios", got, f"must be {ratios[source]}, as at its source {source} of kv_source_layer_ids")


def _check_candidates(config: ModelConfig) -> None:
    names = ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size")
    missing = [name for name in names if getattr(config, name) is None]
    require(len(missing) in (0, 3), missing[0] if missing else "", None, f"must be a number, like the other two of {names}")
    source = config.candidate_source_layer_id
    if source is None:
        return
    index = config.index_source_layer_ids
    require(source in index, "candidate_source_layer_id", source, f"must be one of index_source_layer_ids {index}")
    later = [layer for layer in config.kv_source_layer_ids if layer > source]
    limit = f"must not precede kv_source_layer_ids {later}: candidates are blocks of one KV"
    require(not later, "candidate_source_layer_id", source, limit)


def _check_draft(config: ModelConfig) -> None:
    drafts = config.num_nextn_predict_layers
    if config.dspark:
        require(drafts > 0, "num_nextn_predict_layers", drafts, "must be at least 1, the stages of dspark")
    else:
        most = 0 if config.is_v41 else 1
        require(drafts <= most, "num_nextn_predict_layers", drafts, f"must be at most {most} on {config.model_type} without dspark")


def _check_vocabulary(config: ModelConfig) -> None:
    tokens = {}
    if config.dspark:
        tokens["dspark.noise_token_id"] = config.dspark.noise_token_id
    if config.vision:
        tokens["vision.image_token_id"] = config.vision.image_token_id
    if config.engram:
        tokens["engram.pad_token_id"] = config.engram.pad_token_id
        at_most("engram.compressed_vocab_size", config.engram.compressed_vocab_size, "vocab_size", config.vocab_size)
    for name, token in tokens.items():
        require(token < config.vocab_size, name, token, f"must be below vocab_size {config.vocab_size}")
