"""A small made-up material: a tokenizer trained on a page of text, a few words, filler by formula."""

from random import Random

import pytest

from herald_exec.reference.corpus import Document
from herald_exec.reference.filler import encode_documents
from herald_exec.reference.tasks import Material
from herald_exec.reference.vocabulary import Encoder, key_words, train_tokenizer

WORDS = [
    "amber",
    "falcon",
    "stone",
    "river",
    "cloud",
    "maple",
    "north",
    "signal",
    "copper",
    "garden",
    "window",
    "mirror",
    "silver",
    "basket",
    "anchor",
    "velvet",
]


def page(seed):
    rng = Random(seed)
    sentences = [" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(40)]
    return " ".join(sentences)


@pytest.fixture(scope="session")
def material():
    texts = [page(seed) for seed in range(6)]
    encoder = Encoder(train_tokenizer([*texts, "What is the code of a? Give it. Answer: 12345, as noted above."], 700))
    filler = encode_documents([Document(f"s{n % 2}", str(n), text) for n, text in enumerate(texts)], encoder)
    single, double = key_words(WORDS, encoder)
    return Material(encoder, filler, tuple(single), tuple(double or single))
