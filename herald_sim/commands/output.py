"""What commands print: notes on stderr, one JSON object on stdout; and refusals of options without effect."""

import json
from typing import Any

import typer


def refuse(why: str, given: dict[str, bool]) -> None:
    """Refuse what was given and would change nothing."""
    from herald_pipeline.errors import raise_problems

    raise_problems(f"{name} {why}" for name, found in given.items() if found)


def starting(sets: list[str] | None, prefix: str) -> dict[str, bool]:
    """``--set`` texts, and whether each starts with ``prefix``: for :func:`refuse`."""
    return {f"--set {text}": text.startswith(prefix) for text in sets or ()}


def is_number(value: object) -> bool:
    """Whether ``value`` prints as a number."""
    return isinstance(value, int | float)


def note(*lines: str) -> None:
    """Lines beside the answer, on stderr."""
    for line in lines:
        typer.echo(line, err=True)


def print_json(value: dict[str, Any]) -> None:
    """The answer as one JSON object, on stdout; NaN and infinity are a fault of ours."""
    typer.echo(json.dumps(value, allow_nan=False))
