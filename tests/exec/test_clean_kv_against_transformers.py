"""Clean KV of a run against the stock Qwen3: at full budget a plain forward, below it one under the same sets."""

import pytest
import torch
import transformers

from herald_exec import decode
from herald_exec import execution as execution_module
from herald_exec.checkpoints.naming import named_views
from herald_exec.models import tiny
from herald_exec.policy import PlannedPolicy
from herald_exec.pools import Pools
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.steps import ListedSteps

BLOCK = 8
SMALLEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def qwen():
    """A tiny model and the stock class with its weights (fp32, eager attention takes additive masks only)."""
    model = tiny(block_length=BLOCK, eos_token_ids=())
    shape = model.shape
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=shape.max_positions,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )
    stock = transformers.Qwen3ForCausalLM(config)
    views = named_views(shape, model.weights, merged_experts=True)
    stock.load_state_dict({name: view.contiguous() for name, view in views.items()})
    return model, stock.eval()


@pytest.fixture
def held(monkeypatch):
    """The full pool at the end of a run: per layer, keys and values ``[kv, S, d]``."""
    layers = []

    class Seen(Pools):
        def close(self):
            if "full" in self.hosts:
                host = self.hosts["full"]
                layers.extend(host.read(layer, 0, host.length(layer, 0)) for layer in range(4))
            super().close()

    monkeypatch.setattr(execution_module, "Pools", Seen)
    return layers


def stock_blocks(stock, text, context, allowed):
    """KV of ``text``, block by block; ``allowed(n, layer)`` is ``[kv, S]``: what block n of the answer sees of S."""
    cache = transformers.DynamicCache(config=stock.config)
    group = stock.config.num_attention_heads // stock.config.num_key_value_heads
    for start in range(0, len(text), BLOCK):
        at = torch.arange(start, start + BLOCK)[None]
        hidden = stock.model.embed_tokens(torch.tensor(text[start : start + BLOCK])[None])
        rotary = stock.model.rotary_emb(hidden, at)
        for index, layer in enumerate(stock.model.layers):
            seen = torch.ones(stock.config.num_key_value_heads, start + BLOCK, dtype=torch.bool)
            if start >= context:
                seen[:, :start] = allowed((start - context) // BLOCK, index, start)
            mask = torch.zeros(1, 1, 1, 1).masked_fill(~seen.repeat_interleave(group, 0)[None, :, None], SMALLEST)
            hidden = layer(
                hidden,
                attention_mask=mask.expand(-1, -1, BLOCK, -1),
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=rotary,
            )
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.parametrize("budget", [1.0, 0.05])
@pytest.mark.parametrize("name", ["herald", "herald-no-draft", "mage-offload"])
def test_clean_kv_is_that_of_the_stock_model_under_the_same_sets(kit, qwen, held, name, budget):
    model, stock = qwen
    request = kit.prompts([120], 32)[0]
    pipeline = kit.describe(name, model.shape, budget=budget)
    plan = ListedSteps(((3, 1, 2, 4),), BLOCK)
    policy = PlannedPolicy(plan, Sampler(mask_token_id=1), order="scripted")
    run = decode(pipeline, model, [request], policy=policy)
    oracle = kit.Oracle(model, pipeline.settings, plan.steps)
    assert oracle.decode(request, name) == run.answers[0]
    ahead = name.startswith("herald")

    def allowed(block, layer, prefix):
        seen = torch.zeros(model.shape.num_kv_heads, prefix, dtype=torch.bool)
        if layer < pipeline.settings.exact_layers:
            return ~seen
        seen.scatter_(1, oracle.sets[block][layer], True)
        if ahead and block:
            seen[:, prefix - BLOCK :] = True
        return seen

    found = stock_blocks(stock, [*request.prompt, *run.answers[0]], len(request.prompt), allowed)
    assert len(held) == len(found) == 4
    for ours, theirs in zip(held, found, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)
