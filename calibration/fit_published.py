"""Fit the engine's efficiencies to the HERALD paper's printed results, with the simulator itself as the model.

    python -m calibration.fit_published                      # all targets of the set `fit`
    python -m calibration.fit_published --only llada2-mini   # held-out: the other model's rows are predicted
    python -m calibration.fit_published --keep --leave-one-out  # each row predicted by the others
    python -m calibration.fit_published --write               # put the values into the profile's [fitted] table

Least squares on log(predicted / published), each weighted by its spread and, beyond :data:`LARGE`, by ever more: one
value that is far off is worse than several that are a little. Bounds keep shares within 0 and 1. What comes out is
reproduction of what went in; the held-out table is the honest part.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibration.leave_one_out import jacobian, leave_one_out
from herald_pipeline import hardware_io
from herald_pipeline.hardware import Engine, Number, Origin, Profile, Provenance, known, specs
from herald_sim.exhibits.targets import FIT, HARDWARE, Target, targets

FREE: dict[str, tuple[float, float]] = {
    "layer_overhead_us": (5.0, 400.0),
    "gemm_efficiency": (0.4, 0.9),
    "grouped_gemm_efficiency": (0.05, 0.9),
    "routed_token_share": (0.005, 1.0),
    "attention_efficiency": (0.3, 1.0),
    "sampler_passes": (1.0, 60.0),
    "streamed_copy_efficiency": (0.1, 1.0),
    "scattered_copy_efficiency": (0.01, 1.0),
    "select_dram_efficiency": (0.1, 1.0),
    "select_flops_efficiency": (0.1, 1.0),
}
"""Engine quantities that are fitted, with bounds. Weight reading and usable memory are set by hand."""
KERNELS = "retrieval_kernels_per_layer"
"""A count has no derivative: the values given are tried, the others fitted at each (44, 54 and 62 were)."""
LARGE, STEEPNESS = 0.085, 8
"""Error at which a value's square counts double, and the power with which its weight goes on from there."""


Report = Callable[[str], None]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class LeftOut:
    """Leave-one-out: the error of every target predicted from the others, and how far the values move.

    ``moved`` holds, for each fitted quantity, its largest relative change over these fits and the target that does it.
    """

    errors: dict[str, float]
    moved: dict[str, tuple[float, str]]

    def as_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "errors": {key: round(error, 4) for key, error in self.errors.items()},
            "moved": {name: {"by": round(change, 3), "without": key} for name, (change, key) in self.moved.items()},
        }


@dataclass(frozen=True)
class Fit:
    """Values found, their relative standard deviations, and the relative error of every target."""

    values: dict[str, float]
    spreads: dict[str, float]
    errors: dict[str, float]
    fitted: tuple[str, ...]
    chi2: float
    names: tuple[str, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    """Of the logarithms of the values in ``names``."""
    left_out: LeftOut | None = None

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded to what they mean."""
        found: dict[str, object] = {
            "values": {name: float(f"{value:.4g}") for name, value in self.values.items()},
            "spreads": {name: round(value, 3) for name, value in self.spreads.items()},
            "names": list(self.names),
            "covariance": [[float(f"{value:.3g}") for value in row] for row in self.covariance],
            "errors": {key: round(error, 4) for key, error in self.errors.items()},
            "fitted": list(self.fitted),
            "chi2": round(self.chi2, 2),
            "summary": self.summary(),
        }
        return found if self.left_out is None else {**found, "leave_one_out": self.left_out.as_dict()}

    def summary(self) -> str:
        """Mean and worst error of the targets fitted, of those held out, and of each left out in turn."""
        inside = [error for key, error in self.errors.items() if key in self.fitted]
        outside = [error for key, error in self.errors.items() if key not in self.fitted]
        text = f"fitted {_mean_and_worst(inside)}"
        if outside:
            text += f"; held out {_mean_and_worst(outside)}"
        if self.left_out is not None:
            text += f"; each left out in turn {_mean_and_worst(list(self.left_out.errors.values()))}"
        return text


def _mean_and_worst(errors: Sequence[float]) -> str:
    sizes = [100 * abs(error) for error in errors]
    return f"{len(sizes)}: mean {np.mean(sizes):.1f}%, worst {max(sizes):.1f}%"


@cache
def _paper_profile() -> Profile:
    return hardware_io.resolve(HARDWARE)


def profile_with(values: Mapping[str, float]) -> Profile:
    """The paper's profile with engine quantities replaced."""
    profile = _paper_profile()
    units = {name: spec.unit for name, spec in specs(Engine).items()}
    origin = Origin(Provenance.ASSUMED, source="a fit's trial")
    changed: dict[str, Any] = {name: Number(value, units[name], origin) for name, value in values.items()}
    return replace(profile, engine=replace(profile.engine, **changed))


class Problem:
    """Targets as a function of the logarithms of the free quantities; an evaluation is made once."""

    def __init__(self, chosen: Sequence[Target], kernels: int, report: Report) -> None:
        self.chosen = tuple(chosen)
        self.names = tuple(FREE)
        self.bounds = tuple(np.log([FREE[name][side] for name in self.names]) for side in (0, 1))
        self._kernels = kernels
        self.report = report
        self._spreads = np.array([target.spread for target in chosen])
        self._known: dict[bytes, Array] = {}

    def start(self, values: Mapping[str, float]) -> Array:
        """Where a fit begins: at ``values``, and at the profile's own for what they leave out."""
        engine = _paper_profile().engine
        found = np.log([values.get(name, known(getattr(engine, name)).peak) for name in self.names])
        return np.clip(found, self.bounds[0] + 1e-6, self.bounds[1] - 1e-6)

    def values(self, x: Array) -> dict[str, float]:
        """Engine quantities by name."""
        return {**dict(zip(self.names, np.exp(x).tolist(), strict=True)), KERNELS: self._kernels}

    def logs(self, x: Array) -> Array:
        """log(predicted / published) of every target."""
        key = x.tobytes()
        if key not in self._known:
            profile = profile_with(self.values(x))
            self._known[key] = np.array([np.log(t.predict(profile) / t.published) for t in self.chosen])
            self.report(f"chi2 {float(np.sum(self.residuals(x) ** 2)):.2f}")
        return self._known[key]

    def residuals(self, x: Array) -> Array:
        """Errors in units of each target's spread: their squares sum up to chi2."""
        found: Array = self.logs(x) / self._spreads
        return found

    def losses(self, x: Array) -> Array:
        """What a fit makes small: residuals, large errors weighted by more."""
        weights: Array = np.sqrt(1.0 + (np.abs(self.logs(x)) / LARGE) ** STEEPNESS)
        return self.residuals(x) * weights


# Sampler passes are counted in whole kernels: smaller steps would not move them.
_STEP = 0.02


def fit(
    chosen: Sequence[Target],
    kernels: int,
    *,
    start: Mapping[str, float] | None = None,
    keep: bool = False,
    left_out: bool = False,
    report: Report = lambda text: print(text, file=sys.stderr),
) -> Fit:
    """Least-squares fit to ``chosen`` targets at one count of kernels; all targets of the fit set are evaluated.

    ``start`` are values to begin at (default: the profile's), ``keep`` stays at them, for their covariance and errors;
    ``left_out`` adds leave-one-out.
    """
    problem = Problem(chosen, kernels, report)
    x = problem.start(start or {})
    if not keep:
        x = least_squares(
            problem.losses,
            x,
            bounds=problem.bounds,
            diff_step=_STEP / np.maximum(np.abs(x), 1.0),
            xtol=1e-3,
            ftol=1e-3,
            max_nfev=8,
        ).x
    slopes = jacobian(problem.residuals, x, _STEP)
    covariance = np.linalg.pinv(slopes.T @ slopes)
    values, at_solution = problem.values(x), problem.residuals(x)
    profile = profile_with(values)
    errors = {t.key: t.predict(profile) / t.published - 1 for t in targets() if t.set == FIT}
    return Fit(
        values,
        dict(zip(problem.names, np.sqrt(np.diag(covariance)).tolist(), strict=True)),
        errors,
        tuple(t.key for t in chosen),
        float(at_solution @ at_solution),
        problem.names,
        tuple(map(tuple, covariance.tolist())),
        _left_out(problem, x) if left_out else None,
    )


def _left_out(problem: Problem, x: Array) -> LeftOut:
    slopes = jacobian(problem.losses, x, _STEP)
    held = leave_one_out(problem.losses, x, slopes, (problem.bounds[0], problem.bounds[1]), problem.report)
    errors, moved = {}, dict.fromkeys(problem.names, (0.0, ""))
    for one in held:
        target = problem.chosen[one.observation]
        errors[target.key] = float(np.expm1(problem.logs(one.x)[one.observation]))
        for name, change in zip(problem.names, np.expm1(one.x - x).tolist(), strict=True):
            if abs(change) > abs(moved[name][0]):
                moved[name] = (change, target.key)
    return LeftOut(errors, moved)


def write(fit_: Fit, path: Path) -> None:
    """Put values and spreads into the profile's ``[fitted]`` table; everything else stays as it is."""
    text = path.read_text(encoding="utf-8")
    for name, value in fit_.values.items():
        head = f'[fitted."engines.sglang-paper.{name}"]\n'
        at = text.index(head) + len(head)
        end = text.find("\n[", at)
        body = text[at : end if end >= 0 else len(text)]
        body = re.sub(r"^value = .*$", f"value = {value:.4g}", body, flags=re.MULTILINE)
        if name not in fit_.spreads:
            text = text[:at] + body + (text[end:] if end >= 0 else "")
            continue
        spread = f"spread = {fit_.spreads[name]:.2g}"
        body = (
            re.sub(r"^spread = .*$", spread, body, flags=re.MULTILINE)
            if "spread =" in body
            else body.replace("pinned_by", f"{spread}\npinned_by", 1)
        )
        text = text[:at] + body + (text[end:] if end >= 0 else "")
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="fit targets of this model (llada2-mini) or context (32768) only")
    parser.add_argument("--without", help="leave out targets whose key begins with this text")
    parser.add_argument("--kernels", type=int, nargs="+", help=f"{KERNELS} to try [default: the profile's]")
    parser.add_argument(
        "--keep", action="store_true", help="fit nothing: errors and covariance of the profile's values"
    )
    parser.add_argument("--start", type=Path, help="begin at the values of an earlier --out [default: the profile's]")
    parser.add_argument("--leave-one-out", action="store_true", help="predict every target from a fit of the others")
    parser.add_argument("--write", action="store_true", help="write the values into the profile")
    parser.add_argument("--out", type=Path, help="write values, covariance and errors as JSON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [t for t in targets() if t.set == FIT]
    if options.only:
        chosen = [t for t in chosen if options.only in (t.model, str(t.context))]
    if options.without:
        chosen = [t for t in chosen if not t.key.startswith(options.without)]
    start = {} if options.start is None else json.loads(options.start.read_text(encoding="utf-8"))["values"]
    fits = [
        fit(chosen, count, start=start, keep=options.keep, left_out=options.leave_one_out)
        for count in options.kernels or [round(known(getattr(_paper_profile().engine, KERNELS)).peak)]
    ]
    found = min(fits, key=lambda one: one.chi2)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        for name, value in found.values.items():
            print(f"{name:32s} {value:10.4g} +- {100 * found.spreads.get(name, 0):.0f}%")
        alone = {} if found.left_out is None else found.left_out.errors
        for key, error in found.errors.items():
            text = f"{key:55s} {100 * error:+6.1f}%" + ("" if key in found.fitted else "  held out")
            print(text + (f"  left out {100 * alone[key]:+6.1f}%" if key in alone else ""))
        print(found.summary())
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(found, hardware_io.profile_dir() / f"{HARDWARE}.toml")


if __name__ == "__main__":
    main()
