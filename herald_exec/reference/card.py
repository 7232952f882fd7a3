"""The model card's table of accuracy from the evaluation that a training run left; and two runs compared."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herald_pipeline.errors import ConfigError, read_failure

T_CONTEXT = 4096


def read_cells(folder: Path) -> list[dict[str, Any]]:
    """Cells of ``evaluation.json``; :class:`ConfigError` when there are none."""
    path = folder / "evaluation.json"
    try:
        cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {read_failure(error)}; python -m herald_exec.reference train writes it"
        raise ConfigError(message) from None
    if not cells:
        message = f"{path} holds no cells: the evaluation had no time; raise train's --evaluate-s"
        raise ConfigError(message)
    return cells


def accuracy_table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: exact match with its 95% interval by task and context, and T at 4K; empty where a cell was not run."""
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    contexts = sorted({cell["context"] for cell in cells})
    by_place = {(cell["task"], cell["context"]): cell for cell in cells}
    lines = [
        "| task | " + " | ".join(f"{round(context / 1024)}K" for context in contexts) + " | T at 4K |",
        "|---" * (len(contexts) + 2) + "|",
    ]
    for task in tasks:
        line = f"| {task} |"
        for context in contexts:
            cell = by_place.get((task, context))
            exact = None if cell is None else cell["exact"]
            line += "  |" if exact is None else f" {exact['value']:.2f} ({exact['low']:.2f}-{exact['high']:.2f}) |"
        at = by_place.get((task, T_CONTEXT))
        lines.append(line + ("  |" if at is None else f" {at['steps_per_block']:.1f} |"))
    return "\n".join(lines)


def compare_runs(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells that two trainings share: exact match of both, and the 95% interval of their difference.

    Newcombe's interval, from the two Wilson intervals, as if each run had drawn its own samples; ``alike`` where it
    holds 0. ``within`` where each value lies in the other's interval, which two equal models miss more often: in about
    a sixth of all cells.
    """
    others = {(cell["task"], cell["context"]): cell for cell in second}
    found = []
    for cell in first:
        other = others.get((cell["task"], cell["context"]))
        if other is None:
            continue
        a, b = cell["exact"], other["exact"]
        gap = b["value"] - a["value"]
        low = gap - math.hypot(b["value"] - b["low"], a["high"] - a["value"])
        high = gap + math.hypot(b["high"] - b["value"], a["value"] - a["low"])
        found.append(
            {
                "task": cell["task"],
                "context": cell["context"],
                "values": [a["value"], b["value"]],
                "difference": {"value": gap, "low": low, "high": high},
                "alike": low <= 0 <= high,
                "within": a["low"] <= b["value"] <= a["high"] and b["low"] <= a["value"] <= b["high"],
            }
        )
    if not found:
        message = "these two evaluations share no task and context"
        raise ConfigError(message)
    return found
