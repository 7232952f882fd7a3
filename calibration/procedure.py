"""The commands ``fit`` and ``reconcile`` as procedures: files in, files out."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibration import parts, profile_file
from calibration.cells import read_cells
from calibration.fit import Fit, fit, fitted_tables
from calibration.host import check_same_machine, this_host
from calibration.measure import Request, measure
from calibration.points import FIT, Point, check_held_out, default_points
from calibration.reconcile import Calibration, predictor, reconcile
from calibration.reference import Reference, read_reference
from calibration.report import Report
from calibration.runs import Sample, file_name, measure_points, read_samples, row_of_sample
from calibration.timing import Plan
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.hardware import Profile
from herald_pipeline.model import ModelShape
from herald_pipeline.workload import DEFAULT_GEN_TOKENS
from herald_sim.cost import needs
from herald_sim.simulate import simulate

Say = Callable[[str], None]


def _stderr(line: str) -> None:
    print(line, file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What ``reconcile`` found: the report, and the fit where there was a training set."""

    report: Report
    fit: Fit | None


def check_profile(profile: Profile, points: Sequence[Point], shape: ModelShape) -> None:
    """Refuse a profile that lacks a number which any point will read, before the slow part begins (U06)."""
    wanted = frozenset(need for point in points for need in needs(point.pipeline(shape)))
    profile.check_complete(wanted, hardware_io.complete_names(wanted))


def reference_of(profile: Path) -> Reference | None:
    """The reference when a profile (or the one that it was fitted from) was measured."""
    return read_reference(profile_file.raw_folder(profile))


def fit_file(
    hardware: Path, shape: ModelShape, measured: Path, names: Sequence[str], out: Path, command: str, say: Say = _stderr
) -> Fit:
    """Fit ``names`` to the training runs of ``measured`` and write the profile with its ``[fitted]`` table."""
    hardware = hardware_io.find(hardware)
    profile = hardware_io.resolve(hardware)
    samples = read_samples(measured, say, usual_runs(profile, shape))
    check_profile(profile, [sample.point for sample in samples], shape)
    reference = reference_of(hardware)
    found = fit(samples, profile, shape, names, None if reference is None else reference.seconds)
    write_fitted(hardware, found, out, command)
    return found


def usual_runs(profile: Profile, shape: ModelShape) -> dict[str, str]:
    """How ``herald-exec run`` decodes unless told otherwise: what a table of runs means that does not say."""
    length = shape.block_length
    return {
        "steps": str(min(20, length)),
        "blocks": str(max(2, DEFAULT_GEN_TOKENS // length)),
        "block_length": str(length),
        "kv_dtype": "fp32" if profile.machine.gpu.emulated else "bf16",
    }


def write_fitted(hardware: Path, found: Fit, out: Path, command: str) -> None:
    """The profile's file with the fitted numbers moved into ``[fitted]``.

    Raises
    ------
    ProfileError
        Nothing was identified.
    """
    _write(hardware, fitted_tables(found), out, f"{hardware.name} with fitted numbers, by: {command}")


def write_used(hardware: Path, found: Fit | None, out: Path, command: str) -> None:
    """The profile that predictions were made with: with what was fitted, if anything was."""
    fitted = found is not None and any(parameter.identified for parameter in found.parameters)
    if found is not None and fitted:
        write_fitted(hardware, found, out, command)
    else:
        _write(hardware, {}, out, f"{hardware.name}, nothing fitted, used by: {command}")


def _write(hardware: Path, tables: dict[str, dict[str, Any]], out: Path, header: str) -> None:
    data = profile_file.read(hardware)
    for path in tables:
        _, engine, name = path.split(".")
        data["engines"][engine].pop(name, None)
    if tables:
        data["fitted"] = {**data.get("fitted", {}), **tables}
    profile_file.write(out, data, [header])
    reference = profile_file.raw_folder(hardware) / "reference.csv"
    if reference.is_file():
        # A profile holds at the speed that the machine had when it was measured.
        copy = profile_file.raw_folder(out) / reference.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(reference.read_bytes())


@dataclass(frozen=True, slots=True)
class Runs:
    """How own runs are made.

    Attributes
    ----------
    points
        What is run; empty: :func:`~calibration.points.default_points`.
    rounds
        Runs of each point, all points in turn.
    again
        Measure the machine once more after the runs: predictions are the mean of both, their difference the spread.
    """

    points: Sequence[Point] = ()
    device: str = "cpu"
    rounds: int = 3
    again: bool = False


AGAIN = Plan(max_spread=0.5)
"""How ``--again`` measures: the spread that counts is between the two measurements, not within a case's samples."""


def reconcile_here(
    hardware: Path,
    shape: ModelShape,
    out: Path,
    runs: Runs = Runs(),
    *,
    names: Sequence[str] = (),
    command: str = "python -m calibration reconcile",
    say: Say = _stderr,
) -> Outcome:
    """Run the points here, fit the training set, compare the rest; everything is written to the folder ``out``.

    Raises
    ------
    ProfileError
        The profile is of another machine, or lacks numbers.
    """
    chosen = tuple(runs.points or default_points())
    check_held_out(chosen)
    profile = hardware_io.resolve(hardware)
    check_same_machine(profile, this_host(torch.device(runs.device)))
    check_profile(profile, chosen, shape)
    say(f"running {len(chosen)} points {runs.rounds} times, in turn")
    traces = out / "traces"
    samples = measure_points(chosen, shape, device=runs.device, rounds=runs.rounds, traces=traces, say=say)
    rows = [row_of_sample(sample, model=shape.name, hardware=profile.name) for sample in samples]
    profile_file.write_csv(out / "runs.csv", rows)
    files = [hardware]
    if runs.again:
        say("measuring the machine again")
        files.append(_measure_again(shape, runs.device, out / "again.toml", command, say))
    outcome, final = _judge(files, shape, samples, names, out, command)
    for point in chosen:
        simulate(
            point.pipeline(shape),
            final,
            point.workload(),
            trace_out=traces / f"{file_name(point)}.simulated.trace.json.gz",
        )
    return outcome


def _measure_again(shape: ModelShape, device: str, out: Path, command: str, say: Say) -> Path:
    # No prediction reads what runs beside what.
    needed = tuple(name for name in parts.NAMES if name != "contention")
    return measure(Request(shape, device, out, needed, quick=True, plan=AGAIN, command=command), say)


def reconcile_measured(
    hardware: Path, shape: ModelShape, measured: Path, out: Path | None, command: str, say: Say = _stderr
) -> Outcome:
    """Compare runs that somebody brings with predictions; a training set among them is fitted first."""
    hardware = hardware_io.find(hardware)
    profile = hardware_io.resolve(hardware)
    if measured.is_dir():
        samples = read_cells(measured, shape.name, say)
    else:
        samples = read_samples(measured, say, usual_runs(profile, shape))
    check_profile(profile, [sample.point for sample in samples], shape)
    check_held_out({sample.point: None for sample in samples})
    return _judge([hardware], shape, samples, (), out, command)[0]


def _judge(
    files: Sequence[Path],
    shape: ModelShape,
    samples: Sequence[Sample],
    names: Sequence[str],
    out: Path | None,
    command: str,
) -> tuple[Outcome, Profile]:
    """Predict with every calibration, each fitted for itself to the same training runs; the first one is kept."""
    trained = any(sample.point.set == FIT and "throughput_tok_s" in sample.figures for sample in samples)
    calibrations, fits = [], []
    for file in files:
        reference, profile = reference_of(file), hardware_io.resolve(file)
        seconds, spread = (None, 0.0) if reference is None else reference
        if trained:
            fits.append(fit(samples, profile, shape, names, seconds))
            profile = fits[-1].profile
        raw = profile_file.raw_folder(file)
        predict = predictor(profile, shape, traced=any(s.tails for s in samples), raw=raw)
        calibrations.append(Calibration(profile, predict, seconds, spread, raw))
    report = reconcile(samples, shape, calibrations)
    found = fits[0] if fits else None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        document = report.to_dict() | ({"fit": found.to_dict()} if found is not None else {})
        text = json.dumps(document, indent=1, allow_nan=False)
        (out / "reconcile.json").write_text(text + "\n", encoding="utf-8")
        write_used(files[0], found, out / "profile.toml", command)
    return Outcome(report, found), calibrations[0].profile


def parse_point(text: str, set_name: str) -> Point:
    """``METHOD:CONTEXTxBATCH`` as a point.

    Raises
    ------
    ConfigError
        Not of that form.
    """
    method, _, sizes = text.partition(":")
    context, _, batch = sizes.partition("x")
    try:
        return Point(method, int(context), int(batch), set=set_name)
    except ValueError:
        raise ConfigError(f"a point is METHOD:CONTEXTxBATCH such as herald:2048x4, got {text!r}") from None
