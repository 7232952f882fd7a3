"""``herald-exec run``: one configuration for real.

herald-exec run --model tiny --method herald --context 4096 --batch 4 --blocks 6 --check
herald-exec run --model llada2-mini --method herald --device cuda --context 32768 --batch 80 --synthetic-kv
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from herald_exec.limits import kv_room
from herald_exec.run_choices import Choices, describe, draw_requests, load_model, plan, policy, workload
from herald_exec.run_text import result_text
from herald_pipeline import methods, trace
from herald_pipeline.environment import threads_problem
from herald_pipeline.errors import RunError, raise_problems
from herald_pipeline.help_pages import grouped
from herald_pipeline.outputs import check_ending
from herald_pipeline.settings import more_than_all

HELP = grouped(
    {
        "What runs": "--model --weights --method --context --batch --blocks --gen-tokens --requests --batch-policy "
        "--synthetic-kv --seed",
        "Steps of each block": "--steps --steps-file --commits --decoder --threshold",
        "Settings": "--block --budget --keys --set",
        "Device": "--device --dtype --threads --pin --require-pinned",
        "Limits": "--hbm-limit-gb --host-limit-gb --link-limit-gb-s",
        "Checks and output": "--check --profile-ops --trace-out --commits-out --json",
    }
)


def say_all_of_it(budget: float | None) -> float | None:
    """Say on stderr that a budget above 1 is everything: 5 was perhaps meant as 5%."""
    said = None if budget is None else more_than_all(budget)
    if said is not None:
        typer.echo(said, err=True)
    return budget


def run(
    model: Annotated[str, typer.Option(help="Name (tiny, llada2-mini, ..), a config.json, or a checkpoint folder.")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(methods.names())}.")],
    context: Annotated[
        int | None, typer.Option(help="Completed KV entries per request at the start, in tokens.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 1,
    blocks: Annotated[int | None, typer.Option(help="Blocks of each answer, instead of --gen-tokens.")] = None,
    gen_tokens: Annotated[int | None, typer.Option(help="Tokens of each answer, instead of --blocks [512].")] = None,
    steps: Annotated[str | None, typer.Option(help="T: 20, a list 20,12,8, or uniform:8,24 [20, at most B].")] = None,
    steps_file: Annotated[Path | None, typer.Option(help="T by request (line) and block (column).")] = None,
    commits: Annotated[Path | None, typer.Option(help="Accepted tokens per step, as --commits-out wrote them.")] = None,
    decoder: Annotated[str | None, typer.Option(help="Acceptance rule over real confidences.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Confidence of the --decoder, 0 to 1 [its own].")] = None,
    block: Annotated[int | None, typer.Option(help="Block length B [the model's].")] = None,
    budget: Annotated[
        float | None, typer.Option(callback=say_all_of_it, help="Share of KV selected, 0.05 for 5% [the method's].")
    ] = None,
    keys: Annotated[
        str, typer.Option(help="What selection on the CPU reads: full (the paper), key-only or int8.")
    ] = "full",
    requests: Annotated[Path | None, typer.Option(help="CSV: prompt_tokens, new_tokens, id, arrival_s.")] = None,
    batch_policy: Annotated[str, typer.Option(help="lockstep, two-batch-overlap, first-done-first-out.")] = "lockstep",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 [fp32 on the CPU, bf16 on CUDA].")] = None,
    weights: Annotated[str, typer.Option(help="random (seeded; speed only) or checkpoint.")] = "random",
    synthetic_kv: Annotated[bool, typer.Option("--synthetic-kv", help="Random KV instead of a prefill.")] = False,
    threads: Annotated[int | None, typer.Option(help="Threads of the CPU kernels [all].")] = None,
    pin: Annotated[
        bool,
        typer.Option("--pin/--no-pin", help="Main and retrieval on cores of their own (CPU; not on a busy machine)."),
    ] = True,
    hbm_limit_gb: Annotated[float | None, typer.Option(help="Device memory to stay within, in GB.")] = None,
    host_limit_gb: Annotated[
        float | None, typer.Option(help="Host memory to stay within, in GB [all of this machine].")
    ] = None,
    link_limit_gb_s: Annotated[
        float | None, typer.Option(help="Hold copies back to this rate in each direction: a slower bus.")
    ] = None,
    require_pinned: Annotated[
        bool, typer.Option("--require-pinned", help="Refuse to run without pinned memory.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and drawn steps.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="settings.NAME=VALUE, repeatable.")] = None,
    trace_out: Annotated[Path | None, typer.Option(help="Chrome trace (.json or .json.gz).")] = None,
    commits_out: Annotated[
        Path | None, typer.Option(help="Accepted tokens per request, block and step, as JSON.")
    ] = None,
    profile_ops: Annotated[
        bool, typer.Option("--profile-ops", help="Torch operations by stage, as a table; slows the run down.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check positions in every pool at every read.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Run one configuration for real, on this machine."""
    choices = Choices(
        model=model,
        method=method,
        context=context,
        batch=batch,
        blocks=blocks,
        gen_tokens=gen_tokens,
        steps=steps,
        steps_file=steps_file,
        commits=commits,
        decoder=decoder,
        threshold=threshold,
        block=block,
        budget=budget,
        requests=requests,
        batch_policy=batch_policy,
        seed=seed,
        sets=set_ or (),
        weights=weights,
        keys=keys,
    )
    if require_pinned and not device.startswith("cuda"):
        message = f"--require-pinned: device {device!r} has no page-locked memory; use --device cuda, or leave it out"
        raise RunError(message)
    problems = [threads_problem(threads)]
    # Found now, not when the run is over.
    if commits_out is not None and (commits_out.is_dir() or not commits_out.parent.is_dir()):
        problems.append(f"cannot write the commits to {commits_out}: name a file in a folder that exists")
    raise_problems(problems)
    check_ending(commits_out, (".json",), "JSON", "--commits-out")
    if trace_out is not None:
        trace.check_trace_file(trace_out)
    # torch takes seconds to import: not for --help, nor for a misspelled option.
    raise_problems([methods.get(method).execution_problem(timed_only=synthetic_kv and not check)])
    from herald_exec.execution import Options, decode
    from herald_exec.op_times import OpTimes

    loaded = load_model(choices, device, dtype, host_limit_gb)
    pipeline = describe(choices, loaded)
    length = pipeline.settings.block_length
    lengths, steps_plan = workload(choices, length), plan(choices, pipeline.settings)
    # With checks of every access, or a rule over entropies, whole logits are held.
    fused = not check and choices.decoder != "entropy"
    on_gpu = device.startswith("cuda")
    room = kv_room(pipeline, lengths, hbm_limit_gb, host_limit_gb, on_gpu=on_gpu, synthetic=synthetic_kv, fused=fused)
    drawn = draw_requests(lengths, loaded.shape.vocab_size, loaded.shape.mask_token_id, seed)
    options = Options(
        batch=lengths.batch,
        policy=lengths.policy,
        kv_tokens=room,
        check=check,
        keep_trace=trace_out is not None,
        threads=threads,
        pin_cores=pin and device == "cpu",
        synthetic_kv=synthetic_kv,
        ignore_eos=weights == "random",
        link_limit_gb_s=link_limit_gb_s,
        seed=seed,
        op_times=OpTimes() if profile_ops else None,
    )
    done = decode(
        pipeline, loaded, drawn, policy=policy(choices, steps_plan, loaded.shape.mask_token_id), options=options
    )
    if done.trace is not None and trace_out is not None:
        trace.write_chrome(done.trace, trace_out)
    if commits_out is not None:
        recorded = [done.commits[request.id] for request in drawn if request.id in done.commits]
        try:
            commits_out.write_text(json.dumps(recorded), encoding="utf-8")
        except OSError as problem:
            message = f"cannot write the commits to {commits_out}: {problem.strerror}"
            raise RunError(message) from None
    document = done.result.to_dict()
    if options.op_times is not None:
        document["ops"] = [row._asdict() for row in options.op_times.rows]
    typer.echo(json.dumps(document, allow_nan=False) if as_json else result_text(done.result))
    if options.op_times is not None and not as_json:
        typer.echo(f"\n{options.op_times.table()}\nthe profiler's own time is inside; throughput is no measurement")
