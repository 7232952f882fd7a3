"""Which machine this is: names, counts and versions that a profile states, and whether a profile is of this machine."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from herald_exec import kernels
from herald_pipeline.errors import ConfigError, ProfileError
from herald_pipeline.hardware import Profile

_PACKAGES = ("torch", "numpy", "scipy", "herald")


@dataclass(frozen=True, slots=True)
class Host:
    """Facts of the machine on which this process runs."""

    cpu_name: str
    cores: int
    threads: int
    capability: str
    gpu_name: str = ""
    gpu_count: int = 0

    @property
    def slug(self) -> str:
        """A file name for this machine's profile."""
        parts = [self.gpu_name or "cpu-only", self.cpu_name, f"{self.cores}-cores"]
        return "_".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts if part)


def this_host(device: torch.device | str = "cpu") -> Host:
    """Facts of this machine; the GPU's only where ``device`` is one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cuda = torch.device(device).type == "cuda"
    return Host(
        cpu_name(),
        psutil.cpu_count(logical=False) or usable,
        usable,
        kernels.active_tier(),
        torch.cuda.get_device_name(device) if cuda else "",
        torch.cuda.device_count() if cuda else 0,
    )


def cpu_name() -> str:
    """The processor's name as the system states it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def software() -> str:
    """Versions that numbers depend on, as one line."""
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found.append(f"cuda {torch.version.cuda}")
    return ", ".join(found)


def pcie(text: str | None) -> tuple[int, int]:
    """Generation and lanes of the link: as given (``5x16``), or as the driver states them.

    Raises
    ------
    ConfigError
        Not of that form.
    ProfileError
        Not given, and no driver to ask.
    """
    if text is not None:
        match = re.fullmatch(r"([1-6])x(1|2|4|8|16)", text)
        if match is None:
            raise ConfigError(f"--pcie must be GENERATIONxLANES such as 5x16, got {text!r}")
        return int(match[1]), int(match[2])
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        fields = "pcie.link.gen.max,pcie.link.width.max"
        command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        match = re.match(r"\s*([1-6])\s*,\s*(\d+)", asked.stdout)
        if asked.returncode == 0 and match is not None:
            return int(match[1]), int(match[2])
    raise ProfileError("the link's generation and lanes are not known here; pass --pcie GENERATIONxLANES such as 5x16")


def check_same_machine(profile: Profile, host: Host) -> None:
    """Refuse to put runs of this machine beside predictions for another one.

    Raises
    ------
    ProfileError
        With what differs.
    """
    machine = profile.machine
    stated: Mapping[str, tuple[Any, Any]] = {
        "cpu": (machine.cpu.name, host.cpu_name),
        "cores": (machine.cpu.cores, host.cores),
        "gpu": ("" if machine.gpu.emulated else machine.gpu.name, host.gpu_name),
        "cpu kernels": (machine.cpu.capability, host.capability),
    }
    differing = [
        f"{what}: {theirs!r} there, {ours!r} here" for what, (theirs, ours) in stated.items() if theirs != ours
    ]
    if differing:
        raise ProfileError(
            f"profile {profile.name!r} is of another machine ({'; '.join(differing)}); its predictions say "
            "nothing about runs here. Measure this one: python -m calibration measure; or bring that machine's runs "
            "with --measured"
        )
