"""Scores of answers: exact, and the share of what an answer had to contain.

Wordings are free, so an answer is right when it contains every field; a recited passage must be the whole answer. The
partial score separates selection rules better than exact match does when samples are few: report both.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from herald_exec.reference.facts import Question
from herald_exec.reference.tasks import Sample


class Score(NamedTuple):
    """``exact`` 0 or 1; ``partial`` in [0, 1]."""

    exact: float
    partial: float


class Interval(NamedTuple):
    """A proportion with its 95% Wilson interval."""

    value: float
    low: float
    high: float


def _normal(text: str) -> str:
    return " ".join(text.split())


def _contains(answer: str, wanted: str) -> bool:
    """Whether ``wanted`` stands in ``answer``, not inside a longer number or word."""
    start = answer.find(wanted)
    while start >= 0:
        before, after = answer[start - 1 : start], answer[start + len(wanted) : start + len(wanted) + 1]
        inside = (before.isalnum() and wanted[0].isalnum()) or (after.isalnum() and wanted[-1].isalnum())
        if not inside:
            return True
        start = answer.find(wanted, start + 1)
    return False


def _matching_words(answer: str, wanted: str) -> float:
    """Share of the passage's words that stand at their place, counted from the front."""
    said, asked = answer.split(), wanted.split()
    return sum(a == b for a, b in zip(said, asked, strict=False)) / len(asked)


def score_answer(task: str, fields: Sequence[str], answer: str) -> Score:
    """Score of the decoded text of an answer, cut at its end token."""
    said = _normal(answer)
    if task == "rec":
        wanted = _normal(fields[0])
        return Score(float(said == wanted), _matching_words(said, wanted))
    found = [_contains(said, _normal(wanted)) for wanted in fields]
    return Score(float(all(found)), sum(found) / len(found))


def score_sample(sample: Sample | Question, answer: str) -> Score:
    """:func:`score_answer` with a sample's own task and fields."""
    return score_answer(sample.task, sample.fields, answer)


def wilson_interval(successes: float, trials: int) -> Interval:
    """95% interval of a proportion; unlike the normal one it is right near 0 and 1.

    ``successes`` may be a sum of partial scores, for which the interval is conservative.
    """
    if trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = 1.959964
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # The bounds are exact at 0 and 1; rounding must not move them past the value.
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))
