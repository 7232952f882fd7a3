"""The shape of a model: what determines its bytes and its floating-point operations.

A shape is filled from the catalogue (:mod:`herald_pipeline.catalogue`) or from a Hugging Face ``config.json``.
All derived values are properties, so that no number can disagree with another.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Attention(StrEnum):
    """Which positions a query sees."""

    BLOCK_CAUSAL = "block_causal"
    """All positions of earlier blocks and of its own block (SDAR, LLaDA2)."""
    BIDIRECTIONAL = "bidirectional"
    """All positions of the sequence (LLaDA, Dream)."""


class KVDtype(StrEnum):
    """How a KV entry is stored; scales of 8-bit formats are counted by :func:`bytes_per_element`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"


def bytes_per_element(dtype: KVDtype, head_dim: int) -> float:
    """Bytes of one KV element; an int8 row carries one fp32 scale per head."""
    match dtype:
        case KVDtype.FP32:
            return 4.0
        case KVDtype.BF16 | KVDtype.FP16:
            return 2.0
        case KVDtype.FP8:
            return 1.0
        case KVDtype.INT8:
            return 1.0 + 4.0 / head_dim


@dataclass(frozen=True, slots=True)
class MoeShape:
    """Routed experts of the layers from ``first_dense_layers`` on.

    ``num_groups`` and ``groups_per_token`` describe group-limited routing (LLaDA2: the best 4 of 8 groups).
    """

    num_experts: int
    experts_per_token: int
    expert_intermediate_size: int
    num_shared_experts: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    first_dense_layers: int = 0
    routed_scaling: float = 1.0
    gate: str = "softmax"
    normalise_weights: bool = True


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer with grouped-query attention, dense or mixture-of-experts.

    ``num_heads`` query heads share ``num_kv_heads`` KV heads in groups of G = ``group_size``. ``rotary_fraction`` is
    the share of ``head_dim`` that RoPE turns. ``shifted_logits``: position i is predicted by the logits at i - 1
    (Dream). ``sources`` says where each fact was read; a fact marked ``unconfirmed`` there is shown so.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    attention: Attention = Attention.BLOCK_CAUSAL
    moe: MoeShape | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 1e6
    rotary_fraction: float = 1.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    shifted_logits: bool = False
    mask_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_positions: int = 32768
    block_length: int = 32
    # Not compared: two shapes are equal when their numbers are, and a shape stays hashable.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def group_size(self) -> int:
        """G: query heads that share one KV head; query head h reads KV head h // G."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_dense_layers(self) -> int:
        """Layers with a dense FFN."""
        return self.num_layers if self.moe is None else self.moe.first_dense_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_layers - self.num_dense_layers

    def kv_bytes_per_token_layer(self, dtype: KVDtype = KVDtype.BF16) -> float:
        """Bytes of one position's K and V in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_element(dtype, self.head_dim)

    def kv_bytes_per_token(self, dtype: KVDtype = KVDtype.BF16) -> float:
        """Bytes of one position's K and V in all layers."""
        return self.num_layers * self.kv_bytes_per_token_layer(dtype)

    @property
    def attention_params_per_layer(self) -> int:
        """Q, K, V and output projections with their biases and per-head norms."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        params = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        params += (q + 2 * kv) if self.qkv_bias else 0
        return params + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def dense_ffn_params(self) -> int:
        """Gate, up and down of one dense layer."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_params(self) -> int:
        """Gate, up and down of one routed expert; 0 for a dense model."""
        return 0 if self.moe is None else 3 * self.hidden_size * self.moe.expert_intermediate_size

    @property
    def shared_ffn_params(self) -> int:
        """Shared experts and router of one MoE layer: read for every token."""
        if self.moe is None:
            return 0
        router = self.hidden_size * self.moe.num_experts
        router += self.moe.num_experts if self.moe.gate == "sigmoid" else 0
        return self.moe.num_shared_experts * self.expert_params + router

    @property
    def num_params(self) -> int:
        """All parameters, exactly as a weight index counts them."""
        layers = self.num_layers * (self.attention_params_per_layer + 2 * self.hidden_size)
        layers += self.num_dense_layers * self.dense_ffn_params
        if self.moe is not None:
            experts = self.moe.num_experts * self.expert_params
            layers += self.num_moe_layers * (experts + self.shared_ffn_params)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return layers + embeddings + self.hidden_size

    @property
    def active_params(self) -> int:
        """Parameters that one token passes through: LM head counted, embedding table not."""
        table = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        if self.moe is None:
            return self.num_params - table
        idle = self.num_moe_layers * (self.moe.num_experts - self.moe.experts_per_token)
        return self.num_params - table - idle * self.expert_params

    def weight_bytes(self, bytes_per_param: float = 2.0) -> float:
        """Bytes of all weights."""
        return self.num_params * bytes_per_param
