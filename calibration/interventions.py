"""Interventions: what one change of machine or settings brings, predicted before it is run.

A planner needs the change to be right, not only the level. ``predict`` writes a file with the time, the commit and the
profile's digest before anything runs; ``compare`` reads the runs and puts both changes side by side, with whether the
resource that binds became another one as predicted.
"""

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from calibration import profile_file
from calibration.cells import read_cells
from calibration.points import Point
from calibration.reconcile import predictor
from calibration.runs import Sample
from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError, read_failure
from herald_pipeline.model import ModelShape

Say = Callable[[str], None]
WAITING = 0.05
"""Share of a block that the main stream must wait before retrieval is said to bind."""
BASE_BATCH, BASE_CONTEXT, SMALL_BATCH = 38, 32768, 16


@dataclass(frozen=True, slots=True)
class Intervention:
    """One change: the point that it starts from, and the changed one."""

    name: str
    base: Point
    changed: Point


def planned(batch: int = BASE_BATCH, context: int = BASE_CONTEXT) -> tuple[Intervention, ...]:
    """One thing changed at a time, around HERALD (and Dense, where it has that thing) at the paper's Dense batch."""
    common: dict[str, Any] = {"steps": 20, "blocks": 6, "kv_dtype": "bf16"}
    herald, dense = (Point(method, context, batch, **common) for method in ("herald", "dense"))
    # The keys' copy of a small batch leaves room, and retrieval so short that T can decide what binds.
    few = replace(herald, batch=SMALL_BATCH, conditions=(("keys", "int8"),))
    changes: list[tuple[str, Point, Point]] = []
    for point in (herald, dense):
        changes += [(f"{point.method}: T 20 -> {t}", point, replace(point, steps=t)) for t in (8, 32)]
    changes += [(f"threads 15 -> {n}", herald, replace(herald, conditions=(("threads", n),))) for n in (4, 8, 16)]
    changes += [(f"link -> {r:g} GB/s", herald, replace(herald, conditions=(("link", r),))) for r in (27.7, 14.0, 3.0)]
    changes += [(f"budget 5% -> {b:.1%}", herald, replace(herald, budget=b)) for b in (0.025, 0.1)]
    changes += [
        ("exact layers: CPU -> GPU", herald, replace(herald, conditions=(("exact", "gpu"),))),
        ("key-only off -> on", herald, replace(herald, conditions=(("keys", "only"),))),
        ("8-bit keys off -> on", herald, replace(herald, conditions=(("keys", "int8"),))),
        ("8-bit keys: T 20 -> 32", few, replace(few, steps=32)),
        (f"HBM 85.5 -> 40 GB (batch {batch} -> 3)", dense, replace(dense, batch=3, conditions=(("hbm", 40.0),))),
        (f"HBM 85.5 GB -> none (batch {batch} -> 80)", dense, replace(dense, batch=80)),
    ]
    return tuple(Intervention(*change) for change in changes)


def binding(sample: Sample) -> str:
    """What a block waits for: ``gpu`` (the main stream hardly waits), ``cpu`` or ``link`` (whichever is busier).

    The same rule for a prediction and for a run: both have the same figures.
    """
    block_s, main_s = sample.figures.get("block_time_s"), sample.figures.get("main_time_s")
    if not block_s or not main_s or main_s >= (1 - WAITING) * block_s:
        return "gpu"
    cpu = sum(sample.shares.get(name, 0.0) for name in ("select", "gather"))
    return "link" if sum(sample.shares.get(name, 0.0) for name in ("upload", "fetch")) > cpu else "cpu"


def predict(hardware: Path, shape: ModelShape, out: Path, command: str, chosen: Sequence[Intervention] = ()) -> Path:
    """Write what the changes will bring to ``out``.

    Raises
    ------
    ConfigError
        The file is there: a prediction is made once, before the run.
    """
    if out.exists():
        message = (
            f"{out} is there already; a prediction that can be made again after the run is none: name another file"
        )
        raise ConfigError(message)
    # By a name the profile that ships is meant: its digest and its raw tables are found by its path.
    hardware = hardware_io.find(hardware)
    profile = hardware_io.resolve(hardware)
    sample_of = predictor(profile, shape, raw=profile_file.raw_folder(hardware))
    known: dict[Any, Sample] = {}

    def at(point: Point) -> dict[str, Any]:
        sample = known.setdefault(point.key, sample_of(point))
        return {"point": _plain(point), **_outcome(sample)}

    predictions = []
    for change in chosen or planned():
        base, changed = at(change.base), at(change.changed)
        delta = changed["throughput_tok_s"] / base["throughput_tok_s"] - 1
        predictions.append({"name": change.name, "base": base, "changed": changed, "delta": delta})
    document = {
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": command,
        "profile": profile.name,
        "profile_sha256": hashlib.sha256(hardware.read_bytes()).hexdigest(),
        "model": shape.name,
        "predictions": predictions,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return out


def _outcome(sample: Sample) -> dict[str, Any]:
    return {"throughput_tok_s": sample.figures["throughput_tok_s"], "binding": binding(sample)}


def _plain(point: Point) -> dict[str, Any]:
    return {name: value for name, value in asdict(point).items() if value not in (None, ())}


def _point(table: Mapping[str, Any]) -> Point:
    met = tuple((str(name), value) for name, value in table.get("conditions", ()))
    return Point(**{**table, "conditions": met})


def _commit() -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if asked.returncode == 0 else "unknown"


# After the run -------------------------------------------------------------------------------------------------------


def compare(predictions: Path, measured: Path, say: Say) -> dict[str, Any]:
    """Each change as predicted and as it was run.

    Raises
    ------
    ConfigError
        The file of predictions cannot be read, or the folder holds no runs.
    """
    try:
        document = json.loads(predictions.read_text(encoding="utf-8"))
        kept = {name: document[name] for name in ("written", "commit", "profile", "model")}
        changes = document["predictions"]
        for change in changes:
            for side in ("base", "changed"):
                _match(_point(change[side]["point"]))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as problem:
        why = f"it lacks {problem.args[0]!r}" if isinstance(problem, KeyError) else read_failure(problem)
        raise ConfigError(f"{predictions} holds no predictions ({why}); --hardware and --out write them") from None
    runs = {_match(sample.point): sample for sample in read_cells(measured, document["model"], say)}
    rows = [_row(change, runs) for change in changes]
    judged = [row for row in rows if "measured_delta" in row]
    summary: dict[str, Any] = {"changes": len(rows), "run": len(judged)}
    if judged:
        differences = [abs(row["predicted_delta"] - row["measured_delta"]) for row in judged]
        summary |= {
            "mean_difference": sum(differences) / len(differences),
            "worst_difference": max(differences),
            "same_direction": sum(_same_direction(row) for row in judged),
            "binding_as_foretold": sum(row["as_foretold"] for row in judged),
        }
    return {**kept, "rows": rows, "summary": summary}


def _match(point: Point) -> tuple[Any, ...]:
    """A point's key with numbers as numbers: a name of a cell holds text."""
    *rest, met = point.key
    return (*rest, tuple(sorted((name, _number(value)) for name, value in met)))


def _number(value: float | int | str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return str(value)


def _row(change: Mapping[str, Any], runs: Mapping[tuple[Any, ...], Sample]) -> dict[str, Any]:
    base, changed = (runs.get(_match(_point(change[side]["point"]))) for side in ("base", "changed"))
    predicted = [change[side]["binding"] for side in ("base", "changed")]
    row: dict[str, Any] = {
        "name": change["name"],
        "predicted_tok_s": [change[side]["throughput_tok_s"] for side in ("base", "changed")],
        "predicted_delta": change["delta"],
        "predicted_binding": predicted,
    }
    if base is None or changed is None:
        return {**row, "missing": "base" if base is None else "changed"}
    rates = [sample.figures["throughput_tok_s"] for sample in (base, changed)]
    found = [binding(sample) for sample in (base, changed)]
    return {
        **row,
        "measured_tok_s": rates,
        "measured_delta": rates[1] / rates[0] - 1,
        "measured_binding": found,
        "as_foretold": found == predicted,
    }


def _same_direction(row: Mapping[str, Any], least: float = 0.02) -> bool:
    """Whether both changes have one sign, or both are nothing much."""
    one, other = float(row["predicted_delta"]), float(row["measured_delta"])
    return one * other > 0 or (abs(one) < least and abs(other) < least)
