"""Numbers with units and origins: single values, measured curves, and what a field expects of one."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Provenance(StrEnum):
    """Where a number comes from. The kinds are never mixed and are shown wherever a number is."""

    PUBLISHED = "published"
    """Printed by a paper, or following from one printed number by arithmetic that ``source`` states."""
    MEASURED = "measured"
    """Measured by ``command`` on the machine at ``date``."""
    FITTED = "fitted"
    """Chosen so that results agree with observations; ``pinned_by`` says which ones decide it."""
    DATASHEET = "datasheet"
    """Stated by the maker of the part or the program."""
    COUNTED = "counted"
    """Counted in a program's source or in a trace; ``source`` says where."""
    ASSUMED = "assumed"
    """Chosen with nothing that decides it, ``source`` says by what reasoning; or set with ``--set`` for one run."""


class Reading(NamedTuple):
    """A value read off a quantity, and whether it lies outside what was measured."""

    value: float
    extrapolated: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a quantity comes from.

    ``spread`` is the relative standard deviation, ``pinned_by`` the observations that decide a fitted number,
    ``same_as`` the field of the same section whose quantity stands in for one that nobody stated.
    """

    provenance: Provenance
    source: str = ""
    date: str = ""
    command: str = ""
    software: str = ""
    spread: float | None = None
    pinned_by: str = ""
    note: str = ""
    same_as: str = ""


@dataclass(frozen=True, slots=True)
class Number:
    """A single value."""

    value: float
    unit: str
    origin: Origin

    def at(self, _x: float) -> Reading:
        """The value, which depends on nothing."""
        return Reading(self.value)

    @property
    def peak(self) -> float:
        """The value; the counterpart of a curve's highest one."""
        return self.value

    @property
    def values(self) -> tuple[float, ...]:
        """All values held, for range checks."""
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured table: ``y`` in ``unit`` at ascending ``x`` in ``x_unit``, linear in log x between the points.

    Outside the table the nearest end stands, and the reading says that it is extrapolated.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    x_unit: str
    unit: str
    origin: Origin

    def at(self, x: float) -> Reading:
        """The value at ``x``."""
        if x <= self.x[0]:
            return Reading(self.y[0], x < self.x[0])
        if x >= self.x[-1]:
            return Reading(self.y[-1], x > self.x[-1])
        right = bisect_right(self.x, x)
        low, high = math.log(self.x[right - 1]), math.log(self.x[right])
        share = (math.log(x) - low) / (high - low)
        return Reading(self.y[right - 1] + share * (self.y[right] - self.y[right - 1]))

    @property
    def peak(self) -> float:
        """The highest value measured: the raw rate that a ceiling uses."""
        return max(self.y)

    @property
    def values(self) -> tuple[float, ...]:
        """All values held, for range checks."""
        return self.y


Quantity = Number | Curve


def known(quantity: Quantity | None) -> Quantity:
    """The quantity, once :meth:`Profile.check_complete` has found it there."""
    assert quantity is not None
    return quantity


class Spec(NamedTuple):
    """What a quantity's field expects: unit, who measures it, which ops need it.

    ``needed_for`` names op kinds and copy layouts (:class:`herald_pipeline.stages.OpKind`, ``Layout``); ``always``
    means every run, an empty tuple never: absent then has the meaning that the field's comment states.
    """

    unit: str
    measured_by: str
    needed_for: tuple[str, ...] = ("always",)
    maximum: float | None = None
    minimum: float | None = None


def quantity_field(
    unit: str, measured_by: str, *needed_for: str, optional: bool = False, minimum: float | None = None
) -> Any:
    """Field of a quantity, ``None`` until stated; a share (unit 1) cannot exceed 1 unless it counts passes."""
    needs = () if optional else (needed_for or ("always",))
    maximum = 1.0 if unit == "share" else None
    return field(default=None, metadata={"spec": Spec(unit, measured_by, needs, maximum, minimum)})
