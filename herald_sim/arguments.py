"""Options that several commands of `herald-sim` share: name, type and help, once."""

from pathlib import Path
from typing import Annotated

import typer

from herald_pipeline.settings import more_than_all


def _all_of_it(budget: float | None) -> float | None:
    """Say on stderr that a budget above 1 is everything: 5 was perhaps meant as 5%."""
    said = None if budget is None else more_than_all(budget)
    if said is not None:
        typer.echo(said, err=True)
    return budget


Model = Annotated[str, typer.Option("--model", help="Name, or path of a config.json.")]
Method = Annotated[str, typer.Option("--method", help="Name; see `herald-sim methods`.")]
Hardware = Annotated[str, typer.Option("--hardware", help="Name, or path of a profile TOML.")]
Engine = Annotated[str | None, typer.Option("--engine", help="Engine of the profile [default: the one it names].")]
Context = Annotated[
    int | None, typer.Option("--context", help="Completed KV entries per request at the start, in tokens.")
]
Batch = Annotated[int | None, typer.Option("--batch", help="Requests decoded together.")]
StepsText = Annotated[
    str | None,
    typer.Option(
        "--steps", help="T: 20, a list 20,12,8, or uniform:8,24, normal:20,4, geometric:6 [default: 20, at most B]."
    ),
]
StepsFile = Annotated[Path | None, typer.Option("--steps-file", help="T by request (line) and block (column).")]
Commits = Annotated[Path | None, typer.Option("--commits", help="Accepted tokens per step, recorded by a real run.")]
Cache = Annotated[
    str | None, typer.Option("--cache", help="Cache rule of a bidirectional model, with --commits of bench-decoding.")
]
Scheduler = Annotated[str | None, typer.Option("--scheduler", help="Block scheduler of a bidirectional model.")]
Decoder = Annotated[str, typer.Option("--decoder", help="Which recordings to take, with --cache or --scheduler.")]
SMax = Annotated[int | None, typer.Option("--s-max", help="Cap of a sliding block [default: the scheduler's].")]
PrefixWindow = Annotated[int | None, typer.Option("--prefix-window", help="p_min of the dsb cache [24; 4 for Dream].")]
Block = Annotated[int | None, typer.Option("--block", help="Block length B [default: the model's].")]
BudgetShare = Annotated[
    float | None,
    typer.Option("--budget", callback=_all_of_it, help="Share of KV selected, 0.05 for 5% [default: the method's]."),
]
KvDtype = Annotated[
    str | None, typer.Option("--kv-dtype", help="bf16, fp8, int8: KV in both memories and on the link.")
]
Keys = Annotated[
    str, typer.Option("--keys", help="What selection on the CPU reads: full (the paper), key-only or int8.")
]
GenTokens = Annotated[int | None, typer.Option("--gen-tokens", help="Tokens of each answer [default: 512].")]
Requests = Annotated[
    Path | None, typer.Option("--requests", help="CSV: prompt_tokens, new_tokens, optional id and arrival_s.")
]
Policy = Annotated[str, typer.Option("--batch-policy", help="lockstep, two-batch-overlap, first-done-first-out.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of drawn steps.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="PATH=VALUE, repeatable: machine.link.h2d_gb_s=25, engine.x=y, settings.queries=4."),
]
HbmLimit = Annotated[float | None, typer.Option("--hbm-limit-gb", help="Device memory to stay within, in GB.")]
HostLimit = Annotated[float | None, typer.Option("--host-limit-gb", help="Host memory to stay within, in GB.")]
LinkLimit = Annotated[float | None, typer.Option("--link-limit-gb-s", help="Highest link rate per direction, in GB/s.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
