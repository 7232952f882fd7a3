"""Files of an evaluation's cells, one JSON line each: runs go on from them, and none is mixed with another."""

import gzip
import json
from collections.abc import Callable, Hashable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from herald_exec.models.base import BlockModel
from herald_pipeline.errors import ConfigError, read_failure

Key = TypeVar("Key", bound=Hashable)


def weights_digest(model: BlockModel) -> str:
    """Tells trainings apart: a hash of the token embedding, which every training step moves."""
    return sha256(model.weights.embedding.float().cpu().numpy().tobytes()).hexdigest()[:12]


def read_done(
    path: Path, facts: Mapping[str, Any], key_of: Callable[[Mapping[str, Any]], Key], run: str
) -> dict[Key, dict[str, Any]]:
    """Cells that a results file holds already; a last line that was cut off is taken away, its cell runs again.

    Parameters
    ----------
    facts
        What the cells of one file must share.
    key_of
        Tells a run's cells apart.
    run
        What the file has to be of, for messages.

    Raises
    ------
    ConfigError
        A line is of another run, or no cell at all.
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
            key = key_of(row)
        except (ValueError, KeyError, TypeError):
            message = f"{path}, line {number} is no cell of {run}; give another --out"
            raise ConfigError(message) from None
        other = [
            f"{name} {row.get(name)!r} instead of {value!r}" for name, value in facts.items() if row.get(name) != value
        ]
        if other:
            message = f"{path}, line {number} is of another run ({'; '.join(other)}); give another --out"
            raise ConfigError(message)
        done[key] = row
    return done


def read_lines(path: Path) -> list[Any]:
    """What a file of JSON lines holds, compressed (``.gz``) or not.

    Raises
    ------
    ConfigError
        It cannot be read so.
    """
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8").splitlines()
    except (OSError, EOFError, ValueError) as error:
        message = f"{path} cannot be read as JSON lines: {read_failure(error)}"
        raise ConfigError(message) from None
    return [_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f"{where} is no JSON: {error}"
        raise ConfigError(message) from None


def parse_part(text: str) -> tuple[int, int]:
    """``2/3`` as (2, 3)."""
    number, _, parts = text.partition("/")
    if number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts):
        return int(number), int(parts)
    message = f"--part {text!r}: give it as i/n with 1 <= i <= n, for example 1/2"
    raise ConfigError(message)
