"""Timing that a profile can trust: warm-up, interleaved samples, median and spread, refusal where they disagree.

The **median** is stored, never the mean: one slow first sample would poison it. The **spread** is the relative standard
deviation that the middle half of the samples implies (interquartile range / 1.349 / median): a single disturbed sample
leaves it alone, every third one does not. Samples of several cases are taken in turn, so that a machine that grows
slower while it is measured slows all of them alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from herald_pipeline.errors import ProfileError, check_number, raise_problems
from herald_pipeline.units import NS_PER_S, format_ns

Work = Callable[[], object]

_IQR_OF_NORMAL = 1.349
"""Interquartile range of a normal distribution with standard deviation 1."""
MIN_REPEATS = 6
"""Fewest samples from which a disturbance of every third one can be seen."""


class Clock(Protocol):
    """Something that tells how long work takes."""

    def seconds(self, work: Work, times: int) -> float:
        """Seconds of ``times`` calls of ``work`` in a row."""


@dataclass(frozen=True, slots=True)
class HostClock:
    """The host's monotonic clock; ``now_ns`` is injected by tests."""

    now_ns: Callable[[], int] = time.perf_counter_ns

    def seconds(self, work: Work, times: int) -> float:
        """Seconds of ``times`` calls of ``work`` in a row."""
        start = self.now_ns()
        for _ in range(times):
            work()
        return (self.now_ns() - start) / NS_PER_S


class CudaClock:
    """Events on the current stream of a CUDA device.

    What is measured is time on the device; a launch from the host counts only where the device waits for it.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device

    def seconds(self, work: Work, times: int) -> float:
        """Seconds between two events around ``times`` calls of ``work``."""
        cuda = self._torch.cuda
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            work()
        stop.record()
        cuda.synchronize(self._device)
        return float(start.elapsed_time(stop)) / 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """How a case is timed.

    Attributes
    ----------
    warmup
        Samples thrown away before the first that counts.
    repeats
        Samples that count.
    more
        Further rounds of ``repeats`` samples while the spread is too large; the newest round counts.
    sample_s
        Least duration of a sample: short work is repeated within it.
    max_spread
        Largest spread that is accepted.
    """

    warmup: int = 3
    repeats: int = 9
    more: int = 3
    sample_s: float = 0.004
    max_spread: float = 0.25

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.warmup, "warmup", minimum=1, integer=True),
                check_number(self.repeats, "repeats", minimum=MIN_REPEATS, integer=True),
                check_number(self.more, "more", minimum=0, integer=True),
                check_number(self.sample_s, "sample_s", minimum=0),
                check_number(self.max_spread, "max_spread", above=0),
            ]
        )


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one case, in seconds of one call, after ``warmup`` that were thrown away.

    ``disturbed`` counts samples of earlier rounds that did not agree.
    """

    name: str
    samples: tuple[float, ...]
    warmup: int
    disturbed: int = 0

    @property
    def seconds(self) -> float:
        """Median."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Relative standard deviation that the middle half of the samples implies."""
        return spread(self.samples)

    def check(self, max_spread: float) -> None:
        """Raise unless the samples agree.

        Raises
        ------
        ProfileError
            With the samples, so that one sees what disturbs.
        """
        if self.seconds <= 0:
            raise ProfileError(f"{self.name}: took {self.seconds} s, too short for the clock; make the work larger")
        if self.spread > max_spread:
            shown = ", ".join(format_ns(sample * NS_PER_S) for sample in self.samples)
            raise ProfileError(
                f"{self.name}: spread {self.spread:.0%} of the median {format_ns(self.seconds * NS_PER_S)} is above "
                f"{max_spread:.0%}; samples: {shown}. Stop what else runs on this machine and measure again, or accept "
                "more with --max-spread"
            )


def spread(samples: tuple[float, ...]) -> float:
    """Relative standard deviation that the middle half of the samples implies; 0 for a single one."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / _IQR_OF_NORMAL / middle if middle > 0 else 0.0


def interleaved(cases: Mapping[str, Work], plan: Plan, clock: Clock) -> dict[str, Timing]:
    """Time every case, one sample of each in turn; refuse those whose samples disagree to the end.

    Cases whose spread is too large are sampled anew, up to ``plan.more`` times, before they are refused: a disturbance
    that passes costs time, not truth.

    Raises
    ------
    ProfileError
        For the first case that is refused; the samples are shown.
    """
    counts = {name: _warm_up(work, plan, clock) for name, work in cases.items()}
    samples: dict[str, list[float]] = {}
    disturbed = dict.fromkeys(cases, 0)
    wanted = list(cases)
    for _ in range(1 + plan.more):
        for name in wanted:
            disturbed[name] += len(samples.get(name, ()))
            samples[name] = []
        for _ in range(plan.repeats):
            for name in wanted:
                samples[name].append(clock.seconds(cases[name], counts[name]) / counts[name])
        wanted = [name for name in wanted if spread(tuple(samples[name])) > plan.max_spread]
        if not wanted:
            break
    timings = {name: Timing(name, tuple(samples[name]), plan.warmup, disturbed[name]) for name in cases}
    for timing in timings.values():
        timing.check(plan.max_spread)
    return timings


def time_one(name: str, work: Work, plan: Plan, clock: Clock) -> Timing:
    """:func:`interleaved` for a single case."""
    return interleaved({name: work}, plan, clock)[name]


def _warm_up(work: Work, plan: Plan, clock: Clock) -> int:
    """Run the thrown-away samples; how many calls make a sample long enough for the clock."""
    last = min(clock.seconds(work, 1) for _ in range(plan.warmup))
    if last <= 0:
        return 1000 if plan.sample_s else 1
    return max(1, min(1000, round(plan.sample_s / last)))
