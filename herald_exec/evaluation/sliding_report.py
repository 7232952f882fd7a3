"""A sliding run's cells as one table: by slide, rule and budget, with paired differences; numbers and markdown."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from herald_exec.evaluation.resuming import read_lines
from herald_exec.evaluation.sliding_plan import FIXED, sliding_key
from herald_exec.evaluation.summary import paired_interval
from herald_exec.reference.scoring import wilson_interval
from herald_pipeline.errors import ConfigError

Cells = Sequence[dict[str, Any]]
Config = tuple[str, str, float]
"""Slide, rule, budget."""


def read_cells(*paths: Path) -> list[dict[str, Any]]:
    """Cells of files that ``sliding --out`` wrote, also as ``.gz``; of a cell written twice the later counts."""
    rows = [row for path in paths for row in read_lines(path)]
    if not rows or any(not isinstance(row, dict) or "slide" not in row for row in rows):
        message = f"{', '.join(map(str, paths))}: no cells of a sliding run; write them with sliding --out"
        raise ConfigError(message)
    kinds = {tuple(row[name] for name in ("weights", "samples", "first_seed", "threshold")) for row in rows}
    if len(kinds) > 1:
        message = "these cells are of different runs (weights, samples, seeds or threshold); show one run at a time"
        raise ConfigError(message)
    return list({sliding_key(row): row for row in rows}.values())


def _samples(cells: Cells) -> dict[tuple[str, int, int], dict[str, Any]]:
    return {(cell["task"], cell["context"], raw["seed"]): raw for cell in cells for raw in cell["raw"]}


def _difference(ours: Cells, others: Cells | None) -> dict[str, float] | None:
    """Paired difference in exact match over the samples that both have; ``None`` without any."""
    if not others:
        return None
    left, right = _samples(ours), _samples(others)
    shared = [float(raw["exact"]) - float(right[key]["exact"]) for key, raw in left.items() if key in right]
    return paired_interval(shared) if shared else None


def _grouped(rows: Cells) -> dict[Config, list[dict[str, Any]]]:
    groups: dict[Config, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["slide"], row["rule"], row["budget"]].append(row)
    return groups


def shared_tasks(rows: Cells) -> list[tuple[str, int]]:
    """Tasks and contexts that every slide, rule and budget ran: means are over these, so that they compare."""
    ran = [[(cell["task"], cell["context"]) for cell in cells] for cells in _grouped(rows).values()]
    return [task for task in dict.fromkeys(ran[0]) if all(task in other for other in ran)]


def table(rows: Cells) -> list[dict[str, Any]]:
    """One entry a slide, rule and budget: scores, differences from fixed blocks and from dense, cost a token.

    All but ``tasks`` is over :func:`shared_tasks`. ``forwards_without_ahead`` is no measurement but a bound: it leaves
    out both forwards of every period that was complete before its step, as a slide of any length might.
    """
    shared = shared_tasks(rows)
    if not shared:
        message = "no task was run by every slide, rule and budget of these cells, so nothing compares: run the rest"
        raise ConfigError(message)
    everything = _grouped(rows)
    groups = _grouped([row for row in rows if (row["task"], row["context"]) in shared])
    found = []
    for (slide, rule, budget), cells in groups.items():
        raws = [raw for cell in cells for raw in cell["raw"]]
        tokens = sum(raw["tokens"] for raw in raws)
        forwards = sum(sum(raw["steps"]) + len(raw["steps"]) for raw in raws)
        periods = sum(len(raw["steps"]) for raw in raws)
        right = sum(raw["exact"] for raw in raws)
        ahead = sum(round(cell["ahead"] * sum(len(raw["steps"]) for raw in cell["raw"])) for cell in cells)
        found.append(
            {
                "slide": slide,
                "rule": rule,
                "budget": budget,
                "samples": len(raws),
                "exact": wilson_interval(right, len(raws))._asdict(),
                "minus_fixed": None
                if slide == FIXED.name
                else _difference(cells, groups.get((FIXED.name, rule, budget))),
                "minus_dense": None if rule == "dense" else _difference(cells, groups.get((slide, "dense", 1.0))),
                "steps_per_period": sum(sum(raw["steps"]) for raw in raws) / periods,
                "forwards_per_token": forwards / tokens,
                "ahead": ahead / periods,
                "forwards_without_ahead": (forwards - 2 * ahead) / tokens,
                "selections_per_token": sum(cell["selections"] for cell in cells) / tokens,
                "scan_bytes_per_token": sum(cell["scan_bytes"] for cell in cells) / tokens,
                "tasks": {
                    f"{cell['task']}@{cell['context']}": cell["exact"] for cell in everything[slide, rule, budget]
                },
            }
        )
    return found


def text(rows: Cells) -> str:
    """The table in markdown, all of it."""
    entries = table(rows)
    tasks = list(dict.fromkeys(task for entry in entries for task in entry["tasks"]))
    over = ", ".join(f"{task}@{context}" for task, context in shared_tasks(rows))
    head = ["slide", "rule", "budget", "right", "minus fixed (95%)", "minus dense (95%)"]
    head += ["steps a period", "ahead", "forwards a token", "without ahead", "retrievals a token", "kB a token", *tasks]
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for entry in entries:
        cells = [entry["slide"], entry["rule"], f"{entry['budget']:.3g}", f"{100 * entry['exact']['value']:.1f}"]
        cells += [_points(entry["minus_fixed"]), _points(entry["minus_dense"]), f"{entry['steps_per_period']:.2f}"]
        cells += [f"{100 * entry['ahead']:.0f}%", f"{entry['forwards_per_token']:.3f}"]
        cells.append(f"{entry['forwards_without_ahead']:.3f}")
        cells += [f"{entry['selections_per_token']:.3f}", f"{entry['scan_bytes_per_token'] / 1e3:.0f}"]
        cells += [f"{100 * entry['tasks'][t]['value']:.1f}" if t in entry["tasks"] else "not run" for t in tasks]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([f"All but the last {len(tasks)} columns: over {over}.", "", *lines])


def _points(difference: dict[str, float] | None) -> str:
    if difference is None:
        return "-"
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
