"""``python -m herald_exec.evaluation``: what selection costs in accuracy, and how much of the best selection it finds.

python -m herald_exec.evaluation study --reduced --out out/study.jsonl
python -m herald_exec.evaluation show out/study.jsonl
python -m herald_exec.evaluation grid --reduced
python -m herald_exec.evaluation recall --context 1024 --samples 4
python -m herald_exec.evaluation decoding --reduced --out out/decoding.jsonl
python -m herald_exec.evaluation decoding-show out/decoding.jsonl
python -m herald_exec.evaluation sliding --reduced --out out/sliding.jsonl
python -m herald_exec.evaluation sliding-show out/sliding.jsonl
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from herald_exec.evaluation import decoding_command, sliding_command
from herald_pipeline.environment import threads_problem
from herald_pipeline.errors import HeraldError, check_number, raise_problems
from herald_pipeline.help_pages import program
from herald_pipeline.outputs import check_ending

if TYPE_CHECKING:
    from herald_exec.models.base import BlockModel
    from herald_exec.reference.tasks import Material

app = program()


@app.callback()
def evaluation() -> None:
    """Accuracy by method and budget, and recall of selections, on the reference model's tasks."""


Model = Annotated[str, typer.Option("--model", help="herald-ref, or the folder of a model trained like it.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
Out = Annotated[Path | None, typer.Option("--out", help="JSON lines, one a cell, raw answers included.")]


def _load(model: str, device: str) -> "tuple[BlockModel, Material]":
    from herald_exec.checkpoints.memory import resolve_device, resolve_dtype
    from herald_exec.checkpoints.named import open_model
    from herald_exec.reference import read_shipped_material

    target = resolve_device(device)
    # fp32 on the CPU, where bf16 is slow; as stored on a GPU.
    loaded = open_model(model).load(target, resolve_dtype("fp32" if target.type == "cpu" else None))
    return loaded, read_shipped_material(Path(model) if "/" in model else None)


def _write(row: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(json.dumps({key: value for key, value in row.items() if key != "raw"}), flush=True)


@app.command()
def study(
    model: Model = "herald-ref",
    reduced: Annotated[bool, typer.Option("--reduced", help="The plan for two CPU cores.")] = False,
    rule: Annotated[list[str] | None, typer.Option("--rule", help="Only these; may be repeated.")] = None,
    budget: Annotated[list[float] | None, typer.Option("--budget", help="Instead of the plan's.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only these; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Instead of the plan's.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Instead of the plan's.")] = None,
    threshold: Annotated[float, typer.Option("--threshold", help="Of acceptance.")] = 0.95,
    part: Annotated[str, typer.Option("--part", help="i/n: every n-th cell, so that n machines share a plan.")] = "1/1",
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON lines, one a cell, raw answers included; a run goes on from it.")
    ] = None,
) -> None:
    """Accuracy, T and retrieval cost of every rule and budget of the plan; all rules share one prefill."""
    from herald_exec.evaluation.plan import FULL, REDUCED, check_study, read_study, run_study, study_facts
    from herald_exec.evaluation.resuming import parse_part

    check_ending(out, (".jsonl", ".json"), "a JSON object a line")
    plan = REDUCED if reduced else FULL
    known = dict(plan.rules)
    rules = {name: tuple(budget or known.get(name, (0.05,))) for name in rule or known}
    if "dense" in rules:
        rules["dense"] = (1.0,)
    plan = replace(plan, rules=tuple(rules.items()), tasks=tuple(task or plan.tasks))
    plan = replace(plan, contexts=tuple(context or plan.contexts))
    plan = replace(plan, samples=plan.samples if samples is None else samples, threshold=threshold)
    check_study(plan)
    share = parse_part(part)
    loaded, material = _load(model, device)
    done = read_study(out, study_facts(loaded, plan)) if out is not None else {}
    for row in run_study(loaded, material, plan, part=share, done=done):
        _write(row, out)


Results = Annotated[list[Path], typer.Argument(help="JSON lines that study --out wrote, also as .gz; all parts.")]


@app.command()
def show(results: Results, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """Table I's counterpart, the cost front, and T, from a study's results."""
    from herald_exec.evaluation.summary import read_rows, summary, text

    found = summary(read_rows(*results))
    print(json.dumps(found) if as_json else text(found))


@app.command()
def steps(
    results: Results,
    rule: Annotated[str, typer.Option("--rule", help="Whose T.")] = "herald",
    budget: Annotated[float | None, typer.Option("--budget", help="At this budget [the only one].")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only these; may be repeated.")] = None,
    out: Annotated[Path, typer.Option("--out", help="CSV: T by request (line) and block (column).")] = Path(
        "steps.csv"
    ),
) -> None:
    """T of every block that was decoded, as herald-sim run --steps-file reads it; prints their histogram."""
    from herald_exec.evaluation.summary import histogram, read_rows, steps_lines

    check_ending(out, (".csv", ".txt"), "CSV")
    lines = steps_lines(read_rows(*results), rule, budget, task)
    out.write_text("".join(",".join(map(str, line)) + "\n" for line in lines), encoding="utf-8")
    print(json.dumps({"requests": len(lines), "histogram": histogram(lines)}))


@app.command()
def grid(
    model: Model = "herald-ref",
    reduced: Annotated[bool, typer.Option("--reduced", help="The plan for two CPU cores.")] = False,
    method: Annotated[list[str] | None, typer.Option("--method", help="Only these; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only these; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Instead of the plan's.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Instead of the plan's.")] = None,
    device: Device = "cpu",
    batch: Annotated[int, typer.Option("--batch", help="Prompts decoded together.")] = 8,
    threads: Annotated[int | None, typer.Option("--threads", help="Of the CPU kernels [all].")] = None,
    out: Out = None,
) -> None:
    """Accuracy of every method and budget of the plan, by the executor."""
    from herald_exec.evaluation.grid import PLAN, REDUCED, check_plan, run_grid
    from herald_pipeline import methods

    check_ending(out, (".jsonl", ".json"), "a JSON object a line")
    plan = REDUCED if reduced else PLAN
    if method:
        known = dict(plan.methods)
        plan = replace(plan, methods=tuple((methods.get(name).name, known.get(name, ())) for name in method))
    plan = replace(plan, tasks=tuple(task or plan.tasks), contexts=tuple(context or plan.contexts))
    plan = replace(plan, samples=plan.samples if samples is None else samples)
    raise_problems([check_number(batch, "--batch", minimum=1, integer=True), threads_problem(threads, "--threads")])
    check_plan(plan)
    loaded, material = _load(model, device)
    for row in run_grid(loaded, material, plan, batch=batch, threads=threads):
        _write(row, out)


@app.command()
def recall(
    model: Model = "herald-ref",
    task: Annotated[
        list[str] | None, typer.Option("--task", help="May be repeated [default: log, rec, multi].")
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Prompt tokens.")] = 1024,
    samples: Annotated[int, typer.Option("--samples", help="Of each task.")] = 4,
    budget: Annotated[float, typer.Option("--budget", help="k as a share of the prefix.")] = 0.05,
    blocks: Annotated[int, typer.Option("--blocks", help="Longest answer; the first block has no selection.")] = 3,
    device: Device = "cpu",
    out: Out = None,
    summary: Annotated[Path | None, typer.Option("--summary", help="All that is printed as one JSON file.")] = None,
) -> None:
    """Recall of six selection rules against each step's oracle: the means of Figure 9, the buckets of Figure 7."""
    from herald_exec.evaluation.grid import FIRST_SEED
    from herald_exec.evaluation.recall import RecallStudy, budget_factors, by_bucket, mean_recall
    from herald_exec.reference.tasks import draw_samples

    check_ending(out, (".jsonl", ".json"), "a JSON object a line")
    check_ending(summary, (".json",), "a JSON object", "--summary")
    raise_problems(
        [
            check_number(samples, "--samples", minimum=1, integer=True),
            check_number(blocks, "--blocks", minimum=2, integer=True),
        ]
    )
    loaded, material = _load(model, device)
    rows: list[dict[str, Any]] = []
    for name in task or ("log", "rec", "multi"):
        study = RecallStudy(loaded, list(draw_samples(material, name, context, samples, FIRST_SEED)), budget=budget)
        rows += study.run(blocks)
    if out is not None:
        out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if summary is not None:
        from herald_exec.evaluation.recall_summary import summarise

        facts = {"model": loaded.shape.name, "budget": budget, "device": loaded.device.type}
        summary.write_text(json.dumps(summarise(rows, **facts)) + "\n", encoding="utf-8")
    means = [
        {"rule": rule, "factor": factor, "recall": value} for (rule, factor), value in sorted(mean_recall(rows).items())
    ]
    print(json.dumps({"pairs": len({(r["task"], r["sample"], r["block"], r["step"]) for r in rows}), "means": means}))
    for bucket in by_bucket(rows):
        print(json.dumps(bucket))
    for factor in (*budget_factors(rows), *budget_factors(rows, first_step=1)):
        print(json.dumps({"mage_recall_regained_at": factor}))


decoding_command.register(app)
sliding_command.register(app)


def main() -> None:
    """Run the command; a user's mistake is a message and an exit code, never a traceback."""
    try:
        app()
    except HeraldError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
