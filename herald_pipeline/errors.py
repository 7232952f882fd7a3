"""What can go wrong by a user's hand, said so that the user can mend it.

Every message states the rule, the value, where it stood, and what to do. Commands print the message and exit with
``exit_code``; a traceback is for our own mistakes only.
"""

import difflib
import math
from collections.abc import Iterable, Sequence

_LIKE, _HALF_LIKE = 0.6, 0.5
"""How alike (:mod:`difflib`) names are of which one is offered for the other; the second where both begin alike."""
_MAX_BITS = 64
"""Longer whole numbers are nobody's count of anything, and do not fit a float."""


class HeraldError(Exception):
    """Base of all errors that a user can cause; the message alone is shown."""

    exit_code = 1


class ConfigError(HeraldError):
    """A value, key or name that breaks a rule. Holds all problems found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class CapacityError(HeraldError):
    """What was asked for does not fit in memory; the message carries the budget as a table."""


class ProfileError(HeraldError):
    """A machine or engine profile lacks what the run needs, or holds what cannot be."""


class PipelineError(HeraldError):
    """A description in which something can be written while it is read, or a stage can wait for ever."""


class RunError(HeraldError):
    """A run that ended early; the cause is chained and what it had produced is marked partial."""


def read_failure(error: Exception) -> str:
    """Why a file could not be read, for people: the system's words without its number, or that it holds no text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[0].lower() + error.strerror[1:]
    if isinstance(error, UnicodeDecodeError):
        return "it holds no UTF-8 text"
    return str(error)


def did_you_mean(name: str, valid: Iterable[str], *, otherwise: str | None = None) -> str:
    """``"; did you mean 'x'?"`` for the closest valid name, else ``otherwise``, by default the list of all."""
    names = sorted(str(name) for name in valid)
    spelt = {valid_name.lower(): valid_name for valid_name in names}
    typed = name.lower()
    begin_alike = [known for known in spelt if known[:1] == typed[:1]]
    # "all" is no "ideal", which is half like it.
    close = difflib.get_close_matches(typed, spelt, n=1, cutoff=_LIKE)
    close = close or difflib.get_close_matches(typed, begin_alike, n=1, cutoff=_HALF_LIKE)
    if close:
        return f"; did you mean {spelt[close[0]]!r}?"
    return f"; valid: {', '.join(names)}" if otherwise is None else f"; {otherwise}"


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> ConfigError:
    """Error for a name that is not in a catalogue, with the closest one that is."""
    return ConfigError(f"unknown {kind} {name!r}{did_you_mean(name, valid)}")


def check_number(
    value: object,
    path: str,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    integer: bool = False,
) -> str | None:
    """Problem with a number at the border, or ``None``: not a number, NaN, infinite, out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{path} must be a number, got {value!r}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"{path} must be below 2^{_MAX_BITS}, got a number of {value.bit_length()} bits"
    if not math.isfinite(value):
        return f"{path} must be finite, got {value!r}"
    if integer and value != int(value):
        return f"{path} must be a whole number, got {value!r}"
    if above is not None and not value > above:
        return f"{path} must be > {above:.15g}, got {value!r}"
    if minimum is not None and value < minimum:
        return f"{path} must be >= {minimum:.15g}, got {value!r}"
    if maximum is not None and value > maximum:
        return f"{path} must be <= {maximum:.15g}, got {value!r}"
    return None


def raise_problems(problems: Iterable[str | None]) -> None:
    """Raise one :class:`ConfigError` with every problem, or return when there is none."""
    # Each once: rules that share a value find the same.
    found = list(dict.fromkeys(problem for problem in problems if problem))
    if found:
        raise ConfigError(found)
