"""`herald-sim`: plan a deployment without the machine.

    herald-sim run --model llada2-mini --method herald --hardware h100-sxm-80g_xeon-8481c --context 32768 --batch 80
    herald-sim ceilings --model llada2-mini --hardware h100-sxm-80g_xeon-8481c --context 32768
    herald-sim methods

With ``--json`` a command prints exactly one JSON object on stdout; everything else goes to stderr.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from herald_pipeline.environment import check_environment
from herald_pipeline.errors import HeraldError
from herald_sim.arguments import (
    Batch,
    Block,
    BudgetShare,
    Cache,
    Commits,
    Context,
    Decoder,
    Engine,
    GenTokens,
    Hardware,
    HbmLimit,
    HostLimit,
    Json,
    KvDtype,
    LinkLimit,
    Method,
    Model,
    Policy,
    PrefixWindow,
    Requests,
    Scheduler,
    Seed,
    Sets,
    SMax,
    StepsFile,
    StepsText,
)

if TYPE_CHECKING:
    from herald_sim.decoding_cost import DecodingChoice
    from herald_sim.options import Options

app = typer.Typer(
    name="herald-sim",
    help="Plan block-diffusion LLM serving: throughput, limits and ceilings of a method on a machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

PAPER_HARDWARE = "h100-sxm-80g_xeon-8481c"


@app.command()
def run(
    model: Model,
    method: Method,
    hardware: Hardware,
    context: Context = None,
    batch: Batch = None,
    steps: StepsText = None,
    steps_file: StepsFile = None,
    commits: Commits = None,
    block: Block = None,
    budget: BudgetShare = None,
    kv_dtype: KvDtype = None,
    engine: Engine = None,
    gen_tokens: GenTokens = None,
    requests: Requests = None,
    batch_policy: Policy = "lockstep",
    seed: Seed = 0,
    set_: Sets = None,
    hbm_limit_gb: HbmLimit = None,
    host_limit_gb: HostLimit = None,
    link_limit_gb_s: LinkLimit = None,
    cache: Cache = None,
    scheduler: Scheduler = None,
    decoder: Decoder = "confidence",
    s_max: SMax = None,
    prefix_window: PrefixWindow = None,
    trace_out: Annotated[Path | None, typer.Option("--trace-out", help="Chrome trace (.json or .json.gz).")] = None,
    check: Annotated[bool, typer.Option("--check", help="Run the invariants.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help="Leave contention out; many blocks at once.")] = False,
    beyond_memory: Annotated[
        bool, typer.Option("--beyond-memory", help="Go on where it does not fit, and say by how much.")
    ] = False,
    interval: Annotated[bool, typer.Option(help="95% interval from the spreads of the profile's numbers.")] = True,
    as_json: Json = False,
) -> None:
    """Simulate one configuration, event by event."""
    from herald_pipeline.trace import check_writable
    from herald_sim.options import Options, resolved
    from herald_sim.simulate import simulate

    options = Options(
        model,
        method,
        hardware,
        context,
        batch,
        steps,
        steps_file,
        commits,
        block,
        budget,
        kv_dtype,
        engine,
        gen_tokens,
        requests,
        batch_policy,
        seed,
        set_ or (),
        hbm_limit_gb,
        host_limit_gb,
        link_limit_gb_s,
    )
    if cache is not None or scheduler is not None:
        from herald_sim.decoding_cost import DecodingChoice

        _refuse(
            "changes nothing with --cache or --scheduler, where recorded commits say what was decoded",
            {
                "--steps": steps is not None,
                "--steps-file": steps_file is not None,
                "--budget": budget is not None,
                "--kv-dtype": kv_dtype is not None,
                "--gen-tokens": gen_tokens is not None,
                "--requests": requests is not None,
                "--batch-policy": batch_policy != "lockstep",
                "--trace-out": trace_out is not None,
                "--check": check,
                "--fast": fast,
                "--beyond-memory": beyond_memory,
                **_starting(set_, "settings."),
            },
        )
        length = 32 if block is None else block
        choice = DecodingChoice(decoder, scheduler or "fixed", cache or "none", length, s_max, prefix_window)
        _run_decoding(options, choice, as_json)
        return
    _refuse(
        "goes with --cache or --scheduler",
        {
            "--decoder": decoder != "confidence",
            "--s-max": s_max is not None,
            "--prefix-window": prefix_window is not None,
        },
    )
    if trace_out is not None:
        check_writable(trace_out, "trace")
    pipeline, profile = options.pipeline(), options.profile()
    workload = options.workload(pipeline.settings.block_length)
    _note(*profile.warnings)
    rates = resolved(profile)
    _note(
        "rates: "
        + ", ".join(f"{name} {value:g}" if _is_number(value) else f"{name} {value}" for name, value in rates.items())
    )
    result = simulate(
        pipeline,
        profile,
        workload,
        memory=options.memory(profile),
        check=check,
        trace_out=trace_out,
        fast=fast,
        beyond_memory=beyond_memory,
    )
    if "beyond_memory" in result.extra:
        _note(f"beyond memory: {result.extra['beyond_memory']}; nothing shows that this batch could be held")
    if interval and result.throughput_tok_s is not None:
        from dataclasses import replace

        from herald_sim.intervals import interval as interval_of

        known = interval_of(pipeline, profile, workload, result.throughput_tok_s, seed=seed)
        result = replace(result, interval=known)
    if as_json:
        _print_json(result.to_dict())
    else:
        from herald_sim.text import result_text

        typer.echo(result_text(result))


def _run_decoding(options: "Options", choice: "DecodingChoice", as_json: bool) -> None:
    """``run`` with a scheduler or cache rule: a bidirectional model, from recorded commits."""
    from herald_pipeline.errors import ConfigError
    from herald_sim.decoding_cost import run_decoding

    if options.method != "dense":
        message = (
            f"--cache and --scheduler go with --method dense, got {options.method!r}; leave them out for offloading"
        )
        raise ConfigError(message)
    profile = options.profile()
    _note(*profile.warnings)
    result = run_decoding(
        options.shape(),
        profile,
        choice,
        options.commits,
        batch=1 if options.batch is None else options.batch,
        context=options.context,
    )
    if as_json:
        _print_json(result)
        return
    for name, value in result.items():
        typer.echo(f"{name:22} {value:.6g}" if isinstance(value, float) else f"{name:22} {value}")


@app.command()
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
    """What each resource alone allows, with formula and inputs (Fig. 5)."""
    from herald_sim.ceilings import ceilings as all_ceilings
    from herald_sim.options import Options
    from herald_sim.text import ceilings_text

    options = Options(model, "dense", hardware, engine=engine, sets=set_ or ())
    _refuse("changes no ceiling; use --budget, --block and the like", _starting(set_, "settings."))
    _note(*options.profile().warnings)
    rows = all_ceilings(
        options.shape(), options.profile(), context, budget=budget, steps=steps, batch=batch, block_length=block
    )
    if as_json:
        names = {"model": options.shape().name, "hardware": options.profile().name}
        _print_json({**names, "context": context, "rows": rows})
    else:
        typer.echo(ceilings_text(rows))


@app.command()
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
    _note(*profile.warnings)
    memory, length = options.memory(profile), pipeline.settings.block_length

    def throughput(size: int) -> float:
        result = simulate(pipeline, profile, options.workload(length, size), memory=memory)
        if result.throughput_tok_s is None:
            message = f"peak needs answers of two blocks or more: pass --gen-tokens {2 * length} or above"
            raise ConfigError(message)
        return result.throughput_tok_s

    found = find_peak(pipeline, options.workload(length).largest_request_tokens, memory, throughput)
    if as_json:
        names = {"model": pipeline.model.name, "method": method, "hardware": profile.name}
        _print_json({**names, "context": context, **found.as_dict()})
    else:
        typer.echo(peak_text(found))


@app.command()
def describe(
    model: Model,
    method: Method,
    context: Annotated[int, typer.Option("--context", help="Tokens of a request, for pool sizes.")] = 32768,
    block: Block = None,
    budget: BudgetShare = None,
    set_: Sets = None,
    svg: Annotated[Path | None, typer.Option("--svg", help="Write the streams and edges as a picture.")] = None,
    as_json: Json = False,
) -> None:
    """The description of a method: streams, stages, edges and pools."""
    from herald_pipeline import describe as description
    from herald_pipeline.errors import check_number, raise_problems
    from herald_pipeline.trace import check_writable
    from herald_sim.options import Options

    raise_problems([check_number(context, "context", minimum=1, integer=True)])
    _refuse(
        "says nothing of a description, which has no machine; write settings.NAME=VALUE",
        {f"--set {text}": not text.startswith("settings.") for text in set_ or ()},
    )
    if svg is not None:
        check_writable(svg, "picture")
    pipeline = Options(model, method, "", block=block, budget=budget, sets=set_ or ()).pipeline()
    if svg is not None:
        svg.write_text(description.to_svg(pipeline), encoding="utf-8")
        _note(f"wrote {svg}")
    if as_json:
        _print_json(description.to_dict(pipeline, context))
    else:
        typer.echo(description.to_text(pipeline, context))


@app.command()
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
    _note(*profile.warnings)
    found = explained(pipeline, profile, options.workload(pipeline.settings.block_length))
    if "beyond_memory" in found.result.extra:
        _note(f"beyond memory: {found.result.extra['beyond_memory']}; nothing shows that this batch could be held")
    if as_json:
        _print_json(found.as_dict())
    else:
        typer.echo(explanation_text(found))


@app.command()
def sweep(
    grid: Annotated[Path, typer.Option("--grid", help="TOML with [base] and [grid]; see herald_sim/sweep.py.")],
    out: Annotated[Path, typer.Option("--out", help="Folder; points that it holds already are not run again.")],
    on: Annotated[str, typer.Option("--on", help="local, or dask=ADDRESS of an existing scheduler.")] = "local",
    workers: Annotated[int | None, typer.Option("--workers", help="Local processes [default: the cores].")] = None,
    fast: Annotated[bool, typer.Option("--fast", help="Leave contention out where fast mode covers a point.")] = False,
    as_json: Json = False,
) -> None:
    """Every combination of a grid: infeasible points are marked and never win."""
    import os

    from herald_pipeline.errors import ConfigError, check_number, raise_problems
    from herald_sim import sweep as sweeping
    from herald_sim.text import summary_text

    cores = len(os.sched_getaffinity(0)) if workers is None else workers
    raise_problems([check_number(cores, "workers", minimum=1, integer=True)])
    place, _, address = on.partition("=")
    if (place, bool(address)) not in (("local", False), ("dask", True)):
        message = f"--on must be 'local' or 'dask=ADDRESS', got {on!r}"
        raise ConfigError(message)
    points = sweeping.read_grid(grid)
    crew = sweeping.local_workers(cores) if place == "local" else sweeping.dask_workers(address)
    summary = sweeping.sweep(points, out, crew, fast=fast)
    if as_json:
        _print_json(summary)
    else:
        typer.echo(summary_text(summary))
    _note(f"points in {out / sweeping.POINTS}")


@app.command()
def exhibit(
    name: Annotated[
        str, typer.Argument(help="table-2, fig-4, -5, -8, -12, -13, -14, budget-cost, fit, identified, dsb-main, ...")
    ],
    hardware: Annotated[str, typer.Option("--hardware", help="Profile to recompute it on.")] = PAPER_HARDWARE,
    engine: Engine = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """A published figure or table, recomputed, with the printed values beside ours."""
    from herald_pipeline import hardware_io
    from herald_sim import exhibits
    from herald_sim.exhibits.text import exhibit_text

    profile = hardware_io.resolve(hardware, engine, set_ or ())
    _note(*profile.warnings)
    rows = exhibits.rows(name, profile)
    if as_json:
        _print_json({"exhibit": name, "hardware": profile.name, "rows": rows})
    else:
        typer.echo(exhibit_text(name, rows))


@app.command()
def claims(
    verdict: Annotated[str | None, typer.Option("--verdict", help="Only claims with this verdict.")] = None,
    as_json: Json = False,
) -> None:
    """Every numeric claim of the two papers, how it is tested, and what came of it."""
    from herald_sim.listing import claim_rows, claims_text

    rows = claim_rows(verdict)
    if as_json:
        _print_json({"claims": rows})
    else:
        typer.echo(claims_text(rows))


@app.command()
def models(as_json: Json = False) -> None:
    """The models known by name, with where each fact was read."""
    from herald_sim.listing import model_rows, models_text

    rows = model_rows()
    if as_json:
        _print_json({"models": rows})
    else:
        typer.echo(models_text(rows))


@app.command()
def methods(as_json: Json = False) -> None:
    """The methods, each a choice on six axes."""
    from herald_sim.listing import method_rows, methods_text

    rows = method_rows()
    if as_json:
        _print_json({"methods": rows})
    else:
        typer.echo(methods_text(rows))


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(help="One profile, or a path: all its numbers.")] = None,
    as_json: Json = False,
) -> None:
    """The machine profiles and the methods that each can price; with a name, where each of its numbers comes from."""
    from herald_sim.listing import hardware_rows, hardware_text, quantities_text

    rows = hardware_rows(name)
    if as_json:
        _print_json({"hardware": rows})
    else:
        typer.echo(hardware_text(rows) if name is None else quantities_text(rows[0]))


def _refuse(why: str, given: dict[str, bool]) -> None:
    """Refuse what was given and would change nothing."""
    from herald_pipeline.errors import raise_problems

    raise_problems(f"{name} {why}" for name, found in given.items() if found)


def _starting(sets: list[str] | None, prefix: str) -> dict[str, bool]:
    return {f"--set {text}": text.startswith(prefix) for text in sets or ()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _note(*lines: str) -> None:
    for line in lines:
        typer.echo(line, err=True)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, allow_nan=False))


def main() -> None:
    """Run the command; a user's mistake is one message on stderr and an exit code, never a traceback."""
    try:
        check_environment()
        app()
    except HeraldError as error:
        typer.echo(f"herald-sim: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
