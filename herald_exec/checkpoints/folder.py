"""A checkpoint folder, checked without loading, then streamed to a device."""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from herald_exec.checkpoints.check import needed_tensors, tensor_problems, uses_merged_experts
from herald_exec.checkpoints.naming import named_views
from herald_exec.checkpoints.shards import StoredTensor, read_shard, stored_tensors
from herald_exec.models.base import BlockModel
from herald_exec.models.weights import empty_weights
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError, read_failure
from herald_pipeline.model import ModelShape

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and tensors agree.

    Attributes
    ----------
    folder
        Where it lies.
    shape
        The model that ``config.json`` describes, with the end tokens of ``generation_config.json`` added.
    tensors
        What is stored, by name; only what a forward needs.
    """

    folder: Path
    shape: ModelShape
    tensors: dict[str, StoredTensor]

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """Type of most bytes of the weights."""
        nbytes: dict[str, int] = defaultdict(int)
        for tensor in self.tensors.values():
            nbytes[tensor.dtype] += tensor.nbytes
        return _DTYPES[max(nbytes, key=lambda dtype: nbytes[dtype])]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the needed tensors on disk."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the loaded weights in ``dtype`` (routers stay in fp32)."""
        return empty_weights(self.shape, "meta", dtype).nbytes()

    def load(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> BlockModel:
        """Model on ``device``, in the stored type unless ``dtype`` says otherwise.

        Each tensor goes from the mapped file straight into its place; there is no second copy, and a shard's pages are
        released before the next shard is opened.
        """
        dtype = dtype or self.stored_dtype
        weights = empty_weights(self.shape, device, dtype)
        views = named_views(self.shape, weights, merged_experts=uses_merged_experts(self.tensors))
        by_shard: dict[Path, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            by_shard[tensor.shard].append(name)
        for shard, names in by_shard.items():
            for name, stored in read_shard(shard, names):
                views[name].copy_(stored)
                del stored
        return BlockModel(self.shape, weights)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path} is not readable as JSON: {read_failure(error)}; download it again"
        raise ConfigError(message) from None
    if not isinstance(content, dict):
        message = f"{path} must hold a JSON object, got {type(content).__name__}"
        raise ConfigError(message)
    return content


def _end_tokens(folder: Path, shape: ModelShape) -> tuple[int, ...]:
    """End tokens of config, generation config and catalogue together.

    SDAR names its second one in the generation config only, LLaDA's end of turn stands in neither.
    """
    path = folder / "generation_config.json"
    extra = _json(path).get("eos_token_id") if path.exists() else None
    listed = [] if extra is None else extra if isinstance(extra, list) else [extra]
    known = (catalogue.get(name) for name in catalogue.names())
    same = (other for other in known if _same_tokenizer(other, shape))
    catalogued = (end for other in same for end in other.eos_token_ids)
    return tuple(dict.fromkeys((*shape.eos_token_ids, *listed, *catalogued)))


def _same_tokenizer(one: ModelShape, other: ModelShape) -> bool:
    return (one.architecture, one.vocab_size, one.mask_token_id) == (
        other.architecture,
        other.vocab_size,
        other.mask_token_id,
    )


def read_shape(folder: Path) -> ModelShape:
    """Shape by the folder's config files; :class:`ConfigError` when the folder or its config cannot be used."""
    if not folder.is_dir():
        message = f"{folder} is no folder; pass the folder that holds config.json and the .safetensors files"
        raise ConfigError(message)
    if not any(folder.iterdir()):
        message = f"{folder} is empty; pass the folder that holds config.json and the .safetensors files"
        raise ConfigError(message)
    shape = catalogue.from_config(folder, name=folder.resolve().name)
    return replace(shape, eos_token_ids=_end_tokens(folder, shape))


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Check a folder without loading it.

    Raises
    ------
    ConfigError
        Config, index, shards or tensors are missing, damaged or do not fit; the message has all of them.
    """
    folder = Path(folder)
    shape = read_shape(folder)
    stored = stored_tensors(folder)
    problems = tensor_problems(shape, stored)
    if problems:
        first = f"{folder}: the tensors do not fit config.json ({shape.architecture}, {shape.num_layers} layers):"
        raise ConfigError([first, *problems])
    return Checkpoint(folder, shape, needed_tensors(shape, stored))
