"""``herald-exec kernels``: whether the CPU kernels are right on this machine, and how fast they are."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from herald_pipeline.errors import ConfigError, HeraldError

app = typer.Typer(help="Check and measure the CPU kernels of this machine.", add_completion=False)
_text = Console(stderr=True)


def _show_check(rows: list[dict[str, object]]) -> None:
    table = Table("tier", "cases", "differing indices", "largest errors", "problems")
    for row in rows:
        worst = row["worst_error"]
        errors = ", ".join(f"{name} {value:.1e}" for name, value in worst.items()) if isinstance(worst, dict) else ""
        problems = row["problems"]
        count = len(problems) if isinstance(problems, list) else 0
        table.add_row(str(row["tier"]), str(row["cases"]), str(row["swaps"]), errors, str(count))
    _text.print(table)
    for row in rows:
        problems = row["problems"]
        for problem in (problems if isinstance(problems, list) else [])[:20]:
            _text.print(f"{row['tier']}: {problem}", style="red", markup=False)


@app.callback(invoke_without_command=True)
def kernels(
    check: Annotated[bool, typer.Option("--check", help="Compare every usable tier with the definition.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure speed beside this machine's ceilings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    context: Annotated[int, typer.Option(help="Tokens per request, for --bench.")] = 32768,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all that may be used.")] = None,
    pool_gib: Annotated[float, typer.Option(help="Size of the measured KV pool in GiB.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Interleaved repetitions; medians are reported.")] = 7,
) -> None:
    """Check or measure the CPU kernels; exit 1 when a tier is wrong."""
    try:
        from . import capabilities
        from .benchmark import bench_kernels, show_bench
        from .checking import check_tiers

        if check == bench:
            message = "pass one of --check and --bench"
            raise ConfigError(message)
        found = capabilities()
        _text.print(f"tiers usable here: {', '.join(found['usable'])}; active: {found['active']}")
        if check:
            rows = check_tiers()
            result: dict[str, object] = {"capabilities": found, "tiers": rows}
            failed = any(row["problems"] for row in rows)
            _show_check(rows)
        else:
            result = bench_kernels(
                context=context, threads=threads, pool_gib=pool_gib, repeats=repeats, say=_text.print
            )
            failed = False
            show_bench(result, _text)
        if as_json:
            typer.echo(json.dumps(result))
        if failed:
            raise typer.Exit(1)
    except (HeraldError, ImportError) as error:
        _text.print(str(error), style="red", markup=False)
        raise typer.Exit(getattr(error, "exit_code", 1)) from error
