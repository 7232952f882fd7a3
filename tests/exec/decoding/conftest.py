"""Small models that are sure of some tokens and unsure of others."""

from dataclasses import replace

import pytest
import torch

from herald_exec.decoding import decode_prompts
from herald_exec.models import random_model, tiny
from herald_pipeline import catalogue
from herald_pipeline.model import Attention


def confident(model, factor=12.0):
    """Sharpen the head: random weights alone would never pass a threshold."""
    model.weights.head.mul_(factor)
    return model


@pytest.fixture
def causal_model():
    return confident(tiny(3, block_length=8, vocab_size=64))


@pytest.fixture
def causal_experts():
    shape = catalogue.get("llada2-mini")
    moe = replace(
        shape.moe, num_experts=16, experts_per_token=3, expert_intermediate_size=24, num_groups=4, groups_per_token=2
    )
    small = replace(
        shape,
        num_layers=3,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=64,
        moe=moe,
        mask_token_id=1,
        eos_token_ids=(0,),
        max_positions=512,
    )
    return confident(random_model(small, seed=2))


@pytest.fixture(params=[False, True], ids=["llada", "dream"])
def full_model(request):
    """Bidirectional, with and without shifted logits."""
    return confident(
        tiny(4, vocab_size=64, attention=Attention.BIDIRECTIONAL, shifted_logits=request.param, qkv_bias=request.param)
    )


@pytest.fixture
def run():
    """Decode; the answers' tokens, why each ended, and its counts. ``stop_at``: end that prompt at its first piece."""

    def drive(model, prompts, settings, *, batch_size=8, stop_at=None):
        tokens = [[] for _ in prompts]
        reasons = [None for _ in prompts]

        def take(piece):
            assert reasons[piece.prompt] is None, "a finished answer went on"
            tokens[piece.prompt] += piece.tokens
            reasons[piece.prompt] = piece.finished
            return piece.prompt == stop_at

        return tokens, reasons, decode_prompts(model, prompts, settings, take, batch_size=batch_size)

    return drive


@pytest.fixture
def prompts():
    """Prompts of many lengths around a block of 8, some ending in the end token or holding the mask id."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(2, 64, (n,), generator=generator).tolist() for n in (1, 7, 8, 9, 15, 16, 17, 30)]
    drawn[2][-1] = 0
    drawn[5][3] = 1
    return drawn
