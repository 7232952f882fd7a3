"""Decoding against stock ``transformers`` Llama and Qwen2 with a full additive mask, and an own Algorithm 1."""

import pytest
import torch
import transformers

from herald_exec.bidirectional import Loop, decode, make_batch
from herald_exec.bidirectional.forward import readable
from herald_pipeline.decoding.policy import make_policy

TOLERANCE = 1e-5
RESPONSE = 20


def stock_model(model):
    """Llama for LLaDA, Qwen2 for Dream, with the same weights."""
    shape, weights = model.shape, model.weights
    kind = {"LLaDA": "Llama", "Dream": "Qwen2"}["Dream" if shape.shifted_logits else "LLaDA"]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    stock = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
    for index, layer in enumerate(weights.layers):
        name = f"model.layers.{index}."
        for letter, part in zip("qkv", layer.qkv.split(widths), strict=True):
            state[f"{name}self_attn.{letter}_proj.weight"] = part
        if layer.qkv_bias is not None:
            for letter, part in zip("qkv", layer.qkv_bias.split(widths), strict=True):
                state[f"{name}self_attn.{letter}_proj.bias"] = part
        gate, up = layer.ffn.gate_up.chunk(2)
        state |= {
            f"{name}self_attn.o_proj.weight": layer.output,
            f"{name}mlp.gate_proj.weight": gate,
            f"{name}mlp.up_proj.weight": up,
            f"{name}mlp.down_proj.weight": layer.ffn.down,
            f"{name}input_layernorm.weight": layer.input_norm,
            f"{name}post_attention_layernorm.weight": layer.post_norm,
        }
    assert set(state) == set(stock.state_dict())
    stock.load_state_dict(state)
    return stock


def full_logits(stock, tokens, *, shifted):
    """``[L, V]`` by a full forward under an all-zeros additive mask; row i predicts position i."""
    length = tokens.shape[1]
    with torch.no_grad():
        logits = stock(tokens, attention_mask=torch.zeros(1, 1, length, length), use_cache=False).logits[0]
    return torch.cat([logits[:1], logits[:-1]]) if shifted else logits


@pytest.fixture(scope="module")
def stock(model):
    return stock_model(model)


def test_first_round_logits_equal_the_stock_model(model, stock, prompts):
    loop = Loop(model, make_batch(model.shape, prompts[:1], RESPONSE), make_policy("top1", "fixed", "none"))
    expected = full_logits(stock, loop.tokens, shifted=model.shape.shifted_logits)
    with torch.no_grad():
        _, hidden = loop.score(loop.kv, torch.ones_like(loop.masked), loop.masked)
    torch.testing.assert_close(model.logits(hidden), expected[loop.masked[0]], atol=TOLERANCE, rtol=TOLERANCE)


def dsb_by_hand(stock, shape, prompt, s_init, s_max, threshold):
    """DSB without a cache, one request: full forwards of the stock model and Algorithm 1 with Python sets."""
    end = len(prompt) + RESPONSE
    tokens = torch.tensor([prompt + [shape.mask_token_id] * RESPONSE])
    masks, s, e, decoded = set(range(len(prompt), end)), len(prompt), len(prompt) + s_init, 0
    commits = []
    while decoded < RESPONSE:
        logits = full_logits(stock, tokens, shifted=shape.shifted_logits)
        probability = logits.softmax(dim=-1)
        probability[:, shape.mask_token_id] = 0
        confidence, token = probability.max(dim=-1)
        block = sorted(masks & set(range(s, e)))
        chosen = [p for p in block if confidence[p] >= threshold] or [max(block, key=lambda p: confidence[p])]
        for position in chosen:
            tokens[0, position] = token[position]
        commits.append(chosen)
        masks -= set(chosen)
        decoded += len(chosen)
        left = [p for p in block if p in masks]
        s = min(left) if left else e
        e = min(len(prompt) + s_init + decoded, s + s_max, end)
    return tokens[0].tolist(), commits


@pytest.mark.parametrize("s_max", [8, 12, 1000])
def test_dsb_decodes_what_the_stock_model_with_algorithm_1_decodes(model, stock, prompts, s_max):
    policy = make_policy(
        "confidence", "dsb-greedy", decoder_params={"threshold": 0.5}, scheduler_params={"s_init": 8, "s_max": s_max}
    )
    for prompt in prompts:
        decoded = decode(model, make_batch(model.shape, [prompt], RESPONSE), policy, check=True)
        tokens, commits = dsb_by_hand(stock, model.shape, prompt, 8, s_max, 0.5)
        assert decoded.tokens[0].tolist() == tokens
        assert [round_commits[0] for round_commits in decoded.commits] == commits


@pytest.mark.parametrize("cache", ["prefix", "dual", "dkv", "dkv-prefill", "dsb"])
def test_a_partial_forward_equals_the_stock_model_over_the_same_cached_keys(model, stock, prompts, cache):
    shifted = model.shape.shifted_logits
    policy = make_policy("top1", "dsb-const", cache, scheduler_params={"s_init": 8})
    if cache == "dsb":
        policy = make_policy(
            "top1", "dsb-const", cache, scheduler_params={"s_init": 8}, cache_params={"prefix_window": 2}
        )
    loop = Loop(model, make_batch(model.shape, prompts[:1], RESPONSE), policy, check=True)
    compared = 0
    with torch.no_grad():
        while not loop.done:
            plan = loop.plan()
            reused, computed = plan.reused[0].nonzero()[:, 0], plan.forwarded[0].nonzero()[:, 0]
            cached = transformers.DynamicCache(config=stock.config)
            for layer in range(model.shape.num_layers):
                # Keys are stored after RoPE and every query sees all of them: their order is free.
                cached.update(loop.kv.keys[layer][:, :, reused], loop.kv.values[layer][:, :, reused], layer)
            read = loop.masked & loop.state.active(loop.masked)
            read &= readable(plan.forwarded, shifted=shifted)
            logits = stock(
                loop.tokens[:, computed],
                attention_mask=torch.zeros(1, 1, len(computed), len(reused) + len(computed)),
                position_ids=computed[None],
                past_key_values=cached,
                use_cache=True,
            ).logits[0]
            source = read[0].nonzero()[:, 0] - (1 if shifted else 0)
            expected = logits[torch.searchsorted(computed, source)]
            compared += len(reused)
            loop.step()
            ours = model.logits(loop.last_hidden)
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert compared > 0
