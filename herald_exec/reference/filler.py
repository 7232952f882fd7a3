"""Tokenised filler text: what haystacks are made of, and which part of it training may not see."""

from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from herald_exec.reference.corpus import Document
from herald_exec.reference.vocabulary import Encoder
from herald_pipeline.errors import ConfigError, read_failure

_ARRAYS = ("tokens", "starts", "sources")


@dataclass(frozen=True)
class Filler:
    """Documents as one array of ids.

    Attributes
    ----------
    tokens
        ``uint16``, all documents one after another.
    starts
        First token of each document, and one last entry for the end.
    sources
        Index of each document's source; sources are drawn equally often, whatever their sizes.
    """

    tokens: NDArray[np.uint16]
    starts: NDArray[np.int64]
    sources: NDArray[np.int64]

    def __post_init__(self) -> None:
        groups = [np.flatnonzero(self.sources == source) for source in np.unique(self.sources)]
        # Within a source a document is drawn in proportion to its length.
        ends = [np.cumsum(np.diff(self.starts)[group]) for group in groups]
        object.__setattr__(self, "_groups", list(zip(groups, ends, strict=True)))

    def draw(self, rng: Random, length: int) -> list[int]:
        """``length`` tokens of filler: stretches of documents of random sources, joined until there are enough."""
        drawn: list[int] = []
        while len(drawn) < length:
            group, ends = self._groups[rng.randrange(len(self._groups))]  # type: ignore[attr-defined]
            place = rng.randrange(int(ends[-1]))
            index = int(np.searchsorted(ends, place, side="right"))
            document = int(group[index])
            first = int(self.starts[document]) + place - (int(ends[index - 1]) if index else 0)
            stop = min(int(self.starts[document + 1]), first + length - len(drawn))
            drawn += self.tokens[first:stop].tolist()
        return drawn

    def write(self, path: Path) -> None:
        """Write to one compressed ``.npz``."""
        np.savez_compressed(path, **{name: getattr(self, name) for name in _ARRAYS})


def encode_documents(documents: list[Document], encoder: Encoder) -> Filler:
    """Filler of documents, each followed by a line break."""
    names = sorted({document.source for document in documents})
    parts = [np.asarray(encoder(f"{document.text}\n"), dtype=np.uint16) for document in documents]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    sources = np.asarray([names.index(document.source) for document in documents], dtype=np.int64)
    return Filler(np.concatenate(parts), starts, sources)


def read_filler(path: Path) -> Filler:
    """Filler as written by :meth:`Filler.write`; :class:`ConfigError` when it cannot be read."""
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in _ARRAYS}
    except FileNotFoundError:
        message = f"{path} does not exist; make it with: python -m herald_exec.reference generate-data"
        raise ConfigError(message) from None
    except (OSError, ValueError, KeyError) as error:
        message = f"{path} holds no filler text ({read_failure(error)}); make it again with generate-data"
        raise ConfigError(message) from None
    return Filler(**arrays)
