"""Checkpoints in a family's published naming, sharded, with index and config: for tests, trials and our own models."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from herald_exec.checkpoints.config import to_config
from herald_exec.checkpoints.naming import named_views
from herald_exec.checkpoints.shards import INDEX_FILE, SINGLE_FILE
from herald_exec.models.weights import ModelWeights
from herald_pipeline.model import ModelShape

SHARD_BYTES = 4_000_000_000
"""Largest shard by default; a single larger tensor gets a shard of its own."""


def plan_shards(sizes: Iterable[tuple[str, int]], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut where the next tensor would exceed ``shard_bytes``."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes:
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def write_checkpoint(
    folder: Path | str,
    shape: ModelShape,
    weights: ModelWeights,
    *,
    shard_bytes: int = SHARD_BYTES,
    merged_experts: bool = False,
) -> Path:
    """Write ``config.json`` and the weights in their present types; the host holds one shard at a time.

    Parameters
    ----------
    folder
        Made if it does not exist.
    shard_bytes
        Largest shard; with more than one shard an index is written.
    merged_experts
        Experts as three tensors a layer instead of three per expert.

    Returns
    -------
    Path
        ``folder``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    views = named_views(shape, weights, merged_experts=merged_experts)
    shards = plan_shards(((name, view.nbytes) for name, view in views.items()), shard_bytes)
    dtype = str(weights.embedding.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(to_config(shape, dtype), indent=2) + "\n", encoding="utf-8")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, {name: views[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(view.nbytes for view in views.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return folder


def _write_shard(path: Path, views: dict[str, Tensor]) -> None:
    # Views of joined tensors share storage, which safetensors refuses: each is written as its own tensor.
    own = {name: view.to("cpu", copy=True, memory_format=torch.contiguous_format) for name, view in views.items()}
    save_file(own, path, metadata={"format": "pt"})
