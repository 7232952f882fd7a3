"""Does a folder hold the model that its config describes: names, shapes and types, compared without loading."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from herald_exec.checkpoints.naming import IGNORED, head_name, named_views, naming_of
from herald_exec.checkpoints.shards import BYTES_PER_ELEMENT, StoredTensor
from herald_exec.models.weights import empty_weights
from herald_pipeline.model import ModelShape

_NUMBER = re.compile(r"\.\d+\.")


def uses_merged_experts(names: Iterable[str]) -> bool:
    """Whether the experts of a layer are stored as three tensors instead of three per expert."""
    return any(name.endswith("experts.gate_proj") for name in names)


def expected_shapes(shape: ModelShape, *, merged_experts: bool) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of a model, without memory."""
    weights = empty_weights(shape, "meta", torch.bfloat16)
    views = named_views(shape, weights, merged_experts=merged_experts)
    return {name: tuple(view.shape) for name, view in views.items()}


def needed_tensors(shape: ModelShape, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Stored tensors without those that no forward needs (rotary tables, value heads, a tied head's copy)."""
    skip = {head_name(naming_of(shape))} if shape.tied_embeddings else set()
    return {
        name: tensor
        for name, tensor in stored.items()
        if name not in skip and not any(part in name for part in IGNORED)
    }


def _grouped(entries: Iterable[tuple[str, str]]) -> list[str]:
    """Lines ``name (text)``, with names that differ only in layer or expert numbers joined to one line."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in entries:
        # Twice, because neighbouring numbers share a dot.
        pattern = _NUMBER.sub(".*.", _NUMBER.sub(".*.", name))
        groups[pattern, text].append(name)
    lines = []
    for (pattern, text), names in groups.items():
        many = f"{pattern}: {len(names)} tensors, first {names[0]}"
        lines.append((names[0] if len(names) == 1 else many) + text)
    return lines


def tensor_problems(shape: ModelShape, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Every missing, unexpected, mis-shaped or unsupported tensor, one line per kind and name pattern."""
    needed = needed_tensors(shape, stored)
    expected = expected_shapes(shape, merged_experts=uses_merged_experts(needed))
    missing = ((name, f" {list(size)}") for name, size in expected.items() if name not in needed)
    unexpected = ((name, "") for name in needed if name not in expected)
    misshaped = (
        (name, f": {list(needed[name].shape)} stored, {list(size)} by config.json")
        for name, size in expected.items()
        if name in needed and needed[name].shape != size
    )
    unsupported = (
        (name, f": stored as {tensor.dtype}, supported are {', '.join(BYTES_PER_ELEMENT)}")
        for name, tensor in needed.items()
        if tensor.dtype not in BYTES_PER_ELEMENT
    )
    return [
        *(f"missing tensor {line}" for line in _grouped(missing)),
        *(f"unexpected tensor {line}" for line in _grouped(unexpected)),
        *(f"mis-shaped tensor {line}" for line in _grouped(misshaped)),
        *(f"unsupported type {line}" for line in _grouped(unsupported)),
    ]
