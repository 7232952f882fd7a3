"""What a study's cells say together: a table by rule and task, the cost front, T; numbers and plain text.

Differences from Dense are paired: the same sample under both rules, resampled 2,000 times with a fixed seed.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from herald_exec.evaluation.plan import study_key
from herald_exec.evaluation.resuming import read_lines
from herald_exec.evaluation.rules import RULES, When
from herald_exec.reference.scoring import wilson_interval
from herald_pipeline.errors import ConfigError, unknown_name

RESAMPLES = 2000
_NEEDED = frozenset({"rule", "budget", "task", "context", "exact", "partial", "scan_bytes", "selections", "raw"})


def read_rows(*paths: Path) -> list[dict[str, Any]]:
    """Cells of files that ``study --out`` wrote (``.gz``: compressed since); of a cell written twice the later counts.

    Raises
    ------
    ConfigError
        A file holds no cells, or the cells are of other weights or samples than the first one's.
    """
    rows = [row for path in paths for row in _read(path)]
    for name in ("weights", "samples", "first_seed", "threshold"):
        values = list(dict.fromkeys(row.get(name) for row in rows))
        if len(values) > 1:
            message = f"these cells differ in {name}: {', '.join(map(str, values))}; show runs of one kind at a time"
            raise ConfigError(message)
    latest = {study_key(row): row for row in rows}
    return list(latest.values())


def _read(path: Path) -> list[dict[str, Any]]:
    rows = read_lines(path)
    if any(isinstance(row, dict) and "slide" in row for row in rows):
        # Without their slide, cells of one rule and budget would be taken for one another.
        message = (
            f"{path} holds cells of windows that slide; show them with: python -m herald_exec.evaluation sliding-show"
        )
        raise ConfigError(message)
    if not rows or any(not isinstance(row, dict) or not row.keys() >= _NEEDED for row in rows):
        message = (
            f"{path} holds no cells of a study; write it with: python -m herald_exec.evaluation study --out {path}"
        )
        raise ConfigError(message)
    return rows


def paired_interval(differences: Sequence[float], seed: int = 0) -> dict[str, float]:
    """Mean of paired differences with its 95% bootstrap interval."""
    values = np.asarray(differences, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
    return {"value": float(values.mean()), "low": float(low), "high": float(high)}


def _scores(row: dict[str, Any]) -> dict[tuple[str, int, int], float]:
    return {(row["task"], row["context"], raw["seed"]): raw["exact"] for raw in row["raw"]}


def _grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], list[dict[str, Any]]]:
    groups: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["rule"], row["budget"]].append(row)
    return groups


def _per_selection(cells: Sequence[dict[str, Any]]) -> float:
    """Bytes that a selection of one request reads on average; 0 where none is made."""
    selections = sum(cell["selections"] for cell in cells)
    return float(sum(cell["scan_bytes"] for cell in cells) / selections) if selections else 0.0


def selecting(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells of tasks whose answers run over several blocks, so that every rule that scans also selects there.

    In answers of one block an overlapped rule has nothing to choose: prefill selects with all B queries.
    """
    scanning = {name for name, rule in RULES.items() if rule.when in (When.STEP0, When.PROXY, When.AHEAD)}
    tasks = {(row["task"], row["context"]) for row in rows}
    for row in rows:
        if row["rule"] in scanning and 2 * row["selections"] < len(row["raw"]):
            tasks.discard((row["task"], row["context"]))
    return [row for row in rows if (row["task"], row["context"]) in tasks]


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a rule and budget: every task's scores, their mean, the paired difference from Dense, and costs."""
    groups = _grouped(rows)
    dense: dict[tuple[str, int, int], float] = {}
    for (rule, _), cells in groups.items():
        if rule == "dense":
            dense = {key: score for cell in cells for key, score in _scores(cell).items()}
    found = []
    for (rule, budget), cells in groups.items():
        scores = {key: score for cell in cells for key, score in _scores(cell).items()}
        blocks = [taken for cell in cells for raw in cell["raw"] for taken in raw["steps"]]
        shared = [score - dense[key] for key, score in scores.items() if key in dense]
        found.append(
            {
                "rule": rule,
                "budget": budget,
                "queries": cells[0]["queries"],
                "samples": len(scores),
                "exact": wilson_interval(sum(scores.values()), len(scores))._asdict(),
                "partial": float(np.mean([raw["partial"] for cell in cells for raw in cell["raw"]])),
                "minus_dense": paired_interval(shared) if shared and rule != "dense" else None,
                "steps_per_block": float(np.mean(blocks)),
                "scan_bytes": _per_selection(cells),
                "tasks": {f"{cell['task']}@{cell['context']}": cell["exact"] for cell in cells},
            }
        )
    return found


def front(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rules by the bytes that one selection reads, over the tasks of :func:`selecting`.

    ``best`` where no other reads as little, asks as few queries, keeps as few entries and is as accurate or better.
    """
    points = [entry for entry in table(selecting(rows)) if entry["scan_bytes"] > 0]

    def beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
        costs = [(x["scan_bytes"], x["queries"], x["budget"], -x["exact"]["value"]) for x in (a, b)]
        return costs[0] != costs[1] and all(x <= y for x, y in zip(*costs, strict=True))

    ordered = sorted(points, key=lambda entry: (entry["scan_bytes"], -entry["exact"]["value"]))
    return [
        {key: entry[key] for key in ("rule", "budget", "queries", "scan_bytes", "samples", "exact", "steps_per_block")}
        | {"tasks": sorted(entry["tasks"]), "best": not any(beats(other, entry) for other in points)}
        for entry in ordered
    ]


NEAR = 0.01
"""Near-lossless: at most so far below Dense in exact match."""


def needed_budgets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The smallest budget at which each rule is within a point of Dense, ``None`` where none that was run is.

    ``budget`` by the mean difference, ``surely`` by its 95% interval's lower end; over all ``tasks`` and over those
    with answers of several blocks (:func:`selecting`), where an overlapped rule has selections to make.
    """
    found = []
    for kind, part in (("all", rows), ("several blocks", selecting(rows))):
        by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in table(part):
            if entry["minus_dense"] is not None:
                by_rule[entry["rule"]].append(entry)
        for rule, entries in by_rule.items():
            smallest = {
                name: min((entry["budget"] for entry in entries if entry["minus_dense"][end] >= -NEAR), default=None)
                for name, end in (("budget", "value"), ("surely", "low"))
            }
            found.append({"tasks": kind, "rule": rule, "largest": max(entry["budget"] for entry in entries)} | smallest)
    return found


def histogram(lines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Blocks by T."""
    return dict(sorted(Counter(taken for line in lines for taken in line).items()))


def steps_lines(
    rows: Sequence[dict[str, Any]], rule: str, budget: float | None, tasks: Sequence[str] | None = None
) -> list[list[int]]:
    """T of each block, a list a request, of one rule and budget."""
    rules = sorted({row["rule"] for row in rows})
    if rule not in rules:
        raise unknown_name(kind="rule of these results", name=rule, valid=rules)
    budgets = sorted({row["budget"] for row in rows if row["rule"] == rule})
    if (budget is None and len(budgets) > 1) or (budget is not None and budget not in budgets):
        message = f"--budget: {rule} was run at {', '.join(map(str, budgets))}; name one of them"
        raise ConfigError(message)
    known = sorted({row["task"] for row in rows})
    for task in tasks or ():
        if task not in known:
            raise unknown_name(kind="task of these results", name=task, valid=known)
    wanted = budgets[0] if budget is None else budget
    chosen = [row for row in rows if row["rule"] == rule and row["budget"] == wanted]
    return [raw["steps"] for row in chosen if not tasks or row["task"] in tasks for raw in row["raw"]]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Table, front, the budgets that suffice, and T of every rule and budget."""
    return {
        "table": table(rows),
        "front": front(rows),
        "needed": needed_budgets(rows),
        "steps": [
            {"rule": rule, "budget": budget, "histogram": histogram(steps_lines(rows, rule, budget))}
            for rule, budget in _grouped(rows)
        ],
    }


def text(found: dict[str, Any]) -> str:
    """The summary for a terminal: exact match in percent, differences from Dense with 95% intervals."""
    tasks = list(dict.fromkeys(task for entry in found["table"] for task in entry["tasks"]))
    head = f"{'rule':17} {'budget':>6} {'exact':>6} {'minus Dense (95%)':>22} {'T':>5} {'MB/pass':>9}"
    lines = [head + "".join(f" {task:>11}" for task in tasks)]
    for entry in found["table"]:
        gap = entry["minus_dense"]
        against = (
            "" if gap is None else f"{100 * gap['value']:+.1f} ({100 * gap['low']:+.1f}..{100 * gap['high']:+.1f})"
        )
        line = f"{entry['rule']:17} {entry['budget']:6.3f} {100 * entry['exact']['value']:6.1f} {against:>22}"
        line += f" {entry['steps_per_block']:5.1f} {entry['scan_bytes'] / 1e6:9.3f}"
        for task in tasks:
            score = entry["tasks"].get(task)
            line += f" {'':>11}" if score is None else f" {100 * score['value']:11.1f}"
        lines.append(line)
    lines += ["", f"Smallest budget within {100 * NEAR:.0f} point of Dense (and with its whole interval):"]
    for entry in found["needed"]:
        value, surely = (
            f"above {entry['largest']:.3f}" if entry[name] is None else f"{entry[name]:.3f}"
            for name in ("budget", "surely")
        )
        lines.append(f"  {entry['tasks']:15} {entry['rule']:17} {value} ({surely})")
    if not found["front"]:
        return "\n".join([*lines, "", "No task here has answers of several blocks, so there is no front to show."])
    over = ", ".join(found["front"][0]["tasks"])
    lines += ["", f"Accuracy on {over} against retrieval cost; * where no other costs less and is as accurate:"]
    for point in found["front"]:
        lines.append(
            f"{'*' if point['best'] else ' '} {point['rule']:17} {point['budget']:6.3f} {point['queries']:3d} queries "
            f"{point['scan_bytes'] / 1e6:9.3f} MB a selection  {100 * point['exact']['value']:5.1f}"
        )
    return "\n".join(lines)
