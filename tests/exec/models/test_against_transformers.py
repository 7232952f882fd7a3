"""Each family against the stock ``transformers`` class, fp32, random weights: logits agree to 1e-5."""

import pytest
import torch
from transformers import DynamicCache

from herald_exec.attention import attend, attend_two_part, block_causal_mask
from herald_exec.models import forward, prefill, random_model, tiny
from herald_pipeline.model import Attention

TOLERANCE = {"rtol": 0, "atol": 1e-5}


def rule_mask(model, length, block=4):
    """The visibility rule written with loops, independent of ``block_causal_mask``."""
    bidirectional = model.shape.attention is Attention.BIDIRECTIONAL
    return torch.tensor([[bidirectional or j // block <= i // block for j in range(length)] for i in range(length)])


def tokens_of(model, rows, length, seed=0):
    return torch.randint(0, model.shape.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_full_forward_gives_the_stock_logits(family_model, stock, additive_mask):
    tokens = tokens_of(family_model, rows=2, length=23)
    expected = stock(family_model)(tokens, attention_mask=additive_mask(rule_mask(family_model, 23))).logits
    ours = family_model.logits(forward(family_model, tokens).hidden.flatten(0, 1)).view_as(expected)
    assert expected.std() > 0.5
    torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_cached_block_gives_the_stock_logits_and_keys(family_model, stock, additive_mask):
    tokens = tokens_of(family_model, rows=1, length=24)
    cache = DynamicCache()
    stock_model = stock(family_model)
    stock_model(tokens[:, :20], attention_mask=additive_mask(rule_mask(family_model, 20)), past_key_values=cache)
    expected = stock_model(
        tokens[:, 20:],
        attention_mask=torch.zeros(1, 1, 4, 24),
        position_ids=torch.arange(20, 24)[None],
        past_key_values=cache,
    ).logits[0]

    past = forward(family_model, tokens[:, :20])
    rotary = family_model.rotary(torch.arange(20, 24))
    hidden = family_model.embed(tokens[0, 20:])
    for layer in range(family_model.shape.num_layers):
        q, k, v = family_model.project(layer, hidden, rotary)
        block = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        torch.testing.assert_close(past.keys[layer], cache.layers[layer].keys[:, :, :20], **TOLERANCE)
        torch.testing.assert_close(block[0], cache.layers[layer].keys[:, :, 20:], **TOLERANCE)
        out = attend_two_part(q[None], (past.keys[layer], past.values[layer]), block)
        hidden = family_model.finish(layer, hidden, out[0])
    torch.testing.assert_close(family_model.logits(hidden), expected, **TOLERANCE)


def test_block_length_one_is_the_causal_model(stock):
    model = tiny(5)
    tokens = tokens_of(model, rows=2, length=17)
    expected = stock(model)(tokens).logits
    ours = model.logits(forward(model, tokens, block=1).hidden.flatten(0, 1)).view_as(expected)
    torch.testing.assert_close(ours, expected, **TOLERANCE)
    other = model.logits(forward(model, tokens, block=4).hidden.flatten(0, 1)).view_as(expected)
    assert (other - expected).abs().max() > 0.1


def test_draft_and_denoise_groups_in_one_forward_equal_two_forwards(stock, additive_mask):
    """HERALD's 2B step: shared positions and prefix, the groups blind to each other (paper section IV-B)."""
    model, prefix, block = tiny(7), 12, 4
    tokens = tokens_of(model, rows=1, length=prefix + 2 * block)
    stock_model = stock(model)
    seen = torch.zeros(prefix + 2 * block, prefix + 2 * block, dtype=torch.bool)
    seen[:prefix, :prefix] = rule_mask(model, prefix)
    for group in (slice(prefix, prefix + block), slice(prefix + block, prefix + 2 * block)):
        seen[group, :prefix] = True
        seen[group, group] = True
    positions = torch.cat((torch.arange(prefix + block), torch.arange(prefix, prefix + block)))
    fused = model.logits(forward(model, tokens, positions=positions, mask=seen).hidden[0])
    for first in (prefix, prefix + block):
        alone = torch.cat((tokens[:, :prefix], tokens[:, first : first + block]), dim=1)
        expected = stock_model(alone, attention_mask=additive_mask(rule_mask(model, prefix + block))).logits[0, prefix:]
        torch.testing.assert_close(fused[first : first + block], expected, **TOLERANCE)


def test_tied_embeddings_use_the_embedding_as_head(stock, additive_mask):
    model = tiny(2, tied_embeddings=True)
    tokens = tokens_of(model, rows=1, length=9)
    expected = stock(model)(tokens, attention_mask=additive_mask(rule_mask(model, 9, block=32))).logits[0]
    torch.testing.assert_close(model.logits(forward(model, tokens).hidden[0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 4, 8])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 23])
def test_prefill_in_chunks_gives_the_stock_hidden_states_and_keys(family_model, stock, additive_mask, chunk, length):
    tokens = tokens_of(family_model, rows=1, length=length)
    cache = DynamicCache()
    expected = stock(family_model)(
        tokens, attention_mask=additive_mask(rule_mask(family_model, length)), past_key_values=cache
    ).logits[0]
    seen = []

    def keep(layer, q, k, v):
        assert q.shape == (1, length, family_model.shape.num_heads, 16)
        torch.testing.assert_close(k, cache.layers[layer].keys, **TOLERANCE)
        torch.testing.assert_close(v, cache.layers[layer].values, **TOLERANCE)
        seen.append(layer)

    hidden = prefill(family_model, tokens[0], keep, chunk=chunk)
    assert seen == [0, 1, 2]
    torch.testing.assert_close(family_model.logits(hidden), expected, **TOLERANCE)


def test_padded_rows_do_not_change_the_real_ones(family_model):
    tokens = tokens_of(family_model, rows=2, length=16)
    lengths = torch.tensor([16, 8])
    padded = forward(family_model, tokens, lengths=lengths).hidden
    alone = forward(family_model, tokens[1:, :8]).hidden
    torch.testing.assert_close(padded[1:, :8], alone, **TOLERANCE)


def test_one_range_attention_equals_the_two_part_one():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 4, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 15, 16, generator=generator)
    two = attend_two_part(q, (k[:, :, :11], v[:, :, :11]), (k[:, :, 11:], v[:, :, 11:]))
    torch.testing.assert_close(two, attend(q, k, v), **TOLERANCE)


def test_block_causal_mask_follows_absolute_blocks():
    positions = torch.arange(13)
    model = random_model(tiny(0).shape)
    assert torch.equal(block_causal_mask(positions, positions, 4), rule_mask(model, 13))
