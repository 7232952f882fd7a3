"""Text in, text out: prompts through a checkpoint's tokenizer and a decoding session, streamed as blocks complete."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from herald_exec.checkpoints.tokenizer import TextStream, TextTokenizer
from herald_exec.decoding import DecodeSettings, Piece, decode_prompts
from herald_exec.models.base import BlockModel
from herald_exec.stop_words import StopWords
from herald_pipeline.decoding import schedulers
from herald_pipeline.decoding.policy import make_policy
from herald_pipeline.errors import ConfigError, raise_problems
from herald_pipeline.model import Attention, ModelShape
from herald_pipeline.settings import read_settings

BLOCK_CAUSAL_THRESHOLD = 0.95
MASKED_DIFFUSION_THRESHOLD = 0.90

_BY_OPTION = {"block_length": "--block", "kv_dtype": "--dtype", "dram_kv_dtype": "--dtype"}

EndReason = Literal["end_token", "length", "stop_word"]
OnText = Callable[[int, str], None]
"""Called as ``on_text(prompt index, piece)`` whenever text of an answer is certain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's answer.

    ``tokens`` counts what was decoded up to its end (stop word included, end token not); ``forwards`` is the number of
    forwards (NFE) that the row took part in after prefill; ``seconds`` runs from the start of the run to this
    answer's end, prefill included.
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


class _Row:
    """Text of one answer as it grows."""

    def __init__(self, index: int, tokenizer: TextTokenizer, stop: Sequence[str], on_text: OnText | None) -> None:
        self.parts: list[str] = []
        self.ended_by: EndReason = "length"
        self.ended_at = 0.0
        self._index = index
        self._stream = TextStream(tokenizer)
        self._stop = StopWords(stop)
        self._on_text = on_text

    def push(self, piece: Piece) -> bool:
        """Take a piece; whether a stop word ended the answer."""
        self._show(self._stop.push(self._stream.push(piece.tokens)))
        if piece.finished is not None:
            self._show(self._stop.push(self._stream.finish()))
            self._show(self._stop.finish())
            self.ended_by = piece.finished
        stopped = self._stop.found is not None
        if stopped:
            self.ended_by = "stop_word"
        if stopped or piece.finished is not None:
            self.ended_at = time.perf_counter()
        return stopped

    def _show(self, text: str) -> None:
        if text:
            self.parts.append(text)
            if self._on_text is not None:
                self._on_text(self._index, text)


def decode_settings(
    shape: ModelShape,
    *,
    max_tokens: int,
    block: int | None,
    decoder: str,
    threshold: float | None,
    scheduler: str,
    cache: str,
    steps: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    method: str = "dense",
    budget: float | None = None,
    sets: Sequence[str] = (),
) -> DecodeSettings:
    """Settings with the model's own block length and the usual threshold where none is given.

    ``sets`` are ``settings.NAME=VALUE`` texts for the method; B and KV's format are said otherwise.
    """
    bidirectional = shape.attention is Attention.BIDIRECTIONAL
    usual = MASKED_DIFFUSION_THRESHOLD if bidirectional else BLOCK_CAUSAL_THRESHOLD
    decoder_params: dict[str, Any] = {}
    if threshold is not None or decoder == "confidence":
        decoder_params["threshold"] = usual if threshold is None else threshold
    known = schedulers.REGISTRY.parameters(scheduler)
    size = {("block" if "block" in known else "s_init"): shape.block_length if block is None else block}
    policy = make_policy(
        decoder,
        scheduler,
        cache,
        steps=steps,
        bidirectional=bidirectional,
        decoder_params=decoder_params,
        scheduler_params=size,
    )
    if sets and bidirectional:
        message = f"--set: a setting belongs to a method, and {shape.name} is bidirectional: nothing would read it"
        raise ConfigError(message)
    method_settings = read_settings(sets, () if budget is None else ("budget",))
    raise_problems(
        f"--set settings.{name} has an option of its own here: {option}"
        for name, option in _BY_OPTION.items()
        if name in method_settings
    )
    if budget is not None:
        method_settings["budget"] = budget
    return DecodeSettings(
        policy,
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        method=method,
        method_settings=method_settings,
    )


def untrained_block(shape: ModelShape, block_length: int) -> str | None:
    """What to say of a block length that the model was not trained with, or ``None``; only speed means anything then.

    A shorter block is what a model has seen parts of. A bidirectional model has no block of its own.
    """
    if shape.attention is Attention.BIDIRECTIONAL or block_length <= shape.block_length:
        return None
    return (
        f"--block {block_length}: {shape.name} was trained with blocks of {shape.block_length}; longer ones are beyond "
        "what it has seen, so expect text that is worse or means nothing"
    )


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Totals of a run that took ``seconds``, prefill included."""
    tokens, forwards = sum(a.tokens for a in answers), sum(a.forwards for a in answers)
    return {
        "answers": len(answers),
        "prompt_tokens": sum(a.prompt_tokens for a in answers),
        "tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards if forwards else 0.0,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
    }


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

    Prompts do not change each other's text; ``batch_size`` only says how many run together.

    Raises
    ------
    ConfigError
        A prompt does not fit the model (all such prompts are named), or a setting is refused.
    """
    rows = [_Row(index, tokenizer, stop, on_text) for index in range(len(prompts))]
    started = time.perf_counter()
    counts = decode_prompts(
        model, prompts, settings, lambda piece: rows[piece.prompt].push(piece), batch_size=batch_size
    )
    return [
        Answer(
            index=index,
            text="".join(row.parts),
            ended_by=row.ended_by,
            prompt_tokens=count.prompt_tokens,
            tokens=count.tokens,
            forwards=count.forwards,
            blocks=count.blocks,
            seconds=row.ended_at - started,
        )
        for index, (row, count) in enumerate(zip(rows, counts, strict=True))
    ]
