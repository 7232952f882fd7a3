"""The training layout against the executor's own forward: what is learned is what is decoded."""

from dataclasses import replace

import pytest
import torch

from herald_exec.models import BlockModel, forward
from herald_exec.reference.network import Network, dense_training_mask, flex_mask
from herald_exec.reference.noise import block_masks
from herald_pipeline import catalogue
from herald_pipeline.model import Attention

LENGTH = 128


@pytest.fixture
def network():
    shape = replace(catalogue.get("herald-ref"), num_layers=3, hidden_size=48, num_heads=4, head_dim=16)
    made = Network(replace(shape, intermediate_size=96, vocab_size=97), seed=1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.named_parameters():
        if name != "embedding":
            # Untrained output matrices are zero, which would hide a wrong mask.
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


@pytest.fixture
def tokens():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def losses(model, tokens, targets, block=None):
    hidden = forward(model, tokens, block=block).hidden
    return torch.nn.functional.cross_entropy(model.logits(hidden.flatten(0, 1)), targets.flatten(), reduction="none")


def test_a_noisy_block_is_scored_as_the_executor_scores_it_behind_its_clean_prefix(network, tokens):
    masks = block_masks(2, LENGTH, torch.Generator().manual_seed(4))
    trained = network.block_losses(tokens, masks, dense_training_mask(LENGTH, tokens.device))
    model = BlockModel(network.shape, network.weights(torch.float32))
    for copy, masked in enumerate(masks):
        for start in range(0, LENGTH, 32):
            seen = tokens[:, : start + 32].clone()
            block = slice(start, start + 32)
            seen[:, block] = torch.where(masked[:, block], network.shape.mask_token_id, seen[:, block])
            expected = losses(model, seen, tokens[:, : start + 32]).view(2, -1)[:, block]
            torch.testing.assert_close(trained[:, copy, block], expected, rtol=1e-4, atol=1e-4)


def test_a_bidirectional_step_is_scored_as_the_executor_scores_it(network, tokens):
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5)) < 0.4
    trained = network.list_losses(tokens, masked)
    shape = replace(network.shape, attention=Attention.BIDIRECTIONAL)
    seen = torch.where(masked, shape.mask_token_id, tokens)
    expected = losses(BlockModel(shape, network.weights(torch.float32)), seen, tokens).view(tokens.shape)
    torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-4)


def test_the_flex_mask_lets_through_what_the_dense_mask_does():
    """FlexAttention keeps tiles of 128 positions; those it calls empty or full must be so."""
    length = 256
    dense = dense_training_mask(length, torch.device("cpu"))
    tiles = flex_mask(length, torch.device("cpu")).to_dense()[0, 0]
    expected = dense.view(6, 128, 6, 128).any(dim=3).any(dim=1)
    assert torch.equal(tiles.bool(), expected)


def test_weights_survive_the_way_into_the_network_and_back(network):
    other = Network(network.shape, seed=9, dtype=torch.float32)
    other.take(network.weights(torch.float32))
    for (name, ours), (_, theirs) in zip(network.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
