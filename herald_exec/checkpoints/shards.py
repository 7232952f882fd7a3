"""The tensors of a folder of safetensors shards: where each lies, its shape and type, read from headers only.

A shard is memory-mapped while it is read and released before the next one, so that the host holds at most one
shard's pages beyond the model itself.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from herald_pipeline.errors import ConfigError, read_failure

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt")

BYTES_PER_ELEMENT = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""The types that a model may be stored in; quantised formats need scales that we do not apply."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a shard's header describes it; ``dtype`` in safetensors' spelling, such as ``BF16``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    shard: Path

    @property
    def nbytes(self) -> int:
        """Bytes in the file; 0 for a type that is not supported."""
        count = 1
        for size in self.shape:
            count *= size
        return count * BYTES_PER_ELEMENT.get(self.dtype, 0)


def _read_header(shard: Path) -> dict[str, StoredTensor]:
    with safe_open(shard, framework="pt") as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            part = file.get_slice(name)
            found[name] = StoredTensor(name, tuple(part.get_shape()), part.get_dtype(), shard)
        return found


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Shard of each tensor by the index, or ``None`` when the folder has no index."""
    index = folder / INDEX_FILE
    if not index.exists():
        return None
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
    except (OSError, ValueError) as error:
        message = f"{index} is not readable as JSON: {read_failure(error)}; download the file again"
        raise ConfigError(message) from None
    except (KeyError, TypeError) as error:
        message = f"{index} holds no weight_map ({error!r}); download the file again"
        raise ConfigError(message) from None
    if not isinstance(weight_map, dict) or not weight_map:
        message = f"{index}: weight_map is empty or no object; download the file again"
        raise ConfigError(message)
    return weight_map


def _shards(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    if weight_map is not None:
        return [folder / name for name in sorted(set(weight_map.values()))]
    single = folder / SINGLE_FILE
    found = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not found:
        other = sorted(path.name for pattern in OTHER_FORMATS for path in folder.glob(pattern))
        hint = f"it has {', '.join(other[:3])}: convert to safetensors first" if other else "it holds no weights at all"
        message = f"{folder} has neither {INDEX_FILE} nor a .safetensors file; {hint}"
        raise ConfigError(message)
    return found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder; :class:`ConfigError` with all shards that are missing or cannot be read."""
    weight_map = _weight_map(folder)
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for shard in _shards(folder, weight_map):
        expected = sum(name == shard.name for name in (weight_map or {}).values())
        if not shard.exists():
            problems.append(f"{shard} is missing ({expected} tensors by {INDEX_FILE}); download it again")
            continue
        try:
            header = _read_header(shard)
        except (SafetensorError, OSError) as error:
            problems.append(
                f"{shard} is damaged or cut short ({shard.stat().st_size:,} bytes: {read_failure(error)}); "
                "download it again"
            )
            continue
        absent = [name for name, where in (weight_map or {}).items() if where == shard.name and name not in header]
        if absent:
            problems.append(f"{shard} lacks {len(absent)} tensors that {INDEX_FILE} promises, first {absent[0]}")
        tensors |= header
    if problems:
        raise ConfigError(problems)
    return tensors


def read_shard(shard: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one shard, one at a time, as views of the mapped file: copy them before taking the next."""
    with safe_open(shard, framework="pt") as file:
        for name in names:
            yield name, file.get_tensor(name)
