"""``python -m calibration``: measure a machine, fit what cannot be measured, reconcile, compare.

    python -m calibration measure --quick
    python -m calibration reconcile --hardware profiles/MACHINE.toml --out runs/
    python -m calibration diff real.trace.json simulated.trace.json

Progress goes to stderr; with ``--json`` a command prints exactly one JSON object on stdout.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from herald_pipeline.environment import threads_problem
from herald_pipeline.errors import ConfigError, HeraldError, raise_problems, unknown_name
from herald_pipeline.help_pages import program
from herald_pipeline.outputs import check_ending, check_file, check_folder

app = program("calibration", "Measure a machine, fit what cannot be measured, and put prediction beside measurement.")

_PROFILE = (".toml",)

Model = Annotated[str, typer.Option("--model", help="Name, or the path of a config.json.")]
Hardware = Annotated[Path, typer.Option("--hardware", help="Profile of the machine: a TOML file or a name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def measure(
    model: Model = "demo",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option("--out", help="Profile file [default: ./profiles/MACHINE.toml].")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Measure this part anew; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: under a minute on two cores.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Samples of each case, at least 6.")] = 9,
    max_spread: Annotated[
        float, typer.Option("--max-spread", help="Refuse a case whose samples spread by more of their median.")
    ] = 0.25,
    kv_dtype: Annotated[
        str | None, typer.Option("--kv-dtype", help="KV in both memories [default: fp32 on the CPU, bf16 on CUDA].")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Cores to use [default: all].")] = None,
    pcie: Annotated[
        str | None, typer.Option("--pcie", help="The link as GENERATIONxLANES (5x16), where the driver is silent.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The profile's name [made of the processors'].")] = None,
    host_gb: Annotated[
        float | None, typer.Option("--host-gb", help="Host memory in GB, where the system does not show all of it.")
    ] = None,
) -> None:
    """Measure this machine and write its profile, raw tables beside it."""
    from calibration.host import pcie as read_pcie
    from calibration.measure import Request
    from calibration.measure import measure as run
    from calibration.timing import Plan
    from herald_pipeline.catalogue import resolve
    from herald_pipeline.model import KVDtype

    raise_problems([threads_problem(threads, "--threads")])
    if kv_dtype is not None and kv_dtype not in set(KVDtype):
        raise unknown_name("--kv-dtype", kv_dtype, KVDtype)
    if pcie is not None:
        if not device.startswith("cuda"):
            raise ConfigError("--pcie states a GPU's link: it goes with --device cuda")
        read_pcie(pcie)
    if out is not None:
        check_ending(out, _PROFILE, "a profile")
        check_file(out)
    request = Request(
        resolve(model),
        device,
        out,
        tuple(only or ()),
        quick,
        Plan(repeats=repeats, max_spread=max_spread),
        None if kv_dtype is None else KVDtype(kv_dtype),
        threads,
        pcie,
        name,
        host_gb,
        _command(),
    )
    run(request)


@app.command()
def fit(
    hardware: Hardware,
    measured: Annotated[Path, typer.Option("--measured", help="Table of runs; set=fit marks the training set.")],
    out: Annotated[Path, typer.Option("--out", help="Profile file to write.")],
    model: Model = "demo",
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", help="Engine number to fit; repeatable.")
    ] = None,
    json_: Json = False,
) -> None:
    """Fit engine numbers that no part can isolate to the training runs of a table."""
    from calibration.procedure import fit_file
    from calibration.text import fit_text
    from herald_pipeline.catalogue import resolve

    check_ending(out, _PROFILE, "a profile")
    check_file(out)
    found = fit_file(hardware, resolve(model), measured, tuple(parameter or ()), out, _command())
    _print(found.to_dict(), fit_text(found), json_)


@app.command()
def reconcile(
    hardware: Hardware,
    model: Model = "demo",
    measured: Annotated[
        Path | None, typer.Option("--measured", help="Runs that you bring, instead of own ones.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for runs, traces and report [own runs: runs].")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Own runs of each point.")] = 3,
    again: Annotated[
        bool, typer.Option("--again", help="Measure again after own runs: how far do two measurements predict alike?")
    ] = False,
    fit_point: Annotated[list[str] | None, typer.Option("--fit", help="Training point METHOD:CONTEXTxBATCH.")] = None,
    point: Annotated[list[str] | None, typer.Option("--point", help="Held-out point METHOD:CONTEXTxBATCH.")] = None,
    json_: Json = False,
) -> None:
    """Put real runs beside simulated ones, for throughput and every kind of stage, on points that no fit has seen."""
    from calibration.points import FIT, HELD_OUT
    from calibration.procedure import Runs, parse_point, reconcile_here, reconcile_measured
    from calibration.text import fit_text, report_text
    from herald_pipeline.catalogue import resolve

    shape = resolve(model)
    if out is not None or measured is None:
        check_folder(out or Path("runs"))
    if measured is not None:
        if again:
            message = "--again measures this machine; runs of --measured may be of another one: give one of them"
            raise ConfigError(message)
        found = reconcile_measured(hardware, shape, measured, out, _command())
    else:
        chosen = [parse_point(text, FIT) for text in fit_point or ()]
        chosen += [parse_point(text, HELD_OUT) for text in point or ()]
        runs = Runs(chosen, device, rounds, again)
        found = reconcile_here(hardware, shape, out or Path("runs"), runs, command=_command())
    fitted = "" if found.fit is None else fit_text(found.fit) + "\n\n"
    document = found.report.to_dict() | ({} if found.fit is None else {"fit": found.fit.to_dict()})
    _print(document, fitted + report_text(found.report), json_)


@app.command()
def interventions(
    hardware: Annotated[Path | None, typer.Option("--hardware", help="Profile file: predict on it.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File for the predictions, written once.")] = None,
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="File of predictions to compare with --measured.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option("--measured", help="Folder of cells of python -m benchmarks.gpu.")
    ] = None,
    model: Model = "llada2-mini",
    json_: Json = False,
) -> None:
    """Predict what single changes bring (before the run), or put the predicted changes beside measured ones."""
    from calibration import interventions as changes
    from calibration.text import interventions_text
    from herald_pipeline.catalogue import resolve

    if hardware is not None and out is not None and predictions is None:
        check_ending(out, (".json",), "JSON")
        check_file(out)
        print(changes.predict(hardware, resolve(model), out, _command()))
        return
    if predictions is None or measured is None:
        message = "give --hardware and --out to predict, or --predictions and --measured to compare"
        raise ConfigError(message)
    found = changes.compare(predictions, measured, lambda line: print(line, file=sys.stderr))
    _print(found, interventions_text(found), json_)


@app.command()
def transfer(
    hardware: Hardware,
    out: Annotated[Path | None, typer.Option("--out", help="Profile file to write: a prediction, made once.")] = None,
    target: Annotated[
        str, typer.Option("--target", help="Machine whose datasheet numbers are taken.")
    ] = "h100-sxm-80g_xeon-8481c",
    json_: Json = False,
) -> None:
    """Predict the profile of a machine from a measured one and datasheets (--out); without, judge such a profile."""
    from calibration import transfer as blind
    from calibration.text import transfer_text
    from herald_pipeline.hardware_io import resolve

    if out is not None:
        check_ending(out, _PROFILE, "a profile")
        check_file(out)
        print(blind.transfer(hardware, target, out, _command()))
        return
    rows = blind.judge(resolve(hardware))
    _print({"hardware": str(hardware), "rows": rows}, transfer_text(rows), json_)


@app.command()
def ceilings(
    measured: Annotated[Path, typer.Option("--measured", help="Folder of cells of python -m benchmarks.gpu.")],
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="Profile, name or file: predict the ceilings as well.")
    ] = None,
    model: Model = "llada2-mini",
    json_: Json = False,
) -> None:
    """Measure Figure 5: each ceiling by its protocol, as predicted, and what the method that should hit it reached."""
    from calibration import ceilings as measured_ceilings
    from calibration.profile_file import raw_folder
    from calibration.text import ceilings_text
    from herald_pipeline import hardware_io
    from herald_pipeline.catalogue import resolve

    file = None if hardware is None else hardware_io.find(hardware)
    profile, raw = (None, None) if file is None else (hardware_io.resolve(file), raw_folder(file))
    found = measured_ceilings.compare(measured, profile, resolve(model), lambda line: print(line, file=sys.stderr), raw)
    _print(found, ceilings_text(found), json_)
    measured_ceilings.check(found)


@app.command()
def replicas(
    hardware: Hardware,
    measured: Annotated[Path, typer.Option("--measured", help="Folder of cells of python -m benchmarks.gpu.")],
    model: Model = "sdar-8b",
    json_: Json = False,
) -> None:
    """Put replicas that shared a host's DRAM, a GPU each, beside what the simulator predicts of them."""
    from calibration import replicas as shared
    from herald_pipeline.catalogue import resolve

    found = shared.compare(hardware, measured, resolve(model), lambda line: print(line, file=sys.stderr))
    _print(found, shared.text(found), json_)


@app.command()
def diff(first: Path, second: Path, json_: Json = False) -> None:
    """Compare two traces, results, profiles or reports of reconcile; differences are second / first - 1."""
    from calibration.compare import diff as compare
    from calibration.text import comparison_text

    found = compare(first, second)
    _print(found.to_dict(), comparison_text(found), json_)


def _command() -> str:
    return " ".join(["python -m calibration", *sys.argv[1:]])


def _print(document: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(document, allow_nan=False) if as_json else text)


def main() -> None:
    """Run a command; a user's mistake ends in its message and an exit code, never in a traceback."""
    try:
        app()
    except HeraldError as problem:
        print(f"error: {problem}", file=sys.stderr)
        if getattr(problem, "device_lost", False):
            # Freeing device memory on the way out would abort the process and lose the exit code.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(problem.exit_code)
        sys.exit(problem.exit_code)
