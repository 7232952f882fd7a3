"""``python -m reports``: charts and the page.

    python -m reports build --runs runs --hardware runs/MACHINE.fitted.toml --out report.html

The page needs no network: the vega bundle is inside, once.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.errors import HeraldError

app = typer.Typer(
    name="reports",
    help="Charts of runs, predictions and profiles on one self-contained page.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def reports() -> None:
    """Charts of runs, predictions and profiles."""


@app.command()
def build(
    runs: Annotated[Path, typer.Option("--runs", help="Folder that calibration reconcile filled.")],
    hardware: Annotated[Path, typer.Option("--hardware", help="Profile of the machine that ran.")],
    out: Annotated[Path, typer.Option("--out", help="Page to write.")] = Path("report.html"),
    model: Annotated[str, typer.Option("--model", help="Name, or the path of a config.json.")] = "demo",
    context: Annotated[int, typer.Option("--context", min=1, help="Point shown in detail.")] = 2048,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Point shown in detail.")] = 1,
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the charts as PNG.")] = None,
) -> None:
    """Write one HTML page: throughput, timelines, errors, ceilings, memory, the profile."""
    from herald_pipeline import catalogue
    from reports import demo
    from reports.page import png as to_png
    from reports.page import render

    inputs = demo.Inputs(runs, hardware, catalogue.resolve(model), context, batch)
    title, lead, sections = demo.build(inputs)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(title, lead, sections), encoding="utf-8")
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)
    if png is not None:
        png.mkdir(parents=True, exist_ok=True)
        for section in sections:
            if section.chart is not None:
                file = png / f"{section.title.lower().replace(' ', '-')}.png"
                file.write_bytes(to_png(section.chart))
        print(f"wrote charts to {png}", file=sys.stderr)


def main() -> None:
    """Run a command; a user's mistake ends in its message and an exit code, never in a traceback."""
    try:
        app()
    except HeraldError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
