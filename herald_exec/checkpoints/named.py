"""A model by what a user types: a checkpoint folder, or the name of the reference model that ships."""

from pathlib import Path

from herald_exec import reference
from herald_exec.checkpoints.folder import Checkpoint, open_checkpoint
from herald_pipeline import catalogue
from herald_pipeline.errors import ConfigError, unknown_name


def open_model(name_or_folder: Path | str) -> Checkpoint:
    """Checkpoint of a folder, or of ``herald-ref`` and ``herald-ref-bidirectional``; checked, not loaded.

    Raises
    ------
    ConfigError
        Neither a folder nor such a name, or a folder that cannot be used.
    """
    text = str(name_or_folder)
    if Path(text).exists() or "/" in text:
        return open_checkpoint(text)
    if text in reference.NAMES:
        return reference.open_reference(text)
    if text in catalogue.names():
        message = f"{text} is known by its shape only; pass the folder with its weights"
        raise ConfigError(message)
    raise unknown_name("model or folder", text, reference.NAMES)
