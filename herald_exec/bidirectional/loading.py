"""Models for the decoding commands: a checkpoint folder, or a shape by name with seeded random weights."""

from pathlib import Path

import torch

from herald_exec import reference
from herald_exec.checkpoints.memory import (
    MemoryNeed,
    available_bytes,
    require_memory,
    resolve_device,
    resolve_dtype,
)
from herald_exec.checkpoints.named import open_model
from herald_exec.checkpoints.tokenizer import TextTokenizer, load_tokenizer
from herald_exec.models import random_model
from herald_exec.models.base import BlockModel
from herald_pipeline import catalogue
from herald_pipeline.errors import CapacityError, ConfigError, unknown_name

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json")


def _random(name: str, device: torch.device, dtype: torch.dtype, seed: int) -> BlockModel:
    shape = catalogue.resolve(name)
    weight_bytes = int(shape.weight_bytes(dtype.itemsize))
    problem = MemoryNeed(weight_bytes, 0, available_bytes(device)).problem(device)
    if problem is not None:
        raise CapacityError(problem)
    return random_model(shape, seed, device=device, dtype=dtype)


def load_model(
    name: str, weights: str, device: str, dtype: str | None, seed: int
) -> tuple[BlockModel, TextTokenizer | None]:
    """Model and, where the folder has one, its tokenizer.

    Parameters
    ----------
    name
        Checkpoint folder, or a reference model that ships; with ``weights`` ``random`` a catalogue name or a
        ``config.json``.
    device, dtype
        As the command line takes them; without ``dtype`` the stored type, fp32 for random weights.

    Raises
    ------
    ConfigError
        No such folder, name, device or type.
    CapacityError
        The weights do not fit; found before they are loaded or drawn.
    """
    where, kind = resolve_device(device), resolve_dtype(dtype)
    if weights not in ("checkpoint", "random"):
        raise unknown_name("weights", weights, ("checkpoint", "random"))
    if weights == "random":
        return _random(name, where, kind or torch.float32, seed), None
    if name not in reference.NAMES and not Path(name).is_dir():
        message = f"model {name!r} is no checkpoint folder; pass one, or --weights random for speed on random weights"
        raise ConfigError(message)
    checkpoint = open_model(name)
    folder = checkpoint.folder
    require_memory(checkpoint, where, kind)
    has_tokenizer = any((folder / file).exists() for file in _TOKENIZER_FILES)
    return checkpoint.load(where, kind), load_tokenizer(folder) if has_tokenizer else None
