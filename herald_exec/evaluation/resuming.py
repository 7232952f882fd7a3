"""Files of study cells that a run goes on from, and what tells one run's cells from another's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_exec.evaluation.decoding_grid import weights_digest
from herald_exec.models.base import BlockModel
from herald_pipeline.errors import ConfigError

if TYPE_CHECKING:
    from herald_exec.evaluation.plan import StudyPlan

Key = tuple[str, float, str, int]
"""Rule, budget, task, context."""


def study_facts(model: BlockModel, plan: "StudyPlan") -> dict[str, Any]:
    """What cells of one file must share; ``weights`` tells trainings apart."""
    return {
        "model": model.shape.name,
        "weights": weights_digest(model),
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threshold": plan.threshold,
        "samples": plan.samples,
        "first_seed": plan.first_seed,
    }


def read_done(path: Path, facts: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Cells that a results file holds already; a last line that was cut off is taken away, its cell runs again.

    Raises
    ------
    ConfigError
        The file is of other weights, samples, threshold, device or precision, or holds something else.
    """
    done: dict[Key, dict[str, Any]] = {}
    if not path.exists():
        return done
    written = path.read_text(encoding="utf-8")
    if not written.endswith("\n"):
        written = written[: written.rfind("\n") + 1]
        path.write_text(written, encoding="utf-8")
    for number, line in enumerate(written.splitlines(), start=1):
        try:
            row = json.loads(line)
            key = (row["rule"], row["budget"], row["task"], row["context"])
        except (ValueError, KeyError, TypeError):
            message = f"{path}, line {number} is no cell of a study; give another --out"
            raise ConfigError(message) from None
        other = [
            f"{name} {row.get(name)!r} instead of {value!r}" for name, value in facts.items() if row.get(name) != value
        ]
        if other:
            message = f"{path}, line {number} is of another run ({'; '.join(other)}); give another --out"
            raise ConfigError(message)
        done[key] = row
    return done


def parse_part(text: str) -> tuple[int, int]:
    """``2/3`` as (2, 3)."""
    number, _, parts = text.partition("/")
    if number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts):
        return int(number), int(parts)
    message = f"--part {text!r}: give it as i/n with 1 <= i <= n, for example 1/2"
    raise ConfigError(message)
