"""`herald-sim run`: one configuration, simulated."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from herald_pipeline.help_pages import grouped
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
    Keys,
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
from herald_sim.commands.output import is_number, note, print_json, refuse, starting

HELP = grouped(
    {
        "What runs": "--model --method --hardware --engine --context --batch --gen-tokens --requests --batch-policy",
        "Steps of each block": "--steps --steps-file --commits --seed",
        "Settings": "--block --budget --kv-dtype --keys --set",
        "Limits": "--hbm-limit-gb --host-limit-gb --link-limit-gb-s --beyond-memory",
        "Bidirectional models": "--cache --scheduler --decoder --s-max --prefix-window",
        "Simulation and output": "--fast --check --interval --trace-out --json",
    }
)

if TYPE_CHECKING:
    from herald_sim.decoding_cost import DecodingChoice
    from herald_sim.options import Options


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
    keys: Keys = "full",
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
    from herald_pipeline.trace import check_trace_file
    from herald_sim.options import Options, resolved
    from herald_sim.simulate import simulate
    from herald_sim.text import result_text, wrapped

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
        keys,
    )
    if cache is not None or scheduler is not None:
        from herald_sim.decoding_cost import DecodingChoice

        refuse(
            "changes nothing with --cache or --scheduler, where recorded commits say what was decoded",
            {
                "--steps": steps is not None,
                "--steps-file": steps_file is not None,
                "--budget": budget is not None,
                "--kv-dtype": kv_dtype is not None,
                "--keys": keys != "full",
                "--gen-tokens": gen_tokens is not None,
                "--requests": requests is not None,
                "--batch-policy": batch_policy != "lockstep",
                "--trace-out": trace_out is not None,
                "--check": check,
                "--fast": fast,
                "--beyond-memory": beyond_memory,
                **starting(set_, "settings."),
            },
        )
        length = 32 if block is None else block
        choice = DecodingChoice(decoder, scheduler or "fixed", cache or "none", length, s_max, prefix_window)
        _run_decoding(options, choice, as_json)
        return
    refuse(
        "goes with --cache or --scheduler",
        {
            "--decoder": decoder != "confidence",
            "--s-max": s_max is not None,
            "--prefix-window": prefix_window is not None,
        },
    )
    if trace_out is not None:
        check_trace_file(trace_out)
    pipeline, profile = options.pipeline(), options.profile()
    workload = options.workload(pipeline.settings)
    note(*profile.warnings)
    rates = resolved(profile)
    stated = [f"{name} {value:g}" if is_number(value) else f"{name} {value}" for name, value in rates.items()]
    note(wrapped(f"rates: {', '.join(stated)}", hang=7))
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
        note(f"beyond memory: {result.extra['beyond_memory']}; nothing shows that this batch could be held")
    if interval and result.throughput_tok_s is not None:
        from dataclasses import replace

        from herald_sim.intervals import interval as interval_of

        known = interval_of(pipeline, profile, workload, result.throughput_tok_s, seed=seed)
        result = replace(result, interval=known)
    if as_json:
        print_json(result.to_dict())
    else:
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
    note(*profile.warnings)
    result = run_decoding(
        options.shape(),
        profile,
        choice,
        options.commits,
        batch=1 if options.batch is None else options.batch,
        context=options.context,
    )
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        typer.echo(f"{name:22} {value:.6g}" if isinstance(value, float) else f"{name:22} {value}")
