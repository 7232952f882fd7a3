"""``python -m herald_exec.evaluation decoding`` and ``decoding-show``: schedules on the reference model."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.errors import check_number, raise_problems
from herald_pipeline.outputs import check_ending


def decoding(
    model: Annotated[
        str, typer.Option("--model", help="herald-ref-bidirectional, or the folder of a model trained like it.")
    ] = "herald-ref-bidirectional",
    reduced: Annotated[bool, typer.Option("--reduced", help="The plan for two CPU cores.")] = False,
    group: Annotated[list[str] | None, typer.Option("--group", help="Only these; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="few, many; may be repeated.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="A cell, instead of the plan's.")] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    batch: Annotated[int | None, typer.Option("--batch", help="Prompts decoded together [4; 256 on a GPU].")] = None,
    part: Annotated[str, typer.Option("--part", help="i/n: a share of the cells, about equal in work.")] = "1/1",
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON lines, one a cell, raw answers included; a run goes on from it.")
    ] = None,
) -> None:
    """Accuracy, forwards and speed of decoders x schedulers x caches, and sweeps of one factor at a time."""
    from herald_exec.checkpoints.memory import resolve_device, resolve_dtype
    from herald_exec.evaluation.decoding_grid import run_plan
    from herald_exec.evaluation.decoding_plan import PLAN, REDUCED, check_plan
    from herald_exec.evaluation.decoding_report import text
    from herald_exec.evaluation.resuming import parse_part
    from herald_exec.reference import NAMES, open_reference, read_shipped_material
    from herald_pipeline.errors import unknown_name

    check_ending(out, (".jsonl", ".json"), "a JSON object a line")
    share = parse_part(part)
    plan = REDUCED if reduced else PLAN
    known = [name for name, _ in plan.groups]
    for name in group or ():
        if name not in known:
            raise unknown_name("group", name, known)
    groups = tuple(named for named in plan.groups if not group or named[0] in group)
    plan = replace(plan, groups=groups, tasks=tuple(task or plan.tasks))
    if samples is not None:
        plan = replace(plan, samples=samples, ratio_samples=min(samples, plan.ratio_samples))
    target = resolve_device(device)
    size = (4 if target.type == "cpu" else 256) if batch is None else batch
    raise_problems([check_number(size, "--batch", minimum=1, integer=True)])
    check_plan(plan)
    if not Path(model).is_dir() and model != NAMES[1]:
        raise unknown_name("reference model", model, (NAMES[1],))
    folder = Path(model) if Path(model).is_dir() else None
    # fp32 on the CPU, where bf16 is slow; as stored on a GPU.
    loaded = open_reference(NAMES[1], folder).load(target, resolve_dtype("fp32" if target.type == "cpu" else None))
    rows = []
    for row in run_plan(loaded, read_shipped_material(folder), plan, batch=size, part=share, out=out):
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "raw"}), flush=True)
    print(text(rows), file=sys.stderr)


def show_decoding(
    results: Annotated[
        list[Path], typer.Argument(help="JSON lines that decoding --out wrote, its parts together; .gz is read too.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object without the raw answers; reports build --decoding reads it.")
    ] = False,
) -> None:
    """Every cell of a decoding run as tables, losses marked."""
    from herald_exec.evaluation.decoding_report import read_parts, summary, text

    rows = read_parts(results)
    print(json.dumps(summary(rows)) if as_json else text(rows))


def register(app: typer.Typer) -> None:
    """Mount the two commands."""
    app.command("decoding")(decoding)
    app.command("decoding-show")(show_decoding)
