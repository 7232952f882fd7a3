"""``herald-exec evaluate --harness``: scores of a checkpoint on lm-eval tasks.

herald-exec evaluate --harness --model DIR --suite gsm8k --scheduler dsb-greedy --cache dsb
herald-exec evaluate --harness --model DIR --suite 2wikimqa --method herald --budget 0.05 --device cuda
herald-exec evaluate --harness --model DIR --task mine --tasks-dir ./my_tasks --limit 20 --json
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from herald_exec.evaluation.harness import Selection, require_harness, run_harness, suite_selection
from herald_exec.evaluation.suites import SUITES, get_suite
from herald_pipeline import methods
from herald_pipeline.errors import ConfigError, raise_problems


def select(suite: str | None, tasks: list[str], tasks_dirs: list[Path], num_fewshot: int | None) -> Selection:
    """What the options name: a suite as it is pinned, or own tasks."""
    if suite is not None:
        if tasks or tasks_dirs or num_fewshot is not None:
            message = "--suite fixes tasks and examples; use --task with --tasks-dir for settings of your own"
            raise ConfigError(message)
        return suite_selection(get_suite(suite))
    if not tasks or not tasks_dirs:
        message = f"name a suite ({', '.join(SUITES)}), or a --task with the --tasks-dir that defines it"
        raise ConfigError(message)
    return Selection(tuple(tasks), tuple(tasks_dirs), num_fewshot)


def _print(report: dict[str, Any]) -> None:
    for task, metrics in report["scores"].items():
        for metric, value in metrics.items():
            typer.echo(f"{task:<40} {metric:<34} {value:.4f}")
    took = report["decoding"]
    typer.echo(
        f"{took['requests']} prompts ({took['truncated']} truncated), "
        f"{took['tokens']} tokens in {took['seconds']:.1f} s ({took['tokens_per_second']:.1f} tokens/s with prefill), "
        f"{took['tokens_per_forward']:.2f} tokens/forward"
    )
    pinned = "as pinned" if report["pinned"] else "; ".join(report["deviations"]) or "no pinned suite"
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items() if name != "tasks")
    tasks = ", ".join(f"{task} v{found}" for task, found in report["versions"]["tasks"].items())
    typer.echo(f"{pinned}: {tasks}; {versions}")


def harness_command(
    model: Annotated[str, typer.Option(help="Checkpoint folder, or herald-ref.")],
    harness: Annotated[bool, typer.Option("--harness", help="lm-eval's tasks; --suite and --task imply it.")] = False,
    suite: Annotated[str | None, typer.Option(help=f"As a paper ran it: {', '.join(SUITES)}.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="lm-eval task of --tasks-dir; may be repeated.")] = None,
    tasks_dir: Annotated[list[Path] | None, typer.Option(help="Folder of lm-eval task files.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Worked examples; the task's own by default.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first documents of each task.", min=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Length of an answer; the suite's, else 256.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Longest prompt; by the model's positions.")] = None,
    block: Annotated[int | None, typer.Option(help="Block length B; the checkpoint's own by default.")] = None,
    decoder: Annotated[str, typer.Option(help="Acceptance rule.")] = "confidence",
    threshold: Annotated[float | None, typer.Option(help="Confidence; the suite's, else the model's usual.")] = None,
    scheduler: Annotated[str, typer.Option(help="Block scheduler of bidirectional models.")] = "fixed",
    cache: Annotated[str, typer.Option(help="Cache rule of bidirectional models.")] = "none",
    steps: Annotated[int, typer.Option(help="Denoising steps a block, for rules with a schedule.")] = 32,
    method: Annotated[str, typer.Option(help="Method of block-causal models.")] = "dense",
    budget: Annotated[float | None, typer.Option(help="Share of the prefix that a method selects.")] = None,
    batch: Annotated[int, typer.Option(help="Prompts that run together.")] = 8,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; as stored by default.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Prompts through the chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of decoders that draw.")] = 0,
    samples: Annotated[bool, typer.Option("--samples", help="Every answer in the JSON.")] = False,
    middle_truncation: Annotated[bool, typer.Option("--middle-truncation", help="Cut long prompts' middle.")] = False,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run what the model writes.")
    ] = False,
    allow_other_versions: Annotated[
        bool, typer.Option("--allow-other-versions", help="Run unpinned task versions.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Score a checkpoint on lm-eval tasks, with the papers' settings by name."""
    if not (harness or suite or task):
        message = "say what to evaluate: --harness with --suite or --task"
        raise ConfigError(message)
    raise_problems([methods.get(method).execution_problem()])
    require_harness()
    selection = select(suite, task or [], tasks_dir or [], num_fewshot)
    from herald_exec.evaluation.harness_model import HeraldLM

    pinned = selection.suite
    rule_threshold = threshold
    if rule_threshold is None and pinned is not None and decoder == "confidence":
        rule_threshold = pinned.threshold
    lm = HeraldLM(
        model,
        max_new_tokens=max_tokens or (pinned.max_new_tokens if pinned is not None else 256),
        max_prompt_tokens=max_prompt_tokens,
        middle_truncation=middle_truncation or (pinned is not None and pinned.middle_truncation),
        batch_size=batch,
        device=device,
        dtype=dtype,
        block=block,
        decoder=decoder,
        threshold=rule_threshold,
        scheduler=scheduler,
        cache=cache,
        steps=steps,
        method=method,
        budget=budget,
        seed=seed,
    )
    report = run_harness(
        lm,
        selection,
        limit=limit,
        chat=chat,
        allow_code_execution=allow_code_execution,
        allow_other_versions=allow_other_versions,
        samples=samples,
    )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
