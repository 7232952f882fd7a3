"""Environment variables with our prefix: known ones by name, so that a misspelled one is refused, not ignored."""

import os
from collections.abc import Mapping

from herald_pipeline.errors import did_you_mean, raise_problems

PREFIX = "HERALD_"

KNOWN = {
    "HERALD_CPU": "instruction set of the CPU kernels: portable, avx2, avx512, avx512bf16 or amx",
    "HERALD_TUNING": "tuning of the CPU kernels by name: distance=8,streams=4 (herald_exec/kernels/tuning.py)",
}
"""Every variable that anything here reads, and what it does."""


def check_environment(environ: Mapping[str, str] | None = None) -> None:
    """Refuse every variable that has our prefix and no meaning; commands call this first."""
    present = os.environ if environ is None else environ
    raise_problems(
        f"environment variable {name} is not known{did_you_mean(name, KNOWN)}"
        for name in sorted(present)
        if name.startswith(PREFIX) and name not in KNOWN
    )
