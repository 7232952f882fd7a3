"""Fit the engine's efficiencies to the HERALD paper's printed results, with the simulator itself as the model.

    python -m calibration.fit_published                      # all targets of the set `fit`
    python -m calibration.fit_published --only llada2-mini   # held-out: the other model's rows are predicted
    python -m calibration.fit_published --write               # put the values into the profile's [fitted] table

Least squares on log(predicted / published), each weighted by its spread. Bounds keep shares within 0 and 1. What comes
out is reproduction of what went in; the held-out table is the honest part.
"""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from herald_pipeline import hardware_io
from herald_pipeline.hardware import Profile, known
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
"""A count has no derivative: some values are tried, the others fitted at each."""


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

    def as_dict(self) -> dict[str, object]:
        """Plain values, rounded to what they mean."""
        return {
            "values": {name: float(f"{value:.4g}") for name, value in self.values.items()},
            "spreads": {name: round(value, 3) for name, value in self.spreads.items()},
            "names": list(self.names),
            "covariance": [[float(f"{value:.3g}") for value in row] for row in self.covariance],
            "errors": {key: round(error, 4) for key, error in self.errors.items()},
            "fitted": list(self.fitted),
            "chi2": round(self.chi2, 2),
            "summary": self.summary(),
        }

    def summary(self) -> str:
        """Mean and worst error of the targets fitted and of those held out."""
        inside = [abs(error) for key, error in self.errors.items() if key in self.fitted]
        outside = [abs(error) for key, error in self.errors.items() if key not in self.fitted]
        text = f"fitted {len(inside)}: mean {100 * np.mean(inside):.1f}%, worst {100 * max(inside):.1f}%"
        if outside:
            text += f"; held out {len(outside)}: mean {100 * np.mean(outside):.1f}%, worst {100 * max(outside):.1f}%"
        return text


def profile_with(values: dict[str, float]) -> Profile:
    """The paper's profile with engine quantities replaced."""
    return hardware_io.resolve(HARDWARE, None, [f"engine.{name}={value!r}" for name, value in values.items()])


def fit(chosen: Sequence[Target], kernels: int, *, keep: bool = False, report: Callable[[str], None] = print) -> Fit:
    """Least-squares fit to ``chosen`` targets at one count of kernels; all targets of the fit set are evaluated."""
    # ``keep``: the profile's own values, for their covariance and errors.
    free = tuple(FREE)
    engine = profile_with({}).engine
    start = {name: known(getattr(engine, name)).peak for name in free}
    low, high = (np.log([FREE[name][side] for name in free]) for side in (0, 1))
    x0 = np.clip(np.log([start[name] for name in free]), low + 1e-6, high - 1e-6)

    def residuals(x: np.ndarray) -> np.ndarray:
        profile = profile_with({**dict(zip(free, np.exp(x).tolist(), strict=True)), KERNELS: kernels})
        found = np.array([np.log(t.predict(profile) / t.published) / t.spread for t in chosen])
        report(f"chi2 {float(found @ found):.2f}")
        return found

    # Steps of 2%: sampler passes are counted in whole kernels, smaller steps would not move them.
    solved = least_squares(
        residuals,
        x0,
        bounds=(low, high),
        diff_step=0.02 / np.maximum(np.abs(x0), 1.0),
        xtol=1e-3,
        ftol=1e-3,
        max_nfev=1 if keep else 8,
    )
    values = dict(zip(free, np.exp(solved.x).tolist(), strict=True))
    covariance = np.linalg.pinv(solved.jac.T @ solved.jac)
    spreads = dict(zip(free, np.sqrt(np.diag(covariance)).tolist(), strict=True))
    values[KERNELS] = kernels
    profile = profile_with(values)
    errors = {t.key: t.predict(profile) / t.published - 1 for t in targets() if t.set == FIT}
    return Fit(
        values,
        spreads,
        errors,
        tuple(t.key for t in chosen),
        2 * float(solved.cost),
        free,
        tuple(map(tuple, covariance.tolist())),
    )


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
    parser.add_argument("--kernels", type=int, nargs="+", default=[16, 24, 32, 40, 48, 64], help=f"{KERNELS} to try")
    parser.add_argument(
        "--keep", action="store_true", help="fit nothing: errors and covariance of the profile's values"
    )
    parser.add_argument("--write", action="store_true", help="write the values into the profile")
    parser.add_argument("--out", type=Path, help="write values, covariance and errors as JSON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [t for t in targets() if t.set == FIT]
    if options.only:
        chosen = [t for t in chosen if options.only in (t.model, str(t.context))]
    if options.without:
        chosen = [t for t in chosen if not t.key.startswith(options.without)]
    silent: Callable[[str], None] = lambda _: None  # noqa: E731 - one line, one use
    report = silent if options.json else print
    fits = [fit(chosen, count, keep=options.keep, report=report) for count in options.kernels]
    found = min(fits, key=lambda one: one.chi2)
    if options.json:
        print(json.dumps(found.as_dict()))
    else:
        for name, value in found.values.items():
            print(f"{name:32s} {value:10.4g} +- {100 * found.spreads.get(name, 0):.0f}%")
        for key, error in found.errors.items():
            print(f"{key:55s} {100 * error:+6.1f}%" + ("" if key in found.fitted else "  held out"))
        print(found.summary())
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found.as_dict(), indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(found, hardware_io.profile_dir() / f"{HARDWARE}.toml")


if __name__ == "__main__":
    main()
