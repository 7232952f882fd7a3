"""Elements of KV: bf16, fp16 and fp32 as numpy carries them, with and without torch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from herald_pipeline.errors import ConfigError

DTYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
STORAGE: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
_TORCH_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
Array = npt.NDArray[Any]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Numpy dtype that carries a KV dtype: ``uint16`` for bf16, which numpy does not have."""
    return STORAGE[dtype]


def as_storage(value: Any, dtype: str, name: str) -> Array:
    """A torch tensor or numpy array as numpy in the storage dtype, without a copy; other dtypes are refused."""
    if hasattr(value, "detach"):  # torch, without importing it
        if value.device.type != "cpu":
            message = f"{name} is on {value.device}; the CPU kernels need host memory: pass {name}.cpu()"
            raise ConfigError(message)
        found = _TORCH_NAMES.get(str(value.dtype), str(value.dtype))
        if found == "bf16":
            import torch

            value = value.view(torch.uint16)
        array: Array = value.detach().numpy()
    else:
        array = np.asarray(value)
        names = {"uint16": "bf16", "float16": "fp16", "float32": "fp32"}
        found = names.get(array.dtype.name, array.dtype.name)
    if found != dtype:
        message = f"{name} must be {dtype}, got {found}; convert it first"
        raise ConfigError(message)
    return array


def to_float32(stored: Array, dtype: str) -> npt.NDArray[np.float32]:
    """Stored elements as fp32 (bf16 bits widened)."""
    if dtype == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def from_float32(values: Array, dtype: str) -> Array:
    """fp32 values rounded to nearest-even in a storage dtype; NaN stays NaN."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    if dtype != "bf16":
        with np.errstate(over="ignore"):
            return single.astype(STORAGE[dtype])
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)
