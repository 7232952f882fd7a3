"""``config.json`` in each family's own spelling: written beside the weights of a checkpoint that we make."""

from typing import Any

from herald_exec.checkpoints.naming import Naming, naming_of
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import ModelShape

_MODEL_TYPES = {
    "SDARForCausalLM": "sdar",
    "SDARMoeForCausalLM": "sdar_moe",
    "DreamModel": "Dream",
    "LLaDAModelLM": "llada",
    "LLaDA2MoeModelLM": "llada2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
}


def _common(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": [shape.architecture],
        "model_type": _MODEL_TYPES[shape.architecture],
        "vocab_size": shape.vocab_size,
        "mask_token_id": shape.mask_token_id,
        "eos_token_id": list(shape.eos_token_ids),
        "rope_theta": shape.rope_theta,
    }


def _olmo(shape: ModelShape) -> dict[str, Any]:
    return {
        "d_model": shape.hidden_size,
        "n_layers": shape.num_layers,
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_kv_heads,
        "mlp_hidden_size": shape.intermediate_size,
        "embedding_size": shape.vocab_size,
        "max_sequence_length": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "weight_tying": shape.tied_embeddings,
        "include_qkv_bias": shape.qkv_bias,
        "block_length": shape.block_length,
    }


def _hugging_face(shape: ModelShape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_bias": shape.qkv_bias,
        "block_length" if naming_of(shape) is Naming.LING else "block_size": shape.block_length,
    }


def _experts(shape: ModelShape) -> dict[str, Any]:
    moe = shape.moe
    if moe is None:
        return {}
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_intermediate_size,
        "num_shared_experts": moe.num_shared_experts,
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "first_k_dense_replace": moe.first_dense_layers,
        "routed_scaling_factor": moe.routed_scaling,
        "norm_topk_prob": moe.normalise_weights,
        "score_function": moe.gate,
    }


def to_config(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """Content of ``config.json`` for a shape; :func:`herald_pipeline.catalogue.from_config` reads it back."""
    if shape.architecture not in _MODEL_TYPES:
        message = f"no checkpoint naming for architecture {shape.architecture!r}; known: {', '.join(_MODEL_TYPES)}"
        raise ConfigError(message)
    naming = naming_of(shape)
    if naming is Naming.OLMO and shape.head_dim * shape.num_heads != shape.hidden_size:
        message = (
            f"LLaDA's config has no head_dim: {shape.num_heads} heads of {shape.head_dim} must make {shape.hidden_size}"
        )
        raise ConfigError(message)
    config = _common(shape) | (_olmo(shape) if naming is Naming.OLMO else _hugging_face(shape)) | _experts(shape)
    if shape.rotary_fraction != 1.0:
        config["partial_rotary_factor"] = shape.rotary_fraction
    if naming is Naming.LING:
        config["use_qk_norm"] = shape.qk_norm
    return config | {"dtype": dtype}
