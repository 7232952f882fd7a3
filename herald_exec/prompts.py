"""Prompts as a user gives them: arguments, text files, JSON lines of texts or conversations."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_pipeline.errors import ConfigError, read_failure

if TYPE_CHECKING:
    from herald_exec.checkpoints.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, or as turns of a conversation for the chat template."""

    text: str | None = None
    messages: tuple[Mapping[str, str], ...] = ()

    def encode(self, tokenizer: "TextTokenizer", *, chat: bool, system: str | None = None) -> list[int]:
        """Token ids; with ``chat``, plain text is the user's turn after an optional ``system`` turn."""
        if self.messages:
            return tokenizer.encode_chat(self.messages)
        text = self.text or ""
        if not chat:
            return tokenizer.encode(text)
        before = [{"role": "system", "content": system}] if system else []
        return tokenizer.encode_chat([*before, {"role": "user", "content": text}])


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file: ``.jsonl`` with ``prompt`` or ``messages`` a line, else the whole file as one; ``-`` is stdin.

    Raises
    ------
    ConfigError
        The file cannot be read, holds nothing, or lines are no such objects (all of them are named).
    """
    found = _read(path)
    if not any(prompt.messages or (prompt.text or "").strip() for prompt in found):
        where = "standard input" if str(path) == "-" else f"prompt file {path}"
        message = f"{where} holds no prompt: there is nothing to answer; put at least one into it"
        raise ConfigError(message)
    return found


def _read(path: Path) -> list[Prompt]:
    if str(path) == "-":
        return [Prompt(text=sys.stdin.read().rstrip("\n"))]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"prompt file {path} cannot be read: {read_failure(error)}"
        raise ConfigError(message) from None
    if path.suffix != ".jsonl":
        return [Prompt(text=text.rstrip("\n"))]
    prompts, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            parsed = _prompt_of_line(line)
            if isinstance(parsed, str):
                problems.append(f"{path}:{number}: {parsed}")
            else:
                prompts.append(parsed)
    if problems:
        raise ConfigError(problems)
    return prompts


def _prompt_of_line(line: str) -> Prompt | str:
    """The prompt, or what is wrong with the line."""
    try:
        content = json.loads(line)
    except ValueError as error:
        return f"no JSON ({error})"
    if not isinstance(content, dict):
        return "must be an object with 'prompt' or 'messages'"
    text, messages = content.get("prompt"), content.get("messages")
    if isinstance(text, str):
        return Prompt(text=text) if text.strip() else "its prompt is blank: there is nothing to answer"
    if isinstance(messages, list) and messages and all(_is_message(message) for message in messages):
        return Prompt(messages=tuple(messages))
    return "needs 'prompt' (text) or 'messages' (a list of objects with role and content)"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def use_chat_template(tokenizer: "TextTokenizer", name: str, wanted: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else for every model that has one and is no base model.

    Base checkpoints often carry the template of the model they were derived from.
    """
    if wanted is not None:
        return wanted
    return tokenizer.has_chat_template and "base" not in name.lower()
