"""``herald-exec run``: one configuration for real.

herald-exec run --model tiny --method herald --context 4096 --batch 4 --blocks 6 --check
herald-exec run --model llada2-mini --method herald --device cuda --context 32768 --batch 80 --synthetic-kv
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from herald_exec.footprint import require_host_memory
from herald_exec.limits import kv_room
from herald_pipeline import catalogue, methods, trace
from herald_pipeline import pipeline as pipelines
from herald_pipeline.environment import threads_problem
from herald_pipeline.errors import ConfigError, RunError, check_number, raise_problems
from herald_pipeline.help_pages import grouped
from herald_pipeline.model import ModelShape
from herald_pipeline.outputs import check_ending
from herald_pipeline.pipeline import Pipeline
from herald_pipeline.settings import Settings, more_than_all, read_settings
from herald_pipeline.steps import Steps, parse, read_commits, read_steps
from herald_pipeline.workload import Workload

if TYPE_CHECKING:
    from herald_exec.models.base import BlockModel
    from herald_exec.policy import Policy
    from herald_exec.requests import DecodeRequest
    from herald_pipeline.result import Result

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


@dataclass(frozen=True, slots=True)
class Choices:
    """What the options say, before any of it is looked up."""

    model: str
    method: str
    context: int | None
    batch: int
    blocks: int | None
    gen_tokens: int | None
    steps: str | None
    steps_file: Path | None
    commits: Path | None
    decoder: str | None
    threshold: float | None
    block: int | None
    budget: float | None
    requests: Path | None
    batch_policy: str
    seed: int
    sets: Sequence[str]
    weights: str
    keys: str = "full"


def load_model(choices: Choices, device: str, dtype: str | None, host_limit_gb: float | None = None) -> "BlockModel":
    """Model by name with seeded random weights, or from a folder.

    A run of random weights that this machine's memory cannot hold is refused before they are drawn, unless
    ``host_limit_gb`` says what there is.
    """
    from herald_exec.checkpoints.memory import require_memory, resolve_device, resolve_dtype, total_host_bytes
    from herald_exec.checkpoints.named import open_model
    from herald_exec.models import random_model
    from herald_exec.pools import TORCH_DTYPES

    target, wanted = resolve_device(device), resolve_dtype(dtype)
    if choices.weights not in ("random", "checkpoint"):
        message = f"--weights must be random or checkpoint, got {choices.weights!r}"
        raise ConfigError(message)
    if choices.weights == "checkpoint":
        checkpoint = open_model(choices.model)
        require_memory(checkpoint, target, wanted)
        return checkpoint.load(target, wanted)
    shape = catalogue.resolve(choices.model)
    if wanted is None:
        # fp32 is exact and fast enough on the CPU; a GPU runs what it is built for.
        wanted = resolve_dtype("fp32" if target.type == "cpu" else "bf16")
    assert wanted is not None
    if host_limit_gb is None:
        kv = next(name for name, dtype in TORCH_DTYPES.items() if dtype is wanted)
        pipeline = _described(choices, shape, kv)
        lengths = workload(choices, pipeline.settings.block_length)
        require_host_memory(
            pipeline, lengths, total_host_bytes(), weight_bytes=wanted.itemsize, on_gpu=target.type == "cuda"
        )
    return random_model(shape, choices.seed, device=target, dtype=wanted)


def describe(choices: Choices, model: "BlockModel") -> Pipeline:
    """The method for the model, with KV stored in the model's type."""
    from herald_exec.pools import TORCH_DTYPES

    kv = next(name for name, dtype in TORCH_DTYPES.items() if dtype is model.kv_dtype)
    return _described(choices, model.shape, kv)


def _described(choices: Choices, shape: ModelShape, kv: str) -> Pipeline:
    changes: dict[str, Any] = {
        "block_length": shape.block_length if choices.block is None else choices.block,
        "kv_dtype": kv,
        "dram_kv_dtype": kv,
        "keys": choices.keys,
    }
    if choices.budget is not None:
        changes["budget"] = choices.budget
    given = {"block_length": choices.block, "budget": choices.budget, "keys": None if choices.keys == "full" else 1}
    changes.update(read_settings(choices.sets, [name for name, value in given.items() if value is not None]))
    return pipelines.build(shape, methods.get(choices.method), **changes)


def plan(choices: Choices, settings: Settings) -> Steps | None:
    """Denoising steps of each block, or ``None`` where confidences decide."""
    block_length = settings.block_length
    given = {
        "--steps": choices.steps,
        "--steps-file": choices.steps_file,
        "--commits": choices.commits,
        "--decoder": choices.decoder,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        message = f"{' and '.join(named)} each say how many steps a block takes: give one"
        raise ConfigError(message)
    if choices.threshold is not None and choices.decoder is None:
        message = "--threshold belongs to a --decoder; with steps that are planned nothing reads it"
        raise ConfigError(message)
    if choices.decoder is not None:
        return None
    if choices.steps_file is not None:
        return read_steps(choices.steps_file, block_length)
    if choices.commits is not None:
        if settings.window_length > block_length:
            message = (
                "--commits: a recording of a window that slides counts the tokens of the whole window and does not say "
                "which they were, so it cannot be repeated for real; replay it with `herald-sim run --method "
                f"{choices.method} --commits {choices.commits}`"
            )
            raise ConfigError(message)
        return read_commits(choices.commits, block_length)
    return parse(choices.steps or str(min(20, block_length)), block_length, choices.seed)


def policy(choices: Choices, steps: Steps | None, mask_token_id: int) -> "Policy":
    """How tokens are accepted: by the plan, or by a rule over the model's confidences."""
    from herald_exec.policy import PlannedPolicy, RulePolicy
    from herald_pipeline.decoding import acceptance
    from herald_pipeline.decoding.sampling import Sampler

    sampler = Sampler(mask_token_id=mask_token_id)
    if steps is not None:
        return PlannedPolicy(steps, sampler, seed=choices.seed)
    assert choices.decoder is not None
    params = {} if choices.threshold is None else {"threshold": choices.threshold}
    return RulePolicy(acceptance.get(choices.decoder, **params), sampler, seed=choices.seed)


def workload(choices: Choices, block_length: int) -> Workload:
    """Requests as lengths."""
    if choices.requests is not None:
        if choices.context is not None or choices.blocks is not None or choices.gen_tokens is not None:
            message = "--requests states lengths itself: leave out --context, --blocks and --gen-tokens"
            raise ConfigError(message)
        return Workload.from_csv(
            choices.requests, choices.batch, block_length=block_length, policy=choices.batch_policy
        )
    if choices.context is None:
        message = "--context is missing: completed KV entries per request when decoding starts"
        raise ConfigError(message)
    if choices.blocks is not None and choices.gen_tokens is not None:
        message = "--blocks and --gen-tokens both say how long an answer is: give one"
        raise ConfigError(message)
    if choices.blocks is not None:
        raise_problems([check_number(choices.blocks, "blocks", minimum=1, integer=True)])
    gen_tokens = choices.gen_tokens if choices.blocks is None else choices.blocks * block_length
    return Workload.uniform(
        choices.context, choices.batch, gen_tokens=gen_tokens, block_length=block_length, policy=choices.batch_policy
    )


def draw_requests(lengths: Workload, vocab_size: int, mask_token_id: int, seed: int) -> list["DecodeRequest"]:
    """Prompts of seeded random tokens; what a request holds depends on its id and the seed alone."""
    import torch

    from herald_exec.requests import DecodeRequest

    found = []
    for request in lengths.requests:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + request.id)
        tokens = torch.randint(0, vocab_size - 1, (request.prompt_tokens,), generator=generator)
        # One id is left out, the mask's: speed runs hold ordinary text only.
        tokens += tokens >= mask_token_id
        found.append(DecodeRequest(request.id, tuple(tokens.tolist()), request.new_tokens, request.arrival_ns))
    return found


def result_text(result: "Result") -> str:
    """Figures for people, one a line; what could not be derived is left out, retrieval too where none was counted."""
    shown = {
        "throughput": ("throughput_tok_s", "tok/s, decode, warm-up blocks excluded"),
        "block time": ("block_time_s", "s"),
        "main": ("main_time_s", "s a block"),
        "retrieval": ("retrieval_time_s", "s a pass, from its first launch to its last"),
        "stall": ("stall_s", "s a block: main waits"),
        "forwards": ("forwards_per_block", "a block"),
        "tokens": ("tokens_per_forward", "a forward"),
        "prefill": ("prefill_time_s", "s"),
        "finished": ("finished", "requests"),
        "delivered": ("delivered_tokens", "tokens"),
    }
    lines = []
    for name, (key, unit) in shown.items():
        value = getattr(result, key)
        if value is not None and (value or key != "retrieval_time_s"):
            lines.append(
                f"{name:<11}{value:>14.6g} {unit}" if isinstance(value, float) else f"{name:<11}{value:>14} {unit}"
            )
    lines += [f"rejected   {reason}" for reason in result.rejected.values()]
    lines += [f"assumes    {text}" for text in result.assumptions]
    path = str(result.extra.get("device_path", "fused"))
    if path != "fused":
        lines.append(f"device     {path}; a fraction of the device's speed")
    if result.beyond_max_positions:
        lines.append("note       beyond the model's positions: speed only, the text means nothing there")
    return "\n".join(lines)


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
        model,
        method,
        context,
        batch,
        blocks,
        gen_tokens,
        steps,
        steps_file,
        commits,
        decoder,
        threshold,
        block,
        budget,
        requests,
        batch_policy,
        seed,
        set_ or (),
        weights,
        keys,
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
    methods.get(method)
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
        pinned = done.result.extra["pinned"]
        done.trace.facts = {"model": model, "method": method, "device": device, "pinned": pinned}
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
