"""Prompts with their expected answers, from a JSONL file or drawn at random; and whether an answer is right."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from herald_exec.checkpoints.tokenizer import TextTokenizer
from herald_pipeline.errors import ConfigError, check_number, raise_problems, read_failure, unknown_name
from herald_pipeline.model import ModelShape

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt: token ids, and the answer as token ids, as text, or unknown."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | str | None = None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "").rstrip(".") if found else None


MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda given, wanted: given.strip() == wanted.strip(),
    "contains": lambda given, wanted: wanted.strip() in given,
    "last-number": lambda given, wanted: (
        _last_number(given) is not None and _last_number(given) == _last_number(wanted)
    ),
}
"""How a text answer is judged: the whole text, a part of it, or its last number (GSM8K)."""


def is_correct(
    item: Item, response: Sequence[int], tokenizer: TextTokenizer | None, match: str, end_tokens: Sequence[int]
) -> bool | None:
    """Whether a response is the item's answer; ``None`` when the item has none.

    Answers in token ids are compared whole, end tokens left out; answers in text as :data:`MATCHES` says.
    """
    if item.answer is None:
        return None
    if match not in MATCHES:
        raise unknown_name("match", match, MATCHES)
    if isinstance(item.answer, str):
        if tokenizer is None:
            message = "answers in text need a checkpoint folder with a tokenizer; give answers as token ids instead"
            raise ConfigError(message)
        return MATCHES[match](tokenizer.decode(list(response)), item.answer)
    return [t for t in response if t not in end_tokens] == [t for t in item.answer if t not in end_tokens]


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in value):
        message = f"{where} must be a list of token ids, got {value!r}"
        raise ConfigError(message)
    return tuple(value)


def _item(record: Any, where: str, tokenizer: TextTokenizer | None) -> Item:
    if not isinstance(record, dict) or not ({"prompt", "tokens"} & set(record)):
        message = f'{where}: need an object with "prompt" (text) or "tokens" (ids), and optionally "answer"'
        raise ConfigError(message)
    if "tokens" in record:
        prompt = _ids(record["tokens"], f"{where}: tokens")
    elif tokenizer is None:
        message = f'{where}: a text prompt needs a checkpoint folder with a tokenizer; use "tokens" instead'
        raise ConfigError(message)
    else:
        prompt = tuple(tokenizer.encode(str(record["prompt"])))
    answer = record.get("answer")
    if answer is not None and not isinstance(answer, str):
        answer = _ids(answer, f"{where}: answer")
    return Item(prompt, answer)


def read_items(path: Path, tokenizer: TextTokenizer | None = None) -> list[Item]:
    """Items of a JSONL file: ``{"prompt": text or "tokens": [ids], "answer": text or [ids]}`` a line.

    Raises
    ------
    ConfigError
        The file cannot be read, or a line is not such an object (with its number).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"prompts file {path} cannot be read: {read_failure(error)}"
        raise ConfigError(message) from None
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            message = f"{where} is not JSON: {error}"
            raise ConfigError(message) from None
        items.append(_item(record, where, tokenizer))
    if not items:
        message = f"{path} holds no prompt; give one JSON object a line"
        raise ConfigError(message)
    return items


def random_items(shape: ModelShape, number: int, length: int, seed: int = 0) -> list[Item]:
    """``number`` prompts of ``length`` random ordinary tokens, without answers: for speed, not for quality."""
    raise_problems(
        [
            check_number(number, "prompts", minimum=1, integer=True),
            check_number(length, "prompt_tokens", minimum=1, integer=True),
        ]
    )
    generator = torch.Generator().manual_seed(seed)
    special = {shape.mask_token_id, *shape.eos_token_ids}
    ordinary = torch.tensor([t for t in range(min(shape.vocab_size, 50_000)) if t not in special])
    drawn = torch.randint(len(ordinary), (number, length), generator=generator)
    return [Item(tuple(ordinary[row].tolist())) for row in drawn]
