"""Files that pages are made of."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from herald_pipeline.errors import ConfigError, read_failure


def read_object(path: Path, how: str, needed: Collection[str] = ()) -> dict[str, Any]:
    """The JSON object of ``path``, which has to have the keys ``needed``; ``how`` says what writes such a file.

    Raises
    ------
    ConfigError
        It cannot be read, is no object, or lacks a key.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        message = f"{path} cannot be read as JSON ({read_failure(problem)}); {how}"
        raise ConfigError(message) from None
    if not isinstance(found, dict):
        message = f"{path} holds no JSON object; {how}"
        raise ConfigError(message)
    missing = [name for name in needed if name not in found]
    if missing:
        message = f"{path} lacks {', '.join(missing)}; {how}"
        raise ConfigError(message)
    return found
