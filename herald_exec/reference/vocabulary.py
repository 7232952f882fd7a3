"""The reference model's tokenizer: byte-level BPE of 4,096 entries whose digits are one token each.

A small vocabulary with whole-word tokens keeps a 32-token block long enough to hold an answer (about 100 characters)
and short names of two words.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

VOCAB_SIZE = 4096
EOS, MASK, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<|eos|>", "<|mask|>", "<|pad|>")

_SPLIT = r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
"""How text is cut before merging; ASCII classes, so that Python's ``re`` cuts alike (:class:`Encoder`)."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% else %}
{{- message.content }}
Answer:{% endif -%}
{%- endfor -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """BPE trained on ``texts``; ids 0, 1, 2 are the special tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_positions: int) -> None:
    """``tokenizer.json``, its config and the chat template, as Hugging Face's loaders expect them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[EOS],
        "mask_token": SPECIAL_TOKENS[MASK],
        "pad_token": SPECIAL_TOKENS[PAD],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


class Encoder:
    """Text to ids, piece by piece with a cache: several times faster than the library on short generated sentences.

    Pieces never merge across the split, so joined texts have joined ids wherever the second text starts a new piece
    (with a space before a word, or with a digit or punctuation after a word).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._split = re.compile(_SPLIT)
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Encoder":
        """Encoder of a ``tokenizer.json``."""
        return cls(Tokenizer.from_file(str(path)))

    def __call__(self, text: str) -> list[int]:
        """Ids of an ASCII text without special tokens."""
        ids: list[int] = []
        for piece in self._split.findall(text):
            ids += self._piece(piece)
        return ids

    def _piece(self, piece: str) -> list[int]:
        known = self._cache.get(piece)
        if known is None:
            known = self.tokenizer.encode(piece, add_special_tokens=False).ids
            self._cache[piece] = known
        return known

    def marked(self, text: str, parts: Sequence[str]) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Ids of a text, and for each whether its piece touches one of ``parts``, found in order (else anywhere)."""
        spans, place = [], 0
        for part in parts:
            found = text.find(part, place)
            found = text.find(part) if found < 0 else found
            if found >= 0:
                place = found + len(part)
                spans.append((found, place))
        ids: list[int] = []
        flags: list[bool] = []
        for match in self._split.finditer(text):
            piece = self._piece(match.group())
            ids += piece
            flags += [any(match.start() < end and start < match.end() for start, end in spans)] * len(piece)
        return tuple(ids), tuple(flags)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return str(self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=True))


def key_words(words: Iterable[str], encoder: Encoder) -> tuple[list[str], list[str]]:
    """Words that are one token behind a space, and words that are two: the parts of names."""
    single, double = [], []
    for word in words:
        size = len(encoder(f" {word}"))
        if size == 1:
            single.append(word)
        elif size == 2:
            double.append(word)
    return single, double
