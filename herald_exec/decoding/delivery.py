"""What both ways of decoding share: settings, the pieces that they hand over, and where an answer ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from herald_pipeline.decoding.policy import DecodingPolicy
from herald_pipeline.decoding.sampling import Sampler
from herald_pipeline.errors import check_number, raise_problems
from herald_pipeline.model import ModelShape
from herald_pipeline.scheduling.lengths import check_length

FinishReason = Literal["end_token", "length"]


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How to decode.

    Attributes
    ----------
    policy
        Acceptance rule, scheduler and cache rule; its scheduler's block length is B.
    max_new_tokens
        Longest answer, end token not counted.
    temperature, top_p, seed
        Sampling; at temperature 0 nothing is drawn. What a prompt draws depends on the seed and on its index, not on
        the batch.
    end_token_ids
        Tokens that end an answer; the model's own by default.
    method, method_settings
        Where KV lies and how it is selected, by the method's name and its settings; block-causal models only.
    """

    policy: DecodingPolicy
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    end_token_ids: tuple[int, ...] | None = None
    method: str = "dense"
    method_settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_problems(
            [
                check_number(self.max_new_tokens, "max_new_tokens", minimum=1, integer=True),
                check_number(self.seed, "seed", minimum=0, integer=True),
            ]
        )

    @property
    def block_length(self) -> int:
        """B."""
        return self.policy.blocks.block_length

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "decoder": self.policy.decoder,
            "rule": repr(self.policy.rule),
            "scheduler": self.policy.scheduler,
            "cache": self.policy.cache,
            "block_length": self.block_length,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "method": self.method,
            **self.method_settings,
        }

    def sampler(self, mask_token_id: int) -> Sampler:
        """Sampler that never chooses MASK."""
        return Sampler(temperature=self.temperature, top_p=self.top_p, mask_token_id=mask_token_id)


class Piece(NamedTuple):
    """Tokens of a prompt's answer that are final, in order; ``finished`` says why no more will come."""

    prompt: int
    tokens: list[int]
    finished: FinishReason | None = None


OnPiece = Callable[[Piece], bool]
"""Takes a piece; returns whether the answer ends with it (a stop word was found)."""


@dataclass(slots=True)
class RowStatistics:
    """Counts of one answer: forwards it took part in after prefill, blocks completed, tokens delivered."""

    prompt_tokens: int
    forwards: int = 0
    blocks: int = 0
    tokens: int = 0


class Delivery:
    """Hands over the tokens of a set of answers, each cut at its first end token and at the longest length allowed.

    Attributes
    ----------
    statistics
        One :class:`RowStatistics` a prompt, in order.
    """

    def __init__(
        self, shape: ModelShape, prompts: Sequence[Sequence[int]], settings: DecodeSettings, on_piece: OnPiece
    ) -> None:
        ends = settings.end_token_ids
        self._ends = frozenset(shape.eos_token_ids if ends is None else ends)
        self._longest = settings.max_new_tokens
        self._on_piece = on_piece
        self.statistics = [RowStatistics(prompt_tokens=len(prompt)) for prompt in prompts]

    def deliver(self, index: int, tokens: list[int], *, last: bool = False) -> bool:
        """Hand over newly final tokens of prompt ``index``; whether its answer ends here.

        ``last``: no positions are left after these.
        """
        statistics = self.statistics[index]
        room = self._longest - statistics.tokens
        end = next((i for i, token in enumerate(tokens) if token in self._ends), None)
        finished: FinishReason | None = "length" if last or len(tokens) >= room else None
        if end is not None and end <= room:
            tokens, finished = tokens[:end], "end_token"
        tokens = tokens[:room]
        statistics.tokens += len(tokens)
        stop = self._on_piece(Piece(index, tokens, finished))
        return stop or finished is not None


def prompt_problem(shape: ModelShape, settings: DecodeSettings, index: int, prompt: Sequence[int]) -> str | None:
    """Why a prompt cannot run: empty, ids outside the vocabulary, or more positions than the model has."""
    if not prompt:
        return f"prompt {index} is empty; give it at least one token"
    outside = [token for token in prompt if not 0 <= token < shape.vocab_size]
    if outside:
        return f"prompt {index}: token id {outside[0]} is outside the vocabulary of {shape.vocab_size}"
    return check_length(
        len(prompt), settings.max_new_tokens, settings.block_length, shape.max_positions, f"request {index}"
    )
