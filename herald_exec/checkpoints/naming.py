"""Published tensor names of the four families, as views into our own tensors.

One table serves reading, writing and checking: each name maps to the slice of :class:`ModelWeights` that it fills
(checking uses tensors on the ``meta`` device, which hold shapes only). Names were read in the families' own model files
and weight indexes.
"""

from collections.abc import Iterator
from enum import StrEnum

from torch import Tensor

from herald_exec.models.weights import DenseWeights, ExpertWeights, LayerWeights, ModelWeights
from herald_pipeline.model import ModelShape

Named = Iterator[tuple[str, Tensor]]

IGNORED = ("inv_freq", "v_head")
"""Tensors that some checkpoints carry and no forward needs."""


class Naming(StrEnum):
    """Who named the tensors."""

    QWEN = "qwen"
    """SDAR, Dream, and the Qwen and Llama models that they derive from."""
    OLMO = "olmo"
    """LLaDA-8B and 1.5."""
    LING = "ling"
    """LLaDA2."""


def naming_of(shape: ModelShape) -> Naming:
    """Naming by the architecture that the config states."""
    architecture = shape.architecture.lower()
    if architecture.startswith("llada2"):
        return Naming.LING
    return Naming.OLMO if architecture.startswith("llada") else Naming.QWEN


def _dense(prefix: str, ffn: DenseWeights) -> Named:
    width = ffn.down.shape[1]
    yield f"{prefix}gate_proj.weight", ffn.gate_up[:width]
    yield f"{prefix}up_proj.weight", ffn.gate_up[width:]
    yield f"{prefix}down_proj.weight", ffn.down


def _experts(prefix: str, ffn: ExpertWeights, *, merged: bool) -> Named:
    width = ffn.down.shape[2]
    yield f"{prefix}gate.weight", ffn.router
    if ffn.bias is not None:
        yield f"{prefix}gate.expert_bias", ffn.bias
    if merged:
        yield f"{prefix}experts.gate_proj", ffn.gate_up[:, :width]
        yield f"{prefix}experts.up_proj", ffn.gate_up[:, width:]
        yield f"{prefix}experts.down_proj", ffn.down
    else:
        for expert in range(ffn.down.shape[0]):
            one = DenseWeights(ffn.gate_up[expert], ffn.down[expert])
            yield from _dense(f"{prefix}experts.{expert}.", one)
    if ffn.shared_gate_up is not None and ffn.shared_down is not None:
        yield from _dense(f"{prefix}shared_experts.", DenseWeights(ffn.shared_gate_up, ffn.shared_down))


def _feed_forward(prefix: str, layer: LayerWeights, *, merged: bool) -> Named:
    if isinstance(layer.ffn, DenseWeights):
        yield from _dense(prefix, layer.ffn)
    else:
        yield from _experts(prefix, layer.ffn, merged=merged)


def _split_qkv(joined: Tensor, shape: ModelShape) -> tuple[tuple[str, Tensor], ...]:
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    return ("q", joined[:q]), ("k", joined[q : q + kv]), ("v", joined[q + kv :])


def _qwen(shape: ModelShape, weights: ModelWeights, *, merged: bool) -> Named:
    yield "model.embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", layer.input_norm
        for letter, rows in _split_qkv(layer.qkv, shape):
            yield f"{prefix}self_attn.{letter}_proj.weight", rows
        if layer.qkv_bias is not None:
            for letter, rows in _split_qkv(layer.qkv_bias, shape):
                yield f"{prefix}self_attn.{letter}_proj.bias", rows
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{prefix}self_attn.q_norm.weight", layer.q_norm
            yield f"{prefix}self_attn.k_norm.weight", layer.k_norm
        yield f"{prefix}self_attn.o_proj.weight", layer.output
        yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
        yield from _feed_forward(f"{prefix}mlp.", layer, merged=merged)
    yield "model.norm.weight", weights.norm
    if not shape.tied_embeddings:
        yield "lm_head.weight", weights.head


def _olmo(shape: ModelShape, weights: ModelWeights) -> Named:
    root = "model.transformer."
    yield f"{root}wte.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        prefix = f"{root}blocks.{index}."
        assert isinstance(layer.ffn, DenseWeights)
        yield f"{prefix}attn_norm.weight", layer.input_norm
        for letter, rows in _split_qkv(layer.qkv, shape):
            yield f"{prefix}{letter}_proj.weight", rows
        if layer.qkv_bias is not None:
            for letter, rows in _split_qkv(layer.qkv_bias, shape):
                yield f"{prefix}{letter}_proj.bias", rows
        yield f"{prefix}attn_out.weight", layer.output
        yield f"{prefix}ff_norm.weight", layer.post_norm
        # ff_proj is the gate (it goes through SiLU); ff_out inside a block is down, outside it is the LM head.
        width = layer.ffn.down.shape[1]
        yield f"{prefix}ff_proj.weight", layer.ffn.gate_up[:width]
        yield f"{prefix}up_proj.weight", layer.ffn.gate_up[width:]
        yield f"{prefix}ff_out.weight", layer.ffn.down
    yield f"{root}ln_f.weight", weights.norm
    if not shape.tied_embeddings:
        yield f"{root}ff_out.weight", weights.head


def _ling(shape: ModelShape, weights: ModelWeights, *, merged: bool) -> Named:
    yield "model.word_embeddings.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        yield f"{prefix}input_layernorm.weight", layer.input_norm
        yield f"{prefix}attention.query_key_value.weight", layer.qkv
        if layer.qkv_bias is not None:
            yield f"{prefix}attention.query_key_value.bias", layer.qkv_bias
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{prefix}attention.query_layernorm.weight", layer.q_norm
            yield f"{prefix}attention.key_layernorm.weight", layer.k_norm
        yield f"{prefix}attention.dense.weight", layer.output
        yield f"{prefix}post_attention_layernorm.weight", layer.post_norm
        yield from _feed_forward(f"{prefix}mlp.", layer, merged=merged)
    yield "model.norm.weight", weights.norm
    if not shape.tied_embeddings:
        yield "lm_head.weight", weights.head


def head_name(naming: Naming) -> str:
    """Name of the LM head; a checkpoint with tied embeddings may carry it all the same."""
    return "model.transformer.ff_out.weight" if naming is Naming.OLMO else "lm_head.weight"


def named_views(shape: ModelShape, weights: ModelWeights, *, merged_experts: bool = False) -> dict[str, Tensor]:
    """Every published name with the slice of ``weights`` that it fills.

    ``merged_experts`` takes the form in which a layer's experts are three tensors ``[E, ...]`` without the suffix
    ``.weight``, instead of three per expert.
    """
    match naming_of(shape):
        case Naming.QWEN:
            named = _qwen(shape, weights, merged=merged_experts)
        case Naming.OLMO:
            named = _olmo(shape, weights)
        case Naming.LING:
            named = _ling(shape, weights, merged=merged_experts)
    return dict(named)
