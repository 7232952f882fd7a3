"""What this process has: variables with our prefix, known by name so that a misspelled one is refused, and cores."""

import os
from collections.abc import Mapping

from herald_pipeline.errors import check_number, did_you_mean, raise_problems

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


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_problem(threads: int | None, name: str = "threads") -> str | None:
    """Problem with a number of threads: below 1, or more than there are cores; ``None`` is all.

    Threads beyond the cores take turns on them: a measurement with more says nothing of a machine that has them.
    """
    if threads is None:
        return None
    cores = usable_cores()
    problem = check_number(threads, name, minimum=1, integer=True)
    if problem is None and threads > cores:
        problem = f"{name} must be <= {cores}, the cores that this process may use, got {threads}; leave it out for all"
    return problem
