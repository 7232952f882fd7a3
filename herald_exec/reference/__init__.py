"""The reference model: a small block-diffusion model that ships with its weights, and everything that made it.

``herald-ref`` decodes block after block (block-causal); ``herald-ref-bidirectional`` is the same network run with full
attention, which it was trained for too: use it with block schedulers such as DSB.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from herald_pipeline.errors import unknown_name
from herald_pipeline.model import Attention

if TYPE_CHECKING:
    from herald_exec.checkpoints.folder import Checkpoint
    from herald_exec.reference.tasks import Material

NAMES = ("herald-ref", "herald-ref-bidirectional")
SHIPPED = Path(__file__).parent / "weights"
"""Checkpoint folder in Hugging Face layout, with tokenizer, words, held-out filler and model card."""


def open_reference(name: str = "herald-ref", folder: Path | None = None) -> "Checkpoint":
    """The shipped checkpoint (or another of its kind in ``folder``), in one of its two attention modes."""
    from herald_exec.checkpoints.folder import open_checkpoint

    if name not in NAMES:
        raise unknown_name(kind="reference model", name=name, valid=NAMES)
    checkpoint = open_checkpoint(folder or SHIPPED)
    mode = Attention.BIDIRECTIONAL if name.endswith("bidirectional") else Attention.BLOCK_CAUSAL
    return replace(checkpoint, shape=replace(checkpoint.shape, name=name, attention=mode))


def read_shipped_material(folder: Path | None = None) -> "Material":
    """Tokenizer, words and held-out filler of a checkpoint: what evaluation's samples are drawn from."""
    from herald_exec.reference.prepare import HELD_OUT_FILE
    from herald_exec.reference.tasks import read_material

    folder = folder or SHIPPED
    return read_material(folder, folder / HELD_OUT_FILE)
