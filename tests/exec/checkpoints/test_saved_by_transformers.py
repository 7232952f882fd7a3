"""Folders that ``transformers`` itself wrote: config, shards and names are theirs, and logits agree to 1e-5."""

import pytest
import torch
import transformers

from herald_exec.checkpoints.folder import open_checkpoint
from herald_exec.models import forward

COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "eos_token_id": 5,
    "attn_implementation": "eager",
}
ROPE = {"rope_type": "default", "rope_theta": 5e4}
MODELS = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
    "qwen3-tied": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_folder_saved_by_transformers_gives_its_logits(tmp_path, name):
    config_class, model_class, extra = MODELS[name]
    torch.manual_seed(0)
    stock = model_class(config_class(**(COMMON | {"rope_parameters": ROPE} | extra))).eval()
    with torch.no_grad():
        for parameter_name, parameter in stock.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.15)
    stock.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shape.eos_token_ids == (5,)
    model = checkpoint.load()
    tokens = torch.randint(0, 96, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = stock(tokens).logits
        ours = model.logits(forward(model, tokens, block=1).hidden.flatten(0, 1)).view_as(expected)
    assert expected.std() > 0.3
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
