"""Replicas on one host, predicted and measured: whether HERALD scales with the GPUs of a host that share its DRAM.

Cells ``replicas:..`` of ``python -m benchmarks.gpu`` ran one replica alone and then all at once, each on a GPU and on
cores of its own. The prediction knows of them what the profile says: the DRAM's rate with all threads, and of the raw
tables what a replica's threads reach.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from calibration import conditions, profile_file
from calibration.cells import documents, failed, unreadable
from calibration.points import Point
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError, check_number, raise_problems
from herald_pipeline.model import ModelShape
from herald_sim.replicas import simulate_replicas

Say = Callable[[str], None]
FIGURES = ("alone_tok_s", "throughput_tok_s", "scaling")
"""One replica alone, all of them together, and the second over the first."""


def compare(hardware: Path, measured: Path, shape: ModelShape, say: Say) -> dict[str, Any]:
    """A row a cell: each of :data:`FIGURES` predicted and measured, and the error of the predicted one.

    Raises
    ------
    ConfigError
        The folder holds no cell of replicas of this model.
    """
    path = hardware_io.find(hardware)
    rows = []
    for file, document in _cells(measured, shape.name, say):
        try:
            rows.append(_row(path, shape, document))
        except ConfigError as problem:
            raise ConfigError([f"{file}: {found}" for found in problem.problems]) from None
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise unreadable(file, problem) from None
    if not rows:
        raise ConfigError(
            f"{measured} holds no replicas of {shape.name}; python -m benchmarks.gpu --plan replicas --model "
            f"{shape.name} --out {measured} runs them"
        )
    return {"hardware": hardware_io.resolve(path).name, "model": shape.name, "rows": rows}


def _row(hardware: Path, shape: ModelShape, document: Mapping[str, Any]) -> dict[str, Any]:
    result = document["result"]
    measured = {name: result[name] for name in FIGURES if result.get(name) is not None}
    raise_problems(check_number(value, name, above=0) for name, value in measured.items())
    predicted = predict(hardware, shape, result)
    row: dict[str, Any] = {"cell": document["cell"], "replicas": result["replicas"], "cores": result["cores"]}
    for name, value in measured.items():
        row[name] = {"predicted": predicted[name], "measured": value, "error": predicted[name] / value - 1}
    return row


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


def _cells(folder: Path, model: str, say: Say) -> list[tuple[Path, dict[str, Any]]]:
    found = []
    for path, document in documents(folder, "replicas-*.json"):
        if failed(document, say):
            continue
        if document.get("model") != model:
            say(f"{document.get('cell')}: left out, it ran {document.get('model')}")
        else:
            found.append((path, document))
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
