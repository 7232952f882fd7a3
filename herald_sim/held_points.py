"""Points that a sweep's folder holds already: which lines count, and which were made of other files than today's."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from herald_pipeline import hardware_io
from herald_pipeline.errors import ConfigError

POINTS = "points.jsonl"
PATHS = frozenset({"steps_file", "commits", "requests"})
"""Parameters of a point that name a file."""


def basis(point: Mapping[str, Any], fast: bool) -> str:
    """Digest of what a point's figures depend on beside its parameters: the files that it names, and the mode."""
    digests = [f"fast {fast}"]
    for name in sorted({"model", "hardware", *PATHS} & point.keys()):
        path = _profile(str(point[name])) if name == "hardware" else Path(str(point[name]))
        # Without a file it is a model by name, or the point will be refused with its reason.
        if path is not None and path.is_file():
            digests.append(f"{name} {_digest(path, path.stat().st_mtime_ns)}")
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]


def _profile(name: str) -> Path | None:
    try:
        return hardware_io.find(name)
    except ConfigError:
        return None


@cache
def _digest(path: Path, _changed_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_points(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of an earlier run; one that was cut off while being written is left out, and its point runs again.

    Raises
    ------
    ConfigError
        A line is no point: the file is not, or not only, a sweep's.
    """
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not {"id", "parameters", "state"} <= found.keys():
            message = f"{path}, line {number}: not a point of a sweep; take the line away, or give --out another folder"
            raise ConfigError(message)
        yield found
