"""Text in, text out: prompts through a checkpoint's tokenizer and a decoding session, streamed as blocks complete."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from herald_exec.checkpoints.chat import Message
from herald_exec.checkpoints.tokenizer import TextStream, TextTokenizer
from herald_exec.decoding import DecodeSettings, Session, start_session
from herald_exec.models.base import BlockModel
from herald_exec.stop_words import StopWords
from herald_pipeline.errors import ConfigError, check_number, raise_problems

EndReason = Literal["end_token", "length", "stop_word"]
OnText = Callable[[int, str], None]
"""Called as ``on_text(prompt index, piece)`` whenever text of an answer is certain."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text, or as turns of a conversation for the chat template."""

    text: str | None = None
    messages: tuple[Message, ...] = ()

    def encode(self, tokenizer: TextTokenizer, *, chat: bool, system: str | None = None) -> list[int]:
        """Token ids; with ``chat``, plain text is the user's turn after an optional ``system`` turn."""
        if self.messages:
            return tokenizer.encode_chat(self.messages)
        text = self.text or ""
        if not chat:
            return tokenizer.encode(text)
        before = [{"role": "system", "content": system}] if system else []
        return tokenizer.encode_chat([*before, {"role": "user", "content": text}])


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer.

    ``tokens`` counts what was decoded up to its end (stop word included, end token not); ``forwards`` is the number of
    forwards (NFE) that the row took part in after prefill; ``seconds`` runs from the batch's start to this answer's
    end, prefill included.
    """

    index: int
    text: str
    ended_by: EndReason
    prompt_tokens: int
    tokens: int
    forwards: int
    blocks: int
    seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Delivered tokens per forward."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("index", "text", "ended_by", "prompt_tokens", "tokens", "forwards", "blocks", "seconds")
        return {name: getattr(self, name) for name in names} | {"tokens_per_forward": self.tokens_per_forward}


@dataclass(slots=True)
class _Row:
    """Text of one answer as it grows."""

    index: int
    stream: TextStream
    stop: StopWords
    parts: list[str] = field(default_factory=list)

    def show(self, text: str, on_text: OnText | None) -> None:
        if text:
            self.parts.append(text)
            if on_text is not None:
                on_text(self.index, text)


def use_chat_template(tokenizer: TextTokenizer, name: str, wanted: bool | None) -> bool:
    """Whether prompts go through the chat template: as asked, else for every model that has one and is no base model.

    Base checkpoints often carry the template of the model they were derived from.
    """
    if wanted is not None:
        return wanted
    return tokenizer.has_chat_template and "base" not in name.lower()


def generate(
    model: BlockModel,
    tokenizer: TextTokenizer,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    *,
    stop: Sequence[str] = (),
    batch_size: int = 8,
    on_text: OnText | None = None,
) -> list[Answer]:
    """Answers to encoded prompts, in order.

    Rows of a batch do not change each other's text; ``batch_size`` only says how many run together.

    Raises
    ------
    ConfigError
        A prompt does not fit the model (all such prompts are named), or a setting is refused.
    """
    raise_problems([check_number(batch_size, "batch", minimum=1, integer=True)])
    if not prompts:
        message = "no prompts; give at least one"
        raise ConfigError(message)
    answers: list[Answer] = []
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        rows = [_Row(first + i, TextStream(tokenizer), StopWords(stop)) for i in range(len(batch))]
        started = time.perf_counter()
        session = start_session(model, batch, settings)
        answers += _drive(session, rows, started, on_text)
    return answers


def _drive(session: Session, rows: list[_Row], started: float, on_text: OnText | None) -> list[Answer]:
    """Run a session to its end."""
    answers: dict[int, Answer] = {}
    while session.running:
        for piece in session.step():
            row = rows[piece.row]
            row.show(row.stop.push(row.stream.push(piece.tokens)), on_text)
            reason: EndReason | None = None
            if row.stop.found is not None:
                session.stop(piece.row)
                reason = "stop_word"
            elif piece.finished is not None:
                row.show(row.stop.push(row.stream.finish()), on_text)
                reason = "stop_word" if row.stop.found is not None else _plain(piece.finished)
                row.show(row.stop.finish(), on_text)
            if reason is not None:
                answers[piece.row] = _answer(session, piece.row, row, reason, time.perf_counter() - started)
    return [answers[index] for index in range(len(rows))]


def _plain(finished: str) -> EndReason:
    return "end_token" if finished == "end_token" else "length"


def _answer(session: Session, number: int, row: _Row, reason: EndReason, seconds: float) -> Answer:
    counts = session.statistics[number]
    return Answer(
        index=row.index,
        text="".join(row.parts),
        ended_by=reason,
        prompt_tokens=counts.prompt_tokens,
        tokens=counts.tokens,
        forwards=counts.forwards,
        blocks=counts.blocks,
        seconds=seconds,
    )
