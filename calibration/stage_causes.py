"""What the errors of a stage kind come from, in words: read off the numbers, not known beforehand.

The order of the questions is the order in which causes rule each other out: runs that differ among themselves more than
prediction and measurement do, a few launches that wait, a fixed cost that is off by about the same time everywhere, and
a rate that is off by about the same factor everywhere.
"""

import statistics
from dataclasses import dataclass

_LONG_TAIL = 1.5
"""Mean over median of launches from which some of them have waited for something else."""
_ALIKE = 0.5
"""Errors vary by less than this share of themselves: one cause for all points."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A stage kind at all held-out points: signed errors, measured times in seconds, spread between runs, tail."""

    errors: tuple[float, ...]
    measured: tuple[float, ...]
    spread: float | None = None
    tail: float | None = None


def cause(evidence: Evidence, bar: float) -> str:
    """One sentence."""
    worst = max(abs(error) for error in evidence.errors)
    tail = _tail(evidence)
    if worst <= bar:
        return f"every point within {bar:.0%}{tail}"
    median = abs(statistics.median(evidence.errors))
    if evidence.spread is not None and evidence.spread >= median:
        return f"runs of one point differ by {evidence.spread:.0%} themselves{tail}"
    times = [error * seconds for error, seconds in zip(evidence.errors, evidence.measured, strict=True)]
    if _alike(evidence.errors) and not _more_alike(times, evidence.errors):
        return f"off by a factor of about {1 + statistics.median(evidence.errors):.2f} everywhere: a rate{tail}"
    if _alike(times):
        return f"off by about {statistics.median(times) * 1e6:+,.0f} us a launch everywhere: a fixed cost{tail}"
    return f"no one rate or fixed cost: grows otherwise with requests and context than described{tail}"


def _tail(evidence: Evidence) -> str:
    if evidence.tail is None or evidence.tail < _LONG_TAIL:
        return ""
    return (
        f"; some launches wait (mean {evidence.tail:.1f} times the median): for the interpreter or for other programs"
    )


def _variation(values: tuple[float, ...] | list[float]) -> float:
    middle = abs(statistics.median(values))
    return max(abs(value - statistics.median(values)) for value in values) / middle if middle else float("inf")


def _alike(values: tuple[float, ...] | list[float]) -> bool:
    return _variation(values) <= _ALIKE


def _more_alike(one: list[float], other: tuple[float, ...]) -> bool:
    return _variation(one) < _variation(other)
