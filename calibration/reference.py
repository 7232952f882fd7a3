"""A fixed piece of work whose time says how fast the machine is at this moment.

Shared machines change by tens of percent within minutes. The reference is timed with the profile and again beside every
run that is compared with it; the ratio is the **drift**, reported beside every error and used where asked for.
"""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from calibration.bench import Part, pinned, row_of
from calibration.timing import HostClock, Timing, Work
from herald_exec.attention import attend_partial
from herald_pipeline.errors import ProfileError

NAME = "reference"
_SIZE, _ROWS, _MATRICES = 768, 32, 24
_HEADS, _KEYS, _DIM = 12, 1024, 64


def reference_work(device: torch.device | str = "cpu") -> Work:
    """What a step is made of, at a fixed size: 24 products of 32 rows with 768 x 768, and attention to 1024 keys.

    Its 57 MB of weights are more than the inner caches hold, as a model's are.
    """
    x = torch.ones(_ROWS, _SIZE, device=device)
    weights = [torch.ones(_SIZE, _SIZE, device=device) / _SIZE for _ in range(_MATRICES)]
    q = torch.ones(1, _ROWS, _HEADS, _DIM, device=device)
    k = torch.ones(1, _HEADS // 3, _KEYS, _DIM, device=device)

    cuda = torch.device(device).type == "cuda"

    def run() -> None:
        y = x
        for weight in weights:
            y = y @ weight
        for _ in range(2):
            attend_partial(q, k, k)
        if cuda:
            torch.cuda.synchronize(device)

    return run


def reference_part(seconds: Sequence[float]) -> Part:
    """The reference's times, taken between the parts of a measurement, as a part without quantities."""
    return Part(NAME, [], [row_of(Timing(NAME, tuple(seconds), 1), case=NAME)])


def reference_seconds(
    device: torch.device | str, cores: tuple[int, ...], least_s: float = 0.15, *, steady: bool = False
) -> float:
    """Time of the reference over ``least_s`` from now on, on ``cores``.

    Beside a run it is a mean, because the time that other programs take from it they take from the run as well. Beside
    the parts of a measurement it is a median (``steady``), because theirs are medians.
    """
    work = reference_work(device)
    clock = HostClock()
    with pinned(cores), torch.inference_mode():
        once = clock.seconds(work, 1)
        times = max(3, round(least_s / max(once, 1e-6)))
        samples = [clock.seconds(work, 1) for _ in range(times)]
    return statistics.median(samples) if steady else statistics.fmean(samples)


class Reference(NamedTuple):
    """The reference's time when a profile was measured, and its relative standard deviation meanwhile."""

    seconds: float
    spread: float


def read_reference(raw: Path) -> Reference | None:
    """The reference beside a profile; ``None`` where its raw tables are not there.

    Raises
    ------
    ProfileError
        The table is there and cannot be read.
    """
    file = raw / f"{NAME}.csv"
    if not file.is_file():
        return None
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            row = next(csv.DictReader(lines))
            return Reference(float(row["seconds"]), float(row["spread"]))
    except (StopIteration, KeyError, ValueError) as problem:
        raise ProfileError(f"{file} has no time of the reference ({problem}); measure the machine again") from None
