"""Filler text for training documents, read from unpacked Debian packages whose texts may be used and redistributed.

Sources and licences are listed in :data:`SOURCES` (and in NOTICE). No text under the GPL is read. The King James Bible
of the trial is left out: it is under letters patent in one country.
"""

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from herald_pipeline.errors import ConfigError

HELD_OUT_PERCENT = 4
"""Share of documents that training never sees; evaluation's haystacks are made of them alone."""

MIN_DOCUMENT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Source:
    """One package's text: ``paths`` are globs below the folder that packages were unpacked into."""

    name: str
    package: str
    licence: str
    paths: tuple[str, ...]


SOURCES = (
    Source("jargon", "jargon-text", "public domain", ("usr/share/doc/jargon-text/jargon.txt.gz",)),
    Source("wordnet", "wordnet-base", "WordNet 3.0 licence", ("usr/share/wordnet/data.*",)),
    Source("sqlite", "sqlite3-doc", "public domain", ("usr/share/doc/sqlite3/**/*.html",)),
    Source("postgresql", "postgresql-doc-15", "PostgreSQL licence", ("usr/share/doc/postgresql-doc-15/html/*.html",)),
    Source("python-doc", "python3.11-doc", "PSF-2.0", ("usr/share/doc/python3.11/html/_sources/**/*.rst.txt",)),
    Source("python-code", "libpython3.11-stdlib", "PSF-2.0", ("usr/lib/python3.11/**/*.py",)),
)

WORDS = Source("words", "wamerican", "SCOWL, permissive with notice", ("usr/share/dict/american-english",))
"""Word list from which keys are drawn; not filler."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text of one source. ``held_out`` follows from the name alone, so a new corpus keeps the split."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether training must not see it."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


class _Prose(HTMLParser):
    """Text of paragraphs, list items and definitions; tables, code and navigation are dropped."""

    _KEEP = frozenset({"p", "li", "dd", "h1", "h2", "h3"})
    _DROP = frozenset({"script", "style", "pre", "table", "nav", "svg", "head"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = [""]
        self._dropping = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a paragraph or a part to skip."""
        if tag in self._DROP:
            self._dropping += 1
        elif tag in self._KEEP:
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        """End it."""
        if tag in self._DROP:
            self._dropping = max(0, self._dropping - 1)
        elif tag in self._KEEP:
            self.paragraphs.append("")

    def handle_data(self, data: str) -> None:
        """Collect text."""
        if not self._dropping:
            self.paragraphs[-1] += data


def _ascii(text: str) -> str:
    """Plain quotes and dashes, everything else outside ASCII dropped: the vocabulary is small."""
    table = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-", 0xA0: " "}
    return text.translate(table).encode("ascii", "ignore").decode("ascii")


def _prose(paragraphs: list[str]) -> str:
    joined = (re.sub(r"\s+", " ", paragraph).strip() for paragraph in paragraphs)
    return "\n".join(paragraph for paragraph in joined if len(paragraph) > 40)


def _html(path: Path) -> str:
    parser = _Prose()
    parser.feed(path.read_text(encoding="utf-8", errors="replace"))
    return _prose(parser.paragraphs)


def _rst(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r":[a-z:]+:`~?!?([^`<]+?)(?: <[^`]*>)?`", r"\1", text)
    text = text.replace("``", "")
    return _prose([part for part in re.split(r"\n\s*\n", text) if not part.lstrip().startswith("..")])


def _code(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").expandtabs(4).splitlines()
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _jargon(path: Path) -> Iterator[tuple[str, str]]:
    """Groups of eight entries; an entry begins at the margin's three spaces and a colon-marked head word."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    parts = [part for part in re.split(r"\n\s*\n", text) if len(part) > 60]
    for start in range(0, len(parts), 16):
        yield f"entries-{start}", _prose(parts[start : start + 16])


def _wordnet(path: Path) -> Iterator[tuple[str, str]]:
    """Glosses as sentences, "word: gloss.", forty to a document."""
    sentences = []
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("  ") or " | " not in line:
            continue
        fields, gloss = line.split(" | ", 1)
        word = fields.split()[4].replace("_", " ")
        sentences.append(f"{word}: {gloss.strip()}.")
    for start in range(0, len(sentences), 40):
        yield f"{path.name}-{start}", " ".join(sentences[start : start + 40])


def _texts(source: Source, path: Path, name: str) -> Iterator[tuple[str, str]]:
    if source.name == "jargon":
        yield from _jargon(path)
    elif source.name == "wordnet":
        yield from _wordnet(path)
    else:
        reader = {"python-code": _code, "python-doc": _rst}.get(source.name, _html)
        yield name, reader(path)


def _files(root: Path, source: Source) -> list[Path]:
    found = sorted({path for pattern in source.paths for path in root.glob(pattern) if path.is_file()})
    if not found:
        message = (
            f"{root} holds no {source.paths[0]}: unpack Debian's {source.package} there "
            f"(apt-get download {source.package}; dpkg -x {source.package}_*.deb {root})"
        )
        raise ConfigError(message)
    return found


def read_documents(root: Path) -> Iterator[Document]:
    """Documents of all sources, in a fixed order; :class:`ConfigError` names the package that is missing."""
    listed = [(source, _files(root, source)) for source in SOURCES]
    for source, files in listed:
        for path in files:
            for name, text in _texts(source, path, str(path.relative_to(root))):
                cleaned = _ascii(text)
                if len(cleaned) >= MIN_DOCUMENT_CHARS:
                    yield Document(source.name, name, cleaned)


def read_words(root: Path) -> list[str]:
    """Lower-case words of three to ten letters, in the list's order."""
    lines = _files(root, WORDS)[0].read_text(encoding="utf-8").splitlines()
    return [word for word in lines if re.fullmatch("[a-z]{3,10}", word)]
