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


# fmt: off
_OF_FORMATS = frozenset({
    ".csv", ".gif", ".gz", ".htm", ".html", ".jpeg", ".jpg", ".json", ".jsonl", ".md", ".ndjson", ".npy", ".npz",
    ".parquet", ".pdf", ".png", ".pt", ".safetensors", ".svg", ".toml", ".tsv", ".txt", ".xlsx", ".xml", ".yaml",
    ".yml", ".zip", ".zst",
})
# fmt: on
"""Endings that say what a file holds; others (``run.2``, ``trace``) say nothing and contradict nothing."""


def check_ending(path: Path | None, valid: tuple[str, ...], what: str, option: str = "--out") -> None:
    """Refuse a name whose ending says that the file holds something else than ``what``.

    Parameters
    ----------
    path
        The file, or ``None``: nothing is written.
    valid
        Endings of what is written, ``(".json", ".json.gz")``; where the last is of ``.gz`` it is compressed.

    Raises
    ------
    ConfigError
        The ending is that of another format; with the valid ones.
    """
    if path is None:
        return
    ending = path.suffix.lower()
    if ending == ".gz" and (inner := Path(path.stem).suffix.lower()) in _OF_FORMATS:
        ending = inner + ending
    elif ending == ".gz" and any(each.endswith(".gz") for each in valid):
        return
    if ending in valid or ending.removesuffix(".gz") not in {*_OF_FORMATS, ""} or not ending:
        return
    message = f"{option} {path}: {what} is written there, {ending} says otherwise; end its name in {' or '.join(valid)}"
    raise ConfigError(message)


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
