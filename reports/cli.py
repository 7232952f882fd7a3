"""``python -m reports``: charts and the page.

    python -m reports build --trace run.trace.json.gz --trace simulated.trace.json.gz --out run.html
    python -m reports build --runs runs --hardware runs/profile.toml --out report.html
    python -m reports build --exhibits --kernels benchmarks/results/kernels_emr-16vcpu-7_32768.json --out exhibits.html
    python -m reports build --study study.json --recall recall.json --out selection.html
    python -m reports build --decoding decoding.json --out decoding.html
    python -m reports serve --pages out/demo

The page needs no network: the vega bundle is inside, once.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from herald_pipeline.errors import ConfigError, HeraldError
from herald_pipeline.help_pages import program
from herald_pipeline.outputs import check_ending, check_file, check_folder

if TYPE_CHECKING:
    from reports.page import Section

app = program("reports", "Charts of runs, predictions and profiles on one self-contained page.")


@app.callback()
def reports() -> None:
    """Charts of runs, predictions and profiles."""


_PAGES: Mapping[str, Sequence[str]] = {
    "--trace": ("block",),
    "--runs": ("hardware", "model", "context", "batch", "answers"),
    "--exhibits": ("hardware", "kernels"),
    "--study or --recall": (),
    "--decoding": (),
}
"""What makes each page, and the options that only say more about it."""


@app.command()
def build(
    ctx: typer.Context,
    traces: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="What --trace-out of a run wrote, real or simulated; repeat it to compare."),
    ] = None,
    block: Annotated[
        int | None, typer.Option("--block", min=0, help="With --trace: block of the timeline [the second].")
    ] = None,
    runs: Annotated[Path | None, typer.Option("--runs", help="Folder that calibration reconcile filled.")] = None,
    exhibits: Annotated[
        bool, typer.Option("--exhibits", help="The papers' tables and figures instead, ours beside the printed values.")
    ] = False,
    study: Annotated[
        Path | None, typer.Option("--study", help="JSON of python -m herald_exec.evaluation show FILE --json.")
    ] = None,
    recall: Annotated[
        Path | None, typer.Option("--recall", help="JSON of python -m herald_exec.evaluation recall --summary FILE.")
    ] = None,
    decoding: Annotated[
        Path | None,
        typer.Option("--decoding", help="JSON of python -m herald_exec.evaluation decoding-show FILES --json."),
    ] = None,
    kernels: Annotated[
        Path | None,
        typer.Option("--kernels", help="With --exhibits: JSON of bench_kernels.py; Fig. 6 and 8 as measured."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option("--hardware", help="Profile that ran [exhibits: the HERALD paper's machine].")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Page to write.")] = Path("report.html"),
    model: Annotated[str, typer.Option("--model", help="Name, or the path of a config.json.")] = "demo",
    context: Annotated[int, typer.Option("--context", min=1, help="Point shown in detail.")] = 2048,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Point shown in detail.")] = 1,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="JSON of python -m herald_exec.reference answers.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Folder for the charts as PNG.")] = None,
) -> None:
    """Write one HTML page of a run (--trace), of a reconciliation (--runs), of the papers' exhibits, or of accuracy."""
    from reports.page import render

    selection = study is not None or recall is not None
    pages = {
        "--trace": bool(traces),
        "--runs": runs is not None,
        "--exhibits": exhibits,
        "--study or --recall": selection,
        "--decoding": decoding is not None,
    }
    _check_options(ctx, [name for name, asked in pages.items() if asked])
    check_ending(out, (".html", ".htm"), "an HTML page")
    check_file(out)
    if png is not None:
        check_folder(png, "--png")
    if traces:
        from reports.run import build as build_run

        title, lead, sections = build_run(traces, block)
    elif selection:
        from reports.selection import build as build_selection

        title, lead, sections = build_selection(study, recall)
    elif decoding is not None:
        from reports.decoding import build as build_decoding

        title, lead, sections = build_decoding(decoding)
    elif exhibits:
        title, lead, sections = _exhibits(hardware, kernels)
    else:
        title, lead, sections = _runs(runs, hardware, model, (context, batch), answers)
    out.write_text(render(title, lead, sections), encoding="utf-8")
    print(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)", file=sys.stderr)
    if png is not None:
        _write_charts(png, sections)


def _check_options(ctx: typer.Context, asked: Sequence[str]) -> None:
    """Refuse two pages at once, and an option that the page asked for does not read."""
    if len(asked) > 1:
        message = f"{' and '.join(asked)} are separate pages: give one of them"
        raise ConfigError(message)
    read = _PAGES[asked[0]] if asked else ()
    for name in sorted({name for names in _PAGES.values() for name in names}.difference(read)):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            belongs = " or ".join(page for page, names in _PAGES.items() if name in names)
            rest = f"{asked[0]} does not read it: leave it out" if asked else f"give {belongs} too"
            message = f"--{name} says more about the page of {belongs}: {rest}"
            raise ConfigError(message)
    if not asked:
        message = (
            "which page? --trace FILE shows a run, --runs FOLDER with --hardware what calibration reconcile left, "
            "--exhibits the papers' tables and figures, --study or --recall selection, --decoding sliding blocks"
        )
        raise ConfigError(message)


def _runs(
    runs: Path | None, hardware: str | None, model: str, point: tuple[int, int], answers: Path | None
) -> tuple[str, str, "list[Section]"]:
    assert runs is not None
    if hardware is None:
        message = "--hardware is missing: the profile that calibration reconcile ran with, a TOML file or a name"
        raise ConfigError(message)
    from herald_pipeline import catalogue
    from reports import demo

    return demo.build(demo.Inputs(runs, Path(hardware), catalogue.resolve(model), *point, answers))


def _exhibits(hardware: str | None, kernels: Path | None) -> tuple[str, str, "list[Section]"]:
    from herald_pipeline import hardware_io
    from reports.exhibits import HARDWARE, build

    return build(hardware_io.resolve(hardware or HARDWARE), kernels)


def _write_charts(folder: Path, sections: "list[Section]") -> None:
    from reports.page import png

    for section in sections:
        if section.chart is not None:
            name = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-")
            (folder / f"{name}.png").write_bytes(png(section.chart))
    print(f"wrote charts to {folder}", file=sys.stderr)


@app.command()
def serve(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    pages: Annotated[Path | None, typer.Option("--pages", help="Folder whose HTML pages are shown as well.")] = None,
) -> None:
    """Serve the what-if page on this machine: a form, and what the simulator says to it. Ctrl-C ends it."""
    from reports.what_if import open_server

    with open_server(port, pages) as server:
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


def main() -> None:
    """Run a command; a user's mistake ends in its message and an exit code, never in a traceback."""
    try:
        app()
    except HeraldError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
