"""Where results go, tried before the work begins: hours of runs are not lost to a folder that cannot be written."""

import tempfile
from pathlib import Path

from herald_pipeline.errors import ConfigError


def check_folder(path: Path, option: str = "--out") -> None:
    """Make the folder ``path`` and try a file in it.

    Raises
    ------
    ConfigError
        It is a file, or nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as problem:
        message = f"{option} {path}: nothing can be written there ({problem.strerror}); name a folder that can be"
        raise ConfigError(message) from None


def check_file(path: Path, option: str = "--out") -> None:
    """Make the folder of the file ``path`` and try a file in it.

    Raises
    ------
    ConfigError
        It is a folder, or nothing can be written beside it.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path}: it is a folder; name a file in it")
    check_folder(path.parent, option)
