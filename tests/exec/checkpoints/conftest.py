"""Tiny checkpoints of the four families in their real naming."""

from dataclasses import replace

import pytest

from herald_exec.checkpoints.writing import write_checkpoint
from herald_exec.models import random_weights
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
FAMILIES = {"sdar": "sdar-8b", "llada2": "llada2-mini", "llada": "llada-8b", "dream": "dream-7b-base"}


def small_shape(family):
    shape = catalogue.get(FAMILIES[family])
    sizes = SMALL | ({"num_kv_heads": 4, "hidden_size": 64} if family == "llada" else {})
    if shape.moe is not None:
        sizes["moe"] = replace(
            shape.moe,
            num_experts=16,
            experts_per_token=3,
            expert_intermediate_size=24,
            num_groups=4,
            groups_per_token=2,
        )
    return replace(shape, **sizes)


@pytest.fixture
def make_folder(tmp_path):
    """Write a family's small checkpoint in several shards; returns the folder, the shape and the weights."""

    def make(family, **options):
        shape = small_shape(family)
        weights = random_weights(shape, seed=11)
        folder = write_checkpoint(tmp_path / family, shape, weights, **({"shard_bytes": 40_000} | options))
        return folder, shape, weights

    return make


@pytest.fixture(params=sorted(FAMILIES))
def family(request):
    return request.param
