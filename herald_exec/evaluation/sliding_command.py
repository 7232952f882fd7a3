"""``python -m herald_exec.evaluation sliding`` and ``sliding-show``: a window that slides over HERALD's pools."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.errors import unknown_name
from herald_pipeline.outputs import check_ending


def sliding(
    model: Annotated[str, typer.Option("--model", help="herald-ref, or the folder of a model trained like it.")] = (
        "herald-ref"
    ),
    reduced: Annotated[bool, typer.Option("--reduced", help="The plan for two CPU cores.")] = False,
    slide: Annotated[
        list[str] | None, typer.Option("--slide", help="stride/window, as 8/32, instead of the plan's; repeatable.")
    ] = None,
    rule: Annotated[list[str] | None, typer.Option("--rule", help="Only these; may be repeated.")] = None,
    budget: Annotated[list[float] | None, typer.Option("--budget", help="Instead of the plan's.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="Only these; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Instead of the plan's.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Instead of the plan's.")] = None,
    part: Annotated[str, typer.Option("--part", help="i/n: every n-th cell, so that n machines share a plan.")] = "1/1",
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON lines, one a cell, raw answers included; a run goes on from it.")
    ] = None,
) -> None:
    """Accuracy, forwards, retrievals and bytes a token of sliding windows beside fixed blocks."""
    from herald_exec.checkpoints.memory import resolve_device, resolve_dtype
    from herald_exec.evaluation.resuming import parse_part
    from herald_exec.evaluation.sliding_plan import (
        PLAN,
        REDUCED,
        Group,
        check_plan,
        parse_slide,
        read_sliding,
        run_sliding,
        sliding_facts,
    )
    from herald_exec.evaluation.sliding_report import text
    from herald_exec.reference import NAMES, open_reference, read_shipped_material

    check_ending(out, (".jsonl", ".json"), "a JSON object a line")
    plan = REDUCED if reduced else PLAN
    if slide or rule or budget:
        # A choice of its own replaces the groups: every slide with every rule.
        known = {name: budgets for group in reversed(plan.groups) for name, budgets in group.rules}
        names = rule or list(known)
        rules = tuple((name, (1.0,) if name == "dense" else tuple(budget or known.get(name, (0.1,)))) for name in names)
        slides = tuple(parse_slide(each) for each in slide or ()) or plan.groups[0].slides
        tasks = tuple(dict.fromkeys(name for group in plan.groups for name in group.tasks))
        plan = replace(plan, groups=(Group(slides, rules, tuple(task or tasks)),))
    elif task:
        named = [name for group in plan.groups for name in group.tasks]
        kept = [replace(group, tasks=tuple(name for name in group.tasks if name in task)) for group in plan.groups]
        others = tuple(name for name in task if name not in named)
        plan = replace(plan, groups=(*kept, *((replace(plan.groups[0], tasks=others),) if others else ())))
    plan = replace(plan, contexts=tuple(context or plan.contexts))
    plan = replace(plan, samples=plan.samples if samples is None else samples)
    check_plan(plan)
    share = parse_part(part)
    if not Path(model).is_dir() and model != NAMES[0]:
        raise unknown_name("reference model", model, (NAMES[0],))
    folder, target = Path(model) if Path(model).is_dir() else None, resolve_device(device)
    # fp32 on the CPU, where bf16 is slow; as stored on a GPU.
    loaded = open_reference(NAMES[0], folder).load(target, resolve_dtype("fp32" if target.type == "cpu" else None))
    done = read_sliding(out, sliding_facts(loaded, plan)) if out is not None else {}
    rows = list(done.values())
    for row in run_sliding(loaded, read_shipped_material(folder), plan, part=share, done=done):
        rows.append(row)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "raw"}), flush=True)
    if share == (1, 1):
        print(text(rows), file=sys.stderr)


def show_sliding(
    results: Annotated[
        list[Path], typer.Argument(help="JSON lines that sliding --out wrote, its parts together; .gz is read too.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object without the raw answers.")] = False,
) -> None:
    """Every slide, rule and budget of a sliding run as one table, with paired differences."""
    from herald_exec.evaluation.sliding_report import read_cells, table, text

    rows = read_cells(*results)
    print(json.dumps({"table": table(rows)}) if as_json else text(rows))


def register(app: typer.Typer) -> None:
    """Mount the two commands."""
    app.command("sliding")(sliding)
    app.command("sliding-show")(show_sliding)
