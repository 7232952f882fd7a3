"""Small shapes of the four families, and the stock ``transformers`` class that computes the same thing."""

from dataclasses import replace

import pytest
import torch
import transformers

from herald_exec.checkpoints.naming import Naming, named_views, naming_of
from herald_exec.models import random_model
from herald_pipeline import catalogue

SMALL = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 96,
    "mask_token_id": 95,
    "eos_token_ids": (94,),
    "block_length": 4,
    "max_positions": 256,
}


def small_shape(family, **overrides):
    """The family's facts (biases, norms, rotary share, gate) with small sizes."""
    shape = catalogue.get(
        {"sdar": "sdar-8b", "llada2": "llada2-mini", "llada": "llada-8b", "dream": "dream-7b-base"}[family]
    )
    sizes = SMALL | ({"num_kv_heads": 4} if family == "llada" else {})
    if shape.moe is not None:
        sizes["moe"] = replace(
            shape.moe,
            num_experts=16,
            experts_per_token=3,
            expert_intermediate_size=24,
            num_groups=4,
            groups_per_token=2,
        )
    return replace(shape, **(sizes | overrides))


def _llama_names(views):
    last = {
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
        "attn_out": "self_attn.o_proj",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
    }
    top = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
    renamed = {}
    for name, tensor in views.items():
        parts = name.removeprefix("model.transformer.").split(".")
        if parts[0] == "blocks":
            _, index, part, kind = parts
            renamed[f"model.layers.{index}.{last.get(part, 'self_attn.' + part)}.{kind}"] = tensor
        else:
            renamed[f"{top[parts[0]]}.{parts[1]}"] = tensor
    return renamed


def _glm_names(shape, views):
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    renamed = {}
    for name, tensor in views.items():
        head, _, part = name.partition(".attention.")
        if part == "query_key_value.weight":
            q, k, v = tensor.split([heads * dim, kv_heads * dim, kv_heads * dim])
            renamed |= {
                f"{head}.self_attn.q_proj.weight": q,
                f"{head}.self_attn.k_proj.weight": k,
                f"{head}.self_attn.v_proj.weight": v,
            }
            continue
        if name.endswith("experts.gate_proj"):
            up = views[name.replace("gate_proj", "up_proj")]
            renamed[name.replace("gate_proj", "gate_up_proj")] = torch.cat((tensor, up), dim=1)
            continue
        if name.endswith("experts.up_proj"):
            continue
        for ours, theirs in {
            ".attention.dense": ".self_attn.o_proj",
            ".attention.query_layernorm": ".self_attn.q_norm",
            ".attention.key_layernorm": ".self_attn.k_norm",
            "word_embeddings": "embed_tokens",
            "gate.expert_bias": "gate.e_score_correction_bias",
        }.items():
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def _common(shape):
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_embeddings,
        "attn_implementation": "eager",
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_fraction,
        },
    }


def stock_model(model):
    """The stock class of research section 8 with the same weights, fp32, eager attention."""
    shape = model.shape
    common = _common(shape)
    naming = naming_of(shape)
    views = named_views(shape, model.weights, merged_experts=True)
    if naming is Naming.OLMO:
        stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
        views = _llama_names(views)
    elif naming is Naming.LING:
        moe = shape.moe
        config = transformers.Glm4MoeConfig(
            **common,
            use_qk_norm=True,
            n_routed_experts=moe.num_experts,
            num_local_experts=moe.num_experts,
            num_experts_per_tok=moe.experts_per_token,
            moe_intermediate_size=moe.expert_intermediate_size,
            n_shared_experts=moe.num_shared_experts,
            n_group=moe.num_groups,
            topk_group=moe.groups_per_token,
            routed_scaling_factor=moe.routed_scaling,
            first_k_dense_replace=moe.first_dense_layers,
            norm_topk_prob=moe.normalise_weights,
            num_mtp_layers=0,
        )
        stock = transformers.Glm4MoeForCausalLM(config)
        views = _glm_names(shape, views)
    elif shape.qkv_bias:
        stock = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    else:
        stock = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    missing, unexpected = stock.load_state_dict({name: view.contiguous() for name, view in views.items()}, strict=False)
    assert not [name for name in missing if name != "lm_head.weight" or not shape.tied_embeddings]
    assert not unexpected
    return stock.eval()


def additive(mask):
    """Boolean ``[..., q, k]`` as the additive 4-D mask that the stock eager path needs."""
    mask = mask if mask.dim() == 3 else mask[None]
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]


@pytest.fixture
def stock():
    return stock_model


@pytest.fixture
def additive_mask():
    return additive


@pytest.fixture
def small():
    return small_shape


@pytest.fixture(params=["sdar", "llada2", "llada", "dream"])
def family_model(request):
    return random_model(small_shape(request.param), seed=3)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield
