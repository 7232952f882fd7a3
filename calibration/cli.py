"""``python -m calibration``: measure a machine, fit what cannot be measured, reconcile, compare.

    python -m calibration measure --quick
    python -m calibration reconcile --hardware profiles/MACHINE.toml --out runs/
    python -m calibration diff real.trace.json simulated.trace.json

Progress goes to stderr; with ``--json`` a command prints exactly one JSON object on stdout.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.errors import HeraldError

app = typer.Typer(
    name="calibration",
    help="Measure a machine, fit what cannot be measured, and put prediction beside measurement.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Option("--model", help="Name, or path of a config.json.")]


@app.callback()
def calibration() -> None:
    """Measure, fit, reconcile, diff."""


@app.command()
def measure(
    model: Model = "demo",
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option("--out", help="Profile file [default: ./profiles/MACHINE.toml].")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", help="Measure this part anew; repeatable.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: under a minute on two cores.")] = False,
    repeats: Annotated[int, typer.Option("--repeats", help="Samples of each case.")] = 9,
    max_spread: Annotated[float, typer.Option("--max-spread", help="Refuse larger relative spreads.")] = 0.25,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="Format of KV in both memories.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Cores to use [default: all].")] = None,
    pcie: Annotated[str | None, typer.Option("--pcie", help="GENERATIONxLANES where the driver is silent.")] = None,
) -> None:
    """Measure this machine and write its profile, raw tables beside it."""
    from calibration.measure import Request
    from calibration.measure import measure as run
    from calibration.models import resolve
    from calibration.timing import Plan
    from herald_pipeline.model import KVDtype

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
        " ".join(["python -m calibration", *sys.argv[1:]]),
    )
    run(request)


def main() -> None:
    """Run a command; a user's mistake ends in its message and an exit code, never in a traceback."""
    try:
        app()
    except HeraldError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
