"""Makes everything that training reads: tokenizer, words of names, training filler and held-out filler."""

import itertools
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from random import Random

from herald_exec.reference.corpus import Document, read_documents, read_words
from herald_exec.reference.documents import block_row
from herald_exec.reference.filler import Filler, encode_documents
from herald_exec.reference.tasks import Material
from herald_exec.reference.vocabulary import Encoder, key_words, train_tokenizer, write_tokenizer
from herald_pipeline.errors import ConfigError

SOURCE_CHARS = 6_000_000
"""Most characters taken of one source: sources are drawn equally often, more of one would be read less."""

DOUBLE_WORDS = 2_000
TRAIN_FILE, HELD_OUT_FILE = "filler-train.npz", "filler-held-out.npz"
VOCABULARY_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "words.txt")
_TOKENIZER_CHARS_PER_SOURCE = 1_500_000
_EXAMPLE_ROWS = 300


def _capped(documents: Iterable[Document], limit: int) -> list[Document]:
    """Documents until each source has ``limit`` characters, spread over the source rather than from its start."""
    by_source: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        by_source[document.source].append(document)
    kept = []
    for name in sorted(by_source):
        listed = by_source[name]
        Random(name).shuffle(listed)
        used = list(itertools.accumulate(len(document.text) for document in listed))
        kept += [document for document, size in zip(listed, used, strict=True) if size <= limit]
    return kept


def _examples(encoder: Encoder, filler: Filler, words: list[str]) -> list[str]:
    """Texts of training rows, so that the words of questions and answers get tokens of their own."""
    single, double = key_words(words, encoder)
    material = Material(encoder, filler, tuple(single), tuple(double))
    rng = Random("tokenizer")
    return [encoder.decode(block_row(material, rng, 1024).tokens.tolist()) for _ in range(_EXAMPLE_ROWS)]


def _two_pass_encoder(documents: list[Document], words: list[str]) -> Encoder:
    texts = [document.text for document in _capped(documents, _TOKENIZER_CHARS_PER_SOURCE)]
    first = Encoder(train_tokenizer(texts))
    filler = encode_documents(documents[:200], first)
    return Encoder(train_tokenizer([*texts, *_examples(first, filler, words)]))


def _kept_vocabulary(folder: Path, out: Path) -> Encoder:
    """Copy a checkpoint's tokenizer and words: weights that training goes on from know no others."""
    for name in VOCABULARY_FILES:
        if not (folder / name).is_file():
            message = f"--vocabulary {folder}: it has no {name}; name the folder of a checkpoint of this kind"
            raise ConfigError(message)
        shutil.copyfile(folder / name, out / name)
    return Encoder.from_file(out / "tokenizer.json")


def _new_vocabulary(documents: list[Document], packages: Path, out: Path, max_positions: int) -> Encoder:
    words = read_words(packages)
    encoder = _two_pass_encoder(documents, words)
    single, double = key_words(words, encoder)
    double = sorted(Random("words").sample(double, min(DOUBLE_WORDS, len(double))))
    write_tokenizer(out, encoder.tokenizer, max_positions)
    (out / "words.txt").write_text("\n".join([*single, *double]) + "\n", encoding="utf-8")
    return encoder


def prepare(packages: Path, out: Path, max_positions: int, vocabulary: Path | None = None) -> dict[str, int]:
    """Read unpacked packages below ``packages`` and write all inputs of training to ``out``.

    Nothing is drawn but by fixed seeds, so that the same packages give the same files. ``vocabulary`` is a checkpoint
    folder whose tokenizer and words are kept.

    Returns
    -------
    dict
        Sizes: documents, tokens, words.
    """
    documents = _capped(read_documents(packages), SOURCE_CHARS)
    training = [document for document in documents if not document.held_out]
    held_out = [document for document in documents if document.held_out]
    out.mkdir(parents=True, exist_ok=True)
    if vocabulary is None:
        encoder = _new_vocabulary(training, packages, out, max_positions)
    else:
        encoder = _kept_vocabulary(vocabulary, out)
    single, double = key_words((out / "words.txt").read_text(encoding="utf-8").split(), encoder)
    sizes = {"documents": len(documents), "single_words": len(single), "double_words": len(double)}
    for name, part in ((TRAIN_FILE, training), (HELD_OUT_FILE, held_out)):
        filler = encode_documents(part, encoder)
        filler.write(out / name)
        sizes[name] = len(filler.tokens)
    return sizes
