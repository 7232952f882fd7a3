"""Replicas on one host, foretold and measured: whether HERALD scales with the GPUs of a host that share its DRAM.

Cells ``replicas:..`` of ``python -m benchmarks.gpu`` ran one replica alone and then all at once, each on a GPU and on
cores of its own. The prediction knows of them what the profile says: the DRAM's rate with all threads, and of the raw
tables what a replica's threads reach.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from calibration import conditions, profile_file
from calibration.points import Point
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError
from herald_pipeline.model import ModelShape
from herald_sim.replicas import simulate_replicas

Say = Callable[[str], None]
FIGURES = ("alone_tok_s", "throughput_tok_s", "scaling")
"""One replica alone, all of them together, and the second over the first."""


def compare(hardware: Path, measured: Path, shape: ModelShape, say: Say) -> dict[str, Any]:
    """A row a cell: each of :data:`FIGURES` foretold and measured, and the error of the foretold one.

    Raises
    ------
    ConfigError
        The folder holds no cell of replicas of this model.
    """
    path = hardware_io.find(hardware)
    rows = []
    for document in _cells(measured, shape.name, say):
        result = document["result"]
        foretold = predict(path, shape, result)
        row: dict[str, Any] = {"cell": document["cell"], "replicas": result["replicas"], "cores": result["cores"]}
        for name in FIGURES:
            if result.get(name):
                error = foretold[name] / result[name] - 1
                row[name] = {"predicted": foretold[name], "measured": result[name], "error": error}
        rows.append(row)
    if not rows:
        raise ConfigError(
            f"{measured} holds no replicas of {shape.name}; python -m benchmarks.gpu --plan replicas --model "
            f"{shape.name} --out {measured} runs them"
        )
    return {"hardware": hardware_io.resolve(path).name, "model": shape.name, "rows": rows}


def predict(hardware: Path, shape: ModelShape, result: Mapping[str, Any]) -> dict[str, float]:
    """What the replicas of a cell's result would give, from the profile alone."""
    one = result["alone"]
    met = tuple((name, value) for name, value in sorted(one["options"].items()) if name in conditions.NAMES)
    point = Point(
        one["method"], one["context"], one["batch"], one["steps"], one["blocks"], one["block_length"], one["kv_dtype"],
        one["options"].get("budget"), conditions=met,
    )  # fmt: skip
    profile = conditions.under(hardware_io.resolve(hardware), met, profile_file.raw_folder(hardware))
    found = simulate_replicas(
        point.pipeline(shape), profile, point.workload(), int(result["replicas"]), beyond_memory=True
    )
    return {
        "alone_tok_s": found.alone.throughput_tok_s or 0.0,
        "throughput_tok_s": found.throughput_tok_s,
        "scaling": found.scaling or 0.0,
    }


def _cells(folder: Path, model: str, say: Say) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("replicas-*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as problem:
            raise ConfigError(f"{path} is no JSON: {problem}") from None
        if "error" in document:
            say(f"{document['cell']}: left out, it failed: {document['error'][:120]}")
        elif document.get("model") != model:
            say(f"{document['cell']}: left out, it ran {document.get('model')}")
        else:
            found.append(document)
    return found


def text(found: Mapping[str, Any]) -> str:
    """Lines of a cell each."""
    lines = [f"replicas of {found['model']} on {found['hardware']}: error = predicted / measured - 1", ""]
    head = f"{'cell':44} {'':16} {'measured':>10} {'predicted':>10} {'error':>8}"
    lines.append(head)
    for row in found["rows"]:
        for name in FIGURES:
            if name in row:
                each = row[name]
                digits = 2 if name == "scaling" else 1
                lines.append(
                    f"{row['cell'] if name == FIGURES[0] else '':44} {name:16} {each['measured']:>10,.{digits}f} "
                    f"{each['predicted']:>10,.{digits}f} {each['error']:>+8.1%}"
                )
    return "\n".join(lines)
