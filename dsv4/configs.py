"""What a model is made of: ModelConfig, the released models, and from_checkpoint, which reads their files.

A ModelConfig checks itself when it is made: numbers are in range, and no two fields contradict each other. Lists become tuples, and
whole numbers floats where the field is one, so equal models are equal and hash alike. Names are those of the published config.json. What a
model may lack is a section of its own (`engram`, `vision`, `dspark`), None where it is lacking. Importing this module imports no torch.

Sources: spec A 9.1 (values), A 4.5 and 5.5 (sharing), M 0.2, 6.2, 7.1, 8.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from os import PathLike
from typing import Any, Final, get_args, get_type_hints

from dsv4 import config_schemas
from dsv4.config_checks import at_most, check, least, require, settle, typed


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """How the frequencies of compressed layers stretch (YaRN, without an attention factor; spec A 2.3)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        settle(self, "rope_scaling.")
        require(self.beta_fast > self.beta_slow, "rope_scaling.beta_fast", self.beta_fast, f"must exceed beta_slow {self.beta_slow}")


@dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """The n-gram memory (V4.1; spec M 6.2). Every n-gram size from 2 to max_ngram_size has n_heads hash columns of head_dim."""

    layer_ids: tuple[int, ...]  # the layers that it precedes
    num_embeddings: tuple[int, ...]  # rows of each layer's table: the sum of its hash columns' moduli
    max_ngram_size: int
    vocab_size: int  # where the search for prime moduli begins
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int  # distinct normalised tokens

    def __post_init__(self) -> None:
        settle(self, "engram.")
        require(self.max_ngram_size >= 2, "engram.max_ngram_size", self.max_ngram_size, "must be at least 2")
        tables, layers = len(self.num_embeddings), len(self.layer_ids)
        require(layers > 0, "engram.layer_ids", "()", "must name at least one layer")
        require(tables == layers, "engram.num_embeddings", f"{tables} tables", f"must be one for each of {layers} engram.layer_ids")
        columns = (self.max_ngram_size - 1) * self.n_heads
        rows = columns * self.vocab_size
        limit = f"must be at least {rows}: n_heads and max_ngram_size make {columns} columns, whose moduli begin at vocab_size"
        require(min(self.num_embeddings) >= rows, "engram.num_embeddings", self.num_embeddings, limit)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The image tower and what its preprocessing needs (V4.1; spec M 7.1)."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int  # pixels
    rope_theta: float
    downsample_ratio: int  # patches a side that become one token
    max_image_tokens: int  # of one image, with its start, end and newline tokens
    min_pixels: int
    max_wh_ratio: float | None
    image_token_id: int
    rms_norm_eps: float = 1e-6  # in no file: the tower keeps it while the text model has its own (spec M 0.2)

    def __post_init__(self) -> None:
        settle(self, "vision.")
        head = self.num_attention_heads
        width = self.hidden_size
        require(
            width % (4 * head) == 0,
            "vision.hidden_size",
            width,
            f"must be a multiple of 4 * num_attention_heads {head}: heads turn by row and column",
        )
        require(self.max_image_tokens >= 4, "vision.max_image_tokens", self.max_image_tokens, "must be at least 4, the smallest image")


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """The block draft of V4.1 and V4-Flash-0731 (spec M 8.3). Its stages are the model's draft layers."""

    block_size: int  # tokens a draft proposes
    noise_token_id: int
    target_layer_ids: tuple[int, ...]  # the layers that it taps, in order
    markov_rank: int
    n_routed_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        settle(self, "dspark.")
        require(len(self.target_layer_ids) > 0, "dspark.target_layer_ids", "()", "must name at least one layer")
        at_most("dspark.num_experts_per_tok", self.num_experts_per_tok, "dspark.n_routed_experts", self.n_routed_experts)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. Draft layers (V4's MTP block, or the stages of DSpark) come after the others and have ratio 0.

    On V4 every compressed layer has its own KV and every layer of ratio 4 its own index: leave `kv_source_layer_ids` and
    `index_source_layer_ids` empty, they are filled in. On V4.1 the layers between two sources use the earlier one's.

    Raises:
        ArgumentError: a wrong type, a number out of range, or a contradiction, by the name of a field.
    """

    model_type: str  # deepseek_v4 or deepseek_v41
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int  # draft layers
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int  # the last dims of a head
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    num_hash_layers: int = 0  # the first layers, routed by token id (V4)
    swiglu_limit: float
    sliding_window: int  # tokens, the query's own among them
    compress_ratios: tuple[int, ...]  # of each layer, draft layers too; 0: window only
    kv_source_layer_ids: tuple[int, ...] = ()
    index_source_layer_ids: tuple[int, ...] = ()
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # compressed entries
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int | None = None
    candidate_block_size: int | None = None  # compressed entries
    rope_theta: float  # layers of ratio 0
    compress_rope_theta: float  # the others, with rope_scaling
    rope_scaling: YarnScaling
    max_position_embeddings: int
    rms_norm_eps: float
    hc_mult: int  # residual streams
    hc_sinkhorn_iters: int
    hc_eps: float
    engram: EngramConfig | None = None
    vision: VisionConfig | None = None
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        settle(self, "")
        check(self)

    @property
    def is_v41(self) -> bool:
        """Whether the model is a V4.1."""
        return self.model_type == "deepseek_v41"

    @property
    def weight_block_size(self) -> tuple[int, int]:
        """Rows and columns of a dense FP8 weight that share a scale."""
        return (32, 32) if self.is_v41 else (128, 128)

    @property
    def activation_group(self) -> int:
        """Neighbouring activations that share an FP8 scale."""
        return self.weight_block_size[1]

    @property
    def q_head_norm(self) -> bool:
        """Whether each query head is normalised, without a weight (spec A 2.2)."""
        return not self.is_v41

    @property
    def index_hadamard(self) -> bool:
        """Whether index queries and keys go through a Hadamard transform (spec A 2.5)."""
        return not self.is_v41

    @property
    def hc_pre_from_prev_sublayer(self) -> bool:
        """Whether a sublayer's streams collapse by the weights of the sublayer before it (spec A 1.6)."""
        return self.is_v41


def from_checkpoint(checkpoint: str | PathLike[str] | Mapping[str, object]) -> ModelConfig:
    """Read a model's configuration: the published schema or the inference program's, of V4 or V4.1 (`dsv4.config_schemas`).

    Args:
        checkpoint: a config.json, the folder that holds it, or what such a file says.

    Raises:
        ArgumentError: no such file, or no configuration; a field that is unknown, missing, of the wrong type or of a value that is not
            supported, by the file's name for it; a contradiction between fields, by ModelConfig's names.
    """
    document = checkpoint if isinstance(checkpoint, Mapping) else config_schemas.load(checkpoint)
    schema = config_schemas.choose(document)
    values = dict(schema.defaults)
    for name, value in config_schemas.read(document, schema).items():
        field = schema.taken[name]
        values[field] = typed(name, KINDS[field], value, least(field))
    if any(name.startswith("dspark.") for name in values):
        values.setdefault("dspark.n_routed_experts", values["n_routed_experts"])
        values.setdefault("dspark.num_experts_per_tok", values["num_experts_per_tok"])
        if schema.model_type == "deepseek_v4" and schema.described_in:
            values["num_nextn_predict_layers"] = _stages_of_published_v4(values)
    sections: dict[str, dict[str, Any]] = {"": {}}
    for name, value in values.items():
        section, _, part = name.rpartition(".")
        sections.setdefault(section, {})[part] = value
    whole = sections.pop("") | {section: SECTIONS[section](**inner) for section, inner in sections.items()}
    return ModelConfig(model_type=schema.model_type, **whole)


def _stages_of_published_v4(values: Mapping[str, Any]) -> int:
    """V4-Flash-0731's published file keeps the base model's 1 and lists the ratios of three draft stages (spec M 0.2: DSpark x3)."""
    stated: int = values["num_nextn_predict_layers"]
    return max(stated, len(values["compress_ratios"]) - values["num_hidden_layers"]) if stated == 1 else stated


def _kinds(kind: type, section: str = "") -> dict[str, object]:
    """The annotation of each field, those of sections by dotted names."""
    kinds: dict[str, object] = {}
    for name, inner in get_type_hints(kind).items():
        part = next((part for part in (inner, *get_args(inner)) if is_dataclass(part)), None)
        kinds |= _kinds(part, f"{section}{name}.") if isinstance(part, type) else {section + name: inner}
    return kinds


SECTIONS: Final[dict[str, type]] = {"rope_scaling": YarnScaling, "engram": EngramConfig, "vision": VisionConfig, "dspark": DSparkConfig}
KINDS: Final = _kinds(ModelConfig)

V4_FLASH: Final = ModelConfig(
    model_type="deepseek_v4",
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_nextn_predict_layers=1,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_lora_rank=1024,
    o_groups=8,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=6,
    routed_scaling_factor=1.5,
    num_hash_layers=3,
    swiglu_limit=10.0,
    sliding_window=128,
    compress_ratios=(0, 0) + (4, 128) * 20 + (4,) + (0,),
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    rope_theta=1e4,
    compress_rope_theta=1.6e5,
    rope_scaling=YarnScaling(factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
    max_position_embeddings=1048576,
    rms_norm_eps=1e-6,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
)
V4_FLASH_0731: Final = replace(
    V4_FLASH,
    num_nextn_predict_layers=3,
    compress_ratios=(*V4_FLASH.compress_ratios[:43], 0, 0, 0),
    dspark=DSparkConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256, n_routed_experts=256, num_experts_per_tok=6
    ),
)
V4_PRO: Final = replace(
    V4_FLASH,
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    moe_intermediate_size=3072,
    n_routed_experts=384,
    routed_scaling_factor=2.5,
    compress_ratios=(128, 128) + (4, 128) * 29 + (4,) + (0,),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    index_topk=1024,
)
V41_FLASH: Final = replace(
    V4_FLASH,
    model_type="deepseek_v41",
    hidden_size=5120,
    num_hidden_layers=40,
    num_nextn_predict_layers=3,
    q_lora_rank=1280,
    moe_intermediate_size=2304,
    n_routed_experts=384,
    num_hash_layers=0,
    compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20 + (0, 0, 0),
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    rms_norm_eps=1e-20,
    engram=EngramConfig(
        layer_ids=(1, 14),
        num_embeddings=(384006168, 384016682),
        max_ngram_size=4,
        vocab_size=16_000_000,
        n_heads=8,
        head_dim=256,
        pad_token_id=2,
        compressed_vocab_size=99092,
    ),
    vision=VisionConfig(
        num_hidden_layers=32,
        hidden_size=1024,
        num_attention_heads=16,
        intermediate_size=2816,
        patch_size=14,
        rope_theta=1e4,
        downsample_ratio=3,
        max_image_tokens=1024,
        min_pixels=295936,
        max_wh_ratio=None,
        image_token_id=129264,
    ),
    dspark=DSparkConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(37, 38, 39), markov_rank=256, n_routed_experts=128, num_experts_per_tok=3
    ),
)
