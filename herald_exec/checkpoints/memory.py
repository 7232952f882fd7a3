"""Memory that a checkpoint needs and that a device can give, compared before anything is loaded."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from herald_exec.checkpoints.folder import Checkpoint
from herald_pipeline.errors import CapacityError, ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(name: str) -> torch.device:
    """Device by name (``cpu``, ``cuda``, ``cuda:1``); :class:`ConfigError` when this machine has none of it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        message = f"unknown device {name!r}; use cpu, cuda or cuda:N"
        raise ConfigError(message) from None
    if device.type not in ("cpu", "cuda"):
        message = f"device {name!r} is not supported; use cpu, cuda or cuda:N"
        raise ConfigError(message)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            message = f"device {name!r}: torch sees {count} CUDA devices here; use cpu, or a torch with CUDA"
            raise ConfigError(message)
    return device


def resolve_dtype(name: str | None) -> torch.dtype | None:
    """Type by name (``fp32``, ``bf16``, ``fp16``, or torch's names); ``None`` stays: the stored type."""
    short = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    known = short | {str(dtype).removeprefix("torch."): dtype for dtype in short.values()}
    if name is None:
        return None
    if name not in known:
        message = f"unknown dtype {name!r}; use {', '.join(short)}"
        raise ConfigError(message)
    return known[name]


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def available_bytes(device: torch.device, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that may still be taken on ``device``; ``None`` where only the kernel's guess is known.

    On the host that is what the control group leaves: the machine's total alone says nothing certain.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit, used = _read_limit(cgroup / "memory.max"), _read_limit(cgroup / "memory.current")
    if limit is None or used is None:
        return None
    # File pages that the kernel can drop do not count as taken.
    cached = _inactive_file_bytes(cgroup / "memory.stat")
    return max(0, limit - used + cached)


def total_host_bytes(cgroup: Path = _CGROUP) -> int:
    """Host memory of this machine, or what the control group allows of it: more than that can never be had."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_limit(cgroup / "memory.max")
    return installed if limit is None else min(installed, limit)


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of the loaded weights, the host bytes while loading, and what there is."""

    weight_bytes: int
    largest_shard_bytes: int
    available: int | None

    def problem(self, device: torch.device) -> str | None:
        """Why it does not fit, with the budget, or ``None``."""
        if self.available is None or self.weight_bytes <= self.available:
            return None
        return (
            f"the weights do not fit on {device}: {self.weight_bytes / 1e9:.2f} GB needed, "
            f"{self.available / 1e9:.2f} GB free; load in a narrower type (--dtype bf16) or use a larger device"
        )


def memory_need(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None = None) -> MemoryNeed:
    """What loading ``checkpoint`` onto ``device`` takes."""
    shards = {tensor.shard for tensor in checkpoint.tensors.values()}
    return MemoryNeed(
        weight_bytes=checkpoint.weight_bytes(dtype or checkpoint.stored_dtype),
        largest_shard_bytes=max(shard.stat().st_size for shard in shards),
        available=available_bytes(device),
    )


def require_memory(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raise :class:`CapacityError` if the weights cannot fit."""
    problem = memory_need(checkpoint, device, dtype).problem(device)
    if problem is not None:
        raise CapacityError(problem)
