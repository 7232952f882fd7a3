"""Small seeded LLaDA- and Dream-shaped models, sharp enough that thresholds divide positions."""

from dataclasses import replace

import pytest

from herald_exec.models import random_model
from herald_pipeline import catalogue

SMALL = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_heads": 4,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 96,
    "mask_token_id": 95,
    "eos_token_ids": (94,),
    "max_positions": 256,
}
FAMILIES = {"llada": ("llada-8b", 4), "dream": ("dream-7b-base", 2)}


def small_model(family, seed=3):
    name, kv_heads = FAMILIES[family]
    model = random_model(replace(catalogue.get(name), **SMALL, num_kv_heads=kv_heads), seed=seed)
    # Random heads give flat distributions; a scale puts confidences on both sides of a threshold of 0.5.
    model.weights.head.mul_(4.0)
    return model


@pytest.fixture(params=sorted(FAMILIES), scope="session")
def model(request):
    """One model of each family."""
    return small_model(request.param)


@pytest.fixture(scope="session")
def llada():
    return small_model("llada")


@pytest.fixture(scope="session")
def dream():
    return small_model("dream")


PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [7] * 12]


@pytest.fixture
def prompts():
    return [list(prompt) for prompt in PROMPTS]
