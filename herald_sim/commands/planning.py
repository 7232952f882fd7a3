"""`herald-sim ceilings`, `peak`, `explain` and `sweep`: what limits, what fits, what would help."""

from pathlib import Path
from typing import Annotated

import typer

from herald_sim.arguments import (
    Batch,
    Block,
    BudgetShare,
    Context,
    Engine,
    GenTokens,
    Hardware,
    HbmLimit,
    HostLimit,
    Json,
    KvDtype,
    Method,
    Model,
    Sets,
    StepsText,
)
from herald_sim.commands.output import note, print_json, refuse, starting


def ceilings(
    model: Model,
    hardware: Hardware,
    context: Annotated[int, typer.Option("--context", help="Completed KV entries per request.")],
    budget: Annotated[float, typer.Option("--budget", help="Share of KV selected.")] = 0.05,
    steps: Annotated[int, typer.Option("--steps", help="T.")] = 20,
    batch: Batch = None,
    block: Block = None,
    engine: Engine = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """What each resource alone allows, with formula and inputs (Figure 5)."""
    from herald_sim.ceilings import ceilings as all_ceilings
    from herald_sim.options import Options
    from herald_sim.text import ceilings_text

    options = Options(model, "dense", hardware, engine=engine, sets=set_ or ())
    refuse("changes no ceiling; use --budget, --block and the like", starting(set_, "settings."))
    note(*options.profile().warnings)
    rows = all_ceilings(
        options.shape(), options.profile(), context, budget=budget, steps=steps, batch=batch, block_length=block
    )
    if as_json:
        names = {"model": options.shape().name, "hardware": options.profile().name}
        print_json({**names, "context": context, "rows": rows})
    else:
        typer.echo(ceilings_text(rows))


def peak(
    model: Model,
    method: Method,
    hardware: Hardware,
    context: Annotated[int, typer.Option("--context", help="Completed KV entries per request.")],
    steps: StepsText = None,
    block: Block = None,
    budget: BudgetShare = None,
    kv_dtype: KvDtype = None,
    engine: Engine = None,
    gen_tokens: GenTokens = None,
    set_: Sets = None,
    hbm_limit_gb: HbmLimit = None,
    host_limit_gb: HostLimit = None,
    as_json: Json = False,
) -> None:
    """The largest batch that fits, and the batch with the highest throughput."""
    from herald_pipeline.errors import ConfigError
    from herald_sim.options import Options
    from herald_sim.planning import find_peak
    from herald_sim.simulate import simulate
    from herald_sim.text import peak_text

    options = Options(
        model,
        method,
        hardware,
        context,
        1,
        steps,
        block=block,
        budget=budget,
        kv_dtype=kv_dtype,
        engine=engine,
        gen_tokens=gen_tokens,
        sets=set_ or (),
        hbm_limit_gb=hbm_limit_gb,
        host_limit_gb=host_limit_gb,
    )
    pipeline, profile = options.pipeline(), options.profile()
    note(*profile.warnings)
    memory, length = options.memory(profile), pipeline.settings.block_length

    def throughput(size: int) -> float:
        result = simulate(pipeline, profile, options.workload(pipeline.settings, size), memory=memory)
        if result.throughput_tok_s is None:
            message = f"peak needs answers of two blocks or more: pass --gen-tokens {2 * length} or above"
            raise ConfigError(message)
        return result.throughput_tok_s

    found = find_peak(pipeline, options.workload(pipeline.settings).largest_request_tokens, profile, memory, throughput)
    if as_json:
        names = {"model": pipeline.model.name, "method": method, "hardware": profile.name}
        print_json({**names, "context": context, **found.as_dict()})
    else:
        typer.echo(peak_text(found))


def explain(
    model: Model,
    method: Method,
    hardware: Hardware,
    context: Context = None,
    batch: Batch = None,
    steps: StepsText = None,
    block: Block = None,
    budget: BudgetShare = None,
    kv_dtype: KvDtype = None,
    engine: Engine = None,
    gen_tokens: GenTokens = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Where a block's time goes, and what 10% more of each resource would bring."""
    from herald_sim.explain import explain as explained
    from herald_sim.options import Options
    from herald_sim.text import explanation_text

    options = Options(
        model,
        method,
        hardware,
        context,
        batch,
        steps,
        block=block,
        budget=budget,
        kv_dtype=kv_dtype,
        engine=engine,
        gen_tokens=gen_tokens,
        sets=set_ or (),
    )
    pipeline, profile = options.pipeline(), options.profile()
    note(*profile.warnings)
    found = explained(pipeline, profile, options.workload(pipeline.settings))
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo(explanation_text(found))


def sweep(
    out: Annotated[Path, typer.Option("--out", help="Folder; points that it holds already are not run again.")],
    grid: Annotated[
        Path | None, typer.Option("--grid", help="TOML with [base] and [grid]; see herald_sim/sweep.py.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Without --grid: names, with commas between.")] = None,
    method: Annotated[str | None, typer.Option("--method", help="Likewise.")] = None,
    hardware: Annotated[str | None, typer.Option("--hardware", help="Likewise.")] = None,
    context: Annotated[str | None, typer.Option("--context", help="Likewise: 4096,32768.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="Likewise: 15,16,17.")] = None,
    budget: Annotated[str | None, typer.Option("--budget", help="Likewise: 0.05,0.1.")] = None,
    on: Annotated[str, typer.Option("--on", help="local, or dask=ADDRESS of an existing scheduler.")] = "local",
    workers: Annotated[int | None, typer.Option("--workers", help="Local processes [default: the cores].")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave contention out where fast mode covers a point.")] = False,
    as_json: Json = False,
) -> None:
    """Every combination of a grid: infeasible points are marked and never win."""
    import os

    from herald_pipeline.errors import ConfigError, check_number, raise_problems
    from herald_sim import sweep as sweeping
    from herald_sim.held_points import POINTS
    from herald_sim.text import summary_text

    cores = len(os.sched_getaffinity(0)) if workers is None else workers
    raise_problems([check_number(cores, "workers", minimum=1, integer=True)])
    place, _, address = on.partition("=")
    if (place, bool(address)) not in (("local", False), ("dask", True)):
        message = f"--on must be 'local' or 'dask=ADDRESS', got {on!r}"
        raise ConfigError(message)
    lists = {
        "model": model,
        "method": method,
        "hardware": hardware,
        "context": context,
        "batch": batch,
        "budget": budget,
    }
    if grid is not None:
        refuse(
            "goes without --grid, whose file says it", {f"--{name}": text is not None for name, text in lists.items()}
        )
    points = sweeping.points_of(lists) if grid is None else sweeping.read_grid(grid)
    crew = sweeping.local_workers(cores) if place == "local" else sweeping.dask_workers(address)
    try:
        summary = sweeping.sweep(points, out, crew, fast=fast)
    except KeyboardInterrupt:
        note(f"interrupted; {out / POINTS} holds what has ended, and the same command goes on from there")
        raise
    if as_json:
        print_json(summary)
    else:
        typer.echo(summary_text(summary))
    note(f"points in {out / POINTS}")
    if not summary["ok"]:
        raise typer.Exit(1)
