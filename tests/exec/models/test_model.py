"""The layer-wise interface: seeds, devices of weights, what is held and what is not."""

from dataclasses import replace

import pytest
import torch

from herald_exec.models import empty_weights, forward, random_model, random_weights, tiny
from herald_exec.models.base import BlockModel
from herald_pipeline import catalogue


def test_a_seed_names_one_model():
    one, same, other = tiny(1), tiny(1), tiny(2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one.weights.tensors(), same.weights.tensors(), strict=True))
    assert not torch.equal(one.weights.embedding, other.weights.embedding)


def test_norms_and_biases_are_jittered_so_that_a_missing_one_shows(family_model):
    for name, tensor in family_model.weights.tensors():
        if name.endswith(("norm", "bias")):
            assert tensor.std() > 0.03, name


@pytest.mark.parametrize(
    "name", ["sdar-8b", "sdar-4b", "llada-8b", "dream-7b-base", "llada2-mini", "llada2-flash", "tiny"]
)
def test_tensors_hold_exactly_the_parameters_of_the_shape(name):
    shape = catalogue.get(name)
    weights = empty_weights(shape, "meta", torch.bfloat16)
    assert sum(tensor.numel() for _, tensor in weights.tensors()) == shape.num_params


def test_flat_tokens_of_several_rows_equal_each_row_alone():
    """``project`` and ``finish`` know no rows: positions say everything."""
    model = tiny(4)
    tokens, positions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([40, 41, 3, 4, 5])
    together = model.project(1, model.embed(tokens), positions)
    apart = [model.project(1, model.embed(tokens[i]), positions[i]) for i in (slice(0, 2), slice(2, 5))]
    for joined, *parts in zip(together, *apart, strict=True):
        torch.testing.assert_close(joined, torch.cat(parts), rtol=0, atol=1e-6)


def test_rotary_may_be_computed_once_for_all_layers():
    model = tiny(4)
    hidden, positions = model.embed(torch.arange(6)), torch.arange(6) + 1000
    for direct, shared in zip(
        model.project(2, hidden, positions), model.project(2, hidden, model.rotary(positions)), strict=True
    ):
        assert torch.equal(direct, shared)


def test_partial_rotary_leaves_the_second_half_of_a_head_as_it_was(small):
    model = random_model(small("llada2"), seed=1)
    hidden = model.embed(torch.arange(5))
    plain, _, _ = model.project_unrotated(0, hidden)
    turned, _, _ = model.project(0, hidden, torch.arange(5) + 7)
    assert torch.equal(plain[..., 8:], turned[..., 8:])
    assert (plain[..., :8] - turned[..., :8]).abs().max() > 0.1


def test_bf16_stays_near_fp32_and_routes_in_fp32(small):
    shape = small("llada2")
    wide = random_model(shape, seed=2)
    low = random_model(shape, seed=2, dtype=torch.bfloat16)
    layer = low.weights.layers[1].ffn
    assert layer.router.dtype is layer.bias.dtype is torch.float32
    assert low.kv_dtype is torch.bfloat16
    tokens = torch.arange(12)[None]
    keys = forward(low, tokens).keys[0]
    assert keys.dtype is torch.bfloat16
    torch.testing.assert_close(keys.float(), forward(wide, tokens).keys[0], rtol=0, atol=0.08)


def test_double_precision_agrees_with_single(family_model):
    shape = family_model.shape
    wide = random_weights(shape, dtype=torch.float64, seed=3)
    for (_, target), (_, source) in zip(wide.tensors(), family_model.weights.tensors(), strict=True):
        target.copy_(source)
    tokens = torch.arange(20)[None]
    expected = forward(BlockModel(shape, wide), tokens).hidden
    torch.testing.assert_close(forward(family_model, tokens).hidden.double(), expected, rtol=0, atol=1e-4)


def test_overrides_change_the_tiny_model():
    model = tiny(0, num_layers=2, vocab_size=64)
    assert len(model.weights.layers) == 2
    assert model.shape == replace(catalogue.get("tiny"), num_layers=2, vocab_size=64)
