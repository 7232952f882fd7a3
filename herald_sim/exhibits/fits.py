"""How honest the fit is: errors of values that it saw and of values that it did not, and how far its numbers are known.

``hw_profiles/fits/PROFILE.NAME.json`` is what ``python -m calibration.fit_published --out`` wrote.
"""

from collections.abc import Collection, Mapping
from math import sqrt
from typing import Any

from herald_pipeline.errors import ProfileError
from herald_pipeline.hardware import Profile
from herald_sim.exhibits.targets import FIT, HELD_OUT, targets
from herald_sim.fit_files import ALL, files, read

LEAVE_ONE_OUT = "leave-one-out"
_IDENTIFIED = 0.1
"""Relative standard deviation, and change by one observation, up to which a number counts as identified."""


def rows(profile: Profile) -> list[dict[str, Any]]:
    """One row a fit and value: printed, predicted, error, and whether that fit saw it.

    ``leave-one-out``: each value predicted by a fit of all the others.
    """
    printed = {target.key: target.published for target in targets()}
    found = []
    for name, path in files(profile).items():
        fit = read(path)
        found += _rows(name, printed, fit["errors"], fit["fitted"])
        if "leave_one_out" in fit:
            found += _rows(LEAVE_ONE_OUT, printed, fit["leave_one_out"]["errors"], ())
    return found


def _rows(
    fit: str, printed: Mapping[str, float], errors: Mapping[str, float], seen: Collection[str]
) -> list[dict[str, Any]]:
    return [
        {
            "fit": fit,
            "name": key,
            "published": printed[key],
            "value": printed[key] * (1 + error),
            "error": error,
            "set": FIT if key in seen else HELD_OUT,
        }
        for key, error in errors.items()
        if key in printed
    ]


def identified(profile: Profile) -> list[dict[str, Any]]:
    """One row a number that was fitted by least squares: how far the observations decide it.

    ``spread`` is the relative standard deviation of the fit; ``moved`` the largest change when one printed value is
    left out, ``without`` which one; ``trades_with`` the number whose error is most like its own. ``identified`` says
    whether spread and change stay within a tenth: where they do not, the number is one of several that would do, and
    only what is predicted from all of them together means something.
    """
    path = files(profile).get(ALL)
    if path is None:
        message = (
            f"no fit stands beside profile {profile.name!r}: `python -m calibration.fit_published --out` writes one"
        )
        raise ProfileError(message)
    fit = read(path)
    names = fit["names"]
    moved = fit.get("leave_one_out", {}).get("moved", {})
    found = []
    for at, name in enumerate(names):
        spread = fit["spreads"][name]
        other, correlation = _closest(fit["covariance"], at)
        change = moved.get(name, {"by": None, "without": ""})
        found.append(
            {
                "number": name,
                "value": fit["values"][name],
                "spread": spread,
                "moved": change["by"],
                "without": change["without"],
                "trades_with": f"{names[other]} ({correlation:+.2f})",
                "identified": spread <= _IDENTIFIED and abs(change["by"] or 0.0) <= _IDENTIFIED,
            }
        )
    return found


def _closest(covariance: list[list[float]], at: int) -> tuple[int, float]:
    """The other number whose error correlates most with that of number ``at``."""
    others = [other for other in range(len(covariance)) if other != at]
    correlations = {
        other: covariance[at][other] / sqrt(covariance[at][at] * covariance[other][other]) for other in others
    }
    other = max(others, key=lambda one: abs(correlations[one]))
    return other, correlations[other]
