"""A small model and pipelines on it, for tests of the description."""

import pytest

from herald_pipeline.model import ModelShape
from herald_pipeline.pipeline import Pipeline, build


@pytest.fixture
def small_model() -> ModelShape:
    """Six layers: two exact, four sparse, so that every staging ring wraps."""
    return ModelShape(
        name="small",
        architecture="sdar",
        num_layers=6,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100,
    )


@pytest.fixture
def herald(small_model: ModelShape) -> Pipeline:
    return build(small_model, "herald")
