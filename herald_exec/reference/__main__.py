"""``python -m herald_exec.reference``: make the data, train, evaluate. Results go to stdout, progress to stderr."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.errors import HeraldError, check_number, raise_problems, unknown_name
from herald_pipeline.help_pages import program
from herald_pipeline.outputs import check_ending

app = program()

Data = Annotated[Path, typer.Option("--data", help="Folder that generate-data wrote.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]


def _check_device(device: str) -> None:
    import torch

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise unknown_name(kind="device", name=device, valid=("cpu", "cuda"))
    if device.startswith("cuda") and not torch.cuda.is_available():
        from herald_pipeline.errors import ConfigError

        message = f"--device {device}: torch sees no CUDA device here; use --device cpu"
        raise ConfigError(message)


@app.command("generate-data")
def generate_data(
    packages: Annotated[Path, typer.Option("--packages", help="Folder into which the Debian packages were unpacked.")],
    out: Annotated[Path, typer.Option("--out", help="Where the data go.")] = Path("out/reference-data"),
    vocabulary: Annotated[
        Path | None, typer.Option("--vocabulary", help="Checkpoint whose tokenizer is kept, for training --from it.")
    ] = None,
) -> None:
    """Tokenizer, words and filler text from unpacked Debian packages (NOTICE names them)."""
    from herald_exec.reference import recipe
    from herald_exec.reference.prepare import prepare

    sizes = prepare(packages, out, recipe.get("reference").shape.max_positions, vocabulary)
    print(json.dumps(sizes))


@app.command("train")
def train_(
    data: Data = Path("out/reference-data"),
    out: Annotated[Path, typer.Option("--out", help="Folder of the checkpoint.")] = Path("out/herald-ref"),
    state: Annotated[Path | None, typer.Option("--state", help="Resume file [default: beside --out].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the resume file.")] = False,
    start: Annotated[Path | None, typer.Option("--from", help="Checkpoint whose weights it begins with.")] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="reference; longer, finish, aligned (with --from); tiny (learns nothing).",
        ),
    ] = "reference",
    device: Device = "cuda",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    steps: Annotated[int | None, typer.Option("--steps", help="Instead of the recipe's.")] = None,
    time_limit_s: Annotated[float | None, typer.Option("--time-limit-s", help="End by then, schedules fitted.")] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes that make batches.")] = 1,
    evaluate_s: Annotated[float, typer.Option("--evaluate-s", help="Longest evaluation at the end; 0: none.")] = 60.0,
    samples: Annotated[int, typer.Option("--samples", help="Of each task and context in it.")] = 64,
) -> None:
    """Train the reference model and write a checkpoint folder; prints the run's record."""
    from herald_exec.reference import recipe as recipes
    from herald_exec.reference.train import TrainOptions, train

    _check_device(device)
    raise_problems(
        [
            check_number(workers, "--workers", minimum=0, integer=True),
            check_number(samples, "--samples", minimum=1, integer=True),
            check_number(evaluate_s, "--evaluate-s", minimum=0),
            None if time_limit_s is None else check_number(time_limit_s, "--time-limit-s", above=0),
            None if seed >= 0 else f"--seed: {seed} is negative; seeds are 0 and up",
        ]
    )
    state = state or out.with_name(f"{out.name}.resume.pt")
    if resume and not state.exists():
        raise_problems([f"--resume: {state} does not exist; name the file with --state or leave --resume out"])
    options = TrainOptions(
        data=data,
        out=out,
        state=state,
        device=device,
        seed=seed,
        workers=workers,
        time_limit_s=time_limit_s,
        evaluate_s=evaluate_s,
        evaluate_samples=samples,
        resume=resume,
        start=start,
    )
    print(json.dumps(train(recipes.get(recipe, steps=steps), options)))


@app.command("evaluate")
def evaluate_(
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder [default: the shipped one].")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="May be given again [default: all].")] = None,
    context: Annotated[list[int] | None, typer.Option("--context", help="Prompt tokens [default: 1024].")] = None,
    samples: Annotated[int, typer.Option("--samples")] = 16,
    threshold: Annotated[float, typer.Option("--threshold", help="Of acceptance.")] = 0.95,
    device: Device = "cpu",
    batch: Annotated[int, typer.Option("--batch", help="Prompts decoded together.")] = 16,
) -> None:
    """Dense accuracy by task and context, held-out samples; one JSON line a cell."""
    import torch

    from herald_exec.reference import open_reference, read_shipped_material
    from herald_exec.reference.evaluate import grid
    from herald_exec.reference.tasks import TASKS

    _check_device(device)
    raise_problems(
        [
            check_number(samples, "--samples", minimum=1, integer=True),
            check_number(batch, "--batch", minimum=1, integer=True),
            check_number(threshold, "--threshold", minimum=0, maximum=1),
        ]
    )
    checkpoint = open_reference(folder=model)
    loaded = checkpoint.load(device, torch.float32 if device == "cpu" else torch.bfloat16)
    material = read_shipped_material(model)
    cells = grid(loaded, material, task or TASKS, context or [1024], samples, threshold=threshold, batch=batch)
    for cell in cells:
        print(json.dumps(cell), flush=True)


@app.command("answers")
def answers_(
    method: Annotated[
        list[str] | None, typer.Option("--method", help="May be given again [default: dense, herald].")
    ] = None,
    task: Annotated[list[str] | None, typer.Option("--task", help="May be given again [default: all].")] = None,
    context: Annotated[int, typer.Option("--context", help="Prompt tokens.")] = 1024,
    samples: Annotated[int, typer.Option("--samples", help="Questions in all.")] = 7,
    budget: Annotated[float | None, typer.Option("--budget", help="Share of the prefix selected.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file [default: stdout].")] = None,
) -> None:
    """The same held-out questions answered by several methods: every answer, right or wrong, as one JSON object."""
    import torch

    from herald_exec.checkpoints.tokenizer import load_tokenizer
    from herald_exec.reference import open_reference, read_shipped_material
    from herald_exec.reference.answers import ask
    from herald_exec.reference.tasks import TASKS
    from herald_pipeline import methods

    check_ending(out, (".json",), "a JSON object")
    raise_problems([check_number(samples, "--samples", minimum=1, integer=True)])
    chosen = [methods.get(name).name for name in method or ("dense", "herald")]
    checkpoint = open_reference()
    found = ask(
        checkpoint.load("cpu", torch.float32),
        load_tokenizer(checkpoint.folder),
        read_shipped_material(),
        chosen,
        task or TASKS,
        context,
        samples,
        budget=budget,
    )
    text = json.dumps(found, allow_nan=False)
    if out is None:
        print(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n", encoding="utf-8")
    for name, total in found["methods"].items():
        print(f"  {name:<14}{total['right']} of {total['of']} right, {total['seconds']:.1f} s", file=sys.stderr)


@app.command("table")
def table_(
    model: Annotated[Path | None, typer.Option("--model", help="Checkpoint folder [default: the shipped one].")] = None,
) -> None:
    """The model card's table of accuracy, from the evaluation that training left."""
    from herald_exec.reference import SHIPPED
    from herald_exec.reference.card import accuracy_table, read_cells

    print(accuracy_table(read_cells(model or SHIPPED)))


@app.command("compare")
def compare_(
    first: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    second: Annotated[Path, typer.Argument(help="Folder of another, for example of the same seed.")],
) -> None:
    """Whether two trainings are equally accurate: every cell's difference with its 95% interval, one JSON object."""
    from herald_exec.reference.card import compare_runs, read_cells

    cells = compare_runs(read_cells(first), read_cells(second))
    counts = {name: sum(cell[name] for cell in cells) for name in ("alike", "within")}
    print(json.dumps({"cells": len(cells), **counts, "rows": cells}))


def main() -> None:
    """Run the command; a user's mistake is a message and exit code 1 or 2, never a traceback."""
    try:
        app()
    except HeraldError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
