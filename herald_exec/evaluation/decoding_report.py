"""Results of :mod:`herald_exec.evaluation.decoding_grid` as text: every cell, by group and task, losses marked."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from herald_exec.evaluation.resuming import read_lines
from herald_pipeline.errors import ConfigError

_HEADER = (
    "cell",
    "right [95%]",
    "all right",
    "NFE [95%]",
    "NFE to EOS",
    "tok/fwd",
    "rows/fwd",
    "tok/s",
    "late",
    "premature",
    "worse than base in",
)


def read_results(path: Path) -> list[dict[str, Any]]:
    """Rows that ``decoding --out`` wrote, compressed by gzip or not."""
    rows = read_lines(path)
    if not rows or not all(isinstance(row, dict) and "cell" in row and "against_base" in row for row in rows):
        message = f"{path} holds no results of python -m herald_exec.evaluation decoding"
        raise ConfigError(message)
    return rows


FACTS = ("plan", "model", "weights", "device", "device_name", "torch", "dtype", "batch")
"""What the parts of one run share."""


def read_parts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of a run's parts, each cell once, group by group; a base that several parts ran is the first one's.

    Raises
    ------
    ConfigError
        The files are of different runs.
    """
    found: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] | None = None
    for path in paths:
        for row in read_results(path):
            own = {name: row.get(name) for name in FACTS}
            facts = facts or own
            other = [f"{name} {own[name]!r} instead of {facts[name]!r}" for name in FACTS if own[name] != facts[name]]
            if other:
                message = f"{path} is of another run than {paths[0]} ({'; '.join(other)}); show them apart"
                raise ConfigError(message)
            found.setdefault(json.dumps(row["cell"], sort_keys=True), row)
    return list(found.values())


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A run as one object: what all cells share, and every cell without its raw answers."""
    left = {"raw", *FACTS}
    cells = [{"name": name_of(row["cell"])} | {k: v for k, v in row.items() if k not in left} for row in rows]
    return {**{name: rows[0].get(name) for name in FACTS}, "cells": cells}


def name_of(cell: Mapping[str, Any]) -> str:
    """A cell in words: what differs from the defaults beside its three choices."""
    parts = [f"{cell['decoder']}+{cell['scheduler']}+{cell['cache']}", f"B{cell['s_init']}", f"L{cell['response']}"]
    if cell["scheduler"] == "dsb-greedy":
        parts.append(f"max {cell['s_max'] or 'inf'}")
    if cell["cache"] == "dsb":
        parts.append(f"p{cell['p_min']}")
    if cell["suffix"]:
        parts.append(f"suffix {cell['suffix']}")
    return " ".join(parts)


def _span(interval: Mapping[str, float | None], digits: int) -> str:
    value, low, high = interval["value"], interval["low"], interval["high"]
    if low is None or high is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _share(interval: Mapping[str, float | None] | None) -> str:
    return "-" if interval is None else _span(interval, 2)


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    speed, against = row["throughput_tok_s"], row["against_base"]
    return (
        name_of(row["cell"]),
        _span(row["accuracy"], 2),
        f"{row['all_right']['value']:.2f}",
        _span(row["nfe"], 1),
        f"{row['nfe_before_eos']['value']:.1f}",
        f"{row['tokens_per_forward_before_eos']:.2f}",
        f"{row['positions_per_forward']:.0f}",
        "-" if speed is None else f"{speed:.1f}",
        _share(row["late_ratio_before_eos"]),
        _share(row["premature_ratio_before_eos"]),
        ", ".join(against["marks"]) or "-",
    )


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    return "\n".join("  ".join(f"{text:<{w}}" for text, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _by_factor(part: list[Mapping[str, Any]], factor: str) -> list[Mapping[str, Any]]:
    """A sweep's cells by system, then by the factor swept, unbounded last; other groups as they are."""
    if not part or factor not in part[0]["cell"]:
        return part

    def place(row: Mapping[str, Any]) -> tuple[str, str, float]:
        cell = row["cell"]
        return cell["scheduler"], cell["cache"], math.inf if cell[factor] is None else cell[factor]

    return sorted(part, key=place)


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """All groups and tasks; a cell stands in every group that it belongs to."""
    first = rows[0]
    parts = [
        f"{first['model']} on {first['device_name']} ({first['dtype']}), batch {first['batch']}, plan {first['plan']}",
        "base: confidence + fixed 32 + none, same samples. accuracy: one-sided sign test over samples, p < .05, "
        "so about one cell in twenty by chance; NFE and tok/s: worse at all. late, premature: before the answer's EOS.",
    ]
    groups = list(dict.fromkeys(name for row in rows for name in row["groups"]))
    tasks = list(dict.fromkeys(row["cell"]["task"] for row in rows))
    for group in groups:
        for task in tasks:
            part = [row for row in rows if group in row["groups"] and row["cell"]["task"] == task]
            part = _by_factor(part, {"length": "response"}.get(group, group))
            if part:
                count = f"{min(r['samples'] for r in part)} to {max(r['samples'] for r in part)} samples"
                parts.append(f"\n{group}, {task} ({count} a cell)")
                parts.append(_table([_HEADER, *map(_line, part)]))
    return "\n".join(parts)
