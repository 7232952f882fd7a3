"""Models that the executor runs: one transformer for all families, and its weights."""

from dataclasses import replace
from typing import Any

import torch

from herald_exec.models.base import BlockModel
from herald_exec.models.forward import SequenceForward, forward, prefill
from herald_exec.models.layers import Rotary
from herald_exec.models.weights import ModelWeights, empty_weights, random_weights
from herald_pipeline import catalogue
from herald_pipeline.model import ModelShape

__all__ = [
    "BlockModel",
    "ModelWeights",
    "Rotary",
    "SequenceForward",
    "empty_weights",
    "forward",
    "prefill",
    "random_model",
    "random_weights",
    "tiny",
    "tiny_shape",
]


def tiny_shape(**overrides: Any) -> ModelShape:
    """Shape of the model ``tiny``: Qwen3-like, 4 layers; any field may be overridden."""
    return replace(catalogue.get("tiny"), **overrides)


def random_model(
    shape: ModelShape,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> BlockModel:
    """Model of any shape with seeded random weights."""
    return BlockModel(shape, random_weights(shape, device, dtype, seed))


def tiny(
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> BlockModel:
    """Seeded random ``tiny`` model; ``overrides`` are fields of :class:`ModelShape`."""
    return random_model(tiny_shape(**overrides), seed, device=device, dtype=dtype)
