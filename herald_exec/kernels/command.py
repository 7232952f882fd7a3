"""``herald-exec kernels``: whether the CPU kernels are right on this machine, and how fast they are."""

import json
from typing import Annotated

import typer
from rich.console import Console

from herald_pipeline.errors import ConfigError, HeraldError

_text = Console(stderr=True)


def kernels(
    check: Annotated[bool, typer.Option("--check", help="Compare every usable tier with the definition.")] = False,
    bench: Annotated[bool, typer.Option("--bench", help="Measure speed beside this machine's ceilings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    context: Annotated[int, typer.Option(help="Tokens per request, for --bench.")] = 32768,
    threads: Annotated[int | None, typer.Option(help="Threads; default: all that may be used.")] = None,
    pool_gib: Annotated[float, typer.Option(help="Size of the measured KV pool in GiB.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Interleaved repetitions; medians are reported.")] = 7,
) -> None:
    """Check or measure the CPU kernels of this machine; exit 1 when a tier is wrong."""
    if check == bench:
        message = "pass one of --check and --bench"
        raise ConfigError(message)
    try:
        from . import capabilities
        from .benchmark import bench_kernels
        from .checking import check_tiers
        from .text import show_bench, show_check

        found = capabilities()
        _text.print(f"tiers usable here: {', '.join(found['usable'])}; active: {found['active']}", soft_wrap=True)
        if check:
            rows = check_tiers()
            result: dict[str, object] = {"capabilities": found, "tiers": rows}
            failed = any(row["problems"] for row in rows)
            show_check(rows, _text)
        else:
            result = bench_kernels(
                context=context, threads=threads, pool_gib=pool_gib, repeats=repeats, say=_text.print
            )
            failed = False
            show_bench(result, _text)
    except ImportError as error:  # torch, whose attention is measured too, may be missing
        raise HeraldError(str(error)) from error
    if as_json:
        typer.echo(json.dumps(result))
    if failed:
        raise typer.Exit(1)
