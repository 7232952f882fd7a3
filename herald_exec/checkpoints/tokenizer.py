"""Text to token ids and back, by the tokenizer files of a checkpoint folder.

``tokenizer.json`` where there is one; else ``vocab.json`` and ``merges.txt`` of a byte-level BPE with Qwen2's splitting
rule (SDAR and Dream are published so), with the added tokens of ``tokenizer_config.json``.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from herald_exec.checkpoints.chat import Message, compile_template
from herald_pipeline.errors import ConfigError, read_failure

# How Qwen2's byte-level BPE cuts text before merging; part of the format, as the vocabulary is.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REPLACEMENT = "\ufffd"


class TextTokenizer:
    """Tokenizer of a checkpoint, with its chat template where it has one.

    Parameters
    ----------
    tokenizer
        The tokenizers library's object.
    config
        Content of ``tokenizer_config.json``; empty if there is none.
    template
        Source of the chat template, or ``None``.
    where
        Names the origin in messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: Mapping[str, Any] | None = None,
        template: str | None = None,
        where: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._config = dict(config or {})
        self._render = compile_template(template, where) if template is not None else None
        self._where = where

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder carries a chat template."""
        return self._render is not None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Texts of ``bos_token``, ``eos_token`` and so on, as templates use them."""
        found = {}
        for key, value in self._config.items():
            if key.endswith("_token") and value is not None:
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    found[key] = text
        return found

    def token_id(self, text: str) -> int | None:
        """Id of a token by its text, ``None`` if there is none."""
        found = self._tokenizer.token_to_id(text)
        return None if found is None else int(found)

    def added_tokens(self) -> dict[str, int]:
        """Texts and ids of the tokens beyond the learned vocabulary."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ``add_special_tokens`` adds what the tokenizer puts around every text (BOS)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Text of a conversation by the chat template, up to where the assistant's answer begins."""
        if self._render is None:
            message = f"{self._where}: the checkpoint has no chat template; pass --no-chat to use the prompt as it is"
            raise ConfigError(message)
        return self._render(messages, self.special_tokens, add_generation_prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of :meth:`render_chat`."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary give nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


class TextStream:
    """Text of a growing list of tokens, piece by piece.

    A piece never ends inside a character: bytes of an unfinished one wait for the next tokens.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; the text that is now certain and was not given before."""
        self._ids.extend(ids)
        text = self._tokenizer.decode(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        piece, self._given = certain[self._given :], max(self._given, len(certain))
        return piece

    def finish(self) -> str:
        """What is left at the end, unfinished characters as replacement marks."""
        text = self._tokenizer.decode(self._ids)
        piece, self._given = text[self._given :], len(text)
        return piece


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"{path} is not readable as JSON: {read_failure(error)}; download it again"
        raise ConfigError(message) from None


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """Tokens beyond the vocabulary, by id; ``added_tokens.json`` is the older form, without flags."""
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict) and listed:
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        return sorted(
            (
                (int(number), AddedToken(entry["content"], **{f: bool(entry.get(f, False)) for f in flags}))
                for number, entry in listed.items()
            ),
            key=lambda item: item[0],
        )
    path = folder / "added_tokens.json"
    older = _json(path) if path.exists() else {}
    ordered = sorted(older.items(), key=lambda item: item[1])
    return [(number, AddedToken(text, special=True, normalized=False)) for text, number in ordered]


def _byte_level_bpe(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Qwen2's tokenizer from vocabulary and merges."""
    vocabulary = _json(folder / "vocab.json")
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for number, token in _added_tokens(folder, config):
        # Added tokens get the next free id, so a hole in the published numbering would shift all after it.
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        got = tokenizer.token_to_id(token.content)
        if got != number:
            message = (
                f"{folder}: added token {token.content!r} should have id {number} but vocab.json and the tokens before "
                f"it end at {got}; a file is missing or of another version"
            )
            raise ConfigError(message)
    return tokenizer


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Chat template: a file of its own, or in the tokenizer's config (one, or several by name)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    listed = config.get("chat_template")
    if isinstance(listed, list):
        named = {entry.get("name"): entry.get("template") for entry in listed}
        listed = named.get("default")
    return listed if isinstance(listed, str) else None


def load_tokenizer(folder: Path | str) -> TextTokenizer:
    """Tokenizer of a checkpoint folder.

    Raises
    ------
    ConfigError
        No tokenizer files, or files that cannot be read.
    """
    folder = Path(folder)
    config_path = folder / "tokenizer_config.json"
    config = _json(config_path) if config_path.exists() else {}
    whole = folder / "tokenizer.json"
    if whole.exists():
        try:
            tokenizer = Tokenizer.from_file(str(whole))
        except Exception as error:  # the library raises bare Exception
            message = f"{whole} is no tokenizer: {error}; download it again"
            raise ConfigError(message) from None
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _byte_level_bpe(folder, config)
    else:
        message = (
            f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt; "
            "copy them from where the weights came from"
        )
        raise ConfigError(message)
    return TextTokenizer(tokenizer, config, _template(folder, config), str(folder))
